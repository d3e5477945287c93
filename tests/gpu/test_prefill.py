# SPDX-License-Identifier: Apache-2.0
"""On a GPU, prefill's planner, scorer and selection equal the reference, and the chain equals the brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from prefill_windows import (
    WINDOWS,
    ChangingWindow,
    Plane,
    capture,
    make_plan,
    make_problem,
    ragged,
    run_step,
    with_ranges,
    without_padding,
)
from simulated_group import POISON, SMALL, Group, assert_equal, write_late

from flashinfer_msa import msa_ops
from flashinfer_msa.backends import reference
from flashinfer_msa.layout import LAYOUTS, NUM_HEADS, ROW_WORDS, TOP_K, Layout
from flashinfer_msa.prefill.accumulation import ACCUMULATIONS
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.sizing import max_items
from flashinfer_msa.testing.problems import (
    FP32_WORST,
    TENSOR_CORE_ERROR,
    TENSOR_CORE_WORST,
    PrefillProblem,
    block_scores,
    brute_force_top16,
    compare,
    exchange,
)


def compact_values(layout: Layout) -> list[bool]:
    """Return the values of ``compact`` that a layout supports."""
    return [False, True] if layout.index_scale > 1 else [False]


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Return the absolute values of e4m3 elements."""
    return (tensor.view(torch.uint8) & 0x7F).view(tensor.dtype)


