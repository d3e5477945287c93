# SPDX-License-Identifier: Apache-2.0
"""Prepared steps against the indexer's methods, on the CPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashinfer_msa.backends.storage import SlotHistory
from flashinfer_msa.comm import MSAIcpComm, local_comm
from flashinfer_msa.indexer.steps import MSAIcpDecodeStep, MSAIcpPrefillStep
from flashinfer_msa.layout import LAYOUTS, ROW_WORDS, Layout
from flashinfer_msa.testing.problems import (
    DecodeProblem,
    PrefillProblem,
    brute_force_top16,
    compare,
    exchange,
    group_indexers,
    random_e4m3,
)

LIMITS = {
    "init_blocks": 1,
    "local_blocks": 2,
    "max_decode_tokens": 8,
    "max_decode_query_len": 4,
    "max_num_batched_tokens": 200,
    "max_num_seqs": 4,
    "max_model_len": 3000,
    "num_sparse_layers": 3,
    "backend": "torch",
}


@pytest.fixture(params=LAYOUTS.values(), ids=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


class DecodeRanks:
    """All ranks' decode steps over one problem."""

    def __init__(self, layout: Layout, **changes: Any) -> None:
        self.indexers = group_indexers(layout, ["cpu"] * layout.world_size, **LIMITS)
        self.comms = local_comm(self.indexers)
        self.problem = DecodeProblem.random(layout, seq_lens=[700, 2900, 0], decode_query_len=2, device="cpu", seed=3)
        self.shards = [self.problem.shard(rank) for rank in range(layout.world_size)]
        self.outputs = [torch.full((6, indexer.heads_per_rank, 16), -7, dtype=torch.int32) for indexer in self.indexers]
        self.steps = [
            indexer.prepare_decode_step(
                self.problem.block_table,
                self.problem.seq_lens,
                self.problem.num_valid_pages,
                torch.zeros(indexer.decode_scores_shape()),
                output,
                **{"comm": comm, "tagged": True, "decode_query_len": 2, "debug": False, **changes},
            )
            for indexer, comm, output in zip(self.indexers, self.comms, self.outputs, strict=True)
        ]

    def layer(self, query: torch.Tensor, slot: int) -> None:
        """One layer: the last rank's whole chain after the publishes of the others, then their merges."""
        *others, last = zip(self.steps, self.shards, strict=True)
        for step, keys in others:
            step.publish(query, keys, slot=slot)
        last[0].run(query, last[1], slot=slot)
        for step, _ in others:
            step.merge(slot=slot)

    def require_right(self, query: torch.Tensor) -> None:
        expected = brute_force_top16(replace(self.problem, index_q=query), init_blocks=1, local_blocks=2)
        assert compare(torch.cat(self.outputs, dim=1), expected).wrong == 0


def queries(layout: Layout, count: int) -> list[torch.Tensor]:
    """Queries of several layers."""
    return [
        DecodeProblem.random(layout, seq_lens=[1] * 3, decode_query_len=2, device="cpu", seed=seed).index_q
        for seed in range(count)
    ]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_decode_steps_serve_layers(layout: Layout, tagged: bool, debug: bool) -> None:
    ranks = DecodeRanks(layout, tagged=tagged, debug=debug)
    for number, query in enumerate(queries(layout, 5)):
        ranks.layer(query, number % 3)
        ranks.require_right(query)


def test_a_step_reads_what_its_tensors_hold(layout: Layout) -> None:
    ranks = DecodeRanks(layout, tagged=True)
    query = ranks.problem.index_q
    ranks.layer(query, 0)
    shorter = replace(ranks.problem, seq_lens=torch.tensor([130, 5, 2000], dtype=torch.int32))
    shorter = replace(shorter, block_table=ranks.problem.block_table[[0, 0, 1]])
    for held, new in (
        (ranks.problem.seq_lens, shorter.seq_lens),
        (ranks.problem.block_table, shorter.block_table),
        (ranks.problem.num_valid_pages, shorter.num_valid_pages),
    ):
        held.copy_(new)
    ranks.layer(query, 1)
    expected = brute_force_top16(shorter, init_blocks=1, local_blocks=2)
    assert compare(torch.cat(ranks.outputs, dim=1), expected).wrong == 0


