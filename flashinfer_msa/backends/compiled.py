# SPDX-License-Identifier: Apache-2.0
"""Custom operators: what ``torch.compile`` sees of the functions and the facade. Eager calls do not pass through here.

Every function of ``msa_ops`` that launches is an operator ``flashinfer_msa::<its name>`` with its arguments, a plan as
lists of its tensors and of its numbers; ``decode``, ``prefill_local`` and ``prefill_merge`` are the facade's. An
operator declares which of its arguments it writes. Nothing can declare what it stores through addresses, into receive
rows. What keeps such calls in a graph, and in order, is an argument that they all write: ``errors`` for publishers and
merges, and one word a device for the facade's chains, so that those of ranks that share a process are in order too.

The facade's receive rows are not arguments at all. Peers store into them at any time, and a compiler may give an
operator a copy of an argument, which no peer's rows reach. Counters and ``errors``, which this rank alone writes, are.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import backends
from ..prefill.window import MSAIcpScorePlan
from . import Backend
from .calls import (
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
from .storage import ReceiveStorage

if TYPE_CHECKING:
    from ..indexer import MSAIcpIndexerPlan

_COUNTERS = ("publish_generations", "expected_generations", "errors")
"""Fields of receive storage that this rank alone writes."""
_UNKNOWN = -1

_library = torch.library.Library("flashinfer_msa", "DEF")
_operators: dict[str, tuple[Any, tuple[str, ...]]] = {}
"""By name: an operator and the names of its arguments."""
_numbers = itertools.count()
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def find_backend(name: str) -> Backend:
    """The backend that a call goes to: in compiled code, one that calls operators."""
    if torch.compiler.is_compiling() and name in backends.NAMES:
        return _CompiledBackend(name)
    return backends.find_backend(name)


def mark_static(*owners: Any) -> None:
    """Tell CUDA graph trees that tensors stay where they are, so that they are used in place and not copied.

    ``torch.compile(mode="reduce-overhead")`` uses no CUDA graph for code that writes tensors which are neither marked
    nor buffers of a module, and copies other inputs that are not, key caches among them, before every replay.

    Parameters
    ----------
    *owners
        Tensors, lists or tuples of them, or objects whose attributes they are: an indexer, receive storage, a prefill
        window's plan. Before the first call of the compiled code; tensors that are made later are marked again.

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


# --- definitions ------------------------------------------------------------------------------------------------------


def define(function: Callable[..., Any], *mutates: str, name: str | None = None) -> None:
    """Make ``function`` an operator that writes the arguments ``mutates``. It returns nothing, whatever the function.

    A parameter that is a prefill plan becomes two, ``<its name>_tensors`` and ``<its name>_numbers``.
    """
    name = name or function.__name__
    signature, hints = inspect.signature(function), typing.get_type_hints(function)
    parameters, plan_at = [], None
    for i, parameter in enumerate(signature.parameters.values()):
        if hints[parameter.name] is MSAIcpScorePlan:
            plan_at = i
            for suffix, kind in (("tensors", list[Tensor]), ("numbers", list[int])):
                parameters.append(parameter.replace(name=f"{parameter.name}_{suffix}", annotation=kind))
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    def run(*args: Any, **kwargs: Any) -> None:
        if plan_at is not None:
            tensors, numbers = args[plan_at : plan_at + 2]
            args = (*args[:plan_at], MSAIcpScorePlan(*tensors, *numbers), *args[plan_at + 2 :])
        function(*args, **kwargs)

    run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(run, mutates_args=mutates, op_name=name)
    # Strides as they are in eager code: pages with a pitch and slices of planes are what the kernels take.
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, lambda *args, **kwargs: None, "Meta")
    operator = getattr(torch.ops.flashinfer_msa, name).default
    _operators[name] = operator, tuple(parameter.name for parameter in parameters)


def _plan_parts(plan: MSAIcpScorePlan) -> tuple[list[Tensor], list[int]]:
    return list(plan.tensors()), [plan.total_q, plan.num_qo_heads, plan.batch, plan.max_query_len, plan.columns]


def _call(operator: str, call: Any, **others: Any) -> None:
    """Call an operator with the arguments of a call that it has."""
    given = {**dict(zip(call._fields, call, strict=True)), **others}
    for name in ("plan", "window_plan"):
        if name in given:
            given[f"{name}_tensors"], given[f"{name}_numbers"] = _plan_parts(given[name])
    op, names = _operators[operator]
    op(**{name: given[name] for name in names})


class _CompiledBackend:
    """A backend's operations as operators."""

    def __init__(self, name: str) -> None:
        self.name = name

    def decode_score(self, call: DecodeScore) -> None:
        _call("msa_icp_decode_index_score_sharded", call, backend=self.name)

    def select_publish(self, call: SelectPublish) -> None:
        _call("msa_icp_topk_select_publish", call, backend=self.name)

    def merge(self, call: Merge) -> None:
        _call("msa_icp_merge_candidates", call, backend=self.name)

    def score_publish(self, call: ScorePublish) -> None:
        _call("msa_icp_decode_score_publish", call, backend=self.name)

    def prefill_plan(self, call: PrefillPlan) -> None:
        _call("msa_icp_index_score_sharded_plan_device", call, backend=self.name)

    def prefill_score(self, call: PrefillScore) -> None:
        _call("msa_icp_index_score_sharded", call, accumulation=_accumulation(call.exact), backend=self.name)

    def select_prefill(self, call: SelectPrefill) -> None:
        _call("msa_icp_topk_select_prefill", call, backend=self.name)

    def prefill_score_select(self, call: PrefillScoreSelect) -> None:
        _call("msa_icp_prefill_score_select", call, accumulation=_accumulation(call.exact), backend=self.name)

    def prefill_local(self, call: PrefillLocal) -> None:
        # Without a pool it is not used, and need not be static.
        scratch = call.short_scratch if call.pool is not None else None
        _call("prefill_local", call, short_scratch=scratch, backend=self.name)

    def prefill_merge(self, call: PrefillMerge) -> None:
        _call("prefill_merge", call, backend=self.name)


