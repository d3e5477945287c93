# SPDX-License-Identifier: Apache-2.0
"""The manifest, the loader, fault records, and what loads what: none of it needs a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer_msa
from flashinfer_msa import last_fault, msa_ops
from flashinfer_msa.abi.schema import FAULT_FIELDS
from flashinfer_msa.aot.matrix import ARCHITECTURES
from flashinfer_msa.manifest import DATA, CubinSet, Manifest, load_manifest, read_manifest
from flashinfer_msa.runtime import loader, native
from flashinfer_msa.runtime.fault import Fault
from flashinfer_msa.runtime.loader import Kernels

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the installed data: the launcher, the manifest, and the first set of cubins in it."""
    installed = load_manifest()
    root = tmp_path / "data"
    cubins = installed.sets[0]
    shutil.copytree(DATA / cubins.architecture, root / cubins.architecture)
    shutil.copy(installed.launcher(), root)
    data = {**installed.data, "cubins": cubins.entries}
    (root / "manifest.json").write_text(json.dumps(data))
    return root


def merge_nothing(**changes: Any) -> None:
    """A valid call that has nothing to do."""
    arguments: dict[str, Any] = {
        "recv_slot": torch.zeros(2, 2, 3, 33, dtype=torch.int32),
        "num_valid_pages": torch.zeros(0, dtype=torch.int32),
        "output": torch.zeros(0, 2, 16, dtype=torch.int32),
        "errors": torch.zeros(1, dtype=torch.int32),
        "init_blocks": 0,
        "local_blocks": 0,
        "backend": "torch",
    }
    msa_ops.msa_icp_merge_candidates(**{**arguments, **changes})


# --- manifest ---------------------------------------------------------------------------------------------------------


def test_the_installed_manifest_is_intact() -> None:
    installed = load_manifest()
    assert installed.launcher().is_file()
    for cubins in installed.sets:
        assert cubins.toolkit.startswith(("nvcc ", "NVRTC ")) and cubins.driver in ((12, 0), (13, 0))
        for entry in cubins.entries:
            content = installed.read_cubin(entry)
            assert content.startswith(b"\x7fELF")
            if cubins.architecture in ("sm_89", "sm_90a"):
                # Of GPUs that drivers before CUDA 12.8 know: the ABI version that these load, and one that they do not.
                assert content[8] == (7 if cubins.driver[0] == 12 else 8)


