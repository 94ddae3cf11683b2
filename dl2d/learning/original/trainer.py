"""Training from beginning to end: imitation, then actor-critic, with the best checkpoint by validation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from dl2d.core.errors import WorkloadError
from dl2d.learning.original.actor_critic import ActorCritic
from dl2d.learning.original.imitation import Lessons, attend, imitate
from dl2d.learning.original.networks import Net, begin, draw_outputs, policy_network, value_network, weights_of
from dl2d.learning.original.player import Player
from dl2d.learning.original.replay_buffer import ReplayBuffer, Samples
from dl2d.learning.original.settings import Credit, Settings
from dl2d.learning.original.teachers import QUICK, Recorded, Teacher
from dl2d.learning.original.validation import Score, score
from dl2d.policies.checkpoint import Checkpoint, write_checkpoint
from dl2d.policies.dl2_original import Dense, Network, SharedJobs, network_of
from dl2d.simulation.clusters import Clusters
from dl2d.simulation.library import Library
from dl2d.simulation.windows import SCALARS, Windows
from dl2d.simulation.workload import Workload

#: Workloads that a teacher plays for imitation, and the share of its decisions that is kept.
_LESSON_WORKLOADS: Final = 32
_LESSONS_KEPT: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How training stands; times in seconds."""

    #: ``imitation`` or ``learning``; and which round of how many.
    phase: str
    done: int
    total: int
    score: Score
    best: float
    decisions: int
    acting_seconds: float
    learning_seconds: float


Progress = Callable[[Report], None]


@contextmanager
def _deterministic() -> Iterator[None]:
    """Equal inputs give equal weights: one thread, and no operation whose result depends on their order."""
    threads, was = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was)


