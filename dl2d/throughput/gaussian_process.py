"""What a scheduler believes of speeds that it never measured: one Gaussian process over all kinds of jobs.

Logarithms of samples/s are the sum of what all kinds share, of what is a kind's own, of its level, and of what is each
size's alone. So what one kind showed (that servers help, that many workers do not) is expected of the next one, until
it shows otherwise; and next to a good size there may be a better one.

Sources: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, sections 2.2 and 4.2 (Matern-3/2);
upper confidence bounds: Srinivas et al., "Gaussian process optimization in the bandit setting", ICML 2010.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, starmap
from typing import Final, NamedTuple

import numpy as np

from dl2d.core.jobs import Allocation, Architecture, JobRequest
from dl2d.core.measured import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.throughput.observations import JOBS, Floats, Table
from dl2d.throughput.recent import Recent
from dl2d.throughput.shared import Lattice, Points, Shared, Told
from dl2d.throughput.sizes import (
    LEVEL,
    MOST_OF_GROUP,
    OWN_PART,
    ROUGH,
    SHARED_PART,
    Atlas,
    Bounds,
    Group,
    group_of,
    owns,
    trend_of,
)
from dl2d.throughput.told import UNEXPECTED, Kind, Measured, counts_of, failed_in, kinds_of, measured_of, usable_in

#: Deviations that are best hoped for while speeds are being learned.
OPTIMISM: Final = 0.5
#: Counts of one role that are all looked at, and how many there are at most; those between are interpolated.
_ALL_COUNTS: Final = 24
_MOST_COUNTS: Final = 40
#: Numbers that are kept of the grids of a belief.
_MOST_OF_GRIDS: Final = 1 << 23
#: Jobs of kinds of their own that are looked at together.
_MOST_AT_ONCE: Final = 64


class Belief:
    """Means and deviations of the logarithms of speeds, given what was measured.

    Inputs are log2 w, log2 p and log2 w/p, for all-reduce log2 w alone; Matern-3/2 in both parts. Kinds of one
    architecture and consistency share a part. A kind that was never measured has the shared shape, and as its level the
    mean of the logarithms that were measured of the others, with a deviation of 3 (1 sample/s where there is nothing).

    A run that failed (speed 0) says nothing about its neighbours: in the DL2 authors' measurements those are as fast as
    others. Its size alone is a hole: speed 0.

    Exact with up to 40 sizes a kind and 64 in all. Of more sizes of a kind, 40 count for others: the fastest ones, and
    such as are far from each other; each of the rest counts for itself alone. Of more sizes in all, neighbours are
    taken together in what kinds share. Cost: for K kinds with n sizes each and U distinct sizes, K (n^3 + U^2) + U^3 to
    begin with, n (n + U) for each size that is asked about. Memory: U^2, and n^2 for each kind.

    Parameters
    ----------
    measured
        Of all kinds; one that is left out is one that was never measured.
    noise
        Deviation of the logarithm of one measurement. That of a mean of m is noise / sqrt(m), but at least 0.01.
    before
        A belief from much the same measurements, of which is taken over what is the same. For speed alone.
    """

    def __init__(
        self, measured: Iterable[MeasuredSpeeds] | Table, *, noise: float = 0.05, before: Belief | None = None
    ) -> None:
        if not noise > 0:
            msg = f"noise: must be more than 0, not {noise!r}"
            raise ValueError(msg)
        self._noise = noise
        known: dict[TrainingKind, _Known] = {}
        if before is not None and before._noise == noise:  # noqa: SLF001 - its own
            known = before._measured  # noqa: SLF001 - its own
        self._atlases: dict[Group, Atlas] = {} if before is None else before._atlases.copy()  # noqa: SLF001
        table = measured if isinstance(measured, Table) else Table.of(measured)
        self._measured: dict[TrainingKind, _Known] = self._kinds(table, known)
        found = {kind: known.of for kind, known in self._measured.items() if len(known.of.sizes.counts)}
        self._centre = float(np.mean([told.level for told in found.values()])) if found else 0.0
        #: Kinds by what they share; that is worked out when it is asked about.
        self._members: dict[Group, dict[TrainingKind, Kind]] = {group_of(kind): {} for kind in sorted(found)}
        for kind, told in found.items():
            self._members[group_of(kind)][kind] = told
        self._groups: dict[Group, Shared] = {}
        self._lattices: dict[Group, Lattice] = {} if before is None else before._lattices.copy()  # noqa: SLF001
        self._crossed: Recent[tuple[Group, Bounds], tuple[Floats, Floats, Floats]] = Recent(MOST_OF_GROUP)
        self._known: Recent[tuple[TrainingKind, Bounds, tuple[SpeedPoint, ...]], tuple[Floats, Floats]]
        self._known = Recent(_MOST_OF_GRIDS)
        self._grids: Recent[tuple[TrainingKind, Bounds, tuple[SpeedPoint, ...], float], tuple[Floats]]
        self._grids = Recent(_MOST_OF_GRIDS)

    def _kinds(self, table: Table, before: Mapping[TrainingKind, _Known]) -> dict[TrainingKind, _Known]:
        """What was measured of each kind; what is the same ``before`` is taken over."""
        found: dict[TrainingKind, _Known | None] = {}
        news: dict[Group, list[TrainingKind]] = defaultdict(list)
        rows = {kind: table.rows[part, : JOBS + 1] for kind, part in zip(table.kinds, table.parts, strict=True)}
        for kind, points in rows.items():
            was = before.get(kind)
            found[kind] = was if was is not None and np.array_equal(was.rows, points) else None
            if found[kind] is None:
                news[group_of(kind)].append(kind)
        said = table.some(usable_in(table))
        for group, kinds in news.items():
            atlas = self._atlases.setdefault(group, Atlas(group))
            earlier = [before[kind].of if kind in before else None for kind in kinds]
            for kind, made in zip(kinds, kinds_of(said.among(tuple(kinds)), self._noise, atlas, earlier), strict=True):
                found[kind] = _Known(rows[kind].copy(), failed_in(rows[kind]), made)
        return {kind: known for kind, known in found.items() if known is not None}

    @property
    def kinds(self) -> tuple[TrainingKind, ...]:
        """Kinds that were measured."""
        return tuple(chain.from_iterable(self._members.values()))

    def grid(self, request: JobRequest, optimism: float = 0.0, own: tuple[SpeedPoint, ...] = ()) -> Floats:
        """Samples per second that are believed, or hoped for, as ``KnownSpeeds.grid`` has them.

        ``exp(mean + optimism x deviation)``, where of the variances the least of the grid is taken off: what is not
        known of all sizes alike is no reason to prefer one.

        ``own`` is what a job showed itself, if it is of a kind of its own (see ``mean_sd``).

        Returns
        -------
        Shape (max_ps + 1, max_workers + 1), zeros where a needed count is 0 or a run failed. Jobs that are alike are
        given one and the same array; it is not to be written to.
        """
        asked = (TrainingKind.of(request), Bounds(request.max_workers, request.max_ps), own, optimism)
        return self._grids.get(asked, lambda: _hope(*self._to_hope(request, optimism, own), optimism))[0]

    def look_ahead(self, asked: Iterable[tuple[JobRequest, float, tuple[SpeedPoint, ...]]]) -> None:
        """Work out together what ``grid`` will say of jobs of kinds of their own: far faster than one by one."""
        together: dict[tuple[Group, Bounds], dict[tuple[TrainingKind, tuple[SpeedPoint, ...]], list[float]]] = {}
        for request, optimism, own in asked:
            kind, bounds = TrainingKind.of(request), Bounds(request.max_workers, request.max_ps)
            at_once = kind.architecture is Architecture.PS and 1 <= min(bounds) <= max(bounds) <= _MOST_COUNTS
            if at_once and group_of(kind) in self._members and (kind, bounds, own, optimism) not in self._grids:
                together.setdefault((group_of(kind), bounds), {}).setdefault((kind, own), []).append(optimism)
        for (group, bounds), jobs in together.items():
            table = Table.of(starmap(MeasuredSpeeds, jobs))
            table = table.some(usable_in(table))
            # Who showed nothing but holes is of its kind.
            moved = [job for job, part in zip(jobs, table.parts, strict=True) if part.start < part.stop]
            shared = self._shared(group)
            if shared is None or not moved:
                continue
            found = self._looks(shared, bounds, table, spread=any(map(any, jobs.values())))
            if found is None:
                continue
            for (kind, own), mean, deviation in zip(moved, *found, strict=True):
                self._pierced(kind, own, (mean, deviation))
                for optimism in jobs[kind, own]:
                    self._grids.get((kind, bounds, own, optimism), partial(_hope, mean, deviation, optimism))

    def _looks(self, shared: Shared, bounds: Bounds, table: Table, *, spread: bool) -> tuple[Floats, Floats] | None:
        """Of J jobs of kinds of their own with servers what ``_look`` finds, but for the last digits.

        ``table`` has some points of each. Without ``spread`` deviations are 0.

        Returns
        -------
        Means and deviations, shape (J, PSs + 1, workers + 1); None where these have too many sizes.
        """
        _, _, at, usual = _looked_at(bounds, has_ps=True)
        counts = table.counts
        among = self._atlases[shared.lattice.group].among(counts)
        if among is None:
            return None
        every, places = among
        trend = every.trend[places]
        logs, noise, _ = measured_of(table.rows, trend, self._noise)
        nearest = shared.lattice.nearest(every.at[places])
        beyond = logs - self._centre - shared.believed[nearest]
        many = np.diff(table.ends, prepend=0)
        many = many[many > 0]
        first = many.cumsum() - many
        mean, wide, left = self._cross(shared, bounds, at)
        across = every.across(bounds, at)
        found = np.empty((len(many), len(at)))
        variance = np.empty_like(found)
        if spread:
            # |wide - S gain|^2, with columns S of what is shared, without an array as wide as what is shared for each.
            usually = LEVEL + OWN_PART[1] + left + np.einsum("ij,ij->j", wide, wide)
            crossed, certain = 2.0 * (shared.spread.T @ wide), shared.spread.T @ shared.spread
        # Jobs with as many sizes go together, but only so many: each has an array of its sizes by all.
        for size in set(many.tolist()):
            (alike,) = np.nonzero(many == size)
            for of in np.split(alike, range(_MOST_AT_ONCE, len(alike), _MOST_AT_ONCE)):
                those = first[of][:, None] + np.arange(size)
                where = places[those]
                covariances = every.own[where[:, :, None], where[:, None]]
                covariances[:, np.arange(size), np.arange(size)] += noise[those] + ROUGH**2
                if not spread:
                    weighed = np.linalg.solve(covariances, beyond[those][:, :, None])[:, :, 0]
                    found[of] = (weighed[:, None] @ across[where])[:, 0]
                    continue
                gain = np.linalg.solve(covariances, across[where])
                found[of] = (beyond[those][:, None] @ gain)[:, 0]
                near = nearest[those]
                less = across[where] + crossed[near] - certain[near[:, :, None], near[:, None]] @ gain
                variance[of] = np.maximum(usually - np.einsum("jns,jns->js", gain, less), 0.0)
        shape = len(many), bounds.ps + 1, bounds.workers + 1
        means, deviations = np.full(shape, -np.inf), np.zeros(shape)
        means[:, 1:, 1:] = (self._centre + usual + (mean + found)).reshape(-1, bounds.ps, bounds.workers)
        within = (counts <= bounds).all(axis=1)
        there = np.repeat(np.arange(len(many)), many)[within], counts[within, 1], counts[within, 0]
        noise = noise[within]
        gain = ROUGH**2 / (ROUGH**2 + noise)
        means[there] += gain * ((logs + trend)[within] - means[there])
        if spread:
            deviations[:, 1:, 1:] = np.sqrt(variance + ROUGH**2).reshape(-1, bounds.ps, bounds.workers)
            deviations[there] = np.sqrt((1.0 - gain) ** 2 * (deviations[there] ** 2 - ROUGH**2) + gain * noise)
        return means, deviations

    def mean_sd(self, request: JobRequest, own: tuple[SpeedPoint, ...] = ()) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of samples/s; not to be written to.

        With speeds in ``own`` the job is taken as the only one of its kind: they and what kinds share are all that is
        known of it. Sizes with speed 0 in ``own`` are holes in any case.

        Returns
        -------
        Two of shape (max_ps + 1, max_workers + 1); -inf and 0 where nothing is trained (see ``grid``).
        """
        return self._mean_sd(TrainingKind.of(request), Bounds(request.max_workers, request.max_ps), own)

    def of_each(
        self, kinds: Sequence[TrainingKind], request: JobRequest, sizes: Sequence[Allocation]
    ) -> tuple[Floats, Floats]:
        """``mean_sd`` of a job at some sizes were it of each of some kinds; two of shape (kinds, sizes)."""
        bounds = Bounds(request.max_workers, request.max_ps)
        workers, ps = np.array(sizes).T
        places = ps * (bounds.workers + 1) + workers
        found = np.stack([[each.take(places) for each in self._mean_sd(kind, bounds, ())] for kind in kinds], axis=1)
        return found[0], found[1]

    def _mean_sd(self, kind: TrainingKind, bounds: Bounds, own: tuple[SpeedPoint, ...]) -> tuple[Floats, Floats]:
        return self._known.get((kind, bounds, own), lambda: self._find(kind, bounds, own))

    def _find(
        self, kind: TrainingKind, bounds: Bounds, own: tuple[SpeedPoint, ...], *, spread: bool = True
    ) -> tuple[Floats, Floats]:
        found = self._look(kind, bounds, self._told_of(kind, own), spread=spread)
        self._pierced(kind, own, found)
        for array in found:
            array.flags.writeable = False
        return found

    def _pierced(self, kind: TrainingKind, own: tuple[SpeedPoint, ...], found: tuple[Floats, Floats]) -> None:
        """Make holes of sizes that failed, in means and deviations."""
        known = self._measured.get(kind)
        still = [Bounds(*point.allocation) for point in own if point.samples_per_second == 0.0]
        for size in {*(() if known is None else known.failed), *still}:
            _pierce(found, size, has_ps=kind.architecture is Architecture.PS)

    def _told_of(self, kind: TrainingKind, own: tuple[SpeedPoint, ...]) -> Told | None:
        """What is known of a kind, or of a job of a kind of its own."""
        shared = self._shared(group_of(kind))
        if shared is None or not own:
            return None if shared is None else shared.told.get(kind)
        table = Table.of([MeasuredSpeeds(kind, own)])
        rows = table.rows[usable_in(table)]
        if not len(rows):
            return shared.told.get(kind)
        sizes = self._atlases[group_of(kind)].sizes(counts_of(rows))
        told = Measured(sizes, *measured_of(rows, sizes.trend, self._noise))
        points = Points(owns([(sizes, told.noise)])[0], told.logs - self._centre, shared.lattice.nearest(sizes.at))
        return Told(points, sizes, told, None)

    def _to_hope(self, request: JobRequest, optimism: float, own: tuple[SpeedPoint, ...]) -> tuple[Floats, Floats]:
        """Means and deviations; of a job of a kind of its own of which no more is hoped nobody asks for these."""
        if optimism or not own:
            return self.mean_sd(request, own)
        bounds = Bounds(request.max_workers, request.max_ps)
        return self._find(TrainingKind.of(request), bounds, own, spread=False)

    def _shared(self, group: Group) -> Shared | None:
        """What the kinds of a group share, if one was measured."""
        if group not in self._groups and group in self._members:
            shared = self._groups[group] = Shared.of(
                group, self._members[group], self._centre, self._lattices.get(group)
            )
            self._lattices[group] = shared.lattice
        return self._groups.get(group)

    def _look(self, kind: TrainingKind, bounds: Bounds, told: Told | None, *, spread: bool) -> tuple[Floats, Floats]:
        """Means and, unless without ``spread`` they need not be right, deviations."""
        shape = (bounds.ps + 1, bounds.workers + 1)
        mean, deviation = np.full(shape, -np.inf), np.zeros(shape)
        has_ps = kind.architecture is Architecture.PS
        if bounds.workers < 1 or (has_ps and bounds.ps < 1):
            return mean, deviation
        workers, ps, at, trend = _looked_at(bounds, has_ps=has_ps)
        group = group_of(kind)
        own = None if told is None else told.points
        # What counts for a size alone is weighed by deviations.
        spread |= told is not None and told.alone is not None
        found, apart = self._at(group, own, bounds, at, trend, spread=spread)
        if len(workers) < bounds.workers or (has_ps and len(ps) < bounds.ps):
            found, apart = (_interpolated(values, workers, ps, bounds, has_ps=has_ps) for values in (found, apart))
            if told is not None:
                within, where = told.sizes.inside(bounds)
                at, trend = told.sizes.at[within], told.sizes.trend[within]
                found[where], apart[where] = self._at(group, own, None, at, trend, spread=spread)
        variance = apart**2 + ROUGH**2
        if told is not None:
            _tell_kept(told.kept, bounds, found, variance)
            if told.alone is not None:
                _tell_alone(told.alone, bounds, found, variance)
        mean[1 if has_ps else 0 :, 1:] = found.reshape(-1, bounds.workers)
        deviation[1 if has_ps else 0 :, 1:] = np.sqrt(variance).reshape(-1, bounds.workers)
        return mean, deviation

    def _at(
        self, group: Group, own: Points | None, bounds: Bounds | None, at: Floats, trend: Floats, *, spread: bool
    ) -> tuple[Floats, Floats]:
        """Mean and deviation (0 without ``spread``) at sizes, which may be those of some bounds; shape (sizes,)."""
        shared, variance = self._shared(group), np.full(len(at), LEVEL + OWN_PART[1])
        if shared is None:
            return self._centre + trend, np.sqrt(variance + SHARED_PART[1])
        mean, wide, left = self._cross(shared, bounds, at)
        if own is not None:
            gain, variance = own.own.gain(bounds, at)
            mean = mean + (own.logs - shared.believed[own.shared]) @ gain
        mean = self._centre + trend + mean
        if not spread:
            return mean, np.zeros_like(mean)
        if own is not None:
            wide = wide - shared.spread.take(own.shared, axis=1) @ gain
        return mean, np.sqrt(variance + left + np.einsum("ij,ij->j", wide, wide))

    def _cross(self, shared: Shared, bounds: Bounds | None, at: Floats) -> tuple[Floats, Floats, Floats]:
        """``Shared.at``, kept by bounds."""
        if bounds is None:
            return shared.at(None, at)
        return self._crossed.get((shared.lattice.group, bounds), lambda: shared.at(bounds, at))


