# SPDX-License-Identifier: Apache-2.0
"""What every rank of a process group checks about receive storage: functions that ``process_group`` runs."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import flashinfer_msa.comm.group
from flashinfer_msa import msa_ops
from flashinfer_msa.backends.torch_backend import TorchBackend
from flashinfer_msa.comm import MSAIcpGroupComm, allocate_comm, exchange_carriers
from flashinfer_msa.indexer import MSAIcpIndexerPlan, prepare_msa_icp_indexer
from flashinfer_msa.layout import LAYOUTS, NUM_HEADS, ROW_WORDS, TOP_K, Layout
from flashinfer_msa.runtime import shared
from flashinfer_msa.testing.problems import (
    DecodeProblem,
    Expected,
    PrefillProblem,
    Problem,
    brute_force_top16,
    compare,
    exchange,
    run_local_prefill,
)

FORCED = {"init_blocks": 1, "local_blocks": 2}
LAYERS = 24
SEQ_LENS = ((2300, 0, 130), (900, 4100, 5), (3000,), (1, 2047, 2048), (257, 4096, 700))
"""Of as many problems, so that a row of the same slot set, three uses back, is another problem's."""


@dataclass(frozen=True)
class Place:
    """Where the ranks run, and by what memory they reach one another."""

    device: str = "cpu"
    backend: str = "torch"
    memory: str = "auto"

    def plan(self, rank: int, layout: Layout, **changes: Any) -> MSAIcpIndexerPlan:
        """A warm indexer of one rank."""
        limits: dict[str, Any] = {
            "world_size": layout.world_size,
            "rank": rank,
            "num_index_heads": NUM_HEADS,
            "page_size": layout.page_size,
            **FORCED,
            "max_decode_tokens": 9,
            "max_decode_query_len": 3,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 4,
            "max_model_len": 4200,
            "num_sparse_layers": 4,
            "device": "cpu" if self.device == "cpu" else torch.device("cuda", torch.cuda.current_device()),
            "backend": self.backend,
            "wait_seconds": 30.0,
        }
        plan = prepare_msa_icp_indexer(**{**limits, **changes})
        plan.warmup()
        return plan

    def comm(self, plan: MSAIcpIndexerPlan, group: dist.ProcessGroup | None = None) -> MSAIcpGroupComm:
        """Receive storage of one rank."""
        return allocate_comm(plan, group, memory=self.memory)


@contextlib.contextmanager
def refused(kind: type[Exception], says: str) -> Iterator[None]:
    """What is inside raises ``kind`` in words that begin like ``says``, a pattern."""
    try:
        yield
    except kind as error:
        assert re.match(says, str(error)), f"{error!r} does not begin like {says!r}"
    else:
        raise AssertionError(f"nothing was raised where {says!r} was expected")


def owned_top16(plan: MSAIcpIndexerPlan, problem: Problem) -> Expected:
    """The brute force's answer for the heads that a rank owns."""
    heads = slice(plan.rank * plan.heads_per_rank, (plan.rank + 1) * plan.heads_per_rank)
    return Expected(*(part[:, heads] for part in brute_force_top16(problem, **FORCED)))


