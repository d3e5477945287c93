# SPDX-License-Identifier: Apache-2.0
"""Compiles the native launcher: with zig against an old glibc if it is installed, else with the system compiler."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .render import NATIVE, PACKAGE
from .toolkit import BuildError, dotted

FILE = "libflashinfer_msa.so"
GLIBC = (2, 28)
"""The oldest glibc that loads a launcher that zig compiled."""

GENERATED = Path("include")
"""Folder of rendered headers, below the work folder."""
_MACHINES = {62: "x86_64", 183: "aarch64"}
"""Names of machines, by their number in an ELF header."""

_FLAGS = (
    "-O2",
    "-s",
    "-shared",
    "-fPIC",
    "-std=c++17",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its name and version for the manifest, and its command line."""

    name: str
    command: tuple[str, ...]


def find_compiler() -> Compiler:
    """Return zig if its package is installed, else ``$CXX``, ``c++`` or ``g++``."""
    if importlib.util.find_spec("ziglang"):
        zig = (sys.executable, "-m", "ziglang")
        version = subprocess.run([*zig, "version"], capture_output=True, text=True, check=True).stdout.strip()
        glibc = dotted(GLIBC)
        target = f"{machine()}-linux-gnu.{glibc}"
        return Compiler(f"zig {version}, glibc {glibc}", (*zig, "c++", "-target", target, "-nostdlib++"))
    for name in (os.environ.get("CXX"), "c++", "g++"):
        command = shlex.split(name or "")
        if command and shutil.which(command[0]):
            text = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
            return Compiler(text.splitlines()[0], (*command, "-Wl,--as-needed"))
    raise BuildError("the launcher needs a C++ compiler: install one, or `pip install ziglang`")


def _tvm_ffi() -> Path:
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("the launcher needs the headers of apache-tvm-ffi: `pip install apache-tvm-ffi`")
    return Path(spec.submodule_search_locations[0])


def _library() -> Path:
    """Return the tvm-ffi library to link with: the installed one, or that of another machine to build for."""
    named = os.environ.get("FLASHINFER_MSA_TVM_FFI")
    return Path(named) if named else _tvm_ffi() / "lib" / "libtvm_ffi.so"


def machine() -> str:
    """Return the machine to build the launcher for, such as ``x86_64``. The tvm-ffi library decides it."""
    library = _library()
    try:
        with open(library, "rb") as file:
            header = file.read(20)
    except OSError as error:
        raise BuildError(f"{library}, which the launcher is linked with, cannot be read: {error.strerror}") from error
    number = int.from_bytes(header[18:20], "little")
    if header[:4] != b"\x7fELF" or number not in _MACHINES:
        raise BuildError(f"{library} must be a library for {' or '.join(_MACHINES.values())}, and is not")
    return _MACHINES[number]


def command(compiler: Compiler, output: str, work_dir: Path) -> list[str]:
    """Return the command line that builds the launcher into ``output`` with the rendered headers in ``work_dir``."""
    return [
        *compiler.command,
        *_FLAGS,
        f"-ffile-prefix-map={PACKAGE}=.",
        f"-I{_tvm_ffi() / 'include'}",
        f"-I{NATIVE}",
        f"-I{work_dir.resolve() / GENERATED}",  # zig finds what it has compiled by this line, whatever the folder
        *map(str, sorted(NATIVE.glob("*.cc"))),
        f"-L{_library().resolve().parent}",
        "-ltvm_ffi",
        "-ldl",
        "-lpthread",
        "-o",
        output,
    ]


def identity(compiler: Compiler) -> str:
    """Return a text of everything that decides the launcher's bytes, except its sources and this file."""
    return f"{compiler.name}\n{machine()}\ntvm-ffi {importlib.metadata.version('apache-tvm-ffi')}\n"


def check(binary: bytes, compiler: Compiler) -> None:
    """Raise ``BuildError`` if a launcher that zig compiled needs a newer glibc than the wheel's tag says."""
    needed = {(int(found[1]), int(found[2])) for found in re.finditer(rb"GLIBC_(\d+)\.(\d+)", binary)}
    if _is_zig(compiler.name) and max(needed, default=GLIBC) > GLIBC:
        raise BuildError(f"the launcher needs glibc {dotted(max(needed))}, must load on {dotted(GLIBC)}")


def wheel_platform(compiler_name: str) -> str:
    """Return the platform tag of a wheel. ``compiler_name`` is the launcher's compiler, as in the manifest."""
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}" if _is_zig(compiler_name) else "linux"
    return f"{tag}_{machine()}"


def _is_zig(compiler_name: str) -> bool:
    return compiler_name.startswith("zig ")
