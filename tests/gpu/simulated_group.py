# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel group simulated on one GPU, and other helpers that the GPU tests share."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_msa.comm import MSAIcpComm, local_comm
from flashinfer_msa.indexer import MSAIcpIndexerPlan
from flashinfer_msa.layout import NUM_HEADS, TOP_K, Layout
from flashinfer_msa.testing.problems import DecodeProblem, group_indexers

SMALL = os.environ.get("FLASHINFER_MSA_TEST_SHAPES") == "small"
"""Whether to use only shapes that a sanitizer can run."""
POISON = -12345.5
"""A score that no kernel writes."""


@dataclass
class Group:
    """All ranks of a tensor-parallel group, simulated on one device."""

    layout: Layout
    indexers: list[MSAIcpIndexerPlan]
    comms: list[MSAIcpComm]

    @classmethod
    def make(
        cls,
        layout: Layout,
        *,
        tokens: int,
        max_model_len: int,
        init_blocks: int = 1,
        local_blocks: int = 2,
        backend: str = "cake",
        devices: Sequence[torch.device] | None = None,
        **limits: Any,
    ) -> Group:
        """Create every rank's indexer and receive storage, on one device unless ``devices`` names more.

        ``tokens`` is the capacity of the receive rows.
        """
        indexers = group_indexers(
            layout,
            devices or ["cuda"],
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            max_decode_tokens=tokens,
            max_decode_query_len=8,
            max_num_seqs=64,
            max_model_len=max_model_len,
            num_sparse_layers=4,
            backend=backend,
            **{"max_num_batched_tokens": 8192, **limits},
        )
        return cls(layout, indexers, local_comm(indexers))

    def scores(self, tokens: int) -> list[torch.Tensor]:
        """Return poisoned score planes, one per rank."""
        columns = self.indexers[0].decode_score_columns
        return [torch.full((tokens, NUM_HEADS, columns), POISON, device="cuda") for _ in self.indexers]

    def outputs(self, tokens: int) -> list[torch.Tensor]:
        """Return poisoned outputs, one per rank."""
        return [
            torch.full((tokens, indexer.heads_per_rank, TOP_K), -777, dtype=torch.int32, device="cuda")
            for indexer in self.indexers
        ]

    def inputs(self, problem: DecodeProblem) -> list[list[torch.Tensor]]:
        """Return each rank's query, keys, block table, lengths and valid blocks, on its device."""
        return [
            [
                tensor.to(indexer.device)
                for tensor in (
                    problem.index_q,
                    problem.shard(indexer.rank),
                    problem.block_table,
                    problem.seq_lens,
                    problem.num_valid_pages,
                )
            ]
            for indexer in self.indexers
        ]

    def publish(
        self, rank: int, problem: DecodeProblem, shard: torch.Tensor, scores: torch.Tensor | None, **options: Any
    ) -> None:
        """Run one rank's publish. ``options`` has the slot set and the row kind, and the pool if ``scores`` is None."""
        self.indexers[rank].decode_publish(
            problem.index_q,
            shard,
            problem.block_table,
            problem.seq_lens,
            problem.num_valid_pages,
            scores,
            comm=self.comms[rank],
            decode_query_len=problem.decode_query_len,
            **options,
        )

    def merge(self, rank: int, problem: DecodeProblem, output: torch.Tensor, **options: Any) -> None:
        """Run one rank's merge. ``options`` has the slot set and the row kind."""
        self.indexers[rank].decode_merge(problem.num_valid_pages, output, comm=self.comms[rank], **options)

    def decode(
        self,
        problem: DecodeProblem,
        shards: Sequence[torch.Tensor],
        scores: Sequence[torch.Tensor],
        *,
        slot: int,
        tagged: bool,
        enable_pdl: bool = True,
    ) -> torch.Tensor:
        """Run every publish, then every merge; return the owners' outputs side by side, ``[T, 4, 16]``."""
        options: dict[str, Any] = {"slot": slot, "tagged": tagged, "enable_pdl": enable_pdl}
        for rank, (shard, plane) in enumerate(zip(shards, scores, strict=True)):
            self.publish(rank, problem, shard, plane, **options)
        outputs = self.outputs(len(problem.index_q))
        for rank, output in enumerate(outputs):
            self.merge(rank, problem, output, **options)
        return torch.cat(outputs, dim=1)


@functools.cache
def _late_copy() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def late_copy(to, source, count, BLOCK: tl.constexpr):
        lanes = tl.arange(0, BLOCK)
        # It returns 0. Adding the result makes the copy wait for it.
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; nanosleep.u32 100000; and.b32 $0, $1, 0;",
            "=r,r",
            [lanes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        offsets = tl.program_id(0) * BLOCK + lanes + zero
        here = offsets < count
        tl.store(to + offsets, tl.load(source + offsets, mask=here), mask=here)

    return late_copy


def write_late(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy dense bytes with a kernel that lets its programmatic dependent start at once and writes much later."""
    count = to.numel() * to.element_size()
    _late_copy()[(-(-count // 128),)](to.view(torch.uint8), source.view(torch.uint8), count, BLOCK=128, num_warps=4)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert bitwise equality. The message shows the first difference."""
    bits = {torch.float32: torch.int32}.get(actual.dtype, actual.dtype)
    differs = actual.view(bits) != expected.view(bits)
    if differs.any():
        at = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} differ, first at {at}: "
            f"{actual[at]} instead of {expected[at]}"
        )
