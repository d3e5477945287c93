# SPDX-License-Identifier: Apache-2.0
"""Examines an installation and its machine: reports what a bug report needs and what would fail.

Everything that imports torch or FlashInfer, or uses a GPU, runs in a separate process with a time limit. So a crashing
library, a driver that does not answer or a hanging kernel becomes a finding.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ..aot.toolkit import dotted
from ..version import __version__
from .findings import Finding, Report, Status

SECONDS = 300.0
"""Time limit of a child process. It includes just-in-time compilation of kernels."""
VARIABLES = (
    "FLASHINFER_MSA_ARCHITECTURES",
    "FLASHINFER_MSA_DRIVER",
    "FLASHINFER_MSA_NVCC",
    "FLASHINFER_MSA_PREBUILT",
    "FLASHINFER_MSA_REGISTER",
    "FLASHINFER_MSA_TVM_FFI",
)
"""Environment variables with the package's prefix that the installed package reads."""
GROUP = 4
"""Ranks of the largest group, so the most GPUs of a self-test."""
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from flashinfer_msa.cli import doctor
doctor.run_task({results!r}, *{task!r})
"""
_VALUE_LENGTH = 200
_LOG_LINES = 8
_REPORT = "report it with all of this output"
_REINSTALL = "reinstall flashinfer-msa"


def examine() -> Report:
    """Examine this installation and machine. It never raises: every error becomes a finding."""
    with contextlib.ExitStack() as children:
        survey, registration = _start(children, "GPUs"), _start(children, "FlashInfer")
        findings = [
            *_guarded("package", "package", _package),
            *_guarded("package", "requirements", _requirements),
            *_guarded("environment", "environment", _environment),
            *_guarded("installation", "manifest", _installation),
            *_guarded("compilers", "compilers", _compilers),
            *survey(),
        ]
        findings += registration()
        # First each GPU by itself, then groups: a GPU in exclusive mode must be in only one test at a time.
        for together in (False, True):
            devices = [each.devices for each in findings if each.devices and (len(each.devices) > 1) == together]
            tests = [_start(children, "self-test", *names) for names in devices]
            for test in tests:
                findings += test()
    return Report(tuple(findings))


def _guarded(section: str, name: str, probe: Callable[[], Any]) -> Iterator[Finding]:
    """Yield the findings of a probe. If the probe raises, the exception is the last finding."""
    try:
        yield from probe()
    except Exception as error:
        words = f"could not be examined: {type(error).__name__}: {error}"
        yield Finding("failure", section, name or section, words, _REPORT)


# --- this process -----------------------------------------------------------------------------------------------------


def _package() -> Iterator[Finding]:
    """Examine this package, Python, the platform and the C library."""
    section = "package"
    where = Path(__file__).resolve().parents[1]
    try:
        installed = metadata.version("flashinfer-msa")
    except metadata.PackageNotFoundError:
        yield Finding("ok", section, "flashinfer-msa", f"{__version__} at {where}, on the path but not installed")
    else:
        status: Status = "ok" if installed == __version__ else "warning"
        words = "" if status == "ok" else f", installed as {installed}"
        yield Finding(status, section, "flashinfer-msa", f"{__version__} at {where}{words}", words and _REINSTALL)
    yield Finding("ok", section, "Python", f"{platform.python_version()} at {sys.executable}")
    yield Finding("ok", section, "platform", platform.platform())
    library, version = platform.libc_ver()
    if library == "glibc":
        yield Finding("ok", section, "glibc", version)
    else:
        words = f"not glibc, but {library or 'another C library'}"
        yield Finding("warning", section, "glibc", words, "the launcher of a wheel needs glibc: build the package here")


def _requirements() -> Iterator[Finding]:
    """Examine the required packages, and the servers that this package works in."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(line) for line in metadata.requires("flashinfer-msa") or ()]
    except metadata.PackageNotFoundError:
        lines = ("torch", "apache-tvm-ffi", "flashinfer-python; extra == 'flashinfer'")
        required = [Requirement(line) for line in lines]
    for requirement in required:
        marker = requirement.marker
        is_required = marker is None or marker.evaluate({"extra": ""})
        if not (is_required or (marker and marker.evaluate({"extra": "flashinfer"}))):
            continue
        found, install = _version_of(requirement.name), f"pip install '{requirement.name}{requirement.specifier}'"
        if found is None and is_required:
            yield Finding("failure", "package", requirement.name, "not installed", install)
        elif found is None:
            words = "not installed: prebuilt kernels run without it, but none can be compiled just in time"
            if requirement.name == "flashinfer-python":
                words += ", and no functions registered in FlashInfer"
            yield Finding("ok", "package", requirement.name, words, "pip install 'flashinfer-msa[flashinfer]'")
        elif not requirement.specifier.contains(found, prereleases=True):
            words = f"{found}, but must be {requirement.specifier}"
            yield Finding("failure" if is_required else "warning", "package", requirement.name, words, install)
        else:
            yield Finding("ok", "package", requirement.name, found)
    for name in ("vllm", "sglang"):
        if found := _version_of(name):
            yield Finding("ok", "package", name, found)


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _environment() -> Iterator[Finding]:
    """Report environment variables of this package, of FlashInfer and of CUDA, and no others."""
    section = "environment"
    found = False
    for name, value in sorted(os.environ.items()):
        if not name.startswith("FLASHINFER_") and name not in ("CUDA_HOME", "CUDA_VISIBLE_DEVICES"):
            continue
        found = True
        if name.startswith("FLASHINFER_MSA_") and name not in VARIABLES:
            advice = f"the variables of this package are {', '.join(VARIABLES)}"
            yield Finding("warning", section, name, "is not read by this package", advice)
        else:
            yield Finding("ok", section, name, _shown(name, value))
    if not found:
        yield Finding("ok", section, "variables", "no FLASHINFER_*, CUDA_HOME or CUDA_VISIBLE_DEVICES is set")


