# SPDX-License-Identifier: Apache-2.0
"""What ranks with a GPU each check is run here by ranks on the CPU, in part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fault_checks
import group_checks
import pytest
from comm_checks import Setup
from process_group import ProcessGroup

SETUP = Setup()


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessGroup]:
    """Two processes for all tests."""
    with ProcessGroup(2) as group:
        yield group


def require_all_equal(found: list[group_checks.Results], cases: int) -> None:
    """Both ranks have so many cases, whose rows all equal the brute force's."""
    for results in found:
        assert len(results) == cases
        for case, counts in results.items():
            assert counts.rows == counts.equal > 0, (case, counts)


def test_decode(processes: ProcessGroup) -> None:
    found = processes.run(group_checks.decode_matrix, "p256_tp2", range(3, 4), SETUP, timeout=200)
    require_all_equal(found, len(group_checks.DECODE_CASES) // len(group_checks.QUERY_LENS))


def test_steps(processes: ProcessGroup) -> None:
    found = processes.run(group_checks.decode_steps, "p128_tp2", True, True, SETUP, timeout=200)
    require_all_equal(found, len(group_checks.ways_on("cpu")))


def test_prefill(processes: ProcessGroup) -> None:
    found = processes.run(group_checks.prefill_matrix, "p128_tp2", ["short"], 64, SETUP, timeout=200)
    require_all_equal(found, 2 * len(group_checks.ways_on("cpu")))


@pytest.mark.parametrize(("tagged", "wait"), [(True, "merge"), (False, "publish")], ids=["merge", "publish"])
def test_a_rank_that_is_gone(tagged: bool, wait: str, tmp_path: Path) -> None:
    """On the CPU the call itself raises, and there is no fault record."""
    results = tmp_path / "results.json"
    with ProcessGroup(2) as processes:
        processes.run(fault_checks.start, tagged, {"wait_seconds": 0.5}, SETUP)
        processes.run(fault_checks.lose_the_peer, tagged, wait, results, dies=(0, 1))
    found = json.loads(results.read_text())
    action = "publish" if wait == "merge" else "merge and release"
    assert f"for rank 1 to {action} the" in found["error"] and "of slot set 0" in found["error"]
    assert 0.5 <= found["seconds"] < 5 and "Restart the ranks" in found["next call"] and found["fault"] is None


def test_a_late_rank(processes: ProcessGroup) -> None:
    processes.run(fault_checks.start, True, {}, SETUP)
    processes.run(fault_checks.come_late, True, 0.5)
