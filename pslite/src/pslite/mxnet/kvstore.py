"""The KVStore: scripts with a loop of their own, written for `dist_sync`, become workers of an elastic job.

A step is one push of every trained key by every worker.  MXNet asks for it key after key and reads nothing in between,
so the exchange takes place with the last key, all at once, and what was to be pulled is written then.  Keys that are
given their values after the first step have steps of their own, in which the others stay as they are.
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.kvstore import KVStore, KVStoreBase

from pslite.errors import UsageError
from pslite.launch.environment_parsing import durability_of
from pslite.mxnet import optimizer_states
from pslite.mxnet.arrays import memory, reading, write
from pslite.mxnet.elastic_data_sampler import give_again, session_for_kvstore
from pslite.mxnet.kvstore_key_table import Array, Key, KeyTable, KeyTensor, Places, listed, pairs
from pslite.mxnet.optimizer_states import part_of, whole_state
from pslite.mxnet.optimizer_translation import rule_of
from pslite.mxnet.push_pull import StepExchange
from pslite.mxnet.script_line_warnings import RankAndSizeReadings, warn_of_script
from pslite.mxnet.sparse import STYPE, dense, lazy, numbers_of, put, same_dense
from pslite.numeric.gradient_sums import Contribution, GradientSums
from pslite.worker.session_without_network import SingleSession
from pslite.worker.training_session import OpenSession

#: what to do in place of a second Trainer or Module
ONE_TRAINER = (
    "train all parameters by one Trainer, or as one Module of a grouped symbol (mx.sym.Group); for networks that train "
    'in turns, such as a GAN\'s, see "Networks that train in turns" in the guide to training scripts'
)

#: what to do about keys that are not pushed: from the first step on, and later
_NEVER_PUSHED = "pass the keys that are never pushed to kvstore.freeze(...) before the first step"
_FROZEN_LATER = (
    "keys that the first step has pushed cannot be frozen (grad_req='null') later in the same job: save the "
    "parameters, and go on with them in another job"
)

#: how long a worker waits between two steps of no key, while servers make ready for keys that came late, in seconds: at
#: first, and at most, since each counts as a version in the job's progress
_IDLE_SECONDS, _LONG_IDLE_SECONDS = 0.005, 0.1
#: after which it says what it waits for, in seconds
_WARN_SECONDS = 60.0

#: how many steps of no key a worker does until the first one is at the same keys, at most
_TURNS = 64


class ElasticKVStore(KVStore):  # type: ignore[misc]
    """Pushes gradients to, and pulls weights from, the servers of an elastic job.

    In a process that is no task of a job it is the whole job, without any network.
    """

    _type = "dist_sync_dl2"
    #: steps that a worker may be ahead of the slowest; 0: none
    _staleness = 0

    def __init__(self) -> None:
        self._session: OpenSession = session_for_kvstore()
        self._process = os.getpid()
        self._keys = KeyTable()
        self._optimizer: Any = None
        self._workers = 1
        self._readings = RankAndSizeReadings(*self._session.rank_and_size)
        self._expected = 0
        self._started = False
        self._begin_epoch: int | None = None
        #: whether a Trainer trains parameters that the script has loaded from a file, all of them
        self.parameters_loaded = False
        #: what the servers keep to, if that is one number
        self._rate: float | None = None
        self._sums: GradientSums
        self._given: dict[str, Array] | None = None
        #: whether the first worker was at other keys than this one
        self._astray = False
        #: the group of this worker's last step, those that the first worker was at last, and those where it never was
        self._last_group = 0
        self._led: set[int] = set()
        self._unled: set[int] = set()
        #: by group of keys: gradients that were pushed for its present step
        self._pushed: dict[int, dict[Key, list[Any]]] = {}
        self._outs: Places = []
        #: where the weights of the last step of each group were written
        self._last_outs: dict[int, Places] = {}
        #: rows that are asked for of keys that are pushed in it
        self._rows: list[tuple[KeyTensor, Any, Any]] = []
        #: what was asked for before the job had the keys
        self._firsts: Places = []

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
        rank = self._session.rank_and_size[0]
        self._readings.note("rank", rank)
        return rank

    @property
    def num_workers(self) -> int:
        """Workers of the job; may change from step to step where it is resized."""
        workers = self._session.rank_and_size[1]
        self._readings.note("num_workers", workers)
        return workers

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

    @property
    def alone(self) -> bool:
        """Whether this process is the whole job."""
        return isinstance(self._session, SingleSession)

    @property
    def used(self) -> bool:
        """Whether it has keys or an optimizer."""
        return len(self._keys) > 0 or self._optimizer is not None

    @property
    def begin_epoch(self) -> int | None:
        """The epoch from which the script trains, which it sets before its first step; None if it does not say so.

        The epochs before it count as done.
        """
        return self._begin_epoch

    @begin_epoch.setter
    def begin_epoch(self, epoch: int | None) -> None:
        self._not_started("begin_epoch")
        self._begin_epoch = None if epoch is None else operator.index(epoch)

    # --- keys -----------------------------------------------------------------------------------------------------

    def init(self, key: Any, value: Any) -> None:
        """Give a key its initial value; the first worker's is used.

        After the first step all workers must do so at the same place of their scripts, and wait for each other.  Then
        keys that are given their values in one call, or without a push in between, are pushed in the same steps.

        Raises
        ------
        UsageError
            the key has one already, or the first step is done and the job cannot have further keys.

        """
        with autograd.pause():
            for one, values in pairs(key, value):
                self._init(one, values[0], ())
            self._take_up()
        self._go_on()

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give a key its initial value, and write the first worker's to `out` as soon as all keys are known."""
        # Gluon comes here from within the first forward pass if that asks for rows
        with autograd.pause():
            for (one, values), (_, outs) in zip(pairs(key, value), pairs(key, out), strict=True):
                self._init(one, values[0], outs)
                if self._started:
                    self._ask_first(self._keys[one], outs)
                else:
                    self.pull(one, outs, priority)

    def freeze(self, *keys: Key) -> None:
        """Say that some keys are never pushed, where the KVStore cannot know (Module with fixed_param_names)."""
        self._not_started("freeze")
        self._keys.freeze(keys)

    def _init(self, key: Key, value: Any, outs: Sequence[Any]) -> None:
        if key in self._keys:
            raise UsageError(f"key {key!r} has been given a value already; if it is another Trainer's, {ONE_TRAINER}")
        if not self._started:
            self._keys.add(key, value, outs)
            return
        if self._staleness:
            self._not_started(f"in asynchronous training key {key!r}")
        if isinstance(self._optimizer, mx.optimizer.LAMB):
            self._not_started(f"with LAMB key {key!r}")
        self._keys.add_late(key, value)

    def _not_started(self, what: str) -> None:
        if self._started:
            raise UsageError(
                f"{what} comes too late: the first step has fixed the job's description; do it before that step"
            )

    def _take_up(self) -> None:
        """Have the job take up keys that came late, if there are any: with steps of no key until all servers have them.

        A worker that has come to the job later finds them there.
        """
        if not self._keys.unplaced:
            return
        session = self._session
        left = self._keys.place(session.spec)
        self._astray = not left  # others train them already
        if left:
            spec, values = self._keys.extend(session.spec, left, self._optimizer, self._updates())
            mx.nd.waitall()
            session.extend(spec, values)
            warned_at, pause = time.monotonic() + _WARN_SECONDS, _IDLE_SECONDS
            while len(session.spec.segments) < len(spec.segments):
                self._exchange((), {}, [], [])
                time.sleep(pause)
                pause = min(1.1 * pause, _LONG_IDLE_SECONDS)
                if time.monotonic() > warned_at:
                    warned_at = math.inf
                    warn_of_script(
                        f"key {left[0].key!r} waits for the first worker to give it its value: all workers must do so "
                        "at the same place of their scripts"
                    )
            left = self._keys.place(session.spec)
        if left:
            raise UsageError(
                f"key {left[0].key!r} is given its value here, but the first worker gives others theirs: all workers "
                "must give the same keys their values at the same place of their scripts"
            )
        self._sums = GradientSums(session.spec, session.supply)
        self._write(self._firsts)
        self._keep_shapes()

    def _updates(self) -> int:
        """Return the number of updates of the key that had most; to those of late keys belong others' before them."""
        session = self._session
        # all blocks of keys that came at the same time have the same number, or less if they are in several groups
        blocks = {(session.spec.segments[b.segment].late, b.since): b for b in reversed(session.blocks)}
        counts = session.updates([block.number for block in blocks.values()])
        return max(block.since + count for block, count in zip(blocks.values(), counts, strict=True))

    def _ask_first(self, tensor: KeyTensor, outs: list[Any]) -> None:
        """Write a key's own value, and the first worker's as soon as the job has the key."""
        self._firsts.append((tensor, outs))
        for array in outs:
            if array is not tensor.value:
                array[:] = tensor.value

    # --- steps ----------------------------------------------------------------------------------------------------

    def push(self, key: Any, value: Any, priority: int = 0) -> None:  # noqa: ARG002  (the order of keys does not matter)
        """Add a gradient to the step; several arrays are those of this worker's devices."""
        for one, values in pairs(key, value):
            tensor = self._keys[one]
            self._check(tensor, values)
            if tensor.late:
                self._take_up()
                if tensor.group < 0:
                    self._keys.begin_group(tensor)
            if not self._keys.trained:
                self._keys.choose_trained(self._optimizer, self._firsts, {one, *self._pushed.get(0, ())})
            self._complete()
            if self._is_pushed(tensor):
                pushed = self._pushed[tensor.group]
                missing = [t.key for t in self._keys.groups[tensor.group] if t.key not in pushed]
                raise UsageError(
                    f"key {one!r} is pushed a second time in a step in which {', '.join(map(repr, missing[:5]))} "
                    f"{'is' if len(missing) == 1 else 'are'} not pushed yet: a step pushes each key once; "
                    f"{_FROZEN_LATER if self._started else _NEVER_PUSHED}"
                )
            if tensor.segment < 0 and not any(t is tensor for t in self._keys.trained):
                raise UsageError(
                    f"key {one!r} is pushed, although it was frozen (grad_req='null') at the first step, which fixes "
                    "a job's keys: have it trained from that step on, or go on with saved parameters in another job"
                )
            self._pushed.setdefault(tensor.group, {})[one] = values
            if values[0].stype == STYPE:
                self._complete()  # of row_sparse weights nothing is asked for in a step

    def _is_pushed(self, tensor: KeyTensor) -> bool:
        return tensor.key in self._pushed.get(tensor.group, ())

    def _complete(self) -> bool:
        """Do the step of a group of keys that are all pushed; return whether there was one."""
        for group, pushed in self._pushed.items():
            if len(pushed) == len(self._keys.groups[group]):
                self._step(group)
                return True
        return False

    def _check(self, tensor: KeyTensor, values: list[Any]) -> None:
        """Check the arrays that are pushed; mostly they are those of the step before."""
        if len(values) == len(tensor.checked) and all(map(operator.is_, values, tensor.checked)):
            return
        for array in values:
            if array.stype not in ("default", STYPE) or array.shape != tensor.value.shape:
                raise UsageError(
                    f"key {tensor.key!r} has shape {tensor.value.shape}, but a {array.stype} array of shape "
                    f"{array.shape} is pushed for it"
                )
            if array.stype == STYPE and not tensor.sparse:
                self._check_late(tensor)
        tensor.checked = values

    def _check_late(self, tensor: KeyTensor) -> None:
        """Take note that a key's gradients are row_sparse, although its weight was not."""
        if self._started and lazy(self._optimizer) and not same_dense(rule_of(self._optimizer, tensor.key)):
            raise UsageError(
                f"the gradient of key {tensor.key!r} is row_sparse, but its weight was given as a dense array: "
                "give the weight as row_sparse too (stype='row_sparse')"
            )
        tensor.sparse = True

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002
        """Have the weights written to `out`: at the end of the step if the key is pushed in it, now otherwise."""
        for one, outs in pairs(key, out):
            tensor = self._keys[one]
            if other := [array.stype for array in outs if array.stype != "default"]:
                if not ignore_sparse:
                    raise UsageError(f"key {one!r} cannot be pulled into a {other[0]} array: use row_sparse_pull")
                continue  # as MXNet's own does it: rows are asked for by row_sparse_pull
            if tensor.late:
                self._take_up()
            if self._started or self._is_pushed(tensor):
                self._outs.append((tensor, outs))
            else:
                self._ask_first(tensor, outs)
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
        tensor, outs, numbers = self._keys[key], listed(out), listed(row_ids)
        if other := [array.stype for array in outs if array.stype != STYPE]:
            raise UsageError(f"key {key!r} cannot be pulled into a {other[0]} array by row_sparse_pull: use pull")
        if not self._started and len(self._keys) == len(getattr(self._optimizer, "param_dict", ())):
            self._start()  # Gluon asks for rows before its first step: they are the first worker's
        if tensor.late:
            self._take_up()
        self._go_on()
        with autograd.pause():
            for array, asked in zip(outs, numbers * len(outs) if len(numbers) == 1 else numbers, strict=True):
                rows = numbers_of(key, asked, tensor.value.shape[0])
                if self._is_pushed(tensor):
                    self._rows.append((tensor, array, rows))
                else:
                    self._put(tensor, array, rows)

    def _put(self, tensor: KeyTensor, out: Any, rows: Any) -> None:
        if not self._started:
            put(out, reading(tensor.value), rows)
        elif tensor.segment >= 0:
            put(out, self._values([tensor])[0], rows)

    def _values(self, tensors: list[KeyTensor], *, just_arrived: bool = False) -> list[Array]:
        """Return the weights of keys as they are now, shape (size,).

        Those that arrived in the script's own arrays come from the servers, unless they have `just_arrived`: the script
        may have changed them.
        """
        session = self._session
        fetched = not just_arrived and any(tensor.home is not None for tensor in tensors)
        whole = whole_state(session) if fetched else None
        return [tensor.of(session.weights) if whole is None else part_of(whole, tensor)[0] for tensor in tensors]

    def _go_on(self) -> None:
        """Do what can be done now."""
        done = self._complete()
        if self._started and (done or not self._pushed or len(self._keys.groups) > 1):
            # those whose keys are being pushed wait
            now = [each for each in self._outs if each[0].group not in self._pushed]
            if now:  # to wait for what MXNet computes costs time
                self._outs = [each for each in self._outs if each[0].group in self._pushed]
                self._write(now)
        elif not self._pushed and self._expected and len(self._keys) == self._expected:
            # Module reads the weights before its first step
            self._start()

    def _step(self, group: int) -> None:
        """Exchange gradients and weights of a group of keys that are all pushed."""
        if not self._started:
            # Gluon initialises with the first step, when its gradients are there already
            self._start()
            if self._session.joined_late:
                # They were made with this worker's own weights; what it computes next is made with the job's.
                give_again()
                self._pushed.clear()
                self._write(self._outs, just_arrived=True)
                self._put_rows()
                return
        self._warn_of_rate()
        pushed = {
            key: dense(arrays) if self._keys[key].sparse and not self._keys[key].by_rows else arrays
            for key, arrays in self._pushed.pop(group).items()
        }
        outs = [each for each in self._outs if each[0].group == group]
        self._outs = [each for each in self._outs if each[0].group != group]
        self._last_outs[group] = outs
        if self._astray and self._falls_in(group):
            self._write(list(outs))
        else:
            # the workers' own passes change the statistics that came with the first step
            self._exchange(self._keys.groups[group], pushed, [] if group else self._keys.running, outs)
            self._note_turn(group)
        self._last_group = group
        self._put_rows()
        self._readings.warn_of_changes(*self._session.rank_and_size)

    def _falls_in(self, group: int) -> bool:
        """Do steps of no key until the first worker begins with a group; return whether it did.

        Each worker's script has the same turns of groups, so that they are in step from then on.  The gradient that
        was to be pushed is dropped: it would come after that step.
        """
        if group == self._last_group or group in self._unled:
            return False
        self._astray = False
        for _ in range(_TURNS):
            if not self._session.rank_and_size[0]:
                return False
            self._exchange((), {}, [], [])
            before = self._led
            if group in self._note_led() - before:
                return True
        self._unled.add(group)  # the first worker's script does not push it, now
        return False

    def _note_turn(self, group: int) -> None:
        """Take note of whether the first worker was at the same group of keys in the step just done."""
        led = self._note_led()
        if len(self._keys.groups) > 1 and led and group not in led and group not in self._unled:
            self._astray = True

    def _note_led(self) -> set[int]:
        """Return the groups of which the first worker had gradients in the last step."""
        led = self._keys.led(self._session.led)
        self._led = led or self._led
        self._unled -= led
        return led

    def _exchange(
        self,
        tensors: Iterable[KeyTensor],
        pushed: dict[Key, list[Any]],
        running: Places,
        outs: Places,
    ) -> None:
        """Do a step of some keys, of which all are pushed or running; all others stay as they are."""
        session = self._session
        share = session.share
        self._sums.begin(share.leaves, share.nodes[:1])
        bundle = self._sums.take(zero=False)
        step = StepExchange(tensors, pushed, running, outs, session)
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

    def _put_rows(self) -> None:
        """Write the rows that were asked for of keys that are not being pushed."""
        for tensor, out, rows in self._rows:
            if not self._is_pushed(tensor):
                self._put(tensor, out, rows)
        self._rows = [each for each in self._rows if self._is_pushed(each[0])]

    def accepts(self, rescale: float) -> bool:
        """Whether a script's new rescale_grad says the same as its first: it divides by the number of workers too."""
        self._readings.warn_of_changes(*self._session.rank_and_size)
        ours = float(self._optimizer.rescale_grad)
        return any(
            math.isclose(rescale * seen, ours * self._workers, rel_tol=1e-9) for seen in self._readings.seen_workers
        )

    def _write(self, outs: Places, *, just_arrived: bool = False) -> None:
        """Write the weights where they were asked for; frozen keys stay as they are.  Parameters as for `_values`."""
        moving = [(tensor, arrays) for tensor, arrays in outs if tensor.segment >= 0]
        values = self._values([tensor for tensor, _ in moving], just_arrived=just_arrived)
        mx.nd.waitall()
        for (tensor, arrays), value in zip(moving, values, strict=True):
            for array in arrays:
                if not (just_arrived and array is tensor.home):
                    write(array, value)
        outs.clear()

    def _warn_of_rate(self) -> None:
        if self._rate is not None and self._optimizer.lr != self._rate:
            warn_of_script(
                f"the learning rate has been set to {self._optimizer.lr}, but the servers keep to {self._rate}: "
                "give the optimizer an lr_scheduler instead"
            )
            self._rate = None

    def _warn_of_epochs(self) -> None:
        """Warn that a scheduler counts epochs from 0, where a script seems to go on with what it has saved."""
        said = self._begin_epoch is not None or self._given is not None
        if self.parameters_loaded and not (said or self.alone or self._session.rank_and_size[0]):
            warn_of_script(
                "the script has loaded all its parameters from a file; its epochs are counted from 0 (dl2d status): "
                "if it goes on at a later epoch, have it set kvstore.begin_epoch to that before the first step"
            )

    # --- the beginning --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """All keys are known: join the job; the weights are the job's afterwards."""
        if os.getpid() != self._process and not self.alone:
            raise UsageError(
                f"process {self._process} has made this KVStore, and process {os.getpid()}, forked from it, cannot "
                "train with it: make the KVStore in the process that trains"
            )
        if not self._keys.trained:
            self._keys.choose_trained(self._optimizer, self._firsts, self._pushed.get(0, ()))
        begin = self._begin_epoch
        spec = self._keys.describe(
            self._optimizer,
            workers=self._workers,
            staleness=self._staleness,
            durability=durability_of(os.environ) or "none",
            epochs_before=begin or 0,
            # with the states of an earlier job its versions go on, which count its epochs if the script does not
            versions_before=0 if begin is None or self._given is None else optimizer_states.version_of(self._given),
        )
        session = self._session
        session.describe(spec)
        mx.nd.waitall()
        for tensor in self._keys.moving():
            value = reading(tensor.value)
            if tensor.alone:
                session.weights.point(tensor.segment, value)
            else:
                np.copyto(tensor.of(session.weights), value)
                tensor.home = None
        if self._given is not None:
            session.start_from(optimizer_states.state_of(self._given, self._keys.moving(), session))
        self._started = True
        session.start()
        self._warn_of_epochs()
        # more workers may have come since the script asked
        self._readings.warn_of_changes(*self._session.rank_and_size)
        self._sums = GradientSums(session.spec, session.supply)
        self._write(self._firsts, just_arrived=True)
        if self._optimizer is not None and self._optimizer.lr_scheduler is None:
            self._rate = self._optimizer.lr
        self._keep_shapes()

    def _keep_shapes(self) -> None:
        """Forget the initial values: of those the shape is all that is looked at from here on."""
        for tensor in self._keys.all():
            tensor.value = SimpleNamespace(shape=tensor.value.shape, size=tensor.value.size)

    # --- the optimizer --------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: Any) -> None:
        """Have the servers do what `optimizer` would; the first worker's is used.

        Raises
        ------
        SpecError
            it cannot be described; the message says what can.

        """
        if self._started:
            raise UsageError(
                "the KVStore has an optimizer and its keys already, and a job has one optimizer and one set of keys: "
                f"{ONE_TRAINER}"
            )
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
        optimizer_states.save(fname, self._keys.pushed(), self._session)

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
            if self._session.joined_late:
                return  # this worker has come to a job that is under way: its states are the servers'
            raise UsageError(
                "optimizer states must be loaded before the first step; with Module by Module.load(..., "
                "load_optimizer_states=True), or into the KVStore itself: kv.load_optimizer_states(file)"
            )
        self._given = optimizer_states.load(fname)

    # --- the rest of MXNet's KVStore ------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every worker does; if others trained meanwhile, the script's arrays have their weights then."""
        before = self._session.version
        if self._started:
            mx.nd.waitall()
            for tensor in self._keys.moving():
                if tensor.home is not None:  # MXNet may have moved it since the last step
                    self._session.weights.point(tensor.segment, memory(tensor.home, tensor.of(self._session.weights)))
        self._session.barrier()
        if self._session.version != before:
            self._write([each for outs in self._last_outs.values() for each in outs], just_arrived=True)

    _barrier = barrier

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Not there."""
        raise UsageError(f"gradient compression is not supported: remove compression_params={compression_params!r}")

    def set_updater(self, updater: Any) -> None:  # noqa: ARG002
        """Not there."""
        raise UsageError("servers cannot run an updater function of the script: call set_optimizer instead")

    _set_updater = set_updater

    def _send_command_to_servers(self, head: int, body: str) -> None:  # noqa: ARG002
        """Not there."""
        raise UsageError("servers take no commands of the script: for an optimizer call set_optimizer instead")
