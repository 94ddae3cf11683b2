"""The HTTP API of the daemon: coordinators register and call here, and the command line submits and cancels.

Everything is refused that does not show the right credential; no body is read beyond its limit.
"""

from __future__ import annotations

import os
import pwd
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import structlog
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from dl2d import __version__
from dl2d.core.cluster import TaskState
from dl2d.core.errors import (
    Denied,
    Dl2dError,
    DuplicateJob,
    NotFound,
    RequestError,
    ResourceManagerError,
    StoreUnavailable,
    Unavailable,
)
from dl2d.core.jobs import Job, JobKey, JobState, Launch, Owner
from dl2d.core.mode import Mode
from dl2d.core.resource_manager import ResourceManager
from dl2d.core.store import JobChange, Store, TaskChange
from dl2d.daemon.api.admission import Admission
from dl2d.daemon.api.heartbeat import Heartbeat, receive, targets
from dl2d.daemon.health import Health
from dl2d.tick.task_specs import Credentials

log = structlog.get_logger()

#: Largest body that is read, in bytes: a heartbeat of a job with thousands of tasks, or an environment.
MOST_BYTES = 4 * 1024 * 1024

_MOST_DIGITS = 9

#: A request waits this many seconds for a tick that has the manager to itself, and so many requests may wait at once:
#: the threads that serve heartbeats must never all be taken up by it.
MANAGER_SECONDS, MANAGER_WAITING = 10.0, 8

