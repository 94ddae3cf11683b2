"""Rounds of training on a server: gradients are summed, applied to the weights, and answered with the new weights.

Weights travel as a payload, as the rows that have changed, or as a place in memory that worker and server share.

In a synchronous job a block's step is applied when every tree node of its sum has been pushed (`SynchronousRounds`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint
from pslite.net.data_frames import (
    AGAIN,
    MAX_REGIONS,
    PARAM,
    PARAM_ROWS,
    WHOLE,
    WRONG_OWNER,
    Header,
    Link,
    region_header,
)
from pslite.net.messages import Clip, Trust
from pslite.net.shared_memory import Arena
from pslite.numeric.gradient_encoding import Encoding
from pslite.numeric.sparse_rows import Rows, parse
from pslite.server.block_handoff import Handoff
from pslite.server.block_state import Array, BlockState
from pslite.server.block_step import Steps
from pslite.server.connections import Connections
from pslite.server.replication import ReplicaSender
from pslite.server.server_state import ANY_WORKER, ServerState


@dataclass(eq=False)
class Rounds(ABC):
    """What synchronous and asynchronous rounds have in common."""

    state: ServerState
    connections: Connections
    steps: Steps
    backups: ReplicaSender
    handoff: Handoff
    #: what workers have asked for and not got yet: the last request of each worker, kind and block
    requests: dict[tuple[Link, int, int], Header] = field(default_factory=dict)
    #: by worker, numbers of the shared memory regions whose descriptors it has been sent
    shared_regions: WeakKeyDictionary[Link, set[int]] = field(default_factory=WeakKeyDictionary)

    # --- pushes ---------------------------------------------------------------------------------------------------

    def accepts(self, link: Link, header: Header) -> bool:
        """Whether a push is to be added; not if it is late, doubled or misdirected.

        Raises
        ------
        ProtocolError
            it is not that worker's to push.

        """
        block = self.state.find(header)
        if block is None:
            return False
        if block.version < 0:
            block.version = block.first = header.first
        return self._accepts(link, header, block)

    @abstractmethod
    def _accepts(self, link: Link, header: Header, block: BlockState) -> bool: ...

    def push(self, link: Link, header: Header, buffer: Array) -> None:
        """Add a gradient that has come."""
        self.state.clock.learn_stamp(header.next_plan, header.next_first, prepared=header.next_plan in self.state.plans)
        block = self.state.find(header)
        if block is None or not self._still_accepts(link, header):
            # a server has died while it came, and the block is at another version: it is pushed again
            self.state.pool.give(buffer)
            return
        gradient: Array | Rows = parse(block.block, buffer.data) if block.block.row else buffer
        encoding = self.state.encodings[header.block]
        if encoding is not None and buffer.dtype == encoding.dtype:
            gradient = self.state.pool.take(block.block)
            encoding.unpack(buffer, gradient)
            self.state.pool.give(buffer)
        self._add(link, header, block, gradient)

    @abstractmethod
    def _still_accepts(self, link: Link, header: Header) -> bool: ...

    @abstractmethod
    def _add(self, link: Link, header: Header, block: BlockState, gradient: Array | Rows) -> None: ...

    def refuse(self, link: Link, header: Header) -> None:
        """Tell a worker of a push that was not accepted, unless it was late or doubled."""
        block = self.state.find(header)
        if block is None:
            refused = not self.state.owned_under_plan(header)
        else:
            refused = header.version >= block.version and header.node not in block.received
        if refused:
            self.state.say(f"refused a push of {link.task}: block {header.block}, step {header.version}")
            link.send(header.reply(WRONG_OWNER))

    # --- answers ---------------------------------------------------------------------------------------------------

    def answer_header(self, block: BlockState) -> Header:
        """Return the header of an answer with a block's present version."""
        return block.header(PARAM, block.block.nbytes, stamp=self.state.clock.for_workers(block))

    def broadcast(self, block: BlockState) -> None:
        """Send the weights to every worker of the plan now in force for the block, old owner or not."""
        header = self.answer_header(block)
        rows = block.changed_rows()
        prepared = self.state.plan_of(block)
        for worker in prepared.plan.workers:
            if self.state.sums_only and block.version == block.first and worker.task in prepared.newcomers:
                continue  # it has no weights yet that the sum could change
            link = self.connections.links.get(worker.task)
            if link is None or link.incarnation != worker.incarnation:
                continue
            self.send_weights(link, header, block, rows)

    def send_weights(self, link: Link, header: Header, block: BlockState, rows: Rows | None = None) -> None:
        """Send one worker all weights of a block, or some rows."""
        self.state.faults.reached(FaultPoint.SEND_WEIGHTS, link, header)
        # Weights of an owned block do not change before all workers have pushed again; those of a block that leaves are
        # freed, so they are sent.
        stays = block.number in self.state.owned
        if rows is not None:
            link.send(replace(header, kind=PARAM_ROWS, length=rows.nbytes), *rows.views())
        elif stays and block.arena is not None and self._share_region(link, block.arena):
            link.send(replace(header, place=block.arena.number, node=block.arena.places[block.number]))
        else:
            link.send(header, block.weights)

    def _share_region(self, link: Link, arena: Arena) -> bool:
        """Send a worker the descriptor of a shared memory region, once; return whether it can map it."""
        shown = self.shared_regions.setdefault(link, set())
        if not link.local or (arena.number not in shown and len(shown) >= MAX_REGIONS):
            return False
        if arena.number not in shown:
            shown.add(arena.number)
            link.hand(region_header(arena.number), arena.region.fd)
        return True

    # --- requests of workers --------------------------------------------------------------------------------------

    def request(self, link: Link, header: Header) -> None:
        """Take a worker's request for a whole block (FETCH), or for weights that it lacks (AGAIN)."""
        self.requests[link, header.kind, header.block] = header
        self.answer_requests()

    def answer_requests(self) -> None:
        """Answer requests about blocks that are here; one that is on its way is awaited."""
        for key, header in list(self.requests.items()):
            link, block = key[0], self.state.owned.get(header.block) or self.handoff.released.get(header.block)
            if not link.open or (block is not None and block.here and self._answer_request(link, header, block)):
                del self.requests[key]

    def _answer_request(self, link: Link, header: Header, block: BlockState) -> bool:
        """Answer about a block that is here; returns whether the request is done with."""
        if header.kind == AGAIN:
            self._answer_again(link, header, block)
            return True
        # in async mode it is as it is
        if not self.state.asynchronous and block.version != header.version:
            return False
        whole = block.whole
        link.send(Header(WHOLE, header.plan, header.block, 0, whole.nbytes, header.version, block.first), whole)
        return True

    @abstractmethod
    def _answer_again(self, link: Link, header: Header, block: BlockState) -> None:
        """Answer a worker once more, whose connection broke, unless the answer is still to come."""

    # --- progress --------------------------------------------------------------------------------------

    @abstractmethod
    def proceed(self, block: BlockState) -> None:
        """Apply what has been pushed to a block, if its state is here and nothing else is missing."""

    def take_factors(self, message: Clip | Trust) -> None:
        """Go on with the steps whose factors have come."""
        if self.steps.take_factors(message):
            for block in list(self.state.owned.values()):
                if block.version == message.version:
                    self.proceed(block)

    @abstractmethod
    def workers_lost(self, nodes: Mapping[int, Collection[int]]) -> None:
        """Do without the workers that push these tree nodes, by plan; some plans may not be prepared here."""


