# SPDX-License-Identifier: Apache-2.0
"""Receive storage that the processes of a group share, one rank per process."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..backends import find_eager_backend
from ..indexer import MSAIcpIndexerPlan
from ..runtime import shared
from ..version import __version__
from .exchange import require_group
from .storage import MSAIcpComm, comm_fields, make_storage

T = TypeVar("T")

_MEMORIES = {"cpu": ("auto", "shared"), "cuda": ("auto", "symmetric", "ipc")}
"""Values of ``memory`` by the type of device."""
_AGREED = (
    "host",
    "version",
    "backend",
    "device type",
    "kernels",
    "memory",
    "world_size",
    "page_size",
    "max_decode_tokens",
    "init_blocks",
    "local_blocks",
    "num_sparse_layers",
    "accumulation",
)
"""Properties that must be equal on all ranks of a group, by the names of ``_description``."""
_SHARED_MEMORY_FOLDER = Path("/dev/shm")
_lost: list[Any] = []
"""Memory of CUDA contexts that a fault has ended. Freeing symmetric memory there would end the process."""


@dataclass(frozen=True, eq=False)
class MSAIcpGroupComm(MSAIcpComm):
    """One rank's view of receive storage that the processes of a group share. Made by :func:`allocate_comm`.

    It is a context manager that closes itself: ``with allocate_comm(indexer) as comm``.

    Attributes
    ----------
    indexer : MSAIcpIndexerPlan
        The rank's indexer.
    group : torch.distributed.ProcessGroup
        The group of the ranks.
    memory : str
        How the ranks access each other's rows: ``"symmetric"`` or ``"ipc"`` on GPUs, ``"shared"`` on the CPU.
    """

    indexer: MSAIcpIndexerPlan
    group: dist.ProcessGroup
    memory: str
    _handle: Any
    _closing: threading.RLock = field(default_factory=threading.RLock)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"memory={self.memory!r}"
        return f"MSAIcpGroupComm({self.indexer!r}, {state})"

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has run."""
        return self.recv is None

    def close(self, *, wait: bool = True) -> None:
        """Release the storage. Call it on every rank. A second call does nothing.

        The indexer raises ``ValueError`` for a closed comm. ``close`` synchronizes the device first, so no kernel of
        this rank stores into memory that is no longer mapped. Do not replay CUDA graphs that captured this comm
        afterwards.

        Parameters
        ----------
        wait : bool
            Wait until every rank of the group has called ``close``, so no rank stores into freed memory. Pass ``False``
            if a rank may be dead: the others would wait for the timeout of the group. There is no wait on a group that
            was destroyed or that a dead rank has broken.
        """
        with self._closing:
            if not self.closed:
                self._close(wait)

    def _close(self, wait: bool) -> None:
        device = self.indexer.device
        try:
            _synchronize(device)
        except RuntimeError:
            _lost.append((self.storages, self._handle))
        try:
            if wait:
                # A destroyed group cannot be waited for, and a dead rank stores nothing any more.
                with contextlib.suppress(RuntimeError, ValueError):
                    _gather(require_group(self.group), device, lambda: None)
        finally:
            self.indexer.forget_comm(self)
            shared.forget(self.storages)
            for name in (*(part.name for part in fields(MSAIcpComm)), "_handle"):
                object.__setattr__(self, name, None)

    def __enter__(self) -> MSAIcpGroupComm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an exception, the peers may be in the middle of a step and never call close.
        self.close(wait=kind is None)


