# SPDX-License-Identifier: Apache-2.0
"""The manifest of installed cubins: it lists them, finds those for a device, and verifies their bytes."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
"""Folder of the manifest, the cubins and the launcher."""
FILE = "manifest.json"
SCHEMA = 2
_REINSTALL = "reinstall the package, or build it again with `flashinfer-msa build`"


@dataclass(frozen=True)
class CubinSet:
    """The cubins of one architecture from one compiler.

    ``driver`` is the oldest CUDA version that a driver must support to load them, such as ``(12, 0)``.
    """

    architecture: str
    capability: tuple[int, int]
    driver: tuple[int, int]
    toolkit: str
    tested_on: str
    entries: tuple[dict[str, Any], ...]

    @property
    def origin(self) -> str:
        """A text with the compiler and the drivers."""
        return "by {}, for drivers of CUDA {}.{} or newer".format(self.toolkit, *self.driver)

    @property
    def status(self) -> str:
        """A text that says whether the cubins have run on a GPU of their architecture."""
        return f"run on {self.tested_on}" if self.tested_on else "compiled, not run"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether a device of ``capability`` runs these cubins.

        Their capability must be the same, or an older minor version. It must be the same if they are
        architecture-specific, which a name that ends in ``a`` shows.
        """
        if self.capability == capability:
            return True
        older = self.capability[0] == capability[0] and self.capability[1] < capability[1]
        return older and not self.architecture.endswith("a")


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json`` (``data``) and the folder it describes (``root``)."""

    root: Path
    data: dict[str, Any]

    @functools.cached_property
    def sets(self) -> list[CubinSet]:
        """The sets of cubins in the folder."""
        by_set: dict[CubinSet, list[dict[str, Any]]] = {}
        for entry in self.data["cubins"]:
            without_entries = CubinSet(
                architecture=entry["architecture"],
                capability=tuple(entry["capability"]),
                driver=tuple(entry["driver"]),
                toolkit=entry["toolkit"],
                tested_on=entry["tested_on"],
                entries=(),
            )
            by_set.setdefault(without_entries, []).append(entry)
        return [replace(cubins, entries=tuple(entries)) for cubins, entries in by_set.items()]

    @property
    def architectures(self) -> list[str]:
        """The architectures of the cubins in the folder."""
        return list(dict.fromkeys(cubin_set.architecture for cubin_set in self.sets))

    def find(self, capability: tuple[int, int], driver: tuple[int, int]) -> CubinSet | None:
        """Return the cubins for a device of ``capability`` that a driver of CUDA version ``driver`` loads, or None.

        If several sets fit, the newest capability wins, then the newest compiler.
        """
        fitting = [found for found in self.sets if found.runs_on(capability) and found.driver <= driver]
        return max(fitting, key=lambda found: (found.capability, found.architecture, found.driver), default=None)

    def launcher(self) -> Path:
        """Verify the native launcher and return its path."""
        self._read(self.data["launcher"])
        return self.root / self.data["launcher"]["file"]

    def read_cubin(self, entry: dict[str, Any]) -> bytes:
        """Return the bytes of a cubin. Raises ``RuntimeError`` if they do not match the manifest."""
        return self._read(entry)

    def _read(self, entry: dict[str, Any]) -> bytes:
        path = self.root / entry["file"]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RuntimeError(
                f"{path} is in the manifest but cannot be read ({error.strerror}): {_REINSTALL}"
            ) from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != entry["sha256"]:
            raise RuntimeError(
                f"{path} is not the file that was built: its SHA-256 is {digest}, the manifest says {entry['sha256']}; "
                f"{_REINSTALL}"
            )
        return content


def read_manifest(root: Path) -> Manifest:
    """Read the manifest in ``root``. Raises ``FileNotFoundError`` if it is missing, ``RuntimeError`` if broken."""
    path = root / FILE
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} does not exist, so no kernels are installed: install a wheel of flashinfer-msa, or build them "
            "with `flashinfer-msa build`"
        ) from error
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{path} cannot be read ({error}): {_REINSTALL}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise RuntimeError(f"{path} must have schema {SCHEMA}, has {found}: {_REINSTALL}")
    manifest = Manifest(root, data)
    try:
        _check(manifest)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"is not as it was written ({error})"
        raise RuntimeError(f"{path} {what}: {_REINSTALL}") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise an error if the manifest lacks an entry that is needed, or names files outside its folder."""
    launcher = manifest.data.get("launcher")  # cubins that were compiled just in time have none
    for entry in [*manifest.data["cubins"], *([] if launcher is None else [launcher])]:
        file = PurePath(entry["file"])
        if file.is_absolute() or ".." in file.parts:
            raise ValueError(f"file must lie in the folder, was {entry['file']!r}")
        entry["sha256"]
    for cubins in manifest.sets:
        if not all(isinstance(number, int) for number in (*cubins.capability, *cubins.driver)):
            raise ValueError(f"capability and driver must be integers, were {cubins.capability} and {cubins.driver}")


@functools.cache
def load_manifest() -> Manifest:
    """Return the manifest of this installation. It is read only once."""
    return read_manifest(DATA)
