#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Soaks the exchange of decode rows: a million layers, random delays of the ranks, and a check of every merged row.

    torchrun --nproc-per-node 2 scripts/soak.py

Each rank publishes rows whose scores and ids are computed from the running number of the layer, and merges all ranks'
rows. The selected blocks show whether every row arrived complete and was of its layer. A JSON line per row kind has the
numbers of checked and wrong rows. The exit status is 1 if a row was wrong.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashinfer_msa import msa_ops
from flashinfer_msa.comm import allocate_comm
from flashinfer_msa.files import replace_file
from flashinfer_msa.indexer import MSAIcpIndexerPlan
from flashinfer_msa.layout import BLOCK_TOKENS, NUM_HEADS, NUM_SLOT_SETS, TOP_K, WORLD_SIZES, find_layout

BLOCKS_PER_RANK = 64
"""Blocks in which one rank has candidates."""
PERIOD = 192
"""Layers after which ids, roles and slot sets repeat."""
MAX_LAYER_STEPS = 5_000_000
"""Up to this many layers, FP32 holds the integer scores and winners' scores exceed losers'."""
ROW_KINDS = ("tagged", "legacy")
_HIGH = float(1 << 24)
_NOWHERE = -float(1 << 20)
_POISON = -777
_GRAPHS = 8
"""CUDA graphs of a period, each with its own delays."""
_CYCLES_A_NANOSECOND = 2


