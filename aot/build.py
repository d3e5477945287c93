# SPDX-License-Identifier: Apache-2.0
"""Compiles the build matrix and the launcher, checks what came out, and writes it with a manifest for the runtime."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ninja

from ..files import replace_file
from ..runtime.manifest import DATA, SCHEMA
from ..runtime.manifest import FILE as MANIFEST
from ..version import __version__
from . import launcher, matrix, ptxas, toolkit
from .matrix import Unit
from .render import PACKAGE, TEMPLATES, launcher_digest, launcher_sources, render, render_constants, source_digest
from .toolkit import BuildError, Toolkit


@dataclass(frozen=True)
class BuildResult:
    """A finished build: the manifest, where it lies, and how many files had to be compiled for it."""

    path: Path
    manifest: dict[str, Any]
    compiled: int


def default_work_dir() -> Path:
    """Return where sources and objects are kept between builds: ``build/aot`` of a checkout, else the user's cache."""
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and os.access(checkout, os.W_OK):
        return checkout / "build" / "aot"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "flashinfer_msa", __version__)


def build(
    out_dir: Path | None = None,
    architectures: Iterable[str] | None = None,
    *,
    jobs: int | None = None,
    progress: Callable[[str], None] | None = None,
    work_dir: Path | None = None,
    templates: Path = TEMPLATES,
) -> BuildResult:
    """Build the launcher and the cubins of ``architectures`` into ``out_dir``, compiling only what has changed.

    ``architectures`` defaults to ``toolkit.selected_architectures()`` and ``out_dir`` to the package's own data folder.
    Cubins of other architectures that are already there stay in the manifest while they still match their sources.
    ``progress`` is called with a line for each file compiled. Nothing in ``out_dir`` changes when a build fails, which
    is always a ``BuildError``: no toolkit, a compiler's error, a kernel that spills, or one that is missing.
    """
    out_dir = out_dir or DATA
    work_dir = work_dir or default_work_dir()
    units = matrix.units(toolkit.selected_architectures() if architectures is None else architectures)
    found = toolkit.find()
    toolkits = {unit.architecture.name: toolkit.choose(unit.architecture, found) for unit in units}
    compiler = launcher.find_compiler()
    with _locked(work_dir):
        for unit in units:
            _write(work_dir / f"{_stem(unit)}.cu", render(unit, templates).encode())
        _write(work_dir / launcher.GENERATED / "constants.h", render_constants(templates).encode())
        environment = _write_ninja(work_dir, units, toolkits, compiler, templates)
        compiled = _run_ninja(work_dir, environment, jobs, progress or (lambda line: None))

        files: dict[str, bytes] = {}
        cubins = []
        for unit in units:
            cubin = (work_dir / f"{_stem(unit)}.cubin").read_bytes()
            used = ptxas.check(unit, (work_dir / f"{_stem(unit)}.log").read_text(), cubin)
            files[f"{_stem(unit)}.cubin"] = cubin
            cubins.append(_entry(unit, cubin, used, toolkits[unit.architecture.name], templates))
        binary = (work_dir / launcher.FILE).read_bytes()
        launcher.check(binary, compiler)
        files[launcher.FILE] = binary
        cubins += _still_current(out_dir, set(toolkits), templates)

        manifest = {
            "schema": SCHEMA,
            "version": __version__,
            "launcher": {
                "file": launcher.FILE,
                "sha256": _sha256(binary),
                "source_digest": launcher_digest(templates),
                "compiler": compiler.name,
            },
            "cubins": sorted(cubins, key=lambda entry: (entry["capability"], entry["file"])),
        }
        for name, content in files.items():
            _write(out_dir / name, content)
        _write(out_dir / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        _remove_strays(out_dir, manifest)
    return BuildResult(out_dir / MANIFEST, manifest, compiled)


def _stem(unit: Unit) -> str:
    return f"{unit.architecture.name}/{unit.name}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Replace ``path`` at once, in a folder that is made for it, and leave it alone where it is the same."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


@contextmanager
def _locked(work_dir: Path) -> Iterator[None]:
    """Keep builds that share a work folder from running at the same time."""
    work_dir.mkdir(parents=True, exist_ok=True)
    with open(work_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_ninja(
    work_dir: Path,
    units: list[Unit],
    toolkits: dict[str, Toolkit],
    compiler: launcher.Compiler,
    templates: Path,
) -> dict[str, str]:
    """Write ``build.ninja`` and return the environment that it runs in.

    Commands name compilers by environment variable, and every output depends on a file with the compiler's version.
    So outputs are compiled again when a compiler changes, but not when the same one lies elsewhere, as in the
    short-lived environments that package installers build in. Paths are relative, so that none reaches a cubin.
    """
    environment = {"BUILD_LAUNCHER": shlex.join(launcher.command(compiler, launcher.FILE, templates))}
    _write(work_dir / "launcher.txt", launcher.identity(compiler).encode())
    with open(work_dir / "build.ninja", "w") as file:
        writer = ninja.Writer(file, width=120)
        compile_cubin = '"$$$nvcc" $flags -Xptxas -v,-warn-spills $in -o $out > $log 2>&1 || { cat $log; exit 1; }'
        writer.rule("cubin", compile_cubin, description="$out")
        writer.rule("launcher", 'eval "$$BUILD_LAUNCHER"', description="$out")
        for name, chosen in toolkits.items():
            environment[f"NVCC_{name}"] = str(chosen.nvcc)
            _write(work_dir / name / "toolkit.txt", f"{chosen.build}\n".encode())
        for unit in units:
            name = unit.architecture.name
            log = f"{_stem(unit)}.log"
            writer.build(
                f"{_stem(unit)}.cubin",
                "cubin",
                f"{_stem(unit)}.cu",
                implicit=f"{name}/toolkit.txt",
                implicit_outputs=log,
                variables={"nvcc": f"NVCC_{name}", "flags": list(toolkit.compile_flags(unit.architecture)), "log": log},
            )
        # The command line is in the environment, where ninja sees no change: the file that makes it stands for it.
        sources = [*launcher_sources(templates), Path(launcher.__file__).resolve()]
        implicit = [ninja.ninja_syntax.escape_path(str(path)) for path in sources]
        implicit += ["launcher.txt", f"{launcher.GENERATED}/constants.h"]
        writer.build(launcher.FILE, "launcher", implicit=implicit)
    return environment


def _run_ninja(work_dir: Path, environment: dict[str, str], jobs: int | None, progress: Callable[[str], None]) -> int:
    """Run ninja and return how many files it has made."""
    command = [os.path.join(ninja.BIN_DIR, "ninja"), "-C", str(work_dir), *(["-j", str(jobs)] if jobs else [])]
    environment = {**os.environ, **environment, "NINJA_STATUS": "[%f/%t] "}
    compiled = 0
    tail: deque[str] = deque(maxlen=40)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line)
            if re.match(r"\[\d+/\d+\] ", line):
                compiled += 1
                progress(line.rstrip())
    if process.returncode:
        raise BuildError("compilation failed:\n" + "".join(tail))
    return compiled


def _entry(
    unit: Unit, cubin: bytes, used: dict[str, ptxas.Resources], chosen: Toolkit, templates: Path
) -> dict[str, Any]:
    """Return the manifest's entry of one cubin."""
    return {
        "architecture": unit.architecture.name,
        "capability": list(unit.architecture.capability),
        "layout": unit.layout.name if unit.layout else None,
        "file": f"{_stem(unit)}.cubin",
        "sha256": _sha256(cubin),
        "bytes": len(cubin),
        "toolkit": toolkit.dotted(chosen.version),
        "source_digest": source_digest(unit, templates),
        "tested_on": unit.architecture.tested_on,
        "kernels": [{**asdict(kernel), **asdict(used[kernel.symbol])} for kernel in unit.kernels],
    }


def _still_current(out_dir: Path, built: set[str], templates: Path) -> list[dict[str, Any]]:
    """Return the entries of an earlier build, of architectures not in ``built``, that still match source and file."""
    try:
        earlier = json.loads((out_dir / MANIFEST).read_text())
    except (OSError, ValueError):
        return []
    if earlier.get("schema") != SCHEMA:
        return []
    others = [unit for unit in matrix.units() if unit.architecture.name not in built]
    digests = {f"{_stem(unit)}.cubin": source_digest(unit, templates) for unit in others}
    return [
        entry
        for entry in earlier["cubins"]
        if digests.get(entry["file"]) == entry["source_digest"]
        and (out_dir / entry["file"]).is_file()
        and _sha256((out_dir / entry["file"]).read_bytes()) == entry["sha256"]
    ]


def _remove_strays(out_dir: Path, manifest: dict[str, Any]) -> None:
    """Delete cubins that the manifest does not name, lest a wheel carries them."""
    named = {out_dir / entry["file"] for entry in manifest["cubins"]}
    for path in out_dir.glob("*/*.cubin"):
        if path not in named:
            path.unlink()
