#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of continuous integration that make a wheel, on any machine.

scripts/ci_matrix.py --list                           prints the matrix of architectures as JSON
scripts/ci_matrix.py --requirements --arch sm_90a     prints the packages that the next line needs
scripts/ci_matrix.py --arch sm_90a --arch sm_89       compiles their cubins into build/ci, twice, and compares
scripts/ci_matrix.py --assemble                       makes dist/ from build/ci: source archive and checked wheels
scripts/ci_matrix.py --assemble FOLDER... --test      does so from some folders, and tests the wheel
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashinfer_msa.aot.matrix import ARCHITECTURES
from flashinfer_msa.version import __version__

CUBINS = ROOT / "build" / "ci"
DIST = ROOT / "dist"
MACHINES = ("x86_64", "aarch64")


def requirements(architectures: Sequence[str]) -> list[str]:
    """Return the requirements for compiling the cubins of ``architectures`` here."""
    from flashinfer_msa.aot.backend import build_requirements

    os.environ["FLASHINFER_MSA_ARCHITECTURES"] = ",".join(architectures)
    return build_requirements()


def compile_cubins(architecture: str, out_dir: Path) -> None:
    """Build the cubins of one architecture into ``out_dir``, and again from scratch. Both must be equal."""
    from flashinfer_msa.aot.build import build

    result = build(out_dir, [architecture], progress=click.echo)
    majors = {entry["driver"][0] for entry in result.manifest["cubins"]}
    if missing := sorted(set(ARCHITECTURES[architecture].cuda) - majors):
        raise click.ClickException(
            f"{architecture} needs a compiler of CUDA {' and '.join(map(str, missing))}: install what "
            f"scripts/ci_matrix.py --requirements --arch {architecture} prints"
        )
    with tempfile.TemporaryDirectory() as folder, _changed_environment():
        build(Path(folder, "out"), [architecture], work_dir=Path(folder, "work"))
        if different := _differences(out_dir, Path(folder, "out")):
            raise click.ClickException(f"two builds of {architecture} differ: {', '.join(different)}")
    size = sum(entry["bytes"] for entry in result.manifest["cubins"])
    click.echo(f"{architecture}: {len(result.manifest['cubins'])} cubins, {size} bytes, the same from two builds")


def _differences(left: Path, right: Path) -> list[str]:
    """Return the files that only one of two folders has, or whose bytes differ."""
    files = [{str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} for root in (left, right)]
    return sorted(
        name
        for name in files[0] | files[1]
        if name not in files[0] & files[1] or (left / name).read_bytes() != (right / name).read_bytes()
    )


@contextlib.contextmanager
def _changed_environment() -> Iterator[None]:
    """Change what must not affect a build's output: the size of the environment, and the umask."""
    os.environ["PADDING"] = "x" * 4321
    umask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(umask)
        del os.environ["PADDING"]


def make_wheel(folders: Sequence[Path], machine: str) -> Path:
    """Build the source archive and, twice from it, the wheel with the cubins of ``folders``. Both must be equal."""
    DIST.mkdir(exist_ok=True)
    _run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    archive = DIST / f"flashinfer_msa-{__version__}.tar.gz"
    variables = {"FLASHINFER_MSA_PREBUILT": os.pathsep.join(str(folder.resolve()) for folder in folders)}
    with tempfile.TemporaryDirectory() as folder:
        if machine != platform.machine():
            variables["FLASHINFER_MSA_TVM_FFI"] = str(_foreign_tvm_ffi(machine, Path(folder)))
        first = _wheel(archive, Path(folder, "first"), variables)
        with _changed_environment():
            second = _wheel(archive, Path(folder, "second"), variables)
        if first.read_bytes() != second.read_bytes():
            for wheel in (first, second):
                shutil.unpack_archive(wheel, wheel.parent / "unpacked", "zip")
            different = _differences(first.parent / "unpacked", second.parent / "unpacked")
            what = ", ".join(different) or "order, times or permissions of the files"
            raise click.ClickException(f"two builds of {first.name} differ: {what}")
        return Path(shutil.copy(first, DIST))


