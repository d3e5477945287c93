# SPDX-License-Identifier: Apache-2.0
"""Prepared steps on a GPU: launch records, rebound to other queries and keys, equal the indexer's methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from prefill_windows import make_problem
from simulated_group import SMALL, Group, assert_equal

from flashinfer_msa.indexer.steps import MSAIcpDecodeStep
from flashinfer_msa.layout import LAYOUTS, ROW_WORDS, TOP_K, Layout
from flashinfer_msa.sizing import msa_icp_decode_pool_bytes
from flashinfer_msa.testing.problems import (
    TENSOR_CORE_ERROR,
    DecodeProblem,
    brute_force_top16,
    compare,
    exchange,
    random_e4m3,
)

LAYERS = 4 if SMALL else 7
LENGTHS = [900, 0, 300] if SMALL else [20000, 0, 700, 3001]
WINDOW = {"query_lens": [100, 0, 30, 41], "kv_lens": [1500, 9, 700, 41], "padding": 4}


def layers_of(problem: Any, count: int) -> list[Any]:
    """Return a problem per layer, with new queries and new keys."""
    generator = torch.Generator("cuda").manual_seed(11)
    draw = [
        replace(
            problem,
            index_q=random_e4m3(problem.index_q.shape, generator),
            pages=random_e4m3(problem.pages.shape, generator),
        )
        for _ in range(count)
    ]
    for layer in draw:
        layer.__dict__.pop("num_valid_pages", None)
    return draw


class DecodeRanks:
    """All ranks of a decode step on one GPU."""

    def __init__(self, layout: Layout, *, query_len: int, tagged: bool, fused: bool = False, **options: Any) -> None:
        self.problem = DecodeProblem.random(
            layout, seq_lens=LENGTHS, decode_query_len=query_len, device="cuda", seed=5, page_pitch_extra=32
        )
        self.layers = layers_of(self.problem, LAYERS)
        self.shards = [[layer.shard(rank) for rank in range(layout.world_size)] for layer in self.layers]
        tokens = len(self.problem.index_q)
        self.group = Group.make(layout, tokens=tokens + 2, max_model_len=max(LENGTHS))
        self.outputs = self.group.outputs(tokens)
        pool = torch.empty(msa_icp_decode_pool_bytes(max_decode_tokens=tokens), dtype=torch.uint8, device="cuda")
        self.steps: list[MSAIcpDecodeStep] = [
            indexer.prepare_decode_step(
                self.problem.block_table,
                self.problem.seq_lens,
                self.problem.num_valid_pages,
                None if fused else scores,
                output,
                comm=comm,
                tagged=tagged,
                decode_query_len=query_len,
                pool=pool if fused else None,
                **options,
            )
            for indexer, comm, output, scores in zip(
                self.group.indexers, self.group.comms, self.outputs, self.group.scores(tokens), strict=True
            )
        ]

    def run(self, layer: int, slot: int) -> None:
        """Run a layer: the other ranks' publishes, the last rank's whole chain, and the others' merges."""
        query = self.layers[layer].index_q
        *others, last = zip(self.steps, self.shards[layer], strict=True)
        for step, keys in others:
            step.publish(query, keys, slot=slot)
        last[0].run(query, last[1], slot=slot)
        for step, _ in others:
            step.merge(slot=slot)

    def require_right(self, layer: int) -> None:
        expected = brute_force_top16(self.layers[layer], init_blocks=1, local_blocks=2)
        counts = compare(torch.cat(self.outputs, dim=1), expected)
        assert counts.wrong == 0, (layer, counts)
        assert [int(comm.errors) for comm in self.group.comms] == [0] * len(self.steps)
        for output in self.outputs:
            output.fill_(-777)


@pytest.mark.parametrize("variant", ["pdl", "no pdl", "debug", "fused"])
@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_a_decode_step_serves_every_layer(layout: Layout, tagged: bool, variant: str) -> None:
    """Each layer has its own query and keys. Slot sets rotate, so launch records are rebound."""
    ranks = DecodeRanks(
        layout,
        query_len=3,
        tagged=tagged,
        fused=variant == "fused",
        enable_pdl=variant != "no pdl",
        debug=variant == "debug",
    )
    for layer in range(LAYERS):
        ranks.run(layer, layer % 3)
        ranks.require_right(layer)


@pytest.mark.parametrize("query_len", [1, 8])
def test_decode_steps_are_captured(layout: Layout, query_len: int) -> None:
    """A graph of three layers of prepared steps is captured and replayed."""
    ranks = DecodeRanks(layout, query_len=query_len, tagged=True)
    for indexer in ranks.group.indexers:
        indexer.warmup()
    outputs = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(3):
            ranks.run(layer, layer)
            outputs.append(torch.cat(ranks.outputs, dim=1))
    for _ in range(3):
        for output in outputs:
            output.fill_(-777)
        graph.replay()
        for layer, output in enumerate(outputs):
            expected = brute_force_top16(ranks.layers[layer], init_blocks=1, local_blocks=2)
            counts = compare(output, expected)
            assert counts.wrong == 0, (layer, counts)


