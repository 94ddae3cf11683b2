"""Learning from this site's records: dl2's weights trained further on its twin, and the gate before they decide.

``dl2d train --twin`` and the daemon's learner (``dl2d.cli.learner``) do it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from dl2d import __version__
from dl2d.cli.gate_trial import Side, Tell, current_checkpoint, on_trial, policy_of, recorded_days
from dl2d.config.settings import Settings
from dl2d.core.errors import CheckpointError
from dl2d.core.history import RecordingStore
from dl2d.core.measured_speeds import MeasuredSpeeds
from dl2d.core.policy_registry import Registry
from dl2d.daemon.models.active_version import version_in
from dl2d.daemon.models.candidates import Candidate
from dl2d.learning.evolution_strategy import Step
from dl2d.learning.train_test_split import Split
from dl2d.learning.training import State, Trainer, TrainingSettings
from dl2d.learning.twin import DAY_SECONDS
from dl2d.policies.common.checkpoint import Checkpoint, write_checkpoint
from dl2d.policies.dl2.checkpoint_contents import from_arrays
from dl2d.throughput.observations import as_measured, by_kind, merged_kinds

NAME: Final = "dl2"
#: The search begins with weights that are good already: it looks and goes less far than one that begins with none.
_STEP: Final = Step(spread=0.07, rate=0.03)
#: A site's cluster is what it is; fewer nodes stand for busier days.
_PARTS: Final = (1.0, 1 / 2, 1 / 4)


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of learning."""

    split: Split
    parent: Checkpoint
    checkpoint: Checkpoint
    record: Mapping[str, Any]
    state: State
    settings: TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinSettings:
    """How long to learn and from how much; None: what ``learning`` of the configuration says."""

    iterations: int
    days: int | None
    minutes: float | None
    seed: int


def learn(
    settings: Settings, store: RecordingStore, chosen: TwinSettings, out: Path, *, tell: Tell, now: float
) -> Learned:
    """Read the site's history, train from what decides now, and write the checkpoint to a folder.

    ``now`` is the end of the history, seconds since 1970. The store is only read.

    Raises
    ------
    WorkloadError
        There is too little to learn from.
    CheckpointError, StoreError
        Something cannot be read or written.
    """
    began = time.monotonic()
    split = recorded_days(settings, store, now=now, seed=chosen.seed, days=chosen.days)
    parent = _current(settings, store.registry)
    how, known = _training_settings(settings, split, parent, chosen)
    tell("setting up", 0, 1)
    trainer = Trainer(split.training, split.validation, how)
    measured = as_measured(merged_kinds(by_kind(known), by_kind(split.measured)))
    state = trainer.start(parent.weights["scorer"], measured)
    tell("setting up", 1, 1)
    tell("searching", 0, how.iterations)
    limit = 60 * (settings.learning.minutes if chosen.minutes is None else chosen.minutes)
    for reached in trainer.search(state):
        state = reached
        tell("searching", state.search.iteration, how.iterations, _note(state))
        if time.monotonic() - began > limit:
            break
    record = _record(split, parent, how, state, time.monotonic() - began)
    made = trainer.checkpoint(state, record)
    kept = {name: parent.settings.get(name, 0.0) for name in ("optimism", "resize_seconds")}
    checkpoint = replace(made, settings={**made.settings, **kept})
    write_checkpoint(checkpoint, out / "checkpoint")
    return Learned(split, parent, checkpoint, record, state, how)


def _training_settings(
    settings: Settings, split: Split, parent: Checkpoint, chosen: TwinSettings
) -> tuple[TrainingSettings, tuple[MeasuredSpeeds, ...]]:
    """How to train, and the speeds that the parent knows. Raises ``CheckpointError`` where it lacks something."""
    nodes = max(len(workload.nodes()) for workload in split.training)
    # On few nodes some parts are the same.
    parts = tuple({max(1, round(nodes * part)): part for part in reversed(_PARTS)}.values())[::-1]
    own = settings.policy.settings.get("optimism") if settings.policy.name == NAME else None
    try:
        return (
            TrainingSettings(
                seed=chosen.seed, iterations=chosen.iterations, every=2, hidden=int(parent.settings["hidden"]),
                parts=parts, rounds=0, step=_STEP, measuring=False,
                deciding_optimism=float(parent.settings["optimism"]) if own is None else own,
            ),
            tuple(from_arrays(parent.weights, parent.settings["kinds"])),
        )  # fmt: skip
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(f"checkpoint of {NAME}: missing or unsuitable entry {error}") from error


def _record(split: Split, parent: Checkpoint, how: TrainingSettings, state: State, seconds: float) -> dict[str, Any]:
    """What the checkpoint says of its training."""
    return {
        "dl2d": __version__, "twin": True, "parent": parent.digest, "seed": how.seed,
        "days": [day.name for day in split.trained_on], "held_out": [day.name for day in split.held_out],
        "data_from": split.trained_on[0].begin, "data_to": split.trained_on[-1].begin + DAY_SECONDS,
        "jobs": sum(day.submitted for day in split.trained_on),
        "iterations": state.search.iteration, "best_iteration": state.best_look.iteration,
        "seconds": round(seconds, 1), "parts": list(how.parts), "costs": _costs(split),
        "validation_jct_slots": list(state.best_look.jct), "parents_jct_slots": list(state.looks[0].jct),
        "curve": [asdict(look) for look in state.looks],
    }  # fmt: skip


def judged(settings: Settings, registry: Registry, learned: Learned, *, tell: Tell) -> Candidate:
    """Put what was learned among the versions, and compare it with what decides now; the store is only read."""
    version = replace(
        version_in(settings.versions_path, learned.checkpoint, at=time.time(), origin="learned from this site's days"),
        parent=learned.parent.digest,
        data_from=learned.record["data_from"],
        data_to=learned.record["data_to"],
        jobs=learned.record["jobs"],
    )
    sides = (
        Side(each.digest, policy_of(settings, each)) for each in (learned.checkpoint, _current(settings, registry))
    )
    return Candidate(version, on_trial(settings, NAME, learned.split, *sides, tell=tell))


def _current(settings: Settings, registry: Registry) -> Checkpoint:
    found = current_checkpoint(settings, registry, NAME)
    assert found is not None  # dl2 comes with one
    return found


def _note(state: State) -> str:
    """Mean completion times on the validation workloads with all nodes, in slots."""
    return f"JCT {state.best_look.jct[0]:.3f}, it began with {state.looks[0].jct[0]:.3f}"


def _costs(split: Split) -> dict[str, float]:
    return {"start_seconds": split.costs.start_seconds, "join_seconds": split.costs.join_seconds}
