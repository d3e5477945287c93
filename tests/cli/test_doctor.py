# SPDX-License-Identifier: Apache-2.0
"""The doctor: what it finds in sound and broken installations, on machines with and without GPUs, and that it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import flashinfer_msa
from flashinfer_msa import manifest
from flashinfer_msa.cli import doctor
from flashinfer_msa.cli.findings import Finding, Report, print_report
from flashinfer_msa.cli.main import main
from flashinfer_msa.manifest import DATA, Manifest, load_manifest
from flashinfer_msa.runtime import loader
from flashinfer_msa.version import __version__

PACKAGE = Path(flashinfer_msa.__file__).resolve().parent
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def one(findings: Sequence[Finding], section: str, name: str) -> Finding:
    """The finding of that name."""
    (found,) = [finding for finding in findings if (finding.section, finding.name) == (section, name)]
    return found


def run(*options: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, with the package at ``path`` where one is given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "flashinfer_msa", "doctor", *options]
    return subprocess.run(
        command, capture_output=True, text=True, env={**environment, **variables}, cwd=path, timeout=200
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables of this machine, and no driver version that another test has asked for."""
    for name in [name for name in os.environ if name.startswith("FLASHINFER_")]:
        monkeypatch.delenv(name)
    cached = loader.driver_version
    cached.cache_clear()
    yield
    cached.cache_clear()


# --- this machine -----------------------------------------------------------------------------------------------------


@without_cuda
@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA without a driver is a failure")
def test_a_machine_without_a_gpu_is_no_failure() -> None:
    """The command examines the installation, runs the torch backend, and says what this machine cannot do."""
    done = run("--json", CUDA_VISIBLE_DEVICES="0,1", FLASHINFER_WORKSPACE_BASE="https://me:pass@host/x")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    findings = [Finding(**found) for found in report["findings"]]
    assert {finding.status for finding in findings} <= {"ok", "warning"}
    assert one(findings, "package", "flashinfer-msa").text == f"{__version__} at {PACKAGE}"
    assert one(findings, "package", "torch").text == torch.__version__
    assert one(findings, "GPUs", "torch").text == f"{torch.__version__}, built for the CPU"
    assert "kernels cannot run here" in one(findings, "GPUs", "CUDA").text
    assert one(findings, "environment", "CUDA_VISIBLE_DEVICES").text == "'0,1'"
    assert one(findings, "environment", "FLASHINFER_WORKSPACE_BASE").text == "'https://...@host/x'"
    assert one(findings, "installation", "launcher").text.startswith("libflashinfer_msa.so, SHA-256 verified; by ")
    for cubins in load_manifest().sets:
        text = one(findings, "installation", f"{cubins.architecture}, CUDA {cubins.driver[0]}").text
        assert text.startswith(f"{len(cubins.entries)} cubins, SHA-256 verified; by {cubins.toolkit}, for drivers of")
        assert text.endswith(f"run on {cubins.tested_on}" if cubins.tested_on else "compiled, not run")
    # 4 layouts, 2 row forms, 2 requests of 2 tokens, 4 heads.
    text = one(findings, "self-test", "cpu").text
    assert text.startswith("128 of 128 rows of Top16 right, 4 layouts") and "backend 'torch'" in text


def damaged(tmp_path: Path) -> tuple[Path, str]:
    """A copy of the package with a broken launcher and cubin, and that cubin's set by name."""
    copy = tmp_path / "flashinfer_msa"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    cubins = load_manifest().sets[-1]
    for name in ("libflashinfer_msa.so", cubins.entries[0]["file"]):
        path = copy / "data" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    return copy, f"{cubins.architecture}, CUDA {cubins.driver[0]}"


