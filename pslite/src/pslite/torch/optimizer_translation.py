"""Torch's optimizers as the descriptions that servers run, for trainers that make their optimizer themselves.

What a description cannot say is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pslite.errors import SpecError
from pslite.job.job_spec import SGD, Adam, Descent
from pslite.job.learning_rates import Schedule
from pslite.torch.parameters import Group


def groups_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule) -> list[Group]:
    """Return what an optimizer does with a model's parameters, one group for each of its own.

    Raises
    ------
    SpecError
        servers cannot do that.

    """
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in given:
            raise SpecError(
                f"parameter {name} is in no group of the optimizer: add it, or set its requires_grad to False"
            )
    return [
        Group(
            [parameter for parameter in group["params"] if parameter.requires_grad], _rule(optimizer, group, schedule)
        )
        for group in optimizer.param_groups
    ]


def _rule(optimizer: torch.optim.Optimizer, group: dict[str, Any], schedule: Schedule) -> Descent:
    kind = type(optimizer)
    used = [name for name in ("amsgrad", "maximize", "dampening") if group.get(name)]
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) or used:
        what = f"{kind.__name__} with {used[0]}" if used else f"{kind.__module__}.{kind.__name__}"
        raise SpecError(f"the job has no {what}: use SGD, Adam or AdamW of torch.optim, or give optimizer=")
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    if kind is torch.optim.SGD:
        momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
        return SGD(lr=rate, momentum=momentum, nesterov=nesterov, weight_decay=decay, schedule=schedule)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    return Adam(
        lr=rate,
        betas=(beta1, beta2),
        eps=float(group["eps"]),
        weight_decay=decay,
        decoupled=decoupled,
        schedule=schedule,
    )


class PlaceholderOptimizer(torch.optim.Optimizer):
    """Stands where a trainer wants an optimizer: it has the parameters and their rates, and changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([{"params": group["params"], "lr": group["lr"]} for group in optimizer.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing: the job has done it."""
        return None if closure is None else closure()
