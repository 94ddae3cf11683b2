"""Training from beginning to end: imitation, then actor-critic, with the best checkpoint by validation."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from dl2d.core.errors import CheckpointError, WorkloadError
from dl2d.learning.dl2_paper.actor_critic import ActorCritic
from dl2d.learning.dl2_paper.demonstrations import taught
from dl2d.learning.dl2_paper.imitation import imitate
from dl2d.learning.dl2_paper.networks import (
    Net,
    adopt,
    begin,
    described,
    deterministic,
    draw_outputs,
    even_out,
    load_weights,
    policy_network,
    value_network,
    weights_of,
)
from dl2d.learning.dl2_paper.replay_buffer import ReplayBuffer, Samples
from dl2d.learning.dl2_paper.rollout import Player
from dl2d.learning.dl2_paper.settings import Credit, Settings
from dl2d.learning.dl2_paper.teachers import SERVE_WHOLE
from dl2d.learning.dl2_paper.validation import Score, score
from dl2d.learning.state_file import State, load_state, save_state
from dl2d.policies.checkpoint import Checkpoint, write_checkpoint
from dl2d.policies.dl2_paper.observation import Sight
from dl2d.policies.dl2_paper.policy import Dense, Network, SharedJobs, network_of
from dl2d.simulation.vectorized.library import Library
from dl2d.simulation.workload.format import Workload

#: Workloads that a teacher plays for imitation.
_LESSON_WORKLOADS: Final = 32
#: Observations that hidden units are evened out by.
_LOOKS: Final = 1024


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
#: Told ``imitation`` or ``learning``, and which update or round of how many is over.
Told = Callable[[str, int, int], None]


def train(
    workloads: Sequence[Workload],
    validation: Sequence[Workload],
    settings: Settings,
    *,
    seed: int,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    told: Told | None = None,
    stop: Callable[[], bool] | None = None,
    start: Checkpoint | None = None,
    state: Path | None = None,
    resume: bool = False,
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
    told
        Told how far it is in between.
    stop
        Asked after each round whether to end early, with a last validation.
    start
        What to begin with instead of imitation: its body, and with ``fresh_output`` new output layers. Where it was
        trained on other types, those are taken over that both have, and others begin as their mean.
    state
        File in which all that is needed to go on is kept, after imitation and after each validation.
    resume
        Go on with the state: the result is that of a training that was never interrupted.

    Raises
    ------
    WorkloadError
        There are no workloads, or they differ in resources that the observations show.
    TrainingError
        See ``Diverged``, ``TooFewSamples``.
    CheckpointError
        The folder cannot be written, the start is of another network, or there is no such state.
    """
    with deterministic():
        training = _Training(workloads, validation, settings, seed, out, progress, told, start, state)
        if resume:
            if state is None:
                raise CheckpointError("resume: no file of a state is given")
            training.restore(load_state(state))
        return training.run(stop or (lambda: False))


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
        told: Told | None,
        start: Checkpoint | None,
        state: Path | None,
    ) -> None:
        if len(workloads) < settings.federation or not validation:
            raise WorkloadError(
                "jobs",
                f"training needs {settings.federation} or more workloads to learn from, and 1 or more to validate",
            )
        self._workloads = list(workloads)
        self._settings, self._seed, self._out, self._progress = settings, seed, out, progress
        self._told = told or (lambda _phase, _done, _total: None)
        self._start, self._state = start, state
        self._inputs = _digest([repr((list(workloads), list(validation))), "" if start is None else start.digest])
        # Types and resources are numbered alike everywhere.
        everything = Library.of([*workloads, *validation])
        self._validation = Library.of(validation, models=everything.models)
        self._parts = [
            Library.of(workloads[number :: settings.federation], models=everything.models)
            for number in range(settings.federation)
        ]
        if any(part.resources != everything.resources for part in (*self._parts, self._validation)):
            raise WorkloadError("cluster", "workloads to learn from and to validate with differ in their resources")
        self._sight = Sight(
            window=settings.window, models=everything.models, resources=everything.resources,
            first_bundles=settings.first_bundles, slot_seconds=float(self._validation.slot_seconds[0]),
            extras=settings.extras,
        )  # fmt: skip
        self._generator = torch.Generator().manual_seed(seed)
        shape: dict[str, Any] = {
            "jobs": settings.window, "width": self._sight.width, "free": len(everything.resources),
            "hidden": settings.hidden,
        }  # fmt: skip
        self.policy: Net = policy_network(settings.network, **shape)
        self.value: Net = value_network(settings.network, **shape, by_job=settings.credit is not Credit.SLOT)
        begin(self.policy, self._generator, self._sight)
        begin(self.value, self._generator, self._sight)
        self._learner = ActorCritic(self.policy, self.value, settings)
        self._buffers = [ReplayBuffer(settings.replay) for _ in self._parts]
        self._times = [0.0, 0.0, 0.0]
        self._best: tuple[float, Checkpoint] | None = None
        self._history: list[dict[str, Any]] = []
        self._decisions = 0
        self._round = 0
        self._begun = False

    def run(self, stop: Callable[[], bool]) -> Checkpoint:
        """The best checkpoint."""
        settings = self._settings
        if not self._begun:
            self._begin()
        while self._round < settings.iterations:
            # Each stretch between two validations has players and generators of its own, so that a state need not hold
            # those in the midst of a slot.
            stretch = self._round // settings.validate_every
            players = [Player(part, settings, [self._seed, k, stretch]) for k, part in enumerate(self._parts)]
            rngs = [np.random.default_rng([self._seed, k, stretch, 1]) for k in range(len(players))]
            before = self._decisions
            ends = False
            while self._round < settings.iterations and self._round // settings.validate_every == stretch and not ends:
                acting, learning = improve(
                    self._learner, players, self._buffers, self._acting(), self._critic(), settings, rngs=rngs,
                    at=self._round / settings.iterations, alone=self._round < settings.critic_iterations,
                )  # fmt: skip
                self._times[1] += acting
                self._times[2] += learning
                self._decisions = before + sum(player.decisions for player in players)
                self._round += 1
                self._told("learning", self._round, settings.iterations)
                ends = stop()
            self._validate("learning", self._round, settings.iterations, self._sight)
            if ends and self._round % settings.validate_every and self._round < settings.iterations:
                break
            self._save()
            if ends:
                break
        if self._best is None:
            self._validate("learning", 0, 0, self._sight)
        assert self._best is not None
        return self._best[1]

    def restore(self, state: State) -> None:
        """Go on from a state.

        Raises
        ------
        CheckpointError
            It is of another training.
        """
        words, arrays = state.words, state.arrays
        given, saved = _plain(asdict(self._settings)), words.get("settings") or {}
        if different := sorted(key for key in given if given[key] != saved.get(key)):
            raise CheckpointError(f"resume: was begun with other settings: {', '.join(different)}")
        if words.get("inputs") != self._inputs or words.get("seed") != self._seed:
            raise CheckpointError("resume: was begun with other workloads, another start or another seed")
        try:
            load_weights(self.policy, arrays, "policy")
            load_weights(self.value, arrays, "value")
            self._learner.restore({name: arrays[name] for name in arrays if name.startswith("adam.")})
            for number, buffer in enumerate(self._buffers):
                buffer.restore(arrays, f"replay.{number}")
            if words["best"] is not None:
                weights = {name.removeprefix("best."): arrays[name] for name in arrays if name.startswith("best.")}
                made = Checkpoint(
                    policy="dl2-original", weights=weights, settings=words["best_settings"],
                    training=words["best_training"],
                )  # fmt: skip
                self._best = float(words["best"]), made
            self._round, self._decisions = int(words["round"]), int(words["decisions"])
            self._history, self._times = list(words["history"]), list(words["times"])
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"resume: the state is damaged: {error!r}") from None
        self._begun = True

    def _save(self) -> None:
        if self._state is None:
            return
        arrays: dict[str, NDArray[Any]] = {
            **weights_of(self.policy, "policy"), **weights_of(self.value, "value"), **self._learner.state(),
        }  # fmt: skip
        for number, buffer in enumerate(self._buffers):
            arrays |= buffer.state(f"replay.{number}")
        best = None if self._best is None else self._best[1]
        if best is not None:
            arrays |= {f"best.{name}": array for name, array in best.weights.items()}
        words = {
            "settings": _plain(asdict(self._settings)), "inputs": self._inputs, "seed": self._seed,
            "round": self._round, "decisions": self._decisions, "history": self._history, "times": self._times,
            "best": None if self._best is None else self._best[0],
            "best_settings": None if best is None else dict(best.settings),
            "best_training": None if best is None else dict(best.training),
        }  # fmt: skip
        save_state(State(words=words, arrays=arrays), self._state)

    def _begin(self) -> None:
        """Imitation, or what is begun with."""
        settings, start = self._settings, self._start
        if start is not None:
            sight = self._as_shown(Sight.of(start.settings))
            net = self._network(sight)
            adopt(net, start, sight)
            self._validate("start", 0, 0, sight, net)
        elif settings.teacher and settings.supervised_updates:
            start = self._imitate()
        if start is not None:
            adopt(self.policy, start, self._sight)
            if settings.iterations and settings.fresh_output:
                player = Player(self._parts[0], settings, [self._seed, 3])
                looks = player.collect(self._acting(), self._critic(), _LOOKS).observations
                even_out(self.policy, torch.from_numpy(looks), self._generator)
                draw_outputs(self.policy, self._generator)
            self._save()
        self._begun = True

    def _imitate(self) -> Checkpoint:
        settings, started = self._settings, time.perf_counter()
        rng = np.random.default_rng([self._seed, 2])
        sight = replace(
            self._sight, extras=settings.supervised_extras,
            first_bundles=settings.first_bundles and settings.teacher not in SERVE_WHOLE,
        )  # fmt: skip
        net = self._network(sight)
        begin(net, self._generator, sight)
        lessons = taught(settings.teacher, self._workloads[:_LESSON_WORKLOADS], sight, labels=settings.labels, rng=rng)
        updates = settings.supervised_updates
        imitate(
            net, lessons, loss=settings.supervised_loss, updates=updates,
            minibatch=min(settings.minibatch, len(lessons)), rate=settings.supervised_rate, rng=rng,
            told=lambda done, _loss: self._told("imitation", done, updates),
        )  # fmt: skip
        self._times[0] = time.perf_counter() - started
        found = self._validate("imitation", updates, updates, sight, net)
        return self._checkpoint(found, sight, net)

    def _as_shown(self, sight: Sight) -> Sight:
        """A sight of a checkpoint, on the types and resources of these workloads."""
        return replace(
            self._sight, window=sight.window, extras=sight.extras, first_bundles=sight.first_bundles
        )  # fmt: skip

    def _network(self, sight: Sight) -> Net:
        return policy_network(
            self._settings.network, jobs=sight.window, width=sight.width, free=len(sight.resources),
            hidden=self._settings.hidden,
        )  # fmt: skip

    def _acting(self) -> Network:
        weights = weights_of(self.policy, "policy")
        return network_of(weights, described(self._sight, self._settings.network, sampled=False))

    def _critic(self) -> Network:
        weights = weights_of(self.value, "value")
        if "value.job.weight" in weights:
            return _ByJob(weights, self._sight.width)
        return Dense(weights, "value")

    def _validate(self, phase: str, done: int, total: int, sight: Sight, net: Net | None = None) -> Score:
        """Of the policy, or of another network that sees something else."""
        net = self.policy if net is None else net
        settings = replace(
            self._settings, first_bundles=sight.first_bundles, extras=sight.extras, window=sight.window
        )  # fmt: skip
        acting = network_of(weights_of(net, "policy"), described(sight, self._settings.network, sampled=False))
        found = score(self._validation, settings, acting, seed=self._seed)
        entry = {"phase": phase, "round": done, "greedy": found.greedy, "sampled": found.sampled,
                 "decisions": self._decisions}  # fmt: skip
        self._history.append({key: value for key, value in entry.items() if value != float("inf")})
        if self._best is None or found.best < self._best[0]:
            self._best = found.best, self._checkpoint(found, sight, net)
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
        return found

    def _checkpoint(self, found: Score, sight: Sight, net: Net) -> Checkpoint:
        weights = weights_of(net, "policy")
        return Checkpoint(
            policy="dl2-original",
            # What the critic sees is what is learned with.
            weights={**weights, **weights_of(self.value, "value")} if net is self.policy else weights,
            settings=described(sight, self._settings.network, sampled=found.sampled < found.greedy),
            training={
                "settings": _plain(asdict(self._settings)),
                "seed": self._seed,
                "workloads": len(self._workloads),
                "validation_workloads": len(self._validation.ids),
                "history": list(self._history),
            },
        )


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


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
