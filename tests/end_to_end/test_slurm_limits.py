"""A real Slurm with slurmdbd: limits of associations and QOS, which jobs do not try to exceed, and what a job used."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import BIN, DaemonProcess
from slurm_accounting import AccountingCluster, why_not
from slurm_cluster import PATH, User

from dl2d.core.cluster import task_tag
from dl2d.core.jobs import JobKey, JobState, Launch, Owner, Role
from dl2d.core.resource_manager import TaskSpec
from dl2d.core.resources import Resources
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.settings import SlurmSettings

GUIDE = Path(__file__).parents[2] / "docs" / "slurm.md"
WORKER = Path(__file__).parent.parent / "pslite" / "numpy_worker.py"

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "all of it is there"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[AccountingCluster]:
    with AccountingCluster(nodes=2) as made:
        yield made


@pytest.fixture(scope="module")
def alice(cluster: AccountingCluster) -> User:
    user = cluster.add_user("alice")
    cluster.add_python(user)
    for file in (WORKER, WORKER.with_name("regression.py")):
        shutil.copy(file, user.home)
    return user


@pytest.fixture
def manager(cluster: AccountingCluster) -> Iterator[SlurmManager]:
    settings = SlurmSettings.parse({"rpcs_per_minute": 1_000_000, "poll_floor_seconds": 0})
    environ = {"PATH": PATH, "SLURM_CONF": str(cluster.conf)}
    made = SlurmManager(settings, clock=time.time, environ=environ)
    yield made
    made.close()


def submitted(cluster: AccountingCluster, user: User, *options: str, expected: str = "RUNNING None") -> str:
    """A job of the user that is in the state and has the reason that are expected."""
    job = cluster.submit_as(user, "#!/bin/sh\nsleep 600\n", "--mem=100", *options)
    asked = ("squeue", "--noheader", f"--jobs={job}", "--format=%T %r")
    cluster.wait_until(lambda: cluster.run(*asked).stdout.strip() == expected, f"job {job} is {expected}")
    return job


def test_what_limits_of_slurmdbd_leave(cluster: AccountingCluster, alice: User, manager: SlurmManager) -> None:
    cluster.sacctmgr("add", "qos", "small", "GrpTRES=cpu=9,gres/gpu=3", "MaxTRESPerUser=cpu=6")
    cluster.sacctmgr("modify", "user", alice.name, "set", "qos+=small", "MaxJobs=3")
    cluster.sacctmgr("modify", "account", "lab", "set", "GrpTRES=mem=2000")
    script = "#!/bin/sh\nsleep 600\n"
    small = cluster.submit_as(alice, script, "--qos=small", "--mem=100")
    large = cluster.submit_as(alice, script, "--qos=small", "--mem=300", "--cpus-per-task=2", "--gres=gpu:1")
    cluster.wait_until(lambda: {cluster.job_state(job) for job in (small, large)} == {"RUNNING"}, "both run")
    listing = manager.listing()
    found = {limit.reason.removeprefix("Slurm's limit "): limit for limit in listing.growth_limits}
    assert {title: limit.left for title, limit in found.items()} == {
        "GrpTRES of QOS small": {"cpu": 6.0, "gpu": 2.0},
        f"MaxTRESPerUser of QOS small for user {alice.name}": {"cpu": 3.0},
        "GrpTRES of account lab": {"memory": 1600.0},
        f"MaxJobs of user {alice.name} in account lab": {"tasks": 1.0},
    }
    assert {limit.anchors for limit in found.values()} == {frozenset({small, large})}
    cluster.clear()
    cluster.sacctmgr("modify", "user", alice.name, "set", "MaxJobs=-1")


def test_a_task_has_the_longest_time_that_its_qos_allows(
    cluster: AccountingCluster, alice: User, manager: SlurmManager
) -> None:
    """An administrator has made the time limit of its anchor longer than that; Slurm would never start such a task."""
    cluster.sacctmgr("add", "qos", "short", "MaxWall=00:10:00")
    cluster.sacctmgr("modify", "user", alice.name, "set", "qos+=short")
    anchor = submitted(cluster, alice, "--qos=short", "--time=5")
    cluster.run("scontrol", "update", f"jobid={anchor}", "timelimit=60")
    manager.listing()
    job = JobKey(cluster.name, anchor, 1)
    launch = Launch(("/bin/sleep", "600"), str(alice.home), (("PATH", PATH),))
    spec = TaskSpec(
        tag=task_tag(job, "worker-0"), job=job, role=Role.WORKER, name="worker-0", demand=Resources.of(cpu=1),
        node=cluster.nodes[0], owner=Owner(alice.name, alice.uid, alice.gid), launch=launch,
    )  # fmt: skip
    handle = manager.submit(spec)
    cluster.wait_until(lambda: cluster.job_state(handle) == "RUNNING", "it runs")
    assert cluster.run("squeue", "--noheader", f"--jobs={handle}", "--format=%l").stdout.strip() == "10:00"
    cluster.clear()


def test_the_qos_of_a_partition_limits_all_jobs_there(
    cluster: AccountingCluster, alice: User, manager: SlurmManager
) -> None:
    cluster.sacctmgr("add", "qos", "whole", "GrpTRES=cpu=4")
    (partition,) = set(cluster.run("sinfo", "--noheader", "--format=%R").stdout.split())
    cluster.run("scontrol", "update", f"PartitionName={partition}", "QOS=whole")
    try:
        first = cluster.submit_as(alice, "#!/bin/sh\nsleep 600\n", "--cpus-per-task=3", "--mem=100")
        second = cluster.submit_as(alice, "#!/bin/sh\nsleep 600\n", "--cpus-per-task=2", "--mem=100")
        cluster.wait_until(lambda: cluster.job_state(first) == "RUNNING", "it runs")
        cluster.wait_until(
            lambda: "QOSGrpCpuLimit" in cluster.run("squeue", "-h", "-j", second, "-o", "%r").stdout, "it waits"
        )
        (limit,) = [limit for limit in manager.listing().growth_limits if "QOS whole" in limit.reason]
        assert (limit.left, limit.waiting) == ({"cpu": 1.0}, {second})
    finally:
        cluster.run("scontrol", "update", f"PartitionName={partition}", "QOS=")
        cluster.clear()


def test_limits_of_a_qos_apply_in_place_of_those_of_associations(
    cluster: AccountingCluster, alice: User, manager: SlurmManager
) -> None:
    """The account may have 3 CPUs and the user one job; a job beyond both runs where its QOS allows more.

    So does a job that needs more than its QOS allows, where the QOS of the partition allows it.
    """
    cluster.sacctmgr("add", "qos", "large", "GrpTRES=cpu=9", "MaxJobsPerUser=4")
    cluster.sacctmgr("add", "qos", "tiny", "GrpTRES=cpu=1")
    cluster.sacctmgr("modify", "user", alice.name, "set", "qos+=large,tiny", "MaxJobs=1")
    cluster.sacctmgr("modify", "account", "lab", "set", "GrpTRES=cpu=3,mem=2000")
    (partition,) = set(cluster.run("sinfo", "--noheader", "--format=%R").stdout.split())
    try:
        full = submitted(cluster, alice, "--cpus-per-task=3")
        large = submitted(cluster, alice, "--cpus-per-task=2", "--qos=large")
        beyond = submitted(cluster, alice, "--qos=large")
        waits = submitted(cluster, alice, expected="PENDING AssocMaxJobsLimit")
        found = {each.reason.removeprefix("Slurm's limit "): each for each in manager.listing().growth_limits}
        assert {title: (limit.anchors, limit.left) for title, limit in found.items()} == {
            f"MaxJobs of user {alice.name} in account lab": (
                {full, waits},
                {"cpu": 0.0, "memory": 0.0, "gpu": 0.0, "tasks": 0.0},
            ),
            "GrpTRES of account lab (cpu)": ({full, waits}, {"cpu": 0.0}),
            "GrpTRES of account lab (memory)": ({full, waits, large, beyond}, {"memory": 1700.0}),
            "GrpTRES of QOS large": ({large, beyond}, {"cpu": 6.0}),
            f"MaxJobsPerUser of QOS large for user {alice.name}": ({large, beyond}, {"tasks": 2.0}),
        }
        cluster.clear()
        cluster.run("scontrol", "update", f"PartitionName={partition}", "QOS=large")
        submitted(cluster, alice, "--cpus-per-task=2", "--qos=tiny")
    finally:
        cluster.run("scontrol", "update", f"PartitionName={partition}", "QOS=")
        cluster.sacctmgr("modify", "user", alice.name, "set", "MaxJobs=-1")
        cluster.sacctmgr("modify", "account", "lab", "set", "GrpTRES=cpu=-1,mem=-1")
        cluster.clear()


def test_a_qos_multiplies_limits_of_the_account(cluster: AccountingCluster, alice: User, manager: SlurmManager) -> None:
    cluster.sacctmgr("add", "qos", "double", "LimitFactor=2")
    cluster.sacctmgr("modify", "user", alice.name, "set", "qos+=double")
    cluster.sacctmgr("modify", "account", "lab", "set", "GrpTRES=cpu=3,mem=-1")
    try:
        double = submitted(cluster, alice, "--cpus-per-task=5", "--qos=double")
        waits = submitted(cluster, alice, expected="PENDING AssocGrpCpuLimit")
        found = {each.reason.removeprefix("Slurm's limit "): each for each in manager.listing().growth_limits}
        assert {title: (limit.anchors, limit.left, limit.waiting) for title, limit in found.items()} == {
            "GrpTRES of account lab (cpu)": ({waits}, {"cpu": 0.0}, {waits}),
            "GrpTRES of account lab times 2 (LimitFactor) (cpu)": ({double, waits}, {"cpu": 1.0}, set()),
        }
    finally:
        cluster.sacctmgr("modify", "account", "lab", "set", "GrpTRES=cpu=-1")
        cluster.clear()


def test_a_qos_with_the_flag_comes_before_that_of_the_partition(
    cluster: AccountingCluster, alice: User, manager: SlurmManager
) -> None:
    cluster.sacctmgr("add", "qos", "first", "flags=OverPartQOS", "GrpTRES=cpu=4")
    cluster.sacctmgr("add", "qos", "narrow", "GrpTRES=cpu=1")
    cluster.sacctmgr("modify", "user", alice.name, "set", "qos+=first")
    (partition,) = set(cluster.run("sinfo", "--noheader", "--format=%R").stdout.split())
    cluster.run("scontrol", "update", f"PartitionName={partition}", "QOS=narrow")
    try:
        job = submitted(cluster, alice, "--cpus-per-task=3", "--qos=first")
        found = {each.reason.removeprefix("Slurm's limit "): each for each in manager.listing().growth_limits}
        assert {title: (limit.anchors, limit.left) for title, limit in found.items()} == {
            "GrpTRES of QOS first": ({job}, {"cpu": 1.0}),
        }
    finally:
        cluster.run("scontrol", "update", f"PartitionName={partition}", "QOS=")
        cluster.clear()


def test_limits_on_submitted_jobs(cluster: AccountingCluster, alice: User, manager: SlurmManager) -> None:
    cluster.sacctmgr("add", "qos", "queue", "GrpSubmitJobs=20", "MaxSubmitJobsPerUser=3")
    cluster.sacctmgr("modify", "user", alice.name, "set", "qos+=queue", "MaxSubmitJobs=7")
    try:
        first = submitted(cluster, alice)
        held = submitted(cluster, alice, "--hold", "--qos=queue", expected="PENDING JobHeldUser")
        found = {each.reason.removeprefix("Slurm's limit "): each for each in manager.listing().growth_limits}
        assert {title: (limit.anchors, limit.left) for title, limit in found.items()} == {
            f"MaxSubmitJobs of user {alice.name} in account lab": ({first}, {"tasks": 5.0}),
            "GrpSubmitJobs of QOS queue": ({held}, {"tasks": 17.0}),
            f"MaxSubmitJobsPerUser of QOS queue for user {alice.name}": ({held}, {"tasks": 2.0}),
        }
        others = [submitted(cluster, alice, "--hold", "--qos=queue", expected="PENDING JobHeldUser") for _ in range(2)]
        refused = cluster.run("sbatch", "--qos=queue", "--wrap=true", user=alice, check=False)
        assert "QOSMaxSubmitJobPerUserLimit" in refused.stderr, others
    finally:
        cluster.sacctmgr("modify", "user", alice.name, "set", "MaxSubmitJobs=-1")
        cluster.clear()


def test_a_job_grows_up_to_a_limit_without_submitting_what_exceeds_it(
    cluster: AccountingCluster, alice: User, tmp_path: Path
) -> None:
    cluster.sacctmgr("add", "qos", "six", "GrpTRES=cpu=6")
    cluster.sacctmgr("modify", "user", alice.name, "set", "qos+=six")
    gate = alice.home / "hold-job"
    gate.touch()
    with DaemonProcess(tmp_path, {"resource_manager": cluster.resource_manager()}) as daemon:
        job_id = cluster.submit_as(
            alice,
            f"""#!/bin/sh
