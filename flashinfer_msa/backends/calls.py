# SPDX-License-Identifier: Apache-2.0
"""One call of each operation: its arguments, in the order in which the launcher takes them (``native/ops.cc``).

``flashinfer_msa.msa_ops`` documents them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from ..indexer import MSAIcpIndexerPlan


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
    recv_slot: Tensor
    expected_generations: Tensor | None


class PublishHalf(NamedTuple):
    """What the first half of the facade's chain is given."""

    index_q: Tensor
    index_k: Tensor
    block_table: Tensor
    seq_lens: Tensor
    num_valid_pages: Tensor
    scores: Tensor
    decode_query_len: int


class MergeHalf(NamedTuple):
    """What the second half of the facade's chain is given."""

    num_valid_pages: Tensor
    output: Tensor


class Chain(NamedTuple):
    """A call of the facade's chain, or of one half of it."""

    plan: MSAIcpIndexerPlan
    comm: Any
    slot: int
    tagged: bool
    enable_pdl: bool
    publish: PublishHalf | None
    merge: MergeHalf | None

    def arguments(self) -> tuple[Any, ...]:
        """What the launcher takes."""
        plan, comm, publish, merge = self.plan, self.comm, self.publish, self.merge
        arguments: tuple[Any, ...] = (
            publish is not None,
            merge is not None,
            self.slot,
            self.enable_pdl,
            *plan.chain_numbers,
        )
        if publish is not None:
            generations, bases = (
                (comm.publish_generations, comm.tagged_recv_bases) if self.tagged else (None, comm.recv_bases)
            )
            arguments += (
                publish.index_q,
                publish.index_k,
                publish.block_table,
                publish.seq_lens,
                publish.scores,
                publish.num_valid_pages,
                generations,
                bases,
                comm.errors,
                plan.page_size,
                plan.max_decode_query_len,
                publish.decode_query_len,
                plan.index_scale,
                plan.index_offset,
            )
        if merge is not None:
            recv, expected = (comm.tagged_recv, comm.expected_generations) if self.tagged else (comm.recv, None)
            arguments += (*merge, comm.errors, self.tagged, recv, expected)
        return arguments
