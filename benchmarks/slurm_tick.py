"""What a tick costs on a large Slurm.

    python benchmarks/slurm_tick.py [--nodes 5000] [--jobs 250] [--tasks 8] [--ticks 30]

Fakes of squeue, sinfo and scontrol on PATH answer as Slurm does: --jobs elastic jobs, each with an anchor and --tasks
running tasks, on --nodes nodes. Whole ticks with the store in a file (SQLite) are measured: most are quiet, every fifth
one asks the policy (drf) again. Printed are the median and the maximum of wall time and of CPU time of the process. The
budget of a tick is 2 s.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import structlog
from harness import options_of, show

from dl2d.core.cluster import TaskState
from dl2d.core.jobs import JobKey, JobState, Launch, Owner, Progress, Role
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange, TaskChange
from dl2d.store import schema_version
from dl2d.store.sql_store import SqlStore
from dl2d.testing import make_job
from dl2d.tick.tick import tick
from dl2d.tick.tick_state import TickState
from dl2d_slurm.commands.squeue_and_sinfo_records import format_option
from dl2d_slurm.jobs.squeue_jobs import JOB_FIELDS
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.nodes.sinfo_nodes import NODE_FIELDS
from dl2d_slurm.settings import SlurmSettings

# isort: split
from slurm_fakes import Clock, context_of, job_row, node_row

BUDGET_SECONDS = 2.0
POLL_SECONDS = 15.0
#: In every fifth tick the policy is asked.
DECIDING = 5
DEMAND = Resources.of(cpu=1, memory=50)
#: In place of the word that ends a record, which is another one in each query.
WORD = "%WORD%"
FAKE = """#!/bin/sh
for last; do :; done
case $last in --Format=*) exec sed "s/{word}/${{last##*|}}/g" "$0.rows" ;; esac
"""


def fill(store: SqlStore, folder: Path, nodes: int, jobs: int, tasks: int) -> None:
    """Add running jobs, each with so many tasks, and write the fakes of Slurm's commands that list them."""
    keys = [JobKey("fake", str(number), 1_795_253_932) for number in range(1, jobs + 1)]
    for key in keys:
        job = make_job(worker=DEMAND, ps=DEMAND, max_workers=tasks // 2, max_ps=tasks // 2)
        store.add_job(
            replace(job, key=key, owner=Owner("alice", 1001, 1002), launch=Launch(("train",), "/"), anchor=key.id)
        )
        store.change_job(key, JobChange(state=JobState.RUNNING, address="127.0.0.1:1"), 1.0)
    starts = [
        Start(key, role, f"n{1 + (place * tasks + number) % nodes}", DEMAND)
        for place, key in enumerate(keys)
        for number, role in enumerate([Role.WORKER, Role.PS] * (tasks // 2))
    ]
    rows = [job_row(int(key.id)) for key in keys]
    used = Counter[str]()
    changes = []
    for handle, task in enumerate(store.ask_tasks(starts, 1.0), start=jobs + 1):
        changes.append(TaskChange(task.job, task.id, TaskState.CONFIRMED, handle=str(handle)))
        allocated = "cpu=1,mem=50M,node=1,billing=1"
        rows.append(job_row(handle, Comment=task.tag, NodeList=task.node, **{"tres-alloc": allocated}))
        used[task.node] += 1
    store.change_tasks(changes, 1.0)
    node_rows = [
        node_row(name, CPUsState=f"{used[name]}/{8 - used[name]}/0/8", AllocMem=str(50 * used[name]))
        for name in (f"n{number}" for number in range(1, nodes + 1))
    ]
    write_fake(folder / "squeue", JOB_FIELDS, rows)
    write_fake(folder / "sinfo", NODE_FIELDS, node_rows)
    write_fake(folder / "scontrol", (), ())


def measure(nodes: int, jobs: int, tasks: int, ticks: int) -> None:
    """Fill a store and measure ticks on it, each after the coordinators of all jobs have called."""
    with tempfile.TemporaryDirectory(prefix="dl2d-bench-") as name, ExitStack() as stack:
        folder, clock, url = Path(name), Clock(), f"sqlite:///{name}/store.sqlite"
        schema_version.upgrade(url)
        store = stack.enter_context(closing(SqlStore(url)))
        fill(store, folder, nodes, jobs, tasks)
        settings, environ = SlurmSettings.parse({"cluster": "fake"}), {"PATH": f"{folder}:/usr/bin:/bin"}
        manager = SlurmManager(settings, clock=clock, timer=clock.timer, environ=environ, uid=0)
        stack.enter_context(closing(manager))
        slot_seconds = DECIDING * POLL_SECONDS
        context = replace(context_of(manager, store, clock.timer), cluster="fake", slot_seconds=slot_seconds)
        state, first = TickState(), 0.0
        costs: dict[str, list[tuple[float, float]]] = {"quiet": [], "deciding": []}
        for number in range(1 + ticks):
            clock.now += POLL_SECONDS
            for job in store.jobs(live=True):
                version = job.progress.version + 1
                store.report_progress(job.key, Progress(at=clock.now, version=version, epoch=version / 1000))
            wall, cpu = time.perf_counter(), time.process_time()
            state, report = tick(context, state)
            cost = time.perf_counter() - wall, time.process_time() - cpu
            assert len(report.snapshot.nodes) == nodes, f"{len(report.snapshot.nodes)} nodes are listed"
            if number:
                costs["deciding" if report.decided else "quiet"].append(cost)
            else:
                first = cost[0]
        confirmed = sum(task.state is TaskState.CONFIRMED for task in store.tasks(live=True))
        assert confirmed == jobs * tasks, "tasks were started or stopped"
        show(
            nodes=nodes, jobs=jobs, tasks=jobs * tasks, budget_seconds=BUDGET_SECONDS, first_seconds=first, ticks=ticks,
            median_max_seconds={
                f"{kind}_{what}": [median(values), max(values)]
                for kind, found in costs.items()
                for what, values in zip(("wall", "cpu"), zip(*found, strict=True), strict=False)
            },
            calls=dict(manager.call_statistics().calls), load_average=os.getloadavg()[0],
        )  # fmt: skip


def write_fake(program: Path, fields: tuple[str, ...], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a program that prints rows with the fields that it is asked for, and nothing if it is asked otherwise."""
    columns = [column.partition(":") for column in format_option(fields, WORD).partition("=")[2].split(",")]
    with program.with_name(f"{program.name}.rows").open("w") as file:
        file.writelines("".join(f"{row.get(name, '')}{end}" for name, _, end in columns) + "\n" for row in rows)
    program.write_text(FAKE.format(word=WORD))
    program.chmod(0o755)


def main() -> None:
    options = options_of(__doc__, nodes=5000, jobs=250, tasks=8, ticks=30)
    # A line for each task would hide the results.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    measure(options.nodes, options.jobs, options.tasks, options.ticks)


if __name__ == "__main__":
    main()
