"""Training of the paper's policy: imitation of a teacher, then rounds of actor-critic learning.

``train`` has the whole course; what follows it are its parts, in the order in which it uses them. The checkpoint that
did best on the validation workloads is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dl2d.core.errors import CheckpointError, WorkloadError
from dl2d.core.json_codec import as_plain
from dl2d.learning.dl2_paper.actor_critic import ActorCritic
from dl2d.learning.dl2_paper.demonstrations import demonstrations_of
from dl2d.learning.dl2_paper.imitation_learning import fit
from dl2d.learning.dl2_paper.networks import (
    Net,
    adopt,
    begin,
    described,
    deterministic,
    draw_outputs,
    even_out,
    for_acting,
    load_weights,
    policy_network,
    value_network,
    weights_of,
)
from dl2d.learning.dl2_paper.rollout import SampleCollector, Score, score
from dl2d.learning.dl2_paper.samples import ReplayBuffer, Samples
from dl2d.learning.dl2_paper.settings import SERVE_WHOLE, Credit, NetworkKind, Settings
from dl2d.learning.interrupted_training import State, load_state, save_state
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.common.training_input_ranges import INPUT_RANGES, training_ranges
from dl2d.policies.dl2_paper.observation import ObservationEncoding
from dl2d.simulation.vectorized.workload_arrays import Library
from dl2d.simulation.workload.workload_file import Workload

#: Workloads that a teacher is imitated on.
_TEACHER_WORKLOADS = 32
#: Observations that the scales of hidden units are measured on.
_SCALE_SAMPLES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Progress of a training at a validation."""

    #: ``start``, ``imitation`` or ``learning``; and which round of how many.
    phase: str
    done: int
    total: int
    score: Score
    best: float
    decisions: int


OnValidation = Callable[[Report], None]
#: Called with ``imitation`` or ``learning``, and which update or round of how many is over.
OnStep = Callable[[str, int, int], None]


def train(
    workloads: Sequence[Workload],
    validation: Sequence[Workload],
    settings: Settings,
    *,
    seed: int,
    on_validation: OnValidation | None = None,
    on_step: OnStep | None = None,
    should_stop: Callable[[], bool] | None = None,
    start: Checkpoint | None = None,
    recorded: Callable[[ObservationEncoding], Samples | None] | None = None,
    state: Path | None = None,
    resume: bool = False,
) -> Checkpoint:
    """Train a policy and return the one that did best on the validation workloads.

    Parameters
    ----------
    workloads
        Training workloads; with a federation, learner k of K has every K-th.
    validation
        Workloads that the best checkpoint is chosen by: others than those that the result is tested on.
    settings
        See ``Settings``.
    seed
        Equal arguments and seeds give equal weights.
    on_validation, on_step
        Called after each validation, and after each update of imitation and each round.
    should_stop
        Asked after each round whether to end early, with a last validation.
    start
        Begin with this checkpoint instead of imitation: its body, and with ``fresh_output`` new output layers. Where it
        was trained on other types, those that both have are kept, and others begin as their mean.
    recorded
        Gives samples of a real cluster, as a network with this encoding gets them. They count as another learner, which
        never acts: each update also takes a minibatch of them, all equally likely, as from a replay buffer.
    state
        File in which all that is needed to continue is kept, after imitation and after each validation.
    resume
        Continue with the state: the result is that of a training that was never interrupted.

    Raises
    ------
    WorkloadError
        There are no workloads, or they differ in resources that the observations show.
    TrainingError
        See ``Diverged``, ``TooFewSamples``.
    CheckpointError
        The state cannot be written, the start is of another network, or there is no such state.
    """
    on_step = on_step or (lambda _phase, _done, _total: None)
    with deterministic():
        training = _Training(workloads, validation, settings, seed, on_validation, state, start)
        inputs = [repr((list(workloads), list(validation))), "" if start is None else start.digest]
        training.inputs = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        # 1. A policy to begin with: of a state, a checkpoint or a teacher; or weights that were drawn.
        if resume:
            if state is None:
                raise CheckpointError("resume: no state file is given")
            training.restore(load_state(state))
        elif start is not None:
            training.begin(training.adopted(start))
        elif settings.teacher and settings.supervised_updates:
            training.begin(training.imitated(workloads[:_TEACHER_WORKLOADS], on_step))
        live = None if recorded is None else recorded(training.encoding)
        # 2. Rounds of acting and learning. Those between two validations have collectors and generators of their own,
        #    so that a state need not hold clusters in the midst of a slot.
        stopped = False
        while training.round < settings.iterations and not stopped:
            stretch = training.round // settings.validate_every
            collectors = [SampleCollector(part, settings, [seed, k, stretch]) for k, part in enumerate(training.parts)]
            rngs = [np.random.default_rng([seed, k, stretch, 1]) for k in range(len(collectors))]
            before, end = training.decisions, min((stretch + 1) * settings.validate_every, settings.iterations)
            while training.round < end and not stopped:
                improve(
                    training.learner, collectors, training.buffers, settings, rngs=rngs,
                    at=training.round / settings.iterations, alone=training.round < settings.critic_iterations,
                    recorded=live,
                )  # fmt: skip
                training.decisions = before + sum(collector.decisions for collector in collectors)
                training.round += 1
                on_step("learning", training.round, settings.iterations)
                stopped = should_stop is not None and should_stop()
            # 3. Validation; the best checkpoint is kept.
            training.validate("learning", training.round, settings.iterations)
            if training.round == end:
                training.save()
        if training.best is None:
            training.validate("learning", 0, 0)
        assert training.best is not None
        return training.best[1]


