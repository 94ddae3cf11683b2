"""Routes of the HTTP API: coordinators register and send heartbeats, the command line submits and cancels jobs."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import Response
from msgspec import structs
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dl2d import __version__
from dl2d.core.cluster import ANCHOR, Task, TaskState
from dl2d.core.errors import DuplicateJob, RequestError
from dl2d.core.jobs import Job, JobKey, JobState, Launch, Owner, Role
from dl2d.core.resource_manager import Anchor, ContainerManager, ContainerReport, ResourceManager
from dl2d.core.store import JobChange, TaskChange
from dl2d.daemon.api.bearer_authentication import (
    TOO_MANY_HEARTBEATS,
    ContainerRoute,
    HeartbeatRoute,
    OwnServices,
    PublicRoute,
    SubmissionRoute,
    job_of_path,
    refuse_clear_text,
    shows_submission_credential,
)
from dl2d.daemon.api.heartbeat import Heartbeat, receive, stop_answer, targets
from dl2d.daemon.api.job_admission import check_options
from dl2d.daemon.api.request_limits import PLANS_PER_HEARTBEAT, TASKS_PER_RATE, too_many
from dl2d.daemon.api.route_dependencies import Services
from dl2d.daemon.api.user_routes import users
from dl2d.daemon.job_views_from_store import StoreViews
from dl2d.store.sql_store import SqlStore
from dl2d.tick.reconciliation.unlisted_tasks_and_silent_coordinators import SILENT_HEARTBEATS

log = structlog.get_logger()
_public = APIRouter(route_class=PublicRoute)
_containers = APIRouter(route_class=ContainerRoute)
_heartbeats = APIRouter(route_class=HeartbeatRoute)
_of_submission = APIRouter(route_class=SubmissionRoute)
#: All routes, by who may call them.
ROUTERS = (_public, _containers, _heartbeats, _of_submission, users)

#: Registrations are checked against the nodes of a tick's last complete listing, if that is not older.
_RECENT_SECONDS = 60.0
#: Names in a line of the log.
_MAX_LOGGED = 20


def _only_strings(words: object) -> object:
    """Refuse a mapping at its first value that is no string; pydantic would make an error of each."""
    if isinstance(words, dict):
        for key, value in words.items():
            if not isinstance(value, str):
                raise ValueError(f"the value of {key[:100]!r} is not a string")
    return words


_Words = Annotated[dict[str, str], BeforeValidator(_only_strings), Field(max_length=10_000)]


class _Request(BaseModel):
    """A request's body. The first error in it is enough: errors are made in the event loop, which serves all jobs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, body: object) -> object:
        if isinstance(body, dict) and (unknown := next((key for key in body if key not in cls.model_fields), None)):
            raise ValueError(f"unknown field {unknown[:100]!r}")
        return body


class _Body(_Request):
    argv: Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]
    cwd: str
    env: _Words = {}

    @property
    def launch(self) -> Launch:
        """Command, folder and environment of the job's tasks."""
        return Launch(tuple(self.argv), self.cwd, tuple(sorted(self.env.items())))


class Authentication(_Request):
    """What a job shows of itself to be verified."""

    rm_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    proof: Annotated[str, Field(max_length=16_384)]


class Registration(_Body, Authentication):
    """Registration of an anchor that the resource manager started: its address, and the command of its tasks."""

    address: str = ""
    #: What the job sees of the options with which it was submitted, by keys of ``#DL2`` lines.
    options: Annotated[dict[str, str], BeforeValidator(_only_strings), Field(max_length=100)] = {}


class Submission(_Body):
    """A job for the daemon to start."""

    request: dict[str, object]


@_public.get("/v1/health")
def health(request: Request, services: OwnServices) -> dict[str, object]:
    """State of the daemon, for anybody who asks; the last error, for the daemon's account."""
    status = services.health.status()
    details: dict[str, object] = {}
    if request.headers.get("authorization"):
        details["own"] = shows_submission_credential(request)
        if details["own"]:
            details |= {"waiting": status.waiting, "last_error": status.last_error}
            details["last_error_seconds"] = status.last_error_seconds
    return {
        "version": __version__,
        "cluster": services.cluster,
        "slot": status.slot,
        "status": "degraded" if status.problems else "waiting" if status.waiting else "ok",
        "problems": list(status.problems),
        "last_tick_seconds": status.last_tick_seconds,
        "listing_seconds": status.listing_seconds,
        **details,
    }


