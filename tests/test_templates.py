# SPDX-License-Identifier: Apache-2.0
"""The templates: each unit is one self-contained source, and compiles for every architecture without local memory."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer_msa.aot import matrix
from flashinfer_msa.aot.build import BuildResult
from flashinfer_msa.aot.matrix import ARCHITECTURES, Unit
from flashinfer_msa.aot.render import render, tree_digest
from flashinfer_msa.layout import LAYOUTS

UNITS = matrix.units()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: f"{unit.architecture.name}-{unit.name}")
def test_unit_is_one_self_contained_source(unit: Unit) -> None:
    source = render(unit)
    assert source.startswith("// SPDX-License-Identifier: Apache-2.0\n")
    assert not re.search(r"^\s*#\s*include", source, re.MULTILINE), "kernels are built without any header"
    assert not re.search(r"\{%|%\}|\{\{ ", source), "a tag that was not rendered"
    for kernel in unit.kernels:
        assert re.search(rf"\b{kernel.symbol}\b", source)


def test_names_are_unique() -> None:
    """A kernel whose sums are exact anyway has the role of exact sums too; no other has two."""
    assert len({(unit.architecture.name, unit.name) for unit in UNITS}) == len(UNITS)
    for name, arch in ARCHITECTURES.items():
        kernels = [(unit, kernel) for unit in matrix.units([name]) for kernel in unit.kernels]
        assert len({(unit.layout, kernel.role) for unit, kernel in kernels}) == len(kernels)
        jobs = {
            (unit.layout, kernel.role if arch.wgmma else kernel.role.removesuffix("_exact")) for unit, kernel in kernels
        }
        symbols = {(unit.layout, kernel.symbol) for unit, kernel in kernels}
        assert len({symbol for _, symbol in symbols}) == len(symbols) == len(jobs)


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"architectures must be among .*, were \['sm_00'\]"):
        matrix.units(["sm_90a", "sm_00"])


def test_tree_digest_is_of_the_sources_alone() -> None:
    """Another process, with another hash seed, comes to the same digest; another architecture to another."""
    code = "from flashinfer_msa.aot.render import tree_digest; print(tree_digest('sm_90a'))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == tree_digest("sm_90a") != tree_digest("sm_89")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_compiles(name: str, built: BuildResult) -> None:
    entries = {Path(entry["file"]).stem: entry for entry in built.manifest["cubins"] if entry["architecture"] == name}
    if not entries:
        pytest.skip(f"no CUDA toolkit here knows {name}")
    for unit in matrix.units([name]):
        entry = entries[unit.name]
        cubin = (built.path.parent / entry["file"]).read_bytes()
        assert len(cubin) == entry["bytes"] > 0
        assert b"_INTERNAL_" not in cubin, "the name of a static device variable carries a hash of the build's path"
        assert b"_GLOBAL__N_" not in cubin and "namespace {" not in render(unit), "so does an anonymous namespace's"
        assert [kernel["symbol"] for kernel in entry["kernels"]] == [kernel.symbol for kernel in unit.kernels]
        for kernel in entry["kernels"]:
            assert kernel["registers"] > 0
            assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0


class Nvrtc:
    """The run-time compiler, loaded from its package."""

    def __init__(self) -> None:
        folders = [Path(entry) / "nvidia" / "cu13" / "lib" for entry in sys.path]
        found = next((folder for folder in folders if (folder / "libnvrtc.so.13").is_file()), None)
        if found is None:
            pytest.skip("needs the package nvidia-cuda-nvrtc")
        for builtins in found.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(found / "libnvrtc.so.13"))

    def compile(self, source: str, architecture: str) -> tuple[int, str]:
        """Size of the cubin and the log; no include folder is given."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"-std=c++17")
        assert self.library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None) == 0
        failed = self.library.nvrtcCompileProgram(program, 2, options)
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(program, log)
        size.value = 0
        if not failed:
            self.library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return size.value, log.value.decode()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nvrtc_compiles_too(name: str) -> None:
    """No unit needs a host compiler or a header: the common kernels, and a layout's (all on the tuned architecture)."""
    nvrtc = Nvrtc()
    for unit in matrix.units([name]):
        if name == "sm_90a" or unit.layout in (None, LAYOUTS["p256_tp4"]):
            size, log = nvrtc.compile(render(unit), name)
            assert size > 0, log
