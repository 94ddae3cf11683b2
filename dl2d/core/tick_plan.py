"""Plan of a tick: single starts and stops of tasks, and their outcome."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dl2d.core.jobs import JobKey, Role
from dl2d.core.resources import Resources, Shortfall


class Start(msgspec.Struct, frozen=True, gc=False):
    """A task to be started on a node."""

    job: JobKey
    role: Role
    node: str
    demand: Resources


class Stop(msgspec.Struct, frozen=True, gc=False):
    """A task to be drained."""

    job: JobKey
    task: str


@dataclass(frozen=True, slots=True)
class Move:
    """A task in whose place a larger one will start; another of its kind is started on ``node`` first."""

    job: JobKey
    task: str
    node: str


class Deferred(msgspec.Struct, frozen=True, gc=False):
    """Tasks that were decided on but do not fit yet; the next tick tries again."""

    job: JobKey
    role: Role
    count: int
    #: What is missing on the node that comes nearest.
    nearest: str
    shortfalls: tuple[Shortfall, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All starts and stops of a tick. Starts use only resources that the resource manager reports as free."""

    #: The replacements of ``moves`` are among them.
    starts: tuple[Start, ...] = ()
    stops: tuple[Stop, ...] = ()
    deferred: tuple[Deferred, ...] = ()
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the resource manager refused or did not answer."""

    job: JobKey
    what: str
    error: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a plan."""

    started: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
