"""Whole ticks on a ResourceManager whose answers are broken: none fails unexpectedly, and none sends a resize."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import httpx2
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tick.fake_coordinator import PromptCoordinator
from tick.world import World
from yarn.fake_yarn import FakeYarn
from yarn.rm_answers import app, lists, node
from yarn.spoiled_answers import spoiled

from dl2d.core.errors import ResourceManagerError
from dl2d.core.resource_manager import RmIdentity, TaskSpec
from dl2d_yarn.manager import YarnManager

Answer = Callable[[httpx2.Request], httpx2.Response]
APPS, NODES = "/ws/v1/cluster/apps", "/ws/v1/cluster/nodes"
HTML = b"<html><body>HTTP ERROR 500 java.lang.NullPointerException</body></html>"
GOOD = {path: json.dumps(answer).encode() for path, answer in lists([app(1), app(2)], [node(1), node(2)]).items()}


class NotingManager(YarnManager):
    """Manager that records the starts and stops that ticks request."""

    asked: tuple[str, ...] = ()

    def submit(self, task: TaskSpec) -> str:
        self.asked += (f"start {task.name}",)
        return super().submit(task)

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        self.asked += tuple(f"stop {job.handle}" for job in jobs)
        super().stop(jobs, grace)

    def live(self) -> list[Any]:
        """What the job's coordinator sees: no task runs yet."""
        return []


class WaitingJob:
    """A job whose coordinator has reported: the next tick with a complete listing starts its tasks."""

    def __init__(self) -> None:
        self.yarn, self.world = FakeYarn(nodes=2), World(slot_seconds=1.0, url="")
        self.manager = self.yarn.manager(lambda: self.world.now, kind=NotingManager, cluster="test")
        self.world.manager = self.manager  # type: ignore[assignment]
        key = self.world.submit(max_workers=2, max_ps=1)
        self.world.tick(1.0)
        assert self.manager.asked == ("start anchor",)
        PromptCoordinator(self.world.store, self.manager).beat(key, self.world.now)  # type: ignore[arg-type]
        self.manager.asked = ()

    def close(self) -> None:
        self.manager.close()
        self.world.close()


def body(status: int, content: bytes) -> Answer:
    return lambda _request: httpx2.Response(status, content=content)


def loop(request: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(307, headers={"Location": str(request.url)})


def timeout(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ReadTimeout("the read operation timed out", request=request)


def spoiled_body(path: str) -> st.SearchStrategy[Answer]:
    return spoiled(json.loads(GOOD[path])).map(lambda answer: body(200, json.dumps(answer).encode()))


def cut(path: str) -> st.SearchStrategy[Answer]:
    return st.integers(0, len(GOOD[path]) - 1).map(lambda size: body(200, GOOD[path][:size]))


def broken(path: str) -> st.SearchStrategy[tuple[str, Answer]]:
    pages = st.builds(body, st.sampled_from([200, 400, 404, 500, 502, 503]), st.just(HTML) | st.binary(max_size=30))
    answers = st.one_of(spoiled_body(path), cut(path), pages, st.sampled_from([loop, timeout]))
    return answers.map(lambda answer: (path, answer))


@given(case=st.sampled_from([APPS, NODES]).flatmap(broken))
@example(case=(APPS, loop))
@example(case=(NODES, timeout))
@example(case=(APPS, body(200, HTML)))
@example(case=(NODES, body(200, GOOD[NODES].replace(b"nodeHostName", b"hostName", 1))))
@settings(max_examples=25)
def test_a_broken_answer_fails_the_tick_or_makes_its_listing_incomplete_and_nothing_is_sent(
    case: tuple[str, Answer],
) -> None:
    path, answer = case
    with closing(WaitingJob()) as job:
        job.yarn.instead = lambda request: answer(request) if request.url.path == path else None
        try:
            complete = not job.world.tick(1.0).incomplete
        except ResourceManagerError:
            complete = False
        # What was spoiled may be nothing that counts: then it is an answer like any other.
        if not complete:
            assert job.manager.asked == ()
            job.yarn.instead = lambda _request: None
            job.world.tick(2.0)
            assert "start worker-0" in job.manager.asked
