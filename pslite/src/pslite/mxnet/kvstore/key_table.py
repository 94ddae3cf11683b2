"""Table of a KVStore's keys: their values, their places in the job's arrays, and the job's description that follows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pslite.errors import UsageError
from pslite.job.job_spec import MAX_SHARDS, DType, JobSpec, Mean, Optimizer, Part, Segment, Sum, block_bytes_for
from pslite.job.weight_blocks import digest_of_fixed
from pslite.mxnet.arrays import dense, is_sparse, lazy, near, reading, table_part, trainable
from pslite.mxnet.optimizer_translation import rule_of
from pslite.numeric.gradient_sums import Bundle

Array = NDArray[Any]
Key = int | str

#: elements from which on a key is not packed together with others, so that it need not be copied
_LARGE = 1 << 16


@dataclass(eq=False)
class KeyTensor:
    """One key: its initial value, and its place in the job's arrays."""

    key: Key
    #: the initial value: a copy, or the script's own array of the weights; None once the job has it
    value: Any
    shape: tuple[int, ...]
    #: number of elements
    size: int
    dtype: DType
    #: whether it has a gradient that is MXNet's own (Gluon); in Module none has
    marked: bool
    segment: int = -1
    offset: int = 0
    #: it is a segment of its own
    alone: bool = False
    #: its gradients are row_sparse
    sparse: bool = False
    #: it is a segment of which only rows travel
    by_rows: bool = False
    #: the script's array in which its weights lie, if they arrive there; the script may have changed them since
    home: Any = None
    #: arrays that can be pushed
    checked: list[Any] = field(default_factory=list)
    #: it was given its value after the first step
    late: bool = False
    #: number of its group in `KeyTable.groups`; -1 for none yet
    group: int = 0

    def of(self, bundle: Bundle) -> Array:
        """Return its part of a bundle, shape (size,)."""
        return bundle.arrays[self.segment][self.offset : self.offset + self.size]


#: keys, each with the script's arrays of its weights
Places = list[tuple[KeyTensor, list[Any]]]


