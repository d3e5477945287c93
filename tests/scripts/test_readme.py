# SPDX-License-Identifier: Apache-2.0
"""README: its example runs, its tables are those of the code and of the record; the contributors' tree is on disk."""

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

from flashinfer_msa.aot.matrix import ARCHITECTURES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
SCRIPT = ROOT / "scripts" / "figures.py"
RECORD = ROOT / "tests" / "gpu" / "record.json"

needs_source_tree = pytest.mark.skipif(not README.is_file(), reason="needs the source tree")


@pytest.fixture(scope="module")
def figures_script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("figures")


def run_serving_example(rank: int) -> torch.Tensor:
    """Run README's program as one rank of a group, with what it takes from the server; returns its last output."""
    world_size, batch, columns, layers = 2, 3, 32, 4
    limits = {
        **{"num_index_heads": 4, "page_size": 128, "init_blocks": 0, "local_blocks": 1, "max_decode_tokens": 16},
        **{"max_decode_query_len": 1, "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 4096},
        **{"num_sparse_layers": layers, "device": "cpu", "backend": "torch"},
    }
    generator = torch.Generator().manual_seed(rank)
    shards = [torch.randn(batch * columns, 64, 128, generator=generator) for _ in range(layers)]
    shared = torch.Generator().manual_seed(9)
    steps = iter((True, True, False))
    names: dict[str, Any] = {
        **{"world_size": world_size, "rank": rank, "limits": limits, "serving": lambda: next(steps)},
        "block_table": torch.arange(batch * columns, dtype=torch.int32).view(batch, columns),
        "seq_lens": torch.full((batch,), 4000, dtype=torch.int32),
        "num_valid_pages": torch.full((batch,), 32, dtype=torch.int32),
        "scores": torch.empty(16, 4, 32),
        "output": torch.empty(batch, 2, 16, dtype=torch.int32),
        "index_k": [keys.to(torch.float8_e4m3fn) for keys in shards],
        "queries": [torch.randn(batch, 4, 128, generator=shared).to(torch.float8_e4m3fn) for _ in range(layers)],
    }
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(code, str(README), "exec"), names)
    assert names["comm"].closed and names["layers_run"] == 2 * layers
    return names["output"]


@needs_source_tree
@pytest.mark.skipif(torch.cuda.is_available(), reason="the processes of this test have no GPU each")
def test_the_serving_example_runs() -> None:
    """It is what every process of a group runs."""
    with ProcessGroup(2) as processes:
        output = torch.cat(processes.run(run_serving_example), dim=1)
    assert output.shape == (3, 4, 16)
    # 16 of 32 blocks, the newest among them.
    assert (output.diff(dim=-1) > 0).all() and (output[..., 0] >= 0).all() and (output[..., -1] == 31).all()


