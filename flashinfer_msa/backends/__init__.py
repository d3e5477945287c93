# SPDX-License-Identifier: Apache-2.0
"""Backends: ``cake`` checks and launches kernels, ``torch`` checks and runs the reference.

Both take the arguments of ``msa_ops`` and check them in the same place, the native launcher. In code that
``torch.compile`` traces, a backend's operations are operators, which importing this package registers.
"""

from __future__ import annotations

from typing import Any

import torch

from .base import Backend, Operations
from .compiled import CompiledBackend
from .registry import NAMES, find_eager_backend

__all__ = ["NAMES", "Backend", "Operations", "find_backend", "find_eager_backend"]


def find_backend(name: Any) -> Operations:
    """The operations that a call goes to, in compiled code those of operators."""
    if torch.compiler.is_compiling() and name in NAMES:
        return CompiledBackend(name)
    return find_eager_backend(name)
