"""Options for the imperfections of real clusters (noise, costs, failures), all off by default.

docs/simulator.md has the table of options with units, the values of the preset ``realistic`` and where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from dl2d.simulation.parse_key_value_options import Options, within

_MAX_VALUE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Realism(Options):
    """Options of the simulated cluster; made with nothing, none has any effect."""

    #: Seconds from asking for a task until it takes part. Until then its job trains with the tasks it had.
    start_seconds: float = within(0.0, 0.0, _MAX_VALUE)
    #: Seconds that a running job stands still for each task that joins or leaves it.
    join_seconds: float = within(0.0, 0.0, _MAX_VALUE)
    #: Seconds that it stands still for each MB (10^6 bytes) of parameters that changes its server.
    move_seconds_per_mb: float = within(0.0, 0.0, _MAX_VALUE)
    #: MB of parameters of a model for which the workload does not tell.
    model_mb: float = within(100.0, 1e-6, _MAX_VALUE)
    #: Seconds that a job stands still when its tasks change, where it has to be ended and started from a checkpoint;
    #: instead of ``join_seconds`` and ``move_seconds_per_mb``. 0: jobs are resized while they run.
    restart_seconds: float = within(0.0, 0.0, _MAX_VALUE)
    #: Speed of a job in a slot: x U(1 - s, 1 + s).
    speed_noise: float = within(0.0, 0.0, 0.99)
    #: Speed of a job for its whole life: x lognormal of mean 1, standard deviation of the logarithm.
    job_spread: float = within(0.0, 0.0, 2.0)
    #: Declared epochs = real epochs x U(1 - e, 1 + e), in place of the workload's.
    declared_error: float = within(0.0, 0.0, 0.99)
    #: Share of jobs whose users say that they are of another type, any of the workload's.
    wrong_labels: float = within(0.0, 0.0, 1.0)
    #: Jobs report losses; an epoch lowers the loss by less than this part of the first loss from the real end on.
    #: 0: no losses.
    loss_threshold: float = within(0.0, 0.0, 0.5)
    #: A reported loss: x (1 + N(0, s)), not below 0.
    loss_noise: float = within(0.0, 0.0, 1.0)
    #: Share of reports in which the loss is 1.5 to 3 times too large.
    loss_outliers: float = within(0.0, 0.0, 0.5)
    #: Share of the communication between two tasks that they are spared where they are on one node.
    locality: float = within(0.0, 0.0, 0.99)
    #: Share of a step that is communication, for models whose speed is a table and does not tell.
    communication: float = within(0.3, 0.0, 1.0)
    #: Share of its speed that a job loses when all its tasks lie on nodes with tasks of other jobs.
    interference: float = within(0.0, 0.0, 0.99)
    #: Probability with which a worker is slow for a slot, and the share of its speed that it then has. Synchronous jobs
    #: go at the pace of the slowest.
    straggler_probability: float = within(0.0, 0.0, 1.0)
    straggler_speed: float = within(0.5, 0.01, 1.0)
    #: Mean time between failures of a node, exponential; 0: none fails. And how long it is down.
    node_mtbf_hours: float = within(0.0, 0.0, _MAX_VALUE)
    node_repair_hours: float = within(4.0, 0.0, _MAX_VALUE)
    #: Seconds that a job stands still when a node under it fails, to the end of the slot at most; then it goes on with
    #: the tasks that are left.
    failure_seconds: float = within(_MAX_VALUE, 0.0, _MAX_VALUE)


#: The preset ``realistic``; every value with its source in docs/simulator.md.
REALISTIC = Realism(
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
