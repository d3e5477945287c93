# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts that gather evidence on a GPU machine. It finds Python ($PYTHON) and the folder for results
# ($OUT, build/gpu by default), and installs the kernels of these sources. It needs no internet: missing packages
# (apache-tvm-ffi) are installed from wheels in $WHEELS (.whl by default). If a wheel of this project is there, it is
# verified: tests and scripts run in a folder without the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checkout=$PWD
mkdir -p "${OUT:-build/gpu}"
out=$(realpath "${OUT:-build/gpu}")
wheels=$(realpath -m "${WHEELS:-.whl}")
python=${PYTHON:-python3}
command -v "$python" > /dev/null || {
  echo "PYTHON must be a Python, was $python" >&2
  exit 1
}
shopt -s nullglob
found=("$wheels"/*.whl) ours=("$wheels"/flashinfer_msa-*.whl)
shopt -u nullglob
if [[ -n ${WHEELS:-} ]] && ((${#found[@]} == 0)); then
  echo "WHEELS must be a folder with wheels, was $WHEELS" >&2
  exit 1
fi
wheel=${ours[-1]:-}
if [[ -n $wheel ]]; then
  tree=$(mktemp -d)
  cp -r tests scripts pyproject.toml "$tree"  # pyproject.toml has pytest's settings
  cd "$tree"
else
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # the project need not be installed
fi

if ((${#found[@]})); then
  site=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "${found[@]}"
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "torch finds no CUDA device: run this on a GPU machine" >&2
  exit 1
}

# Prebuilt cubins that came with the sources are what ships. Build only if they are not of these sources.
"$python" scripts/gpu_record.py --built || "$python" -m flashinfer_msa build --arch sm_90a

# Copy the record to the results and into the checkout.
keep_record() {
  cp tests/gpu/record.json "$out/record.json"
  [[ $PWD == "$checkout" ]] || cp tests/gpu/record.json "$checkout/tests/gpu/record.json"
}
