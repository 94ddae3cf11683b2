"""Preparation of participants: training and tuning before their simulations."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dl2d.atomic_file import write_atomically
from dl2d.core.errors import Dl2dError, WorkloadError
from dl2d.core.input_validation import to_plain
from dl2d.core.json_codec import as_plain, decode_file, encode
from dl2d.experiments.definition import Case, Experiment, with_content
from dl2d.experiments.participants import (
    PLACEMENT,
    SEEDS_EACH,
    TRAINING_SEEDS,
    TUNING_SEEDS,
    VALIDATION_SEEDS,
    Design,
    Number,
    Participant,
    Setting,
    Training,
    dl2_paper_settings,
    dl2_settings,
    plain_digest,
)
from dl2d.experiments.simulation_setup import placement_for, policy_for, rules_for, tuned
from dl2d.learning.dl2.training import Trainer
from dl2d.learning.dl2_paper.analytical_speed_model import analytical
from dl2d.learning.dl2_paper.settings import Settings
from dl2d.policies.common.checkpoint import Checkpoint, write_checkpoint
from dl2d.simulation.policy_by_name import replay_by_name
from dl2d.simulation.replay import replay
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.workload.workload_file import Workload
from dl2d.simulation.workload.workload_source_by_name import is_drawn, load_source

CHECKPOINT = "checkpoint"
_RECORD = "prepared.json"
#: Workloads that settings are tuned on; and how many draws to train on there are for one to validate with.
_TUNED_ON = 4
_FOR_ONE = 4
#: What curves are drawn against: the validation workloads' time under this policy.
REFERENCE = "drf"
#: Parts of its updates after which imitation that is all there is is looked at, too.
_EARLIER = (0.05, 0.1, 0.25, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One point of a learning curve: mean completion time on the validation workloads, in slots."""

    step: int
    jct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """One combination of settings, and the geometric mean of average completion times; None: some did not end."""

    chosen: Mapping[str, float | bool | str]
    jct: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Result of a training or tuning; deterministic. Its fields are written to the files of a run."""

    #: Name of the participant.
    entrant: str
    #: Name of the workload that it was tuned for; empty where it was trained.
    case: str = ""
    #: Of the training.
    seed: int = 0
    #: Digest of the checkpoint.
    checkpoint: str = ""
    #: What a step of the curve is, and the time of the validation workloads under DRF.
    unit: str = ""
    curve: tuple[CurvePoint, ...] = ()
    reference: float = 0.0
    #: What was chosen by tuning, and from what.
    chosen: Mapping[str, float | bool | str] = field(default_factory=dict)
    tries: tuple[TuningResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    key: str
    prepared: Prepared
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A training with a seed, a tuning for a workload, or both, to be done. Made by ``to_prepare``."""

    #: SHA-256 over all that decides on what comes of it; files count by their content.
    key: str
    experiment: Experiment
    participant: Participant
    case: Case
    seed: int
    #: The training, where what was trained is to be tuned.
    trained: Preparation | None = None

    def folder(self, within: Path) -> Path:
        """Folder of its result."""
        return within / self.key[:32]

    def read(self, within: Path) -> Prepared | None:
        """Its result; None if it has not been done yet."""
        kept = decode_file(self.folder(within) / _RECORD, _Kept)
        return kept.prepared if kept is not None and kept.key == self.key else None

    def seconds(self, within: Path) -> float:
        """Seconds that it took; 0 if it has not been done yet."""
        kept = decode_file(self.folder(within) / _RECORD, _Kept)
        return 0.0 if kept is None else kept.seconds

    def make(self, within: Path) -> Prepared:
        """Train or tune, and write the result.

        Raises
        ------
        Dl2dError
            Training or a replay failed, or the folder cannot be written.
        """
        begin = time.perf_counter()
        folder = self.folder(within)
        folder.mkdir(parents=True, exist_ok=True)
        if self.trained is not None:
            # Workloads share it; processes that come to it together each make the same.
            trained = self.trained.read(within) or self.trained.make(within)
            found = _tune(self, self.trained.folder(within) / CHECKPOINT)
            made = replace(trained, case=found.case, chosen=found.chosen, tries=found.tries)
        elif self.participant.training is not None:
            made = _train(self, self.participant.training, folder)
        else:
            made = _tune(self)
        kept = _Kept(key=self.key, prepared=made, seconds=time.perf_counter() - begin)
        write_atomically(folder / _RECORD, encode(kept) + b"\n")  # last: with it, it is made
        return made

    def ready(self, within: Path) -> tuple[Participant, Path | None]:
        """The participant with tuned settings, and its checkpoint.

        Raises ``WorkloadError`` where what it needs has not been made.
        """
        made = self.read(within)
        if made is None:
            raise WorkloadError("policies", f"{self.participant.name} has not been prepared")
        folder = None if self.participant.training is None else (self.trained or self).folder(within)
        return tuned(self.participant, made.chosen), None if folder is None else folder / CHECKPOINT


