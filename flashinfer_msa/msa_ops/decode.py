# SPDX-License-Identifier: Apache-2.0
"""The functions of decode, and the merge, which prefill uses too."""

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

    ``score_out[t, h, c]`` is the largest dot product of query ``(t, h)`` with the keys of page column ``c`` that this
    rank holds and token ``t`` sees. It is exact except for the rounding of FP32 sums. It is ``-inf`` if the token sees
    none of these keys. NaN products are ignored, and ``-0.0`` is written as ``+0.0``. Column ``c`` is global block
    ``c`` for 128-token pages and ``2 c + rank * 2 // W`` for 256-token pages.

    Parameters
    ----------
    index_q : torch.Tensor
        float8_e4m3fn ``[T, 4, 128]`` with ``T = B * decode_query_len``, contiguous, 16-byte aligned. Token ``j`` of
        request ``b`` is row ``b * decode_query_len + j``, at position ``seq_lens[b] - decode_query_len + j``.
    index_k : torch.Tensor
        float8_e4m3fn ``[pages, page_size / W, 128]``: this rank's key rows. Rows are dense and 16-byte aligned. The
        page pitch is at least a page and a multiple of 16 bytes. Row ``i`` of page column ``c`` is a request's key
        ``128 c + W i + rank`` for 128-token pages, and ``256 c + 256 / W * rank + i`` for 256-token pages.
    block_table : torch.Tensor
        int32 ``[B, columns]``, unit last stride. Only entries of pages that hold keys of the request are read.
    seq_lens : torch.Tensor
        int32 ``[B]``, contiguous. A length beyond the columns of ``block_table`` or ``score_out`` is clamped.
    score_out : torch.Tensor
        float32 ``[T, 4, columns]``, at most 8192 columns, a multiple of 4. Unit last stride, rows that do not overlap.
        In a request's rows, only the columns of ``ceil(seq_len / page_size)`` pages, rounded up to a multiple of 4, are
        written.
    rank, world_size, page_size : int
        The layout: ``world_size`` 2 or 4, ``page_size`` 128 or 256.
    decode_query_len, max_decode_query_len : int
        Query tokens per request, ``1 <= decode_query_len <= max_decode_query_len <= 8``.
    enable_pdl : bool
        Launch as a programmatic dependent of the preceding kernel. That kernel may write the query and the newest page.
        It must not write ``seq_lens``, ``block_table`` or pages that end at or before ``seq_len - decode_query_len``:
        these may be read before it completes. It must be launched without PDL, or wait on its own predecessor before it
        triggers.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    """
    find_backend(backend).decode_score(
        DecodeScore(
            *(index_q, index_k, block_table, seq_lens, score_out, rank, world_size, page_size),
            *(max_decode_query_len, decode_query_len, enable_pdl),
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
    ``min(num_valid_pages[t], 8192)``. Forced blocks rank first: ids below ``force_begin_blocks``, and the last
    ``force_end_blocks`` of ``num_valid_pages``. Higher scores rank next (NaN as ``-inf``), then lower ids. A row holds
    16 raw score words and 16 ids, both ascending by id. Unused entries are ``(-inf, -1)``.

    Parameters
    ----------
    scores : torch.Tensor
        float32 ``[T, 4, K]`` with ``0 < K < 12288``. Unit last stride, rows that do not overlap.
    num_valid_pages : torch.Tensor
        int32 ``[T]``, contiguous: global B128 blocks of each token, 0 for padding.
    recv_bases : torch.Tensor
        int64 ``[W]``: device addresses of every rank's receive rows: of the tagged rows with ``generations``, otherwise
        of the legacy rows.
    errors : torch.Tensor
        int32, 1-D, at least one element: ``errors[0]`` counts waits that ran out.
    slot, rank, world_size, heads_per_rank, capacity : int
        Slot set 0 to 2, this rank, and the shape of the receive rows. ``T <= capacity``.
    force_begin_blocks, force_end_blocks : int
        Forced blocks, at most 16 together.
    spin_limit : int
        Polls for a free legacy row before the wait gives up, in ``[1, 2**31 - 1]``. Giving up ends the CUDA context.
    enable_pdl : bool
        Launch as a programmatic dependent of the preceding kernel. Nothing is read before that kernel has completed.
    generations : torch.Tensor, optional
        int32 ``[3, 4, capacity]``: this rank's publish counters. With them, tagged rows are written, without a wait for
        a free row. Two uses of a slot set must then be at least two layers apart.
    index_scale, index_offset : int
        1 and 0 for 128-token pages; 2 and ``rank * 2 // W`` for 256-token pages.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    RuntimeError
        If an earlier wait has run out. The torch backend also raises it for its own wait.
    """
    find_backend(backend).select_publish(
        SelectPublish(
            *(scores, num_valid_pages, recv_bases, errors, slot, rank, world_size, heads_per_rank, capacity),
            *(force_begin_blocks, force_end_blocks, spin_limit, enable_pdl, generations, index_scale),
            *(index_offset,),
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
    """Score, select and publish without score rows.

    The receive rows equal those of ``msa_icp_decode_index_score_sharded`` followed by ``msa_icp_topk_select_publish``.
    The arguments are those of the two functions, without those that follow from the layout. ``decode_query_len`` is 1
    to 8. Candidates are the columns of a request's keys in ``block_table``, at most 8192, with a global id below
    ``num_valid_pages[t]``. The scorer writes a sorted list of the 16 best for each split of a row. The publisher merges
    the lists.

    Parameters
    ----------
    pool : torch.Tensor
        uint8 of at least ``msa_icp_decode_pool_bytes`` for the tokens of the call. Contiguous, 16-byte aligned, a
        multiple of 8 bytes. It is never zeroed.
    enable_pdl : bool
        Launch both kernels as programmatic dependents. The scorer's requirements on the preceding kernel apply.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    RuntimeError
        If an earlier wait has run out. The torch backend also raises it for its own wait.
    """
    find_backend(backend).score_publish(
        ScorePublish(
            *(index_q, index_k, block_table, seq_lens, num_valid_pages, pool, recv_bases, errors, rank),
            *(world_size, page_size, decode_query_len, slot, capacity, force_begin_blocks, force_end_blocks),
            *(spin_limit, generations, enable_pdl),
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

    Ids outside ``[0, min(num_valid_pages, 8192))`` are dropped. A duplicate id counts with its largest score (NaN as
    ``-inf``). Ids below ``init_blocks`` or in the last ``local_blocks`` rank first, then higher scores, then lower ids.

    Parameters
    ----------
    recv_slot : torch.Tensor
        One slot set: int32 ``[W, hpr, capacity, 33]``, or int64 ``[W, hpr, capacity, 32]`` with
        ``expected_generations``. Unit last stride, rows that do not overlap.
    num_valid_pages : torch.Tensor
        int32 ``[T]``, contiguous, ``T <= capacity``.
    output : torch.Tensor
        int32 ``[T, hpr, 16]``, unit last stride: the selected ids, ascending, with a tail of -1. A token without valid
        pages gets only -1, or ``[0, -1, ...]`` with ``prefill``.
    errors : torch.Tensor
        int32, 1-D, at least one element: ``errors[0]`` counts waits that ran out.
    init_blocks, local_blocks : int
        Blocks at the start and at the end of a token's context that are always selected. Not negative.
    spin_limit : int
        Polls for a row before the wait gives up, in ``[1, 2**31 - 1]``. Giving up ends the CUDA context.
    enable_pdl : bool
        Launch as a programmatic dependent of the preceding kernel. Before that kernel completes, rows are polled, which
        counts towards ``spin_limit``, and ``num_valid_pages`` and the counters are read. So no kernel of the step may
        write ``num_valid_pages``. Between two merges of one slot set, a kernel must run that waits for its predecessor
        or is launched without PDL.
    expected_generations : torch.Tensor, optional
        int32 ``[hpr, capacity]``: this slot set's merge counters. Every merged row advances its counter by one. With
        them, rows are tagged. Without them, rows are legacy: the merge waits for a row's ready flag and clears it.
    prefill : bool
        ``recv_slot`` is an exchanged carrier. The merge does not wait for flags or clear them. Not allowed with
        ``expected_generations`` or ``enable_pdl``.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    RuntimeError
        If an earlier wait has run out. The torch backend also raises it for its own wait.
    """
    find_backend(backend).merge(
        Merge(
            *(num_valid_pages, output, errors, init_blocks, local_blocks, spin_limit, enable_pdl, prefill),
            *(expected_generations is not None, expected_generations, recv_slot),
        )
    )
