"""Container agent: runs what the scheduler gives it, ends it when asked, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from pslite.errors import UsageError
from pslite.launch.daemon_connection.job_registration import Registration
from pslite.launch.task_process import container_agent
from pslite.launch.task_process.container_agent import container_environment

FOREVER = "echo >started; while :; do sleep 0.05; done"
IMPORTS = "import sys; from pslite import run; from pslite.launch.task_process import container_agent"
ENVIRONMENT = {
    "DL2_DAEMON": "http://head:1/",
    "DL2_JOB": "yarn.1.2",
    "DL2_CREDENTIAL": "secret",
    "DL2_INSTANCE": "worker-3",
    "CONTAINER_ID": "container_1_0001_01_000005",
    "NM_HOST": "n1",
    "NM_PORT": "45000",
}
REFUSAL = b'{"error": "there is no job yarn.1.2"}'


class Scheduler:
    """Gives out tasks in order; keeps all reports."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.reports: list[dict[str, Any]] = []
        self.tasks: list[dict[str, Any]] = []
        self.grace: float | None = None
        #: Address of the coordinator.
        self.coordinator = ""
        self.status = 200
        #: what is sent in place of an answer
        self.instead = b""
        self.ends = threading.Event()
        self.registration: dict[str, Any] = {}
        scheduler = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                scheduler.reports.append({**report, "credential": self.headers["Authorization"], "path": self.path})
                content = scheduler.order(report) if scheduler.status == 200 else REFUSAL
                if self.path == "/v1/register":
                    content = json.dumps(scheduler.registration).encode()
                if scheduler.instead:
                    self.wfile.write(scheduler.instead)
                    return
                self.send_response(scheduler.status)
                if scheduler.status == 502:  # a proxy that does not send the body
                    self.send_header("Content-Length", "100")
                    self.end_headers()
                    scheduler.ends.wait(20)
                    return
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def order(self, report: dict[str, Any]) -> bytes:
        if "rm_id" in report:
            return b""
        if "members" in report:
            members = [each["task"] for each in report["members"]]
            return json.dumps({"members": members, "stop": False, "heartbeat_seconds": 0.2}).encode()
        runs = report["task"] and report["exit_code"] is None
        task = self.tasks.pop(0) if self.tasks and not runs else None
        again = bool(runs) and report.get("coordinator", self.coordinator) != self.coordinator
        order = {"report_seconds": 0.1, "task": task, "grace": self.grace if runs else None, "again": again}
        return json.dumps(order).encode()

    def give(self, name: str, script: str, **env: str) -> None:
        argv = ["/bin/sh", "-c", script]
        self.tasks.append({"id": name, "argv": argv, "cwd": str(self.cwd), "env": {"PATH": "/usr/bin:/bin", **env}})

    def start(self, instance: str = "worker-0", changes: str = "") -> subprocess.Popen[str]:
        """Start an agent; `changes` are statements on the module `container_agent`."""
        url = f"http://127.0.0.1:{self.server.server_port}"
        environment = {**ENVIRONMENT, "DL2_ROLE": "container", "DL2_DAEMON": url, "DL2_INSTANCE": instance}
        environment |= {"PATH": os.environ["PATH"], "SECRET_OF_THE_NODE": "x"}
        return subprocess.Popen(
            [sys.executable, "-c", f"{IMPORTS}; {changes or 'pass'}; sys.exit(run.main([]))"], env=environment,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def ended(self, task: str) -> int | None:
        """Exit code that was reported of a task."""
        return next(
            (each["exit_code"] for each in self.reports if each["task"] == task and each["exit_code"] is not None), None
        )


def wait_until(predicate: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    scheduler = Scheduler(tmp_path)
    yield scheduler
    scheduler.ends.set()
    scheduler.server.shutdown()
    scheduler.server.server_close()


@pytest.fixture
def agent(scheduler: Scheduler) -> Iterator[subprocess.Popen[str]]:
    process = scheduler.start()
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_tasks_run_one_after_the_other_with_the_environment_that_is_given(
    scheduler: Scheduler, agent: subprocess.Popen[str]
) -> None:
    wait_until(lambda: scheduler.reports)
    scheduler.give("worker-1", "env >environment; exit 3", GIVEN="a 'b' $c")
    scheduler.give("worker-2", "kill -9 $$")
    wait_until(lambda: scheduler.ended("worker-2") is not None)
    assert (scheduler.ended("worker-1"), scheduler.ended("worker-2")) == (3, -9)
    lines = (scheduler.cwd / "environment").read_text().splitlines()
    assert {"GIVEN=a 'b' $c", "CONTAINER_ID=container_1_0001_01_000005", "NM_HOST=n1"} <= set(lines)
    assert not [line for line in lines if line.startswith(("SECRET_OF_THE_NODE", "DL2_"))]
    first = scheduler.reports[0]
    assert (first["role"], first["position"], first["node"]) == ("worker", 0, "n1:45000")
    assert (first["path"], first["credential"]) == ("/v1/jobs/yarn.1.2/containers", "Bearer secret")
    assert len({report["incarnation"] for report in scheduler.reports}) == 1
    agent.terminate()
    assert agent.wait(20) == 0


def test_a_task_that_cannot_start_has_failed(scheduler: Scheduler, agent: subprocess.Popen[str]) -> None:
    scheduler.tasks.append({"id": "worker-1", "argv": ["no-such-program"], "cwd": "/", "env": {}})
    wait_until(lambda: scheduler.ended("worker-1") == 127)
    assert agent.poll() is None


def test_a_stop_asks_first_and_kills_later(scheduler: Scheduler, agent: subprocess.Popen[str]) -> None:
    scheduler.give("worker-1", f"trap 'echo >saved; exit 0' TERM; {FOREVER}")
    wait_until((scheduler.cwd / "started").exists)
    scheduler.grace = 60
    wait_until(lambda: scheduler.ended("worker-1") == 0)
    assert (scheduler.cwd / "saved").exists()
    (scheduler.cwd / "started").unlink()
    scheduler.grace = None
    scheduler.give("worker-2", f"trap '' TERM; {FOREVER}")
    wait_until((scheduler.cwd / "started").exists)
    scheduler.grace = 0.5
    wait_until(lambda: scheduler.ended("worker-2") == -9)
    assert agent.poll() is None


@pytest.mark.parametrize("script", [FOREVER, f"trap 'sleep 0.5; exit 7' TERM; {FOREVER}"])
def test_a_container_that_is_ended_reports_it_at_once(
    scheduler: Scheduler, agent: subprocess.Popen[str], script: str
) -> None:
    scheduler.give("worker-1", script)
    wait_until((scheduler.cwd / "started").exists)
    os.killpg(agent.pid, signal.SIGTERM)
    assert agent.wait(20) == 0
    ending = [each for each in scheduler.reports if each.get("ending")]
    assert {each["task"] for each in ending} == {"worker-1"}
    assert "ending" not in scheduler.reports[0]


def test_what_a_task_leaves_behind_ends_before_its_end_is_reported(
    scheduler: Scheduler, agent: subprocess.Popen[str]
) -> None:
    scheduler.give(
        "worker-1", f"setsid sh -c \"trap '' TERM; {FOREVER}\" & while [ ! -e started ]; do sleep 0.05; done"
    )
    wait_until(lambda: scheduler.ended("worker-1") == 0)
    assert psutil.Process(agent.pid).children(recursive=True) == []


def test_a_task_goes_on_while_the_scheduler_is_away(scheduler: Scheduler, agent: subprocess.Popen[str]) -> None:
    scheduler.give("worker-1", "echo >started; while [ ! -e go ]; do sleep 0.05; done; exit 5")
    wait_until((scheduler.cwd / "started").exists)
    scheduler.status = 503
    (scheduler.cwd / "go").touch()
    refused = len(scheduler.reports)
    wait_until(lambda: len(scheduler.reports) > refused + 2)
    scheduler.status = 200
    scheduler.reports.clear()
    wait_until(lambda: scheduler.ended("worker-1") == 5)
    assert agent.poll() is None


def test_a_task_goes_on_where_the_words_of_a_refusal_do_not_come(scheduler: Scheduler) -> None:
    process = scheduler.start(changes="container_agent._HTTP_SECONDS = 0.2")
    scheduler.give("worker-1", "echo >started; while [ ! -e go ]; do sleep 0.05; done; exit 5")
    wait_until((scheduler.cwd / "started").exists)
    scheduler.status = 502
    refused = len(scheduler.reports)
    wait_until(lambda: len(scheduler.reports) > refused + 2)
    scheduler.status = 200
    (scheduler.cwd / "go").touch()
    wait_until(lambda: scheduler.ended("worker-1") == 5)
    process.terminate()
    process.communicate(timeout=20)


@pytest.mark.parametrize(
    "instead",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
    ids=["no HTTP", "cut off", "long line"],
)
def test_a_task_goes_on_where_something_else_answers(scheduler: Scheduler, instead: bytes) -> None:
    process = scheduler.start()
    scheduler.give("worker-1", "echo >started; while [ ! -e go ]; do sleep 0.05; done; exit 5")
    wait_until((scheduler.cwd / "started").exists)
    scheduler.instead = instead
    sent = len(scheduler.reports)
    wait_until(lambda: len(scheduler.reports) > sent + 2)
    scheduler.instead = b""
    (scheduler.cwd / "go").touch()
    wait_until(lambda: scheduler.ended("worker-1") == 5)
    process.terminate()
    process.communicate(timeout=20)


def test_a_container_that_the_scheduler_does_not_know_any_more_ends_but_not_while_its_task_runs(
    scheduler: Scheduler,
) -> None:
    process = scheduler.start(changes="container_agent.REFUSED_SECONDS = 1")
    scheduler.give("worker-1", "echo >started; while [ ! -e go ]; do sleep 0.05; done")
    wait_until((scheduler.cwd / "started").exists)
    scheduler.status = 404
    # A report every 0.1 s: more than the time for which one without a task is refused.
    refused = len(scheduler.reports)
    wait_until(lambda: len(scheduler.reports) > refused + 12)
    assert process.poll() is None
    (scheduler.cwd / "go").touch()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "of job yarn.1.2, for" in said
    assert said.endswith("its last answer: there is no job yarn.1.2 (HTTP status 404)\n")
    assert scheduler.ended("worker-1") == 0


def test_a_scheduler_that_is_busy_for_long_ends_no_container(scheduler: Scheduler) -> None:
    process = scheduler.start(changes="container_agent.REFUSED_SECONDS = 0.3")
    wait_until(lambda: scheduler.reports)
    scheduler.status = 503
    busy = len(scheduler.reports)
    wait_until(lambda: len(scheduler.reports) > busy + 6)
    scheduler.status = 200
    scheduler.give("worker-1", "exit 4")
    wait_until(lambda: scheduler.ended("worker-1") == 4)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_what_cannot_be_killed_does_not_keep_the_container(scheduler: Scheduler) -> None:
    process = scheduler.start(
        changes="container_agent.KILL_SECONDS = 0.2; container_agent.kill = lambda processes: None"
    )
    scheduler.give(
        "worker-1", f"setsid sh -c \"trap '' TERM; {FOREVER}\" & while [ ! -e started ]; do sleep 0.05; done"
    )
    wait_until(lambda: scheduler.ended("worker-1") == 0)
    (left,) = psutil.Process(process.pid).children()
    process.terminate()
    assert process.wait(20) == 0
    left.kill()
    said = process.communicate(timeout=20)[1]
    assert f"SIGKILL did not end what worker-1 left behind: look at processes {left.pid}" in said


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_a_coordinators_container_ends_with_it(scheduler: Scheduler, script: str, status: int) -> None:
    scheduler.give("anchor", script)
    process = scheduler.start("coordinator-0")
    process.communicate(timeout=20)
    assert process.returncode == status
    assert scheduler.ended("anchor") is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_coordinators_container_that_is_lost_does_not_end_the_job(scheduler: Scheduler, number: int) -> None:
    scheduler.give("anchor", f"trap 'echo >ended; exit 0' TERM; {FOREVER}")
    process = scheduler.start("coordinator-0")
    wait_until((scheduler.cwd / "started").exists)
    task = psutil.Process(process.pid).children()[0]
    os.killpg(process.pid, number)
    process.communicate(timeout=20)
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
    wait_until(lambda: not task.is_running() or task.status() == psutil.STATUS_ZOMBIE)
    assert scheduler.ended("anchor") is None
    assert not (scheduler.cwd / "ended").exists()


REGISTRATION = {"job": "yarn.1_0001.2", "credential": "given", "token": "ab" * 32}


def test_a_container_without_a_credential_registers_and_runs_its_own_command(scheduler: Scheduler) -> None:
    scheduler.registration = REGISTRATION
    scheduler.give("anchor", "exit 9", DL2_ROLE="worker", DL2_TASK="worker-0", DL2_TOKEN="x")
    url = f"http://127.0.0.1:{scheduler.server.server_port}"
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("DL2_JOB", "DL2_CREDENTIAL")}
    environment |= {"DL2_ROLE": "container", "DL2_DAEMON": url, "DL2_INSTANCE": "coordinator-0", "DL2_PROOF": "secret"}
    process = subprocess.run(
        [sys.executable, "-m", "pslite.run", "python", "train.py"], env=environment | {"OF_THE_USER": "y"},
        cwd=scheduler.cwd, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    registered, *reports = scheduler.reports
    assert registered["path"] == "/v1/register"
    assert (registered["rm_id"], registered["proof"]) == ("application_1_0001", "secret")
    assert (registered["argv"], registered["cwd"]) == (["python", "train.py"], str(scheduler.cwd))
    assert reports[0]["path"] == "/v1/jobs/yarn.1_0001.2/containers"
    assert {report["credential"] for report in reports} == {"Bearer given"}
    # dl2-run itself was started, with the environment that the order has: a worker without a coordinator.
    assert "DL2_COORDINATOR is not set" in process.stderr
    assert process.returncode == 2


def test_tasks_of_a_container_that_registers_keep_the_daemons_account(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**ENVIRONMENT, "DL2_PROOF": "secret", "DL2_DAEMON_UID": "64"}
    del environment["DL2_JOB"]
    registration = Registration(job="yarn.1_0001.2", token="ab" * 32, credential="given", static=True)
    monkeypatch.setattr(container_agent, "register", lambda *_: registration)
    monkeypatch.setattr(container_agent, "_become_subreaper", lambda: None)
    given: list[Mapping[str, str]] = []

    def run_job(_: Registration, own: Mapping[str, str]) -> int:
        given.append(own)
        return 0

    environment["DL2_INSTANCE"] = "coordinator-0"
    place = container_environment(environment)
    assert container_agent.ContainerAgent(place, environment, run_job=run_job, say=print).run() == 0
    assert {name: value for name, value in given[0].items() if name.startswith("DL2_")} == {
        "DL2_DAEMON": "http://head:1", "DL2_DAEMON_UID": "64"
    }  # fmt: skip


def test_options_in_the_launch_command_hold_for_the_tasks(scheduler: Scheduler) -> None:
    scheduler.registration = REGISTRATION
    url = f"http://127.0.0.1:{scheduler.server.server_port}"
    place = {"DL2_ROLE": "coordinator", "DL2_DAEMON": url, "DL2_JOB": "yarn.1_0001.2", "DL2_CREDENTIAL": "given"}
    scheduler.give("anchor", "exit 9", DL2_TOKEN="ab" * 32, **place)
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("DL2_JOB", "DL2_CREDENTIAL")}
    environment |= {"DL2_ROLE": "container", "DL2_DAEMON": url, "DL2_INSTANCE": "coordinator-0", "DL2_PROOF": "secret"}
    process = subprocess.run(
        [sys.executable, "-m", "pslite.run", "--progress-deadline", "soon", "python", "train.py"], env=environment,
        cwd=scheduler.cwd, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert scheduler.reports[0]["argv"] == ["python", "train.py"]
    # The coordinator, which is the task, refuses it.
    assert "DL2_PROGRESS_DEADLINE is 'soon'" in process.stderr
    assert process.returncode == 2


@pytest.mark.slow
def test_a_service_that_the_scheduler_only_observes_trains_in_its_coordinators_container(scheduler: Scheduler) -> None:
    scheduler.registration = {**REGISTRATION, "static": True}
    url = f"http://127.0.0.1:{scheduler.server.server_port}"
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("DL2_JOB", "DL2_CREDENTIAL")}
    environment |= {"DL2_ROLE": "container", "DL2_DAEMON": url, "DL2_INSTANCE": "coordinator-0", "DL2_PROOF": "secret"}
    worker = Path(__file__).parents[2] / "numpy_worker.py"
    command = ["--workers", "2", "python", str(worker), "--epochs", "2"]
    process = subprocess.run(
        [sys.executable, "-m", "pslite.run", *command], env=environment | {"PATH": os.environ["PATH"]},
        cwd=scheduler.cwd, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "2 workers and 1 servers run on this node" in process.stderr
    # It reports as a coordinator, and asks for no task: dl2d changes nothing of the service.
    assert {each["path"].rpartition("/")[2] for each in scheduler.reports} == {"register", "heartbeat"}


def test_a_worker_of_a_service_that_the_scheduler_only_observes_does_not_start(scheduler: Scheduler) -> None:
    scheduler.registration = {**REGISTRATION, "static": True}
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "DL2_JOB"}
    url = f"http://127.0.0.1:{scheduler.server.server_port}"
    process = subprocess.run(
        [sys.executable, "-m", "pslite.run", "python", "train.py"],
        env=environment | {"DL2_ROLE": "container", "DL2_DAEMON": url, "DL2_PROOF": "secret"},
        stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.returncode == 2
    assert "in mode observe only the coordinator's container runs; give ps and worker no containers" in process.stderr


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"DL2_INSTANCE": "chief-0"}, "DL2_INSTANCE is 'chief-0'"),
        ({"DL2_DAEMON": "ftp://head"}, "must be an http"),
        ({"CONTAINER_ID": ""}, "CONTAINER_ID is not set"),
        ({"DL2_CREDENTIAL": ""}, "DL2_CREDENTIAL is not set"),
    ],
)
def test_a_bad_environment_is_told(changed: dict[str, str], said: str) -> None:
    place = container_environment(ENVIRONMENT)
    assert place.daemon == "http://head:1"
    assert "secret" not in repr(place)
    with pytest.raises(UsageError, match=said):
        container_environment({**ENVIRONMENT, **changed})


