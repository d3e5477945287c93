# SPDX-License-Identifier: Apache-2.0
"""The launcher's operations: the arguments of each, in the order in which the launcher takes them.

Annotations state what the launcher checks of an argument when it takes it. ``aot`` renders the C++ side from them, so
that the launcher (``native/``) knows arguments by name only. ``flashinfer_msa.msa_ops`` documents their meaning.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ..layout import (
    BLOCK_TOKENS,
    MAX_FORCED_BLOCKS,
    MAX_ITEM_BLOCKS,
    MAX_QUERY_LEN,
    NUM_HEADS,
    NUM_SLOT_SETS,
    PAGE_SIZES,
    WORLD_SIZES,
)
from ..sizing import ceil_div, multiprocessor_count
from . import schema
from .schema import E4M3, FLOAT32, INT32, INT32_MAX, INT64, UINT8, DenseTensor, Group, Integer, OneOf

if TYPE_CHECKING:
    from torch import Tensor

    from ..prefill.window import MSAIcpScorePlan


class ReceiveStorage(NamedTuple):
    """The fields that any receive storage has; see :class:`flashinfer_msa.comm.MSAIcpComm`."""

    recv: Annotated[Tensor, DenseTensor(INT32, 5)]
    tagged_recv: Annotated[Tensor, DenseTensor(INT64, 5)]
    recv_bases: Annotated[Tensor, DenseTensor(INT64, 1)]
    tagged_recv_bases: Annotated[Tensor, DenseTensor(INT64, 1)]
    publish_generations: Annotated[Tensor, DenseTensor(INT32, 3)]
    expected_generations: Annotated[Tensor, DenseTensor(INT32, 3)]
    errors: Annotated[Tensor, DenseTensor(INT32, 1)]


class DecodeScore(NamedTuple):
    """A call of the decode scorer."""

    index_q: Annotated[Tensor, DenseTensor(E4M3, 3)]
    index_k: Annotated[Tensor, DenseTensor(E4M3, 3)]
    block_table: Annotated[Tensor, DenseTensor(INT32, 2)]
    seq_lens: Annotated[Tensor, DenseTensor(INT32, 1)]
    score_out: Annotated[Tensor, DenseTensor(FLOAT32, 3)]
    rank: int
    world_size: Annotated[int, OneOf(*WORLD_SIZES)]
    page_size: Annotated[int, OneOf(*PAGE_SIZES)]
    max_decode_query_len: Annotated[int, Integer(1, MAX_QUERY_LEN)]
    decode_query_len: Annotated[int, Integer(1, "max_decode_query_len")]
    enable_pdl: bool


class SelectPublish(NamedTuple):
    """A call of the publisher."""

    scores: Annotated[Tensor, DenseTensor(FLOAT32, 3)]
    num_valid_pages: Annotated[Tensor, DenseTensor(INT32, 1)]
    recv_bases: Annotated[Tensor, DenseTensor(INT64, 1)]
    errors: Annotated[Tensor, DenseTensor(INT32, 1)]
    slot: Annotated[int, Integer(0, NUM_SLOT_SETS - 1)]
    rank: int
    world_size: Annotated[int, OneOf(*WORLD_SIZES)]
    heads_per_rank: int
    capacity: Annotated[int, Integer(1, INT32_MAX)]
    force_begin_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    force_end_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    spin_limit: Annotated[int, Integer(1, INT32_MAX)]
    enable_pdl: bool
    generations: Annotated[Tensor | None, DenseTensor(INT32, 3)]
    index_scale: Annotated[int, Integer(1, 2)]
    index_offset: Annotated[int, Integer(0, 1)]


class Merge(NamedTuple):
    """A call of the merge; ``tagged`` says whether ``expected_generations`` are given."""

    num_valid_pages: Annotated[Tensor, DenseTensor(INT32, 1)]
    output: Annotated[Tensor, DenseTensor(INT32, 3)]
    errors: Annotated[Tensor, DenseTensor(INT32, 1)]
    init_blocks: Annotated[int, Integer(0, INT32_MAX)]
    local_blocks: Annotated[int, Integer(0, INT32_MAX)]
    spin_limit: Annotated[int, Integer(1, INT32_MAX)]
    enable_pdl: bool
    prefill: bool
    tagged: bool
    expected_generations: Annotated[Tensor | None, DenseTensor(INT32, 2)]
    recv_slot: Annotated[Tensor, DenseTensor(INT32, 4, tagged_dtype=INT64)]


class ScorePublish(NamedTuple):
    """A call of the fused scorer and publisher."""

    index_q: Annotated[Tensor, DenseTensor(E4M3, 3)]
    index_k: Annotated[Tensor, DenseTensor(E4M3, 3)]
    block_table: Annotated[Tensor, DenseTensor(INT32, 2)]
    seq_lens: Annotated[Tensor, DenseTensor(INT32, 1)]
    num_valid_pages: Annotated[Tensor, DenseTensor(INT32, 1)]
    pool: Annotated[Tensor, DenseTensor(UINT8, 1)]
    recv_bases: Annotated[Tensor, DenseTensor(INT64, 1)]
    errors: Annotated[Tensor, DenseTensor(INT32, 1)]
    rank: int
    world_size: Annotated[int, OneOf(*WORLD_SIZES)]
    page_size: Annotated[int, OneOf(*PAGE_SIZES)]
    decode_query_len: Annotated[int, Integer(1, MAX_QUERY_LEN)]
    slot: Annotated[int, Integer(0, NUM_SLOT_SETS - 1)]
    capacity: Annotated[int, Integer(1, INT32_MAX)]
    force_begin_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    force_end_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    spin_limit: Annotated[int, Integer(1, INT32_MAX)]
    generations: Annotated[Tensor | None, DenseTensor(INT32, 3)]
    enable_pdl: bool


class ChainState(NamedTuple):
    """What the decode chain takes of an indexer and its receive storage, whose fields end it as addresses."""

    device: int
    rank: int
    world_size: int
    heads_per_rank: int
    capacity: int
    init_blocks: int
    local_blocks: int
    spin_limit: int
    wait_ns: int
    page_size: int
    max_query_len: int
    index_scale: int
    index_offset: int
    recv: int
    tagged_recv: int
    recv_bases: int
    tagged_recv_bases: int
    publish_generations: int
    expected_generations: int
    errors: int

    def pack(self) -> Tensor:
        """The state as the launcher reads it, int64 in host memory."""
        import torch

        return torch.tensor(self, dtype=torch.int64, device="cpu")


class Decode(NamedTuple):
    """A call of the indexer's decode chain or one of its halves, on checked receive storage.

    A half leaves out what only the other takes. Without ``scores``, or with a ``pool``, the chain is the fused one.
    """

    publishes: bool
    merges: bool
    slot: Annotated[int, Integer(0, NUM_SLOT_SETS - 1)]
    tagged: bool
    enable_pdl: bool
    num_valid_pages: Annotated[Tensor, DenseTensor(INT32, 1)]
    index_q: Annotated[Tensor | None, DenseTensor(E4M3, 3)] = None
    index_k: Annotated[Tensor | None, DenseTensor(E4M3, 3)] = None
    block_table: Annotated[Tensor | None, DenseTensor(INT32, 2)] = None
    seq_lens: Annotated[Tensor | None, DenseTensor(INT32, 1)] = None
    scores: Annotated[Tensor | None, DenseTensor(FLOAT32, 3)] = None
    pool: Annotated[Tensor | None, DenseTensor(UINT8, 1)] = None
    decode_query_len: int = 0
    output: Annotated[Tensor | None, DenseTensor(INT32, 3)] = None

    def arguments(self, state: Tensor) -> tuple[Any, ...]:
        """What the launcher takes; ``state`` is a packed ``ChainState``."""
        return (state, *self)


class PrefillPlan(NamedTuple):
    """A call of the planner."""

    qo_segment_lens: Annotated[Tensor, DenseTensor(INT32, 1)]
    kv_segment_lens: Annotated[Tensor, DenseTensor(INT32, 1)]
    qo_segment_offsets: Annotated[Tensor, DenseTensor(INT32, 1)]
    kv_segment_offsets: Annotated[Tensor, DenseTensor(INT32, 1)]
    qo_offset: Annotated[Tensor, DenseTensor(INT32, 1)]
    packed_work_range: Annotated[Tensor, DenseTensor(INT64, 1)]
    packed_work_info: Annotated[Tensor, DenseTensor(INT64, 1)]
    workspace: Annotated[Tensor, DenseTensor(UINT8, 1)]
    num_qo_heads: Annotated[int, Integer(NUM_HEADS, NUM_HEADS)]
    total_q: Annotated[int, Integer(1, INT32_MAX // NUM_HEADS)]
    max_query_len: Annotated[int, Integer(1, "total_q")]
    max_seq_len: Annotated[int, Integer(1, MAX_ITEM_BLOCKS * BLOCK_TOKENS)]

    def arguments(self) -> tuple[Any, ...]:
        """What the launcher takes: the fields, then the multiprocessors of their device."""
        return (*self, _multiprocessors_of(self.packed_work_range))

    def plan(self) -> MSAIcpScorePlan:
        """The plan that a checked call makes."""
        from ..prefill.window import MSAIcpScorePlan

        return MSAIcpScorePlan(
            qo_segment_lens=self.qo_segment_lens,
            kv_segment_lens=self.kv_segment_lens,
            qo_segment_offsets=self.qo_segment_offsets,
            kv_segment_offsets=self.kv_segment_offsets,
            qo_offset=self.qo_offset,
            packed_work_range=self.packed_work_range,
            packed_work_info=self.packed_work_info,
            workspace=self.workspace,
            total_q=self.total_q,
            num_qo_heads=self.num_qo_heads,
            batch=len(self.qo_segment_lens),
            max_query_len=self.max_query_len,
            columns=ceil_div(self.max_seq_len, BLOCK_TOKENS),
        )


class PlanArguments(NamedTuple):
    """A prefill plan as the launcher takes it, with the multiprocessors of its device."""

    num_qo_heads: Annotated[int, Integer(NUM_HEADS, NUM_HEADS)]
    total_q: Annotated[int, Integer(1, INT32_MAX // NUM_HEADS)]
    max_query_len: Annotated[int, Integer(1, "total_q")]
    columns: Annotated[int, Integer(1, MAX_ITEM_BLOCKS)]
    multiprocessors: Annotated[int, Integer(1, INT32_MAX)]
    qo_segment_lens: Annotated[Tensor, DenseTensor(INT32, 1)]
    kv_segment_lens: Annotated[Tensor, DenseTensor(INT32, 1)]
    qo_segment_offsets: Annotated[Tensor, DenseTensor(INT32, 1)]
    kv_segment_offsets: Annotated[Tensor, DenseTensor(INT32, 1)]
    qo_offset: Annotated[Tensor, DenseTensor(INT32, 1)]
    packed_work_range: Annotated[Tensor, DenseTensor(INT64, 1)]
    packed_work_info: Annotated[Tensor, DenseTensor(INT64, 1)]
    workspace: Annotated[Tensor, DenseTensor(UINT8, 1)]


def _with_plan_arguments(call: PrefillScore | PrefillScoreSelect | PrefillLocal) -> tuple[Any, ...]:
    """What the launcher takes: the fields, those of the plan in its place."""
    plan = call[3]
    arguments = PlanArguments(
        num_qo_heads=plan.num_qo_heads,
        total_q=plan.total_q,
        max_query_len=plan.max_query_len,
        columns=plan.columns,
        multiprocessors=_multiprocessors_of(plan.packed_work_range),
        qo_segment_lens=plan.qo_segment_lens,
        kv_segment_lens=plan.kv_segment_lens,
        qo_segment_offsets=plan.qo_segment_offsets,
        kv_segment_offsets=plan.kv_segment_offsets,
        qo_offset=plan.qo_offset,
        packed_work_range=plan.packed_work_range,
        packed_work_info=plan.packed_work_info,
        workspace=plan.workspace,
    )
    return (*call[:3], *arguments, *call[4:])


class PrefillScore(NamedTuple):
    """A call of the prefill scorer."""

    q: Annotated[Tensor, DenseTensor(E4M3, 3)]
    k: Annotated[Tensor, DenseTensor(E4M3, 3)]
    block_table: Annotated[Tensor, DenseTensor(INT32, 2)]
    plan: Annotated[MSAIcpScorePlan, Group(PlanArguments)]
    rank: int
    tp: Annotated[int, OneOf(*WORLD_SIZES)]
    max_score: Annotated[Tensor, DenseTensor(FLOAT32, 3)]
    sm_scale: float
    initialize: bool
    compact: bool
    enable_pdl: bool
    exact: bool

    def arguments(self) -> tuple[Any, ...]:
        """What the launcher takes."""
        return _with_plan_arguments(self)


class SelectPrefill(NamedTuple):
    """A call of the prefill selection."""

    scores: Annotated[Tensor, DenseTensor(FLOAT32, 3)]
    num_valid_pages: Annotated[Tensor, DenseTensor(INT32, 1)]
    carrier: Annotated[Tensor, DenseTensor(INT32, 3)]
    force_begin_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    force_end_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    index_scale: Annotated[int, Integer(1, 2)]
    index_offset: Annotated[int, Integer(0, 1)]


class PrefillScoreSelect(NamedTuple):
    """A call of the fused prefill scorer and selection."""

    q: Annotated[Tensor, DenseTensor(E4M3, 3)]
    k: Annotated[Tensor, DenseTensor(E4M3, 3)]
    block_table: Annotated[Tensor, DenseTensor(INT32, 2)]
    plan: Annotated[MSAIcpScorePlan, Group(PlanArguments)]
    rank: int
    tp: Annotated[int, OneOf(*WORLD_SIZES)]
    num_valid_pages: Annotated[Tensor, DenseTensor(INT32, 1)]
    pool: Annotated[Tensor, DenseTensor(UINT8, 1)]
    carrier: Annotated[Tensor, DenseTensor(INT32, 3)]
    compact: bool
    force_begin_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    force_end_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    enable_pdl: bool
    exact: bool

    def arguments(self) -> tuple[Any, ...]:
        """What the launcher takes."""
        return _with_plan_arguments(self)


class PrefillLocal(NamedTuple):
    """A call of the indexer's prefill scorer and selection; with a ``pool``, of the fused ones."""

    query: Annotated[Tensor, DenseTensor(E4M3, 3)]
    index_k: Annotated[Tensor, DenseTensor(E4M3, 3)]
    block_table: Annotated[Tensor, DenseTensor(INT32, 2)]
    window_plan: Annotated[MSAIcpScorePlan, Group(PlanArguments)]
    rank: int
    world_size: Annotated[int, OneOf(*WORLD_SIZES)]
    score_scratch: Annotated[Tensor | None, DenseTensor(FLOAT32, 3)]
    num_valid_pages: Annotated[Tensor, DenseTensor(INT32, 1)]
    carrier_view: Annotated[Tensor, DenseTensor(INT32, 3)]
    force_begin_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    force_end_blocks: Annotated[int, Integer(0, MAX_FORCED_BLOCKS)]
    index_scale: Annotated[int, Integer(1, 2)]
    index_offset: Annotated[int, Integer(0, 1)]
    pool: Annotated[Tensor | None, DenseTensor(UINT8, 1)]
    short_scratch: Annotated[Tensor | None, DenseTensor(FLOAT32, 3)]
    exact: bool

    def arguments(self) -> tuple[Any, ...]:
        """What the launcher takes."""
        return _with_plan_arguments(self)

    def of_step(self, query: Any, index_k: Any, first_token: int) -> PrefillLocal:
        """The call with keys and a step's query, in which the window's tokens begin at ``first_token``."""
        if _is_tensor(query) and query.dim() > 0:
            query = query[first_token : first_token + self.window_plan.total_q]
        return self._replace(query=query, index_k=index_k)

    def scores(self) -> Tensor | None:
        """Where the scores of a checked call go, ``[total_q, 4, one column per page]``; None for the fused chain."""
        tokens, columns = self.window_plan.total_q, ceil_div(self.window_plan.columns, self.index_scale)
        scratch = self.score_scratch
        if self.pool is not None:
            scratch = self.short_scratch
            if scratch is None or tokens > scratch.shape[0] or columns > scratch.shape[2]:
                return None
        assert scratch is not None  # the launcher has checked it
        return scratch[:tokens, :, :columns]


