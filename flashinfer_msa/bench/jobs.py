# SPDX-License-Identifier: Apache-2.0
"""Lists the steps that each job of the benchmark measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..layout import Layout
from .ceilings import Ceilings, launch_rows, memory_rows
from .decode import CHAINS, DECODE_SHAPES, SCORE, DecodeShape, decode_rows, ragged_rows, selection_rows
from .host import host_rows
from .peers import Peers
from .prefill import PREFILL_SHAPES, SWEEPS, PrefillShape, balance_rows, prefill_rows, select_rows, sweep_rows
from .rows import Row, finished, is_as_warm_as_it_says, keys_text


@dataclass(frozen=True)
class Step:
    """A part of a job that allocates its own inputs.

    ``label`` is for a progress bar, ``measure`` yields the rows, and ``gpus`` is the number of GPUs that take part.
    """

    label: str
    measure: Callable[[], Iterable[Row]]
    gpus: int = 1

    def rows(self) -> Iterator[Row]:
        """Yield the measured rows as they are written, then free the memory."""
        for row in self.measure():
            yield finished(row, self.gpus)
        torch.cuda.empty_cache()


CEILINGS = (Step("reading and copying", memory_rows), Step("launching", launch_rows))
"""The ceilings that the decode kernels are compared with."""


@dataclass
class Jobs:
    """The jobs of one run. They share ceilings and peers."""

    layouts: Sequence[Layout]
    peers: Peers | None = None
    ceilings: Ceilings = field(default_factory=Ceilings)

    def decode(self, shapes: Sequence[DecodeShape] = (), temperatures: Sequence[bool] = (True, False)) -> list[Step]:
        """Return the steps of ceilings and scorer, without ``shapes`` also of publisher, merge and a ragged batch."""
        return [
            *CEILINGS,
            *self._decode_steps(shapes, (SCORE,), temperatures),
            *([] if shapes else self._fixed_decode_steps(temperatures)),
        ]

    def chain(self, shapes: Sequence[DecodeShape] = (), temperatures: Sequence[bool] = (True, False)) -> list[Step]:
        """Return the steps of ceilings and both chains."""
        return [
            *CEILINGS,
            *self._decode_steps(shapes, CHAINS, temperatures),
        ]

    def prefill(self, shapes: Sequence[PrefillShape] = (), temperatures: Sequence[bool] = (True, False)) -> list[Step]:
        """Return the steps of matrix products and every part of a window, and without ``shapes`` of further windows."""
        return [
            Step("matrix products", lambda: [self.ceilings.fp8_gemm, self.ceilings.fp16_gemm]),
            *(
                Step(
                    f"{layout.title}, {shape.tokens} of {keys_text(shape.context)}, {_warmth(shape.cold)}",
                    partial(prefill_rows, layout, shape, self.ceilings, self.peers),
                )
                for layout in self.layouts
                for shape in shapes or PREFILL_SHAPES
                if shape.cold in temperatures
            ),
            *([] if shapes else self._fixed_prefill_steps(temperatures)),
        ]

    def host(self) -> list[Step]:
        """Return the step of a decode's host time, for every way to launch it."""
        return [Step("host time", host_rows)]

    def everything(self, *, peers_of_prefill: bool = True) -> list[Step]:
        """Return the steps of all jobs. Scorer and chains share their inputs, and prefill keys are cold."""
        prefill = self if peers_of_prefill else replace(self, peers=None)
        return [
            *CEILINGS,
            *self._decode_steps((), (SCORE, *CHAINS), (True, False)),
            *self._fixed_decode_steps((True, False)),
            *prefill.prefill(temperatures=(True,)),
            *self._ragged_windows(),
            *self.host(),
        ]

    def _decode_steps(
        self, shapes: Sequence[DecodeShape], jobs: Sequence[str], temperatures: Sequence[bool]
    ) -> list[Step]:
        return [
            Step(
                f"{layout.title}, {shape.batch} x {keys_text(shape.context)}, query length {shape.query_len}, "
                f"{_warmth(shape.cold)}",
                partial(decode_rows, layout, shape, jobs, self.ceilings, self.peers),
            )
            for layout in self.layouts
            for shape in shapes or DECODE_SHAPES
            if shape.cold in temperatures and is_as_warm_as_it_says(shape.row(layout))
        ]

    def _fixed_decode_steps(self, temperatures: Sequence[bool]) -> list[Step]:
        ragged = [
            Step(f"{layout.title}, ragged batch", partial(ragged_rows, layout, self.ceilings))
            for layout in self.layouts
        ]
        selection = [Step("publisher and merge", lambda: selection_rows(self.layouts))]
        return [*(ragged if True in temperatures else []), *(selection if False in temperatures else [])]

    def _fixed_prefill_steps(self, temperatures: Sequence[bool]) -> list[Step]:
        sweeps = [
            Step(
                f"{layout.title}, {min(tokens)} to {max(tokens)} of {keys_text(context)}, {_warmth(cold)}",
                partial(sweep_rows, layout, context, tokens, self.ceilings, cold=cold),
            )
            for cold in temperatures
            for layout in self.layouts
            for context, tokens in SWEEPS.items()
        ]
        selection = [Step("selection of random scores", lambda: select_rows(self.ceilings))]
        return [
            *(selection if True in temperatures else []),
            *sweeps,
            *(self._ragged_windows() if False in temperatures else []),
        ]

    def _ragged_windows(self) -> list[Step]:
        return [Step(f"{layout.title}, ragged window", partial(balance_rows, layout)) for layout in self.layouts]


def _warmth(cold: bool) -> str:
    return "cold" if cold else "warm"
