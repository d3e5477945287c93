# SPDX-License-Identifier: Apache-2.0
"""Chains with everything bound but their query and keys, as each backend has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..runtime import native

DECODE_LAUNCHES = ("scorer", "publisher", "merge")
"""Of a decode chain."""
NUM_PUBLISH_LAUNCHES = 2
"""Of a decode chain, those of its first half."""
PREFILL_LAUNCHES = ("scorer", "selection")
"""Of a prefill window's local part."""


class RecordedChain:
    """Launches that the launcher has checked and recorded; see ``native/launch_record.h``."""

    def __init__(
        self,
        operation: str,
        arguments: Callable[[torch.Tensor | None, torch.Tensor | None], tuple[Any, ...]],
        num_valid_pages: torch.Tensor,
        tokens: int = 0,
        first_token: int = 0,
    ) -> None:
        """``arguments(query, keys)`` are the operation's; the query that a runner takes has ``tokens``."""
        self._operation, self._arguments = operation, arguments
        self._num_valid_pages = num_valid_pages
        self._query_tokens = (tokens, first_token)
        self._record = self._new_record()
        self._address = self._record.data_ptr()

    @staticmethod
    def _new_record() -> torch.Tensor:
        return torch.zeros(native.operation("launch_record_words")(), dtype=torch.int64, device="cpu")

    def _record_into(self, record: torch.Tensor, index_q: torch.Tensor | None, index_k: torch.Tensor | None) -> None:
        native.call(self._operation, record, *self._arguments(index_q, index_k))
        native.call("set_query_tokens", record, *self._query_tokens)

    def record(self, index_q: torch.Tensor | None, index_k: torch.Tensor | None) -> None:
        """Check everything and record it."""
        record = self._new_record()  # arguments that are refused leave the record as it was
        self._record_into(record, index_q, index_k)
        self._record.copy_(record)

    def runner(self, first: int, end: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        """What launches the recorded launches ``first`` to ``end`` with a query and keys."""
        return functools.partial(native.operation("replay"), self._address, first, end)

    def run_bound(self, first: int, end: int) -> None:
        """Launch recorded launches that read neither query nor keys."""
        native.call("replay_bound", self._address, first, end, self._num_valid_pages)

    def first_difference(self, index_q: torch.Tensor, index_k: torch.Tensor) -> int:
        """The first launch that the full path would make otherwise, or -1."""
        native.call("bind", self._address, index_q, index_k)
        fresh = self._new_record()
        self._record_into(fresh, index_q, index_k)
        return int(native.call("first_difference", self._record, fresh))


class CheckedCalls:
    """The torch backend's: every run is the full path, for tensors like the recorded ones."""

    def __init__(self, run: Callable[[torch.Tensor | None, torch.Tensor | None, int, int], None], tokens: int) -> None:
        """``run(query, keys, first, end)`` checks and computes launches ``first`` to ``end``."""
        self._run, self._tokens = run, tokens
        self._keys_layout: tuple[Any, ...] | None = None

    def record(self, index_q: torch.Tensor | None, index_k: torch.Tensor | None) -> None:
        """Check everything and remember what the keys are like."""
        self._run(index_q, index_k, 0, 0)
        self._keys_layout = None if index_k is None else _layout_of(index_k)

    def runner(self, first: int, end: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        """What runs that part of the full path with a query and keys."""

        def run(index_q: torch.Tensor, index_k: torch.Tensor) -> None:
            if self._keys_layout is not None:
                _require_layout(index_q, index_k, self._tokens, self._keys_layout)
            self._run(index_q, index_k, first, end)

        return run

    def run_bound(self, first: int, end: int) -> None:
        """Run the part of the full path that reads neither."""
        self._run(None, None, first, end)

    def first_difference(self, index_q: torch.Tensor, index_k: torch.Tensor) -> int:
        """-1: there is no other path."""
        return -1


def _layout_of(keys: torch.Tensor) -> tuple[Any, ...]:
    return tuple(keys.shape), keys.stride()


def _require_layout(query: Any, keys: Any, tokens: int, layout: tuple[Any, ...]) -> None:
    """Refuse tensors that are not like the recorded ones; what is common to all calls is checked by the call."""
    if isinstance(query, torch.Tensor) and query.dim() == 3 and query.shape[0] != tokens:
        raise ValueError(
            f"index_q must have shape [tokens of the step, heads, head dim] = [{tokens}, 4, 128], "
            f"was {list(query.shape)}"
        )
    if isinstance(keys, torch.Tensor) and keys.layout is torch.strided and _layout_of(keys) != layout:
        raise ValueError(
            f"index_k must have shape {list(layout[0])} and strides {list(layout[1])} like the step's, "
            f"had shape {list(keys.shape)} and strides {list(keys.stride())}"
        )