@_public.get("/metrics")
def metrics(services: OwnServices) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(services.health.metrics(), media_type=CONTENT_TYPE_LATEST)


@_public.post("/v1/register")
def register(body: Registration, request: Request, services: OwnServices) -> dict[str, object]:
    """Register an anchor that the resource manager authenticates; doing it again changes nothing."""
    refuse_clear_text(request)
    anchor = services.manager.authenticate(body.rm_id, body.proof)
    with services.manager.for_request() as manager:
        # Looked up and added under the same lock: an anchor that calls twice at once is one job.
        known = services.store.job(anchor.key)
        static = not services.mode().acts if known is None else known.static
        if known is None or (known.unreported and not known.state.ended) or _is_expected(known, services):
            known = _take_registration(body, anchor, manager, services, known=known, static=static)
    if known is not None and known.state.ended:
        raise HTTPException(409, f"job {anchor.key.id} has ended already: {known.end_reason}")
    services.wake()
    return {
        "job": anchor.key.slug,
        "credential": services.credentials.for_job(anchor.key),
        "token": services.credentials.token(anchor.key),
        "heartbeat_seconds": services.heartbeat_seconds(),
        "static": static,
        # Of a static job dl2d starts no tasks.
        "remarks": [] if static else list(anchor.remarks),
    }


@_public.post("/v1/authenticate")
def authenticate(body: Authentication, request: Request, services: OwnServices) -> dict[str, object]:
    """Verify whose job it is, as a registration does, and register nothing: for checks of an installation."""
    refuse_clear_text(request)
    anchor = services.manager.authenticate(body.rm_id, body.proof)
    return {"job": anchor.key.id, "user": anchor.owner.user}


def _is_expected(job: Job, services: Services) -> bool:
    """Whether a job is the next run of one that was requeued, and its coordinator has not called yet."""
    return job.state is JobState.SUBMITTED and not job.static and not services.starts_anchors


def _take_registration(
    body: Registration, anchor: Anchor, manager: ResourceManager, services: Services, *, known: Job | None, static: bool
) -> Job | None:
    """Keep what a job declares; returns the job that was known before, which a tick may have added meanwhile."""
    # Only the nodes' capacities are needed. A listing for each registration would take from ticks what they may ask.
    listing, admission = services.manager.last_complete, services.admission()
    if listing is None or not 0 <= services.clock() - listing.at < _RECENT_SECONDS:
        listing = manager.listing()
    try:
        check_options(anchor, body.options)
        if static:
            job = admission.registered_static(anchor, body.launch, listing, body.address)
        else:
            job = admission.registered(anchor, body.launch, listing)
    except RequestError as error:
        services.refused.note(anchor, str(error))
        raise
    if known is None:
        try:
            services.store.add_job(job)
        except DuplicateJob:  # a tick has found that the job was requeued, and has added its next run
            known = services.store.job(job.key)
    if known is not None:
        # What it declares replaces what was observed, or what an earlier run of it declared, which may have been
        # charged to another account.
        change = JobChange(request=job.request, address=job.address, launch=job.launch, owner=job.owner)
        services.store.change_job(job.key, change, services.clock())
    log.info("job registered", job=job.key.id, user=job.owner.user, name=job.request.name, static=static)
    return known


