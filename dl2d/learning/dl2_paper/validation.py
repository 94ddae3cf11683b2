"""How well a policy does on workloads that it does not learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dl2d.learning.dl2_paper.settings import Settings
from dl2d.policies.dl2_paper.policy import Network, chosen
from dl2d.simulation.vectorized.clusters import Clusters
from dl2d.simulation.vectorized.library import Floats, Ints, Library
from dl2d.simulation.vectorized.windows import Windows


@dataclass(frozen=True, slots=True)
class Score:
    """Mean completion time in slots, taking the best action each time, and drawing it; infinite if jobs never end."""

    greedy: float
    sampled: float

    @property
    def best(self) -> float:
        """The better of the two."""
        return min(self.greedy, self.sampled)


def completion(library: Library, settings: Settings, act: Callable[[Windows], Ints], *, copies: int = 1) -> Floats:
    """Mean completion time of each workload's jobs, shape (copies, K), infinite where one does not end in time."""
    count = len(library.ids)
    clusters = Clusters(library, copies * count)
    everywhere = np.arange(copies * count)
    generators = [np.random.default_rng(0) for _ in everywhere]
    clusters.reset(everywhere, np.tile(np.arange(count), copies), generators)
    windows = Windows(clusters, settings.window, first_bundles=settings.first_bundles, extras=settings.extras)
    windows.begin(everywhere)
    windows.refresh()
    while True:
        alive = np.flatnonzero(~clusters.over & (clusters.played < settings.most_slots))
        if not len(alive):
            break
        windows.step(act(windows), alive)
        windows.refresh()
    times = clusters.completion()
    real = np.arange(times.shape[1]) < library.jobs[clusters.workload][:, None]
    total = np.where(real, np.where(np.isnan(times), np.inf, times), 0.0).sum(axis=1)
    mean: Floats = (total / real.sum(axis=1)).reshape(copies, count)
    return mean


def score(library: Library, settings: Settings, policy: Network, *, seed: int) -> Score:
    """Play each workload of a library twice: greedy and sampled. The same seed gives the same draws."""
    count, rng = len(library.ids), np.random.default_rng([seed, 1])

    def act(windows: Windows) -> Ints:
        noise = np.zeros((2 * count, 3 * windows.jobs + 1))
        noise[count:] = rng.gumbel(size=noise[count:].shape)
        return chosen(policy(windows.observation()), windows.mask(), noise)

    greedy, sampled = completion(library, settings, act, copies=2).mean(axis=1).tolist()
    return Score(greedy, sampled)
