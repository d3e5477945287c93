# SPDX-License-Identifier: Apache-2.0
"""Which rows each plot shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .rows import Row, of_job


def roofline_rows(rows: Sequence[Row]) -> list[Row]:
    """Our scorer's rows, without the ragged batch."""
    return _cold_if_any(of_job(rows, "decode_score"))


def latency_rows(rows: Sequence[Row]) -> list[Row]:
    """The chain's rows of the shortest queries with those of the peers, and the streaming reads."""
    chains = _cold_if_any([row for row in rows if row["job"] == "decode_chain"])
    shortest = min((row["query_len"] for row in chains), default=1)
    chains = [row for row in chains if row["query_len"] == shortest]
    return [*chains, *of_job(rows, "ceiling", "streaming_read")]


def prefill_rate_rows(rows: Sequence[Row]) -> list[Row]:
    """The prefill scorer's rows with those of the peers, without special cases, and the FP8 matrix product."""
    scores = _cold_if_any([row for row in rows if row["job"] == "prefill_score" and "name" not in row])
    return [*scores, *of_job(rows, "ceiling", "fp8_gemm")]


SERIES: dict[str, Callable[[Sequence[Row]], list[Row]]] = {
    "roofline": roofline_rows,
    "latency": latency_rows,
    "prefill": prefill_rate_rows,
}
"""By the name of the plot."""


def _cold_if_any(rows: list[Row]) -> list[Row]:
    """The cold rows; the warm ones where there are no others."""
    return [row for row in rows if row["cold"]] or rows