def test_recording_runs_nothing(layout: Layout) -> None:
    ranks = DecodeRanks(layout, tagged=True)
    before = [comm.storages[0].clone() for comm in ranks.comms]
    for step, keys in zip(ranks.steps, ranks.shards, strict=True):
        step.record(ranks.problem.index_q, keys, slot=0)
    assert all(torch.equal(comm.storages[0], was) for comm, was in zip(ranks.comms, before, strict=True))
    assert all((output == -7).all() for output in ranks.outputs)
    ranks.layer(ranks.problem.index_q, 0)
    ranks.require_right(ranks.problem.index_q)


BAD_LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "slot": ({"slot": 3}, r"slot must be .*0.*2.*, was 3"),
    "negative slot": ({"slot": -1}, r"slot must be .*, was -1"),
    "slot of another kind": ({"slot": True}, r"slot must be .*, was True"),
    "query dtype": ({"index_q": torch.zeros(6, 4, 128)}, r"index_q must be torch.float8_e4m3fn, was torch.float32"),
    "query tokens": (
        {"index_q": torch.zeros(4, 4, 128).to(torch.float8_e4m3fn)},
        r"index_q must have shape .*\[6, 4, 128\], was \[4, 4, 128\]",
    ),
    "query stride": (
        {"index_q": torch.zeros(6, 4, 256).to(torch.float8_e4m3fn)[..., :128]},
        "index_q must be contiguous",
    ),
    "no query": ({"index_q": None}, "index_q must be a dense tensor, was None"),
    "key dtype": ({"index_k": torch.zeros(40, 64, 128)}, r"index_k must .*"),
    "key pages": ({"index_k": torch.zeros(3, 64, 128).to(torch.float8_e4m3fn)}, r"index_k must have shape .*"),
    "no keys": ({"index_k": None}, "index_k must be a dense tensor, was None"),
}


@pytest.mark.parametrize(("changes", "says"), BAD_LAYERS.values(), ids=list(BAD_LAYERS))
def test_layers_unlike_the_first_are_refused(changes: dict[str, Any], says: str) -> None:
    ranks = DecodeRanks(LAYOUTS["p128_tp2"], tagged=False)
    ranks.layer(ranks.problem.index_q, 0)
    before = [comm.storages[0].clone() for comm in ranks.comms]
    good = {"index_q": ranks.problem.index_q, "index_k": ranks.shards[0], "slot": 0}
    for method in (ranks.steps[0].run, ranks.steps[0].publish):
        with pytest.raises(ValueError, match=f"^{says}"):
            method(**{**good, **changes})
    assert all(torch.equal(comm.storages[0], was) for comm, was in zip(ranks.comms, before, strict=True))
    ranks.layer(ranks.problem.index_q, 0)
    ranks.require_right(ranks.problem.index_q)


def test_a_tagged_slot_set_is_not_used_twice_in_a_row() -> None:
    ranks = DecodeRanks(LAYOUTS["p256_tp2"], tagged=True)
    query = ranks.problem.index_q
    step, keys = ranks.steps[0], ranks.shards[0]
    for slot in (0, 1, 0, 2):
        ranks.layer(query, slot)
    words = r"^slot must differ from that of the layer before with tagged rows, was 2 twice"
    for again in (
        lambda: step.run(query, keys, slot=2),
        lambda: step.publish(query, keys, slot=2),
        lambda: step.require_slot(2),
        lambda: ranks.indexers[0].decode_publish(
            query,
            keys,
            ranks.problem.block_table,
            ranks.problem.seq_lens,
            ranks.problem.num_valid_pages,
            torch.zeros(ranks.indexers[0].decode_scores_shape()),
            comm=ranks.comms[0],
            slot=2,
            tagged=True,
            decode_query_len=2,
        ),
    ):
        with pytest.raises(ValueError, match=words):
            again()
    ranks.layer(query, 1)
    ranks.require_right(query)
    step.note_replay(0)  # a replay of a captured layer counts
    with pytest.raises(ValueError, match="was 0 twice"):
        step.run(query, keys, slot=0)


