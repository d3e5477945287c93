# SPDX-License-Identifier: Apache-2.0
"""Where the facade prefers the fused prefill chain."""

from __future__ import annotations

from typing import NamedTuple


class PrefillTuning(NamedTuple):
    """``fused``: the fused chain is faster over a step's windows. ``short_tokens``: but not in windows so short."""

    fused: bool = False
    short_tokens: int = 0


# On an H200, the fused chain takes 1.3 times as long as scorer and selection with 8192 tokens of 128K in P128-TP2 and
# P256-TP2, 1.5 times in the others', and more with fewer tokens or keys: sorting candidates costs the scorer's warps
# more than the selection does, which reads scores from the L2 cache where they fit it. README's table has all windows.
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
