"""The control connection of a worker, kept by a thread of its own while the script's thread computes."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, Required, TypedDict

from pslite.errors import JobFailed, PsliteError
from pslite.fault_points import FaultHook, FaultPoint, FaultPoints
from pslite.job.job_spec import JobSpec
from pslite.job.job_status import TERMINATED
from pslite.job.thread_stacks import dump_stacks, place_of
from pslite.net.authentication import Identity
from pslite.net.coordinator_client import JOIN_SECONDS, CoordinatorClient
from pslite.net.messages import (
    DumpStacks,
    Exit,
    Failed,
    FromCoordinator,
    JobEnded,
    Join,
    Leave,
    Message,
    PlanDone,
    Prepare,
    Refused,
    RollBack,
    Stacks,
)
from pslite.worker.progress_reports import Progress, ProgressReports
from pslite.worker.script_exit import FAIL_GRACE_SECONDS, ScriptProcess
from pslite.worker.training_session import Drained

#: maximum number of characters of `Stacks.place`
_MAX_PLACE = 1000
#: the longest time between two looks at the control connection
_LOOK_SECONDS = 0.2
#: how much longer than the lease the end of a process may wait for its control thread
_END_SECONDS = 1.0


class MemberOptions(TypedDict, total=False):
    """Arguments of `Membership` that every kind of worker takes and passes on."""

    say: Required[Callable[[str], None]]
    join_timeout: float
    process: ScriptProcess | None
    faults: FaultHook | None


class ControlHandler(Protocol):
    """What differs between kinds of workers in the control thread."""

    def hear(self, message: FromCoordinator) -> None:
        """Take a message that is not the same for all kinds of workers."""

    def wake(self) -> None:
        """Make the user's thread look at what the control thread has heard."""

    def waits_for(self) -> tuple[str, ...]:
        """Return the tasks from which this worker waits for data, as far as known."""


