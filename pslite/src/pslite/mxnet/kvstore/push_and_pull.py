"""Pushes and pulls of a KVStore: they are kept until all keys of a step are pushed, which does the step.

A step is one push of every trained key by every worker.  MXNet asks for it key after key and reads nothing in between,
so the exchange takes place with the last key, all at once, and what was to be pulled is written then.  Keys that are
given their values after the first step have steps of their own, in which the others stay as they are.
"""

from __future__ import annotations

import operator
from typing import Any

from pslite.errors import UsageError
from pslite.mxnet.arrays import STYPE, dense, lazy, same_dense
from pslite.mxnet.elastic_data_sampler import give_again
from pslite.mxnet.kvstore.key_table import Key, KeyTensor, Places
from pslite.mxnet.kvstore.kvstore_job import KVStoreJob
from pslite.mxnet.kvstore.wait_for_same_key_group import KeyGroupTurns
from pslite.mxnet.optimizer_translation import rule_of

#: what to do about keys that are not pushed: from the first step on, and later
_NEVER_PUSHED = "pass the keys that are never pushed to kvstore.freeze(...) before the first step"
_FROZEN_LATER = (
    "keys that the first step has pushed cannot be frozen (grad_req='null') later in the same job: save the "
    "parameters, and go on with them in another job"
)


