"""Train a small language model with Hugging Face's Trainer, as an elastic job.

python examples/train_huggingface.py                                         in this process
dl2-run --workers 2 --servers 1 python examples/train_huggingface.py         as an elastic job on this machine
dl2-run --workers 2 --servers 0 python examples/train_huggingface.py         the same without servers

pip install 'pslite[huggingface]' is needed. Only the import of Trainer is not transformers' own. The model is made here
and learns to continue sequences of numbers; nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from pslite.huggingface import Trainer

WORDS = 64


class Sequences(Dataset):
    """Each number is the one before plus 1, 2 or 3, the same for a whole sequence."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(WORDS, (count, 1), generator=generator)
        step = torch.randint(1, 4, (count, 1), generator=generator)
        self.words = (first + step * torch.arange(16)) % WORDS

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="sequences")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            options.out,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,  # batches of 32, whatever the number of workers
            num_train_epochs=options.epochs,
            learning_rate=3e-3,
            weight_decay=0.01,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to=[],
        ),
        train_dataset=Sequences(2000, seed=1),
        eval_dataset=Sequences(200, seed=2),
    )
    trainer.train()
    trainer.save_model(options.out)  # by the first worker
    if trainer.is_world_process_zero() and trainer.job.digest:
        print(f"digest {trainer.job.digest}")


if __name__ == "__main__":
    main()
