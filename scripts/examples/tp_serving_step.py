# SPDX-License-Identifier: Apache-2.0
"""Serving under tensor parallelism: a scheduler makes steps that decode and prefill together.

Run it as ``torchrun --nproc-per-node 2 scripts/examples/tp_serving_step.py`` (2 or 4 ranks). Requests arrive, prefill
in chunks, decode, and free their pages. Steps are padded to a few sizes and reuse their buffers, so that the indexer's
layer graphs can be replayed. Keys and queries are normal random numbers, which every rank draws from one seed.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import click
import torch
import torch.distributed as dist
from serving import (
    FORCED,
    DecodeBatch,
    IndexKeyCache,
    PagePool,
    Request,
    Stopwatch,
    UnshardedKeys,
    block_table,
    check,
    decode_problem,
    join_group,
    options,
    report,
    report_check,
    title,
)

from flashinfer_msa.comm import allocate_comm, exchange_carriers
from flashinfer_msa.indexer import MSAIcpIndexerPlan
from flashinfer_msa.layout import (
    BLOCK_TOKENS,
    HEAD_DIM,
    ITEM_TOKENS,
    NUM_HEADS,
    NUM_SLOT_SETS,
    ROW_WORDS,
    TOP_K,
    Layout,
    find_layout,
)
from flashinfer_msa.msa_ops import prepare_msa_icp_indexer
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.sizing import MAX_WINDOW_TOKENS, ceil_div
from flashinfer_msa.testing.problems import NEAR_TIE, TENSOR_CORE_ERROR, Comparison, PrefillProblem, random_e4m3

GRAPH_KEYS = 12
"""Step sizes whose graphs are cached."""
CHECKS = 8
"""Number of checked steps."""


class Chunk(NamedTuple):
    """Prefill tokens of a request. They are the last ones whose keys are in its cache."""

    request: Request
    position: int
    tokens: int


class Timed(NamedTuple):
    """A timed step: its tokens, and whether all of its layers were replays of CUDA graphs."""

    decode_tokens: int
    prefill_tokens: int
    replayed: bool


class Scheduler:
    """Decodes every request that is past its prompt, and adds prefill chunks in the order of arrival."""

    def __init__(self, arrivals: Iterable[tuple[int, Request]], pool: PagePool, *, batch: int, chunk: int) -> None:
        self._arrivals = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        self._running: list[Request] = []
        self._pool = pool
        self._batch = batch
        self._chunk = chunk
        self.finished = 0

    def schedule(self, step: int) -> tuple[list[Request], list[tuple[Request, int]]]:
        """Return the requests that decode one token, and those that prefill with their numbers of tokens."""
        while self._arrivals and self._arrivals[0][0] <= step and self._admits(self._arrivals[0][1]):
            self._running.append(self._arrivals.popleft()[1])
        decode = [request for request in self._running if request.length >= request.prompt]
        prefill, left = [], self._chunk
        for request in self._running:
            tokens = min(request.prompt - request.length, left)
            if tokens > 0:
                prefill.append((request, tokens))
                left -= tokens
        return decode, prefill

    def _admits(self, request: Request) -> bool:
        """Whether the pages suffice for the final lengths of the running requests and this one."""
        pages = sum(self._pool.pages_of(other.total) for other in [*self._running, request])
        return len(self._running) < self._batch and pages <= self._pool.num_pages

    def retire(self) -> None:
        """Free the pages of complete requests."""
        for request in [request for request in self._running if request.length == request.total]:
            self._running.remove(request)
            self._pool.release(request.pages)
            self.finished += 1


class PrefillBatch:
    """The prefill rows of a step and their windows, in fixed buffers, because CUDA graphs hold their addresses."""

    def __init__(
        self, indexer: MSAIcpIndexerPlan, *, tokens: int, window_tokens: int, columns: int, device: torch.device
    ) -> None:
        self._indexer = indexer
        self._window_tokens = window_tokens
        windows, segments = ceil_div(tokens, window_tokens), indexer.max_num_seqs
        int32 = {"dtype": torch.int32, "device": device}
        self._block_tables = torch.zeros(windows, segments, columns, **int32)
        # Query and key lengths, offsets of both, and positions.
        self._segments = torch.zeros(windows, 5, segments + 1, **int32)
        self.num_valid_pages = torch.zeros(tokens, **int32)

    def load(self, chunks: Sequence[Chunk], rows: int) -> list[tuple[int, int, torch.Tensor, MSAIcpScorePlan]]:
        """Refill the buffers and plan the windows on the device. Rows after the chunks' tokens are padding."""
        valid = torch.zeros(rows, dtype=torch.int32)
        row = 0
        for chunk in chunks:
            positions = torch.arange(chunk.position, chunk.position + chunk.tokens)
            valid[row : row + chunk.tokens] = positions // BLOCK_TOKENS + 1
            row += chunk.tokens
        self.num_valid_pages[:rows].copy_(valid)
        starts = range(0, rows, self._window_tokens)
        return [self._window(index, start, rows, chunks) for index, start in enumerate(starts)]

    def _window(
        self, index: int, start: int, rows: int, chunks: Sequence[Chunk]
    ) -> tuple[int, int, torch.Tensor, MSAIcpScorePlan]:
        end = min(start + self._window_tokens, rows)
        parts = list(cut(chunks, start, end))
        table, segments = self._block_tables[index], self._segments[index]
        table.copy_(block_table([part.request for part in parts], table.shape))
        # The number of segments is fixed. Those after the parts are empty.
        host = torch.zeros(segments.shape, dtype=torch.int32)
        host[0, : len(parts)] = torch.tensor([part.tokens for part in parts], dtype=torch.int32)
        host[4, : len(parts)] = torch.tensor([part.position for part in parts], dtype=torch.int32)
        host[1] = host[0] + host[4]
        host[2:4, 1:] = host[:2, :-1].cumsum(1)
        segments.copy_(host)
        query_lens, key_lens, query_offsets, key_offsets, positions = segments
        # The bounds come from the buffers, so that equal sizes give equal plans.
        window_plan = self._indexer.prefill_window_plan(
            index,
            query_lens[:-1],
            key_lens[:-1],
            query_offsets,
            key_offsets,
            positions[:-1],
            total_q=end - start,
            max_query_len=end - start,
            max_seq_len=self._indexer.max_model_len,
        )
        return start, end, table, window_plan


