#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks an installation of the wheel beside FlashInfer on a GPU: `gpu_install.py FILE [--wheel WHEEL]`.

FlashInfer's own function must refuse, ours must work under the same name after `register()`, no process may be started,
and the first call must end within half a second of the import. The times are written to FILE as rows of the GPU record.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import click
import torch

LIMIT_SECONDS = 0.5
"""Limit from the import of this package to the end of the first call."""


def prepare(module: Any, rank: int) -> Any:
    """Create one rank's indexer, as a server does."""
    return module.prepare_msa_icp_indexer(
        world_size=2,
        rank=rank,
        num_index_heads=4,
        page_size=128,
        init_blocks=0,
        local_blocks=1,
        max_decode_tokens=256,
        max_decode_query_len=8,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        max_model_len=131072,
        num_sparse_layers=4,
        device=torch.device("cuda", 0),
        backend="cake",
    )


def forbid_processes() -> None:
    """Make every later start of a process, such as a compiler, fail."""

    def refuse(*arguments: Any, **more: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]


def compare_decode(indexers: list[Any]) -> int:
    """Decode as every rank, require equality with the brute force, and return the number of compared rows."""
    from flashinfer_msa.comm import local_comm
    from flashinfer_msa.layout import LAYOUTS
    from flashinfer_msa.testing.problems import DecodeProblem, brute_force_top16, compare

    problem = DecodeProblem.random(
        LAYOUTS["p128_tp2"], seq_lens=[1000, 5000, 1, 129], decode_query_len=1, device="cuda", seed=3
    )
    comms, outputs = local_comm(indexers), []
    for rank, indexer in enumerate(indexers):
        scores = torch.empty(indexer.decode_scores_shape(), device="cuda")
        indexer.decode_publish(
            problem.index_q,
            problem.shard(rank),
            problem.block_table,
            problem.seq_lens,
            problem.num_valid_pages,
            scores,
            comm=comms[rank],
            slot=0,
            tagged=True,
            decode_query_len=1,
        )
    for indexer, comm in zip(indexers, comms, strict=True):
        outputs.append(torch.empty(len(problem.index_q), 2, 16, dtype=torch.int32, device="cuda"))
        indexer.decode_merge(problem.num_valid_pages, outputs[-1], comm=comm, slot=0, tagged=True)
    counts = compare(torch.cat(outputs, dim=1), brute_force_top16(problem, init_blocks=0, local_blocks=1))
    assert counts.wrong == 0 and counts.rows == 16, counts
    return counts.rows


@click.command()
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The wheel, for its size.")
def main(output: Path, wheel: Path | None) -> None:
    """Check and time the installed package, and write the rows to OUTPUT."""
    torch.zeros(1, device="cuda")  # creates the context, which is not ours to time
    import flashinfer
    import flashinfer.msa_ops as theirs

    try:
        prepare(theirs, 0)
    except (AttributeError, ValueError, RuntimeError, NotImplementedError) as error:
        click.echo(f"FlashInfer {flashinfer.__version__} alone: {type(error).__name__}: {error}")
    else:
        raise click.ClickException(f"FlashInfer {flashinfer.__version__} needs no help on this GPU")

    forbid_processes()
    began = time.perf_counter()
    import flashinfer_msa
    from flashinfer_msa import msa_ops

    imported = time.perf_counter()
    flashinfer_msa.register()
    indexers = [prepare(theirs, rank) for rank in range(2)]
    loading = time.perf_counter()
    indexers[0].warmup()
    torch.cuda.synchronize()
    loaded = time.perf_counter()
    scores = torch.empty(1, 4, 4, device="cuda")
    theirs.msa_icp_decode_index_score_sharded(
        torch.zeros(1, 4, 128, device="cuda").to(torch.float8_e4m3fn),
        torch.zeros(1, 64, 128, device="cuda").to(torch.float8_e4m3fn),
        torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        torch.ones(1, dtype=torch.int32, device="cuda"),
        scores,
        rank=0,
        world_size=2,
        page_size=128,
        decode_query_len=1,
        max_decode_query_len=1,
        backend="cake",
    )
    torch.cuda.synchronize()
    called = time.perf_counter()
    assert scores[0, 0].tolist() == [0.0, *[float("-inf")] * 3]
    rows = compare_decode(indexers)
    flashinfer_msa.unregister()
    assert theirs.prepare_msa_icp_indexer is not msa_ops.prepare_msa_icp_indexer

    found = [
        ("import, torch imported", (imported - began) * 1e6),
        ("all kernels of a GPU", (loaded - loading) * 1e6),
        ("from the import to the end of the first call", (called - began) * 1e6),
    ]
    note = f"beside FlashInfer {flashinfer.__version__}"
    result = [{"job": "load", "name": name, "us": us, "cold": False, "gpus": 1, "note": note} for name, us in found]
    if wheel:
        result.append({"job": "load", "name": "wheel", "bytes": wheel.stat().st_size, "cold": False, "gpus": 1})
    from flashinfer_msa.bench.rows import write_rows

    write_rows(output, result)
    for name, us in found:
        click.echo(f"{name}: {us / 1e6:.3f} s")
    click.echo(f"ok: {rows} of {rows} rows equal, no process started")
    if called - began > LIMIT_SECONDS:
        raise click.ClickException(f"the first call must end within {LIMIT_SECONDS} s of the import")


if __name__ == "__main__":
    main()
