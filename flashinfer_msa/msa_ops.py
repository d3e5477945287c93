# SPDX-License-Identifier: Apache-2.0
"""The functions of FlashInfer's ``msa_ops`` namespace that index context parallelism is made of.

Names, shapes, defaults and argument order are FlashInfer's. With ``backend="cake"`` nothing here allocates,
synchronizes or reads a device value, and launches go to torch's current stream; ``backend="torch"`` is the reference,
on any device. ``T`` is a number of query tokens, ``B`` of requests, ``W`` the world size, ``hpr`` the heads per rank.
"""

from __future__ import annotations

import torch

from .backends import find_backend, find_eager_backend
from .indexer import MSAIcpIndexerPlan, prepare_msa_icp_indexer
from .layout import NUM_HEADS
from .prefill.accumulation import is_exact
from .prefill.host_plan import make_host_plan
from .prefill.window import MSAIcpScorePlan, planned_window, require_score_plan
from .runtime.calls import (
    DecodeScore,
    Merge,
    PrefillPlan,
    PrefillScore,
    PrefillScoreSelect,
    ScorePublish,
    SelectPrefill,
    SelectPublish,
)
from .sizing import (
    msa_icp_comm_layout,
    msa_icp_decode_pool_bytes,
    msa_icp_decode_score_columns,
    msa_icp_index_score_columns,
    msa_icp_index_score_plan_storage,
    msa_icp_prefill_pool_bytes,
    require_int,
)

__all__ = [
    "MSAIcpIndexerPlan",
    "MSAIcpScorePlan",
    "msa_icp_comm_layout",
    "msa_icp_decode_index_score_sharded",
    "msa_icp_decode_pool_bytes",
    "msa_icp_decode_score_columns",
    "msa_icp_decode_score_publish",
    "msa_icp_index_score_columns",
    "msa_icp_index_score_plan_storage",
    "msa_icp_index_score_sharded",
    "msa_icp_index_score_sharded_plan",
    "msa_icp_index_score_sharded_plan_device",
    "msa_icp_merge_candidates",
    "msa_icp_prefill_pool_bytes",
    "msa_icp_prefill_score_select",
    "msa_icp_topk_select_prefill",
    "msa_icp_topk_select_publish",
    "prepare_msa_icp_indexer",
]


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


def msa_icp_index_score_sharded_plan(
    qo_segment_lens: torch.Tensor,
    kv_segment_lens: torch.Tensor,
    num_qo_heads: int,
    *,
    qo_offset: torch.Tensor,
    device: torch.device | str | None = None,
    backend: str = "cake",
) -> MSAIcpScorePlan:
    """Plan a prefill window from lengths on the host. Allocates and copies: not for CUDA graphs.

    Parameters
    ----------
    qo_segment_lens, kv_segment_lens : torch.Tensor
        int32 ``[B]`` on the CPU, not negative: query tokens of each segment in the window, and its keys.
    num_qo_heads : int
        Index heads, 4.
    qo_offset : torch.Tensor
        int32 ``[B]`` on the CPU, not negative: position of each segment's first query token.
    device : torch.device, optional
        Device of the plan: the current CUDA device by default, the CPU for ``backend="torch"``.
    backend : str
        ``"cake"`` or ``"torch"``.

    Returns
    -------
    MSAIcpScorePlan
        ``total_q`` is the sum of the query lengths, 1 where that is 0; limits are exact.

    Raises
    ------
    ValueError
        If an argument is not as described, a sum of lengths is not an int32, the window has more than 65536 segments,
        65535 items of 64 tokens, 65535 blocks of keys a segment or ``2**31 - 1`` block columns of all items, or no
        kernels are installed for the GPU.
    """
    implementation = find_eager_backend(backend)
    require_int("num_qo_heads", num_qo_heads, NUM_HEADS, NUM_HEADS)
    if device is None:
        device = implementation.default_device
    resolved, _ = implementation.resolve_device(device)
    return make_host_plan(qo_segment_lens, kv_segment_lens, qo_offset, resolved)


