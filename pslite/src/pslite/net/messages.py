"""The control messages, as validated structs. They travel as length-prefixed msgpack; nothing in them is executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from pslite.job.job_spec import JobSpec
from pslite.job.job_status import Cause, Role
from pslite.job.membership_plan import Member, Plan
from pslite.job.message_base_class import WireRecord
from pslite.job.sample_assignment import SampleRange, Seen
from pslite.job.step_time_and_usage_statistics import ResizeSteps, StepTimes, Throughput, Usage

#: the vectors of which sums of squares are reported: the mean gradient (for clipping), or LAMB's update and weights
Vector = Literal["gradient", "update"]
PROTOCOL = 4
MAX_HANDSHAKE_BYTES = 4096
MAX_CONTROL_BYTES = 8 << 20


class Message(WireRecord, tag=True):
    """Base of all messages; the tag is the class name, or an earlier name of the class where one is given."""


# --- handshake, on every connection -------------------------------------------------------------------------------


class Hello(Message):
    """Client: who I am and what this connection is for."""

    protocol: int
    channel: Literal["control", "agent", "data"]
    role: Role
    task: str
    incarnation: str
    nonce: bytes
    #: what it was told that the job encrypts; "" if nothing
    encrypt: Literal["", "none", "control", "all"] = ""


class Challenge(Message):
    """Server: who I am; prove that you know the token."""

    job: str
    task: str
    incarnation: str
    nonce: bytes
    #: what the job encrypts
    encrypt: Literal["none", "control", "all"] = "none"


class Proof(Message):
    """Client: keyed hash over Hello and Challenge."""

    mac: bytes


class Accepted(Message):
    """Server: you are in, and here is my own proof."""

    mac: bytes


class Refused(Message):
    """Server: the connection ends here, for this reason."""

    reason: str


Handshake = Hello | Challenge | Proof | Accepted | Refused


# --- member -> coordinator ----------------------------------------------------------------------------------------


class Join(Message):
    """I am ready to become a member."""

    host: str
    pid: int
    address: str = ""
    local: str = ""
    machine: str = ""
    #: what a worker trains; one with a loop of its own says it later, in `Describe`
    spec: JobSpec | None = None


class Rejoin(Message):
    """I have been here before, and my connection was lost: so many counted messages have I taken, in that term's."""

    taken: int
    term: int


class Taken(Message):
    """Either side: so many counted messages of yours have I taken; forget them."""

    count: int


class Describe(Message):
    """Worker that has joined without a job specification: the specification; later, one with segments added to it."""

    spec: JobSpec


class AtBarrier(Message):
    """Worker: I wait until all workers do."""


class Beat(Message):
    """I am alive; workers add their progress since the last beat."""

    version: int = 0
    loss: float = 0.0
    samples: int = 0
    #: of steps since the beat before that had any
    steps: StepTimes | None = None
    #: the work done since the beat before that had any
    pace: Throughput | None = None
    #: of a resize that is done
    resize: ResizeSteps | None = None


class Ready(Message):
    """Everything that plan needs is open and allocated."""

    plan: int


class Nack(Message):
    """I cannot take part in that plan; `about` names the member at fault, if it is another one."""

    plan: int
    reason: str
    about: str = ""


class Announced(Message, tag="Stamped"):
    """Owner of block 0 (all-reduce: first worker): that plan takes effect at version `first`.

    `first` < 0: the job ends before it could.
    """

    plan: int
    first: int


class Pushed(Message):
    """Worker: I was let to push under that plan after waiting so long; None if I have just joined."""

    plan: int
    suspension_ms: float | None


class Drained(Message):
    """Worker: my last step before that plan is pushed; nothing is left to do for me."""

    plan: int


class Moved(Message):
    """Server: all my blocks are where that plan wants them."""

    plan: int
    sent_bytes: int
    move_ms: float


class Reassigned(Message, tag="TakenOver"):
    """Server: from now on I take the nodes of that `Reassign` from anybody."""

    number: int


class Copies(Message):
    """Server: which versions of the state I have of the blocks of that `Census`, as their owner or not."""

    number: int
    versions: dict[int, int]


class Promoted(Message):
    """Server: from now on blocks are owned as that `Promote` says."""

    number: int


class Restored(Message):
    """Chief: the job goes on from a checkpoint of that version."""

    version: int


class Saved(Message):
    """Server: those blocks, as of that version, are on disk in the file `name`."""

    version: int
    name: str
    sha256: str
    blocks: tuple[int, ...]


