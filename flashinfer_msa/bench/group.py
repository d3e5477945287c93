# SPDX-License-Identifier: Apache-2.0
"""Measures whole decode and prefill layers, with the exchange over NVLink, by ranks with a GPU each.

Every rank runs the same steps at the same time and yields the same rows. Only rank 0 measures peers, while the other
ranks are idle.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..comm import allocate_comm, exchange_carriers
from ..layout import LAYOUTS, NUM_HEADS, NUM_SLOT_SETS, ROW_WORDS, WORLD_SIZES, Layout
from .ceilings import Ceilings, memory_rows
from .decode import DecodeCase, DecodeShape
from .host import host_rows
from .jobs import Step
from .peers import Peers, PeerShape
from .prefill import PrefillCase, PrefillShape
from .rows import Row, keys_text
from .timing import MIN_CALLS, at_least_min_calls, many_calls

Calls = Sequence[Callable[[], None]]

DECODE_SHAPES = [
    DecodeShape(batch, context, 1, True)
    for batch, context in (
        (32, 128 << 10),
        (1, 8 << 10),
        (1, 128 << 10),
        (8, 128 << 10),
        (64, 128 << 10),
        (256, 32 << 10),
    )
]
"""Measured batches. The one with a target is first, in case time runs out."""
PREFILL_SHAPE = PrefillShape(8192, 128 << 10, True)


@dataclass(frozen=True)
class Ranks:
    """This process's rank, the world size, and a host group for barriers that keep no GPU busy."""

    rank: int
    world_size: int
    host: Any

    @classmethod
    def join(cls) -> Ranks:
        """Join the ranks that torchrun started, each on its own GPU.

        Raises
        ------
        RuntimeError
            If there are not 2 or 4 ranks, or fewer GPUs than ranks.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        gpus = torch.cuda.device_count()
        if world_size not in WORLD_SIZES or gpus < world_size:
            raise RuntimeError(
                f"needs 2 or 4 ranks and a GPU for each, were {world_size} ranks and {gpus} GPUs: run "
                "torchrun --nproc-per-node 2 scripts/gpu_bench.py --group FILE"
            )
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return cls(dist.get_rank(), world_size, dist.new_group(backend="gloo"))

    def leave(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(self.host)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def first(self, measure: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        """Yield the rows that rank 0 measures, while the other ranks wait and yield none."""
        if self.rank == 0:
            yield from measure()
        self.barrier()


def capture(calls: Calls) -> torch.cuda.CUDAGraph:
    """Run the calls once, then capture them in a graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The process group's own threads query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


def group_us(ranks: Ranks, calls: Calls, lead_in: Calls, *, replays: int = 11) -> float:
    """Return the microseconds of one call: the median over replays of the slowest rank's time.

    ``calls`` are captured in one CUDA graph and replayed. Ranks meet at a host barrier before each replay. Then an
    untimed graph of ``lead_in`` makes their GPUs meet, so that the hosts' delays after the barrier do not count.
    """
    first, graph = capture(lead_in), capture(calls)
    times = []
    for _ in range(1 + replays):
        torch.cuda.synchronize()
        ranks.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    slowest = [max(found) for found in zip(*ranks.gather(times[1:]), strict=True)]
    return statistics.median(slowest) * 1e3 / len(calls)


def decode_rows(
    ranks: Ranks, layout: Layout, shape: DecodeShape, ceilings: Ceilings, peers: Peers | None = None
) -> Iterator[Row]:
    """Measure a decode layer on all ranks; compare it with a streaming read of a rank's keys and unsharded peers."""
    batch, context, query_len, cold = shape
    case = DecodeCase.make(layout, batch, context, query_len, cold=cold, rank=ranks.rank)
    keys = many_calls(case.keys)
    keys += keys[: -len(keys) % NUM_SLOT_SETS]  # so that the lead-in and every replay begin at slot set 0
    with allocate_comm(case.indexer) as comm:
        calls = [lambda k=k, slot=i % NUM_SLOT_SETS: case.chain(k, comm, slot) for i, k in enumerate(keys)]
        ranks.barrier()
        us = group_us(ranks, calls, calls[:NUM_SLOT_SETS])
    row: Row = {"job": "decode_chain", **shape.row(layout), "us": us, "bytes": case.keys[0].nbytes}

    def comparisons() -> Iterator[Row]:
        yield {**row, "ceiling_ratio": ceilings.read_us(case.keys) / us}
        if peers is not None:
            heads = layout.heads_per_rank
            unsharded = PeerShape(batch, context, heads, query_len, cold)
            yield from peers.compare(row, unsharded, f"theirs without shards, on one GPU: all keys, {heads} heads")

    yield from ranks.first(comparisons)


def prefill_rows(ranks: Ranks, layout: Layout, shape: PrefillShape) -> Iterator[Row]:
    """Measure a prefill layer on all ranks: local part, exchange and merge, each by itself and all together."""
    tokens, context, cold = shape
    case = PrefillCase.make(layout, [(tokens, context)], cold=cold, rank=ranks.rank)
    window = case.make_plan()
    sizes = (layout.world_size, layout.heads_per_rank, tokens, ROW_WORDS)
    received = torch.empty(sizes, dtype=torch.int32, device=case.carrier.device)

    def exchange() -> None:
        exchange_carriers(case.carrier, received)

    def merge() -> None:
        case.indexer.prefill_merge(received, case.num_valid_pages, case.output)

    def layer(keys: torch.Tensor) -> None:
        case.local(window, keys)
        exchange()
        merge()

    lead_in = [exchange]
    keys = at_least_min_calls(case.keys)
    local = [lambda k=k: case.local(window, k) for k in keys]
    yield {
        "job": "prefill_chain",
        "name": "score and select",
        **case.shape,
        "us": group_us(ranks, local, lead_in),
    }
    us = group_us(ranks, [exchange] * MIN_CALLS, lead_in)
    sent = NUM_HEADS * tokens * ROW_WORDS * 4 * (layout.world_size - 1) // layout.world_size
    note = "all-to-all of the carriers; bytes are those that a rank sends to others"
    yield {
        "job": "prefill_chain",
        "name": "exchange",
        **case.shape,
        "us": us,
        "bytes": sent,
        "tb_s": sent / us / 1e6,
        "note": note,
    }
    yield {"job": "merge", **case.shape, "us": group_us(ranks, [merge] * MIN_CALLS, lead_in)}
    us = group_us(ranks, [partial(layer, key) for key in keys], lead_in)
    note = "score, select, exchange and merge"
    yield {"job": "prefill_chain", "name": "with the exchange", **case.shape, "us": us, "note": note}


def group_steps(ranks: Ranks, peers: Peers | None) -> list[Step]:
    """Return the steps for ranks with a GPU each, over the layouts of that many ranks."""
    ceilings = Ceilings()
    layouts = [layout for layout in LAYOUTS.values() if layout.world_size == ranks.world_size]
    tokens, context, _ = PREFILL_SHAPE
    return [
        *(
            Step(
                f"{layout.title}, {shape.batch} x {keys_text(shape.context)}",
                partial(decode_rows, ranks, layout, shape, ceilings, peers),
                ranks.world_size,
            )
            for shape in DECODE_SHAPES
            for layout in layouts
        ),
        *(
            Step(
                f"{layout.title}, {tokens} of {keys_text(context)}",
                partial(prefill_rows, ranks, layout, PREFILL_SHAPE),
                ranks.world_size,
            )
            for layout in layouts
        ),
        Step("host time", lambda: ranks.first(host_rows)),
        Step("reading and copying", lambda: ranks.first(memory_rows)),
    ]
