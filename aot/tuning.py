# SPDX-License-Identifier: Apache-2.0
"""Tuning numbers of the kernels, keyed by (architecture, layout). Each line names the measurement that set it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeScoreTuning:
    """Shape of the decode scorer: a CTA of ``warps`` warps, each with its own ring of ``stages`` key chunks.

    Warps and stages are by tiles of 8 query rows, 1 to 4; registers bound the warps.
    """

    warps: tuple[int, int, int, int]
    stages: tuple[int, int, int, int]
    chunk_rows: int = 32


# 12 warps x 2 stages x 4 KB = 96 KB of keys in flight per SM. On an H200, 32 x 128K, P128-TP4, cold: 35.2 us; 36.5 us
# with 16 x 2, 35.8 us with 8 x 3, 40 us with 16 x 3 and 8 x 6: more in flight only queues in the memory system.
_LARGE = DecodeScoreTuning(warps=(12, 12, 12, 8), stages=(2, 2, 2, 3))
_SMALL = DecodeScoreTuning(warps=(8, 8, 6, 4), stages=(2, 2, 2, 2))
_DEFAULT: dict[str, DecodeScoreTuning] = {
    "sm_90a": _LARGE,
    # The same shape; these GPUs have the same 227 KB of shared memory. Not measured.
    "sm_100a": _LARGE,
    "sm_103a": _LARGE,
    # 99 KB of shared memory per CTA. Not measured.
    "sm_89": _SMALL,
    "sm_120a": _SMALL,
}

_BY_LAYOUT: dict[tuple[str, str], DecodeScoreTuning] = {}


def decode_score_tuning(architecture: str, layout: str) -> DecodeScoreTuning:
    """Tuning of the decode scorer of ``layout`` on ``architecture``."""
    return _BY_LAYOUT.get((architecture, layout), _DEFAULT[architecture])


@dataclass(frozen=True)
class SelectTuning:
    """Threads of the CTA that takes a row of scores: of up to 1024 columns, and of any width."""

    narrow: int
    wide: int


_SELECT: dict[str, SelectTuning] = dict.fromkeys(_DEFAULT, SelectTuning(narrow=256, wide=512))


def select_tuning(architecture: str) -> SelectTuning:
    """Tuning of the publisher on ``architecture``."""
    return _SELECT[architecture]
