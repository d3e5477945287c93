# SPDX-License-Identifier: Apache-2.0
"""Every argument check: a bad argument raises a ``ValueError`` that names it, before anything is written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashinfer_msa import msa_ops
from flashinfer_msa.comm import MSAIcpComm, local_comm
from flashinfer_msa.layout import LAYOUTS
from flashinfer_msa.prefill import tuning as prefill_tuning
from flashinfer_msa.prefill.tuning import PrefillTuning
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.sizing import max_items
from flashinfer_msa.testing.problems import DecodeProblem, PrefillProblem

E4M3 = torch.float8_e4m3fn
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e5m2,
    E4M3,
)
INT32_MAX = 2**31 - 1
LIMITS: dict[str, Any] = {
    "world_size": 2,
    "rank": 0,
    "num_index_heads": 4,
    "page_size": 128,
    "init_blocks": 1,
    "local_blocks": 2,
    "max_decode_tokens": 8,
    "max_decode_query_len": 3,
    "max_num_batched_tokens": 100,
    "max_num_seqs": 3,
    "max_model_len": 1000,
    "num_sparse_layers": 3,
    "device": "cpu",
    "spin_limit": 7,
    "backend": "torch",
}


# --- calls ------------------------------------------------------------------------------------------------------------


def image(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, as a view."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors with memory among ``values``, and those of receive storage and of plans."""
    for value in values:
        if isinstance(value, MSAIcpComm):
            yield from tensors_in([getattr(value, rule.name) for rule in COMM_RULES])
        elif isinstance(value, MSAIcpScorePlan):
            yield from tensors_in(list(vars(value).values()))
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu":
            yield value


