# SPDX-License-Identifier: Apache-2.0
"""Compiles the build matrix and the launcher, checks the results, and writes them with a manifest."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ninja

from ..files import replace_file
from ..manifest import DATA, SCHEMA
from ..manifest import FILE as MANIFEST
from ..version import __version__
from . import launcher, matrix, nvrtc, ptxas, toolkit
from .matrix import Architecture, Unit
from .render import PACKAGE, TEMPLATES, launcher_digest, launcher_sources, render, render_headers, source_digest
from .toolkit import BuildError, Toolkit

_log = logging.getLogger("flashinfer_msa")
_SAME_ADDRESSES = (
    sys.executable,
    "-ISc",
    "import ctypes, os, sys; ctypes.CDLL(None).personality(0x0040000); os.execvp(sys.argv[1], sys.argv[1:])",
)
"""Prefix of a command that turns off address randomization for it and its children, if Linux allows that.

ptxas depends on addresses: it schedules the merge kernels in one of several ways. 0x0040000 is ``ADDR_NO_RANDOMIZE``.
"""


@dataclass(frozen=True)
class Target:
    """The ``units`` of one architecture, compiled with one toolkit.

    The cubins go to ``folder``, in the work folder and in the output. An architecture has one folder per major version
    of CUDA.
    """

    architecture: Architecture
    toolkit: Toolkit
    units: tuple[Unit, ...]

    @property
    def folder(self) -> str:
        """Relative path of the cubins."""
        return f"{self.architecture.name}/cuda{self.toolkit.version[0]}"


@dataclass(frozen=True)
class BuildResult:
    """A finished build: the manifest's path and content, and how many files were compiled."""

    path: Path
    manifest: dict[str, Any]
    compiled: int


def default_work_dir() -> Path:
    """Return the folder that keeps sources and objects between builds.

    It is ``build/aot`` of a checkout, and a folder of the user's cache for an installed package.
    """
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
    """Build the launcher and the cubins of ``architectures`` into ``out_dir``. Compile only what has changed.

    ``architectures`` defaults to ``toolkit.selected_architectures()``, and ``out_dir`` to the package's data folder.
    Cubins of other architectures that are already in ``out_dir`` stay in the manifest if they match their sources.
    ``progress`` is called with one line per compiled file.

    Raises ``BuildError``, and changes nothing in ``out_dir``, if there is no compiler, if a file does not compile, or
    if a kernel spills or is missing.
    """
    out_dir = out_dir or DATA
    work_dir = work_dir or default_work_dir()
    found = toolkit.find()
    targets = [
        Target(units[0].architecture, chosen, units)
        for units in _by_architecture(toolkit.selected_architectures() if architectures is None else architectures)
        for chosen in toolkit.choose_all(units[0].architecture, found)
    ]
    compiler = launcher.find_compiler()
    with _locked(work_dir) as lock:
        compiled = _compile(work_dir, lock, targets, compiler, jobs, progress, templates)
        files, cubins = _collect(work_dir, targets, templates)
        binary = (work_dir / launcher.FILE).read_bytes()
        launcher.check(binary, compiler)
        files[launcher.FILE] = binary
        cubins += _still_current(out_dir, {target.architecture.name for target in targets}, templates)
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
        publish(out_dir, files, manifest)
    return BuildResult(out_dir / MANIFEST, manifest, compiled)


def build_cubins(out_dir: Path, architecture: str, chosen: Toolkit, *, work_dir: Path) -> None:
    """Build the cubins of one architecture with one toolkit into ``out_dir``. The manifest has no launcher."""
    units = tuple(matrix.units([architecture]))
    targets = [Target(units[0].architecture, chosen, units)]
    with _locked(work_dir) as lock:
        _compile(work_dir, lock, targets, None, None, None, TEMPLATES)
        files, cubins = _collect(work_dir, targets, TEMPLATES)
        publish(out_dir, files, {"schema": SCHEMA, "version": __version__, "cubins": cubins})


