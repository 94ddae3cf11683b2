"""The daemon's JSON Web Token: who waits for scontrol, and what holds while there is no new one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
from slurm_fakes import Clock

from dl2d.core.errors import Unavailable
from dl2d_slurm.commands.commands import Answer, Commands
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.submission.json_web_token import JsonWebToken

HOUR = 3600.0


class Scontrol(Commands):
    """A scontrol that answers when the test says so."""

    def __init__(self, clock: Clock) -> None:
        super().__init__({}, 1.0, RpcRate(1000, clock.timer))
        self.asked = threading.Semaphore(0)
        self.answers: SimpleQueue[Answer] = SimpleQueue()

    def run(self, *argv: str, **more: object) -> Answer:
        assert argv[:2] == ("scontrol", "token")
        self.asked.release()
        return self.answers.get(timeout=60)

    def make(self, token: str) -> None:
        self.answers.put(Answer(0, f"SLURM_JWT={token}\n", ""))

    def fail(self, said: str = "scontrol: error: Unable to contact slurm controller") -> None:
        self.answers.put(Answer(1, "", said))


@pytest.fixture
def scontrol(clock: Clock) -> Scontrol:
    return Scontrol(clock)


@pytest.fixture
def token(scontrol: Scontrol, clock: Clock) -> JsonWebToken:
    return JsonWebToken(scontrol, clock.timer)


@pytest.fixture
def thread() -> Iterator[Callable[..., object]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def test_while_one_thread_renews_the_token_the_others_use_the_old_one(
    scontrol: Scontrol, token: JsonWebToken, clock: Clock, thread
) -> None:
    scontrol.make("a")
    assert token.get() == "a"
    clock.now += HOUR / 2
    renewing = thread(token.get)
    for _ in range(2):
        assert scontrol.asked.acquire(timeout=60)
    assert [token.get() for _ in range(3)] == ["a", "a", "a"]
    scontrol.make("b")
    assert renewing.result() == "b"
    assert token.get() == "b"


def test_without_a_token_all_wait_for_the_one_that_is_made(scontrol: Scontrol, token: JsonWebToken, thread) -> None:
    waiting = [thread(token.get) for _ in range(5)]
    assert scontrol.asked.acquire(timeout=60)
    scontrol.make("a")
    assert [each.result() for each in waiting] == ["a"] * 5
    assert not scontrol.asked.acquire(blocking=False)


def test_all_who_wait_are_told_of_a_failure_and_scontrol_is_not_asked_by_each(
    scontrol: Scontrol, token: JsonWebToken, clock: Clock, thread
) -> None:
    waiting = [thread(token.get) for _ in range(5)]
    assert scontrol.asked.acquire(timeout=60)
    scontrol.fail()
    for each in waiting:
        with pytest.raises(Unavailable, match=r"Unable to contact slurm controller: scontrol is asked again in 10 s"):
            each.result()
    assert not scontrol.asked.acquire(blocking=False)
    clock.now += 10
    scontrol.make("a")
    assert token.get() == "a"


def test_the_old_token_serves_until_shortly_before_its_end(
    scontrol: Scontrol, token: JsonWebToken, clock: Clock
) -> None:
    scontrol.make("a")
    token.get()
    for passed in (HOUR / 2, HOUR / 4):
        clock.now += passed
        scontrol.fail()
        assert token.get() == token.get() == "a"
    clock.now += HOUR / 4 - 60
    scontrol.fail()
    with pytest.raises(Unavailable):
        token.get()


def test_a_refused_token_is_replaced_but_not_by_each_call(
    scontrol: Scontrol, token: JsonWebToken, clock: Clock
) -> None:
    scontrol.make("a")
    token.refused(token.get())
    assert token.get() == "a"
    clock.now += 10
    scontrol.make("b")
    assert token.get() == "b"
    token.refused("a")  # of a call that took long
    clock.now += 10
    assert token.get() == "b"


@pytest.mark.parametrize("printed", ["", "SLURM_JWT=", "SLURM_JWT=a b", "SLURM_JWT=ä", "TOKEN=a"])
def test_what_is_no_token_is_not_sent(scontrol: Scontrol, token: JsonWebToken, printed: str) -> None:
    scontrol.answers.put(Answer(0, printed, ""))
    with pytest.raises(Unavailable, match="scontrol makes no token for slurmrestd"):
        token.get()
