# SPDX-License-Identifier: Apache-2.0
"""Layer graphs: which layers run eagerly, are captured and are replayed, and that each does what an eager one does.

There are no CUDA graphs on a CPU. What is captured here is the call that enqueues the work, made once without its work,
and a replay makes it again: whatever the layer graphs get wrong about buffers, order, slots and keys shows in outputs.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashinfer_msa.backends.storage import SlotHistory
from flashinfer_msa.backends.torch_backend import TorchBackend
from flashinfer_msa.comm import local_comm
from flashinfer_msa.indexer import layer_graphs
from flashinfer_msa.indexer.layer_graphs import MSAIcpGraphStep, MSAIcpLayerGraphs
from flashinfer_msa.indexer.steps import MSAIcpDecodeStep
from flashinfer_msa.layout import HEAD_DIM, LAYOUTS, NUM_HEADS, ROW_WORDS, TOP_K, Layout
from flashinfer_msa.testing.problems import (
    DecodeProblem,
    PrefillProblem,
    brute_force_top16,
    exchange,
    group_indexers,
    random_e4m3,
    share_cache,
)

LIMITS: dict[str, Any] = {
    "init_blocks": 1,
    "local_blocks": 2,
    "max_decode_tokens": 8,
    "max_decode_query_len": 2,
    "max_num_batched_tokens": 8193,  # two windows
    "max_num_seqs": 4,
    "max_model_len": 4096,
    "num_sparse_layers": 3,
    "backend": "torch",
}
FORCED = {"init_blocks": 1, "local_blocks": 2}
LAYERS = 3
BATCH, QUERY_LEN, SEGMENTS = 2, 2, 2
LONG, SHORT = 2304, 300
"""Keys in the cache of each request and segment, of which a step sees fewer: more blocks than are selected, or not."""


class FakeGraphs:
    """Stands in for CUDA graphs: a capture makes the call without its work and keeps it, replays make it with that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures = self.replays = 0
        self.failure: BaseException | None = None
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(TorchBackend, "can_capture", lambda *_: True)
        monkeypatch.setattr(layer_graphs, "_new_pool", object)
        monkeypatch.setattr(layer_graphs, "_capture", self._capture)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def _capture(self, launch: Callable[[], None], device: torch.device, pool: Any) -> tuple[Any, Callable[..., None]]:
        assert pool is not None
        if self.failure is not None:
            raise self.failure
        with self._monkeypatch.context() as patch:
            for work in ("_decode", "prefill_local", "prefill_merge"):
                patch.setattr(TorchBackend, work, lambda *arguments: None)
            launch()
        self.captures += 1

        def replay(staging: torch.Tensor, index_q: torch.Tensor) -> None:
            # As the launcher checks it.
            like = isinstance(index_q, torch.Tensor) and (index_q.dtype, index_q.device) == (
                staging.dtype,
                staging.device,
            )
            if not like or index_q.shape != staging.shape or not index_q.is_contiguous():
                raise ValueError(f"index_q must be {staging.dtype} {tuple(staging.shape)}, dense, was {index_q!r}")
            self.replays += 1
            if index_q.data_ptr() != staging.data_ptr():
                staging.copy_(index_q)
            with self._monkeypatch.context() as patch:
                # A CUDA graph does not know of slots.
                patch.setattr(SlotHistory, "require", lambda *arguments: None)
                launch()

        return object(), replay


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """Graphs that can be captured on a CPU."""
    return FakeGraphs(monkeypatch)


@contextmanager
def caller_captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the caller were capturing a graph."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


