# SPDX-License-Identifier: Apache-2.0
"""Receive storage that other processes store into: where this process has mapped it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_mapped: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Storages by their addresses, for as long as their owners keep them."""


def add(storages: Sequence[torch.Tensor]) -> None:
    """Know these contiguous tensors as mapped by several processes, for as long as they live."""
    for storage in storages:
        _mapped[storage.data_ptr()] = storage


def forget(storages: Sequence[torch.Tensor]) -> None:
    """Know them no more."""
    for storage in storages:
        if _mapped.get(storage.data_ptr()) is storage:
            del _mapped[storage.data_ptr()]


def find(address: int) -> torch.Tensor | None:
    """The mapped storage that an address of this process points into, or None."""
    for start, storage in _mapped.items():
        if start <= address < start + storage.nbytes:
            return storage
    return None
