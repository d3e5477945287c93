#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes README's tables and plots from ``tests/gpu/record.json``.

With ``--check`` it exits 1 where README has other tables, or where a plot is not of the record's rows: each SVG carries
the SHA-256 of the rows that it shows.
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
from flashinfer_msa.bench.rows import Row, bytes_text, case_of, is_as_warm_as_it_says, keys_text, of_job, own_rows
from flashinfer_msa.bench.series import SERIES
from flashinfer_msa.layout import BLOCK_TOKENS, LAYOUTS, WORLD_SIZES

README = ROOT / "README.md"
BEGIN, END = "<!-- figures: scripts/readme_figures.py -->", "<!-- end of figures -->"
PLOTS = {name: ROOT / "tests" / "gpu" / f"{name}.svg" for name in SERIES}
ABSENT = "-"
DECODE_JOBS = ("decode_score", "decode_chain", "decode_fused_chain")


def layout_table(
    head: str,
    rows: Iterable[Row],
    label: Callable[[Row], str],
    cell: Callable[[Row], str],
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> list[str]:
    """Cases as ``label`` tells them apart, a column a layout of ``world_sizes``: what ``cell`` says of each."""
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
    """Decode cases, a column a layout of ``world_sizes``: what ``cell`` says of each."""
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
    """Lines of ``text`` and ``table``, apart from what comes before; a line break in ``text`` is kept."""
    lines = [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(part, 118, break_long_words=False, break_on_hyphens=False)
    ]
    return ["", *lines, *(["", *table] if table else [])]


class Comparisons:
    """The rows of one job that compare it with peers."""

    def __init__(self, rows: Iterable[Row], job: str) -> None:
        found = [row for row in rows if row["job"] == job and "peer" in row]
        self.peers = list(dict.fromkeys(row["peer"] for row in found))
        self._speedups = {(case_of(row), row["peer"]): row["speedup"] for row in found}

    def cell(self, row: Row) -> str:
        """How many times our time each peer takes, in the order of ``peers``."""
        ratios = [self._speedups.get((case_of(row), peer)) for peer in self.peers]
        return ", ".join(ABSENT if ratio is None else f"{ratio:.2f}x" for ratio in ratios) or ABSENT

    def faster(self, rows: Iterable[Row]) -> str:
        """Which batches and contexts a peer is faster at, to go on a sentence."""
        cases = dict.fromkeys(
            f"{row['batch']} x {keys_text(row['ctx'])}"
            for row in rows
            if any(self._speedups.get((case_of(row), peer), 1.0) < 1.0 for peer in self.peers)
        )
        return f", which is so at {', '.join(cases)} alone" if cases else ", which is so nowhere"


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


def decode_lines(rows: Sequence[Row]) -> list[str]:
    """The scorer by case and layout, its plot, a ragged batch, and peers."""
    scores, peers = of_job(rows, "decode_score"), Comparisons(rows, "decode_score")
    if not scores:
        return []
    lines = paragraph(
        "Decode scorer, one rank, in a CUDA graph, over keys that are not in the L2 cache unless marked warm. In "
        "brackets, the time that a streaming read of the keys takes in the same run, in proportion for the scores "
        "that are written too, over the scorer's; the scorer is launched as a programmatic dependent, as the indexer "
        "does, and the read is not.\n"
        "`flashinfer-msa bench decode --plot roofline.png` measures table and plot:",
        case_table(scores, lambda row: f"{row['us']:.1f} us ({row['ceiling_ratio']:.0%})"),
    )
    lines += paragraph("![Rate of the decode scorer over the bytes of a rank's keys](tests/gpu/roofline.svg)")
    ragged = of_job(rows, "decode_score", "ragged batch")
    if ragged:
        figures = (f"{row['layout']} {row['us']:.1f} us ({row['ceiling_ratio']:.0%})" for row in ragged)
        lines += paragraph(f"A ragged batch, one request of 1M tokens among 63 of 4K: {', '.join(figures)}.")
    if peers.peers:
        compared = [row for row in scores if peers.cell(row) != ABSENT]
        lines += paragraph(
            f"The time of {', '.join(peers.peers)} over the scorer's (`--peers`): its decode scorer on as many bytes "
            "of keys, with the heads that a rank owns, where ours scores all four. Below 1 it is faster:",
            case_table(compared, peers.cell),
        )
    return lines


def chain_lines(rows: Sequence[Row]) -> list[str]:
    """Both decode chains by case and layout, their plot, and peers."""
    chains, peers = of_job(rows, "decode_chain"), Comparisons(rows, "decode_chain")
    if not chains:
        return []
    keys = ("layout", "batch", "ctx", "query_len", "cold")
    fused = {tuple(row[k] for k in keys): f"{row['us']:.1f}" for row in of_job(rows, "decode_fused_chain")}
    lines = paragraph(
        "The decode chain of one rank (score, select and publish, merge) and the fused one, with the other ranks' "
        "rows already there: chains one after another in a graph, less a copy that re-arms them all, measured alone.\n"
        "`flashinfer-msa bench chain --peers --plot latency.png` measures tables and plot:",
        case_table(chains, lambda row: f"{row['us']:.1f} us, fused {fused.get(tuple(row[k] for k in keys), ABSENT)}"),
    )
    lines += paragraph("![Time of the decode chain over the bytes of a rank's keys](tests/gpu/latency.svg)")
    if peers.peers:
        lines += paragraph(
            f"The time of {', '.join(peers.peers)} over the chain's: score and Top16 over all keys, since they shard "
            "none, for the heads that a rank owns. Where ours are warm, theirs, up to four times as many, may not be. "
            f"Below 1 a peer is faster{peers.faster(chains)}:",
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
        "Ready scores published, and arrived rows merged, launched without overlap "
        "(`flashinfer-msa bench decode --warm`):"
    )
    return paragraph(text, lines) if len(lines) > 2 else []


def prefill_lines(rows: Sequence[Row]) -> list[str]:
    """Every part of a window by case and layout, the scorer's plot, and peers."""
    cases: dict[tuple[str, str], dict[tuple[str, str | None], Row]] = {}
    for row in own_rows(rows):
        if "heads" in row and "layout" in row:
            parts = cases.setdefault((window_text(row), row["layout"]), {})
            parts[row["job"], row.get("name")] = row
    # Of other windows there are a few figures alone.
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
    peers = {job: Comparisons(rows, job) for job in ("prefill_score", "prefill_select")}
    lines = [f"| tokens of context | layout | {' | '.join(found)} |", f"|---|---|{'---|' * len(found)}"]
    compared = ["| tokens of context | layout | score | select |", "|---|---|---|---|"]
    for (window, layout), parts in whole.items():
        cells = [text(parts[key]) if key in parts else ABSENT for key, text in found.values()]
        lines.append(f"| {window} | {layout} | {' | '.join(cells)} |")
        ratios = [peers[job].cell(parts[job, None]) if (job, None) in parts else ABSENT for job in peers]
        if set(ratios) != {ABSENT}:
            compared.append(f"| {window} | {layout} | {' | '.join(ratios)} |")
    exact = ', and of an FP16 one\'s with `accumulation="exact"`' if "score, exact" in found else ""
    text = paragraph(
        "Prefill window of one segment, one rank, all four heads, cold keys, without the exchange. In brackets, "
        f"the share of an FP8 matrix product's rate (cuBLAS, 8192 x 8192 x 8192) in the same run{exact}. It may be "
        "more than 100%, since power limits both.\n"
        "`flashinfer-msa bench prefill --plot prefill.png` measures table and plot:",
        lines,
    )
    text += paragraph("![Rate of the prefill scorer over the tokens of a window](tests/gpu/prefill.svg)")
    if peers["prefill_score"].peers:
        text += paragraph(
            f"The time of {', '.join(peers['prefill_score'].peers)} over ours (`--peers`): scores of the heads that a "
            "rank owns over all keys, which are as many FLOPs, and the Top16 of those, which leaves nothing to merge:",
            compared,
        )
    return text


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

    return paragraph(
        "The local part of a prefill window, up to its carrier rows: the fused chain (`pool=`) / score and select as "
        "two launches, and in brackets the one time over the other. Below 1 the fused chain is faster.\n"
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
        "Prefill selection of random scores, all of them candidates, beside a streaming read of as many bytes in the "
        "same run.\n`flashinfer-msa bench prefill --cold` measures the table:"
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


def group_lines(section: dict[str, Any]) -> list[str]:
    """What was run with ranks that have a GPU each: tests, soak, faults, decode and prefill layers."""
    tests, rows, gpus = section["tests"], section["bench"], section["gpus"]
    soaked = ", ".join(
        f"{found['layer_steps']:,} layers of {found['form']} rows ({found['rows']:,} rows, {found['wrong']} wrong)"
        for found in section["soak"]
    )
    lines = paragraph(
        f"**Ranks with a GPU each**, {gpus} x {section['gpu']} (driver {section['driver']}, torch {section['torch']}, "
        f"{section['date']}; `scripts/gpu_verify_group.sh`): {tests['passed']} GPU tests passed, {tests['failed']} "
        f"failed, {tests['skipped']} skipped. Soaked with random delays between the ranks: {soaked or 'nothing'}."
    )
    failures = gpu_record.group_failures(section)
    if failures:
        lines += paragraph(f"**The run had failures:** {'; '.join(failures)}.")
    if section["source_digest"] != tree_digest(gpu_record.ARCHITECTURE):
        lines += paragraph("**These figures of several GPUs are of earlier sources.**")
    if section["faults"]:
        waits = [f"| {name} | {seconds:.1f} s |" for name, seconds in section["faults"].items()]
        lines += paragraph(
            "How long a rank waits for one that is gone, until it is told which rank and row that was:",
            ["| wait | gives up after |", "|---|---|", *waits],
        )
    layers, peers = of_job(rows, "decode_chain"), Comparisons(rows, "decode_chain")
    if layers:
        lines += paragraph(
            "A decode layer from end to end (score, publish over NVLink, merge) in a CUDA graph of layers with cold "
            "keys of their own: of each replay the slowest rank's time, of these the median. In brackets, the time of "
            "a streaming read of a rank's keys in the same run over the layer's:",
            case_table(layers, lambda row: f"{row['us']:.1f} us ({row['ceiling_ratio']:.0%})", (gpus,)),
        )
    if peers.peers:
        lines += paragraph(
            f"The time of {', '.join(peers.peers)} over the layer's: score and Top16 of all keys on one of the GPUs "
            "while the others are idle, for the heads that a rank owns. Below 1 a peer is "
            f"faster{peers.faster(layers)}:",
            case_table(layers, peers.cell, (gpus,)),
        )
    return lines + group_prefill_lines(rows, gpus) + host_lines(rows)


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
        f"A prefill layer of {window_text(found[0])} tokens of context with its exchange over NCCL:",
        layout_table("part", found, lambda row: row["part"], lambda row: f"{row['us']:.0f} us", (gpus,)),
    )


def figures(record: dict[str, Any]) -> str:
    """README's section between the markers."""
    single = record.get("single")
    if single is None:
        return "No run on a GPU is recorded yet."
    tests, older, errors = single["tests"], single["tests_of_older_cubins"], sum(single["sanitizer"].values())
    lines = [
        f"On an {single['gpu']} (driver {single['driver']}, torch {single['torch']}, {single['date']}): "
        f"{tests['passed']} GPU tests passed, {tests['failed']} failed, {tests['skipped']} skipped; "
        f"{', '.join(single['sanitizer'])}: {errors} errors. Skipped are tests that need two GPUs, and cases that "
        f"others cover. {single['near_ties']} rows of Top16 were other than the brute force's by near ties. "
        f"The cubins are by {' and '.join(single['compilers'])}; those of the first, which older drivers get: "
        f"{older['passed']} tests passed, {older['failed']} failed, {older['skipped']} skipped (in small shapes).",
    ]
    if single["source_digest"] != tree_digest(gpu_record.ARCHITECTURE):
        reason = record.get("pending", {}).get("reason", "no reason is given")
        lines += ["", f"**These figures are of earlier sources.** The run of the present ones is pending: {reason}."]
    elif "pending" in record:
        lines += paragraph(f"**What has not run yet:** {record['pending']['reason']}.")
    # What was marked warm and could not be is no result.
    rows = [row for row in single["bench"] if row["job"] not in DECODE_JOBS or is_as_warm_as_it_says(row)]
    lines += paragraph("In the same run (`flashinfer-msa bench decode` and `prefill`):", ceiling_table(rows))
    for part in (
        decode_lines,
        chain_lines,
        selection_lines,
        prefill_lines,
        fused_prefill_lines,
        prefill_selection_lines,
        host_lines,
        load_lines,
    ):
        lines += part(rows)
    if not host_lines(rows):
        lines += paragraph("The benchmark was cut short: what it measures last is missing.")
    for name in gpu_record.SECTIONS[1:]:
        if name in record:
            lines += group_lines(record[name])
    return "\n".join(lines)


def plot_source(section: dict[str, Any], name: str) -> tuple[list[Row], str, str]:
    """The rows of a section that plot ``name`` shows, their GPU and date, and the identifier of both."""
    rows, where = SERIES[name](section["bench"]), f"{section['gpu']}, {section['date']}"
    digest = hashlib.sha256(json.dumps([rows, where], sort_keys=True).encode()).hexdigest()
    return rows, where, f"sha256:{digest}"


def stale_plots(section: dict[str, Any]) -> list[Path]:
    """The plots that are missing or of other rows."""
    stale = []
    for name, path in PLOTS.items():
        identifier = f"<dc:identifier>{plot_source(section, name)[2]}</dc:identifier>"
        if not path.is_file() or identifier not in path.read_text():
            stale.append(path)
    return stale


@click.command()
@click.option("--check", is_flag=True, help="Exit 1 unless README and the plots have the record's figures.")
def main(check: bool) -> None:
    """Write README's tables and plots from the GPU record, or check them."""
    record = gpu_record.read()
    text = README.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = f"{head}{BEGIN}\n\n{figures(record)}\n\n{END}{tail}"
    if check:
        stale = [path.name for path in stale_plots(record["single"])] if "single" in record else []
        if text != wanted or stale:
            what = ", ".join([*(["README.md"] if text != wanted else []), *stale])
            raise click.ClickException(f"not the record's figures: {what}; run scripts/readme_figures.py")
        return
    if text != wanted:
        README.write_text(wanted)
    if "single" in record:
        from flashinfer_msa.bench.plots import draw

        for name, path in PLOTS.items():
            rows, where, identifier = plot_source(record["single"], name)
            draw(name, rows, where, path, identifier)


if __name__ == "__main__":
    main()
