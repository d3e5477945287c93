# SPDX-License-Identifier: Apache-2.0
"""The soak: right rows pass, and any word or row of an earlier layer, or of another rank, is counted as wrong."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashinfer_msa.comm import local_comm
from flashinfer_msa.layout import BLOCK_TOKENS, LAYOUTS, NUM_HEADS, NUM_SLOT_SETS, TOP_K
from flashinfer_msa.testing.problems import group_indexers

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak.py"
TOKENS = 2


@pytest.fixture(scope="module")
def soak_script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("soak")


def ranks_of(script: ModuleType, world_size: int, tagged: bool) -> list[Any]:
    """Every rank's soak in this process."""
    plans = group_indexers(
        LAYOUTS[f"p128_tp{world_size}"],
        ["cpu"],
        init_blocks=0,
        local_blocks=0,
        max_decode_tokens=TOKENS,
        max_decode_query_len=1,
        max_num_batched_tokens=TOKENS,
        max_num_seqs=TOKENS,
        max_model_len=script.BLOCKS_PER_RANK * world_size * BLOCK_TOKENS,
        num_sparse_layers=script.PERIOD,
        backend="torch",
    )
    return [
        script.Soak(plan, comm, tokens=TOKENS, tagged=tagged)
        for plan, comm in zip(plans, local_comm(plans), strict=True)
    ]


def run_layer(ranks: Sequence[Any], layer: int, between: Callable[[], None] = lambda: None) -> list[int]:
    """One layer, with ``between`` after the publishes. Returns the wrong rows of each rank."""
    for rank in ranks:
        rank.publish(layer)
    between()
    for rank in ranks:
        rank.merge(layer)
    return [int((rank._outputs[layer] != rank._expected[layer]).any(-1).sum()) for rank in ranks]


def words_of(rank: Any, layer: int) -> torch.Tensor:
    """The words of a layer's rows, a view ``[W, hpr, T, 32]`` of int32, of whichever form."""
    slot = layer % NUM_SLOT_SETS
    if rank.tagged:
        return rank.comm.tagged_recv[slot].view(torch.int32)[..., ::2]
    return rank.comm.recv[slot][..., : 2 * TOP_K]


def winners_of(row: torch.Tensor) -> list[int]:
    """Places of a row's winners."""
    return (row[:TOP_K].view(torch.float32) > 1 << 23).nonzero().flatten().tolist()


both_forms = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
both_sizes = pytest.mark.parametrize("world_size", [2, 4])


@both_forms
@both_sizes
def test_right_rows_are_right_in_every_layer(soak_script: ModuleType, world_size: int, tagged: bool) -> None:
    ranks = ranks_of(soak_script, world_size, tagged)
    for _ in range(2):
        for layer in range(soak_script.PERIOD):
            assert run_layer(ranks, layer) == [0] * world_size
        for rank in ranks:
            rank.check()
            assert int(rank.wrong) == 0
    # Layers that are not merged are not right by what the period before has left.
    for rank in ranks:
        rank.check()
        assert int(rank.wrong) == soak_script.PERIOD * TOKENS * NUM_HEADS // world_size


