# SPDX-License-Identifier: Apache-2.0
"""The examples run with a GPU per rank."""

from __future__ import annotations

import pytest
import torch
from example_runs import EXAMPLES, run_example


@pytest.fixture(params=[2, 4])
def processes(request: pytest.FixtureRequest) -> int:
    """Return each group size that there are GPUs for."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, has {torch.cuda.device_count()}")
    return request.param


@pytest.mark.parametrize("options", [("--layout", "p128", "--tagged"), ("--layout", "p256", "--legacy")], ids=" ".join)
def test_decode(processes: int, options: tuple[str, ...]) -> None:
    """Most steps replay CUDA graphs, one per first slot set. One step runs eagerly."""
    sizes = ("--layers", 7, "--steps", 9, "--batch", 5, "--context", 9000)
    run = run_example(EXAMPLES / "tp_decode.py", *options, *sizes, processes=processes, backend="cake", seconds=120)
    assert run.status == 0, run.printed
    rows, equal, near_ties, wrong = run.checked
    assert rows == 5 * 7 * 5 * 4 and equal + near_ties == rows and wrong == 0


@pytest.mark.parametrize("options", [("--layout", "p128", "--tagged"), ("--layout", "p256", "--legacy")], ids=" ".join)
def test_serving_step(processes: int, options: tuple[str, ...]) -> None:
    """Mixed steps, some of which replay graphs that earlier steps captured."""
    sizes = ("--layers", 6, "--steps", 40, "--batch", 4, "--context", 9000, "--chunk", 1024, "--window", 400)
    script = EXAMPLES / "tp_serving_step.py"
    run = run_example(script, *options, *sizes, processes=processes, backend="cake", seconds=120)
    assert run.status == 0, run.printed
    rows, equal, near_ties, wrong = run.checked
    assert rows > 1024 * 4 and equal + near_ties == rows and wrong == 0
    assert run.numbers("'captured_layers': #") >= (6,) and run.numbers("'replayed_layers': #") >= (6,)
