"""Checks of the MXNet adapter that need no job; run by the tests in the environment that has MXNet."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings

import mxnet as mx
import numpy as np
from msgspec import structs
from mxnet import autograd, gluon

from pslite.errors import CheckpointError, SpecError, UsageError
from pslite.job.job_spec import Part, Segment
from pslite.mxnet import SGD, ElasticJob, elastic_split
from pslite.mxnet.arrays import reading, write
from pslite.mxnet.kvstore.elastic_kvstore import ElasticKVStore
from pslite.mxnet.optimizer_translation import rule_of, schedule_of
from pslite.numeric.optimizers import Updater, slots
from pslite.worker.single_process_session import SingleSession


def run_named(checks):
    """Run those of these checks that the command line names; all, if it names none."""
    for check in checks:
        if not sys.argv[1:] or check.__name__ in sys.argv[1:]:
            check()
    print("right")


def raises(kind, text, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except kind as error:
        if text not in str(error):
            raise AssertionError(str(error)) from error
    else:
        raise AssertionError(f"{function} raised nothing")


OPTIMIZERS = [
    lambda s: mx.optimizer.SGD(learning_rate=0.1, wd=0.01, lr_scheduler=s),
    lambda s: mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=0.01, lr_scheduler=s),
    lambda s: mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=0.01, clip_gradient=0.3, lr_scheduler=s),
    lambda s: mx.optimizer.NAG(learning_rate=0.1, momentum=0.9, clip_gradient=0.3, lr_scheduler=s),
    lambda s: mx.optimizer.NAG(learning_rate=0.1, lr_scheduler=s),
    lambda s: mx.optimizer.Adam(learning_rate=0.1, wd=0.01, epsilon=1e-3, lr_scheduler=s),
    lambda s: mx.optimizer.Adam(learning_rate=0.1, clip_gradient=0.3, lr_scheduler=s),
    lambda s: mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, multi_precision=True, lr_scheduler=s),
]
SCHEDULERS = [
    lambda: None,
    lambda: mx.lr_scheduler.FactorScheduler(4, factor=0.5, base_lr=0.1),
    lambda: mx.lr_scheduler.MultiFactorScheduler([3, 9], factor=0.3, base_lr=0.1),
    lambda: mx.lr_scheduler.PolyScheduler(15, base_lr=0.1, pwr=2, final_lr=0.01, warmup_steps=4),
    lambda: mx.lr_scheduler.CosineScheduler(15, base_lr=0.1, final_lr=0.01),
    lambda: mx.lr_scheduler.CosineScheduler(15, base_lr=0.1, warmup_steps=4),
    lambda: mx.lr_scheduler.FactorScheduler(4, factor=0.5, stop_factor_lr=0.03, base_lr=0.1, warmup_steps=6),
    lambda: mx.lr_scheduler.MultiFactorScheduler([3, 9], factor=0.3, base_lr=0.1, warmup_steps=5, warmup_begin_lr=0.02),
    lambda: mx.lr_scheduler.CosineScheduler(
        15, base_lr=0.1, warmup_steps=4, warmup_begin_lr=0.05, warmup_mode="constant"
    ),
]


def optimizers():
    """Servers compute what mxnet.optimizer does, with every schedule."""
    rng = np.random.default_rng(1)
    for make in OPTIMIZERS:
        for scheduler in SCHEDULERS:
            theirs, ours = make(scheduler()), make(scheduler())
            theirs.rescale_grad = 0.5
            rule = rule_of(ours, 0)
            weight = rng.standard_normal(50, dtype=np.float32)
            state = np.zeros((1 + slots(rule), 50), dtype=np.float32)
            state[0] = weight
            array = mx.nd.array(weight)
            updater = mx.optimizer.get_updater(theirs)
            for version in range(20):
                gradient = rng.standard_normal(50, dtype=np.float32)
                updater(0, mx.nd.array(gradient), array)
                Updater(theirs.clip_gradient or 0.0).apply(rule, state, gradient, 2, version)
                np.testing.assert_allclose(state[0], array.asnumpy(), rtol=2e-5, atol=1e-5, err_msg=str(rule))


def lamb():
    """LAMB's lengths are those of whole keys, larger than a block and smaller."""
    rng = np.random.default_rng(2)
    shapes = {"a": (300, 301), "b": (7,)}
    values = {key: mx.nd.array(rng.standard_normal(shape, dtype=np.float32)) for key, shape in shapes.items()}
    kv = mx.kv.create("dl2")
    names = dict(enumerate(values))
    kv.set_optimizer(mx.optimizer.LAMB(learning_rate=0.05, wd=0.1, rescale_grad=0.5, param_idx2name=names))
    theirs = mx.optimizer.LAMB(learning_rate=0.05, wd=0.1, rescale_grad=0.5, param_idx2name=names)
    updater = mx.optimizer.get_updater(theirs)
    ours = {key: mx.nd.zeros(shape) for key, shape in shapes.items()}
    for key, value in values.items():
        kv.broadcast(key, value, ours[key])
    for _ in range(6):
        for index, (key, shape) in enumerate(shapes.items()):
            gradient = mx.nd.array(rng.standard_normal(shape, dtype=np.float32))
            kv.pushpull(key, gradient, out=ours[key])
            updater(index, gradient, values[key])
    for key, value in values.items():
        np.testing.assert_allclose(ours[key].asnumpy(), value.asnumpy(), rtol=2e-4, atol=2e-5)


