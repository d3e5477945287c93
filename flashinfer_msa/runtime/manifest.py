# SPDX-License-Identifier: Apache-2.0
"""The manifest of installed cubins: which there are, which one fits a device, and whether its bytes are intact."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"
"""Folder of the manifest, the cubins and the launcher."""
FILE = "manifest.json"
SCHEMA = 1
_REINSTALL = "reinstall the package, or build it again with `flashinfer-msa build`"


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json`` (``data``) and the folder it describes (``root``)."""

    root: Path
    data: dict[str, Any]

    @property
    def architectures(self) -> list[str]:
        """Architectures that have cubins here."""
        return list(dict.fromkeys(cubin["architecture"] for cubin in self.data["cubins"]))

    def launcher(self) -> Path:
        """Path of the native launcher, its bytes verified."""
        self._read(self.data["launcher"])
        return self.root / self.data["launcher"]["file"]

    def architecture_for(self, capability: tuple[int, int]) -> str | None:
        """Name of the architecture whose cubins run on a device of ``capability``, or None.

        A cubin built for exactly this capability comes first. Else one of the same major version and an older minor
        version serves, unless it is architecture-specific (its name ends in ``a``).
        """
        found: dict[str, tuple[int, int]] = {
            cubin["architecture"]: tuple(cubin["capability"]) for cubin in self.data["cubins"]
        }
        fitting = [
            (built_for, name)
            for name, built_for in found.items()
            if built_for == capability
            or (not name.endswith("a") and built_for[0] == capability[0] and built_for[1] < capability[1])
        ]
        return max(fitting)[1] if fitting else None

    def cubins(self, architecture: str) -> list[dict[str, Any]]:
        """Entries of the cubins of one architecture."""
        return [cubin for cubin in self.data["cubins"] if cubin["architecture"] == architecture]

    def read_cubin(self, entry: dict[str, Any]) -> bytes:
        """Bytes of a cubin; ``RuntimeError`` where they are not those that the manifest describes."""
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
    """Read the manifest in ``root``. ``FileNotFoundError`` where there is none, ``RuntimeError`` where it is broken."""
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
    return Manifest(root, data)


@functools.cache
def load_manifest() -> Manifest:
    """The manifest of this installation, read once."""
    return read_manifest(DATA)
