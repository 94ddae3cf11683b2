"""Rounds of training on a server: gradients are added, applied to the weights, and answered with the new weights.

In a round of a block each worker pushes a gradient of it, these are applied, and the workers are sent the new weights.
`Rounds` is what synchronous and asynchronous jobs have in common.  `SynchronousRounds` applies a block's step when
every tree node of its sum has been pushed; `pslite.server.async_rounds` applies each gradient when it arrives.

Weights are sent as a payload, as the rows that have changed, or as an offset into memory that worker and server share.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint
from pslite.net.messages import Factors
from pslite.net.shared_memory import Arena
from pslite.net.tensor_frames import (
    FIRST,
    MAX_REGIONS,
    NEWEST,
    PARAM_ROWS,
    REFUSED,
    RESEND,
    SAME,
    WHOLE,
    Header,
    Link,
    region_header,
)
from pslite.numeric.gradient_encoding import Encoding
from pslite.numeric.sparse_rows import Rows, parse
from pslite.server.block_handoff import Handoff
from pslite.server.block_state import NO_GRADIENT, Array, BlockState, Gradient, NoGradient
from pslite.server.block_step import StepMaker
from pslite.server.data_connections import Connections
from pslite.server.server_state import ANY_WORKER, ServerState

#: how long steps are continued before the loop handles other events, in seconds
_SLICE_SECONDS = 0.05


@dataclass(eq=False)
class Rounds(ABC):
    """Receives pushes, and sends workers their weights; when a gradient is applied is left to the subclasses."""

    state: ServerState
    connections: Connections
    step_maker: StepMaker
    handoff: Handoff
    #: requests of workers that are not answered yet: the last one of each connection, frame kind and block number
    requests: dict[tuple[Link, int, int], Header] = field(default_factory=dict)
    #: blocks with steps to continue since the coordinator's factors have arrived, with the version of the factors
    resumed: deque[tuple[BlockState, int]] = field(default_factory=deque)
    #: connection -> numbers of the shared memory regions whose descriptors have been sent over it
    shared_regions: WeakKeyDictionary[Link, set[int]] = field(default_factory=WeakKeyDictionary)

    # --- pushes ---------------------------------------------------------------------------------------------------

    def admit(self, link: Link, header: Header) -> BlockState | None:
        """Return the block of a push; None if the push is late, a duplicate, or for a block of another server.

        The first push for a block whose state has not arrived yet sets the block's version.

        Raises
        ------
        ProtocolError
            another worker has to push that tree node, or the sender is no worker of the plan.

        """
        block = self.state.find_block(header)
        if block is None:
            return None
        if block.version < 0:
            if self.state.prepared_of(block).plan.worker_index(link.task) < 0:
                raise ProtocolError(
                    f"{link.task} pushed a gradient of block {header.block} under plan {block.plan_number}, "
                    "of which it is no worker"
                )
            block.version = block.first = header.first
        return block if self._is_awaited(link, header, block) else None

    @abstractmethod
    def _is_awaited(self, link: Link, header: Header, block: BlockState) -> bool:
        """Return whether a push to a block is neither late nor a duplicate; raises ProtocolError as `admit` does."""

    def push(self, link: Link, header: Header, buffer: Array) -> None:
        """Add an admitted gradient, which has arrived in `buffer`."""
        self._take_announcement(header)
        # Admitted again: while it arrived, a failover may have set the block back to another version, for which the
        # worker pushes it again.  Asynchronous jobs have no replicas, and so no failovers.
        block = self.state.find_block(header) if self.state.spec.asynchronous else self.admit(link, header)
        if block is None:
            self.state.pool.give(buffer)
            return
        gradient: Array | Rows = parse(block.definition, buffer.data) if block.definition.is_sparse else buffer
        encoding = self.state.encodings[header.block]
        if encoding is not None and buffer.dtype == encoding.dtype:
            gradient = self.state.pool.take(block.definition)
            encoding.unpack(buffer, gradient)
            self.state.pool.give(buffer)
        self._add(link, header, block, gradient)

    def skip(self, link: Link, header: Header) -> None:
        """Take a push without a gradient, in a step of other keys."""
        block = self.admit(link, header)
        if block is None:
            self.not_admitted(link, header)
            return
        self._take_announcement(header)
        self._add(link, header, block, NO_GRADIENT)

    def _take_announcement(self, header: Header) -> None:
        plan_number = header.next_plan
        self.state.activation.take(plan_number, header.next_first, prepared=plan_number in self.state.plans)

    @abstractmethod
    def _add(self, link: Link, header: Header, block: BlockState, gradient: Gradient) -> None:
        """Add a gradient, whose memory is the callee's from now on."""

    def not_admitted(self, link: Link, header: Header) -> None:
        """Handle a push that was not admitted: refuse it, unless it was late or a duplicate."""
        block = self.state.find_block(header)
        if block is None:
            refused, problem = not self.state.owned_under_plan(header), "does not own that block"
        else:
            refused = header.version >= block.version and header.node not in block.received
            problem = f"expects step {block.version} under plan {block.plan_number}"
        if refused:
            push = f"the gradient of {link.task} for step {header.version} of block {header.block}, plan {header.plan}"
            self.state.say(f"refused {push}: {self.state.task} {problem}")
            link.send(header.reply(REFUSED))

    # --- answers ---------------------------------------------------------------------------------------------------

    def answer_header(self, block: BlockState) -> Header:
        """Return the header of a frame with a block's present weights."""
        announced = self.state.activation.for_workers(block)
        return block.weights_header(announced)

    def answer_workers(self, block: BlockState) -> None:
        """Send a block's weights to every worker of the plan that the block is under."""
        header = self.answer_header(block)
        rows = block.changed_rows()
        # workers that the plan adds have no weights of the version before its first one
        same = block.unchanged and block.version > block.first
        for worker in self.state.prepared_of(block).plan.workers:
            if worker.task in self.state.away:
                continue
            link = self.connections.accepted.get(worker.task)
            if link is None or link.incarnation != worker.incarnation:
                continue
            if same:
                link.send(replace(header, kind=SAME, length=0))
            else:
                self.send_weights(link, header, block, rows)

    def send_weights(self, link: Link, header: Header, block: BlockState, rows: Rows | None = None) -> None:
        """Send a worker a block's weights, or only the rows that have changed if `rows` is given."""
        self.state.faults.reached(FaultPoint.SEND_WEIGHTS, link, header)
        # Shared memory only for owned blocks: their weights stay as they are until all workers have pushed again.  The
        # memory of a block that leaves is freed, perhaps before the worker has read it.
        owned = block.number in self.state.owned
        if rows is not None:
            link.send(replace(header, kind=PARAM_ROWS, length=rows.nbytes), *rows.views())
        elif owned and block.arena is not None and self._share_region(link, block.arena):
            link.send(header.in_shared_memory(block.arena.number, block.arena.page_offsets[block.number]))
        else:
            link.send(header, block.weights)

    def _share_region(self, link: Link, arena: Arena) -> bool:
        """Return whether a worker can read a shared memory region; send it the descriptor if it does not have it."""
        shared = self.shared_regions.setdefault(link, set())
        if not link.local or (arena.number not in shared and len(shared) >= MAX_REGIONS):
            return False
        if arena.number not in shared:
            shared.add(arena.number)
            link.hand(region_header(arena.number), arena.region.fd)
        return True

    # --- requests of workers --------------------------------------------------------------------------------------

    def take_request(self, link: Link, header: Header) -> None:
        """Take a worker's request for a whole block (FETCH), or for weights that it has not received (RESEND)."""
        self.requests[link, header.kind, header.block] = header
        self.answer_requests()

    def answer_requests(self) -> None:
        """Answer the requests about blocks whose state is here; the others wait until it arrives."""
        for key, header in list(self.requests.items()):
            link, block = key[0], self.state.owned.get(header.block)
            if not link.open or (block is not None and self._answer_request(link, header, block)):
                del self.requests[key]

    def _answer_request(self, link: Link, header: Header, block: BlockState) -> bool:
        """Answer a request about an owned block, if it is at the right version; return whether it was."""
        if header.kind == RESEND and header.version == NEWEST:
            if block.awaits_backup:
                return False
            self.send_weights(link, self.answer_header(block), block)
            return True
        if header.kind == RESEND:
            self._resend(link, header, block)
            return True
        # FETCH
        if not self.state.spec.asynchronous and block.version != header.version:
            return False
        payload, steps = block.weights_and_slots, block.uncounted_steps
        link.send(Header(WHOLE, header.plan, header.block, steps, payload.nbytes, header.version, block.first), payload)
        return True

    @abstractmethod
    def _resend(self, link: Link, header: Header, block: BlockState) -> None:
        """Send a worker the version of a block that it asks for, unless it will be sent that anyway."""

    # --- progress --------------------------------------------------------------------------------------

    @abstractmethod
    def proceed(self, block: BlockState) -> None:
        """Apply the gradients of a block if nothing is missing any more that this needs."""

    def take_factors(self, message: Factors) -> None:
        """Have the steps continued that waited for these factors of the coordinator.

        A new coordinator sends the last factors of each kind at once, which may belong to different versions.
        """
        if self.step_maker.take_factors(message):
            waiting = (block for block in self.state.owned.values() if block.version == message.version)
            self.resumed.extend((block, message.version) for block in waiting)

    def continue_steps(self) -> bool:
        """Continue steps whose factors have come, for a moment; return whether more of them wait.

        All of them at once would take longer than the lease in a large model.
        """
        until = time.monotonic() + _SLICE_SECONDS
        while self.resumed:
            block, version = self.resumed.popleft()
            if self.state.owned.get(block.number) is block and block.version == version:
                self.proceed(block)
            if time.monotonic() >= until:
                break
        return bool(self.resumed)

    def waits_for(self) -> set[str]:
        """Return the tasks that steps wait for: the servers that have not acknowledged the last step."""
        return {task for block in self.state.owned.values() if block.awaits_backup for task in block.backups}

    @abstractmethod
    def continue_without(self, nodes: Mapping[int, Collection[int]]) -> None:
        """Continue without workers that have died or wait at a barrier: `nodes` are their tree nodes, by plan number.

        Plans that are not prepared on this server are ignored.
        """


