"""Hugging Face's Trainer as an elastic job: `from pslite.huggingface import Trainer` in place of transformers' own.

The Trainer's loop goes on as ever, one step for each version of the job.  A step is this worker's part of the global
batch, which the job draws, and in place of `optimizer.step()` the job's exchange.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import transformers

from pslite.errors import UsageError
from pslite.job.learning_rates import Constant, Cosine, Polynomial, Schedule
from pslite.torch import ElasticJob
from pslite.torch.optimizer_translation import PlaceholderOptimizer, groups_of

#: settings of TrainingArguments that must be these
_NEEDED: dict[str, Any] = {
    "max_steps": -1,
    "fp16": False,
    "auto_find_batch_size": False,
    "dataloader_drop_last": False,
    "train_sampling_strategy": "random",
    "lr_scheduler_kwargs": None,
}


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer whose workers join and leave.

    Takes what that takes and `elastic`, more settings of `pslite.torch.ElasticJob` such as mode, shards and checkpoint.
    The global batch is per_device_train_batch_size x gradient_accumulation_steps, whatever the number of workers.

    Raises
    ------
    UsageError
        a setting is not usable; the message names it.

    """

    def __init__(
        self,
        model: Any = None,
        args: transformers.TrainingArguments | None = None,
        *more: Any,
        elastic: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        if any(named.get("optimizers") or ()):
            raise UsageError(
                "optimizers= cannot be given: the job uses the optimizer that optim of TrainingArguments names"
            )
        args = copy.copy(args or transformers.TrainingArguments())
        self._options = {"clip_norm": float(args.max_grad_norm), **(elastic or {})}
        self._batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        # the optimizer's state is not here, and gradients are clipped when all parts of a batch are there
        args.max_grad_norm, args.save_only_model = 0.0, True
        args.per_device_train_batch_size, args.gradient_accumulation_steps = self._batch, 1
        for name, needed in _NEEDED.items():
            if (getattr(args, name, needed) or needed) != needed:
                raise UsageError(f"{name} is {getattr(args, name)!r}: in an elastic job it must be {needed!r}")
        if args.num_train_epochs != int(args.num_train_epochs):
            raise UsageError(
                f"num_train_epochs is {args.num_train_epochs}: in an elastic job it must be a whole number"
            )
        self.job: ElasticJob | None = None
        self._turns: _Turns
        self._steps: Iterator[Iterable[Any]] = iter(())
        self._step: Iterable[Any] = ()
        self._flos = 0
        super().__init__(model, args, *more, **named)
        if args.n_gpu > 1:
            raise UsageError(
                f"{args.n_gpu} GPUs are visible, but a worker uses one: set CUDA_VISIBLE_DEVICES to one GPU"
            )
        self.callback_handler.callbacks.insert(0, _Place(self))
        self.add_callback(_Over(self))

    def train(self, resume_from_checkpoint: Any = None, *more: Any, **named: Any) -> Any:
        """Train as ever, or go on from the job's own checkpoint: elastic={"checkpoint": folder}."""
        if resume_from_checkpoint:
            raise UsageError(
                "resume_from_checkpoint cannot be given: an elastic job resumes from its own checkpoints, "
                'Trainer(..., elastic={"checkpoint": folder})'
            )
        return super().train(None, *more, **named)

    # --- what the Trainer's loop asks for -------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Join the job; the Trainer's own loader says how a batch is made of samples."""
        if self.job is not None:
            raise UsageError("this Trainer has trained already, and an elastic job trains once: create a new Trainer")
        loader = super().get_train_dataloader()
        total = -(-len(loader.dataset) // self._batch) * int(self.args.num_train_epochs)
        self._schedule = schedule_of(self.args, total)
        made = super().create_optimizer()
        self.optimizer = PlaceholderOptimizer(made)
        groups = groups_of(self.model, made, self._schedule)
        self.job = ElasticJob(
            self.model,
            optimizer=groups[0].optimizer,
            groups=groups,
            dataset=loader.dataset,
            collate=loader.collate_fn,
            batch_size=self._batch,
            epochs=int(self.args.num_train_epochs),
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            **self._options,
        )
        self._turns = _Turns(self.job, loader.dataset)
        self._steps = self.job.steps()
        self._step = next(self._steps, ())
        return self._turns

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ARG002
        """Say, for the log, what the rate is that the job has."""
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._schedule.factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:  # noqa: ARG002
        """Compute this worker's parts of the global batch, and exchange; returns their mean loss."""
        assert self.job is not None
        total, parts = torch.zeros((), device=self.args.device), 0
        for part in self._step:
            loss = super().training_step(model, part)
            self.job.step(loss)
            self._flos += super().floating_point_ops(part)
            total, parts = total + loss, parts + 1
        self._step = next(self._steps, ())
        # the Trainer counts on from here, also where this worker has come later
        self.state.global_step = self.lr_scheduler.last_epoch = self.job.version - 1
        return total / max(1, parts)

    def floating_point_ops(self, inputs: Any) -> int:  # noqa: ARG002
        """Return the number of operations of this worker's parts."""
        flos, self._flos = self._flos, 0
        return flos

    # --- one worker writes files ----------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Whether this worker is the one that writes files."""
        return self.job is None or self.job.is_chief

    is_local_process_zero = is_world_process_zero

    def _save_checkpoint(self, *arguments: Any) -> None:
        if self.is_world_process_zero():
            super()._save_checkpoint(*arguments)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if not self.is_world_process_zero():
            return
        # the job keeps parameters in one piece of memory, which safetensors takes for one tensor; those that are
        # tied to each other stay so
        whole = self.model.state_dict() if state_dict is None else state_dict
        copies = {(tensor.data_ptr(), tensor.shape): tensor.clone() for tensor in whole.values()}
        super()._save(output_dir, {name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in whole.items()})


class _Turns:
    """Stands for the data loader: one empty batch for each version of an epoch that is to come."""

    def __init__(self, job: ElasticJob, dataset: Any) -> None:
        self.dataset = dataset
        self._job = job
        self._epoch = 0

    def __len__(self) -> int:
        return self._job.spec.steps_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(max(self._job.version, self._epoch * len(self)), (self._epoch + 1) * len(self)):
            yield {}


class _Place(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps the Trainer's idea of where it is that of the job: a worker may come in any epoch, and become the first."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        assert self._trainer.job is not None
        state.global_step = self._trainer._globalstep_last_logged = self._trainer.job.version  # noqa: SLF001

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        job = self._trainer.job
        assert job is not None
        state.epoch = state.global_step / job.spec.steps_per_epoch
        state.is_world_process_zero = state.is_local_process_zero = job.is_chief


class _Over(transformers.TrainerCallback):  # type: ignore[misc]
    """Has nothing done at the end of epochs that were over before this worker came."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self._first = state.global_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        job = self._trainer.job
        assert job is not None
        if state.global_step == self._first < job.total_versions:
            # the Trainer takes it for the end of the data
            control.should_training_stop = control.should_log = control.should_evaluate = control.should_save = False


def schedule_of(args: transformers.TrainingArguments, total: int) -> Schedule:
    """Return TrainingArguments' schedule over so many versions.

    Raises
    ------
    UsageError
        the job has no such schedule.

    """
    warmup, name = args.get_warmup_steps(total), str(args.lr_scheduler_type.value)
    rest = max(1, total - warmup)
    if name == "linear":
        return Polynomial(over=rest, warmup=warmup)
    if name == "cosine":
        return Cosine(over=rest, warmup=warmup)
    if name in ("constant", "constant_with_warmup"):
        return Constant(warmup=warmup if name != "constant" else 0)
    raise UsageError(
        f"lr_scheduler_type is {name!r}: it must be 'linear', 'cosine', 'constant' or 'constant_with_warmup'"
    )
