"""A Slurm with accounting as sites run it: elastic jobs under limits beside rigid jobs, faults, and users' commands.

Three users have elastic jobs in a QOS with limits, two have rigid jobs, and jobs of an urgent QOS preempt all others.
The daemon is killed and slurmctld restarted, nodes fail, and users cancel, requeue, suspend and change their own jobs.
Slurm itself says what happened: its queue, looked at once a second, and its accounting at the end.

    pytest tests/end_to_end/test_slurm_mixed_load.py -k short -s

``DL2D_FAULT_SEED`` repeats the order of the events (not their effects: processes are never the same twice), and
``DL2D_FAULT_SECONDS`` says within how many seconds they happen.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from daemon_process import DaemonProcess
from end_to_end.test_slurm_cluster import static_digest
from slurm_accounting import AccountingCluster, why_not
from slurm_cluster import User, why_no_cgroups

from dl2d.core.cluster import parse_tag
from dl2d.core.jobs import JobState

WORKER = Path(__file__).parent.parent / "pslite" / "numpy_worker.py"
SEED = int(os.environ.get("DL2D_FAULT_SEED", str(time.time_ns() % 1_000_000)))
WHY_NOT = why_not() or why_no_cgroups()

#: Beyond these times, in seconds in which daemon and slurmctld answer, a task job without its anchor is an orphan, and
#: one with a node that waits for a limit was not withdrawn. While a coordinator is silent, its job keeps what was asked
#: for: in the hour, with the daemon killed each minute, two tasks of such a job waited for 67 s until they were
#: withdrawn.
MAX_ORPHAN_SECONDS = 45.0
MAX_LIMIT_SECONDS = 120.0
#: Decoys: comments like dl2d's of jobs that are none of its.
DECOYS = ("", "", "dl2:lab.1.1700000000:worker-0", "dl2:other.7.1700000000:ps-0")
ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                   "PREEMPTED", "TIMEOUT"})  # fmt: skip

PREEMPTION = """PreemptType=preempt/qos
PreemptMode=REQUEUE
PriorityType=priority/multifactor
PriorityWeightQOS=10000
PriorityWeightAge=100
SlurmdTimeout=30
AccountingStoreFlags=job_comment"""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything there is."""

    nodes: int
    elastic: int
    rigid: int
    #: How long jobs are submitted and events happen.
    seconds: float
    #: Interval of ticks and of heartbeats.
    poll_seconds: float
    #: How long a job takes at least: of elastic ones each step, of rigid ones all of it.
    step_seconds: float
    rigid_seconds: tuple[float, float]
    #: CPUs that QOS elastic leaves each user, and all of them.
    user_cpus: int
    cpus: int
    #: How often each event happens.
    events: dict[str, int]


SHORT = Size(
    nodes=6, elastic=4, rigid=6, seconds=150, poll_seconds=0.5, step_seconds=0.12, rigid_seconds=(10, 30),
    user_cpus=7, cpus=16,
    events={"kill_daemon": 4, "restart_controller": 2, "crash_node": 1, "lose_slurmd": 1, "submit_urgent": 2,
            "cancel": 2, "cancel_task": 2, "requeue": 2, "suspend": 3, "update": 2, "hold": 2},
)  # fmt: skip
MEDIUM = Size(
    nodes=24, elastic=12, rigid=20, seconds=1200, poll_seconds=2, step_seconds=0.4, rigid_seconds=(20, 120),
    user_cpus=16, cpus=40,
    events={"kill_daemon": 10, "restart_controller": 2, "crash_node": 3, "lose_slurmd": 3, "submit_urgent": 5,
            "cancel": 4, "cancel_task": 8, "requeue": 6, "suspend": 10, "update": 6, "hold": 4},
)  # fmt: skip
FULL = Size(
    nodes=64, elastic=40, rigid=60, seconds=3600, poll_seconds=5, step_seconds=2.0, rigid_seconds=(60, 600),
    user_cpus=48, cpus=120,
    events={"kill_daemon": 60, "restart_controller": 2, "crash_node": 6, "lose_slurmd": 6, "submit_urgent": 10,
            "cancel": 10, "cancel_task": 20, "requeue": 15, "suspend": 30, "update": 20, "hold": 10},
)  # fmt: skip

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "all of it is there"),
]


