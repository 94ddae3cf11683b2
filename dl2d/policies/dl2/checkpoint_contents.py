"""Contents of a dl2 checkpoint: weights of the scorer, measured speeds and settings; read and checked.

A checkpoint's settings are ``design`` ("jumps"), ``features`` (names, in the order of the weights), ``hidden`` (units),
``slot_seconds``, ``optimism``, ``resize_seconds`` and ``kinds`` (of the measured speeds); its arrays are ``scorer`` and
those of ``as_arrays``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from dl2d.core.errors import CheckpointError
from dl2d.core.jobs import Allocation, Architecture, Consistency
from dl2d.core.measured_speeds import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.common.predicted_speeds import DEFAULT_OPTIMISM
from dl2d.policies.dl2.scoring import FEATURES, Floats, weight_count

NAME: Final = "dl2"
#: The only design of scorer that there is.
_DESIGN: Final = "jumps"


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """What dl2 decides with: a checkpoint's contents, with settings of the site in place of the checkpoint's own."""

    #: Weights of the scorer, shape (1, weights).
    weights: Floats
    #: Speeds that were measured when the checkpoint was trained.
    known: tuple[MeasuredSpeeds, ...]
    #: Standard deviations added to predicted speeds: of kinds that are known, and of others.
    optimism: float
    optimism_of_unknown: float
    #: What a resize costs, and the length of an interval.
    resize_seconds: float
    slot_seconds: float

    @classmethod
    def of(cls, checkpoint: Checkpoint, own: Mapping[str, float | None]) -> Self:
        """Read a checkpoint; ``own`` settings that are not None replace the checkpoint's.

        Raises
        ------
        CheckpointError
            The checkpoint is of another design, or something in it is missing or has another shape.
        """
        settings = {**checkpoint.settings, **{name: value for name, value in own.items() if value is not None}}
        try:
            hidden = int(settings["hidden"])
            optimism = float(settings["optimism"])
            found = cls(
                weights=np.asarray(checkpoint.weights["scorer"], dtype=np.float64)[None],
                known=from_arrays(checkpoint.weights, settings["kinds"]),
                optimism=optimism,
                # Kinds that the checkpoint does not know are explored, unless the site says how much.
                optimism_of_unknown=max(optimism, DEFAULT_OPTIMISM) if own.get("optimism") is None else optimism,
                resize_seconds=float(settings["resize_seconds"]),
                slot_seconds=float(settings["slot_seconds"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"checkpoint of {NAME}: missing or unsuitable entry {error}") from error
        unlike = settings.get("features", list(FEATURES)) != list(FEATURES)
        if settings.get("design") != _DESIGN or unlike or found.weights.shape != (1, weight_count(hidden)):
            raise CheckpointError(
                f"checkpoint of {NAME}: design {settings.get('design')!r} with weights of shape "
                f"{found.weights.shape[1:]}{' for other features' if unlike else ''}; this dl2d has {_DESIGN!r} with "
                f"{weight_count(hidden)}: train it again (dl2d train)"
            )
        if not found.slot_seconds > 0 or found.resize_seconds < 0 or not np.isfinite(found.optimism):
            raise CheckpointError(f"checkpoint of {NAME}: slot_seconds must be over 0, resize_seconds 0 or more")
        return found


def as_arrays(measured: Sequence[MeasuredSpeeds]) -> tuple[dict[str, NDArray[Any]], list[list[str]]]:
    """Measured speeds for a checkpoint.

    Returns
    -------
    Arrays ``measured_sizes`` (kind, workers, PSs, number of measurements), shape (n, 4), and ``measured_speeds``, shape
    (n,); and the kinds.
    """
    rows = [
        (number, *point.allocation, point.measurements)
        for number, speeds in enumerate(measured)
        for point in speeds.points
    ]
    means = [point.samples_per_second for speeds in measured for point in speeds.points]
    kinds = [[speeds.kind.model, str(speeds.kind.architecture), str(speeds.kind.consistency)] for speeds in measured]
    arrays: dict[str, NDArray[Any]] = {
        "measured_sizes": np.array(rows, dtype=np.int64).reshape(-1, 4),
        "measured_speeds": np.array(means, dtype=np.float64),
    }
    return arrays, kinds


def from_arrays(arrays: Mapping[str, NDArray[Any]], kinds: Sequence[Sequence[str]]) -> tuple[MeasuredSpeeds, ...]:
    """Inverse of ``as_arrays``; a ``KeyError``, ``ValueError`` or ``IndexError`` where they are not such arrays."""
    points: list[list[SpeedPoint]] = [[] for _ in kinds]
    rows, means = arrays["measured_sizes"].tolist(), arrays["measured_speeds"].tolist()
    for (kind, workers, ps, times), mean in zip(rows, means, strict=True):
        points[kind].append(SpeedPoint(Allocation(workers, ps), mean, times))
    return tuple(
        MeasuredSpeeds(TrainingKind(model, Architecture(architecture), Consistency(consistency)), tuple(own))
        for (model, architecture, consistency), own in zip(kinds, points, strict=True)
    )
