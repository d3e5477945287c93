#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the benchmark rows of a GPU record. Prints each row, and writes all rows so far after each step.

scripts/gpu_bench.py FILE                                           on one GPU
torchrun --nproc-per-node 2 scripts/gpu_bench.py --group FILE       with ranks that have a GPU each
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashinfer_msa.bench import Jobs, Row, find_peers, write_rows
from flashinfer_msa.bench.group import Ranks, group_steps
from flashinfer_msa.layout import LAYOUTS


@click.command()
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--group", is_flag=True, help="Measure the ranks that torchrun started, one per GPU. Rank 0 writes.")
@click.option(
    "--peers",
    type=click.Choice(["all", "decode", "none"]),
    default="all",
    envvar="PEERS",
    show_default=True,
    help="Jobs to compare with the installed peers. vLLM's prefill takes a minute to compile.",
)
def main(output: Path, group: bool, peers: str) -> None:
    """Measure all jobs and write the rows to OUTPUT."""
    rows: list[Row] = []
    ranks = Ranks.join() if group else None
    is_first = ranks is None or ranks.rank == 0
    found = find_peers(partial(click.echo, err=True)) if is_first and peers != "none" else None
    if ranks is None:
        steps = Jobs(list(LAYOUTS.values()), found).everything(peers_of_prefill=peers == "all")
    else:
        steps = group_steps(ranks, found)
    for step in steps:
        for row in step.rows():
            rows.append(row)
            if is_first:
                click.echo(json.dumps(row))
        if is_first:
            write_rows(output, rows)
    if ranks is not None:
        ranks.leave()


if __name__ == "__main__":
    main()
