"""Elastic jobs under a real Slurm: an ordinary user's sbatch, the daemon as root, real training processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemon_process import DaemonProcess
from slurm_cluster import Ran, SlurmCluster, User, why_not

from dl2d.core.cluster import TaskState
from dl2d.core.jobs import JobKey, JobState
from dl2d.daemon.key_and_address_files import load_credentials
from pslite.errors import AuthenticationError
from pslite.net.authentication import Identity, connect, parse_token
from pslite.testing import run_local

#: A partition of some of the nodes, whose jobs end after a minute if they say nothing of their time.
SMALL = "PartitionName=small Nodes=n1,n2,n3 DefaultTime=1:00 MaxTime=2:00:00 State=UP"
WORKER = Path(__file__).parent.parent / "pslite" / "numpy_worker.py"
#: Of all jobs: with them a gate holds a job for minutes.
EPOCHS = 30

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=4, extra=SMALL) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alice(cluster: SlurmCluster) -> User:
    user = cluster.add_user("alice")
    cluster.add_python(user)
    (user.home / "regression.py").write_text(WORKER.with_name("regression.py").read_text())
    return user


@pytest.fixture
def daemon(
    cluster: SlurmCluster, alice: User, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[DaemonProcess]:
    """A daemon; a parameter has its sharing rules."""
    settings = {
        "resource_manager": cluster.resource_manager(sharing=getattr(request, "param", [])),
        "jobs": {"queue_seconds": 15, "drain_seconds": 20, "end_seconds": 5, "grace_seconds": 3},
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        yield daemon
    cluster.clear()


@pytest.fixture
def gate(alice: User) -> Path:
    """While it is there, jobs that were given it do not end: something is still to be done to them."""
    path = alice.home / "hold-job"
    path.touch()
    return path


def script(daemon: DaemonProcess, *arguments: str, directives: str = "", gate: Path | None = None) -> str:
    return f"""#!/bin/sh
