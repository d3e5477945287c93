# SPDX-License-Identifier: Apache-2.0
"""Compares integer scores bit for bit over many launches, which shows a shared-memory stage refilled too early.

Elements are integers of at most 4, so every sum is exact in FP32 and in the tensor cores' accumulators, in any order.
The keys of a page share a sign. For heads whose scores of the page are all negative, one row of a page of the other
sign raises the maximum. The signs of queries change from launch to launch, so every page has such heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from flashinfer_msa import msa_ops
from flashinfer_msa.layout import BLOCK_TOKENS, HEAD_DIM, NUM_HEADS, Layout
from flashinfer_msa.testing.problems import DecodeProblem, PrefillProblem, Problem

POISON = -12345.5
"""A score that no kernel writes."""
QUERIES = 4
"""Queries that launches use in rotation."""


@dataclass(frozen=True)
class Repeats:
    """How often a problem is scored: by eager calls, or by replays of a CUDA graph of ``QUERIES`` launches."""

    launches: int
    graph: bool


def _integers(target: torch.Tensor, signs: torch.Tensor, generator: torch.Generator) -> None:
    """Fill ``target`` with integers from 1 to 4, each row of the first dimension with its sign in ``signs``."""
    shape = (-1, *[1] * (target.dim() - 1))
    for part, sign in zip(target.split(1 << 10), signs.split(1 << 10), strict=True):
        part.copy_(torch.randint(1, 5, part.shape, generator=generator, device=part.device).float() * sign.view(shape))


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (count,), generator=generator, device=generator.device) * 2.0 - 1.0


def _with_integers(problem: Problem, generator: torch.Generator) -> list[Problem]:
    """Return ``QUERIES`` problems over the same integer keys with different queries."""
    _integers(problem.pages, _signs(len(problem.pages), generator), generator)
    heads = torch.tensor([1.0, -1.0] * (NUM_HEADS // 2), device=generator.device)
    problems = []
    for index in range(QUERIES):
        query = torch.empty_like(problem.index_q)
        # Neighbouring heads have opposite signs, and so do successive launches.
        requests = torch.empty(len(query), device=query.device)
        for rows, sign in zip(problem.rows, _signs(len(problem.rows), generator).tolist(), strict=True):
            requests[rows] = sign * (-1) ** index
        _integers(query.view(-1, HEAD_DIM), (requests[:, None] * heads).flatten(), generator)
        problems.append(replace(problem, index_q=query))
    return problems


def expected_scores(problem: Problem, shard: torch.Tensor, rank: int, columns: int) -> torch.Tensor:
    """Return the maximum per page over the keys of ``rank`` that a token sees: ``[T, 4, columns]``, else ``-inf``."""
    layout = problem.layout
    visible = problem.visible_keys
    scores = torch.full((len(problem.index_q), NUM_HEADS, columns), -torch.inf, device=shard.device)
    rows_of_page = torch.tensor([layout.global_key(rank, 0, row) for row in range(layout.rows)], device=shard.device)
    for request, (rows, kv_len) in enumerate(zip(problem.rows, problem.seq_lens.tolist(), strict=True)):
        pages = -(-kv_len // layout.page_size)
        keys = shard[problem.block_table[request, :pages].long()].float()
        position = torch.arange(pages, device=shard.device)[:, None] * layout.page_size + rows_of_page
        dots = (problem.index_q[rows].float() @ keys.flatten(0, 1).T).unflatten(-1, position.shape)
        unseen = position >= visible[rows, None, None, None]
        scores[rows, :, :pages] = dots.masked_fill_(unseen, -torch.inf).amax(-1)
    return scores


def _count_mismatches(
    launches: Sequence[Callable[[], None]], plane: torch.Tensor, expected: Sequence[torch.Tensor], repeats: Repeats
) -> tuple[int, int]:
    """Run the launches in rotation, each into a poisoned plane, and compare the plane on the device.

    Returns the number of wrong scores and the number of launches. The host waits only at the end.
    """
    mismatches = torch.zeros((), dtype=torch.int64, device=plane.device)
    done = torch.zeros((), dtype=torch.int64, device=plane.device)

    def run(index: int) -> None:
        plane.fill_(POISON)
        launches[index]()
        mismatches.add_((plane.view(torch.int32) != expected[index].view(torch.int32)).sum())
        done.add_(1)

    for index in range(QUERIES):
        run(index)  # loads the kernels, which a capture cannot do
    if repeats.graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(QUERIES):
                run(index)
        for _ in range(repeats.launches // QUERIES):
            graph.replay()
    else:
        for launch in range(repeats.launches):
            run(launch % QUERIES)
    return int(mismatches), int(done)


def decode_mismatches(
    layout: Layout,
    *,
    requests: int,
    length: int,
    decode_query_len: int,
    repeats: Repeats,
    device: str,
    backend: str,
    rank: int = 1,
) -> tuple[int, int]:
    """Score long requests many times; return the number of wrong scores and the number of launches."""
    problem = DecodeProblem.random(
        layout, seq_lens=[length] * requests, decode_query_len=decode_query_len, device=device, seed=decode_query_len
    )
    problems = _with_integers(problem, torch.Generator(device).manual_seed(decode_query_len))
    shard = problem.shard(rank)
    columns = msa_ops.msa_icp_decode_score_columns(length, layout.page_size)
    written = -(-length // layout.page_size)
    written += -written % 4
    expected = [expected_scores(each, shard, rank, columns) for each in problems]
    for plane in expected:
        plane[..., written:] = POISON
    plane = torch.empty_like(expected[0])

    def launch(query: torch.Tensor) -> Callable[[], None]:
        return lambda: msa_ops.msa_icp_decode_index_score_sharded(
            query,
            shard,
            problem.block_table,
            problem.seq_lens,
            plane,
            rank=rank,
            world_size=layout.world_size,
            page_size=layout.page_size,
            decode_query_len=decode_query_len,
            max_decode_query_len=8,
            backend=backend,
        )

    return _count_mismatches([launch(each.index_q) for each in problems], plane, expected, repeats)


def prefill_mismatches(
    layout: Layout,
    *,
    segments: int,
    tokens: int,
    length: int,
    accumulation: str,
    repeats: Repeats,
    device: str,
    backend: str,
    rank: int = 1,
) -> tuple[int, int]:
    """Score many short segments, each an item with its own query, many times.

    Returns the number of wrong scores and the number of launches.
    """
    problem = PrefillProblem.random(
        layout, query_lens=[tokens] * segments, kv_lens=[length] * segments, device=device, seed=segments
    )
    problems = _with_integers(problem, torch.Generator(device).manual_seed(segments))
    shard = problem.shard(rank)
    storage = msa_ops.msa_icp_index_score_plan_storage(
        num_qo_heads=NUM_HEADS, total_q=len(problem.index_q), batch=segments, device=device
    )
    plan = msa_ops.msa_icp_index_score_sharded_plan_device(
        *problem.segments,
        NUM_HEADS,
        **problem.bounds,
        packed_work_range=torch.empty(storage["work_range_numel"], dtype=torch.int64, device=device),
        packed_work_info=torch.empty(storage["work_info_numel"], dtype=torch.int64, device=device),
        workspace=torch.empty(storage["workspace_bytes"], dtype=torch.uint8, device=device),
        backend=backend,
    )
    columns = msa_ops.msa_icp_index_score_columns(length, layout.page_size)
    first_key = (torch.arange(columns, device=device) * layout.index_scale + layout.index_offset(rank)) * BLOCK_TOKENS
    beyond = first_key >= problem.visible_keys[:, None]
    expected = [expected_scores(each, shard, rank, columns) for each in problems]
    expected = [plane.masked_fill_(beyond[:, None], POISON) for plane in expected]
    plane = torch.empty_like(expected[0])

    def launch(query: torch.Tensor) -> Callable[[], None]:
        return lambda: msa_ops.msa_icp_index_score_sharded(
            query,
            shard,
            problem.block_table,
            plan,
            rank=rank,
            max_score=plane,
            initialize=False,
            tp=layout.world_size,
            compact=layout.index_scale > 1,
            accumulation=accumulation,
            backend=backend,
        )

    return _count_mismatches([launch(each.index_q) for each in problems], plane, expected, repeats)
