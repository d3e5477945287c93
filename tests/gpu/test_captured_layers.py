# SPDX-License-Identifier: Apache-2.0
"""Layer graphs on one GPU: rank 0's captured and replayed layers equal its eager calls bit for bit.

The other ranks of the group publish and send before rank 0, on the same stream, and merge after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from prefill_windows import ChangingWindow
from simulated_group import SMALL, Group, assert_equal

from flashinfer_msa.indexer.layer_graphs import MSAIcpGraphStep
from flashinfer_msa.layout import HEAD_DIM, LAYOUTS, NUM_HEADS, ROW_WORDS, TOP_K, Layout
from flashinfer_msa.testing.problems import (
    NEAR_TIE,
    TENSOR_CORE_ERROR,
    DecodeProblem,
    brute_force_top16,
    compare,
    exchange,
    random_e4m3,
    share_cache,
)

pytestmark = pytest.mark.skipif(SMALL, reason="sanitizers check the same kernels in eager launches")
LAYERS, STEPS, QUERY_LEN = 3, 5, 2
FORCED = {"init_blocks": 1, "local_blocks": 2}


class Serving:
    """A group on one GPU, and buffers of steps of one size, which hold new lengths and queries in each step.

    ``kind`` is the row kind of a mixed step, or "decode" or "prefill" for a step with only that part.
    """

    def __init__(self, layout: Layout, kind: str, backend: str = "cake") -> None:
        self.has_decode, self.has_prefill = kind != "prefill", kind != "decode"
        self.tagged = kind != "legacy"
        self.window = ChangingWindow(layout, seed=0)
        self.decode, self.window.base = share_cache(
            DecodeProblem.random(layout, seq_lens=[2900, 700, 2500], decode_query_len=QUERY_LEN, device="cuda"),
            self.window.base,
        )
        self.lengths = self.decode.seq_lens - 100
        self.decode_valid = torch.zeros_like(self.decode.num_valid_pages)
        self.decode_tokens = len(self.decode_valid) if self.has_decode else 0
        self.prefill_tokens = self.window.TOKENS if self.has_prefill else 0
        self.group = Group.make(
            layout, tokens=len(self.decode_valid) + 3, max_model_len=self.window.LONGEST, backend=backend
        )
        self.indexer = self.group.indexers[0]
        self.peers = range(1, layout.world_size)
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.pages = [random_e4m3(self.decode.pages.shape, self.generator) for _ in range(LAYERS)]
        self.keys = [
            [replace(self.decode, pages=pages).shard(rank) for pages in self.pages] for rank in range(layout.world_size)
        ]
        self.planes = self.group.scores(len(self.decode_valid))
        self.decode_output, *self.peer_outputs = self.group.outputs(len(self.decode_valid))
        int32 = {"dtype": torch.int32, "device": "cuda"}
        hpr, tokens = self.indexer.heads_per_rank, self.window.TOKENS
        self.carriers = [torch.full((NUM_HEADS, tokens, ROW_WORDS), -7, **int32) for _ in self.group.indexers]
        self.received = torch.full((layout.world_size, hpr, tokens, ROW_WORDS), -7, **int32)
        self.prefill_output = torch.full((tokens, hpr, TOP_K), -7, **int32)
        self.scratches = [
            torch.empty(indexer.prefill_scratch_shape(), device="cuda") for indexer in self.group.indexers
        ]
        self.uses = 0

    def advance(self) -> None:
        """Lengthen the sequences, draw new segments, and plan the window on every rank."""
        self.lengths += 7
        self.current = replace(self.decode, seq_lens=self.lengths.clone())
        self.decode_valid.copy_(self.current.num_valid_pages)
        self.segments = self.window.change()
        self.plans = [
            indexer.prefill_window_plan(0, *self.window.inputs, **self.window.bounds) for indexer in self.group.indexers
        ]

    def begin(self, graphs: Any) -> MSAIcpGraphStep:
        """Prepare rank 0's decode and prefill, and begin a step with them."""
        arguments: dict[str, Any] = {}
        if self.has_decode:
            decode = self.indexer.prepare_decode_step(
                self.decode.block_table,
                self.lengths,
                self.decode_valid,
                self.planes[0],
                self.decode_output,
                comm=self.group.comms[0],
                tagged=self.tagged,
                decode_query_len=QUERY_LEN,
            )
            arguments |= {"decode": decode, "decode_tokens": decode.tokens}
        if self.has_prefill:
            window = (0, self.window.TOKENS, self.window.base.block_table, self.plans[0])
            prefill = self.indexer.prepare_prefill_step(
                [window],
                self.scratches[0],
                self.window.num_valid_pages,
                self.carriers[0],
                self.received,
                self.prefill_output,
            )
            arguments |= {"prefill": prefill, "exchange": self.exchange}
        return graphs.begin_step(**arguments)

    def exchange(self) -> None:
        """Copy what the all-to-all brings to rank 0."""
        self.received.copy_(exchange(self.carriers, self.indexer))

    def local(self, rank: int, layer: int, query: torch.Tensor) -> None:
        self.group.indexers[rank].prefill_local(
            query[self.decode_tokens :],
            self.keys[rank][layer],
            self.window.base.block_table,
            self.plans[rank],
            self.scratches[rank],
            self.window.num_valid_pages,
            self.carriers[rank],
        )

    def eager(self, layer: int, query: torch.Tensor, slot: int) -> None:
        """Run rank 0's layer with the indexer's own calls."""
        if self.has_decode:
            problem = replace(self.current, index_q=query[: self.decode_tokens])
            self.indexer.decode(
                problem.index_q,
                self.keys[0][layer],
                self.decode.block_table,
                self.lengths,
                self.decode_valid,
                self.planes[0],
                self.decode_output,
                comm=self.group.comms[0],
                slot=slot,
                tagged=self.tagged,
                decode_query_len=QUERY_LEN,
            )
        if self.has_prefill:
            self.local(0, layer, query)
            self.exchange()
            self.indexer.prefill_merge(self.received, self.window.num_valid_pages, self.prefill_output)

    def layer(self, layer: int, query: torch.Tensor, run: Callable[[int], None]) -> list[torch.Tensor]:
        """Run one layer on every rank, on rank 0 by ``run(slot)``; return rank 0's outputs."""
        slot = self.uses % 3
        self.uses += 1
        for tensor in (self.decode_output, self.prefill_output, self.received, *self.carriers):
            tensor.fill_(-7)
        problem = replace(self.current, index_q=query[: self.decode_tokens]) if self.has_decode else self.current
        options = {"slot": slot, "tagged": self.tagged}
        for rank in self.peers:
            if self.has_decode:
                self.group.publish(rank, problem, self.keys[rank][layer], self.planes[rank], **options)
            if self.has_prefill:
                self.local(rank, layer, query)
        run(slot)
        if self.has_decode:
            for rank, output in zip(self.peers, self.peer_outputs, strict=True):
                self.group.merge(rank, problem, output, **options)
        return [self.decode_output.clone(), self.prefill_output.clone()]

    def query(self) -> torch.Tensor:
        """Draw a layer's query."""
        return random_e4m3((self.decode_tokens + self.prefill_tokens, NUM_HEADS, HEAD_DIM), self.generator)

    def check(self, layer: int, query: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        """Compare rank 0's outputs with the brute force over unsharded keys."""
        heads = slice(0, self.indexer.heads_per_rank)
        rows = slice(0, self.decode_tokens), slice(self.decode_tokens, None)
        found: list[tuple[Any, Any, float]] = []
        if self.has_decode:
            problem = replace(self.current, pages=self.pages[layer], index_q=query[rows[0]])
            found.append((brute_force_top16(problem, **FORCED), outputs[0], NEAR_TIE))
        if self.has_prefill:
            segments = replace(self.segments, pages=self.pages[layer], index_q=query[rows[1]])
            found.append((brute_force_top16(segments, **FORCED), outputs[1], 2 * TENSOR_CORE_ERROR))
        for expected, output, near_tie in found:
            all_heads = expected.ids.clone()
            all_heads[:, heads] = output
            counts = compare(all_heads, expected, near_tie=near_tie)
            assert counts.wrong == 0, counts


def run_steps(serving: Serving, graphs: Any, steps: int, *, in_place: bool = False) -> None:
    """Run each layer of the steps in a graph and once more eagerly, and compare both."""
    for _ in range(steps):
        serving.advance()
        step = serving.begin(graphs)
        for layer in range(LAYERS):
            query, keys = serving.query(), serving.keys[0][layer]
            given = query
            if in_place:
                given = step.query
                given.copy_(query)
            run = functools.partial(_run_layer, step, layer, given, keys)
            outputs = serving.layer(layer, query, run)
            wanted = serving.layer(layer, query, functools.partial(serving.eager, layer, query))
            for part, output, want in zip(("decode", "prefill"), outputs, wanted, strict=True):
                assert_equal(output, want, f"{part} of layer {layer}, {dict(graphs.stats)}")
            serving.check(layer, query, outputs)


def _run_layer(step: MSAIcpGraphStep, layer: int, query: torch.Tensor, keys: torch.Tensor, slot: int) -> None:
    step.run(layer, query, keys, slot=slot)


def counts(graphs: Any) -> tuple[int, int, int, int]:
    """Return the numbers of eager, captured and replayed layers and of evicted keys."""
    names = ("eager_layers", "captured_layers", "replayed_layers", "evicted_keys")
    return tuple(graphs.stats[name] for name in names)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["legacy", "tagged", "decode", "prefill"])