def test_damaged_files_are_failures(tmp_path: Path) -> None:
    """The command exits with 1, and says in the library's words which files and what to do; nothing is loaded."""
    copy, cubins = damaged(tmp_path)
    done = run(path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert str(copy) in said
    assert said.count("is not the file that was built: its SHA-256 is") >= 2
    assert said.count("reinstall the package, or build it again with `flashinfer-msa build`") >= 2
    # A torch for CUDA without a driver is one more.
    assert re.search(rf"FAILED: \d+ of .*installation, launcher; installation, {cubins}; .*self-test,", said)


def test_a_missing_or_broken_manifest_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(manifest, "DATA", tmp_path)
    (finding,) = doctor._installation()
    assert (finding.status, finding.name) == ("failure", "manifest")
    assert "no kernels are installed: install a wheel of flashinfer-msa" in finding.text
    (tmp_path / "manifest.json").write_text('{"schema": 0}')
    (finding,) = doctor._installation()
    assert finding.status == "failure" and "must have schema 2, has 0: reinstall the package" in finding.text


def test_cubins_of_another_version_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = {**load_manifest().data, "version": "9.8.7", "cubins": []}
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    shutil.copy(DATA / "libflashinfer_msa.so", tmp_path)
    monkeypatch.setattr(manifest, "DATA", tmp_path)
    findings = list(doctor._installation())
    assert [finding.status for finding in findings] == ["warning", "ok", "warning"]
    assert f"of version 9.8.7 at {tmp_path}/manifest.json, where the package is {__version__}" in findings[0].text
    assert findings[2].text == "none: kernels are compiled just in time"


def test_requirements_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    required = [
        *("torch>=99", "flashinfer-msa-nothing>=1", "click", "sphinx>99; extra == 'docs'"),
        *(f"{line}; extra == 'flashinfer'" for line in ("flashinfer-python>=0.6", "ninja>=99")),
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: required)
    found_version = doctor._version_of
    versions = {"flashinfer-python": None, "vllm": None, "ninja": "1.11"}
    monkeypatch.setattr(doctor, "_version_of", lambda name: versions[name] if name in versions else found_version(name))
    findings = {finding.name: finding for finding in doctor._requirements()}
    assert list(findings) == ["torch", "flashinfer-msa-nothing", "click", "flashinfer-python", "ninja"]
    assert [finding.status for finding in findings.values()] == ["failure", "failure", "ok", "ok", "warning"]
    assert findings["torch"].text == f"{doctor._version_of('torch')}, but must be >=99"
    assert findings["torch"].advice == "pip install 'torch>=99'"
    assert findings["flashinfer-msa-nothing"].advice == "pip install 'flashinfer-msa-nothing>=1'"
    assert "no functions registered in FlashInfer" in findings["flashinfer-python"].text
    assert findings["flashinfer-python"].advice == "pip install 'flashinfer-msa[flashinfer]'"
    assert findings["ninja"].text == "1.11, but must be >=99"


def test_requirements_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a path without metadata, what is installed of the packages that count is said."""

    def missing(name: str) -> None:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", missing)
    monkeypatch.setattr(doctor.metadata, "version", missing)
    assert "on the path but not installed" in one(list(doctor._package()), "package", "flashinfer-msa").text
    assert [finding.status for finding in doctor._requirements()] == ["failure", "failure", "ok"]


@pytest.mark.parametrize(
    ("library", "compiler", "status"),
    (
        (("glibc", "2.27"), "zig 0.17.1, glibc 2.28", "failure"),
        (("glibc", "2.28"), "zig 0.17.1, glibc 2.28", "ok"),
        (("glibc", "2.36"), "zig 0.17.1, glibc 2.28", "ok"),
        (("glibc", "2.17"), "g++ 12.2.0", "ok"),
        (("", ""), "g++ 12.2.0", "ok"),
    ),
)
def test_the_launcher_and_the_c_library(
    monkeypatch: pytest.MonkeyPatch, library: tuple[str, str], compiler: str, status: str
) -> None:
    """A wheel's launcher says what it needs; one that was compiled here runs here."""
    installed = load_manifest()
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: library)
    data = {**installed.data, "launcher": {**installed.data["launcher"], "compiler": compiler}}
    (finding,) = doctor._launcher(Manifest(installed.root, data))
    assert finding.status == status and f"SHA-256 verified; by {compiler}" in finding.text
    glibc = one(list(doctor._package()), "package", "glibc")
    assert (glibc.status, glibc.text) == (("ok", library[1]) if library[0] else ("warning", glibc.text))


