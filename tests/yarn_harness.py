"""The YARN manager under the contract suite: one service on a private YARN, whose containers run the tests' tasks."""

from __future__ import annotations

import itertools
import json
import math
import os
import pwd
import shutil
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from rm_harness import Harness
from yarn_cluster import YarnCluster

from dl2d.core.cluster import ANCHOR, task_tag
from dl2d.core.errors import Unavailable
from dl2d.core.jobs import JobKey, Launch, Owner, Role
from dl2d.core.resource_manager import ContainerReport, RmJobState, TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_yarn.manager import YarnManager
from dl2d_yarn.settings import YarnSettings

RUNNER = Path(sys.executable).parent / "dl2-run"
REPORT_SECONDS = 0.2


class ContainerApi:
    """What the daemon's API does for containers, with the tasks that a test submits; a context manager."""

    def __init__(self, manager: YarnManager) -> None:
        self.manager = manager
        #: Specifications of tasks by tag.
        self.specs: dict[str, TaskSpec] = {}
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = api.answer(JobKey.from_slug(self.path.split("/")[3]), content)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, job: JobKey, content: dict[str, Any]) -> tuple[int, object]:
        if self.manager.closed:
            return 503, {}
        report = ContainerReport(job=job, **{**content, "role": Role(content["role"])})
        order = self.manager.report_container(report)
        spec = self.specs.get(task_tag(job, order.task)) if order.task else None
        launch = spec and {
            "id": order.task, "argv": spec.launch.argv, "cwd": spec.launch.cwd, "env": dict(spec.launch.env)
        }  # fmt: skip
        return 200, {"task": launch, "grace": order.grace, "report_seconds": order.report_seconds}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class ManagerOfTest(YarnManager):
    """Remembers that it was closed, and hands specifications of tasks to the API."""

    closed = False
    api: ContainerApi | None = None

    def submit(self, task: TaskSpec) -> str:
        assert self.api is not None
        self.api.specs[task.tag] = task
        return super().submit(task)

    def close(self) -> None:
        self.closed = True
        super().close()


class YarnService:
    """A job whose coordinator does nothing, on a private YARN; a context manager."""

    def __init__(self, cluster: YarnCluster, *, job: JobKey | None = None) -> None:
        self.cluster = cluster
        self.job = job or JobKey("test", "contract", int(time.time()))
        self.numbers = itertools.count()
        account = pwd.getpwuid(os.getuid())
        self.owner = Owner(account.pw_name, os.getuid(), os.getgid())
        self.folder = Path(tempfile.mkdtemp(prefix="dl2d-yarn-work-"))
        self.manager = self.open()
        self.api = ContainerApi(self.manager)
        self.manager.api = self.api
        self.anchor = ""

    def open(self) -> ManagerOfTest:
        """A manager of the cluster."""
        settings = {
            "cluster": "test",
            "addresses": [self.cluster.address],
            "user": self.cluster.user,
            "runner": str(RUNNER),
            "report_seconds": REPORT_SECONDS,
            "coordinator_memory_mib": 128,
        }
        manager = ManagerOfTest(YarnSettings.parse(settings), clock=time.time)
        manager.allow_changes(math.inf)
        return manager

    def restart(self) -> None:
        """Put a second manager in the place of the first one, as after a restart of the daemon."""
        if not self.manager.closed:
            self.manager.close()
        self.manager = self.api.manager = self.open()
        self.manager.api = self.api
        deadline = time.monotonic() + 30
        while True:
            try:
                self.manager.listing()
                return
            except Unavailable:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def anchor_spec(self, script: str = "while :; do sleep 0.1; done") -> TaskSpec:
        environment = {
            "PATH": "/usr/bin:/bin", "DL2_DAEMON": self.api.url, "DL2_JOB": self.job.slug, "DL2_CREDENTIAL": "secret"
        }  # fmt: skip
        demand = Resources.of(cpu=1, memory=64)
        return TaskSpec(
            tag=task_tag(self.job, ANCHOR), job=self.job, role=Role.COORDINATOR, name=ANCHOR, demand=NO_RESOURCES,
            node="", owner=self.owner, member_demands=((Role.WORKER, demand), (Role.PS, demand)),
            launch=Launch(("/bin/sh", "-c", script), str(self.folder), tuple(environment.items())),
        )  # fmt: skip

    def __enter__(self) -> Self:
        self.api.__enter__()
        try:
            self.manager.listing()
            self.anchor = self.manager.submit(self.anchor_spec())
            deadline = time.monotonic() + 90
            while not any(
                job.handle == self.anchor and job.state is RmJobState.RUNNING for job in self.manager.listing().jobs
            ):
                assert time.monotonic() < deadline, self.manager.listing()
                time.sleep(0.2)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.manager.close()
        self.api.__exit__(kind, value, trace)
        shutil.rmtree(self.folder, ignore_errors=True)


_NODES = "YARN chooses the nodes, and the service's own containers hold room on them"
_ANCHOR = "a task needs the service of its job, which runs all the time"


class YarnHarness(Harness):
    """Tasks run in the containers of one service, which stays from test to test."""

    unknown_handle = "dl2:test.contract.1:worker-0"
    own_variables = ("DL2_", "CONTAINER_ID", "HADOOP_", "LOCAL_DIRS", "LOG_DIRS", "NM_")
    not_applicable: ClassVar[dict[str, str]] = {
        "test_nodes_are_empty_and_take_tasks_at_first": _NODES,
        "test_a_task_runs_on_the_named_node_and_counts_there_until_it_is_done": _NODES,
        "test_a_restarted_manager_finds_tasks_by_their_tags_and_can_stop_them": "tests/yarn has one without nodes",
        "test_stop_does_not_wait_and_a_deaf_task_holds_its_room_while_its_time_runs": _NODES,
        "test_what_a_task_leaves_behind_dies_and_keeps_the_room_till_then": _NODES,
        "test_room_is_free_only_when_the_task_has_really_ended": _NODES,
        "test_a_demand_that_no_node_can_hold_is_refused_with_amounts": _ANCHOR,
        "test_an_unknown_node_is_not_found": _ANCHOR,
        "test_an_anchor_takes_no_room": "the container of a coordinator holds room",
    }

    def __init__(self, service: YarnService, folder: Path) -> None:
        super().__init__()
        self.service = service
        self.job = service.job
        self._numbers = service.numbers
        self.owner = service.owner
        self.cwd = folder
        self.manager = service.manager
        self.nodes = tuple(node.name for node in self.manager.listing().nodes)

    def restart(self) -> None:
        self.service.restart()
        self.manager = self.service.manager

    def end_all(self) -> None:
        if self.service.manager.closed:
            self.restart()
        tasks = [job.identity for job in self.manager.listing().jobs if job.handle != self.service.anchor]
        self.manager.stop(tasks, 0)
        self.wait_until(
            lambda: all(job.state.ended for job in self.manager.listing().jobs if job.handle != self.service.anchor),
            "the end of all tasks",
        )
        self.wait_until(lambda: not self.processes(), "the end of all processes")
