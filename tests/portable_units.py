# SPDX-License-Identifier: Apache-2.0
"""Builds kernels of one architecture for another and runs pytest: ``portable_units.py NAME DATA ARGUMENT...``.

The kernels of ``NAME`` are built for this machine's GPU into ``DATA``, unless they are there, and replace the installed
ones. So portable kernels can run, also under a sanitizer, on a GPU that has its own kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from flashinfer_msa import manifest
from flashinfer_msa.aot.build import build
from flashinfer_msa.aot.matrix import ARCHITECTURES, Architecture
from flashinfer_msa.aot.tuning import DECODE_SCORE, PREFILL_SCORE, SELECT
from flashinfer_msa.layout import LAYOUTS
from flashinfer_msa.runtime import loader


def target_of(capability: tuple[int, int]) -> Architecture | None:
    """Return the architecture of a compute capability, or None if the matrix has none."""
    return next((arch for arch in ARCHITECTURES.values() if arch.capability == capability), None)


def runs_on(name: str, target: Architecture) -> bool:
    """Whether a GPU of ``target`` has the instructions and the shared memory that the kernels of ``name`` use."""
    arch = ARCHITECTURES[name]
    return not arch.wgmma and arch.bulk_copy <= target.bulk_copy and arch.shared_bytes <= target.shared_bytes


@contextmanager
def built_as(name: str, target: Architecture) -> Iterator[None]:
    """Make the matrix build for ``target`` the kernels of architecture ``name``.

    Programmatic dependent launch stays that of ``target``, because the launcher uses it there.
    """
    arch = replace(
        ARCHITECTURES[name],
        name=target.name,
        capability=target.capability,
        toolkit=target.toolkit,
        dependent_launch=target.dependent_launch,
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(ARCHITECTURES, {target.name: arch}))
        for table in (SELECT, PREFILL_SCORE):
            stack.enter_context(mock.patch.dict(table, {target.name: table[name]}))
        decode = {(target.name, layout): DECODE_SCORE[name, layout] for layout in LAYOUTS}
        stack.enter_context(mock.patch.dict(DECODE_SCORE, decode))
        yield


def main() -> None:
    """Build, run pytest, and fail if no kernel of the build has run."""
    name, data, *arguments = sys.argv[1:]
    folder = Path(data).resolve()
    if not (folder / manifest.FILE).is_file():
        target = target_of(torch.cuda.get_device_capability())
        if target is None or not runs_on(name, target):
            raise SystemExit(f"kernels of {name} do not run on this GPU")
        with built_as(name, target):
            build(folder, [target.name], work_dir=folder / "work")
    manifest.DATA = folder
    status = pytest.main(arguments)
    if status == 0 and loader.loaded_cubins(0) not in manifest.load_manifest().sets:
        raise SystemExit(f"no test has run a kernel of {folder}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