#SBATCH -c 1 --mem=50 --qos=six
#DL2 model=other worker=cpu:2,memory:100 ps=cpu:1,memory:100 max_workers=5 max_ps=1
#DL2 samples_per_epoch=203 batch=20 epochs=60
export DL2_DAEMON={daemon.url} PSLITE_PACE_FILE={gate}
exec dl2-run python "$HOME/numpy_worker.py" --epochs 60 --step-seconds 0.01
""",
        )
        daemon.wait_until(lambda: daemon.store.find_jobs(job_id), "the job is registered", timeout=90)
        (job,) = daemon.store.find_jobs(job_id)
        daemon.wait_until(lambda: daemon.confirmed(job.key) == (2, 1), "it has what the limit leaves", timeout=90)
        limit = "Slurm's limit GrpTRES of QOS six"
        why = (str(BIN / "dl2d"), "why", job_id, "--config", str(daemon.config))
        daemon.wait_until(lambda: limit in cluster.run(*why).stdout, "the limit is told", timeout=60, every=1.0)
        gate.unlink()
        daemon.wait_for_end(job.key, timeout=240)
        assert daemon.job(job.key).state is JobState.FINISHED
        tasks = daemon.tasks(job.key)
        assert len(tasks) == 3, [(task.id, task.state, task.note, task.asked_at) for task in tasks]


@pytest.mark.parametrize("flags", [(), ("flags=DenyOnLimit",)], ids=["waits", "is refused"])
def test_a_job_of_which_a_task_demands_less_than_its_qos_starts_ends_and_says_so(
    cluster: AccountingCluster, alice: User, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    qos = f"gpus{len(flags)}"
    cluster.sacctmgr("add", "qos", qos, "MinTRES=gres/gpu=1", *flags)
    cluster.sacctmgr("modify", "user", alice.name, "set", f"qos+={qos}")
    config = {"resource_manager": cluster.resource_manager(), "jobs": {"backoff_seconds": 5}}
    with DaemonProcess(tmp_path, config) as daemon:
        job_id = cluster.submit_as(
            alice,
            f"""#!/bin/sh
