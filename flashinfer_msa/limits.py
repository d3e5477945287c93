# SPDX-License-Identifier: Apache-2.0
"""The serving limits of one rank: its layout, its rank and the sizes of its buffers. They are checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .layout import MAX_FORCED_BLOCKS, MAX_QUERY_LEN, NUM_HEADS, Layout, find_layout
from .sizing import msa_icp_comm_layout, require_int, require_page_size, require_world_size

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Limits:
    """The checked arguments of ``prepare_msa_icp_indexer``. All code below the indexer takes this object.

    ``arch`` is the architecture of the kernels for the device. ``exact`` selects how prefill scorers sum products; see
    ``flashinfer_msa.prefill.accumulation``.
    """

    layout: Layout
    rank: int
    device: torch.device
    arch: str
    init_blocks: int
    local_blocks: int
    max_decode_tokens: int
    max_decode_query_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_sparse_layers: int
    spin_limit: int
    wait_seconds: float | None
    exact: bool
    num_index_heads: int = NUM_HEADS

    @property
    def world_size(self) -> int:
        """Ranks of the tensor-parallel group."""
        return self.layout.world_size

    @property
    def page_size(self) -> int:
        """Tokens of a K-cache page."""
        return self.layout.page_size

    @property
    def heads_per_rank(self) -> int:
        """Index heads whose selection this rank owns."""
        return self.layout.heads_per_rank

    @property
    def index_scale(self) -> int:
        """Global blocks per local score column."""
        return self.layout.index_scale

    @property
    def index_offset(self) -> int:
        """Global block of this rank's score column 0."""
        return self.layout.index_offset(self.rank)

    @property
    def wait_ns(self) -> int:
        """Nanoseconds after which a wait for a peer gives up. 0 means no limit."""
        return 0 if self.wait_seconds is None else round(self.wait_seconds * 1e9)

    def comm_layout(self) -> dict[str, Any]:
        """Layout of the receive rows in this rank's storage; see ``msa_icp_comm_layout``."""
        return msa_icp_comm_layout(self.world_size, self.heads_per_rank, self.max_decode_tokens)


def check_limits(
    *,
    world_size: Any,
    rank: Any,
    num_index_heads: Any,
    page_size: Any,
    init_blocks: Any,
    local_blocks: Any,
    max_decode_tokens: Any,
    max_decode_query_len: Any,
    max_num_batched_tokens: Any,
    max_num_seqs: Any,
    max_model_len: Any,
    num_sparse_layers: Any,
    spin_limit: Any,
    wait_seconds: Any,
    exact: bool,
    resolve_device: Callable[[], tuple[torch.device, str]],
) -> Limits:
    """Check the serving limits of one rank. Raise ``ValueError`` for the first limit that is out of range.

    ``resolve_device`` returns the device and its architecture. It is called after all other checks have passed.
    """
    layout = find_layout(require_page_size(page_size), require_world_size(world_size))
    require_int("num_index_heads", num_index_heads, NUM_HEADS, NUM_HEADS)
    rank = require_int("rank", rank, 0, layout.world_size - 1)
    init_blocks = require_int("init_blocks", init_blocks, 0, MAX_FORCED_BLOCKS)
    local_blocks = require_int("local_blocks", local_blocks, 0, MAX_FORCED_BLOCKS)
    if init_blocks + local_blocks > MAX_FORCED_BLOCKS:
        raise ValueError(
            f"init_blocks + local_blocks must be at most {MAX_FORCED_BLOCKS}, was {init_blocks} + {local_blocks}"
        )
    checked = dict(
        max_decode_tokens=require_int("max_decode_tokens", max_decode_tokens, 1, _MAX_INT32 // NUM_HEADS),
        max_decode_query_len=require_int("max_decode_query_len", max_decode_query_len, 1, MAX_QUERY_LEN),
        max_num_batched_tokens=require_int("max_num_batched_tokens", max_num_batched_tokens, 1, _MAX_INT32),
        max_num_seqs=require_int("max_num_seqs", max_num_seqs, 1, _MAX_INT32),
        max_model_len=require_int("max_model_len", max_model_len, 1, _MAX_INT32),
        num_sparse_layers=require_int("num_sparse_layers", num_sparse_layers, 1),
        spin_limit=require_int("spin_limit", spin_limit, 1, _MAX_INT32),
    )
    wait_seconds = _require_seconds(wait_seconds)
    device, arch = resolve_device()
    return Limits(
        layout=layout,
        rank=rank,
        device=device,
        arch=arch,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        wait_seconds=wait_seconds,
        exact=exact,
        **checked,
    )


def _require_seconds(wait_seconds: Any) -> float | None:
    if wait_seconds is None:
        return None
    number = isinstance(wait_seconds, (int, float)) and not isinstance(wait_seconds, bool)
    if not number or not 1e-3 <= wait_seconds <= 1e6:
        raise ValueError(f"wait_seconds must be None or a number of seconds in [0.001, 1000000], was {wait_seconds!r}")
    return wait_seconds
