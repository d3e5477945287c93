# SPDX-License-Identifier: Apache-2.0
"""The torch reference: against an independent brute force, and rule by rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer_msa.backends.reference import decode_index_score, merge_candidates, select_rows, topk_select_publish
from flashinfer_msa.layout import LAYOUTS, MAX_BLOCKS, TOP_K, Layout
from flashinfer_msa.testing.problems import DecodeProblem, brute_force_top16

INF = float("inf")
NAN = float("nan")
UNTOUCHED = 12345.0
FORCED = ((0, 0), (0, 1), (1, 2), (8, 8))
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
both_forms = pytest.mark.parametrize("tagged", (False, True), ids=("legacy", "tagged"))


def bits(values: Iterable[float]) -> list[int]:
    return torch.tensor(list(values), dtype=torch.float32).view(torch.int32).tolist()


def int32(values: Sequence[int] | int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Group:
    """The receive storage, counters and errors of every rank of a group, dealt out to ``devices``."""

    layout: Layout
    capacity: int
    tagged: bool
    devices: Sequence[str] = ("cpu",)

    def __post_init__(self) -> None:
        world, owned = self.layout.world_size, self.layout.heads_per_rank
        width, dtype = (32, torch.int64) if self.tagged else (33, torch.int32)
        shape = (3, world, owned, self.capacity, width)
        homes = [self.devices[rank % len(self.devices)] for rank in range(world)]
        self.received = [torch.zeros(shape, dtype=dtype, device=home) for home in homes]
        bases = torch.tensor([x.data_ptr() for x in self.received])
        self.bases = [bases.to(home) for home in homes]
        int32_zeros = partial(torch.zeros, dtype=torch.int32)
        self.generations = [int32_zeros(3, 4, self.capacity, device=home) for home in homes]
        self.expected = [int32_zeros(3, owned, self.capacity, device=home) for home in homes]
        self.errors = [int32_zeros(1, device=home) for home in homes]

    def publish(self, rank: int, scores: torch.Tensor, valid: torch.Tensor, slot: int, first: int = 0, last: int = 0):
        home = self.errors[rank].device
        topk_select_publish(
            scores.to(home),
            valid.to(home),
            self.bases[rank],
            self.errors[rank],
            slot=slot,
            rank=rank,
            world_size=self.layout.world_size,
            heads_per_rank=self.layout.heads_per_rank,
            capacity=self.capacity,
            force_begin_blocks=first,
            force_end_blocks=last,
            generations=self.generations[rank] if self.tagged else None,
            index_scale=self.layout.index_scale,
            index_offset=self.layout.index_offset(rank),
        )

    def merge(self, rank: int, valid: torch.Tensor, slot: int, first: int = 0, last: int = 0) -> torch.Tensor:
        home = self.errors[rank].device
        output = torch.full((len(valid), self.layout.heads_per_rank, TOP_K), -7, dtype=torch.int32, device=home)
        merge_candidates(
            self.received[rank][slot],
            valid.to(home),
            output,
            self.errors[rank],
            init_blocks=first,
            local_blocks=last,
            expected_generations=self.expected[rank][slot] if self.tagged else None,
            prefill=False,
            rank=rank,
            slot=slot,
        )
        return output.to(valid.device)


def score(problem: DecodeProblem, rank: int, columns: int) -> torch.Tensor:
    """Score plane of a rank, a strided view of a larger one; what the scorer leaves alone holds ``UNTOUCHED``."""
    device = problem.index_q.device
    scores = torch.full((len(problem.index_q), 4, columns + 4), UNTOUCHED, device=device)[..., :columns]
    decode_index_score(
        problem.index_q,
        problem.shard(rank),
        problem.block_table,
        problem.seq_lens,
        scores,
        layout=problem.layout,
        rank=rank,
        decode_query_len=problem.decode_query_len,
    )
    return scores


def score_columns(problem: DecodeProblem) -> int:
    return math.ceil(max(problem.block_table.shape[1], 1) / 4) * 4


def run_chain(problem: DecodeProblem, group: Group, slot: int, first: int, last: int) -> torch.Tensor:
    """Selected blocks int32 ``[T, 4, 16]`` of one decode step."""
    world, columns = problem.layout.world_size, score_columns(problem)
    for rank in range(world):
        group.publish(rank, score(problem, rank, columns), problem.num_valid_pages, slot, first, last)
    return torch.cat([group.merge(rank, problem.num_valid_pages, slot, first, last) for rank in range(world)], dim=1)


# --- against the brute force ------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    layout=st.sampled_from(list(LAYOUTS.values())),
    query_len=st.integers(1, 8),
    seq_lens=st.lists(st.one_of(st.integers(0, 12), st.integers(100, 600), st.integers(2500, 6000)), max_size=3).filter(
        bool
    ),
    tagged=st.booleans(),
    forced=st.sampled_from(FORCED),
    pitch=st.sampled_from((0, 16, 208)),
    extra_columns=st.integers(0, 5),
    special=st.booleans(),
    equal_pages=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_chain_equals_brute_force(
    layout: Layout,
    query_len: int,
    seq_lens: list[int],
    tagged: bool,
    forced: tuple[int, int],
    pitch: int,
    extra_columns: int,
    special: bool,
    equal_pages: bool,
    seed: int,
) -> None:
    problem = DecodeProblem.random(
        layout,
        seq_lens=seq_lens,
        decode_query_len=query_len,
        seed=seed,
        page_pitch_extra=pitch,
        block_table_extra_columns=extra_columns,
        special=special,
    )
    if equal_pages:
        # Whole runs of blocks tie exactly.
        problem.pages.view(torch.uint8)[1:] = problem.pages.view(torch.uint8)[:1].clone()
    group = Group(layout, capacity=len(problem.index_q) + 3, tagged=tagged)
    expected = brute_force_top16(problem, init_blocks=forced[0], local_blocks=forced[1])
    # Twice on one slot set: flags must have been cleared, and generations advanced.
    for slot in (1, 2, 1):
        output = run_chain(problem, group, slot, *forced)
        assert torch.equal(output, expected.ids)
    assert all(int(x) == 0 for x in group.errors)


@every_layout
def test_scores_over_ranks_equal_brute_force(layout: Layout) -> None:
    problem = DecodeProblem.random(layout, seq_lens=(1500, 0, 3, 700), decode_query_len=4, special=True)
    columns = score_columns(problem)
    merged = torch.full((16, 4, columns * layout.index_scale), -INF)
    for rank in range(layout.world_size):
        scores = score(problem, rank, columns)
        written = torch.where(scores == UNTOUCHED, -INF, scores)
        target = merged[..., layout.index_offset(rank) :: layout.index_scale]
        torch.maximum(target, written, out=target)
    expected = brute_force_top16(problem, init_blocks=0, local_blocks=0).scores.float()
    assert torch.equal(merged[..., : expected.shape[-1]], expected)
    assert (merged[..., expected.shape[-1] :] == -INF).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_layout
@both_forms
def test_chain_on_cuda_equals_brute_force(layout: Layout, tagged: bool) -> None:
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    # The longest request takes more than one chunk of pages.
    problem = DecodeProblem.random(
        layout,
        seq_lens=(300_000, 0, 5000, 131_072),
        decode_query_len=3,
        device=devices[0],
        page_pitch_extra=32,
        special=True,
    )
    expected = brute_force_top16(problem, init_blocks=1, local_blocks=2)
    group = Group(layout, capacity=len(problem.index_q) + 3, tagged=tagged, devices=devices)
    for slot in (1, 2, 1):
        assert torch.equal(run_chain(problem, group, slot, 1, 2), expected.ids)
    if not tagged:
        group.received[0][1].fill_(1)
        with pytest.raises(RuntimeError, match="on cuda:0 waited"):
            run_chain(problem, group, 1, 1, 2)
        assert int(group.errors[0]) == 1


# --- scorer -----------------------------------------------------------------------------------------------------------


@every_layout
def test_scorer_writes_whole_column_groups_and_no_more(layout: Layout) -> None:
    page = layout.page_size
    seq_lens = (0, 1, 4 * page, 4 * page + 1, 9 * page)
    problem = DecodeProblem.random(layout, seq_lens=seq_lens, decode_query_len=2)
    for rank in range(layout.world_size):
        scores = score(problem, rank, 12)
        for request, columns in enumerate((0, 4, 4, 8, 12)):
            rows = scores[2 * request : 2 * request + 2]
            assert not (rows[..., :columns] == UNTOUCHED).any()
            assert (rows[..., columns:] == UNTOUCHED).all()
    # One key: the earlier of the two query tokens sees none, and only the rank with key 0 sees the other's.
    assert (score(problem, 0, 12)[2, :, :4] == -INF).all()
    assert score(problem, 0, 12)[3, :, 0].isfinite().all()
    assert (score(problem, layout.world_size - 1, 12)[3, :, :4] == -INF).all()


@every_layout
def test_scorer_clamps_length_to_columns_but_not_positions(layout: Layout) -> None:
    page = layout.page_size
    problem = DecodeProblem.random(layout, seq_lens=(6 * page,), decode_query_len=3)
    # The last keys of a page win, so a token that misses them scores otherwise.
    problem.pages[:, -2:] = 448.0
    problem.index_q.copy_(problem.index_q.float().abs())
    for rank in range(layout.world_size):
        whole = score(problem, rank, 8)
        # Five block-table columns, then four score columns: what is covered scores as before, for every token.
        short_table = score(replace(problem, block_table=problem.block_table[:, :5]), rank, 8)
        assert torch.equal(short_table[..., :5], whole[..., :5])
        assert (short_table[..., 5:] == -INF).all()
        assert torch.equal(score(problem, rank, 4), whole[..., :4])
    negative = replace(problem, seq_lens=int32([-5]))
    assert (score(negative, 0, 8) == UNTOUCHED).all()


def test_scorer_ignores_nan_and_writes_positive_zero() -> None:
    layout = LAYOUTS["p128_tp2"]
    problem = DecodeProblem.random(layout, seq_lens=(384,), decode_query_len=1)
    keys = problem.pages.view(torch.uint8)[problem.block_table[0, :3].long()]
    keys[0, :, 0] = 0x7F
    keys[1, 1:, 5] = 0xFF
    keys[2] = 0x80
    problem.pages.view(torch.uint8)[problem.block_table[0, :3].long()] = keys
    first_of_block_1 = keys[1, 0].view(torch.float8_e4m3fn).double()
    scores = score(problem, 0, 4)
    assert (scores[0, :, 0] == -INF).all()
    assert torch.equal(scores[0, :, 1], (problem.index_q[0].double() @ first_of_block_1).float())
    assert scores[0, :, 2].contiguous().view(torch.int32).tolist() == [0] * 4
    assert bits([-0.0]) != [0]


def test_scorer_survives_extreme_products() -> None:
    problem = DecodeProblem.random(LAYOUTS["p256_tp4"], seq_lens=(256,), decode_query_len=1)
    problem.pages.view(torch.uint8).fill_(0x7E)
    problem.index_q.view(torch.uint8).fill_(0x7E)
    assert (score(problem, 0, 4)[..., 0] == 128 * 448.0**2).all()


# --- selection --------------------------------------------------------------------------------------------------------


def select(
    values: Sequence[float] | torch.Tensor,
    valid: int,
    *,
    first: int = 0,
    last: int = 0,
    scale: int = 1,
    offset: int = 0,
) -> tuple[list[int], list[int]]:
    """Score bits and ids of the row that each of the 4 heads selects from the same scores."""
    scores = torch.as_tensor(values, dtype=torch.float32).expand(1, 4, -1)
    rows = select_rows(
        scores,
        int32([valid]),
        force_begin_blocks=first,
        force_end_blocks=last,
        index_scale=scale,
        index_offset=offset,
    )
    assert rows.shape == (1, 4, 32) and rows.dtype == torch.int32
    assert (rows == rows[:, :1]).all()
    return rows[0, 0, :16].tolist(), rows[0, 0, 16:].tolist()


def test_select_takes_the_best_in_ascending_id_order() -> None:
    scores = torch.randn(300, generator=torch.Generator().manual_seed(1))
    words, ids = select(scores, 300)
    assert ids == sorted(scores.topk(16).indices.tolist())
    assert words == bits(scores[ids].tolist())


def test_select_breaks_ties_to_the_lower_id() -> None:
    assert select([1.0] * 40, 40)[1] == list(range(16))
    assert select([0.0] * 20 + [1.0] * 20, 40)[1] == list(range(20, 36))


def test_select_treats_nan_as_minus_infinity_and_publishes_it_raw() -> None:
    payload = int32([0x7FC12345, 0xFF800001 - (1 << 32)])
    scores = torch.zeros(20)
    scores[:2] = payload.view(torch.float32)
    scores[2] = -INF
    # 17 scores beat both NaN and -inf.
    assert select(scores, 20)[1] == list(range(3, 19))
    # With too few better ones they fill the row in id order, bits unchanged.
    words, ids = select(scores[:6], 6)
    assert ids == [0, 1, 2, 3, 4, 5] + [-1] * 10
    assert words == [*payload.tolist(), *bits([-INF, 0, 0, 0]), *bits([-INF] * 10)]
    # And among each other the lower id wins: -inf at 1 against NaN at 0 and 2.
    tail = [NAN, -INF, NAN] + [1.0] * 14
    assert select(tail, 17)[1] == [0, 1, *range(3, 17)]


def test_select_orders_negative_zero_like_zero_and_keeps_its_bits() -> None:
    scores = [-0.0, 0.0] * 10
    words, ids = select(scores, 20)
    assert ids == list(range(16))
    assert words == bits(scores[:16])
    assert len(set(words)) == 2


def test_select_fills_unused_places() -> None:
    words, ids = select([1.0, -INF, 3.0, 9.0, 9.0], 3)
    assert ids == [0, 1, 2] + [-1] * 13
    assert words == bits([1.0, -INF, 3.0] + [-INF] * 13)


def test_select_without_a_valid_page_gives_an_empty_row() -> None:
    for valid in (0, -3):
        assert select([1.0] * 20, valid, first=8, last=8) == (bits([-INF] * 16), [-1] * 16)


def test_select_with_more_pages_than_columns() -> None:
    # The forced end lies past the columns: forced blocks follow the true count.
    assert select([float(x) for x in range(40)], 50, last=2)[1] == list(range(24, 40))
    assert select([-float(x) for x in range(40)], 41, last=2)[1] == [*range(15), 39]


def test_select_stops_at_the_candidate_limit() -> None:
    scores = torch.arange(MAX_BLOCKS + 100).float()
    assert select(scores, 9000)[1] == list(range(MAX_BLOCKS - 16, MAX_BLOCKS))
    # The end is forced by the unclamped count: none of these blocks is a candidate.
    assert select(-scores, 9000, last=8)[1] == list(range(16))
    assert select(-scores, MAX_BLOCKS + 4, last=8)[1] == [*range(12), *range(MAX_BLOCKS - 4, MAX_BLOCKS)]


@pytest.mark.parametrize(("first", "last"), FORCED)
def test_select_forces_both_ends(first: int, last: int) -> None:
    scores = [-INF] * first + [float(x) for x in range(60 - first - last)] + [NAN] * last
    free = 16 - first - last
    assert select(scores, 60, first=first, last=last)[1] == [
        *range(first),
        *range(60 - last - free, 60 - last),
        *range(60 - last, 60),
    ]
    # Fewer blocks than are forced.
    assert select(scores, 3, first=first, last=last)[1] == [0, 1, 2] + [-1] * 13


def test_select_maps_columns_to_global_blocks() -> None:
    scores = [float(x) for x in range(30)]
    assert select(scores, 60, scale=2, offset=1)[1] == list(range(29, 60, 2))
    # Block 19 is not valid, so columns 0..8 are; block 1 is forced by the begin, block 17 by the end.
    words, ids = select(scores, 19, scale=2, offset=1, first=2, last=2)
    assert ids == [1, 3, 5, 7, 9, 11, 13, 15, 17] + [-1] * 7
    assert words[:9] == bits(scores[:9])


def test_select_reads_a_strided_plane() -> None:
    plane = torch.randn(3, 4, 64)
    options = {"force_begin_blocks": 1, "force_end_blocks": 2, "index_scale": 2, "index_offset": 0}
    valid = int32([80, 3, 0])
    view = plane[..., :48]
    assert torch.equal(select_rows(view, valid, **options), select_rows(view.contiguous(), valid, **options))


# --- publish ----------------------------------------------------------------------------------------------------------


@every_layout
@both_forms
def test_publish_puts_each_row_where_its_owner_looks(layout: Layout, tagged: bool) -> None:
    tokens, capacity, slot, rank = 3, 5, 2, layout.world_size - 1
    group = Group(layout, capacity, tagged)
    scores = torch.randn(tokens, 4, 40)
    valid = int32([40, 0, 17])
    before = group.generations[rank].clone()
    group.publish(rank, scores, valid, slot, 1, 2)
    rows = select_rows(
        scores,
        valid,
        force_begin_blocks=1,
        force_end_blocks=2,
        index_scale=layout.index_scale,
        index_offset=layout.index_offset(rank),
    )
    world, owned = layout.world_size, layout.heads_per_rank
    for head in range(4):
        flat = group.received[head // owned].view(-1, 32 if tagged else 33)
        for token in range(tokens):
            got = flat[((slot * world + rank) * owned + head % owned) * capacity + token].tolist()
            words = rows[token, head].tolist()
            if tagged:
                assert got == [1 << 32 | word & 0xFFFFFFFF for word in words]
            else:
                assert got == [*words, 1]
    # Nothing else was written anywhere: every word of a row is nonzero but for a score or id of zero.
    touched = sum(int((x != 0).any(-1).sum()) for x in group.received)
    assert touched == 4 * tokens
    assert torch.equal(
        group.generations[rank] - before,
        before.index_fill(0, torch.tensor([slot]), int(tagged)) * (torch.arange(capacity) < tokens),
    )


def test_publish_into_a_full_legacy_row_raises_and_writes_nothing() -> None:
    layout = LAYOUTS["p128_tp2"]
    group = Group(layout, 4, tagged=False)
    group.received[1][0, 0, 1, 2, 32] = 1
    before = [x.clone() for x in group.received]
    with pytest.raises(RuntimeError, match=r"rank 0 waits in vain for rank 1 .*row 2 \(owned head 1\) of slot set 0"):
        group.publish(0, torch.randn(3, 4, 20), int32([20] * 3), 0)
    assert all(torch.equal(a, b) for a, b in zip(before, group.received, strict=True))
    assert [int(x) for x in group.errors] == [1, 0]
    # Neither a token past T nor another slot set matters.
    group.publish(0, torch.randn(2, 4, 20), int32([20] * 2), 0)
    group.publish(0, torch.randn(3, 4, 20), int32([20] * 3), 1)


def test_tagged_publish_never_waits() -> None:
    group = Group(LAYOUTS["p256_tp2"], 4, tagged=True)
    for round_ in range(1, 4):
        group.publish(0, torch.randn(3, 4, 20), int32([20] * 3), 0)
        assert (group.received[0][0, 0, :, :3] >> 32 == round_).all()


# --- merge ------------------------------------------------------------------------------------------------------------


def carrier(sources: Sequence[Sequence[tuple[float, int]]], flag: int = 1) -> torch.Tensor:
    """Receive rows int32 ``[W, 1, 1, 33]`` from each source's (score, id) pairs."""
    rows = torch.empty(len(sources), 1, 1, 33, dtype=torch.int32)
    for row, pairs in zip(rows, sources, strict=True):
        padded = [*pairs, *[(-INF, -1)] * (16 - len(pairs))]
        row[0, 0] = int32([*bits(s for s, _ in padded), *(i for _, i in padded), flag])
    return rows


