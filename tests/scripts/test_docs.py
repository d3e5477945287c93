# SPDX-License-Identifier: Apache-2.0
"""The manual: it builds, its code runs, and its tables say what the code says."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from process_group import ProcessGroup

import flashinfer_msa
from flashinfer_msa.comm import MSAIcpComm
from flashinfer_msa.indexer import MSAIcpIndexerPlan
from flashinfer_msa.runtime.fault import Fault

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SCRIPT = ROOT / "scripts" / "build_docs.py"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="needs the source tree")
needs_sphinx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="needs the docs extra",
)


def page(name: str) -> str:
    return (DOCS / name).read_text()


def build(script: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, script, out], capture_output=True, text=True, env=environment)


@needs_sphinx
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    """The command that the manual is published with; every page is there, and every public name has an entry."""
    done = build(SCRIPT, tmp_path / "html")
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in (tmp_path / "html").glob("*.html")} >= {Path(name).stem for name in PAGES}
    reference = (tmp_path / "html" / "api.html").read_text()
    from flashinfer_msa import msa_ops

    names = [f"flashinfer_msa.msa_ops.{name}" for name in msa_ops.__all__ if not name.startswith("MSA")]
    names += [
        *("flashinfer_msa.indexer.MSAIcpIndexerPlan.decode", "flashinfer_msa.comm.allocate_comm"),
        *(
            "flashinfer_msa.indexer.layer_graphs.MSAIcpLayerGraphs.begin_step",
            "flashinfer_msa.indexer.steps.MSAIcpDecodeStep.run",
        ),
        *(
            "flashinfer_msa.backends.compiled.mark_static",
            "flashinfer_msa.integrations.flashinfer.register",
            "flashinfer_msa.last_fault",
        ),
    ]
    for name in names:
        assert f'id="{name}"' in reference, name
    assert "max_prefill_windows" in reference and "System Message" not in reference


@needs_sphinx
def test_a_page_outside_the_tree_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(DOCS / "conf.py", tmp_path / "docs")
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "docs" / "index.md").write_text("# Title\n\nText.\n")
    script = tmp_path / "scripts" / SCRIPT.name
    done = build(script, tmp_path / "html")
    assert done.returncode == 0, done.stderr
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    done = build(script, tmp_path / "html")
    assert done.returncode == 1 and "lost.md: WARNING: document isn't included in any toctree" in done.stderr


# --- code -------------------------------------------------------------------------------------------------------------


def python_blocks(name: str) -> tuple[list[str], list[str]]:
    """Python code of a page: what one process runs, block after block, and what each process of a group does."""
    blocks = re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)
    return [each for each in blocks if "dist." not in each], [each for each in blocks if "dist." in each]


@pytest.fixture
def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Something to register in, where FlashInfer is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        package, functions = ModuleType("flashinfer"), ModuleType("flashinfer.msa_ops")
        package.__version__, package.__path__, functions.__all__ = "0.7.4", [], []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flashinfer", package)
        monkeypatch.setitem(sys.modules, "flashinfer.msa_ops", functions)
    yield
    flashinfer_msa.unregister()


BASE = "buffers.md"
"""The page that others go on from."""
GOES_ON = {"slots.md", "cuda_graphs.md"}
WITH_CODE = ("buffers.md", "cuda_graphs.md", "errors.md", "examples.md", "install.md", "slots.md")


def test_pages_with_code_are_run() -> None:
    assert {name for name in PAGES if "```python" in page(name)} == set(WITH_CODE)
    assert [name for name in PAGES if python_blocks(name)[1]] == ["cuda_graphs.md", "examples.md"]


@pytest.mark.usefixtures("_flashinfer")
@pytest.mark.parametrize("name", WITH_CODE)
def test_code_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python blocks of a page run one after another, after those of the page that it goes on from."""
    torch._dynamo.reset()
    names: dict[str, Any] = {"__name__": "manual"}
    for source in (BASE, name) if name in GOES_ON else (name,):
        for number, code in enumerate(python_blocks(source)[0]):
            exec(compile(code, f"{source}, block {number}", "exec"), names)
    if name == "buffers.md" or name in GOES_ON:
        assert all(isinstance(indexer, MSAIcpIndexerPlan) for indexer in names["indexers"])
        assert all(isinstance(comm, MSAIcpComm) for comm in names["comms"])
    if name == "slots.md":
        counts = (torch.cat(names["output"], 1) >= 0).sum(-1)
        assert torch.equal(counts.cpu(), torch.tensor([[8] * 4, [16] * 4, [16] * 4]))
        assert "slot must differ from that of the layer before" in capsys.readouterr().out


def run_group_block(rank: int, name: str) -> dict[str, Any]:
    """Run a page's program as one rank of a group; returns what it has selected and counted."""
    ((code,)) = python_blocks(name)[1]
    names: dict[str, Any] = {}
    exec(compile(code, name, "exec"), names)
    assert names["rank"] == rank and names["comm"].closed
    stats = sorted(names["graphs"].stats.values()) if "graphs" in names else []
    return {"selected": names.get("selected"), "output": names.get("output"), "stats": stats}


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the processes of this test have no GPU each")