class KeyTable:
    """All keys of a KVStore: pushed in each step, changed by the workers' own passes, or frozen."""

    def __init__(self) -> None:
        self._tensors: dict[Key, KeyTensor] = {}
        self._frozen: set[Key] = set()
        #: keys that are pushed in the same steps: those of the first step, then those that came late, as they came
        self.groups: list[list[KeyTensor]] = [[]]
        #: keys that came late and have no place in the job's arrays
        self.unplaced: list[KeyTensor] = []
        #: keys that are never pushed, but change as the worker computes (BatchNorm's running statistics), and where
        self.running: Places = []

    def __contains__(self, key: Key) -> bool:
        return key in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, key: Key) -> KeyTensor:
        """Return a key's tensor.  Raises UsageError if it has none."""
        found = self._tensors.get(key)
        if found is None:
            raise UsageError(f"key {key!r} has no value: call init or broadcast first")
        return found

    def all(self) -> Iterable[KeyTensor]:
        """Give all tensors."""
        return self._tensors.values()

    @property
    def trained(self) -> list[KeyTensor]:
        """Keys that the first step has pushed; none as long as they are not chosen."""
        return self.groups[0]

    def pushed(self) -> list[KeyTensor]:
        """Return the keys of all groups."""
        return [tensor for group in self.groups for tensor in group]

    def groups_in(self, segments: Collection[int]) -> set[int]:
        """Return the groups that have keys in some segments."""
        return {n for n, group in enumerate(self.groups) if any(tensor.segment in segments for tensor in group)}

    def moving(self) -> list[KeyTensor]:
        """Return the tensors that have a place in the job's arrays."""
        return [tensor for tensor in self._tensors.values() if tensor.segment >= 0]

    def freeze(self, keys: Iterable[Key]) -> None:
        """Say that some keys are never pushed."""
        self._frozen |= set(keys)

    def add(self, key: Key, value: Any, outs: Sequence[Any] = ()) -> None:
        """Give a key its initial value; in `outs` are the script's arrays of its weights, if they are known.

        Which keys are trained is to be chosen anew.

        A large value is not copied, but written to one of those: it is the initial value when the job begins.
        """
        home = next((out for out in outs if _can_be_home(out, value)), None)
        if home is None:
            (whole,) = dense([value.copy()])
        elif home is value:
            whole = value
        else:
            whole = value.copyto(home)
        self._add(key, value, whole).home = home
        self.groups[0] = []

    def add_late(self, key: Key, value: Any) -> None:
        """Give a key its initial value after the first step; `extend` and `place` have it take part."""
        (whole,) = dense([value.copy()])
        tensor = self._add(key, value, whole)
        tensor.late, tensor.group = True, -1
        self.unplaced.append(tensor)

    def _add(self, key: Key, value: Any, whole: Any) -> KeyTensor:
        kind = trainable(f"key {key!r}", whole)
        tensor = KeyTensor(
            key, whole, whole.shape, int(whole.size), kind, marked=value.grad is not None, sparse=is_sparse(value)
        )
        self._tensors[key] = tensor
        return tensor

    def place(self, spec: JobSpec) -> list[KeyTensor]:
        """Give keys that came late their places in the job's description; return those that have none there.

        Raises
        ------
        UsageError
            one is another tensor there.

        """
        places: dict[str, tuple[int, int, Segment, Part]] = {}
        for number, segment in enumerate(spec.segments):
            offset = 0
            for part in segment.parts if segment.late else ():
                places[part.name] = number, offset, segment, part
                offset += part.size
        for tensor in [tensor for tensor in self.unplaced if str(tensor.key) in places]:
            number, offset, segment, part = places[str(tensor.key)]
            tensor.by_rows = segment.sparse
            if part != _part(tensor) or segment.dtype != tensor.dtype:
                raise UsageError(
                    f"key {tensor.key!r} is given a {tensor.dtype} array of shape {tensor.shape} here, but a "
                    f"{segment.dtype} array of shape {part.shape} by the first worker: give it the same in all workers"
                )
            tensor.segment, tensor.offset = number, offset
            tensor.alone = len(segment.parts) == 1 and part.size >= _LARGE and not segment.sparse
            self.unplaced.remove(tensor)
        return list(self.unplaced)

    def extend(
        self, spec: JobSpec, tensors: Iterable[KeyTensor], optimizer: Any, updates: int
    ) -> tuple[JobSpec, dict[int, Array]]:
        """Return the job's description with further keys, and their values by the number of the added segment.

        `updates` are those of other keys so far.
        """
        candidates = self._candidates()
        kinds: dict[_Kind, list[KeyTensor]] = {}
        for tensor in tensors:
            kind = self._kind(tensor, optimizer)
            # one that is never pushed is not among those that are
            kinds.setdefault(kind if tensor in candidates else (*kind[:2], tensor.key), []).append(tensor)
        added = [_segment(*kind[:2], members) for kind, members in kinds.items()]
        # they may be much larger than the first keys
        block_bytes = max(spec.block_bytes, block_bytes_for(sum(segment.nbytes for segment in added)))
        added = [
            msgspec.structs.replace(segment, late=True, since=updates, block_bytes=block_bytes) for segment in added
        ]
        values = [
            np.concatenate([reading(tensor.value).reshape(-1) for tensor in members]) for members in kinds.values()
        ]
        number = len(spec.segments)
        return msgspec.structs.replace(spec, segments=(*spec.segments, *added)), dict(enumerate(values, number))

    def _candidates(self) -> list[KeyTensor]:
        """Return the keys that came late and are to be pushed, and are in no group."""
        left = [tensor for tensor in self._tensors.values() if tensor.group < 0 and tensor.key not in self._frozen]
        marked = any(tensor.marked for tensor in left)
        return [tensor for tensor in left if tensor.marked or not marked]

    def begin_group(self, pushed: KeyTensor) -> None:
        """Have a key that came late, and others that came since the last group began, be pushed in the same steps.

        Raises
        ------
        UsageError
            it is frozen.

        """
        if pushed.key in self._frozen:
            raise UsageError(f"key {pushed.key!r} is pushed, but kvstore.freeze(...) was told that it never is")
        candidates = self._candidates()
        if pushed not in candidates:
            candidates = [pushed]
        for tensor in candidates:
            tensor.group = len(self.groups)
        self.groups.append(candidates)

    def choose_trained(self, optimizer: Any, asked: Places, pushed: Collection[Key] = ()) -> None:
        """Say which keys are pushed in each step: those with gradients, or all that are not known to be frozen.

        Keys that were `pushed` already are so in any case.  Of the others, those whose values are `asked` for and that
        the workers' own passes change are averaged.
        """
        tensors = [tensor for tensor in self._tensors.values() if tensor.key not in self._frozen]
        marked = any(tensor.marked for tensor in tensors)
        self.groups[0] = [tensor for tensor in tensors if not marked or tensor.marked or tensor.key in pushed]
        trained = {tensor.key for tensor in self.trained}
        held = {tensor.key: arrays for tensor, arrays in asked}
        parameters = {} if optimizer is None else optimizer.param_dict
        self.running = [
            (tensor, held[tensor.key])
            for tensor in tensors
            if tensor.key not in trained and tensor.key in held and _changes(parameters, tensor.key)
        ]

    def describe(
        self,
        optimizer: Any,
        *,
        workers: int,
        staleness: int,
        durability: Literal["none", "durable"],
        epochs_before: int = 0,
        versions_before: int = 0,
    ) -> JobSpec:
        """Return the job that trains these keys, and give each its place in the job's arrays."""
        if staleness and optimizer is None:
            raise UsageError(
                "in asynchronous training the servers update the weights: call set_optimizer before the first push"
            )
        segments = []
        for number, ((dtype, rule, _), members) in enumerate(self._kinds(optimizer).items()):
            offset = 0
            for tensor in members:
                tensor.segment, tensor.offset = number, offset
                offset += tensor.size
            segments.append(_segment(dtype, rule, members))
        return JobSpec(
            segments=tuple(segments),
            samples=1,
            batch=1,
            epochs=0,
            seed=0,
            mode="open",
            staleness=staleness,
            durability=durability,
            shards=MAX_SHARDS,
            block_bytes=block_bytes_for(sum(segment.nbytes for segment in segments)),
            fixed=self._digest_of_fixed(),
            clip_value=0.0 if optimizer is None else float(optimizer.clip_gradient or 0.0),
            scale=1.0 if optimizer is None else float(optimizer.rescale_grad) * workers,
            epochs_before=epochs_before,
            versions_before=versions_before,
        )

    def _kinds(self, optimizer: Any) -> dict[_Kind, list[KeyTensor]]:
        """Return the tensors of each segment."""
        kinds: dict[_Kind, list[KeyTensor]] = {}
        for tensor in self.trained:
            kinds.setdefault(self._kind(tensor, optimizer), []).append(tensor)
        for tensor, _ in self.running:
            kinds.setdefault((tensor.dtype, Mean(), None), []).append(tensor)
        return kinds

    @staticmethod
    def _kind(tensor: KeyTensor, optimizer: Any) -> _Kind:
        if tensor.sparse and optimizer is None:
            raise UsageError(
                f"key {tensor.key!r} is row_sparse, so the servers update it: call set_optimizer before the first push"
            )
        rule: Optimizer = Sum() if optimizer is None else rule_of(optimizer, tensor.key)
        tensor.by_rows = tensor.sparse and lazy(optimizer)
        tensor.alone = tensor.size >= _LARGE and not tensor.by_rows
        return tensor.dtype, rule, tensor.key if tensor.alone or tensor.by_rows else None

    def _digest_of_fixed(self) -> str:
        """Return the digest of the values that are not trained, "" if all are."""
        return digest_of_fixed(
            (tensor.key, tensor.shape, tensor.dtype, reading(tensor.value).data)
            for tensor in self._tensors.values()
            if tensor.segment < 0
        )


