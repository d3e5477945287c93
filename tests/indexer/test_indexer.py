# SPDX-License-Identifier: Apache-2.0
"""The indexer: its attributes, shapes and sizes by formula, and its decode chain over steps on the CPU."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer_msa import msa_ops
from flashinfer_msa.backends.storage import CheckedStorage
from flashinfer_msa.comm import MSAIcpComm, local_comm
from flashinfer_msa.indexer import MSAIcpIndexerPlan
from flashinfer_msa.layout import LAYOUTS, Layout
from flashinfer_msa.prefill import tuning as prefill_tuning
from flashinfer_msa.prefill.tuning import PrefillTuning
from flashinfer_msa.testing.problems import DecodeProblem, brute_force_top16, group_indexers

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
both_forms = pytest.mark.parametrize("tagged", (False, True), ids=("legacy", "tagged"))
PAGE_SIZES = st.sampled_from((128, 256))
WORLD_SIZES = st.sampled_from((2, 4))
MIB, KIB = 1 << 20, 1 << 10
COMM_FIELDS = (
    "recv",
    "tagged_recv",
    "recv_bases",
    "tagged_recv_bases",
    "publish_generations",
    "expected_generations",
    "errors",
)


def up(value: int, divisor: int) -> int:
    """``value / divisor`` rounded up."""
    return (value + divisor - 1) // divisor


# --- sizes ------------------------------------------------------------------------------------------------------------


@given(
    total_q=st.integers(1, 1 << 20), batch=st.integers(1, 1 << 16), device=st.sampled_from(("cpu", torch.device("cpu")))
)
def test_prefill_storage(total_q: int, batch: int, device: Any) -> None:
    # A CPU counts as one multiprocessor.
    assert msa_ops.msa_icp_index_score_plan_storage(num_qo_heads=4, total_q=total_q, batch=batch, device=device) == {
        "work_range_numel": 1,
        "work_info_numel": ((total_q + 127) // 128 + batch - 1) * 4,
        "workspace_bytes": 32 * MIB,
    }
    pool = msa_ops.msa_icp_prefill_pool_bytes(total_q=total_q, batch=batch, device=device)
    assert pool == (math.ceil(total_q / 64) + batch - 1 + 1 - 1) * 32 * KIB


@given(length=st.integers(1, 1 << 24), page_size=PAGE_SIZES)
def test_score_columns(length: int, page_size: int) -> None:
    blocks = math.ceil(length / 128)
    columns = blocks if page_size == 128 else math.ceil(blocks / 2)
    assert msa_ops.msa_icp_index_score_columns(length, page_size) == columns
    assert msa_ops.msa_icp_decode_score_columns(length, page_size) == min(8192, math.ceil(length / (4 * page_size)) * 4)


@given(tokens=st.integers(1, 1 << 16), heads=st.integers(1, 64))
def test_decode_pool_bytes(tokens: int, heads: int) -> None:
    assert msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=tokens, num_heads=heads) == tokens * heads * 128 * 16 * 8
    assert msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=tokens) == tokens * 4 * 128 * 16 * 8


@given(world_size=WORLD_SIZES, capacity=st.integers(1, 1 << 16))
def test_comm_layout(world_size: int, capacity: int) -> None:
    owned = 4 // world_size
    rows = 3 * world_size * owned * capacity
    assert msa_ops.msa_icp_comm_layout(world_size, owned, capacity) == {
        "storage_words": rows * 33 + rows * 64,
        "legacy_offset_bytes": 0,
        "legacy_shape": (3, world_size, owned, capacity, 33),
        "tagged_offset_bytes": rows * 33 * 4,
        "tagged_shape": (3, world_size, owned, capacity, 32),
        "generations_shape": (3, world_size * owned, capacity),
        "expected_shape": (3, owned, capacity),
    }
    assert rows * 33 * 4 % 8 == 0


# --- attributes -------------------------------------------------------------------------------------------------------


def limits(layout: Layout, **changes: Any) -> dict[str, Any]:
    """Arguments of ``prepare_msa_icp_indexer``."""
    values: dict[str, Any] = {
        "world_size": layout.world_size,
        "rank": 0,
        "num_index_heads": 4,
        "page_size": layout.page_size,
        "init_blocks": 1,
        "local_blocks": 2,
        "max_decode_tokens": 12,
        "max_decode_query_len": 3,
        "max_num_batched_tokens": 100,
        "max_num_seqs": 3,
        "max_model_len": 6000,
        "num_sparse_layers": 3,
        "device": "cpu",
        "spin_limit": 7,
        "wait_seconds": 0.5,
        "accumulation": "exact",
        "backend": "torch",
    }
    return {**values, **changes}


def prepare(layout: Layout, **changes: Any) -> MSAIcpIndexerPlan:
    return msa_ops.prepare_msa_icp_indexer(**limits(layout, **changes))


@settings(deadline=None)
@given(
    layout=st.sampled_from(list(LAYOUTS.values())),
    rank=st.integers(0, 3),
    max_model_len=st.integers(1, 4 << 20),
    other_len=st.integers(1, 4 << 20),
    batched=st.integers(1, 1 << 17),
    max_num_seqs=st.integers(1, 1 << 12),
    tokens=st.integers(1, 1 << 12),
)
def test_attributes_and_shapes(
    layout: Layout, rank: int, max_model_len: int, other_len: int, batched: int, max_num_seqs: int, tokens: int
) -> None:
    rank %= layout.world_size
    given_limits = limits(
        layout,
        rank=rank,
        max_model_len=max_model_len,
        max_num_batched_tokens=batched,
        max_num_seqs=max_num_seqs,
        max_decode_tokens=tokens,
    )
    indexer = msa_ops.prepare_msa_icp_indexer(**given_limits)
    assert {name: getattr(indexer, name) for name in given_limits} == {**given_limits, "device": torch.device("cpu")}
    assert indexer.arch == "cpu"
    assert indexer.heads_per_rank == 4 // layout.world_size
    expected = (1, 0) if layout.page_size == 128 else (2, rank * 2 // layout.world_size)
    assert (indexer.index_scale, indexer.index_offset) == expected
    assert indexer.comm_layout == msa_ops.msa_icp_comm_layout(layout.world_size, 4 // layout.world_size, tokens)

    def pitch_of(length: int) -> int:
        blocks = up(length, 128)
        return up(blocks if layout.page_size == 128 else up(blocks, 2), 16) * 16

    def chunk_of(pitch: int) -> int:
        return min(8192, max(128, 256 * MIB // (5 * 4 * pitch) // 128 * 128))

    pitch = pitch_of(max_model_len)
    columns = min(8192, up(max_model_len, 4 * layout.page_size) * 4)
    assert indexer.decode_score_columns == columns
    assert indexer.prefill_score_columns == pitch
    assert indexer.max_prefill_windows == up(batched, chunk_of(pitch))
    assert indexer.decode_scores_shape() == (tokens, 4, columns)
    assert indexer.prefill_scratch_shape() == (min(chunk_of(pitch), batched), 4, pitch)
    other = pitch_of(other_len)
    assert indexer.prefill_scratch_shape(other_len) == indexer.prefill_scratch_shape(max_seq_len=other_len)
    assert indexer.prefill_scratch_shape(other_len) == (min(chunk_of(other), batched), 4, other)
    window = min(8192, batched)
    assert indexer.prefill_window_tokens() == window
    assert indexer.prefill_pool_shape() == ((up(window, 64) + max_num_seqs - 1) * 32 * KIB,)
    assert indexer.prefill_carrier_shape() == (2, 4, batched, 33)


@every_layout
def test_nothing_is_fused_by_default_on_a_cpu(layout: Layout) -> None:
    indexer = prepare(layout)
    assert (
        indexer.fused_decode_min_batch is None and indexer.fused_prefill is False and indexer.prefill_short_tokens == 0
    )
    assert layout.title in repr(indexer) and "torch" in repr(indexer) and "rank 0" in repr(indexer)
    indexer.warmup()
    for bad in (0, -1, True, 1.0, "1"):
        with pytest.raises(ValueError, match=f"^max_seq_len must .*was {bad!r}"):
            indexer.prefill_scratch_shape(bad)


@every_layout
def test_a_measured_indexer_has_scratch_for_short_windows(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_tuning, "PREFILL", {("cpu", layout.name): PrefillTuning(fused=True, short_tokens=24)})
    indexer = prepare(layout)
    assert indexer.fused_prefill is True and indexer.prefill_short_tokens == 24
    # No more than a window has, and none where a selection could not read the rows.
    assert prepare(layout, max_num_batched_tokens=9).prefill_short_tokens == 9
    widest = 12272 * layout.page_size
    assert prepare(layout, max_num_batched_tokens=9, max_model_len=widest).prefill_short_tokens == 9
    assert prepare(layout, max_model_len=widest + 1).prefill_short_tokens == 0
    assert prepare(layout, max_model_len=widest + 1).fused_prefill is True
    other = next(each for each in LAYOUTS.values() if each != layout)
    assert prepare(other).fused_prefill is False and prepare(other).prefill_short_tokens == 0


# --- the decode chain -------------------------------------------------------------------------------------------------


class Ranks:
    """All ranks of a group in this process, their storage, and calls for one rank at a time."""

    def __init__(self, layout: Layout, **changes: Any) -> None:
        self.indexers = [prepare(layout, rank=rank, **changes) for rank in range(layout.world_size)]
        self.comms = local_comm(self.indexers)

    def scores(self) -> torch.Tensor:
        return torch.full(self.indexers[0].decode_scores_shape(), torch.nan)

    def inputs(self, problem: DecodeProblem, rank: int) -> tuple[torch.Tensor, ...]:
        shard = problem.shard(rank)
        return problem.index_q, shard, problem.block_table, problem.seq_lens, problem.num_valid_pages

    def output(self, problem: DecodeProblem) -> torch.Tensor:
        return torch.full((len(problem.index_q), self.indexers[0].heads_per_rank, 16), -7, dtype=torch.int32)

    def publish(self, rank: int, problem: DecodeProblem, slot: int, tagged: bool, **changes: Any) -> None:
        step = {"comm": self.comms[rank], "slot": slot, "tagged": tagged, "decode_query_len": problem.decode_query_len}
        self.indexers[rank].decode_publish(*self.inputs(problem, rank), self.scores(), **{**step, **changes})

    def merge(self, rank: int, problem: DecodeProblem, slot: int, tagged: bool, **changes: Any) -> torch.Tensor:
        output = self.output(problem)
        step = {"comm": self.comms[rank], "slot": slot, "tagged": tagged}
        self.indexers[rank].decode_merge(problem.num_valid_pages, output, **{**step, **changes})
        return output

    def decode(self, rank: int, problem: DecodeProblem, slot: int, tagged: bool, **changes: Any) -> torch.Tensor:
        output = self.output(problem)
        step = {"comm": self.comms[rank], "slot": slot, "tagged": tagged, "decode_query_len": problem.decode_query_len}
        self.indexers[rank].decode(*self.inputs(problem, rank), self.scores(), output, **{**step, **changes})
        return output

    def whole(self, problem: DecodeProblem, slot: int, tagged: bool) -> torch.Tensor:
        """One layer on every rank, in halves."""
        ranks = range(len(self.indexers))
        for rank in ranks:
            self.publish(rank, problem, slot, tagged)
        return torch.cat([self.merge(rank, problem, slot, tagged) for rank in ranks], dim=1)


@every_layout
@both_forms
def test_decode_equals_its_halves_over_steps(layout: Layout, tagged: bool) -> None:
    halves, mixed = Ranks(layout), Ranks(layout)
    ranks = range(layout.world_size)
    for step in range(7):
        problem = DecodeProblem.random(
            layout, seq_lens=(5000 + step, 130, 0, 2600)[: 1 + step % 4], decode_query_len=1 + step % 3, seed=step
        )
        expected = brute_force_top16(problem, init_blocks=1, local_blocks=2).ids
        slot = step % 3
        assert torch.equal(halves.whole(problem, slot, tagged), expected)
        # One rank runs the whole chain, after the others have published.
        last = step % layout.world_size
        for rank in ranks:
            if rank != last:
                mixed.publish(rank, problem, slot, tagged)
        outputs = {last: mixed.decode(last, problem, slot, tagged)}
        outputs |= {rank: mixed.merge(rank, problem, slot, tagged) for rank in ranks if rank != last}
        assert torch.equal(torch.cat([outputs[rank] for rank in ranks], dim=1), expected)
        for ours, theirs in zip(halves.comms, mixed.comms, strict=True):
            for name in ("recv", "tagged_recv", "publish_generations", "expected_generations", "errors"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for comm in halves.comms:
        assert int(comm.errors) == 0 and not comm.recv[..., 32].any()
        # Rows of the unused kind were never written.
        assert not (comm.recv if tagged else comm.tagged_recv).any()
        assert bool(comm.publish_generations.any()) is bool(comm.expected_generations.any()) is tagged


@both_forms
def test_both_forms_share_one_storage_and_any_slot_order(tagged: bool) -> None:
    layout = LAYOUTS["p256_tp4"]
    group = Ranks(layout)
    problem = DecodeProblem.random(layout, seq_lens=(900, 5100), decode_query_len=2)
    expected = brute_force_top16(problem, init_blocks=1, local_blocks=2).ids
    for slot, form in ((2, tagged), (0, not tagged), (2, not tagged), (1, tagged), (2, tagged)):
        assert torch.equal(group.whole(problem, slot, form), expected)


@both_forms
def test_a_score_plane_larger_than_the_step_is_fine(tagged: bool) -> None:
    layout = LAYOUTS["p128_tp2"]
    group = Ranks(layout)
    problem = DecodeProblem.random(layout, seq_lens=(3000, 700), decode_query_len=2)
    group.publish(1, problem, 0, tagged)
    output, plane = group.output(problem), group.scores()
    group.indexers[0].decode(
        *group.inputs(problem, 0), plane, output, comm=group.comms[0], slot=0, tagged=tagged, decode_query_len=2
    )
    assert torch.equal(output, brute_force_top16(problem, init_blocks=1, local_blocks=2).ids[:, :2])
    assert not plane[:4, :, :4].isnan().any() and plane[4:].isnan().all()


@pytest.mark.parametrize(
    "copied", (copy.deepcopy, lambda indexer: pickle.loads(pickle.dumps(indexer))), ids=("deep", "pickle")
)
def test_a_copy_is_an_indexer_of_the_same_limits(copied: Callable[[Any], Any]) -> None:
    """It knows nothing of the storage and the compiled code of the original."""
    ranks = Ranks(LAYOUTS["p256_tp4"], wait_seconds=2.5, accumulation="exact")
    indexers, indexer = ranks.indexers, ranks.indexers[2]
    indexer.check_comm(ranks.comms[2])
    other = copied(indexer)
    names = set(inspect.signature(msa_ops.prepare_msa_icp_indexer).parameters)
    assert len(names) == 17 and all(getattr(other, name) == getattr(indexer, name) for name in names)
    assert repr(other) == repr(indexer) and other._work_range.data_ptr() != indexer._work_range.data_ptr()
    assert other._storages.handle != indexer._storages.handle and other._storages._latest is None
    other.check_comm(local_comm([*indexers[:2], other, indexers[3]])[2])


@pytest.mark.parametrize("where", (lambda: torch.device("meta"), torch.inference_mode), ids=("device", "inference"))
def test_the_callers_modes_do_not_matter(where: Callable[[], Any]) -> None:
    """Not the default device, and what is made in inference mode is written outside."""
    problem = DecodeProblem.random(LAYOUTS["p128_tp2"], seq_lens=[700, 5], decode_query_len=1)
    valid, shards = problem.num_valid_pages, [problem.shard(rank) for rank in range(2)]
    expected = brute_force_top16(problem, init_blocks=1, local_blocks=2).ids
    lens = torch.tensor([3, 2], dtype=torch.int32)
    with where():
        ranks = Ranks(problem.layout)
        indexers, comms = ranks.indexers, ranks.comms
        outputs = [torch.zeros(2, 2, 16, dtype=torch.int32, device="cpu") for _ in indexers]
        scores = torch.zeros(indexers[0].decode_scores_shape(), device="cpu")
        steps = [
            indexer.prepare_decode_step(
                problem.block_table,
                problem.seq_lens,
                valid,
                scores,
                output,
                comm=comm,
                tagged=True,
                decode_query_len=1,
            )
            for indexer, comm, output in zip(indexers, comms, outputs, strict=True)
        ]
        for step, keys in zip(steps, shards, strict=True):
            step.publish(problem.index_q, keys, slot=0)
        for step in steps:
            step.merge(slot=0)
        host_plan = msa_ops.msa_icp_index_score_sharded_plan(
            lens, lens, 4, qo_offset=lens - lens, device="cpu", backend="torch"
        )
    assert torch.equal(torch.cat(outputs, 1), expected)
    assert host_plan.packed_work_info.any() and host_plan.packed_work_info.device.type == "cpu"
    for tensor in (*vars(comms[0]).values(), *vars(indexers[0]).values()):
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()


@every_layout
def test_a_step_without_a_request_does_nothing(layout: Layout) -> None:
    group = Ranks(layout)
    problem = DecodeProblem.random(layout, seq_lens=(), decode_query_len=2)
    for tagged in (False, True):
        # No rank has published, and none needs to.
        assert group.decode(0, problem, 0, tagged).shape == (0, layout.heads_per_rank, 16)
        assert len(group.whole(problem, 1, tagged)) == 0
    assert not any(map(touched, group.comms))


def test_tagged_rows_need_two_layers() -> None:
    layout = LAYOUTS["p128_tp2"]
    group = Ranks(layout, num_sparse_layers=1)
    problem = DecodeProblem.random(layout, seq_lens=(300,), decode_query_len=1)
    for call in (group.decode, group.publish, group.merge):
        with pytest.raises(ValueError, match=r"^tagged must be False with fewer than 2 sparse layers, was True with 1"):
            call(0, problem, 0, True)
    expected = brute_force_top16(problem, init_blocks=1, local_blocks=2).ids
    assert torch.equal(group.whole(problem, 0, False), expected)
    assert torch.equal(Ranks(layout, num_sparse_layers=2).whole(problem, 0, True), expected)


@both_forms
def test_more_tokens_than_the_limit_are_refused_by_its_name(tagged: bool) -> None:
    layout = LAYOUTS["p128_tp4"]
    group = Ranks(layout, max_decode_tokens=3)
    problem = DecodeProblem.random(layout, seq_lens=(300, 400), decode_query_len=2)
    plane = torch.zeros(4, 4, 12)
    step = {"comm": group.comms[0], "slot": 0, "tagged": tagged}
    with pytest.raises(ValueError, match=r"max_decode_tokens.*(3.*4|4.*3)"):
        group.indexers[0].decode_publish(*group.inputs(problem, 0), plane, **step, decode_query_len=2)
    with pytest.raises(ValueError, match=r"max_decode_tokens.*(3.*4|4.*3)"):
        group.indexers[0].decode(*group.inputs(problem, 0), plane, group.output(problem), **step, decode_query_len=2)
    with pytest.raises(ValueError, match=r"num_valid_pages must have at most .*3.*had 4"):
        group.merge(0, problem, 0, tagged)
    assert not any(map(touched, group.comms))


def touched(comm: MSAIcpComm) -> bool:
    """Whether a rank's receive storage or counters hold anything."""
    parts = (comm.recv, comm.tagged_recv, comm.publish_generations, comm.expected_generations, comm.errors)
    return any(bool(part.any()) for part in parts)


