#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of README and docs/benchmarks.md, and their plots, from ``tests/gpu/record.json``.

With ``--check`` it exits with 1 where a page has other figures, or a plot shows other rows. Each SVG carries the
SHA-256 of its rows.
"""

from __future__ import annotations

import hashlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import gpu_record

from flashinfer_msa.aot.render import tree_digest
from flashinfer_msa.bench.report import count_faster_peers, ratio_text, where_peers_are_faster
from flashinfer_msa.bench.rows import Row, bytes_text, case_of, is_as_warm_as_it_says, keys_text, of_job, own_rows
from flashinfer_msa.bench.series import SERIES
from flashinfer_msa.layout import BLOCK_TOKENS, LAYOUTS, WORLD_SIZES

README, BENCHMARKS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: scripts/figures.py -->", "<!-- end of figures -->"
PLOTS = {name: ROOT / "tests" / "gpu" / f"{name}.svg" for name in SERIES}
ABSENT = "-"
DECODE_JOBS = ("decode_score", "decode_chain", "decode_fused_chain")
README_CASES: tuple[dict[str, int], ...] = (
    {"batch": 1, "ctx": 8 << 10, "query_len": 1},
    {"batch": 1, "ctx": 128 << 10, "query_len": 1},
    {"batch": 32, "ctx": 128 << 10, "query_len": 1},
    {"tokens": 8192, "ctx": 8 << 10},
    {"tokens": 8192, "ctx": 128 << 10},
)
"""The rows of README's table: decode and prefill, where we are slower and where we are faster."""
SANITIZER_SCOPE = (
    "Its scope is limited. Shapes are small. Tests in which a kernel traps do not run. racecheck leaves out "
    "`tests/gpu/test_prepared_steps.py`, which launches no other kernels. memcheck, racecheck and synccheck see only "
    "this package's kernels, initcheck sees all."
)
"""As ``scripts/gpu_verify.sh`` runs the tools."""


