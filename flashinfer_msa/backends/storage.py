# SPDX-License-Identifier: Apache-2.0
"""Receive storage of the decode chain: its fields are checked once, and its last slot set is recorded."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..abi.calls import ChainState, Decode, ReceiveStorage
from ..limits import Limits
from .handles import UNKNOWN, find_object, order_of, register_object


def require_receive_storage(comm: Any, layout: dict[str, Any], world_size: int, device: torch.device) -> ReceiveStorage:
    """Return the fields of ``comm``. ``ValueError`` unless they match ``layout``, a ``msa_icp_comm_layout``."""
    # The dtype and shape of each field. None allows any 1-D shape with at least one element.
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


class SlotHistory:
    """Records the slot set of the last layer with tagged rows. It is None if unknown.

    Two uses of a slot set must be at least two sparse layers apart. Replayed graphs and compiled code launch layers
    that are not seen here, and so make the last slot set unknown.
    """

    def __init__(self, limits: Limits) -> None:
        self._num_sparse_layers = limits.num_sparse_layers
        self._on_gpu = limits.device.type == "cuda"
        self._last: int | None = None
        self._captured = False

    def require(self, slot: Any, tagged: Any) -> None:
        """Refuse tagged rows in the slot set of the layer before. ``slot`` is None if nothing is published."""
        if tagged is False:
            return
        if tagged is not True:
            raise ValueError(f"tagged must be True or False, was {tagged!r}")
        if self._num_sparse_layers < 2:
            raise ValueError(
                f"tagged must be False with fewer than 2 sparse layers, was True with {self._num_sparse_layers}: two "
                "uses of a slot set must be at least two layers apart"
            )
        if slot == self._last and slot is not None and isinstance(slot, (int, numbers.Integral)):
            # Replays of a captured layer are not seen, so outside a capture the last slot set is unknown.
            if self._captured and not self._is_capturing():
                return
            raise ValueError(
                f"slot must differ from that of the layer before with tagged rows, was {slot} twice: "
                "slot = layers_run % 3, counted across steps"
            )

    def note(self, slot: int | None) -> None:
        """Record the slot set of a launched layer with tagged rows. None makes it unknown."""
        self._last, self._captured = slot, self._is_capturing()

    def note_replay(self, slot: int) -> None:
        """Record the slot set of a layer that a replay has launched. A replay is never part of a capture."""
        self._last, self._captured = slot, False

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture a layer inside. The capture uses no slot set; each replay does and notes it."""
        last = self._last, self._captured
        self.note(None)
        try:
            yield
        finally:
            self._last, self._captured = last

    def _is_capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class CheckedStorage:
    """Receive storage that has been checked for an indexer.

    Attributes
    ----------
    limits : Limits
        The indexer's limits.
    fields : ReceiveStorage
        The checked fields.
    state : torch.Tensor
        int64, in host memory: the ``ChainState`` that the launcher takes.
    slots : SlotHistory
        The history, shared by all storage with the same counters.
    """

    limits: Limits
    fields: ReceiveStorage
    state: torch.Tensor
    slots: SlotHistory


class StorageTable:
    """The receive storage of one indexer. Storage is checked once, and again when a field has changed.

    Attributes
    ----------
    handle : int
        Handle of the table in compiled code, because an operator cannot take objects.
    order : Order
        Keeps the decode chains of the device in order in compiled code.
    """

    def __init__(self, limits: Limits, check_memory: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """``check_memory`` refuses fields whose memory a launch cannot use."""
        self.limits = limits
        self.handle = register_object(self)
        self.order = order_of(limits.device)
        self._check_memory = check_memory
        self._latest: CheckedStorage | None = None
        self._fields: Sequence[Any] = [object()] * len(ReceiveStorage._fields)  # no comm has these
        self._slots: MutableMapping[torch.Tensor, SlotHistory] = WeakTensorKeyDictionary()
        self._handles: dict[int, int] = {}

    def find(self, comm: Any) -> CheckedStorage:
        """The checked storage of ``comm``. It is checked unless its fields are those that were checked last."""
        recv, tagged_recv, recv_bases, tagged_recv_bases, publish, expected, errors = self._fields
        try:
            if (
                comm.recv is recv
                and comm.tagged_recv is tagged_recv
                and comm.recv_bases is recv_bases
                and comm.tagged_recv_bases is tagged_recv_bases
                and comm.publish_generations is publish
                and comm.expected_generations is expected
                and comm.errors is errors
            ):
                assert self._latest is not None
                return self._latest
        except AttributeError:
            pass  # check() names the missing field
        return self.check(comm)

    def run(self, comm: Any, call: Decode, launch: Callable[[CheckedStorage, Decode], None]) -> None:
        """Check the slot set of a decode call, launch it on ``comm``, and record the slot set."""
        storage = self.find(comm)
        storage.slots.require(call.slot if call.publishes else None, call.tagged)
        launch(storage, call)
        if call.publishes and call.tagged and call.num_valid_pages.shape[0]:  # otherwise no row was published
            storage.slots.note(call.slot)

    def check(self, comm: Any) -> CheckedStorage:
        """Check ``comm``; ``ValueError`` unless it is receive storage for this rank."""
        limits = self.limits
        fields = require_receive_storage(comm, limits.comm_layout(), limits.world_size, limits.device)
        self._check_memory(fields)
        slots = self._slots.setdefault(fields.publish_generations, SlotHistory(limits))
        self._latest = CheckedStorage(limits, fields, _chain_state(limits, fields), slots)
        self._fields = fields
        self._register(comm)
        return self._latest

    def forget(self, comm: Any) -> None:
        """Drop all references to the tensors of ``comm``, which is about to be closed."""
        if self._latest is not None and self._latest.fields.recv is comm.recv:
            self._latest, self._fields = None, [object()] * len(ReceiveStorage._fields)

    def handle_of(self, comm: Any) -> int:
        """Handle of ``comm`` in compiled code, or ``UNKNOWN`` if it was never checked."""
        return self._handles.get(id(comm), UNKNOWN)

    def _register(self, comm: Any) -> None:
        if find_object(self.handle_of(comm)) is comm:
            return
        try:
            self._handles[id(comm)] = register_object(comm)
        except TypeError:
            self._handles.pop(id(comm), None)  # without a weak reference, a reused id would go unnoticed


def _chain_state(limits: Limits, fields: ReceiveStorage) -> torch.Tensor:
    """The numbers and addresses of an indexer and its receive storage, packed for the launcher."""
    addresses = {name: field.data_ptr() for name, field in fields._asdict().items()}
    return ChainState(
        device=-1 if limits.device.index is None else limits.device.index,
        rank=limits.rank,
        world_size=limits.world_size,
        heads_per_rank=limits.heads_per_rank,
        capacity=limits.max_decode_tokens,
        init_blocks=limits.init_blocks,
        local_blocks=limits.local_blocks,
        spin_limit=limits.spin_limit,
        wait_ns=limits.wait_ns,
        page_size=limits.page_size,
        max_query_len=limits.max_decode_query_len,
        index_scale=limits.index_scale,
        index_offset=limits.index_offset,
        **addresses,
    ).pack()
