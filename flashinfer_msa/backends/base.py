# SPDX-License-Identifier: Apache-2.0
"""What a backend does. Arguments are those of ``flashinfer_msa.msa_ops``, which documents them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ..indexer import MSAIcpIndexerPlan


class Backend(Protocol):
    """One implementation of every operation."""

    name: str

    def resolve_device(self, device: Any) -> tuple[torch.device, str]:
        """The device with its index filled in and the architecture that serves it; ``ValueError`` if it cannot."""

    def warmup(self, device: torch.device) -> None:
        """Make everything that a call on ``device`` needs resident there."""

    def decode_index_score(
        self,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        score_out: torch.Tensor,
        rank: int,
        world_size: int,
        page_size: int,
        decode_query_len: int,
        max_decode_query_len: int,
        enable_pdl: bool,
    ) -> None:
        """Score local keys per page column."""

    def topk_select_publish(
        self,
        scores: torch.Tensor,
        num_valid_pages: torch.Tensor,
        recv_bases: torch.Tensor,
        errors: torch.Tensor,
        slot: int,
        rank: int,
        world_size: int,
        heads_per_rank: int,
        capacity: int,
        force_begin_blocks: int,
        force_end_blocks: int,
        spin_limit: int,
        enable_pdl: bool,
        generations: torch.Tensor | None,
        index_scale: int,
        index_offset: int,
    ) -> None:
        """Select each row's Top16 and publish it into its owner's receive row."""

    def merge_candidates(
        self,
        recv_slot: torch.Tensor,
        num_valid_pages: torch.Tensor,
        output: torch.Tensor,
        errors: torch.Tensor,
        init_blocks: int,
        local_blocks: int,
        spin_limit: int,
        enable_pdl: bool,
        expected_generations: torch.Tensor | None,
        prefill: bool,
    ) -> None:
        """Merge the rows of every rank into the global Top16."""

    def decode(
        self,
        plan: MSAIcpIndexerPlan,
        comm: Any,
        slot: int,
        tagged: bool,
        enable_pdl: bool,
        publish: tuple[Any, ...] | None,
        merge: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """The facade's chain. ``publish`` is ``(index_q, index_k, block_table, seq_lens, num_valid_pages, scores,
        decode_query_len)``, ``merge`` is ``(num_valid_pages, output)``; None leaves that half out."""
