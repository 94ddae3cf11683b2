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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.simulation.vectorized.workload_arrays import NEVER, Library

#: What is placed as one: a worker, a PS, or one of both.
_WORKER, _PS, _BUNDLE = range(3)
#: Load of a node that is not there: never the least.
_ABSENT = 2**62


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
        self.workload: Ints = np.zeros(count, int)
        #: The slot that is being filled; slots without any job are passed over. And how many slots were filled.
        self.slot: Ints = np.zeros(count, int)
        self.played: Ints = np.zeros(count, int)
        #: Jobs that have not ended, of which some are still to come.
        self.left: Ints = np.zeros(count, int)
        # Of the workload, gathered at resets; shapes as in the library with N for K.
        self.submit: Ints = np.full((count, jobs), NEVER, int)
        self.epochs: Floats = np.zeros((count, jobs))
        self.declared: Floats = np.ones((count, jobs))
        self.model: Ints = np.zeros((count, jobs), int)
        self.least: Ints = np.zeros((count, jobs, 2), int)
        self.most: Ints = np.zeros((count, jobs, 2), int)
        self.asked: Ints = np.zeros((count, jobs, 2), int)
        #: What a worker, a PS and a bundle of both ask for, shape (N, J, 3, R); and the first two alone.
        self.asks: Ints = np.zeros((count, jobs, 3, resources), int)
        self.demand: Ints = self.asks[:, :, :_BUNDLE]
        #: Capacity of whole clusters, shape (N, R).
        self.capacity: Ints = np.zeros((count, resources), int)
        #: Of each job: admitted and not ended; workers and PSs, shape (N, J, 2); epochs done; when it ended (-1).
        self.present: Bools = np.zeros((count, jobs), bool)
        self.sizes: Ints = np.zeros((count, jobs, 2), int)
        self.done: Floats = np.zeros((count, jobs))
        #: Speed of each job in its last slot, in samples/s; 0 if it did not train in it.
        self.last_speed: Floats = np.zeros((count, jobs))
        self.last_slot: Ints = np.full((count, jobs), -1, int)
        self.fraction: Floats = np.zeros((count, jobs))
        #: Free amounts of each node, shape (R, N, M); used amounts of each cluster, shape (R, N); and the placement's
        #: order of nodes: the sum of used amounts, shape (N, M).
        self.free: Ints = np.zeros((resources, count, nodes), int)
        self.used: Ints = np.zeros((resources, count), int)
        self.load: Ints = np.zeros((count, nodes), int)
        # The same memory as vectors, for fast gathering.
        self._flat_free = [part.reshape(-1) for part in self.free]
        self._flat_load = self.load.reshape(-1)
        self._flat_sizes = self.sizes.reshape(-1)
        self._flat_demand = self.asks.reshape(-1, resources)
        self._speeds = library.speeds.reshape(-1)
        #: Where in ``_speeds`` the size (0, 0) of a job stands.
        self._speed: Ints = np.zeros((count, jobs), int)
        #: Samples of an epoch of each job, and seconds of a slot, shape (N,).
        self.samples: Floats = np.ones((count, jobs))
        self.seconds: Floats = np.ones(count)

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
        for name in ("submit", "epochs", "model", "least", "most", "asked", "samples"):
            getattr(self, name)[which] = getattr(library, name)[chosen]
        self.asks[which, :, :_BUNDLE] = library.demand[chosen]
        self.asks[which, :, _BUNDLE] = library.demand[chosen].sum(axis=2)
        _, rows, columns = library.speeds.shape
        self._speed[which] = library.speed[chosen] * (rows * columns)
        self.seconds[which] = library.slot_seconds[chosen]
        self.capacity[which] = np.maximum(library.capacity[chosen], 0).sum(axis=1)
        self.left[which] = library.jobs[chosen]
        self.done[which] = self.last_speed[which] = 0.0
        self.last_slot[which] = -1
        self.fraction[which] = 0.0
        self.played[which] = 0
        self.slot[which] = 0
        self._admit(which)
        self._empty(which)

    def give_one(self, kind: int, which: Ints, jobs: Ints, nodes: Ints) -> None:
        """Give a worker (0), a PS (1) or a bundle (2) to one job in each of k clusters, unchecked: the caller has.

        ``nodes``, shape (k,), are where ``heads`` said, as cluster x M + node.
        """
        at = which * self._jobs + jobs
        self._take(which, nodes, self._flat_demand[at * 3 + kind])
        for role in (_WORKER, _PS) if kind == _BUNDLE else (kind,):
            self._flat_sizes[at * 2 + role] += 1

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
        demand = self._flat_demand[which[:, None] * (3 * self._jobs) + tasks]
        placed = amounts.copy()
        loads, free = self.load[which], self.free[:, which]
        fits = np.ones(len(which), bool)
        for rows, asked, many in _runs(demand, amounts):
            weight = asked.sum(axis=1)
            more = evenly(loads[rows], weight, many)
            loads[rows] += more * weight[:, None]
            for number in range(self._resources):
                free[number, rows] -= more * asked[:, number, None]
                fits[rows] &= (free[number, rows] >= 0).all(axis=1, where=more > 0)
        done = which[fits]
        self.load[done] = loads[fits]
        self.free[:, done] = free[:, fits]
        self.used[:, done] += (demand[fits] * amounts[fits][:, :, None]).sum(axis=1).T
        self._count(done, tasks[fits], amounts[fits], 1)
        (rows,) = np.nonzero(~fits)
        if len(rows):
            placed[rows] = self._lay_one_by_one(which[rows], tasks[rows], amounts[rows], demand[rows])
        return placed

    def _lay_one_by_one(self, which: Ints, tasks: Ints, amounts: Ints, demand: Ints) -> Ints:
        """As ``lay``; ``demand`` is that of each turn, shape (k, T, R)."""
        placed = np.zeros_like(amounts)
        ends = np.where(amounts > 0, np.arange(1, amounts.shape[1] + 1), 0).max(axis=1, initial=0)
        laid: list[tuple[Ints, Ints, Ints]] = []
        rows, turns = np.arange(len(which)), np.zeros(len(which), int)
        while True:
            going = turns < ends[rows]
            rows, turns = rows[going], turns[going]
            if not len(rows):
                break
            over = placed[rows, turns] >= amounts[rows, turns]
            turns[over] += 1
            some, turn = rows[~over], turns[~over]
            asked = demand[some, turn]
            nodes, room = self._heads(which[some], asked)
            self._take(which[some[room]], nodes[room], asked[room])
            placed[some[room], turn[room]] += 1
            laid.append((some[room], turn[room], nodes[room]))
            turns[np.flatnonzero(~over)[~room]] += 1
        self._count(which, tasks, placed, 1)
        few = (self.sizes[which] < self.least[which]).any(axis=2)
        undone = np.asarray((np.take_along_axis(few, tasks // 3, axis=1) & (amounts > 0)).any(axis=1))
        if undone.any():
            for some, turn, nodes in laid:
                back = undone[some]
                self._take(which[some[back]], nodes[back], -demand[some[back], turn[back]])
            self._count(which[undone], tasks[undone], placed[undone], -1)
            placed[undone] = -1
        return placed

    def _count(self, which: Ints, tasks: Ints, amounts: Ints, sign: int) -> None:
        """Add tasks to the sizes of jobs, or take them off."""
        flat = np.arange(len(which))[:, None] * (3 * self._jobs) + tasks
        given = np.bincount(flat.reshape(-1), sign * amounts.reshape(-1), len(which) * 3 * self._jobs)
        by_kind = given.astype(int).reshape(-1, self._jobs, 3)
        self.sizes[which] += by_kind[:, :, :_BUNDLE] + by_kind[:, :, _BUNDLE:]

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
        tasks, lengths = _in_sequence(targets)
        if tasks.shape[1]:
            self._place(which, tasks, lengths)
            self._count(which, tasks, (np.arange(tasks.shape[1]) < lengths[:, None]).astype(int), 1)

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
        epochs = np.where(runs, speed * self.seconds[which][:, None] / self.samples[which], 0.0)
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
        self.last_speed[which] = epochs * self.samples[which] / self.seconds[which][:, None]
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

    def _heads(self, which: Ints, demand: Ints) -> tuple[Ints, Bools]:
        """The least used node of each, as cluster x M + node, and whether it has room; shapes (k,), (k, R)."""
        most = 2 * len(which) >= self.count
        nodes: Ints = self.load.argmin(axis=1)[which] if most else self.load[which].argmin(axis=1)
        nodes += which * self._nodes
        room = demand[:, 0] <= self._flat_free[0][nodes]
        for number in range(1, self._resources):
            room &= demand[:, number] <= self._flat_free[number][nodes]
        return nodes, room

    def _take(self, which: Ints, nodes: Ints, demand: Ints) -> None:
        """Take (or give back) amounts, shape (k, R), on one node of each cluster."""
        total = demand[:, 0]
        for number in range(self._resources):
            amount = demand[:, number]
            self._flat_free[number][nodes] -= amount
            self.used[number][which] += amount
            if number:
                total = total + amount
        self._flat_load[nodes] += total

    def _place(self, which: Ints, tasks: Ints, lengths: Ints) -> None:
        """Place tasks in sequence; ``tasks`` (k, T) are job x 3 + kind, and ``lengths`` (k,) are cut to what fits."""
        base = which * (3 * self._jobs)
        cursor = self._first_round(which, tasks, lengths)
        (alive,) = np.nonzero(cursor < lengths)
        cursor = cursor[alive]
        while len(alive):
            clusters = which[alive]
            demand = self._flat_demand[base[alive] + tasks[alive, cursor]]
            nodes, room = self._heads(clusters, demand)
            if room.all():
                self._take(clusters, nodes, demand)
            else:
                lengths[alive[~room]] = cursor[~room]
                self._take(clusters[room], nodes[room], demand[room])
            cursor += 1
            keep = room & (cursor < lengths[alive])
            if not keep.all():
                alive, cursor = alive[keep], cursor[keep]

    def _first_round(self, which: Ints, tasks: Ints, lengths: Ints) -> Ints:
        """On an empty cluster the t-th task goes to the t-th node, for no task is free of charge: all of them at once.

        Returns how many tasks were dealt with in each, shape (k,): none where one of them does not fit.
        """
        width = min(self._nodes, tasks.shape[1])
        dealt = np.minimum(self.library.nodes[self.workload[which]], lengths)
        inside = (np.arange(width) < dealt[:, None])[:, :, None]
        demand = self._flat_demand[which[:, None] * (3 * self._jobs) + tasks[:, :width]] * inside
        fits = ((demand <= np.moveaxis(self.free[:, which, :width], 0, 2)) | ~inside).all(axis=(1, 2))
        dealt *= fits
        demand *= fits[:, None, None]
        self.free[:, which, :width] -= np.moveaxis(demand, 2, 0)
        self.used[:, which] += demand.sum(axis=1).T
        self.load[which, :width] += demand.sum(axis=2)
        return dealt


def in_bundles(asked: Ints) -> tuple[tuple[int, Ints], ...]:
    """How many of each kind workers and PSs, shape (..., 2), make, in the order in which they are given."""
    bundles: Ints = asked.min(axis=-1)
    return (_BUNDLE, bundles), (_WORKER, asked[..., 0] - bundles), (_PS, asked[..., 1] - bundles)


def _in_sequence(targets: Ints) -> tuple[Ints, Ints]:
    """The order of ``Clusters.fill``: tasks as job x 3 + kind, shape (k, T), padded; and how many, shape (k,)."""
    count, jobs, _ = targets.shape
    kinds, amounts = zip(*in_bundles(targets), strict=True)
    tasks = (np.arange(jobs)[:, None] * 3 + np.array(kinds)).reshape(-1)
    repeats = np.stack(amounts, axis=2).reshape(count, -1)
    lengths: Ints = repeats.sum(axis=1)
    longest = int(lengths.max(initial=0))
    sequence = np.zeros((count, longest), int)
    sequence[np.arange(longest) < lengths[:, None]] = np.repeat(np.tile(tasks, count), repeats.reshape(-1))
    return sequence, lengths


def _runs(demand: Ints, amounts: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Turns (k, T, R) in which one and the same is asked for together: rows, what is asked for, and how many."""
    told = amounts > 0
    changes = np.zeros(amounts.shape, int)
    changes[:, 1:] = (demand[:, 1:] != demand[:, :-1]).any(axis=2)
    number = changes.cumsum(axis=1)
    for run in range(int(number.max(where=told, initial=-1)) + 1):
        many = np.where(number == run, amounts, 0).sum(axis=1)
        (rows,) = np.nonzero(many)
        yield rows, demand[rows, (number[rows] == run).argmax(axis=1)], many[rows]


def evenly(loads: Ints, weight: Ints, many: Ints) -> Ints:
    """How many of ``many`` alike tasks each node gets where each goes to the least used node, the first of equals.

    Parameters
    ----------
    loads
        Shape (k, M).
    weight
        What one task adds to a load, 0 or more; shape (k,).
    many
        Shape (k,).

    Returns
    -------
    Shape (k, M).
    """
    # Task t of a node is given at load + t weight, and the ``many`` least of these are given. First a level is found,
    # some steps above the least load, below which there are no more of them, but are if it is one step higher.
    step = np.maximum(weight, 1)[:, None]
    there = loads < _ABSENT
    least = loads.min(axis=1)
    even = (loads.sum(axis=1, where=there) + many * step[:, 0]) // np.maximum(there.sum(axis=1), 1)
    top = np.maximum(loads.max(axis=1, where=there, initial=0), even)
    low, high = np.zeros_like(many), np.minimum((top - least) // step[:, 0] + 2, many)
    while (low < high).any():
        middle = (low + high + 1) // 2
        below = np.maximum(-((loads - (least + middle * step[:, 0])[:, None]) // step), 0).sum(axis=1)
        low, high = np.where(below <= many, middle, low), np.where(below <= many, high, middle - 1)
    level = (least + low * step[:, 0])[:, None]
    given: Ints = np.maximum(-((loads - level) // step), 0)
    # Then each node has at most one of them that is less than a step above the level.
    rest = many - given.sum(axis=1)
    order = np.argsort(loads + given * step, axis=1, kind="stable")
    np.put_along_axis(
        given, order, np.take_along_axis(given, order, axis=1) + (np.arange(loads.shape[1]) < rest[:, None]), axis=1
    )
    given[weight == 0] = 0
    return given