@needs_no_gpu
def test_layer_graphs_of_a_process_per_rank_run() -> None:
    with ProcessGroup(2) as processes:
        first, second = processes.run(run_group_block, "cuda_graphs.md")
    assert first["stats"] == [0, 0, 0, 12]
    selected = torch.cat([first["selected"], second["selected"]], dim=1)
    # 8 and 24 blocks of the decoded tokens, 3 and 4 of the prefilled ones.
    counts = (selected >= 0).sum(-1)
    assert (counts[:2] == torch.tensor([[8], [16]])).all()
    assert (counts[2:130] == 3).all() and (counts[130:] == 4).all()


@needs_no_gpu
def test_the_example_of_a_process_per_rank_runs() -> None:
    with ProcessGroup(2) as processes:
        output = torch.cat([found["output"] for found in processes.run(run_group_block, "examples.md")], dim=1)
    assert output.shape == (3, 4, 16)
    # 16 of 32 blocks, the newest among them.
    assert (output.diff(dim=-1) > 0).all() and (output[..., 0] >= 0).all() and (output[..., -1] == 31).all()


# --- tables -----------------------------------------------------------------------------------------------------------


def rows(name: str) -> list[list[str]]:
    """Cells of a page's table rows, without their headings."""
    lines = re.findall(r"^\| (.*) \|$", page(name), re.MULTILINE)
    return [re.split(r" *\| *", line) for line in lines]


def sources(*folders: str) -> str:
    """All text of these folders, with literals that stand next to each other joined."""
    paths = [
        path
        for folder in folders
        for here, _, names in os.walk(ROOT / folder, followlinks=True)
        for path in (Path(here, name) for name in names)
        if path.suffix in (".py", ".sh", ".cc", ".h") and path.name != Path(__file__).name
    ]
    return re.sub(r'"\s*\n\s*[fr]?"', "", "\n".join(path.read_text() for path in paths))


def variables_of(name: str) -> set[str]:
    """Environment variables in the first cells of a page's tables."""
    return {found for cells in rows(name) for found in re.findall(r"`([A-Z][A-Z0-9_]+)`", cells[0])}


def test_every_environment_variable_is_in_the_table() -> None:
    """What begins with the package's name, both ways; and whatever else is read from the environment."""
    listed, tests = variables_of("environment.md"), sources("tests")
    # What is only set, for other programs to see, is not read.
    product = re.sub(r'(?m)os\.environ\["\w+"\]( = .*)?$', "", sources("flashinfer_msa", "scripts"))
    reads = r'environ(?:\.get\(|\.setdefault\(|\[)"([A-Z_]+)"'
    own = set(re.findall(r"\bFLASHINFER_MSA_[A-Z_]*[A-Z]\b", product))
    # Tests make some up, too.
    own |= set(re.findall(r'[A-Z] = "(FLASHINFER_MSA_[A-Z_]+)"', tests))
    own |= {name for name in re.findall(reads, tests) if name.startswith("FLASHINFER_MSA_")}
    assert own == {name for name in listed if name.startswith("FLASHINFER_MSA_")}
    assert set(re.findall(reads, product)) | set(re.findall(r"\$\{([A-Z_]+):?[-+]", product)) <= listed
    for name in listed:
        assert re.search(rf"\b{name}\b", product + tests), name


def test_variables_elsewhere_in_the_manual_are_in_the_table() -> None:
    listed = variables_of("environment.md")
    for name in PAGES:
        assert set(re.findall(r"\bFLASHINFER_[A-Z_]*[A-Z]\b", page(name))) <= listed, name


def test_error_messages_are_those_of_the_code() -> None:
    """Every part of a message between what it fills in stands in the sources like that."""
    text = sources("flashinfer_msa")
    # Faults are put together from parts.
    numbers = {"rank": 0, "slot": 1, "peer": 1, "head": 0, "row": 5, "polls": 9}
    text += "".join(str(Fault(wait, "legacy", **numbers)) for wait in ("publish", "merge"))
    messages = [cells[0].strip("`") for cells in rows("errors.md") if cells[0].startswith("`")]
    assert len(messages) > 30
    for message in messages:
        for part in filter(None, (each.strip() for each in message.split("…"))):
            assert part in text, f"{part!r} of {message!r}"


def test_the_doctor_page_names_its_sections() -> None:
    from flashinfer_msa.cli import doctor

    text = Path(doctor.__file__).read_text()
    named = {cells[0] for cells in rows("troubleshooting.md")}
    found = set(re.findall(r'section(?:, \w+)? = "([\w -]+)"', text))
    found |= set(re.findall(r'Finding\(\s*\w+, "([\w -]+)"', text)) | set(doctor._TASKS)
    assert len(found) == 8 and found <= named
