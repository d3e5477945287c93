# SPDX-License-Identifier: Apache-2.0
"""Custom operators and compiled code, with the torch backend on the CPU: equal to eager calls, in one graph."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer_msa import msa_ops
from flashinfer_msa.abi import calls
from flashinfer_msa.backends import compiled as custom_ops
from flashinfer_msa.comm import MSAIcpComm, local_comm
from flashinfer_msa.indexer import MSAIcpIndexerPlan
from flashinfer_msa.layout import LAYOUTS, NUM_HEADS, ROW_WORDS, TOP_K, Layout
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.testing.problems import DecodeProblem, PrefillProblem, brute_force_top16, exchange, group_indexers

LAYOUT = LAYOUTS["p256_tp2"]
QUERY_LEN = 2
FORCED = {"force_begin_blocks": 1, "force_end_blocks": 2}
BLOCKS = {"init_blocks": 1, "local_blocks": 2}
both_forms = pytest.mark.parametrize("tagged", (False, True), ids=("legacy", "tagged"))


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


@dataclass
class Group:
    """Every rank of a group, its receive storage and its score planes."""

    indexers: list[MSAIcpIndexerPlan]
    comms: list[MSAIcpComm]
    scores: list[torch.Tensor]

    @classmethod
    def make(cls, layout: Layout = LAYOUT) -> Group:
        indexers = group_indexers(
            layout,
            ["cpu"],
            **BLOCKS,
            max_decode_tokens=16,
            max_decode_query_len=4,
            max_num_batched_tokens=256,
            max_num_seqs=4,
            max_model_len=4096,
            num_sparse_layers=3,
            backend="torch",
        )
        comms = local_comm(indexers)
        for indexer, comm in zip(indexers, comms, strict=True):
            indexer.check_comm(comm)
        return cls(indexers, comms, [torch.full(indexer.decode_scores_shape(), -777.0) for indexer in indexers])

    def state(self) -> list[torch.Tensor]:
        """All that the decode chain writes beside its output."""
        return [
            *self.scores,
            *(
                getattr(comm, name)
                for comm in self.comms
                for name in vars(comm)
                if "base" not in name and name != "storages"
            ),
        ]

    def publish(
        self, rank: int, step: DecodeProblem, shard: torch.Tensor, pool: torch.Tensor | None = None, **form: Any
    ) -> None:
        self.indexers[rank].decode_publish(
            step.index_q,
            shard,
            step.block_table,
            step.seq_lens,
            step.num_valid_pages,
            None if pool is not None else self.scores[rank],
            comm=self.comms[rank],
            decode_query_len=QUERY_LEN,
            pool=pool,
            **form,
        )


def problem(lengths: tuple[int, ...] = (700, 1200, 90), layout: Layout = LAYOUT) -> DecodeProblem:
    made = DecodeProblem.random(
        layout, seq_lens=lengths, decode_query_len=QUERY_LEN, block_table_extra_columns=1, page_pitch_extra=32
    )
    _ = made.num_valid_pages  # cached: no compiled code computes it
    return made


def assert_all_equal(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(ours) == len(expected)
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), i


# --- decode -----------------------------------------------------------------------------------------------------------


def indexer_layers(
    group: Group, step: DecodeProblem, shards: list[torch.Tensor], *, tagged: bool
) -> Callable[..., Any]:
    """A model of two layers that decodes as every rank, one of them with the fused chain."""
    pool = torch.empty(msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=16), dtype=torch.uint8)

    def layers(index_q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, first_slot: int) -> Any:
        now = replace(step, index_q=index_q, block_table=block_table, seq_lens=seq_lens)
        valid = step.num_valid_pages[: len(index_q)]
        selected = []
        for layer in range(2):
            form = {"slot": (first_slot + layer) % 3, "tagged": tagged}
            for rank, indexer in enumerate(group.indexers):
                indexer.decode_publish(
                    now.index_q,
                    shards[rank],
                    now.block_table,
                    now.seq_lens,
                    valid,
                    group.scores[rank] if layer == 0 else None,
                    comm=group.comms[rank],
                    decode_query_len=QUERY_LEN,
                    pool=None if layer == 0 else pool,
                    **form,
                )
            for rank, indexer in enumerate(group.indexers):
                output = torch.empty(len(index_q), indexer.heads_per_rank, TOP_K, dtype=torch.int32)
                indexer.decode_merge(valid, output, comm=group.comms[rank], **form)
                selected.append(output)
        return selected

    return layers


@pytest.mark.parametrize(
    ("layout", "tagged"),
    [(LAYOUT, False), *((layout, True) for layout in LAYOUTS.values())],
    ids=lambda value: value.name if isinstance(value, Layout) else "tagged" if value else "legacy",
)
def test_decode_halves(layout: Layout, tagged: bool) -> None:
    """Steps of a compiled model select, publish and count what eager ones do, and what the brute force says."""
    step = problem(layout=layout)
    shards = [step.shard(rank) for rank in range(layout.world_size)]
    groups = [Group.make(layout), Group.make(layout)]
    eager, ours = (indexer_layers(group, step, shards, tagged=tagged) for group in groups)
    ours = compiled(ours)
    best = brute_force_top16(step, **BLOCKS).ids
    for i in range(4):
        arguments = (step.index_q, step.block_table, step.seq_lens, 2 * i % 3)
        selected = ours(*arguments)
        assert_all_equal(selected, eager(*arguments))
        assert torch.equal(torch.cat(selected[: layout.world_size], 1), best)
        assert_all_equal(groups[1].state(), groups[0].state())


def test_decode_in_one_call() -> None:
    """The whole chain, for a rank whose peers have published."""
    step = problem()
    groups = [Group.make(), Group.make()]
    shards = [step.shard(rank) for rank in range(LAYOUT.world_size)]
    results = []
    for group, compile_ in zip(groups, (False, True), strict=True):
        indexer, comm, scores = group.indexers[0], group.comms[0], group.scores[0]

        def layer(slot: int, indexer: Any = indexer, comm: Any = comm, scores: Any = scores) -> torch.Tensor:
            output = torch.empty(len(step.index_q), indexer.heads_per_rank, TOP_K, dtype=torch.int32)
            indexer.decode(
                step.index_q,
                shards[0],
                step.block_table,
                step.seq_lens,
                step.num_valid_pages,
                scores,
                output,
                comm=comm,
                slot=slot,
                tagged=True,
                decode_query_len=QUERY_LEN,
            )
            return output

        run = compiled(layer) if compile_ else layer
        for slot in (0, 1, 0):
            group.publish(1, step, shards[1], slot=slot, tagged=True)
            results.append(run(slot))
    assert_all_equal(results[3:], results[:3])
    assert_all_equal(groups[1].state(), groups[0].state())


def functions_chain(group: Group, step: DecodeProblem, shards: list[torch.Tensor], *, tagged: bool, fused: bool) -> Any:
    """The functions as every rank. One ``errors`` for all of them keeps their publishes before their merges."""
    errors = group.comms[0].errors
    pool = torch.empty(msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=16), dtype=torch.uint8)

    def chain(slot: int) -> list[torch.Tensor]:
        for indexer, comm, shard, scores in zip(group.indexers, group.comms, shards, group.scores, strict=True):
            size = {"rank": indexer.rank, "world_size": indexer.world_size}
            step_of = (step.index_q, shard, step.block_table, step.seq_lens)
            kind = {
                "slot": slot,
                "capacity": indexer.max_decode_tokens,
                "generations": comm.publish_generations if tagged else None,
                **FORCED,
            }
            bases = comm.tagged_recv_bases if tagged else comm.recv_bases
            form = {"page_size": LAYOUT.page_size, "decode_query_len": QUERY_LEN, "backend": "torch"}
            if fused:
                msa_ops.msa_icp_decode_score_publish(
                    *step_of, step.num_valid_pages, pool, bases, errors, **size, **kind, **form
                )
                continue
            plane = scores[: len(step.index_q)]
            msa_ops.msa_icp_decode_index_score_sharded(*step_of, plane, max_decode_query_len=4, **size, **form)
            msa_ops.msa_icp_topk_select_publish(
                plane,
                step.num_valid_pages,
                bases,
                errors,
                heads_per_rank=indexer.heads_per_rank,
                index_scale=indexer.index_scale,
                index_offset=indexer.index_offset,
                backend="torch",
                **size,
                **kind,
            )
        outputs = []
        for indexer, comm in zip(group.indexers, group.comms, strict=True):
            output = torch.empty(len(step.index_q), indexer.heads_per_rank, TOP_K, dtype=torch.int32)
            msa_ops.msa_icp_merge_candidates(
                (comm.tagged_recv if tagged else comm.recv)[slot],
                step.num_valid_pages,
                output,
                errors,
                expected_generations=comm.expected_generations[slot] if tagged else None,
                backend="torch",
                **BLOCKS,
            )
            outputs.append(output)
        return outputs

    return chain


@both_forms
@pytest.mark.parametrize("fused", (False, True), ids=("separate", "fused"))
def test_decode_functions(tagged: bool, fused: bool) -> None:
    step = problem()
    shards = [step.shard(rank) for rank in range(LAYOUT.world_size)]
    groups = [Group.make(), Group.make()]
    eager, ours = (functions_chain(group, step, shards, tagged=tagged, fused=fused) for group in groups)
    ours = compiled(ours)
    best = brute_force_top16(step, **BLOCKS).ids
    for slot in (0, 1, 2, 0):
        selected = ours(slot)
        assert_all_equal(selected, eager(slot))
        assert torch.equal(torch.cat(selected, 1), best)
    assert_all_equal(groups[1].state(), groups[0].state())


@pytest.mark.parametrize("chain", (indexer_layers, functools.partial(functions_chain, fused=False)))
def test_inductor_writes_in_place(chain: Callable[..., Any]) -> None:
    """No copies: peers store into the rows that a merge has been given, not into those of a copy."""
    step = problem()
    shards = [step.shard(rank) for rank in range(LAYOUT.world_size)]
    groups = [Group.make(), Group.make()]
    eager, ours = (chain(group, step, shards, tagged=True) for group in groups)
    arguments = (step.index_q, step.block_table, step.seq_lens, 1) if chain is indexer_layers else (1,)
    selected, (code,) = run_and_get_code(compiled(ours, "inductor"), *arguments)
    assert_all_equal(selected, eager(*arguments))
    assert_all_equal(groups[1].state(), groups[0].state())
    calls = re.findall(r"torch\.ops\.flashinfer_msa\.(\w+)\.default\(", code)
    assert len(calls) == (8 if chain is indexer_layers else 6)
    assert "copy" not in code and "clone" not in code and "async_compile.cpp" not in code


def test_batches_share_a_graph() -> None:
    """Once the batch is dynamic, no other batch and no other slot set compiles again."""
    step = problem((700, 1200, 90, 300))
    shards = [step.shard(rank) for rank in range(LAYOUT.world_size)]
    counter = CompileCounterWithBackend("aot_eager")
    layers = indexer_layers(Group.make(), step, shards, tagged=True)
    ours = compiled(layers, counter, dynamic=True)
    best = brute_force_top16(step, **BLOCKS).ids
    for i, batch in enumerate((4, 2, 3, 4, 2, 3)):
        tokens = batch * QUERY_LEN
        selected = ours(step.index_q[:tokens], step.block_table[:batch], step.seq_lens[:batch], (1 + 2 * i) % 3)
        assert torch.equal(torch.cat(selected[:2], 1), best[:tokens])
        if i == 2:
            counter.frame_count = 0
    assert counter.frame_count == 0


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_slot_sets_of_compiled_code_come_between(backend: str) -> None:
    """A slot set may come back in eager code after another one in compiled code, whose counters may be copies."""
    step, group = problem(), Group.make()
    shard = step.shard(0)

    def publish(slot: int) -> None:
        group.publish(0, step, shard, slot=slot, tagged=True)

    publish(0)
    compiled(publish, backend)(1)
    publish(0)
    generations = group.comms[0].publish_generations[:, :, : len(step.index_q)]
    assert [set(of_slot.flatten().tolist()) for of_slot in generations] == [{2}, {1}, {0}]
    with pytest.raises(ValueError, match=r"^slot must differ from that of the layer before .* was 0 twice"):
        publish(0)


def test_order_of_a_graph() -> None:
    """Compilers may reorder what shares nothing: every chain of a device writes one word, at a fixed address."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    step = problem()
    shards = [step.shard(rank) for rank in range(LAYOUT.world_size)]
    compiled(indexer_layers(Group.make(), step, shards, tagged=True), keep)(
        step.index_q, step.block_table, step.seq_lens, 0
    )
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if node.target is torch.ops.flashinfer_msa.decode.default]
    assert len(calls) == 2 * 2 * LAYOUT.world_size
    assert [node.args[3] for node in calls] == 2 * ([True] * LAYOUT.world_size + [False] * LAYOUT.world_size)
    (word,) = {node.args[2] for node in calls}
    schema = torch.ops.flashinfer_msa.decode.default._schema
    assert schema.arguments[2].name == "order" and schema.arguments[2].is_write
    assert "_dynamo_static_input_type" in word.meta["tensor_dict"]