class Pattern:
    """What every rank publishes in each layer of a period, and what its merge must select.

    Half of the rows are active. In layer ``n`` the winning blocks of an active row score ``HIGH - n``, and all others
    score ``2 n`` or one more. From one use of a slot set to the next, other rows are active and other blocks win. So a
    remainder of the previous use shows: an old loser's score is below every loser's, an old winner's score is above
    every winner's, and no old winner is a winner now.

    ``slope`` and ``offset`` are float32 ``[PERIOD, T, 4, columns]``. The scores of rank ``rank`` in layer ``l`` are
    ``offset[l] + slope[l] * n``, where ``n`` is the number of the period's first layer. ``expected`` is int32
    ``[PERIOD, T, heads_per_rank, 16]``, the selected blocks of the heads that the rank owns.
    """

    def __init__(self, world_size: int, rank: int, tokens: int) -> None:
        self.columns = BLOCKS_PER_RANK * world_size
        layer = torch.arange(PERIOD).view(-1, 1, 1, 1)
        token = torch.arange(tokens).view(-1, 1, 1)
        head = torch.arange(NUM_HEADS).view(-1, 1)
        column = torch.arange(self.columns)
        owner, index = column % world_size, column // world_size
        distance = (index - 11 * layer - 5 * token - 13 * head) % BLOCKS_PER_RANK
        active = (layer // NUM_SLOT_SETS + owner + token + head) % 2 == 0
        wins = active & (distance < 2 * TOP_K // world_size)
        mine = owner == rank
        slope = torch.where(wins, -1.0, 2.0) * mine
        offset = torch.where(wins, _HIGH, (distance < TOP_K).float())
        self.slope, self.offset = slope, torch.where(mine, offset, _NOWHERE) + slope * layer
        heads = NUM_HEADS // world_size
        blocks = wins.nonzero()[:, -1].view(PERIOD, tokens, NUM_HEADS, TOP_K).int()
        self.expected = blocks[:, :, rank * heads : (rank + 1) * heads].contiguous()


class Soak:
    """One rank's layers of one row kind. A layer is ``publish`` and ``merge``, and a period ends with ``check``."""

    def __init__(self, indexer: MSAIcpIndexerPlan, comm: Any, *, tokens: int, tagged: bool) -> None:
        pattern = Pattern(indexer.world_size, indexer.rank, tokens)
        self.indexer, self.comm, self.tagged = indexer, comm, tagged
        self._slope, self._offset, self._expected = (
            x.to(indexer.device) for x in (pattern.slope, pattern.offset, pattern.expected)
        )
        on_device = {"device": indexer.device}
        self._scores = torch.empty(tokens, NUM_HEADS, pattern.columns, **on_device)
        self._valid = torch.full((tokens,), pattern.columns, dtype=torch.int32, **on_device)
        self._outputs = torch.full(self._expected.shape, _POISON, dtype=torch.int32, **on_device)
        self._first = torch.zeros((), **on_device)
        self.wrong = torch.zeros((), dtype=torch.int64, **on_device)

    def publish(self, layer: int, *, enable_pdl: bool = False) -> None:
        """Compute the scores of a layer of the period, and publish its rows."""
        indexer, comm = self.indexer, self.comm
        torch.addcmul(self._offset[layer], self._slope[layer], self._first, out=self._scores)
        msa_ops.msa_icp_topk_select_publish(
            self._scores,
            self._valid,
            comm.tagged_recv_bases if self.tagged else comm.recv_bases,
            comm.errors,
            slot=layer % NUM_SLOT_SETS,
            rank=indexer.rank,
            world_size=indexer.world_size,
            heads_per_rank=indexer.heads_per_rank,
            capacity=indexer.max_decode_tokens,
            force_begin_blocks=0,
            force_end_blocks=0,
            spin_limit=indexer.spin_limit,
            enable_pdl=enable_pdl,
            generations=comm.publish_generations if self.tagged else None,
            backend=indexer.backend,
        )

    def merge(self, layer: int, *, enable_pdl: bool = False) -> None:
        """Merge the rows of a layer of the period."""
        options = {"slot": layer % NUM_SLOT_SETS, "tagged": self.tagged, "enable_pdl": enable_pdl}
        self.indexer.decode_merge(self._valid, self._outputs[layer], comm=self.comm, **options)

    def check(self) -> None:
        """Count the wrong rows of a period, and start the next one."""
        self.wrong += (self._outputs != self._expected).any(-1).sum()
        self._outputs.fill_(_POISON)
        self._first += PERIOD

    def period(self, delays: Sequence[Sequence[float]], *, enable_pdl: bool) -> None:
        """Run all layers of a period. ``delays`` are nanoseconds before and after the publish and after the merge."""
        for layer, (before, between, after) in enumerate(delays):
            self._wait(before)
            self.publish(layer, enable_pdl=enable_pdl)
            self._wait(between)
            self.merge(layer, enable_pdl=enable_pdl)
            self._wait(after)
        self.check()

    def _wait(self, nanoseconds: float) -> None:
        if not nanoseconds:
            return
        if self.indexer.device.type == "cuda":
            torch.cuda._sleep(int(nanoseconds * _CYCLES_A_NANOSECOND))
        else:
            time.sleep(nanoseconds * 1e-9)

    def run(self, periods: int, draw: random.Random) -> None:
        """Run ``periods`` periods. On a GPU, all but the first are replays of CUDA graphs in random order."""
        kinds = [(draw_delays(draw), bool(i % 2)) for i in range(_GRAPHS)]
        if self.indexer.device.type == "cpu":
            for _ in range(periods):
                delays, enable_pdl = draw.choice(kinds)
                self.period(delays, enable_pdl=enable_pdl)
            return
        self.period(kinds[0][0], enable_pdl=kinds[0][1])
        torch.cuda.synchronize()
        graphs = []
        for delays, enable_pdl in kinds:
            graph = torch.cuda.CUDAGraph()
            # The process group's own threads query events during the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.period(delays, enable_pdl=enable_pdl)
            graphs.append(graph)
        for _ in range(periods - 1):
            draw.choice(graphs).replay()
        torch.cuda.synchronize()


def draw_delays(draw: random.Random) -> list[list[float]]:
    """Draw the nanoseconds of delay before and after the publish and after the merge of each layer of a period.

    Half of the layers have no delay, most others have one of 30 ns to 20 us, and one in 500 up to a millisecond.
    """
    delays = []
    for _ in range(PERIOD):
        kind, layer = draw.random(), [0.0, 0.0, 0.0]
        if kind < 0.002:
            layer[draw.randrange(3)] = draw.uniform(1e5, 1e6)
        elif kind < 0.5:
            layer[draw.randrange(3)] = math.exp(draw.uniform(math.log(30), math.log(20_000)))
        delays.append(layer)
    return delays


def soak(
    indexer: MSAIcpIndexerPlan, comm: Any, *, row_kind: str, layer_steps: int, tokens: int, seed: int
) -> dict[str, Any]:
    """Run one row kind on every rank of the group, and return the results of all ranks."""
    periods = -(-layer_steps // PERIOD)
    run = Soak(indexer, comm, tokens=tokens, tagged=row_kind == "tagged")
    dist.barrier()
    begin = time.perf_counter()
    run.run(periods, random.Random(f"{seed} {row_kind} {indexer.rank}"))
    found = [int(run.wrong), int(comm.errors[0]), time.perf_counter() - begin]
    everywhere: list[Any] = [None] * indexer.world_size
    dist.all_gather_object(everywhere, found)
    wrong, errors, seconds = zip(*everywhere, strict=True)
    return {
        "form": row_kind,
        "ranks": indexer.world_size,
        "gpus": min(indexer.world_size, torch.cuda.device_count()) if indexer.device.type == "cuda" else 0,
        "layer_steps": periods * PERIOD,
        "rows": periods * PERIOD * tokens * NUM_HEADS,
        "wrong": sum(wrong),
        "errors": sum(errors),
        "seconds": round(max(seconds), 2),
    }


@click.command()
@click.option(
    "--layer-steps",
    type=click.IntRange(1, MAX_LAYER_STEPS),
    default=1_000_000,
    show_default=True,
    help=f"Layers of each row kind, rounded up to a multiple of {PERIOD}.",
)
@click.option(
    "--form", "row_kinds", type=click.Choice(ROW_KINDS), multiple=True, help="A row kind; repeatable. [default: all]"
)
@click.option("--tokens", type=click.IntRange(1), default=8, show_default=True, help="Query tokens of a layer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the delays.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for the results.")
@click.option("--backend", type=click.Choice(["cake", "torch"]), help="[default: cake if there is a GPU]")
def main(
    layer_steps: int, row_kinds: Sequence[str], tokens: int, seed: int, output: Path | None, backend: str | None
) -> None:
    """Soak the exchange of the ranks that torchrun started, 2 or 4."""
    backend = backend or ("cake" if torch.cuda.is_available() else "torch")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size not in WORLD_SIZES:
        raise click.ClickException(
            f"needs 2 or 4 ranks, were {world_size}: torchrun --nproc-per-node 2 scripts/soak.py"
        )
    device = torch.device("cpu")
    if backend == "cake":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    indexer = msa_ops.prepare_msa_icp_indexer(
        world_size=world_size,
        rank=rank,
        num_index_heads=NUM_HEADS,
        page_size=find_layout(BLOCK_TOKENS, world_size).page_size,
        init_blocks=0,
        local_blocks=0,
        max_decode_tokens=tokens,
        max_decode_query_len=1,
        max_num_batched_tokens=tokens,
        max_num_seqs=tokens,
        max_model_len=BLOCKS_PER_RANK * world_size * BLOCK_TOKENS,
        num_sparse_layers=PERIOD,
        device=device,
        backend=backend,
    )
    results = []
    with allocate_comm(indexer) as comm:
        indexer.warmup()
        for row_kind in row_kinds or ROW_KINDS:
            results.append(soak(indexer, comm, row_kind=row_kind, layer_steps=layer_steps, tokens=tokens, seed=seed))
            if rank == 0:
                click.echo(json.dumps(results[-1]))
                if output is not None:
                    replace_file(output.resolve(), json.dumps(results, indent=1).encode() + b"\n")
    dist.destroy_process_group()
    if any(result["wrong"] or result["errors"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
