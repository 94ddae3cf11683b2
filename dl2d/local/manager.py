"""The local resource manager: tasks are processes of this machine, on nodes that exist by declaration."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
import structlog

from dl2d import __version__, lock_file
from dl2d.core.cluster import Node, NodeState, Task
from dl2d.core.errors import AlreadyRunning, ConfigError, Denied, NotFound, Rejected, Unavailable, some_of
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import Anchor, Capabilities, RmIdentity, RmJob, RmJobState, RmListing, TaskSpec
from dl2d.core.resources import Resources
from dl2d.local import task_supervisor
from dl2d.local.settings import LocalSettings
from dl2d.local.task_files import Ending, ProcessId, Record, Records, unavailable
from dl2d.local.task_supervisor import BEGIN_LIMIT, START_LIMIT, boot_id, start_ticks
from pslite.launch.gpus import VISIBLE, gpu_for_task, visible_gpus

log = structlog.get_logger(__name__)

#: Seconds to wait for the lock of a daemon that is dead already.
LOCK_SECONDS = 5.0
#: In the environment of everything a task starts; tells its processes apart once its supervisor is gone.
HANDLE_VARIABLE = "DL2_HANDLE"
NODE_VARIABLE = "DL2_NODE"
#: Name of the resource of which a GPU is one unit.
_GPU = "gpu"
_TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def create(settings: Mapping[str, object], *, clock: Callable[[], float]) -> LocalManager:
    """Make the manager from its part of the config (``resource_manager.local``).

    Parameters
    ----------
    settings
        Keys ``cluster``, ``state_dir``, ``nodes``; see docs/internals/local-manager.md.
    clock
        Seconds since 1970.

    Raises
    ------
    ConfigError
        A key is unknown or has a bad value.
    AlreadyRunning
        Another manager uses the same ``state_dir``.
    Unavailable
        The folder cannot be made or written.
    """
    return LocalManager(LocalSettings.parse(settings), clock)


class LocalManager:
    """Implements ``dl2d.core.resource_manager.ResourceManager``."""

    def __init__(
        self, settings: LocalSettings, clock: Callable[[], float], timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._cluster = settings.cluster
        self._boot = boot_id()
        self._capacity = {node.name: node.capacity for node in settings.nodes}
        has_gpus = any(capacity.get(_GPU) for capacity in self._capacity.values())
        #: GPUs of this machine that tasks are given; none where no node is declared to have GPUs.
        self._gpus = visible_gpus(os.environ) if has_gpus else []
        self._state_dir = settings.state_dir
        self._output = settings.state_dir / "output"
        folder = settings.state_dir / "tasks"
        try:
            for path in (settings.state_dir, self._output, folder):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(settings.state_dir)
            self._lock = _lock(settings.state_dir / "lock")
        except OSError as error:
            raise unavailable(settings.state_dir, error) from error
        self._records = Records(folder, timer)
        try:
            self._resume_stops()
        except BaseException:
            os.close(self._lock)
            raise

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="local", cluster=self._cluster, version=__version__, starts_anchors=True, other_users=False,
            output=f"{str(self._output).replace('{', '{{').replace('}', '}}')}/{{slug}}/{{name}}.log",
        )  # fmt: skip

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        del ended_since, tasks
        now = self._clock()
        jobs: list[RmJob] = []
        used: dict[str, list[Resources]] = {}
        for record in self._records.all():
            seen = self._look_at(record)
            if seen.ended is not None and self._records.forget_ended(seen.handle):
                continue
            job = self._describe(seen)
            jobs.append(job)
            if not job.state.ended:
                used.setdefault(seen.node, []).append(seen.resources)
        return RmListing(now, self._nodes(used), tuple(jobs), incomplete=self._records.unreadable)

    def submit(self, task: TaskSpec) -> str:
        if task.role is Role.COORDINATOR:
            if (running := self._running(task.tag)) is not None:
                return running.handle
            if self._records.unreadable:
                problem = f"{task.tag} is not started: perhaps it runs already, and its record cannot be read"
                raise Unavailable(problem, said=self._records.unreadable[0])
        self._check(task)
        program = _find_program(task)
        node = self._choose_node(task)
        submitted = self._clock()
        record = Record(
            handle=uuid.uuid4().hex,
            tag=task.tag,
            job=task.job.slug,
            role=task.role.value,
            name=task.name,
            node=node,
            user=task.owner.user,
            demand=dict(task.demand.thousandths),
            submitted=submitted,
            boot=self._boot,
            begun=time.monotonic(),
            gpus=self._choose_gpus(task),
        )
        output = self._output / task.job.slug / f"{task.name}.log"
        environment = {**dict(task.launch.env), NODE_VARIABLE: node, HANDLE_VARIABLE: record.handle}
        if self._gpus:
            # With this order, a number means the same GPU in every task.
            environment |= {VISIBLE: ",".join(record.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        order = {
            "record_path": str(self._records.path(record.handle)),
            "stop_path": str(self._records.stop_path(record.handle)),
            "record": msgspec.to_builtins(record),
            "begin_before": record.begun + BEGIN_LIMIT,
            "launch": {
                "program": program,
                "argv": list(task.launch.argv),
                "env": environment,
                "cwd": task.launch.cwd,
                "output": str(output),
            },
        }
        try:
            output.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise unavailable(output.parent, error) from error
        self._records.put(record)
        self._start(record, order)
        log.info("task started", tag=task.tag, node=node, handle=record.handle)
        return record.handle

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        for job in jobs:
            record = self._records.get(job.handle)
            if record is not None and record.boot == self._boot and _identity(record) == job:
                self._stop(record.handle, grace)

    def _stop(self, handle: str, grace: float) -> None:
        self._records.order_stop(handle, time.monotonic() + max(0.0, grace))
        # Read again: a supervisor that had not signed the record by now sees the order before it lets the task go.
        again = self._records.get(handle)
        if again is not None and again.ended is None and again.supervisor is None:
            self._end(again, "never", "it was stopped before it began")
        else:
            self._wake_supervisor(again)

    def authenticate(self, rm_id: str, proof: str) -> Anchor:
        del proof
        raise Denied(
            f"the local resource manager starts coordinators itself and gives them their credentials; it cannot "
            f"authenticate {rm_id!r} (submit the job with `dl2d submit`)"
        )

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # What the records say, set against what runs

    def _look_at(self, record: Record) -> Record:
        """The record with its end, where that can be told now."""
        if record.ended is not None:
            self._reap(record.supervisor)
            return record
        if record.boot != self._boot:
            return self._end(record, "lost", "the machine was restarted")
        if record.supervisor is None:
            if time.monotonic() - record.begun < START_LIMIT:
                return record
            return self._end(record, "never", "the daemon ended before the task was started")
        if _runs(record.supervisor):
            return record
        # The supervisor's last act is to write the end, so it may stand there by now.
        again = self._records.get(record.handle)
        if again is None or again.ended is not None:
            return again or record
        if self._kill_unsupervised(record.handle):
            return record
        return self._end(record, "lost", f"its supervisor (process {record.supervisor.pid}) vanished")

    def _end(self, record: Record, cause: str, said: str) -> Record:
        ended = msgspec.structs.replace(record, ended=Ending(self._clock(), None, cause, said))
        log.warning("task ended without its supervisor", tag=record.tag, handle=record.handle, why=said)
        try:
            self._records.put(ended)
        except Unavailable as error:
            # The truth does not need the disk: the next look comes to the same end.
            log.warning("the end of a task cannot be written", tag=record.tag, error=str(error))
        return ended

    def _kill_unsupervised(self, handle: str) -> bool:
        """Kill processes of a supervisor that is gone, by their handle; returns whether there were any."""
        found = False
        for process in psutil.process_iter():
            # Foreign and ended processes have nothing to show.
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(HANDLE_VARIABLE) == handle:
                    found = True
                    log.warning("killing a process whose supervisor vanished", pid=process.pid, handle=handle)
                    process.kill()  # psutil compares start times first
        return found

    def _describe(self, record: Record) -> RmJob:
        state, reason = self._state_of(record)
        handle, submitted, user, tag = _identity(record)
        return RmJob(
            handle=handle, state=state, tag=tag, user=user, node=record.node, reason=reason, submitted=submitted
        )

    def _state_of(self, record: Record) -> tuple[RmJobState, str]:
        if record.ended is not None:
            return _verdict(record.ended)
        if self._records.stop_path(record.handle).exists():
            return RmJobState.ENDING, "asked to stop"
        if record.supervisor is None or record.leader is None:
            return RmJobState.PENDING, "its supervisor is starting"
        if not _runs(record.supervisor):
            return RmJobState.ENDING, "its supervisor vanished; what it left is being killed"
        if not _runs(record.leader):
            return RmJobState.ENDING, "its main process has ended; what that left behind is being stopped"
        return RmJobState.RUNNING, ""

    def _nodes(self, used: Mapping[str, Sequence[Resources]]) -> tuple[Node, ...]:
        nodes = [Node(name, capacity, Resources.total(used.get(name, ()))) for name, capacity in self._capacity.items()]
        for name in sorted(used.keys() - self._capacity.keys()):
            # Taken out of the config while tasks ran on it: they may finish.
            held = Resources.total(used[name])
            nodes.append(Node(name, held, held, NodeState.DRAINING, "not in the config any more"))
        return tuple(nodes)

    @staticmethod
    def _reap(process: ProcessId | None) -> None:
        """Collect an ended supervisor where this process is its parent, as process 1 of a container is."""
        if process is not None and os.getpid() == 1 and start_ticks(process.pid, dead=True) == process.ticks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)

    # Starting

    def _running(self, tag: str) -> Record | None:
        """The task with a tag that runs already, as where the answer to its start was lost."""
        found = (record for record in self._records.all() if record.tag == tag and record.ended is None)
        return next((record for record in map(self._look_at, found) if record.ended is None), None)

    def _check(self, task: TaskSpec) -> None:
        if task.owner.uid != os.getuid():
            raise Denied(
                f"{task.tag}: the local resource manager runs tasks as its own user (uid {os.getuid()}) only, "
                f"not as {task.owner.user} (uid {task.owner.uid})"
            )
        if not _TASK_NAME.fullmatch(task.name):
            raise Rejected(f"{task.tag}: {task.name!r} cannot be a task's name, because its output file has that name")
        try:
            JobKey.from_slug(task.job.slug)
        except ValueError as error:
            raise Rejected(f"{task.tag}: bad job key", said=str(error)) from None
        if not Path(task.launch.cwd).is_absolute():
            raise Rejected(f"{task.tag}: working folder {task.launch.cwd!r} is not an absolute path")

    def _choose_node(self, task: TaskSpec) -> str:
        nodes = {node.name: node for node in self.listing().nodes}
        if not task.node:
            for node in nodes.values():
                if node.is_open and task.demand.fits_in(node.capacity.minus(node.used)):
                    return node.name
            raise Rejected(f"{task.tag}: no node has room for {task.demand}")
        chosen = nodes.get(task.node)
        if chosen is None:
            raise NotFound(
                f"{task.tag}: there is no node {task.node!r}; the config declares {some_of(list(self._capacity))}"
            )
        if not chosen.is_open:
            raise Rejected(f"{task.tag}: node {task.node} takes no tasks ({chosen.remark})")
        if missing := task.demand.lacking(chosen.capacity):
            raise Rejected(f"{task.tag}: node {task.node} is too small: {missing}")
        if missing := task.demand.lacking(chosen.capacity.minus(chosen.used)):
            raise Rejected(f"{task.tag}: node {task.node} has no room now: {missing}")
        return task.node

    def _choose_gpus(self, task: TaskSpec) -> dict[str, int]:
        """GPUs for a task, with the thousandths of each that it uses.

        No two tasks get more than the whole of a GPU, unless nodes are declared with more GPUs than there are.
        """
        demand = task.demand.in_order([_GPU])[0]
        if not self._gpus or not demand:
            return {}
        used = Counter[str]()
        for record in self._records.all():
            if record.gpus and self._look_at(record).ended is None:
                used.update(record.gpus)
        whole, part = divmod(demand, 1000)
        given: dict[str, int] = {}
        for share in (*(1000,) * whole, part):
            others = [gpu for gpu in self._gpus if gpu not in given]
            if share and others:
                given[gpu_for_task(others, used, share)] = share
        return given

    def _start(self, record: Record, order: Mapping[str, object]) -> None:
        """Start a supervisor and hand it the task. Nothing secret goes through its arguments."""
        handle = record.handle
        command = [sys.executable, "-I", "-S", task_supervisor.__file__, record.tag]
        # The interpreter itself may need its libraries; the task's environment is in the order.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            trouble = os.open(self._state_dir / "supervisors.log", flags, 0o600)
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=trouble,
                    cwd="/",
                    env=environment,
                    start_new_session=True,
                )
            finally:
                os.close(trouble)
        except OSError as error:
            self._records.remove(handle)
            raise Unavailable(f"{record.tag}: cannot start a process", said=error.strerror or str(error)) from error
        with process:
            try:
                answer, _ = process.communicate(json.dumps(order).encode(), timeout=START_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                # It may yet start; whoever looks at the record finds it, and here it is told to end.
                self._stop(handle, 0)
                raise Unavailable(f"{record.tag}: its supervisor did not answer within {START_LIMIT:g} s") from None
        word, _, said = answer.decode(errors="replace").partition("\n")
        if word == task_supervisor.STARTED:
            return
        present = self._records.get(handle)
        if not word and present is not None and present.supervisor is not None and present.ended is None:
            # It died between letting the task go and saying so: the record is the truth, listing() clears it up.
            raise Unavailable(f"{record.tag}: its supervisor vanished")
        self._records.remove(handle)
        if word == task_supervisor.REFUSED:
            raise Rejected(f"{record.tag}: cannot be started", said=said)
        hint = f"its supervisor failed; see {self._state_dir / 'supervisors.log'}"
        raise Unavailable(f"{record.tag}: cannot be started now", said=said or hint)

    # Stopping

    def _resume_stops(self) -> None:
        """Repeat orders to supervisors that a daemon may not have sent before it was killed."""
        for record in self._records.all():
            if record.ended is None and record.boot == self._boot and self._records.stop_path(record.handle).exists():
                self._wake_supervisor(record)

    @staticmethod
    def _wake_supervisor(record: Record | None) -> None:
        """Wake the supervisor, which looks for the order and kills; so deadlines hold without a daemon."""
        if record is not None and record.ended is None and record.supervisor is not None and _runs(record.supervisor):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.supervisor.pid, signal.SIGTERM)


def _identity(record: Record) -> RmIdentity:
    return RmIdentity(record.handle, int(record.submitted), record.user, record.tag)


def _runs(process: ProcessId) -> bool:
    """Whether this very process is alive; another one with its number does not count."""
    return process.ticks is not None and process.pid > 1 and start_ticks(process.pid) == process.ticks


def _verdict(ended: Ending) -> tuple[RmJobState, str]:
    """State and words for an end."""
    if ended.cause == "lost":
        return RmJobState.LOST, ended.said
    if ended.cause == "never":
        return RmJobState.FAILED, f"never started: {ended.said}"
    if ended.status is None:
        return RmJobState.LOST, ended.said or "ended without a status"
    code = os.waitstatus_to_exitcode(ended.status)
    how = f"exit status {code}" if code >= 0 else f"killed by signal {-code} ({_signal_name(-code)})"
    if ended.cause == "itself":
        return (RmJobState.DONE if code == 0 else RmJobState.FAILED), how
    why = {
        "stopped": "ended when asked to stop",
        "killed": "killed, since it did not end in time",
        "outside": "its supervisor was told to end",
    }
    return RmJobState.CANCELLED, f"{why.get(ended.cause, ended.cause)}: {how}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "real-time signal"


def _find_program(task: TaskSpec) -> str:
    """Absolute path of the program, looked for as the task itself would. Raises Rejected."""
    if not task.launch.argv or not task.launch.argv[0]:
        raise Rejected(f"{task.tag}: the command is empty")
    name = task.launch.argv[0]
    if "/" in name:
        return os.path.normpath(Path(task.launch.cwd) / name)
    folders = dict(task.launch.env).get("PATH", os.defpath)
    found = shutil.which(name, path=folders)
    if found is None:
        raise Rejected(f"{task.tag}: program {name!r} is not in the task's PATH ({folders})")
    return os.path.normpath(Path(task.launch.cwd) / found)


def check_private(folder: Path) -> None:
    """Check that nobody else may write a manager's folder; raises ``ConfigError`` and ``OSError``."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"resource_manager.local.state_dir: {folder} must belong to uid {os.getuid()} and be writable by nobody "
            f"else (it belongs to uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o})"
        )


def _lock(path: Path) -> int:
    """Lock the folder of this file for this process; returns the descriptor that holds the lock."""
    give_up = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return lock_file.acquire(path, f"{os.getpid()}\n")
        except BlockingIOError as error:
            holder = str(error)
        # Killed while it started a process, a daemon's lock lives on in its fork until that runs the new program.
        if not (holder.isdecimal() and start_ticks(int(holder)) is None and time.monotonic() < give_up):
            raise AlreadyRunning(
                f"local resource manager: {path.parent} is in use by another daemon (process {holder or 'unknown'}); "
                "stop that one, or give this one its own resource_manager.local.state_dir"
            )
        time.sleep(0.02)


__all__ = ["HANDLE_VARIABLE", "NODE_VARIABLE", "LocalManager", "create"]
