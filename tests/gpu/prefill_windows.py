# SPDX-License-Identifier: Apache-2.0
"""Prefill windows, and helpers of the GPU tests of prefill."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from simulated_group import POISON, SMALL, Group

from flashinfer_msa import msa_ops
from flashinfer_msa.layout import NUM_HEADS, TOP_K, Layout
from flashinfer_msa.prefill.planner import plan_work
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.testing.problems import PrefillProblem, exchange, run_local_prefill

SEGMENTS = 9 if SMALL else 64


def ragged(seed: int, segments: int = SEGMENTS) -> dict[str, Sequence[int]]:
    """Draw segments of all orders of magnitude, many of them empty or one token long.

    Some have more keys than their tokens need, and some have fewer.
    """
    draw = random.Random(seed)
    limit = 7 if SMALL else 9
    lens = [draw.choice([0, 1, int(2 ** draw.uniform(0, limit))]) for _ in range(segments)]
    positions = [draw.choice([0, int(2 ** draw.uniform(0, limit + 4))]) for _ in range(segments)]
    extra = [draw.choice([0, 0, 777, -min(100, position + 1)]) for position in positions]
    kv = [max(p + q + e, 0) for p, q, e in zip(positions, lens, extra, strict=True)]
    return {"query_lens": lens, "kv_lens": kv, "positions": positions}


WINDOWS: dict[str, dict[str, Any]] = {
    "more and fewer keys": {"query_lens": [100, 100, 40], "kv_lens": [150, 5000, 700], "positions": [300, 300, 0]},
    "ragged": {**ragged(1), "padding": 5},
}
if not SMALL:
    WINDOWS |= {
        "one token": {"query_lens": [1], "kv_lens": [1]},
        "empty segments": {"query_lens": [0, 5, 0, 130, 0], "kv_lens": [0, 5, 900, 1200, 3], "padding": 3},
        "an item less one": {"query_lens": [63], "kv_lens": [1000]},
        "an item": {"query_lens": [64], "kv_lens": [64]},
        "an item and one": {"query_lens": [65], "kv_lens": [2000], "positions": [1800]},
        "no keys": {"query_lens": [3, 70], "kv_lens": [0, 200], "positions": [0, 0]},
        "ragged again": ragged(2),
        "8192 from the start": {"query_lens": [8192], "kv_lens": [8192]},
        "2048 of 128K": {"query_lens": [2048], "kv_lens": [131072]},
        "300 of 256K": {"query_lens": [300], "kv_lens": [262144]},
        "one long and forty short": {"query_lens": [1000, *[30] * 40], "kv_lens": [131072, *range(100, 4100, 100)]},
    }


def make_problem(layout: Layout, window: dict[str, Any], **more: Any) -> PrefillProblem:
    """Return a window's problem on the GPU, with gaps between the pages."""
    return PrefillProblem.random(
        layout, **window, device="cuda", seed=len(window["query_lens"]), page_pitch_extra=48, **more
    )


def make_plan(problem: PrefillProblem, backend: str = "cake", **bounds: int) -> MSAIcpScorePlan:
    """Plan on the device, in new poisoned storage."""
    bounds = {**problem.bounds, **bounds}
    storage = msa_ops.msa_icp_index_score_plan_storage(
        num_qo_heads=NUM_HEADS, total_q=bounds["total_q"], batch=len(problem.query_lens), device="cuda"
    )
    return msa_ops.msa_icp_index_score_sharded_plan_device(
        *problem.segments,
        NUM_HEADS,
        **bounds,
        packed_work_range=torch.full((storage["work_range_numel"],), -1, dtype=torch.int64, device="cuda"),
        packed_work_info=torch.full((storage["work_info_numel"],), -1, dtype=torch.int64, device="cuda"),
        workspace=torch.empty(storage["workspace_bytes"], dtype=torch.uint8, device="cuda"),
        backend=backend,
    )


def with_ranges(plan: MSAIcpScorePlan, ranges: int) -> MSAIcpScorePlan:
    """Return the same window cut into fewer ranges, so that the other multiprocessors have no work."""
    work_range, work_info = torch.zeros_like(plan.packed_work_range), torch.empty_like(plan.packed_work_info)
    plan_work(
        plan.qo_segment_lens,
        plan.kv_segment_lens,
        plan.qo_offset,
        work_range[:ranges],
        work_info,
        columns=plan.columns,
        max_items=len(work_info),
    )
    return replace(plan, packed_work_range=work_range, packed_work_info=work_info)


