# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``msa_ops`` in the order in which the launcher's operations take them (``native/ops.cc``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..runtime import native

if TYPE_CHECKING:
    from ..indexer import MSAIcpIndexerPlan


def decode_index_score(
    launch: bool,
    index_q: Any,
    index_k: Any,
    block_table: Any,
    seq_lens: Any,
    score_out: Any,
    rank: int,
    world_size: int,
    page_size: int,
    decode_query_len: int,
    max_decode_query_len: int,
    enable_pdl: bool,
) -> None:
    """Check the decode scorer's arguments, and launch it if ``launch``."""
    native.call(
        "decode_score",
        launch,
        index_q,
        index_k,
        block_table,
        seq_lens,
        score_out,
        rank,
        world_size,
        page_size,
        max_decode_query_len,
        decode_query_len,
        enable_pdl,
    )


def topk_select_publish(
    launch: bool,
    scores: Any,
    num_valid_pages: Any,
    recv_bases: Any,
    errors: Any,
    slot: int,
    rank: int,
    world_size: int,
    heads_per_rank: int,
    capacity: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    generations: Any,
    index_scale: int,
    index_offset: int,
) -> None:
    """Check the publisher's arguments, and launch it if ``launch``."""
    native.call(
        "select_publish",
        launch,
        scores,
        num_valid_pages,
        recv_bases,
        errors,
        slot,
        rank,
        world_size,
        heads_per_rank,
        capacity,
        force_begin_blocks,
        force_end_blocks,
        spin_limit,
        enable_pdl,
        generations,
        index_scale,
        index_offset,
    )


def merge_candidates(
    launch: bool,
    recv_slot: Any,
    num_valid_pages: Any,
    output: Any,
    errors: Any,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    expected_generations: Any,
    prefill: bool,
) -> None:
    """Check the merge's arguments, and launch it if ``launch``."""
    native.call(
        "merge",
        launch,
        num_valid_pages,
        output,
        errors,
        init_blocks,
        local_blocks,
        spin_limit,
        enable_pdl,
        prefill,
        expected_generations is not None,
        recv_slot,
        expected_generations,
    )


def decode(
    launch: bool,
    plan: MSAIcpIndexerPlan,
    comm: Any,
    slot: int,
    tagged: bool,
    enable_pdl: bool,
    publish: tuple[Any, ...] | None,
    merge: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Check the facade's chain, or one half of it, and launch it if ``launch``."""
    arguments: tuple[Any, ...] = (launch, publish is not None, merge is not None, slot, enable_pdl, *plan.chain_numbers)
    if publish is not None:
        index_q, index_k, block_table, seq_lens, num_valid_pages, scores, decode_query_len = publish
        bases, generations = (comm.tagged_recv_bases, comm.publish_generations) if tagged else (comm.recv_bases, None)
        arguments += (
            index_q,
            index_k,
            block_table,
            seq_lens,
            scores,
            num_valid_pages,
            generations,
            bases,
            comm.errors,
            plan.page_size,
            plan.max_decode_query_len,
            decode_query_len,
            plan.index_scale,
            plan.index_offset,
        )
    if merge is not None:
        recv, expected = (comm.tagged_recv, comm.expected_generations) if tagged else (comm.recv, None)
        arguments += (*merge, comm.errors, tagged, recv, expected)
    native.call("decode", *arguments)
