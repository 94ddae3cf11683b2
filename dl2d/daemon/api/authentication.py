"""Authentication of requests by bearer credentials: one for each job, and one for submission."""

from __future__ import annotations

from typing import Annotated

import structlog
from fastapi import Depends, Header, HTTPException, Request

from dl2d.core.jobs import Job, JobKey
from dl2d.daemon.api.dependencies import Services

log = structlog.get_logger()


async def services_of(request: Request) -> Services:
    """The services of the application that serves a request."""
    services: Services = request.app.state.services
    return services


def authenticated_job(
    slug: str, authorization: Annotated[str, Header()] = "", services: Services = Depends(services_of)
) -> Job:
    """The job of a path, once the request has shown that job's credential."""
    try:
        key = JobKey.from_slug(slug)
    except ValueError:
        raise HTTPException(404, f"{slug!r} is not the name of a job") from None
    if not services.credentials.is_for_job(key, _bearer(authorization)):
        log.warning("wrong credential", job=slug)
        raise HTTPException(403, f"this is not the credential of job {slug}")
    job = services.store.job(key)
    if job is None:
        raise HTTPException(404, f"this daemon has no job {slug}")
    return job


def may_submit(authorization: Annotated[str, Header()] = "", services: Services = Depends(services_of)) -> None:
    """Refuse a request without the submission credential."""
    if not services.credentials.is_for_submission(_bearer(authorization)):
        log.warning("wrong submission credential")
        raise HTTPException(403, "this is not the credential of the daemon's account")


def _bearer(header: str) -> str:
    kind, _, shown = header.partition(" ")
    return shown.strip() if kind.lower() == "bearer" else ""
