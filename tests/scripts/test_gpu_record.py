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
from typing import Any

import click
import pytest
from click.testing import CliRunner

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_record.py"


@pytest.fixture(scope="module")
def record_script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("gpu_record")


def section(
    digest: str, failed: int = 0, errors: int = 0, older: tuple[int, int] = (9, 0), **more: object
) -> dict[str, Any]:
    """A section as a GPU run writes it; ``older`` is what passed and failed with the cubins for older drivers."""
    tests = {"passed": 9, "failed": failed}
    older_tests = dict(zip(("passed", "failed"), older, strict=True))
    sanitizer = {"sanitizer": {"memcheck": errors}}
    return {"source_digest": digest, "tests": tests, "tests_of_older_cubins": older_tests, **sanitizer, **more}


def soaked(**more: object) -> list[dict[str, object]]:
    """Results of a soak of both row forms."""
    result = {"ranks": 2, "gpus": 2, "layer_steps": 1_000_128, "rows": 32_004_096, "wrong": 0, "errors": 0}
    return [{"form": form, **result, "seconds": 30.0, **more} for form in ("tagged", "legacy")]


def group_section(digest: str, **more: object) -> dict[str, Any]:
    """A section as a run with two GPUs writes it."""
    examples = {"tp_decode": {"status": 0, "output": ["equal"]}}
    row = {"job": "decode_chain", "us": 65.0}
    found = {"missing": [], "tests": {"passed": 9, "failed": 0}, "examples": examples, "soak": soaked(), "bench": [row]}
    return {"source_digest": digest, **found, **more}


