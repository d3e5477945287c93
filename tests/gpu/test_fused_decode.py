# SPDX-License-Identifier: Apache-2.0
"""The fused decode chain on a GPU: its receive rows equal those of scorer and publisher bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from simulated_group import POISON, SMALL, Group, assert_equal

from flashinfer_msa import msa_ops
from flashinfer_msa.comm import local_comm
from flashinfer_msa.layout import NUM_HEADS, Layout
from flashinfer_msa.testing.problems import DecodeProblem, brute_force_top16, compare

QUERY_LENS = [5] if SMALL else range(1, 9)
LONG = 4000 if SMALL else 1 << 20


def lengths(batch: int, longest: int, seed: int) -> list[int]:
    """Draw lengths of all orders of magnitude and some empty requests. The last request is the longest."""
    draw = random.Random(seed)
    return [*(draw.choice([0, int(longest ** draw.random())]) for _ in range(batch - 1)), longest]


def poisoned_pool(tokens: int) -> torch.Tensor:
    """Return a pool filled with a key larger than any candidate's."""
    size = msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=tokens)
    return torch.full((size,), 255, dtype=torch.uint8, device="cuda")


BATCHES = {
    "ragged": lengths(9, 3000, 0),
    "one long among short ones": [*[4096 if not SMALL else 300] * 20, LONG],
}
if not SMALL:
    BATCHES |= {
        "one": [3000],
        "one of a page": [100],
        "empty": [0, 0],
        "one of 1M": [1 << 20],
        "64 of 16K": [16384] * 64,
        "1500 short ones": lengths(1500, 700, 1),
    }


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_receive_rows_equal_the_separate_chain(layout: Layout, name: str, query_len: int, tagged: bool) -> None:
    """Any batch, with forced blocks and padding rows, and with NaN, -0.0 and outliers among the elements."""
    if len(BATCHES[name]) > 1000 and query_len not in (1, 8):
        pytest.skip("the large batch runs only with the shortest and the longest query")
    problem = DecodeProblem.random(
        layout,
        seq_lens=BATCHES[name],
        decode_query_len=query_len,
        device="cuda",
        seed=query_len,
        page_pitch_extra=48,
        special=True,
    )
    tokens = len(problem.index_q)
    valid = problem.num_valid_pages.clone()
    valid[::7] = 0
    first, last = (1, 2) if query_len % 2 else (16, 0)
    group = Group.make(layout, tokens=tokens + 1, max_model_len=1 << 20, init_blocks=first, local_blocks=last)
    rank = query_len % layout.world_size
    indexer, keys = group.indexers[rank], problem.shard(rank)
    scores = torch.full((tokens, NUM_HEADS, indexer.decode_score_columns), POISON, device="cuda")
    received = []
    for pool in (None, poisoned_pool(tokens + 1)):
        comms = local_comm(group.indexers)
        for slot in (1, 2):  # the second run sees what the first has left in the pool
            for comm in comms:
                comm.recv.zero_()
            indexer.decode_publish(
                problem.index_q,
                keys,
                problem.block_table,
                problem.seq_lens,
                valid,
                scores if pool is None else None,
                comm=comms[rank],
                slot=slot,
                tagged=tagged,
                decode_query_len=query_len,
                pool=pool,
            )
        received.append(comms[0].storages)
    for separate, fused in zip(*received, strict=True):
        assert_equal(fused, separate, "receive storage")


def test_the_function_equals_the_indexer(layout: Layout) -> None:
    """`msa_icp_decode_score_publish` writes what the indexer writes, with both row kinds."""
    problem = DecodeProblem.random(layout, seq_lens=lengths(5, 2000, 3), decode_query_len=2, device="cuda")
    group = Group.make(layout, tokens=10, max_model_len=2048)
    indexer, keys = group.indexers[1], problem.shard(1)
    pool = poisoned_pool(10)
    for tagged in (False, True):
        comms = [local_comm(group.indexers) for _ in range(2)]
        ours = comms[0][1]
        indexer.decode_publish(
            problem.index_q,
            keys,
            problem.block_table,
            problem.seq_lens,
            problem.num_valid_pages,
            None,
            comm=ours,
            slot=2,
            tagged=tagged,
            decode_query_len=2,
            pool=pool,
        )
        theirs = comms[1][1]
        msa_ops.msa_icp_decode_score_publish(
            problem.index_q,
            keys,
            problem.block_table,
            problem.seq_lens,
            problem.num_valid_pages,
            pool,
            theirs.tagged_recv_bases if tagged else theirs.recv_bases,
            theirs.errors,
            rank=1,
            world_size=layout.world_size,
            page_size=layout.page_size,
            decode_query_len=2,
            slot=2,
            capacity=10,
            force_begin_blocks=1,
            force_end_blocks=2,
            generations=theirs.publish_generations if tagged else None,
        )
        for a, b in zip(ours.storages, theirs.storages, strict=True):
            assert_equal(a, b, "receive storage")


def test_the_fused_chain_equals_the_unsharded_top16(layout: Layout, record_property) -> None:
    """Every rank's fused publish runs, then every merge, in a CUDA graph."""
    problem = DecodeProblem.random(layout, seq_lens=lengths(7, 5000, 5), decode_query_len=3, device="cuda")
    tokens = len(problem.index_q)
    group = Group.make(layout, tokens=tokens, max_model_len=5120)
    shards = [problem.shard(rank) for rank in range(layout.world_size)]
    pools = [poisoned_pool(tokens) for _ in shards]
    outputs = group.outputs(tokens)

    def step(slot: int) -> None:
        options: dict[str, Any] = {"slot": slot, "tagged": True}
        for rank, (shard, pool) in enumerate(zip(shards, pools, strict=True)):
            group.publish(rank, problem, shard, None, pool=pool, **options)
        for rank, output in enumerate(outputs):
            group.merge(rank, problem, output, **options)

    step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(1)
    for output in outputs:
        output.fill_(-777)
    graph.replay()
    counts = compare(torch.cat(outputs, dim=1), brute_force_top16(problem, init_blocks=1, local_blocks=2))
    record_property("near_ties", counts.near_ties)
    assert counts.wrong == 0, counts
