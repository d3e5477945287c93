# SPDX-License-Identifier: Apache-2.0
"""Checks of receive storage that every rank of a process group runs; ``process_group`` calls these functions."""

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
"""The requests' lengths, by problem. The same slot set, reused three layers later, gets another problem's rows."""


@dataclass(frozen=True)
class Setup:
    """The device and backend that ranks run on, and the memory by which they reach one another."""

    device: str = "cpu"
    backend: str = "torch"
    memory: str = "auto"

    def indexer(self, rank: int, layout: Layout, **changes: Any) -> MSAIcpIndexerPlan:
        """Return one rank's indexer, warmed up."""
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
        indexer = prepare_msa_icp_indexer(**{**limits, **changes})
        indexer.warmup()
        return indexer

    def comm(self, indexer: MSAIcpIndexerPlan, group: dist.ProcessGroup | None = None) -> MSAIcpGroupComm:
        """Allocate one rank's receive storage."""
        return allocate_comm(indexer, group, memory=self.memory)


@contextlib.contextmanager
def refused(kind: type[Exception], says: str) -> Iterator[None]:
    """Assert that the body raises ``kind`` with a message that begins with the pattern ``says``."""
    try:
        yield
    except kind as error:
        assert re.match(says, str(error)), f"{error!r} does not begin like {says!r}"
    else:
        raise AssertionError(f"nothing was raised where {says!r} was expected")


def owned_top16(indexer: MSAIcpIndexerPlan, problem: Problem) -> Expected:
    """Return the brute-force Top16 of the heads that a rank owns."""
    heads = slice(indexer.rank * indexer.heads_per_rank, (indexer.rank + 1) * indexer.heads_per_rank)
    return Expected(*(part[:, heads] for part in brute_force_top16(problem, **FORCED)))


class Rank:
    """One rank's decode layers over a few problems."""

    def __init__(self, indexer: MSAIcpIndexerPlan, comm: Any, seed: int = 0) -> None:
        self.indexer, self.comm = indexer, comm
        self.problems = [
            DecodeProblem.random(
                indexer.layout, seq_lens=lens, decode_query_len=1 + i % 3, device=indexer.device, seed=seed + i
            )
            for i, lens in enumerate(SEQ_LENS)
        ]
        self.keys = [problem.shard(indexer.rank) for problem in self.problems]
        self.scores = torch.empty(indexer.decode_scores_shape(), device=indexer.device)

    def problem(self, layer: int) -> DecodeProblem:
        """Return the problem that a layer decodes."""
        return self.problems[layer % len(self.problems)]

    def publish(self, layer: int, slot: int, tagged: bool) -> None:
        """Run the first half of a layer."""
        self.indexer.decode_publish(
            *self._inputs(layer), comm=self.comm, slot=slot, tagged=tagged, **self._length(layer)
        )

    def merge(self, layer: int, slot: int, tagged: bool) -> torch.Tensor:
        """Run the second half of a layer; return its output."""
        output = self.output(layer)
        valid = self.problem(layer).num_valid_pages
        self.indexer.decode_merge(valid, output, comm=self.comm, slot=slot, tagged=tagged)
        return output

    def decode(self, layer: int, slot: int, tagged: bool) -> torch.Tensor:
        """Run a whole layer; return its output."""
        output = self.output(layer)
        self.indexer.decode(
            *self._inputs(layer), output, comm=self.comm, slot=slot, tagged=tagged, **self._length(layer)
        )
        return output

    def check(self, layer: int, output: torch.Tensor) -> None:
        """Compare a layer's output with the brute force."""
        counts = compare(output, self._expected[layer % len(self.problems)])
        assert counts.wrong == 0 and (self.indexer.backend == "cake" or counts.near_ties == 0), (layer, counts)

    @functools.cached_property
    def _expected(self) -> list[Expected]:
        return [owned_top16(self.indexer, problem) for problem in self.problems]

    def _inputs(self, layer: int) -> tuple[torch.Tensor, ...]:
        problem, keys = self.problem(layer), self.keys[layer % len(self.problems)]
        tensors = (problem.index_q, keys, problem.block_table, problem.seq_lens, problem.num_valid_pages)
        return (*tensors, self.scores)

    def _length(self, layer: int) -> dict[str, int]:
        return {"decode_query_len": self.problem(layer).decode_query_len}

    def output(self, layer: int) -> torch.Tensor:
        """Return a poisoned output for a layer."""
        shape = (len(self.problem(layer).index_q), self.indexer.heads_per_rank, TOP_K)
        return torch.full(shape, -777, dtype=torch.int32, device=self.indexer.device)


