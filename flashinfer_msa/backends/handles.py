# SPDX-License-Identifier: Apache-2.0
"""Arguments of operators in compiled code: integer handles stand for objects, and a word per device keeps the order."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch

UNKNOWN = -1
"""The handle of no object."""

_handles = itertools.count()
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register_object(thing: Any) -> int:
    """Make a handle of ``thing``, valid as long as it lives. ``TypeError`` if it cannot be weakly referenced."""
    handle = next(_handles)
    _objects[handle] = thing
    return handle


def find_object(handle: int) -> Any:
    """The object of a handle, or None if it no longer exists."""
    return _objects.get(handle)


class Order(torch.nn.Module):
    """Holds ``word``. Every decode chain on a device declares a write of it, so a compiler preserves their order.

    ``word`` is a buffer of a module, so compilers treat its address as constant.
    """

    word: torch.Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("word", torch.zeros(1, dtype=torch.uint8, device=device))


@functools.cache
def order_of(device: torch.device) -> Order:
    """The order of a device, shared by all its indexers."""
    return Order(device)
