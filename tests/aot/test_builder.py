# SPDX-License-Identifier: Apache-2.0
"""The builder: incremental, reproducible, atomic, and deaf to no complaint of ptxas. Runs on toy templates."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from flashinfer_msa.aot import build as builder
from flashinfer_msa.aot import launcher, matrix, ptxas, render, toolkit
from flashinfer_msa.aot.matrix import ARCHITECTURES, Kernel, Unit
from flashinfer_msa.aot.toolkit import BuildError, Toolkit
from flashinfer_msa.layout import LAYOUTS

KERNEL = """\
{% include "scale.cuh" %}
extern "C" __global__ void __launch_bounds__(128) toy(int* out, int n) {
  __shared__ int values[128];
  values[threadIdx.x] = n * kScale;
  __syncthreads();
  out[threadIdx.x] = values[127 - threadIdx.x];
}
"""
LOCAL_ARRAY = """\
extern "C" __global__ void toy(int* out, int n) {
  int values[64];
  for (int i = 0; i < 64; ++i) values[out[i] & 63] = i;
  out[0] = values[n & 63];
}
"""
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 0 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    48 bytes stack frame, 44 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size, 512 bytes smem
"""

needs_toolkit = pytest.mark.skipif(not toolkit.find(), reason="needs a CUDA toolkit")


def unit(architecture: str = "sm_90a", symbol: str = "toy", scale: int = 3, **kernel: int) -> Unit:
    """A cubin of the toy template."""
    kernels = (Kernel("toy", symbol, kernel.get("threads", 128), kernel.get("shared_bytes", 0)),)
    context = {"scale": scale}
    return Unit(ARCHITECTURES[architecture], "toy", LAYOUTS["p128_tp2"], "toy.cu.j2", kernels, context)


