"""Presets: named combinations of simulation rules, placement and policies."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.lookahead import Lookahead
from dl2d.policies.optimus import Optimus
from dl2d.policies.srtf import Srtf
from dl2d.policies.tetris import Tetris
from dl2d.simulation.replay import Rules
from dl2d.simulation.speeds.realism_options import REALISTIC
from dl2d.simulation.true_speeds_for_policies import TrueSpeeds


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


def preset(name: PresetName) -> Preset:
    """A preset by name.

    ``dl2-paper``: the rules of the DL2 authors' simulator. The cluster is emptied and refilled in each slot, a task
    goes to the node with the least used resources (plain sum over types, ties by node order), and filling ends for
    everybody at the first that does not fit there. A worker and a PS that are given together go to one node as one, but
    for Optimus, which gives single tasks, the first two of a job included. Optimus and lookahead know the true speeds.

    ``realistic``: a cluster with costs, noise and failures as they were measured
    (``dl2d.simulation.speeds.realism_options``), for all policies that are installed.
    """
    match name:
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
