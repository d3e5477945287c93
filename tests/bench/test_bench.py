# SPDX-License-Identifier: Apache-2.0
"""The benchmark: its rows, tables, plots and options. The measuring code runs on the CPU, with the clock stubbed."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from process_group import ProcessGroup
from rich.console import Console
from torch.overrides import TorchFunctionMode

from flashinfer_msa import bench, files, msa_ops
from flashinfer_msa.bench import ceilings, decode, group, host, peers, prefill, report, rows, series, timing
from flashinfer_msa.bench.jobs import Jobs, Step
from flashinfer_msa.bench.peers import Peer, PeerInputs, Peers, PeerShape
from flashinfer_msa.bench.rows import Row
from flashinfer_msa.cli import bench as bench_cli
from flashinfer_msa.cli.main import main
from flashinfer_msa.layout import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
RECORD = rows.own_rows(json.loads((ROOT / "tests" / "gpu" / "record.json").read_text())["single"]["bench"])
TYPES: dict[str, type] = {key: eval(kind.__forward_arg__) for key, kind in Row.__annotations__.items()}


def check_row(row: Any) -> None:
    """A row is flat, and has known keys of their types."""
    assert {"job", "cold"} <= set(row) <= set(TYPES) and {"us", "bytes"} & set(row), row
    assert row["job"] in report.TITLES
    for key, value in row.items():
        numbers = (int, float) if TYPES[key] is float else (TYPES[key],)
        assert type(value) in numbers, (key, value)
    assert ("peer" in row) == ("peer_us" in row) == ("speedup" in row)


class OnTheCpu(TorchFunctionMode):
    """Creates on the CPU every tensor that is requested on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def run_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> OnTheCpu:
    """Let the measuring code run on the CPU, in the context that is returned."""
    generator, group_indexers = torch.Generator, decode.group_indexers
    on_torch = SimpleNamespace(
        **{name: partial(getattr(msa_ops, name), backend="torch") for name in msa_ops.__all__ if "msa_icp_" in name}
    )
    on_torch.msa_icp_decode_pool_bytes = msa_ops.msa_icp_decode_pool_bytes
    for module in (decode, prefill):
        monkeypatch.setattr(module, "msa_ops", on_torch)
        monkeypatch.setattr(
            module,
            "group_indexers",
            lambda layout, _, **limits: group_indexers(layout, ["cpu"], backend="torch", **limits),
        )
    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 16)
    monkeypatch.setattr(torch, "Generator", lambda device: generator("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench.Ceilings, "read_us", lambda self, keys: 1.0)
    monkeypatch.setattr(bench.Ceilings, "fp8_gemm", {"tflops": 1000.0})
    monkeypatch.setattr(bench.Ceilings, "fp16_gemm", {"tflops": 500.0})
    return OnTheCpu()


@pytest.fixture
def stub_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Runs the measuring code on the reference: every call once, and a call takes 2 us, or 0.5 us if it is repeated.

    Returns the numbers of calls timed.
    """
    calls: list[int] = []

    def graph_us(timed: Sequence[Callable[[], None]], *, replays: int = 11) -> float:
        for call in dict.fromkeys(timed):
            call()
        calls.append(len(timed))
        return 2.0 if len(set(timed)) > 1 else 0.5

    for module in (decode, prefill, peers, ceilings):
        monkeypatch.setattr(module, "graph_us", graph_us)
    with run_on_the_reference(monkeypatch):
        yield calls


def counted_operations(tokens: int, context: int) -> int:
    """Multiplications and additions of all ranks together, counted key by key, for the last tokens of a context."""
    pairs = sum(key <= token for token in range(context - tokens, context) for key in range(context))
    return 2 * 4 * 128 * pairs


def always(us: float) -> Callable[[PeerInputs], Any]:
    return lambda inputs: lambda keys: None


def two_peers(report: Callable[[str], None] = print) -> Peers:
    """A peer that does everything, and one that has only a chain, which fails."""

    def fail(inputs: PeerInputs) -> Any:
        raise RuntimeError("no kernel\nfor this")

    jobs = ("decode_score", "decode_chain", "prefill_score", "prefill_select")
    return Peers([Peer("Good 1.0", dict.fromkeys(jobs, always(2.0))), Peer("Bad 2.0", {"decode_chain": fail})], report)


@pytest.mark.parametrize("name", LAYOUTS)
def test_decode_rows(stub_clock: list[int], name: str) -> None:
    layout, notes = LAYOUTS[name], []
    shape = bench.DecodeShape(3, 1000, 2, True)
    jobs = (decode.SCORE, *decode.CHAINS)
    found = list(bench.decode_rows(layout, shape, jobs, bench.Ceilings(), two_peers(notes.append)))
    for row in found:
        check_row(row)
        assert (row["layout"], row["batch"], row["ctx"], row["query_len"], row["cold"]) == (layout.title, *shape)
    own = rows.own_rows(found)
    assert [row["job"] for row in own] == [*jobs]
    pages = 3 * -(-1000 // layout.page_size)
    size = pages * layout.page_bytes
    assert own[0]["bytes"] == size + pages * 2 * 4 * 4 and rows.local_key_bytes(own[0]) == size
    assert own[0]["tb_s"] == pytest.approx(own[0]["bytes"] / 2.0 / 1e6)
    assert own[0]["ceiling_ratio"] == pytest.approx(own[0]["bytes"] / size / 2.0)
    compared = [row for row in found if "peer" in row]
    assert [(row["job"], row["peer"]) for row in compared] == [
        ("decode_score", "Good 1.0"),
        ("decode_chain", "Good 1.0"),
    ]
    assert f"{1000 // layout.world_size} keys a request, {layout.heads_per_rank} heads" in compared[0]["note"]
    # The time per chain of a graph that re-arms once and runs many chains, less the re-arming.
    chains = max(stub_clock) - 1
    us = pytest.approx((2.0 * (chains + 1) - 0.5) / chains)
    assert [row["us"] for row in own] == [2.0, us, us]
    assert [row["speedup"] for row in compared] == [1.0, pytest.approx(2.0 / us.expected)] and min(stub_clock) >= 20
    assert notes == [
        f"Bad 2.0 is left out of decode_chain, first at batch 3, 1000 keys, {layout.heads_per_rank} heads, "
        "query length 2: RuntimeError: no kernel"
    ]


def test_only_the_jobs_asked_for_are_measured(stub_clock: list[int]) -> None:
    case = (LAYOUTS["p128_tp2"], bench.DecodeShape(1, 256, 1, False))
    for jobs in ((decode.SCORE,), decode.CHAINS):
        assert [row["job"] for row in bench.decode_rows(*case, jobs, bench.Ceilings())] == [*jobs]


def test_cold_cases_rotate_over_distinct_keys(stub_clock: list[int]) -> None:
    layout = LAYOUTS["p128_tp2"]
    for cold, copies in ((True, 1 + (1 << 16) // (4 * layout.page_bytes)), (False, 1)):
        case = bench.DecodeCase.make(layout, 2, 256, 1, cold=cold)
        assert len({key.data_ptr() for key in case.keys}) == len(case.keys) == copies
        assert all(torch.equal(key.view(torch.uint8), case.keys[0].view(torch.uint8)) for key in case.keys)
    assert timing.at_least_min_calls([1, 2, 3]) == [1, 2, 3] * 7


def test_a_ragged_case_has_every_request_in_pages_of_its_own(stub_clock: list[int]) -> None:
    layout = LAYOUTS["p256_tp4"]
    case = bench.DecodeCase.make_ragged(layout, [1000, 3, 256], 3, cold=False)
    assert case.seq_lens.tolist() == [1000, 3, 256]
    assert case.num_valid_pages.tolist() == [8, 8, 8, 1, 1, 1, 2, 2, 2]
    used = [*case.block_table[0, :4].tolist(), case.block_table[1, 0].item(), case.block_table[2, 0].item()]
    assert sorted(used) == list(range(6)) and case.moved_bytes == 6 * (layout.page_bytes + 3 * 16)


def test_ragged_rows(stub_clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    make = bench.DecodeCase.make_ragged
    monkeypatch.setattr(
        bench.DecodeCase,
        "make_ragged",
        lambda layout, contexts, *rest, **options: make(layout, [c // 1024 for c in contexts], *rest, **options),
    )
    (row,) = bench.ragged_rows(LAYOUTS["p128_tp4"], bench.Ceilings())
    check_row(row)
    assert (row["job"], row["name"], row["batch"], row["ctx"]) == ("decode_score", "ragged batch", 64, 1 << 20)


def test_selection_rows(stub_clock: list[int]) -> None:
    found = list(bench.selection_rows([LAYOUTS["p256_tp4"]]))
    for row in found:
        check_row(row)
    assert [(row["job"], row["layout"], row["tokens"], row["ctx"]) for row in found] == [
        (job, "P128-TP4", tokens, columns * 128)
        for tokens, columns in ((64, 1024), (256, 1024), (256, 8192))
        for job in ("select_publish", "merge")
    ]


def test_balance_rows(stub_clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    make = bench.PrefillCase.make
    few = [(100, 1000), (10, 200)]
    monkeypatch.setattr(bench.PrefillCase, "make", lambda layout, _, **options: make(layout, few, **options))
    (row,) = bench.balance_rows(LAYOUTS["p128_tp2"])
    check_row(row)
    assert (row["job"], row["name"], row["tokens"]) == ("prefill_score", "ragged window", 110)
    assert row["note"].endswith("is 1.00 of the longest")


def test_prefill_rows(stub_clock: list[int]) -> None:
    layout = LAYOUTS["p256_tp2"]
    both, shapes = two_peers(), []
    compare = both.compare
    both.compare = lambda row, shape, note: shapes.append(shape) or compare(row, shape, note)
    found = list(bench.prefill_rows(layout, bench.PrefillShape(40, 600, True), bench.Ceilings(), both))
    assert shapes == [PeerShape(1, 600, 2, 40, True)] * 2
    for row in found:
        check_row(row)
    own = rows.own_rows(found)
    assert [(row["job"], row.get("name")) for row in own] == [
        ("prefill_plan", None),
        ("prefill_score", None),
        ("prefill_score", "exact"),
        ("prefill_select", None),
        ("merge", None),
        ("prefill_chain", None),
        ("prefill_chain", "score and select"),
        ("prefill_fused", None),
    ]
    assert own[1]["flops"] == own[2]["flops"] == counted_operations(40, 600) / 2
    assert own[1]["ceiling_ratio"] == pytest.approx(own[1]["flops"] / 2.0 / 1e6 / 1000.0)
    # Half the ceiling, for the same time.
    assert own[2]["ceiling_ratio"] == pytest.approx(2 * own[1]["ceiling_ratio"])
    # Scores of 256-token columns: 4 heads, 40 tokens, 3 columns each.
    assert own[3]["bytes"] == 4 * 4 * 40 * 3
    assert own[7]["separate_ratio"] == own[7]["us"] / own[6]["us"] == 1.0
    score, select = [row for row in found if "peer" in row]
    assert (score["job"], select["job"]) == ("prefill_score", "prefill_select")
    assert "2 heads of all keys" in score["note"]
    assert select["note"] == "theirs: 2 heads x 40 rows of 5 blocks; ours: 4 x 40 of 3, to be merged"


def test_the_exact_scorer_is_asked_for(stub_clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench.PrefillCase.make(LAYOUTS["p128_tp2"], [(4, 300)], cold=False)
    asked: list[str] = []
    monkeypatch.setattr(
        prefill.msa_ops, "msa_icp_index_score_sharded", lambda *_, accumulation, **__: asked.append(accumulation)
    )
    case.score(case.make_plan(), case.keys[0])
    case.score(case.make_plan(), case.keys[0], "exact")
    assert asked == ["tensor", "exact"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_fused_and_separate_chains_write_the_same_rows(stub_clock: list[int], name: str) -> None:
    case = bench.PrefillCase.make(LAYOUTS[name], [(40, 3000)], cold=False)
    written = []
    for launch in (case.local, case.fused):
        case.carrier.fill_(-7)
        launch(case.make_plan(), case.keys[0])
        written.append(case.carrier.clone())
    assert torch.equal(*written) and (written[0] != -7).all()


def test_the_last_tokens_of_a_case_are_a_case(stub_clock: list[int]) -> None:
    """The last tokens of a window select the same blocks as in the whole window."""
    whole = bench.PrefillCase.make(LAYOUTS["p256_tp4"], [(40, 3000)], cold=True)
    whole.local(whole.make_plan(), whole.keys[0])
    wanted = whole.carrier[:, -5:].clone()
    case = whole.last(5)
    assert case.shape == {**whole.shape, "tokens": 5} and case.keys is whole.keys
    assert case.flops == counted_operations(5, 3000) / 4
    for launch in (case.local, case.fused):
        case.carrier.fill_(-7)
        launch(case.make_plan(), case.keys[0])
        assert torch.equal(case.carrier, wanted)
    case.merge()
    assert (case.output >= -1).all() and case.output.shape == (5, 1, 16)


def test_sweep_rows(stub_clock: list[int]) -> None:
    found = list(bench.sweep_rows(LAYOUTS["p128_tp4"], 600, [1, 16, 40], bench.Ceilings(), cold=True))
    for row in found:
        check_row(row)
        assert (row["ctx"], row["cold"], row["layout"]) == (600, True, "P128-TP4")
    assert [(row["tokens"], row["job"], row.get("name")) for row in found] == [
        (tokens, job, name)
        for tokens in (1, 16, 40)
        for job, name in (("prefill_score", None), ("prefill_chain", "score and select"), ("prefill_fused", None))
    ]
    assert found[0]["flops"] == counted_operations(1, 600) / 4


def test_select_rows(stub_clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "SELECT_COLUMNS", (20, 512))
    found = list(bench.select_rows(bench.Ceilings(), tokens=8))
    for row, columns in zip(found, (20, 512), strict=True):
        check_row(row)
        assert (row["job"], row["name"], row["tokens"], row["ctx"]) == (
            "prefill_select",
            "random scores",
            8,
            columns * 128,
        )
        # The scores are cold; reading them takes the 1 us that the stub says.
        assert row["bytes"] == 4 * 8 * 4 * columns and (row["us"], row["ceiling_ratio"]) == (2.0, 0.5)


def test_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[tuple[torch.dtype, int]] = []

    def multiply(a: torch.Tensor, b: torch.Tensor, **_: Any) -> None:
        multiplied.append((a.dtype, 2 * a.shape[0] * a.shape[1] * b.shape[1]))
        assert a.shape[1] == b.shape[0]

    monkeypatch.setattr(ceilings, "_GEMM_SIZE", 16)
    monkeypatch.setattr(ceilings, "graph_us", lambda calls: [call() for call in calls] and 4.0)
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(torch, "matmul", multiply)
    measured = bench.Ceilings()
    with OnTheCpu():
        found = [measured.fp8_gemm, measured.fp16_gemm, measured.fp8_gemm]
    for row in found:
        check_row(row)
    # The operations of the matrices that were multiplied, in the 4 us of the stub.
    ((fp8, operations),) = set(multiplied[:20])
    assert (fp8, operations) == (torch.float8_e4m3fn, found[0]["flops"])
    assert multiplied[20:] == [(torch.float16, operations)] * 20
    assert {row["tflops"] for row in found} == {operations / 4.0 / 1e6}
    assert [row["name"] for row in found] == ["fp8_gemm", "fp16_gemm", "fp8_gemm"]


def test_host_rows(stub_clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    launcher = SimpleNamespace(operation=lambda name: lambda *arguments: asked.append((name, *arguments)) or 4500)
    monkeypatch.setattr(host, "native", launcher)
    found = list(bench.host_rows(calls=3, context=128))
    for row in found:
        check_row(row)
    names = ["decode, 3 launches", "prepared decode step", "layer graph replay", "3 bare cuLaunchKernelEx"]
    assert [row["name"] for row in found] == names
    assert found[2]["note"] == "0 of 12 layers were replays"  # there are no graphs on a CPU
    assert found[3]["us"] == 4.5 and asked == [("bare_launches", 3, 3)] * 3


class FakeEvent:
    """An event one millisecond after the event recorded before it."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0 + dist.get_rank()


def measure_group(rank: int, name: str) -> list[Row]:
    """What a rank of a group measures, on the CPU."""
    layout = LAYOUTS[name]
    with pytest.MonkeyPatch.context() as monkeypatch, run_on_the_reference(monkeypatch):

        def capture(calls: group.Calls) -> Any:
            for call in calls:
                call()
            return SimpleNamespace(replay=lambda: [call() for call in calls])

        monkeypatch.setattr(group, "capture", capture)
        monkeypatch.setattr(group, "group_us", partial(group.group_us, replays=2))
        monkeypatch.setattr(peers, "graph_us", lambda calls: 2.0)
        monkeypatch.setattr(timing, "_REPLAY_BYTES", 1)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(group, "DECODE_SHAPES", [bench.DecodeShape(2, 512, 1, True)])
        monkeypatch.setattr(group, "PREFILL_SHAPE", bench.PrefillShape(100, 300, True))
        monkeypatch.setattr(group, "LAYOUTS", {name: layout})
        monkeypatch.setattr(group, "host_rows", lambda: [row for row in RECORD if row["job"] == "host"][-1:])
        monkeypatch.setattr(group, "memory_rows", lambda: RECORD[:1])
        ranks = group.Ranks(rank, layout.world_size, dist.group.WORLD)
        steps = group.group_steps(ranks, two_peers() if rank == 0 else None)
        return [row for step in steps for row in step.rows()]


def test_rows_of_ranks_in_processes() -> None:
    """Every rank runs the same layers. A layer takes as long as on the slowest rank, and rank 0 compares with peers."""
    with ProcessGroup(2) as processes:
        first, second = processes.run(measure_group, "p256_tp2", timeout=100)
    for row in first + second:
        check_row(row)
    chain, *compared = [row for row in first if row["job"] == "decode_chain"]
    # 21 calls: a multiple of the slot sets.
    assert chain["us"] == pytest.approx(2e3 / 21, abs=1e-3)
    assert chain["ceiling_ratio"] == pytest.approx(21 / 2e3, abs=1e-3)
    assert [(row["peer"], row["peer_us"]) for row in compared] == [("Good 1.0", 2.0)]
    parts = [(row["job"], row.get("name")) for row in second]
    layer = [("prefill_chain", "score and select"), ("prefill_chain", "exchange"), ("merge", None)]
    assert parts == [*layer, ("prefill_chain", "with the exchange")]
    assert [row for row in first if row["job"] in ("prefill_chain", "merge")] == second
    exchanged = second[1]
    assert exchanged["bytes"] == 100 * 4 * 33 * 4 // 2 and exchanged["us"] == 100.0
    assert all(row["gpus"] == 2 for row in [*second, chain, *compared])
    assert [row["gpus"] for row in first[-2:]] == [1, 1] and first[-2]["job"] == "host"


def test_ranks_without_a_gpu_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for size in ("1", "2", "3"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(RuntimeError, match=f"a GPU for each, were {size} ranks and 1 GPUs"):
            group.Ranks.join()


def test_peers_are_measured_once_a_shape(stub_clock: list[int]) -> None:
    made: list[PeerShape] = []

    def step(inputs: PeerInputs) -> Any:
        made.append(inputs.shape)
        return lambda keys: None

    both = Peers([Peer("A", {"decode_chain": step})], print)
    row: Row = {"job": "decode_chain", "layout": "P128-TP2", "cold": True, "us": 1.0}
    shape = PeerShape(1, 512, 2, 1, True)
    for _ in range(2):
        (compared,) = both.compare(row, shape, "a note")
        assert compared == {**row, "peer": "A", "peer_us": 2.0, "speedup": 2.0, "note": "a note"}
    assert list(both.compare({**row, "job": "merge"}, shape, "")) == []
    assert made == [shape]
    list(both.compare(row, shape._replace(heads=1), ""))
    assert len(made) == 2


def test_a_step_that_never_works_is_given_up_and_told_once(stub_clock: list[int]) -> None:
    tried: list[int] = []
    notes: list[str] = []

    def fail(inputs: PeerInputs) -> Any:
        tried.append(inputs.shape.batch)
        raise OSError("no compiler")

    failing = Peers([Peer("A", {"decode_chain": fail})], notes.append)
    row: Row = {"job": "decode_chain", "layout": "P128-TP2", "cold": True, "us": 1.0}
    for batch in (1, 2, 3, 4):
        assert list(failing.compare(row, PeerShape(batch, 128, 1, 1, False), "")) == []
    assert tried == [1, 2] and len(notes) == 1 and "OSError: no compiler" in notes[0]


def test_peers_that_are_not_installed_are_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flashinfer.msa_ops", "vllm", "vllm_index_topk"):
        monkeypatch.setitem(sys.modules, name, None)
    notes: list[str] = []
    found = bench.find_peers(notes.append)
    row: Row = {"job": "decode_chain", "layout": "P128-TP2", "cold": True, "us": 1.0}
    assert list(found.compare(row, PeerShape(1, 128, 1, 1, True), "")) == []
    assert [note.split(",")[0] for note in notes] == ["FlashInfer is left out", "vLLM is left out"]


def test_calls_of_the_peers(stub_clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer's functions get their documented arguments, made from the same inputs."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def fake(module: str, *names: str) -> None:
        found = ModuleType(module)
        for name in names:
            setattr(found, name, lambda *a, _name=name, **k: calls.append((_name, a, k)))
        monkeypatch.setitem(sys.modules, module, found)

    fake("flashinfer", "nothing")
    fake("flashinfer.msa_ops", "msa_proxy_score", "msa_topk_select")
    fake("vllm_index_topk", "minimax_m3_index_decode", "minimax_m3_index_score", "minimax_m3_index_topk")
    inputs = PeerInputs(PeerShape(2, 300, 1, 3, True))
    assert inputs.num_valid_blocks.tolist() == [3] * 6 and inputs.prefix_lens.tolist() == [297, 297]
    assert PeerInputs(PeerShape(1, 129, 1, 2, False)).num_valid_blocks.tolist() == [1, 2]
    assert inputs.query.shape == (6, 1, 128) and inputs.keys[0].shape == (6, 128, 128) and len(inputs.keys) == 2
    assert inputs.query_offsets.tolist() == [0, 3, 6] and sorted(inputs.block_table.flatten().tolist()) == [*range(6)]

    for peer, wanted in (
        (
            peers.flashinfer_peer(),
            {
                "decode_score": ["msa_proxy_score"],
                "decode_chain": ["msa_proxy_score", "msa_topk_select"],
                "prefill_score": ["msa_proxy_score"],
                "prefill_select": ["msa_topk_select"],
            },
        ),
        (
            peers.vllm_peer(),
            {
                "decode_chain": ["minimax_m3_index_decode"],
                "prefill_score": ["minimax_m3_index_score"],
                "prefill_select": ["minimax_m3_index_topk"],
            },
        ),
    ):
        assert list(peer.steps) == list(wanted)
        for job, names in wanted.items():
            step = peer.steps[job](inputs)
            calls.clear()
            step(inputs.keys[1])
            assert [name for name, _, _ in calls] == names
            if "select" not in job:
                assert calls[0][1][1].data_ptr() == inputs.keys[1].data_ptr()
    peers.flashinfer_peer().steps["decode_chain"](inputs)(inputs.keys[0])
    (_, score, options), (_, select, forced) = calls[-2:]
    assert score[1].shape == (6, 1, 128, 128) and options["output"].shape == (1, 3, 6) and options["max_seqlen_q"] == 3
    assert select[0] is options["output"] and select[1] == 16
    assert (forced["force_begin_blocks"], forced["force_end_blocks"]) == (0, 1)


def test_streaming_reads_take_whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of any size are read to their end, and never beyond it."""
    read: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda words, sums, count, **_: read.append((words.numel() * 4, count))

    monkeypatch.setattr(ceilings, "_read_kernel", Kernel)
    monkeypatch.setattr(ceilings, "graph_us", lambda calls, **_: [call() for call in calls] and 3.0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
    for size, whole in ((1 << 16, 1 << 16), ((1 << 16) + 128, 1 << 17), (4096, 1 << 16)):
        read.clear()
        assert bench.streaming_read_us([torch.zeros(size, dtype=torch.uint8)]) == 3.0
        assert set(read) == {(whole, whole // 4)}


def test_record_and_sample_rows_have_the_schema() -> None:
    for row in (*RECORD, *with_peers(RECORD)):
        check_row(row)
    with pytest.raises(AssertionError):
        check_row({**RECORD[0], "nested": {}})
    with pytest.raises(AssertionError):
        check_row({**RECORD[0], "us": "1"})


def with_peers(found: Sequence[Row]) -> list[Row]:
    """``found``, with rows that compare chains, scorers and prefill steps with two peers."""
    added: list[Any] = []
    for row in found:
        if row["job"] in ("decode_chain", "prefill_score", "prefill_select") and "name" not in row:
            case = {key: row[key] for key in (*rows.CASE_KEYS, "us") if key in row}
            for peer, ratio in (("FlashInfer 0.7.4", 3.25), ("vLLM", 3.5)):
                added.append({**case, "peer": peer, "peer_us": row["us"] * ratio, "speedup": ratio})
    return [*found, *added]


def render(found: Sequence[Row]) -> str:
    console = Console(width=160, file=io.StringIO())
    report.print_tables(console, found)
    return console.file.getvalue()


def test_tables_show_every_case_with_its_ratios() -> None:
    text = render(with_peers(RECORD))
    for job, title in report.TITLES.items():
        assert (title in text) == any(row["job"] == job for row in RECORD), job
    assert "3.25x" in text and "3.50x" in text and "FlashInfer 0.7.4" in text
    chains = text[text.index("Decode chain:") : text.index("Fused decode chain")]
    own = [row for row in RECORD if row["job"] == "decode_chain"]
    assert chains.count("3.25x") == len(own) == sum(line.startswith("│ P") for line in chains.splitlines())
    assert "times" not in render(RECORD)


def test_a_table_counts_where_peers_are_faster() -> None:
    """In its caption; a ratio just below 1 does not read as 1."""
    own = [row for row in RECORD if row["job"] == "decode_chain"][:2]
    found: list[Any] = [
        {**row, "peer": peer, "peer_us": row["us"] * ratio, "speedup": ratio}
        for peer, ratios in (("A", (0.75, 0.999)), ("B", (1.0, 2.0)))
        for row, ratio in zip(own, ratios, strict=True)
    ]
    text = render([*own, *found])
    caption = "Below 1x the peer is faster: A in 2 of 2 cases, at worst 0.75x, B nowhere (2 cases)."
    assert caption == report.where_peers_are_faster(found) and caption in " ".join(text.split())
    assert "<1.00x" in text and report.ratio_text(1.0) == "1.00x"
    assert "Below 1x" not in render(own) and report.where_peers_are_faster(own) == ""


def test_a_case_that_a_peer_lacks_has_a_dash() -> None:
    own = [row for row in RECORD if row["job"] == "decode_chain"][:2]
    text = render([*own, {**with_peers(own)[2], "peer": "Half"}])
    lines = [line for line in text.splitlines() if line.startswith("│ P")]
    assert "3.25x" in lines[0] and lines[1].rstrip(" │").endswith("-")


@pytest.mark.parametrize("name", ("roofline", "latency", "prefill"))
def test_plots_are_deterministic_and_of_their_rows(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flashinfer_msa.bench.plots import PLOTS, draw

    found = with_peers(RECORD)
    written = []
    for count in range(2):
        path = tmp_path / f"{count}.svg"
        draw(name, found, "GPU X, 2026-01-02", path, "sha256:abc")
        written.append(path.read_bytes())
    assert written[0] == written[1]
    text = written[0].decode()
    assert "<dc:identifier>sha256:abc</dc:identifier>" in text and "<dc:date>" not in text
    assert "GPU X, 2026-01-02; cold keys" in text
    for layout in LAYOUTS.values():
        assert f">{layout.title}<" in text
    if name == "prefill":
        return
    axes = PLOTS[name](series.SERIES[name](found), "").axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    layout = LAYOUTS["p128_tp4"].title
    shown = [row for row in series.SERIES[name](RECORD) if row.get("layout") == layout and row.get("query_len", 1) == 1]
    key = {"roofline": "tb_s", "latency": "us"}[name]
    assert sorted(lines[layout].get_ydata()) == sorted(row[key] for row in shown) and len(shown) > 2
    if name == "latency":
        dashed = {label: line for label, line in lines.items() if line.get_linestyle() == "--"}
        assert len(dashed) == 4
        theirs = dashed["vLLM, unsharded, heads of TP4"].get_ydata()
        assert set(lines[layout].get_ydata() * 3.5) <= set(theirs)
        assert all(
            line.get_linestyle() != "--" for line in PLOTS[name](series.SERIES[name](RECORD), "").axes[0].get_lines()
        )


def test_the_prefill_plot_has_a_panel_a_layout_and_a_line_a_context() -> None:
    pytest.importorskip("matplotlib")
    from flashinfer_msa.bench.plots import prefill as plot

    special: Any = {**of_prefill("P128-TP4", 64, 8192), "name": "exact", "tflops": 1.0}
    found = [
        {"job": "ceiling", "name": "fp8_gemm", "tflops": 1300.0, "us": 1.0, "cold": False},
        {"job": "ceiling", "name": "fp16_gemm", "tflops": 650.0, "us": 1.0, "cold": False},
        *(of_prefill("P128-TP4", tokens, context) for context in (32768, 8192) for tokens in (2048, 1, 64)),
        of_prefill("P256-TP2", 64, 32768),
        special,
    ]
    figure = plot(series.SERIES["prefill"](with_peers(found)), "here")
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(panels) == ["P128-TP4", "P256-TP2"]
    lines = {line.get_label(): line for line in panels["P128-TP4"].get_lines()}
    assert list(lines["context 8K"].get_xdata()) == [1, 64, 2048]
    assert list(lines["context 8K"].get_ydata()) == [1 + 8, 64 + 8, 2048 + 8]
    assert set(lines["FP8 matrix product,\n8192 x 8192 x 8192"].get_ydata()) == {1300.0}
    points = [
        line for line in panels["P256-TP2"].get_lines() if line.get_linestyle() == "None" and len(line.get_xdata())
    ]
    assert [list(line.get_ydata()) for line in points] == [[(64 + 32) / 3.25], [(64 + 32) / 3.5]]
    assert {line.get_color() for line in points} == {lines["context 32K"].get_color()}
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown[1:] == ["context 8K", "context 32K", "FlashInfer 0.7.4", "vLLM"]
    # All panels share one scale, which shows every line.
    assert len({axes.get_ylim() for axes in panels.values()}) == 1 and figure.axes[0].get_ylim()[1] > 2056
    assert len(plot([], "nothing").axes) == 0


def of_prefill(layout: str, tokens: int, context: int) -> Any:
    """A prefill scorer's row of a made-up rate."""
    rate = float(tokens + context // 1024)
    case = {"job": "prefill_score", "layout": layout, "tokens": tokens, "ctx": context, "heads": 4, "cold": True}
    return {**case, "us": 5.0, "flops": 1.0, "tflops": rate, "ceiling_ratio": 0.5}


def test_the_table_of_the_fused_prefill_chain_has_its_share() -> None:
    case = {key: value for key, value in of_prefill("P128-TP4", 64, 8192).items() if key in rows.CASE_KEYS}
    text = render(
        [
            {**case, "job": "prefill_chain", "name": "score and select", "us": 8.0},
            {**case, "job": "prefill_fused", "us": 6.0, "separate_ratio": 0.75},
        ]
    )
    fused = text[text.index(report.TITLES["prefill_fused"]) :]
    assert "separate" in fused and "0.75" in fused
    assert "score and select" in text[: text.index(report.TITLES["prefill_fused"])]


def test_the_plot_of_peers_has_every_comparison_of_whole_layers(tmp_path: Path) -> None:
    """Decode chains, and prefill windows of which score and select of a peer were measured."""
    pytest.importorskip("matplotlib")
    from flashinfer_msa.bench.plots import draw, peers

    chain = next(row for row in RECORD if row["job"] == "decode_chain" and row["cold"])
    parts = [{**of_prefill("P256-TP4", 64, 8192), "job": f"prefill_{job}"} for job in ("score", "select", "chain")]
    half = {**of_prefill("P256-TP4", 16, 8192), "job": "prefill_chain"}
    peer = {"peer": "A", "peer_us": 4.0}
    found = [chain, *parts, half, {**chain, "peer": "B", "speedup": 2.0}]
    found += [{**row, **peer, "speedup": 0.8} for row in parts[:2]]
    found.append({**half, **peer, "job": "prefill_score", "speedup": 0.8})
    shown = series.SERIES["peers"](found)
    assert [(row["peer"], row["speedup"]) for row in shown] == [("B", 2.0), ("A", 8.0 / 5.0)]
    figure = peers(shown, "here")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "B (faster where shaded)",
        "A (faster where shaded)",
    ]
    points = [
        {line.get_label(): list(line.get_xdata()) for line in axes.get_lines() if line.get_linestyle() == "None"}
        for axes in figure.axes
    ]
    assert points[0][chain["layout"]] == [2.0] and points[1]["P256-TP4"] == [8.0 / 5.0]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()][1] == "prefill 64 of 8K"
    left, right = figure.axes[1].get_xlim()
    assert left < 1 < right
    assert len(peers([], "nothing").axes) == 0
    draw("peers", found, "here", tmp_path / "x.svg", "sha256:abc")
    assert "<dc:identifier>sha256:abc</dc:identifier>" in (tmp_path / "x.svg").read_text()


def test_plots_of_warm_rows_alone_and_of_one_case(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flashinfer_msa.bench.plots import draw

    warm = [row for row in RECORD if not row["cold"] and row.get("batch") == 1][:3]
    for name in ("roofline", "latency"):
        draw(name, warm, "here", tmp_path / "x.svg")
        assert "here; warm keys" in (tmp_path / "x.svg").read_text()
        draw(name, warm, "here", tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    found: list[Any] = [{"job": "host", "us": 1.5, "cold": False}, {"job": "host", "us": 2.5, "cold": False}]
    rows.write_rows(path, found)
    assert json.loads(path.read_text()) == found and path.stat().st_mode & 0o777 == 0o644
    replace = files.os.replace

    def full(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        rows.write_rows(path, [])
    monkeypatch.setattr(files.os, "replace", replace)
    assert json.loads(path.read_text()) == found and list(tmp_path.iterdir()) == [path]


def test_steps_of_the_jobs_cover_layouts_and_shapes() -> None:
    jobs = Jobs([LAYOUTS["p128_tp2"], LAYOUTS["p256_tp4"]])
    labels = [step.label for step in jobs.decode()]
    assert "P256-TP4, 32 x 128K, query length 8, cold" in labels and "P256-TP4, 1 x 1M, query length 1, warm" in labels
    # No L2 cache holds 64 MiB of keys.
    assert "P128-TP2, 1 x 1M, query length 1, cold" in labels and "P128-TP2, 1 x 1M, query length 1, warm" not in labels
    assert "P128-TP2, ragged batch" in labels and "publisher and merge" in labels
    warm = [step.label for step in jobs.decode(temperatures=(False,))]
    assert not any("cold" in label or "ragged" in label for label in warm) and "publisher and merge" in warm
    asked = [bench.DecodeShape(5, 4096, 1, True)]
    assert [step.label for step in jobs.decode(asked)][2:] == [
        f"{title}, 5 x 4K, query length 1, cold" for title in ("P128-TP2", "P256-TP4")
    ]
    assert [step.label for step in jobs.prefill([bench.PrefillShape(100, 200, False)])] == [
        "matrix products",
        "P128-TP2, 100 of 200, warm",
        "P256-TP4, 100 of 200, warm",
    ]
    labels = [step.label for step in jobs.prefill()]
    assert "P128-TP2, 1 to 8192 of 200K, warm" in labels and "P256-TP4, 1 to 1024 of 128K, cold" in labels
    assert "selection of random scores" in labels and "P128-TP2, ragged window" in labels
    warm = [step.label for step in jobs.prefill(temperatures=(False,))]
    assert "selection of random scores" not in warm and not any("cold" in label for label in warm)
    cold = [step.label for step in jobs.prefill(temperatures=(True,))]
    every = [step.label for step in jobs.everything()]
    assert set(cold) <= set(every) and not any("to 8192" in label and "warm" in label for label in every)
    labels = [step.label for step in jobs.decode()]
    assert len(every) == len(set(every)) and every[-1] == "host time" and "P256-TP4, ragged window" in every
    assert set(labels) | {step.label for step in jobs.chain()} <= set(every)


def test_windows_of_the_sweep_are_those_that_are_not_measured_whole() -> None:
    swept = [(tokens, context) for context, counts in prefill.SWEEPS.items() for tokens in counts]
    whole = {shape[:2] for shape in bench.PREFILL_SHAPES}
    assert swept and len(set(swept)) == len(swept) and not whole & set(swept)
    assert all(tokens <= context for tokens, context in swept)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A GPU that measures the record's rows. Returns what the jobs were asked for."""
    asked: list[tuple[str, Any]] = []
    monkeypatch.setattr(bench_cli, "_require_gpu", lambda ceilings: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU X")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def job(name: str) -> Callable[..., list[Step]]:
        def steps(self: Jobs, *arguments: Any) -> list[Step]:
            asked.append((name, self.layouts, *arguments))
            found = [row for row in RECORD if row["job"].startswith(("ceiling", name.replace("chain", "decode_chain")))]
            return [Step("some", lambda: found[:5]), Step("others", lambda: found[5:])]

        return steps

    for name in ("decode", "chain", "prefill", "host"):
        monkeypatch.setattr(Jobs, name, job(name))
    return asked


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.mark.parametrize("job", ("decode", "chain", "prefill", "host"))
def test_a_job_prints_and_writes_its_rows(ran: list[tuple[str, Any]], job: str, tmp_path: Path) -> None:
    result = invoke(job, "--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "rows.json").read_text())
    assert len(written) > 4 and all(row in RECORD for row in written)
    for row in written:
        assert report.TITLES[row["job"]] in result.output
    assert ran[0][0] == job


@pytest.mark.parametrize("job", ("decode", "chain", "prefill"))
def test_a_job_plots_its_rows(ran: list[tuple[str, Any]], job: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = invoke(job, "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_options_choose_layouts_and_shapes(ran: list[tuple[str, Any]]) -> None:
    assert invoke("decode").exit_code == 0
    assert invoke("decode", "--layout", "P128-TP2", "--cold").exit_code == 0
    assert invoke("chain", "--batch", "1", "--batch", "2", "--query-len", "3", "--warm").exit_code == 0
    assert invoke("prefill", "--tokens", "64", "--context", "256").exit_code == 0
    everywhere, tp2 = list(LAYOUTS.values()), [LAYOUTS["p128_tp2"]]
    assert ran == [
        ("decode", everywhere, [], (True, False)),
        ("decode", tp2, [], (True,)),
        ("chain", everywhere, [(1, 131072, 3, False), (2, 131072, 3, False)], (False,)),
        ("prefill", everywhere, [(64, 256, True), (64, 256, False)], (True, False)),
    ]


def test_peers_that_are_absent_do_not_end_a_job(ran: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Peer:
        raise ModuleNotFoundError("No module named 'it'")

    monkeypatch.setattr(peers, "KNOWN_PEERS", {"It": missing})
    result = invoke("chain", "--peers")
    assert result.exit_code == 0
    assert result.stderr == "It is left out, it cannot be imported: ModuleNotFoundError: No module named 'it'\n"
    assert "It is" not in result.stdout


def test_a_step_that_fails_is_named_and_loses_no_rows(
    ran: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> Iterator[Row]:
        yield RECORD[1]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Jobs, "host", lambda self: [Step("first", lambda: RECORD[:1]), Step("host time", fail)])
    result = invoke("host", "--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 1 and result.stderr == "Error: host time: out of memory\n"
    assert report.TITLES[RECORD[1]["job"]] in result.stdout
    assert json.loads((tmp_path / "rows.json").read_text()) == RECORD[:2]


def test_rows_replace_no_link_or_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    rows.write_rows(link, [{"job": "host", "us": float("nan"), "cold": False}])
    assert link.is_symlink() and json.loads(target.read_text()) == [{"job": "host", "us": None, "cold": False}]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    rows.write_rows(pipe, [])
    assert os.read(reader, 100) == b"[\n\n]\n" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_the_peer_of_a_scorer_gets_no_request_shorter_than_its_query(stub_clock: list[int]) -> None:
    shapes: list[PeerShape] = []
    both = two_peers()
    both.compare = lambda row, shape, note: shapes.append(shape) or iter(())
    shape = bench.DecodeShape(1, 8, 8, True)
    list(bench.decode_rows(LAYOUTS["p128_tp4"], shape, (decode.SCORE, "decode_chain"), bench.Ceilings(), both))
    assert shapes == [PeerShape(1, 8, 1, 8, True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("decode", "--layout", "p64-tp2"), "'p64-tp2' is not one of p128-tp2"),
        (("decode", "--query-len", "9"), "1<=x<=8"),
        (("decode", "--batch", "0"), "x>=1"),
        (("chain", "--context", "2", "--query-len", "3"), "--query-len: must be at most --context, 2, was 3"),
        (("chain", "--context", "1048577"), "1<=x<=1048576"),
        (("prefill", "--tokens", "300", "--context", "200"), "--tokens: must be at most --context, 200, was 300"),
        (("chain", "--batch", "32", "--warm"), "--warm: the keys of 32 x 131072 on a rank of P128-TP2 do not fit"),
        (("decode", "--json", "/proc/rows.json"), "'/proc/rows.json' cannot be written"),
        (("prefill", "--tokens", "8193"), "--tokens: must be at most 8192, the tokens of a window, was 8193"),
        (("prefill", "--batch", "1"), "No such option"),
        (("host", "--plot", "x.png"), "No such option"),
        (("host", "--json", "missing/rows.json"), "the folder 'missing' does not exist"),
        (("decode", "--plot", "missing/x.png"), "the folder 'missing' does not exist"),
        (("decode", "--plot", "x.txt"), "must end in .png, .svg, .pdf, was 'x.txt'"),
        (("decode", "--json", "."), "is a directory"),
    ),
)
def test_usage_errors(ran: list[tuple[str, Any]], arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output and ran == []


def test_plots_without_matplotlib_are_refused_early(
    ran: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_cli.importlib.util, "find_spec", lambda name: None)
    result = invoke("decode", "--plot", "x.png")
    assert result.exit_code == 1 and "pip install matplotlib" in result.output and ran == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = invoke("host")
    assert result.exit_code == 1 and "needs a CUDA device, and torch finds none" in result.output


def test_without_kernels_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer_msa.runtime import loader

    def missing(device: torch.device) -> str:
        raise FileNotFoundError("no kernels are installed: build them with `flashinfer-msa build`")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(loader, "architecture_of", missing)
    result = invoke("host")
    assert result.exit_code == 1 and "build them with `flashinfer-msa build`" in result.output
    monkeypatch.setattr(loader, "architecture_of", lambda device: "sm_90a")
    monkeypatch.setattr(bench_cli.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in invoke("chain").output


def test_the_record_run_writes_after_each_step(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that ends early keeps the rows that it has measured."""
    script = load_script("gpu_bench")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def fail() -> Any:
        raise RuntimeError("timeout")

    steps = [Step("one", lambda: RECORD[:2]), Step("two", lambda: RECORD[2:3]), Step("three", fail)]
    monkeypatch.setattr(Jobs, "everything", lambda self, peers_of_prefill: steps)
    result = CliRunner().invoke(script.main, [str(tmp_path / "rows.json"), "--peers", "none"])
    assert isinstance(result.exception, RuntimeError)
    assert json.loads((tmp_path / "rows.json").read_text()) == RECORD[:3]
    assert [json.loads(line) for line in result.stdout.splitlines()] == RECORD[:3]
