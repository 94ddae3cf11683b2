"""State that all modules of a server share: the job's description, the prepared plans, and the blocks it owns."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoints
from pslite.job.job_spec import JobSpec
from pslite.job.membership_plan import Plan, Reduction
from pslite.job.step_time_and_usage_statistics import ThroughputMeter
from pslite.job.weight_blocks import Block, cut
from pslite.net.messages import Message
from pslite.net.shared_memory import Layout
from pslite.net.tensor_frames import STATE, Header, Link
from pslite.numeric.gradient_encoding import Encoding, encoding_of, narrow, wire_bytes
from pslite.numeric.norms import Tensors
from pslite.server.block_state import BlockState, BufferPool
from pslite.server.plan_activation import PlanActivation
from pslite.storage.checkpoint_files import Saver

#: in `PreparedPlan.pushers`, for a tree node whose worker has died or waits at a barrier: every worker of the plan may
#: push it; no task has this name
ANY_WORKER = "*"


@dataclass
class PreparedPlan:
    """A plan for which this server has allocated memory and opened connections."""

    plan: Plan
    #: the last completed plan when this one was made; None for the first plan
    previous: Plan | None
    #: the reduction tree of the plan
    reduction: Reduction
    #: tree node -> the worker that pushes it; asynchronous jobs: without the nodes of workers that have died
    pushers: dict[int, str]
    #: block number -> memory, for blocks that the plan gives to this server and whose state has not arrived yet
    gained: dict[int, BlockState]
    #: workers that the plan adds to the job
    newcomers: set[str]
    #: block number -> memory, for replicas that this server has not kept so far
    replicas: dict[int, BlockState]
    #: bytes of blocks' states that this server has sent to their owners under the plan
    sent_bytes: int = 0
    #: whether the coordinator has been sent `Moved`
    moved_sent: bool = False
    #: time at which the first block entered the plan (monotonic, seconds); 0: none has
    entered_at: float = 0.0

    def set_open_nodes(self, nodes: Collection[int]) -> None:
        """Let any worker of the plan push these nodes of the reduction tree, and only its own worker each other one."""
        for worker, own in zip(self.plan.workers, self.reduction.nodes, strict=True):
            self.pushers.update({node: ANY_WORKER if node in nodes else worker.task for node in own})

    @property
    def first_present_worker(self) -> str:
        """The first worker of the plan that neither has died nor waits at a barrier; "" if there is none."""
        return next((worker for worker in self.pushers.values() if worker != ANY_WORKER), "")

    def note_entered(self) -> None:
        """Set `entered_at`, if no block has entered the plan before."""
        self.entered_at = self.entered_at or time.monotonic()


@dataclass(eq=False)
class ServerState:
    """State of one server.  Only the thread of the loop writes it.

    Threads that prepare plans and write checkpoints are given `task`, `faults` and `pool` (to reserve buffers in).

    ===================== ============================================= ========================
    field                 contents                                      written by
    ===================== ============================================= ========================
    spec to wire_lengths  what follows from the job's description       `set_spec`
    saver                 writer of checkpoints                         event_loop
    plans                 prepared plans, by number                     event_loop, failover,
                                                                        `drop_plan`
    completed_plan_number the last plan that all members have moved to  event_loop
    owned                 blocks that this server owns                  block_handoff, failover
    frozen                blocks to which no step is applied            failover, `drop_plan`
    former_owners         owners of blocks before failovers             failover
    away                  workers that wait at a barrier                event_loop
    version               the highest version of an owned block         `version_reached`,
                                                                        block_handoff
    ===================== ============================================= ========================
    """

    #: the server's id
    task: str
    #: sends a message to the coordinator
    send: Callable[[Message], None]
    #: prints a line for the user
    say: Callable[[str], None]
    faults: FaultPoints
    spec: JobSpec = field(init=False)
    #: byte offset of each block in a region of a worker's shared memory
    layout: Layout = field(init=False)
    #: sizes that such a region may have: one for each version of the description, since keys may be added later
    region_sizes: set[int] = field(default_factory=set)
    #: the pieces of tensors in each block
    tensors: Tensors = field(init=False)
    activation: PlanActivation = field(init=False)
    #: of the job's blocks; empty until the description is known
    definitions: tuple[Block, ...] = ()
    #: whether blocks have replicas
    replicated: bool = False
    #: for each block, the encoding of its gradients if they travel in 16 bits
    encodings: list[Encoding | None] = field(default_factory=list)
    #: for each block, the bytes of a gradient as it travels
    wire_lengths: list[int] = field(default_factory=list)
    #: None if the job has no checkpoints
    saver: Saver | None = None
    plans: dict[int, PreparedPlan] = field(default_factory=dict)
    #: number of the last plan that all members have moved to; 0: none
    completed_plan_number: int = 0
    owned: dict[int, BlockState] = field(default_factory=dict)
    #: numbers of blocks whose versions were reported after a `Census`: they must not change until `Promote`
    frozen: set[int] = field(default_factory=set)
    #: block number -> servers that owned it: they may send frames as its owner until they know of the failover
    former_owners: dict[int, set[str]] = field(default_factory=dict)
    #: workers that wait at a barrier while others do their part: they are sent no weights unless they ask
    away: frozenset[str] = frozenset()
    version: int = 0
    pool: BufferPool = field(default_factory=BufferPool)
    meter: ThroughputMeter = field(default_factory=ThroughputMeter)

    def __post_init__(self) -> None:
        self.activation = PlanActivation(self.send, self.faults)

    def set_spec(self, spec: JobSpec) -> None:
        """Set everything that follows from the job's description.

        It is another one when keys are added later.  These are further segments at its end (a segment is the tensors of
        one type and optimizer, cut into blocks), so that all blocks before them keep their numbers.
        """
        self.spec = spec
        self.activation.total_versions = spec.total_versions
        self.definitions = cut(spec)
        self.layout = Layout(spec, self.definitions)
        self.region_sizes.add(self.layout.nbytes)
        self.tensors = Tensors(spec, self.definitions)
        self.replicated = spec.durability == "durable"
        encoding = encoding_of(spec)
        self.encodings = [encoding if narrow(spec, definition) else None for definition in self.definitions]
        self.wire_lengths = [wire_bytes(spec, definition) for definition in self.definitions]

    @property
    def has_spec(self) -> bool:
        """Whether the job's description is known."""
        return bool(self.definitions)

    def prepared_of(self, block: BlockState) -> PreparedPlan:
        """Return the plan that a block is under, as it was prepared."""
        return self.plans[block.plan_number]

    def known_plans(self) -> list[Plan]:
        """Return the prepared plans, and those that they follow."""
        return [plan for p in self.plans.values() for plan in (p.plan, p.previous) if plan is not None]

    def version_reached(self, block: BlockState) -> None:
        """Note the new version of a block, and give its state to the checkpoint of that version, if there is one."""
        self.version = max(self.version, block.version)
        if self.saver is not None:
            self.saver.take(block.number, block.version, block.arrays)

    def find_block(self, header: Header) -> BlockState | None:
        """Return the block of a frame, if this server owns it, or will own it under the frame's plan."""
        block = self.owned.get(header.block)
        if block is None:
            prepared = self.plans.get(header.plan)
            block = prepared.gained.get(header.block) if prepared else None
        return block

    def block_for_state(self, link: Link, header: Header) -> BlockState:
        """Return the block that the state or the initial weights in a frame are for.

        Raises
        ------
        ProtocolError
            this server does not expect them, or the peer may not send them.

        """
        prepared = self.plans.get(header.plan)
        block = prepared.gained.get(header.block) if prepared else None
        if block is None:
            raise ProtocolError(
                f"{link.task} sent the state of block {header.block} under plan {header.plan}, "
                f"but {self.task} does not expect it"
            )
        if header.kind == STATE:
            self.check_owner(link, header.block)
        elif not self.may_send_initial_weights(link, header):
            raise ProtocolError(
                f"{link.task} sent initial weights of block {header.block}: only the first worker of the first plan "
                "may, or a worker of a plan that adds the block"
            )
        return block

    def may_send_initial_weights(self, link: Link, header: Header) -> bool:
        """Return whether a peer may send a block's initial weights.

        The first worker of the job's first plan may until that plan is completed, and of blocks that a later plan
        adds any of its workers, since the first may have died.
        """
        prepared = self.plans.get(header.plan)
        if prepared is None:
            return False
        if prepared.previous is not None:
            return not prepared.previous.has(header.block) and prepared.plan.worker_index(link.task) >= 0
        return not self.completed_plan_number and prepared.plan.workers[0].task == link.task

    def peer_owns(self, link: Link, number: int) -> bool:
        """Return whether a peer is a server that owns a block under one of the known plans."""
        return link.role == "ps" and any(
            plan.has(number) and plan.owner(number).task == link.task for plan in self.known_plans()
        )

    def check_owner(self, link: Link, number: int) -> bool:
        """Return whether a peer owns a block; False if it did before a failover.

        It may go on as the owner until the coordinator's message about the failover arrives there.

        Raises
        ------
        ProtocolError
            it has never owned the block.

        """
        is_owner = self.peer_owns(link, number)
        if not is_owner and link.task not in self.former_owners.get(number, ()):
            raise ProtocolError(f"{link.task} sent the state or a step of block {number}, which it does not own")
        return is_owner

    def owned_under_plan(self, header: Header) -> bool:
        """Return whether this server owned a frame's block under the frame's plan.

        If it no longer owns the block, the step in the frame was completed before the block moved.
        """
        prepared = self.plans.get(header.plan)
        return (
            prepared is not None
            and prepared.plan.has(header.block)
            and prepared.plan.owner(header.block).task == self.task
        )

    def drop_plan(self, number: int) -> None:
        """Drop a plan, and unfreeze all blocks with the last one; connections stay open for the next plan."""
        self.plans.pop(number, None)
        if not self.plans:
            self.frozen.clear()  # no `Promote` comes to a server that is in no plan
