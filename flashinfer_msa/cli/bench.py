# SPDX-License-Identifier: Apache-2.0
"""The ``bench`` command: measures the kernels on this machine's GPU, and prints, writes and plots the results."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flashinfer_msa.cli.options import layout_option
from flashinfer_msa.layout import BLOCK_TOKENS, MAX_BLOCKS, MAX_QUERY_LEN, Layout

# The benchmark imports torch, which takes seconds, so the commands import it when they start.
if TYPE_CHECKING:
    from flashinfer_msa.bench.jobs import Jobs, Step
    from flashinfer_msa.bench.rows import Row

BATCH, CONTEXT, QUERY_LEN, TOKENS = 32, 128 << 10, 1, 8192
"""Defaults of the shape options if at least one of them is given."""
PLOT_FORMATS = (".png", ".svg", ".pdf")


@click.group()
def bench() -> None:
    """Time the kernels on this machine's GPU and compare them with its ceilings and, with --peers, with FlashInfer and
    vLLM.

    Times are medians of CUDA graph replays of one rank's kernels. Cold keys are not in the L2 cache, as in serving.
    Warm keys are in it, as far as they fit.
    """


def _check_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path is None:
        return None
    folder = path.resolve().parent
    if not folder.is_dir():
        raise click.BadParameter(f"the folder {str(path.parent)!r} does not exist.")
    try:
        with tempfile.TemporaryFile(dir=folder) if not path.exists() else path.open("a"):
            pass
    except OSError as error:
        raise click.BadParameter(f"{str(path)!r} cannot be written: {error.strerror}.") from error
    if parameter.name == "plot":
        if path.suffix.lower() not in PLOT_FORMATS:
            raise click.BadParameter(f"must end in {', '.join(PLOT_FORMATS)}, was {path.name!r}.")
        if importlib.util.find_spec("matplotlib") is None:
            raise click.ClickException("--plot needs matplotlib, which is not installed. Run: pip install matplotlib")
    return path


_json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_check_file,
    help="Write the rows to this file.",
)


def _int_option(name: str, limits: click.IntRange, what: str, default: int) -> Callable[..., Any]:
    text = f"{what}; repeatable, every combination is measured.  [default: {default} if another shape option is given]"
    return click.option(name, name.strip("-").replace("-", "_"), multiple=True, type=limits, help=text)


_context_option = _int_option("--context", click.IntRange(1, MAX_BLOCKS * BLOCK_TOKENS), "Keys of a request", CONTEXT)


def _job_options(*shape_options: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of a job over layouts and shapes."""
    options = (
        layout_option,
        *shape_options,
        click.option(
            "--cold/--warm",
            default=None,
            help="Whether keys are out of the L2 cache or in it.  [default: both; decode is warm only if the keys fit]",
        ),
        click.option("--peers", is_flag=True, help="Measure FlashInfer and vLLM in the same run, if installed."),
        _json_option,
        click.option(
            "--plot",
            type=click.Path(dir_okay=False, path_type=Path),
            callback=_check_file,
            help="Draw the rows into this file (needs matplotlib).",
        ),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_decode_options = _job_options(
    _int_option("--batch", click.IntRange(1), "Requests", BATCH),
    _context_option,
    _int_option("--query-len", click.IntRange(1, MAX_QUERY_LEN), "Query tokens per request", QUERY_LEN),
)


def _decode_shapes(
    batches: Sequence[int],
    contexts: Sequence[int],
    query_lens: Sequence[int],
    temperatures: Sequence[bool],
    layouts: Sequence[Layout],
) -> list[Any]:
    """Return the requested shapes, or none if no shape option was given."""
    if not batches and not contexts and not query_lens:
        return []
    from flashinfer_msa.bench.decode import DecodeShape
    from flashinfer_msa.bench.rows import is_as_warm_as_it_says

    shapes = [
        DecodeShape(batch, context, query_len, cold)
        for cold in temperatures
        for batch in batches or [BATCH]
        for context in contexts or [CONTEXT]
        for query_len in query_lens or [QUERY_LEN]
    ]
    for shape in shapes:
        if shape.query_len > shape.context:
            raise click.UsageError(f"--query-len: must be at most --context, {shape.context}, was {shape.query_len}")
        for layout in layouts if True not in temperatures else ():
            if not is_as_warm_as_it_says(shape.row(layout)):
                raise click.UsageError(
                    f"--warm: the keys of {shape.batch} x {shape.context} on a rank of {layout.title} do not fit into "
                    "an L2 cache"
                )
    return shapes


@bench.command()
@_decode_options
def decode(
    batch: tuple[int, ...], context: tuple[int, ...], query_len: tuple[int, ...], cold: bool | None, **options: Any
) -> None:
    """Time the decode scorer and a streaming pass over the same bytes; publisher, merge and a ragged batch.

    Publisher and merge (warm) and the ragged batch (cold) have fixed shapes. They run only without --batch, --context
    and --query-len.
    """
    temperatures = _temperatures(cold)
    shapes = _decode_shapes(batch, context, query_len, temperatures, options["layouts"])
    _run(lambda jobs: jobs.decode(shapes, temperatures), plot_name="roofline", **options)


@bench.command()
@_decode_options
def chain(
    batch: tuple[int, ...], context: tuple[int, ...], query_len: tuple[int, ...], cold: bool | None, **options: Any
) -> None:
    """Time both decode chains: score, publish and merge, and the fused one. The other ranks' rows have arrived."""
    temperatures = _temperatures(cold)
    shapes = _decode_shapes(batch, context, query_len, temperatures, options["layouts"])
    _run(lambda jobs: jobs.chain(shapes, temperatures), plot_name="latency", **options)


@bench.command()
@_job_options(_int_option("--tokens", click.IntRange(1), "Query tokens", TOKENS), _context_option)
def prefill(tokens: tuple[int, ...], context: tuple[int, ...], cold: bool | None, **options: Any) -> None:
    """Time a prefill window: planner, scorer, exact scorer, selection, merge, and the fused chain.

    The scorer is compared with an FP8 matrix product, the exact scorer with an FP16 one, and the fused chain with score
    and select.

    Without --tokens and --context, the command also times windows of 1 to 8192 tokens with contexts of 8K to 200K
    (scorer, score and select, fused chain), selections of random scores and a streaming read (cold), and a ragged
    window (warm).
    """
    from flashinfer_msa.bench.prefill import PrefillShape
    from flashinfer_msa.sizing import MAX_WINDOW_TOKENS

    temperatures = _temperatures(cold)
    pairs = [(t, c) for t in tokens or [TOKENS] for c in context or [CONTEXT]] if tokens or context else []
    for length, keys in pairs:
        if length > MAX_WINDOW_TOKENS:
            raise click.UsageError(
                f"--tokens: must be at most {MAX_WINDOW_TOKENS}, the tokens of a window, was {length}"
            )
        if length > keys:
            raise click.UsageError(f"--tokens: must be at most --context, {keys}, was {length}")
    shapes = [PrefillShape(length, keys, cold) for cold in temperatures for length, keys in pairs]
    _run(lambda jobs: jobs.prefill(shapes, temperatures), plot_name="prefill", **options)


@bench.command()
@_json_option
def host(json_path: Path | None) -> None:
    """Time the host side of a decode, for each way to launch it, and of three bare launches."""
    _run(lambda jobs: jobs.host(), json_path=json_path)


def _temperatures(cold: bool | None) -> tuple[bool, ...]:
    return (True, False) if cold is None else (cold,)


def _run(
    plan: Callable[[Jobs], list[Step]],
    *,
    json_path: Path | None,
    layouts: Sequence[Layout] = (),
    peers: bool = False,
    plot: Path | None = None,
    plot_name: str = "",
) -> None:
    """Measure the steps of a job, and print, write and plot the rows."""
    _require_gpu(ceilings=bool(plot_name))
    from flashinfer_msa.bench.jobs import Jobs
    from flashinfer_msa.bench.peers import find_peers
    from flashinfer_msa.bench.report import print_tables
    from flashinfer_msa.bench.rows import write_rows

    notes: list[str] = []
    rows: list[Row] = []
    failure: click.ClickException | None = None
    try:
        _measure(plan(Jobs(layouts, find_peers(notes.append) if peers else None)), rows)
    except click.ClickException as error:
        failure = error  # keep what has been measured before
    if json_path is not None and rows:
        try:
            write_rows(json_path, rows)
        except OSError as error:
            failure = click.ClickException(f"--json: {json_path} could not be written: {error}")
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    print_tables(console, rows)
    for note in notes:
        click.echo(note, err=True)
    if failure is not None:
        raise failure
    if plot is not None:
        import torch

        from flashinfer_msa.bench.plots import draw

        today = datetime.now(timezone.utc).date().isoformat()
        draw(plot_name, rows, f"{torch.cuda.get_device_name()}, {today}", plot)


def _require_gpu(*, ceilings: bool) -> None:
    """Raise an error if there is no GPU with kernels, or if the ceilings cannot be measured."""
    import torch

    from flashinfer_msa.runtime.loader import architecture_of

    if not torch.cuda.is_available():
        raise click.ClickException(
            "the benchmark needs a CUDA device, and torch finds none; `flashinfer-msa demo` runs anywhere"
        )
    try:
        architecture_of(torch.device("cuda", torch.cuda.current_device()))
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if ceilings and importlib.util.find_spec("triton") is None:
        raise click.ClickException(
            "Triton kernels measure the ceilings, and triton is not installed; it comes with CUDA builds of torch"
        )


def _measure(steps: Sequence[Step], rows: list[Row]) -> None:
    """Run the steps, with a progress bar on a terminal, and add the measured rows to ``rows``."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(task, description=step.label)
            try:
                for row in step.rows():
                    rows.append(row)
            except (ValueError, RuntimeError) as error:
                raise click.ClickException(f"{step.label}: {error}") from error
            progress.advance(task)
