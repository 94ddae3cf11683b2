"""What the modules of a coordinator work on: the job's state, its settings, and its ways to members and user."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from pslite.coordinator.stall_detector import ProgressWatch
from pslite.coordinator.state.coordinator_settings import Settings
from pslite.coordinator.state.job_state import JobState, MemberState
from pslite.job.job_spec import JobSpec
from pslite.job.load_balancing import LoadBalancer
from pslite.job.sample_assignment import SampleAssigner
from pslite.job.step_time_and_usage_statistics import ResizeSteps, Usage
from pslite.net.messages import AssignSamples, Factors, JobEnded, Message, Vector
from pslite.net.tls import Encryption
from pslite.numeric.norms import Squares
from pslite.storage.disk_thread import DiskThread


class StepRecord(msgspec.Struct):
    """Answers to members that differ in every step, which the next coordinator has to give again as they were.

    They are written to the log apart from the state, which is large.
    """

    #: by what is scaled, gradient or update, the factors of the last step
    factors: dict[str, Factors] = {}
    #: by name and size of a data set
    assigners: dict[tuple[str, int], SampleAssigner] = {}
    #: by worker, the last answer to its question for samples
    answers: dict[str, AssignSamples] = {}


@dataclass(eq=False)
class AwaitedSteps:
    """Step times around a resize that are awaited of the workers that trained before the plan and train under it."""

    plan: int
    workers: set[str]
    #: monotonic, in seconds; after that the plan is reported without those that are missing
    until: float
    reported: list[ResizeSteps] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """A job under a coordinator.

    `state` and `step_record` are written to the log, so that another coordinator can continue the job.  All other
    fields are measured again, said again by members, or concern this coordinator alone.
    """

    state: JobState
    settings: Settings
    #: takes lines for the user
    say: Callable[[str], None]
    #: measures how much each member should do
    balance: LoadBalancer
    #: what the user wants encrypted; "" for all of it that can be
    encrypt: Encryption | Literal[""] = ""
    #: tasks that have a task agent, which reports how their processes end
    agents: Collection[str] = ()
    #: calls an action once the present state is written and the messages that follow from it are sent
    then: Callable[[Callable[[], None]], None] = lambda action: action()
    #: completes checkpoints
    disk: DiskThread = field(default_factory=DiskThread)
    #: versions of checkpoints that are being completed
    completing: set[int] = field(default_factory=set)
    #: since when a job that is done waits for its last checkpoint only, monotonic, in seconds; 0: it does not
    last_checkpoint_since: float = 0.0
    #: whether the membership source is to be told of the state at once
    urgent: bool = True

    #: by task, what its processes used last
    usage: dict[str, Usage] = field(default_factory=dict)
    #: of the last steps; None: not known yet
    loss: float | None = None
    #: step times that are awaited around the last plan
    awaited_steps: AwaitedSteps | None = None
    #: since when the job makes no progress
    watch: ProgressWatch = field(default_factory=ProgressWatch)
    #: monotonic times in seconds, and the versions reached then
    progress: list[tuple[float, int]] = field(default_factory=list)
    #: the epoch of which the user was told last, and all slow members of which the user was told
    epoch_reported: int = 0
    slow_reported: set[str] = field(default_factory=set)

    #: by version and of what, the sums of squares of the blocks that have theirs
    squares: dict[tuple[int, Vector], dict[int, Squares]] = field(default_factory=dict)
    #: written to the log beside the state when it has changed
    step_record: StepRecord = field(default_factory=StepRecord)
    step_record_changed: bool = False

    #: after a pause of this coordinator: until when members may reconnect, which ones, and those that have done so
    lenient_until: float = 0.0
    lenient: frozenset[str] = frozenset()
    reconnected: set[str] = field(default_factory=set)

    @property
    def spec(self) -> JobSpec:
        """The job's specification, which is known as long as there is a plan."""
        assert self.state.spec is not None
        return self.state.spec

    def tell(self, tasks: Iterable[str], message: Message) -> None:
        """Queue a message to members that have not left; it is sent once the state is written."""
        for task in tasks:
            member = self.state.members.get(task)
            if member is not None and member.present:
                member.channel.send(message)

    def give_up(self, member: MemberState, why: str) -> None:
        """Count a member as gone; if its process lives it is told to end, and so is its task agent."""
        member.state, member.given_up = "left", True
        member.channel.send(JobEnded(reason=f"{member.task} was given up: {why}"))

    def fail(self, reason: str) -> None:
        """End the job as failed."""
        self.end("failed", reason)

    def end(self, state: Literal["failed", "cancelled"], reason: str) -> None:
        """End the job before it has reached its last version; its user and its members are told."""
        self.state.state, self.state.reason = state, reason
        self.say(f"job {state}: {reason}")
        self.tell(self.state.members, JobEnded(reason=reason))
