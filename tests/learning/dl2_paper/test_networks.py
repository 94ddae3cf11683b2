from __future__ import annotations

import numpy as np
import pytest
import torch

from dl2d.core.errors import Diverged
from dl2d.learning.dl2_paper.networks import (
    Net,
    begin,
    check_finite,
    draw_outputs,
    even_out,
    for_acting,
    load_weights,
    policy_network,
    value_network,
    weights_of,
)
from dl2d.learning.dl2_paper.settings import NetworkKind
from dl2d.policies.dl2_paper.inference_network import network_of
from dl2d.policies.dl2_paper.observation import Layout

SETTINGS = {
    "window": 3,
    "models": ["a", "b"],
    "resources": ["cpu", "gpu"],
    "first_bundles": False,
    "slot_seconds": 60.0,
}
LAYOUT = Layout(window=3, types=2, resources=2, extras=False)


def observations() -> np.ndarray:
    """Five states, one with a gap in the window and one without any job."""
    made = np.random.default_rng(0).random((5, 23)).astype(np.float32)
    made[1, 7:14] = 0.0
    made[2, :21] = 0.0
    return made


@pytest.mark.parametrize("kind", list(NetworkKind))
def test_what_acts_is_what_was_learned(kind: NetworkKind) -> None:
    network = policy_network(kind, LAYOUT, 8)
    begin(network, torch.Generator().manual_seed(1))
    acting = network_of(weights_of(network, "policy"), SETTINGS | {"network": kind.value})
    with torch.no_grad():
        learned = network(torch.from_numpy(observations())).numpy()
    assert acting(observations()) == pytest.approx(learned, abs=1e-6)
    assert learned.shape == (5, 10)
    value = value_network(kind, LAYOUT, 8, by_job=True)
    begin(value, torch.Generator().manual_seed(2))
    with torch.no_grad():
        learned = value(torch.from_numpy(observations())).numpy()
    assert for_acting(value, "value")(observations()) == pytest.approx(learned, abs=1e-6)
    assert learned.shape == (5, 3)


def test_the_shared_network_does_not_mind_the_order_of_jobs() -> None:
    network = policy_network(NetworkKind.SHARED, LAYOUT, 8)
    begin(network, torch.Generator().manual_seed(1))
    turned = observations()
    turned[:, :21] = turned[:, :21].reshape(5, 3, 7)[:, ::-1].reshape(5, 21)
    with torch.no_grad():
        logits, others = (network(torch.from_numpy(states)).numpy() for states in (observations(), turned))
    assert others[:, :9].reshape(5, 3, 3)[:, ::-1] == pytest.approx(logits[:, :9].reshape(5, 3, 3), abs=1e-6)
    assert others[:, 9] == pytest.approx(logits[:, 9], abs=1e-6)


def test_a_fresh_output_layer_keeps_the_body() -> None:
    network = policy_network(NetworkKind.DENSE, LAYOUT, 8)
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
    networks = [value_network(NetworkKind.SHARED, LAYOUT, 8, by_job=True) for _ in range(2)]
    for seed, network in enumerate(networks):
        begin(network, torch.Generator().manual_seed(seed))
    load_weights(networks[1], weights_of(networks[0], "v"), "v")
    with torch.no_grad():
        first, second = (network(torch.from_numpy(observations())) for network in networks)
    assert first.shape == (5, 3)
    assert torch.equal(first, second)


def test_numbers_that_are_none_stop_training() -> None:
    check_finite("nothing", torch.ones(3))
    with pytest.raises(Diverged, match="training diverged: 2 of 3 values of the loss are not finite"):
        check_finite("the loss", torch.tensor([1.0, float("nan"), float("inf")]))


def of_ones(kind: NetworkKind) -> Net:
    """Weights of one sign: every hidden unit is on in every state."""
    network = policy_network(kind, LAYOUT, 8)
    with torch.no_grad():
        for number, layer in enumerate(network.named().values()):
            layer.weight.uniform_(0.1, 1.0, generator=torch.Generator().manual_seed(number))
            layer.bias.fill_(0.1)
    return network


@pytest.mark.parametrize("kind", list(NetworkKind))
def test_hidden_units_are_brought_to_one_size_and_show_what_they_did(kind: NetworkKind) -> None:
    network, looks = of_ones(kind), torch.from_numpy(observations())
    with torch.no_grad():
        network.named()["0"].weight[3] *= 50.0
        network.named()["1"].weight[5] *= 90.0
        before = network.hidden(looks)
        even_out(network, looks, torch.Generator().manual_seed(0))
        after = network.hidden(looks)
    for was, values in zip(before, after, strict=True):
        sizes = values.square().mean(dim=0).sqrt()
        assert sizes.numpy() == pytest.approx(float(sizes[0]), rel=1e-3)
        assert 0.05 < float(sizes[0]) < 5.0
        ratio = values / was
        assert (ratio - ratio[0]).abs().max() < 1e-3 * ratio.max()


@pytest.mark.parametrize("kind", list(NetworkKind))
def test_dead_units_are_drawn_afresh(kind: NetworkKind) -> None:
    network, looks = of_ones(kind), torch.from_numpy(observations())
    with torch.no_grad():
        network.named()["0"].bias[4] = -1e3
        network.named()["1"].bias[6] = -1e6
        even_out(network, looks, torch.Generator().manual_seed(0))
        first, second = (values.abs().max(dim=0).values for values in network.hidden(looks))
    assert abs(float(network.named()["0"].bias.detach()[4])) < 1.0
    assert abs(float(network.named()["1"].bias.detach()[6])) < 1.0
    assert bool((first[:4] > 0).all())
    assert bool((second[:6] > 0).all())
