# SPDX-License-Identifier: Apache-2.0
"""The demo: runs steps as every rank of a group and compares them with a brute force over unsharded keys."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..comm import local_comm
from ..indexer import MSAIcpIndexerPlan
from ..layout import BLOCK_TOKENS, MAX_BLOCKS, NUM_SLOT_SETS, TOP_K, Layout
from ..prefill.window import MSAIcpScorePlan
from ..testing.problems import (
    NEAR_TIE,
    TENSOR_CORE_ERROR,
    Comparison,
    DecodeProblem,
    PrefillProblem,
    brute_force_top16,
    compare,
    exchange,
    group_indexers,
    random_e4m3,
    share_cache,
)

_FORCED: Any = {"init_blocks": 1, "local_blocks": 2}
"""Blocks that the demo forces at both ends of a context."""
_PITCH_EXTRA = 16
"""Bytes between the local pages of a shard."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What to run on each layout: ``steps`` of ``batch`` decode requests, of ``batch`` prefill segments, or of both.

    ``query_len`` is the number of query tokens per decode request, 0 for no decode. ``tokens`` is the number of query
    tokens of all segments together, at most ``batch * context``, 0 for no prefill. No request or segment has more than
    ``context`` keys.
    """

    backend: str
    devices: Sequence[torch.device]
    batch: int
    context: int
    query_len: int
    tokens: int
    steps: int
    seed: int


class Result(NamedTuple):
    """The row counts of all steps, and the median milliseconds and prefill windows of a step."""

    tagged: bool | None
    """Whether receive rows are tagged; None without decode."""
    windows: int
    counts: Comparison
    milliseconds: float


def run_layout(demo: Demo, layout: Layout, row_kinds: Sequence[bool]) -> list[Result]:
    """Run all steps once per row kind (true is tagged), or once without decode."""
    decode_tokens = demo.batch * demo.query_len
    indexers = group_indexers(
        layout,
        demo.devices,
        **_FORCED,
        max_decode_tokens=max(decode_tokens, 1),
        max_decode_query_len=max(demo.query_len, 1),
        max_num_batched_tokens=decode_tokens + demo.tokens,
        max_num_seqs=demo.batch,
        # With so long a model, windows are short, so a step has several.
        max_model_len=MAX_BLOCKS * BLOCK_TOKENS if demo.tokens else demo.context,
        num_sparse_layers=NUM_SLOT_SETS,
        backend=demo.backend,
    )
    decode = _Decode(demo, layout, indexers) if demo.query_len else None
    prefill = _Prefill(demo, layout, indexers) if demo.tokens else None
    # This is the order of a query's rows and of a layer's work.
    parts: list[Any] = [part for part in (decode, prefill) if part]

    runs: Sequence[bool | None] = row_kinds if decode else [None]
    counts = dict.fromkeys(runs, Comparison())
    times: dict[bool | None, list[float]] = {tagged: [] for tagged in runs}
    keys: list[torch.Tensor] = []
    for step in range(demo.steps):
        problems: Sequence[Any] = [part.draw(step) for part in parts]
        if decode and prefill:
            problems = share_cache(*problems)
        if prefill or not keys:
            keys = [problems[0].shard(indexer.rank).to(indexer.device) for indexer in indexers]
        query = torch.cat([problem.index_q.view(torch.uint8) for problem in problems]).view(problems[0].index_q.dtype)
        rows = query.split([len(problem.index_q) for problem in problems])
        for part, problem, index_q in zip(parts, problems, rows, strict=True):
            part.load(replace(problem, index_q=index_q))
        for tagged in runs:
            clock = _Clock(demo.devices)
            if decode:
                decode.run(keys, slot=step % NUM_SLOT_SETS, tagged=tagged, enable_pdl=False)
            if prefill:
                prefill.run(keys)
            times[tagged].append(clock.stop())
            for part in parts:
                counts[tagged] = counts[tagged].plus(part.compare())
    windows = prefill.windows if prefill else 0
    return [Result(tagged, windows, counts[tagged], statistics.median(times[tagged])) for tagged in runs]


class _Decode:
    """The decode requests: their caches as of the last step, and the loaded step."""

    def __init__(self, demo: Demo, layout: Layout, indexers: Sequence[MSAIcpIndexerPlan]) -> None:
        lengths = random.Random(demo.seed)
        self._last = DecodeProblem.random(
            layout,
            seq_lens=[demo.context, *(lengths.randint(1, demo.context) for _ in range(demo.batch - 1))],
            decode_query_len=demo.query_len,
            device=demo.devices[0],
            seed=demo.seed,
            page_pitch_extra=_PITCH_EXTRA,
        )
        self._steps = demo.steps
        self._generator = torch.Generator(demo.devices[0]).manual_seed(demo.seed + 1)
        self._indexers = indexers
        self._comms = local_comm(indexers)
        self._scores = [torch.empty(indexer.decode_scores_shape(), device=indexer.device) for indexer in indexers]
        self._outputs = _make_outputs(indexers, demo.batch * demo.query_len)

    def draw(self, step: int) -> DecodeProblem:
        """Return the requests at ``step``, with new queries."""
        last = self._last
        return replace(
            last,
            seq_lens=(last.seq_lens - (self._steps - 1 - step) * last.decode_query_len).clamp(min=0),
            index_q=random_e4m3(last.index_q.shape, self._generator),
        )

    def load(self, problem: DecodeProblem) -> None:
        """Copy ``problem`` to the ranks' devices and compute the expected Top16."""
        self._valid = [problem.num_valid_pages.to(indexer.device) for indexer in self._indexers]
        self._inputs = [
            tuple(x.to(indexer.device) for x in (problem.index_q, problem.block_table, problem.seq_lens))
            for indexer in self._indexers
        ]
        self._expected = brute_force_top16(problem, **_FORCED)

    def run(self, keys: Sequence[torch.Tensor], **options: Any) -> None:
        """Run one layer on every rank."""
        ranks = list(zip(self._indexers, self._comms, self._valid, strict=True))
        # Ranks may share a device and a stream, so every publish is launched before any merge waits.
        for (indexer, comm, valid), index_k, (index_q, block_table, seq_lens), scores in zip(
            ranks, keys, self._inputs, self._scores, strict=True
        ):
            indexer.decode_publish(
                index_q,
                index_k,
                block_table,
                seq_lens,
                valid,
                scores,
                comm=comm,
                decode_query_len=self._last.decode_query_len,
                **options,
            )
        for (indexer, comm, valid), output in zip(ranks, self._outputs, strict=True):
            indexer.decode_merge(valid, output, comm=comm, **options)

    def compare(self) -> Comparison:
        """Compare the owners' outputs with the expected Top16."""
        return compare(_all_heads(self._outputs), self._expected)


