# SPDX-License-Identifier: Apache-2.0
"""The command line: ``demo`` proves an installation, ``list`` shows what it holds, ``build`` compiles kernels."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from flashinfer_msa.aot.matrix import ARCHITECTURES
from flashinfer_msa.layout import (
    BLOCK_TOKENS,
    LAYOUTS,
    MAX_BLOCKS,
    MAX_QUERY_LEN,
    NUM_SLOT_SETS,
    TOP_K,
    Layout,
)
from flashinfer_msa.version import __version__

# torch takes seconds to import, and `list` and `build` do without it: the demo imports it where it starts.
if TYPE_CHECKING:
    import torch

    from flashinfer_msa.simulate import Comparison

INIT_BLOCKS, LOCAL_BLOCKS = 1, 2
"""Blocks that the demo forces at either end of a context."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashinfer-msa")
def main() -> None:
    """Kernels for the MiniMax-M3 index-context-parallel indexer."""


def _parse_layouts(context: click.Context, parameter: click.Parameter, names: Sequence[str]) -> list[Layout]:
    """Return the layouts named like ``p128-tp2``, all of them without a name."""
    keys = [name.lower().replace("-", "_") for name in names] or list(LAYOUTS)
    for key, name in zip(keys, names, strict=False):
        if key not in LAYOUTS:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(LAYOUTS)}.")
    return [LAYOUTS[key] for key in dict.fromkeys(keys)]


@main.command()
@click.option(
    "--layout", "layouts", multiple=True, callback=_parse_layouts, help="Such as p128-tp2; repeatable.  [default: all]"
)
@click.option("--backend", type=click.Choice(["auto", "cake", "torch"]), default="auto", show_default=True)
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Requests.")
@click.option(
    "--context",
    type=click.IntRange(1, MAX_BLOCKS * BLOCK_TOKENS),
    default=8192,
    show_default=True,
    help="Keys of the longest request after the last step; the others are shorter at random.",
)
@click.option(
    "--query-len",
    type=click.IntRange(1, MAX_QUERY_LEN),
    default=2,
    show_default=True,
    help="Query tokens a request and step.",
)
@click.option("--tagged/--legacy", default=None, help="Form of the receive rows.  [default: both]")
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="Decode steps.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", help="cpu, cuda (ranks spread over all GPUs), or cuda:N.  [default: cuda where there is one]")
def demo(
    layouts: list[Layout],
    backend: str,
    batch: int,
    context: int,
    query_len: int,
    tagged: bool | None,
    steps: int,
    seed: int,
    device: str | None,
) -> None:
    """Decode as every rank of a group, and compare with a brute force over keys that were never sharded."""
    from flashinfer_msa.simulate import Comparison

    devices = _rank_devices(device)
    backend, reason = _choose_backend(backend, devices[0])
    console = Console()
    console.print(f"backend {backend} ({reason}), ranks on {', '.join(map(str, devices))}", highlight=False)
    table = Table("layout", "row form")
    for column in ("rows compared", "rows equal", "near ties", "wrong", "ms a step"):
        table.add_column(column, justify="right")
    total = Comparison()
    forms = [False, True] if tagged is None else [tagged]
    for layout in layouts:
        try:
            results = _run_layout(layout, forms, backend, devices, batch, context, query_len, steps, seed)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise click.ClickException(f"{layout.title}: {error}") from error
        for form, (counts, milliseconds) in results.items():
            total = total.plus(counts)
            table.add_row(layout.title, "tagged" if form else "legacy", *map(str, counts), f"{milliseconds:.3f}")
    console.print(table)
    verdict = f"{total.equal} of {total.rows} rows equal, {total.near_ties} near ties, {total.wrong} wrong"
    console.print(f"{'FAILED' if total.wrong else 'ok'}: {verdict}", highlight=False)
    if total.wrong:
        raise SystemExit(1)