class Rank:
    """One rank's side of decode steps over a few problems."""

    def __init__(self, plan: MSAIcpIndexerPlan, comm: Any, seed: int = 0) -> None:
        self.plan, self.comm = plan, comm
        self.problems = [
            DecodeProblem.random(
                plan.layout, seq_lens=lens, decode_query_len=1 + i % 3, device=plan.device, seed=seed + i
            )
            for i, lens in enumerate(SEQ_LENS)
        ]
        self.keys = [problem.shard(plan.rank) for problem in self.problems]
        self.scores = torch.empty(plan.decode_scores_shape(), device=plan.device)

    def problem(self, layer: int) -> DecodeProblem:
        """The problem that a layer decodes."""
        return self.problems[layer % len(self.problems)]

    def publish(self, layer: int, slot: int, tagged: bool) -> None:
        """The first half of a layer."""
        self.plan.decode_publish(*self._inputs(layer), comm=self.comm, slot=slot, tagged=tagged, **self._length(layer))

    def merge(self, layer: int, slot: int, tagged: bool) -> torch.Tensor:
        """The second half of a layer."""
        output = self.output(layer)
        valid = self.problem(layer).num_valid_pages
        self.plan.decode_merge(valid, output, comm=self.comm, slot=slot, tagged=tagged)
        return output

    def decode(self, layer: int, slot: int, tagged: bool) -> torch.Tensor:
        """A whole layer."""
        output = self.output(layer)
        self.plan.decode(*self._inputs(layer), output, comm=self.comm, slot=slot, tagged=tagged, **self._length(layer))
        return output

    def check(self, layer: int, output: torch.Tensor) -> None:
        """Compare a layer's output with the brute force."""
        counts = compare(output, self._expected[layer % len(self.problems)])
        assert counts.wrong == 0 and (self.plan.backend == "cake" or counts.near_ties == 0), (layer, counts)

    @functools.cached_property
    def _expected(self) -> list[Expected]:
        return [owned_top16(self.plan, problem) for problem in self.problems]

    def _inputs(self, layer: int) -> tuple[torch.Tensor, ...]:
        problem, keys = self.problem(layer), self.keys[layer % len(self.problems)]
        tensors = (problem.index_q, keys, problem.block_table, problem.seq_lens, problem.num_valid_pages)
        return (*tensors, self.scores)

    def _length(self, layer: int) -> dict[str, int]:
        return {"decode_query_len": self.problem(layer).decode_query_len}

    def output(self, layer: int) -> torch.Tensor:
        """A poisoned output of a layer."""
        shape = (len(self.problem(layer).index_q), self.plan.heads_per_rank, TOP_K)
        return torch.full(shape, -777, dtype=torch.int32, device=self.plan.device)


def decode_layers(sides: Sequence[Rank], tagged: bool, layers: int = LAYERS) -> None:
    """Decode layer by layer, the ranks out of step, and compare every output."""
    pause = random.Random(sides[0].plan.rank)
    outputs = []
    for layer in range(layers):
        for side in sides:
            if pause.random() < 0.3:
                time.sleep(pause.random() * 2e-3)
            outputs.append((side, layer, side.decode(layer, layer % 3, tagged)))
    for side, layer, output in outputs:
        side.check(layer, output)
    for side in sides:
        assert int(side.comm.errors) == 0


def decode(rank: int, layout: str, tagged: bool, place: Place) -> None:
    """Many layers of decode equal the brute force, and the storage is as the layout says."""
    plan = place.plan(rank, LAYOUTS[layout])
    with place.comm(plan) as comm:
        plan.check_comm(comm)
        assert place.memory in ("auto", comm.memory) and not comm.closed
        assert comm.recv_bases.tolist()[rank] == comm.recv.data_ptr()
        assert comm.tagged_recv_bases.tolist()[rank] == comm.tagged_recv.data_ptr()
        bases = [storage.data_ptr() for storage in comm.storages]
        assert comm.recv_bases.tolist() == bases and len(set(bases)) == plan.world_size
        for tensor in (comm.recv, comm.tagged_recv, comm.publish_generations, comm.expected_generations, comm.errors):
            assert not tensor.any()
        dist.barrier()
        decode_layers([Rank(plan, comm)], tagged)
        # Whoever merges clears or counts; what the other form uses was never written.
        assert not (comm.recv if tagged else comm.tagged_recv).any()
        assert not comm.recv[..., -1].any()


def late_rank(rank: int, place: Place) -> None:
    """A rank that comes late is waited for, at the allocation and at a layer."""
    layout = LAYOUTS[f"p128_tp{dist.get_world_size()}"]
    plan = place.plan(rank, layout)
    late = rank == layout.world_size - 1
    time.sleep(0.5 * late)
    with place.comm(plan) as comm:
        side = Rank(plan, comm)
        for tagged in (False, True):
            dist.barrier()
            begin = time.monotonic()
            time.sleep(0.5 * late)
            side.check(1, side.decode(1, 0, tagged))
            assert late or time.monotonic() - begin > 0.3


def legacy_publisher_waits(rank: int) -> None:
    """A legacy row that its owner has not released is waited for."""
    place = Place()
    plan = place.plan(rank, LAYOUTS["p128_tp2"])
    with place.comm(plan) as comm:
        side = Rank(plan, comm)
        side.publish(0, 1, False)
        dist.barrier()
        time.sleep(0.5 * (rank == 0))
        side.check(0, side.merge(0, 1, False))
        begin = time.monotonic()
        side.publish(1, 1, False)
        assert rank == 0 or time.monotonic() - begin > 0.3
        side.check(1, side.merge(1, 1, False))


