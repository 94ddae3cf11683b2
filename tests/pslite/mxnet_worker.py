"""Training scripts for MXNet on real data (handwritten digits), run by the tests in the environment that has MXNet."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


def data(path):
    with np.load(path) as file:
        return (file["images"] / 16).astype("float32")[:, None], file["labels"].astype("float32")


def network(drop=0.1):
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(6, 3, activation="relu", in_channels=1), gluon.nn.BatchNorm(in_channels=6))
        net.add(gluon.nn.Flatten(), gluon.nn.Dropout(drop), gluon.nn.Dense(10, in_units=216))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def accuracy(net, images, labels):
    return float((net(mx.nd.array(images)).asnumpy().argmax(1) == labels).mean())


def keep(path, net):
    np.savez(path, **{name: p.data().asnumpy() for name, p in net.collect_params().items()})


def job(options):
    """The job gives out the data."""
    # not above: the other scripts are run with MXNet's own servers too
    from pslite.mxnet import SGD, Adam, ElasticJob  # noqa: PLC0415
    from pslite.testing import pace  # noqa: PLC0415

    images, labels = data(options.data)
    mx.random.seed(options.seed)
    net = network()
    rule = Adam(lr=0.01) if options.optimizer == "adam" else SGD(lr=0.05, momentum=0.9)
    bias = [name for name in net.collect_params() if name.endswith("bias")]
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    elastic = ElasticJob(
        net,
        optimizer=rule,
        optimizers=dict.fromkeys(bias, SGD(lr=0.01)),
        dataset=gluon.data.ArrayDataset(images[:600], labels[:600]),
        batch_size=40,
        epochs=options.epochs,
        seed=3,
        mode=options.mode,
    )
    for batch, targets in elastic:
        pace(elastic.version, elastic.total_versions)
        with autograd.record():
            loss = loss_of(net(batch), targets)
            loss = loss.mean() if options.mean else loss
        elastic.backward(loss)
    if elastic.is_chief:
        if elastic.digest:
            print(elastic.digest)
        if options.out:
            keep(options.out, net)


def slow_down(kvstore, total):
    """Slow down while the job is still to be resized; `total` is about how many steps there are, 0 for never."""
    if total:
        from pslite.testing import pace  # noqa: PLC0415  (MXNet's own servers have no pslite)

        pace(min(kvstore.version, total - 1), total)


def end_early(options, steps, rank, workers):
    if steps == options.die_at and rank == workers - 1:
        os._exit(0) if options.quietly else os.kill(os.getpid(), 9)
    if steps == options.exit_at and rank == 0:
        sys.exit(options.exit_status)


def go_on(options, net, trainer, kvstore):
    """Take what another run has saved."""
    net.load_parameters(options.load + ".params")
    if not options.weights_only:
        trainer.load_states(options.load + ".states")
    if options.begin_epoch >= 0:
        kvstore.begin_epoch = options.begin_epoch


def loop(options):
    """A loop of the script's own, as it is written for MXNet's own servers."""
    kvstore = mx.kv.create(options.kvstore)
    images, labels = data(options.data)
    rank, workers = kvstore.rank, kvstore.num_workers
    mx.random.seed(options.seed + rank)
    net = network(drop=0.0)
    mine = slice(rank, 800, workers)
    loader = gluon.data.DataLoader(
        gluon.data.ArrayDataset(images[mine], labels[mine]), options.batch, last_batch="discard"
    )
    rates = {"learning_rate": 0.05, "wd": 1e-3}
    if options.schedule:
        rates["lr_scheduler"] = mx.lr_scheduler.CosineScheduler(60, base_lr=0.05, final_lr=0.01, warmup_steps=5)
    if options.optimizer in ("sgd", "nag"):
        rates["momentum"] = 0.9
    if options.optimizer == "adam":
        rates["learning_rate"] = 0.005
    given = options.kvstore if options.by_name else kvstore
    trainer = gluon.Trainer(
        net.collect_params(), options.optimizer, rates, kvstore=given, update_on_kvstore=not options.local
    )
    if options.load:
        go_on(options, net, trainer, kvstore)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    steps = 0
    for _ in range(max(options.begin_epoch, 0), options.epochs):
        for batch, targets in loader:
            with autograd.record():
                loss = loss_of(net(batch), targets)
            loss.backward()
            trainer.step(options.batch * kvstore.num_workers)
            steps += 1
            time.sleep(options.sleep)
            slow_down(kvstore, options.pace)
            if options.log:
                with Path(f"{options.log}.{os.environ.get('DL2_TASK', 'single')}").open("a") as file:
                    file.write(f"{kvstore.rank} {kvstore.num_workers} {float(loss.mean().asscalar())}\n")
            end_early(options, steps, rank, workers)
        if steps >= options.leave_at > 0 and rank == workers - 1:
            return
    if options.save and kvstore.rank == 0:
        net.save_parameters(options.save + ".params")
        trainer.save_states(options.save + ".states")
    if options.by_name:
        try:
            mx.kv.create(options.kvstore)
        except Exception as error:  # noqa: BLE001  (pslite's errors are not known here)
            Path(f"{options.out}.refused").write_text(str(error))
    if hasattr(kvstore, "barrier"):
        kvstore.barrier()
    if options.out:
        keep(f"{options.out}.{kvstore.rank}", net)
        Path(f"{options.out}.{kvstore.rank}.accuracy").write_text(str(accuracy(net, images[800:], labels[800:])))


def split(options):
    """The job assigns samples of the data set; logs which samples each step has used."""
    from pslite.mxnet import elastic_split  # noqa: PLC0415  (MXNet's own servers have no pslite)

    images, labels = data(options.data)
    dataset = gluon.data.ArrayDataset(images[:800], labels[:800], np.arange(800))
    loader = gluon.data.DataLoader(dataset, options.batch, sampler=elastic_split(dataset, epochs=options.epochs))
    kvstore = mx.kv.create(options.kvstore)
    net = network(drop=0.0)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, kvstore=kvstore)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    workers = kvstore.num_workers
    print(f"{workers} workers")
    for _ in range(options.epochs):
        for batch, targets, indices in loader:
            with autograd.record():
                loss = loss_of(net(batch), targets)
            loss.backward()
            version = kvstore.version
            if version == options.die_at > 0 and kvstore.rank == workers - 1:
                os.kill(os.getpid(), 9)
            try:
                trainer.step(options.batch * kvstore.num_workers)
                used = kvstore.version == version + 1  # not so in the first step of one that comes later
            except SystemExit:
                used = True  # it leaves the job with this step
                raise
            finally:
                if used:
                    with Path(f"{options.log}.{os.environ.get('DL2_TASK', 'single')}").open("a") as file:
                        file.write(" ".join(map(str, indices.asnumpy().tolist())) + "\n")
            time.sleep(options.sleep)
            slow_down(kvstore, options.pace)
    kvstore.barrier()


def module(options):
    """Module's fit, in two calls: the second one goes on with the KVStore of the first, though it names one."""
    kvstore = mx.kv.create(options.kvstore)
    images, labels = data(options.data)
    mx.random.seed(options.seed + kvstore.rank)
    mine = slice(kvstore.rank, 800, kvstore.num_workers)
    source = mx.io.NDArrayIter(images[mine].reshape(-1, 64), labels[mine], options.batch, last_batch_handle="discard")
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=32, name="fc1")
    net = mx.sym.BatchNorm(mx.sym.Activation(net, act_type="relu"), name="norm")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10, name="fc2"), name="softmax")
    trained = mx.mod.Module(net, context=mx.cpu())
    for given, begin, end in ((kvstore, 0, options.epochs - 1), (options.kvstore, options.epochs - 1, options.epochs)):
        trained.fit(
            source,
            kvstore=given,
            optimizer=options.optimizer,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3},
            initializer=mx.init.Xavier(),
            begin_epoch=begin,
            num_epoch=end,
            batch_end_callback=lambda _: slow_down(kvstore, options.pace),
        )
    weights, _ = trained.get_params()
    np.savez(f"{options.out}.{kvstore.rank}", **{name: value.asnumpy() for name, value in weights.items()})
    test = mx.io.NDArrayIter(images[800:].reshape(-1, 64), labels[800:], options.batch)
    Path(f"{options.out}.{kvstore.rank}.accuracy").write_text(str(trained.score(test, "acc")[0][1]))


