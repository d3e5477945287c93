# SPDX-License-Identifier: Apache-2.0
"""The templates: each unit is one self-contained source, and compiles for every architecture without local memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fragment_checks import copy_marked, find_problems

from flashinfer_msa.aot import matrix, nvrtc, toolkit
from flashinfer_msa.aot.build import BuildResult
from flashinfer_msa.aot.matrix import ARCHITECTURES, Unit
from flashinfer_msa.aot.render import TEMPLATES, render, tree_digest
from flashinfer_msa.layout import LAYOUTS

UNITS = matrix.units()
KINDS = list({(unit.template, unit.architecture.name): unit for unit in UNITS}.values())
"""A unit of every kernel source and architecture."""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: f"{unit.architecture.name}-{unit.name}")
def test_unit_is_one_self_contained_source(unit: Unit) -> None:
    source = render(unit)
    assert source.startswith("// SPDX-License-Identifier: Apache-2.0\n")
    assert not re.search(r"^\s*#\s*include", source, re.MULTILINE), "kernels are built without any header"
    assert not re.search(r"\{%|%\}|\{\{ ", source), "a tag that was not rendered"
    for kernel in unit.kernels:
        assert re.search(rf"\b{kernel.symbol}\b", source)


def test_names_are_unique() -> None:
    """A kernel whose sums are exact anyway has the role of exact sums too; no other has two."""
    assert len({(unit.architecture.name, unit.name) for unit in UNITS}) == len(UNITS)
    for name, arch in ARCHITECTURES.items():
        kernels = [(unit, kernel) for unit in matrix.units([name]) for kernel in unit.kernels]
        assert len({(unit.layout, kernel.role) for unit, kernel in kernels}) == len(kernels)
        jobs = {
            (unit.layout, kernel.role if arch.fp8_products else kernel.role.removesuffix("_exact"))
            for unit, kernel in kernels
        }
        symbols = {(unit.layout, kernel.symbol) for unit, kernel in kernels}
        assert len({symbol for _, symbol in symbols}) == len(symbols) == len(jobs)


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"architectures must be among .*, were \['sm_00'\]"):
        matrix.units(["sm_90a", "sm_00"])


def test_tree_digest_is_of_the_sources_alone() -> None:
    """Another process, with another hash seed, comes to the same digest; another architecture to another."""
    code = "from flashinfer_msa.aot.render import tree_digest; print(tree_digest('sm_90a'))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == tree_digest("sm_90a") != tree_digest("sm_89")


def test_fragments_state_what_they_need(tmp_path: Path) -> None:
    """No kernel source depends silently on the order of its includes."""
    assert find_problems(KINDS, copy_marked(TEMPLATES, tmp_path / "templates")) == set()


@pytest.mark.parametrize(
    ("name", "edits", "problems"),
    [
        (
            "decode_score.cu.j2",
            {'"rank_keys.cuh"': '"swap"', '"sort_keys.cuh"': '"rank_keys.cuh"', '"swap"': '"sort_keys.cuh"'},
            {"decode_score.cu.j2 must include rank_keys.cuh before sort_keys.cuh"},
        ),
        (
            "prefill_score_wgmma.cu.j2",
            {'{% include "ptx/mbarrier.cuh.j2" %}\n': "", '"ptx/wgmma.cuh.j2" %}\n': '"ptx/mbarrier.cuh.j2" %}\n'},
            {"prefill_score_wgmma.cu.j2 must include ptx/mbarrier.cuh.j2 before ptx/copy_tensor.cuh"},
        ),
        (
            "sort_keys.cuh",
            {", rank_keys.cuh.": "."},
            {"sort_keys.cuh must state that it needs rank_keys.cuh, for Key"},
        ),
        (
            "rank_keys.cuh",
            {"// Needs: constants.h.j2.": "// Needs: constants.h.j2, params.h."},
            {"rank_keys.cuh states that it needs params.h and uses nothing of it"},
        ),
    ],
    ids=["swapped", "late", "unstated", "unneeded"],
)
def test_a_wrong_order_or_statement_is_found(
    name: str, edits: dict[str, str], problems: set[str], tmp_path: Path
) -> None:
    marked = copy_marked(TEMPLATES, tmp_path / "templates")
    path = marked / name
    for old, new in edits.items():
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    assert find_problems(KINDS, marked) == problems


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_e4m3_is_multiplied_where_tensor_cores_do(name: str) -> None:
    """Elsewhere a compiler would make conversions of it, of both operands in every product."""
    arch = ARCHITECTURES[name]
    for unit in matrix.units([name]):
        scores = unit.job == "prefill_score"
        source = render(unit)
        assert ("wgmma.mma_async" in source) == (scores and arch.wgmma)
        assert ("mma.sync.aligned.m16n8k32" in source) == (scores and arch.fp8_products and not arch.wgmma)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_compiles(name: str, built: BuildResult) -> None:
    entries = [entry for entry in built.manifest["cubins"] if entry["architecture"] == name]
    if not entries:
        pytest.skip(f"no CUDA compiler here knows {name}")
    units = {unit.name: unit for unit in matrix.units([name])}
    compilers = {entry["toolkit"] for entry in entries}
    assert len(entries) == len(compilers) * len(units)
    for entry in entries:
        unit = units[Path(entry["file"]).stem]
        cubin = (built.path.parent / entry["file"]).read_bytes()
        assert len(cubin) == entry["bytes"] > 0
        if entry["toolkit"].startswith("nvcc"):  # to NVRTC, every source has the same path
            assert b"_INTERNAL_" not in cubin, "the name of a static device variable carries a hash of the build's path"
        assert b"_GLOBAL__N_" not in cubin and "namespace {" not in render(unit), "so does an anonymous namespace's"
        assert [kernel["symbol"] for kernel in entry["kernels"]] == [kernel.symbol for kernel in unit.kernels]
        for kernel in entry["kernels"]:
            assert kernel["registers"] > 0
            assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nvrtc_compiles_too(name: str, built: BuildResult) -> None:
    """No unit needs a host compiler or a header: where the build used nvcc, the common kernels and one layout's."""
    if any(e["architecture"] == name and e["toolkit"].startswith("NVRTC") for e in built.manifest["cubins"]):
        return
    arch = ARCHITECTURES[name]
    chosen = toolkit.choose(arch, (found for found in toolkit.find() if found.is_nvrtc))
    if chosen is None:
        pytest.skip(f"no NVRTC here knows {name}")
    for unit in matrix.units([name]):
        if unit.layout in (None, LAYOUTS["p256_tp4"]):
            cubin, _ = nvrtc.compile_source(render(unit).encode(), chosen.path, list(toolkit.nvrtc_flags(arch)))
            assert cubin
