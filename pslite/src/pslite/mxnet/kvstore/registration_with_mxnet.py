"""Registration of the KVStore with MXNet, which looks for it by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import mxnet as mx
from mxnet.gluon import Parameter, trainer
from mxnet.kvstore import KVStoreBase
from mxnet.module import base_module, module

from pslite.errors import UsageError
from pslite.job.job_spec import MAX_STALENESS
from pslite.mxnet.kvstore.elastic_kvstore import ElasticKVStore
from pslite.mxnet.kvstore.kvstore_job import ONE_TRAINER

NAME = "dl2"
#: what scripts ask for that were written for MXNet's own servers
SYNC = ("dist", "dist_sync", "dist_device_sync", "dist_sync_device")
ASYNC = ("dist_async", "dist_device_async", "dist_async_device")


#: the KVStore of this process, if it is a worker of a job
_made: ElasticKVStore | None = None


def _maker(kind: type[ElasticKVStore]) -> Callable[[], ElasticKVStore]:
    """Return a function that makes a KVStore; where a script has made one only to ask for its rank, it returns that."""

    def make() -> ElasticKVStore:
        global _made  # noqa: PLW0603  (a process is one worker)
        if _made is None or _made.job.alone:
            _made = kind()
        elif _made.job.used or type(_made) is not kind:
            raise UsageError(
                f"this process has a KVStore of type {_made.type!r} already, and a worker of a job has one: give that "
                f"object to the Trainer or Module (kvstore=kv); if there are several, {ONE_TRAINER}"
            )
        return _made

    return make


def register() -> None:
    """Have mx.kv.create, Trainer and Module make an `ElasticKVStore`."""
    KVStoreBase.kv_registry[NAME] = _maker(ElasticKVStore)
    for name in (*SYNC, *ASYNC):
        staleness = MAX_STALENESS if name in ASYNC else 0
        kind = type(name, (ElasticKVStore,), {"type": name, "staleness": staleness})
        KVStoreBase.kv_registry[name] = _maker(kind)
    # These make no KVStore at all for a name without "dist" in it, where there is one device.
    make = mx.model._create_kvstore  # noqa: SLF001

    def create(kvstore: Any, num_device: int, arg_params: Any) -> Any:
        if isinstance(kvstore, str) and kvstore.lower() == NAME:
            kvstore = mx.kv.create(NAME)
        return make(kvstore, num_device, arg_params)

    for place in (mx.model, trainer, module):
        place._create_kvstore = create  # noqa: SLF001
    _register_with_gluon()
    _register_with_module(create)


def _register_with_gluon() -> None:
    """Have Gluon's Trainer accept other numbers of workers, and note parameters that are loaded."""
    check = trainer.Trainer._check_and_rescale_grad  # noqa: SLF001

    def check_and_rescale(self: Any, scale: float) -> None:
        kvstore = self._kvstore
        if not (self._update_on_kvstore and isinstance(kvstore, ElasticKVStore)):
            check(self, scale)
        elif not kvstore.job.started:
            self._optimizer.rescale_grad = scale
        elif not kvstore.job.accepts(scale):
            check(self, scale)

    # It refuses another batch size than the first, even before the first step; and one that has changed with the number
    # of workers is the same.
    trainer.Trainer._check_and_rescale_grad = check_and_rescale  # noqa: SLF001
    load, initialise = Parameter._load_init, trainer.Trainer._init_kvstore  # noqa: SLF001
    loaded: WeakSet[Any] = WeakSet()

    def load_init(self: Any, *arguments: Any, **named: Any) -> None:
        load(self, *arguments, **named)
        loaded.add(self)

    def init_kvstore(self: Any) -> None:
        initialise(self)
        if isinstance(self._kvstore, ElasticKVStore):
            self._kvstore.job.parameters_loaded = all(parameter in loaded for parameter in self._params)

    # Gluon does not say from which epoch a script goes on with what it has loaded.
    Parameter._load_init = load_init  # noqa: SLF001
    trainer.Trainer._init_kvstore = init_kvstore  # noqa: SLF001


def _register_with_module(create: Callable[[Any, int, Any], Any]) -> None:
    """Have Module say which parameters are fixed, at which epoch it begins and which optimizer states it has."""
    train, initialise = base_module.BaseModule.fit, module.Module.init_optimizer
    begin_epoch: int | None = None

    def fit(self: Any, *arguments: Any, **named: Any) -> None:
        nonlocal begin_epoch
        begin_epoch = named.get("begin_epoch")
        train(self, *arguments, **named)

    base_module.BaseModule.fit = fit

    def init_optimizer(self: Any, kvstore: Any = "local", *arguments: Any, **named: Any) -> None:
        if self.optimizer_initialized and not named.get("force_init"):
            initialise(self, kvstore, *arguments, **named)  # fit again: the Module keeps its KVStore
            return
        if isinstance(kvstore, str) and kvstore.lower() in {NAME, *SYNC, *ASYNC}:
            kvstore = mx.kv.create(kvstore)
        if isinstance(kvstore, ElasticKVStore) and not kvstore.job.started:
            if begin_epoch is not None:
                kvstore.begin_epoch = begin_epoch
            group = self._exec_group
            kvstore.freeze(*(name for name in group.param_names if group.grad_req[name] == "null"))
            _, on_kvstore = create(kvstore, len(self._context), self._arg_params)
            if on_kvstore and self._preload_opt_states is not None:
                kvstore.load_optimizer_states(self._preload_opt_states)
                self._preload_opt_states = None
        initialise(self, kvstore, *arguments, **named)

    # It gives a KVStore the values of fixed parameters too, which are never pushed, and loads the optimizer states of
    # Module.load only when the KVStore has begun.
    module.Module.init_optimizer = init_optimizer
