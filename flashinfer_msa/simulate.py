# SPDX-License-Identifier: Apache-2.0
"""Random ICP decode problems, and the answer by brute force over keys that were never sharded.

The demo, the tests and the benchmarks share this module. Its answers share no code with the kernels or the torch
reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from flashinfer_msa.indexer import MSAIcpIndexerPlan, prepare_msa_icp_indexer
from flashinfer_msa.layout import BLOCK_TOKENS, HEAD_DIM, NUM_HEADS, TOP_K, Layout

UNUSED_PAGE = 2**30
"""Block-table entry of a page that no key lives in: an address made from it faults."""
NEAR_TIE = 1e-5
"""Scores closer than this part of ``sum |q| |k|`` may change places under FP32 accumulation."""
_PAGES_PER_CHUNK = 512
_E4M3_NAN = (0x7F, 0xFF)
_E4M3_SPECIAL = (0x7E, 0xFE, 0x80)
"""Bits of 448, -448 and -0.0."""


def group_plans(layout: Layout, devices: Sequence[torch.device | str], **limits: Any) -> list[MSAIcpIndexerPlan]:
    """Indexers of every rank of a group, rank ``r`` on device ``r % len(devices)``, warmed up.

    ``limits`` are the arguments of ``prepare_msa_icp_indexer`` that the layout does not settle.
    """
    plans = [
        prepare_msa_icp_indexer(
            world_size=layout.world_size,
            rank=rank,
            num_index_heads=NUM_HEADS,
            page_size=layout.page_size,
            device=devices[rank % len(devices)],
            **limits,
        )
        for rank in range(layout.world_size)
    ]
    for plan in plans:
        plan.warmup()
    return plans


@dataclass(frozen=True)
class DecodeProblem:
    """One decode step of a batch, before its index keys are cut over the ranks.

    ``pages`` e4m3 ``[num_pages, page_size, 128]`` in key order, ``block_table`` int32 ``[B, columns]``, ``seq_lens``
    int32 ``[B]``, ``index_q`` e4m3 ``[B * decode_query_len, 4, 128]``. ``page_pitch_extra`` bytes lie between the local
    pages of a shard. A shorter ``seq_lens`` (``dataclasses.replace``) is an earlier step over the same cache.
    """

    layout: Layout
    pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    index_q: torch.Tensor
    decode_query_len: int
    page_pitch_extra: int = 0

    @classmethod
    def random(
        cls,
        layout: Layout,
        *,
        seq_lens: Sequence[int],
        decode_query_len: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        page_pitch_extra: int = 0,
        block_table_extra_columns: int = 0,
        special: bool = False,
    ) -> DecodeProblem:
        """Draw normal keys and queries; ``special`` sows NaN, +-448 and -0.0 among them.

        Pages are spread over the cache in random order. ``page_pitch_extra`` is in bytes, a multiple of 16.
        """
        if page_pitch_extra < 0 or page_pitch_extra % 16:
            raise ValueError(f"page_pitch_extra must be a non-negative multiple of 16, was {page_pitch_extra}")
        generator = torch.Generator(device).manual_seed(seed)
        counts = [math.ceil(length / layout.page_size) for length in seq_lens]
        num_pages = max(sum(counts), 1)
        order = torch.randperm(num_pages, generator=generator, device=device, dtype=torch.int32)
        columns = max(max(counts, default=0) + block_table_extra_columns, 1)
        block_table = torch.full((len(counts), columns), UNUSED_PAGE, dtype=torch.int32, device=device)
        start = 0
        for request, count in enumerate(counts):
            block_table[request, :count] = order[start : start + count]
            start += count
        pages = random_e4m3((num_pages, layout.page_size, HEAD_DIM), generator, special=special)
        return cls(
            layout=layout,
            pages=pages,
            block_table=block_table,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            index_q=random_e4m3((len(counts) * decode_query_len, NUM_HEADS, HEAD_DIM), generator, special=special),
            decode_query_len=decode_query_len,
            page_pitch_extra=page_pitch_extra,
        )

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        """Keys that each token sees, int32 ``[T]``."""
        later = torch.arange(self.decode_query_len - 1, -1, -1, dtype=torch.int32, device=self.seq_lens.device)
        return (self.seq_lens[:, None] - later).clamp(min=0).flatten()

    @cached_property
    def num_valid_pages(self) -> torch.Tensor:
        """B128 blocks with a key that the token sees, int32 ``[T]``; 0 where there is none."""
        return (self.visible_keys + BLOCK_TOKENS - 1) // BLOCK_TOKENS

    def shard(self, rank: int) -> torch.Tensor:
        """Return the index keys of ``rank``, e4m3 ``[num_pages, R, 128]`` with the problem's page pitch."""
        layout = self.layout
        pitch = layout.page_bytes + self.page_pitch_extra
        storage = torch.empty(len(self.pages) * pitch, dtype=torch.uint8, device=self.pages.device)
        # NaN in the gaps: a kernel that reads them loses keys.
        storage.fill_(_E4M3_NAN[0])
        shape = (len(self.pages), layout.rows, HEAD_DIM)
        local = storage.as_strided(shape, (pitch, HEAD_DIM, 1))
        keys = [layout.global_key(rank, 0, row) for row in range(layout.rows)]
        local.copy_(self.pages.view(torch.uint8)[:, keys])
        return local.view(self.pages.dtype)


