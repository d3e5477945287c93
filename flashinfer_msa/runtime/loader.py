# SPDX-License-Identifier: Apache-2.0
"""Loads the cubins that fit a device into its context, and makes every kernel resident there."""

from __future__ import annotations

import threading

import torch

from ..layout import LAYOUTS
from . import native
from .manifest import Manifest, load_manifest

_lock = threading.Lock()
_loaded: dict[int, str] = {}


def architecture_of(device: torch.device) -> str:
    """Name of the installed architecture that serves ``device``.

    ``ValueError`` where none does, with what is installed and what to do.
    """
    return find_architecture(load_manifest(), torch.cuda.get_device_capability(device), str(device))


def find_architecture(manifest: Manifest, capability: tuple[int, int], device: str) -> str:
    """Like :func:`architecture_of`, for a ``capability`` and a name of the device in the error."""
    architecture = manifest.architecture_for(capability)
    if architecture is None:
        major, minor = capability
        raise ValueError(
            f"device must be a GPU that kernels are installed for, was {device} of compute capability {major}.{minor}; "
            f"installed: {', '.join(manifest.architectures) or 'none'}. Build them for this GPU with `flashinfer-msa "
            f"build --arch NAME` if `flashinfer-msa build --help` lists its architecture, or pass backend='torch'"
        )
    return architecture


def load_device(index: int) -> None:
    """Make every installed kernel resident on CUDA device ``index``. Does nothing the second time."""
    with _lock:
        if index in _loaded:
            return
        manifest = load_manifest()
        architecture = architecture_of(torch.device("cuda", index))
        for entry in manifest.cubins(architecture):
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
        _loaded[index] = architecture
