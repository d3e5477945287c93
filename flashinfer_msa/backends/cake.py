# SPDX-License-Identifier: Apache-2.0
"""``backend="cake"``: every operation checked and launched by the native launcher, in one call each."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import loader
from ..sizing import require_device
from . import arguments


class CakeBackend:
    """Prebuilt kernels on CUDA devices."""

    name = "cake"

    def resolve_device(self, device: Any) -> tuple[torch.device, str]:
        """A CUDA device with its index filled in, and the architecture of the cubins that it loads."""
        resolved = require_device(device)
        if resolved.type != "cuda":
            raise ValueError(f'device must be a CUDA device for backend="cake", was {resolved}')
        if not torch.cuda.is_available():
            raise ValueError(
                f'device must be usable, was {resolved}: torch finds no CUDA device; backend="torch" runs anywhere'
            )
        index = torch.cuda.current_device() if resolved.index is None else resolved.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device must be one of {torch.cuda.device_count()} CUDA devices, was {resolved}")
        resolved = torch.device("cuda", index)
        return resolved, loader.architecture_of(resolved)

    def warmup(self, device: torch.device) -> None:
        """Make every kernel resident on ``device``."""
        loader.load_device(device.index)

    def decode_index_score(self, *args: Any) -> None:
        """Launch the decode scorer."""
        arguments.decode_index_score(True, *args)

    def topk_select_publish(self, *args: Any) -> None:
        """Launch the publisher."""
        arguments.topk_select_publish(True, *args)

    def merge_candidates(self, *args: Any) -> None:
        """Launch the merge."""
        arguments.merge_candidates(True, *args)

    def decode(self, *args: Any) -> None:
        """Launch the facade's chain."""
        arguments.decode(True, *args)
