# SPDX-License-Identifier: Apache-2.0
"""The plan of a prefill window: its segments, and its work divided into one range per multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..sizing import require_int


@dataclass(frozen=True)
class MSAIcpScorePlan:
    """The plan of a prefill window, an input of the scorer. One plan serves every layer of a step.

    Attributes
    ----------
    qo_segment_lens, kv_segment_lens : torch.Tensor
        int32 ``[B]``: query tokens and keys of each segment in the window.
    qo_segment_offsets, kv_segment_offsets : torch.Tensor
        int32 ``[B + 1]``: start of each segment among the query tokens and among the keys, and the ends of the last.
    qo_offset : torch.Tensor
        int32 ``[B]``: position of each segment's first query token.
    packed_work_range : torch.Tensor
        int64: the range of work of each multiprocessor. ``templates/params.h`` defines the packing.
    packed_work_info : torch.Tensor
        int64: segment, tile and number of visible blocks of each item of 64 query tokens. Entries of items that the
        limits allow but the segments do not have are 0. ``templates/params.h`` defines the packing.
    workspace : torch.Tensor
        uint8: scratch of the planner.
    total_q, num_qo_heads, batch : int
        Query tokens (an upper bound), index heads and segments.
    max_query_len, columns : int
        Query tokens of the longest segment, and 128-token blocks of the longest key length. Both are upper bounds.
    uniform : bool
        Always False: segments may differ in length.
    """

    qo_segment_lens: torch.Tensor
    kv_segment_lens: torch.Tensor
    qo_segment_offsets: torch.Tensor
    kv_segment_offsets: torch.Tensor
    qo_offset: torch.Tensor
    packed_work_range: torch.Tensor
    packed_work_info: torch.Tensor
    workspace: torch.Tensor
    total_q: int
    num_qo_heads: int
    batch: int
    max_query_len: int
    columns: int
    uniform: bool = False

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The plan's tensors, in the order of the fields."""
        return (
            self.qo_segment_lens,
            self.kv_segment_lens,
            self.qo_segment_offsets,
            self.kv_segment_offsets,
            self.qo_offset,
            self.packed_work_range,
            self.packed_work_info,
            self.workspace,
        )

    def numbers(self) -> tuple[int, ...]:
        """The plan's integers, in the order of the fields."""
        return (self.total_q, self.num_qo_heads, self.batch, self.max_query_len, self.columns)


def require_score_plan(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is a plan whose ``batch`` is its number of segments."""
    if not isinstance(value, MSAIcpScorePlan):
        raise ValueError(f"{name} must be an MSAIcpScorePlan, was {type(value)}")
    lens = value.qo_segment_lens
    if isinstance(lens, torch.Tensor) and lens.dim() == 1:
        require_int(f"{name}.batch", value.batch, len(lens), len(lens))
