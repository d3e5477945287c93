# SPDX-License-Identifier: Apache-2.0
"""Random ICP problems, and their answers by brute force over unsharded keys.

The demo, the tests and the benchmarks use this module. The brute force shares no code with the kernels or the torch
reference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flashinfer_msa.indexer import MSAIcpIndexerPlan, prepare_msa_icp_indexer
from flashinfer_msa.layout import BLOCK_TOKENS, HEAD_DIM, NUM_HEADS, TOP_K, Layout

UNUSED_PAGE = 2**30
"""Block-table entry of an unused page. Reading at an address computed from it faults."""
NEAR_TIE = 1e-5
"""Scores that differ by less than this part of ``sum |q| |k|`` may swap under FP32 accumulation."""
FP32_WORST = 2.0**-16
"""The largest error of FP32 accumulation, as a part of ``sum |q| |k|``. Each of 128 exact products is added with an
error of at most 2**-23 of a partial sum, because tensor cores truncate."""
TENSOR_CORE_ERROR = 4e-4
"""Error of sm_90a's e4m3 products, as a part of ``sum |q| |k|``. They accumulate in fewer bits than FP32."""
TENSOR_CORE_WORST = 4 * 33 * 2.0**-13
"""The largest possible such error. Each of 4 steps adds 32 products to the sum and drops bits that are more than 13
below the largest term's."""
_DOTS_PER_CHUNK = 1 << 25
"""Dot products that are computed at once: 256 MiB of float64."""
_E4M3_NAN = (0x7F, 0xFF)
_E4M3_SPECIAL = (0x7E, 0xFE, 0x80)
"""Bits of 448, -448 and -0.0."""


