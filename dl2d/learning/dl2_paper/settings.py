"""Settings of the training of a policy of DL2's design, and the errors of a training."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import PlainValidator, model_validator

from dl2d.core.input_validation import Flag, Number, Record, Whole, bad, not_one_of
from dl2d.learning.interrupted_training import DEFAULT_ITERATIONS


class Teacher(enum.StrEnum):
    """Policies of preset ``dl2-paper`` that can be imitated; Optimus and lookahead are given the true speeds."""

    DRF = "drf"
    FIFO = "fifo"
    SRTF = "srtf"
    TETRIS = "tetris"
    OPTIMUS = "optimus"
    LOOKAHEAD = "lookahead"


TEACHERS = tuple(each.value for each in Teacher)
#: Teachers that leave some jobs without tasks while others get all that they ask for: a first bundle for every job
#: would change what they do.
SERVE_WHOLE = frozenset({"fifo", "srtf", "tetris"})


class NetworkKind(enum.StrEnum):
    """``shared``: one network for every job. ``dense``: fully connected over the whole observation, as in the paper."""

    SHARED = "shared"
    DENSE = "dense"


class SupervisedLoss(enum.StrEnum):
    """What imitation minimises (the paper's Fig. 16)."""

    CROSS_ENTROPY = "cross-entropy"
    SQUARE = "square"
    ABSOLUTE = "absolute"


class Labels(enum.StrEnum):
    """Which actions count as right where recorded decisions are imitated."""

    #: The one that the recorded scheduler took.
    STEPS = "steps"
    #: Every action that leads to the recorded size of the job.
    SIZES = "sizes"


class Reward(enum.StrEnum):
    """Reward of a job in a slot, from the share of its epochs."""

    #: The share that it did, as in the paper.
    PROGRESS = "progress"
    #: log(r + 0.001) with the share r that it would do in a whole slot: doubling the speed of a job adds the same
    #: reward, however long the job is.
    LOG_RATE = "log-rate"
    #: log(e + 0.001) with the epochs e that it would do in a whole slot. As log-rate, but without the job's length,
    #: which the network does not see: the critic can predict it from type and size.
    LOG_EPOCHS = "log-epochs"


class Credit(enum.StrEnum):
    """Which reward an action is credited with."""

    #: The sum over all jobs of the slot, as in the paper.
    SLOT = "slot"
    #: That of the job that was given the task; void has the mean over the jobs of the batch.
    OWN = "own"


class Surrogate(enum.StrEnum):
    """Objective of the policy gradient. ``plain``: REINFORCE's. ``clipped``: PPO's."""

    PLAIN = "plain"
    CLIPPED = "clipped"


def _teacher(value: object) -> str:
    if not isinstance(value, str) or value not in {"", *TEACHERS}:
        raise bad("", f"{not_one_of(value, TEACHERS)}; empty for none")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Record):
    """Everything about a training that can be set. Defaults are the paper's design with the corrections that make it
    learn; ``PAPER`` is the paper's text.
    """

    #: J.
    window: Annotated[int, Whole(1, 1000)] = 20
    network: NetworkKind = NetworkKind.SHARED
    #: Width of both hidden layers.
    hidden: Annotated[int, Whole(1, 4096)] = 64
    #: Each job has its minimum size before the first decision of a slot.
    first_bundles: Flag = True
    #: Whether observations have the extra features (``dl2d.policies.dl2_paper.observation.EXTRAS``) in actor-critic
    #: learning, which is slower with them, and in imitation, which needs them.
    extras: Flag = False
    supervised_extras: Flag = True
    #: Whether observations have the features of the remaining time (``TIMES``, ibid.) in actor-critic learning and in
    #: the imitation of ``teacher``. The imitation of recorded slots has them if it has the extra ones.
    remaining_times: Flag = False
    #: Clusters that each learner simulates at once.
    clusters: Annotated[int, Whole(1, 4096)] = 128
    most_slots: Annotated[int, Whole(1, 100_000)] = 1000

    #: A built-in policy to imitate first; empty for none. Optimus and lookahead know true speeds then.
    teacher: Annotated[str, PlainValidator(_teacher)] = "drf"
    #: None: ``steps`` where a decision has them, else ``sizes``.
    labels: Labels | None = None
    supervised_loss: SupervisedLoss = SupervisedLoss.CROSS_ENTROPY
    supervised_updates: Annotated[int, Whole(0, 1_000_000)] = 100
    supervised_rate: Annotated[float, Number(1.0)] = 3e-2
    #: Draw the output layer anew after imitation: actor-critic learning cannot change a confident one.
    fresh_output: Flag = True

    #: Rounds of acting and learning, and new samples of each.
    iterations: Annotated[int, Whole(0, 1_000_000)] = DEFAULT_ITERATIONS
    samples: Annotated[int, Whole(2, 10_000_000)] = 8192
    #: Share of the decisions that become samples, since those of one slot are nearly alike.
    kept: Annotated[float, Number(1.0, least=0.001)] = 0.25
    #: Size of the replay buffer; 0: learn from new samples only.
    replay: Annotated[int, Whole(0, 10_000_000)] = 0
    minibatch: Annotated[int, Whole(2, 1_000_000)] = 1024
    #: Samples learned from in a round, as a multiple of the new ones.
    epochs: Annotated[int, Whole(1, 100)] = 2
    reward: Reward = Reward.LOG_RATE
    credit: Credit = Credit.OWN
    gamma: Annotated[float, Number(1.0)] = 0.0
    #: Off: the baseline is the mean reward instead.
    critic: Flag = True
    #: First rounds, in which only the critic learns.
    critic_iterations: Annotated[int, Whole(0, 1_000_000)] = 3
    surrogate: Surrogate = Surrogate.CLIPPED
    clip: Annotated[float, Number(10.0)] = 0.2
    #: Scale the advantages of a minibatch to mean 0 and standard deviation 1.
    normalise: Flag = True
    #: Weight of the entropy of the action distribution, at the beginning and at the end.
    entropy: Annotated[float, Number(1e3)] = 0.01
    last_entropy: Annotated[float, Number(1e3)] = 0.001
    rate: Annotated[float, Number(1.0)] = 1e-3
    last_rate: Annotated[float, Number(1.0)] = 1e-4
    #: Job-aware exploration (section 4.3): probability of a correcting action in a poor state.
    epsilon: Annotated[float, Number(1.0)] = 0.1
    #: Learners, each with its own clusters, whose gradients are averaged.
    federation: Annotated[int, Whole(1, 1000)] = 1
    validate_every: Annotated[int, Whole(1, 1_000_000)] = 20

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.minibatch > self.samples:
            raise bad("minibatch", f"{self.minibatch} is more than the {self.samples} samples of a round")
        if 0 < self.replay < self.samples:
            raise bad("replay", f"{self.replay} is less than the {self.samples} samples of a round")
        return self


#: The defaults, also those of the options of ``dl2d train supervised``.
DEFAULTS = Settings()
#: Learning from a site's days, where jobs may have only a few tasks: the network gets the extra features, and there are
#: more updates, with a larger learning rate, than by default.
SITE = Settings(
    teacher="", extras=True, remaining_times=True, reward=Reward.LOG_EPOCHS, clusters=128, samples=4096, minibatch=512,
    rate=5e-3, last_rate=5e-4, entropy=3e-3, validate_every=10,
)  # fmt: skip
#: The paper's text, section 4 and 6.1: slot reward, discount, plain gradient, replay; numbers where it names them.
PAPER = Settings(
    network=NetworkKind.DENSE, hidden=256, first_bundles=False, fresh_output=False,
    supervised_extras=False, supervised_rate=5e-3,
    reward=Reward.PROGRESS, credit=Credit.SLOT, gamma=0.9, kept=1.0, surrogate=Surrogate.PLAIN, normalise=False,
    replay=8192, samples=2048, minibatch=256, epochs=1, entropy=0.1, last_entropy=0.1, rate=1e-4, last_rate=1e-4,
    epsilon=0.4, critic_iterations=0,
)  # fmt: skip
