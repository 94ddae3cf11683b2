"""Whole jobs on a simulated network and a virtual clock: deterministic by seed, and a hundred times faster than time.

Coordinator, servers and workers are those of `rehearsal`, each a process of `virtual_threads` on a host of its own.  A
random schedule has the network cut, slow or broken between them, processes paused or killed, and disks stalled.
"""

from __future__ import annotations

import random
import re
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs
from own_loop import KINDS as OPEN_KINDS
from own_loop import STEPS, own_loop
from rehearsal import BEFORE_ITS_FILES, KINDS, Event, Fault, Outcome, Rehearsal, job, model_of, static_digest
from virtual_network import Network
from virtual_threads import Kernel, Process, Undivided

from pslite.coordinator import Settings
from pslite.coordinator.stall_detector import ProgressRule
from pslite.errors import PsliteError
from pslite.fault_points import FaultPoint
from pslite.job.job_spec import JobSpec
from pslite.job.job_status import Status
from pslite.job.step_time_and_usage_statistics import ThroughputMeter
from pslite.server.block_state import BlockState
from pslite.server.block_step import Step

#: what is used in production, but for the progress deadline, which is half an hour there
SETTINGS = Settings(progress=ProgressRule(seconds=120.0))
#: virtual seconds that a job without a disturbance takes at most, and those with the worst of them
_LONGEST = 1800.0
_STEP_SECONDS = 0.25
#: of the supervisor: how long a coordinator may say nothing, and until another one is started
_HANG_SECONDS, _RESTART_SECONDS = 5.0, 0.5

Kind = Literal["cut", "cut one way", "isolated", "slow", "break", "pause", "stall", "kill", "lost host", "resize"]
COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Disturbance:
    """Something that happens at a time, in seconds since the first step, and lasts so long."""

    at: float
    what: Kind
    #: indices of those whom it hits, among the processes of then; -1: the coordinator
    who: int
    other: int = 0
    seconds: float = 0.0
    #: of a resize
    workers: int = 0
    servers: int = 0


@dataclass(frozen=True)
class Schedule:
    """A job, and what happens to it."""

    seed: int
    spec: JobSpec
    workers: int
    servers: int
    disturbances: Sequence[Disturbance] = ()
    faults: Sequence[Fault] = ()
    settings: Settings = SETTINGS


@cache
def _usual_sums(spec: JobSpec) -> dict[tuple[int, int], int]:
    """Of a job with one worker and one server, which nothing disturbs: on its own clock, however slow this host is."""
    found: dict[tuple[int, int], int] = {}
    fault = Fault(FaultPoint.APPLY, lambda moment: found.update([_sum_of(*moment.about)]), always=True)
    outcome = SimulatedJob(Schedule(0, spec, 1, 1, faults=[fault]), usual={}).simulate()
    assert outcome.status.version == spec.total_versions, outcome.story
    return found


def _sum_of(block: BlockState, step: Step) -> tuple[tuple[int, int], int]:
    return (block.number, block.version), zlib.crc32(step.views()[-1])