def test_a_missing_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"manifest\.json does not exist, so no kernels are installed: install a "
    ):
        read_manifest(tmp_path)
    with pytest.raises(FileNotFoundError, match="`flashinfer-msa build`"):
        read_manifest(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "says"),
    (
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[]", "must have schema 2, has None"),
        (b"null", "must have schema 2, has None"),
        (b"{}", "must have schema 2, has None"),
        (b'{"schema": 1}', "must have schema 2, has 1"),
        (b'{"schema": "2"}', "must have schema 2, has 2"),
    ),
)
def test_a_broken_manifest_says_what_to_do(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(RuntimeError, match=rf"manifest\.json {says}.*: reinstall the package, or build it again"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    (
        (lambda data: data.pop("cubins"), "lacks 'cubins'"),
        (lambda data: data["cubins"][0].pop("driver"), "lacks 'driver'"),
        (lambda data: data["cubins"][0].pop("sha256"), "lacks 'sha256'"),
        (lambda data: data["launcher"].pop("file"), "lacks 'file'"),
        (lambda data: data["cubins"][0].update(driver=None), "is not as it was written"),
        (lambda data: data["cubins"][0].update(driver=["12", "0"]), "capability and driver must be integers"),
        (lambda data: data["cubins"][0].update(capability=9), "is not as it was written"),
        (lambda data: data.update(cubins=[[]]), "is not as it was written"),
        (lambda data: data.update(launcher=[1]), "is not as it was written"),
        (lambda data: data["cubins"][0].update(file="../x.cubin"), "file must lie in the folder, was '../x.cubin'"),
        (lambda data: data["launcher"].update(file="/x.so"), "file must lie in the folder, was '/x.so'"),
    ),
)
def test_a_manifest_of_odd_contents_says_what_to_do(tmp_path: Path, change: Callable[[Any], Any], says: str) -> None:
    data = json.loads(json.dumps(load_manifest().data))
    change(data)
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(RuntimeError, match=rf"manifest\.json .*{re.escape(says)}.*: .*reinstall the package"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("kind", (KeyboardInterrupt, SystemExit, MemoryError, RuntimeError, ValueError))
def test_what_the_loader_raises_comes_out_as_it_is(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    """The launcher calls the loader, and passes on only a text."""
    cause = OSError("no space")

    def fail(index: int) -> None:
        raise kind("on purpose") from cause

    def launch() -> None:
        try:
            native._load_device(0)
        except BaseException as error:
            raise RuntimeError(str(error)) from None

    monkeypatch.setattr(native, "_device_loader", [fail])
    with pytest.raises(kind, match="on purpose") as caught:
        native.invoke(launch)
    assert caught.value.__cause__ is cause

    def fail_otherwise() -> None:
        raise RuntimeError("another")

    with pytest.raises(RuntimeError, match="another"):
        native.invoke(fail_otherwise)


def test_a_manifest_that_is_a_folder_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(RuntimeError, match=r"cannot be read .*reinstall the package"):
        read_manifest(tmp_path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: tuple[tuple[Callable[[Path], Any], str], ...] = (
    (flip, "is not the file that was built: its SHA-256 is [0-9a-f]{64}, the manifest says [0-9a-f]{64}"),
    (lambda path: os.truncate(path, path.stat().st_size - 1), "is not the file that was built"),
    (lambda path: os.truncate(path, 0), "is not the file that was built"),
    (Path.unlink, r"is in the manifest but cannot be read \(No such file or directory\)"),
)


@pytest.mark.parametrize(("damage", "says"), DAMAGE, ids=("tampered", "truncated", "empty", "missing"))
def test_a_damaged_file_is_refused(copied: Path, damage: Callable[[Path], Any], says: str) -> None:
    manifest = read_manifest(copied)
    entries = manifest.sets[0].entries
    damage(copied / entries[-1]["file"])
    assert manifest.read_cubin(entries[0])
    with pytest.raises(RuntimeError, match=f"{entries[-1]['file']} {says}.*reinstall the package, or build it again"):
        manifest.read_cubin(entries[-1])
    assert manifest.launcher() == copied / "libflashinfer_msa.so"
    damage(copied / "libflashinfer_msa.so")
    with pytest.raises(RuntimeError, match=f"libflashinfer_msa.so {says}.*reinstall the package, or build it again"):
        manifest.launcher()


@pytest.mark.parametrize(("damage", "says"), DAMAGE, ids=("tampered", "truncated", "empty", "missing"))
def test_a_damaged_launcher_is_never_loaded(
    copied: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], says: str
) -> None:
    import tvm_ffi

    damage(copied / "libflashinfer_msa.so")
    monkeypatch.setattr(native, "load_manifest", lambda: read_manifest(copied))
    monkeypatch.setattr(native, "operation", lambda name: native._load_library.__wrapped__()[name])
    monkeypatch.setattr(tvm_ffi, "load_module", lambda path: pytest.fail("was loaded"))
    for changes in ({}, {"output": torch.zeros(0, 2, 16, device="meta")}):
        with pytest.raises(RuntimeError, match=f"libflashinfer_msa.so {says}"):
            merge_nothing(**changes)


def test_a_call_without_an_installation_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_manifest", lambda: read_manifest(tmp_path))
    monkeypatch.setattr(native, "operation", lambda name: native._load_library.__wrapped__()[name])
    with pytest.raises(FileNotFoundError, match=r"no kernels are installed: install a wheel .* `flashinfer-msa build`"):
        merge_nothing()


# --- architectures ----------------------------------------------------------------------------------------------------

ALL = {name: architecture.capability for name, architecture in ARCHITECTURES.items()}


def manifest_of(architectures: dict[str, tuple[int, int]], majors: Sequence[int] = (12,)) -> Manifest:
    """A manifest with two cubins of each architecture by a compiler of each major version."""
    cubins = [
        {
            "architecture": name,
            "capability": list(capability),
            "driver": [major, 0],
            "toolkit": f"nvcc {major}.0.1",
            "tested_on": "",
        }
        for name, capability in architectures.items()
        for major in majors
    ]
    return Manifest(Path("nowhere"), {"cubins": [cubin for cubin in cubins for _ in range(2)]})


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    (
        *((ALL, capability, name) for name, capability in ALL.items()),
        # Architecture-specific code runs only on its own capability; no code runs on an older or another major.
        (ALL, (9, 1), None),
        (ALL, (10, 1), None),
        (ALL, (10, 4), None),
        (ALL, (12, 2), None),
        (ALL, (11, 1), None),
        (ALL, (8, 6), None),
        (ALL, (8, 0), None),
        (ALL, (7, 5), None),
        # Plain code runs on newer minor versions; the newest that fits serves.
        ({"sm_90": (9, 0)}, (9, 1), "sm_90"),
        ({"sm_90": (9, 0)}, (10, 0), None),
        ({"sm_90": (9, 0), "sm_90a": (9, 0)}, (9, 1), "sm_90"),
        ({"sm_90": (9, 0), "sm_90a": (9, 0)}, (9, 0), "sm_90a"),
        ({"sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9)}, (8, 9), "sm_89"),
        ({"sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9)}, (8, 7), "sm_86"),
        ({"sm_89": (8, 9), "sm_86": (8, 6), "sm_80": (8, 0)}, (8, 0), "sm_80"),
        ({"sm_100": (10, 0), "sm_103a": (10, 3)}, (10, 3), "sm_103a"),
        ({"sm_100": (10, 0), "sm_103a": (10, 3)}, (10, 4), "sm_100"),
        ({}, (9, 0), None),
    ),
)
def test_choice_of_an_architecture(
    architectures: dict[str, tuple[int, int]], capability: tuple[int, int], expected: str | None
) -> None:
    manifest = manifest_of(architectures)
    found = manifest.find(capability, (12, 4))
    assert (found and found.architecture) == expected
    assert manifest.architectures == list(architectures)
    if found:
        assert loader.find_kernels(manifest, capability, (12, 4), "cuda:0") == Kernels(found.architecture, found)
        assert len(found.entries) == 2


@pytest.mark.parametrize(
    ("majors", "driver", "expected"),
    (
        ((12, 13), (13, 0), 13),
        ((12, 13), (13, 5), 13),
        ((12, 13), (14, 0), 13),
        ((12, 13), (12, 9), 12),
        ((12, 13), (12, 0), 12),
        ((12, 13), (11, 8), None),
        ((12,), (13, 0), 12),
        ((13,), (13, 0), 13),
        ((13,), (12, 9), None),
        ((12, 13), (0, 0), None),
    ),
)
def test_choice_of_a_set_by_the_driver(majors: Sequence[int], driver: tuple[int, int], expected: int | None) -> None:
    """The newest that the driver loads; where there is none, what this machine can compile."""
    found = loader.find_kernels(manifest_of(ALL, majors), (9, 0), driver, "cuda:0")
    assert found.architecture == "sm_90a"
    assert (found.prebuilt and found.prebuilt.driver[0]) == expected


def test_cubins_of_one_source_are_alike_whoever_compiled_them() -> None:
    """What ranks compare is the same for a set of either compiler, and for kernels that are compiled later."""
    sets = [cubins for cubins in load_manifest().sets if cubins.architecture == "sm_90a"]
    digests = [Kernels("sm_90a", cubins).source_digests() for cubins in [*sets, None]]
    assert len(digests) > 1 and len(set(map(tuple, digests))) == 1


def test_an_architecture_that_is_not_prebuilt_is_compiled() -> None:
    assert loader.find_kernels(manifest_of({}), (9, 0), (13, 0), "cuda:0") == Kernels("sm_90a", None)
    assert loader.find_kernels(manifest_of({"sm_90a": (9, 0)}), (12, 1), (13, 0), "cuda:0") == Kernels("sm_121a", None)


@pytest.mark.parametrize(("stated", "expected"), (("12.4", (12, 4)), ("13", (13, 0)), ("12.10", (12, 10))))
def test_the_drivers_version_can_be_stated(
    monkeypatch: pytest.MonkeyPatch, stated: str, expected: tuple[int, int]
) -> None:
    monkeypatch.setenv("FLASHINFER_MSA_DRIVER", stated)
    assert loader.driver_version.__wrapped__() == expected


@pytest.mark.parametrize("stated", ("new", "12.x", ".4", "-12", "12.4.1"))
def test_a_version_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, stated: str) -> None:
    monkeypatch.setenv("FLASHINFER_MSA_DRIVER", stated)
    with pytest.raises(ValueError, match=f"FLASHINFER_MSA_DRIVER must be a CUDA version such as 12.4, was '{stated}'"):
        loader.driver_version.__wrapped__()


@without_cuda
def test_without_a_driver_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_MSA_DRIVER", raising=False)
    assert loader.driver_version.__wrapped__() == (0, 0)


def test_an_unsupported_gpu_says_what_is_installed_and_what_to_do() -> None:
    with pytest.raises(ValueError) as caught:
        loader.find_kernels(manifest_of({"sm_89": (8, 9)}), (7, 5), (13, 0), "cuda:3")
    message = str(caught.value)
    assert message.startswith("device must be ")
    for part in (
        "was cuda:3 of compute capability 7.5",
        "installed: sm_89; ",
        f"can be compiled: {', '.join(ALL)}.",
    ):
        assert part in message
    assert "backend='torch'" in message
    with pytest.raises(ValueError, match="installed: none"):
        loader.find_kernels(manifest_of({}), (9, 1), (13, 0), "cuda:0")


# --- loading ----------------------------------------------------------------------------------------------------------


class FakeLauncher:
    """Stands for the native calls of the loader, and keeps what was called in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cubins: CubinSet, manifest: Manifest | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail_at: int | None = None
        for name in ("load_cubin", "load_kernel", "mark_ready"):
            monkeypatch.setattr(native, name, self._record(name))
        monkeypatch.setattr(loader, "kernels_of", lambda device: Kernels(cubins.architecture, cubins))
        monkeypatch.setattr(loader, "_loaded", {})
        if manifest is not None:
            monkeypatch.setattr(loader, "load_manifest", lambda: manifest)

    def _record(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if self.fail_at == len(self.calls):
                raise RuntimeError("loading failed")
            self.calls.append((name, *arguments))
            return len(self.calls)  # serves as the module's handle

        return call


@pytest.fixture
def cubins() -> CubinSet:
    return load_manifest().sets[-1]


def expected_calls(cubins: CubinSet, index: int) -> list[tuple[Any, ...]]:
    """The native calls that make every kernel of a set resident, ready last."""
    manifest = load_manifest()
    calls: list[tuple[Any, ...]] = []
    for entry in cubins.entries:
        calls.append(("load_cubin", index, manifest.read_cubin(entry)))
        module = len(calls)
        page_size, world_size = map(int, entry["layout"][1:].split("_tp")) if entry["layout"] else (0, 0)
        for kernel in entry["kernels"]:
            numbers = (kernel["role"], kernel["symbol"], kernel["threads"], kernel["shared_bytes"])
            calls.append(("load_kernel", index, module, page_size, world_size, *numbers))
    return [*calls, ("mark_ready", index)]


def test_load_device_loads_every_kernel_once_and_is_ready_last(
    monkeypatch: pytest.MonkeyPatch, cubins: CubinSet
) -> None:
    launcher = FakeLauncher(monkeypatch, cubins)
    loader.load_device(1)
    assert launcher.calls == expected_calls(cubins, 1)
    layouts_and_roles = [call[3:6] for call in launcher.calls if call[0] == "load_kernel"]
    assert len(set(layouts_and_roles)) == len(layouts_and_roles)
    assert {(page, world) for page, world, _ in layouts_and_roles} == {(0, 0), (128, 2), (128, 4), (256, 2), (256, 4)}
    loader.load_device(1)
    assert launcher.calls == expected_calls(cubins, 1)
    loader.load_device(0)
    assert launcher.calls[-1] == ("mark_ready", 0) and len(launcher.calls) == 2 * len(expected_calls(cubins, 0))


@pytest.mark.parametrize("fail_at", (0, 3, -1), ids=("the first cubin", "a kernel", "the end"))
def test_a_failure_leaves_the_device_loadable(monkeypatch: pytest.MonkeyPatch, cubins: CubinSet, fail_at: int) -> None:
    launcher = FakeLauncher(monkeypatch, cubins)
    launcher.fail_at = fail_at % len(expected_calls(cubins, 0))
    with pytest.raises(RuntimeError, match="loading failed"):
        loader.load_device(0)
    assert not any(name == "mark_ready" for name, *_ in launcher.calls)
    launcher.fail_at, launcher.calls = None, []
    loader.load_device(0)
    assert launcher.calls == expected_calls(cubins, 0)


@pytest.mark.parametrize(("damage", "says"), DAMAGE, ids=("tampered", "truncated", "empty", "missing"))
def test_a_device_with_a_damaged_cubin_is_never_ready(
    monkeypatch: pytest.MonkeyPatch, copied: Path, damage: Callable[[Path], Any], says: str
) -> None:
    manifest = read_manifest(copied)
    launcher = FakeLauncher(monkeypatch, manifest.sets[0], manifest)
    damage(copied / manifest.data["cubins"][-1]["file"])
    with pytest.raises(RuntimeError, match=says):
        loader.load_device(0)
    assert not any(name == "mark_ready" for name, *_ in launcher.calls)


@without_cuda
def test_the_launcher_loads_and_checks_without_a_driver() -> None:
    merge_nothing()
    with pytest.raises(RuntimeError, match=r"libcuda\.so\.1 cannot be loaded: no NVIDIA driver is installed"):
        native.load_cubin(0, b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"libcuda\.so\.1 cannot be loaded"):
        native.load_kernel(0, 0, 128, 2, "decode_score_1", "symbol", 128, 0)
    with pytest.raises(RuntimeError, match=r"libcuda\.so\.1 cannot be loaded"):
        native.enable_peer_access(0, 1)


def test_the_launcher_needs_no_cuda_library() -> None:
    content = load_manifest().launcher().read_bytes()
    assert b"libcudart" not in content and b"libtorch" not in content
    assert b"libcuda.so.1" in content, "the driver is looked for at first use"


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        ((64, b""), r"device must be in \[0, 63\], was 64"),
        ((-1, b""), r"device must be in \[0, 63\], was -1"),
    ),
)
def test_the_launcher_checks_what_the_loader_gives_it(arguments: Sequence[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        native.load_cubin(*arguments)
    with pytest.raises(ValueError, match=says):
        native.mark_ready(arguments[0])
    with pytest.raises(ValueError, match=r"role must be .*, was polish"):
        native.load_kernel(0, 0, 128, 2, "polish", "symbol", 128, 0)
    with pytest.raises(ValueError, match=r"page_size and world_size must be .*, were 64 and 2"):
        native.load_kernel(0, 0, 64, 2, "decode_score_1", "symbol", 128, 0)
    with pytest.raises(ValueError, match=r"threads must be in \[1, 1024\], was 1025"):
        native.load_kernel(0, 0, 128, 2, "decode_score_1", "symbol", 1025, 0)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "says"),
    (
        (
            Fault("publish", "legacy", 1, 2, 3, 0, 17, 1 << 26, 0),
            "rank 1 on cuda:0 waited 67108864 polls for rank 3 to merge and release the legacy receive row 17 (owned "
            "head 0) of slot set 2, and gives up. Either rank 3 stopped before its merge, the slot sets do not rotate, "
            "or the receive storage was not zeroed before its first use. Restart the ranks of the group.",
        ),
        (
            Fault("merge", "legacy", 0, 1, 1, 1, 4, 5),
            "rank 0 waited 5 polls for rank 1 to publish the legacy receive row 4 (owned head 1) of slot set 1, and "
            "gives up. Either rank 1 stopped or never published this layer, the ranks disagree on slot, capacity or "
            "row kind, or the receive storage and counters were not zeroed together. Restart the ranks of the group.",
        ),
        (
            Fault("merge", "tagged", None, None, 2, 0, 9, 5, 3),
            "a rank on cuda:3 waited 5 polls for rank 2 to publish the tagged receive row 9 (owned head 0), and gives "
            "up. Either rank 2 stopped or never published this layer, the ranks disagree on slot, capacity or row "
            "kind, or the receive storage and counters were not zeroed together. Restart the ranks of the group.",
        ),
        (
            Fault("merge", "tagged", 1, 0, 0, 0, 2, 1 << 21, 0, 1.503),
            "rank 1 on cuda:0 waited 2097152 polls (1.5 s) for rank 0 to publish the tagged receive row 2 (owned head "
            "0) of slot set 0, and gives up. Either rank 0 stopped or never published this layer, the ranks disagree "
            "on slot, capacity or row kind, or the receive storage and counters were not zeroed together. Restart the "
            "ranks of the group.",
        ),
    ),
)
def test_a_fault_in_words(record: Fault, says: str) -> None:
    assert str(record) == says


def test_there_is_no_fault_before_one_happens() -> None:
    assert last_fault() is None
    merge_nothing()
    assert last_fault() is None and flashinfer_msa.Fault is Fault
    assert [native.operation("fault_field")(63, field) for field in FAULT_FIELDS] == [0] * len(FAULT_FIELDS)


def fake_records(monkeypatch: pytest.MonkeyPatch, *records: Sequence[int]) -> None:
    """Devices whose fault records hold these words."""
    native.library()  # there is no fault to look for before
    real = native.operation
    words = {"fault_field": lambda device, field: records[device][FAULT_FIELDS.index(field)]}
    monkeypatch.setattr(native, "operation", lambda name: words.get(name) or real(name))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(records))


EMPTY = (0,) * len(FAULT_FIELDS)


@pytest.mark.parametrize(
    ("records", "expected"),
    (
        ((), None),
        ((EMPTY, EMPTY), None),
        # Words of a record that is not complete yet.
        (((0, 1, 0, 3, 2, 1, 0, 9, 4, 0),), None),
        (((1, 1, 0, 3, 2, 1, 0, 9, 4, 0),), Fault("publish", "legacy", 3, 2, 1, 0, 9, 4, 0)),
        ((EMPTY, (1, 2, 1, -1, -1, 1, 0, 9, 4, 0)), Fault("merge", "tagged", None, None, 1, 0, 9, 4, 1)),
        ((EMPTY, (1, 2, 0, 0, 0, 1, 0, 9, 4, 2500)), Fault("merge", "legacy", 0, 0, 1, 0, 9, 4, 1, 2.5)),
    ),
)
def test_last_fault_reads_the_records(
    monkeypatch: pytest.MonkeyPatch, records: Sequence[Sequence[int]], expected: Fault | None
) -> None:
    fake_records(monkeypatch, *records)
    assert last_fault() == expected


def test_a_call_after_a_fault_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # The call's tensors are on no CUDA device, like the second record: the first is another device's.
    record = Fault("merge", "tagged", None, None, 1, 0, 9, 4)
    records = [Fault("publish", "legacy", 0, 1, 1, 0, 9, 4, 5), record]
    monkeypatch.setattr(native, "faults", lambda: iter(records))

    def operation(name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            raise RuntimeError("an earlier wait on cuda:1 ran out")

        return call

    monkeypatch.setattr(native, "operation", operation)
    with pytest.raises(RuntimeError) as caught:
        merge_nothing()
    assert str(caught.value) == str(record)
    assert "an earlier wait on cuda:1 ran out" in str(caught.value.__cause__)
    # A bad argument is reported as one, fault or not.
    monkeypatch.undo()
    monkeypatch.setattr(native, "faults", lambda: iter(records))
    with pytest.raises(ValueError, match=r"^output must be torch.int32, was torch.float32"):
        merge_nothing(output=torch.zeros(0, 2, 16))


# --- what loads what --------------------------------------------------------------------------------------------------


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that imports this checkout."""
    root = str(Path(flashinfer_msa.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_importing_the_package_imports_no_torch() -> None:
    run_python(
        """
        import sys
        import flashinfer_msa
        assert flashinfer_msa.__version__
        loaded = {name.split(".")[0] for name in sys.modules}
        assert not loaded & {"torch", "tvm_ffi", "numpy", "flashinfer", "jinja2", "ninja", "triton"}, loaded
        try:
            flashinfer_msa.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
        else:
            raise AssertionError
        """
    )


def test_kernels_are_found_and_listed_without_optional_packages() -> None:
    """What a plain installation has: neither FlashInfer nor what compiles kernels, and nothing that torch may bring."""
    done = run_python(
        """
        import sys
        for name in ("flashinfer", "jinja2", "ninja", "setuptools", "ziglang", "elftools"):
            sys.modules[name] = None  # importing it raises ImportError
        from flashinfer_msa import Fault, comm, last_fault, msa_ops
        from flashinfer_msa.cli.main import main
        from flashinfer_msa.runtime.loader import find_kernels
        from flashinfer_msa.manifest import load_manifest

        manifest = load_manifest()
        assert manifest.sets and last_fault() is None
        for cubins in manifest.sets:
            kernels = find_kernels(manifest, cubins.capability, cubins.driver, "cuda:0")
            assert kernels.prebuilt is cubins and kernels.source_digests()
            assert all(manifest.read_cubin(entry) for entry in cubins.entries)
        main(["list"], standalone_mode=False)
        """
    )
    manifest = load_manifest()
    for cubins in manifest.sets:
        assert f"{cubins.architecture} {cubins.origin}: {cubins.status}" in done.stdout
    assert f"{len(manifest.data['cubins'])} cubins" in done.stdout


def test_the_torch_backend_works_without_flashinfer_or_build_tools() -> None:
    run_python(
        """
        import sys
        for name in ("flashinfer", "jinja2", "ninja", "triton", "setuptools", "ziglang"):
            sys.modules[name] = None  # importing it raises ImportError
        import torch
        before = set(sys.modules)
        import flashinfer_msa
        import flashinfer_msa.msa_ops
        assert flashinfer_msa.last_fault() is None
        from flashinfer_msa import comm, msa_ops
        from flashinfer_msa.layout import LAYOUTS
        from flashinfer_msa.testing.problems import DecodeProblem, brute_force_top16

        problem = DecodeProblem.random(LAYOUTS["p256_tp2"], seq_lens=(5000, 300), decode_query_len=2)
        limits = dict(
            world_size=2, num_index_heads=4, page_size=256, init_blocks=1, local_blocks=1, max_decode_tokens=4,
            max_decode_query_len=2, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=8192,
            num_sparse_layers=4, device="cpu", backend="torch",
        )
        plans = [msa_ops.prepare_msa_icp_indexer(rank=rank, **limits) for rank in range(2)]
        comms = comm.local_comm(plans)
        step = dict(slot=2, tagged=True)
        for plan, ours in zip(plans, comms):
            plan.warmup()
            scores = torch.empty(plan.decode_scores_shape())
            plan.decode_publish(
                problem.index_q, problem.shard(plan.rank), problem.block_table, problem.seq_lens,
                problem.num_valid_pages, scores, comm=ours, decode_query_len=2, **step,
            )
        outputs = [torch.empty(4, 2, 16, dtype=torch.int32) for _ in plans]
        for plan, ours, output in zip(plans, comms, outputs):
            plan.decode_merge(problem.num_valid_pages, output, comm=ours, **step)
        expected = brute_force_top16(problem, init_blocks=1, local_blocks=1).ids
        assert torch.equal(torch.cat(outputs, dim=1), expected)
        blocked = ("flashinfer", "jinja2", "ninja", "triton", "setuptools", "ziglang")
        added = set(sys.modules) - before
        assert not [name for name in added if name.split(".")[0] in blocked]
        """
    )


def test_nothing_starts_a_compiler() -> None:
    done = run_python(
        """
        import sys
        import torch
        started = []
        watched = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.spawn")
        sys.addaudithook(lambda event, arguments: started.append(arguments) if event in watched else None)
        from flashinfer_msa import msa_ops
        words = torch.zeros(2, 2, 3, 33, dtype=torch.int32)
        one, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, 16, dtype=torch.int32)
        for backend in ("cake", "torch"):
            try:
                msa_ops.msa_icp_merge_candidates(
                    words, one, out, one, init_blocks=0, local_blocks=0, prefill=True, backend=backend
                )
            except ValueError as error:
                print(error)
        assert not started, started
        """
    )
    assert done.stdout == "num_valid_pages must be on a CUDA device, was on cpu\n"
