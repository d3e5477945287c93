# SPDX-License-Identifier: Apache-2.0
"""Prepared steps: all arguments that the layers of a step share are bound and checked once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..abi.calls import Decode
from ..backends.base import Chain
from ..backends.chains import DECODE_LAUNCHES, NUM_PUBLISH_LAUNCHES, PREFILL_LAUNCHES
from ..backends.storage import CheckedStorage, ReceiveStorage
from ..layout import HEAD_DIM, NUM_HEADS, NUM_SLOT_SETS, ROW_WORDS
from ..limits import Limits
from ..prefill.window import MSAIcpScorePlan, require_score_plan
from ..runtime import native
from ..sizing import require_int

Window = tuple[int, int, torch.Tensor, MSAIcpScorePlan]
"""A prefill step's tokens ``start`` to ``end``, their block table and plan."""


class NotCopied:
    """Refuses copies and pickles, because the addresses that it holds may be stale in a copy."""

    def __reduce__(self) -> Any:
        raise TypeError(f"an {type(self).__name__} cannot be copied or pickled, since it holds addresses: make another")


class MSAIcpDecodeStep(NotCopied):
    """A decode step of every layer. Made by :meth:`MSAIcpIndexerPlan.prepare_decode_step`.

    The first layer of each slot set runs all host checks. Later layers check that query and keys have the shape,
    strides, dtype and device of the first ones, and bind them. No method allocates on the device or synchronizes. Do
    not use it in code that ``torch.compile`` traces.

    Attributes
    ----------
    indexer : MSAIcpIndexerPlan
        The indexer that made it.
    tokens : int
        Query tokens.
    key : Hashable
        All launch arguments except query, keys and slot: addresses, shapes, strides and numbers.
    """

    def __init__(
        self,
        indexer: Any,
        storage: CheckedStorage,
        comm: Any,
        call: Decode,
        make_chain: Callable[[CheckedStorage, Decode], Chain],
        debug: bool,
    ) -> None:
        """``storage`` is the checked ``comm``. ``make_chain`` makes the chain of a call."""
        self.indexer = indexer
        self._call, self._comm, self._debug = call, comm, _require_flag("debug", debug)
        self._slots, self._recv = storage.slots, comm.recv
        self._slots.require(None, call.tagged)
        for name in ("num_valid_pages", "output"):
            if not isinstance(getattr(call, name), torch.Tensor):
                raise ValueError(f"{name} must be a dense tensor, was {getattr(call, name)!r}")
        self.tokens = call.num_valid_pages.numel()
        self._tagged = call.tagged
        self._chains = [make_chain(storage, call._replace(slot=slot)) for slot in range(NUM_SLOT_SETS)]
        self._bound = [False] * NUM_SLOT_SETS
        _record_all(self._chains, storage.limits, self.tokens)
        self._runs = [chain.runner(0, len(DECODE_LAUNCHES)) for chain in self._chains]
        self._publishes = [chain.runner(0, NUM_PUBLISH_LAUNCHES) for chain in self._chains]
        self._fingerprints = self._fingerprints_now()
        numbers = (call.tagged, call.enable_pdl, call.decode_query_len)
        self.key: Hashable = ("decode", id(indexer), numbers, tuple(self._fingerprints.items()))

    def _fingerprints_now(self) -> dict[str, Any]:
        tensors = {name: value for name, value in self._call._asdict().items() if name != "slot"}
        tensors.update((f"comm.{name}", getattr(self._comm, name, None)) for name in ReceiveStorage._fields)
        return {name: _fingerprint(value) for name, value in tensors.items()}

    def run(self, index_q: torch.Tensor, index_k: torch.Tensor, *, slot: int) -> None:
        """One layer: score, select and publish, merge. The arguments are those of :meth:`MSAIcpIndexerPlan.decode`.

        Raises
        ------
        ValueError
            If an argument is not as described, or differs from that of the slot set's first layer. Nothing has been
            launched then.
        RuntimeError
            If an earlier wait has run out, a launch fails, or the kernels are not resident while a graph is captured.
            With ``debug``, also if a launch would differ from that of the full path.
        """
        self._launch(self._runs, index_q, index_k, slot)

    def publish(self, index_q: torch.Tensor, index_k: torch.Tensor, *, slot: int) -> None:
        """The first half of :meth:`run`: score, select and publish."""
        self._launch(self._publishes, index_q, index_k, slot)

    def merge(self, *, slot: int) -> None:
        """The second half of :meth:`run`: merge the rows of this rank's heads."""
        refuse_tracing()
        _require_slot(slot)
        self._require_comm()
        if self._debug:
            _require_equal(self._fingerprints, self._fingerprints_now())
        self._chains[slot].run_bound(NUM_PUBLISH_LAUNCHES, len(DECODE_LAUNCHES))

    def record(self, index_q: torch.Tensor, index_k: torch.Tensor, *, slot: int) -> None:
        """Run all checks for layers of a slot set with tensors like these. Launch nothing."""
        _require_slot(slot)
        self._require_comm()
        self._chains[slot].record(index_q, index_k)
        self._bound[slot] = True

    def require_slot(self, slot: int) -> None:
        """Raise ``ValueError`` unless a layer may use this slot set now. Call it before replaying a captured layer."""
        _require_slot(slot)
        if self._comm.recv is not self._recv:  # repeated here to save a function call per layer
            self._require_comm()
        if self._tagged:
            self._slots.require(slot, True)

    @contextlib.contextmanager
    def captured(self, slot: int) -> Iterator[None]:
        """Capture a layer with this slot set inside. The capture uses no slot set; each replay does and notes it."""
        self.require_slot(slot)
        with self._slots.capturing():
            yield

    def note_replay(self, slot: int) -> None:
        """Record that a replay has launched a layer with this slot set."""
        if self._tagged:
            self._slots.note_replay(slot)

    def _require_comm(self) -> None:
        """Refuse receive storage that was closed or replaced: kernels would store into freed memory."""
        if self._comm.recv is not self._recv:
            raise ValueError(
                "comm must be as it was when the step was prepared, but its receive rows have been closed or replaced: "
                "prepare a new step"
            )

    def _launch(self, runners: list[Callable[..., Any]], index_q: Any, index_k: Any, slot: int) -> None:
        """Run a slot set's chain, or its first half."""
        self.require_slot(slot)
        if self._debug or not self._bound[slot]:
            self._prepare(index_q, index_k, slot)
        native.invoke(runners[slot], index_q, index_k)
        if self._tagged and self.tokens:  # otherwise no row was published
            self._slots.note(slot)

    def _prepare(self, index_q: torch.Tensor, index_k: torch.Tensor, slot: int) -> None:
        """Record the launches of a slot set's first layer. With ``debug``, compare them with the full path's."""
        refuse_tracing()
        if not self._bound[slot]:
            self.record(index_q, index_k, slot=slot)
        if self._debug:
            _require_equal(self._fingerprints, self._fingerprints_now())
            _require_same_launches(self._chains[slot], index_q, index_k, DECODE_LAUNCHES)


