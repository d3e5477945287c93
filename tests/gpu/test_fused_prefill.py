# SPDX-License-Identifier: Apache-2.0
"""The fused prefill chain on a GPU: its carrier rows equal those of scorer and selection bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from prefill_windows import (
    WINDOWS,
    ChangingWindow,
    capture,
    make_plan,
    make_problem,
    poisoned_pools,
    run_step,
    with_ranges,
    without_padding,
)
from simulated_group import POISON, SMALL, Group, assert_equal, write_late

from flashinfer_msa import msa_ops
from flashinfer_msa.layout import LAYOUTS, NUM_HEADS, ROW_WORDS, Layout
from flashinfer_msa.prefill.accumulation import ACCUMULATIONS
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.sizing import max_items
from flashinfer_msa.testing.problems import FP32_WORST, TENSOR_CORE_ERROR, PrefillProblem, brute_force_top16, compare

FORCED = [(1, 2)] if SMALL else [(0, 1), (1, 2), (8, 8)]
GUARD = 1 << 16
"""Guard bytes after a pool."""


class Pool:
    """A pool of the smallest size that a plan allows, filled with a key larger than any candidate's."""

    def __init__(self, plan: MSAIcpScorePlan) -> None:
        entries = max_items(plan.total_q, plan.batch) + len(plan.packed_work_range) - 1
        self.storage = torch.full(((entries * 32 << 10) + GUARD,), 255, dtype=torch.uint8, device="cuda")
        self.view = self.storage[:-GUARD]

    def require_guard(self) -> None:
        """Assert that nothing was written after the pool."""
        assert (self.storage[-GUARD:] == 255).all(), "something was written after the pool"


class Carrier:
    """A token slice of a larger poisoned carrier, with gaps between the rows."""

    def __init__(self, tokens: int) -> None:
        self.storage = torch.full((NUM_HEADS, tokens + 3, ROW_WORDS + 7), -777, dtype=torch.int32, device="cuda")
        self.view = self.storage[:, 1 : tokens + 1, :ROW_WORDS]


def is_compact(layout: Layout) -> bool:
    return layout.index_scale > 1


