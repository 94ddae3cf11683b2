"""Routes for users, who see their own jobs, and for operators, who see all; each request has a credential of its user.

The resource manager says who made the credential, which serves for one request to this daemon (``request_payload``).
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, ClassVar, Final

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import Response

from dl2d.core.errors import Denied, Waiting
from dl2d.core.job_views import request_payload
from dl2d.core.json_codec import encode
from dl2d.core.resource_manager import UserAuthenticator
from dl2d.daemon.api.authentication import PublicRoute, refuse_clear_text, services_of
from dl2d.daemon.api.dependencies import Services
from dl2d.daemon.store_views import StoreViews

#: Decisions and other changes that one request may ask for: for each decision, a whole slot is read.
MAX_CHANGES: Final = 100
_MAX_JOBS: Final = 10_000


class _UserRoute(PublicRoute):
    """Route for users, within the rate limit of requests without a credential: theirs is checked after that."""

    max_body: ClassVar[int] = 0

    def admit(self, request: Request) -> None:
        """Refuse a request without anything that could be a credential, or with one in clear text."""
        super().admit(request)
        refuse_clear_text(request)
        if not _credential(request):
            raise HTTPException(401, "this request needs a munge credential of its user")


users = APIRouter(route_class=_UserRoute)


@contextmanager
def _views(request: Request, services: Services) -> Iterator[StoreViews]:
    """What the user who has made the credential of this request may see; a few such requests are served at once.

    They are counted until their answers are made, not until clients have read them.
    """
    if not services.viewing.acquire(blocking=False):
        raise Waiting("the daemon answers too many users at once; try again in a few seconds")
    try:
        uid = _user_of(request, services)
        yield StoreViews(services.store, None if _is_operator(uid, services.operators) else uid)
    finally:
        services.viewing.release()


def _credential(request: Request) -> str:
    kind, _, shown = request.headers.get("authorization", "").partition(" ")
    return shown.strip() if kind.lower() == "munge" else ""


def _user_of(request: Request, services: Services) -> int:
    manager = services.manager.manager
    if not isinstance(manager, UserAuthenticator):
        raise Denied("the resource manager of this cluster does not authenticate users")
    path = request.scope["raw_path"].decode("ascii", "replace")
    query = request.scope["query_string"].decode("ascii", "replace")
    payload = request_payload(request.method, services.url, f"{path}?{query}" if query else path)
    return manager.authenticate_user(_credential(request), payload)


def _is_operator(uid: int, names: Callable[[], frozenset[str]]) -> bool:
    if uid in (0, os.geteuid()):
        return True
    try:
        return pwd.getpwuid(uid).pw_name in names()
    except KeyError:
        return False


_Services = Annotated[Services, Depends(services_of)]
_Job = Annotated[str, Query(min_length=1, max_length=300)]
_Limit = Annotated[int, Query(ge=1, le=MAX_CHANGES)]


@users.get("/v1/status")
def status(
    request: Request,
    services: _Services,
    job: _Job | None = None,
    ended_since: float | None = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_JOBS)] = 1000,
) -> Response:
    """Jobs of the user, or one of them with its tasks."""
    with _views(request, services) as views:
        return _json(views.status(job, ended_since=ended_since, limit=limit))


@users.get("/v1/why")
def why(
    request: Request,
    services: _Services,
    job: _Job,
    slot: Annotated[int | None, Query(ge=1, lt=2**63)] = None,
    limit: _Limit = 1,
) -> Response:
    """Newest decisions on a job of the user, or that of a slot."""
    with _views(request, services) as views:
        return _json(views.why(job, slot=slot, limit=limit))


@users.get("/v1/history")
def history(request: Request, services: _Services, job: _Job | None = None, limit: _Limit = 20) -> Response:
    """Changes of a job of the user; for operators also those of the cluster."""
    with _views(request, services) as views:
        return _json(views.history(job, limit=limit))


@users.get("/v1/usage")
def usage(request: Request, services: _Services, job: _Job) -> Response:
    """When the tasks of a job of the user held which resources."""
    with _views(request, services) as views:
        return _json(views.usage(job))


def _json(view: object) -> Response:
    return Response(encode(view), media_type="application/json")
