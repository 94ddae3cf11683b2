"""Rounds of an asynchronous job: no common step, a gradient is applied when it comes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pslite.errors import ProtocolError
from pslite.net.data_frames import PARAM, Header, Link
from pslite.numeric.sparse_rows import Rows
from pslite.server.block_state import Array, BlockState
from pslite.server.block_step import Step
from pslite.server.rounds import Rounds


class AsynchronousRounds(Rounds):
    """Each gradient is applied alone; workers may be ahead of the slowest by as many versions as the job allows.

    A block's version counts the steps that all workers have contributed to.
    """

    def _accepts(self, link: Link, header: Header, block: BlockState) -> bool:
        # it may be ahead of others', and beyond the first version of the coming plan
        plan = self.state.clock.plan_at(block, header.version)
        if header.plan != plan or self._is_in(header, block):
            return False
        if self.state.plans[plan].expected.get(header.node) != link.task:
            raise ProtocolError(f"tree node {header.node} is not {link.task}'s to push under plan {plan}")
        if header.version - block.version > self.state.spec.staleness:
            raise ProtocolError(f"{link.task} is at version {header.version}, {block.version} is not complete")
        return True

    def _still_accepts(self, link: Link, header: Header) -> bool:  # noqa: ARG002
        return True

    def _add(self, link: Link, header: Header, block: BlockState, gradient: Array | Rows) -> None:
        assert not isinstance(gradient, Rows)
        block.progress.received.setdefault(header.version, set()).add(header.node)
        block.progress.staged.append((link.task, header.version, gradient))
        self.proceed(block)

    def refuse(self, link: Link, header: Header) -> None:
        """Answer a push that has come before; tell the worker of one that was not accepted."""
        block = self.state.find(header)
        if block is None or not self._is_in(header, block):
            super().refuse(link, header)
            return
        # pushed again, for the server that should have answered is gone
        block.progress.waiting.append((link.task, header.version + 1))
        if block.here:
            self._answer_waiting(block)

    @staticmethod
    def _is_in(header: Header, block: BlockState) -> bool:
        """Whether what comes with a frame has come before."""
        return header.version < block.version or block.progress.has(header.version, header.node)

    def proceed(self, block: BlockState) -> None:
        """Apply the gradients that have come, if the block is here."""
        if not block.here:
            return
        leaves = self.state.plan_of(block).reduction.leaves
        for task, version, gradient in block.progress.staged:
            divisor = self.state.spec.divisor(block.block.optimizer, version, leaves)
            self.steps.apply(block, Step(gradient, divisor), version)
            self.state.pool.give(gradient)
            block.progress.waiting.append((task, version + 1))
        block.progress.staged.clear()
        self._advance(block)

    def _advance(self, block: BlockState) -> None:
        """Count the versions that all workers have contributed to, and let those go on that waited for them."""
        progress = block.progress
        while True:
            awaited = self.state.plan_of(block).expected.keys()
            if not awaited or not progress.received.get(block.version, set()) >= awaited:
                break
            del progress.received[block.version]
            block.version += 1
            self.state.version_reached(block)
            plan = block.plan
            self.handoff.activate_due_plan(block)
            if block.plan != plan:
                progress.waiting += [(task, block.version) for task in self.state.plan_of(block).newcomers]
        self._answer_waiting(block)

    def _answer_waiting(self, block: BlockState) -> None:
        """Answer the workers that are not too far ahead."""
        spec, progress = self.state.spec, block.progress
        waiting, progress.waiting = progress.waiting, []
        for task, version in waiting:
            # the last weights are everybody's
            ahead = spec.staleness if version < spec.total_versions else 0
            if version - block.version > ahead:
                progress.waiting.append((task, version))
            elif task in self.connections.links:  # else it asks when it is there again
                self._answer(block, self.connections.links[task], version)

    def _answer(self, block: BlockState, link: Link, version: int) -> None:
        """Send one worker the weights as they are now, as its next version."""
        clock, progress = self.state.clock, block.progress
        if block.number == 0 and clock.waits(block):
            # Who is farthest computes the step from `highest`, and has to hear of the plan before its next push.
            clock.choose(progress.highest + 2)
        # Who has come so far is past the coming plan's first version, although others are not.
        tell = (
            block.number == 0 and clock.stamp is not None and block.plan != clock.stamp[0] and version <= clock.stamp[1]
        )
        stamp = clock.stamp if clock.stamp is not None and tell else (0, 0)
        progress.highest = max(progress.highest, version)
        header = Header(PARAM, block.plan, block.number, 0, block.block.nbytes, version, block.first, *stamp)
        self.send_weights(link, header, block)

    def _answer_again(self, link: Link, header: Header, block: BlockState) -> None:
        comes = header.version < 0 and link.task in self.state.plan_of(block).newcomers
        version = block.first if comes else header.version
        # the answer to a push that is not applied yet, or not here, is still to come
        if version >= 0 and (comes or self._has_pushed(block, link.task, version - 1)):
            block.progress.waiting.append((link.task, version))
            self._answer_waiting(block)

    def _has_pushed(self, block: BlockState, task: str, version: int) -> bool:
        """Whether all that a worker contributes to a version of a block has come."""
        expected = self.state.plans[self.state.clock.plan_at(block, version)].expected
        nodes = {node for node, other in expected.items() if other == task}
        return version < block.version or nodes <= block.progress.received.get(version, set())

    def workers_lost(self, nodes: Mapping[int, Collection[int]]) -> None:
        """Await these tree nodes no more."""
        for number in nodes.keys() & self.state.plans.keys():
            for node in nodes[number]:
                self.state.plans[number].expected.pop(node, None)
        for block in list(self.state.owned.values()):
            self._advance(block)
