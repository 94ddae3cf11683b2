"""Routes for users, who see their own jobs, and for operators, who see all; each request has a credential of its user.

The resource manager says who made the credential, which serves for one request to this daemon (``request_payload``).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Annotated, ClassVar, Final

import structlog
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from dl2d.core.errors import ResourceManagerError, StoreError, StoreUnavailable, Unavailable
from dl2d.core.job_views import MAX_DECISIONS, MAX_LISTED, request_payload
from dl2d.core.jobs import User
from dl2d.core.json_codec import encode
from dl2d.core.resource_manager import UserAuthenticator
from dl2d.daemon.api.authentication import (
    PublicRoute,
    address_of,
    connection_of,
    credential_in,
    refuse_clear_text,
    services_of,
)
from dl2d.daemon.api.route_dependencies import Services
from dl2d.daemon.job_views_from_store import StoreViews

log = structlog.get_logger()

_MAX_CHANGES: Final = 100


class _UserRoute(PublicRoute):
    """Route for users. Their requests do not count towards the rate of their address, which others send from, too."""

    max_body: ClassVar[int] = 0

    def admit(self, request: Request) -> None:
        """Refuse a request without anything that could be a credential, or with one in clear text."""
        refuse_clear_text(request)
        if not credential_in(request, "munge"):
            raise HTTPException(401, "this request needs a munge credential of its user")

    async def serve(self, request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
        """Verify who has sent a request, and answer it in their turn."""
        services = await services_of(request)
        connection = connection_of(request)
        async with services.user_turns.authenticating(address_of(request), connection):
            uid, request.state.views = await run_in_threadpool(_authenticate, request, services)
        async with services.user_turns.viewing(uid, connection):
            try:
                return await handle(request)
            except StoreError as error:
                # It may name files of the daemon and jobs of others.
                log.warning("the store cannot be read for a user", error=str(error))
                kind = StoreUnavailable if isinstance(error, StoreUnavailable) else StoreError
                raise kind("the daemon cannot read its database; its log says why") from error


users = APIRouter(route_class=_UserRoute)


def _authenticate(request: Request, services: Services) -> tuple[int, StoreViews]:
    """The user id of whoever has made the credential of a request, and what they may see; raises HTTPException.

    Refusals are not logged: anybody can cause as many as they like.
    """
    manager = services.manager.manager
    if not isinstance(manager, UserAuthenticator):
        raise HTTPException(403, "the resource manager of this cluster does not authenticate users")
    path = request.scope["raw_path"].decode("ascii", "replace")
    query = request.scope["query_string"].decode("ascii", "replace")
    payload = request_payload(request.method, services.url, f"{path}?{query}" if query else path)
    try:
        uid = manager.authenticate_user(credential_in(request, "munge"), payload)
    except ResourceManagerError as error:
        raise HTTPException(503 if isinstance(error, Unavailable) else 403, str(error)) from None
    if uid in (0, os.geteuid()):
        return uid, StoreViews(services.store, refused=services.refused.reason)
    try:
        name = services.user_name(uid)
    except KeyError:
        raise HTTPException(403, f"the daemon's machine knows no user with the id {uid}") from None
    user = None if name in services.operators() else User(uid, name)
    return uid, StoreViews(services.store, user, refused=services.refused.reason)


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
