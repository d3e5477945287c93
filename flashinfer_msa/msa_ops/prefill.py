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
    """Plan a prefill window from lengths on the host. It allocates and copies, so a CUDA graph cannot capture it.

    Parameters
    ----------
    qo_segment_lens, kv_segment_lens : torch.Tensor
        int32 ``[B]`` on the CPU, not negative: query tokens and keys of each segment in the window.
    num_qo_heads : int
        Index heads, 4.
    qo_offset : torch.Tensor
        int32 ``[B]`` on the CPU, not negative: position of each segment's first query token.
    device : torch.device, optional
        Device of the plan. The default is the current CUDA device, or the CPU with ``backend="torch"``.
    backend : str
        ``"cake"`` or ``"torch"``.

    Returns
    -------
    MSAIcpScorePlan
        ``total_q`` is the sum of the query lengths, or 1 if the sum is 0. All limits are exact.

    Raises
    ------
    ValueError
        If an argument is not as described, a sum of lengths does not fit int32, or no kernels are installed for the
        GPU. Also if the window has more than 65536 segments, 65535 items of 64 tokens, 65535 blocks of keys per segment
        or ``2**31 - 1`` block columns of all items.
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
    """Plan a prefill window on the device. The host does not need to know the lengths.

    The plan refers to the tensors and is valid until one of them is written. A CUDA graph that captures this call makes
    a new plan at every replay, for any lengths within the bounds.

    Parameters
    ----------
    qo_segment_lens, kv_segment_lens : torch.Tensor
        int32 ``[B]``, contiguous: query tokens (0 allowed) and keys of each segment in the window.
    qo_segment_offsets, kv_segment_offsets : torch.Tensor
        int32 ``[B + 1]``, contiguous: exclusive sums of the lengths.
    qo_offset : torch.Tensor
        int32 ``[B]``, contiguous: position of each segment's first query token. Token ``j`` of segment ``b`` is query
        row ``qo_segment_offsets[b] + j``, at position ``qo_offset[b] + j``. It sees those of the
        ``kv_segment_lens[b]`` keys that are not beyond its position.
    num_qo_heads : int
        Index heads, 4.
    total_q, max_query_len, max_seq_len : int
        Upper bounds of the query tokens of the window, the query tokens per segment and the keys per segment.
        ``0 < max_query_len <= total_q``. Blocks beyond ``ceil(max_seq_len / 128)`` are not scored.
    packed_work_range : torch.Tensor
        int64, contiguous, one element per multiprocessor. Written by this call.
    packed_work_info : torch.Tensor
        int64, contiguous, with at least the elements of ``msa_icp_index_score_plan_storage``. Written by this call.
    workspace : torch.Tensor
        uint8, contiguous, 16-byte aligned, at least 32 MiB: scratch of this call.
    backend : str
        ``"cake"`` or ``"torch"``.

    Returns
    -------
    MSAIcpScorePlan

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU. Also if the bounds allow more than
        65536 segments, 65535 items of 64 tokens (``ceil(total_q / 64) + min(B, total_q) - 1``), 65535 blocks of keys
        per segment or ``2**31 - 1`` block columns of all items.
    RuntimeError
        If a launch fails, or the kernels are not resident while a graph is captured.
    """
    segments = (qo_segment_lens, kv_segment_lens, qo_segment_offsets, kv_segment_offsets, qo_offset)
    work = (packed_work_range, packed_work_info, workspace)
    call = PrefillPlan(*segments, *work, num_qo_heads, total_q, max_query_len, max_seq_len)
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

    ``max_score[t, h, c]`` is the largest dot product of query ``(t, h)`` with the keys of column ``c`` that this rank
    holds and token ``t`` sees. It is ``-inf`` if the token sees none of these keys, and in columns of blocks that only
    other ranks hold. NaN products are ignored, and ``-0.0`` is written as ``+0.0``. A column is a 128-token block. With
    ``compact`` it is a 256-token page, of which this rank holds block ``2 c + rank * 2 // tp``. A column lies within a
    token's causal prefix if its block has a key that the token sees.

    Parameters
    ----------
    q : torch.Tensor
        float8_e4m3fn ``[T, 4, 128]`` with ``T == plan.total_q``, contiguous, 16-byte aligned.
    k : torch.Tensor
        float8_e4m3fn ``[pages, P / tp, 128]``, at least one page: this rank's key rows, as for
        ``msa_icp_decode_index_score_sharded``. The number of rows and ``tp`` determine the page size ``P``, 128 or 256.
    block_table : torch.Tensor
        int32 ``[B, at least the plan's pages]``, unit last stride. Only entries of pages with visible keys are read.
    plan : MSAIcpScorePlan
        The window. Its tensors are read on the device.
    rank : int
        This rank, below ``tp``.
    max_score : torch.Tensor
        float32 ``[T, 4, K]``, ``K >= plan.columns`` (half of that, rounded up, with ``compact``). Unit last stride,
        rows that do not overlap.
    sm_scale : float
        A finite number. It is not applied: scores are unscaled.
    initialize : bool
        Write ``-inf`` everywhere first. Without it, columns past a token's causal prefix and rows that belong to no
        segment are not written.
    tp : int
        World size, 2 or 4.
    compact : bool
        Use one column per page instead of per block. Only for 256-token pages.
    enable_pdl : bool
        Launch as a programmatic dependent of the preceding kernel. Nothing is read before that kernel has completed.
    accumulation : str
        ``"tensor"`` sums products in the accumulators of the tensor cores. On sm_89, sm_90a, sm_120a and sm_121a, which
        multiply e4m3 directly, these hold fewer bits than FP32. ``"exact"`` converts elements to FP16, so products are
        exact and sums are rounded to FP32. It takes about twice as long on sm_90a. Use it where selections are compared
        bit by bit. Other architectures and the torch backend are exact with either value.
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
            *(q, k, block_table, plan, rank, tp, max_score, sm_scale, initialize, compact, enable_pdl, exact),
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
    """Select the 16 best local blocks of every (token, head) into carrier rows, which the ranks then exchange.

    Candidates, their order and the words of a row are those of ``msa_icp_topk_select_publish``. Word 32 is 1.

    Parameters
    ----------
    scores, num_valid_pages : torch.Tensor
        As for ``msa_icp_topk_select_publish``.
    carrier : torch.Tensor
        int32 ``[4, T, 33]``, head-major, unit last stride, rows and heads that do not overlap. It may be a token slice
        of a larger buffer.
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
            *(scores, num_valid_pages, carrier, force_begin_blocks, force_end_blocks, index_scale),
            *(index_offset,),
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

    The carrier rows equal those of ``msa_icp_index_score_sharded`` with ``initialize``, followed by
    ``msa_icp_topk_select_prefill``. Candidates are the columns of the plan's blocks with a global id below
    ``min(num_valid_pages[t], 8192)``. A column without a key that the token sees scores ``-inf``. The scorer writes a
    list of the 16 best of each row for every part of an item that it scores. A second kernel merges the lists. Nothing
    is written for a plan without a segment.

    Parameters
    ----------
    q, k, block_table : torch.Tensor
        As for ``msa_icp_index_score_sharded``.
    plan : MSAIcpScorePlan
        The window.
    num_valid_pages, carrier : torch.Tensor
        As for ``msa_icp_topk_select_prefill``.
    pool : torch.Tensor
        uint8 of at least ``msa_icp_prefill_pool_bytes`` for the plan's ``total_q`` and ``batch``. Contiguous, 16-byte
        aligned, a multiple of 8 bytes. It is never zeroed. If there are more segments than ``total_q``, the excess ones
        are empty and need no storage.
    rank, tp : int
        This rank and the number of ranks, 2 or 4.
    compact : bool
        True for 256-token pages, False for 128-token pages.
    force_begin_blocks, force_end_blocks : int
        As for ``msa_icp_topk_select_prefill``.
    enable_pdl : bool
        Launch both kernels as programmatic dependents. Nothing is read before the preceding kernel has completed.
    accumulation : str
        ``"tensor"`` or ``"exact"``, as for ``msa_icp_index_score_sharded``.
    backend : str
        ``"cake"`` or ``"torch"``.

    Raises
    ------
    ValueError
        If an argument is not as described, or no kernels are installed for the GPU. Nothing has been launched then.
    RuntimeError
        If an earlier wait has run out, a launch fails, or the kernels are not resident while a graph is captured.
    """
    implementation = find_backend(backend)
    exact = is_exact(accumulation)
    require_score_plan("plan", plan)
    implementation.prefill_score_select(
        PrefillScoreSelect(
            *(q, k, block_table, plan, rank, tp, num_valid_pages, pool, carrier, compact, force_begin_blocks),
            *(force_end_blocks, enable_pdl, exact),
        )
    )
