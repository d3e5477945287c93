# SPDX-License-Identifier: Apache-2.0
"""The torch reference of prefill: plan, scores and selection written out plainly, the chain against the brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashinfer_msa import msa_ops
from flashinfer_msa.backends import reference
from flashinfer_msa.indexer import MSAIcpIndexerPlan
from flashinfer_msa.layout import LAYOUTS, Layout
from flashinfer_msa.prefill import tuning as prefill_tuning
from flashinfer_msa.prefill.planner import plan_work
from flashinfer_msa.prefill.tuning import PrefillTuning
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.sizing import max_items
from flashinfer_msa.testing.problems import PrefillProblem, brute_force_top16, exchange, run_local_prefill

INF = float("inf")
NAN = float("nan")
UNTOUCHED = 12345.0
NOBODY = -777
FORCED = ((0, 0), (0, 1), (1, 2), (8, 8))
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)

WINDOWS: dict[str, dict[str, Any]] = {
    "one token": {"query_lens": [1], "kv_lens": [1]},
    "an item and one": {"query_lens": [65], "kv_lens": [700]},
    "empty segments": {"query_lens": [0, 5, 0, 70, 0], "kv_lens": [0, 5, 900, 1200, 3], "padding": 3},
    "no keys": {"query_lens": [3, 7], "kv_lens": [0, 200], "positions": [0, 0], "padding": 1},
    "more and fewer keys": {"query_lens": [40, 30, 20], "kv_lens": [150, 2000, 270], "positions": [300, 300, 240]},
    "cuts of blocks and pages": {"query_lens": [3, 3, 3], "kv_lens": [129, 257, 513]},
    "more than 16 blocks": {"query_lens": [9, 2], "kv_lens": [5200, 3000], "padding": 2},
}


@pytest.fixture(params=WINDOWS)
def window(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each window in turn."""
    return WINDOWS[request.param]


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def device_plan(problem: PrefillProblem, **bounds: int) -> MSAIcpScorePlan:
    """Plan in storage of its own that is poisoned, like a kernel would."""
    bounds = {**problem.bounds, **bounds}
    sizes = msa_ops.msa_icp_index_score_plan_storage(
        num_qo_heads=4, total_q=bounds["total_q"], batch=max(len(problem.query_lens), 1), device="cpu"
    )
    return msa_ops.msa_icp_index_score_sharded_plan_device(
        *problem.segments,
        4,
        **bounds,
        packed_work_range=torch.full((sizes["work_range_numel"],), -1),
        packed_work_info=torch.full((sizes["work_info_numel"],), -1),
        workspace=torch.empty(sizes["workspace_bytes"], dtype=torch.uint8),
        backend="torch",
    )


# --- plan -------------------------------------------------------------------------------------------------------------


def items_by_hand(
    lens: Sequence[int], kv_lens: Sequence[int], positions: Sequence[int], columns: int
) -> list[tuple[int, int, int]]:
    """Segment, tile and blocks of every item of 64 query tokens."""
    items = []
    for segment, (length, kv_len, position) in enumerate(zip(lens, kv_lens, positions, strict=True)):
        for tile in range(math.ceil(length / 64)):
            last_position = position + min(64 * tile + 64, length) - 1
            seen = min(last_position + 1, kv_len)
            items.append((segment, tile, min(math.ceil(seen / 128), columns)))
    return items


def unpacked(work_info: torch.Tensor) -> list[tuple[int, int, int]]:
    words = work_info.tolist()
    assert all(word >> 48 == 1 for word in words)
    return [(word & 0xFFFF, word >> 16 & 0xFFFF, word >> 32 & 0xFFFF) for word in words]


segment_lists = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 400)),  # query tokens
        st.one_of(st.integers(0, 9), st.integers(0, 9000)),  # keys
        st.one_of(st.just(0), st.integers(0, 9000)),  # position of the first token
    ),
    max_size=9,
)


def units_of(blocks: int) -> int:
    """Units of an item: two for its start, and one for every 4 blocks that it sees; none where it sees none."""
    return 2 + math.ceil(blocks / 4) if blocks else 0