def multipliers():
    """The rate and decay of a key are those that MXNet would use."""
    net = gluon.nn.Dense(2, in_units=3, prefix="d_")
    net.initialize()
    net.weight.lr_mult, net.bias.wd_mult = 0.5, 0.0
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2, "wd": 0.1}, kvstore=None)
    by_name = {p.name: i for i, p in enumerate(trainer._params)}
    weight, bias = (rule_of(trainer._optimizer, by_name[f"d_{name}"]) for name in ("weight", "bias"))
    assert (weight.lr, weight.weight_decay, bias.lr, bias.weight_decay) == (0.1, 0.1, 0.2, 0.0)
    named = mx.optimizer.SGD(learning_rate=0.2, wd=0.1, param_idx2name={0: "a_weight", 1: "a_bias"})
    assert (rule_of(named, "a_weight").weight_decay, rule_of(named, "a_bias").weight_decay) == (0.1, 0.0)


def undescribed():
    """What cannot be described is refused by name."""
    raises(SpecError, "RMSProp", rule_of, mx.optimizer.RMSProp(), 0)
    raises(SpecError, "update_on_kvstore=False", rule_of, mx.optimizer.LARS(), 0)

    class Mine(mx.optimizer.SGD):
        pass

    raises(SpecError, "get_updater", rule_of, Mine(), 0)
    raises(SpecError, "upper_bound", rule_of, mx.optimizer.LAMB(upper_bound=2.0), 0)
    raises(SpecError, "clip_gradient", rule_of, mx.optimizer.Adam(wd=0.1, clip_gradient=0.1), 0)

    class Own(mx.lr_scheduler.LRScheduler):
        pass

    raises(SpecError, "Own", schedule_of, Own())
    warmed = mx.lr_scheduler.CosineScheduler(9, warmup_steps=2, base_lr=0.1)
    raises(SpecError, "warm-up ends at 0.1", rule_of, mx.optimizer.SGD(learning_rate=0.2, lr_scheduler=warmed), 0)


def memory():
    """Arrays are read and written in place."""
    array = mx.nd.arange(6).reshape((2, 3))
    view = reading(array)
    assert view.tolist() == [0, 1, 2, 3, 4, 5]
    array *= 2
    array.wait_to_read()
    assert view.tolist() == [0, 2, 4, 6, 8, 10], "a copy"
    write(array, np.full(6, 7, dtype=np.float32))
    assert array.asnumpy().tolist() == [[7] * 3] * 2
    assert (array + 1).asnumpy().tolist() == [[8] * 3] * 2


def alone():
    """Without a job the KVStore is the whole of it; several devices of a process add up."""
    kv = mx.kv.create("DL2")
    assert (kv.rank, kv.num_workers, kv.is_capable("optimizer")) == (0, 1, True)
    assert kv.type == "dist_sync_dl2"
    kv.init([3, "b"], [mx.nd.ones((2, 2)), mx.nd.zeros(3)])
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, rescale_grad=0.5))
    out = [mx.nd.zeros((2, 2)), mx.nd.zeros((2, 2), ctx=mx.cpu(1))]
    kv.pull(3, out)
    assert out[0].asnumpy().tolist() == [[1, 1], [1, 1]]
    for step in range(2):
        kv.push(3, [mx.nd.ones((2, 2)), mx.nd.ones((2, 2), ctx=mx.cpu(1))], priority=-1)
        kv.pull(3, out)
        kv.pushpull("b", mx.nd.ones(3), out=mx.nd.zeros(3))
        assert out[1].asnumpy().tolist() == [[0.5 - 0.5 * step] * 2] * 2, out[1]
    assert kv.version == 2
    late = mx.nd.zeros(3)
    kv.pull("b", late)
    assert late.asnumpy().tolist() == [-0.5] * 3
    kv.barrier()
    for name in ("dist", "dist_sync", "dist_device_sync"):
        assert mx.kv.create(name).type == name
    assert type(mx.kv.create("local")).__name__ == "KVStore"


