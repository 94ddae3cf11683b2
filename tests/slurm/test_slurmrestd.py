"""Backend ``rest``: what it sends to slurmrestd, and how it reads answers that slurmrestd of each release gave."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any

import pytest
from slurm_fakes import Clock, FakeSlurm, Managers, identity, job_row, task

from dl2d.core.errors import ConfigError, Denied, NotFound, Rejected, ResourceManagerError, Unavailable
from dl2d.core.resources import Resources
from dl2d_slurm.job_control import Backend, chosen_backend
from dl2d_slurm.manager import SlurmManager

#: Recorded: status and body by release, version of the API, and what was asked.
ANSWERS = json.loads((Path(__file__).parent / "slurmrestd_answers.json").read_text())
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
        self.release(RELEASES[0])

    def release(self, release: str, submit: str = "submitted", cancel: str = "cancelled") -> None:
        """Have one version of the API, and give the answers that were recorded under these names."""
        recorded = ANSWERS[release]
        self.version = release.rsplit(maxsplit=1)[-1]
        self.answers = {"GET ping/": recorded["ping"], "POST job/submit": recorded.get(submit)}
        self.answers["DELETE jobs/"] = recorded.get(cancel)


class _Handler(BaseHTTPRequestHandler):
    server: FakeSlurmrestd

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
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

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
        "environment": [f"PATH={slurm.folder}"],
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
    with pytest.raises(Unavailable):
        manager.submit(task())
    slurmrestd.release(RELEASES[0])
    manager.submit(task())
    assert tokens() == 3


def test_without_a_token_or_an_answer_slurm_is_unavailable(slurm: FakeSlurm, manager_on: Managers) -> None:
    manager = manager_on(backend="rest", slurmrestd="http://127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"slurmrestd at http://127.0.0.1:1 does not answer"):
        manager.capabilities()
    slurm.answer("scontrol", status=1, stderr="scontrol: error: This operation requires auth/jwt\n")
    with pytest.raises(ResourceManagerError, match=r"makes no token for slurmrestd \(is auth/jwt in AuthAltTypes"):
        manager_on(backend="rest", slurmrestd="http://127.0.0.1:1").submit(task())


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
        manager_on(backend="rest", slurmrestd="http://head:6820", sbatch_options=["--exclusive"])
    with pytest.raises(ConfigError, match=r"resource_manager\.slurm\.slurmrestd: backend: rest needs the address"):
        manager_on(backend="rest")


@pytest.mark.parametrize(
    ("given", "address", "uid", "chosen", "why"),
    [
        ("auto", "", 0, "command", "root"),
        ("auto", "unix:/x", 0, "command", "root"),
        ("auto", "unix:/x", 1000, "rest", "not root"),
        ("auto", "", 1000, "command", "no address"),
        ("rest", "unix:/x", 0, "rest", "as configured"),
        ("command", "unix:/x", 1000, "command", "as configured"),
    ],
)
def test_the_chosen_backend_and_why(given: str, address: str, uid: int, chosen: str, why: str) -> None:
    backend, reason = chosen_backend(Backend(given), address, uid)
    assert backend == chosen
    assert why in reason
