#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The benchmark rows of a GPU record: prints each as it is measured and writes all so far after each step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashinfer_msa.bench import Jobs, find_peers, write_rows
from flashinfer_msa.layout import LAYOUTS


def _report(message: str) -> None:
    click.echo(message, err=True)


@click.command()
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--peers/--no-peers", default=True, help="Measure the peers that are installed too.", show_default=True)
def main(output: Path, peers: bool) -> None:
    """Measure everything and write it to OUTPUT."""
    rows = []
    for step in Jobs(list(LAYOUTS.values()), find_peers(_report) if peers else None).everything():
        for row in step.rows():
            rows.append(row)
            click.echo(json.dumps(row))
        write_rows(output, rows)


if __name__ == "__main__":
    main()