def words(images):
    """Each pixel with its grey value as a word of 1,088."""
    return (np.arange(64) * 17 + np.rint(images.reshape(-1, 64) * 16)).astype("float32")


def embedding(options):
    """A table of which a step touches a few rows, in Gluon."""
    kvstore = mx.kv.create(options.kvstore)
    images, labels = data(options.data)
    tokens = words(images)
    mx.random.seed(options.seed + kvstore.rank)
    net = gluon.nn.Sequential(prefix="net_")
    if options.rows == "weight":
        table = gluon.contrib.nn.SparseEmbedding(1088, 10, prefix="table_")
    else:
        table = gluon.nn.Embedding(1088, 10, sparse_grad=True, prefix="table_")
    net.add(table, gluon.nn.Lambda(lambda x: x.sum(axis=1)), gluon.nn.Dense(10, in_units=10))
    net.initialize(mx.init.Normal(0.1))
    rates = {"learning_rate": 0.01} if options.optimizer == "adam" else {"learning_rate": 0.05, "momentum": 0.9}
    # a KVStore by its name: for row_sparse weights MXNet's Trainer takes no other but its own
    trainer = gluon.Trainer(net.collect_params(), options.optimizer, {**rates, "wd": 1e-3}, kvstore=kvstore)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(options.epochs):
        rank, workers = kvstore.rank, kvstore.num_workers
        for first in range(rank * options.batch, 800, workers * options.batch):
            with autograd.record():
                scores = net(mx.nd.array(tokens[first : first + options.batch]))
                loss = loss_of(scores, mx.nd.array(labels[first : first + options.batch])).mean()
            loss.backward()
            trainer.step(1)
            slow_down(kvstore, options.pace)
    weights = {
        "table": table.weight.row_sparse_data(mx.nd.arange(1088)) if options.rows == "weight" else table.weight.data()
    }
    weights |= {"weight": net[2].weight.data(), "bias": net[2].bias.data()}
    np.savez(f"{options.out}.{kvstore.rank}", **{name: value.asnumpy() for name, value in weights.items()})
    Path(f"{options.out}.{kvstore.rank}.accuracy").write_text(str(accuracy(net, tokens[800:], labels[800:])))


