# SPDX-License-Identifier: Apache-2.0
"""On a GPU, the whole decode chain equals the unsharded brute force, and the scorer equals the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from simulated_group import POISON, SMALL, Group, assert_equal, write_late

from flashinfer_msa import msa_ops
from flashinfer_msa.layout import NUM_HEADS, Layout
from flashinfer_msa.testing.problems import (
    Comparison,
    DecodeProblem,
    block_scores,
    brute_force_top16,
    compare,
    random_e4m3,
)

FORCED = [(0, 0), (0, 1), (1, 2), (8, 8)]
BATCHES = [1, 3] if SMALL else [1, 3, 17, 64]
QUERY_LENS = [1, 8] if SMALL else range(1, 9)
LONGEST = 1500 if SMALL else 131072


def ragged_lengths(batch: int, seed: int) -> list[int]:
    """Draw lengths of all orders of magnitude up to LONGEST. A batch of several has a 0 and one near LONGEST."""
    draw = random.Random(seed)
    lengths = [min(int(2 ** draw.uniform(0, 17.01)), LONGEST) for _ in range(batch)]
    if batch > 1:
        lengths[draw.randrange(batch)] = 0
    lengths[-1] = LONGEST - draw.randrange(300)
    return lengths


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("batch", BATCHES)
def test_output_equals_unsharded_top16(layout: Layout, batch: int, query_len: int, record_property) -> None:
    """Both row kinds and every combination of forced blocks, on one problem with a page pitch larger than the page."""
    seed = 1000 * batch + query_len
    problem = DecodeProblem.random(
        layout,
        seq_lens=ragged_lengths(batch, seed),
        decode_query_len=query_len,
        device="cuda",
        seed=seed,
        page_pitch_extra=16 * (1 + seed % 9),
        block_table_extra_columns=seed % 3,
    )
    shards = [problem.shard(rank) for rank in range(layout.world_size)]
    scored = block_scores(problem)
    counts = Comparison()
    for i, (init_blocks, local_blocks) in enumerate(FORCED):
        tokens = batch * query_len
        group = Group.make(
            layout, tokens=tokens + i, max_model_len=LONGEST, init_blocks=init_blocks, local_blocks=local_blocks
        )
        expected = brute_force_top16(problem, init_blocks=init_blocks, local_blocks=local_blocks, scored=scored)
        for tagged in (False, True):
            output = group.decode(problem, shards, group.scores(tokens), slot=(i + tagged) % 3, tagged=tagged)
            counts = counts.plus(compare(output, expected))
        assert [int(comm.errors) for comm in group.comms] == [0] * layout.world_size
    record_property("near_ties", counts.near_ties)
    assert counts.wrong == 0, counts
    assert counts.near_ties <= counts.rows // 1000, counts


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("special", [False, True], ids=["normal", "nan-448-negative-zero"])
def test_scores_equal_reference(layout: Layout, query_len: int, special: bool) -> None:
    """Written columns match the reference up to the error of FP32 sums, and no other column is touched."""
    batch = 5
    problem = DecodeProblem.random(
        layout,
        seq_lens=[0, 1, query_len - 1, 777, min(LONGEST, 9000)],
        decode_query_len=query_len,
        device="cuda",
        seed=query_len,
        page_pitch_extra=48,
        special=special,
    )
    columns = msa_ops.msa_icp_decode_score_columns(9600, layout.page_size)
    bound = 128 * 448.0 * 448.0 if special else 128 * 30.0
    for rank in range(layout.world_size):
        planes = {}
        for backend in ("cake", "torch"):
            # A strided view: neither rows nor tokens are adjacent, and rows are not aligned to 16 bytes.
            storage = torch.full((batch * query_len, NUM_HEADS + 1, columns + 3), POISON, device="cuda")
            planes[backend] = storage
            msa_ops.msa_icp_decode_index_score_sharded(
                problem.index_q,
                problem.shard(rank),
                problem.block_table,
                problem.seq_lens,
                storage[:, :NUM_HEADS, 1 : columns + 1],
                rank=rank,
                world_size=layout.world_size,
                page_size=layout.page_size,
                decode_query_len=query_len,
                max_decode_query_len=8,
                backend=backend,
            )
        ours, reference = planes["cake"], planes["torch"]
        unwritten = reference == POISON
        assert torch.equal(ours == POISON, unwritten)
        assert torch.equal(ours == -torch.inf, reference == -torch.inf)
        assert not torch.isnan(ours).any()
        assert not (torch.signbit(ours) & (ours == 0)).any()
        finite = reference.isfinite()
        assert (ours - reference)[finite].abs().max() <= 1e-5 * bound


def test_scores_do_not_depend_on_the_batch(layout: Layout) -> None:
    """A request has bit-equal scores in a batch and as the only request, where its pages are spread over the grid."""
    problem = DecodeProblem.random(
        layout,
        seq_lens=[3000 if SMALL else 40000, *[500 + 7 * i for i in range(4 if SMALL else 40)]],
        decode_query_len=3,
        device="cuda",
        seed=5,
    )
    columns = msa_ops.msa_icp_decode_score_columns(40000, layout.page_size)
    args = {"rank": 1, "world_size": layout.world_size, "page_size": layout.page_size, "decode_query_len": 3}
    whole = torch.full((len(problem.index_q), NUM_HEADS, columns), POISON, device="cuda")
    alone = whole.clone()
    shard = problem.shard(1)
    for plane, batch in ((whole, len(problem.seq_lens)), (alone, 1)):
        msa_ops.msa_icp_decode_index_score_sharded(
            problem.index_q[: 3 * batch],
            shard,
            problem.block_table[:batch],
            problem.seq_lens[:batch],
            plane[: 3 * batch],
            max_decode_query_len=8,
            **args,
        )
    assert_equal(alone[:3], whole[:3], "scores")


def test_large_batch_and_lengths_beyond_the_buffers(layout: Layout) -> None:
    """2,500 requests: lengths beyond the block table or the score columns are clamped, negative ones are empty."""
    batch = 40 if SMALL else 2500
    draw = random.Random(3)
    lengths = [draw.randrange(0, 700) for _ in range(batch)]
    problem = DecodeProblem.random(layout, seq_lens=lengths, decode_query_len=1, device="cuda", seed=3)
    seq_lens = problem.seq_lens.clone()
    full = problem.block_table.shape[1] * layout.page_size
    longest = int(seq_lens.argmax())
    seq_lens[longest], seq_lens[(longest + 1) % batch] = full + 10**6, -5
    columns = 4
    planes = []
    for backend in ("cake", "torch"):
        plane = torch.full((batch, NUM_HEADS, columns), POISON, device="cuda")
        msa_ops.msa_icp_decode_index_score_sharded(
            problem.index_q,
            problem.shard(0),
            problem.block_table,
            seq_lens,
            plane,
            rank=0,
            world_size=layout.world_size,
            page_size=layout.page_size,
            decode_query_len=1,
            max_decode_query_len=1,
            backend=backend,
        )
        planes.append(plane)
    assert torch.equal(planes[0] == POISON, planes[1] == POISON)
    finite = planes[1].isfinite()
    assert torch.equal(planes[0].isfinite(), finite)
    torch.testing.assert_close(planes[0][finite], planes[1][finite], rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("late", ["query", "newest page"])
def test_dependent_launch_waits_for_the_query_and_the_newest_page(layout: Layout, late: str) -> None:
    """The chain starts while the preceding kernel still runs, which writes the query or the newest page at its end."""
    context, query_len = 2000 if SMALL else 60000, 4
    problem = DecodeProblem.random(layout, seq_lens=[context], decode_query_len=query_len, device="cuda", seed=8)
    shards = [problem.shard(rank) for rank in range(layout.world_size)]
    expected = brute_force_top16(problem, init_blocks=1, local_blocks=2)
    fresh_query, query = problem.index_q.clone(), problem.index_q
    stale_query = random_e4m3(query.shape, torch.Generator("cuda").manual_seed(1))
    newest = int(problem.block_table[0, (context - 1) // layout.page_size])
    group = Group.make(layout, tokens=query_len, max_model_len=context)
    scores = group.scores(query_len)
    outputs = group.outputs(query_len)
    for trial in range(2 if SMALL else 10):
        options = {"slot": trial % 3, "tagged": True}
        for rank, (shard, plane) in enumerate(zip(shards, scores, strict=True)):
            page = shard[newest]
            fresh_page = page.clone()
            if late == "query":
                query.copy_(stale_query)
                write_late(query, fresh_query)
            else:
                page.view(torch.uint8).fill_(0x7E)
                write_late(page, fresh_page)
            group.publish(rank, problem, shard, plane, **options)
        for rank, output in enumerate(outputs):
            group.merge(rank, problem, output, **options)
        counts = compare(torch.cat(outputs, dim=1), expected)
        assert counts.wrong == 0, (trial, counts)


@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_a_merge_may_run_beside_the_publisher(layout: Layout, tagged: bool) -> None:
    """In a chain of one call, the merge polls while the publisher runs. Queries change from step to step."""
    lengths, query_len = ([900, 300] if SMALL else [20000, 700, 3000]), 2
    problem = DecodeProblem.random(layout, seq_lens=lengths, decode_query_len=query_len, device="cuda", seed=21)
    shards = [problem.shard(rank) for rank in range(layout.world_size)]
    generator = torch.Generator("cuda").manual_seed(2)
    problems = [
        replace(problem, index_q=random_e4m3(problem.index_q.shape, generator)) for _ in range(2 if SMALL else 4)
    ]
    expected = [brute_force_top16(each, init_blocks=1, local_blocks=2) for each in problems]
    tokens = len(problem.index_q)
    group = Group.make(layout, tokens=tokens + 3, max_model_len=max(lengths))
    scores = group.scores(tokens)
    outputs = group.outputs(tokens)
    for step in range(4 if SMALL else 40):
        last = step % layout.world_size  # this rank runs after the others' rows have arrived
        options = {"slot": step % 3, "tagged": tagged}
        others = [rank for rank in range(layout.world_size) if rank != last]
        current = problems[step % len(problems)]
        for rank in others:
            group.publish(rank, current, shards[rank], scores[rank], **options)
        group.indexers[last].decode(
            current.index_q,
            shards[last],
            current.block_table,
            current.seq_lens,
            current.num_valid_pages,
            scores[last],
            outputs[last],
            comm=group.comms[last],
            decode_query_len=query_len,
            **options,
        )
        for rank in others:
            group.merge(rank, current, outputs[rank], **options)
        counts = compare(torch.cat(outputs, dim=1), expected[step % len(problems)])
        assert counts.wrong == 0, (step, counts)


@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_layers_follow_one_another_with_no_other_kernel_between(layout: Layout, tagged: bool) -> None:
    """A graph of many layers, each a programmatic dependent of the one before, reuses every slot set many times."""
    lengths, query_len, layers = ([900, 300] if SMALL else [20000, 700, 3000]), 2, 9
    problem = DecodeProblem.random(layout, seq_lens=lengths, decode_query_len=query_len, device="cuda", seed=22)
    shards = [problem.shard(rank) for rank in range(layout.world_size)]
    generator = torch.Generator("cuda").manual_seed(3)
    # A slot set is reused every third layer. With four queries in rotation, it then holds rows of another query.
    problems = [replace(problem, index_q=random_e4m3(problem.index_q.shape, generator)) for _ in range(4)]
    expected = [brute_force_top16(each, init_blocks=1, local_blocks=2) for each in problems]
    tokens = len(problem.index_q)
    group = Group.make(layout, tokens=tokens + 3, max_model_len=max(lengths))
    for indexer in group.indexers:
        indexer.warmup()
    scores = group.scores(tokens)
    outputs = [group.outputs(tokens) for _ in range(layers)]

    def run() -> None:
        for layer in range(layers):
            options = {"slot": layer % 3, "tagged": tagged}
            for rank, (shard, plane) in enumerate(zip(shards, scores, strict=True)):
                group.publish(rank, problems[layer % 4], shard, plane, **options)
            for rank, output in enumerate(outputs[layer]):
                group.merge(rank, problem, output, **options)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for replay in range(1 if SMALL else 20):
        for layer_outputs in outputs:
            for output in layer_outputs:
                output.fill_(-777)
        graph.replay()
        for layer in range(layers):
            counts = compare(torch.cat(outputs[layer], dim=1), expected[layer % 4])
            assert counts.wrong == 0, (replay, layer, counts)


def test_empty_calls_launch_nothing() -> None:
    """A call without a token or without a request does nothing, whatever the other sizes."""
    empty_q = torch.empty(0, NUM_HEADS, 128, dtype=torch.float8_e4m3fn, device="cuda")
    keys = torch.empty(4, 64, 128, dtype=torch.float8_e4m3fn, device="cuda")
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    errors = torch.zeros(1, dtype=torch.int32, device="cuda")
    msa_ops.msa_icp_decode_index_score_sharded(
        empty_q,
        keys,
        none.view(0, 1).expand(0, 5),
        none,
        torch.empty(0, NUM_HEADS, 8, device="cuda"),
        rank=0,
        world_size=2,
        page_size=128,
        decode_query_len=3,
        max_decode_query_len=8,
    )
    msa_ops.msa_icp_topk_select_publish(
        torch.empty(0, NUM_HEADS, 8, device="cuda"),
        none,
        torch.zeros(2, dtype=torch.int64, device="cuda"),
        errors,
        slot=0,
        rank=0,
        world_size=2,
        heads_per_rank=2,
        capacity=4,
        force_begin_blocks=0,
        force_end_blocks=0,
    )
    msa_ops.msa_icp_merge_candidates(
        torch.zeros(2, 2, 4, 33, dtype=torch.int32, device="cuda"),
        none,
        torch.empty(0, 2, 16, dtype=torch.int32, device="cuda"),
        errors,
        init_blocks=0,
        local_blocks=0,
    )
    torch.cuda.synchronize()