# --- receive storage --------------------------------------------------------------------------------------------------


@every_layout
def test_local_comm_follows_the_layout(layout: Layout) -> None:
    indexers = Ranks(layout).indexers
    comms = local_comm(indexers)
    sizes = indexers[0].comm_layout
    for comm in comms:
        assert comm.recv.shape == sizes["legacy_shape"] and comm.recv.dtype == torch.int32
        assert comm.tagged_recv.shape == sizes["tagged_shape"] and comm.tagged_recv.dtype == torch.int64
        assert comm.publish_generations.shape == sizes["generations_shape"]
        assert comm.expected_generations.shape == sizes["expected_shape"]
        assert comm.tagged_recv.data_ptr() - comm.recv.data_ptr() == sizes["tagged_offset_bytes"]
        assert comm.recv.untyped_storage().data_ptr() == comm.tagged_recv.untyped_storage().data_ptr()
        assert comm.recv.untyped_storage().nbytes() == 4 * sizes["storage_words"]
        assert comm.recv_bases.tolist() == [other.recv.data_ptr() for other in comms]
        assert comm.tagged_recv_bases.tolist() == [other.tagged_recv.data_ptr() for other in comms]
        # The addresses stay good for as long as any one of the comms lives.
        held = [storage.data_ptr() for storage in comm.storages]
        assert held == comm.recv_bases.tolist() and not touched(comm)
    for indexer, comm in zip(indexers, comms, strict=True):
        indexer.check_comm(comm)


