# SPDX-License-Identifier: Apache-2.0
"""Prints the requirements of an extra and of builds, one per line, from pyproject.toml: `requirements.py <extra>`."""

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
# An extra may name this project's extra `build`, whose requirements build_requirements() returns.
print("\n".join(line for line in dict.fromkeys(requirements) if not line.startswith(project["name"])))