class Toy:
    """A project of one template and one launcher source, with its own folders."""

    def __init__(self, root: Path) -> None:
        self.templates = root / "templates"
        self.native = root / "native"
        self.work = root / "work"
        self.out = root / "out"
        self.units = {name: unit(name) for name in ("sm_89", "sm_90a")}
        found = toolkit.find()
        # One of sm_89, and one of sm_90a by each major version of the compilers here.
        self.sets = [
            f"{name}/cuda{chosen.version[0]}"
            for name in (self.units if found else ())
            for chosen in toolkit.choose_all(ARCHITECTURES[name], found)
        ]
        self.templates.mkdir()
        self.native.mkdir()
        (self.templates / "toy.cu.j2").write_text(KERNEL)
        (self.templates / "scale.cuh").write_text("constexpr int kScale = {{ scale }};\n")
        (self.templates / "params.h").write_text("#define TOY 1\n")
        (self.templates / "constants.h.j2").write_text("#define TOY_K {{ TOP_K }}\n")
        (self.native / "toy.cc").write_text(
            '#include "constants.h"\n#include "params.h"\n'
            'extern "C" __attribute__((visibility("default"))) int toy() { return TOY * TOY_K; }\n'
        )

    def select(self, architectures: Iterable[str] | None = None) -> list[Unit]:
        """Stand in for ``matrix.units``."""
        return [self.units[name] for name in architectures or self.units]

    def build(self, *architectures: str, **kwargs: Path) -> builder.BuildResult:
        """Build the named architectures, all by default."""
        folders = {"work_dir": self.work, "out_dir": self.out, **kwargs}
        return builder.build(architectures=architectures or list(self.units), templates=self.templates, **folders)

    def contents(self, out: Path | None = None) -> dict[str, bytes]:
        """Every output file by relative path."""
        root = out or self.out
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A toy project in place of the real one."""
    project = Toy(tmp_path)
    monkeypatch.setattr(matrix, "units", project.select)
    for module in (render, launcher):
        monkeypatch.setattr(module, "NATIVE", project.native)
    return project


@needs_toolkit
def test_manifest_describes_the_files(toy: Toy) -> None:
    result = toy.build()
    assert result.compiled == len(toy.sets) + 1
    assert set(toy.contents()) == {
        "manifest.json",
        "libflashinfer_msa.so",
        *(f"{folder}/toy_p128_tp2.cubin" for folder in toy.sets),
    }
    assert json.loads(result.path.read_text()) == result.manifest
    entry = result.manifest["cubins"][-1]
    assert (entry["architecture"], entry["capability"], entry["layout"]) == ("sm_90a", [9, 0], "p128_tp2")
    assert entry["bytes"] == len(toy.contents()[entry["file"]])
    major = int(Path(entry["file"]).parent.name.removeprefix("cuda"))
    assert entry["driver"] == [major, 0] and entry["toolkit"].split()[1].startswith(f"{major}.")
    kernel = entry["kernels"][0]
    assert kernel["static_shared_bytes"] == 512
    assert 0 < kernel["registers"] <= 255
    assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0


@needs_toolkit
def test_nothing_changed_compiles_nothing(toy: Toy) -> None:
    toy.build()
    before = {path: path.stat().st_mtime_ns for path in toy.out.rglob("*")}
    assert toy.build().compiled == 0
    assert {path: path.stat().st_mtime_ns for path in toy.out.rglob("*")} == before


@needs_toolkit
def test_only_what_changed_compiles(toy: Toy) -> None:
    first = toy.build()
    toy.units["sm_90a"] = unit(scale=5)
    second = toy.build()
    assert second.compiled == len(toy.sets) - 1
    assert second.manifest["cubins"][0] == first.manifest["cubins"][0]
    for before, after in zip(first.manifest["cubins"][1:], second.manifest["cubins"][1:], strict=True):
        assert before["source_digest"] != after["source_digest"]
    (toy.templates / "params.h").write_text("#define TOY 2\n")
    third = toy.build()
    assert third.compiled == 1
    assert third.manifest["launcher"]["sha256"] != first.manifest["launcher"]["sha256"]


@needs_toolkit
def test_two_builds_have_the_same_bytes(toy: Toy, tmp_path: Path) -> None:
    toy.build()
    toy.build(work_dir=tmp_path / "another" / "work", out_dir=tmp_path / "another" / "out")
    assert toy.contents() == toy.contents(tmp_path / "another" / "out")


@needs_toolkit
def test_subset_keeps_what_is_current(toy: Toy) -> None:
    toy.build()
    assert {entry["architecture"] for entry in toy.build("sm_90a").manifest["cubins"]} == {"sm_89", "sm_90a"}
    toy.units["sm_89"] = unit("sm_89", scale=7)
    assert {entry["architecture"] for entry in toy.build("sm_90a").manifest["cubins"]} == {"sm_90a"}
    assert not any(name.startswith("sm_89/") for name in toy.contents())


@needs_toolkit
def test_subset_drops_a_damaged_file(toy: Toy) -> None:
    toy.build()
    (toy.out / toy.sets[0] / "toy_p128_tp2.cubin").write_bytes(b"damaged")
    assert {entry["architecture"] for entry in toy.build("sm_90a").manifest["cubins"]} == {"sm_90a"}
    assert toy.build().compiled == 0
    assert {entry["architecture"] for entry in toy.build().manifest["cubins"]} == {"sm_89", "sm_90a"}


@needs_toolkit
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LOCAL_ARRAY, r"sm_90a/toy_p128_tp2: kernel toy uses local memory: 256 bytes of stack"),
        (KERNEL.replace("toy(", "other("), r"toy\.cu\.j2 has no kernel toy"),
        ("#error broken on purpose", r"compilation failed:(.|\n)*broken on purpose"),
    ],
)
def test_failed_build_changes_no_output(toy: Toy, source: str, message: str) -> None:
    toy.build("sm_90a")
    before = toy.contents()
    (toy.templates / "toy.cu.j2").write_text(source)
    for _ in range(2):
        with pytest.raises(BuildError, match=message):
            toy.build("sm_90a")
    assert toy.contents() == before
    (toy.templates / "toy.cu.j2").write_text(KERNEL)
    toy.build("sm_90a")
    assert toy.contents() == before


def test_undefined_template_name_fails(toy: Toy) -> None:
    (toy.templates / "toy.cu.j2").write_text("{{ nothing }}")
    with pytest.raises(Exception, match="'nothing' is undefined"):
        render.render(toy.units["sm_90a"], toy.templates)


def test_digests_follow_sources(toy: Toy) -> None:
    unit_digest = render.source_digest(toy.units["sm_90a"], toy.templates)
    assert unit_digest != render.source_digest(toy.units["sm_89"], toy.templates)
    launcher_digest = render.launcher_digest(toy.templates)
    (toy.native / "toy.cc").rename(toy.native / "renamed.cc")
    assert launcher_digest != render.launcher_digest(toy.templates)
    assert unit_digest == render.source_digest(toy.units["sm_90a"], toy.templates)


def test_tree_digest_is_per_architecture() -> None:
    digests = {name: render.tree_digest(name) for name in ARCHITECTURES}
    assert len(set(digests.values())) == len(ARCHITECTURES)


def test_report_is_parsed() -> None:
    assert ptxas.parse(LOG) == {
        "first": ptxas.Resources(registers=31),
        "second": ptxas.Resources(512, 255, 48, 44, 52),
    }


@pytest.mark.parametrize(
    ("checked", "message"),
    [
        (unit(symbol="second"), "48 bytes of stack, 44 bytes of spill stores, 52 bytes of spill loads"),
        (unit(symbol="first", shared_bytes=228 * 1024), "shared memory, the GPU has 232448"),
        (unit(symbol="first", threads=4096), "needs 31 registers for each of 4096 threads"),
        (unit(symbol="third"), "no kernel third"),
    ],
)
def test_report_is_judged(checked: Unit, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        ptxas.check(checked, LOG, b".text.first\0.text.second\0")


def test_kernel_must_be_in_the_cubin() -> None:
    assert ptxas.check(unit(symbol="first"), LOG, b".text.first\0")["first"].registers == 31
    with pytest.raises(BuildError, match="no kernel first"):
        ptxas.check(unit(symbol="first"), LOG, b".text.first_of_another_name\0")


def fake_nvcc(folder: Path, version: str) -> Path:
    """An ``nvcc`` that knows nothing but its version."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    path.chmod(0o755)
    return path


