# SPDX-License-Identifier: Apache-2.0
"""What each job of the benchmark measures, as a list of steps."""

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
    """A part of a job that holds its inputs by itself: what a progress bar calls it, its rows when it is run, and on
    how many GPUs that is."""

    label: str
    measure: Callable[[], Iterable[Row]]
    gpus: int = 1

    def rows(self) -> Iterator[Row]:
        """The measured rows, as they are written; no memory is kept after the last one."""
        for row in self.measure():
            yield finished(row, self.gpus)
        torch.cuda.empty_cache()


CEILINGS = (Step("reading and copying", memory_rows), Step("launching", launch_rows))
"""What the decode kernels are held against."""


@dataclass
class Jobs:
    """The jobs of one run, which share ceilings and peers."""

    layouts: Sequence[Layout]
    peers: Peers | None = None
    ceilings: Ceilings = field(default_factory=Ceilings)

    def decode(self, shapes: Sequence[DecodeShape] = (), temperatures: Sequence[bool] = (True, False)) -> list[Step]:
        """Ceilings, scorer, and with no ``shapes`` given publisher, merge and a ragged batch too."""
        return [
            *CEILINGS,
            *self._decode_steps(shapes, (SCORE,), temperatures),
            *([] if shapes else self._fixed_decode_steps(temperatures)),
        ]

    def chain(self, shapes: Sequence[DecodeShape] = (), temperatures: Sequence[bool] = (True, False)) -> list[Step]:
        """Ceilings, and both chains."""
        return [
            *CEILINGS,
            *self._decode_steps(shapes, CHAINS, temperatures),
        ]

    def prefill(self, shapes: Sequence[PrefillShape] = (), temperatures: Sequence[bool] = (True, False)) -> list[Step]:
        """Matrix products and every part of a window; with no ``shapes`` given, windows of many sizes and more."""
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
        """Host time of a decode in every form that it is launched in."""
        return [Step("host time", host_rows)]

    def everything(self, *, peers_of_prefill: bool = True) -> list[Step]:
        """All jobs; scorer and chains share their inputs, and prefill keys are cold."""
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
