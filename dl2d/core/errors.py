"""Every error that dl2d raises on purpose, under one root, and how messages write values and names from outside.

A message says what was wrong, where, and what to do about it; it is written for the person who reads the log.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Self

#: Problems of one request that a message tells.
_MAX_PROBLEMS = 20


class Dl2dError(Exception):
    """Root of all errors of dl2d."""


class ConfigError(Dl2dError):
    """The configuration file is missing, malformed, or has a bad or unknown key."""


class RequestError(Dl2dError):
    """A job request is malformed. ``key`` names the option at fault, ``others`` further ones with their problems."""

    def __init__(self, key: str, problem: str, *, where: str = "", others: Sequence[tuple[str, str]] = ()) -> None:
        self.key = key
        self.problem = problem
        self.where = where
        self.others = tuple(others)
        told = [f"{key}: {problem}" for key, problem in ((key, problem), *others[: _MAX_PROBLEMS - 1])]
        if len(others) >= _MAX_PROBLEMS:
            told.append(f"and {len(others) - _MAX_PROBLEMS + 1} more")
        super().__init__(f"{where + ': ' if where else ''}{'; '.join(told)}")


class WorkloadError(Dl2dError):
    """A workload, or a speed model or profile in it, is malformed.

    ``where`` is the file (or what else was read), ``job`` the id of the job at fault; ``key`` names the entry. Any of
    them is empty where it does not apply.
    """

    def __init__(self, key: str, problem: str, *, where: str = "", job: str = "") -> None:
        self.key = key
        self.problem = problem
        self.where = where
        self.job = job
        super().__init__(": ".join(part for part in (where, job and f"job {job}", key, problem) if part))

    @classmethod
    def unreadable(cls, where: str, error: Exception) -> Self:
        """Make the error of a file that cannot be opened, or whose content cannot be decompressed."""
        return cls("", f"cannot be read: {getattr(error, 'strerror', None) or error}", where=where)


class PolicyError(Dl2dError):
    """A policy failed or gave an answer that is not an allocation."""


class PluginError(Dl2dError):
    """A plug-in is unknown or cannot be loaded."""


class ResourceManagerError(Dl2dError):
    """The resource manager did not do what was asked.

    ``said`` holds the manager's own words (for a command: its standard error), which the message repeats.
    """

    def __init__(self, message: str, *, said: str = "") -> None:
        self.said = said.strip()
        super().__init__(f"{message}: {self.said}" if self.said else message)


class Rejected(ResourceManagerError):
    """The manager understood the request and refused it; asking again unchanged will not help."""


class NodeRefused(Rejected):
    """The manager does not start a job's task on the node that was named; on another one it may."""


class NeverStarts(Rejected):
    """No task with this demand is started for the job, on any node and whatever is free."""


class Unavailable(ResourceManagerError):
    """The manager did not answer, or not in time; asking again later may help."""


class Waiting(Unavailable):
    """The manager is asked again after a known time: it has just started, or is asked too often."""


class StartFailed(ResourceManagerError):
    """A start ended with an error that is no answer of the manager, such as a bug; it may have been carried out."""


class MachineFault(StartFailed):
    """A start ended with an error of the daemon's own machine, such as too many open files or no memory."""


class NotFound(ResourceManagerError):
    """The manager does not know the job, task or node that was named."""


class Denied(ResourceManagerError):
    """Whoever asks may not do this, or could not prove who they are."""


class StoreError(Dl2dError):
    """The database refused to read or write; nothing of the attempted change was kept."""


class StoreUnavailable(StoreError):
    """The database cannot be reached or cannot write now (down, locked, disk full); trying again may help."""


class SchemaOutdated(StoreError):
    """The database's schema is not the one this version needs; ``dl2d db upgrade`` mends it."""


class DuplicateJob(StoreError):
    """A job with this identity is already known."""


class AlreadyRunning(Dl2dError):
    """Another daemon holds this store."""


class CheckpointError(Dl2dError):
    """A checkpoint cannot be read or written."""


class RegistryError(Dl2dError):
    """The registry of learned policies has no such version, or cannot do with it what was asked."""


class LiveVersionChanged(RegistryError):
    """Another version of a learned policy went live meanwhile, so that a change did not happen."""


class GateRefused(Dl2dError):
    """A learned policy was tried before it may decide, and may not; says what was wrong with it."""


class TrainingError(Dl2dError):
    """Training cannot go on."""


class Diverged(TrainingError):
    """A loss, a gradient or a weight is infinite or not a number."""


class TooFewSamples(TrainingError):
    """There are fewer samples than an update needs."""


#: Characters of a value that a message shows, and items of a list or object that it shows in full.
MAX_SHOWN = 100
MAX_ITEMS_SHOWN = 4
#: Names that a message lists.
MAX_NAMES = 8


def shown(value: object) -> str:
    """The value as a message shows it, cut where it is long; long lists and objects by their size."""
    if isinstance(value, list | tuple | Mapping) and len(value) > MAX_ITEMS_SHOWN:
        kind = "an object" if isinstance(value, Mapping) else "a list"
        return f"{kind} of {len(value)}"
    try:
        text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def counted(number: int, noun: str) -> str:
    """``1 job``, ``2 jobs``: a number and a noun with a regular plural."""
    return f"{number} {noun}{'s' * (number != 1)}"


def some_of(names: Sequence[str], most: int = MAX_NAMES) -> str:
    """``n1, n2``, or the first ``most`` of them ``and 3 more``; empty for none."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def printable(key: str) -> str:
    """A key as errors name it: as it is, or quoted and cut where that could spoil a line of a log."""
    return key if key.isprintable() and len(key) <= MAX_SHOWN else shown(key)


def is_meant(missing: str, given: Collection[str]) -> str:
    """A hint at the given word that may have been meant for a missing one, or nothing."""
    near = difflib.get_close_matches(missing, sorted(given), n=1)
    return f" (is {shown(near[0])} meant?)" if near else ""


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A hint at the known word most like the given one, or nothing."""
    near = difflib.get_close_matches(word[:MAX_SHOWN], sorted(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def printable_line(text: str) -> str:
    """What another program said, as one line without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