def cut(chunks: Iterable[Chunk], start: int, end: int) -> Iterable[Chunk]:
    """Yield the parts of consecutive chunks that are in rows ``start`` to ``end``."""
    row = 0
    for chunk in chunks:
        first, last = max(row, start), min(row + chunk.tokens, end)
        if first < last:
            yield Chunk(chunk.request, chunk.position + first - row, last - first)
        row += chunk.tokens


def padded(rows: int, least: int, most: int) -> int:
    """Return the padded size of a step: ``least`` times a power of two, at most ``most``, or 0 for no rows."""
    size = least
    while size < rows:
        size *= 2
    return min(size, most) if rows else 0


def prefill_problem(
    layout: Layout, pages: torch.Tensor, chunks: Sequence[Chunk], columns: int, index_q: torch.Tensor
) -> PrefillProblem:
    """Return one layer of the step's prefill for the brute force."""
    device = pages.device
    table = block_table([chunk.request for chunk in chunks], (len(chunks), columns))
    key_lens = [chunk.position + chunk.tokens for chunk in chunks]
    return PrefillProblem(
        layout=layout,
        pages=pages,
        block_table=table.to(device),
        seq_lens=torch.tensor(key_lens, dtype=torch.int32, device=device),
        index_q=index_q,
        query_lens=tuple(chunk.tokens for chunk in chunks),
        positions=tuple(chunk.position for chunk in chunks),
    )


