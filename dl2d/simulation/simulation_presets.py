"""Presets: named combinations of simulation rules, placement and policies, some of which are told the true speeds."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.jobs import Architecture, Job
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance
from dl2d.plugins import load_placement
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.lookahead import Lookahead
from dl2d.policies.optimus import Optimus
from dl2d.policies.srtf import Srtf
from dl2d.policies.tetris import Tetris
from dl2d.simulation.realism import REALISTIC
from dl2d.simulation.replay import Rules
from dl2d.simulation.speeds.speed_models import MAX_TASKS, Table
from dl2d.simulation.workload.workload_file import Workload


class TrueSpeeds:
    """True speeds of the jobs of a workload, which some policies are told in place of measured ones.

    Implements ``dl2d.core.measured_speeds_and_losses.KnownSpeeds``.
    """

    def __init__(self, workload: Workload) -> None:
        self._speeds = workload.speeds
        #: By job, for a user may say that it is of another type.
        self._models = {job.id: job.model for job in workload.jobs}
        self._grids: dict[tuple[str, int, int], Floats] = {}

    def grid(self, job: Job) -> Floats:
        """See ``KnownSpeeds.grid``; jobs of one model with equal bounds are given the same array."""
        request = job.request
        max_ps = request.max_ps if request.architecture is Architecture.PS else 0
        name = self._models.get(job.key.id, request.model)
        asked = (name, request.max_workers, max_ps)
        if asked not in self._grids:
            grid = self._speeds[name].grid(request.max_workers, max_ps)
            grid.flags.writeable = False
            self._grids[asked] = grid
        return self._grids[asked]

    def beyond(self, job: Job) -> Floats:
        """Like ``grid``, with one worker and one PS more than the job may have.

        Where a table has every size that the job may have, it is not extrapolated: what it does not have is 0.
        """
        request = job.request
        model = self._speeds[self._models.get(job.key.id, request.model)]
        workers = min(request.max_workers + 1, MAX_TASKS)
        ps = min(request.max_ps + 1, MAX_TASKS) if request.architecture is Architecture.PS else 0
        if not isinstance(model, Table) or not model.fills(request.max_workers, request.max_ps):
            return model.grid(workers, ps)
        speeds = np.zeros((ps + 1, workers + 1))
        for at_ps, at_workers, speed in model.points:
            if at_ps <= ps and at_workers <= workers:
                speeds[at_ps, at_workers] = speed
        return speeds


class PresetName(enum.StrEnum):
    """The presets, by name."""

    DL2_PAPER = "dl2-paper"
    REALISTIC = "realistic"


@dataclass(frozen=True, slots=True)
class Preset:
    """What a preset puts in place of the defaults."""

    rules: Rules
    placement: Placement
    #: The preset's policies by name, made from the workload's true speeds; empty for all that are installed.
    policies: Mapping[str, Callable[[TrueSpeeds], Policy]]
    #: Placements of single policies, by name, where they are not as the others'.
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def placement_of(self, policy: str) -> Placement:
        """How a policy's tasks are placed."""
        return self.placements.get(policy, self.placement)


def preset(name: PresetName | None, placement: str = "load_balance") -> Preset:
    """A preset by name. With None the rules are the defaults, and tasks are placed by ``placement``.

    ``dl2-paper``: the rules of the DL2 authors' simulator. The cluster is emptied and refilled in each slot, a task
    goes to the node with the least used resources (plain sum over types, ties by node order), and filling ends for
    everybody at the first that does not fit there. A worker and a PS that are given together go to one node as one, but
    for Optimus, which gives single tasks, the first two of a job included. Optimus and lookahead know the true speeds.

    ``realistic``: a cluster with costs, noise and failures as they were measured
    (``dl2d.simulation.realism``), for all policies that are installed.
    """
    match name:
        case None:
            return Preset(rules=Rules(), placement=load_placement(placement), policies={})
        case PresetName.REALISTIC:
            return Preset(rules=Rules(realism=REALISTIC), placement=LoadBalance(), policies={})
        case PresetName.DL2_PAPER:
            apart = Dl2Paper(keeps_bundles=False)
            return Preset(
                rules=Rules(empty_each_slot=True),
                placement=Dl2Paper(),
                placements={"optimus": apart, "optimus-true": apart},
                policies={
                    "fifo": lambda _: Fifo(whole_bundles=True),
                    "srtf": lambda _: Srtf(by_fraction=True, whole_bundles=True),
                    "tetris": lambda _: Tetris(whole_bundles=True),
                    "drf": lambda _: Drf(end_at_first_failure=True, whole_bundles=True),
                    "optimus": _optimus,
                    "optimus-true": _optimus,
                    "lookahead": lambda speeds: Lookahead(known=speeds),
                    "lookahead-true": lambda speeds: Lookahead(known=speeds),
                },
            )


def _optimus(speeds: TrueSpeeds) -> Policy:
    """Optimus as in the DL2 authors' simulator, which knows the true speeds and counts tasks, not resources."""
    return Optimus(known=speeds, by_resources=False, end_at_first_failure=True, beyond=speeds.beyond)
