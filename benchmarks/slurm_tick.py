"""What a tick costs on a large Slurm.

    python benchmarks/slurm_tick.py [--nodes 5000] [--jobs 250] [--tasks 8] [--ticks 30]
    python benchmarks/slurm_tick.py --real --nodes 200 --jobs 125 [--poll 15]

Fakes of squeue, sinfo and scontrol on PATH answer as Slurm does: --jobs elastic jobs, each with an anchor and --tasks
running tasks, on --nodes nodes. Whole ticks with the store in a file (SQLite) are measured: most are quiet, every fifth
one asks the policy (drf) again. Printed are the median and the maximum of wall time, CPU time of the process, and CPU
time of its children, which with fakes is only that of sed. The budget of a tick is 2 s.

With --real, a private slurmctld and --nodes slurmds on this machine (root; see tests/slurm_cluster.py) run an anchor
for each job and all tasks, which dl2d's own ticks have started; they sleep. Then follow two periods of --ticks times
--poll seconds, one without ticks and one with a tick every --poll seconds. Printed are also the seconds of each
command's calls, and of both periods the RPCs of sdiag with their mean time in slurmctld, and the CPU time of slurmctld.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import psutil
import structlog
from harness import options_of, show

from dl2d.core.cluster import TaskState
from dl2d.core.jobs import JobKey, JobState, Launch, Owner, Progress, Role
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange, TaskChange
from dl2d.core.task_starts_and_stops import Start
from dl2d.store import schema_version
from dl2d.store.sql_store import SqlStore
from dl2d.testing import make_job
from dl2d.tick.tick import tick
from dl2d.tick.tick_state import TickState
from dl2d_slurm.commands.command_records import format_option
from dl2d_slurm.jobs.squeue_jobs import JOB_FIELDS
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.nodes.sinfo_nodes import NODE_FIELDS
from dl2d_slurm.settings import SlurmSettings

# isort: split
from slurm_cluster import SlurmCluster
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


@dataclass(frozen=True, slots=True)
class Cost:
    """What a tick took, in seconds."""

    decided: bool
    wall: float
    cpu: float
    children: float


class Ticks:
    """Whole ticks on a manager, one after the other."""

    def __init__(
        self, manager: SlurmManager, store: SqlStore, cluster: str, slot_seconds: float, timer: Callable[[], float]
    ) -> None:
        self.store = store
        #: Nodes that the last tick saw.
        self.nodes = 0
        self._state = TickState()
        self._context = replace(context_of(manager, store, timer), cluster=cluster, slot_seconds=slot_seconds)

    def run(self, at: float) -> Cost:
        """Run a tick at a time, after the coordinators of all jobs have called."""
        for job in self.store.jobs(live=True):
            version = job.progress.version + 1
            self.store.report_progress(job.key, Progress(at=at, version=version, epoch=version / 1000))
        wall, cpu, children = time.perf_counter(), time.process_time(), children_seconds()
        self._state, report = tick(self._context, self._state)
        cost = Cost(
            report.decided,
            time.perf_counter() - wall,
            time.process_time() - cpu,
            children_seconds() - children,
        )
        self.nodes = len(report.snapshot.nodes)
        return cost

    def confirmed(self) -> int:
        """Return how many tasks run."""
        return sum(task.state is TaskState.CONFIRMED for task in self.store.tasks(live=True))


def children_seconds() -> float:
    """CPU time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summary(costs: Iterable[Cost]) -> dict[str, dict[str, list[float]]]:
    """Median and maximum of the costs of ticks, by kind."""
    costs = list(costs)
    kinds = {
        "quiet": [cost for cost in costs if not cost.decided],
        "deciding": [cost for cost in costs if cost.decided],
    }
    return {
        f"{kind}_median_max_seconds": {
            name: [median(values), max(values)]
            for name in ("wall", "cpu", "children")
            for values in [[getattr(cost, name) for cost in found]]
        }
        for kind, found in kinds.items()
        if found
    }


