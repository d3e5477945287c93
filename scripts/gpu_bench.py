#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The benchmark rows of a GPU record: prints each as it is measured and writes all so far after each step."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashinfer_msa.bench import Jobs, Row, find_peers, write_rows
from flashinfer_msa.layout import LAYOUTS


@click.command()
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--peers",
    type=click.Choice(["all", "decode", "none"]),
    default="all",
    envvar="PEERS",
    show_default=True,
    help="Jobs beside which the peers that are installed are measured; vLLM's prefill takes a minute to compile.",
)
def main(output: Path, peers: str) -> None:
    """Measure everything and write it to OUTPUT."""
    rows: list[Row] = []
    found = None if peers == "none" else find_peers(partial(click.echo, err=True))
    for step in Jobs(list(LAYOUTS.values()), found).everything(peers_of_prefill=peers == "all"):
        for row in step.rows():
            rows.append(row)
            click.echo(json.dumps(row))
        write_rows(output, rows)


if __name__ == "__main__":
    main()
