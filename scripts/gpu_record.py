#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps ``tests/gpu/record.json``: what was run on which GPU, filed under a digest of the code that ran there.

Section ``single`` is written by ``scripts/gpu_verify.sh`` on a GPU machine, ``multi_gpu`` and ``multi_gpu_x4`` by
``scripts/gpu_verify_group.sh`` on one with 2 or 4 GPUs, never by hand. The digest covers the rendered sm_90a sources
and the launcher.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashinfer_msa import manifest as installed
from flashinfer_msa.aot.matrix import ARCHITECTURES, units
from flashinfer_msa.aot.render import launcher_digest, source_digest, tree_digest

RECORD = ROOT / "tests" / "gpu" / "record.json"
ARCHITECTURE = "sm_90a"
SECTIONS = ("single", "multi_gpu", "multi_gpu_x4")
SOAK_LAYER_STEPS = 1_000_000
"""Layers that each row form is soaked for, at least."""
WAIT_PROPERTY = "seconds of "
"""How the name of a property of a test begins whose value is how long a wait took to give up."""


def read(path: Path = RECORD) -> Any:
    """Return the record, or what another JSON file holds, empty where there is none."""
    return json.loads(path.read_text()) if path.is_file() else {}


def write(record: dict[str, Any], path: Path = RECORD) -> None:
    """Write the record."""
    path.write_text(json.dumps(record, indent=1) + "\n")


def check(record: dict[str, Any], digest: str) -> tuple[bool, list[str]]:
    """Return whether the record holds evidence for ``digest``, or says that it is pending, and what to tell."""
    messages, good = [], True
    for name in SECTIONS[1:]:
        if name not in record:
            continue
        if record[name]["source_digest"] != digest:
            messages.append(f"section {name} was recorded for other sources: tables mark it stale")
            continue
        failures = group_failures(record[name])
        messages += [f"section {name}: {failure}" for failure in failures]
        good = good and not failures
    pending = record.get("pending")
    if pending is not None and pending["source_digest"] == digest:
        return True, [
            *messages,
            f"WARNING: NOT ALL RUN ON A GPU. The record is pending for these sources: {pending['reason']}",
        ]
    single = record.get("single")
    if single is not None and single["source_digest"] == digest:
        older = single["tests_of_older_cubins"]
        unrun = not older["passed"]  # those tests skip where nothing is prebuilt for an older driver
        failed = single["tests"]["failed"] or older["failed"] or unrun or any(single["sanitizer"].values())
        if failed:
            messages.append("the last GPU run had failures")
        return good and not failed, messages
    return False, [
        *messages,
        f"section single was not recorded for these sources (digest {digest[:16]}): run scripts/gpu_verify.sh on a GPU "
        'machine, or `python scripts/gpu_record.py --pending "reason"`',
    ]


def group_failures(section: dict[str, Any]) -> list[str]:
    """What a run with several GPUs failed at, or left out."""
    failures = [f"{name} has left no results" for name in section["missing"]]
    if section["tests"]["failed"] or not section["tests"]["passed"]:
        failures.append(f"{section['tests']['failed']} tests failed, {section['tests']['passed']} passed")
    if not section["bench"]:
        failures.append("the benchmark has left no rows")
    failures += [
        f"{name} exited with {found['status']}" for name, found in section["examples"].items() if found["status"]
    ]
    soaked = {result["form"]: result for result in section["soak"]}
    for form in ("tagged", "legacy"):
        result = soaked.get(form)
        if result is None:
            failures.append(f"{form} rows were not soaked")
        elif result["wrong"] or result["errors"]:
            failures.append(f"{result['wrong']} {form} rows of the soak were wrong, {result['errors']} waits ran out")
        elif result["layer_steps"] < SOAK_LAYER_STEPS:
            failures.append(f"{form} rows were soaked for {result['layer_steps']} layers of {SOAK_LAYER_STEPS}")
    return failures


