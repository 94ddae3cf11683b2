"""Contents of a dl2 checkpoint: weights of the scorer, measured speeds and settings; read and checked.

Settings: ``design`` (``NAME``), ``features`` (names, in the order of the weights), ``hidden`` (number of hidden
units), ``slot_seconds``, ``optimism``, ``resize_seconds`` and ``kinds`` (of the measured speeds). Arrays: ``scorer``,
the weights, and those of ``as_arrays``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dl2d.core.array_types import Arrays, Floats
from dl2d.core.errors import CheckpointError
from dl2d.core.jobs import Allocation, Architecture, Consistency
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.policies.common.checkpoint import FORMER_DESIGNS, Checkpoint, Settings
from dl2d.policies.common.speeds_after_resize import DEFAULT_OPTIMISM
from dl2d.policies.dl2.scoring import FEATURES, weight_count

NAME = "dl2"
#: Largest absolute value of a weight, far beyond those that learning finds: no score overflows with smaller ones.
_MAX_WEIGHT = 1e100


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """Parameters of dl2: a checkpoint's contents, with settings of the site in place of some of the checkpoint's."""

    #: Weights of the scorer, shape (1, weights).
    weights: Floats
    #: Speeds that were measured when the checkpoint was trained.
    measured_speeds: tuple[MeasuredSpeeds, ...]
    #: Standard deviations added to predicted speeds of kinds in ``measured_speeds``.
    optimism: float
    #: Standard deviations added to predicted speeds of other kinds.
    optimism_of_unknown: float
    #: Time for which a job does not train when it is resized.
    resize_seconds: float
    #: Length of a slot.
    slot_seconds: float

    @classmethod
    def of(cls, checkpoint: Checkpoint, overrides: Settings) -> Self:
        """Read a checkpoint; those of ``overrides`` that are not None replace its settings.

        Raises
        ------
        CheckpointError
            The checkpoint is of another design, an entry is missing or has another shape, or a setting is out of range.
        """
        settings = {**checkpoint.settings, **{name: value for name, value in overrides.items() if value is not None}}
        try:
            hidden = int(settings["hidden"])
            optimism = float(settings["optimism"])
            parameters = cls(
                weights=np.asarray(checkpoint.weights["scorer"], dtype=np.float64)[None],
                measured_speeds=from_arrays(checkpoint.weights, settings["kinds"]),
                optimism=optimism,
                # Kinds without checkpoint speeds need exploration, unless the site sets the optimism.
                optimism_of_unknown=max(optimism, DEFAULT_OPTIMISM) if overrides.get("optimism") is None else optimism,
                resize_seconds=float(settings["resize_seconds"]),
                slot_seconds=float(settings["slot_seconds"]),
            )
        except KeyError as error:
            raise CheckpointError(f"checkpoint of {NAME}: the entry {error} is missing") from error
        except (TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"checkpoint of {NAME}: an entry is unsuitable: {error}") from error
        other_features = settings.get("features", list(FEATURES)) != list(FEATURES)
        shape, count = parameters.weights.shape[1:], weight_count(hidden)
        design = str(settings.get("design"))
        if FORMER_DESIGNS.get(design, design) != NAME or other_features or shape != (count,):
            raise CheckpointError(
                f"checkpoint of {NAME}: has design {design!r} with weights of shape {shape}"
                f"{' for other features' if other_features else ''}; this dl2d reads design {NAME!r} with weights "
                f"of shape ({count},): train it again (dl2d train)"
            )
        if not (np.abs(parameters.weights) <= _MAX_WEIGHT).all():
            raise CheckpointError(
                f"checkpoint of {NAME}: a weight is not a number, or beyond ±{_MAX_WEIGHT:.0e}: train it again "
                "(dl2d train)"
            )
        if not parameters.slot_seconds > 0 or parameters.resize_seconds < 0 or not np.isfinite(parameters.optimism):
            raise CheckpointError(
                f"checkpoint of {NAME}: slot_seconds must be more than 0, resize_seconds at least 0 and optimism a "
                f"finite number; they are {parameters.slot_seconds}, {parameters.resize_seconds} and "
                f"{parameters.optimism}"
            )
        return parameters


def as_arrays(measured: Sequence[MeasuredSpeeds]) -> tuple[dict[str, NDArray[Any]], list[list[str]]]:
    """Convert measured speeds to arrays for a checkpoint.

    Returns
    -------
    Arrays ``measured_sizes`` (index of the kind, workers, PSs, number of measurements), shape (n, 4), and
    ``measured_speeds`` (samples/s), shape (n,); and the model type, architecture and consistency of each kind.
    """
    rows = [
        (index, *point.allocation, point.measurements)
        for index, speeds in enumerate(measured)
        for point in speeds.points
    ]
    means = [point.samples_per_second for speeds in measured for point in speeds.points]
    kinds = [[speeds.kind.model, str(speeds.kind.architecture), str(speeds.kind.consistency)] for speeds in measured]
    return {
        "measured_sizes": np.array(rows, dtype=np.int64).reshape(-1, 4),
        "measured_speeds": np.array(means, dtype=np.float64),
    }, kinds


def from_arrays(arrays: Arrays, kinds: Sequence[Sequence[str]]) -> tuple[MeasuredSpeeds, ...]:
    """Convert arrays of a checkpoint back to measured speeds: the inverse of ``as_arrays``.

    Raises
    ------
    KeyError, ValueError, IndexError
        An array is missing or has another shape, or a kind does not exist.
    """
    points: list[list[SpeedPoint]] = [[] for _ in kinds]
    rows, means = arrays["measured_sizes"].tolist(), arrays["measured_speeds"].tolist()
    for (kind, workers, ps, measurements), mean in zip(rows, means, strict=True):
        points[kind].append(SpeedPoint(Allocation(workers, ps), mean, measurements))
    return tuple(
        MeasuredSpeeds(TrainingKind(model, Architecture(architecture), Consistency(consistency)), tuple(points_of_kind))
        for (model, architecture, consistency), points_of_kind in zip(kinds, points, strict=True)
    )
