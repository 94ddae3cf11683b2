"""The learner beside the daemon: whatever becomes of it, it is recorded, and no tick hears of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from local_cluster import LocalCluster
from structlog.testing import capture_logs

from dl2d.config.settings import Settings
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.policy_registry import SITE_SCHEDULER, LearningRun, RunState, Trial, TrialCase, VersionState
from dl2d.daemon.loop import Daemon
from dl2d.daemon.policy_versions.active_version import keep_version, version_in
from dl2d.daemon.policy_versions.candidate_files import Candidate, read_candidate, write_candidate
from dl2d.daemon.policy_versions.learner_supervisor import Learner, schedule_learning
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.store import schema_version
from dl2d.store.sql_store import SqlStore


@pytest.fixture
def store() -> Iterator[SqlStore]:
    with closing(SqlStore("sqlite://")) as store:
        yield store


def until(true: Callable[[], object], what: str, *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def learner(store: SqlStore, code: str, mode: Mode = Mode.LIVE) -> Learner:
    return Learner(store.registry, (sys.executable, "-c", code), clock=lambda: 7.0, mode=lambda: mode)


def ran(store: SqlStore, code: str, *, limit: float = 60.0, mode: Mode = Mode.LIVE) -> LearningRun:
    one = learner(store, code, mode)
    one.start("dl2", limit)
    until(lambda: ended(store), "the learner ends")
    one.close()
    return store.registry.runs()[0]


def ended(store: SqlStore) -> bool:
    return bool(store.registry.runs()) and store.registry.runs()[0].state is not RunState.RUNNING


HANGS = "import time\nprint('hangs', flush=True)\nwhile True: time.sleep(1)"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HANGS


def candidate(folder: Path, store: SqlStore, *, passed: bool = True, current: str = "") -> Path:
    """As a real learner leaves it: a checkpoint among the versions, and how it did."""
    base = with_checkpoint().checkpoint
    scorer = np.asarray(base.weights["scorer"]) + 1
    made = Checkpoint(policy="dl2", weights={**base.weights, "scorer": scorer}, settings=base.settings, training={})
    version = replace(version_in(folder, made, at=3.0, origin="a test"), parent=base.digest, jobs=5)
    trial = Trial(
        at=4.0, policy="dl2", candidate=version.digest, current=current or base.digest, days=("2026-01-01",),
        cases=(TrialCase("a", 1.0, 2.0),), change=-0.5, low=-0.6, high=-0.4, passed=passed, reason="so it went",
    )  # fmt: skip
    begin = keep_version(base, folder, store.registry, at=1.0, origin="it began")
    store.registry.change("dl2", begin.digest, VersionState.LIVE, at=1.0, by="ann", reason="it began")
    return write_candidate(Candidate(version, trial))


def names(folder: Path) -> str:
    """A learner that trained, and names its candidate."""
    return f"import json\nprint('trains')\nprint(json.dumps({{'candidate': {str(folder)!r}}}))"


def test_its_candidate_is_entered_and_all_that_it_says_is_logged(store: SqlStore, tmp_path: Path) -> None:
    folder = candidate(tmp_path, store)
    with capture_logs() as logs:
        run = ran(store, names(folder))
    live = store.registry.live("dl2")
    assert live is not None
    assert (live.folder, live.jobs, live.origin) == (str(folder), 5, "a test")
    assert run.note == f"version {live.digest[:12]} passed: so it went"
    assert (run.state, run.policy, run.started_at) == (RunState.FINISHED, "dl2", 7.0)
    (trial,) = store.registry.trials()
    assert (trial.candidate, trial.passed) == (live.digest, True)
    change = store.registry.changes()[0]
    assert (change.by, change.at, change.reason) == ("gate", 7.0, "so it went")
    assert next(entry["said"] for entry in logs if entry["event"] == "learner") == "trains"
    assert [entry["event"] for entry in logs if entry["event"] != "learner"] == [
        "learner started", "candidate", "learner ended"
    ]  # fmt: skip


def test_a_candidate_that_failed_is_rejected(store: SqlStore, tmp_path: Path) -> None:
    run = ran(store, names(candidate(tmp_path, store, passed=False)))
    assert "failed: so it went" in run.note
    assert [version.state for version in store.registry.versions()] == [VersionState.REJECTED, VersionState.LIVE]


def test_a_candidate_that_beat_what_does_not_decide_any_more_is_rejected(store: SqlStore, tmp_path: Path) -> None:
    run = ran(store, names(candidate(tmp_path, store, current="f" * 64)))
    assert "failed: another version went live meanwhile; so it went" in run.note
    assert [version.state for version in store.registry.versions()] == [VersionState.REJECTED, VersionState.LIVE]
    assert not store.registry.trials()[0].passed


@pytest.mark.parametrize("mode", Mode)
def test_one_that_was_compared_with_the_sites_scheduler_goes_live_only_while_that_decides(
    store: SqlStore, tmp_path: Path, mode: Mode
) -> None:
    """The mode may have been changed after the learner began."""
    run = ran(store, names(candidate(tmp_path, store, current=SITE_SCHEDULER)), mode=mode)
    live = store.registry.live("dl2")
    assert live is not None
    assert live.origin == ("it began" if mode.acts else "a test")
    assert (f"failed: compared with the site's scheduler, but the mode is {mode} by now" in run.note) == mode.acts


def test_a_live_version_that_did_worse_than_the_fallback_is_rolled_back(store: SqlStore, tmp_path: Path) -> None:
    """A row and a line of the log say so, whatever became of the candidate."""
    folder = candidate(tmp_path, store, passed=False)
    (live,) = (version for version in store.registry.versions() if version.state is VersionState.LIVE)
    made = with_checkpoint().checkpoint
    newer = replace(made, weights={**made.weights, "scorer": np.asarray(made.weights["scorer"]) + 2})
    version = keep_version(newer, tmp_path, store.registry, at=2.0, origin="a test")
    store.registry.change("dl2", version.digest, VersionState.LIVE, at=2.0, by="ann", reason="test")
    found = read_candidate(folder)
    review = replace(found.trial, candidate="drf", current=version.digest, passed=True, reason="drf is surely better")
    write_candidate(replace(found, review=review))
    with capture_logs() as logs:
        run = ran(store, names(folder))
    done = f"version {version.digest[:12]} withdrawn, {live.digest[:12]} is live again: drf is surely better"
    assert run.note.endswith(f"; {done}")
    assert [entry["done"] for entry in logs if entry["log_level"] == "error"] == [done]
    change = store.registry.changes("dl2")[0]
    assert (change.digest, change.by, change.rollback) == (live.digest, "gate", True)
    assert store.registry.trials("dl2")[0] == review


def test_a_candidate_that_is_none_is_a_failure(store: SqlStore, tmp_path: Path) -> None:
    folder = candidate(tmp_path, store)
    for spoil, words in (
        (lambda: None, "named no candidate: so long"),
        (lambda: (folder / "candidate.json").write_text("{}"), "does not describe a candidate"),
        ((folder / "candidate.json").unlink, "cannot be read: No such file"),
    ):
        spoil()
        run = ran(store, "print('so long')" if "so long" in words else names(folder))
        assert run.state is RunState.FAILED
        assert words in run.note
    candidate(tmp_path, store)
    (folder / "weights.safetensors").write_bytes(b"x")
    assert "is damaged" in ran(store, names(folder)).note
    assert [version.state for version in store.registry.versions()] == [VersionState.LIVE]


def test_one_that_raises_is_a_failure_with_its_words(store: SqlStore) -> None:
    run = ran(store, "raise RuntimeError('no such luck')")
    assert run.state is RunState.FAILED
    assert run.note.startswith("ended with status 1: ")
    assert "RuntimeError: no such luck" in run.note


def test_one_that_is_killed_is_a_failure_with_the_signal(store: SqlStore) -> None:
    one = learner(store, HANGS)
    one.start("dl2", 60.0)
    until(lambda: one.pid is not None, "it runs")
    assert one.pid is not None
    os.kill(one.pid, signal.SIGKILL)
    until(lambda: ended(store), "that is noticed")
    run = store.registry.runs()[0]
    assert run.state is RunState.FAILED
    assert run.note.startswith("was ended by signal 9 (SIGKILL)")
    one.start("dl2", 60.0)  # the next one is started all the same
    until(lambda: one.pid is not None, "another runs")
    one.close()
    assert one.pid is None


@pytest.mark.parametrize("code", [HANGS, STUBBORN])
def test_one_that_hangs_is_ended_after_its_time(store: SqlStore, code: str) -> None:
    run = ran(store, code, limit=1.5)
    assert run.state is RunState.STOPPED
    assert run.note == "it took more than 0.025 minutes; its last output: hangs"


def test_closing_ends_it_and_no_other_is_started(store: SqlStore) -> None:
    one = learner(store, HANGS)
    one.start("dl2", 60.0)
    until(lambda: one.pid is not None, "it runs")
    one.stop("a test")
    assert one.pid is None
    one.start("dl2", 60.0)
    until(lambda: one.pid is not None, "the next one runs")
    with capture_logs() as logs:
        one.start("dl2", 60.0)  # while one runs
        one.close()
        one.start("dl2", 60.0)
    last, first = store.registry.runs()
    assert (first.state, first.note.partition(";")[0]) == (RunState.STOPPED, "a test")
    assert (last.state, last.note.partition(";")[0]) == (RunState.STOPPED, "the daemon ended")
    assert sum(entry["event"].startswith("no learner is started") for entry in logs) == 2


def test_one_that_floods_its_output_is_listened_to_in_measure(store: SqlStore) -> None:
    with capture_logs() as logs:
        run = ran(store, "import sys\nfor i in range(50_000): print('x' * 50)\nsys.stdout.write('y' * 100_000)")
    assert run.state is RunState.FAILED
    assert len(run.note) <= 4200
    assert len([entry for entry in logs if entry["event"] == "learner"]) == 1000


def test_one_that_cannot_be_started_is_recorded(store: SqlStore) -> None:
    one = Learner(store.registry, ("/no/such/program",), clock=lambda: 7.0, mode=lambda: Mode.LIVE)
    one.start("dl2", 60.0)
    (run,) = store.registry.runs()
    assert run.state is RunState.FAILED
    assert run.note.startswith("cannot be started: ")
    one.close()


def test_a_store_that_is_away_starts_none_and_raises_nothing(store: SqlStore) -> None:
    one = learner(store, HANGS)
    store.close()
    one.start("dl2", 60.0)
    assert one.pid is None
    one.close()


# The learner's own side


def own_side(code: str, memory_mib: int = 4096) -> subprocess.CompletedProcess[str]:
    start = f"from dl2d.cli.policy_trials.learner_process import stand_back\nstand_back({memory_mib})\n"
    return subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, check=False, timeout=120
    )


def test_it_stands_back() -> None:
    said = own_side(
        "import os\nprint(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE)\n"
        "print(open('/proc/self/oom_score_adj').read().strip())"
    )
    assert said.stdout.split() == ["19", "True", "1000"], said.stderr


@pytest.mark.slow
def test_it_cannot_take_all_memory() -> None:
    said = own_side("held = []\nwhile True: held.append(bytearray(64 << 20))", memory_mib=600)
    assert said.returncode == 1
    assert "MemoryError" in said.stderr


def test_it_ends_with_the_daemon_however_that_ends(tmp_path: Path) -> None:
    """Its standard input is a pipe that only the daemon holds."""
    code = (
        "import threading, time\nfrom dl2d.cli.policy_trials.learner_process import _end_with_the_daemon as watch\n"
        "threading.Thread(target=watch, daemon=True).start()\nprint('runs', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"runs\n"
        process.stdin.close()
        assert process.wait(timeout=30) == 3


def test_without_history_it_says_so(tmp_path: Path) -> None:
    config = tmp_path / "dl2d.yaml"
    config.write_text(f"state_dir: {tmp_path}\npolicy: {{name: dl2}}\n")
    schema_version.upgrade(f"sqlite:///{tmp_path}/dl2d.sqlite")
    with subprocess.Popen(
        [sys.executable, "-m", "dl2d.cli.policy_trials.learner_process", str(config)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert process.wait(timeout=60) == 1
    assert "dl2d: the twin: jobs with measured speeds were submitted on 0 of the recorded days" in said
    assert "Traceback" not in said


# In the daemon


class Running:
    """A daemon in a thread of its own, with a learner of a test's own, started every few moments."""

    def __init__(
        self, folder: Path, code: str, *, limit_minutes: float = 1.0, seconds: float = 0.3,
        store: SqlStore | None = None,
    ) -> None:  # fmt: skip
        settings = Settings.model_validate(
            {
                "state_dir": folder / "state",
                "api": {"port": 0},
                "schedule": {"poll_seconds": 0.2, "slot_seconds": 0.2},
                "policy": {"name": "dl2"},
                "resource_manager": {"name": "local", "local": {"cluster": "here"}},
                "learning": {
                    "enabled": True, "every_hours": seconds / 3600, "minutes": limit_minutes / 2,
                    "limit_minutes": limit_minutes,
                },
            }
        )  # fmt: skip
        self.store = SqlStore("sqlite://") if store is None else store
        self.daemon = Daemon(settings, self.store, learner=(sys.executable, "-c", code))
        self._thread = threading.Thread(target=self.daemon.run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.stop()
        self._thread.join(timeout=60)
        self.daemon.__exit__(None, None, None)
        assert not self._thread.is_alive()

    def runs(self, state: RunState) -> list[LearningRun]:
        return [run for run in self.store.registry.runs() if run.state is state]


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("raise SystemExit('no')", RunState.FAILED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", RunState.FAILED),
        ("print('done')", RunState.FAILED),
    ],
)
def test_ticks_go_on_whatever_becomes_of_it(tmp_path: Path, code: str, state: RunState) -> None:
    with Running(tmp_path, code) as running:
        until(lambda: len(running.runs(state)) >= 2, "it was started twice and ended so")
        slot = running.store.last_slot_number()
        until(lambda: running.store.last_slot_number() > slot + 1, "ticks go on")