def decode_layers(sides: Sequence[Rank], tagged: bool, layers: int = LAYERS) -> None:
    """Decode layer by layer with random delays, and compare every output with the brute force."""
    pause = random.Random(sides[0].indexer.rank)
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


def decode(rank: int, layout: str, tagged: bool, setup: Setup) -> None:
    """Many decode layers equal the brute force, and the storage matches the layout."""
    indexer = setup.indexer(rank, LAYOUTS[layout])
    with setup.comm(indexer) as comm:
        indexer.check_comm(comm)
        assert setup.memory in ("auto", comm.memory) and not comm.closed
        assert comm.recv_bases.tolist()[rank] == comm.recv.data_ptr()
        assert comm.tagged_recv_bases.tolist()[rank] == comm.tagged_recv.data_ptr()
        bases = [storage.data_ptr() for storage in comm.storages]
        assert comm.recv_bases.tolist() == bases and len(set(bases)) == indexer.world_size
        for tensor in (comm.recv, comm.tagged_recv, comm.publish_generations, comm.expected_generations, comm.errors):
            assert not tensor.any()
        dist.barrier()
        decode_layers([Rank(indexer, comm)], tagged)
        # Merges clear flags or advance counters. The rows of the other row kind were never written.
        assert not (comm.recv if tagged else comm.tagged_recv).any()
        assert not comm.recv[..., -1].any()


def late_rank(rank: int, setup: Setup) -> None:
    """The others wait for a late rank, at the allocation and at a layer."""
    layout = LAYOUTS[f"p128_tp{dist.get_world_size()}"]
    indexer = setup.indexer(rank, layout)
    late = rank == layout.world_size - 1
    time.sleep(0.5 * late)
    with setup.comm(indexer) as comm:
        side = Rank(indexer, comm)
        for tagged in (False, True):
            dist.barrier()
            begin = time.monotonic()
            time.sleep(0.5 * late)
            side.check(1, side.decode(1, 0, tagged))
            assert late or time.monotonic() - begin > 0.3


def legacy_publisher_waits(rank: int) -> None:
    """A publisher waits for a legacy row that its owner has not released."""
    setup = Setup()
    indexer = setup.indexer(rank, LAYOUTS["p128_tp2"])
    with setup.comm(indexer) as comm:
        side = Rank(indexer, comm)
        side.publish(0, 1, False)
        dist.barrier()
        time.sleep(0.5 * (rank == 0))
        side.check(0, side.merge(0, 1, False))
        begin = time.monotonic()
        side.publish(1, 1, False)
        assert rank == 0 or time.monotonic() - begin > 0.3
        side.check(1, side.merge(1, 1, False))


def waits_that_run_out(rank: int, tagged: bool) -> None:
    """A wait for an idle peer ends by polls or by seconds with an error, in the indexer and in the bare functions."""
    setup = Setup()
    row_kind = "tagged" if tagged else "legacy"
    row = rf"the {row_kind} receive row 0 \(owned head 0\) of slot set 2"
    for limit, says in (({"wait_seconds": None, "spin_limit": 20}, "20 polls"), ({"wait_seconds": 0.3}, r"\d+ polls")):
        indexer = setup.indexer(rank, LAYOUTS["p256_tp2"], **limit)
        with setup.comm(indexer) as comm:
            side = Rank(indexer, comm)
            if rank == 0:
                begin = time.monotonic()
                with refused(RuntimeError, f"rank 0 waited {says}.* for rank 1 to publish {row}.* Restart the ranks"):
                    side.decode(0, 2, tagged)
                assert time.monotonic() - begin < 3
                assert comm.errors.tolist() == [1]
                valid = side.problems[0].num_valid_pages
                recv = (comm.tagged_recv if tagged else comm.recv)[2]
                expected = comm.expected_generations[2] if tagged else None
                with refused(
                    RuntimeError, rf"a rank waited 7 polls.* for rank 1 to publish the {row_kind} receive row 0"
                ):
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
                        capacity=indexer.max_decode_tokens,
                        force_begin_blocks=0,
                        force_end_blocks=0,
                        spin_limit=9,
                        backend="torch",
                    )


