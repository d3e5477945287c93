# SPDX-License-Identifier: Apache-2.0
"""One call of each operation: its arguments, in the order in which the launcher takes them (``native/``).

``flashinfer_msa.msa_ops`` documents them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import BLOCK_TOKENS
from ..prefill.window import MSAIcpScorePlan
from ..sizing import ceil_div, multiprocessor_count


class DecodeScore(NamedTuple):
    """A call of the decode scorer."""

    index_q: Tensor
    index_k: Tensor
    block_table: Tensor
    seq_lens: Tensor
    score_out: Tensor
    rank: int
    world_size: int
    page_size: int
    max_decode_query_len: int
    decode_query_len: int
    enable_pdl: bool


class SelectPublish(NamedTuple):
    """A call of the publisher."""

    scores: Tensor
    num_valid_pages: Tensor
    recv_bases: Tensor
    errors: Tensor
    slot: int
    rank: int
    world_size: int
    heads_per_rank: int
    capacity: int
    force_begin_blocks: int
    force_end_blocks: int
    spin_limit: int
    enable_pdl: bool
    generations: Tensor | None
    index_scale: int
    index_offset: int


class Merge(NamedTuple):
    """A call of the merge; ``tagged`` says whether ``expected_generations`` are given."""

    num_valid_pages: Tensor
    output: Tensor
    errors: Tensor
    init_blocks: int
    local_blocks: int
    spin_limit: int
    enable_pdl: bool
    prefill: bool
    tagged: bool
    expected_generations: Tensor | None
    recv_slot: Tensor


class ScorePublish(NamedTuple):
    """A call of the fused scorer and publisher."""

    index_q: Tensor
    index_k: Tensor
    block_table: Tensor
    seq_lens: Tensor
    num_valid_pages: Tensor
    pool: Tensor
    recv_bases: Tensor
    errors: Tensor
    rank: int
    world_size: int
    page_size: int
    decode_query_len: int
    slot: int
    capacity: int
    force_begin_blocks: int
    force_end_blocks: int
    spin_limit: int
    generations: Tensor | None
    enable_pdl: bool


class ChainState(NamedTuple):
    """What the decode chain takes of an indexer and its receive storage, whose fields end it as addresses."""

    device: int
    rank: int
    world_size: int
    heads_per_rank: int
    capacity: int
    init_blocks: int
    local_blocks: int
    spin_limit: int
    wait_ns: int
    page_size: int
    max_query_len: int
    index_scale: int
    index_offset: int
    recv: int
    tagged_recv: int
    recv_bases: int
    tagged_recv_bases: int
    publish_generations: int
    expected_generations: int
    errors: int

    def pack(self) -> Tensor:
        """The state as the launcher reads it, int64 in host memory."""
        return torch.tensor(self, dtype=torch.int64, device="cpu")


class Decode(NamedTuple):
    """A call of the indexer's decode chain or one of its halves, on checked receive storage.

    A half leaves out what only the other takes. Without ``scores``, or with a ``pool``, the chain is the fused one.
    """

    publishes: bool
    merges: bool
    slot: int
    tagged: bool
    enable_pdl: bool
    num_valid_pages: Tensor
    index_q: Tensor | None = None
    index_k: Tensor | None = None
    block_table: Tensor | None = None
    seq_lens: Tensor | None = None
    scores: Tensor | None = None
    pool: Tensor | None = None
    decode_query_len: int = 0
    output: Tensor | None = None

    def arguments(self, state: Tensor) -> tuple[Any, ...]:
        publish = self[6:13] if self.publishes else ()
        return (state, *self[:6], *publish, *((self.output,) if self.merges else ()))


class PrefillPlan(NamedTuple):
    """A call of the planner."""

    qo_segment_lens: Tensor
    kv_segment_lens: Tensor
    qo_segment_offsets: Tensor
    kv_segment_offsets: Tensor
    qo_offset: Tensor
    packed_work_range: Tensor
    packed_work_info: Tensor
    workspace: Tensor
    num_qo_heads: int
    total_q: int
    max_query_len: int
    max_seq_len: int

    def arguments(self) -> tuple[Any, ...]:
        """What the launcher takes."""
        return (*self, multiprocessors_of(self.packed_work_range))

    def plan(self) -> MSAIcpScorePlan:
        """The plan that a checked call makes."""
        return MSAIcpScorePlan(
            *self[:8],
            total_q=self.total_q,
            num_qo_heads=self.num_qo_heads,
            batch=len(self.qo_segment_lens),
            max_query_len=self.max_query_len,
            columns=ceil_div(self.max_seq_len, BLOCK_TOKENS),
        )


class PrefillScore(NamedTuple):
    """A call of the prefill scorer."""

    q: Tensor
    k: Tensor
    block_table: Tensor
    plan: MSAIcpScorePlan
    rank: int
    tp: int
    max_score: Tensor
    sm_scale: float
    initialize: bool
    compact: bool
    enable_pdl: bool
    exact: bool

    def arguments(self) -> tuple[Any, ...]:
        """What the launcher takes."""
        return (*self[:3], *_plan_arguments(self.plan), *self[4:])


class SelectPrefill(NamedTuple):
    """A call of the prefill selection."""

    scores: Tensor
    num_valid_pages: Tensor
    carrier: Tensor
    force_begin_blocks: int
    force_end_blocks: int
    index_scale: int
    index_offset: int


class PrefillScoreSelect(NamedTuple):
    """A call of the fused prefill scorer and selection."""

    q: Tensor
    k: Tensor
    block_table: Tensor
    plan: MSAIcpScorePlan
    rank: int
    tp: int
    num_valid_pages: Tensor
    pool: Tensor
    carrier: Tensor
    compact: bool
    force_begin_blocks: int
    force_end_blocks: int
    enable_pdl: bool
    exact: bool

    def arguments(self) -> tuple[Any, ...]:
        """What the launcher takes."""
        return (*self[:3], *_plan_arguments(self.plan), *self[4:])


class PrefillLocal(NamedTuple):
    """A call of the facade's prefill scorer and selection; with a ``pool``, of the fused ones."""

    query: Tensor
    index_k: Tensor
    block_table: Tensor
    window_plan: MSAIcpScorePlan
    rank: int
    world_size: int
    score_scratch: Tensor | None
    num_valid_pages: Tensor
    carrier_view: Tensor
    force_begin_blocks: int
    force_end_blocks: int
    index_scale: int
    index_offset: int
    pool: Tensor | None
    short_scratch: Tensor | None
    exact: bool

    def arguments(self) -> tuple[Any, ...]:
        """What the launcher takes."""
        return (*self[:3], *_plan_arguments(self.window_plan), *self[4:])

    def of_step(self, query: Any, index_k: Any, first_token: int) -> PrefillLocal:
        """The call with keys and a step's query, in which the window's tokens begin at ``first_token``."""
        if isinstance(query, Tensor) and query.dim() > 0:
            query = query[first_token : first_token + self.window_plan.total_q]
        return self._replace(query=query, index_k=index_k)

    def scores(self) -> Tensor | None:
        """Where the scores of a checked call go, ``[total_q, 4, a column a page]``; None for the fused chain."""
        tokens, columns = self.window_plan.total_q, ceil_div(self.window_plan.columns, self.index_scale)
        scratch = self.score_scratch
        if self.pool is not None:
            scratch = self.short_scratch
            if scratch is None or tokens > scratch.shape[0] or columns > scratch.shape[2]:
                return None
        return scratch[:tokens, :, :columns]


class PrefillMerge(NamedTuple):
    """A call of the facade's merge of an exchanged carrier."""

    received: Tensor
    num_valid_pages: Tensor
    output: Tensor
    world_size: int
    init_blocks: int
    local_blocks: int


def _plan_arguments(plan: MSAIcpScorePlan) -> tuple[Any, ...]:
    """A plan's parts in the launcher's order."""
    return (
        *plan.tensors(),
        plan.num_qo_heads,
        plan.total_q,
        plan.max_query_len,
        plan.columns,
        multiprocessors_of(plan.packed_work_range),
    )


def multiprocessors_of(tensor: Any) -> int:
    """Multiprocessors of a tensor's device, 1 for what is not on one that has any: the launcher refuses that."""
    return multiprocessor_count(tensor.device) if isinstance(tensor, Tensor) and tensor.is_cuda else 1