def test_ticks_go_on_while_it_hangs_and_a_shutdown_ends_it(tmp_path: Path) -> None:
    with Running(tmp_path, STUBBORN) as running:
        until(lambda: running.daemon._learner.pid is not None, "it runs")
        pid = running.daemon._learner.pid
        assert pid is not None
        slot = running.store.last_slot_number()
        until(lambda: running.store.last_slot_number() > slot + 1, "ticks go on")
        running.daemon.stop()
        running._thread.join(timeout=60)
        (run,) = running.store.registry.runs()
        assert (run.state, run.note.partition(";")[0]) == (RunState.STOPPED, "the daemon ended")
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_whose_daemon_was_killed_is_lost_from_the_next_start_on(tmp_path: Path) -> None:
    """Not only when the next learner begins, which may be a day later."""
    store = SqlStore("sqlite://")
    store.registry.begin_run("dl2", 1.0)
    with Running(tmp_path, HANGS, seconds=3600, store=store):
        (run,) = store.registry.runs()
    assert (run.state, run.note) == (RunState.LOST, "the daemon ended while it ran")
    assert run.ended_at is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_daemon_that_is_killed_takes_its_learner_along(tmp_path: Path) -> None:
    """The real one: it waits for the processor, or for its history, when the daemon dies."""
    learning: dict[str, Any] = {"enabled": True, "every_hours": 0.5 / 3600}
    with LocalCluster(tmp_path, {"policy": {"name": "dl2"}, "learning": learning}) as cluster:
        assert cluster.process is not None
        cluster.wait_until(
            lambda: any(run.state is RunState.FAILED for run in cluster.store.registry.runs()), "it found no history",
            timeout=240,
        )  # fmt: skip
        run = next(run for run in cluster.store.registry.runs() if run.state is RunState.FAILED)
        assert "submitted on 0 of the recorded days" in run.note
        daemon = psutil.Process(cluster.process.pid)
        mine: list[psutil.Process] = []

        def started() -> bool:
            mine[:] = [one for one in daemon.children() if "dl2d.cli.policy_trials.learner_process" in one.cmdline()]
            return bool(mine)

        cluster.wait_until(started, "another learner runs", every=0.02)
        cluster.kill()
        psutil.wait_procs(mine, timeout=60)
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in mine)