class NotSaved(Message):
    """Server: there will be no checkpoint of that version, for this reason."""

    version: int
    reason: str


class Norm(Message):
    """Server: sums of squares in some blocks, in the step from that version: of the mean gradient, or for LAMB of the
    weights and of the update of each piece of a tensor (`pslite.numeric.norms.Squares`).
    """

    version: int
    squares: dict[int, tuple[float, ...]]
    of: Vector = "gradient"


class Publish(Message):
    """Worker of an all-reduce job: the others of that plan need this to reach me."""

    plan: int
    key: str
    value: bytes


class Broken(Message):
    """Worker of an all-reduce job: the exchange with the others of that plan has failed, and they may not know why."""

    plan: int
    reason: str


class Finished(Message):
    """Worker: I have the final weights."""

    version: int
    #: whether it is the one that writes files; in an open job, elsewhere that is said by `Complete`
    chief: bool = False


class AskSamples(Message):
    """Worker of an open job: assign me `count` samples of that data set; sent again if the answer does not come."""

    number: int
    dataset: str
    samples: int
    count: int
    version: int
    seen: Seen


class Digests(Message):
    """Server, or worker of an all-reduce job: SHA-256 of the weights of each of my blocks."""

    blocks: dict[int, bytes]


class Failed(Message):
    """Member: I cannot go on; the job fails with this reason."""

    reason: str


class Severed(Message):
    """Member: my connection to that one broke and cannot be opened again, although it has not been reported gone."""

    task: str
    reason: str


class Stacks(Message):
    """What I do, as `DumpStacks` asks; the stacks of my threads are in my log."""

    #: whether a worker's script computes, and does not wait for others
    computes: bool = False
    #: file, line and function in which the script is
    place: str = ""
    #: tasks from which I wait for data
    waits_for: tuple[str, ...] = ()


class Leave(Message):
    """Member: my process ends in good order."""


class AgentExit(Message):
    """dl2-run: the process of my task ended."""

    pid: int
    status: int
    signal: int
    cause: Cause
    #: what is known beyond that
    text: str
    #: of its whole life; None if there was none
    usage: Usage | None = None
    #: path and last lines of its error output, after a failure; "" where that is no file
    output: str = ""


class AgentUsage(Message):
    """dl2-run: what the processes of my task use."""

    usage: Usage


# --- coordinator -> member ----------------------------------------------------------------------------------------


class Welcome(Message):
    """You have joined. If `lasting`, a coordinator of a later term may take this one's place at the same address."""

    heartbeat_seconds: float
    lease_seconds: float
    lasting: bool = False
    term: int = 0


class Resumed(Message):
    """You are connected again; so many counted messages of yours have I taken."""

    taken: int
    term: int


class Alive(Message):
    """The coordinator is alive."""


class Seat(Message):
    """To a worker that has not said yet what it trains: its rank, and the number of workers, until the first plan."""

    rank: int
    workers: int


class BarrierOpen(Message):
    """To a worker: all have come to the barrier."""

    #: whether others have trained meanwhile: the servers have newer weights
    missed_steps: bool = False


class AssignSamples(Message):
    """To a worker of an open job: the answer to its `AskSamples` of that number."""

    number: int
    samples: SampleRange


class Prepare(Message):
    """Open and allocate what plan needs, then answer Ready or Nack; nothing takes effect yet.

    `previous` is the last completed plan: its servers send a joining worker its first weights.  With `recover` the
    process group of that plan is broken, and this plan replaces it as soon as it is ready (all-reduce).
    """

    plan: Plan
    previous: Plan | None
    spec: JobSpec
    recover: bool = False
    #: no worker has weights yet: the first one provides them (all-reduce)
    fresh: bool = False
    #: how long the job may make no progress, in seconds; 0: for ever
    progress_seconds: float = 0.0


class Abort(Message):
    """Forget that plan."""

    plan: int
    reason: str


class Begin(Message):
    """To the chief: send the initial weights to the owners under that (first) plan.

    They are those of the checkpoint of that version, if the job goes back to one; -1: of whatever the job begins with.
    """

    plan: int
    checkpoint: int = -1


class Commit(Message):
    """To the owner of block 0 (all-reduce: the first worker): let that plan take effect as soon as possible."""

    plan: int


class PlanDone(Message):
    """Everybody has moved to that plan: forget the one before."""

    plan: int


