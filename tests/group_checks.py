# SPDX-License-Identifier: Apache-2.0
"""Checks of decode and prefill over many inputs with a process per rank; ``process_group`` runs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from comm_checks import Setup, owned_top16

from flashinfer_msa import msa_ops
from flashinfer_msa.comm import exchange_carriers
from flashinfer_msa.indexer import MSAIcpIndexerPlan
from flashinfer_msa.layout import LAYOUTS, NUM_HEADS, NUM_SLOT_SETS, ROW_WORDS, TOP_K
from flashinfer_msa.sizing import MAX_WINDOW_TOKENS
from flashinfer_msa.testing.problems import (
    NEAR_TIE,
    TENSOR_CORE_ERROR,
    Comparison,
    DecodeProblem,
    PrefillProblem,
    Problem,
    compare,
    random_e4m3,
)

Results = dict[tuple[Any, ...], Comparison]
"""The comparison of each case."""

QUERY_LENS = range(1, 9)
BATCHES: dict[str, dict[str, Any]] = {
    "ragged": {"seq_lens": (5000, 0, 129, 1, 20001)},
    "padded": {"seq_lens": (777, 3000, 0, 0, 0), "block_table_extra_columns": 3},
    "strided": {"seq_lens": (256, 255, 9000), "page_pitch_extra": 48, "block_table_extra_columns": 1},
}
CHAINS = ("separate", "fused")
DECODE_CASES = list(itertools.product(QUERY_LENS, BATCHES, (False, True), CHAINS))
"""Query length, batch, whether rows are tagged, chain."""

WINDOWS: dict[str, dict[str, Any]] = {
    "short": {"query_lens": (70, 0, 30), "kv_lens": (300, 40, 1900)},
    "keys beyond and short of the tokens": {
        "query_lens": (100, 100, 40),
        "kv_lens": (150, 5000, 700),
        "positions": (300, 300, 0),
    },
    "long": {"query_lens": (900, 1), "kv_lens": (18000, 2000)},
}
WAYS = ("eager", "prepared", "layer graphs", "graph", "graph of prepared")
"""Ways to launch a step. The last two need a GPU."""
PREFILL_CASES = list(itertools.product(WINDOWS, CHAINS, WAYS[:4]))
"""Window, chain and way."""
_LONGEST = 20001
_LAYERS, _STEPS = 9, 7


def ways_on(device: str) -> tuple[str, ...]:
    """Return the ways to launch on a type of device."""
    return WAYS if device == "cuda" else WAYS[:3]


def decode_matrix(rank: int, layout: str, query_lens: range, setup: Setup) -> Results:
    """Run every decode case of a layout, once per slot set, with and without programmatic dependent launch."""
    indexer = setup.indexer(
        rank, LAYOUTS[layout], max_decode_tokens=43, max_decode_query_len=8, max_model_len=_LONGEST, max_num_seqs=5
    )
    results: Results = {}
    uses = itertools.count()
    with setup.comm(indexer) as comm:
        dist.barrier()
        for query_len, (name, batch) in itertools.product(query_lens, BATCHES.items()):
            problem = DecodeProblem.random(
                indexer.layout, **batch, decode_query_len=query_len, device=indexer.device, seed=query_len
            )
            keys, expected = problem.shard(rank), owned_top16(indexer, problem)
            for tagged, chain in itertools.product((False, True), CHAINS):
                counts = Comparison()
                for slot in range(NUM_SLOT_SETS):
                    scores, output = planes(indexer, len(problem.index_q), strided=name == "strided")
                    indexer.decode(
                        problem.index_q,
                        keys,
                        problem.block_table,
                        problem.seq_lens,
                        problem.num_valid_pages,
                        scores,
                        output,
                        comm=comm,
                        slot=slot,
                        tagged=tagged,
                        decode_query_len=query_len,
                        enable_pdl=bool(next(uses) % 2),
                        pool=decode_pool(indexer) if chain == "fused" else None,
                    )
                    counts = counts.plus(compare(output, expected))
                results[query_len, name, tagged, chain] = counts
        assert int(comm.errors) == 0
    return results


def decode_steps(rank: int, layout: str, tagged: bool, enable_pdl: bool, setup: Setup) -> Results:
    """Run steps of several layers, launched in each way. Queries change, so a row of an earlier use would be wrong."""
    indexer = setup.indexer(
        rank, LAYOUTS[layout], max_decode_tokens=9, max_model_len=_LONGEST, num_sparse_layers=_LAYERS, max_num_seqs=4
    )
    problem = DecodeProblem.random(
        indexer.layout, seq_lens=(5000, 300, 0, 2000), decode_query_len=2, device=indexer.device, seed=3
    )
    problems, keys = _with_other_queries(problem, 4), problem.shard(rank)
    expected = [owned_top16(indexer, each) for each in problems]
    tokens = len(problem.index_q)
    queries = [torch.empty_like(problem.index_q) for _ in range(_LAYERS)]
    scores, _ = planes(indexer, tokens)
    outputs = [planes(indexer, tokens)[1] for _ in range(_LAYERS)]
    inputs = (problem.block_table, problem.seq_lens, problem.num_valid_pages, scores)
    results: Results = {}
    with setup.comm(indexer) as comm:
        options = {"comm": comm, "tagged": tagged, "decode_query_len": 2, "enable_pdl": enable_pdl}
        steps = [indexer.prepare_decode_step(*inputs, output, **options) for output in outputs]
        shared_output = planes(indexer, tokens)[1]
        shared_step = indexer.prepare_decode_step(*inputs, shared_output, **options)
        graphs = indexer.layer_graphs()

        def eager() -> None:
            for layer, (query, output) in enumerate(zip(queries, outputs, strict=True)):
                indexer.decode(query, keys, *inputs, output, slot=layer % NUM_SLOT_SETS, **options)

        def prepared() -> None:
            for layer, (step, query) in enumerate(zip(steps, queries, strict=True)):
                step.run(query, keys, slot=layer % NUM_SLOT_SETS)

        def layer_graphs() -> None:
            begun = graphs.begin_step(decode=shared_step, decode_tokens=tokens)
            for layer, (query, output) in enumerate(zip(queries, outputs, strict=True)):
                begun.run(layer, query, keys, slot=layer % NUM_SLOT_SETS)
                output.copy_(shared_output)

        runs = {"eager": eager, "prepared": prepared, "layer graphs": layer_graphs}
        dist.barrier()
        for way in ways_on(indexer.device.type):
            run = runs[way] if way in runs else _captured(prepared if "prepared" in way else eager, queries, problems)
            counts = Comparison()
            for step in range(_STEPS):
                for layer, query in enumerate(queries):
                    query.copy_(problems[(layer + step) % 4].index_q)
                    outputs[layer].fill_(-777)
                run()
                for layer, output in enumerate(outputs):
                    counts = counts.plus(compare(output, expected[(layer + step) % 4]))
            results[(way,)] = counts
        if indexer.device.type == "cuda":
            assert graphs.stats["replayed_layers"] == _LAYERS * (_STEPS - 2), graphs.stats
        assert int(comm.errors) == 0
        # Graphs must not outlive the storage that they store into.
        graphs.clear()
    return results


def prefill_matrix(rank: int, layout: str, names: Sequence[str], tokens: int, setup: Setup) -> Results:
    """Run every prefill case of some ``WINDOWS``, cut at ``tokens``, launched in each way, with changing queries."""
    # Enough tokens per step for four windows.
    indexer = setup.indexer(rank, LAYOUTS[layout], max_num_batched_tokens=4 * MAX_WINDOW_TOKENS, max_model_len=_LONGEST)
    scratch = torch.empty(indexer.prefill_scratch_shape(), device=indexer.device)
    pool = torch.full(indexer.prefill_pool_shape(), 255, dtype=torch.uint8, device=indexer.device)
    results: Results = {}
    for name in names:
        window = WINDOWS[name]
        problem = PrefillProblem.random(indexer.layout, **window, device=indexer.device, seed=4, page_pitch_extra=48)
        for chain in CHAINS:
            storage = (None, pool) if chain == "fused" else (scratch, None)
            found = _prefill_ways(indexer, problem, tokens, *storage)
            results.update({(name, chain, way): counts for way, counts in found})
    return results


def _prefill_ways(
    indexer: MSAIcpIndexerPlan,
    problem: PrefillProblem,
    tokens: int,
    scratch: torch.Tensor | None,
    pool: torch.Tensor | None,
) -> Iterator[tuple[str, Comparison]]:
    problems, keys = _with_other_queries(problem, 2), problem.shard(indexer.rank)
    near_tie = TENSOR_CORE_ERROR * 2 if indexer.backend == "cake" else NEAR_TIE
    expected = [owned_top16(indexer, each) for each in problems]
    query, total = problem.index_q.clone(), len(problem.index_q)
    ints = {"dtype": torch.int32, "device": indexer.device}
    send = torch.full((NUM_HEADS, total, ROW_WORDS), -777, **ints)
    received = torch.full((indexer.world_size, indexer.heads_per_rank, total, ROW_WORDS), -777, **ints)
    output = planes(indexer, total)[1]
    windows, start = [], 0
    for number, cut in enumerate(problem.windows(tokens)):
        window_plan = indexer.prefill_window_plan(number, *cut.segments, **cut.bounds)
        windows.append((start, start + len(cut.index_q), cut.block_table, window_plan))
        start += len(cut.index_q)
    step = indexer.prepare_prefill_step(windows, scratch, problem.num_valid_pages, send, received, output, pool=pool)
    graphs = indexer.layer_graphs()

    def eager() -> None:
        for begin, end, table, window_plan in windows:
            rows = (query[begin:end], keys, table, window_plan, scratch)
            indexer.prefill_local(*rows, problem.num_valid_pages[begin:end], send[:, begin:end], pool=pool)
        exchange_carriers(send, received)
        indexer.prefill_merge(received, problem.num_valid_pages, output)

    def prepared() -> None:
        step.local(query, keys)
        exchange_carriers(send, received)
        step.merge()

    def layer_graphs() -> None:
        graphs.begin_step(prefill=step, exchange=lambda: exchange_carriers(send, received)).run(0, query, keys)

    runs = {"eager": eager, "prepared": prepared, "layer graphs": layer_graphs}
    for way in ways_on(indexer.device.type)[:4]:
        run = runs[way] if way in runs else _captured(prepared)
        counts = Comparison()
        for again in range(4):
            query.copy_(problems[again % 2].index_q)
            for tensor in (send, received, output):
                tensor.fill_(-777)
            run()
            counts = counts.plus(compare(output, expected[again % 2], near_tie=near_tie))
        yield way, counts
    if indexer.device.type == "cuda":
        assert graphs.stats["replayed_layers"] == 2, graphs.stats
    graphs.clear()


def _captured(
    run: Callable[[], None], queries: list[torch.Tensor] | None = None, problems: list[Problem] | None = None
) -> Callable[[], None]:
    """Run ``run`` once with ``problems``' queries, capture it, and return the graph's replay."""
    for layer, query in enumerate(queries or []):
        query.copy_(problems[layer % len(problems)].index_q)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The process group's own threads query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _with_other_queries(problem: Any, count: int) -> list[Any]:
    """Return problems with the same cache and lengths and new random queries, equal on every rank."""
    generator = torch.Generator(problem.index_q.device).manual_seed(9)
    return [replace(problem, index_q=random_e4m3(problem.index_q.shape, generator)) for _ in range(count)]


def planes(indexer: MSAIcpIndexerPlan, tokens: int, *, strided: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return poisoned scores and output. ``strided`` ones are unaligned views of larger tensors."""
    columns, heads, more = indexer.decode_score_columns, indexer.heads_per_rank, int(strided)
    scores = torch.full((tokens, NUM_HEADS + more, columns + 3 * more), -12345.5, device=indexer.device)
    output = torch.full((tokens, heads + more, TOP_K + 3 * more), -777, dtype=torch.int32, device=indexer.device)
    return scores[:, :NUM_HEADS, more : columns + more], output[:, :heads, :TOP_K]


def decode_pool(indexer: MSAIcpIndexerPlan) -> torch.Tensor:
    """Return a pool for the fused chain, filled with a key larger than any candidate's."""
    size = msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=indexer.max_decode_tokens)
    return torch.full((size,), 255, dtype=torch.uint8, device=indexer.device)
