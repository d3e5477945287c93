# SPDX-License-Identifier: Apache-2.0
"""Measures one rank's prefill window: planner, scorer, selection, merge, and their chains."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from .. import msa_ops
from ..indexer import MSAIcpIndexerPlan
from ..layout import BLOCK_TOKENS, HEAD_DIM, NUM_HEADS, ROW_WORDS, TOP_K, Layout
from ..prefill.window import MSAIcpScorePlan
from ..sizing import MAX_WINDOW_TOKENS
from ..testing.problems import group_indexers, random_e4m3
from .ceilings import Ceilings
from .peers import Peers, PeerShape
from .rows import Row
from .timing import MIN_CALLS, at_least_min_calls, copies_of, graph_us


@dataclass
class PrefillCase:
    """One rank's prefill window, with keys for several layers, so that a graph over them reads cold keys.

    ``segments`` has the numbers of query tokens and keys of each segment. The tokens are the last of the keys.
    """

    layout: Layout
    segments: Sequence[tuple[int, int]]
    indexer: MSAIcpIndexerPlan
    query: torch.Tensor
    keys: list[torch.Tensor]
    block_table: torch.Tensor
    lengths: tuple[torch.Tensor, ...]
    num_valid_pages: torch.Tensor
    scratch: torch.Tensor
    pool: torch.Tensor
    carrier: torch.Tensor
    output: torch.Tensor

    @classmethod
    def make(cls, layout: Layout, segments: Sequence[tuple[int, int]], *, cold: bool, rank: int = 0) -> PrefillCase:
        """Draw keys in pages in random order, different on every rank."""
        lens, contexts = [tokens for tokens, _ in segments], [context for _, context in segments]
        tokens = sum(lens)
        indexer = group_indexers(
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
        )[rank]
        generator = torch.Generator("cuda").manual_seed(rank)
        counts = [-(-context // layout.page_size) for context in contexts]
        keys = copies_of(random_e4m3((sum(counts), layout.rows, HEAD_DIM), generator), cold=cold)
        pages = torch.randperm(sum(counts), generator=generator, device="cuda", dtype=torch.int32)
        seen = [torch.arange(context - length + 1, context + 1, dtype=torch.int32) for length, context in segments]
        return cls(
            layout=layout,
            segments=segments,
            indexer=indexer,
            query=random_e4m3((tokens, NUM_HEADS, HEAD_DIM), generator),
            keys=keys,
            block_table=torch.nn.utils.rnn.pad_sequence(pages.split(counts), batch_first=True),
            lengths=cls._lengths(segments),
            num_valid_pages=(torch.cat(seen).cuda() + BLOCK_TOKENS - 1) // BLOCK_TOKENS,
            scratch=torch.empty(tokens, NUM_HEADS, indexer.prefill_score_columns, device="cuda"),
            pool=torch.empty(indexer.prefill_pool_shape(), dtype=torch.uint8, device="cuda"),
            carrier=torch.empty(NUM_HEADS, tokens, ROW_WORDS, dtype=torch.int32, device="cuda"),
            output=torch.empty(tokens, indexer.heads_per_rank, TOP_K, dtype=torch.int32, device="cuda"),
        )

    @staticmethod
    def _lengths(segments: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Return the planner's inputs: query and key lengths, offsets of both, positions of the first query tokens."""
        lens, contexts = [tokens for tokens, _ in segments], [context for _, context in segments]
        offsets = [list(itertools.accumulate(values, initial=0)) for values in (lens, contexts)]
        positions = [context - tokens for tokens, context in segments]
        return tuple(
            torch.tensor(values, dtype=torch.int32, device="cuda") for values in (lens, contexts, *offsets, positions)
        )

    def last(self, tokens: int) -> PrefillCase:
        """Return the case of the last ``tokens`` of a single segment, in the same storage."""
        ((_, context),) = self.segments
        segments = [(tokens, context)]
        return replace(
            self,
            segments=segments,
            query=self.query[-tokens:],
            lengths=self._lengths(segments),
            num_valid_pages=self.num_valid_pages[-tokens:],
            scratch=self.scratch[:tokens],
            carrier=self.carrier[:, :tokens],
            output=self.output[:tokens],
        )

    @property
    def shape(self) -> Row:
        """The keys of a row that describe the case."""
        return {
            "layout": self.layout.title,
            "tokens": sum(tokens for tokens, _ in self.segments),
            "ctx": max(context for _, context in self.segments),
            "heads": NUM_HEADS,
            "cold": len(self.keys) > 1,
        }

    @property
    def flops(self) -> float:
        """Operations of one rank's products under the causal mask."""
        pairs = sum(tokens * (context - (tokens - 1) / 2) for tokens, context in self.segments)
        return 2.0 * NUM_HEADS * HEAD_DIM * pairs / self.layout.world_size

    def make_plan(self) -> MSAIcpScorePlan:
        """Launch the planner."""
        return self.indexer.prefill_window_plan(
            0,
            *self.lengths,
            total_q=len(self.query),
            max_query_len=max(tokens for tokens, _ in self.segments),
            max_seq_len=self.shape["ctx"],
        )

    def score(self, window: MSAIcpScorePlan, keys: torch.Tensor, accumulation: str = "tensor") -> None:
        """Launch only the scorer, as the indexer does."""
        msa_ops.msa_icp_index_score_sharded(
            self.query,
            keys,
            self.block_table,
            window,
            rank=self.indexer.rank,
            max_score=self.scratch,
            initialize=False,
            tp=self.layout.world_size,
            compact=self.layout.index_scale > 1,
            accumulation=accumulation,
        )

    def select(self) -> None:
        """Launch only the selection, as the indexer does."""
        columns = -(-self.shape["ctx"] // self.layout.page_size)
        msa_ops.msa_icp_topk_select_prefill(
            self.scratch[..., :columns],
            self.num_valid_pages,
            self.carrier,
            force_end_blocks=1,
            index_scale=self.indexer.index_scale,
            index_offset=self.indexer.index_offset,
        )

    def local(self, window: MSAIcpScorePlan, keys: torch.Tensor) -> None:
        """Launch scorer and selection."""
        self.indexer.prefill_local(
            self.query, keys, self.block_table, window, self.scratch, self.num_valid_pages, self.carrier
        )

    def fused(self, window: MSAIcpScorePlan, keys: torch.Tensor) -> None:
        """Launch the fused chain, whatever the indexer would choose for this many tokens."""
        msa_ops.msa_icp_prefill_score_select(
            self.query,
            keys,
            self.block_table,
            window,
            self.num_valid_pages,
            self.pool,
            self.carrier,
            rank=self.indexer.rank,
            tp=self.layout.world_size,
            compact=self.layout.index_scale > 1,
            force_end_blocks=1,
        )

    def merge(self) -> None:
        """Launch the merge, with this rank's own rows instead of every rank's."""
        received = self.carrier.unflatten(0, (self.layout.world_size, self.layout.heads_per_rank))
        self.indexer.prefill_merge(received, self.num_valid_pages, self.output)


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
"""Default windows. Every part of them is measured."""

_SWEEP_TOKENS = (1, 64, 256, 1024, 2048, 8192)
SWEEPS = {
    context: [tokens for tokens in _SWEEP_TOKENS if PrefillShape(tokens, context, True) not in PREFILL_SHAPES]
    for context in (8 << 10, 32 << 10, 128 << 10, 200 << 10)
}
"""Query tokens, by context, of further windows. Only the scorer and both local chains of these are measured."""
_SWEEP_REPLAYS = 5
"""Replays per measurement. There are many of these windows, and each is captured three times."""

SELECT_COLUMNS = (512, 1024, 8192)
"""Numbers of score columns with which the selection is timed."""


def prefill_rows(layout: Layout, shape: PrefillShape, ceilings: Ceilings, peers: Peers | None = None) -> Iterator[Row]:
    """Measure planner, scorer, selection, merge and chains, without the exchange. Peers only score and select."""
    case = PrefillCase.make(layout, [shape[:2]], cold=shape.cold)
    yield {"job": "prefill_plan", **case.shape, "us": graph_us([case.make_plan] * MIN_CALLS)}
    window = case.make_plan()
    score = _score_row(case, window, ceilings.fp8_gemm)
    yield score
    exact = _score_row(case, window, ceilings.fp16_gemm, accumulation="exact")
    yield {**exact, "name": "exact", "note": 'accumulation="exact", beside an FP16 matrix product'}
    us = graph_us([case.select] * MIN_CALLS)
    size = 4 * NUM_HEADS * int(-(-case.num_valid_pages // case.indexer.index_scale).sum())
    select: Row = {"job": "prefill_select", **case.shape, "us": us, "bytes": size, "tb_s": size / us / 1e6}
    yield select
    us = graph_us([case.merge] * MIN_CALLS)
    yield {"job": "merge", **case.shape, "us": us, "note": "an exchanged carrier"}

    def chain(key: torch.Tensor) -> None:
        case.local(window, key)
        case.merge()

    us = graph_us([partial(chain, key) for key in at_least_min_calls(case.keys)])
    yield {"job": "prefill_chain", **case.shape, "us": us, "note": "score, select and merge, without the exchange"}
    yield from _local_rows(case, window)
    if peers is None:
        return
    heads, tokens = layout.heads_per_rank, shape.tokens
    unsharded = PeerShape(1, shape.context, heads, tokens, shape.cold)
    yield from peers.compare(score, unsharded, f"equal FLOPs: theirs are {heads} heads of all keys")
    ours, theirs = (-(-shape.context // size) for size in (layout.page_size, BLOCK_TOKENS))
    note = f"theirs: {heads} heads x {tokens} rows of {theirs} blocks; ours: 4 x {tokens} of {ours}, to be merged"
    yield from peers.compare(select, unsharded, note)


def sweep_rows(layout: Layout, context: int, tokens: Sequence[int], ceilings: Ceilings, *, cold: bool) -> Iterator[Row]:
    """Measure scorer, score and select, and the fused chain for each window of the last ``tokens`` of ``context``.

    All windows share the same keys, which are drawn once.
    """
    whole = PrefillCase.make(layout, [(max(tokens), context)], cold=cold)
    for count in tokens:
        case = whole.last(count)
        window = case.make_plan()
        yield _score_row(case, window, ceilings.fp8_gemm, replays=_SWEEP_REPLAYS)
        yield from _local_rows(case, window, replays=_SWEEP_REPLAYS)


def _score_row(
    case: PrefillCase, window: MSAIcpScorePlan, product: Row, *, accumulation: str = "tensor", replays: int = 11
) -> Row:
    """Measure the scorer's rate and its share of the rate of a matrix ``product``."""
    keys = at_least_min_calls(case.keys)
    us = graph_us([partial(case.score, window, key, accumulation) for key in keys], replays=replays)
    tflops = case.flops / us / 1e6
    speed: Row = {"us": us, "flops": case.flops, "tflops": tflops, "ceiling_ratio": tflops / product["tflops"]}
    return {"job": "prefill_score", **case.shape, **speed}


def _local_rows(case: PrefillCase, window: MSAIcpScorePlan, *, replays: int = 11) -> Iterator[Row]:
    """Measure the local part of a window: score and select, and the fused chain."""
    keys = at_least_min_calls(case.keys)
    separate = graph_us([partial(case.local, window, key) for key in keys], replays=replays)
    yield {"job": "prefill_chain", "name": "score and select", **case.shape, "us": separate}
    us = graph_us([partial(case.fused, window, key) for key in keys], replays=replays)
    note = "score and select without score rows"
    yield {"job": "prefill_fused", **case.shape, "us": us, "separate_ratio": us / separate, "note": note}


def select_rows(ceilings: Ceilings, tokens: int = MAX_WINDOW_TOKENS) -> Iterator[Row]:
    """Measure the selection of random scores, all of them candidates, and a streaming read of as many bytes."""
    carrier = torch.empty(NUM_HEADS, tokens, ROW_WORDS, dtype=torch.int32, device="cuda")
    for columns in SELECT_COLUMNS:
        planes = copies_of(torch.randn(tokens, NUM_HEADS, columns, device="cuda"), cold=True)
        valid = torch.full((tokens,), columns, dtype=torch.int32, device="cuda")
        select = partial(
            msa_ops.msa_icp_topk_select_prefill, num_valid_pages=valid, carrier=carrier, force_end_blocks=1
        )
        us = graph_us([partial(select, plane) for plane in at_least_min_calls(planes)])
        size = planes[0].nbytes
        yield {
            "job": "prefill_select",
            "name": "random scores",
            "tokens": tokens,
            "ctx": columns * BLOCK_TOKENS,
            "heads": NUM_HEADS,
            "cold": True,
            "us": us,
            "bytes": size,
            "tb_s": size / us / 1e6,
            "ceiling_ratio": ceilings.read_us(planes) / us,
        }


def balance_rows(layout: Layout) -> Iterator[Row]:
    """Measure how evenly a window of one long and forty short segments uses the multiprocessors."""
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
        times.append(graph_us([partial(case.score, alone, case.keys[0])] * 3, replays=5))
    yield {
        "job": "prefill_score",
        "name": "ragged window",
        **case.shape,
        "us": whole,
        "flops": case.flops,
        "tflops": case.flops / whole / 1e6,
        "note": "1024 tokens of 128K and forty times 100 of 200 to 8000; the mean time of a multiprocessor's range, "
        f"each run by itself, is {statistics.mean(times) / max(times):.2f} of the longest",
    }
