# SPDX-License-Identifier: Apache-2.0
"""Compares what the fragments of a kernel source need before them with what they state.

A fragment states its needs in a comment: ``// Needs: params.h, ptx/a.cuh or ptx/b.cuh.`` The comment may continue on
the next line. A fragment without such a comment needs only what it includes itself.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from flashinfer_msa.aot.matrix import Unit
from flashinfer_msa.aot.render import render

_BEGIN, _END = "//@begin ", "//@end "
_STATEMENT = re.compile(r"^// Needs: ((?:.|\n// )+?)\.$", re.MULTILINE)
_INCLUDE = re.compile(r'\{% include "([^"]+)"')
_NAMESPACE = re.compile(r"^(?:inline )?namespace (\w+) \{")
_DEFINITION = re.compile(
    r"^(?:inline )?constexpr [\w ]+ (\w+) ="
    r"|^(?:struct|enum class) (?:alignas\(\d+\) )?(\w+)(?: : \w+)? \{"
    r"|^using (\w+) ="
    r"|^__device__ \w+ (\w+);"
    r"|^__device__ __forceinline__ [^(]*?(\w+\()"
)
_STRING = re.compile(r'"[^"]*"')
_NAME = re.compile(r"(?<![\w.>])(?:(\w+)::)?(\w+)(?:<[\w:, ]*>)?(\()?")


def stated_needs(text: str) -> list[tuple[str, ...]]:
    """Return the needs that a fragment states, each with its alternatives."""
    statement = _STATEMENT.search(text)
    needs = statement[1].replace("\n// ", " ").split(", ") if statement else []
    return [tuple(need.split(" or ")) for need in needs]


def copy_marked(templates: Path, to: Path) -> Path:
    """Copy the templates with marks around every fragment. The marks stay in rendered sources."""
    shutil.copytree(templates, to)
    for path in to.rglob("*"):
        if path.is_file() and not path.name.endswith(".cu.j2"):
            name = path.relative_to(to).as_posix()
            path.write_text(f"{_BEGIN}{name}\n{path.read_text()}\n{_END}{name}\n")
    return to


def fragments_of(unit: Unit, marked: Path) -> dict[str, list[str]]:
    """Return the fragments of a unit in order, each with its lines but without those of nested fragments."""
    lines: dict[str, list[str]] = {}
    within: list[str] = []
    for line in render(unit, marked).splitlines():
        if line.startswith(_BEGIN):
            within.append(line.removeprefix(_BEGIN))
            lines[within[-1]] = []
        elif line.startswith(_END):
            within.pop()
        elif within:
            lines[within[-1]].append(line)
    return lines


def _scan(lines: Iterable[str]) -> Iterator[tuple[set[str], set[str]]]:
    """Yield the names that each line defines and uses outside comments.

    A name has its namespace, and a function's name ends with a parenthesis.
    """
    namespace = ""
    for line in lines:
        code = _STRING.sub("", line).partition("//")[0]
        if opened := _NAMESPACE.match(code):
            namespace = "" if opened[1] == "kernels" else opened[1]
            continue
        if code.startswith("}"):
            continue
        definition = _DEFINITION.match(code)
        defined = {f"{namespace}::{next(filter(None, definition.groups()))}"} if definition else set()
        used = set()
        for qualifier, name, call in _NAME.findall(code):
            scopes = {"", namespace} if qualifier in ("", "kernels") else {qualifier}
            used |= {f"{scope}::{name}{suffix}" for scope in scopes for suffix in {"", call}}
        yield defined, used


def _problems_of(unit: Unit, marked: Path, used_needs: set[tuple[str, str]]) -> Iterator[str]:
    """Yield the problems of a unit, and add its fragments' actual needs to ``used_needs``."""
    fragments = fragments_of(unit, marked)
    order = list(fragments)
    scanned = {name: list(_scan(lines)) for name, lines in fragments.items()}
    defined_in = {defined: name for name, lines in scanned.items() for each, _ in lines for defined in each}
    for name, lines in scanned.items():
        text = (marked / name).read_text()
        stated, own = stated_needs(text), {name, *_INCLUDE.findall(text)}
        for alternatives in stated:
            if not any(need in order[: order.index(name)] for need in alternatives):
                yield f"{unit.template} must include {' or '.join(alternatives)} before {name}"
        first_use: dict[str, str] = {}
        for use in (use for _, uses in lines for use in sorted(uses) if use in defined_in):
            first_use.setdefault(defined_in[use], use)
        for need, use in first_use.items():
            used_needs.add((name, need))
            if need not in own and not any(need in alternatives for alternatives in stated):
                yield f"{name} must state that it needs {need}, for {use.removeprefix('::').rstrip('(')}"


def find_problems(units: Iterable[Unit], marked: Path) -> set[str]:
    """Return the fragments that precede what they need, and the statements that have too little or too much."""
    used: set[tuple[str, str]] = set()
    problems = {problem for unit in units for problem in _problems_of(unit, marked, used)}
    for name in {name for name, _ in used}:
        for need in {need for alternatives in stated_needs((marked / name).read_text()) for need in alternatives}:
            if (name, need) not in used:
                problems.add(f"{name} states that it needs {need} and uses nothing of it")
    return problems