def disagreement(rank: int, setup: Setup) -> None:
    """Ranks with different settings are refused on every rank, by name and values, and the group still works."""
    world_size = dist.get_world_size()
    layout, other = LAYOUTS[f"p128_tp{world_size}"], LAYOUTS[f"p256_tp{world_size}"]
    odd = rank == 1
    indexer = setup.indexer(rank, layout)

    def refuse(field: str, values: Sequence[Any], here: MSAIcpIndexerPlan, memory: str = setup.memory) -> None:
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
        refuse(field, values, setup.indexer(rank, layout, **{field: values[odd]}))
    refuse("page_size", (128, 256), setup.indexer(rank, other if odd else layout))
    with mock.patch.object(flashinfer_msa.comm.group, "__version__", "0.0.1" if odd else "0.0.2"):
        refuse("version", ("0.0.2", "0.0.1"), indexer)
    with mock.patch.object(socket, "gethostname", lambda: "there" if odd else "here"):
        refuse("host", ("here", "there"), indexer)
    if setup.device == "cpu":
        with mock.patch.object(TorchBackend, "kernels_identity", lambda *_: "sm_90a" if odd else "sm_100a"):
            refuse("kernels", ("sm_100a", "sm_90a"), indexer)
    explicit = "shared" if setup.device == "cpu" else "ipc"
    refuse("memory", ("auto", explicit), indexer, memory=explicit if odd else "auto")
    with setup.comm(indexer) as comm:
        decode_layers([Rank(indexer, comm)], True, layers=3)


def one_rank_fails(rank: int, setup: Setup) -> None:
    """A failure on one rank raises on all and leaves nothing behind."""
    layout = LAYOUTS[f"p128_tp{dist.get_world_size()}"]
    indexer = setup.indexer(rank, layout)
    odd = rank == 1
    elsewhere = "rank 1 of the group failed with "

    says = "indexer must be an MSAIcpIndexerPlan, was 'none'"
    with refused(ValueError, says if odd else f"{elsewhere}ValueError: {says}"):
        allocate_comm("none" if odd else indexer)
    says = rf"indexer\.rank must be the rank of this process in the group, 1, was {0}"
    with refused(ValueError, says if odd else f"{elsewhere}ValueError: {says}"):
        setup.comm(setup.indexer(0, layout) if odd else indexer)
    wrong = "ipc" if setup.device == "cpu" else "shared"
    says = rf"memory must be one of \('auto', .*\) on {indexer.device.type}.*, was '{wrong}'"
    with refused(ValueError, says if odd else f"{elsewhere}ValueError: memory must be one of"):
        allocate_comm(indexer, memory=wrong if odd else setup.memory)
    if setup.device == "cpu":
        full = OSError(errno.ENOSPC, "No space left on device")
        broken = mock.patch.object(os, "posix_fallocate", side_effect=full)
        says = r"the ranks cannot store into one another's memory \(shared: .*No space left"
        with broken if odd else contextlib.nullcontext(), refused(RuntimeError, says):
            setup.comm(indexer)
        # A path that names another file on another rank, as in containers with one host name: refused, and not created.
        gone = mock.patch.object(os, "stat", side_effect=FileNotFoundError(errno.ENOENT, "No such file"))
        with gone if odd else contextlib.nullcontext(), refused(RuntimeError, "the ranks cannot store .*No such file"):
            setup.comm(indexer)
    dist.barrier()
    assert not left_behind()
    with setup.comm(indexer) as comm:
        decode_layers([Rank(indexer, comm)], False, layers=3)