class Serving:
    """A group in one process, with rank 0's buffers for steps of a few sizes; what they hold changes step by step.

    Rank 0 runs layer graphs. The others publish and send before it, and merge after it.
    """

    def __init__(self, layout: Layout = LAYOUTS["p128_tp2"], *, tagged: bool = True, length: int = SHORT) -> None:
        self.layout, self.tagged, self.length = layout, tagged, length
        self.indexers = group_indexers(layout, ["cpu"], **LIMITS)
        self.indexer = self.indexers[0]
        self.comms = local_comm(self.indexers)
        self.draw = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)
        decode = DecodeProblem.random(layout, seq_lens=[length] * BATCH, decode_query_len=QUERY_LEN)
        prefill = PrefillProblem.random(layout, query_lens=[1] * SEGMENTS, kv_lens=[length] * SEGMENTS, seed=1)
        decode, prefill = share_cache(decode, prefill)
        self.layers = []
        for _ in range(LAYERS):
            pages = random_e4m3(decode.pages.shape, self.generator)
            self.layers.append((replace(decode, pages=pages), replace(prefill, pages=pages)))
        self.keys = [[problem.shard(rank) for problem, _ in self.layers] for rank in range(layout.world_size)]
        self.uses = 0

    def decode_part(self, batch: int = BATCH) -> DecodePart:
        """Buffers of decode steps of one size."""
        return DecodePart(self, batch)

    def prefill_part(self, tokens: int = 12) -> PrefillPart:
        """Buffers of prefill steps of one size."""
        return PrefillPart(self, tokens)

    def step(
        self,
        graphs: MSAIcpLayerGraphs,
        *,
        decode: DecodePart | None = None,
        prefill: PrefillPart | None = None,
        run: Callable[[MSAIcpGraphStep, int, torch.Tensor, torch.Tensor, int], None] | None = None,
        **more: Any,
    ) -> MSAIcpGraphStep:
        """Run a step over longer sequences and new queries, and compare every layer with the brute force."""
        arguments: dict[str, Any] = {}
        if decode is not None:
            decode.advance()
            arguments |= {"decode": decode.step(), "decode_tokens": decode.tokens}
        if prefill is not None:
            prefill.advance()
            arguments |= {"prefill": prefill.step(), "exchange": prefill.exchange}
        step = graphs.begin_step(**{**arguments, **more})
        decode_tokens = 0 if decode is None else decode.tokens
        tokens = decode_tokens + (0 if prefill is None else prefill.tokens)
        for layer in range(LAYERS):
            query = random_e4m3((tokens, NUM_HEADS, HEAD_DIM), self.generator)
            slot = self.uses % 3
            self.uses += 1
            if decode is not None:
                decode.publish_peers(layer, query[:decode_tokens], slot)
            if prefill is not None:
                prefill.send_peers(layer, query[decode_tokens:])
            if run is None:
                step.run(layer, query, self.keys[0][layer], slot=slot)
            else:
                run(step, layer, query, self.keys[0][layer], slot)
            if decode is not None:
                decode.merge_peers(slot)
                decode.check(layer, query[:decode_tokens])
            if prefill is not None:
                prefill.check(layer, query[decode_tokens:])
        return step


class DecodePart:
    """Rank 0's buffers of decode steps of one size, and what its peers do."""

    def __init__(self, serving: Serving, batch: int) -> None:
        self.serving, self.batch, self.tokens = serving, batch, batch * QUERY_LEN
        self.seq_lens = torch.tensor(
            [serving.draw.randrange(serving.length - 200, serving.length - 100) for _ in range(batch)],
            dtype=torch.int32,
        )
        self.block_table = serving.layers[0][0].block_table[:batch].clone()
        self.num_valid_pages = torch.zeros(self.tokens, dtype=torch.int32)
        self.scores = torch.zeros(serving.indexer.decode_scores_shape())
        self.output = torch.zeros(self.tokens, serving.indexer.heads_per_rank, TOP_K, dtype=torch.int32)

    def step(self) -> MSAIcpDecodeStep:
        """Prepare a new step, as a server does each time."""
        return self.serving.indexer.prepare_decode_step(
            self.block_table,
            self.seq_lens,
            self.num_valid_pages,
            self.scores,
            self.output,
            comm=self.serving.comms[0],
            tagged=self.serving.tagged,
            decode_query_len=QUERY_LEN,
        )

    def advance(self) -> None:
        """Let every request grow."""
        grown = [self.serving.draw.randrange(1, 20) for _ in range(self.batch)]
        self.seq_lens += torch.tensor(grown, dtype=torch.int32)
        self.num_valid_pages.copy_(self.problem(0, None).num_valid_pages)

    def problem(self, layer: int, query: torch.Tensor | None) -> DecodeProblem:
        """The step's problem in one layer."""
        base = self.serving.layers[layer][0]
        query = base.index_q if query is None else query
        return replace(base, index_q=query, seq_lens=self.seq_lens, block_table=self.block_table)

    def publish_peers(self, layer: int, query: torch.Tensor, slot: int) -> None:
        serving = self.serving
        for rank in range(1, serving.layout.world_size):
            serving.indexers[rank].decode_publish(
                query,
                serving.keys[rank][layer],
                self.block_table,
                self.seq_lens,
                self.num_valid_pages,
                self.scores.clone(),
                comm=serving.comms[rank],
                slot=slot,
                tagged=serving.tagged,
                decode_query_len=QUERY_LEN,
            )

    def merge_peers(self, slot: int) -> None:
        serving = self.serving
        for rank in range(1, serving.layout.world_size):
            serving.indexers[rank].decode_merge(
                self.num_valid_pages,
                torch.empty_like(self.output),
                comm=serving.comms[rank],
                slot=slot,
                tagged=serving.tagged,
            )

    def check(self, layer: int, query: torch.Tensor) -> None:
        expected = brute_force_top16(self.problem(layer, query), **FORCED).ids[:, : self.serving.indexer.heads_per_rank]
        assert torch.equal(self.output, expected)
        self.output.fill_(-7)


