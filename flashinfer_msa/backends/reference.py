# SPDX-License-Identifier: Apache-2.0
"""The specification as code: every operation in plain torch, on any device.

The code is simple rather than fast. Functions may allocate and synchronize. They expect arguments that ``msa_ops`` has
checked. ``T`` is the number of query tokens, ``K`` the number of score columns, and ``R`` the key rows of a local page.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from flashinfer_msa.layout import (
    BLOCK_TOKENS,
    HEAD_DIM,
    MAX_BLOCKS,
    NUM_HEADS,
    NUM_SLOT_SETS,
    ROW_WORDS,
    TAGGED_WORDS,
    TOP_K,
    Layout,
)
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.runtime import shared
from flashinfer_msa.runtime.fault import Fault

_PAGES_PER_CHUNK = 1024
"""Pages that are scored at once: at most 128 MiB of float64 keys."""
_DOTS_PER_CHUNK = 1 << 26
"""Dot products of a prefill window that are computed at once: at most 512 MiB of float64."""
_FORCED, _CANDIDATE, _DROPPED = 0, 1, 2
"""Classes of a selection. A lower class ranks first, whatever the score."""
_POLL_SECONDS = 50e-6
"""Pause between two polls of memory that another process writes."""


class WaitLimit(NamedTuple):
    """Limit of a wait for another process: ``seconds`` if given, otherwise the number of polls."""

    polls: int
    seconds: float | None = None


_ONE_POLL = WaitLimit(1)


def decode_index_score(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    score_out: torch.Tensor,
    *,
    layout: Layout,
    rank: int,
    decode_query_len: int,
) -> None:
    """Score the local keys of every page column for the last ``decode_query_len`` tokens of each request.

    ``index_q`` e4m3 ``[T, 4, 128]``, ``index_k`` e4m3 ``[pages, R, 128]``, ``block_table`` int32 ``[B, columns]``,
    ``seq_lens`` int32 ``[B]``, ``score_out`` float32 ``[T, 4, K]`` with ``T == B * decode_query_len``. In a request's
    rows, only the columns of the pages that hold its keys, rounded up to a multiple of 4, are written.
    """
    page, columns = layout.page_size, score_out.shape[-1]
    keys_covered = page * min(columns, block_table.shape[1])
    first_row = layout.global_key(rank, 0, 0)
    row_position = first_row + layout.row_stride * torch.arange(layout.rows, device=index_q.device)
    for request, seq_len in enumerate(seq_lens.tolist()):
        length = min(max(seq_len, 0), keys_covered)
        pages = math.ceil(length / page)
        tokens = slice(request * decode_query_len, (request + 1) * decode_query_len)
        out = score_out[tokens, :, : min(columns, math.ceil(pages / 4) * 4)]
        out.fill_(-torch.inf)
        query = index_q[tokens].flatten(0, 1).double()
        query_position = seq_len - decode_query_len + torch.arange(decode_query_len, device=index_q.device)
        for start in range(0, pages, _PAGES_PER_CHUNK):
            stop = min(start + _PAGES_PER_CHUNK, pages)
            # Few backends can index float8, so gather bytes.
            keys = index_k.view(torch.uint8)[block_table[request, start:stop].long()].view(index_k.dtype)
            # Exact: a product has 8 significant bits, and 128 of them span fewer than the 53 of a float64.
            dots = (query @ keys.reshape(-1, HEAD_DIM).double().T).float()
            dots = dots.view(decode_query_len, NUM_HEADS, stop - start, layout.rows)
            key_position = page * torch.arange(start, stop, device=index_q.device)[:, None] + row_position
            # The length needs no check: query positions are below seq_len, and a clamped length limits the pages.
            unseen = key_position > query_position[:, None, None]
            ignored = unseen[:, None] | dots.isnan()
            # Adding zero turns -0.0 into +0.0.
            out[:, :, start:stop] = dots.masked_fill(ignored, -torch.inf).amax(-1) + 0.0


def prefill_index_score(
    q: torch.Tensor,
    k: torch.Tensor,
    block_table: torch.Tensor,
    plan: MSAIcpScorePlan,
    max_score: torch.Tensor,
    *,
    layout: Layout,
    rank: int,
    initialize: bool,
    compact: bool,
) -> None:
    """Score the local keys of every page column, or of every block, for the tokens of a window.

    ``q`` e4m3 ``[T, 4, 128]``, ``k`` e4m3 ``[pages, R, 128]``, ``block_table`` int32 ``[B, columns]``, ``max_score``
    float32 ``[T, 4, K]``. A column is one of ``plan.columns`` blocks, or with ``compact`` a page. In a token's rows,
    the columns are written whose blocks hold a key that the token sees; blocks of other ranks get ``-inf``.
    ``initialize`` writes ``-inf`` everywhere first.
    """
    if initialize:
        max_score.fill_(-torch.inf)
    page, scale, offset = layout.page_size, layout.index_scale, layout.index_offset(rank)
    positions, starts = plan.qo_offset.tolist(), plan.qo_segment_offsets.tolist()
    lens, kv_lens = plan.qo_segment_lens.tolist(), plan.kv_segment_lens.tolist()
    device = q.device
    row_position = layout.global_key(rank, 0, 0) + layout.row_stride * torch.arange(layout.rows, device=device)
    for segment in range(plan.batch):
        first, length = starts[segment], min(lens[segment], plan.total_q - starts[segment])
        seen = positions[segment] + 1 + torch.arange(max(length, 0), device=device)
        seen = seen.clamp(min=0, max=kv_lens[segment])
        blocks = ((seen + BLOCK_TOKENS - 1) // BLOCK_TOKENS).clamp(max=plan.columns)
        pages = -(-max(blocks.tolist(), default=0) // scale)
        out = max_score[first : first + length]
        query = q[first : first + length].flatten(0, 1).double()
        chunk = max(_DOTS_PER_CHUNK // max(len(query) * layout.rows, 1), 1)
        for start in range(0, pages, chunk):
            stop = min(start + chunk, pages)
            # Few backends can index float8, so gather bytes.
            keys = k.view(torch.uint8)[block_table[segment, start:stop].long()].view(k.dtype)
            # Exact: a product has 8 significant bits, and 128 of them span fewer than the 53 of a float64.
            dots = (query @ keys.reshape(-1, HEAD_DIM).double().T).float()
            dots = dots.view(length, NUM_HEADS, stop - start, layout.rows)
            key_position = page * torch.arange(start, stop, device=device)[:, None] + row_position
            unseen = key_position >= seen[:, None, None]
            ignored = unseen[:, None] | dots.isnan()
            # Adding zero turns -0.0 into +0.0.
            best = dots.masked_fill_(ignored, -torch.inf).amax(-1) + 0.0
            block = torch.arange(start, stop, device=device) * scale + offset
            if not compact and scale > 1:
                spread = best.new_full((length, NUM_HEADS, scale * (stop - start)), -torch.inf)
                spread[..., offset::scale] = best
                best, block = spread, torch.arange(start * scale, stop * scale, device=device)
            columns = slice(start if compact else start * scale, None)
            target = out[..., columns][..., : best.shape[-1]]
            best, block = best[..., : target.shape[-1]], block[: target.shape[-1]]
            target.copy_(torch.where((block < blocks[:, None])[:, None], best, target))


def select_prefill(
    scores: torch.Tensor,
    num_valid_pages: torch.Tensor,
    carrier: torch.Tensor,
    *,
    force_begin_blocks: int,
    force_end_blocks: int,
    index_scale: int,
    index_offset: int,
) -> None:
    """Write the rows of ``select_rows`` to the carrier, int32 ``[4, T, 33]``. The last word, the ready flag, is 1."""
    words = select_rows(
        scores,
        num_valid_pages,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        index_scale=index_scale,
        index_offset=index_offset,
    )
    carrier[..., :-1].copy_(words.transpose(0, 1))
    carrier[..., -1] = 1


def prefill_score_select(
    q: torch.Tensor,
    k: torch.Tensor,
    block_table: torch.Tensor,
    plan: MSAIcpScorePlan,
    num_valid_pages: torch.Tensor,
    carrier: torch.Tensor,
    *,
    layout: Layout,
    rank: int,
    force_begin_blocks: int,
    force_end_blocks: int,
) -> None:
    """Score as ``prefill_index_score`` and select as ``select_prefill``, without score rows of the caller.

    Candidates are the columns of ``plan.columns`` blocks, at most 8192. Columns without a visible key score ``-inf``.
    """
    scale, offset = layout.index_scale, layout.index_offset(rank)
    columns = math.ceil((min(plan.columns, MAX_BLOCKS) - offset) / scale)
    scores = torch.empty(plan.total_q, NUM_HEADS, columns, dtype=torch.float32, device=q.device)
    prefill_index_score(q, k, block_table, plan, scores, layout=layout, rank=rank, initialize=True, compact=scale > 1)
    select_prefill(
        scores,
        num_valid_pages,
        carrier,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        index_scale=scale,
        index_offset=offset,
    )


def select_rows(
    scores: torch.Tensor,
    num_valid_pages: torch.Tensor,
    *,
    force_begin_blocks: int,
    force_end_blocks: int,
    index_scale: int,
    index_offset: int,
) -> torch.Tensor:
    """Return the 16 best blocks of each row of ``scores`` float32 ``[T, 4, K]`` as int32 ``[T, 4, 32]``.

    Words 0..15 are raw score bits and words 16..31 are global block ids, ascending by id. Unused entries are
    ``(-inf, -1)`` at the end. ``num_valid_pages`` int32 ``[T]`` counts the global blocks that each token sees.
    """
    ids = index_offset + index_scale * torch.arange(scores.shape[-1], device=scores.device)
    valid = num_valid_pages.long()[:, None, None]
    classes = _classes(ids, valid, force_begin_blocks, force_end_blocks).expand(scores.shape)
    best = _ranking(_sort_key(scores), classes)[..., :TOP_K]
    chosen = classes.gather(-1, best) != _DROPPED
    # Columns ascend with ids, so sorting the chosen columns sorts the row and moves unused entries to the end.
    best, order = best.masked_fill(~chosen, scores.shape[-1]).sort(dim=-1)
    chosen = chosen.gather(-1, order)
    best = best.masked_fill(~chosen, 0)
    rows = torch.empty(*scores.shape[:-1], 2, TOP_K, dtype=torch.int32, device=scores.device)
    rows[..., 0, :] = torch.tensor(-torch.inf, dtype=torch.float32, device=rows.device).view(torch.int32)
    rows[..., 1, :] = -1
    count = best.shape[-1]
    rows[..., 0, :count] = torch.where(chosen, scores.view(torch.int32).gather(-1, best), rows[..., 0, :count])
    rows[..., 1, :count] = torch.where(chosen, ids[best].int(), rows[..., 1, :count])
    return rows.flatten(-2)


def topk_select_publish(
    scores: torch.Tensor,
    num_valid_pages: torch.Tensor,
    recv_bases: torch.Tensor,
    errors: torch.Tensor,
    *,
    slot: int,
    rank: int,
    world_size: int,
    heads_per_rank: int,
    capacity: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    generations: torch.Tensor | None,
    index_scale: int,
    index_offset: int,
    limit: WaitLimit = _ONE_POLL,
) -> None:
    """Select as ``select_rows`` and store each row in the receive rows of the rank that owns its head.

    ``recv_bases`` int64 ``[W]`` holds the address of every rank's legacy rows int32 ``[3, W, hpr, capacity, 33]``, or,
    with ``generations`` int32 ``[3, 4, capacity]``, of its tagged rows int64 ``[3, W, hpr, capacity, 32]``. If an owner
    does not release a legacy row, this raises ``RuntimeError`` before anything is written: after ``limit`` if the owner
    may be another process, otherwise at once.
    """
    words = select_rows(
        scores,
        num_valid_pages,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        index_scale=index_scale,
        index_offset=index_offset,
    )
    tokens = scores.shape[0]
    # Head-major like the receive rows: [owner, owned head, token, word].
    words = words.transpose(0, 1).unflatten(0, (world_size, heads_per_rank))
    dtype, width = (torch.int32, ROW_WORDS) if generations is None else (torch.int64, TAGGED_WORDS)
    shape = (NUM_SLOT_SETS, world_size, heads_per_rank, capacity, width)
    received = [
        _rows_at(base, shape, dtype, recv_bases.device.type)[slot, rank, :, :tokens] for base in recv_bases.tolist()
    ]
    if generations is not None:
        counters = generations[slot, :, :tokens]
        counters += 1
        words = _tag(words, counters.unflatten(0, (world_size, heads_per_rank)))
        for rows, payload in zip(received, words, strict=True):
            rows.copy_(payload)  # stores are at least 8 aligned bytes, so no reader sees half a word
        return
    flags = [rows[..., -1] for rows in received]
    _wait(
        lambda: torch.stack([flag != 0 for flag in flags]),
        any(shared.find(flag.data_ptr()) is not None for flag in flags),
        limit,
        errors,
        wait="publish",
        form="legacy",
        rank=rank,
        slot=slot,
    )
    for rows, flag, payload in zip(received, flags, words, strict=True):
        rows[..., :-1].copy_(payload)
        flag.fill_(1)


def merge_candidates(
    recv_slot: torch.Tensor,
    num_valid_pages: torch.Tensor,
    output: torch.Tensor,
    errors: torch.Tensor | None,
    *,
    init_blocks: int,
    local_blocks: int,
    expected_generations: torch.Tensor | None,
    prefill: bool,
    rank: int | None = None,
    slot: int | None = None,
    limit: WaitLimit = _ONE_POLL,
) -> None:
    """Merge the rows that ``W`` ranks sent for the heads owned here into the 16 best blocks of each head.

    ``recv_slot`` is one slot set: int32 ``[W, hpr, capacity, 33]``, or int64 ``[W, hpr, capacity, 32]`` with
    ``expected_generations`` int32 ``[hpr, capacity]``. ``output`` int32 ``[T, hpr, 16]`` gets ids in ascending order
    and a tail of -1. If a row does not arrive, this raises ``RuntimeError`` before anything is written: after ``limit``
    if its source may be another process, otherwise at once. With ``prefill``, ``recv_slot`` is an exchanged carrier:
    its flags are ignored, and ``errors`` may be None.
    """
    tokens = num_valid_pages.numel()
    rows = recv_slot[:, :, :tokens]
    expected = None if expected_generations is None else expected_generations[:, :tokens]
    if not prefill:
        require_rows(rows, expected, errors, rank=rank, slot=slot, limit=limit)
    words = rows if expected is None else _low_word(rows)

    # [W, hpr, T, 16] -> [T, hpr, W * 16]
    scores = words[..., :TOP_K].view(torch.float32).permute(2, 1, 0, 3).flatten(-2)
    ids = words[..., TOP_K : 2 * TOP_K].permute(2, 1, 0, 3).flatten(-2).long()
    key = _sort_key(scores)
    # Sort by id, with the best score of each id first. All but the first of equal neighbours are duplicates.
    order = _ranking(key, ids)
    ids, key = ids.gather(-1, order), key.gather(-1, order)
    classes = _classes(ids, num_valid_pages.long()[:, None, None], init_blocks, local_blocks)
    classes[..., 1:].masked_fill_(ids[..., 1:] == ids[..., :-1], _DROPPED)
    best = _ranking(key, classes)[..., :TOP_K]
    dropped = classes.gather(-1, best) == _DROPPED
    chosen = ids.gather(-1, best).masked_fill(dropped, MAX_BLOCKS).sort(dim=-1).values
    chosen.masked_fill_(chosen == MAX_BLOCKS, -1)
    if prefill:
        chosen[num_valid_pages == 0, :, 0] = 0
    output.copy_(chosen)
    if expected is not None:
        expected += 1
    elif not prefill:
        rows[..., -1] = 0


def require_rows(
    rows: torch.Tensor,
    expected: torch.Tensor | None,
    errors: torch.Tensor | None,
    *,
    rank: int | None,
    slot: int | None,
    but_of: int | None = None,
    limit: WaitLimit = _ONE_POLL,
) -> None:
    """Wait until every row of ``rows`` ``[W, hpr, T, words]`` has arrived.

    ``expected`` are the counters of tagged rows, None for legacy rows. Rows of rank ``but_of`` are not waited for.
    """

    def missing() -> torch.Tensor:
        if expected is None:
            absent = rows[..., -1] != 1
        else:
            absent = ((rows >> 32).int() != (expected + 1)[..., None]).any(-1)
        if but_of is not None:
            absent[but_of] = False
        return absent

    form: Literal["legacy", "tagged"] = "legacy" if expected is None else "tagged"
    by_others = shared.find(rows.data_ptr()) is not None
    _wait(missing, by_others, limit, errors, wait="merge", form=form, rank=rank, slot=slot)


def _classes(ids: torch.Tensor, valid: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Class of each block id. The ``first`` and ``last`` of the ``valid`` blocks are forced. Ids beyond are dropped."""
    forced = (ids < first) | (ids >= valid - last)
    dropped = (ids < 0) | (ids >= valid.clamp(max=MAX_BLOCKS))
    return torch.where(dropped, _DROPPED, torch.where(forced, _FORCED, _CANDIDATE))


