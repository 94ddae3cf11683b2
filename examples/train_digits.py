"""Recognise handwritten digits (scikit-learn's, 1,797 images of 8 x 8): an elastic training job.

python examples/train_digits.py                              in this process
dl2-run --workers 2 --servers 1 python examples/train_digits.py    as an elastic job on this machine
dl2-run --workers 2 --servers 0 python examples/train_digits.py    the same as an all-reduce job
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pslite.torch import SGD, Adam, ElasticJob


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels from scikit-learn's file: to import scikit-learn takes longer than to import PyTorch."""
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = torch.from_numpy(np.loadtxt(file, delimiter=","))
    return rows[:, :-1].float().view(-1, 1, 8, 8) / 16, rows[:, -1].long()


def build(name: str) -> nn.Module:
    """Return a model for input of shape (n, 1, 8, 8)."""
    if name == "small":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    if name == "medium":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 256),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(512, 10),
    )


def main() -> None:
    """Train, test and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["small", "medium", "cnn"], default="small")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=None, help="default: 0.05, with adam 0.001")
    parser.add_argument("--optimizer", choices=["sgd", "momentum", "adam"], default="momentum")
    parser.add_argument("--mode", choices=["exact", "fast"], default="fast")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="wait so long in every batch, for demonstrations"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the trained model here")
    options = parser.parse_args()

    images, labels = load_digits()
    train = TensorDataset(images[:1500], labels[:1500])

    torch.manual_seed(options.seed)
    model = build(options.model)
    rules = {
        "sgd": SGD(lr=options.lr or 0.05),
        "momentum": SGD(lr=options.lr or 0.05, momentum=0.9),
        "adam": Adam(lr=options.lr or 0.001),
    }
    job = ElasticJob(
        model,
        optimizer=rules[options.optimizer],
        dataset=train,
        batch_size=options.batch,
        epochs=options.epochs,
        seed=options.seed,
        mode=options.mode,
    )
    for inputs, targets in job:
        loss = functional.cross_entropy(model(inputs), targets)
        job.backward(loss)
        if options.step_seconds:
            time.sleep(options.step_seconds)

    if job.is_chief:
        model.eval()
        with torch.no_grad():
            right = int((model(images[1500:]).argmax(1) == labels[1500:]).sum())
        print(f"{right} of {len(images) - 1500} test images recognised after {job.version} updates")
        if job.digest:
            print(f"digest {job.digest}")
        if options.out:
            torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
