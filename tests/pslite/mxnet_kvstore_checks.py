"""Checks of the KVStore's parts, each alone; run by the tests in the environment that has MXNet."""

from __future__ import annotations

from types import SimpleNamespace

import mxnet as mx
import numpy as np
from mxnet_checks import raises, run_named

from pslite.errors import UsageError
from pslite.mxnet.kvstore.key_table import KeyTable
from pslite.mxnet.kvstore.kvstore_job import KVStoreJob
from pslite.mxnet.kvstore.push_and_pull import KVStoreSteps
from pslite.mxnet.kvstore.wait_for_same_key_group import KeyGroupTurns
from pslite.mxnet.kvstore.weight_writer import WeightWriter
from pslite.worker.single_process_session import SingleSession

SGD = mx.optimizer.SGD(learning_rate=0.5)


class Leader:
    """A job of two groups of keys, of which the first worker trains those of a script, then none."""

    def __init__(self, script, rank=1):
        self.script = iter(script)
        self.keys = SimpleNamespace(groups=[[], []], groups_in=set)
        self.session = SimpleNamespace(rank_and_size=(rank, 2), first_worker_segments={0})
        self.idle = 0

    def exchange_nothing(self):
        self.idle += 1
        self.step()

    def step(self):
        self.session.first_worker_segments = next(self.script, set())


def turns_are_joined():
    """Only where the first worker was at others: from the step on in which it begins with the same keys."""
    leader = Leader([{1}, {0}, {1}, {0}, {1}])
    turns = KeyGroupTurns(leader)
    assert not turns.join(0)  # nothing is known yet
    leader.step()
    turns.note(0)  # the first one was at 1
    assert turns.out_of_step
    assert turns.join(1)
    assert leader.idle == 2  # its steps of 0 and of 1
    for group in (0, 1):
        assert not turns.join(group)
        leader.step()
        turns.note(group)
    assert (turns.out_of_step, leader.idle) == (False, 2)


def turns_that_do_not_come_are_waited_for_once():
    leader = Leader([{0}] * 70)
    turns = KeyGroupTurns(leader)
    turns.out_of_step = True
    assert not turns.join(1)
    idle = leader.idle
    assert idle > 2
    turns.note(1)
    assert not turns.out_of_step
    assert not turns.join(0)
    assert not turns.join(1)
    assert leader.idle == idle


def the_first_worker_waits_for_nobody():
    leader = Leader([{0}], rank=0)
    turns = KeyGroupTurns(leader)
    turns.out_of_step = True
    assert not turns.join(1)
    assert leader.idle == 0


def weights_are_written_where_they_are_asked_for():
    """A key's own value before the job has it, the job's value then; keys that are never pushed keep theirs."""
    keys, session = KeyTable(), SingleSession(None)
    writer = WeightWriter(session, keys)
    keys.freeze(["fixed"])
    for key in ("a", "fixed"):
        keys.add(key, mx.nd.ones(2))
    outs = {key: mx.nd.zeros(2) for key in ("a", "fixed")}
    for key, out in outs.items():
        writer.ask_first(keys[key], [out])
        assert out.asnumpy().tolist() == [1, 1]
    rows = mx.nd.sparse.zeros("row_sparse", (2,))
    writer.put_rows(keys["a"], rows, np.array([1]))
    assert rows.asnumpy().tolist() == [0, 1]
    keys.choose_trained(SGD, [])
    session.describe(keys.describe(SGD, workers=1, staleness=0, durability="none"))
    keys["a"].of(session.weights)[:] = (5, 6)
    writer.begin()
    assert outs["a"].asnumpy().tolist() == [5, 6]
    assert outs["fixed"].asnumpy().tolist() == [1, 1]
    assert (writer.asked_first, keys["a"].value) == ([], None)
    writer.put_rows(keys["a"], rows, np.array([1]))
    assert rows.asnumpy().tolist() == [0, 6]
    writer.put_rows(keys["fixed"], rows, np.array([0]))
    assert rows.asnumpy().tolist() == [0, 6]


