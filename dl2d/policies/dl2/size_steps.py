"""Size steps: which job is enlarged next, and to which size, by scores with learned weights.

In each slot all sizes are chosen anew. Every job starts from nothing, or from its floor. Then, again and again, one job
makes a step to a size at which it is faster: the step with the highest score (``score``) of all jobs' steps for which
the cluster, taken as a whole, has resources left. It ends when there is none. The score is a small function of
dimensionless features, the same for all jobs, so that one set of weights fits any jobs and any cluster.

Everything here works on N clusters at once, each with weights of its own: the policy has one, its trainer hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dl2d.policies.dl2.pareto_frontier import ParetoFrontiers
from dl2d.policies.dl2.scoring import Bools, ClusterJobs, Floats, Ints, describe_steps, score


@dataclass(frozen=True, slots=True, eq=False)
class ChosenSizes:
    """Sizes of all jobs, and the steps that led to them."""

    #: Size of each job, as its place on its frontier, shape (N, J).
    states: Ints
    #: Steps in the order in which they were made: cluster, job, size; shape (steps, 3).
    steps: Ints


def choose_sizes(
    frontiers: ParetoFrontiers,
    crowd: ClusterJobs,
    states: Ints,
    free: Ints,
    weights: Floats,
    *,
    only_larger: bool = False,
) -> ChosenSizes:
    """Make the step with the highest score of those with room in the totals, until there is none.

    Parameters
    ----------
    states
        Size of each job to begin with, shape (N, J).
    free
        What each cluster has left, shape (N, R).
    weights
        Shape (N, weights), or (1, weights) for all alike.
    only_larger
        Only to sizes that have no fewer workers and no fewer PSs.
    """
    search = _Search(frontiers, crowd, states.copy(), free.copy(), weights, only_larger=only_larger)
    (stopped,) = np.nonzero(search.present)
    while len(stopped):
        search.plan(stopped)
        stopped = search.make()
    made: Ints = np.concatenate(search.made) if search.made else np.zeros((0, 3), dtype=np.int64)
    return ChosenSizes(search.states, made)


class _Steps(NamedTuple):
    """Steps of jobs, those of each job in the order in which they are made; all shape (steps,)."""

    #: Place of the job among those that are present, and its sizes before and after.
    job: Ints
    before: Ints
    after: Ints
    #: Least score of this step and those before it of the same job.
    least: Floats

    def some(self, which: Ints | Bools) -> _Steps:
        """Those at some places."""
        return _Steps._make(values[which] for values in self)


class _Search:
    """Sizes while they are chosen.

    While nothing lacks room jobs do not compete: each makes its own best steps one after the other, and in the order of
    scores a step comes right after an earlier one of the same job with a lower score. So steps of all jobs are planned
    ahead, and made in the order of ``least`` up to the first that has no room; then all jobs whose next step has none
    plan anew, with the room that is left.
    """

    def __init__(
        self,
        frontiers: ParetoFrontiers,
        crowd: ClusterJobs,
        states: Ints,
        free: Ints,
        weights: Floats,
        *,
        only_larger: bool,
    ) -> None:
        self.states, self.free = states, free
        self.made: list[Ints] = []
        self._frontiers, self._crowd, self._weights, self._only_larger = frontiers, crowd, weights, only_larger
        self._rows, self._jobs = np.nonzero(crowd.present)
        self.present = np.ones(len(self._rows), dtype=np.bool_)
        self._which = crowd.frontier[self._rows, self._jobs]
        nothing, none = np.zeros(0, dtype=np.int64), np.zeros(0)
        self._planned = _Steps(nothing, nothing, nothing, none)

    def plan(self, jobs: Ints) -> None:
        """Plan the steps of some jobs as if each found as much room all the way as there is now."""
        now, least, found = self.states[self._rows[jobs], self._jobs[jobs]], np.full(len(jobs), np.inf), [self._planned]
        while len(jobs):
            score, to = self._best(jobs, now)
            (going,) = np.nonzero(score > -np.inf)
            jobs, before, now, score = jobs[going], now[going], to[going], score[going]
            least = np.minimum(least[going], score)
            found.append(_Steps(jobs, before, now, least))
        together = _Steps._make(np.concatenate(values) for values in zip(*found, strict=True))
        self._planned = together.some(np.argsort(together.job, kind="stable"))

    def make(self) -> Ints:
        """Make planned steps up to the first, in each cluster, without room; returns jobs that have to plan anew."""
        # Of equals, in the order of jobs and of each job's steps, in which they are.
        steps = self._planned.some(np.lexsort((-self._planned.least, self._rows[self._planned.job])))
        rows, which = self._rows[steps.job], self._which[steps.job]
        need = self._frontiers.need[which, steps.after] - self._frontiers.need[which, steps.before]
        first = np.searchsorted(rows, rows)  # where the steps of each one's cluster begin
        taken = _sums(need, first)
        lacking: Bools = np.asarray((taken > self.free[rows]).any(axis=1))
        makes = _sums(lacking, first) == 0
        made = steps.some(makes)
        rows, jobs = self._rows[made.job], self._jobs[made.job]
        # Of several steps of one job, and of one cluster, the last one stands.
        self.free[rows] = self.free[rows] - taken[makes]
        self.states[rows, jobs] = made.after
        self.made.append(np.stack([rows, jobs, made.after], axis=1))
        left = steps.some(~makes)
        lacking = np.asarray((need[~makes] > self.free[self._rows[left.job]]).any(axis=1))
        _, nexts = np.unique(left.job, return_index=True)
        stopped: Ints = left.job[nexts[lacking[nexts]]]
        left = left.some(~np.isin(left.job, stopped))
        self._planned = left.some(np.argsort(left.job, kind="stable"))
        return stopped

    def _best(self, jobs: Ints, now: Ints) -> tuple[Floats, Ints]:
        """Score and size of the best step with room of each of K jobs, shape (K,); -inf where there is none."""
        frontiers, rows, which = self._frontiers, self._rows[jobs], self._which[jobs]
        weights = self._weights if len(self._weights) == 1 else self._weights[rows]
        scores = score(weights, describe_steps(frontiers, self._crowd, rows, self._jobs[jobs], now))
        possible = frontiers.exists[which, now]
        left = self.free[rows] + frontiers.need[which, now]
        for resource in range(left.shape[1]):
            possible &= frontiers.need[which, :, resource] <= left[:, resource, None]
        if self._only_larger:
            possible &= (frontiers.sizes[which] >= frontiers.sizes[which, now][:, None]).all(axis=2)
        scores = np.where(possible, scores, -np.inf)
        to: Ints = scores.argmax(axis=1)
        return scores[np.arange(len(to)), to], to


def _sums(values: Ints | Bools, first: Ints) -> Ints:
    """Running sums along the first axis that start anew where ``first``, the start of each one's part, says."""
    sums: Ints = values.cumsum(axis=0, dtype=np.int64)
    before: Ints = np.concatenate([np.zeros_like(sums[:1]), sums])[first]
    return sums - before
