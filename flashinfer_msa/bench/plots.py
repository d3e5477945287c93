# SPDX-License-Identifier: Apache-2.0
"""Rows as plots. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure  # not pyplot, which keeps every figure and looks for a display
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..layout import LAYOUTS
from .rows import Row, bytes_text, keys_text, local_key_bytes, own_rows
from .series import SERIES

_STYLES = dict(
    zip(
        (layout.title for layout in LAYOUTS.values()),
        (
            {"color": "#0072B2", "marker": "o"},
            {"color": "#D55E00", "marker": "s"},
            {"color": "#009E73", "marker": "^"},
            {"color": "#CC79A7", "marker": "D"},
        ),
        strict=True,
    )
)
"""Of the layouts: colours that everyone can tell apart, and markers."""
_PEER_COLOURS = ("#000000", "#888888", "#E69F00")
_CEILING = {"color": "#555555", "linestyle": ":", "linewidth": 1.5, "zorder": 1}
_CEILING_POINTS = {**_CEILING, "marker": ".", "markersize": 4}
_LIGHT = {"linestyle": "", "alpha": 0.4, "markersize": 6}


def roofline(rows: Sequence[Row], caption: str) -> Figure:
    """The rate of the decode scorer over the bytes of local keys, a line a layout, under that of a streaming pass."""
    figure, axes = _start("Decode scorer: rate of reading keys and writing scores", rows, caption)
    single = [row for row in rows if row["query_len"] == 1]
    ceiling: dict[int, float] = {}
    for row in single or rows:
        size = local_key_bytes(row)
        if row["ceiling_ratio"] > 0:
            ceiling[size] = max(row["tb_s"] / row["ceiling_ratio"], ceiling.get(size, 0.0))
    axes.plot(*_columns(ceiling.items()), label="streaming read of the keys", **_CEILING_POINTS)
    for title, style in _STYLES.items():
        _line(axes, title, ((local_key_bytes(r), r["tb_s"]) for r in single if r["layout"] == title), **style)
    longer = [row for row in rows if row["query_len"] != 1]
    for row in longer:
        axes.plot(local_key_bytes(row), row["tb_s"], **_LIGHT, **_STYLES[row["layout"]])
    if longer:
        lengths = ", ".join(str(length) for length in sorted({row["query_len"] for row in longer}))
        axes.plot([], [], label=f"query length {lengths}", color="#555555", marker="o", **_LIGHT)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("rate, TB/s")
    _bytes_axis(axes, rows)
    return _finish(figure, axes)


def latency(rows: Sequence[Row], caption: str) -> Figure:
    """Microseconds of the decode chain over the bytes of local keys, a line a layout, and those of peers dashed."""
    chains = [row for row in rows if row["job"] == "decode_chain"]
    figure, axes = _start("Decode chain of one rank: score, select and publish, merge", chains, caption)
    sizes = sorted({local_key_bytes(row) for row in chains})
    rates = [row["tb_s"] for row in rows if row["job"] == "ceiling"]
    if rates:
        floor = [(size, size / max(rates) / 1e6) for size in sizes]
        axes.plot(*_columns(floor), label=f"local keys at {max(rates):.2f} TB/s, a streaming read", **_CEILING_POINTS)
    for title, style in _STYLES.items():
        own = [row for row in own_rows(chains) if row["layout"] == title]
        _line(axes, title, ((local_key_bytes(r), r["us"]) for r in own), **style)
    theirs = [row for row in chains if "peer" in row]
    for peer, colour in zip(dict.fromkeys(row["peer"] for row in theirs), itertools.cycle(_PEER_COLOURS), strict=False):
        for ranks, marker in (("TP2", "<"), ("TP4", ">")):
            # A set: both layouts of so many ranks have the same peer.
            points = {
                (local_key_bytes(r), r["peer_us"]) for r in theirs if r["peer"] == peer and r["layout"].endswith(ranks)
            }
            label = f"{peer}, unsharded, heads of {ranks}"
            _line(axes, label, points, color=colour, marker=marker, linestyle="--", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylim(bottom=1)
    _ticks(axes.yaxis, [row["us"] for row in chains] + [row["peer_us"] for row in theirs], "{:g}".format)
    axes.set_ylabel("time, us")
    _bytes_axis(axes, chains)
    return _finish(figure, axes)


def prefill(rows: Sequence[Row], caption: str) -> Figure:
    """The rate of the prefill scorer over tokens x context, a line a layout, under that of an FP8 matrix product."""
    scores = [row for row in rows if row["job"] == "prefill_score"]
    figure, axes = _start("Prefill scorer: rate of one rank", scores, caption)
    for row in rows:
        if row["job"] == "ceiling":
            axes.axhline(row["tflops"], label="FP8 matrix product, 8192 x 8192 x 8192", **_CEILING)
    for title, style in _STYLES.items():
        points = ((row["tokens"] * row["ctx"], row["tflops"]) for row in scores if row["layout"] == title)
        _line(axes, title, points, **style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("rate, TFLOP/s")
    axes.set_xscale("log", base=2)
    cases = {row["tokens"] * row["ctx"]: f"{row['tokens']} x {keys_text(row['ctx'])}" for row in scores}
    axes.set_xticks(list(cases), list(cases.values()), rotation=0 if len(cases) < 6 else 45)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("query tokens x context")
    return _finish(figure, axes)


PLOTS: dict[str, Callable[[Sequence[Row], str], Figure]] = {
    "roofline": roofline,
    "latency": latency,
    "prefill": prefill,
}
"""By name, as the rows that each shows."""


def draw(name: str, rows: Sequence[Row], where: str, path: Path, identifier: str | None = None) -> None:
    """Write the plot ``name`` of those of ``rows`` that it shows; ``where`` names their GPU and date.

    The same rows and the same matplotlib make the same SVG, which carries ``identifier`` in its metadata.
    """
    metadata: dict[str, Any] = {}
    if path.suffix.lower() == ".svg":
        metadata = {"Date": None, "Creator": None, "Identifier": identifier}
    with matplotlib.rc_context({"svg.hashsalt": "flashinfer-msa", "svg.fonttype": "none"}):
        PLOTS[name](SERIES[name](rows), where).savefig(path, metadata=metadata, dpi=160)


def _start(title: str, rows: Sequence[Row], caption: str) -> tuple[Figure, Axes]:
    """An empty plot with its title, and a caption of where, when and on what keys it was measured."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    warmth = "cold" if any(row["cold"] for row in rows) else "warm"
    figure.supxlabel(
        f"{caption}; {warmth} keys, medians of CUDA graph replays", fontsize=8, color="#555555", x=0.98, ha="right"
    )
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _line(axes: Axes, label: str, points: Iterable[tuple[float, float]], **style: Any) -> None:
    """Draw ``points``, if there are any."""
    xs, ys = _columns(points)
    if xs:
        axes.plot(xs, ys, label=label, **{"markersize": 5, "linewidth": 1.5, **style})


def _columns(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """``points`` in order, as what to plot against what."""
    ordered = sorted(points)
    return [x for x, _ in ordered], [y for _, y in ordered]


def _bytes_axis(axes: Axes, rows: Sequence[Row]) -> None:
    """Label a logarithmic axis of local key bytes in binary units."""
    axes.set_xscale("log", base=2)
    _ticks(axes.xaxis, [local_key_bytes(row) for row in rows], bytes_text, base=4)
    axes.set_xlabel("index keys of one rank, bytes")


def _ticks(axis: Axis, values: Sequence[float], text: Callable[[float], str], base: int = 2) -> None:
    """Ticks at the powers of ``base`` that ``values`` lie between, in plain numbers."""
    ticks = [1.0]
    while values and ticks[-1] < max(values):
        ticks.append(ticks[-1] * base)
    axis.set_major_locator(FixedLocator([tick for tick in ticks if tick * base > min(values, default=0)]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, position: text(value)))


def _finish(figure: Figure, axes: Axes) -> Figure:
    """Add the legend."""
    axes.legend(fontsize=8, frameon=False)
    return figure
