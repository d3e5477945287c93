# SPDX-License-Identifier: Apache-2.0
"""The problem generator and its oracle, on examples small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashinfer_msa.layout import LAYOUTS, Layout
from flashinfer_msa.simulate import (
    UNUSED_PAGE,
    Comparison,
    DecodeProblem,
    Expected,
    brute_force_top16,
    compare,
    random_e4m3,
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
    # Block 0 takes the place of block 9.
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
        # Even where the forced block scores like the one that took its place.
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
