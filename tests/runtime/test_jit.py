# SPDX-License-Identifier: Apache-2.0
"""Cubins that are compiled on the serving machine: cached, locked, and never half-written. None of it needs a GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from flashinfer_packages import unpacked

from flashinfer_msa.aot import toolkit

# Compiles a cubin for each (architecture, driver) that it is asked for, as a process does that finds none for its GPU.
# An import of FlashInfer takes seconds, so a process asks for several, and damages files in between.
PROGRAM = """
import json, os, resource, signal, sys
from flashinfer_msa.aot import matrix

every_unit = matrix.units
matrix.units = lambda names=None: [unit for unit in every_unit(names) if unit.name == "prefill_score_p128_tp2"]
if limit := os.environ.get("FILE_SIZE_LIMIT"):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))


def ask(architecture, driver):
    try:
        from flashinfer_msa.runtime import jit

        manifest = jit.compiled_cubins(architecture, tuple(map(int, driver.split("."))))
    except RuntimeError as error:
        return {"error": type(error).__name__, "text": str(error)}
    (cubins,) = manifest.sets
    status = jit.jit_spec_registry.get_all_statuses()[-1]
    return {
        "folder": str(manifest.root),
        "toolkit": cubins.toolkit,
        "files": [entry["file"] for entry in cubins.entries],
        "registered": [status.name, status.is_compiled],
    }


results = []
for step in sys.argv[1:]:
    architecture, driver, *damage = step.split(" ", 2)
    if damage:
        exec(damage[0])
        os.environ["FLASHINFER_DISABLE_JIT"] = "1"
        results.append(ask(architecture, driver))
        del os.environ["FLASHINFER_DISABLE_JIT"]
    results.append(ask(architecture, driver))