@pytest.mark.parametrize("kind", (np.int32, np.int64, np.uint8))
def test_slots_of_numpy_are_slots(kind: type) -> None:
    ranks = DecodeRanks(LAYOUTS["p128_tp2"], tagged=True)
    query, keys, problem = ranks.problem.index_q, ranks.shards[0], ranks.problem
    scores = torch.zeros(ranks.indexers[0].decode_scores_shape())

    def publish(slot: Any) -> None:
        arguments = (problem.block_table, problem.seq_lens, problem.num_valid_pages, scores)
        form = {"comm": ranks.comms[0], "tagged": True, "decode_query_len": 2}
        ranks.indexers[0].decode_publish(query, keys, *arguments, slot=slot, **form)

    publish(kind(0))
    ranks.steps[0].publish(query, keys, slot=kind(1))
    for slot in (1, kind(1)):
        for again in (publish, lambda slot: ranks.steps[0].publish(query, keys, slot=slot)):
            with pytest.raises(ValueError, match=r"^slot must differ from that of the layer before .* was 1 twice"):
                again(slot)


@pytest.mark.parametrize("copied", (copy.copy, copy.deepcopy, pickle.dumps))
def test_what_holds_addresses_is_not_copied(copied: Callable[[Any], Any]) -> None:
    step = DecodeRanks(LAYOUTS["p128_tp2"]).steps[0]
    graphs = step.indexer.layer_graphs()
    begun = graphs.begin_step(decode=step, decode_tokens=step.tokens)
    for thing in (step, PrefillRanks(LAYOUTS["p128_tp2"]).steps[0], graphs, begun):
        with pytest.raises(TypeError, match=f"^an {type(thing).__name__} cannot be copied or pickled"):
            copied(thing)


def test_each_comm_has_a_sequence_of_slot_sets() -> None:
    ranks = DecodeRanks(LAYOUTS["p128_tp4"], tagged=True)
    others = local_comm(ranks.indexers)
    query, problem = ranks.problem.index_q, ranks.problem
    scores = torch.zeros(ranks.indexers[0].decode_scores_shape())

    def publish(comms: list[MSAIcpComm], slot: int) -> None:
        arguments = (problem.block_table, problem.seq_lens, problem.num_valid_pages, scores)
        ranks.indexers[0].decode_publish(
            query, ranks.shards[0], *arguments, comm=comms[0], slot=slot, tagged=True, decode_query_len=2
        )

    publish(ranks.comms, 0)
    publish(others, 0)
    for comms in (ranks.comms, others):
        with pytest.raises(ValueError, match="was 0 twice"):
            publish(comms, 0)
    publish(others, 1)
    publish(ranks.comms, 2)


def test_legacy_slot_sets_may_repeat(layout: Layout) -> None:
    ranks = DecodeRanks(layout, tagged=False)
    for _ in range(3):
        ranks.layer(ranks.problem.index_q, 1)
    ranks.require_right(ranks.problem.index_q)


BAD_DECODE: dict[str, tuple[dict[str, Any], str]] = {
    "debug": ({"debug": 1}, "debug must be True or False, was 1"),
    "tagged": ({"tagged": None}, "tagged must be True or False, was None"),
    "query length": ({"decode_query_len": 5}, r"decode_query_len must be in \[1, 4\], was 5"),
    "pdl": ({"enable_pdl": "yes"}, "enable_pdl must be True or False, was 'yes'"),
    "comm": ({"comm": SimpleNamespace()}, "comm.recv must be a tensor, was None"),
    "pool": ({"pool": torch.zeros(16, dtype=torch.uint8)}, "pool must have at least .*"),
}