#SBATCH -c 1 --mem=50 --qos={qos} --gres=gpu:1 --output={alice.home}/{qos}.out
#DL2 model=other worker=cpu:1,memory:100,gpu:1 ps=cpu:1,memory:100 max_workers=1 max_ps=1
#DL2 samples_per_epoch=203 batch=20 epochs=60
export DL2_DAEMON={daemon.url}
exec dl2-run python "$HOME/numpy_worker.py" --epochs 60 --step-seconds 0.01
""",
        )
        daemon.wait_until(lambda: daemon.store.find_jobs(job_id), "the job is registered", timeout=90)
        (job,) = daemon.store.find_jobs(job_id)
        daemon.wait_for_end(job.key, timeout=240)
        ended = daemon.job(job.key)
        assert ended.state is JobState.FAILED
        said = f"QOS {qos} starts no job that demands less than gpu:1 (QOSMinGRES); demand that with ps=, or submit"
        assert said in ended.end_reason
        daemon.wait_until_empty()
        cluster.wait_until(lambda: cluster.job_state(job_id) == "FAILED", "its batch job ends")
        assert said in (alice.home / f"{qos}.out").read_text()


def test_a_job_of_others_that_waits_for_a_full_limit_starts(
    cluster: AccountingCluster, alice: User, tmp_path: Path
) -> None:
    cluster.sacctmgr("add", "qos", "eight", "GrpTRES=cpu=8")
    bob = cluster.add_user("bob")
    for user in (alice, bob):
        cluster.sacctmgr("modify", "user", user.name, "set", "qos+=eight")
    config = {"resource_manager": cluster.resource_manager(), "schedule": {"slot_seconds": 10}}
    with DaemonProcess(tmp_path, config) as daemon:
        job_id = cluster.submit_as(
            alice,
            f"""#!/bin/sh
