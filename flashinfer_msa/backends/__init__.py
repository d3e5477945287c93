# SPDX-License-Identifier: Apache-2.0
"""Backends: ``cake`` checks and launches kernels, ``torch`` checks and runs the reference.

Both take the arguments of ``msa_ops`` and check them in the same place, the native launcher.
"""

from __future__ import annotations

import functools

from .base import Backend

NAMES = ("cake", "torch")


@functools.cache
def find_backend(name: str) -> Backend:
    """Return a backend by name; ``ValueError`` for one that does not exist."""
    if name == "cake":
        from .cake import CakeBackend

        return CakeBackend()
    if name == "torch":
        from .checked_reference import TorchBackend

        return TorchBackend()
    raise ValueError(f"backend must be one of {NAMES}, was {name!r}")