class PrefillPart:
    """Rank 0's buffers of prefill steps of two windows of one size, and what its peers do."""

    def __init__(self, serving: Serving, tokens: int) -> None:
        self.serving, self.tokens, self.cut = serving, tokens, tokens * 2 // 3
        indexer, world_size = serving.indexer, serving.layout.world_size
        self.block_table = serving.layers[0][1].block_table.clone()
        self.segments = [
            [torch.zeros(n, dtype=torch.int32) for n in (SEGMENTS, SEGMENTS, SEGMENTS + 1, SEGMENTS + 1, SEGMENTS)]
            for _ in range(2)
        ]
        self.num_valid_pages = torch.zeros(tokens, dtype=torch.int32)
        self.scratch = torch.zeros(tokens, *indexer.prefill_scratch_shape()[1:])
        self.sends = [torch.zeros(NUM_HEADS, tokens, ROW_WORDS, dtype=torch.int32) for _ in range(world_size)]
        self.received = torch.zeros(world_size, indexer.heads_per_rank, tokens, ROW_WORDS, dtype=torch.int32)
        self.output = torch.zeros(tokens, indexer.heads_per_rank, TOP_K, dtype=torch.int32)
        self.exchanges = 0

    def advance(self) -> None:
        """Other segments of the same bounds, with the first in both windows."""
        draw = self.serving.draw
        for index, tokens in enumerate((self.cut, self.tokens - self.cut)):
            first = draw.randrange(1, tokens)
            lens = [first, tokens - first]
            positions = [self.serving.length - n - draw.randrange(100) for n in lens]
            problem = self.problem(0, index, None, lens, positions)
            for held, new in zip(self.segments[index], problem.segments, strict=True):
                held.copy_(new)
            self.num_valid_pages[self.rows(index)] = problem.num_valid_pages

    def rows(self, index: int) -> slice:
        """Tokens of a window."""
        return slice(0, self.cut) if index == 0 else slice(self.cut, self.tokens)

    def problem(
        self,
        layer: int,
        index: int,
        query: torch.Tensor | None,
        lens: list[int] | None = None,
        positions: list[int] | None = None,
    ) -> PrefillProblem:
        """A window's problem in one layer; its segments are those that the buffers hold unless given."""
        lens = self.segments[index][0].tolist() if lens is None else lens
        positions = self.segments[index][4].tolist() if positions is None else positions
        rows = self.rows(index)
        base = self.serving.layers[layer][1]
        blank = torch.zeros(rows.stop - rows.start, NUM_HEADS, HEAD_DIM, dtype=torch.float8_e4m3fn)
        return replace(
            base,
            index_q=blank if query is None else query[rows],
            query_lens=tuple(lens),
            positions=tuple(positions),
            seq_lens=torch.tensor([p + n for p, n in zip(positions, lens, strict=True)], dtype=torch.int32),
        )

    def windows(self, rank: int) -> list[tuple[int, int, torch.Tensor, Any]]:
        """Plan both windows on one rank."""
        planned = []
        for index in range(2):
            rows = self.rows(index)
            tokens = rows.stop - rows.start
            bounds = {"total_q": tokens, "max_query_len": tokens, "max_seq_len": self.serving.length}
            plan = self.serving.indexers[rank].prefill_window_plan(index, *self.segments[index], **bounds)
            planned.append((rows.start, rows.stop, self.block_table, plan))
        return planned

    def step(self) -> Any:
        """Prepare a new step, as a server does each time."""
        return self.serving.indexer.prepare_prefill_step(
            self.windows(0), self.scratch, self.num_valid_pages, self.sends[0], self.received, self.output
        )

    def exchange(self) -> None:
        """What the all-to-all brings to rank 0."""
        self.exchanges += 1
        self.received.copy_(exchange(self.sends, self.serving.indexer))

    def send_peers(self, layer: int, query: torch.Tensor) -> None:
        serving = self.serving
        for rank in range(1, serving.layout.world_size):
            for start, stop, block_table, plan in self.windows(rank):
                serving.indexers[rank].prefill_local(
                    query[start:stop],
                    serving.keys[rank][layer],
                    block_table,
                    plan,
                    self.scratch.clone(),
                    self.num_valid_pages[start:stop],
                    self.sends[rank][:, start:stop],
                )

    def check(self, layer: int, query: torch.Tensor) -> None:
        for index in range(2):
            expected = brute_force_top16(self.problem(layer, index, query), **FORCED).ids
            assert torch.equal(self.output[self.rows(index)], expected[:, : self.serving.indexer.heads_per_rank])
        for buffer in (self.output, self.received, *self.sends):
            buffer.fill_(-7)


def stats(graphs: MSAIcpLayerGraphs) -> tuple[int, int, int, int]:
    """Eager, captured and replayed layers, and evicted keys."""
    names = ("eager_layers", "captured_layers", "replayed_layers", "evicted_keys")
    assert isinstance(graphs.stats, Counter) and set(graphs.stats) == set(names)
    return tuple(graphs.stats[name] for name in names)  # type: ignore[return-value]


