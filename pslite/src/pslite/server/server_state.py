"""What a server knows of its job: the description, the plans that it is ready for, and the blocks that it owns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoints
from pslite.job.blocks import Block, cut
from pslite.job.job_spec import JobSpec
from pslite.job.measurements import ThroughputMeter
from pslite.job.membership_plan import Plan, Reduction
from pslite.net.data_frames import STATE, Header, Link
from pslite.net.messages import Message
from pslite.net.shared_memory import Layout
from pslite.numeric.gradient_encoding import Encoding, encoding_of, narrow, wire_bytes
from pslite.numeric.norms import Tensors
from pslite.server.block_state import BlockState, BufferPool
from pslite.server.plan_activation import PlanClock
from pslite.storage.checkpoints import Saver

#: in place of the worker that pushes a tree node: any of the plan, for its own is gone
ANY_WORKER = ""


@dataclass
class PreparedPlan:
    """A plan for which this server has memory and connections."""

    plan: Plan
    previous: Plan | None
    reduction: Reduction
    #: tree node -> the worker that pushes it; without those that nobody pushes any more (async mode)
    expected: dict[int, str]
    #: blocks that the plan gives to this server and that have not come yet
    gained: dict[int, BlockState]
    #: workers that the plan adds
    newcomers: set[str]
    #: memory for replicas that this server has not kept so far
    replicas: dict[int, BlockState]
    moved_bytes: int = 0
    #: whether the coordinator knows that all has moved
    reported: bool = False
    #: when the first block came under the plan (monotonic, seconds); 0 before
    began: float = 0.0

    def begin(self) -> None:
        """Note the time at which the first block comes under the plan."""
        self.began = self.began or time.monotonic()


@dataclass(eq=False)
class ServerState:
    """The record that the parts of a server share; one thread reads and writes it.

    ============== ======================================== ==================
    field          what                                     written by
    ============== ======================================== ==================
    spec .. saver  what follows from the job's description  `begin`
    plans, current plans made ready for, the one in force   loop, failover
    settled        the last plan that all have moved to     loop
    owned          blocks that this server owns             handoff, failover
    frozen         blocks to which no step is applied       failover
    former_owners  who owned blocks before failovers        failover
    version        the highest version of an owned block    `version_reached`
    ============== ======================================== ==================
    """

    #: the server's id
    task: str
    #: sends a message to the coordinator
    send: Callable[[Message], None]
    #: takes lines for the user
    say: Callable[[str], None]
    faults: FaultPoints
    spec: JobSpec = field(init=False)
    layout: Layout = field(init=False)
    tensors: Tensors = field(init=False)
    clock: PlanClock = field(init=False)
    blocks: tuple[Block, ...] = ()
    asynchronous: bool = False
    #: workers have weights and optimizer: gradients are added up here, and nothing is kept
    sums_only: bool = False
    #: whether blocks have replicas
    replicated: bool = False
    #: by block, how gradients travel if in 16 bits, and their lengths
    encodings: list[Encoding | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    saver: Saver | None = None
    plans: dict[int, PreparedPlan] = field(default_factory=dict)
    current: int = 0
    settled: int = 0
    owned: dict[int, BlockState] = field(default_factory=dict)
    #: their versions have been said in answer to a `Census`: they stay so until it is said who owns them
    frozen: set[int] = field(default_factory=set)
    #: block -> its owners before others died: what they sent until they heard of it comes late
    former_owners: dict[int, set[str]] = field(default_factory=dict)
    version: int = 0
    pool: BufferPool = field(default_factory=BufferPool)
    meter: ThroughputMeter = field(default_factory=ThroughputMeter)

    def __post_init__(self) -> None:
        self.clock = PlanClock(self.send, self.faults)

    def begin(self, spec: JobSpec) -> None:
        """Set what follows from the job's description."""
        self.spec = spec
        self.clock.total_versions = spec.total_versions
        self.blocks = cut(spec)
        self.layout = Layout(spec, self.blocks)
        self.tensors = Tensors(spec, self.blocks)
        self.asynchronous = spec.asynchronous
        self.sums_only = spec.update == "worker"
        self.replicated = spec.durability == "durable"
        encoding = encoding_of(spec)
        self.encodings = [encoding if narrow(spec, block) else None for block in self.blocks]
        self.lengths = [wire_bytes(spec, block) for block in self.blocks]

    @property
    def known(self) -> bool:
        """Whether the job's description is known."""
        return bool(self.blocks)

    def plan_of(self, block: BlockState) -> PreparedPlan:
        """Return the plan that rules a block."""
        return self.plans[block.plan]

    def plans_in_force(self) -> list[Plan]:
        """Return the plans that this server is ready for, and those that they follow."""
        return [plan for each in self.plans.values() for plan in (each.plan, each.previous) if plan is not None]

    def version_reached(self, block: BlockState) -> None:
        """Note that a block has reached its version; it goes into the checkpoint, if there is one of that version."""
        self.version = max(self.version, block.version)
        if self.saver is not None:
            self.saver.take(block.number, block.version, block.state)

    def find(self, header: Header) -> BlockState | None:
        """Return the block that a frame is about: one that is owned, or will be under the frame's plan."""
        block = self.owned.get(header.block)
        if block is None:
            prepared = self.plans.get(header.plan)
            block = prepared.gained.get(header.block) if prepared else None
        return block

    def expected(self, link: Link, header: Header) -> BlockState:
        """Return the block whose state comes with a frame.

        Raises
        ------
        ProtocolError
            it is not expected, or not from that peer.

        """
        prepared = self.plans.get(header.plan)
        block = prepared.gained.get(header.block) if prepared else None
        if block is None or block.here:
            raise ProtocolError(f"block {header.block} of plan {header.plan} is not awaited here")
        if header.kind == STATE:
            self.is_owner(link, header.block)
        elif not self.is_first_worker(link, header.plan):
            raise ProtocolError(f"{link.task} may not set initial weights")
        return block

    def is_first_worker(self, link: Link, plan: int) -> bool:
        """Whether a peer is the first worker of the first plan, to which not everybody has moved yet."""
        prepared = self.plans.get(plan)
        if prepared is None or prepared.previous is not None or self.settled:
            return False
        return prepared.plan.workers[0].task == link.task

    def is_owner(self, link: Link, block: int) -> bool:
        """Whether a server owns a block; False if it did until servers died, which it had yet to hear.

        Raises
        ------
        ProtocolError
            it has never owned it.

        """
        owner = link.role == "ps" and any(plan.owner(block).task == link.task for plan in self.plans_in_force())
        if not owner and link.task not in self.former_owners.get(block, ()):
            raise ProtocolError(f"block {block} is not {link.task}'s, it has no state of it")
        return owner

    def owned_under_plan(self, header: Header) -> bool:
        """Whether a frame's block was owned under its plan: then its step is complete, and the block on its way."""
        prepared = self.plans.get(header.plan)
        return prepared is not None and prepared.plan.owner(header.block).task == self.task

    def forget(self, number: int) -> None:
        """Forget a plan; connections stay, for the plan that is tried next probably needs them."""
        self.plans.pop(number, None)
        if self.current == number:
            self.current = 0
        if not self.plans:
            self.frozen.clear()  # this server is in no plan: it is said to others who owns them
