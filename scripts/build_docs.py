# SPDX-License-Identifier: Apache-2.0
"""Builds the manual of docs/ as HTML, with warnings as errors: ``build_docs.py [OUT]``, build/docs by default.

It needs the ``docs`` extra. The reference is made from the docstrings of this checkout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Build the manual and return Sphinx's exit status."""
    try:
        from sphinx.cmd.build import build_main
    except ModuleNotFoundError:
        raise SystemExit("Sphinx is not installed. Run: pip install furo myst-parser sphinx") from None
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    # Doctrees in the output folder would be published with the pages.
    doctrees = out.parent / f".{out.name}.doctrees"
    status = build_main(["-W", "--keep-going", "-q", "-b", "html", "-d", str(doctrees), str(ROOT / "docs"), str(out)])
    if not status:
        print(os.path.relpath(out / "index.html"))
    return status


if __name__ == "__main__":
    sys.exit(main())
