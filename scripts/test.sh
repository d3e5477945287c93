#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks style and types and runs the tests, also on a fresh machine. It needs Python 3.10 or newer and a C++ compiler.
# Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare test
ruff check .
ruff format --check .
clang-format --dry-run --Werror flashinfer_msa/native/*.{h,cc}
mypy
# GPU tests measure and fill the GPU, so they run sequentially.
parallel=()
[[ -e /dev/nvidiactl ]] || parallel=(-n 2 --dist loadfile)
exec python -m pytest "${parallel[@]}" "$@"
