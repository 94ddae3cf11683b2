"""``dl2d report``: what a job used, summed over all its tasks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dl2d.cli.daemon_access.job_views_from_store_or_api import job_source
from dl2d.cli.output import moment, print_json, print_tables, print_text, table
from dl2d.cli.shared_options import ConfigOption, JobArgument, JsonOption
from dl2d.config.settings import DEFAULT_PATH
from dl2d.core.jobs import Role
from dl2d.core.store import TaskTime

_HOUR = 3600.0
_MEMORY = "memory"
_MIB_PER_GIB = 1024.0


@dataclass(frozen=True, slots=True)
class Use:
    """What some tasks held."""

    tasks: int
    #: Hours that they held their resources, in all.
    task_hours: float
    #: By resource, the amount times the hours; memory in GiB.
    resource_hours: dict[str, float]


def report(job: JobArgument, as_json: JsonOption = False, config: ConfigOption = DEFAULT_PATH) -> None:
    """Say what a job used until now: hours of all tasks that it has or had, times the resources of each.

    All runs of a requeued job are summed; if JOB is cluster.id.submitted, only that run counts.
    """
    with job_source(config) as source:
        used = source.views.usage(job)
    chosen, times = used.job, used.times
    now = time.time()
    by_role = {str(role): use_of((each for each in times if each.task.role is role), now) for role in Role}
    total = use_of(times, now)
    if as_json:
        said = {"job": chosen.key.slug, "id": chosen.key.id, "name": chosen.request.name, "user": chosen.owner.user}
        roles = {role: _as_json(use) for role, use in by_role.items() if use.tasks}
        print_json({**said, "state": chosen.state, "runs": used.runs, "roles": roles, "all": _as_json(total)})
        return
    ended = f", ended {moment(chosen.ended_at)}" if chosen.state.ended else ""
    runs = f"; {used.runs} runs" if used.runs > 1 else ""
    print_text(f"job {chosen.key.id} ({chosen.request.name}) of {chosen.owner.user}: {chosen.state}{ended}{runs}")
    if not times:
        print_text("none of its tasks has run")
        return
    names = sorted(total.resource_hours)
    rows = [_row(role, use, names) for role, use in by_role.items() if use.tasks] + [_row("all", total, names)]
    print_tables(table(("ROLE", ">TASKS", ">TASK-HOURS", *(f">{_unit(name)}" for name in names)), rows))


def use_of(times: Iterable[TaskTime], now: float) -> Use:
    """What tasks held until their end, or until ``now``."""
    count, hours = 0, 0.0
    by_resource: dict[str, float] = {}
    for each in times:
        held = max(0.0, (now if each.ended_at is None else each.ended_at) - each.granted_at) / _HOUR
        count, hours = count + 1, hours + held
        for name, amount in each.task.demand.as_dict().items():
            unit = _MIB_PER_GIB if name == _MEMORY else 1.0
            by_resource[name] = by_resource.get(name, 0.0) + amount / unit * held
    return Use(count, hours, by_resource)


def _unit(name: str) -> str:
    return "MEMORY-GIB-HOURS" if name == _MEMORY else f"{name.upper()}-HOURS"


def _row(role: str, use: Use, names: Sequence[str]) -> tuple[str, ...]:
    return (
        role,
        str(use.tasks),
        f"{use.task_hours:.2f}",
        *(f"{use.resource_hours.get(name, 0.0):.2f}" for name in names),
    )


def _as_json(use: Use) -> dict[str, object]:
    hours = {f"{name}_gib_hours" if name == _MEMORY else f"{name}_hours": use.resource_hours[name]
             for name in sorted(use.resource_hours)}  # fmt: skip
    return {"tasks": use.tasks, "task_hours": use.task_hours, **hours}