@_heartbeats.post("/v1/jobs/{slug}/heartbeat")
def heartbeat(beat: Heartbeat, services: OwnServices, job: Job = Depends(job_of_path)) -> dict[str, object]:
    """Take a coordinator's report, and answer with the tasks that should be members of its job."""
    at = services.clock()
    services.owners.note(job.key.slug, job.owner.uid, ended=job.state.ended)
    if job.state.ended:
        # Cancelled, or ended as the resource manager says, and the coordinator does not know it yet.
        failed = job.end_reason if job.state is JobState.FAILED else ""
        return stop_answer(services.heartbeat_seconds(), failed)
    if not services.heartbeat_rate.take(job.key.slug, len(beat.plans) / PLANS_PER_HEARTBEAT):
        raise too_many(TOO_MANY_HEARTBEATS)
    if not services.taken.take(job.key, beat.sender, beat.number):
        raise HTTPException(409, "this heartbeat, or a later one of the same process, was received before")
    # Tasks of a static job are its coordinator's own affair: the next tick sees which there are.
    tasks = () if job.static else services.store.named_tasks(job.key, {member.task for member in beat.members})
    reception = receive(
        job, tasks, beat, at,
        anchor_decides=not services.starts_anchors and not job.static,
        reported=lambda: {report.task for report in services.store.task_reports(job.key)},
    )  # fmt: skip
    if reception.unknown and not job.static and services.may_log("unknown members", job.key.slug):
        first = reception.unknown[:_MAX_LOGGED]
        log.warning("unknown members", job=job.key.id, count=len(reception.unknown), members=first)
    services.store.add_runtime_plans(job.key, reception.plans)
    moved = services.store.change_tasks(reception.tasks, at)
    services.store.report_progress(job.key, reception.progress, reception.reports)
    has_moved = reception.job is not None and _change_job(job, reception.job, services.store, at)
    # States go forward only. What else a coordinator says may change with each heartbeat, and waits for the next tick.
    if has_moved or (moved and services.wakes.take(job.key.slug)):
        services.wake()
    members = [member.task for member in beat.members]
    wanted = members if job.static else targets(services.store.tasks(live=True, job=job.key))
    services.answered.note(job.key, beat.starting, ending=beat.ending)
    return {
        "members": wanted,
        "stop": False,
        "heartbeat_seconds": services.heartbeat_seconds(),
    }


def _change_job(job: Job, change: JobChange, store: SqlStore, at: float) -> bool:
    """Change a job as its coordinator reports; returns whether it is in another state now."""
    changed = store.change_job(job.key, change, at)
    if changed.state is not job.state:
        log.info("job", job=job.key.id, state=str(changed.state), reason=changed.end_reason)
    if job.static and changed.state.ended:
        # Its coordinator has ended its tasks, and no tick looks at a job that has ended.
        own = store.tasks(live=True, job=job.key)
        store.change_tasks([TaskChange(job.key, task.id, TaskState.RELEASED) for task in own], at)
    return changed.state is not job.state


class ContainerBody(_Request):
    """Report of a container that asks which task of its job to run; see ``ContainerReport``."""

    role: Role
    position: Annotated[int, Field(ge=0, le=100_000)]
    container: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,200}$")]
    incarnation: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_-]{0,300}$")] = ""
    task: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,128}$")] = ""
    exit_code: Annotated[int, Field(ge=-255, le=255)] | None = None
    ending: bool = False
    #: Address of the coordinator with which the task that runs was started.
    coordinator: Annotated[str, Field(max_length=300)] = ""


@_containers.post("/v1/jobs/{slug}/containers")
def container(body: ContainerBody, services: OwnServices, job: Job = Depends(job_of_path)) -> dict[str, object]:
    """Take a container's report, and answer with the task that it is to start, or whether to end the one it runs."""
    manager = services.manager.manager
    if not isinstance(manager, ContainerManager):
        raise HTTPException(409, "this cluster's resource manager starts each task itself, in a job of its own")
    most = job.request.max_workers + job.request.max_ps
    if not services.heartbeat_rate.take(f"{job.key.slug}/containers", min(1.0, TASKS_PER_RATE / max(most, 1))):
        raise too_many("reports of this job's containers")
    task = _task_of(body, job, services.store)
    if body.task and task is None and (body.role is not Role.COORDINATOR or body.task != ANCHOR):
        if services.may_log("unknown task", job.key.slug):
            log.warning("unknown task", job=job.key.id, container=body.container, task=body.task)
        raise HTTPException(409, f"dl2d has given job {job.key.id} no {body.role.value} task {body.task}")
    lost = task is not None and _has_lost_coordinator(body, job, task, services)
    report = ContainerReport(job=job.key, **body.model_dump(exclude={"coordinator"}))
    if lost and body.exit_code is not None:
        # Not the end of the task: a container without one is given the task again.
        report = structs.replace(report, task="", exit_code=None)
    order = manager.report_container(report)
    if (body.exit_code is not None or body.ending or order.task) and services.wakes.take(job.key.slug):
        services.wake()
    return {
        "task": _launch_of(order.task, job, services),
        "grace": order.grace,
        "again": lost and body.exit_code is None and order.grace is None,
        "report_seconds": order.report_seconds,
    }