def _shown(name: str, value: str) -> str:
    """Return a value as text, shortened and without secrets."""
    if re.search("KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL", name, re.IGNORECASE):
        return "(set)"
    value = re.sub(r"//[^/\s]*@", "//...@", value)
    value = re.sub(r"(//[^?\s]*\?)\S+", r"\1...", value)
    return repr(value if len(value) <= _VALUE_LENGTH else f"{value[:_VALUE_LENGTH]}...")


def _installation() -> Iterator[Finding]:
    """Check the manifest and that every file it names is the built one."""
    from .. import manifest as installed

    section = "installation"
    try:
        manifest = installed.read_manifest(installed.DATA)
    except (OSError, RuntimeError) as error:
        yield Finding("failure", section, "manifest", str(error))
        return
    version = manifest.data["version"]
    words = f"of version {version} at {manifest.root / installed.FILE}"
    if version == __version__:
        yield Finding("ok", section, "manifest", words)
    else:
        yield Finding("warning", section, "manifest", f"{words}, where the package is {__version__}", _REINSTALL)
    yield from _launcher(manifest)
    if not manifest.sets:
        words = "none: kernels are compiled just in time"
        yield Finding("warning", section, "cubins", words, "install a wheel, or run `flashinfer-msa build`")
    for cubins in manifest.sets:
        errors = []
        for entry in cubins.entries:
            try:
                manifest.read_cubin(entry)
            except RuntimeError as error:
                errors.append(str(error))
        if errors:
            more = f" ({len(errors)} of {len(cubins.entries)} cubins)"
            yield Finding("failure", section, _set_name(cubins), errors[0] + more)
        else:
            words = f"{len(cubins.entries)} cubins, SHA-256 verified; {cubins.origin}, {cubins.status}"
            yield Finding("ok", section, _set_name(cubins), words)


def _launcher(manifest: Any) -> Iterator[Finding]:
    """Check the launcher and that this system's C library is new enough for it."""
    compiler = manifest.data["launcher"]["compiler"]
    try:
        words = f"{manifest.launcher().name}, SHA-256 verified; by {compiler}"
    except RuntimeError as error:
        yield Finding("failure", "installation", "launcher", str(error))
        return
    # The manifest names a glibc if the launcher was compiled for an older one than its build machine's.
    needed = re.search(r"glibc (\d+)\.(\d+)", compiler)
    library, version = platform.libc_ver()
    if needed and library == "glibc" and tuple(map(int, version.split(".")[:2])) < tuple(map(int, needed.groups())):
        advice = "use a newer system, or build the package here from source"
        yield Finding("failure", "installation", "launcher", f"{words}, where this system has {version}", advice)
    else:
        yield Finding("ok", "installation", "launcher", words)