def msa_icp_index_score_sharded_plan_device(
    qo_segment_lens: torch.Tensor,
    kv_segment_lens: torch.Tensor,
    qo_segment_offsets: torch.Tensor,
    kv_segment_offsets: torch.Tensor,
    qo_offset: torch.Tensor,
    num_qo_heads: int,
    *,
    total_q: int,
    max_query_len: int,
    max_seq_len: int,
    packed_work_range: torch.Tensor,
    packed_work_info: torch.Tensor,
    workspace: torch.Tensor,
    backend: str = "cake",
) -> MSAIcpScorePlan:
    """Plan a prefill window on the device, from lengths that the host need not know.

    The plan refers to the tensors, and is valid until one of them is written: a CUDA graph that captures this call
    plans anew at every replay, for any lengths within the bounds.

    Parameters
    ----------
    qo_segment_lens, kv_segment_lens : torch.Tensor
        int32 ``[B]``, contiguous: query tokens of each segment in the window (0 allowed), and its keys.
    qo_segment_offsets, kv_segment_offsets : torch.Tensor
        int32 ``[B + 1]``, contiguous: exclusive sums of the lengths.
    qo_offset : torch.Tensor
        int32 ``[B]``, contiguous. Token ``j`` of segment ``b`` is query row ``qo_segment_offsets[b] + j``, stands at
        position ``qo_offset[b] + j``, and sees the keys up to its position, of ``kv_segment_lens[b]``.
    num_qo_heads : int
        Index heads, 4.
    total_q, max_query_len, max_seq_len : int
        Upper bounds of the query tokens of the window, of a segment's, and of a segment's keys,
        ``0 < max_query_len <= total_q``. Blocks beyond ``ceil(max_seq_len / 128)`` are not scored.
    packed_work_range : torch.Tensor
        int64, contiguous, one for each multiprocessor: written.
    packed_work_info : torch.Tensor
        int64, contiguous, of the size that ``msa_icp_index_score_plan_storage`` says: written.
    workspace : torch.Tensor
        uint8, contiguous, 16-byte aligned, at least 32 MiB: scratch of this call alone.
    backend : str
        ``"cake"`` or ``"torch"``.

    Returns
    -------
    MSAIcpScorePlan

    Raises
    ------
    ValueError
        If an argument is not as described, the bounds allow more than 65536 segments, 65535 items of 64 tokens
        (``ceil(total_q / 64) + min(B, total_q) - 1``), 65535 blocks of keys a segment or ``2**31 - 1`` block columns of
        all items, or no kernels are installed for the GPU.
    RuntimeError
        If a launch fails, or the kernels are not resident while a graph is captured.
    """
    call = PrefillPlan(
        qo_segment_lens=qo_segment_lens,
        kv_segment_lens=kv_segment_lens,
        qo_segment_offsets=qo_segment_offsets,
        kv_segment_offsets=kv_segment_offsets,
        qo_offset=qo_offset,
        packed_work_range=packed_work_range,
        packed_work_info=packed_work_info,
        workspace=workspace,
        num_qo_heads=num_qo_heads,
        total_q=total_q,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    find_backend(backend).prefill_plan(call)
    return planned_window(call)


def msa_icp_index_score_sharded(
    q: torch.Tensor,
    k: torch.Tensor,
    block_table: torch.Tensor,
    plan: MSAIcpScorePlan,
    *,
    rank: int,
    max_score: torch.Tensor,
    sm_scale: float = 1.0,
    initialize: bool = True,
    tp: int = 2,
    compact: bool = False,
    enable_pdl: bool = False,
    accumulation: str = "tensor",
    backend: str = "cake",
) -> None:
    """Score this rank's keys for the query tokens of a prefill window.

    ``max_score[t, h, c]`` becomes the largest dot product of query ``(t, h)`` with the keys of column ``c`` that this
    rank holds and token ``t`` sees; ``-inf`` where it sees none, and in columns of blocks that other ranks hold. NaN
    products are ignored and ``-0.0`` is written as ``+0.0``. A column is a 128-token block; with ``compact`` it is a
    256-token page, of which this rank holds block ``2 c + rank * 2 // tp``. A column lies within a token's causal
    prefix if its block has a key that the token sees.

    Parameters
    ----------
    q : torch.Tensor
        float8_e4m3fn ``[T, 4, 128]`` with ``T == plan.total_q``, contiguous, 16-byte aligned.
    k : torch.Tensor
        float8_e4m3fn ``[pages, P / tp, 128]``, one page at least: dense rows, 16-byte aligned, a page pitch of at least
        a page and a multiple of 16 bytes; rows as in ``msa_icp_decode_index_score_sharded``. Its rows and ``tp`` make
        the page size ``P``, 128 or 256.
    block_table : torch.Tensor
        int32 ``[B, at least the plan's pages]``, unit last stride. Only entries of pages with visible keys are read.
    plan : MSAIcpScorePlan
        The window; its tensors are read on the device.
    rank : int
        This rank, below ``tp``.
    max_score : torch.Tensor
        float32 ``[T, 4, K]``, ``K >= plan.columns`` (half of that, rounded up, with ``compact``); unit last stride,
        rows that do not overlap.
    sm_scale : float
        A finite number. Not applied: scores are unscaled.
    initialize : bool
        Write ``-inf`` everywhere first. Without it, columns past a token's causal prefix and rows of no segment are
        left alone.
    tp : int
        World size, 2 or 4.
    compact : bool
        A column a page; for 256-token pages alone.
    enable_pdl : bool
        Launch as a programmatic dependent of the preceding kernel; nothing is read before it has completed.
    accumulation : str
        ``"tensor"``: where tensor cores multiply e4m3 as it is (sm_89, sm_90a, sm_120a, sm_121a), products are summed
        in their own accumulators, which keep fewer bits than FP32. ``"exact"``: elements are converted to FP16, whose
        products and FP32 sums are exact but for rounding, in about twice the time on sm_90a; for selections that are
        validated bit by bit. Other architectures and the torch backend are exact with either.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    RuntimeError
        If a launch fails, or the kernels are not resident while a graph is captured.
    """
    implementation = find_backend(backend)
    exact = is_exact(accumulation)
    require_score_plan("plan", plan)
    implementation.prefill_score(
        PrefillScore(
            q=q,
            k=k,
            block_table=block_table,
            plan=plan,
            rank=rank,
            tp=tp,
            max_score=max_score,
            sm_scale=sm_scale,
            initialize=initialize,
            compact=compact,
            enable_pdl=enable_pdl,
            exact=exact,
        )
    )


def msa_icp_topk_select_prefill(
    scores: torch.Tensor,
    num_valid_pages: torch.Tensor,
    carrier: torch.Tensor,
    *,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    index_scale: int = 1,
    index_offset: int = 0,
    backend: str = "cake",
) -> None:
    """Select the 16 best local blocks of every (token, head) into carrier rows, for an exchange between the ranks.

    Candidates, their order and the words of a row are those of ``msa_icp_topk_select_publish``; word 32 is 1.

    Parameters
    ----------
    scores : torch.Tensor
        float32 ``[T, 4, K]`` with ``0 < K < 12288``; unit last stride, rows that do not overlap.
    num_valid_pages : torch.Tensor
        int32 ``[T]``, contiguous: global B128 blocks of each token, 0 for padding.
    carrier : torch.Tensor
        int32 ``[4, T, 33]``, head-major, unit last stride, rows and heads that do not overlap: a token slice of a
        larger buffer will do.
    force_begin_blocks, force_end_blocks : int
        Blocks at the start and at the end of a token's context that are always selected, at most 16 together.
    index_scale, index_offset : int
        Column ``c`` is global block ``c * index_scale + index_offset``.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU.
    RuntimeError
        If a launch fails, or the kernels are not resident while a graph is captured.
    """
    find_backend(backend).select_prefill(
        SelectPrefill(
            scores=scores,
            num_valid_pages=num_valid_pages,
            carrier=carrier,
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            index_scale=index_scale,
            index_offset=index_offset,
        )
    )


def msa_icp_prefill_score_select(
    q: torch.Tensor,
    k: torch.Tensor,
    block_table: torch.Tensor,
    plan: MSAIcpScorePlan,
    num_valid_pages: torch.Tensor,
    pool: torch.Tensor,
    carrier: torch.Tensor,
    *,
    rank: int,
    tp: int = 2,
    compact: bool = False,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    enable_pdl: bool = False,
    accumulation: str = "tensor",
    backend: str = "cake",
) -> None:
    """Score a prefill window and select into carrier rows, without score rows.

    The rows are those of ``msa_icp_index_score_sharded`` with ``initialize`` and ``msa_icp_topk_select_prefill``.
    Candidates are the columns of the plan's blocks with a global id below ``min(num_valid_pages[t], 8192)``, those
    without a key that the token sees with ``-inf``. The scorer keeps lists of the 16 best of each row of its pieces of
    work, which a second kernel folds. Nothing is written for a plan without a segment.

    Parameters
    ----------
    q : torch.Tensor
        float8_e4m3fn ``[T, 4, 128]`` with ``T == plan.total_q``, contiguous, 16-byte aligned.
    k : torch.Tensor
        float8_e4m3fn ``[pages, page_size / tp, 128]``, this rank's key rows; dense rows, 16-byte aligned, a page pitch
        that is a multiple of 16 bytes. Rows and ``tp`` together say what the page size is.
    block_table : torch.Tensor
        int32 ``[B, columns]``, unit last stride: page of each page column of a segment.
    plan : MSAIcpScorePlan
        The window.
    num_valid_pages : torch.Tensor
        int32 ``[T]``, contiguous: global B128 blocks of each token, 0 for padding.
    pool : torch.Tensor
        uint8 of at least ``msa_icp_prefill_pool_bytes`` for the plan's ``total_q`` and ``batch``, contiguous, 16-byte
        aligned, a multiple of 8 bytes; never zeroed. Segments beyond ``total_q``, which are empty, need no room.
    carrier : torch.Tensor
        int32 ``[4, T, 33]``, head-major, unit last stride, rows and heads that do not overlap.
    rank, tp : int
        This rank and the number of ranks, 2 or 4.
    compact : bool
        A column a page: True for 256-token pages, False for 128-token pages.
    force_begin_blocks, force_end_blocks : int
        First and last blocks of a token that are always selected; at most 16 together.
    enable_pdl : bool
        Launch both kernels as programmatic dependents; nothing is read before the preceding kernel has completed.
    accumulation : str
        ``"tensor"`` or ``"exact"``, as in ``msa_icp_index_score_sharded``.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU; nothing has been launched then.
    RuntimeError
        If an earlier wait has run out, a launch fails, or the kernels are not resident while a graph is captured.
    """
    implementation = find_backend(backend)
    exact = is_exact(accumulation)
    require_score_plan("plan", plan)
    implementation.prefill_score_select(
        PrefillScoreSelect(
            q=q,
            k=k,
            block_table=block_table,
            plan=plan,
            rank=rank,
            tp=tp,
            num_valid_pages=num_valid_pages,
            pool=pool,
            carrier=carrier,
            compact=compact,
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            enable_pdl=enable_pdl,
            exact=exact,
        )
    )
