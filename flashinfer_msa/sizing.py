# SPDX-License-Identifier: Apache-2.0
"""Buffer sizes, computed on the host from the limits of a server. ``msa_ops`` re-exports the public functions."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

from .layout import (
    BLOCK_TOKENS,
    ITEM_LIST_BYTES,
    ITEM_TOKENS,
    MAX_BLOCKS,
    NUM_HEADS,
    NUM_SLOT_SETS,
    PAGE_SIZES,
    PLAN_WORKSPACE_BYTES,
    POOL_ROW_BYTES,
    ROW_WORDS,
    TAGGED_WORDS,
    WORLD_SIZES,
)

if TYPE_CHECKING:
    import torch

MAX_WINDOW_TOKENS = 8192
"""Maximum query tokens per prefill window."""


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return -(-value // divisor)


def max_items(total_q: int, batch: int) -> int:
    """Maximum number of 64-token items for ``total_q`` query tokens in ``batch`` segments. Empty segments have none."""
    return ceil_div(total_q, ITEM_TOKENS) + min(batch, total_q) - 1 if batch else 0


def require_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` if it is an integer in ``[low, high]``. Otherwise raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, was {value!r}")
    value = int(value)
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {allowed}, was {value}")
    return value


def require_page_size(page_size: Any) -> int:
    """Return ``page_size`` if a layout has it. Otherwise raise ``ValueError``."""
    return _require_one_of("page_size", page_size, PAGE_SIZES)


def require_world_size(world_size: Any) -> int:
    """Return ``world_size`` if a layout has it. Otherwise raise ``ValueError``."""
    return _require_one_of("world_size", world_size, WORLD_SIZES)


def _require_one_of(name: str, value: Any, allowed: tuple[int, ...]) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, was {value!r}")
    return int(value)


def require_device(device: Any) -> torch.device:
    """Return ``device`` as a ``torch.device``. Raise ``ValueError`` if torch does not know it."""
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device must be one that torch knows, was {device!r}") from error


def multiprocessor_count(device: torch.device | str | int | None) -> int:
    """Number of streaming multiprocessors of a CUDA device. A CPU counts as one."""
    import torch

    resolved = require_device("cuda" if device is None else device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be usable, was {resolved}: torch finds no CUDA device")
    return torch.cuda.get_device_properties(resolved).multi_processor_count if resolved.type == "cuda" else 1


def msa_icp_index_score_plan_storage(
    *, num_qo_heads: int, total_q: int, batch: int, device: torch.device | str | None
) -> dict[str, int]:
    """Sizes of a prefill plan's storage.

    Parameters
    ----------
    num_qo_heads : int
        Index heads of the query, 4.
    total_q : int
        Upper bound of the query tokens of a window, at least 1.
    batch : int
        Segments of a window, at least 1.
    device : torch.device
        Device of the plan. Its multiprocessors are counted; a CPU counts as one.

    Returns
    -------
    dict
        ``work_range_numel`` is the number of int64 elements of ``packed_work_range``: the multiprocessor count.
        ``work_info_numel`` is the number of int64 elements of ``packed_work_info``:
        ``(ceil(total_q / 128) + batch - 1) * num_qo_heads``. ``workspace_bytes`` is 32 MiB.
    """
    require_int("num_qo_heads", num_qo_heads, NUM_HEADS, NUM_HEADS)
    require_int("total_q", total_q, 1)
    require_int("batch", batch, 1)
    return {
        "work_range_numel": multiprocessor_count(device),
        "work_info_numel": (ceil_div(total_q, BLOCK_TOKENS) + batch - 1) * num_qo_heads,
        "workspace_bytes": PLAN_WORKSPACE_BYTES,
    }


def msa_icp_index_score_columns(max_seq_len: int, page_size: int) -> int:
    """Score columns of a prefill window: ``ceil(max_seq_len / 128)``, or half of that, rounded up, for 256-token pages.

    ``max_seq_len`` is in tokens. ``page_size`` is 128 or 256.
    """
    require_int("max_seq_len", max_seq_len, 1)
    require_page_size(page_size)
    return ceil_div(ceil_div(max_seq_len, BLOCK_TOKENS), page_size // BLOCK_TOKENS)


def msa_icp_decode_score_columns(max_model_len: int, page_size: int) -> int:
    """Score columns of a decode step: ``min(8192, ceil(max_model_len / (4 * page_size)) * 4)``.

    ``max_model_len`` is in tokens. ``page_size`` is 128 or 256. A column is a local page. Kernels write four columns at
    a time.
    """
    require_int("max_model_len", max_model_len, 1)
    require_page_size(page_size)
    return min(MAX_BLOCKS, ceil_div(max_model_len, 4 * page_size) * 4)


def msa_icp_decode_pool_bytes(*, max_decode_tokens: int, num_heads: int = NUM_HEADS) -> int:
    """Bytes of the fused decode chain's pool.

    The pool has ``max_decode_tokens * num_heads`` rows, 128 lists per row, and 16 8-byte entries per list.
    """
    require_int("max_decode_tokens", max_decode_tokens, 1)
    require_int("num_heads", num_heads, 1)
    return max_decode_tokens * num_heads * POOL_ROW_BYTES


def msa_icp_prefill_pool_bytes(
    *, total_q: int, batch: int, device: torch.device | str | None, num_heads: int = NUM_HEADS
) -> int:
    """Bytes of the fused prefill chain's pool: ``(ceil(total_q / 64) + batch - 1 + SMs - 1) * 32 KiB``.

    ``total_q`` query tokens in ``batch`` segments make at most ``ceil(total_q / 64) + batch - 1`` items of 64 tokens.
    Every multiprocessor of ``device`` but one may split one more item; a CPU counts as one multiprocessor. An item
    takes 64 tokens x 4 heads x 16 8-byte entries, which are 32 KiB.
    """
    require_int("total_q", total_q, 1)
    require_int("batch", batch, 1)
    require_int("num_heads", num_heads, NUM_HEADS, NUM_HEADS)
    return (ceil_div(total_q, ITEM_TOKENS) + batch - 1 + multiprocessor_count(device) - 1) * ITEM_LIST_BYTES


def msa_icp_comm_layout(world_size: int, heads_per_rank: int, capacity: int) -> dict[str, Any]:
    """Layout of the receive rows in one rank's storage, and the shapes of the counters.

    Parameters
    ----------
    world_size : int
        2 or 4.
    heads_per_rank : int
        ``4 / world_size``.
    capacity : int
        Token rows per slot set, at least 1.

    Returns
    -------
    dict
        ``storage_words`` (int32 words of the allocation), ``legacy_offset_bytes`` (0), ``legacy_shape`` (int32
        ``[3, W, hpr, capacity, 33]``), ``tagged_offset_bytes``, ``tagged_shape`` (int64 ``[3, W, hpr, capacity, 32]``),
        ``generations_shape`` (int32 ``[3, W * hpr, capacity]``) and ``expected_shape`` (int32 ``[3, hpr, capacity]``).
        Legacy rows come first. Tagged rows follow them directly.
    """
    world_size = require_world_size(world_size)
    require_int("heads_per_rank", heads_per_rank, NUM_HEADS // world_size, NUM_HEADS // world_size)
    require_int("capacity", capacity, 1)
    rows = NUM_SLOT_SETS * world_size * heads_per_rank * capacity
    legacy_words = rows * ROW_WORDS  # always even, so the tagged rows are aligned to 8 bytes
    return {
        "storage_words": legacy_words + rows * TAGGED_WORDS * 2,
        "legacy_offset_bytes": 0,
        "legacy_shape": (NUM_SLOT_SETS, world_size, heads_per_rank, capacity, ROW_WORDS),
        "tagged_offset_bytes": legacy_words * 4,
        "tagged_shape": (NUM_SLOT_SETS, world_size, heads_per_rank, capacity, TAGGED_WORDS),
        "generations_shape": (NUM_SLOT_SETS, world_size * heads_per_rank, capacity),
        "expected_shape": (NUM_SLOT_SETS, heads_per_rank, capacity),
    }
