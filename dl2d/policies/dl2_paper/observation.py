"""Observations of the paper's policy network (Peng et al., arXiv 1909.06040, section 4.1): which number stands where.

An observation shows a batch of up to J jobs, in submit order, on a cluster with R resources. It is a vector of
J x F + R numbers (float32): F features of each job, all 0 where there is no job, then the free share of each resource.
The policy writes observations of one snapshot, the array simulator those of N clusters; both use the functions below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dl2d.core.array_types import Floats, Floats32, Ints
from dl2d.core.jobs import NOTHING, Allocation

Observations = Floats32

#: Features of a job behind its one-hot type: age, remaining epochs, dominant share, workers, PSs.
SCALARS = 5
#: Features that not every network has: place in the batch, remaining share of the epochs, logarithms of workers, PSs.
EXTRAS = 4
#: Features of the asked size, which not every network has: logarithms of the workers and PSs that a job still lacks of
#: the size that its user asks for.
ASKED = 2
#: Features of the remaining time, which not every network has: logarithm of the remaining slots, and the job's rank by
#: remaining time. Order in the array: ASKED, TIMES, EXTRAS.
TIMES = 2
#: What features are divided by, so that usual values are near 1.
_AGE_SCALE = 3.0
_REMAINING_SCALE = 8.0
_TASKS_SCALE = 16.0
_PLACE_SCALE = 4.0
_TIME_SCALE = 3.0
#: Largest value of the remaining time's feature: that of 26 billion slots.
_MAX_TIME = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Shape of an observation."""

    #: J, the number of model types, and R.
    window: int
    types: int
    resources: int
    #: Whether jobs have the features that not every network has.
    extras: bool
    #: Whether jobs have the features of the size that their users ask for.
    asked_sizes: bool = False
    #: Whether jobs have the features of the remaining time.
    remaining_times: bool = False

    @property
    def features(self) -> int:
        """F."""
        return (
            self.types + SCALARS + ASKED * self.asked_sizes + TIMES * self.remaining_times + EXTRAS * self.extras
        )  # fmt: skip

    @property
    def length(self) -> int:
        """Length of an observation: J x F + R."""
        return self.window * self.features + self.resources

    @property
    def size_features(self) -> list[int]:
        """Features of a job that change with its size, in the order of ``size_features``."""
        places = list(range(self.types + 2, self.types + SCALARS + ASKED * self.asked_sizes))
        return [*places, self.features - 2, self.features - 1] if self.extras else places

    def jobs_of(self, observations: Observations) -> Observations:
        """Features of the jobs, shape (N, J, F); a view of observations, shape (N, length)."""
        split = self.window * self.features
        return observations[:, :split].reshape(len(observations), self.window, self.features)

    def free_of(self, observations: Observations) -> Observations:
        """Free shares, shape (N, R); a view of observations, shape (N, length)."""
        return observations[:, self.window * self.features :]

    def sizes_in(self, observations: Observations) -> Ints:
        """Workers and PSs of each job, shape (N, J, 2)."""
        scaled = self.jobs_of(observations)[:, :, self.types + 3 : self.types + 5]
        sizes: Ints = np.rint(scaled * _TASKS_SCALE).astype(np.int64)
        return sizes

    def bounds(self) -> tuple[Observations, Observations]:
        """Least and largest values of one observation, shape (length,) each."""
        job = (
            [1.0] * self.types
            + [8.0, 8.0, 1.0, 64.0, 64.0]
            + [8.0] * ASKED * self.asked_sizes
            + [_MAX_TIME, self.window / _PLACE_SCALE] * self.remaining_times
            + [self.window / _PLACE_SCALE, 1.0, 8.0, 8.0] * self.extras
        )
        high = np.array(job * self.window + [1.0] * self.resources, dtype=np.float32)
        return np.zeros_like(high), high


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationEncoding:
    """How a snapshot is shown to a network, as its checkpoint's settings say."""

    #: J.
    window: int
    #: Model types and resources in the order of the inputs.
    models: tuple[str, ...]
    resources: tuple[str, ...]
    #: Each job has its minimum size before the first step.
    first_bundles: bool
    slot_seconds: float
    #: Jobs that have nothing after the last step get their minimum size, where there is room.
    last_bundles: bool = False
    #: Jobs have the features that not every network has.
    extras: bool = False
    #: Jobs have the features of the remaining time (``dl2d.throughput.remaining_time.remaining_seconds``).
    remaining_times: bool = False
    #: Usual size of each model type, where jobs have the features of the size that their users ask for; of a job whose
    #: user asks for none it is that of its type. Empty where they do not have these features.
    usual_sizes: tuple[Allocation, ...] = ()
    #: All jobs, not static ones only, have fixed sizes; see ``dl2d.policies.dl2_paper.sizing_step_by_step``.
    fixed_sizes: bool = False

    @property
    def layout(self) -> Layout:
        """Shape of its observations."""
        return Layout(
            window=self.window, types=len(self.models), resources=len(self.resources), extras=self.extras,
            asked_sizes=bool(self.usual_sizes), remaining_times=self.remaining_times,
        )  # fmt: skip

    @property
    def width(self) -> int:
        """Features of a job."""
        return self.layout.features

    @property
    def inputs(self) -> int:
        """Length of an observation."""
        return self.layout.length

    @property
    def void(self) -> int:
        """The action that ends a batch: 3J."""
        return 3 * self.window

    def usual_sizes_of(self, models: Sequence[str]) -> tuple[Allocation, ...]:
        """Usual sizes of models, ``NOTHING`` of those it does not know; empty where jobs have no such features."""
        known = dict(zip(self.models, self.usual_sizes, strict=bool(self.usual_sizes)))
        return tuple(known.get(model, NOTHING) for model in models) if known else ()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """From a checkpoint's settings.

        Raises
        ------
        KeyError, TypeError, ValueError
            One is missing or is no such thing.
        """
        models = tuple(settings["models"])
        usual_sizes = tuple(Allocation(int(workers), int(ps)) for workers, ps in settings.get("usual_sizes", ()))
        if usual_sizes and (len(usual_sizes) != len(models) or min(map(min, usual_sizes)) < 0):
            raise ValueError(f"usual_sizes: {len(models)} sizes are needed, not {usual_sizes}")
        if settings.get("fixed_sizes") and not usual_sizes:
            raise ValueError("fixed_sizes: usual_sizes are needed")
        return cls(
            window=int(settings["window"]),
            models=models,
            resources=tuple(settings["resources"]),
            first_bundles=bool(settings["first_bundles"]),
            last_bundles=bool(settings.get("last_bundles", False)),
            slot_seconds=float(settings["slot_seconds"]),
            extras=bool(settings.get("extras", False)),
            remaining_times=bool(settings.get("remaining_times", False)),
            usual_sizes=usual_sizes,
            fixed_sizes=bool(settings.get("fixed_sizes", False)),
        )