class Seen(NamedTuple):
    """A job as squeue shows it."""

    id: str
    state: str
    submitted: int
    user: str
    qos: str
    cpus: int
    reason: str
    #: Nodes that it must have; empty for any.
    required_nodes: str
    comment: str

    @property
    def holds_room(self) -> bool:
        return self.state in ("RUNNING", "SUSPENDED")

    @property
    def is_task(self) -> bool:
        """Whether it is a task job of an elastic job."""
        return self.qos == "elastic" and self.comment.startswith("dl2:")


class Accounted(NamedTuple):
    """One run of a job as sacct shows it; times are 0 while there are none."""

    id: str
    state: str
    user: str
    submitted: int
    start: int
    end: int
    comment: str


class QueueWatch(threading.Thread):
    """Looks at Slurm's queue once a second, and notes what must not be."""

    def __init__(self, cluster: AccountingCluster, size: Size) -> None:
        super().__init__(name="queue-watch", daemon=True)
        self.last: Sequence[Seen] = ()
        self.looks = 0
        self.wrong: dict[str, None] = {}
        #: For how many seconds each task job was seen without its anchor, and waiting for a limit.
        self.orphaned: defaultdict[str, float] = defaultdict(float)
        self.limited: defaultdict[str, float] = defaultdict(float)
        #: For how many each task job that may start on any node waited for its turn.
        self.queued: defaultdict[str, float] = defaultdict(float)
        self.most_tasks = 0
        #: Whether the daemon runs: while it does not, nobody ends orphans.
        self.daemon_runs = threading.Event()
        self._cluster = cluster
        self._size = size
        self._ended = threading.Event()

    def run(self) -> None:
        at = time.monotonic()
        while not self._ended.wait(1.0):
            seen = self.look()
            before, at = at, time.monotonic()
            if seen is None:
                continue
            self.last = seen
            self.looks += 1
            self._check(seen, at - before)

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def look(self) -> Sequence[Seen] | None:
        """All jobs in Slurm's queue; None if slurmctld does not answer."""
        command = ("squeue", "-h", "-a", "-t", "all", "-o", "%i|%T|%V|%u|%q|%C|%r|%n|%k")
        ran = self._cluster.run(*command, env={"SLURM_TIME_FORMAT": "%s"}, check=False)
        if ran.status != 0:
            return None
        rows = (line.split("|", 8) for line in ran.stdout.splitlines())
        return [Seen(*row[:2], int(row[2]), *row[3:5], int(row[5]), *row[6:]) for row in rows]

    def _check(self, seen: Sequence[Seen], seconds: float) -> None:
        tasks = [job for job in seen if job.is_task and job.state not in ENDED]
        running = [job for job in tasks if job.holds_room]
        self.most_tasks = max(self.most_tasks, len(running))
        for tag, count in Counter(job.comment for job in running).items():
            if count > 1:
                self.wrong[f"{count} jobs run as {tag} at once"] = None
        used: Counter[str] = Counter()
        for job in seen:
            if job.qos == "elastic" and job.holds_room:
                used[job.user] += job.cpus
        for user, cpus in used.items():
            if cpus > self._size.user_cpus:
                self.wrong[f"user {user} has {cpus} CPUs in QOS elastic"] = None
        if used.total() > self._size.cpus:
            self.wrong[f"QOS elastic has {used.total()} CPUs"] = None
        if not self.daemon_runs.is_set():
            return
        anchors = {(job.id, job.submitted) for job in seen if job.state not in ENDED}
        for job in tasks:
            parsed = parse_tag(job.comment)
            if job.state != "COMPLETING" and (parsed is None or parsed[0][1:] not in anchors):
                self.orphaned[f"{job.id} {job.comment}"] += seconds
            name = f"{job.id} {job.comment}"
            if job.state == "PENDING" and not job.required_nodes:
                self.queued[name] += seconds
            elif job.state == "PENDING" and job.reason.startswith(("QOS", "Assoc")):
                self.limited[name] += seconds