def is_built() -> bool:
    """Whether the installed cubins and launcher are those of these sources."""
    try:
        found = installed.read_manifest(installed.DATA)
        found.launcher()
        sets = [cubins for cubins in found.sets if cubins.architecture == ARCHITECTURE]
    except (OSError, RuntimeError):
        return False
    wanted = {unit.name: source_digest(unit) for unit in units([ARCHITECTURE])}
    built = [{Path(entry["file"]).stem: entry["source_digest"] for entry in cubins.entries} for cubins in sets]
    has_all = {cubins.driver[0] for cubins in sets} == set(ARCHITECTURES[ARCHITECTURE].cuda)
    same = all(digests == wanted for digests in built)
    return has_all and same and found.data["launcher"]["source_digest"] == launcher_digest()


def count_tests(junit: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, from pytest's XML report."""
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return {"passed": int(suite.get("tests", 0)) - failed - skipped, "failed": failed, "skipped": skipped}


def count_near_ties(junit: Path) -> int:
    """Return the rows that differed from the brute force by near ties, as the tests have reported them."""
    properties = ElementTree.parse(junit).getroot().iter("property")
    return sum(int(entry.get("value", 0)) for entry in properties if entry.get("name") == "near_ties")


def count_sanitizer_errors(log: str) -> int | None:
    """Return the errors of a compute-sanitizer log: the sum over its processes; None where it has no summary."""
    counts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", log)
    return sum(map(int, counts)) if counts else None


def wait_seconds(junit: Path) -> dict[str, float]:
    """Return how long waits took to give up, in seconds, as the tests have reported them."""
    properties = [
        (entry.get("name", ""), entry.get("value", 0)) for entry in ElementTree.parse(junit).getroot().iter("property")
    ]
    return {name[len(WAIT_PROPERTY) :]: float(value) for name, value in properties if name.startswith(WAIT_PROPERTY)}


def read_example(log: str) -> dict[str, Any]:
    """Return the exit status of a run, the last line of its log, and the last few lines that it printed before."""
    lines = log.strip().splitlines() or [""]
    found = re.fullmatch(r"exit status (\d+)", lines[-1])
    return {"status": int(found[1]) if found else -1, "output": lines[-6:-1] if found else lines[-5:]}


def machine() -> dict[str, Any]:
    """Return what ran where: GPU, driver, torch, date and the digest of the sources."""
    import subprocess

    import torch

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.split()[0],
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "source_digest": tree_digest(ARCHITECTURE),
    }


def compilers() -> list[str]:
    """Return who compiled the cubins of the architecture that are installed, as ``NVRTC 12.9.86``."""
    return [
        cubins.toolkit for cubins in installed.read_manifest(installed.DATA).sets if cubins.architecture == ARCHITECTURE
    ]


def make_section(junit: Path, older: Path, logs: dict[str, Path], bench: Sequence[Path]) -> dict[str, Any]:
    """Return section ``single`` from the files that a GPU run has left."""
    errors = {}
    for tool, log in logs.items():
        count = count_sanitizer_errors(log.read_text())
        if count is None:
            raise click.ClickException(f"{log} has no summary: the sanitizer did not finish")
        errors[tool] = count
    return {
        **machine(),
        "compilers": compilers(),
        "tests": count_tests(junit),
        "tests_of_older_cubins": count_tests(older),
        "near_ties": count_near_ties(junit),
        "sanitizer": errors,
        "bench": [row for path in bench for row in json.loads(path.read_text())],
    }


