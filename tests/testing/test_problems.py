# SPDX-License-Identifier: Apache-2.0
"""The problem generator and its oracle, on examples small enough to work out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashinfer_msa.layout import LAYOUTS, Layout
from flashinfer_msa.testing import problems as simulate
from flashinfer_msa.testing.problems import (
    UNUSED_PAGE,
    Comparison,
    DecodeProblem,
    Expected,
    PrefillProblem,
    Problem,
    block_scores,
    brute_force_top16,
    compare,
    exchange,
    group_indexers,
    random_e4m3,
    share_cache,
)

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def e4m3(values: list[float] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32).to(torch.float8_e4m3fn)


@every_layout
@pytest.mark.parametrize("extra", (0, 48))
def test_shards_reassemble(layout: Layout, extra: int) -> None:
    problem = DecodeProblem.random(layout, seq_lens=(300, 900), decode_query_len=1, page_pitch_extra=extra)
    page, world = layout.page_size, layout.world_size
    whole = torch.zeros_like(problem.pages.view(torch.uint8))
    for rank in range(world):
        local = problem.shard(rank)
        assert local.shape == (len(problem.pages), page // world, 128)
        assert local.stride() == (page // world * 128 + extra, 128, 1)
        for row in range(page // world):
            key = world * row + rank if page == 128 else page // world * rank + row
            whole[:, key] = local.view(torch.uint8)[:, row]
    assert torch.equal(whole, problem.pages.view(torch.uint8))


@every_layout
def test_pages_are_used_once_and_the_rest_of_the_table_faults(layout: Layout) -> None:
    problem = DecodeProblem.random(
        layout,
        seq_lens=(0, 1, layout.page_size, 5 * layout.page_size + 1),
        decode_query_len=1,
        block_table_extra_columns=2,
    )
    table = problem.block_table
    used = table != UNUSED_PAGE
    assert used.sum(1).tolist() == [0, 1, 1, 6] and table.shape == (4, 8)
    assert sorted(table[used].tolist()) == list(range(8)) == list(range(len(problem.pages)))
    assert table[used].tolist() != list(range(8))


def test_visible_keys_and_valid_pages() -> None:
    problem = DecodeProblem.random(LAYOUTS["p256_tp2"], seq_lens=(0, 2, 129), decode_query_len=3)
    assert problem.visible_keys.tolist() == [0, 0, 0, 0, 1, 2, 127, 128, 129]
    assert problem.num_valid_pages.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert problem.num_valid_pages.dtype == torch.int32
    assert replace(problem, seq_lens=problem.seq_lens - 1).num_valid_pages.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_a_seed_repeats_and_specials_appear() -> None:
    draw = [
        random_e4m3((3000, 128), torch.Generator().manual_seed(s), special=True).view(torch.uint8) for s in (1, 1, 2)
    ]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    assert all((draw[0] == byte).any() for byte in (0x7F, 0xFF, 0x7E, 0xFE, 0x80))
    plain = random_e4m3((3000, 128), torch.Generator().manual_seed(1)).float()
    assert plain.isfinite().all() and abs(float(plain.mean())) < 0.01 and abs(float(plain.std()) - 1) < 0.01


def test_page_pitch_must_keep_pages_aligned() -> None:
    with pytest.raises(ValueError, match="page_pitch_extra must be a non-negative multiple of 16, was 8"):
        DecodeProblem.random(LAYOUTS["p128_tp2"], seq_lens=(1,), decode_query_len=1, page_pitch_extra=8)


def handmade(page_size: int) -> DecodeProblem:
    """One request of 20 whole blocks and one key; the best key of block ``b`` scores ``table[b]`` for head 0."""
    layout = LAYOUTS[f"p{page_size}_tp2"]
    length = 20 * 128 + 1
    problem = DecodeProblem.random(layout, seq_lens=(length,), decode_query_len=2)
    keys = torch.zeros(len(problem.pages) * page_size, 128)
    for block in range(21):
        # Below the best key lies a lower one; the other component is for head 1.
        keys[128 * block : 128 * block + 128, 0] = -4.0
        keys[128 * block, 0] = float(block % 8)
        keys[128 * block, 1] = -float(block % 8)
    # A NaN never wins, and a key beyond the last one is not seen.
    keys[128 * 3 + 7, 0] = float("nan")
    keys[length:, 0] = 300.0
    pages = torch.zeros_like(problem.pages)
    pages[problem.block_table[0].long()] = e4m3(keys).view(-1, page_size, 128)
    query = torch.zeros(2, 4, 128)
    query[:, 0, 0] = 1.0
    query[:, 1, 1] = 1.0
    return replace(problem, pages=pages, index_q=e4m3(query))


@pytest.mark.parametrize("page_size", (128, 256))
def test_brute_force_on_a_handmade_example(page_size: int) -> None:
    expected = brute_force_top16(handmade(page_size), init_blocks=0, local_blocks=0)
    # Token 1 sees the one key of block 20, token 0 does not.
    assert expected.scores[1, 0, :21].tolist() == [float(b % 8) for b in range(21)]
    assert expected.scores[0, 0, 19:21].tolist() == [3.0, float("-inf")]
    # Of 0..19, blocks 0, 8, 16 score 0 and 1, 9, 17 score 1: dropped are all zeros and the last one.
    assert expected.ids[0, 0].tolist() == [1, *range(2, 8), *range(9, 16), 18, 19]
    # With block 20 (score 4) both ones but the first go.
    assert expected.ids[1, 0].tolist() == [1, *range(2, 8), *range(10, 16), 18, 19, 20]
    # Head 1 has zero as its best key in every block: 127 keys with component 0. All tie.
    assert expected.ids[0, 1].tolist() == list(range(16))
    # Heads 2 and 3 have a zero query, and NaN keys do not count: all tie again.
    assert expected.ids[1, 2].tolist() == list(range(16))
    assert expected.bounds[1, 0, 0] == 4.0 and expected.bounds[1, 2, 0] == 0.0

    forced = brute_force_top16(handmade(page_size), init_blocks=1, local_blocks=2)
    # Block 0 replaces block 9.
    assert forced.ids[0, 0].tolist() == [*range(8), *range(10, 16), 18, 19]
    assert forced.ids[1, 1].tolist() == [*range(14), 19, 20]


def test_brute_force_of_short_requests() -> None:
    problem = DecodeProblem.random(LAYOUTS["p128_tp4"], seq_lens=(0, 1, 300), decode_query_len=1)
    ids = brute_force_top16(problem, init_blocks=1, local_blocks=2).ids
    assert ids.dtype == torch.int32
    for token, blocks in enumerate(([], [0], [0, 1, 2])):
        assert ids[token].tolist() == [[*blocks, *[-1] * (16 - len(blocks))]] * 4


@pytest.fixture
def expected() -> Expected:
    """Two tokens by one head: scores 20, 19, .. over 24 blocks but block 16 a hair below block 15; block 0 forced."""
    scores = torch.arange(24, 0, -1, dtype=torch.float64).repeat(2, 1, 1)
    scores[..., 16] = scores[..., 15] - 1e-6
    ids = torch.arange(16, dtype=torch.int32).repeat(2, 1, 1)
    forced = torch.zeros(2, 1, 24, dtype=torch.bool)
    forced[..., 0] = True
    scores[..., 20:] = -torch.inf
    return Expected(ids, scores, torch.ones_like(scores), forced)


def changed(expected: Expected, *row: int) -> torch.Tensor:
    output = expected.ids.clone()
    output[1, 0] = torch.tensor(row)
    return output


def test_compare_accepts_equal_rows(expected: Expected) -> None:
    assert compare(expected.ids, expected) == Comparison(rows=2, equal=2, near_ties=0, wrong=0)


def test_compare_sees_a_near_tie(expected: Expected) -> None:
    swapped = changed(expected, *range(15), 16)
    assert compare(swapped, expected) == Comparison(2, 1, 1, 0)
    # The same difference is an error where the bound is small, and where the tolerance is.
    assert compare(swapped, expected._replace(bounds=expected.bounds * 0.05)).wrong == 1
    assert compare(swapped, expected, near_tie=1e-7).wrong == 1


@pytest.mark.parametrize(
    "row",
    (
        (*range(15), 17),
        (*range(14), 15, 16),
        (*range(14), 16, 15),
        (*range(15), -1),
        (*range(15), 14),
        (*range(15), 20),
        (*range(15), 24),
        (*range(15), -2),
        (*range(1, 17),),
    ),
    ids=(
        "a worse block",
        "a better block is missing",
        "not ascending",
        "one too few",
        "a duplicate",
        "a block without a score",
        "out of range",
        "below -1",
        "a forced block is missing",
    ),
)
def test_compare_flags_a_wrong_row(expected: Expected, row: tuple[int, ...]) -> None:
    if row == tuple(range(1, 17)):
        # Even if the forced block scores like the one that replaced it.
        expected.scores[..., 0] = expected.scores[..., 16]
    assert compare(changed(expected, *row), expected) == Comparison(2, 1, 0, 1)


def test_compare_flags_a_block_too_many() -> None:
    problem = DecodeProblem.random(LAYOUTS["p128_tp2"], seq_lens=(300,), decode_query_len=1)
    expected = brute_force_top16(problem, init_blocks=0, local_blocks=0)
    for extra in (2, 3):
        output = expected.ids.clone()
        output[0, 2, 3] = extra
        assert compare(output, expected) == Comparison(4, 3, 0, 1)


def test_counts_add_up() -> None:
    assert Comparison(4, 2, 1, 1).plus(Comparison(6, 6)) == Comparison(10, 8, 1, 1)


# --- prefill ----------------------------------------------------------------------------------------------------------

RAGGED: dict[str, Any] = {
    "query_lens": [3, 0, 5, 1, 4],
    "kv_lens": [300, 40, 129, 0, 700],
    "positions": [297, 40, 126, 3, 100],
}


def test_visible_keys_of_a_prefill_window() -> None:
    problem = PrefillProblem.random(LAYOUTS["p256_tp4"], **RAGGED, padding=2)
    # Segment 2 has fewer keys than its tokens reach, segment 3 none, and segment 4 more.
    expected = [298, 299, 300, 127, 128, 129, 129, 129, 0, 101, 102, 103, 104, 0, 0]
    assert problem.visible_keys.tolist() == expected
    assert problem.num_valid_pages.tolist() == [math.ceil(keys / 128) for keys in expected]
    assert problem.visible_keys.dtype == problem.num_valid_pages.dtype == torch.int32
    assert problem.index_q.shape == (15, 4, 128)
    assert problem.rows == [slice(0, 3), slice(3, 3), slice(3, 8), slice(8, 9), slice(9, 13)]


def test_segments_and_bounds_of_a_prefill_window() -> None:
    problem = PrefillProblem.random(LAYOUTS["p128_tp2"], **RAGGED)
    assert [x.tolist() for x in problem.segments] == [
        [3, 0, 5, 1, 4],
        [300, 40, 129, 0, 700],
        [0, 3, 3, 8, 9, 13],
        [0, 300, 340, 469, 469, 1169],
        [297, 40, 126, 3, 100],
    ]
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in problem.segments)
    assert problem.bounds == {"total_q": 13, "max_query_len": 5, "max_seq_len": 700}
    # By default a segment's tokens are the last of its keys.
    assert PrefillProblem.random(LAYOUTS["p128_tp2"], query_lens=[2, 9], kv_lens=[7, 9]).positions == (5, 0)
    nothing = PrefillProblem.random(LAYOUTS["p128_tp2"], query_lens=[], kv_lens=[])
    assert nothing.bounds == {"total_q": 1, "max_query_len": 1, "max_seq_len": 1}
    assert [x.tolist() for x in nothing.segments] == [[], [], [0], [0], []]


@every_layout
def test_pages_that_no_token_of_a_window_sees_do_not_exist(layout: Layout) -> None:
    problem = PrefillProblem.random(layout, **RAGGED, block_table_extra_columns=1)
    used = problem.block_table != UNUSED_PAGE
    # The columns are those of the longest key length; segment 4 sees 104 of its 700 keys, segment 1 has no token.
    assert problem.block_table.shape == (5, math.ceil(700 / layout.page_size) + 1)
    assert used.sum(1).tolist() == [math.ceil(seen / layout.page_size) for seen in (300, 0, 129, 0, 104)]
    assert sorted(problem.block_table[used].tolist()) == list(range(len(problem.pages)))
    assert torch.equal(used, used.sort(dim=1, descending=True).values)


@every_layout
@pytest.mark.parametrize("tokens", (1, 2, 4, 5, 12, 13, 100))
def test_windows_cut_a_step_and_its_segments(layout: Layout, tokens: int) -> None:
    problem = PrefillProblem.random(layout, **RAGGED, special=True)
    windows = problem.windows(tokens)
    assert [len(window.index_q) for window in windows] == [min(tokens, 13 - x) for x in range(0, 13, tokens)]
    position_of_row = [
        (segment, problem.positions[segment] + j) for segment, n in enumerate(problem.query_lens) for j in range(n)
    ]
    row = 0
    for window in windows:
        assert window.pages is problem.pages and sum(window.query_lens) == len(window.index_q)
        for part, (rows, position) in enumerate(zip(window.rows, window.positions, strict=True)):
            for j in range(rows.stop - rows.start):
                segment, expected = position_of_row[row]
                assert position + j == expected
                assert torch.equal(window.block_table[part], problem.block_table[segment])
                assert window.seq_lens[part] == problem.seq_lens[segment]
                row += 1
    assert row == 13
    # Together they ask what the step asks.
    for name in ("visible_keys", "num_valid_pages", "index_q"):
        whole = torch.cat([getattr(window, name) for window in windows])
        assert torch.equal(whole.view(torch.uint8), getattr(problem, name).view(torch.uint8)), name
    answers = [brute_force_top16(window, init_blocks=1, local_blocks=2).ids for window in windows]
    assert torch.equal(torch.cat(answers), brute_force_top16(problem, init_blocks=1, local_blocks=2).ids)


def test_windows_leave_padding_out() -> None:
    problem = PrefillProblem.random(LAYOUTS["p128_tp2"], **RAGGED, padding=9)
    assert [len(window.index_q) for window in problem.windows(10)] == [10, 3]
    assert PrefillProblem.random(LAYOUTS["p128_tp2"], query_lens=[0], kv_lens=[9], padding=4).windows(10) == []


@every_layout
def test_problems_that_share_a_cache_ask_the_same(layout: Layout) -> None:
    decode = DecodeProblem.random(layout, seq_lens=(300, 0, 900), decode_query_len=2, special=True)
    prefill = PrefillProblem.random(layout, **RAGGED, block_table_extra_columns=2, seed=1, special=True)
    shared = share_cache(decode, prefill)
    assert torch.equal(shared[0].pages.view(torch.uint8), shared[1].pages.view(torch.uint8))
    assert len(shared[0].pages) == len(decode.pages) + len(prefill.pages)
    # No page belongs to both, and the rest of the table still faults.
    tables = [problem.block_table[problem.block_table != UNUSED_PAGE].tolist() for problem in shared]
    assert sorted(tables[0] + tables[1]) == list(range(len(shared[0].pages)))
    assert torch.equal(shared[1].block_table == UNUSED_PAGE, prefill.block_table == UNUSED_PAGE)
    for alone, together in zip((decode, prefill), shared, strict=True):
        ours, theirs = (brute_force_top16(x, init_blocks=1, local_blocks=2) for x in (alone, together))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@every_layout
def test_an_exchange_brings_every_rank_its_heads(layout: Layout) -> None:
    limits = {"max_decode_tokens": 1, "max_decode_query_len": 1, "max_num_batched_tokens": 8, "max_num_seqs": 1}
    more = {"init_blocks": 0, "local_blocks": 1, "max_model_len": 128, "num_sparse_layers": 1, "backend": "torch"}
    indexers = group_indexers(layout, ["cpu"], **limits, **more)
    tokens, world = 3, layout.world_size
    carriers = [
        torch.tensor([[[source, head, t] + [0] * 30 for t in range(tokens)] for head in range(4)], dtype=torch.int32)
        for source in range(world)
    ]
    for indexer in indexers:
        received = exchange(carriers, indexer)
        assert received.shape == (world, 4 // world, tokens, 33)
        for source in range(world):
            for owned in range(4 // world):
                head = indexer.rank * (4 // world) + owned
                assert received[source, owned, :, :3].tolist() == [[source, head, t] for t in range(tokens)]


def scores_by_hand(problem: Problem) -> tuple[list[list[list[float]]], list[list[list[float]]]]:
    """Scores and bounds of every block, key by key."""
    page, visible = problem.layout.page_size, problem.visible_keys.tolist()
    blocks = problem.block_table.shape[1] * page // 128
    scores = [[[-math.inf] * blocks for _ in range(4)] for _ in visible]
    bounds = [[[0.0] * blocks for _ in range(4)] for _ in visible]
    for request, rows in enumerate(problem.rows):
        for token in range(rows.start, rows.stop):
            query = problem.index_q[token].double()
            for key in range(visible[token]):
                vector = problem.pages[int(problem.block_table[request, key // page]), key % page].double()
                for head in range(4):
                    products = query[head] * vector
                    if not products.isnan().any():
                        block = key // 128
                        scores[token][head][block] = max(scores[token][head][block], float(products.sum()))
                        bounds[token][head][block] = max(bounds[token][head][block], float(products.abs().sum()))
    return scores, bounds


@pytest.mark.parametrize("layout", (LAYOUTS["p128_tp2"], LAYOUTS["p256_tp4"]), ids=("p128", "p256"))
@pytest.mark.parametrize("per_chunk", (1 << 25, 1), ids=("at once", "page by page"))
def test_block_scores_equal_a_loop_over_keys(layout: Layout, per_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_DOTS_PER_CHUNK", per_chunk)
    window: dict[str, Any] = {"query_lens": [2, 0, 1, 1], "kv_lens": [300, 9, 131, 0], "positions": [240, 9, 200, 3]}
    for problem in (
        PrefillProblem.random(layout, **window, padding=1, special=True),
        DecodeProblem.random(layout, seq_lens=(260, 0, 1), decode_query_len=2, special=True),
    ):
        for ours, by_hand in zip(block_scores(problem), scores_by_hand(problem), strict=True):
            assert torch.equal(ours, torch.tensor(by_hand, dtype=torch.float64))


@pytest.mark.parametrize(("first", "last"), ((0, 0), (1, 2), (8, 8), (16, 0)))
def test_brute_force_equals_a_sort(first: int, last: int) -> None:
    window: dict[str, Any] = {"query_lens": [3, 2, 2], "kv_lens": [3000, 5, 2700], "positions": [2990, 3, 1500]}
    problem = PrefillProblem.random(LAYOUTS["p128_tp4"], **window, padding=1, special=True)
    # Blocks of equal keys tie.
    problem.pages.view(torch.uint8)[::2] = problem.pages.view(torch.uint8)[:1].clone()
    scored = block_scores(problem)
    answer = brute_force_top16(problem, init_blocks=first, local_blocks=last, scored=scored)
    assert torch.equal(answer.ids, brute_force_top16(problem, init_blocks=first, local_blocks=last).ids)
    for token, valid in enumerate(problem.num_valid_pages.tolist()):
        for head in range(4):
            forced = [block < first or block >= valid - last for block in range(valid)]
            values = scored[0][token, head].float().tolist()
            best = sorted(
                range(valid), key=lambda block, forced=forced, values=values: (not forced[block], -values[block], block)
            )[:16]
            best = best if valid else [0]  # as the prefill merge has it
            assert answer.ids[token, head].tolist() == [*sorted(best), *[-1] * (16 - len(best))]
            assert answer.forced[token, head, :valid].tolist() == forced
            assert not answer.forced[token, head, valid:].any()


def test_compare_counts_a_wrong_prefill_row() -> None:
    problem = PrefillProblem.random(LAYOUTS["p256_tp2"], query_lens=[2, 1], kv_lens=[5000, 0], positions=[4000, 0])
    expected = brute_force_top16(problem, init_blocks=0, local_blocks=1)
    assert compare(expected.ids, expected) == Comparison(12, 12, 0, 0)
    # A row of a token that sees nothing is [0, -1, ...] in prefill.
    output = expected.ids.clone()
    assert output[2].tolist() == [[0, *[-1] * 15]] * 4
    output[2, :, 0] = -1
    assert compare(output, expected) == Comparison(12, 8, 0, 4)
    output[2, :, 0] = 0
    # The forced block of the newest key cannot be another.
    output[0, 0, 15] = 32
    assert compare(output, expected) == Comparison(12, 11, 0, 1)