def counted(indexer: MSAIcpIndexerPlan, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The comms that ``indexer`` checks from here on."""
    seen: list[Any] = []
    check = indexer._storages.check

    def counting(comm: Any) -> CheckedStorage:
        seen.append(comm)
        return check(comm)

    monkeypatch.setattr(indexer._storages, "check", counting)
    return seen


def test_a_comm_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["p128_tp2"]
    group = Ranks(layout)
    problem = DecodeProblem.random(layout, seq_lens=(300,), decode_query_len=1)
    seen = counted(group.indexers[0], monkeypatch)
    for step in range(4):
        group.publish(1, problem, step % 3, True)
        group.decode(0, problem, step % 3, True)
        group.merge(1, problem, step % 3, True)
        group.whole(problem, (step + 2) % 3, False)
    assert len(seen) == 1 and seen[0] is group.comms[0]
    # Another object with the same fields is the same comm; any object with the fields will do.
    fields = {name: getattr(group.comms[0], name) for name in COMM_FIELDS}
    group.comms[0] = SimpleNamespace(**fields)  # type: ignore[call-overload]
    group.whole(problem, 0, False)
    assert len(seen) == 1


@pytest.mark.parametrize("name", COMM_FIELDS)
@pytest.mark.parametrize("call", ("decode", "publish", "merge"))
def test_a_changed_field_is_checked_again(monkeypatch: pytest.MonkeyPatch, name: str, call: str) -> None:
    layout = LAYOUTS["p128_tp2"]
    group = Ranks(layout)
    problem = DecodeProblem.random(layout, seq_lens=(300,), decode_query_len=1)
    group.whole(problem, 0, False)
    comm = group.comms[0]
    seen = counted(group.indexers[0], monkeypatch)
    right = getattr(comm, name)
    for wrong in (right.to(torch.int16), right[None], None):
        for _ in range(2):  # a refusal is not remembered as a check
            with pytest.raises(ValueError, match=rf"^comm\.{name} must "):
                getattr(group, call)(0, problem, 1, False, comm=replace(comm, **{name: wrong}))
    assert len(seen) == 6
    # The comm that was checked before is still known, and an equal view of a field is a change.
    group.whole(problem, 1, False)
    assert len(seen) == 6
    same = replace(comm, **{name: right.view(right.shape)})
    group.comms[0] = same
    group.whole(problem, 2, False)
    group.whole(problem, 0, False)
    assert len(seen) == 7 and seen[-1] is same


# --- rows that never come ---------------------------------------------------------------------------------------------


@every_layout
@both_forms
def test_a_missing_row_is_counted_and_told(layout: Layout, tagged: bool) -> None:
    group = Ranks(layout)
    problem = DecodeProblem.random(layout, seq_lens=(300, 2000), decode_query_len=2)
    missing, form = layout.world_size - 1, "tagged" if tagged else "legacy"
    for rank in range(missing):
        group.publish(rank, problem, 2, tagged)
    says = (
        rf"^rank 0 waits in vain for rank {missing} to publish the {form} receive row 0 \(owned head 0\) of slot set 2"
    )
    for count in (1, 2):
        with pytest.raises(RuntimeError, match=says):
            group.merge(0, problem, 2, tagged)
        assert group.comms[0].errors.tolist() == [count]
    # Nothing was consumed: once the row is there, the merge succeeds.
    group.publish(missing, problem, 2, tagged)
    expected = brute_force_top16(problem, init_blocks=1, local_blocks=2).ids
    assert torch.equal(group.merge(0, problem, 2, tagged), expected[:, : layout.heads_per_rank])
    # And its rows are gone then.
    with pytest.raises(RuntimeError, match=f"^rank 0 waits in vain for rank 0 to publish the {form} receive row 0"):
        group.merge(0, problem, 2, tagged)


@every_layout
def test_a_legacy_row_that_is_not_free_is_counted_and_told(layout: Layout) -> None:
    group = Ranks(layout)
    problem = DecodeProblem.random(layout, seq_lens=(300, 2000), decode_query_len=1)
    rank = layout.world_size - 1
    group.publish(rank, problem, 1, False)
    rows = [comm.recv.clone() for comm in group.comms]
    row = r"the legacy receive row 0 \(owned head 0\) of slot set 1"
    says = f"^rank {rank} waits in vain for rank 0 to merge and release {row}, and gives up"
    with pytest.raises(RuntimeError, match=says):
        group.publish(rank, problem, 1, False)
    # A whole chain looks for the rows that its merge needs before it publishes.
    with pytest.raises(RuntimeError, match=f"^rank {rank} waits in vain for rank 0 to publish"):
        group.decode(rank, problem, 1, False)
    assert group.comms[rank].errors.tolist() == [2] and group.comms[0].errors.tolist() == [0]
    assert all(torch.equal(comm.recv, before) for comm, before in zip(group.comms, rows, strict=True))
    # Another slot set is free.
    group.publish(rank, problem, 2, False)


def test_a_chain_that_cannot_end_publishes_nothing() -> None:
    """Without a peer's rows the torch backend refuses the whole chain, and the group goes on as if nothing had been."""
    layout = LAYOUTS["p128_tp2"]
    group = Ranks(layout)
    problem = DecodeProblem.random(layout, seq_lens=(300, 2000), decode_query_len=1)
    before = [[t.clone() for t in (c.tagged_recv, c.publish_generations, c.expected_generations)] for c in group.comms]
    with pytest.raises(RuntimeError, match=r"^rank 0 waits in vain for rank 1 to publish the tagged receive row 0"):
        group.decode(0, problem, 1, True)
    for comm, tensors in zip(group.comms, before, strict=True):
        for now, then in zip(
            (comm.tagged_recv, comm.publish_generations, comm.expected_generations), tensors, strict=True
        ):
            assert torch.equal(now, then)
    group.publish(1, problem, 1, True)
    group.decode(0, problem, 1, True)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_the_fused_chain_publishes_the_same_rows(layout: Layout, tagged: bool) -> None:
    """With a pool, and by the function of its own: receive storage is equal to the bit, padding rows included."""
    problem = DecodeProblem.random(layout, seq_lens=[0, 1, 500, 3000], decode_query_len=2, seed=3, special=True)
    valid = problem.num_valid_pages.clone()
    valid[5] = 0
    tokens = len(problem.index_q)
    indexers = group_indexers(
        layout,
        ["cpu"],
        init_blocks=1,
        local_blocks=2,
        max_decode_tokens=tokens + 1,
        max_decode_query_len=2,
        max_num_batched_tokens=tokens,
        max_num_seqs=4,
        max_model_len=3072,
        num_sparse_layers=2,
        backend="torch",
    )
    indexer, keys = indexers[1], problem.shard(1)
    size = msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=tokens)
    pool = torch.full((size,), 255, dtype=torch.uint8)
    inputs = (problem.index_q, keys, problem.block_table, problem.seq_lens, valid)
    separate, fused, function = (local_comm(indexers) for _ in range(3))
    form = {"slot": 1, "tagged": tagged, "decode_query_len": 2}
    indexer.decode_publish(*inputs, torch.empty(indexer.decode_scores_shape()), comm=separate[1], **form)
    indexer.decode_publish(*inputs, None, comm=fused[1], pool=pool, **form)
    comm = function[1]
    msa_ops.msa_icp_decode_score_publish(
        *inputs,
        pool,
        comm.tagged_recv_bases if tagged else comm.recv_bases,
        comm.errors,
        rank=1,
        world_size=layout.world_size,
        page_size=layout.page_size,
        decode_query_len=2,
        slot=1,
        capacity=tokens + 1,
        force_begin_blocks=1,
        force_end_blocks=2,
        generations=comm.publish_generations if tagged else None,
        backend="torch",
    )
    for other in (fused, function):
        for a, b in zip(separate[0].storages, other[0].storages, strict=True):
            assert torch.equal(a, b)
    assert any(storage.any() for storage in separate[0].storages)


