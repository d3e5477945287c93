# SPDX-License-Identifier: Apache-2.0
"""Receive storage: the rows that publishers store into and owners merge, and the counters of both.

:func:`local_comm` makes it for ranks of one process, :func:`allocate_comm` for one rank a process. The carriers of a
prefill step go through :func:`exchange_carriers`.

What must be equal on all ranks of a group, layer by layer: queries, ``seq_lens``, ``num_valid_pages`` and with them the
number and order of tokens, padding included; ``decode_query_len``, row form, slot set and the order of layers; forced
blocks; the tokens of an exchange. Ranks that differ in these wait for rows that do not come, or select differently.
What the ranks compare in :func:`allocate_comm` is less: what they are, not what they are given. Block tables and keys
are each rank's own, and so are scratch, pools, ``enable_pdl``, and whether a decode layer is launched eagerly or from a
graph.

At the end: the last step, then the caller's graphs and :meth:`MSAIcpLayerGraphs.clear`, then on every rank
:meth:`MSAIcpGroupComm.close`, then ``torch.distributed.destroy_process_group``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..indexer import MSAIcpIndexerPlan
from ..layout import NUM_HEADS, ROW_WORDS, WORLD_SIZES
from ..manifest import load_manifest
from ..runtime import native, shared
from ..runtime.loader import kernels_of
from ..version import __version__

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
"""What the ranks of a group must have in common, as ``_description`` names it."""
_SHARED_MEMORY_FOLDER = Path("/dev/shm")
_lost: list[Any] = []
"""What lies in a CUDA context that a fault has ended: freeing symmetric memory there would end the process."""


@dataclass(frozen=True, eq=False)
class MSAIcpComm:
    """One rank's view of the group's receive storage. Any object with these fields will do for the indexer.

    Shapes are those of ``msa_icp_comm_layout``. ``tagged_recv`` lies right after ``recv`` in one storage; the bases are
    the device addresses of every rank's ``recv`` and ``tagged_recv``, int64 ``[W]``, and ``storages`` keeps what they
    point at alive; ``errors`` int32 ``[1]`` counts waits that ran out. All of it is zeroed once, on every rank, and
    never reset.
    """

    storages: tuple[torch.Tensor, ...]
    recv: torch.Tensor
    tagged_recv: torch.Tensor
    recv_bases: torch.Tensor
    tagged_recv_bases: torch.Tensor
    publish_generations: torch.Tensor
    expected_generations: torch.Tensor
    errors: torch.Tensor

    def __reduce__(self) -> Any:
        # The bases would still be those of this storage, and mean nothing in another process.
        raise TypeError("receive storage cannot be copied or pickled, since peers store at its addresses: make another")


@dataclass(frozen=True, eq=False)
class MSAIcpGroupComm(MSAIcpComm):
    """One rank's view of receive storage that the processes of a group share. Made by :func:`allocate_comm`.

    A context manager that closes itself: ``with allocate_comm(plan) as comm``.

    Attributes
    ----------
    plan : MSAIcpIndexerPlan
        The rank's indexer.
    group : torch.distributed.ProcessGroup
        The group of the ranks.
    memory : str
        How the ranks reach one another's rows: ``"symmetric"`` or ``"ipc"`` on GPUs, ``"shared"`` on the CPU.
    """

    plan: MSAIcpIndexerPlan
    group: dist.ProcessGroup
    memory: str
    _handle: Any
    _closing: threading.RLock = field(default_factory=threading.RLock)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"memory={self.memory!r}"
        return f"MSAIcpGroupComm({self.plan!r}, {state})"

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has run."""
        return self.recv is None

    def close(self, *, wait: bool = True) -> None:
        """Release the storage. Once more does nothing; a call of the indexer with a closed comm is a ``ValueError``.

        Every rank closes. The device is synchronized first, so that no kernel of this rank stores into memory that it
        no longer maps; CUDA graphs that were captured with this comm must not be replayed afterwards.

        Parameters
        ----------
        wait : bool
            Wait until every rank of the group is here, so that none of them stores into memory that is gone. ``False``
            where a rank may be dead: its peers would wait for the timeout of the group. A group that has been
            destroyed, or that a dead rank has broken, is not waited for.
        """
        with self._closing:
            if not self.closed:
                self._close(wait)

    def _close(self, wait: bool) -> None:
        device = self.plan.device
        try:
            _synchronize(device)
        except RuntimeError:
            _lost.append((self.storages, self._handle))
        try:
            if wait:
                # A group that is gone cannot be waited for, and a dead rank stores nothing any more.
                with contextlib.suppress(RuntimeError, ValueError):
                    _gather(_require_group(self.group), device, lambda: None)
        finally:
            self.plan._forget_comm(self)
            shared.forget(self.storages)
            for name in (*(part.name for part in fields(MSAIcpComm)), "_handle"):
                object.__setattr__(self, name, None)

    def __enter__(self) -> MSAIcpGroupComm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an exception the peers may be in the middle of a step, and wait for this rank instead.
        self.close(wait=kind is None)


