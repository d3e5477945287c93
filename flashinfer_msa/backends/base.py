# SPDX-License-Identifier: Apache-2.0
"""What a backend does."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .calls import Chain, DecodeScore, Merge, SelectPublish


class Backend(Protocol):
    """One implementation of every operation. Each checks its call before it does anything."""

    name: str

    def resolve_device(self, device: Any) -> tuple[torch.device, str]:
        """The device with its index filled in and the architecture that serves it; ``ValueError`` if it cannot."""

    def warmup(self, device: torch.device) -> None:
        """Make everything that a call on ``device`` needs resident there."""

    def decode_score(self, call: DecodeScore) -> None:
        """Score local keys per page column."""

    def select_publish(self, call: SelectPublish) -> None:
        """Select each row's Top16 and publish it into its owner's receive row."""

    def merge(self, call: Merge) -> None:
        """Merge the rows of every rank into the global Top16."""

    def decode(self, call: Chain) -> None:
        """Run the facade's chain, or the half of it that is called for."""