@click.command()
@options(
    layers={"gpu": 60, "cpu": 4, "least": 1, "text": "Sparse layers; tagged rows need two."},
    steps={"gpu": 160, "cpu": 24, "least": 1, "text": "Steps. More steps have more requests."},
    batch={"gpu": 32, "cpu": 3, "least": 1, "text": "Concurrent requests."},
    context={"gpu": 32768, "cpu": 3072, "least": 8, "text": "Tokens of the longest request."},
    chunk={"gpu": 8192, "cpu": 512, "least": 1, "text": "Prefill tokens of a step."},
    window={"gpu": 4096, "cpu": 192, "least": 1, "text": "Prefill tokens of a window."},
    check_layers={"gpu": 6, "cpu": 2, "least": 1, "text": "Checked layers. Rank 0 holds all their keys."},
)
def main(
    backend: str,
    page_size: int,
    tagged: bool,
    layers: int,
    steps: int,
    batch: int,
    context: int,
    chunk: int,
    window: int,
    check_layers: int,
    seed: int,
) -> None:
    """Serve requests with all ranks, check some steps against unsharded keys, and exit with 1 if a row is wrong."""
    device = join_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = find_layout(page_size, world_size)
    indexer = prepare_msa_icp_indexer(
        world_size=world_size,
        rank=rank,
        num_index_heads=NUM_HEADS,
        page_size=page_size,
        **FORCED,
        max_decode_tokens=batch,
        max_decode_query_len=1,
        # The indexer allocates as many plans as full windows need. This makes enough for the smaller ones here.
        max_num_batched_tokens=ceil_div(chunk, min(window, MAX_WINDOW_TOKENS)) * MAX_WINDOW_TOKENS,
        max_num_seqs=batch,
        max_model_len=context,
        num_sparse_layers=layers,
        device=device,
        backend=backend,
    )
    columns = ceil_div(context, page_size)
    pool = PagePool(max(3 * batch * columns // 4, columns), page_size, seed)
    requests = draw_requests(random.Random(seed), steps, chunk, context)
    scheduler = Scheduler(requests, pool, batch=batch, chunk=chunk)
    cache = IndexKeyCache(layout, rank, layers=layers, num_pages=pool.num_pages, device=device)
    checked = range(0, layers, ceil_div(layers, check_layers))
    unsharded = UnshardedKeys(layout, layers=checked if rank == 0 else (), num_pages=pool.num_pages, device=device)
    generator = torch.Generator(device).manual_seed(seed)

    # Graphs that have captured the exchange must be freed before its process group.
    with allocate_comm(indexer) as comm, indexer.layer_graphs(max_keys=GRAPH_KEYS) as graphs:
        # Load every kernel on every rank and connect the exchange before the first wait for a peer.
        indexer.warmup()
        scratch_tokens, _, pitch = indexer.prefill_scratch_shape()
        window = min(window, scratch_tokens)
        scratch = torch.empty(window, NUM_HEADS, pitch, device=device)
        carriers = torch.zeros(indexer.prefill_carrier_shape(), dtype=torch.int32, device=device)
        exchange_carriers(*halves(carriers, ITEM_TOKENS, world_size))
        dist.barrier()

        decode_batch = DecodeBatch(batch, columns, device)
        prefill_batch = PrefillBatch(indexer, tokens=chunk, window_tokens=window, columns=columns, device=device)
        scores = torch.empty(indexer.decode_scores_shape(), device=device)
        decode_output, prefill_output = (
            torch.zeros(rows, indexer.heads_per_rank, TOP_K, dtype=torch.int32, device=device)
            for rows in (batch, chunk)
        )
        layers_run = 0  # decode layers of all steps so far
        stopwatch, timed = Stopwatch(device), []
        counts = Comparison()
        for step in range(steps):
            decoding, prefilling = scheduler.schedule(step)
            if not decoding and not prefilling:
                continue
            # The decode rows come first, then the prefill rows. Both are padded to sizes that recur.
            decode_rows = padded(len(decoding), 1, batch)
            prefill_rows = padded(sum(tokens for _, tokens in prefilling), ITEM_TOKENS, chunk)
            decode_slots = [request.grow(1, pool) for request in decoding]
            prefill_slots = [request.grow(tokens, pool) for request, tokens in prefilling]
            chunks = [Chunk(request, request.length - tokens, tokens) for request, tokens in prefilling]
            slots = torch.cat([pad(decode_slots, decode_rows), pad(prefill_slots, prefill_rows)])
            rows, slots = cache.local_rows(slots).to(device), slots.to(device)
            index_q = [random_e4m3((len(slots), NUM_HEADS, HEAD_DIM), generator) for _ in range(layers)]
            index_k = [random_e4m3((len(slots), HEAD_DIM), generator) for _ in range(layers)]

            # Once per step: refill buffers, plan windows, and check every argument.
            decode = prefill = exchange = None
            if decode_rows:
                decode_batch.load(decoding)
                decode = indexer.prepare_decode_step(
                    decode_batch.block_table[:decode_rows],
                    decode_batch.seq_lens[:decode_rows],
                    decode_batch.num_valid_pages[:decode_rows],
                    scores,
                    decode_output[:decode_rows],
                    comm=comm,
                    tagged=tagged,
                    decode_query_len=1,
                )
            if prefill_rows:
                send, received = halves(carriers, prefill_rows, world_size)
                prefill = indexer.prepare_prefill_step(
                    prefill_batch.load(chunks, prefill_rows),
                    scratch,
                    prefill_batch.num_valid_pages[:prefill_rows],
                    send,
                    received,
                    prefill_output[:prefill_rows],
                )
                exchange = functools.partial(exchange_carriers, send, received)
            graph_step = graphs.begin_step(
                prefill=prefill,
                decode=decode,
                exchange=exchange,
                exchange_key=prefill_rows,
                decode_tokens=decode_rows,
            )

            # Once per layer: write its keys to the cache, and select. `run` captures and replays graphs.
            due = step % max(steps // CHECKS, 1) == 0
            selected = []
            before = graphs.stats["replayed_layers"]
            with stopwatch.step():
                for layer in range(layers):
                    cache.write(layer, index_k[layer], rows)
                    slot = layers_run % NUM_SLOT_SETS if decode else 0
                    graph_step.run(layer, index_q[layer], cache.shards[layer], slot=slot)
                    layers_run += decode is not None
                    # Attention would read the blocks in the outputs here, before the next layer overwrites them.
                    if due and layer in checked:
                        selected.append((decode_output[:decode_rows].clone(), prefill_output[:prefill_rows].clone()))
            replayed = graphs.stats["replayed_layers"] - before == layers
            timed.append(Timed(len(decoding), sum(part.tokens for part in chunks), replayed))

            for layer in unsharded.pages:
                unsharded.write(layer, index_k[layer], slots)
            if due and decode_rows:
                problems = (
                    decode_problem(layout, pages, decode_batch, index_q[layer][:decode_rows])
                    for layer, pages in unsharded.pages.items()
                )
                counts = counts.plus(check([output for output, _ in selected], problems, NEAR_TIE))
            if due and prefill_rows:
                problems = (
                    prefill_problem(layout, pages, chunks, columns, index_q[layer][decode_rows:])
                    for layer, pages in unsharded.pages.items()
                )
                # The prefill kernels sum products in the tensor cores' accumulators.
                near_tie = 2 * TENSOR_CORE_ERROR if backend == "cake" else NEAR_TIE
                counts = counts.plus(check([output for _, output in selected], problems, near_tie))
            scheduler.retire()

        report(f"{title(layout, backend, tagged, device)}: {layers} layers, {len(timed)} steps")
        report(f"requests: {scheduler.finished} of {len(requests)} finished, over {pool.num_pages} pages")
        report_check(counts)
        report_times(timed, stopwatch.seconds(), layers)
        report(f"layers: {dict(graphs.stats)}")
    dist.destroy_process_group()
    sys.exit(counts.wrong > 0)


def draw_requests(draw: random.Random, steps: int, chunk: int, context: int) -> list[tuple[int, Request]]:
    """Draw requests of up to ``context`` tokens whose prompts fill half the steps, with their arrival steps."""
    requests: list[tuple[int, Request]] = []
    while sum(request.prompt for _, request in requests) < steps * chunk // 2:
        total = draw.randint(context // 4, context)
        decoded = min(draw.randint(1, ceil_div(steps, 3)), total - 1)
        requests.append((draw.randrange(ceil_div(steps, 2)), Request(prompt=total - decoded, total=total)))
    return requests


def halves(carriers: torch.Tensor, rows: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the send and receive buffers of a step with ``rows`` prefill rows, each contiguous in its half."""
    send, received = (half.view(-1)[: NUM_HEADS * rows * ROW_WORDS] for half in carriers)
    return send.view(NUM_HEADS, rows, ROW_WORDS), received.view(world_size, -1, rows, ROW_WORDS)


def pad(slots: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    """Concatenate ``slots`` and pad them with -1, int64 ``[rows]``."""
    padding = torch.full((rows - sum(map(len, slots)),), -1)
    return torch.cat([*slots, padding])


def report_times(timed: Sequence[Timed], seconds: Sequence[float], layers: int) -> None:
    """Print rates, and median times of steps with and without prefill. Only replayed steps count, if there are any."""
    steps = [(step, second) for step, second in zip(timed, seconds, strict=True) if step.replayed]
    steps = steps or list(zip(timed, seconds, strict=True))
    total = sum(second for _, second in steps)
    for kind, chosen in (
        ("decode only", [second for step, second in steps if not step.prefill_tokens]),
        ("with prefill", [second for step, second in steps if step.prefill_tokens]),
    ):
        if chosen:
            report(f"time: {1e6 * statistics.median(chosen) / layers:.1f} us per layer, {kind} ({len(chosen)} steps)")
    report(
        f"rate: {sum(step.decode_tokens for step, _ in steps) / total:.1f} decode tokens/s, "
        f"{sum(step.prefill_tokens for step, _ in steps) / total:.1f} prefill tokens/s"
    )


if __name__ == "__main__":
    main()
