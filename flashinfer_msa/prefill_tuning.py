# SPDX-License-Identifier: Apache-2.0
"""Where the facade prefers the fused prefill chain."""

from __future__ import annotations

from typing import NamedTuple


class PrefillTuning(NamedTuple):
    """``fused``: the fused chain is faster over a step's windows. ``short_tokens``: but not in windows so short."""

    fused: bool = False
    short_tokens: int = 0


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
