# SPDX-License-Identifier: Apache-2.0
"""The command line: ``demo`` tries an installation, ``list`` shows its kernels, ``build`` compiles kernels, ``doctor``
examines the machine.

``bench`` is in its own module.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from flashinfer_msa.aot.matrix import ARCHITECTURES
from flashinfer_msa.cli.bench import bench
from flashinfer_msa.cli.options import layout_option
from flashinfer_msa.layout import BLOCK_TOKENS, MAX_BLOCKS, MAX_QUERY_LEN, Layout
from flashinfer_msa.version import __version__

# Importing torch takes seconds, and `list` and `build` do not need it. So `demo` imports it when it starts.
if TYPE_CHECKING:
    import torch


PREFILL_TOKENS = 2048
"""Query tokens of the demo's prefill steps, if the segments have that many."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashinfer-msa")
def main() -> None:
    """Kernels for the MiniMax-M3 index-context-parallel indexer."""


main.add_command(bench)


@main.command()
@layout_option
@click.option("--prefill", is_flag=True, help="Prefill in windows instead of decoding.")
@click.option("--mixed", is_flag=True, help="Decode and prefill in each step, with one cache.")
@click.option("--backend", type=click.Choice(["auto", "cake", "torch"]), default="auto", show_default=True)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Requests of a decode step, and segments of a prefill step.",
)
@click.option(
    "--context",
    type=click.IntRange(1, MAX_BLOCKS * BLOCK_TOKENS),
    default=8192,
    show_default=True,
    help="Keys of the longest request after the last step, and of the longest segment. Others are random.",
)
@click.option(
    "--query-len",
    type=click.IntRange(1, MAX_QUERY_LEN),
    default=2,
    show_default=True,
    help="Query tokens per request and decode step.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    help=f"Query tokens of a prefill step.  [default: {PREFILL_TOKENS}, or all that the segments have]",
)
@click.option("--tagged/--legacy", default=None, help="Kind of the receive rows.  [default: both]")
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="Steps.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", help="cpu, cuda (ranks spread over all GPUs), or cuda:N.  [default: cuda if there is a GPU]")
def demo(
    layouts: list[Layout],
    prefill: bool,
    mixed: bool,
    backend: str,
    batch: int,
    context: int,
    query_len: int,
    tokens: int | None,
    tagged: bool | None,
    steps: int,
    seed: int,
    device: str | None,
) -> None:
    """Decode or prefill as every rank of a group, and compare with a brute force over unsharded keys."""
    if prefill and mixed:
        raise click.UsageError("--prefill and --mixed exclude each other")
    if prefill:
        _reject_options(("tagged", "query_len"), "with --prefill")
    elif not mixed:
        _reject_options(("tokens",), "without --prefill or --mixed")
    if tokens is None:
        tokens = min(PREFILL_TOKENS, batch * context)
    if (prefill or mixed) and tokens > batch * context:
        raise click.UsageError(f"--tokens: must be at most --batch x --context, {batch * context}, was {tokens}")
    from flashinfer_msa.cli.demo import Demo, run_layout
    from flashinfer_msa.testing.problems import Comparison

    devices = _rank_devices(device)
    backend, reason = _choose_backend(backend, devices[0])
    console = Console()
    console.print(f"backend {backend} ({reason}), ranks on {', '.join(map(str, devices))}", highlight=False)
    # Headers are narrow, so that all columns fit a terminal of 80.
    table = Table("layout", *([] if prefill else ["row\nkind"]))
    windows = ["windows"] if prefill or mixed else []
    for column in (*windows, "rows\ncompared", "rows\nequal", "near\nties", "wrong", "ms per\nstep"):
        table.add_column(column, justify="right")
    run = Demo(
        backend=backend,
        devices=devices,
        batch=batch,
        context=context,
        query_len=0 if prefill else query_len,
        tokens=tokens if prefill or mixed else 0,
        steps=steps,
        seed=seed,
    )
    total = Comparison()
    row_kinds = [False, True] if tagged is None else [tagged]
    for layout in layouts:
        try:
            results = run_layout(run, layout, row_kinds)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise click.ClickException(f"{layout.title}: {error}") from error
        for result in results:
            total = total.plus(result.counts)
            cells = [layout.title]
            if result.tagged is not None:
                cells.append("tagged" if result.tagged else "legacy")
            if result.windows:
                cells.append(str(result.windows))
            table.add_row(*cells, *map(str, result.counts), f"{result.milliseconds:.3f}")
    console.print(table)
    verdict = f"{total.equal} of {total.rows} rows equal, {total.near_ties} near ties, {total.wrong} wrong"
    console.print(f"{'FAILED' if total.wrong else 'ok'}: {verdict}", highlight=False)
    if total.wrong:
        raise SystemExit(1)


