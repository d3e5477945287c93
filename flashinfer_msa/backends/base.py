# SPDX-License-Identifier: Apache-2.0
"""What a backend does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .calls import (
    DecodeChain,
    DecodeScore,
    Merge,
    PrefillLocal,
    PrefillMerge,
    PrefillPlan,
    PrefillScore,
    PrefillScoreSelect,
    ScorePublish,
    SelectPrefill,
    SelectPublish,
)

if TYPE_CHECKING:
    from ..indexer import MSAIcpIndexerPlan


class Chain(Protocol):
    """A chain of launches with everything bound but its query and keys."""

    def record(self, index_q: torch.Tensor, index_k: torch.Tensor) -> None:
        """Check everything and keep it for :meth:`run`; launch nothing."""

    def runner(self, first: int, end: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        """What launches number ``first`` to ``end`` with a query and keys, which are like the recorded ones.

        :func:`flashinfer_msa.runtime.native.invoke` calls it and puts its errors in words.
        """

    def run_bound(self, first: int, end: int) -> None:
        """Launch number ``first`` to ``end``, which read neither query nor keys."""

    def first_difference(self, index_q: torch.Tensor, index_k: torch.Tensor) -> int:
        """The first launch that is not what the full path makes of the arguments as they are now, or -1."""


class Backend(Protocol):
    """One implementation of every operation. Each checks its call before it does anything."""

    name: str

    def resolve_device(self, device: Any) -> tuple[torch.device, str]:
        """The device with its index filled in and the architecture that serves it; ``ValueError`` if it cannot."""

    def warmup(self, device: torch.device) -> None:
        """Make everything that a call on ``device`` needs resident there."""

    def check_receive_storage(self, fields: Sequence[torch.Tensor]) -> None:
        """Refuse receive storage that is no memory to launch with."""

    def decode_score(self, call: DecodeScore) -> None:
        """Score local keys per page column."""

    def select_publish(self, call: SelectPublish) -> None:
        """Select each row's Top16 and publish it into its owner's receive row."""

    def merge(self, call: Merge) -> None:
        """Merge the rows of every rank into the global Top16."""

    def score_publish(self, call: ScorePublish) -> None:
        """Score, select and publish without score rows."""

    def decode(self, plan: MSAIcpIndexerPlan, comm: Any, arguments: tuple[Any, ...]) -> None:
        """Run the facade's chain, or the half of it that is called for.

        ``arguments`` are the launcher's: what it takes from plan and comm, ``publishes``, ``merges``, ``slot``,
        ``tagged``, ``enable_pdl``, ``num_valid_pages``; to publish, what ``PublishHalf`` names; to merge, ``output``.
        """

    def prefill_plan(self, call: PrefillPlan) -> None:
        """Cut a prefill window's work into ranges."""

    def prefill_score(self, call: PrefillScore) -> None:
        """Score local keys of a prefill window per page column or block."""

    def select_prefill(self, call: SelectPrefill) -> None:
        """Select each row's Top16 into carrier rows."""

    def prefill_score_select(self, call: PrefillScoreSelect) -> None:
        """Score and select a prefill window into carrier rows without score rows."""

    def prefill_local(self, call: PrefillLocal) -> None:
        """Run the facade's scorer and selection."""

    def prefill_merge(self, call: PrefillMerge) -> None:
        """Run the facade's merge of an exchanged carrier."""

    def decode_chain(self, plan: MSAIcpIndexerPlan, comm: Any, call: DecodeChain) -> Chain:
        """The facade's decode chain, kept."""

    def prefill_local_chain(self, call: PrefillLocal, tokens: int, first_token: int) -> Chain:
        """The facade's scorer and selection of a window, kept: ``first_token`` and on of a query of ``tokens``."""

    def prefill_merge_chain(self, call: PrefillMerge) -> Chain:
        """The facade's merge of an exchanged carrier, kept."""
