# SPDX-License-Identifier: Apache-2.0
"""Receive storage with one process per rank: the checks of the CPU tests, with a GPU per rank and NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import comm_checks as checks
import group_checks
import pytest
import torch
from comm_checks import Setup
from process_group import ProcessGroup
from simulated_group import SMALL

from flashinfer_msa.layout import WORLD_SIZES

pytestmark = pytest.mark.skipif(SMALL, reason="several processes do not run under a sanitizer")
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
both_row_kinds = pytest.mark.parametrize("tagged", (False, True), ids=("legacy", "tagged"))
SETUPS = [Setup("cuda", backend, memory) for backend in ("cake", "torch") for memory in ("symmetric", "ipc")]
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.backend}-{setup.memory}")
AUTO = Setup("cuda", "cake")
ON_ONE_GPU = Setup("cuda", "cake", "ipc")


@pytest.fixture(scope="module", params=WORLD_SIZES)
def group(request: pytest.FixtureRequest) -> Iterator[ProcessGroup]:
    """Return a group of each size that there are GPUs for."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA devices")
    with ProcessGroup(request.param, backend="nccl") as made:
        yield made


@needs_gpus
@every_setup
@both_row_kinds
@pytest.mark.parametrize("page_size", (128, 256))
def test_decode_between_gpus(group: ProcessGroup, page_size: int, tagged: bool, setup: Setup) -> None:
    group.run(checks.decode, f"p{page_size}_tp{group.world_size}", tagged, setup)


@needs_gpus
@pytest.mark.parametrize("page_size", (128, 256))
def test_prefill_between_gpus(group: ProcessGroup, page_size: int) -> None:
    group.run(checks.prefill, f"p{page_size}_tp{group.world_size}", AUTO)


@needs_gpus
@pytest.mark.parametrize("check", (checks.exchanging, checks.captured_exchange), ids=("eager", "captured"))
def test_carriers_are_exchanged_as_simulated(group: ProcessGroup, check: object) -> None:
    group.run(check, AUTO)


@needs_gpus
def test_a_late_rank_is_waited_for(group: ProcessGroup) -> None:
    group.run(checks.late_rank, AUTO)


@needs_gpus
@pytest.mark.parametrize(
    "check",
    (checks.disagreement, checks.one_rank_fails, checks.wrong_group, checks.closing, checks.two_groups),
    ids=lambda check: check.__name__,
)
def test_ranks_agree_close_and_share_processes(group: ProcessGroup, check: object) -> None:
    group.run(check, AUTO)


@pytest.fixture(scope="module", params=WORLD_SIZES)
def one_gpu(request: pytest.FixtureRequest) -> Iterator[ProcessGroup]:
    """Return a group of each size whose processes share one GPU."""
    with ProcessGroup(request.param, devices=1) as made:
        yield made


@both_row_kinds
@pytest.mark.parametrize("page_size", (128, 256))
def test_ranks_on_one_gpu(one_gpu: ProcessGroup, page_size: int, tagged: bool) -> None:
    """The processes are time-sliced: a merge spins while the peers' publishers wait for the GPU."""
    one_gpu.run(checks.decode, f"p{page_size}_tp{one_gpu.world_size}", tagged, ON_ONE_GPU)


@pytest.mark.parametrize("page_size", (128, 256))
def test_inputs_and_ways_to_launch_on_one_gpu(one_gpu: ProcessGroup, page_size: int) -> None:
    layout = f"p{page_size}_tp{one_gpu.world_size}"
    found = one_gpu.run(group_checks.decode_matrix, layout, range(3, 4), ON_ONE_GPU, timeout=200)
    found += one_gpu.run(group_checks.decode_steps, layout, True, True, ON_ONE_GPU, timeout=200)
    for results in found:
        for case, counts in results.items():
            assert counts.rows > 0 and counts.wrong == 0, (case, counts)