def refused():
    """Wrong use is an error that says what to do."""
    kv = mx.kv.create("dist_async")
    kv.init("a", mx.nd.ones(2))
    raises(UsageError, "call set_optimizer before the first push", kv.pushpull, "a", mx.nd.ones(2))
    kv.set_optimizer(mx.optimizer.SGD())
    kv.pushpull("a", mx.nd.ones(2))
    raises(UsageError, "in asynchronous training key 'b' comes too late", kv.init, "b", mx.nd.ones(2))
    kv = mx.kv.create("dl2")
    kv.set_optimizer(mx.optimizer.LAMB())
    kv.init("a", mx.nd.ones(2))
    kv.pushpull("a", mx.nd.ones(2))
    raises(UsageError, "with LAMB key 'b' comes too late", kv.init, "b", mx.nd.ones(2))
    kv = mx.kv.create("dl2")
    kv.init("a", mx.nd.ones(2))
    kv.init("b", mx.nd.ones(2))
    raises(UsageError, "already", kv.init, "a", mx.nd.ones(2))
    raises(SpecError, "csr", kv.init, "s", mx.nd.zeros((2, 2)).tostype("csr"))
    raises(SpecError, "float16", kv.init, "h", mx.nd.zeros(2, dtype="float16"))
    raises(UsageError, "use pull", kv.row_sparse_pull, "a", mx.nd.ones(2), row_ids=mx.nd.zeros(1))
    raises(UsageError, "compress", kv.set_gradient_compression, {"type": "2bit"})
    raises(UsageError, "cannot run an updater", kv.set_updater, print)
    raises(SpecError, "Ftrl", kv.set_optimizer, mx.optimizer.Ftrl())
    raises(UsageError, "has no value: call init", kv.push, "c", mx.nd.ones(2))
    kv.push("a", mx.nd.ones(2))
    raises(
        UsageError, "'a' is pushed a second time in a step in which 'b' is not pushed yet", kv.push, "a", mx.nd.ones(2)
    )
    raises(UsageError, "shape (2,)", kv.push, "b", mx.nd.ones(3))
    kv.push("b", mx.nd.ones(2))
    kv.pull("b", mx.nd.ones(2))
    kv.push("a", mx.nd.ones(2))
    raises(UsageError, "cannot be frozen (grad_req='null') later", kv.push, "a", mx.nd.ones(2))
    kv.push("b", mx.nd.ones(2))
    raises(UsageError, "train all parameters by one Trainer", kv.set_optimizer, mx.optimizer.SGD())
    raises(UsageError, "no optimizer states", kv.save_optimizer_states, "x")
    raises(CheckpointError, "cannot read", mx.kv.create("dl2").load_optimizer_states, "/nowhere/at/all")
    raises(CheckpointError, "not a file of optimizer states", mx.kv.create("dl2").load_optimizer_states, __file__)
    kv = mx.kv.create("dl2")
    kv.init("fixed", mx.nd.ones(2))
    kv.init("w", mx.nd.ones(2))
    kv.freeze("fixed")
    kv.pushpull("w", mx.nd.ones(2))
    assert kv.version == 1
    raises(UsageError, "train it from that step on", kv.push, "fixed", mx.nd.ones(2))
    raises(UsageError, "servers take no commands", kv._send_command_to_servers, 0, "")


def key_after_key():
    """In the first step each key can be given its value just before it is pushed; later steps have all of them."""
    kv = mx.kv.create("dl2")
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    values = [mx.nd.ones((2, columns)) for columns in (1, 2, 3)]
    values[1].attach_grad()  # by which Gluon's keys are known to be trained
    for key, value in enumerate(values):
        kv.init(key, value)
        kv.push(key, mx.nd.ones(value.shape))
        assert kv.version == 0
    kv.pull([0, 1, 2], out=values)
    assert kv.version == 1
    assert all((value.asnumpy() == 0.5).all() for value in values)
    kv = mx.kv.create("dl2")
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    out = mx.nd.ones(2)
    kv.init("a", out)
    kv.push("a", mx.nd.ones(2))
    kv.init("b", mx.nd.ones(2))
    kv.pull("a", out=out)  # at the end of the step, of which "b" is a part
    assert kv.version == 0
    kv.push("b", mx.nd.ones(2))
    kv.pull("b", out=mx.nd.ones(2))
    assert (kv.version, out.asnumpy().tolist()) == (1, [0.5, 0.5])


