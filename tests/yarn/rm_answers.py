"""Answers of a ResourceManager as Hadoop 3.4.2 gives them, shortened to what is of interest, and servers of answers."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from dl2d_yarn.rest_client import RestClient

ADDRESS = "http://rm:8088"


def amounts(memory: int, vcores: int, gpus: int) -> dict[str, Any]:
    entries = (("memory-mb", memory, "Mi"), ("vcores", vcores, ""), ("yarn.io/gpu", gpus, ""))
    information = [
        {"attributes": {}, "name": name, "resourceType": "COUNTABLE", "units": units, "value": value}
        for name, value, units in entries
    ]
    return {"memory": memory, "vCores": vcores, "resourceInformations": {"resourceInformation": information}}


def node(
    number: int, state: str = "RUNNING", *, host: str = "", used: tuple[int, int, int] = (0, 0, 0)
) -> dict[str, Any]:
    host = host or f"node{number}"
    resources = {
        "usedResource": amounts(*used),
        "availableResource": amounts(4096 - used[0], 8 - used[1], 2 - used[2]),
    }
    return {
        "rack": "/default-rack",
        "state": state,
        "id": f"{host}:{45000 + number}",
        "nodeHostName": host,
        "healthReport": "",
        # As seen: a node that is lost has none.
        **({} if state == "LOST" else resources),
    }


def app(number: int, state: str = "RUNNING", final: str = "UNDEFINED", **more: object) -> dict[str, Any]:
    return {
        "id": f"application_1795581702976_{number:04}",
        "user": "ml",
        "name": f"dl2-{number}-1795581700",
        "queue": "root.default",
        "state": state,
        "finalStatus": final,
        "diagnostics": "",
        "applicationType": "yarn-service",
        "startedTime": 1795581713449,
        **more,
    }


def service(state: str = "STABLE", **sizes: int) -> dict[str, Any]:
    numbers = itertools.count(2)
    return {
        "name": "dl2-1-1795581700",
        "id": "application_1795581702976_0001",
        "state": state,
        "components": [
            {
                "name": name,
                "state": "STABLE",
                "number_of_containers": size,
                "containers": [
                    # The first one is the master's.
                    {"id": f"container_1795581702976_0001_01_{next(numbers):06}", "state": "READY",
                     "component_instance_name": f"{name}-{place}"}
                    for place in range(size)
                ],
            }
            for name, size in sizes.items()
        ],
    }  # fmt: skip


def activities(*texts: str) -> dict[str, Any]:
    attempts = [{"allocationState": "SKIPPED", "diagnostic": text, "nodeId": "n1:1"} for text in texts]
    requests = [{"requestPriority": "1", "allocationState": "SKIPPED", "allocationAttempt": attempts}]
    allocations = [{"nodeId": "n1:1", "queueName": "root.default", "requestAllocation": requests}]
    return {"appActivities": {"applicationId": "application_1_0001", "allocations": allocations}}


def queue(
    name: str,
    most: tuple[int, int, int],
    used: tuple[int, int, int],
    *,
    pending: tuple[int, int, int] = (0, 0, 0),
    least: tuple[int, int, int] = (0, 0, 0),
    **more: Any,
) -> dict[str, Any]:
    """A queue of the capacity scheduler: maximum, used, pending and guaranteed memory, vcores and GPUs."""
    usage = {"partitionName": "", "used": amounts(*used), "pending": amounts(*pending)}
    capacity = {
        "partitionName": "", "effectiveMinResource": amounts(*least), "effectiveMaxResource": amounts(*most)
    }  # fmt: skip
    return {
        "queueName": name,
        "capacities": {"queueCapacitiesByPartition": [capacity]},
        "resources": {"resourceUsagesByPartition": [usage]},
        **more,
    }  # fmt: skip


def scheduler(*queues: dict[str, Any], root: dict[str, Any] | None = None) -> dict[str, Any]:
    top = root or queue("root", (8192, 16, 4), (0, 0, 0))
    return {"scheduler": {"schedulerInfo": {"type": "capacityScheduler", **top, "queues": {"queue": list(queues)}}}}


def lists(apps: list[Any] | None = None, nodes: list[Any] | None = None) -> dict[str, Any]:
    """Answers by path."""
    return {
        "/ws/v1/cluster/apps": {"apps": {"app": apps} if apps else {}},
        "/ws/v1/cluster/nodes": {"nodes": {"node": nodes} if nodes else {}},
        "/ws/v1/cluster/info": {"clusterInfo": {"hadoopVersion": "3.4.2", "haState": "ACTIVE"}},
    }


def client_of(handle: Callable[[httpx2.Request], httpx2.Response], **more: Any) -> RestClient:
    options = {"addresses": [ADDRESS], "user": "dl2d", "timeout_seconds": 5.0, **more}
    return RestClient(**options, transport=httpx2.MockTransport(handle))


def client_of_lists(answers: dict[str, Any]) -> RestClient:
    return client_of(lambda request: httpx2.Response(200, content=json.dumps(answers[request.url.path])))


@contextmanager
def raw_server(answer: bytes, *, pause: float = 0.0, step: int = 0) -> Iterator[str]:
    """Address of a server on loopback that sends some bytes for each request, perhaps in pieces with pauses."""
    stop = threading.Event()

    def serve(listener: socket.socket) -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                try:
                    for start in range(0, len(answer), step or len(answer) or 1):
                        connection.sendall(answer[start : start + (step or len(answer))])
                        if stop.wait(pause):
                            break
                    else:
                        if not answer:
                            stop.wait(pause)
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        thread = threading.Thread(target=lambda: _loop(listener, serve, stop), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()


def _loop(listener: socket.socket, serve: Callable[[socket.socket], None], stop: threading.Event) -> None:
    while not stop.is_set():
        serve(listener)
        time.sleep(0.01)
