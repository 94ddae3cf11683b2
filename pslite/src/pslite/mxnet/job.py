"""Gluon's adapter: an ordinary training loop becomes an elastic job that gives out the data; see `pslite.mxnet`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.gluon.data.dataloader import default_batchify_fn
from numpy.typing import NDArray

from pslite.errors import SpecError, UsageError
from pslite.job.spec import Descent, Mean, Part, Segment
from pslite.mxnet.arrays import reading, trainable, write
from pslite.mxnet.sparse import STYPE, rows_of
from pslite.numeric.gradients import Bundle
from pslite.worker.training_loop import Indices, LoopJob

Array = NDArray[Any]


class ElasticJob(LoopJob):
    """An elastic training job, seen from the user's Gluon script; iterate over it once.

    BatchNorm's running statistics move by the mean change over all samples of the batch.

    Parameters
    ----------
    net
        a Gluon block whose parameters are initialised, with known shapes, float32 or float64, on one device.
    optimizer
        runs on the servers.
    dataset
        with `len` and an index, such as gluon.data.ArrayDataset; item i must be the same in every worker.
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
    optimizers
        by the names of parameters (those of `collect_params`), optimizers of their own.
    collate
        makes a batch of a list of items; Gluon's default_batchify_fn unless given.
    threads
        threads of MXNet's operators; 1 in exact mode unless given, since more can change the last bits.
    clip_norm
        largest norm of the gradient over all parameters; 0 for any.
    clip_value
        largest absolute value of an element of the gradient; 0 for any.
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
        folder in which the servers keep the last two checkpoints; all tasks must be able to reach it.
    checkpoint_every
        versions from one checkpoint to the next; 0 for those of an epoch.
    resume
        go on from the newest checkpoint in the folder, whatever the number of workers and servers it was made with.

    Raises
    ------
    SpecError
        a value is not usable; the message names it.

    """

    def __init__(
        self,
        net: Any,
        *,
        optimizer: Descent,
        dataset: Any,
        batch_size: int,
        epochs: int,
        seed: int = 0,
        mode: Literal["exact", "fast", "async"] = "exact",
        staleness: int = 0,
        shards: int | None = None,
        optimizers: Mapping[str, Descent] | None = None,
        collate: Callable[[list[Any]], Any] = default_batchify_fn,
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
        self._layout = _Layout(net, optimizer, optimizers or {})
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
        )
        threads = threads or (1 if mode == "exact" else None)
        if threads:
            check_call(_LIB.MXSetNumOMPThreads(threads))

    def backward(self, loss: Any) -> None:
        """Compute the gradients of a loss recorded by autograd, for the batch just given, and record them.

        Parameters
        ----------
        loss
            one number for each sample, as Gluon's losses give it, or one number, the mean over the samples.

        Raises
        ------
        UsageError
            called twice for a batch, or outside the loop, or `loss` has another shape.

        """
        bundle = self._awaited_bundle()
        if loss.size not in (1, self._samples):
            raise UsageError(
                f"the loss has shape {loss.shape}: it must be one number for each of the {self._samples} samples, or "
                "their mean"
            )
        weight = self._samples / loss.size
        loss.backward(mx.nd.full(loss.shape, weight, ctx=loss.context, dtype=loss.dtype))
        self._layout.collect_gradients(bundle)
        self._record(float(np.mean(reading(loss))))

    def _seed(self, value: int) -> None:
        mx.random.seed(value & 0x7FFFFFFF)

    def _fetch(self, indices: Indices) -> Any:
        return self._collate([self._dataset[place] for place in indices.tolist()])


class _Layout:
    """How a net's parameters lie in the flat arrays of the job."""

    def __init__(self, net: Any, optimizer: Descent, optimizers: Mapping[str, Descent]) -> None:
        own = dict(optimizers)
        kinds: dict[tuple[Literal["float32", "float64"], Descent, str], list[Any]] = {}
        self._buffers: list[Any] = []
        frozen = hashlib.sha256()
        any_frozen = False
        for name, parameter in net.collect_params().items():
            rule = own.pop(name, optimizer)
            value = _value(name, parameter)
            kind = trainable(f"parameter {name}", value)
            if parameter.grad_req == "write":
                alone = name if parameter.list_grad()[0].stype == STYPE else ""
                kinds.setdefault((kind, rule, alone), []).append(parameter)
            elif parameter.grad_req != "null":
                raise SpecError(f"parameter {name} has grad_req={parameter.grad_req!r}: it must be 'write' or 'null'")
            elif parameter._differentiable:  # noqa: SLF001  (nothing else tells a frozen weight from a running mean)
                any_frozen = True
                frozen.update(f"{name} {value.shape} {kind}\n".encode())
                frozen.update(reading(value).data)
            else:
                self._buffers.append(parameter)
        if own:
            raise SpecError(f"optimizers names {', '.join(own)}, which the net does not have")
        if not kinds:
            raise SpecError("the net has no trainable parameters")
        self.fixed = frozen.hexdigest() if any_frozen else ""
        self._parameters = list(kinds.values())
        segments = [
            Segment(
                dtype=kind, optimizer=rule, parts=tuple(_part(parameter) for parameter in members), sparse=bool(table)
            )
            for (kind, rule, table), members in kinds.items()
        ]
        if self._buffers:
            parts = tuple(_part(parameter) for parameter in self._buffers)
            segments.append(Segment(dtype="float64", optimizer=Mean(), parts=parts))
        self.segments = tuple(segments)

    def adopt(self, weights: Bundle) -> None:
        """Put the net's values into the flat arrays."""
        for parameter, flat in [*self._trained(weights), *self._buffered(weights)]:
            np.copyto(flat, reading(parameter.list_data()[0]))

    def load(self, weights: Bundle) -> None:
        """Bring new weights and buffers into the net."""
        mx.nd.waitall()
        for parameter, flat in self._trained(weights):
            write(parameter.list_data()[0], flat)
        self.load_buffers(weights)

    def load_buffers(self, weights: Bundle) -> None:
        """Set the net's buffers to the version's values."""
        mx.nd.waitall()
        for parameter, flat in self._buffered(weights):
            write(parameter.list_data()[0], flat.astype(parameter.dtype))

    def collect_gradients(self, bundle: Bundle) -> None:
        """Copy the gradients to where they are sent from."""
        for index, (parameters, array) in enumerate(zip(self._parameters, bundle.arrays, strict=False)):
            if index in bundle.rows:
                bundle.rows[index] = rows_of(parameters[0].list_grad())
                continue
            for parameter, flat in _pieces(parameters, array):
                np.copyto(flat, reading(parameter.list_grad()[0]))

    def collect_buffers(self, weights: Bundle, bundle: Bundle, samples: int) -> None:
        """Put the change of the buffers, times the number of samples that made it, where the gradients go."""
        for (parameter, change), (_, before) in zip(self._buffered(bundle), self._buffered(weights), strict=True):
            now = reading(parameter.list_data()[0])
            # what the forward pass started from is the value rounded to the buffer's own type
            np.subtract(now, before.astype(now.dtype), out=change, dtype=np.float64)
            np.multiply(change, samples, out=change)

    def _trained(self, bundle: Bundle) -> Iterator[tuple[Any, Array]]:
        for parameters, array in zip(self._parameters, bundle.arrays, strict=False):
            yield from _pieces(parameters, array)

    def _buffered(self, bundle: Bundle) -> Iterator[tuple[Any, Array]]:
        if self._buffers:
            yield from _pieces(self._buffers, bundle.arrays[-1])


def _value(name: str, parameter: Any) -> Any:
    """Return a parameter's array."""
    try:
        values = parameter.list_data()
    except mx.gluon.parameter.DeferredInitializationError:
        raise SpecError(
            f"parameter {name} has no shape yet: run a batch through the net, or give layers in_units or in_channels"
        ) from None
    except RuntimeError:
        raise SpecError(f"parameter {name} has no value: call net.initialize() before") from None
    if len(values) > 1:
        raise SpecError(f"parameter {name} is on {len(values)} devices: use one, and more workers")
    return values[0]


def _part(parameter: Any) -> Part:
    return Part(parameter.name, tuple(parameter.shape))


def _pieces(parameters: Sequence[Any], flat: Array) -> Iterator[tuple[Any, Array]]:
    """Give each parameter with its consecutive piece of a flat array."""
    offset = 0
    for parameter in parameters:
        size = int(np.prod(parameter.shape))
        yield parameter, flat[offset : offset + size]
        offset += size