def waits_that_run_out(rank: int, tagged: bool) -> None:
    """A peer that does nothing ends a wait by polls or by seconds, in words, of the facade and of bare functions."""
    place = Place()
    form = "tagged" if tagged else "legacy"
    row = rf"the {form} receive row 0 \(owned head 0\) of slot set 2"
    for limit, says in (({"wait_seconds": None, "spin_limit": 20}, "20 polls"), ({"wait_seconds": 0.3}, r"\d+ polls")):
        plan = place.plan(rank, LAYOUTS["p256_tp2"], **limit)
        with place.comm(plan) as comm:
            side = Rank(plan, comm)
            if rank == 0:
                begin = time.monotonic()
                with refused(RuntimeError, f"rank 0 waited {says}.* for rank 1 to publish {row}.* Restart the ranks"):
                    side.decode(0, 2, tagged)
                assert time.monotonic() - begin < 3
                assert comm.errors.tolist() == [1]
                valid = side.problems[0].num_valid_pages
                recv = (comm.tagged_recv if tagged else comm.recv)[2]
                expected = comm.expected_generations[2] if tagged else None
                with refused(RuntimeError, rf"a rank waited 7 polls.* for rank 1 to publish the {form} receive row 0"):
                    msa_ops.msa_icp_merge_candidates(
                        recv,
                        valid,
                        side.output(0),
                        comm.errors,
                        **FORCED,
                        spin_limit=7,
                        expected_generations=expected,
                        backend="torch",
                    )
            if rank == 0 and not tagged:
                row_1 = rf"rank \d to merge and release {row}"
                with refused(RuntimeError, f"rank 0 waited {says}.* for {row_1}"):
                    side.publish(0, 2, False)
                with refused(RuntimeError, rf"rank 0 waited 9 polls.* for {row_1}"):
                    msa_ops.msa_icp_topk_select_publish(
                        side.scores[: len(valid)],
                        valid,
                        comm.recv_bases,
                        comm.errors,
                        slot=2,
                        rank=0,
                        world_size=2,
                        heads_per_rank=2,
                        capacity=plan.max_decode_tokens,
                        force_begin_blocks=0,
                        force_end_blocks=0,
                        spin_limit=9,
                        backend="torch",
                    )


def disagreement(rank: int, place: Place) -> None:
    """Ranks that differ are refused on every rank, by name and values, and the group still works."""
    world_size = dist.get_world_size()
    layout, other = LAYOUTS[f"p128_tp{world_size}"], LAYOUTS[f"p256_tp{world_size}"]
    odd = rank == 1
    plan = place.plan(rank, layout)

    def refuse(field: str, values: Sequence[Any], here: MSAIcpIndexerPlan, memory: str = place.memory) -> None:
        every = [values[1] if r == 1 else values[0] for r in range(world_size)]
        each = ", ".join(f"{value!r} on rank {r}" for r, value in enumerate(every))
        with refused(ValueError, re.escape(f"{field} must be the same on every rank of the group, was {each}") + "$"):
            allocate_comm(here, memory=memory)

    for field, values in {
        "max_decode_tokens": (9, 10),
        "init_blocks": (1, 0),
        "local_blocks": (2, 3),
        "num_sparse_layers": (4, 5),
        "accumulation": ("tensor", "exact"),
    }.items():
        refuse(field, values, place.plan(rank, layout, **{field: values[odd]}))
    refuse("page_size", (128, 256), place.plan(rank, other if odd else layout))
    with mock.patch.object(flashinfer_msa.comm.group, "__version__", "0.0.1" if odd else "0.0.2"):
        refuse("version", ("0.0.2", "0.0.1"), plan)
    with mock.patch.object(socket, "gethostname", lambda: "there" if odd else "here"):
        refuse("host", ("here", "there"), plan)
    if place.device == "cpu":
        with mock.patch.object(TorchBackend, "kernels_identity", lambda *_: "sm_90a" if odd else "sm_100a"):
            refuse("kernels", ("sm_100a", "sm_90a"), plan)
    explicit = "shared" if place.device == "cpu" else "ipc"
    refuse("memory", ("auto", explicit), plan, memory=explicit if odd else "auto")
    with place.comm(plan) as comm:
        decode_layers([Rank(plan, comm)], True, layers=3)


