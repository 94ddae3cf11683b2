"""DL2 as its paper has it (Peng et al., arXiv 1909.06040, section 4): jobs get tasks one at a time, until enough.

In each interval the jobs, in submit order, are gone through in batches of J. A network that sees the batch answers with
one of 3J + 1 actions, again and again: a worker, a PS or one of both for one of its jobs, or void, which ends the
batch. What it sees and may do is, number for number, that of ``dl2d.simulation.windows``, in which it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.errors import CheckpointError
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey
from dl2d.core.packing import Blocked, Packing
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.core.resources import Resources
from dl2d.policies.checkpoint import Checkpoint, checkpoint_in, read_checkpoint, version_of
from dl2d.policies.filling import Filling

Matrix = NDArray[np.float32]

#: Features of a job behind its one-hot type, and what they are divided by: as in ``dl2d.simulation.windows``.
_SCALARS: Final = 5
_AGE_SCALE: Final = 3.0
_REMAINING_SCALE: Final = 8.0
_TASKS_SCALE: Final = 16.0
#: What the actions of a job give it.
_STEPS: Final = (Allocation(1, 0), Allocation(0, 1), Allocation(1, 1))


class Network(Protocol):
    """Logits of actions."""

    def __call__(self, observations: Matrix) -> Matrix:
        """Shape (N, width) to (N, 3J + 1)."""
        ...


class Dense:
    """The paper's network: fully connected layers over the whole observation, ReLUs between them.

    ``weights`` has ``<name>.<layer>.weight`` (out, in) and ``<name>.<layer>.bias``.
    """

    def __init__(self, weights: Mapping[str, NDArray[Any]], name: str) -> None:
        self._layers: list[tuple[Matrix, Matrix]] = []
        while f"{name}.{len(self._layers)}.weight" in weights:
            at = f"{name}.{len(self._layers)}"
            matrix = np.ascontiguousarray(weights[f"{at}.weight"].T, dtype=np.float32)
            self._layers.append((matrix, np.asarray(weights[f"{at}.bias"], dtype=np.float32)))

    def __call__(self, observations: Matrix) -> Matrix:
        """See ``Network``."""
        values = observations
        *hidden, (last, bias) = self._layers
        for matrix, shift in hidden:
            values = values @ matrix
            values += shift
            np.maximum(values, 0.0, out=values)
        logits: Matrix = values @ last + bias
        return logits

    def shapes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer."""
        return [(matrix.shape[0], matrix.shape[1]) for matrix, _ in self._layers]


class SharedJobs:
    """One network for every job of the window, which also sees the mean of all of them: any J will do.

    Two hidden layers: what a job shows, with the free shares; then that again with the mean over jobs. Void has a layer
    of its own on the mean.

    Parameters
    ----------
    weights
        ``<name>.{0,1,job,void}.{weight,bias}``.
    width
        Features of a job.
    """

    def __init__(self, weights: Mapping[str, NDArray[Any]], name: str, width: int) -> None:
        self._width = width
        self._parts = {
            part: (
                np.ascontiguousarray(weights[f"{name}.{part}.weight"].T, dtype=np.float32),
                np.asarray(weights[f"{name}.{part}.bias"], dtype=np.float32),
            )
            for part in ("0", "1", "job", "void")
        }

    def __call__(self, observations: Matrix) -> Matrix:
        """See ``Network``; computes for the jobs that are there alone."""
        first, first_bias = self._parts["0"]
        second, second_bias = self._parts["1"]
        last, last_bias = self._parts["job"]
        void, void_bias = self._parts["void"]
        count = len(observations)
        free = len(first) - self._width
        columns = observations[:, : observations.shape[1] - free].reshape(count, -1, self._width)
        there = columns.any(axis=2)
        rows, places = np.nonzero(there)
        shared = observations[:, observations.shape[1] - free :] @ first[self._width :] + first_bias
        hidden = np.maximum(columns[rows, places] @ first[: self._width] + shared[rows], 0.0)
        # Jobs of a cluster stand together, so that their sum is a difference of running sums' ends.
        numbers = there.sum(axis=1)
        mean = np.zeros((count, hidden.shape[1]), dtype=np.float32)
        some = numbers > 0
        if some.any():
            starts = (numbers.cumsum() - numbers)[some]
            mean[some] = np.add.reduceat(hidden, starts, axis=0) / numbers[some, None]
        size = hidden.shape[1]
        pooled = mean @ second[size:] + second_bias
        deep = np.maximum(hidden @ second[:size] + pooled[rows], 0.0)
        logits = np.zeros((count, 3 * columns.shape[1] + 1), dtype=np.float32)
        logits[:, :-1].reshape(count, -1, 3)[rows, places] = deep @ last + last_bias
        logits[:, -1] = (np.maximum(pooled, 0.0) @ void + void_bias)[:, 0]
        return logits


