"""Scales of an experiment: in full, or quick with fewer seeds, shorter training and fewer draws."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dl2d.core.errors import WorkloadError
from dl2d.experiments.definition import Experiment, Quick
from dl2d.experiments.participants import Design, Participant


class Scale(enum.StrEnum):
    """Scale of a run: ``quick`` takes some minutes, ``full`` is the definition as written."""

    QUICK = "quick"
    FULL = "full"


def at_scale(experiment: Experiment, scale: Scale) -> Experiment:
    """The experiment as it is run at a scale. Raises ``WorkloadError`` where it has no such scale."""
    quick = experiment.quick
    if scale is Scale.FULL:
        return replace(experiment, quick=None)
    if quick is None:
        raise WorkloadError("quick", "this experiment has one scale only", where=experiment.name)
    return replace(
        experiment,
        version=f"{experiment.version}+{scale}",
        seeds=quick.seeds,
        trainings=quick.trainings,
        minutes=quick.minutes,
        participants=tuple(_shortened(participant, quick) for participant in experiment.participants),
        quick=None,
    )


def _shortened(participant: Participant, quick: Quick) -> Participant:
    training = participant.training
    if training is None:
        return participant
    # What each design's settings call them, and the values where none are given.
    every = "every" if training.design is Design.JUMPS else "validate_every"
    usual = {"iterations": 150, every: 10 if training.design is Design.JUMPS else 20}

    def less(given: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: given.get(name, value) for name, value in usual.items()}
        return {
            **given,
            **{name: max(1, round(value * quick.iterations)) if value else 0 for name, value in values.items()},
        }

    return replace(
        participant,
        training=replace(
            training,
            draws=min(training.draws, quick.draws),
            settings=less(training.settings),
            before=less(training.before) if training.before else {},
        ),
    )
