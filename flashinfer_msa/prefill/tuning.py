# SPDX-License-Identifier: Apache-2.0
"""Where the indexer prefers the fused prefill chain."""

from __future__ import annotations

from typing import NamedTuple


class PrefillTuning(NamedTuple):
    """``fused``: the fused chain is faster over a step's windows, except those of at most ``short_tokens`` tokens."""

    fused: bool = False
    short_tokens: int = 0


# On an H200, the fused chain is slower than scorer and selection in every window of docs/benchmarks.md. It takes 1.3 to
# 1.5 times as long with 8192 tokens of 128K, and several times as long with few tokens. Sorting candidates costs the
# scorer's warps more than the selection costs, which reads scores from the L2 cache where they fit.
PREFILL: dict[tuple[str, str], PrefillTuning] = {
    ("sm_90a", "p128_tp2"): PrefillTuning(),
    ("sm_90a", "p128_tp4"): PrefillTuning(),
    ("sm_90a", "p256_tp2"): PrefillTuning(),
    ("sm_90a", "p256_tp4"): PrefillTuning(),
}
"""Measured entries, by architecture and layout."""


def prefill_tuning(arch: str, layout: str) -> PrefillTuning:
    """The entry of an architecture and a layout's name. Without an entry, the fused chain is never preferred."""
    return PREFILL.get((arch, layout), PrefillTuning())
