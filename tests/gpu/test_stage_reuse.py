# SPDX-License-Identifier: Apache-2.0
"""Shared-memory stages that are refilled while other stages are read: every launch on a GPU gives exact scores."""

from __future__ import annotations

import pytest
from reuse_checks import QUERIES, Repeats, decode_mismatches, prefill_mismatches
from simulated_group import SMALL

from flashinfer_msa.layout import Layout
from flashinfer_msa.prefill.accumulation import ACCUMULATIONS

# Sanitizers check the same kernels in eager launches.
WAYS = [False] if SMALL else [False, True]


def ways(graph: bool) -> str:
    """Return the name of a way to launch."""
    return "graph" if graph else "eager"


@pytest.mark.parametrize("graph", WAYS, ids=ways)
def test_decode_ring(layout: Layout, graph: bool) -> None:
    """Requests are long, so a warp refills each ring stage dozens of times. Each query length has its own kernel."""
    repeats = Repeats(launches=4 if SMALL else 248, graph=graph)
    done = 0
    for decode_query_len in (2, 4, 6, 8):
        wrong, launches = decode_mismatches(
            layout,
            requests=2 if SMALL else 12,
            length=5000 if SMALL else 150_000,
            decode_query_len=decode_query_len,
            repeats=repeats,
            device="cuda",
            backend="cake",
        )
        assert wrong == 0, f"{wrong} scores in {launches} launches with {decode_query_len} query tokens"
        assert launches == repeats.launches + QUERIES
        done += launches
    assert SMALL or done >= 1000


@pytest.mark.parametrize("graph", WAYS, ids=ways)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_prefill_query_stage(layout: Layout, accumulation: str, graph: bool) -> None:
    """Each CTA gets many items: 8,192 tokens in segments of 8, and each segment has its own query."""
    repeats = Repeats(launches=4 if SMALL else 200, graph=graph)
    wrong, launches = prefill_mismatches(
        layout,
        segments=200 if SMALL else 1024,
        tokens=8,
        length=300 if SMALL else 700,
        accumulation=accumulation,
        repeats=repeats,
        device="cuda",
        backend="cake",
    )
    assert wrong == 0, f"{wrong} scores in {launches} launches"
    assert launches == repeats.launches + QUERIES
