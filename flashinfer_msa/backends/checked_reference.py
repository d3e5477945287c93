# SPDX-License-Identifier: Apache-2.0
"""``backend="torch"``: arguments checked like those of every backend, then the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..layout import find_layout
from ..sizing import require_device
from . import arguments, reference

if TYPE_CHECKING:
    from ..indexer import MSAIcpIndexerPlan


def _require_torch(**tensors: Any) -> None:
    """Refuse what the launcher takes for a tensor and torch code cannot use."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} must be a torch tensor, was of {type(value)}")
        if value is not None and value.is_neg():
            raise ValueError(f"{name} must be resolved, was a tensor with a pending negation")


class TorchBackend:
    """The reference on any device."""

    name = "torch"

    def resolve_device(self, device: Any) -> tuple[torch.device, str]:
        """The device with its index filled in; its type stands for the architecture."""
        wanted = require_device(device)
        if wanted.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be the CPU or a CUDA device, was {wanted}")
        try:
            resolved = torch.empty(0, device=wanted).device
        except (AssertionError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
            raise ValueError(f"device must be usable, was {wanted}: {error}") from error
        return resolved, resolved.type

    def warmup(self, device: torch.device) -> None:
        """Nothing needs to be resident."""

    @torch.inference_mode()
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
        """Score in torch."""
        arguments.decode_index_score(
            False,
            index_q,
            index_k,
            block_table,
            seq_lens,
            score_out,
            rank,
            world_size,
            page_size,
            decode_query_len,
            max_decode_query_len,
            enable_pdl,
        )
        _require_torch(
            index_q=index_q, index_k=index_k, block_table=block_table, seq_lens=seq_lens, score_out=score_out
        )
        reference.decode_index_score(
            index_q,
            index_k,
            block_table,
            seq_lens,
            score_out,
            layout=find_layout(page_size, world_size),
            rank=rank,
            decode_query_len=decode_query_len,
        )

    @torch.inference_mode()
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
        """Select in torch, and publish through the addresses."""
        arguments.topk_select_publish(
            False,
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
        _require_torch(
            scores=scores,
            num_valid_pages=num_valid_pages,
            recv_bases=recv_bases,
            errors=errors,
            generations=generations,
        )
        if scores.shape[0] == 0:
            return
        reference.topk_select_publish(
            scores,
            num_valid_pages,
            recv_bases,
            errors,
            slot=slot,
            rank=rank,
            world_size=world_size,
            heads_per_rank=heads_per_rank,
            capacity=capacity,
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            generations=generations,
            index_scale=index_scale,
            index_offset=index_offset,
        )

    @torch.inference_mode()
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
        """Merge in torch."""
        arguments.merge_candidates(
            False,
            recv_slot,
            num_valid_pages,
            output,
            errors,
            init_blocks,
            local_blocks,
            spin_limit,
            enable_pdl,
            expected_generations,
            prefill,
        )
        _require_torch(
            recv_slot=recv_slot,
            num_valid_pages=num_valid_pages,
            output=output,
            errors=errors,
            expected_generations=expected_generations,
        )
        if num_valid_pages.numel() == 0:
            return
        reference.merge_candidates(
            recv_slot,
            num_valid_pages,
            output,
            errors,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            expected_generations=expected_generations,
            prefill=prefill,
        )

    @torch.inference_mode()
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
        """The chain in torch."""
        arguments.decode(False, plan, comm, slot, tagged, enable_pdl, publish, merge)
        recv = (comm.tagged_recv if tagged else comm.recv)[slot]
        expected = comm.expected_generations[slot] if tagged else None
        if publish is not None:
            index_q, index_k, block_table, seq_lens, num_valid_pages, scores, decode_query_len = publish
            _require_torch(
                index_q=index_q,
                index_k=index_k,
                block_table=block_table,
                seq_lens=seq_lens,
                num_valid_pages=num_valid_pages,
                scores=scores,
            )
        if merge is not None:
            _require_torch(num_valid_pages=merge[0], output=merge[1])
        tokens = (merge[0] if publish is None and merge is not None else num_valid_pages).numel()
        if tokens == 0:
            return
        if publish is not None:
            if merge is not None:
                # A chain whose merge cannot end must not have published.
                reference.require_rows(
                    recv[:, :, :tokens],
                    None if expected is None else expected[:, :tokens],
                    comm.errors,
                    rank=plan.rank,
                    slot=slot,
                    but_of=plan.rank,
                )
            reference.decode_index_score(
                index_q,
                index_k,
                block_table,
                seq_lens,
                scores[:tokens],
                layout=plan.layout,
                rank=plan.rank,
                decode_query_len=decode_query_len,
            )
            reference.topk_select_publish(
                scores[:tokens],
                num_valid_pages,
                comm.tagged_recv_bases if tagged else comm.recv_bases,
                comm.errors,
                slot=slot,
                rank=plan.rank,
                world_size=plan.world_size,
                heads_per_rank=plan.heads_per_rank,
                capacity=plan.max_decode_tokens,
                force_begin_blocks=plan.init_blocks,
                force_end_blocks=plan.local_blocks,
                generations=comm.publish_generations if tagged else None,
                index_scale=plan.index_scale,
                index_offset=plan.index_offset,
            )
        if merge is not None:
            valid, output = merge
            reference.merge_candidates(
                recv,
                valid,
                output,
                comm.errors,
                init_blocks=plan.init_blocks,
                local_blocks=plan.local_blocks,
                expected_generations=expected,
                prefill=False,
                rank=plan.rank,
                slot=slot,
            )
