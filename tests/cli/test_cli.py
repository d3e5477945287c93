# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, its exit status, and that mistakes end in a sentence instead of a traceback."""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

import flashinfer_msa.cli.main as cli
from flashinfer_msa import manifest
from flashinfer_msa.backends import reference
from flashinfer_msa.cli.demo import draw_segments
from flashinfer_msa.cli.main import main
from flashinfer_msa.indexer import MSAIcpIndexerPlan
from flashinfer_msa.runtime import loader
from flashinfer_msa.version import __version__

TINY = ("demo", "--backend", "torch", "--device", "cpu", "--batch", "2", "--context", "3000", "--steps", "4")
TINY_PREFILL = (
    *("demo", "--backend", "torch", "--device", "cpu", "--batch", "5", "--context", "2500", "--steps", "2"),
    *("--tokens", "1600"),
)

MANIFEST: dict[str, Any] = {
    "schema": 2,
    "version": "9.8.7",
    "launcher": {"file": "x.so", "sha256": "", "source_digest": "", "compiler": ""},
    "cubins": [
        {
            "architecture": architecture,
            "capability": capability,
            "layout": layout,
            "file": f"{architecture}/x.cubin",
            "sha256": "",
            "bytes": 34567,
            "toolkit": toolkit,
            "driver": driver,
            "source_digest": "",
            "tested_on": tested_on,
            "kernels": [
                {
                    "role": role,
                    "symbol": f"msa_icp_{role}",
                    "threads": 288,
                    "shared_bytes": 2000,
                    "static_shared_bytes": 345,
                    "registers": 77,
                    "stack_bytes": 0,
                    "spill_store_bytes": 0,
                    "spill_load_bytes": 0,
                }
            ],
        }
        for architecture, capability, layout, tested_on, role, toolkit, driver in (
            ("sm_90a", [9, 0], "p128_tp2", "H200", "decode_score_1", "nvcc 13.0.88", [13, 0]),
            ("sm_100a", [10, 0], None, "", "merge_tagged", "NVRTC 12.9.86", [12, 0]),
        )
    ],
}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_demo_compares_every_row_of_every_layout_and_form() -> None:
    result = invoke(*TINY)
    assert result.exit_code == 0, result.output
    for layout in ("P128-TP2", "P128-TP4", "P256-TP2", "P256-TP4"):
        assert result.output.count(layout) == 2
    # 4 layouts, 2 forms, 4 steps, 2 requests of 2 tokens, 4 heads.
    assert "ok: 512 of 512 rows equal, 0 near ties, 0 wrong" in result.output
    assert "backend torch (as asked), ranks on cpu" in result.output


def test_demo_takes_a_choice_of_layout_and_form() -> None:
    result = invoke(*TINY, "--layout", "P256-TP4", "--layout", "p128_tp2", "--tagged", "--query-len", "1")
    assert result.exit_code == 0, result.output
    assert "P256-TP4" in result.output and "P128-TP2" in result.output and "P256-TP2" not in result.output
    assert "tagged" in result.output and "legacy" not in result.output
    assert "ok: 64 of 64 rows" in result.output


