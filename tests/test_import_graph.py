# SPDX-License-Identifier: Apache-2.0
"""Imports go one way, also those of types and those inside functions. The tests read them from the sources."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flashinfer_msa"
ROOMS = (
    ("version", "files", "layout"),
    ("sizing", "limits", "manifest"),
    ("prefill",),
    ("abi",),
    ("aot",),
    ("runtime",),
    ("backends",),
    ("indexer",),
    ("comm",),
    ("msa_ops",),
    ("integrations",),
    ("testing",),
    ("bench",),
    ("cli",),
    ("__main__", "__init__"),
)
"""The packages and modules in import order: a module imports from its own tuple and from earlier ones."""

Graph = dict[str, set[str]]


def module_names(package: Path) -> dict[str, Path]:
    """Return every module below ``package`` by its dotted name in it. A folder's ``__init__`` has the folder's name."""
    names = {}
    for path in sorted(walk(package)):
        parts = path.relative_to(package).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return names


def walk(package: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(package, followlinks=True):
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def imports_of(name: str, path: Path, modules: dict[str, Path], package: str) -> set[str]:
    """Return the modules of the package that a module imports, at its top, in functions or for types only."""
    found = set()
    parts = [] if name == "__init__" else name.split(".")
    here = parts if path.name == "__init__.py" else parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            dotted = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = [package, *here[: len(here) - node.level + 1], *base]
            dotted = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for target in dotted:
            if target[0] != package:
                continue
            inner = target[1:]
            # `from room import name` is an import of the module `room.name`, or of a name in `room`.
            while inner and ".".join(inner) not in modules:
                inner = inner[:-1]
            found.add(".".join(inner) or "__init__")
    return found - {name}


def graph_of(package: Path) -> Graph:
    modules = module_names(package)
    return {name: imports_of(name, path, modules, package.name) for name, path in modules.items()}


def cycle_of(graph: Graph) -> list[str]:
    """Return a cycle of imports, or an empty list."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def upward_imports(graph: Graph, rooms: tuple[tuple[str, ...], ...] = ROOMS) -> list[str]:
    """Return the imports from a room that comes after the importing module's."""
    rank = {room: number for number, names in enumerate(rooms) for room in names}
    return [
        f"{name} imports {other}"
        for name in sorted(graph)
        for other in sorted(graph[name])
        if rank[other.split(".")[0]] > rank[name.split(".")[0]]
    ]


GRAPH = graph_of(PACKAGE)


def test_every_module_is_in_a_room() -> None:
    assert {name.split(".")[0] for name in GRAPH} == {room for rooms in ROOMS for room in rooms}


def test_no_import_goes_up() -> None:
    assert upward_imports(GRAPH) == []


def test_no_imports_go_in_a_circle() -> None:
    assert cycle_of(GRAPH) == []


@pytest.mark.parametrize(
    ("room", "statement", "says"),
    [
        ("runtime", "from ..backends import cake", "runtime.bad imports backends.cake"),
        ("runtime", "from ..indexer import MSAIcpIndexerPlan", "runtime.bad imports indexer"),
        ("comm", "def late():\n    import flashinfer_msa.cli.main", "comm.bad imports cli.main"),
        (
            "aot",
            "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from ..runtime.jit import x",
            "aot.bad imports runtime.jit",
        ),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, room: str, statement: str, says: str) -> None:
    """Whatever its syntax and wherever it is."""
    module = tmp_path / "bad.py"
    module.write_text(statement + "\n")
    modules = {**module_names(PACKAGE), f"{room}.bad": module}
    graph = {**GRAPH, f"{room}.bad": imports_of(f"{room}.bad", module, modules, "flashinfer_msa")}
    assert upward_imports(graph) == [says]


def test_a_circle_is_found() -> None:
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]


def test_contributors_are_shown_the_same_order() -> None:
    """CONTRIBUTING has the rooms in the order of this test."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    rooms = [room for names in ROOMS[:-1] for room in names]
    assert ", ".join(f"`{room}`" for room in rooms) + "." in text


PUBLIC = ("msa_ops", "indexer", "comm", "backends", "prefill.window", "integrations.flashinfer", "testing.problems")


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_module_can_be_the_only_import(module: str) -> None:
    """Compiled code works too: its operators are registered whichever module was imported."""
    program = f"""
import flashinfer_msa.{module}
import torch

def use():
    from flashinfer_msa.indexer import prepare_msa_icp_indexer
    indexer = prepare_msa_icp_indexer(
        world_size=2, rank=0, num_index_heads=4, page_size=128, init_blocks=0, local_blocks=1, max_decode_tokens=4,
        max_decode_query_len=1, max_num_batched_tokens=128, max_num_seqs=2, max_model_len=512, num_sparse_layers=3,
        device="cpu", backend="torch")
    lens, zero = torch.tensor([5], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    offsets = torch.tensor([0, 5], dtype=torch.int32)

    def plan(lens, offsets, zero):
        return indexer.prefill_window_plan(
            0, lens, lens, offsets, offsets, zero, total_q=5, max_query_len=5, max_seq_len=5).packed_work_info

    compiled = torch.compile(plan, fullgraph=True, backend="eager")
    assert torch.equal(compiled(lens, offsets, zero), plan(lens, offsets, zero))

use()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