def test_graphs_equal_eager_calls(layout: Layout, kind: str) -> None:
    """Queries, lengths and segments change from replay to replay."""
    serving = Serving(layout, kind)
    graphs = serving.indexer.layer_graphs()
    run_steps(serving, graphs, STEPS)
    assert counts(graphs) == (LAYERS, LAYERS, (STEPS - 2) * LAYERS, 0)


@pytest.mark.parametrize("side_stream", [False, True], ids=["default-stream", "side-stream"])
def test_queries_written_in_place_and_any_stream(side_stream: bool) -> None:
    serving = Serving(LAYOUTS["p128_tp4"], "tagged")
    graphs = serving.indexer.layer_graphs(capture_after=0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side_stream else None
    with torch.cuda.stream(stream):
        run_steps(serving, graphs, 3, in_place=True)
    torch.cuda.synchronize()
    assert counts(graphs) == (0, LAYERS, 2 * LAYERS, 0)


def test_keys_that_evict_one_another_free_their_graphs() -> None:
    """Eviction and ``clear`` free graphs while other graphs keep working."""
    serving = Serving(LAYOUTS["p128_tp2"], "tagged")
    graphs = serving.indexer.layer_graphs(capture_after=0, max_keys=1)
    first = serving.prefill_output
    second = torch.empty_like(first)
    for number, output in enumerate((first, first, second, second, first, first)):
        serving.prefill_output = output
        run_steps(serving, graphs, 1)
        assert counts(graphs)[3] == (0, 0, 1, 1, 2, 2)[number]
    assert counts(graphs) == (0, 3 * LAYERS, 3 * LAYERS, 2)
    graphs.clear()
    run_steps(serving, graphs, 2)
    assert counts(graphs) == (0, 4 * LAYERS, 4 * LAYERS, 2)


def test_replays_allocate_nothing() -> None:
    serving = Serving(LAYOUTS["p256_tp2"], "prefill")
    graphs = serving.indexer.layer_graphs(capture_after=0)
    run_steps(serving, graphs, 2)
    serving.advance()
    step, query = serving.begin(graphs), serving.query()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        step.run(0, query, serving.keys[0][0])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert counts(graphs)[:2] == (0, LAYERS)


def test_a_caller_that_captures_gets_the_launches() -> None:
    """Layers become part of the caller's graph, whether or not they have graphs of their own."""
    serving = Serving(LAYOUTS["p128_tp2"], "prefill")
    graphs = serving.indexer.layer_graphs(capture_after=0)
    run_steps(serving, graphs, 2)
    serving.advance()
    step, query = serving.begin(graphs), serving.query()
    torch.cuda.synchronize()
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        step.run(1, query, serving.keys[0][1])
    assert counts(graphs) == (1, LAYERS, LAYERS, 0)
    outputs = serving.layer(1, query, lambda slot: whole.replay())
    serving.check(1, query, outputs)
    run_steps(serving, graphs, 1)


@pytest.mark.parametrize("failure", ["exception", "synchronization"])
def test_a_failed_capture_leaves_the_stream_as_it_was(failure: str) -> None:
    """An exchange raises or does what a capture forbids: its exception reaches the caller, and later steps work."""
    serving = Serving(LAYOUTS["p128_tp2"], "tagged")
    graphs = serving.indexer.layer_graphs(capture_after=0)
    right = serving.exchange

    def wrong() -> None:
        right()
        if failure == "exception":
            raise LookupError("no peer")
        int(serving.received[0, 0, 0, 0])

    serving.exchange = wrong  # type: ignore[method-assign]
    serving.advance()
    step = serving.begin(graphs)
    with pytest.raises(LookupError if failure == "exception" else RuntimeError):
        step.run(0, serving.query(), serving.keys[0][0], slot=0)
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    assert counts(graphs) == (0, 0, 0, 0)
    serving.exchange = right  # type: ignore[method-assign]
    # The failed layer has published nothing, so its slot set is still the next one.
    run_steps(serving, graphs, 3)
    assert counts(graphs) == (0, LAYERS, 2 * LAYERS, 0)
    # The failed capture has not left torch's generator in capture mode.
    torch.rand(1, device="cuda")


def test_the_torch_backend_runs_eagerly() -> None:
    """The torch backend synchronizes, which a capture forbids."""
    serving = Serving(LAYOUTS["p128_tp2"], "tagged", backend="torch")
    graphs = serving.indexer.layer_graphs(capture_after=0)
    run_steps(serving, graphs, 1)
    assert counts(graphs) == (LAYERS, 0, 0, 0)
