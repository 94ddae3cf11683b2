"""The elastic training job of a PyTorch script."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, Unpack

import torch
from torch.utils.data import default_collate

from pslite.errors import UsageError
from pslite.job.job_spec import Descent
from pslite.numeric.gradient_sums import Bundle
from pslite.torch.parameters import Group, ParameterLayout
from pslite.worker.elastic_job_base import Indices, LoopJob, LoopSettings

#: parameters of glibc's mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30


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
    groups
        parameters with another optimizer.
    collate
        makes a batch of a list of items.
    threads
        torch's intra-op threads; 1 in exact mode unless given, since more can change the last bits.
    batch_size, epochs, settings
        as for `pslite.worker.elastic_job_base.LoopJob`: mode, seed, clipping, durability, checkpoints and others.

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
        groups: Iterable[Group] = (),
        collate: Callable[[list[Any]], Any] = default_collate,
        threads: int | None = None,
        architecture: Literal["ps", "allreduce"] | None = None,
        **settings: Unpack[LoopSettings],
    ) -> None:
        self.check(dataset, batch_size, epochs, settings)
        self._collate = collate
        self._layout = ParameterLayout(model, optimizer, tuple(groups))
        super().__init__(
            self._layout,
            dataset,
            batch_size=batch_size,
            epochs=epochs,
            architecture=architecture,
            **settings,
        )
        if self.spec.mode == "exact":
            threads = threads or 1
            _keep_freed_memory()
            if self._layout.device.type == "cuda":
                _choose_repeatable_kernels()
        if threads:
            torch.set_num_threads(threads)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of `loss`, the mean over the samples of the batch just given, and record it.

        Raises `UsageError` if called twice for a batch, or outside the loop, or `loss` is not one number.
        """
        bundle = self._checked(loss)
        self._layout.point_gradients(bundle, add=self._add)
        (loss * self._samples).backward()  # type: ignore[no-untyped-call]
        self._layout.collect_gradients(bundle, add=self._add)
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
        if not self._layout.take_gradients(bundle, self._samples, add=self._add):
            raise UsageError("job.step(loss) found no gradients: call loss.backward() before it")
        self._record(float(loss.detach()))

    def _checked(self, loss: torch.Tensor) -> Bundle:
        bundle = self._awaited_bundle()
        if loss.numel() != 1:
            raise UsageError(f"the loss has shape {tuple(loss.shape)}: it must be one number, the mean over the batch")
        return bundle

    def _seed(self, value: int) -> None:
        # torch.manual_seed formats stack traces where there is no accelerator, which takes 0.1 ms or more
        if torch.accelerator.is_available():
            torch.manual_seed(value)
        else:
            torch.default_generator.manual_seed(value)

    def _fetch(self, indices: Indices) -> Any:
        if isinstance(self._dataset, torch.utils.data.TensorDataset):
            return list(self._dataset[torch.from_numpy(indices)])
        several = getattr(self._dataset, "__getitems__", None)
        places = indices.tolist()
        return self._collate(several(places) if several else [self._dataset[place] for place in places])


def _choose_repeatable_kernels() -> None:
    """Have torch choose GPU kernels that give the same bits each time, and warn where there is none.

    If the script has called `torch.use_deterministic_algorithms(True)`, that stays: errors instead of warnings.
    """
    # without a fixed workspace torch says that matrix products may not repeat
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory of up to 1 GiB, unless it is another C library.

    A step of many passes allocates the same tensors each time. By default tensors of more than 32 MiB go back to the
    kernel when they are freed, and the next ones are cleared page by page: a fifth of the time of a pass of two samples
    through a model of 80 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
