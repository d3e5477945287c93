# SPDX-License-Identifier: Apache-2.0
"""Where the facade prefers the fused prefill chain."""

from __future__ import annotations

from typing import NamedTuple


class PrefillTuning(NamedTuple):
    """``fused``: the fused chain is faster over a step's windows. ``short_tokens``: but not in windows so short."""

    fused: bool = False
    short_tokens: int = 0


# On an H200, the fused chain is slower than scorer and selection in every window of docs/benchmarks.md: 1.3 to 1.5
# times with 8192 tokens of 128K, several times with few tokens. Sorting candidates costs the scorer's warps more than
# the selection does, which reads scores from the L2 cache where they fit it.
PREFILL: dict[tuple[str, str], PrefillTuning] = {
    ("sm_90a", "p128_tp2"): PrefillTuning(),
    ("sm_90a", "p128_tp4"): PrefillTuning(),
    ("sm_90a", "p256_tp2"): PrefillTuning(),
    ("sm_90a", "p256_tp4"): PrefillTuning(),
}
"""By architecture and layout, where it was measured."""


def prefill_tuning(arch: str, layout: str) -> PrefillTuning:
    """The entry of an architecture and a layout's name; never fused where there is none."""
    return PREFILL.get((arch, layout), PrefillTuning())
