"""The application of the HTTP API: its routes, and errors as JSON."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from dl2d import __version__
from dl2d.core.errors import (
    Denied,
    Dl2dError,
    DuplicateJob,
    NotFound,
    RequestError,
    ResourceManagerError,
    StoreUnavailable,
    Unavailable,
    Waiting,
)
from dl2d.daemon.api.bearer_authentication import may_log_of_address, take_turn
from dl2d.daemon.api.job_routes import ROUTERS
from dl2d.daemon.api.route_dependencies import Services

log = structlog.get_logger()

#: Errors in a malformed body that its sender and the log are told of.
_MAX_ERRORS = 10
#: Status of each error; the first class that fits counts.
_STATUS: tuple[tuple[type[Dl2dError], int], ...] = (
    (RequestError, 422),
    (DuplicateJob, 409),
    (Denied, 403),
    (NotFound, 404),
    (Unavailable, 503),
    (StoreUnavailable, 503),
    (ResourceManagerError, 400),
)


def create_api(services: Services) -> FastAPI:
    """Build the application."""
    # No redirects: the router would answer them at once, without a turn.
    api = FastAPI(
        title="dl2d job API", version=__version__, docs_url=None, redoc_url=None, openapi_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    api.state.services = services
    api.state.submitting = threading.Lock()
    for router in ROUTERS:
        api.include_router(router)
    api.exception_handler(Dl2dError)(_explain_error)
    api.exception_handler(HTTPException)(_explain_status)
    api.exception_handler(RequestValidationError)(_explain_body)
    return api


async def _explain_error(request: Request, error: Dl2dError) -> Response:
    await _wait_for_turn(request)
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    # A store that is away is reported by every tick; the heartbeats of all coordinators would repeat it.
    if isinstance(error, StoreUnavailable):
        log.debug("request refused", path=request.url.path, status=status, error=str(error))
    elif _may_log("request refused", request):
        log.warning("request refused", path=request.url.path, status=status, error=str(error))
    response = _error(status, str(error))
    if isinstance(error, Waiting):
        response.headers["Retry-After"] = "1"
    return response


async def _explain_status(request: Request, error: HTTPException) -> Response:
    await _wait_for_turn(request)
    # The connection stays open: a client that is still sending would not see the answer otherwise. What it sends of a
    # refused body is dropped as it comes, until the request's deadline.
    return _error(error.status_code, str(error.detail), error.headers)


async def _explain_body(request: Request, error: RequestValidationError) -> Response:
    await _wait_for_turn(request)
    found = error.errors()
    problems = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}"[:300] for item in found[:_MAX_ERRORS])
    problems += f"; and {len(found) - _MAX_ERRORS} more" if len(found) > _MAX_ERRORS else ""
    if _may_log("malformed request", request):
        log.warning("malformed request", path=request.url.path, problems=problems)
    return _error(422, f"malformed request: {problems}")


def _may_log(event: str, request: Request) -> bool:
    """Whether an event is logged now, of a request with the credential of a job or of one without."""
    services: Services = request.app.state.services
    if slug := request.path_params.get("slug", ""):
        return services.may_log(event, slug)
    return may_log_of_address(event, request)


async def _wait_for_turn(request: Request) -> None:
    with suppress(HTTPException):  # the client has gone
        await take_turn(request)


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    # What was sent may hold half a surrogate pair, which is no UTF-8.
    return JSONResponse({"error": text.encode(errors="backslashreplace").decode()}, status, headers)
