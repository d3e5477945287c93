# SPDX-License-Identifier: Apache-2.0
"""Divides a prefill window's work into ranges, in torch. This is the specification of the planner's kernel."""

from __future__ import annotations

import torch

from ..layout import BLOCK_TOKENS, ITEM_TOKENS, ITEM_UNITS, UNIT_BLOCKS


def plan_work(
    qo_segment_lens: torch.Tensor,
    kv_segment_lens: torch.Tensor,
    qo_offset: torch.Tensor,
    packed_work_range: torch.Tensor,
    packed_work_info: torch.Tensor,
    *,
    columns: int,
    max_items: int,
) -> None:
    """Divide a window's work evenly into ``len(packed_work_range)`` ranges.

    Lengths and positions are int32 ``[B]``. A segment is divided into items of 64 query tokens. The blocks of an item
    are those that its last token sees, at most ``columns``. An item with blocks has 2 units for its start and one unit
    for every 4 blocks. The units of all items, in order, are divided into ranges whose lengths differ by at most one.

    An item is packed as ``segment | tile << 16 | blocks << 32 | 1 << 48``. A range is packed as its start and its
    length, ``item | unit << 16 | units << 32``; an empty range is 0. At most ``max_items`` items are planned. If there
    are fewer, the remaining entries are 0.
    """
    lens = qo_segment_lens.long().clamp(min=0)
    items = ((lens + ITEM_TOKENS - 1) // ITEM_TOKENS).clamp(max=max_items)
    segment = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), items)[:max_items]
    tile = torch.arange(len(segment), device=lens.device) - (items.cumsum(0) - items)[segment]
    tokens = torch.minimum(lens[segment], (tile + 1) * ITEM_TOKENS)
    seen = torch.minimum(qo_offset.long()[segment] + tokens, kv_segment_lens.long()[segment])
    blocks = ((seen.clamp(min=0) + BLOCK_TOKENS - 1) // BLOCK_TOKENS).clamp(max=columns)
    packed_work_info[: len(segment)] = segment | tile << 16 | blocks << 32 | 1 << 48
    packed_work_info[len(segment) : max_items] = 0

    units_of = torch.where(blocks > 0, ITEM_UNITS + (blocks + UNIT_BLOCKS - 1) // UNIT_BLOCKS, 0)
    end_unit = units_of.cumsum(0)
    total, count = int(end_unit[-1]) if len(end_unit) else 0, len(packed_work_range)
    cuts = total * torch.arange(count + 1, device=lens.device) // count
    begin, units = cuts[:-1], cuts.diff()
    first = torch.searchsorted(end_unit, begin, right=True)
    before = torch.cat([end_unit.new_zeros(1), end_unit])[first]
    packed_work_range.copy_(torch.where(units > 0, first | begin - before << 16 | units << 32, 0))
