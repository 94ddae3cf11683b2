"""Size steps: which job is enlarged next, and to which size, by scores with learned weights.

In each slot all sizes are chosen anew. Every job begins with its base: nothing, or its floor. Then, again and again,
one job makes a step to a size at which it is faster: the step with the highest score (``dl2d.policies.dl2.scoring``) of
all jobs' steps for which the cluster, taken as a whole, and the limits of the job have resources left. It ends when
there is none. Sizes are chosen in N clusters at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.policies.dl2.pareto_frontier import FrontierArrays
from dl2d.policies.dl2.scoring import ClusterJobs, describe_steps, score


class JobLimits(NamedTuple):
    """L limits on what some jobs of one cluster hold together, each of one resource; M limits of a job at most."""

    #: What the limits leave beyond the bases, shape (L + 1,); the last one stands for no limit.
    left: Ints
    #: Limits of each job, as indices in ``left``, shape (J, M).
    limit: Ints
    #: Resource of each of these, shape (J, M).
    resource: Ints


def choose_sizes(
    frontiers: FrontierArrays,
    cluster_jobs: ClusterJobs,
    positions: Ints,
    free: Ints,
    weights: Floats,
    *,
    only_larger: bool = False,
    limits: JobLimits | None = None,
) -> Ints:
    """Make the step with the highest score of those for which there are resources, until there is none.

    ``_Search`` says where the result differs from that.

    Parameters
    ----------
    positions
        Size of each job before the first step, as its position on the frontier, shape (N, J).
    free
        Resources that each cluster has left, shape (N, R).
    weights
        Shape (N, weights), or (1, weights) for all alike.
    only_larger
        Make only steps to sizes that have no fewer workers and no fewer PSs.
    limits
        Limits of the jobs, where there is one cluster (N = 1).

    Returns
    -------
    Position of each job in the end, shape (N, J).
    """
    search = _Search(
        frontiers, cluster_jobs, positions.copy(), free.copy(), weights, only_larger=only_larger, limits=limits
    )  # fmt: skip
    unplanned = search.all_jobs
    while len(unplanned):
        search.plan(unplanned)
        unplanned = search.make_steps()
    return search.positions


class _Steps(NamedTuple):
    """Steps of jobs, those of each job in the order in which they are made; all of shape (steps,)."""

    #: Index of the job among those that take part.
    job: Ints
    #: Position before the step.
    before: Ints
    #: Position after the step.
    after: Ints
    #: Least score of this step and those before it of the same job.
    least_score: Floats

    def take(self, selection: Ints | Bools) -> _Steps:
        """Return the selected steps."""
        return _Steps._make(values[selection] for values in self)


class _Search:
    """State of the choice of sizes.

    The steps are planned together, and many are made at once::

        plan all steps of each job, as if it had all remaining resources
        while steps are planned:
            make planned steps, highest least_score first, until one lacks resources
            plan the steps of the jobs anew whose next step lacks resources

    A step can be made only after the earlier steps of its job, so the order goes by ``_Steps.least_score``: the lowest
    score up to and including its own.

    The result is that of making the step with the highest score again and again, with two exceptions. If a step exceeds
    a limit, only steps of jobs in this limit wait until its job is planned anew; others with lower scores may be made
    before. And if a step gives some of a resource back, jobs that could use it are not planned anew for that: the
    search may end although there are resources for a step.
    """

    def __init__(
        self,
        frontiers: FrontierArrays,
        cluster_jobs: ClusterJobs,
        positions: Ints,
        free: Ints,
        weights: Floats,
        *,
        only_larger: bool,
        limits: JobLimits | None,
    ) -> None:
        self.positions, self._free = positions, free
        self._frontiers, self._cluster_jobs, self._weights = frontiers, cluster_jobs, weights
        self._only_larger = only_larger
        self._limits = None if limits is None else limits._replace(left=limits.left.copy())
        #: Cluster and index in it of each job that takes part, shape (jobs,).
        self._clusters, self._jobs = np.nonzero(cluster_jobs.takes_part)
        self._frontier = cluster_jobs.frontier[self._clusters, self._jobs]
        #: Jobs, as indices among those that take part.
        self.all_jobs: Ints = np.arange(len(self._clusters))
        no_steps = np.zeros(0, dtype=np.int64)
        self._planned = _Steps(no_steps, no_steps, no_steps, np.zeros(0))

    def plan(self, jobs: Ints) -> None:
        """Plan the steps of jobs as if each of them had all remaining resources."""
        position = self.positions[self._clusters[jobs], self._jobs[jobs]]
        least_score, planned = np.full(len(jobs), np.inf), [self._planned]
        while len(jobs):
            score, best = self._best_steps(jobs, position)
            (has_step,) = np.nonzero(score > -np.inf)
            jobs, before, position, score = jobs[has_step], position[has_step], best[has_step], score[has_step]
            least_score = np.minimum(least_score[has_step], score)
            planned.append(_Steps(jobs, before, position, least_score))
        joined = _Steps._make(np.concatenate(values) for values in zip(*planned, strict=True))
        self._planned = joined.take(np.argsort(joined.job, kind="stable"))

    def make_steps(self) -> Ints:
        """Make planned steps, in each cluster and limit up to the first that lacks resources.

        Returns the jobs to plan anew.
        """
        # Steps with equal scores stay in the order of jobs and of each job's steps.
        steps = self._planned.take(np.lexsort((-self._planned.least_score, self._clusters[self._planned.job])))
        clusters, frontier = self._clusters[steps.job], self._frontier[steps.job]
        need = self._frontiers.need[frontier, steps.after] - self._frontiers.need[frontier, steps.before]
        first = np.searchsorted(clusters, clusters)  # index of the first step in the cluster of each
        waits = self._wait_for_limits(steps.job, need)
        taken = _running_sums(np.where(waits[:, None], 0, need), first)
        lacking: Bools = np.asarray((taken > self._free[clusters]).any(axis=1))
        is_made = ~waits & (_running_sums(lacking & ~waits, first) == 0)
        made = steps.take(is_made)
        clusters = self._clusters[made.job]
        # Assignments at repeated indices: the last step of each cluster, and of each job, counts.
        self._free[clusters] = self._free[clusters] - taken[is_made]
        self.positions[clusters, self._jobs[made.job]] = made.after
        if self._limits is not None:
            limit, amounts = self._in_limits(made.job, need[is_made])
            np.subtract.at(self._limits.left, limit, amounts)
        remaining = steps.take(~is_made)
        lacking = np.asarray((need[~is_made] > self._free[self._clusters[remaining.job]]).any(axis=1))
        if self._limits is not None:
            lacking |= self._exceeds_limits(remaining.job, need[~is_made])
        _, next_steps = np.unique(remaining.job, return_index=True)
        stopped: Ints = remaining.job[next_steps[lacking[next_steps]]]
        remaining = remaining.take(~np.isin(remaining.job, stopped))
        self._planned = remaining.take(np.argsort(remaining.job, kind="stable"))
        return stopped

    def _best_steps(self, jobs: Ints, position: Ints) -> tuple[Floats, Ints]:
        """Score and new position of the best step of each of K jobs for which there are resources.

        Both have shape (K,); the score is -inf where there is no such step.
        """
        frontiers, clusters, frontier = self._frontiers, self._clusters[jobs], self._frontier[jobs]
        weights = self._weights if len(self._weights) == 1 else self._weights[clusters]
        steps = describe_steps(frontiers, self._cluster_jobs, clusters, self._jobs[jobs], position)
        scores = score(weights, steps)
        possible = frontiers.is_step[frontier, position]
        available = self._free[clusters] + frontiers.need[frontier, position]
        for resource in range(available.shape[1]):
            possible &= frontiers.need[frontier, :, resource] <= available[:, resource, None]
        if self._limits is not None:
            limits, indices = self._limits, self._jobs[jobs]
            for limit, resource in zip(limits.limit[indices].T, limits.resource[indices].T, strict=True):
                available = limits.left[limit] + frontiers.need[frontier, position, resource]
                possible &= frontiers.need[frontier, :, resource] <= available[:, None]
        if self._only_larger:
            possible &= (frontiers.sizes[frontier] >= frontiers.sizes[frontier, position][:, None]).all(axis=2)
        scores = np.where(possible, scores, -np.inf)
        best: Ints = scores.argmax(axis=1)
        return scores[np.arange(len(best)), best], best

    def _in_limits(self, jobs: Ints, need: Ints) -> tuple[Ints, Ints]:
        """The limits of the job of each of S steps, and what the step takes of them; each of shape (S, M)."""
        assert self._limits is not None, "there are limits"
        indices = self._jobs[jobs]
        return self._limits.limit[indices], np.take_along_axis(need, self._limits.resource[indices], axis=1)

    def _wait_for_limits(self, jobs: Ints, need: Ints) -> Bools:
        """Whether each of S steps is not made now: it takes more than a limit of its job leaves besides the steps
        before it, or such a step of a job in the same limit, or of the same job, comes before it. Shape (S,).
        """
        if self._limits is None:
            return np.zeros(len(jobs), dtype=bool)
        limit, amounts = self._in_limits(jobs, need)
        by_limit = np.argsort(limit, axis=None, kind="stable")
        limit_of_each, first = limit.flat[by_limit], np.searchsorted(limit.flat[by_limit], limit.flat[by_limit])
        exceeds: Bools = _running_sums(amounts.flat[by_limit], first) > self._limits.left[limit_of_each]
        waits = np.zeros(limit.shape, dtype=bool)
        waits.flat[by_limit] = _running_sums(exceeds, first) > 0
        by_job = np.argsort(jobs, kind="stable")
        first = np.searchsorted(jobs[by_job], jobs[by_job])
        found = np.zeros(len(jobs), dtype=bool)
        found[by_job] = _running_sums(np.asarray(waits.any(axis=1))[by_job], first) > 0
        return found

    def _exceeds_limits(self, jobs: Ints, need: Ints) -> Bools:
        """Whether each of S steps alone takes more than a limit of its job leaves. Shape (S,)."""
        assert self._limits is not None, "there are limits"
        limit, amounts = self._in_limits(jobs, need)
        return np.asarray((amounts > self._limits.left[limit]).any(axis=1))


def _running_sums(values: Ints | Bools, first: Ints) -> Ints:
    """Running sums along the first axis that begin anew at index ``first`` of each row."""
    sums: Ints = values.cumsum(axis=0, dtype=np.int64)
    before: Ints = np.concatenate([np.zeros_like(sums[:1]), sums])[first]
    return sums - before