#SBATCH -J elastic -c 1 --mem=50
#DL2 model=other samples_per_epoch=203 batch=20 epochs={EPOCHS}
#DL2 worker=cpu:2,memory:200 ps=cpu:1,memory:100
{directives}
export DL2_DAEMON={daemon.url} {f"PSLITE_PACE_FILE={gate}" if gate else ""}
exec dl2-run python "$HOME/train.py" --epochs {EPOCHS} {" ".join(arguments)}
"""


def registered(daemon: DaemonProcess, job: str) -> JobKey:
    daemon.wait_until(lambda: daemon.store.find_jobs(job), f"job {job} is registered", timeout=90)
    return daemon.store.find_jobs(job)[0].key


@functools.cache
def static_digest(epochs: int = EPOCHS) -> str | None:
    # Equal bits need equal kernels: settings of the BLAS in this environment do not reach the users' jobs.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OPENBLAS_", "OMP_", "MKL_"))}
    command = [sys.executable, str(WORKER), "--epochs", str(epochs), "--optimizer", "momentum"]
    return run_local(command, environ=environment).digest


def test_a_daemon_killed_in_the_middle_of_a_resize_goes_on_where_it_was(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path
) -> None:
    (alice.home / "train.py").write_text(WORKER.read_text())
    options = ("--optimizer", "momentum", "--step-seconds", "0.01")
    job_id = cluster.submit_as(alice, script(daemon, *options, directives="#DL2 max_workers=6 max_ps=3", gate=gate))
    job = registered(daemon, job_id)
    daemon.wait_until(lambda: len(daemon.tasks(job, live=True)) >= 2, "tasks are asked for", every=0.01)
    daemon.kill()
    half = daemon.tasks(job, live=True)
    assert any(task.state is TaskState.ASKED for task in half)

    daemon.start()
    daemon.wait_for_size(job, 6, 3, timeout=90)
    rows = cluster.run("squeue", "-h", "-t", "RUNNING,PENDING", "-o", "%i|%k").stdout.splitlines()
    comments = Counter(row.partition("|")[2] for row in rows)
    tags = {task.tag for task in daemon.tasks(job, live=True)}
    assert {comment for comment in comments if comment.startswith("dl2:")} == tags
    assert max(comments.values()) == 1  # nothing doubled
    assert len(rows) == 1 + 9

    daemon.kill()  # again, while it trains: the job does not notice
    daemon.start()
    gate.unlink()
    daemon.wait_for_end(job, timeout=240)
    daemon.wait_until_empty()
    assert daemon.job(job).state is JobState.FINISHED
    assert daemon.job(job).digest == static_digest()
    cluster.wait_until(lambda: cluster.running() == [], "the script ends after its job")


def test_a_malformed_request_is_told_in_the_jobs_own_output(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess
) -> None:
    malformed = {
        "#DL2 epochs": "'epochs' is not key=value",
        "#DL2 model=resnet-51": "model: is given twice",
        "#DL2 colour=red": "colour: unknown key",
        "#DL2 max_workers=0": "max_workers: expected a whole number",
    }
    jobs = {cluster.submit_as(alice, script(daemon, directives=lines)): words for lines, words in malformed.items()}
    for job, words in jobs.items():
        cluster.wait_until(lambda job=job: cluster.job_state(job) == "FAILED", "the job ends")
        assert words in (alice.home / f"slurm-{job}.out").read_text()
        assert daemon.store.find_jobs(job) == ()
    assert daemon.answers()


def test_an_ordinary_user_sees_their_own_jobs_without_the_daemons_files(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path
) -> None:
    (alice.home / "train.py").write_text(WORKER.read_text())
    job_id = cluster.submit_as(alice, script(daemon, directives="#DL2 max_workers=2 max_ps=1", gate=gate))
    job = registered(daemon, job_id)
    daemon.wait_for_size(job, 2, 1)
    bob = cluster.add_user("bob")

    def dl2d(user: User, *arguments: str) -> Ran:
        environment = {"DL2_DAEMON": daemon.url, "DL2D_CONFIG": str(daemon.config)}
        return cluster.run("dl2d", *arguments, user=user, env=environment, check=False)

    assert dl2d(alice, "sql", "select * from jobs").status == 2  # the configuration is closed to her
    status = dl2d(alice, "status", "--json")
    assert status.status == 0, status.stderr
    shown = json.loads(status.stdout)
    assert [each["job"] for each in shown["jobs"]] == [job.slug]
    assert (shown["daemon"]["runs"], shown["daemon"]["problems"]) == (True, [])
    for command in (("status", job_id), ("why", job_id), ("history", "--job", job_id), ("report", job_id)):
        own, foreign, unknown = (
            dl2d(user, *command[:-1], of) for user, of in ((alice, job_id), (bob, job_id), (bob, "9"))
        )
        assert own.status == 0, own.stderr
        assert own.stdout
        assert (foreign.status, foreign.stdout) == (unknown.status, unknown.stdout) == (2, "")
        # The first line of status says how the daemon is at that moment.
        said, of_unknown = (ran.stderr.splitlines()[-1] for ran in (foreign, unknown))
        assert said.replace(repr(job_id), "JOB") == of_unknown.replace(repr("9"), "JOB")
        assert "no such job of yours" in foreign.stderr
    others = dl2d(bob, "status", "--all")
    assert others.status == 0
    assert "no job is waiting or running" in others.stdout
    gate.unlink()
    daemon.wait_for_end(job, timeout=240)


def test_each_task_of_a_job_array_is_an_elastic_job_of_its_own(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path
) -> None:
    (alice.home / "train.py").write_text(WORKER.read_text())
    options = ("--optimizer", "momentum", "--step-seconds", "0.01")
    text = script(daemon, *options, directives="#DL2 max_workers=2 max_ps=1", gate=gate)
    array = cluster.submit_as(alice, text, "--array=3-5")
    ids = [f"{array}_{number}" for number in (3, 4, 5)]
    jobs = [registered(daemon, each) for each in ids]
    for job in jobs:
        daemon.wait_for_size(job, 2, 1, timeout=90)
    assert [job.id for job in jobs] == ids
    names = cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%j").stdout.split()
    tasks = Counter(f"dl2-{each}-{task}" for each in ids for task in ("worker-0", "worker-1", "ps-0"))
    assert Counter(names) == tasks + Counter(elastic=3)
    environment = {"DL2_DAEMON": daemon.url}
    status = cluster.run("dl2d", "status", user=alice, env=environment).stdout
    assert [each for each in ids if each not in status.split()] == []
    assert ids[1] in cluster.run("dl2d", "why", ids[1], user=alice, env=environment).stdout

    cluster.run("scancel", ids[1], user=alice)
    daemon.wait_for_end(jobs[1])
    daemon.wait_until(lambda: not daemon.tasks(jobs[1], live=True), "its tasks have ended")
    assert [daemon.confirmed(job) for job in jobs] == [(2, 1), (0, 0), (2, 1)]
    gate.unlink()
    daemon.wait_for_end(*jobs, timeout=240)
    daemon.wait_until_empty()
    finished = JobState.FINISHED
    assert [daemon.job(job).state for job in jobs] == [finished, JobState.CANCELLED, finished]
    assert {daemon.job(job).digest for job in (jobs[0], jobs[2])} == {static_digest()}
    cluster.wait_until(lambda: cluster.running() == [], "the scripts end after their jobs")


def test_a_cancelled_anchor_takes_its_tasks_along(cluster: SlurmCluster, alice: User, daemon: DaemonProcess) -> None:
    (alice.home / "train.py").write_text(WORKER.read_text())
    job_id = cluster.submit_as(alice, script(daemon, "--step-seconds", "1", directives="#DL2 max_workers=2 max_ps=1"))
    job = registered(daemon, job_id)
    daemon.wait_for_size(job, 2, 1)
    cluster.run("scancel", job_id, user=alice)
    daemon.wait_for_end(job)
    daemon.wait_until_empty()
    assert daemon.job(job).state is JobState.CANCELLED
    cluster.wait_until(lambda: cluster.running() == [], "nothing is left")
    listed = cluster.run("squeue", "-h", "-t", "all", "-o", "%j %T").stdout.splitlines()
    tasks = dict(line.split() for line in listed if line.startswith(f"dl2-{job_id}-"))
    assert {tasks[f"dl2-{job_id}-{task}"] for task in ("worker-0", "worker-1", "ps-0")} == {"COMPLETED"}


def test_an_orphan_of_a_dead_anchor_is_reaped(cluster: SlurmCluster, alice: User, daemon: DaemonProcess) -> None:
    (alice.home / "train.py").write_text(WORKER.read_text())
    job_id = cluster.submit_as(alice, script(daemon, "--step-seconds", "1", directives="#DL2 max_workers=1 max_ps=1"))
    job = registered(daemon, job_id)
    daemon.wait_for_size(job, 1, 1)
    daemon.kill()
    # What a task job looks like that neither hears its coordinator's end nor anything else.
    deaf = "#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 1; done\n"
    orphan = cluster.submit_as(alice, deaf, f"--comment=dl2:{job.slug}:worker-0")
    # Nobody has asked for these: whoever wrote their marks, they are not stopped.
    marks = f"{job.slug}:worker-7", "other.1.2:worker-0"
    others = [cluster.submit_as(alice, deaf, f"--comment=dl2:{mark}") for mark in marks]
    cluster.wait_until(lambda: cluster.job_state(orphan) == "RUNNING", "the orphan runs")
    cluster.run("scancel", job_id, user=alice)
    daemon.start()
    daemon.wait_for_end(job)
    cluster.wait_until(lambda: sorted(cluster.running()) == sorted(others), "only what is not dl2d's is left")


@pytest.mark.parametrize("daemon", [[{"yield": "higher-priority"}]], indirect=True, ids=["higher-priority"])
def test_an_elastic_job_makes_room_for_a_rigid_one_of_higher_priority_and_grows_again(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path
) -> None:
    (alice.home / "train.py").write_text(WORKER.read_text())
    options = ("--optimizer", "momentum", "--step-seconds", "0.01")
    lines = "#DL2 max_workers=12 max_ps=3"
    job = registered(daemon, cluster.submit_as(alice, script(daemon, *options, directives=lines, gate=gate)))
    daemon.wait_for_size(job, 12, 3, timeout=120)
    assert {task.node for task in daemon.tasks(job, live=True)} == set(cluster.nodes)

    bob = cluster.add_user("bob")
    rigid = cluster.submit_as(bob, "#!/bin/sh\nsleep 600\n", "--exclusive", "--nodes=2")
    daemon.wait_until(lambda: cluster.job_state(rigid) == "PENDING", "it waits")
    slot = daemon.store.last_slot_number()
    daemon.wait_until(lambda: daemon.store.last_slot_number() > slot + 1, "it was decided again")
    assert daemon.confirmed(job) == (12, 3)  # its priority is lower

    cluster.run("scontrol", "update", f"jobid={rigid}", "priority=4294960000")
    cluster.wait_until(lambda: cluster.job_state(rigid) == "RUNNING", "the rigid job starts", timeout=120)
    assert daemon.job(job).state is JobState.RUNNING
    left = daemon.tasks(job, live=True)
    guarded = [reason.text for each in daemon.store.decisions(job) for reason in each.decided.guarded]
    assert any(f"room made for job {rigid} of {bob.name} on 2 nodes: " in text for text in guarded)
    assert len({task.node for task in left if task.state.wanted}) == 2
    daemon.wait_until(
        lambda: all(task.state.wanted for task in daemon.tasks(job, live=True)), "it is seen that they ended"
    )
    ended = [task for task in daemon.tasks(job, live=False) if task.state.ended]
    assert {task.state for task in ended} == {TaskState.RELEASED}  # they drained

    cluster.run("scancel", rigid)
    daemon.wait_for_size(job, 12, 3, timeout=120)
    gate.unlink()
    daemon.wait_for_end(job, timeout=240)
    assert daemon.job(job).digest == static_digest()


@pytest.mark.parametrize("daemon", [[{"yield": "always"}]], indirect=True, ids=["always"])
def test_a_job_that_gets_no_room_in_a_queue_that_never_empties_waits_for_its_turn_there(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path
) -> None:
    """Jobs of bob, which each need 7 of the 8 CPUs of a node, take whatever becomes free at once."""
    (alice.home / "train.py").write_text(WORKER.read_text())
    bob = cluster.add_user("bob")
    job_id = cluster.submit_as(alice, script(daemon, "--optimizer", "momentum", gate=gate), "--hold")

    def submit_of_bob(count: int) -> list[str]:
        return [cluster.submit_as(bob, "#!/bin/sh\nsleep 5\n", "--cpus-per-task=7", "--mem=50") for _ in range(count)]

    submit_of_bob(12)
    cluster.run("scontrol", "release", job_id)
    cluster.run("scontrol", "update", f"jobid={job_id}", "priority=4294960000")  # its batch job starts first

    queued: set[str] = set()

    def train_in_backlog() -> bool:
        waiting = cluster.run("squeue", "--noheader", f"--user={bob.name}", "--states=PD", "--format=%i").stdout
        own = cluster.run("squeue", "--noheader", f"--user={alice.name}", "--states=PD", "--format=%j|%n").stdout
        queued.update(row.split("|")[0] for row in own.splitlines() if row.startswith("dl2-") and row.endswith("|"))
        submit_of_bob(max(8 - len(waiting.split()), 0))
        found = daemon.store.find_jobs(job_id)
        return bool(found) and found[0].state is JobState.RUNNING

    cluster.wait_until(train_in_backlog, "it trains", timeout=240)
    job = registered(daemon, job_id)
    assert queued  # its first tasks were
    daemon.wait_until(lambda: all(task.node for task in daemon.tasks(job, live=True)), "none is queued any more")
    for waiting in cluster.run("squeue", "--noheader", f"--user={bob.name}", "--format=%i").stdout.split():
        cluster.run("scancel", waiting)
    gate.unlink()
    daemon.wait_for_end(job, timeout=240)
    assert daemon.job(job).state is JobState.FINISHED
    assert daemon.job(job).digest == static_digest()


@pytest.mark.timeout(900)
def test_all_jobs_of_an_array_end_whose_coordinators_fill_the_cluster(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess
) -> None:
    """On two nodes of eight CPUs each: 22 coordinators, of which Slurm starts 16."""
    (alice.home / "train.py").write_text(WORKER.read_text())
    text = script(daemon, "--optimizer", "momentum", directives="#DL2 max_workers=2 max_ps=1")
    text = text.replace("worker=cpu:2", "worker=cpu:1")
    array = cluster.submit_as(alice, text, "--array=1-22", "--exclude=n3,n4")
    ids = {f"{array}_{number}" for number in range(1, 23)}

    def last_runs() -> dict[str, JobState]:
        found = sorted(daemon.store.jobs(live=False), key=lambda job: job.key.submitted)
        return {job.key.id: job.state for job in found if job.key.id in ids}

    daemon.wait_until(
        lambda: Counter(last_runs().values()) == {JobState.FINISHED: len(ids)}, "all have trained", timeout=800
    )
    assert any("coordinators without tasks held the room" in job.end_reason for job in daemon.store.jobs(live=False))


def job_with_checkpoint(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path, folder: str
) -> tuple[str, JobKey]:
    """A job of two workers and a server that has written a checkpoint into a folder of its user's home."""
    (alice.home / "train.py").write_text(WORKER.read_text())
    options = (
        "--optimizer", "momentum", "--step-seconds", "0.01", "--checkpoint", f'"$HOME/{folder}"', "--every", "50",
    )  # fmt: skip
    job_id = cluster.submit_as(alice, script(daemon, *options, directives="#DL2 max_workers=2 max_ps=1", gate=gate))
    job = registered(daemon, job_id)
    daemon.wait_for_size(job, 2, 1, timeout=90)
    kept = alice.home / folder
    daemon.wait_until(lambda: kept.exists() and any(kept.glob("*/*")), "it has a checkpoint", timeout=90)
    return job_id, job