@pytest.mark.parametrize("half", ["decode", "decode_merge"])
def test_an_output_of_none_is_refused(half: str) -> None:
    """It would be a chain without a merge."""
    layout = LAYOUTS["p128_tp2"]
    problem = DecodeProblem.random(layout, seq_lens=[10], decode_query_len=1)
    indexers = group_indexers(
        layout,
        ["cpu"],
        init_blocks=1,
        local_blocks=2,
        max_decode_tokens=1,
        max_decode_query_len=1,
        max_num_batched_tokens=1,
        max_num_seqs=1,
        max_model_len=128,
        num_sparse_layers=2,
        backend="torch",
    )
    indexer, comm = indexers[0], local_comm(indexers)[0]
    form = {"comm": comm, "slot": 0, "tagged": False}
    nothing: Any = None
    with pytest.raises(ValueError, match=r"^output must be a dense tensor, was None"):
        if half == "decode_merge":
            indexer.decode_merge(problem.num_valid_pages, nothing, **form)
        else:
            scores = torch.full(indexer.decode_scores_shape(), 5.0)
            inputs = (problem.index_q, problem.shard(0), problem.block_table, problem.seq_lens, problem.num_valid_pages)
            indexer.decode(*inputs, scores, nothing, decode_query_len=1, **form)
    assert not any(storage.any() for storage in comm.storages)


