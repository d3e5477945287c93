# SPDX-License-Identifier: Apache-2.0
"""How prefill scorers sum products."""

from __future__ import annotations

from typing import Any

ACCUMULATIONS = ("tensor", "exact")
"""``tensor`` sums as the tensor core does with e4m3. ``exact`` multiplies FP16 and is exact to FP32 rounding."""


def is_exact(accumulation: Any) -> bool:
    """Return whether ``accumulation`` is ``"exact"``. Raise ``ValueError`` for an unknown value."""
    if not isinstance(accumulation, str) or accumulation not in ACCUMULATIONS:
        raise ValueError(f"accumulation must be one of {ACCUMULATIONS}, was {accumulation!r}")
    return accumulation == "exact"
