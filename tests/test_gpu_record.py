# SPDX-License-Identifier: Apache-2.0
"""The GPU record: evidence that matches the sources, an honest pending mark, or a failure."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_record.py"


@pytest.fixture(scope="module")
def record_script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("gpu_record")


def section(digest: str, failed: int = 0, errors: int = 0) -> dict[str, object]:
    """A section as a GPU run writes it."""
    return {"source_digest": digest, "tests": {"failed": failed}, "sanitizer": {"memcheck": errors}}


def test_the_record_is_of_these_sources() -> None:
    """Kernels do not change without a new GPU run, or a note that says so."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if done.stdout:
        warnings.warn(done.stdout.strip(), stacklevel=1)  # in the summary of every run


@pytest.mark.parametrize(
    ("record", "good", "word"),
    [
        ({}, False, "gpu_verify.sh"),
        ({"single": section("old")}, False, "--pending"),
        ({"single": section("new")}, True, ""),
        ({"single": section("new", failed=1)}, False, "failures"),
        ({"single": section("new", errors=2)}, False, "failures"),
        ({"single": section("new"), "multi_gpu": section("old")}, True, "multi_gpu"),
        ({"single": section("old"), "pending": {"source_digest": "new", "reason": "no GPU"}}, True, "no GPU"),
        ({"single": section("old"), "pending": {"source_digest": "older", "reason": "no GPU"}}, False, "--pending"),
    ],
    ids=["none", "stale", "current", "failed-tests", "sanitizer-errors", "stale-multi", "pending", "stale-pending"],
)
def test_check(record_script: ModuleType, record: dict[str, object], good: bool, word: str) -> None:
    """Only current evidence without failures passes, or a pending mark for these very sources."""
    passed, messages = record_script.check(record, "new")
    assert passed is good
    assert word in "\n".join(messages)


def test_counts_come_from_the_logs(record_script: ModuleType, tmp_path: Path) -> None:
    """Tests are counted from pytest's report and errors from the sanitizer's summaries; no summary is no result."""
    junit = tmp_path / "tests.xml"
    junit.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2">'
        '<testcase><properties><property name="near_ties" value="2"/></properties></testcase>'
        '<testcase><properties><property name="near_ties" value="3"/></properties></testcase>'
        "</testsuite></testsuites>"
    )
    assert record_script.count_near_ties(junit) == 5
    assert record_script.count_tests(junit) == {"passed": 5, "failed": 2, "skipped": 2}
    log = "========= ERROR SUMMARY: 0 errors\n...\n========= ERROR SUMMARY: 3 errors\n"
    assert record_script.count_sanitizer_errors(log) == 3
    race = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
    assert record_script.count_sanitizer_errors(race) == 2
    assert record_script.count_sanitizer_errors("killed") is None


def test_rows_have_the_fields_of_the_record() -> None:
    """Every benchmark row names its job and says whether it is cold; every figure is a number."""
    record = json.loads((SCRIPT.parent.parent / "tests" / "gpu" / "record.json").read_text())
    for name in set(record) - {"pending"}:
        for row in record[name]["bench"]:
            assert isinstance(row["job"], str) and isinstance(row["cold"], bool) and row["us"] > 0, row
