# SPDX-License-Identifier: Apache-2.0
"""Kernels built for another architecture's GPU are those of their own, and their run fails where none of them runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import portable_units
import pytest
import torch

from flashinfer_msa.aot import matrix
from flashinfer_msa.aot.matrix import ARCHITECTURES
from flashinfer_msa.aot.render import TEMPLATES, render
from flashinfer_msa.manifest import DATA


@pytest.mark.parametrize("name", ["sm_89", "sm_100a", "sm_120a"])
def test_sources_differ_in_name_and_waits_alone(name: str) -> None:
    target = ARCHITECTURES["sm_90a"]
    before = [render(unit) for unit in matrix.units()]
    own = matrix.units([name])
    with portable_units.built_as(name, target):
        built = matrix.units(["sm_90a"])
        for theirs, ours in zip(own, built, strict=True):
            assert (ours.architecture.name, ours.architecture.capability) == ("sm_90a", (9, 0))
            assert ours.kernels == theirs.kernels
            source = re.sub(rf" on {name}\b", " on sm_90a", render(theirs))
            if name == "sm_89":
                ordered, dependent = ((TEMPLATES / f"ptx/launch_{x}.cuh").read_text() for x in ("ordered", "dependent"))
                assert source.count(ordered) == 1
                source = source.replace(ordered, dependent)
            assert render(ours) == source
    assert [render(unit) for unit in matrix.units()] == before


@pytest.mark.parametrize(
    ("name", "target", "runs"),
    [
        ("sm_89", "sm_90a", True),
        ("sm_89", "sm_121a", True),
        ("sm_120a", "sm_90a", True),
        ("sm_120a", "sm_89", False),
        ("sm_100a", "sm_90a", True),
        ("sm_100a", "sm_120a", False),
        ("sm_90a", "sm_100a", False),
    ],
)
def test_a_gpu_runs_what_it_has_instructions_and_memory_for(name: str, target: str, runs: bool) -> None:
    assert portable_units.runs_on(name, ARCHITECTURES[target]) == runs


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_run_without_kernels_fails() -> None:
    """Tests that all skip are no evidence."""
    tests = Path(__file__).parents[1] / "gpu" / "test_select_and_merge.py"
    done = subprocess.run(
        [sys.executable, portable_units.__file__, "sm_89", DATA, "-q", "-p", "no:cacheprovider", tests],
        capture_output=True,
        text=True,
    )
    assert " skipped" in done.stdout
    assert f"no test has run a kernel of {DATA.resolve()}" in done.stderr
    assert done.returncode == 1
