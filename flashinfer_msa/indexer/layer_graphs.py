# SPDX-License-Identifier: Apache-2.0
"""Layer graphs: one CUDA graph per layer, captured when a step repeats with the same buffers, and replayed later."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from ..layout import HEAD_DIM, NUM_HEADS, NUM_SLOT_SETS
from ..runtime import native
from ..sizing import require_int
from .steps import MSAIcpDecodeStep, MSAIcpPrefillStep, NotCopied

_MAX_SEEN_KEYS = 256
"""Maximum step keys without graphs whose steps are counted. It bounds memory when buffers never repeat."""


class MSAIcpLayerGraphs(NotCopied):
    """CUDA graphs of the layers of an indexer's steps. Made by :meth:`MSAIcpIndexerPlan.layer_graphs`.

    The key of a step holds every launch argument of its prepared steps except the query and the keys (addresses,
    shapes, strides and numbers), ``exchange_key``, ``decode_tokens`` and the query's shape. A server that reuses its
    buffers and pads its batches to a few sizes has few keys. The contents of the buffers may change from step to step:
    every replay reads them again.

    The first ``capture_after`` steps of a key run eagerly. The next step captures each of its layers and runs it. Later
    steps replay. A layer, slot or K shard that first appears later is captured then. Steps run eagerly where graphs
    cannot be captured: on the CPU, with ``backend="torch"``, and while the caller captures a graph. The caller's graph
    then contains the kernels.

    The graphs of a key hold references to its prepared steps, the K shards and the exchange, so no other tensor can
    reuse an address that a graph reads. :meth:`clear` frees them, and so does the end of ``with indexer.layer_graphs()
    as graphs``. Call it before the index-K cache is freed and before the exchange's process group is destroyed: NCCL
    would wait forever for graphs that have captured the exchange.

    A prepared step with ``debug`` is compared when a layer runs eagerly or is captured, but not when it is replayed.
    Run all steps from one thread, on one stream at a time. A decode layer may be captured on one rank while another
    rank runs it eagerly. With an exchange over NCCL, all ranks must run, capture or replay a layer alike. They do if
    they begin the same steps in the same order.

    Attributes
    ----------
    stats : collections.Counter
        ``eager_layers``, ``captured_layers`` (a captured layer also ran once), ``replayed_layers``, and
        ``evicted_keys``: an evicted key starts over if its step repeats.
    """

    def __init__(
        self, indexer: Any, device: torch.device, *, can_capture: bool, capture_after: int, max_keys: int
    ) -> None:
        self._indexer, self.device = indexer, device
        self._capture_after = require_int("capture_after", capture_after, 0)
        self._max_keys = require_int("max_keys", max_keys, 1)
        self._captures = can_capture
        # Both have the least recently used key first. A key is in at most one of them.
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._captured: OrderedDict[Hashable, _KeyGraphs] = OrderedDict()
        self.stats: Counter[str] = Counter(eager_layers=0, captured_layers=0, replayed_layers=0, evicted_keys=0)

    def __enter__(self) -> MSAIcpLayerGraphs:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __repr__(self) -> str:
        return (
            f"MSAIcpLayerGraphs({self._indexer!r}, capture_after={self._capture_after}, max_keys={self._max_keys}, "
            f"{len(self._captured)} keys with graphs)"
        )

    def begin_step(
        self,
        *,
        prefill: MSAIcpPrefillStep | None = None,
        decode: MSAIcpDecodeStep | None = None,
        exchange: Callable[[], Any] | None = None,
        exchange_key: Hashable = None,
        decode_tokens: int = 0,
    ) -> MSAIcpGraphStep:
        """Begin a step. Then run its layers one after another.

        Parameters
        ----------
        prefill : MSAIcpPrefillStep, optional
            The prefill part, from ``prepare_prefill_step`` of this indexer.
        decode : MSAIcpDecodeStep, optional
            The decode part, from ``prepare_decode_step`` of this indexer. Give at least one of the two parts.
        exchange : callable, optional
            A function without arguments that enqueues the all-to-all from the prefill step's ``send`` to its
            ``received`` on the current stream, such as ``lambda: exchange_carriers(send, received, group)``. Required
            with ``prefill``, and only allowed with it. It must be capturable in a CUDA graph. With ``capture_after=0``
            it must have run before, because a communicator cannot be set up during a capture.
        exchange_key : hashable, optional
            Identifies the exchange: a graph replays the exchange that was captured with the same key.
        decode_tokens : int
            The decode step's tokens, or 0 without a decode step.

        Returns
        -------
        MSAIcpGraphStep

        Raises
        ------
        ValueError
            If an argument is not as described.
        """
        self._require_step("prefill", prefill, MSAIcpPrefillStep)
        self._require_step("decode", decode, MSAIcpDecodeStep)
        if prefill is None and decode is None:
            raise ValueError("prefill or decode must be a step of this indexer, were both None")
        if prefill is None and exchange is not None:
            raise ValueError(f"exchange must be None without a prefill step, was {exchange!r}")
        if prefill is not None and not callable(exchange):
            raise ValueError(f"exchange must be callable with a prefill step, was {exchange!r}")
        try:
            hash(exchange_key)
        except TypeError:
            raise ValueError(f"exchange_key must be hashable, was {exchange_key!r}") from None
        expected = 0 if decode is None else decode.tokens
        if require_int("decode_tokens", decode_tokens, 0) != expected:
            whose = "0 without a decode step" if decode is None else f"the decode step's {expected}"
            raise ValueError(f"decode_tokens must be {whose}, was {decode_tokens}")

        tokens = expected + (0 if prefill is None else prefill.tokens)
        key = (
            None if prefill is None else prefill.key,
            None if decode is None else decode.key,
            exchange_key,
            expected,
            (tokens, NUM_HEADS, HEAD_DIM),
        )
        captures = self._captures and tokens > 0 and self._is_due(key)
        return MSAIcpGraphStep(self, key, prefill, decode, exchange, tokens, captures)

    def clear(self) -> None:
        """Free every graph and the objects it holds, and reset the step counts. ``stats`` are unchanged."""
        for graphs in self._captured.values():
            graphs.clear()
        self._captured.clear()
        self._seen.clear()

    def _require_step(self, name: str, step: Any, kind: type[MSAIcpPrefillStep | MSAIcpDecodeStep]) -> None:
        if step is None:
            return
        if not isinstance(step, kind):
            raise ValueError(f"{name} must be an {kind.__name__} or None, was {step!r}")
        if step.indexer is not self._indexer:
            raise ValueError(f"{name} must be a step of this indexer, {self._indexer!r}, was one of {step.indexer!r}")

    def _is_due(self, key: Hashable) -> bool:
        """Count a step of ``key``. Return whether it replays or captures graphs."""
        if key in self._captured:
            self._captured.move_to_end(key)
            return True
        steps = self._seen.pop(key, 0)
        self._seen[key] = steps + 1
        if len(self._seen) > _MAX_SEEN_KEYS:
            self._seen.popitem(last=False)
        return steps >= self._capture_after

    def _find(self, key: Hashable) -> _KeyGraphs | None:
        return self._captured.get(key)

    def _store(self, key: Hashable, graphs: _KeyGraphs) -> None:
        """Store a key's graphs as the most recently used. Evict a key if there are now more than ``max_keys``."""
        self._seen.pop(key, None)
        self._captured[key] = graphs
        self._captured.move_to_end(key)
        if len(self._captured) > self._max_keys:
            # An evicted key starts over: more keys than max_keys mostly run eagerly, instead of captured every time.
            _, evicted = self._captured.popitem(last=False)
            evicted.clear()
            self.stats["evicted_keys"] += 1