@settings(max_examples=200, deadline=None)
@given(segments=segment_lists, ranges=st.integers(1, 40), columns=st.integers(1, 80))
@example(segments=[], ranges=3, columns=1)
@example(segments=[(0, 5, 0)] * 4, ranges=2, columns=9)
@example(segments=[(64, 0, 0), (64, 4 * 128, 9000), (1, 0, 0)], ranges=5, columns=80)
def test_a_plan_deals_every_unit_out_once(segments: list[tuple[int, int, int]], ranges: int, columns: int) -> None:
    lens, kv_lens, positions = (list(x) for x in zip(*segments, strict=True)) if segments else ([], [], [])
    items = items_by_hand(lens, kv_lens, positions, columns)
    work_range, work_info = torch.full((ranges,), -1), torch.full((len(items) + 2,), -1)
    plan_work(
        int32(lens), int32(kv_lens), int32(positions), work_range, work_info, columns=columns, max_items=len(items) + 1
    )
    assert unpacked(work_info[: len(items)]) == items
    assert work_info[len(items) :].tolist() == [0, -1]

    # The units in order, and those that the ranges name, one after the other.
    units = [(item, unit) for item, (_, _, blocks) in enumerate(items) for unit in range(units_of(blocks))]
    dealt, counts = [], []
    for word in work_range.tolist():
        item, unit, count = word & 0xFFFF, word >> 16 & 0xFFFF, word >> 32
        counts.append(count)
        assert count or word == 0
        for _ in range(count):
            while unit >= units_of(items[item][2]):
                # Items without blocks lie between others, and a range never begins at one.
                item, unit = item + 1, 0
            dealt.append((item, unit))
            unit += 1
        if count:
            assert dealt[-count] == (word & 0xFFFF, word >> 16 & 0xFFFF)
    assert dealt == units
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("room", (0, 1, 2, 3))
def test_a_plan_ends_with_its_room_for_items(room: int) -> None:
    lens, kv_lens, positions = [100, 0, 30, 1], [1000, 7, 2000, 2000], [900, 7, 1970, 100]
    work_range, work_info = torch.full((3,), -1), torch.full((4,), -1)
    plan_work(int32(lens), int32(kv_lens), int32(positions), work_range, work_info, columns=99, max_items=room)
    items = items_by_hand(lens, kv_lens, positions, 99)[:room]
    assert unpacked(work_info[:room]) == items and (work_info[room:] == -1).all()
    assert int((work_range >> 32).sum()) == sum(units_of(blocks) for _, _, blocks in items)


def test_a_plan_packs_the_largest_window() -> None:
    """Every field of a word is filled to its last bit."""
    lens, kv_lens = torch.zeros(65536, dtype=torch.int32), torch.zeros(65536, dtype=torch.int32)
    lens[65535], kv_lens[65535] = 64, 65535 * 128
    work_range, work_info = torch.full((2,), -1), torch.full((1,), -1)
    plan_work(lens, kv_lens, kv_lens, work_range, work_info, columns=65535, max_items=1)
    assert unpacked(work_info) == [(65535, 0, 65535)]
    assert work_range.tolist() == [8193 << 32, 8193 << 16 | 8193 << 32]
    # Items at the end of a long segment: the last tile of 65535.
    work_info = torch.full((65535,), -1)
    plan_work(int32([65535 * 64]), int32([200]), int32([0]), work_range, work_info, columns=2, max_items=65535)
    assert unpacked(work_info[-1:]) == [(0, 65534, 2)]
    assert work_range.tolist() == [98302 << 32, 32767 | 1 << 16 | 98303 << 32]


def test_a_host_plan_equals_a_device_plan(window: dict[str, Any]) -> None:
    problem = PrefillProblem.random(LAYOUTS["p256_tp2"], **{**window, "padding": 0})
    host = msa_ops.msa_icp_index_score_sharded_plan(
        int32(problem.query_lens), problem.seq_lens, 4, qo_offset=int32(problem.positions), backend="torch"
    )
    device = device_plan(problem)
    items = items_by_hand(problem.query_lens, problem.seq_lens.tolist(), problem.positions, device.columns)
    assert unpacked(host.packed_work_info[: len(items)]) == unpacked(device.packed_work_info[: len(items)]) == items
    room = max_items(device.total_q, device.batch)
    assert (host.packed_work_info[len(items) :] == 0).all() and (device.packed_work_info[len(items) : room] == 0).all()
    assert (device.packed_work_info[room:] == -1).all()
    for name, value in vars(device).items():
        if name == "workspace":
            assert value.nbytes == host.workspace.nbytes == 32 << 20
        elif name != "packed_work_info":
            same = torch.equal if isinstance(value, torch.Tensor) else type(value).__eq__
            assert same(getattr(host, name), value), name
    assert host.qo_segment_offsets.tolist()[-1] == sum(problem.query_lens)
    assert host.kv_segment_offsets.tolist()[-1] == sum(problem.seq_lens.tolist())
    assert host.uniform is False and host.num_qo_heads == 4


@pytest.mark.parametrize("segments", (0, 1, 3))
def test_a_host_plan_of_nothing(segments: int) -> None:
    zeros = torch.zeros(segments, dtype=torch.int32)
    plan = msa_ops.msa_icp_index_score_sharded_plan(zeros, zeros, 4, qo_offset=zeros, device="cpu", backend="torch")
    assert (plan.total_q, plan.batch, plan.max_query_len, plan.columns) == (1, segments, 1, 1)
    assert plan.packed_work_range.tolist() == [0] and not plan.packed_work_info.any()
    # It can be run: nothing is seen.
    plane = torch.full((1, 4, 1), UNTOUCHED)
    keys, table = torch.zeros(1, 64, 128).to(torch.float8_e4m3fn), torch.zeros(segments, 1, dtype=torch.int32)
    query = torch.zeros(1, 4, 128).to(torch.float8_e4m3fn)
    msa_ops.msa_icp_index_score_sharded(query, keys, table, plan, rank=0, max_score=plane, backend="torch")
    assert (plane == (-INF if segments else UNTOUCHED)).all()


