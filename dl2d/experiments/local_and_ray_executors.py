"""Executors of cells: processes on this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from dl2d.experiments.run_simulation import Cell, Finished, Runner, attempt, failed


class Executor(Protocol):
    """Runs cells."""

    def map(self, runner: Runner, cells: Sequence[Cell]) -> Generator[Finished]:
        """Run every cell; each is given back as soon as it is finished, in any order.

        A cell that fails, or whose process dies, is given back as one that failed. Closing the iterator ends those
        that are running.
        """
        ...


class LocalProcesses:
    """Processes on this machine."""

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def map(self, runner: Runner, cells: Sequence[Cell]) -> Generator[Finished]:
        """See ``Executor.map``. ``runner`` must be a function of a module, so that a new process finds it."""
        waiting = list(reversed(cells))
        while waiting:
            suspects: list[Cell] = []
            yield from _pool(runner, waiting, self._processes, suspects)
            # A process died, and one of these killed it: each is tried alone, which tells the guilty one.
            for cell in suspects:
                guilty: list[Cell] = []
                yield from _pool(runner, [cell], 1, guilty)
                if guilty:
                    yield failed(cell, "its process died; the kernel may have killed it because memory was used up")


def _pool(runner: Runner, waiting: list[Cell], processes: int, suspects: list[Cell]) -> Iterator[Finished]:
    """Take cells from the end of ``waiting`` until none is left or a process dies.

    The cells that were running then are put into ``suspects``.
    """
    others = set(multiprocessing.active_children())
    # Spawned, not forked: a child then has nothing of this process, whatever threads and locks there are.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_begin)
    running: dict[Future[Finished], Cell] = {}
    try:
        while running or (waiting and not suspects):
            while waiting and len(running) < processes and not suspects:
                cell = waiting.pop()
                try:
                    with _undisturbed():
                        future = pool.submit(attempt, runner, cell)
                    running[future] = cell
                except BrokenProcessPool:
                    suspects.append(cell)
            ready, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ready:
                cell = running.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    suspects.append(cell)
                except Exception as error:  # noqa: BLE001 - such as a result that cannot be sent
                    yield failed(cell, f"{type(error).__name__}: {error}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if running:
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Block SIGINT in this process and in processes started meanwhile, until they unblock it themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Set up a child process: it ignores SIGINT and exits when its parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Ray:
    """The machines of a Ray cluster: that of ``RAY_ADDRESS``, else one started on this machine.

    Every machine needs dl2d, and the experiment's folder at the same path.
    """

    def __init__(self) -> None:
        self._ray: Any = importlib.import_module("ray")

    def map(self, runner: Runner, cells: Sequence[Cell]) -> Generator[Finished]:
        """See ``Executor.map``. Each cell takes one CPU of the cluster."""
        ray = self._ray
        started = not ray.is_initialized()
        if started:
            ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        # Cells are tried again when a machine is lost, not when the cell itself fails: that is in its record.
        remote = ray.remote(num_cpus=1, max_retries=2)(attempt)
        running: dict[Any, Cell] = {}
        try:
            running.update((remote.remote(runner, cell), cell) for cell in cells)
            while running:
                ready, _ = ray.wait(list(running), num_returns=1)
                for reference in ready:
                    cell = running.pop(reference)
                    try:
                        yield ray.get(reference)
                    except ray.exceptions.RayError as error:
                        yield failed(cell, f"{type(error).__name__}: {error}")
        finally:
            for reference in running:
                with contextlib.suppress(Exception):
                    ray.cancel(reference, force=True)
            if started:
                ray.shutdown()
