# SPDX-License-Identifier: Apache-2.0
"""Loads the cubins that fit a device into its context, and makes every kernel resident there."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from dataclasses import dataclass

import torch

from ..layout import LAYOUTS
from ..manifest import CubinSet, Manifest, load_manifest
from . import native

_lock = threading.Lock()
_loaded: dict[int, CubinSet] = {}


@functools.cache
def driver_version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports, such as ``(13, 0)``; ``(0, 0)`` where there is no driver.

    ``FLASHINFER_MSA_DRIVER``, such as ``12.4``, stands for it where it is set: cubins are chosen as for such a driver.
    """
    stated = os.environ.get("FLASHINFER_MSA_DRIVER")
    if stated:
        major, _, minor = stated.partition(".")
        if not (major.isdecimal() and (minor or "0").isdecimal()):
            raise ValueError(f"FLASHINFER_MSA_DRIVER must be a CUDA version such as 12.4, was {stated!r}")
        return int(major), int(minor or 0)
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return 0, 0
    except OSError:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


@dataclass(frozen=True)
class Kernels:
    """The kernels for a device: of ``architecture``, and prebuilt unless ``prebuilt`` is None."""

    architecture: str
    prebuilt: CubinSet | None

    def source_digests(self) -> list[str]:
        """SHA-256 of each cubin's source: cubins of one source have equal results, whichever compiler made them."""
        if self.prebuilt is not None:
            return sorted(entry["source_digest"] for entry in self.prebuilt.entries)
        from ..aot.matrix import units
        from ..aot.render import source_digest

        return sorted(map(source_digest, units([self.architecture])))


def architecture_of(device: torch.device) -> str:
    """Name of the architecture whose kernels serve ``device``; errors as of :func:`kernels_of`."""
    return kernels_of(device).architecture


def kernels_of(device: torch.device) -> Kernels:
    """The kernels that serve ``device``.

    ``ValueError`` where none do, with what is installed and what to do.
    """
    return find_kernels(load_manifest(), torch.cuda.get_device_capability(device), driver_version(), str(device))


def find_kernels(manifest: Manifest, capability: tuple[int, int], driver: tuple[int, int], device: str) -> Kernels:
    """Like :func:`kernels_of`, for a ``capability``, the ``driver``'s CUDA version and the device's name in the error.

    Prebuilt ones come first. An architecture of the build matrix that has none which the driver loads is compiled on
    this machine when its kernels are loaded.
    """
    prebuilt = manifest.find(capability, driver)
    if prebuilt is not None:
        return Kernels(prebuilt.architecture, prebuilt)
    from ..aot.matrix import ARCHITECTURES

    for architecture in ARCHITECTURES.values():
        if architecture.capability == capability:
            return Kernels(architecture.name, None)
    major, minor = capability
    raise ValueError(
        f"device must be a GPU that there are kernels for, was {device} of compute capability {major}.{minor}; "
        f"installed: {', '.join(manifest.architectures) or 'none'}; can be compiled: {', '.join(ARCHITECTURES)}. "
        "Use one of those, or pass backend='torch'"
    )


def _manifest_of(kernels: Kernels) -> tuple[Manifest, CubinSet]:
    """The set of cubins, compiled now where it is not prebuilt, and the manifest that it is in."""
    if kernels.prebuilt is not None:
        return load_manifest(), kernels.prebuilt
    from .jit import compiled_cubins

    manifest = compiled_cubins(kernels.architecture, driver_version())
    return manifest, manifest.sets[0]


def load_device(index: int) -> None:
    """Make every kernel resident on CUDA device ``index``. Does nothing the second time."""
    with _lock:
        if index in _loaded:
            return
        kernels = kernels_of(torch.device("cuda", index))
        manifest, cubins = _manifest_of(kernels)
        for entry in cubins.entries:
            module = native.load_cubin(index, manifest.read_cubin(entry))
            layout = LAYOUTS[entry["layout"]] if entry["layout"] else None
            page_size, world_size = (layout.page_size, layout.world_size) if layout else (0, 0)
            for kernel in entry["kernels"]:
                native.load_kernel(
                    index,
                    module,
                    page_size,
                    world_size,
                    kernel["role"],
                    kernel["symbol"],
                    kernel["threads"],
                    kernel["shared_bytes"],
                )
        native.mark_ready(index)
        _loaded[index] = cubins


def loaded_cubins(index: int) -> CubinSet | None:
    """The cubins that CUDA device ``index`` has loaded, None where it has none yet."""
    return _loaded.get(index)


native.use_device_loader(load_device)
