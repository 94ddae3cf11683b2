"""What the contract suite needs of a resource manager under test, and the local one's version of it."""

from __future__ import annotations

import itertools
import os
import pwd
import signal
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import psutil

from dl2d.core.cluster import Node, task_tag
from dl2d.core.jobs import JobKey, Launch, Owner, Role
from dl2d.core.resource_manager import ResourceManager, RmIdentity, RmJob, RmJobState, TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.local.manager import LocalManager
from dl2d.local.settings import LocalSettings
from dl2d.testing import MemoryManager

#: In the environment of every task of a test, so that its processes are found wherever they hide.
MARK = "DL2D_TEST_MARK"


class Harness(ABC):
    """A manager with at least two nodes of 8 CPU, alone in the cluster, and ways to look behind its back."""

    #: Seconds that a start or an end may take before a test gives up.
    patience: float = 60.0
    #: Prefixes of variables that the manager may add to a task's environment.
    own_variables: tuple[str, ...] = ("DL2_",)
    #: Whether what a task leaves behind when it ends is asked to end before it is killed.
    asks_what_is_left: bool = True
    #: Tests of the contract that this manager cannot pass, with the reason.
    not_applicable: ClassVar[Mapping[str, str]] = {}
    #: A handle of the right form that was never given out.
    unknown_handle: str

    manager: ResourceManager
    owner: Owner
    #: A folder in which the owner may write.
    cwd: Path
    #: Names of nodes that take tasks.
    nodes: tuple[str, ...]

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.job = JobKey("test", self.mark[:8], int(time.time()))
        self._numbers = itertools.count()

    @abstractmethod
    def restart(self) -> None:
        """Put a second manager on the same state in the place of ``manager``, as after a restart of the daemon."""

    def foreign(self) -> str | None:
        """Start a job of three workers by the site's own means, as the owner; its handle, None where there are none."""
        return None

    def spec(
        self,
        script: str,
        *,
        demand: Resources | None = None,
        node: str | None = None,
        env: dict[str, str] | None = None,
        role: Role = Role.WORKER,
    ) -> TaskSpec:
        """A task that runs a shell script."""
        name = f"{role}-{next(self._numbers)}"
        environment = {"PATH": "/usr/bin:/bin", MARK: self.mark, **(env or {})}
        return TaskSpec(
            tag=task_tag(self.job, name),
            job=self.job,
            role=role,
            name=name,
            demand=Resources.of(cpu=1) if demand is None else demand,
            node=self.nodes[0] if node is None else node,
            owner=self.owner,
            launch=Launch(("/bin/sh", "-c", script), str(self.cwd), tuple(environment.items())),
        )

    def wait_until(self, predicate: Callable[[], bool], what: str = "what the test waits for") -> None:
        """Poll until something holds; fails after ``patience`` seconds."""
        deadline = time.monotonic() + self.patience
        while not predicate():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come within {self.patience:g} s; {self.manager.listing()}")
            time.sleep(0.02)

    def job_of(self, handle: str) -> RmJob:
        """The job with this handle as the manager lists it."""
        found = [job for job in self.manager.listing().jobs if job.handle == handle]
        assert len(found) == 1, f"{handle} is listed {len(found)} times"
        return found[0]

    def stop(self, *handles: str, grace: float) -> None:
        """Have the manager stop the jobs with these handles; a handle that it does not list has no user and mark."""
        listed = {job.handle: job.identity for job in self.manager.listing().jobs}
        self.manager.stop([listed.get(handle, RmIdentity(handle, 0, "", "")) for handle in handles], grace)

    def wait_for(self, handle: str, *states: RmJobState) -> RmJob:
        """Wait until the job is in one of these states."""
        seen: list[RmJob] = []

        def there() -> bool:
            seen[:] = [self.job_of(handle)]
            return seen[0].state in states

        self.wait_until(there, f"{handle} in {', '.join(states)}")
        return seen[0]

    def wait_for_end(self, handle: str) -> RmJob:
        """Wait until the job has ended."""
        return self.wait_for(handle, *(state for state in RmJobState if state.ended))

    def wait_for_file(self, name: str) -> str:
        """Wait until a file in the working folder has text that ends in a newline, and return the text."""
        path = self.cwd / name
        self.wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"file {name}")
        return path.read_text()

    def node(self, name: str | None = None) -> Node:
        """A node as the manager lists it."""
        wanted = self.nodes[0] if name is None else name
        return next(node for node in self.manager.listing().nodes if node.name == wanted)

    def processes(self) -> list[psutil.Process]:
        """Every living process of this test's tasks, whatever the manager says."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def wait_until_quiet(self) -> None:
        """Wait until no process of the test's tasks is left, without a word to the manager."""
        deadline = time.monotonic() + self.patience
        while self.processes():
            assert time.monotonic() < deadline, f"still running after {self.patience:g} s: {self.processes()}"
            time.sleep(0.02)

    def end_all(self) -> None:
        """Stop every job that still runs, and check that nothing is left."""
        self.manager.stop([job.identity for job in self.manager.listing().jobs if not job.state.ended], 0)
        try:
            self.wait_until(lambda: all(job.state.ended for job in self.manager.listing().jobs), "the end of all jobs")
            assert not self.processes(), "processes are left although all jobs have ended"
            assert all(node.used == NO_RESOURCES for node in self.manager.listing().nodes)
        finally:
            for process in self.processes():
                process.send_signal(signal.SIGKILL)


class MemoryHarness(Harness):
    """The simulator's manager, whose tasks run nothing: for the part of the contract that needs no process."""

    unknown_handle = "m999"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.owner = Owner("user", os.getuid(), os.getgid())
        self.cwd = folder
        self.nodes = ("node-1", "node-2")
        self.manager = MemoryManager([Node(name, Resources.of(cpu=8)) for name in self.nodes], time.time)

    def restart(self) -> None:
        raise NotImplementedError("what it knows is in memory only")


class LocalHarness(Harness):
    """The local manager with two nodes, in a folder of its own."""

    unknown_handle = "0" * 32

    def __init__(self, folder: Path) -> None:
        super().__init__()
        account = pwd.getpwuid(os.getuid())
        self.owner = Owner(account.pw_name, os.getuid(), os.getgid())
        self.cwd = folder / "work"
        self.cwd.mkdir()
        self.state_dir = folder / "state"
        self.nodes = ("node-1", "node-2")
        #: Seconds by which the manager's clocks are ahead, and by how much more its time of day.
        self.ahead, self.set_forward = 0.0, 0.0
        self.manager = self.open()

    def settings(self) -> dict[str, object]:
        """Settings as the config file would have them."""
        return {
            "state_dir": str(self.state_dir),
            "nodes": [{"name": "node", "count": 2, "resources": {"cpu": 8, "gpu": 2}}],
        }

    def open(self) -> ResourceManager:
        """A manager on the state folder."""
        return LocalManager(
            LocalSettings.parse(self.settings()),
            clock=lambda: time.time() + self.ahead + self.set_forward,
            timer=lambda: time.monotonic() + self.ahead,
        )

    def restart(self) -> None:
        self.manager.close()
        self.manager = self.open()

    def supervisors(self) -> list[psutil.Process]:
        """Living supervisors of this test's tasks."""
        found = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
                if line and f":{self.job.slug}:" in line[-1] and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def end_all(self) -> None:
        try:
            super().end_all()
            self.wait_until(lambda: not self.supervisors(), "the end of all supervisors")
        finally:
            self.manager.close()
