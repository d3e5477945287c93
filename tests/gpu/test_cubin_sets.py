# SPDX-License-Identifier: Apache-2.0
"""Cubins of one source give bit-equal results, whichever compiler built them and when."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from simulated_group import SMALL

from flashinfer_msa.aot import toolkit
from flashinfer_msa.manifest import load_manifest
from flashinfer_msa.runtime.loader import driver_version, kernels_of

pytestmark = pytest.mark.skipif(SMALL, reason="several processes do not run under a sanitizer")
PROGRAM = Path(__file__).with_name("cubin_outputs.py")


def outputs(*arguments: str, **changes: str | None) -> dict[str, str]:
    """Run the program with changed environment variables, where None removes one; return what it prints."""
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    done = subprocess.run([sys.executable, PROGRAM, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """Return the outputs of the cubins that are chosen for this driver."""
    return outputs()


def test_every_prebuilt_set(expected: dict[str, str]) -> None:
    """This driver also loads the sets for older drivers."""
    mine = kernels_of(torch.device("cuda", 0))
    sets = [
        cubins
        for cubins in load_manifest().sets
        if cubins.architecture == mine.architecture and cubins.driver <= driver_version()
    ]
    assert expected["compiler"] == sets[-1].toolkit and len(expected) > 40
    for cubins in sets:
        found = outputs(FLASHINFER_MSA_DRIVER=f"{cubins.driver[0]}.9")
        assert found.pop("compiler") == cubins.toolkit
        assert found.items() <= expected.items()


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs FlashInfer, which compiles")
@pytest.mark.parametrize("compiler", ("nvcc", "NVRTC"))
def test_compiled_on_this_machine(expected: dict[str, str], compiler: str, tmp_path: Path) -> None:
    """nvcc compiles where it is installed, and else the NVRTC of torch's packages."""
    changes: dict[str, str | None] = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    if compiler == "NVRTC":
        nvcc = shutil.which("nvcc")
        folders = os.environ["PATH"].split(os.pathsep)
        others = [folder for folder in folders if not nvcc or not Path(folder, "nvcc").exists()]
        changes |= {"PATH": os.pathsep.join(others), "CUDA_HOME": None, "CUDA_PATH": None}
    if not any(
        found.is_nvrtc == (compiler == "NVRTC") and found.driver <= driver_version() for found in toolkit.find()
    ):
        pytest.skip(f"needs {compiler}, of a version that the driver supports")
    found = outputs("--compile", **changes)
    assert found.pop("compiler").startswith(f"{compiler} ")
    assert found.items() <= expected.items()
    assert outputs("--compile", **changes, FLASHINFER_DISABLE_JIT="1").items() >= found.items()
