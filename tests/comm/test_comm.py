# SPDX-License-Identifier: Apache-2.0
"""Receive storage with one process per rank, on the CPU over gloo: 2 and 4 processes run every check one by one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import comm_checks as checks
import pytest
import torch
from comm_checks import Setup
from process_group import ProcessGroup, RankError

from flashinfer_msa.comm import allocate_comm, exchange_carriers, local_comm
from flashinfer_msa.layout import LAYOUTS, WORLD_SIZES

CPU = Setup()
both_forms = pytest.mark.parametrize("tagged", (False, True), ids=("legacy", "tagged"))
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Groups:
    """Process groups by size. A group that a check has broken is replaced."""

    def __init__(self) -> None:
        self._made = {world_size: ProcessGroup(world_size) for world_size in WORLD_SIZES}

    def __getitem__(self, world_size: int) -> ProcessGroup:
        if not self._made[world_size].alive:
            self._made[world_size].close()
            self._made[world_size] = ProcessGroup(world_size)
        return self._made[world_size]

    def close(self) -> None:
        """End all of them."""
        for group in self._made.values():
            group.close()


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    """Groups of every size."""
    made = Groups()
    yield made
    made.close()


@pytest.fixture(params=WORLD_SIZES)
def group(request: pytest.FixtureRequest, groups: Groups) -> ProcessGroup:
    """A group of each size."""
    return groups[request.param]


@every_layout
@both_forms
def test_decode_between_processes(groups: Groups, layout: str, tagged: bool) -> None:
    groups[LAYOUTS[layout].world_size].run(checks.decode, layout, tagged, CPU)


@every_layout
def test_prefill_between_processes(groups: Groups, layout: str) -> None:
    groups[LAYOUTS[layout].world_size].run(checks.prefill, layout, CPU)


def test_a_late_rank_is_waited_for(group: ProcessGroup) -> None:
    group.run(checks.late_rank, CPU)


def test_a_legacy_publisher_waits_for_a_free_row(groups: Groups) -> None:
    groups[2].run(checks.legacy_publisher_waits)


@both_forms
def test_waits_run_out_by_polls_and_by_seconds(groups: Groups, tagged: bool) -> None:
    groups[2].run(checks.waits_that_run_out, tagged)


def test_ranks_that_disagree_are_refused_everywhere(group: ProcessGroup) -> None:
    group.run(checks.disagreement, CPU)


def test_what_fails_on_one_rank_raises_on_all(group: ProcessGroup) -> None:
    group.run(checks.one_rank_fails, CPU)


def test_another_group_is_refused(group: ProcessGroup) -> None:
    group.run(checks.wrong_group, CPU)


def test_close_and_allocate_again(group: ProcessGroup) -> None:
    group.run(checks.closing, CPU)


def test_groups_are_independent(group: ProcessGroup) -> None:
    group.run(checks.two_groups, CPU)


def test_any_object_with_the_fields_will_do(groups: Groups) -> None:
    groups[2].run(checks.foreign_fields)


def test_carriers_are_exchanged_as_simulated(group: ProcessGroup) -> None:
    group.run(checks.exchanging, CPU)


def test_bad_carriers_are_refused(group: ProcessGroup) -> None:
    group.run(checks.exchange_refuses)


@pytest.mark.parametrize("copied", (copy.copy, copy.deepcopy, pickle.dumps))
def test_storage_is_not_copied(copied: Callable[[Any], Any]) -> None:
    """A copy would publish into the rows of the original, or in another process anywhere."""
    layout = LAYOUTS["p256_tp2"]
    comm = local_comm([CPU.indexer(rank, layout) for rank in range(2)])[0]
    with pytest.raises(TypeError, match=r"^receive storage cannot be copied or pickled"):
        copied(comm)


def test_without_a_group() -> None:
    indexer = CPU.indexer(0, LAYOUTS["p128_tp2"])
    carrier = torch.zeros(4, 1, 33, dtype=torch.int32)
    for call in (lambda: allocate_comm(indexer), lambda: exchange_carriers(carrier, carrier.clone().view(2, 2, 1, 33))):
        with pytest.raises(ValueError, match=r"^group must be an initialized process group, was none: .*init_process"):
            call()


def test_the_harness_brings_failures_back(groups: Groups) -> None:
    """A check that fails on one rank fails here, with its traceback, and the processes stay usable."""
    with pytest.raises(RankError, match=r"rank 1: Traceback[\s\S]*KeyError: 'p1_tp1'"):
        groups[2].run(_fails_on_rank_1)
    groups[2].run(checks.exchanging, CPU)


def _fails_on_rank_1(rank: int) -> str | None:
    return str(LAYOUTS["p1_tp1"]) if rank == 1 else None


@pytest.mark.parametrize(("world_size", "tagged"), ((2, True), (4, False)), ids=("tagged", "legacy"))
def test_a_killed_peer_is_named(groups: Groups, world_size: int, tagged: bool) -> None:
    seconds = groups[world_size].run(checks.killed_peer, tagged, dies=(1,))
    assert seconds[1] is None and all(0.4 < s < 5 for rank, s in enumerate(seconds) if rank != 1)
    assert not checks.left_behind()
