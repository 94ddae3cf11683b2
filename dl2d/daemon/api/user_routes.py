"""Routes for users, who see their own jobs, and for operators, who see all; each request has a credential of its user.

The resource manager says who made the credential, which serves for one request to this daemon (``request_payload``).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from dl2d.core.job_views import MAX_DECISIONS, MAX_LISTED
from dl2d.core.json_codec import encode
from dl2d.daemon.api.user_authentication import UserRoute
from dl2d.daemon.job_views_from_store import StoreViews

_MAX_CHANGES = 100


users = APIRouter(route_class=UserRoute)


async def _views_of(request: Request) -> StoreViews:
    views: StoreViews = request.state.views
    return views


_Views = Annotated[StoreViews, Depends(_views_of)]
_Job = Annotated[str, Query(min_length=1, max_length=300)]


@users.get("/v1/status")
def status(
    views: _Views,
    job: _Job | None = None,
    ended_since: float | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 1000,
) -> Response:
    """Jobs of the user, or one of them with its tasks."""
    return _json(views.status(job, ended_since=ended_since, limit=limit))


@users.get("/v1/why")
def why(
    views: _Views,
    job: _Job,
    slot: Annotated[int | None, Query(ge=1, lt=2**63)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = 1,
) -> Response:
    """Newest decisions on a job of the user, or that of a slot."""
    return _json(views.why(job, slot=slot, limit=limit))


@users.get("/v1/history")
def history(
    views: _Views, job: _Job | None = None, limit: Annotated[int, Query(ge=1, le=_MAX_CHANGES)] = 20
) -> Response:
    """Changes of a job of the user; for operators also those of the cluster."""
    return _json(views.history(job, limit=limit))


@users.get("/v1/usage")
def usage(views: _Views, job: _Job) -> Response:
    """When the tasks of a job of the user held which resources."""
    return _json(views.usage(job))


def _json(view: object) -> Response:
    return Response(encode(view), media_type="application/json")
