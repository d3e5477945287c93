# SPDX-License-Identifier: Apache-2.0
"""Receive storage: the rows that publishers store into and owners merge, and the counters of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .indexer import MSAIcpIndexerPlan
from .runtime import native


@dataclass(frozen=True)
class MSAIcpComm:
    """One rank's view of the group's receive storage. Any object with these fields will do for the indexer.

    Shapes are those of ``msa_icp_comm_layout``. ``tagged_recv`` lies right after ``recv`` in one storage; the bases are
    the device addresses of every rank's ``recv`` and ``tagged_recv``, int64 ``[W]``, and ``storages`` keeps what they
    point at alive; ``errors`` int32 ``[1]`` counts waits that ran out. All of it is zeroed once, on every rank, and
    never reset.
    """

    storages: tuple[torch.Tensor, ...]
    recv: torch.Tensor
    tagged_recv: torch.Tensor
    recv_bases: torch.Tensor
    tagged_recv_bases: torch.Tensor
    publish_generations: torch.Tensor
    expected_generations: torch.Tensor
    errors: torch.Tensor


def local_comm(plans: Sequence[MSAIcpIndexerPlan]) -> list[MSAIcpComm]:
    """Receive storage for ranks that all live in this process.

    Parameters
    ----------
    plans : sequence of MSAIcpIndexerPlan
        One plan a rank, in the order of ranks, of one group: equal world size, backend and ``max_decode_tokens``. Their
        devices may be one GPU, or several with peer access.

    Returns
    -------
    list of MSAIcpComm
        One a rank, zeroed. On one device, run the publishes of all ranks before the first merge: a merge that is ahead
        of a publish in a stream waits for it forever.

    Raises
    ------
    ValueError
        If the plans are not one group, or their GPUs cannot store into each other's memory.
    """
    if not isinstance(plans, Iterable):
        raise ValueError(f"plans must be a non-empty sequence of indexer plans, was {plans!r}")
    plans = list(plans)
    if not plans or not all(isinstance(plan, MSAIcpIndexerPlan) for plan in plans):
        raise ValueError(f"plans must be a non-empty sequence of indexer plans, was {plans!r}")
    first = plans[0]
    if [plan.rank for plan in plans] != list(range(first.world_size)):
        raise ValueError(
            f"plans must hold one plan of each rank 0 to {first.world_size - 1} in order, "
            f"held ranks {[plan.rank for plan in plans]}"
        )
    for name in ("world_size", "max_decode_tokens", "page_size", "backend"):
        values = [getattr(plan, name) for plan in plans]
        if len(set(values)) > 1:
            raise ValueError(f"plans must agree on {name}, had {values}")
    _connect([plan.device for plan in plans])

    layout = first.comm_layout
    storages = [torch.zeros(layout["storage_words"], dtype=torch.int32, device=plan.device) for plan in plans]
    legacy_words = layout["tagged_offset_bytes"] // 4
    recv = [storage[:legacy_words].view(layout["legacy_shape"]) for storage in storages]
    tagged = [storage[legacy_words:].view(torch.int64).view(layout["tagged_shape"]) for storage in storages]

    def addresses(rows: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        return torch.tensor([r.data_ptr() for r in rows], dtype=torch.int64, device=device)

    def counters(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    comms = [
        MSAIcpComm(
            storages=tuple(storages),
            recv=recv[rank],
            tagged_recv=tagged[rank],
            recv_bases=addresses(recv, plan.device),
            tagged_recv_bases=addresses(tagged, plan.device),
            publish_generations=counters(layout["generations_shape"], plan.device),
            expected_generations=counters(layout["expected_shape"], plan.device),
            errors=counters((1,), plan.device),
        )
        for rank, plan in enumerate(plans)
    ]
    for device in {plan.device for plan in plans}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a peer may publish from another device as soon as this returns
    return comms


def _connect(devices: list[torch.device]) -> None:
    """Let kernels on each device store into the memory of the others."""
    if {device.type for device in devices} not in ({"cpu"}, {"cuda"}):
        raise ValueError(f"plans must be all on CUDA devices or all on the CPU, were on {[str(d) for d in devices]}")
    for device in dict.fromkeys(devices):
        for peer in dict.fromkeys(devices):
            if device == peer:
                continue
            if not torch.cuda.can_device_access_peer(device, peer):
                raise ValueError(f"plans must be on GPUs with peer access, but {device} cannot access {peer}")
            native.enable_peer_access(device.index, peer.index)
            # Expandable segments of torch's allocator are mapped for a peer when torch itself first copies to it.
            torch.zeros(1, device=device).to(peer)
