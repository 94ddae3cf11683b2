"""The demo: whole, and interrupted. It leaves nothing running and nothing in the temporary folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli.conftest import Dl2d

from dl2d.cli.demo.demo_jobs import FAST, FULL
from dl2d.core.job_request_parser import RequestRules, parse_request

PNG = b"\x89PNG\r\n\x1a\n"
_MARK = "DEMO_TEST_MARK"


def test_the_jobs_are_requests_that_the_daemon_takes():
    for job in (*FULL.jobs, *FAST.jobs):
        request = parse_request(job.request(), rules=RequestRules(frozenset({f"digits-{job.model}"})))
        assert request.epochs == job.epochs


class Demo:
    """``dl2d demo`` as a process; all it starts carries a mark in its environment."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.out = folder / "out"
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dl2d.cli", "demo", "--fast", "--out", str(self.out), *options],
            env={**os.environ, "TMPDIR": str(self.temporary), _MARK: self.mark, "DL2_ENV": _MARK},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )

    def running(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.mark and process.pid != self.process.pid:
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
            except (psutil.Error, OSError):
                continue
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=60)


@pytest.fixture
def demos(tmp_path: Path) -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.end()


def start(demos: list[Demo], folder: Path, *options: str) -> Demo:
    demos.append(Demo(folder, *options))
    return demos[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jobs_are_resized_and_their_weights_are_those_of_static_runs(demos: list[Demo], tmp_path: Path):
    demo = start(demos, tmp_path, "--json")
    out, err = demo.process.communicate(timeout=500)
    assert demo.process.returncode == 0, err
    facts: dict[str, Any] = json.loads(out)
    assert facts["policy"] == "dl2"
    assert facts["left_running"] == 0
    assert [job["state"] for job in facts["jobs"]] == ["finished"] * 3
    for job, played in zip(facts["jobs"], FAST.jobs, strict=True):
        assert job["weights_equal_static_run"]
        assert re.fullmatch(r"[0-9a-f]{64}", job["digest"])
        assert job["digest"] == job["static_digest"]
        assert job["updates"] == 24 * played.epochs
    assert len({job["digest"] for job in facts["jobs"]}) == 3
    assert any(len(job["plans"]) > 1 for job in facts["jobs"])
    assert demo.running() == []
    assert list(demo.temporary.iterdir()) == []
    assert (demo.out / "timeline.png").read_bytes().startswith(PNG)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_an_interrupted_demo_leaves_nothing(demos: list[Demo], tmp_path: Path, number: signal.Signals):
    demo = start(demos, tmp_path)
    deadline = time.monotonic() + 90
    while not any("train_digits" in line for line in demo.running()):
        assert demo.process.poll() is None, demo.process.communicate()
        assert time.monotonic() < deadline, "no training process was started"
        time.sleep(0.1)
    demo.process.send_signal(number)
    _, err = demo.process.communicate(timeout=90)
    assert demo.process.returncode == 1
    assert "interrupted; nothing is left running" in err
    assert demo.running() == []
    assert list(demo.temporary.iterdir()) == []


def test_a_folder_that_cannot_be_written(dl2d: Dl2d, tmp_path: Path):
    (tmp_path / "file").touch()
    ran = dl2d("demo", "--out", tmp_path / "file" / "x")
    assert ran.status == 1
    assert "--out" in ran.err
    assert "Traceback" not in ran.err
