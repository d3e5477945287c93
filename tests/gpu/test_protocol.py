# SPDX-License-Identifier: Apache-2.0
"""The exchange protocol on a GPU: many steps with rotating slot sets, graph capture, and waits that run out."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from simulated_group import POISON, SMALL, Group

from flashinfer_msa import msa_ops
from flashinfer_msa.layout import LAYOUTS, NUM_HEADS, TOP_K, Layout
from flashinfer_msa.testing.problems import DecodeProblem, brute_force_top16, compare

STEPS = 30 if SMALL else 10_000


@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_no_row_is_lost_or_mixed_over_many_steps(world_size: int, tagged: bool) -> None:
    """The selected blocks change from step to step, so a lost, stale or mixed row shows in that step's output."""
    layout = LAYOUTS[f"p128_tp{world_size}"]
    tokens, columns = 3, 64
    group = Group.make(layout, tokens=tokens, max_model_len=columns * 128, init_blocks=0, local_blocks=0)
    valid = torch.full((tokens,), columns, dtype=torch.int32, device="cuda")
    column = torch.arange(columns, device="cuda")
    # The row of (token, head) selects the 16 blocks after its own offset. They alternate between the ranks.
    start = torch.arange(tokens * NUM_HEADS, device="cuda").view(tokens, NUM_HEADS, 1) * 5
    history = []
    for step in range(STEPS):
        distance = (column - start - 7 * step) % columns
        for rank, (indexer, comm) in enumerate(zip(group.indexers, group.comms, strict=True)):
            mine = torch.where(distance % world_size == rank, -distance, -1000 - distance).float()
            msa_ops.msa_icp_topk_select_publish(
                mine,
                valid,
                comm.tagged_recv_bases if tagged else comm.recv_bases,
                comm.errors,
                slot=step % 3,
                rank=rank,
                world_size=world_size,
                heads_per_rank=indexer.heads_per_rank,
                capacity=tokens,
                force_begin_blocks=0,
                force_end_blocks=0,
                generations=comm.publish_generations if tagged else None,
            )
        outputs = []
        for indexer, comm in zip(group.indexers, group.comms, strict=True):
            output = torch.empty(tokens, indexer.heads_per_rank, TOP_K, dtype=torch.int32, device="cuda")
            indexer.decode_merge(valid, output, comm=comm, slot=step % 3, tagged=tagged)
            outputs.append(output)
        chosen = torch.zeros(tokens, NUM_HEADS, columns, dtype=torch.bool, device="cuda")
        chosen.scatter_(2, torch.cat(outputs, dim=1).long(), True)
        history.append((chosen != (distance < TOP_K)).any())
    wrong = torch.stack(history).nonzero().flatten().tolist()
    assert not wrong, f"{len(wrong)} of {STEPS} steps are wrong, first {wrong[:5]}"
    assert [int(comm.errors) for comm in group.comms] == [0] * world_size


@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_graph_replays_over_changing_inputs(layout: Layout, tagged: bool) -> None:
    """The chain of all ranks is captured once with PDL and replayed with other lengths in the same buffers."""
    query_len, batch, context = 2, 5, 600 if SMALL else 20000
    problem = DecodeProblem.random(
        layout, seq_lens=[context] * batch, decode_query_len=query_len, device="cuda", seed=2
    )
    shards = [problem.shard(rank) for rank in range(layout.world_size)]
    group = Group.make(layout, tokens=batch * query_len, max_model_len=context)
    scores = group.scores(batch * query_len)
    valid = problem.num_valid_pages.clone()
    problem.__dict__["num_valid_pages"] = valid
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = group.decode(problem, shards, scores, slot=1, tagged=tagged)
    generator = torch.Generator("cuda").manual_seed(4)
    for _ in range(4):
        fresh = DecodeProblem.random(
            layout, seq_lens=[context] * batch, decode_query_len=query_len, device="cuda", seed=2
        )  # the same cache
        lengths = torch.randint(0, context + 1, (batch,), generator=generator, device="cuda", dtype=torch.int32)
        fresh = type(fresh)(**{**fresh.__dict__, "seq_lens": lengths, "index_q": problem.index_q})
        problem.seq_lens.copy_(lengths)
        valid.copy_(fresh.num_valid_pages)
        graph.replay()
        counts = compare(output, brute_force_top16(fresh, init_blocks=1, local_blocks=2))
        assert counts.wrong == 0, counts


