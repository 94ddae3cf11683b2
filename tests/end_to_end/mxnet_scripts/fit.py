"""Module in the style of the `fit` of MXNet's image-classification examples."""

import argparse
import logging
import math
import time
from pathlib import Path

import mxnet as mx
import numpy as np


def get_lr_scheduler(args, kv):
    epoch_size = math.ceil(args.num_examples / kv.num_workers / args.batch_size)
    steps = [epoch_size * epoch for epoch in map(int, args.lr_step_epochs.split(","))]
    return args.lr, mx.lr_scheduler.MultiFactorScheduler(
        step=steps, factor=args.lr_factor, base_lr=args.lr, warmup_steps=epoch_size, warmup_mode="linear"
    )


def save_model(args, rank):
    return mx.callback.do_checkpoint(args.model_prefix if rank == 0 else f"{args.model_prefix}-{rank}", period=1)


def data_loader(args, kv):
    with np.load(args.data) as file:
        images, labels = file["images"].astype("float32")[:, None] / 16, file["labels"].astype("float32")
    rank, nworker = kv.rank, kv.num_workers
    part = slice(rank, args.num_examples, nworker)
    train = mx.io.NDArrayIter(images[part], labels[part], args.batch_size, shuffle=True, last_batch_handle="discard")
    val = mx.io.NDArrayIter(images[args.num_examples :], labels[args.num_examples :], args.batch_size)
    return train, val


def symbol():
    net = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=8, kernel=(3, 3), name="conv")
    net = mx.sym.Activation(mx.sym.BatchNorm(net, fix_gamma=False, name="bn"), act_type="relu")
    net = mx.sym.FullyConnected(mx.sym.Flatten(net), num_hidden=10, name="fc")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def fit(args):
    kv = mx.kvstore.create(args.kv_store)
    logging.basicConfig(level=logging.DEBUG, format=f"%(asctime)-15s Node[{kv.rank}] %(message)s")
    logging.info("start with arguments %s", args)
    train, val = data_loader(args, kv)
    lr, lr_scheduler = get_lr_scheduler(args, kv)
    model = mx.mod.Module(context=mx.cpu(), symbol=symbol())
    optimizer_params = {
        "learning_rate": lr, "wd": args.wd, "lr_scheduler": lr_scheduler, "multi_precision": True, "momentum": args.mom,
    }  # fmt: skip
    slow = Path(args.slow)
    batch_end_callbacks = [mx.callback.Speedometer(args.batch_size, 10)]
    batch_end_callbacks.append(lambda _: time.sleep(0.5) if args.slow and slow.exists() else None)
    epoch_end_callbacks = [save_model(args, kv.rank)]
    model.fit(
        train, begin_epoch=0, num_epoch=args.num_epochs, eval_data=val,
        eval_metric=["accuracy", mx.metric.create("top_k_accuracy", top_k=5)],
        kvstore=kv, optimizer="sgd", optimizer_params=optimizer_params,
        initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        arg_params=None, aux_params=None, batch_end_callback=batch_end_callbacks,
        epoch_end_callback=epoch_end_callbacks, allow_missing=True,
    )  # fmt: skip
    if kv.rank == 0:
        Path(f"{args.model_prefix}.accuracy").write_text(str(model.score(val, "acc")[0][1]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", dest="model_prefix", required=True)
    parser.add_argument("--slow", default="", help="while this file exists, a batch takes half a second longer")
    parser.add_argument("--kv-store", default="dist_sync")
    parser.add_argument("--epochs", dest="num_epochs", type=int, default=16)
    parser.add_argument("--num-examples", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lr-factor", type=float, default=0.1)
    parser.add_argument("--lr-step-epochs", default="10,14")
    parser.add_argument("--mom", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=0.0001)
    fit(parser.parse_args())
