"""Training of policy ``dl2``: explore until speeds are known, then search for weights, and keep the best.

Everything follows from the settings, the workloads and the seed; no clock decides anything that is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from dl2d.core.array_types import Floats, Ints
from dl2d.core.errors import CheckpointError
from dl2d.core.input_validation import Flag, Items, Number, Record, Whole
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds
from dl2d.core.progress_callback import Count, uncounted
from dl2d.learning import interrupted_training
from dl2d.learning.dl2.evolution_strategy import Search, Step, advance
from dl2d.learning.dl2.rollout import Measurements, RolloutWorkloads, measuring, rollout
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.common.training_input_ranges import INPUT_RANGES, training_ranges
from dl2d.policies.dl2.checkpoint_contents import NAME, as_arrays, from_arrays
from dl2d.policies.dl2.pareto_frontier import FrontierArrays
from dl2d.policies.dl2.scoring import FEATURES, initial_weights
from dl2d.simulation.workload.workload_file import Workload
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.training_data import by_kind

_STATE = "state.npz"
#: What follows the seed in the seeds of generators.
_EXPLORING, _SEARCHING, _BEGINNING = range(3)


Share = Annotated[float, Number(1.0, above=0.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings(Record):
    """Settings of a training."""

    seed: Annotated[int, Whole(0, 2**63 - 1)] = 0
    #: Iterations of the search; every so many, the validation workloads are run and the throughput model is updated.
    iterations: Annotated[int, Whole(0, 1_000_000)] = interrupted_training.DEFAULT_ITERATIONS
    every: Annotated[int, Whole(1, 1_000_000)] = 10
    #: Hidden units of the scorer; 0: it is linear.
    hidden: Annotated[int, Whole(0, 4096)] = 0
    #: Each workload is run with these shares of its nodes.
    parts: Annotated[tuple[Share, ...], Items(100)] = (
        1.0,
        1 / 2,
        1 / 4,
        1 / 6,
        1 / 8,
    )
    #: Workloads that the members of an iteration are compared on.
    batch: Annotated[int, Whole(1, 10_000)] = 10
    #: Rounds of exploration, workloads in each, and the optimism in them, in standard deviations; and the optimism of
    #: the trained policy.
    rounds: Annotated[int, Whole(0, 10_000)] = 12
    explored: Annotated[int, Whole(1, 10_000)] = 40
    optimism: Annotated[float, Number(1e3)] = 2.0
    deciding_optimism: Annotated[float, Number(1e3)] = 0.0
    #: Whether speeds are measured during the search, too.
    measuring: Flag = True
    step: Step = field(default_factory=Step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """One look at the validation workloads: mean completion times in slots, by part of the nodes."""

    iteration: int
    jct: tuple[float, ...]
    #: Mean of the logarithms of all of them: what is to be least.
    score: float
    #: The members' mean on the training workloads of the last iteration; None before the first.
    training: float | None
    sizes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """All that training needs to go on."""

    search: Search
    best: Floats
    looks: tuple[ValidationResult, ...]
    measured: tuple[MeasuredSpeeds, ...]

    @property
    def best_look(self) -> ValidationResult:
        """The one whose weights are kept."""
        return min(self.looks, key=lambda look: (look.score, look.iteration))


def shrunk(workload: Workload, part: float) -> Workload:
    """With a part of its nodes: at least one of each group, and room for the minimum size of its largest job."""
    while True:
        groups = tuple(replace(group, count=max(1, round(group.count * part))) for group in workload.cluster)
        made = replace(workload, cluster=groups)
        # As on a real cluster all jobs can start, one after the other.
        capacity = made.capacity
        if part >= 1.0 or all(
            (job.worker * job.least_workers + job.ps * job.min_ps).fits_in(capacity) for job in workload.jobs
        ):
            return made
        part = min(1.0, part * 1.25)


class Trainer:
    """Trains on some workloads and looks at others.

    Parameters
    ----------
    training, validation
        Workloads; each is played with all ``parts`` of its nodes.
    settings
        See there.
    """

    def __init__(
        self, training: Sequence[Workload], validation: Sequence[Workload], settings: TrainingSettings
    ) -> None:
        self.settings = settings
        trained_on = [shrunk(one, part) for part in settings.parts for one in training]
        self._compiled = RolloutWorkloads(trained_on)
        self._trained_on = len(training)
        self._input_ranges = training_ranges((len(one.jobs), len(one.nodes())) for one in trained_on)
        self.validation = [[shrunk(one, part) for one in validation] for part in settings.parts]
        self._compiled_validation = RolloutWorkloads([one for list_ in self.validation for one in list_])
        self._slot_seconds = float(np.median([one.slot_seconds for one in training]))

    def explore(self, progress: Count = uncounted) -> State:
        """Measure, with initial weights, until what is there to be known is known; then a first look."""
        settings, measurements = self.settings, Measurements()
        weights = initial_weights(settings.hidden, np.random.default_rng([settings.seed, _BEGINNING]))
        for number in range(settings.rounds):
            progress(number, settings.rounds)
            rng = np.random.default_rng([settings.seed, _EXPLORING, number])
            frontiers = self._compiled.frontiers(GaussianProcess(by_kind(measurements.speeds())), settings.optimism)
            workloads = self._draw(settings.explored, rng)
            seen = measuring(self._compiled, measurements)
            rollout(self._compiled, frontiers, workloads, weights[None], seen=seen)
        state = State(search=Search.at(weights), best=weights, looks=(), measured=measurements.speeds())
        return self._validate(state, None)

    def start(self, weights: Floats, measured: Sequence[MeasuredSpeeds]) -> State:
        """Begin with weights and speeds that are there already; then a first look."""
        return self._validate(State(search=Search.at(weights), best=weights, looks=(), measured=tuple(measured)), None)

    def search(self, state: State) -> Iterator[State]:
        """Go on from a state; gives the state every so many iterations, and at the end."""
        settings = self.settings
        while state.search.iteration < settings.iterations:
            measurements = Measurements(state.measured)
            frontiers = self._compiled.frontiers(GaussianProcess(by_kind(state.measured)), settings.deciding_optimism)
            search, costs = state.search, np.zeros(1)
            last = min(search.iteration - search.iteration % settings.every + settings.every, settings.iterations)
            while search.iteration < last:
                rng = np.random.default_rng([settings.seed, _SEARCHING, search.iteration])
                search, costs = self._iterate(search, frontiers, rng, measurements)
            measured = measurements.speeds() if settings.measuring else state.measured
            state = replace(state, search=search, measured=measured)
            state = self._validate(state, float(np.exp(costs.mean())))
            yield state

    def checkpoint(self, state: State, record: Mapping[str, Any]) -> Checkpoint:
        """What ``dl2`` decides with: the best weights, and what was measured."""
        return Checkpoint(
            policy=NAME,
            weights={"scorer": state.best, **as_arrays(state.measured)[0]},
            settings={
                "design": NAME,
                "features": list(FEATURES),
                "hidden": self.settings.hidden,
                "slot_seconds": self._slot_seconds,
                "optimism": self.settings.deciding_optimism,
                "resize_seconds": 0.0,
                "kinds": as_arrays(state.measured)[1],
            },
            training={**record, INPUT_RANGES: self._input_ranges},
        )

    def _iterate(
        self, search: Search, frontiers: FrontierArrays, rng: np.random.Generator, measurements: Measurements
    ) -> tuple[Search, Floats]:
        workloads = self._draw(self.settings.batch, rng)

        def cost(members: Floats) -> Floats:
            count = len(members)
            jct = rollout(
                self._compiled, frontiers, np.tile(workloads, count), np.repeat(members, len(workloads), axis=0),
                seen=measuring(self._compiled, measurements) if self.settings.measuring else None,
            )  # fmt: skip
            logs: Floats = np.log(jct).reshape(count, -1).mean(axis=1)
            return logs

        return advance(search, self.settings.step, rng, cost)

    def _draw(self, count: int, rng: np.random.Generator) -> Ints:
        """Workloads with all parts of the nodes in turn, beginning anywhere."""
        parts = (np.arange(count) + rng.integers(len(self.settings.parts))) % len(self.settings.parts)
        return parts * self._trained_on + rng.integers(self._trained_on, size=count)

    def _validate(self, state: State, training: float | None) -> State:
        frontiers = self._compiled_validation.frontiers(
            GaussianProcess(by_kind(state.measured)), self.settings.deciding_optimism
        )
        count = len(self.validation[0])
        every = np.arange(count * len(self.validation))
        jct = rollout(self._compiled_validation, frontiers, every, state.search.weights[None])
        look = ValidationResult(
            iteration=state.search.iteration,
            jct=tuple(jct.reshape(-1, count).mean(axis=1).tolist()),
            score=float(np.log(jct).mean()),
            training=training,
            sizes=sum(len(speeds.points) for speeds in state.measured),
        )
        better = not state.looks or look.score < state.best_look.score
        return replace(state, looks=(*state.looks, look), best=state.search.weights if better else state.best)


def save_state(state: State, settings: TrainingSettings, inputs: str, folder: Path) -> None:
    """Write what is needed to go on, at once or not at all.

    Raises
    ------
    CheckpointError
        The folder cannot be written.
    """
    arrays, kinds = as_arrays(state.measured)
    search = state.search
    arrays |= {"weights": search.weights, "mean": search.mean, "square": search.square, "best": state.best}
    words = {
        "settings": _plain(settings),
        "inputs": inputs,
        "iteration": search.iteration,
        "looks": [asdict(look) for look in state.looks],
        "kinds": kinds,
    }
    interrupted_training.save_state(interrupted_training.State(words=words, arrays=arrays), folder / _STATE)


def load_state(settings: TrainingSettings, inputs: str, folder: Path) -> State:
    """Read what ``save_state`` wrote.

    Raises
    ------
    CheckpointError
        There is none, it is damaged, or it is of other settings (a number of iterations aside) or other workloads.
    """
    found = interrupted_training.load_state(folder / _STATE)
    words, arrays = found.words, dict(found.arrays)
    try:
        search = Search(
            weights=arrays.pop("weights"), mean=arrays.pop("mean"), square=arrays.pop("square"),
            iteration=words["iteration"],
        )  # fmt: skip
        looks = tuple(ValidationResult(**{**look, "jct": tuple(look["jct"])}) for look in words["looks"])
        best, measured = arrays.pop("best"), from_arrays(arrays, words["kinds"])
        given, saved = ({**each, "iterations": 0} for each in (_plain(settings), words["settings"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / _STATE}: cannot be read: {error}") from error
    if different := [key for key in given if given[key] != saved.get(key)]:
        raise CheckpointError(
            f"{folder}: holds a training with other settings ({', '.join(different)}): give the same ones, or leave "
            "out --resume"
        )
    if words["inputs"] != inputs:
        raise CheckpointError(
            f"{folder}: holds a training with other workloads: give the same ones, or leave out --resume"
        )
    return State(search=search, best=best, looks=looks, measured=measured)


def _plain(settings: TrainingSettings) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return plain