def make_group_section(
    junit: Sequence[Path], soak: Path, bench: Path, examples: dict[str, Path], gpus: int
) -> dict[str, Any]:
    """Return the section of a run with several GPUs, from the files that it has left; ``missing`` names the others."""
    reports = [path for path in junit if path.is_file()]
    counts = [count_tests(path) for path in reports]
    return {
        **machine(),
        "compilers": compilers(),
        "gpus": gpus,
        "missing": [path.name for path in (*junit, soak, bench, *examples.values()) if not path.is_file()],
        "tests": {kind: sum(count[kind] for count in counts) for kind in ("passed", "failed", "skipped")},
        "near_ties": sum(map(count_near_ties, reports)),
        "faults": {name: seconds for path in reports for name, seconds in wait_seconds(path).items()},
        "examples": {name: read_example(path.read_text()) for name, path in examples.items() if path.is_file()},
        "soak": read(soak) or [],
        "bench": read(bench) or [],
    }


FILE = click.Path(dir_okay=False, path_type=Path)


def _named(options: Sequence[str]) -> dict[str, Path]:
    """The files of options ``NAME=FILE``."""
    return {name: Path(file) for name, file in (option.split("=", 1) for option in options)}


@click.command()
@click.option("--check", "checks", is_flag=True, help="Exit 1 unless the record is of these sources, or pending.")
@click.option("--pending", metavar="REASON", help="Say that these sources have not run on a GPU yet, and why.")
@click.option("--digest", "prints_digest", is_flag=True, help="Print the digest of these sources.")
@click.option("--built", is_flag=True, help="Exit 1 unless the installed cubins are those of these sources.")
@click.option("--write", "section", type=click.Choice(SECTIONS), help="Write a section from the files of a GPU run.")
@click.option("--junit", type=FILE, multiple=True, help="pytest's XML report; repeatable with several GPUs.")
@click.option("--sanitizer", "logs", multiple=True, metavar="TOOL=LOG", help="A log of compute-sanitizer; repeatable.")
@click.option("--older", type=FILE, help="pytest's XML report of the cubins for older drivers, with one GPU.")
@click.option("--bench", type=FILE, multiple=True, help="Rows of a benchmark; repeatable with one GPU.")
@click.option("--soak", type=FILE, help="Results of scripts/soak.py.")
@click.option("--example", "examples", multiple=True, metavar="NAME=LOG", help="What an example printed; repeatable.")
def main(
    checks: bool,
    pending: str | None,
    prints_digest: bool,
    built: bool,
    section: str | None,
    junit: tuple[Path, ...],
    logs: tuple[str, ...],
    older: Path | None,
    bench: tuple[Path, ...],
    soak: Path | None,
    examples: tuple[str, ...],
) -> None:
    """Check the GPU record against the sources, mark it pending, or write a section of it."""
    if prints_digest:
        click.echo(tree_digest(ARCHITECTURE))
    record = read()
    if section is not None:
        if not junit or not bench:
            raise click.UsageError("--write needs --junit and --bench")
        if not is_built():
            raise click.ClickException("the installed cubins are not those of these sources: build them first")
        if section == "single":
            if older is None or len(junit) > 1:
                raise click.UsageError("--write single needs one --junit and --older")
            absent = [str(path) for path in (*junit, older, *bench) if not path.is_file()]
            if absent:
                raise click.UsageError(f"--write single needs the reports and the rows, absent: {absent}")
            record[section] = make_section(junit[0], older, _named(logs), bench)
        else:
            if soak is None:
                raise click.UsageError(f"--write {section} needs --soak")
            gpus = 4 if section == "multi_gpu_x4" else 2
            record[section] = make_group_section(junit, soak, bench[0], _named(examples), gpus)
        without = {name: value for name, value in record.items() if name != "pending"}
        if check(without, tree_digest(ARCHITECTURE))[0]:
            record = without  # nothing is left to wait for
        write(record)
        click.echo(f"{RECORD}: section {section} written")
    if pending is not None:
        record["pending"] = {
            "source_digest": tree_digest(ARCHITECTURE),
            "reason": pending,
            "date": datetime.now(timezone.utc).date().isoformat(),
        }
        write(record)
    if built and not is_built():
        raise SystemExit(1)
    if checks:
        good, messages = check(record, tree_digest(ARCHITECTURE))
        for message in messages:
            click.echo(message, err=not good)
        if not good:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