def factors(options):
    """The same with Module: rows are asked for batch by batch."""
    kvstore = mx.kv.create(options.kvstore)
    images, labels = data(options.data)
    tokens = words(images)
    mx.random.seed(options.seed)
    mine = slice(kvstore.rank, 800, kvstore.num_workers)
    source = mx.io.NDArrayIter(tokens[mine], labels[mine], options.batch, last_batch_handle="discard")
    table = mx.sym.Variable("table_weight", stype="row_sparse")
    net = mx.sym.Embedding(mx.sym.Variable("data"), weight=table, input_dim=1088, output_dim=10, sparse_grad=True)
    net = mx.sym.FullyConnected(mx.sym.sum(net, axis=1), num_hidden=10, name="fc")
    net = mx.sym.SoftmaxOutput(net, name="softmax")
    trained = mx.mod.Module(net, context=mx.cpu())
    trained.fit(
        source,
        kvstore=kvstore,
        optimizer="sgd",
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        initializer=mx.init.Normal(0.1),
        num_epoch=options.epochs,
        sparse_row_id_fn=lambda batch: {"table_weight": batch.data[0]},
    )
    weights, _ = trained.get_params()
    np.savez(f"{options.out}.{kvstore.rank}", **{name: value.asnumpy() for name, value in weights.items()})
    test = mx.io.NDArrayIter(tokens[800:], labels[800:], options.batch)
    found = trained.score(test, "acc", sparse_row_id_fn=lambda batch: {"table_weight": batch.data[0]})
    Path(f"{options.out}.{kvstore.rank}.accuracy").write_text(str(found[0][1]))


