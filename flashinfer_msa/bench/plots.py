# SPDX-License-Identifier: Apache-2.0
"""Draws rows as plots. Only this module needs matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure  # pyplot would keep every figure and look for a display
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..layout import LAYOUTS
from .rows import Row, bytes_text, case_of, keys_text, local_key_bytes, own_rows
from .series import SERIES

_LINES = (
    {"color": "#0072B2", "marker": "o"},
    {"color": "#D55E00", "marker": "s"},
    {"color": "#009E73", "marker": "^"},
    {"color": "#CC79A7", "marker": "D"},
)
"""Colours that colour-blind readers can distinguish, and markers."""
_STYLES: dict[str, Any] = dict(zip((layout.title for layout in LAYOUTS.values()), _LINES, strict=True))
_PEER_MARKERS = ("<", ">", "v")
_PEER_POINT: dict[str, Any] = {"linestyle": "", "fillstyle": "none", "markersize": 8}
_PEER_COLOURS = ("#000000", "#888888", "#E69F00")
_CEILING: dict[str, Any] = {"color": "#555555", "linestyle": ":", "linewidth": 1.5, "zorder": 1}
_CEILING_POINTS: dict[str, Any] = {**_CEILING, "marker": ".", "markersize": 4}
_LIGHT: dict[str, Any] = {"linestyle": "", "alpha": 0.4, "markersize": 6}


def roofline(rows: Sequence[Row], caption: str) -> Figure:
    """Plot the decode scorer's rate over the bytes of local keys, a line per layout, and that of a streaming pass."""
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
    """Plot the decode chain's microseconds over the bytes of local keys, a line per layout, peers dashed."""
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
            # A set, because both layouts of a world size have the same peer.
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
    """Plot the prefill scorer's rate over the query tokens, and the rate of an FP8 matrix product.

    There is a panel per layout and a line per context. Peers, on as many operations, are points in the contexts'
    colours.
    """
    scores = [row for row in rows if row["job"] == "prefill_score"]
    own = own_rows(scores)
    rates = {case_of(row): row["tflops"] for row in own}
    contexts = dict(zip(sorted({row["ctx"] for row in own}), itertools.cycle(_LINES), strict=False))
    theirs = [row for row in scores if "peer" in row]
    peers = dict(zip(dict.fromkeys(row["peer"] for row in theirs), itertools.cycle(_PEER_MARKERS), strict=False))
    titles = [title for title in _STYLES if any(row["layout"] == title for row in own)]
    figure, panels = _start_panels("Prefill scorer: rate of one rank", titles, scores, caption)
    for title, axes in panels.items():
        for row in rows:
            if row["job"] == "ceiling":
                axes.axhline(row["tflops"], label="FP8 matrix product,\n8192 x 8192 x 8192", **_CEILING)
        for context, style in contexts.items():
            case = {"layout": title, "ctx": context}
            points = ((row["tokens"], row["tflops"]) for row in own if case.items() <= row.items())
            _line(axes, f"context {keys_text(context)}", points, **style)
            for peer, marker in peers.items():
                found = [row for row in theirs if case.items() <= row.items() and row["peer"] == peer]
                points = ((row["tokens"], rates[case_of(row)] / row["speedup"]) for row in found)
                _line(axes, "", points, **{**style, **_PEER_POINT, "marker": marker})
        for peer, marker in peers.items():
            axes.plot([], [], label=peer, color="#555555", **_PEER_POINT, marker=marker)
    tokens = sorted({row["tokens"] for row in own})
    for axes in panels.values():
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(count) for count in tokens], rotation=0 if len(tokens) < 9 else 45, fontsize=7)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("query tokens")
        axes.set_ylabel("rate, TFLOP/s")
        axes.set_ylim(bottom=0)
    drawn = [axes.get_legend_handles_labels() for axes in panels.values()]
    lines = {label: line for handles, labels in drawn for line, label in zip(handles, labels, strict=True)}
    figure.legend(lines.values(), lines, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def peers(rows: Sequence[Row], caption: str) -> Figure:
    """Plot each peer's time over ours for whole layers: a panel per peer, a line per case, a point per layout."""
    cases = list(dict.fromkeys(map(_case_text, rows)))
    names = list(dict.fromkeys(row["peer"] for row in rows))
    figure = Figure(figsize=(9, 2 + 0.26 * len(cases)), layout="constrained")
    figure.suptitle("Time of a peer over ours: whole layers, one rank", x=0.02, ha="left", fontsize=11)
    _caption(figure, rows, caption)
    if not names:
        return figure
    ratios = [row["speedup"] for row in rows]
    low, high = min(ratios, default=1.0), max(ratios, default=1.0)
    # All panels have the same scale, and 1 is inside it.
    limits = min(low, 0.9) / 1.15, max(high, 1.1) * 1.15
    for name, axes in zip(names, figure.subplots(1, len(names), sharey=True, squeeze=False).flatten(), strict=True):
        axes.set_title(f"{name} (faster where shaded)", loc="left", fontsize=9)
        _plain(axes)
        axes.tick_params(labelsize=8)
        axes.axvspan(limits[0], 1, color="#D55E00", alpha=0.12, linewidth=0)
        axes.axvline(1, color="#555555", linewidth=1)
        for title, style in _STYLES.items():
            found = [row for row in rows if row["peer"] == name and row["layout"] == title]
            positions = [cases.index(_case_text(row)) for row in found]
            axes.plot([row["speedup"] for row in found], positions, label=title, linestyle="", markersize=5, **style)
        axes.set_xscale("log", base=2)
        axes.set_xlim(limits)
        axes.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(-4, 8)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}x"))
        axes.set_yticks(range(len(cases)), cases, fontsize=8)
        axes.set_ylim(len(cases) - 0.5, -0.5)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _case_text(row: Row) -> str:
    """Return a label of the layer that a row compares."""
    if "batch" in row:
        length = f", {row['query_len']} tokens each" if row["query_len"] > 1 else ""
        return f"decode {row['batch']} x {keys_text(row['ctx'])}{length}"
    return f"prefill {row['tokens']} of {keys_text(row['ctx'])}"