def _sort_key(scores: torch.Tensor) -> torch.Tensor:
    """Scores to compare: NaN becomes -inf, and -0.0 becomes +0.0."""
    return scores.masked_fill(scores.isnan(), -torch.inf) + 0.0


def _ranking(key: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Indices that order the last axis by class, then key descending, then index."""
    by_key = key.sort(dim=-1, descending=True, stable=True).indices
    return by_key.gather(-1, classes.gather(-1, by_key).sort(dim=-1, stable=True).indices)


def _tag(words: torch.Tensor, generations: torch.Tensor) -> torch.Tensor:
    """Combine int32 words ``[..., 32]`` and generations ``[...]`` into tagged words int64 ``[..., 32]``."""
    return generations.long()[..., None] << 32 | words.long() & 0xFFFFFFFF


def _low_word(tagged: torch.Tensor) -> torch.Tensor:
    """The int32 in the low half of each int64."""
    return (tagged << 32 >> 32).int()


def _wait(
    missing: Callable[[], torch.Tensor],
    by_others: bool,
    limit: WaitLimit,
    errors: torch.Tensor | None,
    *,
    wait: Literal["publish", "merge"],
    form: Literal["legacy", "tagged"],
    rank: int | None,
    slot: int | None,
) -> None:
    """Return once no row ``[peer, head, token]`` is missing. A wait that gives up is counted and raises.

    Unless other processes write the rows (``by_others``), no row can arrive during the wait, so it gives up after one
    poll.
    """
    begin, polls = time.monotonic(), 0
    while True:
        rows = missing().nonzero()
        if not len(rows):
            return
        polls += 1
        seconds = time.monotonic() - begin
        if not by_others or (polls >= limit.polls if limit.seconds is None else seconds >= limit.seconds):
            break
        time.sleep(_POLL_SECONDS)
    device = None
    if errors is not None:
        errors[0] += 1
        device = errors.device.index
    peer, head, row = rows[0].tolist()
    fault = Fault(wait, form, rank, slot, peer, head, row, polls if by_others else None, device, seconds)
    raise RuntimeError(str(fault))


class _DeviceMemory:
    """Device memory at an address, which torch imports without a copy."""

    def __init__(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(shape),
            "typestr": f"<i{dtype.itemsize}",
        }


def _rows_at(address: int, shape: Sequence[int], dtype: torch.dtype, device_type: str) -> torch.Tensor:
    """Return the integer tensor at an address of this process. The caller must keep its memory alive."""
    mapped = shared.find(address)
    if mapped is not None:
        # This is a peer's device memory. torch would make it a tensor on the peer's device.
        begin = address - mapped.data_ptr()
        rows = mapped.view(torch.uint8)[begin : begin + math.prod(shape) * dtype.itemsize]
        return rows.view(dtype).view(*shape)
    if device_type == "cuda":
        rows = torch.as_tensor(_DeviceMemory(address, shape, dtype))
        if rows.data_ptr() != address:
            raise RuntimeError(
                f"receive rows at {address:#x} are not on torch's default device, {rows.device}, which copies them: "
                'publish with backend="torch" without a default device'
            )
        return rows
    buffer = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(*shape)
