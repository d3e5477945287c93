# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for the manual: pages in Markdown, and the reference from docstrings."""

from flashinfer_msa.version import __version__

project = "flashinfer-msa"
copyright = "the authors of flashinfer-msa, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"flashinfer-msa {release}"
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]  # as they are: one entry may name several
autodoc_member_order = "bysource"
autodoc_typehints = "none"
python_maximum_signature_line_length = 88
