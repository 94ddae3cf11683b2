"""A script for Hugging Face's Trainer, with a small model made here: dropout, tied weights, evaluation, checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset

from pslite.errors import PsliteError, UsageError
from pslite.huggingface import Trainer
from pslite.testing import pace


class Texts(Dataset):
    """Sentences in which each word is the one before plus a step of the sentence's own."""

    def __init__(self, samples):
        generator = torch.Generator().manual_seed(5)
        first, step = torch.randint(30, (2, samples, 1), generator=generator)
        self.words = (first + step.remainder(3) * torch.arange(8)) % 30

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.words[index]}


class Watch(transformers.TrainerCallback):
    def __init__(self):
        self.trainer = None
        self.steps = []
        self.evaluated = []

    def on_step_begin(self, args, state, control, **_):
        total = self.trainer.job.total_versions
        # its imports take a worker that comes long
        pace(min(2 * self.trainer.job.version, total - 1), total)

    def on_step_end(self, args, state, control, **_):
        self.steps.append((state.global_step, round(state.epoch, 3)))

    def on_evaluate(self, args, state, control, metrics, **_):
        self.evaluated.append((state.global_step, round(metrics["eval_loss"], 3)))


def refused(out):
    """Settings that a job cannot have are errors that name them."""
    model = torch.nn.Linear(2, 2)
    for name, value in [
        ("max_steps", 10),
        ("num_train_epochs", 1.5),
        ("dataloader_drop_last", True),
        ("lr_scheduler_type", "inverse_sqrt"),
        ("optim", "adafactor"),
    ]:
        arguments = transformers.TrainingArguments(out, use_cpu=True, report_to=[], **{name: value})
        said = ""
        try:
            Trainer(model, arguments, train_dataset=Texts(20)).train()
        except PsliteError as error:
            said = str(error)
        assert name in said or "Adafactor" in said, (name, said)
    arguments = transformers.TrainingArguments(out, use_cpu=True, report_to=[])
    for call in (
        lambda: Trainer(model, arguments, optimizers=(torch.optim.SGD(model.parameters(), 0.1), None)),
        lambda: Trainer(model, arguments, train_dataset=Texts(20)).train(resume_from_checkpoint=True),
    ):
        try:
            call()
        except UsageError:
            continue
        raise AssertionError(call)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--mode", default="exact")
    parser.add_argument("--refused", action="store_true", help="before the training")
    options = parser.parse_args()
    if options.refused:
        refused(options.out)
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=30, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    watch = Watch()
    trainer = watch.trainer = Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(
            options.out,
            use_cpu=True,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_train_epochs=6,
            learning_rate=0.01,
            weight_decay=0.01,
            warmup_steps=5,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Texts(150),
        eval_dataset=Texts(20),
        callbacks=[watch],
        elastic={"mode": options.mode, "shards": 4},
    )
    trainer.train()
    trainer.save_model(options.out)
    task = os.environ.get("DL2_TASK", "alone")
    Path(options.out, f"{task}.json").write_text(json.dumps({"steps": watch.steps, "evaluated": watch.evaluated}))
    if trainer.job.digest:
        print(trainer.job.digest)


if __name__ == "__main__":
    main()
