# SPDX-License-Identifier: Apache-2.0
# Sourced by other scripts. `prepare <extra>` creates the environment $VENV (.venv by default), installs the project
# editable with one of its extras, rebuilds outdated launcher and cubins, and puts the environment first in PATH.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-$PWD/.venv}

make_environment() {
  local base=${PYTHON:-python3} torch
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "needs Python 3.10 or newer, $base is $("$base" --version 2>&1); set PYTHON" >&2
    return 1
  }
  # Images of GPU machines have a torch built for their driver. It is used and not replaced by another build.
  torch=$("$base" - <<'PROGRAM'
import importlib.util, re
from importlib import metadata
spec = importlib.util.find_spec("torch")
if spec and spec.origin:
    version = tuple(map(int, re.findall(r"\d+", metadata.version("torch"))[:2]))
    if version >= (2, 10):
        print(spec.origin.rsplit("/", 2)[0])
PROGRAM
  )
  if [[ -n $torch ]]; then
    "$base" -m venv --system-site-packages "$VENV"
    # If the base interpreter is itself an environment, its packages are not the system's, so they are added here.
    echo "$torch" >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  else
    "$base" -m venv "$VENV"
  fi
}

install_project() {
  local constraints=(-c scripts/constraints.txt) requirements
  if "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
    constraints=()
  fi
  "$VENV/bin/python" -m pip install -q --upgrade pip "setuptools>=77"
  requirements=$("$VENV/bin/python" scripts/requirements.py "$1")
  "$VENV/bin/python" -m pip install -q "${constraints[@]}" -r <(echo "$requirements")
  # All requirements are installed by now.
  "$VENV/bin/python" -m pip install -q --no-deps --no-build-isolation --editable .
}

prepare() {
  local stamp=$VENV/.installed-$1 wanted
  [[ -x $VENV/bin/python ]] || make_environment
  # Commands of the base interpreter's packages are beside it.
  export PATH=$VENV/bin:$PATH:$(dirname "$(command -v "${PYTHON:-python3}")")
  wanted=$(cat pyproject.toml scripts/constraints.txt scripts/requirements.py scripts/env.sh | sha256sum)
  if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
    install_project "$1"
    echo "$wanted" >"$stamp"
  fi
  python -c 'from flashinfer_msa.aot.build import build; build(progress=print)'
}
