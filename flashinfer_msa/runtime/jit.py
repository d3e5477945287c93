# SPDX-License-Identifier: Apache-2.0
"""Compiles cubins on the serving machine if no prebuilt ones fit, as FlashInfer compiles its just-in-time kernels.

Import it only then, because it imports FlashInfer, which takes seconds.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import jinja2  # noqa: F401
    import ninja  # noqa: F401
except ImportError as error:
    raise RuntimeError(
        f"no cubins are prebuilt for this GPU and driver, and compiling them needs {error.name}, which is not "
        "installed: pip install 'flashinfer-msa[flashinfer]'"
    ) from error

try:
    from flashinfer.jit import env as jit_env
    from flashinfer.jit.core import JitSpec, MissingJITCacheError, get_tmpdir, jit_spec_registry, logger
except ImportError as error:
    raise RuntimeError(
        "no cubins are prebuilt for this GPU and driver, and compiling them needs FlashInfer, which cannot be imported "
        f"({error}): pip install -U 'flashinfer-msa[flashinfer]', or build them with `flashinfer-msa build`"
    ) from error
except OSError as error:
    if error.filename is None:  # a library is missing; otherwise it is the folder
        raise RuntimeError(
            "no cubins are prebuilt for this GPU and driver, and compiling them needs FlashInfer, which cannot be "
            f"imported ({error}): repair it, or build them with `flashinfer-msa build`"
        ) from error
    raise RuntimeError(
        "no cubins are prebuilt for this GPU and driver, and FlashInfer's folder for compiled kernels cannot be used "
        f"({error}): set FLASHINFER_WORKSPACE_BASE to a folder that can be written, or build them with "
        "`flashinfer-msa build`"
    ) from error

from ..aot import matrix, toolkit
from ..aot.build import build_cubins
from ..aot.render import source_digest
from ..manifest import Manifest, read_manifest


@dataclass
class JitSpecCubins(JitSpec):
    """The cubins of one architecture, for drivers of one major version of CUDA.

    They are in FlashInfer's folder of compiled kernels. The name of their folder has the digest of their sources.
    """

    architecture: matrix.Architecture
    driver: tuple[int, int]

    toolchain = "nvcc or NVRTC"

    def __post_init__(self) -> None:
        digests = (source_digest(unit) for unit in matrix.units([self.architecture.name]))
        digest = hashlib.sha256("".join(digests).encode()).hexdigest()
        self.name = f"msa_icp_indexer_{self.architecture.name}_cuda{self.driver[0]}_{digest[:16]}"

    @property
    def folder(self) -> Path:
        """The folder of the cubins and their manifest."""
        return jit_env.FLASHINFER_JIT_DIR / self.name

    @property
    def lock_path(self) -> Path:
        """The lock file of processes that compile the same cubins."""
        return get_tmpdir() / f"{self.name}.lock"

    @property
    def is_compiled(self) -> bool:
        """Whether all cubins exist, are intact, and fit the driver."""
        return self.try_load() is not None

    def get_library_path(self) -> Path:
        """Return the path of the manifest, which is written last."""
        return self.folder / "manifest.json"

    def try_load(self) -> Manifest | None:
        """Read all cubins and return their manifest. Return None if one is missing or damaged."""
        try:
            return self.load()
        except (OSError, RuntimeError, LookupError, TypeError, ValueError):
            return None

    def load(self) -> Manifest:
        """Read all cubins and return their manifest. Raise an error if one is missing or damaged."""
        manifest = read_manifest(self.folder)
        (cubins,) = manifest.sets
        if cubins.architecture != self.architecture.name or cubins.driver > self.driver:
            raise RuntimeError(f"{self.folder} holds cubins of {cubins.architecture} for drivers of {cubins.driver}")
        if len(cubins.entries) != len(matrix.units([self.architecture.name])):
            raise RuntimeError(f"{self.folder} lacks cubins")
        for entry in cubins.entries:
            manifest.read_cubin(entry)
        return manifest

    def build(self) -> None:
        """Compile with the first compiler whose cubins the driver loads. Raises ``RuntimeError`` if that fails."""
        found = toolkit.find()
        chosen = toolkit.choose(self.architecture, [each for each in found if each.driver <= self.driver])
        if chosen is None:
            raise RuntimeError(self._missing_compiler(found))
        logger.info("Compiling %s with %s; this takes up to a minute.", self.name, chosen.name)
        # A build that continues a killed one uses the files that it finished.
        work_dir = self.folder / "work"
        try:
            build_cubins(self.folder, self.architecture.name, chosen, work_dir=work_dir)
            shutil.rmtree(work_dir, ignore_errors=True)
        except OSError as error:
            raise RuntimeError(
                f"{self.folder} cannot be written ({error}): free space, or set FLASHINFER_WORKSPACE_BASE to a folder "
                "that has some"
            ) from error

    def _missing_compiler(self, found: list[toolkit.Toolkit]) -> str:
        here = ", ".join(f"{each.name} at {each.path}" for each in found) or "none"
        newest = toolkit.dotted(self.driver)
        packages = [name for major, name in toolkit.NVRTC_PACKAGES.items() if major <= self.driver[0]]
        can = [f"pip install '{packages[-1]}'"] if packages and self.architecture.toolkit <= self.driver else []
        return (
            f"no cubins of {self.architecture.name} are prebuilt that this driver (CUDA {newest}) loads, and compiling "
            f"them takes a CUDA compiler of version {toolkit.dotted(self.architecture.toolkit)} or newer whose major "
            f"version is not newer than the driver's; found: {here}. "
            f"What helps: {' or '.join([*can, 'a newer driver'])}"
        )


def compiled_cubins(architecture: str, driver: tuple[int, int]) -> Manifest:
    """Return the cubins of ``architecture`` for a driver of CUDA version ``driver``. Compile them if none are cached.

    Raises ``RuntimeError`` if they cannot be compiled. If ``FLASHINFER_DISABLE_JIT`` forbids it, the error is a
    subclass, FlashInfer's ``MissingJITCacheError``.
    """
    try:
        spec = JitSpecCubins(matrix.ARCHITECTURES[architecture], driver)
    except TypeError as error:
        # FlashInfer's class has an abstract method that JitSpecCubins does not implement.
        raise RuntimeError(
            f"no cubins of {architecture} are prebuilt that this driver (CUDA {toolkit.dotted(driver)}) loads, and "
            f"this version of FlashInfer asks more of what compiles them than is known ({error}): install FlashInfer "
            f"0.7.4, or build them with `flashinfer-msa build --arch {architecture}`"
        ) from error
    jit_spec_registry.register(spec)
    try:
        manifest: Any = spec.build_and_load()
    except MissingJITCacheError as error:
        raise MissingJITCacheError(
            f"no cubins of {architecture} are prebuilt that this driver (CUDA {toolkit.dotted(driver)}) loads, "
            f"{spec.folder} has none, and FLASHINFER_DISABLE_JIT forbids to compile them: unset it, or build them with "
            f"`flashinfer-msa build --arch {architecture}`",
            spec=spec,
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"the cubins of {architecture} cannot be compiled in {spec.folder} ({error}): set "
            "FLASHINFER_WORKSPACE_BASE to a folder that can be written"
        ) from error
    return manifest
