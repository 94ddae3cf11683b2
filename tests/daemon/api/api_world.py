"""A world whose job API is on a real socket."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from tick.world import World

from dl2d.core.credentials_from_daemon_key import Credentials
from dl2d.core.job_request_parser import RequestRules
from dl2d.core.jobs import JobKey
from dl2d.core.resource_manager import Anchor
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.daemon.api.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from dl2d.daemon.api.http_application import create_api
from dl2d.daemon.api.http_server import ApiServer
from dl2d.daemon.api.job_admission import Admission
from dl2d.daemon.api.recent_heartbeats import AnsweredHeartbeats
from dl2d.daemon.api.request_limits import MAX_WAKES, WAKES_PER_SECOND, RateLimiter, UserTurns
from dl2d.daemon.api.route_dependencies import Services
from dl2d.daemon.health_and_metrics import Health
from dl2d.daemon.parallel_task_submitter import ParallelTaskSubmitter
from dl2d.daemon.shared_resource_manager import ManagerAccess
from dl2d.testing import OWNER
from dl2d.tick.task_command_and_environment import TaskSpecs
from dl2d.tick.tick_context import Context

JSON = {"Content-Type": "application/json"}
RULES = RequestRules(frozenset({"resnet-50", "vgg-16"}), 16, 16)
REQUEST = {"model": "resnet-50", "epochs": 3, "samples_per_epoch": 100, "worker": {"cpu": 2}}
SECRET_OF_THE_USER = "hunter2-in-the-environment"
COMMAND = {
    "argv": ["python", "train.py"],
    "cwd": "/home/ann",
    "env": {"PATH": "/usr/bin", "DATA_FOLDER": SECRET_OF_THE_USER},
}
SCRIPT = """#!/bin/sh
#SBATCH -J mine
#DL2 model=resnet-50 epochs=3
#DL2 samples_per_epoch=100 worker=cpu:2
exec dl2-run python train.py
"""


@dataclass
class ApiWorld(World):
    """A world that can be spoken to over HTTP; ``woken`` counts how often a tick was asked for."""

    starts_anchors: bool = True
    request_rules: RequestRules = RULES
    defaults: Resources = NO_RESOURCES
    parallel_submits: int = 4
    parallel_authentication: bool = False
    limits: ConnectionLimits = DEFAULT_LIMITS
    #: Paths of certificate and key; the client speaks plain HTTP all the same.
    certificate: tuple[Path, ...] = ()
    #: Requests without a credential that are answered; there are no more until ``now`` goes on.
    burst: float = 1000.0
    #: Heartbeats of one job that are answered; there are no more until ``now`` goes on.
    beat_burst: float = 100_000.0
    #: The same for requests of one user, and how long one waits for its turn, seconds.
    view_burst: float = 1000.0
    turn_seconds: float = 30.0
    operators: tuple[str, ...] = ()
    #: Names of the users that the machine knows, by id.
    user_names: dict[int, str] = field(default_factory=lambda: {OWNER.uid: OWNER.user})
    woken: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.credentials = Credentials(b"k" * 32)
        self.access = ManagerAccess(
            self.manager, parallel_submits=self.parallel_submits, max_waiting=8,
            parallel_authentication=self.parallel_authentication,
        )  # fmt: skip
        self.submitter = ParallelTaskSubmitter(self.access.submit, max(1, self.parallel_submits))
        self.health = Health(lambda: self.now)
        self.server = ApiServer("127.0.0.1", 0, self.limits, *self.certificate)
        self.answered = AnsweredHeartbeats(lambda: self.elapsed, lambda: self.timeouts.silent_seconds)
        host, port = self.server.address
        self.api_url = f"{'https' if self.certificate else 'http'}://{host}:{port}"
        services = Services(
            cluster="test",
            url=self.api_url,
            store=self.store,
            manager=self.access,
            admission=lambda: Admission(self.request_rules, defaults=self.defaults),
            credentials=self.credentials,
            task_specs=TaskSpecs("http://daemon", self.credentials),
            clock=lambda: self.now,
            heartbeat_seconds=lambda: 1.5,
            starts_anchors=self.starts_anchors,
            mode=lambda: self.mode,
            health=self.health,
            rate=RateLimiter(1.0, self.burst, lambda: self.now),
            heartbeat_rate=RateLimiter(1.0, self.beat_burst, lambda: self.now),
            wake=self._wake,
            wakes=RateLimiter(WAKES_PER_SECOND, MAX_WAKES, lambda: self.now),
            user_turns=UserTurns(RateLimiter(1.0, self.view_burst, lambda: self.now), seconds=self.turn_seconds),
            operators=lambda: frozenset(self.operators),
            user_name=self.user_names.__getitem__,
            answered=self.answered,
        )
        self.api = create_api(services)
        self.server.start(self.api)
        self.client = httpx2.Client(base_url=f"http://{host}:{port}", timeout=30, trust_env=False)

    def context(self) -> Context:
        """As the daemon has it: starts are submitted in parallel, and calls take turns with those of requests."""
        manager, submitter, last_heartbeat = self.access, self.submitter, self.answered.last
        return replace(super().context(), manager=manager, submitter=submitter, last_heartbeat=last_heartbeat)

    def _wake(self) -> None:
        self.woken += 1

    def close(self) -> None:
        self.client.close()
        self.server.stop()
        self.submitter.close()
        super().close()

    def post(self, path: str, body: object, credential: str = "") -> httpx2.Response:
        """Post a body: bytes as they are, anything else as JSON (which may hold half a surrogate pair)."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        shown = f"Bearer {credential}".strip().encode()
        return self.client.post(path, content=content, headers={"Authorization": shown, **JSON})

    def post_beat(self, job: JobKey, body: object) -> httpx2.Response:
        return self.post(f"/v1/jobs/{job.slug}/heartbeat", body, self.credentials.for_job(job))

    def cancel(self, name: str, credential: str | None = None) -> httpx2.Response:
        shown = self.credentials.for_submission() if credential is None else credential
        return self.client.delete(f"/v1/jobs/{name}", headers={"Authorization": f"Bearer {shown}"})

    def at_once(self, count: int, call: Callable[[], httpx2.Response]) -> Callable[[], list[httpx2.Response]]:
        """Begin so many calls in threads; the result waits for their answers."""
        with_answers = ThreadPoolExecutor(count)
        futures = [with_answers.submit(call) for _ in range(count)]
        return lambda: [future.result() for future in futures]

    def heartbeat(self, job: JobKey, credential: str | None = None, **said: Any) -> httpx2.Response:
        body = {"address": "host:1", "state": "waiting", **said}
        shown = self.credentials.for_job(job) if credential is None else credential
        return self.post(f"/v1/jobs/{job.slug}/heartbeat", body, shown)

    def send_job(self, credential: str | None = None, **changes: Any) -> httpx2.Response:
        body = {"request": {**REQUEST, **changes}, **COMMAND}
        return self.post("/v1/jobs", body, self.credentials.for_submission() if credential is None else credential)

    def add_anchor(self, rm_id: str = "7", script: str = SCRIPT, options: str = "") -> JobKey:
        key = JobKey("test", rm_id, int(self.now))
        self.manager.anchors[rm_id] = Anchor(key, OWNER, "mine", script, options)
        return key

    def register(self, rm_id: str = "7", proof: str = OWNER.user, **more: object) -> httpx2.Response:
        return self.post("/v1/register", {"rm_id": rm_id, "proof": proof, "address": "host:1", **COMMAND, **more})


def error(answer: httpx2.Response) -> str:
    """The text of a refusal, which is all that its body holds."""
    body = answer.json()
    assert list(body) == ["error"], body
    return str(body["error"])
