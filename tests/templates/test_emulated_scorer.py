# SPDX-License-Identifier: Apache-2.0
"""The portable prefill scorer on the CPU, with CUDA emulated, against the reference: the right elements meet."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flashinfer_msa import msa_ops
from flashinfer_msa.aot import launcher, matrix
from flashinfer_msa.aot.render import TEMPLATES, render
from flashinfer_msa.backends import reference
from flashinfer_msa.layout import LAYOUTS, NUM_HEADS, Layout
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.sizing import max_items
from flashinfer_msa.testing.problems import FP32_WORST, PrefillProblem

HERE = Path(__file__).parents[1]
EMULATED = ("copy_group.cuh", "launch_dependent.cuh", "launch_ordered.cuh", "mma.cuh", "mma_e4m3.cuh")
"""Wrappers of instructions in whose place ``emulated_cta.h`` has functions."""
POISON = -12345.5
"""A score that no kernel writes."""


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Absolute values of e4m3."""
    return (tensor.view(torch.uint8) & 0x7F).view(tensor.dtype)


def make_plan(problem: PrefillProblem) -> MSAIcpScorePlan:
    """A window's plan, for one multiprocessor."""
    bounds = problem.bounds
    storage = msa_ops.msa_icp_index_score_plan_storage(
        num_qo_heads=NUM_HEADS, total_q=bounds["total_q"], batch=len(problem.query_lens), device="cpu"
    )
    return msa_ops.msa_icp_index_score_sharded_plan_device(
        *problem.segments,
        NUM_HEADS,
        **bounds,
        packed_work_range=torch.zeros(storage["work_range_numel"], dtype=torch.int64),
        packed_work_info=torch.zeros(storage["work_info_numel"], dtype=torch.int64),
        workspace=torch.empty(storage["workspace_bytes"], dtype=torch.uint8),
        backend="torch",
    )


def compile_scorer(unit: matrix.Unit, folder: Path) -> ctypes.CDLL:
    """Compile a unit's source for the CPU."""
    templates = folder / "templates"
    shutil.copytree(TEMPLATES, templates)
    for name in EMULATED:
        (templates / "ptx" / name).write_text("")
    (folder / "scorer.cu").write_text(render(unit, templates))
    command = [*launcher.find_compiler().command, "-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{folder}"]
    subprocess.run([*command, HERE / "emulated_scorer.cc", "-o", folder / "scorer.so"], check=True)
    return ctypes.CDLL(str(folder / "scorer.so"))


def launch(
    scorer: ctypes.CDLL,
    kernel: matrix.Kernel,
    problem: PrefillProblem,
    plan: MSAIcpScorePlan,
    rank: int,
    scores: torch.Tensor,
) -> None:
    """Run one kernel over a window."""
    keys = problem.shard(rank)
    segments = (plan.qo_segment_lens, plan.kv_segment_lens, plan.qo_segment_offsets, plan.qo_offset)
    work = (plan.packed_work_range, plan.packed_work_info)
    tensors = (problem.index_q, keys, problem.block_table, *segments, *work, scores)
    strides = (keys.stride(0), problem.block_table.stride(0), scores.stride(0), scores.stride(1))
    counts = (max_items(plan.total_q, plan.batch), plan.columns, plan.total_q, rank, kernel.threads)
    scorer.launch(
        scorer[kernel.symbol],
        (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors)),
        (ctypes.c_longlong * len(strides))(*strides),
        (ctypes.c_int * len(counts))(*counts),
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_scores_match_the_reference(layout: Layout, tmp_path: Path) -> None:
    """Products of e4m3 and of FP16, rows of pages and of blocks, key tiles that all rows see and that some do."""
    unit = next(unit for unit in matrix.units(["sm_89"]) if (unit.job, unit.layout) == ("prefill_score", layout))
    kernels = {kernel.role: kernel for kernel in unit.kernels}
    scorer = compile_scorer(unit, tmp_path)
    problem = PrefillProblem.random(
        layout, query_lens=[65, 3], kv_lens=[600, 140], page_pitch_extra=48, special=True, seed=1
    )
    plan = make_plan(problem)
    for job in ("score", "score_global")[: layout.index_scale]:
        compact = job == "score" and layout.index_scale > 1
        for rank, role in enumerate((f"prefill_{job}", f"prefill_{job}_exact")):
            shape = (plan.total_q, NUM_HEADS, -(-plan.columns // 2) if compact else plan.columns)
            ours, theirs, bound = (torch.full(shape, POISON) for _ in range(3))
            for query, keys, plane in (
                (problem.index_q, problem.shard(rank), theirs),
                (magnitude(problem.index_q), magnitude(problem.shard(rank)), bound),
            ):
                reference.prefill_index_score(
                    query,
                    keys,
                    problem.block_table,
                    plan,
                    plane,
                    layout=layout,
                    rank=rank,
                    initialize=False,
                    compact=compact,
                )
            launch(scorer, kernels[role], problem, plan, rank, ours)
            scored = theirs.isfinite() & (theirs != POISON)
            assert scored.sum() > 300
            assert torch.equal(ours[~scored], theirs[~scored]), role
            error = (ours - theirs)[scored].abs()
            assert bool((error <= FP32_WORST * bound[scored]).all()), f"{role}: {error.max()}"
