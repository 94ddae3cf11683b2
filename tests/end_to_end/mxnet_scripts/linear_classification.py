"""Sparse data and a row_sparse weight, in the style of MXNet's linear classification example."""

import argparse
import logging
import time
from pathlib import Path

import mxnet as mx

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True, help="file in LibSVM's format; the test data has .test appended")
parser.add_argument("--out", required=True)
parser.add_argument("--slow", default="", help="while this file exists, a batch takes half a second longer")
parser.add_argument("--epochs", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=50)
parser.add_argument("--features", type=int, default=420)
parser.add_argument("--kv-store", default="dist_sync")
parser.add_argument("--optimizer", default="sgd")


def linear_model(num_features):
    x = mx.symbol.Variable("data", stype="csr")
    weight = mx.symbol.Variable(
        "weight", shape=(num_features, 2), init=mx.initializer.Normal(sigma=0.01), stype="row_sparse"
    )
    bias = mx.symbol.Variable("bias", shape=(2,))
    pred = mx.symbol.broadcast_add(mx.symbol.sparse.dot(x, weight), bias)
    return mx.symbol.SoftmaxOutput(pred, name="softmax")


if __name__ == "__main__":
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)-15s %(message)s")
    kv = mx.kvstore.create(args.kv_store)
    rank, num_worker = kv.rank, kv.num_workers
    train_data = mx.io.LibSVMIter(
        data_libsvm=args.data, data_shape=(args.features,), batch_size=args.batch_size,
        num_parts=num_worker, part_index=rank,
    )  # fmt: skip
    eval_data = mx.io.LibSVMIter(
        data_libsvm=args.data + ".test", data_shape=(args.features,), batch_size=args.batch_size
    )
    mod = mx.mod.Module(symbol=linear_model(args.features), data_names=["data"], label_names=["softmax_label"])
    mod.bind(data_shapes=train_data.provide_data, label_shapes=train_data.provide_label)
    mod.init_params()
    optim = mx.optimizer.create(args.optimizer, learning_rate=0.1, rescale_grad=1.0 / args.batch_size / num_worker)
    mod.init_optimizer(optimizer=optim, kvstore=kv)
    metric = mx.metric.create(["acc"])

    def batch_row_ids(data_batch):
        return {"weight": data_batch.data[0].indices}

    def all_row_ids(_):
        return {"weight": mx.nd.arange(0, args.features, dtype="int64")}

    for epoch in range(args.epochs):
        metric.reset()
        for batch in train_data:
            mod.prepare(batch, sparse_row_id_fn=batch_row_ids)
            mod.forward_backward(batch)
            mod.update()
            mod.update_metric(metric, batch.label)
            if args.slow and Path(args.slow).exists():
                time.sleep(0.5)
        logging.info("epoch %d, train: %s", epoch, metric.get())
        score = mod.score(eval_data, ["acc"], sparse_row_id_fn=batch_row_ids)
        logging.info("epoch %d, eval: %s", epoch, score)
        mod.prepare(None, sparse_row_id_fn=all_row_ids)
        if kv.rank == 0:
            mod.save_checkpoint(args.out, epoch, save_optimizer_states=False)
            Path(f"{args.out}.accuracy").write_text(str(score[0][1]))
        train_data.reset()