def test_a_device_plan_refers_to_its_tensors() -> None:
    problem = PrefillProblem.random(LAYOUTS["p128_tp2"], query_lens=[3, 70], kv_lens=[300, 900])
    plan = device_plan(problem, total_q=200, max_query_len=100, max_seq_len=1000)
    assert (plan.total_q, plan.max_query_len, plan.columns, plan.batch) == (200, 100, 8, 2)
    for name, tensor in zip(
        ("qo_segment_lens", "kv_segment_lens", "qo_segment_offsets", "kv_segment_offsets", "qo_offset"),
        problem.segments,
        strict=True,
    ):
        assert getattr(plan, name) is tensor
    # Looser bounds change the room, and not the work.
    tight = device_plan(problem)
    assert torch.equal(plan.packed_work_range, tight.packed_work_range)
    assert torch.equal(plan.packed_work_info[:3], tight.packed_work_info[:3])


# --- scores -----------------------------------------------------------------------------------------------------------


def rank_of(key: int, page_size: int, world_size: int) -> int:
    """The rank that holds a global key."""
    return key % world_size if page_size == 128 else key % 256 // (256 // world_size)


def scores_by_hand(
    problem: PrefillProblem, rank: int, columns: int, *, width: int, compact: bool = False
) -> torch.Tensor:
    """What the scorer writes into ``[T, 4, width]``, for a plan of ``columns`` blocks; ``UNTOUCHED`` elsewhere."""
    page, world = problem.layout.page_size, problem.layout.world_size
    scores = torch.full((len(problem.index_q), 4, width), UNTOUCHED)
    longest = int(problem.seq_lens.max())
    mine = torch.tensor([rank_of(key, page, world) == rank for key in range(longest)], dtype=torch.bool)
    token = 0
    for segment, (length, position) in enumerate(zip(problem.query_lens, problem.positions, strict=True)):
        kv_len = int(problem.seq_lens[segment])
        used = problem.block_table[segment, : math.ceil(min(position + length, kv_len) / page)].long()
        keys = problem.pages.view(torch.uint8)[used if length else []].view(problem.pages.dtype).reshape(-1, 128)
        keys = keys.double()
        for j in range(length):
            seen = min(position + j + 1, kv_len)
            dots = (problem.index_q[token].double() @ keys[:seen].T).float()
            dots[dots.isnan() | ~mine[:seen]] = -INF
            for block in range(min(math.ceil(seen / 128), columns)):
                best = dots[:, 128 * block : 128 * block + 128].amax(-1)
                if not compact:
                    scores[token, :, block] = best
                elif block % 2 == rank * 2 // world:
                    scores[token, :, block // 2] = best
            token += 1
    # -0.0 is written as +0.0.
    scores[scores == 0] = 0.0
    return scores


class Plane:
    """A strided score plane in poisoned storage."""

    def __init__(self, tokens: int, columns: int) -> None:
        pitch, extra = columns + 3, 5
        self.storage = torch.full((1 + tokens * (4 * pitch + extra),), UNTOUCHED)
        self.view = self.storage.as_strided((tokens, 4, columns), (4 * pitch + extra, pitch, 1), 1)

    def equals(self, scores: torch.Tensor) -> bool:
        """Whether the view is ``scores`` to the bit, and nothing around it was written."""
        wanted = torch.full_like(self.storage, UNTOUCHED)
        wanted.as_strided(self.view.shape, self.view.stride(), 1).copy_(scores)
        return torch.equal(self.storage.view(torch.int32), wanted.view(torch.int32))


def score(problem: PrefillProblem, plan: MSAIcpScorePlan, plane: torch.Tensor, rank: int, **form: Any) -> None:
    msa_ops.msa_icp_index_score_sharded(
        problem.index_q[: plan.total_q],
        problem.shard(rank),
        problem.block_table,
        plan,
        rank=rank,
        max_score=plane,
        tp=problem.layout.world_size,
        backend="torch",
        **form,
    )


def forms_of(layout: Layout) -> tuple[bool, ...]:
    """The values of ``compact`` that a layout has."""
    return (False, True) if layout.page_size == 256 else (False,)


@every_layout
@pytest.mark.parametrize("special", (False, True), ids=("normal", "nan-448-negative-zero"))
def test_scores_of_every_rank_and_form(layout: Layout, window: dict[str, Any], special: bool) -> None:
    problem = PrefillProblem.random(
        layout, **window, seed=7, special=special, page_pitch_extra=48, block_table_extra_columns=2
    )
    if special:
        # A dot product of -0.0, and vectors that are NaN throughout.
        raw = problem.index_q.view(torch.uint8)
        raw[0, 0] = 0x80
        raw[-1, 1] = 0x7F
    plan = device_plan(problem, total_q=len(problem.index_q))
    for rank in range(layout.world_size):
        for compact in forms_of(layout):
            width = math.ceil(plan.columns / (2 if compact else 1)) + rank
            expected = scores_by_hand(problem, rank, plan.columns, width=width, compact=compact)
            for initialize in (False, True):
                plane = Plane(len(problem.index_q), width)
                score(problem, plan, plane.view, rank, compact=compact, initialize=initialize)
                assert plane.equals(expected), (rank, compact, initialize)
                expected[expected == UNTOUCHED] = -INF


@every_layout
def test_scores_do_not_depend_on_how_many_pages_are_taken_at_once(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PrefillProblem.random(layout, query_lens=[5, 2], kv_lens=[1500, 700], special=True)
    plan = device_plan(problem)
    for compact in forms_of(layout):
        planes = []
        for dots in (1 << 26, 3 * 5 * 4 * layout.rows, 1):
            monkeypatch.setattr(reference, "_DOTS_PER_CHUNK", dots)
            plane = torch.full((7, 4, plan.columns), UNTOUCHED)
            score(problem, plan, plane, layout.world_size - 1, compact=compact, initialize=False)
            planes.append(plane)
        assert torch.equal(planes[0], planes[1]) and torch.equal(planes[0], planes[2])


@every_layout
def test_keys_beyond_a_plans_columns_are_not_scored(layout: Layout) -> None:
    problem = PrefillProblem.random(layout, query_lens=[4, 3], kv_lens=[1700, 200])
    rank = layout.world_size - 1
    for columns in (1, 2, 5):
        plan = device_plan(problem, max_seq_len=128 * columns)
        assert plan.columns == columns
        plane = Plane(7, columns + 4)
        score(problem, plan, plane.view, rank, initialize=False)
        expected = scores_by_hand(problem, rank, columns, width=columns + 4)
        assert plane.equals(expected)


def test_tokens_beyond_a_plans_are_not_scored() -> None:
    problem = PrefillProblem.random(LAYOUTS["p128_tp2"], query_lens=[30, 90, 7], kv_lens=[300, 400, 500])
    plan = device_plan(problem, total_q=70, max_query_len=70)
    plane = Plane(70, 4)
    score(problem, plan, plane.view, 0, initialize=False)
    assert plane.equals(scores_by_hand(problem, 0, 4, width=4)[:70])


def test_scores_survive_extreme_products() -> None:
    problem = PrefillProblem.random(LAYOUTS["p256_tp4"], query_lens=[2], kv_lens=[256])
    problem.pages.view(torch.uint8).fill_(0x7E)
    problem.index_q.view(torch.uint8)[0].fill_(0x7E)
    problem.index_q.view(torch.uint8)[1].fill_(0xFE)
    plane = torch.empty(2, 4, 2)
    score(problem, device_plan(problem), plane, 3)
    assert plane[:, 0].tolist() == [[-INF, 128 * 448.0**2], [-INF, -128 * 448.0**2]]


@every_layout
def test_a_score_of_negative_zero_is_written_as_positive_zero(layout: Layout) -> None:
    problem = PrefillProblem.random(layout, query_lens=[2], kv_lens=[512])
    problem.index_q.copy_(problem.index_q.float().abs() + 1)
    problem.pages.view(torch.uint8).fill_(0x80)
    plane = torch.full((2, 4, 4), UNTOUCHED)
    score(problem, device_plan(problem), plane, 0)
    held = slice(None) if layout.page_size == 128 else slice(0, None, 2)
    assert (plane[..., held].contiguous().view(torch.int32) == 0).all()


# --- selection --------------------------------------------------------------------------------------------------------


def row_by_hand(
    scores: Sequence[float], valid: int, *, first: int, last: int, scale: int, offset: int
) -> tuple[list[int], list[int]]:
    """Columns and global ids of the 16 best candidates, ascending."""
    ids = {column: column * scale + offset for column in range(len(scores))}
    candidates = [column for column in ids if ids[column] < min(valid, 8192)]

    def rank(column: int) -> tuple[bool, float, int]:
        forced = ids[column] < first or ids[column] >= valid - last
        return (not forced, INF if math.isnan(scores[column]) else -scores[column], ids[column])

    best = sorted(sorted(candidates, key=rank)[:16])
    return best, [ids[column] for column in best]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 60).flatmap(
        lambda width: st.lists(
            st.lists(
                st.one_of(
                    st.sampled_from((0.0, -0.0, 1.0, -1.0, INF, -INF, NAN)), st.floats(-9, 9, width=32, allow_nan=False)
                ),
                min_size=width,
                max_size=width,
            ),
            min_size=1,
            max_size=3,
        )
    ),
    beyond=st.integers(-70, 40),
    forced=st.sampled_from((*FORCED, (16, 0), (0, 16))),
    mapping=st.sampled_from(((1, 0), (2, 0), (2, 1))),
)
def test_selection_takes_the_best(
    rows: list[list[float]], beyond: int, forced: tuple[int, int], mapping: tuple[int, int]
) -> None:
    (first, last), (scale, offset) = forced, mapping
    tokens, width = len(rows), len(rows[0])
    scores = torch.empty(tokens, 4, width + 1)[..., :width]
    for head in range(4):
        # Each head has the rows in another order.
        scores[:, head] = torch.tensor([rows[(token + head) % tokens] for token in range(tokens)])
    valid = [max(scale * width + beyond - token, 0) for token in range(tokens)]
    buffer = torch.full((4, tokens + 3, 35), NOBODY, dtype=torch.int32)
    msa_ops.msa_icp_topk_select_prefill(
        scores,
        int32(valid),
        buffer[:, 1 : tokens + 1, :33],
        force_begin_blocks=first,
        force_end_blocks=last,
        index_scale=scale,
        index_offset=offset,
        backend="torch",
    )
    expected = torch.full_like(buffer, NOBODY)
    minus_infinity = int(torch.tensor(-INF).view(torch.int32))
    for token in range(tokens):
        for head in range(4):
            row = scores[token, head].contiguous()
            columns, ids = row_by_hand(row.tolist(), valid[token], first=first, last=last, scale=scale, offset=offset)
            unused = 16 - len(ids)
            words = row.view(torch.int32)[columns].tolist() + [minus_infinity] * unused
            expected[head, token + 1, :33] = int32([*words, *ids, *[-1] * unused, 1])
    assert torch.equal(buffer, expected)


