"""Sizing jobs one task at a time, as DL2 does (Peng et al., arXiv 1909.06040, section 4), in many clusters at once.

In each slot the jobs that are there, in submit order, are gone through in batches of J. A decision adds a worker, a PS
or a bundle of both to a job of the batch, or ends the batch (void): then come the next J jobs, or, after the last
batch, the slot is run. A job that has less than its minimum size is given what it lacks of that, as a whole, whichever
of the three is chosen. Everything a policy may see of a batch is its observation; what it may do is the mask.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.policies.dl2_paper.observation import Layout, Observations, dominant_share, job_features, size_features
from dl2d.simulation.vectorized.clusters import Clusters, SlotReport, in_bundles
from dl2d.throughput.remaining_time import epochs_left_of_all, ranks_by_remaining_time, speeds_or_means

Masks = NDArray[np.int8]

_IMPOSSIBLE = 2**62


class Windows:
    """Windows of J jobs on each of N clusters.

    Parameters
    ----------
    clusters
        The clusters; only this object may change them.
    jobs
        J.
    first_bundles
        Give each job its minimum size, in submit order, before the first decision of a slot, as the DL2 authors' code
        does with a bundle (their paper has nothing of it).
    extras
        Show each job's place in the batch and the remaining fraction of its epochs, too, which is what schedulers go by
        that serve one job after the other, and the logarithms of its tasks, for small numbers of them to differ more.
    remaining_times
        Show the remaining time of each job, and its place in this order.
    """

    def __init__(
        self, clusters: Clusters, jobs: int = 20, *, first_bundles: bool = False, extras: bool = False,
        remaining_times: bool = False,
    ) -> None:  # fmt: skip
        if jobs < 1:
            raise ValueError(f"jobs: expected a window of 1 or more jobs, got {jobs}")
        self.clusters = clusters
        self.jobs = jobs
        self._first_bundles = first_bundles
        count = clusters.count
        self._resources = len(clusters.library.resources)
        #: Shape of the observations.
        library = clusters.library
        self.layout = Layout(
            window=jobs, types=len(library.models), resources=self._resources, extras=extras,
            asked_sizes=bool(library.usual_sizes), remaining_times=remaining_times,
        )  # fmt: skip
        self._all = np.arange(count)
        #: Jobs in the window, shape (N, J); -1 where there is none. And the number of the batch, from 0.
        self.window: Ints = np.full((count, jobs), -1, int)
        self.batch: Ints = np.zeros(count, int)
        #: Whether more jobs come behind this batch.
        self._more: Bools = np.zeros(count, bool)
        # What a worker, a PS and a bundle of each job of the window ask for, R rows each; impossible where there is no
        # job. Shape (3R, N, J).
        self._asks: Ints = np.full((3 * self._resources, count, jobs), _IMPOSSIBLE, int)
        self._worker, self._ps, self._bundle = self._asks.reshape(3, self._resources, count, jobs)
        #: Whether a job may have one more worker, one more PS; shape (2, N, J).
        self._grows: Bools = np.zeros((2, count, jobs), bool)
        #: What each job lacks of its minimum size, shape (N, J, 2); whether it lacks any, and whether it was found that
        #: there is no room for that, shape (N, J).
        self._lacks: Ints = np.zeros((count, jobs, 2), int)
        self._below: Bools = np.zeros((count, jobs), bool)
        self._refused: Bools = np.zeros((count, jobs), bool)
        self._observation: Observations = np.zeros((count, self.layout.length), dtype=np.float32)
        self._features = self.layout.jobs_of(self._observation)
        self._free = self.layout.free_of(self._observation)
        self._mask: Masks = np.zeros((count, 3 * jobs + 1), dtype=np.int8)
        self._mask[:, -1] = 1
        self._choices = self._mask[:, :-1].reshape(count, jobs, 3)
        #: Capacities of whole clusters, shape (N, R); what a cluster has nothing of counts 1.
        self._capacity: Ints = np.ones((count, self._resources), int)
        #: The least used node of each, as cluster x M + node.
        self._heads: Ints = np.zeros(count, int)

    def observation(self) -> Observations:
        """What a policy sees, shape (N, width): a copy."""
        return self._observation.copy()

    def mask(self) -> Masks:
        """1 for each action that can be carried out, shape (N, 3J + 1): a copy. Void always can."""
        return self._mask.copy()

    def begin(self, which: Ints) -> None:
        """Look at clusters that were reset; then ``refresh``."""
        self._capacity[which] = np.maximum(self.clusters.capacity[which], 1)
        self._begin_slot(which)
        self._show_sizes(*self._look(which))

    def step(self, actions: Ints, which: Ints | None = None) -> SlotReport | None:
        """Carry out one action in each cluster, then ``refresh``.

        Parameters
        ----------
        actions
            Shape (N,), 0 to 3J: 3i, 3i + 1, 3i + 2 add a worker, a PS, both to job i of the window; 3J is void. What
            the mask forbids counts as void.
        which
            The clusters that take part, distinct; all by default.

        Returns
        -------
        SlotReport | None
            Of the clusters whose slots ended; None where none did.
        """
        clusters = self.clusters
        which = self._all if which is None else which
        chosen = actions[which]
        acts = (self._mask[which, chosen] != 0) & (chosen < 3 * self.jobs)
        rows = which[acts]
        shown = []
        if len(rows):
            shown.append(self._act(rows, chosen[acts]))
        ends = which[~acts]
        report = None
        if len(ends):
            more = self._more[ends]
            self.batch[ends] += 1
            over = ends[~more]
            if len(over):
                report = clusters.end_slot(over)
                self._begin_slot(over)
            shown.append(self._look(ends))
        if shown:
            self._show_sizes(*(np.concatenate(parts) for parts in zip(*shown, strict=True)))
        return report

    def refresh(self) -> None:
        """Bring masks and free shares up to date."""
        clusters = self.clusters
        self._heads = clusters.heads()
        room = clusters.free.reshape(self._resources, -1)[:, self._heads][:, :, None]
        fits = [(asked <= room).all(axis=0) for asked in (self._worker, self._ps, self._bundle)]
        if self._below.any():
            # Room for the first task or bundle of what is lacking; whether the rest has room shows when it is given.
            first = np.choose(_first_kind(self._lacks), fits)
            fits = [np.where(self._below, first & ~self._refused, each) for each in fits]
        worker, ps, both = fits
        self._choices[:, :, 0] = worker & self._grows[0]
        self._choices[:, :, 1] = ps & self._grows[1]
        self._choices[:, :, 2] = both & self._grows[0] & self._grows[1]
        self._free[:] = 1.0 - clusters.used.T / self._capacity

    def _act(self, rows: Ints, actions: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns windows, columns and jobs whose sizes are to be shown."""
        clusters = self.clusters
        column, kind = np.divmod(actions, 3)
        jobs = self.window[rows, column]
        heads = self._heads[rows]
        several = np.zeros(len(rows), bool)
        if self._below[rows, column].any():
            # A job below its minimum size is given what it lacks: one task or bundle, of which the mask says that it
            # fits, or several, of which any may not.
            lacks = self._lacks[rows, column]
            several = lacks.max(axis=1) > 1
            kind = np.where(lacks.any(axis=1), _first_kind(lacks), kind)
            if several.any():
                some = rows[several]
                kinds, amounts = zip(*in_bundles(lacks[several]), strict=True)
                placed = clusters.lay(some, jobs[several][:, None] * 3 + np.array(kinds), np.stack(amounts, axis=1))
                self._refused[some, column[several]] = placed[:, 0] < 0
        for number in range(3):
            chosen = (kind == number) & ~several
            clusters.give_one(number, rows[chosen], jobs[chosen], heads[chosen])
        return rows, column, jobs

    def _begin_slot(self, which: Ints) -> None:
        self.batch[which] = 0
        if self._first_bundles:
            self.clusters.fill(self.clusters.least[which], which)

    def _look(self, which: Ints) -> tuple[Ints, Ints, Ints]:
        """Fill windows and observations anew. Returns windows, columns and jobs whose sizes are to be shown."""
        clusters = self.clusters
        present = clusters.present[which]
        place = present.cumsum(axis=1) - (self.batch[which] * self.jobs)[:, None]
        rows, jobs = np.nonzero(present & (place >= 1) & (place <= self.jobs))
        columns = place[rows, jobs] - 1
        self._more[which] = place[:, -1] > self.jobs
        self.window[which] = -1
        self._asks[:, which] = _IMPOSSIBLE
        self._grows[:, which] = False
        self._below[which] = self._refused[which] = False
        self._features[which] = 0.0
        rows = which[rows]
        self.window[rows, columns] = jobs
        at = rows * present.shape[1] + jobs
        flat = rows * self.jobs + columns
        demand = clusters.asks.reshape(-1, 3 * self._resources).take(at, axis=0).T
        self._asks.reshape(len(demand), -1)[:, flat] = demand
        declared = clusters.declared.take(at)
        self._features[rows, columns] = job_features(
            self.layout,
            types=clusters.model.take(at),
            ages=clusters.slot[rows] - clusters.submit.take(at),
            remaining=np.maximum(declared - clusters.done.take(at), 0.0),
            declared=declared,
            places=columns,
            times=self._remaining_times(which)[rows, jobs] if self.layout.remaining_times else None,
        )
        return rows, columns, jobs

    def _remaining_times(self, which: Ints) -> Floats:
        """Remaining time of each job in slots, and its place in this order, shape (N, J, 2)."""
        clusters = self.clusters
        chosen = np.zeros_like(clusters.present)
        chosen[which] = clusters.present[which]
        at = np.nonzero(chosen)
        rows = at[0]
        epochs = epochs_left_of_all(clusters.declared[at], clusters.done[at])
        speeds = speeds_or_means(clusters.last_speed[at], clusters.model[at], rows)
        slots = epochs * clusters.samples[at] / speeds / clusters.seconds[rows]
        times = np.zeros((*clusters.present.shape, 2))
        times[at] = np.stack([slots, ranks_by_remaining_time(slots, rows)], axis=1)
        return times

    def _show_sizes(self, rows: Ints, columns: Ints, jobs: Ints) -> None:
        """Bring the sizes of jobs up to date in the columns of their windows."""
        clusters = self.clusters
        at = rows * clusters.present.shape[1] + jobs
        sizes = clusters.sizes.reshape(-1, 2).take(at, axis=0)
        most = clusters.most.reshape(-1, 2).take(at, axis=0)
        flat = rows * self.jobs + columns
        for role in (0, 1):
            self._grows[role].reshape(-1)[flat] = sizes[:, role] < most[:, role]
        lacks = np.maximum(clusters.least.reshape(-1, 2).take(at, axis=0) - sizes, 0)
        self._lacks.reshape(-1, 2)[flat] = lacks
        self._below.reshape(-1)[flat] = lacks.any(axis=1)
        demand = clusters.asks.reshape(-1, 3, self._resources).take(at, axis=0)
        shares = dominant_share(sizes, demand, self._capacity[rows])
        places = rows[:, None], columns[:, None], self.layout.size_features
        asked = clusters.asked.reshape(-1, 2).take(at, axis=0)
        self._features[places] = size_features(self.layout, sizes, shares, asked)


def _first_kind(lacks: Ints) -> Ints:
    """Kind of the first of the workers and PSs that are lacking, shape (..., 2): a worker (0), a PS (1) or both (2)."""
    return np.where(lacks[..., 0] == 0, 1, np.where(lacks[..., 1] == 0, 0, 2))