# --- prefill ----------------------------------------------------------------------------------------------------------


def plan_storage() -> dict[str, torch.Tensor]:
    sizes = msa_ops.msa_icp_index_score_plan_storage(num_qo_heads=NUM_HEADS, total_q=256, batch=4, device="cpu")
    return {
        "packed_work_range": torch.zeros(sizes["work_range_numel"], dtype=torch.int64),
        "packed_work_info": torch.zeros(sizes["work_info_numel"], dtype=torch.int64),
        "workspace": torch.zeros(sizes["workspace_bytes"], dtype=torch.uint8),
    }


def device_plan(step: PrefillProblem, storage: dict[str, torch.Tensor]) -> MSAIcpScorePlan:
    return msa_ops.msa_icp_index_score_sharded_plan_device(
        *step.segments, NUM_HEADS, **step.bounds, **storage, backend="torch"
    )


def prefill_pool() -> torch.Tensor:
    size = msa_ops.msa_icp_prefill_pool_bytes(total_q=256, batch=4, device="cpu")
    return torch.empty(size, dtype=torch.uint8)


def carrier_of(step: PrefillProblem) -> torch.Tensor:
    return torch.full((NUM_HEADS, len(step.index_q), ROW_WORDS), -777, dtype=torch.int32)


@pytest.fixture
def step() -> PrefillProblem:
    """A window with an empty segment and padding. What it derives is there before anything compiles."""
    made = PrefillProblem.random(LAYOUT, query_lens=(40, 0, 70), kv_lens=(500, 0, 1500), padding=5)
    _ = made.segments, made.num_valid_pages
    return made