def _by_architecture(names: Iterable[str]) -> list[tuple[Unit, ...]]:
    """Return the units of each architecture, in the order of ``names``."""
    return [tuple(matrix.units([name])) for name in dict.fromkeys(names)]


def _compile(
    work_dir: Path,
    lock: int,
    targets: list[Target],
    compiler: launcher.Compiler | None,
    jobs: int | None,
    progress: Callable[[str], None] | None,
    templates: Path,
) -> int:
    """Compile what has changed, including the launcher if there is a ``compiler``. Return the number of files."""
    for target in targets:
        for unit in target.units:
            _write(work_dir / f"{_source(unit)}.cu", render(unit, templates).encode())
    headers = {launcher.GENERATED / name: text for name, text in render_headers(templates).items()}
    for path, text in headers.items():
        _write(work_dir / path, text.encode())
    environment = _write_ninja(work_dir, targets, compiler, templates, list(headers))
    return _run_ninja(work_dir, lock, environment, jobs, progress or (lambda line: None))


def _collect(work_dir: Path, targets: list[Target], templates: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Check the compiled cubins. Return them by file name, with their entries for the manifest."""
    files: dict[str, bytes] = {}
    entries = []
    for target in targets:
        for unit in target.units:
            stem = f"{target.folder}/{unit.name}"
            cubin = (work_dir / f"{stem}.cubin").read_bytes()
            used = ptxas.check(unit, (work_dir / f"{stem}.log").read_text(), cubin)
            files[f"{stem}.cubin"] = cubin
            entries.append(_entry(unit, f"{stem}.cubin", cubin, used, target.toolkit, templates))
    return files, entries


def publish(out_dir: Path, files: dict[str, bytes], manifest: dict[str, Any]) -> None:
    """Write the files, then the manifest, so that a reader finds every file that the manifest names."""
    for name, content in files.items():
        _write(out_dir / name, content)
    _write(out_dir / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    _remove_strays(out_dir, manifest)


def _source(unit: Unit) -> str:
    return f"{unit.architecture.name}/{unit.name}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Replace ``path`` atomically, and make its folder. Do nothing if the content is the same."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


@contextmanager
def _locked(work_dir: Path) -> Iterator[int]:
    """Let only one build at a time use a work folder. Yield the descriptor of the lock.

    Compilers inherit the descriptor. If a build is killed, the next one waits for the compilers that it left running.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    with open(work_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("waiting for another build in %s, or for compilers that one has left running", work_dir)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _write_ninja(
    work_dir: Path, targets: list[Target], compiler: launcher.Compiler | None, templates: Path, headers: list[Path]
) -> dict[str, str]:
    """Write ``build.ninja``. Return the environment variables that it needs.

    Commands name a compiler by an environment variable, and each output depends on a file with the compiler's version.
    So outputs are compiled again if the compiler changes, but not if only its path changes, as it does in the
    temporary environments of package installers. Paths are relative, so that none gets into a cubin.
    """
    environment = {"BUILD_PYTHON": sys.executable, "BUILD_NVRTC": nvrtc.__file__}
    with open(work_dir / "build.ninja", "w") as file:
        writer_class: Any = ninja.Writer  # its type stubs are wrong: they take the file for a str
        writer = writer_class(file, width=120)
        end = "> $log 2>&1 || { cat $log; exit 1; }"
        writer.rule("nvcc", f'"$$$compiler" $flags -Xptxas -v,-warn-spills $in -o $out {end}', description="$out")
        # NVRTC's output depends on the content of its memory, and the environment is part of that.
        clean = 'env -i ${LD_LIBRARY_PATH:+LD_LIBRARY_PATH="$LD_LIBRARY_PATH"}'.replace("$", "$$")
        program = '"$$BUILD_PYTHON" -I -S "$$BUILD_NVRTC" "$$$compiler"'
        writer.rule("nvrtc", f"{clean} {program} $out $in $flags {end}", description="$out")
        writer.rule("launcher", 'eval "$$BUILD_LAUNCHER"', description="$out")
        for target in targets:
            folder, chosen = target.folder, target.toolkit
            variable = f"COMPILER_{folder.replace('/', '_')}"
            environment[variable] = str(chosen.path)
            _write(work_dir / folder / "toolkit.txt", f"{chosen.name}\n".encode())
            flags = (toolkit.nvrtc_flags if chosen.is_nvrtc else toolkit.compile_flags)(target.architecture)
            for unit in target.units:
                log = f"{folder}/{unit.name}.log"
                writer.build(
                    f"{folder}/{unit.name}.cubin",
                    "nvrtc" if chosen.is_nvrtc else "nvcc",
                    f"{_source(unit)}.cu",
                    implicit=f"{folder}/toolkit.txt",
                    implicit_outputs=log,
                    variables={"compiler": variable, "flags": list(flags), "log": log},
                )
        if compiler:
            environment["BUILD_LAUNCHER"] = shlex.join(launcher.command(compiler, launcher.FILE, work_dir))
            _write(work_dir / "launcher.txt", launcher.identity(compiler).encode())
            # Ninja does not see a changed command line, which is in the environment. launcher.py makes it, so the
            # launcher depends on that file instead.
            sources = [*launcher_sources(templates), Path(launcher.__file__).resolve()]
            implicit = [ninja.ninja_syntax.escape_path(str(path)) for path in sources]
            implicit += ["launcher.txt", *map(str, headers)]
            writer.build(launcher.FILE, "launcher", implicit=implicit)
    return environment


def _run_ninja(
    work_dir: Path, lock: int, environment: dict[str, str], jobs: int | None, progress: Callable[[str], None]
) -> int:
    """Run ninja. Return the number of files that it made."""
    command = [
        *_SAME_ADDRESSES,
        os.path.join(ninja.BIN_DIR, "ninja"),
        "-C",
        str(work_dir),
        *(["-j", str(jobs)] if jobs else []),
    ]
    environment = {**os.environ, **environment, "NINJA_STATUS": "[%f/%t] "}
    compiled = 0
    tail: deque[str] = deque(maxlen=40)
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",  # in this locale, a path may not be valid text
        pass_fds=(lock,),
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
    unit: Unit, file: str, cubin: bytes, used: dict[str, ptxas.Resources], chosen: Toolkit, templates: Path
) -> dict[str, Any]:
    """Return the manifest's entry for one cubin."""
    return {
        "architecture": unit.architecture.name,
        "capability": list(unit.architecture.capability),
        "layout": unit.layout.name if unit.layout else None,
        "file": file,
        "sha256": _sha256(cubin),
        "bytes": len(cubin),
        "toolkit": chosen.name,
        "driver": list(chosen.driver),
        "source_digest": source_digest(unit, templates),
        "tested_on": unit.architecture.tested_on,
        "kernels": [{**asdict(kernel), **asdict(used[kernel.symbol])} for kernel in unit.kernels],
    }


def _still_current(out_dir: Path, built: set[str], templates: Path) -> list[dict[str, Any]]:
    """Return the entries of an earlier build that match their source and file, except those of ``built``."""
    try:
        earlier = json.loads((out_dir / MANIFEST).read_text())
    except (OSError, ValueError):
        return []
    if earlier.get("schema") != SCHEMA:
        return []
    others = [unit for unit in matrix.units() if unit.architecture.name not in built]
    digests = {(unit.architecture.name, unit.name): source_digest(unit, templates) for unit in others}
    return [
        entry
        for entry in earlier["cubins"]
        if digests.get((entry["architecture"], Path(entry["file"]).stem)) == entry["source_digest"]
        and (out_dir / entry["file"]).is_file()
        and _sha256((out_dir / entry["file"]).read_bytes()) == entry["sha256"]
    ]


def _remove_strays(out_dir: Path, manifest: dict[str, Any]) -> None:
    """Delete cubins that the manifest does not name, so that no wheel carries them."""
    named = {out_dir / entry["file"] for entry in manifest["cubins"]}
    for path in (*out_dir.glob("*/*.cubin"), *out_dir.glob("*/*/*.cubin")):
        if path not in named:
            path.unlink()