class KVStoreSteps:
    """Does each step of a job with the last key that is pushed for it."""

    def __init__(self, job: KVStoreJob) -> None:
        self._job = job
        self._turns = KeyGroupTurns(job)
        #: by group of keys: gradients that were pushed for its present step
        self._pushed: dict[int, dict[Key, list[Any]]] = {}
        self._outs: Places = []
        #: where the weights of the last step of each group were written
        self._last_outs: dict[int, Places] = {}
        #: rows that are asked for of keys that are pushed in it
        self._rows: list[tuple[KeyTensor, Any, Any]] = []

    def add_late_keys(self) -> None:
        """Have the job take up keys that came late, if there are any."""
        if self._job.keys.unplaced:
            self._turns.out_of_step = self._job.add_late_keys()

    def start(self) -> None:
        """Begin with the job: all keys are known."""
        self._job.start(self._pushed.get(0, ()))

    def push(self, tensor: KeyTensor, values: list[Any]) -> None:
        """Add the gradients that this worker's devices have made of a key."""
        keys = self._job.keys
        self._check(tensor, values)
        if tensor.late:
            self.add_late_keys()
            if tensor.group < 0:
                keys.begin_group(tensor)
        if not keys.trained:
            self._job.choose_trained({tensor.key, *self._pushed.get(0, ())})
        self._complete()
        if self._is_pushed(tensor):
            pushed = self._pushed[tensor.group]
            missing = [t.key for t in keys.groups[tensor.group] if t.key not in pushed]
            raise UsageError(
                f"key {tensor.key!r} is pushed a second time in a step in which {', '.join(map(repr, missing[:5]))} "
                f"{'is' if len(missing) == 1 else 'are'} not pushed yet: a step pushes each key once; "
                f"{_FROZEN_LATER if self._job.started else _NEVER_PUSHED}"
            )
        if tensor.segment < 0 and not any(t is tensor for t in keys.trained):
            raise UsageError(
                f"key {tensor.key!r} is pushed, although it was frozen (grad_req='null') at the first step, which "
                "fixes a job's keys: train it from that step on, or go on with saved parameters in another job"
            )
        self._pushed.setdefault(tensor.group, {})[tensor.key] = values
        if values[0].stype == STYPE:
            self._complete()  # of row_sparse weights nothing is asked for in a step

    def pull(self, tensor: KeyTensor, outs: list[Any]) -> None:
        """Have a key's weights written: at the end of the step if it is pushed in it, otherwise with `advance`."""
        if tensor.late:
            self.add_late_keys()
        if self._job.started or self._is_pushed(tensor):
            self._outs.append((tensor, outs))
        else:
            self._job.weights.ask_first(tensor, outs)

    def pull_rows(self, tensor: KeyTensor, out: Any, rows: Any) -> None:
        """Have rows of a key's weights written: at the end of the step if it is pushed in it, otherwise now."""
        if self._is_pushed(tensor):
            self._rows.append((tensor, out, rows))
        else:
            self._job.weights.put_rows(tensor, out, rows)

    def advance(self) -> None:
        """Do what can be done now."""
        done = self._complete()
        if self._job.started and (done or not self._pushed or len(self._job.keys.groups) > 1):
            # those whose keys are being pushed wait
            now = [each for each in self._outs if each[0].group not in self._pushed]
            if now:  # to wait for what MXNet computes costs time
                self._outs = [each for each in self._outs if each[0].group in self._pushed]
                self._job.weights.write(now)
        elif not self._pushed and 0 < self._job.expected_keys == len(self._job.keys):
            # Module reads the weights before its first step
            self.start()

    def barrier(self) -> None:
        """Wait until every worker does; if others trained meanwhile, the script's arrays have their weights then."""
        session, weights = self._job.session, self._job.weights
        before = session.version
        if self._job.started:
            weights.point_to_homes()
        session.barrier()
        if session.version != before:
            weights.write([each for outs in self._last_outs.values() for each in outs], just_arrived=True)

    def _is_pushed(self, tensor: KeyTensor) -> bool:
        return tensor.key in self._pushed.get(tensor.group, ())

    def _check(self, tensor: KeyTensor, values: list[Any]) -> None:
        """Check the arrays that are pushed; mostly they are those of the step before."""
        if len(values) == len(tensor.checked) and all(map(operator.is_, values, tensor.checked)):
            return
        for array in values:
            if array.stype not in ("default", STYPE) or array.shape != tensor.shape:
                raise UsageError(
                    f"key {tensor.key!r} has shape {tensor.shape}, but a {array.stype} array of shape "
                    f"{array.shape} is pushed for it"
                )
            if array.stype == STYPE and not tensor.sparse:
                self._check_late(tensor)
        tensor.checked = values

    def _check_late(self, tensor: KeyTensor) -> None:
        """Take note that a key's gradients are row_sparse, although its weight was not."""
        optimizer = self._job.optimizer
        if self._job.started and lazy(optimizer) and not same_dense(rule_of(optimizer, tensor.key)):
            raise UsageError(
                f"the gradient of key {tensor.key!r} is row_sparse, but its weight was given as a dense array: "
                "give the weight as row_sparse too (stype='row_sparse')"
            )
        tensor.sparse = True

    def _complete(self) -> bool:
        """Do the step of a group of keys that are all pushed; return whether there was one."""
        for group, pushed in self._pushed.items():
            if len(pushed) == len(self._job.keys.groups[group]):
                self._step(group)
                return True
        return False

    def _step(self, group: int) -> None:
        """Exchange gradients and weights of a group of keys that are all pushed."""
        job = self._job
        if not job.started:
            # Gluon initialises with the first step, when its gradients are there already
            self.start()
            if job.session.joined_late:
                # They were made with this worker's own weights; what it computes next is made with the job's.
                give_again()
                self._pushed.clear()
                job.weights.write(self._outs, just_arrived=True)
                self._put_rows()
                return
        job.warn_of_rate()
        pushed = {
            key: dense(arrays) if job.keys[key].sparse and not job.keys[key].by_rows else arrays
            for key, arrays in self._pushed.pop(group).items()
        }
        outs = [each for each in self._outs if each[0].group == group]
        self._outs = [each for each in self._outs if each[0].group != group]
        self._last_outs[group] = outs
        if self._turns.join(group):
            job.weights.write(list(outs))
        else:
            job.exchange(group, pushed, outs)
            self._turns.note(group)
        self._put_rows()
        job.warn_of_changed_size()

    def _put_rows(self) -> None:
        """Write the rows that were asked for of keys that are not being pushed."""
        for tensor, out, rows in self._rows:
            if not self._is_pushed(tensor):
                self._job.weights.put_rows(tensor, out, rows)
        self._rows = [each for each in self._rows if self._is_pushed(each[0])]