def merge(
    rows: torch.Tensor,
    valid: Sequence[int],
    *,
    first: int = 0,
    last: int = 0,
    prefill: bool = True,
    expected: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> list[list[int]]:
    output = torch.full((len(valid), rows.shape[1], 16), -7, dtype=torch.int32)
    merge_candidates(
        rows,
        int32(valid),
        output,
        int32([0]) if errors is None else errors,
        init_blocks=first,
        local_blocks=last,
        expected_generations=expected,
        prefill=prefill,
    )
    return output[:, 0].tolist()


def padded(*ids: int) -> list[int]:
    return [*ids, *[-1] * (16 - len(ids))]


def test_merge_takes_the_best_over_all_sources() -> None:
    evens = [(float(x), x) for x in range(0, 32, 2)]
    odds = [(float(x), x) for x in range(1, 32, 2)]
    assert merge(carrier([evens, odds]), [32]) == [list(range(16, 32))]


def test_merge_keeps_the_largest_score_of_a_duplicate() -> None:
    crowd = [(5.0, x) for x in range(10, 26)]
    # Block 3 wins with either order of its scores, and takes one place; NaN never hides a score.
    for pair in ((9.0, -1.0), (-1.0, 9.0), (NAN, 9.0), (9.0, NAN), (-INF, 9.0)):
        rows = carrier([[(pair[0], 3)], [(pair[1], 3)], crowd, []])
        assert merge(rows, [30]) == [[3, *range(10, 25)]]
    assert merge(carrier([[(1.0, 3)], [(1.0, 3)], [(1.0, 3)], [(NAN, 3)]]), [30]) == [padded(3)]


def test_merge_breaks_ties_to_the_lower_id_whatever_the_source() -> None:
    high = [(1.0, x) for x in range(16, 32)]
    low = [(1.0, x) for x in range(16)]
    assert merge(carrier([high, low]), [32]) == [list(range(16))]
    zeros = [(0.0 if x % 2 else -0.0, x) for x in range(16)]
    assert merge(carrier([[(0.0, x) for x in range(16, 32)], zeros]), [32]) == [list(range(16))]


def test_merge_ranks_nan_and_minus_infinity_last_but_uses_them() -> None:
    assert merge(carrier([[(NAN, 0), (-INF, 1), (2.0, 7)], []]), [30]) == [padded(0, 1, 7)]
    full = [(1.0, x) for x in range(10, 25)]
    assert merge(carrier([[(NAN, 1), (-INF, 0)], full]), [30]) == [[0, *range(10, 25)]]
    assert merge(carrier([[(NAN, 0), (-INF, 1)], full]), [30]) == [[0, *range(10, 25)]]


def test_merge_drops_ids_out_of_range() -> None:
    rows = carrier([[(9.0, 30), (9.0, -5), (9.0, 8192), (1.0, 29)], [(8.0, 2**31 - 1), (8.0, -(2**31)), (0.0, 0)]])
    assert merge(rows, [30]) == [padded(0, 29)]
    # The limit of 8192 candidates holds for larger counts too.
    assert merge(carrier([[(9.0, 8192), (1.0, 8191)], []]), [9000]) == [padded(8191)]


def test_merge_forces_both_ends() -> None:
    best = [(9.0, x) for x in range(8, 24)]
    rows = carrier([[(-INF, 0), (NAN, 1), (-3.0, 39), (0.0, 38)], best])
    assert merge(rows, [40], first=1, last=2) == [[0, *range(8, 21), 38, 39]]
    # Forced by the unclamped count, so nothing is at the end here.
    assert merge(rows, [9000], first=0, last=2) == [list(range(8, 24))]
    # More forced blocks than places: forced ones compete by score.
    assert merge(carrier([best, [(1.0, 0)]]), [40], first=40, last=40) == [list(range(8, 24))]


def test_merge_of_padding_rows() -> None:
    rows = carrier([[(1.0, 0)], [(1.0, 1)]])
    assert merge(rows, [0]) == [padded(0)]
    assert merge(rows, [0], prefill=False) == [padded()]


def test_prefill_merge_does_not_look_at_flags() -> None:
    rows = carrier([[(1.0, 0)], [(1.0, 1)]], flag=99)
    before = rows.clone()
    assert merge(rows, [5]) == [padded(0, 1)]
    assert torch.equal(rows, before)


def test_merge_of_a_missing_legacy_row_raises_and_changes_nothing() -> None:
    rows = carrier([[(1.0, 0)], [(1.0, 1)]])
    rows[1, ..., 32] = 0
    before, errors = rows.clone(), int32([4])
    with pytest.raises(RuntimeError, match=r"waits in vain for rank 1 to publish the legacy receive row 0"):
        merge(rows, [5], prefill=False, errors=errors)
    assert torch.equal(rows, before) and errors.tolist() == [5]


def test_legacy_merge_clears_exactly_the_flags_it_read() -> None:
    rows = carrier([[(1.0, 0)], [(1.0, 1)]]).repeat(1, 1, 3, 1)
    before = rows.clone()
    assert merge(rows, [5, 5], prefill=False) == [padded(0, 1)] * 2
    before[:, :, :2, 32] = 0
    assert torch.equal(rows, before)


def test_merge_reads_strided_rows_and_writes_a_strided_output() -> None:
    rows = torch.zeros(2, 1, 1, 40, dtype=torch.int32)[..., :33]
    rows.copy_(carrier([[(1.0, 4)], [(2.0, 9)]]))
    output = torch.full((1, 1, 20), -7, dtype=torch.int32)
    merge_candidates(
        rows,
        int32([30]),
        output[..., :16],
        int32([0]),
        init_blocks=0,
        local_blocks=0,
        expected_generations=None,
        prefill=False,
    )
    assert output[0, 0].tolist() == [*padded(4, 9), *[-7] * 4]


@pytest.mark.parametrize("counter", (0, 2**31 - 2, 2**31 - 1, -1, -2))
def test_tagged_generations_wrap(counter: int) -> None:
    group = Group(LAYOUTS["p128_tp4"], 3, tagged=True)
    for x in (*group.generations, *group.expected):
        x.fill_(counter)
    for round_ in range(1, 4):
        for rank in range(4):
            group.publish(rank, torch.full((2, 4, 20), float(rank)), int32([20, 0]), 0)
        wrapped = (counter + round_ + 2**31) % 2**32 - 2**31
        for rank in range(4):
            assert (group.received[rank][0, :, :, :2] >> 32 == wrapped).all()
            assert group.merge(rank, int32([20, 0]), 0)[:, 0].tolist() == [list(range(16)), padded()]
            assert (group.expected[rank][0, :, :2] == wrapped).all()
            assert (group.expected[rank][0, :, 2:] == counter).all()
            assert (group.expected[rank][1:] == counter).all()


@pytest.mark.parametrize("stale", (-1, 1), ids=("not yet published", "overwritten"))
def test_tagged_merge_accepts_only_the_next_generation(stale: int) -> None:
    group = Group(LAYOUTS["p128_tp2"], 2, tagged=True)
    valid = int32([20])
    for rank in range(2):
        group.publish(rank, torch.randn(1, 4, 20), valid, 1)
    # One word of one row is of another generation.
    group.received[0][1, 1, 1, 0, 17] += stale << 32
    expected = group.expected[0].clone()
    with pytest.raises(
        RuntimeError, match=r"rank 0 waits in vain for rank 1 to publish the tagged receive row 0 \(owned head 1\)"
    ):
        group.merge(0, valid, 1)
    assert torch.equal(group.expected[0], expected) and int(group.errors[0]) == 1
    group.received[0][1, 1, 1, 0, 17] -= stale << 32
    group.merge(0, valid, 1)
    with pytest.raises(RuntimeError, match="to publish the tagged"):
        group.merge(0, valid, 1)


@both_forms
def test_merge_before_every_rank_has_published_raises(tagged: bool) -> None:
    group = Group(LAYOUTS["p256_tp2"], 2, tagged)
    group.publish(0, torch.randn(1, 4, 20), int32([20]), 0)
    with pytest.raises(RuntimeError, match="Restart the ranks"):
        group.merge(0, int32([20]), 0)
