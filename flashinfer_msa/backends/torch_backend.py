# SPDX-License-Identifier: Apache-2.0
"""``backend="torch"``: calls checked like those of every backend, then the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

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
from ..layout import BLOCK_TOKENS, MAX_BLOCKS, NUM_HEADS, Layout, find_layout
from ..prefill.planner import plan_work
from ..prefill.window import MSAIcpScorePlan
from ..runtime import native, shared
from ..sizing import ceil_div, max_items, require_device
from . import reference
from .base import Chain
from .chains import DECODE_LAUNCHES, CheckedCalls
from .storage import CheckedStorage, StorageTable


def _require_torch(call: NamedTuple) -> None:
    """Refuse what the launcher takes for a tensor, through DLPack, and torch code cannot use."""
    for name, value in _named_values(call):
        if value is None or isinstance(value, (int, float)):
            continue
        if not isinstance(value, torch.Tensor) and hasattr(value, "__dlpack__"):
            raise ValueError(f"{name} must be a torch tensor, was of {type(value)}")
        if isinstance(value, torch.Tensor) and value.is_neg():
            raise ValueError(f"{name} must be resolved, was a tensor with a pending negation")


def _named_values(call: NamedTuple) -> Iterator[tuple[str, Any]]:
    """A call's arguments, a plan's fields among them."""
    for name, value in call._asdict().items():
        if isinstance(value, MSAIcpScorePlan):
            yield from ((f"{name}.{field}", part) for field, part in vars(value).items())
        else:
            yield name, value


def _fields(call: NamedTuple, *without: str) -> dict[str, Any]:
    """The call's arguments by name, but for those that only a launch needs."""
    return {name: value for name, value in call._asdict().items() if name not in without}