@dataclass
class Call:
    """A call of a public function with valid arguments, and all that it can write."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    watched: list[Any] = field(default_factory=list)

    def __call__(self, **changes: Any) -> Any:
        return self.function(**self.changed(changes))

    def __getitem__(self, argument: str) -> Any:
        """An argument by its name, or a field of a plan by ``argument.field``."""
        name, _, part = argument.partition(".")
        return getattr(self.arguments[name], part) if part else self.arguments[name]

    def changed(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The arguments with ``changes``, by the names that ``[]`` takes."""
        values = dict(self.arguments)
        for argument, value in changes.items():
            name, _, part = argument.partition(".")
            values[name] = replace(values[name], **{part: value}) if part else value
        return values

    def images(self, **changes: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes that the call with ``changes`` can reach, and copies; only the first MiB of a planner's scratch."""
        reach = tensors_in([*self.changed(changes).values(), *self.arguments.values(), *self.watched])
        return [(image(tensor)[: 1 << 20], image(tensor)[: 1 << 20].clone()) for tensor in reach]

    def fault(self, says: str, **changes: Any) -> str:
        """What differs from a ``ValueError`` of the whole text ``says`` with nothing written, or an empty text."""
        before = self.images(**changes)
        try:
            self(**changes)
            fault = f"raised nothing instead of a ValueError that says {says!r}"
        except ValueError as error:
            fault = "" if re.fullmatch(says, str(error), re.DOTALL) else f"said {str(error)!r} instead of {says!r}"
        except Exception as error:
            fault = f"raised {error!r} instead of a ValueError that says {says!r}"
        if not fault and not all(torch.equal(now, then) for now, then in before):
            fault = "wrote something before it raised"
        if fault:
            # The call may have run, so later cases get a fresh one.
            refusing.cache_clear()
        return fault

    def refuses(self, says: str, **changes: Any) -> None:
        """Assert a ``ValueError`` whose whole text matches ``says``, and that nothing was written."""
        fault = self.fault(says, **changes)
        assert not fault, fault


def assert_no_faults(faults: Iterable[tuple[str, str]]) -> None:
    """Assert that every ``(case, fault)`` has an empty fault; the failure lists every case that has one."""
    found = [f"{case}: {fault}" for case, fault in faults if fault]
    assert not found, "\n".join(found)


def problem_of(layout: str, tokens: int, query_len: int) -> DecodeProblem:
    lengths = [300 - 70 * request for request in range(tokens // query_len)]
    return DecodeProblem.random(LAYOUTS[layout], seq_lens=lengths, decode_query_len=query_len)


@cache
def planner_scratch() -> torch.Tensor:
    """Scratch that all planners share. The reference does not use it."""
    return torch.zeros(32 << 20, dtype=torch.uint8)


def window_of(layout: str, tokens: int) -> PrefillProblem:
    """A window of ``tokens`` query tokens in at most three segments, one of them empty."""
    lens = (1, 0, tokens - 1) if tokens > 1 else (1,) * tokens
    kv_lens = (300, 9, 530)[: len(lens)]
    # A window has at least one row.
    return PrefillProblem.random(LAYOUTS[layout], query_lens=lens, kv_lens=kv_lens, padding=0 if tokens else 1)


def make_plan_call(problem: PrefillProblem) -> Call:
    """A valid call of the device planner, with room for no more items than its bounds allow."""
    bounds = problem.bounds
    items = max_items(bounds["total_q"], len(problem.query_lens))
    names = ("qo_segment_lens", "kv_segment_lens", "qo_segment_offsets", "kv_segment_offsets", "qo_offset")
    arguments = {
        **dict(zip(names, problem.segments, strict=True)),
        "num_qo_heads": 4,
        **bounds,
        "packed_work_range": torch.full((1,), -1),
        "packed_work_info": torch.full((items,), -1),
        "workspace": planner_scratch(),
        "backend": "torch",
    }
    return Call(msa_ops.msa_icp_index_score_sharded_plan_device, arguments)


def make_prefill_call(operation: str, layout: str, tokens: int) -> Call:
    """A valid call of a prefill operation."""
    problem = window_of(layout, tokens)
    shape, owned = problem.layout, problem.layout.heads_per_rank
    limits = {**LIMITS, "world_size": shape.world_size, "page_size": shape.page_size}
    indexer = msa_ops.prepare_msa_icp_indexer(**limits)
    planner = make_plan_call(problem)
    if operation == "plan":
        return planner
    if operation == "window_plan":
        names = [rule.name for rule in SEGMENTS]
        arguments = {"window": 0, **{name: planner[name] for name in (*names, *problem.bounds)}}
        storage = [indexer._work_range, indexer._work_info, indexer._workspace]
        return Call(indexer.prefill_window_plan, arguments, storage)
    plan = planner()
    valid = problem.num_valid_pages[:tokens]
    keys, table = problem.shard(0), problem.block_table
    plane = torch.full((plan.total_q, 4, plan.columns), 5.0)
    if operation == "prefill_score":
        arguments = {
            "q": problem.index_q,
            "k": keys,
            "block_table": table,
            "plan": plan,
            "rank": 0,
            "max_score": plane,
            "sm_scale": 0.5,
            "initialize": True,
            "tp": shape.world_size,
            "compact": False,
            "enable_pdl": False,
            "backend": "torch",
        }
        return Call(msa_ops.msa_icp_index_score_sharded, arguments)
    rows = torch.full((4, plan.total_q, 33), -7, dtype=torch.int32)
    pool = torch.full((max_items(plan.total_q, plan.batch) * 32 << 10,), 255, dtype=torch.uint8)
    if operation == "fused":
        arguments = {
            "q": problem.index_q,
            "k": keys,
            "block_table": table,
            "plan": plan,
            "num_valid_pages": problem.num_valid_pages,
            "pool": pool,
            "carrier": rows,
            "rank": 0,
            "tp": shape.world_size,
            "compact": shape.index_scale > 1,
            "force_begin_blocks": 1,
            "force_end_blocks": 2,
            "enable_pdl": False,
            "backend": "torch",
        }
        return Call(msa_ops.msa_icp_prefill_score_select, arguments)
    if operation in ("local", "fused_local"):
        arguments = {
            "query": problem.index_q,
            "index_k": keys,
            "block_table": table,
            "window_plan": plan,
            "score_scratch": plane if operation == "local" else None,
            "num_valid_pages": problem.num_valid_pages,
            "carrier_view": rows,
            "pool": pool if operation == "fused_local" else None,
        }
        return Call(indexer.prefill_local, arguments)
    draw = torch.Generator().manual_seed(0)
    arguments = {
        "num_valid_pages": valid,
        "carrier": torch.full((4, tokens, 33), -7, dtype=torch.int32),
        "force_begin_blocks": 1,
        "force_end_blocks": 2,
        "index_scale": 1,
        "index_offset": 0,
        "backend": "torch",
    }
    select = Call(msa_ops.msa_icp_topk_select_prefill, arguments)
    if operation == "select_prefill":
        arguments["scores"] = torch.randn(tokens, 4, 7, generator=draw)
        return select
    received = torch.zeros(shape.world_size, owned, tokens, 33, dtype=torch.int32)
    for rows in received:
        select(scores=torch.randn(tokens, 4, 7, generator=draw))
        rows.copy_(arguments["carrier"][:owned])
    output = torch.full((tokens, owned, 16), -7, dtype=torch.int32)
    if operation == "prefill_merge":
        merge = {"received": received, "num_valid_pages": valid, "output": output}
        return Call(indexer.prefill_merge, merge)
    arguments = {
        "recv_slot": received,
        "num_valid_pages": valid,
        "output": output,
        "errors": torch.zeros(2, dtype=torch.int32),
        "init_blocks": 1,
        "local_blocks": 2,
        "spin_limit": 7,
        "enable_pdl": False,
        "prefill": True,
        "backend": "torch",
    }
    return Call(msa_ops.msa_icp_merge_candidates, arguments)


def make_call(name: str, layout: str = "p128_tp2", tokens: int = 4, query_len: int = 2, capacity: int = 8) -> Call:
    """A valid call: ``name`` is the operation, with a trailing ``+`` for tagged rows."""
    if name in PREFILL_CALLS:
        return make_prefill_call(name, layout, tokens)
    operation, tagged = name.rstrip("+"), name.endswith("+")
    problem = problem_of(layout, tokens, query_len)
    shape, owned = problem.layout, problem.layout.heads_per_rank
    limits = {**LIMITS, "world_size": shape.world_size, "page_size": shape.page_size, "max_decode_tokens": capacity}
    indexers = [msa_ops.prepare_msa_icp_indexer(**{**limits, "rank": rank}) for rank in range(shape.world_size)]
    comms = local_comm(indexers)
    score = {
        "index_q": problem.index_q,
        "index_k": problem.shard(0),
        "block_table": problem.block_table,
        "seq_lens": problem.seq_lens,
    }
    valid, output = problem.num_valid_pages, torch.full((tokens, owned, 16), -7, dtype=torch.int32)
    plane = torch.full((tokens, 4, math.ceil(max(problem.block_table.shape[1], 1) / 4) * 4), 5.0)
    common = {"comm": comms[0], "slot": 1, "tagged": tagged, "enable_pdl": False}
    if operation == "score":
        numbers = {
            "rank": 0,
            "world_size": shape.world_size,
            "page_size": shape.page_size,
            "decode_query_len": query_len,
            "max_decode_query_len": 3,
        }
        arguments = {**score, "score_out": plane, **numbers, "enable_pdl": False, "backend": "torch"}
        return Call(msa_ops.msa_icp_decode_index_score_sharded, arguments)
    if operation == "publish":
        arguments = {
            "scores": plane,
            "num_valid_pages": valid,
            "recv_bases": comms[0].tagged_recv_bases if tagged else comms[0].recv_bases,
            "errors": torch.zeros(2, dtype=torch.int32),
            "slot": 1,
            "rank": 0,
            "world_size": shape.world_size,
            "heads_per_rank": owned,
            "capacity": capacity,
            "force_begin_blocks": 1,
            "force_end_blocks": 2,
            "spin_limit": 7,
            "enable_pdl": False,
            "generations": comms[0].publish_generations if tagged else None,
            "index_scale": shape.index_scale,
            "index_offset": 0,
            "backend": "torch",
        }
        return Call(msa_ops.msa_icp_topk_select_publish, arguments, list(comms))
    if operation in ("merge", "decode_merge", "decode"):
        # What the other ranks send.
        sender = make_call("publish+" if tagged else "publish", layout, tokens, query_len, capacity)
        senders = range(1 if operation == "decode" else 0, shape.world_size)
        for rank in senders if tokens else ():
            bases = comms[rank].tagged_recv_bases if tagged else comms[rank].recv_bases
            counters = comms[rank].publish_generations if tagged else None
            sender(rank=rank, recv_bases=bases, generations=counters)
    if operation == "merge":
        arguments = {
            "recv_slot": (comms[0].tagged_recv if tagged else comms[0].recv)[1],
            "num_valid_pages": valid,
            "output": output,
            "errors": torch.zeros(2, dtype=torch.int32),
            "init_blocks": 1,
            "local_blocks": 2,
            "spin_limit": 7,
            "enable_pdl": False,
            "expected_generations": comms[0].expected_generations[1] if tagged else None,
            "prefill": False,
            "backend": "torch",
        }
        return Call(msa_ops.msa_icp_merge_candidates, arguments, list(comms))
    if operation == "decode_merge":
        merge = {"num_valid_pages": valid, "output": output}
        return Call(indexers[0].decode_merge, {**merge, **common}, list(comms))
    arguments = {**score, "num_valid_pages": valid, "scores": plane, **common, "decode_query_len": query_len}
    if operation == "decode":
        return Call(indexers[0].decode, {**arguments, "output": output}, list(comms))
    return Call(indexers[0].decode_publish, arguments, list(comms))


@cache
def refusing(name: str) -> Call:
    """A valid call for tests that only see it refuse. Refusals write nothing, so they share it until one fails."""
    return make_call(name)


CALLS = ("score", "publish", "publish+", "merge", "merge+")
CALLS += ("decode", "decode+", "decode_publish", "decode_publish+", "decode_merge", "decode_merge+")
PREFILL_FUNCTIONS = ("plan", "prefill_score", "select_prefill", "fused", "exchanged")
PREFILL_CALLS = (*PREFILL_FUNCTIONS, "window_plan", "local", "fused_local", "prefill_merge")
CALLS += PREFILL_CALLS


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_base_calls_are_valid(name: str, layout: str) -> None:
    call = make_call(name, layout)
    before = call.images()
    call()
    assert not all(torch.equal(now, then) for now, then in before), "the call wrote nothing"


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What a tensor argument must be. ``sized`` axes are checked against other arguments, and each slice of a ``rows``
    axis must end before the next begins, unless the axes may come in ``any_order``. The stride of a ``single`` element
    is free."""

    name: str
    dtype: torch.dtype
    rank: int
    contiguous: bool = True
    sized: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    aligned: bool = False
    optional: bool = False
    any_order: bool = False
    single: bool = False


def score_rules(plane: str) -> tuple[Rule, ...]:
    return (
        Rule("index_q", E4M3, 3, sized=(0, 1, 2), aligned=True),
        Rule("index_k", E4M3, 3, contiguous=False, sized=(1, 2), rows=(0,), aligned=True),
        Rule("block_table", torch.int32, 2, contiguous=False, sized=(0,), rows=(0,)),
        Rule("seq_lens", torch.int32, 1),
        Rule(plane, torch.float32, 3, contiguous=False, sized=(0, 1) if plane == "score_out" else (1,), rows=(0, 1)),
    )


VALID = Rule("num_valid_pages", torch.int32, 1, sized=(0,))
ERRORS = Rule("errors", torch.int32, 1)
OUTPUT = Rule("output", torch.int32, 3, contiguous=False, sized=(0, 1, 2), rows=(0, 1), any_order=True)
PUBLISH = (
    Rule("scores", torch.float32, 3, contiguous=False, sized=(1,), rows=(0, 1)),
    VALID,
    Rule("recv_bases", torch.int64, 1, sized=(0,)),
    ERRORS,
)
RECV = Rule("recv_slot", torch.int32, 4, contiguous=False, sized=(0, 1, 3), rows=(0, 1, 2), any_order=True)
ANY_VALID = replace(VALID, sized=())  # its length is the number of tokens
SEGMENTS = (
    Rule("qo_segment_lens", torch.int32, 1),  # its length is the number of segments
    Rule("kv_segment_lens", torch.int32, 1, sized=(0,)),
    Rule("qo_segment_offsets", torch.int32, 1, sized=(0,)),
    Rule("kv_segment_offsets", torch.int32, 1, sized=(0,)),
    Rule("qo_offset", torch.int32, 1, sized=(0,)),
)
PLAN = (
    *SEGMENTS,
    Rule("packed_work_range", torch.int64, 1, sized=(0,), single=True),
    Rule("packed_work_info", torch.int64, 1),
    Rule("workspace", torch.uint8, 1, aligned=True),
)
CARRIER = Rule("carrier", torch.int32, 3, contiguous=False, sized=(0, 1, 2), rows=(0, 1))
POOL = Rule("pool", torch.uint8, 1, aligned=True)


def prefill_rules(query: str, keys: str, plan: str) -> tuple[Rule, ...]:
    return (
        Rule(query, E4M3, 3, sized=(0, 1, 2), aligned=True),
        Rule(keys, E4M3, 3, contiguous=False, sized=(1, 2), rows=(0,), aligned=True),
        Rule("block_table", torch.int32, 2, contiguous=False, sized=(0,), rows=(0,)),
        *(replace(rule, name=f"{plan}.{rule.name}") for rule in PLAN),
    )


RULES: dict[str, tuple[Rule, ...]] = {
    "score": score_rules("score_out"),
    "publish": PUBLISH,
    "publish+": (*PUBLISH, Rule("generations", torch.int32, 3, sized=(0, 1, 2), optional=True)),
    "merge": (RECV, ANY_VALID, OUTPUT, ERRORS),
    "merge+": (
        replace(RECV, dtype=torch.int64),
        ANY_VALID,
        OUTPUT,
        ERRORS,
        Rule("expected_generations", torch.int32, 2, sized=(0, 1), optional=True),
    ),
    "decode": (*score_rules("scores"), VALID, OUTPUT),
    "decode+": (*score_rules("scores"), VALID, OUTPUT),
    "decode_publish": (*score_rules("scores"), VALID),
    "decode_merge": (ANY_VALID, OUTPUT),
    "plan": PLAN,
    "prefill_score": (
        *prefill_rules("q", "k", "plan"),
        Rule("max_score", torch.float32, 3, contiguous=False, sized=(0, 1), rows=(0, 1)),
    ),
    "select_prefill": (Rule("scores", torch.float32, 3, contiguous=False, sized=(1,), rows=(0, 1)), VALID, CARRIER),
    "fused": (*prefill_rules("q", "k", "plan"), VALID, POOL, CARRIER),
    "exchanged": (RECV, ANY_VALID, OUTPUT, ERRORS),
    "window_plan": SEGMENTS,
    "local": (
        *prefill_rules("query", "index_k", "window_plan"),
        Rule("score_scratch", torch.float32, 3, contiguous=False, sized=(1,), rows=(0, 1)),
        VALID,
        replace(CARRIER, name="carrier_view"),
    ),
    # Without a pool, the scratch is required.
    "fused_local": (VALID, replace(POOL, optional=True), replace(CARRIER, name="carrier_view")),
    "prefill_merge": (replace(RECV, name="received"), ANY_VALID, OUTPUT),
}
COMM_RULES = (
    Rule("recv", torch.int32, 5),
    Rule("tagged_recv", torch.int64, 5),
    Rule("recv_bases", torch.int64, 1),
    Rule("tagged_recv_bases", torch.int64, 1),
    Rule("publish_generations", torch.int32, 3),
    Rule("expected_generations", torch.int32, 3),
    Rule("errors", torch.int32, 1),
)


def named(value: str | Rule) -> str:
    """The id of a parameter."""
    return value.name if isinstance(value, Rule) else value


Mutation = Callable[[torch.Tensor], tuple[Any, str]]


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory is only mapped where it is touched: scratch is large, and a refused call reads none of it."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(*shape)


def listed(values: Sequence[int]) -> str:
    """A shape or strides as a message writes them, as a pattern."""
    return re.escape(f"[{', '.join(map(str, values))}]")


def laid_out(tensor: torch.Tensor, strides: Sequence[int], skip_bytes: int = 0) -> torch.Tensor:
    """``tensor`` with other strides, ``skip_bytes`` past an aligned address; its content too where nothing overlaps."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    storage = torch.full((64 + skip_bytes + (last + 1) * tensor.element_size() + 64,), 0x55, dtype=torch.uint8)
    start = -storage.data_ptr() % 64 + skip_bytes
    room = (last + 1) * tensor.element_size()
    view = storage[start : start + room].view(tensor.dtype).as_strided(tensor.shape, tuple(strides))
    if len(image(view)) >= tensor.numel() * tensor.element_size() and 0 not in strides:
        view.copy_(tensor)
    return view


def strided(tensor: torch.Tensor, axis: int, stride: int) -> torch.Tensor:
    """``tensor`` with one stride replaced."""
    strides = list(tensor.contiguous().stride())
    strides[axis] = stride
    return laid_out(tensor, strides)


def resized(tensor: torch.Tensor, axis: int, change: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[axis] += change
    return torch.zeros(shape, dtype=tensor.dtype)


def mutations(rule: Rule) -> Iterator[tuple[str, Mutation]]:
    """Everything that can be wrong with a tensor argument: a name, and what makes a bad value and its error."""
    for dtype in DTYPES:
        if dtype is not rule.dtype:
            says = re.escape(f"must be {rule.dtype}, was {dtype}")
            yield str(dtype), lambda t, dtype=dtype, says=says: (zeros(t.shape, dtype), says)

    def ranked(change: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
        def mutate(t: torch.Tensor) -> tuple[Any, str]:
            value = change(t)
            wrong = r"\[\]" if value.dim() == 0 else listed(value.shape)
            return value, f"must have {rule.rank} dimensions?, had shape {wrong}"

        return mutate

    yield "a dimension more", ranked(lambda t: t[None])
    yield "a dimension less", ranked(lambda t: t[0])
    for axis in rule.sized:
        for change in (-1, 1):

            def mutate(t: torch.Tensor, axis: int = axis, change: int = change) -> tuple[Any, str]:
                value = resized(t, axis, change)
                return value, f"must have .*(was|had shape) {listed(value.shape)}"

            yield f"size {change:+} in dimension {axis}", mutate

    def layout_of(value: torch.Tensor) -> str:
        return f"had shape {listed(value.shape)} and strides {listed(value.stride())}"

    def spread(t: torch.Tensor) -> tuple[Any, str]:
        value = zeros((*t.shape[:-1], 2 * t.shape[-1]), t.dtype)[..., ::2]
        want = "be contiguous" if rule.contiguous else "have stride 1 in its last dimension"
        return value, f"must {want}, {layout_of(value)}"

    def repeated(t: torch.Tensor) -> tuple[Any, str]:
        value = t[..., :1].expand(t.shape)
        want = "be contiguous" if rule.contiguous else "have stride 1 in its last dimension"
        return value, f"must {want}, {layout_of(value)}"

    if not rule.single:
        yield "every second element", spread
        yield "one element repeated", repeated
    if rule.contiguous and rule.rank > 1:

        def padded(t: torch.Tensor) -> tuple[Any, str]:
            value = torch.zeros(*t.shape[:-1], t.shape[-1] + 4).to(t.dtype)[..., :-4]
            return value, f"must be contiguous, {layout_of(value)}"

        def transposed(t: torch.Tensor) -> tuple[Any, str]:
            value = torch.zeros(t.shape[::-1]).to(t.dtype).permute(*range(t.dim())[::-1])
            return value, f"must be contiguous, {layout_of(value)}"

        yield "padded rows", padded
        yield "transposed", transposed

    def disjoint(need: object, axis: int) -> str:
        return "rows that do not overlap" if rule.any_order else f"a stride of at least {need} in dimension {axis} .*"

    for axis in rule.rows:

        def overlapping(t: torch.Tensor, axis: int = axis) -> tuple[Any, str]:
            need = t.contiguous().stride(axis)
            value = strided(t, axis, need - 16 if rule.aligned else need - 1)
            return value, f"must have {disjoint(need, axis)}, {layout_of(value)}"

        def expanded(t: torch.Tensor, axis: int = axis) -> tuple[Any, str]:
            value = t.narrow(axis, 0, 1).expand(t.shape)
            return value, f"must have {disjoint('[0-9]+', axis)}, {layout_of(value)}"

        yield f"overlap in dimension {axis}", overlapping
        yield f"one slice repeated in dimension {axis}", expanded
    if rule.aligned:
        for skip in (1, 8):
            says = "must start at an address aligned to 16 bytes, was at 0x[0-9a-f]+"
            yield f"{skip} bytes off", lambda t, skip=skip, says=says: (laid_out(t, t.stride(), skip), says)

    yield "meta", lambda t: (t.to("meta"), "must be .*, was .*meta.*")
    yield "sparse", lambda t: (torch.zeros(t.shape, layout=torch.sparse_coo), "must be .*, was .*sparse.*")
    if rule.dtype is not E4M3:
        yield "numpy", lambda t: (zeros(t.shape, t.dtype).numpy(), "must be .*tensor.*, was .*")
    others: tuple[tuple[Any, str], ...] = (
        ([1, 2], "a list or tuple"),
        ("words", ".*words.*"),
        (7, "7"),
        (1.5, "the float 1.5"),
        (True, "True"),
        (object(), "an object.*"),
    )
    if not rule.optional:
        others += ((None, "None"),)
    for value, words in others:
        yield type(value).__name__, lambda t, value=value, words=words: (value, f"must be a dense tensor, was {words}")


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, rules in RULES.items() for rule in rules], ids=named)
def test_bad_tensors_are_refused(name: str, rule: Rule) -> None:
    faults = []
    for what, mutate in mutations(rule):
        call = refusing(name)
        value, says = mutate(call[rule.name])
        faults.append((what, call.fault(f"{re.escape(rule.name)} {says}", **{rule.name: value})))
    assert_no_faults(faults)


ODD_TENSORS: tuple[tuple[str, str, Callable[[dict[str, Any]], Any], str], ...] = (
    ("score", "index_k", lambda a: strided(a["index_k"], 0, 8200), "index_k must .* multiple of 16.*8200.*"),
    ("score", "index_k", lambda a: strided(a["index_k"], 1, 144), "index_k must have dense rows .*128.*, had .*144.*"),
    ("score", "index_k", lambda a: strided(a["index_k"], 1, 0), "index_k must have dense rows .*128.*, had .*0.*"),
    ("decode", "index_k", lambda a: strided(a["index_k"], 0, 8200), "index_k must .* multiple of 16.*8200.*"),
    # The number of requests and of tokens comes from more than one argument, and either may be wrong.
    ("score", "seq_lens", lambda a: resized(a["seq_lens"], 0, 1), r"index_q must have .*\[6, 4, 128\], was \[.*"),
    ("decode", "seq_lens", lambda a: resized(a["seq_lens"], 0, -1), r"index_q must have .*\[2, 4, 128\], was \[.*"),
    ("publish", "scores", lambda a: resized(a["scores"], 0, 1), r"num_valid_pages must have .*\[5\], was \[4\]"),
    ("publish", "scores", lambda a: resized(a["scores"], 0, 5), "capacity must be at least .*9, was 8"),
    ("merge", "num_valid_pages", lambda a: resized(a["num_valid_pages"], 0, 1), r"output must have .*5.*was \[.*"),
    ("merge", "num_valid_pages", lambda a: resized(a["num_valid_pages"], 0, 5), "num_valid_pages must .*8 .*, had 9"),
    ("merge", "recv_slot", lambda a: a["recv_slot"][:, :, :3], "num_valid_pages must have at most .*3 .*, had 4"),
    ("merge+", "recv_slot", lambda a: a["recv_slot"][:, :, :5], r"expected_generations must .*\[2, 5\], was \[2, 8\]"),
    ("merge", "recv_slot", lambda a: torch.zeros(3, 1, 8, 33).int(), r"recv_slot must .*was \[3, 1, 8, 33\]"),
    ("merge", "recv_slot", lambda a: torch.zeros(4, 2, 8, 33).int(), r"recv_slot must .*was \[4, 2, 8, 33\]"),
    # Score columns.
    ("score", "score_out", lambda a: a["score_out"][..., :0], r"score_out must .*1 and 8192.*\[4, 4, 0\]"),
    ("score", "score_out", lambda a: a["score_out"][..., :3], "score_out must have a multiple of 4 columns, had .*3.*"),
    ("score", "score_out", lambda a: torch.zeros(4, 4, 8196), r"score_out must .*1 and 8192.*\[4, 4, 8196\]"),
    ("decode", "scores", lambda a: a["scores"][..., :3], "scores must have a multiple of 4 columns, had .*3.*"),
    ("decode", "scores", lambda a: torch.zeros(4, 4, 8196), r"scores must .*1 and 8192.*\[4, 4, 8196\]"),
    ("decode", "scores", lambda a: a["scores"][:3], r"scores must have .*4.*had shape \[3, 4, 4\]"),
    ("publish", "scores", lambda a: a["scores"][..., :0], r"scores must .*1 and 12287.*\[4, 4, 0\]"),
    ("publish", "scores", lambda a: torch.zeros(4, 4, 12288), r"scores must .*1 and 12287.*\[4, 4, 12288\]"),
    # Errors hold at least one count.
    ("publish", "errors", lambda a: a["errors"][:0], r"errors must have .*1.*\[0\]"),
    ("merge", "errors", lambda a: a["errors"][:0], r"errors must have .*1.*\[0\]"),
    # The two row kinds.
    ("merge", "expected_generations", lambda a: torch.zeros(2, 8).int(), "recv_slot must be .*int64, was .*int32"),
    ("merge+", "expected_generations", lambda a: None, "recv_slot must be .*int32, was .*int64"),
    ("merge+", "prefill", lambda a: True, "expected_generations must be None with prefill=True, was a tensor"),
    ("exchanged", "recv_slot", lambda a: a["recv_slot"][:, :, :3], "num_valid_pages must have at most .*3 .*, had 4"),
    # Plans: the number of segments comes from one tensor, the items from two bounds.
    ("plan", "qo_segment_lens", lambda a: a["qo_segment_lens"][:2], r"kv_segment_lens must .*\[2\], was \[3\]"),
    ("window_plan", "qo_segment_lens", lambda a: a["qo_segment_lens"][:2], r"kv_segment_lens must .*\[2\], was \[3\]"),
    ("plan", "packed_work_info", lambda a: a["packed_work_info"][1:], r"packed_work_info .*at least 3 .*shape \[2\]"),
    ("plan", "workspace", lambda a: a["workspace"][16:], r"workspace must .*at least 33554432 .*shape \[33554416\]"),
    # Keys of a window.
    ("prefill_score", "k", lambda a: strided(a["k"], 0, 8200), "k must .* multiple of 16.*8200.*"),
    ("prefill_score", "k", lambda a: strided(a["k"], 1, 144), "k must have dense rows .*128.*, had .*144.*"),
    ("prefill_score", "k", lambda a: a["k"][:0], r"k must have .*1 .*had shape \[0, 64, 128\]"),
    ("prefill_score", "k", lambda a: torch.zeros(2, 96, 128).to(E4M3), r"k must have 128 / 2 or 256 / 2 .*96, 128\]"),
    ("prefill_score", "k", lambda a: torch.zeros(2, 2**16, 128).to(E4M3), "k must have 128 / 2 or 256 / 2 .*65536.*"),
    ("fused", "k", lambda a: torch.zeros(2, 96, 128).to(E4M3), r"k must have 128 / 2 or 256 / 2 .*96, 128\]"),
    ("fused", "block_table", lambda a: a["block_table"][:, :4], r"block_table must .*at least 5 .*\[3, 4\]"),
    ("local", "index_k", lambda a: torch.zeros(2, 128, 128).to(E4M3), "index_k must have 64 rows a page, had 128"),
    ("local", "index_k", lambda a: torch.zeros(2, 32, 128).to(E4M3), "index_k must have 128 / 2 or 256 / 2 .*32.*"),
    ("local", "index_k", lambda a: strided(a["index_k"], 0, 8200), "index_k must .* multiple of 16.*8200.*"),
    ("prefill_score", "block_table", lambda a: a["block_table"][:, :4], r"block_table must .*at least 5 .*\[3, 4\]"),
    ("local", "block_table", lambda a: a["block_table"][:, :4], r"block_table must .*at least 5 .*\[3, 4\]"),
    # Scores of a window.
    ("prefill_score", "max_score", lambda a: a["max_score"][..., :4], r"max_score must have .*5 .*\[4, 4, 4\]"),
    ("local", "score_scratch", lambda a: a["score_scratch"][..., :4], r"score_scratch must have .*5 .*\[4, 4, 4\]"),
    ("local", "score_scratch", lambda a: a["score_scratch"][:3], r"score_scratch must have .*4 .*\[3, 4, 5\]"),
    ("select_prefill", "scores", lambda a: a["scores"][..., :0], r"scores must .*1 and 12287.*\[4, 4, 0\]"),
    ("select_prefill", "scores", lambda a: torch.zeros(4, 4, 12288), r"scores must .*1 and 12287.*\[4, 4, 12288\]"),
    ("select_prefill", "scores", lambda a: a["scores"][:3], r"num_valid_pages must have .*\[3\], was \[4\]"),
    # Lists of a window: 4 tokens in 3 segments are at most 3 items.
    ("fused", "pool", lambda a: a["pool"][8:].clone(), r"pool must have at least 98304 .*had shape \[98296\]"),
    ("fused", "pool", lambda a: a["pool"].repeat(2)[:98308], "pool must have a multiple of 8 bytes, had 98308"),
    ("fused_local", "pool", lambda a: a["pool"][8:].clone(), r"pool must have at least 98304 .*had shape \[98296\]"),
    ("fused_local", "pool", lambda a: a["pool"].repeat(2)[:98308], "pool must have a multiple of 8 bytes, had 98308"),
    ("fused_local", "pool", lambda a: None, "score_scratch must be a dense tensor, was None"),
    ("fused_local", "score_scratch", lambda a: torch.zeros(4, 4, 5).int(), "score_scratch must be .*32, was .*int32"),
    ("local", "pool", lambda a: torch.zeros(8), "pool must be torch.uint8, was torch.float32"),
    # Another group's exchange.
    ("prefill_merge", "received", lambda a: torch.zeros(4, 1, 4, 33).int(), r"received must .*\[2,.*\[4, 1, 4, 33\]"),
    ("prefill_merge", "received", lambda a: a["received"][:, :, :3], "num_valid_pages must have at most .*3 .*, had 4"),
    ("prefill_merge", "num_valid_pages", lambda a: a["num_valid_pages"][1:], r"output must have .*3.*was \[4.*"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "change", "says"), ODD_TENSORS)
def test_tensors_that_do_not_fit_the_others_are_refused(
    name: str, argument: str, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    call = refusing(name)
    call.refuses(says, **{argument: change(call.arguments)})


def test_pdl_is_refused_for_an_exchanged_carrier() -> None:
    refusing("merge").refuses("enable_pdl must be False with prefill=True, was True", prefill=True, enable_pdl=True)


@pytest.mark.parametrize(
    ("name", "argument"),
    (
        ("publish", "scores"),
        ("plan", "qo_offset"),
        ("prefill_score", "max_score"),
        ("prefill_score", "plan.qo_offset"),
        ("select_prefill", "carrier"),
        ("fused", "carrier"),
        ("fused", "plan.qo_offset"),
        ("fused_local", "num_valid_pages"),
        ("window_plan", "kv_segment_lens"),
        ("local", "window_plan.qo_segment_lens"),
        ("prefill_merge", "received"),
    ),
)
def test_a_pending_negation_is_refused(name: str, argument: str) -> None:
    # The memory of such a tensor holds the negated values.
    call = refusing(name)
    says = f"{re.escape(argument)} must be .*, was .*negation.*"
    call.refuses(says, **{argument: torch._neg_view(call[argument])})


# --- numbers, flags, names --------------------------------------------------------------------------------------------

SCORE_NUMBERS = {
    "rank": (0, 1, r"be in \[0, 1\]"),
    "world_size": (2, 4, "be .*2.*4"),
    "page_size": (128, 256, "be .*128.*256"),
    "decode_query_len": (1, 3, r"be in \[1, 3\]"),
    "max_decode_query_len": (1, 8, r"be in \[1, 8\]"),
}
PUBLISH_NUMBERS = {
    "slot": (0, 2, r"be in \[0, 2\]"),
    "rank": (0, 1, r"be in \[0, 1\]"),
    "world_size": (2, 4, "be .*2.*4"),
    "heads_per_rank": (2, 2, "be 2.*"),
    "capacity": (4, INT32_MAX, "be .*"),
    "force_begin_blocks": (0, 16, r"be in \[0, 16\]"),
    "force_end_blocks": (0, 16, r"be in \[0, 16\]"),
    "spin_limit": (1, INT32_MAX, rf"be in \[1, {INT32_MAX}\]"),
    "index_scale": (1, 2, r"be in \[1, 2\]"),
    "index_offset": (0, 0, "be .*"),
}
MERGE_NUMBERS = {
    "init_blocks": (0, INT32_MAX, rf"be in \[0, {INT32_MAX}\]"),
    "local_blocks": (0, INT32_MAX, rf"be in \[0, {INT32_MAX}\]"),
    "spin_limit": (1, INT32_MAX, rf"be in \[1, {INT32_MAX}\]"),
}
SLOT = {"slot": (0, 2, r"be in \[0, 2\]")}
QUERY_LEN = {"decode_query_len": (1, 3, r"be in \[1, 3\]")}
SELECT_NUMBERS = ("force_begin_blocks", "force_end_blocks", "index_scale", "index_offset")
PLAN_NUMBERS = {
    "num_qo_heads": (4, 4, r"be in \[4, 4\]"),
    "total_q": (1, INT32_MAX // 4, rf"be in \[1, {INT32_MAX // 4}\]"),
    "max_query_len": (1, 4, r"be in \[1, 4\]"),
}
PLAN_FIELDS = {**PLAN_NUMBERS, "columns": (1, 65535, r"be in \[1, 65535\]")}
NUMBERS: dict[str, dict[str, tuple[int, int, str]]] = {
    "score": SCORE_NUMBERS,
    "publish": PUBLISH_NUMBERS,
    "merge": MERGE_NUMBERS,
    "decode": {**SLOT, **QUERY_LEN},
    "decode_publish": {**SLOT, **QUERY_LEN},
    "decode_merge": SLOT,
    "plan": {**PLAN_NUMBERS, "max_seq_len": (1, 65535 * 128, rf"be in \[1, {65535 * 128}\]")},
    "prefill_score": {
        "rank": (0, 1, r"be in \[0, 1\]"),
        "tp": (2, 4, "be .*2.*4"),
        **{f"plan.{name}": numbers for name, numbers in PLAN_FIELDS.items()},
    },
    "select_prefill": {name: PUBLISH_NUMBERS[name] for name in SELECT_NUMBERS},
    "fused": {
        "rank": (0, 1, r"be in \[0, 1\]"),
        "tp": (2, 4, "be .*2.*4"),
        **{name: PUBLISH_NUMBERS[name] for name in SELECT_NUMBERS[:2]},
        **{f"plan.{name}": numbers for name, numbers in PLAN_FIELDS.items()},
    },
    "exchanged": MERGE_NUMBERS,
    "window_plan": {
        "window": (0, 0, r"be in \[0, 0\]"),
        "total_q": (1, 100, r"be in \[1, 100\]"),
        "max_query_len": (1, 4, r"be in \[1, 4\]"),
        "max_seq_len": (1, 1000, r"be in \[1, 1000\]"),
    },
    "local": {f"window_plan.{name}": numbers for name, numbers in PLAN_FIELDS.items()},
}
DECODE_CALLS = ("score", "publish", "merge", "decode", "decode_publish", "decode_merge")
# In range, but not allowed.
HOLES = {"world_size": (3,), "tp": (3,), "page_size": (64, 192)}
EVERY_NUMBER = [(name, argument) for name, numbers in NUMBERS.items() for argument in numbers]


@pytest.mark.parametrize(("name", "argument"), EVERY_NUMBER)
def test_numbers_out_of_range_are_refused(name: str, argument: str) -> None:
    low, high, want = NUMBERS[name][argument]
    call = refusing(name)
    for value in (low - 1, high + 1, -1, -(2**31), 2**31, 2**40, *HOLES.get(argument, ())):
        if not low <= value <= high or value in HOLES.get(argument, ()):
            call.refuses(f"{re.escape(argument)} must {want}, was {value}", **{argument: value})


@pytest.mark.parametrize(("name", "argument"), EVERY_NUMBER)
def test_numbers_of_another_type_are_refused(name: str, argument: str) -> None:
    call = refusing(name)
    valid = call[argument]
    for value, words in (
        (True, "True"),
        (float(valid), f".*{valid}.*"),
        (str(valid), f".*{valid}.*"),
        (None, "None"),
        ([valid], ".*"),
        (torch.tensor(valid), ".*tensor.*"),
        (2**70, ".*"),
    ):
        call.refuses(f"{re.escape(argument)} must be .*, was {words}", **{argument: value})


@pytest.mark.parametrize(("name", "argument"), (("score", "rank"), ("publish", "capacity"), ("merge", "spin_limit")))
def test_what_a_number_was_is_told_apart_from_a_number(name: str, argument: str) -> None:
    call = refusing(name)
    call.refuses(f"""{argument} must be an integer, was .*(['"]3['"]|str).*""", **{argument: "3"})
    call.refuses(f"{argument} must be .*, was .*({2**70}|int).*", **{argument: 2**70})


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    (
        ("publish", {"force_begin_blocks": 8, "force_end_blocks": 9}, "force_begin_blocks .*at most 16, was 8 [+] 9"),
        ("publish", {"index_offset": 1}, "index_offset must be below .*1, was 1"),
        ("publish", {"index_offset": 2, "index_scale": 2}, r"index_offset must be in \[0, 1\], was 2"),
        ("publish", {"capacity": 3}, "capacity must be at least .*4, was 3"),
        ("publish+", {"capacity": 7}, r"generations must have shape .*\[3, 4, 7\], was \[3, 4, 8\]"),
        ("publish", {"world_size": 4}, "heads_per_rank must be 1 for world_size 4, was 2"),
        ("publish", {"heads_per_rank": 1}, "heads_per_rank must be 2 for world_size 2, was 1"),
        ("score", {"max_decode_query_len": 1}, r"decode_query_len must be in \[1, 1\], was 2"),
        ("score", {"decode_query_len": 1}, r"index_q must have shape .*\[2, 4, 128\], was \[4, 4, 128\]"),
        ("score", {"page_size": 256}, r"index_k must have shape .*\[\*, 128, 128\], was \[\d+, 64, 128\]"),
        (
            "select_prefill",
            {"force_begin_blocks": 8, "force_end_blocks": 9},
            "force_begin_blocks .*at most 16, was 8 [+] 9",
        ),
        ("select_prefill", {"index_offset": 1}, "index_offset must be below .*1, was 1"),
        ("plan", {"total_q": 2}, r"max_query_len must be in \[1, 2\], was 3"),
        ("window_plan", {"total_q": 2}, r"max_query_len must be in \[1, 2\], was 3"),
        ("prefill_score", {"plan.total_q": 2}, r"plan.max_query_len must be in \[1, 2\], was 3"),
        ("prefill_score", {"plan.total_q": 5}, r"q must have shape .*\[5, 4, 128\], was \[4, 4, 128\]"),
        ("prefill_score", {"plan.total_q": 65}, "plan.packed_work_info must have at least 4 .*"),
        ("prefill_score", {"plan.columns": 6}, r"block_table must have at least 6 .*, had shape \[3, 5\]"),
        ("prefill_score", {"plan.batch": 2}, "plan.batch must be in \\[3, 3\\], was 2"),
        (
            "prefill_score",
            {"compact": True},
            "compact must be False for 128-token pages .64 rows times tp 2., .*, was True",
        ),
        ("fused", {"force_begin_blocks": 8, "force_end_blocks": 9}, "force_begin_blocks .*at most 16, was 8 [+] 9"),
        ("fused", {"plan.total_q": 5}, r"q must have shape .*\[5, 4, 128\], was \[4, 4, 128\]"),
        ("fused", {"plan.batch": 2}, "plan.batch must be in \\[3, 3\\], was 2"),
        ("fused", {"compact": True}, "compact must be False for 128-token pages .64 rows .*, was True"),
        ("local", {"window_plan.total_q": 5}, r"query must have shape .*\[5, 4, 128\], was \[4, 4, 128\]"),
        ("local", {"window_plan.batch": 4}, r"window_plan.batch must be in \[3, 3\], was 4"),
    ),
)
def test_numbers_that_do_not_fit_each_other_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    refusing(name).refuses(says, **changes)


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, "enable_pdl") for name in (*DECODE_CALLS, "prefill_score", "fused", "exchanged")]
    + [(name, "tagged") for name in DECODE_CALLS if name.startswith("decode")]
    + [("merge", "prefill"), ("exchanged", "prefill"), ("prefill_score", "initialize"), ("prefill_score", "compact")]
    + [("fused", "compact")],
)
def test_flags_must_be_bools(name: str, argument: str) -> None:
    call = refusing(name)
    for value, words in ((0, "0"), (1, "1"), (1.0, ".*1.*"), (None, "None"), ("yes", ".*yes.*")):
        call.refuses(f"{argument} must be True or False, was {words}", **{argument: value})


@pytest.mark.parametrize("name", ("score", "publish", "merge", *PREFILL_FUNCTIONS))
def test_unknown_backends_are_refused(name: str) -> None:
    for backend in ("", "CAKE", "cutlass", None, 1, ["cake"], {}):
        says = f"backend must be .*'cake'.*'torch'.*, was {re.escape(repr(backend))}"
        refusing(name).refuses(says, backend=backend)


@pytest.mark.parametrize("name", ("prefill_score", "fused"))
def test_unknown_accumulations_are_refused(name: str) -> None:
    for accumulation in ("", "EXACT", "fp32", None, 1, True, ["exact"], {}):
        says = rf"accumulation must be one of \('tensor', 'exact'\), was {re.escape(repr(accumulation))}"
        refusing(name).refuses(says, accumulation=accumulation)


@pytest.mark.parametrize("name", ("score", "publish", "publish+", "merge", "merge+", *PREFILL_FUNCTIONS))
@pytest.mark.parametrize("tokens", (4, 0))
def test_cake_refuses_tensors_that_are_not_on_a_cuda_device(name: str, tokens: int) -> None:
    says = f"({'|'.join(re.escape(rule.name) for rule in RULES[name])}) must be on a CUDA device, was on cpu"
    make_call(name, tokens=tokens).refuses(says, backend="cake")


# --- what is allowed --------------------------------------------------------------------------------------------------


def wider(*extra: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that adds a gap of ``extra[k]`` elements between the slices of axis ``k`` of a tensor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        strides, need = [1] * tensor.dim(), 1
        for axis in range(tensor.dim() - 1, -1, -1):
            strides[axis] = need + extra[axis]
            need = strides[axis] * tensor.shape[axis]
        return laid_out(tensor, strides)

    return change


PLANES = (wider(0, 3, 0), wider(5, 0, 0), wider(12, 4, 0))
# Token slices of a larger head-major buffer, and rows apart.
CARRIERS = (wider(3 * 33, 0, 0), wider(0, 7, 0), wider(5, 1, 0))
ROWS = (wider(0, 0, 7, 0), wider(0, 9, 0, 0), wider(11, 0, 0, 0), wider(13, 5, 3, 0))
ALLOWED: tuple[tuple[str, str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]], ...] = (
    ("score", "score_out", PLANES),
    ("score", "index_k", (wider(16, 0, 0), wider(208, 0, 0), wider(8192, 0, 0))),
    ("score", "block_table", (wider(1, 0), wider(9, 0))),
    ("publish", "scores", PLANES),
    ("publish+", "scores", PLANES),
    ("merge", "recv_slot", ROWS),
    ("merge+", "recv_slot", ROWS),
    ("merge", "output", PLANES),
    ("decode", "scores", (*PLANES, lambda t: torch.cat((t, t, t)))),
    ("decode", "index_k", (wider(16, 0, 0), wider(208, 0, 0))),
    ("decode", "block_table", (wider(1, 0), wider(9, 0))),
    ("decode", "output", PLANES),
    ("decode_publish+", "scores", (*PLANES, lambda t: torch.cat((t, t, t)))),
    ("decode_merge+", "output", PLANES),
    ("prefill_score", "max_score", PLANES),
    ("prefill_score", "k", (wider(16, 0, 0), wider(208, 0, 0), wider(8192, 0, 0))),
    ("prefill_score", "block_table", (wider(1, 0), wider(9, 0))),
    ("select_prefill", "scores", PLANES),
    ("select_prefill", "carrier", CARRIERS),
    ("fused", "k", (wider(16, 0, 0), wider(208, 0, 0), wider(8192, 0, 0))),
    ("fused", "block_table", (wider(1, 0), wider(9, 0))),
    ("fused", "carrier", CARRIERS),
    ("exchanged", "recv_slot", ROWS),
    ("exchanged", "output", PLANES),
    ("local", "index_k", (wider(16, 0, 0), wider(208, 0, 0))),
    ("local", "block_table", (wider(1, 0), wider(9, 0))),
    ("local", "score_scratch", (*PLANES, lambda t: torch.cat((t, t, t)))),
    ("local", "carrier_view", CARRIERS),
    ("fused_local", "carrier_view", CARRIERS),
    ("prefill_merge", "received", ROWS),
    ("prefill_merge", "output", PLANES),
)


@pytest.mark.parametrize(
    ("name", "argument", "change"),
    [
        pytest.param(name, argument, change, id=f"{name}-{argument}-{index}")
        for name, argument, changes in ALLOWED
        for index, change in enumerate(changes)
    ],
)
def test_allowed_strides_change_no_result(name: str, argument: str, change: Callable[..., torch.Tensor]) -> None:
    plain, other = make_call(name), make_call(name)
    value = change(other.arguments[argument])
    around = image(value).clone()
    plain()
    other(**{argument: value})
    # All results are equal, and nothing was written between the rows.
    tokens = len(plain.arguments[argument])
    assert torch.equal(value[:tokens].view(torch.uint8), plain.arguments[argument].view(torch.uint8))
    start = torch.empty(0, dtype=value.dtype).set_(
        around.untyped_storage(), value.storage_offset(), value.shape, value.stride()
    )
    start[:tokens] = value[:tokens]
    assert torch.equal(around, image(value))
    for key, tensor in plain.arguments.items():
        if isinstance(tensor, torch.Tensor) and key not in (argument, "recv_bases", "recv_slot"):
            assert torch.equal(tensor.view(torch.uint8), other.arguments[key].view(torch.uint8)), key
    if argument != "recv_slot":
        comms = [[x for x in call.watched if isinstance(x, MSAIcpComm)] for call in (plain, other)]
        for ours, theirs in zip(*comms, strict=True):
            for part in ("recv", "tagged_recv", "publish_generations", "expected_generations", "errors"):
                assert torch.equal(getattr(ours, part), getattr(theirs, part)), part


def test_prefill_flags_are_not_read_through_strides() -> None:
    call = make_call("merge")
    flagless = wider(13, 5, 3, 0)(call.arguments["recv_slot"])
    flagless[..., 32] = 0
    before = flagless.clone()
    call(recv_slot=flagless, prefill=True)
    assert torch.equal(before, flagless) and (call.arguments["output"][:, :, 0] == 0).all()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("stride", (0, 1, 7, 12345))
def test_the_stride_of_a_dimension_of_one_is_free(name: str, stride: int) -> None:
    call, plain = (make_call(name, "p256_tp4", tokens=1, query_len=1, capacity=1) for _ in range(2))

    def odd(tensor: torch.Tensor) -> torch.Tensor:
        strides = [stride if size == 1 else s for size, s in zip(tensor.shape, tensor.stride(), strict=True)]
        return tensor.as_strided(tensor.shape, strides)

    for key, value in call.arguments.items():
        if isinstance(value, torch.Tensor):
            call.arguments[key] = odd(value)
        elif isinstance(value, MSAIcpComm):
            call.arguments[key] = replace(value, **{rule.name: odd(getattr(value, rule.name)) for rule in COMM_RULES})
    assert any(stride in v.stride() for v in tensors_in(tuple(call.arguments.values())))
    call()
    plain()
    for key in ("score_out", "scores", "output", "max_score", "score_scratch", "carrier", "carrier_view"):
        if plain.arguments.get(key) is not None:
            assert torch.equal(call.arguments[key], plain.arguments[key])


@pytest.mark.parametrize("name", CALLS)
def test_empty_calls_write_nothing(name: str) -> None:
    call = make_call(name, tokens=0)
    before = call.images()
    call()
    assert all(torch.equal(now, then) for now, then in before)
    # Empty calls are checked like any other.
    for rule in RULES.get(name, ()):
        if rule.name.rpartition(".")[2] != "workspace":  # 256 MiB of doubles
            says = f"{re.escape(rule.name)} must be {rule.dtype}, was torch.float64"
            call.refuses(says, **{rule.name: call[rule.name].double()})


def test_pages_that_no_key_lives_in_need_not_exist() -> None:
    call = make_call("score")
    no_pages = call.arguments["index_k"][:0]
    call(index_k=no_pages, seq_lens=torch.zeros(2, dtype=torch.int32))
    assert (call.arguments["score_out"] == 5).all()
    call(block_table=torch.zeros(2, 0, dtype=torch.int32))
    assert (call.arguments["score_out"] == 5).all()


# --- receive storage --------------------------------------------------------------------------------------------------


def comm_mutations(rule: Rule) -> Iterator[tuple[str, Mutation]]:
    """Everything that can be wrong with one field of receive storage."""
    for dtype in (torch.int16, torch.int32, torch.int64, torch.float32):
        if dtype is not rule.dtype:
            yield str(dtype), lambda t, dtype=dtype: (t.to(dtype), f"must be {rule.dtype}, was {dtype}")
    shape = r"must have .*(was|had shape) \([0-9, ]*\)"
    yield "a dimension more", lambda t: (t[None], shape)
    yield "a dimension less", lambda t: (t[0], shape)
    if rule.name != "errors":
        for axis in range(rule.rank):
            yield f"size + 1 in dimension {axis}", lambda t, axis=axis: (resized(t, axis, 1), shape)
            yield f"size - 1 in dimension {axis}", lambda t, axis=axis: (resized(t, axis, -1), shape)
    else:
        yield "empty", lambda t: (t[:0], shape)

    def spread(t: torch.Tensor) -> tuple[Any, str]:
        width = max(2, t.shape[-1])  # a single element is always contiguous
        return torch.zeros(*t.shape[:-1], 2 * width, dtype=t.dtype)[..., ::2], r"must be contiguous, had .*\([0-9, ]*\)"

    yield "every second element", spread
    yield "meta", lambda t: (t.to("meta"), "must be on cpu, was on meta")
    yield "sparse", lambda t: (t.to_sparse(), "must be .*sparse.*")
    for value in (None, [0], 3, "words"):
        yield repr(value), lambda t, value=value: (value, f"must be a tensor, was {re.escape(repr(value))}")
    yield "numpy", lambda t: (t.numpy(), r"must be a tensor, was .*array.*")


@pytest.mark.parametrize("name", ("decode", "decode+"), ids=("legacy", "tagged"))
@pytest.mark.parametrize("rule", COMM_RULES, ids=named)
def test_bad_receive_storage_is_refused(rule: Rule, name: str) -> None:
    faults = []
    for what, mutate in comm_mutations(rule):
        call = refusing(name)
        comm, indexer = call["comm"], call.function.__self__  # type: ignore[attr-defined]
        value, says = mutate(getattr(comm, rule.name))
        bad = replace(comm, **{rule.name: value})
        check = Call(indexer.check_comm, {"comm": bad}, call.watched)
        faults.append((f"check_comm, {what}", check.fault(rf"comm\.{rule.name} {says}")))
        faults.append((f"decode, {what}", call.fault(rf"comm\.{rule.name} {says}", comm=bad)))
    assert_no_faults(faults)


@pytest.mark.parametrize("half", ("decode_publish", "decode_merge"))
def test_the_halves_check_receive_storage_too(half: str) -> None:
    call = make_call(half)
    bad = replace(call.arguments["comm"], errors=torch.zeros(1))
    call.refuses(r"comm\.errors must be torch\.int32, was torch\.float32", comm=bad)


def test_tagged_rows_must_follow_the_legacy_rows() -> None:
    call = refusing("decode")
    comm, indexer = call.arguments["comm"], call.function.__self__  # type: ignore[attr-defined]
    size = indexer.comm_layout["tagged_offset_bytes"]
    elsewhere = replace(comm, tagged_recv=comm.tagged_recv.clone())
    says = rf"comm\.tagged_recv must follow comm\.recv in one storage, at {size} bytes, was"
    call.refuses(f"{says} in another storage", comm=elsewhere)
    larger = torch.zeros(indexer.comm_layout["storage_words"] + 2, dtype=torch.int32)
    shifted = replace(
        comm,
        recv=larger[: size // 4].view(comm.recv.shape),
        tagged_recv=larger[size // 4 + 2 :].view(torch.int64).view(comm.tagged_recv.shape),
    )
    call.refuses(f"{says} at {size + 8} bytes", comm=shifted)
    # An offset within a larger storage is fine.
    indexer.check_comm(
        replace(
            comm,
            recv=larger[2 : size // 4 + 2].view(comm.recv.shape),
            tagged_recv=larger[size // 4 + 2 :].view(torch.int64).view(comm.tagged_recv.shape),
        )
    )


@pytest.mark.parametrize("comm", (None, 3, [], object()), ids=("None", "int", "list", "object"))
def test_something_else_than_receive_storage_is_refused(comm: Any) -> None:
    refusing("decode").refuses(r"comm.* must be .*, was .*", comm=comm)


# --- the indexer's limits, the sizing functions, local_comm -----------------------------------------------------------

PREPARE: dict[str, tuple[Any, ...]] = {
    "world_size": (0, 1, 3, 5, 8, True, 2.0, "2", None, [2]),
    "rank": (-1, 2, True, 0.0, "0", None),
    "num_index_heads": (3, 5, True, 4.0, "4", None),
    "page_size": (0, 64, 127, 129, 192, 512, True, 128.0, "128", None, [128]),
    "init_blocks": (-1, 17, True, 1.0, "1", None),
    "local_blocks": (-1, 17, True, 1.0, "1", None),
    "max_decode_tokens": (0, -1, True, 1.0, "1", None),
    "max_decode_query_len": (0, 9, True, 1.0, "1", None),
    "max_num_batched_tokens": (0, -1, True, 1.0, "1", None),
    "max_num_seqs": (0, -1, True, 1.0, "1", None),
    "max_model_len": (0, -1, True, 1.0, "1", None),
    "num_sparse_layers": (0, -1, True, 1.0, "1", None),
    "spin_limit": (0, 2**31, True, 1.0, "1", None),
    "wait_seconds": (0, -1.0, 1e-4, 2e6, float("nan"), float("inf"), True, "1", [1]),
    "accumulation": ("", "EXACT", None, 1, True, ["exact"]),
    "backend": ("", "CAKE", None, 1, ["cake"]),
    "device": ("bogus", "cpu:x", None, -1, 1.5, []),
}


@pytest.mark.parametrize(
    ("argument", "value"),
    [pytest.param(a, value, id=f"{a}-{value!r}") for a, values in PREPARE.items() for value in values],
)
def test_bad_limits_are_refused(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{argument} must .*was .*{re.escape(repr(value).strip('<>'))}"):
        msa_ops.prepare_msa_icp_indexer(**{**LIMITS, argument: value})


def test_forced_blocks_share_sixteen_places() -> None:
    for first, last in ((0, 16), (16, 0), (7, 9)):
        msa_ops.prepare_msa_icp_indexer(**{**LIMITS, "init_blocks": first, "local_blocks": last})
    with pytest.raises(ValueError, match=r"^init_blocks \+ local_blocks must be at most 16, was 8 \+ 9"):
        msa_ops.prepare_msa_icp_indexer(**{**LIMITS, "init_blocks": 8, "local_blocks": 9})


@pytest.mark.parametrize("device", ("cpu", "meta", "cuda:99"))
def test_cake_needs_a_cuda_device(device: str) -> None:
    with pytest.raises(ValueError, match=f"^device must .*, was {device}"):
        msa_ops.prepare_msa_icp_indexer(**{**LIMITS, "device": device, "backend": "cake"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("backend", ("cake", "torch"))
def test_a_cuda_device_that_torch_does_not_find_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match=r"^device must .*, was cuda"):
        msa_ops.prepare_msa_icp_indexer(**{**LIMITS, "device": "cuda", "backend": backend})


NOT_POSITIVE = (0, -1, True, 1.0, "1", None)
NOT_FOUR = (3, 5, True, 4.0, "4", None)
PAGES = PREPARE["page_size"]
DEVICES = ("bogus", -1, 1.5, [])
SIZING: tuple[tuple[Callable[..., Any], dict[str, Any], dict[str, tuple[Any, ...]]], ...] = (
    (
        msa_ops.msa_icp_index_score_plan_storage,
        {"num_qo_heads": 4, "total_q": 5, "batch": 2, "device": "cpu"},
        {"num_qo_heads": NOT_FOUR, "total_q": NOT_POSITIVE, "batch": NOT_POSITIVE, "device": DEVICES},
    ),
    (
        msa_ops.msa_icp_index_score_columns,
        {"max_seq_len": 5, "page_size": 128},
        {"max_seq_len": NOT_POSITIVE, "page_size": PAGES},
    ),
    (
        msa_ops.msa_icp_decode_score_columns,
        {"max_model_len": 5, "page_size": 128},
        {"max_model_len": NOT_POSITIVE, "page_size": PAGES},
    ),
    (
        msa_ops.msa_icp_decode_pool_bytes,
        {"max_decode_tokens": 5, "num_heads": 4},
        {"max_decode_tokens": NOT_POSITIVE, "num_heads": NOT_POSITIVE},
    ),
    (
        msa_ops.msa_icp_prefill_pool_bytes,
        {"total_q": 5, "batch": 2, "device": "cpu", "num_heads": 4},
        {"total_q": NOT_POSITIVE, "batch": NOT_POSITIVE, "num_heads": NOT_FOUR, "device": DEVICES},
    ),
    (
        msa_ops.msa_icp_comm_layout,
        {"world_size": 2, "heads_per_rank": 2, "capacity": 3},
        {
            "world_size": PREPARE["world_size"],
            "heads_per_rank": (0, 1, 4, True, 2.0, "2", None, [2]),
            "capacity": NOT_POSITIVE,
        },
    ),
)


@pytest.mark.parametrize(
    ("function", "arguments", "argument", "value"),
    [
        pytest.param(function, arguments, argument, value, id=f"{function.__name__[8:]}-{argument}-{value!r}")
        for function, arguments, bad in SIZING
        for argument, values in bad.items()
        for value in values
    ],
)
def test_bad_sizes_are_refused(
    function: Callable[..., Any], arguments: dict[str, Any], argument: str, value: Any
) -> None:
    function(**arguments)
    with pytest.raises(ValueError, match=f"^{argument} must .*was .*{re.escape(repr(value))}"):
        function(**{**arguments, argument: value})


def test_local_comm_takes_one_group_in_order() -> None:
    def indexer(**changes: Any) -> Any:
        return msa_ops.prepare_msa_icp_indexer(**{**LIMITS, **changes})

    first, second = indexer(), indexer(rank=1)
    elsewhere = indexer(rank=1)
    elsewhere.device = torch.device("meta")
    for indexers, says in (
        ([], r"indexers must .*, was \[\]"),
        ([first, 3], r"indexers must .*, was .*3"),
        (None, "indexers must .*, was None"),
        (3, "indexers must .*, was 3"),
        (first, "indexers must .*, was .*MSAIcpIndexerPlan"),
        ([first], r"indexers must .*0 to 1.*\[0\]"),
        ([second, first], r"indexers must .*0 to 1.*\[1, 0\]"),
        ([first, first], r"indexers must .*0 to 1.*\[0, 0\]"),
        ([first, second, indexer()], r"indexers must .*0 to 1.*\[0, 1, 0\]"),
        ([first, indexer(rank=1, world_size=4)], r"indexers must agree on world_size, had \[2, 4\]"),
        ([first, indexer(rank=1, max_decode_tokens=9)], r"indexers must agree on max_decode_tokens, had \[8, 9\]"),
        ([first, indexer(rank=1, page_size=256)], r"indexers must agree on page_size, had \[128, 256\]"),
        ([first, elsewhere], r"indexers must .*were on \['cpu', 'meta'\]"),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            local_comm(indexers)
    assert len(local_comm(iter([first, second]))) == 2


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_tensors_without_memory_are_refused() -> None:
    """A fake or freed tensor has a shape but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = {
        "recv_slot": torch.zeros(2, 2, 8, 33, dtype=torch.int32),
        "num_valid_pages": torch.zeros(4, dtype=torch.int32),
        "output": torch.zeros(4, 2, 16, dtype=torch.int32),
        "errors": torch.zeros(1, dtype=torch.int32),
        "init_blocks": 0,
        "local_blocks": 0,
        "prefill": True,
        "backend": "torch",
    }
    with FakeTensorMode():
        fake = torch.empty(4, 2, 16, dtype=torch.int32)
    freed = torch.zeros(4, 2, 16, dtype=torch.int32)
    freed.untyped_storage().resize_(0)
    for output in (fake, freed):
        with pytest.raises(ValueError, match=r"^output must be a .*(memory|storage)"):
            msa_ops.msa_icp_merge_candidates(**{**call, "output": output})
    quantized = torch.quantize_per_tensor(torch.zeros(4, 2, 16), 1.0, 0, torch.qint32)
    with pytest.raises(ValueError, match=r"^output must be .*quantized"):
        msa_ops.msa_icp_merge_candidates(**{**call, "output": quantized})
    crooked = torch.frombuffer(bytearray(4 * 2 * 16 * 4 + 2), dtype=torch.int32, offset=2).view(4, 2, 16)
    with pytest.raises(ValueError, match=r"^output must start at an address aligned to 4 bytes"):
        msa_ops.msa_icp_merge_candidates(**{**call, "output": crooked})


def test_rows_may_lie_in_any_order() -> None:
    """Receive rows and outputs may have their leading dimensions in any order, if rows do not overlap."""
    recv = torch.zeros(8, 2, 2, 33, dtype=torch.int32).permute(2, 1, 0, 3)
    recv[..., 16:32] = -1
    output = torch.zeros(2, 4, 16, dtype=torch.int32).transpose(0, 1)
    msa_ops.msa_icp_merge_candidates(
        recv,
        torch.full((4,), 9, dtype=torch.int32),
        output,
        torch.zeros(1, dtype=torch.int32),
        init_blocks=0,
        local_blocks=0,
        prefill=True,
        backend="torch",
    )
    assert (output == -1).all()


def test_numbers_of_numpy_are_numbers() -> None:
    """The indexer and the functions accept every integer type except bool."""
    indexer = msa_ops.prepare_msa_icp_indexer(**{**LIMITS, "rank": np.int64(1), "page_size": np.int32(128)})
    assert indexer.rank == 1 and type(indexer.page_size) is int
    assert msa_ops.msa_icp_decode_score_columns(np.int64(4096), 128) == 32


def fused_call(**changes: Any) -> None:
    """A fused scorer and publisher of 4 tokens, with ``changes``."""
    base = make_call("decode_score", "p128_tp2", 4)
    publish = make_call("publish", "p128_tp2", 4)
    arguments = {
        **{name: base[name] for name in ("index_q", "index_k", "block_table", "seq_lens")},
        **{name: publish[name] for name in ("num_valid_pages", "recv_bases", "errors")},
        "pool": torch.zeros(4 * 4 * 128 * 16 * 8, dtype=torch.uint8),
    }
    numbers: dict[str, Any] = {
        "rank": 0,
        "world_size": 2,
        "page_size": 128,
        "decode_query_len": 2,
        "slot": 0,
        "capacity": 8,
        "force_begin_blocks": 1,
        "force_end_blocks": 2,
    }
    msa_ops.msa_icp_decode_score_publish(**{**arguments, **numbers, "backend": "torch", **changes})


POOL_BYTES = 4 * 4 * 128 * 16 * 8
BAD_POOLS = {
    "too small": (torch.zeros(POOL_BYTES - 8, dtype=torch.uint8), f"pool must have at least {POOL_BYTES} elements .*"),
    "odd": (
        torch.zeros(POOL_BYTES + 4, dtype=torch.uint8),
        f"pool must have a multiple of 8 bytes, had {POOL_BYTES + 4}",
    ),
    "int32": (torch.zeros(POOL_BYTES, dtype=torch.int32), "pool must be torch.uint8, was torch.int32"),
    "two dimensions": (torch.zeros(2, POOL_BYTES, dtype=torch.uint8), "pool must have 1 dimensions, .*"),
    "strided": (torch.zeros(2 * POOL_BYTES, dtype=torch.uint8)[::2], "pool must be contiguous, .*"),
    "shifted": (torch.zeros(POOL_BYTES + 8, dtype=torch.uint8)[8:], "pool must start at an address aligned to 16 .*"),
    "None": (None, "pool must be a dense tensor, was None"),
}


@pytest.mark.parametrize(("pool", "says"), BAD_POOLS.values(), ids=BAD_POOLS)
def test_bad_decode_pools_are_refused(pool: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        fused_call(pool=pool)
    if pool is not None:
        make_call("decode_publish").refuses(says, pool=pool)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decode_query_len": 9}, r"decode_query_len must be in \[1, 8\], was 9"),
        ({"page_size": 64}, "page_size must be 128 or 256, was 64"),
        ({"world_size": 3}, "world_size must be 2 or 4, was 3"),
        ({"rank": 2}, r"rank must be in \[0, 1\], was 2"),
        ({"slot": 3}, r"slot must be in \[0, 2\], was 3"),
        ({"capacity": 3}, "capacity must be at least the number of tokens, 4, was 3"),
        ({"force_begin_blocks": 15}, r"force_begin_blocks \+ force_end_blocks must be at most 16, was 15 \+ 2"),
        ({"spin_limit": 0}, "spin_limit must be in .*, was 0"),
        ({"enable_pdl": 1}, "enable_pdl must be True or False, was 1"),
        ({"generations": torch.zeros(3, 4, 7, dtype=torch.int32)}, "generations must have shape .*"),
        ({"num_valid_pages": torch.zeros(3, dtype=torch.int32)}, "num_valid_pages must have shape .*"),
        ({"recv_bases": torch.zeros(4, dtype=torch.int64)}, "recv_bases must have shape .*"),
        ({"errors": torch.zeros(0, dtype=torch.int32)}, "errors must have at least 1 elements .*"),
        ({"backend": "cuda"}, "backend must be one of .*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_fused_calls_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        fused_call(**changes)


# --- prefill windows --------------------------------------------------------------------------------------------------


def larger(tensor: torch.Tensor, *extra: int) -> torch.Tensor:
    """``tensor`` with ``extra[k]`` more elements in dimension ``k``, each byte of them 0x55."""
    sizes = [size + more for size, more in zip(tensor.shape, extra, strict=True)]
    value = torch.full((math.prod(sizes) * tensor.element_size(),), 0x55, dtype=torch.uint8)
    value = value.view(tensor.dtype).view(sizes)
    value[tuple(map(slice, tensor.shape))] = tensor
    return value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "argument", "extra"),
    (
        ("plan", "packed_work_info", (5,)),
        ("plan", "workspace", (64,)),
        ("prefill_score", "block_table", (0, 3)),
        ("prefill_score", "max_score", (0, 0, 3)),
        ("prefill_score", "plan.packed_work_info", (5,)),
        ("prefill_score", "plan.workspace", (64,)),
        ("local", "block_table", (0, 3)),
        ("local", "score_scratch", (2, 0, 3)),
        ("local", "window_plan.packed_work_info", (5,)),
        ("fused", "block_table", (0, 3)),
        ("fused", "pool", (64,)),
        ("fused", "plan.packed_work_info", (5,)),
        ("fused_local", "pool", (64,)),
        ("exchanged", "recv_slot", (0, 0, 3, 0)),
        ("prefill_merge", "received", (0, 0, 3, 0)),
    ),
)
def test_what_is_larger_than_it_need_be_changes_no_result(
    layout: str, name: str, argument: str, extra: tuple[int, ...]
) -> None:
    plain, other = make_call(name, layout), make_call(name, layout)
    value = larger(other[argument], *extra)
    around = value.view(torch.uint8).clone()
    changes = {"initialize": False} if name == "prefill_score" else {}
    plain(**changes)
    other(**{argument: value}, **changes)
    for key, tensor in plain.arguments.items():
        if isinstance(tensor, torch.Tensor) and key != argument:
            assert torch.equal(tensor.view(torch.uint8), other[key].view(torch.uint8)), key
    part = tuple(map(slice, other[argument].shape))
    assert torch.equal(value[part].view(torch.uint8), plain[argument].view(torch.uint8))
    # Nothing was written past the part that is needed.
    value[part] = around.view(value.dtype)[part]
    assert torch.equal(value.view(torch.uint8), around)


@pytest.mark.parametrize("sm_scale", (math.nan, math.inf, -math.inf, None, "1", True, [1.0], torch.ones(1)), ids=repr)
def test_a_scale_that_is_no_finite_number_is_refused(sm_scale: Any) -> None:
    words = f"the float -?{abs(sm_scale)}" if isinstance(sm_scale, float) else ".+"
    refusing("prefill_score").refuses(f"sm_scale must be a finite number, was {words}", sm_scale=sm_scale)


def test_a_finite_scale_is_not_applied() -> None:
    call = make_call("prefill_score")
    call()
    scores = call["max_score"].clone()
    for sm_scale in (0, -3, 0.0, 1e300):
        call(max_score=call["max_score"].fill_(5.0), sm_scale=sm_scale)
        assert torch.equal(call["max_score"], scores)


@pytest.mark.parametrize(("name", "argument"), (("prefill_score", "plan"), ("fused", "plan"), ("local", "window_plan")))
def test_something_else_than_a_plan_is_refused(name: str, argument: str) -> None:
    call = refusing(name)
    fields = vars(call[argument])
    for value in (None, 3, "plan", [], fields, tuple(fields.values()), SimpleNamespace(**fields), MSAIcpScorePlan):
        says = f"{argument} must be an MSAIcpScorePlan, was {re.escape(str(type(value)))}"
        call.refuses(says, **{argument: value})


@pytest.mark.parametrize(("name", "argument"), (("prefill_score", "plan"), ("fused", "plan"), ("local", "window_plan")))
def test_a_plan_knows_its_number_of_segments(name: str, argument: str) -> None:
    for batch in (-1, 0, 2, 4, "3", None, 3.0, [3], True, torch.tensor(3)):
        says = rf"{argument}\.batch must be (an integer|in \[3, 3\]), was {re.escape(repr(batch))}"
        refusing(name).refuses(says, **{f"{argument}.batch": batch})


@pytest.mark.parametrize(("layout", "columns"), (("p128_tp2", 12288), ("p256_tp2", 24575)))
def test_a_window_that_is_too_wide_to_select_from_is_refused(layout: str, columns: int) -> None:
    call = make_call("local", layout)
    pages = columns // LAYOUTS[layout].index_scale + 1
    wide = {
        "block_table": larger(call["block_table"], 0, pages - call["block_table"].shape[1]),
        "score_scratch": torch.full((4, 4, pages), 5.0),
    }
    says = f"window_plan.columns must make fewer than 12288 score columns, was {columns}"
    call.refuses(says, **wide, **{"window_plan.columns": columns})
    # One column fewer is fine.
    call(**wide, **{"window_plan.columns": columns - 1})
    assert (call["carrier_view"] != -7).all()


def test_pages_of_either_size_fit_their_own_indexer_alone() -> None:
    call, other = make_call("local", "p128_tp4"), make_call("local", "p256_tp4")
    says = "index_k must have {} rows a page, had {}"
    call.refuses(says.format(32, 64), index_k=other["index_k"])
    # The other indexer needs half as many pages, so the block table is not the cause.
    other.refuses(says.format(64, 32), index_k=call["index_k"], block_table=call["block_table"])


def test_compact_scores_are_a_column_a_page() -> None:
    call = make_call("prefill_score", "p256_tp2")
    call.refuses(r"max_score must have .*3 .*\[4, 4, 2\]", max_score=torch.full((4, 4, 2), 5.0), compact=True)
    call.refuses(r"max_score must have .*5 .*\[4, 4, 3\]", max_score=torch.full((4, 4, 3), 5.0))
    call(max_score=call["max_score"][..., :3], compact=True)
    assert (call["max_score"][..., :3] != 5).all() and (call["max_score"][..., 3:] == 5).all()


def test_lists_have_a_column_a_page() -> None:
    says = "compact must be True for 256-token pages .128 rows times tp 2., was False"
    make_call("fused", "p256_tp2").refuses(says, compact=False)


def test_a_window_of_any_width_is_fused() -> None:
    """A separate selection is limited to fewer than 12,288 columns."""
    call = make_call("fused_local")
    table = larger(call["block_table"], 0, 12288 - call["block_table"].shape[1])
    call(block_table=table, **{"window_plan.columns": 12288})
    assert (call["carrier_view"] != -7).all()


def test_segments_beyond_the_tokens_need_no_lists() -> None:
    problem = PrefillProblem.random(LAYOUTS["p128_tp2"], query_lens=[1, 0, 1, *[0] * 9], kv_lens=[9] * 12)
    plan = make_plan_call(problem)()
    call = make_call("fused")
    pool = torch.zeros(2 * 32 << 10, dtype=torch.uint8)  # two items
    arguments = {
        "q": problem.index_q,
        "k": problem.shard(0),
        "block_table": problem.block_table,
        "plan": plan,
        "num_valid_pages": problem.num_valid_pages,
        "carrier": torch.full((4, 2, 33), -7, dtype=torch.int32),
    }
    call.refuses(r"pool must have at least 65536 .*had shape \[65528\]", **arguments, pool=pool[:-8])
    call(**arguments, pool=pool)
    assert (arguments["carrier"][..., 16] == 0).all()


def test_a_pool_is_checked_for_short_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_tuning, "PREFILL", {("cpu", "p128_tp2"): PrefillTuning(fused=True, short_tokens=4)})
    call = make_call("fused_local")
    call.refuses(r"pool must have at least 98304 .*had shape \[98296\]", pool=call["pool"][:-8])
    call()
    assert (call["carrier_view"] != -7).all() and (call["pool"] == 255).all()


def empty_window(segments: int, items: int) -> Call:
    """A planner's call for segments without a token and a key, with room for ``items`` items."""
    call = make_call("plan")
    for rule in SEGMENTS:
        call.arguments[rule.name] = torch.zeros(segments + (rule.name.endswith("offsets")), dtype=torch.int32)
    return replace(call, arguments={**call.arguments, "packed_work_info": torch.full((items,), -1)})


@pytest.mark.parametrize(
    ("segments", "total_q", "max_seq_len", "says"),
    (
        (65536, 1, 1, None),
        (65537, 1, 1, "qo_segment_lens must have at most 65536 segments, had 65537"),
        (1, 65535 * 64, 128, None),
        (1, 65535 * 64 + 1, 128, "total_q must make at most 65535 items of 64 tokens in 1 segments, was 4194241"),
        (2, 65534 * 64, 128, None),
        (2, 65534 * 64 + 1, 128, "total_q must make at most 65535 items of 64 tokens in 2 segments, was 4194177"),
        (65535, 64, 1, None),
        (65536, 65536, 1, "total_q must make at most 65535 items of 64 tokens in 65536 segments, was 65536"),
        (1, 1, 65535 * 128, None),
        (1, 1, 65535 * 128 + 1, r"max_seq_len must be in \[1, 8388480\], was 8388481"),
        (1, 32768 * 64, 65535 * 128, None),
        (1, 32769 * 64, 65535 * 128, "max_seq_len must make at most 2147483647 columns of 32769 items, was 8388480"),
        (1, 65535 * 64, 32768 * 128, None),
        (1, 65535 * 64, 32769 * 128, "max_seq_len must make at most 2147483647 columns of 65535 items, was 4194432"),
    ),
)  # fmt: skip
def test_the_limits_of_a_window(segments: int, total_q: int, max_seq_len: int, says: str | None) -> None:
    call = empty_window(segments, items=65536)
    bounds = {"total_q": total_q, "max_query_len": 1, "max_seq_len": max_seq_len}
    if says is not None:
        call.refuses(says, **bounds)
        return
    plan = call(**bounds)
    assert (plan.batch, plan.total_q, plan.columns) == (segments, total_q, math.ceil(max_seq_len / 128))
    # No segment has a token, so there is an empty range and no item.
    room = max_items(total_q, segments)
    assert plan.packed_work_range.tolist() == [0] and not plan.packed_work_info[:room].any()
    assert (plan.packed_work_info[room:] == -1).all()


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    (
        ("window", 2, r"window must be in \[0, 1\], was 2"),
        ("total_q", 8193, r"total_q must be in \[1, 8192\], was 8193"),
        ("max_seq_len", 1001, r"max_seq_len must be in \[1, 1000\], was 1001"),
    ),
)
def test_the_limits_of_an_indexers_window(argument: str, value: int, says: str) -> None:
    indexer = msa_ops.prepare_msa_icp_indexer(**{**LIMITS, "max_num_batched_tokens": 8200})
    call = make_call("window_plan")
    call = Call(indexer.prefill_window_plan, call.arguments, [indexer._work_range, indexer._work_info])
    call.refuses(says, **{argument: value})
    plan = call(**{argument: value - 1})
    # Every window has storage of its own.
    assert bool(indexer._work_range[0].any()) is (argument != "window")
    assert bool(indexer._work_range[1].any()) is (argument == "window")
    assert plan.batch == 3


def test_an_indexer_takes_no_more_segments_than_sequences() -> None:
    indexer = msa_ops.prepare_msa_icp_indexer(**{**LIMITS, "max_num_seqs": 2})
    arguments = make_call("window_plan").arguments
    call = Call(indexer.prefill_window_plan, arguments, [indexer._work_range, indexer._work_info])
    call.refuses(r"segments of qo_segment_lens must be in \[0, 2\], was 3")
    assert call(**{rule.name: call[rule.name][:-1] for rule in SEGMENTS}).batch == 2


@pytest.mark.parametrize("name", ("plan", "window_plan"))
def test_a_plan_takes_numbers_of_numpy(name: str) -> None:
    call = make_call(name)
    plan = call(total_q=np.int64(4), max_query_len=np.int32(3), max_seq_len=np.int64(530))
    assert (plan.total_q, plan.max_query_len, plan.columns) == (4, 3, 5)


# --- the plan that is made on the host --------------------------------------------------------------------------------

HOST = {
    "qo_segment_lens": [1, 0, 3],
    "kv_segment_lens": [300, 9, 530],
    "qo_offset": [299, 9, 527],
}


def host_call(**lens: Any) -> Call:
    """A valid call of the host planner, with some of its lengths replaced."""
    tensors = {name: torch.tensor(lens.get(name, values), dtype=torch.int32) for name, values in HOST.items()}
    arguments = {**tensors, "num_qo_heads": 4, "device": "cpu", "backend": "torch"}
    return Call(msa_ops.msa_icp_index_score_sharded_plan, arguments)


def host_mutations() -> Iterator[tuple[str, Mutation]]:
    """Everything that can be wrong with lengths on the host."""
    for dtype in DTYPES:
        if dtype is not torch.int32:
            says = f"must be torch.int32, was {dtype}"
            yield str(dtype), lambda t, dtype=dtype, says=says: (torch.zeros(t.shape, dtype=dtype), says)
    yield "a dimension more", lambda t: (t[None], r"must have shape \[batch\].*, was \[1, 3\]")
    yield "a dimension less", lambda t: (t[0], r"must have shape \[batch\].*, was \[\]")
    yield "every second element", lambda t: (torch.zeros(6).int()[::2], r"must be contiguous, had strides \(2,\)")
    yield "one element repeated", lambda t: (t[:1].expand(3), r"must be contiguous, had strides \(0,\)")
    yield "negative", lambda t: (torch.tensor([0, 5, -1]).int(), "must not be negative, was -1 at 2")
    yield "meta", lambda t: (t.to("meta"), "must be a dense CPU tensor, was .* on meta")
    yield "sparse", lambda t: (t.to_sparse(), "must be a dense CPU tensor, was of layout torch.sparse_coo on cpu")
    for value in ([1, 0, 3], "words", 7, None, np.zeros(3, dtype=np.int32)):
        kind = re.escape(str(type(value)))
        yield type(value).__name__, lambda t, value=value, kind=kind: (value, f"must be a tensor, was {kind}")


@pytest.mark.parametrize("argument", HOST)
def test_bad_lengths_on_the_host_are_refused(argument: str) -> None:
    call = host_call()
    faults = []
    for what, mutate in host_mutations():
        value, says = mutate(call[argument])
        faults.append((what, call.fault(f"{argument} {says}", **{argument: value})))
    assert_no_faults(faults)


@pytest.mark.parametrize("argument", ("kv_segment_lens", "qo_offset"))
def test_lengths_on_the_host_agree_on_the_segments(argument: str) -> None:
    for count in (0, 2, 4):
        says = rf"{argument} must have shape \[batch\] = \[3\], was \[{count}\]"
        host_call().refuses(says, **{argument: torch.zeros(count, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("lens", "says"),
    (
        ({"qo_segment_lens": [0] * 65536}, None),
        ({"qo_segment_lens": [0] * 65537}, "qo_segment_lens must have at most 65536 segments, was 65537"),
        ({"qo_segment_lens": [65535 * 64]}, None),
        ({"qo_segment_lens": [65535 * 64 + 1]}, "qo_segment_lens must make at most 65535 items .*, was 65536"),
        ({"qo_segment_lens": [1] * 65536}, "qo_segment_lens must make at most 65535 items of 64 tokens, was 65536"),
        ({"qo_segment_lens": [INT32_MAX, 1]}, "qo_segment_lens must have a sum of at most 2147483647, was 2147483648"),
        ({"kv_segment_lens": [65535 * 128]}, None),
        ({"kv_segment_lens": [65535 * 128 + 1]}, "kv_segment_lens must be at most 65535 blocks, was 65536"),
        ({"kv_segment_lens": [INT32_MAX, 1]}, "kv_segment_lens must have a sum of at most 2147483647, was 2147483648"),
        ({"qo_segment_lens": [32768 * 64], "kv_segment_lens": [65535 * 128], "qo_offset": [65535 * 128]}, None),
        (
            {"qo_segment_lens": [32769 * 64], "kv_segment_lens": [65535 * 128], "qo_offset": [65535 * 128]},
            "kv_segment_lens must make at most 2147483647 block columns of all items, was 2147516415",
        ),
        # An item counts only the blocks that it sees.
        ({"qo_segment_lens": [32769 * 64], "kv_segment_lens": [65535 * 128], "qo_offset": [0]}, None),
    ),
)  # fmt: skip
def test_the_limits_of_a_host_plan(lens: dict[str, list[int]], says: str | None) -> None:
    segments = len(next(iter(lens.values())))
    call = host_call(**{**dict.fromkeys(HOST, [0] * segments), **lens})
    if says is not None:
        call.refuses(says)
        return
    plan = call()
    assert plan.batch == segments and plan.columns == max(1, math.ceil(int(call["kv_segment_lens"].max()) / 128))


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    (
        *(("num_qo_heads", value, f"must be .*, was {re.escape(repr(value))}") for value in NOT_FOUR),
        *(("device", value, f"must .*, was {re.escape(repr(value))}") for value in DEVICES),
        ("device", "meta", "must be the CPU or a CUDA device, was meta"),
        *(("backend", value, f"must be .*'cake'.*'torch'.*, was {re.escape(repr(value))}") for value in ("", None, 1)),
    ),
    ids=repr,
)
def test_a_bad_host_plan_is_refused(argument: str, value: Any, says: str) -> None:
    host_call().refuses(f"{argument} {says}", **{argument: value})


def test_a_host_plan_for_cake_needs_a_cuda_device() -> None:
    host_call().refuses('device must be a CUDA device for backend="cake", was cpu', backend="cake")
    if not torch.cuda.is_available():
        host_call().refuses("device must .*, was cuda.*", backend="cake", device=None)
