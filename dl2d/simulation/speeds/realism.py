"""Options for the imperfections of real clusters (noise, costs, failures), all off by default.

docs/simulator.md has the table of options with units, the values of the preset ``realistic`` and where they come from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from dl2d.core.errors import WorkloadError
from dl2d.core.wording import did_you_mean, shown

_LONGEST: Final = 1e9
#: Largest value of each option where that is not ``_LONGEST``; a share that must stay below 1 has 0.99.
_MOST: Final[Mapping[str, float]] = {
    "speed_noise": 0.99,
    "job_spread": 2.0,
    "declared_error": 0.99,
    "wrong_labels": 1.0,
    "loss_threshold": 0.5,
    "loss_noise": 1.0,
    "loss_outliers": 0.5,
    "locality": 0.99,
    "communication": 1.0,
    "interference": 0.99,
    "straggler_probability": 1.0,
    "straggler_speed": 1.0,
}
#: Smallest value of each option where that is not 0.
_LEAST: Final[Mapping[str, float]] = {"model_mb": 1e-6, "straggler_speed": 0.01, "node_repair_hours": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Realism:
    """Options of the simulated cluster; made with nothing, none has any effect.

    Raises
    ------
    WorkloadError
        A value is out of bounds; names the option.
    """

    #: Seconds from asking for a task until it takes part. Until then its job trains with the tasks it had.
    start_seconds: float = 0.0
    #: Seconds that a running job stands still for each task that joins or leaves it.
    join_seconds: float = 0.0
    #: Seconds that it stands still for each MB (10^6 bytes) of parameters that changes its server.
    move_seconds_per_mb: float = 0.0
    #: MB of parameters of a model for which the workload does not tell.
    model_mb: float = 100.0
    #: Seconds that a job stands still when its tasks change, where it has to be ended and started from a checkpoint;
    #: instead of ``join_seconds`` and ``move_seconds_per_mb``. 0: jobs are resized while they run.
    restart_seconds: float = 0.0
    #: Speed of a job in a slot: x U(1 - s, 1 + s).
    speed_noise: float = 0.0
    #: Speed of a job for its whole life: x lognormal of mean 1, standard deviation of the logarithm.
    job_spread: float = 0.0
    #: Declared epochs = real epochs x U(1 - e, 1 + e), in place of the workload's.
    declared_error: float = 0.0
    #: Share of jobs whose users say that they are of another type, any of the workload's.
    wrong_labels: float = 0.0
    #: Jobs report losses; an epoch lowers the loss by less than this part of the first loss from the real end on.
    #: 0: no losses.
    loss_threshold: float = 0.0
    #: A reported loss: x (1 + N(0, s)), not below 0.
    loss_noise: float = 0.0
    #: Share of reports in which the loss is 1.5 to 3 times too large.
    loss_outliers: float = 0.0
    #: Share of the communication between two tasks that they are spared where they are on one node.
    locality: float = 0.0
    #: Share of a step that is communication, for models whose speed is a table and does not tell.
    communication: float = 0.3
    #: Share of its speed that a job loses when all its tasks lie on nodes with tasks of other jobs.
    interference: float = 0.0
    #: Probability with which a worker is slow for a slot, and the share of its speed that it then has. Synchronous jobs
    #: go at the pace of the slowest.
    straggler_probability: float = 0.0
    straggler_speed: float = 0.5
    #: Mean time between failures of a node, exponential; 0: none fails. And how long it is down.
    node_mtbf_hours: float = 0.0
    node_repair_hours: float = 4.0
    #: Seconds that a job stands still when a node under it fails, to the end of the slot at most; then it goes on with
    #: the tasks that are left.
    failure_seconds: float = _LONGEST

    def __post_init__(self) -> None:
        for name in option_names():
            value = getattr(self, name)
            least, most = _LEAST.get(name, 0.0), _MOST.get(name, _LONGEST)
            if not least <= value <= most:
                raise WorkloadError(name, f"expected a number from {least:g} to {most:g}, got {shown(value)}")

    def with_options(self, given: Mapping[str, str]) -> Realism:
        """This record with options as users write them.

        Raises
        ------
        WorkloadError
            An option is unknown, or its value is no number or out of bounds; names it.
        """
        known = option_names()
        values: dict[str, float] = {}
        for name, text in given.items():
            if name not in known:
                hint = did_you_mean(name, known)
                raise WorkloadError(name, f"there is no such option{hint}; there are {', '.join(sorted(known))}")
            try:
                values[name] = float(text)
            except ValueError:
                raise WorkloadError(name, f"expected a number, got {shown(text)}") from None
            if not math.isfinite(values[name]):
                raise WorkloadError(name, f"expected a number, got {shown(text)}")
        return replace(self, **values)


def option_names() -> tuple[str, ...]:
    """All options, as users write them."""
    return tuple(field.name for field in dataclasses.fields(Realism))


#: The preset ``realistic``; every value with its source in docs/simulator.md.
REALISTIC: Final = Realism(
    start_seconds=8.0,
    join_seconds=0.01,
    move_seconds_per_mb=0.0026,
    speed_noise=0.05,
    job_spread=0.05,
    declared_error=0.2,
    loss_threshold=0.001,
    loss_noise=0.02,
    loss_outliers=0.02,
    locality=0.8,
    communication=0.5,
    interference=0.2,
    straggler_probability=0.01,
    straggler_speed=0.5,
    node_mtbf_hours=3692.0,
    node_repair_hours=4.0,
    failure_seconds=10.0,
)