def test_selection_stops_at_the_candidate_limit() -> None:
    scores = torch.arange(12287).float().expand(1, 4, -1).contiguous()
    carrier = torch.empty(4, 1, 33, dtype=torch.int32)
    for valid, last, ids in (
        (9000, 0, range(8176, 8192)),
        (9000, 16, range(8176, 8192)),
        (8195, 8, range(8176, 8192)),
        (5000, 0, range(4984, 5000)),
    ):
        msa_ops.msa_icp_topk_select_prefill(scores, int32([valid]), carrier, force_end_blocks=last, backend="torch")
        assert carrier[:, 0, 16:32].tolist() == [list(ids)] * 4
    # With the lowest scores in front, only forced blocks below the limit are selected.
    msa_ops.msa_icp_topk_select_prefill(-scores, int32([8195]), carrier, force_end_blocks=8, backend="torch")
    assert carrier[0, 0, 16:32].tolist() == [*range(11), *range(8187, 8192)]


# --- the fused chain --------------------------------------------------------------------------------------------------


def poisoned_pool(plan: MSAIcpScorePlan) -> torch.Tensor:
    """A pool for exactly the items that a plan may have; a CPU counts as one multiprocessor."""
    return torch.full((max_items(plan.total_q, plan.batch) * 32 << 10,), 255, dtype=torch.uint8)


