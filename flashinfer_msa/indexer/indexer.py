# SPDX-License-Identifier: Apache-2.0
"""The facade: one rank's indexer, built once from the serving limits and used by every layer of every step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..backends import compiled as custom_ops
from ..backends.base import Chain
from ..backends.calls import DecodeChain, PrefillLocal, PrefillMerge, PrefillPlan
from ..backends.compiled import find_backend
from ..backends.storage import NO_STORAGE, CheckedStorage, require_receive_storage
from ..layout import MAX_FORCED_BLOCKS, MAX_QUERY_LEN, MAX_SCORE_COLUMNS, NUM_HEADS, ROW_WORDS, find_layout
from ..prefill.accumulation import is_exact
from ..prefill.tuning import prefill_tuning
from ..prefill.window import MSAIcpScorePlan, require_score_plan
from ..sizing import (
    MAX_WINDOW_TOKENS,
    ceil_div,
    msa_icp_comm_layout,
    msa_icp_decode_score_columns,
    msa_icp_index_score_columns,
    msa_icp_index_score_plan_storage,
    msa_icp_prefill_pool_bytes,
    require_int,
    require_page_size,
    require_world_size,
)
from .layer_graphs import MSAIcpLayerGraphs
from .steps import MSAIcpDecodeStep, MSAIcpPrefillStep, Window, refuse_tracing

_SPIN_LIMIT = 1 << 26
_SCRATCH_BUDGET_BYTES = 256 << 20
_CHUNK_TOKENS = 128
_PITCH_COLUMNS = 16


class MSAIcpIndexerPlan:
    """One rank's indexer. Made by :func:`prepare_msa_icp_indexer`.

    No method synchronizes, and none allocates on the device but those that prepare: ``prepare_decode_step`` and
    ``prepare_prefill_step``, for their checks alone, and ``layer_graphs``. Methods launch on torch's current stream.
    The calls of one indexer follow one another on one stream at a time, since its window plans and scratch are shared.

    Attributes
    ----------
    world_size, rank, num_index_heads, page_size, init_blocks, local_blocks, max_decode_tokens, max_decode_query_len, \