def large(options):
    """A key of 32 MB and a small one, on one device or two: keeps the weights, and what the KVStore took of memory."""
    kv = mx.kv.create(options.kvstore)
    devices = [mx.cpu(number) for number in range(options.devices)]
    starts = [np.linspace(-1, 1, size, dtype=np.float32) for size in (8_000_000, 100)]
    weights = [[mx.nd.array(start, ctx=device) for device in devices] for start in starts]
    gradients = [[array.copy() for array in arrays] for arrays in weights]
    mx.nd.waitall()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory is counted anew
    before = resident("VmRSS")
    for key, arrays in enumerate(weights):
        kv.broadcast(key, arrays[0], out=arrays)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=1 / kv.num_workers))
    for _ in range(4):
        for key, arrays in enumerate(weights):
            for number, array in enumerate(arrays):
                # `array * factor` would make an array, whose memory would count
                factor = 0.1 * (kv.rank + 1) * (number + 1)
                mx.nd._internal._mul_scalar(array, scalar=factor, out=gradients[key][number])
            kv.push(key, gradients[key])
            kv.pull(key, out=arrays)
    mx.nd.waitall()
    taken = resident("VmHWM") - before
    for number in range(options.devices):
        large, small = (arrays[number].asnumpy() for arrays in weights)
        np.savez(f"{options.out}.{kv.rank}.{number}.npz", large=large, small=small, taken=taken)


def resident(entry):
    """Return an entry of this process's status, in bytes."""
    return int(re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def keys(options):
    """Keys that are given their values one by one, each before it is pushed the first time."""
    kvstore = mx.kv.create(options.kvstore)
    kvstore.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=1 / kvstore.num_workers))
    weights = {key: mx.nd.ones((3, 1 + 40000 * key)) * key for key in range(3)}
    for step in range(30):
        slow_down(kvstore, options.pace)
        for key, weight in weights.items():
            if not step:
                kvstore.init(key, weight)
            kvstore.push(key, weight * 0.1 + key)
        for key, weight in weights.items():
            kvstore.pull(key, out=weight)
        mx.nd.waitall()
        if options.late and step == 10:
            late = {key: mx.nd.ones((2, key)) * (key + kvstore.rank) for key in (10, 50)}
            kvstore.init(list(late), list(late.values()))
            for key, weight in late.items():
                kvstore.pull(key, out=weight)  # the first worker's
            weights |= late
    if options.out and kvstore.rank == 0:
        np.savez(options.out, **{str(key): weight.asnumpy() for key, weight in weights.items()})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("script", choices=["job", "loop", "module", "embedding", "factors", "split", "large", "keys"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", choices=["weight", "gradient"], default="weight")
    parser.add_argument("--kvstore", default="dist_sync")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--begin-epoch", type=int, default=-1)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", default="exact")
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--leave-at", type=int, default=0)
    parser.add_argument("--exit-at", type=int, default=0)
    parser.add_argument("--exit-status", type=int, default=0)
    parser.add_argument("--pace", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1)
    for flag in ("mean", "local", "schedule", "quietly", "by-name", "weights-only", "late"):
        parser.add_argument(f"--{flag}", action="store_true")
    for name in ("out", "save", "load", "log"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    scripts = {
        "job": job, "loop": loop, "module": module, "embedding": embedding, "factors": factors, "split": split,
        "large": large, "keys": keys,
    }  # fmt: skip
    scripts[options.script](options)


if __name__ == "__main__":
    main()