def cells(output: str) -> list[list[str]]:
    """The rows of the printed table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]


def test_demo_prefills_in_windows() -> None:
    result = invoke(*TINY_PREFILL, "--prefill")
    assert result.exit_code == 0, result.output
    # 2 steps, 1600 tokens, 4 heads; a window of P128 has at most 1536 tokens, one of P256 3200.
    assert [row[:-1] for row in cells(result.output)] == [
        [layout, windows, "12800", "12800", "0", "0"]
        for layout, windows in (("P128-TP2", "2"), ("P128-TP4", "2"), ("P256-TP2", "1"), ("P256-TP4", "1"))
    ]
    assert "ok: 51200 of 51200 rows equal, 0 near ties, 0 wrong" in result.output


def test_demo_decodes_and_prefills_in_each_step() -> None:
    result = invoke(*TINY_PREFILL, "--mixed", "--query-len", "3", "--layout", "p128-tp2", "--layout", "p256-tp4")
    assert result.exit_code == 0, result.output
    # 2 steps, 5 requests of 3 tokens and 1600 prefill tokens, 4 heads.
    assert [row[:-1] for row in cells(result.output)] == [
        [layout, form, windows, "12920", "12920", "0", "0"]
        for layout, windows in (("P128-TP2", "2"), ("P256-TP4", "1"))
        for form in ("legacy", "tagged")
    ]
    result = invoke(*TINY_PREFILL, "--mixed", "--tokens", "1", "--layout", "p128-tp4", "--legacy")
    assert result.exit_code == 0, result.output
    assert "ok: 88 of 88 rows equal" in result.output and "tagged" not in result.output


def test_segments_are_ragged_and_fit() -> None:
    draw = random.Random(0)
    kinds: set[int] = set()
    for _ in range(300):
        segments, context = draw.randint(1, 12), draw.randint(1, 60)
        tokens = draw.randint(1, segments * context)
        lens, positions = draw_segments(draw, segments, tokens, context)
        ends = [length + position for length, position in zip(lens, positions, strict=True)]
        assert len(lens) == segments and sum(lens) == tokens and min(lens) >= 0
        assert min(positions) >= 0 and max(ends) == context == ends[lens.index(max(lens))]
    for _ in range(10):
        lens, _ = draw_segments(draw, 8, 2048, 8192)
        assert lens.count(0) >= 3 and lens.count(1) >= 2
        kinds.update(lens)
    assert len(kinds) > 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why there is no GPU backend")
def test_demo_says_why_it_runs_on_torch() -> None:
    result = invoke("demo", "--batch", "1", "--context", "1", "--steps", "1", "--layout", "p128-tp2", "--legacy")
    assert result.exit_code == 0, result.output
    assert "backend torch (no CUDA device)" in result.output


@pytest.mark.parametrize(
    ("capability", "backend", "reason"),
    (
        ((9, 0), "cake", "sm_90a kernels are installed"),
        ((12, 0), "cake", "sm_120a kernels can be compiled here"),
        ((7, 5), "torch", "no kernels for compute capability 7.5"),
    ),
)
def test_auto_picks_the_backend_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], backend: str, reason: str
) -> None:
    entry = {**MANIFEST["cubins"][0], "driver": [12, 0]}  # of sm_90a
    installed = manifest.Manifest(manifest.DATA, {"cubins": [entry]})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(loader, "load_manifest", lambda: installed)
    monkeypatch.setattr(loader, "driver_version", lambda: (12, 4))
    assert cli._choose_backend("auto", torch.device("cuda:0")) == (backend, reason)


def test_a_driver_that_is_no_version_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("FLASHINFER_MSA_DRIVER must be a CUDA version such as 12.4, was 'new'")

    monkeypatch.setattr(loader, "driver_version", refuse)
    with pytest.raises(click.UsageError, match=r"must be a CUDA version such as 12\.4, was 'new'"):
        cli._choose_backend("auto", torch.device("cuda:0"))


def test_auto_without_installed_kernels_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise FileNotFoundError

    monkeypatch.setattr(loader, "load_manifest", missing)
    assert cli._choose_backend("auto", torch.device("cuda:0"))[0] == "torch"


@pytest.mark.parametrize("options", ((*TINY, "--legacy"), (*TINY_PREFILL, "--prefill", "--tokens", "100")))
def test_demo_fails_on_a_wrong_row(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    sort_key = reference._sort_key
    monkeypatch.setattr(reference, "_sort_key", lambda scores: -sort_key(scores))
    result = invoke(*options, "--layout", "p128-tp2")
    assert result.exit_code == 1
    assert "FAILED: " in result.output and " 0 wrong" not in result.output


@pytest.mark.parametrize("half", ("decode_merge", "prefill_merge"))
def test_mixed_demo_compares_both_halves(monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    merge = getattr(MSAIcpIndexerPlan, half)
    names = list(inspect.signature(merge).parameters)

    def spoil(*arguments: Any, **options: Any) -> None:
        merge(*arguments, **options)
        arguments[names.index("output")][0, 0] = 5

    monkeypatch.setattr(MSAIcpIndexerPlan, half, spoil)
    result = invoke(*TINY_PREFILL, "--mixed", "--tokens", "100", "--layout", "p256-tp2", "--tagged")
    assert result.exit_code == 1
    # A row of either rank in either step.
    assert "0 near ties, 4 wrong" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("demo", "--layout", "p64-tp2"), "'p64-tp2' is not one of p128-tp2, p128-tp4, p256-tp2, p256-tp4"),
        (("demo", "--query-len", "9"), "1<=x<=8"),
        (("demo", "--batch", "0"), "x>=1"),
        (("demo", "--prefill", "--mixed"), "--prefill and --mixed exclude each other"),
        (("demo", "--prefill", "--legacy"), "--tagged/--legacy does nothing with --prefill"),
        (("demo", "--prefill", "--query-len", "1"), "--query-len does nothing with --prefill"),
        (("demo", "--tokens", "100"), "--tokens does nothing without --prefill or --mixed"),
        (
            ("demo", "--mixed", "--context", "100", "--tokens", "2048"),
            "--tokens: must be at most --batch x --context, 800, was 2048",
        ),
        (("demo", "--device", "tpu"), "'tpu' is not a device"),
        (("demo", "--device", "meta"), "must be cpu or cuda, was 'meta'"),
        (("demo", "--device", "cuda:99"), "'cuda:99' is not there"),
        (("demo", "--device", "cpu", "--backend", "cake"), "--backend cake needs a CUDA device"),
        (("build", "--arch", "sm_1"), "sm_90a"),
        (("build", "--jobs", "0"), "x>=1"),
        (("nonsense",), "No such command"),
    ),
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "load_manifest", lambda: manifest.Manifest(Path("nowhere"), MANIFEST))


@pytest.mark.usefixtures("installed")
def test_list_shows_each_kernel() -> None:
    result = invoke("list")
    assert result.exit_code == 0, result.output
    assert cells(result.output) == [
        ["sm_90a", "13", "p128_tp2", "decode_score_1", "288", "77", "2345", "34567"],
        ["sm_100a", "12", "common", "merge_tagged", "288", "77", "2345", "34567"],
    ]
    assert (
        "sm_90a by nvcc 13.0.88, for drivers of CUDA 13.0 or newer: run on H200\n"
        "sm_100a by NVRTC 12.9.86, for drivers of CUDA 12.0 or newer: compiled, not run\n"
    ) in result.output
    assert "flashinfer-msa 9.8.7: 2 kernels in 2 cubins" in result.output


@pytest.mark.usefixtures("installed")
def test_list_prints_the_manifest_as_json() -> None:
    result = invoke("list", "--json")
    assert result.exit_code == 0 and json.loads(result.output) == MANIFEST


@pytest.mark.parametrize("options", ((), ("--json",)))
@pytest.mark.parametrize("kind", (FileNotFoundError, RuntimeError))
def test_list_without_kernels_gives_advice(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], kind: type[Exception]
) -> None:
    def missing() -> None:
        raise kind("nothing here, do this")

    monkeypatch.setattr(manifest, "load_manifest", missing)
    result = invoke("list", *options)
    assert result.exit_code == 1 and result.output == "Error: nothing here, do this\n"


@pytest.mark.parametrize("module", ("jinja2", "ninja"))
def test_build_without_its_requirements_gives_advice(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name.startswith("flashinfer_msa.aot.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    result = invoke("build")
    assert result.exit_code == 1
    assert f"Building needs {module}" in result.output and "pip install 'flashinfer-msa[build]'" in result.output


def test_build_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("ninja")
    pytest.importorskip("jinja2")
    from flashinfer_msa.aot import build as aot_build
    from flashinfer_msa.aot.toolkit import BuildError

    calls: list[tuple[Any, ...]] = []

    def record(out: Path | None, *, architectures: Any, jobs: int | None, progress: Any) -> SimpleNamespace:
        calls.append((out, architectures, jobs))
        progress("[1/1] CUBIN")
        return SimpleNamespace(path=tmp_path / "manifest.json", manifest=MANIFEST, compiled=1)

    monkeypatch.setattr(aot_build, "build", record)
    result = invoke("build", "--arch", "sm_90a", "--arch", "sm_89", "--out", str(tmp_path), "--jobs", "3")
    assert result.exit_code == 0, result.output
    assert result.output == f"[1/1] CUBIN\n1 compiled, 2 cubins listed in {tmp_path}/manifest.json\n"
    assert invoke("build").exit_code == 0
    assert calls == [(tmp_path, ("sm_90a", "sm_89"), 3), (None, None, None)]

    def fail(*arguments: Any, **options: Any) -> None:
        raise BuildError("no nvcc")

    monkeypatch.setattr(aot_build, "build", fail)
    result = invoke("build")
    assert result.exit_code == 1 and result.output == "Error: no nvcc\n"


def test_commands_start_without_torch() -> None:
    """Help and usage errors need not wait for torch."""
    program = (
        "import sys; import flashinfer_msa.cli.main as cli; print(sorted(cli.main.commands), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['bench', 'build', 'demo', 'doctor', 'list'] False\n"


def test_module_is_runnable() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashinfer_msa", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"flashinfer-msa, version {__version__}\n"
