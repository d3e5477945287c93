# SPDX-License-Identifier: Apache-2.0
"""Runs the command line as ``python -m flashinfer_msa``."""

from flashinfer_msa.cli.main import main

if __name__ == "__main__":
    main(prog_name="flashinfer-msa")
