"""Recognise handwritten digits with Lightning's Trainer, as an elastic job.

python examples/train_lightning.py                                         in this process
dl2-run --workers 2 --servers 1 python examples/train_lightning.py         as an elastic job on this machine
dl2-run --workers 2 --servers 0 python examples/train_lightning.py         the same without servers

pip install 'pslite[lightning]' is needed. Only the strategy is not Lightning's own.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pslite.lightning import ElasticStrategy
from pslite.torch import Cosine


class Digits(lightning.LightningModule):
    """A small network for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the mean loss of the samples given."""
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Log how many are right."""
        right = self.net(batch[0]).argmax(1) == batch[1]
        self.log("right", right.float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what the job does in its place."""
        return torch.optim.AdamW(self.parameters(), lr=0.002)


def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="digits")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = torch.utils.data.Subset(data, range(1500)), torch.utils.data.Subset(data, range(1500, len(data)))

    torch.manual_seed(1)
    strategy = ElasticStrategy(schedule=Cosine(over=24 * options.epochs), seed=1)
    trainer = lightning.Trainer(
        strategy=strategy,
        devices=1,
        max_epochs=options.epochs,
        default_root_dir=options.out,
        logger=False,
        enable_progress_bar=False,
    )
    # batches of 64, whatever the number of workers
    trainer.fit(Digits(), DataLoader(train, batch_size=64), DataLoader(test, batch_size=300))
    if trainer.is_global_zero:
        right = trainer.callback_metrics["right"]
        print(f"{right:.1%} of {len(test)} test images recognised after {trainer.global_step} updates")
        if strategy.job.digest:
            print(f"digest {strategy.job.digest}")


if __name__ == "__main__":
    main()