def fused_rows(
    problem: PrefillProblem, plan: MSAIcpScorePlan, rank: int, valid: torch.Tensor, forced: tuple[int, int], **form: Any
) -> torch.Tensor:
    """The carrier ``[4, T, 33]`` of `msa_icp_prefill_score_select`, which is written into a larger one."""
    tokens = plan.total_q
    buffer = torch.full((4, tokens + 3, 35), NOBODY, dtype=torch.int32)
    rows = buffer[:, 1 : tokens + 1, :33]
    pool = poisoned_pool(plan)
    msa_ops.msa_icp_prefill_score_select(
        problem.index_q,
        problem.shard(rank),
        problem.block_table,
        plan,
        valid,
        pool,
        rows,
        rank=rank,
        tp=problem.layout.world_size,
        compact=problem.layout.page_size == 256,
        force_begin_blocks=forced[0],
        force_end_blocks=forced[1],
        backend="torch",
        **form,
    )
    around = buffer.clone()
    around[:, 1 : tokens + 1, :33] = NOBODY
    assert (around == NOBODY).all() and (pool == 255).all()
    return rows


def separate_rows(
    problem: PrefillProblem, plan: MSAIcpScorePlan, rank: int, valid: torch.Tensor, forced: tuple[int, int], **form: Any
) -> torch.Tensor:
    """The carrier of the scorer and then the selection."""
    layout, compact = problem.layout, problem.layout.page_size == 256
    plane = torch.full((plan.total_q, 4, math.ceil(plan.columns / (2 if compact else 1))), UNTOUCHED)
    score(problem, plan, plane, rank, initialize=True, compact=compact, **form)
    carrier = torch.full((4, plan.total_q, 33), NOBODY, dtype=torch.int32)
    msa_ops.msa_icp_topk_select_prefill(
        plane,
        valid,
        carrier,
        force_begin_blocks=forced[0],
        force_end_blocks=forced[1],
        index_scale=layout.index_scale,
        index_offset=layout.index_offset(rank),
        backend="torch",
    )
    return carrier


@every_layout
@pytest.mark.parametrize("forced", FORCED)
def test_the_fused_chain_makes_the_same_rows(layout: Layout, window: dict[str, Any], forced: tuple[int, int]) -> None:
    problem = PrefillProblem.random(layout, **window, seed=3, special=True, page_pitch_extra=48)
    plan = device_plan(problem, total_q=len(problem.index_q))
    fewer = problem.num_valid_pages.clone()
    fewer[::3] = 0
    fewer[1::3] //= 2
    for rank in range(layout.world_size):
        for valid in (problem.num_valid_pages, fewer):
            expected = separate_rows(problem, plan, rank, valid, forced)
            for accumulation in ("tensor", "exact"):
                rows = fused_rows(problem, plan, rank, valid, forced, accumulation=accumulation)
                assert torch.equal(rows, expected), (rank, accumulation)
    without = problem.num_valid_pages == 0
    assert (rows[:, without, 16:32] == -1).all() and (rows[..., 32] == 1).all()