@pytest.mark.parametrize("planned", ("inside", "outside"))
def test_prefill_functions(step: PrefillProblem, planned: str) -> None:
    """Plan, score, select and merge; scores and plan in one graph, or the plan of another."""
    segments, bounds, shards = step.segments, step.bounds, [step.shard(rank) for rank in range(LAYOUT.world_size)]
    columns = msa_ops.msa_icp_index_score_columns(1500, LAYOUT.page_size)
    valid, index_q, block_table = step.num_valid_pages, step.index_q, step.block_table

    def chain(storage: dict[str, torch.Tensor], plan: MSAIcpScorePlan | None) -> Any:
        if plan is None:
            plan = msa_ops.msa_icp_index_score_sharded_plan_device(
                *segments, NUM_HEADS, **bounds, **storage, backend="torch"
            )
        carriers, planes = [], []
        for rank, shard in enumerate(shards):
            scores = torch.empty(len(index_q), NUM_HEADS, columns)
            carrier = torch.empty(NUM_HEADS, len(index_q), ROW_WORDS, dtype=torch.int32)
            kind = {"rank": rank, "tp": LAYOUT.world_size, "compact": True, "backend": "torch"}
            msa_ops.msa_icp_index_score_sharded(index_q, shard, block_table, plan=plan, max_score=scores, **kind)
            msa_ops.msa_icp_topk_select_prefill(
                scores, valid, carrier, index_scale=2, index_offset=LAYOUT.index_offset(rank), backend="torch", **FORCED
            )
            carriers.append(carrier)
            planes.append(scores)
        merged = []
        for rank in range(LAYOUT.world_size):
            own = slice(rank * LAYOUT.heads_per_rank, (rank + 1) * LAYOUT.heads_per_rank)
            output = torch.empty(len(index_q), LAYOUT.heads_per_rank, TOP_K, dtype=torch.int32)
            msa_ops.msa_icp_merge_candidates(
                torch.stack([carrier[own] for carrier in carriers]),
                valid,
                output,
                torch.zeros(1, dtype=torch.int32),
                prefill=True,
                backend="torch",
                **BLOCKS,
            )
            merged.append(output)
        return plan, [*carriers, *planes, *merged]

    storages = plan_storage(), plan_storage()
    plans = [None if planned == "inside" else device_plan(step, storage) for storage in storages]
    expected_plan, expected = chain(storages[0], plans[0])
    plan, ours = compiled(chain)(storages[1], plans[1])
    assert_all_equal(ours, expected)
    assert_all_equal(list(storages[1].values()), list(storages[0].values()))
    assert isinstance(plan, MSAIcpScorePlan)
    assert_all_equal(*([v for v in vars(p).values() if isinstance(v, torch.Tensor)] for p in (plan, expected_plan)))
    best = brute_force_top16(step, **BLOCKS).ids
    tokens = sum(step.query_lens)
    assert torch.equal(torch.cat(ours[-LAYOUT.world_size :], 1)[:tokens], best[:tokens])


