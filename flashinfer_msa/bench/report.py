# SPDX-License-Identifier: Apache-2.0
"""Prints rows as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from .rows import Row, case_of, keys_text, own_rows

TITLES = {
    "ceiling": "Ceilings of this GPU",
    "decode_score": "Decode scorer, beside a streaming pass over the same bytes",
    "select_publish": "Select and publish, of ready scores into ready rows",
    "merge": "Merge, of rows that have arrived",
    "decode_chain": "Decode chain: score, select and publish, merge",
    "decode_fused_chain": "Fused decode chain",
    "prefill_plan": "Prefill planner",
    "prefill_score": "Prefill scorer, beside an FP8 matrix product; the exact one beside an FP16 one",
    "prefill_select": "Prefill selection; of random scores beside a streaming read of them",
    "prefill_chain": "Prefill chains: score, select and merge, without the exchange, and score and select alone",
    "prefill_fused": "Fused prefill chain, beside score and select as two launches",
    "host": "Host time",
    "load": "What an installed package takes before its first call",
}
"""Title of each job's table, in order."""

_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("name", "", lambda row: row["name"]),
    ("layout", "layout", lambda row: row["layout"]),
    ("batch", "batch", lambda row: str(row["batch"])),
    ("tokens", "tokens", lambda row: str(row["tokens"])),
    ("ctx", "context", lambda row: keys_text(row["ctx"])),
    ("query_len", "query\nlength", lambda row: str(row["query_len"])),
    ("cold", "keys", lambda row: "cold" if row["cold"] else "warm"),
    ("bytes", "MB", lambda row: f"{row['bytes'] / 1e6:.1f}"),
    ("us", "us", lambda row: f"{row['us']:.2f}"),
    ("tb_s", "TB/s", lambda row: f"{row['tb_s']:.2f}"),
    ("tflops", "TFLOP/s", lambda row: f"{row['tflops']:.0f}"),
    ("ceiling_ratio", "of the\nceiling", lambda row: f"{row['ceiling_ratio']:.0%}"),
    ("separate_ratio", "of the\nseparate", lambda row: f"{row['separate_ratio']:.2f}"),
)
"""Key of a row, head of its column, and the text of a cell."""


def where_peers_are_faster(rows: Iterable[Row]) -> str:
    """Return a sentence about where each peer of ``rows`` is faster than this package, or an empty one."""
    counts = count_faster_peers(rows)
    return f"Below 1x the peer is faster: {counts}." if counts else ""


def count_faster_peers(rows: Iterable[Row]) -> str:
    """Return in how many of ``rows`` each peer is faster, with the worst ratio of its time over ours."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if "peer" in row:
            ratios.setdefault(row["peer"], []).append(row["speedup"])
    return ", ".join(f"{peer} {_count_faster(found)}" for peer, found in ratios.items())


def _count_faster(ratios: Sequence[float]) -> str:
    faster = [ratio for ratio in ratios if ratio < 1]
    if not faster:
        return f"nowhere ({len(ratios)} cases)"
    return f"in {len(faster)} of {len(ratios)} cases, at worst {ratio_text(min(faster))}"


def ratio_text(ratio: float) -> str:
    """Return a peer's time over ours as text. A ratio below 1 never reads as 1."""
    return "<1.00x" if 0.995 <= ratio < 1 else f"{ratio:.2f}x"


def print_tables(console: Console, rows: Sequence[Row]) -> None:
    """Print a table per job, with a column per peer: its time over ours."""
    for job, title in TITLES.items():
        of_job = [row for row in rows if row["job"] == job]
        if of_job:
            console.print(f"\n{title}", highlight=False)
            console.print(_table(of_job))


def _table(rows: Sequence[Row]) -> Table:
    ours = own_rows(rows)
    peers = list(dict.fromkeys(row["peer"] for row in rows if "peer" in row))
    speedups = {(row["peer"], case_of(row)): row["speedup"] for row in rows if "peer" in row}
    columns = [(key, head, text) for key, head, text in _COLUMNS if any(key in row for row in ours)]
    if ours[0]["job"] in ("ceiling", "host"):
        columns = [column for column in columns if column[0] != "cold"]
    table = Table(caption=where_peers_are_faster(rows) or None)
    for key, head, _ in columns:
        table.add_column(head, justify="left" if key in ("name", "layout", "cold") else "right")
    for peer in peers:
        table.add_column(f"times\n{peer}", justify="right")
    for row in ours:
        cells = [text(row) if key in row else "" for key, _, text in columns]
        ratios = [speedups.get((peer, case_of(row))) for peer in peers]
        table.add_row(*cells, *("-" if ratio is None else ratio_text(ratio) for ratio in ratios))
    return table
