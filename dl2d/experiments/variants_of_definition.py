"""Variants of an experiment: quicker, with other policies or seeds, or on workload files of the user's own."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dl2d.core.errors import WorkloadError
from dl2d.experiments.definition import Case, Experiment, Quick, sources_of, with_sources
from dl2d.experiments.participants import Design, Participant, plain
from dl2d.simulation.workload.workload_source_by_name import lacks_file, with_kinds

#: Added to the version of a definition that was changed on the command line.
_CHANGED = "+changed"


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
    every = "every" if training.design is Design.DL2 else "validate_every"
    usual = {"iterations": 150, every: 10 if training.design is Design.DL2 else 20}

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


def changed(experiment: Experiment, *, policies: Sequence[str] = (), seeds: Sequence[int] = ()) -> Experiment:
    """The experiment with other policies or seeds; its version says so. The baseline gives way to the first policy."""
    chosen = tuple(dict.fromkeys(policies)) or experiment.policies
    known = {participant.name: participant for participant in experiment.participants}
    made = replace(
        experiment,
        participants=tuple(known.get(name, plain(name)) for name in chosen),
        baseline=experiment.baseline if experiment.baseline in chosen else chosen[0],
        seeds=tuple(dict.fromkeys(seeds)) or experiment.seeds,
        claims=tuple(claim for claim in experiment.claims if {claim.policy, claim.against} <= {*chosen}),
    )
    if made == experiment:
        return experiment
    return replace(made, version=experiment.version.removesuffix(_CHANGED) + _CHANGED)


def on_files(experiment: Experiment, files: Sequence[str]) -> Experiment:
    """The experiment on other workloads: of every five files one is for tests, one to choose by, three to learn from.

    Where nothing is trained or tuned, all are for tests. Workloads of the experiment that differ in nothing but where
    they come from become one.

    Raises
    ------
    WorkloadError
        There are too few.
    """
    prepares = experiment.prepares
    if len(files) < (3 if prepares else 1):
        needed = "3 or more files: to learn from, to choose by, and to test on" if prepares else "one or more files"
        raise WorkloadError("", f"needs {needed}; there are {len(files)}", where=experiment.name)
    parts: tuple[list[str], list[str], list[str]] = ([], [], [])
    for number, file in enumerate(files):
        parts[min(number % 5, 2) if prepares else 0].append(file)
    tests, validation, training = (tuple(part) for part in parts)
    kinds: dict[str, Case] = {}
    renamed: dict[str, str] = {}
    for case in experiment.cases:
        words = [str(case.preset or ""), *(f"{key} {value}" for key, value in case.options.items())]
        name = ", ".join(["files", *filter(None, words)])[:100]
        renamed[case.name] = name
        kinds[name] = replace(case, name=name, sources=tests, aside=(*validation, *training) if prepares else ())
    return replace(
        experiment,
        version=experiment.version.removesuffix(_CHANGED) + _CHANGED,
        cases=tuple(kinds.values()),
        seeds=experiment.seeds if len(experiment.seeds) >= len(tests) else tuple(range(len(tests))),
        participants=tuple(
            participant
            if participant.training is None
            else replace(participant, training=replace(participant.training, sources=training, validation=validation))
            for participant in experiment.participants
        ),
        claims=tuple(replace(claim, workload=renamed.get(claim.workload, "")) for claim in experiment.claims),
    )


def names_kinds(experiment: Experiment) -> bool:
    """Whether it names all files that kinds of jobs are drawn from, and not just that there is to be one."""
    return not any(lacks_file(source) for source in sources_of(experiment))


def on_kinds(experiment: Experiment, file: str) -> Experiment:
    """The experiment with this file wherever kinds of jobs are drawn from one (``kinds:FILE``).

    Raises ``WorkloadError`` where nothing is drawn so.
    """
    made = with_sources(experiment, lambda source: with_kinds(source, file))
    if made == experiment:
        raise WorkloadError("", f"draws nothing from the kinds of jobs in a file ({file})", where=experiment.name)
    return made