class MSAIcpGraphStep(NotCopied):
    """A step that has begun. Made by :meth:`MSAIcpLayerGraphs.begin_step`."""

    def __init__(
        self,
        owner: MSAIcpLayerGraphs,
        key: Hashable,
        prefill: MSAIcpPrefillStep | None,
        decode: MSAIcpDecodeStep | None,
        exchange: Callable[[], Any] | None,
        tokens: int,
        captures: bool,
    ) -> None:
        self._owner = owner
        self._key = key
        self._prefill = prefill
        self._decode = decode
        self._exchange = exchange
        self._captures = captures
        self._stats = owner.stats
        self._device = owner.device
        self._shape = (tokens, NUM_HEADS, HEAD_DIM)
        self._staging: torch.Tensor | None = None
        self._recorded_keys: tuple[Any, ...] | None = None
        self._layers: dict[tuple[Any, ...], _LayerGraph] = {}
        self._latest: dict[tuple[int, int, int], _LayerGraph] = {}
        graphs = owner._find(key)
        if graphs is not None:
            self._adopt(graphs)

    @property
    def query(self) -> torch.Tensor:
        """The buffer that the step's graphs read, float8_e4m3fn ``[T, 4, 128]``.

        A query that is written here and passed to :meth:`run` needs no copy. All layers of all steps of the same key
        share the buffer, so write a layer's query after the layer before it has run.
        """
        if self._staging is None:
            # It is written outside inference mode too.
            with torch.inference_mode(False):
                self._staging = torch.empty(self._shape, dtype=torch.float8_e4m3fn, device=self._device)
        return self._staging

    def run(self, layer: int, index_q: torch.Tensor, index_k: torch.Tensor, *, slot: int = 0) -> None:
        """Run one layer: decode, the local part of prefill, the exchange, the merge of prefill.

        Parameters
        ----------
        layer : int
            Index of the layer in the model, at least 0.
        index_q : torch.Tensor
            float8_e4m3fn ``[T, 4, 128]``, contiguous: the decode rows first, then the prefill rows. Graphs read a copy,
            which is made on the current stream.
        index_k : torch.Tensor
            This rank's key rows of the layer, as for :meth:`MSAIcpIndexerPlan.decode`. Do not call ``resize_`` or
            ``set_`` on a tensor that a layer has used: such a change would not be noticed.
        slot : int
            Slot set of the layer, as for :meth:`MSAIcpIndexerPlan.decode`. Only the decode part uses it.

        Raises
        ------
        ValueError
            If an argument is not as described, or a slot set is used again too early. Nothing has been launched then.
        RuntimeError
            If an earlier wait has run out, or a launch fails. Errors of the exchange are raised too. A layer whose
            capture fails has no graph; the next step of its key captures it again.
        """
        graph = self._find(layer, slot, index_k) if self._layers else None
        if graph is None or torch.cuda.is_current_stream_capturing():
            self._run_without_graph(layer, index_q, index_k, slot)
            return
        self._run_graph(graph, index_q, slot)
        self._stats["replayed_layers"] += 1

    def _find(self, layer: Any, slot: Any, index_k: Any) -> _LayerGraph | None:
        try:
            latest = self._latest.get((layer, slot, index_k.data_ptr()))
            if latest is not None and latest.keys is index_k:
                return latest
            graph = self._layers.get(_layer_key(layer, slot, index_k))
            if graph is not None and graph.keys is index_k:
                self._latest[layer, slot, index_k.data_ptr()] = graph
            return graph
        except (AttributeError, RuntimeError, TypeError):  # no tensor, no memory, or not hashable: refused later
            return None

    def _is_query(self, index_q: Any) -> bool:
        return (
            isinstance(index_q, torch.Tensor)
            and index_q.dtype is torch.float8_e4m3fn
            and index_q.shape == self._shape
            and index_q.is_contiguous()
            and index_q.device == self._device
        )

    def _require_query(self, index_q: Any) -> None:
        if self._is_query(index_q):
            return
        if not isinstance(index_q, torch.Tensor):
            was = repr(index_q)
        else:
            strides = f", strides {index_q.stride()}" if index_q.layout is torch.strided else f", {index_q.layout}"
            was = f"{index_q.dtype} {tuple(index_q.shape)} on {index_q.device}{strides}"
        raise ValueError(
            f"index_q must be a contiguous tensor of torch.float8_e4m3fn {self._shape} on {self._device}, the step's "
            f"decode rows and then its prefill rows, was {was}"
        )

    def _run_without_graph(self, layer: Any, index_q: Any, index_k: Any, slot: Any) -> None:
        require_int("layer", layer, 0)
        require_int("slot", slot, 0, NUM_SLOT_SETS - 1)
        self._require_query(index_q)
        if self._captures and not torch.cuda.is_current_stream_capturing():
            self._capture(layer, index_q, index_k, slot)
            self._stats["captured_layers"] += 1
            return
        if self._prefill is not None and self._decode is not None:
            self._record_prefill(index_q, index_k)
        self._launch(index_q, index_k, slot)
        self._stats["eager_layers"] += 1

    def _record_prefill(self, index_q: torch.Tensor, index_k: Any) -> None:
        """Run the prefill step's checks before the decode step launches, once per shape, strides and dtype of keys."""
        like = (index_k.shape, index_k.stride(), index_k.dtype) if isinstance(index_k, torch.Tensor) else None
        if like is None or like != self._recorded_keys:
            assert self._prefill is not None and self._decode is not None
            self._prefill.record(index_q[self._decode.tokens :], index_k)
            self._recorded_keys = like

    def _launch(self, index_q: torch.Tensor, index_k: torch.Tensor, slot: int) -> None:
        decode_tokens = 0
        if self._decode is not None:
            decode_tokens = self._decode.tokens
            self._decode.run(index_q[:decode_tokens], index_k, slot=slot)
        if self._prefill is not None:
            assert self._exchange is not None
            self._prefill.local(index_q[decode_tokens:], index_k)
            self._exchange()
            self._prefill.merge()

    def _capture(self, layer: int, index_q: torch.Tensor, index_k: torch.Tensor, slot: int) -> None:
        """Capture a layer, store its graph and run it."""
        graphs = self._owner._find(self._key) or _KeyGraphs({}, {}, self.query)
        self._adopt(graphs)
        staging, decode_tokens = graphs.staging, 0
        # Wrong keys or a wrong slot must be refused before a capture begins.
        around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._decode is not None:
            decode_tokens = self._decode.tokens
            self._decode.record(staging[:decode_tokens], index_k, slot=slot)
            around = self._decode.captured(slot)
        if self._prefill is not None:
            self._prefill.record(staging[decode_tokens:], index_k)
        # The pool of a live graph can be shared. A pool whose graphs are all freed cannot be used again.
        pool = next((graph.pool for graph in graphs.layers.values()), None) or _new_pool()
        launch = functools.partial(self._launch, staging, index_k, slot)
        with around:
            captured, replay = _capture(launch, self._device, pool)
        held = (captured, self._prefill, self._decode, self._exchange)
        graph = graphs.layers[_layer_key(layer, slot, index_k)] = _LayerGraph(replay, pool, index_k, held)
        self._owner._store(self._key, graphs)
        self._run_graph(graph, index_q, slot)

    def _adopt(self, graphs: _KeyGraphs) -> None:
        self._layers, self._latest, self._staging = graphs

    def _run_graph(self, graph: _LayerGraph, index_q: torch.Tensor, slot: int) -> None:
        if self._decode is not None:
            self._decode.require_slot(slot)
        native.invoke(graph.replay, self._staging, index_q)
        if self._decode is not None:
            self._decode.note_replay(slot)


