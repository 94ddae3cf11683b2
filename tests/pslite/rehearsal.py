"""Whole jobs in one process: coordinator, servers and workers are threads, joined by real sockets.

A hundred times faster to start than processes, so that thousands of random schedules of joins, leaves and deaths can be
gone through. A death is the end of all of a member's connections at once.
"""

from __future__ import annotations

import contextlib
import random
import re
import secrets
import socket
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from own_loop import OwnLoop
from regression import Lookup, Regression, segments, table_segments
from sudden_death import cut_control, cut_coordinator, cut_off, lose_control

from pslite.coordinator import Coordinator, Settings
from pslite.errors import Fenced, PsliteError, RolledBack
from pslite.fault_points import FaultHook, FaultPoint
from pslite.job.job_spec import LAMB, SGD, Adam, JobSpec
from pslite.job.job_status import Reply, Status
from pslite.job.membership_plan import Plan
from pslite.net.authentication import TOKEN_BYTES, Identity
from pslite.net.tcp_sockets import listen
from pslite.net.tensor_frames import Link
from pslite.net.tls import Encryption
from pslite.server import Server
from pslite.storage.coordinator_log import CoordinatorLog
from pslite.worker.allreduce.worker import AllReduceWorker
from pslite.worker.ps.worker import Worker
from pslite.worker.single_process_session import SingleSession

#: why a job fails whose files nobody can write any more
BEFORE_ITS_FILES = "before it had written what the script saves at its end"
QUICK = Settings(grace=5.0, start=10.0, settle=0.01, verdict=0.05, look=0.01, heartbeat=0.05, lease=20.0)
#: seconds within which the next version must come, however busy the machine is
_PATIENCE = 30.0


def job(**changes: object) -> JobSpec:
    """A job of 60 versions, in ten or so blocks."""
    values = {
        "segments": segments(40, SGD(lr=0.001, momentum=0.9)),
        "samples": 61, "batch": 12, "epochs": 10, "seed": 7, "mode": "exact", "shards": 8, "block_bytes": 24,
    }  # fmt: skip
    return JobSpec(**{**values, **changes})


LAMB_RULE = LAMB(lr=0.02, weight_decay=0.01)
#: what is trained, and how gradients travel
KINDS: Mapping[str, Mapping[str, Any]] = {
    "momentum": {},
    "fewer shards than workers": {"shards": 3},
    "adam, clipped by norm": {"clip_norm": 0.5, "segments": segments(40, Adam(lr=0.01))},
    "lamb": {"segments": segments(40, LAMB_RULE)},
    "lamb, clipped by norm": {"segments": segments(40, LAMB_RULE), "clip_norm": 0.3},
    "lamb, clipped by value": {"segments": segments(40, LAMB_RULE), "clip_value": 0.05},
    "lamb, one block": {"segments": segments(40, LAMB_RULE), "block_bytes": 1024},
    "bfloat16": {"wire": "bfloat16"},
    "float16": {"wire": "float16"},
    "rows": {"segments": table_segments(100, 3, SGD(lr=0.05)), "block_bytes": 120},
    "rows, adam": {"segments": table_segments(100, 3, Adam(lr=0.02)), "block_bytes": 120},
    "rows, clipped": {"segments": table_segments(100, 3, Adam(lr=0.02)), "block_bytes": 120, "clip_norm": 0.3},
    "rows, bfloat16": {"segments": table_segments(100, 3, SGD(lr=0.05)), "block_bytes": 120, "wire": "bfloat16"},
    "encrypted": {},  # over TCP, and all of it
}


def model_of(spec: JobSpec) -> type[Regression | OwnLoop]:
    if spec.open:
        return OwnLoop
    return Lookup if spec.segments[0].sparse else Regression


@cache
def static_digest(spec: JobSpec, model: type[Regression | OwnLoop] = Regression) -> str:
    """The digest of the same job in one process, never resized."""
    session = SingleSession(spec)
    model(spec).train(session)
    return session.digest()


