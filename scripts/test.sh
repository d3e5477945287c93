#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks style and types and runs the tests, on a fresh machine too: needs Python 3.10 or newer and a C++ compiler.
# Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare test
ruff check .
ruff format --check .
clang-format --dry-run --Werror flashinfer_msa/native/*.{h,cc}
mypy
# GPU tests measure and fill the GPU, so they run one after another.
parallel=()
[[ -e /dev/nvidiactl ]] || parallel=(-n 2 --dist loadfile)
exec python -m pytest "${parallel[@]}" "$@"
