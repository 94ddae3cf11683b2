"""Gluon in the style of MXNet's distributed CIFAR-10 example: `dist_sync`, data split once by rank."""

import argparse
import random
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--slow", default="", help="while this file exists, a batch takes half a second longer")
parser.add_argument("--epochs", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=50)
options = parser.parse_args()

store = mx.kv.create("dist_sync")
print(f"worker {store.rank} of {store.num_workers}", flush=True)


class SplitSampler(gluon.data.sampler.Sampler):
    """The part of this worker, in a random order."""

    def __init__(self, length, num_parts=1, part_index=0):
        self.part_len = length // num_parts
        self.start = self.part_len * part_index

    def __iter__(self):
        indices = list(range(self.start, self.start + self.part_len))
        random.shuffle(indices)
        return iter(indices)

    def __len__(self):
        return self.part_len


def transform(image, label):
    return nd.array(image) / 16, np.float32(label)


with np.load(options.data) as file:
    images, labels = file["images"].astype("float32")[:, None], file["labels"].astype("float32")
train_set = gluon.data.ArrayDataset(images[:1200], labels[:1200]).transform(transform)
test_set = gluon.data.ArrayDataset(images[1200:], labels[1200:]).transform(transform)
train_data = gluon.data.DataLoader(
    train_set, options.batch_size, sampler=SplitSampler(1200, store.num_workers, store.rank), last_batch="discard"
)
test_data = gluon.data.DataLoader(test_set, options.batch_size, shuffle=False)

ctx = [mx.cpu(0)]
net = gluon.nn.HybridSequential()
net.add(
    gluon.nn.Conv2D(8, 3, activation="relu"), gluon.nn.BatchNorm(), gluon.nn.MaxPool2D(2), gluon.nn.Flatten(),
    gluon.nn.Dense(10),
)  # fmt: skip
net.initialize(mx.init.Xavier(), ctx=ctx)
loss = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.001}, kvstore=store)


def evaluate_accuracy(data_iterator, net):
    acc = mx.metric.Accuracy()
    for data, label in data_iterator:
        acc.update(preds=nd.argmax(net(data.as_in_context(ctx[0])), axis=1), labels=label)
    return acc.get()[1]


def train_batch(batch):
    data = gluon.utils.split_and_load(batch[0], ctx)
    label = gluon.utils.split_and_load(batch[1], ctx)
    with autograd.record():
        losses = [loss(net(x), y) for x, y in zip(data, label)]  # noqa: B905
    for one in losses:
        one.backward()
    trainer.step(batch[0].shape[0])
    if options.slow and Path(options.slow).exists():
        time.sleep(0.5)


for epoch in range(options.epochs):
    for batch in train_data:
        train_batch(batch)
    accuracy = evaluate_accuracy(test_data, net)
    print(f"Epoch {epoch}: Test_acc {accuracy:f}", flush=True)
    if store.rank == 0:
        net.save_parameters(f"{options.out}-{epoch:04d}.params")
        Path(f"{options.out}.accuracy").write_text(str(accuracy))
