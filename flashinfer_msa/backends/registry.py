# SPDX-License-Identifier: Apache-2.0
"""Finds backends by name."""

from __future__ import annotations

from typing import Any

from .base import Backend

NAMES = ("cake", "torch")

_backends: dict[str, Backend] = {}


def find_eager_backend(name: Any) -> Backend:
    """The backend with this name, whose operations run eagerly. ``ValueError`` if there is none."""
    backend = _backends.get(name) if isinstance(name, str) else None
    return _make_backend(name) if backend is None else backend


def _make_backend(name: Any) -> Backend:
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f"backend must be one of {NAMES}, was {name!r}")
    if name == "cake":
        from .cake import CakeBackend

        return _backends.setdefault(name, CakeBackend())
    from .torch_backend import TorchBackend

    return _backends.setdefault(name, TorchBackend())