@torch.inference_mode(False)  # written outside inference mode too
def local_comm(plans: Sequence[MSAIcpIndexerPlan]) -> list[MSAIcpComm]:
    """Receive storage for ranks that all live in this process.

    Parameters
    ----------
    plans : sequence of MSAIcpIndexerPlan
        One plan a rank, in the order of ranks, of one group: equal world size, backend and ``max_decode_tokens``. Their
        devices may be one GPU, or several with peer access.

    Returns
    -------
    list of MSAIcpComm
        One a rank, zeroed. On one device, run the publishes of all ranks before the first merge: a merge that is ahead
        of a publish in a stream waits for it forever.

    Raises
    ------
    ValueError
        If the plans are not one group, or their GPUs cannot store into each other's memory.
    """
    if not isinstance(plans, Iterable):
        raise ValueError(f"plans must be a non-empty sequence of indexer plans, was {plans!r}")
    plans = list(plans)
    if not plans or not all(isinstance(plan, MSAIcpIndexerPlan) for plan in plans):
        raise ValueError(f"plans must be a non-empty sequence of indexer plans, was {plans!r}")
    first = plans[0]
    if [plan.rank for plan in plans] != list(range(first.world_size)):
        raise ValueError(
            f"plans must hold one plan of each rank 0 to {first.world_size - 1} in order, "
            f"held ranks {[plan.rank for plan in plans]}"
        )
    for name in ("world_size", "max_decode_tokens", "page_size", "backend"):
        values = [getattr(plan, name) for plan in plans]
        if len(set(values)) > 1:
            raise ValueError(f"plans must agree on {name}, had {values}")
    _connect([plan.device for plan in plans])

    storages = [_zeros(plan) for plan in plans]
    comms = [MSAIcpComm(**_comm_fields(plan, storages)) for plan in plans]
    for device in {plan.device for plan in plans}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a peer may publish from another device as soon as this returns
    return comms


def _connect(devices: list[torch.device]) -> None:
    """Let kernels on each device store into the memory of the others."""
    if {device.type for device in devices} not in ({"cpu"}, {"cuda"}):
        raise ValueError(f"plans must be all on CUDA devices or all on the CPU, were on {[str(d) for d in devices]}")
    for device in dict.fromkeys(devices):
        for peer in dict.fromkeys(devices):
            if device == peer:
                continue
            if not torch.cuda.can_device_access_peer(device, peer):
                raise ValueError(f"plans must be on GPUs with peer access, but {device} cannot access {peer}")
            native.enable_peer_access(device.index, peer.index)
            # Expandable segments of torch's allocator are mapped for a peer when torch itself first copies to it.
            torch.zeros(1, device=device).to(peer)


def _zeros(plan: MSAIcpIndexerPlan) -> torch.Tensor:
    """One rank's receive storage."""
    return torch.zeros(plan.comm_layout["storage_words"], dtype=torch.int32, device=plan.device)


