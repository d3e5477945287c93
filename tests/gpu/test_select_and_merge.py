# SPDX-License-Identifier: Apache-2.0
"""Select + publish and merge on a GPU equal the reference bit for bit, on difficult scores and rows."""

from __future__ import annotations

import pytest
import torch
from simulated_group import SMALL, assert_equal, write_late

from flashinfer_msa import msa_ops
from flashinfer_msa.layout import NUM_HEADS, ROW_WORDS, TAGGED_WORDS, TOP_K

WIDTHS = [1, 5, 16, 17, 63, 64, 256, 257, 1024, 4095, 8192, 12287]
KINDS = ["normal", "ties", "all-equal", "one-group", "special", "ascending"]


def awkward_scores(kind: str, tokens: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Return score planes that are difficult to select from, float32 ``[T, 4, columns]``."""
    shape = (tokens, NUM_HEADS, columns)
    if kind == "ties":
        return torch.randint(-2, 3, shape, generator=generator, device="cuda").float()
    if kind == "all-equal":
        return torch.zeros(shape, device="cuda")
    scores = torch.randn(shape, generator=generator, device="cuda")
    if kind == "one-group":
        scores[..., 5::32] += 100  # all large scores in one residue of the column modulo 32
    if kind == "ascending":
        scores = scores.sort(dim=-1).values
    if kind == "special":
        pick = torch.randint(0, 8, shape, generator=generator, device="cuda")
        for value, code in ((torch.nan, 0), (-torch.inf, 1), (torch.inf, 2), (-0.0, 3), (0.0, 4), (-torch.nan, 5)):
            scores[pick == code] = value
    return scores


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_published_rows_equal_reference(kind: str, tagged: bool, world_size: int) -> None:
    """Every width, forced blocks, every index map, zero and too large ``num_valid_pages``, strided planes."""
    generator = torch.Generator("cuda").manual_seed(sum(map(ord, kind)))
    hpr, tokens, capacity = NUM_HEADS // world_size, 7, 9
    for i, columns in enumerate(WIDTHS[:6] if SMALL else WIDTHS):
        scale, offset = ((1, 0), (2, 0), (2, 1))[i % 3]
        begin, end = ((0, 0), (0, 1), (1, 2), (8, 8), (16, 0))[i % 5]
        slot, rank = i % 3, i % world_size
        storage = torch.full((tokens, NUM_HEADS + i % 2, columns + i % 4), torch.inf, device="cuda")
        scores = storage[:, :NUM_HEADS, :columns]
        scores.copy_(awkward_scores(kind, tokens, columns, generator))
        valid = torch.randint(0, columns * scale + 3, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        valid[:4] = torch.tensor([0, columns * scale, 20000, -3], dtype=torch.int32)
        rows = {}
        for backend in ("cake", "torch"):
            width, dtype = (TAGGED_WORDS, torch.int64) if tagged else (ROW_WORDS, torch.int32)
            recv = [
                torch.zeros(3, world_size, hpr, capacity, width, dtype=dtype, device="cuda") for _ in range(world_size)
            ]
            generations = torch.full((3, NUM_HEADS, capacity), -1 if i % 2 else 41, dtype=torch.int32, device="cuda")
            msa_ops.msa_icp_topk_select_publish(
                scores,
                valid,
                torch.tensor([r.data_ptr() for r in recv], device="cuda"),
                torch.zeros(1, dtype=torch.int32, device="cuda"),
                slot=slot,
                rank=rank,
                world_size=world_size,
                heads_per_rank=hpr,
                capacity=capacity,
                force_begin_blocks=begin,
                force_end_blocks=end,
                generations=generations if tagged else None,
                index_scale=scale,
                index_offset=offset,
                backend=backend,
            )
            rows[backend] = (torch.stack(recv), generations)
        what = f"{kind}, {columns} columns"
        assert_equal(rows["cake"][0], rows["torch"][0], f"rows ({what})")
        assert_equal(rows["cake"][1], rows["torch"][1], f"generations ({what})")


def random_rows(world_size: int, capacity: int, generator: torch.Generator, *, spread: int) -> torch.Tensor:
    """Draw ready candidate rows with duplicates, invalid ids, NaN and ties: int32 ``[W, hpr, capacity, 33]``."""
    hpr = NUM_HEADS // world_size
    shape = (world_size, hpr, capacity, TOP_K)
    scores = torch.randint(-3, 4, shape, generator=generator, device="cuda").float()
    scores[torch.rand(shape, generator=generator, device="cuda") < 0.1] = torch.nan
    scores[torch.rand(shape, generator=generator, device="cuda") < 0.1] = -torch.inf
    scores[torch.rand(shape, generator=generator, device="cuda") < 0.1] = -0.0
    ids = torch.randint(-2, spread, shape, generator=generator, device="cuda", dtype=torch.int32)
    ready = torch.ones(*shape[:-1], 1, dtype=torch.int32, device="cuda")
    return torch.cat([scores.view(torch.int32), ids, ready], dim=-1)


@pytest.mark.parametrize("mode", ["legacy", "tagged", "exchanged"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("spread", [5, 40, 300, 9000])
def test_merge_equals_reference(mode: str, world_size: int, spread: int) -> None:
    """Rows are in any order; rows and outputs are strided. Flags and counters end like the reference's."""
    generator = torch.Generator("cuda").manual_seed(spread + world_size)
    hpr, capacity, tokens = NUM_HEADS // world_size, 33, 29
    rows = random_rows(world_size, capacity, generator, spread=spread)
    valid = torch.randint(0, spread + 2, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
    valid[:3] = torch.tensor([0, 1, 20000], dtype=torch.int32)
    results = []
    for backend in ("cake", "torch"):
        expected_generations = None
        if mode == "tagged":
            expected_generations = torch.full((hpr, capacity), -1, dtype=torch.int32, device="cuda")
            recv = rows[..., :TAGGED_WORDS].long() & 0xFFFFFFFF  # generation 0, the one after -1
        else:
            storage = torch.zeros(world_size, hpr, capacity, ROW_WORDS + 2, dtype=torch.int32, device="cuda")
            recv = storage[..., :ROW_WORDS]
            recv.copy_(rows)
        output = torch.full((tokens, hpr + 1, TOP_K + 5), -777, dtype=torch.int32, device="cuda")
        msa_ops.msa_icp_merge_candidates(
            recv,
            valid,
            output[:, :hpr, 1 : TOP_K + 1],
            torch.zeros(1, dtype=torch.int32, device="cuda"),
            init_blocks=3,
            local_blocks=2,
            expected_generations=expected_generations,
            prefill=mode == "exchanged",
            backend=backend,
        )
        results.append((output, recv.clone(), expected_generations))
    assert_equal(results[0][0], results[1][0], "output")
    assert_equal(results[0][1], results[1][1], "receive rows")
    if mode == "tagged":
        assert_equal(results[0][2], results[1][2], "counters")


@pytest.mark.parametrize("columns", [300, 5000])
@pytest.mark.parametrize("late", ["scores", "num_valid_pages"])
def test_a_dependent_publisher_waits_for_its_inputs(columns: int, late: str) -> None:
    """The publisher starts while the preceding kernel still runs, which writes the scores or the counts at its end."""
    tokens, world_size = 5, 4
    generator = torch.Generator("cuda").manual_seed(columns)
    fresh = {
        "scores": torch.randn(tokens, NUM_HEADS, columns, generator=generator, device="cuda"),
        "num_valid_pages": torch.randint(1, columns, (tokens,), generator=generator, device="cuda", dtype=torch.int32),
    }
    given = {name: tensor.clone() for name, tensor in fresh.items()}
    rows = []
    for enable_pdl in (False, True) if SMALL else (False, *[True] * 10):
        given[late].copy_(fresh[late].flip(0))
        recv = torch.zeros(world_size, 3, world_size, 1, tokens, TAGGED_WORDS, dtype=torch.int64, device="cuda")
        bases = torch.tensor([owner.data_ptr() for owner in recv], dtype=torch.int64, device="cuda")
        generations = torch.zeros(3, NUM_HEADS, tokens, dtype=torch.int32, device="cuda")
        errors = torch.zeros(1, dtype=torch.int32, device="cuda")
        write_late(given[late], fresh[late])
        msa_ops.msa_icp_topk_select_publish(
            given["scores"],
            given["num_valid_pages"],
            bases,
            errors,
            slot=1,
            rank=2,
            world_size=world_size,
            heads_per_rank=1,
            capacity=tokens,
            force_begin_blocks=1,
            force_end_blocks=1,
            enable_pdl=enable_pdl,
            generations=generations,
        )
        rows.append(recv)
    for found in rows[1:]:
        assert_equal(found, rows[0], f"rows published after late {late}")
