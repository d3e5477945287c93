# SPDX-License-Identifier: Apache-2.0
"""Command-line options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence

import click

from flashinfer_msa.layout import LAYOUTS, Layout


def _parse_layouts(context: click.Context, parameter: click.Parameter, names: Sequence[str]) -> list[Layout]:
    """Return the layouts with names such as ``p128-tp2``, or all layouts if there is no name."""
    keys = [name.lower().replace("-", "_") for name in names] or list(LAYOUTS)
    for key, name in zip(keys, names, strict=False):
        if key not in LAYOUTS:
            known = ", ".join(layout.title.lower() for layout in LAYOUTS.values())
            raise click.BadParameter(f"{name!r} is not one of {known}.")
    return [LAYOUTS[key] for key in dict.fromkeys(keys)]


layout_option = click.option(
    "--layout", "layouts", multiple=True, callback=_parse_layouts, help="Such as p128-tp2; repeatable.  [default: all]"
)