class Site:
    """The cluster with its users, and all that happens to it."""

    def __init__(self, cluster: AccountingCluster, daemon: DaemonProcess, size: Size, watch: QueueWatch) -> None:
        self.cluster = cluster
        self.daemon = daemon
        self.size = size
        self.watch = watch
        self.rng = random.Random(SEED)
        self.elastic: list[str] = []
        #: How long each rigid job takes.
        self.rigid: dict[str, float] = {}
        self.owners: dict[str, User] = {}
        self.cancelled: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._users = [cluster.add_user(name) for name in ("alice", "bob", "carol")]
        self._others = [cluster.add_user(name) for name in ("dave", "erin")]
        self._nodes_down: set[str] = set()
        self._begin = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        cluster.add_python(self._users[0])
        for user in self._users:
            shutil.copy(WORKER.with_name("regression.py"), user.home)
            shutil.copy(WORKER, user.home / "train.py")
        per_user = f"MaxTRESPerUser=cpu={size.user_cpus}"
        cluster.sacctmgr("add", "qos", "elastic", per_user, f"GrpTRES=cpu={size.cpus}")
        cluster.sacctmgr("add", "qos", "urgent", "Priority=1000", "Preempt=elastic,normal")
        for user in self._users:
            cluster.sacctmgr("modify", "user", user.name, "set", "qos+=elastic")
        for user in self._others:
            cluster.sacctmgr("modify", "user", user.name, "set", "qos+=urgent")

    def live_for(self, seconds: float) -> None:
        """Let everything happen that the size says, in an order and at times that the seed gives."""
        plan: list[Callable[[], None]] = []
        for name, count in self.size.events.items():
            plan += [getattr(self, name)] * count
        self.rng.shuffle(plan)
        self._begin = time.monotonic()
        # Most jobs are there before most of the events.
        for number in range(self.size.elastic):
            self._at(self.rng.uniform(0, 0.3) * seconds, partial(self.submit_elastic, number))
        for _ in range(self.size.rigid):
            self._at(self.rng.uniform(0, 0.8) * seconds, self.submit_rigid)
        step = 0.9 * seconds / len(plan)
        for number, event in enumerate(plan):
            self._at(0.1 * seconds + (number + self.rng.random()) * step, event)
        while self._later:
            at, _, happen = heapq.heappop(self._later)
            while (wait := self._begin + at - time.monotonic()) > 0:
                self._begin_requeued()
                time.sleep(min(wait, 1.0))
            happen()

    def wait_for_end(self, timeout: float) -> None:
        """Wait until no job is left."""
        deadline = time.monotonic() + timeout
        while (seen := self.watch.look()) is None or any(job.state not in ENDED for job in seen):
            if time.monotonic() > deadline:
                pytest.fail(f"seed {SEED}: not ended: {seen}\n{self.daemon.said(100)}")
            self._begin_requeued()
            time.sleep(1.0)

    def submit_elastic(self, number: int) -> None:
        user = self._users[number % len(self._users)]
        script = f"""#!/bin/sh
#SBATCH -J job-{number} -c 1 --mem=60 --time=180 --qos=elastic
#DL2 model=other samples_per_epoch=203 batch=20 epochs=60 max_workers={self.rng.randint(2, 4)} max_ps=2
#DL2 worker=cpu:1,memory:60 ps=cpu:1,memory:60
export DL2_DAEMON={self.daemon.url}
exec dl2-run python "$HOME/train.py" --epochs 60 --optimizer momentum --step-seconds {self.size.step_seconds} \\
    --durability durable --checkpoint "$HOME/checkpoints-{number}" --every 50
"""
        self.elastic.append(self._submit(user, script))

    def submit_rigid(self, *options: str) -> None:
        seconds = self.rng.uniform(*self.size.rigid_seconds)
        decoy = self.rng.choice(DECOYS)
        shape = options or (f"--nodes={self.rng.choice((1, 1, 2))}", f"--ntasks-per-node={self.rng.randint(1, 4)}")
        user = self.rng.choice(self._others)
        mark = (f"--comment={decoy}",) if decoy else ()
        script = f"#!/bin/sh\nexec sleep {seconds:.0f}\n"
        self.rigid[self._submit(user, script, "--mem=60", *mark, *shape)] = seconds

    def submit_urgent(self) -> None:
        self.submit_rigid("--qos=urgent", "--nodes=2", "--exclusive")

    def kill_daemon(self) -> None:
        """The daemon is killed, and is started again some seconds later."""
        if self.watch.daemon_runs.is_set():
            self.watch.daemon_runs.clear()
            self.daemon.kill()
            self._soon(self._start_daemon, 0, 8)

    def restart_controller(self) -> None:
        """Slurmctld ends, and is started again some seconds later."""
        self.cluster.stop_controller()
        time.sleep(self.rng.uniform(0, 6))
        self.cluster.start_controller(fresh=False)
        self.cluster.wait_until(lambda: self.watch.look() is not None, "slurmctld answers")

    def crash_node(self) -> None:
        """A node fails with all that runs there, and comes back."""
        self._fail_node(self.cluster.crash_node)

    def lose_slurmd(self) -> None:
        """A slurmd fails; what runs on its node goes on, as on a node that the network has lost."""
        self._fail_node(self.cluster.kill)

    def cancel(self) -> None:
        """A user cancels one of their jobs."""
        if job := self._choose(lambda job: job.id in self.owners and job.state in ("PENDING", "RUNNING")):
            self.cancelled.add(job.id)
            self._as_user(job, "scancel", job.id)

    def cancel_task(self) -> None:
        """A user cancels a task job of one of their elastic jobs."""
        if job := self._choose(lambda job: job.is_task and job.state == "RUNNING"):
            self._as_user(job, "scancel", job.id)

    def requeue(self) -> None:
        """A user puts one of their jobs back into the queue."""
        if job := self._choose(lambda job: job.id in self.owners and job.state == "RUNNING"):
            self._as_user(job, "scontrol", "requeue", job.id)

    def suspend(self) -> None:
        """Any job is suspended for some seconds."""
        if job := self._choose(lambda job: job.state == "RUNNING"):
            # Slurm lets only operators do so.
            self.cluster.run("scontrol", "suspend", job.id, check=False)
            self._soon(lambda: self.cluster.run("scontrol", "resume", job.id, check=False), 1, 30)

    def update(self) -> None:
        """A user changes something of one of their jobs."""
        if job := self._choose(lambda job: job.id in self.owners or job.is_task):
            change = self.rng.choice(("TimeLimit=100", "JobName=other", "Nice=10", "MailType=NONE"))
            self._as_user(job, "scontrol", "update", f"JobId={job.id}", change)

    def hold(self) -> None:
        """A user holds one of their jobs, which counts while it waits, and releases it some seconds later."""
        if job := self._choose(lambda job: job.id in self.owners):
            self._as_user(job, "scontrol", "hold", job.id)
            self._soon(lambda: self._as_user(job, "scontrol", "release", job.id), 1, 20)

    def _submit(self, user: User, script: str, *options: str) -> str:
        job = self.cluster.submit_as(user, script, *options)
        self.owners[job] = user
        return job

    def _choose(self, fits: Callable[[Seen], bool]) -> Seen | None:
        """One of the jobs that were seen last and fit."""
        found = [job for job in self.watch.last if job.state not in ENDED and job.id not in self.cancelled]
        found = [job for job in found if fits(job)]
        return self.rng.choice(found) if found else None

    def _as_user(self, job: Seen, *command: str) -> None:
        user = next(user for user in (*self._users, *self._others) if user.name == job.user)
        ran = self.cluster.run(*command, user=user, check=False)
        print(f"{job.user}: {' '.join(command)}: {ran.stderr.strip() or 'done'}", flush=True)

    def _fail_node(self, fail: Callable[[str], None]) -> None:
        node = self.rng.choice([node for node in self.cluster.nodes if node not in self._nodes_down])
        self._nodes_down.add(node)
        fail(node)

        def mend() -> None:
            self.cluster.start_node(node)
            self._nodes_down.discard(node)

        # Slurm takes it for lost after 30 seconds.
        self._soon(mend, 5, 60)

    def _start_daemon(self) -> None:
        self.daemon.start()
        self.watch.daemon_runs.set()

    def _begin_requeued(self) -> None:
        """Let requeued jobs begin again, which Slurm would make wait for two minutes."""
        for job in self.watch.last:
            if job.state == "PENDING" and job.reason == "BeginTime":
                self.cluster.run("scontrol", "update", f"JobId={job.id}", "StartTime=now", check=False)

    def _at(self, at: float, happen: Callable[[], object]) -> None:
        """Plan for a time, in seconds from the beginning."""
        name = getattr(happen, "__name__", "")

        def happens() -> None:
            if name in self.size.events:
                self.counts[name] += 1
                print(f"{time.strftime('%T')} {name}", flush=True)
            happen()

        heapq.heappush(self._later, (at, next(self._number), happens))

    def _soon(self, happen: Callable[[], object], least: float, most: float) -> None:
        self._at(time.monotonic() - self._begin + self.rng.uniform(least, most), happen)


