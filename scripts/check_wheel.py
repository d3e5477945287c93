#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks wheels: tag, size, the files of the manifest, and that the launcher loads on every system of the tag.

    scripts/check_wheel.py --arch sm_90a WHEEL...

auditwheel checks the same, but it refuses libtvm_ffi.so, which comes from the package apache-tvm-ffi.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from elftools.elf.elffile import ELFFile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashinfer_msa.aot import launcher
from flashinfer_msa.aot.matrix import ARCHITECTURES, units
from flashinfer_msa.aot.render import launcher_digest, source_digest
from flashinfer_msa.manifest import SCHEMA

LIMIT_BYTES = 10 * 2**20
DATA = "flashinfer_msa/data/"
LIBRARIES = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-aarch64.so.1"}
"""Libraries of glibc that a launcher may need besides tvm-ffi's library."""
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}


def check(wheel: Path, architectures: Iterable[str]) -> list[str]:
    """Return the problems of a wheel that must have the cubins of ``architectures`` and no others."""
    with zipfile.ZipFile(wheel) as archive:
        problems = [*_check_archive(wheel, archive), *_check_manifest(archive, list(architectures))]
        if DATA + launcher.FILE in archive.namelist():
            machine = re.sub(r".*-(manylinux_\d+_\d+|linux)_", "", wheel.stem)
            problems += check_launcher(archive.read(DATA + launcher.FILE), machine)
    return problems


def _check_archive(wheel: Path, archive: zipfile.ZipFile) -> Iterator[str]:
    """Check tag and size."""
    tag = "-".join(wheel.stem.split("-")[2:])
    allowed = [f"py3-none-manylinux_{launcher.GLIBC[0]}_{launcher.GLIBC[1]}_{machine}" for machine in MACHINES]
    if tag not in allowed:
        yield f"the tag must be {' or '.join(allowed)}, is {tag}"
    (described,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
    tags = re.findall(r"^Tag: (.*)$", archive.read(described).decode(), re.MULTILINE)
    if tags != [tag]:
        yield f"{described} has tags {tags}, its name {tag}"
    size = wheel.stat().st_size
    if size >= LIMIT_BYTES:
        yield f"must have fewer than {LIMIT_BYTES} bytes, has {size}"


def _check_manifest(archive: zipfile.ZipFile, architectures: list[str]) -> Iterator[str]:
    """Check that the files are the manifest's, of this tree's sources, and complete for the architectures."""
    manifest = json.loads(archive.read(f"{DATA}manifest.json"))
    if manifest["schema"] != SCHEMA:
        yield f"the manifest must have schema {SCHEMA}, has {manifest['schema']}"
        return
    here = {name.removeprefix(DATA) for name in archive.namelist() if name.startswith(DATA)}
    entries = {entry["file"]: entry for entry in (manifest["launcher"], *manifest["cubins"])}
    for name in sorted(here ^ {"manifest.json", *entries}):
        yield f"{name} is only in {'the archive' if name in here else 'the manifest'}"
    for name in sorted(here & entries.keys()):
        if hashlib.sha256(archive.read(DATA + name)).hexdigest() != entries[name]["sha256"]:
            yield f"{name} is not the file that the manifest describes"
    if manifest["launcher"]["source_digest"] != launcher_digest():
        yield "the launcher is of other sources"
    wanted = {
        f"{name}/cuda{major}/{unit.name}.cubin": source_digest(unit)
        for name in architectures
        for major in ARCHITECTURES[name].cuda
        for unit in units([name])
    }
    found = {entry["file"]: entry["source_digest"] for entry in manifest["cubins"]}
    folders = {str(Path(name).parent) for name in found}
    # A completely missing set is named once.
    missing = {
        name if (folder := str(Path(name).parent)) in folders else folder for name in wanted.keys() - found.keys()
    }
    for name in sorted(missing):
        yield f"{name} is missing"
    for name in sorted(found.keys() - wanted.keys()):
        yield f"{name} is of no architecture of the wheel"
    for name in sorted(wanted.keys() & found.keys()):
        if wanted[name] != found[name]:
            yield f"{name} is of other sources"


def check_launcher(binary: bytes, machine: str) -> Iterator[str]:
    """Yield what would keep a launcher from loading beside tvm-ffi on any ``machine`` with the tag's glibc."""
    elf = ELFFile(io.BytesIO(binary))
    if elf["e_machine"] != MACHINES.get(machine):
        yield f"the launcher must be for {machine}, is for {elf['e_machine']}"
    dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
    needed = {tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"}
    if stray := sorted(needed - LIBRARIES - {"libtvm_ffi.so"}):
        yield f"the launcher needs {', '.join(stray)}"
    if "libtvm_ffi.so" not in needed:
        yield "the launcher does not need libtvm_ffi.so"
    for tag in dynamic:
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            yield f"the launcher has a library search path: {getattr(tag, tag.entry.d_tag[3:].lower())}"
    yield from _check_symbols(elf)


def _check_symbols(elf: ELFFile) -> Iterator[str]:
    versions = {}
    requirements = elf.get_section_by_name(".gnu.version_r")
    for _, libraries in requirements.iter_versions() if requirements else ():
        versions.update({library["vna_other"]: library.name for library in libraries})
    for version in sorted(versions.values()):
        number = re.fullmatch(r"GLIBC_([\d.]+)", version)
        if not number or tuple(map(int, number[1].split("."))) > launcher.GLIBC:
            yield f"the launcher needs {version}, must need none newer than GLIBC_{'.'.join(map(str, launcher.GLIBC))}"
    indices = elf.get_section_by_name(".gnu.version")
    for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        is_undefined = symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        has_version = indices is not None and indices.get_symbol(index)["ndx"] in versions
        if is_undefined and not has_version and not symbol.name.startswith("TVMFFI"):
            yield f"the launcher needs {symbol.name}, which is neither glibc's nor of tvm-ffi's C interface"


def summary(wheel: Path) -> dict[str, Any]:
    """Return a wheel's size, its launcher's compiler, and the bytes of cubins by architecture and toolkit."""
    with zipfile.ZipFile(wheel) as archive:
        manifest = json.loads(archive.read(f"{DATA}manifest.json"))
    sets: dict[str, int] = {}
    for entry in manifest["cubins"]:
        name = f"{entry['architecture']}, {entry['toolkit']}"
        sets[name] = sets.get(name, 0) + entry["bytes"]
    return {"wheel": wheel.name, "bytes": wheel.stat().st_size, "launcher": manifest["launcher"]["compiler"], **sets}


@click.command()
@click.argument("wheels", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option(
    "--arch",
    "architectures",
    type=click.Choice(list(ARCHITECTURES)),
    multiple=True,
    help="An architecture that the wheels carry; repeatable. [default: all]",
)
def main(wheels: Sequence[Path], architectures: Sequence[str]) -> None:
    """Check wheels, and exit with 1 if one has a problem."""
    problems = []
    for wheel in wheels:
        click.echo(json.dumps(summary(wheel), indent=1))
        problems += [f"{wheel.name}: {problem}" for problem in check(wheel, architectures or ARCHITECTURES)]
    if problems:
        raise click.ClickException("\n".join(problems))


if __name__ == "__main__":
    main()
