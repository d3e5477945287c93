# SPDX-License-Identifier: Apache-2.0
"""Custom operators for ``torch.compile``, one per operation of a backend. Eager calls do not use them.

An operator ``flashinfer_msa::<name>`` takes the arguments of one call (``calls``) and declares which of them it writes.
A plan is passed as lists of its tensors and numbers. An operator cannot declare stores through addresses into receive
rows. To keep such calls in a graph and in order, they all declare that they write one common argument. This is
``errors`` for publishers and merges. It is one word per device for the indexer's decode chains, which also orders ranks
that share a process.

The indexer's receive rows are not arguments. A compiler may pass an operator a copy of an argument, and rows that peers
store at any time would not reach the copy. Counters and ``errors`` are arguments, because only this rank writes them.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..abi.calls import (
    Decode,
    DecodeScore,
    Merge,
    PrefillLocal,
    PrefillMerge,
    PrefillPlan,
    PrefillScore,
    PrefillScoreSelect,
    ScorePublish,
    SelectPrefill,
    SelectPublish,
)
from ..prefill.window import MSAIcpScorePlan
from .handles import find_object
from .registry import find_eager_backend
from .storage import ReceiveStorage, StorageTable

_COUNTERS = ("publish_generations", "expected_generations", "errors")
"""Fields of receive storage that only this rank writes."""

_library = torch.library.Library("flashinfer_msa", "DEF")
_operators: dict[str, tuple[Any, tuple[str, ...]]] = {}
"""Operators and the names of their arguments, by name of the operator."""


def mark_static(*owners: Any) -> None:
    """Tell CUDA graph trees that the addresses of tensors do not change, so that graphs use them without a copy.

    ``torch.compile(mode="reduce-overhead")`` uses no CUDA graph for code that writes a tensor, unless the tensor is
    marked or is a buffer of a module. It copies all other unmarked inputs before every replay, including key caches.
    Call this function before the first call of the compiled code. Call it again for tensors that are made later.

    Parameters
    ----------
    *owners
        Tensors, lists or tuples of tensors, or objects with tensors as attributes: an indexer, receive storage, a
        prefill window's plan.

    Raises
    ------
    ValueError
        If an owner is none of these.
    """
    for owner in owners:
        if isinstance(owner, Tensor):
            torch._dynamo.mark_static_address(owner)
        elif isinstance(owner, (list, tuple)) and not hasattr(owner, "_fields"):
            mark_static(*owner)
        elif hasattr(owner, "__dict__") and not isinstance(owner, type):
            mark_static(*(value for value in vars(owner).values() if isinstance(value, Tensor)))
        else:
            raise ValueError(f"owners must be tensors, lists of them, or objects that have some, was {owner!r}")


class CompiledBackend:
    """A backend's operations as custom operators."""

    def __init__(self, name: str) -> None:
        self.name = name

    def decode_score(self, call: DecodeScore) -> None:
        _call("msa_icp_decode_index_score_sharded", call, self.name)

    def select_publish(self, call: SelectPublish) -> None:
        _call("msa_icp_topk_select_publish", call, self.name)

    def merge(self, call: Merge) -> None:
        _call("msa_icp_merge_candidates", call, self.name)

    def score_publish(self, call: ScorePublish) -> None:
        _call("msa_icp_decode_score_publish", call, self.name)

    def decode(self, storages: StorageTable, comm: Any, call: Decode) -> None:
        torch.ops.flashinfer_msa.decode.default(
            storages.handle,
            storages.handle_of(comm),
            storages.order.word,
            *call,
            *(getattr(comm, name) for name in _COUNTERS),
            self.name,
        )

    def prefill_plan(self, call: PrefillPlan) -> None:
        _call("msa_icp_index_score_sharded_plan_device", call, self.name)

    def prefill_score(self, call: PrefillScore) -> None:
        _call("msa_icp_index_score_sharded", call, self.name)

    def select_prefill(self, call: SelectPrefill) -> None:
        _call("msa_icp_topk_select_prefill", call, self.name)

    def prefill_score_select(self, call: PrefillScoreSelect) -> None:
        _call("msa_icp_prefill_score_select", call, self.name)

    def prefill_local(self, call: PrefillLocal) -> None:
        # Without a pool, the short scratch is not used. Leaving it out means that it need not be marked static.
        _call("prefill_local", call if call.pool is not None else call._replace(short_scratch=None), self.name)

    def prefill_merge(self, call: PrefillMerge) -> None:
        _call("prefill_merge", call, self.name)


def _call(operator: str, call: Any, backend: str) -> None:
    """Call an operator with the arguments of ``call``."""
    given = {**dict(zip(call._fields, call, strict=True)), "backend": backend}
    for name in ("plan", "window_plan"):
        if name in given:
            plan = given.pop(name)
            given[f"{name}_tensors"] = list(plan.tensors())
            given[f"{name}_numbers"] = list(plan.numbers())
    op, names = _operators[operator]
    op(**{name: given[name] for name in names})