def improve(
    learner: ActorCritic,
    collectors: Sequence[SampleCollector],
    buffers: Sequence[ReplayBuffer],
    settings: Settings,
    *,
    rngs: Sequence[np.random.Generator],
    at: float,
    alone: bool = False,
    recorded: Samples | None = None,
) -> None:
    """One round: each collector acts, then the learner takes steps along the mean of the gradients of all.

    Parameters
    ----------
    at
        Share of the training that is over: rate and entropy fall with it.
    alone
        Only the critic learns.
    recorded
        See ``train``.
    """
    policy, value = for_acting(learner.policy), for_acting(learner.value, "value")
    fresh = [collector.collect(policy, value, settings.samples) for collector in collectors]
    entropy = settings.entropy + (settings.last_entropy - settings.entropy) * at
    rate = settings.rate + (settings.last_rate - settings.rate) * at
    for batches in zip(
        *(_batches(new, buffer, settings, rng) for new, buffer, rng in zip(fresh, buffers, rngs, strict=True)),
        strict=False,
    ):
        minibatches = list(batches)
        if recorded is not None:
            size = min(settings.minibatch, len(recorded))
            minibatches.append(recorded.take(rngs[0].choice(len(recorded), size, replace=False)))
        gradients = [learner.gradients(minibatch, entropy=entropy, policy=not alone) for minibatch in minibatches]
        learner.apply(gradients, rate=rate)