#: what tensors of one segment have in common: type, update rule, and the key of one that is alone in its segment
_Kind = tuple[DType, Optimizer, Key | None]


def _part(tensor: KeyTensor) -> Part:
    name, shape = str(tensor.key), tensor.shape
    return table_part(name, shape) if tensor.by_rows else Part(name, shape or (1,))


def _segment(dtype: DType, rule: Optimizer, members: Sequence[KeyTensor]) -> Segment:
    by_rows = members[0].by_rows
    parts = tuple(map(_part, members))
    return Segment(dtype=dtype, optimizer=rule, parts=parts, sparse=by_rows, lazy=by_rows)


def _can_be_home(array: Any, value: Any) -> bool:
    """Whether weights can lie in an array of the script: a large dense one like the value, in the CPU's memory."""
    if {array.stype, value.stype} != {"default"} or is_sparse(value) or array.size < _LARGE:
        return False
    return bool(near(array) and array.shape == value.shape and array.dtype == value.dtype)


def _changes(parameters: Any, key: Key) -> bool:
    """Whether a key without a gradient is one that the worker's own passes change."""
    return key not in parameters or not parameters[key]._differentiable  # noqa: SLF001  (nothing else tells)


def pairs(keys: Any, values: Any) -> list[tuple[Key, list[Any]]]:
    """Return (key, arrays) for a key or several, with one array or several each."""
    if isinstance(keys, (list, tuple)):
        if len(keys) != len(values):
            raise UsageError(
                f"{len(keys)} keys and {len(values)} values are given: there must be one value for each key"
            )
        return [(key, listed(value)) for key, value in zip(keys, values, strict=True)]
    return [(keys, listed(values))]


def listed(value: Any) -> list[Any]:
    """Return a list of what may be one thing or several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]
