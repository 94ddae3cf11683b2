"""Benchmark of the listing that a tick reads from a large YARN: services, containers and nodes, over HTTP on loopback.

    python benchmarks/yarn_listing.py [--services 1000] [--containers 4] [--nodes 4000] [--repeats 5]

A server in its own process answers as a ResourceManager does. Jobs are submitted, their containers report, and the
duration of a listing is measured, with the number of its calls. For comparison, a plain HTTP client reads the same
answers and parses them with Python's `json`. The budget is two calls and 2 s.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from statistics import median
from urllib.parse import urlsplit

import httpx2
import structlog
from harness import options_of, show

from dl2d.core.cluster import task_tag
from dl2d.core.jobs import JobKey, Launch, Owner, Role
from dl2d.core.resource_manager import ContainerReport, TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_yarn.manager import YarnManager
from dl2d_yarn.settings import YarnSettings

# isort: split
from yarn.fake_yarn import FakeYarn

BUDGET_SECONDS, BUDGET_CALLS = 2.0, 2
#: Services get their containers before the measurement begins, within this time.
RESIZE_SECONDS = 600.0
LISTS = ("/ws/v1/cluster/apps", "/ws/v1/cluster/nodes")


def serve(pipe: Connection, nodes: int) -> None:
    """Answer requests. Sends its port, and then, for each true value received, the calls since the previous one."""
    yarn = FakeYarn(nodes)
    lists: dict[str, bytes] = {}
    #: Calls come from two threads: tasks are submitted while services are changed.
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        #: Head and body are sent together: a client may delay its acknowledgement of the head by 40 ms.
        wbufsize = -1

        def answer(self) -> None:
            path = urlsplit(self.path).path
            content = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            with lock:
                if path in lists and self.command == "GET":
                    yarn.calls.append(f"GET {path}")
                    status, body = 200, lists[path]
                else:
                    found = yarn.answer(httpx2.Request(self.command, f"http://rm{self.path}", content=content))
                    status, body = found.status_code, found.content
                    # The lists are kept until a request changes something.
                    if path in LISTS:
                        lists[path] = body
                    elif self.command != "GET":
                        lists.clear()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_port)
    while pipe.recv():
        with lock:
            calls, yarn.calls = yarn.calls, []
        pipe.send(calls)


def main() -> None:
    options = options_of(__doc__, services=1000, containers=4, nodes=4000, repeats=5)
    pipe, other = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(other, options.nodes), daemon=True)
    server.start()
    address = f"http://127.0.0.1:{pipe.recv()}"
    # One line for each service would hide the result.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    result = measure(address, pipe, options)
    pipe.send(False)
    server.join()
    show(budget_seconds=BUDGET_SECONDS, budget_calls=BUDGET_CALLS, **result)


def measure(address: str, pipe: Connection, options: argparse.Namespace) -> dict[str, float]:
    """Median duration of a listing in seconds, the number of its calls, and the duration with a plain client."""
    given = {"addresses": [address], "user": "dl2d", "runner": "/opt/dl2/bin/dl2-run"}
    manager = YarnManager(YarnSettings.parse(given), clock=time.time)
    manager.listing()
    jobs = [JobKey("yarn", str(number), 1_795_581_700) for number in range(1, options.services + 1)]
    for job in jobs:
        manager.submit(spec(job, "anchor"))
    manager.listing()
    for job in jobs:
        for number in range(options.containers):
            manager.submit(spec(job, f"worker-{number}"))
    manager.allow_changes(math.inf)
    resized, deadline = 0, time.monotonic() + RESIZE_SECONDS
    while resized < len(jobs):
        assert time.monotonic() < deadline, f"{resized} of {len(jobs)} services were resized in {RESIZE_SECONDS:g} s"
        resized += sum(call.startswith("PUT ") for call in calls_since(pipe))
        time.sleep(0.1)
    running = {(job, position): "" for job in jobs for position in range(options.containers)}
    seconds = []
    calls: list[str] = []
    for _ in range(options.repeats):
        # A container that has not reported for some time counts as lost.
        for (job, position), task in running.items():
            running[job, position] = manager.report_container(report(job, position, task)).task or task
        calls_since(pipe)
        began = time.perf_counter()
        listing = manager.listing()
        seconds.append(time.perf_counter() - began)
        # Another thread reads limits of queues and why containers wait; these calls do not delay a tick.
        calls = [call for call in calls_since(pipe) if call.removeprefix("GET ") in LISTS]
        listed = sum(bool(job.tag) for job in listing.jobs)
        assert listed == len(jobs) * (1 + options.containers), f"{listed} services and tasks are listed"
        assert len(listing.nodes) == options.nodes, f"{len(listing.nodes)} nodes are listed"
    assert all(running.values()), "containers without a task"
    manager.close()
    began = time.perf_counter()
    for path in LISTS:
        with urllib.request.urlopen(address + path, timeout=60) as answer:
            json.load(answer)
    return {"listing_seconds": median(seconds), "calls": len(calls), "plain_seconds": time.perf_counter() - began}


def calls_since(pipe: Connection) -> list[str]:
    """Method and path of the requests that the server got since the last time."""
    pipe.send(True)
    calls: list[str] = pipe.recv()
    return calls


def spec(job: JobKey, name: str) -> TaskSpec:
    """Submission of a job's anchor or task."""
    role = Role.COORDINATOR if name == "anchor" else Role.WORKER
    demand = Resources.of(cpu=2, gpu=1, memory=2048)
    environment = {"DL2_DAEMON": "http://head:8290", "DL2_JOB": job.slug, "DL2_CREDENTIAL": "ab" * 32}
    return TaskSpec(
        tag=task_tag(job, name), job=job, role=role, name=name, node="", owner=Owner("dl2d", 990, 990),
        demand=NO_RESOURCES if name == "anchor" else demand, member_demands=((Role.WORKER, demand),),
        launch=Launch(("python", "train.py"), "/home/ml", tuple(environment.items())),
    )  # fmt: skip


def report(job: JobKey, position: int, task: str) -> ContainerReport:
    container = f"container_1795581702976_{int(job.id):04}_01_{position + 2:06}"
    return ContainerReport(
        job=job,
        role=Role.WORKER,
        position=position,
        container=container,
        incarnation="a",
        node="node1:45001",
        task=task,
    )


if __name__ == "__main__":
    main()
