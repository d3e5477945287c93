# SPDX-License-Identifier: Apache-2.0
"""The functions of decode, and the merge that prefill shares."""

from __future__ import annotations

import torch

from ..abi.calls import (
    DecodeScore,
    Merge,
    ScorePublish,
    SelectPublish,
)
from ..backends import find_backend


def msa_icp_decode_index_score_sharded(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    score_out: torch.Tensor,
    *,
    rank: int,
    world_size: int,
    page_size: int,
    decode_query_len: int,
    max_decode_query_len: int,
    enable_pdl: bool = False,
    backend: str = "cake",
) -> None:
    """Score this rank's keys for the newest tokens of each request.

    ``score_out[t, h, c]`` becomes the largest dot product of query ``(t, h)`` with the keys of page column ``c`` that
    this rank holds and token ``t`` sees, exact but for the rounding of FP32 sums; ``-inf`` where it sees none. NaN
    products are ignored and ``-0.0`` is written as ``+0.0``. Column ``c`` is global block ``c`` for 128-token pages and
    ``2 c + rank * 2 // W`` for 256-token pages.

    Parameters
    ----------
    index_q : torch.Tensor
        float8_e4m3fn ``[T, 4, 128]`` with ``T = B * decode_query_len``, contiguous, 16-byte aligned. Token ``j`` of
        request ``b`` is row ``b * decode_query_len + j``, at position ``seq_lens[b] - decode_query_len + j``.
    index_k : torch.Tensor
        float8_e4m3fn ``[pages, page_size / W, 128]``: dense rows, 16-byte aligned, a page pitch of at least a page
        and a multiple of 16 bytes. Row ``i`` of page column ``c`` is key ``128 c + W i + rank`` of a request for
        128-token pages, and ``256 c + 256 / W * rank + i`` for 256-token pages.
    block_table : torch.Tensor
        int32 ``[B, columns]``, unit last stride. Only entries of pages that a request's keys fill are read.
    seq_lens : torch.Tensor
        int32 ``[B]``, contiguous. A length beyond what ``block_table`` or ``score_out`` has columns for is clamped.
    score_out : torch.Tensor
        float32 ``[T, 4, columns]``, at most 8192 columns, a multiple of 4; unit last stride, rows that do not overlap.
        Of a request's rows, the columns of ``ceil(seq_len / page_size)`` pages, rounded up to a multiple of 4, are
        written, and no others.
    rank, world_size, page_size : int
        The layout: ``world_size`` 2 or 4, ``page_size`` 128 or 256.
    decode_query_len, max_decode_query_len : int
        Query tokens per request, ``1 <= decode_query_len <= max_decode_query_len <= 8``.
    enable_pdl : bool
        Launch as a programmatic dependent of the preceding kernel. That kernel may write the query and the newest page;
        ``seq_lens``, ``block_table`` and pages that end at or before ``seq_len - decode_query_len`` may be read before
        it has completed. It must itself have been launched without, or wait on its predecessor before it triggers.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    """
    find_backend(backend).decode_score(
        DecodeScore(
            index_q=index_q,
            index_k=index_k,
            block_table=block_table,
            seq_lens=seq_lens,
            score_out=score_out,
            rank=rank,
            world_size=world_size,
            page_size=page_size,
            max_decode_query_len=max_decode_query_len,
            decode_query_len=decode_query_len,
            enable_pdl=enable_pdl,
        )
    )


def msa_icp_topk_select_publish(
    scores: torch.Tensor,
    num_valid_pages: torch.Tensor,
    recv_bases: torch.Tensor,
    errors: torch.Tensor,
    *,
    slot: int,
    rank: int,
    world_size: int,
    heads_per_rank: int,
    capacity: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    spin_limit: int = 1 << 26,
    enable_pdl: bool = False,
    generations: torch.Tensor | None = None,
    index_scale: int = 1,
    index_offset: int = 0,
    backend: str = "cake",
) -> None:
    """Select the 16 best local blocks of every (token, head) and store them into the receive rows of the head's owner.

    Candidates are the columns whose global id ``c * index_scale + index_offset`` is below
    ``min(num_valid_pages[t], 8192)``. Forced blocks (ids below ``force_begin_blocks``, and the last
    ``force_end_blocks`` of ``num_valid_pages``) come first, then higher scores (NaN as ``-inf``), then lower ids. A row
    holds 16 raw score words and 16 ids, both ascending by id; unused places are ``(-inf, -1)``.

    Parameters
    ----------
    scores : torch.Tensor
        float32 ``[T, 4, K]`` with ``0 < K < 12288``; unit last stride, rows that do not overlap.
    num_valid_pages : torch.Tensor
        int32 ``[T]``, contiguous: global B128 blocks of each token, 0 for padding.
    recv_bases : torch.Tensor
        int64 ``[W]``: device addresses of every rank's receive rows, the tagged ones with ``generations``.
    errors : torch.Tensor
        int32, 1-D, at least one element: ``errors[0]`` counts waits that ran out.
    slot, rank, world_size, heads_per_rank, capacity : int
        Slot set 0 to 2, this rank, and the shape of the receive rows; ``T <= capacity``.
    force_begin_blocks, force_end_blocks : int
        Forced blocks, at most 16 together.
    spin_limit : int
        Polls for a free legacy row before the wait gives up, in ``[1, 2**31 - 1]``. Giving up ends the CUDA context.
    enable_pdl : bool
        Launch as a programmatic dependent of the preceding kernel; nothing is read before it has completed.
    generations : torch.Tensor, optional
        int32 ``[3, 4, capacity]``: this rank's publish counters. With them, tagged rows are written: no row is waited
        for, but two uses of a slot set must be at least two layers apart.
    index_scale, index_offset : int
        1 and 0 for 128-token pages; 2 and ``rank * 2 // W`` for 256-token pages.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    RuntimeError
        If an earlier wait has run out. The torch backend raises it for its own wait, as nothing could end that.
    """
    find_backend(backend).select_publish(
        SelectPublish(
            scores=scores,
            num_valid_pages=num_valid_pages,
            recv_bases=recv_bases,
            errors=errors,
            slot=slot,
            rank=rank,
            world_size=world_size,
            heads_per_rank=heads_per_rank,
            capacity=capacity,
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            spin_limit=spin_limit,
            enable_pdl=enable_pdl,
            generations=generations,
            index_scale=index_scale,
            index_offset=index_offset,
        )
    )