def test_fused_prefill_function(step: PrefillProblem) -> None:
    indexer, pool, shard = device_plan(step, plan_storage()), prefill_pool(), step.shard(1)

    def chain(carrier: torch.Tensor) -> None:
        msa_ops.msa_icp_prefill_score_select(
            step.index_q,
            shard,
            step.block_table,
            indexer,
            step.num_valid_pages,
            pool,
            carrier,
            rank=1,
            tp=LAYOUT.world_size,
            compact=True,
            accumulation="exact",
            backend="torch",
            **FORCED,
        )

    expected, ours = carrier_of(step), carrier_of(step)
    chain(expected)
    compiled(chain)(ours)
    assert_all_equal([ours], [expected])


@pytest.mark.parametrize("fused", (False, True), ids=("scratch", "pool"))
@pytest.mark.parametrize("planned", ("inside", "outside"))
def test_prefill_of_the_indexer(step: PrefillProblem, fused: bool, planned: str) -> None:
    """The indexer's window plan, local part and merge in one graph, the exchange between them included."""
    shards = [step.shard(rank) for rank in range(LAYOUT.world_size)]
    segments, bounds, valid = step.segments, step.bounds, step.num_valid_pages
    pool = prefill_pool() if fused else None

    def layer(indexers: list[MSAIcpIndexerPlan], scratch: torch.Tensor, windows: list[Any]) -> list[torch.Tensor]:
        carriers = []
        for indexer, shard, made in zip(indexers, shards, windows, strict=True):
            window = indexer.prefill_window_plan(0, *segments, **bounds) if made is None else made
            carrier = torch.empty(NUM_HEADS, len(step.index_q), ROW_WORDS, dtype=torch.int32)
            indexer.prefill_local(
                step.index_q, shard, step.block_table, window, None if fused else scratch, valid, carrier, pool=pool
            )
            carriers.append(carrier)
        merged = []
        for indexer in indexers:
            output = torch.empty(len(step.index_q), indexer.heads_per_rank, TOP_K, dtype=torch.int32)
            indexer.prefill_merge(exchange(carriers, indexer), valid, output)
            merged.append(output)
        return [*carriers, *merged]

    results = []
    for run in (layer, compiled(layer)):
        indexers = Group.make().indexers
        inside = planned == "inside"
        windows = [None if inside else indexer.prefill_window_plan(0, *segments, **bounds) for indexer in indexers]
        results.append(run(indexers, torch.full(indexers[0].prefill_scratch_shape(), -777.0), windows))
    assert_all_equal(results[1], results[0])
    best = brute_force_top16(step, **BLOCKS).ids
    tokens = sum(step.query_lens)
    assert torch.equal(torch.cat(results[1][-LAYOUT.world_size :], 1)[:tokens], best[:tokens])