def to_prepare(experiment: Experiment, participant: Participant, case: Case, seed: int) -> Preparation:
    """The preparation that a participant needs. Raises ``WorkloadError`` for a file that cannot be read."""
    said: dict[str, Any] = {}
    trained = None
    if participant.training is not None and participant.tune:
        alone = replace(participant, tune={})
        trained = to_prepare(experiment, alone, case, seed)
        said = {"trained": trained.key}
    if participant.training is not None and trained is None:
        contents = replace(
            participant.training,
            sources=tuple(map(with_content, participant.training.sources)),
            validation=tuple(map(with_content, participant.training.validation)),
        )
        said = {"training": to_plain(contents), "seed": seed}
    else:
        said |= {
            "policy": participant.policy,
            "settings": dict(participant.settings),
            "tune": {key: list(values) for key, values in participant.tune.items()},
            "placement": participant.placement or experiment.placement,
            "sources": list(map(with_content, case.aside or case.sources)),
            "preset": str(case.preset),
            "options": dict(case.options),
            "most_slots": experiment.most_slots,
        }
    return Preparation(
        key=plain_digest(said), experiment=experiment, participant=participant, case=case, seed=seed, trained=trained
    )


def combinations(tune: Mapping[str, Sequence[Number | str]]) -> list[dict[str, Number | str]]:
    """The Cartesian product of the values, as settings by name."""
    return [dict(zip(tune, values, strict=True)) for values in itertools.product(*tune.values())]


def _tune(wanted: Preparation, checkpoint: Path | None = None) -> Prepared:
    """Simulate all combinations on tuning workloads; the first with the least geometric mean of average JCTs wins."""
    case = wanted.case
    workloads = [
        load_source(source, seed=TUNING_SEEDS + number).workload
        for number, source in enumerate(case.aside or case.sources * _TUNED_ON)
    ]
    tries = []
    for chosen in combinations(wanted.participant.tune):
        participant = tuned(wanted.participant, chosen)
        rules = rules_for(wanted.experiment, case)
        logs = []
        for number, workload in enumerate(workloads):
            try:
                played = replay(
                    workload, policy_for(participant, workload, rules, checkpoint), placement_for(participant, rules),
                    rules=rules.rules, seed=TUNING_SEEDS + number, timer=time.perf_counter,
                )  # fmt: skip
            except Dl2dError:
                break
            logs.append(math.log(played.avg_jct))
        mean = math.exp(math.fsum(logs) / len(logs)) if len(logs) == len(workloads) else None
        tries.append(TuningResult(chosen=chosen, jct=mean))
    ended = [each for each in tries if each.jct is not None]
    if not ended:
        raise WorkloadError("tune", f"{wanted.participant.name} fails with every setting", where=case.name)
    best = min(ended, key=lambda each: each.jct or math.inf)
    return Prepared(entrant=wanted.participant.name, case=case.name, chosen=best.chosen, tries=tuple(tries))