def _reject_options(names: Sequence[str], when: str) -> None:
    """Raise a usage error if one of these parameters was given on the command line."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if given and parameter.name in names:
            options = "/".join([*parameter.opts, *parameter.secondary_opts])
            raise click.UsageError(f"{options} does nothing {when}")


def _rank_devices(name: str | None) -> list[torch.device]:
    """Return the devices that ranks are distributed over."""
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
    """Return the backend to run, and the reason for it."""
    import torch

    from flashinfer_msa.runtime.loader import driver_version, kernels_of

    if backend == "cake" and device.type != "cuda":
        raise click.UsageError("--backend cake needs a CUDA device; use --backend torch here")
    if backend != "auto":
        return backend, "as asked"
    if device.type != "cuda":
        return "torch", "no CUDA device" if not torch.cuda.is_available() else "on the CPU as asked"
    try:
        driver_version()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        kernels = kernels_of(device)
    except FileNotFoundError:
        return "torch", "no kernels are installed, see flashinfer-msa build"
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    except ValueError:
        return "torch", "no kernels for compute capability {}.{}".format(*torch.cuda.get_device_capability(device))
    how = "are installed" if kernels.prebuilt else "can be compiled here"
    return "cake", f"{kernels.architecture} kernels {how}"


@main.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest itself.")
def list_(as_json: bool) -> None:
    """Show the installed kernels and the resources that each uses."""
    from flashinfer_msa.manifest import load_manifest

    try:
        manifest = load_manifest()
    except (FileNotFoundError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(manifest.data, indent=2))
        return
    table = Table("arch", "CUDA", "layout")
    table.add_column("kernel", no_wrap=True, min_width=28)
    for column in ("threads", "regs", "shared", "cubin"):
        table.add_column(column, justify="right")
    for cubins in manifest.sets:
        for cubin in cubins.entries:
            for kernel in cubin["kernels"]:
                shared = kernel["static_shared_bytes"] + kernel["shared_bytes"]
                table.add_row(
                    cubins.architecture,
                    str(cubins.driver[0]),
                    cubin["layout"] or "common",
                    kernel["role"],
                    *map(str, (kernel["threads"], kernel["registers"], shared, cubin["bytes"])),
                )
    # A pipe has no width to fit, so names need not be cut.
    console = Console()
    console.print(table) if console.is_terminal else Console(width=160).print(table)
    for cubins in manifest.sets:
        console.print(f"{cubins.architecture} {cubins.origin}: {cubins.status}", highlight=False)
    console.print("shared memory and cubin sizes in bytes", highlight=False)
    kernels = sum(len(cubin["kernels"]) for cubins in manifest.sets for cubin in cubins.entries)
    files = len(manifest.data["cubins"])
    console.print(f"flashinfer-msa {manifest.data['version']}: {kernels} kernels in {files} cubins")


@main.command()
@click.option("--arch", "architectures", multiple=True, type=click.Choice(list(ARCHITECTURES)), help="[default: all]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder.  [default: the package's]")
@click.option("--jobs", type=click.IntRange(1), help="Compilers at a time.  [default: from the number of cores]")
def build(architectures: tuple[str, ...], out: Path | None, jobs: int | None) -> None:
    """Compile kernels and launcher with the CUDA toolkits of this machine."""
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


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> None:
    """Examine this installation and machine: report what a bug report needs and what would fail.

    Every GPU decodes a tiny step, after its kernels are compiled if they are not prebuilt. GPUs that reach one another
    also decode together. Without a GPU the torch backend decodes. Nothing secret is printed.

    Exits with 1 if something does not work: a file of this package differs from the built one, a requirement is missing
    or has another version, torch is built for CUDA but can use no GPU, a GPU has no kernels, no GPU of several reaches
    another, the compiler of FLASHINFER_MSA_NVCC or FlashInfer does not work, or a self-test fails, ends early or takes
    minutes. A machine without a GPU whose torch is built for the CPU is not a failure.
    """
    from flashinfer_msa.cli.doctor import examine
    from flashinfer_msa.cli.findings import print_report

    report = examine()
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        # A pipe has no width to fit.
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=160))
    if not report.ok:
        raise SystemExit(1)