print(json.dumps(results))
"""
CUBIN = "prefill_score_p128_tp2.cubin"
needs_nvrtc = pytest.mark.skipif(
    not any(found.is_nvrtc and found.version[0] == 12 for found in toolkit.find()),
    reason="needs the package nvidia-cuda-nvrtc-cu12",
)


class Machine:
    """A machine's FlashInfer, cache and compilers, on which processes compile."""

    def __init__(self, flashinfer: Path, workspace: Path) -> None:
        self.workspace = workspace
        path = os.pathsep.join(
            folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "nvcc").exists()
        )
        python_path = os.pathsep.join([str(flashinfer), str(Path(__file__).parents[2])])
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")},
            "PATH": path,
            "PYTHONPATH": python_path,
            "FLASHINFER_WORKSPACE_BASE": str(workspace),
            "FLASHINFER_JIT_BUILD_LOG": str(workspace / "builds.jsonl"),
        }

    def start(self, *steps: str, **changes: str) -> subprocess.Popen[str]:
        """Start a process that wants cubins."""
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *(steps or ("sm_89 12.4",))],
            env={**self.environment, **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
        """What a process was given, when it has ended well."""
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        return json.loads(out.splitlines()[-1])

    def run(self, **changes: str) -> dict[str, Any]:
        """What a process was given that wants one thing."""
        (result,) = self.finish(self.start(**changes))
        return result

    def builds(self) -> int:
        """How many builds there have been."""
        log = self.workspace / "builds.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def contents(self) -> dict[str, bytes]:
        """Every cached file by relative path, but for locks and FlashInfer's log."""
        root = self.workspace / ".cache"
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.suffix not in (".lock", ".log")
        }


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One with NVRTC and without nvcc."""
    return Machine(unpacked("0.7.4"), tmp_path)


@needs_nvrtc
@pytest.mark.network
def test_compiled_once_and_cached(machine: Machine) -> None:
    first = machine.run()
    assert first["toolkit"].startswith("NVRTC 12.") and first["files"] == [f"sm_89/cuda12/{CUBIN}"]
    name = Path(first["folder"]).name
    assert name.startswith("msa_icp_indexer_sm_89_cuda12_") and first["registered"] == [name, True]
    files = machine.contents()
    assert sorted(Path(path).name for path in files) == ["manifest.json", CUBIN]
    assert machine.run(FLASHINFER_DISABLE_JIT="1") == first
    assert machine.builds() == 1 and machine.contents() == files


@needs_nvrtc
@pytest.mark.network
def test_what_is_not_intact_is_compiled_again(machine: Machine) -> None:
    first = machine.run()
    folder = Path(first["folder"])
    files = machine.contents()
    cubin, manifest = repr(str(folder / first["files"][0])), repr(str(folder / "manifest.json"))
    damage = [
        f"open({cubin}, 'wb').write(b'tampered')",
        f"os.truncate({cubin}, 100)",
        f"os.unlink({cubin})",
        f"os.unlink({manifest})",
        f"open({manifest}, 'w').write('{{')",
        f"""open({manifest}, 'w').write('{{"schema": 2, "cubins": []}}')""",
    ]
    results = machine.finish(machine.start(*(f"sm_89 12.4 {what}" for what in damage)))
    for what, (refused, again) in zip(damage, zip(results[::2], results[1::2], strict=True), strict=True):
        assert refused["error"] == "MissingJITCacheError" and again == first, what
    assert machine.contents() == files and machine.builds() == len(damage) + 1


@needs_nvrtc
@pytest.mark.network
def test_processes_at_once(machine: Machine) -> None:
    processes = [machine.start() for _ in range(3)]
    results = [machine.finish(process) for process in processes]
    assert results[0] == results[1] == results[2] and "folder" in results[0][0]
    assert machine.builds() == 1


@needs_nvrtc
@pytest.mark.network
def test_killed_in_the_middle(machine: Machine) -> None:
    """The compilers that it had started are waited for, and nothing half-written is loaded."""
    process = machine.start()
    deadline = time.monotonic() + 120
    while not list(machine.workspace.rglob("work/sm_89/cuda12/*.log")):  # the compiler runs
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not any(path.endswith("manifest.json") for path in machine.contents())
    machine.run()
    found = machine.contents()
    assert sorted(Path(path).name for path in found) == ["manifest.json", CUBIN]
    shutil.rmtree(machine.workspace / ".cache")
    machine.run()
    assert machine.contents() == found, "as of a build that was not killed"


@needs_nvrtc
@pytest.mark.parametrize("limit", (0, 50_000))
@pytest.mark.network
def test_a_full_disk_is_an_error_and_leaves_nothing(machine: Machine, limit: int) -> None:
    if limit:
        machine.run(FLASHINFER_DISABLE_JIT="1")  # FlashInfer's own files are there
    refused = machine.run(FILE_SIZE_LIMIT=str(limit))
    assert refused["error"] in ("RuntimeError", "BuildError"), refused
    assert not any(path.endswith("manifest.json") for path in machine.contents())
    assert "folder" in machine.run()


@pytest.mark.network
def test_a_cache_that_cannot_be_written_says_what_to_do(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = machine.run(FLASHINFER_WORKSPACE_BASE=str(tmp_path / "file"))
    assert refused["error"] == "RuntimeError"
    assert "set FLASHINFER_WORKSPACE_BASE to a folder that can be written" in refused["text"]


@pytest.mark.network
def test_forbidden_by_the_environment(machine: Machine) -> None:
    refused = machine.run(FLASHINFER_DISABLE_JIT="1")
    assert refused["error"] == "MissingJITCacheError"
    for part in ("no cubins of sm_89 are prebuilt", "CUDA 12.4", "FLASHINFER_DISABLE_JIT", "build --arch sm_89"):
        assert part in refused["text"]
    assert machine.builds() == 0


@pytest.mark.network
def test_no_compiler_whose_cubins_the_driver_loads(machine: Machine) -> None:
    cases = [("sm_110a", "12.9"), ("sm_107a", "12.9"), ("sm_89", "11.8")]
    for (architecture, driver), refused in zip(
        cases, machine.finish(machine.start(*map(" ".join, cases))), strict=True
    ):
        assert refused["error"] == "RuntimeError"
        says = f"no cubins of {architecture} are prebuilt that this driver (CUDA {driver}) loads"
        assert says in refused["text"] and refused["text"].endswith("What helps: a newer driver")


def test_without_flashinfer_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "flashinfer.py").write_text("raise ImportError('stands before one that is installed')")
    refused = Machine(tmp_path, tmp_path).run()
    assert refused["error"] == "RuntimeError" and "pip install -U 'flashinfer-msa[flashinfer]'" in refused["text"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.network
def test_nvcc_comes_first(machine: Machine) -> None:
    version = toolkit.probe(Path(str(shutil.which("nvcc"))))
    assert version is not None
    (found,) = machine.finish(machine.start(f"sm_89 {version.version[0]}.9", PATH=os.environ["PATH"]))
    assert found["toolkit"] == version.name
