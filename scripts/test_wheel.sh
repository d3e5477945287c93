#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests on an installed wheel, in a fresh environment and outside the checkout. GPU tests run if there is a
# GPU. Tests that need the source tree skip.
#
#   scripts/test_wheel.sh [WHEEL] [ARGUMENTS OF PYTEST]      builds the wheel if none is named
#
# $PYTHON creates the environment. If it has a torch that is new enough, the tests use its packages.
wheel=
if [[ ${1:-} == *.whl ]]; then
  wheel=$(realpath -e "$1") || exit 1
  shift
fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

checkout=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
VENV=$work/venv
make_environment
export PATH=$VENV/bin:$PATH XDG_CACHE_HOME=$work/cache

if [[ -z $wheel ]]; then
  python -m pip wheel -q --no-deps --wheel-dir "$work" .
  wheel=$(echo "$work"/*.whl)
fi
constraints=(-c scripts/constraints.txt)
if python -c 'import torch' 2> /dev/null; then
  constraints=()
fi
# The packages of $PYTHON may include the project, so the wheel is installed over it.
python -m pip install -q --ignore-installed --no-deps "$wheel"
python -m pip install -q "${constraints[@]}" "$wheel[test]"

cp -r tests scripts "$work"
cd "$work"
python - << 'PROGRAM' > compilers.txt
import sysconfig
from pathlib import Path

import flashinfer_msa
from flashinfer_msa.aot.backend import missing_compilers

found, site = Path(flashinfer_msa.__file__), sysconfig.get_path("purelib")
assert found.is_relative_to(site), f"flashinfer_msa must come from {site}, comes from {found}"
print(*missing_compilers(), sep="\n")
PROGRAM
python -m pip install -q -r compilers.txt
python -m pytest -c "$checkout/pyproject.toml" --rootdir "$work" -p no:cacheprovider "$@"