@needs_source_tree
def test_it_is_short_and_its_links_lead_somewhere() -> None:
    text = README.read_text()
    assert text.count("\n") <= 200
    for page in (README, CONTRIBUTING, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (ROOT / link).exists(), f"{link} of {page.name}"


@needs_source_tree
def test_architectures_are_those_of_the_build_matrix() -> None:
    """Each with the compilers' major versions, and whether it has run."""
    lines = re.findall(r"^\| (sm_\w+) \| (.*) \|$", README.read_text(), re.MULTILINE)
    table = {name: re.split(r" *\| *", cells) for name, cells in lines}
    assert list(table) == list(ARCHITECTURES)
    for name, (_, drivers, status) in table.items():
        architecture = ARCHITECTURES[name]
        assert tuple(map(int, re.findall(r"CUDA (\d+)", drivers))) == architecture.cuda
        assert status == (f"run on {architecture.tested_on}" if architecture.tested_on else "compiled, not run")


@needs_source_tree
def test_the_tree_is_the_one_on_disk() -> None:
    """Every folder and module of the package, and every script, has its place in the contributors' tree."""
    tree = re.search(r"```\n(flashinfer_msa/ .*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    assert tree
    top: dict[str, set[str]] = {}
    for line in tree[1].splitlines():
        if folder := re.match(r"([\w.]+)/ ", line):
            entries = top.setdefault(folder[1], set())
            assert (ROOT / folder[1]).is_dir(), folder[1]
        elif entry := re.match(r"  (\w+)", line):
            entries.add(entry[1])
    for name, others in (("flashinfer_msa", {"aot", "templates", "data", "py"}), ("scripts", set())):
        paths = [path for path in (ROOT / name).iterdir() if not path.name.startswith("__")]
        assert top[name] == {path.name.split(".")[0] for path in paths} - others


@needs_source_tree
def test_where_things_are_is_where_they_are() -> None:
    """Every path in code style in the contributors' guide exists; a ``::name`` after it is defined there."""
    paths = re.findall(
        r"`((?:flashinfer_msa|aot|templates|tests|scripts|docs)/[\w./]*)(?:::(\w+))?`", CONTRIBUTING.read_text()
    )
    assert len(paths) > 20
    for path, name in paths:
        assert (ROOT / path).exists(), path
        assert not name or re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{name} in {path}"


# --- figures ----------------------------------------------------------------------------------------------------------


@needs_source_tree
def test_figures_are_those_of_the_record(figures_script: ModuleType) -> None:
    """No figure is typed, and the plots are of the record: the script that writes them finds them as they are."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(tests/gpu/peers.svg)" in README.read_text()
    for name in ("roofline.svg", "latency.svg", "prefill.svg"):
        assert f"(../tests/gpu/{name})" in figures_script.BENCHMARKS.read_text()


def test_the_sanitizers_scope_is_that_of_its_script(figures_script: ModuleType) -> None:
    """What the page says of it is what the script leaves out."""
    script, scope = (ROOT / "scripts" / "gpu_verify.sh").read_text(), figures_script.SANITIZER_SCOPE
    assert "FLASHINFER_MSA_TEST_SHAPES=small timeout" in script and "Shapes are small." in scope
    assert '-m "gpu and not traps"' in script and "Tests in which a kernel traps do not run." in scope
    (ignored,) = re.findall(r"--ignore (\S+)\)", script)
    tools = re.search(r"^tools=\((.*)\)$", script, re.MULTILINE)
    assert f"racecheck leaves out `{ignored}`" in scope and "if [[ $1 == racecheck ]]" in script
    assert (
        '[[ $tool == initcheck ]] || options=("${ours[@]}")' in script and "ours=(--kernel-name kns=msa_icp)" in script
    )
    seen = re.search(r"(\w+, \w+ and \w+) see only this package's kernels, (\w+) sees all", scope)
    assert tools and seen and re.findall(r"\w+check", f"{seen[1]} {seen[2]}") == tools[1].split()


def test_a_failure_is_in_every_page_until_a_run_clears_it(figures_script: ModuleType) -> None:
    """Known or not; a pending run removes no failure."""
    record = json.loads(RECORD.read_text())
    section = record["single"]
    section["known_failures"] = []
    for name in figures_script.gpu_record.SECTIONS[1:]:
        record.pop(name, None)
    for figures in figures_script.PAGES.values():
        assert "Failed: " not in figures(record)
    section["sanitizer"]["memcheck"] = 3
    section["known_failures"] = [{"check": "tests", "what": "had 2 failed", "since": "x", "reason": "a peer is slow"}]
    digest = figures_script.tree_digest("sm_90a")
    record["pending"] = {"source_digest": digest, "reason": "the machine is away"}
    for current in (digest, "other"):
        section["source_digest"] = current
        for figures in figures_script.PAGES.values():
            text = figures(record).replace("\n", " ")
            assert "**Failed: memcheck had 3 errors** (section `single`)." in text
            assert "**Failed: tests had 2 failed** (section `single`). Known: a peer is slow." in text
            assert ("the machine is away" in text) is (current == "other")


def test_readme_shows_where_peers_are_faster(figures_script: ModuleType) -> None:
    """A table of whole layers; the counts are of its cells, and of the plot."""
    case = {"layout": "P128-TP2", "batch": 1, "ctx": 8192, "query_len": 1, "cold": True}
    chain = {"job": "decode_chain", **case, "us": 10.0}
    score, select, window = (
        prefill_row("P256-TP4", 8192, 8192, job=job, us=us)
        for job, us in (("prefill_score", 20.0), ("prefill_select", 10.0), ("prefill_chain", 40.0))
    )
    peers = [
        {**row, "peer": "Peer 1.0", "peer_us": us, "speedup": us / row["us"]}
        for row, us in ((chain, 9.98), (score, 12.0), (select, 8.0))
    ]
    text = "\n".join(figures_script.readme_table([chain, score, select, window, *peers]))
    assert "| decode, batch 1 x 8K | 10.0 us (<1.00x) | - | - | - |" in text
    assert "| prefill, 8192 tokens of 8K | - | - | - | 40.0 us (0.50x) |" in text
    assert text.replace("\n", " ").count("Peer 1.0 in 2 of 2 cases, at worst 0.50x.") == 2
    other = {**chain, "ctx": 32768, "us": 20.0}
    found = [chain, peers[0], other, {**other, "peer": "Peer 1.0", "peer_us": 40.0, "speedup": 2.0}]
    text = "\n".join(figures_script.readme_table(found)).replace("\n", " ")
    assert "in 1 of 1 cases, at worst <1.00x" in text and "in 1 of 2 cases, at worst <1.00x" in text
    assert figures_script.readme_table([chain]) == []


def test_a_plot_of_other_rows_is_stale(
    figures_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A changed row makes the plots that show it stale, and no others; a missing plot is stale."""
    section = json.loads(RECORD.read_text())["single"]
    assert figures_script.stale_plots(section) == []
    next(row for row in section["bench"] if row["job"] == "decode_chain" and row["cold"] and "peer" in row)["us"] += 1
    assert [path.name for path in figures_script.stale_plots(section)] == ["latency.svg", "peers.svg"]
    section["date"] = "2000-01-01"
    assert len(figures_script.stale_plots(section)) == 4
    monkeypatch.setattr(figures_script, "PLOTS", {"roofline": tmp_path / "none.svg"})
    assert figures_script.stale_plots(section) == [tmp_path / "none.svg"]


def test_tables_of_rows_with_and_without_peers(figures_script: ModuleType) -> None:
    """A table is there where there are rows for it; a case that a peer lacks has a dash."""
    record = {"single": json.loads(RECORD.read_text())["single"]}
    rows = [row for row in record["single"]["bench"] if "peer" not in row and row.get("name") != "ragged batch"]
    record["single"]["bench"] = rows
    text = figures_script.benchmark_figures(record)
    assert "The time of" not in text and "ragged batch" not in text
    chain = next(row for row in rows if row["job"] == "decode_chain")
    score = next(row for row in rows if row["job"] == "decode_score")
    prefill = next(row for row in rows if row["job"] == "prefill_score" and "name" not in row)
    for row, speedup in ((chain, 3.25), (score, 0.5), (prefill, 2.0)):
        rows.append({**row, "peer": "Peer 1.0", "peer_us": row["us"] * speedup, "speedup": speedup})
    rows.append({**score, "name": "ragged batch", "us": 12.5, "ceiling_ratio": 0.75})
    text = figures_script.benchmark_figures(record)
    assert "The time of Peer 1.0 over the chain's" in text and "| 3.25x | - | - | - |" in text
    assert "The time of Peer 1.0 over the scorer's" in text and "| 0.50x | - | - | - |" in text
    assert "The time of Peer 1.0 over ours" in text and "| 2.00x | - | - |" in text
    captions = text.replace("\n", " ")
    assert "Below 1x the peer is faster: Peer 1.0 nowhere (1 cases)." in captions
    assert "Below 1x the peer is faster: Peer 1.0 in 1 of 1 cases, at worst 0.50x." in captions
    assert "Below 1x the peer is faster: score, Peer 1.0 nowhere (1 cases)." in captions
    assert f"63 of 4K: {score['layout']} 12.5 us (75%)." in text
    for job in ("decode_score", "decode_chain", "select_publish", "prefill_score", "host"):
        record["single"]["bench"] = [row for row in rows if row["job"] != job]
        assert len(figures_script.benchmark_figures(record)) < len(text)
    record["single"]["bench"] = []
    assert figures_script.benchmark_figures(record)


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
    assert "450 us: 1200 TFLOP/s (94%) | 900 us: 600 TFLOP/s (91%) |" in text and "of an FP16 one for" in text.replace(
        "\n", " "
    )
    assert text.endswith("| 8192 of 128K | P128-TP2 | 1.04x | - | - |")
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
