# SPDX-License-Identifier: Apache-2.0
"""Checks of ranks that lose a peer; ``process_group`` runs them. A fault ends the CUDA context and so the process."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comm_checks import Rank, Setup, decode_layers

import flashinfer_msa
from flashinfer_msa.layout import LAYOUTS, NUM_SLOT_SETS

LAYERS = 6
"""Layers before the peer is killed. The next one has slot set 0."""
LAYOUT = "p128_tp2"
_KILLED_AFTER = 0.3
"""Seconds for which the peer still lives while the other rank waits for it."""
_sides: list[Rank] = []


def start(rank: int, tagged: bool, limit: dict[str, Any], setup: Setup) -> None:
    """Decode some layers with the peer, so that all kernels are loaded and all memory is mapped."""
    indexer = setup.indexer(rank, LAYOUTS[LAYOUT], **{"wait_seconds": None, **limit})
    side = Rank(indexer, setup.comm(indexer))
    dist.barrier()
    decode_layers([side], tagged, layers=LAYERS)
    _sides[:] = [side]
    dist.barrier()


def lose_the_peer(rank: int, tagged: bool, wait: str, results: Path) -> None:
    """Rank 1 is killed in the middle of a layer. Rank 0 waits, and writes the errors that it gets to ``results``.

    A ``"merge"`` waits for rows that rank 1 has not published. A legacy ``"publish"`` waits for rows that rank 1 has
    not released, because it published the layer and died before its merge. Neither process returns.
    """
    (side,) = _sides
    slot = LAYERS % NUM_SLOT_SETS
    if rank == 1:
        if wait == "publish":
            side.publish(LAYERS, slot, tagged)
            _synchronize(side)
        time.sleep(_KILLED_AFTER)
        os.kill(os.getpid(), signal.SIGKILL)
    output, valid = side.output(LAYERS), side.problem(LAYERS).num_valid_pages
    if wait == "publish":
        side.check(LAYERS, side.decode(LAYERS, slot, tagged))
    found: dict[str, Any] = {}
    begin = time.monotonic()
    try:
        if wait == "publish":
            side.publish(LAYERS, slot, tagged)
        else:
            side.decode(LAYERS, slot, tagged)
        _synchronize(side)
    except RuntimeError as error:
        found["error"] = str(error)
    found["seconds"] = time.monotonic() - begin
    fault = flashinfer_msa.last_fault()
    found["fault"] = None if fault is None else {**asdict(fault), "words": str(fault)}
    try:
        side.indexer.decode_merge(valid, output, comm=side.comm, slot=slot, tagged=tagged)
    except RuntimeError as error:
        found["next call"] = str(error)
    results.write_text(json.dumps(found))
    os._exit(0)


def come_late(rank: int, tagged: bool, seconds: float) -> None:
    """Rank 1 starts a layer ``seconds`` late, which is not a fault."""
    (side,) = _sides
    begin = time.monotonic()
    if rank == 1:
        time.sleep(seconds)
    for layer in range(LAYERS, LAYERS + NUM_SLOT_SETS):
        side.check(layer, side.decode(layer, layer % NUM_SLOT_SETS, tagged))
    assert time.monotonic() - begin > 0.9 * seconds
    assert int(side.comm.errors) == 0 and flashinfer_msa.last_fault() is None
    side.comm.close()


def _synchronize(side: Rank) -> None:
    if side.indexer.device.type == "cuda":
        torch.cuda.synchronize()
