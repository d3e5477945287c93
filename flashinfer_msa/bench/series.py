# SPDX-License-Identifier: Apache-2.0
"""Selects the rows that each plot shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .rows import Row, case_of, of_job


def roofline_rows(rows: Sequence[Row]) -> list[Row]:
    """Return our scorer's rows, without the ragged batch."""
    return _cold_if_any(of_job(rows, "decode_score"))


def latency_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the chain's and the peers' rows of the shortest queries, and the streaming reads."""
    chains = _cold_if_any([row for row in rows if row["job"] == "decode_chain"])
    shortest = min((row["query_len"] for row in chains), default=1)
    chains = [row for row in chains if row["query_len"] == shortest]
    return [*chains, *of_job(rows, "ceiling", "streaming_read")]


def prefill_rate_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the prefill scorer's and the peers' rows, without special cases, and the FP8 matrix product."""
    scores = _cold_if_any([row for row in rows if row["job"] == "prefill_score" and "name" not in row])
    return [*scores, *of_job(rows, "ceiling", "fp8_gemm")]


def peer_rows(rows: Sequence[Row]) -> list[Row]:
    """Return comparisons of whole layers with the peers: the decode chain, and prefill without the exchange.

    A peer's prefill is the sum of its scorer and its selection, which were measured separately. It has no merge.
    """
    decode = [row for row in rows if row["job"] == "decode_chain" and "peer" in row]
    return [*_cold_if_any(decode), *_cold_if_any(_whole_prefill(rows))]


def _whole_prefill(rows: Sequence[Row]) -> list[Row]:
    steps: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if "peer" in row and row["job"] in ("prefill_score", "prefill_select"):
            steps.setdefault((row["peer"], *case_of({**row, "job": ""})), {})[row["job"]] = row["peer_us"]
    peers = dict.fromkeys(peer for peer, *_ in steps)
    found: list[Row] = []
    for own in of_job(rows, "prefill_chain"):
        for peer in peers:
            parts = steps.get((peer, *case_of({**own, "job": ""})), {})
            if len(parts) == 2:
                us = sum(parts.values())
                found.append({**own, "peer": peer, "peer_us": us, "speedup": us / own["us"]})
    return found


SERIES: dict[str, Callable[[Sequence[Row]], list[Row]]] = {
    "roofline": roofline_rows,
    "latency": latency_rows,
    "prefill": prefill_rate_rows,
    "peers": peer_rows,
}
"""The functions that select rows, by the name of the plot."""


def _cold_if_any(rows: list[Row]) -> list[Row]:
    """Return the cold rows, or the warm ones if there are no cold ones."""
    return [row for row in rows if row["cold"]] or rows
