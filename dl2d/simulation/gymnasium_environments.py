"""Gymnasium environments in which a policy sizes the jobs of simulated clusters: ``ClusterEnv``, ``VectorClusterEnv``.

Importing this module registers ``dl2d/Cluster-v0``. docs/environment.md has observations, actions, rewards and infos.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.policies.dl2_paper.observation import Observations
from dl2d.simulation.vectorized.clusters import Clusters, SlotReport
from dl2d.simulation.vectorized.dl2_paper_sizing import Windows
from dl2d.simulation.vectorized.workload_arrays import Library
from dl2d.simulation.workload.generators import generate
from dl2d.simulation.workload.workload_file import Workload

ENVIRONMENT_ID = "dl2d/Cluster-v0"
#: What the environments take for their workloads.
Source = Library | Workload | Sequence[Workload]
Info = dict[str, Any]
_NO_CLUSTERS = np.zeros(0, int)


class EnvironmentOptions(TypedDict, total=False):
    """Options of both environments; ``ClusterEnv`` says what they are."""

    first_bundles: bool
    speed_noise: float
    epochs_error: float
    max_slots: int


#: By key of an info: the part of a slot's report, and its type.
_REPORTED: dict[str, tuple[str, type]] = {
    "job_present": ("present", np.bool_),
    "job_reward": ("progress", np.float64),
    "job_rate": ("rate", np.float64),
    "job_workers": ("workers", np.int64),
    "job_ps": ("ps", np.int64),
    "job_ended": ("ended", np.bool_),
}


class ClusterEnv(gymnasium.Env[Observations, np.int64]):
    """One cluster; see docs/environment.md.

    Parameters
    ----------
    workloads
        What each episode draws its workload from; by default one that the generator ``dl2`` makes from seed 0.
    window
        J, the jobs of a batch.
    first_bundles
        Give each job its minimum size before the first decision of a slot; by default not.
    speed_noise, epochs_error
        See ``dl2d.simulation.vectorized.clusters.Clusters``; by default 0.
    max_slots
        Slots after which an episode is cut off; by default 1,000.
    render_mode
        ``ansi`` or None.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - gymnasium declares it so

    def __init__(
        self,
        workloads: Source | None = None,
        window: int = 20,
        *,
        render_mode: str | None = None,
        **options: Unpack[EnvironmentOptions],
    ) -> None:
        self.render_mode = render_mode
        self._vector = VectorClusterEnv(workloads, 1, window, render_mode=render_mode, **options)
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space

    @property
    def clusters(self) -> Clusters:
        """The state, with N = 1; for reading."""
        return self._vector.clusters

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observations, Info]:
        """Begin an episode; ``options={"workload": k}`` takes the k-th workload instead of drawing one."""
        super().reset(seed=seed)
        observations, info = self._vector.begin([self.np_random], (options or {}).get("workload"))
        return observations[0], _only(info)

    def step(self, action: np.int64 | int) -> tuple[Observations, float, bool, bool, Info]:
        """Take one decision; an action that the mask forbids counts as void."""
        observations, rewards, terminated, truncated, info = self._vector.act(np.array([action]))
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), _only(info)

    def render(self) -> str | None:
        """The cluster as text, where the render mode is ``ansi``."""
        return picture(self.clusters, 0) if self.render_mode == "ansi" else None


