# SPDX-License-Identifier: Apache-2.0
"""The functions of prefill."""

from __future__ import annotations

import torch

from ..abi.calls import (
    PrefillPlan,
    PrefillScore,
    PrefillScoreSelect,
    SelectPrefill,
)
from ..backends import find_backend, find_eager_backend
from ..layout import NUM_HEADS
from ..prefill.accumulation import is_exact
from ..prefill.host_plan import make_host_plan
from ..prefill.window import MSAIcpScorePlan, require_score_plan
from ..sizing import (
    require_int,
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
    return call.plan()


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