@dataclass(frozen=True)
class Event:
    """Something that happens as soon as a worker begins a version, or `delay` seconds later."""

    version: int
    #: None: the sizes stay
    workers: int | None = None
    servers: int | None = None
    #: a member of that role dies
    kill: Literal["worker", "ps", "coordinator"] | None = None
    #: which one, of those that may die; for the coordinator when: at any point, before it writes something down, after
    choice: int = 0
    delay: float = 0.0
    #: the tasks to remove are the oldest
    oldest: bool = False


#: beside the runtime's own fault points: a worker has begun to compute a version, which is given; its script has ended
ScriptPoint = Literal["version", "script ended"]


@dataclass(frozen=True)
class Moment:
    """A task has reached a point."""

    rehearsal: Rehearsal
    task: str
    about: tuple[Any, ...]

    @property
    def subject(self) -> Any:
        """What is given first: a message, a plan, a connection, a version."""
        return self.about[0]

    @property
    def header(self) -> Any:
        """Of a frame."""
        return self.about[1]


#: True: the step that follows is left out
Action = Callable[[Moment], bool | None]


@dataclass(frozen=True)
class Fault:
    """What is done when a task reaches a point."""

    at: FaultPoint | ScriptPoint
    #: one after the other
    do: Action | Sequence[Action]
    #: only of this task
    task: str = ""
    when: Callable[[Moment], bool] = lambda _: True
    #: when a flag is raised, or not raised
    after: str = ""
    until: str = ""
    #: for the how manieth time; every time if `always`
    nth: int = 1
    always: bool = False


def drop(_: Moment) -> bool:
    """Leave out the step that follows."""
    return True


def flag(name: str) -> Action:
    """Raise a flag, for which others may wait."""
    return lambda moment: moment.rehearsal.flag(name).set()


def wait(name: str, seconds: float = 20.0) -> Action:
    """Wait for a flag."""

    def waiting(moment: Moment) -> None:
        assert moment.rehearsal.flag(name).wait(seconds), f"nobody has raised the flag {name!r}"

    return waiting


def sleep(seconds: float) -> Action:
    return lambda _: time.sleep(seconds)


def fail(error: Exception) -> Action:
    def failing(_: Moment) -> None:
        raise error

    return failing


def kill(*tasks: str) -> Action:
    """Have tasks die (by default the one whose moment it is), and others come in their places."""

    def killing(moment: Moment) -> None:
        for task in tasks or (moment.task,):
            moment.rehearsal.kill(task)

    return killing


def die(moment: Moment) -> None:
    """Have the task die whose moment it is; no other comes."""
    moment.rehearsal.kill(moment.task, replace=False)


def disconnect(*tasks: str) -> Action:
    """Have control connections break, as the coordinator sees it; members come back by themselves."""

    def disconnecting(moment: Moment) -> None:
        for task in tasks:
            lose_control(moment.rehearsal.coordinator, task)

    return disconnecting


def break_connection(peer: str) -> Action:
    """Have the data connection break that the task has opened to another one."""
    return lambda moment: cut_off([moment.rehearsal.opened[moment.task, peer].sock])


def break_this_connection(moment: Moment) -> None:
    """Have the data connection break whose moment it is."""
    cut_off([moment.subject.sock])


@dataclass
class Outcome:
    """How a rehearsal went."""

    status: Status
    log: list[str]
    killed: list[str]
    #: what members raised, other than as they should at the end of a job or their own
    surprises: list[str] = field(default_factory=list)
    #: workers whose scripts had files to write at their ends
    chiefs: list[str] = field(default_factory=list)
    #: faults that have never come into question
    idle: list[Fault] = field(default_factory=list)

    @property
    def story(self) -> str:
        """All that was said."""
        return "\n".join([*self.log, *self.surprises])

    def check(self, digest: str | None = None) -> None:
        """It has ended well, with weights of that digest if one is given, and nobody had an error."""
        assert self.status.state == "finished", self.story
        assert not self.surprises, self.story
        if digest is not None:
            assert self.status.result is not None, self.story
            assert self.status.result.digest == digest, self.story


