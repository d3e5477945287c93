# SPDX-License-Identifier: Apache-2.0
"""The smallest complete decode under tensor parallelism: all layers of a model with a growing paged index-K cache.

Run it as ``torchrun --nproc-per-node 2 scripts/examples/tp_decode.py`` (2 or 4 ranks). The layers differ only in keys
and queries, which are normal random numbers. Every rank draws all of them from one seed and keeps its shard.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable

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
    check,
    decode_problem,
    join_group,
    options,
    report,
    report_check,
    title,
)

from flashinfer_msa.comm import allocate_comm
from flashinfer_msa.layout import HEAD_DIM, NUM_HEADS, NUM_SLOT_SETS, TOP_K, find_layout
from flashinfer_msa.msa_ops import prepare_msa_icp_indexer
from flashinfer_msa.sizing import ceil_div
from flashinfer_msa.testing.problems import NEAR_TIE, Comparison, random_e4m3


@click.command()
@options(
    layers={"gpu": 60, "cpu": 12, "least": 1, "text": "Sparse layers; tagged rows need two."},
    steps={"gpu": 64, "cpu": 8, "least": 2, "text": "Decode steps of one token per request."},
    batch={"gpu": 32, "cpu": 3, "least": 1, "text": "Requests."},
    context={"gpu": 32768, "cpu": 4096, "least": 1, "text": "Keys of the longest request before the first step."},
)
def main(
    backend: str, page_size: int, tagged: bool, layers: int, steps: int, batch: int, context: int, seed: int
) -> None:
    """Decode with all ranks, check some steps against unsharded keys, and exit with 1 if a row is wrong."""
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
        max_num_batched_tokens=batch,
        max_num_seqs=batch,
        max_model_len=context + steps,
        num_sparse_layers=layers,
        device=device,
        backend=backend,
    )
    with allocate_comm(indexer) as comm:
        # Load every kernel on every rank before the first wait for a peer.
        indexer.warmup()
        dist.barrier()

        # Set up the requests as after their prefill.
        lengths = [context, *random.Random(seed).choices(range(context // 2, context), k=batch - 1)]
        requests = [Request(prompt=length, total=length + steps) for length in lengths]
        pool = PagePool(sum(ceil_div(request.total, page_size) for request in requests), page_size, seed)
        cache = IndexKeyCache(layout, rank, layers=layers, num_pages=pool.num_pages, device=device)
        checked = range(layers) if rank == 0 else ()
        unsharded = UnshardedKeys(layout, layers=checked, num_pages=pool.num_pages, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        slots = torch.cat([request.grow(request.prompt, pool) for request in requests])
        rows = cache.local_rows(slots).to(device)
        slots = slots.to(device)
        for layer in range(layers):
            keys = random_e4m3((len(slots), HEAD_DIM), generator)
            cache.write(layer, keys, rows)
            unsharded.write(layer, keys, slots)

        # Refill these buffers in place; never reallocate them.
        decode = DecodeBatch(batch, ceil_div(indexer.max_model_len, page_size), device)
        rows = torch.zeros(batch, dtype=torch.int64, device=device)
        index_q = torch.empty(layers, batch, NUM_HEADS, HEAD_DIM, dtype=torch.float8_e4m3fn, device=device)
        index_k = torch.empty(layers, batch, HEAD_DIM, dtype=torch.float8_e4m3fn, device=device)
        output = torch.zeros(batch, indexer.heads_per_rank, TOP_K, dtype=torch.int32, device=device)
        selected = torch.zeros(layers, *output.shape, dtype=torch.int32, device=device)
        # This checks every argument once. A layer then only passes its query, keys and slot set.
        prepared = indexer.prepare_decode_step(
            decode.block_table,
            decode.seq_lens,
            decode.num_valid_pages,
            torch.empty(indexer.decode_scores_shape(), device=device),
            output,
            comm=comm,
            tagged=tagged,
            decode_query_len=1,
        )

        def run_layers(first_slot: int) -> None:
            for layer in range(layers):
                cache.write(layer, index_k[layer], rows)
                prepared.run(index_q[layer], cache.shards[layer], slot=(first_slot + layer) % NUM_SLOT_SETS)
                selected[layer].copy_(output)  # attention would read the blocks in `output` here

        # slot = layers_run % 3, counted across steps. Unless `layers` is a multiple of 3, steps need three graphs.
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        stopwatch = Stopwatch(device)
        counts = Comparison()
        for step in range(steps):
            slots = torch.cat([request.grow(1, pool) for request in requests])
            rows.copy_(cache.local_rows(slots))
            decode.load(requests)
            index_q.copy_(random_e4m3(index_q.shape, generator))
            index_k.copy_(random_e4m3(index_k.shape, generator))

            first_slot = step * layers % NUM_SLOT_SETS
            if device.type == "cpu":
                with stopwatch.step():
                    run_layers(first_slot)
            elif step == 0:
                run_layers(first_slot)  # torch too must load its kernels before a capture
            else:
                if first_slot not in graphs:
                    graphs[first_slot] = capture(lambda slot=first_slot: run_layers(slot))
                with stopwatch.step():
                    graphs[first_slot].replay()

            slots = slots.to(device)
            for layer in checked:
                unsharded.write(layer, index_k[layer], slots)
            if step % max(steps // 4, 1) == 0 or step == steps - 1:
                problems = (decode_problem(layout, unsharded.pages[layer], decode, index_q[layer]) for layer in checked)
                counts = counts.plus(check(selected, problems, NEAR_TIE))

        times = stopwatch.seconds()
        seconds = statistics.median(times)
        report(f"{title(layout, backend, tagged, device)}: {layers} layers, {batch} requests of up to {context} keys")
        report_check(counts)
        rate = f"{batch / seconds:.0f} tokens/s"
        report(f"time: {1e6 * seconds / layers:.1f} us per layer, {rate} (median of {len(times)} steps)")
    dist.destroy_process_group()
    sys.exit(counts.wrong > 0)


def capture(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture what ``function`` launches in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread calls CUDA during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph


if __name__ == "__main__":
    main()
