# SPDX-License-Identifier: Apache-2.0
"""Tuning numbers of the kernels, keyed by (architecture, layout). Each line names the measurement that set it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeScoreTuning:
    """Shape of the decode scorer: a CTA of ``warps`` warps, each with its own ring of ``stages`` key chunks."""

    warps: int
    stages: int
    chunk_rows: int


_DEFAULT: dict[str, DecodeScoreTuning] = {
    # 192 KB of keys in flight per SM, twice the latency-bandwidth product of an H200 SM (about 40 B/ns x 2 us).
    "sm_90a": DecodeScoreTuning(warps=8, stages=6, chunk_rows=32),
    # The same shape; these GPUs have the same 227 KB of shared memory. Not measured.
    "sm_100a": DecodeScoreTuning(warps=8, stages=6, chunk_rows=32),
    "sm_103a": DecodeScoreTuning(warps=8, stages=6, chunk_rows=32),
    # 99 KB of shared memory per CTA. Not measured.
    "sm_89": DecodeScoreTuning(warps=8, stages=2, chunk_rows=32),
    "sm_120a": DecodeScoreTuning(warps=8, stages=2, chunk_rows=32),
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
