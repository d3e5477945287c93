# SPDX-License-Identifier: Apache-2.0
"""Measures the unsharded indexers of FlashInfer and vLLM, which users would run otherwise, in the same run.

Both are optional. A peer that is not installed, or that fails on a case, is reported and left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..layout import BLOCK_TOKENS, HEAD_DIM, MAX_QUERY_LEN, TOP_K
from ..testing.problems import random_e4m3
from .rows import CASE_KEYS, Row
from .timing import at_least_min_calls, copies_of, graph_us, many_calls

Call = Callable[[torch.Tensor], Any]
"""A step over one copy of the keys."""


class PeerShape(NamedTuple):
    """``batch`` requests of ``context`` keys on one GPU. The queries are the last ``query_len`` tokens of each."""

    batch: int
    context: int
    heads: int
    query_len: int
    cold: bool


class PeerInputs:
    """Random inputs of one shape. Keys are in 128-token pages in random order, with copies to rotate over if cold."""

    def __init__(self, shape: PeerShape) -> None:
        self.shape = shape
        batch, context, heads, query_len, cold = shape
        self.blocks = -(-context // BLOCK_TOKENS)
        self.tokens = batch * query_len
        generator = torch.Generator("cuda").manual_seed(0)
        pages = batch * self.blocks
        self.query = random_e4m3((self.tokens, heads, HEAD_DIM), generator)
        self.keys = copies_of(random_e4m3((pages, BLOCK_TOKENS, HEAD_DIM), generator), cold=cold)
        table = torch.randperm(pages, generator=generator, device="cuda", dtype=torch.int32)
        self.block_table = table.view(batch, self.blocks)
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.query_offsets = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * query_len
        self.prefix_lens = self.seq_lens - query_len
        seen = self.prefix_lens[:, None] + torch.arange(1, query_len + 1, dtype=torch.int32, device="cuda")
        self.num_valid_blocks = (seen.flatten() + BLOCK_TOKENS - 1) // BLOCK_TOKENS


@dataclass(frozen=True)
class Peer:
    """A peer's name and the functions that prepare its steps, by the job of ours that each is compared with."""

    name: str
    steps: Mapping[str, Callable[[PeerInputs], Call]]


def flashinfer_peer() -> Peer:
    """Return FlashInfer's ``msa_ops``: its proxy scorer, and its Top16 of the scorer's plane."""
    ops = importlib.import_module("flashinfer.msa_ops")

    def score(inputs: PeerInputs, plane: torch.Tensor, keys: torch.Tensor) -> None:
        ops.msa_proxy_score(
            inputs.query,
            keys.unsqueeze(1),
            inputs.query_offsets,
            page_table=inputs.block_table,
            seqused_k=inputs.seq_lens,
            max_seqlen_q=inputs.shape.query_len,
            max_k_tiles=inputs.blocks,
            output=plane,
        )

    def select(inputs: PeerInputs, plane: torch.Tensor) -> None:
        ops.msa_topk_select(
            plane, TOP_K, num_valid_pages=inputs.num_valid_blocks, force_begin_blocks=0, force_end_blocks=1
        )

    def make_plane(inputs: PeerInputs) -> torch.Tensor:
        return torch.empty(inputs.shape.heads, inputs.blocks, inputs.tokens, device="cuda")

    def score_step(inputs: PeerInputs) -> Call:
        plane = make_plane(inputs)
        return lambda keys: score(inputs, plane, keys)

    def select_step(inputs: PeerInputs) -> Call:
        plane = make_plane(inputs)
        score(inputs, plane, inputs.keys[0])
        return lambda keys: select(inputs, plane)

    def chain_step(inputs: PeerInputs) -> Call:
        plane = make_plane(inputs)

        def step(keys: torch.Tensor) -> None:
            score(inputs, plane, keys)
            select(inputs, plane)

        return step

    return Peer(
        _name("FlashInfer", "flashinfer-python"),
        {
            "decode_score": score_step,
            "decode_chain": chain_step,
            "prefill_score": score_step,
            "prefill_select": select_step,
        },
    )