class Reassign(Message, tag="TakeOver"):
    """Workers are gone or away, and others do their part: by plan, the tree nodes that anybody of the plan may push (to
    a server), or that you push from now on beside your own (to a worker).  All others are pushed by their own workers.
    """

    number: int
    gone: tuple[str, ...]
    nodes: dict[int, tuple[int, ...]]
    #: workers that wait at a barrier, to which a server sends no weights until they ask for them
    away: tuple[str, ...] = ()


class Census(Message):
    """To a server: those servers are gone; take nothing more from them, and say what you have of those blocks.

    What is said stays so until a `Promote` comes: no step is applied to these blocks.
    """

    number: int
    gone: tuple[str, ...]
    blocks: tuple[int, ...]


class Promote(Message):
    """Servers are gone, and under every plan that is prepared others own their blocks."""

    number: int
    gone: tuple[str, ...]
    #: new owners, each with the numbers of its blocks
    owned: tuple[tuple[Member, tuple[int, ...]], ...]

    @classmethod
    def by_block(cls, number: int, gone: tuple[str, ...], owners: Mapping[int, Member]) -> Promote:
        """Make the message from the new owner of each block."""
        blocks: dict[str, list[int]] = {}
        members = {owner.task: owner for owner in owners.values()}
        for block, owner in owners.items():
            blocks.setdefault(owner.task, []).append(block)
        return cls(number=number, gone=gone, owned=tuple((members[task], tuple(blocks[task])) for task in blocks))

    @property
    def owners(self) -> dict[int, Member]:
        """The new owner of each block."""
        return {block: owner for owner, blocks in self.owned for block in blocks}


class Factors(Message):
    """To a server: factors computed from all servers' sums of squares, for the step after `version`.

    `of` "gradient": the clip factor of all gradients, at key 0; "update": LAMB's trust ratios, by number of the tensor.
    """

    version: int
    of: Vector
    factors: dict[int, float]


class DigestRequest(Message):
    """To a server: the last version is reached, send the digests of your blocks."""

    version: int


class Published(Message):
    """To a worker of an all-reduce job: what another one has published."""

    plan: int
    key: str
    value: bytes


class Complete(Message):
    """To a worker of a job that is not open: all have the last version, its digest is known; `chief` writes files."""

    chief: str


class DumpStacks(Message):
    """The job makes no progress: write the stacks of your threads to your log, and answer `Stacks`."""


class Exit(Message):
    """You are no longer needed: end with status 0.

    With a version, only once you have it and would begin another step; -1: at once.
    """

    reason: str
    version: int = -1


class RollBack(Message):
    """The job goes back to its newest checkpoint: end what you do, and join again as a new member."""

    reason: str


class JobEnded(Message):
    """The job failed: end with status 1 and print the reason."""

    reason: str
    #: to a task agent: the job was cancelled, so that the end of its task is no failure
    cancelled: bool = False


class Noted(Message):
    """To a task agent: its report has arrived."""


FromMember = (
    Join
    | Rejoin
    | Taken
    | Describe
    | AtBarrier
    | AskSamples
    | Beat
    | Ready
    | Nack
    | Announced
    | Pushed
    | Drained
    | Moved
    | Reassigned
    | Copies
    | Promoted
    | Restored
    | Saved
    | NotSaved
    | Norm
    | Publish
    | Broken
    | Finished
    | Digests
    | Failed
    | Severed
    | Stacks
    | Leave
    | AgentExit
    | AgentUsage
)
FromCoordinator = (
    Welcome
    | Resumed
    | Taken
    | Alive
    | Seat
    | BarrierOpen
    | AssignSamples
    | Prepare
    | Abort
    | Begin
    | Commit
    | PlanDone
    | Reassign
    | Census
    | Promote
    | Factors
    | DigestRequest
    | Published
    | Complete
    | DumpStacks
    | Exit
    | RollBack
    | JobEnded
    | Noted
    | Refused
)

#: messages that need not arrive: the next one says the same, or they are sent again after a `Resumed`;
#: all others are counted, and each is taken once, in order, whatever becomes of connections
UNCOUNTED = (Beat, Norm, Rejoin, Taken, Alive, Resumed, Factors, AskSamples, AssignSamples)

# What a decoder knows of a message type is kept with the type when its first decoder is made. Where two threads make
# first ones at the same time, msgspec 0.22 crashes the process: so they are made here, while the module is imported.
for _types in (Handshake, FromMember, FromCoordinator):
    msgspec.msgpack.Decoder(_types)