def test_another_installed_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "9.8.7")
    finding = one(list(doctor._package()), "package", "flashinfer-msa")
    assert finding.status == "warning" and finding.text.endswith("installed as 9.8.7") and finding.advice


def test_variables_are_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, FlashInfer's and two of CUDA's, shortened; no others, and none that only looks like ours unnoticed."""
    assert [finding.name for finding in doctor._environment()] in (["variables"], ["CUDA_HOME"])
    for name, value in {
        "FLASHINFER_MSA_DRIVER": "12.4",
        "FLASHINFER_MSA_DRIVERS": "12.4",
        "FLASHINFER_CUBIN_TOKEN": "hush",
        "FLASHINFER_AUTH": "hush",
        "FLASHINFER_my_passwd": "hush",
        "FLASHINFER_CUBINS_REPOSITORY": "https://me:hu@sh@host/x?sig=hush",
        "FLASHINFER_DUMP_DIR": "/very/long" * 100,
        "CUDA_HOME": "/usr/local/cuda",
        "AWS_SECRET": "hush",
        "HOME": "hush",
    }.items():
        monkeypatch.setenv(name, value)
    findings = {finding.name: finding for finding in doctor._environment()}
    assert findings.keys() - {"CUDA_VISIBLE_DEVICES"} == {
        *("CUDA_HOME", "FLASHINFER_CUBIN_TOKEN", "FLASHINFER_DUMP_DIR", "FLASHINFER_MSA_DRIVER"),
        *("FLASHINFER_AUTH", "FLASHINFER_my_passwd", "FLASHINFER_CUBINS_REPOSITORY"),
        "FLASHINFER_MSA_DRIVERS",
    }
    assert findings["FLASHINFER_MSA_DRIVERS"].status == "warning"
    assert "FLASHINFER_MSA_DRIVER, " in findings["FLASHINFER_MSA_DRIVERS"].advice
    assert len(findings["FLASHINFER_DUMP_DIR"].text) < 210
    assert not any("hush" in finding.text for finding in findings.values())


def test_variables_are_those_that_the_package_reads() -> None:
    folders = os.walk(PACKAGE, followlinks=True)
    sources = [Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")]
    read = {
        name
        for path in sources
        if path.name != "doctor.py"
        for name in re.findall(r"FLASHINFER_MSA_[A-Z_]*[A-Z]", path.read_text())
    }
    assert read == set(doctor.VARIABLES)


def test_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer_msa.aot import toolkit

    found = [toolkit.Toolkit(Path("/cuda/bin/nvcc"), (12, 9), "12.9.86")]
    monkeypatch.setattr(toolkit, "find", lambda: found)
    (finding,) = doctor._compilers()
    assert (finding.status, finding.name) == ("ok", "nvcc 12.9.86")
    assert finding.text == "at /cuda/bin/nvcc, makes cubins for drivers of CUDA 12.0 or newer"
    found.clear()
    (finding,) = doctor._compilers()
    assert finding.status == "ok" and "none found" in finding.text
    monkeypatch.undo()
    monkeypatch.setenv("FLASHINFER_MSA_NVCC", "/nowhere/nvcc")
    (finding,) = doctor._compilers()
    assert finding.status == "failure" and finding.text.endswith("was '/nowhere/nvcc'")


# --- GPUs -------------------------------------------------------------------------------------------------------------


class FakeGpus:
    """CUDA devices that torch finds: compute capabilities, and pairs without peer access."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: str, capabilities: Sequence[tuple[int, int]]) -> None:
        self.apart: set[frozenset[int]] = set()
        monkeypatch.setenv("FLASHINFER_MSA_DRIVER", driver)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name, function in {
            "init": lambda: None,
            "device_count": lambda: len(capabilities),
            "get_device_capability": lambda device: capabilities[device.index],
            "get_device_properties": lambda index: SimpleNamespace(
                name=f"Fake {index}",
                major=capabilities[index][0],
                minor=capabilities[index][1],
                total_memory=24 << 30,
                multi_processor_count=132,
            ),
            "can_device_access_peer": lambda index, peer: frozenset((index, peer)) not in self.apart,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        sets = (("sm_90a", [9, 0], [12, 0], "NVRTC 12.9.86"), ("sm_90a", [9, 0], [13, 0], "nvcc 13.0.88"))
        entries = [
            {"architecture": name, "capability": capability, "driver": driver, "toolkit": toolkit, "tested_on": "H200"}
            for name, capability, driver, toolkit in sets
        ]
        monkeypatch.setattr(loader, "load_manifest", lambda: Manifest(Path("nowhere"), {"cubins": entries}))


@pytest.mark.parametrize(
    ("driver", "words"),
    (
        ("13.0", "sm_90a kernels are prebuilt by nvcc 13.0.88, for drivers of CUDA 13.0 or newer, run on H200"),
        ("12.4", "sm_90a kernels are prebuilt by NVRTC 12.9.86, for drivers of CUDA 12.0 or newer, run on H200"),
        ("11.8", "sm_90a kernels are not prebuilt for a driver of CUDA 11.8, and compiled just in time"),
    ),
)
def test_two_gpus(monkeypatch: pytest.MonkeyPatch, driver: str, words: str) -> None:
    """Each GPU has what it would load, or why nothing; one that kernels are for is tested, and no other."""
    FakeGpus(monkeypatch, driver, [(9, 0), (7, 5)])
    findings = list(doctor._gpus())
    assert one(findings, "GPUs", "torch").text.endswith("built for CUDA 13.0")
    stated = one(findings, "GPUs", "driver")
    assert stated.status == "warning" and f"cubins are chosen as for CUDA {driver}" in stated.text
    first, second = one(findings, "GPUs", "cuda:0"), one(findings, "GPUs", "cuda:1")
    assert first.text == f"Fake 0, compute capability 9.0, 24 GiB, 132 multiprocessors; {words}"
    assert first.status == "ok" and first.devices == ("cuda:0",)
    assert second.status == "failure" and second.devices == ()
    assert "device must be a GPU that there are kernels for, was cuda:1 of compute capability 7.5" in second.text
    assert "CUDA_VISIBLE_DEVICES" in second.advice
    assert one(findings, "peer access", "cuda:0").text == "reaches cuda:1"
    assert not any(len(finding.devices) > 1 for finding in findings)


def test_gpus_that_reach_one_another_are_tested_together(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGpus(monkeypatch, "13.0", [(9, 0)] * 7)
    gpus.apart = {frozenset(pair) for pair in ((0, 1), *((6, other) for other in range(6)))}
    findings = {finding.name: finding for finding in doctor._gpus() if finding.section == "peer access"}
    assert findings["cuda:0"].text == "reaches cuda:2, cuda:3, cuda:4, cuda:5"
    assert {finding.devices for finding in findings.values()} - {()} == {
        ("cuda:0", "cuda:2", "cuda:3", "cuda:4"),
        ("cuda:1", "cuda:5"),
    }
    assert findings["cuda:6"].text == "reaches no other GPU" and findings["cuda:6"].status == "warning"
    assert {findings[f"cuda:{index}"].status for index in range(6)} == {"ok"}


def test_gpus_none_of_which_reaches_another_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch, "13.0", [(9, 0)] * 2).apart = {frozenset((0, 1))}
    findings = [finding for finding in doctor._gpus() if finding.section == "peer access"]
    assert [finding.status for finding in findings] == ["failure"] * 2
    assert "needs GPUs that reach one another" in findings[0].advice


def test_a_gpu_that_cannot_be_asked_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch, "13.0", [(9, 0)] * 2)
    properties = torch.cuda.get_device_properties

    def fail(index: int) -> Any:
        if index == 0:
            raise RuntimeError("fallen off the bus")
        return properties(index)

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    findings = list(doctor._gpus())
    first = one(findings, "GPUs", "cuda:0")
    assert first.status == "failure" and first.text == "could not be examined: RuntimeError: fallen off the bus"
    assert one(findings, "GPUs", "cuda:1").devices == ("cuda:1",)


