"""Authentication of requests by bearer credentials, before their bodies are read: one for each job, one for submission.

Each router has a class of routes that says who may call them. Requests without a valid credential count towards the
rate limit of their address, and wait for a turn of that address; those with one do not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any, ClassVar

import structlog
from fastapi import Depends, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message

from dl2d.core.jobs import Job, JobKey
from dl2d.daemon.api.connection_limits import Connection, client_gone, client_group, is_loopback
from dl2d.daemon.api.heartbeat import stop_answer
from dl2d.daemon.api.request_limits import (
    ADDRESS_LOG_SECONDS,
    BYTES_PER_HEARTBEAT,
    COST_PER_REQUEST,
    MAX_BODY_BYTES,
    MAX_PARSING_COST,
    MAX_PUBLIC_BODY_BYTES,
    MAX_PUBLIC_PARSING_COST,
    MAX_REPORT_BYTES,
    MAX_WAITING_HEARTBEATS,
    parsing_cost,
    too_many,
)
from dl2d.daemon.api.route_dependencies import Services

log = structlog.get_logger()

TOO_MANY_HEARTBEATS = "heartbeats of this job, or too large ones"
#: Characters of a name that a client without a credential chooses, in the log.
_MAX_LOGGED = 100


async def services_of(request: Request) -> Services:
    """The services of the application that serves a request."""
    return _services(request)


class PublicRoute(APIRoute):
    """Route for everybody, within the rate limit. A registration proves in its body whose job it is."""

    max_body: ClassVar[int] = MAX_PUBLIC_BODY_BYTES
    max_parsing_cost: ClassVar[int] = MAX_PUBLIC_PARSING_COST

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See ``APIRoute``: what answers a request, once it is admitted."""
        handle = super().get_route_handler()

        async def admitted(request: Request) -> Response:
            connection_of(request).authenticated = shown = self.authenticate(request)
            if not shown:
                await take_turn(request)
            self.admit(request)
            return await self.serve(Request(request.scope, _limited(request, self.max_body)), handle)

        return admitted

    def authenticate(self, request: Request) -> bool:
        """Whether a request shows the credential of this route; False on a route that needs no credential."""
        del request
        return False

    def admit(self, request: Request) -> None:
        """Check a request by its head, before its body is read; raises HTTPException."""
        _take_rate(request)

    async def serve(self, request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
        """Answer an admitted request."""
        cost = await self.receive_body(request)
        if not connection_of(request).authenticated:
            _take_rate(request, cost // COST_PER_REQUEST, taken=1.0)
        return await handle(request)

    async def receive_body(self, request: Request) -> int:
        """Receive the body whole and return what it costs to parse; raises HTTPException where that is too much."""
        try:
            cost = parsing_cost(await request.body())
        except ClientDisconnect:
            raise client_gone() from None
        if cost > self.max_parsing_cost:
            raise HTTPException(
                413,
                f"the body of this request may have at most {self.max_parsing_cost} opening brackets, with 5 commas "
                "counted as one and those within strings left out; pass long lists to a command in a file",
            )
        return cost


class JobRoute(PublicRoute):
    """Route under a job's path, for the coordinator of that job."""

    max_body = MAX_BODY_BYTES
    max_parsing_cost = MAX_PARSING_COST

    def authenticate(self, request: Request) -> bool:
        """Whether it shows the credential of the job in its path."""
        with suppress(ValueError):
            key = JobKey.from_slug(request.path_params["slug"])
            return _services(request).credentials.is_for_job(key, credential_in(request, "bearer"))
        return False

    def admit(self, request: Request) -> None:
        """Refuse a request without that credential."""
        if connection_of(request).authenticated:
            return
        _take_rate(request)
        slug = request.path_params["slug"]
        try:
            JobKey.from_slug(slug)
        except ValueError:
            raise HTTPException(404, f"{slug!r} is not the name of a job") from None
        if may_log_of_address("wrong credential", request):
            log.warning("wrong credential", job=slug[:_MAX_LOGGED])
        raise HTTPException(403, f"this is not the credential of job {slug}")


class HeartbeatRoute(JobRoute):
    """Route for heartbeats. Their rate is limited for each job, since the job's user can read its credential.

    Of jobs that have ended it is limited for each user: an array of short jobs leaves its user hundreds of credentials.
    """

    def admit(self, request: Request) -> None:
        """Refuse a request without the job's credential, and one too many."""
        super().admit(request)
        slug, services = request.path_params["slug"], _services(request)
        uid, has_ended = services.owners.of(slug)
        if has_ended:
            allowed = services.rate.take(f"ended/{uid}", self._tokens(request))
        else:
            allowed = services.heartbeat_rate.take(slug, self._tokens(request))
        if not allowed:
            raise too_many(TOO_MANY_HEARTBEATS)

    async def serve(self, request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
        """Answer an admitted request in a turn of its job and then of its user, once it has arrived whole."""
        slug, services = request.path_params["slug"], _services(request)
        if services.owners.of(slug)[1]:
            await _drop_body(request)
            return JSONResponse(stop_answer(services.heartbeat_seconds()))
        cost = await self.receive_body(request)
        turns = services.heartbeat_turns
        # Those that wait keep their connections, of which their address has so many.
        too_many_wait = turns.waiting(slug) >= MAX_WAITING_HEARTBEATS
        tokens, taken = cost // COST_PER_REQUEST, self._tokens(request)
        if too_many_wait or not services.heartbeat_rate.take(slug, tokens, taken=taken):
            raise too_many(TOO_MANY_HEARTBEATS)
        uid, _ = services.owners.of(slug)
        user = f"job {slug}" if uid is None else f"user {uid}"  # the first heartbeat of a job tells whose it is
        connection = connection_of(request)
        async with turns.turn(slug, connection), services.heartbeat_user_turns.turn(user, connection):
            return await handle(request)

    def _tokens(self, request: Request) -> int:
        """As how many a heartbeat counts by its length: a large one takes long to read."""
        # One in chunks declares no length, and so counts as the largest.
        chunked = "content-length" not in request.headers
        size = self.max_body if chunked else _declared_length(request, self.max_body)
        return 1 + size // BYTES_PER_HEARTBEAT


class ContainerRoute(JobRoute):
    """The same for reports of a job's containers, which are small."""

    max_body = MAX_REPORT_BYTES


class SubmissionRoute(PublicRoute):
    """Route for the command line of the daemon's account."""

    max_body = MAX_BODY_BYTES
    max_parsing_cost = MAX_PARSING_COST

    def authenticate(self, request: Request) -> bool:
        """Whether it shows the submission credential."""
        return shows_submission_credential(request)

    def admit(self, request: Request) -> None:
        """Refuse a request without that credential."""
        if not connection_of(request).authenticated:
            _take_rate(request)
            if may_log_of_address("wrong submission credential", request):
                log.warning("wrong submission credential")
            raise HTTPException(
                403,
                "this is not the credential of the daemon's account: run dl2d as that account, with the configuration "
                "of this daemon",
            )


#: The services, as a parameter of a route.
OwnServices = Annotated[Services, Depends(services_of)]


def job_of_path(slug: str, services: OwnServices) -> Job:
    """The job of a path, of a request that has shown that job's credential."""
    job = services.store.job(JobKey.from_slug(slug))
    if job is None:
        raise HTTPException(404, f"this daemon has no job {slug}")
    return job


def refuse_clear_text(request: Request) -> None:
    """Refuse a request with a credential of a user that has crossed a network unencrypted; raises HTTPException."""
    if request.url.scheme != "https" and not is_loopback(request.client.host if request.client else ""):
        raise HTTPException(
            403,
            "a job registers over https only, and users ask over https only: set api.certificate, and api.advertise or "
            "DL2_DAEMON to an https URL",
        )


async def take_turn(request: Request) -> None:
    """Let a request without a valid credential, or one that is refused, wait for its turn; each waits once.

    Otherwise clients that are refused at once and repeat their requests would take all the time of the event loop.
    Raises HTTPException where the client has closed the connection meanwhile.
    """
    if not getattr(request.state, "had_turn", False):
        request.state.had_turn = True
        connection, services = connection_of(request), _services(request)
        turns, client = services.public_turns, address_of(request)
        if connection.authenticated:
            turns, client = services.refusal_turns, request.path_params.get("slug", "")
        connection.authenticated = False  # it is refused: a connection that waits for that may be closed
        async with turns.turn(client, connection):
            pass


def connection_of(request: Request) -> Connection:
    """The connection on which a request has come."""
    connection: Connection = request.state.connection
    return connection


def address_of(request: Request) -> str:
    """What counts as the address from which a request comes."""
    return client_group(request.client.host if request.client else "")


def may_log_of_address(event: str, request: Request) -> bool:
    """Whether an event that a client without a credential can cause is logged now."""
    return _services(request).may_log(event, address_of(request), ADDRESS_LOG_SECONDS)


def _take_rate(request: Request, tokens: float = 1.0, *, taken: float = 0.0) -> None:
    """Count a request without a credential; refuse it where its address has sent too many."""
    if not _services(request).rate.take(address_of(request), tokens, taken=taken):
        raise too_many("requests without a valid credential from this address")


def _declared_length(request: Request, limit: int) -> int:
    """The declared length of a request's body, 0 if none is declared; refuses a body that is too large."""
    declared = request.headers.get("content-length", "0")
    # A number with more digits than the limit is not parsed.
    if not declared.isdecimal() or len(declared) > len(str(limit)) or int(declared) > limit:
        raise _too_large(limit)
    return int(declared)


async def _drop_body(request: Request) -> None:
    """Receive a body and drop it: a client that sends one until its connection ends does not read the answer."""
    try:
        async for _ in request.stream():
            pass
    except ClientDisconnect:
        raise client_gone() from None


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body of this request may have at most {limit} bytes")


def _limited(request: Request, limit: int) -> Callable[[], Awaitable[Message]]:
    """A function that receives the body of a request, with or without a declared length, and refuses one too large."""
    _declared_length(request, limit)
    too_large = _too_large(limit)
    receive, received = request.receive, 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise too_large
        return message

    return limited


def shows_submission_credential(request: Request) -> bool:
    """Whether a request comes from the daemon's account."""
    return _services(request).credentials.is_for_submission(credential_in(request, "bearer"))


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def credential_in(request: Request, scheme: str) -> str:
    """The credential of some scheme that a request shows; empty if it shows none."""
    kind, _, shown = request.headers.get("authorization", "").partition(" ")
    return shown.strip() if kind.lower() == scheme else ""
