"""Samples are dealt each once in an epoch, whoever comes, goes and dies."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pslite.job.sample_dealing import Deal, SampleDealer, Seen


class Worker:
    """A script's loop: samples that it has trained with, by the epoch whose order they are of."""

    def __init__(self, dealer, task):
        self.dealer, self.task, self.seen, self.held = dealer, task, Seen(), []

    def take(self, version, count, workers):
        """Take a batch of an epoch, or the rest of it."""
        taken = 0
        while taken < count:
            deal = self.dealer.deal(self.task, version, self.seen, count - taken, workers)
            if deal.low == deal.high:
                self.seen = self.seen._replace(over=deal.epoch)
                if taken:
                    return
                continue
            self.seen = self.seen._replace(epoch=deal.epoch)
            self.held += [(deal.order, place) for place in range(deal.low, deal.high)]
            taken += deal.high - deal.low


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 60), st.randoms(use_true_random=False))
def test_each_sample_once_in_each_epoch_whoever_comes_goes_and_dies(samples, batch, steps, choose: random.Random):
    dealer = SampleDealer(samples)
    workers = [Worker(dealer, "0")]
    trained = Counter()
    for version in range(steps):
        for each in workers:
            each.take(version, batch, choose.choice((len(workers), len(workers), 1, 9)))
        if len(workers) > 1 and choose.random() < 0.2:  # it dies in the middle of the step
            dealer.lose(workers.pop(choose.randrange(len(workers))).task, version)
        for each in workers:
            trained.update(each.held)
            each.held = []
        if len(workers) > 1 and choose.random() < 0.2:  # it leaves after it
            workers.pop()
        elif choose.random() < 0.3:
            workers.append(Worker(dealer, str(version + 1)))
    assert all(count == 1 for count in trained.values())
    missing = {(epoch, place) for epoch in range(dealer.epoch) for place in range(samples)} - trained.keys()
    waiting = {(order, place) for _, order, low, high in dealer.returned for place in range(low, high)}
    assert missing <= waiting


def test_what_a_dead_worker_has_used_is_not_dealt_again():
    dealer = SampleDealer(10)
    assert dealer.deal("a", 5, Seen(), 4, 1) == Deal(0, 0, 0, 4)
    dealer.deal("b", 6, Seen(), 4, 1)  # the step from version 5 is complete
    dealer.lose("a", 0)
    assert dealer.returned == []
    dealer.lose("b", 6)
    assert dealer.deal("c", 6, Seen(), 1, 1) == Deal(0, 0, 4, 5)


@given(st.integers(1, 90), st.integers(2, 7), st.integers(2, 5))
def test_an_epoch_ends_for_all_workers_with_the_same_step(samples, batch, count):
    dealer = SampleDealer(samples)
    workers = [Worker(dealer, str(number)) for number in range(count)]
    last = {}
    for version in range(-(-samples // (batch * count)) + 1):
        for each in workers:
            each.take(version, batch, count)
            if any(order == 0 for order, _ in each.held):
                last[each.task] = version
            each.held = []
    if (samples % (batch * count) or count) >= count:  # enough for all in the last step
        assert set(last.values()) == {(samples - 1) // (batch * count)}
        assert len(last) == count
