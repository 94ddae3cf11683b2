"""Modes observe and shadow under a real Slurm: users' jobs run as Slurm has them, and dl2d does nothing but record."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import BIN, DaemonProcess
from slurm_cluster import SlurmCluster, User, why_not

from dl2d.core.cluster import TaskState
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Constraint
from dl2d.core.jobs import NOTHING, Allocation, Architecture, JobKey, JobState, Role
from dl2d.core.resources import Resources

WORKER = Path(__file__).parent.parent / "pslite" / "numpy_worker.py"

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there"),
]

PLAIN = "#!/bin/sh\nexec sleep 600\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alice(cluster: SlurmCluster) -> User:
    user = cluster.add_user("alice")
    cluster.add_python(user)
    (user.home / "train.py").write_text(WORKER.read_text())
    (user.home / "regression.py").write_text(WORKER.with_name("regression.py").read_text())
    return user


@pytest.fixture
def daemon(cluster: SlurmCluster, tmp_path: Path) -> Iterator[DaemonProcess]:
    watch = [{"partition": cluster.partition, "name": "bert-*", "model": "bert"}]
    settings = {"mode": "observe", "resource_manager": cluster.resource_manager(watch=watch)}
    with DaemonProcess(tmp_path, settings) as daemon:
        yield daemon
    cluster.clear()


def found(daemon: DaemonProcess, job: str) -> JobKey:
    daemon.wait_until(lambda: daemon.store.find_jobs(job), f"job {job} is seen", timeout=90)
    return daemon.store.find_jobs(job)[0].key


def given(daemon: DaemonProcess, key: JobKey) -> Allocation:
    entries = daemon.store.decisions(key, limit=1)
    return entries[0].decided.allocation if entries else NOTHING


def ever_submitted(cluster: SlurmCluster) -> set[str]:
    """All jobs that Slurm has seen, ended ones too."""
    return set(cluster.run("squeue", "-h", "-t", "all", "-o", "%i").stdout.split())


def test_jobs_are_recorded_and_let_be(cluster: SlurmCluster, alice: User, daemon: DaemonProcess) -> None:
    options = ("--ntasks=3", "--nodes=2", "--cpus-per-task=2", "--mem-per-cpu=100", "--gres=gpu:1", "--time=2:00:00")
    plain = cluster.submit_as(alice, PLAIN, "-J", "bert-large", *options)
    other = cluster.submit_as(alice, PLAIN, "-J", "notebook", "--ntasks=2")
    elastic = cluster.submit_as(alice, f"""#!/bin/sh