PLOTS: dict[str, Callable[[Sequence[Row], str], Figure]] = {
    "roofline": roofline,
    "latency": latency,
    "prefill": prefill,
    "peers": peers,
}
"""The plots by name. Each name is also that of its rows in ``SERIES``."""


def draw(name: str, rows: Sequence[Row], where: str, path: Path, identifier: str | None = None) -> None:
    """Draw the plot ``name`` of ``rows`` into ``path``. ``where`` names the GPU and the date of the measurement.

    The same rows and the same matplotlib give the same SVG, whose metadata has ``identifier``.
    """
    metadata: dict[str, Any] = {}
    if path.suffix.lower() == ".svg":
        metadata = {"Date": None, "Creator": None, "Identifier": identifier}
    with matplotlib.rc_context({"svg.hashsalt": "flashinfer-msa", "svg.fonttype": "none"}):
        PLOTS[name](SERIES[name](rows), where).savefig(path, metadata=metadata, dpi=160)


def _start(title: str, rows: Sequence[Row], caption: str) -> tuple[Figure, Axes]:
    """Return an empty plot with its title and a caption."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    _caption(figure, rows, caption)
    _plain(axes)
    return figure, axes


def _start_panels(
    title: str, names: Sequence[str], rows: Sequence[Row], caption: str
) -> tuple[Figure, dict[str, Axes]]:
    """Return an empty plot with a panel per name, two in a line, all with the same scales."""
    lines, columns = -(-len(names) // 2), min(len(names), 2)
    figure = Figure(figsize=(4 + 3 * columns, 2 + 3 * lines), layout="constrained")
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    _caption(figure, rows, caption)
    if not names:
        return figure, {}
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes in grid[len(names) :]:
        axes.remove()
    panels = dict(zip(names, grid, strict=False))
    for name, axes in panels.items():
        axes.set_title(name, loc="left", fontsize=9)
        axes.tick_params(labelbottom=True, labelleft=True)
        _plain(axes)
    return figure, panels


def _caption(figure: Figure, rows: Sequence[Row], caption: str) -> None:
    """Write the GPU, the date and the temperature of the keys below the plot."""
    warmth = "cold" if any(row["cold"] for row in rows) else "warm"
    figure.supxlabel(
        f"{caption}; {warmth} keys, medians of CUDA graph replays", fontsize=8, color="#555555", x=0.98, ha="right"
    )


def _plain(axes: Axes) -> None:
    """Draw a light grid and no frame."""
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, label: str, points: Iterable[tuple[float, float]], **style: Any) -> None:
    """Draw a line through ``points``, if there are any."""
    xs, ys = _columns(points)
    if xs:
        axes.plot(xs, ys, label=label, **{"markersize": 5, "linewidth": 1.5, **style})


def _columns(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the sorted points as a list of x and a list of y."""
    ordered = sorted(points)
    return [x for x, _ in ordered], [y for _, y in ordered]


def _bytes_axis(axes: Axes, rows: Sequence[Row]) -> None:
    """Label a logarithmic axis of local key bytes in binary units."""
    axes.set_xscale("log", base=2)
    _ticks(axes.xaxis, [local_key_bytes(row) for row in rows], bytes_text, base=4)
    axes.set_xlabel("index keys of one rank, bytes")


def _ticks(axis: Axis, values: Sequence[float], text: Callable[[float], str], base: int = 2) -> None:
    """Set ticks at the powers of ``base`` around ``values``, labelled with plain numbers."""
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