class SynchronousRounds(Rounds):
    """A block's step is applied when the sum over all workers is complete, and all workers are answered then."""

    def _accepts(self, link: Link, header: Header, block: BlockState) -> bool:
        if header.version != block.version or header.plan != block.plan or header.node in block.received:
            return False
        if self.state.plan_of(block).expected.get(header.node) not in (link.task, ANY_WORKER):
            raise ProtocolError(f"tree node {header.node} is not {link.task}'s to push under plan {header.plan}")
        return True

    def _still_accepts(self, link: Link, header: Header) -> bool:
        return self.accepts(link, header)

    def _add(self, link: Link, header: Header, block: BlockState, gradient: Array | Rows) -> None:  # noqa: ARG002
        block.received.add(header.node)
        # In fast mode the nodes differ with the size anyway, so that no more need be lost than is pushed.
        rounding = self.state.encodings[block.number] if self.state.spec.mode == "exact" else None
        done = block.sums.add(header.node, gradient, lambda left, right: self._combine(left, right, rounding))
        if done is not None:
            block.total = done[1]
            self.proceed(block)

    def _combine(self, left: Array | Rows, right: Array | Rows, encoding: Encoding | None) -> Array | Rows:
        """Return the sum of two tree nodes, in the memory of one of them if that may be written to."""
        if isinstance(left, Rows) or isinstance(right, Rows):
            assert isinstance(left, Rows)
            assert isinstance(right, Rows)
            return left.plus(right)
        pool = self.state.pool
        if not left.flags.writeable:
            left, right = right, left  # the sum is the same
        out = left if left.flags.writeable else pool.take(left)
        np.add(left, right, out=out)
        if encoding is not None:
            encoding.round(out)
        pool.give(right)
        return out

    def proceed(self, block: BlockState) -> None:
        """Apply a block's step if its sum is complete, its state is here and its scale is known."""
        state = self.state
        if block.total is None or not block.here or block.number in state.frozen:
            return
        if state.sums_only and block.number not in state.owned:
            self.handoff.own(block)
            self.answer_requests()
        step = self.steps.make(block, block.total)
        if step is None:
            return
        self.steps.apply(block, step)
        if block.number == 0:
            self.state.clock.before_step(block)
        self.backups.send_step(block, step, self.state.clock.for_replica(block))
        block.total = None
        block.received.clear()
        block.version += 1
        state.version_reached(block)
        self.handoff.activate_due_plan(block)
        if not block.awaits_backup:
            self.broadcast(block)
        if state.sums_only:
            self.handoff.report()

    def _answer_again(self, link: Link, header: Header, block: BlockState) -> None:
        prepared = self.state.plan_of(block)
        comes = header.version < 0 and link.task in prepared.newcomers
        if self.state.sums_only and comes:
            # the others have its first weights
            for other in self.connections.links.values():
                if other.role == "worker" and other.task not in prepared.newcomers:
                    other.send(Header(AGAIN, block.plan, header.block, 0, 0, -1, 0))
            return
        version = block.first if comes else header.version
        if version == block.version and not block.awaits_backup:
            self.send_weights(link, self.answer_header(block), block)

    def workers_lost(self, nodes: Mapping[int, Collection[int]]) -> None:
        """Let any worker of a plan push these tree nodes."""
        for number in nodes.keys() & self.state.plans.keys():
            self.state.plans[number].expected.update(dict.fromkeys(nodes[number], ANY_WORKER))