def fake_nvrtc(path: Path, release: str, version: str) -> Path:
    """A library that has nothing in it but its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF\0" * 1000 + f"Cuda compilation tools, release {release}, V{version}\0".encode())
    return path


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any toolkit."""
    for name in ("FLASHINFER_MSA_NVCC", "FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("sys.path", [])


def test_toolkits_are_found_in_order(no_toolkit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [fake_nvcc(tmp_path / name, version) for name, version in (("a", "12.4"), ("b", "12.9"))]
    home = fake_nvcc(tmp_path / "home", "13.1")
    on_path = fake_nvcc(tmp_path / "path", "12.0")
    flashinfers = fake_nvcc(tmp_path / "flashinfer", "12.1")
    package = fake_nvcc(tmp_path / "site" / "nvidia" / "cu13", "13.0")
    libraries = [
        fake_nvrtc(tmp_path / "home" / "lib64" / "libnvrtc.so.13", "13.1", "13.1.115"),
        fake_nvrtc(tmp_path / "site" / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13", "13.5", "13.5.37"),
        fake_nvrtc(tmp_path / "site" / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12", "12.9", "12.9.86"),
    ]
    (tmp_path / "site" / "nvidia" / "cu12" / "lib").mkdir(parents=True)
    (tmp_path / "site" / "nvidia" / "cu12" / "lib" / "libnvrtc.so.12").write_bytes(b"no release in here")
    monkeypatch.setenv("FLASHINFER_NVCC", str(flashinfers))
    monkeypatch.setenv("PATH", f"{on_path.parent}{os.pathsep}/bin")
    monkeypatch.setenv("FLASHINFER_MSA_NVCC", os.pathsep.join(map(str, named)))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    found = toolkit.find()
    assert [item.path for item in found] == [*named, flashinfers, home, on_path, package, *libraries]
    assert found[0] == Toolkit(named[0], (12, 4), "12.4.88")
    assert found[-1] == Toolkit(libraries[-1], (12, 9), "12.9.86", is_nvrtc=True)
    assert [item.name for item in (found[0], found[-1])] == ["nvcc 12.4.88", "NVRTC 12.9.86"]
    chosen = {name: [item.name for item in toolkit.choose_all(arch, found)] for name, arch in ARCHITECTURES.items()}
    assert chosen == {
        "sm_89": ["nvcc 12.4.88"],
        "sm_90a": ["nvcc 12.4.88", "nvcc 13.1.88"],
        **{name: ["nvcc 12.9.88"] for name in ("sm_100a", "sm_103a", "sm_120a", "sm_121a")},
        "sm_107a": ["NVRTC 13.5.37"],
        "sm_110a": ["nvcc 13.1.88"],
    }
    only_13 = [item for item in found if item.version[0] == 13]
    assert toolkit.choose_all(ARCHITECTURES["sm_90a"], only_13) == [found[3]]
    assert toolkit.choose_all(ARCHITECTURES["sm_89"], only_13) == [found[3]], "better than no cubins"


def test_missing_toolkit_says_what_to_install(no_toolkit: None, tmp_path: Path) -> None:
    assert toolkit.find() == []
    with pytest.raises(
        BuildError, match=r"sm_103a needs .* 12\.9 or newer; found: none.*pip install 'nvidia-cuda-nvrtc-cu12==12\.9"
    ):
        toolkit.choose_all(ARCHITECTURES["sm_103a"], [])
    old = Toolkit(tmp_path / "nvcc", (12, 8), "12.8.93")
    with pytest.raises(BuildError, match=r"found: nvcc 12\.8\.93 at .*/nvcc\."):
        toolkit.choose_all(ARCHITECTURES["sm_103a"], [old])
    with pytest.raises(BuildError, match=r"sm_107a needs .* 13\.4 or newer.*pip install 'nvidia-cuda-nvrtc==13\.5"):
        toolkit.choose_all(ARCHITECTURES["sm_107a"], [old])


def test_named_toolkit_must_work(no_toolkit: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_MSA_NVCC", "/nonexistent/nvcc")
    with pytest.raises(BuildError, match=r"FLASHINFER_MSA_NVCC must name working .*, was '/nonexistent/nvcc'"):
        toolkit.find()


def test_a_compiler_that_does_not_answer_is_none(
    no_toolkit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_nvcc(tmp_path, "13.0")
    path.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(toolkit, "PROBE_SECONDS", 0.2)
    monkeypatch.setenv("FLASHINFER_NVCC", str(path))
    assert toolkit.find() == []


def test_relative_paths_and_names_of_compilers(
    no_toolkit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked for where the process is, and compilers run elsewhere."""
    here, on_path = fake_nvcc(tmp_path / "here", "13.0"), fake_nvcc(tmp_path / "path", "12.9")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", f"{on_path.parent}{os.pathsep}/bin")
    monkeypatch.setenv("FLASHINFER_MSA_NVCC", f"./bin/nvcc{os.pathsep}nvcc")
    assert [found.path for found in toolkit.find()] == [here, on_path]


@needs_toolkit
def test_a_build_that_waits_says_so(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    toy.build("sm_89")
    caplog.clear()
    with open(toy.work / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=toy.build, args=("sm_89",))
        thread.start()
        deadline = time.monotonic() + 20
        while "waiting for another build in" not in caplog.text:
            assert time.monotonic() < deadline and thread.is_alive()
            time.sleep(0.01)
    thread.join()


def test_architectures_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_MSA_ARCHITECTURES", raising=False)
    assert toolkit.selected_architectures() == list(ARCHITECTURES)
    monkeypatch.setenv("FLASHINFER_MSA_ARCHITECTURES", "sm_89, sm_90a")
    assert toolkit.selected_architectures() == ["sm_89", "sm_90a"]


def test_launcher_must_load_on_old_systems() -> None:
    zig = launcher.Compiler("zig 0.15.0, glibc 2.28", ())
    launcher.check(b"\0GLIBC_2.2.5\0GLIBC_2.28\0", zig)
    with pytest.raises(BuildError, match=r"needs glibc 2\.34, must load on 2\.28"):
        launcher.check(b"\0GLIBC_2.2.5\0GLIBC_2.34\0", zig)
    system = launcher.Compiler("c++ 12.2.0", ())
    launcher.check(b"\0GLIBC_2.34\0", system)
    assert launcher.wheel_platform(zig.name).startswith("manylinux_2_28_")
    assert launcher.wheel_platform(system.name).startswith("linux_")