def _set_name(cubins: Any) -> str:
    return f"{cubins.architecture}, CUDA {cubins.driver[0]}"


def _compilers() -> Iterator[Finding]:
    """Find compilers, which are needed only for kernels that are not prebuilt."""
    from ..aot import toolkit

    section = "compilers"
    try:
        found = toolkit.find()
    except toolkit.BuildError as error:
        yield Finding("failure", section, "FLASHINFER_MSA_NVCC", str(error), "set it to an nvcc that runs, or unset it")
        return
    for each in found:
        words = f"at {each.path}, makes cubins for drivers of CUDA {dotted(each.driver)} or newer"
        yield Finding("ok", section, each.name, words)
    if not found:
        yield Finding("ok", section, "compilers", "none found; only kernels that are not prebuilt need one")


# --- child processes --------------------------------------------------------------------------------------------------


def _start(children: contextlib.ExitStack, section: str, *devices: str) -> Callable[[], list[Finding]]:
    """Start the process that makes a section's findings; return a function that waits for them."""
    name = ", ".join(devices) or section
    try:
        child = _Child(children, section, name, devices)
    except OSError as error:
        failed = Finding("failure", section, name, f"no process could be started to examine it: {error}", _REPORT)
        return lambda: [failed]
    return lambda: list(_guarded(section, name, child.findings))