def score_errors(
    problem: PrefillProblem, plan: MSAIcpScorePlan, accumulation: str
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Score every rank and value of ``compact``.

    Yields a description, the errors of the finite scores, and their bounds ``sum |q| |k|``. Asserts that the rest is
    equal: ``-inf``, and elements that the reference does not write.
    """
    layout = problem.layout
    for rank in range(layout.world_size):
        keys = problem.shard(rank)
        for compact in compact_values(layout):
            columns = -(-plan.columns // (2 if compact else 1)) + 3
            initialize = bool(rank % 2)
            options: dict[str, Any] = {"layout": layout, "rank": rank, "compact": compact, "initialize": initialize}
            ours, theirs, bound = (Plane(plan.total_q, columns, aligned=rank % 2 == 0) for _ in range(3))
            reference.prefill_index_score(problem.index_q, keys, problem.block_table, plan, theirs.view, **options)
            reference.prefill_index_score(
                magnitude(problem.index_q), magnitude(keys), problem.block_table, plan, bound.view, **options
            )
            msa_ops.msa_icp_index_score_sharded(
                problem.index_q,
                keys,
                problem.block_table,
                plan,
                rank=rank,
                max_score=ours.view,
                initialize=initialize,
                tp=layout.world_size,
                compact=compact,
                accumulation=accumulation,
            )
            what = f"rank {rank}, compact {compact}"
            got, want = ours.storage, theirs.storage
            equal = want.isinf() | (want == POISON)
            assert_equal(got[equal], want[equal], f"{what}: -inf and untouched elements")
            assert not got[got == 0].signbit().any(), f"{what}: -0.0"
            yield what, (got - want)[~equal].abs(), bound.storage[~equal]


@pytest.mark.parametrize("special", [True] if SMALL else [False, True], ids=lambda x: "outliers" if x else "normal")
def test_scores_match_the_reference(
    layout: Layout, window: dict[str, Any], special: bool, record_property: Callable[[str, int], None]
) -> None:
    """Scores are within the tensor core's error, and only elements that the reference writes are written.

    With normal data one score in a million may exceed ``TENSOR_CORE_ERROR``. On an H200, 2 of 10.8 million did, by a
    tenth of it. Outliers among the elements make the tensor core drop more bits of the others, up to its worst case.
    """
    beyond = scores = 0
    problem = make_problem(layout, window, special=special, block_table_extra_columns=2)
    for what, error, bound in score_errors(problem, make_plan(problem), "tensor"):
        assert bool((error <= TENSOR_CORE_WORST * bound).all()), f"{what}: {(error / bound).max()}"
        if not special:
            beyond += int((error > TENSOR_CORE_ERROR * bound).sum())
            scores += len(error)
    record_property("scores_beyond_4e-4", beyond)
    assert beyond <= scores // 1_000_000 + 1, f"{beyond} of {scores} scores"


@pytest.mark.parametrize("special", [True] if SMALL else [False, True], ids=lambda x: "outliers" if x else "normal")
def test_exact_scores_match_the_reference(layout: Layout, window: dict[str, Any], special: bool) -> None:
    """With ``accumulation="exact"`` no score is off by more than the rounding of FP32 sums, even with outliers."""
    problem = make_problem(layout, window, special=special, block_table_extra_columns=2)
    for what, error, bound in score_errors(problem, make_plan(problem), "exact"):
        assert bool((error <= FP32_WORST * bound).all()), f"{what}: {(error / bound).max()}"


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_scores_do_not_depend_on_the_ranges(layout: Layout, window: dict[str, Any], accumulation: str) -> None:
    """Scores are bit-equal between runs, and whether one, seven or all multiprocessors work."""
    problem = make_problem(layout, window)
    plan = make_plan(problem)
    count = len(plan.packed_work_range)
    keys = problem.shard(1)
    results = []
    for ranges in (count, count, 7, 1):
        plane = Plane(plan.total_q, plan.columns, aligned=True)
        msa_ops.msa_icp_index_score_sharded(
            problem.index_q,
            keys,
            problem.block_table,
            with_ranges(plan, ranges),
            rank=1,
            max_score=plane.view,
            initialize=False,
            tp=layout.world_size,
            enable_pdl=True,
            accumulation=accumulation,
        )
        results.append(plane.storage)
    for other in results[1:]:
        assert_equal(other, results[0], "scores")


def items_of(problem: PrefillProblem) -> int:
    return sum(-(-length // 64) for length in problem.query_lens)


def empty_cache(window: dict[str, Any]) -> PrefillProblem:
    """Return a problem without keys, for a planner, which reads none."""
    window = {"positions": [kv - q for q, kv in zip(window["query_lens"], window["kv_lens"], strict=True)], **window}
    none = {"query_lens": [], "kv_lens": [], "positions": []}
    return replace(
        PrefillProblem.random(LAYOUTS["p128_tp2"], **none, device="cuda"),
        query_lens=tuple(window["query_lens"]),
        positions=tuple(window["positions"]),
        seq_lens=torch.tensor(window["kv_lens"], dtype=torch.int32, device="cuda"),
        index_q=torch.empty(sum(window["query_lens"]), NUM_HEADS, 128, dtype=torch.float8_e4m3fn, device="cuda"),
    )


@pytest.mark.parametrize(
    "window",
    [
        *WINDOWS.values(),
        ragged(3, 1500),
        {"query_lens": [64 * 1500, 1], "kv_lens": [1 << 20, 5]},
        {"query_lens": [0, 0], "kv_lens": [7, 0], "positions": [0, 3]},
    ],
    ids=[*WINDOWS, "1500 segments", "1501 items", "nothing"],
)
def test_the_planner_agrees_with_the_reference_and_the_host(window: dict[str, Any]) -> None:
    problem = empty_cache({key: value for key, value in window.items() if key != "padding"})
    device, theirs = make_plan(problem), make_plan(problem, "torch")
    host = msa_ops.msa_icp_index_score_sharded_plan(
        torch.tensor(problem.query_lens, dtype=torch.int32),
        problem.seq_lens.cpu(),
        NUM_HEADS,
        qo_offset=torch.tensor(problem.positions, dtype=torch.int32),
        device="cuda",
    )
    room = max_items(device.total_q, device.batch)
    for other in (theirs, host):
        assert torch.equal(device.packed_work_range, other.packed_work_range)
        assert torch.equal(device.packed_work_info[:room], other.packed_work_info[:room])
        for name in ("qo_segment_offsets", "kv_segment_offsets", "qo_offset", "qo_segment_lens", "kv_segment_lens"):
            assert torch.equal(getattr(device, name), getattr(other, name)), name
        for name in ("total_q", "num_qo_heads", "batch", "max_query_len", "columns", "uniform"):
            assert getattr(device, name) == getattr(other, name), name
    units = device.packed_work_range >> 32
    assert int(units.max() - units.min()) <= 1
    assert int((device.packed_work_info[:room] != 0).sum()) == items_of(problem)
    assert (device.packed_work_info[room:] == -1).all()


def test_lengths_beyond_the_bounds_write_nothing_outside() -> None:
    """The bounds are below what the segments have: nothing is written outside work storage and scores."""
    layout = LAYOUTS["p128_tp2"]
    problem = make_problem(layout, {"query_lens": [300, 300], "kv_lens": [3000, 4000]})
    storage = torch.full((10,), -1, dtype=torch.int64, device="cuda")
    plan = make_plan(problem, total_q=70, max_query_len=70, max_seq_len=1000)
    plan = msa_ops.msa_icp_index_score_sharded_plan_device(
        *problem.segments,
        NUM_HEADS,
        total_q=70,
        max_query_len=70,
        max_seq_len=1000,
        packed_work_range=plan.packed_work_range,
        packed_work_info=storage[:3],
        workspace=plan.workspace,
    )
    assert (storage[3:] == -1).all() and (storage[:3] != -1).all()
    tokens = 70
    plane = Plane(tokens, plan.columns)
    msa_ops.msa_icp_index_score_sharded(
        problem.index_q[:tokens],
        problem.shard(0),
        problem.block_table,
        plan,
        rank=0,
        max_score=plane.view,
        initialize=True,
    )
    plane.require_guard()


def test_lengths_whose_sum_overflows_plan_nothing_outside() -> None:
    segments, bounds = 128, {"total_q": 70, "max_query_len": 70, "max_seq_len": 1000}
    items = -(-70 // 64) + 70 - 1
    storage = torch.full((3 * items,), -1, dtype=torch.int64, device="cuda")
    lens = torch.full((segments,), 2**31 - 1, dtype=torch.int32, device="cuda")
    offsets = torch.zeros(segments + 1, dtype=torch.int32, device="cuda")
    given = make_plan(make_problem(LAYOUTS["p128_tp2"], WINDOWS["ragged"]))
    msa_ops.msa_icp_index_score_sharded_plan_device(
        lens,
        lens,
        offsets,
        offsets,
        torch.zeros_like(lens),
        NUM_HEADS,
        **bounds,
        packed_work_range=given.packed_work_range,
        packed_work_info=storage[items : 2 * items],
        workspace=given.workspace,
    )
    assert (storage[:items] == -1).all() and (storage[2 * items :] == -1).all()
    assert (storage[items : 2 * items] != -1).all()


@pytest.mark.parametrize("offset", [-7, -2, -1, 9])
def test_offsets_outside_write_nothing_outside(offset: int) -> None:
    """Rows are written 16 bytes at a time, and the segment starts before the first token or ends after the last."""
    layout = LAYOUTS["p128_tp4"]
    problem = make_problem(layout, {"query_lens": [16], "kv_lens": [4096]})
    plan = make_plan(problem)
    storage, guard = torch.full((1 << 15,), POISON, device="cuda"), 1 << 14
    plane = storage[guard : guard + 16 * NUM_HEADS * 32].view(16, NUM_HEADS, 32)
    msa_ops.msa_icp_index_score_sharded(
        problem.index_q,
        problem.shard(0),
        problem.block_table,
        replace(plan, qo_segment_offsets=torch.tensor([offset, 16], dtype=torch.int32, device="cuda")),
        rank=0,
        max_score=plane,
        tp=4,
        initialize=False,
    )
    assert (storage[:guard] == POISON).all() and (storage[guard + plane.numel() :] == POISON).all()
    assert (plane != POISON).any()


def test_a_plan_with_fewer_columns_than_its_items_writes_no_more() -> None:
    """A window was planned again for longer keys: scores still end at the first plan's columns."""
    layout = LAYOUTS["p256_tp2"]
    problem = make_problem(layout, {"query_lens": [64] * 3, "kv_lens": [16384] * 3})
    plan = replace(make_plan(problem), columns=2)
    for compact in compact_values(layout):
        plane = Plane(3 * 64, 1 if compact else 2)
        msa_ops.msa_icp_index_score_sharded(
            problem.index_q,
            problem.shard(0),
            problem.block_table[:, :1],
            plan,
            rank=0,
            max_score=plane.view,
            compact=compact,
        )
        plane.require_guard()
        assert (plane.view != POISON).all()


def test_positions_near_the_end_of_int32_see_all_keys() -> None:
    """A position beyond int32's range is after every key."""
    layout = LAYOUTS["p128_tp2"]
    problem = make_problem(layout, {"query_lens": [64], "kv_lens": [256], "positions": [1000]})
    last = replace(problem, positions=(2**31 - 11,))
    results = []
    for each in (problem, last):
        plane = Plane(64, 2)
        msa_ops.msa_icp_index_score_sharded(
            each.index_q,
            each.shard(0),
            each.block_table,
            make_plan(each),
            rank=0,
            max_score=plane.view,
            initialize=False,
        )
        results.append(plane.storage)
    assert_equal(results[1], results[0], "scores")


def test_selection_equals_the_reference() -> None:
    """Narrow and wide rows, ties, NaN, infinities, every map from columns to blocks, strided planes and carriers."""
    draw = torch.Generator("cuda").manual_seed(0)
    tokens = 5 if SMALL else 61
    for columns in (1, 17, 1024, 1025) if SMALL else (1, 15, 16, 17, 31, 33, 500, 1023, 1024, 1025, 8192, 12287):
        for scale, offset in ((1, 0), (2, 0), (2, 1)):
            plane = Plane(tokens, columns)
            plane.view.copy_(torch.randn(tokens, NUM_HEADS, columns, generator=draw, device="cuda"))
            plane.view[0] = 1.0
            plane.view[1] = -torch.inf
            plane.view[2] = plane.view[2].round()
            plane.view[3, :, ::3] = torch.nan
            plane.view[4, :, ::2] = -0.0
            plane.view[4, :, 1::2] = 0.0
            valid = torch.randint(0, scale * columns + 40, (tokens,), generator=draw, device="cuda", dtype=torch.int32)
            valid[:5] = scale * columns
            for first, last in ((0, 0), (1, 2), (16, 0)):
                buffers = [
                    torch.full((NUM_HEADS, tokens + 3, 40), -777, dtype=torch.int32, device="cuda") for _ in "ab"
                ]
                for buffer, backend in zip(buffers, ("cake", "torch"), strict=True):
                    msa_ops.msa_icp_topk_select_prefill(
                        plane.view,
                        valid,
                        buffer[:, 1 : tokens + 1, :ROW_WORDS],
                        force_begin_blocks=first,
                        force_end_blocks=last,
                        index_scale=scale,
                        index_offset=offset,
                        backend=backend,
                    )
                assert_equal(*buffers, f"{columns} columns, scale {scale}, offset {offset}, forced {first} + {last}")


@pytest.mark.parametrize("forced", [(1, 2)] if SMALL else [(0, 1), (1, 2), (8, 8)])
def test_output_equals_unsharded_top16(
    layout: Layout, window: dict[str, Any], forced: tuple[int, int], record_property
) -> None:
    """The indexer's chain in one window. Carrier rows equal the reference's selection of the kernel's own scores."""
    problem = make_problem(layout, without_padding(window))
    init_blocks, local_blocks = forced
    group = Group.make(
        layout,
        tokens=1,
        max_model_len=problem.bounds["max_seq_len"],
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )
    total = len(problem.index_q)
    pitch = group.indexers[0].prefill_scratch_shape()[2]
    scratches = [torch.full((total, NUM_HEADS, pitch), POISON, device="cuda") for _ in group.indexers]
    output, carriers = run_step(group, problem, total, scratches)
    for indexer, scratch, carrier in zip(group.indexers, scratches, carriers, strict=True):
        want = reference.select_rows(
            scratch,
            problem.num_valid_pages,
            force_begin_blocks=init_blocks,
            force_end_blocks=local_blocks,
            index_scale=indexer.index_scale,
            index_offset=indexer.index_offset,
        )
        assert_equal(carrier[..., :-1], want.transpose(0, 1), f"carrier of rank {indexer.rank}")
        assert (carrier[..., -1] == 1).all()
    expected = brute_force_top16(problem, init_blocks=init_blocks, local_blocks=local_blocks)
    counts = compare(output, expected, near_tie=2 * TENSOR_CORE_ERROR)
    record_property("near_ties", counts.near_ties)
    assert counts.wrong == 0, counts
    assert counts.near_ties <= max(counts.rows // 20, 4), counts


def test_windows_of_a_step_make_the_same_output(layout: Layout) -> None:
    """A step in one window and in several, with segments that span windows, gives bit-equal output."""
    problem = make_problem(layout, without_padding(WINDOWS["ragged"]))
    group = Group.make(layout, tokens=1, max_model_len=1 << 23)  # so long that a step may have 64 windows
    total = len(problem.index_q)
    pitch = -(-problem.block_table.shape[1] // 16) * 16
    outputs = []
    for tokens in (total, 128, 100):
        scratches = [torch.full((tokens + 7, NUM_HEADS, pitch), POISON, device="cuda") for _ in group.indexers]
        outputs.append(run_step(group, problem, tokens, scratches)[0])
    for output in outputs[1:]:
        assert_equal(output, outputs[0], "output")


def test_a_graph_replays_over_changing_lengths(layout: Layout) -> None:
    """Plan, local part and merge are captured once and replayed with new segment lengths within the bounds."""
    held = ChangingWindow(layout, seed=0)
    tokens, base, valid = held.TOKENS, held.base, held.num_valid_pages
    group = Group.make(layout, tokens=1, max_model_len=held.LONGEST)
    shards = [base.shard(rank) for rank in range(layout.world_size)]
    scratch = torch.empty(group.indexers[0].prefill_scratch_shape(), device="cuda")
    carriers = [torch.empty(NUM_HEADS, tokens, ROW_WORDS, dtype=torch.int32, device="cuda") for _ in group.indexers]
    outputs = [
        torch.empty(tokens, indexer.heads_per_rank, TOP_K, dtype=torch.int32, device="cuda")
        for indexer in group.indexers
    ]

    def step() -> None:
        for indexer, shard, carrier in zip(group.indexers, shards, carriers, strict=True):
            window = indexer.prefill_window_plan(0, *held.inputs, **held.bounds)
            indexer.prefill_local(base.index_q, shard, base.block_table, window, scratch, valid, carrier)
        for indexer, output in zip(group.indexers, outputs, strict=True):
            indexer.prefill_merge(exchange(carriers, indexer), valid, output)

    graph = capture(step)
    for _ in range(4):
        problem = held.change()
        for tensor in (*carriers, *outputs, scratch):
            tensor.fill_(-7)
        graph.replay()
        expected = brute_force_top16(problem, init_blocks=1, local_blocks=2)
        counts = compare(torch.cat(outputs, dim=1), expected, near_tie=2 * TENSOR_CORE_ERROR)
        assert counts.wrong == 0, counts


@pytest.mark.parametrize("late", ["query", "packed_work_range", "packed_work_info"])
def test_pdl_waits_for_the_plan_and_the_query(layout: Layout, late: str) -> None:
    """A scorer launched as a programmatic dependent reads nothing before its predecessor has completed."""
    problem = make_problem(layout, WINDOWS["ragged"])
    plan = make_plan(problem)
    planes = [Plane(plan.total_q, plan.columns) for _ in range(2)]
    for plane, enable_pdl in zip(planes, (False, True), strict=True):
        query, given = problem.index_q, plan
        if enable_pdl:
            source = query if late == "query" else getattr(plan, late)
            written = torch.zeros_like(source.view(torch.uint8))
            query = written.view(query.dtype) if late == "query" else query
            given = plan if late == "query" else replace(plan, **{late: written.view(torch.int64)})
            write_late(written, source)
        msa_ops.msa_icp_index_score_sharded(
            query,
            problem.shard(0),
            problem.block_table,
            given,
            rank=0,
            max_score=plane.view,
            initialize=False,
            tp=layout.world_size,
            enable_pdl=enable_pdl,
        )
    assert_equal(planes[1].storage, planes[0].storage, "scores")


def test_block_scores_of_the_ranks_make_the_unsharded_ones(layout: Layout) -> None:
    """The maximum of the ranks' scores of a block is the unsharded score, wherever the keys are."""
    problem = make_problem(layout, WINDOWS["more and fewer keys"])
    scores, bounds = block_scores(problem)
    plan = make_plan(problem)
    best = torch.full((plan.total_q, NUM_HEADS, plan.columns), -torch.inf, device="cuda")
    for rank in range(layout.world_size):
        local = torch.empty_like(best)
        msa_ops.msa_icp_index_score_sharded(
            problem.index_q,
            problem.shard(rank),
            problem.block_table,
            plan,
            rank=rank,
            max_score=local,
            tp=layout.world_size,
        )
        best = torch.maximum(best, local)
    shared = min(plan.columns, scores.shape[-1])
    assert (best[..., shared:] == -torch.inf).all() and (scores[..., shared:] == -torch.inf).all()
    best, scores, bounds = best[..., :shared], scores[..., :shared], bounds[..., :shared]
    assert torch.equal(best.isinf(), scores.isinf())
    near = (best - scores).abs() <= TENSOR_CORE_ERROR * bounds
    assert (near | scores.isinf()).all()
