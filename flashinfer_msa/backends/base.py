# SPDX-License-Identifier: Apache-2.0
"""The protocols of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..abi.calls import (
    Decode,
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
from .storage import CheckedStorage, StorageTable


class Chain(Protocol):
    """A chain of launches with all arguments bound except query and keys."""

    def record(self, index_q: torch.Tensor | None, index_k: torch.Tensor | None) -> None:
        """Check all arguments and store the launches. Launch nothing."""

    def runner(self, first: int, end: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        """A function that runs launches ``first`` to ``end``, for a query and keys like those of :meth:`record`.

        Call it with :func:`flashinfer_msa.runtime.native.invoke`, which explains its errors.
        """

    def run_bound(self, first: int, end: int) -> None:
        """Run launches ``first`` to ``end``, which read neither query nor keys."""

    def first_difference(self, index_q: torch.Tensor, index_k: torch.Tensor) -> int:
        """Index of the first launch that differs from the full path's launch with the current arguments, or -1."""


class Operations(Protocol):
    """Every operation that launches. Each operation checks its call first."""

    name: str

    def decode_score(self, call: DecodeScore) -> None:
        """Score local keys per page column."""

    def select_publish(self, call: SelectPublish) -> None:
        """Select each row's Top16 and publish it into its owner's receive row."""

    def merge(self, call: Merge) -> None:
        """Merge the rows of every rank into the global Top16."""

    def score_publish(self, call: ScorePublish) -> None:
        """Score, select and publish without score rows."""

    def decode(self, storages: StorageTable, comm: Any, call: Decode) -> None:
        """Run the indexer's decode chain, or one half of it, on the receive storage ``comm``."""

    def prefill_plan(self, call: PrefillPlan) -> None:
        """Divide a prefill window's work into ranges."""

    def prefill_score(self, call: PrefillScore) -> None:
        """Score local keys of a prefill window per page column or block."""

    def select_prefill(self, call: SelectPrefill) -> None:
        """Select each row's Top16 into carrier rows."""

    def prefill_score_select(self, call: PrefillScoreSelect) -> None:
        """Score and select a prefill window into carrier rows without score rows."""

    def prefill_local(self, call: PrefillLocal) -> None:
        """Run the indexer's prefill scorer and selection."""

    def prefill_merge(self, call: PrefillMerge) -> None:
        """Run the indexer's merge of an exchanged carrier."""


class Backend(Operations, Protocol):
    """One implementation of every operation, and its properties."""

    default_device: str
    """Type of the default device."""

    def can_capture(self, device: torch.device) -> bool:
        """Whether a CUDA graph can hold the launches on a device."""

    def resolve_device(self, device: Any) -> tuple[torch.device, str]:
        """The device with its index filled in, and its architecture. ``ValueError`` if it is not supported."""

    def kernels_identity(self, device: torch.device) -> str:
        """A string that is equal on two ranks if they run the same kernels."""

    def warmup(self, device: torch.device) -> None:
        """Load all kernels that a call on ``device`` needs."""

    def check_receive_storage(self, fields: Sequence[torch.Tensor]) -> None:
        """Refuse receive storage whose memory a launch cannot use."""

    def decode_chain(self, storage: CheckedStorage, call: Decode) -> Chain:
        """The indexer's decode chain, not yet recorded."""

    def prefill_local_chain(self, call: PrefillLocal, tokens: int, first_token: int) -> Chain:
        """A window's scorer and selection, not yet recorded.

        The query of a run has ``tokens`` rows. The window's rows begin at ``first_token``.
        """

    def prefill_merge_chain(self, call: PrefillMerge) -> Chain:
        """The indexer's merge of an exchanged carrier, not yet recorded."""