def train(
    workloads: Sequence[Workload],
    validation: Sequence[Workload],
    settings: Settings,
    *,
    seed: int,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Checkpoint:
    """Train a policy and return the one that did best on the validation workloads.

    Parameters
    ----------
    workloads
        What is learned from; with a federation, learner k of K has every K-th.
    validation
        What checkpoints are chosen by: others than those that the result is judged by.
    settings
        See ``Settings``.
    seed
        Equal arguments and seeds give equal weights.
    out
        Folder of the checkpoint, written each time there is a better one; None writes none.
    progress
        Told after imitation and after each validation.
    stop
        Asked after each round whether to end early, with a last validation.

    Raises
    ------
    WorkloadError
        There are no workloads, or they differ in resources that the observations show.
    TrainingError
        See ``Diverged``, ``TooFewSamples``.
    CheckpointError
        The folder cannot be written.
    """
    with _deterministic():
        return _Training(workloads, validation, settings, seed, out, progress).run(stop or (lambda: False))


def improve(
    learner: ActorCritic,
    players: Sequence[Player],
    buffers: Sequence[ReplayBuffer],
    policy: Network,
    value: Network,
    settings: Settings,
    *,
    rngs: Sequence[np.random.Generator],
    at: float,
    alone: bool = False,
) -> tuple[float, float]:
    """One round: each player acts, then the learner takes steps along the mean of the gradients that they give.

    Parameters
    ----------
    at
        Share of the training that is over: rate and entropy fall with it.
    alone
        Only the critic learns.

    Returns
    -------
    tuple[float, float]
        Seconds of acting, of learning.
    """
    started = time.perf_counter()
    fresh = [player.collect(policy, value, settings.samples) for player in players]
    acted = time.perf_counter()
    entropy = settings.entropy + (settings.last_entropy - settings.entropy) * at
    rate = settings.rate + (settings.last_rate - settings.rate) * at
    for batches in zip(
        *(_batches(new, buffer, settings, rng) for new, buffer, rng in zip(fresh, buffers, rngs, strict=True)),
        strict=False,
    ):
        gradients = [learner.gradients(batch, entropy=entropy, policy=not alone) for batch in batches]
        learner.apply(gradients, rate=rate)
    return acted - started, time.perf_counter() - acted


def _batches(fresh: Samples, buffer: ReplayBuffer, settings: Settings, rng: np.random.Generator) -> Iterator[Samples]:
    """Minibatches of one round: from fresh samples each as often as all others, or drawn from the replay buffer.

    Every learner has as many, so that their gradients can be averaged.
    """
    size = settings.minibatch
    if settings.replay:
        buffer.add(fresh)
        for _ in range(settings.epochs * settings.samples // size):
            yield buffer.draw(size, rng)
        return
    for _ in range(settings.epochs):
        order = rng.permutation(len(fresh))
        for start in range(0, settings.samples - size + 1, size):
            yield fresh.take(order[start : start + size])


class _Training:
    def __init__(
        self,
        workloads: Sequence[Workload],
        validation: Sequence[Workload],
        settings: Settings,
        seed: int,
        out: str | os.PathLike[str] | None,
        progress: Progress | None,
    ) -> None:
        if len(workloads) < settings.federation or not validation:
            raise WorkloadError(
                "jobs",
                f"training needs {settings.federation} or more workloads to learn from, and 1 or more to validate",
            )
        self._workloads = list(workloads)
        self._settings, self._seed, self._out, self._progress = settings, seed, out, progress
        # Types and resources are numbered alike everywhere.
        everything = Library.of([*workloads, *validation])
        self._models, self._resources = everything.models, everything.resources
        self._validation = Library.of(validation, models=self._models)
        self._parts = [
            Library.of(workloads[number :: settings.federation], models=self._models)
            for number in range(settings.federation)
        ]
        if any(part.resources != self._resources for part in (*self._parts, self._validation)):
            raise WorkloadError("cluster", "workloads to learn from and to validate with differ in their resources")
        width, free = len(self._models) + SCALARS, len(self._resources)
        self._generator = torch.Generator().manual_seed(seed)
        shape: dict[str, Any] = {"jobs": settings.window, "width": width, "free": free, "hidden": settings.hidden}
        self.policy: Net = policy_network(settings.network, **shape)
        self.value: Net = value_network(settings.network, **shape, by_job=settings.credit is not Credit.SLOT)
        begin(self.policy, self._generator)
        begin(self.value, self._generator)
        self._width = width
        self._times = [0.0, 0.0, 0.0]
        self._best: tuple[float, Checkpoint] | None = None
        self._history: list[dict[str, Any]] = []
        self._decisions = 0

    def run(self, stop: Callable[[], bool]) -> Checkpoint:
        """The best checkpoint."""
        settings = self._settings
        if settings.teacher and settings.supervised_updates:
            self._imitate()
            if settings.iterations and settings.fresh_output:
                draw_outputs(self.policy, self._generator)
        learner = ActorCritic(self.policy, self.value, settings)
        players = [Player(part, settings, [self._seed, number]) for number, part in enumerate(self._parts)]
        buffers = [ReplayBuffer(settings.replay) for _ in players]
        rngs = [np.random.default_rng([self._seed, number, 1]) for number in range(len(players))]
        for number in range(settings.iterations):
            acting, learning = improve(
                learner, players, buffers, self._acting(), self._critic(), settings,
                rngs=rngs, at=number / settings.iterations, alone=number < settings.critic_iterations,
            )  # fmt: skip
            self._times[1] += acting
            self._times[2] += learning
            self._decisions = sum(player.decisions for player in players)
            ends = number + 1 == settings.iterations or stop()
            if ends or (number + 1) % settings.validate_every == 0:
                self._validate("learning", number + 1, settings.iterations)
            if ends:
                break
        if self._best is None:
            self._validate("learning", 0, 0)
        assert self._best is not None
        return self._best[1]

    def _imitate(self) -> None:
        settings, started = self._settings, time.perf_counter()
        rng = np.random.default_rng([self._seed, 2])
        lessons = lessons_of(self._workloads[:_LESSON_WORKLOADS], self._models, settings, rng=rng)
        imitate(
            self.policy, lessons, loss=settings.supervised_loss, updates=settings.supervised_updates,
            minibatch=min(settings.minibatch, len(lessons)), rate=settings.supervised_rate, rng=rng,
        )  # fmt: skip
        self._times[0] = time.perf_counter() - started
        self._validate("imitation", settings.supervised_updates, settings.supervised_updates)

    def _acting(self) -> Network:
        weights = weights_of(self.policy, "policy")
        return network_of(weights, self._described(sampled=False))

    def _critic(self) -> Network:
        weights = weights_of(self.value, "value")
        if "value.job.weight" in weights:
            return _ByJob(weights, self._width)
        return Dense(weights, "value")

    def _described(self, *, sampled: bool) -> dict[str, Any]:
        settings = self._settings
        return {
            "network": settings.network.value,
            "window": settings.window,
            "models": list(self._models),
            "resources": list(self._resources),
            "first_bundles": settings.first_bundles,
            "sampled": sampled,
            "slot_seconds": float(self._validation.slot_seconds[0]),
        }

    def _validate(self, phase: str, done: int, total: int) -> None:
        found = score(self._validation, self._settings, self._acting(), seed=self._seed)
        entry = {"phase": phase, "round": done, "greedy": found.greedy, "sampled": found.sampled,
                 "decisions": self._decisions}  # fmt: skip
        self._history.append({key: value for key, value in entry.items() if value != float("inf")})
        if self._best is None or found.best < self._best[0]:
            self._best = found.best, self._checkpoint(found)
            if self._out is not None:
                write_checkpoint(self._best[1], Path(self._out))
        if self._progress is not None:
            self._progress(
                Report(
                    phase=phase,
                    done=done,
                    total=total,
                    score=found,
                    best=self._best[0],
                    decisions=self._decisions,
                    acting_seconds=self._times[1],
                    learning_seconds=sum(self._times) - self._times[1],
                )
            )

    def _checkpoint(self, found: Score) -> Checkpoint:
        return Checkpoint(
            policy="dl2-original",
            weights={**weights_of(self.policy, "policy"), **weights_of(self.value, "value")},
            settings=self._described(sampled=found.sampled < found.greedy),
            training={
                "settings": asdict(self._settings),
                "seed": self._seed,
                "workloads": len(self._workloads),
                "validation_workloads": len(self._validation.ids),
                "history": list(self._history),
            },
        )


class _ByJob:
    """The value network that all jobs share, for the player: values of jobs alone."""

    def __init__(self, weights: dict[str, NDArray[Any]], width: int) -> None:
        # The void layer and the outputs of the other two actions are not there: fill up with zeros.
        job, bias = weights["value.job.weight"], weights["value.job.bias"]
        padded = {
            **weights,
            "value.job.weight": np.concatenate((job, np.zeros((2, job.shape[1]), dtype=job.dtype))),
            "value.job.bias": np.concatenate((bias, np.zeros(2, dtype=bias.dtype))),
            "value.void.weight": np.zeros((1, job.shape[1]), dtype=job.dtype),
            "value.void.bias": np.zeros(1, dtype=bias.dtype),
        }
        self._network = SharedJobs(padded, "value", width)

    def __call__(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._network(observations)[:, :-1:3]


def lessons_of(
    workloads: Sequence[Workload], models: Sequence[str], settings: Settings, *, rng: np.random.Generator
) -> Lessons:
    """What the settings' teacher does with each of these workloads."""
    library = Library.of(workloads, models=models)
    clusters = Clusters(library, len(workloads))
    everywhere = np.arange(len(workloads))
    clusters.reset(everywhere, everywhere, [np.random.default_rng(0) for _ in workloads])
    windows = Windows(clusters, settings.window, first_bundles=settings.first_bundles)
    windows.begin(everywhere)
    windows.refresh()
    name = settings.teacher
    teacher: Teacher = QUICK[name] if name in QUICK else Recorded(name, workloads, first_bundles=settings.first_bundles)
    return attend(windows, teacher, kept=_LESSONS_KEPT, rng=rng, most_slots=settings.most_slots)
