# SPDX-License-Identifier: Apache-2.0
"""Kernels of other architectures, built for this GPU, pass its tests in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import portable_units
import pytest
import torch
from simulated_group import SMALL

RUNS = {
    "all in small shapes": [
        "test_decode_chain.py",
        "test_fused_decode.py",
        "test_prefill.py",
        "test_fused_prefill.py",
        "test_select_and_merge.py",
    ],
    "scores": ["portable_scores.py", "test_decode_chain.py::test_scores_equal_reference"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for each architecture's data folder."""
    return tmp_path_factory.mktemp("portable")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["sm_89", "sm_100a", "sm_120a"])
def test_portable_kernels_pass(name: str, run: str, folders: Path) -> None:
    """The kernels use e4m3 or FP16 products, asynchronous or bulk copies, and much or little shared memory."""
    if SMALL:
        pytest.skip("sanitizers run these kernels with tests/portable_units.py")
    target = portable_units.target_of(torch.cuda.get_device_capability())
    if target is None or not portable_units.runs_on(name, target):
        pytest.skip(f"kernels of {name} do not run on this GPU")
    here = Path(__file__).parent
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    if "small" in run:
        environment["FLASHINFER_MSA_TEST_SHAPES"] = "small"
    tests = [str(here / test) for test in RUNS[run]]
    done = subprocess.run(
        [sys.executable, portable_units.__file__, name, folders / name, "-q", "-p", "no:cacheprovider", *tests],
        cwd=here.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
