# SPDX-License-Identifier: Apache-2.0
"""``backend="torch"``: calls checked like those of every backend, then the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..layout import find_layout
from ..runtime import native
from ..sizing import require_device
from . import reference
from .calls import Chain, DecodeScore, Merge, SelectPublish


def _require_torch(call: NamedTuple) -> None:
    """Refuse what the launcher takes for a tensor, through DLPack, and torch code cannot use."""
    for name, value in call._asdict().items():
        if value is None or isinstance(value, int):
            continue
        if not isinstance(value, torch.Tensor) and hasattr(value, "__dlpack__"):
            raise ValueError(f"{name} must be a torch tensor, was of {type(value)}")
        if isinstance(value, torch.Tensor) and value.is_neg():
            raise ValueError(f"{name} must be resolved, was a tensor with a pending negation")


def _fields(call: NamedTuple, *without: str) -> dict[str, Any]:
    """The call's arguments by name, but for those that only a launch needs."""
    return {name: value for name, value in call._asdict().items() if name not in without}


class TorchBackend:
    """The reference, on the CPU or a CUDA device."""

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
    def decode_score(self, call: DecodeScore) -> None:
        """Score in torch."""
        native.call("decode_score", False, *call)
        _require_torch(call)
        reference.decode_index_score(
            **_fields(call, "world_size", "page_size", "max_decode_query_len", "enable_pdl"),
            layout=find_layout(call.page_size, call.world_size),
        )

    @torch.inference_mode()
    def select_publish(self, call: SelectPublish) -> None:
        """Select in torch, and publish through the addresses."""
        native.call("select_publish", False, *call)
        _require_torch(call)
        if call.scores.shape[0] > 0:
            reference.topk_select_publish(**_fields(call, "spin_limit", "enable_pdl"))

    @torch.inference_mode()
    def merge(self, call: Merge) -> None:
        """Merge in torch."""
        native.call("merge", False, *call)
        _require_torch(call)
        if call.num_valid_pages.numel() > 0:
            reference.merge_candidates(**_fields(call, "spin_limit", "enable_pdl", "tagged"))

    @torch.inference_mode()
    def decode(self, call: Chain) -> None:
        """The chain in torch. One whose merge could not end publishes nothing."""
        native.call("decode", False, *call.arguments())
        plan, comm, slot, tagged, _, publish, merge = call
        for half in (publish, merge):
            if half is not None:
                _require_torch(half)
        tokens = max(half.num_valid_pages.numel() for half in (publish, merge) if half is not None)
        if tokens == 0:
            return
        recv = (comm.tagged_recv if tagged else comm.recv)[slot]
        expected = comm.expected_generations[slot] if tagged else None
        here = {"rank": plan.rank, "slot": slot}
        if publish is not None:
            if merge is not None:
                rows, counters = recv[:, :, :tokens], None if expected is None else expected[:, :tokens]
                reference.require_rows(rows, counters, comm.errors, but_of=plan.rank, **here)
            scores = publish.scores[:tokens]
            reference.decode_index_score(
                **_fields(publish, "num_valid_pages", "scores"), score_out=scores, layout=plan.layout, rank=plan.rank
            )
            reference.topk_select_publish(
                scores,
                publish.num_valid_pages,
                comm.tagged_recv_bases if tagged else comm.recv_bases,
                comm.errors,
                world_size=plan.world_size,
                heads_per_rank=plan.heads_per_rank,
                capacity=plan.max_decode_tokens,
                force_begin_blocks=plan.init_blocks,
                force_end_blocks=plan.local_blocks,
                generations=comm.publish_generations if tagged else None,
                index_scale=plan.index_scale,
                index_offset=plan.index_offset,
                **here,
            )
        if merge is not None:
            reference.merge_candidates(
                recv,
                *merge,
                comm.errors,
                init_blocks=plan.init_blocks,
                local_blocks=plan.local_blocks,
                expected_generations=expected,
                prefill=False,
                **here,
            )
