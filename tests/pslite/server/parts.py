"""The parts of one parameter server, without sockets and threads: what it sends is kept in lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from pslite.fault_points import FaultPoints
from pslite.job.blocks import cut
from pslite.job.job_spec import SGD, JobSpec, Part, Segment
from pslite.job.membership_plan import Member, Plan, make_plan
from pslite.net.authentication import TOKEN_BYTES, Identity
from pslite.net.data_frames import INIT, PUSH, Header
from pslite.net.messages import Message, Prepare
from pslite.server.async_rounds import AsynchronousRounds
from pslite.server.block_handoff import Handoff
from pslite.server.block_step import Steps
from pslite.server.failover import Failover
from pslite.server.frame_handlers import Frames
from pslite.server.plan_preparation import prepare
from pslite.server.replication import ReplicaSender, ReplicaStore
from pslite.server.rounds import SynchronousRounds
from pslite.server.server_state import PreparedPlan, ServerState


def a_job(**changes: Any) -> JobSpec:
    """A job of two blocks of four numbers, whose optimizer subtracts the mean gradient."""
    segment = Segment(dtype="float32", optimizer=SGD(lr=1.0), parts=(Part("a", (8,)),))
    values = {
        "segments": (segment,), "samples": 40, "batch": 4, "epochs": 1, "seed": 0, "mode": "exact", "shards": 2,
        "block_bytes": 16,
    }  # fmt: skip
    return JobSpec(**{**values, **changes})


def a_plan(spec: JobSpec, workers: int, servers: int, previous: Plan | None = None) -> Plan:
    """The next plan for so many members."""
    members = {
        role: [Member(f"{role}-{i}", f"{role}-{i}", "host", 1) for i in range(count)]
        for role, count in (("worker", workers), ("ps", servers))
    }
    number = previous.number + 1 if previous else 1
    replicas = spec.durability == "durable"
    return make_plan(number, cut(spec), members["worker"], members["ps"], previous, replicas=replicas)


@dataclass(eq=False)
class FakeLink:
    """A connection that keeps what is sent over it."""

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
        """What has been sent since the last time."""
        found, self.sent = self.sent, []
        return found

    def receive(self, receiver: Any) -> bool:
        return False


class FakeConnections(SimpleNamespace):
    """Connections with all whom a server knows."""

    def __init__(self) -> None:
        super().__init__(links={}, peers={}, missed=[], gone=set())

    @property
    def idle(self) -> bool:
        return not any(link.unsent for link in self.links.values())

    def of(self, task: str) -> list[FakeLink]:
        return [links[task] for links in (self.links, self.peers) if task in links]

    def others(self, link: FakeLink) -> list[FakeLink]:
        return [other for other in (*self.links.values(), *self.peers.values()) if other is not link]

    def give_up(self, tasks: tuple[str, ...]) -> None:
        self.gone.update(tasks)
        for task in tasks:
            self.links.pop(task, None)
            self.peers.pop(task, None)

    def note_missing(self, server: str) -> None:
        self.missed.append(server)


class Parts:
    """One server, by default the first."""

    def __init__(self, spec: JobSpec, task: str = "ps-0") -> None:
        self.told: list[Message] = []
        self.said: list[str] = []
        self.state = ServerState(task, self.told.append, self.said.append, FaultPoints(None, task))
        self.state.begin(spec)
        self.connections = connections = FakeConnections()
        self.steps = Steps(self.state)
        self.backups = ReplicaSender(connections.peers, self.state.pool, self.state.faults)
        self.replicas = ReplicaStore(self.steps.apply)
        self.handoff = Handoff(self.state, connections, self.backups, self.replicas)
        kind = AsynchronousRounds if spec.asynchronous else SynchronousRounds
        self.rounds = kind(self.state, connections, self.steps, self.backups, self.handoff)
        self.failover = Failover(self.state, connections, self.backups, self.replicas, self.handoff)
        self.frames = Frames(self.state, connections, self.backups, self.replicas, self.handoff)
        self.failover.rounds = self.frames.rounds = self.rounds

    def prepare(self, plan: Plan, previous: Plan | None = None) -> PreparedPlan:
        """Have it be ready for a plan, with connections to all members."""
        message = Prepare(plan=plan, previous=previous, spec=self.state.spec)
        identity = Identity(role="ps", task=self.state.task, incarnation="x", token=bytes(TOKEN_BYTES), encrypt="none")
        connector = SimpleNamespace(reach=lambda member, identity: None)
        prepared = prepare(
            message, self.state, set(self.state.owned), set(self.replicas.kept), identity=identity, connector=connector
        )
        assert isinstance(prepared, PreparedPlan), prepared
        self.state.plans[plan.number] = prepared
        self.state.current = self.state.current or plan.number
        self.replicas.expect(prepared.replicas)
        for task in plan.tasks() - {self.state.task}:
            self.connections.links.setdefault(task, FakeLink(task))
            if task.startswith("ps"):
                self.connections.peers.setdefault(task, FakeLink(task))
        return prepared

    def take(self, task: str, header: Header, payload: bytes = b"") -> None:
        """Have a frame come from a member."""
        link = self.connections.links[task]
        place = self.frames.payload(link, header)
        assert place.nbytes == len(payload)
        if payload:
            place.cast("B")[:] = payload
        self.frames.arrived(link, header)

    def begin(self, plan: Plan, weights: float = 0.0) -> None:
        """Have the first worker send the first weights of all blocks that it owns."""
        self.prepare(plan)
        for number in plan.blocks_of(self.state.task):
            block = self.state.blocks[number]
            payload = np.full(block.size, weights, dtype=block.dtype).tobytes()
            self.take("worker-0", Header(INIT, plan.number, number, 0, len(payload), 0, 0), payload)
        self.forget_sent()

    def push(
        self, worker: int, node: int, version: int, gradient: float, *, block: int = 0, plan: int = 1, first: int = 0
    ) -> None:
        """Have a worker push a gradient for a block, under a plan that rules from the version `first` on."""
        info = self.state.blocks[block]
        payload = np.full(info.size, gradient, dtype=info.dtype).tobytes()
        self.take(f"worker-{worker}", Header(PUSH, plan, block, node, len(payload), version, first), payload)

    def forget_sent(self) -> None:
        """Forget what was sent so far."""
        for link in (*self.connections.links.values(), *self.connections.peers.values()):
            link.sent.clear()

    def answers(self, task: str) -> list[tuple[int, int, float]]:
        """What a worker has been sent since the last time: kind, version, first weight."""
        found = self.connections.links[task].take()
        return [(header.kind, header.version, float(np.frombuffer(data, "float32")[0])) for header, data in found]