PARTS = pytest.mark.parametrize("parts", [("decode",), ("prefill",), ("decode", "prefill")], ids="+".join)


def make_parts(serving: Serving, parts: tuple[str, ...]) -> dict[str, Any]:
    """The named parts of a step."""
    makers = {"decode": serving.decode_part, "prefill": serving.prefill_part}
    return {name: makers[name]() for name in parts}


# --- results and counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "form"),
    [(layout, form) for layout in LAYOUTS for form in ("legacy", "tagged")]
    + [("p128_tp2", form) for form in ("decode", "prefill")],
)
def test_steps_equal_the_brute_force(fake_graphs: FakeGraphs, layout: str, form: str) -> None:
    """Over growing sequences and other segments, in eager, captured and replayed layers; both parts or only one."""
    serving = Serving(LAYOUTS[layout], tagged=form != "legacy", length=LONG)
    graphs = serving.indexer.layer_graphs()
    held = make_parts(serving, (form,) if form in ("decode", "prefill") else ("decode", "prefill"))
    for step in range(3):
        serving.step(graphs, **held)
        assert stats(graphs) == (LAYERS, LAYERS * (step >= 1), LAYERS * (step >= 2), 0)
    assert (fake_graphs.captures, fake_graphs.replays) == (LAYERS, 2 * LAYERS)
    if "prefill" in held:
        assert held["prefill"].exchanges == 4 * LAYERS  # a capture makes the call, too


@PARTS
def test_a_cpu_runs_every_layer_eagerly(parts: tuple[str, ...]) -> None:
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0)
    held = make_parts(serving, parts)
    for step in range(3):
        serving.step(graphs, **held)
        assert stats(graphs) == ((step + 1) * LAYERS, 0, 0, 0)


@pytest.mark.parametrize("capture_after", [0, 1, 3])
def test_so_many_steps_of_a_key_run_eagerly(fake_graphs: FakeGraphs, capture_after: int) -> None:
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=capture_after)
    small, large = serving.decode_part(1), serving.decode_part(2)
    for step in range(capture_after + 2):
        # Steps of another key in between do not count.
        serving.step(graphs, decode=small)
        serving.step(graphs, decode=large)
        eager = 2 * LAYERS * min(step + 1, capture_after)
        assert stats(graphs) == (eager, 2 * LAYERS * (step >= capture_after), 2 * LAYERS * (step > capture_after), 0)


def test_a_layer_or_slot_that_comes_up_later_is_captured_then(fake_graphs: FakeGraphs) -> None:
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0)
    decode = serving.decode_part()
    serving.step(graphs, decode=decode)
    serving.uses += 1  # as with a number of layers that slot sets do not divide
    serving.step(graphs, decode=decode)
    assert stats(graphs) == (0, 2 * LAYERS, 0, 0)
    serving.step(graphs, decode=decode)
    assert stats(graphs) == (0, 2 * LAYERS, LAYERS, 0)


