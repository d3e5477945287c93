# SPDX-License-Identifier: Apache-2.0
"""Finds CUDA compilers, and those that an architecture is compiled with."""

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
"""Packages that together are the nvcc that the cubins for drivers of CUDA 13 are made with."""
NVRTC_PACKAGES = {12: "nvidia-cuda-nvrtc-cu12==12.9.*", 13: "nvidia-cuda-nvrtc==13.5.*"}
"""Run-time compilers by the major version of CUDA: the newest of 12, and one that knows every architecture."""


class BuildError(RuntimeError):
    """A build that cannot go on, with what to do about it."""


@dataclass(frozen=True)
class Toolkit:
    """A compiler: ``nvcc`` or the library of NVRTC, and its version, such as ``(13, 0)``.

    ``build`` is the full version, such as ``13.0.88``.
    """

    path: Path
    version: tuple[int, int]
    build: str
    is_nvrtc: bool = False

    @property
    def name(self) -> str:
        """The compiler in words, such as ``nvcc 13.0.88``."""
        return f"{'NVRTC' if self.is_nvrtc else 'nvcc'} {self.build}"

    @property
    def driver(self) -> tuple[int, int]:
        """The oldest CUDA version that a driver must support to load what this compiler makes.

        The format of cubins changes with the major version, and drivers read older ones.
        """
        return self.version[0], 0


def dotted(version: tuple[int, int]) -> str:
    """Return a version as text, such as ``13.0``."""
    return ".".join(map(str, version))


def compile_flags(architecture: Architecture) -> tuple[str, ...]:
    """Return the flags that decide the code of a cubin."""
    number = architecture.name.removeprefix("sm_")
    return ("-cubin", "-std=c++17", "-O3", f"-gencode=arch=compute_{number},code=sm_{number}")


def nvrtc_flags(architecture: Architecture) -> tuple[str, ...]:
    """Return the same for NVRTC, and that it reports what kernels use."""
    return (f"-arch={architecture.name}", "-std=c++17", "--ptxas-options=-v")


def selected_architectures() -> list[str]:
    """Return the architectures that ``FLASHINFER_MSA_ARCHITECTURES`` (a comma list) names, all where it is unset."""
    value = os.environ.get("FLASHINFER_MSA_ARCHITECTURES", "")
    names = [name for name in value.replace(" ", "").split(",") if name]
    if any(name not in ARCHITECTURES for name in names):
        raise BuildError(f"FLASHINFER_MSA_ARCHITECTURES must name some of {', '.join(ARCHITECTURES)}, was {value!r}")
    return names or list(ARCHITECTURES)


PROBE_SECONDS = 30.0
"""What a compiler may take to tell its version, of a network drive that has to be woken too."""
_RELEASE = re.compile(rb"release (\d+)\.(\d+), V([\d.]+)")


@lru_cache
def probe(path: Path) -> Toolkit | None:
    """Return the toolkit of an ``nvcc`` or an NVRTC library, or None where it does not tell its version."""
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
    """Compilers that ``FLASHINFER_MSA_NVCC`` names: one or several, separated as in PATH."""
    parts = os.environ.get("FLASHINFER_MSA_NVCC", "").split(os.pathsep)
    # Compilers run in the work folder. A name without a folder is one of PATH.
    return [Path(shutil.which(part) or part).absolute() for part in parts if part]


def _candidates() -> Iterator[Path]:
    flashinfers = os.environ.get("FLASHINFER_NVCC")
    homes = [Path(home).absolute() for variable in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(variable))]
    yield from _named()
    if flashinfers:
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
        # Where the packages of CUDA 13 and later have it, and those of CUDA 12.
        for folder in ("cu[0-9]*/lib", "cuda_nvrtc/lib"):
            yield from sorted(Path(entry, "nvidia").glob(f"{folder}/libnvrtc.so.[0-9][0-9]"), reverse=True)


def find() -> list[Toolkit]:
    """Return every compiler of this machine, in order of preference.

    Those that ``FLASHINFER_MSA_NVCC`` names come first, then FlashInfer's ``FLASHINFER_NVCC``, then nvcc from
    ``CUDA_HOME``, ``CUDA_PATH``, ``PATH`` and the Python packages, then NVRTC from the two homes and the packages. One
    that ``FLASHINFER_MSA_NVCC`` names and does not work is a ``BuildError``; others are passed over.
    """
    for path in _named():
        if probe(path) is None:
            raise BuildError(f"FLASHINFER_MSA_NVCC must name working nvccs or NVRTC libraries, was {str(path)!r}")
    toolkits = (probe(path) for path in dict.fromkeys(_candidates()))
    return [toolkit for toolkit in toolkits if toolkit]


def choose(architecture: Architecture, toolkits: Iterable[Toolkit], major: int | None = None) -> Toolkit | None:
    """Return the first of ``toolkits`` that knows ``architecture``, of a ``major`` version where one is given."""
    known = (toolkit for toolkit in toolkits if toolkit.version >= architecture.toolkit)
    return next((toolkit for toolkit in known if major in (None, toolkit.version[0])), None)


def choose_all(architecture: Architecture, toolkits: Sequence[Toolkit]) -> list[Toolkit]:
    """Return the compiler of each set of cubins that ``architecture`` gets, one for each of its major versions.

    Where none of those is here, one of any version that knows it. ``BuildError`` where none does.
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