def keys_that_come_late():
    """They are pushed in steps of their own, in which the others stay as they are; each optimizer counts its own."""
    kv = mx.kv.create("dl2")
    kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.5))
    kv.init("a", mx.nd.ones(2))
    kv.freeze("never")
    a, late = mx.nd.zeros(2), [mx.nd.zeros((2, 3)), mx.nd.zeros(80000)]

    def step(keys, outs):
        kv.push(keys, [mx.nd.ones(out.shape) for out in outs])
        kv.pull(keys, out=outs)
        return [round(float(out.asnumpy().min()), 2) for out in outs]

    assert step(["a"], [a]) == [0.5]
    assert step(["a"], [a]) == [0.0]
    kv.push("a", mx.nd.ones(2))  # its step is done when something is asked for
    kv.init(["b", "c"], [mx.nd.ones((2, 3)), mx.nd.ones(80000) * 2])
    kv.pull(["b", "c"], out=late)
    assert [float(out.asnumpy().max()) for out in late] == [1.0, 2.0]
    kv.pull("a", out=a)
    assert np.allclose(a.asnumpy(), -0.5), a.asnumpy()
    version = kv.version
    # the first update is as large as the rate
    assert step(["b", "c"], late) == [0.5, 1.5]
    assert step(["b", "c"], late) == [0.0, 1.0]
    found = step(["a", "b", "c"], [a, *late])
    assert found == [-1.0, -0.5, 0.5], found
    assert kv.version == version + 4
    raises(
        UsageError,
        "'b' is pushed a second time in a step in which 'c' is not pushed yet",
        kv.push,
        ["b", "b"],
        [mx.nd.ones((2, 3))] * 2,
    )
    kv.pushpull("c", mx.nd.ones(80000), out=late[1])
    raises(UsageError, "'b' has been given a value already", kv.init, "b", mx.nd.ones(2))
    saved = tempfile.mkdtemp() + "/states"
    kv.save_optimizer_states(saved)
    with np.load(saved) as found:
        assert set(found.files) == {f"{key}/{name}" for key in "abc" for name in ("weight", 0, 1)} | {"about"}
        # the steps of "b" and "c" are none of "a", whose optimizer goes on from there in another job
        assert json.loads(found["about"].tobytes())["version"] == 4 < kv.version
    # tables, and what is never pushed
    kv.init("table", mx.nd.ones((9, 2)).tostype("row_sparse"))
    outs = mx.nd.zeros((2, 2))
    kv.broadcast("never", mx.nd.ones((2, 2)) * 3, outs)
    kv.broadcast("d", mx.nd.ones((2, 2)) * 4, outs)
    assert outs.asnumpy().tolist() == [[4, 4], [4, 4]]
    rows = mx.nd.sparse.row_sparse_array((mx.nd.ones((1, 2)), [4]), shape=(9, 2))
    kv.push("table", rows)
    kv.push("d", mx.nd.ones((2, 2)))
    asked = mx.nd.sparse.zeros("row_sparse", (9, 2))
    kv.row_sparse_pull("table", out=asked, row_ids=mx.nd.array([0, 4]))
    assert np.allclose(asked.data.asnumpy(), [[1, 1], [0.5, 0.5]])
    kv.pull("never", out=outs)
    assert outs.asnumpy().tolist() == [[3, 3], [3, 3]]
    raises(UsageError, "kvstore.freeze(...) was told", kv.push, "never", mx.nd.ones((2, 2)))


def schedule_of_keys_that_come_late():
    """It goes on from the updates of the keys before, as in MXNet's own KVStore."""
    found = []
    for kind in ("dl2", "local"):
        kv = mx.kv.create(kind)
        rate = mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.1)
        kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.1, lr_scheduler=rate))
        keys, outs = [0], [mx.nd.ones(3)]
        kv.init(0, outs[0])
        for step in range(20):
            if step in (7, 12):
                keys, outs = [*keys, step], [*outs, mx.nd.ones((2, step))]
                kv.init(step, outs[-1])
            kv.push(keys, [out * 0.1 + 1 for out in outs])
            kv.pull(keys, out=outs)
        found.append([out.asnumpy() for out in outs])
    for ours, theirs in zip(*found, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-5), (ours, theirs)


