# SPDX-License-Identifier: Apache-2.0
"""The doctor on a machine with GPUs.

It finds each GPU, loads its kernels and decodes on it. A trapped context is a finding.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from simulated_group import SMALL

import flashinfer_msa
from flashinfer_msa.cli import doctor
from flashinfer_msa.runtime.loader import kernels_of

pytestmark = pytest.mark.skipif(SMALL, reason="several processes do not run under a sanitizer")

ROOT = Path(flashinfer_msa.__file__).resolve().parent.parent
LOSE_RANK_1 = """
import sys
sys.path[:] = {path!r}
from flashinfer_msa.cli import doctor
from flashinfer_msa.indexer import MSAIcpIndexerPlan as Indexer
from flashinfer_msa.testing import problems
prepare, publish = problems.prepare_msa_icp_indexer, Indexer.decode_publish
problems.prepare_msa_icp_indexer = lambda **limits: prepare(**limits, spin_limit=100000)
Indexer.decode_publish = lambda self, *args, **options: self.rank == 1 or publish(self, *args, **options)
doctor.run_task({results!r}, *{task!r})
"""


def test_every_gpu_is_found_and_decodes() -> None:
    """The command exits with 0 and reports each GPU, its kernels and its correct rows. Pairs of GPUs run together."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "flashinfer_msa", "doctor", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=500,
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], done.stdout
    texts = {(found["section"], found["name"]): found["text"] for found in report["findings"]}
    assert "CUDA " in texts["GPUs", "driver"] and torch.__version__ in texts["GPUs", "torch"]
    for index in range(torch.cuda.device_count()):
        device, text = torch.device("cuda", index), texts["GPUs", f"cuda:{index}"]
        kernels = kernels_of(device)
        assert torch.cuda.get_device_name(index) in text and f"{kernels.architecture} kernels are prebuilt" in text
        assert kernels.prebuilt is not None and kernels.prebuilt.toolkit in text
    tested = [name for section, name in texts if section == "self-test"]
    assert tested[: torch.cuda.device_count()] == [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for name in tested:
        text = texts["self-test", name]
        assert text.startswith("128 of 128 rows of Top16 right, 4 layouts") and "(backend 'cake')" in text
    reach = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)
    assert any(name.startswith("cuda:0, cuda:1") for name in tested) == reach


@pytest.mark.traps
def test_a_trapped_context_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that runs out ends the context of the testing process. The finding names the awaited rank and row."""
    monkeypatch.setattr(doctor, "_PROGRAM", LOSE_RANK_1)
    with contextlib.ExitStack() as children:
        (finding,) = doctor._start(children, "self-test", "cuda:0")()
    assert (finding.status, finding.name) == ("failure", "cuda:0"), finding
    assert finding.text.startswith("P128-TP2: rank 0 on cuda:0 waited"), finding
    assert "for rank 1 to publish the legacy receive row" in finding.text
    assert "Restart the ranks of the group" in finding.text