def test_the_record_is_of_these_sources() -> None:
    """Kernels do not change without a new GPU run, or a note that says so."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if done.stdout:
        warnings.warn(done.stdout.strip(), stacklevel=1)  # in the summary of every run


NO_GPU = {"source_digest": "new", "reason": "no GPU"}


@pytest.mark.parametrize(
    ("record", "good", "word"),
    [
        ({}, False, "gpu_verify.sh"),
        ({"single": section("old")}, False, "--pending"),
        ({"single": section("new")}, True, ""),
        ({"single": section("new", failed=1)}, False, "FAILURE in section single: tests had 1 failed and 9 passed"),
        ({"single": section("new", errors=2)}, False, "memcheck had 2 errors"),
        ({"single": section("new", older=(8, 1))}, False, "tests of older cubins had 1 failed"),
        ({"single": section("new", older=(0, 0))}, False, "tests of older cubins had 0 failed and 0 passed"),
        (
            {"single": section("new", sanitizer_tests={"memcheck": {"passed": 7, "failed": 1}})},
            False,
            "memcheck had 1 failed and 7 passed",
        ),
        ({"single": section("new"), "multi_gpu": group_section("old")}, True, "tables mark it stale"),
        (
            {"single": section("new"), "multi_gpu": group_section("old", soak=[])},
            True,
            "FAILURE in section multi_gpu: soak of tagged rows had no results",
        ),
        ({"single": section("old"), "pending": NO_GPU}, True, "no GPU"),
        ({"single": section("old"), "pending": {**NO_GPU, "source_digest": "older"}}, False, "--pending"),
        ({"single": section("old", errors=2), "pending": NO_GPU}, True, "memcheck had 2 errors"),
        ({"single": section("new", errors=2), "pending": NO_GPU}, False, "memcheck had 2 errors"),
        (
            {"single": section("old"), "multi_gpu": group_section("new", bench=[]), "pending": NO_GPU},
            False,
            "benchmark had no rows",
        ),
    ],
    ids=[
        "none",
        "stale",
        "current",
        "failed-tests",
        "sanitizer-errors",
        "older-failed",
        "older-unrun",
        "sanitized-tests-failed",
        "stale-multi",
        "failed-stale-multi",
        "pending",
        "stale-pending",
        "failed-stale-pending",
        "failed-pending",
        "failed-multi-pending",
    ],
)
def test_check(record_script: ModuleType, record: dict[str, object], good: bool, word: str) -> None:
    """Only current evidence passes, or a pending mark for these very sources; a failure is told in any case."""
    passed, messages = record_script.check(record, "new")
    assert passed is good
    assert word in "\n".join(messages)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ({}, ""),
        ({"soak": []}, "soak of tagged rows had no results"),
        ({"soak": soaked()[:1]}, "soak of legacy rows had no results"),
        ({"soak": soaked(wrong=3)}, "soak of tagged rows had 3 wrong rows"),
        ({"soak": soaked(errors=1)}, "1 waits ran out"),
        ({"soak": soaked(layer_steps=999_999)}, "999999 layers of 1000000"),
        ({"tests": {"passed": 9, "failed": 2}}, "tests had 2 failed"),
        ({"tests": {"passed": 0, "failed": 0}}, "0 failed and 0 passed"),
        ({"bench": []}, "benchmark had no rows"),
        ({"missing": ["comm.xml"]}, "tests had no results in comm.xml"),
        ({"missing": ["tp_decode.log"], "examples": {}}, "example tp_decode had no results"),
        ({"examples": {"tp_decode": {"status": 124}}}, "example tp_decode exited with 124"),
    ],
)
@pytest.mark.parametrize("name", ["multi_gpu", "multi_gpu_x4"])
def test_check_of_several_gpus(record_script: ModuleType, name: str, found: dict[str, object], word: str) -> None:
    """A section of these sources passes with every test, example and layer of the soak."""
    record = {"single": section("new"), name: group_section("new", **found)}
    good, messages = record_script.check(record, "new")
    assert good is not bool(word)
    assert word in "\n".join(messages) and (not word or f"FAILURE in section {name}: " in "\n".join(messages))
    # A pending mark is for a run that is missing: it covers no failure.
    record["pending"] = {"source_digest": "new", "reason": "mended since"}
    good, messages = record_script.check(record, "new")
    assert good is not bool(word) and word in "\n".join(messages)
    # One that is explained is told, and does not stop anybody.
    for failure in record_script.failures(name, record[name]):
        record_script.explain(record, name, failure["check"], "mended since")
    good, messages = record_script.check(record, "new")
    assert good and word in "\n".join(messages)
    assert all("KNOWN FAILURE" in message and "(mended since)" in message for message in messages)


def test_only_a_recorded_failure_is_explained(record_script: ModuleType) -> None:
    record = {"multi_gpu": group_section("new", bench=[])}
    for name, check, words in (
        ("multi_gpu", "tests", "was 'tests': it has failed 'benchmark'"),
        ("single", "tests", "it has failed none"),
    ):
        with pytest.raises(click.UsageError, match=words):
            record_script.explain(record, name, check, "reason")
    assert "known_failures" not in record["multi_gpu"]


def test_a_run_clears_the_failures_that_it_has_passed_and_no_others(record_script: ModuleType) -> None:
    """One that it did not check stays as it was; one that fails again needs another explanation."""
    examples = {name: {"status": 9, "output": []} for name in ("mended", "broken", "left_out")}
    record = {"multi_gpu": group_section("old", examples=examples, bench=[])}
    for name in examples:
        record_script.explain(record, "multi_gpu", f"example {name}", "understood")
    examples = {"mended": {"status": 0}, "broken": {"status": 1}}
    made = group_section("new", examples=examples)
    made["known_failures"] = record_script.carried_failures("multi_gpu", record["multi_gpu"], made)
    broken, left_out = made["known_failures"]
    command = {"since": "old", "command": "scripts/gpu_verify_group.sh"}
    assert broken == {"check": "example broken", "what": "exited with 1", **command}
    assert left_out == {"check": "example left_out", "what": "exited with 9", **command, "reason": "understood"}
    good, messages = record_script.check({"single": section("new"), "multi_gpu": made}, "new")
    assert not good and messages[0].startswith("FAILURE") and messages[1].startswith("KNOWN FAILURE")
    # A failure that nobody has explained is not dropped either by a run that leaves it out.
    later = group_section("newer", examples={})
    later["known_failures"] = record_script.carried_failures("multi_gpu", made, later)
    assert [failure["check"] for failure in later["known_failures"]] == ["example broken", "example left_out"]
    assert record_script.carried_failures("multi_gpu", None, later) == []


def test_the_command_keeps_failures(record_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--known-failure`` and ``--write`` change the file, and a pending mark goes once nothing is pending."""
    digest = record_script.tree_digest("sm_90a")
    path, junit, soak, bench, log = (tmp_path / name for name in ("record", "group.xml", "soak", "bench", "tp.log"))
    failed = {"tp": {"status": 9, "output": []}}
    pending = {"source_digest": digest, "reason": "no GPU"}
    groups = {"multi_gpu": group_section(digest, examples=failed)}
    path.write_text(json.dumps({"single": section("old"), **groups, "pending": pending}))

    def command(*arguments: object) -> tuple[int, str]:
        options = ["--record", str(path), "--check", *map(str, arguments)]
        done = CliRunner().invoke(record_script.main, options)
        return done.exit_code, done.output

    assert command() == (1, command()[1]) and "FAILURE in section multi_gpu: example tp exited with 9" in command()[1]
    assert command("--known-failure", "multi_gpu", "example tp")[0] == 2
    status, printed = command("--known-failure", "multi_gpu", "example tp", "--reason", "it hung at exit")
    assert status == 0 and "KNOWN FAILURE" in printed and "it hung at exit" in printed and "no GPU" in printed
    monkeypatch.setattr(record_script, "machine", lambda: {"gpu": "GPU X", "source_digest": digest})
    monkeypatch.setattr(record_script, "compilers", lambda: ["nvcc 1"])
    monkeypatch.setattr(record_script, "is_built", lambda: True)
    junit.write_text('<testsuites><testsuite tests="3" failures="0" errors="0" skipped="0"/></testsuites>')
    soak.write_text(json.dumps(soaked()))
    bench.write_text('[{"job": "host", "us": 1.0}]')
    write = ("--write", "multi_gpu", "--junit", junit, "--soak", soak, "--bench", bench)
    status, printed = command(*write)
    assert status == 0 and "it hung at exit" in printed, "a run without the example clears nothing"
    log.write_text("exit status 0\n")
    status, printed = command(*write, "--example", f"tp={log}")
    assert status == 0 and "KNOWN FAILURE" not in printed and "no GPU" in printed
    assert json.loads(path.read_text())["multi_gpu"]["known_failures"] == []
    single = ("--write", "single", "--junit", junit, "--older", junit, "--bench", bench)
    status, printed = command(*single)
    assert status == 0 and set(json.loads(path.read_text())) == {"single", "multi_gpu"}


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
    tests = (
        "1 passed in 0.1s\n..F.\n=== 1 failed, 371 passed, 20 skipped, 30 deselected, 2 errors in 100.1s (0:01:40) ==\n"
    )
    assert record_script.count_sanitized_tests(tests) == {"passed": 371, "failed": 3, "skipped": 20}
    assert record_script.count_sanitized_tests("5 passed, 1 skipped in 3.00s\n")["passed"] == 5
    assert record_script.count_sanitized_tests("killed") == {"passed": 0, "failed": 0, "skipped": 0}


