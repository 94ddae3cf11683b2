"""Networks of the paper's policy for deciding (numpy); ``dl2d.learning.dl2_paper.networks`` has them for learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dl2d.core.array_types import Arrays, Floats32, Ints
from dl2d.core.errors import CheckpointError
from dl2d.policies.dl2_paper.observation import ObservationEncoding


class Network(Protocol):
    """Logits of actions."""

    def __call__(self, observations: Floats32) -> Floats32:
        """Shape (N, width) to (N, 3J + 1)."""
        ...


class Dense:
    """The paper's network: fully connected layers over the whole observation, ReLUs between them.

    ``weights`` has ``<name>.<layer>.weight`` (out, in) and ``<name>.<layer>.bias``.
    """

    def __init__(self, weights: Arrays, name: str) -> None:
        self._layers: list[tuple[Floats32, Floats32]] = []
        while f"{name}.{len(self._layers)}.weight" in weights:
            at = f"{name}.{len(self._layers)}"
            matrix = np.ascontiguousarray(weights[f"{at}.weight"].T, dtype=np.float32)
            self._layers.append((matrix, np.asarray(weights[f"{at}.bias"], dtype=np.float32)))

    def __call__(self, observations: Floats32) -> Floats32:
        """See ``Network``."""
        values = observations
        *hidden, (last, bias) = self._layers
        for matrix, shift in hidden:
            values = values @ matrix
            values += shift
            np.maximum(values, 0.0, out=values)
        return values @ last + bias


class SharedJobs:
    """One network for every job of the window, which also sees the mean of all of them: any J will do.

    Two hidden layers: what a job shows, with the free shares; then that again with the mean over jobs. Void has a layer
    of its own on the mean; a value network has none.

    Parameters
    ----------
    weights
        ``<name>.{0,1,job,void}.{weight,bias}``.
    width
        Features of a job.
    """

    def __init__(self, weights: Arrays, name: str, width: int) -> None:
        self._width = width
        self._parts = {
            part: (
                np.ascontiguousarray(weights[f"{name}.{part}.weight"].T, dtype=np.float32),
                np.asarray(weights[f"{name}.{part}.bias"], dtype=np.float32),
            )
            for part in ("0", "1", "job", "void")
            if part != "void" or f"{name}.void.weight" in weights
        }

    def __call__(self, observations: Floats32) -> Floats32:
        """See ``Network``; a value network gives one number for each job, shape (N, J)."""
        first, first_bias = self._parts["0"]
        second, second_bias = self._parts["1"]
        last, last_bias = self._parts["job"]
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
        answers = np.zeros((*there.shape, last.shape[1]), dtype=np.float32)
        answers[rows, places] = deep @ last + last_bias
        flat: Floats32 = answers.reshape(count, -1)
        if "void" not in self._parts:
            return flat
        void, void_bias = self._parts["void"]
        return np.concatenate((flat, np.maximum(pooled, 0.0) @ void + void_bias), axis=1)


def network_of(weights: Arrays, settings: Mapping[str, Any]) -> Network:
    """The network that weights and settings (``Dl2PaperPolicy``) describe.

    Raises
    ------
    CheckpointError
        Weights are missing, their shapes are not those that the settings ask for, or they overflow.
    """
    try:
        kind, encoding = settings["network"], ObservationEncoding.of(settings)
        made: Network = Dense(weights, "policy") if kind == "dense" else SharedJobs(weights, "policy", encoding.width)
        with np.errstate(over="raise", invalid="raise"):
            answer = made(np.zeros((1, encoding.inputs), dtype=np.float32))
    except FloatingPointError as error:
        raise CheckpointError(f"dl2-original: the weights are too large: {error}") from None
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"dl2-original: weights and settings do not belong together: {type(error).__name__}: {error}"
        ) from None
    if answer.shape != (1, encoding.void + 1):
        what = f"a window of {encoding.window} {encoding.void + 1}"
        raise CheckpointError(f"dl2-original: the network has {answer.shape[1]} actions, {what}")
    return made


def chosen(logits: Floats32, masks: NDArray[Any], noise: NDArray[Any] | None) -> Ints:
    """The best allowed action of each, shape (N,); with Gumbel noise, shape (N, 3J + 1), a draw from the softmax."""
    scores = logits if noise is None else logits + noise
    best: Ints = np.where(masks != 0, scores, -np.inf).argmax(axis=1)
    return best