class Membership(ABC):
    """Base of all workers: joining, heartbeats, progress reports, and the orders to leave, to go back or to end.

    Parameters
    ----------
    identity
        the worker's, with the job's token.
    coordinator
        host:port of the coordinator.
    say
        takes lines for the user.
    join_timeout
        seconds to reach the coordinator.
    process
        the process around the worker; None for one that runs a script.
    faults
        called at fault points, by tests.

    """

    #: set before the worker joins
    _handler: ControlHandler

    def __init__(
        self,
        identity: Identity,
        coordinator: str,
        *,
        say: Callable[[str], None],
        join_timeout: float = JOIN_SECONDS,
        process: ScriptProcess | None = None,
        faults: FaultHook | None = None,
    ) -> None:
        self._progress = Progress()
        self._reports = ProgressReports(self._progress, self._send)
        self._identity = identity
        self._faults = FaultPoints(faults, identity.task)
        self._coordinator = coordinator
        self._say = say
        self._join_timeout = join_timeout
        self._process = process or ScriptProcess()
        self._job = ""
        #: set by the control thread: why the job has failed
        self._failure = ""
        #: set by the control thread: why the job goes back to a checkpoint
        self._rolled_back = ""
        #: whether the worker is to leave, and after which version; -1: any
        self._exit = False
        self._last = -1
        self._over = False
        self._raised = False
        self._client: CoordinatorClient | None = None
        self._thread: threading.Thread | None = None
        self._script_thread = threading.get_ident()

    @property
    @abstractmethod
    def spec(self) -> JobSpec:
        """The job as this worker's script describes it; must equal the other workers'."""

    @property
    def version(self) -> int:
        """Completed updates."""
        return self._progress.version

    # --- joining and leaving --------------------------------------------------------------------------------------

    def _open(self) -> CoordinatorClient:
        """Connect to the coordinator."""
        try:
            self._client = CoordinatorClient(self._identity, self._coordinator, timeout=self._join_timeout)
        except BaseException:
            self._close()
            raise
        self._job = self._client.job
        self._identity = self._client.identity
        return self._client

    def _join(self, spec: JobSpec | None, **place: str) -> None:
        """Become a member, and answer for this process from now on; `place` says where others reach it."""
        self._process.enter(self._script_ended, self._script_raised)
        self._send(Join(host=socket.gethostname(), pid=os.getpid(), spec=spec, **place))
        self._thread = threading.Thread(target=self._control_loop, name="pslite-control", daemon=True)
        self._thread.start()

    def _script_ended(self) -> None:
        client = self._client
        assert client is not None
        if not self._over:
            if not self._raised and self._progress.entered and self.spec.open:
                self.finish()
            elif not self._raised and self._progress.entered and self.version < self.spec.total_versions:
                self._send(
                    Failed(
                        reason=f"its script ended at version {self.version} of {self.spec.total_versions}, "
                        "before the loop over the job was complete"
                    )
                )
            self._send(Leave())
            self._over = True
        if self._thread is not None:
            # until the coordinator, or the one that takes its place, has all messages
            self._thread.join(client.lease + _END_SECONDS)
        client.close()
        self._close()

    @abstractmethod
    def finish(self) -> None:
        """Say that this worker has come to the end of its loop."""

    @abstractmethod
    def _close(self) -> None:
        """Close what else is open; the control thread has ended."""

    def _script_raised(self, error: BaseException) -> None:
        """Tell the coordinator what the user's script raised.

        A script that ends with the status of SIGTERM has handled it: it is lost as if the signal had killed it.
        """
        if isinstance(error, SystemExit) and error.code == TERMINATED:
            self._over = True
        elif not isinstance(error, JobFailed) and not self._over:
            text = f"raised {type(error).__name__}: {error}"
            if isinstance(error, SystemExit):
                text = f"called sys.exit({error.code!r})"
            self._send(Failed(reason=f"its script {text[:2000]}"))
        self._raised = True

    def _check(self) -> None:
        """Look at what the control thread has heard; in the user's thread."""
        if self._failure:
            self._over = True
            raise JobFailed(self._failure)
        if self._rolled_back:
            self._over = True
            self._process.begin_again(self._rolled_back)
        if self._exit and self._progress.may_leave_after(self._last):
            self._send(Leave())
            self._over = True
            raise Drained

    # --- the control thread ---------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self._client is not None:
            self._client.send(message)

    def _control_loop(self) -> None:
        client = self._client
        assert client is not None
        beaten = time.monotonic()
        with selectors.DefaultSelector() as selector:
            client.watch(selector, None)
            while not (self._over and client.settled):
                selector.select(min(_LOOK_SECONDS, client.heartbeat))
                try:
                    for message in client.look():
                        self._handle(message)
                except PsliteError as error:
                    if not self._over:
                        self._job_failed(str(error))
                    return
                now = time.monotonic()
                if now - beaten >= client.heartbeat:
                    beaten = now
                    self._reports.report(force=True)

    def _handle(self, message: FromCoordinator) -> None:
        if self._faults.reached(FaultPoint.MESSAGE, message):
            return
        if isinstance(message, Prepare):
            self._reports.resize_began()
        elif isinstance(message, PlanDone):
            self._reports.resize_done(message.plan)
        if isinstance(message, Exit):
            if message.version < 0:
                self._say(message.reason)
            self._last = message.version
            self._exit = True
        elif isinstance(message, RollBack):
            self._rolled_back = message.reason
            if self._outlasts_the_script():
                self._process.begin_again(message.reason)
        elif isinstance(message, JobEnded):
            self._job_failed(message.reason)
        elif isinstance(message, DumpStacks):
            dump_stacks()
            computes = self._progress.computes
            place, waits_for = place_of(self._script_thread), () if computes else self._handler.waits_for()
            self._send(Stacks(computes=computes, place=place[-_MAX_PLACE:], waits_for=waits_for))
        elif isinstance(message, Refused):
            self._job_failed(f"the coordinator refused {self._identity.task}: {message.reason}")
        else:
            self._handler.hear(message)
        self._handler.wake()

    def _job_failed(self, reason: str) -> None:
        self._failure = reason
        if self._outlasts_the_script():
            self._process.abandon(reason)

    def _outlasts_the_script(self) -> bool:
        """Wait for the user's thread to notice what has happened; returns whether it does not."""
        self._handler.wake()
        deadline = time.monotonic() + FAIL_GRACE_SECONDS
        while not self._over and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self._over
