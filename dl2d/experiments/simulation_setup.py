"""Rules, policy and placement with which a workload is simulated for a participant of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dl2d.core.errors import PluginError, WorkloadError, printable
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.experiments.definition import Case, Experiment
from dl2d.experiments.participants import PLACEMENT, Number, Participant
from dl2d.plugins import FactoryArguments, load_placement, load_policy
from dl2d.policies.common.checkpoint import read_checkpoint
from dl2d.simulation.policy_by_name import LEARNED, TOLD, find_policy
from dl2d.simulation.realism import Realism
from dl2d.simulation.simulation_presets import Preset, preset
from dl2d.simulation.workload.workload_file import Workload


def rules_for(experiment: Experiment, case: Case) -> Preset:
    """The rules of a case of an experiment. Raises ``WorkloadError``, ``PluginError``."""
    chosen = preset(case.preset, experiment.placement)
    try:
        realism = chosen.rules.realism.with_options(case.options)
    except WorkloadError as error:
        where = f"workload {case.name}"
        raise WorkloadError(f"with.{printable(error.key)}", error.problem, where=where) from None
    return replace(chosen, rules=replace(chosen.rules, realism=realism, most_slots=experiment.most_slots))


def is_ideal(case: Case) -> bool:
    """Whether the simulated cluster is free of noise, costs and failures: only then is the bound one."""
    return preset(case.preset).rules.realism.with_options(case.options) == Realism()


def tuned(participant: Participant, chosen: Mapping[str, Number | str]) -> Participant:
    """A participant with the chosen settings and without tuning."""
    settings = {name: value for name, value in chosen.items() if name != PLACEMENT and not isinstance(value, str)}
    placement = str(chosen.get(PLACEMENT, participant.placement))
    return replace(participant, settings={**participant.settings, **settings}, placement=placement, tune={})


def policy_for(participant: Participant, workload: Workload, chosen: Preset, checkpoint: Path | None = None) -> Policy:
    """A participant's policy.

    Raises
    ------
    PluginError, ConfigError
        There is none of this name, or it has no such settings.
    CheckpointError
        The checkpoint cannot be read.
    """
    name = participant.policy
    if not participant.settings:
        return find_policy(name, workload, chosen, checkpoint)
    if name in TOLD or (name in chosen.policies and name not in LEARNED):
        raise PluginError(f"policies: {participant.name}: {name} takes no settings under these rules")
    read = None if checkpoint is None else read_checkpoint(checkpoint, policy=name)
    given = FactoryArguments(checkpoint=read, settings=dict(participant.settings), slot_seconds=workload.slot_seconds)
    return load_policy(name, "policies", given)


def placement_for(participant: Participant, chosen: Preset) -> Placement:
    """How a participant's tasks are placed. Raises ``PluginError``."""
    return load_placement(participant.placement) if participant.placement else chosen.placement_of(participant.policy)