def _rank_devices(name: str | None) -> list[torch.device]:
    """Return the devices that ranks are dealt out to."""
    import torch

    cuda = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if cuda else "cpu"))
    except RuntimeError as error:
        raise click.UsageError(f"--device: {name!r} is not a device") from error
    if device.type not in ("cpu", "cuda"):
        raise click.UsageError(f"--device: must be cpu or cuda, was {name!r}")
    if device.type == "cpu":
        return [device]
    count = torch.cuda.device_count() if cuda else 0
    if count <= (device.index or 0):
        raise click.UsageError(f"--device: {name!r} is not there, torch sees {count} CUDA devices")
    return [device] if device.index is not None else [torch.device("cuda", index) for index in range(count)]


def _choose_backend(backend: str, device: torch.device) -> tuple[str, str]:
    """Return the backend to run and why."""
    import torch

    from flashinfer_msa.runtime.manifest import load_manifest

    if backend == "cake" and device.type != "cuda":
        raise click.UsageError("--backend cake needs a CUDA device; use --backend torch here")
    if backend != "auto":
        return backend, "as asked"
    if device.type != "cuda":
        return "torch", "no CUDA device" if not torch.cuda.is_available() else "on the CPU as asked"
    try:
        manifest = load_manifest()
    except FileNotFoundError:
        return "torch", "no kernels are installed, see flashinfer-msa build"
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    capability = torch.cuda.get_device_capability(device)
    architecture = manifest.architecture_for(capability)
    if architecture is None:
        return "torch", "no kernels for compute capability {}.{}".format(*capability)
    return "cake", f"{architecture} kernels are installed"


@dataclass
class _Rank:
    """What one simulated rank holds."""

    device: torch.device
    plan: Any
    index_k: torch.Tensor
    block_table: torch.Tensor
    scores: torch.Tensor
    output: torch.Tensor


def _run_layout(
    layout: Layout,
    forms: Sequence[bool],
    backend: str,
    devices: Sequence[torch.device],
    batch: int,
    context: int,
    query_len: int,
    steps: int,
    seed: int,
) -> dict[bool, tuple[Comparison, float]]:
    """Run all steps; return counts and the median milliseconds of a step by row form (true: tagged)."""
    import torch

    from flashinfer_msa.comm import local_comm
    from flashinfer_msa.simulate import Comparison, DecodeProblem, brute_force_top16, compare, group_plans, random_e4m3

    lengths = random.Random(seed)
    final_lens = [context, *(lengths.randint(1, context) for _ in range(batch - 1))]
    last = DecodeProblem.random(
        layout, seq_lens=final_lens, decode_query_len=query_len, device=devices[0], seed=seed, page_pitch_extra=16
    )
    tokens = batch * query_len
    plans = group_plans(
        layout,
        devices,
        init_blocks=INIT_BLOCKS,
        local_blocks=LOCAL_BLOCKS,
        max_decode_tokens=tokens,
        max_decode_query_len=query_len,
        max_num_batched_tokens=tokens,
        max_num_seqs=batch,
        max_model_len=context,
        num_sparse_layers=NUM_SLOT_SETS,
        backend=backend,
    )
    ranks = []
    for rank, plan in enumerate(plans):
        device = plan.device
        ranks.append(
            _Rank(
                device=device,
                plan=plan,
                index_k=last.shard(rank).to(device),
                block_table=last.block_table.to(device),
                scores=torch.empty(plan.decode_scores_shape(), device=device),
                output=torch.empty(tokens, layout.heads_per_rank, TOP_K, dtype=torch.int32, device=device),
            )
        )
    comms = local_comm(plans)

    counts = dict.fromkeys(forms, Comparison())
    times: dict[bool, list[float]] = {form: [] for form in forms}
    generator = torch.Generator(devices[0]).manual_seed(seed + 1)
    for step in range(steps):
        problem = replace(
            last,
            seq_lens=(last.seq_lens - (steps - 1 - step) * query_len).clamp(min=0),
            index_q=random_e4m3(last.index_q.shape, generator),
        )
        expected = brute_force_top16(problem, init_blocks=INIT_BLOCKS, local_blocks=LOCAL_BLOCKS)
        inputs = [
            tuple(x.to(rank.device) for x in (problem.index_q, problem.seq_lens, problem.num_valid_pages))
            for rank in ranks
        ]
        for form in forms:
            slot: dict[str, Any] = {"slot": step % NUM_SLOT_SETS, "tagged": form, "enable_pdl": False}
            clock = _Clock(devices)
            # Ranks may share a device and a stream, so every publish is launched before any merge waits.
            for rank, comm, (index_q, seq_lens, valid) in zip(ranks, comms, inputs, strict=True):
                rank.plan.decode_publish(
                    index_q,
                    rank.index_k,
                    rank.block_table,
                    seq_lens,
                    valid,
                    rank.scores,
                    comm=comm,
                    decode_query_len=query_len,
                    **slot,
                )
            for rank, comm, (_, _, valid) in zip(ranks, comms, inputs, strict=True):
                rank.plan.decode_merge(valid, rank.output, comm=comm, **slot)
            times[form].append(clock.stop())
            output = torch.cat([rank.output.to(devices[0]) for rank in ranks], dim=1)
            counts[form] = counts[form].plus(compare(output, expected))
    return {form: (counts[form], statistics.median(times[form])) for form in forms}