def group_indexers(layout: Layout, devices: Sequence[torch.device | str], **limits: Any) -> list[MSAIcpIndexerPlan]:
    """Return the warmed-up indexers of every rank of a group, rank ``r`` on device ``r % len(devices)``.

    ``limits`` are the arguments of ``prepare_msa_icp_indexer`` that the layout does not determine.
    """
    indexers = [
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
    for indexer in indexers:
        indexer.warmup()
    return indexers


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Query tokens of some requests, and their index keys before sharding.

    ``pages`` is e4m3 ``[num_pages, page_size, 128]`` in key order, ``block_table`` int32 ``[B, columns]``, ``seq_lens``
    int32 ``[B]`` the number of keys of each request, ``index_q`` e4m3 ``[T, 4, 128]``. Gaps of
    ``page_pitch_extra`` bytes are between the local pages of a shard.
    """

    layout: Layout
    pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    index_q: torch.Tensor
    page_pitch_extra: int = 0

    @property
    def rows(self) -> list[slice]:
        """Rows of ``index_q`` that are each request's tokens."""
        raise NotImplementedError

    @property
    def visible_keys(self) -> torch.Tensor:
        """Keys that each token sees, int32 ``[T]``."""
        raise NotImplementedError

    @cached_property
    def num_valid_pages(self) -> torch.Tensor:
        """Number of B128 blocks with a key that the token sees, int32 ``[T]``."""
        return (self.visible_keys + BLOCK_TOKENS - 1) // BLOCK_TOKENS

    def shard(self, rank: int) -> torch.Tensor:
        """Return the index keys of ``rank``, e4m3 ``[num_pages, R, 128]`` with the problem's page pitch."""
        layout = self.layout
        pitch = layout.page_bytes + self.page_pitch_extra
        storage = torch.empty(len(self.pages) * pitch, dtype=torch.uint8, device=self.pages.device)
        # The gaps hold NaN, so a kernel that reads them ignores keys.
        storage.fill_(_E4M3_NAN[0])
        shape = (len(self.pages), layout.rows, HEAD_DIM)
        local = storage.as_strided(shape, (pitch, HEAD_DIM, 1))
        keys = [layout.global_key(rank, 0, row) for row in range(layout.rows)]
        local.copy_(self.pages.view(torch.uint8)[:, keys])
        return local.view(self.pages.dtype)


def _random_cache(
    layout: Layout, lengths: Sequence[int], longest: int, extra_columns: int, special: bool, generator: torch.Generator
) -> dict[str, Any]:
    """Draw ``pages`` for requests of ``lengths`` keys, in random order in the cache, and their ``block_table``.

    The table has columns for ``longest`` keys, and ``extra_columns`` more.
    """
    counts = [math.ceil(length / layout.page_size) for length in lengths]
    num_pages = max(sum(counts), 1)
    device = generator.device
    order = torch.randperm(num_pages, generator=generator, device=device, dtype=torch.int32)
    columns = max(math.ceil(longest / layout.page_size) + extra_columns, 1)
    block_table = torch.full((len(counts), columns), UNUSED_PAGE, dtype=torch.int32, device=device)
    start = 0
    for request, count in enumerate(counts):
        block_table[request, :count] = order[start : start + count]
        start += count
    pages = random_e4m3((num_pages, layout.page_size, HEAD_DIM), generator, special=special)
    return {"layout": layout, "pages": pages, "block_table": block_table}


def _require_pitch(page_pitch_extra: int) -> None:
    if page_pitch_extra < 0 or page_pitch_extra % 16:
        raise ValueError(f"page_pitch_extra must be a non-negative multiple of 16, was {page_pitch_extra}")


@dataclass(frozen=True, kw_only=True)
class DecodeProblem(Problem):
    """One decode step of a batch: the last ``decode_query_len`` tokens of each request.

    ``dataclasses.replace`` with a shorter ``seq_lens`` gives an earlier step with the same cache.
    """

    decode_query_len: int

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
        """Draw normal keys and queries. ``special`` puts NaN, +-448 and -0.0 among them.

        ``page_pitch_extra`` is in bytes and a multiple of 16.
        """
        _require_pitch(page_pitch_extra)
        generator = torch.Generator(device).manual_seed(seed)
        return cls(
            **_random_cache(layout, seq_lens, max(seq_lens, default=0), block_table_extra_columns, special, generator),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            index_q=random_e4m3((len(seq_lens) * decode_query_len, NUM_HEADS, HEAD_DIM), generator, special=special),
            decode_query_len=decode_query_len,
            page_pitch_extra=page_pitch_extra,
        )

    @property
    def rows(self) -> list[slice]:
        """Rows of ``index_q`` that are each request's tokens."""
        length = self.decode_query_len
        return [slice(request * length, (request + 1) * length) for request in range(len(self.seq_lens))]

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        """Keys that each token sees, int32 ``[T]``."""
        later = torch.arange(self.decode_query_len - 1, -1, -1, dtype=torch.int32, device=self.seq_lens.device)
        return (self.seq_lens[:, None] - later).clamp(min=0).flatten()


@dataclass(frozen=True, kw_only=True)
class PrefillProblem(Problem):
    """A prefill window: ``query_lens[b]`` tokens of each segment, from position ``positions[b]`` on.

    If ``index_q`` has more rows than the segments have tokens, the last ones are padding.
    """

    query_lens: tuple[int, ...]
    positions: tuple[int, ...]

    @classmethod
    def random(
        cls,
        layout: Layout,
        *,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        positions: Sequence[int] | None = None,
        padding: int = 0,
        device: torch.device | str = "cpu",
        seed: int = 0,
        page_pitch_extra: int = 0,
        block_table_extra_columns: int = 0,
        special: bool = False,
    ) -> PrefillProblem:
        """Draw normal keys and queries. ``special`` puts NaN, +-448 and -0.0 among them.

        By default a segment's tokens are the last of its keys. ``padding`` rows follow the segments' rows in the query.
        Only pages with a key that a token sees exist.
        """
        _require_pitch(page_pitch_extra)
        if positions is None:
            positions = [kv - q for q, kv in zip(query_lens, kv_lens, strict=True)]
        generator = torch.Generator(device).manual_seed(seed)
        seen = [min(p + q, kv) if q else 0 for p, q, kv in zip(positions, query_lens, kv_lens, strict=True)]
        return cls(
            **_random_cache(layout, seen, max(kv_lens, default=0), block_table_extra_columns, special, generator),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            index_q=random_e4m3((sum(query_lens) + padding, NUM_HEADS, HEAD_DIM), generator, special=special),
            page_pitch_extra=page_pitch_extra,
            query_lens=tuple(query_lens),
            positions=tuple(positions),
        )

    @property
    def rows(self) -> list[slice]:
        """Rows of ``index_q`` that are each segment's tokens."""
        ends = list(itertools.accumulate(self.query_lens, initial=0))
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        """Number of keys that each token sees, int32 ``[T]``; 0 for padding."""
        seen = torch.zeros(len(self.index_q), dtype=torch.int32, device=self.index_q.device)
        for rows, position, kv_len in zip(self.rows, self.positions, self.seq_lens.tolist(), strict=True):
            last = torch.arange(position + 1, position + 1 + rows.stop - rows.start, device=seen.device)
            seen[rows] = last.clamp(min=0, max=kv_len).int()
        return seen

    @cached_property
    def segments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The int32 inputs of a plan: query lengths, key lengths, offsets of both, positions."""
        device = self.index_q.device
        lens = torch.tensor(self.query_lens, dtype=torch.int32, device=device)
        zero = lens.new_zeros(1)
        query_offsets, key_offsets = (torch.cat([zero, x.cumsum(0, dtype=torch.int32)]) for x in (lens, self.seq_lens))
        positions = torch.tensor(self.positions, dtype=torch.int32, device=device)
        return lens, self.seq_lens, query_offsets, key_offsets, positions

    @property
    def bounds(self) -> dict[str, Any]:
        """The tightest ``total_q``, ``max_query_len`` and ``max_seq_len`` of a plan."""
        return {
            "total_q": max(len(self.index_q), 1),
            "max_query_len": max([1, *self.query_lens]),
            "max_seq_len": max([1, *self.seq_lens.tolist()]),
        }

    def windows(self, tokens: int) -> list[PrefillProblem]:
        """Cut the step into windows of at most ``tokens`` query tokens. A segment may span windows."""
        total = sum(self.query_lens)
        return [self._window(begin, min(begin + tokens, total)) for begin in range(0, total, tokens)]

    def _window(self, begin: int, end: int) -> PrefillProblem:
        parts = [
            (segment, max(rows.start, begin), min(rows.stop, end))
            for segment, rows in enumerate(self.rows)
            if rows.start < end and rows.stop > begin
        ]
        chosen = [segment for segment, _, _ in parts]
        return replace(
            self,
            block_table=self.block_table[chosen],
            seq_lens=self.seq_lens[chosen],
            index_q=self.index_q[begin:end],
            query_lens=tuple(last - first for _, first, last in parts),
            positions=tuple(self.positions[s] + first - self.rows[s].start for s, first, _ in parts),
        )


def share_cache(decode: DecodeProblem, prefill: PrefillProblem) -> tuple[DecodeProblem, PrefillProblem]:
    """Return both problems with one cache that has the pages of both."""
    pages = torch.cat([decode.pages.view(torch.uint8), prefill.pages.view(torch.uint8)]).view(decode.pages.dtype)
    used = prefill.block_table != UNUSED_PAGE
    block_table = torch.where(used, prefill.block_table + len(decode.pages), prefill.block_table)
    return replace(decode, pages=pages), replace(prefill, pages=pages, block_table=block_table)


def run_local_prefill(
    indexer: MSAIcpIndexerPlan,
    problem: PrefillProblem,
    index_k: torch.Tensor,
    scratch: torch.Tensor | None,
    carrier: torch.Tensor,
    tokens: int,
    pool: torch.Tensor | None = None,
) -> None:
    """Run one rank's local part of a prefill layer, in windows of ``tokens``, into its carrier.

    With a ``pool`` the fused chain runs, which needs no ``scratch``. All windows are planned before any runs, because
    in serving every layer uses all plans.
    """
    windows = problem.windows(tokens)
    plans = [indexer.prefill_window_plan(i, *window.segments, **window.bounds) for i, window in enumerate(windows)]
    for i, (window, window_plan) in enumerate(zip(windows, plans, strict=True)):
        rows = carrier[:, i * tokens : i * tokens + len(window.index_q)]
        indexer.prefill_local(
            window.index_q, index_k, window.block_table, window_plan, scratch, window.num_valid_pages, rows, pool=pool
        )


def exchange(carriers: Sequence[torch.Tensor], indexer: MSAIcpIndexerPlan) -> torch.Tensor:
    """Return what an all-to-all of the ranks' carriers, int32 ``[4, T, 33]``, gives the rank of ``indexer``."""
    first = indexer.rank * indexer.heads_per_rank
    return torch.stack([carrier[first : first + indexer.heads_per_rank].to(indexer.device) for carrier in carriers])


def random_e4m3(shape: Sequence[int], generator: torch.Generator, *, special: bool = False) -> torch.Tensor:
    """Draw normal e4m3 values. ``special`` sets one in 64 to +-448 or -0.0, and a NaN in one vector of 32."""
    values = torch.empty(*shape, dtype=torch.float8_e4m3fn, device=generator.device)
    for part in values.split(1 << 10):
        part.copy_(torch.randn(part.shape, generator=generator, device=generator.device))
        if special:
            _scatter(part.view(torch.uint8), _E4M3_SPECIAL, 1 / 64, generator)
            _scatter(part.view(torch.uint8)[..., :1], _E4M3_NAN, 1 / 32, generator)
    return values


def _scatter(target: torch.Tensor, values: Sequence[int], probability: float, generator: torch.Generator) -> None:
    """Replace bytes of ``target`` by a random choice of ``values``."""
    hit = torch.rand(target.shape, generator=generator, device=target.device) < probability
    choice = torch.randint(len(values), target.shape, generator=generator, device=target.device)
    table = torch.tensor(values, dtype=torch.uint8, device=target.device)
    target.copy_(torch.where(hit, table[choice], target))


class Expected(NamedTuple):
    """The global Top16 by brute force.

    ``ids`` is int32 ``[T, 4, 16]``, ascending with a tail of -1. For a token without valid blocks, a decode row is all
    -1 and a prefill row is a 0 and the tail. ``scores`` is float64 ``[T, 4, blocks]``, -inf for a block without visible
    keys. ``bounds``, of the same type, is the largest ``sum |q| |k|`` of a block's visible keys. ``forced`` is bool
    ``[T, 4, blocks]``: the blocks that are selected whatever their score.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    bounds: torch.Tensor
    forced: torch.Tensor


def block_scores(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Score every key in float64; return ``scores`` and ``bounds`` of :class:`Expected`."""
    layout = problem.layout
    seq_lens, visible = problem.seq_lens.tolist(), problem.visible_keys
    tokens = len(visible)
    blocks = problem.block_table.shape[1] * layout.page_size // BLOCK_TOKENS
    device = problem.pages.device
    scores = torch.full((tokens, NUM_HEADS, blocks), -torch.inf, dtype=torch.float64, device=device)
    bounds = torch.zeros_like(scores)
    raw_pages = problem.pages.view(torch.uint8)
    for request, rows in enumerate(problem.rows):
        query = problem.index_q[rows].double()
        if not len(query):
            continue
        seen = min(seq_lens[request], int(visible[rows].max()))
        used = problem.block_table[request, : math.ceil(seen / layout.page_size)].long()
        pages = max(1, _DOTS_PER_CHUNK // (len(query) * NUM_HEADS * layout.page_size))
        for column in range(0, len(used), pages):
            key = raw_pages[used[column : column + pages]].view(problem.pages.dtype).flatten(0, 1).double()
            first_key = column * layout.page_size
            span = slice(first_key // BLOCK_TOKENS, (first_key + len(key)) // BLOCK_TOKENS)
            unseen = torch.arange(first_key, first_key + len(key), device=device) >= visible[rows, None]
            scores[rows, :, span] = _block_max(query @ key.T, unseen, -torch.inf)
            bounds[rows, :, span] = _block_max(query.abs() @ key.abs().T, unseen, 0.0)

    return scores, bounds


def brute_force_top16(
    problem: Problem,
    *,
    init_blocks: int,
    local_blocks: int,
    scored: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Expected:
    """Select the 16 best of all blocks: forced ones first, then by score, with ties to the lower id.

    A caller that selects several times can pass ``block_scores(problem)`` as ``scored``.
    """
    scores, bounds = block_scores(problem) if scored is None else scored
    valid = problem.num_valid_pages[:, None, None]
    block = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    exists = (block < valid).expand(scores.shape)
    forced = exists & ((block < init_blocks) | (block >= valid - local_blocks))
    # Scores are FP32 numbers, so blocks tie that round to the same one. Stable sorts keep the lower id first.
    order = torch.argsort(scores.float(), dim=-1, descending=True, stable=True)
    for first in (forced, exists):
        order = order.gather(-1, torch.argsort(~first.gather(-1, order), dim=-1, stable=True))
    best = order[..., :TOP_K]
    last = scores.shape[-1]
    chosen = best.masked_fill(~exists.gather(-1, best), last).sort(dim=-1).values
    ids = chosen.new_full((*scores.shape[:2], TOP_K), -1, dtype=torch.int32)
    ids[..., : chosen.shape[-1]] = chosen.masked_fill(chosen == last, -1).int()
    if isinstance(problem, PrefillProblem):
        ids[problem.num_valid_pages == 0, :, 0] = 0
    return Expected(ids, scores, bounds, forced)


def _block_max(dots: torch.Tensor, unseen: torch.Tensor, empty: float) -> torch.Tensor:
    """Return the maximum of each B128 block of ``dots`` ``[tokens, 4, keys]``, without NaN and unseen keys."""
    dots.masked_fill_(dots.isnan() | unseen[:, None], empty)
    return dots.unflatten(-1, (-1, BLOCK_TOKENS)).amax(-1)


class Comparison(NamedTuple):
    """Counts of (token, head) rows: all rows, equal rows, near ties and wrong rows."""

    rows: int = 0
    equal: int = 0
    near_ties: int = 0
    wrong: int = 0

    def plus(self, other: Comparison) -> Comparison:
        """Return the sums of both comparisons."""
        return Comparison(*(a + b for a, b in zip(self, other, strict=True)))


def compare(output_ids: torch.Tensor, expected: Expected, *, near_tie: float = NEAR_TIE) -> Comparison:
    """Compare selected ids int32 ``[T, 4, 16]`` with the brute force.

    A row that differs is a near tie if it is well formed and the scores of the swapped blocks differ by less than
    ``near_tie`` times the largest of their bounds. Forced blocks never tie.
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
        # A score of -inf differs from any other by inf or NaN, so it never ties.
        near += bool(score.max() - score.min() < near_tie * bound)
    wrong = len(differs) - near
    rows = output.shape[0] * output.shape[1]
    return Comparison(rows, rows - len(differs), near, wrong)
