# SPDX-License-Identifier: Apache-2.0
"""Backends: ``cake`` checks and launches kernels, ``torch`` checks and runs the reference.

Both take the arguments of ``msa_ops`` and check them in the same place, the native launcher.
"""

from __future__ import annotations

import functools

from .base import Backend

NAMES = ("cake", "torch")


def find_backend(name: str) -> Backend:
    """Return a backend by name; ``ValueError`` for one that does not exist."""
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f"backend must be one of {NAMES}, was {name!r}")
    return _make_backend(name)


@functools.cache
def _make_backend(name: str) -> Backend:
    if name == "cake":
        from .cake import CakeBackend

        return CakeBackend()
    from .torch import TorchBackend

    return TorchBackend()
