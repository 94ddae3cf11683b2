"""A ResourceManager in memory that keeps services, answers as Hadoop does, and notes the calls."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import httpx2
from yarn.rm_answers import app, client_of, lists, node, scheduler

from dl2d_yarn.manager import YarnManager
from dl2d_yarn.settings import YarnSettings

M = TypeVar("M", bound=YarnManager)


class FakeYarn:
    """ResourceManager in memory, with services by name.

    ``calls`` has method and path of each request, ``flexes`` the sizes that were requested.
    """

    def __init__(self, nodes: int = 2) -> None:
        self.nodes = [node(number) for number in range(1, nodes + 1)]
        self.apps: dict[str, dict[str, Any]] = {}
        self.posted: dict[str, dict[str, Any]] = {}
        #: Containers that are listed, by service and instance, such as ``worker-0``.
        self.containers: dict[str, dict[str, str]] = {}
        #: Ended container of the coordinator.
        self.dead: dict[str, str] = {}
        #: Further answers, by path.
        self.more: dict[str, Any] = {"/ws/v1/cluster/scheduler": scheduler()}
        #: File in which the ``yarn`` command records its calls, and how many of them have been carried out.
        self._commands: Path | None = None
        self._commands_read = 0
        self.calls: list[str] = []
        #: User for whom each request was made, where that is not the daemon's.
        self.acted_for: list[str] = []
        self.flexes: list[dict[str, int]] = []
        #: Answers a request first; where it returns None, this object answers.
        self.instead: Callable[[httpx2.Request], httpx2.Response | None] = lambda _request: None
        #: Time of the managers that have ``clock``.
        self.now = 1_795_581_800.0
        self._managers: list[YarnManager] = []

    def clock(self) -> float:
        return self.now

    def close(self) -> None:
        for manager in self._managers:
            manager.close()

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.calls.append(f"{request.method} {request.url.path}")
        self.acted_for.append(request.url.params.get("doAs", ""))
        other = self.instead(request)
        if other is not None:
            return other
        path = request.url.path
        if not path.startswith("/app/v1/services"):
            single = {f"/ws/v1/cluster/apps/{app['id']}": {"app": app} for app in self.apps.values()}
            known = single | lists(list(self.apps.values()), self.nodes) | self.more
            return _json(200, known[path]) if path in known else _json(404, {"RemoteException": {"message": path}})
        name = path.removeprefix("/app/v1/services").strip("/")
        if request.method == "POST":
            return self._post(json.loads(request.content))
        if name not in self.posted:
            return _json(404, {"diagnostics": f"Service {name} not found", "code": 404004})
        if request.method == "DELETE":
            del self.posted[name]
            if name in self.apps and self.apps[name]["state"] == "RUNNING":
                self.apps[name] |= {"state": "KILLED", "finalStatus": "KILLED"}
            return _json(200, {"diagnostics": f"Successfully destroyed service {name}"})
        if request.method == "PUT":
            wanted = json.loads(request.content)["components"]
            self.flexes.append({each["name"]: each["number_of_containers"] for each in wanted})
            for component in self.posted[name]["components"]:
                component["number_of_containers"] = self.flexes[-1].get(component["name"], 1)
            return _json(202, {"diagnostics": "Updating components"})
        posted = self.posted[name]
        if name not in self.apps:  # as until its application is submitted
            return _json(200, {"name": name, "state": "STOPPED"})
        self._read_commands()
        components = [
            {key: each[key] for key in each.keys() & _LISTED} | {"containers": self._listed(name, each["name"])}
            for each in posted["components"]
        ]
        if name in self.dead:
            components[0]["containers"] = [{"id": self.dead[name], "state": "FAILED"}]
        answer = {"state": "STABLE", "id": self.apps[name]["id"], "configuration": posted["configuration"]}
        return _json(200, {**answer, "components": components})

    def command(self, folder: Path, *lines: str) -> Path:
        """A ``yarn`` command that decommissions an instance; ``lines`` of shell run first."""
        command, self._commands = folder / "yarn", folder / "called"
        line = f'echo "$HADOOP_USER_NAME$HADOOP_PROXY_USER:$*" >>{self._commands}'
        command.write_text("\n".join(("#!/bin/sh", *lines, line, "")))
        command.chmod(0o755)
        return command

    def commands(self) -> list[str]:
        """Calls of the ``yarn`` command: user and arguments."""
        return self._commands.read_text().splitlines() if self._commands and self._commands.exists() else []

    def _read_commands(self) -> None:
        for line in self.commands()[self._commands_read :]:
            self._commands_read += 1
            name, _, instance = line.split()[-3:]
            for component in self.posted[name]["components"]:
                if instance.startswith(f"{component['name']}-"):
                    component["number_of_containers"] -= 1
                    component.setdefault("decommissioned_instances", []).append(instance)

    def _listed(self, name: str, component: str) -> list[dict[str, str]]:
        return [
            {"id": container, "state": "READY", "component_instance_name": instance}
            for instance, container in self.containers.get(name, {}).items()
            if instance.startswith(f"{component}-")
        ]

    def post(self, content: dict[str, Any], user: str) -> str:
        """Post a service as a user; returns the id of its application."""
        self._post(content)
        self.apps[content["name"]]["user"] = user
        return str(self.apps[content["name"]]["id"])

    def _post(self, content: dict[str, Any]) -> httpx2.Response:
        name = content["name"]
        if name in self.posted:
            return _json(400, {"diagnostics": f"Service Instance dir already exists: /services/{name}.json"})
        self.posted[name] = content
        self.apps[name] = app(len(self.apps) + 1, name=name, user="dl2d")
        return _json(202, {"diagnostics": f"Application ID: {self.apps[name]['id']}", "state": "ACCEPTED"})

    def end(self, name: str, final: str) -> None:
        self.apps[name] |= {"state": "FINISHED", "finalStatus": final}

    def manager(
        self,
        clock: Callable[[], float] = time.time,
        *,
        timer: Callable[[], float] | None = None,
        kind: type[M] = YarnManager,  # type: ignore[assignment]
        allowed: float = math.inf,
        **more: object,
    ) -> M:
        """A manager with this clock, also its timer unless one is given, that may change services for ``allowed`` s.

        It is closed with this object.
        """
        given = {"addresses": ["http://rm:8088"], "user": "dl2d", "runner": "/opt/dl2/bin/dl2-run", **more}
        manager = kind(YarnSettings.parse(given), clock=clock, timer=timer or clock, client=client_of(self.answer))
        manager.allow_changes(allowed)
        self._managers.append(manager)
        return manager

    def listed_manager(self, clock: Callable[[], float] = time.time, **more: Any) -> YarnManager:
        """A manager that has listed the cluster once."""
        manager = self.manager(clock, **more)
        manager.listing()
        return manager


def wait_for_rounds(manager: YarnManager) -> None:
    """Wait until the thread that changes services has begun and ended two more rounds."""
    changer, ended = manager._changer, threading.Semaphore(0)
    run_round = changer._run_round

    def noted(*, details: bool) -> None:
        run_round(details=details)
        ended.release()

    with mock.patch.object(changer, "_run_round", noted):
        for _ in range(2):
            assert ended.acquire(timeout=30), "no round has ended"


_LISTED = {"name", "resource", "number_of_containers", "decommissioned_instances"}


def _json(status: int, content: object) -> httpx2.Response:
    return httpx2.Response(status, content=json.dumps(content))
