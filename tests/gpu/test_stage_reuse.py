# SPDX-License-Identifier: Apache-2.0
"""Shared-memory stages that copies refill while others read them: exact scores, launch after launch, on a GPU."""

from __future__ import annotations

import pytest
from reuse_checks import QUERIES, Repeats, decode_mismatches, prefill_mismatches
from simulated_group import SMALL

from flashinfer_msa.accumulation import ACCUMULATIONS
from flashinfer_msa.layout import Layout

# A sanitizer sees the same kernels launched by eager code.
WAYS = [False] if SMALL else [False, True]


def ways(graph: bool) -> str:
    """Name of a way to launch."""
    return "graph" if graph else "eager"


@pytest.mark.parametrize("graph", WAYS, ids=ways)
def test_decode_ring(layout: Layout, graph: bool) -> None:
    """Long requests: a warp refills each stage of its ring dozens of times. Each query length has its own kernel."""
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
    """Many items per CTA: 8,192 tokens in segments of 8, each of which brings a query of its own."""
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
