"""Policy and value networks for learning (torch); their counterparts in ``inference_network`` decide (numpy)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dl2d.core.array_types import Arrays
from dl2d.core.errors import CheckpointError, Diverged
from dl2d.core.json_codec import decode, encode
from dl2d.learning.dl2_paper.settings import NetworkKind
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.dl2_paper.inference_network import Dense, Network, SharedJobs
from dl2d.policies.dl2_paper.observation import ASKED, EXTRAS, SCALARS, TIMES, Layout, ObservationEncoding

#: Standard deviation of weights of a fresh output layer: all actions are about equally likely.
_OUTPUT_DEVIATION = 0.01
#: A hidden unit with less than this share of the others' mean size is dead.
_DEAD = 0.01


class DenseNetwork(nn.Module):
    """Two hidden layers over the whole observation."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, outputs)

    def forward(self, observations: Tensor) -> Tensor:
        """Shape (N, inputs) to (N, outputs)."""
        answer: Tensor = self.last(self.hidden(observations)[1])
        return answer

    def hidden(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Values of both hidden layers, shape (N, hidden) each."""
        first = torch.relu(self.first(observations))
        return first, torch.relu(self.second(first))

    def named(self) -> dict[str, nn.Linear]:
        """Layers by the names that they have in a checkpoint."""
        return {"0": self.first, "1": self.second, "2": self.last}


class SharedNetwork(nn.Module):
    """The same network for every job of the window, and the mean over jobs; see ``SharedJobs`` of the policy.

    ``outputs`` are numbers a job, and one more for void where ``void``.
    """

    def __init__(self, width: int, free: int, hidden: int, outputs: int, *, void: bool) -> None:
        super().__init__()
        self.width, self._free = width, free
        self.first = nn.Linear(width + free, hidden)
        self.second = nn.Linear(2 * hidden, hidden)
        self.job = nn.Linear(hidden, outputs)
        self.void = nn.Linear(hidden, 1) if void else None

    def forward(self, observations: Tensor) -> Tensor:
        """Shape (N, J x width + free) to (N, J x outputs [+ 1]); columns without a job give 0."""
        _, deep, pooled, there = self._layers(observations)
        rows, places = there.nonzero(as_tuple=True)
        flat = torch.zeros(there.numel(), self.job.out_features)
        flat = flat.index_copy(0, rows * there.shape[1] + places, self.job(deep))
        jobs = flat.reshape(len(there), -1)
        return jobs if self.void is None else torch.cat((jobs, self.void(torch.relu(pooled))), dim=1)

    def hidden(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Values of both hidden layers, shape (jobs that are there, hidden) each."""
        first, second, _, _ = self._layers(observations)
        return first, second

    def _layers(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both hidden layers, what all jobs add to the second, shape (N, hidden), and where there are jobs."""
        count = len(observations)
        split = observations.shape[1] - self._free
        columns = observations[:, :split].reshape(count, -1, self.width)
        there = columns.ne(0).any(dim=2)
        rows, places = there.nonzero(as_tuple=True)
        weight, bias = self.first.weight, self.first.bias
        shared = nn.functional.linear(observations[:, split:], weight[:, self.width :], bias)
        own = nn.functional.linear(columns[rows, places], weight[:, : self.width])
        hidden = torch.relu(own + shared.index_select(0, rows))
        total = torch.zeros(count, hidden.shape[1]).index_add(0, rows, hidden)
        mean = total / there.sum(dim=1, keepdim=True).clamp(min=1)
        size = hidden.shape[1]
        weight, bias = self.second.weight, self.second.bias
        pooled = nn.functional.linear(mean, weight[:, size:], bias)
        deep = torch.relu(nn.functional.linear(hidden, weight[:, :size]) + pooled.index_select(0, rows))
        return hidden, deep, pooled, there

    def named(self) -> dict[str, nn.Linear]:
        """Layers by the names that they have in a checkpoint."""
        named = {"0": self.first, "1": self.second, "job": self.job}
        return named if self.void is None else {**named, "void": self.void}


Net = DenseNetwork | SharedNetwork


def policy_network(kind: NetworkKind, layout: Layout, hidden: int) -> Net:
    """Network that gives the logits of 3J + 1 actions."""
    if kind is NetworkKind.DENSE:
        return DenseNetwork(layout.length, hidden, 3 * layout.window + 1)
    return SharedNetwork(layout.features, layout.resources, hidden, 3, void=True)


def value_network(kind: NetworkKind, layout: Layout, hidden: int, *, by_job: bool) -> Net:
    """Network that gives the value of each job of the window, shape (N, J), or of the whole slot, shape (N, 1)."""
    if kind is NetworkKind.DENSE or not by_job:
        return DenseNetwork(layout.length, hidden, layout.window if by_job else 1)
    return SharedNetwork(layout.features, layout.resources, hidden, 1, void=False)


def for_acting(network: Net, name: str = "policy") -> Network:
    """The same network in numpy, with the weights that it has now."""
    weights = weights_of(network, name)
    return Dense(weights, name) if isinstance(network, DenseNetwork) else SharedJobs(weights, name, network.width)


def begin(network: Net, generator: torch.Generator, encoding: ObservationEncoding | None = None) -> None:
    """Draw all weights; the body's as He et al. for ReLUs.

    With an encoding, what jobs show beyond the paper's features begins without influence: its numbers are larger, and
    learning from rewards is slower where it has to unlearn them first.
    """
    with torch.no_grad():
        for layer in network.named().values():
            layer.weight.normal_(0.0, (2.0 / layer.in_features) ** 0.5, generator=generator)
            layer.bias.zero_()
        if encoding is not None:
            first = network.named()["0"].weight
            inputs = first.shape[1] - len(encoding.resources)
            first[:, :inputs].reshape(len(first), -1, encoding.width)[:, :, len(encoding.models) + SCALARS :] = 0.0
    draw_outputs(network, generator)


def draw_outputs(network: Net, generator: torch.Generator) -> None:
    """Draw the output layers afresh and keep the body, which is the first two layers."""
    with torch.no_grad():
        for layer in list(network.named().values())[2:]:
            layer.weight.normal_(0.0, _OUTPUT_DEVIATION, generator=generator)
            layer.bias.zero_()


def even_out(network: Net, observations: Tensor, generator: torch.Generator) -> None:
    """Bring every hidden unit to the size that it has in a network just drawn, and draw dead ones afresh.

    A body that was pushed far to imitate well has units that are never or hardly on, and others that are a hundred
    times as large as at first: steps of learning are then too small and too large. What a unit shows is kept, but for
    its size. The outputs are other numbers after this: draw them afresh.
    """
    drawn = copy.deepcopy(network)
    begin(drawn, generator)
    layers = list(network.named().values())[:2]
    fresh = list(drawn.named().values())[:2]
    with torch.no_grad():
        for number, (layer, other) in enumerate(zip(layers, fresh, strict=True)):
            size = network.hidden(observations)[number].square().mean(dim=0).sqrt()
            wanted = drawn.hidden(observations)[number].square().mean().sqrt()
            dead = size <= _DEAD * size.mean()
            factor = torch.where(dead, 1.0, wanted / torch.where(dead, 1.0, size))
            layer.weight.copy_(torch.where(dead[:, None], other.weight, layer.weight * factor[:, None]))
            layer.bias.copy_(torch.where(dead, other.bias, layer.bias * factor))
            if number == 0:
                # What it tells the second layer stays as it was; a shared network has each twice, own and mean.
                times = layers[1].in_features // len(dead)
                off, back = dead.repeat(times), (1.0 / factor).repeat(times)
                layers[1].weight.copy_(torch.where(off[None], fresh[1].weight, layers[1].weight * back[None]))


def weights_of(network: Net, name: str) -> dict[str, NDArray[Any]]:
    """Copies of the weights, as in a checkpoint."""
    weights: dict[str, NDArray[Any]] = {}
    for part, layer in network.named().items():
        weights[f"{name}.{part}.weight"] = np.array(layer.weight.detach().numpy(), dtype=np.float32)
        weights[f"{name}.{part}.bias"] = np.array(layer.bias.detach().numpy(), dtype=np.float32)
    return weights


def load_weights(network: Net, weights: Arrays, name: str) -> None:
    """The inverse of ``weights_of``."""
    with torch.no_grad():
        for part, layer in network.named().items():
            layer.weight.copy_(torch.from_numpy(weights[f"{name}.{part}.weight"]))
            layer.bias.copy_(torch.from_numpy(weights[f"{name}.{part}.bias"]))


def adopt(network: Net, start: Checkpoint, encoding: ObservationEncoding) -> None:
    """Take over the policy of a checkpoint, whose types and resources may be others.

    What both know is as it was; a type that the checkpoint does not know begins as the mean of those that it knows, and
    a resource, and features that not every network has, with no influence; such features that the network is not to see
    are left out.

    Raises
    ------
    CheckpointError
        It is another kind of network: of another design or size, or (where it is dense) for another J.
    """
    try:
        old = ObservationEncoding.of(start.settings)
        weights = {name: np.array(array) for name, array in start.weights.items()}
        first = weights["policy.0.weight"]
        if isinstance(network, DenseNetwork) and old.window != encoding.window:
            raise CheckpointError(
                f"start: the checkpoint's dense network sees {old.window} jobs at once, and window is "
                f"{encoding.window}: set window to {old.window}, or begin with a shared network"
            )
        jobs = encoding.window if isinstance(network, DenseNetwork) else 1
        free = first.shape[1] - len(old.resources)
        by_job = first[:, :free].reshape(len(first), jobs, old.width)
        mean = by_job[:, :, : len(old.models)].mean(axis=2, keepdims=True)
        types = [by_job[:, :, old.models.index(m)][:, :, None] if m in old.models else mean for m in encoding.models]
        end = len(old.models) + SCALARS
        shown = [*types, by_job[:, :, len(old.models) : end]]
        asked_sizes = (ASKED, old.layout.asked_sizes, encoding.layout.asked_sizes)
        times = (TIMES, old.remaining_times, encoding.remaining_times)
        for count, is_known, is_wanted in (asked_sizes, times, (EXTRAS, old.extras, encoding.extras)):
            if is_wanted:
                known = by_job[:, :, end : end + count]
                shown.append(known if is_known else np.zeros((len(first), jobs, count), first.dtype))
            end += count * is_known
        columns = np.concatenate(shown, axis=2).reshape(len(first), -1)
        none = np.zeros(len(first), dtype=first.dtype)
        shares = [first[:, free + old.resources.index(r)] if r in old.resources else none for r in encoding.resources]
        weights["policy.0.weight"] = np.concatenate([columns, np.stack(shares, axis=1)], axis=1)
        load_weights(network, weights, "policy")
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"start: the checkpoint's network has another shape than the one to train: {type(error).__name__}: {error}"
        ) from None


def described(encoding: ObservationEncoding, network: NetworkKind, *, sampled: bool) -> dict[str, Any]:
    """A checkpoint's settings."""
    return {"network": network.value, **decode(encode(encoding), dict[str, Any]), "sampled": sampled}


@contextmanager
def deterministic() -> Iterator[None]:
    """Equal inputs give equal weights: one thread, and no operation whose result depends on their order."""
    threads, was = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was)


def check_finite(what: str, *tensors: Tensor) -> None:
    """Stop where a number is none.

    Raises ``Diverged`` if some value is infinite or no number; says of what, and how many.
    """
    for tensor in tensors:
        if not bool(torch.isfinite(tensor).all()):
            wrong = int((~torch.isfinite(tensor)).sum())
            raise Diverged(
                f"training diverged: {wrong} of {tensor.numel()} values of {what} are not finite; "
                "a smaller rate, or rewards without infinities, may help"
            )
