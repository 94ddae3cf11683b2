"""A training script with all that makes exactness hard: BatchNorm, dropout, random augmentation, groups, a mask."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from pslite.testing import pace
from pslite.torch import SGD, Adam, ElasticJob, Group


class Noisy(Dataset):
    def __init__(self, samples):
        generator = torch.Generator().manual_seed(5)
        self.images = torch.randn(samples, 1, 6, 6, generator=generator)
        self.labels = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index] + 0.1 * torch.randn(1, 6, 6), self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(64, 3)
        mask = torch.zeros(3)
        mask[0] = float("-inf")
        self.register_buffer("mask", mask)

    def forward(self, inputs):
        hidden = functional.relu(self.norm(self.conv(inputs)))
        return self.out(self.drop(hidden.flatten(1))) + torch.where(torch.isinf(self.mask), 0.0, self.mask)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="exact")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", default="")
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--own-backward", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(1)
    model = Net()
    decayed = (
        Adam(lr=0.01, weight_decay=0.01)
        if options.optimizer == "adam"
        else SGD(lr=0.01, momentum=0.9, weight_decay=0.01)
    )
    plain = Adam(lr=0.01) if options.optimizer == "adam" else SGD(lr=0.01, momentum=0.9)
    job = ElasticJob(
        model,
        optimizer=decayed,
        groups=[Group([p for n, p in model.named_parameters() if n.endswith("bias")], plain)],
        dataset=Noisy(110),
        batch_size=20,
        epochs=options.epochs,
        seed=3,
        mode=options.mode,
        checkpoint=options.checkpoint,
    )
    for inputs, targets in job:
        pace(job.version, job.total_versions)
        time.sleep(0.001)
        loss = functional.cross_entropy(model(inputs), targets)
        if options.own_backward:
            loss.backward()
            job.step(loss)
        else:
            job.backward(loss)
    if job.is_chief:
        if options.out:
            torch.save(model.state_dict(), options.out)
        if job.digest:
            print(job.digest)


if __name__ == "__main__":
    main()
