"""The demo's jobs: what they train, when they arrive, and what came of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from dl2d.config.settings import shipped
from dl2d.core.jobs import Job, JobState
from dl2d.core.store import DecisionEntry, RuntimePlan

#: Samples in the training part of the digits (examples/train_digits.py), and samples of a step.
_SAMPLES, _BATCH = 1500, 64


@dataclass(frozen=True, slots=True)
class DemoJob:
    """A training of examples/train_digits.py."""

    name: str
    model: str
    epochs: int
    optimizer: str

    def command(self, pause: float = 0.0) -> tuple[str, ...]:
        """The command. ``pause`` seconds in each step stand for a GPU's work: two cores carry many workers so."""
        return (
            sys.executable, str(shipped("examples/train_digits.py")), "--model", self.model, "--epochs",
            str(self.epochs), "--batch", str(_BATCH), "--optimizer", self.optimizer, "--seed", "7",
            "--mode", "exact", "--step-seconds", str(pause),
        )  # fmt: skip

    def request(self) -> dict[str, object]:
        """The request, as a job file has it. Two jobs of five workers want more GPUs than there are."""
        return {
            "name": self.name, "model": f"digits-{self.model}", "epochs": self.epochs, "samples_per_epoch": _SAMPLES,
            "batch": _BATCH, "worker": {"cpu": 2, "gpu": 1}, "ps": {"cpu": 1}, "max_workers": 5, "max_ps": 5,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Jobs in the order in which they arrive: each when the one before has trained ``epochs_between`` epochs."""

    jobs: tuple[DemoJob, ...]
    epochs_between: float
    slot_seconds: float
    pause: float = 0.02


FULL = DemoPlan(
    (
        DemoJob("small", "small", 14, "momentum"),
        DemoJob("medium", "medium", 12, "adam"),
        DemoJob("cnn", "cnn", 10, "momentum"),
    ),
    epochs_between=2.5,
    slot_seconds=3.0,
)
FAST = DemoPlan(
    (
        DemoJob("first", "small", 6, "momentum"),
        DemoJob("second", "small", 5, "adam"),
        DemoJob("third", "medium", 4, "momentum"),
    ),
    epochs_between=1.0,
    slot_seconds=2.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """A job of the demo that has ended. Times are seconds since 1970."""

    job: Job
    arrived: float
    #: Memberships that trained; the first is the start, every other one a resize.
    plans: tuple[RuntimePlan, ...]
    decisions: tuple[DecisionEntry, ...]
    #: Digest of the weights of a run with one worker and one parameter server; "" where it failed.
    static_digest: str

    @property
    def good(self) -> bool:
        """Whether it finished with the weights of the static run, bit for bit."""
        return self.job.state is JobState.FINISHED and self.job.digest == self.static_digest != ""

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "name": self.job.request.name, "job": self.job.key.slug, "state": self.job.state,
            "end_reason": self.job.end_reason, "arrived": self.arrived, "ended": self.job.ended_at,
            "updates": self.job.progress.version, "loss": self.job.progress.loss, "digest": self.job.digest,
            "static_digest": self.static_digest, "weights_equal_static_run": self.good,
            "plans": self.plans,
        }  # fmt: skip