def one_rank_fails(rank: int, place: Place) -> None:
    """What fails on one rank raises on all, and leaves nothing behind."""
    layout = LAYOUTS[f"p128_tp{dist.get_world_size()}"]
    plan = place.plan(rank, layout)
    odd = rank == 1
    elsewhere = "rank 1 of the group failed with "

    says = "indexer must be an MSAIcpIndexerPlan, was 'none'"
    with refused(ValueError, says if odd else f"{elsewhere}ValueError: {says}"):
        allocate_comm("none" if odd else plan)
    says = rf"indexer\.rank must be the rank of this process in the group, 1, was {0}"
    with refused(ValueError, says if odd else f"{elsewhere}ValueError: {says}"):
        place.comm(place.plan(0, layout) if odd else plan)
    wrong = "ipc" if place.device == "cpu" else "shared"
    says = rf"memory must be one of \('auto', .*\) on {plan.device.type}.*, was '{wrong}'"
    with refused(ValueError, says if odd else f"{elsewhere}ValueError: memory must be one of"):
        allocate_comm(plan, memory=wrong if odd else place.memory)
    if place.device == "cpu":
        full = OSError(errno.ENOSPC, "No space left on device")
        broken = mock.patch.object(os, "posix_fallocate", side_effect=full)
        says = r"the ranks cannot store into one another's memory \(shared: .*No space left"
        with broken if odd else contextlib.nullcontext(), refused(RuntimeError, says):
            place.comm(plan)
        # A path that is another file elsewhere, as in containers of one name: refused, and not made.
        gone = mock.patch.object(os, "stat", side_effect=FileNotFoundError(errno.ENOENT, "No such file"))
        with gone if odd else contextlib.nullcontext(), refused(RuntimeError, "the ranks cannot store .*No such file"):
            place.comm(plan)
    dist.barrier()
    assert not left_behind()
    with place.comm(plan) as comm:
        decode_layers([Rank(plan, comm)], False, layers=3)


def left_behind() -> list[Path]:
    """Return names of shared memory that stay. Other processes of this machine may have some for a moment."""
    names = set(Path("/dev/shm").glob("flashinfer-msa-*"))
    deadline = time.monotonic() + 10
    while names and time.monotonic() < deadline:
        time.sleep(0.05)
        names &= set(Path("/dev/shm").glob("flashinfer-msa-*"))
    return sorted(names)


def wrong_group(rank: int, place: Place) -> None:
    """A group that is not the ranks of the indexer is refused on every rank."""
    world_size = dist.get_world_size()
    other = 6 - world_size
    plan = place.plan(rank % other, LAYOUTS[f"p128_tp{other}"])
    says = rf"group must have the {other} ranks of indexer\.world_size, had {world_size}$"
    with refused(ValueError, says):
        place.comm(plan)
    good = place.plan(rank, LAYOUTS[f"p128_tp{world_size}"])
    one = dist.new_group([0])
    if rank == 0:
        with refused(ValueError, rf"group must have the {world_size} ranks of indexer\.world_size, had 1$"):
            allocate_comm(good, one)
    else:
        with refused(ValueError, "group must be a process group that this process is in, was "):
            allocate_comm(good, one)
    with refused(ValueError, "group must be a process group that this process is in, was 'tp'"):
        allocate_comm(good, "tp")
    gone = dist.new_group(list(range(world_size)))
    dist.destroy_process_group(gone)
    with refused(ValueError, "group must be a process group that exists, was "):
        allocate_comm(good, gone)


def closing(rank: int, place: Place) -> None:
    """A closed comm is gone, waits for its peers, and can be made again; an exception does not wait."""
    layout = LAYOUTS[f"p256_tp{dist.get_world_size()}"]
    plan = place.plan(rank, layout)
    comm = place.comm(plan)
    side = Rank(plan, comm)
    decode_layers([side], True, layers=4)
    address = comm.recv.data_ptr()
    assert shared.find(address) is not None and "closed" not in repr(comm)
    late = rank == 0
    time.sleep(0.5 * late)
    begin = time.monotonic()
    comm.close()
    assert late or time.monotonic() - begin > 0.3
    assert comm.closed and "closed" in repr(comm) and shared.find(address) is None
    assert comm.recv is None and comm.storages is None
    comm.close()
    for call in (lambda: plan.check_comm(comm), lambda: side.decode(0, 0, True)):
        with refused(ValueError, r"comm\.recv must be a tensor, was None$"):
            call()

    with place.comm(plan) as again:
        assert not again.tagged_recv.any()
        decode_layers([Rank(plan, again)], True, layers=4)
    assert again.closed

    # Nobody waits for a rank that leaves by an exception.
    begin = time.monotonic()
    try:
        with place.comm(plan) as third:
            time.sleep(0.3 * rank)
            raise KeyError(rank)
    except KeyError:
        pass
    assert third.closed and time.monotonic() - begin < 5
    dist.barrier()

    fourth = place.comm(plan)
    fourth.close(wait=False)
    dist.barrier()

    # From several threads at once it is closed once, though its peer comes late.
    sixth = place.comm(plan)
    with ThreadPoolExecutor(3 if rank else 1) as threads:
        time.sleep(0.2 * late)
        for closed in [threads.submit(sixth.close) for _ in range(3)]:
            closed.result(timeout=20)
    dist.barrier()

    group = dist.new_group(list(range(layout.world_size)))
    fifth = place.comm(plan, group)
    dist.barrier()
    dist.destroy_process_group(group)
    fifth.close()
    assert fifth.closed


