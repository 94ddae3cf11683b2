"""The contract of policies."""

from __future__ import annotations

import enum
from typing import Protocol

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.packing.bin_packing import Packing


class Evidence(enum.StrEnum):
    """Measurements that a policy may need in its snapshots; they are read only for policies that do."""

    #: ``Snapshot.speeds``.
    SPEEDS = "speeds"
    #: ``Snapshot.job_speeds``.
    JOB_SPEEDS = "job-speeds"
    #: ``Snapshot.losses``.
    LOSSES = "losses"


NO_EVIDENCE: frozenset[Evidence] = frozenset()


class Policy(Protocol):
    """Turns a snapshot into an allocation for every job in it, with reasons.

    A policy is a function of its arguments alone: equal snapshots, packings and generators give equal decisions.
    """

    @property
    def name(self) -> str:
        """Name in the configuration, in decisions and on the command line."""
        ...

    @property
    def version(self) -> str:
        """Changes whenever equal inputs may give another answer."""
        ...

    @property
    def needs(self) -> frozenset[Evidence]:
        """What the snapshot has to hold; ``NO_EVIDENCE`` for a policy that looks at nodes, jobs and tasks alone."""
        ...

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """Decide.

        ``packing`` starts with what others hold on the nodes and no task of dl2d's; a policy that adds tasks through
        it gives only what has room. It may be used up.
        """
        ...
