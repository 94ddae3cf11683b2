"""Services that users post themselves, with ``dl2d submit --rm yarn`` or as a plain service file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from yarn.fake_yarn import FakeYarn, wait_for_rounds
from yarn.posted_service import POSTED, REQUEST, SETTINGS
from yarn.test_manager import wait_until

from dl2d.core.errors import ConfigError, Denied, NotFound, Rejected, RequestError, Unavailable
from dl2d.core.job_request_parser import RequestRules, parse_request, read_directives
from dl2d.core.jobs import JobKey, Launch, Role
from dl2d.core.resource_manager import ContainerReport, RmJobState, TaskSpec
from dl2d.core.resources import Resources
from dl2d_yarn.manager import YarnManager
from dl2d_yarn.service_description import posted_description


@pytest.fixture
def manager(yarn: FakeYarn) -> YarnManager:
    return yarn.listed_manager()


def report(job: JobKey, name: str, number: int, **more: object) -> ContainerReport:
    role, _, position = name.partition("-")
    given = {"incarnation": "a", "node": "node1:45001", **more}
    container = f"container_1795581702976_0001_01_{number:06}"
    return ContainerReport(job=job, role=Role(role), position=int(position), container=container, **given)  # type: ignore[arg-type]


def test_the_service_has_the_request_the_command_and_a_secret_and_not_the_daemons_part() -> None:
    service = posted_description(POSTED, SETTINGS, daemon="http://head:8910", archive="hdfs:///env.tar.gz",
                                 files=["hdfs:///home/alice/train.py"])  # fmt: skip
    environment = service["configuration"]["env"]
    assert len(environment["DL2_PROOF"]) == 64
    assert environment["DL2_DAEMON"] == "http://head:8910"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert service["configuration"]["properties"]["dl2.epochs"] == "20"
    assert service["configuration"]["files"] == [
        {"type": "ARCHIVE", "src_file": "hdfs:///env.tar.gz", "dest_file": "env"},
        {"type": "STATIC", "src_file": "hdfs:///home/alice/train.py", "dest_file": "train.py"},
    ]
    coordinator, _, worker = service["components"]
    assert worker["launch_command"] == "exec env/bin/dl2-run python train.py --name 'a b'"
    assert worker["resource"] == {
        "cpus": 2, "memory": "1024", "additional": {"yarn.io/gpu": {"value": 1, "unit": ""}}
    }  # fmt: skip
    assert coordinator["number_of_containers"] == 1
    assert "DL2_DAEMON_CERTIFICATE" not in environment
    shared = posted_description(POSTED, SETTINGS, daemon="https://head:8910", certificate="der:MIIB")
    assert shared["configuration"]["env"]["DL2_DAEMON_CERTIFICATE"] == "der:MIIB"
    assert shared["components"][1]["launch_command"] == (
        "cd /home/alice && exec /opt/dl2d/bin/dl2-run python train.py --name 'a b'"
    )
    with pytest.raises(Rejected, match="'1job' cannot be the name of a YARN service, which begins with a letter"):
        posted_description(replace(POSTED, name="1job"), SETTINGS, daemon="http://head:8910")


@pytest.mark.parametrize(
    "text",
    [
        "$HOME ${USER} ${OMP_NUM_THREADS}", "`reboot`", 'a "b" c', "a\\b\\", '{"a": {"b": {}}}',
        "{{PATH}} <LOG_DIR><CPS>", "it's\nnew", "plain",
    ],
)  # fmt: skip
def test_the_command_and_the_environment_come_to_a_container_as_they_are(tmp_path: Path, text: str) -> None:
    runner = tmp_path / "a $runner"
    runner.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys, os, json; "
                      'print(json.dumps([os.getcwd(), os.environ["GIVEN"], *sys.argv[1:]]))\' "$@"')  # fmt: skip
    runner.chmod(0o755)
    folder = tmp_path / "it's ${USER}"
    folder.mkdir()
    posted = replace(POSTED, argv=("python", text), cwd=str(folder), env={"GIVEN": text, "OMP_NUM_THREADS": "1"})
    service = posted_description(posted, replace(SETTINGS, runner=str(runner)), daemon="http://head:8910")
    done = subprocess.run(["bash"], input=_launch_script(service), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [str(folder), text, "python", text]


def _launch_script(service: dict[str, Any]) -> str:
    """What YARN makes of a service: tokens are replaced, then the node writes what is left into a script."""
    environment = service["configuration"]["env"]
    tokens = {"${USER}": "alice", "${COMPONENT_INSTANCE_NAME}": "worker-0"}
    tokens |= {f"${{{name}}}": value for name, value in environment.items()}
    marks = {"<LOG_DIR>": "/logs", "<CPS>": ":", "{{": "$", "}}": ""}

    def replaced(given: str) -> str:
        for mark, value in (tokens | marks).items():
            given = given.replace(mark, value)
        return given

    lines = [f'export {name}="{replaced(value)}"' for name, value in environment.items()]
    command = replaced(service["components"][2]["launch_command"])
    return "\n".join((*lines, f'exec /bin/bash -c "{command}"', ""))


def test_a_sites_template_is_kept(tmp_path: Path) -> None:
    plain = posted_description(POSTED, SETTINGS, daemon="http://head:8910")
    for component in plain["components"]:
        component["artifact"] = {"id": "site/dl2d:1", "type": "DOCKER"}
        component["placement_policy"] = {
            "constraints": [{"type": "AFFINITY", "scope": "NODE", "node_partitions": ["gpu"], "target_tags": []}]
        }
    file = tmp_path / "service.json"
    file.write_text(json.dumps(plain))
    service = posted_description(POSTED, replace(SETTINGS, template=str(file)), daemon="http://head:8910")
    assert service["components"][2]["artifact"] == {"id": "site/dl2d:1", "type": "DOCKER"}
    assert service["components"][2]["placement_policy"]["constraints"][0]["node_partitions"] == ["gpu"]
    file.write_text('{"components": []}')
    with pytest.raises(Rejected, match=r"template: .*service\.json is not a service that dl2d can use"):
        posted_description(POSTED, replace(SETTINGS, template=str(file)), daemon="http://head:8910")
    with pytest.raises(
        ConfigError, match=r"resource_manager\.yarn\.template: .*service\.json is not a service that dl2d can use"
    ):
        FakeYarn().manager(template=str(file))


def test_an_application_that_is_not_known_is_looked_for_once_in_a_while(yarn: FakeYarn) -> None:
    manager = yarn.listed_manager(yarn.clock)
    yarn.calls.clear()
    with pytest.raises(NotFound):
        manager.authenticate("application_1_0001", "x")
    service = posted_description(POSTED, SETTINGS, daemon="http://head:8910")
    application = yarn.post(service, "alice")
    for _ in range(5):
        with pytest.raises(Unavailable, match="YARN is asked again"):
            manager.authenticate(application, "x")
    assert yarn.calls == ["GET /ws/v1/cluster/apps", "GET /ws/v1/cluster/nodes"]
    yarn.now += 5
    assert manager.authenticate(application, service["configuration"]["env"]["DL2_PROOF"]).handle == application


def test_one_listing_at_a_time_is_read_for_applications_that_are_not_known(yarn: FakeYarn) -> None:
    """Otherwise anybody could have the daemon wait for YARN in all places of its API."""
    manager = yarn.listed_manager(yarn.clock)
    asked, goes_on = threading.Event(), threading.Event()

    def slow(request: httpx2.Request) -> None:
        if request.url.path.endswith("/apps"):
            asked.set()
            assert goes_on.wait(30)

    yarn.instead = slow
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(manager.authenticate, "application_1_0001", "x")
        assert asked.wait(30)
        yarn.now += 60
        with pytest.raises(Unavailable, match="YARN is asked again"):
            manager.authenticate("application_1_0002", "x")
        goes_on.set()
        assert isinstance(first.exception(30), NotFound)


def test_only_a_service_is_asked_for_its_secret_and_only_by_the_name_of_one(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    service = posted_description(POSTED, SETTINGS, daemon="http://head:8910")
    application = yarn.post(service, "alice")
    yarn.apps["digits"]["applicationType"] = "TENSORFLOW"
    manager.listing()
    with pytest.raises(NotFound, match="no such service"):
        manager.authenticate(application, service["configuration"]["env"]["DL2_PROOF"])
    yarn.apps["digits"] |= {"applicationType": "yarn-service", "name": "../x?doAs=root#"}
    manager.listing()
    asked = []
    yarn.instead = lambda request: asked.append(request.url.raw_path)
    with pytest.raises(NotFound, match="no such service"):
        manager.authenticate(application, "x")
    # Nor does the report of a container make it a job, whose service would be resized.
    job = JobKey("yarn", application.removeprefix("application_"), 1795581713)
    manager.report_container(report(job, "coordinator-0", 2))
    manager.report_container(report(job, "worker-0", 3, task="worker-1"))
    assert application not in [listed.handle for listed in manager.listing().jobs]
    wait_for_rounds(manager)
    assert not any(b"services" in path for path in asked)


def test_it_registers_with_its_secret_and_is_resized_and_removed_as_its_user(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    service = posted_description(POSTED, SETTINGS, daemon="http://head:8910")
    application = yarn.post(service, "alice")
    secret = service["configuration"]["env"]["DL2_PROOF"]
    for proof in ("", "0" * 64):
        with pytest.raises(Denied, match="the credential does not match the DL2_PROOF"):
            manager.authenticate(application, proof)
    # As while its master is restarted: the description is incomplete.
    incomplete = httpx2.Response(200, content=b'{"state": "ACCEPTED"}')
    yarn.instead = lambda request: incomplete if request.url.path.endswith("/digits") else None
    with pytest.raises(Unavailable, match="does not yet show the description"):
        manager.authenticate(application, secret)
    yarn.instead = lambda _request: None
    anchor = manager.authenticate(application, secret)
    assert anchor.key == JobKey("yarn", "1795581702976_0001", 1795581713)
    assert (anchor.owner.user, anchor.handle, anchor.name) == ("alice", application, "digits")
    request = parse_request({"name": anchor.name, **read_directives(anchor.script)}, rules=RequestRules())
    assert (request.model, request.epochs) == (REQUEST.model, REQUEST.epochs)
    # What a task gets is what its component has.
    assert request.demand(Role.WORKER) == Resources.of(cpu=2, memory=1024, gpu=1)
    assert manager.authenticate(application, secret) == anchor
    yarn.posted["digits"]["configuration"]["properties"]["dl2.name"] = "x" * 2**16
    with pytest.raises(RequestError, match=r"service digits: dl2\.\*: .*at most 65536 are allowed"):
        manager.authenticate(application, secret)
    assert manager.report_container(report(anchor.key, "coordinator-0", 2)).task == "anchor"
    (listed,) = manager.listing().jobs
    assert (listed.handle, listed.state, listed.user, listed.tag) == (application, RmJobState.RUNNING, "alice", "")
    worker = TaskSpec(
        tag=f"dl2:{anchor.key.slug}:worker-0", job=anchor.key, role=Role.WORKER, name="worker-0", node="",
        owner=anchor.owner, demand=Resources.of(cpu=2), launch=Launch(("x",), "/", ()),
    )  # fmt: skip
    manager.submit(worker)
    wait_until(lambda: yarn.flexes == [{"worker": 1, "ps": 0}])
    assert yarn.acted_for[yarn.calls.index("PUT /app/v1/services/digits")] == "alice"
    assert manager.report_container(report(anchor.key, "worker-0", 3)).task == "worker-0"
    manager.report_container(report(anchor.key, "coordinator-0", 2, task="anchor", exit_code=0))
    yarn.end("digits", "SUCCEEDED")
    assert next(job for job in manager.listing().jobs if job.handle == application).state is RmJobState.DONE
    wait_until(lambda: "digits" not in yarn.posted)
    assert yarn.acted_for[yarn.calls.index("DELETE /app/v1/services/digits")] == "alice"


def test_services_of_others_are_not_registered(yarn: FakeYarn, manager: YarnManager) -> None:
    plain = {"name": "web", "components": [{"name": "worker", "resource": {}}], "configuration": {}}
    application = yarn.post(plain, "bob")
    # A service of another user with a name as the daemon gives.
    yarn.post({**plain, "name": "dl2-7-1795581700"}, "eve")
    assert {(job.user, job.tag) for job in manager.listing().jobs} == {("bob", ""), ("eve", "")}
    with pytest.raises(Denied, match="DL2_PROOF"):
        manager.authenticate(application, "")
    wait_for_rounds(manager)
    assert not yarn.flexes
    yarn.end("web", "SUCCEEDED")
    manager.listing()
    with pytest.raises(NotFound, match="no such service that has not ended"):
        manager.authenticate(application, "x")


def test_after_a_restart_the_daemon_waits_for_the_reports_of_services_and_knows_them_by_these(yarn: FakeYarn) -> None:
    service = posted_description(POSTED, SETTINGS, daemon="http://head:8910")
    application = yarn.post(service, "alice")
    manager = yarn.manager(yarn.clock)
    with pytest.raises(Unavailable, match="for their first report"):
        manager.listing()
    key = JobKey("yarn", "1795581702976_0001", 1795581713)
    # A new container registers before the coordinator, which an earlier daemon started, has reported.
    assert manager.authenticate(application, service["configuration"]["env"]["DL2_PROOF"]).key == key
    assert manager.report_container(report(key, "coordinator-0", 2, task="anchor")).grace is None
    manager.report_container(report(key, "worker-0", 3, task="worker-4"))
    yarn.now += 60
    assert {job.tag or job.handle for job in manager.listing().jobs} == {application, f"dl2:{key.slug}:worker-4"}
