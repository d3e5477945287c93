# SPDX-License-Identifier: Apache-2.0
"""Ranks with a GPU and a process each: all inputs and ways to launch, compared with the unsharded brute force."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import group_checks as checks
import pytest
import torch
from comm_checks import Setup
from group_checks import BATCHES, CHAINS, DECODE_CASES, PREFILL_CASES, QUERY_LENS, WAYS, WINDOWS
from process_group import ProcessGroup
from simulated_group import SMALL, Group

from flashinfer_msa.layout import LAYOUTS, TOP_K, WORLD_SIZES
from flashinfer_msa.testing.problems import Comparison, DecodeProblem, brute_force_top16, compare

pytestmark = [
    pytest.mark.skipif(SMALL, reason="several processes do not run under a sanitizer"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SETUP = Setup("cuda", "cake")
SIZES = [size for size in WORLD_SIZES if size <= torch.cuda.device_count()] or [2]
SECONDS = 120.0


class Ranks:
    """A group of processes and their results. Each function runs once per arguments and serves many tests."""

    def __init__(self, processes: ProcessGroup) -> None:
        self.processes, self.world_size = processes, processes.world_size
        self._found: dict[Any, checks.Results | Exception] = {}

    def counts(self, case: Any, function: Callable[..., Any], *arguments: Any) -> Comparison:
        """Return the comparison of one case over all ranks."""
        key = (function, arguments)
        if key not in self._found:
            try:
                ranks = self.processes.run(function, *arguments, SETUP, timeout=SECONDS)
                self._found[key] = {
                    case: functools.reduce(Comparison.plus, (results[case] for results in ranks)) for case in ranks[0]
                }
            except Exception as error:  # failed ranks are out of step, so the function never runs again
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, Exception):
            raise found
        return found[case]


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"tp{size}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Return a group of each size that there are GPUs for."""
    with ProcessGroup(request.param, backend="nccl") as processes:
        yield Ranks(processes)


both_pages = pytest.mark.parametrize("page_size", (128, 256), ids=("p128", "p256"))


@both_pages
@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: "-".join(map(str, case)))
def test_decode(ranks: Ranks, page_size: int, case: Any, record_property: Callable[[str, int], None]) -> None:
    """A case is a query length, batch, row kind and chain, of three layers, with and without dependent launch."""
    counts = ranks.counts(case, checks.decode_matrix, f"p{page_size}_tp{ranks.world_size}", QUERY_LENS)
    record_property("near_ties", counts.near_ties)
    assert counts.wrong == 0 and counts.near_ties <= counts.rows // 100 + 1, counts


@both_pages
@pytest.mark.parametrize("tagged", (False, True), ids=("legacy", "tagged"))
@pytest.mark.parametrize("enable_pdl", (False, True), ids=("serial", "pdl"))
@pytest.mark.parametrize("way", WAYS)
def test_steps_of_many_layers(
    ranks: Ranks,
    page_size: int,
    tagged: bool,
    enable_pdl: bool,
    way: str,
    record_property: Callable[[str, int], None],
) -> None:
    """Whole steps, launched in each way. Queries differ from layer to layer and from step to step."""
    layout = f"p{page_size}_tp{ranks.world_size}"
    counts = ranks.counts((way,), checks.decode_steps, layout, tagged, enable_pdl)
    record_property("near_ties", counts.near_ties)
    assert counts.wrong == 0 and counts.near_ties <= counts.rows // 100 + 1, counts


@both_pages
@pytest.mark.parametrize("tokens", (400, 8192), ids=("windows", "one-window"))
@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: "-".join(case))
def test_prefill(
    ranks: Ranks, page_size: int, tokens: int, case: Any, record_property: Callable[[str, int], None]
) -> None:
    """A case is a window, a chain and a way to launch. The exchange runs over NCCL."""
    layout = f"p{page_size}_tp{ranks.world_size}"
    counts = ranks.counts(case, checks.prefill_matrix, layout, tuple(WINDOWS), tokens)
    record_property("near_ties", counts.near_ties)
    assert counts.wrong == 0 and counts.near_ties <= max(counts.rows // 20, 4), counts


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.world_size == 4])
def test_two_ranks_per_gpu_in_one_process(
    name: str, batch: str, query_len: int, record_property: Callable[[str, int], None]
) -> None:
    """Four ranks run on two GPUs, ranks 0 and 1 on the first. All publish, then all merge."""
    problem = DecodeProblem.random(
        LAYOUTS[name], **BATCHES[batch], decode_query_len=query_len, device="cuda:0", seed=query_len
    )
    expected = brute_force_top16(problem, init_blocks=1, local_blocks=2)
    tokens = len(problem.index_q)
    devices = [torch.device("cuda", rank // 2) for rank in range(4)]
    group = Group.make(LAYOUTS[name], tokens=tokens, max_model_len=20001, devices=devices)
    members = list(zip(group.indexers, group.comms, strict=True))
    inputs = group.inputs(problem)
    counts = Comparison()
    for use, (tagged, chain) in enumerate(itertools.product((False, True), CHAINS)):
        options = {"slot": use % 3, "tagged": tagged}
        for (indexer, comm), arguments in zip(members, inputs, strict=True):
            scores, _ = checks.planes(indexer, tokens)
            pool = checks.decode_pool(indexer) if chain == "fused" else None
            indexer.decode_publish(*arguments, scores, comm=comm, decode_query_len=query_len, pool=pool, **options)
        outputs = []
        for (indexer, comm), arguments in zip(members, inputs, strict=True):
            output = torch.full((tokens, indexer.heads_per_rank, TOP_K), -777, dtype=torch.int32, device=indexer.device)
            indexer.decode_merge(arguments[-1], output, comm=comm, **options)
            outputs.append(output.to("cuda:0"))
        counts = counts.plus(compare(torch.cat(outputs, dim=1), expected))
    record_property("near_ties", counts.near_ties)
    assert counts.wrong == 0 and counts.near_ties <= counts.rows // 100 + 1, counts