@both_forms
@both_sizes
def test_what_is_left_of_the_use_before_shows(soak_script: ModuleType, world_size: int, tagged: bool) -> None:
    """A winner's score or id, the score of a winner of then, a whole row: from any source, one row is wrong."""
    ranks = ranks_of(soak_script, world_size, tagged)
    before: dict[int, torch.Tensor] = {}
    tried: set[Any] = set()

    def corrupt() -> None:
        """Bring words of one row of rank 0's head 0 back to what they were, others each time."""
        words = words_of(ranks[0], layer)
        fresh = words.clone()
        source = step // 7 % world_size
        row, last = words[source, 0, 0], before.get(layer % NUM_SLOT_SETS)
        before[layer % NUM_SLOT_SETS] = fresh
        if last is None:
            return
        winners, then = winners_of(row), winners_of(last[source, 0, 0])
        places = [*winners, *(TOP_K + j for j in winners)] if winners else then
        choices = [slice(None), *places]
        chosen = choices[step // (7 * world_size) % len(choices)]
        tried.add((source, bool(winners), str(chosen)))
        row[chosen] = last[source, 0, 0][chosen]

    for step in range(4 * soak_script.PERIOD):
        layer = step % soak_script.PERIOD
        wrong = run_layer(ranks, layer, corrupt)
        assert wrong == [int(step >= NUM_SLOT_SETS), *[0] * (world_size - 1)], (step, tried)
        if layer == soak_script.PERIOD - 1:
            for rank in ranks:
                rank.check()
    assert int(ranks[0].wrong) == 4 * soak_script.PERIOD - NUM_SLOT_SETS
    for source in range(world_size):
        kinds = [(winners, chosen) for where, winners, chosen in tried if where == source]
        assert (True, str(slice(None))) in kinds and (False, str(slice(None))) in kinds
        assert len(kinds) > TOP_K


@both_forms
def test_rows_of_another_source_token_or_head_show(soak_script: ModuleType, tagged: bool) -> None:
    ranks = ranks_of(soak_script, 4, tagged)
    owner = ranks[2]  # in layer 0, sources 0 and 2 hold the winners of its head 2

    for layer, other in enumerate([(2, 0, 0), (1, 0, 0), (0, 0, 1)]):

        def misplace(layer: int = layer, other: tuple[int, int, int] = other) -> None:
            words = words_of(owner, layer)
            words[0, 0, 0] = words[other]

        assert run_layer(ranks, layer, misplace) == [0, 0, 1, 0], other


def run_script(ranks: int, *arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Run the script by torchrun on the CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, str(script), "--backend", "torch", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


def test_ranks_in_processes_find_every_row_right(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    done = run_script(2, "--layer-steps", "200", "--tokens", "2", "--json", str(output))
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] == results
    assert [result["form"] for result in results] == ["tagged", "legacy"]
    for result in results:
        assert result.pop("seconds") > 0
        assert result == {
            "form": result["form"],
            "ranks": 2,
            "gpus": 0,
            "layer_steps": 384,
            "rows": 384 * 2 * 4,
            "wrong": 0,
            "errors": 0,
        }


def test_a_wrong_row_ends_with_1(tmp_path: Path) -> None:
    """Rank 0 publishes one score of one layer as it was three layers before."""
    script = tmp_path / "corrupt.py"
    script.write_text(
        f"""
import os, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import soak

made = soak.Pattern.__init__

def corrupt(self, world_size, rank, tokens):
    made(self, world_size, rank, tokens)
    if rank == 0:
        n = 100
        column = int(self.offset[n, 1, 2].argmax())
        for part in (self.slope, self.offset):
            part[n, 1, 2, column] = part[n - 3, 1, 2, column]

soak.Pattern.__init__ = corrupt
soak.main()
"""
    )
    done = run_script(2, "--layer-steps", "192", "--tokens", "2", "--form", "tagged", script=script)
    assert done.returncode == 1, done.stderr
    (result,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert result["wrong"] == 1 and result["errors"] == 0


def test_a_single_rank_is_refused(soak_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = CliRunner().invoke(soak_script.main, ["--layer-steps", "3"])
    assert result.exit_code == 1 and "needs 2 or 4 ranks, were 1" in result.output


def test_delays_are_of_all_sizes_and_differ(soak_script: ModuleType) -> None:
    drawn = [soak_script.draw_delays(random.Random(seed)) for seed in range(40)]
    assert drawn[0] != drawn[1] and drawn[0] == soak_script.draw_delays(random.Random(0))
    delays = [delay for period in drawn for layer in period for delay in layer if delay]
    assert min(delays) < 100 and any(1e4 < delay < 2e4 for delay in delays) and max(delays) > 1e5
    assert 2_000 < sum(delays) / (40 * soak_script.PERIOD) < 6_000
