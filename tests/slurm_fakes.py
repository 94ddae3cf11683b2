"""Fakes of Slurm's commands on PATH that note how they were called, and records for tests of the Slurm manager."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_cluster import SlurmCluster, User

from dl2d.core.cluster import Task, parse_tag, task_tag
from dl2d.core.credentials_from_daemon_key import Credentials
from dl2d.core.jobs import JobKey, JobRequest, Launch, Owner, Role
from dl2d.core.resource_manager import RmIdentity, TaskSpec
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.store.sql_store import SqlStore
from dl2d.tick.task_command_and_environment import TaskSpecs
from dl2d.tick.tick_context import Context, Deciders, GuardRules, Timeouts
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.settings import SlurmSettings

#: Without ``json``, whose import would take longer than all the rest.
PROGRAM = """\
import os, sys, time
folder = os.path.dirname(os.path.abspath(sys.argv[0]))
name = os.path.basename(sys.argv[0])
call = {"argv": [name, *sys.argv[1:]], "stdin": sys.stdin.read(), "env": dict(os.environ), "umask": os.umask(0)}
descriptor = os.open(os.path.join(folder, "calls"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(descriptor, (ascii(call) + "\\n").encode())
with open(os.path.join(folder, name + ".answer")) as file:
    answer = eval(file.read())
answer = answer.get("".join(sys.argv[1:2]), answer)
time.sleep(answer.get("delay", 0))
rows = answer.get("rows")
if rows is not None and name == "sacct":
    options = dict(word.partition("=")[::2] for word in sys.argv)
    chosen = options["--jobs"].split(",") if "--jobs" in options else None
    if chosen is None and "--state" not in options:
        rows = [row for row in rows if row.get("Eligible") != "Unknown"]
    for row in (row for row in rows if chosen is None or str(row["JobIDRaw"]) in chosen):
        values = (str(row.get(field, "")) + options["--delimiter"] for field in options["--format"].split(","))
        sys.stdout.write("".join(values) + "\\n")
wanted = next((word for word in sys.argv if word.startswith("--Format=")), "")
if rows is not None and wanted:
    fields = [column.partition(":") for column in wanted.partition("=")[2].split(",")]
    chosen = next((word.partition("=")[2].split(",") for word in sys.argv if word.startswith("--jobs=")), None)
    rows = [row for row in rows if chosen is None or str(row.get("JobID")) in chosen]
    for row in rows:
        sys.stdout.write("".join(str(row.get(field, "")) + suffix for field, _, suffix in fields) + "\\n")
excluded = next((word for word in sys.argv if word.startswith("--format=%i")), "").removeprefix("--format=%i")
if rows is not None and excluded:
    ends = excluded.split("%x")
    sys.stdout.write("".join(f"{row['JobID']}{ends[0]}{row.get('excluded', '')}{ends[1]}\\n" for row in rows))
sys.stdout.write(answer.get("stdout", ""))
sys.stderr.write(answer.get("stderr", ""))
sys.exit(answer.get("status", 0))
"""


@dataclass(frozen=True, slots=True)
class Call:
    """How a fake was called."""

    argv: list[str]
    stdin: str
    env: dict[str, str]
    umask: int

    @property
    def name(self) -> str:
        return self.argv[0]


class FakeSlurm:
    """Executables that answer as told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("squeue", "sinfo", "sbatch", "scancel", "scontrol", "sacct", "sacctmgr", "unmunge"):
            program = folder / name
            program.write_text(f"#!{sys.executable} -SE\n{PROGRAM}")
            program.chmod(0o755)
            self.answer(name)
        values = "ClusterName             = fake\nMinJobAge   = 300 sec\nSlurmUser = slurm(64030)"
        self.answer("scontrol", stdout=f"Configuration data\n{values}\n", token={"stdout": "SLURM_JWT=a.b.c\n"})
        self.answer("sinfo", rows=[node_row("n1"), node_row("n2")])
        self.answer("squeue", rows=[])
        self.answer("sbatch", stdout="77\n")

    def answer(self, name: str, **answer: Any) -> None:
        """Say what a program prints, with what status it ends, after what ``delay``; or so for one first argument."""
        (self.folder / f"{name}.answer").write_text(ascii(answer))

    def calls(self, name: str = "") -> list[Call]:
        """How the programs were called since the last ``forget``, in order."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for call in (Call(**ast.literal_eval(line)) for line in lines) if name in ("", call.name)]

    def forget(self) -> None:
        (self.folder / "calls").unlink(missing_ok=True)


class Clock:
    """A clock that stands still unless it is set."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        #: By how much the clock was set, which the monotonic one does not show.
        self.set_by = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now + self.set_by

    def timer(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def node_row(name: str, **more: object) -> dict[str, object]:
    """A row of sinfo: an idle node."""
    row = {"NodeList": name, "StateLong": "idle", "CPUsState": "0/8/0/8", "Memory": "4000", "AllocMem": "0"}
    row |= {"PartitionName": "gpu", "Time": "infinite", "Available": "up", "features_act": "(null)"}
    return {**row, "Gres": "gpu:2", "GresUsed": "gpu:0", "Reason": "none", **more}


def job_row(number: int, **more: object) -> dict[str, object]:
    """A row of squeue: a running job."""
    row = {"JobID": number, "State": "RUNNING", "SubmitTime": 1795253932, "exit_code": 0, "UserName": "alice"}
    row |= {"NodeList": "n1", "tres-alloc": "cpu=1,mem=100M,node=1,billing=1", "tres-per-node": "N/A"}
    row |= {"JobArrayID": number, "EndTime": "NONE", "RestartCnt": 0, "Partition": "gpu", "Nice": 0}
    row |= dict.fromkeys(("Reservation", "Feature", "WCKey", "SchedNodes", "Account", "QOS"), "(null)")
    row |= {"PriorityLong": 4000, "StartTime": "N/A", "TimeLimit": "UNLIMITED", "ReqNodes": "", "NumNodes": 1}
    row |= {"NumTasks": 1, "tres-per-task": "N/A", "tres-per-job": "N/A", "OverSubscribe": "OK", "Exclusive": ""}
    row |= {"cpus-per-task": 1, "mincpus": 1, "threads": "*", "NTPerCore": "N/A", "cpus-per-tres": "N/A"}
    row |= {"MinMemory": "100M"}
    return {**row, "Reason": "None", "Comment": "(null)", **more}


def identity(number: int, **more: object) -> RmIdentity:
    """Identity of the job of a row."""
    row = job_row(number, **more)
    mark = str(row["Comment"]) if str(row["Comment"]).startswith("dl2:") else ""
    return RmIdentity(str(number), int(str(row["SubmitTime"])), str(row["UserName"]), mark)


def live_task(handle: str, tag: str, **more: Any) -> Task:
    """A task as the store has it: that of the row of a job with this number."""
    found = parse_tag(tag)
    assert found is not None
    given = {"node": "n1", "demand": Resources.of(cpu=1), "handle": handle, "submitted": 1795253932, **more}
    return Task(job=found[0], id=found[1], role=Role.WORKER, **given)


JOB = JobKey("fake", "12", 1_795_000_000)


def task(**more: Any) -> TaskSpec:
    """A task of job 12 of user 1001."""
    given: dict[str, Any] = {
        "tag": task_tag(JOB, "worker-1"),
        "job": JOB,
        "role": Role.WORKER,
        "name": "worker-1",
        "demand": Resources.of(cpu=2, memory=100),
        "node": "n1",
        "owner": Owner("alice", 1001, 1002),
        "launch": Launch(("dl2-run", "python", "train.py"), "/home/alice", (("PATH", "/usr/bin:/bin"),)),
    }
    return TaskSpec(**{**given, **more})


class Managers:
    """Makes managers over the fakes."""

    def __init__(self, slurm: FakeSlurm, clock: Clock) -> None:
        self._slurm = slurm
        self._clock = clock
        self._made: list[SlurmManager] = []

    def __call__(self, *, uid: int = 0, **settings: object) -> SlurmManager:
        made = SlurmManager(
            SlurmSettings.parse(settings),
            clock=self._clock,
            timer=self._clock.timer,
            sleep=self._clock.sleep,
            environ={"PATH": str(self._slurm.folder), "SLURM_CONF": "/x/slurm.conf", "SECRET": "of the daemon"},
            uid=uid,
        )
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in self._made:
            made.close()


@dataclass(frozen=True, slots=True)
class Real:
    """A real private Slurm with two ordinary users."""

    cluster: SlurmCluster
    alice: User
    bob: User

    def owner(self, user: User) -> Owner:
        return Owner(user.name, user.uid, user.gid, partition=self.cluster.partition)


#: A job of one worker and one PS.
REQUEST = JobRequest(
    name="j",
    model="bert",
    epochs=1,
    samples_per_epoch=1,
    steps_per_epoch=None,
    batch=1,
    worker=Resources.of(cpu=1),
    ps=Resources.of(cpu=1),
    max_workers=1,
    max_ps=1,
)


def context_of(manager: SlurmManager, store: SqlStore, timer: Callable[[], float] = lambda: 0.0) -> Context:
    """What a tick needs with this manager and store."""
    return Context(
        cluster="fake",
        manager=manager,
        store=store,
        deciders=Deciders(Drf(), Fifo(), LoadBalance()),
        task_specs=TaskSpecs("http://127.0.0.1:1", Credentials(b"k" * 32)),
        guard_rules=GuardRules(),
        timeouts=Timeouts(),
        slot_seconds=300,
        seed=0,
        starts_anchors=False,
        grace_seconds=1.0,
        timer=timer,
    )