def _comm_fields(plan: MSAIcpIndexerPlan, storages: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The fields of a rank's comm, over the storages of all ranks as its process sees them."""
    layout = plan.comm_layout
    legacy_words = layout["tagged_offset_bytes"] // 4
    recv = [storage[:legacy_words].view(layout["legacy_shape"]) for storage in storages]
    tagged = [storage[legacy_words:].view(torch.int64).view(layout["tagged_shape"]) for storage in storages]

    def addresses(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([r.data_ptr() for r in rows], dtype=torch.int64, device=plan.device)

    def counters(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=plan.device)

    return {
        "storages": tuple(storages),
        "recv": recv[plan.rank],
        "tagged_recv": tagged[plan.rank],
        "recv_bases": addresses(recv),
        "tagged_recv_bases": addresses(tagged),
        "publish_generations": counters(layout["generations_shape"]),
        "expected_generations": counters(layout["expected_shape"]),
        "errors": counters((1,)),
    }


# --- one rank a process -----------------------------------------------------------------------------------------------


@torch.inference_mode(False)  # written outside inference mode too
def allocate_comm(
    plan: MSAIcpIndexerPlan, group: dist.ProcessGroup | None = None, *, memory: str = "auto"
) -> MSAIcpGroupComm:
    """Receive storage for one rank of a group of processes, which all call this at the same time.

    The ranks compare what they are first, so that ranks that do not belong together are refused here. Then each
    allocates its rows, maps its peers' and waits until all have. A rank that comes late is waited for, as long as the
    group's timeout says.

    Parameters
    ----------
    plan : MSAIcpIndexerPlan
        This rank's indexer.
    group : torch.distributed.ProcessGroup, optional
        The tensor-parallel group, of ``plan.world_size`` processes on one host with this one as ``plan.rank``; the
        default group if None. A process may be in several groups, and have a comm for each.
    memory : str
        How the ranks reach one another's rows. On GPUs ``"symmetric"`` for torch's symmetric memory, ``"ipc"`` for
        CUDA IPC, which two ranks on one GPU need, or ``"auto"`` for the first of them that works. On the CPU
        ``"shared"`` for shared memory, which is ``"auto"`` too. Multicast is never used.

    Returns
    -------
    MSAIcpGroupComm
        Zeroed on every rank. :meth:`MSAIcpGroupComm.close` releases it.

    Raises
    ------
    ValueError
        If an argument is not as described on some rank, or the ranks disagree on layout, ``max_decode_tokens``, forced
        blocks, number of layers, backend, kernels, version or host. Every rank raises.
    RuntimeError
        If memory cannot be allocated or mapped on some rank. Every rank raises.
    """
    group = _require_group(group)
    device = plan.device if isinstance(plan, MSAIcpIndexerPlan) else torch.device("cpu")
    _require_agreement(_gather(group, device, lambda: _description(plan, group, memory)))
    reasons = []
    for kind in _SHARERS[device.type]:
        if memory in ("auto", kind):
            try:
                return _make_comm(plan, group, kind)
            except RuntimeError as error:  # on every rank, so that all try the next one
                reasons.append(f"{kind}: {error}")
    raise RuntimeError(
        f"the ranks cannot store into one another's memory ({'; '.join(reasons)}): run them as one user in one IPC "
        "namespace of one host, on GPUs with peer access"
    )


def _make_comm(plan: MSAIcpIndexerPlan, group: dist.ProcessGroup, memory: str) -> MSAIcpGroupComm:
    """The comm of one rank, over one kind of memory."""
    storages, handle = _SHARERS[plan.device.type][memory](plan, group)
    made: list[MSAIcpGroupComm] = []

    def finish() -> None:
        comm_fields = _comm_fields(plan, storages)
        made.append(MSAIcpGroupComm(**comm_fields, plan=plan, group=group, memory=memory, _handle=handle))
        _synchronize(plan.device)

    # No rank publishes before every other has zeroed its rows and counters and mapped its peers'.
    _gather(group, plan.device, finish)
    shared.add(storages)
    return made[0]


def _require_group(group: Any) -> dist.ProcessGroup:
    """The process group, which this process is in."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group must be an initialized process group, was none: call torch.distributed.init_process_group first"
        )
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group that this process is in, was {group!r}")
    try:
        dist.get_rank(group)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"group must be a process group that exists, was {group!r}: {error}") from error
    return group


def _gather(group: dist.ProcessGroup, device: torch.device, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on every rank and return what it returned, in the order of ranks.

    If it raises on some, all raise: ``ValueError`` where those did, ``RuntimeError`` if one raised anything else.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    words = None if failure is None else (isinstance(failure, ValueError), f"{type(failure).__name__}: {failure}")
    gathered: list[Any] = [None] * dist.get_world_size(group)
    # An nccl group moves objects through the current device.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(gathered, (result, words), group=group)
    failures = {rank: words for rank, (_, words) in enumerate(gathered) if words is not None}
    if failures:
        kind = ValueError if all(is_value_error for is_value_error, _ in failures.values()) else RuntimeError
        if isinstance(failure, kind):
            raise failure
        each = "; ".join(f"rank {rank} of the group failed with {text}" for rank, (_, text) in failures.items())
        raise kind(each) from failure
    return [result for result, _ in gathered]


def _description(plan: Any, group: dist.ProcessGroup, memory: Any) -> dict[str, Any]:
    """What the ranks compare, of a plan and a group that fit each other."""
    if not isinstance(plan, MSAIcpIndexerPlan):
        raise ValueError(f"plan must be an indexer plan, was {plan!r}")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size != plan.world_size:
        raise ValueError(f"group must have the {plan.world_size} ranks of plan.world_size, had {size}")
    if rank != plan.rank:
        raise ValueError(f"plan.rank must be the rank of this process in the group, {rank}, was {plan.rank}")
    choices = _MEMORIES[plan.device.type]
    if memory not in choices:
        raise ValueError(f"memory must be one of {choices} on {plan.device}, was {memory!r}")
    kernels = plan.arch
    if plan.backend == "cake":
        digests = kernels_of(plan.device).source_digests()
        whole = " ".join([load_manifest().data["launcher"]["sha256"], *digests])
        kernels = f"{plan.arch} {hashlib.sha256(whole.encode()).hexdigest()[:16]}"
    of_process = {
        "host": socket.gethostname(),
        "version": __version__,
        "device type": plan.device.type,
        "kernels": kernels,
        "memory": memory,
    }
    return {name: of_process[name] if name in of_process else getattr(plan, name) for name in _AGREED}


def _require_agreement(descriptions: Sequence[dict[str, Any]]) -> None:
    """Refuse ranks that differ, by the first thing they differ in."""
    for name in _AGREED:
        values = [description[name] for description in descriptions]
        if len(set(values)) > 1:
            each = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{name} must be the same on every rank of the group, was {each}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _share_files(plan: MSAIcpIndexerPlan, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], None]:
    """Storages of all ranks in shared memory: files, which have no name any more once every rank has mapped them."""
    words = plan.comm_layout["storage_words"]
    folder = _SHARED_MEMORY_FOLDER if _SHARED_MEMORY_FOLDER.is_dir() else Path(tempfile.gettempdir())
    storages: list[torch.Tensor] = []
    with contextlib.ExitStack() as files:

        def create() -> str:
            try:
                file = files.enter_context(tempfile.NamedTemporaryFile(prefix="flashinfer-msa-", dir=folder))
                os.posix_fallocate(file.fileno(), 0, 4 * words)  # zeros; without room it fails here, not at a store
            except OSError as error:
                raise RuntimeError(f"{folder} must have room for {4 * words} bytes: {error}") from error
            return file.name

        def connect() -> None:
            for path in paths:
                os.stat(path)  # a path that is another one in this process would be created
                storages.append(torch.from_file(path, shared=True, size=words, dtype=torch.int32, device="cpu"))

        paths = _gather(group, plan.device, create)
        _gather(group, plan.device, connect)
    return storages, None


def _share_symmetric(plan: MSAIcpIndexerPlan, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], Any]:
    """Storages of all ranks in torch's symmetric memory, and the handle that keeps them mapped."""
    words = plan.comm_layout["storage_words"]
    own: list[torch.Tensor] = []
    handles: list[Any] = []
    storages: list[torch.Tensor] = []

    def allocate() -> None:
        from torch.distributed import _symmetric_memory

        own.append(_symmetric_memory.empty(words, dtype=torch.int32, device=plan.device).zero_())
        torch.cuda.synchronize(plan.device)

    def connect() -> int:
        from torch.distributed import _symmetric_memory

        with torch.cuda.device(plan.device), _without_multicast():
            handles.append(_symmetric_memory.rendezvous(own[0], group))
        # Where this rank's rows begin in its buffer, in words.
        return (own[0].data_ptr() - handles[0].buffer_ptrs[plan.rank]) // own[0].itemsize

    def find() -> None:
        buffers = [handles[0].get_buffer(rank, (words,), torch.int32, begin) for rank, begin in enumerate(begins)]
        if buffers[plan.rank].data_ptr() != own[0].data_ptr():
            raise RuntimeError("this torch's symmetric memory does not find a rank's own rows")
        storages.extend(own[0] if rank == plan.rank else buffer for rank, buffer in enumerate(buffers))

    _gather(group, plan.device, allocate)
    begins = _gather(group, plan.device, connect)
    _gather(group, plan.device, find)
    return storages, handles[0]


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Keep a rendezvous from setting up multicast, which nothing here uses and not every host has room for."""
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


def _share_ipc(plan: MSAIcpIndexerPlan, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], None]:
    """Storages of all ranks by CUDA IPC."""
    storages: list[torch.Tensor] = []

    def export() -> list[tuple[Any, ...] | None]:
        own = _zeros(plan)
        torch.cuda.synchronize(plan.device)
        storages.extend([own] * plan.world_size)
        # A handle for each peer: every importer releases its own count of the storage.
        return [None if rank == plan.rank else own.untyped_storage()._share_cuda_() for rank in range(plan.world_size)]

    def connect() -> None:
        for rank, handles in enumerate(exported):
            if rank == plan.rank:
                continue
            _, *memory, _ = handles[plan.rank]
            # Opened on this rank's device, where its kernels run. Nothing to wait for: the exporter has synchronized.
            storage = torch.UntypedStorage._new_shared_cuda(plan.device.index, *memory, False)
            storages[rank] = torch.empty(0, dtype=torch.int32, device=plan.device).set_(storage)

    exported = _gather(group, plan.device, export)
    _gather(group, plan.device, connect)
    return storages, None


_SHARERS: dict[str, dict[str, Callable[..., tuple[list[torch.Tensor], Any]]]] = {
    "cpu": {"shared": _share_files},
    "cuda": {"symmetric": _share_symmetric, "ipc": _share_ipc},
}
"""By the type of device, in order of preference."""


# --- the exchange of a prefill step -----------------------------------------------------------------------------------


def exchange_carriers(send: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Bring every rank the carrier rows of its heads: the all-to-all between ``prefill_local`` and ``prefill_merge``.

    Rows ``send[h]`` go to rank ``h // heads_per_rank``; ``received[s]`` is what rank ``s`` sent. Runs on the current
    stream, without a synchronization of the host. A CUDA graph may capture it after it has run once on the group, on
    all ranks alike, and is freed before the group is destroyed, which would wait for it forever.

    Parameters
    ----------
    send : torch.Tensor
        int32 ``[4, T, 33]``, contiguous: this rank's carrier. The same ``T`` on every rank; nothing is sent if it is 0.
    received : torch.Tensor
        int32 ``[W, 4 // W, T, 33]``, contiguous, on the same device in memory of its own.
    group : torch.distributed.ProcessGroup, optional
        The tensor-parallel group, of ``W`` = 2 or 4 processes, with a backend for the device, such as nccl for CUDA;
        the default group if None.

    Raises
    ------
    ValueError
        If an argument is not as described; nothing has been sent then.
    """
    group = _require_group(group)
    world_size = dist.get_world_size(group)
    if world_size not in WORLD_SIZES:
        raise ValueError(f"group must have {' or '.join(map(str, WORLD_SIZES))} ranks, had {world_size}")
    for name, tensor in (("send", send), ("received", received)):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
            raise ValueError(f"{name} must be a dense tensor, was {tensor!r}")
        if tensor.dtype is not torch.int32:
            raise ValueError(f"{name} must be torch.int32, was {tensor.dtype}")
    if send.dim() != 3 or send.shape[0] != NUM_HEADS or send.shape[2] != ROW_WORDS:
        raise ValueError(f"send must have shape ({NUM_HEADS}, T, {ROW_WORDS}), was {tuple(send.shape)}")
    wanted = (world_size, NUM_HEADS // world_size, *send.shape[1:])
    if tuple(received.shape) != wanted:
        raise ValueError(f"received must have shape {wanted}, was {tuple(received.shape)}")
    for name, tensor in (("send", send), ("received", received)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, had strides {tensor.stride()}: a slice of a buffer's tokens is not; take "
                f"buffer.flatten()[:{tensor.numel()}].view({tuple(tensor.shape)})"
            )
    if received.device != send.device:
        raise ValueError(f"received must be on {send.device} like send, was on {received.device}")
    if send.device.type not in _MEMORIES:
        raise ValueError(f"send must be on the CPU or a CUDA device, was on {send.device}")
    if send.device.type == "cuda" and "cuda:gloo" in (backends := dist.get_backend_config(group)):
        raise ValueError(f"group must have a backend that exchanges CUDA tensors, such as nccl, had {backends}")
    if send.numel() == 0:
        return
    begin, other = send.data_ptr(), received.data_ptr()
    if begin < other + received.nbytes and other < begin + send.nbytes:
        raise ValueError("received must be memory of its own, overlapped send")
    dist.all_to_all_single(received.view(send.shape), send, group=group)
