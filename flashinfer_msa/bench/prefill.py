# SPDX-License-Identifier: Apache-2.0
"""Prefill of one rank: planner, scorer, selection, merge, and their chain, of one window."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .. import msa_ops
from ..indexer import MSAIcpIndexerPlan
from ..layout import BLOCK_TOKENS, HEAD_DIM, NUM_HEADS, ROW_WORDS, TOP_K, Layout
from ..score_plan import MSAIcpScorePlan
from ..simulate import group_plans, random_e4m3
from .ceilings import Ceilings
from .peers import Peers, PeerShape
from .rows import Row
from .timing import MIN_CALLS, at_least_min_calls, copies_of, graph_us


@dataclass
class PrefillCase:
    """One rank's prefill window: inputs for several layers, so that a graph over them reads cold keys.

    ``segments`` are the query tokens of each segment and the keys that they are the last of.
    """

    layout: Layout
    segments: Sequence[tuple[int, int]]
    plan: MSAIcpIndexerPlan
    query: torch.Tensor
    keys: list[torch.Tensor]
    block_table: torch.Tensor
    lengths: tuple[torch.Tensor, ...]
    num_valid_pages: torch.Tensor
    scratch: torch.Tensor
    carrier: torch.Tensor
    output: torch.Tensor

    @classmethod
    def make(cls, layout: Layout, segments: Sequence[tuple[int, int]], *, cold: bool) -> PrefillCase:
        """Random keys in pages in random order."""
        lens, contexts = [tokens for tokens, _ in segments], [context for _, context in segments]
        tokens = sum(lens)
        plan = group_plans(
            layout,
            ["cuda"],
            init_blocks=0,
            local_blocks=1,
            max_decode_tokens=1,
            max_decode_query_len=1,
            max_num_batched_tokens=tokens,
            max_num_seqs=len(segments),
            max_model_len=max(contexts),
            num_sparse_layers=4,
        )[0]
        generator = torch.Generator("cuda").manual_seed(0)
        counts = [-(-context // layout.page_size) for context in contexts]
        keys = copies_of(random_e4m3((sum(counts), layout.rows, HEAD_DIM), generator), cold=cold)
        pages = torch.randperm(sum(counts), generator=generator, device="cuda", dtype=torch.int32)
        positions = [context - length for length, context in segments]
        offsets = [list(itertools.accumulate(values, initial=0)) for values in (lens, contexts)]
        seen = [torch.arange(p + 1, c + 1, dtype=torch.int32) for p, c in zip(positions, contexts, strict=True)]
        return cls(
            layout=layout,
            segments=segments,
            plan=plan,
            query=random_e4m3((tokens, NUM_HEADS, HEAD_DIM), generator),
            keys=keys,
            block_table=torch.nn.utils.rnn.pad_sequence(pages.split(counts), batch_first=True),
            lengths=tuple(
                torch.tensor(values, dtype=torch.int32, device="cuda")
                for values in (lens, contexts, *offsets, positions)
            ),
            num_valid_pages=(torch.cat(seen).cuda() + BLOCK_TOKENS - 1) // BLOCK_TOKENS,
            scratch=torch.empty(tokens, NUM_HEADS, plan.prefill_score_columns, device="cuda"),
            carrier=torch.empty(NUM_HEADS, tokens, ROW_WORDS, dtype=torch.int32, device="cuda"),
            output=torch.empty(tokens, plan.heads_per_rank, TOP_K, dtype=torch.int32, device="cuda"),
        )

    @property
    def shape(self) -> Row:
        """What a row says of the case."""
        tokens, context = sum(tokens for tokens, _ in self.segments), max(context for _, context in self.segments)
        return {"layout": self.layout.title, "tokens": tokens, "ctx": context, "heads": NUM_HEADS}

    @property
    def flops(self) -> float:
        """Operations of the products that the causal mask leaves to one rank."""
        pairs = sum(tokens * (context - (tokens - 1) / 2) for tokens, context in self.segments)
        return 2.0 * NUM_HEADS * HEAD_DIM * pairs / self.layout.world_size

    def make_plan(self) -> MSAIcpScorePlan:
        """Launch the planner."""
        return self.plan.prefill_window_plan(
            0,
            *self.lengths,
            total_q=len(self.query),
            max_query_len=max(tokens for tokens, _ in self.segments),
            max_seq_len=self.shape["ctx"],
        )

    def score(self, window: MSAIcpScorePlan, keys: torch.Tensor) -> None:
        """Launch the scorer alone, as the facade does."""
        msa_ops.msa_icp_index_score_sharded(
            self.query,
            keys,
            self.block_table,
            window,
            rank=0,
            max_score=self.scratch,
            initialize=False,
            tp=self.layout.world_size,
            compact=self.layout.index_scale > 1,
        )

    def select(self) -> None:
        """Launch the selection alone, as the facade does."""
        columns = -(-self.shape["ctx"] // self.layout.page_size)
        msa_ops.msa_icp_topk_select_prefill(
            self.scratch[..., :columns],
            self.num_valid_pages,
            self.carrier,
            force_end_blocks=1,
            index_scale=self.plan.index_scale,
            index_offset=self.plan.index_offset,
        )

    def local(self, window: MSAIcpScorePlan, keys: torch.Tensor) -> None:
        """Launch scorer and selection."""
        self.plan.prefill_local(
            self.query, keys, self.block_table, window, self.scratch, self.num_valid_pages, self.carrier
        )

    def merge(self) -> None:
        """Launch the merge, of this rank's own rows in place of every rank's."""
        received = self.carrier.unflatten(0, (self.layout.world_size, self.layout.heads_per_rank))
        self.plan.prefill_merge(received, self.num_valid_pages, self.output)


class PrefillShape(NamedTuple):
    """The last ``tokens`` of a prompt of ``context`` tokens."""

    tokens: int
    context: int
    cold: bool


PREFILL_SHAPES = [
    PrefillShape(tokens, context, cold)
    for cold in (True, False)
    for tokens, context in ((8192, 128 << 10), (2048, 128 << 10), (8192, 8 << 10))
]
"""What is measured unless something else is asked for."""


def prefill_rows(layout: Layout, shape: PrefillShape, ceilings: Ceilings, peers: Peers | None = None) -> Iterator[Row]:
    """Planner, scorer, selection, merge and their chain; the exchange is not in it. Peers score and select alone."""
    case = PrefillCase.make(layout, [shape[:2]], cold=shape.cold)
    common: Row = {**case.shape, "cold": shape.cold}
    keys = at_least_min_calls(case.keys)
    yield {"job": "prefill_plan", **common, "us": graph_us([case.make_plan] * MIN_CALLS)}
    window = case.make_plan()
    us = graph_us([lambda k=k: case.score(window, k) for k in keys])
    tflops = case.flops / us / 1e6
    speed: Row = {"flops": case.flops, "tflops": tflops, "ceiling_ratio": tflops / ceilings.gemm["tflops"]}
    score: Row = {"job": "prefill_score", **common, "us": us, **speed}
    yield score
    us = graph_us([case.select] * MIN_CALLS)
    size = 4 * NUM_HEADS * int(-(-case.num_valid_pages // case.plan.index_scale).sum())
    select: Row = {"job": "prefill_select", **common, "us": us, "bytes": size, "tb_s": size / us / 1e6}
    yield select
    us = graph_us([case.merge] * MIN_CALLS)
    yield {"job": "merge", **common, "us": us, "note": "an exchanged carrier"}

    def chain(key: torch.Tensor) -> None:
        case.local(window, key)
        case.merge()

    us = graph_us([lambda k=k: chain(k) for k in keys])
    yield {"job": "prefill_chain", **common, "us": us, "note": "score, select and merge, without the exchange"}
    if peers is None:
        return
    heads, tokens = layout.heads_per_rank, shape.tokens
    unsharded = PeerShape(1, shape.context, heads, tokens, shape.cold)
    yield from peers.compare(score, unsharded, f"equal FLOPs: theirs are {heads} heads of all keys")
    ours, theirs = (-(-shape.context // size) for size in (layout.page_size, BLOCK_TOKENS))
    note = f"theirs: {heads} heads x {tokens} rows of {theirs} blocks; ours: 4 x {tokens} of {ours}, to be merged"
    yield from peers.compare(select, unsharded, note)


def balance_rows(layout: Layout) -> Iterator[Row]:
    """How evenly a window of one long segment and forty short ones keeps the multiprocessors busy."""
    case = PrefillCase.make(
        layout, [(1024, 131072), *[(100, context) for context in range(200, 8200, 200)]], cold=False
    )
    window = case.make_plan()
    whole = graph_us([lambda: case.score(window, case.keys[0])] * MIN_CALLS)
    times = []
    for index in range(len(window.packed_work_range)):
        one = torch.zeros_like(window.packed_work_range)
        one[index] = window.packed_work_range[index]
        alone = replace(window, packed_work_range=one)
        times.append(graph_us([lambda w=alone: case.score(w, case.keys[0])] * 3, replays=5))
    yield {
        "job": "prefill_score",
        "name": "ragged window",
        **case.shape,
        "us": whole,
        "flops": case.flops,
        "tflops": case.flops / whole / 1e6,
        "cold": False,
        "note": "1024 tokens of 128K and forty times 100 of 200 to 8000; the mean time of a multiprocessor's range, "
        f"each run alone, is {statistics.mean(times) / max(times):.2f} of the longest",
    }
