# SPDX-License-Identifier: Apache-2.0
"""The facade: one rank's indexer, built once from the serving limits and used by every layer of every step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..abi.calls import Decode, PrefillLocal, PrefillMerge, PrefillPlan
from ..backends import find_backend, find_eager_backend
from ..backends.base import Chain
from ..backends.storage import StorageTable
from ..layout import MAX_SCORE_COLUMNS, NUM_HEADS, ROW_WORDS
from ..limits import check_limits
from ..prefill.accumulation import is_exact
from ..prefill.tuning import prefill_tuning
from ..prefill.window import MSAIcpScorePlan, require_score_plan
from ..sizing import (
    MAX_WINDOW_TOKENS,
    ceil_div,
    msa_icp_decode_score_columns,
    msa_icp_index_score_columns,
    msa_icp_index_score_plan_storage,
    msa_icp_prefill_pool_bytes,
    require_int,
)
from .layer_graphs import MSAIcpLayerGraphs
from .steps import MSAIcpDecodeStep, MSAIcpPrefillStep, Window, refuse_tracing

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
    def __init__(self, *, device: Any, backend: str, accumulation: str, **limits: Any) -> None:
        """Take the arguments of :func:`prepare_msa_icp_indexer`."""
        self._backend = find_eager_backend(backend)
        checked = check_limits(
            **limits, exact=is_exact(accumulation), resolve_device=lambda: self._backend.resolve_device(device)
        )
        self.backend, self.accumulation, self.limits = backend, accumulation, checked
        self._arguments = {**limits, "device": checked.device, "backend": backend, "accumulation": accumulation}

        self.device, self.arch, self.layout, self.rank = checked.device, checked.arch, checked.layout, checked.rank
        self.world_size, self.page_size = checked.world_size, checked.page_size
        self.num_index_heads, self.heads_per_rank = checked.num_index_heads, checked.heads_per_rank
        self.index_scale, self.index_offset = checked.index_scale, checked.index_offset
        self.init_blocks, self.local_blocks = checked.init_blocks, checked.local_blocks
        self.max_decode_tokens = checked.max_decode_tokens
        self.max_decode_query_len = checked.max_decode_query_len
        self.max_num_batched_tokens = checked.max_num_batched_tokens
        self.max_num_seqs, self.max_model_len = checked.max_num_seqs, checked.max_model_len
        self.num_sparse_layers = checked.num_sparse_layers
        self.spin_limit, self.wait_seconds = checked.spin_limit, checked.wait_seconds
        self.comm_layout = checked.comm_layout()
        self.decode_score_columns = msa_icp_decode_score_columns(self.max_model_len, self.page_size)
        self.prefill_score_columns = self._pitch(self.max_model_len)
        self.max_prefill_windows = ceil_div(self.max_num_batched_tokens, self._chunk(self.prefill_score_columns))
        self.fused_decode_min_batch: int | None = None
        self.fused_prefill, short_tokens = prefill_tuning(self.arch, self.layout.name)
        selectable = self.prefill_score_columns < MAX_SCORE_COLUMNS
        self.prefill_short_tokens = min(short_tokens, self.prefill_window_tokens()) if selectable else 0
        # Windows of a step are planned side by side. The planner's scratch serves them in turn.
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
        self._storages = StorageTable(checked, self._backend.check_receive_storage)

    def __repr__(self) -> str:
        return (
            f"MSAIcpIndexerPlan({self.layout.title}, rank {self.rank} of {self.world_size}, {self.device}, "
            f"accumulation={self.accumulation!r}, backend={self.backend!r})"
        )

    def __reduce__(self) -> Any:
        # A copy is an indexer of the same limits: what this one knows of storage and of compiled code is its own.
        return functools.partial(MSAIcpIndexerPlan, **self._arguments), ()

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
        self._storages.check(comm)

    def forget_comm(self, comm: Any) -> None:
        """Keep no tensor of ``comm`` alive, which is about to be closed."""
        self._storages.forget(comm)

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
        half = (index_q, index_k, block_table, seq_lens, scores, pool, decode_query_len)
        call = Decode(True, True, slot, tagged, enable_pdl, num_valid_pages, *half, output)
        find_backend(self.backend).decode(self._storages, comm, call)

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
        half = (index_q, index_k, block_table, seq_lens, scores, pool, decode_query_len)
        call = Decode(True, False, slot, tagged, enable_pdl, num_valid_pages, *half)
        find_backend(self.backend).decode(self._storages, comm, call)

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
        call = Decode(False, True, slot, tagged, enable_pdl, num_valid_pages, output=output)
        find_backend(self.backend).decode(self._storages, comm, call)

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
        half = (None, None, block_table, seq_lens, scores, pool, decode_query_len)
        # Each slot set has launches of its own.
        call = Decode(True, True, -1, tagged, enable_pdl, num_valid_pages, *half, output)
        return MSAIcpDecodeStep(self, self._storages.find(comm), comm, call, self._backend.decode_chain, debug)

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

        def local_chain(window: Window) -> Chain:
            start, end, block_table, window_plan = window
            valid, carrier_view = num_valid_pages[start:end], send[:, start:end]
            call = self._local_call(None, None, block_table, window_plan, score_scratch, valid, carrier_view, pool)
            return self._backend.prefill_local_chain(call, send.shape[1], start)

        def merge_chain() -> Chain:
            return self._backend.prefill_merge_chain(self._merge_call(received, num_valid_pages, output))

        return MSAIcpPrefillStep(self, self.limits, windows, tensors, local_chain, merge_chain, debug)

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
        can_capture = self._backend.can_capture(self.device)
        return MSAIcpLayerGraphs(
            self, self.device, can_capture=can_capture, capture_after=capture_after, max_keys=max_keys
        )

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
            self.limits.exact,
        )

    def _merge_call(self, received: Any, num_valid_pages: Any, output: Any) -> PrefillMerge:
        return PrefillMerge(received, num_valid_pages, output, self.world_size, self.init_blocks, self.local_blocks)