class TorchBackend:
    """The reference, on the CPU or a CUDA device."""

    name = "torch"
    default_device = "cpu"

    def can_capture(self, device: torch.device) -> bool:
        """The reference synchronizes."""
        return False

    def resolve_device(self, device: Any) -> tuple[torch.device, str]:
        """The device with its index filled in; its type stands for the architecture."""
        wanted = require_device(device)
        if wanted.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be the CPU or a CUDA device, was {wanted}")
        try:
            resolved = torch.empty(0, device=wanted).device
        except (AssertionError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
            raise ValueError(f"device must be usable, was {wanted}: {error}") from error
        return resolved, resolved.type

    def kernels_identity(self, device: torch.device) -> str:
        """The device's type: the reference is the same everywhere."""
        return device.type

    def warmup(self, device: torch.device) -> None:
        """Nothing needs to be resident."""

    def check_receive_storage(self, fields: Sequence[torch.Tensor]) -> None:
        """Check that the fields are memory."""
        native.call("receive_storage", False, *fields)

    @torch.inference_mode()
    def decode_score(self, call: DecodeScore) -> None:
        """Score in torch."""
        native.call("decode_score", False, *call)
        _require_torch(call)
        reference.decode_index_score(
            **_fields(call, "world_size", "page_size", "max_decode_query_len", "enable_pdl"),
            layout=find_layout(call.page_size, call.world_size),
        )

    @torch.inference_mode()
    def select_publish(self, call: SelectPublish) -> None:
        """Select in torch, and publish through the addresses."""
        native.call("select_publish", False, *call)
        _require_torch(call)
        if call.scores.shape[0] > 0:
            limit = reference.WaitLimit(call.spin_limit)
            reference.topk_select_publish(**_fields(call, "spin_limit", "enable_pdl"), limit=limit)

    @torch.inference_mode()
    def merge(self, call: Merge) -> None:
        """Merge in torch."""
        native.call("merge", False, *call)
        _require_torch(call)
        if call.num_valid_pages.numel() > 0:
            limit = reference.WaitLimit(call.spin_limit)
            reference.merge_candidates(**_fields(call, "spin_limit", "enable_pdl", "tagged"), limit=limit)

    @torch.inference_mode()
    def score_publish(self, call: ScorePublish) -> None:
        """Score into a plane of its own, select and publish in torch."""
        native.call("score_publish", False, *call)
        _require_torch(call)
        if call.num_valid_pages.numel() == 0:
            return
        layout = find_layout(call.page_size, call.world_size)
        scores = _score_plane(call.index_q, call.block_table)
        reference.decode_index_score(
            *call[:4], scores, layout=layout, rank=call.rank, decode_query_len=call.decode_query_len
        )
        reference.topk_select_publish(
            scores,
            call.num_valid_pages,
            call.recv_bases,
            call.errors,
            slot=call.slot,
            rank=call.rank,
            world_size=call.world_size,
            heads_per_rank=layout.heads_per_rank,
            capacity=call.capacity,
            force_begin_blocks=call.force_begin_blocks,
            force_end_blocks=call.force_end_blocks,
            generations=call.generations,
            index_scale=layout.index_scale,
            index_offset=layout.index_offset(call.rank),
            limit=reference.WaitLimit(call.spin_limit),
        )

    def decode(self, storages: StorageTable, comm: Any, call: Decode) -> None:
        """The chain in torch. In one process, a chain whose merge could not end publishes nothing."""
        storages.run(comm, call, self._decode)

    @torch.inference_mode()
    def _decode(self, storage: CheckedStorage, call: Decode) -> None:
        native.call("decode", False, *call.arguments(storage.state))
        _require_torch(call)
        limits, fields = storage.limits, storage.fields
        tokens = call.num_valid_pages.numel()
        if tokens == 0:
            return
        recv = (fields.tagged_recv if call.tagged else fields.recv)[call.slot]
        expected = fields.expected_generations[call.slot] if call.tagged else None
        common: dict[str, Any] = {
            "rank": limits.rank,
            "slot": call.slot,
            "limit": reference.WaitLimit(limits.spin_limit, limits.wait_seconds),
        }
        if call.publishes:
            if call.merges and shared.find(recv.data_ptr()) is None:
                rows, counters = recv[:, :, :tokens], None if expected is None else expected[:, :tokens]
                reference.require_rows(rows, counters, fields.errors, but_of=limits.rank, **common)
            self._publish(storage, call, **common)
        if call.merges:
            assert call.output is not None  # the launcher has checked it
            reference.merge_candidates(
                recv,
                call.num_valid_pages,
                call.output,
                fields.errors,
                init_blocks=limits.init_blocks,
                local_blocks=limits.local_blocks,
                expected_generations=expected,
                prefill=False,
                **common,
            )

    def _publish(self, storage: CheckedStorage, call: Decode, **common: Any) -> None:
        limits, fields = storage.limits, storage.fields
        # The launcher has checked these.
        assert call.index_q is not None and call.index_k is not None
        assert call.block_table is not None and call.seq_lens is not None
        if call.pool is not None or call.scores is None:
            scores = _score_plane(call.index_q, call.block_table)
        else:
            scores = call.scores[: call.num_valid_pages.numel()]
        reference.decode_index_score(
            call.index_q,
            call.index_k,
            call.block_table,
            call.seq_lens,
            scores,
            layout=limits.layout,
            rank=limits.rank,
            decode_query_len=call.decode_query_len,
        )
        reference.topk_select_publish(
            scores,
            call.num_valid_pages,
            fields.tagged_recv_bases if call.tagged else fields.recv_bases,
            fields.errors,
            world_size=limits.world_size,
            heads_per_rank=limits.heads_per_rank,
            capacity=limits.max_decode_tokens,
            force_begin_blocks=limits.init_blocks,
            force_end_blocks=limits.local_blocks,
            generations=fields.publish_generations if call.tagged else None,
            index_scale=limits.index_scale,
            index_offset=limits.index_offset,
            **common,
        )

    @torch.inference_mode()
    def prefill_plan(self, call: PrefillPlan) -> None:
        """Plan in torch."""
        native.call("prefill_plan", False, *call.arguments())
        _require_torch(call)
        batch = len(call.qo_segment_lens)
        if batch > 0:
            plan_work(
                call.qo_segment_lens,
                call.kv_segment_lens,
                call.qo_offset,
                call.packed_work_range,
                call.packed_work_info,
                columns=ceil_div(call.max_seq_len, BLOCK_TOKENS),
                max_items=max_items(call.total_q, batch),
            )

    @torch.inference_mode()
    def prefill_score(self, call: PrefillScore) -> None:
        """Score in torch."""
        native.call("prefill_score", False, *call.arguments())
        _require_torch(call)
        if call.plan.batch > 0:
            reference.prefill_index_score(
                **_fields(call, "tp", "sm_scale", "enable_pdl", "exact"), layout=_layout_of(call.k, call.tp)
            )

    @torch.inference_mode()
    def select_prefill(self, call: SelectPrefill) -> None:
        """Select in torch."""
        native.call("select_prefill", False, *call)
        _require_torch(call)
        if call.scores.shape[0] > 0:
            reference.select_prefill(**call._asdict())

    @torch.inference_mode()
    def prefill_score_select(self, call: PrefillScoreSelect) -> None:
        """Score into a plane of its own, and select in torch."""
        native.call("prefill_score_select", False, *call.arguments())
        _require_torch(call)
        if call.plan.batch > 0:
            reference.prefill_score_select(
                **_fields(call, "tp", "pool", "compact", "enable_pdl", "exact"), layout=_layout_of(call.k, call.tp)
            )

    @torch.inference_mode()
    def prefill_local(self, call: PrefillLocal) -> None:
        """The indexer's scorer and selection in torch."""
        native.call("prefill_local", False, *call.arguments())
        _require_torch(call)
        plan, layout = call.window_plan, _layout_of(call.index_k, call.world_size)
        if plan.batch == 0:
            return
        scores = call.scores()
        if scores is None:
            reference.prefill_score_select(
                call.query,
                call.index_k,
                call.block_table,
                plan,
                call.num_valid_pages,
                call.carrier_view,
                layout=layout,
                rank=call.rank,
                force_begin_blocks=call.force_begin_blocks,
                force_end_blocks=call.force_end_blocks,
            )
            return
        reference.prefill_index_score(
            call.query,
            call.index_k,
            call.block_table,
            plan,
            scores,
            layout=layout,
            rank=call.rank,
            initialize=False,
            compact=layout.index_scale > 1,
        )
        reference.select_prefill(
            scores,
            call.num_valid_pages,
            call.carrier_view,
            force_begin_blocks=call.force_begin_blocks,
            force_end_blocks=call.force_end_blocks,
            index_scale=call.index_scale,
            index_offset=call.index_offset,
        )

    @torch.inference_mode()
    def prefill_merge(self, call: PrefillMerge) -> None:
        """The indexer's merge in torch."""
        native.call("prefill_merge", False, *call)
        _require_torch(call)
        if call.num_valid_pages.numel() > 0:
            reference.merge_candidates(
                call.received,
                call.num_valid_pages,
                call.output,
                None,
                init_blocks=call.init_blocks,
                local_blocks=call.local_blocks,
                expected_generations=None,
                prefill=True,
            )

    def decode_chain(self, storage: CheckedStorage, call: Decode) -> Chain:
        """The indexer's decode chain, in full at every run."""

        def run(query: Any, keys: Any, first: int, end: int) -> None:
            bound = call._replace(index_q=query, index_k=keys)
            if end == 0:
                native.call("decode", False, *bound.arguments(storage.state))
            else:
                self._decode(storage, bound._replace(publishes=first == 0, merges=end == len(DECODE_LAUNCHES)))

        return CheckedCalls(run, call.num_valid_pages.numel())

    def prefill_local_chain(self, call: PrefillLocal, tokens: int, first_token: int) -> Chain:
        """The indexer's scorer and selection, in full at every run."""

        def run(query: Any, keys: Any, first: int, end: int) -> None:
            bound = call.of_step(query, keys, first_token)
            if end == 0:
                native.call("prefill_local", False, *bound.arguments())
            else:
                self.prefill_local(bound)

        return CheckedCalls(run, tokens)

    def prefill_merge_chain(self, call: PrefillMerge) -> Chain:
        """The indexer's merge of an exchanged carrier, in full at every run."""

        def run(query: Any, keys: Any, first: int, end: int) -> None:
            if end == 0:
                native.call("prefill_merge", False, *call)
            else:
                self.prefill_merge(call)

        return CheckedCalls(run, 0)


def _score_plane(index_q: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """A plane for the scores of every page of the block table, -inf where none is written."""
    columns = min(max(ceil_div(block_table.shape[1], 4) * 4, 4), MAX_BLOCKS)
    return torch.full((len(index_q), NUM_HEADS, columns), -torch.inf, dtype=torch.float32, device=index_q.device)


def _layout_of(keys: torch.Tensor, world_size: int) -> Layout:
    """The layout of checked keys."""
    return find_layout(keys.shape[1] * world_size, world_size)