def layout_table(
    head: str,
    rows: Iterable[Row],
    label: Callable[[Row], str],
    cell: Callable[[Row], str],
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> list[str]:
    """A line per case, as ``label`` tells them apart, and a column per layout of ``world_sizes``."""
    titles = [layout.title for layout in LAYOUTS.values() if layout.world_size in world_sizes]
    lines = [f"| {head} | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(label(row), {})[row["layout"]] = row
    for name, found in cases.items():
        cells = [cell(found[title]) if title in found else ABSENT for title in titles]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def case_table(rows: Iterable[Row], cell: Callable[[Row], str], world_sizes: Sequence[int] = WORLD_SIZES) -> list[str]:
    """A line per decode case, and a column per layout of ``world_sizes``."""
    return layout_table(
        "batch x context, query length",
        rows,
        lambda row: f"{row['batch']} x {keys_text(row['ctx'])}, {row['query_len']}{'' if row['cold'] else ', warm'}",
        cell,
        world_sizes,
    )


def window_text(row: Row) -> str:
    """Which prefill window a row is of."""
    return f"{row['tokens']} of {keys_text(row['ctx'])}{'' if row['cold'] else ', warm'}"


def paragraph(text: str, table: Sequence[str] = ()) -> list[str]:
    """Lines of ``text`` and ``table``, after an empty one; a line break in ``text`` stays."""
    lines = [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(part, 118, break_long_words=False, break_on_hyphens=False)
    ]
    return ["", *lines, *(["", *table] if table else [])]


def section(title: str, *parts: list[str]) -> list[str]:
    """A heading over what ``parts`` have; nothing where they have nothing."""
    lines = [line for part in parts for line in part]
    return ["", f"## {title}", *lines] if lines else []


class Comparisons:
    """The rows of one job that compare it with peers."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = [row for row in rows if "peer" in row]
        self.peers = list(dict.fromkeys(row["peer"] for row in self.rows))
        self._speedups = {(case_of(row), row["peer"]): row["speedup"] for row in self.rows}

    def cell(self, row: Row) -> str:
        """How many times our time each peer takes, in the order of ``peers``."""
        ratios = [self._speedups.get((case_of(row), peer)) for peer in self.peers]
        return ", ".join(ABSENT if ratio is None else ratio_text(ratio) for ratio in ratios) or ABSENT

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """The comparisons of ``rows``: those that a table of them shows."""
        cases = set(map(case_of, rows))
        return [row for row in self.rows if case_of(row) in cases]


def compared(rows: Iterable[Row], job: str) -> Comparisons:
    """The comparisons of the plain cases of ``job``."""
    return Comparisons(row for row in rows if row["job"] == job and "name" not in row)


def ceiling_table(rows: Sequence[Row]) -> list[str]:
    """What the GPU did in the same run."""
    names = {
        "streaming_read": "streaming read",
        "device_copy": "copy, bytes read and written",
        "fp8_gemm": "FP8 matrix product (cuBLAS, 8192 x 8192 x 8192)",
        "fp16_gemm": "FP16 matrix product (cuBLAS, 8192 x 8192 x 8192)",
        "tiny_kernel": "one of a chain of tiny kernels in a graph",
        "tiny_kernel_pdl": "the same as programmatic dependents",
    }
    lines = ["| ceiling | |", "|---|---|"]
    for row in rows:
        if row["job"] == "ceiling":
            size = f" of {bytes_text(row['bytes'])}" if row["name"] == "streaming_read" else ""
            if "tb_s" in row:
                figure = f"{row['tb_s']:.2f} TB/s"
            elif "tflops" in row:
                figure = f"{row['tflops']:.0f} TFLOP/s"
            else:
                figure = f"{row['us']:.2f} us"
            lines.append(f"| {names.get(row['name'], row['name'])}{size} | {figure} |")
    return lines


def readme_table(rows: Sequence[Row]) -> list[str]:
    """A few whole layers beside the peers, whether they are faster or slower, and the plot of all."""
    peers = Comparisons(SERIES["peers"](rows))
    whole = [row for job in ("decode_chain", "prefill_chain") for row in of_job(rows, job) if row["cold"]]
    shown = [row for case in README_CASES for row in whole if case.items() <= row.items()]
    if not peers.of(shown):
        return []

    def label(row: Row) -> str:
        if "batch" in row:
            return f"decode, batch {row['batch']} x {keys_text(row['ctx'])}"
        return f"prefill, {row['tokens']} tokens of {keys_text(row['ctx'])}"

    text = (
        "One layer on one rank, with cold keys. Each cell has our time, and in brackets the time of "
        f"{' and of '.join(peers.peers)} over ours. {where_peers_are_faster(peers.of(shown))} The peers do not shard: "
        "they read all keys, and score only the heads that the rank owns. In decode, the rows of the other ranks are "
        "already in place. Prefill is score, select and merge. It leaves out the exchange, which the peers do not need."
    )
    lines = paragraph(text, layout_table("layer", shown, label, lambda row: f"{row['us']:.1f} us ({peers.cell(row)})"))
    return (
        lines
        + paragraph(
            f"The plot has all {len(peers.rows)} comparisons of whole layers. The peer is faster: "
            f"{count_faster_peers(peers.rows)}."
        )
        + paragraph("![Time of both peers over ours, by case and layout](tests/gpu/peers.svg)")
    )


def decode_lines(rows: Sequence[Row]) -> list[str]:
    """The scorer by case and layout, its plot, a ragged batch, and peers."""
    scores, peers = of_job(rows, "decode_score"), compared(rows, "decode_score")
    if not scores:
        return []
    lines = paragraph(
        "One rank, in a CUDA graph. Keys are cold unless a row is marked warm. The percentage compares with a "
        "streaming read of as many bytes in the same run, scores included. The scorer is a programmatic dependent, as "
        "in the indexer; the read is not.\n"
        "`flashinfer-msa bench decode --plot roofline.png` measures table and plot:",
        case_table(scores, lambda row: f"{row['us']:.1f} us ({row['ceiling_ratio']:.0%})"),
    )
    lines += paragraph("![Rate of the decode scorer over the bytes of a rank's keys](../tests/gpu/roofline.svg)")
    ragged = of_job(rows, "decode_score", "ragged batch")
    if ragged:
        figures = (f"{row['layout']} {row['us']:.1f} us ({row['ceiling_ratio']:.0%})" for row in ragged)
        lines += paragraph(f"A ragged batch, one request of 1M tokens among 63 of 4K: {', '.join(figures)}.")
    if peers.peers:
        found = [row for row in scores if peers.cell(row) != ABSENT]
        lines += paragraph(
            f"The time of {' and of '.join(peers.peers)} over the scorer's (`--peers`). The peer scores as many bytes "
            "of keys with only the heads that a rank owns, where ours scores all four. "
            f"{where_peers_are_faster(peers.of(found))}",
            case_table(found, peers.cell),
        )
    return lines


def chain_lines(rows: Sequence[Row]) -> list[str]:
    """Both decode chains by case and layout, their plot, and peers."""
    chains, peers = of_job(rows, "decode_chain"), compared(rows, "decode_chain")
    if not chains:
        return []
    keys = ("layout", "batch", "ctx", "query_len", "cold")
    fused = {tuple(row[k] for k in keys): f"{row['us']:.1f}" for row in of_job(rows, "decode_fused_chain")}
    lines = paragraph(
        "The chain of one rank (score, select and publish, merge), and the fused chain. The rows of the other ranks "
        "are in place. Chains follow one another in a graph. A copy re-arms rows and counters between them; its time, "
        "measured separately, is subtracted.\n"
        "`flashinfer-msa bench chain --peers --plot latency.png` measures tables and plot:",
        case_table(chains, lambda row: f"{row['us']:.1f} us, fused {fused.get(tuple(row[k] for k in keys), ABSENT)}"),
    )
    lines += paragraph("![Time of the decode chain over the bytes of a rank's keys](../tests/gpu/latency.svg)")
    if peers.peers:
        lines += paragraph(
            f"The time of {' and of '.join(peers.peers)} over the chain's. A peer scores all keys, since it shards "
            "none, and selects the Top16, for the heads that a rank owns. Where our keys are warm, the peer reads up "
            f"to four times as many, which may not be. {where_peers_are_faster(peers.of(chains))}",
            case_table(chains, peers.cell),
        )
    return lines


def selection_lines(rows: Sequence[Row]) -> list[str]:
    """Publisher and merge by case."""
    lines = ["| | tokens x columns | time |", "|---|---|---|"]
    names = {"select_publish": "select + publish", "merge": "merge"}
    for row in own_rows(rows):
        if row["job"] in names and "heads" not in row:
            world = row["layout"].split("-")[1]
            lines.append(
                f"| {names[row['job']]}, {world} | {row['tokens']} x {row['ctx'] // 128} | {row['us']:.1f} us |"
            )
    text = (
        "Ready scores, and rows that have arrived; no launch overlaps another (`flashinfer-msa bench decode --warm`):"
    )
    return paragraph(text, lines) if len(lines) > 2 else []


def prefill_lines(rows: Sequence[Row]) -> list[str]:
    """Every part of a window by case and layout, the scorer's plot, and peers."""
    cases: dict[tuple[str, str], dict[tuple[str, str | None], Row]] = {}
    for row in own_rows(rows):
        if "heads" in row and "layout" in row:
            parts = cases.setdefault((window_text(row), row["layout"]), {})
            parts[row["job"], row.get("name")] = row
    # Other windows have only a few figures.
    whole = {case: parts for case, parts in cases.items() if ("prefill_plan", None) in parts}
    if not whole:
        return []
    columns: dict[str, tuple[tuple[str, str | None], Callable[[Row], str]]] = {
        "plan": (("prefill_plan", None), lambda row: f"{row['us']:.1f} us"),
        "score": (("prefill_score", None), rate_text),
        "score, exact": (("prefill_score", "exact"), rate_text),
        "select": (("prefill_select", None), lambda row: f"{row['us']:.0f} us"),
        "merge": (("merge", None), lambda row: f"{row['us']:.0f} us"),
        "score, select and merge": (("prefill_chain", None), lambda row: f"{row['us']:.0f} us"),
    }
    found = {head: column for head, column in columns.items() if any(column[0] in parts for parts in whole.values())}
    lines = [f"| tokens of context | layout | {' | '.join(found)} |", f"|---|---|{'---|' * len(found)}"]
    for (window, layout), parts in whole.items():
        cells = [text(parts[key]) if key in parts else ABSENT for key, text in found.values()]
        lines.append(f"| {window} | {layout} | {' | '.join(cells)} |")
    exact = ', and of an FP16 one for `accumulation="exact"`' if "score, exact" in found else ""
    text = paragraph(
        "A window of one segment on one rank, all four heads, cold keys, without the exchange. The percentage is "
        f"of the rate of an FP8 matrix product (cuBLAS, 8192 x 8192 x 8192) in the same run{exact}. It may exceed "
        "100%, since power limits both.\n"
        "`flashinfer-msa bench prefill --plot prefill.png` measures table and plot:",
        lines,
    )
    text += paragraph("![Rate of the prefill scorer over the tokens of a window](../tests/gpu/prefill.svg)")
    return text + prefill_peer_lines(rows, [parts for parts in whole.values()])


def prefill_peer_lines(rows: Sequence[Row], windows: Sequence[dict[tuple[str, str | None], Row]]) -> list[str]:
    """The parts of prefill windows beside the peers."""
    jobs = {"score": "prefill_score", "select": "prefill_select", "whole": "prefill_chain"}
    comparisons = {part: compared(rows, job) for part, job in jobs.items()}
    comparisons["whole"] = Comparisons(row for row in SERIES["peers"](rows) if row["job"] == "prefill_chain")
    peers = comparisons["score"].peers
    lines, shown = ["| tokens of context | layout | score | select | whole |", "|---|---|---|---|---|"], []
    for parts in windows:
        own = {part: parts.get((job, None)) for part, job in jobs.items()}
        cells = [ABSENT if row is None else comparisons[part].cell(row) for part, row in own.items()]
        if set(cells) != {ABSENT}:
            shown += [row for row in own.values() if row is not None]
            first = next(row for row in own.values() if row is not None)
            lines.append(f"| {window_text(first)} | {first['layout']} | {' | '.join(cells)} |")
    if not peers or not shown:
        return []
    counts = [f"{part}, {count_faster_peers(found)}" for part, each in comparisons.items() if (found := each.of(shown))]
    return paragraph(
        f"The time of {' and of '.join(peers)} over ours (`--peers`). A peer scores all keys for the heads that a rank "
        "owns, which takes as many FLOPs, and selects their Top16. The whole is its score and select, measured one by "
        "one, over our score, select and merge: it has nothing to merge. Below 1x the peer is faster: "
        f"{'; '.join(counts)}.",
        lines,
    )


def rate_text(row: Row) -> str:
    """What a prefill scorer takes, and its rate."""
    return f"{row['us']:.0f} us: {row['tflops']:.0f} TFLOP/s ({row['ceiling_ratio']:.0%})"


def fused_prefill_lines(rows: Sequence[Row]) -> list[str]:
    """The fused prefill chain beside the two launches that it replaces, by window and layout."""
    separate = {
        (row["layout"], window_text(row)): row["us"] for row in of_job(rows, "prefill_chain", "score and select")
    }
    fused = sorted(of_job(rows, "prefill_fused"), key=lambda row: (not row["cold"], row["ctx"], row["tokens"]))
    if not fused:
        return []

    def cell(row: Row) -> str:
        return f"{row['us']:.1f} / {separate[row['layout'], window_text(row)]:.1f} us ({row['separate_ratio']:.2f})"

    slower = sum(row["separate_ratio"] > 1 for row in fused)
    return paragraph(
        "The local part of a window, up to its carrier rows: the fused chain (`pool=`) / score and select as two "
        f"launches. The ratio is in brackets. Above 1 the fused chain is slower, which it is in {slower} of "
        f"{len(fused)} cases.\n"
        "`flashinfer-msa bench prefill` measures the table:",
        layout_table("tokens of context", fused, window_text, cell),
    )


def prefill_selection_lines(rows: Sequence[Row]) -> list[str]:
    """The prefill selection of ready scores, beside reading them."""
    found = of_job(rows, "prefill_select", "random scores")
    lines = ["| tokens x heads x columns | time | of a streaming read's rate |", "|---|---|---|"]
    for row in found:
        size = f"{row['tokens']} x {row['heads']} x {row['ctx'] // BLOCK_TOKENS}"
        lines.append(f"| {size} | {row['us']:.0f} us: {row['tb_s']:.2f} TB/s | {row['ceiling_ratio']:.0%} |")
    text = (
        "Random scores, all of them candidates, beside a streaming read of as many bytes in the same run.\n"
        "`flashinfer-msa bench prefill --cold` measures the table:"
    )
    return paragraph(text, lines) if found else []


def host_lines(rows: Sequence[Row]) -> list[str]:
    """Host time."""
    figures = ", ".join(f"{row['name']}: {row['us']:.1f} us" for row in rows if row["job"] == "host")
    text = f"Host time of a decode by the wall clock (`flashinfer-msa bench host`): {figures}."
    return paragraph(text) if figures else []


def load_lines(rows: Sequence[Row]) -> list[str]:
    """What an installed wheel costs before its first call."""
    found = [row for row in rows if row["job"] == "load"]
    times = [f"{row['name']}: {row['us'] / 1e6:.2f} s" for row in found if "us" in row]
    sizes = [f", {row['bytes'] / 1e6:.1f} MB" for row in found if "bytes" in row]
    note = next((f", {row['note']}" for row in found if "note" in row), "")
    text = f"The installed wheel{''.join(sizes)}{note} (`scripts/gpu_install.py`): {', '.join(times)}."
    return paragraph(text) if found else []


def group_lines(name: str, found: dict[str, Any]) -> list[str]:
    """What ran with ranks that have a GPU each: tests, soak, faults, decode and prefill layers."""
    tests, rows, gpus = found["tests"], found["bench"], found["gpus"]
    soaked = ", ".join(
        f"{each['layer_steps']:,} layers of {each['form']} rows ({each['rows']:,} rows, {each['wrong']} wrong)"
        for each in found["soak"]
    )
    lines = paragraph(
        f"{gpus} x {found['gpu']}, a rank on each (driver {found['driver']}, torch {found['torch']}, {found['date']}; "
        f"`scripts/gpu_verify_group.sh`): {tests['passed']:,} GPU tests passed, {tests['failed']:,} failed, "
        f"{tests['skipped']:,} skipped. The soak with random delays between the ranks ran {soaked or 'nothing'}."
    )
    if found["source_digest"] != tree_digest(gpu_record.ARCHITECTURE):
        lines += paragraph("**These figures of several GPUs are of earlier sources.**")
    lines += failure_lines(name, found)
    if found["faults"]:
        waits = [f"| {wait} | {seconds:.1f} s |" for wait, seconds in found["faults"].items()]
        lines += paragraph(
            "How long a rank waits for a peer that is gone, before the fault names its rank and row:",
            ["| wait | gives up after |", "|---|---|", *waits],
        )
    layers, peers = of_job(rows, "decode_chain"), compared(rows, "decode_chain")
    if layers:
        lines += paragraph(
            "A decode layer from end to end (score, publish over NVLink, merge). A CUDA graph has many layers, each "
            "with cold keys of its own. The time is the median over replays of the slowest rank's. The percentage "
            "compares with a streaming read of a rank's keys in the same run:",
            case_table(layers, lambda row: f"{row['us']:.1f} us ({row['ceiling_ratio']:.0%})", (gpus,)),
        )
    if peers.peers:
        lines += paragraph(
            f"The time of {' and of '.join(peers.peers)} over the layer's: score and Top16 of all keys on one of the "
            "GPUs while the others are idle, for the heads that a rank owns. "
            f"{where_peers_are_faster(peers.of(layers))}",
            case_table(layers, peers.cell, (gpus,)),
        )
    return section(f"Ranks with a GPU each, {gpus} GPUs", lines, group_prefill_lines(rows, gpus), host_lines(rows))


def group_prefill_lines(rows: Sequence[Row], gpus: int) -> list[str]:
    """The parts of a prefill layer of ranks that have a GPU each."""
    parts = {
        "score and select": of_job(rows, "prefill_chain", "score and select"),
        "exchange": of_job(rows, "prefill_chain", "exchange"),
        "merge": [row for row in of_job(rows, "merge") if "heads" in row],
        "all in one": of_job(rows, "prefill_chain", "with the exchange"),
    }
    if not all(parts.values()):
        return []
    found = [{**row, "part": part} for part, measured in parts.items() for row in measured]
    return paragraph(
        f"A prefill layer of {window_text(found[0])} tokens of context, with its exchange over NCCL:",
        layout_table("part", found, lambda row: row["part"], lambda row: f"{row['us']:.0f} us", (gpus,)),
    )


def failure_lines(name: str, found: dict[str, Any]) -> list[str]:
    """The failures of a section that no run has cleared, a paragraph each."""
    lines = []
    for failure in gpu_record.failures(name, found):
        reason = f" Known: {failure['reason']}." if "reason" in failure else ""
        lines += paragraph(f"**Failed: {failure['check']} {failure['what']}** (section `{name}`).{reason}")
    return lines


def run_text(single: dict[str, Any]) -> str:
    """Where the run of one GPU was, and how its tests ended."""
    tests = single["tests"]
    return (
        f"On an {single['gpu']} (driver {single['driver']}, torch {single['torch']}, {single['date']}): "
        f"{tests['passed']:,} GPU tests passed, {tests['failed']:,} failed, {tests['skipped']:,} skipped."
    )


def run_lines(single: dict[str, Any]) -> list[str]:
    """What the run of one GPU has tested."""
    older, counts = single["tests_of_older_cubins"], single.get("sanitizer_tests", {})
    lines = paragraph(
        f"{run_text(single)} Skipped tests need two GPUs, or repeat cases that other tests cover. "
        f"{single['near_ties']:,} rows differed from the brute force, all within the near-tie tolerance.\n"
        f"The cubins are by {' and '.join(single['compilers'])}. Those of the first, which older drivers load, ran "
        f"separately in small shapes: {older['passed']:,} tests passed, {older['failed']:,} failed, "
        f"{older['skipped']:,} skipped."
    )
    tools = [
        f"{tool} {errors} errors" + (f" in {counts[tool]['passed']:,} tests" if tool in counts else "")
        for tool, errors in single["sanitizer"].items()
    ]
    return lines + paragraph(f"compute-sanitizer: {', '.join(tools)}. {SANITIZER_SCOPE}")


def state_lines(record: dict[str, Any]) -> list[str]:
    """Whether the figures of one GPU are of these sources."""
    digest = tree_digest(gpu_record.ARCHITECTURE)
    if gpu_record.is_current(record, digest):
        return []
    pending = record.get("pending", {})
    reason = pending["reason"] if pending.get("source_digest") == digest else "no reason is given"
    return paragraph(f"**These figures are of earlier sources.** The run of the present ones is pending: {reason}.")


def own_and_valid(single: dict[str, Any]) -> list[Row]:
    """The rows of a section, without those that are marked warm and could not be: they are no results."""
    return [row for row in single["bench"] if row["job"] not in DECODE_JOBS or is_as_warm_as_it_says(row)]


def readme_figures(record: dict[str, Any]) -> str:
    """README's section between the markers."""
    single = record.get("single")
    if single is None:
        return "No run on a GPU is recorded yet."
    lines = paragraph(run_text(single)) + state_lines(record)
    for name in gpu_record.SECTIONS:
        lines += failure_lines(name, record[name]) if name in record else []
    return "\n".join([*lines, *readme_table(own_and_valid(single))]).strip()


def benchmark_figures(record: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md between the markers."""
    single = record.get("single")
    if single is None:
        return "No run on a GPU is recorded yet."
    rows = own_and_valid(single)
    host = host_lines(rows) or paragraph("The benchmark was cut short: what it measures last is missing.")
    lines = section("The run", run_lines(single), state_lines(record), failure_lines("single", single))
    ceilings = paragraph("Measured in the same run (`flashinfer-msa bench decode` and `prefill`):", ceiling_table(rows))
    lines += section("Ceilings", ceilings)
    for title, part in (
        ("Decode scorer", decode_lines),
        ("Decode chain", chain_lines),
        ("Publisher and merge", selection_lines),
        ("Prefill window", prefill_lines),
        ("Fused prefill chain", fused_prefill_lines),
        ("Prefill selection", prefill_selection_lines),
    ):
        lines += section(title, part(rows))
    lines += section("Host and load time", host, load_lines(rows))
    for name in gpu_record.SECTIONS[1:]:
        lines += group_lines(name, record[name]) if name in record else []
    return "\n".join(lines).strip()


PAGES = {README: readme_figures, BENCHMARKS: benchmark_figures}
"""What makes the figures of each page."""


def with_figures(page: Path, record: dict[str, Any]) -> str:
    """The text of ``page`` with the figures of ``record``."""
    head, rest = page.read_text().split(BEGIN)
    return f"{head}{BEGIN}\n\n{PAGES[page](record)}\n\n{END}{rest.split(END)[1]}"


def plot_source(section: dict[str, Any], name: str) -> tuple[str, str]:
    """The GPU and date of a section, and the identifier of these and the rows that plot ``name`` shows."""
    rows, where = SERIES[name](section["bench"]), f"{section['gpu']}, {section['date']}"
    digest = hashlib.sha256(json.dumps([rows, where], sort_keys=True).encode()).hexdigest()
    return where, f"sha256:{digest}"


def stale_plots(section: dict[str, Any]) -> list[Path]:
    """The plots that are missing or of other rows."""
    stale = []
    for name, path in PLOTS.items():
        identifier = f"<dc:identifier>{plot_source(section, name)[1]}</dc:identifier>"
        if not path.is_file() or identifier not in path.read_text():
            stale.append(path)
    return stale


@click.command()
@click.option("--check", is_flag=True, help="Exit 1 unless the pages and the plots have the record's figures.")
def main(check: bool) -> None:
    """Write the tables and plots of the GPU record, or check them."""
    record = gpu_record.read()
    wanted = {page: with_figures(page, record) for page in PAGES}
    stale = [page for page, text in wanted.items() if page.read_text() != text]
    if check:
        stale += stale_plots(record["single"]) if "single" in record else []
        if stale:
            names = ", ".join(path.name for path in stale)
            raise click.ClickException(f"not the record's figures: {names}; run scripts/figures.py")
        return
    for page in stale:
        page.write_text(wanted[page])
    if "single" in record:
        from flashinfer_msa.bench.plots import draw

        for name, path in PLOTS.items():
            where, identifier = plot_source(record["single"], name)
            draw(name, record["single"]["bench"], where, path, identifier)


if __name__ == "__main__":
    main()
