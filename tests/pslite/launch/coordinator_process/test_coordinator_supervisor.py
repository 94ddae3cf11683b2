"""How often a coordinator may die: a rate, not a number in the life of a job."""

from __future__ import annotations

import itertools
import os
import signal
from types import SimpleNamespace

import pytest

from pslite.launch.coordinator_process.coordinator_supervisor import LogLocation, Supervisor
from pslite.net.tcp_sockets import listen

DEATHS = 12


@pytest.mark.parametrize(("between", "code"), [(400.0, 0), (60.0, 128 + signal.SIGKILL)])
def test_a_coordinator_that_dies_too_often_in_an_hour_is_not_started_again(tmp_path, between, code):
    lines: list[str] = []
    begun = tmp_path / "begun"
    begun.touch()

    def run():
        begun.write_text(begun.read_text() + "x")
        if len(begun.read_text()) <= DEATHS:
            os.kill(os.getpid(), signal.SIGKILL)
        return SimpleNamespace(state="finished")

    clock = itertools.count(0.0, between)
    supervisor = Supervisor(
        lambda **_: SimpleNamespace(run=run),
        listener=listen("127.0.0.1"),
        location=LogLocation(tmp_path / "state"),
        say=lines.append,
        clock=lambda: next(clock),
    )
    assert supervisor.run() == code
    assert len(begun.read_text()) == (DEATHS + 1 if code == 0 else 10)
    assert (lines[-1] == "the coordinator was killed by SIGKILL, 10 times within 1 h: it is not started again") is (
        code != 0
    )