#SBATCH -J elastic -c 4 --mem=800
#DL2 model=other samples_per_epoch=203 batch=20 epochs=60 worker=cpu:1,memory:200 ps=cpu:1,memory:100
export DL2_DAEMON={daemon.url}
exec dl2-run --workers 2 --servers 1 python "$HOME/train.py" --epochs 60 --optimizer momentum --step-seconds 0.02
""")  # fmt: skip

    cluster.wait_until(lambda: cluster.job_state(elastic) == "RUNNING", "the first three run")
    waits = cluster.submit_as(alice, PLAIN, "-J", "bert-huge", "--ntasks=6", "--nodes=3", "--gres=gpu:2")

    first = found(daemon, plain)
    daemon.wait_until(lambda: given(daemon, first) == Allocation(3, 0), "what Slurm gave is recorded")
    job = daemon.job(first)
    assert (job.state, job.static, job.owner.user, job.request.model) == (JobState.RUNNING, True, alice.name, "bert")
    assert (job.request.name, job.request.architecture, job.request.epochs) == ("bert-large", Architecture.ALLREDUCE, 2)
    tasks = daemon.tasks(first, live=True)
    assert {(task.role, task.state, task.handle) for task in tasks} == {(Role.WORKER, TaskState.CONFIRMED, plain)}
    nodes = cluster.run("squeue", "-h", "-j", plain, "-o", "%N").stdout.strip()
    assert nodes == f"n[{tasks[0].node[1:]}-{tasks[2].node[1:]}]"
    # Rounded down to thousandths, so that the three have room on what the job has.
    assert {task.demand for task in tasks} == {Resources.of({"cpu": 2, "memory": 200, "gpu": 0.666})}
    entry = daemon.store.decisions(first, limit=1)[0]
    assert entry.policy == "observed"
    assert entry.policy_version.startswith("slurm ")
    assert entry.decided.reason.constraint is Constraint.OBSERVED

    second = found(daemon, waits)
    daemon.wait_until(
        lambda: any("gave nothing yet: " in entry.decided.reason.text for entry in daemon.store.decisions(second)),
        "why Slurm has it wait is recorded",
    )
    assert given(daemon, second) == NOTHING

    third = found(daemon, elastic)
    daemon.wait_until(lambda: given(daemon, third) == Allocation(2, 1), "the elastic one trains at its own size")
    assert daemon.job(third).static

    def measured() -> list[Allocation]:
        return [point.allocation for speeds in daemon.store.job_speeds([third]) for point in speeds.points]

    daemon.wait_until(lambda: Allocation(2, 1) in measured(), "its speed is recorded")
    daemon.wait_for_end(third, timeout=180)
    ended = daemon.job(third)
    assert (ended.state, ended.end_reason, bool(ended.digest)) == (JobState.FINISHED, "did all epochs", True)

    cluster.run("scancel", plain, user=alice)
    daemon.wait_for_end(first)
    assert daemon.job(first).state is JobState.CANCELLED
    daemon.wait_until(lambda: given(daemon, second) == Allocation(6, 0), "the one that waited has room")
    assert daemon.store.find_jobs("notebook") == ()
    # Nothing was submitted, and nothing cancelled but by its owner.
    cluster.wait_until(lambda: set(cluster.running()) == {waits, other}, "nothing but these is left")
    assert ever_submitted(cluster) <= {plain, waits, other, elastic}

    daemon.settings["mode"] = "shadow"
    daemon.write()
    assert daemon.process is not None
    daemon.process.send_signal(1)
    daemon.wait_until(
        lambda: [change.after for change in daemon.store.mode_changes()] == [Mode.SHADOW, Mode.OBSERVE], "the mode"
    )
    slot = daemon.store.last_slot_number()
    daemon.wait_until(lambda: daemon.store.last_slot_number() > slot + 1, "it decides in shadow")
    last = daemon.store.slot(daemon.store.last_slot_number())
    assert last is not None
    assert last.shadow is not None
    assert (last.decision.policy, last.shadow.policy) == ("observed", "drf")
    ran = subprocess.run(
        [BIN / "dl2d", "why", waits, "--config", daemon.config], capture_output=True, text=True, check=True
    )
    assert "decision of dl2d, not carried out" in ran.stdout
    assert ever_submitted(cluster) <= {plain, waits, other, elastic}
    assert set(cluster.running()) == {waits, other}
    assert daemon.stop() == 0
    assert set(cluster.running()) == {waits, other}


def test_what_happened_while_nobody_looked_has_its_own_times(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess
) -> None:
    options = ("--ntasks=2", "--nodes=1", "--time=60")
    running = [cluster.submit_as(alice, PLAIN, "-J", f"bert-{number}", *options) for number in range(2)]
    cluster.wait_until(lambda: set(cluster.running()) == set(running), "both run")
    keys = [found(daemon, job) for job in running]
    daemon.wait_until(lambda: [given(daemon, key) for key in keys] == [Allocation(2, 0)] * 2, "both are recorded")
    assert daemon.stop() == 0

    array = cluster.submit_as(alice, "#!/bin/sh\nexec sleep 2\n", "-J", "bert-array", "--array=3-4", *options)
    failing = cluster.submit_as(alice, "#!/bin/sh\nexit 3\n", "-J", "bert-failing", *options)
    never = cluster.submit_as(alice, PLAIN, "-J", "bert-never", "--hold", *options)
    cluster.run("scancel", running[0], never, user=alice)
    cluster.wait_until(lambda: cluster.running() == [running[1]], "all others have ended")
    cluster.run("scancel", running[1], user=alice)
    cluster.wait_until(lambda: not cluster.running(), "all have ended")
    fields = "JobArrayID:|,SubmitTime:|,StartTime:|,EndTime:|,NodeList:"
    said = cluster.run("squeue", "-h", "-t", "all", f"--Format={fields}", env={"SLURM_TIME_FORMAT": "%s"}).stdout
    times = {words[0]: words for line in said.splitlines() if (words := [word.strip() for word in line.split("|")])}

    daemon.start()
    ids = (*running, f"{array}_3", f"{array}_4", failing, never)
    daemon.wait_until(
        lambda: all((jobs := daemon.store.find_jobs(job)) and jobs[0].state.ended for job in ids), "all are recorded"
    )
    jobs = [daemon.store.find_jobs(job)[0] for job in ids]
    cancelled = JobState.CANCELLED
    assert [job.state for job in jobs] == [
        cancelled, cancelled, JobState.FINISHED, JobState.FINISHED, JobState.FAILED, cancelled
    ]  # fmt: skip
    for job in jobs:
        _, submitted, started, ended, node = times[job.key.id]
        assert (job.key.submitted, job.ended_at) == (int(submitted), float(ended))
        assert job.started_at == (float(started) if node else None)
        tasks = daemon.tasks(job.key, live=False)
        assert [(task.node, task.since) for task in tasks] == [(node, float(ended))] * 2 * bool(node)
    assert len({job.ended_at for job in jobs}) > 1
    assert daemon.store.resizes() == ()
    slot = daemon.store.last_slot_number()
    daemon.wait_until(lambda: daemon.store.last_slot_number() > slot + 2, "it looks again")
    assert [len(daemon.store.find_jobs(job)) for job in ids] == [1] * len(ids)
