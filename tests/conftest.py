# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: one build of the whole matrix, and the skipping of tests that need a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock

from flashinfer_msa.aot import toolkit
from flashinfer_msa.aot.build import MANIFEST, BuildResult, build

if not Path("/dev/nvidiactl").exists():
    # The CPU tests use small tensors. More threads would only spin at barriers and take cores from other test
    # processes. It is set before the import of torch, and child processes inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` where there is no CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Return a function that loads a fresh copy of a script of ``scripts/`` as a module."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parent.parent / "scripts" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """Build every architecture that an installed toolkit knows from this tree, once for all workers of pytest-xdist."""
    toolkits = toolkit.find()
    known = [
        arch.name for arch in toolkit.ARCHITECTURES.values() if any(found.version >= arch.toolkit for found in toolkits)
    ]
    if not known:
        pytest.skip("needs a CUDA toolkit")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "built"
    with FileLock(f"{folder}.lock"):
        # The manifest is written last.
        if not (folder / MANIFEST).is_file():
            return build(folder, known)
    return BuildResult(folder / MANIFEST, json.loads((folder / MANIFEST).read_text()), compiled=0)
