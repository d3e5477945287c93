# SPDX-License-Identifier: Apache-2.0
"""The rows that every benchmark yields, flat dictionaries of one measured case each, and how to write them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from ..files import replace_file
from ..layout import LAYOUTS


class Row(TypedDict, total=False):
    """One measured case. Keys that do not apply to it are absent."""

    job: str
    """The measured job, such as ``decode_score``."""
    name: str
    """The ceiling, host figure or special case of the job."""
    layout: str
    batch: int
    tokens: int
    ctx: int
    query_len: int
    heads: int
    cold: bool
    """Whether the keys were not in the L2 cache."""
    us: float
    """Median microseconds."""
    bytes: int
    flops: float
    tb_s: float
    tflops: float
    ceiling_ratio: float
    """The rate over that of the ceiling in the same run. 1 is at the ceiling."""
    separate_ratio: float
    """A fused chain's time over that of the kernels it replaces, in the same step. Below 1 the fused one is faster."""
    peer: str
    """Another implementation, measured on the same case in the same run. The row compares it with ``us``."""
    peer_us: float
    speedup: float
    """``peer_us / us``."""
    gpus: int
    note: str


_CACHE_BYTES = 40 << 20
"""Bytes that an H200's L2 cache of 50 MB keeps from one call to the next."""

CASE_KEYS = ("job", "name", "layout", "batch", "tokens", "ctx", "query_len", "heads", "cold")
"""Keys that identify the case of a row."""


def case_of(row: Row) -> tuple[Any, ...]:
    """Return the case of a row. A comparison with a peer has the case of our own row."""
    return tuple(row.get(key) for key in CASE_KEYS)


def own_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that are not comparisons with a peer."""
    return [row for row in rows if "peer" not in row]


def of_job(rows: Iterable[Row], job: str, name: str | None = None) -> list[Row]:
    """Return our own rows of a job: those of a special case's ``name``, or those of no special case."""
    return [row for row in own_rows(rows) if row["job"] == job and row.get("name") == name]


def local_key_bytes(row: Row) -> int:
    """Return the bytes of keys on one rank in the case of a decode row."""
    layout = LAYOUTS[row["layout"].lower().replace("-", "_")]
    return row["batch"] * -(-row["ctx"] // layout.page_size) * layout.page_bytes


def is_as_warm_as_it_says(row: Row) -> bool:
    """Whether a decode row is cold, or its keys fit into the L2 cache."""
    return row["cold"] or local_key_bytes(row) <= _CACHE_BYTES


def keys_text(count: int) -> str:
    """Return a context length as text, such as ``128K`` or ``1M``."""
    for unit, text in ((1 << 20, "M"), (1 << 10, "K")):
        if count % unit == 0:
            return f"{count // unit}{text}"
    return str(count)


def bytes_text(count: float) -> str:
    """Return a size in binary units, such as ``64 MiB``."""
    for unit, text in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {text}"
    return f"{count:g} B"


def finished(row: Row, gpus: int = 1) -> Row:
    """Return ``row`` as it is written: figures with four decimals, and the number of GPUs that took part."""
    rounded: Any = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
    return {**rounded, "gpus": gpus}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` as JSON, one per line, completely or not at all. NaN and infinities become null."""
    plain = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    text = "[\n" + ",\n".join(json.dumps(row) for row in plain) + "\n]\n"
    path = path.resolve()  # keeps a symbolic link
    if path.exists() and not path.is_file():
        path.write_text(text)  # a device or a pipe, which must not be replaced
        return
    replace_file(path, text.encode())
