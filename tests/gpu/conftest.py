# SPDX-License-Identifier: Apache-2.0
"""The marker, layouts and prefill windows of the GPU tests.

``FLASHINFER_MSA_TEST_SHAPES=small`` selects shapes that a sanitizer can run.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from prefill_windows import WINDOWS

from flashinfer_msa.layout import LAYOUTS, Layout


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in this folder as one that needs a GPU."""
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(params=list(LAYOUTS.values()), ids=lambda layout: layout.name)
def layout(request: pytest.FixtureRequest) -> Layout:
    """Return each layout in turn."""
    return request.param


@pytest.fixture(params=WINDOWS)
def window(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return each prefill window in turn."""
    return WINDOWS[request.param]
