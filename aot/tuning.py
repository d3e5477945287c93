# SPDX-License-Identifier: Apache-2.0
"""Tuning numbers of the kernels. A comment gives the measurement behind each number, or says that there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..layout import LAYOUTS


@dataclass(frozen=True)
class DecodeScoreTuning:
    """Shape of the decode scorer: a CTA has ``warps`` warps, and each warp has a ring of ``stages`` key chunks.

    Each tuple is indexed by the number of tiles of 8 query rows, 1 to 4. Registers limit the warps. ``list_warps`` and
    ``list_stages`` belong to the scorer of the fused chain, whose lists need shared memory too.
    """

    warps: tuple[int, int, int, int]
    stages: tuple[int, int, int, int]
    list_warps: tuple[int, int, int, int]
    list_stages: tuple[int, int, int, int]
    chunk_rows: int = 32


# All architectures convert keys to FP16, which makes the sums exact. Conversion is faster than memory. Computed, not
# measured: for 16 keys (2 KB), a warp does 32 conversions, and 8 products with each tile of query rows. A
# multiprocessor that converts 16 lanes per clock, as on sm_89, converts 32 bytes per clock: 3.8 TB/s on an L4, whose
# memory reads 0.3 TB/s, and 10 TB/s on an RTX 4090, whose memory reads 1.0 TB/s. Products take longest at query length
# 8. If a quarter of a multiprocessor takes 32 clocks per product, as on GeForce, that is 8 bytes per clock: 2.6 TB/s on
# an RTX 4090, and 3.3 TB/s on an RTX 5090, whose memory reads 1.8 TB/s.

# 12 warps x 2 stages x 4 KB = 96 KB of keys in flight per SM. Measured in one run on an H200 with 32 x 128K, P128-TP4,
# cold: 33.8 us, and 36.4 us with 8 x 3. 16 x 2 reads as fast (33.8 us), but leaves no registers for CTAs of the
# publisher to wait on the same SM, so the chain takes 39.3 us instead of 37.4 us. At query length 8: 37.6 us, and 41.6
# us with 8 x 3.
_LARGE = DecodeScoreTuning(
    warps=(12, 12, 12, 12), stages=(2, 2, 2, 2), list_warps=(12, 12, 12, 8), list_stages=(2, 2, 2, 3)
)
_SMALL = DecodeScoreTuning(warps=(8, 8, 6, 4), stages=(2, 2, 2, 2), list_warps=(8, 6, 4, 4), list_stages=(2, 2, 2, 2))
_BY_ARCHITECTURE = {
    "sm_90a": _LARGE,
    # The same shape, because these GPUs have the same 227 KB of shared memory. Not measured.
    "sm_100a": _LARGE,
    "sm_103a": _LARGE,
    "sm_107a": _LARGE,
    "sm_110a": _LARGE,
    # 99 KB of shared memory per CTA. Not measured.
    "sm_89": _SMALL,
    "sm_120a": _SMALL,
    "sm_121a": _SMALL,
}
DECODE_SCORE = {(arch, layout): tuning for arch, tuning in _BY_ARCHITECTURE.items() for layout in LAYOUTS}
"""Shape of the decode scorer by (architecture, layout)."""


@dataclass(frozen=True)
class SelectTuning:
    """Threads per CTA of the publisher and of the prefill selection.

    Narrow kernels take rows of up to 1024 columns, wide kernels take longer rows. A CTA of the publisher takes one row,
    and so does a wide CTA of the prefill selection. In a narrow CTA of the prefill selection, each warp takes one row.

    Registers per thread are limited so that ``wide_ctas`` wide CTAs of the publisher, or ``prefill_narrow_ctas`` narrow
    CTAs of the selection, fit on a multiprocessor. In a decode merge, ``merge_share`` threads count one candidate.
    """

    narrow: int
    wide: int
    wide_ctas: int
    prefill_narrow: int
    prefill_narrow_ctas: int
    prefill_wide: int
    merge_share: int


# Measured on an H200.
#
# Publisher: 64 tokens x 1024 columns take 3.0 us, 256 tokens x 8192 columns take 14.7 us. With 128 and 256 threads, 256
# tokens x 1024 columns took 5.2 us instead of 6.5 us, but the chain of one token took 0.1 to 0.3 us longer.
#
# Prefill selection, 8192 tokens x 4 heads: 1024 columns take 45 us, 8192 columns take 267 us. With 512 threads per row,
# the latter took 367 us.
_SELECT = SelectTuning(
    narrow=256, wide=512, wide_ctas=3, prefill_narrow=256, prefill_narrow_ctas=5, prefill_wide=256, merge_share=4
)
# Threads spill with the registers of five CTAs, and on sm_120a with those of three wide CTAs of the publisher. Not
# measured.
_FOUR = replace(_SELECT, prefill_narrow_ctas=4)
_TWO = replace(_FOUR, wide_ctas=2)
SELECT = {**dict.fromkeys(_BY_ARCHITECTURE, _FOUR), "sm_90a": _SELECT, "sm_120a": _TWO, "sm_121a": _TWO}
"""Shape of publisher and prefill selection by architecture."""


@dataclass(frozen=True)
class PrefillScoreForm:
    """Shape of a prefill scorer's CTA. ``stages`` key tiles of 16 KB are in shared memory at a time.

    A row of lists has room for ``room`` candidates. On sm_90a, threads that multiply and other threads have different
    numbers of registers.
    """

    threads: int
    stages: int
    room: int = 0
    multiply_registers: int = 0
    other_registers: int = 0


@dataclass(frozen=True)
class PrefillScoreTuning:
    """Shapes of the prefill scorers: they write scores or keep lists, and accumulate fast or exactly.

    Lists take ``list_columns`` score columns at a time.
    """

    scores: PrefillScoreForm
    lists: PrefillScoreForm
    exact_scores: PrefillScoreForm
    exact_lists: PrefillScoreForm
    list_columns: int

    def form(self, *, lists: bool, exact: bool) -> PrefillScoreForm:
        """Return the shape of one scorer."""
        if exact:
            return self.exact_lists if lists else self.exact_scores
        return self.lists if lists else self.scores


# As many stages as fit. The registers of 640 threads with 96 each are divided so that threads that multiply get as many
# as possible. Measured on an H200 with 8192 tokens of 128K, P128-TP2, P128-TP4, P256-TP2, P256-TP4: 1304, 1236, 1382,
# 1292 TFLOP/s, and 654, 633, 658, 647 TFLOP/s with exact accumulation.
_WGMMA = PrefillScoreTuning(
    scores=PrefillScoreForm(threads=640, stages=9, multiply_registers=112, other_registers=32),
    lists=PrefillScoreForm(threads=640, stages=5, room=32, multiply_registers=112, other_registers=32),
    exact_scores=PrefillScoreForm(threads=640, stages=4, multiply_registers=104, other_registers=64),
    exact_lists=PrefillScoreForm(threads=640, stages=2, room=24, multiply_registers=104, other_registers=64),
    list_columns=16,
)
_MMA = PrefillScoreTuning(*(PrefillScoreForm(threads=256, stages=2, room=20),) * 4, list_columns=8)
PREFILL_SCORE = {**dict.fromkeys(_BY_ARCHITECTURE, _MMA), "sm_90a": _WGMMA}
"""Shapes of the prefill scorers by architecture. The shapes for ``mma.sync`` are not measured."""
