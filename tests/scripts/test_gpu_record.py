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

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_record.py"


@pytest.fixture(scope="module")
def record_script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("gpu_record")


def section(digest: str, failed: int = 0, errors: int = 0, older: tuple[int, int] = (9, 0)) -> dict[str, object]:
    """A section as a GPU run writes it; ``older`` is what passed and failed with the cubins for older drivers."""
    tests = {"tests": {"failed": failed}, "tests_of_older_cubins": dict(zip(("passed", "failed"), older, strict=True))}
    return {"source_digest": digest, **tests, "sanitizer": {"memcheck": errors}}


def soaked(**more: object) -> list[dict[str, object]]:
    """Results of a soak of both row forms."""
    result = {"ranks": 2, "gpus": 2, "layer_steps": 1_000_128, "rows": 32_004_096, "wrong": 0, "errors": 0}
    return [{"form": form, **result, "seconds": 30.0, **more} for form in ("tagged", "legacy")]


def group_section(digest: str, **more: object) -> dict[str, object]:
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


@pytest.mark.parametrize(
    ("record", "good", "word"),
    [
        ({}, False, "gpu_verify.sh"),
        ({"single": section("old")}, False, "--pending"),
        ({"single": section("new")}, True, ""),
        ({"single": section("new", failed=1)}, False, "failures"),
        ({"single": section("new", errors=2)}, False, "failures"),
        ({"single": section("new", older=(8, 1))}, False, "failures"),
        ({"single": section("new", older=(0, 0))}, False, "failures"),
        ({"single": section("new"), "multi_gpu": group_section("old", soak=[])}, True, "tables mark it stale"),
        ({"single": section("old"), "pending": {"source_digest": "new", "reason": "no GPU"}}, True, "no GPU"),
        ({"single": section("old"), "pending": {"source_digest": "older", "reason": "no GPU"}}, False, "--pending"),
    ],
    ids=[
        "none",
        "stale",
        "current",
        "failed-tests",
        "sanitizer-errors",
        "older-failed",
        "older-unrun",
        "stale-multi",
        "pending",
        "stale-pending",
    ],
)
def test_check(record_script: ModuleType, record: dict[str, object], good: bool, word: str) -> None:
    """Only current evidence without failures passes, or a pending mark for these very sources."""
    passed, messages = record_script.check(record, "new")
    assert passed is good
    assert word in "\n".join(messages)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ({}, ""),
        ({"soak": []}, "tagged rows were not soaked"),
        ({"soak": soaked()[:1]}, "legacy rows were not soaked"),
        ({"soak": soaked(wrong=3)}, "3 tagged rows of the soak were wrong"),
        ({"soak": soaked(errors=1)}, "1 waits ran out"),
        ({"soak": soaked(layer_steps=999_999)}, "999999 layers of 1000000"),
        ({"tests": {"passed": 9, "failed": 2}}, "2 tests failed"),
        ({"tests": {"passed": 0, "failed": 0}}, "0 tests failed, 0 passed"),
        ({"bench": []}, "the benchmark has left no rows"),
        ({"missing": ["soak.json"]}, "soak.json has left no results"),
        ({"examples": {"tp_decode": {"status": 124}}}, "tp_decode exited with 124"),
    ],
)
@pytest.mark.parametrize("name", ["multi_gpu", "multi_gpu_x4"])
def test_check_of_several_gpus(record_script: ModuleType, name: str, found: dict[str, object], word: str) -> None:
    """A section of these sources passes with every test, example and layer of the soak, beside whatever else."""
    record = {"single": section("new"), name: group_section("new", **found)}
    good, messages = record_script.check(record, "new")
    assert good is not bool(word)
    assert word in "\n".join(messages) and (not word or f"section {name}: " in "\n".join(messages))
    # What failed may be known, and said to be pending: it is told all the same.
    record["pending"] = {"source_digest": "new", "reason": "mended since"}
    good, messages = record_script.check(record, "new")
    assert good and word in "\n".join(messages) and "mended since" in messages[-1]


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
    """Those of the benchmark and of the installed wheel, and the tests of both sets of cubins; README tells them."""
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
    (tmp_path / "memcheck.log").write_text("ERROR SUMMARY: 0 errors\n")
    made = record_script.make_section(
        tmp_path / "tests.xml",
        tmp_path / "older.xml",
        {"memcheck": tmp_path / "memcheck.log"},
        [tmp_path / "bench.json", tmp_path / "install.json"],
    )
    assert made["bench"] == rows and made["tests"]["passed"] == 7 and made["tests_of_older_cubins"]["passed"] == 5
    text = load_script("readme_figures").figures({"single": {**made, "source_digest": "new"}})
    assert "by NVRTC 12.9.86 and nvcc 13.0.88; those of the first, which older drivers get: 5 tests passed, 0" in text
    assert (
        "The installed wheel, 4.2 MB, beside FlashInfer 0.7.4" in text.replace("\n", " ") and "import: 0.06 s" in text
    )


def test_readme_has_tables_of_several_gpus_where_there_is_a_section(load_script: Callable[[str], ModuleType]) -> None:
    """Decode and prefill layers, waits and host time; a stale section or one with failures says so."""
    script = load_script("readme_figures")
    record = json.loads((SCRIPT.parent.parent / "tests" / "gpu" / "record.json").read_text())
    record = {name: record[name] for name in ("single", "pending") if name in record}
    assert "Ranks with a GPU each" not in script.figures(record)
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
    text = script.figures({**record, "multi_gpu": found})
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
    part = text[text.index("Ranks with a GPU each") :]
    assert "earlier sources" not in part and "failures" not in part
    stale = script.figures({**record, "multi_gpu_x4": {**found, "source_digest": "old", "soak": [], "gpus": 4}})
    stale = stale[stale.index("Ranks with a GPU each") :]
    assert "of earlier sources" in stale and "tagged rows were not soaked" in stale and "P128-TP4" in stale
    assert script.group_lines({**found, "bench": [], "faults": {}})


def test_rows_have_the_fields_of_the_record() -> None:
    """Every benchmark row names its job and says whether it is cold; every figure is a number."""
    record = json.loads((SCRIPT.parent.parent / "tests" / "gpu" / "record.json").read_text())
    for name in set(record) - {"pending"}:
        for row in record[name]["bench"]:
            assert isinstance(row["job"], str) and isinstance(row["cold"], bool), row
            assert row["us" if "us" in row else "bytes"] > 0, row
