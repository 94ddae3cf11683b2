"""MXNet's optimizers and schedules as the descriptions that servers run.

What a description cannot say is an error that names it: no code travels, and none is guessed.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

from pslite.errors import SpecError
from pslite.job.job_spec import LAMB, SGD, Adam, Descent
from pslite.job.learning_rates import Constant, Cosine, Milestones, Polynomial, Schedule, StepDecay

_ELSEWHERE = (
    "let the workers update their weights themselves: Trainer(..., update_on_kvstore=False), "
    "MXNET_UPDATE_ON_KVSTORE=0 in the environment for Module, or in a loop of your own "
    "mx.optimizer.get_updater(optimizer) in place of kvstore.set_optimizer(optimizer)"
)


def rule_of(optimizer: Any, key: int | str) -> Descent:
    """Return what the servers do with the gradient of `key`, which computes what `optimizer` would.

    Parameters
    ----------
    optimizer
        an mxnet.optimizer.Optimizer; its `rescale_grad` is not part of the rule.
    key
        the weight's, with its own multipliers of rate and weight decay.

    Raises
    ------
    SpecError
        there is no such rule.

    """
    kind = type(optimizer)
    if optimizer.begin_num_update:
        raise SpecError(
            "begin_num_update cannot be set: load the optimizer states instead, which include the number of updates"
        )
    scheduler = optimizer.lr_scheduler
    rate = optimizer.lr if scheduler is None else scheduler.base_lr
    schedule: Schedule = Constant() if scheduler is None else schedule_of(scheduler)
    rate_by, decay_by = _multipliers(optimizer, key)
    rate, decay = float(rate * rate_by), float(optimizer.wd * decay_by)
    if kind in (mx.optimizer.SGD, mx.optimizer.ccSGD, mx.optimizer.NAG):
        # With NAG, MXNet's kernel takes the weight decay that enters the momentum from the weight after the step; its
        # own documentation, and pslite, from that before.
        momentum = float(optimizer.momentum)
        return SGD(
            lr=rate,
            momentum=momentum,
            nesterov=kind is mx.optimizer.NAG and momentum > 0,
            weight_decay=decay,
            schedule=schedule,
            rate_in_momentum=momentum > 0,
        )
    if kind is mx.optimizer.Adam:
        if decay and optimizer.clip_gradient:
            raise SpecError("Adam with wd and clip_gradient together cannot run on the servers: use one of them")
        betas = float(optimizer.beta1), float(optimizer.beta2)
        return Adam(
            lr=rate,
            betas=betas,
            eps=float(optimizer.epsilon),
            weight_decay=decay,
            schedule=schedule,
            eps_first=True,
        )
    if kind is mx.optimizer.LAMB:
        if optimizer.lower_bound or optimizer.upper_bound or not optimizer.bias_correction:
            raise SpecError(
                "LAMB can run on the servers only with bias_correction=True and without lower_bound and upper_bound"
            )
        betas = float(optimizer.beta1), float(optimizer.beta2)
        return LAMB(lr=rate, betas=betas, eps=float(optimizer.epsilon), weight_decay=decay, schedule=schedule)
    raise SpecError(
        f"the servers have no {kind.__module__}.{kind.__name__}: use SGD, NAG, Adam or LAMB of mxnet.optimizer, "
        f"or {_ELSEWHERE}"
    )


def _multipliers(optimizer: Any, key: int | str) -> tuple[float, float]:
    """Return what a key's rate and weight decay are multiplied by, by the rules of Optimizer._get_lrs and _get_wds."""
    by_name = {name: index for index, name in optimizer.idx2name.items()}
    index = by_name.get(key, key)
    if index in optimizer.param_dict:
        parameter = optimizer.param_dict[index]
        return float(parameter.lr_mult), float(parameter.wd_mult)
    name = optimizer.idx2name.get(index, key)
    rate, decay = (
        float(table[index] if index in table else table.get(name, 1.0))
        for table in (optimizer.lr_mult, optimizer.wd_mult)
    )
    return rate, decay


def schedule_of(scheduler: Any) -> Schedule:
    """Return a scheduler of mxnet.lr_scheduler as a description; its rate at update n is that at version n - 1.

    Raises
    ------
    SpecError
        it cannot be described.

    """
    kind, base = type(scheduler), scheduler.base_lr
    if scheduler.warmup_steps and scheduler.warmup_final_lr != base:
        raise SpecError(
            f"the learning-rate schedule's warm-up ends at {scheduler.warmup_final_lr}, but the optimizer's rate is "
            f"{base}: give the schedule base_lr={base}"
        )
    warmup: dict[str, Any] = {
        "warmup": scheduler.warmup_steps,
        "warmup_begin": float(scheduler.warmup_begin_lr / base) if base else 0.0,
        "warmup_flat": scheduler.warmup_mode == "constant",
    }
    names = mx.lr_scheduler
    if kind in (names.FactorScheduler, names.MultiFactorScheduler):
        if scheduler.count:
            raise SpecError("the learning-rate schedule has been used already: give the optimizer a new one")
        # MXNet counts these from the first update, not from the end of the warm-up
        if kind is names.MultiFactorScheduler:
            return Milestones(at=tuple(scheduler.step), by=float(scheduler.factor), counts_warmup=True, **warmup)
        floor = float(scheduler.stop_factor_lr / base) if base else 0.0
        return StepDecay(every=scheduler.step, by=float(scheduler.factor), floor=floor, counts_warmup=True, **warmup)
    if kind in (names.PolyScheduler, names.CosineScheduler):
        base = scheduler.base_lr_orig
        floor = float(scheduler.final_lr / base) if base else 0.0
        if kind is names.CosineScheduler:
            return Cosine(over=scheduler.max_steps, floor=floor, begin=1, **warmup)
        return Polynomial(over=scheduler.max_steps, power=float(scheduler.power), floor=floor, begin=1, **warmup)
    raise SpecError(
        f"the servers have no {kind.__module__}.{kind.__name__}: use FactorScheduler, MultiFactorScheduler, "
        f"PolyScheduler or CosineScheduler, or {_ELSEWHERE}"
    )
