# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M3's index-context-parallel indexer as a ``cake`` backend for FlashInfer's ``msa_ops`` namespace.

``flashinfer_msa.msa_ops`` holds the functions and ``flashinfer_msa.comm`` the receive storage. ``register`` adds the
functions to ``flashinfer.msa_ops``. ``last_fault`` returns the record of a wait that ran out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import comm, msa_ops
    from .integrations.flashinfer import Registration, register, registered, unregister
    from .runtime.fault import Fault
    from .runtime.native import last_fault

__all__ = [
    "Fault",
    "Registration",
    "__version__",
    "comm",
    "last_fault",
    "msa_ops",
    "register",
    "registered",
    "unregister",
]

_MODULE_OF = {
    **dict.fromkeys(("Registration", "register", "registered", "unregister"), ".integrations.flashinfer"),
    "Fault": ".runtime.fault",
    "last_fault": ".runtime.native",
}


def __getattr__(name: str) -> Any:
    # The builder imports this package without torch, so modules that need torch are imported at first use.
    if name in ("comm", "msa_ops"):
        return importlib.import_module(f".{name}", __name__)
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
