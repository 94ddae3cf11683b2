"""Replicas of blocks: the owner sends each step to another server, the backup, which becomes the owner if it dies.

Owner and backup apply the same gradient sum, so their states have the same bits, optimizer slots included.  Workers are
answered when the backup has acknowledged the step: a replica is never older than the weights that a worker has, and no
step is lost with the owner.  A new backup is first sent the whole state, called its seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.job.weight_blocks import Block
from pslite.net.tensor_frames import REPLICATED, SEED, SEEDED, Header, Link, bytes_of
from pslite.numeric.sparse_rows import checked_length
from pslite.server.block_state import Array, BlockState, BufferPool, Gradient
from pslite.server.block_step import Step

#: the most seeds that are sent at a time, as answers to workers go first
_MAX_SEEDS = 2


@dataclass
class _UnacknowledgedStep:
    """The last step of a block, until its backups have acknowledged it."""

    block: BlockState
    version: int
    total: Gradient
    #: backups that have not acknowledged it
    waits_for: set[str]


@dataclass(eq=False)
class ReplicaSender:
    """Owner's side of replication: sends seeds and steps of owned blocks to their backups."""

    #: task -> open connection to another server
    links: Mapping[str, Link]
    pool: BufferPool
    faults: FaultPoints
    #: by block number
    _steps: dict[int, _UnacknowledgedStep] = field(default_factory=dict)
    #: blocks that need a new backup, with the task of that server
    _due_seeds: deque[tuple[BlockState, str]] = field(default_factory=deque)
    #: block number -> server that has not acknowledged the block's seed yet
    _sent_seeds: dict[int, str] = field(default_factory=dict)

    # --- steps ----------------------------------------------------------------------------------------------------

    def send_step(self, block: BlockState, step: Step, announced: tuple[int, int]) -> None:
        """Send the backups a step that was just applied; the pool gets its sum when they have acknowledged it.

        Parameters
        ----------
        block
            still at the version before the step; `awaits_backup` is set if it has a backup.
        step
            the step.
        announced
            plan and first version that the replica has to know, or (0, 0).

        """
        tasks = set(block.backups)
        block.awaits_backup = bool(tasks)
        if not tasks:
            self.pool.give(step.total)
            return
        views = step.views()
        nbytes = sum(view.nbytes for view in views)
        factor_count = 2 + len(step.trust_ratios) if views else 0  # divisor and clip, too
        header = block.step_header(nbytes, factor_count, announced)
        for task in tasks:
            link = self.links.get(task)
            if link is not None:
                link.send(header, *views)
        self._steps[block.number] = _UnacknowledgedStep(block, block.version, step.total, tasks)

    def step_acknowledged(self, link: Link, header: Header) -> BlockState | None:
        """Take a backup's acknowledgement of a step; return the block if its workers can be answered now."""
        step = self._steps.get(header.block)
        if step is None or step.version != header.version:
            return None  # the block has had another owner since
        step.waits_for.discard(link.task)
        return self._complete(step)

    def _complete(self, step: _UnacknowledgedStep) -> BlockState | None:
        """Forget a step that no backup has to acknowledge any more, and return its block; None if one has to."""
        if step.waits_for:
            return None
        del self._steps[step.block.number]
        self.pool.give(step.total)
        step.block.awaits_backup = False
        return step.block

    # --- seeds ----------------------------------------------------------------------------------------------------

    @property
    def all_seeded(self) -> bool:
        """Whether no seed is due or unacknowledged: every block has the backup that its plan names."""
        return not self._due_seeds and not self._sent_seeds

    def can_send_seed(self) -> bool:
        """Return whether a seed is due and the limit of seeds is not reached; tests can hold seeds back."""
        if not self._due_seeds or len(self._sent_seeds) >= _MAX_SEEDS:
            return False
        return not self.faults.reached(FaultPoint.REPLICA_DUE, self._due_seeds[0][0].plan_number)

    def seed_later(self, block: BlockState, task: str) -> None:
        """Queue a seed that makes a server the backup of a block."""
        self._due_seeds.append((block, task))

    def seed_next(self) -> None:
        """Send the first of the queued seeds."""
        self.seed(*self._due_seeds.popleft())

    def seed(self, block: BlockState, task: str) -> None:
        """Send a block's state to a server, and from then on each step; nothing if there is no connection to it."""
        if self.faults.reached(FaultPoint.SEND_REPLICA, block.plan_number):
            return
        link = self.links.get(task)
        if link is None:
            return  # the server has died; the next plan names another backup
        # copied, because the next step may change the block before all of it is sent
        payload = bytes_of(np.array(block.arrays))
        link.send(block.state_header(SEED, payload, block.uncounted_steps), payload)
        self._sent_seeds[block.number] = task
        if block.backup:
            block.next_backup = task
        else:
            block.backup = task

    def seed_acknowledged(self, link: Link, header: Header, block: BlockState | None) -> None:
        """Take a server's acknowledgement of a seed: it is now the backup of `block`, if that is owned here."""
        if self._sent_seeds.get(header.block) == link.task:
            del self._sent_seeds[header.block]
        if block is not None and block.next_backup == link.task:
            block.backup, block.next_backup = link.task, ""

    # --- removal of backups ---------------------------------------------------------------------------------------

    def plan_completed(self, owned: Collection[BlockState], backups: Mapping[int, str]) -> list[BlockState]:
        """Keep only the backups that a completed plan names; return the blocks whose workers can be answered now.

        A server that is a backup no more may have ended before it acknowledged a step.  The new backup has received the
        same step.

        Parameters
        ----------
        owned
            all blocks that this server owns.
        backups
            block number -> backup under the plan.

        """
        answerable = []
        for block in owned:
            # `backup` may name a server that is not in the plan: the next backup died before it acknowledged the seed.
            if block.backup and block.backup != backups.get(block.number):
                if block.awaits_backup:
                    answerable.append(block)
                self.release(block)
        return answerable + self._wait_only_for(lambda step: step.waits_for & set(step.block.backups))

    def release(self, block: BlockState) -> None:
        """Drop the backups, seeds and the unacknowledged step of a block."""
        block.backup = block.next_backup = ""
        block.awaits_backup = False
        self._sent_seeds.pop(block.number, None)
        self._due_seeds = deque((due, task) for due, task in self._due_seeds if due is not block)
        step = self._steps.get(block.number)
        if step is not None and step.block is block:
            del self._steps[block.number]

    def servers_died(self, dead: Collection[str], blocks: Collection[BlockState]) -> list[BlockState]:
        """Drop backups that have died, of these blocks; return the blocks whose workers can be answered now."""
        self._due_seeds = deque((block, task) for block, task in self._due_seeds if task not in dead)
        self._sent_seeds = {number: task for number, task in self._sent_seeds.items() if task not in dead}
        for block in blocks:
            if block.backup in dead:
                block.backup, block.next_backup = block.next_backup, ""
            if block.next_backup in dead:
                block.next_backup = ""
        return self._wait_only_for(lambda step: step.waits_for - set(dead))

    def _wait_only_for(self, backups: Callable[[_UnacknowledgedStep], set[str]]) -> list[BlockState]:
        """Set the backups for whose acknowledgement each step waits, by a function of the step.

        Return the blocks whose workers can be answered now.
        """
        answerable = []
        for step in list(self._steps.values()):
            step.waits_for = backups(step)
            answerable.append(self._complete(step))
        return [block for block in answerable if block is not None]