def test_a_section_of_several_gpus_is_made_of_what_is_there(
    record_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports add up, and a step that has left nothing is named."""
    monkeypatch.setattr(record_script, "machine", lambda: {"gpu": "GPU X", "source_digest": "new"})
    monkeypatch.setattr(record_script, "compilers", lambda: ["nvcc 1", "NVRTC 2"])
    faults, group, log = tmp_path / "faults.xml", tmp_path / "group.xml", tmp_path / "tp_decode.log"
    faults.write_text(
        '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1"><testcase><properties>'
        '<property name="seconds of a merge, wait_seconds=2" value="2.004"/></properties></testcase></testsuite>'
        "</testsuites>"
    )
    group.write_text(
        '<testsuites><testsuite tests="7" failures="1" errors="0" skipped="0"><testcase><properties>'
        '<property name="near_ties" value="4"/></properties></testcase></testsuite></testsuites>'
    )
    log.write_text("one\ntwo\nexit status 0\n")
    (tmp_path / "soak.json").write_text(json.dumps(soaked()))
    bench, absent = tmp_path / "bench.json", tmp_path / "absent.xml"
    examples = {"tp_decode": log}
    made = record_script.make_group_section([faults, group, absent], tmp_path / "soak.json", bench, examples, 2)
    assert made == {
        "gpu": "GPU X",
        "source_digest": "new",
        "compilers": ["nvcc 1", "NVRTC 2"],
        "gpus": 2,
        "missing": ["absent.xml", "bench.json"],
        "tests": {"passed": 8, "failed": 1, "skipped": 1},
        "near_ties": 4,
        "faults": {"a merge, wait_seconds=2": 2.004},
        "examples": {"tp_decode": {"status": 0, "output": ["one", "two"]}},
        "soak": soaked(),
        "bench": [],
    }
    assert record_script.read_example("it\nhangs\n") == {"status": -1, "output": ["it", "hangs"]}
    assert record_script.read_example("exit status 124") == {"status": 124, "output": []}


def test_a_section_of_one_gpu_has_all_rows(
    record_script: ModuleType, load_script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the benchmark and of the installed wheel, and the tests of both sets of cubins; the page has them."""
    monkeypatch.setattr(record_script, "machine", lambda: {"gpu": "H", "driver": "1", "torch": "2", "date": "today"})
    monkeypatch.setattr(record_script, "compilers", lambda: ["NVRTC 12.9.86", "nvcc 13.0.88"])
    for name, passed in (("tests", 7), ("older", 5)):
        suite = f'<testsuite tests="{passed}" failures="0" errors="0" skipped="0"/>'
        (tmp_path / f"{name}.xml").write_text(f"<testsuites>{suite}</testsuites>")
    rows = [
        {"job": "host", "name": "decode", "us": 10.0, "cold": False},
        {"job": "load", "name": "import", "us": 61234.0, "cold": False, "note": "beside FlashInfer 0.7.4"},
        {"job": "load", "name": "wheel", "bytes": 4_200_000, "cold": False},
    ]
    for name, part in (("bench", rows[:1]), ("install", rows[1:])):
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    (tmp_path / "memcheck.log").write_text("4 passed, 1 skipped in 2.0s\nERROR SUMMARY: 0 errors\n")
    made = record_script.make_section(
        tmp_path / "tests.xml",
        tmp_path / "older.xml",
        {"memcheck": tmp_path / "memcheck.log"},
        [tmp_path / "bench.json", tmp_path / "install.json"],
    )
    assert made["bench"] == rows and made["tests"]["passed"] == 7 and made["tests_of_older_cubins"]["passed"] == 5
    assert made["sanitizer"] == {"memcheck": 0} and made["sanitizer_tests"]["memcheck"]["passed"] == 4
    text = load_script("figures").benchmark_figures({"single": {**made, "source_digest": "new"}}).replace("\n", " ")
    assert "by NVRTC 12.9.86 and nvcc 13.0.88. Those of the first," in text and "5 tests passed, 0 failed" in text
    assert "memcheck 0 errors in 4 tests. Its scope is limited. Shapes are small." in text
    assert "The installed wheel, 4.2 MB, beside FlashInfer 0.7.4" in text and "import: 0.06 s" in text


def test_the_page_has_tables_of_several_gpus_where_there_is_a_section(load_script: Callable[[str], ModuleType]) -> None:
    """Decode and prefill layers, waits and host time; a stale section or one with failures says so."""
    script = load_script("figures")
    record = json.loads((SCRIPT.parent.parent / "tests" / "gpu" / "record.json").read_text())
    record = {name: record[name] for name in ("single", "pending") if name in record}
    assert "## Ranks with a GPU each" not in script.benchmark_figures(record)
    decode = {"layout": "P128-TP2", "batch": 32, "ctx": 131072, "query_len": 1, "cold": True, "us": 65.0}
    prefill = {"layout": "P256-TP2", "tokens": 8192, "ctx": 131072, "heads": 4, "cold": True, "gpus": 2}
    rows = [
        {"job": "decode_chain", **decode, "ceiling_ratio": 0.9},
        {"job": "decode_chain", **decode, "peer": "Peer 1.0", "peer_us": 120.25, "speedup": 1.85},
        {"job": "host", "name": "prepared decode step", "us": 9.5, "cold": False},
    ]
    layer = [
        {"job": "prefill_chain", "name": "score and select", **prefill, "us": 500.0},
        {"job": "prefill_chain", "name": "exchange", **prefill, "us": 40.0},
        {"job": "merge", **prefill, "us": 30.0},
        {"job": "prefill_chain", "name": "with the exchange", **prefill, "us": 560.0},
    ]
    run = {"gpu": "GPU X", "gpus": 2, "driver": "1", "torch": "2", "date": "2026-01-01"}
    tests = {"passed": 9, "failed": 0, "skipped": 1}
    found = group_section(script.tree_digest("sm_90a"), **run, tests=tests, faults={"a merge": 2.0}, bench=rows + layer)
    text = script.benchmark_figures({**record, "multi_gpu": found})
    for words in (
        "2 x GPU X",
        "1,000,128 layers of tagged rows",
        "32,004,096 rows, 0 wrong",
        "| a merge | 2.0 s |",
        "| batch x context, query length | P128-TP2 | P256-TP2 |\n|---|---|---|\n| 32 x 128K, 1 | 65.0 us (90%) | - |",
        "| 32 x 128K, 1 | 1.85x | - |",
        "| exchange | - | 40 us |",
        "| all in one | - | 560 us |",
        "prepared decode step: 9.5 us",
    ):
        assert words in text, words
    part = text[text.index("## Ranks with a GPU each") :]
    assert "earlier sources" not in part and "Failed: " not in part
    stale = script.benchmark_figures(
        {**record, "multi_gpu_x4": {**found, "source_digest": "old", "soak": [], "gpus": 4}}
    )
    stale = stale[stale.index("## Ranks with a GPU each") :]
    assert "of earlier sources" in stale and "P128-TP4" in stale
    assert "**Failed: soak of tagged rows had no results** (section `multi_gpu_x4`)." in stale
    assert script.group_lines("multi_gpu", {**found, "bench": [], "faults": {}})


def test_rows_have_the_fields_of_the_record() -> None:
    """Every benchmark row names its job and says whether it is cold; every figure is a number."""
    record = json.loads((SCRIPT.parent.parent / "tests" / "gpu" / "record.json").read_text())
    for name in set(record) - {"pending"}:
        for row in record[name]["bench"]:
            assert isinstance(row["job"], str) and isinstance(row["cold"], bool), row
            assert row["us" if "us" in row else "bytes"] > 0, row