def add_job(store: SqlStore, key: JobKey, tasks: int, owner: Owner, launch: Launch) -> None:
    """Add a running elastic job that can have so many tasks."""
    job = make_job(worker=DEMAND, ps=DEMAND, max_workers=tasks // 2, max_ps=tasks // 2)
    store.add_job(replace(job, key=key, owner=owner, launch=launch, anchor=key.id))
    store.change_job(key, JobChange(state=JobState.RUNNING, address="127.0.0.1:1"), 1.0)


def open_store(folder: Path) -> SqlStore:
    url = f"sqlite:///{folder}/store.sqlite"
    schema_version.upgrade(url)
    return SqlStore(url)


def measure_fakes(nodes: int, jobs: int, tasks: int, ticks: int) -> None:
    """Measure ticks with fakes of Slurm's commands."""
    with tempfile.TemporaryDirectory(prefix="dl2d-bench-") as name, closing(open_store(Path(name))) as store:
        folder, clock = Path(name), Clock()
        keys = [JobKey("fake", str(number), 1_795_253_932) for number in range(1, jobs + 1)]
        for key in keys:
            add_job(store, key, tasks, Owner("alice", 1001, 1002), Launch(("train",), "/"))
        roles = [Role.WORKER, Role.PS] * (tasks // 2)
        starts = [
            Start(key, role, f"n{1 + (place * tasks + number) % nodes}", DEMAND)
            for place, key in enumerate(keys)
            for number, role in enumerate(roles)
        ]
        rows = [job_row(int(key.id)) for key in keys]
        used: dict[str, int] = {}
        changes = []
        for handle, task in enumerate(store.ask_tasks(starts, 1.0), start=jobs + 1):
            changes.append(TaskChange(task.job, task.id, TaskState.CONFIRMED, handle=str(handle)))
            allocated = "cpu=1,mem=50M,node=1,billing=1"
            rows.append(job_row(handle, Comment=task.tag, NodeList=task.node, **{"tres-alloc": allocated}))
            used[task.node] = used.get(task.node, 0) + 1
        store.change_tasks(changes, 1.0)
        node_rows = [
            node_row(f"n{number}", CPUsState=f"{busy}/{8 - busy}/0/8", AllocMem=str(50 * busy))
            for number in range(1, nodes + 1)
            for busy in [used.get(f"n{number}", 0)]
        ]
        write_fake(folder / "squeue", JOB_FIELDS, rows)
        write_fake(folder / "sinfo", NODE_FIELDS, node_rows)
        write_fake(folder / "scontrol", (), ())
        environ = {"PATH": f"{folder}:/usr/bin:/bin"}
        manager = SlurmManager(
            SlurmSettings.parse({"cluster": "fake"}), clock=clock, timer=clock.timer, environ=environ, uid=0
        )
        with closing(manager):
            measured = Ticks(manager, store, "fake", DECIDING * POLL_SECONDS, clock.timer)
            costs = []
            for _ in range(1 + ticks):
                clock.now += POLL_SECONDS
                costs.append(measured.run(clock.now))
            calls = manager.call_statistics().calls
        assert measured.nodes == nodes, f"{measured.nodes} nodes are listed"
        assert measured.confirmed() == jobs * tasks, "tasks were started or stopped"
        show(
            slurm="fakes", nodes=nodes, jobs=jobs, tasks=jobs * tasks, budget_seconds=BUDGET_SECONDS,
            first_seconds=costs[0].wall, ticks=ticks, **summary(costs[1:]), calls=dict(calls),
            load_average=os.getloadavg()[0],
        )  # fmt: skip


def measure_slurm(nodes: int, jobs: int, tasks: int, ticks: int, poll: float) -> None:
    """Measure ticks with a private Slurm, and what slurmctld does without and with them."""
    began = time.monotonic()
    cluster = SlurmCluster(nodes=nodes, gpus=0, extra="SlurmdTimeout=3600\nMessageTimeout=60\nMaxJobCount=20000")
    with cluster, closing(open_store(cluster.directory)) as store:
        started = time.monotonic() - began
        settings = SlurmSettings.parse(
            {"munge_socket": str(cluster.munge_socket), "rpcs_per_minute": 1_000_000, "submit_rate_per_second": 1000}
        )
        environ = {"PATH": cluster.manager_path, "SLURM_CONF": str(cluster.conf)}
        with closing(SlurmManager(settings, clock=time.time, environ=environ, uid=0)) as manager:
            measured = Ticks(manager, store, cluster.name, DECIDING * poll, time.monotonic)
            fill(cluster, measured, jobs, tasks)
            filled = time.monotonic() - began - started
            without = period(cluster, lambda: time.sleep(ticks * poll))
            before, costs = manager.call_statistics(), []

            def run_ticks() -> None:
                first = time.monotonic()
                for number in range(1, ticks + 1):
                    costs.append(measured.run(time.time()))
                    time.sleep(max(0.0, first + number * poll - time.monotonic()))

            with_ticks = period(cluster, run_ticks)
            after = manager.call_statistics()
        assert measured.nodes == nodes, f"{measured.nodes} nodes are listed"
        assert measured.confirmed() == jobs * tasks, "tasks were started or stopped"
    calls = {name: after.calls[name] - before.calls.get(name, 0) for name in after.calls}
    show(
        slurm="real", nodes=nodes, jobs=jobs, tasks=jobs * tasks, budget_seconds=BUDGET_SECONDS,
        start_seconds=started, fill_seconds=filled, ticks=ticks, poll_seconds=poll, **summary(costs),
        calls={
            name: {"calls": count, "mean_seconds": (after.seconds[name] - before.seconds.get(name, 0.0)) / count}
            for name, count in calls.items() if count
        },
        slurmctld={"without": without, "with": with_ticks}, load_average=os.getloadavg()[0],
    )  # fmt: skip


def fill(cluster: SlurmCluster, measured: Ticks, jobs: int, tasks: int) -> None:
    """Submit the anchors, and tick until all tasks run."""
    for _ in range(jobs):
        sleeping = ("--cpus-per-task=1", "--mem=50", "--time=600", "--output=/dev/null", "--wrap=exec sleep 100000")
        cluster.run("sbatch", *sleeping)
    times = {**cluster.env(), "SLURM_TIME_FORMAT": "%s"}
    listed = cluster.run("squeue", "--noheader", "--format=%i %V", env=times).stdout
    runner = cluster.directory / "tasks" / "dl2-run"
    runner.parent.mkdir()
    runner.write_text('#!/bin/sh\nexec "$@"\n')
    runner.chmod(0o755)
    launch = Launch(("sleep", "100000"), str(runner.parent), (("PATH", f"{runner.parent}:/usr/bin:/bin"),))
    for line in listed.splitlines():
        number, submitted = line.split()
        key = JobKey(cluster.name, number, int(submitted))
        add_job(measured.store, key, tasks, Owner("root", 0, 0), launch)
    deadline = time.monotonic() + 1200
    while measured.confirmed() < jobs * tasks:
        assert time.monotonic() < deadline, f"{measured.confirmed()} tasks run after 20 minutes"
        measured.run(time.time())
        granted = [task for task in measured.store.tasks(live=True) if task.state is TaskState.GRANTED]
        joined = [TaskChange(task.job, task.id, TaskState.CONFIRMED) for task in granted]
        measured.store.change_tasks(joined, time.time())
        time.sleep(2.0)


def period(cluster: SlurmCluster, work: Callable[[], object]) -> dict[str, object]:
    """What slurmctld does while ``work`` runs."""
    controller = psutil.Process(int((cluster.directory / "run" / "slurmctld.pid").read_text()))
    cluster.run("sdiag", "--reset")
    used = controller.cpu_times()
    began = time.monotonic()
    work()
    now, said = controller.cpu_times(), cluster.run("sdiag").stdout
    by_type = said.partition("statistics by message type")[2].partition("Remote Procedure Call statistics by user")[0]
    found = re.findall(r"(\w+)\s*\(\s*\d+\)\s*count:(\d+)\s+ave_time:(\d+)\s+total_time:(\d+)", by_type)
    # sdiag counts itself.
    rpcs = {name: [int(count), int(mean) / 1e6] for name, count, mean, _ in found if "STATS" not in name}
    return {
        "seconds": time.monotonic() - began,
        "cpu_seconds": now.user + now.system - used.user - used.system,
        "rpcs_count_mean_seconds": rpcs,
    }


def write_fake(program: Path, fields: tuple[str, ...], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a program that prints rows with the fields that it is asked for, and nothing if it is asked otherwise."""
    columns = [column.partition(":") for column in format_option(fields, WORD).partition("=")[2].split(",")]
    with program.with_name(f"{program.name}.rows").open("w") as file:
        file.writelines("".join(f"{row.get(name, '')}{end}" for name, _, end in columns) + "\n" for row in rows)
    program.write_text(FAKE.format(word=WORD))
    program.chmod(0o755)


def main() -> None:
    options = options_of(__doc__, real=False, nodes=5000, jobs=250, tasks=8, ticks=30, poll=POLL_SECONDS)
    # A line for each task would hide the results.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    if options.real:
        measure_slurm(options.nodes, options.jobs, options.tasks, options.ticks, options.poll)
    else:
        measure_fakes(options.nodes, options.jobs, options.tasks, options.ticks)


if __name__ == "__main__":
    main()
