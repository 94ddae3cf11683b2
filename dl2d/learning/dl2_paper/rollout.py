"""Rollouts of a policy in simulated clusters: samples for actor-critic learning, completion times for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dl2d.core.array_types import Floats, Ints
from dl2d.core.errors import TooFewSamples
from dl2d.learning.dl2_paper.samples import Samples
from dl2d.learning.dl2_paper.settings import Credit, Reward, Settings
from dl2d.policies.dl2_paper.exploration import correcting_actions, explored
from dl2d.policies.dl2_paper.inference_network import Network, chosen
from dl2d.policies.dl2_paper.observation import ObservationEncoding, Observations
from dl2d.simulation.vectorized.clusters import Clusters, SlotReport
from dl2d.simulation.vectorized.dl2_paper_sizing import Masks, Windows
from dl2d.simulation.vectorized.workload_arrays import Library

#: Added to a rate, or to epochs, before the logarithm is taken; a job without tasks has the logarithm of this.
_MIN_RATE = 1e-3
#: Most slots that clusters are advanced by at the beginning, so that they differ in how far their workloads are.
_MAX_ADVANCE = 24
#: Owner of a place in the pool that holds no sample.
_FREE = -1


class SampleCollector:
    """Runs clusters without end, one workload after another, and collects samples of the decisions made in them.

    Parameters
    ----------
    library
        The workloads that are drawn from.
    seed
        Of all draws: workloads, actions, exploration, which decisions are kept.
    """

    def __init__(self, library: Library, settings: Settings, seed: Sequence[int]) -> None:
        self._settings = settings
        count, jobs = settings.clusters, settings.window
        self._rng = np.random.default_rng(seed)
        self._clusters = Clusters(library, count)
        self.windows = _windows(self._clusters, settings)
        everywhere = np.arange(count)
        self._clusters.reset(everywhere, generators=self._rng.spawn(count))
        self._advance()
        self.windows.begin(everywhere)
        self.windows.refresh()
        self._by_job = settings.credit is not Credit.SLOT
        #: Samples whose targets are not known yet. Stage 0: their slot goes on; 1: they wait for the value of the next.
        self._pool = self._places(0)
        self._owner: Ints = np.zeros(0, int)
        self._stage: Ints = np.zeros(0, int)
        self._window: Ints = np.zeros((0, jobs), int)
        #: Predicted value at the beginning of the slot that goes on: of each job, and of the whole cluster.
        self._worth: Floats = np.zeros(self._clusters.present.shape)
        self._slot_worth: Floats = np.zeros(count)
        #: Clusters in which a batch begins.
        self._fresh = np.ones(count, bool)
        #: Decisions so far.
        self.decisions = 0

    def collect(self, policy: Network, value: Network, count: int) -> Samples:
        """Decide until there are ``count`` samples or more whose slots (with a discount, also the next ones) are over.

        Raises
        ------
        TooFewSamples
            The workloads leave too little to decide.
        """
        ready: list[Samples] = []
        # Several times the steps that are needed where each may be kept; a slot has to end, too.
        steps = count / (self._settings.clusters * self._settings.kept)
        wanted, left = count, int(20 * max(steps, 100.0))
        while wanted > 0:
            made = self._step(policy, value)
            if made is not None:
                ready.append(made)
                wanted -= len(made)
            left -= 1
            if left < 0:
                raise TooFewSamples(
                    f"{self.decisions} decisions gave only {count - wanted} of the {count} samples to learn from: the "
                    "workloads leave hardly anything to decide; train on some with more jobs, or set `kept` higher"
                )
        return Samples.joined(ready)

    def _step(self, policy: Network, value: Network) -> Samples | None:
        """One decision in each cluster; returns the samples that are complete now."""
        settings, windows, rng = self._settings, self.windows, self._rng
        observations, masks = windows.observation(), windows.mask()
        if settings.gamma and self._fresh.any():
            self._predict(value, observations)
        logits = policy(observations)
        logits[masks == 0] = -np.inf
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        running = chances.cumsum(axis=1, dtype=np.float64)
        chances /= running[:, -1:]
        draws = rng.random((3, len(chances)))
        actions: Ints = (running > (draws[0] * running[:, -1])[:, None]).argmax(axis=1)
        taken, probability = actions, chances[np.arange(len(actions)), actions].astype(float)
        if settings.epsilon:
            corrections = correcting_actions(windows.layout.sizes_in(observations), masks)
            taken, probability = explored(actions, chances, corrections, settings.epsilon, draws[1])
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

    def _keep(self, rows: Ints, observations: Observations, masks: Masks, actions: Ints, logs: Floats) -> None:
        """Put decisions of these clusters into free places of the pool."""
        free = np.flatnonzero(self._owner == _FREE)
        if len(free) < len(rows):
            more = max(len(self._owner), 1024)
            self._pool = Samples.joined([self._pool, self._places(more)])
            self._owner = np.concatenate((self._owner, np.full(more, _FREE)))
            self._stage = np.concatenate((self._stage, np.zeros(more, int)))
            self._window = np.concatenate((self._window, np.full((more, self._window.shape[1]), -1)))
            free = np.flatnonzero(self._owner == _FREE)
        at, pool, window = free[: len(rows)], self._pool, self.windows.window[rows]
        self._owner[at] = rows
        self._stage[at] = 0
        self._window[at] = window
        pool.observations[at] = observations[rows]
        pool.masks[at] = masks[rows] != 0
        pool.actions[at] = actions[rows]
        pool.log_chances[at] = logs[rows]
        pool.valid[at] = window >= 0 if self._by_job else True

    def _places(self, count: int) -> Samples:
        """Free places of the pool."""
        jobs = self._settings.window
        return Samples.zeros(count, self.windows.layout.length, 3 * jobs + 1, jobs if self._by_job else 1)

    def _predict(self, value: Network, observations: Observations) -> None:
        """Predict the value of batches that begin."""
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
        """Set the targets of slots that are over, and restart the clusters whose workload is done."""
        settings, clusters = self._settings, self._clusters
        which = report.which
        place = np.full(settings.clusters, -1)
        place[which] = np.arange(len(which))
        rewards = rewards_of(report, settings)
        over = (clusters.left[which] == 0) | (clusters.played[which] >= settings.most_slots)
        ending = np.zeros(settings.clusters, bool)
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
        # The last slot has no next one.
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
        """Predicted values that belong to samples, shape (samples, K)."""
        if not self._by_job:
            worth: Floats = self._slot_worth[self._owner[samples]][:, None]
            return worth
        window = self._window[samples]
        return np.where(window >= 0, self._worth[self._owner[samples][:, None], window], 0.0)

    def _advance(self) -> None:
        """Run some slots with random sizes, another number in each cluster."""
        clusters, rng = self._clusters, self._rng
        ahead = rng.integers(0, _MAX_ADVANCE, size=clusters.count)
        for slot in range(int(ahead.max(initial=0))):
            which = np.flatnonzero((ahead > slot) & ~clusters.over)
            if len(which):
                clusters.fill(rng.integers(1, 9, size=clusters.sizes[which].shape), which)
                clusters.end_slot(which)
        over = np.flatnonzero(clusters.over)
        if len(over):
            clusters.reset(over)


def _windows(clusters: Clusters, shown: Settings | ObservationEncoding) -> Windows:
    """Windows on clusters in which jobs are shown as these settings say."""
    return Windows(
        clusters, shown.window, first_bundles=shown.first_bundles, extras=shown.extras,
        remaining_times=shown.remaining_times,
    )  # fmt: skip


def rewards_of(report: SlotReport, settings: Settings) -> Floats:
    """Reward of each job in a slot, shape (k, jobs); 0 for jobs that were not there."""
    if settings.reward is Reward.PROGRESS:
        return report.progress
    rates = report.epochs if settings.reward is Reward.LOG_EPOCHS else report.rate
    return np.where(report.present, log_reward(rates), 0.0)


def log_reward(rates: Floats) -> Floats:
    """Rewards of ``Reward.LOG_EPOCHS`` and ``Reward.LOG_RATE`` for epochs in a slot, or shares of a job's epochs."""
    return np.log(rates + _MIN_RATE)


