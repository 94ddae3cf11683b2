"""The job that trains a KVStore's keys: its description, its beginning, its steps, and keys that come after the first.

What a script can do wrong in the order of these is an error here, which says what to do instead.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from typing import Any

import mxnet as mx
import numpy as np

from pslite.errors import UsageError
from pslite.launch.environment_parsing import durability_of
from pslite.mxnet.arrays import reading
from pslite.mxnet.kvstore import optimizer_states
from pslite.mxnet.kvstore.key_table import Array, Key, KeyTable, KeyTensor, Places
from pslite.mxnet.kvstore.step_exchange import StepExchange
from pslite.mxnet.kvstore.weight_writer import WeightWriter
from pslite.mxnet.optimizer_translation import rule_of
from pslite.mxnet.script_line_warnings import RankAndSizeReadings, warn_of_script
from pslite.numeric.gradient_sums import Contribution, GradientSums
from pslite.worker.elastic_job_base import OpenSession
from pslite.worker.single_process_session import SingleSession

#: what to do in place of a second Trainer or Module
ONE_TRAINER = (
    "train all parameters by one Trainer, or as one Module of a grouped symbol (mx.sym.Group); for networks that train "
    'in turns, such as a GAN\'s, see "Networks that train in turns" in the guide to training scripts'
)

#: how long a worker waits between two steps of no key, while servers make ready for keys that came late, in seconds: at
#: first, and at most, since each counts as a version in the job's progress
_IDLE_SECONDS, _LONG_IDLE_SECONDS = 0.005, 0.1
#: after which it says what it waits for, in seconds
_WARN_SECONDS = 60.0


class KVStoreJob:
    """The job of a KVStore, from what the script says before the first step to the exchange of each step."""

    def __init__(self, session: OpenSession, staleness: int) -> None:
        """A worker may be `staleness` steps ahead of the slowest; 0: none."""
        self.session = session
        self.keys = KeyTable()
        self.weights = WeightWriter(session, self.keys)
        self.readings = RankAndSizeReadings(*session.rank_and_size)
        self.optimizer: Any = None
        #: how many keys the optimizer says that there are; 0 if it does not
        self.expected_keys = 0
        #: whether keys and optimizer are fixed
        self.started = False
        self.begin_epoch: int | None = None
        #: whether a Trainer trains parameters that the script has loaded from a file, all of them
        self.parameters_loaded = False
        #: optimizer states that the script has loaded
        self.given_states: dict[str, Array] | None = None
        self._staleness = staleness
        self._process = os.getpid()
        self._workers = 1
        #: what the servers keep to, if that is one number
        self._rate: float | None = None
        self._sums: GradientSums

    @property
    def alone(self) -> bool:
        """Whether this process is the whole job."""
        return isinstance(self.session, SingleSession)

    @property
    def used(self) -> bool:
        """Whether it has keys or an optimizer."""
        return len(self.keys) > 0 or self.optimizer is not None

    def refuse_after_start(self, what: str) -> None:
        """Raise UsageError if the job has begun."""
        if self.started:
            raise UsageError(
                f"{what} comes too late: the first step has fixed the job's description; do it before that step"
            )

    def add(self, key: Key, value: Any, outs: list[Any]) -> None:
        """Give a key its initial value; in `outs` are the script's arrays of its weights, if they are known."""
        if key in self.keys:
            raise UsageError(f"key {key!r} has been given a value already; if it is another Trainer's, {ONE_TRAINER}")
        if not self.started:
            self.keys.add(key, value, outs)
            return
        if self._staleness:
            self.refuse_after_start(f"in asynchronous training key {key!r}")
        if isinstance(self.optimizer, mx.optimizer.LAMB):
            self.refuse_after_start(f"with LAMB key {key!r}")
        self.keys.add_late(key, value)

    def set_optimizer(self, optimizer: Any) -> None:
        """Have the servers do what `optimizer` would."""
        if self.started:
            raise UsageError(
                "the KVStore has an optimizer and its keys already, and a job has one optimizer and one set of keys: "
                f"{ONE_TRAINER}"
            )
        rule_of(optimizer, next(iter(optimizer.param_dict or optimizer.idx2name or {0: None})))
        self.optimizer = optimizer
        # A step is the mean of the workers' gradients times this, which for as many workers as there are now is what
        # the script asks for: their sum times rescale_grad.
        self._workers = self.session.rank_and_size[1]
        if not optimizer.param_dict:
            self.expected_keys = len(optimizer.idx2name)

    # --- the beginning --------------------------------------------------------------------------------------------

    def choose_trained(self, pushed: Collection[Key]) -> None:
        """Say which keys are pushed in each step, of which some are already."""
        self.keys.choose_trained(self.optimizer, self.weights.asked_first, pushed)

    def start(self, pushed: Collection[Key]) -> None:
        """All keys are known: join the job; the weights are the job's afterwards."""
        if os.getpid() != self._process and not self.alone:
            raise UsageError(
                f"process {self._process} has made this KVStore, and process {os.getpid()}, forked from it, cannot "
                "train with it: make the KVStore in the process that trains"
            )
        if not self.keys.trained:
            self.choose_trained(pushed)
        session, begin, given = self.session, self.begin_epoch, self.given_states
        spec = self.keys.describe(
            self.optimizer,
            workers=self._workers,
            staleness=self._staleness,
            durability=durability_of(os.environ) or "none",
            epochs_before=begin or 0,
            # with the states of an earlier job its versions go on, which count its epochs if the script does not
            versions_before=0 if begin is None or given is None else optimizer_states.version_of(given),
        )
        session.describe(spec)
        mx.nd.waitall()
        for tensor in self.keys.moving():
            value = reading(tensor.value)
            if tensor.alone:
                session.weights.point(tensor.segment, value)
            else:
                np.copyto(tensor.of(session.weights), value)
                tensor.home = None
        if given is not None:
            session.start_from(optimizer_states.state_of(given, self.keys.moving(), session))
        self.started = True
        session.start()
        self._warn_of_epochs()
        # more workers may have come since the script asked
        self.warn_of_changed_size()
        self._sums = GradientSums(session.spec, session.supply)
        self.weights.begin(just_arrived=True)
        if self.optimizer is not None and self.optimizer.lr_scheduler is None:
            self._rate = self.optimizer.lr

    # --- keys that come late --------------------------------------------------------------------------------------

    def add_late_keys(self) -> bool:
        """Have the job take up keys that came late; return whether others train them already.

        They do if this worker has come to the job later.
        """
        session = self.session
        left = self.keys.place(session.spec)
        others_train = not left
        if left:
            self._extend(left)
            left = self.keys.place(session.spec)
        if left:
            raise UsageError(
                f"key {left[0].key!r} is given its value here, but the first worker gives others theirs: all workers "
                "must give the same keys their values at the same place of their scripts"
            )
        self._sums = GradientSums(session.spec, session.supply)
        self.weights.begin()
        return others_train

    def _extend(self, tensors: list[KeyTensor]) -> None:
        """Ask for keys that came late, and do steps of no key until all servers have them."""
        session = self.session
        spec, values = self.keys.extend(session.spec, tensors, self.optimizer, self._updates())
        mx.nd.waitall()
        session.extend(spec, values)
        warned_at, pause = time.monotonic() + _WARN_SECONDS, _IDLE_SECONDS
        while len(session.spec.segments) < len(spec.segments):
            self.exchange_nothing()
            time.sleep(pause)
            pause = min(1.1 * pause, _LONG_IDLE_SECONDS)
            if time.monotonic() > warned_at:
                warned_at = math.inf
                warn_of_script(
                    f"key {tensors[0].key!r} waits for the first worker to give it its value: all workers must do so "
                    "at the same place of their scripts"
                )

    def _updates(self) -> int:
        """Return the number of updates of the key that had most; to those of late keys belong others' before them."""
        session = self.session
        # all blocks of keys that came at the same time have the same number, or less if they are in several groups
        blocks = {(session.spec.segments[b.segment].late, b.since): b for b in reversed(session.blocks)}
        counts = session.updates([block.number for block in blocks.values()])
        return max(block.since + count for block, count in zip(blocks.values(), counts, strict=True))

    # --- steps ----------------------------------------------------------------------------------------------------

    def exchange(self, group: int, pushed: dict[Key, list[Any]], outs: Places) -> None:
        """Do a step of a group of keys, of which all are pushed; the others stay as they are."""
        # the workers' own passes change the statistics that came with the first step
        running = [] if group else self.keys.running
        self._exchange(StepExchange(self.keys.groups[group], pushed, running, outs, self.session))

    def exchange_nothing(self) -> None:
        """Do a step of no key."""
        self._exchange(StepExchange((), {}, [], [], self.session))

    def _exchange(self, step: StepExchange) -> None:
        session = self.session
        share = session.share
        self._sums.begin(share.leaves, share.nodes[:1])
        bundle = self._sums.take(zero=False)
        step.prepare(bundle)
        self._sums.add(share.index, bundle)
        contributions = [*self._sums.contributions, *(Contribution(node, bundle) for node in share.nodes[1:])]
        left = session.exchange(contributions, 0.0, 0)
        bundle.fill = None
        while left:
            # Another worker is gone in the middle of the step.  Its samples are not computed: this worker's gradient
            # counts in place of its own, so that the mean is one of the right size.
            left = session.exchange([Contribution(node, bundle) for node in left], 0.0, 0)
        step.finish()

    def accepts(self, rescale: float) -> bool:
        """Whether a script's new rescale_grad says the same as its first: it divides by the number of workers too."""
        self.warn_of_changed_size()
        ours = float(self.optimizer.rescale_grad)
        return any(
            math.isclose(rescale * seen, ours * self._workers, rel_tol=1e-9) for seen in self.readings.seen_workers
        )

    # --- warnings -------------------------------------------------------------------------------------------------

    def warn_of_changed_size(self) -> None:
        """Warn of lines that have read rank or number of workers once, where they have changed."""
        self.readings.warn_of_changes(*self.session.rank_and_size)

    def warn_of_rate(self) -> None:
        """Warn of a learning rate that was set after the first step."""
        if self._rate is not None and self.optimizer.lr != self._rate:
            warn_of_script(
                f"the learning rate has been set to {self.optimizer.lr}, but the servers keep to {self._rate}: "
                "give the optimizer an lr_scheduler instead"
            )
            self._rate = None

    def _warn_of_epochs(self) -> None:
        """Warn that a scheduler counts epochs from 0, where a script seems to go on with what it has saved."""
        said = self.begin_epoch is not None or self.given_states is not None
        if self.parameters_loaded and not (said or self.alone or self.session.rank_and_size[0]):
            warn_of_script(
                "the script has loaded all its parameters from a file; its epochs are counted from 0 (dl2d status): "
                "if it goes on at a later epoch, let it set kvstore.begin_epoch to that before the first step"
            )
