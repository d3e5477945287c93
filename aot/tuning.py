# SPDX-License-Identifier: Apache-2.0
"""Tuning numbers of the kernels. Comments name the measurement that set a number, or say that there was none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..layout import LAYOUTS


@dataclass(frozen=True)
class DecodeScoreTuning:
    """Shape of the decode scorer: a CTA of ``warps`` warps, each with its own ring of ``stages`` key chunks.

    Warps and stages are by tiles of 8 query rows, 1 to 4; registers bound the warps. ``list_warps`` and ``list_stages``
    are those of the fused chain's scorer, whose lists take shared memory too.
    """

    warps: tuple[int, int, int, int]
    stages: tuple[int, int, int, int]
    list_warps: tuple[int, int, int, int]
    list_stages: tuple[int, int, int, int]
    chunk_rows: int = 32


# Keys are converted to FP16 everywhere, so that sums are exact: memory is slower. For 16 keys, 2 KB, a warp has 32
# conversions, and 8 products with each tile of query rows. Where a multiprocessor converts in 16 lanes a clock, as on
# sm_89, that is 32 bytes a clock: 3.8 TB/s on an L4, whose memory reads 0.3 TB/s, 10 TB/s on an RTX 4090 (1.0 TB/s).
# Products take longest at query length 8: where a quarter of a multiprocessor takes 32 clocks for one, as on GeForce, 8
# bytes a clock, which is 2.6 TB/s on an RTX 4090 and 3.3 TB/s on an RTX 5090 (1.8 TB/s). Computed, not measured.

# 12 warps x 2 stages x 4 KB = 96 KB of keys in flight per SM. On an H200, 32 x 128K, P128-TP4, cold, in one run: 33.8
# us, and 36.4 us with 8 x 3. 16 x 2 reads as fast (33.8 us), but leaves no registers for the publisher's CTAs to wait
# beside it: the chain takes 39.3 us instead of 37.4 us. At query length 8, 37.6 us, and 41.6 us with 8 x 3.
_LARGE = DecodeScoreTuning(
    warps=(12, 12, 12, 12), stages=(2, 2, 2, 2), list_warps=(12, 12, 12, 8), list_stages=(2, 2, 2, 3)
)
_SMALL = DecodeScoreTuning(warps=(8, 8, 6, 4), stages=(2, 2, 2, 2), list_warps=(8, 6, 4, 4), list_stages=(2, 2, 2, 2))
_BY_ARCHITECTURE = {
    "sm_90a": _LARGE,
    # The same shape; these GPUs have the same 227 KB of shared memory. Not measured.
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
    """Threads of a CTA of the publisher and of the prefill selection, for rows of up to 1024 columns and for wider.

    A CTA of the publisher takes a row. So does a wide one of the prefill selection; in a narrow one, each warp does.
    Registers of threads are bounded so that ``wide_ctas`` of the publisher's wide ones fit a multiprocessor, and
    ``prefill_narrow_ctas`` of the selection's narrow ones. ``merge_share`` threads share in the counting of a candidate
    in a decode merge.
    """

    narrow: int
    wide: int
    wide_ctas: int
    prefill_narrow: int
    prefill_narrow_ctas: int
    prefill_wide: int
    merge_share: int


# On an H200, publisher, 64 tokens x 1024 columns: 3.0 us; 256 tokens x 8192 columns: 14.7 us. With 128 and 256 threads,
# 256 tokens x 1024 columns took 5.2 us instead of 6.5 us, but the chain of one token 0.1 to 0.3 us longer.
#
# Prefill selection, 8192 tokens x 4 heads: 1024 columns 45 us, 8192 columns 267 us, and 367 us with 512 threads a row.
_SELECT = SelectTuning(
    narrow=256, wide=512, wide_ctas=3, prefill_narrow=256, prefill_narrow_ctas=5, prefill_wide=256, merge_share=4
)
# With the registers of five CTAs, or of three wide ones of the publisher on sm_120a, threads would spill. Not measured.
_FOUR = replace(_SELECT, prefill_narrow_ctas=4)
_TWO = replace(_FOUR, wide_ctas=2)
SELECT = {**dict.fromkeys(_BY_ARCHITECTURE, _FOUR), "sm_90a": _SELECT, "sm_120a": _TWO, "sm_121a": _TWO}
"""Shape of publisher and prefill selection by architecture."""


@dataclass(frozen=True)
class PrefillScoreForm:
    """Shape of a prefill scorer's CTA: threads, and key tiles of 16 KB that are in shared memory at a time.

    A row of lists has room for ``room`` candidates. On sm_90a, threads that multiply and the others have registers of
    their own number.
    """

    threads: int
    stages: int
    room: int = 0
    multiply_registers: int = 0
    other_registers: int = 0


@dataclass(frozen=True)
class PrefillScoreTuning:
    """Shapes of the prefill scorers: those that write scores or keep lists, with either accumulation.

    Lists take ``list_columns`` score columns at a time.
    """

    scores: PrefillScoreForm
    lists: PrefillScoreForm
    exact_scores: PrefillScoreForm
    exact_lists: PrefillScoreForm
    list_columns: int

    def form(self, *, lists: bool, exact: bool) -> PrefillScoreForm:
        """The shape of one of them."""
        if exact:
            return self.exact_lists if lists else self.exact_scores
        return self.lists if lists else self.scores


# As many stages as fit, and as many registers for those that multiply as 640 threads of 96 each leave them. On an H200,
# 8192 tokens of 128K, P128-TP2, -TP4, P256-TP2, -TP4: 1304, 1236, 1382, 1292 TFLOP/s, and 654, 633, 658, 647 exactly.
_WGMMA = PrefillScoreTuning(
    scores=PrefillScoreForm(threads=640, stages=9, multiply_registers=112, other_registers=32),
    lists=PrefillScoreForm(threads=640, stages=5, room=32, multiply_registers=112, other_registers=32),
    exact_scores=PrefillScoreForm(threads=640, stages=4, multiply_registers=104, other_registers=64),
    exact_lists=PrefillScoreForm(threads=640, stages=2, room=24, multiply_registers=104, other_registers=64),
    list_columns=16,
)
_MMA = PrefillScoreTuning(*(PrefillScoreForm(threads=256, stages=2, room=20),) * 4, list_columns=8)
PREFILL_SCORE = {**dict.fromkeys(_BY_ARCHITECTURE, _MMA), "sm_90a": _WGMMA}
"""Shapes of the prefill scorers by architecture. Those of ``mma.sync`` are not measured."""