# Validation.


@dataclass(frozen=True, slots=True)
class Score:
    """Mean completion time in slots, taking the best action each time, and drawing it; infinite if jobs never end."""

    greedy: float
    sampled: float

    @property
    def best(self) -> float:
        """The better of the two."""
        return min(self.greedy, self.sampled)


def score(library: Library, encoding: ObservationEncoding, policy: Network, *, most_slots: int, seed: int) -> Score:
    """Mean completion times over a library's workloads, greedy and sampled. Equal seeds give equal draws."""
    count, rng = len(library.ids), np.random.default_rng([seed, 1])
    everywhere = np.arange(2 * count)
    clusters = Clusters(library, 2 * count)
    clusters.reset(everywhere, np.tile(np.arange(count), 2), [np.random.default_rng(0) for _ in everywhere])
    windows = _windows(clusters, encoding)
    windows.begin(everywhere)
    windows.refresh()
    noise = np.zeros((2 * count, 3 * windows.jobs + 1))
    while len(alive := np.flatnonzero(~clusters.over & (clusters.played < most_slots))):
        noise[count:] = rng.gumbel(size=noise[count:].shape)
        windows.step(chosen(policy(windows.observation()), windows.mask(), noise), alive)
        windows.refresh()
    greedy, sampled = clusters.mean_completion(np.inf).reshape(2, count).mean(axis=1).tolist()
    return Score(greedy, sampled)