def test_other_keys_of_a_layer_are_captured_anew(fake_graphs: FakeGraphs) -> None:
    """Equal keys at another address, in another shape or with another pitch are another K shard; both stay captured."""
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0)
    decode = serving.decode_part()
    serving.step(graphs, decode=decode)
    original = list(serving.keys[0])
    moved = [keys.clone() for keys in original]
    longer = [torch.cat([keys.view(torch.uint8)] * 2).view(keys.dtype) for keys in original]
    shorter = [keys[: len(keys) // 2] for keys in longer]
    pitched = []
    for keys in original:
        wide = torch.zeros(len(keys), keys.shape[1] + 1, HEAD_DIM, dtype=torch.uint8)
        wide[:, :-1] = keys.view(torch.uint8)
        pitched.append(wide.view(keys.dtype)[:, :-1])
    captured = LAYERS
    for shards in (moved, longer, shorter, pitched):
        serving.keys[0] = shards
        serving.step(graphs, decode=decode)
        captured += LAYERS
        assert stats(graphs)[:3] == (0, captured, 0)
    for shards in (original, moved, longer, shorter, pitched):
        serving.keys[0] = [keys.view(keys.shape) for keys in shards]  # other tensors of the same memory
        serving.step(graphs, decode=decode)
    assert stats(graphs)[:3] == (0, captured, 5 * LAYERS)


def test_keys_of_one_place_with_another_pitch_are_captured_anew(fake_graphs: FakeGraphs) -> None:
    serving = Serving(tagged=False)
    graphs = serving.indexer.layer_graphs(capture_after=0)
    part = serving.decode_part()
    pages, rows = serving.keys[0][0].shape[:2]
    storage = torch.zeros(pages, rows + 1, HEAD_DIM, dtype=torch.float8_e4m3fn)
    dense = storage.flatten()[: pages * rows * HEAD_DIM].view(pages, rows, HEAD_DIM)
    query = random_e4m3((part.tokens, NUM_HEADS, HEAD_DIM), serving.generator)
    for keys, expected in ((dense, (0, 1, 0, 0)), (storage[:, :rows], (0, 2, 0, 0)), (dense, (0, 2, 1, 0))):
        step = graphs.begin_step(decode=part.step(), decode_tokens=part.tokens)
        part.publish_peers(0, query, 0)
        step.run(0, query, keys, slot=0)
        part.merge_peers(0)
        assert stats(graphs) == expected


def test_what_a_key_is_made_of(fake_graphs: FakeGraphs) -> None:
    """A buffer at another address, another exchange key or set of parts makes another key; new contents do not."""
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0, max_keys=100)
    decode, prefill = serving.decode_part(), serving.prefill_part()
    captured = 0

    def expect_new(**arguments: Any) -> None:
        nonlocal captured
        serving.step(graphs, **arguments)
        captured += LAYERS
        assert stats(graphs)[1] == captured

    expect_new(decode=decode)
    expect_new(prefill=prefill)
    expect_new(decode=decode, prefill=prefill)
    expect_new(prefill=prefill, exchange_key="another")
    expect_new(prefill=prefill, exchange_key=("several", 2))
    for part, names in (
        (decode, ("seq_lens", "block_table", "num_valid_pages", "scores", "output")),
        (prefill, ("block_table", "num_valid_pages", "scratch", "received", "output")),
    ):
        for name in names:
            setattr(part, name, getattr(part, name).clone())
            expect_new(**{"decode" if part is decode else "prefill": part})
    prefill.sends[0] = prefill.sends[0].clone()
    expect_new(prefill=prefill)
    replayed = stats(graphs)[2]
    serving.step(graphs, prefill=prefill)
    serving.step(graphs, decode=decode)
    assert stats(graphs) == (0, captured, replayed + 2 * LAYERS, 0)


# --- which keys keep graphs -------------------------------------------------------------------------------------------


def test_the_least_recently_used_key_makes_room(fake_graphs: FakeGraphs) -> None:
    serving = Serving()
    graphs = serving.indexer.layer_graphs(max_keys=2)
    a, b, c = (serving.decode_part() for _ in range(3))

    def run(part: DecodePart, eager: int = 0, captured: int = 0, replayed: int = 0, evicted: int = 0) -> None:
        before = stats(graphs)
        serving.step(graphs, decode=part)
        counts = tuple(now - then for now, then in zip(stats(graphs), before, strict=True))
        assert counts == (eager * LAYERS, captured * LAYERS, replayed * LAYERS, evicted)

    for part in (a, b):
        run(part, eager=1)
        run(part, captured=1)
    run(a, replayed=1)
    run(c, eager=1)  # keeps no graph yet, so nothing makes room for it
    run(b, replayed=1)
    run(a, replayed=1)
    run(c, captured=1, evicted=1)  # b is the one used least recently
    run(a, replayed=1)
    run(c, replayed=1)
    run(b, eager=1)  # starts over
    run(b, captured=1, evicted=1)
    run(c, replayed=1)
    run(a, eager=1)


@pytest.mark.parametrize("way", ["eviction", "clear"])
def test_graphs_keep_alive_what_they_read(fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Prepared steps, their buffers and K shards live as long as the graphs, and no longer."""
    # A real graph holds addresses, not tensors.
    monkeypatch.setattr(
        layer_graphs, "_capture", lambda launch, device, pool: (object(), lambda staging, index_q: None)
    )
    serving = Serving(tagged=False)
    graphs = serving.indexer.layer_graphs(capture_after=0, max_keys=1)

    def capture_layer(part: DecodePart) -> list[weakref.ref[Any]]:
        keys = serving.keys[0][0].clone()
        step = graphs.begin_step(decode=part.step(), decode_tokens=part.tokens)
        step.run(0, step.query, keys)
        return [weakref.ref(x) for x in (step._decode, part.output, part.seq_lens, keys)]

    held = capture_layer(serving.decode_part())
    gc.collect()
    assert all(reference() is not None for reference in held)
    if way == "clear":
        graphs.clear()
    else:
        capture_layer(serving.decode_part(1))
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


@pytest.mark.parametrize("way", ["eviction", "clear"])
def test_a_step_goes_on_after_its_graphs_went(fake_graphs: FakeGraphs, way: str) -> None:
    """Steps that have begun capture again what another step's key, or ``clear``, has taken away."""
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0, max_keys=1)
    decode = serving.decode_part()
    serving.step(graphs, decode=decode)
    seen = []

    def between(step: MSAIcpGraphStep, layer: int, query: torch.Tensor, keys: torch.Tensor, slot: int) -> None:
        step.run(layer, query, keys, slot=slot)
        seen.append(stats(graphs))
        if layer == 0 and way == "clear":
            graphs.clear()
        elif layer == 0:
            graphs._store("another key", layer_graphs._KeyGraphs({}, {}, query))

    serving.step(graphs, decode=decode, run=between)
    evicted = 0 if way == "clear" else 2  # this key by the other, and the other by this
    assert seen == [(0, LAYERS, 1, 0), (0, LAYERS + 1, 1, evicted), (0, LAYERS + 2, 1, evicted)]
    serving.step(graphs, decode=decode)
    assert stats(graphs) == (0, LAYERS + 3, 3, evicted)


def test_clear_forgets_steps_too(fake_graphs: FakeGraphs) -> None:
    serving = Serving()
    graphs = serving.indexer.layer_graphs()
    decode = serving.decode_part()
    for _ in range(2):
        serving.step(graphs, decode=decode)
        graphs.clear()
    assert stats(graphs) == (2 * LAYERS, 0, 0, 0)
    serving.step(graphs, decode=decode)
    serving.step(graphs, decode=decode)
    serving.step(graphs, decode=decode)
    assert stats(graphs) == (3 * LAYERS, LAYERS, LAYERS, 0)
    with graphs as same:
        assert same is graphs
    serving.step(graphs, decode=decode)
    assert stats(graphs) == (4 * LAYERS, LAYERS, LAYERS, 0)


def test_keys_that_never_come_again_do_not_add_up(fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_graphs, "_MAX_SEEN_KEYS", 3)
    serving = Serving()
    graphs = serving.indexer.layer_graphs()
    prefill = serving.prefill_part()
    kept = serving.decode_part()
    serving.step(graphs, decode=kept)
    serving.step(graphs, decode=kept)
    for i in range(9):
        serving.step(graphs, prefill=prefill, exchange_key=i)
        assert len(graphs._seen) == min(i + 1, 3)
    assert stats(graphs) == (LAYERS + 9 * LAYERS, LAYERS, 0, 0)
    serving.step(graphs, prefill=prefill, exchange_key=7)
    serving.step(graphs, prefill=prefill, exchange_key=0)
    serving.step(graphs, decode=kept)
    assert stats(graphs) == (LAYERS + 10 * LAYERS, 2 * LAYERS, LAYERS, 0)


# --- queries ----------------------------------------------------------------------------------------------------------


@PARTS
def test_a_query_written_in_place_is_not_copied(
    fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]
) -> None:
    """``step.query`` is what the graphs read; other queries are copied there, wherever they lie."""
    serving = Serving()
    graphs = serving.indexer.layer_graphs()
    held = make_parts(serving, parts)
    copies = []
    copy = torch.Tensor.copy_

    def in_place(step: MSAIcpGraphStep, layer: int, query: torch.Tensor, keys: torch.Tensor, slot: int) -> None:
        assert step.query.shape == query.shape and step.query.dtype == query.dtype
        copy(step.query, query)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", lambda to, source: copies.append(to.dtype) or copy(to, source))
            step.run(layer, step.query, keys, slot=slot)

    buffers = []
    for _ in range(4):
        buffers.append(serving.step(graphs, **held, run=in_place).query.data_ptr())
    assert torch.float8_e4m3fn not in copies
    serving.step(graphs, **held)
    assert stats(graphs)[:3] == (LAYERS, LAYERS, 3 * LAYERS)
    assert len(set(buffers[1:])) == 1


