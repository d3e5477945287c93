#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps ``tests/gpu/record.json``: what was run on which GPU, filed under a digest of the code that ran there.

Sections (``single``, ``multi_gpu``, ``multi_gpu_x4``) are written by ``scripts/gpu_verify.sh`` on a GPU machine, never
by hand. The digest covers the rendered sm_90a sources and the launcher.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashinfer_msa.aot.matrix import units
from flashinfer_msa.aot.render import launcher_digest, source_digest, tree_digest
from flashinfer_msa.runtime import manifest as installed

RECORD = ROOT / "tests" / "gpu" / "record.json"
ARCHITECTURE = "sm_90a"
SECTIONS = ("single", "multi_gpu", "multi_gpu_x4")


def read(path: Path = RECORD) -> dict[str, Any]:
    """Return the record, empty where there is none yet."""
    return json.loads(path.read_text()) if path.is_file() else {}


def write(record: dict[str, Any], path: Path = RECORD) -> None:
    """Write the record."""
    path.write_text(json.dumps(record, indent=1) + "\n")


def check(record: dict[str, Any], digest: str) -> tuple[bool, list[str]]:
    """Return whether the record holds evidence for ``digest``, or says that it is pending, and what to tell."""
    messages = [
        f"section {name} was recorded for other sources: tables mark it stale"
        for name in SECTIONS[1:]
        if name in record and record[name]["source_digest"] != digest
    ]
    single = record.get("single")
    if single is not None and single["source_digest"] == digest:
        failed = single["tests"]["failed"] or any(single["sanitizer"].values())
        if failed:
            messages.append("the last GPU run had failures")
        return not failed, messages
    pending = record.get("pending")
    if pending is not None and pending["source_digest"] == digest:
        return True, [
            *messages,
            f"WARNING: NOT RUN ON A GPU. The record is pending for these sources: {pending['reason']}",
        ]
    return False, [
        *messages,
        f"section single was not recorded for these sources (digest {digest[:16]}): run scripts/gpu_verify.sh on a GPU "
        'machine, or `python scripts/gpu_record.py --pending "reason"`',
    ]


def is_built() -> bool:
    """Whether the installed cubins and launcher are those of these sources."""
    try:
        found = installed.read_manifest(installed.DATA)
        found.launcher()
        digests = {Path(entry["file"]).stem: entry["source_digest"] for entry in found.cubins(ARCHITECTURE)}
    except (OSError, RuntimeError):
        return False
    wanted = {unit.name: source_digest(unit) for unit in units([ARCHITECTURE])}
    return digests == wanted and found.data["launcher"]["source_digest"] == launcher_digest()


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


def make_section(junit: Path, logs: dict[str, Path], bench: Path) -> dict[str, Any]:
    """Return a section from the files that a GPU run has left."""
    import subprocess

    import torch

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    errors = {}
    for tool, log in logs.items():
        count = count_sanitizer_errors(log.read_text())
        if count is None:
            raise click.ClickException(f"{log} has no summary: the sanitizer did not finish")
        errors[tool] = count
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.split()[0],
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "source_digest": tree_digest(ARCHITECTURE),
        "tests": count_tests(junit),
        "near_ties": count_near_ties(junit),
        "sanitizer": errors,
        "bench": json.loads(bench.read_text()),
    }


@click.command()
@click.option("--check", "checks", is_flag=True, help="Exit 1 unless the record is of these sources, or pending.")
@click.option("--pending", metavar="REASON", help="Say that these sources have not run on a GPU yet, and why.")
@click.option("--built", is_flag=True, help="Exit 1 unless the installed cubins are those of these sources.")
@click.option("--write", "section", type=click.Choice(SECTIONS), help="Write a section from the files of a GPU run.")
@click.option("--junit", type=click.Path(exists=True, path_type=Path), help="pytest's XML report.")
@click.option("--sanitizer", "logs", multiple=True, metavar="TOOL=LOG", help="A log of compute-sanitizer; repeatable.")
@click.option("--bench", type=click.Path(exists=True, path_type=Path), help="Rows of scripts/gpu_bench.py.")
def main(
    checks: bool,
    pending: str | None,
    built: bool,
    section: str | None,
    junit: Path | None,
    logs: tuple[str, ...],
    bench: Path | None,
) -> None:
    """Check the GPU record against the sources, mark it pending, or write a section of it."""
    record = read()
    if section is not None:
        if junit is None or bench is None:
            raise click.UsageError("--write needs --junit and --bench")
        if not is_built():
            raise click.ClickException("the installed cubins are not those of these sources: build them first")
        record[section] = make_section(junit, {name: Path(log) for name, log in (x.split("=", 1) for x in logs)}, bench)
        if section == "single":
            record.pop("pending", None)
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