def accounted(cluster: AccountingCluster) -> list[Accounted]:
    """All runs of all jobs, as Slurm's accounting has them."""
    fields = "JobID,State,User,Submit,Start,End,Comment"
    # Without states sacct leaves out jobs that were held while they ran.
    states = "BF,CA,CD,DL,F,NF,OOM,PD,PR,R,RQ,S,TO"
    command = ("sacct", "-a", "-X", "-D", "-n", "-P", "-S", "now-1days", "-E", "now", "-s", states, "-o", fields)
    said = cluster.run(*command, env={"SLURM_TIME_FORMAT": "%s"}).stdout
    rows = []
    for line in said.splitlines():
        job, state, user, *times, comment = line.split("|", 6)
        submitted, start, end = (int(each) if each.isdecimal() else 0 for each in times)
        rows.append(Accounted(job, state, user, submitted, start, end, comment))
    return rows


def doubled(runs: Sequence[Accounted]) -> list[str]:
    """Task jobs of one role of one run of a job that ran at the same time."""
    by_tag: defaultdict[str, list[Accounted]] = defaultdict(list)
    for run in runs:
        if run.comment.startswith("dl2:") and run.comment not in DECOYS and run.start:
            by_tag[run.comment].append(run)
    return [
        f"{tag}: {first}, {second}"
        for tag, found in by_tag.items()
        for first, second in itertools.pairwise(sorted(found, key=lambda run: run.start))
        if second.start < first.end
    ]