class _Window(NamedTuple):
    """A prefill window on a rank's device."""

    rows: slice
    query: torch.Tensor
    block_table: torch.Tensor
    segments: tuple[torch.Tensor, ...]
    bounds: dict[str, Any]

    def plan(self, index: int, indexer: MSAIcpIndexerPlan) -> MSAIcpScorePlan:
        """Plan this as window ``index`` of the step."""
        return indexer.prefill_window_plan(index, *self.segments, **self.bounds)


class _Prefill:
    """The prefill segments of the loaded step, and the ranks' buffers for them."""

    def __init__(self, demo: Demo, layout: Layout, indexers: Sequence[MSAIcpIndexerPlan]) -> None:
        self._demo = demo
        self._layout = layout
        self._indexers = indexers
        self._draw = random.Random(demo.seed)
        self._near_tie = 2 * TENSOR_CORE_ERROR if demo.backend == "cake" else NEAR_TIE
        self._window_tokens = min(indexers[0].prefill_scratch_shape()[0], indexers[0].prefill_window_tokens())
        self.windows = -(-demo.tokens // self._window_tokens)
        self._scratches = [torch.empty(indexer.prefill_scratch_shape(), device=indexer.device) for indexer in indexers]
        self._carriers = [
            torch.empty(indexer.prefill_carrier_shape()[1:], dtype=torch.int32, device=indexer.device)[:, : demo.tokens]
            for indexer in indexers
        ]
        self._outputs = _make_outputs(indexers, demo.tokens)

    def draw(self, step: int) -> PrefillProblem:
        """Return new segments over a new cache."""
        demo = self._demo
        lens, positions = draw_segments(self._draw, demo.batch, demo.tokens, demo.context)
        return PrefillProblem.random(
            self._layout,
            query_lens=lens,
            kv_lens=[length + position for length, position in zip(lens, positions, strict=True)],
            device=demo.devices[0],
            seed=self._draw.getrandbits(32),
            page_pitch_extra=_PITCH_EXTRA,
        )

    def load(self, problem: PrefillProblem) -> None:
        """Copy the windows of ``problem`` to the ranks' devices and compute the expected Top16."""
        windows = problem.windows(self._window_tokens)
        self._valid = [problem.num_valid_pages.to(indexer.device) for indexer in self._indexers]
        self._windows = [
            [
                _Window(
                    slice(index * self._window_tokens, index * self._window_tokens + len(window.index_q)),
                    window.index_q.to(indexer.device),
                    window.block_table.to(indexer.device),
                    tuple(x.to(indexer.device) for x in window.segments),
                    window.bounds,
                )
                for index, window in enumerate(windows)
            ]
            for indexer in self._indexers
        ]
        self._expected = brute_force_top16(problem, **_FORCED)

    def run(self, keys: Sequence[torch.Tensor]) -> None:
        """Plan the windows and run one layer on every rank."""
        for indexer, index_k, windows, valid, scratch, carrier in zip(
            self._indexers, keys, self._windows, self._valid, self._scratches, self._carriers, strict=True
        ):
            window_plans = [window.plan(index, indexer) for index, window in enumerate(windows)]
            for window, window_plan in zip(windows, window_plans, strict=True):
                indexer.prefill_local(
                    window.query,
                    index_k,
                    window.block_table,
                    window_plan,
                    scratch,
                    valid[window.rows],
                    carrier[:, window.rows],
                )
        for indexer, valid, output in zip(self._indexers, self._valid, self._outputs, strict=True):
            # A copy between devices waits for both of their streams.
            indexer.prefill_merge(exchange(self._carriers, indexer), valid, output)

    def compare(self) -> Comparison:
        """Compare the owners' outputs with the expected Top16."""
        return compare(_all_heads(self._outputs), self._expected, near_tie=self._near_tie)


def draw_segments(draw: random.Random, segments: int, tokens: int, context: int) -> tuple[list[int], list[int]]:
    """Draw query lengths with a sum of ``tokens``, and the position of each segment's first token.

    A third of the segments are empty and a third have one token, as far as the sum allows. All segments end within
    ``context``, and the longest ends at ``context``.
    """
    lens: list[int] = []
    rest = tokens
    for later in reversed(range(segments)):
        least, most = max(rest - later * context, 0), min(rest, context)
        length = (0, 1, draw.randint(least, most))[len(lens) % 3]
        lens.append(min(max(length, least), most))
        rest -= lens[-1]
    draw.shuffle(lens)
    positions = [draw.choice([0, draw.randint(0, context - length)]) for length in lens]
    longest = lens.index(max(lens))
    positions[longest] = context - lens[longest]
    return lens, positions


def _make_outputs(indexers: Sequence[MSAIcpIndexerPlan], tokens: int) -> list[torch.Tensor]:
    return [
        torch.empty(tokens, indexer.heads_per_rank, TOP_K, dtype=torch.int32, device=indexer.device)
        for indexer in indexers
    ]


def _all_heads(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the owners' outputs side by side, on the first rank's device."""
    return torch.cat([output.to(outputs[0].device) for output in outputs], dim=1)


class _Clock:
    """Times from construction to ``stop`` in milliseconds: a device by events, the CPU by the wall clock."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cuda = [device for device in devices if device.type == "cuda"]
        self._synchronize()
        if self._cuda:
            self._stream = torch.cuda.current_stream(self._cuda[0])
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begin.record(self._stream)
        self._started = time.perf_counter()

    def _synchronize(self) -> None:
        for device in self._cuda:
            torch.cuda.synchronize(device)

    def stop(self) -> float:
        if not self._cuda:
            return 1e3 * (time.perf_counter() - self._started)
        # The last merge of the first device ends after every rank has published or sent.
        self._end.record(self._stream)
        self._synchronize()
        return self._begin.elapsed_time(self._end)
