# SPDX-License-Identifier: Apache-2.0
"""Renders units of the build matrix to CUDA source, and computes the digests that identify a build."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .. import layout
from . import headers
from .matrix import SHARED, Unit, units
from .toolkit import compile_flags

PACKAGE = Path(layout.__file__).resolve().parent
"""The folder ``flashinfer_msa``, installed or in a checkout."""
TEMPLATES = PACKAGE / "templates"
NATIVE = PACKAGE / "native"


@lru_cache
def _environment(templates: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(unit: Unit, templates: Path = TEMPLATES) -> str:
    """Return the CUDA source of ``unit``, which includes no other file."""
    return _environment(templates).get_template(unit.template).render(unit.context)


def render_headers(templates: Path = TEMPLATES) -> dict[str, str]:
    """Return the launcher's rendered headers by name: those that kernels start with, and those of its own."""
    context = {**SHARED, **headers.context()}
    paths = (templates / "constants.h.j2", templates / "params.h", *sorted(NATIVE.glob("*.h.j2")))
    return {
        path.name.removesuffix(".j2"): _environment(path.parent).get_template(path.name).render(context)
        for path in paths
    }


def source_digest(unit: Unit, templates: Path = TEMPLATES) -> str:
    """Return the SHA-256 of everything that decides the bytes of a unit's cubin, except the toolkit."""
    digest = hashlib.sha256("\0".join(compile_flags(unit.architecture)).encode())
    digest.update(b"\0" + render(unit, templates).encode())
    return digest.hexdigest()


def launcher_sources(templates: Path = TEMPLATES) -> list[Path]:
    """Return the launcher's sources and headers in a fixed order."""
    return [*sorted([*NATIVE.glob("*.cc"), *NATIVE.glob("*.h")]), templates / "params.h"]


def launcher_digest(templates: Path = TEMPLATES) -> str:
    """Return the SHA-256 of the native launcher's sources, names included."""
    sources = {path.name: path.read_bytes() for path in launcher_sources(templates)}
    sources |= {name: text.encode() for name, text in render_headers(templates).items()}
    digest = hashlib.sha256()
    for name, content in sources.items():
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    return digest.hexdigest()


def tree_digest(architecture: str, templates: Path = TEMPLATES) -> str:
    """Return the SHA-256 of all sources that run on one architecture: its kernels and the launcher.

    Results from a GPU are recorded under this digest. They expire exactly when code that ran there changes.
    """
    digest = hashlib.sha256(launcher_digest(templates).encode())
    for unit in units([architecture]):
        digest.update(f"{unit.name}\0{source_digest(unit, templates)}\0".encode())
    return digest.hexdigest()