def job_features(
    layout: Layout, *, types: Ints, ages: Ints, remaining: Floats, declared: Floats, places: Ints,
    times: Floats | None = None,
) -> Observations:  # fmt: skip
    """Features of M jobs that stay as they are while sizes are chosen, shape (M, F); those of sizes are 0.

    Parameters
    ----------
    types
        Model type, 0 to types - 1, or -1 for one that the network does not know.
    ages
        Slots since the job was submitted.
    remaining, declared
        Epochs.
    places
        Place in the batch, from 0.
    times
        Remaining time in slots, and place in this order among all jobs of the cluster, from 0, shape (M, 2); needed
        where the layout has features of them.
    """
    features = np.zeros((len(types), layout.features), dtype=np.float32)
    known = np.flatnonzero(types >= 0)
    features[known, types[known]] = 1.0
    features[:, layout.types] = np.log1p(ages) / _AGE_SCALE
    features[:, layout.types + 1] = np.log1p(remaining) / _REMAINING_SCALE
    if layout.extras:
        features[:, layout.features - EXTRAS] = places / _PLACE_SCALE
        features[:, layout.features - EXTRAS + 1] = remaining / declared
    if layout.remaining_times:
        assert times is not None
        at = layout.types + SCALARS + ASKED * layout.asked_sizes
        features[:, at] = np.minimum(np.log1p(times[:, 0]) / _TIME_SCALE, _MAX_TIME)
        features[:, at + 1] = np.minimum(times[:, 1], layout.window) / _PLACE_SCALE
    return features


def size_features(layout: Layout, sizes: Ints, shares: Floats, asked_sizes: Ints | None = None) -> Observations:
    """Features of M jobs that follow from their sizes, in the order of ``Layout.size_features``.

    Parameters
    ----------
    sizes
        Workers and PSs, shape (M, 2).
    shares
        Dominant shares, shape (M,).
    asked_sizes
        Workers and PSs that users ask for, shape (M, 2); needed where the layout has features of them.
    """
    features = np.empty((len(sizes), len(layout.size_features)), dtype=np.float32)
    features[:, 0] = shares
    features[:, 1:3] = sizes / _TASKS_SCALE
    if layout.asked_sizes:
        assert asked_sizes is not None
        features[:, 3 : 3 + ASKED] = np.log1p(np.maximum(asked_sizes - sizes, 0))
    if layout.extras:
        features[:, -2:] = np.log1p(sizes)
    return features


def dominant_share(sizes: Ints, demand: Ints, capacity: Ints) -> Floats:
    """Largest share of any resource that a job holds (Ghodsi et al., NSDI 2011), shape (...).

    Parameters
    ----------
    sizes
        Workers and PSs, shape (..., 2).
    demand
        What one worker and one PS ask for, shape (..., 2, R).
    capacity
        Of the whole cluster, 1 or more, shape (..., R).
    """
    held = sizes[..., 0, None] * demand[..., 0, :] + sizes[..., 1, None] * demand[..., 1, :]
    share: Floats = (held / capacity).max(axis=-1, initial=0.0)
    return share
