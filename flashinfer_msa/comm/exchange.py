# SPDX-License-Identifier: Apache-2.0
"""The all-to-all of a prefill step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..layout import NUM_HEADS, ROW_WORDS, WORLD_SIZES


def require_group(group: Any) -> dist.ProcessGroup:
    """Return a process group that this process is in, the default group for None. Otherwise raise ``ValueError``."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group must be an initialized process group, was none: call torch.distributed.init_process_group first"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group that this process is in, was {group!r}")
    try:
        dist.get_rank(group)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"group must be a process group that exists, was {group!r}: {error}") from error
    return group


def exchange_carriers(send: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Send every rank the carrier rows of its heads: the all-to-all between ``prefill_local`` and ``prefill_merge``.

    Rows ``send[h]`` go to rank ``h // heads_per_rank``. ``received[s]`` holds the rows from rank ``s``. The exchange
    runs on the current stream and does not synchronize the host. A CUDA graph may capture it, on all ranks alike, after
    it has run once on the group. Free the graph before the group is destroyed: ``destroy_process_group`` would wait for
    it forever.

    Parameters
    ----------
    send : torch.Tensor
        int32 ``[4, T, 33]``, contiguous: this rank's carrier. ``T`` is the same on every rank. If it is 0, nothing is
        sent.
    received : torch.Tensor
        int32 ``[W, 4 // W, T, 33]``, contiguous, on the same device, without overlap with ``send``.
    group : torch.distributed.ProcessGroup, optional
        The tensor-parallel group of ``W`` = 2 or 4 processes, with a backend for the device, such as nccl for CUDA. The
        default group if None.

    Raises
    ------
    ValueError
        If an argument is not as described. Nothing has been sent then.
    """
    group = require_group(group)
    world_size = dist.get_world_size(group)
    if world_size not in WORLD_SIZES:
        raise ValueError(f"group must have {' or '.join(map(str, WORLD_SIZES))} ranks, had {world_size}")
    for name, tensor in (("send", send), ("received", received)):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
            raise ValueError(f"{name} must be a dense tensor, was {tensor!r}")
        if tensor.dtype is not torch.int32:
            raise ValueError(f"{name} must be torch.int32, was {tensor.dtype}")
    if send.dim() != 3 or send.shape[0] != NUM_HEADS or send.shape[2] != ROW_WORDS:
        raise ValueError(f"send must have shape ({NUM_HEADS}, T, {ROW_WORDS}), was {tuple(send.shape)}")
    wanted = (world_size, NUM_HEADS // world_size, *send.shape[1:])
    if tuple(received.shape) != wanted:
        raise ValueError(f"received must have shape {wanted}, was {tuple(received.shape)}")
    for name, tensor in (("send", send), ("received", received)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, had strides {tensor.stride()}: a slice of a buffer's tokens is not; take "
                f"buffer.flatten()[:{tensor.numel()}].view({tuple(tensor.shape)})"
            )
    if received.device != send.device:
        raise ValueError(f"received must be on {send.device} like send, was on {received.device}")
    if send.device.type not in ("cpu", "cuda"):
        raise ValueError(f"send must be on the CPU or a CUDA device, was on {send.device}")
    if send.device.type == "cuda" and "cuda:gloo" in (backends := dist.get_backend_config(group)):
        raise ValueError(f"group must have a backend that exchanges CUDA tensors, such as nccl, had {backends}")
    if send.numel() == 0:
        return
    begin, other = send.data_ptr(), received.data_ptr()
    if begin < other + received.nbytes and other < begin + send.nbytes:
        raise ValueError("received must have memory of its own, overlapped send")
    dist.all_to_all_single(received.view(send.shape), send, group=group)
