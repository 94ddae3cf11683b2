"""Backend ``rest``: what it sends to slurmrestd, and how it reads answers that slurmrestd of each release gave."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any

import pytest
from slurm_fakes import REQUEST, Clock, FakeSlurm, Managers, context_of, identity, job_row, task

from dl2d.core.errors import ConfigError, Denied, NotFound, Rejected, ResourceManagerError, Unavailable
from dl2d.core.jobs import Job, JobKey, JobState, Launch, Owner, Progress
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange
from dl2d.store.sql_store import SqlStore
from dl2d.tick.tick import tick
from dl2d.tick.tick_state import TickState
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.settings import SlurmSettings
from dl2d_slurm.submission.job_fields_for_rest_and_pyslurm import job_description, job_fields
from dl2d_slurm.submission.submission_backends import chosen_backend

#: Recorded: status and body by release, version of the API, and what was asked.
ANSWERS = json.loads((Path(__file__).parent / "slurmrestd_answers.json").read_text())
KEY = JobKey("fake", "12", 1_795_253_932)
RELEASES = ["26.05 v0.0.42", "26.05 v0.0.45"]


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    token: str
    body: Any


class FakeSlurmrestd(UnixStreamServer):
    """Answers as slurmrestd of a release did, and notes what it was asked."""

    def __init__(self, socket: Path) -> None:
        super().__init__(str(socket), _Handler)
        self.address = f"unix:{socket}"
        self.requests: list[Request] = []
        #: Writes another answer than the one with this status and body, which may be broken.
        self.write: Callable[[BaseHTTPRequestHandler, int, bytes], None] = write_answer
        self.release(RELEASES[0])

    def release(self, release: str, submit: str = "submitted", cancel: str = "cancelled") -> None:
        """Have one version of the API, and give the answers that were recorded under these names."""
        recorded = ANSWERS[release]
        self.version = release.rsplit(maxsplit=1)[-1]
        self.answers = {"GET ping/": recorded["ping"], "POST job/submit": recorded.get(submit)}
        self.answers["DELETE jobs/"] = recorded.get(cancel)


def write_answer(handler: BaseHTTPRequestHandler, status: int, text: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


class _Handler(BaseHTTPRequestHandler):
    server: FakeSlurmrestd
    protocol_version = "HTTP/1.1"  # connections are kept
    timeout = 30

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, self.headers["X-SLURM-USER-TOKEN"], json.loads(body or "null"))
        self.server.requests.append(request)
        found = re.fullmatch(r"/slurm/(v0\.0\.\d+)/(.*)", self.path)
        assert found is not None
        known = found[1] == self.server.version
        status, answer = (
            self.server.answers[f"{self.command} {found[2]}"] if known else (404, "Unable to find requested")
        )
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        try:
            self.server.write(self, status, text)
        except BrokenPipeError:
            self.close_connection = True

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def slurmrestd(tmp_path: Path) -> Iterator[FakeSlurmrestd]:
    with FakeSlurmrestd(tmp_path / "socket") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def manager(manager_on: Managers, slurmrestd: FakeSlurmrestd) -> SlurmManager:
    return manager_on(uid=64030, slurmrestd=slurmrestd.address)


@pytest.mark.parametrize("release", RELEASES)
def test_a_task_is_submitted_as_its_owner(
    slurm: FakeSlurm, manager_on: Managers, slurmrestd: FakeSlurmrestd, release: str
) -> None:
    slurmrestd.release(release)
    options = ["--licenses=a:2", "--reservation=ml", "--constraint=a&b", "--exclude=n[7-8]"]
    manager = manager_on(uid=64030, slurmrestd=slurmrestd.address, sbatch_options=options, time_limit="1-00:30:00")
    handle = manager.submit(task(demand=Resources.of({"cpu": 2, "memory": 100, "gpu": 1})))
    assert handle == str(ANSWERS[release]["submitted"][1]["job_id"])
    sent = slurmrestd.requests[-1]
    assert (sent.path, sent.token) == (f"/slurm/{slurmrestd.version}/job/submit", "a.b.c")
    job = sent.body["job"]
    assert job.pop("script").startswith("#!/bin/sh\n")
    assert job == {
        "user_id": "1001",
        "group_id": "1002",
        "current_working_directory": "/home/alice",
        "environment": [
            f"PATH={slurm.folder}",
            "SLURM_CONF=/x/slurm.conf",
            "SLURM_UMASK=0022",
            "SLURM_CPUS_PER_TASK=2",
        ],
        "name": "dl2-12-worker-1",
        "comment": "dl2:fake.12.1795000000:worker-1",
        "standard_output": "dl2-12-worker-1.out",
        "nodes": "1",
        "tasks": 1,
        "cpus_per_task": 2,
        "memory_per_node": {"set": True, "number": 100},
        "tres_per_node": "gres/gpu:1",
        "requeue": False,
        "required_nodes": ["n1"],
        "time_limit": {"set": True, "number": 1470},
        "licenses": "a:2",
        "reservation": "ml",
        "constraints": "a&b",
        "excluded_nodes": ["n7", "n8"],
    }
    assert slurm.calls("sbatch") == []


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--time=0", {"set": True, "infinite": True}),
        ("--time=UNLIMITED", {"set": True, "infinite": True}),
        ("--time=90", {"set": True, "number": 90}),
        ("--time-min=88", {"set": True, "number": 88}),
        ("--time=20160", {"set": True, "number": 20160}),
        ("--time=0:30", {"set": True, "number": 1}),
        ("--time=12:30", {"set": True, "number": 13}),
        ("--time=1:12:30", {"set": True, "number": 73}),
        ("--time=1-12", {"set": True, "number": 2160}),
        ("--time=1-0:1", {"set": True, "number": 1441}),
        ("--time=400-00:00:00", {"set": True, "number": 576_000}),
        ("--nice=100", 100),
        ("--nice=-5", -5),
        ("--mem=300M", {"set": True, "number": 300}),
        ("--gres=gpu:A100:2,nvme:1", "gres/gpu:A100:2,gres/nvme:1"),
        ("--exclude=n[1-2,07]", ("n1", "n2", "n07")),
        ("--no-requeue", False),
        ("--chdir=/home/ä b", "/home/ä b"),
    ],
)
def test_an_option_means_what_it_means_to_sbatch(option: str, field: object) -> None:
    (value,) = job_fields([option], "rest").values()
    assert value == field


@pytest.mark.parametrize(
    "option",
    [
        *("--nice", "--nice=", "--nice=x", "--nice=1_0", "--nice=٣", "--nice=99999999999", "--time", "--time=soon"),
        *("--time=1-", "--time=-5", "--time=99999999999999", "--mem=100", "--mem=0M", "--mem=1G", "--cpus-per-task=0"),
        *("--exclude=/etc/nodes", "--exclude=n1&n2", "--nodelist=", "--no-requeue=1", "--uid=alice"),
        *("--comment=a\nb", "--chdir=/a\0b", "--chdir=/a\udce9", "--chdir=/a\ud800", "--partition=", "--gres="),
    ],
)
def test_what_cannot_be_sent_as_sbatch_takes_it_is_rejected_by_its_name(option: str) -> None:
    with pytest.raises(Rejected, match=rf"^{option.partition('=')[0]} cannot be used with the backend rest"):
        job_fields([option], "rest")


def test_no_text_of_a_job_ends_in_another_error_than_a_refusal(
    slurm: FakeSlurm, manager_on: Managers, slurmrestd: FakeSlurmrestd
) -> None:
    rest, command = manager_on(uid=64030, slurmrestd=slurmrestd.address), manager_on(uid=0)
    latin = b"a\xe9".decode(errors="surrogateescape")
    for text in (latin, "a\ud800", "a\0"):
        for launch in (Launch(("x", text), "/"), Launch(("x",), "/", (("A", text),)), Launch(("x",), f"/{text}")):
            for manager in (rest, command):
                if manager is command and text == latin:  # sbatch is passed all bytes
                    manager.submit(task(launch=launch))
                    continue
                with pytest.raises(Rejected, match=r"the script|--chdir|command or environment"):
                    manager.submit(task(launch=launch))
    assert len(slurm.calls("sbatch")) == 3
    assert not [request for request in slurmrestd.requests if request.method == "POST"]


@pytest.mark.parametrize("variable", [{"A": "b\nc"}, {"A": "\0"}, {"A": "\udce9"}, {"A=B": "c"}, {"": "c"}])
def test_a_variable_that_cannot_be_sent_is_rejected_by_its_name(variable: dict[str, str]) -> None:
    with pytest.raises(Rejected, match=r"the variable .* cannot be used with the backend rest"):
        job_description([], "", variable, backend="rest")


def test_a_job_has_the_environment_mask_folder_and_script_that_sbatch_gives_it(
    slurm: FakeSlurm, manager_on: Managers, slurmrestd: FakeSlurmrestd
) -> None:
    given = {"sbatch_options": ["--licenses=a:2", "--nice=5", "--time=12:30"], "partition": "gpu"}
    spec = task(owner=Owner("alice", 1001, 1002, account="ml", qos="high"))
    manager_on(uid=0, **given).submit(spec)
    manager_on(uid=64030, slurmrestd=slurmrestd.address, **given).submit(spec)
    (sbatch,) = slurm.calls("sbatch")
    job = dict(slurmrestd.requests[-1].body["job"])
    assert job.pop("script") == sbatch.stdin
    environment = dict(each.split("=", 1) for each in job.pop("environment"))
    assert int(environment.pop("SLURM_UMASK"), 8) == sbatch.umask
    assert environment.pop("SLURM_CPUS_PER_TASK") == "2"  # which a real sbatch sets
    # The interpreter of the fake sets a locale.
    assert environment == {name: value for name, value in sbatch.env.items() if name != "LC_CTYPE"}
    assert "--export=ALL" in sbatch.argv
    assert "--propagate=NONE" in sbatch.argv
    # Each option of sbatch has its field; those about sbatch itself have none.
    options = dict(option.partition("=")[::2] for option in sbatch.argv[1:])
    options = {name: value for name, value in options.items() if name not in ("--export", "--parsable", "--propagate")}
    assert len(options) == len(job) == 18
    for name, field in (
        ("--account", "account"),
        ("--chdir", "current_working_directory"),
        ("--comment", "comment"),
        ("--gid", "group_id"),
        ("--job-name", "name"),
        ("--licenses", "licenses"),
        ("--nodes", "nodes"),
        ("--output", "standard_output"),
        ("--partition", "partition"),
        ("--qos", "qos"),
        ("--uid", "user_id"),
    ):
        assert job.pop(field) == options[name]
    assert job == {
        "cpus_per_task": 2,
        "memory_per_node": {"set": True, "number": 100},
        "nice": 5,
        "requeue": False,
        "required_nodes": ["n1"],
        "tasks": 1,
        "time_limit": {"set": True, "number": 13},
    }


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("invalid node", NotFound),
        ("invalid partition", Rejected),
        ("not SlurmUser", Denied),
        ("bad token", Unavailable),
        ("controller down", Unavailable),
    ],
)
def test_refusals_are_typed_and_in_slurms_words(
    manager: SlurmManager, slurmrestd: FakeSlurmrestd, release: str, answer: str, kind: type[ResourceManagerError]
) -> None:
    slurmrestd.release(release, submit=answer)
    with pytest.raises(ResourceManagerError, match=r"submission of worker-1 of job 12 for alice on n1") as caught:
        manager.submit(task())
    assert type(caught.value) is kind
    assert ANSWERS[release][answer][1]["errors"][0]["error"] in str(caught.value)


@pytest.mark.parametrize("cancel", ["cancelled", "signal to waiting job", "unknown job"])
def test_jobs_are_asked_to_end_and_cancelled_at_their_deadlines(
    slurm: FakeSlurm, manager: SlurmManager, slurmrestd: FakeSlurmrestd, clock: Clock, cancel: str
) -> None:
    slurmrestd.release(RELEASES[0], cancel=cancel)
    slurm.answer("squeue", rows=[job_row(1), job_row(2)])
    manager.stop([identity(1), identity(2)], 30.0)
    clock.now += 31
    manager.listing()
    path = "/slurm/v0.0.42/jobs/"
    assert [request.body for request in slurmrestd.requests if request.path == path] == [
        {"jobs": ["1", "2"], "job_state": ["PENDING"]},
        {"jobs": ["1", "2"], "job_state": ["RUNNING"], "signal": "TERM", "flags": ["BATCH_JOB"]},
        {"jobs": ["1", "2"]},
    ]
    assert slurm.calls("scancel") == []


def test_what_a_proxy_answers_is_no_answer(slurm: FakeSlurm, manager: SlurmManager, slurmrestd: FakeSlurmrestd) -> None:
    slurm.answer("squeue", rows=[job_row(1)])
    for status, answer in ((502, {"message": "Bad gateway"}), (500, {}), (401, {})):
        slurmrestd.answers |= {"POST job/submit": [status, answer], "DELETE jobs/": [status, answer]}
        with pytest.raises(Unavailable, match=f"answered {status}"):
            manager.submit(task())
        with pytest.raises(Unavailable, match=f"answered {status}"):
            manager.stop([identity(1)], 30.0)


@pytest.mark.parametrize("broken", ["head", "body"])
def test_an_answer_that_drips_ends_with_the_deadline_of_the_call(
    manager_on: Managers, slurmrestd: FakeSlurmrestd, broken: str
) -> None:
    def drip(handler: BaseHTTPRequestHandler, status: int, text: bytes) -> None:
        if broken == "body":
            handler.send_response(status)
            handler.send_header("Content-Length", "1000000")
            handler.end_headers()
        while True:
            handler.wfile.write(b"H")
            never.wait(0.02)

    never = threading.Event()
    manager = manager_on(uid=64030, slurmrestd=slurmrestd.address, command_timeout_seconds=1)
    slurmrestd.write = drip
    with pytest.raises(Unavailable, match="did not answer in time"):
        manager.submit(task())


def test_an_endless_answer_is_not_read_to_its_end(manager: SlurmManager, slurmrestd: FakeSlurmrestd) -> None:
    def endless(handler: BaseHTTPRequestHandler, status: int, text: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while True:
            handler.wfile.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")

    slurmrestd.write = endless
    with pytest.raises(Unavailable, match="answered with over 4194304 bytes"):
        manager.submit(task())


def test_an_answer_that_is_sent_twice_is_not_taken_for_that_to_the_next_call(
    manager: SlurmManager, slurmrestd: FakeSlurmrestd
) -> None:
    def twice(handler: BaseHTTPRequestHandler, status: int, text: bytes) -> None:
        whole = b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text)
        handler.wfile.write(whole * 2)

    answer = ANSWERS[RELEASES[0]]["submitted"][1]
    slurmrestd.write = twice
    assert manager.submit(task()) == str(answer["job_id"])
    slurmrestd.answers["POST job/submit"] = [200, {**answer, "job_id": 5}]
    assert manager.submit(task()) == "5"


def test_what_does_not_say_that_a_job_was_submitted(manager: SlurmManager, slurmrestd: FakeSlurmrestd) -> None:
    answers: list[tuple[int, object, type[ResourceManagerError], str]] = [
        (200, "<html>Sign in</html>", Unavailable, "answered 200: <html>Sign in"),
        (200, {}, Unavailable, "answered 200"),
        (200, [], Unavailable, "answered 200"),
        (200, {"meta": {}}, Unavailable, "does not say whether"),
        (200, {"meta": {}, "job_id": -1}, Unavailable, "does not say whether"),
        (200, {"meta": {}, "job_id": "7"}, Unavailable, "answered 200"),
        (500, "Internal error", Unavailable, "answered 500: Internal error"),
        (500, {"meta": {}, "errors": [{"error": "Unspecified error"}]}, Rejected, "Unspecified error"),
        (200, {"meta": {}, "errors": [{"error": "Invalid qos specification"}]}, Rejected, "Invalid qos"),
        (200, "[" * 100_000, Unavailable, "answered 200"),
    ]
    for status, answer, kind, said in answers:
        slurmrestd.answers["POST job/submit"] = [status, answer]
        with pytest.raises(ResourceManagerError, match=said) as caught:
            manager.submit(task())
        assert type(caught.value) is kind, said


def site_with_a_job(slurm: FakeSlurm, clock: Clock) -> SqlStore:
    """A store with a job that waits for a worker and a PS, and its anchor in Slurm."""
    slurm.answer("squeue", rows=[job_row(12)])
    store = SqlStore("sqlite://")
    job = Job(key=KEY, request=REQUEST, owner=Owner("alice", 1001, 1002), launch=Launch(("x",), "/"), anchor="12")
    store.add_job(job)
    store.change_job(KEY, JobChange(state=JobState.READY, address="127.0.0.1:1"), clock.now)
    return store


@pytest.mark.parametrize("answer", ["lost", "of another job"])
def test_a_submission_without_its_own_answer_is_not_repeated(
    slurm: FakeSlurm, manager: SlurmManager, slurmrestd: FakeSlurmrestd, clock: Clock, answer: str
) -> None:
    """What Slurm has started is found by its mark, or stopped; no task is there twice."""

    def start(handler: BaseHTTPRequestHandler, status: int, text: bytes) -> None:
        asked = slurmrestd.requests[-1]
        if handler.command == "POST":
            rows.append(job_row(100 + len(rows), Comment=asked.body["job"]["comment"]))
            if answer == "lost":
                handler.close_connection = True
            else:
                write_answer(handler, status, json.dumps({"meta": {}, "job_id": 12}).encode())
        else:
            if handler.command == "DELETE":
                stopped.update(asked.body["jobs"])
            write_answer(handler, status, text)
        slurm.answer("squeue", rows=[row for row in rows if str(row["JobID"]) not in stopped])

    rows, stopped = [job_row(12)], set[str]()
    clock.now = 1_795_254_000.0  # after the anchor was submitted, which is no task by that
    store = site_with_a_job(slurm, clock)
    slurmrestd.write = start
    context, state = context_of(manager, store, clock.timer), TickState()
    for _ in range(6):
        clock.now += 15
        store.report_progress(KEY, Progress(at=clock.now))
        state, _ = tick(context, state)
    marks = [row["Comment"] for row in rows[1:]]
    assert len(marks) == len(set(marks)) >= 2
    found = {task.tag: task.handle for task in store.tasks(live=True)}
    if answer == "lost":
        assert found == {row["Comment"]: str(row["JobID"]) for row in rows[1:]}
    # Where the answer names another job, that one is left alone: the started ones are stopped, and others come.
    assert stopped == {str(row["JobID"]) for row in rows[1:] if row["Comment"] not in found}
    assert bool(stopped) == (answer != "lost")
    store.close()


def test_with_an_id_the_job_is_there_whatever_else_is_said(manager: SlurmManager, slurmrestd: FakeSlurmrestd) -> None:
    answer = {"meta": {}, "job_id": 9, "errors": [{"error": "Requested node configuration is not available"}]}
    slurmrestd.answers["POST job/submit"] = [200, answer]
    assert manager.submit(task()) == "9"


def test_the_version_of_the_api_is_found_again_after_slurmrestd_was_upgraded(
    manager: SlurmManager, slurmrestd: FakeSlurmrestd
) -> None:
    manager.submit(task())
    slurmrestd.release("26.05 v0.0.45")
    with pytest.raises(Unavailable, match="answered 404"):
        manager.submit(task())
    assert manager.submit(task())


def test_a_release_without_the_api_is_named(manager: SlurmManager, slurmrestd: FakeSlurmrestd) -> None:
    slurmrestd.release("22.05")
    with pytest.raises(Unavailable, match=r"has none of the APIs v0.0.42 to v0.0.45, .* use backend: command"):
        manager.capabilities()


def test_a_token_is_renewed_in_time_and_after_it_was_refused(
    slurm: FakeSlurm, manager: SlurmManager, slurmrestd: FakeSlurmrestd, clock: Clock
) -> None:
    def tokens() -> int:
        return sum("token" in call.argv for call in slurm.calls("scontrol"))

    manager.submit(task())
    clock.now += 1700
    manager.submit(task())
    assert tokens() == 1
    clock.now += 200
    manager.submit(task())
    assert tokens() == 2
    slurmrestd.release(RELEASES[0], submit="bad token")
    with pytest.raises(Unavailable, match="Protocol authentication error; slurmctld does not take the daemon's token"):
        manager.submit(task())
    slurmrestd.release(RELEASES[0])
    # A quite new one is not replaced: where all are refused, not each call makes another.
    manager.submit(task())
    assert tokens() == 2
    clock.now += 11
    manager.submit(task())
    assert tokens() == 3


def test_without_an_answer_slurm_is_unavailable_and_it_is_said_why(manager_on: Managers, tmp_path: Path) -> None:
    def said(address: str) -> str:
        with pytest.raises(Unavailable, match=f"slurmrestd at {re.escape(address)} does not answer") as caught:
            manager_on(backend="rest", slurmrestd=address).capabilities()
        return str(caught.value)

    assert "nothing listens there: start slurmrestd" in said("https://127.0.0.1:1")
    path = tmp_path / "left"
    assert f"there is no socket {path}: start slurmrestd with unix:{path}" in said(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert f"nothing listens on {path}: start slurmrestd" in said(f"unix:{path}")


def test_what_a_refused_token_means_is_said(manager: SlurmManager, slurmrestd: FakeSlurmrestd) -> None:
    # As slurmrestd 26.05 without rest_auth/jwt answers, and 22.05 in any case.
    slurmrestd.answers["GET ping/"] = ANSWERS["22.05"]["ping"]
    with pytest.raises(Unavailable, match=r"answered 401; .*start it with -a rest_auth/jwt .*older than Slurm 24.11"):
        manager.capabilities()
    # As slurmrestd 26.05 answers to a ping with a token that slurmctld does not take.
    ping = {**ANSWERS[RELEASES[0]]["ping"][1], "pings": [{"hostname": "vm", "pinged": "DOWN", "responding": False}]}
    slurmrestd.answers["GET ping/"] = [200, ping]
    with pytest.raises(Unavailable, match=r"no answer from slurmctld: either that is down, or .*AuthAltTypes=auth/jwt"):
        manager.capabilities()


def test_no_token_is_no_refusal_of_a_job_and_is_told_at_once_for_some_seconds(
    slurm: FakeSlurm, manager: SlurmManager, clock: Clock
) -> None:
    slurm.answer("scontrol", status=1, stderr="scontrol: error: Required plugin type not loaded or initialized\n")
    reason = r"scontrol makes no token .*: Required plugin type not loaded.*; slurmctld needs AuthAltTypes=auth/jwt"
    for _ in range(3):
        with pytest.raises(Unavailable, match=reason):
            manager.submit(task())
    assert len(slurm.calls("scontrol")) == 1
    clock.now += 11
    slurm.answer("scontrol", token={"stdout": "SLURM_JWT=a.b.c\n"})
    assert manager.submit(task())


def test_slurm_user_submits_for_others(slurm: FakeSlurm, manager_on: Managers, slurmrestd: FakeSlurmrestd) -> None:
    slurm.answer("sinfo", stdout="slurm 26.05.5\n")
    able = {uid: manager_on(uid=uid, slurmrestd=slurmrestd.address) for uid in (64030, 1000)}
    assert {uid: manager.capabilities().other_users for uid, manager in able.items()} == {64030: True, 1000: False}


def test_submissions_count_as_rpcs(manager: SlurmManager, slurmrestd: FakeSlurmrestd) -> None:
    manager.submit(task())
    before = manager.start_allowance().tasks
    manager.submit(task())
    assert manager.start_allowance().tasks == before - 1
    assert manager.call_statistics().calls["slurmrestd job/submit"] == 2


def test_what_slurmrestd_is_not_given_is_refused_at_the_start(manager_on: Managers) -> None:
    with pytest.raises(ConfigError, match=r"resource_manager\.slurm\.sbatch_options: --exclusive cannot be used"):
        manager_on(backend="rest", slurmrestd="https://head:6820", sbatch_options=["--exclusive"])
    with pytest.raises(ConfigError, match=r"resource_manager\.slurm\.slurmrestd: backend: rest needs the address"):
        manager_on(backend="rest")


@pytest.mark.parametrize(
    ("given", "settings", "uid", "chosen", "why"),
    [
        ("auto", {}, 0, "command", "root"),
        ("auto", {"slurmrestd": "unix:/x"}, 0, "command", "root"),
        ("auto", {"slurmrestd": "unix:/x"}, 1000, "rest", "not root"),
        ("auto", {"pyslurm_python": "/x"}, 0, "command", "root"),
        ("auto", {"pyslurm_python": "/x"}, 1000, "pyslurm", "not root"),
        ("auto", {"pyslurm_python": "/x", "slurmrestd": "unix:/x"}, 1000, "rest", "not root"),
        ("auto", {}, 1000, "command", "neither slurmrestd nor pyslurm_python is set"),
        ("rest", {"slurmrestd": "unix:/x"}, 0, "rest", "as configured"),
        ("pyslurm", {}, 0, "pyslurm", "as configured"),
        ("command", {"slurmrestd": "unix:/x"}, 1000, "command", "as configured"),
    ],
)
def test_the_chosen_backend_and_why(given: str, settings: dict[str, str], uid: int, chosen: str, why: str) -> None:
    backend, reason = chosen_backend(SlurmSettings.parse({"backend": given, **settings}), uid)
    assert backend == chosen
    assert why in reason
