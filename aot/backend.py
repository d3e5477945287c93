# SPDX-License-Identifier: Apache-2.0
"""The PEP 517 build backend. It builds the launcher and the cubins, then calls setuptools."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.compat.py310 import tomllib

from . import matrix, toolkit

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_PROJECT = Path("pyproject.toml")
_EPOCH = 315532800
"""Time of the files in a wheel if ``SOURCE_DATE_EPOCH`` is not set: the earliest that a ZIP archive can hold."""


def build_requirements() -> list[str]:
    """Return the ``build`` extra, apache-tvm-ffi for its headers, and the compilers that this machine lacks."""
    project = tomllib.loads(_PROJECT.read_text())["project"]
    requirements = [*project["optional-dependencies"]["build"]]
    requirements += [name for name in project["dependencies"] if name.startswith("apache-tvm-ffi")]
    return requirements + missing_compilers()


def missing_compilers() -> list[str]:
    """Return the packages of the compilers that a wheel's cubins need and this machine lacks."""
    if _prebuilt():
        return []
    toolkits = toolkit.find()
    missing = [
        (matrix.ARCHITECTURES[name], major)
        for name in toolkit.selected_architectures()
        for major in matrix.ARCHITECTURES[name].cuda
        if toolkit.choose(matrix.ARCHITECTURES[name], toolkits, major) is None
    ]
    packages: list[str] = []
    for architecture, major in missing:
        is_known_to_nvcc = major == 13 and architecture.toolkit <= toolkit.NVCC_VERSION
        packages += toolkit.NVCC_PACKAGES if is_known_to_nvcc else [toolkit.NVRTC_PACKAGES[major]]
    return list(dict.fromkeys(packages))


def _prebuilt() -> list[Path]:
    """Return the folders of cubins in ``FLASHINFER_MSA_PREBUILT``, which separates them as PATH does."""
    return [Path(part) for part in os.environ.get("FLASHINFER_MSA_PREBUILT", "").split(os.pathsep) if part]


def _build() -> None:
    # These import jinja2 and ninja, which are installed only after the hooks above have named them.
    from .assemble import assemble
    from .build import build

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if folders := _prebuilt():
        assemble(folders, progress=progress)
    else:
        build(progress=progress)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return the packages that ``build_wheel`` needs besides setuptools."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *build_requirements()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return the packages that ``build_editable`` needs besides setuptools."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *build_requirements()]


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the launcher, the cubins and the wheel. The same sources and tools give the same bytes."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(_EPOCH))
    _build()
    # Otherwise setuptools packs files of an earlier build that the project no longer has.
    for stale in Path("build").glob("lib*"):
        shutil.rmtree(stale)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the launcher and the cubins in the checkout, then a wheel that points to the checkout."""
    _build()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


class BdistWheel(bdist_wheel):
    """Tags the wheel by platform only, and makes it independent of the umask.

    Any Python 3 can load the launcher, because it has a C interface.
    """

    def finalize_options(self) -> None:
        """Count the launcher as an extension module, so that the wheel gets a platform tag."""
        self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def write_wheelfile(self, wheelfile_base: str, *args: Any, **kwargs: Any) -> None:
        """Write the last file of the wheel, then give all files the same permissions."""
        super().write_wheelfile(wheelfile_base, *args, **kwargs)
        for path in Path(self.bdist_dir).rglob("*"):
            if path.is_file():
                path.chmod(0o644)

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of the oldest platform that the launcher loads on."""
        from .build import DATA, MANIFEST
        from .launcher import wheel_platform

        manifest = json.loads((DATA / MANIFEST).read_text())
        return "py3", "none", wheel_platform(manifest["launcher"]["compiler"])
