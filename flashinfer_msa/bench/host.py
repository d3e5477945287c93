# SPDX-License-Identifier: Apache-2.0
"""Measures the CPU time of a decode layer, for each way to launch it, and of bare launches."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..indexer.layer_graphs import MSAIcpGraphStep
from ..layout import LAYOUTS, NUM_SLOT_SETS
from ..runtime import native
from .decode import DecodeCase
from .rows import Row


def host_rows(*, calls: int = 300, context: int = 4096) -> Iterator[Row]:
    """Measure the wall-clock host time of an eager call, a prepared step, a layer graph's replay and bare launches.

    Every call starts on an idle GPU, after the peers' rows have arrived.
    """
    case = DecodeCase.make(LAYOUTS["p128_tp4"], 32, context, 1, cold=False)
    armed = case.armed(1)
    (comm,), indexer = armed.comms, case.indexer
    query, keys = case.index_q, case.keys[0]
    prepared = (case.block_table, case.seq_lens, case.num_valid_pages, case.scores, case.output)
    options: dict[str, Any] = {"comm": comm, "tagged": True, "decode_query_len": 1}
    slots = itertools.cycle(range(NUM_SLOT_SETS))
    # The second step of a key captures. After that, every slot set has its graph.
    warm_calls = 3 * NUM_SLOT_SETS

    def median_us(call: Callable[[int], None], before: Callable[[], None] = lambda: None) -> float:
        times = []
        for _ in range(warm_calls + calls):
            slot = next(slots)
            armed.rearm()
            before()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call(slot)
            times.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(times[warm_calls:])

    def row(name: str, us: float) -> Row:
        return {"job": "host", "name": name, "us": us, "cold": False}

    decode = indexer.decode
    yield row("decode, 3 launches", median_us(lambda slot: decode(query, keys, *prepared, slot=slot, **options)))

    step = indexer.prepare_decode_step(*prepared, **options)
    run = step.run
    yield row("prepared decode step", median_us(lambda slot: run(query, keys, slot=slot)))

    graphs = indexer.layer_graphs()
    begun: list[MSAIcpGraphStep] = []

    def begin_step() -> None:
        begun[:] = [graphs.begin_step(decode=step, decode_tokens=step.tokens)]

    us = median_us(lambda slot: begun[0].run(0, query, keys, slot=slot), begin_step)
    note = f"{graphs.stats['replayed_layers']} of {warm_calls + calls} layers were replays"
    yield {**row("layer graph replay", us), "note": note}

    device = torch.cuda.current_device()
    bare_launches = native.operation("bare_launches")
    bare = []
    for _ in range(calls):
        torch.cuda.synchronize()
        bare.append(bare_launches(device, 3) / 1e3)
    yield row("3 bare cuLaunchKernelEx", statistics.median(bare))