def run_alone(body: str, limit: str = "spin_limit=5000", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run code in a separate process, because it ends a CUDA context or needs a new one."""
    prelude = """
        import torch
        import flashinfer_msa
        from flashinfer_msa import msa_ops
        from flashinfer_msa.comm import local_comm
        indexers = [
            msa_ops.prepare_msa_icp_indexer(
                world_size=2, rank=r, num_index_heads=4, page_size=128, init_blocks=0, local_blocks=1,
                max_decode_tokens=4, max_decode_query_len=1, max_num_batched_tokens=64, max_num_seqs=4,
                max_model_len=2048, num_sparse_layers=3, device="cuda", LIMIT)
            for r in range(2)
        ]
        comms = local_comm(indexers)
        q = torch.zeros(4, 4, 128, device="cuda").to(torch.float8_e4m3fn)
        k = torch.zeros(64, 64, 128, device="cuda").to(torch.float8_e4m3fn)
        table = torch.zeros(4, 16, dtype=torch.int32, device="cuda")
        lens = torch.full((4,), 2048, dtype=torch.int32, device="cuda")
        valid = torch.full((4,), 16, dtype=torch.int32, device="cuda")
        scores = torch.zeros(indexers[0].decode_scores_shape(), device="cuda")
        output = torch.zeros(4, 2, 16, dtype=torch.int32, device="cuda")
        def publish(rank, slot, tagged):
            indexers[rank].decode_publish(q, k, table, lens, valid, scores, comm=comms[rank], slot=slot, tagged=tagged,
                                       decode_query_len=1)
        def merge(rank, slot, tagged):
            indexers[rank].decode_merge(valid, output, comm=comms[rank], slot=slot, tagged=tagged)
    """
    code = textwrap.dedent(prelude).replace("LIMIT", limit) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)


FAULT = """
    try:
        torch.cuda.synchronize()
    except Exception as error:
        print("sync:", type(error).__name__)
    fault = flashinfer_msa.last_fault()
    print("fault:", fault)
    try:
        merge(0, 0, False)
    except RuntimeError as error:
        print("next call:", error)
"""


@pytest.mark.traps
@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            "publish(0, 1, True); merge(0, 1, True)",
            ["rank 0", "for rank 1 to publish", "tagged receive row", "slot set 1"],
        ),
        (
            "publish(1, 2, False); merge(1, 2, False)",
            ["rank 1", "for rank 0 to publish", "legacy receive row", "slot set 2"],
        ),
        (
            "publish(0, 0, False); publish(0, 0, False)",
            ["rank 0", "to merge and release", "legacy receive row", "slot set 0"],
        ),
    ],
    ids=["tagged-merge", "legacy-merge", "legacy-publish"],
)
def test_a_missing_peer_is_named(calls: str, words: list[str]) -> None:
    """A wait that runs out ends the context. The fault record survives and names the wait."""
    done = run_alone(calls.replace("; ", "\n") + textwrap.dedent(FAULT))
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "sync" in lines
    for word in [*words, "5000 polls"]:
        assert word in lines["fault"] and word in lines["next call"], done.stdout


@pytest.mark.traps
@pytest.mark.parametrize(
    "calls",
    ["publish(0, 1, True); merge(0, 1, True)", "publish(0, 0, False); publish(0, 0, False)"],
    ids=["tagged-merge", "legacy-publish"],
)
def test_a_limit_of_seconds_ends_a_wait(calls: str) -> None:
    """With ``wait_seconds`` a wait lasts that long, however many polls it takes."""
    body = """
    begin = time.monotonic()
    try:
        torch.cuda.synchronize()
    except Exception:
        print("waited:", time.monotonic() - begin)
    fault = flashinfer_msa.last_fault()
    print("polls:", fault.polls)
    print("seconds:", fault.seconds)
    """
    limit = "spin_limit=100, wait_seconds=0.75"
    begin = "\nimport time\ntorch.cuda.synchronize()\n"
    done = run_alone(begin + calls.replace("; ", "\n") + textwrap.dedent(body), limit)
    assert done.returncode == 0, done.stderr
    lines = {name: float(value) for name, value in (line.split(": ") for line in done.stdout.splitlines())}
    assert 0.74 <= lines["seconds"] <= 0.8 and lines["polls"] > 1000
    assert lines["waited"] <= 2


@pytest.mark.traps
def test_capture_without_warmup_is_refused() -> None:
    """Loading kernels during a capture would break it, so the error says to call ``warmup``."""
    done = run_alone(
        """
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                publish(0, 0, True)
        except RuntimeError as error:
            print(error)
        indexers[0].warmup()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            publish(0, 0, True)
        graph.replay()
        torch.cuda.synchronize()
        print("captured")
        """
    )
    assert done.returncode == 0, done.stderr
    assert "warmup()" in done.stdout and done.stdout.endswith("captured\n")


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_gpus
@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_ranks_on_two_gpus_store_into_each_other(layout: Layout, tagged: bool) -> None:
    """Ranks alternate between two GPUs of this process. Calls run on their tensors' device, whichever is current."""
    problem = DecodeProblem.random(layout, seq_lens=[3000, 0, 20001], decode_query_len=3, device="cuda:0", seed=6)
    expected = brute_force_top16(problem, init_blocks=1, local_blocks=2)
    devices = [torch.device("cuda", rank % 2) for rank in range(layout.world_size)]
    group = Group.make(layout, tokens=9, max_model_len=20001, devices=devices)
    inputs = group.inputs(problem)
    for step in range(6):
        options = {"slot": step % 3, "tagged": tagged}
        for indexer, comm, arguments in zip(group.indexers, group.comms, inputs, strict=True):
            scores = torch.full(indexer.decode_scores_shape(), POISON, device=indexer.device)
            indexer.decode_publish(*arguments, scores, comm=comm, decode_query_len=3, **options)
        outputs = []
        for indexer, comm, arguments in zip(group.indexers, group.comms, inputs, strict=True):
            output = torch.full((9, indexer.heads_per_rank, TOP_K), -777, dtype=torch.int32, device=indexer.device)
            indexer.decode_merge(arguments[-1], output, comm=comm, **options)
            outputs.append(output)
        counts = compare(torch.cat([output.to("cuda:0") for output in outputs], dim=1), expected)
        assert counts.wrong == 0, (step, counts)


@two_gpus
def test_tensors_of_two_gpus_are_refused() -> None:
    """A call runs on one device. The error names the tensor that is on another."""
    group = Group.make(LAYOUTS["p128_tp2"], tokens=4, max_model_len=2048)
    valid = torch.full((4,), 16, dtype=torch.int32, device="cuda:0")
    output = torch.zeros(4, 2, TOP_K, dtype=torch.int32, device="cuda:1")
    with pytest.raises(ValueError, match=r"output must be on cuda:0 like the indexer, was on cuda:1"):
        group.indexers[0].decode_merge(valid, output, comm=group.comms[0], slot=0, tagged=True)