@pytest.mark.parametrize(("changes", "says"), BAD_DECODE.values(), ids=list(BAD_DECODE))
def test_bad_decode_steps_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        DecodeRanks(LAYOUTS["p128_tp2"], **changes)


@pytest.mark.parametrize("place", range(5), ids=["block_table", "seq_lens", "num_valid_pages", "scores", "output"])
@pytest.mark.parametrize("value", [torch.zeros(6, dtype=torch.float64), "text"], ids=["dtype", "kind"])
def test_bad_tensors_of_a_decode_step_are_refused(place: int, value: Any) -> None:
    ranks = DecodeRanks(LAYOUTS["p128_tp2"], tagged=True)
    problem = ranks.problem
    arguments: list[Any] = [problem.block_table, problem.seq_lens, problem.num_valid_pages]
    arguments += [torch.zeros(ranks.indexers[0].decode_scores_shape()), ranks.outputs[0]]
    arguments[place] = value
    name = ("block_table", "seq_lens", "num_valid_pages", "scores", "output")[place]
    with pytest.raises(ValueError, match=f"^{name} must "):
        ranks.indexers[0].prepare_decode_step(*arguments, comm=ranks.comms[0], tagged=True, decode_query_len=2)


def test_debug_tells_what_has_changed() -> None:
    ranks = DecodeRanks(LAYOUTS["p128_tp2"], tagged=True, debug=True)
    query, keys = ranks.problem.index_q, ranks.shards[0]
    ranks.layer(query, 0)
    ranks.outputs[0].set_(torch.zeros(6, 2, 16, dtype=torch.int32))
    before = [comm.storages[0].clone() for comm in ranks.comms]
    for call in (lambda: ranks.steps[0].run(query, keys, slot=1), lambda: ranks.steps[0].merge(slot=0)):
        with pytest.raises(RuntimeError, match=r"^output is not what the step was prepared with: .* then, .* now"):
            call()
    assert all(torch.equal(comm.storages[0], was) for comm, was in zip(ranks.comms, before, strict=True))