def test_a_requeued_job_goes_on_from_its_checkpoint(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path
) -> None:
    job_id, first = job_with_checkpoint(cluster, alice, daemon, gate, "kept")
    cluster.run("scontrol", "requeue", job_id)

    daemon.wait_until(lambda: daemon.job(first).state.ended, "its first run ends")
    second = daemon.store.find_jobs(job_id)[0].key
    assert daemon.job(first).end_reason.endswith(f"goes on from its checkpoint as {second.slug}")
    assert (second.id, second > first, daemon.job(second).state) == (first.id, True, JobState.SUBMITTED)
    daemon.wait_until(lambda: daemon.tasks(first, live=True) == (), "tasks of the first run end", timeout=90)
    assert cluster.job_state(job_id) == "PENDING"
    cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")  # Slurm would let it wait for two minutes
    daemon.wait_for_size(second, 2, 1, timeout=90)
    gate.unlink()
    daemon.wait_for_end(second, timeout=240)
    outputs = [path.read_text() for path in alice.home.rglob("*.out")]
    assert any("the job goes on from version 50: " in text for text in outputs)
    assert daemon.job(second).state is JobState.FINISHED
    assert daemon.job(second).digest == static_digest()
    daemon.wait_until_empty()
    cluster.wait_until(lambda: cluster.running() == [], "the script ends after its job")


