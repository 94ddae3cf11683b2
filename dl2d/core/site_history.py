"""Recorded history of a site, from which a simulation of it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dl2d.core.cluster import Node
from dl2d.core.jobs import Allocation, Job, JobKey
from dl2d.core.measured_speeds import MeasuredSpeeds, TrainingKind
from dl2d.core.store import RuntimePlan

#: Sizes that a job came to have and when, oldest first, from its start on; ``NOTHING`` where it was paused.
RecordedSizes = tuple[tuple[float, Allocation], ...]


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster at one moment."""

    at: float
    #: ``used`` is what others held, without dl2d's own tasks.
    nodes: tuple[Node, ...]
    #: Completed epochs of the jobs that were there.
    epochs: Mapping[JobKey, float]
    #: Policy that decided then; empty if unknown.
    policy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was recorded from ``begin`` up to ``end``, seconds since 1970."""

    begin: float
    end: float
    #: All that were there at some time in between, in submit order, as they are now.
    jobs: tuple[Job, ...]
    #: At most one an hour, oldest first.
    cluster_states: tuple[ClusterState, ...]
    #: All that was measured of the jobs' kinds, also before.
    speeds: tuple[MeasuredSpeeds, ...]
    #: Changes of membership, as coordinators measured them.
    plans: tuple[RuntimePlan, ...]
    #: Seconds from asking for a task until it took part, of each that did.
    starts: tuple[float, ...]
    #: Sizes that jobs came to have, with times in seconds since 1970.
    sizes: Mapping[JobKey, RecordedSizes] = field(default_factory=dict)
    #: Time from which jobs and decisions are complete, in seconds since 1970; 0: all are stored.
    complete_from: float = 0.0
    #: Kinds whose speeds are assumed, since no job reported any.
    assumed: frozenset[TrainingKind] = frozenset()
