"""A training script on a GPU: as an elastic job, or with --torch in PyTorch alone."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from pslite.job.sample_order import permutation
from pslite.testing import pace
from pslite.torch import SGD, ElasticJob, Group

SEED, SAMPLES, BATCH = 3, 110, 20
LR, MOMENTUM = 0.02, 0.9


class Images(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.images = torch.randn(SAMPLES, 1, 6, 6, generator=generator)
        self.labels = torch.randint(0, 3, (SAMPLES,), generator=generator)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Plain(nn.Module):
    """Computes a sample by itself, so that workers together compute what one process does."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3)
        self.hidden = nn.Linear(80, 33)
        self.out = nn.Linear(33, 3)

    def forward(self, images):
        return self.out(functional.relu(self.hidden(functional.relu(self.conv(images)).flatten(1))))


class Whole(Plain):
    """With what makes exactness hard: statistics, random numbers, rows of a table, and weights that cuDNN moves."""

    def __init__(self, *, table):
        super().__init__()
        self.norm = nn.BatchNorm2d(5)
        self.drop = nn.Dropout(0.2)
        self.rnn = nn.LSTM(33, 7, batch_first=True)
        self.table = nn.Embedding(40, 7, sparse=table)
        self.out = nn.Linear(7, 3)

    def forward(self, images):
        hidden = self.drop(functional.relu(self.norm(self.conv(images))))
        hidden = functional.relu(self.hidden(hidden.flatten(1)))
        self.rnn.flatten_parameters()
        after, _ = self.rnn(hidden[:, None].expand(-1, 4, -1))
        return self.out(after[:, -1] + self.table((images[:, 0, 0, 0].abs() * 9).long()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--mode", default="fast")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--out", default="")
    parser.add_argument("--starts", default="")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    if options.starts:
        note_start(options.starts)
    torch.manual_seed(1)
    table = os.environ.get("DL2_ARCHITECTURE") != "allreduce"
    model = (Whole(table=table) if options.whole else Plain()).to(options.device)

    def loss_of(images, labels):
        with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bfloat16"):
            return functional.cross_entropy(model(images.to(options.device)), labels.to(options.device))

    if options.torch:
        train_alone(model, loss_of, options.epochs)
    else:
        groups = [Group([model.table.weight], SGD(lr=LR))] if options.whole else []
        job = ElasticJob(
            model, optimizer=SGD(lr=LR, momentum=MOMENTUM), dataset=Images(), batch_size=BATCH, epochs=options.epochs,
            seed=SEED, mode=options.mode, checkpoint=options.checkpoint, shards=8, groups=groups,
        )  # fmt: skip
        for images, labels in job:
            # a process that comes needs a while until it has the GPU
            pace(min(2 * job.version, job.total_versions - 1), job.total_versions)
            job.backward(loss_of(images, labels))
        if not job.is_chief:
            return
        if job.digest:
            print(job.digest)
    if options.out:
        torch.save(model.state_dict(), options.out)


def train_alone(model, loss_of, epochs):
    data = Images()
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    for epoch in range(epochs):
        order = torch.from_numpy(permutation(SEED, epoch, SAMPLES))
        for picked in order.split(BATCH):
            optimizer.zero_grad()
            loss_of(data.images[picked], data.labels[picked]).backward()
            optimizer.step()


def note_start(path):
    """Take a quarter of the GPU's memory, and add a line: this process, and the bytes in use on the GPU."""
    torch.ones(torch.cuda.mem_get_info()[1] // 4, dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()} {total - free}\n")


if __name__ == "__main__":
    main()
