# SPDX-License-Identifier: Apache-2.0
"""Ranks with a GPU each lose a peer: an error names the awaited rank and row, within the limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import fault_checks as checks
import pytest
import torch
from comm_checks import Setup
from process_group import ProcessGroup
from simulated_group import SMALL

pytestmark = [
    pytest.mark.traps,
    pytest.mark.skipif(SMALL, reason="several processes do not run under a sanitizer"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SETUP = Setup("cuda", "cake")


class Case(NamedTuple):
    """A wait for a killed rank."""

    tagged: bool
    wait: str
    limit: dict[str, Any]


CASES = {
    "merge of tagged rows, wait_seconds=2": Case(True, "merge", {"wait_seconds": 2.0}),
    "merge of legacy rows, wait_seconds=2": Case(False, "merge", {"wait_seconds": 2.0}),
    "publish of legacy rows, wait_seconds=2": Case(False, "publish", {"wait_seconds": 2.0}),
    "merge of tagged rows, spin_limit=1000000": Case(True, "merge", {"spin_limit": 1_000_000}),
    "publish of legacy rows, spin_limit=1000000": Case(False, "publish", {"spin_limit": 1_000_000}),
    "merge of tagged rows, default spin_limit": Case(True, "merge", {}),
}
LATE = {"tagged": True, "legacy": False}


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, ProcessGroup]]:
    """Return two ranks per case, which have decoded a few layers. Starting is slow, so the cases start in parallel."""

    def start(name: str) -> tuple[str, ProcessGroup]:
        tagged, _, limit = CASES[name] if name in CASES else Case(LATE[name], "", {})
        group = ProcessGroup(2, backend="nccl")
        group.run(checks.start, tagged, limit, SETUP, timeout=120)
        return name, group

    with ThreadPoolExecutor() as pool:
        started = dict(pool.map(start, [*CASES, *LATE]))
    yield started
    for group in started.values():
        group.close()


@pytest.mark.parametrize("name", LATE)
def test_a_rank_that_is_seconds_late_is_waited_for(groups: dict[str, ProcessGroup], name: str) -> None:
    groups[name].run(checks.come_late, LATE[name], 3.0)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_is_gone_is_named(
    groups: dict[str, ProcessGroup], name: str, tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    """The wait ends at its limit. The fault and the next call name the rank, slot set, row kind and row."""
    tagged, wait, limit = CASES[name]
    results = tmp_path / "results.json"
    groups[name].run(checks.lose_the_peer, tagged, wait, results, timeout=140, dies=(0, 1))
    found = json.loads(results.read_text())
    fault, seconds = found["fault"], found["seconds"]
    record_property(f"seconds of {name}", round(seconds, 3))
    assert "error" in found and fault is not None, found
    assert (fault["rank"], fault["peer"], fault["slot"], fault["wait"]) == (0, 1, 0, wait), fault
    assert fault["row_kind"] == ("tagged" if tagged else "legacy") and fault["row"] >= 0, fault
    action = "publish" if wait == "merge" else "merge and release"
    words = [
        "rank 0 on cuda:0 waited",
        f"for rank 1 to {action} the {fault['row_kind']} receive row {fault['row']}",
        "of slot set 0",
        "Restart the ranks of the group",
    ]
    for word in words:
        assert word in fault["words"] and word in found["next call"], found
    if "wait_seconds" in limit:
        assert 1.99 <= fault["seconds"] <= 2.1 and 1.9 <= seconds <= 4, found
    else:
        assert fault["polls"] == limit.get("spin_limit", 1 << 26), found
        assert 0.001 < seconds < 140, found
