"""Heartbeats to a daemon, and registration, against a small HTTP server that plays it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fake_daemon import Daemon
from free_ports import free_port
from pslite_jobs import command, environment, static_digest
from variants import nightly

from pslite.errors import UsageError
from pslite.launch.daemon_connection.job_registration import register


@pytest.fixture
def daemon():
    daemon = Daemon()
    try:
        yield daemon
    finally:
        daemon.close()


def coordinator(daemon, **environ):
    return daemon.launch(
        "coordinator",
        command(),
        DL2_DAEMON=daemon.url,
        DL2_ROLE="coordinator",
        DL2_HOST="127.0.0.1",
        **{"DL2_JOB": "job-7", "DL2_TOKEN": daemon.token, "DL2_CREDENTIAL": daemon.credential, **environ},
    )


@pytest.mark.slow
def test_a_job_under_a_daemon_that_is_away_for_a_while_grows_shrinks_and_finishes(daemon, gate):
    options = ("--epochs", "40", "--step-seconds", "0.01")
    process = coordinator(daemon)
    first = daemon.wait(lambda beat: beat["state"] == "waiting")
    assert first["total_versions"] is None
    assert first["result"] is None
    daemon.want("worker-0", "ps-0", options=options)
    before = daemon.wait(lambda beat: beat["state"] == "running" and beat["version"] > 0)["version"]
    # it goes on while its daemon does not answer
    daemon.status = 503
    with daemon.changed:
        assert daemon.changed.wait_for(lambda: daemon.refused >= 2, 60)
        daemon.status = 200
    assert daemon.wait(lambda beat: beat["version"] > before)["members"]
    daemon.want("worker-0", "worker-1", "ps-0", "ps-1", options=options)
    daemon.wait(lambda beat: beat["plan"] >= 2 and sum(m["state"] == "active" for m in beat["members"]) == 4)
    daemon.want("worker-1", "ps-1")
    beat = daemon.wait(lambda beat: any(m["state"] == "left" for m in beat["members"]))
    gate.unlink()
    assert beat["epochs"] == 40.0
    assert beat["total_versions"] == 440
    assert daemon.processes["worker-0"].wait(60) == 0
    assert daemon.processes["ps-0"].wait(60) == 0
    last = daemon.wait(lambda beat: beat["state"] == "finished")
    assert last["result"] == {"digest": static_digest("--epochs", "40"), "versions": 440}
    told = next(beat for beat in daemon.beats if beat["ending"])
    assert told["state"] == "running", "before its members end"
    assert last["epoch"] == 40.0
    assert process.wait(60) == 0
    numbers = [plan["number"] for beat in daemon.beats for plan in beat["plans"]]
    assert numbers == sorted(set(numbers)), "a plan is told once"
    plans = [plan for beat in daemon.beats for plan in beat["plans"]]
    assert {task for plan in plans for task in plan["removed"]} == {"worker-0", "ps-0"}
    assert set(plans[0]) == {
        "number",
        "first_version",
        "workers",
        "servers",
        "added",
        "removed",
        "moved_bytes",
        "prepare_ms",
        "move_ms",
        "suspension_ms",
        "longest_step_ms",
        "median_step_ms",
    }
    left = [b for b in daemon.beats if any(m["task"] == "worker-0" and m["state"] == "left" for m in b["members"])]
    told = [m["cause"] for b in left for m in b["members"] if m["task"] == "worker-0"]
    assert told in ([None, "drained"], ["drained"]), "a member that left is told once, and why when that is known"
    assert len({beat["incarnation"] for beat in daemon.beats}) == 1
    said = [m for beat in daemon.beats for m in beat["members"] if m["task"] == "worker-1"]
    assert sum(m["steps"] is not None for m in said) < len(said), "what is not new is not told again"
    assert next(m["steps"] for m in said if m["steps"])["p95_ms"] >= 10.0
    # its whole life, told with its end
    gone = next(m for beat in daemon.beats for m in beat["members"] if m["task"] == "worker-0" and m["cause"])
    assert gone["usage"]["cpu_seconds"] > 0
    assert gone["usage"]["memory_peak"] > 10 << 20
    said = process.stderr.read()
    assert said.count("the job goes on at its present size") == said.count("the daemon answers again") >= 1, said


def test_a_task_that_is_withdrawn_before_it_is_a_member_ends_well_and_stop_cancels_a_job(daemon):
    options = ("--epochs", "30000", "--shards", "1", "--step-seconds", "0.01")
    process = coordinator(daemon)
    daemon.want("worker-0", "ps-0", options=options, DL2_STOPPED_STATUS="7")
    daemon.wait(lambda beat: beat["state"] == "running")
    # a job of one shard has no work for a second worker: it joins and waits
    daemon.want("worker-0", "worker-1", "ps-0", options=options)
    daemon.wait(lambda beat: {"worker-1": "joined"} in [{m["task"]: m["state"]} for m in beat["members"]])
    daemon.want("worker-0", "ps-0")
    assert daemon.processes["worker-1"].wait(60) == 0
    assert daemon.processes["worker-0"].poll() is None
    daemon.stop = True
    last = daemon.wait(lambda beat: beat["state"] == "cancelled")
    assert last["reason"] == "the daemon cancelled it"
    assert process.wait(60) == 1
    assert [daemon.processes[task].wait(60) for task in ("worker-0", "ps-0")] == [7, 7]
    said = daemon.processes["worker-0"].stderr.read()
    assert ("the daemon cancelled it" in said, "Traceback" in said) == (True, False), said
    assert last["ending"] is False


@pytest.fixture
def munge(tmp_path):
    """A stand-in for munge on PATH that shows its arguments."""
    program = tmp_path / "munge"
    program.write_text('#!/bin/sh\necho "MUNGE:$*:"\n')
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], []),
        (["--encrypt", "all"], ["dl2-run", "--encrypt", "all", "--"]),
        (["--durability", "durable"], ["dl2-run", "--durability", "durable", "--"]),
        (["--balance", "even", "--workers", "3"], []),
    ],
    ids=["", "encrypted", "replicas", "other options"],
)
def test_an_anchor_registers_itself(daemon, munge, tmp_path, options, kept):
    daemon.unavailable = 1
    arguments = ["python", "train.py", "--lr", "0.1"]
    process = daemon.launch(
        "coordinator",
        [*options, *arguments],
        DL2_DAEMON=daemon.url,
        DL2_HOST="127.0.0.1",
        SLURM_JOB_ID="4711",
        SLURM_SPANK_DL2_MAX_WORKERS="3",
        PATH=munge,
        MUNGE_SOCKET="/run/m.sock",
        MINE="yes",
        OTHERS="no",
        MY_TOKEN="x",
        DL2_ENV="MINE,MY_TOKEN",
    )
    daemon.wait(lambda beat: beat["state"] == "waiting")
    body = daemon.registrations[-1]
    assert len(daemon.registrations) == 2
    assert body["rm_id"] == "4711"
    assert body["proof"] == "MUNGE:-s dl2d:4711 -S /run/m.sock:"
    assert body["argv"] == [*kept, *arguments]
    assert body["options"] == {"max_workers": "3"}
    assert body["env"]["MINE"] == "yes"
    assert not any(name.startswith(("SLURM_", "DL2_", "OTHERS", "MY_TOKEN")) for name in body["env"])
    assert body["address"].startswith("127.0.0.1:")
    process.terminate()
    assert process.wait(60) == 128 + 15
    said = process.stderr.read()
    assert "not available" in said
    assert "looks like a secret: MY_TOKEN" in said
    assert "its licences are its own" in said
    assert daemon.beats[-1]["state"] == "cancelled"


def test_a_job_that_the_daemon_ends_since_it_failed_says_why(daemon):
    daemon.stop, daemon.reason = True, "ps-0 can never start: QOS gpus starts no job that demands less than gpu:1"
    process = coordinator(daemon)
    last = daemon.wait(lambda beat: beat["state"] == "failed")
    assert last["reason"] == daemon.reason
    assert process.wait(60) == 1
    assert f"job failed: {daemon.reason}" in process.stderr.read()


@pytest.mark.parametrize(
    ("servers", "members"), [(1, {"worker-0", "worker-1", "ps-0"}), nightly(0, {"worker-0", "worker-1"})]
)
def test_under_a_daemon_that_looks_on_a_job_starts_its_own_tasks(daemon, gate, munge, servers, members):
    daemon.static, daemon.stop = True, True  # whatever it says changes nothing
    arguments = ["--workers", "2", "--servers", str(servers), *command("--epochs", "4")]
    process = daemon.launch(
        "coordinator", arguments, DL2_DAEMON=daemon.url, DL2_HOST="127.0.0.1", SLURM_JOB_ID="4711", PATH=munge
    )
    daemon.wait(lambda beat: {m["task"] for m in beat["members"] if m["state"] == "active"} == members)
    gate.unlink()
    last = daemon.wait(lambda beat: beat["state"] in ("finished", "failed"))
    assert (process.wait(60), last["state"]) == (0, "finished"), last
    assert "only observes this job: 2 workers" in process.stderr.read()
    if servers:
        assert last["result"]["digest"] == static_digest("--epochs", "4")


def test_a_refused_registration_ends_with_status_2(daemon, munge):
    daemon.refuse_register = "malformed #DL2 line 3: epocs"
    process = daemon.launch("coordinator", ["x"], DL2_DAEMON=daemon.url, SLURM_JOB_ID="1", PATH=munge)
    assert process.wait(60) == 2
    assert "malformed #DL2 line 3: epocs" in process.stderr.read()


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image", "--container-image of sbatch"),
        ("SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_name", "--container-name of sbatch"),
        ("PYXIS_CONTAINER_IMAGE", "PYXIS_CONTAINER_IMAGE"),
    ],
)
def test_a_job_that_runs_in_a_container_of_pyxis_is_refused_by_name(daemon, munge, name, option):
    given = {name: "docker://train", "SLURM_SPANK__SLURM_SPANK_OPTION_other_image": "x"}
    process = daemon.launch("coordinator", ["x"], DL2_DAEMON=daemon.url, SLURM_JOB_ID="1", PATH=munge, **given)
    assert process.wait(60) == 2
    assert f"{option} cannot be used with an elastic job" in process.stderr.read()
    assert not daemon.registrations


def test_a_job_waits_for_its_turn_while_the_daemon_is_busy(daemon, monkeypatch):
    monkeypatch.setattr("pslite.launch.daemon_connection.job_registration._REGISTER_SECONDS", 0.0)
    daemon.busy = 2
    said = []
    assert register(daemon.url, dict, said.append).job == "job-7"
    assert len(daemon.registrations) == 3
    assert [line.partition(": the job")[0] for line in said] == [
        f"the daemon at {daemon.url} is busy (asked too often)"
    ]
    daemon.unavailable = 1
    with pytest.raises(UsageError, match="within 0 minutes: starting; ask"):
        register(daemon.url, dict, said.append, "; ask")
    monkeypatch.setattr("pslite.launch.daemon_connection.job_registration._BUSY_SECONDS", 0.0)
    daemon.busy = 1
    with pytest.raises(UsageError, match=r"within 0 minutes: asked too often$"):
        register(daemon.url, dict, said.append, "; ask")


def test_a_batch_job_whose_daemon_refuses_connections_ends_with_status_2_unless_it_is_standalone(munge):
    url = f"http://127.0.0.1:{free_port()}"
    patience = "from pslite.launch.daemon_connection import job_registration as it; it._REGISTER_SECONDS = 0"

    def run(*options):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; from pslite import run; {patience}; sys.exit(run.main())", *options],
            env=environment(DL2_DAEMON=url, DL2_HOST="127.0.0.1", SLURM_JOB_ID="1", PATH=munge),
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr.splitlines()

    status, said = run("true")
    assert (status, sum(url in line for line in said)) == (2, 1), said
    assert f"at {url} did not accept this job within 0 minutes: [Errno 111] Connection refused; " in said[-1]
    assert "`dl2-run --standalone` trains without dl2d" in said[-1]
    said = run("--standalone", "--servers", "0", "no-such-command")[1]
    assert "coordinator of standalone" in " ".join(said)
    assert url not in " ".join(said)


def test_an_anchor_that_cannot_coordinate_says_why(daemon, tmp_path):
    state = tmp_path / "file"
    state.touch()
    process = daemon.launch(
        "coordinator", ["x"], DL2_DAEMON=daemon.url, DL2_JOB="job-7", DL2_TOKEN=daemon.token,
        DL2_CREDENTIAL=daemon.credential, DL2_STATE=str(state),
    )  # fmt: skip
    assert process.wait(60) == 2
    said = process.stderr.read()
    assert str(state) in said
    assert daemon.beats, said
    assert daemon.beats[-1]["state"] == "failed"
    assert str(state) in daemon.beats[-1]["reason"]


@pytest.mark.parametrize(
    ("environ", "arguments", "text"),
    [
        ({"DL2_ROLE": "boss"}, ["x"], "DL2_ROLE is 'boss'"),
        ({"DL2_ROLE": "worker"}, ["x"], "DL2_TASK is not set"),
        ({"DL2_ROLE": "worker", "DL2_TASK": "a/b"}, ["x"], "DL2_TASK is 'a/b'"),
        ({"DL2_ROLE": "worker", "DL2_TASK": "w", "DL2_COORDINATOR": "here"}, ["x"], "DL2_COORDINATOR"),
        ({}, [], "no command given"),
        ({}, ["--workers", "0", "x"], "at least 1"),
        ({"DL2_ROLE": "coordinator"}, ["x"], "DL2_DAEMON is not set"),
        ({"DL2_DAEMON": "ftp://x", "DL2_JOB": "j", "DL2_CREDENTIAL": "c", "DL2_TOKEN": "00" * 32}, ["x"], "DL2_DAEMON"),
    ],
)
def test_wrong_use_ends_with_status_2_and_says_what(environ, arguments, text):
    done = subprocess.run(
        [sys.executable, "-m", "pslite.run", *arguments],
        env=environment(**environ), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