def msa_icp_decode_score_publish(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_valid_pages: torch.Tensor,
    pool: torch.Tensor,
    recv_bases: torch.Tensor,
    errors: torch.Tensor,
    *,
    rank: int,
    world_size: int,
    page_size: int,
    decode_query_len: int,
    slot: int,
    capacity: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    spin_limit: int = 1 << 26,
    generations: torch.Tensor | None = None,
    enable_pdl: bool = True,
    backend: str = "cake",
) -> None:
    """Score, select and publish without score rows; the receive rows are those of the two functions in turn.

    Arguments are those of ``msa_icp_decode_index_score_sharded`` and ``msa_icp_topk_select_publish``, but for those
    that the layout settles; ``decode_query_len`` is 1 to 8. Candidates are the columns of a request's keys that
    ``block_table`` has, at most 8192, with a global id below ``num_valid_pages[t]``; the scorer keeps sorted lists of
    the 16 best of a row's splits, which the publisher folds.

    Parameters
    ----------
    pool : torch.Tensor
        uint8 of at least ``msa_icp_decode_pool_bytes`` for the tokens of the call, contiguous, 16-byte aligned, a
        multiple of 8 bytes; never zeroed.
    enable_pdl : bool
        Launch both kernels as programmatic dependents, with the scorer's requirements on the preceding kernel.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    RuntimeError
        If an earlier wait has run out. The torch backend raises it for its own wait, as nothing could end that.
    """
    find_backend(backend).score_publish(
        ScorePublish(
            index_q=index_q,
            index_k=index_k,
            block_table=block_table,
            seq_lens=seq_lens,
            num_valid_pages=num_valid_pages,
            pool=pool,
            recv_bases=recv_bases,
            errors=errors,
            rank=rank,
            world_size=world_size,
            page_size=page_size,
            decode_query_len=decode_query_len,
            slot=slot,
            capacity=capacity,
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            spin_limit=spin_limit,
            generations=generations,
            enable_pdl=enable_pdl,
        )
    )


def msa_icp_merge_candidates(
    recv_slot: torch.Tensor,
    num_valid_pages: torch.Tensor,
    output: torch.Tensor,
    errors: torch.Tensor,
    *,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int = 1 << 26,
    enable_pdl: bool = False,
    expected_generations: torch.Tensor | None = None,
    prefill: bool = False,
    backend: str = "cake",
) -> None:
    """Merge the candidate rows of all ranks into the global Top16 of every owned head.

    Ids outside ``[0, min(num_valid_pages, 8192))`` are dropped, and of one id the largest score counts (NaN as
    ``-inf``). Ids below ``init_blocks`` or in the last ``local_blocks`` come first, then higher scores, then lower ids.

    Parameters
    ----------
    recv_slot : torch.Tensor
        One slot set: int32 ``[W, hpr, capacity, 33]``, or int64 ``[W, hpr, capacity, 32]`` with
        ``expected_generations``. Unit last stride, rows that do not overlap.
    num_valid_pages : torch.Tensor
        int32 ``[T]``, contiguous, ``T <= capacity``.
    output : torch.Tensor
        int32 ``[T, hpr, 16]``, unit last stride: the selected ids ascending, with a tail of -1. A token without valid
        pages gets all -1, and ``[0, -1, ...]`` with ``prefill``.
    errors : torch.Tensor
        int32, 1-D, at least one element: ``errors[0]`` counts waits that ran out.
    init_blocks, local_blocks : int
        Blocks at the start and at the end of a token's context that are always selected; not negative.
    spin_limit : int
        Polls for a row before the wait gives up, in ``[1, 2**31 - 1]``. Giving up ends the CUDA context.
    enable_pdl : bool
        Launch as a programmatic dependent of the preceding kernel. Rows are polled, and ``num_valid_pages`` and
        counters read, before it has completed: no kernel of the step may write ``num_valid_pages``, and between two
        merges of one slot set must run a kernel that waits for its predecessor or is launched without PDL. Polls count
        from then on.
    expected_generations : torch.Tensor, optional
        int32 ``[hpr, capacity]``: this slot set's merge counters, advanced by one for every row. With them, rows are
        tagged; without them, a legacy row's ready flag is waited for and cleared.
    prefill : bool
        ``recv_slot`` is an exchanged carrier: nothing is waited for or cleared. Excludes ``expected_generations`` and
        ``enable_pdl``.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    RuntimeError
        If an earlier wait has run out. The torch backend raises it for its own wait, as nothing could end that.
    """
    find_backend(backend).merge(
        Merge(
            num_valid_pages=num_valid_pages,
            output=output,
            errors=errors,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            spin_limit=spin_limit,
            enable_pdl=enable_pdl,
            prefill=prefill,
            tagged=expected_generations is not None,
            recv_slot=recv_slot,
            expected_generations=expected_generations,
        )
    )
