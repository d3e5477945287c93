# SPDX-License-Identifier: Apache-2.0
"""A small version of what a server has around the indexer: a process group, requests, a paged index-K cache.

It also has a check against unsharded keys, which a server does not need.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
import torch
import torch.distributed as dist

from flashinfer_msa.layout import BLOCK_TOKENS, HEAD_DIM, PAGE_SIZES, Layout
from flashinfer_msa.sizing import ceil_div
from flashinfer_msa.testing.problems import Comparison, DecodeProblem, Expected, Problem, brute_force_top16, compare

FORCED = {"init_blocks": 0, "local_blocks": 1}
"""Blocks at either end of a context that are always selected."""


def join_group(backend: str) -> torch.device:
    """Join the group that torchrun started, with a GPU per process, or on the CPU for the reference."""
    if "RANK" not in os.environ:
        raise click.UsageError(f"start 2 or 4 processes: torchrun --nproc-per-node 2 {sys.argv[0]}")
    if backend != "cake":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


class PagePool:
    """Allocates the pages of the cache. A page has the same number on every rank, so all share one block table."""

    def __init__(self, num_pages: int, page_size: int, seed: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages for ``tokens`` tokens of a request."""
        return ceil_div(tokens, self.page_size)

    def allocate(self) -> int:
        """Return a free page. The caller admits no more requests than there are pages for."""
        return self._free.pop()

    def release(self, pages: Iterable[int]) -> None:
        """Free pages."""
        self._free.extend(pages)