class Second(SingleSession):
    """The session of a second worker; the first one's steps go around a cycle of segments, None for those of no key."""

    rank_and_size = 1, 2

    def __init__(self, cycle):
        super().__init__(None)
        self.cycle, self.first_worker_segments = cycle, frozenset()
        #: of each step, what this worker and the first one had gradients of
        self.steps = []

    def exchange(self, contributions, loss, samples):
        bundle, segment = contributions[0].bundle, self.cycle[self.version % len(self.cycle)]
        for block in self.blocks:
            if block.segment in bundle.idle:
                bundle.part(block)[:] = 0
            else:
                bundle.fill(block)
            bundle.part(block)[:] += block.segment == segment
        self.first_worker_segments = frozenset({segment} - {None})
        self.steps.append((set(range(len(self.spec.segments))) - bundle.idle, self.first_worker_segments))
        bundle.fill, bundle.idle = None, bundle.idle - self.first_worker_segments
        return super().exchange(contributions, loss, samples)


def turns_of_a_worker_that_comes_later():
    """It falls in with the first worker, so that each group of keys is updated once in each turn."""
    for shift in range(4):
        for script in ([0, 1], [0, 0, 0, 1], [1, 1, 0]):
            cycle = [*script[shift % len(script) :], *script[: shift % len(script)]]
            kv = in_second_place(cycle)
            outs = [mx.nd.zeros(2), mx.nd.zeros(2)]

            def turn(kv=kv, script=script, outs=outs):
                for key in script:
                    kv.push(key, mx.nd.ones(2))
                    kv.pull(key, out=outs[key])

            turn()
            before = [float(out.asnumpy()[0]) for out in outs]
            session, begun = kv.job.session, kv.version
            for _ in range(5):
                turn()
            assert kv.version == begun + 5 * len(script)
            assert all(mine == led for mine, led in session.steps[begun:]), session.steps
            for key, out in enumerate(outs):
                updates = 5 * script.count(key)
                assert np.allclose(before[key] - out.asnumpy(), 0.1 * updates, rtol=0.4), (cycle, out, before)


def turns_that_never_come():
    """A group that the first worker does not push any more is waited for once, until it does."""
    kv = in_second_place([0])
    out = mx.nd.zeros(2)
    for _ in range(10):
        for key in (1, 0):
            kv.push(key, mx.nd.ones(2))
            kv.pull(key, out=out)
    steps = kv.job.session.steps
    idle = [number for number, (mine, _) in enumerate(steps) if not mine]
    assert 2 < len(idle) < 100, steps
    assert idle[-1] < len(steps) - 18, steps
    kv.job.session.cycle = [0, 1]
    for _ in range(10):
        for key in (1, 0):
            kv.push(key, mx.nd.ones(2))
            kv.pull(key, out=out)
    assert all(mine == led for mine, led in steps[-16:]), steps


def in_second_place(cycle):
    """A KVStore of a second worker, to which the first one's key has come that it gives its value now."""
    session = Second(cycle)
    kv = ElasticKVStore(session)
    kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.1))
    kv.init(0, mx.nd.ones(2))
    kv.push(0, mx.nd.ones(2))
    kv.pull(0, out=mx.nd.zeros(2))
    late = Segment(dtype="float32", optimizer=session.spec.segments[0].optimizer, parts=(Part("1", (2,)),), late=True)
    session.extend(structs.replace(session.spec, segments=(*session.spec.segments, late)), {1: np.ones(2)})
    kv.init(1, mx.nd.zeros(2))
    return kv