_Words = Annotated[dict[str, str], Field(max_length=10_000)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Registration(_Body):
    """An anchor that the resource manager started says where it is and what its tasks shall run."""

    rm_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    proof: Annotated[str, Field(max_length=16_384)]
    argv: Annotated[list[str], Field(min_length=1, max_length=10_000)]
    cwd: str
    env: _Words = {}
    address: str = ""


class Submission(_Body):
    """A job for the daemon to start."""

    request: dict[str, object]
    argv: Annotated[list[str], Field(min_length=1, max_length=10_000)]
    cwd: str
    env: _Words = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the API works with."""

    cluster: str
    store: Store
    manager: ResourceManager
    #: Calls to the manager are made from one thread at a time.
    manager_lock: threading.Lock
    admission: Callable[[], Admission]
    credentials: Credentials
    clock: Callable[[], float]
    heartbeat_seconds: float
    starts_anchors: bool
    #: How far the daemon is in charge now.
    mode: Callable[[], Mode]
    #: What is wrong, and metrics.
    health: Health
    #: Asks for a tick soon, because something happened that it should see.
    wake: Callable[[], None]


def create_api(services: Services) -> FastAPI:
    """Build the application."""
    api = FastAPI(title="dl2d job API", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    submissions = threading.Lock()
    waiting = threading.BoundedSemaphore(MANAGER_WAITING)

    @contextmanager
    def manager() -> Iterator[ResourceManager]:
        """The resource manager, for one request at a time; who would wait long is asked to come again."""
        busy = "the daemon is busy with the resource manager; try again in a few seconds"
        if not waiting.acquire(blocking=False):
            raise Unavailable(busy)
        try:
            if not services.manager_lock.acquire(timeout=MANAGER_SECONDS):
                raise Unavailable(busy)
            try:
                yield services.manager
            finally:
                services.manager_lock.release()
        finally:
            waiting.release()

    @api.middleware("http")
    async def limit_body(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        length = request.headers.get("content-length", "0" if request.method in ("GET", "DELETE") else "")
        if not length.isdecimal() or len(length) > _MOST_DIGITS or int(length) > MOST_BYTES:
            return _error(413, f"the body must say its length, and that may be {MOST_BYTES} bytes at most")
        return await proceed(request)

    @api.exception_handler(Dl2dError)
    async def explain(request: Request, error: Dl2dError) -> Response:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
        # A store that is away is told by every tick; every coordinator's heartbeat would say the same again.
        say = log.debug if isinstance(error, StoreUnavailable) else log.warning
        say("request refused", path=request.url.path, status=status, error=str(error))
        return _error(status, str(error))

    @api.exception_handler(StarletteHTTPException)
    async def explain_status(request: Request, error: StarletteHTTPException) -> Response:
        del request
        return _error(error.status_code, str(error.detail))

    @api.exception_handler(RequestValidationError)
    async def explain_body(request: Request, error: RequestValidationError) -> Response:
        problems = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors())
        log.warning("malformed request", path=request.url.path, problems=problems)
        return _error(422, f"malformed request: {problems}")

    def job_of(slug: str, authorization: Annotated[str, Header()] = "") -> Job:
        try:
            key = JobKey.from_slug(slug)
        except ValueError:
            raise HTTPException(404, f"{slug!r} is not the name of a job") from None
        if not services.credentials.is_job(key, _bearer(authorization)):
            log.warning("wrong credential", job=slug)
            raise HTTPException(403, f"this is not the credential of job {slug}")
        job = services.store.job(key)
        if job is None:
            raise HTTPException(404, f"job {slug} is not known here")
        return job

    def may_submit(authorization: Annotated[str, Header()] = "") -> None:
        if not services.credentials.may_submit(_bearer(authorization)):
            log.warning("wrong submission credential")
            raise HTTPException(403, "this is not the credential of the daemon's account")

    def refuse_duplicate(name: str) -> None:
        # A name that the user chose says which job is meant; twice the same is a submission sent again.
        found = services.store.find_jobs(name)
        same = [job for job in found if job.request.name == name and not job.state.ended]
        if same:
            raise DuplicateJob(
                f"job {same[0].key.id} is called {name!r} already and has not ended; "
                "give the new one another name, or cancel the other first"
            )

    @api.get("/v1/health")
    def health() -> dict[str, object]:
        status = services.health.status()
        return {
            "version": __version__,
            "cluster": services.cluster,
            "slot": services.store.last_slot_number(),
            "status": "degraded" if status.problems else "ok",
            "problems": list(status.problems),
            "last_tick_seconds": status.last_tick_seconds,
        }

    @api.get("/metrics")
    def metrics() -> Response:
        return Response(services.health.metrics(), media_type=CONTENT_TYPE_LATEST)

    @api.post("/v1/register")
    def register(body: Registration) -> dict[str, object]:
        launch = Launch(tuple(body.argv), body.cwd, tuple(sorted(body.env.items())))
        with manager() as asked:
            anchor = asked.authenticate(body.rm_id, body.proof)
            # Looked up and added under the same lock: an anchor that calls twice at once is one job.
            known = services.store.job(anchor.key)
            static = not services.mode().acts if known is None else known.static
            if known is None or (known.unreported and not known.state.ended):
                seen, admission = asked.snapshot(), services.admission()
                job = (
                    admission.looked_on(anchor, launch, seen, body.address)
                    if static
                    else admission.registered(anchor, launch, seen)
                )
                if known is None:
                    services.store.add_job(job)
                else:  # it was watched before it called: what it declares takes the place of what was seen
                    change = JobChange(request=job.request, address=job.address)
                    services.store.change_job(job.key, change, services.clock())
                log.info("job registered", job=job.key.id, user=job.owner.user, name=job.request.name, static=static)
        if known is not None and known.state.ended:
            raise HTTPException(409, f"job {anchor.key.id} has ended already: {known.end_reason}")
        services.wake()
        return {
            "job": anchor.key.slug,
            "credential": services.credentials.for_job(anchor.key),
            "token": services.credentials.token(anchor.key),
            "heartbeat_seconds": services.heartbeat_seconds,
            "static": static,
        }

    @api.post("/v1/jobs/{slug}/heartbeat")
    def heartbeat(beat: Heartbeat, job: Job = Depends(job_of)) -> dict[str, object]:
        at = services.clock()
        if job.state.ended:
            # Cancelled, or ended as the resource manager says, and the coordinator does not know it yet.
            return {"members": [], "stop": True, "heartbeat_seconds": services.heartbeat_seconds}
        # Tasks of a static job are its coordinator's own affair: the next tick sees which there are.
        tasks = () if job.static else services.store.tasks(live=False, job=job.key)
        reception = receive(job, tasks, beat, at)
        if reception.strangers and not job.static:
            log.warning("unknown members", job=job.key.id, members=reception.strangers)
        services.store.add_runtime_plans(job.key, reception.plans)
        moved = services.store.change_tasks(reception.tasks, at)
        services.store.report_progress(job.key, reception.progress, reception.reports)
        if reception.job is not None:
            changed = services.store.change_job(job.key, reception.job, at)
            if changed.state is not job.state:
                log.info("job", job=job.key.id, state=str(changed.state), reason=changed.end_reason)
            if job.static and changed.state.ended:
                # Its coordinator has ended them; nobody looks on at a job that has ended.
                own = services.store.tasks(live=True, job=job.key)
                services.store.change_tasks([TaskChange(job.key, task.id, TaskState.RELEASED) for task in own], at)
        if moved or reception.job is not None:
            services.wake()
        members = [member.task for member in beat.members]
        return {
            "members": members if job.static else targets(services.store.tasks(live=True, job=job.key)),
            "stop": False,
            "heartbeat_seconds": services.heartbeat_seconds,
        }

    @api.post("/v1/jobs", dependencies=[Depends(may_submit)])
    def submit(body: Submission) -> dict[str, object]:
        mode = services.mode()
        if not mode.acts:
            raise HTTPException(409, f"the daemon is in mode {mode}: it starts nothing")
        if not services.starts_anchors:
            raise HTTPException(409, "this cluster's jobs are submitted with its own tools (sbatch), not to the daemon")
        account = pwd.getpwuid(os.getuid())
        owner = Owner(account.pw_name, account.pw_uid, account.pw_gid)
        launch = Launch(tuple(body.argv), body.cwd, tuple(sorted(body.env.items())))
        with manager() as asked:
            seen = asked.snapshot()
        unnumbered = JobKey(services.cluster, "0", int(services.clock()))
        job = services.admission().submitted(unnumbered, body.request, launch, owner, seen)
        with submissions:
            if body.request.get("name"):
                refuse_duplicate(job.request.name)
            key = unnumbered._replace(id=services.store.next_job_id(services.cluster))
            job = replace(job, key=key)
            services.store.add_job(job)
        log.info("job submitted", job=key.id, name=job.request.name, model=job.request.model)
        services.wake()
        return {"job": key.slug, "id": key.id, "name": job.request.name}

    @api.delete("/v1/jobs/{slug}", dependencies=[Depends(may_submit)])
    def cancel(slug: str) -> dict[str, object]:
        found = services.store.find_jobs(slug)
        if not found:
            raise HTTPException(404, f"no job {slug!r}")
        job = next((job for job in found if not job.state.ended), found[0])
        if job.state.ended:
            raise HTTPException(409, f"job {job.key.id} has ended already ({job.state})")
        if job.static:
            raise HTTPException(409, f"dl2d only looks on at job {job.key.id}: end it where it was submitted")
        change = JobChange(state=JobState.CANCELLED, end_reason="cancelled through dl2d")
        job = services.store.change_job(job.key, change, services.clock())
        log.info("job", job=job.key.id, state=str(job.state), reason=job.end_reason)
        services.wake()
        return {"job": job.key.slug, "id": job.key.id, "state": str(job.state)}

    return api


_STATUS: tuple[tuple[type[Dl2dError], int], ...] = (
    (RequestError, 422),
    (DuplicateJob, 409),
    (Denied, 403),
    (NotFound, 404),
    (Unavailable, 503),
    (StoreUnavailable, 503),
    (ResourceManagerError, 400),
)


def _bearer(header: str) -> str:
    kind, _, shown = header.partition(" ")
    return shown.strip() if kind.lower() == "bearer" else ""


def _error(status: int, text: str) -> Response:
    # What was sent may hold half a surrogate pair, which is no UTF-8.
    return JSONResponse({"error": text.encode(errors="backslashreplace").decode()}, status_code=status)
