# SPDX-License-Identifier: Apache-2.0
"""Receive storage of one rank, and of all ranks of one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..indexer import MSAIcpIndexerPlan
from ..runtime import native


@dataclass(frozen=True, eq=False)
class MSAIcpComm:
    """One rank's view of the group's receive storage. The indexer accepts any object with these fields.

    Shapes are those of ``msa_icp_comm_layout``. ``tagged_recv`` directly follows ``recv`` in one storage. The bases are
    int64 ``[W]``: the device addresses of every rank's ``recv`` and ``tagged_recv``. ``storages`` keeps
    that memory alive. ``errors`` is int32 ``[1]`` and counts waits that ran out. Rows and counters are zeroed once, on
    every rank, and never reset.
    """

    storages: tuple[torch.Tensor, ...]
    recv: torch.Tensor
    tagged_recv: torch.Tensor
    recv_bases: torch.Tensor
    tagged_recv_bases: torch.Tensor
    publish_generations: torch.Tensor
    expected_generations: torch.Tensor
    errors: torch.Tensor

    def __reduce__(self) -> Any:
        # A copy's bases would still point at this storage, and are invalid in another process.
        raise TypeError("receive storage cannot be copied or pickled, since peers store at its addresses: make another")


@torch.inference_mode(False)  # the tensors are written outside inference mode too
def local_comm(indexers: Sequence[MSAIcpIndexerPlan]) -> list[MSAIcpComm]:
    """Receive storage for a group whose ranks all run in this process.

    Parameters
    ----------
    indexers : sequence of MSAIcpIndexerPlan
        One indexer per rank, in the order of ranks, with equal world size, page size, backend and
        ``max_decode_tokens``. They may share one GPU, or use several GPUs with peer access.

    Returns
    -------
    list of MSAIcpComm
        One per rank, zeroed. On one device, run the publishes of all ranks before the first merge: a merge that comes
        before a publish in a stream waits for it forever.

    Raises
    ------
    ValueError
        If the indexers do not form one group, or if their GPUs cannot store into each other's memory.
    """
    if not isinstance(indexers, Iterable):
        raise ValueError(f"indexers must be a non-empty sequence of MSAIcpIndexerPlan, was {indexers!r}")
    indexers = list(indexers)
    if not indexers or not all(isinstance(indexer, MSAIcpIndexerPlan) for indexer in indexers):
        raise ValueError(f"indexers must be a non-empty sequence of MSAIcpIndexerPlan, was {indexers!r}")
    first = indexers[0]
    if [indexer.rank for indexer in indexers] != list(range(first.world_size)):
        raise ValueError(
            f"indexers must hold one indexer of each rank 0 to {first.world_size - 1} in order, "
            f"held ranks {[indexer.rank for indexer in indexers]}"
        )
    for name in ("world_size", "max_decode_tokens", "page_size", "backend"):
        values = [getattr(indexer, name) for indexer in indexers]
        if len(set(values)) > 1:
            raise ValueError(f"indexers must agree on {name}, had {values}")
    _connect([indexer.device for indexer in indexers])

    storages = [make_storage(indexer) for indexer in indexers]
    comms = [MSAIcpComm(**comm_fields(indexer, storages)) for indexer in indexers]
    for device in {indexer.device for indexer in indexers}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a peer may publish from another device as soon as this returns
    return comms


def _connect(devices: list[torch.device]) -> None:
    """Let kernels on each device store into the memory of the others."""
    if {device.type for device in devices} not in ({"cpu"}, {"cuda"}):
        raise ValueError(f"indexers must be all on CUDA devices or all on the CPU, were on {[str(d) for d in devices]}")
    for device in dict.fromkeys(devices):
        for peer in dict.fromkeys(devices):
            if device == peer:
                continue
            if not torch.cuda.can_device_access_peer(device, peer):
                raise ValueError(f"indexers must be on GPUs with peer access, but {device} cannot access {peer}")
            native.enable_peer_access(device.index, peer.index)
            # torch's allocator maps expandable segments for a peer when torch first copies to that peer.
            torch.zeros(1, device=device).to(peer)


def make_storage(indexer: MSAIcpIndexerPlan) -> torch.Tensor:
    """Allocate one rank's receive storage, zeroed."""
    return torch.zeros(indexer.comm_layout["storage_words"], dtype=torch.int32, device=indexer.device)


def comm_fields(indexer: MSAIcpIndexerPlan, storages: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The fields of a rank's comm. ``storages`` are those of all ranks, as mapped in this process."""
    layout = indexer.comm_layout
    legacy_words = layout["tagged_offset_bytes"] // 4
    recv = [storage[:legacy_words].view(layout["legacy_shape"]) for storage in storages]
    tagged = [storage[legacy_words:].view(torch.int64).view(layout["tagged_shape"]) for storage in storages]

    def addresses(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([r.data_ptr() for r in rows], dtype=torch.int64, device=indexer.device)

    def counters(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=indexer.device)

    return {
        "storages": tuple(storages),
        "recv": recv[indexer.rank],
        "tagged_recv": tagged[indexer.rank],
        "recv_bases": addresses(recv),
        "tagged_recv_bases": addresses(tagged),
        "publish_generations": counters(layout["generations_shape"]),
        "expected_generations": counters(layout["expected_shape"]),
        "errors": counters((1,)),
    }
