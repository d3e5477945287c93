# SPDX-License-Identifier: Apache-2.0
"""What ranks with a GPU each check is run here by ranks on the CPU, in part."""

from __future__ import annotations

from collections.abc import Iterator

import group_checks
import pytest
from comm_checks import Place
from process_group import ProcessGroup

PLACE = Place()


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
    found = processes.run(group_checks.decode_matrix, "p256_tp2", range(3, 4), PLACE, timeout=200)
    require_all_equal(found, len(group_checks.DECODE_CASES) // len(group_checks.QUERY_LENS))


def test_steps(processes: ProcessGroup) -> None:
    found = processes.run(group_checks.decode_steps, "p128_tp2", True, True, PLACE, timeout=200)
    require_all_equal(found, len(group_checks.ways_on("cpu")))


def test_prefill(processes: ProcessGroup) -> None:
    found = processes.run(group_checks.prefill_matrix, "p128_tp2", ["short"], 64, PLACE, timeout=200)
    require_all_equal(found, 2 * len(group_checks.ways_on("cpu")))