def test_a_step_refuses_receive_storage_that_is_gone() -> None:
    indexers = group_indexers(LAYOUTS["p128_tp2"], ["cpu"] * 2, **LIMITS)
    comm = SimpleNamespace(**vars(local_comm(indexers)[0]))
    valid = torch.zeros(2, dtype=torch.int32)
    step = indexers[0].prepare_decode_step(
        torch.zeros(2, 4, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        valid,
        torch.zeros(indexers[0].decode_scores_shape()),
        torch.zeros(2, 2, 16, dtype=torch.int32),
        comm=comm,
        tagged=True,
        decode_query_len=1,
    )
    comm.recv = None
    query = torch.zeros(2, 4, 128).to(torch.float8_e4m3fn)
    keys = torch.zeros(1, 64, 128).to(torch.float8_e4m3fn)
    calls = (
        lambda: step.run(query, keys, slot=0),
        lambda: step.publish(query, keys, slot=0),
        lambda: step.record(query, keys, slot=0),
        lambda: step.merge(slot=0),
        lambda: step.require_slot(0),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"^comm must be as it was when the step was prepared"):
            call()


def test_the_key_tells_buffers_apart() -> None:
    first, second = (DecodeRanks(LAYOUTS["p128_tp2"], tagged=True) for _ in range(2))
    step = first.steps[0]
    arguments = first.problem.block_table, first.problem.seq_lens, first.problem.num_valid_pages
    same = {"comm": first.comms[0], "tagged": True, "decode_query_len": 2}

    def prepare(scores: torch.Tensor, output: torch.Tensor, **changes: Any) -> MSAIcpDecodeStep:
        return first.indexers[0].prepare_decode_step(*arguments, scores, output, **{**same, **changes})

    scores = torch.zeros(first.indexers[0].decode_scores_shape())
    key = prepare(scores, first.outputs[0]).key
    assert hash(key) == hash(prepare(scores, first.outputs[0]).key) and key == prepare(scores, first.outputs[0]).key
    assert len({step.key, second.steps[0].key, key}) == 3
    assert key != prepare(scores, first.outputs[0], enable_pdl=False).key
    assert key != prepare(scores, torch.zeros(6, 2, 16, dtype=torch.int32)).key
    assert key != prepare(scores, first.outputs[0], tagged=False).key


# --- prefill ----------------------------------------------------------------------------------------------------------


class PrefillRanks:
    """All ranks' prefill steps over windows of one problem, with rows of padding after the last."""

    def __init__(self, layout: Layout, *, debug: bool = False, pooled: bool = False) -> None:
        # So long a model that a step's windows are of 128 tokens.
        limits = {**LIMITS, "max_model_len": 14_000_000}
        self.indexers = group_indexers(layout, ["cpu"] * layout.world_size, **limits)
        self.problem = PrefillProblem.random(
            layout, query_lens=[40, 0, 3, 64], kv_lens=[700, 9, 1900, 64], padding=5, device="cpu", seed=1
        )
        self.shards = [self.problem.shard(rank) for rank in range(layout.world_size)]
        self.tokens = len(self.problem.index_q)
        carriers = [torch.zeros(indexer.prefill_carrier_shape(), dtype=torch.int32)[0] for indexer in self.indexers]
        self.sends = [carrier[:, : self.tokens] for carrier in carriers]
        sizes = [(indexer.world_size, indexer.heads_per_rank) for indexer in self.indexers]
        self.received = [torch.zeros(*size, self.tokens, ROW_WORDS, dtype=torch.int32) for size in sizes]
        self.outputs = [torch.full((self.tokens, size[1], 16), -7, dtype=torch.int32) for size in sizes]
        self.steps = [self.step(rank, debug=debug, pooled=pooled) for rank in range(layout.world_size)]

    def windows(self, rank: int) -> list[tuple[int, int, torch.Tensor, Any]]:
        """A rank's windows of up to 60 tokens."""
        windows, start = [], 0
        for number, part in enumerate(self.problem.windows(60)):
            window_plan = self.indexers[rank].prefill_window_plan(number, *part.segments, **part.bounds)
            windows.append((start, start + len(part.index_q), part.block_table, window_plan))
            start += len(part.index_q)
        return windows

    def arguments(self, rank: int) -> dict[str, Any]:
        indexer = self.indexers[rank]
        return {
            "windows": self.windows(rank),
            "score_scratch": torch.zeros(indexer.prefill_scratch_shape(2000)),
            "num_valid_pages": self.problem.num_valid_pages,
            "send": self.sends[rank],
            "received": self.received[rank],
            "output": self.outputs[rank],
        }

    def step(self, rank: int, *, debug: bool = False, pooled: bool = False) -> MSAIcpPrefillStep:
        indexer, arguments = self.indexers[rank], self.arguments(rank)
        if pooled:
            arguments["score_scratch"] = None
            arguments["pool"] = torch.zeros(indexer.prefill_pool_shape(), dtype=torch.uint8)
        return indexer.prepare_prefill_step(**arguments, debug=debug)

    def layer(self, query: torch.Tensor) -> None:
        for step, keys in zip(self.steps, self.shards, strict=True):
            step.local(query, keys)
        for step, received, indexer in zip(self.steps, self.received, self.indexers, strict=True):
            received.copy_(exchange(self.sends, indexer))
            step.merge()

    def require_right(self, query: torch.Tensor) -> None:
        expected = brute_force_top16(replace(self.problem, index_q=query), init_blocks=1, local_blocks=2)
        assert (self.problem.num_valid_pages == 0).any()
        assert compare(torch.cat(self.outputs, dim=1), expected).wrong == 0


@pytest.mark.parametrize("form", ["plain", "pooled", "debug"])
def test_prefill_steps_serve_layers(layout: Layout, form: str) -> None:
    ranks = PrefillRanks(layout, debug=form == "debug", pooled=form == "pooled")
    for seed in range(3):
        query = random_e4m3(ranks.problem.index_q.shape, torch.Generator().manual_seed(seed))
        ranks.layer(query)
        ranks.require_right(query)


def test_recording_a_prefill_step_runs_nothing(layout: Layout) -> None:
    ranks = PrefillRanks(layout)
    for step, keys in zip(ranks.steps, ranks.shards, strict=True):
        step.record(ranks.problem.index_q, keys)
    assert all((send == 0).all() for send in ranks.sends) and all((output == -7).all() for output in ranks.outputs)
    ranks.layer(ranks.problem.index_q)
    ranks.require_right(ranks.problem.index_q)


def spans(*bounds: tuple[int, int]) -> Callable[[list[Any]], list[Any]]:
    """Windows with other bounds."""
    return lambda windows: [(*span, *window[2:]) for span, window in zip(bounds, windows, strict=False)]


BAD_PREFILL: dict[str, tuple[str, Any, str]] = {
    "no windows": ("windows", lambda windows: [], "windows must hold at least one window, was empty"),
    "a number": ("windows", lambda windows: 3, "windows must be a sequence of .*, was 3"),
    "not tuples": ("windows", lambda windows: [1], r"windows\[0\] must be \(start, end, .*, was 1"),
    "overlap": ("windows", spans((0, 60), (59, 106)), r"start of windows\[1\] must .*60.*was 59"),
    "order": ("windows", spans((47, 107), (0, 47)), r"start of windows\[1\] must .*was 0"),
    "beyond": ("windows", spans((0, 60), (100, 147)), r"end of windows\[1\] must .*was 147"),
    "negative": ("windows", spans((-1, 59)), r"start of windows\[0\] must .*was -1"),
    "size": ("windows", spans((0, 59)), r"window_plan of windows\[0\] must have total_q == .* 59, was 60"),
    "no plan": ("windows", lambda w: [(0, 60, w[0][2], None)], r"window_plan of windows\[0\] must .*"),
    "block table": ("windows", lambda w: [(0, 60, w[0][2][:0], w[0][3])], "block_table must have shape .*"),
    "send": ("send", lambda send: send[:3], r"send must have shape \[4, tokens, 33\], was \[3, 112, 33\]"),
    "no send": ("send", lambda send: None, "send must be .*, was None"),
    "send dtype": ("send", lambda send: send.long(), "send must be torch.int32, was torch.int64"),
    "sparse send": ("send", lambda send: send.to_sparse(), "send must be a dense tensor"),
    "nested send": ("send", lambda send: torch.nested.nested_tensor(list(send)), "send must be a dense tensor"),
    "heads of send overlap": (
        "send",
        lambda send: send.as_strided(send.shape, (60 * ROW_WORDS, ROW_WORDS, 1)),  # not within a window
        r"send must have rows that do not overlap, .*, had \[1980, 33, 1\]",
    ),
    "valid": ("num_valid_pages", lambda valid: valid[:9], r"num_valid_pages must have shape .*\[112\], was \(9,\)"),
    "no valid": ("num_valid_pages", lambda valid: None, "num_valid_pages must have shape .*, was None"),
    "received": ("received", lambda received: received[:1], "received must have shape .*"),
    "output": ("output", lambda output: output[:5], "output must have shape .*"),
    "scratch": ("score_scratch", lambda scratch: scratch[:59], "score_scratch must have at least 60 .*"),
    "no scratch": ("score_scratch", lambda scratch: None, "score_scratch must be a dense tensor, was None"),
}


@pytest.mark.parametrize(("name", "change", "says"), BAD_PREFILL.values(), ids=list(BAD_PREFILL))
def test_bad_prefill_steps_are_refused(name: str, change: Callable[[Any], Any], says: str) -> None:
    ranks = PrefillRanks(LAYOUTS["p128_tp2"])
    arguments = ranks.arguments(0)
    with pytest.raises(ValueError, match=f"^{says}"):
        ranks.indexers[0].prepare_prefill_step(**{**arguments, name: change(arguments[name])})


def test_prefill_layers_unlike_the_first_are_refused() -> None:
    ranks = PrefillRanks(LAYOUTS["p256_tp4"])
    query, keys = ranks.problem.index_q, ranks.shards[0]
    ranks.layer(query)
    before = ranks.sends[0].clone()
    for bad_query, bad_keys, says in (
        (query[:-1], keys, "index_q must have shape"),
        (None, keys, "(index_q|query) must be a dense tensor, was None"),
        (query.float(), keys, "(index_q|query) must be torch.float8_e4m3fn"),
        (query, keys[:-1], "index_k must have shape"),
        (query, keys.float(), "index_k must be torch.float8_e4m3fn"),
        (query, None, "index_k must be a dense tensor, was None"),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            ranks.steps[0].local(bad_query, bad_keys)
    assert torch.equal(ranks.sends[0], before)
    ranks.layer(query)
    ranks.require_right(query)


def test_debug_tells_what_has_changed_in_a_prefill_step() -> None:
    ranks = PrefillRanks(LAYOUTS["p128_tp2"], debug=True)
    ranks.layer(ranks.problem.index_q)
    ranks.received[0].set_(torch.zeros_like(ranks.received[0]))
    for call in (lambda: ranks.steps[0].local(ranks.problem.index_q, ranks.shards[0]), ranks.steps[0].merge):
        with pytest.raises(RuntimeError, match=r"^received is not what the step was prepared with"):
            call()


def test_the_key_tells_prefill_buffers_apart() -> None:
    ranks = PrefillRanks(LAYOUTS["p128_tp2"])
    first = ranks.indexers[0].prepare_prefill_step(**(arguments := ranks.arguments(0)))
    assert first.key == ranks.indexers[0].prepare_prefill_step(**arguments).key
    shorter = {**arguments, "windows": arguments["windows"][:1]}
    other = {**arguments, "output": arguments["output"].clone()}
    keys = [ranks.indexers[0].prepare_prefill_step(**changed).key for changed in (shorter, other)]
    assert len({hash(key) for key in (first.key, *keys)}) == 3


def test_steps_are_not_for_compiled_code() -> None:
    """With ``fullgraph``, dynamo says why; without, the step runs outside the graph."""
    ranks = DecodeRanks(LAYOUTS["p128_tp2"], tagged=False)
    query = ranks.problem.index_q

    def model() -> None:
        ranks.layer(query, 0)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="prepared steps and layer graphs are for eager code"):
        torch.compile(model, fullgraph=True, backend="eager")()
    torch.compile(model, backend="eager")()
    ranks.require_right(query)


def test_replays_of_a_captured_layer_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured its layers follow one another; afterwards the slot set of a replay is the caller's."""
    limits = DecodeRanks(LAYOUTS["p128_tp2"], tagged=True).indexers[0].limits
    slots = SlotHistory(replace(limits, device=torch.device("cuda", 0)))
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def is_refused(slot: int) -> bool:
        try:
            slots.require(slot, True)
        except ValueError:
            return True
        return False

    slots.note(1)
    assert is_refused(1) and not is_refused(2)
    capturing = False
    assert not is_refused(1)
    slots.note(1)
    assert is_refused(1)
    slots.note(None)
    assert not is_refused(1)