def random_e4m3(shape: Sequence[int], generator: torch.Generator, *, special: bool = False) -> torch.Tensor:
    """Draw normal e4m3 values; ``special`` sets one in 64 to +-448 or -0.0, and puts a NaN in one vector in 32."""
    values = torch.empty(*shape, dtype=torch.float8_e4m3fn, device=generator.device)
    for part in values.split(1 << 10):
        part.copy_(torch.randn(part.shape, generator=generator, device=generator.device))
        if special:
            _sow(part.view(torch.uint8), _E4M3_SPECIAL, 1 / 64, generator)
            _sow(part.view(torch.uint8)[..., :1], _E4M3_NAN, 1 / 32, generator)
    return values


def _sow(target: torch.Tensor, values: Sequence[int], probability: float, generator: torch.Generator) -> None:
    """Replace bytes of ``target`` by a random choice of ``values``."""
    hit = torch.rand(target.shape, generator=generator, device=target.device) < probability
    choice = torch.randint(len(values), target.shape, generator=generator, device=target.device)
    table = torch.tensor(values, dtype=torch.uint8, device=target.device)
    target.copy_(torch.where(hit, table[choice], target))


class Expected(NamedTuple):
    """The global Top16 by brute force.

    ``ids`` int32 ``[T, 4, 16]`` ascending with a tail of -1. ``scores`` float64 ``[T, 4, blocks]``, -inf where nothing
    is visible. ``bounds`` float64 likewise: the largest ``sum |q| |k|`` of a block's visible keys. ``forced`` bool
    ``[T, 4, blocks]``: chosen whatever the score.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    bounds: torch.Tensor
    forced: torch.Tensor


def block_scores(problem: DecodeProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Score every key in float64: ``scores`` and ``bounds`` of :class:`Expected`."""
    layout, query_len = problem.layout, problem.decode_query_len
    seq_lens, visible = problem.seq_lens.tolist(), problem.visible_keys.tolist()
    tokens = len(visible)
    blocks = problem.block_table.shape[1] * layout.page_size // BLOCK_TOKENS
    device = problem.pages.device
    scores = torch.full((tokens, NUM_HEADS, blocks), -torch.inf, dtype=torch.float64, device=device)
    bounds = torch.zeros_like(scores)
    raw_pages = problem.pages.view(torch.uint8)
    for request, seq_len in enumerate(seq_lens):
        used = problem.block_table[request, : math.ceil(seq_len / layout.page_size)].long()
        for column in range(0, len(used), _PAGES_PER_CHUNK):
            key = raw_pages[used[column : column + _PAGES_PER_CHUNK]].view(problem.pages.dtype).flatten(0, 1).double()
            first_key = column * layout.page_size
            span = slice(first_key // BLOCK_TOKENS, (first_key + len(key)) // BLOCK_TOKENS)
            for token in range(request * query_len, (request + 1) * query_len):
                query, seen = problem.index_q[token].double(), max(visible[token] - first_key, 0)
                scores[token, :, span] = _block_max(query @ key.T, seen, -torch.inf)
                bounds[token, :, span] = _block_max(query.abs() @ key.abs().T, seen, 0.0)

    return scores, bounds


def brute_force_top16(
    problem: DecodeProblem,
    *,
    init_blocks: int,
    local_blocks: int,
    scored: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Expected:
    """Take the 16 best of all blocks: forced first, then by score, ties to the lower id.

    ``scored`` is ``block_scores(problem)``, for callers that select more than once.
    """
    scores, bounds = block_scores(problem) if scored is None else scored
    valid = problem.num_valid_pages.tolist()
    # A score is an FP32 number, so blocks tie that round to the same one.
    rounded = scores.float().double().cpu().numpy()
    ids = np.full((len(valid), NUM_HEADS, TOP_K), -1, dtype=np.int32)
    forced = np.zeros(rounded.shape, dtype=bool)
    for token, count in enumerate(valid):
        block = np.arange(count)
        forced[token, :, :count] = (block < init_blocks) | (block >= count - local_blocks)
        for head in range(NUM_HEADS):
            # The last key of lexsort is the most significant.
            order = np.lexsort((block, -rounded[token, head, :count], ~forced[token, head, :count]))
            chosen = np.sort(order[:TOP_K])
            ids[token, head, : len(chosen)] = chosen
    return Expected(torch.from_numpy(ids).to(scores.device), scores, bounds, torch.from_numpy(forced).to(scores.device))


def _block_max(dots: torch.Tensor, seen: int, empty: float) -> torch.Tensor:
    """Largest number of each B128 block ``[4, blocks]`` among the first ``seen`` of ``dots`` ``[4, keys]``."""
    dots[dots.isnan()] = empty
    dots[:, seen:] = empty
    return dots.view(NUM_HEADS, -1, BLOCK_TOKENS).amax(2)


class Comparison(NamedTuple):
    """Counts of (token, head) rows: all of them, equal ones, near ties and wrong ones."""

    rows: int = 0
    equal: int = 0
    near_ties: int = 0
    wrong: int = 0

    def plus(self, other: Comparison) -> Comparison:
        """Return the counts of both together."""
        return Comparison(*(a + b for a, b in zip(self, other, strict=True)))


def compare(output_ids: torch.Tensor, expected: Expected, *, near_tie: float = NEAR_TIE) -> Comparison:
    """Compare selected ids int32 ``[T, 4, 16]`` with the brute force.

    A row that differs is a near tie when it is well formed and every block it took instead of an expected one scores
    within ``near_tie`` of it, relative to the largest bound of the blocks swapped. Forced blocks never tie.
    """
    output, ids = output_ids.cpu(), expected.ids.cpu()
    differs = (output != ids).any(-1).nonzero().tolist()
    near = 0
    for token, head in differs:
        got, want = output[token, head].tolist(), ids[token, head].tolist()
        count = sum(x >= 0 for x in want)
        if got[count:] != want[count:] or got[:count] != sorted(set(got[:count])):
            continue
        gained, lost = sorted(set(got) - set(want)), sorted(set(want) - set(got))
        blocks = torch.tensor(gained + lost, device=expected.scores.device)
        if blocks.min() < 0 or blocks.max() >= expected.scores.shape[-1] or expected.forced[token, head, blocks].any():
            continue
        score, bound = expected.scores[token, head, blocks], expected.bounds[token, head, blocks].max()
        # A block whose score is -inf differs by inf or NaN from any other: it never ties.
        near += bool(score.max() - score.min() < near_tie * bound)
    wrong = len(differs) - near
    rows = output.shape[0] * output.shape[1]
    return Comparison(rows, rows - len(differs), near, wrong)