def separate(
    problem: PrefillProblem,
    plan: MSAIcpScorePlan,
    keys: torch.Tensor,
    rank: int,
    *,
    valid: torch.Tensor | None = None,
    forced: tuple[int, int] = (1, 2),
    backend: str = "cake",
    accumulation: str = "tensor",
) -> torch.Tensor:
    """Run scorer and selection over the plan's columns; return the storage of the carrier."""
    layout = problem.layout
    carrier = Carrier(plan.total_q)
    columns = -(-plan.columns // layout.index_scale)
    scores = torch.full((plan.total_q, NUM_HEADS, columns), POISON, device="cuda")
    msa_ops.msa_icp_index_score_sharded(
        problem.index_q,
        keys,
        problem.block_table,
        plan,
        rank=rank,
        max_score=scores,
        initialize=True,
        tp=layout.world_size,
        compact=is_compact(layout),
        accumulation=accumulation,
        backend=backend,
    )
    msa_ops.msa_icp_topk_select_prefill(
        scores,
        problem.num_valid_pages if valid is None else valid,
        carrier.view,
        force_begin_blocks=forced[0],
        force_end_blocks=forced[1],
        index_scale=layout.index_scale,
        index_offset=layout.index_offset(rank),
        backend=backend,
    )
    return carrier.storage


def fused(
    problem: PrefillProblem,
    plan: MSAIcpScorePlan,
    keys: torch.Tensor,
    rank: int,
    pool: Pool,
    *,
    valid: torch.Tensor | None = None,
    forced: tuple[int, int] = (1, 2),
    **more: Any,
) -> torch.Tensor:
    """Run the fused chain; return the storage of the carrier."""
    carrier = Carrier(plan.total_q)
    msa_ops.msa_icp_prefill_score_select(
        problem.index_q,
        keys,
        problem.block_table,
        plan,
        problem.num_valid_pages if valid is None else valid,
        pool.view,
        carrier.view,
        rank=rank,
        tp=problem.layout.world_size,
        compact=is_compact(problem.layout),
        force_begin_blocks=forced[0],
        force_end_blocks=forced[1],
        **more,
    )
    return carrier.storage


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_carriers_equal_the_separate_chain(layout: Layout, window: dict[str, Any], accumulation: str) -> None:
    """Every rank and forced blocks, with NaN, -0.0 and outliers among the elements. The pool is never cleared."""
    problem = make_problem(layout, window, special=True, block_table_extra_columns=2)
    plan = make_plan(problem)
    fewer = problem.num_valid_pages.clone()
    fewer[::7] = 0
    fewer[3::7] //= 2
    pool = Pool(plan)
    for rank in range(layout.world_size):
        keys = problem.shard(rank)
        for forced in FORCED:
            for valid in (problem.num_valid_pages, fewer):
                options: dict[str, Any] = {"valid": valid, "forced": forced, "accumulation": accumulation}
                want = separate(problem, plan, keys, rank, **options)
                for run in ("first", "second"):
                    got = fused(problem, plan, keys, rank, pool, **options)
                    assert_equal(got, want, f"rank {rank}, forced {forced}, {run} run")
    pool.require_guard()


def test_blocks_that_a_token_does_not_see_rank_last(layout: Layout, window: dict[str, Any]) -> None:
    """More pages are valid than a token sees, in padding too. The unseen ones are candidates with the score -inf."""
    problem = make_problem(layout, window)
    plan = make_plan(problem)
    tokens = torch.arange(plan.total_q, device="cuda", dtype=torch.int32)
    seen = problem.num_valid_pages
    more = (seen + tokens % 40).clamp(max=plan.columns)
    pool = Pool(plan)
    for rank in range(layout.world_size):
        keys = problem.shard(rank)
        for forced in FORCED:
            options: dict[str, Any] = {"valid": more, "forced": forced}
            want = separate(problem, plan, keys, rank, **options)
            assert_equal(fused(problem, plan, keys, rank, pool, **options), want, f"rank {rank}, forced {forced}")
    pool.require_guard()


def equal_queries(problem: PrefillProblem) -> None:
    problem.index_q.view(torch.uint8)[:] = problem.index_q.view(torch.uint8)[:1].clone()


def equal_keys(problem: PrefillProblem) -> None:
    problem.pages.view(torch.uint8)[:] = problem.pages.view(torch.uint8)[:1, :1].clone()


def zero_keys(problem: PrefillProblem) -> None:
    problem.pages.view(torch.uint8).zero_()


def negative_scores(problem: PrefillProblem) -> None:
    problem.index_q.view(torch.uint8).bitwise_and_(0x7F)
    problem.pages.view(torch.uint8).bitwise_or_(0x80)


def nan_keys(problem: PrefillProblem) -> None:
    problem.pages.view(torch.uint8).fill_(0x7F)


@pytest.mark.parametrize("spoil", [equal_queries, equal_keys, zero_keys, negative_scores, nan_keys])
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_ties_and_scores_without_a_positive_one(
    layout: Layout, spoil: Callable[[PrefillProblem], None], accumulation: str
) -> None:
    """Rows have fewer than 16 candidates, a few more, or many. Scores tie in all columns or in none."""
    lens = {"query_lens": [70, 3, 40], "kv_lens": [1500, 400, 9000 if SMALL else 70000]}
    problem = make_problem(layout, lens)
    spoil(problem)
    plan = make_plan(problem)
    pool = Pool(plan)
    for rank in range(layout.world_size):
        keys = problem.shard(rank)
        for forced in [(0, 0), *FORCED]:
            options: dict[str, Any] = {"forced": forced, "accumulation": accumulation}
            want = separate(problem, plan, keys, rank, **options)
            assert_equal(fused(problem, plan, keys, rank, pool, **options), want, f"rank {rank}, forced {forced}")
            if spoil in (zero_keys, nan_keys):  # every sum is exact
                theirs = separate(problem, plan, keys, rank, backend="torch", **options)
                assert_equal(want, theirs, f"reference of rank {rank}, forced {forced}")
    pool.require_guard()


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_carriers_do_not_depend_on_the_ranges(layout: Layout, window: dict[str, Any], accumulation: str) -> None:
    """Carriers are bit-equal whether one, seven or all multiprocessors work. All runs share one pool."""
    problem = make_problem(layout, window)
    plan = make_plan(problem)
    pool, keys = Pool(plan), problem.shard(1)
    want = separate(problem, plan, keys, 1, accumulation=accumulation)
    for ranges in (len(plan.packed_work_range), 7, 1, 7):
        cut = with_ranges(plan, ranges)
        got = fused(problem, cut, keys, 1, pool, accumulation=accumulation, enable_pdl=True)
        assert_equal(got, want, f"{ranges} ranges")
    pool.require_guard()


@pytest.mark.parametrize("forced", FORCED)
def test_output_equals_unsharded_top16(
    layout: Layout, window: dict[str, Any], forced: tuple[int, int], record_property: Callable[[str, int], None]
) -> None:
    """The indexer's chain with a pool and exact sums, in one window, equals the brute force except for near ties."""
    problem = make_problem(layout, without_padding(window))
    init_blocks, local_blocks = forced
    group = Group.make(
        layout,
        tokens=1,
        max_model_len=problem.bounds["max_seq_len"],
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        accumulation="exact",
    )
    total = len(problem.index_q)
    nothing = [None for _ in group.indexers]
    pools = poisoned_pools(group)
    output, _ = run_step(group, problem, total, nothing, pools)
    expected = brute_force_top16(problem, init_blocks=init_blocks, local_blocks=local_blocks)
    counts = compare(output, expected, near_tie=2 * FP32_WORST)
    record_property("near_ties", counts.near_ties)
    assert counts.wrong == 0, counts


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_windows_of_a_step_make_the_same_output(layout: Layout, accumulation: str) -> None:
    """Several windows share one pool, and segments span windows: the output equals that of a step without a pool."""
    problem = make_problem(layout, without_padding(WINDOWS["ragged"]))
    # A model so long that a step may have 64 windows.
    group = Group.make(layout, tokens=1, max_model_len=1 << 23, accumulation=accumulation)
    total = len(problem.index_q)
    pitch = -(-problem.block_table.shape[1] // 16) * 16
    scratches = [torch.full((total, NUM_HEADS, pitch), POISON, device="cuda") for _ in group.indexers]
    want = run_step(group, problem, total, scratches)
    nothing = [None for _ in group.indexers]
    pools = poisoned_pools(group)
    for tokens in (total, 128, 100):
        got = run_step(group, problem, tokens, nothing, pools)
        assert_equal(got[0], want[0], f"output in windows of {tokens}")
        for rank, (ours, theirs) in enumerate(zip(got[1], want[1], strict=True)):
            assert_equal(ours, theirs, f"carrier of rank {rank} in windows of {tokens}")


def test_a_graph_replays_over_changing_lengths(layout: Layout) -> None:
    """Plan and fused chain are captured once and replayed with new segment lengths within the bounds."""
    held = ChangingWindow(layout, seed=1)
    group = Group.make(layout, tokens=1, max_model_len=held.LONGEST)
    indexer, pool, carrier = group.indexers[1], poisoned_pools(group)[1], Carrier(held.TOKENS)
    query, keys, table = held.base.index_q, held.base.shard(indexer.rank), held.base.block_table

    def step() -> None:
        window = indexer.prefill_window_plan(0, *held.inputs, **held.bounds)
        indexer.prefill_local(query, keys, table, window, None, held.num_valid_pages, carrier.view, pool=pool)

    graph = capture(step)
    for _ in range(4):
        problem = held.change()
        carrier.storage.fill_(-777)
        graph.replay()
        want = separate(problem, make_plan(problem, **held.bounds), keys, indexer.rank)
        assert_equal(carrier.storage, want, "carrier")


@pytest.mark.parametrize("late", ["query", "packed_work_range", "packed_work_info", "num_valid_pages"])
def test_pdl_waits_for_all_that_is_read(layout: Layout, late: str) -> None:
    """Both kernels, launched as programmatic dependents, read nothing before their predecessor has completed."""
    problem = make_problem(layout, WINDOWS["ragged"])
    keys = problem.shard(0)
    plan = make_plan(problem)
    want = separate(problem, plan, keys, 0)
    for _ in range(2):
        given, valid = plan, problem.num_valid_pages
        source = {"query": problem.index_q, "num_valid_pages": valid}.get(late)
        source = getattr(plan, late) if source is None else source
        written = torch.zeros_like(source.view(torch.uint8))
        fresh = written.view(source.dtype)
        query = fresh if late == "query" else problem.index_q
        valid = fresh if late == "num_valid_pages" else valid
        given = replace(plan, **{late: fresh}) if late.startswith("packed") else plan
        pool = Pool(plan)
        write_late(written, source)
        got = fused(replace(problem, index_q=query), given, keys, 0, pool, valid=valid, enable_pdl=True)
        assert_equal(got, want, "carrier")


def test_a_plan_with_fewer_columns_than_its_items_has_no_more_candidates() -> None:
    """A window was planned again for longer keys: candidates still end at the first plan's columns."""
    layout = LAYOUTS["p256_tp2"]
    problem = make_problem(layout, {"query_lens": [64] * 3, "kv_lens": [16384] * 3})
    plan = replace(make_plan(problem), columns=2)
    valid = problem.num_valid_pages.clamp(max=2)
    short = replace(problem, block_table=problem.block_table[:, :1])
    for rank in range(layout.world_size):
        keys = problem.shard(rank)
        want = separate(short, plan, keys, rank, valid=valid)
        assert_equal(fused(short, plan, keys, rank, Pool(plan), valid=valid), want, f"rank {rank}")


def test_only_near_ties_differ_from_the_brute_force(layout: Layout) -> None:
    """With either accumulation, the output differs from the brute force only within the accumulation's error."""
    problem = make_problem(layout, WINDOWS["more and fewer keys"])
    expected = brute_force_top16(problem, init_blocks=1, local_blocks=2)
    for accumulation, error in (("tensor", TENSOR_CORE_ERROR), ("exact", FP32_WORST)):
        group = Group.make(layout, tokens=1, max_model_len=5000, accumulation=accumulation)
        pools = poisoned_pools(group)
        output, _ = run_step(group, problem, len(problem.index_q), [None for _ in group.indexers], pools)
        assert compare(output, expected, near_tie=2 * error).wrong == 0, accumulation