class PrefillMerge(NamedTuple):
    """A call of the indexer's merge of an exchanged carrier."""

    received: Annotated[Tensor, DenseTensor(INT32, 4)]
    num_valid_pages: Annotated[Tensor, DenseTensor(INT32, 1)]
    output: Annotated[Tensor, DenseTensor(INT32, 3)]
    world_size: Annotated[int, Integer(1, NUM_HEADS)]
    init_blocks: Annotated[int, Integer(0, INT32_MAX)]
    local_blocks: Annotated[int, Integer(0, INT32_MAX)]


OPERATIONS: dict[str, type] = {
    "receive_storage": ReceiveStorage,
    "decode_score": DecodeScore,
    "select_publish": SelectPublish,
    "score_publish": ScorePublish,
    "merge": Merge,
    "decode": Decode,
    "prefill_plan": PrefillPlan,
    "prefill_score": PrefillScore,
    "select_prefill": SelectPrefill,
    "prefill_score_select": PrefillScoreSelect,
    "prefill_local": PrefillLocal,
    "prefill_merge": PrefillMerge,
}
"""The call that each operation of the launcher takes, after ``launch``. ``decode`` takes its state before the call."""

PREFIXES = {"receive_storage": "comm."}
"""What errors put before the names of an operation's arguments."""


def schema_digest() -> str:
    """SHA-256 of all that Python and the launcher must agree on. A launcher with another digest is not loaded."""
    agreed = {
        "constants": schema.CONSTANTS,
        "roles": schema.ROLES,
        "fault": [schema.FAULT_FIELDS, schema.FAULT_WORDS, schema.FAULT_WAITS, schema.ROW_KINDS],
        "state": ChainState._fields,
        "operations": {
            name: [(argument, repr(kind)) for argument, kind in schema.arguments_of(call, PREFIXES.get(name, ""))]
            for name, call in OPERATIONS.items()
        },
    }
    return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()


def _multiprocessors_of(tensor: Any) -> int:
    """Multiprocessors of a tensor's device, 1 for what is not on one that has any: the launcher refuses that."""
    return multiprocessor_count(tensor.device) if _is_tensor(tensor) and tensor.is_cuda else 1


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