def test_a_coordinators_container_does_not_say_that_it_is_ended(scheduler: Scheduler) -> None:
    """The scheduler would take it for the end of the job, while its next container goes on with it."""
    scheduler.give("anchor", FOREVER)
    process = scheduler.start("coordinator-0", changes="container_agent.kill = lambda processes: None")
    wait_until((scheduler.cwd / "started").exists)
    process.terminate()
    so_far = len(scheduler.reports)
    wait_until(lambda: len(scheduler.reports) > so_far + 3)
    psutil.Process(process.pid).children()[0].kill()
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert not [each for each in scheduler.reports if "ending" in each]


def test_a_task_is_started_again_when_its_coordinator_has_moved(
    scheduler: Scheduler, agent: subprocess.Popen[str]
) -> None:
    scheduler.coordinator = "n1:1"
    scheduler.give("worker-1", f"trap '' TERM; {FOREVER}", DL2_COORDINATOR="n1:1")
    wait_until((scheduler.cwd / "started").exists)
    scheduler.give("worker-1", 'echo "$DL2_COORDINATOR" >moved; exit 6', DL2_COORDINATOR="n2:2")
    scheduler.coordinator = "n2:2"
    wait_until(lambda: scheduler.ended("worker-1") is not None)
    assert (scheduler.ended("worker-1"), (scheduler.cwd / "moved").read_text()) == (6, "n2:2\n")
    assert agent.poll() is None
