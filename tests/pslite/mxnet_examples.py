"""Scripts in the style of MXNet's tutorials and examples, in small; the tests run them with its own servers, too.

Each returns the arrays that a run leaves behind.
"""

from __future__ import annotations

import random
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

DEVICES = [mx.cpu(0), mx.cpu(1)]


def classes():
    """Return samples of five classes."""
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((400, 20), dtype=np.float32)
    return samples, (samples @ rng.standard_normal((20, 5))).argmax(1).astype("float32")


def mine(kv, *arrays):
    return [array[kv.rank :: kv.num_workers] for array in arrays]


def values(parameters):
    return {name: parameter.data(DEVICES[0]).asnumpy() for name, parameter in parameters.items()}


def perceptron():
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(5))
    net.initialize(mx.init.Xavier(), ctx=DEVICES)
    net.hybridize()
    return net


def pass_both(net, samples, labels):
    """One pass forward and backward on both devices."""
    for batch, targets in zip(*(gluon.utils.split_and_load(each, DEVICES) for each in (samples, labels)), strict=True):
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(batch), targets)
        loss.backward()


def tutorial(kv):
    """The KVStore's tutorial: one key, then a list of further ones, with one array or one for each device."""
    keys, shape = ["5", "7", "9"], (2, 3)
    kv.init("3", mx.nd.ones(shape) * 2)
    out = mx.nd.zeros(shape)
    kv.pull("3", out=out)
    assert (out.asnumpy() == 2).all()
    kv.push("3", mx.nd.ones(shape) * 8)
    kv.pull("3", out=out)
    assert (out.asnumpy() == 8 * kv.num_workers).all()
    kv.init(keys, [mx.nd.ones(shape) * (1 + kv.rank)] * len(keys))
    first = [mx.nd.zeros(shape) for _ in keys]
    kv.pull(keys, out=first)
    assert all((array.asnumpy() == 1).all() for array in first)
    kv.push(keys, [mx.nd.ones(shape)] * len(keys))
    kv.pull(keys, out=first)
    assert all((array.asnumpy() == kv.num_workers).all() for array in first)
    for step in range(3):
        if step < 2:
            kv.push("3", [mx.nd.ones(shape, device) * (step + 3) for device in DEVICES])
        kv.push(keys, [[mx.nd.ones(shape, device) * (step + int(key)) for device in DEVICES] for key in keys])
        outs = [[mx.nd.zeros(shape, device) for device in DEVICES] for _ in keys]
        kv.pull("3", out=out)
        kv.pull(keys, out=outs)
    return {"3": out.asnumpy(), **{key: arrays[1].asnumpy() for key, arrays in zip(keys, outs, strict=True)}}


def growing(kv):
    """Layers that are added when the first ones are trained; their optimizer counts its own updates (Adam)."""
    kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.05, rescale_grad=1 / kv.num_workers))
    weights = {0: mx.nd.ones((3, 4)), 1: mx.nd.ones(300000) * 2}
    kv.init(list(weights), list(weights.values()))
    for step in range(30):
        if step in (10, 20):
            more = {step: mx.nd.ones((step, 2)) * (1 + kv.rank), step + 1: mx.nd.ones(70000) * 3}
            kv.init(list(more), list(more.values()))
            kv.pull(list(more), out=list(more.values()))
            weights |= more
        keys = [key for key in weights if key >= 10] if step in (12, 13) else list(weights)
        kv.push(keys, [weights[key] * (0.3 + 0.1 * kv.rank) for key in keys])
        kv.pull(keys, out=[weights[key] for key in keys])
    return {str(key): weight.asnumpy() for key, weight in weights.items()}


def accumulation(kv):
    """Gradients of two batches add up (grad_req='add') before a step."""
    samples, labels = mine(kv, *classes())
    net = perceptron()
    net(mx.nd.array(samples[:2], ctx=DEVICES[0]))  # by which its shapes are known
    net.collect_params().setattr("grad_req", "add")
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=kv)
    for number, first in enumerate(range(0, 200, 20)):
        pass_both(net, samples[first : first + 20], labels[first : first + 20])
        if number % 2:
            trainer.step(40 * kv.num_workers)
            net.collect_params().zero_grad()
    return values(net.collect_params())


def clipping(kv):
    """Workers clip the sum of gradients and update; another rate and loaded states in the middle."""
    samples, labels = mine(kv, *classes())
    net = perceptron()
    trainer = gluon.Trainer(
        net.collect_params(), "rmsprop", {"learning_rate": 0.01}, kvstore=kv, update_on_kvstore=False
    )
    for number, first in enumerate(range(0, 200, 20)):
        pass_both(net, samples[first : first + 20], labels[first : first + 20])
        trainer.allreduce_grads()
        for device in DEVICES:
            gluon.utils.clip_global_norm([p.grad(device) for p in net.collect_params().values()], 20.0)
        trainer.update(20 * kv.num_workers)
        if number == 4:
            path = f"{sys.argv[2]}.{kv.rank}.states"
            trainer.save_states(path)
            trainer.load_states(path)
            trainer.set_learning_rate(trainer.learning_rate / 2)
    return values(net.collect_params())


