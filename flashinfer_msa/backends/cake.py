# SPDX-License-Identifier: Apache-2.0
"""``backend="cake"``: every operation checked and launched by the native launcher, in one call each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

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
from ..manifest import load_manifest
from ..runtime import loader, native
from ..sizing import require_device
from .base import Chain
from .chains import RecordedChain
from .storage import CheckedStorage, StorageTable


def _require_resolved(name: str, plane: Any) -> None:
    """Refuse a pending negation, which memory does not show. Public torch calls leave one only on real parts."""
    if isinstance(plane, torch.Tensor) and plane.is_neg():
        raise ValueError(f"{name} must be resolved, was a tensor with a pending negation")


class CakeBackend:
    """Prebuilt kernels on CUDA devices."""

    name = "cake"
    default_device = "cuda"

    def can_capture(self, device: torch.device) -> bool:
        """Launches are all that a call does."""
        return device.type == "cuda"

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

    def kernels_identity(self, device: torch.device) -> str:
        """The architecture, and a digest of the launcher and of the kernels' sources."""
        digests = [load_manifest().data["launcher"]["sha256"], *loader.kernels_of(device).source_digests()]
        return f"{loader.architecture_of(device)} {hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}"

    def warmup(self, device: torch.device) -> None:
        """Make every kernel resident on ``device``."""
        loader.load_device(device.index)

    def check_receive_storage(self, fields: Sequence[torch.Tensor]) -> None:
        """Check that the fields are device memory."""
        native.call("receive_storage", True, *fields)

    def decode_score(self, call: DecodeScore) -> None:
        """Launch the decode scorer."""
        _require_resolved("score_out", call.score_out)
        native.call("decode_score", True, *call)

    def select_publish(self, call: SelectPublish) -> None:
        """Launch the publisher."""
        _require_resolved("scores", call.scores)
        native.call("select_publish", True, *call)

    def merge(self, call: Merge) -> None:
        """Launch the merge."""
        native.call("merge", True, *call)

    def score_publish(self, call: ScorePublish) -> None:
        """Launch the fused scorer and publisher."""
        native.call("score_publish", True, *call)

    def decode(self, storages: StorageTable, comm: Any, call: Decode) -> None:
        """Launch the indexer's chain."""
        storages.run(comm, call, _launch_decode)

    def prefill_plan(self, call: PrefillPlan) -> None:
        """Launch the planner."""
        native.call("prefill_plan", True, *call.arguments())

    def prefill_score(self, call: PrefillScore) -> None:
        """Launch the prefill scorer, after a fill where rows are initialized."""
        _require_resolved("max_score", call.max_score)
        native.call("prefill_score", True, *call.arguments())

    def select_prefill(self, call: SelectPrefill) -> None:
        """Launch the prefill selection."""
        _require_resolved("scores", call.scores)
        native.call("select_prefill", True, *call)

    def prefill_score_select(self, call: PrefillScoreSelect) -> None:
        """Launch the fused prefill scorer and selection."""
        native.call("prefill_score_select", True, *call.arguments())

    def prefill_local(self, call: PrefillLocal) -> None:
        """Launch the indexer's scorer and selection."""
        _require_resolved("score_scratch", call.score_scratch)
        native.call("prefill_local", True, *call.arguments())

    def prefill_merge(self, call: PrefillMerge) -> None:
        """Launch the indexer's merge."""
        native.call("prefill_merge", True, *call)

    def decode_chain(self, storage: CheckedStorage, call: Decode) -> Chain:
        """Record the launches of the indexer's decode chain."""
        _require_resolved("scores", call.scores)

        def arguments(query: Any, keys: Any) -> tuple[Any, ...]:
            return call._replace(index_q=query, index_k=keys).arguments(storage.state)

        return RecordedChain("decode", arguments, call.num_valid_pages, call.num_valid_pages.numel())

    def prefill_local_chain(self, call: PrefillLocal, tokens: int, first_token: int) -> Chain:
        """Record the launches of the indexer's scorer and selection."""
        _require_resolved("score_scratch", call.score_scratch)

        def arguments(query: Any, keys: Any) -> tuple[Any, ...]:
            return call.of_step(query, keys, first_token).arguments()

        return RecordedChain("prefill_local", arguments, call.num_valid_pages, tokens, first_token)

    def prefill_merge_chain(self, call: PrefillMerge) -> Chain:
        """Record the launch of the indexer's merge."""
        return RecordedChain("prefill_merge", lambda query, keys: call, call.num_valid_pages)


def _launch_decode(storage: CheckedStorage, call: Decode) -> None:
    _require_resolved("scores", call.scores)
    native.call("decode", True, *call.arguments(storage.state))