class MSAIcpPrefillStep(NotCopied):
    """A prefill step of every layer. Made by :meth:`MSAIcpIndexerPlan.prepare_prefill_step`.

    The first layer runs all host checks. Later layers check that query and keys have the shape, strides, dtype and
    device of the first ones, and bind them. No method allocates on the device or synchronizes. Do not use it in code
    that ``torch.compile`` traces.

    Attributes
    ----------
    indexer : MSAIcpIndexerPlan
        The indexer that made it.
    tokens : int
        Query tokens of the step.
    key : Hashable
        All launch arguments except query and keys: addresses, shapes, strides and numbers.
    """

    def __init__(
        self,
        indexer: Any,
        limits: Limits,
        windows: Iterable[Window],
        tensors: Mapping[str, torch.Tensor | None],
        local_chain: Callable[[Window], Chain],
        merge_chain: Callable[[], Chain],
        debug: bool,
    ) -> None:
        """``tensors`` are the step's tensors by name. ``local_chain`` and ``merge_chain`` make its chains."""
        self.indexer, self._debug = indexer, _require_flag("debug", debug)
        self.tokens, num_valid_pages = _require_send(tensors["send"]), tensors["num_valid_pages"]
        if not isinstance(num_valid_pages, torch.Tensor) or tuple(num_valid_pages.shape) != (self.tokens,):
            was = tuple(num_valid_pages.shape) if isinstance(num_valid_pages, torch.Tensor) else repr(num_valid_pages)
            raise ValueError(f"num_valid_pages must have shape [tokens of send] = [{self.tokens}], was {was}")
        self._windows = _require_windows(windows, self.tokens)
        self._tensors = tensors
        self._locals = [local_chain(window) for window in self._windows]
        self._merge = merge_chain()
        _record_all(self._locals, limits, self.tokens)
        self._merge.record(None, None)
        self._runs = [chain.runner(0, len(PREFILL_LAUNCHES)) for chain in self._locals]
        self._bound = False
        self._fingerprints = self._fingerprints_now()
        self.key: Hashable = ("prefill", id(indexer), tuple(self._fingerprints.items()))

    def _fingerprints_now(self) -> dict[str, Any]:
        fingerprints = {name: _fingerprint(value) for name, value in self._tensors.items()}
        for number, (start, end, block_table, window_plan) in enumerate(self._windows):
            fingerprints[f"windows[{number}]"] = (start, end)
            fingerprints[f"windows[{number}].block_table"] = _fingerprint(block_table)
            for name, value in vars(window_plan).items():
                fingerprints[f"windows[{number}].window_plan.{name}"] = _fingerprint(value)
        return fingerprints

    def local(self, index_q: torch.Tensor, index_k: torch.Tensor) -> None:
        """One layer's local part: score and select every window into the carrier.

        Parameters
        ----------
        index_q : torch.Tensor
            float8_e4m3fn ``[T, 4, 128]``, contiguous, 16-byte aligned: all tokens of the step.
        index_k : torch.Tensor
            As for :meth:`MSAIcpIndexerPlan.decode`.

        Raises
        ------
        ValueError
            If an argument is not as described, or differs from that of the first layer. Nothing has been launched then.
        RuntimeError
            If a launch fails, or the kernels are not resident while a graph is captured. With ``debug``, also if a
            launch would differ from that of the full path.
        """
        if self._debug or not self._bound:
            self._prepare(index_q, index_k)
        for run in self._runs:
            native.invoke(run, index_q, index_k)

    def _prepare(self, index_q: torch.Tensor, index_k: torch.Tensor) -> None:
        """Record the launches of the first layer. With ``debug``, compare them with the full path's."""
        refuse_tracing()
        if not self._bound:
            self.record(index_q, index_k)
        if self._debug:
            _require_equal(self._fingerprints, self._fingerprints_now())
            for chain in self._locals:
                _require_same_launches(chain, index_q, index_k, PREFILL_LAUNCHES)

    def merge(self) -> None:
        """Merge the received rows of the heads that this rank owns."""
        refuse_tracing()
        if self._debug:
            _require_equal(self._fingerprints, self._fingerprints_now())
        self._merge.run_bound(0, 1)

    def record(self, index_q: torch.Tensor, index_k: torch.Tensor) -> None:
        """Run all checks for layers with tensors like these. Launch nothing."""
        for chain in self._locals:
            chain.record(index_q, index_k)
        self._bound = True


