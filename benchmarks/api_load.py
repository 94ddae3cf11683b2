"""How fast heartbeats are answered while users load the job API.

    python benchmarks/api_load.py [--loads status ...] [--connections 200] [--seconds 5] [--repeats 3] [--jobs 100]
                                  [--source 127.0.0.1]

A daemon's API with a store in a file (SQLite) serves --jobs running jobs. One client sends heartbeats one after the
other, each on a connection of its own, as coordinators do. Meanwhile --connections closed-loop connections from one
address (--source; heartbeats come from 127.0.0.1) send requests without a pause, whatever they are answered:

- status: `GET /v1/status`, each connection with credentials of a user of its own
- one-user: the same, all with credentials of one user
- forged: the same with credentials that are refused
- health: `GET /v1/health`
- unknown: a path that does not exist
- wrong-credential: heartbeats with the credential of another job
- reconnect: `GET /v1/health`, each on a new connection
- flood: heartbeats of one job with its credential

Of these three the server, with the heartbeats and the load, speaks TLS:

- tls-reconnect: `GET /v1/health`, each on a new connection
- hello: TLS handshakes that the client never completes, each on a new connection: it sends its first message, which
  costs it nothing, reads the beginning of the server's answer and closes the connection
- silent: connections on which nothing is sent, each closed at once

Periods with and without load take turns. Printed are the median, the 95th percentile and the maximum of the times of
heartbeats in milliseconds without and with load, the ratio of the medians, the heartbeats that were refused, and the
answers to the load by status in a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import signal
import ssl
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median, quantiles

import structlog
from harness import options_of, show

from dl2d.core.credentials_from_daemon_key import Credentials
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.errors import Denied
from dl2d.core.job_request_parser import RequestRules
from dl2d.core.jobs import JobKey, JobState, Owner
from dl2d.core.store import JobChange
from dl2d.daemon.api.connection_limits import DEFAULT_LIMITS
from dl2d.daemon.api.http_application import create_api
from dl2d.daemon.api.http_server import ApiServer
from dl2d.daemon.api.job_admission import Admission
from dl2d.daemon.api.request_limits import HEARTBEATS_PER_SECOND, VIEWS_PER_SECOND, RateLimiter, UserTurns
from dl2d.daemon.api.route_dependencies import Services
from dl2d.daemon.health_and_metrics import Health
from dl2d.daemon.shared_resource_manager import ManagerAccess
from dl2d.store import schema_version
from dl2d.store.sql_store import SqlStore
from dl2d.testing import MemoryManager, make_job
from dl2d.tick.task_command_and_environment import TaskSpecs

# isort: split
from self_signed import self_signed

TLS_LOADS = ["tls-reconnect", "hello", "silent"]
LOADS = ["status", "one-user", "forged", "health", "unknown", "wrong-credential", "reconnect", "flood", *TLS_LOADS]
CREDENTIALS = Credentials(b"k" * 32)
#: As dl2d.yaml has it: api.requests_per_second.
REQUESTS_PER_SECOND, BURST = 20.0, 5
FIRST_UID = 7000
FORK = multiprocessing.get_context("fork")
UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
UNVERIFIED.check_hostname, UNVERIFIED.verify_mode = False, ssl.CERT_NONE


class UserManager(MemoryManager):
    """A manager that takes a user's id for the credential of that user; each costs a process, as unmunge does."""

    def authenticate_user(self, credential: str, payload: str) -> int:
        """See ``UserAuthenticator``."""
        del payload
        subprocess.run(["/bin/true"], check=True)
        if not credential.isdecimal():
            raise Denied("this credential is forged")
        return int(credential)


def serve(jobs: int, ports: SimpleQueue[int], *, tls: bool) -> None:
    """Serve until this process is ended; puts the port when it does."""
    with tempfile.TemporaryDirectory(prefix="dl2d-bench-") as folder, (Path(folder) / "log").open("w") as log:
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(20), logger_factory=structlog.PrintLoggerFactory(log)
        )
        url = f"sqlite:///{folder}/store.sqlite"
        schema_version.upgrade(url)
        store = SqlStore(url)
        for number, key in enumerate(job_keys(jobs)):
            job = make_job(number + 1, submitted=key.submitted)
            uid = FIRST_UID + number
            store.add_job(replace(job, key=key, owner=Owner(f"user-{uid}", uid, uid)))
            store.change_job(key, JobChange(state=JobState.RUNNING), 1.0)
        server = ApiServer("127.0.0.1", 0, DEFAULT_LIMITS, *(self_signed(Path(folder)) if tls else ()))
        host, port = server.address
        timer = time.monotonic
        services = Services(
            cluster="bench", url=f"http://{host}:{port}", store=store,
            manager=ManagerAccess(UserManager((), time.time)),
            admission=lambda: Admission(RequestRules(frozenset({"resnet-50"}), 16, 16)),
            credentials=CREDENTIALS, task_specs=TaskSpecs("http://daemon", CREDENTIALS), clock=time.time,
            heartbeat_seconds=lambda: 2.0, starts_anchors=False, mode=lambda: Mode.LIVE, health=Health(time.time),
            rate=RateLimiter(REQUESTS_PER_SECOND, BURST * REQUESTS_PER_SECOND, timer),
            heartbeat_rate=RateLimiter(HEARTBEATS_PER_SECOND, BURST * HEARTBEATS_PER_SECOND, timer),
            wake=lambda: None, user_turns=UserTurns(RateLimiter(VIEWS_PER_SECOND, BURST * VIEWS_PER_SECOND, timer)),
            user_name=lambda uid: f"user-{uid}",
        )  # fmt: skip
        server.start(create_api(services))
        ports.put(port)
        signal.pause()


