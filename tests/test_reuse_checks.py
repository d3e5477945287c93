# SPDX-License-Identifier: Apache-2.0
"""The GPU checks of refilled stages with the torch backend: they pass, and they find one stale page or query."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from reuse_checks import QUERIES, Repeats, decode_mismatches, prefill_mismatches

from flashinfer_msa import msa_ops
from flashinfer_msa.layout import LAYOUTS, Layout

REPEATS = Repeats(launches=5, graph=False)
CPU = {"repeats": REPEATS, "device": "cpu", "backend": "torch"}
DECODE: dict[str, Any] = {"requests": 3, "length": 1500, "decode_query_len": 3, **CPU}
PREFILL: dict[str, Any] = {"segments": 5, "tokens": 9, "length": 700, "accumulation": "tensor", **CPU}

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)


@layouts
def test_correct_scores_pass(layout: Layout) -> None:
    launches = REPEATS.launches + QUERIES
    assert decode_mismatches(layout, **DECODE) == (0, launches)
    assert prefill_mismatches(layout, **PREFILL) == (0, launches)


@layouts
@pytest.mark.parametrize("stale", ["row", "query", "launch"])
def test_one_stale_read_is_found(layout: Layout, stale: str) -> None:
    """In one launch, the scorer reads one row of another page, reads another request's query, or does not run."""
    for function, check, sizes in (
        ("msa_icp_decode_index_score_sharded", decode_mismatches, DECODE),
        ("msa_icp_index_score_sharded", prefill_mismatches, PREFILL),
    ):
        score = getattr(msa_ops, function)
        calls = 0

        def misread(
            query: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, *rest: Any, score: Any = score, **options: Any
        ) -> None:
            nonlocal calls
            calls += 1
            if calls == 6:
                if stale == "launch":
                    return
                if stale == "row":
                    raw = keys.view(torch.uint8).clone()
                    page = int(table[0, 0])
                    other = next(row for row in raw[:, 0] if (row[0] ^ raw[page, 0, 0]) & 0x80)
                    raw[page, 3] = other  # from a page of the other sign
                    keys = raw.view(keys.dtype)
                else:
                    query = query.clone()
                    query.view(torch.uint8)[0] = query.view(torch.uint8)[-1]
            score(query, keys, table, *rest, **options)

        with mock.patch.object(msa_ops, function, misread):
            wrong, launches = check(layout, **sizes)
        assert launches == calls == REPEATS.launches + QUERIES
        assert wrong > 0, function