class _Known(NamedTuple):
    """What a belief keeps of a kind."""

    #: All that was measured, as ``Table`` has it.
    rows: Floats
    failed: tuple[Bounds, ...]
    of: Kind


def _hope(mean: Floats, deviation: Floats, optimism: float) -> tuple[Floats]:
    """What ``Belief.grid`` says, alone in a tuple; not to be written to."""
    if optimism:
        variance, trains = deviation**2, np.isfinite(mean)
        least = variance.min(where=trains, initial=np.inf)
        beyond = np.maximum(variance - least, 0.0, where=trains, out=np.zeros_like(variance))
        mean = mean + optimism * np.sqrt(beyond)
    grid: Floats = np.exp(mean)
    grid.flags.writeable = False
    return (grid,)


def _tell_kept(told: Measured, bounds: Bounds, mean: Floats, variance: Floats) -> None:
    """Have sizes that count for others have their roughness too; arrays are of all from 1 worker and 1 PS on."""
    within, where = told.sizes.inside(bounds)
    noise, before = told.noise[within], mean[where]
    gain = ROUGH**2 / (ROUGH**2 + noise)
    mean[where] = before + gain * ((told.logs + told.sizes.trend)[within] - before)
    variance[where] = (1.0 - gain) ** 2 * (variance[where] - ROUGH**2) + gain * noise


