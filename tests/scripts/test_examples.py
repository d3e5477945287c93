# SPDX-License-Identifier: Apache-2.0
"""The examples run on the CPU, over Gloo with the reference, and find out what is wrong."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from example_runs import EXAMPLES, run_example

from flashinfer_msa.layout import LAYOUTS, NUM_HEADS, Layout
from flashinfer_msa.testing.problems import DecodeProblem

DECODE, SERVING = EXAMPLES / "tp_decode.py", EXAMPLES / "tp_serving_step.py"
BROKEN = """
import os, runpy, sys
import serving

write = serving.IndexKeyCache.write

def misplace(self, layer, keys, rows):
    write(self, layer, keys, rows.roll(1) if os.environ["RANK"] == "1" else rows)

serving.IndexKeyCache.write = misplace
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    """What the examples share, and the serving one."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("serving"), importlib.import_module("tp_serving_step")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize(
    ("processes", "form"),
    [(2, ("--layout", "p128", "--tagged")), (2, ("--layout", "p256", "--legacy")), (4, ("--layout", "p256"))],
)
def test_decode(processes: int, form: tuple[str, ...]) -> None:
    """Every checked row is right, whatever slot set a step starts with; more blocks exist than are selected."""
    layers, steps, batch = 4, 5, 2
    sizes = ("--layers", layers, "--steps", steps, "--batch", batch, "--context", 3000)
    run = run_example(DECODE, *form, *sizes, processes=processes, backend="torch")
    assert run.status == 0, run.printed
    rows = steps * layers * batch * NUM_HEADS
    assert run.checked == (rows, rows, 0, 0)
    assert f"-TP{processes}, {'legacy' if '--legacy' in form else 'tagged'} rows" in run.printed
    assert "us per layer" in run.printed and "tokens/s" in run.printed


@pytest.mark.parametrize(("processes", "form"), [(2, ("--layout", "p256", "--tagged")), (2, ("--legacy",))])
def test_serving_step(processes: int, form: tuple[str, ...]) -> None:
    """Requests arrive, prefill in windows, decode and finish, and every checked row is right."""
    sizes = ("--layers", 2, "--steps", 16, "--batch", 2, "--context", 2800, "--chunk", 400, "--window", 160)
    run = run_example(SERVING, *form, *sizes, processes=processes, backend="torch")
    assert run.status == 0, run.printed
    rows, equal, near_ties, wrong = run.checked
    assert rows > 2 * 400 * NUM_HEADS and (equal, near_ties, wrong) == (rows, 0, 0)
    finished, arrived = run.numbers("requests: # of # finished")
    assert 0 < finished <= arrived
    assert "with prefill" in run.printed and "decode tokens/s" in run.printed
    (steps,) = run.numbers("2 layers, # steps")
    assert run.numbers("'eager_layers': #") == (2 * steps,)


@pytest.mark.parametrize("script", [DECODE, SERVING], ids=lambda script: script.stem)
def test_misplaced_keys_are_found(script: Path, tmp_path: Path) -> None:
    """A rank that writes its keys to the wrong rows makes rows of Top16 wrong, and the example fail."""
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN.format(script=str(script)))
    sizes = ("--layers", 2, "--steps", 8, "--batch", 2, "--context", 4000)
    sizes += ("--chunk", 1024) if script == SERVING else ()
    run = run_example(broken, *sizes, processes=2, backend="torch")
    assert run.status != 0
    rows, _, _, wrong = run.checked
    assert 0 < wrong <= rows, run.printed


@pytest.mark.parametrize("script", [DECODE, SERVING], ids=lambda path: path.stem)
def test_a_process_alone_is_told_to_use_torchrun(script: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent.parent)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 2 and f"torchrun --nproc-per-node 2 {script}" in done.stderr


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_ranks_hold_the_shards_of_the_cache(modules: tuple[ModuleType, ModuleType], layout: Layout) -> None:
    """Keys written token by token make the shards of the unsharded cache; padding and other ranks' go nowhere."""
    serving, _ = modules
    pool = serving.PagePool(6, layout.page_size, seed=1)
    requests = [serving.Request(prompt=n, total=n) for n in (layout.page_size + 5, 3 * layout.page_size)]
    slots = torch.cat([request.grow(request.prompt, pool) for request in requests] + [torch.tensor([-1, -1])])
    keys = torch.randn(len(slots), 128).to(torch.float8_e4m3fn)
    whole = serving.UnshardedKeys(layout, layers=[0], num_pages=6, device=torch.device("cpu"))
    whole.write(0, keys, slots)
    problem = DecodeProblem(
        layout=layout,
        pages=whole.pages[0],
        block_table=serving.block_table(requests, (2, 4)),
        seq_lens=torch.tensor([request.length for request in requests], dtype=torch.int32),
        index_q=torch.zeros(2, NUM_HEADS, 128).to(torch.float8_e4m3fn),
        decode_query_len=1,
    )
    first = problem.pages[problem.block_table[0, :2].long()].view(torch.uint8).flatten(0, 1)
    assert torch.equal(first[: requests[0].length], keys.view(torch.uint8)[: requests[0].length])
    for rank in range(layout.world_size):
        cache = serving.IndexKeyCache(layout, rank, layers=1, num_pages=6, device=torch.device("cpu"))
        cache.write(0, keys, cache.local_rows(slots))
        assert torch.equal(cache.shards[0][:6].view(torch.uint8), problem.shard(rank).view(torch.uint8))