def wrong_ends(site: Site, runs: Sequence[Accounted]) -> list[str]:
    """Jobs that have not ended as they had to."""
    by_job: defaultdict[str, list[Accounted]] = defaultdict(list)
    for run in runs:
        by_job[run.id].append(run)
    wrong = []
    for job, user in site.owners.items():
        if not by_job[job]:
            wrong.append(f"job {job}: not in the accounting")
            continue
        last = max(by_job[job], key=lambda run: run.submitted)
        by = {run.state for run in by_job[job] if run.state.startswith("CANCELLED by")} - {f"CANCELLED by {user.uid}"}
        if by:
            wrong.append(f"job {job} was cancelled by another than its user: {by_job[job]}")
        if last.state != "COMPLETED" and job not in site.cancelled:
            wrong.append(f"job {job} has not completed: {by_job[job]}")
        if last.state == "COMPLETED" and last.end - last.start < site.rigid.get(job, 0.0) - 1:
            wrong.append(f"job {job} has ended too soon: {by_job[job]}")
    return wrong


def untrained(site: Site, want: str | None) -> list[str]:
    """Elastic jobs that nobody cancelled and that have not ended with the weights of a static run."""
    wrong = []
    for job_id in site.elastic:
        found = site.daemon.store.find_jobs(job_id)
        if job_id in site.cancelled or (found and (found[0].state, found[0].digest) == (JobState.FINISHED, want)):
            continue
        wrong.append(f"job {job_id}: {[(each.key.slug, str(each.state), each.end_reason) for each in found]}")
    return wrong


