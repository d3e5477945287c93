# SPDX-License-Identifier: Apache-2.0
"""The native launcher: loaded at first use, told the layouts, and its errors explained."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..abi.calls import schema_digest
from ..layout import LAYOUTS
from ..manifest import load_manifest
from .fault import Fault, read_fault

_lock = threading.Lock()
_loading = threading.local()
"""What the device loader of this thread has raised: on its way through the launcher it loses its class and cause."""
_device_loader: list[Callable[[int], None]] = []
"""What makes every kernel resident on a device, once it has been given."""


def library() -> Any:
    """The launcher as a tvm-ffi module. ``RuntimeError`` or ``FileNotFoundError`` where it is not installed intact."""
    with _lock:
        return _load_library()


@functools.cache
def _load_library() -> Any:
    import tvm_ffi

    path = load_manifest().launcher()
    module = tvm_ffi.load_module(str(path))
    _require_schema(module, path)
    for layout in LAYOUTS.values():
        module.add_layout(
            layout.name,
            layout.page_size,
            layout.world_size,
            layout.rows,
            layout.page_bytes,
            layout.index_scale,
        )
    module.set_loader(tvm_ffi.convert(_load_device))
    return module


def _require_schema(module: Any, path: Path) -> None:
    """Refuse a launcher that takes other arguments than this package passes."""
    try:
        compiled = module["schema_digest"]()
    except AttributeError:  # it is from before launchers had one
        compiled = "none"
    expected = schema_digest()
    if compiled != expected:
        raise RuntimeError(
            f"{path} must have been built from this version of the package: the digest of its schema must be "
            f"{expected}, was {compiled}; build it again with `flashinfer-msa build`, or reinstall the package"
        )


def is_loaded() -> bool:
    """Whether the launcher has been loaded, so that something of ours may have run."""
    return _load_library.cache_info().currsize > 0


@functools.cache
def operation(name: str) -> Callable[..., Any]:
    """One exported operation of the launcher."""
    return library()[name]


def call(name: str, *arguments: Any) -> Any:
    """Call an operation by its name, as :func:`invoke` does."""
    return invoke(operation(name), *arguments)


def invoke(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operation, or one with its first arguments bound.

    ``ValueError`` for an argument that is not what it must be; ``RuntimeError`` where a driver call fails, in the words
    of the fault record if an earlier wait has run out.
    """
    try:
        return function(*arguments)
    except Exception as error:
        raised = vars(_loading).pop("error", None)
        if raised is not None:
            raise raised from raised.__cause__
        if isinstance(error, ValueError):
            raise
        _explain(function, arguments, error)
        raise


def _explain(function: Callable[..., Any], arguments: tuple[Any, ...], error: Exception) -> None:
    """Raise a better error than that of ``function(*arguments)``, if there is one."""
    devices = {argument.device.index for argument in arguments if isinstance(argument, torch.Tensor)}
    for fault in faults():
        if fault.device in devices:
            raise RuntimeError(str(fault)) from error
    passable = tuple(_describe_unpassable(argument) for argument in arguments)
    if any(a is not b for a, b in zip(passable, arguments, strict=True)):
        function(*passable)


def _describe_unpassable(argument: Any) -> Any:
    """A description in place of a tensor that has no memory to point at: the launcher refuses it with this text."""
    if not isinstance(argument, torch.Tensor):
        return argument
    if argument.layout is not torch.strided:
        return f"a tensor of layout {argument.layout}"
    if argument.device.type not in ("cpu", "cuda"):
        return f"a tensor on device {argument.device}"
    if argument.is_nested or argument.is_quantized:
        return f"a {'nested' if argument.is_nested else 'quantized'} tensor"
    try:
        argument.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return "a tensor without storage"
    if argument.is_conj() or argument.is_neg():
        return "a tensor with a pending conjugation or negation"
    return argument


def load_cubin(device: int, image: bytes) -> int:
    """Load a cubin into a device's primary context; returns the module's handle."""
    return int(call("load_cubin", device, image))


def load_kernel(
    device: int, module: int, page_size: int, world_size: int, role: str, symbol: str, threads: int, shared_bytes: int
) -> None:
    """Make one kernel of a loaded cubin resident. ``page_size`` 0: one that no layout specialises."""
    call("load_kernel", device, module, page_size, world_size, role, symbol, threads, shared_bytes)


def mark_ready(device: int) -> None:
    """Say that every kernel of a device is loaded."""
    call("mark_ready", device)


def enable_peer_access(device: int, peer: int) -> None:
    """Let kernels on one device store into the memory of another."""
    call("enable_peer_access", device, peer)


def use_device_loader(load: Callable[[int], None]) -> None:
    """Give the launcher what it calls, with a device's index, before the first launch on that device."""
    _device_loader[:] = [load]


def _load_device(index: int) -> None:
    try:
        (load,) = _device_loader
        load(index)
    except BaseException as error:
        _loading.error = error
        raise


def last_fault() -> Fault | None:
    """The wait of a kernel that ran out on a GPU of this process, or None.

    A wait that runs out ends its device's CUDA context. The record is in host memory and outlives it. The process
    cannot use that GPU any more, and the ranks of the group wait for one another in turn: restart all of them. Look
    first at the rank that no other rank's record names as the waiting one. Waits of ``backend="torch"`` raise where
    they are, and leave no record.
    """
    return next(faults(), None)


def faults() -> Iterator[Fault]:
    """The waits that ran out, at most one per device."""
    if not is_loaded():
        return
    field = operation("fault_field")
    for device in range(torch.cuda.device_count()):
        fault = read_fault(device, functools.partial(field, device))
        if fault is not None:
            yield fault