@every_layout
def test_candidates_of_the_fused_chain_end_with_the_plans_columns(layout: Layout) -> None:
    """Also where a token may select more blocks than it sees, and where the rank holds none of the blocks."""
    problem = PrefillProblem.random(layout, query_lens=[4, 3], kv_lens=[1700, 200])
    for columns in (1, 2, 5):
        plan = device_plan(problem, max_seq_len=128 * columns)
        for rank in range(layout.world_size):
            rows = fused_rows(problem, plan, rank, int32([99] * 7), (0, 1))
            held = [
                block
                for block in range(columns)
                if layout.page_size == 128 or block % 2 == rank * 2 // layout.world_size
            ]
            assert rows[:, :, 16:32].tolist() == [[held + [-1] * (16 - len(held))] * 7] * 4


@every_layout
def test_scores_are_float32_whatever_the_default_dtype(layout: Layout) -> None:
    """Serving engines change it while they build a model."""
    problem = PrefillProblem.random(layout, query_lens=[4, 3], kv_lens=[1700, 200])
    plan = device_plan(problem)
    expected = fused_rows(problem, plan, 0, problem.num_valid_pages, (0, 1))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(fused_rows(problem, plan, 0, problem.num_valid_pages, (0, 1)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_fused_chain_stops_at_the_candidate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, blocks = LAYOUTS["p128_tp2"], 8200
    problem = PrefillProblem.random(layout, query_lens=[1], kv_lens=[128])
    # Every page is the same one, so all blocks tie.
    problem = replace(
        problem,
        block_table=torch.zeros(1, blocks, dtype=torch.int32),
        seq_lens=int32([128 * blocks]),
        positions=(128 * blocks - 1,),
    )
    monkeypatch.setattr(reference, "_DOTS_PER_CHUNK", 1 << 17)
    rows = fused_rows(problem, device_plan(problem), 0, int32([blocks]), (0, 16))
    assert rows[:, 0, 16:32].tolist() == [[*range(8), *range(8184, 8192)]] * 4


# --- the chain --------------------------------------------------------------------------------------------------------


def indexers(layout: Layout, forced: tuple[int, int] = (1, 2), **changes: Any) -> list[MSAIcpIndexerPlan]:
    """Every rank's indexer; keys may be so long that a step has many windows."""
    limits: dict[str, Any] = {
        "num_index_heads": 4,
        "max_decode_tokens": 1,
        "max_decode_query_len": 1,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 9,
        "max_model_len": 1 << 23,
        "num_sparse_layers": 3,
    }
    return [
        msa_ops.prepare_msa_icp_indexer(
            world_size=layout.world_size,
            rank=rank,
            page_size=layout.page_size,
            init_blocks=forced[0],
            local_blocks=forced[1],
            device="cpu",
            backend="torch",
            **{**limits, **changes},
        )
        for rank in range(layout.world_size)
    ]


def run_step(
    plans: Sequence[MSAIcpIndexerPlan], problem: PrefillProblem, tokens: int, fused: bool = False
) -> torch.Tensor:
    """The owners' outputs side by side, ``[T, 4, 16]``, of a step in windows of ``tokens``."""
    total = sum(problem.query_lens)
    carriers = []
    for plan in plans:
        keys = problem.shard(plan.rank)
        # Larger than the step, and not written past it.
        carrier = torch.full((4, total + 3, 33), NOBODY, dtype=torch.int32)
        pitch = plan.prefill_scratch_shape(problem.bounds["max_seq_len"])[2]
        scratch = None if fused else torch.full((tokens + 2, 4, pitch), UNTOUCHED)
        pool = torch.full(plan.prefill_pool_shape(), 255, dtype=torch.uint8) if fused else None
        run_local_prefill(plan, problem, keys, scratch, carrier, tokens, pool)
        assert (carrier[:, total:] == NOBODY).all() and (carrier[:, :total, 32] == 1).all()
        carriers.append(carrier[:, :total])
    outputs = []
    for plan in plans:
        output = torch.full((total, plan.heads_per_rank, 16), NOBODY, dtype=torch.int32)
        received = exchange(carriers, plan)
        before = received.clone()
        plan.prefill_merge(received, problem.num_valid_pages, output)
        assert torch.equal(received, before)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


@every_layout
@pytest.mark.parametrize("forced", FORCED)
def test_a_step_equals_the_unsharded_top16(layout: Layout, window: dict[str, Any], forced: tuple[int, int]) -> None:
    problem = PrefillProblem.random(layout, **{**window, "padding": 0}, special=True)
    plans, total = indexers(layout, forced), len(problem.index_q)
    expected = brute_force_top16(problem, init_blocks=forced[0], local_blocks=forced[1]).ids
    for tokens in (total, max(total // 3, 1)):
        assert torch.equal(run_step(plans, problem, tokens), expected), tokens
        assert torch.equal(run_step(plans, problem, tokens, fused=True), expected), tokens


@settings(max_examples=25, deadline=None)
@given(
    layout=st.sampled_from(list(LAYOUTS.values())),
    segments=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 3), st.integers(0, 90)), st.integers(0, 4000), st.sampled_from((0, 1, 500, -100))
        ),
        min_size=1,
        max_size=4,
    ).filter(lambda segments: any(length for length, _, _ in segments)),
    tokens=st.integers(20, 120),
    forced=st.sampled_from(FORCED),
    equal_pages=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_step_equals_the_unsharded_top16(
    layout: Layout,
    segments: list[tuple[int, int, int]],
    tokens: int,
    forced: tuple[int, int],
    equal_pages: bool,
    seed: int,
) -> None:
    lens, positions, _ = (list(x) for x in zip(*segments, strict=True))
    problem = PrefillProblem.random(
        layout,
        query_lens=lens,
        positions=positions,
        kv_lens=[max(p + q + e, 0) for q, p, e in segments],
        seed=seed,
        special=True,
        page_pitch_extra=16,
    )
    if equal_pages:
        # Whole runs of blocks tie exactly.
        problem.pages.view(torch.uint8)[1:] = problem.pages.view(torch.uint8)[:1].clone()
    assert torch.equal(
        run_step(indexers(layout, forced), problem, tokens),
        brute_force_top16(problem, init_blocks=forced[0], local_blocks=forced[1]).ids,
    )


@every_layout
def test_a_token_without_a_page_gets_the_first(layout: Layout) -> None:
    """Segments without keys, and padding tokens at the end of a window."""
    problem = PrefillProblem.random(layout, query_lens=[2, 0, 3], kv_lens=[0, 9, 300], positions=[5, 9, 297], padding=2)
    plans, total = indexers(layout), 7
    carriers = []
    for plan in plans:
        window_plan = plan.prefill_window_plan(0, *problem.segments, **problem.bounds)
        carrier = torch.full((4, total, 33), NOBODY, dtype=torch.int32)
        plan.prefill_local(
            problem.index_q,
            problem.shard(plan.rank),
            problem.block_table,
            window_plan,
            torch.full((total, 4, 16), NAN),
            problem.num_valid_pages,
            carrier,
        )
        carriers.append(carrier)
        without = [0, 1, 5, 6]
        assert (carrier[:, without, 16:32] == -1).all() and (carrier[:, without, 32] == 1).all()
    for plan in plans:
        output = torch.full((total, plan.heads_per_rank, 16), NOBODY, dtype=torch.int32)
        plan.prefill_merge(exchange(carriers, plan), problem.num_valid_pages, output)
        for token, blocks in enumerate(([0], [0], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0], [0])):
            assert output[token].tolist() == [[*blocks, *[-1] * (16 - len(blocks))]] * plan.heads_per_rank


