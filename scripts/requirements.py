# SPDX-License-Identifier: Apache-2.0
"""Prints what tests and demo need, one requirement per line, as pyproject.toml states it: `requirements.py <extra>`."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools.compat.py310 import tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashinfer_msa.aot.backend import build_requirements

project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
requirements = [
    *project["dependencies"],
    *project["optional-dependencies"][sys.argv[1]],
    *build_requirements(),
]
# An extra may name another extra of this project, and build_requirements() has that one's requirements.
print("\n".join(line for line in dict.fromkeys(requirements) if not line.startswith(project["name"])))