def vllm_peer() -> Peer:
    """Return vLLM's Triton indexer for MiniMax-M3, whose decode scores and selects in one function."""
    ops = _vllm_indexer()

    def decode_step(inputs: PeerInputs) -> Call:
        _, context, heads, query_len, _ = inputs.shape

        def step(keys: torch.Tensor) -> None:
            ops.minimax_m3_index_decode(
                inputs.query,
                keys,
                inputs.block_table,
                inputs.seq_lens,
                context,
                TOP_K,
                0,  # forced blocks at the beginning
                1,  # forced blocks at the end
                heads,
                query_len,
                query_len,
            )

        return step

    def score(inputs: PeerInputs, keys: torch.Tensor) -> torch.Tensor:
        _, context, heads, query_len, _ = inputs.shape
        return ops.minimax_m3_index_score(
            inputs.query,
            keys,
            inputs.block_table,
            inputs.query_offsets,
            inputs.seq_lens,
            inputs.prefix_lens,
            query_len,
            context,
            heads,
        )

    def select_step(inputs: PeerInputs) -> Call:
        plane = score(inputs, inputs.keys[0])
        return lambda keys: ops.minimax_m3_index_topk(
            plane, inputs.query_offsets, inputs.prefix_lens, inputs.shape.query_len, TOP_K, 0, 1
        )

    return Peer(
        _name("vLLM", "vllm"),
        {
            "decode_chain": decode_step,
            "prefill_score": lambda inputs: lambda keys: score(inputs, keys),
            "prefill_select": select_step,
        },
    )


def _vllm_indexer() -> ModuleType:
    """Import vLLM's indexer module, or the same file as a standalone module."""
    try:
        return importlib.import_module("vllm_index_topk")
    except ModuleNotFoundError as error:
        if error.name != "vllm_index_topk":
            raise
        return importlib.import_module("vllm.models.minimax_m3.common.ops.index_topk")


def _name(title: str, distribution: str) -> str:
    try:
        return f"{title} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return title


KNOWN_PEERS: dict[str, Callable[[], Peer]] = {"FlashInfer": flashinfer_peer, "vLLM": vllm_peer}


def find_peers(report: Callable[[str], None]) -> Peers:
    """Return the peers that can be imported. ``report`` gets a message about each of the others."""
    found = []
    for title, make in KNOWN_PEERS.items():
        try:
            found.append(make())
        except Exception as error:  # whatever another package raises while it is imported
            report(f"{title} is left out, it cannot be imported: {_summary(error)}")
    return Peers(found, report)


class Peers:
    """Measures peers. Each case is measured once, and layouts of one world size share it."""

    def __init__(self, peers: Sequence[Peer], report: Callable[[str], None]) -> None:
        self._peers = peers
        self._report = report
        self._measured: dict[tuple[str, str, PeerShape], float | None] = {}
        self._told: set[tuple[str, str]] = set()

    def compare(self, row: Row, shape: PeerShape, note: str) -> Iterator[Row]:
        """Yield rows that compare ``row`` with each peer's step of the same job on ``shape``."""
        wanted = [peer for peer in self._peers if row["job"] in peer.steps]
        missing = [peer for peer in wanted if (peer.name, row["job"], shape) not in self._measured]
        if missing:
            self._measure(missing, row["job"], shape)
        for peer in wanted:
            us = self._measured[peer.name, row["job"], shape]
            if us is not None:
                case: Any = {key: value for key, value in row.items() if key in (*CASE_KEYS, "us")}
                yield {**case, "peer": peer.name, "peer_us": us, "speedup": us / row["us"], "note": note}

    def _measure(self, peers: Sequence[Peer], job: str, shape: PeerShape) -> None:
        """Measure one step of each of ``peers`` on the same inputs."""
        inputs = None
        for peer in peers:
            us = None
            if not self._never_works(peer, job):
                try:
                    inputs = inputs or PeerInputs(shape)
                    step = peer.steps[job](inputs)
                    is_decode = shape.query_len <= MAX_QUERY_LEN
                    keys = (many_calls if is_decode else at_least_min_calls)(inputs.keys)
                    us = graph_us([partial(step, key) for key in keys])
                except Exception as error:  # a peer may lack a kernel for a shape
                    self._tell(f"{peer.name} is left out of {job}", shape, error)
            self._measured[peer.name, job, shape] = us

    def _never_works(self, peer: Peer, job: str) -> bool:
        """Whether a step failed on its first two shapes. A failing build would otherwise be tried on every shape."""
        results = [us for (name, done, _), us in self._measured.items() if (name, done) == (peer.name, job)]
        return len(results) >= 2 and not any(results)

    def _tell(self, what: str, shape: PeerShape, error: Exception) -> None:
        summary = _summary(error)
        if (what, summary) not in self._told:
            self._told.add((what, summary))
            batch, context, heads, query_len, _ = shape
            case = f"batch {batch}, {context} keys, {heads} heads, query length {query_len}"
            self._report(f"{what}, first at {case}: {summary}")


def _summary(error: Exception) -> str:
    """Return the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
