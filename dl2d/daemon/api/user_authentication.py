"""Authentication of users, for each request, by a credential that the resource manager verifies (MUNGE on Slurm)."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import ClassVar

import structlog
from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from dl2d.core.errors import ResourceManagerError, StoreError, StoreUnavailable, Unavailable
from dl2d.core.job_views import request_payload
from dl2d.core.jobs import User
from dl2d.core.resource_manager import UserAuthenticator
from dl2d.daemon.api.bearer_authentication import (
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


class UserRoute(PublicRoute):
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
