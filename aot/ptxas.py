# SPDX-License-Identifier: Apache-2.0
"""Reads the report of ``ptxas -v``. Refuses kernels that spill or that use more than the GPU has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .matrix import Kernel, Unit
from .toolkit import BuildError

_REGISTER_FILE = 65536
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_LOCAL = re.compile(r"(\d+) bytes (?:lmem|cumulative stack size)")


@dataclass
class Resources:
    """The resources of one kernel, including those of the functions that it calls."""

    static_shared_bytes: int = 0
    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0


def parse(log: str) -> dict[str, Resources]:
    """Return the resources of each kernel in a report of ``ptxas -v``, by symbol."""
    kernels: dict[str, Resources] = {}
    current = Resources()
    for line in log.splitlines():
        if found := _ENTRY.search(line):
            current = kernels.setdefault(found[1], Resources())
        elif found := _FRAME.search(line):
            stack, stores, loads = map(int, found.groups())
            current.stack_bytes += stack
            current.spill_store_bytes += stores
            current.spill_load_bytes += loads
        elif found := _REGISTERS.search(line):
            current.registers = max(current.registers, int(found[1]))
            if shared := _SHARED.search(line):
                current.static_shared_bytes = int(shared[1])
            if local := _LOCAL.search(line):
                current.stack_bytes = max(current.stack_bytes, int(local[1]))
    return kernels


def _complaint(kernel: Kernel, used: Resources, shared_bytes: int) -> str | None:
    if used.spill_store_bytes or used.spill_load_bytes or used.stack_bytes:
        return (
            f"uses local memory: {used.stack_bytes} bytes of stack, {used.spill_store_bytes} bytes of spill stores, "
            f"{used.spill_load_bytes} bytes of spill loads"
        )
    if kernel.shared_bytes + used.static_shared_bytes > shared_bytes:
        return (
            f"needs {kernel.shared_bytes} + {used.static_shared_bytes} bytes of shared memory, "
            f"the GPU has {shared_bytes}"
        )
    if kernel.threads * -(-used.registers // 8) * 8 > _REGISTER_FILE:
        return f"needs {used.registers} registers for each of {kernel.threads} threads, the GPU has {_REGISTER_FILE}"
    return None


def check(unit: Unit, log: str, cubin: bytes) -> dict[str, Resources]:
    """Return the resources of each kernel of ``unit``, by symbol.

    Raises ``BuildError`` if the cubin or the report lacks a kernel of the matrix, or if a kernel uses local memory or
    more than the architecture has.
    """
    where = f"{unit.architecture.name}/{unit.name}"
    used = parse(log)
    for kernel in unit.kernels:
        if kernel.symbol not in used or f".text.{kernel.symbol}\0".encode() not in cubin:
            raise BuildError(f"{where}: {unit.template} has no kernel {kernel.symbol}")
        if complaint := _complaint(kernel, used[kernel.symbol], unit.architecture.shared_bytes):
            raise BuildError(f"{where}: kernel {kernel.symbol} {complaint}")
    return used