class _Clock:
    """Milliseconds from construction to ``stop``: of the device by events, of the CPU by the wall."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        import torch

        self._cuda = [device for device in devices if device.type == "cuda"]
        self._synchronize()
        if self._cuda:
            self._stream = torch.cuda.current_stream(self._cuda[0])
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begin.record(self._stream)
        self._started = time.perf_counter()

    def _synchronize(self) -> None:
        import torch

        for device in self._cuda:
            torch.cuda.synchronize(device)

    def stop(self) -> float:
        if not self._cuda:
            return 1e3 * (time.perf_counter() - self._started)
        # The last merge of the first device ends after every rank has published.
        self._end.record(self._stream)
        self._synchronize()
        return self._begin.elapsed_time(self._end)


@main.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest itself.")
def list_(as_json: bool) -> None:
    """Show the installed kernels, and what each takes of the GPU."""
    from flashinfer_msa.runtime.manifest import load_manifest

    try:
        manifest = load_manifest().data
    except (FileNotFoundError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(manifest, indent=2))
        return
    table = Table("arch", "layout")
    table.add_column("kernel", no_wrap=True, min_width=28)
    for column in ("threads", "regs", "shared", "cubin"):
        table.add_column(column, justify="right")
    statuses: dict[str, str] = {}
    for cubin in manifest["cubins"]:
        statuses[cubin["architecture"]] = f"run on {cubin['tested_on']}" if cubin["tested_on"] else "compiled, not run"
        for kernel in cubin["kernels"]:
            shared = kernel["static_shared_bytes"] + kernel["shared_bytes"]
            table.add_row(
                cubin["architecture"],
                cubin["layout"] or "common",
                kernel["role"],
                *map(str, (kernel["threads"], kernel["registers"], shared, cubin["bytes"])),
            )
    # A pipe has no width to fit: keep names whole there.
    console = Console()
    console.print(table) if console.is_terminal else Console(width=160).print(table)
    for architecture, status in statuses.items():
        console.print(f"{architecture}: {status}", highlight=False)
    console.print("shared memory and cubin sizes in bytes", highlight=False)
    kernels = sum(len(cubin["kernels"]) for cubin in manifest["cubins"])
    console.print(f"flashinfer-msa {manifest['version']}: {kernels} kernels in {len(manifest['cubins'])} cubins")


@main.command()
@click.option("--arch", "architectures", multiple=True, type=click.Choice(list(ARCHITECTURES)), help="[default: all]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder.  [default: the package's]")
@click.option("--jobs", type=click.IntRange(1), help="Compilers at a time.  [default: by the number of cores]")
def build(architectures: tuple[str, ...], out: Path | None, jobs: int | None) -> None:
    """Compile kernels and launcher with the CUDA toolkits found here."""
    try:
        from flashinfer_msa.aot.build import build as run_build
        from flashinfer_msa.aot.toolkit import BuildError
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "ninja"):
            raise
        raise click.ClickException(
            f"Building needs {error.name}, which is not installed. Run: pip install 'flashinfer-msa[build]'"
        ) from error
    try:
        result = run_build(out, architectures=architectures or None, jobs=jobs, progress=click.echo)
    except BuildError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{result.compiled} compiled, {len(result.manifest['cubins'])} cubins listed in {result.path}")
