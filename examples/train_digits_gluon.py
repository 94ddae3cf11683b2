"""Recognise handwritten digits with MXNet: an ordinary Gluon script, which the KVStore makes elastic.

python examples/train_digits_gluon.py --data digits.npz                                  in this process
dl2-run --workers 2 --servers 1 python examples/train_digits_gluon.py --data digits.npz   as an elastic job

`digits.npz` holds scikit-learn's 1,797 images of 8 x 8, made where that is installed, since it needs a newer numpy than
MXNet does:

    from sklearn.datasets import load_digits
    digits = load_digits()
    numpy.savez("digits.npz", images=digits.images, target=digits.target)
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import pslite.mxnet

TRAIN = 1500


def build() -> gluon.nn.HybridSequential:
    """Return a net for input of shape (n, 1, 8, 8)."""
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 3, padding=1, activation="relu", in_channels=1),
        gluon.nn.BatchNorm(in_channels=16),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Flatten(),
        gluon.nn.Dense(10, in_units=256),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def own_loop(net: gluon.nn.HybridSequential, train: gluon.data.Dataset, options: argparse.Namespace) -> bool:
    """Train as for MXNet's own servers; returns whether this worker is the first."""
    kvstore = mx.kv.create("dl2")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore=kvstore)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    # each sample once in each epoch, also when the job is resized
    loader = gluon.data.DataLoader(
        train, options.batch, sampler=pslite.mxnet.elastic_split(train, epochs=options.epochs)
    )
    for epoch in range(options.epochs):
        for images, labels in loader:
            with autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(options.batch * kvstore.num_workers)
            time.sleep(options.step_seconds)
        if kvstore.rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.mean().asscalar():.4f}, {kvstore.num_workers} workers", flush=True)
    if options.states and kvstore.rank == 0:
        trainer.save_states(options.states)
    return kvstore.rank == 0


def loop_of_the_job(net: gluon.nn.HybridSequential, train: gluon.data.Dataset, options: argparse.Namespace) -> bool:
    """Have the job give out the data, so that a resize changes nothing; returns whether this worker is the first."""
    job = pslite.mxnet.ElasticJob(
        net,
        optimizer=pslite.mxnet.SGD(lr=0.05, momentum=0.9),
        dataset=train,
        batch_size=options.batch,
        epochs=options.epochs,
        seed=1,
        mode="exact",
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for images, labels in job:
        with autograd.record():
            loss = loss_of(net(images), labels)
        job.backward(loss)
        time.sleep(options.step_seconds)
    if job.digest:
        print(f"digest {job.digest}")
    return job.is_chief


def main() -> None:
    """Train, and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=50, help="of one worker; with --exact of all together")
    parser.add_argument("--exact", action="store_true", help="the job gives out the data")
    parser.add_argument("--states", default="", help="write the optimizer's states here")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="wait so long in every batch")
    options = parser.parse_args()
    with np.load(options.data) as file:
        images = (file["images"] / 16).astype(np.float32)[:, None]
        labels = file["target"].astype(np.float32)
    mx.random.seed(1)
    net = build()
    train = gluon.data.ArrayDataset(images[:TRAIN], labels[:TRAIN])
    first = (loop_of_the_job if options.exact else own_loop)(net, train, options)
    if first:
        right = int((net(mx.nd.array(images[TRAIN:])).asnumpy().argmax(1) == labels[TRAIN:]).sum())
        print(f"{right} of {len(images) - TRAIN} test images recognised")


if __name__ == "__main__":
    main()
