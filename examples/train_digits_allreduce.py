"""The same task as train_digits.py as an all-reduce job, in the style of DistributedDataParallel.

python examples/train_digits_allreduce.py                                          in this process
dl2-run --workers 2 --servers 0 python examples/train_digits_allreduce.py          as an elastic job on this machine

Every worker has the whole model and its optimizer state; gradients are added up among the workers. A worker that comes
gets both from another one while the others go on. Wrapping the model, a sampler and a process group of one's own are
not needed: the loop's batches are this worker's parts of the global batch, which never changes.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pslite.torch import Adam, Cosine, ElasticJob


def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1500], labels[:1500])

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    job = ElasticJob(
        model,
        optimizer=Adam(lr=0.002, schedule=Cosine(over=24 * options.epochs)),
        dataset=train,
        batch_size=64,
        epochs=options.epochs,
        seed=1,
        architecture="allreduce",
    )
    for inputs, targets in job:
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        job.step(loss)  # in place of optimizer.step()

    if job.is_chief:
        model.eval()
        with torch.no_grad():
            right = int((model(images[1500:]).argmax(1) == labels[1500:]).sum())
        print(f"{right} of {len(images) - 1500} test images recognised after {job.version} updates")
        if job.digest:
            print(f"digest {job.digest}")


if __name__ == "__main__":
    main()