class SynchronousRounds(Rounds):
    """Applies a block's step, and answers all workers, when the sum over all workers is complete."""

    def _is_awaited(self, link: Link, header: Header, block: BlockState) -> bool:
        if header.version != block.version or header.plan != block.plan_number or header.node in block.received:
            return False
        if self.state.prepared_of(block).pushers.get(header.node) not in (link.task, ANY_WORKER):
            raise ProtocolError(
                f"{link.task} pushed tree node {header.node} under plan {header.plan}, "
                "which that plan assigns to another worker"
            )
        return True

    def _add(self, link: Link, header: Header, block: BlockState, gradient: Gradient) -> None:
        block.received.add(header.node)
        if not isinstance(gradient, NoGradient) and link.task == self.state.prepared_of(block).first_present_worker:
            block.first_worker_has_gradient = True
        # In exact mode the result must not depend on the number of workers.  A worker with several shards pushes their
        # partial sum, which is rounded by the encoding, so each partial sum is rounded here, too.
        rounding = self.state.encodings[block.number] if self.state.spec.mode == "exact" else None
        root = block.sums.add(header.node, gradient, lambda left, right: self._combine(left, right, rounding))
        if root is not None:
            block.total = root[1]
            self.proceed(block)

    def _combine(self, left: Gradient, right: Gradient, encoding: Encoding | None) -> Gradient:
        """Return the sum of two tree nodes, in the memory of one of them if that is writable."""
        if isinstance(left, NoGradient):
            return right
        if isinstance(right, NoGradient):
            return left
        if isinstance(left, Rows) or isinstance(right, Rows):
            assert isinstance(left, Rows)
            assert isinstance(right, Rows)
            return left.plus(right)
        pool = self.state.pool
        if not left.flags.writeable:
            left, right = right, left  # addition is commutative
        out = left if left.flags.writeable else pool.take(left)
        np.add(left, right, out=out)
        if encoding is not None:
            encoding.round(out)
        pool.give(right)
        return out

    def waits_for(self) -> set[str]:
        """Return the workers whose pushes of the present step are missing, and the servers as `Rounds` does."""
        pushing = (
            (self.state.prepared_of(block).pushers, block.received)
            for block in self.state.owned.values()
            if block.total is None
        )
        workers = {task for pushers, received in pushing for node, task in pushers.items() if node not in received}
        return super().waits_for() | workers - {ANY_WORKER}

    def proceed(self, block: BlockState) -> None:
        """Apply a block's step if its sum is complete, its state is here and its factors are known."""
        state = self.state
        if block.total is None or not block.has_state or block.number in state.frozen:
            return
        step = self.step_maker.make(block, block.total)
        if step is None:
            return
        self.step_maker.apply(block, step)
        if block.number == 0:
            state.activation.announce_if_due(block)
        self.handoff.replica_sender.send_step(block, step, state.activation.for_replica(block))
        block.total = None
        block.first_worker_had_gradient, block.first_worker_has_gradient = block.first_worker_has_gradient, False
        block.received.clear()
        block.version += 1
        state.version_reached(block)
        self.handoff.activate_due_plan(block)
        if not block.awaits_backup:
            self.answer_workers(block)

    def _resend(self, link: Link, header: Header, block: BlockState) -> None:
        wants_first = header.version == FIRST and link.task in self.state.prepared_of(block).newcomers
        version = block.first if wants_first else header.version
        if version == block.version and not block.awaits_backup:
            self.send_weights(link, self.answer_header(block), block)

    def continue_without(self, nodes: Mapping[int, Collection[int]]) -> None:
        """Let every worker of a plan push these tree nodes (by plan number); what was pushed counts."""
        for number in nodes.keys() & self.state.plans.keys():
            self.state.plans[number].set_open_nodes(nodes[number])
