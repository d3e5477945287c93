#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps ``tests/gpu/record.json``: what ran on which GPU, with a digest of the code that ran.

``scripts/gpu_verify.sh`` writes section ``single`` on a GPU machine. ``scripts/gpu_verify_group.sh`` writes
``multi_gpu`` and ``multi_gpu_x4`` on machines with 2 and 4 GPUs. Nobody edits the file by hand. The digest covers the
rendered sm_90a sources and the launcher.

A failure stays in the record until a run passes the check that failed. ``--known-failure`` explains one, ``--pending``
explains why a run is missing. Neither removes a failure.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
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
COMMANDS = {name: f"scripts/gpu_verify{'' if name == 'single' else '_group'}.sh" for name in SECTIONS}
"""What writes each section."""
ROW_KINDS = ("tagged", "legacy")
SOAK_LAYER_STEPS = 1_000_000
"""Layers that each row kind is soaked for, at least."""
WAIT_PROPERTY = "seconds of "
"""How the name of a property of a test begins whose value is how long a wait took to give up."""


def read(path: Path = RECORD) -> Any:
    """Return the record, or what another JSON file holds, empty where there is none."""
    return json.loads(path.read_text()) if path.is_file() else {}


def write(record: dict[str, Any], path: Path) -> None:
    """Write the record."""
    path.write_text(json.dumps(record, indent=1) + "\n")


def checks(name: str, section: Mapping[str, Any]) -> dict[str, str]:
    """Return the checks that the run of a section has made: what each failed at, or nothing where it passed."""
    return _single_checks(section) if name == "single" else _group_checks(section)


def _single_checks(section: Mapping[str, Any]) -> dict[str, str]:
    found = {"tests": _failed_tests(section["tests"])}
    # These tests skip where nothing is prebuilt for an older driver: a run in which none passed proves nothing.
    found["tests of older cubins"] = _failed_tests(section["tests_of_older_cubins"])
    counts = section.get("sanitizer_tests", {})
    for tool, errors in section["sanitizer"].items():
        found[tool] = f"had {errors} errors" if errors else _failed_tests(counts[tool]) if tool in counts else ""
    return found


def _group_checks(section: Mapping[str, Any]) -> dict[str, str]:
    missing = section["missing"]
    absent = [name for name in missing if name.endswith(".xml")]
    tests = f"had no results in {', '.join(absent)}" if absent else _failed_tests(section["tests"])
    found = {"tests": tests, "benchmark": "" if section["bench"] else "had no rows"}
    examples = section["examples"]
    found |= {f"example {Path(name).stem}": "had no results" for name in missing if name.endswith(".log")}
    for name, run in examples.items():
        found[f"example {name}"] = f"exited with {run['status']}" if run["status"] else ""
    soaked = {result["form"]: result for result in section["soak"]}
    for kind in ROW_KINDS:
        found[f"soak of {kind} rows"] = _failed_soak(soaked.get(kind))
    return found


def _failed_tests(counts: Mapping[str, int]) -> str:
    if counts["failed"] or not counts["passed"]:
        return f"had {counts['failed']} failed and {counts['passed']} passed"
    return ""


