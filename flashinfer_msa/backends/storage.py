# SPDX-License-Identifier: Apache-2.0
"""What an indexer asks of its receive storage, and what it remembers of storage that it has checked."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import torch


class ReceiveStorage(NamedTuple):
    """The fields that any receive storage has; see :class:`flashinfer_msa.comm.MSAIcpComm`."""

    recv: torch.Tensor
    tagged_recv: torch.Tensor
    recv_bases: torch.Tensor
    tagged_recv_bases: torch.Tensor
    publish_generations: torch.Tensor
    expected_generations: torch.Tensor
    errors: torch.Tensor


def require_receive_storage(comm: Any, layout: dict[str, Any], world_size: int, device: torch.device) -> ReceiveStorage:
    """Return the fields of ``comm``; ``ValueError`` unless they are those of ``layout``, a ``msa_icp_comm_layout``."""
    # Of each field the dtype, and a shape unless it is any 1-D one.
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...] | None]] = {
        "recv": (torch.int32, layout["legacy_shape"]),
        "tagged_recv": (torch.int64, layout["tagged_shape"]),
        "recv_bases": (torch.int64, (world_size,)),
        "tagged_recv_bases": (torch.int64, (world_size,)),
        "publish_generations": (torch.int32, layout["generations_shape"]),
        "expected_generations": (torch.int32, layout["expected_shape"]),
        "errors": (torch.int32, None),
    }
    for name, (dtype, shape) in wanted.items():
        field = getattr(comm, name, None)
        if not isinstance(field, torch.Tensor):
            raise ValueError(f"comm.{name} must be a tensor, was {field!r}")
        if field.layout is not torch.strided:
            raise ValueError(f"comm.{name} must be a dense tensor, was of layout {field.layout}")
        if field.dtype is not dtype:
            raise ValueError(f"comm.{name} must be {dtype}, was {field.dtype}")
        if shape is not None and tuple(field.shape) != tuple(shape):
            raise ValueError(f"comm.{name} must have shape {tuple(shape)}, was {tuple(field.shape)}")
        if shape is None and (field.dim() != 1 or field.numel() < 1):
            raise ValueError(f"comm.{name} must have one dimension and an element, had shape {tuple(field.shape)}")
        if field.device != device:
            raise ValueError(f"comm.{name} must be on {device}, was on {field.device}")
        if not field.is_contiguous():
            raise ValueError(f"comm.{name} must be contiguous, had strides {field.stride()}")
    storage = ReceiveStorage(*(getattr(comm, name) for name in ReceiveStorage._fields))
    distance = layout["tagged_offset_bytes"]
    offset = storage.tagged_recv.data_ptr() - storage.recv.data_ptr()
    one_storage = storage.tagged_recv.untyped_storage().data_ptr() == storage.recv.untyped_storage().data_ptr()
    if not one_storage or offset != distance:
        raise ValueError(
            f"comm.tagged_recv must follow comm.recv in one storage, at {distance} bytes, was "
            f"{'at ' + str(offset) + ' bytes' if one_storage else 'in another storage'}"
        )
    return storage


class CheckedStorage(NamedTuple):
    """Receive storage that has been checked, and what the decode chain's launches take from it and the indexer.

    Attributes
    ----------
    fields : ReceiveStorage
        The fields as they were then.
    words : torch.Tensor
        int64, in host memory: what the launcher takes.
    last : list
        A cell: the slot set of the last layer with tagged rows, None if that is not known, and whether a graph was
        captured then.
    on_gpu : bool
        Whether a graph can be captured.
    num_sparse_layers : int
        The indexer's.
    """

    fields: ReceiveStorage
    words: torch.Tensor
    last: list[tuple[int | None, bool]]
    on_gpu: bool
    num_sparse_layers: int

    def require_form(self, slot: int | None, tagged: bool) -> None:
        """Refuse tagged rows where the slot set to publish into, if any, is that of the layer before."""
        if tagged is False:
            return
        if tagged is True and self.num_sparse_layers >= 2:
            if isinstance(slot, (int, numbers.Integral)) and self.follows_itself(slot):
                raise ValueError(
                    f"slot must be another one than that of the layer before with tagged rows, was {slot} twice: let "
                    "it be a counter over all layers of all steps, modulo 3"
                )
            return
        if tagged is not True:
            raise ValueError(f"tagged must be True or False, was {tagged!r}")
        raise ValueError(
            f"tagged must be False with fewer than 2 sparse layers, was True with {self.num_sparse_layers}: two uses "
            "of a slot set must be at least two layers apart"
        )

    def follows_itself(self, slot: int) -> bool:
        """Whether the slot set is that of the layer before. What replays of a captured layer have used is not known."""
        last, captured = self.last[0]
        return slot == last and (not captured or self._is_capturing())

    def note(self, slot: int | None, tagged: bool = True) -> None:
        """Remember the slot set of a layer that has been launched, or with None that it is not known."""
        if tagged:
            self.last[0] = (slot, self._is_capturing())

    def _is_capturing(self) -> bool:
        return self.on_gpu and torch.cuda.is_current_stream_capturing()


NO_STORAGE = CheckedStorage(
    ReceiveStorage(*(object() for _ in ReceiveStorage._fields)),  # type: ignore[arg-type]
    torch.zeros(0, dtype=torch.int64, device="cpu"),
    [(None, False)],
    on_gpu=False,
    num_sparse_layers=0,
)
"""Stands for storage where none has been checked: no comm has its fields."""
