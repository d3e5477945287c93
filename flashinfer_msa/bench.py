# SPDX-License-Identifier: Apache-2.0
"""Times the kernels and the ceilings they are held against, by CUDA graph replay on this machine's GPU.

Every row is a flat dictionary, one measured case. A *cold* case rotates over at least 256 MB of distinct keys inside
the captured graph, as the layers of a model do; a *warm* one repeats on the same keys.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import msa_ops
from .comm import MSAIcpComm, local_comm
from .indexer import MSAIcpIndexerPlan
from .layout import BLOCK_TOKENS, HEAD_DIM, LAYOUTS, NUM_HEADS, ROW_WORDS, TOP_K, Layout
from .score_plan import MSAIcpScorePlan
from .simulate import group_plans, random_e4m3

Row = dict[str, Any]
_COLD_BYTES = 256 << 20
_MIN_CALLS = 20
"""Calls in a graph, so that its launch does not count."""


def graph_us(calls: Sequence[Callable[[], None]], *, replays: int = 15) -> float:
    """Median microseconds of one call, when all ``calls`` are captured in one CUDA graph, in order, and replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(calls)


def at_least_min_calls(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """``inputs`` over and over, so often that a graph of a call each has at least ``_MIN_CALLS``."""
    return inputs * -(-_MIN_CALLS // len(inputs))


def _read_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def read(source, sums, count, BLOCK: tl.constexpr):
        total = tl.zeros((BLOCK,), tl.int32)
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            total += tl.load(source + start + tl.arange(0, BLOCK))
        tl.store(sums + tl.program_id(0), tl.sum(total))

    return read


def streaming_read_us(buffers: Sequence[torch.Tensor]) -> float:
    """Microseconds of a pass that reads one of ``buffers`` (uint8, multiples of 64 KiB) once: the best of a few."""
    kernel = _read_kernel()
    words = at_least_min_calls([buffer.view(torch.int32) for buffer in buffers])
    sms = torch.cuda.get_device_properties(buffers[0].device).multi_processor_count
    sums = torch.empty(sms * 16, dtype=torch.int32, device=buffers[0].device)

    def shape(block: int, programs: int) -> float:
        return graph_us(
            [lambda w=w: kernel[(sms * programs,)](w, sums, w.numel(), BLOCK=block, num_warps=8) for w in words]
        )

    return min(shape(block, programs) for block in (4096, 8192, 16384) for programs in (2, 4, 8))


def ceilings() -> Iterator[Row]:
    """What the GPU can do: reading, copying, and launching."""
    for size in (64 << 20, 1 << 30, 4 << 30):
        buffers = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")]
        if size < _COLD_BYTES:
            buffers += [buffers[0].clone() for _ in range(_COLD_BYTES // size)]
        us = streaming_read_us(buffers)
        yield {
            "job": "ceiling",
            "name": "streaming_read",
            "bytes": size,
            "us": us,
            "tb_s": size / us / 1e6,
            "cold": True,
        }
    source = torch.randint(0, 256, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # A kernel, since a copy node of a graph is another engine's and slower.
    us = graph_us([lambda: torch.add(source.view(torch.int64), 0, out=target.view(torch.int64))])
    size = 2 * source.numel()
    yield {"job": "ceiling", "name": "device_copy", "bytes": size, "us": us, "tb_s": size / us / 1e6, "cold": True}
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def multiply() -> None:
        torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    us = graph_us([multiply] * _MIN_CALLS)
    flops = 2 * size**3
    yield {"job": "ceiling", "name": "fp8_gemm", "flops": flops, "us": us, "tflops": flops / us / 1e6, "cold": False}
    one = torch.zeros(1, device="cuda")
    yield {"job": "ceiling", "name": "tiny_kernel", "us": graph_us([lambda: one.add_(1)] * 200), "cold": False}


def _with_one_buffer_of_counters(comm: MSAIcpComm) -> tuple[MSAIcpComm, torch.Tensor]:
    """``comm`` with its counters in the first row of the buffer returned, whose second row stays zero."""
    publish, expected = comm.publish_generations, comm.expected_generations
    counters = torch.zeros(2, publish.numel() + expected.numel(), dtype=torch.int32, device=publish.device)
    first, second = counters[0].split([publish.numel(), expected.numel()])
    return replace(
        comm, publish_generations=first.view_as(publish), expected_generations=second.view_as(expected)
    ), counters


@dataclass
class DecodeCase:
    """One rank's decode step: inputs for several layers, so that a graph over them reads cold keys."""

    layout: Layout
    plan: MSAIcpIndexerPlan
    comm: MSAIcpComm
    counters: torch.Tensor
    index_q: torch.Tensor
    keys: list[torch.Tensor]
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_valid_pages: torch.Tensor
    scores: torch.Tensor
    output: torch.Tensor
    query_len: int

    @classmethod
    def make(cls, layout: Layout, batch: int, context: int, query_len: int, *, cold: bool) -> DecodeCase:
        """Random keys of ``batch`` requests of ``context`` tokens, in pages in random order."""
        plans = group_plans(
            layout,
            ["cuda"],
            init_blocks=0,
            local_blocks=1,
            max_decode_tokens=batch * query_len,
            max_decode_query_len=query_len,
            max_num_batched_tokens=8192,
            max_num_seqs=batch,
            max_model_len=context,
            num_sparse_layers=4,
        )
        generator = torch.Generator("cuda").manual_seed(0)
        columns = -(-context // layout.page_size)
        pages = batch * columns
        copies = 1 + -(-_COLD_BYTES // (pages * layout.page_bytes)) if cold else 1
        keys = [random_e4m3((pages, layout.rows, HEAD_DIM), generator)]
        keys += [keys[0].view(torch.uint8).clone().view(torch.float8_e4m3fn) for _ in range(copies - 1)]
        comm, counters = _with_one_buffer_of_counters(local_comm(plans)[0])
        tokens = batch * query_len
        seen = context - query_len + 1 + torch.arange(query_len, device="cuda", dtype=torch.int32).repeat(batch)
        return cls(
            layout=layout,
            plan=plans[0],
            comm=comm,
            counters=counters,
            index_q=random_e4m3((tokens, NUM_HEADS, HEAD_DIM), generator),
            keys=keys,
            block_table=torch.randperm(pages, generator=generator, device="cuda", dtype=torch.int32).view(
                batch, columns
            ),
            seq_lens=torch.full((batch,), context, dtype=torch.int32, device="cuda"),
            num_valid_pages=(seen + BLOCK_TOKENS - 1) // BLOCK_TOKENS,
            scores=torch.empty(plans[0].decode_scores_shape(), device="cuda"),
            output=torch.empty(tokens, layout.heads_per_rank, TOP_K, dtype=torch.int32, device="cuda"),
            query_len=query_len,
        )

    @property
    def key_bytes(self) -> int:
        """Bytes of local keys that a step reads."""
        return self.keys[0].numel()

    def score(self, keys: torch.Tensor) -> None:
        """Launch the scorer alone, as the facade does: as a programmatic dependent."""
        msa_ops.msa_icp_decode_index_score_sharded(
            self.index_q,
            keys,
            self.block_table,
            self.seq_lens,
            self.scores,
            rank=0,
            world_size=self.layout.world_size,
            page_size=self.layout.page_size,
            decode_query_len=self.query_len,
            max_decode_query_len=self.query_len,
            enable_pdl=True,
        )

    def prepublish_peers(self) -> None:
        """Fill the peers' rows of slot set 0 with what this rank publishes, and arm the counters for one merge."""
        self.plan.decode_publish(
            self.index_q,
            self.keys[0],
            self.block_table,
            self.seq_lens,
            self.num_valid_pages,
            self.scores,
            comm=self.comm,
            slot=0,
            tagged=True,
            decode_query_len=self.query_len,
        )
        self.copy_rows_to_peers()
        self.rearm()

    def copy_rows_to_peers(self) -> None:
        """Let the rows that this rank published in slot set 0 stand for its peers' too."""
        self.comm.tagged_recv[0, 1:] = self.comm.tagged_recv[0, :1]

    def rearm(self) -> None:
        """Set the counters back, so that the next chain publishes and expects the generation that lies in the rows.

        One copy, which is one node of a graph.
        """
        self.counters[0].copy_(self.counters[1])

    def chain(self, keys: torch.Tensor, pool: torch.Tensor | None = None) -> None:
        """Launch score, publish and merge; with ``pool``, the fused chain."""
        self.plan.decode(
            self.index_q,
            keys,
            self.block_table,
            self.seq_lens,
            self.num_valid_pages,
            self.scores,
            self.output,
            comm=self.comm,
            slot=0,
            tagged=True,
            decode_query_len=self.query_len,
            pool=pool,
        )

    def chain_us(self, *, fused: bool = False) -> float:
        """Microseconds of the chain; the node that sets the counters back is measured alone and subtracted."""
        self.prepublish_peers()
        pool = None
        if fused:
            size = msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=len(self.index_q))
            pool = torch.empty(size, dtype=torch.uint8, device="cuda")

        def step(keys: torch.Tensor) -> None:
            self.rearm()
            self.chain(keys, pool)

        keys = at_least_min_calls(self.keys)
        whole = graph_us([lambda k=k: step(k) for k in keys])
        return whole - graph_us([self.rearm] * len(keys))


def decode_rows(
    layouts: Sequence[Layout], cases: Sequence[tuple[int, int, int]], *, cold: bool = True
) -> Iterator[Row]:
    """Scorer and chains of each ``(batch, context, query length)``, beside a streaming read of the same bytes."""
    read_us_of: dict[int, float] = {}  # by the bytes of keys
    for layout in layouts:
        for batch, context, query_len in cases:
            case = DecodeCase.make(layout, batch, context, query_len, cold=cold)
            shape = {"layout": layout.title, "batch": batch, "ctx": context, "query_len": query_len, "cold": cold}
            us = graph_us([lambda k=k, c=case: c.score(k) for k in at_least_min_calls(case.keys)])
            written = batch * query_len * NUM_HEADS * -(-context // layout.page_size) * 4
            bytes_moved = case.key_bytes + written
            if case.key_bytes not in read_us_of:
                read_us_of[case.key_bytes] = streaming_read_us([k.view(torch.uint8).flatten() for k in case.keys])
            read_us = read_us_of[case.key_bytes] * bytes_moved / case.key_bytes
            yield {
                "job": "decode_score",
                **shape,
                "us": us,
                "bytes": bytes_moved,
                "tb_s": bytes_moved / us / 1e6,
                "ceiling_ratio": read_us / us,
            }
            note = "peers' rows pre-published; a copy that sets the counters back measured alone and subtracted"
            yield {"job": "decode_chain", **shape, "us": case.chain_us(), "note": note}
            yield {"job": "decode_fused_chain", **shape, "us": case.chain_us(fused=True), "note": note}


@dataclass
class PrefillCase:
    """One rank's prefill window: inputs for several layers, so that a graph over them reads cold keys.

    ``segments`` are the query tokens of each segment and the keys that they are the last of.
    """

    layout: Layout
    segments: Sequence[tuple[int, int]]
    plan: MSAIcpIndexerPlan
    query: torch.Tensor
    keys: list[torch.Tensor]
    block_table: torch.Tensor
    lengths: tuple[torch.Tensor, ...]
    num_valid_pages: torch.Tensor
    scratch: torch.Tensor
    carrier: torch.Tensor
    output: torch.Tensor

    @classmethod
    def make(cls, layout: Layout, segments: Sequence[tuple[int, int]], *, cold: bool) -> PrefillCase:
        """Random keys in pages in random order."""
        lens, contexts = [tokens for tokens, _ in segments], [context for _, context in segments]
        tokens = sum(lens)
        plan = group_plans(
            layout,
            ["cuda"],
            init_blocks=0,
            local_blocks=1,
            max_decode_tokens=1,
            max_decode_query_len=1,
            max_num_batched_tokens=tokens,
            max_num_seqs=len(segments),
            max_model_len=max(contexts),
            num_sparse_layers=4,
        )[0]
        generator = torch.Generator("cuda").manual_seed(0)
        counts = [-(-context // layout.page_size) for context in contexts]
        copies = 1 + -(-_COLD_BYTES // (sum(counts) * layout.page_bytes)) if cold else 1
        keys = [random_e4m3((sum(counts), layout.rows, HEAD_DIM), generator)]
        keys += [keys[0].view(torch.uint8).clone().view(torch.float8_e4m3fn) for _ in range(copies - 1)]
        pages = torch.randperm(sum(counts), generator=generator, device="cuda", dtype=torch.int32)
        positions = [context - length for length, context in segments]
        offsets = [list(itertools.accumulate(values, initial=0)) for values in (lens, contexts)]
        seen = [torch.arange(p + 1, c + 1, dtype=torch.int32) for p, c in zip(positions, contexts, strict=True)]
        return cls(
            layout=layout,
            segments=segments,
            plan=plan,
            query=random_e4m3((tokens, NUM_HEADS, HEAD_DIM), generator),
            keys=keys,
            block_table=torch.nn.utils.rnn.pad_sequence(pages.split(counts), batch_first=True),
            lengths=tuple(
                torch.tensor(values, dtype=torch.int32, device="cuda")
                for values in (lens, contexts, *offsets, positions)
            ),
            num_valid_pages=(torch.cat(seen).cuda() + BLOCK_TOKENS - 1) // BLOCK_TOKENS,
            scratch=torch.empty(tokens, NUM_HEADS, plan.prefill_score_columns, device="cuda"),
            carrier=torch.empty(NUM_HEADS, tokens, ROW_WORDS, dtype=torch.int32, device="cuda"),
            output=torch.empty(tokens, plan.heads_per_rank, TOP_K, dtype=torch.int32, device="cuda"),
        )

    @property
    def shape(self) -> Row:
        """What a row says of the case."""
        tokens, context = sum(tokens for tokens, _ in self.segments), max(context for _, context in self.segments)
        return {"layout": self.layout.title, "tokens": tokens, "ctx": context, "heads": NUM_HEADS}

    @property
    def flops(self) -> float:
        """Operations of the products that the causal mask leaves to one rank."""
        pairs = sum(tokens * (context - (tokens - 1) / 2) for tokens, context in self.segments)
        return 2.0 * NUM_HEADS * HEAD_DIM * pairs / self.layout.world_size

    def make_plan(self) -> MSAIcpScorePlan:
        """Launch the planner."""
        return self.plan.prefill_window_plan(
            0,
            *self.lengths,
            total_q=len(self.query),
            max_query_len=max(tokens for tokens, _ in self.segments),
            max_seq_len=self.shape["ctx"],
        )

    def score(self, window: MSAIcpScorePlan, keys: torch.Tensor) -> None:
        """Launch the scorer alone, as the facade does."""
        msa_ops.msa_icp_index_score_sharded(
            self.query,
            keys,
            self.block_table,
            window,
            rank=0,
            max_score=self.scratch,
            initialize=False,
            tp=self.layout.world_size,
            compact=self.layout.index_scale > 1,
        )

    def select(self) -> None:
        """Launch the selection alone, as the facade does."""
        columns = -(-self.shape["ctx"] // self.layout.page_size)
        msa_ops.msa_icp_topk_select_prefill(
            self.scratch[..., :columns],
            self.num_valid_pages,
            self.carrier,
            force_end_blocks=1,
            index_scale=self.plan.index_scale,
            index_offset=self.plan.index_offset,
        )

    def local(self, window: MSAIcpScorePlan, keys: torch.Tensor) -> None:
        """Launch scorer and selection."""
        self.plan.prefill_local(
            self.query, keys, self.block_table, window, self.scratch, self.num_valid_pages, self.carrier
        )

    def merge(self) -> None:
        """Launch the merge, of this rank's own rows in place of every rank's."""
        received = self.carrier.unflatten(0, (self.layout.world_size, self.layout.heads_per_rank))
        self.plan.prefill_merge(received, self.num_valid_pages, self.output)


def prefill_rows(
    layouts: Sequence[Layout], cases: Sequence[tuple[int, int]], *, gemm_tflops: float, cold: bool = True
) -> Iterator[Row]:
    """Planner, scorer, selection, merge and their chain for each ``(tokens, context)``; the exchange is not in it.

    ``gemm_tflops`` is the ceiling: an FP8 matrix product in the same run.
    """
    for layout in layouts:
        for segment in cases:
            case = PrefillCase.make(layout, [segment], cold=cold)
            shape = {**case.shape, "cold": cold}
            keys = at_least_min_calls(case.keys)
            yield {"job": "prefill_plan", **shape, "us": graph_us([case.make_plan] * _MIN_CALLS)}
            window = case.make_plan()
            us = graph_us([lambda k=k, c=case, w=window: c.score(w, k) for k in keys])
            tflops = case.flops / us / 1e6
            speed = {"flops": case.flops, "tflops": tflops, "ceiling_ratio": tflops / gemm_tflops}
            yield {"job": "prefill_score", **shape, "us": us, **speed}
            us = graph_us([case.select] * _MIN_CALLS)
            size = 4 * NUM_HEADS * int(-(-case.num_valid_pages // case.plan.index_scale).sum())
            yield {"job": "prefill_select", **shape, "us": us, "bytes": size, "tb_s": size / us / 1e6}
            us = graph_us([case.merge] * _MIN_CALLS)
            yield {"job": "merge", **shape, "us": us, "note": "an exchanged carrier"}

            def chain(key: torch.Tensor, c: PrefillCase = case, w: MSAIcpScorePlan = window) -> None:
                c.local(w, key)
                c.merge()

            us = graph_us([lambda k=k: chain(k) for k in keys])
            yield {"job": "prefill_chain", **shape, "us": us, "note": "score, select and merge, without the exchange"}


def balance_rows(layouts: Sequence[Layout]) -> Iterator[Row]:
    """How evenly a window of one long segment and forty short ones keeps the multiprocessors busy."""
    for layout in layouts:
        case = PrefillCase.make(
            layout, [(1024, 131072), *[(100, context) for context in range(200, 8200, 200)]], cold=False
        )
        window = case.make_plan()
        whole = graph_us([lambda c=case, w=window: c.score(w, c.keys[0])] * _MIN_CALLS)
        times = []
        for index in range(len(window.packed_work_range)):
            one = torch.zeros_like(window.packed_work_range)
            one[index] = window.packed_work_range[index]
            alone = replace(window, packed_work_range=one)
            times.append(graph_us([lambda c=case, w=alone: c.score(w, c.keys[0])] * 3, replays=5))
        yield {
            "job": "prefill_score",
            "name": "ragged window",
            **case.shape,
            "us": whole,
            "flops": case.flops,
            "tflops": case.flops / whole / 1e6,
            "ceiling_ratio": statistics.mean(times) / max(times),
            "cold": False,
            "note": "1024 tokens of 128K and forty times 100 of 200 to 8000; the ratio is the mean time of a "
            "multiprocessor's range to the longest, each run alone",
        }


def selection_rows() -> Iterator[Row]:
    """Select + publish of ready scores into ready rows, and the merge of rows that have arrived."""
    for world_size in (2, 4):
        layout = LAYOUTS[f"p128_tp{world_size}"]
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
                    capacity=c.plan.max_decode_tokens,
                    force_begin_blocks=0,
                    force_end_blocks=1,
                    generations=c.comm.publish_generations,
                )

            shape = {"layout": layout.title, "tokens": tokens, "ctx": columns * BLOCK_TOKENS, "cold": False}
            size = scores.numel() * 4
            us = graph_us([publish] * 50)
            yield {"job": "select_publish", **shape, "us": us, "bytes": size, "tb_s": size / us / 1e6}

            case.comm.publish_generations.zero_()
            publish()
            case.copy_rows_to_peers()

            def merge(c: DecodeCase = case, v: torch.Tensor = valid) -> None:
                c.comm.expected_generations.zero_()
                c.plan.decode_merge(v, c.output, comm=c.comm, slot=0, tagged=True, enable_pdl=False)

            reset_us = graph_us([case.comm.expected_generations.zero_] * 50)
            us = graph_us([merge] * 50) - reset_us
            yield {
                "job": "merge",
                **shape,
                "us": us,
                "note": "a counter reset a step measured alone and subtracted",
            }


def host_rows(*, calls: int = 300) -> Iterator[Row]:
    """Host time of one eager ``decode`` call: its checks and three launches, by the wall clock."""
    case = DecodeCase.make(LAYOUTS["p128_tp4"], 32, 4096, 1, cold=False)
    case.prepublish_peers()
    times = []
    for _ in range(calls):
        case.rearm()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        case.chain(case.keys[0])
        times.append(time.perf_counter() - begin)
    yield {"job": "host", "name": "decode, 3 launches", "us": statistics.median(times) * 1e6, "cold": False}