def _batches(fresh: Samples, buffer: ReplayBuffer, settings: Settings, rng: np.random.Generator) -> Iterator[Samples]:
    """Minibatches of one round: all new samples in a drawn order, in each epoch; or draws from the replay buffer.

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
    """The state of a training: networks, optimisers, replay buffers, the best checkpoint and the history."""

    def __init__(
        self,
        workloads: Sequence[Workload],
        validation: Sequence[Workload],
        settings: Settings,
        seed: int,
        on_validation: OnValidation | None,
        state: Path | None,
        start: Checkpoint | None,
    ) -> None:
        if len(workloads) < settings.federation or not validation:
            raise WorkloadError(
                "jobs",
                f"training needs {settings.federation} or more workloads to learn from, and 1 or more to validate",
            )
        self._settings, self._seed, self._on_validation = settings, seed, on_validation
        self._state, self._workloads = state, len(workloads)
        self._input_ranges = training_ranges((len(one.jobs), len(one.nodes())) for one in workloads)
        #: Digest of what the training was begun with.
        self.inputs = ""
        # Types and resources are numbered alike everywhere.
        everything = Library.of([*workloads, *validation])
        # A start that sees the sizes that users ask for goes on to see them.
        usual_sizes = () if start is None else _encoding_of(start).usual_sizes_of(everything.models)
        compiled = partial(
            Library.of, models=everything.models, resources=everything.resources, usual_sizes=usual_sizes
        )
        self._validation = compiled(validation)
        self.parts = [compiled(workloads[number :: settings.federation]) for number in range(settings.federation)]
        #: How the network that learns sees a snapshot.
        self.encoding = ObservationEncoding(
            window=settings.window, models=everything.models, resources=everything.resources,
            first_bundles=settings.first_bundles, slot_seconds=float(self._validation.slot_seconds[0]),
            extras=settings.extras, usual_sizes=usual_sizes, remaining_times=settings.remaining_times,
        )  # fmt: skip
        self._generator = torch.Generator().manual_seed(seed)
        layout, by_job = self.encoding.layout, settings.credit is not Credit.SLOT
        policy = policy_network(settings.network, layout, settings.hidden)
        value = value_network(settings.network, layout, settings.hidden, by_job=by_job)
        begin(policy, self._generator, self.encoding)
        begin(value, self._generator, self.encoding)
        self.learner = ActorCritic(policy, value, settings)
        self.buffers = [ReplayBuffer(settings.replay) for _ in self.parts]
        #: Rounds and decisions so far.
        self.round = self.decisions = 0
        #: The best checkpoint, with its score.
        self.best: tuple[float, Checkpoint] | None = None
        self._history: list[dict[str, Any]] = []

    def adopted(self, start: Checkpoint) -> Checkpoint:
        """A checkpoint to begin with, after its validation with the types and resources of these workloads."""
        own = _encoding_of(start)
        encoding = replace(
            self.encoding, window=own.window, extras=own.extras, remaining_times=own.remaining_times,
            first_bundles=own.first_bundles, last_bundles=own.last_bundles, fixed_sizes=own.fixed_sizes,
        )  # fmt: skip
        network = policy_network(self._settings.network, encoding.layout, self._settings.hidden)
        adopt(network, start, encoding)
        self.validate("start", 0, 0, encoding, network)
        return start

    def imitated(self, workloads: Sequence[Workload], on_step: OnStep) -> Checkpoint:
        """A policy that has learned from the settings' teacher."""
        settings = self._settings
        rng = np.random.default_rng([self._seed, 2])
        encoding = replace(
            self.encoding, extras=settings.supervised_extras,
            first_bundles=settings.first_bundles and settings.teacher not in SERVE_WHOLE,
        )  # fmt: skip
        network = policy_network(settings.network, encoding.layout, settings.hidden)
        begin(network, self._generator, encoding)
        shown = demonstrations_of(settings.teacher, workloads, encoding, labels=settings.labels, rng=rng)
        fit(network, shown, settings, rng, lambda done, total, _: on_step("imitation", done, total))
        updates = settings.supervised_updates
        return self._checkpoint(self.validate("imitation", updates, updates, encoding, network), encoding, network)

    def begin(self, start: Checkpoint) -> None:
        """Take over the body of a checkpoint, with new output layers where the settings say so."""
        settings, policy = self._settings, self.learner.policy
        adopt(policy, start, self.encoding)
        if settings.iterations and settings.fresh_output:
            collector = SampleCollector(self.parts[0], settings, [self._seed, 3])
            acting, critic = for_acting(policy), for_acting(self.learner.value, "value")
            observations = collector.collect(acting, critic, _SCALE_SAMPLES).observations
            even_out(policy, torch.from_numpy(observations), self._generator)
            draw_outputs(policy, self._generator)
        self.save()

    def validate(
        self, phase: str, done: int, total: int, encoding: ObservationEncoding | None = None, net: Net | None = None
    ) -> Score:
        """Score the policy, or another network with an encoding of its own; keep its checkpoint if it is the best."""
        net, encoding = net or self.learner.policy, encoding or self.encoding
        most_slots = self._settings.most_slots
        found = score(self._validation, encoding, for_acting(net), most_slots=most_slots, seed=self._seed)
        entry = {"phase": phase, "round": done, "greedy": found.greedy, "sampled": found.sampled,
                 "decisions": self.decisions}  # fmt: skip
        self._history.append({key: value for key, value in entry.items() if value != float("inf")})
        if self.best is None or found.best < self.best[0]:
            self.best = found.best, self._checkpoint(found, encoding, net)
        if self._on_validation is not None:
            self._on_validation(
                Report(phase=phase, done=done, total=total, score=found, best=self.best[0], decisions=self.decisions)
            )
        return found

    def _checkpoint(self, found: Score, encoding: ObservationEncoding, net: Net) -> Checkpoint:
        weights = weights_of(net, "policy")
        if net is self.learner.policy:  # the critic has learned with this network alone
            weights |= weights_of(self.learner.value, "value")
        return Checkpoint(
            policy="dl2-original",
            weights=weights,
            settings=described(encoding, self._settings.network, sampled=found.sampled < found.greedy),
            training={
                "settings": as_plain(self._settings),
                "seed": self._seed,
                "workloads": self._workloads,
                "validation_workloads": len(self._validation.ids),
                INPUT_RANGES: self._input_ranges,
                "history": list(self._history),
            },
        )

    def save(self) -> None:
        """Write the state, where it has a file."""
        if self._state is None:
            return
        policy, value = self.learner.policy, self.learner.value
        arrays: dict[str, NDArray[Any]] = {
            **weights_of(policy, "policy"), **weights_of(value, "value"), **self.learner.state(),
        }  # fmt: skip
        for number, buffer in enumerate(self.buffers):
            arrays |= buffer.state(f"replay.{number}")
        best_score, best = self.best or (None, None)
        if best is not None:
            arrays |= {f"best.{name}": array for name, array in best.weights.items()}
        words = {
            "settings": as_plain(self._settings), "inputs": self.inputs, "seed": self._seed,
            "round": self.round, "decisions": self.decisions, "history": self._history,
            "best": best_score,
            "best_settings": None if best is None else dict(best.settings),
            "best_training": None if best is None else dict(best.training),
        }  # fmt: skip
        save_state(State(words=words, arrays=arrays), self._state)

    def restore(self, state: State) -> None:
        """Continue from a state.

        Raises
        ------
        CheckpointError
            It is of another training.
        """
        words, arrays = state.words, state.arrays
        given, saved = as_plain(self._settings), words.get("settings") or {}
        if different := sorted(key for key in given if given[key] != saved.get(key)):
            raise CheckpointError(
                f"resume: the state is of a training with other settings ({', '.join(different)}): give the same ones, "
                "or leave out --resume"
            )
        if words.get("inputs") != self.inputs or words.get("seed") != self._seed:
            raise CheckpointError(
                "resume: the state is of a training with other workloads, another start or another seed: give the same "
                "ones, or leave out --resume"
            )
        try:
            load_weights(self.learner.policy, arrays, "policy")
            load_weights(self.learner.value, arrays, "value")
            self.learner.restore({name: arrays[name] for name in arrays if name.startswith("adam.")})
            for number, buffer in enumerate(self.buffers):
                buffer.restore(arrays, f"replay.{number}")
            if words["best"] is not None:
                weights = {name.removeprefix("best."): arrays[name] for name in arrays if name.startswith("best.")}
                made = Checkpoint(
                    policy="dl2-original", weights=weights, settings=words["best_settings"],
                    training=words["best_training"],
                )  # fmt: skip
                self.best = float(words["best"]), made
            self.round, self.decisions = int(words["round"]), int(words["decisions"])
            self._history = list(words["history"])
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"resume: the state is damaged: {type(error).__name__}: {error}") from None


def _encoding_of(start: Checkpoint) -> ObservationEncoding:
    try:
        return ObservationEncoding.of(start.settings)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"start: the checkpoint lacks what training needs: {type(error).__name__}: {error}"
        ) from None


def continuing(settings: Settings, start: Checkpoint) -> Settings:
    """Settings with which learning goes on from a checkpoint: without a teacher, with its kind and size of network.

    Raises ``CheckpointError`` if the checkpoint lacks what is needed.
    """
    try:
        network = NetworkKind(start.settings["network"])
        hidden = int(start.weights["policy.1.weight"].shape[0])
        window = int(start.settings["window"]) if network is NetworkKind.DENSE else settings.window
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"start: the checkpoint lacks what training needs: {type(error).__name__}: {error}"
        ) from None
    return replace(settings, teacher="", network=network, hidden=hidden, window=window)
