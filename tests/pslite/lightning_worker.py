"""A script for Lightning's Trainer, with a small model: dropout, BatchNorm, validation, logs, checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pslite.lightning import ElasticStrategy
from pslite.testing import pace
from pslite.torch import Cosine


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch, _):
        loss = functional.mse_loss(self.body(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        self.log("error", functional.mse_loss(self.body(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Watch(Callback):
    def __init__(self):
        self.steps = []
        self.validated = []

    def on_train_batch_start(self, trainer, module, batch, index):
        job = trainer.strategy.job
        # its imports take a worker that comes long
        pace(min(2 * job.version, job.total_versions - 1), job.total_versions)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.steps.append((trainer.global_step, trainer.current_epoch, index))

    def on_validation_epoch_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.validated.append((trainer.global_step, round(float(trainer.callback_metrics["error"]), 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--mode", default="exact")
    options = parser.parse_args()
    torch.manual_seed(1)
    inputs = torch.randn(170, 5, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    watch = Watch()
    strategy = ElasticStrategy(schedule=Cosine(over=60), mode=options.mode, shards=4, seed=3)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=6,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        callbacks=[watch, ModelCheckpoint(options.out, save_top_k=-1, filename="{epoch}-{step}")],
        logger=CSVLogger(options.out),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(data, 8), DataLoader(data, 50))
    task = os.environ.get("DL2_TASK", "alone")
    Path(options.out, f"{task}.json").write_text(json.dumps({"steps": watch.steps, "evaluated": watch.validated}))
    if strategy.job.digest:
        print(strategy.job.digest)


if __name__ == "__main__":
    main()