#SBATCH -c 1 --mem=50 --qos=eight
#DL2 model=other worker=cpu:2,memory:100 ps=cpu:1,memory:100 max_workers=5 max_ps=1
#DL2 samples_per_epoch=203 batch=20 epochs=6000
export DL2_DAEMON={daemon.url}
exec dl2-run python "$HOME/numpy_worker.py" --epochs 6000 --step-seconds 0.05
""",
        )
        daemon.wait_until(lambda: daemon.store.find_jobs(job_id), "the job is registered", timeout=90)
        (job,) = daemon.store.find_jobs(job_id)
        daemon.wait_until(lambda: daemon.confirmed(job.key) == (3, 1), "it fills the limit", timeout=90)
        rigid = cluster.submit_as(bob, "#!/bin/sh\nsleep 25\n", "--qos=eight", "--cpus-per-task=3", "--mem=50")
        room = f"room made for job {rigid} of {bob.name}"
        why = (str(BIN / "dl2d"), "why", job_id, "--config", str(daemon.config))
        daemon.wait_until(lambda: room in cluster.run(*why).stdout, "it is told to whom it yields", timeout=60)
        cluster.wait_until(lambda: cluster.job_state(rigid) == "RUNNING", "the waiting job starts")
        while cluster.job_state(rigid) == "RUNNING":
            assert daemon.confirmed(job.key) == (1, 1)
            time.sleep(2.0)
        daemon.wait_until(lambda: daemon.confirmed(job.key) == (3, 1), "it grows again", timeout=90)
        cluster.run("scancel", job_id, user=alice)
        daemon.wait_for_end(job.key, timeout=60)
        daemon.wait_until_empty()


@pytest.mark.nightly
def test_what_a_job_used_by_the_documented_query_and_by_its_report(
    cluster: AccountingCluster, alice: User, tmp_path: Path
) -> None:
    query = re.search(r"^```sh\n(sacct .*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert query is not None
    gate = alice.home / "hold-job"
    gate.touch()
    with DaemonProcess(tmp_path, {"resource_manager": cluster.resource_manager()}) as daemon:
        job_id = cluster.submit_as(
            alice,
            f"""#!/bin/sh