class _LayerGraph(NamedTuple):
    """The graph of one layer, slot and K shard: its replay, the memory pool of its capture, and what it references."""

    replay: Callable[[torch.Tensor, torch.Tensor], Any]
    pool: Any
    keys: torch.Tensor
    held: tuple[Any, ...]


class _KeyGraphs(NamedTuple):
    """The graphs of one step key, by ``_layer_key``, and the query ``[T, 4, 128]`` that they all read.

    ``latest`` finds a graph faster, by layer, slot and the address of the keys. Its entry is valid only if the keys are
    the same tensor object as in the capture.
    """

    layers: dict[tuple[Any, ...], _LayerGraph]
    latest: dict[tuple[int, int, int], _LayerGraph]
    staging: torch.Tensor

    def clear(self) -> None:
        """Free the graphs. The dictionaries are emptied in place, because steps that have begun refer to them."""
        self.layers.clear()
        self.latest.clear()


def _layer_key(layer: int, slot: int, index_k: torch.Tensor) -> tuple[Any, ...]:
    return layer, slot, index_k.data_ptr(), index_k.shape, index_k.stride(), index_k.dtype


def _new_pool() -> Any:
    return torch.cuda.graph_pool_handle()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream to capture on. The caller's stream may be the default stream, which cannot be captured."""
    return torch.cuda.Stream(device)


def _capture(
    launch: Callable[[], None], device: torch.device, pool: Any
) -> tuple[Any, Callable[[torch.Tensor, torch.Tensor], Any]]:
    """Capture what ``launch`` enqueues on the current stream.

    Returns the graph and a function that replays it on the current stream. The function takes the staging buffer that
    the graph reads and a query, and copies the query into the buffer. It is valid as long as the graph lives.

    ``torch.cuda.graph`` would synchronize the device and empty torch's cache for every layer, while peers wait for this
    rank's rows.
    """
    current, stream = torch.cuda.current_stream(device), _capture_stream(device)
    # A capture writes to the random generator's device state, which the caller's graphs may read.
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a communicator's watchdog, may make calls that a capture forbids.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            launch()
        except BaseException:
            # End the stream's capture, but raise the original error.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(stream)
    return graph, functools.partial(native.operation("launch_graph"), graph.raw_cuda_graph_exec())
