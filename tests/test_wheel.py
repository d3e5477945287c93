# SPDX-License-Identifier: Apache-2.0
"""The distributions: what wheel and source archive carry, and that the wheel works far from the checkout."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from flashinfer_msa.aot import toolkit
from flashinfer_msa.aot.matrix import ARCHITECTURES

ROOT = Path(__file__).resolve().parent.parent
LIMIT_BYTES = 10 * 2**20

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs the source tree")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, away from this process's import path, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    toolkits = toolkit.find()
    for name in toolkit.selected_architectures():
        if not any(found.version >= ARCHITECTURES[name].toolkit for found in toolkits):
            pytest.skip(f"no CUDA toolkit here knows {name}")
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel installed that sees the requirements of this one's environment.

    A path file lends it their folders; path files inside those, such as that of an editable install, have no effect.
    """
    root = tmp_path_factory.mktemp("venv")
    venv.create(root, symlinks=True)
    path = root / "bin" / "python"
    site = Path(run(path, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=root).strip())
    specs = [importlib.util.find_spec(name) for name in ("torch", "tvm_ffi", "click", "numpy", "rich")]
    lent = dict.fromkeys(str(Path(spec.origin).parent.parent) for spec in specs if spec and spec.origin)
    (site / "lent.pth").write_text("\n".join(lent) + "\n")
    run(sys.executable, "-m", "pip", "--python", path, "install", "--no-deps", "--no-index", wheel, cwd=root)
    return path


def test_wheel_is_tagged_by_platform_alone(wheel: Path) -> None:
    name, version, interpreter, abi, platform = wheel.stem.split("-")
    assert (name, interpreter, abi) == ("flashinfer_msa", "py3", "none")
    assert platform.startswith(("manylinux_2_28_", "linux_"))
    assert wheel.stat().st_size < LIMIT_BYTES
    with zipfile.ZipFile(wheel) as archive:
        described = archive.read(f"{name}-{version}.dist-info/WHEEL").decode()
    assert f"Tag: py3-none-{platform}" in described
    assert "Root-Is-Purelib: false" in described


def test_wheel_carries_what_its_manifest_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        manifest = json.loads(archive.read("flashinfer_msa/data/manifest.json"))
        for entry in (manifest["launcher"], *manifest["cubins"]):
            content = archive.read(f"flashinfer_msa/data/{entry['file']}")
            assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    architectures = {entry["architecture"] for entry in manifest["cubins"]}
    assert architectures >= set(toolkit.selected_architectures())
    built = {name for name in names if name.endswith((".cubin", ".so"))}
    assert len(built) == len(manifest["cubins"]) + 1
    assert {
        "flashinfer_msa/py.typed",
        "flashinfer_msa/aot/build.py",
        "flashinfer_msa/bench/decode.py",
        "flashinfer_msa/templates/common.cu.j2",
        "flashinfer_msa/templates/params.h",
        "flashinfer_msa/templates/ptx/mma.cuh",
    } <= names
    assert any(name.startswith("flashinfer_msa/native/") and name.endswith(".cc") for name in names)
    assert all(name.startswith(("flashinfer_msa/", "flashinfer_msa-")) for name in names)


def test_wheel_runs_away_from_the_checkout(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import flashinfer_msa; print(flashinfer_msa.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(python.parent.parent)
    command = python.parent / "flashinfer-msa"
    listed = json.loads(run(command, "list", "--json", cwd=tmp_path))
    assert listed["cubins"]
    assert "sm_90a" in run(command, "list", cwd=tmp_path) or "FLASHINFER_MSA_ARCHITECTURES" in os.environ
    run(
        command, "demo", "--backend", "torch", "--layout", "p128-tp2", "--batch", "2", "--context", "2048", cwd=tmp_path
    )


def test_wheel_builds_again_where_it_is_installed(python: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        "import sys; from pathlib import Path; from flashinfer_msa.aot.build import build, DATA\n"
        f"result = build(Path({str(out)!r}), [{toolkit.selected_architectures()[0]!r}], work_dir=Path('work'))\n"
        "installed = (DATA / 'libflashinfer_msa.so').read_bytes()\n"
        "assert (result.path.parent / 'libflashinfer_msa.so').read_bytes() == installed\n"
        "for entry in result.manifest['cubins']:\n"
        # nvcc 13.0 schedules the common kernels in one of several ways, the same command on the same file.
        "    if entry['layout'] is not None:\n"
        "        assert (result.path.parent / entry['file']).read_bytes() == (DATA / entry['file']).read_bytes()\n"
    )
    run(python, "-c", program, cwd=tmp_path)


def test_source_archive_is_complete_and_has_no_built_file(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert {
        "LICENSE",
        "pyproject.toml",
        "scripts/test.sh",
        "tests/conftest.py",
        "flashinfer_msa/aot/backend.py",
        "flashinfer_msa/templates/common.cu.j2",
        "flashinfer_msa/templates/ptx/mma.cuh",
    } <= set(members)
    assert any(name.startswith("flashinfer_msa/native/") and name.endswith(".cc") for name in members)
    assert all(member.isfile() or member.isdir() for member in members.values())
    assert not any("/data/" in name or name.endswith((".cubin", ".so", ".pyc")) for name in members)
