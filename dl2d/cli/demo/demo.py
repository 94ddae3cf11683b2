"""``dl2d demo``: the daemon on this machine resizes three real training jobs; their weights are those of static runs.

It uses what a site uses: ``dl2d run`` on the local resource manager, its HTTP API, and its store.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Self

import typer
import yaml

from dl2d.cli.daemon_access.job_api_client import DaemonClient
from dl2d.cli.daemon_access.read_daemon_health import daemon_health
from dl2d.cli.demo.demo_jobs import FAST, FULL, DemoJob, DemoPlan, DemoResult
from dl2d.cli.jobs.status import arrow
from dl2d.cli.jobs.submit import job_environment
from dl2d.cli.optional_packages import require_extra
from dl2d.cli.output import number, print_json, print_tables, table
from dl2d.cli.shared_options import JsonOption, option
from dl2d.config.settings import Settings, load_settings
from dl2d.core.errors import Dl2dError
from dl2d.core.job_views import JobStatus
from dl2d.core.jobs import JobKey
from dl2d.core.resource_manager import RmIdentity
from dl2d.daemon.job_views_from_store import StoreViews
from dl2d.daemon.tick_settings_from_configuration import manager_settings
from dl2d.plugins import load_manager
from dl2d.store.sql_store import SqlStore

_NODES = {"name": "node", "count": 4, "resources": {"cpu": 8, "gpu": 2}}
_START_SECONDS, _STOP_SECONDS, _GRACE_SECONDS, _LOOK_SECONDS = 60.0, 15.0, 3.0, 0.25
#: More than any machine needs; a demo that hangs is ended and says so.
_LIMIT_SECONDS = 900.0
_MAX_ROWS = 100_000
_DIGEST = re.compile(r"\bdigest ([0-9a-f]{64})\b")


class DemoError(Dl2dError):
    """The demo did not come to its end."""


def demo(
    out: Annotated[Path, option("Folder of the picture.", "--out")] = Path("demo-out"),
    fast: Annotated[bool, option("Shorter jobs.", "--fast")] = False,
    keep: Annotated[bool, option("Keep the daemon's folder: database, logs, output.", "--keep")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train three real jobs at once on this machine, resize them meanwhile, and compare with runs that never change."""
    require_extra("demo")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out {out}: {error.strerror}") from error
    from dl2d.cli.demo.demo_timeline import draw_timeline  # noqa: PLC0415 - matplotlib takes a second

    began = time.time()
    try:
        with _signals_as_interrupts(), _Site(FAST if fast else FULL, keep=keep) as site:
            played = site.play(lambda text: typer.echo(f"{time.time() - began:6.1f} s  {text}", err=as_json))
            policy = site.store.slots(limit=1)[0].policy
    except KeyboardInterrupt:
        typer.echo("dl2d: interrupted; nothing is left running", err=True)
        raise typer.Exit(1) from None
    picture = out / "timeline.png"
    summary = _summary(played, policy)
    draw_timeline(played, summary, picture)
    if as_json:
        print_json(
            {"began": began, "policy": policy, "left_running": site.left_running, "picture": str(picture),
             "jobs": [each.as_json() for each in played]}
        )  # fmt: skip
    else:
        print_tables(table(("JOB", "END", ">SECONDS", ">UPDATES", ">RESIZES", "WEIGHTS"), map(_row, played)))
        typer.echo(f"{summary}\npicture: {picture}" + (f"; the daemon's folder: {site.folder}" if keep else ""))
    if site.left_running:
        raise DemoError(f"{site.left_running} tasks still ran after the end of their jobs and were ended now")
    bad = [each.job for each in played if not each.good]
    if bad:
        what = "; ".join(f"{job.request.name} {job.state}: {job.end_reason}" for job in bad)
        raise DemoError(f"{what}; `dl2d demo --keep` keeps the logs of its tasks")


