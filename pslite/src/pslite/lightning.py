"""Lightning's Trainer as an elastic job: `Trainer(strategy=ElasticStrategy(), ...)`.

The Trainer's loop goes on as ever, one batch for each version of the job.  A batch is this worker's part of the global
batch, which the job draws; where the loop calls its optimizer, `training_step` runs on that, and the job exchanges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only

from pslite.errors import UsageError
from pslite.job.learning_rates import Constant, Schedule
from pslite.torch import ElasticJob
from pslite.torch.optimizer_translation import PlaceholderOptimizer, groups_of

#: settings of the Trainer that must be these
_NEEDED = {"max_steps": -1, "limit_train_batches": 1.0, "overfit_batches": 0.0, "fast_dev_run": False}


class ElasticStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Workers that join and leave, each with one device.

    The global batch is the data loader's batch_size x accumulate_grad_batches, whatever the number of workers.

    Parameters
    ----------
    schedule
        of the learning rate, in versions; one of `pslite.torch`.
    device
        of this worker. Default: the first GPU; the CPU if there is none or the Trainer's accelerator is "cpu".
    elastic
        more settings of `pslite.torch.ElasticJob` such as seed, mode, shards and checkpoint.

    """

    strategy_name = "elastic"
    optimizers: list[torch.optim.Optimizer]

    def __init__(
        self, *, schedule: Schedule | None = None, device: torch.device | str | None = None, **elastic: Any
    ) -> None:
        super().__init__(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self._device_given = device is not None
        self.job: ElasticJob | None = None
        self._schedule = schedule or Constant()
        self._options = elastic
        self._made: torch.optim.Optimizer
        self._turns: Iterator[Iterable[Any]] = iter(())
        self._turn: Iterable[Any] = ()
        self._part: Any = None

    @property
    def root_device(self) -> torch.device:
        """This worker's device."""
        if isinstance(self.accelerator, CPUAccelerator) and not self._device_given:
            return torch.device("cpu")
        found: torch.device = super().root_device
        return found

    def setup_optimizers(self, trainer: Any) -> None:
        """Have the job do what the module's optimizer would."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or self.lr_scheduler_configs or not self.lightning_module.automatic_optimization:
            raise UsageError(
                "an elastic job needs automatic optimization, and one optimizer without lr_scheduler in "
                "configure_optimizers: give a schedule of pslite.torch to ElasticStrategy(schedule=...)"
            )
        (self._made,) = self.optimizers
        self.optimizers = [PlaceholderOptimizer(self._made)]

    def process_dataloader(self, dataloader: Any) -> Any:
        """Join the job; the Trainer's own loader says how a batch is made of samples."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        for name, needed in _NEEDED.items():
            if getattr(trainer, name) != needed:
                raise UsageError(f"{name} is {getattr(trainer, name)!r}: in an elastic job it must be {needed!r}")
        if getattr(dataloader, "batch_size", None) is None or dataloader.drop_last or (trainer.max_epochs or 0) < 1:
            raise UsageError("an elastic job needs max_epochs, and a DataLoader with batch_size and without drop_last")
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise UsageError("an elastic job cannot scale gradients: use precision='bf16-mixed' or '32-true'")
        clip = f"clip_{getattr(trainer.gradient_clip_algorithm, 'value', None) or 'norm'!s}"
        groups = groups_of(self.lightning_module, self._made, self._schedule)
        self.job = ElasticJob(
            self.lightning_module,
            optimizer=groups[0].optimizer,
            groups=groups,
            dataset=dataloader.dataset,
            collate=dataloader.collate_fn,
            batch_size=dataloader.batch_size * trainer.accumulate_grad_batches,
            epochs=trainer.max_epochs,
            **{clip: float(trainer.gradient_clip_val or 0.0), **self._options},
        )
        trainer.accumulate_grad_batches = 1
        self._turns = self.job.steps()
        self._turn = next(self._turns, ())
        return _Turns(self.job)

    def on_train_start(self) -> None:
        """Set the Trainer's counters to where the job is: a worker may come in any epoch."""
        assert self.job is not None
        fit = self.lightning_module.trainer.fit_loop
        version, (epoch, step) = self.job.version, divmod(self.job.version, self.job.spec.steps_per_epoch)
        fit.epoch_progress.current.processed = fit.epoch_progress.current.completed = epoch
        steps = fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        steps.ready = steps.completed = fit.epoch_loop._batches_that_stepped = version  # noqa: SLF001
        if step:
            batches = fit.epoch_loop.batch_progress.current
            batches.ready = batches.started = batches.processed = batches.completed = step
            fit.epoch_loop.restarting = True
        self._note_rank()

    def _note_rank(self) -> None:
        """Have loggers, which ask for it, write in the first worker only."""
        rank_zero_only.rank = 0 if self.is_global_zero else 1

    # --- a step ---------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, *arguments: Any, **named: Any) -> Any:
        """Move a batch; the Trainer's own, in training, are empty."""
        return batch if isinstance(batch, _Turn) else super().batch_to_device(batch, *arguments, **named)

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Run the module on a part of the batch."""
        return super().training_step(self._part, *arguments[1:], **named)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:  # noqa: ARG002
        """Compute this worker's parts of the global batch, and exchange; returns the last one's loss."""
        assert self.job is not None
        module, loss = self.lightning_module, None
        for part in self._turn:
            part = module._on_before_batch_transfer(part, dataloader_idx=0)  # noqa: PLW2901, SLF001
            self._part = self.batch_to_device(part)
            # it asks the batch for its size where something is logged
            module.trainer._logger_connector.on_batch_start(self._part)  # noqa: SLF001
            loss = closure()
            if loss is None:
                raise UsageError("training_step returned nothing: an elastic job needs the loss of each batch")
            self.job.step(loss)
        self._turn = next(self._turns, ())
        self._note_rank()
        if loss is None:
            closure._result = ClosureResult(None)  # noqa: SLF001  (this worker has no part of this batch)
        return loss

    # --- one worker writes files ----------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is the one that writes files."""
        return self.job is None or self.job.is_chief

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:  # noqa: ARG002
        """Not there: what `fit(ckpt_path=...)` has of the optimizer is nothing."""
        raise UsageError(
            "ckpt_path cannot be given: an elastic job resumes from its own checkpoints, "
            "ElasticStrategy(checkpoint=folder)"
        )


class _Turn(dict[str, Any]):
    """An empty batch: it is the turn of one more version."""


class _Turns:
    """Stands for the data loader: one empty batch for each version of an epoch that is to come."""

    def __init__(self, job: ElasticJob) -> None:
        self._job = job

    def __len__(self) -> int:
        return self._job.spec.steps_per_epoch

    def __iter__(self) -> Iterator[_Turn]:
        for _ in range(self._job.version % len(self), len(self)):
            yield _Turn()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where it is the job knows, so that Lightning need not warn of epochs that begin in the middle."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""
