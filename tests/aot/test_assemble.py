# SPDX-License-Identifier: Apache-2.0
"""Cubins that were built apart are put together as they are, or not at all, with a launcher for any machine."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashinfer_msa.aot import launcher
from flashinfer_msa.aot.assemble import assemble
from flashinfer_msa.aot.build import BuildResult, build
from flashinfer_msa.aot.toolkit import BuildError

ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00"
"""How a shared library begins, up to the number of its machine."""


@pytest.fixture
def folders(built: BuildResult, tmp_path: Path) -> list[Path]:
    """What builds of two architectures, each into a folder of its own, have written."""
    return [part(built, name, tmp_path / name) for name in ("sm_89", "sm_90a")]


def part(built: BuildResult, architecture: str, folder: Path) -> Path:
    """The output of a build of one architecture, out of that of all."""
    cubins = [entry for entry in built.manifest["cubins"] if entry["architecture"] == architecture]
    if not cubins:
        pytest.skip(f"needs a compiler of {architecture}")
    shutil.copytree(built.path.parent / architecture, folder / architecture)
    shutil.copy(built.path.parent / launcher.FILE, folder)
    write(folder, {**built.manifest, "cubins": cubins})
    return folder


def read(folder: Path) -> dict[str, Any]:
    """A folder's manifest."""
    return json.loads((folder / "manifest.json").read_text())


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace a folder's manifest."""
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_nothing_is_written_outside(folders: list[Path], tmp_path: Path) -> None:
    manifest = read(folders[0])
    shutil.copy(folders[0] / manifest["cubins"][0]["file"], tmp_path / "outside")
    manifest["cubins"][0]["file"] = "../outside"
    write(folders[0], manifest)
    (tmp_path / "outside").rename(folders[0].parent / "outside")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((BuildError, RuntimeError), match=r"file must lie in the folder, was '\.\./outside'"):
        assemble(folders, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_assembled_folders_are_those_of_one_build(built: BuildResult, folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "sm_75").mkdir(parents=True)
    (out / "sm_75" / "stray.cubin").write_bytes(b"of an earlier build")
    result = assemble(folders, out)
    assert result.path == out / "manifest.json"
    assert result.manifest == read(out)
    expected = [entry for entry in built.manifest["cubins"] if entry["architecture"] in ("sm_89", "sm_90a")]
    assert result.manifest == {**built.manifest, "cubins": expected}
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {"manifest.json", launcher.FILE, *(entry["file"] for entry in expected)}
    for name in files - {"manifest.json"}:
        assert (out / name).read_bytes() == (built.path.parent / name).read_bytes()
    assert result.compiled <= 1


def test_a_set_that_two_folders_have_is_taken_once(folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "again")
    expected = assemble(folders, tmp_path / "out").manifest
    assert assemble([*folders, tmp_path / "again"], tmp_path / "other").manifest == expected


def damage(folder: Path) -> None:
    """Change a file."""
    (folder / read(folder)["cubins"][0]["file"]).write_bytes(b"damaged")


def lose(folder: Path) -> None:
    """Drop a cubin with its entry."""
    manifest = read(folder)
    entry = manifest["cubins"].pop()
    (folder / entry["file"]).unlink()
    write(folder, manifest)


def age(folder: Path) -> None:
    """Make a cubin one of other sources."""
    manifest = read(folder)
    manifest["cubins"][0]["source_digest"] = "0" * 64
    write(folder, manifest)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage, "is not the file that was built"),
        (lose, "lacks cubins that these sources have: sm_90a/"),
        (age, "not of these sources: sm_90a/.*build them again"),
        (shutil.rmtree, "does not hold the cubins of a build"),
    ],
)
def test_spoilt_folders_change_nothing(
    folders: list[Path], tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    out = tmp_path / "out"
    assemble(folders[:1], out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    spoil(folders[1])
    with pytest.raises(BuildError, match=message):
        assemble(folders, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_two_builds_of_a_set_must_agree(folders: list[Path], tmp_path: Path) -> None:
    other = shutil.copytree(folders[0], tmp_path / "other")
    manifest = read(other)
    entry = manifest["cubins"][0]
    (other / entry["file"]).write_bytes(b"of another compiler")
    entry["sha256"] = hashlib.sha256(b"of another compiler").hexdigest()
    write(other, manifest)
    with pytest.raises(
        BuildError, match=r"other/sm_89/.* differs from the sm_89/.* of another folder: build both again"
    ):
        assemble([*folders, other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_launcher_is_for_the_machine_of_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert launcher.machine() == platform.machine()
    library = tmp_path / "libtvm_ffi.so"
    monkeypatch.setenv("FLASHINFER_MSA_TVM_FFI", str(library))
    with pytest.raises(
        BuildError, match=r"libtvm_ffi\.so, which the launcher is linked with, cannot be read: No such file"
    ):
        launcher.machine()
    library.write_bytes(ELF + (40).to_bytes(2, "little"))
    with pytest.raises(BuildError, match=r"libtvm_ffi\.so must be a library for x86_64 or aarch64, and is not"):
        launcher.machine()
    library.write_bytes(ELF + (183).to_bytes(2, "little"))
    assert launcher.machine() == "aarch64"
    assert launcher.wheel_platform("zig 0.15.0, glibc 2.28") == "manylinux_2_28_aarch64"


def test_launcher_is_compiled_for_another_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load_script: Callable[[str], ModuleType]
) -> None:
    pytest.importorskip("ziglang")
    # Stands in for the library in apache-tvm-ffi's wheel for that machine. One symbol is enough to have it linked.
    (tmp_path / "stub.c").write_text("void TVMFFIFunctionCall(void) {}\n")
    library = tmp_path / "libtvm_ffi.so"
    zig = (sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28")
    subprocess.run([*zig, "-shared", "-Wl,-soname,libtvm_ffi.so", "-o", library, tmp_path / "stub.c"], check=True)
    monkeypatch.setenv("FLASHINFER_MSA_TVM_FFI", str(library))
    result = build(tmp_path / "out", [], work_dir=tmp_path / "work")
    binary = (result.path.parent / launcher.FILE).read_bytes()
    check = load_script("check_wheel").check_launcher
    assert list(check(binary, "aarch64")) == []
    assert list(check(binary, "x86_64")) == ["the launcher must be for x86_64, is for EM_AARCH64"]