@every_layout
def test_the_facade_equals_the_functions(layout: Layout) -> None:
    problem = PrefillProblem.random(layout, query_lens=[30, 0, 41], kv_lens=[3000, 4, 2700], special=True)
    compact = layout.page_size == 256
    plan = device_plan(problem)
    columns = math.ceil(plan.columns / 2) if compact else plan.columns
    for indexer in indexers(layout):
        rank = indexer.rank
        plane = torch.full((71, 4, columns), UNTOUCHED)
        score(problem, plan, plane, rank, compact=compact, initialize=False)
        carriers = [torch.full((4, 71, 33), NOBODY, dtype=torch.int32) for _ in "ab"]
        msa_ops.msa_icp_topk_select_prefill(
            plane,
            problem.num_valid_pages,
            carriers[0],
            force_begin_blocks=1,
            force_end_blocks=2,
            index_scale=indexer.index_scale,
            index_offset=indexer.index_offset,
            backend="torch",
        )
        window_plan = indexer.prefill_window_plan(1, *problem.segments, **problem.bounds)
        scratch = torch.full((80, 4, columns + 5), UNTOUCHED)
        indexer.prefill_local(
            problem.index_q,
            problem.shard(rank),
            problem.block_table,
            window_plan,
            scratch,
            problem.num_valid_pages,
            carriers[1],
        )
        assert torch.equal(*carriers)
        assert torch.equal(scratch[:71, :, :columns], plane)
        assert (scratch[71:] == UNTOUCHED).all() and (scratch[..., columns:] == UNTOUCHED).all()
        # With a pool, given scratch is not written.
        fused = torch.full((4, 71, 33), NOBODY, dtype=torch.int32)
        indexer.prefill_local(
            problem.index_q,
            problem.shard(rank),
            problem.block_table,
            window_plan,
            scratch.fill_(UNTOUCHED),
            problem.num_valid_pages,
            fused,
            pool=poisoned_pool(window_plan),
        )
        assert torch.equal(fused, carriers[0]) and (scratch == UNTOUCHED).all()
        # And a merge of the exchanged rows.
        outputs = [torch.full((71, indexer.heads_per_rank, 16), NOBODY, dtype=torch.int32) for _ in "ab"]
        received = exchange(carriers[:1] * layout.world_size, indexer)
        indexer.prefill_merge(received, problem.num_valid_pages, outputs[0])
        msa_ops.msa_icp_merge_candidates(
            received,
            problem.num_valid_pages,
            outputs[1],
            torch.zeros(1, dtype=torch.int32),
            init_blocks=1,
            local_blocks=2,
            prefill=True,
            backend="torch",
        )
        assert torch.equal(*outputs) and (outputs[0] != NOBODY).all()


