"""Gluon's adapter: an ordinary training loop becomes an elastic job that gives out the data; see `pslite.mxnet`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.gluon.data.dataloader import default_batchify_fn
from numpy.typing import NDArray

from pslite.errors import SpecError, UsageError
from pslite.job.job_spec import Descent, Part
from pslite.job.weight_blocks import digest_of_fixed
from pslite.mxnet.arrays import STYPE, reading, rows_of, trainable, write
from pslite.numeric.gradient_sums import Bundle
from pslite.worker.elastic_job_base import Indices, Kind, LoopJob, LoopSettings, segments_of

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
    optimizers
        by the names of parameters (those of `collect_params`), optimizers of their own.
    collate
        makes a batch of a list of items; Gluon's default_batchify_fn unless given.
    threads
        threads of MXNet's operators; 1 in exact mode unless given, since more can change the last bits.
    batch_size, epochs, settings
        as for `pslite.worker.elastic_job_base.LoopJob`: mode, seed, clipping, durability, checkpoints and others.

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
        optimizers: Mapping[str, Descent] | None = None,
        collate: Callable[[list[Any]], Any] = default_batchify_fn,
        threads: int | None = None,
        **settings: Unpack[LoopSettings],
    ) -> None:
        self.check(dataset, batch_size, epochs, settings)
        self._collate = collate
        self._layout = _Layout(net, optimizer, optimizers or {})
        super().__init__(
            self._layout,
            dataset,
            batch_size=batch_size,
            epochs=epochs,
            **settings,
        )
        threads = threads or (1 if self.spec.mode == "exact" else None)
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
        self._layout.collect_gradients(bundle, add=self._add)
        self._record(float(np.mean(reading(loss))))

    def _seed(self, value: int) -> None:
        mx.random.seed(value & 0x7FFFFFFF)

    def _fetch(self, indices: Indices) -> Any:
        return self._collate([self._dataset[place] for place in indices.tolist()])


class _Layout:
    """How a net's parameters lie in the flat arrays of the job."""

    def __init__(self, net: Any, optimizer: Descent, optimizers: Mapping[str, Descent]) -> None:
        own = dict(optimizers)
        kinds: dict[Kind, list[Any]] = {}
        self._buffers: list[Any] = []
        frozen: list[tuple[str, tuple[int, ...], str, memoryview]] = []
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
                frozen.append((name, value.shape, kind, reading(value).data))
            else:
                self._buffers.append(parameter)
        if own:
            raise SpecError(f"optimizers has entries for {', '.join(own)}, which are not parameters of the net")
        if not kinds:
            raise SpecError("the net has no trainable parameters")
        self.fixed = digest_of_fixed(frozen)
        self._parameters = list(kinds.values())
        parts = {kind: list(map(_part, members)) for kind, members in kinds.items()}
        self.segments = segments_of(parts, list(map(_part, self._buffers)))

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

    def collect_gradients(self, bundle: Bundle, *, add: bool) -> None:
        """Copy the gradients to where they are sent from, or with `add` add them to what is there."""
        for index, (parameters, array) in enumerate(zip(self._parameters, bundle.arrays, strict=False)):
            if index in bundle.rows:
                rows = rows_of(parameters[0].list_grad())
                bundle.rows[index] = bundle.rows[index].plus(rows) if add else rows
                continue
            for parameter, flat in _pieces(parameters, array):
                gradient = reading(parameter.list_grad()[0])
                if add:
                    np.add(flat, gradient, out=flat)
                else:
                    np.copyto(flat, gradient)

    def collect_buffers(self, weights: Bundle, bundle: Bundle, samples: int, *, add: bool) -> None:
        """Put the change of the buffers, times the number of samples that made it, where the gradients go."""
        for (parameter, change), (_, before) in zip(self._buffered(bundle), self._buffered(weights), strict=True):
            now = reading(parameter.list_data()[0])
            # what the forward pass started from is the value rounded to the buffer's own type
            moved = np.subtract(now, before.astype(now.dtype), dtype=np.float64)
            np.multiply(moved, samples, out=moved)
            if add:
                np.add(change, moved, out=change)
            else:
                np.copyto(change, moved)

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
        raise SpecError(f"parameter {name} has no value: call net.initialize() before creating the job") from None
    if len(values) > 1:
        raise SpecError(f"parameter {name} is on {len(values)} devices: a worker uses one; start more workers instead")
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
