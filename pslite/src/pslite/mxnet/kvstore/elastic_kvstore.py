"""The KVStore: scripts with a loop of their own, written for `dist_sync`, become workers of an elastic job."""

from __future__ import annotations

import operator
from typing import Any

from mxnet import autograd
from mxnet.kvstore import KVStore, KVStoreBase

from pslite.errors import UsageError
from pslite.mxnet.arrays import STYPE, numbers_of
from pslite.mxnet.elastic_data_sampler import session_for_kvstore
from pslite.mxnet.kvstore import optimizer_states
from pslite.mxnet.kvstore.key_table import Key, listed, pairs
from pslite.mxnet.kvstore.kvstore_job import KVStoreJob
from pslite.mxnet.kvstore.push_and_pull import KVStoreSteps
from pslite.worker.elastic_job_base import OpenSession


class ElasticKVStore(KVStore):  # type: ignore[misc]
    """Pushes gradients to, and pulls weights from, the servers of an elastic job.

    In a process that is no task of a job it is the whole job, without any network.
    """

    #: the name by which MXNet's own code knows that there are other workers
    type = "dist_sync_dl2"
    #: steps that a worker may be ahead of the slowest; 0: none
    staleness = 0

    def __init__(self, session: OpenSession | None = None) -> None:
        """The session is that of the process unless given."""
        self.job = KVStoreJob(session or session_for_kvstore(), self.staleness)
        self._steps = KVStoreSteps(self.job)

    def __del__(self) -> None:
        """There is nothing of MXNet's own behind it: it is a KVStore because Trainer asks for one."""

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's place among all; may change from step to step where the job is resized."""
        rank = self.job.session.rank_and_size[0]
        self.job.readings.note("rank", rank)
        return rank

    @property
    def num_workers(self) -> int:
        """Workers of the job; may change from step to step where it is resized."""
        workers = self.job.session.rank_and_size[1]
        self.job.readings.note("num_workers", workers)
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
        return self.job.session.version

    @property
    def begin_epoch(self) -> int | None:
        """The epoch from which the script trains, which it sets before its first step; None if it does not say so.

        The epochs before it count as done.
        """
        return self.job.begin_epoch

    @begin_epoch.setter
    def begin_epoch(self, epoch: int | None) -> None:
        self.job.refuse_after_start("begin_epoch")
        self.job.begin_epoch = None if epoch is None else operator.index(epoch)

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
                self.job.add(one, values[0], [])
            self._steps.add_late_keys()
        self._steps.advance()

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give a key its initial value, and write the first worker's to `out` as soon as all keys are known."""
        # Gluon comes here from within the first forward pass if that asks for rows
        with autograd.pause():
            for (one, values), (_, outs) in zip(pairs(key, value), pairs(key, out), strict=True):
                self.job.add(one, values[0], outs)
                if self.job.started:
                    self.job.weights.ask_first(self.job.keys[one], outs)
                else:
                    self.pull(one, outs, priority)

    def freeze(self, *keys: Key) -> None:
        """Say that some keys are never pushed, where the KVStore cannot know (Module with fixed_param_names)."""
        self.job.refuse_after_start("freeze")
        self.job.keys.freeze(keys)

    # --- steps ----------------------------------------------------------------------------------------------------

    def push(self, key: Any, value: Any, priority: int = 0) -> None:  # noqa: ARG002  (the order of keys does not matter)
        """Add a gradient to the step; several arrays are those of this worker's devices."""
        for one, values in pairs(key, value):
            self._steps.push(self.job.keys[one], values)

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002
        """Have the weights written to `out`: at the end of the step if the key is pushed in it, now otherwise."""
        for one, outs in pairs(key, out):
            tensor = self.job.keys[one]
            if other := [array.stype for array in outs if array.stype != "default"]:
                if not ignore_sparse:
                    raise UsageError(f"key {one!r} cannot be pulled into a {other[0]} array: use row_sparse_pull")
                continue  # as MXNet's own does it: rows are asked for by row_sparse_pull
            self._steps.pull(tensor, outs)
        self._steps.advance()

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
        job = self.job
        tensor, outs, numbers = job.keys[key], listed(out), listed(row_ids)
        if other := [array.stype for array in outs if array.stype != STYPE]:
            raise UsageError(f"key {key!r} cannot be pulled into a {other[0]} array by row_sparse_pull: use pull")
        if not job.started and len(job.keys) == len(getattr(job.optimizer, "param_dict", ())):
            self._steps.start()  # Gluon asks for rows before its first step: they are the first worker's
        if tensor.late:
            self._steps.add_late_keys()
        self._steps.advance()
        with autograd.pause():
            for array, asked in zip(outs, numbers * len(outs) if len(numbers) == 1 else numbers, strict=True):
                self._steps.pull_rows(tensor, array, numbers_of(key, asked, tensor.shape[0]))

    def barrier(self) -> None:
        """Wait until every worker does; if others trained meanwhile, the script's arrays have their weights then."""
        self._steps.barrier()

    _barrier = barrier

    # --- the optimizer --------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: Any) -> None:
        """Have the servers do what `optimizer` would; the first worker's is used.

        Raises
        ------
        SpecError
            it cannot be described; the message says what can.

        """
        self.job.set_optimizer(optimizer)

    @property
    def _updater(self) -> Any:
        """What Trainer.load_states looks at: it has the `optimizer`."""
        return self.job

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Write weights and optimizer states, as the servers have them, to a file; any worker may, or several.

        The file is numpy's .npz, whatever its name, with the arrays `KEY/weight`, `KEY/0`, ... and `about` (JSON).
        """
        if self.job.optimizer is None:
            raise UsageError(
                "there are no optimizer states on the servers: the workers update their weights themselves"
            )
        if not self.job.started:
            raise UsageError("there are no optimizer states yet: they can be saved after the first step")
        optimizer_states.save(fname, self.job.keys.pushed(), self.job.session)

    def load_optimizer_states(self, fname: str) -> None:
        """Have the job begin with the optimizer states of a file, and the weights that the script has loaded.

        Raises
        ------
        CheckpointError
            it is no such file.
        UsageError
            the job has begun.

        """
        if self.job.started:
            if self.job.session.joined_late:
                return  # this worker has come to a job that is under way: its states are the servers'
            raise UsageError(
                "optimizer states must be loaded before the first step; with Module by Module.load(..., "
                "load_optimizer_states=True), or into the KVStore itself: kv.load_optimizer_states(file)"
            )
        self.job.given_states = optimizer_states.load(fname)

    # --- not there ------------------------------------------------------------------------------------------------

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