def two_groups(rank: int, place: Place) -> None:
    """Two groups of the same processes, or halves of the processes, know nothing of each other."""
    world_size = dist.get_world_size()
    whole = [dist.new_group(list(range(world_size))) for _ in range(2)]
    plans = [place.plan(rank, LAYOUTS[f"p{page}_tp{world_size}"]) for page in (128, 256)]
    comms = [place.comm(plan, group) for plan, group in zip(plans, whole, strict=True)]
    decode_layers([Rank(plan, comm, seed) for seed, (plan, comm) in enumerate(zip(plans, comms, strict=True))], True)
    for comm in comms:
        comm.close()
    if world_size == 4:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        plan = place.plan(rank % 2, LAYOUTS["p128_tp2"])
        with place.comm(plan, pairs[rank // 2]) as comm:
            decode_layers([Rank(plan, comm, seed=10 * (rank // 2))], False)


def carriers_of(world_size: int, tokens: int, device: Any) -> list[torch.Tensor]:
    """Every rank's carrier, of numbers that tell where they come from."""
    whole = torch.arange(world_size * NUM_HEADS * tokens * ROW_WORDS, dtype=torch.int32, device=device)
    return list(whole.view(world_size, NUM_HEADS, tokens, ROW_WORDS))


def exchanging(rank: int, place: Place) -> None:
    """The exchange is the one that the simulation does, whatever the tokens and the group."""
    world_size = dist.get_world_size()
    plan = place.plan(rank, LAYOUTS[f"p128_tp{world_size}"])
    for group in (None, dist.new_group(list(range(world_size)))):
        for tokens in (1, 37, 0, 256):
            carriers = carriers_of(world_size, tokens, plan.device)
            shape = (world_size, plan.heads_per_rank, tokens, ROW_WORDS)
            received = torch.full(shape, -1, dtype=torch.int32, device=plan.device)
            exchange_carriers(carriers[rank].clone(), received, group)
            assert torch.equal(received, exchange(carriers, plan)), tokens


def captured_exchange(rank: int, place: Place) -> None:
    """A CUDA graph of the exchange sends what the carrier holds at each replay."""
    world_size = dist.get_world_size()
    plan = place.plan(rank, LAYOUTS[f"p128_tp{world_size}"])
    carriers = carriers_of(world_size, 50, plan.device)
    send = carriers[rank].clone()
    received = torch.full((world_size, plan.heads_per_rank, 50, ROW_WORDS), -1, dtype=torch.int32, device=plan.device)
    exchange_carriers(send, received)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exchange_carriers(send, received)
    for replay in range(3):
        send.copy_(carriers[rank] + replay)
        received.fill_(-1)
        graph.replay()
        assert torch.equal(received, exchange([carrier + replay for carrier in carriers], plan)), replay


def exchange_refuses(rank: int) -> None:
    """Bad input is refused before anything is sent."""
    world_size = dist.get_world_size()
    heads = NUM_HEADS // world_size
    send = torch.zeros(4, 5, 33, dtype=torch.int32)
    received = torch.full((world_size, heads, 5, 33), -7, dtype=torch.int32)
    wide = torch.zeros(4, 9, 33, dtype=torch.int32)
    shape = re.escape(str((world_size, heads, 5, 33)))
    overlapping = torch.zeros(2 * send.numel(), dtype=torch.int32)
    alone = dist.new_group([0])
    cases: list[tuple[Any, Any, str]] = [
        (None, received, "send must be a dense tensor, was None"),
        (send, [received], "received must be a dense tensor, was "),
        (send.to_sparse(), received, "send must be a dense tensor, was "),
        (torch.nested.nested_tensor(list(send)), received, "send must be a dense tensor, was "),
        (send.to("meta"), received.to("meta"), "send must be on the CPU or a CUDA device, was on meta"),
        (send.long(), received, r"send must be torch\.int32, was torch\.int64"),
        (send, received.float(), r"received must be torch\.int32, was torch\.float32"),
        (send[0], received, r"send must have shape \(4, T, 33\), was \(5, 33\)"),
        (send[:2], received, r"send must have shape \(4, T, 33\), was \(2, 5, 33\)"),
        (send[..., :32].contiguous(), received, r"send must have shape \(4, T, 33\), was \(4, 5, 32\)"),
        (send, received.view(4, 5, 33), rf"received must have shape {shape}, was \(4, 5, 33\)"),
        (send[:, :4].contiguous(), received, rf"received must have shape .* 4, 33\), was {shape}"),
        (wide[:, :5], received, r"send must be contiguous, had strides \(297, 33, 1\): .*flatten\(\)\[:660\]\.view"),
        (send, wide[:, :5].unflatten(0, received.shape[:2]), "received must be contiguous, had strides"),
        (send, received.to("meta"), "received must be on cpu like send, was on meta"),
        (send, send.view(received.shape), "received must have memory of its own, overlapped send"),
        (
            overlapping[100 : 100 + send.numel()].view(send.shape),
            overlapping[: send.numel()].view(received.shape),
            "received must have memory of its own, overlapped send",
        ),
    ]
    for bad_send, bad_received, says in cases:
        with refused(ValueError, says):
            exchange_carriers(bad_send, bad_received)
    with refused(ValueError, "group must be a process group" if rank else "group must have 2 or 4 ranks, had 1"):
        exchange_carriers(send, received, alone)
    assert (received == -7).all()
    exchange_carriers(send, received)
    assert not received.any()


def prefill(rank: int, layout: str, place: Place) -> None:
    """A prefill step, exchanged, equals the brute force."""
    plan = place.plan(rank, LAYOUTS[layout], accumulation="exact")
    problem = PrefillProblem.random(
        plan.layout, query_lens=(70, 0, 30), kv_lens=(300, 40, 1900), device=plan.device, seed=5
    )
    tokens = len(problem.index_q)
    send = torch.empty(NUM_HEADS, tokens, ROW_WORDS, dtype=torch.int32, device=plan.device)
    received = torch.empty_like(send).view(plan.world_size, plan.heads_per_rank, tokens, ROW_WORDS)
    scratch = torch.empty(plan.prefill_scratch_shape(), device=plan.device)
    run_local_prefill(plan, problem, problem.shard(rank), scratch, send, plan.prefill_window_tokens())
    exchange_carriers(send, received)
    output = torch.full((tokens, plan.heads_per_rank, TOP_K), -777, dtype=torch.int32, device=plan.device)
    plan.prefill_merge(received, problem.num_valid_pages, output)
    counts = compare(output, owned_top16(plan, problem))
    assert counts.wrong == 0 and (place.backend == "cake" or counts.near_ties == 0), counts


def killed_peer(rank: int, tagged: bool) -> float:
    """Rank 1 is killed in mid-step; the others are told who was missing, in about ``wait_seconds``, and close."""
    world_size = dist.get_world_size()
    plan = Place().plan(rank, LAYOUTS[f"p128_tp{world_size}"], wait_seconds=0.5)
    comm = allocate_comm(plan)
    side = Rank(plan, comm)
    decode_layers([side], tagged, layers=5)
    assert not left_behind()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    form = "tagged" if tagged else "legacy"
    row = rf"the {form} receive row 0 \(owned head 0\) of slot set 2"
    begin = time.monotonic()
    with refused(RuntimeError, rf"rank {rank} waited \d+ polls \(.* s\) for rank 1 to publish {row}, and gives up"):
        side.decode(5, 2, tagged)
    seconds = time.monotonic() - begin
    if not tagged:
        with refused(RuntimeError, rf"rank {rank} waited .* for rank \d to merge and release {row}, and gives up"):
            side.publish(5, 2, False)
    begin = time.monotonic()
    # With more ranks only the neighbours of the dead one know that the group is broken.
    comm.close(wait=world_size == 2)
    assert comm.closed and time.monotonic() - begin < 10
    return seconds


def foreign_fields(rank: int) -> None:
    """Any object with the fields of a comm will do between processes too."""
    plan = Place().plan(rank, LAYOUTS["p128_tp2"])
    with allocate_comm(plan) as comm:
        decode_layers([Rank(plan, SimpleNamespace(**vars(comm)))], False, layers=4)