class VectorClusterEnv(VectorEnv[Observations, Ints, NDArray[Any]]):
    """N clusters stepped at once, with the numbers of N ``ClusterEnv`` to the last bit.

    Returned arrays are new ones, which later steps do not change.

    In autoreset mode "next step": the step after an episode's end ignores that cluster's action and begins a new
    episode, with reward 0. Infos hold arrays with one row for each cluster, always all of them.

    Parameters are those of ``ClusterEnv``, and ``num_envs``, N.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - as above

    def __init__(
        self,
        workloads: Source | None = None,
        num_envs: int = 1,
        window: int = 20,
        *,
        render_mode: str | None = None,
        first_bundles: bool = False,
        speed_noise: float = 0.0,
        epochs_error: float = 0.0,
        max_slots: int = 1000,
    ) -> None:
        if render_mode not in {None, "ansi"}:
            raise ValueError(f"render_mode: expected ansi or None, got {render_mode!r}")
        if max_slots < 1:
            raise ValueError(f"max_slots: expected 1 or more, got {max_slots}")
        self.render_mode = render_mode
        #: The state; for reading.
        self.clusters = Clusters(_library(workloads), num_envs, speed_noise=speed_noise, epochs_error=epochs_error)
        self.num_envs = num_envs
        self._windows = Windows(self.clusters, window, first_bundles=first_bundles)
        self._all = np.arange(num_envs)
        self._max_slots = max_slots
        self._begun = False
        low, high = self._windows.layout.bounds()
        self.single_observation_space = Box(low, high, dtype=np.float32)
        self._actions = 3 * window + 1
        self.single_action_space = Discrete(self._actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._ended: Ints = _NO_CLUSTERS
        self._generators: list[np.random.Generator] = []

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, Info]:
        """Begin all episodes.

        Parameters
        ----------
        seed
            Cluster i gets seed + i, or the i-th of several; with None generators go on, or begin somewhere.
        options
            ``{"workload": k}``, or one k for each cluster, takes these workloads instead of drawing them.
        """
        if isinstance(seed, int):
            super().reset(seed=seed)
            seed = [seed + number for number in range(self.num_envs)]
        if seed is not None and len(seed) != self.num_envs:
            raise ValueError(f"seed: expected {self.num_envs} seeds, one for each environment, got {len(seed)}")
        if seed is not None or not self._generators:
            self._generators = [seeding.np_random(own)[0] for own in seed or [None] * self.num_envs]
        self._ended = _NO_CLUSTERS
        return self.begin(self._generators, (options or {}).get("workload"))

    def step(self, actions: ArrayLike) -> tuple[Observations, Floats, Bools, Bools, Info]:
        """Take one decision in each cluster; those that the mask forbids count as void."""
        stepped = self.act(actions, self._ended)
        self._ended = np.flatnonzero(stepped[2] | stepped[3])
        return stepped

    def begin(self, generators: Sequence[np.random.Generator], workloads: object) -> tuple[Observations, Info]:
        """Begin an episode in each cluster; ``workloads`` is None, an index into the library, or one for each."""
        self.clusters.reset(self._all, self._chosen(workloads), generators)
        self._begun = True
        self._windows.begin(self._all)
        self._windows.refresh()
        return self._observe(None)

    def act(self, actions: ArrayLike, ended: Ints = _NO_CLUSTERS) -> tuple[Observations, Floats, Bools, Bools, Info]:
        """Take one decision in each cluster but those whose episodes have ``ended``, which begin a new one instead."""
        clusters, windows = self.clusters, self._windows
        if not self._begun:
            raise gymnasium.error.ResetNeeded("step: call reset first")
        given = np.asarray(actions)
        if given.shape != (clusters.count,) or given.dtype.kind not in "iu":
            expected = f"expected {clusters.count} whole numbers, one for each environment"
            raise ValueError(f"actions: {expected}, got {given.dtype} of shape {given.shape}")
        if given.min() < 0 or given.max() >= self._actions:
            raise ValueError(f"actions: expected 0 to {self._actions - 1}, got {given.min()} to {given.max()}")
        if len(ended):
            report = windows.step(given, np.setdiff1d(self._all, ended, assume_unique=True))
            clusters.reset(ended)
            windows.begin(ended)
        else:
            report = windows.step(given)
        windows.refresh()
        rewards = np.zeros(clusters.count)
        terminated = np.zeros(clusters.count, bool)
        truncated = np.zeros(clusters.count, bool)
        if report is not None:
            which = report.which
            # One job after the other, so that the sum does not depend on how many jobs a neighbour has.
            rewards[which] = report.progress.cumsum(axis=1)[:, -1]
            terminated[which] = clusters.left[which] == 0
            truncated[which] = ~terminated[which] & (clusters.played[which] >= self._max_slots)
        observations, info = self._observe(report)
        return observations, rewards, terminated, truncated, info

    def _observe(self, report: SlotReport | None) -> tuple[Observations, Info]:
        """What policies see, and what the jobs did in slots that ended: zeros for clusters whose slot goes on."""
        clusters, windows = self.clusters, self._windows
        info: Info = {
            "action_mask": windows.mask(),
            "window": windows.window.copy(),
            "slot": clusters.slot.copy(),
            "workload": clusters.workload.copy(),
            "slot_ended": np.zeros(clusters.count, bool),
        }
        for name, (_, kind) in _REPORTED.items():
            info[name] = np.zeros(clusters.present.shape, dtype=kind)
        if report is not None:
            info["slot_ended"][report.which] = True
            for name, (part, _) in _REPORTED.items():
                info[name][report.which] = getattr(report, part)
        return windows.observation(), info

    def _chosen(self, workloads: object) -> Ints | None:
        if workloads is None:
            return None
        chosen = np.asarray(workloads)
        known = len(self.clusters.library.ids)
        if chosen.dtype.kind not in "iu" or chosen.shape not in {(), self._all.shape}:
            raise ValueError(f"options: workload: expected a whole number, or one for each, got {workloads!r}")
        if chosen.min() < 0 or chosen.max() >= known:
            raise ValueError(f"options: workload: there are {known}, from 0; got {workloads!r}")
        return np.broadcast_to(chosen, self._all.shape).astype(int)

    def render(self) -> tuple[str, ...] | None:
        """Each cluster as text, where the render mode is ``ansi``."""
        if self.render_mode != "ansi":
            return None
        return tuple(picture(self.clusters, number) for number in range(self.num_envs))


def picture(clusters: Clusters, number: int) -> str:
    """One of many clusters as text: its jobs with sizes and progress, and how full its nodes are."""
    library, workload = clusters.library, int(clusters.workload[number])
    ids, models = library.ids[workload], library.models
    ended = len(ids) - int(clusters.left[number])
    lines = [f"slot {clusters.slot[number]}: {ended} of {len(ids)} jobs have ended"]
    for job in np.flatnonzero(clusters.present[number]).tolist():
        workers, ps = clusters.sizes[number, job].tolist()
        share = min(clusters.done[number, job] / clusters.declared[number, job], 1.0)
        bar = ("#" * round(20 * share)).ljust(20, ".")
        lines.append(f"  {ids[job]:>6} {models[clusters.model[number, job]]:<24} {workers:>3}w {ps:>3}p  {bar}")
    capacity = library.capacity[workload, : library.nodes[workload]]
    free = clusters.free[:, number, : len(capacity)].T
    for place, name in enumerate(library.resources):
        whole, left = capacity[:, place], free[:, place]
        tenths = np.where(whole > 0, (whole - left) * 9 // np.maximum(whole, 1), 0)
        nodes = "".join("." if whole[at] == left[at] else str(tenths[at]) for at in range(len(whole)))
        lines.append(f"  {name:<6} {(whole.sum() - left.sum()) / 1000:g} of {whole.sum() / 1000:g} used; nodes {nodes}")
    return "\n".join(lines)


def _only(info: Info) -> Info:
    """The info of a single cluster."""
    return {key: value[0] if value.ndim > 1 else value[0].item() for key, value in info.items()}


def _library(workloads: Source | None) -> Library:
    if isinstance(workloads, Library):
        return workloads
    if workloads is None:
        return Library.of([generate("dl2", {}, np.random.default_rng(0))])
    return Library.of([workloads] if isinstance(workloads, Workload) else workloads)


if ENVIRONMENT_ID not in gymnasium.registry:
    gymnasium.register(
        ENVIRONMENT_ID,
        entry_point="dl2d.simulation.gymnasium_environments:ClusterEnv",
        vector_entry_point="dl2d.simulation.gymnasium_environments:VectorClusterEnv",
    )
