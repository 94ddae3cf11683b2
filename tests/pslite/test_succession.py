"""Who owns the blocks of servers that are gone, and from where these have their state."""

from __future__ import annotations

import numpy as np
import pytest

from pslite.coordinator.succession import Loss, account, choose, holders, inexact
from pslite.job.blocks import Block
from pslite.job.plan import Member, Plan
from pslite.job.spec import LAMB, SGD, Adam
from pslite.numeric.optimizers import Updater, settled

MOMENTUM, PLAIN = SGD(lr=0.1, momentum=0.9), SGD(lr=0.1)


def member(task):
    return Member(task=task, incarnation=task, host="n", pid=1)


def blocks(*sizes, optimizer=MOMENTUM):
    return tuple(Block(n, 0, 0, size, "float32", optimizer) for n, size in enumerate(sizes))


def plan(*owners, servers=("a", "b", "c")):
    return Plan(number=1, workers=(), servers=tuple(map(member, servers)), owners=tuple(map(servers.index, owners)))


def chosen(wanted, copies, held, *, came=None, able=("b", "c"), sizes=(10, 10, 10, 10)):
    found = plan("a", "a", "b", "b")
    return choose(wanted, blocks(*sizes), copies, held, found, ["b", "c"], able, came or {})


def test_a_copy_as_new_as_any_workers_weights_goes_on():
    choice = chosen([0, 1], {0: {"b": 7, "c": 6}, 1: {"c": 8}}, {0: {"w": 7}, 1: {"w": 7, "v": 6}})
    assert (choice.owners, choice.losses, choice.nowhere) == ({0: "b", 1: "c"}, {}, ())


def test_an_older_copy_is_brought_to_the_newest_weights():
    choice = chosen([0], {0: {"c": 5}}, {0: {"w": 6, "v": 7}})
    assert choice.owners == {0: "c"}
    assert choice.losses == {0: Loss(version=7, worker="v", kept=5)}


def test_without_a_copy_the_server_with_the_least_takes_the_weights_and_workers_share_the_sending():
    choice = chosen([0, 1], {}, {0: {"v": 7, "w": 7}, 1: {"v": 7, "w": 7}})
    assert choice.owners == {0: "c", 1: "c"}  # b has two already
    assert [loss.worker for loss in choice.losses.values()] == ["v", "w"]
    assert {loss.kept for loss in choice.losses.values()} == {-1}


def test_only_who_knows_the_plan_in_force_makes_blocks_anew():
    assert chosen([0], {}, {0: {"w": 7}}, able=("b",)).owners == {0: "b"}


def test_what_nobody_has_is_said():
    assert chosen([0, 1], {}, {1: {"w": 3}}).nowhere == (0,)


def test_sums_that_somebody_lacks_must_be_had_from_one_who_got_them():
    held = {0: {"new": 7, "old": 6}}
    assert chosen([0], {}, held).losses[0].worker == "new"
    assert chosen([0], {}, held, came={"new": 7}).nowhere == (0,)
    # nobody lacks them: whatever is sent is of no account
    assert chosen([0], {}, {0: {"new": 7}}, came={"new": 7}).losses[0].version == 7


def test_only_what_an_optimizer_keeps_can_be_lost():
    losses = {0: Loss(7, "w", -1), 1: Loss(7, "w", 6)}
    assert inexact(blocks(4, 4), losses) == [0, 1]
    assert inexact(blocks(4, 4, optimizer=PLAIN), losses) == []


def test_what_became_of_blocks_in_words():
    assert account({0: -1, 1: -1, 2: 5}, {0: 7, 1: 7, 2: 7}, {0, 1, 2}) == (
        "2 blocks go on from a worker's weights of version 7, with an optimizer that begins anew; "
        "1 block goes on from a worker's weights of version 7, with the optimizer's state of version 5"
    )


def test_the_newest_holder_of_each_block_and_its_owner_to_be_of_equals():
    two = blocks(4, 4)
    found = plan("b", "c")
    assert holders(two, {0: {"a": 3, "b": 3}, 1: {"c": 3, "a": 4}}, found) == {0: (3, "b"), 1: (4, "a")}
    assert holders(two, {0: {"a": 3}}, found) is None


@pytest.mark.parametrize("rule", [Adam(lr=0.01), Adam(lr=0.01, eps_first=True)])
def test_an_optimizer_that_begins_anew_does_so_with_its_bias_correction(rule):
    rng = np.random.default_rng(1)
    gradients = rng.standard_normal((6, 50))
    fresh, late = np.zeros((2, 3, 50))
    updater = Updater()
    for version, gradient in enumerate(gradients):
        updater.apply(rule, fresh, gradient, 1.0, version)
        updater.apply(rule, late, gradient, 1.0, 1000 + version, since=1000)
        assert np.array_equal(fresh, late)
    # one who counts from 0 does with the settled state what its owner does
    told = settled(rule, late, 1006, 1000)
    mean, square = (told[row] / (1 - beta**1006) for row, beta in enumerate(rule.betas, 1))
    assert np.allclose(mean, fresh[1] / (1 - rule.betas[0] ** 6))
    assert np.allclose(square, fresh[2] / (1 - rule.betas[1] ** 6))


def test_lambs_lengths_count_alike():
    rule, updater = LAMB(lr=0.01), Updater()
    state, gradient = np.zeros((3, 8)), np.arange(1.0, 9.0)
    anew = updater.lengths(rule, state, gradient, 1.0, 40, 1.0, [8], 40)
    assert anew == updater.lengths(rule, state, gradient, 1.0, 0, 1.0, [8])