def refuse_tracing() -> None:
    """Break the graph if ``torch.compile`` traces eager-only code. With ``fullgraph``, this is an error of torch."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="prepared steps and layer graphs are for eager code: call the indexer's methods in compiled code"
        )


def _require_slot(slot: Any) -> None:
    if slot.__class__ is not int or not 0 <= slot < NUM_SLOT_SETS:
        require_int("slot", slot, 0, NUM_SLOT_SETS - 1)


def _record_all(chains: Iterable[Chain], limits: Limits, tokens: int) -> None:
    """Record chains with a valid query and valid keys, so that all other arguments are checked."""
    e4m3: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "device": limits.device}
    query, keys = torch.empty(tokens, NUM_HEADS, HEAD_DIM, **e4m3), torch.empty(1, limits.layout.rows, HEAD_DIM, **e4m3)
    for chain in chains:
        chain.record(query, keys)


def _fingerprint(value: Any) -> Any:
    """The properties of an argument that a launch uses. Equal fingerprints make equal launches."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value.device
    return value


def _require_equal(prepared: dict[str, Any], now: dict[str, Any]) -> None:
    for name, fingerprint in prepared.items():
        if now[name] != fingerprint:
            raise RuntimeError(
                f"{name} is not what the step was prepared with: {_describe(fingerprint)} then, "
                f"{_describe(now[name])} now. Prepare a new step when its tensors change"
            )