def test_layers_unlike_the_first_are_refused() -> None:
    """The launcher checks what it rebinds, and launches nothing that it refuses."""
    ranks = DecodeRanks(LAYOUTS["p128_tp2"], query_len=2, tagged=False)
    ranks.run(0, 0)
    torch.cuda.synchronize()
    query, keys = ranks.layers[1].index_q, ranks.shards[1][0]
    before = [comm.storages[0].clone() for comm in ranks.group.comms]
    cases = {
        r"index_q must have shape .*": (query[:-2], keys),
        r"index_q must be contiguous": (torch.cat([query, query], dim=2)[..., :128], keys),
        r"index_q must be torch.float8_e4m3fn, was torch.uint8": (query.view(torch.uint8), keys),
        r"index_q must be on (a CUDA device|cuda:0 like the step), was on cpu": (query.cpu(), keys),
        r"index_q must start at an address aligned to 16 bytes": (
            torch.zeros(query.numel() + 8, dtype=torch.uint8, device="cuda")[8:].view(query.dtype).view(query.shape),
            keys,
        ),
        r"index_k must have shape .*": (query, keys[:-1]),
        r"index_k must have stride .* in dimension 0, like the step's, had .*": (query, keys.contiguous()),
        r"index_k must be torch.float8_e4m3fn, was torch.uint8": (query, keys.view(torch.uint8)),
        r"index_k must be a dense tensor, was None": (query, None),
    }
    for says, (bad_query, bad_keys) in cases.items():
        with pytest.raises(ValueError, match=f"^{says}"):
            ranks.steps[0].publish(bad_query, bad_keys, slot=0)
    torch.cuda.synchronize()
    for comm, was in zip(ranks.group.comms, before, strict=True):
        assert_equal(comm.storages[0], was, "receive storage")


@pytest.mark.parametrize(("launch", "name"), [(0, "scorer"), (1, "publisher"), (2, "merge")])
def test_debug_compares_launches(launch: int, name: str) -> None:
    """A launch record that differs from the full path's raises before anything is launched."""
    ranks = DecodeRanks(LAYOUTS["p256_tp2"], query_len=2, tagged=True, debug=True)
    step, query, keys = ranks.steps[0], ranks.layers[0].index_q, ranks.shards[0][0]
    step.publish(query, keys, slot=0)
    step.record(query, keys, slot=1)
    torch.cuda.synchronize()
    before = [comm.storages[0].clone() for comm in ranks.group.comms]
    # The launch record is the only int64 tensor. Its last 512 bytes are the last launch's parameters.
    attributes = vars(step._chains[1]).values()
    (record,) = (each for each in attributes if isinstance(each, torch.Tensor) and each.dtype == torch.int64)
    parameters = record[len(record) - (3 - launch) * 64 :]
    parameters[3] += 16
    with pytest.raises(RuntimeError, match=rf"the {name} that the step would launch is not the one"):
        step.publish(query, keys, slot=1)
    torch.cuda.synchronize()
    for comm, was in zip(ranks.group.comms, before, strict=True):
        assert_equal(comm.storages[0], was, "receive storage")


@pytest.mark.parametrize("variant", ["plain", "pooled", "debug", "captured"])
def test_a_prefill_step_serves_every_layer(layout: Layout, variant: str) -> None:
    """A step of several windows with padding. The scorer's tensor maps are rebuilt for each layer's query and keys."""
    problem = make_problem(layout, WINDOW)
    # A model so long that a step's windows have 128 tokens.
    limits = {"max_model_len": 14_000_000, "max_num_batched_tokens": 300}
    group = Group.make(layout, tokens=4, **limits)
    tokens = len(problem.index_q)
    layers = layers_of(problem, 3)
    sends, received, outputs, steps = [], [], [], []
    for indexer in group.indexers:
        indexer.warmup()
        carrier = torch.full(indexer.prefill_carrier_shape()[1:], -777, dtype=torch.int32, device="cuda")
        sends.append(carrier[:, :tokens])
        shape = (indexer.world_size, indexer.heads_per_rank, tokens, ROW_WORDS)
        received.append(torch.full(shape, -777, dtype=torch.int32, device="cuda"))
        outputs.append(torch.full((tokens, indexer.heads_per_rank, TOP_K), -777, dtype=torch.int32, device="cuda"))
        windows, start = [], 0
        for number, part in enumerate(problem.windows(96)):
            window_plan = indexer.prefill_window_plan(number, *part.segments, **part.bounds)
            windows.append((start, start + len(part.index_q), part.block_table, window_plan))
            start += len(part.index_q)
        scratch = torch.full(indexer.prefill_scratch_shape(1500), -777.0, device="cuda")
        pool = torch.full(indexer.prefill_pool_shape(), 255, dtype=torch.uint8, device="cuda")
        steps.append(
            indexer.prepare_prefill_step(
                windows,
                None if variant == "pooled" else scratch,
                problem.num_valid_pages,
                sends[-1],
                received[-1],
                outputs[-1],
                debug=variant == "debug",
                pool=pool if variant == "pooled" else None,
            )
        )
    assert len(windows) == 2

    def run(layer: Any, shards: list[torch.Tensor]) -> None:
        for step, keys in zip(steps, shards, strict=True):
            step.local(layer.index_q, keys)
        for indexer, step, into in zip(group.indexers, steps, received, strict=True):
            into.copy_(exchange(sends, indexer))
            step.merge()

    for layer in layers:
        shards = [layer.shard(indexer.rank) for indexer in group.indexers]
        for buffer in (*sends, *received, *outputs):
            buffer.fill_(-777)
        if variant == "captured":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run(layer, shards)
            graph.replay()
        else:
            run(layer, shards)
        expected = brute_force_top16(layer, init_blocks=1, local_blocks=2)
        counts = compare(torch.cat(outputs, dim=1), expected, near_tie=2 * TENSOR_CORE_ERROR)
        assert counts.wrong == 0, counts