def network_of(weights: Mapping[str, NDArray[Any]], settings: Mapping[str, Any], name: str = "policy") -> Network:
    """The network that weights and settings (``Dl2Original``) describe.

    Raises
    ------
    CheckpointError
        Weights are missing, or their shapes are not those that the settings ask for.
    """
    try:
        kind, jobs = settings["network"], int(settings["window"])
        width = len(settings["models"]) + _SCALARS
        inputs, outputs = jobs * width + len(settings["resources"]), 3 * jobs + 1
        made: Network = Dense(weights, name) if kind == "dense" else SharedJobs(weights, name, width)
        answer = made(np.zeros((1, inputs), dtype=np.float32))
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise CheckpointError(f"dl2-original: weights and settings do not belong together: {error!r}") from None
    if answer.shape != (1, outputs):
        raise CheckpointError(f"dl2-original: the network has {answer.shape[1]} actions, a window of {jobs} {outputs}")
    return made


def chosen(logits: Matrix, masks: NDArray[Any], noise: NDArray[Any] | None) -> NDArray[np.int64]:
    """The best allowed action of each, shape (N,); with Gumbel noise, shape (N, 3J + 1), a draw from the softmax."""
    scores = logits if noise is None else logits + noise
    best: NDArray[np.int64] = np.where(masks != 0, scores, -np.inf).argmax(axis=1)
    return best


