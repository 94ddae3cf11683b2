from __future__ import annotations

import numpy as np
import pytest
import torch

from dl2d.learning.original.errors import Diverged
from dl2d.learning.original.networks import (
    begin,
    draw_outputs,
    load_weights,
    policy_network,
    see_that_finite,
    value_network,
    weights_of,
)
from dl2d.learning.original.settings import NetworkKind
from dl2d.policies.dl2_original import network_of

SETTINGS = {"window": 3, "models": ["a", "b"], "resources": ["cpu", "gpu"]}
SHAPE = {"jobs": 3, "width": 7, "free": 2, "hidden": 8}


def observations() -> np.ndarray:
    """Five states, one with a gap in the window and one without any job."""
    made = np.random.default_rng(0).random((5, 23)).astype(np.float32)
    made[1, 7:14] = 0.0
    made[2, :21] = 0.0
    return made


@pytest.mark.parametrize("kind", list(NetworkKind))
def test_what_acts_is_what_was_learned(kind: NetworkKind) -> None:
    network = policy_network(kind, **SHAPE)
    begin(network, torch.Generator().manual_seed(1))
    acting = network_of(weights_of(network, "policy"), SETTINGS | {"network": kind.value})
    with torch.no_grad():
        learned = network(torch.from_numpy(observations())).numpy()
    assert acting(observations()) == pytest.approx(learned, abs=1e-6)
    assert learned.shape == (5, 10)


def test_the_shared_network_does_not_mind_the_order_of_jobs() -> None:
    network = policy_network(NetworkKind.SHARED, **SHAPE)
    begin(network, torch.Generator().manual_seed(1))
    turned = observations()
    turned[:, :21] = turned[:, :21].reshape(5, 3, 7)[:, ::-1].reshape(5, 21)
    with torch.no_grad():
        logits, others = (network(torch.from_numpy(states)).numpy() for states in (observations(), turned))
    assert others[:, :9].reshape(5, 3, 3)[:, ::-1] == pytest.approx(logits[:, :9].reshape(5, 3, 3), abs=1e-6)
    assert others[:, 9] == pytest.approx(logits[:, 9], abs=1e-6)


def test_a_fresh_output_layer_keeps_the_body() -> None:
    network = policy_network(NetworkKind.DENSE, **SHAPE)
    begin(network, torch.Generator().manual_seed(1))
    with torch.no_grad():
        network.named()["2"].bias += 5.0
    before = weights_of(network, "p")
    draw_outputs(network, torch.Generator().manual_seed(2))
    after = weights_of(network, "p")
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {"p.2.weight", "p.2.bias"}
    with torch.no_grad():
        chances = torch.softmax(network(torch.from_numpy(observations())), dim=1)
    assert chances.numpy() == pytest.approx(0.1, abs=0.02)


def test_weights_can_be_put_back() -> None:
    networks = [value_network(NetworkKind.SHARED, **SHAPE, by_job=True) for _ in range(2)]
    for seed, network in enumerate(networks):
        begin(network, torch.Generator().manual_seed(seed))
    load_weights(networks[1], weights_of(networks[0], "v"), "v")
    with torch.no_grad():
        first, second = (network(torch.from_numpy(observations())) for network in networks)
    assert first.shape == (5, 3)
    assert torch.equal(first, second)


def test_numbers_that_are_none_stop_training() -> None:
    see_that_finite("nothing", torch.ones(3))
    with pytest.raises(Diverged, match="training diverged: 2 of 3 values of the loss are not finite"):
        see_that_finite("the loss", torch.tensor([1.0, float("nan"), float("inf")]))
