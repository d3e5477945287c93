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
    """Host time of an eager ``decode`` call (checks and three launches), and of three launches by the driver."""
    case = DecodeCase.make(LAYOUTS["p128_tp4"], 32, 4096, 1, cold=False)
    armed = case.armed(1)
    decode, bare_launches = case.plan.decode, native.operation("bare_launches")
    query, keys, table, lengths, valid = (
        case.index_q,
        case.keys[0],
        case.block_table,
        case.seq_lens,
        case.num_valid_pages,
    )
    scores, output, comm = case.scores, case.output, armed.comms[0]
    device = torch.cuda.current_device()
    chains, bare = [], []
    for _ in range(calls):
        armed.rearm()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        decode(query, keys, table, lengths, valid, scores, output, comm=comm, slot=0, tagged=True, decode_query_len=1)
        chains.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
        bare.append(bare_launches(device, 3) / 1e3)
    yield {"job": "host", "name": "decode, 3 launches", "us": statistics.median(chains), "cold": False}
    yield {"job": "host", "name": "3 bare cuLaunchKernelEx", "us": statistics.median(bare), "cold": False}
