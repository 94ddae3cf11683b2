"""Lookup of policies by name for simulations: installed, learned, of a preset, or told the true speeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dl2d.core.errors import PluginError, did_you_mean
from dl2d.core.policy import Policy
from dl2d.plugins import POLICIES, FactoryArguments, available, load_policy
from dl2d.policies.common.checkpoint import read_checkpoint
from dl2d.policies.lookahead import Lookahead
from dl2d.policies.optimus import Optimus
from dl2d.simulation.replay import Replayed, replay
from dl2d.simulation.simulation_presets import Preset, TrueSpeeds
from dl2d.simulation.workload.workload_file import Workload

#: Policies that can be told the workload's speeds instead of measuring them, by the name they have then.
TOLD: dict[str, Callable[[TrueSpeeds], Policy]] = {
    "lookahead-true": lambda speeds: Lookahead(known=speeds),
    "optimus-true": lambda speeds: Optimus(known=speeds),
}

#: Policies that are what a checkpoint makes them; each reads one, or the one that comes with dl2d.
LEARNED = frozenset({"dl2", "dl2-original"})


def find_policy(name: str, workload: Workload, chosen: Preset, checkpoint: Path | None = None) -> Policy:
    """A policy by name: learned, the preset's own, one that is told the workload's speeds (``NAME-true``), a plug-in.

    ``checkpoint`` is the folder that a learned one reads; without it, it is the one that comes with dl2d.

    Raises
    ------
    PluginError
        There is none of this name; says which there are.
    CheckpointError
        A checkpoint cannot be read.
    """
    if name in LEARNED:
        read = None if checkpoint is None else read_checkpoint(checkpoint, policy=name)
        return load_policy(name, given=FactoryArguments(checkpoint=read))
    if name in chosen.policies:
        return chosen.policies[name](TrueSpeeds(workload))
    if not chosen.policies:
        if name in TOLD:
            return TOLD[name](TrueSpeeds(workload))
        if name in (installed := available(POLICIES)):
            return load_policy(name)
    known = sorted({*(chosen.policies or {*installed, *TOLD}), *LEARNED})
    near = did_you_mean(name, known)
    if chosen.policies:
        raise PluginError(f"--policy: this preset has no {name!r}{near}; it has {', '.join(known)}")
    raise PluginError(f"--policy: there is no {name!r}{near}; there are {', '.join(known)}")


def replay_by_name(name: str, workload: Workload, chosen: Preset) -> Replayed:
    """Replay a workload under a policy by name, with the rules and the placement of a preset."""
    policy = find_policy(name, workload, chosen)
    return replay(workload, policy, chosen.placement_of(name), rules=chosen.rules, timer=time.perf_counter)