def test_a_query_buffer_of_inference_mode_serves_outside(fake_graphs: FakeGraphs) -> None:
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0)
    decode = serving.decode_part()
    with torch.inference_mode():
        serving.step(graphs, decode=decode)
    serving.step(graphs, decode=decode)
    assert stats(graphs)[:3] == (0, LAYERS, LAYERS)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
def test_a_wrong_layer_is_refused_before_anything_runs(fake_graphs: FakeGraphs, captured: bool) -> None:
    """Whether the layer has a graph or not: by the name of the argument, with nothing written or counted."""
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0 if captured else 9)
    decode, prefill = serving.decode_part(), serving.prefill_part()
    held = {"decode": decode, "prefill": prefill}
    serving.step(graphs, **held)
    step = graphs.begin_step(
        decode=decode.step(), prefill=prefill.step(), exchange=prefill.exchange, decode_tokens=decode.tokens
    )
    before, replays, exchanges = stats(graphs), fake_graphs.replays, prefill.exchanges
    right = random_e4m3((decode.tokens + prefill.tokens, NUM_HEADS, HEAD_DIM), serving.generator)
    keys = serving.keys[0][0]
    wrong_queries = (
        right[:-1],
        torch.cat([right.view(torch.uint8)] * 2).view(right.dtype),
        right.view(torch.uint8),
        right.float(),
        right.view(-1),
        right[:, :2],
        right.transpose(0, 1).contiguous().transpose(0, 1),
        right.to("meta"),
        None,
        [1.0],
    )
    shape = rf"\({decode.tokens + prefill.tokens}, 4, 128\)"
    for wrong in wrong_queries:
        with pytest.raises(ValueError, match=rf"^index_q must be .*{shape}.* was "):
            step.run(0, wrong, keys, slot=0)
    for wrong_layer in (-1, 1.5, "0", None, [0]):
        with pytest.raises(ValueError, match=r"^layer must be .*was "):
            step.run(wrong_layer, right, keys, slot=0)  # type: ignore[arg-type]
    for wrong_slot in (-1, 3, 0.5, "0", None, [0]):
        with pytest.raises(ValueError, match=r"^slot must be .*was "):
            step.run(0, right, keys, slot=wrong_slot)  # type: ignore[arg-type]
    for wrong_keys in (None, 3, keys.float(), keys[:, :-1], keys.to("meta")):
        with pytest.raises(ValueError, match=r"^index_k must "):
            step.run(0, right, wrong_keys, slot=0)  # type: ignore[arg-type]
    assert (stats(graphs), fake_graphs.replays, prefill.exchanges) == (before, replays, exchanges)
    assert (decode.output == -7).all() and (prefill.output == -7).all() and (prefill.sends[0] == -7).all()


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_a_tagged_slot_set_is_not_used_twice_in_a_row(fake_graphs: FakeGraphs, tagged: bool) -> None:
    """By replays as by eager layers, and before anything is launched. Legacy rows may be used again at once."""
    serving = Serving(tagged=tagged)
    graphs = serving.indexer.layer_graphs(capture_after=0)
    decode = serving.decode_part()
    serving.step(graphs, decode=decode)
    step = graphs.begin_step(decode=decode.step(), decode_tokens=decode.tokens)
    query = random_e4m3((decode.tokens, NUM_HEADS, HEAD_DIM), serving.generator)

    def run(layer: int, slot: int) -> None:
        decode.publish_peers(layer, query, slot)
        step.run(layer, query, serving.keys[0][layer], slot=slot)
        decode.merge_peers(slot)
        decode.check(layer, query)

    run(0, 0)
    replays = fake_graphs.replays
    if tagged:
        with pytest.raises(ValueError, match=r"^slot must "):
            step.run(0, query, serving.keys[0][0], slot=0)
        assert fake_graphs.replays == replays and (decode.output == -7).all()
        with pytest.raises(ValueError, match=r"^slot must "):
            step.run(LAYERS, query, serving.keys[0][0], slot=0)  # one that has no graph yet
        assert fake_graphs.captures == LAYERS
    else:
        run(0, 0)
    run(1, 1)
    run(0, 0)


