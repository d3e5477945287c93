#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The benchmark rows of a GPU record: prints each as it is measured and writes them all as JSON."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashinfer_msa import bench
from flashinfer_msa.layout import LAYOUTS

COLD_CASES = [(1, 131072, 1), (32, 131072, 1), (32, 131072, 4), (32, 131072, 8), (64, 131072, 1), (256, 32768, 1)]
PREFILL_CASES = [(8192, 131072), (2048, 131072), (8192, 8192)]
WARM_CASES = [(1, 8192, 1), (1, 131072, 1)]


def main(output: str) -> None:
    """Measure everything and write it to ``output``."""
    layouts = list(LAYOUTS.values())
    ceilings = list(bench.ceilings())
    gemm_tflops = next(row["tflops"] for row in ceilings if row["name"] == "fp8_gemm")
    rows = []
    for row in chain(
        ceilings,
        bench.decode_rows(layouts, COLD_CASES),
        bench.decode_rows(layouts, WARM_CASES, cold=False),
        bench.selection_rows(),
        bench.prefill_rows(layouts, PREFILL_CASES, gemm_tflops=gemm_tflops),
        bench.balance_rows([LAYOUTS["p128_tp4"], LAYOUTS["p256_tp2"]]),
        bench.host_rows(),
    ):
        row = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        rows.append({**row, "gpus": 1})
        print(json.dumps(row), flush=True)
    Path(output).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
