"""Warnings that name a line of the user's script: the one that runs, or one that read rank or num_workers only once."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Literal

import mxnet as mx

#: folders whose code asks for the number of workers whenever it needs it
_LIBRARIES = tuple(str(Path(file).parent) for file in (mx.__file__, __file__))

#: file and number of a line of the script
_Line = tuple[str, int]


def warn_of_script(text: str) -> None:
    """Warn of the line of the script that is being run."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    _warn(text, *((frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)))


class RankAndSizeReadings:
    """Lines of the script that have read rank or num_workers; those that read it once are named when it has changed."""

    def __init__(self, rank: int, workers: int) -> None:
        #: numbers of workers that the script may have seen
        self.seen_workers = {workers}
        self._rank_before = rank
        #: by file and line of the script that has read one of these once, what it was; -1 if it was read there again
        self._read_once: dict[Literal["num_workers", "rank"], dict[_Line, int]] = {"num_workers": {}, "rank": {}}

    def note(self, what: Literal["num_workers", "rank"], value: int) -> None:
        """Take note of the line of the script that reads one of these: the one that has called this one's caller."""
        frame = sys._getframe(2)  # noqa: SLF001  (a stack takes too long)
        line = frame.f_code.co_filename, frame.f_lineno
        if not line[0].startswith(_LIBRARIES):
            self._read_once[what][line] = -1 if line in self._read_once[what] else value

    def warn_of_changes(self, rank: int, workers: int) -> None:
        """Take note of rank and number of workers; warn of lines that have read them once, when they were others."""
        if workers not in self.seen_workers:
            self.seen_workers.add(workers)
            self._warn_of_lines(
                "num_workers", workers,
                "If the data is split by it, samples are missed or used twice: use DataLoader(..., "
                "sampler=pslite.mxnet.elastic_split(dataset)), or read num_workers in each epoch, after which "
                "the epochs that the daemon shows are an estimate.",
            )  # fmt: skip
        if rank == 0 < self._rank_before:
            self._warn_of_lines(
                "rank", rank,
                "The worker that had rank 0 is gone. If the line decides for all time who writes checkpoints, nobody "
                "does now: read rank whenever one is written.",
            )  # fmt: skip
        self._rank_before = rank

    def _warn_of_lines(self, what: Literal["num_workers", "rank"], now: int, text: str) -> None:
        for (file, line), before in self._read_once[what].items():
            if before >= 0:
                _warn(f"this line has read {what} once, when it was {before}; it is {now} now. {text}", file, line)


def _warn(text: str, file: str, line: int) -> None:
    warnings.warn_explicit(text, UserWarning, file, line)