def _wheel(archive: Path, out_dir: Path, variables: Mapping[str, str]) -> Path:
    # pip installs the build tools into a new environment and unpacks the sources into a new folder.
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", out_dir, archive, **variables)
    (wheel,) = out_dir.glob("*.whl")
    return wheel


def _foreign_tvm_ffi(machine: str, folder: Path) -> Path:
    """Fetch apache-tvm-ffi for another machine type; return the library to link a launcher with."""
    from setuptools.compat.py310 import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = (line for line in project["dependencies"] if line.startswith("apache-tvm-ffi"))
    options = ("-q", "--no-deps", "--only-binary", ":all:", "--platform", f"manylinux_2_28_{machine}", "--dest", folder)
    _run(sys.executable, "-m", "pip", "download", *options, requirement)
    (wheel,) = folder.glob("apache_tvm_ffi-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("tvm_ffi/lib/libtvm_ffi.so", folder))


def _run(*command: str | Path, **variables: str) -> None:
    click.echo(f"$ {' '.join(map(str, command))}")
    if subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode:
        raise click.ClickException(f"failed: {' '.join(map(str, command))}")


def architectures_of(folders: Sequence[Path]) -> list[str]:
    """Return the architectures whose cubins are in ``folders``."""
    from flashinfer_msa.manifest import read_manifest

    names: list[str] = []
    for folder in folders:
        try:
            names += read_manifest(folder).architectures
        except FileNotFoundError:
            raise click.ClickException(f"{folder} has no cubins: compile them there with --arch") from None
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
    return list(dict.fromkeys(names))


@click.command()
@click.argument("folders", type=click.Path(exists=True, file_okay=False, path_type=Path), nargs=-1)
@click.option("--list", "is_list", is_flag=True, help="Print the architectures as JSON, for a workflow's matrix.")
@click.option(
    "--requirements", "is_requirements", is_flag=True, help="Print the requirements for compiling, one per line."
)
@click.option(
    "--arch",
    "architectures",
    type=click.Choice(list(ARCHITECTURES)),
    multiple=True,
    help="Compile an architecture's cubins into build/ci; repeatable.",
)
@click.option("--assemble", "is_assemble", is_flag=True, help="Make the wheel from FOLDERS. [default: all of build/ci]")
@click.option(
    "--machine",
    "machines",
    type=click.Choice(MACHINES),
    multiple=True,
    default=[platform.machine()],
    help="Machine type of the wheel; repeatable. [default: this machine's]",
)
@click.option("--test", "is_test", is_flag=True, help="Run the tests on this machine's wheel in dist.")
def main(
    folders: Sequence[Path],
    is_list: bool,
    is_requirements: bool,
    architectures: Sequence[str],
    is_assemble: bool,
    machines: Sequence[str],
    is_test: bool,
) -> None:
    """Run steps of continuous integration, in the order of the options."""
    if not (is_list or is_requirements or architectures or is_assemble or is_test):
        raise click.UsageError("one of the options must say what to do, see --help")
    if folders and not is_assemble:
        raise click.UsageError("FOLDERS need --assemble")
    if is_list:
        click.echo(json.dumps(list(ARCHITECTURES)))
        return
    if is_requirements:
        click.echo("\n".join(requirements(architectures)))
        return
    for architecture in architectures:
        compile_cubins(architecture, CUBINS / architecture)
    if is_assemble:
        try:
            from check_wheel import check, summary
        except ModuleNotFoundError as error:
            raise click.ClickException(f"checking a wheel needs {error.name}. Run: pip install pyelftools") from error

        folders = folders or [CUBINS / name for name in ARCHITECTURES]
        names = architectures_of(folders)
        for machine in machines:
            wheel = make_wheel(folders, machine)
            click.echo(json.dumps(summary(wheel), indent=1))
            if problems := check(wheel, names):
                wheel.unlink()
                raise click.ClickException(f"{wheel.name}: " + "\n".join(problems))
    if is_test:
        wheels = list(DIST.glob(f"flashinfer_msa-{__version__}-*_{platform.machine()}.whl"))
        if not wheels:
            raise click.ClickException(f"{DIST} has no wheel for this machine: make it with --assemble")
        _run("bash", ROOT / "scripts" / "test_wheel.sh", *wheels)


if __name__ == "__main__":
    main()
