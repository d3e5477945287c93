# SPDX-License-Identifier: Apache-2.0
"""What operators of compiled code are given in place of objects and of an order: integers, and a word per device."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch

UNKNOWN = -1
"""Stands for no object."""

_handles = itertools.count()
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register_object(thing: Any) -> int:
    """A new handle of ``thing``, valid as long as it lives; ``TypeError`` where it cannot be weakly referenced."""
    handle = next(_handles)
    _objects[handle] = thing
    return handle


def find_object(handle: int) -> Any:
    """The object of a handle, None where it is gone."""
    return _objects.get(handle)


class Order(torch.nn.Module):
    """``word``, which every decode chain on a device counts as written, so that a compiler keeps their order.

    It is a buffer of a module, so compilers take its address as constant.
    """

    word: torch.Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("word", torch.zeros(1, dtype=torch.uint8, device=device))


@functools.cache
def order_of(device: torch.device) -> Order:
    """The word of a device, the same for every indexer."""
    return Order(device)
