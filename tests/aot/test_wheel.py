# SPDX-License-Identifier: Apache-2.0
"""The distributions: what wheel and source archive carry, and that the wheel works far from the checkout."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from flashinfer_msa.aot import toolkit
from flashinfer_msa.aot.matrix import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
DATA = "flashinfer_msa/data/"

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs the source tree")


def run(*command: str | Path, cwd: Path, umask: int = -1, **variables: str) -> str:
    """Run a command that must succeed, away from this process's import path, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**environment, **variables}, umask=umask, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path, umask: int = -1, **variables: str) -> Path:
    """Build a ``wheel`` or an ``sdist`` of the sources in a folder."""
    command = (sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source)
    run(*command, cwd=source, umask=umask, **variables)
    (path,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path


def members(archive: Path) -> dict[str, bytes]:
    """The files of a wheel."""
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def manifest_of(archive: Path) -> dict[str, Any]:
    """The manifest in a wheel."""
    return json.loads(members(archive)[f"{DATA}manifest.json"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    toolkits = toolkit.find()
    for name in toolkit.selected_architectures():
        if not any(found.version >= ARCHITECTURES[name].toolkit for found in toolkits):
            pytest.skip(f"no CUDA toolkit here knows {name}")
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def source_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of this tree."""
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture
def unpacked(source_archive: Path, tmp_path: Path) -> Path:
    """The sources in a folder of their own, where nothing has been built."""
    shutil.unpack_archive(source_archive, tmp_path / "sources", filter="data")
    (folder,) = (tmp_path / "sources").iterdir()
    return folder


@pytest.fixture(scope="module")
def check(wheel: Path, load_script: Callable[[str], ModuleType]) -> Callable[[Path], list[str]]:
    """What scripts/check_wheel.py finds in a wheel of the architectures that are built here."""
    architectures = {entry["architecture"] for entry in manifest_of(wheel)["cubins"]}
    script = load_script("check_wheel")
    return lambda path: script.check(path, architectures)


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


def test_wheel_is_as_it_must_be(wheel: Path, check: Callable[[Path], list[str]]) -> None:
    assert check(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        (described,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(described).decode()
        names = set(archive.namelist())
    assert {entry["architecture"] for entry in manifest_of(wheel)["cubins"]} >= set(toolkit.selected_architectures())
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


def test_running_requires_neither_flashinfer_nor_build_tools(wheel: Path) -> None:
    (text,) = (text for name, text in members(wheel).items() if name.endswith(".dist-info/METADATA"))
    requirements = [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", text.decode(), re.MULTILINE)]
    required = {each.name for each in requirements if each.marker is None}
    extra = {each.name for each in requirements if each.marker and each.marker.evaluate({"extra": "flashinfer"})}
    assert required == {"torch", "apache-tvm-ffi", "click", "numpy", "packaging", "rich"}
    assert extra == {"flashinfer-python", "jinja2", "ninja"}


def test_check_tells_what_is_wrong(wheel: Path, check: Callable[[Path], list[str]], tmp_path: Path) -> None:
    files = members(wheel)
    manifest = manifest_of(wheel)
    first, *_, last = (entry["file"] for entry in manifest["cubins"])
    manifest["cubins"][1]["source_digest"] = manifest["launcher"]["source_digest"] = "0" * 64
    files[f"{DATA}manifest.json"] = json.dumps(manifest).encode()
    files[DATA + first] += b"more"
    del files[DATA + last]
    files[f"{DATA}stray.cubin"] = b"stray"
    path = tmp_path / wheel.name.replace("manylinux_2_28", "linux")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**files, "large": os.urandom(10 * 2**20)}.items():
            archive.writestr(name, content)
    machine = path.stem.partition("linux_")[2]
    tags = [f"py3-none-manylinux_2_28_{name}" for name in ("x86_64", "aarch64")]
    assert check(path) == [
        f"the tag must be {' or '.join(tags)}, is py3-none-linux_{machine}",
        f"{path.stem.rpartition('-py3')[0]}.dist-info/WHEEL has tags ['py3-none-manylinux_2_28_{machine}'], "
        f"its name py3-none-linux_{machine}",
        f"must have fewer than {10 * 2**20} bytes, has {path.stat().st_size}",
        f"{last} is only in the manifest",
        "stray.cubin is only in the archive",
        f"{first} is not the file that the manifest describes",
        "the launcher is of other sources",
        f"{manifest['cubins'][1]['file']} is of other sources",
    ]


def test_check_knows_what_an_architecture_has(
    wheel: Path, load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("check_wheel")
    cubins = manifest_of(wheel)["cubins"]
    built = list(dict.fromkeys(entry["architecture"] for entry in cubins))
    strays = sorted(entry["file"] for entry in cubins if entry["architecture"] == built[0])
    assert script.check(wheel, built[1:]) == [f"{name} is of no architecture of the wheel" for name in strays]
    name = built[0]
    monkeypatch.setitem(script.ARCHITECTURES, name, replace(ARCHITECTURES[name], cuda=(*ARCHITECTURES[name].cuda, 99)))
    assert script.check(wheel, built) == [f"{name}/cuda99 is missing"]


LIBRARY = """\
#include <dlfcn.h>
#include <math.h>
int TVMFFINothing(void);
int nowhere(void);
double f(double x) { return TVMFFINothing() + sin(x) + (dlopen("x", 1) != 0) + nowhere(); }
"""


def test_check_tells_what_keeps_a_launcher_from_loading(
    load_script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    pytest.importorskip("ziglang")
    (tmp_path / "library.c").write_text(LIBRARY)
    zig = (sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.34", "-shared", "-fPIC", "-O1")
    run(*zig, "library.c", "-o", "library.so", "-lm", "-Wl,-rpath,/opt/lib", "-Wl,-z,undefs", cwd=tmp_path)
    assert list(load_script("check_wheel").check_launcher((tmp_path / "library.so").read_bytes(), "x86_64")) == [
        "the launcher needs libm.so.6",
        "the launcher does not need libtvm_ffi.so",
        "the launcher has a library search path: /opt/lib",
        "the launcher needs GLIBC_2.34, must need none newer than GLIBC_2.28",
        "the launcher needs nowhere, which is neither glibc's nor of tvm-ffi's C interface",
    ]


def test_wheel_of_the_source_archive_has_the_same_bytes(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    """The same cubins, in another folder, at another time, of another umask, with more in the environment."""
    data = tmp_path / "data"
    for name, content in members(wheel).items():
        if name.startswith(DATA):
            path = data / name.removeprefix(DATA)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    more = {"FLASHINFER_MSA_PREBUILT": str(data), "PADDING": "x" * 4321, "TZ": "Asia/Tokyo"}
    for path in unpacked.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    again = build("wheel", unpacked, tmp_path / "again", umask=0o077, **more)
    assert again.name == wheel.name
    assert members(again) == members(wheel)
    assert again.read_bytes() == wheel.read_bytes()
    later = build("wheel", unpacked, tmp_path / "later", SOURCE_DATE_EPOCH="1700000000", **more)
    assert members(later) == members(wheel)
    with zipfile.ZipFile(later) as archive:
        assert {item.date_time for item in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_source_archive_builds_the_same_cubins(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    name = "sm_90a" if "sm_90a" in toolkit.selected_architectures() else toolkit.selected_architectures()[0]
    more = {"FLASHINFER_MSA_ARCHITECTURES": name, "PADDING": "x" * 4321}
    again = build("wheel", unpacked, tmp_path / "again", umask=0o077, **more)
    whole, part = manifest_of(wheel), manifest_of(again)
    cubins = [entry for entry in whole["cubins"] if entry["architecture"] == name]
    assert part == {**whole, "cubins": cubins}
    found, expected = members(again), members(wheel)
    assert all(found[DATA + entry["file"]] == expected[DATA + entry["file"]] for entry in cubins)


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
        "    assert (result.path.parent / entry['file']).read_bytes() == (DATA / entry['file']).read_bytes()\n"
    )
    run(python, "-c", program, cwd=tmp_path)


def test_source_archive_is_complete_and_has_no_built_file(source_archive: Path) -> None:
    with tarfile.open(source_archive) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert {
        "LICENSE",
        "pyproject.toml",
        ".github/workflows/ci.yml",
        "scripts/test.sh",
        "tests/conftest.py",
        "flashinfer_msa/aot/backend.py",
        "flashinfer_msa/templates/common.cu.j2",
        "flashinfer_msa/templates/ptx/mma.cuh",
    } <= set(members)
    assert any(name.startswith("flashinfer_msa/native/") and name.endswith(".cc") for name in members)
    assert all(member.isfile() or member.isdir() for member in members.values())
    assert not any("/data/" in name or name.endswith((".cubin", ".so", ".pyc")) for name in members)
