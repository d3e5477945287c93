# SPDX-License-Identifier: Apache-2.0
"""Checks how exact the prefill scores of portable kernels are.

test_portable_kernels.py runs this file with those kernels installed.
"""

from __future__ import annotations

import pytest
import torch
from portable_units import target_of
from prefill_windows import WINDOWS, make_plan, make_problem
from test_prefill import score_errors

from flashinfer_msa.layout import Layout
from flashinfer_msa.prefill.accumulation import ACCUMULATIONS
from flashinfer_msa.testing.problems import FP32_WORST, TENSOR_CORE_WORST

NAMES = [
    name for name in ("more and fewer keys", "ragged", "an item and one", "8192 from the start") if name in WINDOWS
]


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_as_exact_as_their_products(layout: Layout, name: str, accumulation: str) -> None:
    """With outliers among the elements, sums of FP16 products are off by no more than the rounding of FP32 sums.

    The same holds for e4m3 products that the compiler builds from FP16 products, as on sm_90. Tensor cores with e4m3
    ``mma.sync`` may sum as sm_90's warpgroup products do. That was not measured, so they get the wider limit.
    """
    target = target_of(torch.cuda.get_device_capability())
    assert target is not None
    is_rounded = accumulation == "tensor" and target.fp8_products and not target.wgmma
    limit = TENSOR_CORE_WORST if is_rounded else FP32_WORST
    problem = make_problem(layout, WINDOWS[name], special=True, block_table_extra_columns=2)
    for what, error, bound in score_errors(problem, make_plan(problem), accumulation):
        assert bool((error <= limit * bound).all()), f"{what}: {(error / bound).max()}"