# --- definitions ------------------------------------------------------------------------------------------------------


def _register(
    name: str, run: Callable[..., None], parameters: list[inspect.Parameter], mutates: tuple[str, ...]
) -> None:
    """Register ``run`` as the operator ``name``, which writes the arguments ``mutates``."""
    # A function has no such attribute for type checkers; `inspect.signature` reads it.
    run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(run, mutates_args=mutates, op_name=name)
    # Keep the strides of eager code: the kernels take pages with a pitch and slices of planes.
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, lambda *args, **kwargs: None, "Meta")
    operator = getattr(torch.ops.flashinfer_msa, name).default
    _operators[name] = operator, tuple(parameter.name for parameter in parameters)


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)


def _hints(call: type[NamedTuple]) -> dict[str, Any]:
    return typing.get_type_hints(call, localns={"Tensor": Tensor, "MSAIcpScorePlan": MSAIcpScorePlan})


def _define(name: str, call: type[Any], operation: str, *mutates: str) -> None:
    """Register an operation as an operator of a call's arguments, with a plan as two lists, and of the backend."""
    parameters, plan_at = [], None
    for i, (field, kind) in enumerate(_hints(call).items()):
        if kind is MSAIcpScorePlan:
            plan_at = i
            parameters += [_parameter(f"{field}_tensors", list[Tensor]), _parameter(f"{field}_numbers", list[int])]
        else:
            parameters.append(_parameter(field, kind))
    parameters.append(_parameter("backend", str))

    def run(*arguments: Any) -> None:
        *given, backend = arguments
        if plan_at is not None:
            tensors, numbers = given[plan_at : plan_at + 2]
            given[plan_at : plan_at + 2] = [MSAIcpScorePlan(*tensors, *numbers)]
        getattr(find_eager_backend(backend), operation)(call(*given))

    _register(name, run, parameters, mutates)


def _decode(storages: int, comm: int, order: Tensor, *arguments: Any) -> None:
    """The indexer's decode chain, or one of its halves."""
    *given, publish_generations, expected_generations, errors, backend = arguments
    table, storage = find_object(storages), find_object(comm)
    if table is None:
        raise RuntimeError("the indexer of this compiled code is gone: keep the one that it was compiled with")
    if storage is None:
        raise RuntimeError(
            "comm must be known to the indexer before compiled code uses it, and be an object that can be weakly "
            "referenced: call check_comm(comm) once"
        )
    # Replays of compiled code are not seen, so the last slot set is unknown, whichever counters they use.
    table.find(storage).slots.note(None)
    counters = (publish_generations, expected_generations, errors)
    if any(getattr(storage, name) is not tensor for name, tensor in zip(_COUNTERS, counters, strict=True)):
        # A compiler that does not write in place passes copies and copies them back.
        storage = ReceiveStorage(
            storage.recv, storage.tagged_recv, storage.recv_bases, storage.tagged_recv_bases, *counters
        )
    slots = table.find(storage).slots
    slots.note(None)
    try:
        find_eager_backend(backend).decode(table, storage, Decode(*given))
    finally:
        slots.note(None)


_define("msa_icp_decode_index_score_sharded", DecodeScore, "decode_score", "score_out")
_define("msa_icp_topk_select_publish", SelectPublish, "select_publish", "errors", "generations")
_define("msa_icp_decode_score_publish", ScorePublish, "score_publish", "pool", "errors", "generations")
_define("msa_icp_merge_candidates", Merge, "merge", "recv_slot", "output", "errors", "expected_generations")
_define(
    *("msa_icp_index_score_sharded_plan_device", PrefillPlan, "prefill_plan"),
    *("packed_work_range", "packed_work_info", "workspace"),
)
_define("msa_icp_index_score_sharded", PrefillScore, "prefill_score", "max_score")
_define("msa_icp_topk_select_prefill", SelectPrefill, "select_prefill", "carrier")
_define("msa_icp_prefill_score_select", PrefillScoreSelect, "prefill_score_select", "pool", "carrier")
_define("prefill_local", PrefillLocal, "prefill_local", "score_scratch", "carrier_view", "pool", "short_scratch")
_define("prefill_merge", PrefillMerge, "prefill_merge", "output")
_register(
    "decode",
    _decode,
    [
        _parameter("storages", int),
        _parameter("comm", int),
        _parameter("order", Tensor),
        *(_parameter(name, kind) for name, kind in _hints(Decode).items()),
        *(_parameter(name, Tensor) for name in _COUNTERS),
        _parameter("backend", str),
    ],
    ("order", "scores", "pool", "output", *_COUNTERS),
)