class _Child:
    """A process that makes a section's findings. Closing ``children`` ends it and deletes its files."""

    def __init__(self, children: contextlib.ExitStack, section: str, name: str, devices: Sequence[str]) -> None:
        self._section, self._name = section, name
        folder = Path(children.enter_context(tempfile.TemporaryDirectory(prefix="flashinfer-msa-doctor-")))
        self._results, self._log = folder / "results", folder / "log"
        self._results.touch()
        program = _PROGRAM.format(path=sys.path, results=str(self._results), task=(section, *devices))
        self._deadline = time.monotonic() + SECONDS
        with open(self._log, "wb") as log:
            # It gets its own process group, so that compilers that it has started end with it.
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        children.callback(self._kill)

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process that waits for the driver does not end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def findings(self) -> list[Finding]:
        """Wait for the process and return its findings. If it ended badly, the last finding says how."""
        advice = f"look for Xid messages of the driver in dmesg; {_REPORT}"
        try:
            status = self._process.wait(max(self._deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._kill()
            status, ended = -1, f"had not ended after {SECONDS:.0f} s, and was killed"
            advice = f"see whether nvidia-smi answers, and {advice}"
        else:
            ended = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        # An unfinished line does not count.
        lines = [json.loads(line) for line in self._results.read_text().rpartition("\n")[0].splitlines()]
        found = [Finding(**{**fields, "devices": tuple(fields["devices"])}) for fields in lines]
        if status or not found:
            log = self._log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
            words = "\n".join([f"the process that examined it {ended}", *log])
            found.append(Finding("failure", self._section, self._name, words, advice))
        return found


def run_task(results: str, section: str, *devices: str) -> None:
    """Write each finding as a line of JSON, and exit. Each child process runs this."""
    with open(results, "w") as file:
        for finding in _guarded(section, ", ".join(devices), partial(_TASKS[section], *devices)):
            print(json.dumps(asdict(finding)), file=file, flush=True)
    # Cleaning up a CUDA context after a fault could crash the process or never end.
    os._exit(0)


def _gpus() -> Iterator[Finding]:
    """Examine torch, the driver, and each GPU with the kernels that it would load."""
    import torch

    from ..runtime.loader import driver_version

    section = "GPUs"
    cuda = torch.version.cuda
    built = f"CUDA {cuda}" if cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"
    yield Finding("ok", section, "torch", f"{torch.__version__}, built for {built}")
    try:
        driver = driver_version()
    except ValueError as error:
        yield Finding("failure", section, "driver", str(error), "unset FLASHINFER_MSA_DRIVER, or correct it")
        return
    has_driver = driver != (0, 0)
    if os.environ.get("FLASHINFER_MSA_DRIVER"):
        words = f"{_driver_release()}; cubins are chosen as for CUDA {dotted(driver)}, as FLASHINFER_MSA_DRIVER says"
        yield Finding("warning", section, "driver", words, "unset it unless you are testing that choice")
    elif has_driver:
        yield Finding("ok", section, "driver", f"{_driver_release()}, CUDA {dotted(driver)}")
    else:
        yield Finding("ok", section, "driver", "none: libcuda.so.1 is not there, or does not answer")
    if cuda is None:
        words = "kernels cannot run here, since torch is not built for CUDA; backend='torch' runs on the CPU"
        status: Status = "warning" if has_driver else "ok"
        advice = "install a build of torch for CUDA, since there is a driver" if has_driver else ""
        yield Finding(status, section, "CUDA", words, advice, devices=("cpu",))
        return
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except Exception as error:
        words = f"torch cannot use a GPU: {error}"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        advice = f"this torch needs an NVIDIA driver for CUDA {cuda}, and a GPU that this process may use"
        if hidden is not None:
            advice += f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        advice += "; in a container, start it with access to the GPUs"
        yield Finding("failure", section, "CUDA", words, advice, devices=("cpu",))
        return
    usable = []
    for index in range(count):
        for finding in _guarded(section, f"cuda:{index}", partial(_gpu, index)):
            yield finding
            if finding.devices:
                usable.append(index)
    if count > 1:
        yield from _guarded("peer access", "peer access", partial(_peer_access, count, usable))


def _driver_release() -> str:
    """Return the release of the NVIDIA driver, such as 580.159.04."""
    try:
        found = re.search(r"(\d+\.\d+(\.\d+)?)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[1] if found else "of an unknown release"


def _gpu(index: int) -> Iterator[Finding]:
    """Examine one GPU and the kernels that it would load."""
    import torch

    from ..runtime.loader import driver_version, kernels_of

    section, device = "GPUs", torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(index)
    what = (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
    )
    try:
        kernels = kernels_of(device)
    except (OSError, RuntimeError, ValueError) as error:
        hide = "or hide it by CUDA_VISIBLE_DEVICES, where it is not to serve" if isinstance(error, ValueError) else ""
        yield Finding("failure", section, str(device), f"{what}; {error}", hide)
        return
    if kernels.prebuilt is not None:
        prebuilt = kernels.prebuilt
        words = f"{kernels.architecture} kernels are prebuilt {prebuilt.origin}, {prebuilt.status}"
    else:
        words = (
            f"{kernels.architecture} kernels are not prebuilt for a driver of CUDA {dotted(driver_version())}, "
            "and compiled just in time"
        )
    yield Finding("ok", section, str(device), f"{what}; {words}", devices=(str(device),))


def _peer_access(count: int, usable: Sequence[int]) -> Iterator[Finding]:
    """Report which GPUs each GPU reaches. Up to ``GROUP`` GPUs that reach one another are tested together."""
    import torch

    reach = {
        index: {peer for peer in range(count) if peer != index and torch.cuda.can_device_access_peer(index, peer)}
        for index in range(count)
    }
    groups: dict[int, tuple[str, ...]] = {}
    left = list(usable)
    while left:
        group = [left.pop(0)]
        for peer in list(left):
            if len(group) < GROUP and all(peer in reach[each] and each in reach[peer] for each in group):
                group.append(peer)
                left.remove(peer)
        if len(group) > 1:
            groups[group[0]] = tuple(f"cuda:{index}" for index in group)
    for index, peers in reach.items():
        status: Status = "ok" if peers else "warning" if any(reach.values()) else "failure"
        words = f"reaches {', '.join(f'cuda:{peer}' for peer in sorted(peers)) or 'no other GPU'}"
        advice = "ranks store into one another's memory: a group of them needs GPUs that reach one another"
        yield Finding(
            status, "peer access", f"cuda:{index}", words, "" if peers else advice, devices=groups.get(index, ())
        )


def _self_test(*devices: str) -> Iterator[Finding]:
    """Compare a tiny decode step with the brute force, for every layout and row kind, with all ranks on ``devices``."""
    import torch

    from ..layout import LAYOUTS
    from ..runtime.native import last_fault
    from ..testing.problems import Comparison
    from .demo import Demo, run_layout

    section, name = "self-test", ", ".join(devices)
    backend = "torch" if devices == ("cpu",) else "cake"
    demo = Demo(
        backend=backend,
        devices=[torch.device(device) for device in devices],
        batch=2,
        context=4000,  # has more blocks than are selected
        query_len=2,
        tokens=0,
        steps=1,
        seed=0,
    )
    total = Comparison()
    wrong = []
    started = time.perf_counter()
    for layout in LAYOUTS.values():
        try:
            results = run_layout(demo, layout, (False, True))
        except Exception as error:
            words = f"{layout.title}: {last_fault() or str(error) or repr(error)}"
            yield Finding("failure", section, name, words, f"where that does not say what to do, {_REPORT}")
            return
        for result in results:
            total = total.plus(result.counts)
            if result.counts.wrong:
                wrong.append(f"{layout.title} with {'tagged' if result.tagged else 'legacy'} rows")
    seconds = time.perf_counter() - started
    words = f"{total.rows - total.wrong} of {total.rows} rows of Top16 right, {len(LAYOUTS)} layouts, {seconds:.1f} s"
    words += f" (backend {backend!r})"
    if wrong:
        yield Finding("failure", section, name, f"{words}; wrong: {', '.join(wrong)}", _REPORT)
    else:
        yield Finding("ok", section, name, words)


def _flashinfer() -> Iterator[Finding]:
    """Check whether functions can be registered in FlashInfer, and which implementation each GPU would get."""
    import warnings

    section = "FlashInfer"
    if importlib.util.find_spec("flashinfer") is None:
        yield Finding("ok", section, "registration", "nothing to register in, since FlashInfer is not installed")
        return
    from ..integrations import flashinfer as registration

    said = _Messages()
    logging.getLogger("flashinfer_msa").addHandler(said)
    # vLLM does this in each of its processes. The import of FlashInfer then completes the registration.
    registration.register_in_vllm()
    try:
        importlib.import_module("flashinfer")
    except Exception as error:
        words = f"cannot be imported: {type(error).__name__}: {error}"
        advice = "repair it, or uninstall it: without it, kernels that are prebuilt run by flashinfer_msa.msa_ops"
        yield Finding("failure", section, "import", words, advice)
        return
    in_vllm = registration.registered()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registered = in_vllm or registration.register()
    complaints = (str(each.message) for each in caught if each.filename == __file__)
    warned = list(dict.fromkeys([*said.messages, *complaints]))
    if registered is None:
        yield Finding("warning", section, "registration", "; ".join(warned) or "not possible")
        return
    words = (
        f"possible in FlashInfer {registered.flashinfer_version}: {len(registered.added)} functions are added, "
        f"{len(registered.replaced)} replaced"
    )
    yield Finding("warning" if warned else "ok", section, "registration", "; ".join([words, *warned]))
    yield from _guarded(section, "vLLM", partial(_vllm, in_vllm))

    import torch

    for index in range(torch.cuda.device_count()):
        implementation, reason = registered.route(f"cuda:{index}")
        whose = "this package" if implementation == "plugin" else "FlashInfer's own functions"
        yield Finding("ok", section, f"cuda:{index}", f"registered calls go to {whose}: {reason}")


def _vllm(registered: Any) -> Iterator[Finding]:
    """Check whether vLLM's plugin registers, if vLLM is installed."""
    if _version_of("vllm") is None:
        return
    entry_points = metadata.entry_points(group="vllm.general_plugins")
    names = [each.name for each in entry_points if each.value.startswith("flashinfer_msa.")]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not names:
        words = "its plugin is not among the entry points of vllm.general_plugins"
        yield Finding("warning", "FlashInfer", "vLLM", words, _REINSTALL)
    elif allowed is not None and names[0] not in allowed.split(","):
        words = f"loads no plugin {names[0]}, since VLLM_PLUGINS names others"
        yield Finding("warning", "FlashInfer", "vLLM", words, f"add {names[0]} to VLLM_PLUGINS")
    elif registered is None:
        words = f"its plugin {names[0]} registers nothing; see FLASHINFER_MSA_REGISTER"
        yield Finding("ok", "FlashInfer", "vLLM", words)
    else:
        yield Finding("ok", "FlashInfer", "vLLM", f"its plugin {names[0]} registers, prefer={registered.prefer!r}")


class _Messages(logging.Handler):
    """Collects warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.messages.append(f"{record.getMessage()}{f' ({error!r})' if error else ''}")


_TASKS: dict[str, Callable[..., Iterator[Finding]]] = {
    "GPUs": _gpus,
    "FlashInfer": _flashinfer,
    "self-test": _self_test,
}
