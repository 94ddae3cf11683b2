"""The elastic training job of a PyTorch script."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.utils.data import default_collate

from pslite.errors import UsageError
from pslite.job.spec import Descent
from pslite.numeric.gradients import Bundle
from pslite.torch.parameters import Group, ParameterLayout
from pslite.worker.training_loop import Indices, LoopJob


class ElasticJob(LoopJob):
    """An elastic training job, seen from the user's script; iterate over it once.

    Parameters live in one flat array per kind, into which the network writes; each `p.grad` is a view of a flat
    gradient array from which it sends.  Buffers (BatchNorm's running statistics, say) move by the mean change over all
    samples of the batch.

    Parameters
    ----------
    model
        its parameters must be float32 or float64 and on one device.
    optimizer
        runs on the servers.
    dataset
        map-style, with `len`; item i must be the same in every worker.
    batch_size
        samples in one update, over all workers, whatever their number.
    epochs
        how often each sample is used.
    seed
        of the order of samples and of every random number drawn in the loop.
    mode
        "exact" gives the same weights, bit for bit, at any size; "fast" does one forward and backward pass per worker.
        "async" applies a push when it comes: no worker waits for others, and nothing is exact.
    staleness
        in async mode: by how many versions a worker may be ahead of the slowest.
    shards
        logical parts of a batch, the most workers that can be used; 16 unless given.
    groups
        parameters with another optimizer.
    collate
        makes a batch of a list of items.
    threads
        torch's intra-op threads; 1 in exact mode unless given, since more can change the last bits.
    clip_norm
        largest norm of the gradient over all parameters, as for torch's clip_grad_norm_; 0 for any.
    clip_value
        largest absolute value of an element of the gradient, as for torch's clip_grad_value_; 0 for any.
    wire
        type in which gradients of float32 parameters travel: "bfloat16" and "float16" halve what workers send.
    update
        "worker": every worker runs the optimizer; servers only add up gradients, and have nothing that would move.
    durability
        "durable": every server's part is kept by another one too, so that the job survives the death of one server,
        and loses nothing. Two servers at least; they answer when both have a step. "none": the job goes back to its
        newest checkpoint, or to its beginning, when a server dies.
    on_loss
        if state is lost with a server, or with the last worker: "restore": the job goes back; "fail": it ends.
    checkpoint
        folder in which the servers keep the last two checkpoints, weights and optimizer state; all tasks must be able
        to reach it.
    checkpoint_every
        versions from one checkpoint to the next; 0 for those of an epoch.
    resume
        go on from the newest checkpoint in the folder, whatever the number of workers and servers it was made with.
    architecture
        "ps": parameters live on servers; "allreduce": every worker has all of them, and there are no servers. What
        dl2-run says, unless given. The weights have the same bits in exact mode.

    Raises
    ------
    SpecError
        a value is not usable; the message names it.

    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizer: Descent,
        dataset: Any,
        batch_size: int,
        epochs: int,
        seed: int = 0,
        mode: Literal["exact", "fast", "async"] = "exact",
        staleness: int = 0,
        shards: int | None = None,
        groups: Iterable[Group] = (),
        collate: Callable[[list[Any]], Any] = default_collate,
        threads: int | None = None,
        clip_norm: float = 0.0,
        clip_value: float = 0.0,
        wire: Literal["float32", "bfloat16", "float16"] = "float32",
        update: Literal["server", "worker"] = "server",
        durability: Literal["none", "durable"] = "none",
        on_loss: Literal["restore", "fail"] = "restore",
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 0,
        resume: bool = True,
        architecture: Literal["ps", "allreduce"] | None = None,
    ) -> None:
        self.check(
            dataset,
            mode,
            batch_size=batch_size,
            epochs=epochs,
            seed=seed,
            checkpoint_every=checkpoint_every,
            staleness=staleness,
        )
        self._collate = collate
        self._layout = ParameterLayout(model, optimizer, tuple(groups))
        super().__init__(
            self._layout,
            dataset,
            batch_size=batch_size,
            epochs=epochs,
            seed=seed,
            mode=mode,
            staleness=staleness,
            shards=shards,
            clip_norm=clip_norm,
            clip_value=clip_value,
            wire=wire,
            update=update,
            durability=durability,
            on_loss=on_loss,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            resume=resume,
            architecture=architecture,
        )
        threads = threads or (1 if mode == "exact" else None)
        if threads:
            torch.set_num_threads(threads)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of `loss`, the mean over the samples of the batch just given, and record it.

        Raises
        ------
        UsageError
            called twice for a batch, or outside the loop, or `loss` is not one number.

        """
        bundle = self._checked(loss)
        self._layout.point_gradients(bundle)
        (loss * self._samples).backward()  # type: ignore[no-untyped-call]
        self._layout.collect_gradients(bundle)
        self._record(float(loss.detach()))

    def step(self, loss: torch.Tensor) -> None:
        """Take the gradients that the loop has computed itself: in place of `optimizer.step()`.

        For loops in the style of DistributedDataParallel, which call ``loss.backward()``.  What the optimizer does is
        done when all parts of the batch are there; gradients are cleared.  The bits are those of other runs with
        `step`, whatever their size, but not those of `backward`, where the mean is made last.

        Raises
        ------
        UsageError
            called twice for a batch, or outside the loop, or `loss` is not one number, or has no gradients.

        """
        bundle = self._checked(loss)
        if not self._layout.take_gradients(bundle, self._samples):
            raise UsageError("job.step(loss) found no gradients: call loss.backward() before it")
        self._record(float(loss.detach()))

    def _checked(self, loss: torch.Tensor) -> Bundle:
        bundle = self._awaited_bundle()
        if loss.numel() != 1:
            raise UsageError(f"the loss has shape {tuple(loss.shape)}: it must be one number, the mean over the batch")
        return bundle

    def _seed(self, value: int) -> None:
        torch.manual_seed(value)

    def _fetch(self, indices: Indices) -> Any:
        if isinstance(self._dataset, torch.utils.data.TensorDataset):
            return list(self._dataset[torch.from_numpy(indices)])
        several = getattr(self._dataset, "__getitems__", None)
        places = indices.tolist()
        return self._collate(several(places) if several else [self._dataset[place] for place in places])