def job_keys(jobs: int) -> list[JobKey]:
    return [JobKey("bench", str(number), 1_795_253_932) for number in range(1, jobs + 1)]


class Heartbeats:
    """A client that sends heartbeats of jobs in turn, each on a connection of its own."""

    def __init__(self, port: int, jobs: int, *, tls: bool) -> None:
        self._port = port
        self._tls = tls
        self._keys = itertools.cycle(job_keys(jobs)[1:])
        self._numbers = itertools.count(1)

    def run(self, seconds: float) -> tuple[list[float], int]:
        """Send heartbeats for so long; return their times in milliseconds, and how many were not taken."""
        end, times, refused = time.monotonic() + seconds, [], 0
        while time.monotonic() < end:
            began = time.perf_counter()
            status = self._send()
            times.append(1000 * (time.perf_counter() - began))
            refused += status != 200
            time.sleep(0.02)
        return times, refused

    def _send(self) -> int:
        key, number = next(self._keys), next(self._numbers)
        body = {"address": "host:1", "state": "running", "sender": "bench", "number": number, "version": number}
        head = {"Authorization": f"Bearer {CREDENTIALS.for_job(key)}", "Content-Type": "application/json"}
        plain = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        secure = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=30, context=UNVERIFIED)
        connection = secure if self._tls else plain
        try:
            connection.request("POST", f"/v1/jobs/{key.slug}/heartbeat", json.dumps(body), head)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()


def request_of(load: str, connection: int) -> bytes:
    """The request that a connection sends."""
    key, body, method, path, shown = job_keys(1)[0], b"", "GET", "/v1/health", ""
    match load:
        case "status" | "one-user" | "forged":
            uid = FIRST_UID + (connection if load == "status" else 0)
            path, shown = "/v1/status", f"Munge {'x' * 200 if load == 'forged' else uid}"
        case "unknown":
            path = "/v1/nothing"
        case "wrong-credential" | "flood":
            method, path = "POST", f"/v1/jobs/{key.slug}/heartbeat"
            shown = f"Bearer {CREDENTIALS.for_job(key) if load == 'flood' else 'wrong'}"
            body = b'{"address": "host:1", "state": "running"}'
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"Authorization: {shown}"] if shown else []
    lines += ["Connection: close"] if load.endswith("reconnect") else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def client_hello() -> bytes:
    """The first message of a TLS handshake."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        UNVERIFIED.wrap_bio(received, sent).do_handshake()
    return sent.read()


async def load_api(load: str, port: int, source: str, connections: int, answers: Counter[str]) -> None:
    """Send requests on so many connections, until cancelled."""
    hello, tls = client_hello(), UNVERIFIED if load == "tls-reconnect" else None

    async def client(number: int) -> None:
        request = request_of(load, number)
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, local_addr=(source, 0))
                try:
                    while load not in ("hello", "silent"):
                        writer.write(request)
                        head = await reader.readuntil(b"\r\n\r\n")
                        answers[head[9:12].decode()] += 1
                        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                        await reader.readexactly(int(length or 0))
                        if b"connection: close" in head.lower():
                            break
                    if load == "silent":
                        answers["connected"] += 1
                    if load == "hello":
                        writer.write(hello)
                        answers["hello" if await reader.read(4096) else "closed"] += 1
                finally:
                    writer.close()
            except (OSError, asyncio.IncompleteReadError):
                answers["lost"] += 1
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for number in range(connections):
            group.create_task(client(number))


def load_for(
    load: str, port: int, source: str, connections: int, seconds: float, results: SimpleQueue[Counter[str]]
) -> None:
    """Load the API for so long; puts an empty result when it begins, and the answers by status at the end."""
    answers: Counter[str] = Counter()

    async def limited() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await load_api(load, port, source, connections, answers)

    results.put(Counter())
    asyncio.run(limited())
    results.put(answers)


def measure(load: str, source: str, connections: int, seconds: float, repeats: int, jobs: int) -> None:
    """Measure heartbeats without and with one kind of load."""
    quiet: list[float] = []
    loaded: list[float] = []
    refused, answers = 0, Counter[str]()
    ports: SimpleQueue[int] = FORK.SimpleQueue()
    tls = load in TLS_LOADS
    server = FORK.Process(target=serve, args=(jobs, ports), kwargs={"tls": tls}, daemon=True)
    server.start()
    port = ports.get()
    heartbeats = Heartbeats(port, jobs, tls=tls)
    heartbeats.run(1.0)
    for _ in range(repeats):
        quiet += heartbeats.run(seconds)[0]
        results: SimpleQueue[Counter[str]] = FORK.SimpleQueue()
        client = FORK.Process(target=load_for, args=(load, port, source, connections, seconds + 1.0, results))
        client.start()
        results.get()
        times, failed = heartbeats.run(seconds)
        loaded, refused = loaded + times, refused + failed
        answers.update(results.get())
        client.join()
    server.terminate()
    server.join()
    show(
        load=load, source=source, connections=connections, quiet_ms=spread(quiet), loaded_ms=spread(loaded),
        ratio=median(loaded) / median(quiet), heartbeats=len(loaded), refused=refused,
        answers_per_second={status: count / (repeats * (seconds + 1.0)) for status, count in sorted(answers.items())},
        load_average=os.getloadavg()[0],
    )  # fmt: skip


def spread(times: list[float]) -> list[float]:
    """Median, 95th percentile and maximum."""
    return [median(times), quantiles(times, n=20)[-1], max(times)]


def main() -> None:
    options = options_of(__doc__, loads=LOADS, source="127.0.0.1", connections=200, seconds=5.0, repeats=3, jobs=100)
    for load in options.loads:
        measure(load, options.source, options.connections, options.seconds, options.repeats, options.jobs)


if __name__ == "__main__":
    main()
