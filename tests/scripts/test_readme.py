# SPDX-License-Identifier: Apache-2.0
"""README's example runs as it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from process_group import ProcessGroup

README = Path(__file__).parents[2] / "README.md"
SCRIPT = README.parent / "scripts" / "readme_figures.py"
RECORD = README.parent / "tests" / "gpu" / "record.json"

needs_source_tree = pytest.mark.skipif(not README.is_file(), reason="needs the source tree")


@pytest.fixture(scope="module")
def figures_script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("readme_figures")


def python_blocks() -> list[str]:
    """README's Python code."""
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@needs_source_tree
def test_examples_run() -> None:
    """The Python blocks are complete, one after the other, and select blocks that every token may see."""
    serving, *blocks = python_blocks()
    assert len(blocks) == 2 and "init_process_group" in serving
    names: dict[str, Any] = {}
    for code in blocks:
        exec(compile(code, str(README), "exec"), names)
    for selected, valid in (("selected", "num_valid_pages"), ("prefilled", "num_valid")):
        selected, valid = names[selected], names[valid]
        assert selected.shape == (len(valid), 4, 16) and selected.dtype == torch.int32
        counts = (selected >= 0).sum(-1)
        assert torch.equal(counts, valid[:, None].clamp(max=16).expand_as(counts).to(counts.dtype))
        assert (selected < valid[:, None, None]).all()


def run_serving_example(rank: int) -> torch.Tensor:
    """Run the first block as one rank of a group; returns what its last layer selected."""
    names: dict[str, Any] = {}
    exec(compile(python_blocks()[0], str(README), "exec"), names)
    assert names["comm"].closed and names["rank"] == rank
    return names["output"]


@needs_source_tree
@pytest.mark.skipif(torch.cuda.is_available(), reason="the processes of this test have no GPU each")
def test_the_serving_example_runs() -> None:
    """The first block is what every process of a group runs."""
    with ProcessGroup(2) as processes:
        output = torch.cat(processes.run(run_serving_example), dim=1)
    assert output.shape == (3, 4, 16)
    # 16 of 32 blocks, the newest among them.
    assert (output.diff(dim=-1) > 0).all() and (output[..., 0] >= 0).all() and (output[..., -1] == 31).all()


@needs_source_tree
def test_tree_is_the_one_on_disk() -> None:
    """Every file and folder that README's tree names exists, and every module of the package is named."""
    tree = re.search(r"```\n(flashinfer_msa/ .*?)```", README.read_text(), re.DOTALL)
    assert tree
    root = README.parent
    for name in re.findall(r"^(\w+)/ ", tree[1], re.MULTILINE):
        assert (root / name).is_dir(), name
    modules = {path.name for path in (root / "flashinfer_msa").glob("*.py")} - {
        "__init__.py",
        "__main__.py",
        "version.py",
    }
    scripts = {path.name for path in (root / "scripts").iterdir() if path.is_file()}
    named = set(re.findall(r"\b(\w+\.(?:py|sh|txt))\b", tree[1]))
    assert scripts <= named, "every script is named"
    assert modules == named - scripts - {"group.py"}


@needs_source_tree
def test_figures_are_those_of_the_record() -> None:
    """No figure is typed, and the plots are of the record: the script that writes them finds them as they are."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("roofline.svg", "latency.svg", "prefill.svg"):
        assert f"(tests/gpu/{name})" in README.read_text()


def test_a_plot_of_other_rows_is_stale(
    figures_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A changed row makes the plots that show it stale, and no others; a missing plot is stale."""
    section = json.loads(RECORD.read_text())["single"]
    assert figures_script.stale_plots(section) == []
    next(row for row in section["bench"] if row["job"] == "decode_chain" and row["cold"])["us"] += 1
    assert [path.name for path in figures_script.stale_plots(section)] == ["latency.svg"]
    section["date"] = "2000-01-01"
    assert len(figures_script.stale_plots(section)) == 3
    monkeypatch.setattr(figures_script, "PLOTS", {"roofline": tmp_path / "none.svg"})
    assert figures_script.stale_plots(section) == [tmp_path / "none.svg"]


