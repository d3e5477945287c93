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

README = Path(__file__).parent.parent / "README.md"
SCRIPT = README.parent / "scripts" / "readme_figures.py"
RECORD = README.parent / "tests" / "gpu" / "record.json"


@pytest.fixture(scope="module")
def figures_script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("readme_figures")


def test_examples_run() -> None:
    """The Python blocks are complete, one after the other, and select blocks that every token may see."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for code in blocks:
        exec(compile(code, str(README), "exec"), names)
    for selected, valid in (("selected", "num_valid_pages"), ("prefilled", "num_valid")):
        selected, valid = names[selected], names[valid]
        assert selected.shape == (len(valid), 4, 16) and selected.dtype == torch.int32
        counts = (selected >= 0).sum(-1)
        assert torch.equal(counts, valid[:, None].clamp(max=16).expand_as(counts).to(counts.dtype))
        assert (selected < valid[:, None, None]).all()


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
    assert modules == set(re.findall(r"\b(\w+\.py)\b", tree[1])) - {
        "gpu_bench.py",
        "gpu_record.py",
        "readme_figures.py",
        "requirements.py",
    }


def test_figures_are_those_of_the_record() -> None:
    """No figure is typed, and the plots are of the record: the script that writes them finds them as they are."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("roofline.svg", "latency.svg"):
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
    assert len(figures_script.stale_plots(section)) == 2
    monkeypatch.setattr(figures_script, "PLOTS", {"roofline": tmp_path / "none.svg"})
    assert figures_script.stale_plots(section) == [tmp_path / "none.svg"]


def test_tables_of_rows_with_and_without_peers(figures_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is there where there are rows for it; a case that a peer lacks has a dash."""
    monkeypatch.setattr(figures_script, "tree_digest", lambda architecture: "")
    record = json.loads(RECORD.read_text())
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
