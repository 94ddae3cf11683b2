"""Many simulated clusters stepped at once: the rules of preset ``dl2-paper`` on arrays, for learning.

``dl2d.simulation.replay`` says what is true, one cluster at a time; this agrees with it to the last digits (a test
holds the two together) and is some thousand times faster. Axis 0 of every array is the cluster. No loop here runs over
clusters or jobs, except where a cluster draws from its own generator: at resets, and in each slot under speed noise.

The rules: tasks go one at a time, and a worker and a PS that are given together as one (a bundle), to the node with the
least used resources (plain sum over types, ties by node order), and to no other; a slot's work is speed x slot_seconds
/ samples_per_epoch; a job that ends inside its last slot counts the used fraction, and what it holds stays blocked
until the slot is over; then the cluster is emptied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.simulation.vectorized.workload_arrays import NEVER, Library

#: What is placed as one: a worker, a PS, or one of both.
_WORKER, _PS, _BUNDLE = range(3)
#: Load of a node that is not there: never the least.
_ABSENT: Final = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """What the jobs of k clusters did in a slot. Arrays of shape (k, J) are 0 for jobs that were not there."""

    #: The clusters, shape (k,), and the slot that is over in each.
    which: Ints
    slot: Ints
    #: Jobs that were admitted and had not ended when the slot began.
    present: Bools
    #: Workers and PSs that each job had.
    workers: Ints
    ps: Ints
    #: Epochs that the job does in a whole slot at this size, not cut off where it ends; and as a share of those that it
    #: declared.
    epochs: Floats
    rate: Floats
    #: Share of its declared epochs that it did: as ``rate``, cut off at its end.
    progress: Floats
    #: Jobs that ended in this slot, and after which fraction of it; 1 for others.
    ended: Bools
    fraction: Floats


class Clusters:
    """N clusters, each with a workload of a library. Arrays that are public are for reading.

    Parameters
    ----------
    library
        The workloads.
    count
        N.
    speed_noise
        s: what a job does in a slot is multiplied by 1 + U(-s, s), drawn for each job and slot.
    epochs_error
        e: declared epochs are the real ones times 1 + U(-e, e), drawn for each job at a reset; with 0, and only then,
        the workload's own declared epochs hold.

    Raises
    ------
    ValueError
        A number is out of bounds: N below 1, s or e not in [0, 1).
    """

    def __init__(self, library: Library, count: int, *, speed_noise: float = 0.0, epochs_error: float = 0.0) -> None:
        if count < 1:
            raise ValueError(f"count: expected 1 or more clusters, got {count}")
        for name, value in (("speed_noise", speed_noise), ("epochs_error", epochs_error)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}: expected a number from 0 to less than 1, got {value}")
        self.library = library
        self.count = count
        self._noise = speed_noise
        self._error = epochs_error
        _, jobs, nodes, resources = library.size
        self._jobs, self._nodes, self._resources = jobs, nodes, resources
        self.generators: list[np.random.Generator | None] = [None] * count
        #: Which workload of the library each cluster has.
        self.workload: Ints = np.zeros(count, dtype=np.int64)
        #: The slot that is being filled; slots without any job are passed over. And how many slots were filled.
        self.slot: Ints = np.zeros(count, dtype=np.int64)
        self.played: Ints = np.zeros(count, dtype=np.int64)
        #: Jobs that have not ended, of which some are still to come.
        self.left: Ints = np.zeros(count, dtype=np.int64)
        # Of the workload, gathered at resets; shapes as in the library with N for K.
        self.submit: Ints = np.full((count, jobs), NEVER, dtype=np.int64)
        self.epochs: Floats = np.zeros((count, jobs))
        self.declared: Floats = np.ones((count, jobs))
        self.model: Ints = np.zeros((count, jobs), dtype=np.int64)
        self.least: Ints = np.zeros((count, jobs, 2), dtype=np.int64)
        self.most: Ints = np.zeros((count, jobs, 2), dtype=np.int64)
        #: What a worker, a PS and a bundle of both ask for, shape (N, J, 3, R); and the first two alone.
        self.asks: Ints = np.zeros((count, jobs, 3, resources), dtype=np.int64)
        self.demand: Ints = self.asks[:, :, :_BUNDLE]
        #: Capacity of whole clusters, shape (N, R).
        self.capacity: Ints = np.zeros((count, resources), dtype=np.int64)
        #: Of each job: admitted and not ended; workers and PSs, shape (N, J, 2); epochs done; when it ended (-1).
        self.present: Bools = np.zeros((count, jobs), dtype=np.bool_)
        self.sizes: Ints = np.zeros((count, jobs, 2), dtype=np.int64)
        self.done: Floats = np.zeros((count, jobs))
        self.last_slot: Ints = np.full((count, jobs), -1, dtype=np.int64)
        self.fraction: Floats = np.zeros((count, jobs))
        #: Free amounts of each node, shape (R, N, M); used amounts of each cluster, shape (R, N); and the placement's
        #: order of nodes: the sum of used amounts, shape (N, M).
        self.free: Ints = np.zeros((resources, count, nodes), dtype=np.int64)
        self.used: Ints = np.zeros((resources, count), dtype=np.int64)
        self.load: Ints = np.zeros((count, nodes), dtype=np.int64)
        # The same memory as vectors, for fast gathering.
        self._flat_free = [part.reshape(-1) for part in self.free]
        self._flat_load = self.load.reshape(-1)
        self._flat_sizes = self.sizes.reshape(-1)
        self._flat_demand = self.asks.reshape(-1, resources)
        self._speeds = library.speeds.reshape(-1)
        #: Where in ``_speeds`` the size (0, 0) of a job stands.
        self._speed: Ints = np.zeros((count, jobs), dtype=np.int64)
        self._samples: Floats = np.ones((count, jobs))
        self._seconds: Floats = np.ones(count)

    @property
    def over(self) -> Bools:
        """Clusters whose jobs have all ended, shape (N,)."""
        over: Bools = self.left == 0
        return over

    def completion(self) -> Floats:
        """Completion times in slots (last slot - submit slot + used fraction of it), shape (N, J); NaN: not ended."""
        return np.where(self.last_slot >= 0, self.last_slot - self.submit + self.fraction, np.nan)

    def mean_completion(self, unended: Floats | float) -> Floats:
        """Mean completion time of the jobs of each cluster, shape (N,); that of a job that has not ended is given."""
        times = self.completion()
        times = np.where(np.isnan(times), unended, times)
        is_job = np.arange(self._jobs) < self.library.jobs[self.workload][:, None]
        means: Floats = np.where(is_job, times, 0.0).sum(axis=1) / is_job.sum(axis=1)
        return means

    def reset(
        self,
        which: Ints,
        workloads: Ints | None = None,
        generators: Sequence[np.random.Generator] | None = None,
    ) -> None:
        """Begin anew, in the first slot that has a job.

        Parameters
        ----------
        which
            The clusters, shape (k,), distinct.
        workloads
            Their workloads, shape (k,); by default each draws one with its generator.
        generators
            Their generators from now on, one for each: what a cluster draws does not depend on its neighbours. By
            default they go on with those that they have.

        Raises
        ------
        ValueError
            A cluster has no generator yet, and none is given.
        """
        library = self.library
        for place, cluster in enumerate(which.tolist()):
            generator = generators[place] if generators is not None else self.generators[cluster]
            if generator is None:
                raise ValueError(f"generators: cluster {cluster} has none yet; give it one at its first reset")
            self.generators[cluster] = generator
            number = int(workloads[place] if workloads is not None else generator.integers(len(library.ids)))
            self.workload[cluster] = number
            self.declared[cluster] = library.declared[number]
            if self._error:
                jobs = library.jobs[number]
                factors = 1.0 + generator.uniform(-self._error, self._error, jobs)
                self.declared[cluster, :jobs] = library.epochs[number, :jobs] * factors
        chosen = self.workload[which]
        self.submit[which] = library.submit[chosen]
        self.epochs[which] = library.epochs[chosen]
        self.model[which] = library.model[chosen]
        self.least[which] = library.least[chosen]
        self.most[which] = library.most[chosen]
        self.asks[which, :, :_BUNDLE] = library.demand[chosen]
        self.asks[which, :, _BUNDLE] = library.demand[chosen].sum(axis=2)
        _, rows, columns = library.speeds.shape
        self._speed[which] = library.speed[chosen] * (rows * columns)
        self._samples[which] = library.samples[chosen]
        self._seconds[which] = library.slot_seconds[chosen]
        self.capacity[which] = np.maximum(library.capacity[chosen], 0).sum(axis=1)
        self.left[which] = library.jobs[chosen]
        self.done[which] = 0.0
        self.last_slot[which] = -1
        self.fraction[which] = 0.0
        self.played[which] = 0
        self.slot[which] = 0
        self._admit(which)
        self._empty(which)

    def heads(self) -> Ints:
        """The least used node of each cluster, shape (N,), as cluster x M + node."""
        heads: Ints = self.load.argmin(axis=1) + np.arange(self.count) * self._nodes
        return heads

    def lay(self, which: Ints, tasks: Ints, amounts: Ints) -> Ints:
        """Give tasks in turns, each task to the least used node; a turn ends at the first that has no room there.

        A cluster in which a job would be left with less than its minimum size is left as it was.

        Parameters
        ----------
        which
            Clusters, distinct, shape (k,).
        tasks, amounts
            In each of T turns, job x 3 + what (0: a worker, 1: a PS, 2: a bundle of both), and how many; shape (k, T).
            No job has more than its most then: the caller has seen to that.

        Returns
        -------
        Ints
            How many of each turn have a place, shape (k, T); -1 in clusters that are left as they were.
        """
        placed, steps = self._lay(which, tasks, amounts, ends_at_failure=False)
        at = which[:, None], tasks // 3
        few = (self.sizes[at] < self.least[at]).any(axis=2)
        undone: Bools = np.any(few & (amounts > 0), axis=1)
        if undone.any():
            for rows, nodes, given in steps:
                back = undone[rows]
                self._give(which[rows[back]], nodes[back], given[back], -1)
            placed[undone] = -1
        return placed

    def _lay(
        self, which: Ints, tasks: Ints, amounts: Ints, *, ends_at_failure: bool
    ) -> tuple[Ints, list[tuple[Ints, Ints, Ints]]]:
        """Give tasks as ``lay`` does, whatever sizes jobs are left with.

        Parameters
        ----------
        ends_at_failure
            Whether the first task without room ends all turns of its cluster, not only its own.

        Returns
        -------
        How many of each turn have a place, shape (k, T), and for each step, which gives at most one task in each
        cluster: indices in ``which``, nodes, and tasks given.
        """
        placed = np.zeros_like(amounts)
        end = amounts.shape[1]
        # The first turn with tasks from each one on; T where there is none.
        following = np.full((len(which), end + 1), end)
        following[:, :-1] = np.where(amounts > 0, np.arange(end), end)
        following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
        steps: list[tuple[Ints, Ints, Ints]] = []
        rows, turns = np.arange(len(which)), following[:, 0]
        while True:
            going = turns < end
            rows, turns = rows[going], turns[going]
            if not len(rows):
                return placed, steps
            asked = tasks[rows, turns]
            nodes, room = self._heads(which[rows], asked)
            self._give(which[rows[room]], nodes[room], asked[room], 1)
            steps.append((rows[room], nodes[room], asked[room]))
            placed[rows, turns] += room
            over = ~room | (placed[rows, turns] == amounts[rows, turns])
            turns = np.where(over, following[rows, turns + 1], turns)
            if ends_at_failure:
                turns[~room] = end

    def fill(self, targets: Ints, which: Ints) -> None:
        """Fill empty clusters towards wanted sizes, task by task; it ends at the first that does not fit.

        Jobs are served in submit order, each whole before the next, bundles first.

        Parameters
        ----------
        targets
            Workers and PSs of each job, shape (k, J, 2). They are cut to the job's most; of jobs that are not present
            they are not looked at.
        which
            The clusters, distinct, shape (k,).
        """
        targets = np.minimum(targets, self.most[which]) * self.present[which][:, :, None]
        kinds, amounts = zip(*in_bundles(targets), strict=True)
        tasks = (np.arange(self._jobs)[:, None] * 3 + np.array(kinds)).reshape(-1)
        tasks = np.broadcast_to(tasks, (len(which), len(tasks)))
        self._lay(which, tasks, np.stack(amounts, axis=2).reshape(len(which), -1), ends_at_failure=True)

    def end_slot(self, which: Ints) -> SlotReport:
        """Run the slot in these clusters (shape (k,), distinct): work, admit those who come next, empty the cluster.

        A cluster that is over stays as it is.
        """
        sizes = self.sizes[which]
        present = self.present[which]
        workers, ps = sizes[:, :, 0], sizes[:, :, 1]
        runs = (sizes >= self.least[which]).all(axis=2) & present
        columns = self.library.speeds.shape[2]
        speed = self._speeds[self._speed[which] + ps * columns + workers]
        # In the order of Workload.epochs_in_slot, so that results are the same to the last bit.
        epochs = np.where(runs, speed * self._seconds[which][:, None] / self._samples[which], 0.0)
        if self._noise:
            for place, cluster in enumerate(which.tolist()):
                jobs = int(self.library.jobs[self.workload[cluster]])
                generator = self.generators[cluster]
                assert generator is not None  # reset gave one
                epochs[place, :jobs] *= 1.0 + generator.uniform(-self._noise, self._noise, jobs)
        done = self.done[which]
        left = self.epochs[which] - done
        ended = (epochs > 0.0) & (epochs >= left)
        declared = self.declared[which]
        fraction = np.ones_like(epochs)
        # Rounding may leave nothing to do to a job that was not seen to end.
        np.divide(np.maximum(left, 0.0), epochs, out=fraction, where=ended)
        progress = np.where(ended, left, epochs)
        slot = self.slot[which]
        report = SlotReport(
            which=which, slot=slot, present=present, workers=workers, ps=ps,
            epochs=epochs, rate=epochs / declared, progress=progress / declared, ended=ended, fraction=fraction,
        )  # fmt: skip
        self.done[which] = done + progress
        if ended.any():
            rows, jobs_ = np.nonzero(ended)
            at = which[rows], jobs_
            self.last_slot[at] = slot[rows]
            self.fraction[at] = fraction[rows, jobs_]
            self.left[which] -= ended.sum(axis=1)
        going = present.any(axis=1)
        self.slot[which] = slot + going
        self.played[which] += going
        self._admit(which)
        self._empty(which)
        return report

    def _admit(self, which: Ints) -> None:
        """Jobs that have come by now; where there is none, time goes on to the next one's slot."""
        coming = np.where(self.last_slot[which] < 0, self.submit[which], NEVER)
        slot = self.slot[which]
        present = coming <= slot[:, None]
        idle = ~present.any(axis=1) & (self.left[which] > 0)
        if idle.any():
            slot[idle] = coming[idle].min(axis=1)
            self.slot[which] = slot
            present = coming <= slot[:, None]
        self.present[which] = present

    def _empty(self, which: Ints) -> None:
        capacity = self.library.capacity[self.workload[which]]
        self.sizes[which] = 0
        self.free[:, which] = np.moveaxis(capacity, 2, 0)
        self.used[:, which] = 0
        self.load[which] = np.where(capacity[:, :, 0] < 0, _ABSENT, 0)

    def _heads(self, which: Ints, tasks: Ints) -> tuple[Ints, Bools]:
        """The least used node of each, as cluster x M + node, and whether it has room for a task; shapes (k,)."""
        most = 2 * len(which) >= self.count
        nodes: Ints = self.load.argmin(axis=1)[which] if most else self.load[which].argmin(axis=1)
        nodes += which * self._nodes
        demand = self._flat_demand[which * (3 * self._jobs) + tasks]
        room = demand[:, 0] <= self._flat_free[0][nodes]
        for number in range(1, self._resources):
            room &= demand[:, number] <= self._flat_free[number][nodes]
        return nodes, room

    def _give(self, which: Ints, nodes: Ints, tasks: Ints, sign: int) -> None:
        """Give (or, with -1, take back) a task, job x 3 + kind, on one node of each cluster; shapes (k,)."""
        jobs, kinds = np.divmod(which * (3 * self._jobs) + tasks, 3)
        self._flat_sizes[2 * jobs] += sign * (kinds != _PS)
        self._flat_sizes[2 * jobs + 1] += sign * (kinds != _WORKER)
        demand = sign * self._flat_demand[3 * jobs + kinds]
        for number, amounts in enumerate(demand.T):
            self._flat_free[number][nodes] -= amounts
            self.used[number][which] += amounts
            self._flat_load[nodes] += amounts


def in_bundles(asked: Ints) -> tuple[tuple[int, Ints], ...]:
    """How many of each kind workers and PSs, shape (..., 2), make, in the order in which they are given."""
    bundles: Ints = asked.min(axis=-1)
    return (_BUNDLE, bundles), (_WORKER, asked[..., 0] - bundles), (_PS, asked[..., 1] - bundles)
