# SPDX-License-Identifier: Apache-2.0
"""Compiled models on a GPU, with and without CUDA graph trees, equal eager code bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated_group import SMALL, Group, assert_equal
from torch._dynamo.utils import counters

from flashinfer_msa import msa_ops
from flashinfer_msa.backends import compiled as custom_ops
from flashinfer_msa.layout import LAYOUTS, NUM_HEADS, ROW_WORDS, TOP_K, Layout
from flashinfer_msa.testing.problems import DecodeProblem, PrefillProblem, brute_force_top16, compare, exchange

pytestmark = pytest.mark.skipif(SMALL, reason="sanitizers check the same kernels in eager launches")
QUERY_LEN = 2
LENGTHS = [40000, 90, 1500, 8000, 0, 129]
COUNTERS = ("publish_generations", "expected_generations", "errors")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an element for every replay of a CUDA graph."""
    seen: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def note(graph: torch.cuda.CUDAGraph) -> None:
        seen.append(id(graph))
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", note)
    return seen


def require_graphs(mode: str | None, replays: list[int], at_least: int) -> None:
    """Assert that CUDA graphs were replayed with a ``mode``, and only then."""
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert len(replays) >= at_least if mode else not replays


class Decoder(torch.nn.Module):
    """Layers that derive their query from a hidden state and decode on every rank.

    All ranks publish before any merges.
    """

    def __init__(self, group: Group, problem: DecodeProblem, layers: int, tagged: bool) -> None:
        super().__init__()
        self.group, self.layers, self.tagged = group, layers, tagged
        self.shards = [problem.shard(rank) for rank in range(group.layout.world_size)]
        self.scores = group.scores(len(problem.index_q))
        custom_ops.mark_static(*group.indexers, *group.comms, *self.shards, *self.scores)
        for indexer, comm in zip(group.indexers, group.comms, strict=True):
            indexer.check_comm(comm)

    def forward(
        self,
        hidden: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        num_valid_pages: torch.Tensor,
        first_slot: int,
    ) -> list[torch.Tensor]:
        """Return each layer's outputs, the ranks' side by side: int32 ``[T, 4, 16]``."""
        selected = []
        for layer in range(self.layers):
            index_q = (hidden if layer % 2 == 0 else -hidden).to(torch.float8_e4m3fn)
            options: dict[str, Any] = {"slot": (first_slot + layer) % 3, "tagged": self.tagged}
            for rank, indexer in enumerate(self.group.indexers):
                indexer.decode_publish(
                    index_q,
                    self.shards[rank],
                    block_table,
                    seq_lens,
                    num_valid_pages,
                    self.scores[rank],
                    comm=self.group.comms[rank],
                    decode_query_len=QUERY_LEN,
                    **options,
                )
            outputs = []
            for rank, indexer in enumerate(self.group.indexers):
                output = torch.empty(
                    len(hidden), indexer.heads_per_rank, TOP_K, dtype=torch.int32, device=hidden.device
                )
                indexer.decode_merge(num_valid_pages, output, comm=self.group.comms[rank], **options)
                outputs.append(output)
            selected.append(torch.cat(outputs, dim=1))
        return selected


@pytest.mark.parametrize(
    ("name", "mode", "tagged", "layers"),
    [
        ("p128_tp2", "reduce-overhead", True, 3),
        ("p128_tp4", "reduce-overhead", False, 3),
        ("p256_tp4", "reduce-overhead", True, 2),
        ("p256_tp2", None, True, 2),
    ],
)
def test_decoder(name: str, mode: str | None, tagged: bool, layers: int, replays: list[int]) -> None:
    """Run many steps with some changes of the batch size. With 2 layers, each step starts at another slot set."""
    layout = LAYOUTS[name]
    problem = DecodeProblem.random(layout, seq_lens=LENGTHS, decode_query_len=QUERY_LEN, device="cuda", seed=layers)
    hidden = problem.index_q.to(torch.float16)
    best = brute_force_top16(problem, init_blocks=1, local_blocks=2)
    groups = [Group.make(layout, tokens=len(hidden), max_model_len=max(LENGTHS)) for _ in range(2)]
    eager, ours = (Decoder(group, problem, layers, tagged) for group in groups)
    compiled = torch.compile(ours, mode=mode, fullgraph=True)
    batches = [len(LENGTHS)] * 15 + [2] * 15 + [len(LENGTHS)] * 6
    for step, batch in enumerate(batches):
        tokens = batch * QUERY_LEN
        arguments = (
            hidden[:tokens],
            problem.block_table[:batch],
            problem.seq_lens[:batch],
            problem.num_valid_pages[:tokens],
            step * layers % 3,
        )
        torch.compiler.cudagraph_mark_step_begin()
        selected = compiled(*arguments)
        for layer, (a, b) in enumerate(zip(selected, eager(*arguments), strict=True)):
            assert_equal(a, b, f"step {step}, layer {layer}")
        if batch == len(LENGTHS):
            assert compare(selected[0], best).wrong == 0
        for one, other in zip(groups[0].comms, groups[1].comms, strict=True):
            for counter in COUNTERS:
                assert torch.equal(getattr(one, counter), getattr(other, counter)), (step, counter)
    for rank, (a, b) in enumerate(zip(eager.scores, ours.scores, strict=True)):
        assert_equal(b, a, f"scores of rank {rank}")
    # Each batch size and first slot set has a graph. Its first two runs need not be replays.
    require_graphs(mode, replays, len(batches) - 2 * 2 * 3)


