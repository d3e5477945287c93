#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes README's figures from ``tests/gpu/record.json``; with ``--check``, exits 1 where README does not have them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import gpu_record

from flashinfer_msa.aot.render import tree_digest
from flashinfer_msa.layout import LAYOUTS

README = ROOT / "README.md"
BEGIN, END = "<!-- figures: scripts/readme_tables.py -->", "<!-- end of figures -->"


def keys_text(count: int) -> str:
    """A context length, such as ``128K``."""
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def case_table(scores: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> list[str]:
    """Rows of decode cases, a column a layout: what ``cell`` says of each."""
    cases = dict.fromkeys((row["batch"], row["ctx"], row["query_len"], row["cold"]) for row in scores)
    titles = [layout.title for layout in LAYOUTS.values()]
    lines = [
        f"| batch x context, query length | {' | '.join(titles)} |",
        f"|---|{'---|' * len(titles)}",
    ]
    for batch, context, query_len, cold in cases:
        cells = []
        for title in titles:
            case = (title, batch, context, query_len, cold)
            row = next(x for x in scores if (x["layout"], x["batch"], x["ctx"], x["query_len"], x["cold"]) == case)
            cells.append(cell(row))
        label = f"{batch} x {keys_text(context)}, {query_len}{'' if cold else ', warm'}"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def decode_table(rows: list[dict[str, Any]]) -> list[str]:
    """The scorer by case and layout: microseconds, and its share of a streaming read of the same bytes."""
    scores = [row for row in rows if row["job"] == "decode_score"]
    return case_table(scores, lambda row: f"{row['us']:.1f} us ({row['ceiling_ratio']:.0%})")


def chain_table(rows: list[dict[str, Any]]) -> list[str]:
    """Both decode chains by case and layout."""
    keys = ("layout", "batch", "ctx", "query_len", "cold")
    fused = {tuple(row[k] for k in keys): row["us"] for row in rows if row["job"] == "decode_fused_chain"}
    chains = [row for row in rows if row["job"] == "decode_chain"]
    return case_table(chains, lambda row: f"{row['us']:.1f} us, fused {fused[tuple(row[k] for k in keys)]:.1f}")


def selection_table(rows: list[dict[str, Any]]) -> list[str]:
    """Publisher and merge by case."""
    lines = ["| | tokens x columns | time |", "|---|---|---|"]
    names = {"select_publish": "select + publish", "merge": "merge"}
    for row in rows:
        if row["job"] in names and "heads" not in row:
            world = row["layout"].split("-")[1]
            lines.append(
                f"| {names[row['job']]}, {world} | {row['tokens']} x {row['ctx'] // 128} | {row['us']:.1f} us |"
            )
    return lines


def prefill_table(rows: list[dict[str, Any]]) -> list[str]:
    """Scorer, selection, merge and chain by case and layout."""
    lines = [
        "| tokens of context | layout | plan | score | select | merge | score, select and merge |",
        "|---|---|---|---|---|---|---|",
    ]
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "heads" in row and "name" not in row:
            cases.setdefault((row["tokens"], row["ctx"], row["layout"]), {})[row["job"]] = row
    for (tokens, context, layout), jobs in cases.items():
        score = jobs["prefill_score"]
        cells = [f"{tokens} of {keys_text(context)}", layout, f"{jobs['prefill_plan']['us']:.1f} us"]
        cells.append(f"{score['us']:.0f} us: {score['tflops']:.0f} TFLOP/s ({score['ceiling_ratio']:.0%})")
        cells += [f"{jobs[job]['us']:.0f} us" for job in ("prefill_select", "merge", "prefill_chain")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def figures(record: dict[str, Any]) -> str:
    """README's section between the markers."""
    single = record.get("single")
    if single is None:
        return "No run on a GPU is recorded yet."
    tests, errors = single["tests"], sum(single["sanitizer"].values())
    lines = [
        f"On an {single['gpu']} (driver {single['driver']}, torch {single['torch']}, {single['date']}): "
        f"{tests['passed']} GPU tests passed, {tests['failed']} failed, {tests['skipped']} skipped; "
        f"{', '.join(single['sanitizer'])}: {errors} errors.",
    ]
    if single["source_digest"] != tree_digest(gpu_record.ARCHITECTURE):
        reason = record.get("pending", {}).get("reason", "no reason is given")
        lines += ["", f"**These figures are of earlier sources.** The run of the present ones is pending: {reason}."]
    lines += [
        "",
        "Decode scorer, one rank, in a CUDA graph, over keys that are not in the L2 cache unless marked warm. In",
        "brackets, the time of a streaming read of the same bytes (keys read and scores written) in the same run over",
        "the scorer's; the scorer is launched as a programmatic dependent, as the indexer does, and the read is not:",
        "",
        *decode_table(single["bench"]),
        "",
        "The decode chain of one rank (score, select and publish, merge) and the fused one, with the peers' rows",
        "already there. A copy that sets the counters back before each is measured alone and subtracted:",
        "",
        *chain_table(single["bench"]),
        "",
        "Ready scores published, and arrived rows merged, launched without overlap:",
        "",
        *selection_table(single["bench"]),
    ]
    if any(row["job"] == "prefill_score" for row in single["bench"]):
        lines += [
            "",
            "Prefill window of one segment, one rank, all four heads, cold keys, without the exchange. In brackets,",
            "the share of an FP8 matrix product's rate (cuBLAS, 8192 x 8192 x 8192) in the same run:",
            "",
            *prefill_table(single["bench"]),
        ]
    return "\n".join(lines)


@click.command()
@click.option("--check", is_flag=True, help="Exit 1 unless README has the record's figures.")
def main(check: bool) -> None:
    """Write README's figures from the GPU record, or check them."""
    text = README.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = f"{head}{BEGIN}\n\n{figures(gpu_record.read())}\n\n{END}{tail}"
    if check and text != wanted:
        raise click.ClickException("README's figures are not the record's: run scripts/readme_tables.py")
    if text != wanted:
        README.write_text(wanted)


if __name__ == "__main__":
    main()
