# SPDX-License-Identifier: Apache-2.0
"""Processes of one torch.distributed group that run functions together, for tests with one process per rank."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

START_SECONDS = 120.0
_GRACE_SECONDS = 10.0
"""How long the other ranks may still take after one has failed."""


class RankError(Exception):
    """The failures of the ranks, with their tracebacks."""


class ProcessGroup:
    """A context manager of ``world_size`` processes with an initialized default group, ``backend`` gloo or nccl.

    With CUDA devices, the current device of rank ``r`` is ``r % devices``; ``devices`` is by default all that there
    are. A function that a rank runs must be importable by name. The processes start in parallel, and every :meth:`run`
    reuses them until one fails to answer.
    """

    def __init__(
        self, world_size: int, *, backend: str = "gloo", devices: int | None = None, group_timeout: float = 60.0
    ) -> None:
        self.world_size = world_size
        # The store is in this process, so that it outlives every rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._processes, self._connections = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            arguments = (rank, world_size, backend, devices, self._store.port, group_timeout, there)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            there.close()  # so that the connection ends with the process
            self._processes.append(process)
            self._connections.append(here)
        self._ready = False

    @property
    def alive(self) -> bool:
        """Whether every rank can still run a function."""
        return all(process.is_alive() for process in self._processes)

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0, dies: tuple[int, ...] = ()
    ) -> list[Any]:
        """Run ``function(rank, *arguments)`` on every rank and return the results in the order of ranks.

        Raises :class:`RankError` with the tracebacks of the ranks that raised, died or did not answer in ``timeout``
        seconds. Ranks in ``dies`` are expected to die; their result is None.
        """
        if not self._ready:
            self._collect(START_SECONDS, ())
            self._ready = True
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((function, arguments))
            except OSError as error:
                raise RankError(f"rank {rank} is gone") from error
        return self._collect(timeout, dies)

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, timeout: float, dies: tuple[int, ...]) -> list[Any]:
        """Return one answer per rank."""
        deadline = time.monotonic() + timeout
        answers: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "did not answer")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank], failure = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    failure = None if rank in dies else f"died with exit code {self._processes[rank].exitcode}"
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if any(self._connections[rank] in waiting for rank in failures):
            for process in self._processes:
                process.kill()
                process.join()
        if failures:
            raise RankError("\n".join(f"rank {rank}: {failure}" for rank, failure in sorted(failures.items())))
        return answers


def _work(
    rank: int,
    world_size: int,
    backend: str,
    devices: int | None,
    port: int,
    group_timeout: float,
    connection: Connection,
) -> None:
    """Join the group, and run functions until the connection ends. Each process runs this."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % (devices or torch.cuda.device_count()))
    limit = timedelta(seconds=group_timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    connection.send((None, None))
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            break
        try:
            answer = (function(rank, *arguments), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        connection.send(answer)
    dist.destroy_process_group()
