# SPDX-License-Identifier: Apache-2.0
"""The indexer of one rank. It is built once from the serving limits and used by every layer of every step."""

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

    No method synchronizes. Only ``prepare_decode_step`` and ``prepare_prefill_step``, for their checks, and
    ``layer_graphs`` allocate on the device. Methods launch on torch's current stream. Use an indexer on one stream at a
    time, because its calls share window plans and scratch.

    Attributes
    ----------
    world_size, rank, num_index_heads, page_size, init_blocks, local_blocks, max_decode_tokens, max_decode_query_len, \
max_num_batched_tokens, max_num_seqs, max_model_len, num_sparse_layers, device, backend, spin_limit, wait_seconds, \
accumulation
        As given to :func:`prepare_msa_icp_indexer`. ``device`` has its index filled in.
    arch : str
        Architecture of the cubins for the device, such as ``"sm_90a"``. With ``backend="torch"``, the device's type.
    heads_per_rank : int
        Heads whose selection this rank owns, ``4 / world_size``.
    index_scale, index_offset : int
        Local score column ``c`` is global block ``c * index_scale + index_offset``.
    comm_layout : dict
        ``msa_icp_comm_layout(world_size, heads_per_rank, max_decode_tokens)``.
    decode_score_columns : int
        Score columns of a decode step.
    prefill_score_columns : int
        Row pitch of a prefill window's scores: its columns, rounded up to a multiple of 16.
    max_prefill_windows : int
        Maximum windows of a step of ``max_num_batched_tokens`` tokens, where all windows but the last are full.
    fused_decode_min_batch : int, optional
        Smallest batch for which the fused decode chain is the default. None means never: on an H200, the fused chain
        takes longer than the separate one at every batch.
    fused_prefill : bool
        Whether :meth:`prefill_local` should be given a pool.
    prefill_short_tokens : int
        A window of at most this many tokens runs the separate chain even with a pool, in scratch that the indexer owns.
    """

    @torch.inference_mode(False)  # its buffers are written outside inference mode too
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
        # Each window of a step has its own plan. All windows share the planner's scratch.
        storage = msa_icp_index_score_plan_storage(
            num_qo_heads=NUM_HEADS,
            total_q=self.prefill_window_tokens(),
            batch=min(self.max_num_seqs, self.prefill_window_tokens()),  # empty segments need no storage
            device=self.device,
        )
        int64: dict[str, Any] = {"dtype": torch.int64, "device": self.device}
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
        # A copy has the same limits, but its own table of receive storage and its own handles for compiled code.
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

        Cut a step into windows of ``min(tokens, prefill_window_tokens())`` query tokens, at most
        ``max_prefill_windows`` of them. A segment may continue in the next window.

        ``max_seq_len`` is the longest key length of the windows, ``max_model_len`` by default. ``tokens`` is the
        largest multiple of 128 that fits into 256 MiB at 5 bytes per score: at least 128, and at most 8192. It is never
        more than ``max_num_batched_tokens``.
        """
        limit = self.max_model_len if max_seq_len is None else require_int("max_seq_len", max_seq_len, 1)
        pitch = self._pitch(limit)
        return (min(self._chunk(pitch), self.max_num_batched_tokens), NUM_HEADS, pitch)

    def prefill_window_tokens(self) -> int:
        """Maximum query tokens per prefill window."""
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
        """Load every kernel into the device's context.

        Call it on every rank before the first exchange and before a CUDA graph is captured. A kernel that loads lazily
        while a peer's merge spins stalls both ranks.
        """
        self._backend.warmup(self.device)

    def check_comm(self, comm: Any) -> None:
        """Raise ``ValueError`` unless ``comm`` is receive storage for this rank.

        ``comm`` must have ``recv``, ``tagged_recv``, ``recv_bases``, ``tagged_recv_bases``, ``publish_generations``,
        ``expected_generations`` and ``errors``: contiguous tensors on the indexer's device with the shapes and dtypes
        of ``comm_layout``. The tagged rows must follow the legacy rows in one storage.
        """
        self._storages.check(comm)

    def forget_comm(self, comm: Any) -> None:
        """Drop all references to the tensors of ``comm``, which is about to be closed."""
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
            request ``b`` is row ``b * decode_query_len + j``, at position ``seq_lens[b] - decode_query_len + j``.
        index_k : torch.Tensor
            float8_e4m3fn ``[pages, page_size / world_size, 128]``: this rank's key rows. Rows are dense. The page pitch
            is a multiple of 16 bytes.
        block_table : torch.Tensor
            int32 ``[B, columns]``, unit last stride: the page of each page column of a request.
        seq_lens : torch.Tensor
            int32 ``[B]``: key tokens of each request, including the new ones.
        num_valid_pages : torch.Tensor
            int32 ``[T]``: B128 blocks that each token may select, 0 for padding.
        scores : torch.Tensor
            float32 ``[at least T, 4, columns]``: scratch; see ``decode_scores_shape``. The fused chain does not use it,
            so with a pool it may be None.
        output : torch.Tensor
            int32 ``[T, heads_per_rank, 16]``: the selected blocks of the heads that this rank owns, ascending, with a
            tail of -1.
        comm
            Receive storage, such as ``flashinfer_msa.comm`` makes. It is checked once, and again when a field changes.
        slot : int
            Slot set of the layer, 0 to 2: ``slot = layers_run % 3``, counted across steps. With tagged rows, it must
            differ from that of the layer before. A layer without tokens uses no slot set.
        tagged : bool
            True for tagged rows, False for legacy rows. Tagged rows need at least two sparse layers.
        decode_query_len : int
            Query tokens of each request, 1 to ``max_decode_query_len``.
        enable_pdl : bool
            Launch each kernel as a programmatic dependent of the one before. The kernel launched just before this call
            may then write the query and the newest page. It must not write ``seq_lens``, ``block_table``,
            ``num_valid_pages`` or pages that end at or before ``seq_len - decode_query_len``.
        pool : torch.Tensor, optional
            uint8 of ``msa_icp_decode_pool_bytes``, 16-byte aligned. With it, the fused chain runs, which stores lists
            of candidates in the pool instead of score rows. The result is the same.

        Raises
        ------
        ValueError
            If an argument is not as described. Nothing has been launched then.
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
        """The first half of :meth:`decode`: score, select and publish. The arguments are those of ``decode``.

        If ranks share a stream, run all publishes of a layer before any merge.
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
        """The second half of :meth:`decode`: merge the rows of this rank's heads. It takes arguments of ``decode``."""
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

        Call it once per window and step. Every layer uses the plan. It is valid until the window is planned again.

        Parameters
        ----------
        window : int
            Index of the window in the step, below ``max_prefill_windows``.
        qo_segment_lens, kv_segment_lens, qo_segment_offsets, kv_segment_offsets, qo_offset : torch.Tensor
            The window's segments, as for ``msa_ops.msa_icp_index_score_sharded_plan_device``: at most ``max_num_seqs``.
        total_q, max_query_len, max_seq_len : int
            Upper bounds, as for that function: at most ``prefill_window_tokens()`` query tokens and ``max_model_len``
            keys per segment.

        Returns
        -------
        MSAIcpScorePlan

        Raises
        ------
        ValueError
            If an argument is not as described. Nothing has been launched then.
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
        """One layer's local part of a prefill window: score this rank's keys and select into carrier rows.

        The caller's all-to-all then sends rows ``carrier[h]`` to rank ``h // heads_per_rank``. Every rank thus sends
        ``heads_per_rank`` entries of the first dimension to each rank. :meth:`prefill_merge` takes the received rows,
        ordered by the rank that sent them.

        Parameters
        ----------
        query : torch.Tensor
            float8_e4m3fn ``[T, 4, 128]`` with ``T == window_plan.total_q``, contiguous, 16-byte aligned.
        index_k : torch.Tensor
            As for :meth:`decode`.
        block_table : torch.Tensor
            int32 ``[B, columns]``, unit last stride: the page of each page column of a segment.
        window_plan : MSAIcpScorePlan
            From :meth:`prefill_window_plan`.
        score_scratch : torch.Tensor
            float32 ``[at least T, 4, at least the plan's score columns]``, unit last stride; see
            ``prefill_scratch_shape``. The plan must have fewer than 12288 score columns. With a pool, there is no such
            limit, and the scratch is not used and may be None.
        num_valid_pages : torch.Tensor
            int32 ``[T]``, contiguous: B128 blocks that each token may select, 0 for padding. At most the blocks with a
            key that the token sees, ``ceil(min(position + 1, keys) / 128)``: no scores are written beyond those.
        carrier_view : torch.Tensor
            int32 ``[4, T, 33]``, unit last stride: the window's tokens of the step's carrier.
        pool : torch.Tensor, optional
            uint8 of ``prefill_pool_shape``, or of at least ``msa_icp_prefill_pool_bytes`` for the window. Contiguous,
            16-byte aligned, a multiple of 8 bytes. With it, the fused chain runs, which stores lists of candidates in
            the pool instead of score rows. The result is the same. A window of at most ``prefill_short_tokens`` tokens
            runs the separate chain, which is faster there, in scratch that the indexer owns.

        Raises
        ------
        ValueError
            If an argument is not as described. Nothing has been launched then.
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
            of every rank for this rank's heads. It may hold more tokens than ``output``.
        num_valid_pages : torch.Tensor
            int32 ``[T]``, contiguous.
        output : torch.Tensor
            int32 ``[T, heads_per_rank, 16]``, unit last stride: the selected blocks, ascending, with a tail of -1. A
            token without valid pages gets ``[0, -1, ...]``.

        Raises
        ------
        ValueError
            If an argument is not as described. Nothing has been launched then.
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
        """Bind all arguments of a step's :meth:`decode` calls except query, keys and slot. The host checks run once.

        The other arguments are those of ``decode``. Every launch reads the current contents of the tensors. Do not move
        or resize the tensors, or change ``comm``, while the step is used.

        Parameters
        ----------
        debug : bool
            Before every launch, compare it with the launch that ``decode`` would make. Raise ``RuntimeError`` if they
            differ, for example because a tensor has been moved or resized.

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
        """Bind all arguments of a step's :meth:`prefill_local` and :meth:`prefill_merge` calls except query and keys.

        Parameters
        ----------
        windows : sequence of (start, end, block_table, window_plan)
            The step's windows: at least one, in order and disjoint. A window has tokens ``start`` to ``end`` of the
            step, their block table, and a plan of :meth:`prefill_window_plan` with ``total_q == end - start``. Tokens
            in no window are padding, with 0 in ``num_valid_pages``. Their carrier rows are not written.
        score_scratch : torch.Tensor
            As for ``prefill_local``, large enough for the largest window. All windows share it.
        num_valid_pages : torch.Tensor
            int32 ``[T]``, for all tokens of the step.
        send : torch.Tensor
            int32 ``[4, T, 33]``, unit last stride: the step's carrier.
        received : torch.Tensor
            int32 ``[world_size, heads_per_rank, T, 33]``, as for ``prefill_merge``. The caller's all-to-all writes it
            between :meth:`MSAIcpPrefillStep.local` and :meth:`MSAIcpPrefillStep.merge`.
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
        """CUDA graphs of single layers, for steps that repeat with the same buffers.

        Parameters
        ----------
        capture_after : int
            Number of steps per key that run eagerly before one is captured, at least 0.
        max_keys : int
            Maximum number of step keys with graphs, at least 1. The least recently used key is evicted first.
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
