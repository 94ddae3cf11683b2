"""How an entrant plays a workload of a case: rules, policy and placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dl2d.core.errors import PluginError, WorkloadError
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.wording import printable
from dl2d.daemon.plugins import Given, load_placement, load_policy
from dl2d.experiments.definition import Case
from dl2d.experiments.participants import PLACEMENT, Entrant, Number
from dl2d.policies.checkpoint import checkpoint_in, read_checkpoint
from dl2d.simulation.contenders import LEARNED, TOLD, contender
from dl2d.simulation.preset import Preset, preset
from dl2d.simulation.realism import Realism
from dl2d.simulation.replay import Rules
from dl2d.simulation.workload import Workload


def rules_for(case: Case, placement: str, most_slots: int) -> Preset:
    """The rules of a case; ``placement`` is that where no preset says so. Raises ``WorkloadError``, ``PluginError``."""
    name = case.preset
    chosen = preset(name) if name is not None else Preset(Rules(), load_placement(placement), {})
    try:
        realism = chosen.rules.realism.with_options(case.options)
    except WorkloadError as error:
        where = f"workload {case.name}"
        raise WorkloadError(f"with.{printable(error.key)}", error.problem, where=where) from None
    return replace(chosen, rules=replace(chosen.rules, realism=realism, most_slots=most_slots))


def is_ideal(case: Case) -> bool:
    """Whether the simulated cluster is free of noise, costs and failures: only then is the bound one."""
    rules = preset(case.preset).rules if case.preset is not None else Rules()
    return rules.realism.with_options(case.options) == Realism()


def tuned(entrant: Entrant, chosen: Mapping[str, Number | str]) -> Entrant:
    """An entrant with what was chosen for it, and nothing left to tune."""
    settings = {name: value for name, value in chosen.items() if name != PLACEMENT and not isinstance(value, str)}
    placement = str(chosen.get(PLACEMENT, entrant.placement))
    return replace(entrant, settings={**entrant.settings, **settings}, placement=placement, tune={})


def policy_for(entrant: Entrant, workload: Workload, chosen: Preset, checkpoint: Path | None = None) -> Policy:
    """An entrant's policy.

    Raises
    ------
    PluginError, ConfigError
        There is none of this name, or it has no such settings.
    CheckpointError
        The checkpoint cannot be read.
    """
    name = entrant.policy
    if not entrant.settings:
        return contender(name, workload, chosen, checkpoint)
    if name in TOLD or (name in chosen.policies and name not in LEARNED):
        raise PluginError(f"policies: {entrant.name}: {name} takes no settings under these rules")
    read = None if checkpoint is None else read_checkpoint(checkpoint_in(checkpoint), policy=name)
    given = Given(checkpoint=read, settings=dict(entrant.settings), slot_seconds=workload.slot_seconds)
    return load_policy(name, "policies", given)


def placement_for(entrant: Entrant, chosen: Preset) -> Placement:
    """How an entrant's tasks are placed. Raises ``PluginError``."""
    return load_placement(entrant.placement) if entrant.placement else chosen.placement_of(entrant.policy)
