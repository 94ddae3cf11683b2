"""DL2 as its paper has it (Peng et al., arXiv 1909.06040, section 4): jobs get tasks one at a time, until enough.

In each interval the jobs, in submit order, are gone through in batches of J. A network that sees the batch answers with
one of 3J + 1 actions, again and again: a worker, a PS or one of both for one of its jobs, or void, which ends the
batch. What it sees and may do is, number for number, that of ``dl2d.simulation.windows``, in which it was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.errors import CheckpointError, PolicyError
from dl2d.core.jobs import Allocation, JobKey
from dl2d.core.packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.policies.checkpoint import Checkpoint, checkpoint_in, read_checkpoint, version_of
from dl2d.policies.sizing import STEPS, Batch, Sight, Sizing, grows, usable

Matrix = NDArray[np.float32]
#: Steps whose noise is drawn together.
_DRAWN: Final = 32
#: More than rounding may make of what a unit is given.
_ROUNDED: Final = 1e-3


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

    def following(self, columns: Matrix, count: int, free: Matrix, most: Matrix) -> Callable[[int | None], Matrix]:
        """See ``SharedJobs.following``."""
        del most
        return _FollowingDense(columns, count, free, self._layers)

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

    def following(self, columns: Matrix, count: int, free: Matrix, most: Matrix) -> Callable[[int | None], Matrix]:
        """Logits of one batch again and again, shape (3J + 1,).

        Parameters
        ----------
        columns
            What the jobs show, shape (J, features); the first ``count`` are there. Is looked at again at each call.
        free
            Free shares, looked at again likewise; will not grow.
        most
            What the jobs will show at most, shape (count, features); they show no less than now.

        Returns
        -------
        Callable[[int | None], Matrix]
            Is told which job alone has changed since the last call.
        """
        return _Following(columns, count, free, _without_idle(self._parts, columns[:count], free, most))


def _bounds(
    weights: Matrix, bias: Matrix, low: tuple[Matrix, Matrix], high: tuple[Matrix, Matrix]
) -> tuple[Matrix, Matrix]:
    """Between what a layer of ReLUs stays, shape (jobs, units), if its inputs stay between ``low`` and ``high``.

    Inputs are of each job, shape (jobs, features), and of all jobs alike, shape (features,).
    """
    width = low[0].shape[1]
    up, down = np.maximum(weights, 0.0), np.minimum(weights, 0.0)
    least, most = (
        one[0] @ up[:width] + other[0] @ down[:width] + (one[1] @ up[width:] + other[1] @ down[width:] + bias)
        for one, other in ((low, high), (high, low))
    )
    # Not to be wrong by rounding.
    return np.maximum(least - _ROUNDED, 0.0), np.maximum(most + _ROUNDED, 0.0)


def _without_idle(
    parts: Mapping[str, tuple[Matrix, Matrix]], columns: Matrix, free: Matrix, most: Matrix
) -> Mapping[str, tuple[Matrix, Matrix]]:
    """Layers of ``SharedJobs`` without the units that stay 0 whatever is given to these jobs; see ``following``."""
    (first, first_bias), (second, second_bias) = parts["0"], parts["1"]
    (last, last_bias), (void, void_bias) = parts["job"], parts["void"]
    low, high = _bounds(
        first, first_bias, (columns, np.minimum(free, 0.0)), (np.maximum(most, columns), np.maximum(free, 0.0))
    )
    means = [each.sum(axis=0) / np.float32(max(len(each), 1)) for each in (low, high)]
    # What void goes by is what a job with nothing of its own would have.
    nothing = np.zeros((1, first.shape[1]), dtype=np.float32)
    own = [np.concatenate([each, nothing]) for each in (low, high)]
    _, deep = _bounds(second, second_bias, (own[0], means[0]), (own[1], means[1]))
    on, deep_on = high.any(axis=0), deep.any(axis=0)
    return {
        "0": (first[:, on], first_bias[on]),
        "1": (np.ascontiguousarray(second[np.tile(on, 2)][:, deep_on]), second_bias[deep_on]),
        "job": (last[deep_on], last_bias),
        "void": (void[deep_on], void_bias),
    }


class _FollowingDense:
    """``Dense`` on one batch, of which one job changes at a time: the first layer is a sum over jobs."""

    def __init__(self, columns: Matrix, count: int, free: Matrix, layers: Sequence[tuple[Matrix, Matrix]]) -> None:
        (first, bias), *self._deeper = layers
        jobs, width = columns.shape
        self._columns, self._free = columns, free
        self._of_jobs = first[: jobs * width].reshape(jobs, width, -1)[:count]
        self._of_free = first[jobs * width :]
        #: What each job adds, what the free shares add, and the bias; shape (jobs + 2, units).
        self._parts = np.empty((count + 2, first.shape[1]), dtype=np.float32)
        self._parts[:count] = np.matmul(columns[:count, None], self._of_jobs)[:, 0]
        self._parts[-1] = bias
        self._ones = np.ones(count + 2, dtype=np.float32)
        self._zeros = [np.zeros_like(bias), *(np.zeros_like(shift) for _, shift in self._deeper)]

    def __call__(self, changed: int | None) -> Matrix:
        """Logits, shape (3J + 1,)."""
        if changed is not None:
            self._columns[changed].dot(self._of_jobs[changed], self._parts[changed])
        self._free.dot(self._of_free, self._parts[-2])
        values: Matrix = self._ones.dot(self._parts)
        for (matrix, shift), zeros in zip(self._deeper, self._zeros, strict=False):
            np.maximum(values, zeros, out=values)
            values = values.dot(matrix)
            values += shift
        return values


class _Following:
    """``SharedJobs`` on one batch, of which one job changes at a time.

    Each call is made of few and large steps, for what counts in arrays this small is how many there are: biases are
    rows of the matrices, units stand in rows and jobs in columns, and no array has to be stretched to another's shape.
    """

    def __init__(
        self,
        columns: Matrix,
        count: int,
        free: Matrix,
        parts: Mapping[str, tuple[Matrix, Matrix]],
    ) -> None:
        (first, first_bias), (second, second_bias) = parts["0"], parts["1"]
        (last, last_bias), (void, void_bias) = parts["job"], parts["void"]
        width, size, deep = columns.shape[1], first.shape[1], second.shape[1]
        self._free = free
        #: What each job shows, the free shares, and 1.
        self._shown = np.ones((len(first) + 1, count), dtype=np.float32)
        self._shown[:width] = columns[:count].T
        self._shares = list(self._shown[width:-1])
        self._pairs = list(zip(self._shown[:width].T, columns[:count], strict=True))
        self._first = np.concatenate([first, first_bias[None]]).T
        #: Hidden units of jobs, and 1.
        whole = np.ones((size + 1, count), dtype=np.float32)
        self._hidden, self._hidden_and_one = whole[:size], whole
        #: Sum of the hidden units over jobs and 1; what it is to the second layer: the last row of that.
        self._sum = np.ones(size + 1, dtype=np.float32)
        self._summed = self._sum[:-1]
        self._of_sum = np.concatenate([second[size:] / np.float32(max(count, 1)), second_bias[None]])
        layer = np.concatenate([second[:size], second_bias[None]])
        self._second, self._pooled = layer.T, layer[-1]
        whole = np.ones((deep + 1, count), dtype=np.float32)
        self._deep, self._deep_and_one = whole[:deep], whole.T
        self._last = np.concatenate([last, last_bias[None]])
        self._void, self._void_bias = np.ascontiguousarray(void[:, 0]), float(void_bias[0])
        self._ones = np.ones(count, dtype=np.float32)
        self._zeros = np.zeros_like(self._hidden), np.zeros_like(self._deep), np.zeros_like(self._pooled)
        self._logits = np.zeros(3 * len(columns) + 1, dtype=np.float32)
        self._jobs = self._logits[: 3 * count].reshape(count, 3)

    def __call__(self, changed: int | None) -> Matrix:
        """Logits, shape (3J + 1,): the same array at each call."""
        hidden, deep, zeros = self._hidden, self._deep, self._zeros
        if changed is not None:
            into, column = self._pairs[changed]
            into[:] = column
        for share, free in zip(self._shares, self._free.tolist(), strict=True):
            share.fill(free)
        # As a method ``dot`` takes less time than as a function, which counts as well.
        self._first.dot(self._shown, hidden)
        np.maximum(hidden, zeros[0], out=hidden)
        hidden.dot(self._ones, self._summed)
        self._sum.dot(self._of_sum, self._pooled)
        self._second.dot(self._hidden_and_one, deep)
        np.maximum(deep, zeros[1], out=deep)
        self._deep_and_one.dot(self._last, self._jobs)
        self._logits[-1] = float(np.maximum(self._pooled, zeros[2]).dot(self._void)) + self._void_bias
        return self._logits


def network_of(weights: Mapping[str, NDArray[Any]], settings: Mapping[str, Any], name: str = "policy") -> Network:
    """The network that weights and settings (``Dl2Original``) describe.

    Raises
    ------
    CheckpointError
        Weights are missing, or their shapes are not those that the settings ask for.
    """
    try:
        kind, sight = settings["network"], Sight.of(settings)
        made: Network = Dense(weights, name) if kind == "dense" else SharedJobs(weights, name, sight.width)
        answer = made(np.zeros((1, sight.inputs), dtype=np.float32))
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise CheckpointError(f"dl2-original: weights and settings do not belong together: {error!r}") from None
    if answer.shape != (1, sight.void + 1):
        what = f"a window of {sight.window} {sight.void + 1}"
        raise CheckpointError(f"dl2-original: the network has {answer.shape[1]} actions, {what}")
    return made


def chosen(logits: Matrix, masks: NDArray[Any], noise: NDArray[Any] | None) -> NDArray[np.int64]:
    """The best allowed action of each, shape (N,); with Gumbel noise, shape (N, 3J + 1), a draw from the softmax."""
    scores = logits if noise is None else logits + noise
    best: NDArray[np.int64] = np.where(masks != 0, scores, -np.inf).argmax(axis=1)
    return best


class _Draws:
    """Gumbel noise, that of some steps at once, which is faster.

    It is that of ``Generator.gumbel`` up to rounding, and in the end the generator is as if it had been asked for each.

    Parameters
    ----------
    size
        Numbers of a step.
    """

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        self._rng, self._size = rng, size
        self._drawn: list[NDArray[np.float64]] = []
        self._before: Any = None

    def next(self) -> NDArray[np.float64]:
        """Noise of the next step, shape (size,)."""
        if not self._drawn:
            self._before = self._rng.bit_generator.state
            even = self._rng.random((_DRAWN, self._size))
            if even.all():
                noise = -np.log(-np.log(1.0 - even))
            else:
                # 0, of which there is no logarithm, is drawn again by numpy.
                self._rng.bit_generator.state = self._before
                noise = self._rng.gumbel(size=even.shape)
            self._drawn = [*noise[::-1]]
        return self._drawn.pop()

    def end(self) -> None:
        """Give back what was not used."""
        if self._drawn:
            self._rng.bit_generator.state = self._before
            self._rng.gumbel(size=(_DRAWN - len(self._drawn), self._size))
            self._drawn = []


class Dl2Original:
    """Sizes jobs by a network that was trained as the paper says; see the module.

    Actions that have no room are masked: which those are is found out when one is chosen, and another is chosen then,
    which is the same as masking them before. A job that ends below its least size gets nothing.

    Parameters
    ----------
    checkpoint
        Of policy ``dl2-original``. Settings: ``network`` (dense, shared), ``window`` (J), ``models`` and ``resources``
        (names in the order of the inputs), ``first_bundles``, ``extras``, ``sampled``, ``slot_seconds``.
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
        #: What scores actions; may be put into another that watches it.
        self.network = network_of(checkpoint.weights, settings)
        sight = Sight.of(settings)
        self._sight = sight if slot_seconds is None else replace(sight, slot_seconds=float(slot_seconds))
        self._sampled = bool(settings["sampled"]) if sampled is None else sampled
        acting = "sampled" if self._sampled else "greedy"
        self.version = version_of(checkpoint, {"sampled": sampled, "slot_seconds": slot_seconds}, f"-{acting}")

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``.

        Raises
        ------
        PolicyError
            The network overflows.
        """
        sizing = Sizing(snapshot, packing, self._sight)
        filling = sizing.filling
        alternatives: dict[JobKey, tuple[Alternative, ...]] = {}
        for batch in sizing.batches():
            weights = self._decide_batch(batch, rng)
            for place, job in enumerate(batch.jobs):
                has = filling.allocations[job.key]
                options = [(Allocation(has.workers + add.workers, has.ps + add.ps), number)
                           for number, add in enumerate(STEPS) if grows(job, has, add)]  # fmt: skip
                alternatives[job.key] = (
                    Alternative(has, float(weights[-1])),
                    *(Alternative(option, float(weights[3 * place + number])) for option, number in options),
                )
        reasons = {job.key: sizing.no_room(job) or sizing.reasons.get(job.key) for job in snapshot.jobs}
        for job in snapshot.jobs:
            has = filling.allocations[job.key]
            kept = usable(job, has, sizing.floor(job))
            if kept != has:
                text = f"was given {has}, with which it cannot run as it asks"
                filling.refuse(job, reasons[job.key] or Reason(Constraint.QUEUE, text))
                filling.allocations[job.key] = kept
            most = not any(grows(job, has, step) for step in STEPS)
            text = f"has its maximum of {has}" if most else f"more than {has} is not worth it to the learned policy"
            filling.refuse(job, reasons[job.key] or Reason(Constraint.SATISFIED, text))
        return filling.decision(self.name, self.version, measure="probability", alternatives=alternatives)

    def _decide_batch(self, batch: Batch, rng: np.random.Generator) -> Matrix:
        """Give tasks until void; returns the last distribution over actions, shape (3J + 1,)."""
        void = self._sight.void
        score = self._scorer(batch)
        draws = _Draws(rng, void + 1) if self._sampled else None
        scores, never = np.empty(void + 1), np.array(-np.inf)
        changed: int | None = None
        while True:
            logits = score(changed)
            if draws is None:
                scores[:] = logits
            else:
                np.add(logits, draws.next(), out=scores)
            # Stays what it is while actions are tried: the distribution is that from which the last one was taken.
            closed = batch.closed()
            np.copyto(scores, never, where=closed)
            while True:
                action = int(scores.argmax())
                # What is no number counts as the largest.
                if not math.isfinite(scores[action]):
                    raise PolicyError(
                        "dl2-original: the network answers with what is no number; its weights are no use"
                    )
                if action == void:
                    if draws is not None:
                        draws.end()
                    mask = ~closed
                    shifted = np.exp(np.where(mask, logits - logits[mask].max(), -np.inf))
                    return np.asarray(shifted / shifted.sum(), dtype=np.float32)
                if batch.act(action):
                    changed = action // len(STEPS)
                    break
                scores[action] = -np.inf

    def _scorer(self, batch: Batch) -> Callable[[int | None], Matrix]:
        """Gives the logits after each step, of which the job that it was given to is named."""
        if isinstance(self.network, Dense | SharedJobs):
            return self.network.following(batch.columns, len(batch.jobs), batch.free, batch.most)
        network, observation = self.network, batch.observation
        return lambda _: network(observation)[0]


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
