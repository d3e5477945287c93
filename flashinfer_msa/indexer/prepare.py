# SPDX-License-Identifier: Apache-2.0
"""The function that prepares an indexer."""

from __future__ import annotations

from typing import Any

from .indexer import MSAIcpIndexerPlan


def prepare_msa_icp_indexer(
    *,
    world_size: int,
    rank: int,
    num_index_heads: int,
    page_size: int,
    init_blocks: int,
    local_blocks: int,
    max_decode_tokens: int,
    max_decode_query_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    num_sparse_layers: int,
    device: Any,
    spin_limit: int = 1 << 26,
    wait_seconds: float | None = None,
    accumulation: str = "tensor",
    backend: str = "cake",
) -> MSAIcpIndexerPlan:
    """Prepare one rank's indexer from the serving limits.

    Parameters
    ----------
    world_size, rank : int
        Size of the tensor-parallel group, 2 or 4, and this process's rank in it.
    num_index_heads : int
        Index heads of the model, 4.
    page_size : int
        Tokens of a K-cache page, 128 or 256.
    init_blocks, local_blocks : int
        Blocks at the start and at the end of a token's context that are always selected, at most 16 together.
    max_decode_tokens : int
        Maximum decode query tokens per step. This is the capacity of a receive slot set.
    max_decode_query_len : int
        Maximum query tokens per decode request, 1 to 8.
    max_num_batched_tokens, max_num_seqs, max_model_len : int
        The server's limits: prefill tokens per step, segments per step, tokens per sequence.
    num_sparse_layers : int
        Layers that run the indexer.
    device : torch.device
        Device of the rank.
    spin_limit : int
        Number of polls after which a wait for a peer gives up and ends the CUDA context.
    wait_seconds : float, optional
        Time limit in seconds, 0.001 to 1,000,000, which replaces ``spin_limit``. Choose it longer than a peer may be
        late, for example while it captures graphs. The default ``spin_limit`` took 14 s on an H200.
    accumulation : str
        ``"tensor"`` or ``"exact"``: how :meth:`~MSAIcpIndexerPlan.prefill_local` sums products, as in
        ``msa_ops.msa_icp_index_score_sharded``. Decode is always exact except for the rounding of FP32 sums.
    backend : str
        ``"cake"`` for prebuilt kernels, ``"torch"`` for the reference.

    Returns
    -------
    MSAIcpIndexerPlan

    Raises
    ------
    ValueError
        If a limit is out of range, or no kernels are installed for the device.
    """
    return MSAIcpIndexerPlan(
        world_size=world_size,
        rank=rank,
        num_index_heads=num_index_heads,
        page_size=page_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        max_decode_tokens=max_decode_tokens,
        max_decode_query_len=max_decode_query_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_sparse_layers=num_sparse_layers,
        device=device,
        backend=backend,
        spin_limit=spin_limit,
        wait_seconds=wait_seconds,
        accumulation=accumulation,
    )