class Plane:
    """A strided score plane in poisoned storage, which shows every element that is written.

    With ``aligned``, rows start at multiples of 16 bytes, as in an indexer's scratch. Otherwise they do not.
    """

    def __init__(self, tokens: int, columns: int, *, aligned: bool = False) -> None:
        extra = 4 + -columns % 4 if aligned else 3
        offset, pitch = 4 if aligned else 1, columns + extra
        between = NUM_HEADS * pitch + (4 if aligned else 3)
        self.storage = torch.full((tokens * between + offset,), POISON, device="cuda")
        self.view = self.storage.as_strided((tokens, NUM_HEADS, columns), (between, pitch, 1), offset)

    def require_guard(self) -> None:
        """Assert that nothing was written outside the rows."""
        outside = torch.ones_like(self.storage, dtype=torch.bool)
        outside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(False)
        assert (self.storage[outside] == POISON).all(), "something was written outside the rows"


class ChangingWindow:
    """Input buffers of a window whose segments change between replays of a graph, within fixed bounds."""

    TOKENS, LONGEST, _SEGMENTS = 300, 3000, 5

    def __init__(self, layout: Layout, seed: int) -> None:
        columns = -(-self.LONGEST // layout.page_size)
        base = PrefillProblem.random(
            layout,
            query_lens=[1] * self._SEGMENTS,
            kv_lens=[columns * layout.page_size] * self._SEGMENTS,
            padding=self.TOKENS,
            device="cuda",
        )
        assert len(base.pages) == self._SEGMENTS * columns
        self.base = replace(base, index_q=base.index_q[: self.TOKENS], block_table=base.block_table.contiguous())
        self.bounds = {"total_q": self.TOKENS, "max_query_len": self.TOKENS, "max_seq_len": self.LONGEST}
        self.inputs = [torch.zeros(len(x), dtype=torch.int32, device="cuda") for x in base.segments]
        self.num_valid_pages = torch.zeros(self.TOKENS, dtype=torch.int32, device="cuda")
        self._draw = random.Random(seed)

    def change(self) -> PrefillProblem:
        """Draw new segments into the input buffers."""
        draw, tokens = self._draw, self.TOKENS
        cuts = sorted(draw.randrange(tokens + 1) for _ in range(self._SEGMENTS - 1))
        ends = [*cuts, draw.randrange(cuts[-1], tokens + 1)]
        lens = [end - begin for begin, end in zip([0, *cuts], ends, strict=True)]
        positions = [draw.randrange(self.LONGEST - length + 1) for length in lens]
        seq_lens = [p + q for p, q in zip(positions, lens, strict=True)]
        problem = replace(
            self.base,
            query_lens=tuple(lens),
            positions=tuple(positions),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        )
        for held, new in zip(self.inputs, problem.segments, strict=True):
            held.copy_(new)
        self.num_valid_pages.copy_(problem.num_valid_pages)
        return problem


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run a step once, then capture it in a graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def without_padding(window: dict[str, Any]) -> dict[str, Any]:
    """Return the window without padding tokens after its segments."""
    return {key: value for key, value in window.items() if key != "padding"}


def poisoned_pools(group: Group) -> list[torch.Tensor]:
    """Return a pool per rank, filled with a key larger than any candidate's."""
    return [
        torch.full(indexer.prefill_pool_shape(), 255, dtype=torch.uint8, device="cuda") for indexer in group.indexers
    ]


def run_step(
    group: Group,
    problem: PrefillProblem,
    tokens: int,
    scratches: Sequence[torch.Tensor | None],
    pools: Sequence[torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run a prefill step in windows of ``tokens``; return the owners' outputs side by side and every rank's carrier."""
    total = len(problem.index_q)
    carriers = []
    for indexer, scratch, pool in zip(group.indexers, scratches, pools or [None] * len(group.indexers), strict=True):
        keys = problem.shard(indexer.rank)
        carrier = torch.full(indexer.prefill_carrier_shape()[1:], -777, dtype=torch.int32, device="cuda")
        carriers.append(carrier[:, :total])
        run_local_prefill(indexer, problem, keys, scratch, carrier, tokens, pool)
    outputs = []
    for indexer in group.indexers:
        output = torch.full((total, indexer.heads_per_rank, TOP_K), -777, dtype=torch.int32, device="cuda")
        indexer.prefill_merge(exchange(carriers, indexer), problem.num_valid_pages, output)
        outputs.append(output)
    return torch.cat(outputs, dim=1), carriers
