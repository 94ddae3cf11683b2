"""The objects of one parameter server without sockets and threads; what it sends is kept in lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from pslite.fault_points import FaultPoints
from pslite.job.job_spec import SGD, JobSpec, Part, Segment
from pslite.job.membership_plan import Member, Plan, make_plan
from pslite.job.weight_blocks import cut
from pslite.net.authentication import TOKEN_BYTES, Identity
from pslite.net.messages import Message, Prepare
from pslite.net.tensor_frames import INIT, PUSH, Header
from pslite.server.async_rounds import AsynchronousRounds
from pslite.server.block_handoff import Handoff
from pslite.server.block_step import StepMaker
from pslite.server.failover import Failover
from pslite.server.frame_handlers import FrameHandlers
from pslite.server.plan_preparation import prepare
from pslite.server.replication import ReplicaSender, ReplicaStore
from pslite.server.server_state import PreparedPlan, ServerState
from pslite.server.training_rounds import SynchronousRounds


def a_job(**changes: Any) -> JobSpec:
    """Return a job of two blocks of four float32, whose optimizer subtracts the mean gradient."""
    segment = Segment(dtype="float32", optimizer=SGD(lr=1.0), parts=(Part("a", (8,)),))
    values = {
        "segments": (segment,), "samples": 40, "batch": 4, "epochs": 1, "seed": 0, "mode": "exact", "shards": 2,
        "block_bytes": 16,
    }  # fmt: skip
    return JobSpec(**{**values, **changes})


def a_plan(spec: JobSpec, workers: int, servers: int, previous: Plan | None = None) -> Plan:
    """Return the plan after `previous` for these numbers of members."""
    members = {
        role: [Member(f"{role}-{i}", f"{role}-{i}", "host", 1) for i in range(count)]
        for role, count in (("worker", workers), ("ps", servers))
    }
    number = previous.number + 1 if previous else 1
    replicas = spec.durability == "durable"
    return make_plan(number, cut(spec), members["worker"], members["ps"], previous, replicas=replicas)


@dataclass(eq=False)
class FakeLink:
    """Connection that keeps the frames that are sent over it."""

    task: str
    open: bool = True
    unsent: bool = False
    local: bool = False
    coming: Header | None = None
    sent: list[tuple[Header, bytes]] = field(default_factory=list)

    @property
    def role(self) -> str:
        return self.task.split("-")[0]

    @property
    def incarnation(self) -> str:
        return self.task

    def send(self, header: Header, *payload: memoryview) -> None:
        self.sent.append((header, b"".join(bytes(piece) for piece in payload)))

    def take(self) -> list[tuple[Header, bytes]]:
        """Return the frames that were sent since the last call."""
        frames, self.sent = self.sent, []
        return frames

    def receive(self, receiver: Any) -> bool:
        return False


class FakeConnections(SimpleNamespace):
    """Connections with all members of the prepared plans."""

    def __init__(self) -> None:
        super().__init__(accepted={}, opened={}, missed=[], gone=set())

    @property
    def all_answers_sent(self) -> bool:
        return not any(link.unsent for link in self.accepted.values())

    def with_member(self, task: str) -> list[FakeLink]:
        return [links[task] for links in (self.accepted, self.opened) if task in links]

    def except_link(self, link: FakeLink) -> list[FakeLink]:
        return [kept for kept in (*self.accepted.values(), *self.opened.values()) if kept is not link]

    def drop_dead(self, tasks: tuple[str, ...]) -> None:
        self.gone.update(tasks)
        for task in tasks:
            self.accepted.pop(task, None)
            self.opened.pop(task, None)

    def note_missing(self, server: str) -> None:
        self.missed.append(server)


class Parts:
    """One server, by default `ps-0`."""

    def __init__(self, spec: JobSpec, task: str = "ps-0") -> None:
        #: messages to the coordinator
        self.messages: list[Message] = []
        #: lines for the user
        self.lines: list[str] = []
        self.state = ServerState(task, self.messages.append, self.lines.append, FaultPoints(None, task))
        self.state.set_spec(spec)
        self.connections = connections = FakeConnections()
        self.step_maker = StepMaker(self.state)
        self.replica_sender = ReplicaSender(connections.opened, self.state.pool, self.state.faults)
        self.replica_store = ReplicaStore(self.step_maker.apply)
        self.handoff = Handoff(self.state, connections, self.replica_sender, self.replica_store)
        rounds = AsynchronousRounds if spec.asynchronous else SynchronousRounds
        self.rounds = rounds(self.state, connections, self.step_maker, self.handoff)
        self.failover = Failover(self.state, connections, self.replica_sender, self.replica_store, self.handoff)
        self.frames = FrameHandlers(self.state, connections, self.replica_sender, self.replica_store, self.handoff)
        self.failover.rounds = self.frames.rounds = self.rounds

    def prepare(self, plan: Plan, previous: Plan | None = None) -> PreparedPlan:
        """Prepare a plan, and connect to all its members."""
        message = Prepare(plan=plan, previous=previous, spec=self.state.spec)
        identity = Identity(role="ps", task=self.state.task, incarnation="x", token=bytes(TOKEN_BYTES), encrypt="none")
        connector = SimpleNamespace(reach=lambda member, identity: None)
        prepared = prepare(
            message,
            set(self.state.owned),
            set(self.replica_store.kept),
            identity=identity,
            connector=connector,
            pool=self.state.pool,
            faults=self.state.faults,
        )
        assert isinstance(prepared, PreparedPlan), prepared
        self.state.plans[plan.number] = prepared
        self.replica_store.expect(prepared.replicas)
        for task in plan.tasks() - {self.state.task}:
            self.connections.accepted.setdefault(task, FakeLink(task))
            if task.startswith("ps"):
                self.connections.opened.setdefault(task, FakeLink(task))
        return prepared

    def take(self, task: str, header: Header, payload: bytes = b"") -> None:
        """Deliver a frame from a member."""
        link = self.connections.accepted[task]
        memory = self.frames.payload(link, header)
        assert memory.nbytes == len(payload)
        if payload:
            memory.cast("B")[:] = payload
        self.frames.arrived(link, header)

    def begin(self, plan: Plan, weights: float = 0.0) -> None:
        """Prepare the first plan, and have the first worker send the initial weights of all blocks of this server."""
        self.prepare(plan)
        for number in plan.blocks_of(self.state.task):
            definition = self.state.definitions[number]
            payload = np.full(definition.size, weights, dtype=definition.dtype).tobytes()
            self.take("worker-0", Header(INIT, plan.number, number, 0, len(payload), 0, 0), payload)
        self.forget_sent()

    def push(
        self, worker: int, node: int, version: int, gradient: float, *, block: int = 0, plan: int = 1, first: int = 0
    ) -> None:
        """Deliver a worker's gradient of one tree node, all elements alike, under a plan with first version `first`."""
        definition = self.state.definitions[block]
        payload = np.full(definition.size, gradient, dtype=definition.dtype).tobytes()
        self.take(f"worker-{worker}", Header(PUSH, plan, block, node, len(payload), version, first), payload)

    def forget_sent(self) -> None:
        """Forget the frames that were sent so far."""
        for link in (*self.connections.accepted.values(), *self.connections.opened.values()):
            link.sent.clear()

    def answers(self, task: str) -> list[tuple[int, int, float]]:
        """Return the frames that a worker was sent since the last call: kind, version, first weight."""
        frames = self.connections.accepted[task].take()
        return [(header.kind, header.version, float(np.frombuffer(data, "float32")[0])) for header, data in frames]
