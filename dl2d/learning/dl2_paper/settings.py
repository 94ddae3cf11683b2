"""How a policy of DL2's design is trained: everything that can be switched."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Final

from dl2d.learning.dl2_paper.errors import TrainingError

_BOUNDS: Final = {
    "window": (1, 1000), "hidden": (1, 4096), "clusters": (1, 4096),
    "supervised_updates": (0, 1_000_000), "iterations": (0, 1_000_000), "epochs": (1, 100), "federation": (1, 1000),
    "samples": (2, 10_000_000), "replay": (0, 10_000_000), "minibatch": (2, 1_000_000), "gamma": (0.0, 1.0),
    "epsilon": (0.0, 1.0), "kept": (0.001, 1.0), "clip": (0.0, 10.0), "fairness": (0.0, 1e6), "entropy": (0.0, 1e3),
    "last_entropy": (0.0, 1e3), "validate_every": (1, 1_000_000), "critic_iterations": (0, 1_000_000),
    "most_slots": (1, 100_000), "rate": (0.0, 1.0), "last_rate": (0.0, 1.0), "supervised_rate": (0.0, 1.0),
    "ratio": (1.0, 1000.0),
}  # fmt: skip


class NetworkKind(enum.StrEnum):
    """``dense``: fully connected over all J columns, as in the paper. ``shared``: one network for every job."""

    DENSE = "dense"
    SHARED = "shared"


class SupervisedLoss(enum.StrEnum):
    """What imitation minimises (the paper's Fig. 16)."""

    CROSS_ENTROPY = "cross-entropy"
    SQUARE = "square"
    ABSOLUTE = "absolute"


class Labels(enum.StrEnum):
    """Which steps are right where a scheduler is imitated that was recorded."""

    #: The one that it took then: what it went by can be seen step by step.
    STEPS = "steps"
    #: Each that leads to the size that it chose for the job.
    SIZES = "sizes"


class Reward(enum.StrEnum):
    """What a job brings in a slot: the share of its epochs that it did (the paper's), or would do in a whole slot."""

    PROGRESS = "progress"
    RATE = "rate"
    #: log(rate + 0.001): a job that is twice as fast brings as much more, however long it is.
    LOG_RATE = "log-rate"


class Credit(enum.StrEnum):
    """Whose reward an action is credited with."""

    #: The sum over all jobs of the slot, as in the paper.
    SLOT = "slot"
    #: That of the job that was given the task; void has the mean over the jobs of the batch.
    OWN = "own"
    #: Each job's against what was expected of it, summed over the batch.
    ALL = "all"


class Surrogate(enum.StrEnum):
    """``plain``: REINFORCE's; ``clipped``: PPO's, which holds an update near the policy that acted."""

    PLAIN = "plain"
    CLIPPED = "clipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Defaults are the paper's design with what it takes to work; ``PAPER`` is its text.

    Raises
    ------
    TrainingError
        A number is out of bounds; says which.
    """

    window: int = 20
    network: NetworkKind = NetworkKind.SHARED
    #: Width of both hidden layers.
    hidden: int = 64
    #: Each job has its least size before the first decision of a slot.
    first_bundles: bool = True
    #: Jobs show their place in the batch, the remaining fraction of their epochs and logarithms of their tasks, too:
    #: while learning from rewards, which is slower with it, and while imitating, which does not do without.
    extras: bool = False
    supervised_extras: bool = True
    #: Clusters that are played at once, by each learner.
    clusters: int = 128
    most_slots: int = 1000

    #: A built-in policy to imitate first; empty for none. Optimus and lookahead know true speeds then.
    teacher: str = "drf"
    #: None: the steps that were taken where that is known, else all that lead to the size.
    labels: Labels | None = None
    supervised_loss: SupervisedLoss = SupervisedLoss.CROSS_ENTROPY
    supervised_updates: int = 100
    supervised_rate: float = 3e-2
    #: Draw the output layer afresh after imitation: a confident one cannot be turned round any more.
    fresh_output: bool = True

    #: Rounds of acting and learning, and fresh samples of each.
    iterations: int = 150
    samples: int = 8192
    #: Share of the decisions that become samples: decisions of a slot are much alike.
    kept: float = 0.25
    #: Size of the replay buffer; 0 learns from fresh samples alone.
    replay: int = 0
    minibatch: int = 1024
    #: How often as many samples as are fresh are learned from.
    epochs: int = 2
    reward: Reward = Reward.LOG_RATE
    credit: Credit = Credit.OWN
    #: Weight of: least dominant share of a job in the slot x number of jobs, added to each job's reward.
    fairness: float = 0.0
    gamma: float = 0.0
    #: Off: rewards are compared with their running mean instead.
    critic: bool = True
    #: First rounds in which the critic alone learns.
    critic_iterations: int = 3
    surrogate: Surrogate = Surrogate.CLIPPED
    clip: float = 0.2
    #: Advantages of a minibatch are brought to mean 0 and deviation 1.
    normalise: bool = True
    #: Weight of the entropy of each state's distribution, at the beginning and at the end.
    entropy: float = 0.01
    last_entropy: float = 0.001
    rate: float = 1e-3
    last_rate: float = 1e-4
    #: How often a poor state (section 4.3) is mended instead of asking the policy, and how uneven a poor one is.
    epsilon: float = 0.1
    ratio: float = 10.0
    #: Learners with clusters of their own whose gradients are averaged.
    federation: int = 1
    validate_every: int = 20

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.name in _BOUNDS:
                least, most = _BOUNDS[entry.name]
                value = getattr(self, entry.name)
                if not least <= value <= most:
                    raise TrainingError(f"{entry.name}: expected {least} to {most}, got {value}")
        if self.minibatch > self.samples:
            raise TrainingError(f"minibatch: {self.minibatch} is more than the {self.samples} samples of a round")
        if 0 < self.replay < self.samples:
            raise TrainingError(f"replay: {self.replay} is less than the {self.samples} samples of a round")


#: The paper's text, section 4 and 6.1: slot reward, discount, plain gradient, replay; numbers where it names them.
PAPER: Final = Settings(
    network=NetworkKind.DENSE, hidden=256, first_bundles=False, fresh_output=False,
    supervised_extras=False, supervised_rate=5e-3,
    reward=Reward.PROGRESS, credit=Credit.SLOT, gamma=0.9, kept=1.0, surrogate=Surrogate.PLAIN, normalise=False,
    replay=8192, samples=2048, minibatch=256, epochs=1, entropy=0.1, last_entropy=0.1, rate=1e-4, last_rate=1e-4,
    epsilon=0.4, critic_iterations=0,
)  # fmt: skip
