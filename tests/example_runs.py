# SPDX-License-Identifier: Apache-2.0
"""Runs an example with torchrun, as a reader would, and parses what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "scripts" / "examples"


class ExampleRun(NamedTuple):
    """The exit status of a run, and what it printed."""

    status: int
    printed: str

    def numbers(self, pattern: str) -> tuple[int, ...]:
        """Return the numbers of the only line that matches ``pattern``, in which ``#`` stands for a number."""
        found = re.findall(pattern.replace("#", r"(\d+)"), self.printed)
        assert len(found) == 1, self.printed
        numbers = found[0] if isinstance(found[0], tuple) else found
        return tuple(map(int, numbers))

    @property
    def checked(self) -> tuple[int, ...]:
        """The numbers of checked rows, equal rows, near ties and wrong rows."""
        return self.numbers("check: # rows of Top16, # equal those of the unsharded keys, # near ties, # wrong")


def run_example(script: Path, *arguments: object, processes: int, backend: str, seconds: int = 300) -> ExampleRun:
    """Run a script in ``processes`` processes."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", processes),
        *(script, "--backend", backend, *arguments),
    ]
    result = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    return ExampleRun(result.returncode, result.stdout)