def test_prefill_layer(layout: Layout, replays: list[int]) -> None:
    """One graph has the local part of a planned window on every rank, the exchange and the merges."""
    problem = PrefillProblem.random(
        layout, query_lens=(40, 0, 300), kv_lens=(500, 0, 1500), padding=5, device="cuda", seed=1
    )
    group = Group.make(layout, tokens=16, max_model_len=4096)
    shards = [problem.shard(rank) for rank in range(layout.world_size)]
    segments, bounds, valid = problem.segments, problem.bounds, problem.num_valid_pages
    scratch = torch.empty(group.indexers[0].prefill_scratch_shape(), device="cuda")
    windows = [indexer.prefill_window_plan(0, *segments, **bounds) for indexer in group.indexers]
    custom_ops.mark_static(*group.indexers, *windows, *shards, scratch)

    def layer(index_q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        carriers = []
        for indexer, shard, window in zip(group.indexers, shards, windows, strict=True):
            carrier = torch.empty(NUM_HEADS, len(index_q), ROW_WORDS, dtype=torch.int32, device="cuda")
            indexer.prefill_local(index_q, shard, problem.block_table, window, scratch, valid, carrier)
            carriers.append(carrier)
        merged = []
        for indexer in group.indexers:
            output = torch.empty(len(index_q), indexer.heads_per_rank, TOP_K, dtype=torch.int32, device="cuda")
            indexer.prefill_merge(exchange(carriers, indexer), valid, output)
            merged.append(output)
        return torch.cat(merged, dim=1), *carriers

    expected = layer(problem.index_q)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        for i, (a, b) in enumerate(zip(compiled(problem.index_q), expected, strict=True)):
            assert_equal(a, b, f"step {step}, result {i}")
    require_graphs("reduce-overhead", replays, 4)


def test_planner_and_fused_functions(layout: Layout) -> None:
    """One graph plans a window on the device and uses the plan."""
    problem = PrefillProblem.random(layout, query_lens=(40, 70), kv_lens=(500, 1500), device="cuda", seed=2)
    segments, bounds, tokens = problem.segments, problem.bounds, len(problem.index_q)
    sizes = {"total_q": tokens, "batch": 2, "device": torch.device("cuda")}
    storage = msa_ops.msa_icp_index_score_plan_storage(num_qo_heads=NUM_HEADS, **sizes)
    work = [
        torch.zeros(storage[f"{name}_numel"], dtype=torch.int64, device="cuda") for name in ("work_range", "work_info")
    ]
    workspace = torch.empty(storage["workspace_bytes"], dtype=torch.uint8, device="cuda")
    pool = torch.empty(msa_ops.msa_icp_prefill_pool_bytes(**sizes), dtype=torch.uint8, device="cuda")
    shard, valid = problem.shard(1), problem.num_valid_pages

    def run(index_q: torch.Tensor) -> torch.Tensor:
        plan = msa_ops.msa_icp_index_score_sharded_plan_device(
            *segments,
            NUM_HEADS,
            **bounds,
            packed_work_range=work[0],
            packed_work_info=work[1],
            workspace=workspace,
        )
        carrier = torch.empty(NUM_HEADS, tokens, ROW_WORDS, dtype=torch.int32, device="cuda")
        msa_ops.msa_icp_prefill_score_select(
            index_q,
            shard,
            problem.block_table,
            plan,
            valid,
            pool,
            carrier,
            rank=1,
            tp=layout.world_size,
            compact=layout.index_scale > 1,
            force_begin_blocks=1,
            force_end_blocks=2,
        )
        return carrier

    expected = run(problem.index_q)
    assert_equal(torch.compile(run, fullgraph=True)(problem.index_q), expected, "carrier")


def test_opcheck_on_the_device(layout: Layout) -> None:
    """The operator that publishes tagged rows passes torch's checks with GPU memory."""
    group = Group.make(layout, tokens=8, max_model_len=4096)
    comm, indexer = group.comms[0], group.indexers[0]
    arguments = (
        torch.randn(8, NUM_HEADS, 32, device="cuda"),
        torch.full((8,), 20, dtype=torch.int32, device="cuda"),
        comm.tagged_recv_bases,
        comm.errors,
    )
    options = {
        "slot": 1,
        "rank": 0,
        "world_size": layout.world_size,
        "heads_per_rank": indexer.heads_per_rank,
        "capacity": 8,
        "force_begin_blocks": 1,
        "force_end_blocks": 2,
        "generations": comm.publish_generations,
    }
    torch.library.opcheck(torch.ops.flashinfer_msa.msa_icp_topk_select_publish.default, arguments, options)