class Dl2Original:
    """Sizes jobs by a network that was trained as the paper says; see the module.

    Actions that have no room are masked: which those are is found out when one is chosen, and another is chosen then,
    which is the same as masking them before. A job that ends below its least size gets nothing.

    Parameters
    ----------
    checkpoint
        Of policy ``dl2-original``. Settings: ``network`` (dense, shared), ``window`` (J), ``models`` and ``resources``
        (names in the order of the inputs), ``first_bundles``, ``sampled``, ``slot_seconds``.
    sampled
        Whether actions are drawn from the policy's distribution instead of taking the best; by default as the
        checkpoint says, which knows what did better in validation.

    Raises
    ------
    CheckpointError
        Settings and weights do not belong together.
    """

    name: ClassVar[str] = "dl2-original"
    needs: ClassVar[frozenset[Evidence]] = NO_EVIDENCE

    def __init__(
        self, checkpoint: Checkpoint, *, sampled: bool | None = None, slot_seconds: float | None = None
    ) -> None:
        #: What was learned.
        self.checkpoint = checkpoint
        settings = checkpoint.settings
        self._network = network_of(checkpoint.weights, settings)
        self._types = {model: place for place, model in enumerate(settings["models"])}
        self._resources = tuple(settings["resources"])
        self._jobs = int(settings["window"])
        self._first_bundles = bool(settings["first_bundles"])
        self._seconds = float(settings["slot_seconds"] if slot_seconds is None else slot_seconds)
        self._sampled = bool(settings["sampled"]) if sampled is None else sampled
        acting = "sampled" if self._sampled else "greedy"
        self.version = version_of(checkpoint, {"sampled": sampled, "slot_seconds": slot_seconds}, f"-{acting}")

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``."""
        filling = Filling(snapshot, packing)
        room = _Room(snapshot, packing, filling, self._resources)
        if self._first_bundles:
            _give_first_bundles(room, snapshot.jobs)
        alternatives: dict[JobKey, tuple[Alternative, ...]] = {}
        for start in range(0, len(snapshot.jobs), self._jobs):
            batch = snapshot.jobs[start : start + self._jobs]
            weights = self._decide_batch(batch, snapshot.at, room, rng)
            for place, job in enumerate(batch):
                has = filling.allocations[job.key]
                options = [(Allocation(has.workers + add.workers, has.ps + add.ps), number)
                           for number, add in enumerate(_STEPS) if _grows(job, has, add)]  # fmt: skip
                alternatives[job.key] = (
                    Alternative(has, float(weights[-1])),
                    *(Alternative(option, float(weights[3 * place + number])) for option, number in options),
                )
        for job in snapshot.jobs:
            has = filling.allocations[job.key]
            usable = _usable(job, has, room.floor(job))
            if usable != has:
                text = f"was given {has}, with which it cannot run as it asks"
                filling.refuse(job, room.reasons.get(job.key) or Reason(Constraint.QUEUE, text))
                filling.allocations[job.key] = usable
            most = not any(_grows(job, has, step) for step in _STEPS)
            text = f"has its maximum of {has}" if most else f"more than {has} is not worth it to the learned policy"
            filling.refuse(job, room.reasons.get(job.key) or Reason(Constraint.SATISFIED, text))
        return filling.decision(self.name, self.version, measure="probability", alternatives=alternatives)

    def _decide_batch(self, batch: Sequence[Job], now: float, room: _Room, rng: np.random.Generator) -> Matrix:
        """Give tasks until void; returns the last distribution over actions, shape (3J + 1,)."""
        types, width = len(self._types), len(self._types) + _SCALARS
        observation = np.zeros((1, self._jobs * width + len(self._resources)), dtype=np.float32)
        columns = observation[0, : self._jobs * width].reshape(self._jobs, width)
        for place, job in enumerate(batch):
            kind = self._types.get(job.request.model)
            if kind is not None:
                columns[place, kind] = 1.0
            age = max(int((now - job.key.submitted) // self._seconds), 0)
            remaining = max(job.request.epochs - job.progress.epoch, 0.0)
            columns[place, types] = np.log1p(age) / _AGE_SCALE
            columns[place, types + 1] = np.log1p(remaining) / _REMAINING_SCALE
            columns[place, types + 2 :] = room.shown(job)
        while True:
            observation[0, self._jobs * width :] = room.free()
            logits = self._network(observation)[0]
            mask = np.zeros(3 * self._jobs + 1, dtype=np.bool_)
            mask[-1] = True
            for place, job in enumerate(batch):
                mask[3 * place : 3 * place + 3] = room.allowed(job)
            scores = logits + rng.gumbel(size=len(logits)) if self._sampled else logits
            while True:
                action = int(np.where(mask, scores, -np.inf).argmax())
                if action == 3 * self._jobs:
                    shifted = np.exp(np.where(mask, logits - logits[mask].max(), -np.inf))
                    return np.asarray(shifted / shifted.sum(), dtype=np.float32)
                place, number = divmod(action, 3)
                if room.add(batch[place], _STEPS[number]):
                    break
                mask[action] = False
            columns[place, types + 2 :] = room.shown(batch[place])


def from_checkpoint(folder: Path | None) -> Dl2Original:
    """The policy of a checkpoint.

    Raises
    ------
    CheckpointError
        There is none, or it cannot be read.
    """
    return with_checkpoint(None if folder is None else read_checkpoint(checkpoint_in(folder), policy=Dl2Original.name))


def with_checkpoint(
    checkpoint: Checkpoint | None = None, *, sampled: bool | None = None, slot_seconds: float | None = None
) -> Dl2Original:
    """DL2 as its paper has it, with a checkpoint that you trained.

    Raises
    ------
    CheckpointError
        There is none, for none comes with dl2d.
    """
    if checkpoint is None:
        raise CheckpointError("dl2-original: name a checkpoint; dl2d train --design original makes one")
    return Dl2Original(checkpoint, sampled=sampled, slot_seconds=slot_seconds)


class _Room:
    """What jobs have and can still have, in the numbers that the network sees."""

    def __init__(self, snapshot: Snapshot, packing: Packing, filling: Filling, resources: Sequence[str]) -> None:
        self._filling = filling
        self._resources = resources
        self._floors = dict(snapshot.floors)
        self._held = snapshot.held()
        #: Why a job's last action had no room.
        self.reasons: dict[JobKey, Reason] = {}
        capacity = dict(snapshot.capacity.thousandths)
        # What a cluster has nothing of takes no share.
        self._whole = np.array([max(capacity.get(name, 0), 1) for name in resources], dtype=np.int64)
        free = dict(Resources.total(packing.room().values()).thousandths)
        self._used = np.array([capacity.get(name, 0) - free.get(name, 0) for name in resources], dtype=np.int64)
        self._demands: dict[Resources, NDArray[np.int64]] = {}
        #: Steps that had no room since something was last added.
        self._blocked: set[tuple[Resources, Resources, Allocation, JobKey | None]] = set()

    def floor(self, job: Job) -> Allocation:
        return self._floors.get(job.key, NOTHING)

    def free(self) -> NDArray[np.float64]:
        """Free share of each resource."""
        free: NDArray[np.float64] = 1.0 - self._used / self._whole
        return free

    def shown(self, job: Job) -> tuple[float, float, float]:
        """Dominant share, workers and PSs of a job, scaled."""
        workers, ps = self._filling.allocations[job.key]
        held = workers * self._amounts(job.request.worker) + ps * self._amounts(job.request.ps)
        return float((held / self._whole).max(initial=0.0)), workers / _TASKS_SCALE, ps / _TASKS_SCALE

    def allowed(self, job: Job) -> list[bool]:
        """Which steps are within the job's most and not known to have no room."""
        has = self._filling.allocations[job.key]
        return [_grows(job, has, step) and self._key(job, step) not in self._blocked for step in _STEPS]

    def add(self, job: Job, step: Allocation) -> bool:
        """Give a job a step; returns whether there was room."""
        blocked: Blocked | None = self._filling.add(job, step)
        if blocked is None:
            self._used += step.workers * self._amounts(job.request.worker) + step.ps * self._amounts(job.request.ps)
            # A placement that looks at one node alone may look at another now.
            self._blocked.clear()
            return True
        self._blocked.add(self._key(job, step))
        self.reasons[job.key] = Reason(blocked.constraint, f"next step of {step}: {blocked}", blocked.shortfalls)
        return False

    def _key(self, job: Job, step: Allocation) -> tuple[Resources, Resources, Allocation, JobKey | None]:
        """Equal demands have room alike, except where a job's own tasks are there to be taken up again."""
        own = job.key if self._held.get(job.key, NOTHING) != NOTHING else None
        return job.request.worker, job.request.ps, step, own

    def _amounts(self, demand: Resources) -> NDArray[np.int64]:
        if demand not in self._demands:
            given = dict(demand.thousandths)
            self._demands[demand] = np.array([given.get(name, 0) for name in self._resources], dtype=np.int64)
        return self._demands[demand]