# --- captures that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_capture_leaves_no_graph(fake_graphs: FakeGraphs, failure: BaseException) -> None:
    serving = Serving()
    graphs = serving.indexer.layer_graphs()
    decode = serving.decode_part()
    serving.step(graphs, decode=decode)
    fake_graphs.failure = failure
    step = graphs.begin_step(decode=decode.step(), decode_tokens=decode.tokens)
    query = random_e4m3((decode.tokens, NUM_HEADS, HEAD_DIM), serving.generator)
    with pytest.raises(type(failure)) as raised:
        step.run(0, query, serving.keys[0][0], slot=0)
    assert raised.value is failure
    assert stats(graphs) == (LAYERS, 0, 0, 0)
    fake_graphs.failure = None
    serving.step(graphs, decode=decode)
    serving.step(graphs, decode=decode)
    assert stats(graphs) == (LAYERS, LAYERS, LAYERS, 0)


def test_a_failed_capture_leaves_other_keys_alone(fake_graphs: FakeGraphs) -> None:
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0, max_keys=1)
    decode, other = serving.decode_part(), serving.decode_part(1)
    serving.step(graphs, decode=decode)
    fake_graphs.failure = RuntimeError("no")
    step = graphs.begin_step(decode=other.step(), decode_tokens=other.tokens)
    with pytest.raises(RuntimeError, match=r"^no$"):
        step.run(0, step.query, serving.keys[0][0], slot=0)
    serving.step(graphs, decode=decode)
    assert stats(graphs) == (0, LAYERS, LAYERS, 0)


def test_an_exchange_that_fails_is_the_callers(fake_graphs: FakeGraphs) -> None:
    """Eagerly or in a capture, its exception comes through and nothing is counted."""
    serving = Serving()
    graphs = serving.indexer.layer_graphs()
    prefill = serving.prefill_part()

    def broken() -> None:
        raise LookupError("no peer")

    for _ in range(2):
        prefill.advance()
        step = graphs.begin_step(prefill=prefill.step(), exchange=broken)
        with pytest.raises(LookupError, match="no peer"):
            step.run(0, step.query, serving.keys[0][0])
    assert stats(graphs)[:1] == (0,)