# --- operators --------------------------------------------------------------------------------------------------------


def operator_calls() -> dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Arguments of every operator. It may run again with them: rows are tagged, and what a merge waits for is there."""
    return {
        "msa_icp_decode_index_score_sharded": _decode_score_call,
        "msa_icp_topk_select_publish": _publish_call,
        "msa_icp_decode_score_publish": _score_publish_call,
        "msa_icp_merge_candidates": _merge_call,
        "msa_icp_index_score_sharded_plan_device": _plan_call,
        "msa_icp_index_score_sharded": _prefill_score_call,
        "msa_icp_topk_select_prefill": _select_call,
        "msa_icp_prefill_score_select": _score_select_call,
        "decode": _chain_call,
        "prefill_local": _local_call,
        "prefill_merge": _exchanged_call,
    }


KEEP: list[Any] = []
"""Indexers and receive storage whose addresses or numbers a call has."""


def _given(call: Any) -> dict[str, Any]:
    """What the operator of a call takes."""
    given = {**call._asdict(), "backend": "torch"}
    for name in ("plan", "window_plan"):
        if name in given:
            indexer = given.pop(name)
            given |= {f"{name}_tensors": list(indexer.tensors()), f"{name}_numbers": list(indexer.numbers())}
    return given


def _decode_score_call() -> Any:
    now, group = problem(), Group.make()
    plane = group.scores[0][: len(now.index_q)]
    sizes = {"world_size": LAYOUT.world_size, "page_size": LAYOUT.page_size, "max_decode_query_len": 4}
    tensors = (now.index_q, now.shard(1), now.block_table, now.seq_lens, plane)
    return _given(calls.DecodeScore(*tensors, rank=1, **sizes, decode_query_len=QUERY_LEN, enable_pdl=False))


_PUBLISH = {"capacity": 16, "spin_limit": 1 << 26, "enable_pdl": False, **FORCED}


def _publish_call() -> Any:
    now, group = problem(), Group.make()
    KEEP.append(group)
    comm, scores = group.comms[0], torch.randn(len(now.index_q), NUM_HEADS, 8)
    kind = {"slot": 1, "rank": 0, "world_size": 2, "heads_per_rank": 2, "index_scale": 2, "index_offset": 0, **_PUBLISH}
    tensors = (scores, now.num_valid_pages, comm.tagged_recv_bases, comm.errors)
    return _given(calls.SelectPublish(*tensors, generations=comm.publish_generations, **kind))


def _score_publish_call() -> Any:
    now, group = problem(), Group.make()
    KEEP.append(group)
    comm = group.comms[1]
    pool = torch.zeros(msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=16), dtype=torch.uint8)
    step_of = (now.index_q, now.shard(1), now.block_table, now.seq_lens, now.num_valid_pages)
    sizes = {"rank": 1, "world_size": 2, "page_size": LAYOUT.page_size, "decode_query_len": QUERY_LEN, "slot": 2}
    tensors = (*step_of, pool, comm.tagged_recv_bases, comm.errors)
    return _given(calls.ScorePublish(*tensors, **sizes, generations=comm.publish_generations, **_PUBLISH))


def _published(slot: int) -> tuple[DecodeProblem, Group]:
    """A step whose ranks have all published."""
    now, group = problem(), Group.make()
    for rank in range(LAYOUT.world_size):
        group.publish(rank, now, now.shard(rank), slot=slot, tagged=True)
    KEEP.append(group)
    return now, group


def _output(tokens: int) -> torch.Tensor:
    return torch.full((tokens, LAYOUT.heads_per_rank, TOP_K), -777, dtype=torch.int32)


def _merge_call() -> Any:
    now, group = _published(0)
    comm = group.comms[0]
    return _given(
        calls.Merge(
            now.num_valid_pages,
            _output(len(now.index_q)),
            comm.errors,
            spin_limit=1 << 26,
            enable_pdl=False,
            prefill=False,
            tagged=True,
            expected_generations=comm.expected_generations[0],
            recv_slot=comm.tagged_recv[0],
            **BLOCKS,
        )
    )


def _chain_call() -> Any:
    """The whole chain of a rank whose peer has published."""
    now, group = problem(), Group.make()
    group.publish(1, now, now.shard(1), slot=2, tagged=True)
    KEEP.append(group)
    storages, comm = group.indexers[0]._storages, group.comms[0]
    half = (now.index_q, now.shard(0), now.block_table, now.seq_lens, group.scores[0], None, QUERY_LEN)
    call = calls.Decode(True, True, 2, True, False, now.num_valid_pages, *half, _output(len(now.index_q)))
    names = ("publish_generations", "expected_generations", "errors")
    known = {"storages": storages.handle, "comm": storages.handle_of(comm), "order": storages.order.word}
    return {**_given(call), **known, **{name: getattr(comm, name) for name in names}}


def _prefill_window() -> PrefillProblem:
    return PrefillProblem.random(LAYOUT, query_lens=(40, 0, 70), kv_lens=(500, 0, 1500), padding=5)


def _plan_call() -> Any:
    now = _prefill_window()
    return _given(calls.PrefillPlan(*now.segments, num_qo_heads=NUM_HEADS, **now.bounds, **plan_storage()))


def _prefill_score_call() -> Any:
    now = _prefill_window()
    scores = torch.full((len(now.index_q), NUM_HEADS, 16), -777.0)
    tensors = (now.index_q, now.shard(0), now.block_table, device_plan(now, plan_storage()))
    flags = {"sm_scale": 1.0, "initialize": True, "compact": True, "enable_pdl": False, "exact": False}
    return _given(calls.PrefillScore(*tensors, rank=0, tp=2, max_score=scores, **flags))


def _select_call() -> Any:
    now = _prefill_window()
    scores = torch.randn(len(now.index_q), NUM_HEADS, 12)
    tensors = (scores, now.num_valid_pages, carrier_of(now))
    return _given(calls.SelectPrefill(*tensors, **FORCED, index_scale=2, index_offset=0))


def _score_select_call() -> Any:
    now = _prefill_window()
    # Memory that nothing writes would differ between runs.
    pool = prefill_pool().zero_()
    tensors = (now.index_q, now.shard(0), now.block_table, device_plan(now, plan_storage()))
    to = {"num_valid_pages": now.num_valid_pages, "pool": pool, "carrier": carrier_of(now)}
    flags = {"compact": True, "enable_pdl": False, "exact": False}
    return _given(calls.PrefillScoreSelect(*tensors, rank=0, tp=2, **to, **FORCED, **flags))


def _local_call() -> Any:
    now = _prefill_window()
    scratch = torch.full((len(now.index_q), NUM_HEADS, 16), -777.0)
    tensors = (now.index_q, now.shard(0), now.block_table, device_plan(now, plan_storage()))
    to = (scratch, now.num_valid_pages, carrier_of(now))
    return _given(calls.PrefillLocal(*tensors, 0, 2, *to, 1, 2, 2, 0, None, None, False))


def _exchanged_call() -> Any:
    rows = torch.randint(0, 9, (2, 2, 5, ROW_WORDS), dtype=torch.int32)
    return _given(calls.PrefillMerge(rows, torch.full((5,), 9, dtype=torch.int32), _output(5), 2, 1, 2))


def test_every_operator_has_arguments() -> None:
    assert set(operator_calls()) == set(custom_ops._operators)


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake implementation and compilation of each operator."""
    # The check looks for changes with allclose, which torch has for numbers of one byte only where they are integers.
    allclose = torch.allclose

    def same(a: torch.Tensor, b: torch.Tensor, **options: Any) -> bool:
        floats = a.dtype.is_floating_point and a.element_size() == 1
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if floats else allclose(a, b, **options)

    monkeypatch.setattr(torch, "allclose", same)
    options = operator_calls()[name]()
    operator = getattr(torch.ops.flashinfer_msa, name).default
    done = torch.library.opcheck(operator, (), options)
    assert set(done.values()) == {"SUCCESS"}, done