def weights_that_arrived_in_an_array_of_the_script_are_not_written_there_again():
    keys, session = KeyTable(), SingleSession(None)
    writer = WeightWriter(session, keys)
    home, other = mx.nd.ones(1 << 16), mx.nd.zeros(1 << 16)
    keys.add("a", home, [home])
    keys.choose_trained(SGD, [])
    session.describe(keys.describe(SGD, workers=1, staleness=0, durability="none"))
    session.start()
    writer.point_to_homes()
    home[:] = 3
    home.wait_to_read()
    writer.write([(keys["a"], [home, other])], just_arrived=True)
    assert other.asnumpy().max() == 3
    session.fetch = lambda: [np.full((1, block.size), 7, dtype=np.float32) for block in session.blocks]
    writer.write([(keys["a"], [home, other])])  # the script may have changed it: the servers' counts
    assert (home.asnumpy().min(), other.asnumpy().min()) == (7, 7)


def a_job_begins_once_and_takes_further_keys():
    job = KVStoreJob(SingleSession(None), staleness=0)
    assert not job.used
    assert job.alone
    job.add("a", mx.nd.ones(2), [])
    raises(UsageError, "'a' has been given a value already", job.add, "a", mx.nd.ones(2), [])
    job.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, rescale_grad=0.5, param_idx2name={0: "a"}))
    assert (job.used, job.expected_keys) == (True, 1)
    job.refuse_after_start("freeze")
    job.start(())
    raises(UsageError, "freeze comes too late", job.refuse_after_start, "freeze")
    raises(UsageError, "one optimizer and one set of keys", job.set_optimizer, SGD)
    assert job.accepts(0.5)
    assert not job.accepts(0.25)
    out = mx.nd.zeros(2)
    job.exchange(0, {"a": [mx.nd.ones(2) * 2]}, [(job.keys["a"], [out])])
    assert out.asnumpy().tolist() == [0.5, 0.5]
    job.exchange_nothing()
    assert (job.session.version, out.asnumpy().tolist()) == (2, [0.5, 0.5])
    job.add("b", mx.nd.ones(3), [])
    assert not job.add_late_keys()
    job.keys.begin_group(job.keys["b"])
    late = mx.nd.zeros(3)
    job.exchange(1, {"b": [mx.nd.ones(3) * 4]}, [(job.keys["b"], [late])])
    assert late.asnumpy().tolist() == [0, 0, 0]


def keys_that_others_train_already_are_found():
    job = KVStoreJob(SingleSession(None), staleness=0)
    job.set_optimizer(SGD)
    job.add("a", mx.nd.ones(2), [])
    job.start(())
    other = KVStoreJob(SingleSession(None), staleness=0)
    other.set_optimizer(SGD)
    other.add("a", mx.nd.ones(2), [])
    other.start(())
    other.add("b", mx.nd.ones(3), [])
    other.add_late_keys()
    job.session.extend(other.session.spec, {1: np.full(3, 9, dtype=np.float32)})
    job.add("b", mx.nd.ones(3), [])
    out = mx.nd.zeros(3)
    job.weights.ask_first(job.keys["b"], [out])
    assert job.add_late_keys()
    assert out.asnumpy().tolist() == [9, 9, 9]


class Recorder:
    """A job that takes note of what is exchanged, and of what is written."""

    def __init__(self, *keys):
        self.keys, self.session, self.optimizer = (
            KeyTable(),
            SimpleNamespace(joined_late=False, first_worker_segments=set()),
            SGD,
        )
        self.weights = SimpleNamespace(write=self.write, ask_first=lambda *_: None, put_rows=self.put_rows)
        self.started, self.expected_keys, self.done = False, 0, []
        for key in keys:
            self.keys.add(key, mx.nd.ones((2, 1)))

    def choose_trained(self, pushed):
        self.keys.choose_trained(self.optimizer, [], pushed)

    def start(self, pushed):
        self.started = True
        for tensor in self.keys.all():
            tensor.segment = 0
        self.done.append(("start", sorted(pushed)))

    def exchange(self, group, pushed, outs):
        self.done.append((group, sorted(pushed), [tensor.key for tensor, _ in outs]))

    def write(self, outs, *, just_arrived=False):
        self.done.append(("write", [tensor.key for tensor, _ in outs], just_arrived))
        outs.clear()

    def put_rows(self, tensor, out, rows):
        self.done.append(("rows", tensor.key))

    def warn_of_rate(self):
        pass

    def warn_of_changed_size(self):
        pass

    def new(self):
        done, self.done = self.done, []
        return done