@every_layout
def test_short_windows_run_in_the_indexers_own_scratch(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_tuning, "PREFILL", {("cpu", layout.name): PrefillTuning(fused=True, short_tokens=30)})
    rank = layout.world_size - 1
    indexer = indexers(layout, max_model_len=4000)[rank]
    scratch = indexer._short_scratch
    assert scratch is not None and scratch.shape == (30, 4, indexer.prefill_score_columns)
    longest = indexer.prefill_score_columns * layout.page_size  # beyond the indexer's own windows
    for query_lens, kv_len, short in (([10, 20], 3000, True), ([10, 21], 3000, False), ([30], longest + 1, False)):
        problem = PrefillProblem.random(layout, query_lens=query_lens, kv_lens=[kv_len] * len(query_lens), special=True)
        plan = device_plan(problem)
        carrier = torch.full((4, plan.total_q, 33), NOBODY, dtype=torch.int32)
        scratch.fill_(UNTOUCHED)
        indexer.prefill_local(
            problem.index_q,
            problem.shard(rank),
            problem.block_table,
            plan,
            None,
            problem.num_valid_pages,
            carrier,
            pool=poisoned_pool(plan),
        )
        assert torch.equal(carrier, separate_rows(problem, plan, rank, problem.num_valid_pages, (1, 2)))
        assert bool((scratch != UNTOUCHED).any()) is short


def test_windows_of_a_step_are_planned_side_by_side() -> None:
    layout = LAYOUTS["p128_tp2"]
    indexer = indexers(layout)[0]
    problems = [PrefillProblem.random(layout, query_lens=[n, 1], kv_lens=[100 * n, 7]) for n in (3, 5, 7)]
    plans = [indexer.prefill_window_plan(i, *p.segments, **p.bounds) for i, p in enumerate(problems)]
    for plan, problem in zip(plans, problems, strict=True):
        alone = device_plan(problem)
        assert torch.equal(plan.packed_work_range, alone.packed_work_range)
        assert torch.equal(plan.packed_work_info[:2], alone.packed_work_info[:2])
    # Planning a window again overwrites its plan.
    again = indexer.prefill_window_plan(1, *problems[2].segments, **problems[2].bounds)
    assert torch.equal(plans[1].packed_work_info, again.packed_work_info)
    assert again.packed_work_info.data_ptr() == plans[1].packed_work_info.data_ptr()
    assert torch.equal(again.packed_work_info[:2], plans[2].packed_work_info[:2])


@every_layout
def test_a_window_without_a_segment_writes_nothing(layout: Layout) -> None:
    problem = PrefillProblem.random(layout, query_lens=[], kv_lens=[], padding=4)
    indexer = indexers(layout)[-1]
    plan = indexer.prefill_window_plan(0, *problem.segments, **{**problem.bounds, "total_q": 4})
    assert plan.batch == 0
    scratch = torch.full((4, 4, 16), UNTOUCHED)
    carrier = torch.full((4, 4, 33), NOBODY, dtype=torch.int32)
    indexer.prefill_local(
        problem.index_q,
        problem.shard(indexer.rank),
        problem.block_table,
        plan,
        scratch,
        problem.num_valid_pages,
        carrier,
    )
    score(problem, plan, scratch, indexer.rank)
    assert (fused_rows(problem, plan, indexer.rank, problem.num_valid_pages, (1, 2)) == NOBODY).all()
    assert (scratch == UNTOUCHED).all() and (carrier == NOBODY).all()


def test_a_plan_serves_other_keys_and_queries() -> None:
    """One plan serves every layer: it depends only on lengths."""
    layout = LAYOUTS["p256_tp2"]
    layers = [PrefillProblem.random(layout, query_lens=[70, 5], kv_lens=[900, 2400], seed=seed) for seed in (1, 2, 3)]
    plan = device_plan(layers[0])
    for problem in layers:
        plane = Plane(75, plan.columns)
        score(problem, plan, plane.view, 1, initialize=False)
        expected = scores_by_hand(problem, 1, plan.columns, width=plan.columns)
        assert plane.equals(expected)
    # And lengths are read when it is used: a shorter last segment has fewer columns.
    shorter = replace(layers[0], seq_lens=int32([900, 130]))
    layers[0].seq_lens.copy_(shorter.seq_lens)
    plane = Plane(75, plan.columns)
    score(layers[0], plan, plane.view, 1, initialize=False)
    assert plane.equals(scores_by_hand(shorter, 1, plan.columns, width=plan.columns))
