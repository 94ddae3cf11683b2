"""The KVStore: scripts with a loop of their own, written for `dist_sync`, become workers of an elastic job.

A step is one push of every trained key by every worker.  MXNet asks for it key after key and reads nothing in between,
so the exchange takes place with the last key, all at once, and what was to be pulled is written then.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.kvstore import KVStore, KVStoreBase
from numpy.typing import NDArray

from pslite.errors import CheckpointError, UsageError
from pslite.job.blocks import Block
from pslite.job.spec import MAX_SHARDS, JobSpec, Mean, Optimizer, Part, Segment, Sum, block_bytes_for
from pslite.mxnet.arrays import gather, memory, near, reading, trainable, write
from pslite.mxnet.rules import rule_of
from pslite.mxnet.sparse import STYPE, dense, is_sparse, lazy, numbers_of, put, rows_of, same_dense, table_part
from pslite.numeric.gradients import Bundle, Contribution, GradientSums
from pslite.numeric.optimizers import slots
from pslite.worker.connect import open_session
from pslite.worker.session import Given, OpenSession

Array = NDArray[Any]
Key = int | str

_STATES = "pslite optimizer states 1"
#: elements from which on a key is not packed together with others, so that it need not be copied
_LARGE = 1 << 16


@dataclass(eq=False)
class _Tensor:
    """One key: its initial value, and its place in the job's arrays."""

    key: Key
    value: Any
    dtype: Literal["float32", "float64"]
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
    #: the script's array in which its weights arrive, if they do
    home: Any = None
    #: arrays that can be pushed
    checked: list[Any] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.value.size)

    def of(self, bundle: Bundle) -> Array:
        """Return its part of a bundle, shape (size,)."""
        return bundle.arrays[self.segment][self.offset : self.offset + self.size]


class _Step:
    """One exchange: gradients on their way to the servers, and weights from there to where they were asked for.

    Each segment is copied just before it is sent, and as soon as it has come back, so that servers need not wait for
    all.  Large keys are not copied at all where nobody looks into our memory: they are sent from the script's arrays,
    and arrive in them.
    """

    def __init__(
        self,
        tensors: Iterable[_Tensor],
        pushed: dict[Key, list[Any]],
        running: list[tuple[_Tensor, list[Any]]],
        outs: list[tuple[_Tensor, list[Any]]],
        session: OpenSession,
    ) -> None:
        self._session = session
        self._pushed = pushed
        self._running = {tensor.key: arrays for tensor, arrays in running}
        self._outs: dict[Key, list[Any]] = {}
        for tensor, arrays in [*outs, *running]:
            self._outs.setdefault(tensor.key, []).extend(arrays)
        self._members: list[list[_Tensor]] = [[] for _ in session.spec.segments]
        for tensor in tensors:
            if tensor.segment >= 0:
                self._members[tensor.segment].append(tensor)
        self._missing = Counter(block.segment for block in session.blocks)
        self._coming = session.coming
        self._lent = session.lent
        self._filled: set[int] = set()
        self._bundle: Bundle

    def prepare(self, bundle: Bundle) -> None:
        """Have gradients go into a bundle, and weights come out of the session's."""
        # nothing of MXNet's is under way from here on: to ask for each array costs 0.08 ms
        mx.nd.waitall()
        self._bundle = bundle
        bundle.fill = self._fill
        if self._coming is None:
            return
        self._coming.take = self._take
        for members in self._members:
            tensor = members[0]
            if tensor.alone:
                tensor.home = None if self._lent else self._home(tensor)
                place = None if tensor.home is None else memory(tensor.home, tensor.of(self._coming))
                self._coming.point(tensor.segment, place)

    def _home(self, tensor: _Tensor) -> Any:
        """Return the script's array in which weights can arrive, if there is one; not in a gradient that is sent."""
        pushed = self._pushed[tensor.key]
        asked = self._outs.get(tensor.key, ())
        return next((a for a in asked if near(a) and not any(a is one for one in pushed)), None)

    def finish(self) -> None:
        """Write what was not written as it came."""
        if self._coming is not None:
            self._coming.take = None
        for segment, missing in self._missing.items():
            if missing:
                self._write(segment, self._session.weights)

    def _fill(self, segment: int) -> None:
        if segment in self._filled:
            return  # it is sent a second time, to a server that has taken the place of another
        self._filled.add(segment)
        for tensor in self._members[segment]:
            pushed = self._pushed.get(tensor.key)
            into = tensor.of(self._bundle)
            if pushed is None:
                arrays = self._running[tensor.key]
                gather(arrays, into)
                np.divide(into, len(arrays), out=into)
                np.subtract(into, tensor.of(self._session.weights), out=into)
            elif tensor.by_rows:
                self._bundle.rows[segment] = rows_of(pushed)
            elif not tensor.alone:
                gather(pushed, into)
            else:
                stays = not self._lent and len(pushed) == 1 and near(pushed[0])
                self._bundle.point(segment, memory(pushed[0], into) if stays else None)
                if not stays:
                    gather(pushed, tensor.of(self._bundle))

    def _take(self, block: Block) -> None:
        self._missing[block.segment] -= 1
        if not self._missing[block.segment] and self._coming is not None:
            self._write(block.segment, self._coming)

    def _write(self, segment: int, weights: Bundle) -> None:
        for tensor in self._members[segment]:
            values = tensor.of(weights)
            for array in self._outs.get(tensor.key, ()):
                if array is not tensor.home:
                    write(array, values)