@torch.inference_mode(False)  # the tensors are written outside inference mode too
def allocate_comm(
    indexer: MSAIcpIndexerPlan, group: dist.ProcessGroup | None = None, *, memory: str = "auto"
) -> MSAIcpGroupComm:
    """Receive storage for one rank of a group of processes. All ranks call this function together.

    The ranks first compare their properties and refuse a mismatch. Each rank then allocates its rows, maps its peers'
    rows and waits until all ranks have done so. The wait for a late rank lasts at most the timeout of the group.

    Parameters
    ----------
    indexer : MSAIcpIndexerPlan
        This rank's indexer.
    group : torch.distributed.ProcessGroup, optional
        The tensor-parallel group: ``indexer.world_size`` processes on one host, with this process as ``indexer.rank``.
        The default group if None. A process may be in several groups and have a comm for each.
    memory : str
        How the ranks access each other's rows. On GPUs: ``"symmetric"`` for torch's symmetric memory, ``"ipc"`` for
        CUDA IPC, or ``"auto"`` for the first of these that works. Two ranks on one GPU need ``"ipc"``. On the CPU:
        ``"shared"`` for shared memory, or ``"auto"`` for the same. Multicast is never used.

    Returns
    -------
    MSAIcpGroupComm
        The storage, zeroed on every rank. :meth:`MSAIcpGroupComm.close` releases it.

    Raises
    ------
    ValueError
        If an argument is not as described on some rank, or if the ranks disagree on layout, ``max_decode_tokens``,
        forced blocks, number of sparse layers, accumulation, ``memory``, backend, device type, kernels, version or
        host. Every rank raises.
    RuntimeError
        If memory cannot be allocated or mapped on some rank. Every rank raises.
    """
    group = require_group(group)
    device = indexer.device if isinstance(indexer, MSAIcpIndexerPlan) else torch.device("cpu")
    _require_agreement(_gather(group, device, lambda: _description(indexer, group, memory)))
    reasons = []
    for kind in _SHARERS[device.type]:
        if memory in ("auto", kind):
            try:
                return _make_comm(indexer, group, kind)
            except RuntimeError as error:  # raised on every rank, so all ranks try the next kind
                reasons.append(f"{kind}: {error}")
    raise RuntimeError(
        f"the ranks cannot store into one another's memory ({'; '.join(reasons)}): run them as one user in one IPC "
        "namespace of one host, on GPUs with peer access"
    )


def _make_comm(indexer: MSAIcpIndexerPlan, group: dist.ProcessGroup, memory: str) -> MSAIcpGroupComm:
    """Make the comm of one rank with one kind of memory."""
    storages, handle = _SHARERS[indexer.device.type][memory](indexer, group)
    made: list[MSAIcpGroupComm] = []

    def finish() -> None:
        own_fields = comm_fields(indexer, storages)
        made.append(MSAIcpGroupComm(**own_fields, indexer=indexer, group=group, memory=memory, _handle=handle))
        _synchronize(indexer.device)

    # No rank may publish before all others have zeroed their rows and counters and mapped their peers' rows.
    _gather(group, indexer.device, finish)
    shared.add(storages)
    return made[0]


def _gather(group: dist.ProcessGroup, device: torch.device, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on every rank and return its results in the order of ranks.

    If it raises on some ranks, all ranks raise: ``ValueError`` if all those errors are ``ValueError``, otherwise
    ``RuntimeError``.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    report = None if failure is None else (isinstance(failure, ValueError), f"{type(failure).__name__}: {failure}")
    gathered: list[Any] = [None] * dist.get_world_size(group)
    # An nccl group moves objects through the current device.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(gathered, (result, report), group=group)
    failures = {rank: report for rank, (_, report) in enumerate(gathered) if report is not None}
    if failures:
        kind = ValueError if all(is_value_error for is_value_error, _ in failures.values()) else RuntimeError
        if isinstance(failure, kind):
            raise failure
        each = "; ".join(f"rank {rank} of the group failed with {text}" for rank, (_, text) in failures.items())
        raise kind(each) from failure
    return [result for result, _ in gathered]


def _description(indexer: Any, group: dist.ProcessGroup, memory: Any) -> dict[str, Any]:
    """The properties that the ranks compare. Raise ``ValueError`` if indexer and group do not fit each other."""
    if not isinstance(indexer, MSAIcpIndexerPlan):
        raise ValueError(f"indexer must be an MSAIcpIndexerPlan, was {indexer!r}")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size != indexer.world_size:
        raise ValueError(f"group must have the {indexer.world_size} ranks of indexer.world_size, had {size}")
    if rank != indexer.rank:
        raise ValueError(f"indexer.rank must be the rank of this process in the group, {rank}, was {indexer.rank}")
    choices = _MEMORIES[indexer.device.type]
    if memory not in choices:
        raise ValueError(f"memory must be one of {choices} on {indexer.device}, was {memory!r}")
    of_process = {
        "host": socket.gethostname(),
        "version": __version__,
        "device type": indexer.device.type,
        "kernels": find_eager_backend(indexer.backend).kernels_identity(indexer.device),
        "memory": memory,
    }
    return {name: of_process[name] if name in of_process else getattr(indexer, name) for name in _AGREED}


def _require_agreement(descriptions: Sequence[dict[str, Any]]) -> None:
    """Raise ``ValueError`` for the first property that differs between ranks."""
    for name in _AGREED:
        values = [description[name] for description in descriptions]
        if len(set(values)) > 1:
            each = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{name} must be the same on every rank of the group, was {each}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _share_files(indexer: MSAIcpIndexerPlan, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], None]:
    """Storages of all ranks in files of shared memory. The files are unlinked once every rank has mapped them."""
    words = indexer.comm_layout["storage_words"]
    folder = _SHARED_MEMORY_FOLDER if _SHARED_MEMORY_FOLDER.is_dir() else Path(tempfile.gettempdir())
    storages: list[torch.Tensor] = []
    with contextlib.ExitStack() as files:

        def create() -> str:
            try:
                file = files.enter_context(tempfile.NamedTemporaryFile(prefix="flashinfer-msa-", dir=folder))
                os.posix_fallocate(file.fileno(), 0, 4 * words)  # zeros; fails here instead of at a store if full
            except OSError as error:
                raise RuntimeError(f"{folder} must have room for {4 * words} bytes: {error}") from error
            return file.name

        def connect() -> None:
            for path in paths:
                os.stat(path)  # from_file would create a path that this process cannot see
                storages.append(torch.from_file(path, shared=True, size=words, dtype=torch.int32, device="cpu"))

        paths = _gather(group, indexer.device, create)
        _gather(group, indexer.device, connect)
    return storages, None