def a_step_is_done_when_all_its_keys_are_pushed():
    job = Recorder("a", "b")
    steps, gradient = KVStoreSteps(job), [mx.nd.ones((2, 1))]
    for key in ("b", "a"):
        steps.push(job.keys[key], gradient)
        steps.pull(job.keys[key], gradient)
        steps.pull_rows(job.keys[key], gradient[0], [0])
        assert job.new() == []
        steps.advance()
    first_rows = [("rows", "b"), ("rows", "a")]
    assert job.new() == [("start", ["a", "b"]), (0, ["a", "b"], ["b", "a"]), *first_rows]
    steps.pull(job.keys["a"], gradient)
    steps.advance()
    assert job.new() == [("write", ["a"], False)]
    steps.push(job.keys["a"], gradient)
    raises(UsageError, "'a' is pushed a second time in a step in which 'b' is not", steps.push, job.keys["a"], gradient)
    raises(UsageError, "has shape (2, 1)", steps.push, job.keys["b"], [mx.nd.ones(3)])


def a_worker_that_joins_late_drops_its_first_gradients():
    job = Recorder("a")
    job.session.joined_late = True
    steps, gradient = KVStoreSteps(job), [mx.nd.ones((2, 1))]
    steps.push(job.keys["a"], gradient)
    steps.pull(job.keys["a"], gradient)
    steps.advance()
    assert job.new() == [("start", ["a"]), ("write", ["a"], True)]
    job.session.joined_late = False
    steps.push(job.keys["a"], gradient)
    steps.advance()
    assert job.new() == [(0, ["a"], [])]


def a_step_begins_with_all_keys_that_the_optimizer_names():
    job = Recorder("a")
    job.expected_keys = 2
    steps = KVStoreSteps(job)
    steps.advance()
    assert job.new() == []
    job.keys.add("b", mx.nd.ones(2))
    steps.advance()
    assert job.new() == [("start", [])]


def after_a_barrier_arrays_have_the_last_weights():
    """Only where others have trained meanwhile."""
    job = Recorder("a")
    job.session.version, job.weights.point_to_homes = 1, lambda: job.done.append("pointed")
    steps, gradient = KVStoreSteps(job), [mx.nd.ones((2, 1))]
    steps.push(job.keys["a"], gradient)
    steps.pull(job.keys["a"], gradient)
    steps.advance()
    job.new()
    job.session.barrier = lambda: None
    steps.barrier()
    assert job.new() == ["pointed"]
    job.session.barrier = lambda: setattr(job.session, "version", 4)
    steps.barrier()
    assert job.new() == ["pointed", ("write", ["a"], True)]


CHECKS = (
    turns_are_joined, turns_that_do_not_come_are_waited_for_once, the_first_worker_waits_for_nobody,
    weights_are_written_where_they_are_asked_for,
    weights_that_arrived_in_an_array_of_the_script_are_not_written_there_again,
    a_job_begins_once_and_takes_further_keys, keys_that_others_train_already_are_found,
    a_step_is_done_when_all_its_keys_are_pushed, a_worker_that_joins_late_drops_its_first_gradients,
    a_step_begins_with_all_keys_that_the_optimizer_names, after_a_barrier_arrays_have_the_last_weights,
)  # fmt: skip

if __name__ == "__main__":
    run_named(CHECKS)