def test_tables_of_rows_with_and_without_peers(figures_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is there where there are rows for it; a case that a peer lacks has a dash."""
    monkeypatch.setattr(figures_script, "tree_digest", lambda architecture: "")
    record = {"single": json.loads(RECORD.read_text())["single"]}
    rows = [row for row in record["single"]["bench"] if "peer" not in row and row.get("name") != "ragged batch"]
    record["single"]["bench"] = rows
    text = figures_script.figures(record)
    assert "The time of" not in text and "ragged batch" not in text
    chain = next(row for row in rows if row["job"] == "decode_chain")
    score = next(row for row in rows if row["job"] == "decode_score")
    prefill = next(row for row in rows if row["job"] == "prefill_score" and "name" not in row)
    for row, speedup in ((chain, 3.25), (score, 1.5), (prefill, 2.0)):
        rows.append({**row, "peer": "Peer 1.0", "peer_us": row["us"] * speedup, "speedup": speedup})
    rows.append({**score, "name": "ragged batch", "us": 12.5, "ceiling_ratio": 0.75})
    text = figures_script.figures(record)
    assert "The time of Peer 1.0 over the chain's" in text and "| 3.25x | - | - | - |" in text
    assert "The time of Peer 1.0 over the scorer's" in text and "| 1.50x | - | - | - |" in text
    assert "The time of Peer 1.0 over ours" in text and "| 2.00x | - |" in text
    assert f"63 of 4K: {score['layout']} 12.5 us (75%)." in text
    for job in ("decode_score", "decode_chain", "select_publish", "prefill_score", "host"):
        record["single"]["bench"] = [row for row in rows if row["job"] != job]
        assert len(figures_script.figures(record)) < len(text)
    record["single"]["bench"] = []
    assert figures_script.figures(record)


def prefill_row(layout: str, tokens: int, context: int, **figures: Any) -> dict[str, Any]:
    """A row of a prefill window of cold keys."""
    return {"layout": layout, "tokens": tokens, "ctx": context, "heads": 4, "cold": True, **figures}


def test_tables_of_prefill_windows(figures_script: ModuleType) -> None:
    """The exact scorer has a column of its own where it was measured; a window of which little was has no line."""
    whole, short = ("P128-TP2", 8192, 131072), ("P128-TP4", 16, 8192)
    rows = [
        prefill_row(*whole, job="prefill_plan", us=4.0),
        prefill_row(*whole, job="prefill_score", us=450.0, tflops=1200.0, ceiling_ratio=0.94),
        prefill_row(*short, job="prefill_score", us=9.0, tflops=100.0, ceiling_ratio=0.1),
    ]
    text = "\n".join(figures_script.prefill_lines(rows))
    assert "| tokens of context | layout | plan | score |\n" in text and "exact" not in text
    assert "| 8192 of 128K | P128-TP2 | 4.0 us | 450 us: 1200 TFLOP/s (94%) |" in text and "16 of 8K" not in text
    exact = prefill_row(*whole, job="prefill_score", name="exact", us=900.0, tflops=600.0, ceiling_ratio=0.91)
    peer = {**rows[1], "peer": "Peer 1.0", "peer_us": 468.0, "speedup": 1.04}
    text = "\n".join(figures_script.prefill_lines([*rows, exact, peer]))
    assert "450 us: 1200 TFLOP/s (94%) | 900 us: 600 TFLOP/s (91%) |" in text and "of an FP16 one's" in text
    assert text.endswith("| 8192 of 128K | P128-TP2 | 1.04x | - |")
    assert figures_script.prefill_lines(rows[2:]) == []


def test_tables_of_the_fused_prefill_chain_and_the_selection(figures_script: ModuleType) -> None:
    """Windows are in the order of their contexts and tokens, each layout in its column."""
    rows = []
    for layout, tokens, context, us in (
        ("P128-TP2", 8192, 131072, 450.0),
        ("P128-TP2", 16, 8192, 9.0),
        ("P256-TP4", 16, 8192, 7.0),
    ):
        case = (layout, tokens, context)
        rows.append(prefill_row(*case, job="prefill_chain", us=1.0))
        rows.append(prefill_row(*case, job="prefill_chain", name="score and select", us=2 * us))
        rows.append(prefill_row(*case, job="prefill_fused", us=us, separate_ratio=0.5))
    text = "\n".join(figures_script.fused_prefill_lines(rows))
    assert text.endswith(
        "| 16 of 8K | 9.0 / 18.0 us (0.50) | - | - | 7.0 / 14.0 us (0.50) |\n"
        "| 8192 of 128K | 450.0 / 900.0 us (0.50) | - | - | - |"
    )
    assert figures_script.fused_prefill_lines([]) == figures_script.prefill_selection_lines(rows) == []
    figures = {"us": 60.0, "bytes": 1 << 26, "tb_s": 1.12, "ceiling_ratio": 0.25}
    scores = {"tokens": 8192, "ctx": 65536, "heads": 4, "cold": True}
    text = "\n".join(
        figures_script.prefill_selection_lines(
            [{"job": "prefill_select", "name": "random scores", **scores, **figures}]
        )
    )
    assert text.endswith("| 8192 x 4 x 512 | 60 us: 1.12 TB/s | 25% |")