@dataclass
class Request:
    """A sequence that begins with ``prompt`` tokens and ends with ``total``.

    The index keys of its first ``length`` tokens are in the cache, on ``pages``.
    """

    prompt: int
    total: int
    length: int = 0
    pages: list[int] = field(default_factory=list)

    def grow(self, tokens: int, pool: PagePool) -> torch.Tensor:
        """Allocate pages for the next tokens.

        Returns
        -------
        torch.Tensor
            int64 ``[tokens]``: the slot of each key, ``page * page_size + offset``.
        """
        positions = torch.arange(self.length, self.length + tokens)
        self.length += tokens
        while len(self.pages) < pool.pages_of(self.length):
            self.pages.append(pool.allocate())
        pages = torch.tensor(self.pages, dtype=torch.int64)
        return pages[positions // pool.page_size] * pool.page_size + positions % pool.page_size


class IndexKeyCache:
    """One rank's rows of the paged index keys of every layer.

    ``shards`` has an e4m3 tensor ``[pages, page_size / world_size, 128]`` per layer. The last page is in no block
    table. Keys of other ranks and padding are written there, so that every rank writes the same number of rows.
    """

    def __init__(self, layout: Layout, rank: int, *, layers: int, num_pages: int, device: torch.device) -> None:
        shape = (num_pages + 1, layout.rows, HEAD_DIM)
        self.shards = [_zero_keys(shape, device) for _ in range(layers)]
        self._page_size, self._rows, self._spare = layout.page_size, layout.rows, num_pages * layout.rows
        self._row_of = torch.full((layout.page_size,), -1)
        for row in range(layout.rows):
            self._row_of[layout.global_key(rank, 0, row)] = row

    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of a flattened shard for keys with ``slots``, int64 ``[T]``, -1 for padding."""
        row = self._row_of[slots % self._page_size]
        held = (slots >= 0) & (row >= 0)
        return torch.where(held, slots // self._page_size * self._rows + row, self._spare)

    def write(self, layer: int, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Write this step's keys, e4m3 ``[T, 128]``, to ``rows`` from :meth:`local_rows`, on the device."""
        _write_rows(self.shards[layer], keys, rows)


class DecodeBatch:
    """The decode requests of a step, in fixed buffers, because prepared steps and CUDA graphs hold their addresses."""

    def __init__(self, capacity: int, columns: int, device: torch.device) -> None:
        self.block_table = torch.zeros(capacity, columns, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.num_valid_pages = torch.zeros(capacity, dtype=torch.int32, device=device)

    def load(self, requests: Sequence[Request]) -> None:
        """Refill the buffers between steps. No kernel of a step may write them. Rows after the requests are padding."""
        lengths = torch.zeros(len(self.seq_lens), dtype=torch.int32)
        lengths[: len(requests)] = torch.tensor([request.length for request in requests], dtype=torch.int32)
        self.seq_lens.copy_(lengths)
        self.num_valid_pages.copy_((lengths + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
        self.block_table.copy_(block_table(requests, self.block_table.shape))


def block_table(requests: Sequence[Request], shape: Sequence[int]) -> torch.Tensor:
    """Return the pages of each request, int32 ``[rows, columns]``. Other entries are never read."""
    table = torch.zeros(*shape, dtype=torch.int32)
    for row, request in zip(table, requests, strict=False):
        row[: len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
    return table


class UnshardedKeys:
    """The unsharded pages of some layers, e4m3 ``[pages, page_size, 128]`` each, for rank 0's checks."""

    def __init__(self, layout: Layout, *, layers: Collection[int], num_pages: int, device: torch.device) -> None:
        shape = (num_pages, layout.page_size, HEAD_DIM)
        self.pages = {layer: _zero_keys(shape, device) for layer in layers}

    def write(self, layer: int, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys, e4m3 ``[T, 128]``, to their slots on the device, except padding, whose slot is -1."""
        if layer in self.pages:
            real = slots >= 0
            _write_rows(self.pages[layer], keys.view(torch.uint8)[real], slots[real])


# Few operations support float8, so keys are handled as bytes.


def _zero_keys(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)


def _write_rows(pages: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor) -> None:
    pages.view(torch.uint8).view(-1, HEAD_DIM).index_copy_(0, rows, keys.view(torch.uint8))


def check(selected: Sequence[torch.Tensor], problems: Iterable[Problem], near_tie: float) -> Comparison:
    """Compare the owners' Top16 with the brute force. All ranks call this; rank 0 compares and broadcasts the result.

    ``selected`` has this rank's int32 ``[T, heads_per_rank, 16]`` of each checked layer. On rank 0, ``problems`` has
    those layers' queries and unsharded keys. On other ranks it is not used.
    """
    own = torch.stack(list(selected))
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(own, parts, dst=0)
    counts = Comparison()
    if parts is not None:
        for output, problem in zip(torch.cat(parts, dim=2), problems, strict=True):
            counts = counts.plus(compare(output, _expected(problem), near_tie=near_tie))
    told = torch.tensor(counts, device=own.device)
    dist.broadcast(told, src=0)
    return Comparison(*told.tolist())


def _expected(problem: Problem) -> Expected:
    # Near ties are examined one by one, which is faster on the host.
    return Expected(*(part.cpu() for part in brute_force_top16(problem, **FORCED)))


def decode_problem(layout: Layout, pages: torch.Tensor, batch: DecodeBatch, index_q: torch.Tensor) -> DecodeProblem:
    """Return one layer of a decode step, with one token per request, for the brute force."""
    rows = slice(len(index_q))
    return DecodeProblem(
        layout=layout,
        pages=pages,
        block_table=batch.block_table[rows],
        seq_lens=batch.seq_lens[rows],
        index_q=index_q,
        decode_query_len=1,
    )


class Stopwatch:
    """Times steps: a CUDA device by events, which do not block the host, and the CPU by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the body."""
        begin = self._mark()
        yield
        self._marks.append((begin, self._mark()))

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> list[float]:
        """Return the seconds of each step so far."""
        if not self._on_gpu:
            return [end - begin for begin, end in self._marks]
        torch.cuda.synchronize()
        return [1e-3 * begin.elapsed_time(end) for begin, end in self._marks]


def _size_option(name: str, *, gpu: int, cpu: int, least: int, text: str) -> Callable[[Any], Any]:
    def choose(context: click.Context, parameter: click.Parameter, value: int | None) -> int:
        return value or (gpu if context.params["backend"] == "cake" else cpu)

    return click.option(
        name, type=click.IntRange(least), callback=choose, help=f"{text}  [default: {gpu}, on the CPU {cpu}]"
    )


def options(**sizes: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds the options of both examples and ``sizes``.

    Each size has ``gpu``, ``cpu``, ``least`` and ``text``.
    """
    decorators = [
        click.option(
            "--backend",
            type=click.Choice(["cake", "torch"]),
            default=lambda: "cake" if torch.cuda.is_available() else "torch",
            is_eager=True,
            help="Kernels with NCCL, or the reference on the CPU with Gloo.  [default: kernels if there is a GPU]",
        ),
        click.option(
            "--layout",
            "page_size",
            type=click.Choice([f"p{size}" for size in PAGE_SIZES]),
            default=f"p{PAGE_SIZES[0]}",
            show_default=True,
            callback=lambda context, parameter, value: int(value[1:]),
            help="Page size of the index-K cache. The world size is torchrun's.",
        ),
        click.option("--tagged/--legacy", default=True, show_default=True, help="Kind of the receive rows."),
        *(_size_option(f"--{name.replace('_', '-')}", **size) for name, size in sizes.items()),
        click.option("--seed", type=int, default=0, show_default=True),
    ]

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def report(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        click.echo(line)


def report_check(counts: Comparison) -> None:
    """Print the counts of the checks."""
    report(
        f"check: {counts.rows} rows of Top16, {counts.equal} equal those of the unsharded keys, "
        f"{counts.near_ties} near ties, {counts.wrong} wrong"
    )


def title(layout: Layout, backend: str, tagged: bool, device: torch.device) -> str:
    """Return a line about the layout, row kind, backend and device."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{layout.title}, {'tagged' if tagged else 'legacy'} rows, backend {backend} on {where}"