def test_a_failed_capture_gives_its_slot_set_back(fake_graphs: FakeGraphs) -> None:
    """Nothing of the layer has run, so it may be tried again."""
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0)
    held = make_parts(serving, ("decode", "prefill"))
    serving.step(graphs, **held)

    def broken() -> None:
        raise LookupError("no peer")

    step = graphs.begin_step(
        decode=held["decode"].step(),
        decode_tokens=held["decode"].tokens,
        prefill=held["prefill"].step(),
        exchange=broken,
        exchange_key="broken",
    )
    with pytest.raises(LookupError, match="no peer"):
        step.run(0, step.query, serving.keys[0][0], slot=serving.uses % 3)
    serving.step(graphs, **held, exchange_key="broken")
    assert stats(graphs) == (0, 2 * LAYERS, 0, 0)


def test_a_caller_that_captures_gets_the_launches(fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a capture nor a replay within a capture: the layers run eagerly into the caller's graph."""
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0)
    held = make_parts(serving, ("decode", "prefill"))
    with caller_captures(monkeypatch):
        serving.step(graphs, **held)
    assert stats(graphs)[:3] == (LAYERS, 0, 0)
    serving.step(graphs, **held)
    with caller_captures(monkeypatch):
        serving.step(graphs, **held)
    serving.step(graphs, **held)
    assert stats(graphs)[:3] == (2 * LAYERS, LAYERS, LAYERS)
    assert fake_graphs.captures == LAYERS


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("capture_after", wrong) for wrong in (-1, 1.0, True, "1", None)]
    + [("max_keys", wrong) for wrong in (0, -1, 1.0, True, None)],
)
def test_limits_are_checked(name: str, wrong: Any) -> None:
    indexer = Serving().indexer
    with pytest.raises(ValueError, match=rf"^{name} must be .*was {wrong!r}"):
        indexer.layer_graphs(**{name: wrong})


def test_begin_step_checks_its_arguments() -> None:
    serving, other = Serving(), Serving()
    graphs = serving.indexer.layer_graphs()
    part, window = serving.decode_part(), serving.prefill_part()
    window.advance()
    decode, prefill = part.step(), window.step()
    strange = other.prefill_part()
    strange.advance()
    good: dict[str, Any] = {
        "decode": decode,
        "decode_tokens": part.tokens,
        "prefill": prefill,
        "exchange": window.exchange,
    }
    for says, changes in (
        (r"prefill or decode must be a step .*both None", {name: None for name in ("decode", "prefill", "exchange")}),
        (r"decode must be an MSAIcpDecodeStep or None, was 3", {"decode": 3}),
        (r"decode must be an MSAIcpDecodeStep or None, was ", {"decode": prefill}),
        (r"prefill must be an MSAIcpPrefillStep or None, was ", {"prefill": decode}),
        (r"decode must be a step of this indexer, .* was one of ", {"decode": other.decode_part().step()}),
        (r"prefill must be a step of this indexer, .* was one of ", {"prefill": strange.step()}),
        (r"exchange must be callable with a prefill step, was None", {"exchange": None}),
        (r"exchange must be callable with a prefill step, was 'nccl'", {"exchange": "nccl"}),
        (r"exchange must be None without a prefill step, was ", {"prefill": None}),
        (r"exchange_key must be hashable, was \[1\]", {"exchange_key": [1]}),
        (rf"decode_tokens must be the decode step's {part.tokens}, was 0", {"decode_tokens": 0}),
        (rf"decode_tokens must be the decode step's {part.tokens}, was 5", {"decode_tokens": 5}),
        (r"decode_tokens must be 0 without a decode step, was 4", {"decode": None, "decode_tokens": 4}),
        (r"decode_tokens must be an integer, was 4\.0", {"decode_tokens": 4.0}),
        (r"decode_tokens must be at least 0, was -1", {"decode_tokens": -1}),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            graphs.begin_step(**{**good, **changes})
    assert stats(graphs) == (0, 0, 0, 0) and not graphs._seen
    graphs.begin_step(**good)


def test_a_step_without_a_token_runs_eagerly(fake_graphs: FakeGraphs) -> None:
    """There is nothing to capture."""
    serving = Serving()
    graphs = serving.indexer.layer_graphs(capture_after=0)
    decode = serving.decode_part(0)
    for _ in range(2):
        serving.step(graphs, decode=decode)
    assert stats(graphs) == (2 * LAYERS, 0, 0, 0)


def test_repr_says_what_it_is() -> None:
    graphs = Serving(LAYOUTS["p256_tp4"]).indexer.layer_graphs(capture_after=2, max_keys=3)
    text = repr(graphs)
    assert "P256" in text and "capture_after=2" in text and "max_keys=3" in text and "0 keys" in text
