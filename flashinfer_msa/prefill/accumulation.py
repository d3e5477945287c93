# SPDX-License-Identifier: Apache-2.0
"""How prefill scorers add up products."""

from __future__ import annotations

from typing import Any

ACCUMULATIONS = ("tensor", "exact")
"""``tensor``: as the tensor core does with e4m3. ``exact``: as FP16, to the rounding of FP32 sums."""


def is_exact(accumulation: Any) -> bool:
    """Whether ``accumulation`` is ``"exact"``; ``ValueError`` for one that does not exist."""
    if not isinstance(accumulation, str) or accumulation not in ACCUMULATIONS:
        raise ValueError(f"accumulation must be one of {ACCUMULATIONS}, was {accumulation!r}")
    return accumulation == "exact"