def _row(played: DemoResult) -> tuple[str, ...]:
    job = played.job
    same = "as the static run's" if played.good else f"DIFFERENT from the static run's {played.static_digest[:12]}"
    seconds = (job.ended_at or played.arrived) - played.arrived
    return (
        job.request.name, str(job.state), f"{seconds:.1f}", str(job.progress.version), str(len(played.plans) - 1),
        f"{job.digest[:12]}, {same}",
    )  # fmt: skip


def _summary(played: Sequence[DemoResult], policy: str) -> str:
    """Two lines on the whole."""
    resizes = [plan for each in played for plan in each.plans[1:]]
    middle = statistics.median([plan.suspension_p50_ms for plan in resizes] or [0.0])
    longest = max([plan.suspension_max_ms for plan in resizes], default=0.0)
    good = all(each.good for each in played)
    same = "equal those of static runs bit for bit" if good else "are NOT all those of static runs"
    return (
        f"policy {policy}; {len(resizes)} resizes, which kept workers with a finished gradient waiting for "
        f"{middle:.2f} ms at the median, {longest:.2f} ms at most (they compute while weights move);\n"
        f"final weights {same}"
    )


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and a closed terminal end the demo as Ctrl-C does; while it ends, further signals are ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@dataclass
class _Site:
    """A daemon with a folder of its own. As a context: at its end nothing that it started is left running."""

    script: DemoPlan
    keep: bool
    folder: Path = field(init=False)
    settings: Settings = field(init=False)
    store: SqlStore = field(init=False)
    #: Tasks that still ran when all jobs had ended.
    left_running: int = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="dl2d-demo-"))
            if not self.keep:
                stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.settings = _configuration(self.folder, self.script)
            stack.callback(self._end_tasks)
            self._daemon = self._start(("dl2d.cli", "run", "--config", str(self.folder / "dl2d.yaml")), "daemon")
            stack.callback(_end, self._daemon)
            self._wait_for(lambda: daemon_health(self.settings, 2.0).runs, _START_SECONDS, "the daemon does not answer")
            self.store = SqlStore(self.settings.store_url)
            stack.callback(self.store.close)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def play(self, say: Callable[[str], None]) -> tuple[DemoResult, ...]:
        """Run all jobs to their end, then the static runs.

        Raises
        ------
        DemoError
            The daemon ended, or it all takes too long.
        """
        say(f"the daemon is at http://127.0.0.1:{self.settings.api.port}")
        arrived: dict[JobKey, float] = {}
        shown: dict[JobKey, str] = {}

        def played() -> bool:
            seen = StoreViews(self.store).status(None, ended_since=0.0, limit=len(self.script.jobs))
            lines = {line.job.key: line for line in seen.jobs}
            for line in lines.values():
                if (text := _state(line)) != shown.get(line.job.key):
                    shown[line.job.key] = text
                    say(f"{text}  epoch {line.job.progress.epoch:.1f}, loss {number(line.job.progress.loss)}")
            last = lines.get(list(arrived)[-1]) if arrived else None
            begun = last is not None and (last.job.progress.epoch >= self.script.epochs_between or last.job.state.ended)
            if len(arrived) < len(self.script.jobs) and (begun or not arrived):
                arrived[self._submit(self.script.jobs[len(arrived)])] = time.time()
                return False
            return len(lines) == len(self.script.jobs) and all(line.job.state.ended for line in lines.values())

        minutes = f"{_LIMIT_SECONDS / 60:.0f} minutes"
        busy = "other programs use this machine's processors, or the daemon's log, whose end follows, says why"
        self._wait_for(played, _LIMIT_SECONDS, f"not all jobs ended within {minutes}: {busy}")
        self._wait_for(lambda: not self.store.tasks(live=True), _STOP_SECONDS, "tasks of ended jobs do not end")
        say("the same trainings with one worker and one parameter server that never change")
        digests = self._static_digests()
        return tuple(
            DemoResult(
                job=job,
                arrived=at,
                plans=self.store.runtime_plans(key),
                decisions=self.store.decisions(key, limit=_MAX_ROWS)[::-1],
                static_digest=digest,
            )
            for (key, at), digest in zip(arrived.items(), digests, strict=True)
            if (job := self.store.job(key)) is not None
        )

    def _submit(self, job: DemoJob) -> JobKey:
        environment = job_environment(os.environ, {"OMP_NUM_THREADS": "1"})
        with DaemonClient(self.settings) as daemon:
            answer = daemon.submit(job.request(), job.command(self.script.pause), str(self.folder), environment)
        return JobKey.from_slug(answer["job"])

    def _static_digests(self) -> list[str]:
        with ExitStack() as stack:
            runs = []
            for job in self.script.jobs:
                command = ("pslite.run", "--workers", "1", "--servers", "1", "--", *job.command())
                runs.append(self._start(command, job.name))
                stack.callback(_end, runs[-1])
            self._wait_for(lambda: None not in [run.poll() for run in runs], _LIMIT_SECONDS, "a static run hangs")
        found = [_DIGEST.findall(self._log(job.name).read_text(encoding="utf-8")) for job in self.script.jobs]
        return [digests[-1] if digests else "" for digests in found]

    def _start(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        # A variable for some other daemon or job must not reach into this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("DL2D_", "DL2_"))}
        with self._log(log).open("ab") as file:
            # In a session of its own: Ctrl-C reaches the demo alone, which ends all in order.
            return subprocess.Popen(
                [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**environment, "OMP_NUM_THREADS": "1"}, start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _wait_for(self, true: Callable[[], bool], seconds: float, otherwise: str) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            status = self._daemon.poll()
            if status is not None or time.monotonic() > deadline:
                what = otherwise if status is None else f"the daemon ended with status {status}"
                said = self._log("daemon").read_text(encoding="utf-8", errors="replace")
                raise DemoError(f"{what}:\n{said[-4000:]}")
            time.sleep(_LOOK_SECONDS)

    def _end_tasks(self) -> None:
        """End what jobs still run. The resource manager knows their processes; the daemon has let go of it."""
        manager = load_manager("local", manager_settings(self.settings), time.time)

        def running() -> list[RmIdentity]:
            return [job.identity for job in manager.listing().jobs if not job.state.ended]

        try:
            left = running()
            self.left_running = len(left)
            manager.stop(left, _GRACE_SECONDS)
            deadline = time.monotonic() + _GRACE_SECONDS + _STOP_SECONDS
            while running():
                if time.monotonic() > deadline:
                    raise DemoError(f"{len(running())} tasks do not end")
                time.sleep(_LOOK_SECONDS)
        finally:
            manager.close()


def _configuration(folder: Path, script: DemoPlan) -> Settings:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    settings = {
        "state_dir": str(folder / "state"),
        "resource_manager": {"name": "local", "local": {"cluster": "demo", "nodes": [_NODES]}},
        "schedule": {"poll_seconds": 0.5, "slot_seconds": script.slot_seconds},
        "store": {"progress_seconds": 1.0},
        "api": {"port": port, "heartbeat_seconds": 0.5},
        "jobs": {"models": sorted({f"digits-{job.model}" for job in script.jobs}), "end_seconds": 5},
    }
    (folder / "dl2d.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return load_settings(folder / "dl2d.yaml")


def _state(line: JobStatus) -> str:
    job, progress = line.job, line.job.progress
    head = f"{job.request.name:8}{job.state:9}"
    if job.state.ended or line.decided is None:
        return head
    decided = line.decided.allocation
    if progress.total_versions is not None and progress.version >= progress.total_versions:
        return f"{head} ending"
    return f"{head} {arrow(progress.workers, decided.workers):>4} workers {arrow(progress.ps, decided.ps):>4} PSs"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
