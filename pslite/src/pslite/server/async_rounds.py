"""Rounds of an asynchronous job: a gradient is applied when it arrives, without waiting for other workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pslite.errors import ProtocolError
from pslite.net.tensor_frames import FIRST, PARAM, Header, Link
from pslite.numeric.sparse_rows import Rows
from pslite.server.block_state import BlockState, Gradient, NoGradient
from pslite.server.block_step import Step
from pslite.server.plan_activation import NO_ANNOUNCEMENT
from pslite.server.training_rounds import Rounds


class AsynchronousRounds(Rounds):
    """Applies each gradient alone; a worker may be ahead of the slowest one by `staleness` versions.

    A block's version is the number of steps to which all workers have contributed.
    """

    def _is_awaited(self, link: Link, header: Header, block: BlockState) -> bool:
        # A worker that is ahead may have passed the first version of the coming plan already.
        plan_number = self.state.activation.plan_number_at(block, header.version)
        if header.plan != plan_number or self._is_duplicate(header, block):
            return False
        if self.state.plans[plan_number].pushers.get(header.node) != link.task:
            raise ProtocolError(
                f"{link.task} pushed tree node {header.node} under plan {plan_number}, "
                "which that plan assigns to another worker"
            )
        staleness = self.state.spec.staleness
        if header.version - block.version > staleness:
            raise ProtocolError(
                f"{link.task} pushed a gradient for step {header.version} of block {block.number}, but step "
                f"{block.version} is not complete: the job allows {staleness} versions of staleness"
            )
        return True

    def _add(self, link: Link, header: Header, block: BlockState, gradient: Gradient) -> None:
        if isinstance(gradient, NoGradient):
            raise ProtocolError(f"{link.task} pushed no gradient: workers of an asynchronous job push all keys")
        assert not isinstance(gradient, Rows)  # asynchronous jobs have no sparse blocks
        block.progress.received.setdefault(header.version, set()).add(header.node)
        block.progress.unapplied.append((link.task, header.version, gradient))
        self.proceed(block)

    def not_admitted(self, link: Link, header: Header) -> None:
        """Answer the push if it is a duplicate; otherwise handle it as `Rounds.not_admitted` does."""
        block = self.state.find_block(header)
        if block is None or not self._is_duplicate(header, block):
            super().not_admitted(link, header)
            return
        # The worker has pushed it again because it got no answer: the connection broke, or the block's former owner
        # ended after a hand-off.
        block.progress.to_answer.append((link.task, header.version + 1))
        if block.has_state:
            self._answer_waiting(block)

    @staticmethod
    def _is_duplicate(header: Header, block: BlockState) -> bool:
        """Return whether the gradient of a push has arrived before."""
        return header.version < block.version or block.progress.has(header.version, header.node)

    def proceed(self, block: BlockState) -> None:
        """Apply the gradients of a block that have arrived, if its state is here."""
        if not block.has_state:
            return
        spec, progress = self.state.spec, block.progress
        leaves = self.state.prepared_of(block).reduction.leaves
        progress.applied = progress.applied or block.version * leaves
        for task, version, gradient in progress.unapplied:
            divisor = spec.divisor(block.definition.optimizer, version, leaves)
            # in an open job schedules go by the number of gradients, as on MXNet's own servers
            schedule_version = progress.applied if spec.open else version
            self.step_maker.apply(block, Step(gradient, divisor), schedule_version, progress.applied)
            progress.applied += 1
            self.state.pool.give(gradient)
            progress.to_answer.append((task, version + 1))
        progress.unapplied.clear()
        self._advance(block)

    def _advance(self, block: BlockState) -> None:
        """Count the versions to which all workers have contributed, and answer the workers that waited for that."""
        progress = block.progress
        while True:
            nodes = self.state.prepared_of(block).pushers.keys()
            if not nodes or not progress.received.get(block.version, set()) >= nodes:
                break
            del progress.received[block.version]
            block.version += 1
            self.state.version_reached(block)
            plan_number = block.plan_number
            self.handoff.activate_due_plan(block)
            if block.plan_number != plan_number:
                progress.to_answer += [(task, block.version) for task in self.state.prepared_of(block).newcomers]
        self._answer_waiting(block)

    def _answer_waiting(self, block: BlockState) -> None:
        """Answer the workers that are not too far ahead."""
        spec, progress = self.state.spec, block.progress
        waiting, progress.to_answer = progress.to_answer, []
        for task, version in waiting:
            # all workers end with the same last version, so none is sent it before it is complete
            allowed = spec.staleness if version < spec.total_versions else 0
            if version - block.version > allowed:
                progress.to_answer.append((task, version))
            elif task in self.connections.accepted:  # otherwise it asks again when it has reconnected
                self._answer(block, self.connections.accepted[task], version)

    def _answer(self, block: BlockState, link: Link, version: int) -> None:
        """Send a worker the present weights, as its version `version`."""
        activation, progress = self.state.activation, block.progress
        if block.number == 0 and activation.is_due(block):
            # With h = `highest_sent`: h may have been sent without the announcement, h + 1 is sent with it, and the
            # plan begins after that, at h + 2.
            activation.announce(progress.highest_sent + 2)
        # A worker that gets a version after the plan's first one has received the announcement before.
        announced = activation.announced
        if block.number or announced is None or block.plan_number == announced.plan_number or version > announced.first:
            announced = NO_ANNOUNCEMENT
        progress.highest_sent = max(progress.highest_sent, version)
        nbytes = block.definition.nbytes
        header = Header(PARAM, block.plan_number, block.number, 0, nbytes, version, block.first, *announced)
        self.send_weights(link, header, block)

    def _resend(self, link: Link, header: Header, block: BlockState) -> None:
        wants_first = header.version == FIRST and link.task in self.state.prepared_of(block).newcomers
        version = block.first if wants_first else header.version
        # If its push has not arrived or is not applied, the answer is still to come.
        if version >= 0 and (wants_first or self._has_pushed(block, link.task, version - 1)):
            block.progress.to_answer.append((link.task, version))
            self._answer_waiting(block)

    def _has_pushed(self, block: BlockState, task: str, version: int) -> bool:
        """Return whether all tree nodes that a worker pushes for a version of a block have arrived."""
        pushers = self.state.plans[self.state.activation.plan_number_at(block, version)].pushers
        nodes = {node for node, pusher in pushers.items() if pusher == task}
        return version < block.version or nodes <= block.progress.received.get(version, set())

    def continue_without(self, nodes: Mapping[int, Collection[int]]) -> None:
        """Do not wait for these tree nodes (by plan number) any more."""
        for number in nodes.keys() & self.state.plans.keys():
            for node in nodes[number]:
                self.state.plans[number].pushers.pop(node, None)
        for block in list(self.state.owned.values()):
            self._advance(block)