def processes_on(user: User, node: str) -> list[psutil.Process]:
    """What runs of a user's jobs on a node, without what batch scripts, or Slurm's own steps, wait with."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            is_of_job = process.uids().real == user.uid and process.environ().get("SLURMD_NODENAME") == node
            if is_of_job and process.name() != "sleep":
                found.append(process)
    return found


def test_what_survives_on_a_lost_node_of_a_requeued_job_ends_and_is_not_let_in(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path
) -> None:
    job_id, first = job_with_checkpoint(cluster, alice, daemon, gate, "fenced")
    node = cluster.run("squeue", "-h", "-j", job_id, "-o", "%N").stdout.strip()
    survivors = processes_on(alice, node)
    assert "dl2-run" in " ".join(word for process in survivors for word in process.cmdline())
    try:
        # The node hangs; Slurm takes it for lost, and cannot end what is there.
        for process in survivors:
            process.suspend()
        cluster.kill(node)
        cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        daemon.wait_until(lambda: daemon.job(first).state.ended, "its first run ends")
        second = daemon.store.find_jobs(job_id)[0].key
        assert second > first
        cluster.wait_until(lambda: cluster.job_state(job_id) == "PENDING", "it waits again")
        cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")
        daemon.wait_for_size(second, 2, 1, timeout=90)
        assert node not in {task.node for task in daemon.tasks(second)}
        reached = daemon.job(first).progress.version

        credentials = load_credentials(daemon.state_dir / "secret", create=False)
        beat = daemon.post(f"/v1/jobs/{second.slug}/heartbeat", {}, credential=credentials.for_job(first))
        assert beat.status_code == 403
        address = daemon.job(second).address
        stale = Identity("worker", "worker-0", uuid.uuid4().hex, parse_token(credentials.token(first)))
        with pytest.raises(AuthenticationError, match="token"):
            connect(address, stale, "control", timeout=20)

        assert [process for process in survivors if process.status() != psutil.STATUS_STOPPED] == []
        for process in survivors:
            process.resume()
        _, left = psutil.wait_procs(survivors, timeout=60)
        assert left == []
        daemon.wait_until(lambda: not daemon.tasks(first, live=True), "no task of the first run is left")
        assert daemon.confirmed(second) == (2, 1)
        assert daemon.job(first).progress.version == reached
    finally:
        for process in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        cluster.start_node(node)
    gate.unlink()
    daemon.wait_for_end(second, timeout=240)
    assert daemon.job(second).state is JobState.FINISHED
    assert daemon.job(second).digest == static_digest()
    daemon.wait_until_empty()


def test_a_job_trains_where_its_partition_and_reservations_allow_it_as_long_as_its_anchor(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path
) -> None:
    (alice.home / "train.py").write_text(WORKER.read_text())
    reserved = ("reservationname=root-only", "starttime=now", "duration=60", "nodes=n2", "users=root")
    cluster.run("scontrol", "create", "reservation", *reserved)
    try:
        sbatch = ("--partition=small", "--exclude=n3", "--time=30")
        text = script(daemon, "--step-seconds", "0.01", directives="#DL2 max_workers=12 max_ps=1", gate=gate)
        job = registered(daemon, cluster.submit_as(alice, text, *sbatch))
        daemon.wait_for_size(job, 3, 1, timeout=120)
        slot = daemon.store.last_slot_number()
        daemon.wait_until(lambda: daemon.store.last_slot_number() > slot + 1, "it was decided again")
        tasks = daemon.tasks(job, live=False)
        assert {task.node for task in tasks} == {"n1"}
        assert {task.state for task in tasks} == {TaskState.CONFIRMED}
        limits = cluster.run("squeue", "-h", "-o", "%l").stdout.split()
        assert len(limits) == 5
        # The coordinator's, and what was left of it; less for tasks that were backfilled.
        assert "30:00" in limits
        assert set(limits) <= {"27:00", "28:00", "29:00", "30:00"}
        reason = daemon.store.decisions(job)[-1].decided.reason.text
        assert "its job may use 1 of 4 nodes (partition small; not n3, which the job excludes; not those of " in reason
        gate.unlink()
        daemon.wait_for_end(job, timeout=240)
    finally:
        cluster.run("scancel", "-u", alice.name)
        cluster.wait_until(lambda: not cluster.running(), "nothing is left")
        cluster.run("scontrol", "delete", "reservationname=root-only")


@pytest.mark.nightly
def test_an_elastic_job_leaves_the_nodes_of_a_reservation_before_it_begins(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, gate: Path
) -> None:
    (alice.home / "train.py").write_text(WORKER.read_text())
    lines = "#DL2 max_workers=12 max_ps=3"
    job = registered(daemon, cluster.submit_as(alice, script(daemon, directives=lines, gate=gate)))
    daemon.wait_for_size(job, 12, 3, timeout=120)
    # Its anchor stays where it is, so not on that node.
    anchor = cluster.run("squeue", "-h", "-j", job.id, "-o", "%N").stdout.strip()
    node = next(node for node in cluster.nodes if node != anchor)
    cluster.run("scontrol", "create", "reservation=service", "starttime=now+500", "duration=60", "users=root",
                "flags=maint,ignore_jobs", f"nodes={node}")  # fmt: skip
    try:
        daemon.wait_until(
            lambda: node not in {task.node for task in daemon.tasks(job, live=True)}, "the node is empty", timeout=120
        )
        guarded = [reason.text for each in daemon.store.decisions(job) for reason in each.decided.guarded]
        assert f"the site keeps 1 node of reservation service free: {node}" in guarded
    finally:
        cluster.run("scontrol", "delete", "reservation=service")
    gate.unlink()
    daemon.wait_for_end(job, timeout=240)
