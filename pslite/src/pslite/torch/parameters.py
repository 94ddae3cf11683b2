"""How the parameters and buffers of a PyTorch model lie in the flat arrays of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from pslite.errors import SpecError, UsageError
from pslite.job.job_spec import Descent, DType, Part
from pslite.job.weight_blocks import digest_of_fixed
from pslite.numeric.gradient_sums import Bundle
from pslite.numeric.sparse_rows import Rows
from pslite.worker.elastic_job_base import Kind, segments_of

_DTYPES: dict[torch.dtype, DType] = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True)
class Group:
    """Parameters with an optimizer of their own, such as biases without weight decay."""

    parameters: Sequence[torch.nn.Parameter]
    optimizer: Descent


def _check_rule(rule: object) -> None:
    """Raise SpecError for what is no description of an optimizer."""
    if isinstance(rule, get_args(Descent)):
        return
    kind = type(rule)
    meant = kind.__name__ if kind.__name__ in ("SGD", "Adam") else "SGD"
    rate = f"{rule.param_groups[0]['lr']:g}" if isinstance(rule, torch.optim.Optimizer) else "0.1"
    raise SpecError(
        f"the optimizer is a {kind.__module__}.{kind.__qualname__}: the job's servers run the optimizer and need its "
        f"description instead, such as optimizer=pslite.torch.{meant}(lr={rate}); there are SGD, Adam and LAMB"
    )


class ParameterLayout:
    """How a model's tensors lie in the flat arrays of the job."""

    def __init__(self, model: torch.nn.Module, optimizer: Descent, groups: tuple[Group, ...]) -> None:
        self._model = model
        for rule in (optimizer, *(group.optimizer for group in groups)):
            _check_rule(rule)
        chosen = {id(p): group.optimizer for group in groups for p in group.parameters}
        tables = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        }
        kinds: dict[Kind, list[tuple[str, torch.nn.Parameter]]] = {}
        for name, parameter in model.named_parameters():
            rule = chosen.pop(id(parameter), optimizer)
            if not parameter.requires_grad:
                continue
            if parameter.dtype not in _DTYPES:
                raise SpecError(f"parameter {name} has type {parameter.dtype}: only float32 and float64 can be trained")
            alone = name if id(parameter) in tables else ""
            kinds.setdefault((_DTYPES[parameter.dtype], rule, alone), []).append((name, parameter))
        if chosen:
            raise SpecError(f"{len(chosen)} parameters in groups= are not parameters of the model")
        if not kinds:
            raise SpecError("the model has no trainable parameters")
        self.fixed = digest_of_fixed(
            (name, tuple(p.shape), p.dtype, p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            for name, p in model.named_parameters()
            if not p.requires_grad
        )
        self._parameters = [[parameter for _, parameter in members] for members in kinds.values()]
        devices = {parameter.device for members in self._parameters for parameter in members}
        if len(devices) > 1:
            raise SpecError(
                f"the parameters are on several devices ({', '.join(sorted(map(str, devices)))}): move them to one"
            )
        self._device = devices.pop()
        self._buffers = [name for name, buffer in model.named_buffers() if buffer.numel()]
        parts = {
            kind: [Part(name, tuple(parameter.shape)) for name, parameter in members] for kind, members in kinds.items()
        }
        self.segments = segments_of(parts, [self._buffer_part(name) for name in self._buffers])
        #: on another device: the weights, and where backward writes
        self._values: list[torch.Tensor] = []
        self._staging: list[torch.Tensor] = []
        #: by bundle (0: on another device), the parameters' views of it
        self._placed: dict[int, list[list[torch.Tensor]]] = {}
        self._gradients: dict[int, list[list[torch.Tensor]]] = {}

    def _buffer_part(self, name: str) -> Part:
        buffer = self._model.get_buffer(name)
        if buffer.is_complex() or buffer.is_quantized:
            raise SpecError(f"buffer {name} has type {buffer.dtype}, which cannot be averaged over workers")
        return Part(name, tuple(buffer.shape))

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._device

    @property
    def _staged(self) -> bool:
        """Whether the model lives on another device, so that arrays must be copied there and back."""
        return self._device.type != "cpu"

    def adopt(self, weights: Bundle) -> None:
        """Move the parameters into the flat arrays; from here on they are views of them."""
        hosts = [torch.from_numpy(array) for array in weights.arrays[: len(self._parameters)]]
        if self._staged:
            self._values = [torch.empty_like(host, device=self._device) for host in hosts]
            self._staging = [torch.zeros_like(flat) for flat in self._values]
        for parameters, views in zip(self._parameters, self._weights_in(weights), strict=True):
            for parameter, view in zip(parameters, views, strict=True):
                view.copy_(parameter.detach())
                parameter.data = view
                parameter.grad = None
        for host, flat in zip(hosts, self._values, strict=False):
            host.copy_(flat)
        if self._buffers:
            flat_buffers = torch.from_numpy(weights.arrays[-1])
            for view, buffer in self._buffer_views(flat_buffers):
                view.copy_(buffer)

    def load(self, weights: Bundle) -> None:
        """Bring new weights and buffers into the model."""
        if self._staged:
            for flat, array in zip(self._values, weights.arrays, strict=False):
                flat.copy_(torch.from_numpy(array))
        # A session has two bundles, and fills one while the other is in use.  Modules move their parameters too, such
        # as an LSTM in flatten_parameters().
        for parameters, views in zip(self._parameters, self._weights_in(weights), strict=True):
            for parameter, view in zip(parameters, views, strict=True):
                if parameter.device != view.device or parameter.dtype != view.dtype:
                    raise UsageError(
                        f"a parameter was on {view.device} as {view.dtype} when ElasticJob was created, and is on "
                        f"{parameter.device} as {parameter.dtype} now: move and convert the model before that"
                    )
                parameter.data = view
        torch.clear_autocast_cache()  # a loop under torch.autocast as a whole would go on with casts of the old weights
        self.load_buffers(weights)

    def load_buffers(self, weights: Bundle) -> None:
        """Set the model's buffers to the version's values."""
        if not self._buffers:
            return
        with torch.no_grad():
            # one copy to the device: a network has hundreds of small buffers
            for view, buffer in self._buffer_views(torch.from_numpy(weights.arrays[-1]).to(self._device)):
                if buffer.dtype == torch.bool:
                    buffer.copy_(view > 0.5)
                else:
                    buffer.copy_(view if buffer.dtype.is_floating_point else view.round())

    def collect_buffers(self, weights: Bundle, bundle: Bundle, samples: int, *, add: bool) -> None:
        """Put the change of the buffers, times the number of samples that made it, where the gradients go."""
        if not self._buffers:
            return
        changes = self._buffer_views(torch.from_numpy(bundle.arrays[-1]))
        buffers = [buffer.detach() for _, buffer in changes]
        # one copy from the device
        after = torch.cat([buffer.reshape(-1).to(self._device, torch.float64) for buffer in buffers]).cpu()
        before = torch.from_numpy(weights.arrays[-1])
        for (change, buffer), old, now in zip(changes, _views(before, buffers), _views(after, buffers), strict=True):
            # what the forward pass started from is the value rounded to the buffer's own type
            if buffer.dtype == torch.bool:
                start = (old > 0.5).double()
            elif buffer.dtype.is_floating_point:
                start = old.to(buffer.dtype).double()
            else:
                start = old.round()
            # an unchanged infinity (a mask, say) has not changed; inf - inf would not say so
            moved = torch.where(now == start, 0.0, now - start).mul_(samples)
            if add:
                change.add_(moved)
            else:
                change.copy_(moved)

    def _buffer_views(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # looked up by name each time: modules may put a new tensor in a buffer's place
        buffers = [self._model.get_buffer(name) for name in self._buffers]
        return list(zip(_views(flat, buffers), buffers, strict=True))

    def point_gradients(self, bundle: Bundle, *, add: bool) -> None:
        """Let backward write into the bundle; where its gradients are added to others, into tensors of their own."""
        for segment, flat in zip(self.segments, self._staging, strict=False):
            if not segment.sparse:
                flat.zero_()
        for segment, parameters, grads in zip(self.segments, self._parameters, self._grads_in(bundle), strict=False):
            alone = segment.sparse or (add and not self._staged)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = None if alone else grad

    def _weights_in(self, weights: Bundle) -> list[list[torch.Tensor]]:
        """Return the parameters' views of the arrays in which they lie: the bundle's, or the device's."""
        return self._views_of(self._placed, weights, self._values)

    def _grads_in(self, bundle: Bundle) -> list[list[torch.Tensor]]:
        """Return the parameters' views of the arrays into which backward writes: the bundle's, or the device's."""
        return self._views_of(self._gradients, bundle, self._staging)

    def _views_of(
        self, known: dict[int, list[list[torch.Tensor]]], bundle: Bundle, on_device: list[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        key = 0 if self._staged else id(bundle)
        if key not in known:
            flats = on_device if self._staged else [torch.from_numpy(array) for array in bundle.arrays]
            known[key] = [_views(flat, parameters) for flat, parameters in zip(flats, self._parameters, strict=False)]
        return known[key]

    def take_gradients(self, bundle: Bundle, samples: int, *, add: bool) -> bool:
        """Bring mean gradients that the parameters have into the bundle, as sums; returns whether there are any."""
        found = [[parameter.grad for parameter in parameters] for parameters in self._parameters]
        self.point_gradients(bundle, add=add)
        for parameters, gradients in zip(self._parameters, found, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = gradient * samples
                else:
                    parameter.grad.copy_(gradient).mul_(samples)
        self.collect_gradients(bundle, add=add)
        for parameters in self._parameters:
            for parameter in parameters:
                parameter.grad = None
        return any(gradient is not None for gradients in found for gradient in gradients)

    def collect_gradients(self, bundle: Bundle, *, add: bool) -> None:
        """Bring into the bundle what backward has not written there: rows of tables, and all that is added."""
        for segment, flat, array in zip(self.segments, self._staging, bundle.arrays, strict=False):
            if not segment.sparse:
                host = torch.from_numpy(array)
                host.copy_(flat.add_(host.to(self._device)) if add else flat)
        if add and not self._staged:
            for segment, parameters, places in zip(
                self.segments, self._parameters, self._grads_in(bundle), strict=False
            ):
                for parameter, place in zip(parameters, places, strict=True):
                    if not segment.sparse and parameter.grad is not None:
                        place.add_(parameter.grad)
                        parameter.grad = None
        for index, before in bundle.rows.items():
            (parameter,) = self._parameters[index]
            if parameter.grad is not None:
                numbers, values = _touched(parameter.grad)
                rows = Rows.of(numbers.cpu().numpy(), values.cpu().numpy().reshape(numbers.numel(), -1))
                bundle.rows[index] = before.plus(rows) if add else rows
            parameter.grad = None


def _touched(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a table that a gradient touches: their numbers and their values."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values()
    # the table is used in another way too, such as for the output
    numbers = gradient.flatten(1).ne(0).any(1).nonzero()[:, 0]
    return numbers, gradient[numbers]


def _views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive pieces of a flat tensor in the shapes of the given ones."""
    found, offset = [], 0
    for tensor in like:
        found.append(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
    return found
