# SPDX-License-Identifier: Apache-2.0
"""Measures one rank's decode: the scorer, the publisher, the merge, and their chains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from .. import msa_ops
from ..comm import MSAIcpComm, local_comm
from ..indexer import MSAIcpIndexerPlan
from ..layout import BLOCK_TOKENS, HEAD_DIM, NUM_HEADS, NUM_SLOT_SETS, TOP_K, Layout, find_layout
from ..testing.problems import group_indexers, random_e4m3
from .ceilings import Ceilings
from .peers import Peers, PeerShape
from .rows import Row
from .timing import MIN_CALLS, copies_of, graph_us, many_calls


class ArmedComms:
    """Receive storage for the chains of several steps, in which the peers' rows have arrived.

    A chain advances the counters and writes its rows. One copy, which is one graph node, restores all of it.
    """

    def __init__(self, comm: MSAIcpComm, steps: int) -> None:
        """Allocate storage for ``steps`` chains. ``comm`` is of rank 0, which has published once in every slot set."""
        counters = (comm.publish_generations, comm.expected_generations)
        storage, *sizes = comm.storages[0].numel(), *(counter.numel() for counter in counters)
        words = -(-(storage + sum(sizes)) // 2) * 2  # tagged rows are 64-bit words
        self._live = torch.zeros(steps, words, dtype=torch.int32, device=comm.recv.device)
        self.comms = [self._comm(comm, row, storage, sizes) for row in self._live]
        for step in self.comms:
            step.tagged_recv[:, 1:] = comm.tagged_recv[:, :1]
        self._armed = self._live.clone()

    @staticmethod
    def _comm(comm: MSAIcpComm, words: torch.Tensor, storage: int, sizes: Sequence[int]) -> MSAIcpComm:
        rows, publish, expected = words[: storage + sum(sizes)].split([storage, *sizes])
        legacy = comm.recv.numel()
        recv, tagged = rows[:legacy].view_as(comm.recv), rows[legacy:].view(torch.int64).view_as(comm.tagged_recv)
        bases, tagged_bases = comm.recv_bases.clone(), comm.tagged_recv_bases.clone()
        bases[0], tagged_bases[0] = recv.data_ptr(), tagged.data_ptr()
        return replace(
            comm,
            recv=recv,
            tagged_recv=tagged,
            recv_bases=bases,
            tagged_recv_bases=tagged_bases,
            publish_generations=publish.view_as(comm.publish_generations),
            expected_generations=expected.view_as(comm.expected_generations),
        )

    def rearm(self) -> None:
        """Restore every step to the state in which the peers' rows have arrived and this rank's have not."""
        self._live.copy_(self._armed)


@dataclass
class DecodeCase:
    """One rank's decode step, with keys for several layers, so that a graph over them reads cold keys."""

    layout: Layout
    indexer: MSAIcpIndexerPlan
    comm: MSAIcpComm
    index_q: torch.Tensor
    keys: list[torch.Tensor]
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_valid_pages: torch.Tensor
    scores: torch.Tensor
    output: torch.Tensor
    query_len: int

    @classmethod
    def make(cls, layout: Layout, batch: int, context: int, query_len: int, *, cold: bool, rank: int = 0) -> DecodeCase:
        """Draw the keys of ``batch`` requests of ``context`` tokens, in pages in random order."""
        return cls.make_ragged(layout, [context] * batch, query_len, cold=cold, rank=rank)

    @classmethod
    def make_ragged(
        cls, layout: Layout, contexts: Sequence[int], query_len: int, *, cold: bool, rank: int = 0
    ) -> DecodeCase:
        """Draw the keys of requests of ``contexts`` tokens, in pages in random order, different on every rank."""
        batch, longest = len(contexts), max(contexts)
        indexers = group_indexers(
            layout,
            ["cuda"],
            init_blocks=0,
            local_blocks=1,
            max_decode_tokens=batch * query_len,
            max_decode_query_len=query_len,
            max_num_batched_tokens=8192,
            max_num_seqs=batch,
            max_model_len=longest,
            num_sparse_layers=4,
        )
        generator = torch.Generator("cuda").manual_seed(rank)
        counts = [-(-context // layout.page_size) for context in contexts]
        keys = copies_of(random_e4m3((sum(counts), layout.rows, HEAD_DIM), generator), cold=cold)
        pages = torch.randperm(sum(counts), generator=generator, device="cuda", dtype=torch.int32)
        tokens = batch * query_len
        seq_lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        seen = (seq_lens[:, None] + torch.arange(1 - query_len, 1, device="cuda", dtype=torch.int32)).flatten()
        return cls(
            layout=layout,
            indexer=indexers[rank],
            comm=local_comm(indexers)[rank],
            index_q=random_e4m3((tokens, NUM_HEADS, HEAD_DIM), generator),
            keys=keys,
            block_table=torch.nn.utils.rnn.pad_sequence(pages.split(counts), batch_first=True),
            seq_lens=seq_lens,
            num_valid_pages=(seen + BLOCK_TOKENS - 1) // BLOCK_TOKENS,
            scores=torch.empty(indexers[0].decode_scores_shape(), device="cuda"),
            output=torch.empty(tokens, layout.heads_per_rank, TOP_K, dtype=torch.int32, device="cuda"),
            query_len=query_len,
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes that the scorer moves: the local keys that it reads and the scores that it writes."""
        keys = self.keys[0]
        return keys.nbytes + len(keys) * self.query_len * NUM_HEADS * 4

    def score(self, keys: torch.Tensor) -> None:
        """Launch only the scorer, as a programmatic dependent like the indexer."""
        msa_ops.msa_icp_decode_index_score_sharded(
            self.index_q,
            keys,
            self.block_table,
            self.seq_lens,
            self.scores,
            rank=self.indexer.rank,
            world_size=self.layout.world_size,
            page_size=self.layout.page_size,
            decode_query_len=self.query_len,
            max_decode_query_len=self.query_len,
            enable_pdl=True,
        )

    def armed(self, steps: int) -> ArmedComms:
        """Return receive storage of ``steps`` chains, in which the peers' rows equal this rank's."""
        self.comm.publish_generations.zero_()
        for slot in range(NUM_SLOT_SETS):
            self.indexer.decode_publish(
                self.index_q,
                self.keys[0],
                self.block_table,
                self.seq_lens,
                self.num_valid_pages,
                self.scores,
                comm=self.comm,
                slot=slot,
                tagged=True,
                decode_query_len=self.query_len,
            )
        return ArmedComms(self.comm, steps)

    def copy_rows_to_peers(self) -> None:
        """Copy the rows that this rank published in slot set 0 to its peers'."""
        self.comm.tagged_recv[0, 1:] = self.comm.tagged_recv[0, :1]

    def chain(self, keys: torch.Tensor, comm: MSAIcpComm, slot: int, pool: torch.Tensor | None = None) -> None:
        """Launch score, publish and merge, or with ``pool`` the fused chain."""
        self.indexer.decode(
            self.index_q,
            keys,
            self.block_table,
            self.seq_lens,
            self.num_valid_pages,
            self.scores,
            self.output,
            comm=comm,
            slot=slot,
            tagged=True,
            decode_query_len=self.query_len,
            pool=pool,
        )

    def chain_us(self, *, fused: bool = False) -> float:
        """Return the microseconds of one of many consecutive chains, without the copy that re-arms them."""
        keys = many_calls(self.keys)
        armed = self.armed(len(keys))
        pool = None
        if fused:
            size = msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=len(self.index_q))
            pool = torch.empty(size, dtype=torch.uint8, device="cuda")

        def call(k: torch.Tensor, comm: MSAIcpComm) -> Callable[[], None]:
            # A call runs once and is then captured. Each time it needs another slot set: none may repeat in a row.
            slots = itertools.cycle(range(NUM_SLOT_SETS))
            return lambda: self.chain(k, comm, next(slots), pool)

        chains = [call(k, comm) for k, comm in zip(keys, armed.comms, strict=True)]
        calls = [armed.rearm, *chains]
        return (graph_us(calls) * len(calls) - graph_us([armed.rearm] * MIN_CALLS)) / len(chains)


class DecodeShape(NamedTuple):
    """``batch`` requests of ``context`` tokens each, whose last ``query_len`` tokens are this step's."""

    batch: int
    context: int
    query_len: int
    cold: bool

    def row(self, layout: Layout) -> Row:
        """Return the keys of a row that describe the shape on ``layout``."""
        return {
            "layout": layout.title,
            "batch": self.batch,
            "ctx": self.context,
            "query_len": self.query_len,
            "cold": self.cold,
        }


DECODE_SHAPES = [
    DecodeShape(batch, context, query_len, cold)
    for cold in (True, False)
    for batch, context, query_len in (
        (1, 8 << 10, 1),
        (1, 128 << 10, 1),
        (1, 1 << 20, 1),
        (128, 8 << 10, 1),
        (8, 128 << 10, 1),
        (32, 128 << 10, 1),
        (32, 128 << 10, 4),
        (32, 128 << 10, 8),
        (64, 128 << 10, 1),
        (256, 32 << 10, 1),
    )
    if cold or query_len == 1
]
"""Default shapes. Warm ones are measured only if their keys fit into the L2 cache."""

SCORE, CHAINS = "decode_score", ("decode_chain", "decode_fused_chain")


def decode_rows(
    layout: Layout, shape: DecodeShape, jobs: Collection[str], ceilings: Ceilings, peers: Peers | None = None
) -> Iterator[Row]:
    """Measure those of scorer and chains that ``jobs`` names, and compare them with ``peers``.

    The scorer is also compared with a streaming read of the same bytes.
    """
    case = DecodeCase.make(layout, *shape[:3], cold=shape.cold)
    batch, context, query_len, cold = shape
    common = shape.row(layout)
    unsharded = PeerShape(batch, context, layout.heads_per_rank, query_len, cold)
    rows: list[Row] = []
    if SCORE in jobs:
        rows.append({"job": SCORE, **common, **_score_figures(case, ceilings)})
    note = "peers' rows pre-published; a copy that re-arms all chains of a replay is measured separately and subtracted"
    for job in CHAINS:
        if job in jobs:
            rows.append({"job": job, **common, "us": case.chain_us(fused=job == CHAINS[1]), "note": note})
    del case
    for row in rows:
        yield row
        if peers is None or row["job"] == CHAINS[1]:
            continue
        if row["job"] == SCORE:
            shard = -(-context // layout.world_size)
            if shard < query_len:
                continue  # peers have no such shape
            note = f"their scorer on as many key bytes: {shard} keys a request, {layout.heads_per_rank} heads"
            yield from peers.compare(row, unsharded._replace(context=shard), note)
        else:
            note = f"theirs without shards: all keys, {layout.heads_per_rank} heads"
            yield from peers.compare(row, unsharded, note)


def _score_figures(case: DecodeCase, ceilings: Ceilings) -> Row:
    """Return the scorer's time, and its share of the rate of a streaming pass over the same bytes."""
    us = graph_us([partial(case.score, key) for key in many_calls(case.keys)])
    read_us = ceilings.read_us(case.keys) * case.moved_bytes / case.keys[0].nbytes
    return {"us": us, "bytes": case.moved_bytes, "tb_s": case.moved_bytes / us / 1e6, "ceiling_ratio": read_us / us}


def ragged_rows(layout: Layout, ceilings: Ceilings) -> Iterator[Row]:
    """Measure how evenly a batch of one long and many short requests uses the multiprocessors."""
    contexts = [1 << 20] + [4 << 10] * 63
    case = DecodeCase.make_ragged(layout, contexts, 1, cold=True)
    yield {
        "job": SCORE,
        "name": "ragged batch",
        **DecodeShape(len(contexts), max(contexts), 1, True).row(layout),
        **_score_figures(case, ceilings),
        "note": "one request of 1M tokens among 63 of 4K",
    }


def selection_rows(layouts: Sequence[Layout]) -> Iterator[Row]:
    """Measure select + publish of ready scores into free rows, and the merge of rows that have arrived.

    Only the layout's number of ranks matters here, so P128 stands for both page sizes.
    """
    for world_size in sorted({layout.world_size for layout in layouts}):
        layout = find_layout(BLOCK_TOKENS, world_size)
        for tokens, columns in ((64, 1024), (256, 1024), (256, 8192)):
            case = DecodeCase.make(layout, tokens, 4 * BLOCK_TOKENS, 1, cold=False)
            scores = torch.randn(tokens, NUM_HEADS, columns, device="cuda")
            valid = torch.full((tokens,), columns, dtype=torch.int32, device="cuda")

            def publish(c: DecodeCase = case, s: torch.Tensor = scores, v: torch.Tensor = valid) -> None:
                msa_ops.msa_icp_topk_select_publish(
                    s,
                    v,
                    c.comm.tagged_recv_bases,
                    c.comm.errors,
                    slot=0,
                    rank=0,
                    world_size=c.layout.world_size,
                    heads_per_rank=c.layout.heads_per_rank,
                    capacity=c.indexer.max_decode_tokens,
                    force_begin_blocks=0,
                    force_end_blocks=1,
                    generations=c.comm.publish_generations,
                )

            shape: Row = {"layout": layout.title, "tokens": tokens, "ctx": columns * BLOCK_TOKENS, "cold": False}
            size = scores.numel() * 4
            us = graph_us([publish] * 50)
            yield {"job": "select_publish", **shape, "us": us, "bytes": size, "tb_s": size / us / 1e6}

            case.comm.publish_generations.zero_()
            publish()
            case.copy_rows_to_peers()

            def merge(c: DecodeCase = case, v: torch.Tensor = valid) -> None:
                c.comm.expected_generations.zero_()
                # The indexer would refuse a slot set that repeats in a row.
                msa_ops.msa_icp_merge_candidates(
                    c.comm.tagged_recv[0],
                    v,
                    c.output,
                    c.comm.errors,
                    init_blocks=0,
                    local_blocks=1,
                    expected_generations=c.comm.expected_generations[0],
                )

            reset_us = graph_us([case.comm.expected_generations.zero_] * 50)
            us = graph_us([merge] * 50) - reset_us
            yield {
                "job": "merge",
                **shape,
                "us": us,
                "note": "one counter reset per step is measured separately and subtracted",
            }
