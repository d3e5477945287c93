# SPDX-License-Identifier: Apache-2.0
"""Finds CUDA toolkits, and the one that an architecture is compiled with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .matrix import ARCHITECTURES, Architecture

PIP_PACKAGES = tuple(
    f"{name}==13.0.*"
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "nvidia-cuda-crt",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    )
)
"""Packages that together are a toolkit for every architecture of the matrix."""


class BuildError(RuntimeError):
    """A build that cannot go on, with what to do about it."""


@dataclass(frozen=True)
class Toolkit:
    """One ``nvcc`` and its version, such as ``(13, 0)``; ``build`` is the full version, such as ``13.0.88``."""

    nvcc: Path
    version: tuple[int, int]
    build: str


def dotted(version: tuple[int, int]) -> str:
    """Return a version as text, such as ``13.0``."""
    return ".".join(map(str, version))


def compile_flags(architecture: Architecture) -> tuple[str, ...]:
    """Return the flags that decide the code of a cubin."""
    number = architecture.name.removeprefix("sm_")
    return ("-cubin", "-std=c++17", "-O3", f"-gencode=arch=compute_{number},code=sm_{number}")


def selected_architectures() -> list[str]:
    """Return the architectures that ``FLASHINFER_MSA_ARCHITECTURES`` (a comma list) names, all where it is unset."""
    value = os.environ.get("FLASHINFER_MSA_ARCHITECTURES", "")
    names = [name for name in value.replace(" ", "").split(",") if name]
    if any(name not in ARCHITECTURES for name in names):
        raise BuildError(f"FLASHINFER_MSA_ARCHITECTURES must name some of {', '.join(ARCHITECTURES)}, was {value!r}")
    return names or list(ARCHITECTURES)


@lru_cache
def probe(nvcc: Path) -> Toolkit | None:
    """Return the toolkit of ``nvcc``, or None where it does not run or does not tell its version."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+), V([\d.]+)", text)
    return Toolkit(nvcc, (int(found[1]), int(found[2])), found[3]) if found else None


def _named() -> list[Path]:
    """Compilers that ``FLASHINFER_MSA_NVCC`` names: one or several, separated as in PATH."""
    return [Path(part) for part in os.environ.get("FLASHINFER_MSA_NVCC", "").split(os.pathsep) if part]


def _candidates() -> Iterator[Path]:
    yield from _named()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home, "bin", "nvcc")
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    for entry in sys.path:
        yield from sorted(Path(entry, "nvidia").glob("cu*/bin/nvcc"), reverse=True)


def find() -> list[Toolkit]:
    """Return every toolkit of this machine, in order of preference.

    Those that ``FLASHINFER_MSA_NVCC`` names come first, then ``CUDA_HOME``, ``CUDA_PATH``, ``PATH``, and the Python
    packages. A named one that does not work is a ``BuildError``; the others are passed over.
    """
    for nvcc in _named():
        if probe(nvcc) is None:
            raise BuildError(f"FLASHINFER_MSA_NVCC must name a working nvcc, was {str(nvcc)!r}")
    toolkits = (probe(nvcc) for nvcc in dict.fromkeys(_candidates()))
    return [toolkit for toolkit in toolkits if toolkit]


def choose(architecture: Architecture, toolkits: list[Toolkit]) -> Toolkit:
    """Return the first of ``toolkits`` that knows ``architecture``; ``BuildError`` where none does."""
    for toolkit in toolkits:
        if toolkit.version >= architecture.toolkit:
            return toolkit
    found = ", ".join(f"{dotted(t.version)} at {t.nvcc}" for t in toolkits) or "none"
    packages = " ".join(f"'{name}'" for name in PIP_PACKAGES)
    raise BuildError(
        f"{architecture.name} needs a CUDA toolkit of version {dotted(architecture.toolkit)} or newer; found: {found}. "
        f"Install one with `pip install {packages}`, or set CUDA_HOME or FLASHINFER_MSA_NVCC."
    )