@pytest.mark.parametrize("name", operator_calls())
def test_written_arguments_are_those_declared(name: str) -> None:
    """What opcheck does not see: an argument that is declared and never written costs a copy."""
    given = operator_calls()[name]()
    operator = getattr(torch.ops.flashinfer_msa, name).default
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    before = {key: value.view(torch.uint8).clone() for key, value in tensors.items() if value.numel()}
    operator(**given)
    written = {key for key, value in before.items() if not torch.equal(tensors[key].view(torch.uint8), value)}
    declared = {argument.name for argument in operator._schema.arguments if argument.is_write}
    # Rows are written by peers, or released; errors where a wait runs out; the reference has no use for scratch; and
    # the word only keeps the order.
    assert declared - written <= {"recv_slot", "errors", "pool", "workspace", "order", "scores"} | {
        key for key in declared if given.get(key) is None
    }
    assert written <= declared and written
    expected = {"output", "carrier", "carrier_view", "score_out", "max_score", "packed_work_info", "generations"}
    assert declared & expected & set(tensors) <= written


@pytest.mark.parametrize("name", operator_calls())
def test_fake_implementations_check_nothing(name: str) -> None:
    """Tensors without memory pass, also on the meta device."""
    given = operator_calls()[name]()
    operator = getattr(torch.ops.flashinfer_msa, name).default
    with FakeTensorMode() as mode:
        assert operator(**_mapped(given, mode.from_tensor)) is None
    assert operator(**_mapped(given, lambda tensor: tensor.to("meta"))) is None


