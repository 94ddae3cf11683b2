"""What the demo plays: its jobs, and when each one arrives."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dl2d.config.files import shipped

#: Samples in the training part of the digits, see examples/train_digits.py.
_SAMPLES = 1500
_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """A job of the demo."""

    name: str
    #: ``--model`` of examples/train_digits.py.
    model: str
    epochs: int
    optimizer: str
    #: Pause in every part of a batch, in seconds: stands for a GPU's work, so that two cores can carry many workers.
    pause: float
    seed: int = 7

    @property
    def model_type(self) -> str:
        """The type that the daemon knows."""
        return f"digits-{self.model}"

    def command(self, *, pause: float | None = None) -> tuple[str, ...]:
        """The training command; ``pause`` in place of the act's own."""
        return (
            sys.executable, str(shipped("examples/train_digits.py")), "--model", self.model,
            "--epochs", str(self.epochs), "--batch", str(_BATCH), "--optimizer", self.optimizer,
            "--seed", str(self.seed), "--step-seconds", str(self.pause if pause is None else pause),
        )  # fmt: skip

    def request(self) -> dict[str, object]:
        """The request, as a job file has it. Eight workers take all GPUs of the demo's four nodes."""
        return {
            "name": self.name,
            "model": self.model_type,
            "epochs": self.epochs,
            "samples_per_epoch": _SAMPLES,
            "batch": _BATCH,
            "worker": {"cpu": 2, "gpu": 1},
            "ps": {"cpu": 1},
            "max_workers": 5,
            "max_ps": 5,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The acts in the order in which they arrive, and how long one has the stage before the next comes."""

    acts: tuple[Act, ...]
    #: Seconds from one arrival to the next: at least, and at most where the job before has not come to rest.
    gap: float
    #: Of these, at least so many with what was decided for it.
    rest: float
    longest_gap: float
    slot_seconds: float
    poll_seconds: float = 0.5
    heartbeat_seconds: float = 0.5


FULL = Script(
    acts=(
        Act(name="small", model="small", epochs=16, optimizer="momentum", pause=0.02),
        Act(name="medium", model="medium", epochs=17, optimizer="adam", pause=0.02),
        Act(name="cnn", model="cnn", epochs=14, optimizer="momentum", pause=0.02),
    ),
    gap=12.0,
    rest=5.0,
    longest_gap=25.0,
    slot_seconds=3.0,
)

FAST = Script(
    acts=(
        Act(name="first", model="small", epochs=6, optimizer="momentum", pause=0.015),
        Act(name="second", model="small", epochs=5, optimizer="adam", pause=0.015),
        Act(name="third", model="medium", epochs=4, optimizer="momentum", pause=0.015),
    ),
    gap=5.0,
    rest=2.0,
    longest_gap=12.0,
    slot_seconds=2.0,
)
