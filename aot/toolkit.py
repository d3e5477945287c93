# SPDX-License-Identifier: Apache-2.0
"""Finds CUDA compilers, and chooses those for an architecture."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .matrix import ARCHITECTURES, Architecture

NVCC_VERSION = (13, 0)
NVCC_PACKAGES = tuple(
    f"{name}=={NVCC_VERSION[0]}.{NVCC_VERSION[1]}.*"
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "nvidia-cuda-crt",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    )
)
"""The packages of the nvcc that compiles the cubins for CUDA 13 drivers."""
NVRTC_PACKAGES = {12: "nvidia-cuda-nvrtc-cu12==12.9.*", 13: "nvidia-cuda-nvrtc==13.5.*"}
"""Packages of NVRTC by major version of CUDA: the newest of 12, and one of 13 that knows every architecture."""


class BuildError(RuntimeError):
    """A build that cannot continue. The message says what to do."""


@dataclass(frozen=True)
class Toolkit:
    """A compiler. ``path`` is an nvcc or a library of NVRTC.

    ``version`` is such as ``(13, 0)``, and ``build`` the full version, such as ``13.0.88``.
    """

    path: Path
    version: tuple[int, int]
    build: str
    is_nvrtc: bool = False

    @property
    def name(self) -> str:
        """Kind and full version, such as ``nvcc 13.0.88``."""
        return f"{'NVRTC' if self.is_nvrtc else 'nvcc'} {self.build}"

    @property
    def driver(self) -> tuple[int, int]:
        """The oldest CUDA version of a driver that loads this compiler's cubins.

        The format of cubins changes with the major version. Drivers also load older formats.
        """
        return self.version[0], 0


def dotted(version: tuple[int, int]) -> str:
    """Return a version as text, such as ``13.0``."""
    return ".".join(map(str, version))


def compile_flags(architecture: Architecture) -> tuple[str, ...]:
    """Return the flags of nvcc that decide the code of a cubin."""
    number = architecture.name.removeprefix("sm_")
    return ("-cubin", "-std=c++17", "-O3", f"-gencode=arch=compute_{number},code=sm_{number}")


def nvrtc_flags(architecture: Architecture) -> tuple[str, ...]:
    """Return the flags of NVRTC that decide the code, and the flag that makes it report the kernels' resources."""
    return (f"-arch={architecture.name}", "-std=c++17", "--ptxas-options=-v")


def selected_architectures() -> list[str]:
    """Return the architectures in ``FLASHINFER_MSA_ARCHITECTURES``, a comma list. Return all if it is not set."""
    value = os.environ.get("FLASHINFER_MSA_ARCHITECTURES", "")
    names = [name for name in value.replace(" ", "").split(",") if name]
    if any(name not in ARCHITECTURES for name in names):
        raise BuildError(f"FLASHINFER_MSA_ARCHITECTURES must name some of {', '.join(ARCHITECTURES)}, was {value!r}")
    return names or list(ARCHITECTURES)


PROBE_SECONDS = 30.0
"""How long a compiler may take to print its version. A network drive may need to wake up first."""
_RELEASE = re.compile(rb"release (\d+)\.(\d+), V([\d.]+)")


@lru_cache
def probe(path: Path) -> Toolkit | None:
    """Return the toolkit of an ``nvcc`` or an NVRTC library, or None if its version cannot be found."""
    is_nvrtc = path.name.startswith("libnvrtc")
    try:
        if is_nvrtc:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                found = _RELEASE.findall(content)
        else:
            said = subprocess.run(
                [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=PROBE_SECONDS
            )
            found = _RELEASE.findall(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if not found:
        return None
    major, minor, build = found[0]
    return Toolkit(path, (int(major), int(minor)), build.decode(), is_nvrtc)


def _named() -> list[Path]:
    """Return the compilers in ``FLASHINFER_MSA_NVCC``, which separates them as PATH does."""
    parts = os.environ.get("FLASHINFER_MSA_NVCC", "").split(os.pathsep)
    # Paths must be absolute, because compilers run in the work folder. A name without a folder is looked up in PATH.
    return [Path(shutil.which(part) or part).absolute() for part in parts if part]


def _candidates() -> Iterator[Path]:
    homes = [Path(value).absolute() for name in ("CUDA_HOME", "CUDA_PATH") if (value := os.environ.get(name))]
    yield from _named()
    if flashinfers := os.environ.get("FLASHINFER_NVCC"):
        yield Path(flashinfers).absolute()
    for home in homes:
        yield home / "bin" / "nvcc"
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    for entry in sys.path:
        yield from sorted(Path(entry, "nvidia").glob("cu*/bin/nvcc"), reverse=True)
    for home in homes:
        yield from sorted((home / "lib64").glob("libnvrtc.so.[0-9][0-9]"))
    for entry in sys.path:
        # The first is the folder of packages of CUDA 13 and later, the second that of CUDA 12.
        for folder in ("cu[0-9]*/lib", "cuda_nvrtc/lib"):
            yield from sorted(Path(entry, "nvidia").glob(f"{folder}/libnvrtc.so.[0-9][0-9]"), reverse=True)


def find() -> list[Toolkit]:
    """Return all compilers of this machine, in order of preference.

    The order is: ``FLASHINFER_MSA_NVCC``; FlashInfer's ``FLASHINFER_NVCC``; nvcc in ``CUDA_HOME``, ``CUDA_PATH``,
    ``PATH`` and Python packages; NVRTC in ``CUDA_HOME``, ``CUDA_PATH`` and Python packages.

    Raises ``BuildError`` if a compiler of ``FLASHINFER_MSA_NVCC`` does not work. Others that do not work are skipped.
    """
    for path in _named():
        if probe(path) is None:
            raise BuildError(f"FLASHINFER_MSA_NVCC must name working nvccs or NVRTC libraries, was {str(path)!r}")
    toolkits = (probe(path) for path in dict.fromkeys(_candidates()))
    return [toolkit for toolkit in toolkits if toolkit]


def choose(architecture: Architecture, toolkits: Iterable[Toolkit], major: int | None = None) -> Toolkit | None:
    """Return the first of ``toolkits`` that knows ``architecture``, and has the ``major`` version if one is given."""
    known = (toolkit for toolkit in toolkits if toolkit.version >= architecture.toolkit)
    return next((toolkit for toolkit in known if major in (None, toolkit.version[0])), None)


def choose_all(architecture: Architecture, toolkits: Sequence[Toolkit]) -> list[Toolkit]:
    """Return the compilers for ``architecture``: one per major version in ``architecture.cuda`` that has one here.

    If none of these versions has one, return one compiler of any version. Raises ``BuildError`` if none knows it.
    """
    chosen = [choose(architecture, toolkits, major) for major in architecture.cuda]
    found = [toolkit for toolkit in chosen if toolkit]
    if not found and (other := choose(architecture, toolkits)):
        found = [other]
    if not found:
        here = ", ".join(f"{toolkit.name} at {toolkit.path}" for toolkit in toolkits) or "none"
        package = NVRTC_PACKAGES[architecture.cuda[0]]
        raise BuildError(
            f"{architecture.name} needs a CUDA compiler of version {dotted(architecture.toolkit)} or newer; found: "
            f"{here}. Install one with `pip install '{package}'`, or set CUDA_HOME or FLASHINFER_MSA_NVCC."
        )
    return found
