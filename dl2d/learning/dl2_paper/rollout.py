"""A policy at play in many clusters, and the samples that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dl2d.learning.dl2_paper.errors import TooFewSamples
from dl2d.learning.dl2_paper.exploration import explored, mending
from dl2d.learning.dl2_paper.replay_buffer import Samples
from dl2d.learning.dl2_paper.settings import Credit, Reward, Settings
from dl2d.policies.dl2_paper.observation import dominant_share
from dl2d.policies.dl2_paper.policy import Network
from dl2d.simulation.vectorized.clusters import Clusters, SlotReport
from dl2d.simulation.vectorized.library import Floats, Ints, Library
from dl2d.simulation.vectorized.windows import Windows

#: Added to a rate before its logarithm is taken: what a job without tasks brings.
_LEAST_RATE: Final = 1e-3
#: Slots that clusters are played ahead at the beginning, so that they are not all at the same point of a workload.
_MOST_AHEAD: Final = 24
_FREE: Final = -1


class Player:
    """Plays clusters on and on, workload after workload.

    Parameters
    ----------
    library
        The workloads that are drawn from.
    settings
        How.
    seed
        Of all draws: workloads, actions, exploration, which decisions are kept.
    """

    def __init__(self, library: Library, settings: Settings, seed: Sequence[int]) -> None:
        self._settings = settings
        count, jobs = settings.clusters, settings.window
        self._rng = np.random.default_rng(seed)
        self._clusters = Clusters(library, count)
        self.windows = Windows(self._clusters, jobs, first_bundles=settings.first_bundles, extras=settings.extras)
        everywhere = np.arange(count)
        self._clusters.reset(everywhere, generators=self._rng.spawn(count))
        self._play_ahead()
        self.windows.begin(everywhere)
        self.windows.refresh()
        self._by_job = settings.credit is not Credit.SLOT
        self._values = jobs if self._by_job else 1
        #: Open samples, by place: those of a slot that goes on (stage 0), or wait for what the next slot is worth (1).
        self._owner: Ints = np.zeros(0, dtype=np.int64)
        self._stage: Ints = np.zeros(0, dtype=np.int64)
        self._window: Ints = np.zeros((0, jobs), dtype=np.int64)
        self._pool = Samples(
            observations=np.zeros((0, self.windows.layout.length), dtype=np.float32),
            masks=np.zeros((0, 3 * jobs + 1), dtype=np.bool_),
            actions=np.zeros(0, dtype=np.int64),
            log_chances=np.zeros(0, dtype=np.float32),
            targets=np.zeros((0, self._values), dtype=np.float32),
            valid=np.zeros((0, self._values), dtype=np.bool_),
        )
        #: What the slot that goes on is worth from its beginning, for each job; and for the whole cluster.
        self._worth: Floats = np.zeros(self._clusters.present.shape)
        self._slot_worth: Floats = np.zeros(count)
        self._fresh = np.ones(count, dtype=np.bool_)
        #: Decisions so far.
        self.decisions = 0

    def collect(self, policy: Network, value: Network, count: int) -> Samples:
        """Play until there are ``count`` samples or more, whose slots (with a discount, the next ones) are over.

        Raises
        ------
        TooFewSamples
            The clusters make none: nothing is to be decided in them.
        """
        ready: list[Samples] = []
        # Several times the steps that are needed where each may be kept; a slot has to end, too.
        steps = count / (self._settings.clusters * self._settings.kept)
        wanted, patience = count, int(20 * max(steps, 100.0))
        while wanted > 0:
            made = self._step(policy, value)
            if made is not None:
                ready.append(made)
                wanted -= len(made)
            patience -= 1
            if patience < 0:
                raise TooFewSamples(
                    f"clusters: {count} samples were asked for, {count - wanted} came of {self.decisions} decisions; "
                    "the workloads leave nothing to decide, or settings keep too few"
                )
        return Samples.joined(ready)

    def _step(self, policy: Network, value: Network) -> Samples | None:
        """One decision in each cluster; returns the samples that are complete now."""
        settings, windows, rng = self._settings, self.windows, self._rng
        observations, masks = windows.observation(), windows.mask()
        if settings.gamma and self._fresh.any():
            self._appraise(value, observations)
        logits = policy(observations)
        logits[masks == 0] = -np.inf
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        running = chances.cumsum(axis=1, dtype=np.float64)
        chances /= running[:, -1:]
        draws = rng.random((3, len(chances)))
        actions: Ints = (running > (draws[0] * running[:, -1])[:, None]).argmax(axis=1)
        taken, probability = actions, chances[np.arange(len(actions)), actions].astype(np.float64)
        if settings.epsilon:
            sizes = windows.layout.sizes_in(observations)
            mends = mending(sizes[:, :, 0], sizes[:, :, 1], masks, settings.ratio)
            taken, probability = explored(actions, chances, mends, settings.epsilon, draws[1])
        void = 3 * settings.window
        # Where void is all that can be done there is nothing to learn.
        (kept,) = np.nonzero((draws[2] < settings.kept) & (masks[:, :void].any(axis=1)))
        if len(kept):
            self._keep(kept, observations, masks, taken, np.log(probability))
        report = windows.step(taken)
        self.decisions += len(taken)
        self._fresh = taken == void
        ready = None if report is None else self._end_slots(report)
        windows.refresh()
        return ready

    def _keep(
        self, rows: Ints, observations: NDArray[np.float32], masks: NDArray[np.int8], actions: Ints, logs: Floats
    ) -> None:
        free = np.flatnonzero(self._owner == _FREE)
        if len(free) < len(rows):
            self._grow(max(2 * len(self._owner), 1024))
            free = np.flatnonzero(self._owner == _FREE)
        at = free[: len(rows)]
        pool = self._pool
        self._owner[at] = rows
        self._stage[at] = 0
        window = self.windows.window[rows]
        self._window[at] = window
        pool.observations[at] = observations[rows]
        pool.masks[at] = masks[rows] != 0
        pool.actions[at] = actions[rows]
        pool.log_chances[at] = logs[rows]
        pool.valid[at] = window >= 0 if self._by_job else True

    def _grow(self, size: int) -> None:
        more = size - len(self._owner)
        self._owner = np.concatenate((self._owner, np.full(more, _FREE)))
        self._stage = np.concatenate((self._stage, np.zeros(more, dtype=np.int64)))
        self._window = np.concatenate((self._window, np.full((more, self._window.shape[1]), -1)))
        old = len(self._pool)
        place = np.minimum(np.arange(size), max(old - 1, 0))
        if old:
            self._pool = self._pool.take(place)
        else:
            self._pool = Samples(
                observations=np.zeros((size, self._pool.observations.shape[1]), dtype=np.float32),
                masks=np.zeros((size, self._pool.masks.shape[1]), dtype=np.bool_),
                actions=np.zeros(size, dtype=np.int64),
                log_chances=np.zeros(size, dtype=np.float32),
                targets=np.zeros((size, self._values), dtype=np.float32),
                valid=np.zeros((size, self._values), dtype=np.bool_),
            )

    def _appraise(self, value: Network, observations: NDArray[np.float32]) -> None:
        """What batches that begin are worth, for the discount."""
        (rows,) = np.nonzero(self._fresh)
        worth = value(observations[rows])
        if self._by_job:
            window = self.windows.window[rows]
            there, columns = np.nonzero(window >= 0)
            self._worth[rows[there], window[there, columns]] = worth[there, columns]
        else:
            first = self.windows.batch[rows] == 0
            self._slot_worth[rows[first]] = worth[first, 0]

    def _end_slots(self, report: SlotReport) -> Samples | None:
        """Reward the decisions of slots that are over, and begin anew where workloads are."""
        settings, clusters = self._settings, self._clusters
        which = report.which
        place = np.full(settings.clusters, -1)
        place[which] = np.arange(len(which))
        rewards = rewards_of(report, clusters, settings)
        over = (clusters.left[which] == 0) | (clusters.played[which] >= settings.most_slots)
        ending = np.zeros(settings.clusters, dtype=np.bool_)
        ending[which] = True
        done: list[Ints] = []
        (mine,) = np.nonzero((self._owner != _FREE) & ending[self._owner])
        if settings.gamma:
            waited = mine[self._stage[mine] == 1]
            self._pool.targets[waited] += settings.gamma * self._worth_at(waited)
            done.append(waited)
        opened = mine[self._stage[mine] == 0]
        rows = place[self._owner[opened]]
        if self._by_job:
            brought = np.where(self._window[opened] >= 0, rewards[rows[:, None], self._window[opened]], 0.0)
        else:
            brought = rewards.sum(axis=1)[rows][:, None]
        self._pool.targets[opened] = brought
        self._stage[opened] = 1
        # After the last slot comes nothing that is worth anything.
        done.append(opened if not settings.gamma else opened[over[rows]])
        self._worth[which] = 0.0
        self._slot_worth[which] = 0.0
        finished = which[over]
        if len(finished):
            clusters.reset(finished)
            self.windows.begin(finished)
            self._fresh[finished] = True
        ready = np.concatenate(done)
        self._owner[ready] = _FREE
        return self._pool.take(ready) if len(ready) else None

    def _worth_at(self, samples: Ints) -> Floats:
        if not self._by_job:
            worth: Floats = self._slot_worth[self._owner[samples]][:, None]
            return worth
        window = self._window[samples]
        by_job: Floats = np.where(window >= 0, self._worth[self._owner[samples][:, None], window], 0.0)
        return by_job

    def _play_ahead(self) -> None:
        """Play some slots with random sizes, another number in each cluster."""
        clusters, rng = self._clusters, self._rng
        ahead = rng.integers(0, _MOST_AHEAD, size=clusters.count)
        for slot in range(int(ahead.max(initial=0))):
            which = np.flatnonzero((ahead > slot) & ~clusters.over)
            if len(which):
                clusters.fill(rng.integers(1, 9, size=clusters.sizes[which].shape), which)
                clusters.end_slot(which)
        over = np.flatnonzero(clusters.over)
        if len(over):
            clusters.reset(over)


def rewards_of(report: SlotReport, clusters: Clusters, settings: Settings) -> Floats:
    """What each job brought in a slot, shape (k, jobs); 0 for jobs that were not there."""
    if settings.reward is Reward.PROGRESS:
        rewards = report.progress
    elif settings.reward is Reward.RATE:
        rewards = report.rate
    else:
        rewards = np.where(report.present, np.log(report.rate + _LEAST_RATE), 0.0)
    if settings.fairness:
        which = report.which
        whole = np.maximum(clusters.capacity[which], 1)[:, None, :]
        demand = clusters.demand[which]
        share = dominant_share(np.stack((report.workers, report.ps), axis=2), demand, whole)
        least = np.where(report.present, share, np.inf).min(axis=1)
        numbers = report.present.sum(axis=1)
        even = np.where(numbers > 0, np.minimum(least, 1.0) * numbers, 0.0)
        rewards = rewards + settings.fairness * even[:, None] * report.present
    return rewards