#SBATCH -c 1 --mem=50
#DL2 model=other worker=cpu:2,gpu:1,memory:100 ps=cpu:1,memory:100 max_workers=2 max_ps=1
#DL2 samples_per_epoch=203 batch=20 epochs=30
export DL2_DAEMON={daemon.url} PSLITE_PACE_FILE={gate}
exec dl2-run python "$HOME/numpy_worker.py" --epochs 30 --step-seconds 0.01
""",
        )
        daemon.wait_until(lambda: daemon.store.find_jobs(job_id), "the job is registered", timeout=90)
        first = daemon.store.find_jobs(job_id)[0].key
        daemon.wait_for_size(first, 2, 1, timeout=90)
        cluster.run("scontrol", "requeue", job_id, user=alice)
        daemon.wait_until(lambda: len(daemon.store.find_jobs(job_id)) == 2, "it is requeued")
        cluster.wait_until(lambda: cluster.job_state(job_id) == "PENDING", "it waits again")
        cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")
        second = daemon.store.find_jobs(job_id)[0].key
        daemon.wait_for_size(second, 2, 1, timeout=90)
        gate.unlink()
        daemon.wait_for_end(second, timeout=240)
        daemon.wait_until_empty()
        cluster.wait_until(lambda: not cluster.running(), "all have ended")

        # What squeue still shows: task jobs of both runs, and of the anchor its last run.
        fields = "--Format=Name:|,NumCPUs:|,StartTime:|,EndTime:"
        said = cluster.run("squeue", "-h", "-t", "all", fields, env={"SLURM_TIME_FORMAT": "%s"}).stdout
        rows = [[word.strip() for word in line.split("|")] for line in said.splitlines()]
        rows = [row for row in rows if row[0].startswith(f"dl2-{job_id}-") and row[2].isdecimal()]
        tasks = [(name, int(cpus), int(end) - int(start)) for name, cpus, start, end in rows]
        assert len(tasks) >= 6
        gpu_seconds = sum(seconds for name, _, seconds in tasks if "-worker-" in name)

        # Hours with two digits say too little of a short job.
        command = query[1].replace("job=4711", f"job={job_id}").replace("%.2f", "%.6f")

        def used(user: User | None) -> list[float]:
            """Seconds of CPUs and of GPUs."""
            answer = cluster.run("sh", "-c", command, user=user).stdout
            found = re.fullmatch(r"(\S+) CPU-hours, (\S+) GPU-hours\n", answer)
            assert found is not None, answer
            return [round(float(hours) * 3600) for hours in found.groups()]

        accounted = ("sacct", "-X", "-D", "-n", "-P", f"--jobs={job_id}", "-o", "State,CPUTimeRAW")

        def anchors() -> list[list[str]]:
            """State and CPU-seconds of the coordinator's runs."""
            return [line.split("|") for line in cluster.run(*accounted).stdout.splitlines()]

        def expected() -> list[int]:
            cpu_seconds = sum(cpus * seconds for _, cpus, seconds in tasks) + sum(int(run[1]) for run in anchors())
            return [cpu_seconds, gpu_seconds]

        states = ["REQUEUED", "COMPLETED"]
        cluster.wait_until(lambda: [state for state, _ in anchors()] == states, "slurmdbd has the coordinator's ends")
        cluster.wait_until(lambda: used(None) == expected(), "slurmdbd has the ends of all tasks")
        assert used(alice) == expected()

        shown = cluster.run("dl2d", "report", job_id, "--json", user=alice, env={"DL2_DAEMON": daemon.url}).stdout
        report = json.loads(shown)
        # Of both runs, and without the anchor; times are those at which the daemon saw tasks start and end.
        assert report["runs"] == 2
        assert {role: use["tasks"] for role, use in report["roles"].items()} == {"worker": 4, "ps": 2}
        assert report["all"]["gpu_hours"] * 3600 == pytest.approx(gpu_seconds, abs=5 * 4)