def left_behind() -> list[Path]:
    """Return shared-memory files that stay. Other processes of this machine may have some for a moment."""
    names = set(Path("/dev/shm").glob("flashinfer-msa-*"))
    deadline = time.monotonic() + 10
    while names and time.monotonic() < deadline:
        time.sleep(0.05)
        names &= set(Path("/dev/shm").glob("flashinfer-msa-*"))
    return sorted(names)


def wrong_group(rank: int, setup: Setup) -> None:
    """A group whose ranks are not the indexer's is refused on every rank."""
    world_size = dist.get_world_size()
    other = 6 - world_size
    indexer = setup.indexer(rank % other, LAYOUTS[f"p128_tp{other}"])
    says = rf"group must have the {other} ranks of indexer\.world_size, had {world_size}$"
    with refused(ValueError, says):
        setup.comm(indexer)
    good = setup.indexer(rank, LAYOUTS[f"p128_tp{world_size}"])
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


def closing(rank: int, setup: Setup) -> None:
    """``close`` waits for the peers and frees the storage, which can be allocated again. An exception does not wait."""
    layout = LAYOUTS[f"p256_tp{dist.get_world_size()}"]
    indexer = setup.indexer(rank, layout)
    comm = setup.comm(indexer)
    side = Rank(indexer, comm)
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
    for call in (lambda: indexer.check_comm(comm), lambda: side.decode(0, 0, True)):
        with refused(ValueError, r"comm\.recv must be a tensor, was None$"):
            call()

    with setup.comm(indexer) as again:
        assert not again.tagged_recv.any()
        decode_layers([Rank(indexer, again)], True, layers=4)
    assert again.closed

    # The others do not wait for a rank that raises.
    begin = time.monotonic()
    try:
        with setup.comm(indexer) as third:
            time.sleep(0.3 * rank)
            raise KeyError(rank)
    except KeyError:
        pass
    assert third.closed and time.monotonic() - begin < 5
    dist.barrier()

    fourth = setup.comm(indexer)
    fourth.close(wait=False)
    dist.barrier()

    # Several threads close it at once, while its peer is late. It is closed once.
    sixth = setup.comm(indexer)
    with ThreadPoolExecutor(3 if rank else 1) as threads:
        time.sleep(0.2 * late)
        for closed in [threads.submit(sixth.close) for _ in range(3)]:
            closed.result(timeout=20)
    dist.barrier()

    group = dist.new_group(list(range(layout.world_size)))
    fifth = setup.comm(indexer, group)
    dist.barrier()
    dist.destroy_process_group(group)
    fifth.close()
    assert fifth.closed


