# SPDX-License-Identifier: Apache-2.0
"""Measures what the GPU can do at best: read, copy, multiply and launch. The kernels are compared with this."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .rows import Row
from .timing import COLD_BYTES, MIN_CALLS, graph_us, many_calls

_READ_UNIT = 64 << 10
"""The largest number of bytes that a program of the reading kernel reads at a time. It reads only whole units."""
_GEMM_SIZE = 8192
"""Rows and columns of the multiplied matrices."""
_CHAIN = 200
"""Tiny kernels in a chain."""


def _read_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def read(source, sums, count, BLOCK: tl.constexpr):
        total = tl.zeros((BLOCK,), tl.int32)
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            total += tl.load(source + start + tl.arange(0, BLOCK))
        tl.store(sums + tl.program_id(0), tl.sum(total))

    return read


def streaming_read_us(buffers: Sequence[torch.Tensor]) -> float:
    """Return the microseconds of reading one of ``buffers`` (uint8, equal sizes) once, the best of several kernels."""
    kernel = _read_kernel()
    padding = -buffers[0].numel() % _READ_UNIT
    whole = [torch.nn.functional.pad(buffer, (0, padding)) for buffer in buffers] if padding else buffers
    words = many_calls([buffer.view(torch.int32) for buffer in whole])
    sms = torch.cuda.get_device_properties(buffers[0].device).multi_processor_count
    sums = torch.empty(sms * 16, dtype=torch.int32, device=buffers[0].device)

    def shape(block: int, programs: int) -> float:
        return graph_us(
            [functools.partial(kernel[(sms * programs,)], w, sums, w.numel(), BLOCK=block, num_warps=8) for w in words],
            replays=7,
        )

    return min(shape(block, programs) for block in (4096, 8192, 16384) for programs in (2, 4, 8))


class Ceilings:
    """The ceilings of one run. Each is measured at its first use."""

    def __init__(self) -> None:
        self._read_us: dict[tuple[int, bool], float] = {}

    def read_us(self, keys: Sequence[torch.Tensor]) -> float:
        """Return the microseconds of a streaming pass over one of ``keys``. Several keys are cold."""
        case = (keys[0].nbytes, len(keys) > 1)
        if case not in self._read_us:
            self._read_us[case] = streaming_read_us([k.view(torch.uint8).flatten() for k in keys])
        return self._read_us[case]

    @functools.cached_property
    def fp8_gemm(self) -> Row:
        """The row of the FP8 matrix product."""
        a, b = (torch.randn(_GEMM_SIZE, _GEMM_SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")
        scaled: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return _gemm_row("fp8_gemm", lambda: torch._scaled_mm(a, b.T, **scaled))

    @functools.cached_property
    def fp16_gemm(self) -> Row:
        """The row of the FP16 matrix product."""
        a, b = (torch.randn(_GEMM_SIZE, _GEMM_SIZE, dtype=torch.float16, device="cuda") for _ in range(2))
        return _gemm_row("fp16_gemm", lambda: torch.matmul(a, b.T))


def _gemm_row(name: str, multiply: Callable[[], Any]) -> Row:
    us, flops = graph_us([multiply] * MIN_CALLS), 2 * _GEMM_SIZE**3
    return {"job": "ceiling", "name": name, "flops": flops, "us": us, "tflops": flops / us / 1e6, "cold": False}


def memory_rows() -> Iterator[Row]:
    """Measure streaming reads and a copy."""
    for size in (64 << 20, 1 << 30, 4 << 30):
        buffers = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")]
        if size < COLD_BYTES:
            buffers += [buffers[0].clone() for _ in range(COLD_BYTES // size)]
        us = streaming_read_us(buffers)
        yield {
            "job": "ceiling",
            "name": "streaming_read",
            "bytes": size,
            "us": us,
            "tb_s": size / us / 1e6,
            "cold": True,
        }
    source = torch.randint(0, 256, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # A kernel copies, because a graph's copy node uses another, slower engine.
    us = graph_us([lambda: torch.add(source.view(torch.int64), 0, out=target.view(torch.int64))])
    size = 2 * source.numel()
    yield {"job": "ceiling", "name": "device_copy", "bytes": size, "us": us, "tb_s": size / us / 1e6, "cold": True}


def launch_rows() -> Iterator[Row]:
    """Measure a kernel of a chain of tiny kernels, and of a chain of programmatic dependents if Triton has them."""
    one = torch.zeros(1, device="cuda")
    yield {"job": "ceiling", "name": "tiny_kernel", "us": graph_us([lambda: one.add_(1)] * _CHAIN), "cold": False}
    dependent = _dependent_launch(one)
    if dependent is not None:
        yield {"job": "ceiling", "name": "tiny_kernel_pdl", "us": graph_us([dependent] * _CHAIN), "cold": False}


def _dependent_launch(one: torch.Tensor) -> Callable[[], None] | None:
    """Return the launch of a tiny kernel that waits for its predecessor, then lets its dependent start, or None."""
    import triton
    import triton.language as tl

    if torch.cuda.get_device_capability() < (9, 0) or not hasattr(tl.extra.cuda, "gdc_wait"):
        return None

    @triton.jit
    def increment(counter):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        tl.store(counter, tl.load(counter) + 1)

    return lambda: increment[(1,)](one, num_warps=1, launch_pdl=True)