def _accumulation(exact: bool) -> str:
    return "exact" if exact else "tensor"


def _define_call(call: type[PrefillLocal] | type[PrefillMerge], name: str, *mutates: str) -> None:
    """Make a backend's operation of the facade an operator, with the arguments of its call."""

    def run(*args: Any, backend: str) -> None:
        getattr(backends.find_backend(backend), name)(call(*args))

    own = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, annotation=str)
    run.__signature__ = inspect.Signature([*inspect.signature(call).parameters.values(), own])  # type: ignore[attr-defined]
    run.__annotations__ = {**typing.get_type_hints(call), "backend": str}
    define(run, *mutates, name=name)


# --- the facade's decode chain ----------------------------------------------------------------------------------------


class Known:
    """What compiled code knows an indexer and its receive storage by, since an operator takes no objects.

    Attributes
    ----------
    indexer : int
        Number of the indexer.
    comms : dict
        Numbers of receive storage that it has checked, by ``id``.
    order : torch.nn.Module
        ``order.word``, a buffer that every chain on the device counts as written.
    """

    def __init__(self, indexer: MSAIcpIndexerPlan) -> None:
        self.indexer = _register(indexer)
        self.comms: dict[int, int] = {}
        self.order = _order(indexer.device)

    def add(self, comm: Any) -> None:
        """Number receive storage that has been checked."""
        if _objects.get(self.comms.get(id(comm), _UNKNOWN)) is comm:
            return
        try:
            self.comms[id(comm)] = _register(comm)
        except TypeError:
            self.comms.pop(id(comm), None)  # its end could not be noticed, nor then that its id is another's


class _Order(torch.nn.Module):
    """A word; a buffer of a module, so that compilers take its address as constant."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("word", torch.zeros(1, dtype=torch.uint8, device=device))


@functools.cache
def _order(device: torch.device) -> _Order:
    return _Order(device)


def _register(thing: Any) -> int:
    number = next(_numbers)
    _objects[number] = thing
    return number


def _decode(
    indexer: int,
    comm: int,
    order: Tensor,
    publishes: bool,
    merges: bool,
    slot: int,
    tagged: bool,
    enable_pdl: bool,
    num_valid_pages: Tensor,
    index_q: Tensor | None,
    index_k: Tensor | None,
    block_table: Tensor | None,
    seq_lens: Tensor | None,
    scores: Tensor | None,
    pool: Tensor | None,
    decode_query_len: int,
    output: Tensor | None,
    publish_generations: Tensor,
    expected_generations: Tensor,
    errors: Tensor,
) -> None:
    """The facade's decode chain, or one of its halves."""
    plan, storage = _objects.get(indexer), _objects.get(comm)
    if plan is None:
        raise RuntimeError("the indexer of this compiled code is gone: keep the one that it was compiled with")
    if storage is None:
        raise RuntimeError(
            "comm must be known to the indexer before compiled code uses it, and be an object that can be weakly "
            "referenced: call check_comm(comm) once"
        )
    given = (publish_generations, expected_generations, errors)
    known = storage
    if any(getattr(storage, name) is not tensor for name, tensor in zip(_COUNTERS, given, strict=True)):
        # A compiler that does not write in place hands over copies, and copies them back.
        storage = ReceiveStorage(
            storage.recv, storage.tagged_recv, storage.recv_bases, storage.tagged_recv_bases, *given
        )
    form: dict[str, Any] = {"comm": storage, "slot": slot, "tagged": tagged, "enable_pdl": enable_pdl}
    half = {"decode_query_len": decode_query_len, "pool": pool}
    keys = (index_q, index_k, block_table, seq_lens)
    # Replays of compiled code are not seen here, whichever counters it uses.
    plan._comm_state(known).note(None)
    plan._comm_state(storage).note(None)
    try:
        if not publishes:
            plan.decode_merge(num_valid_pages, output, **form)
        elif merges:
            plan.decode(*keys, num_valid_pages, scores, output, **half, **form)
        else:
            plan.decode_publish(*keys, num_valid_pages, scores, **half, **form)
    finally:
        plan._comm_state(storage).note(None)


def decode(
    known: Known,
    comm: Any,
    slot: int,
    tagged: bool,
    enable_pdl: bool,
    num_valid_pages: Tensor,
    half: tuple[Any, ...] | None,
    output: Tensor | None,
    *,
    merges: bool = True,
) -> None:
    """Call the operator of the decode chain; ``half`` is what it publishes from, as ``PublishHalf`` has it, or None."""
    torch.ops.flashinfer_msa.decode.default(
        known.indexer,
        known.comms.get(id(comm), _UNKNOWN),
        known.order.word,
        half is not None,
        merges,
        slot,
        tagged,
        enable_pdl,
        num_valid_pages,
        *((None, None, None, None, None, None, 0) if half is None else half),
        output,
        comm.publish_generations,
        comm.expected_generations,
        comm.errors,
    )


define(_decode, "order", "scores", "pool", "output", *_COUNTERS, name="decode")
_define_call(PrefillLocal, "prefill_local", "score_scratch", "carrier_view", "pool", "short_scratch")
_define_call(PrefillMerge, "prefill_merge", "output")