def test_a_request_may_have_no_token_yet(modules: tuple[ModuleType, ModuleType]) -> None:
    serving, _ = modules
    request, pool = serving.Request(prompt=0, total=1), serving.PagePool(1, 128, seed=0)
    assert request.grow(0, pool).dtype is torch.int64 and request.grow(1, pool).tolist() == [0]


def test_scheduler_gives_every_page_to_one_request(modules: tuple[ModuleType, ModuleType]) -> None:
    """All requests finish in a pool too small for them at once; no page has two owners, and all come back."""
    serving, example = modules
    pool = serving.PagePool(8, 128, seed=0)
    requests = [serving.Request(prompt=n, total=n + 3) for n in (500, 130, 900, 1, 256)]
    scheduler = example.Scheduler([(i % 3, request) for i, request in enumerate(requests)], pool, batch=3, chunk=200)
    waited = False
    for step in range(40):
        decode, prefill = scheduler.schedule(step)
        assert sum(tokens for _, tokens in prefill) <= 200 and len(decode) + len(prefill) <= 3
        for request, tokens in [*((request, 1) for request in decode), *prefill]:
            request.grow(tokens, pool)
        live = [page for request in requests if request.length < request.total for page in request.pages]
        assert len(live) == len(set(live)) <= 8
        waited |= any(request.length == 0 for request in requests) and step > 2
        scheduler.retire()
    assert waited and scheduler.finished == len(requests)
    assert sorted(pool.allocate() for _ in range(8)) == list(range(8))


def test_chunks_are_cut_into_windows(modules: tuple[ModuleType, ModuleType]) -> None:
    """Each token is in one window, at its position; a window of padding has none."""
    serving, example = modules
    first, second = serving.Request(50, 60), serving.Request(40, 50)
    chunks = [example.Chunk(first, 10, 30), example.Chunk(second, 0, 12)]
    windows = [list(example.cut(chunks, start, start + 16)) for start in (0, 16, 32, 48)]
    assert windows == [[(first, 10, 16)], [(first, 26, 14), (second, 0, 2)], [(second, 2, 10)], []]


def test_steps_are_padded_to_few_sizes(modules: tuple[ModuleType, ModuleType]) -> None:
    """To a power of two, the most there can be, or nothing."""
    _, example = modules
    assert [example.padded(rows, 64, 200) for rows in (0, 1, 64, 65, 128, 129, 200)] == [0, 64, 64, 128, 128, 200, 200]