def _mapped(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, change, values)


class _Operators(TorchDispatchMode):
    """Notes operators of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flashinfer_msa":
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_eager_calls_are_no_operators() -> None:
    now, group = problem(), Group.make()
    shards = [now.shard(rank) for rank in range(LAYOUT.world_size)]
    with _Operators() as mode:
        indexer_layers(group, now, shards, tagged=True)(now.index_q, now.block_table, now.seq_lens, 0)
        functions_chain(Group.make(), now, shards, tagged=True, fused=False)(0)
        assert mode.seen == []
        custom_ops._operators["prefill_merge"][0](**_exchanged_call())
        assert len(mode.seen) == 1


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_of_arguments_from_compiled_code() -> None:
    """Arguments are checked where the operator runs, by the checks of eager calls, and nothing is written."""
    now, group = problem(), Group.make()
    run = compiled(indexer_layers(group, now, [now.shard(0)] * 2, tagged=True))
    before = [tensor.clone() for tensor in group.state()]
    with pytest.raises(ValueError, match=r"index_q.*float8_e4m3fn"):
        run(now.index_q.to(torch.float16), now.block_table, now.seq_lens, 0)
    with pytest.raises(ValueError, match="block_table"):
        run(now.index_q, now.block_table.long(), now.seq_lens, 0)
    with pytest.raises(ValueError, match="slot must be"):
        compiled(
            lambda slot: group.indexers[0].decode_merge(
                now.num_valid_pages, _output(len(now.index_q)), comm=group.comms[0], slot=slot, tagged=True
            )
        )(3)
    assert_all_equal(group.state(), before)


def test_receive_storage_must_be_known() -> None:
    """Compiled code says what to do for receive storage that was never checked, and runs once it was."""
    now, group = problem(), Group.make()
    group.comms = local_comm(group.indexers)
    shards = [now.shard(rank) for rank in range(LAYOUT.world_size)]
    run = compiled(indexer_layers(group, now, shards, tagged=True))
    arguments = (now.index_q, now.block_table, now.seq_lens, 0)
    with pytest.raises(RuntimeError, match="call check_comm"):
        run(*arguments)
    for indexer, comm in zip(group.indexers, group.comms, strict=True):
        indexer.check_comm(comm)
    assert torch.equal(torch.cat(run(*arguments)[:2], 1), brute_force_top16(now, **BLOCKS).ids)
    # New storage is not known, even at the address of the old.
    group.comms = local_comm(group.indexers)
    with pytest.raises(RuntimeError, match="call check_comm"):
        run(*arguments)


def test_mark_static() -> None:
    group = Group.make()
    tensor = torch.zeros(1)
    custom_ops.mark_static(group.indexers[0], group.comms[0], tensor)
    kept = graph_inputs(group)
    assert kept == {"order", "publish_generations", "expected_generations", "errors"}


def graph_inputs(group: Group) -> set[str]:
    """Which of the indexer's own arguments are static in a graph."""
    static: set[str] = set()

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        (call,) = [node for node in graph.graph.nodes if node.target is torch.ops.flashinfer_msa.decode.default]
        for argument, node in zip(call.target._schema.arguments, call.args, strict=True):
            if isinstance(node, torch.fx.Node) and "_dynamo_static_input_type" in node.meta.get("tensor_dict", {}):
                static.add(argument.name)
        return lambda *_: ()

    indexer, comm = group.indexers[0], group.comms[0]
    valid, output = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, 16, dtype=torch.int32)
    compiled(lambda: indexer.decode_merge(valid, output, comm=comm, slot=0, tagged=True), note)()
    return static


def test_static_tensors_are_found_and_others_refused() -> None:
    """Tensors come by themselves, in lists, or as attributes; what has none is an error of the caller's."""
    alone, first, second, held = (torch.zeros(1) for _ in range(4))
    custom_ops.mark_static(alone, [first, (second,)], SimpleNamespace(held=held, number=3, rows=[1]))
    assert all(hasattr(tensor, "_dynamo_static_input_type") for tensor in (alone, first, second, held))
    for wrong in (None, 3, "keys", torch.Tensor, [None]):
        with pytest.raises(ValueError, match=r"^owners must be tensors, lists of them, or objects that have some, was"):
            custom_ops.mark_static(wrong)
