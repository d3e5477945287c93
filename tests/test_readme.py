# SPDX-License-Identifier: Apache-2.0
"""README's example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parent.parent / "README.md"


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
    assert modules == set(re.findall(r"\b(\w+\.py)\b", tree[1])) - {"gpu_bench.py", "gpu_record.py", "readme_tables.py"}


def test_figures_are_those_of_the_record() -> None:
    """No figure is typed: the script that writes them finds them as they are."""
    script = README.parent / "scripts" / "readme_tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
