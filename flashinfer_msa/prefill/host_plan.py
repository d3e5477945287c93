# SPDX-License-Identifier: Apache-2.0
"""The eager plan of a prefill window. It is made from lengths on the host and allocates its own storage."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import BLOCK_TOKENS, ITEM_TOKENS, MAX_ITEM_BLOCKS, MAX_ITEMS, MAX_SEGMENTS, NUM_HEADS
from ..sizing import ceil_div, msa_icp_index_score_plan_storage
from .planner import plan_work
from .window import MSAIcpScorePlan

_INT32_MAX = 2**31 - 1


def make_host_plan(
    qo_segment_lens: torch.Tensor, kv_segment_lens: torch.Tensor, qo_offset: torch.Tensor, device: torch.device
) -> MSAIcpScorePlan:
    """Plan on the host and copy the plan to ``device``; see ``msa_ops.msa_icp_index_score_sharded_plan``."""
    _require_lengths("qo_segment_lens", qo_segment_lens, None)
    _require_lengths("kv_segment_lens", kv_segment_lens, len(qo_segment_lens))
    _require_lengths("qo_offset", qo_offset, len(qo_segment_lens))
    batch, total_q = len(qo_segment_lens), max(int(qo_segment_lens.long().sum()), 1)
    max_seq_len = max(kv_segment_lens.tolist(), default=0)
    columns = max(ceil_div(max_seq_len, BLOCK_TOKENS), 1)
    items = int(((qo_segment_lens.long() + ITEM_TOKENS - 1) // ITEM_TOKENS).sum())
    _require_at_most(f"qo_segment_lens must have at most {MAX_SEGMENTS} segments", batch, MAX_SEGMENTS)
    _require_at_most(f"qo_segment_lens must make at most {MAX_ITEMS} items of {ITEM_TOKENS} tokens", items, MAX_ITEMS)
    _require_at_most(f"kv_segment_lens must be at most {MAX_ITEM_BLOCKS} blocks", columns, MAX_ITEM_BLOCKS)

    storage = msa_icp_index_score_plan_storage(
        num_qo_heads=NUM_HEADS, total_q=total_q, batch=max(batch, 1), device=device
    )
    work_range = torch.zeros(storage["work_range_numel"], dtype=torch.int64, device="cpu")
    work_info = torch.zeros(storage["work_info_numel"], dtype=torch.int64, device="cpu")
    plan_work(
        qo_segment_lens,
        kv_segment_lens,
        qo_offset,
        work_range,
        work_info,
        columns=columns,
        max_items=items,
    )
    total_columns = int((work_info >> 32 & 0xFFFF).sum())
    _require_at_most(
        f"kv_segment_lens must make at most {_INT32_MAX} block columns of all items", total_columns, _INT32_MAX
    )
    return MSAIcpScorePlan(
        qo_segment_lens=qo_segment_lens.to(device),
        kv_segment_lens=kv_segment_lens.to(device),
        qo_segment_offsets=_offsets(qo_segment_lens).to(device),
        kv_segment_offsets=_offsets(kv_segment_lens).to(device),
        qo_offset=qo_offset.to(device),
        packed_work_range=work_range.to(device),
        packed_work_info=work_info.to(device),
        workspace=torch.empty(storage["workspace_bytes"], dtype=torch.uint8, device=device),
        total_q=total_q,
        num_qo_heads=NUM_HEADS,
        batch=batch,
        max_query_len=max([1, *qo_segment_lens.tolist()]),
        columns=columns,
    )


def _require_lengths(name: str, value: Any, count: int | None) -> None:
    """Refuse anything but a dense int32 CPU tensor without negative numbers; sums of lengths must be int32."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, was {type(value)}")
    if value.layout is not torch.strided or value.device.type != "cpu":
        raise ValueError(f"{name} must be a dense CPU tensor, was of layout {value.layout} on {value.device}")
    if value.dtype is not torch.int32:
        raise ValueError(f"{name} must be torch.int32, was {value.dtype}")
    if value.dim() != 1 or (count is not None and len(value) != count):
        wanted = "[batch]" if count is None else f"[batch] = [{count}]"
        raise ValueError(f"{name} must have shape {wanted}, was {list(value.shape)}")
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, had strides {value.stride()}")
    try:
        value.tolist()
    except Exception as error:  # torch raises many kinds for fake tensors and freed memory
        raise ValueError(f"{name} must be a tensor with memory, had none: {error}") from error
    if len(value) and int(value.min()) < 0:
        raise ValueError(f"{name} must not be negative, was {int(value.min())} at {int(value.argmin())}")
    total = int(value.long().sum())
    if name != "qo_offset" and total > _INT32_MAX:
        raise ValueError(f"{name} must have a sum of at most {_INT32_MAX}, was {total}")


def _require_at_most(requirement: str, value: int, limit: int) -> None:
    if value > limit:
        raise ValueError(f"{requirement}, was {value}")


def _offsets(lens: torch.Tensor) -> torch.Tensor:
    """The start of each segment and the end of the last one."""
    return torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)])
