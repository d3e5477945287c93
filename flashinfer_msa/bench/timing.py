# SPDX-License-Identifier: Apache-2.0
"""Times calls by CUDA graph replay."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

COLD_BYTES = 256 << 20
"""A cold case rotates over more bytes of distinct keys than this inside its graph, as a model's layers do."""
MIN_CALLS = 20
"""Calls in a graph, at least, so that the graph's launch counts little."""
_REPLAY_BYTES = 16 << 30
"""Bytes that the calls of a graph should read together, which takes some milliseconds."""


def graph_us(calls: Sequence[Callable[[], object]], *, replays: int = 11) -> float:
    """Capture all ``calls`` in one CUDA graph, in order, replay it, and return the median microseconds of one call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(calls)


def at_least_min_calls(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Repeat ``inputs``, so that a graph with a call on each has at least ``MIN_CALLS`` calls."""
    return inputs * -(-MIN_CALLS // len(inputs))


def many_calls(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Repeat ``inputs`` for calls that read them once, up to ``5 * MIN_CALLS`` calls if they are small.

    A graph's launch takes as long as a few of the shortest calls.
    """
    calls = min(max(_REPLAY_BYTES // inputs[0].nbytes, MIN_CALLS), 5 * MIN_CALLS)
    return inputs * -(-calls // len(inputs))


def copies_of(tensor: torch.Tensor, *, cold: bool) -> list[torch.Tensor]:
    """Return ``tensor``, and if ``cold`` so many clones that a pass over all of them leaves none in the L2 cache."""
    count = 1 + -(-COLD_BYTES // tensor.nbytes) if cold else 1
    return [tensor, *(tensor.view(torch.uint8).clone().view(tensor.dtype) for _ in range(count - 1))]