def test_when_it_learns(tmp_path: Path) -> None:
    """So long after the last time, or at a time of the day; not in the first minute, not when it is switched off."""
    now = 1_000_000.0
    store = SqlStore("sqlite://")
    scheduler = BackgroundScheduler(timezone="UTC")
    with (
        closing(store),
        closing(Learner(store.registry, ("true",), clock=lambda: now, mode=lambda: Mode.LIVE)) as learner,
    ):

        def schedule(**learning: object) -> None:
            settings = {"state_dir": tmp_path, "policy": {"name": "dl2"}, "learning": {"enabled": True} | learning}
            schedule_learning(scheduler, Settings.model_validate(settings), learner, now)

        def next_time() -> float:
            schedule(every_hours=1.0)
            (job,) = scheduler.get_jobs()
            return float(job.next_run_time.timestamp())

        assert next_time() == now + 3600.0
        store.registry.begin_run("dl2", now - 600.0)
        assert next_time() == now + 3000.0
        store.registry.begin_run("dl2", now - 10_000.0)
        assert next_time() == now + 60.0
        schedule(at="02:30")
        (job,) = scheduler.get_jobs()
        moment = job.trigger.get_next_fire_time(None, datetime(2026, 7, 1, 12, tzinfo=UTC))
        assert moment.astimezone(moment.tzinfo).strftime("%H:%M") == "02:30"
        schedule(enabled=False)
        assert scheduler.get_jobs() == []