def _give_first_bundles(room: _Room, jobs: Sequence[Job]) -> None:
    """Its least size to each job in turn, bundle by bundle, until something has no room."""
    for job in jobs:
        least = _least(job)
        now = room.floor(job)
        workers, ps = max(least.workers - now.workers, 0), max(least.ps - now.ps, 0)
        bundles = min(workers, ps)
        steps = [_STEPS[2]] * bundles + [_STEPS[0]] * (workers - bundles) + [_STEPS[1]] * (ps - bundles)
        for step in steps:
            if not room.add(job, step):
                if room.reasons[job.key].constraint is Constraint.INFEASIBLE:
                    break
                return


def _least(job: Job) -> Allocation:
    request = job.request
    workers = next((count for count in range(1, request.max_workers + 1) if request.allows(count)), 0)
    return Allocation(workers, request.min_ps)


def _grows(job: Job, has: Allocation, step: Allocation) -> bool:
    return has.workers + step.workers <= job.request.max_workers and has.ps + step.ps <= job.request.max_ps


def _usable(job: Job, has: Allocation, floor: Allocation) -> Allocation:
    """What of an allocation the job can run with: not less than its floor, or nothing."""
    workers = max(job.request.largest_allowed(has.workers), floor.workers)
    usable = Allocation(workers, has.ps)
    return usable if workers and has.ps >= job.request.min_ps and workers >= job.request.min_workers else floor
