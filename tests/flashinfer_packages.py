# SPDX-License-Identifier: Apache-2.0
"""Real FlashInfer packages for tests, unpacked from their wheels and run in separate processes, never installed.

Importing them needs the packages of the ``test`` extra and any torch. It needs no GPU and no compiler.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
VERSIONS = ("0.6.18", "0.7.4")
"""A version without the ICP functions, and one with them."""
WHEELS_VARIABLE = "FLASHINFER_MSA_TEST_WHEELS"
"""Environment variable that names a folder with the wheels."""
_CACHE = ROOT / "build" / "flashinfer-wheels"
"""Folder of the downloaded wheels and their unpacked packages."""
_NO_NETWORK = re.compile("connection broken by|from versions: none")
"""What pip prints where no index can be reached or none is allowed."""


@functools.cache
def unpacked(version: str) -> Path:
    """Return the folder with a version's package ``flashinfer``. Skips the test where there is no network."""
    folder = _CACHE / version
    if not folder.is_dir():
        wheel = _wheel(version)
        with tempfile.TemporaryDirectory(dir=_CACHE) as made, zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(made, version), [name for name in archive.namelist() if _is_wanted(name)])
            _move(Path(made, version), folder)
    return folder


def run_python(*arguments: object, version: str | None = None, seconds: int = 300, **environment: str) -> str:
    """Run this interpreter with a version of FlashInfer in its path; return what it prints, or fail with its output."""
    folders = [unpacked(version)] if version else []
    with tempfile.TemporaryDirectory() as cache:
        if not torch.cuda.is_available():
            # Beside an installed nvidia-cutlass-dsl, FlashInfer 0.6.18 needs a GPU to be imported.
            Path(cache, "sitecustomize.py").write_text("import sys; sys.modules['cutlass'] = None")
            folders.insert(0, Path(cache))
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_")},
                "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT, ROOT / "tests", ROOT / "tests" / "backends"])),
                "OMP_NUM_THREADS": "1",
                "FLASHINFER_WORKSPACE_BASE": cache,
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _is_wanted(name: str) -> bool:
    """Whether importing the package needs this file of its wheel. Kernel sources and bundled libraries do not count."""
    folder = name.split("/", 1)[0]
    return folder.endswith(".dist-info") or (folder == "flashinfer" and name.endswith((".py", ".pyi", ".json")))


def _wheel(version: str) -> Path:
    name = f"flashinfer_python-{version}-*.whl"
    _CACHE.mkdir(parents=True, exist_ok=True)
    given = os.environ.get(WHEELS_VARIABLE)
    if given:
        found = next(Path(given).glob(name), None)
        assert found, f"{WHEELS_VARIABLE} must be a folder with a wheel {name}, was {given}"
        return found
    found = next(_CACHE.glob(name), None)
    if found is None:
        with tempfile.TemporaryDirectory(dir=_CACHE) as made:
            _download(version, made)
            (wheel,) = Path(made).glob(name)
            found = _move(wheel, _CACHE / wheel.name)
    return found


def _download(version: str, folder: str) -> None:
    wanted = ["--no-deps", "--only-binary", ":all:", "--dest", folder, f"flashinfer-python=={version}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--retries", "1", *wanted],
        capture_output=True,
        text=True,
    )
    if done.returncode and _NO_NETWORK.search(done.stderr):
        pytest.skip(f"needs the network for flashinfer-python {version}, or {WHEELS_VARIABLE}")
    assert done.returncode == 0, done.stdout + done.stderr


def _move(made: Path, target: Path) -> Path:
    """Move ``made`` to ``target``, unless another process was first."""
    try:
        made.rename(target)
    except OSError:
        if not target.exists():
            raise
    return target
