# SPDX-License-Identifier: Apache-2.0
"""Times the kernels, this GPU's ceilings and peer implementations by CUDA graph replay.

Every row is a flat dictionary of one measured case. A *cold* case rotates over more than 256 MB of distinct keys inside
the captured graph, as the layers of a model do. A *warm* case reads the same keys in every call.
"""

from __future__ import annotations

from .ceilings import Ceilings, launch_rows, memory_rows, streaming_read_us
from .decode import DECODE_SHAPES, DecodeCase, DecodeShape, decode_rows, ragged_rows, selection_rows
from .host import host_rows
from .jobs import Jobs, Step
from .peers import Peer, Peers, PeerShape, find_peers
from .prefill import PREFILL_SHAPES, PrefillCase, PrefillShape, balance_rows, prefill_rows, select_rows, sweep_rows
from .rows import Row, write_rows
from .timing import at_least_min_calls, copies_of, graph_us

__all__ = [
    "DECODE_SHAPES",
    "PREFILL_SHAPES",
    "Ceilings",
    "DecodeCase",
    "DecodeShape",
    "Jobs",
    "Peer",
    "PeerShape",
    "Peers",
    "PrefillCase",
    "PrefillShape",
    "Row",
    "Step",
    "at_least_min_calls",
    "balance_rows",
    "copies_of",
    "decode_rows",
    "find_peers",
    "graph_us",
    "host_rows",
    "launch_rows",
    "memory_rows",
    "prefill_rows",
    "ragged_rows",
    "select_rows",
    "selection_rows",
    "streaming_read_us",
    "sweep_rows",
    "write_rows",
]
