# SPDX-License-Identifier: Apache-2.0
"""Combines cubins of separate builds in one data folder, with a launcher."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..manifest import DATA, SCHEMA, Manifest, read_manifest
from . import launcher, matrix
from .build import MANIFEST, BuildResult, build, publish
from .toolkit import BuildError


def assemble(
    folders: Iterable[Path], out_dir: Path | None = None, *, progress: Callable[[str], None] | None = None
) -> BuildResult:
    """Write a launcher and the cubins of ``folders`` into ``out_dir``. Each folder is the output of an earlier build.

    ``out_dir`` defaults to the package's own data folder. Afterwards it has no other cubins. Only the launcher is
    compiled.

    Raises ``BuildError``, and changes nothing, if a folder lacks cubins, if a cubin is damaged or was built from other
    sources, or if two folders have different cubins of the same name.
    """
    out_dir = out_dir or DATA
    files: dict[str, bytes] = {}
    entries: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for entry, cubin in _read(folder):
            name = entry["file"]
            if files.setdefault(name, cubin) != cubin:
                raise BuildError(f"{folder / name} differs from the {name} of another folder: build both again")
            entries[name] = entry
    with tempfile.TemporaryDirectory() as staging:
        root = Path(staging)
        publish(root, files, {"schema": SCHEMA, "cubins": list(entries.values())})
        # Drops the cubins that were built from other sources.
        built = build(root, [], progress=progress)
        stale = sorted(entries.keys() - {entry["file"] for entry in built.manifest["cubins"]})
        if stale:
            raise BuildError(f"not of these sources: {', '.join(stale)}; build them again")
        files[launcher.FILE] = (root / launcher.FILE).read_bytes()
    publish(out_dir, files, built.manifest)
    return BuildResult(out_dir / MANIFEST, built.manifest, built.compiled)


def _read(folder: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Return the entries of a folder's manifest, each with its cubin."""
    try:
        manifest = read_manifest(folder)
        cubins = [(entry, manifest.read_cubin(entry)) for entry in manifest.data["cubins"]]
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{folder} does not hold the cubins of a build: {error}") from error
    if lacking := _lacking(manifest):
        raise BuildError(f"{folder} lacks cubins that these sources have: {', '.join(lacking)}; build them again")
    return cubins


def _lacking(manifest: Manifest) -> list[str]:
    """Return the names of the cubins that the manifest's sets should have but lack."""
    lacking = []
    for found in manifest.sets:
        here = {Path(entry["file"]).stem for entry in found.entries}
        units = matrix.units([found.architecture]) if found.architecture in matrix.ARCHITECTURES else []
        lacking += [f"{found.architecture}/{unit.name} of {found.toolkit}" for unit in units if unit.name not in here]
    return lacking