def _train(wanted: Preparation, training: Training, folder: Path) -> Prepared:
    first = wanted.seed * SEEDS_EACH
    learned = _workloads(training.sources, TRAINING_SEEDS + first, training.draws)
    few = max(2, training.draws // _FOR_ONE)
    validation = _workloads(training.validation or training.sources, VALIDATION_SEEDS + first, few)
    named = {name for workload in (*learned, *validation) for name in {job.model for job in workload.jobs}}
    if training.types:
        learned, validation = (only(part, sorted(named)[: training.types]) for part in (learned, validation))
    if training.offline:
        learned, validation = ([analytical(one) for one in part] for part in (learned, validation))
    if training.design is Design.DL2:
        checkpoint, curve, unit = _train_dl2(training, learned, validation, wanted.seed)
    else:
        checkpoint, curve, unit = _train_dl2_paper(training, learned, validation, wanted.seed, sorted(named))
    write_checkpoint(checkpoint, folder / CHECKPOINT)
    rules = preset(PresetName.DL2_PAPER)
    reference = [replay_by_name(REFERENCE, workload, rules).avg_jct for workload in validation]
    return Prepared(
        entrant=wanted.participant.name, seed=wanted.seed, checkpoint=checkpoint.digest, unit=unit, curve=curve,
        reference=float(np.mean(reference)),
    )  # fmt: skip


def _workloads(sources: Sequence[str], seed: int, draws: int) -> list[Workload]:
    """Generators are drawn from ``draws`` times, files read once."""
    return [
        load_source(source, seed=seed + number).workload
        for source in sources
        for number in range(draws if is_drawn(source) else 1)
    ]


def only(workloads: Sequence[Workload], models: Sequence[str]) -> list[Workload]:
    """The workloads with jobs of these models alone; those that have none are left out.

    Raises ``WorkloadError`` where no workload is left.
    """
    kept = [
        replace(workload, jobs=jobs)
        for workload in workloads
        if (jobs := tuple(job for job in workload.jobs if job.model in models))
    ]
    if not kept:
        raise WorkloadError("types", f"no job is of {', '.join(models)}")
    return kept


def _train_dl2(
    training: Training, learned: Sequence[Workload], validation: Sequence[Workload], seed: int
) -> tuple[Checkpoint, tuple[CurvePoint, ...], str]:
    settings = dl2_settings(training.settings, seed=seed)
    trainer = Trainer(learned, validation, settings)
    state = trainer.explore()
    for reached in trainer.search(state):
        state = reached
    whole = settings.parts.index(max(settings.parts))
    curve = tuple(CurvePoint(step=look.iteration, jct=look.jct[whole]) for look in state.looks)
    return trainer.checkpoint(state, {"training": as_plain(training), "seed": seed}), curve, "iterations of the search"


def _train_dl2_paper(
    training: Training, learned: Sequence[Workload], validation: Sequence[Workload], seed: int, named: Sequence[str]
) -> tuple[Checkpoint, tuple[CurvePoint, ...], str]:
    """One training after another, where there is one before; steps are gradient steps of all of them."""
    from dl2d.learning.dl2_paper.training_loop import Report, train  # noqa: PLC0415 - torch takes seconds, and is for this alone

    looks: dict[int, float] = {}

    def run(settings: Settings, done: int, **given: Any) -> Checkpoint:
        imitates = bool(settings.teacher) and given.get("start") is None
        supervised = settings.supervised_updates if imitates else 0

        def look(report: Report) -> None:
            learned_since = report.done * _steps(settings) if report.phase == "learning" else 0
            if math.isfinite(report.score.best):  # the better of both ways of acting
                looks[done + supervised + learned_since] = report.score.best

        return train(learned, validation, settings, seed=seed, on_validation=look, **given)

    settings = dl2_paper_settings(training.design, training.settings)
    if training.before:
        before = dict(training.before)
        types = int(before.pop("types", 0))
        first = dl2_paper_settings(training.design, before)
        parts = [only(part, named[:types]) if types else part for part in (learned, validation)]
        start = train(parts[0], parts[1], first, seed=seed)
        # Looked at on other workloads than those below, so not on the same curve; its steps count.
        done = first.iterations * _steps(first) + (first.supervised_updates if first.teacher else 0)
        made = run(settings, done, start=start)
    else:
        run(replace(settings, supervised_updates=0, iterations=0), 0)
        if settings.teacher and not settings.iterations:
            for part in _EARLIER:
                # The rate falls to the end: a shorter imitation is one of its own, not a part of the longer.
                run(replace(settings, supervised_updates=round(part * settings.supervised_updates)), 0)
        made = run(settings, 0)
    curve = tuple(CurvePoint(step=step, jct=jct) for step, jct in sorted(looks.items()))
    return made, curve, "gradient steps"


def _steps(settings: Settings) -> int:
    """Gradient steps of a round."""
    return int(settings.epochs * (settings.samples // settings.minibatch))


def settings_line(chosen: Mapping[str, Setting]) -> str:
    """The chosen settings as text."""
    names = sorted(chosen, key=lambda name: (name == PLACEMENT, name))
    return ", ".join(f"{name} {chosen[name]}" for name in names)