def _tell_alone(told: Measured, bounds: Bounds, mean: Floats, variance: Floats) -> None:
    """Have what was measured at other sizes count there."""
    within, where = told.sizes.inside(bounds)
    noise, expected, before = told.noise[within], mean[where], variance[where]
    off = (told.logs + told.sizes.trend)[within] - expected
    doubt = off**2
    noise = noise + np.where(told.single[within] & (doubt > UNEXPECTED**2 * (before + noise)), doubt, 0.0)
    gain = before / (before + noise)
    mean[where] = expected + gain * off
    variance[where] = before * (1.0 - gain)


def _pierce(found: tuple[Floats, Floats], size: Bounds, *, has_ps: bool) -> None:
    """Make a size a hole: nothing is trained there."""
    mean, deviation = found
    if size.ps < mean.shape[0] and size.workers < mean.shape[1]:
        where = (size.ps if has_ps else slice(None), size.workers)
        mean[where], deviation[where] = -np.inf, 0.0


@lru_cache(maxsize=256)
def _looked_at(bounds: Bounds, *, has_ps: bool) -> tuple[Floats, Floats, Floats, Floats]:
    """Counts of workers and of PSs that are looked at, log2 of all sizes of them, trend; not to be written to."""
    workers, ps = _counts(bounds.workers), _counts(bounds.ps) if has_ps else np.ones(1)
    at = np.log2(np.stack(np.meshgrid(workers, ps), axis=-1).reshape(-1, 2))
    return workers, ps, at, trend_of(at, has_ps=has_ps)


def _counts(most: int) -> Floats:
    """Counts of one role that are looked at: all, or where there are many, more and more apart."""
    if most <= _MOST_COUNTS:
        return np.arange(1.0, most + 1.0)
    apart = np.round(np.geomspace(_ALL_COUNTS, most, _MOST_COUNTS - _ALL_COUNTS + 1))
    return np.array([*range(1, _ALL_COUNTS), *dict.fromkeys(apart.tolist())], dtype=np.float64)


def _interpolated(values: Floats, workers: Floats, ps: Floats, bounds: Bounds, *, has_ps: bool) -> Floats:
    """Values at all counts, linear in the logarithms of counts; of all PSs with 1 worker, then with 2 and so on."""
    wanted = np.log2(np.arange(1.0, bounds.workers + 1.0))
    rows = np.stack([np.interp(wanted, np.log2(workers), row) for row in values.reshape(len(ps), len(workers))])
    if has_ps:
        wanted = np.log2(np.arange(1.0, bounds.ps + 1.0))
        rows = np.stack([np.interp(wanted, np.log2(ps), column) for column in rows.T], axis=1)
    return rows.reshape(-1)
