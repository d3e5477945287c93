# SPDX-License-Identifier: Apache-2.0
"""Backends: ``cake`` checks and launches kernels, ``torch`` checks and runs the reference.

Both take the arguments of ``msa_ops``, and the native launcher checks them for both. In code that ``torch.compile``
traces, a backend's operations are custom operators. Importing this package registers them.
"""

from __future__ import annotations

from typing import Any

import torch

from .base import Backend, Operations
from .compiled import CompiledBackend
from .registry import NAMES, find_eager_backend

__all__ = ["NAMES", "Backend", "Operations", "find_backend", "find_eager_backend"]


def find_backend(name: Any) -> Operations:
    """The operations of a backend. In compiled code, they are custom operators."""
    if torch.compiler.is_compiling() and name in NAMES:
        return CompiledBackend(name)
    return find_eager_backend(name)