class SimulatedJob(Rehearsal):
    """A rehearsal on a simulated network."""

    def __init__(self, schedule: Schedule, *, usual: Mapping[tuple[int, int], int] | None = None) -> None:
        self.kernel = Kernel(schedule.seed, most=_LONGEST)
        self.network = Network(self.kernel)
        self._schedule = schedule
        spec = schedule.spec
        if usual is None:
            usual = _usual_sums(_plain(spec)) if spec.mode == "exact" else {}
        self._usual = usual
        super().__init__(
            spec, workers=schedule.workers, servers=schedule.servers, faults=schedule.faults, lasting=True,
            step_seconds=_STEP_SECONDS, settings=schedule.settings, model=model_of(spec), patience=_LONGEST,
            encrypt="none",
        )  # fmt: skip
        self._lock = Undivided(self.kernel)  # type: ignore[assignment]
        self.processes: dict[str, Process] = {}
        #: until when disks stall
        self._stalled = 0.0
        #: tasks that a disturbance has hit: they may be given up
        self.disturbed = set[str]()
        #: the newest version that a task has begun since it began, or began again
        self._begun: dict[str, int] = {}
        self._outcome: Outcome | None = None

    def simulate(self) -> Outcome:
        """Go through it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DL2_TRANSPORT", "tcp")
            patch.setattr(ThroughputMeter.__init__, "__defaults__", (lambda: self.kernel.now,))
            with self.kernel.installed(("pslite", "rehearsal", "regression"), self.network.stand_ins()):
                over = self.kernel.run(Process(COORDINATOR), self._main)
        if self._outcome is None:
            assert not over, self.kernel.errors
            status = self._status
            raise AssertionError(
                "\n".join([f"not over after {_LONGEST:g} s: {status}", *self.log, *self.kernel.errors])
            )
        self._outcome.surprises += self.kernel.errors
        return self._outcome

    def _main(self) -> None:
        self.kernel.start(Process("disturbances"), self._disturb)
        self._outcome = self.run()

    # --- processes ------------------------------------------------------------------------------------------------

    def _begin(self, play: Callable[[str], None], task: str) -> threading.Thread:
        process = self.processes[task] = Process(task)
        self.kernel.start(process, play, task, name=task)
        return self.kernel.threads[-1]  # type: ignore[return-value]

    def _end(self, task: str) -> None:
        self.network.kill(self.processes[task])

    def _coordinate(self, token: bytes, log: Path, listener: Any) -> Status | None:
        found: list[Status | None] = []
        process = self.processes[COORDINATOR] = Process(COORDINATOR)
        coordinate = super()._coordinate
        self.kernel.start(process, lambda: found.append(coordinate(token, log, listener)), name="loop")
        thread = self.kernel.threads[-1]
        paused = 0.0
        while thread.is_alive():
            thread.join(_RESTART_SECONDS)
            paused = paused + _RESTART_SECONDS if process.paused else 0.0
            if paused > _HANG_SECONDS:
                self._kill_process(COORDINATOR)
        return found[0] if found else None

    def _kill_process(self, task: str) -> None:
        process = self.processes[task]
        if process.dead:
            return
        self.log.append(f"{self.kernel.now:.3f} {task} is killed")
        if task == COORDINATOR:
            self.network.kill(process)
            assert self._mortal_log is not None
            self._mortal_log.close()
        else:
            self.kill(task)

    def _ended(self, task: str, error: PsliteError) -> None:
        """A task has ended; if it was hit by what happens, another one comes in its place."""
        if task in self.killed or self._over or "the job is over" in str(error):
            return
        # a plan that is not ready in time says so to all members that it waited for: one of them was disturbed
        waited_for = "not ready within" in str(error) and bool(self.disturbed)
        if task not in self.disturbed and COORDINATOR not in self.disturbed and not waited_for:
            super()._ended(task, error)
        self.log.append(f"{self.kernel.now:.3f} {task} has ended: {error}")
        if task in self._targets["worker"] + self._targets["ps"]:
            self.kill(task)

    # --- what happens ---------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        while not self._stepping:
            self.kernel.sleep(0.1)
        first_step = self.kernel.now
        for each in sorted(self._schedule.disturbances, key=lambda each: each.at):
            self.kernel.sleep(max(0.0, first_step + each.at - self.kernel.now))
            if self._over:
                return
            self._happen(each)

    def _happen(self, each: Disturbance) -> None:
        a, b = self._who(each.who), self._who(each.other)
        self.log.append(f"{self.kernel.now:.3f} {each.what} {a} {b} for {each.seconds:.3f} s")
        ways = {"cut": [(a, b), (b, a)], "cut one way": [(a, b)], "isolated": [(a, ""), ("", a)]}
        if each.what in ways:
            self.disturbed |= {a, b} if each.what != "isolated" else {a}
            for way in ways[each.what]:
                self.network.cut(*way)
                self.kernel.after(each.seconds, lambda way=way: self.network.mend(*way))
        elif each.what == "slow":
            self.network.slow[a, ""] = 0.5
            self.kernel.after(each.seconds, lambda: self.network.slow.pop((a, ""), None))
        elif each.what == "break":
            # servers do not connect again: after some seconds one of them is given up
            self.disturbed |= {a, b}
            self.network.break_connection(a, b)
        elif each.what == "pause":
            self.disturbed.add(a)
            self._pause(self.processes[a], each.seconds)
        elif each.what == "stall":
            self._stalled = max(self._stalled, self.kernel.now + each.seconds)
        elif each.what == "kill":
            self._kill_process(a)
        elif each.what == "lost host":
            self._lose_host(a)
        else:
            self.happen(Event(0, workers=each.workers, servers=each.servers))

    def _who(self, index: int) -> str:
        tasks = [task for role in ("ps", "worker") for task in self._targets[role] if task in self.members]
        return COORDINATOR if index < 0 or not tasks else tasks[index % len(tasks)]

    def _pause(self, process: Process, seconds: float) -> None:
        def go_on() -> None:
            process.paused = False

        process.paused = True
        self.kernel.after(seconds, go_on)

    def _lose_host(self, task: str) -> None:
        """Its host has lost its power: nobody is told."""
        if task == COORDINATOR:
            return
        self.processes[task].dead = True
        self.network.cut(task, "")
        self.network.cut("", task)
        self.killed.append(task)
        with self._lock:
            self._targets[task.split("-", maxsplit=1)[0]].remove(task)
            self._fit(oldest=False)
        self._wake()

    # --- what is watched ------------------------------------------------------------------------------------------

    @property
    def _returns(self) -> int:
        """How often the job has gone back."""
        return sum("the job goes back to" in line for line in self.log)

    def _work_once(self, task: str) -> bool:
        # a worker that goes back may begin one more step before it hears of that; then it begins again
        self._begun.pop(task, None)
        return super()._work_once(task)

    def _begin_step(self, task: str, version: int) -> None:
        before, self._begun[task] = self._begun.get(task), version
        if before is not None and version <= before:
            self._surprises.append(f"{task} begins version {version} after version {before}")
        super()._begin_step(task, version)

    def run(self) -> Outcome:
        outcome = super().run()
        # what a coordinator could not write down before it died, the next one does not know
        parts = "\n".join(self.log).split("goes on from its log")
        joins = [Counter(re.findall(r"^(\S+) on .* has joined$", part, re.MULTILINE)) for part in parts]
        twice = [task for part in joins for task, count in part.items() if count > 1 + self._returns]
        if twice:
            self._surprises.append(f"members were accepted more than once: {twice}")
        # what threads of killed processes say while they unwind is nothing that has happened
        outcome.surprises, outcome.log = list(self._surprises), list(self.log)
        return outcome

    def _at(self, point: FaultPoint, task: str, *about: Any) -> bool:
        if point is FaultPoint.DISK and self.kernel.now < self._stalled:
            self.kernel.sleep(self._stalled - self.kernel.now)
        elif point is FaultPoint.APPLY and self._usual:
            at, crc = _sum_of(*about)
            if self._usual.get(at) != crc:
                self._surprises.append(f"{task} has another sum than usual of block {at[0]} at version {at[1]}")
        self.kernel.interrupt()
        return super()._at(point, task, *about)


def _plain(spec: JobSpec) -> JobSpec:
    return structs.replace(spec, checkpoint="", durability="none")


def check(schedule: Schedule) -> SimulatedJob:
    """Go through a schedule; the job must end well, and as if nothing had happened.

    One failure is allowed: nobody else can write the job's files if the worker that does so is lost at the end.
    """
    simulated = SimulatedJob(schedule)
    outcome = simulated.simulate()
    reason = str(outcome.status.reason)
    if BEFORE_ITS_FILES in reason:
        assert outcome.status.version == schedule.spec.total_versions, outcome.story
        assert reason.split(maxsplit=1)[0] in simulated.disturbed, outcome.story
        return simulated
    digest = static_digest(_plain(schedule.spec), model_of(schedule.spec))
    if schedule.spec.open and "the job ends well, since the first worker's script has ended" in outcome.story:
        digest = ""
    outcome.check(digest)
    assert outcome.status.version == (STEPS if schedule.spec.open else schedule.spec.total_versions), outcome.story
    return simulated


#: how the job is kept from losses
BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "servers": {},
    "replicas": {"durability": "durable"},
    "checkpoints": {"checkpoint_every": 10},
}
#: what happens, how often, and for how long: some of it longer than leases, supervisors and TCP bear
_KINDS: Mapping[Kind, tuple[int, tuple[float, ...]]] = {
    "cut": (3, (0.5, 3.0, 8.0, 12.0, 20.0, 45.0)),
    "cut one way": (3, (0.5, 3.0, 8.0, 12.0, 20.0, 45.0)),
    "isolated": (2, (0.5, 3.0, 8.0, 12.0, 20.0, 45.0)),
    "slow": (2, (2.0, 10.0)),
    "break": (3, (0.0,)),
    "pause": (3, (0.5, 2.0, 4.0, 8.0, 12.0, 30.0)),
    "stall": (2, (1.0, 8.0, 15.0, 60.0)),
    "kill": (2, (0.0,)),
    "lost host": (1, (0.0,)),
    "resize": (3, (0.0,)),
}


def random_schedule(seed: int, folder: Path) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    # four, as there were when the seeds of some tests were found
    backend = rng.choice([*BACKENDS, "servers"])
    kind = rng.choice([kind for kind in KINDS if kind != "encrypted"])
    spec = job(**KINDS[kind], **BACKENDS[backend], **({"checkpoint": str(folder)} if backend == "checkpoints" else {}))
    return _random_schedule(seed, rng, spec, least_servers=3 if backend == "replicas" else 1)


def random_open_schedule(seed: int) -> Schedule:
    """The schedule of a seed, for a job whose workers have loops of their own."""
    rng = random.Random(seed)
    durable = rng.random() < 0.5
    spec = own_loop(**OPEN_KINDS[rng.choice(list(OPEN_KINDS))], **(BACKENDS["replicas"] if durable else {}))
    return _random_schedule(seed, rng, spec, least_servers=3 if durable else 1)


def _random_schedule(seed: int, rng: random.Random, spec: JobSpec, *, least_servers: int) -> Schedule:
    what = rng.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()], k=rng.randint(1, 4))
    disturbances = [
        Disturbance(
            round(rng.uniform(0.0, 14.0), 3), each, rng.randint(-1, 5), rng.randint(-1, 5),
            rng.choice(_KINDS[each][1]) * rng.uniform(0.8, 1.2), rng.randint(1, 4), rng.randint(1, 4),
        )
        for each in what
    ]  # fmt: skip
    return Schedule(seed, spec, rng.randint(1, 4), rng.randint(least_servers, 4), disturbances)
