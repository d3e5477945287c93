# SPDX-License-Identifier: Apache-2.0
"""The plan of a prefill window: its segments, and its work cut into one range a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..sizing import require_int


@dataclass(frozen=True)
class MSAIcpScorePlan:
    """A prefill window as the scorer takes it. The same plan serves every layer of a step.

    Attributes
    ----------
    qo_segment_lens, kv_segment_lens : torch.Tensor
        int32 ``[B]``: query tokens of each segment in the window, and its keys.
    qo_segment_offsets, kv_segment_offsets : torch.Tensor
        int32 ``[B + 1]``: where segments start among the query tokens and among the keys.
    qo_offset : torch.Tensor
        int32 ``[B]``: position of each segment's first query token.
    packed_work_range, packed_work_info : torch.Tensor
        int64: for each multiprocessor, the range of work it takes; for each item of 64 query tokens, which it is and
        how many blocks it sees, 0 for those that the limits allow and the segments do not have.
        ``templates/params.h`` says how they are packed.
    workspace : torch.Tensor
        uint8: scratch of the planner.
    total_q, num_qo_heads, batch, max_query_len, columns : int
        Query tokens (an upper bound), index heads, segments, tokens of the longest segment (an upper bound), and
        128-token blocks of the longest key length (likewise).
    uniform : bool
        False: segments may differ in length.
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
        """The segments' tensors and the work's, in the order of the fields."""
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
        """The plan's limits, in the order of the fields."""
        return (self.total_q, self.num_qo_heads, self.batch, self.max_query_len, self.columns)


def require_score_plan(name: str, value: Any) -> None:
    """Refuse what is no plan, or one whose ``batch`` is not its number of segments."""
    if not isinstance(value, MSAIcpScorePlan):
        raise ValueError(f"{name} must be an MSAIcpScorePlan, was {type(value)}")
    lens = value.qo_segment_lens
    if isinstance(lens, torch.Tensor) and lens.dim() == 1:
        require_int(f"{name}.batch", value.batch, len(lens), len(lens))