class MortalLog(CoordinatorLog):
    """A log whose coordinator dies as it writes something down."""

    doom: Literal["", "before", "after"] = ""

    def write(self, state: bytes) -> None:
        if self.doom == "before":
            raise Fenced("before it had written something down")
        super().write(state)
        if self.doom == "after":
            raise Fenced("after it had written something down")


class _Thread:
    """The process of a worker that is none."""

    def __init__(self) -> None:
        self.leave: Callable[[], None] = lambda: None
        self.raised: Callable[[BaseException], None] = lambda _: None

    def enter(self, leave: Callable[[], None], raised: Callable[[BaseException], None]) -> None:
        self.leave, self.raised = leave, raised

    def begin_again(self, reason: str) -> None:
        raise RolledBack(reason)

    def abandon(self, reason: str) -> None:
        """Threads cannot be ended; the script notices at its next exchange."""


class Rehearsal:
    """A job that is gone through once; it is its own director."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        workers: int,
        servers: int,
        events: Sequence[Event] = (),
        faults: Sequence[Fault] = (),
        hook: FaultHook | None = None,
        step_seconds: float = 0.001,
        settings: Settings = QUICK,
        model: type[Regression | OwnLoop] = Regression,
        any_worker: bool = False,
        encrypt: Encryption | Literal[""] = "control",
        slow: Mapping[str, float] | None = None,
        lasting: bool = False,
        patience: float = _PATIENCE,
    ) -> None:
        self._spec = spec
        #: the last worker may die too
        self._any_worker = any_worker
        self._encrypt = encrypt
        #: seconds that a task takes for each shard (a worker) or each update of a block (a server)
        self._slow = dict(slow or {})
        self.model = model(spec)
        self._events = sorted(events, key=lambda event: event.version)
        self._faults = faults
        #: how often each of them could have been done
        self._reached = Counter[int]()
        #: hears of fault points before they do
        self._hook = hook
        self._flags: dict[str, threading.Event] = {}
        self._step_seconds = step_seconds
        self._settings = settings
        self._counts = {"worker": workers, "ps": servers}
        self._all_reduce = spec.architecture == "allreduce"
        self._targets: dict[str, list[str]] = {"worker": [], "ps": []}
        self._next = Counter[str]()
        self._lock = threading.RLock()
        self.members: dict[str, Worker | AllReduceWorker | Server] = {}
        self._threads: list[threading.Thread] = []
        self.killed: list[str] = []
        #: tasks, and the coordinator, whose connections were cut
        self._severed: set[str] = set()
        self._cut: Coordinator | None = None
        self._chiefs: list[str] = []
        #: data connections by who opened them and to whom, and those of each task, whoever opened them
        self.opened: dict[tuple[str, str], Link] = {}
        self.connections: dict[str, list[Link]] = {}
        #: the newest plan that has taken effect
        self.plan: Plan | None = None
        #: the newest plan when a server died, or a worker that may have been the last: until a later one is done,
        #: blocks have one copy
        self._plan_at_death = 0
        self.log: list[str] = []
        #: workers that have weights
        self._stepping: set[str] = set()
        self._surprises: list[str] = []
        self._status: Status | None = None
        self._address, self._token = "", b""
        self._wake: Callable[[], None] = lambda: None
        #: whether the coordinator is to die, and how often it has
        self._mortal = lasting or any(event.kill == "coordinator" for event in events)
        self.deaths = 0
        self.coordinator: Coordinator
        self._mortal_log: MortalLog | None = None
        self._patience = patience
        self._deadline = time.monotonic() + patience
        self._over = False

    def run(self) -> Outcome:
        """Go through it."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with TemporaryDirectory() as folder, listen("127.0.0.1") as listener:
            while (status := self._coordinate(token, Path(folder, "log"), listener)) is None:
                self.deaths += 1
        with self._lock:
            self._over = True
        for thread in self._threads:
            thread.join(_PATIENCE)
            if thread.is_alive():
                self._surprises.append(f"{thread.name} does not end")
        idle = [fault for number, fault in enumerate(self._faults) if self._reached[number] < fault.nth]
        return Outcome(status, self.log, self.killed, self._surprises, self._chiefs, idle)

    def _coordinate(self, token: bytes, log: Path, listener: socket.socket) -> Status | None:
        """Run a coordinator; None if it has died."""
        self._mortal_log = MortalLog(log) if self._mortal else None
        self.coordinator = Coordinator(
            job="rehearsal", token=token, director=self, say=self.log.append, settings=self._settings,
            host="127.0.0.1", listener=listener.dup(), log=self._mortal_log, encrypt=self._encrypt, faults=self._at,
        )  # fmt: skip
        try:
            return self.coordinator.run()
        except Fenced as error:
            self.log.append(f"the coordinator died: {error}")
            return None

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self._over

    @property
    def token(self) -> bytes:
        """The job's."""
        return self._token

    @property
    def version(self) -> int:
        """The last that the coordinator has heard of."""
        return self._status.version if self._status is not None else 0

    @property
    def spec(self) -> JobSpec:
        """What is trained."""
        return self._spec

    @property
    def encrypt(self) -> Encryption | Literal[""]:
        """What goes over TLS; "" for all."""
        return self._encrypt

    @property
    def address(self) -> str:
        """Where the coordinator is."""
        return self._address

    def server_addresses(self) -> list[str]:
        """Where the servers that there are take data."""
        with self._lock:
            return [member.address for member in self.members.values() if isinstance(member, Server)]

    # --- the director's part --------------------------------------------------------------------------------------

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:
        self._address, self._token, self._wake = address, token, wake
        with self._lock:
            self._fit(oldest=False)

    def exchange(self, status: Status, *, urgent: bool) -> Reply:
        with self._lock:
            if self._status is not None and status.version > self._status.version:
                self._deadline = time.monotonic() + self._patience
            self._status = status
            members = frozenset(self._targets["worker"] + self._targets["ps"])
        return Reply(members=members, stop=time.monotonic() > self._deadline)

    def close(self, status: Status) -> None:
        self._status = status

    def _fit(self, *, oldest: bool) -> None:
        for role in ("ps", "worker"):
            have = self._targets[role]
            while len(have) > self._counts[role]:
                have.pop(0 if oldest else -1)
            while len(have) < self._counts[role]:
                task = f"{role}-{self._next[role]}"
                self._next[role] += 1
                have.append(task)
                play = self._work if role == "worker" else self._serve
                self._threads.append(self._begin(play, task))

    def _begin(self, play: Callable[[str], None], task: str) -> threading.Thread:
        """Start the process of a task, which is a thread here."""
        thread = threading.Thread(target=play, args=(task,), name=task, daemon=True)
        thread.start()
        return thread

    # --- members --------------------------------------------------------------------------------------------------

    def _identity(self, role: Literal["worker", "ps"], task: str) -> Identity:
        # members learn from the coordinator what is encrypted, but for one thing
        encrypt = "none" if self._encrypt == "none" else ""
        return Identity(role=role, task=task, incarnation=uuid.uuid4().hex, token=self._token, encrypt=encrypt)

    def _serve(self, task: str) -> None:
        try:
            while task not in self.killed:
                # who comes when the job is over tries for less than our patience
                server = Server(
                    self._identity("ps", task), self._address, host="127.0.0.1", say=self.log.append,
                    join_timeout=_PATIENCE / 3, faults=self._at,
                )  # fmt: skip
                with self._lock:
                    self.members[task] = server
                    if task in self.killed:
                        self.sever(task)
                with contextlib.suppress(RolledBack):
                    server.run()
                    return
        except PsliteError as error:
            self._ended(task, error)
        except BaseException as error:  # noqa: BLE001  (a thread's end must not go unseen)
            self._surprises.append(f"{task}: {''.join(traceback.format_exception(error))}")

    def _work(self, task: str) -> None:
        while task not in self.killed and self._work_once(task):
            pass

    def _work_once(self, task: str) -> bool:
        """Be that worker; returns whether it begins again."""
        process = _Thread()
        kind = AllReduceWorker if self._all_reduce else Worker
        worker = kind(
            self._identity("worker", task), self._address, None if self._spec.open else self._spec,
            say=self.log.append, process=process, join_timeout=_PATIENCE / 3, faults=self._at,
        )  # fmt: skip
        again = False
        with self._lock:
            self.members[task] = worker
            if task in self.killed:
                return False
        try:
            how: dict[str, Callable[..., None]] = {}
            if task in self._slow:
                how["computed"] = lambda epoch, samples: time.sleep(self._slow[task])
            self.model.train(worker, before_step=lambda version: self._begin_step(task, version), **how)
            if worker.is_chief:
                self._chiefs.append(task)
            self._do("script ended", task, (worker.is_chief,))
        except RolledBack:
            again = True
        except PsliteError as error:
            self._ended(task, error)
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001
            self._surprises.append(f"{task}: {''.join(traceback.format_exception(error))}")
            process.raised(error)
        process.leave()
        return again

    def _ended(self, task: str, error: PsliteError) -> None:
        if not self._over and task not in self.killed and not str(error).startswith(("the daemon", "drained")):
            status = self._status
            if status is None or status.state in ("waiting", "running"):
                self._surprises.append(f"{task}: {error}")

    # --- what happens ---------------------------------------------------------------------------------------------

    def _begin_step(self, task: str, version: int) -> None:
        time.sleep(self._step_seconds)
        with self._lock:
            self._stepping.add(task)
            while self._events and self._events[0].version <= version:
                event = self._events.pop(0)
                if event.delay:
                    threading.Timer(event.delay, self.happen, (event,)).start()
                else:
                    self.happen(event)
        self._do("version", task, (version,))

    def happen(self, event: Event) -> None:
        with self._lock:
            if self._over:
                return  # it comes too late
            if event.kill == "coordinator":
                self._kill_coordinator(event)
            elif event.kill is not None:
                self._kill(event)
            self._counts["worker"] = event.workers or self._counts["worker"]
            self._counts["ps"] = 0 if self._all_reduce else event.servers or self._counts["ps"]
            self._fit(oldest=event.oldest)
        self._wake()

    def kill(self, task: str, *, replace: bool = True) -> None:
        """Have a task die, once, and another one come in its place."""
        role = task.split("-", maxsplit=1)[0]
        # at once: a coordinator that asked in between would hear that nobody else is to come
        with self._lock:
            if task in self.killed:
                return
            self.killed.append(task)
            self._end(task)
            if replace:
                self._targets[role].remove(task)
                self._fit(oldest=False)
        self._wake()

    def _end(self, task: str) -> None:
        """End the process of a task."""
        # it joins before it is known here: then its own thread severs it
        if task in self.members:
            self.sever(task)

    def sever(self, task: str) -> None:
        """Cut every connection of a member at once, as the death of its process would; from any thread."""
        self._severed.add(task)
        cut_control(self.members[task])
        cut_off([link.sock for link in [*self.connections.get(task, ())] if link.open])

    # --- fault points ---------------------------------------------------------------------------------------------

    def flag(self, name: str) -> threading.Event:
        """The flag of that name."""
        with self._lock:
            return self._flags.setdefault(name, threading.Event())

    def _at(self, point: FaultPoint, task: str, *about: Any) -> bool:
        """A member, or the coordinator, has reached a fault point."""
        if point is FaultPoint.CONNECTED:
            self.opened[task, about[0].task] = about[0]
        elif point is FaultPoint.CONNECTION_OPENED:
            self.connections.setdefault(task, []).append(about[0])
            if task in self._severed:
                cut_off([about[0].sock])
        elif point is FaultPoint.TICK and self._cut is self.coordinator:
            raise Fenced("its connections were cut")
        elif point is FaultPoint.PLAN_COMMITTED:
            self.plan = about[0]
        elif point is FaultPoint.APPLY and task in self._slow:
            time.sleep(self._slow[task])
        left_out = self._hook is not None and self._hook(point, task, *about)
        return self._do(point, task, about) or left_out

    def _do(self, point: FaultPoint | ScriptPoint, task: str, about: tuple[Any, ...]) -> bool:
        """Do what the faults say; returns whether the step that follows is to be left out."""
        left_out = False
        moment = Moment(self, task, about)
        for number, fault in enumerate(self._faults):
            if fault.at != point or fault.task not in ("", task) or not self._in_time(fault) or not fault.when(moment):
                continue
            with self._lock:
                self._reached[number] += 1
                now = fault.always or self._reached[number] == fault.nth
            if now:
                for action in fault.do if isinstance(fault.do, Sequence) else (fault.do,):
                    left_out |= bool(action(moment))
        return left_out

    def _in_time(self, fault: Fault) -> bool:
        after, until = fault.after, fault.until
        return (not after or self.flag(after).is_set()) and not (until and self.flag(until).is_set())

    def _kill_coordinator(self, event: Event) -> None:
        assert self._mortal_log is not None
        if event.choice % 3:
            self._mortal_log.doom = ("before", "after")[event.choice % 3 - 1]
        else:
            self._cut = self.coordinator
            cut_coordinator(self.coordinator)

    def _kill(self, event: Event) -> None:
        status = self._status
        if status is None or status.state != "running":
            return
        role = event.kill
        there = [m.task for m in status.members if m.role == role and m.state != "left" and m.task in self.members]
        there = [task for task in there if task not in self.killed]
        # one that can go on stays
        able = [task for task in there if self._staying(status, role) - {task}]
        if able:
            task = able[event.choice % len(able)]
            self.killed.append(task)
            # a job that another worker has to go on with has one copy of each block, too
            if role == "ps" or self._any_worker:
                self._plan_at_death = max(self._plans(), default=0)
            self.sever(task)
            # as the scheduler would, another one is started in its place
            if task in self._targets[role]:
                self._targets[role].remove(task)
                self._counts[role] = max(1, self._counts[role] - 1)

    def _staying(self, status: Status, role: str) -> set[str]:
        """Members that go on if another dies now: workers with weights, servers whose blocks have replicas."""
        active = {m.task for m in status.members if m.role == role and m.state == "active"}
        if (role == "worker" and self._any_worker) or (role == "ps" and self._spec.durability == "none"):
            return {"newcomers", "later ones"}  # the job goes back, and another one comes
        if role == "worker":
            active &= self._stepping
        elif not self._protected():
            return set()
        return active & set(self._targets[role]) - set(self.killed)

    def _protected(self) -> bool:
        """Whether every block has a replica, and no server has died since."""
        done = [line for line in self.log if line.startswith("plan ") and " done " in line]
        whole = bool(done) and bool(re.search(r"replicas of (\d+) of \1 blocks", done[-1]))
        return whole and int(done[-1].split()[1]) > self._plan_at_death

    def _plans(self) -> list[int]:
        """The numbers of plans, as they have been told of."""
        return [int(line.split()[1].rstrip(":")) for line in self.log if line.startswith("plan ")]


def random_events(
    rng: random.Random,
    *,
    first: int = 1,
    last: int,
    kills: Sequence[Literal["worker", "ps", "coordinator"]],
    least_servers: int = 1,
    most_workers: int = 4,
) -> list[Event]:
    """Some resizes and deaths, half of the deaths close to a resize."""
    events = [
        Event(
            rng.randint(first, last), workers=rng.randint(1, most_workers), servers=rng.randint(least_servers, 4),
            oldest=rng.random() < 0.3, delay=rng.choice((0.0, 0.002, 0.01)),
        )
        for _ in range(rng.randint(0, 3))
    ]  # fmt: skip
    for kind in kills:
        at = rng.choice(events).version if events and rng.random() < 0.5 else rng.randint(first, last)
        events.append(
            Event(at, kill=kind, choice=rng.randrange(12), delay=rng.choice((0, 1, 2, 4, 8, 20)) * 1e-3 * rng.random())
        )
    return events
