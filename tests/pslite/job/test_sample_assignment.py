"""Samples are assigned each once in an epoch, whoever comes, goes and dies."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pslite.job.sample_assignment import SampleAssigner, SampleRange, Seen


class Worker:
    """A script's loop: samples that it has trained with, by the epoch whose order they are of."""

    def __init__(self, assigner, task):
        self.assigner, self.task, self.seen, self.held = assigner, task, Seen(), []

    def take(self, version, count, workers):
        """Take a batch of an epoch, or the rest of it."""
        taken = 0
        while taken < count:
            answer = self.assigner.assign(self.task, version, self.seen, count - taken, workers)
            if answer.low == answer.high:
                self.seen = self.seen._replace(over=answer.epoch)
                if taken:
                    return
                continue
            self.seen = self.seen._replace(epoch=answer.epoch)
            self.held += [(answer.order, place) for place in range(answer.low, answer.high)]
            taken += answer.high - answer.low


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 60), st.randoms(use_true_random=False))
def test_each_sample_once_in_each_epoch_whoever_comes_goes_and_dies(samples, batch, steps, choose: random.Random):
    assigner = SampleAssigner(samples)
    workers = [Worker(assigner, "0")]
    trained = Counter()
    for version in range(steps):
        for each in workers:
            each.take(version, batch, choose.choice((len(workers), len(workers), 1, 9)))
        if len(workers) > 1 and choose.random() < 0.2:  # it dies in the middle of the step
            assigner.take_back(workers.pop(choose.randrange(len(workers))).task, version)
        for each in workers:
            trained.update(each.held)
            each.held = []
        if len(workers) > 1 and choose.random() < 0.2:  # it leaves after it
            workers.pop()
        elif choose.random() < 0.3:
            workers.append(Worker(assigner, str(version + 1)))
    assert all(count == 1 for count in trained.values())
    missing = {(epoch, place) for epoch in range(assigner.epoch) for place in range(samples)} - trained.keys()
    waiting = {(order, place) for _, order, low, high in assigner.returned for place in range(low, high)}
    assert missing <= waiting


def test_what_a_dead_worker_has_used_is_not_assigned_again():
    assigner = SampleAssigner(10)
    assert assigner.assign("a", 5, Seen(), 4, 1) == SampleRange(0, 0, 0, 4)
    assigner.assign("b", 6, Seen(), 4, 1)  # the step from version 5 is complete
    assigner.take_back("a", 0)
    assert assigner.returned == []
    assigner.take_back("b", 6)
    assert assigner.assign("c", 6, Seen(), 1, 1) == SampleRange(0, 0, 4, 5)


@given(st.integers(1, 90), st.integers(2, 7), st.integers(2, 5))
def test_an_epoch_ends_for_all_workers_with_the_same_step(samples, batch, count):
    assigner = SampleAssigner(samples)
    workers = [Worker(assigner, str(number)) for number in range(count)]
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