def two_groups(rank: int, setup: Setup) -> None:
    """Two groups of the same processes, or of halves of the processes, are independent."""
    world_size = dist.get_world_size()
    whole = [dist.new_group(list(range(world_size))) for _ in range(2)]
    indexers = [setup.indexer(rank, LAYOUTS[f"p{page}_tp{world_size}"]) for page in (128, 256)]
    comms = [setup.comm(indexer, group) for indexer, group in zip(indexers, whole, strict=True)]
    decode_layers(
        [Rank(indexer, comm, seed) for seed, (indexer, comm) in enumerate(zip(indexers, comms, strict=True))], True
    )
    for comm in comms:
        comm.close()
    if world_size == 4:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        indexer = setup.indexer(rank % 2, LAYOUTS["p128_tp2"])
        with setup.comm(indexer, pairs[rank // 2]) as comm:
            decode_layers([Rank(indexer, comm, seed=10 * (rank // 2))], False)


def carriers_of(world_size: int, tokens: int, device: Any) -> list[torch.Tensor]:
    """Return every rank's carrier, in which no number occurs twice."""
    whole = torch.arange(world_size * NUM_HEADS * tokens * ROW_WORDS, dtype=torch.int32, device=device)
    return list(whole.view(world_size, NUM_HEADS, tokens, ROW_WORDS))


def exchanging(rank: int, setup: Setup) -> None:
    """The exchange equals the simulated one, whatever the tokens and the group."""
    world_size = dist.get_world_size()
    indexer = setup.indexer(rank, LAYOUTS[f"p128_tp{world_size}"])
    for group in (None, dist.new_group(list(range(world_size)))):
        for tokens in (1, 37, 0, 256):
            carriers = carriers_of(world_size, tokens, indexer.device)
            shape = (world_size, indexer.heads_per_rank, tokens, ROW_WORDS)
            received = torch.full(shape, -1, dtype=torch.int32, device=indexer.device)
            exchange_carriers(carriers[rank].clone(), received, group)
            assert torch.equal(received, exchange(carriers, indexer)), tokens


def captured_exchange(rank: int, setup: Setup) -> None:
    """A CUDA graph of the exchange sends the carrier's content at each replay."""
    world_size = dist.get_world_size()
    indexer = setup.indexer(rank, LAYOUTS[f"p128_tp{world_size}"])
    carriers = carriers_of(world_size, 50, indexer.device)
    send = carriers[rank].clone()
    received = torch.full(
        (world_size, indexer.heads_per_rank, 50, ROW_WORDS), -1, dtype=torch.int32, device=indexer.device
    )
    exchange_carriers(send, received)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exchange_carriers(send, received)
    for replay in range(3):
        send.copy_(carriers[rank] + replay)
        received.fill_(-1)
        graph.replay()
        assert torch.equal(received, exchange([carrier + replay for carrier in carriers], indexer)), replay


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


def prefill(rank: int, layout: str, setup: Setup) -> None:
    """A prefill step with its exchange equals the brute force."""
    indexer = setup.indexer(rank, LAYOUTS[layout], accumulation="exact")
    problem = PrefillProblem.random(
        indexer.layout, query_lens=(70, 0, 30), kv_lens=(300, 40, 1900), device=indexer.device, seed=5
    )
    tokens = len(problem.index_q)
    send = torch.empty(NUM_HEADS, tokens, ROW_WORDS, dtype=torch.int32, device=indexer.device)
    received = torch.empty_like(send).view(indexer.world_size, indexer.heads_per_rank, tokens, ROW_WORDS)
    scratch = torch.empty(indexer.prefill_scratch_shape(), device=indexer.device)
    run_local_prefill(indexer, problem, problem.shard(rank), scratch, send, indexer.prefill_window_tokens())
    exchange_carriers(send, received)
    output = torch.full((tokens, indexer.heads_per_rank, TOP_K), -777, dtype=torch.int32, device=indexer.device)
    indexer.prefill_merge(received, problem.num_valid_pages, output)
    counts = compare(output, owned_top16(indexer, problem))
    assert counts.wrong == 0 and (setup.backend == "cake" or counts.near_ties == 0), counts


def killed_peer(rank: int, tagged: bool) -> float:
    """Rank 1 is killed in mid-step. After about ``wait_seconds`` the others get an error that names it, and close."""
    world_size = dist.get_world_size()
    indexer = Setup().indexer(rank, LAYOUTS[f"p128_tp{world_size}"], wait_seconds=0.5)
    comm = allocate_comm(indexer)
    side = Rank(indexer, comm)
    decode_layers([side], tagged, layers=5)
    assert not left_behind()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    row_kind = "tagged" if tagged else "legacy"
    row = rf"the {row_kind} receive row 0 \(owned head 0\) of slot set 2"
    begin = time.monotonic()
    with refused(RuntimeError, rf"rank {rank} waited \d+ polls \(.* s\) for rank 1 to publish {row}, and gives up"):
        side.decode(5, 2, tagged)
    seconds = time.monotonic() - begin
    if not tagged:
        with refused(RuntimeError, rf"rank {rank} waited .* for rank \d to merge and release {row}, and gives up"):
            side.publish(5, 2, False)
    begin = time.monotonic()
    # With more ranks, only the dead one's neighbours know that the group is broken.
    comm.close(wait=world_size == 2)
    assert comm.closed and time.monotonic() - begin < 10
    return seconds


def foreign_fields(rank: int) -> None:
    """Any object with a comm's fields works between processes too."""
    indexer = Setup().indexer(rank, LAYOUTS["p128_tp2"])
    with allocate_comm(indexer) as comm:
        decode_layers([Rank(indexer, SimpleNamespace(**vars(comm)))], False, layers=4)
