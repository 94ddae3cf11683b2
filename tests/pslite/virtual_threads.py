"""Threads that run one at a time, on a virtual clock: which one goes on, and when, depends on a seed alone.

`Kernel.installed` gives modules stand-ins for `time`, `threading`, `queue` and `uuid`.  What would block there,
blocks in virtual time: when every thread waits, the clock goes on to the next timer.  Threads belong to processes,
which can be paused, as by SIGSTOP, and killed, as by SIGKILL.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import queue
import random
import sys
import threading
import time
import traceback
import types
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: of a switch between threads, in virtual seconds: a loop that polls gets somewhere
_SWITCH_SECONDS = 20e-6
#: how often a thread is interrupted where it could go on
_PREEMPTION = 0.05


class Killed(BaseException):
    """The simulation is over: a thread that is left unwinds."""


@dataclass(eq=False)
class Process:
    """Threads that are paused and killed together; on a host of their own."""

    name: str
    paused: bool = False
    dead: bool = False


class VirtualThread:
    """A thread; has what is used of `threading.Thread`."""

    def __init__(self, kernel: Kernel, process: Process, target: Callable[..., Any], args: Any, name: str) -> None:
        self.kernel, self.process, self.name = kernel, process, name
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        #: identifies what it waits for; None: it could go on
        self.waits: object = None
        self.woken = False
        self._target, self._args = target, args
        self._started = self._ended = False
        self._joining: list[VirtualThread] = []
        self.real = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._started = True
        self.kernel.threads.append(self)
        self.kernel.ready.append(self)
        self.real.start()

    def is_alive(self) -> bool:
        return self._started and not self._ended and not (self.process.dead and not self.kernel.closing)

    def join(self, timeout: float | None = None) -> None:
        kernel = self.kernel
        deadline = None if timeout is None else kernel.now + timeout
        while self.is_alive() and not kernel.late(deadline):
            self._joining.append(kernel.current)
            kernel.park(kernel.left(deadline))

    def _run(self) -> None:
        ident = _thread.get_ident()
        self.kernel.idents.add(ident)
        self.gate.acquire()
        try:
            if not self.kernel.closing:
                self._target(*self._args)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  (a thread's end must not go unseen)
            self.kernel.errors.append(f"{self.process.name}, {self.name}: {traceback.format_exception(error)}")
        self._ended = True
        for each in self._joining:
            self.kernel.wake(each)
        self.kernel.idents.discard(ident)
        self.kernel.leave()


class Kernel:
    """Scheduler and clock of a simulation.

    Parameters
    ----------
    seed
        on which everything depends.
    most
        virtual seconds after which the simulation is given up.

    """

    def __init__(self, seed: int, *, most: float = 3600.0) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.threads: list[VirtualThread] = []
        self.ready: list[VirtualThread] = []
        self.errors: list[str] = []
        self.closing = False
        self.switches = 0
        #: of the operating system's threads that are the kernel's
        self.idents = {_thread.get_ident()}
        #: checksum of all that was scheduled: the same seed has the same
        self.trace = 0
        self._until = self.now + most
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        #: depth of sections in which no thread is interrupted
        self.undivided = 0
        self.current = self._root = VirtualThread(self, Process("simulation"), lambda: None, (), "simulation")

    # --- scheduling -----------------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Call something at a time; it must not wait."""
        heapq.heappush(self._timers, (when, next(self._number), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def late(self, deadline: float | None) -> bool:
        return deadline is not None and self.now >= deadline

    def left(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self.now)

    def park(self, timeout: float | None) -> bool:
        """Have the current thread wait until it is woken, or time is over; returns whether it was woken."""
        assert not self.undivided, "nobody may wait here"
        if self.closing:
            raise Killed
        thread, token = self.current, object()
        thread.waits, thread.woken = token, False
        if timeout is not None:
            self.after(timeout, lambda: self._expire(thread, token))
        self._switch()
        return thread.woken

    def wake(self, thread: VirtualThread) -> None:
        if thread.waits is not None:
            thread.waits, thread.woken = None, True
            self.ready.append(thread)

    def _expire(self, thread: VirtualThread, token: object) -> None:
        if thread.waits is token:
            thread.waits = None
            self.ready.append(thread)

    def interrupt(self, probability: float = _PREEMPTION) -> None:
        """Let other threads run, perhaps."""
        if self.closing:
            if self.current is not self._root:
                raise Killed
        elif not self.undivided and self.rng.random() < probability:
            self.ready.append(self.current)
            self._switch()

    def _switch(self) -> None:
        thread, following = self.current, self._next()
        if following is not thread:
            self.current = following
            following.gate.release()
            thread.gate.acquire()
        if self.closing and thread is not self._root:
            raise Killed

    def leave(self) -> None:
        """The current thread has ended."""
        following = self._root if self.closing else self._next()
        self.current = following
        following.gate.release()

    def _next(self) -> VirtualThread:
        while True:
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()
            able = [each for each in self.ready if not each.process.paused and not each.process.dead]
            if able:
                break
            if not self._timers or self._timers[0][0] > self._until:
                able = [self._root]  # nothing more will happen in time
                break
            self.now = self._timers[0][0]
        following = able[0] if len(able) == 1 else self.rng.choice(able)
        if following in self.ready:
            self.ready.remove(following)
        self.now += _SWITCH_SECONDS
        self.switches += 1
        self.trace = zlib.crc32(f"{self.now:.6f} {following.process.name} {following.name}".encode(), self.trace)
        return following

    def run(self, process: Process, main: Callable[[], None]) -> bool:
        """Run a process to its end; returns whether it came to that in time."""
        thread = VirtualThread(self, process, main, (), "main")
        thread.start()
        with contextlib.suppress(Killed):
            self._root.waits = object()
            thread._joining.append(self._root)
            self._switch()
        over = not thread.is_alive()
        self.closing = True
        for each in self.threads:  # those that unwind may start others
            if each.is_alive():
                self.current = each
                each.gate.release()
                self._root.gate.acquire()
            each.real.join()
        return over

    def start(self, process: Process, target: Callable[..., Any], *args: Any, name: str = "main") -> None:
        VirtualThread(self, process, target, args, name).start()

    # --- stand-ins ------------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        self.park(max(0.0, seconds))

    def stand_ins(self) -> dict[str, types.SimpleNamespace]:
        """What modules get in the place of others."""

        def thread(*, target: Any, args: Any = (), name: str = "thread", daemon: bool = False) -> VirtualThread:
            return VirtualThread(self, self.current.process, target, args, name)

        return {
            "time": _like(time, monotonic=lambda: self.now, sleep=self.sleep),
            "threading": _like(
                threading, Thread=thread, Lock=lambda: Lock(self), RLock=lambda: Lock(self), Timer=self._timer,
                Event=lambda: Event(self), Condition=None,
            ),
            "queue": _like(queue, SimpleQueue=lambda: SimpleQueue(self), Queue=None),
            "uuid": _like(uuid, uuid4=lambda: uuid.UUID(int=self.rng.getrandbits(128), version=4)),
        }  # fmt: skip

    def _timer(self, seconds: float, what: Callable[..., None], args: Any = ()) -> VirtualThread:
        def late() -> None:
            self.sleep(seconds)
            what(*args)

        return VirtualThread(self, self.current.process, late, (), "timer")

    @contextlib.contextmanager
    def installed(self, packages: tuple[str, ...], more: dict[str, types.SimpleNamespace]) -> Iterator[None]:
        """Give the stand-ins, and `more`, to the modules of packages."""
        before: list[tuple[types.ModuleType, str, object]] = []
        for name, virtual in {**self.stand_ins(), **more}.items():
            real = sys.modules[name]
            stand_in = _ForThreads(self, virtual, real)
            for module in [m for n, m in sys.modules.items() if n.split(".")[0] in packages]:
                if vars(module).get(name) is real:
                    before.append((module, name, real))
                    setattr(module, name, stand_in)
        try:
            yield
        finally:
            for module, name, real_one in before:
                setattr(module, name, real_one)


class _ForThreads:
    """A module's stand-in for the kernel's threads; for others, which an earlier test may have left, the module."""

    def __init__(self, kernel: Kernel, virtual: types.SimpleNamespace, real: types.ModuleType) -> None:
        self._kernel, self._virtual, self._real = kernel, virtual, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._virtual if _thread.get_ident() in self._kernel.idents else self._real, name)


def _like(module: types.ModuleType, **others: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{**vars(module), **others})


@dataclass(eq=False)
class Lock:
    """`threading.RLock`, and `Lock`, which nobody takes twice."""

    kernel: Kernel
    _owner: VirtualThread | None = None
    _depth: int = 0
    _waiting: deque[VirtualThread] = field(default_factory=deque)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = self.kernel
        kernel.interrupt()
        while self._owner not in (None, kernel.current):
            if not blocking:
                return False
            self._waiting.append(kernel.current)
            kernel.park(None)
        self._owner = kernel.current
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            while self._waiting:
                self.kernel.wake(self._waiting.popleft())

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False)
class Undivided:
    """A lock for what no thread is interrupted in: of the test's own data, which outlives a paused process."""

    kernel: Kernel

    def __enter__(self) -> None:
        self.kernel.undivided += 1

    def __exit__(self, *_: object) -> None:
        self.kernel.undivided -= 1


@dataclass(eq=False)
class Event:
    """`threading.Event`."""

    kernel: Kernel
    _set: bool = False
    _waiting: list[VirtualThread] = field(default_factory=list)

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for each in self._waiting:
            self.kernel.wake(each)
        self._waiting.clear()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        kernel = self.kernel
        deadline = None if timeout is None else kernel.now + timeout
        while not self._set and not kernel.late(deadline):
            self._waiting.append(kernel.current)
            kernel.park(kernel.left(deadline))
        return self._set


@dataclass(eq=False)
class SimpleQueue:
    """`queue.SimpleQueue`."""

    kernel: Kernel
    _items: deque[Any] = field(default_factory=deque)
    _waiting: deque[VirtualThread] = field(default_factory=deque)

    def put(self, item: object) -> None:
        self._items.append(item)
        while self._waiting:
            self.kernel.wake(self._waiting.popleft())
        self.kernel.interrupt()

    def get(self) -> Any:
        while not self._items:
            self._waiting.append(self.kernel.current)
            self.kernel.park(None)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items