def trainer():
    """Gluon's Trainer takes the name, with one device too; a rate set later is warned of, another batch refused."""
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One())
    made = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore="dl2")

    def step(size):
        with autograd.record():
            loss = net(mx.nd.ones((size, 2))).sum()
        loss.backward()
        made.step(size)

    step(4)
    assert (made._kvstore.type, made._update_on_kvstore) == ("dist_sync_dl2", True)
    assert net.weight.data().asnumpy().tolist() == [[0.5, 0.5]]
    made.set_learning_rate(0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(4)
        step(4)
    assert [("lr_scheduler" in str(w.message), w.filename) for w in caught] == [(True, __file__)]
    assert net.weight.data().asnumpy().tolist() == [[-0.5, -0.5]]
    raises(UserWarning, "batch_size", step, 3)


def fixed():
    """Module's fixed parameters stay as they are, and the others are trained."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc1")
    net = mx.sym.FullyConnected(net, num_hidden=2, name="fc2")
    for kvstore in ("dist_sync", mx.kv.create("dl2")):
        made = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"), fixed_param_names=["fc1_weight", "fc1_bias"])
        source = mx.io.NDArrayIter(mx.nd.random.uniform(shape=(8, 4)), mx.nd.array([0, 1] * 4), 4)
        made.bind(source.provide_data, source.provide_label)
        made.init_params(mx.init.Normal(0.5))
        before, _ = made.get_params()
        before = {name: value.asnumpy() for name, value in before.items()}
        made.fit(source, kvstore=kvstore, num_epoch=2, optimizer_params={"learning_rate": 0.5, "wd": 0.1})
        after, _ = made.get_params()
        same = {name for name, value in after.items() if np.array_equal(value.asnumpy(), before[name])}
        assert same == {"fc1_weight", "fc1_bias"}, same


def resumed():
    """Module.load goes on with weights and optimizer states of a checkpoint."""
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc"), name="softmax")
    source = mx.io.NDArrayIter(mx.nd.array(np.arange(32).reshape(8, 4) / 32), mx.nd.array([0, 1] * 4), 4)

    def train(made, begin, end):
        rates = {"learning_rate": 0.5, "momentum": 0.9}
        source.reset()
        made.fit(source, begin_epoch=begin, num_epoch=end, kvstore="dist_sync", initializer=mx.init.One(),
                 optimizer="sgd", optimizer_params=rates)  # fmt: skip
        return made

    with tempfile.TemporaryDirectory() as folder:
        train(mx.mod.Module(net), 0, 2).save_checkpoint(f"{folder}/net", 2, save_optimizer_states=True)
        resumed = train(mx.mod.Module.load(f"{folder}/net", 2, load_optimizer_states=True), 2, 4)
        without_states = train(mx.mod.Module.load(f"{folder}/net", 2), 2, 4)
    specs = [made._kvstore.job.session.spec for made in (resumed, without_states)]
    done = [(spec.epochs_before, spec.versions_before) for spec in specs]
    assert done == [(2, 4), (2, 0)], done
    assert [made._kvstore.version for made in (resumed, without_states)] == [8, 4]
    found, _ = resumed.get_params()
    wanted, _ = train(mx.mod.Module(net), 0, 4).get_params()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name].asnumpy(), value.asnumpy(), rtol=1e-6)


def embedded(kind, optimizer, rates, kvstore):
    """Train an embedding of which a step touches a few rows; returns the weights."""
    mx.random.seed(3)
    made = (
        gluon.nn.Embedding(50, 4, sparse_grad=True) if kind == "gradient" else gluon.contrib.nn.SparseEmbedding(50, 4)
    )
    net = gluon.nn.Sequential(prefix="n_")
    net.add(made, gluon.nn.Flatten(), gluon.nn.Dense(3, in_units=8))
    net.initialize(mx.init.Normal(0.1))
    step = gluon.Trainer(net.collect_params(), optimizer, dict(rates), kvstore=kvstore).step
    rng = np.random.default_rng(0)
    for _ in range(12):
        with autograd.record():
            scores = net(mx.nd.array(rng.integers(0, 50, (6, 2))))
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(scores, mx.nd.array(rng.integers(0, 3, 6))).mean()
        loss.backward()
        step(1)
    table = made.weight
    rows = table.row_sparse_data(mx.nd.arange(50)) if kind == "weight" else table.data()
    return [rows.asnumpy(), net[2].weight.data().asnumpy(), net[2].bias.data().asnumpy()]


def tables():
    """Row_sparse weights and gradients are updated as MXNet does it in one process, lazily or not."""
    for optimizer, rates in [
        ("sgd", {"learning_rate": 0.5}),
        ("sgd", {"learning_rate": 0.5, "momentum": 0.9, "wd": 0.01}),
        ("sgd", {"learning_rate": 0.5, "momentum": 0.9, "wd": 0.01, "lazy_update": False}),
        ("adam", {"learning_rate": 0.05, "wd": 0.01}),
        ("nag", {"learning_rate": 0.1, "momentum": 0.9}),
    ]:
        for kind, theirs in (("weight", "device"), ("gradient", None)):
            pairs = zip(embedded(kind, optimizer, rates, "dl2"), embedded(kind, optimizer, rates, theirs), strict=True)
            for mine, other in pairs:
                np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=f"{kind} {optimizer} {rates}")


def rows():
    """Rows are pushed and pulled by themselves; what the KVStore's own manual shows."""
    kv = mx.kv.create("dist_sync")
    kv.init("t", mx.nd.ones((4, 2)).tostype("row_sparse"))
    kv.init("w", mx.nd.ones(2))
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, wd=0.5))
    out = mx.nd.sparse.zeros("row_sparse", (4, 2))
    kv.row_sparse_pull("t", out=out, row_ids=mx.nd.array([3, 0, 3]))
    assert (out.indices.asnumpy().tolist(), out.asnumpy()[:, 0].tolist()) == ([0, 3], [1, 0, 0, 1])
    touched = mx.nd.sparse.row_sparse_array(([[1, 2], [3, 4]], [1, 3]), shape=(4, 2))
    kv.push("t", [touched, touched])
    later = [mx.nd.sparse.zeros("row_sparse", (4, 2)) for _ in range(2)]
    kv.row_sparse_pull("t", out=later, row_ids=[mx.nd.array([1]), mx.nd.array([[0, 3]])])
    kv.push("w", mx.nd.ones(2))
    kv.pull("w", mx.nd.zeros(2))
    assert kv.version == 1
    # the decay too is of the rows that were touched: 1 - 0.5 * (2 * gradient + 0.5 * 1)
    assert later[0].asnumpy().tolist() == [[0, 0], [-0.25, -1.25], [0, 0], [0, 0]]
    assert later[1].asnumpy().tolist() == [[1, 1], [0, 0], [0, 0], [-2.25, -3.25]]
    whole = mx.nd.zeros((4, 2))
    kv.pull("t", whole)
    kv.pull("t", out)  # as in stock: nothing
    assert whole.asnumpy()[:, 0].tolist() == [1, -0.25, 1, -2.25]
    assert out.indices.asnumpy().tolist() == [0, 3]
    kv.row_sparse_pull(["t"], out=[out], row_ids=[mx.nd.array([])])
    assert out.asnumpy().tolist() == [[0, 0]] * 4
    # a gradient with all rows; the last key of a step needs no pull
    kv.push("w", mx.nd.ones(2))
    kv.push("t", mx.nd.zeros((4, 2)).tostype("row_sparse"))
    assert kv.version == 2
    kv.pushpull("w", mx.nd.ones(2), out=mx.nd.zeros(2))
    kv.pushpull("t", mx.nd.zeros((4, 2)), out=whole)
    assert whole.asnumpy()[:, 0].tolist() == [0.75, -0.1875, 0.75, -1.6875]
    raises(UsageError, "must be from 0 to 3, but go from 0 to 4", kv.row_sparse_pull, "t", out, row_ids=mx.nd.arange(5))
    raises(UsageError, "a row_sparse array: use row_sparse_pull", kv.pull, "t", [whole, out], ignore_sparse=False)
    raises(UsageError, "a default array by", kv.row_sparse_pull, "t", [out, whole], row_ids=mx.nd.array([0]))
    raises(UsageError, "shape (4, 2)", kv.push, "t", mx.nd.sparse.zeros("row_sparse", (3, 2)))
    # of a column, and of a weight that was given as a dense one
    kv = mx.kv.create("dl2")
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, momentum=0.5, param_idx2name={0: "c", 1: "d"}))
    kv.init("c", mx.nd.sparse.zeros("row_sparse", (3,)))
    kv.init("d", mx.nd.zeros((3, 1)))
    kv.push("c", mx.nd.sparse.row_sparse_array(([1.0], [2]), shape=(3,)))
    late = mx.nd.sparse.row_sparse_array(([[1.0]], [2]), shape=(3, 1))
    raises(UsageError, "give the weight as row_sparse too", kv.push, "d", late)
    kv.pushpull("d", mx.nd.zeros((3, 1)))
    out = mx.nd.zeros(3)
    kv.pull("c", out)
    assert out.asnumpy().tolist() == [0, 0, -1]
    kv = mx.kv.create("dl2")
    kv.init("t", mx.nd.ones((4, 2)).tostype("row_sparse"))
    raises(UsageError, "call set_optimizer before the first push", kv.push, "t", touched)


