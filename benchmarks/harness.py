"""What the benchmarks share: options, figures of processes that they start, results as lines of JSON, known tensors."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import psutil

#: what tests have for themselves is not installed; benchmarks import it after this module
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

W = TypeVar("W", bound=Hashable)
F = TypeVar("F")


def options_of(description: str | None, **defaults: Any) -> argparse.Namespace:
    """The options of the command line, by name with their defaults; a list takes several values, a tuple is a choice.

    ``--role`` and ``--out`` are set in processes that the benchmark starts itself (see ``command_of``, ``measured``).
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--role", "--out"):
        parser.add_argument(flag, default="", help=argparse.SUPPRESS)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="*", type=type(default[0]), default=default)
        elif isinstance(default, tuple):
            parser.add_argument(flag, choices=default, default=default[0])
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def command_of(options: argparse.Namespace, role: str, python: str = sys.executable, **changes: Any) -> list[str]:
    """The command that runs this benchmark with the same options in another role."""
    given = {**vars(options), "role": role, **changes}
    words = [python, str(Path(sys.argv[0]).resolve())]
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else map(str, values))]
    return words


def measured(options: argparse.Namespace, role: str, start: Callable[[list[str]], F], **changes: Any) -> tuple[F, Any]:
    """What ``start`` returns for a command, and the figures of its first process that writes some."""
    with tempfile.TemporaryDirectory() as folder:
        result = start(command_of(options, role, out=folder, **changes))
        return result, json.loads(min(Path(folder).iterdir()).read_text())


def write_figures(options: argparse.Namespace, figures: Any) -> None:
    """Hand what a process has measured to the benchmark that has started it."""
    Path(options.out, os.environ.get("DL2_TASK", str(os.getpid()))).write_text(json.dumps(figures))


def by_turns(ways: Iterable[W], repeats: int, run: Callable[[W], F]) -> dict[W, list[F]]:
    """What the ways give, each so many times, in turns."""
    found: dict[W, list[F]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, figures in found.items():
            figures.append(run(way))
    return found


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """User and system time so far of those processes that are there."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def free_port() -> int:
    """A port of the loopback interface that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def show(**values: Any) -> None:
    """Print one result as a line of JSON, with four significant digits."""
    print(json.dumps(_rounded(values)), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's 161 trainable tensors (He et al. 2016): 25,557,032 numbers."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, before, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]
