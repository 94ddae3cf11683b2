"""Checkpoints of dl2 for tests: one that knows the speeds of a kind, and weighs steps as untrained ones do."""

from __future__ import annotations

import numpy as np

from dl2d.core.jobs import Allocation, Architecture, Consistency
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.dl2.checkpoint_contents import as_arrays
from dl2d.policies.dl2.policy import Dl2
from dl2d.policies.dl2.scoring import initial_weights

KIND = TrainingKind("m", Architecture.PS, Consistency.SYNC)
SETTINGS = {"design": "jumps", "hidden": 0, "slot_seconds": 60.0, "optimism": 0.0, "resize_seconds": 0.0}


def measured(speeds: dict[tuple[int, int], float], kind: TrainingKind = KIND) -> MeasuredSpeeds:
    return MeasuredSpeeds(kind, tuple(SpeedPoint(Allocation(*size), speeds[size], 100) for size in sorted(speeds)))


def checkpoint(*known: MeasuredSpeeds, scorer: np.ndarray | None = None, **settings: object) -> Checkpoint:
    arrays, kinds = as_arrays(known)
    weights = initial_weights(0, np.random.default_rng(0)) if scorer is None else scorer
    return Checkpoint(
        policy="dl2",
        weights={"scorer": weights, **arrays},
        settings={**SETTINGS, "kinds": kinds} | settings,
        training={},
    )


def policy(*known: MeasuredSpeeds, **settings: float) -> Dl2:
    return Dl2(checkpoint(*known, **settings))