def words():
    """ElasticJob pushes the rows of a table that a batch touches; for SGD that is what dense gradients give."""
    rng = np.random.default_rng(0)
    texts = list(zip(rng.integers(0, 50, (40, 2)).astype("float32"), rng.integers(0, 3, 40), strict=True))
    trained = []
    for sparse in (True, False):
        mx.random.seed(3)
        net = gluon.nn.Sequential(prefix="n_")
        net.add(gluon.nn.Embedding(50, 4, sparse_grad=sparse), gluon.nn.Flatten(), gluon.nn.Dense(3, in_units=8))
        net.initialize(mx.init.Normal(0.1))
        job = ElasticJob(net, optimizer=SGD(lr=0.5), dataset=texts, batch_size=16, epochs=2, shards=4)
        assert [segment.sparse for segment in job.spec.segments].count(True) == sparse
        for batch, targets in job:
            with autograd.record():
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(batch), targets)
            job.backward(loss)
        trained.append([parameter.data().asnumpy() for parameter in net.collect_params().values()])
    for mine, other in zip(*trained, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    raises(SpecError, "is sparse: its optimizer", ElasticJob, _sparse_net(), optimizer=SGD(lr=0.5, momentum=0.9),
           dataset=texts, batch_size=16, epochs=2)  # fmt: skip


def _sparse_net():
    net = gluon.nn.Embedding(50, 4, sparse_grad=True)
    net.initialize()
    return net


def usage():
    """ElasticJob says what is wrong."""

    def job(net, **more):
        values = {
            "optimizer": SGD(lr=0.1),
            "dataset": [(np.zeros(2, "float32"), 0.0)] * 8,
            "batch_size": 4,
            "epochs": 1,
            "mode": "exact",
        }
        return ElasticJob(net, **{**values, **more})

    raises(SpecError, "net.initialize()", job, gluon.nn.Dense(1, in_units=2))
    net = gluon.nn.Dense(1)
    net.initialize()
    raises(SpecError, "no shape yet", job, net)
    net = gluon.nn.Dense(1, in_units=2, prefix="d_")
    net.initialize()
    raises(SpecError, "d_wieght", job, net, optimizers={"d_wieght": SGD(lr=1.0)})
    raises(SpecError, "batch_size is 4.0", job, net, batch_size=4.0)
    loop = iter(job(net))
    batch, _ = next(loop)
    assert batch.shape == (1, 2)
    raises(UsageError, "did not call job.backward", next, loop)
    made = job(net, shards=1)
    batch, _ = next(iter(made))
    with autograd.record():
        loss = net(batch)[:3]
    raises(UsageError, "shape (3, 1)", made.backward, loss)


def split():
    """A split data set has each sample once in an epoch, of as many as there are; what no step has used comes again."""
    values = np.arange(10, dtype="float32")
    dataset = gluon.data.ArrayDataset(values[:, None], values)
    sampler = elastic_split(dataset, epochs=2)
    loader = gluon.data.DataLoader(dataset, 4, sampler=sampler)
    assert len(loader) == 3
    kv = mx.kv.create("dl2")
    source = mx.contrib.io.DataLoaderIter(loader)  # which takes a batch to know its shape
    kv.init(0, mx.nd.zeros(1))
    kv.set_optimizer(mx.optimizer.SGD())
    epochs = []
    for _ in range(3):
        epochs.append([])
        for batch in source:
            epochs[-1] += batch.label[0].asnumpy().tolist()[: 4 - batch.pad]
            kv.pushpull(0, mx.nd.ones(1), out=mx.nd.zeros(1))
        source.reset()
    assert [sorted(epoch) for epoch in epochs] == [values.tolist()] * 2 + [[]], epochs
    assert epochs[0] != epochs[1]
    assert elastic_split(dataset) is sampler
    assert elastic_split(dataset, name="other") is not sampler
    raises(UsageError, "without samples", elastic_split, [])


def in_turns():
    """Networks that train in turns, as the guide says: the others stay; a second Trainer is refused."""
    kv = mx.kv.create("dl2")
    nets = [gluon.nn.Dense(2, in_units=2, use_bias=False, prefix=prefix) for prefix in ("first_", "second_")]
    trainers = []
    for net in nets:
        net.initialize(mx.init.One())
        trainers.append(gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.25}, kvstore=None))
    parameters = [*nets[0].collect_params().values(), *nets[1].collect_params().values()]
    for key, parameter in enumerate(parameters):
        kv.broadcast(key, parameter.data(), out=parameter.list_data())
    for network, trainer in zip(nets, trainers, strict=True):
        with autograd.record():
            loss = nets[1](nets[0](mx.nd.ones((4, 2))))
        loss.backward()
        own = set(network.collect_params())
        for key, parameter in enumerate(parameters):
            gradient = parameter.grad()
            if parameter.name not in own:
                gradient = mx.nd.zeros_like(gradient)
            kv.pushpull(key, gradient, out=gradient)
        trainer.step(4 * kv.num_workers)
    assert kv.version == 2
    for parameter in parameters:
        np.testing.assert_allclose(parameter.data().asnumpy(), 0.75, rtol=1e-5)
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize()
    second = gluon.Trainer(net.collect_params(), "sgd", kvstore=kv, update_on_kvstore=False)
    with autograd.record():
        loss = net(mx.nd.ones((4, 2)))
    loss.backward()
    raises(UsageError, "in turns", second.step, 4)


CHECKS = (
    optimizers, lamb, multipliers, undescribed, memory, split, alone, refused, key_after_key, keys_that_come_late,
    schedule_of_keys_that_come_late, turns_of_a_worker_that_comes_later, turns_that_never_come,
    trainer, fixed, resumed,
    tables, rows, words, usage, in_turns,
)  # fmt: skip

if __name__ == "__main__":
    run_named(CHECKS)