def _failed_soak(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "had no results"
    if result["wrong"] or result["errors"]:
        return f"had {result['wrong']} wrong rows, and {result['errors']} waits ran out"
    if result["layer_steps"] < SOAK_LAYER_STEPS:
        return f"ran {result['layer_steps']} layers of {SOAK_LAYER_STEPS}"
    return ""


def failures(name: str, section: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the failures of a section, explained or not, that no run has cleared.

    Each names its ``check``, ``what`` it failed at, the digest ``since`` when, and the ``command`` that clears it by
    passing. An explained one has a ``reason`` too.
    """
    known = list(section.get("known_failures", []))
    listed = {failure["check"] for failure in known}
    new = {check: what for check, what in checks(name, section).items() if what and check not in listed}
    return [*known, *(_failure(name, check, what, section["source_digest"]) for check, what in new.items())]


def _failure(name: str, check: str, what: str, digest: str) -> dict[str, str]:
    return {"check": check, "what": what, "since": digest, "command": COMMANDS[name]}


def carried_failures(name: str, old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the failures of ``old`` that the run of ``new`` has not cleared.

    One whose check ``new`` passed is gone. One that ``new`` did not check stays as it was. One that failed again stays
    since when it did, and its explanation is gone, since it was wrong.
    """
    ran, carried = checks(name, new), []
    for failure in failures(name, old) if old is not None else []:
        what = ran.get(failure["check"])
        if what is None:
            carried.append(failure)
        elif what:
            carried.append(_failure(name, failure["check"], what, failure["since"]))
    return carried


def explain(record: dict[str, Any], name: str, check: str, reason: str) -> None:
    """Add ``reason`` to a failure of section ``name``, which makes it a known one."""
    section = record.get(name)
    found = {failure["check"]: failure for failure in failures(name, section)} if section else {}
    if check not in found:
        raise click.UsageError(
            f"--known-failure must name a check that section {name} has failed, was {check!r}: "
            f"it has failed {', '.join(map(repr, found)) or 'none'}"
        )
    found[check]["reason"] = reason
    section["known_failures"] = list(found.values())


def describe(name: str, failure: Mapping[str, str]) -> str:
    """Return a failure of a section as a line."""
    reason = f" ({failure['reason']})" if "reason" in failure else ""
    kind = "KNOWN FAILURE" if reason else "FAILURE"
    return (
        f"{kind} in section {name}: {failure['check']} {failure['what']}{reason}, since sources "
        f"{failure['since'][:16]}; {failure['command']} clears it when it passes"
    )


def check(record: dict[str, Any], digest: str) -> tuple[bool, list[str]]:
    """Return whether the record is good evidence for ``digest``, and what to tell.

    A failure is always told. An explained one, or one of other sources, is no reason to stop; any other is. A missing
    run of one GPU is good only where the record says that it is pending for these very sources.
    """
    messages, good = [], True
    for name in SECTIONS:
        if name not in record:
            continue
        current = record[name]["source_digest"] == digest
        if not current and name != "single":
            messages.append(f"section {name} was recorded for other sources: tables mark it stale")
        for failure in failures(name, record[name]):
            messages.append(describe(name, failure))
            good = good and ("reason" in failure or not current)
    if is_current(record, digest):
        return good, messages
    pending = record.get("pending")
    if pending is not None and pending["source_digest"] == digest:
        reason = pending["reason"]
        warning = f"WARNING: NOT ALL RUN ON A GPU. The record is pending for these sources: {reason}"
        return good, [*messages, warning]
    return False, [
        *messages,
        f"section single was not recorded for these sources (digest {digest[:16]}): run scripts/gpu_verify.sh on a GPU "
        'machine, or `python scripts/gpu_record.py --pending "reason"`',
    ]


def is_current(record: Mapping[str, Any], digest: str) -> bool:
    """Return whether the run of one GPU was of these sources: nothing is pending then."""
    return "single" in record and record["single"]["source_digest"] == digest


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


def count_sanitized_tests(log: str) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped under the sanitizer, none where pytest has not finished."""
    summaries = re.findall(r"^=*\s*(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", log, re.MULTILINE)
    found = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", summaries[-1])} if summaries else {}
    failed = found.get("failed", 0) + found.get("error", 0) + found.get("errors", 0)
    return {"passed": found.get("passed", 0), "failed": failed, "skipped": found.get("skipped", 0)}


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
    errors, sanitized = {}, {}
    for tool, log in logs.items():
        text = log.read_text()
        count = count_sanitizer_errors(text)
        if count is None:
            raise click.ClickException(f"{log} has no summary: the sanitizer did not finish")
        errors[tool], sanitized[tool] = count, count_sanitized_tests(text)
    return {
        **machine(),
        "compilers": compilers(),
        "tests": count_tests(junit),
        "tests_of_older_cubins": count_tests(older),
        "near_ties": count_near_ties(junit),
        "sanitizer": errors,
        "sanitizer_tests": sanitized,
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
@click.option(
    "--check", "does_check", is_flag=True, help="Exit 1 unless the record is good evidence for these sources."
)
@click.option("--pending", metavar="REASON", help="Say that these sources have not run on a GPU yet, and why.")
@click.option(
    "--known-failure",
    "known",
    nargs=2,
    type=(click.Choice(SECTIONS), str),
    metavar="SECTION CHECK",
    help="Explain, with --reason, a recorded failure. --check tells it until a run passes.",
)
@click.option("--reason", help="Why the check failed, for --known-failure.")
@click.option("--digest", "prints_digest", is_flag=True, help="Print the digest of these sources.")
@click.option("--built", is_flag=True, help="Exit 1 unless the installed cubins are those of these sources.")
@click.option("--write", "section", type=click.Choice(SECTIONS), help="Write a section from the files of a GPU run.")
@click.option("--junit", type=FILE, multiple=True, help="pytest's XML report; repeatable with several GPUs.")
@click.option("--sanitizer", "logs", multiple=True, metavar="TOOL=LOG", help="A log of compute-sanitizer; repeatable.")
@click.option("--older", type=FILE, help="pytest's XML report of the cubins for older drivers, with one GPU.")
@click.option("--bench", type=FILE, multiple=True, help="Rows of a benchmark; repeatable with one GPU.")
@click.option("--soak", type=FILE, help="Results of scripts/soak.py.")
@click.option("--example", "examples", multiple=True, metavar="NAME=LOG", help="What an example printed; repeatable.")
@click.option("--record", "path", type=FILE, default=RECORD, help="The record.  [default: tests/gpu/record.json]")
def main(
    does_check: bool,
    pending: str | None,
    known: tuple[str, str] | None,
    reason: str | None,
    prints_digest: bool,
    built: bool,
    section: str | None,
    junit: tuple[Path, ...],
    logs: tuple[str, ...],
    older: Path | None,
    bench: tuple[Path, ...],
    soak: Path | None,
    examples: tuple[str, ...],
    path: Path,
) -> None:
    """Check the GPU record against the sources, explain what is missing or failed, or write a section."""
    digest = tree_digest(ARCHITECTURE)
    if prints_digest:
        click.echo(digest)
    record = read(path)
    if section is not None:
        if not junit or not bench:
            raise click.UsageError("--write needs --junit and --bench")
        if not is_built():
            raise click.ClickException("the installed cubins are not those of these sources: build them first")
        if section == "single":
            if older is None or len(junit) > 1:
                raise click.UsageError("--write single needs one --junit and --older")
            absent = [str(file) for file in (*junit, older, *bench) if not file.is_file()]
            if absent:
                raise click.UsageError(f"--write single needs the reports and the rows, absent: {absent}")
            made = make_section(junit[0], older, _named(logs), bench)
        else:
            if soak is None:
                raise click.UsageError(f"--write {section} needs --soak")
            gpus = 4 if section == "multi_gpu_x4" else 2
            made = make_group_section(junit, soak, bench[0], _named(examples), gpus)
        made["known_failures"] = carried_failures(section, record.get(section), made)
        record[section] = made
    if known is not None:
        if not reason:
            raise click.UsageError("--known-failure needs --reason")
        explain(record, *known, reason)
    if pending is not None:
        today = datetime.now(timezone.utc).date().isoformat()
        record["pending"] = {"source_digest": digest, "reason": pending, "date": today}
    elif (section is not None or known is not None) and is_current(record, digest):
        record.pop("pending", None)
    if section is not None or known is not None or pending is not None:
        write(record, path)
    if section is not None:
        click.echo(f"{path}: section {section} written")
    if built and not is_built():
        raise SystemExit(1)
    if does_check:
        good, messages = check(record, digest)
        for message in messages:
            click.echo(message, err=not good)
        if not good:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