class Delegating:
    """Receive storage whose fields are looked up on every access."""

    def __init__(self, comm: MSAIcpComm) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)


def test_another_storage_behind_the_same_object_is_used() -> None:
    layout = LAYOUTS["p128_tp2"]
    group = Ranks(layout)
    problem = DecodeProblem.random(layout, seq_lens=(300,), decode_query_len=1)
    indexer, other = group.indexers[0], local_comm(group.indexers)
    comm = Delegating(group.comms[0])
    inputs = (problem.index_q, problem.shard(0), problem.block_table, problem.seq_lens, problem.num_valid_pages)
    scores = torch.empty(indexer.decode_scores_shape())
    for now in (group.comms[0], other[0]):
        comm.comm = now
        assert not any(storage.any() for storage in now.storages)
        indexer.decode_publish(*inputs, scores, comm=comm, slot=0, tagged=False, decode_query_len=1)
        assert all(storage.any() for storage in now.storages)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory is gone."""
    gone = tensor.clone()
    gone.untyped_storage().resize_(0)
    return gone


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, a byte off an aligned address."""
    storage = torch.zeros(tensor.nbytes + 1, dtype=torch.uint8)
    view = torch.empty(0, dtype=torch.uint8).set_(storage.untyped_storage(), 1, (tensor.nbytes,))
    return torch.from_numpy(view.numpy().view(tensor.numpy().dtype)).view(tensor.shape)