def language_model(kv):
    """LSTM with a state that is carried on and a decoder that shares the table's weights."""
    table = gluon.nn.Embedding(50, 16, weight_initializer=mx.init.Uniform(0.1), prefix="word_")
    lstm = gluon.rnn.LSTM(16, 2, input_size=16, prefix="lstm_")
    decoder = gluon.nn.Dense(50, in_units=16, flatten=False, params=table.params)
    net = gluon.nn.Sequential(prefix="net_")
    net.add(table, lstm, decoder)
    net.initialize(mx.init.Xavier(), ctx=DEVICES)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=kv)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    text = mx.nd.array(np.random.default_rng(kv.rank).integers(0, 50, (61, 8)))
    states = [lstm.begin_state(batch_size=4, ctx=device) for device in DEVICES]
    for first in range(0, 60, 5):
        pieces = [
            gluon.utils.split_and_load(text[at : at + 5], DEVICES, batch_axis=1) for at in (first, first + 1)
        ]  # fmt: skip
        losses = []
        with autograd.record():
            for number, (words, following) in enumerate(zip(*pieces, strict=True)):
                hidden, states[number] = lstm(table(words), [state.detach() for state in states[number]])
                losses.append(loss_of(decoder(hidden), following) / 40)
        autograd.backward(losses)
        for device in DEVICES:
            gluon.utils.clip_global_norm([p.grad(device) for p in net.collect_params().values()], 0.25)
        trainer.step(1)
    return values(net.collect_params())


def by_hand(kv):
    """Module without fit, with an optimizer object that has multipliers."""
    samples, labels = mine(kv, *classes())
    source = mx.io.NDArrayIter(samples, labels, 20, label_name="softmax_label")
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="fc1")
    net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="tanh"), num_hidden=5, name="fc2")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"), context=DEVICES)
    module.bind(source.provide_data, source.provide_label)
    module.init_params(mx.init.Xavier())
    names = dict(enumerate(module._exec_group.param_names))
    optimizer = mx.optimizer.NAG(
        learning_rate=0.1, momentum=0.9, rescale_grad=1 / (20 * kv.num_workers), param_idx2name=names
    )
    optimizer.set_lr_mult({"fc1_weight": 0.5})
    module.init_optimizer(kvstore=kv, optimizer=optimizer)
    metric = mx.metric.create("acc")
    for _ in range(2):
        source.reset()
        for batch in source:
            module.forward_backward(batch)
            module.update()
            module.update_metric(metric, batch.label)
        module.set_params(*module.get_params())
    weights, _ = module.get_params()
    return {name: value.asnumpy() for name, value in weights.items()}


def buckets(kv):
    """BucketingModule: sentences of two lengths."""
    rng = np.random.default_rng(1)
    sentences = [rng.integers(1, 20, rng.integers(3, 12)).tolist() for _ in range(160)]
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002  (the iterator takes its order from it)
    source = mx.rnn.BucketSentenceIter(*mine(kv, sentences), 8, buckets=[6, 12], invalid_label=0)
    stack = mx.rnn.SequentialRNNCell()
    stack.add(mx.rnn.LSTMCell(num_hidden=16, prefix="lstm_"))

    def symbol(length):
        net = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=20, output_dim=8, name="embed")
        stack.reset()
        net, _ = stack.unroll(length, inputs=net, merge_outputs=True)
        net = mx.sym.FullyConnected(mx.sym.reshape(net, shape=(-1, 16)), num_hidden=20, name="word")
        label = mx.sym.reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
        return mx.sym.SoftmaxOutput(net, label, name="softmax"), ("data",), ("softmax_label",)

    module = mx.mod.BucketingModule(symbol, default_bucket_key=source.default_bucket_key, context=DEVICES)
    module.fit(
        source,
        eval_metric=mx.metric.Perplexity(0),
        kvstore=kv,
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        initializer=mx.init.Xavier(),
        num_epoch=2,
        batch_end_callback=mx.callback.Speedometer(8, 50),
        epoch_end_callback=mx.rnn.do_rnn_checkpoint(stack, f"{sys.argv[2]}.{kv.rank}"),
    )
    weights, _ = module.get_params()
    return {name: value.asnumpy() for name, value in weights.items()}


def numpy_arrays(kv):
    """Gluon with arrays of MXNet's numpy interface."""
    mx.npx.set_np()
    samples, labels = (mx.np.array(each) for each in mine(kv, *classes()))
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(300, activation="relu"), gluon.nn.BatchNorm(), gluon.nn.Dense(5))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}, kvstore=kv
    )
    for first in range(0, 200, 20):
        with autograd.record():
            scores = net(samples[first : first + 20])
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(scores, labels[first : first + 20]).mean()
        loss.backward()
        trainer.step(kv.num_workers)
    trained = [parameter for name, parameter in net.collect_params().items() if "running" not in name]
    return {str(number): parameter.data().asnumpy() for number, parameter in enumerate(trained)}


EXAMPLES = {
    each.__name__: each
    for each in (tutorial, growing, accumulation, clipping, language_model, by_hand, buckets, numpy_arrays)
}  # fmt: skip

if __name__ == "__main__":
    store = mx.kv.create("dist_sync")
    mx.random.seed(7)
    found = EXAMPLES[sys.argv[1]](store)
    mx.nd.waitall()
    np.savez(f"{sys.argv[2]}.{store.rank}.npz", **found)