max_num_batched_tokens, max_num_seqs, max_model_len, num_sparse_layers, device, backend, spin_limit, wait_seconds, \
accumulation
        As given to the constructor function, ``device`` with its index filled in.
    arch : str
        Architecture of the cubins that serve the device, such as ``"sm_90a"``; its type with ``backend="torch"``.
    heads_per_rank : int
        Heads whose selection this rank owns, ``4 / world_size``.
    index_scale, index_offset : int
        Local score column ``c`` is global block ``c * index_scale + index_offset``.
    comm_layout : dict
        ``msa_icp_comm_layout(world_size, heads_per_rank, max_decode_tokens)``.
    decode_score_columns, prefill_score_columns : int
        Score columns of a decode step; row pitch of a prefill window's scores (columns rounded up to 16).
    max_prefill_windows : int
        Windows that a step of ``max_num_batched_tokens`` may take, all full but the last.
    fused_decode_min_batch
        When the fused decode chain is the default: ``None``, for never. Measured on an H200, it takes longer than the
        separate one at every batch.
    fused_prefill : bool
        Whether :meth:`prefill_local` is better given a pool.
    prefill_short_tokens : int
        Windows of at most so many tokens run the separate chain even with a pool, in scratch that the indexer owns.
    """

    @torch.inference_mode(False)  # what it owns is written outside inference mode too
    def __init__(
        self,
        *,
        world_size: int,
        rank: int,
        num_index_heads: int,
        page_size: int,
        init_blocks: int,
        local_blocks: int,
        max_decode_tokens: int,
        max_decode_query_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_sparse_layers: int,
        device: Any,
        backend: str,
        spin_limit: int,
        wait_seconds: float | None,
        accumulation: str,
    ) -> None:
        implementation = find_backend(backend)
        self.world_size = require_world_size(world_size)
        self.rank = require_int("rank", rank, 0, self.world_size - 1)
        self.num_index_heads = require_int("num_index_heads", num_index_heads, NUM_HEADS, NUM_HEADS)
        self.page_size = require_page_size(page_size)
        self.init_blocks = require_int("init_blocks", init_blocks, 0, MAX_FORCED_BLOCKS)
        self.local_blocks = require_int("local_blocks", local_blocks, 0, MAX_FORCED_BLOCKS)
        if init_blocks + local_blocks > MAX_FORCED_BLOCKS:
            raise ValueError(
                f"init_blocks + local_blocks must be at most {MAX_FORCED_BLOCKS}, was {init_blocks} + {local_blocks}"
            )
        self.max_decode_tokens = require_int("max_decode_tokens", max_decode_tokens, 1, (2**31 - 1) // NUM_HEADS)
        self.max_decode_query_len = require_int("max_decode_query_len", max_decode_query_len, 1, MAX_QUERY_LEN)
        self.max_num_batched_tokens = require_int("max_num_batched_tokens", max_num_batched_tokens, 1, 2**31 - 1)
        self.max_num_seqs = require_int("max_num_seqs", max_num_seqs, 1, 2**31 - 1)
        self.max_model_len = require_int("max_model_len", max_model_len, 1, 2**31 - 1)
        self.num_sparse_layers = require_int("num_sparse_layers", num_sparse_layers, 1)
        self.spin_limit = require_int("spin_limit", spin_limit, 1, 2**31 - 1)
        self.wait_seconds = wait_seconds
        self._wait_ns = _nanoseconds(wait_seconds)
        self._exact = is_exact(accumulation)
        self.accumulation = accumulation
        self.backend = backend
        self.device, self.arch = implementation.resolve_device(device)

        self.layout = find_layout(self.page_size, self.world_size)
        self.heads_per_rank = self.layout.heads_per_rank
        self.index_scale = self.layout.index_scale
        self.index_offset = self.layout.index_offset(self.rank)
        self.comm_layout = msa_icp_comm_layout(self.world_size, self.heads_per_rank, self.max_decode_tokens)
        self.decode_score_columns = msa_icp_decode_score_columns(self.max_model_len, self.page_size)
        self.prefill_score_columns = self._pitch(self.max_model_len)
        self.max_prefill_windows = ceil_div(self.max_num_batched_tokens, self._chunk(self.prefill_score_columns))
        self.fused_decode_min_batch: int | None = None
        self.fused_prefill, short_tokens = prefill_tuning(self.arch, self.layout.name)
        selectable = self.prefill_score_columns < MAX_SCORE_COLUMNS
        self.prefill_short_tokens = min(short_tokens, self.prefill_window_tokens()) if selectable else 0
        self._backend = implementation
        # Windows of a step are planned side by side; the planner's scratch is theirs in turn.
        storage = msa_icp_index_score_plan_storage(
            num_qo_heads=NUM_HEADS,
            total_q=self.prefill_window_tokens(),
            batch=min(self.max_num_seqs, self.prefill_window_tokens()),  # empty segments take no room
            device=self.device,
        )
        int64 = {"dtype": torch.int64, "device": self.device}
        self._work_range = torch.zeros(self.max_prefill_windows, storage["work_range_numel"], **int64)
        self._work_info = torch.zeros(self.max_prefill_windows, storage["work_info_numel"], **int64)
        self._workspace = torch.empty(storage["workspace_bytes"], dtype=torch.uint8, device=self.device)
        short_shape = (self.prefill_short_tokens, NUM_HEADS, self.prefill_score_columns)
        self._short_scratch = (
            torch.empty(short_shape, dtype=torch.float32, device=self.device) if self.prefill_short_tokens else None
        )
        self._checked_comm = NO_STORAGE
        self._known = custom_ops.Known(self)
        # By a comm's counters: the slot set that its last tagged rows used.
        self._last_slots: MutableMapping[torch.Tensor, list[tuple[int | None, bool]]] = WeakTensorKeyDictionary()

    def __repr__(self) -> str:
        return (
            f"MSAIcpIndexerPlan({self.layout.title}, rank {self.rank} of {self.world_size}, {self.device}, "
            f"accumulation={self.accumulation!r}, backend={self.backend!r})"
        )

    def __reduce__(self) -> Any:
        # A copy is an indexer of the same limits: what this one knows of storage and of compiled code is its own.
        limits = {name: getattr(self, name) for name in inspect.signature(MSAIcpIndexerPlan).parameters}
        return functools.partial(MSAIcpIndexerPlan, **limits), ()

    def _pitch(self, max_seq_len: int) -> int:
        columns = msa_icp_index_score_columns(max_seq_len, self.page_size)
        return ceil_div(columns, _PITCH_COLUMNS) * _PITCH_COLUMNS

    @staticmethod
    def _chunk(pitch: int) -> int:
        tokens = _SCRATCH_BUDGET_BYTES // (5 * NUM_HEADS * pitch)
        return min(MAX_WINDOW_TOKENS, max(_CHUNK_TOKENS, tokens // _CHUNK_TOKENS * _CHUNK_TOKENS))

    def decode_scores_shape(self) -> tuple[int, int, int]:
        """Shape of the decode score plane, float32 ``(max_decode_tokens, 4, decode_score_columns)``."""
        return (self.max_decode_tokens, NUM_HEADS, self.decode_score_columns)

    def prefill_scratch_shape(self, max_seq_len: int | None = None) -> tuple[int, int, int]:
        """Shape of a prefill window's score scratch, float32 ``(tokens, 4, pitch)``.

        With scratch of this shape, a step is cut into windows of ``min(tokens, prefill_window_tokens())`` query tokens,
        of which there are at most ``max_prefill_windows``; a segment may go on in the next window.

        ``max_seq_len`` is the longest key length of the windows it serves, ``max_model_len`` by default. The tokens are
        as many as 256 MiB hold, counting 5 bytes a score, in multiples of 128, from 128 to 8192.
        """
        limit = self.max_model_len if max_seq_len is None else require_int("max_seq_len", max_seq_len, 1)
        pitch = self._pitch(limit)
        return (min(self._chunk(pitch), self.max_num_batched_tokens), NUM_HEADS, pitch)

    def prefill_window_tokens(self) -> int:
        """Query tokens that a prefill window holds at most."""
        return min(MAX_WINDOW_TOKENS, self.max_num_batched_tokens)

    def prefill_pool_shape(self) -> tuple[int]:
        """Shape of the fused prefill chain's pool, uint8."""
        return (
            msa_icp_prefill_pool_bytes(
                total_q=self.prefill_window_tokens(), batch=self.max_num_seqs, device=self.device
            ),
        )

    def prefill_carrier_shape(self) -> tuple[int, int, int, int]:
        """Shape of a step's carriers, int32 ``(2, 4, max_num_batched_tokens, 33)``: one sent, one received."""
        return (2, NUM_HEADS, self.max_num_batched_tokens, ROW_WORDS)

    def warmup(self) -> None:
        """Make every kernel resident on the device.

        Run it on every rank before the first exchange, and before a CUDA graph is captured: a kernel that loads lazily
        while a peer's merge spins stalls both.
        """
        self._backend.warmup(self.device)

    def check_comm(self, comm: Any) -> None:
        """Raise ``ValueError`` unless ``comm`` is receive storage for this rank.

        It has ``recv``, ``tagged_recv``, ``recv_bases``, ``tagged_recv_bases``, ``publish_generations``,
        ``expected_generations`` and ``errors``, contiguous tensors on the plan's device with the shapes and dtypes of
        ``comm_layout``, and the tagged rows follow the legacy rows in one storage.
        """
        self._check_comm(comm)

    def _check_comm(self, comm: Any) -> CheckedStorage:
        fields = require_receive_storage(comm, self.comm_layout, self.world_size, self.device)
        self._backend.check_receive_storage(fields)
        words = torch.tensor(
            [
                -1 if self.device.index is None else self.device.index,
                self.rank,
                self.world_size,
                self.heads_per_rank,
                self.max_decode_tokens,
                self.init_blocks,
                self.local_blocks,
                self.spin_limit,
                self._wait_ns,
                self.page_size,
                self.max_decode_query_len,
                self.index_scale,
                self.index_offset,
                *(field.data_ptr() for field in fields),
            ],
            dtype=torch.int64,
            device="cpu",  # whatever the default device
        )
        last = self._last_slots.setdefault(fields.publish_generations, [(None, False)])
        self._checked_comm = CheckedStorage(
            fields, words, last, on_gpu=self.device.type == "cuda", num_sparse_layers=self.num_sparse_layers
        )
        self._known.add(comm)
        return self._checked_comm

    def _forget_comm(self, comm: Any) -> None:
        """Keep no tensor of ``comm`` alive, which is about to be closed."""
        if self._checked_comm.fields.recv is comm.recv:
            self._checked_comm = NO_STORAGE

    def _comm_state(self, comm: Any) -> CheckedStorage:
        """What a launch takes from the plan and from ``comm``, which is checked unless it is the one checked last."""
        state = self._checked_comm
        recv, tagged_recv, recv_bases, tagged_recv_bases, publish, expected, errors = state.fields
        try:
            if (
                comm.recv is recv
                and comm.tagged_recv is tagged_recv
                and comm.recv_bases is recv_bases
                and comm.tagged_recv_bases is tagged_recv_bases
                and comm.publish_generations is publish
                and comm.expected_generations is expected
                and comm.errors is errors
            ):
                return state
        except AttributeError:
            pass  # the check below says which
        return self._check_comm(comm)

    def decode(
        self,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        num_valid_pages: torch.Tensor,
        scores: torch.Tensor | None,
        output: torch.Tensor,
        *,
        comm: Any,
        slot: int,
        tagged: bool,
        decode_query_len: int,
        enable_pdl: bool = True,
        pool: torch.Tensor | None = None,
    ) -> None:
        """One layer's decode chain: score, select and publish, merge.

        Parameters
        ----------
        index_q : torch.Tensor
            float8_e4m3fn ``[T, 4, 128]``, contiguous, ``T = B * decode_query_len <= max_decode_tokens``. Token ``j`` of
            request ``b`` is row ``b * decode_query_len + j`` and stands at ``seq_lens[b] - decode_query_len + j``.
        index_k : torch.Tensor
            float8_e4m3fn ``[pages, page_size / world_size, 128]``, this rank's key rows; dense rows, a page pitch that
            is a multiple of 16 bytes.
        block_table : torch.Tensor
            int32 ``[B, columns]``, unit last stride: page of each page column of a request.
        seq_lens : torch.Tensor
            int32 ``[B]``, key tokens of each request, the new ones included.
        num_valid_pages : torch.Tensor
            int32 ``[T]``, B128 blocks that each token may select, 0 for padding.
        scores : torch.Tensor
            float32 ``[at least T, 4, columns]``, scratch; see ``decode_scores_shape``. Unused by the fused chain, where
            it may be None.
        output : torch.Tensor
            int32 ``[T, heads_per_rank, 16]``: the selected blocks of the heads that this rank owns, ascending, with a
            tail of -1.
        comm
            Receive storage, such as ``flashinfer_msa.comm`` makes; checked once, and again when a field changes.
        slot : int
            Slot set of the layer, 0 to 2: a counter that runs over all layers of all steps, modulo 3. With tagged rows
            not that of the layer before; a layer without tokens uses none.
        tagged : bool
            Tagged rows rather than legacy ones. Needs two sparse layers at least.
        decode_query_len : int
            Query tokens of each request, 1 to ``max_decode_query_len``.
        enable_pdl : bool
            Launch each kernel as a programmatic dependent of the one before. Then the kernel launched just before this
            call may write the query and the newest page, but not ``seq_lens``, ``block_table``, ``num_valid_pages`` or
            pages that end at or before ``seq_len - decode_query_len``.
        pool : torch.Tensor, optional
            uint8 of ``msa_icp_decode_pool_bytes``, 16-byte aligned: run the fused chain, which keeps lists of
            candidates in it instead of score rows, with the same result.

        Raises
        ------
        ValueError
            If an argument is not as described; nothing has been launched then.
        RuntimeError
            If an earlier wait has run out, a launch fails, or the kernels are not resident while a graph is captured.
        """
        if torch.compiler.is_compiling():
            half = (index_q, index_k, block_table, seq_lens, scores, pool, decode_query_len)
            return custom_ops.decode(self._known, comm, slot, tagged, enable_pdl, num_valid_pages, half, output)
        state = self._comm_state(comm)
        state.require_form(slot, tagged)
        _require_output(output)
        half = (index_q, index_k, block_table, seq_lens, scores, pool, decode_query_len)
        head = (state.words, True, True, slot, tagged, enable_pdl, num_valid_pages)
        self._backend.decode(self, comm, (*head, *half, output))
        if num_valid_pages.shape[0]:  # else no row was published
            state.note(slot, tagged)

    def decode_publish(
        self,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        num_valid_pages: torch.Tensor,
        scores: torch.Tensor | None,
        *,
        comm: Any,
        slot: int,
        tagged: bool,
        decode_query_len: int,
        enable_pdl: bool = True,
        pool: torch.Tensor | None = None,
    ) -> None:
        """The first half of :meth:`decode`: score, select and publish. Arguments are those of ``decode``.

        Ranks that share a stream run all publishes of a layer before any merge.
        """
        if torch.compiler.is_compiling():
            half = (index_q, index_k, block_table, seq_lens, scores, pool, decode_query_len)
            return custom_ops.decode(
                self._known, comm, slot, tagged, enable_pdl, num_valid_pages, half, None, merges=False
            )
        state = self._comm_state(comm)
        state.require_form(slot, tagged)
        half = (index_q, index_k, block_table, seq_lens, scores, pool, decode_query_len)
        self._backend.decode(self, comm, (state.words, True, False, slot, tagged, enable_pdl, num_valid_pages, *half))
        if num_valid_pages.shape[0]:  # else no row was published
            state.note(slot, tagged)

    def decode_merge(
        self,
        num_valid_pages: torch.Tensor,
        output: torch.Tensor,
        *,
        comm: Any,
        slot: int,
        tagged: bool,
        enable_pdl: bool = True,
    ) -> None:
        """The second half of :meth:`decode`: merge the rows of this rank's heads. Arguments are those of ``decode``."""
        if torch.compiler.is_compiling():
            return custom_ops.decode(self._known, comm, slot, tagged, enable_pdl, num_valid_pages, None, output)
        state = self._comm_state(comm)
        state.require_form(None, tagged)
        _require_output(output)
        self._backend.decode(self, comm, (state.words, False, True, slot, tagged, enable_pdl, num_valid_pages, output))

    def prefill_window_plan(
        self,
        window: int,
        qo_segment_lens: torch.Tensor,
        kv_segment_lens: torch.Tensor,
        qo_segment_offsets: torch.Tensor,
        kv_segment_offsets: torch.Tensor,
        qo_offset: torch.Tensor,
        *,
        total_q: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> MSAIcpScorePlan:
        """Plan one window of a step on the device, in the indexer's own storage.

        Once per window and step; every layer uses the plan, which is valid until its window is planned again.

        Parameters
        ----------
        window : int
            Which of the step's windows, below ``max_prefill_windows``.
        qo_segment_lens, kv_segment_lens, qo_segment_offsets, kv_segment_offsets, qo_offset : torch.Tensor
            The window's segments, as ``msa_ops.msa_icp_index_score_sharded_plan_device`` takes them.
        total_q, max_query_len, max_seq_len : int
            Upper bounds, as there; at most ``prefill_window_tokens()`` tokens, ``max_num_seqs`` segments and
            ``max_model_len`` keys a segment.

        Returns
        -------
        MSAIcpScorePlan

        Raises
        ------
        ValueError
            If an argument is not as described; nothing has been launched then.
        RuntimeError
            If a launch fails, or the kernels are not resident while a graph is captured.
        """
        require_int("window", window, 0, self.max_prefill_windows - 1)
        require_int("total_q", total_q, 1, self.prefill_window_tokens())
        require_int("max_seq_len", max_seq_len, 1, self.max_model_len)
        call = PrefillPlan(
            qo_segment_lens,
            kv_segment_lens,
            qo_segment_offsets,
            kv_segment_offsets,
            qo_offset,
            self._work_range[window],
            self._work_info[window],
            self._workspace,
            NUM_HEADS,
            total_q,
            max_query_len,
            max_seq_len,
            self._work_range.shape[1],
        )
        if isinstance(qo_segment_lens, torch.Tensor) and qo_segment_lens.dim() == 1:
            require_int("segments of qo_segment_lens", len(qo_segment_lens), 0, self.max_num_seqs)
        find_backend(self.backend).prefill_plan(call)
        return call.plan()

    def prefill_local(
        self,
        query: torch.Tensor,
        index_k: torch.Tensor,
        block_table: torch.Tensor,
        window_plan: MSAIcpScorePlan,
        score_scratch: torch.Tensor | None,
        num_valid_pages: torch.Tensor,
        carrier_view: torch.Tensor,
        *,
        pool: torch.Tensor | None = None,
    ) -> None:
        """One layer's local part of a prefill window: score this rank's keys, select into carrier rows.

        The carrier goes through the caller's all-to-all: rows ``carrier[h]`` to rank ``h // heads_per_rank``, so that
        every rank sends ``heads_per_rank`` of the first dimension to each. What arrives, by the rank that sent it, is
        what :meth:`prefill_merge` takes.

        Parameters
        ----------
        query : torch.Tensor
            float8_e4m3fn ``[T, 4, 128]`` with ``T == window_plan.total_q``, contiguous, 16-byte aligned.
        index_k : torch.Tensor
            float8_e4m3fn ``[pages, page_size / world_size, 128]``, this rank's key rows; dense rows, a page pitch that
            is a multiple of 16 bytes.
        block_table : torch.Tensor
            int32 ``[B, columns]``, unit last stride: page of each page column of a segment.
        window_plan : MSAIcpScorePlan
            From :meth:`prefill_window_plan`.
        score_scratch : torch.Tensor
            float32 ``[at least T, 4, at least the plan's score columns]``, unit last stride; see
            ``prefill_scratch_shape``. The plan has fewer than 12288 score columns then. With a pool, which has no such
            limit, it is not used and may be None.
        num_valid_pages : torch.Tensor
            int32 ``[T]``, contiguous: B128 blocks that each token may select, 0 for padding; at most those with a key
            that it sees, ``ceil(min(position + 1, keys) / 128)``. No scores are written beyond those.
        carrier_view : torch.Tensor
            int32 ``[4, T, 33]``, unit last stride: the window's tokens of the step's carrier.
        pool : torch.Tensor, optional
            uint8 of ``prefill_pool_shape``, or of at least ``msa_icp_prefill_pool_bytes`` for the window, contiguous,
            16-byte aligned, a multiple of 8 bytes: run the fused chain, which keeps lists of candidates in it instead
            of score rows, with the same result. A window of at most ``prefill_short_tokens`` tokens runs the separate
            chain, which is faster there, in scratch of the indexer's own: on one stream at a time.

        Raises
        ------
        ValueError
            If an argument is not as described; nothing has been launched then.
        RuntimeError
            If a launch fails, or the kernels are not resident while a graph is captured.
        """
        require_score_plan("window_plan", window_plan)
        find_backend(self.backend).prefill_local(
            self._local_call(
                query, index_k, block_table, window_plan, score_scratch, num_valid_pages, carrier_view, pool
            )
        )

    def prefill_merge(self, received: torch.Tensor, num_valid_pages: torch.Tensor, output: torch.Tensor) -> None:
        """Merge what the ranks sent for the heads that this rank owns.

        Parameters
        ----------
        received : torch.Tensor
            int32 ``[world_size, heads_per_rank, T, 33]``, unit last stride, rows that do not overlap: the carrier rows
            of every rank for this rank's heads. More tokens than ``output`` has are fine.
        num_valid_pages : torch.Tensor
            int32 ``[T]``, contiguous.
        output : torch.Tensor
            int32 ``[T, heads_per_rank, 16]``, unit last stride: the selected blocks, ascending, with a tail of -1;
            ``[0, -1, ...]`` for a token without valid pages.

        Raises
        ------
        ValueError
            If an argument is not as described; nothing has been launched then.
        RuntimeError
            If a launch fails, or the kernels are not resident while a graph is captured.
        """
        find_backend(self.backend).prefill_merge(self._merge_call(received, num_valid_pages, output))

    def prepare_decode_step(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        num_valid_pages: torch.Tensor,
        scores: torch.Tensor | None,
        output: torch.Tensor,
        *,
        comm: Any,
        tagged: bool,
        decode_query_len: int,
        enable_pdl: bool = True,
        pool: torch.Tensor | None = None,
        debug: bool = False,
    ) -> MSAIcpDecodeStep:
        """Bind everything of a step's :meth:`decode` calls but query, keys and slot; the host checks run once.

        Arguments are those of ``decode``. What a tensor holds is read by every launch; the tensors themselves, and
        ``comm``, stay as they are while the step is used.

        Parameters
        ----------
        debug : bool
            Before every launch, compare it with what ``decode`` would launch, and raise ``RuntimeError`` if they
            differ: a tensor has been moved or resized since, for example.

        Raises
        ------
        ValueError
            If an argument is not as described.
        """
        refuse_tracing()
        checked = self._comm_state(comm)
        call = DecodeChain(
            checked.words,
            -1,
            tagged,
            enable_pdl,
            num_valid_pages,
            block_table,
            seq_lens,
            scores,
            pool,
            decode_query_len,
            output,
        )
        keep = functools.partial(self._backend.decode_chain, self, comm)
        return MSAIcpDecodeStep(self, call, comm, checked, keep, debug)

    def prepare_prefill_step(
        self,
        windows: Sequence[Window],
        score_scratch: torch.Tensor | None,
        num_valid_pages: torch.Tensor,
        send: torch.Tensor,
        received: torch.Tensor,
        output: torch.Tensor,
        *,
        debug: bool = False,
        pool: torch.Tensor | None = None,
    ) -> MSAIcpPrefillStep:
        """Bind everything of a step's :meth:`prefill_local` and :meth:`prefill_merge` calls but query and keys.

        Parameters
        ----------
        windows : sequence of (start, end, block_table, window_plan)
            The step's windows, in order and disjoint: tokens ``start`` to ``end`` of the step, their block table and
            the plan of :meth:`prefill_window_plan` with ``total_q == end - start``. At least one. The carrier rows of
            tokens in no window are not written: those are padding, with 0 in ``num_valid_pages``.
        score_scratch : torch.Tensor
            As for ``prefill_local``, for the largest of the windows; they use it in turn.
        num_valid_pages : torch.Tensor
            int32 ``[T]``, of all tokens of the step.
        send : torch.Tensor
            int32 ``[4, T, 33]``, unit last stride: the step's carrier.
        received : torch.Tensor
            int32 ``[world_size, heads_per_rank, T, 33]``, as for ``prefill_merge``: where the caller's all-to-all,
            between :meth:`MSAIcpPrefillStep.local` and :meth:`MSAIcpPrefillStep.merge`, puts what the ranks sent.
        output : torch.Tensor
            int32 ``[T, heads_per_rank, 16]``, as for ``prefill_merge``.
        debug : bool
            As for :meth:`prepare_decode_step`.
        pool : torch.Tensor, optional
            As for ``prefill_local``.

        Raises
        ------
        ValueError
            If an argument is not as described.
        """
        refuse_tracing()
        tensors = {
            "score_scratch": score_scratch,
            "num_valid_pages": num_valid_pages,
            "send": send,
            "received": received,
            "output": output,
            "pool": pool,
        }

        def keep_local(window: Window) -> Chain:
            start, end, block_table, window_plan = window
            valid, carrier_view = num_valid_pages[start:end], send[:, start:end]
            call = self._local_call(None, None, block_table, window_plan, score_scratch, valid, carrier_view, pool)
            return self._backend.prefill_local_chain(call, send.shape[1], start)

        def keep_merge() -> Chain:
            return self._backend.prefill_merge_chain(self._merge_call(received, num_valid_pages, output))

        return MSAIcpPrefillStep(self, windows, tensors, keep_local, keep_merge, debug)

    def layer_graphs(self, *, capture_after: int = 1, max_keys: int = 4) -> MSAIcpLayerGraphs:
        """CUDA graphs of single layers, for steps that come again with the same buffers.

        Parameters
        ----------
        capture_after : int
            Steps of a key that run eagerly before the next is captured, at least 0.
        max_keys : int
            Step keys that keep graphs, at least 1; the least recently used goes first.
        """
        refuse_tracing()
        return MSAIcpLayerGraphs(self, capture_after=capture_after, max_keys=max_keys)

    def _local_call(
        self,
        query: Any,
        index_k: Any,
        block_table: torch.Tensor,
        window_plan: MSAIcpScorePlan,
        score_scratch: torch.Tensor | None,
        num_valid_pages: torch.Tensor,
        carrier_view: torch.Tensor,
        pool: torch.Tensor | None,
    ) -> PrefillLocal:
        return PrefillLocal(
            query,
            index_k,
            block_table,
            window_plan,
            self.rank,
            self.world_size,
            score_scratch,
            num_valid_pages,
            carrier_view,
            self.init_blocks,
            self.local_blocks,
            self.index_scale,
            self.index_offset,
            pool,
            self._short_scratch,
            self._exact,
        )

    def _merge_call(self, received: Any, num_valid_pages: Any, output: Any) -> PrefillMerge:
        return PrefillMerge(received, num_valid_pages, output, self.world_size, self.init_blocks, self.local_blocks)


def _nanoseconds(wait_seconds: Any) -> int:
    """A limit of seconds as the launcher takes it, 0 for none."""
    if wait_seconds is None:
        return 0
    number = isinstance(wait_seconds, (int, float)) and not isinstance(wait_seconds, bool)
    if not number or not 1e-3 <= wait_seconds <= 1e6:
        raise ValueError(f"wait_seconds must be None or a number of seconds in [0.001, 1000000], was {wait_seconds!r}")
    return round(wait_seconds * 1e9)


def _require_output(output: Any) -> None:
    """A backend takes None for a chain without a merge."""
    if output is None:
        raise ValueError("output must be a dense tensor, was None")


def prepare_msa_icp_indexer(
    *,
    world_size: int,
    rank: int,
    num_index_heads: int,
    page_size: int,
    init_blocks: int,
    local_blocks: int,
    max_decode_tokens: int,
    max_decode_query_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    num_sparse_layers: int,
    device: Any,
    spin_limit: int = _SPIN_LIMIT,
    wait_seconds: float | None = None,
    accumulation: str = "tensor",
    backend: str = "cake",
) -> MSAIcpIndexerPlan:
    """Prepare one rank's indexer from the serving limits.

    Parameters
    ----------
    world_size, rank : int
        Size of the tensor-parallel group, 2 or 4, and this process's place in it.
    num_index_heads : int
        Index heads of the model, 4.
    page_size : int
        Tokens of a K-cache page, 128 or 256.
    init_blocks, local_blocks : int
        Blocks at the start and at the end of a token's context that are always selected; at most 16 together.
    max_decode_tokens : int
        Decode query tokens of a step, at most; the capacity of a receive slot set.
    max_decode_query_len : int
        Query tokens per decode request, at most 8.
    max_num_batched_tokens, max_num_seqs, max_model_len : int
        The server's limits: prefill tokens of a step, segments, tokens of a sequence.
    num_sparse_layers : int
        Layers that run the indexer.
    device : torch.device
        Device of the rank.
    spin_limit : int
        Polls after which a wait for a peer gives up and ends the CUDA context.
    wait_seconds : float, optional
        Seconds after which it does, whatever the polls; 0.001 to a million. Longer than a peer may be late, as while it
        captures graphs. The default ``spin_limit`` took 14 s on an H200.
    accumulation : str
        ``"tensor"`` or ``"exact"``: how :meth:`~MSAIcpIndexerPlan.prefill_local` sums products, as in
        ``msa_ops.msa_icp_index_score_sharded``. Decode is always exact but for the rounding of FP32 sums.
    backend : str
        ``"cake"`` for prebuilt kernels, ``"torch"`` for the reference.

    Returns
    -------
    MSAIcpIndexerPlan

    Raises
    ------
    ValueError
        If a limit is out of range, or no kernels are installed for the device.
    """
    return MSAIcpIndexerPlan(
        world_size=world_size,
        rank=rank,
        num_index_heads=num_index_heads,
        page_size=page_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        max_decode_tokens=max_decode_tokens,
        max_decode_query_len=max_decode_query_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_sparse_layers=num_sparse_layers,
        device=device,
        backend=backend,
        spin_limit=spin_limit,
        wait_seconds=wait_seconds,
        accumulation=accumulation,
    )