@dataclass(eq=False)
class ReplicaStore:
    """Backup's side of replication: keeps replicas of blocks that other servers own."""

    #: applies a step to a block
    apply: Callable[[BlockState, Step], None]
    #: complete replicas, by block number
    kept: dict[int, BlockState] = field(default_factory=dict)
    #: memory of replicas whose seeds have not arrived yet, by block number
    _expected: dict[int, BlockState] = field(default_factory=dict)
    #: unused buffers for steps, by length in bytes
    _free: dict[int, list[Array]] = field(default_factory=dict)
    #: number of the last plan that all members have moved to
    _completed_plan_number: int = 0

    def expect(self, blocks: Mapping[int, BlockState]) -> None:
        """Expect seeds of these blocks."""
        self._expected.update(blocks)

    def keep(self, block: BlockState) -> None:
        """Keep a block that this server owned as a replica."""
        self.kept[block.number] = block

    def remove(self, number: int) -> None:
        """Drop the replica of a block, complete or expected."""
        self._expected.pop(number, None)
        self.kept.pop(number, None)

    def plan_completed(self, numbers: Collection[int], plan_number: int) -> None:
        """Drop the replicas of all blocks except `numbers`, as all members have moved to a plan."""
        for number in [number for number in self.kept if number not in numbers]:
            self.remove(number)
        self._expected.clear()
        self._completed_plan_number = plan_number
        for block in self.kept.values():
            self._enter_completed_plan(block)

    def _enter_completed_plan(self, block: BlockState) -> None:
        """Put a replica under the completed plan if it is under an older one.

        The plan's first version comes with the owner's next step.  If the owner dies before, this server sends whole
        weights for two steps (`BlockState.changed_rows`), as a worker that the plan has added needs them.
        """
        if block.plan_number < self._completed_plan_number:
            block.plan_number, block.first = self._completed_plan_number, block.version

    def find(self, link: Link, header: Header) -> BlockState | None:
        """Return the replica for a seed or step of the block's owner; None if this server keeps none any more.

        Raises
        ------
        ProtocolError
            the replica is at another version than the step.

        """
        if header.kind == SEED:
            return self._expected.get(header.block)
        block = self.kept.get(header.block)
        if block is not None and block.version != header.version:
            raise ProtocolError(
                f"{link.task} sent step {header.version} of block {header.block}, "
                f"but the replica is at version {block.version}"
            )
        return block

    def take_seed(self, link: Link, header: Header) -> None:
        """Complete an expected replica, whose state has arrived, and acknowledge it.

        Raises
        ------
        ProtocolError
            the checksum is wrong.

        """
        block = self._expected.pop(header.block)
        header.check(block.weights_and_slots, link.task)
        block.plan_number, block.uncounted_steps = header.plan, header.uncounted_steps
        block.state_arrived(header)
        self.kept[header.block] = block
        link.send(header.reply(SEEDED))

    def buffer(self, definition: Block, header: Header, pieces: int) -> Array:
        """Return memory for the payload of a step.

        Parameters
        ----------
        definition
            the block.
        header
            of the frame.
        pieces
            number of pieces of tensors in the block.

        Raises
        ------
        ProtocolError
            the payload cannot be a step of the block.

        """
        count, sum_bytes = header.factor_count, header.length - 8 * header.factor_count
        fits = checked_length(definition, sum_bytes) >= 0 if definition.is_sparse else sum_bytes == definition.nbytes
        if not (count == header.length == 0 or (count in (2, 2 + pieces) and fits)):
            raise ProtocolError(
                f"a step of block {definition.number} cannot have {header.length} bytes with {count} factors"
            )
        free = self._free.get(header.length)
        return free.pop() if free else np.empty(header.length, dtype=np.uint8)

    def take_step(self, link: Link, header: Header, payload: Array) -> None:
        """Apply a step to the replica, and acknowledge it."""
        block = self.kept[header.block]
        self.apply(block, Step.parse(block.definition, payload, header.factor_count))
        block.plan_number, block.first = header.plan, header.first
        block.announced = header.next_plan, header.next_first
        block.version += 1
        self._enter_completed_plan(block)
        if not block.definition.is_sparse:
            self._free.setdefault(payload.size, []).append(payload)
        link.send(header.reply(REPLICATED))
