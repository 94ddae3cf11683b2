"""Elastic jobs on the local cluster: the daemon as a process, real training processes, real signals."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from daemon_process import BIN
from local_cluster import KERNELS, REQUEST, WORKER, LocalCluster
from self_signed import self_signed

from dl2d.core.cluster import TaskState
from dl2d.core.decision import Constraint
from dl2d.core.jobs import JobKey, JobState, Role
from dl2d.daemon.key_and_address_files import load_credentials
from pslite.testing import run_local

FAST = ("--optimizer", "momentum", "--step-seconds", "0.01")
#: of jobs that are held by a gate, and of the training that they are compared with
HELD = 20
#: what a server knows is lost with it: momentum's state has no copy
STRICT = ("--optimizer", "momentum", "--step-seconds", "0.2", "--on-loss", "fail")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: LocalCluster) -> Iterator[LocalCluster]:
    """The module's cluster without jobs and with a running daemon."""
    yield shared
    shared.clear()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While it is there, jobs that were given it do not end: something is still to be done to them."""
    path = tmp_path / "hold-job"
    path.touch()
    return path


def check_end(cluster: LocalCluster, job: JobKey) -> None:
    """The job of ``FAST`` that was held at its gate finishes with the weights of a static run."""
    ended, want = cluster.ended(job), cluster.static_digest("--optimizer", "momentum", epochs=HELD)
    assert (ended.state, ended.digest) == (JobState.FINISHED, want)


def test_two_jobs_share_the_nodes_and_end_with_the_weights_of_a_static_run(cluster: LocalCluster, gate: Path) -> None:
    first = cluster.train("first", *FAST, epochs=30, gate=gate, max_workers=4, max_ps=4)
    cluster.wait_for_size(first, 4, 4)
    second = cluster.train("second", *FAST, epochs=30, max_workers=4, max_ps=4)
    cluster.wait_until(lambda: cluster.confirmed(second).workers >= 1, "the second job trains")
    cluster.wait_until(lambda: cluster.confirmed(first).workers < 4, "the first job has shrunk")
    cluster.wait_for_end(second)
    cluster.wait_for_size(first, 4, 4)
    gate.unlink()
    for key in (first, second):
        cluster.ended(key)
    want = cluster.static_digest("--optimizer", "momentum", epochs=30)
    for key in (first, second):
        job = cluster.job(key)
        assert (job.state, job.end_reason, job.digest) == (JobState.FINISHED, "did all epochs", want)
        resizes = cluster.store.resizes(key)
        for resize in resizes:
            states = [event.state for event in resize.events]
            if resize.direction == "grow":
                assert states[0] is TaskState.ASKED, resize
            assert all(before.rank < after.rank for before, after in pairwise(states))
        assert {resize.events[-1].state for resize in resizes if resize.direction == "shrink"} == {TaskState.RELEASED}
    # It was shrunk while it trained, by the daemon's decision, and kept what it had learnt.
    plans = cluster.store.runtime_plans(first)
    assert any(plan.removed for plan in plans)
    assert cluster.stop() == 0


def test_jobs_verify_the_daemon_by_the_certificate_that_it_gives_them(tmp_path: Path) -> None:
    """No authority has signed it, and no variable of the user names it."""
    certificate, key = map(str, self_signed(tmp_path))
    api = {"certificate": certificate, "certificate_key": key}
    with LocalCluster(tmp_path, {"api": api}) as cluster:
        job = cluster.train("private", *FAST, epochs=1, max_workers=1, max_ps=1)
        assert cluster.ended(job).state is JobState.FINISHED


@pytest.mark.slow
def test_the_policy_of_a_new_installation_sizes_jobs_of_a_model_that_it_never_saw(tmp_path: Path, gate: Path) -> None:
    with LocalCluster(tmp_path, {"policy": {}}) as cluster:
        sizes = {"epochs": HELD, "gate": gate, "max_workers": 4, "max_ps": 4}
        jobs = [cluster.train(name, *FAST, **sizes) for name in ("first", "second")]
        cluster.wait_until(lambda: min(min(cluster.confirmed(job)) for job in jobs) > 0, "both jobs train")
        gate.unlink()
        for job in jobs:
            ended = cluster.ended(job)
            want = cluster.static_digest("--optimizer", "momentum", epochs=HELD)
            assert (ended.state, ended.digest) == (JobState.FINISHED, want)
            decided = cluster.store.decisions(job)
            assert {entry.policy for entry in decided} == {"dl2"}
            reasons = [reason for entry in decided for reason in entry.decided.guarded]
            assert not any(reason.constraint is Constraint.FALLBACK for reason in reasons)


@pytest.mark.slow
def test_a_daemon_killed_in_the_middle_of_a_resize_goes_on_where_it_was(cluster: LocalCluster, gate: Path) -> None:
    job = cluster.train("mine", *FAST, epochs=HELD, gate=gate, max_workers=4, max_ps=3)
    cluster.wait_until(lambda: len(cluster.tasks(job, live=True)) >= 2, "tasks are asked for", every=0.005)
    cluster.kill()
    half = cluster.tasks(job, live=True)
    assert {task.state for task in half} & {TaskState.ASKED, TaskState.GRANTED}
    before = {process.pid for process in cluster.processes()}

    cluster.start()
    cluster.wait_for_size(job, 4, 3)
    tasks = cluster.tasks(job, live=True)
    roles = Counter(process.environ().get("DL2_TASK", "anchor") for process in _mains(cluster))
    assert roles == Counter({"anchor": 1, **{task.id: 1 for task in tasks}})  # nothing doubled
    assert before <= {process.pid for process in cluster.processes()}  # found again, not started anew

    # Now in the middle of shrinking, and twice in a row.
    other = cluster.train("other", *FAST, epochs=HELD, gate=gate, max_workers=4, max_ps=3)
    cluster.wait_until(
        lambda: any(task.state is TaskState.DRAINING for task in cluster.tasks(job, live=True)),
        "it shrinks",
        every=0.005,
    )
    for _ in range(2):
        cluster.kill()
        cluster.start()
    cluster.wait_until(lambda: _has_shrunk(cluster, job), "the shrink is done")
    gate.unlink()
    want = cluster.static_digest("--optimizer", "momentum", epochs=HELD)
    for key in (other, job):
        ended = cluster.ended(key)
        assert (ended.state, ended.end_reason, ended.digest) == (JobState.FINISHED, "did all epochs", want)


def _has_shrunk(cluster: LocalCluster, job: JobKey) -> bool:
    """Whether a task of it that was to go is gone while it goes on."""
    gone = [resize for resize in cluster.store.resizes(job) if resize.direction == "shrink"]
    return any(resize.events[-1].state is TaskState.RELEASED for resize in gone) and not cluster.job(job).state.ended


@pytest.mark.slow
def test_sigterm_leaves_the_jobs_alone_and_a_restart_takes_them_up(cluster: LocalCluster, gate: Path) -> None:
    job = cluster.train("mine", *FAST, epochs=HELD, gate=gate, max_workers=2, max_ps=1)
    cluster.wait_for_size(job, 2, 1)
    before = {process.pid for process in cluster.processes()}
    assert cluster.stop() == 0
    assert {process.pid for process in cluster.processes()} == before
    version = cluster.job(job).progress.version
    cluster.start()
    cluster.wait_until(lambda: cluster.job(job).progress.version > version, "its coordinator calls again")
    assert {process.pid for process in cluster.processes()} == before
    gate.unlink()
    check_end(cluster, job)


@pytest.mark.slow
def test_a_killed_server_is_replaced_and_the_job_goes_back(cluster: LocalCluster, gate: Path) -> None:
    job = cluster.train("mine", *FAST, epochs=HELD, gate=gate, max_workers=2, max_ps=1)
    cluster.wait_until(
        lambda: cluster.confirmed(job) == (2, 1) and cluster.job(job).progress.version > 0, "the job trains"
    )
    cluster.process_of(cluster.task(job, "ps-0"), "pslite.launch.server_process").kill()
    cluster.wait_until(lambda: cluster.task(job, "ps-0").state is TaskState.FAILED, "its death is noticed")
    cluster.wait_for_size(job, 2, 1)
    reports = {report.task: report for report in cluster.store.task_reports(job)}
    assert (reports["ps-0"].cause, reports["ps-0"].how) == ("killed", "died: killed by signal 9 (SIGKILL)")
    assert reports["ps-0"].cpu_seconds
    gate.unlink()
    ended = cluster.ended(job)
    assert ended.state is JobState.FINISHED
    assert ended.digest == cluster.static_digest("--optimizer", "momentum", epochs=HELD)
    assert ended.end_reason == "did all epochs"


@pytest.mark.slow
def test_a_job_file_asks_for_replicas_and_a_killed_server_loses_nothing(
    cluster: LocalCluster, gate: Path, tmp_path: Path
) -> None:
    """Of a script with a loop of its own, which does not ask for them itself."""
    command = [sys.executable, str(WORKER.with_name("open_worker.py")), "--steps=60", f"--out={tmp_path / 'out'}"]
    request = {**REQUEST, "name": "mine", "durability": "durable", "max_workers": 2, "max_ps": 2}
    job = cluster.submit(request, command, PSLITE_PACE_FILE=str(gate), **KERNELS)
    cluster.wait_until(
        lambda: cluster.confirmed(job) == (2, 2) and cluster.job(job).progress.version > 0, "the job trains"
    )
    cluster.process_of(cluster.task(job, "ps-0"), "pslite.launch.server_process").kill()
    cluster.wait_until(lambda: cluster.task(job, "ps-0").state is TaskState.FAILED, "its death is noticed")
    cluster.wait_for_size(job, 2, 2)
    gate.unlink()
    ended = cluster.ended(job)
    assert (ended.state, ended.progress.version) == (JobState.FINISHED, 60)
    assert ended.digest == run_local(command, environ={**os.environ, **KERNELS}).digest
    # the scripts did not begin again: none of the plans begins where the job did
    assert [plan.first_version == 0 for plan in cluster.store.runtime_plans(job)].count(True) == 1


def test_a_server_that_is_killed_ends_its_job_if_that_is_preferred(cluster: LocalCluster) -> None:
    job = cluster.train("mine", *STRICT, max_workers=2, max_ps=2)
    cluster.wait_for_size(job, 2, 2)
    cluster.wait_until(lambda: cluster.job(job).progress.version > 0, "it has taken a step")
    task = cluster.task(job, "ps-1")
    victim = cluster.process_of(task, "pslite.launch.server_process")
    victim.kill()
    cluster.wait_for_end(job, timeout=60)
    ended = cluster.ended(job)
    assert ended.state is JobState.FAILED
    for word in ("ps-1", "signal 9", str(victim.pid), socket.gethostname()):
        assert word in ended.end_reason, ended.end_reason
    states = {task.id: task.state for task in cluster.tasks(job)}
    assert set(states.values()) <= {TaskState.RELEASED, TaskState.FAILED}


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(cluster: LocalCluster, gate: Path) -> None:
    job = cluster.train("mine", *FAST, epochs=HELD, gate=gate, max_workers=2, max_ps=1)
    cluster.wait_for_size(job, 2, 1)
    cluster.process_of(cluster.task(job, "worker-1"), "numpy_worker.py").kill()
    cluster.wait_until(lambda: cluster.task(job, "worker-1").state is TaskState.FAILED, "its death is noticed")
    cluster.wait_for_size(job, 2, 1)
    assert cluster.task(job, "worker-2").state is TaskState.CONFIRMED
    gate.unlink()
    check_end(cluster, job)


@pytest.mark.slow
def test_a_job_without_servers_grows_loses_a_worker_and_ends_with_the_weights_of_a_static_run(
    cluster: LocalCluster, gate: Path
) -> None:
    job = cluster.train("mine", *FAST, epochs=HELD, gate=gate, max_workers=2, architecture="allreduce")
    cluster.wait_for_size(job, 2, 0)
    assert {task.role for task in cluster.store.tasks(live=True, job=job)} == {Role.WORKER}
    cluster.process_of(cluster.task(job, "worker-0"), "numpy_worker.py").kill()
    cluster.wait_until(lambda: cluster.task(job, "worker-0").state is TaskState.FAILED, "its death is noticed")
    cluster.wait_for_size(job, 2, 0)
    gate.unlink()
    check_end(cluster, job)


@pytest.mark.slow
def test_a_task_whose_whole_process_group_is_killed_is_named_too(cluster: LocalCluster) -> None:
    job = cluster.train("mine", *STRICT, max_workers=2, max_ps=1)
    cluster.wait_for_size(job, 2, 1)
    # a server that dies before the first plan is in force is replaced
    cluster.wait_until(lambda: cluster.job(job).progress.version > 0, "it has taken a step")
    handle = cluster.task(job, "ps-0").handle
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # one of another task may just have ended
            if process.environ()["DL2_HANDLE"] == handle:
                process.kill()
    ended = cluster.ended(job)
    assert ended.state is JobState.FAILED
    assert f"ps-0 on {socket.gethostname()} (pid " in ended.end_reason
    assert "signal 9" in cluster.task(job, "ps-0").note


@pytest.mark.slow
def test_a_killed_coordinator_is_followed_by_another_one(cluster: LocalCluster, gate: Path) -> None:
    job = cluster.train("mine", *FAST, epochs=HELD, gate=gate, max_workers=2, max_ps=1)
    cluster.wait_for_size(job, 2, 1)
    anchor = next(process for process in _mains(cluster) if process.environ()["DL2_ROLE"] == "coordinator")
    (coordinator,) = anchor.children()
    coordinator.kill()
    cluster.wait_until(lambda: set(anchor.children()) - {coordinator}, "another one is started")
    gate.unlink()
    check_end(cluster, job)


@pytest.mark.slow
def test_a_killed_dl2_run_around_a_coordinator_ends_its_job_and_its_tasks(cluster: LocalCluster) -> None:
    job = cluster.train("mine", "--step-seconds", "0.2", max_workers=2, max_ps=1)
    cluster.wait_for_size(job, 2, 1)
    anchor = next(process for process in _mains(cluster) if process.environ()["DL2_ROLE"] == "coordinator")
    anchor.kill()
    ended = cluster.ended(job)
    reason, _, output = ended.end_reason.partition("; its output: ")
    assert (ended.state, reason) == (JobState.FAILED, "its coordinator ended: killed by signal 9 (SIGKILL)")
    assert Path(output).is_file()


def test_a_cancelled_job_leaves_nothing(cluster: LocalCluster) -> None:
    job = cluster.train("mine", "--step-seconds", "0.2", max_workers=2, max_ps=1)
    cluster.wait_for_size(job, 2, 1)
    # Who looks at the processes, the log or the database learns no secret.
    credentials = load_credentials(cluster.state_dir / "secret", create=False)
    seen = [word for process in cluster.processes() for word in process.cmdline()]
    seen += [cluster.log.read_text(), (cluster.state_dir / "dl2d.sqlite").read_bytes().decode(errors="replace")]
    for secret in (credentials.token(job), credentials.for_job(job), credentials.for_submission()):
        assert not any(secret in text for text in seen)
    assert {(cluster.state_dir / name).stat().st_mode & 0o077 for name in ("secret", "dl2d.sqlite")} == {0}
    done = subprocess.run(
        [str(BIN / "dl2d"), "cancel", "mine", "--config", str(cluster.config)],
        check=False, capture_output=True, text=True, timeout=60, env=cluster.env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert cluster.ended(job).state is JobState.CANCELLED


@pytest.mark.slow
def test_users_whose_program_fails_are_told_how(cluster: LocalCluster) -> None:
    wrong = cluster.train("wrong", "--raise-at", "3", max_workers=2, max_ps=1)
    missing = cluster.submit(
        {"model": "other", "epochs": 1, "samples_per_epoch": 1, "worker": {"cpu": 1}, "name": "missing", "max_ps": 1},
        ["no-such-program"],
    )
    assert "the user's own mistake" in cluster.ended(wrong).end_reason
    assert "no-such-program" in cluster.ended(missing).end_reason


def _mains(cluster: LocalCluster) -> list[psutil.Process]:
    """The first process of each task."""
    found = cluster.processes()
    pids = {process.pid for process in found}
    return [process for process in found if process.ppid() not in pids and process.environ().get("DL2_JOB")]
