"""Requests made from the API's own schema, right and wrong ones, by everybody, a job and the daemon's account."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from daemon.api.api_world import ApiWorld
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from dl2d.core.jobs import JobKey

OPERATIONS = (
    "GET /v1/health",
    "GET /metrics",
    "POST /v1/register",
    "POST /v1/authenticate",
    "POST /v1/jobs",
    "DELETE /v1/jobs/{slug}",
    "POST /v1/jobs/{slug}/heartbeat",
    "POST /v1/jobs/{slug}/containers",
    "GET /v1/status",
    "GET /v1/why",
    "GET /v1/history",
    "GET /v1/usage",
)
#: Operations for which nobody here has a credential: it is a user's, and serves once.
OF_USERS = OPERATIONS[-4:]


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[ApiWorld, JobKey, Any]]:
    world = ApiWorld(burst=1e9, beat_burst=1e9)
    job = world.submit()
    schema = schemathesis.openapi.from_dict(world.api.openapi())
    yield world, job, {result.ok().label: result.ok() for result in schema.get_all_operations()}
    world.close()


def test_every_operation_is_tried(shared) -> None:
    assert sorted(shared[2]) == sorted(OPERATIONS)


@pytest.mark.parametrize(
    ("label", "who", "mode"),
    [
        (label, who, mode)
        for label, who, mode in itertools.product(OPERATIONS, ("nobody", "job", "account"), GenerationMode)
        # Only a body can be wrong.
        if label.startswith("POST") or mode is GenerationMode.POSITIVE
    ],
)
def test_no_request_breaks_the_daemon_and_only_its_own_are_heard(shared, label: str, who: str, mode) -> None:
    world, job, operations = shared
    own = {"nobody": "wrong", "job": world.credentials.for_job(job), "account": world.credentials.for_submission()}[who]
    public = label in ("GET /v1/health", "GET /metrics", "POST /v1/register", "POST /v1/authenticate")
    may = label not in OF_USERS and (
        public or who == ("account" if label.endswith((" /v1/jobs", "/{slug}")) else "job")
    )
    before = world.store.jobs(live=False)
    with requests.Session() as session:
        session.trust_env = False

        @settings(max_examples=8 if may else 3, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operations[label].as_strategy(generation_mode=mode))
        def attack(case) -> None:
            if "slug" in case.path_parameters and who == "job":
                case.path_parameters["slug"] = job.slug
            answer = case.call(
                base_url=str(world.client.base_url), session=session, headers={"Authorization": f"Bearer {own}"}
            )
            assert answer.status_code < 500, answer.text
            if not may:
                refused = (400, 401, 405) if label in OF_USERS else (400, 403, 404, 405)
                assert answer.status_code in refused, answer.text
            if answer.status_code >= 400 and answer.request.method != "HEAD":
                assert list(answer.json()) == ["error"]
            assert "Traceback" not in answer.text

        attack()
    if not may or label == "POST /v1/register":
        assert world.store.jobs(live=False) == before
    assert world.client.get("/v1/health").status_code == 200