def _describe(fingerprint: Any) -> str:
    if not isinstance(fingerprint, tuple) or len(fingerprint) < 5:
        return repr(fingerprint)
    address, shape, strides, dtype, device = fingerprint
    return f"{dtype} {list(shape)} with strides {list(strides)} at {address:#x} on {device}"


def _require_same_launches(chain: Chain, index_q: Any, index_k: Any, names: tuple[str, ...]) -> None:
    different = chain.first_difference(index_q, index_k)
    if different >= 0:
        raise RuntimeError(
            f"the {names[different]} that the step would launch is not the one of the full path, with the same "
            "arguments: this is a defect of flashinfer_msa; run without the prepared step, and report it"
        )


def _require_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, was {value!r}")
    return value


def _require_send(send: Any) -> int:
    """Check a step's carrier and return its number of tokens."""
    if not isinstance(send, torch.Tensor) or send.layout is not torch.strided or send.is_nested:
        raise ValueError(f"send must be a dense tensor of shape [{NUM_HEADS}, tokens, {ROW_WORDS}], was {send!r}")
    if send.dim() != 3 or send.shape[0] != NUM_HEADS or send.shape[2] != ROW_WORDS:
        raise ValueError(f"send must have shape [{NUM_HEADS}, tokens, {ROW_WORDS}], was {list(send.shape)}")
    if send.dtype is not torch.int32:
        raise ValueError(f"send must be torch.int32, was {send.dtype}")
    tokens, (head, row, _) = send.shape[1], send.stride()
    # Each window is checked by itself, so only this check sees rows of different windows overlap.
    if tokens > 1 and (row < ROW_WORDS or head < tokens * row):
        raise ValueError(
            f"send must have rows that do not overlap, with strides of at least "
            f"[{tokens} * the row stride, {ROW_WORDS}, 1], had {list(send.stride())}"
        )
    return tokens


def _require_windows(windows: Any, tokens: int) -> list[Window]:
    """Check a step's windows: in order, disjoint, within its tokens, each with a plan of the window's size."""
    if not isinstance(windows, Iterable) or isinstance(windows, (str, torch.Tensor)):
        raise ValueError(f"windows must be a sequence of (start, end, block_table, window_plan), was {windows!r}")
    checked = []
    last = 0
    for number, window in enumerate(windows):
        if not isinstance(window, (tuple, list)) or len(window) != 4:
            raise ValueError(f"windows[{number}] must be (start, end, block_table, window_plan), was {window!r}")
        start, end, block_table, window_plan = window
        require_int(f"start of windows[{number}]", start, last, tokens)
        require_int(f"end of windows[{number}]", end, start + 1, tokens)
        require_score_plan(f"window_plan of windows[{number}]", window_plan)
        if window_plan.total_q != end - start:
            raise ValueError(
                f"window_plan of windows[{number}] must have total_q == end - start == {end - start}, "
                f"was {window_plan.total_q}"
            )
        checked.append((start, end, block_table, window_plan))
        last = end
    if not checked:
        raise ValueError("windows must hold at least one window, was empty")
    return checked