def summary(site: Site, runs: Sequence[Accounted]) -> str:
    """What happened, for people."""
    watch = site.watch
    watched = watch.orphaned, watch.limited, watch.queued
    orphaned, limited, queued = (max(found.values(), default=0) for found in watched)
    return "\n".join((
        f"seed {SEED}: {len(site.elastic)} elastic and {len(site.rigid)} rigid jobs, {len(site.cancelled)} cancelled",
        f"runs of all jobs by their ends: {dict(Counter(run.state.split()[0] for run in runs))}",
        f"at most {watch.most_tasks} tasks at once, {watch.looks} looks at the queue",
        f"longest time without an anchor {orphaned:.0f} s, waiting for a limit {limited:.0f} s",
        f"{len(watch.queued)} tasks waited without a node of their own, the longest {queued:.0f} s",
        f"events: {dict(site.counts)}",
    ))  # fmt: skip


# Slurm takes up to 200 s, 20 times a third of SlurmdTimeout, to notice what a node that came back soon has lost.
@pytest.mark.parametrize(
    ("size", "timeout"),
    [
        pytest.param(SHORT, 480.0, id="short"),
        pytest.param(MEDIUM, 1200.0, id="medium", marks=pytest.mark.timeout(3600)),
        pytest.param(FULL, 3600.0, id="full", marks=pytest.mark.timeout(3 * 3600)),
    ],
)
def test_jobs_complete_within_limits_whatever_happens(size: Size, timeout: float, tmp_path: Path) -> None:
    want = static_digest(epochs=60)
    print(f"seed {SEED}", flush=True)
    with AccountingCluster(nodes=size.nodes, cpus=4, memory=2000, gpus=0, cgroups=True, extra=PREEMPTION) as cluster:
        settings = {
            "resource_manager": cluster.resource_manager(),
            "schedule": {"poll_seconds": size.poll_seconds, "slot_seconds": 10 * size.poll_seconds},
            "api": {"heartbeat_seconds": size.poll_seconds},
            "jobs": {"queue_seconds": 30, "drain_seconds": 20, "end_seconds": 5, "grace_seconds": 3},
        }
        watch = QueueWatch(cluster, size)
        with DaemonProcess(tmp_path, settings) as daemon:
            site = Site(cluster, daemon, size, watch)
            watch.daemon_runs.set()
            watch.start()
            try:
                site.live_for(float(os.environ.get("DL2D_FAULT_SECONDS", str(size.seconds))))
                site.wait_for_end(timeout)
            finally:
                watch.stop()
            runs = accounted(cluster)
            orphans = {job: seconds for job, seconds in watch.orphaned.items() if seconds > MAX_ORPHAN_SECONDS}
            limited = {job: seconds for job, seconds in watch.limited.items() if seconds > MAX_LIMIT_SECONDS}
            print(summary(site, runs))
            wrong = [*watch.wrong, *wrong_ends(site, runs), *doubled(runs), *untrained(site, want)]
            if orphans or limited:
                wrong.append(f"seconds without an anchor: {orphans}, and waiting for a limit: {limited}")
            assert not wrong, "\n".join((f"seed {SEED}", *wrong, daemon.said(200)))