class ElasticKVStore(KVStore):  # type: ignore[misc]
    """Pushes gradients to, and pulls weights from, the servers of an elastic job.

    In a process that is no task of a job it is the whole job, without any network.
    """

    _type = "dist_sync_dl2"
    #: steps that a worker may be ahead of the slowest; 0: none
    _staleness = 0

    def __init__(self) -> None:
        self._session: OpenSession = open_session()
        self._session.attach()
        self._tensors: dict[Key, _Tensor] = {}
        self._frozen: set[Key] = set()
        self._trained: list[_Tensor] = []
        #: keys that are never pushed, but change as the worker computes (BatchNorm's running statistics), and where
        self._running: list[tuple[_Tensor, list[Any]]] = []
        self._optimizer: Any = None
        self._workers = 1
        #: numbers of workers that the script may have seen
        self._seen = {self.num_workers}
        self._expected = 0
        self._started = False
        #: what the servers keep to, if that is one number
        self._rate: float | None = None
        self._sums: GradientSums
        self._given: dict[str, Array] | None = None
        #: of the present step
        self._pushed: dict[Key, list[Any]] = {}
        self._outs: list[tuple[_Tensor, list[Any]]] = []
        #: rows that are asked for of keys that are pushed in it
        self._rows: list[tuple[_Tensor, Any, Any]] = []
        #: what was asked for before the first step
        self._firsts: list[tuple[_Tensor, list[Any]]] = []

    def __del__(self) -> None:
        """There is nothing of MXNet's own behind it: it is a KVStore because Trainer asks for one."""

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The name by which MXNet's own code knows that there are other workers."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's place among all; may change from step to step where the job is resized."""
        return self._session.place[0]

    @property
    def num_workers(self) -> int:
        """Workers of the job; may change from step to step where it is resized."""
        return self._session.place[1]

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the servers can update weights: yes."""
        if capability.lower() == KVStoreBase.OPTIMIZER:
            return True
        raise ValueError(f"unknown capability: {capability}")

    @property
    def version(self) -> int:
        """Completed updates of the job."""
        return self._session.version

    @property
    def started(self) -> bool:
        """Whether the job's keys and optimizer are fixed."""
        return self._started

    # --- keys -----------------------------------------------------------------------------------------------------

    def init(self, key: Any, value: Any) -> None:
        """Give a key its initial value; the first worker's is used."""
        with autograd.pause():
            for one, values in _pairs(key, value):
                self._init(one, values[0])
        self._go_on()

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give a key its initial value, and write the first worker's to `out` as soon as all keys are known."""
        # Gluon comes here from within the first forward pass if that asks for rows
        with autograd.pause():
            for (one, values), (_, outs) in zip(_pairs(key, value), _pairs(key, out), strict=True):
                self._init(one, values[0])
                self.pull(one, outs, priority)

    def freeze(self, *keys: Key) -> None:
        """Say that some keys are never pushed, where the KVStore cannot know (Module with fixed_param_names)."""
        self._not_started("freeze")
        self._frozen |= set(keys)

    def _init(self, key: Key, value: Any) -> None:
        if key in self._tensors:
            raise UsageError(f"key {key!r} has been given a value already")
        self._not_started(f"a value for key {key!r}")
        (whole,) = dense([value.copy()])
        kind = trainable(f"key {key!r}", whole)
        self._tensors[key] = _Tensor(key, whole, kind, value.grad is not None, sparse=is_sparse(value))

    def _not_started(self, what: str) -> None:
        if self._started:
            raise UsageError(f"{what} comes too late: the job's keys are fixed with its first step")

    def _tensor(self, key: Key) -> _Tensor:
        found = self._tensors.get(key)
        if found is None:
            raise UsageError(f"key {key!r} has not been given a value: call init or broadcast first")
        return found

    # --- steps ----------------------------------------------------------------------------------------------------

    def push(self, key: Any, value: Any, priority: int = 0) -> None:  # noqa: ARG002  (the order of keys does not matter)
        """Add a gradient to the step; several arrays are those of this worker's devices."""
        for one, values in _pairs(key, value):
            tensor = self._tensor(one)
            self._check(tensor, values)
            if not self._trained:
                self._choose_trained()
            if len(self._pushed) == len(self._trained):
                self._step()
            if one in self._pushed:
                missing = [t.key for t in self._trained if t.key not in self._pushed]
                raise UsageError(
                    f"key {one!r} is pushed a second time, but {', '.join(map(repr, missing[:5]))} not yet: "
                    "every step pushes every key once; name keys that are never pushed by kvstore.freeze(...)"
                )
            if tensor.segment < 0 and not any(t is tensor for t in self._trained):
                raise UsageError(f"key {one!r} is pushed, although it is frozen (grad_req='null')")
            self._pushed[one] = values
            if values[0].stype == STYPE and len(self._pushed) == len(self._trained):
                self._step()  # of row_sparse weights nothing is asked for in a step

    def _check(self, tensor: _Tensor, values: list[Any]) -> None:
        """Check the arrays that are pushed; mostly they are those of the step before."""
        if len(values) == len(tensor.checked) and all(map(operator.is_, values, tensor.checked)):
            return
        for array in values:
            if array.stype not in ("default", STYPE) or array.shape != tensor.value.shape:
                raise UsageError(
                    f"key {tensor.key!r} is an array of shape {tensor.value.shape}, but what is pushed is "
                    f"{array.stype} of shape {array.shape}"
                )
            if array.stype == STYPE and not tensor.sparse:
                self._check_late(tensor)
        tensor.checked = values

    def _check_late(self, tensor: _Tensor) -> None:
        """Take note that a key's gradients are row_sparse, although its weight was not."""
        if self._started and lazy(self._optimizer) and not same_dense(rule_of(self._optimizer, tensor.key)):
            raise UsageError(
                f"the gradient of key {tensor.key!r} is row_sparse, which could not be known as its weight was given: "
                "give that as row_sparse too (stype='row_sparse')"
            )
        tensor.sparse = True

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002
        """Have the weights written to `out`: at the end of the step if the key is pushed in it, now otherwise."""
        for one, outs in _pairs(key, out):
            tensor = self._tensor(one)
            if any(array.stype != "default" for array in outs):
                if not ignore_sparse:
                    raise UsageError(f"key {one!r} cannot be pulled into a {outs[0].stype} array: use row_sparse_pull")
                continue  # as MXNet's own does it: rows are asked for by row_sparse_pull
            if self._started or one in self._pushed:
                self._outs.append((tensor, outs))
                continue
            self._firsts.append((tensor, outs))
            for array in outs:
                array[:] = tensor.value
        self._go_on()

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Add a gradient to the step; have the weights (without an optimizer: the sum) written to `out` at its end."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:  # noqa: ARG002
        """Have some rows of the weights written to row_sparse arrays, as `pull` does it.

        Parameters
        ----------
        key
            or several.
        out
            one array, one for each device, or for several keys a list of these.
        priority
            is not looked at.
        row_ids
            numbers of rows, of any shape, in any order; one array for all devices, or one for each.

        """
        if isinstance(key, (list, tuple)):
            for one, outs, numbers in zip(key, out, row_ids, strict=True):
                self.row_sparse_pull(one, outs, row_ids=numbers)
            return
        tensor, outs, numbers = self._tensor(key), _list(out), _list(row_ids)
        if any(array.stype != STYPE for array in outs):
            raise UsageError(f"key {key!r} cannot be pulled into a {outs[0].stype} array by row_sparse_pull: use pull")
        if not self._started and len(self._tensors) == len(getattr(self._optimizer, "param_dict", ())):
            self._start()  # Gluon asks for rows before its first step: they are the first worker's
        self._go_on()
        with autograd.pause():
            for array, asked in zip(outs, numbers * len(outs) if len(numbers) == 1 else numbers, strict=True):
                rows = numbers_of(key, asked, tensor.value.shape[0])
                if key in self._pushed:
                    self._rows.append((tensor, array, rows))
                else:
                    self._put(tensor, array, rows)

    def _put(self, tensor: _Tensor, out: Any, rows: Any) -> None:
        if not self._started:
            put(out, reading(tensor.value), rows)
        elif tensor.segment >= 0:
            put(out, self._value(tensor), rows)

    def _value(self, tensor: _Tensor) -> Array:
        """Return a key's weights as they are now, shape (size,)."""
        if tensor.home is None:
            return tensor.of(self._session.weights)
        return self._whole()[tensor.segment][0, tensor.offset : tensor.offset + tensor.size]

    def _go_on(self) -> None:
        """Do what can be done now."""
        if self._pushed:
            if len(self._pushed) == len(self._trained):
                self._step()
        elif self._started:
            self._write_now()
        elif self._expected and len(self._tensors) == self._expected:
            # Module reads the weights before its first step
            self._start()

    def _step(self) -> None:
        if not self._started:
            # Gluon initialises with the first step, when its gradients are there already
            self._start()
            if self._session.late:
                # They were made with this worker's own weights; what it computes next is made with the job's.
                self._pushed.clear()
                self._write(self._outs)
                self._put_rows()
                return
        self._warn_of_rate()
        for key, pushed in self._pushed.items():
            if self._tensors[key].sparse and not self._tensors[key].by_rows:
                self._pushed[key] = dense(pushed)
        session = self._session
        share = session.share
        self._sums.begin(share.leaves, share.nodes[:1])
        bundle = self._sums.take(zero=False)
        step = _Step(self._tensors.values(), self._pushed, self._running, self._outs, session)
        step.prepare(bundle)
        self._sums.add(share.index, bundle)
        contributions = [*self._sums.contributions, *(Contribution(node, bundle) for node in share.nodes[1:])]
        left = session.exchange(contributions, 0.0, 0)
        bundle.fill = None
        while left:
            # Another worker is gone in the middle of the step.  Its samples are not ours to compute: our gradient
            # counts in its place, so that the mean is one of the right size.
            left = session.exchange([Contribution(node, bundle) for node in left], 0.0, 0)
        step.finish()
        self._pushed.clear()
        self._outs.clear()
        self._put_rows()
        self._seen.add(self.num_workers)

    def _put_rows(self) -> None:
        for tensor, out, rows in self._rows:
            self._put(tensor, out, rows)
        self._rows.clear()

    def accepts(self, rescale: float) -> bool:
        """Whether a script's new rescale_grad says the same as its first: it divides by the number of workers too."""
        ours = float(self._optimizer.rescale_grad)
        return any(math.isclose(rescale * seen, ours * self._workers, rel_tol=1e-9) for seen in self._seen)

    def _write(self, outs: list[tuple[_Tensor, list[Any]]]) -> None:
        """Write the weights where they were asked for."""
        mx.nd.waitall()
        for tensor, arrays in outs:
            if tensor.segment >= 0:
                values = tensor.of(self._session.weights)
                for array in arrays:
                    write(array, values)
        outs.clear()

    def _write_now(self) -> None:
        """Write weights that are asked for between steps; those in the script's own arrays come from the servers."""
        if any(tensor.home is not None for tensor, _ in self._outs):
            whole = self._whole()
            mx.nd.waitall()
            for tensor, arrays in self._outs:
                for array in arrays if tensor.segment >= 0 else ():
                    write(array, whole[tensor.segment][0, tensor.offset : tensor.offset + tensor.size])
            self._outs.clear()
        self._write(self._outs)

    def _whole(self) -> list[Array]:
        """Return what the servers have of each segment, shape (1 + slots, size)."""
        segments = self._session.spec.segments
        whole = [np.empty((1 + slots(segment.optimizer), segment.size), dtype=segment.dtype) for segment in segments]
        for block, state in zip(self._session.blocks, self._session.fetch(), strict=True):
            whole[block.segment][:, block.offset : block.offset + block.size] = state
        return whole

    def _warn_of_rate(self) -> None:
        if self._rate is not None and self._optimizer.lr != self._rate:
            warnings.warn(
                f"the learning rate has been set to {self._optimizer.lr}, but the servers keep to {self._rate}: "
                "give the optimizer an lr_scheduler instead",
                stacklevel=4,
            )
            self._rate = None

    # --- the beginning --------------------------------------------------------------------------------------------

    def _choose_trained(self) -> None:
        """Say which keys are pushed in each step: those with gradients, or all that are not known to be frozen."""
        tensors = [tensor for tensor in self._tensors.values() if tensor.key not in self._frozen]
        self._trained = [tensor for tensor in tensors if tensor.marked] or tensors
        trained = {tensor.key for tensor in self._trained}
        held = {tensor.key: arrays for tensor, arrays in self._firsts}
        self._running = [
            (tensor, held[tensor.key])
            for tensor in tensors
            if tensor.key not in trained and tensor.key in held and self._changes(tensor.key)
        ]

    def _changes(self, key: Key) -> bool:
        """Whether a key without a gradient is one that the worker's own passes change."""
        parameters = {} if self._optimizer is None else self._optimizer.param_dict
        return key not in parameters or not parameters[key]._differentiable  # noqa: SLF001  (nothing else tells)

    def _start(self) -> None:
        """All keys are known: join the job; the weights are the job's afterwards."""
        if not self._trained:
            self._choose_trained()
        spec = self._describe()
        session = self._session
        session.describe(spec)
        for tensor in [*self._trained, *(tensor for tensor, _ in self._running)]:
            np.copyto(tensor.of(session.weights), reading(tensor.value))
        if self._given is not None:
            session.begin_with(self._state(self._given))
        self._started = True
        session.start()
        self._sums = GradientSums(session.spec, session.supply)
        self._write(self._firsts)
        if self._optimizer is not None and self._optimizer.lr_scheduler is None:
            self._rate = self._optimizer.lr
        for tensor in self._tensors.values():
            # the shape is all that is looked at from here on
            tensor.value = SimpleNamespace(shape=tensor.value.shape, size=tensor.value.size)

    def _describe(self) -> JobSpec:
        if self._staleness and self._optimizer is None:
            raise UsageError("in asynchronous training the servers update the weights: set_optimizer must come first")
        kinds: dict[tuple[str, Optimizer, Key | None], list[_Tensor]] = {}
        for tensor in self._trained:
            if tensor.sparse and self._optimizer is None:
                raise UsageError(
                    f"key {tensor.key!r} is row_sparse: the servers update it, set_optimizer must come first"
                )
            rule: Optimizer = Sum() if self._optimizer is None else rule_of(self._optimizer, tensor.key)
            tensor.by_rows = tensor.sparse and lazy(self._optimizer)
            tensor.alone = tensor.size >= _LARGE and not tensor.by_rows
            own = tensor.key if tensor.alone or tensor.by_rows else None
            kinds.setdefault((tensor.dtype, rule, own), []).append(tensor)
        for tensor, _ in self._running:
            kinds.setdefault((tensor.dtype, Mean(), None), []).append(tensor)
        segments = []
        for number, ((_, rule, _), members) in enumerate(kinds.items()):
            offset = 0
            for tensor in members:
                tensor.segment, tensor.offset = number, offset
                offset += tensor.size
            by_rows, dtype = members[0].by_rows, members[0].dtype
            parts: tuple[Part, ...]
            if by_rows:
                parts = (table_part(str(members[0].key), tuple(members[0].value.shape)),)
            else:
                parts = tuple(Part(str(tensor.key), tuple(tensor.value.shape) or (1,)) for tensor in members)
            segments.append(Segment(dtype=dtype, optimizer=rule, parts=parts, sparse=by_rows, lazy=by_rows))
        fixed = hashlib.sha256()
        frozen = [tensor for tensor in self._tensors.values() if tensor.segment < 0]
        for tensor in frozen:
            fixed.update(f"{tensor.key} {tensor.value.shape} {tensor.dtype}\n".encode())
            fixed.update(reading(tensor.value).data)
        return JobSpec(
            segments=tuple(segments),
            samples=1,
            batch=1,
            epochs=0,
            seed=0,
            mode="open",
            staleness=self._staleness,
            shards=MAX_SHARDS,
            block_bytes=block_bytes_for(sum(segment.nbytes for segment in segments)),
            fixed=fixed.hexdigest() if frozen else "",
            clip_value=0.0 if self._optimizer is None else float(self._optimizer.clip_gradient or 0.0),
            scale=1.0 if self._optimizer is None else float(self._optimizer.rescale_grad) * self._workers,
        )

    # --- the optimizer --------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: Any) -> None:
        """Have the servers do what `optimizer` would; the first worker's is used.

        Raises
        ------
        SpecError
            it cannot be described; the message says what can.

        """
        self._not_started("an optimizer")
        rule_of(optimizer, next(iter(optimizer.param_dict or optimizer.idx2name or {0: None})))
        self._optimizer = optimizer
        # A step is the mean of the workers' gradients times this, which for as many workers as there are now is what
        # the script asks for: their sum times rescale_grad.
        self._workers = self.num_workers
        if not optimizer.param_dict:
            self._expected = len(optimizer.idx2name)

    @property
    def _updater(self) -> Any:
        """What Trainer.load_states looks at."""
        return SimpleNamespace(optimizer=self._optimizer)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Write weights and optimizer states, as the servers have them, to a file; any worker may, or several.

        The file is numpy's .npz, whatever its name, with the arrays `KEY/weight`, `KEY/0`, ... and `about` (JSON).
        """
        if self._optimizer is None:
            raise UsageError(
                "there are no optimizer states on the servers: the workers update their weights themselves"
            )
        if not self._started:
            raise UsageError("there are no optimizer states yet: they can be saved after the first step")
        whole = self._whole()
        arrays: dict[str, Any] = {}
        for tensor in self._trained:
            part = whole[tensor.segment][:, tensor.offset : tensor.offset + tensor.size]
            for row, name in enumerate(["weight", *map(str, range(len(part) - 1))]):
                arrays[f"{tensor.key}/{name}"] = part[row].reshape(tensor.value.shape)
        about = {"format": _STATES, "version": self._session.version}
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        temporary = f"{fname}.{os.getpid()}.tmp"
        with open(temporary, "wb") as file:  # noqa: PTH123  (a name as MXNet takes it)
            np.savez(file, **arrays)
        os.replace(temporary, fname)  # noqa: PTH105

    def load_optimizer_states(self, fname: str) -> None:
        """Have the job begin with the optimizer states of a file, and the weights that the script has loaded.

        Raises
        ------
        CheckpointError
            it is no such file.
        UsageError
            the job has begun.

        """
        if self._started:
            if self._session.late:
                return  # this worker has come to a job that is under way: its states are the servers'
            raise UsageError(
                "optimizer states must be loaded before the first step; with Module load them into the KVStore itself: "
                "kv = mx.kv.create('dl2'); kv.load_optimizer_states(file); module.fit(..., kvstore=kv)"
            )
        try:
            with np.load(fname, allow_pickle=False) as file:
                given = {name: file[name] for name in file.files}
            about = json.loads(given["about"].tobytes())
            if about["format"] != _STATES or not isinstance(about["version"], int):
                raise ValueError
        except OSError as error:
            raise CheckpointError(f"cannot read the optimizer states {fname}: {error.strerror or error}") from error
        except (ValueError, KeyError, EOFError, TypeError) as error:
            raise CheckpointError(f"{fname} holds no optimizer states of pslite.mxnet") from error
        self._given = given

    def _state(self, given: dict[str, Array]) -> Given:
        """Return the state that a file of optimizer states stands for, with the weights as they are."""
        session = self._session
        whole = [np.zeros((1 + slots(s.optimizer), s.size), dtype=s.dtype) for s in session.spec.segments]
        for tensor in [*self._trained, *(tensor for tensor, _ in self._running)]:
            part = whole[tensor.segment][:, tensor.offset : tensor.offset + tensor.size]
            part[0] = tensor.of(session.weights)
            for row in range(1, len(part)):
                array = given.get(f"{tensor.key}/{row - 1}")
                if array is None or array.size != tensor.size:
                    raise CheckpointError(f"the optimizer states are of another model: key {tensor.key!r} differs")
                part[row] = array.reshape(-1)
        version = int(json.loads(given["about"].tobytes())["version"])
        arrays = tuple(whole[b.segment][:, b.offset : b.offset + b.size].copy() for b in session.blocks)
        return Given("the optimizer states that the script has loaded", version, arrays, session.blocks)

    # --- the rest of MXNet's KVStore ------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every worker does."""
        self._session.barrier()

    _barrier = barrier

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Not there."""
        raise UsageError(f"gradients are not compressed: do without compression_params={compression_params!r}")

    def set_updater(self, updater: Any) -> None:  # noqa: ARG002
        """Not there."""
        raise UsageError("servers run no code of the script's: describe the update by set_optimizer")

    _set_updater = set_updater


def _pairs(keys: Any, values: Any) -> list[tuple[Key, list[Any]]]:
    """Return (key, arrays) for a key or several, with one array or several each."""
    if isinstance(keys, (list, tuple)):
        if len(keys) != len(values):
            raise UsageError(f"{len(keys)} keys, but {len(values)} values")
        return [(key, _list(value)) for key, value in zip(keys, values, strict=True)]
    return [(keys, _list(values))]


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
