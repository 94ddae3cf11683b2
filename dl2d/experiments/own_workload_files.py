"""An experiment on workload files of the user's own, or with kinds of jobs drawn from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dl2d.core.errors import WorkloadError
from dl2d.experiments.definition import CHANGED, Case, Experiment, with_sources
from dl2d.simulation.workload.sources import lacks_file, with_kinds


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
        version=experiment.version.removesuffix(CHANGED) + CHANGED,
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
    found = True

    def see(source: str) -> str:
        nonlocal found
        found &= not lacks_file(source)
        return source

    with_sources(experiment, see)
    return found


def on_kinds(experiment: Experiment, file: str) -> Experiment:
    """The experiment with this file wherever kinds of jobs are drawn from one (``kinds:FILE``).

    Raises ``WorkloadError`` where nothing is drawn so.
    """
    made = with_sources(experiment, lambda source: with_kinds(source, file))
    if made == experiment:
        raise WorkloadError("", f"draws nothing from the kinds of jobs in a file ({file})", where=experiment.name)
    return made
