# SPDX-License-Identifier: Apache-2.0
"""Host time: what an eager decode costs the CPU, beside bare launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from ..layout import LAYOUTS
from ..runtime import native
from .decode import DecodeCase
from .rows import Row


def host_rows(*, calls: int = 300) -> Iterator[Row]:
    """Host time of one eager ``decode`` call: its checks and three launches, by the wall clock."""
    case = DecodeCase.make(LAYOUTS["p128_tp4"], 32, 4096, 1, cold=False)
    case.prepublish_peers()
    times = []
    for _ in range(calls):
        case.rearm()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        case.chain(case.keys[0])
        times.append(time.perf_counter() - begin)
    yield {"job": "host", "name": "decode, 3 launches", "us": statistics.median(times) * 1e6, "cold": False}
    us = bare_launch_us()
    if us is not None:
        yield {"job": "host", "name": "3 bare cuLaunchKernelEx", "us": us, "cold": False}


def bare_launch_us(count: int = 3, *, repeats: int = 300) -> float | None:
    """Median microseconds of ``count`` launches of an empty kernel by the driver; None where the launcher has none."""
    try:
        launch = native.operation("bare_launches")
    except AttributeError:
        return None
    stream = torch.cuda.current_stream()
    return float(launch(stream.device_index, stream.cuda_stream, count, repeats))