@pytest.mark.parametrize("spoil", [freed, shifted])
@pytest.mark.parametrize("name", ["recv_bases", "publish_generations", "expected_generations", "errors"])
def test_receive_storage_must_be_memory(name: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    group = Ranks(LAYOUTS["p128_tp2"])
    comm = group.comms[0]
    for _ in range(2):  # a refusal is not remembered as a check
        with pytest.raises(ValueError, match=rf"^comm\.{name} must "):
            group.indexers[0].check_comm(replace(comm, **{name: spoil(getattr(comm, name))}))


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "max_model_len"])
def test_limits_are_int32(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be in \[1, 2147483647\], was 2147483648"):
        prepare(LAYOUTS["p128_tp2"], **{name: 2**31})


def test_plan_storage_does_not_grow_with_segments_that_must_be_empty() -> None:
    """A window of 100 tokens has at most 100 segments with a token."""
    small, large = (
        prepare(LAYOUTS["p128_tp2"], max_num_batched_tokens=100, max_num_seqs=seqs) for seqs in (100, 60000)
    )
    assert small._work_info.shape == large._work_info.shape
    lens = torch.zeros(60000, dtype=torch.int32)
    lens[-100:] = 1
    offsets = torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)])
    plan = large.prefill_window_plan(
        0, lens, lens, offsets, offsets, torch.zeros_like(lens), total_q=100, max_query_len=1, max_seq_len=1
    )
    assert plan.packed_work_info[:100].tolist() == [59900 + i | 1 << 32 | 1 << 48 for i in range(100)]


def test_cake_refuses_a_pending_negation() -> None:
    """Memory does not show it, and public torch calls leave one on real parts."""
    parts = torch.ones(1, 4, 16)
    scores = torch.complex(parts, parts).conj().imag
    carrier = torch.zeros(4, 1, 33, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^scores must be resolved, was a tensor with a pending negation"):
        msa_ops.msa_icp_topk_select_prefill(scores, torch.ones(1, dtype=torch.int32), carrier)