def _task_of(report: ContainerBody, job: Job, store: SqlStore) -> Task | None:
    """The task that a container says it runs, if it is one of the job's: its user may send anything."""
    tasks = store.named_tasks(job.key, {report.task}) if report.task and report.role is not Role.COORDINATOR else ()
    return next((task for task in tasks if task.role is report.role), None)


def _has_lost_coordinator(report: ContainerBody, job: Job, task: Task, services: Services) -> bool:
    """Whether a task has not joined its job since the coordinator with which it was started has moved.

    One that has failed may have waited for a coordinator that has not called from its new place yet.
    """
    has_joined = not task.state.wanted or task.state.rank >= TaskState.JOINED.rank
    if has_joined or not report.coordinator or report.ending or report.exit_code == 0:
        return False
    silent_for = services.clock() - job.progress.at
    is_silent = silent_for >= SILENT_HEARTBEATS * services.heartbeat_seconds()
    return report.coordinator != job.address or (report.exit_code is not None and is_silent)


def _launch_of(task_id: str, job: Job, services: Services) -> dict[str, object] | None:
    """Command of a task of a job that has not ended; None where there is no such task."""
    if not task_id or job.state.ended:
        return None
    if task_id == ANCHOR:
        spec = services.task_specs.anchor_spec(job)
    else:
        found = [task for task in services.store.tasks(live=True, job=job.key) if task.id == task_id]
        if not found:
            return None
        spec = services.task_specs.of_job(job).task_spec(found[0])
    launch = spec.launch
    return {"id": task_id, "argv": launch.argv, "cwd": launch.cwd, "env": dict(launch.env)}


@_of_submission.post("/v1/jobs")
def submit(body: Submission, request: Request, services: OwnServices) -> dict[str, object]:
    """Take a job for the daemon to start."""
    mode = services.mode()
    if not mode.acts:
        raise HTTPException(
            409, f"the daemon is in mode {mode}, in which it starts no jobs; `mode: live` in dl2d.yaml lets it"
        )
    if not services.starts_anchors:
        raise HTTPException(409, "this cluster's jobs are submitted with its own tools (sbatch), not to the daemon")
    account = pwd.getpwuid(os.getuid())
    owner = Owner(account.pw_name, account.pw_uid, account.pw_gid)
    with services.manager.for_request() as manager:
        listing = manager.listing()
    unnumbered = JobKey(services.cluster, "0", int(services.clock()))
    job = services.admission().submitted(unnumbered, body.request, body.launch, owner, listing)
    with request.app.state.submitting:
        if body.request.get("name"):
            _refuse_duplicate(job.request.name, services.store)
        key = unnumbered._replace(id=services.store.next_job_id(services.cluster))
        job = replace(job, key=key)
        services.store.add_job(job)
    log.info("job submitted", job=key.id, name=job.request.name, model=job.request.model)
    services.wake()
    return {"job": key.slug, "id": key.id, "name": job.request.name}


def _refuse_duplicate(name: str, store: SqlStore) -> None:
    """Refuse a name that a live job has: most likely the same submission was sent again."""
    same = [job for job in store.find_jobs(name, by=("name",)) if not job.state.ended]
    if same:
        raise DuplicateJob(
            f"job {same[0].key.id} is called {name!r} already and has not ended; "
            "give the new one another name, or cancel the other first"
        )


@_of_submission.delete("/v1/jobs/{slug}")
def cancel(slug: str, services: OwnServices) -> dict[str, object]:
    """Cancel a job by slug, id or name."""
    try:
        job = StoreViews(services.store).find(slug)
    except RequestError as error:
        raise HTTPException(404, error.problem) from None
    if job.state.ended:
        raise HTTPException(409, f"job {job.key.id} has ended already ({job.state})")
    if job.static:
        raise HTTPException(409, f"dl2d only observes job {job.key.id}: end it where it was submitted")
    change = JobChange(state=JobState.CANCELLED, end_reason="cancelled through dl2d")
    job = services.store.change_job(job.key, change, services.clock())
    log.info("job", job=job.key.id, state=str(job.state), reason=job.end_reason)
    services.wake()
    return {"job": job.key.slug, "id": job.key.id, "state": str(job.state)}