def test_a_gpu_without_an_installation_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeGpus(monkeypatch, "13.0", [(9, 0)])
    monkeypatch.setattr(loader, "load_manifest", lambda: manifest.read_manifest(tmp_path))
    finding = one(list(doctor._gpus()), "GPUs", "cuda:0")
    assert finding.status == "failure" and "no kernels are installed: install a wheel" in finding.text


def test_a_torch_for_cuda_without_a_driver_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(loader, "driver_version", lambda: (0, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")

    def fail() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(torch.cuda, "init", fail)
    findings = list(doctor._gpus())
    finding = one(findings, "GPUs", "CUDA")
    assert finding.status == "failure" and finding.devices == ("cpu",)
    assert finding.text == "torch cannot use a GPU: Found no NVIDIA driver on your system."
    assert "NVIDIA driver for CUDA 13.0" in finding.advice and "CUDA_VISIBLE_DEVICES is '3'" in finding.advice
    assert one(findings, "GPUs", "driver").text.startswith("none: libcuda.so.1 is not there")


@pytest.mark.parametrize(("driver", "status"), (((0, 0), "ok"), ((13, 0), "warning")))
def test_a_torch_for_the_cpu(monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int], status: str) -> None:
    """It is how a machine without a driver is, and a mistake where there is one."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(loader, "driver_version", lambda: driver)
    finding = one(list(doctor._gpus()), "GPUs", "CUDA")
    assert finding.status == status and finding.devices == ("cpu",) and bool(finding.advice) == (status == "warning")


def test_a_driver_version_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_MSA_DRIVER", "new")
    finding = one(list(doctor._gpus()), "GPUs", "driver")
    assert finding.status == "failure" and "must be a CUDA version such as 12.4, was 'new'" in finding.text


# --- child processes --------------------------------------------------------------------------------------------------

HEAD = "import sys\nsys.path[:] = {path!r}\nresults, task = {results!r}, {task!r}\n"
TAIL = "\nfrom flashinfer_msa.cli import doctor\ndoctor.run_task(results, *task)\n"


def child(section: str = "self-test", *devices: str) -> list[Finding]:
    """What a child process finds."""
    with contextlib.ExitStack() as children:
        return doctor._start(children, section, *devices)()


def test_a_child_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is killed, with the processes that it has started."""
    monkeypatch.setattr(doctor, "SECONDS", 3)
    program = "import subprocess, pathlib, time\nprint('so far', flush=True)\n"
    program += f"started = subprocess.Popen(['sleep', '100'])\npathlib.Path({str(tmp_path / 'pid')!r})"
    program += ".write_text(str(started.pid))\ntime.sleep(100)"
    monkeypatch.setattr(doctor, "_PROGRAM", HEAD + program)
    begin = time.monotonic()
    (finding,) = child("self-test", "cuda:0", "cuda:1")
    assert time.monotonic() - begin < 20
    assert (finding.status, finding.name) == ("failure", "cuda:0, cuda:1")
    assert finding.text == "the process that examined it had not ended after 3 s, and was killed\nso far"
    assert "nvidia-smi" in finding.advice
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    for _ in range(100):
        if not state.exists() or ") Z" in state.read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of the child runs on")


@pytest.mark.parametrize(
    ("program", "words"),
    (
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("raise SystemExit('no room [here]')", "ended with status 1\nno room [here]"),
        ("raise SystemExit(0)", "ended with status 0"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("open(results, 'w').write('{{')\nraise SystemExit(7)", "ended with status 7"),
    ),
)
def test_a_child_that_ends_early_is_a_finding(monkeypatch: pytest.MonkeyPatch, program: str, words: str) -> None:
    monkeypatch.setattr(doctor, "_PROGRAM", HEAD + program)
    (finding,) = child("self-test", "cuda:0")
    assert (finding.status, finding.section, finding.name) == ("failure", "self-test", "cuda:0")
    assert words in finding.text and "report it" in finding.advice


def test_what_a_child_has_found_before_it_dies_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding("ok", "GPUs", "torch", "9.8", devices=("cuda:0",))
    line = json.dumps(doctor.asdict(found)).replace("{", "{{").replace("}", "}}")
    program = f"import os\nopen(results, 'w').write({line!r} + '\\n' + {line!r}[:20])\nos.abort()"
    monkeypatch.setattr(doctor, "_PROGRAM", HEAD + program)
    kept, end = child("GPUs")
    assert kept == found
    assert (end.status, end.name) == ("failure", "GPUs") and "SIGABRT" in end.text


def test_results_that_are_nonsense_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROGRAM", HEAD + "open(results, 'w').write('nonsense\\n')")
    (finding,) = child("GPUs")
    assert finding.status == "failure" and "could not be examined: JSONDecodeError" in finding.text


def test_a_process_that_cannot_be_started_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    (finding,) = child("FlashInfer")
    assert finding.status == "failure" and "no process could be started" in finding.text
    assert "/nowhere/python" in finding.text


def test_a_self_test_that_selects_other_blocks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil = "from flashinfer_msa.backends import reference\nkey = reference._sort_key\n"
    spoil += "reference._sort_key = lambda scores: -key(scores)\n"
    monkeypatch.setattr(doctor, "_PROGRAM", HEAD + spoil + TAIL)
    (finding,) = child("self-test", "cpu")
    assert finding.status == "failure", finding
    right, rows = map(int, re.match(r"(\d+) of (\d+) rows of Top16 right", finding.text).groups())
    assert right < rows == 128
    for layout in ("P128-TP2", "P256-TP4"):
        for form in ("tagged", "legacy"):
            assert f"{layout} with {form} rows" in finding.text


def test_a_self_test_whose_rank_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are the library's."""
    lose = "from flashinfer_msa.indexer import MSAIcpIndexerPlan as Plan\npublish = Plan.decode_publish\n"
    lose += "Plan.decode_publish = lambda self, *args, **form: self.rank == 1 or publish(self, *args, **form)\n"
    monkeypatch.setattr(doctor, "_PROGRAM", HEAD + lose + TAIL)
    (finding,) = child("self-test", "cpu")
    assert finding.status == "failure" and finding.text.startswith("P128-TP2: ")
    assert "for rank 1 to publish the legacy receive row" in finding.text
    assert "Restart the ranks of the group" in finding.text


# --- FlashInfer -------------------------------------------------------------------------------------------------------

Site = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Makes files in a folder that comes first on the path, here and in children."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(**files: str) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(content)
        return tmp_path

    return make


FLASHINFER = {"flashinfer/__init__.py": "__version__ = '0.7.4'\n", "flashinfer/msa_ops/__init__.py": "__all__ = []\n"}


def distribution(name: str, version: str = "1.0", entry_points: str = "") -> dict[str, str]:
    """Metadata of an installed package."""
    folder = f"{name}-{version}.dist-info"
    files = {f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    return {**files, f"{folder}/entry_points.txt": entry_points} if entry_points else files


PLUGIN = distribution(
    "some_plugin",
    entry_points="[vllm.general_plugins]\nflashinfer_msa = flashinfer_msa.integrations.flashinfer:register_in_vllm\n",
)


def test_registration_in_flashinfer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site(**FLASHINFER)
    (finding,) = child("FlashInfer")
    assert (finding.status, finding.name) == ("ok", "registration"), finding
    assert re.fullmatch(r"possible in FlashInfer 0\.7\.4: \d+ functions are added, 0 replaced", finding.text)
    monkeypatch.setenv("FLASHINFER_MSA_REGISTER", "everything")
    (finding,) = child("FlashInfer")
    assert finding.status == "warning" and "FLASHINFER_MSA_REGISTER must be one of auto, plugin" in finding.text


def test_a_flashinfer_that_does_not_fit_is_a_warning(site: Site) -> None:
    site(**{"flashinfer/__init__.py": "__version__ = '0.5'\n"})
    (finding,) = child("FlashInfer")
    assert (finding.status, finding.name) == ("warning", "registration")
    assert "FlashInfer 0.5 has no msa_ops, so nothing is registered" in finding.text
    assert finding.text.count("has no msa_ops") == 1


def test_a_flashinfer_that_cannot_be_imported_is_a_failure(site: Site) -> None:
    site(**{"flashinfer/__init__.py": "raise OSError('libcudart.so.13: not found')\n"})
    (finding,) = child("FlashInfer")
    assert (finding.status, finding.name) == ("failure", "import")
    assert finding.text == "cannot be imported: OSError: libcudart.so.13: not found"


@pytest.mark.skipif(doctor._version_of("flashinfer-python") is not None, reason="FlashInfer is installed")
def test_no_flashinfer_is_nothing_to_register_in() -> None:
    (finding,) = child("FlashInfer")
    assert (finding.status, finding.name) == ("ok", "registration") and "is not installed" in finding.text


@pytest.mark.parametrize(
    ("plugin", "variables", "status", "words"),
    (
        (True, {}, "ok", "its plugin flashinfer_msa registers, prefer='auto'"),
        (True, {"FLASHINFER_MSA_REGISTER": "plugin"}, "ok", "registers, prefer='plugin'"),
        (True, {"FLASHINFER_MSA_REGISTER": "off"}, "ok", "registers nothing; see FLASHINFER_MSA_REGISTER"),
        (True, {"VLLM_PLUGINS": "lora,flashinfer_msa"}, "ok", "registers, prefer='auto'"),
        (True, {"VLLM_PLUGINS": "lora"}, "warning", "loads no plugin flashinfer_msa, since VLLM_PLUGINS names others"),
        (False, {}, "warning", "its plugin is not among the entry points"),
    ),
)
def test_vllm_and_its_plugin(
    site: Site, monkeypatch: pytest.MonkeyPatch, plugin: bool, variables: dict[str, str], status: str, words: str
) -> None:
    site(**distribution("vllm"), **(PLUGIN if plugin else {}))
    if not plugin:
        # Whether or not this environment has the entry point.
        monkeypatch.setattr(doctor.metadata, "entry_points", lambda **group: ())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    prefer = variables.get("FLASHINFER_MSA_REGISTER", "auto")
    (finding,) = doctor._vllm(None if prefer == "off" else SimpleNamespace(prefer=prefer))
    assert finding.status == status and words in finding.text


def test_what_vllm_does_is_done(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site(**FLASHINFER, **distribution("vllm"), **PLUGIN)
    monkeypatch.setenv("FLASHINFER_MSA_REGISTER", "plugin")
    registration, vllm = child("FlashInfer")
    assert registration.status == vllm.status == "ok" and "registers, prefer='plugin'" in vllm.text


# --- the report -------------------------------------------------------------------------------------------------------


def test_everything_is_examined_and_nothing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that raises is a finding; the others are made, GPUs are tested by themselves and then together."""
    started: list[tuple[str, ...]] = []

    def start(children: Any, section: str, *devices: str) -> Callable[[], list[Finding]]:
        started.append((section, *devices))
        groups = ((), ("cuda:0",), ("cuda:1",), ("cuda:0", "cuda:1")) if section == "GPUs" else ((),)
        return lambda: [Finding("ok", section, ", ".join(devices), "", devices=group) for group in groups]

    def fail() -> Iterator[Finding]:
        yield Finding("ok", "compilers", "first", "was found")
        raise OSError("disk on fire")

    monkeypatch.setattr(doctor, "_start", start)
    monkeypatch.setattr(doctor, "_compilers", fail)
    report = doctor.examine()
    assert started[:2] == [("GPUs",), ("FlashInfer",)]
    assert started[2:] == [("self-test", "cuda:0"), ("self-test", "cuda:1"), ("self-test", "cuda:0", "cuda:1")]
    assert one(report.findings, "compilers", "first").text == "was found"
    broken = one(report.findings, "compilers", "compilers")
    assert broken.status == "failure" and broken.text == "could not be examined: OSError: disk on fire"
    assert not report.ok
    sections = list(dict.fromkeys(finding.section for finding in report.findings))
    assert sections == ["package", "environment", "installation", "compilers", "GPUs", "FlashInfer", "self-test"]


REPORT = Report(
    (
        Finding("ok", "package", "torch", "2.13"),
        Finding("warning", "package", "flashinfer-python", "not installed", "pip install it"),
        Finding("failure", "GPUs", "cuda:0", "device must be in [0, 63]", "look [bold]twice[/bold]"),
    )
)


def test_the_exit_status_is_that_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for report, status in ((REPORT, 1), (Report(REPORT.findings[:2]), 0)):
        monkeypatch.setattr(doctor, "examine", lambda report=report: report)
        for options in ((), ("--json",)):
            assert CliRunner().invoke(main, ["doctor", *options]).exit_code == status


def test_the_printed_report_has_every_word_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: REPORT)
    words = CliRunner().invoke(main, ["doctor"]).output
    assert [line.rstrip() for line in words.splitlines()] == [
        "package",
        "  ok       torch              2.13",
        "  warning  flashinfer-python  not installed",
        "                              -> pip install it",
        "GPUs",
        "  failure  cuda:0  device must be in [0, 63]",
        "                   -> look [bold]twice[/bold]",
        "FAILED: 1 of 3 findings (GPUs, cuda:0)",
    ]
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    assert report["ok"] is False and len(report["findings"]) == 3
    for found in report["findings"]:
        assert found.keys() == {"status", "section", "name", "text", "advice"}
        assert all(part in words for part in found.values())


def test_the_last_line_counts_warnings() -> None:
    for count, words in ((0, "0 warnings"), (1, "1 warning"), (2, "2 warnings")):
        console = Console(width=80)
        with console.capture() as printed:
            print_report(Report(REPORT.findings[:1] + REPORT.findings[1:2] * count), console)
        assert printed.get().endswith(f"ok: {count + 1} findings, {words}\n")


def test_the_process_itself_stays_clear_of_torch_and_cuda() -> None:
    """What a broken torch, FlashInfer or driver does, it does to a child."""
    program = (
        "import sys\nfrom flashinfer_msa.cli import doctor\n"
        "doctor._start = lambda children, *task: lambda: []\n"
        "report = doctor.examine()\n"
        "print(len(report.findings) > 10, 'torch' in sys.modules, 'flashinfer' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True False False\n"


def test_an_interrupted_examination_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(100)"
    monkeypatch.setattr(doctor, "_PROGRAM", HEAD + program)

    def interrupt() -> Iterator[Finding]:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(doctor, "_package", interrupt)
    with pytest.raises(KeyboardInterrupt):
        doctor.examine()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