def _share_symmetric(indexer: MSAIcpIndexerPlan, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], Any]:
    """Storages of all ranks in torch's symmetric memory, and the handle that keeps them mapped."""
    words = indexer.comm_layout["storage_words"]
    own: list[torch.Tensor] = []
    handles: list[Any] = []
    storages: list[torch.Tensor] = []

    def allocate() -> None:
        from torch.distributed import _symmetric_memory

        own.append(_symmetric_memory.empty(words, dtype=torch.int32, device=indexer.device).zero_())
        torch.cuda.synchronize(indexer.device)

    def connect() -> int:
        from torch.distributed import _symmetric_memory

        with torch.cuda.device(indexer.device), _without_multicast():
            handles.append(_symmetric_memory.rendezvous(own[0], group))
        # Offset of this rank's rows in its buffer, in int32 words.
        return (own[0].data_ptr() - handles[0].buffer_ptrs[indexer.rank]) // own[0].itemsize

    def find() -> None:
        buffers = [handles[0].get_buffer(rank, (words,), torch.int32, begin) for rank, begin in enumerate(begins)]
        if buffers[indexer.rank].data_ptr() != own[0].data_ptr():
            raise RuntimeError("this torch's symmetric memory does not find a rank's own rows")
        storages.extend(own[0] if rank == indexer.rank else buffer for rank, buffer in enumerate(buffers))

    _gather(group, indexer.device, allocate)
    begins = _gather(group, indexer.device, connect)
    _gather(group, indexer.device, find)
    return storages, handles[0]


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Disable multicast in a rendezvous. Nothing here uses it, and some hosts have no resources left for it."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _share_ipc(indexer: MSAIcpIndexerPlan, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], None]:
    """Storages of all ranks, mapped by CUDA IPC."""
    storages: list[torch.Tensor] = []

    def export() -> list[tuple[Any, ...] | None]:
        own = make_storage(indexer)
        torch.cuda.synchronize(indexer.device)
        storages.extend([own] * indexer.world_size)
        # Each peer needs its own handle, because every importer releases its own reference count of the storage.
        return [
            None if rank == indexer.rank else own.untyped_storage()._share_cuda_() for rank in range(indexer.world_size)
        ]

    def connect() -> None:
        for rank, handles in enumerate(exported):
            handle = handles[indexer.rank]
            if handle is None:  # this rank's own
                continue
            _, *memory, _ = handle
            # Open it on this rank's device, where its kernels run. No wait is needed: the exporter has synchronized.
            storage = torch.UntypedStorage._new_shared_cuda(indexer.device.index, *memory, False)
            storages[rank] = torch.empty(0, dtype=torch.int32, device=indexer.device).set_(storage)

    exported = _gather(group, indexer.device, export)
    _gather(group, indexer.device, connect)
    return storages, None


_SHARERS: dict[str, dict[str, Callable[..., tuple[list[torch.Tensor], Any]]]] = {
    "cpu": {"shared": _share_files},
    "cuda": {"symmetric": _share_symmetric, "ipc": _share_ipc},
}
"""Functions that share storage, by type of device, in order of preference."""
