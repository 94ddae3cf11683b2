"""A worker of an all-reduce job: it has the whole model, and adds up gradients with the others in a process group.

A step: every worker computes its part of the logical shards; the sums of its tree nodes are cut into slices, each
worker adds up one slice along the fixed tree and gives it to all, and each applies the optimizer to its own replica.
So the bits are those of a run in one process, whatever the number of workers.

A plan's group is made beside the computation.  The first worker of the plan in force says in-band from which version
on the next one rules.  A worker that joins gets weights and optimizer state from another one while the others compute
the next step: it does not compute in that step, but gets its sum, and applies it as soon as the state is there.

If the exchange breaks, nobody applies anything: the coordinator makes a group of those that are left, the newest
version among them is theirs, who has an older one gets it, and they go on from there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn, Unpack

import numpy as np
from numpy.typing import NDArray

from pslite.errors import JobFailed, PeerLost, ProtocolError, UsageError
from pslite.job.job_spec import JobSpec
from pslite.job.membership_plan import Plan
from pslite.job.weight_blocks import cut
from pslite.net.authentication import Identity
from pslite.net.messages import Announced, Broken, Digests, Failed, Restored
from pslite.numeric.gradient_sums import Bundle, Contribution, Supply
from pslite.storage.checkpoint_files import Saver, to_resume
from pslite.worker.allreduce.gradient_summing import Division, Summing
from pslite.worker.allreduce.plan_groups import GroupBroken, PlanGroups, ReadyPlan
from pslite.worker.allreduce.process_group import Group, Work
from pslite.worker.allreduce.state_transfer import Giving, Taking
from pslite.worker.control_connection import MemberOptions, Membership
from pslite.worker.model_replica import ModelReplica
from pslite.worker.training_session import Share


class AllReduceWorker(Membership):
    """One worker of an elastic all-reduce job, seen as `pslite.worker.ps.worker.Worker` shows one with servers.

    Parameters
    ----------
    spec
        the job as this worker's script describes it; must equal the other workers'.
    host
        name or address under which other workers reach this one; the way to the coordinator if empty.

    The others are those of `Membership`.

    """

    def __init__(
        self,
        identity: Identity,
        coordinator: str,
        spec: JobSpec,
        *,
        host: str = "",
        **options: Unpack[MemberOptions],
    ) -> None:
        super().__init__(identity, coordinator, **options)
        self._spec = spec
        self.blocks = cut(spec)
        self.weights = Bundle(spec, self.blocks)
        self.supply = Supply(spec, self.blocks)
        self.share = Share(spec, 1, 0)
        self._groups = self._handler = PlanGroups(
            identity.task, spec, self.weights.memory.size, self.supply, self._send, self._check
        )
        self._host = host
        self._replica = ModelReplica(spec, self.blocks, self.weights)
        self._summing = Summing(spec, self.blocks)
        self._plan: Plan | None = None
        self._group: Group | None = None
        self._division = Division(spec, 1, (0,), self.weights.memory.size)
        #: whether others have the weights of the present version and this worker gets them in the coming step; from
        #: whom, and which version that is
        self._behind = False
        self._giver = 0
        self._newest = -1
        self._taking: Taking | None = None
        self._giving: list[Giving] = []
        self._saver: Saver | None = None
        #: a plan whose first step is not done yet
        self._unreported = 0

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return self._spec

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the first of the plan in force; after the end, whether it writes files."""
        if self._groups.chief is not None:
            return self._groups.chief == self._identity.task
        return self._group is not None and self._group.rank == 0

    # --- joining and leaving --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the job; returns when the weights are here and there is something to compute.

        Raises
        ------
        AuthenticationError
            the coordinator refused this worker.
        JobFailed
            the job failed meanwhile.
        Drained
            this worker is not needed.

        """
        client = self._open()
        self._groups.host = host = self._host or client.own_host
        self._taking = Taking(self._identity, self._job, host, self._say)
        self._saver = Saver(self.spec, f"{self._identity.task}-{self._identity.incarnation[:8]}", self._send)
        self._join(
            self.spec,
            address=f"[{host}]:{self._taking.port}" if ":" in host else f"{host}:{self._taking.port}",
            local=self._taking.local,
            machine=self._taking.machine,
        )
        self._recover()
        self._catch_up()
        self._progress.computes = True

    def finish(self) -> None:
        """Say that the last version is reached, and wait until everybody has it: others may need this worker's."""
        self._progress.computes = False
        self._reports.report(force=True)
        self._send(Digests(blocks=self._replica.digests()))
        self._reports.finished()
        while self._groups.chief is None:
            try:
                self._groups.wait(lambda: self._groups.chief is not None)
            except GroupBroken:
                self._recover()
        assert self._saver is not None
        self._saver.close()
        self._groups.close_before(sys.maxsize)

    def _close(self) -> None:
        self._abandon()
        self._groups.close()
        if self._taking is not None:
            self._taking.close()

    def _leave(self, plan: int) -> None:
        """Wait to be let go: until then the others may need this worker's state."""
        self._reports.drained(plan)
        self._groups.wait(lambda: False)

    # --- a step ---------------------------------------------------------------------------------------------------

    def exchange(self, contributions: Sequence[Contribution], loss: float, samples: int) -> tuple[int, ...]:
        """Add up this step's gradients with the other workers', and make the next version.

        Parameters
        ----------
        contributions
            one for each node of `share.nodes`.
        loss
            sum of the losses of this worker's samples.
        samples
            their number.

        Returns
        -------
        None where there is a newer version; otherwise the nodes of `share`, to be computed for the same version,
        because a worker is gone and the others share the step anew.

        Raises
        ------
        Drained
            this was the worker's last step.
        JobFailed
            the job failed.

        """
        if {c.node for c in contributions} != set(self.share.nodes):
            raise UsageError(
                f"the gradients given for step {self.version} must be those of the tree nodes {self.share.nodes}, "
                "each once"
            )
        before = self.version
        self._progress.computes = False
        try:
            self._step(contributions)
        except GroupBroken:
            self._recover()
        self._catch_up()
        self._progress.computes = True
        if self.version == before:
            return self.share.nodes
        self._reports.add_loss(loss, samples)
        self._reports.step_ended()
        return ()

    def _catch_up(self) -> None:
        """Take part in steps in which this worker has nothing to compute."""
        while not self.share.nodes and self.version < self.spec.total_versions:
            try:
                self._step(())
            except GroupBroken:
                self._recover()

    def _step(self, contributions: Sequence[Contribution]) -> None:
        """Make the next version with the group in use."""
        group, plan = self._group, self._plan
        assert group is not None
        assert plan is not None
        self._groups.look()
        version = self._newest if self._behind else self.version
        ready = group.rank == 0 and plan.number < self._groups.committed and version + 1 < self.spec.total_versions
        stamp = self._groups.committed if ready else 0
        try:
            said = None
            works: list[Work] = []
            if group.size > 1:
                work, said = group.gather((plan.number, version, stamp))
                works = [work, *self._summing.begin(group, self._division, contributions)]
            if self._behind:
                # This worker's part of the exchange goes on meanwhile: nobody waits for it.
                self._take_state(plan)
            self._await(works)
            if said is not None:
                self._compare(plan, version, said)
                stamp = int(said[0][2])
            self._await(self._summing.add_up(group, self._division))
        except PeerLost as error:
            self._broke(str(error))
        self._replica.apply(self._summing.total(group, contributions), self.version, self._before_change)
        self._giving.clear()
        self._progress.version += 1
        self._save(group)
        self._settle(group, plan)
        if stamp:
            if group.rank == 0:
                self._send(Announced(plan=stamp, first=self.version))
            coming = self._groups.ready(stamp)
            if coming.group is None:
                self._leave(stamp)
            self._enter(coming)

    def _before_change(self, block: int) -> None:
        """Wait until nobody is getting a block from this worker: a change that has begun must be made whole."""
        if all(giving.spares(block) for giving in self._giving):
            return
        self._reports.suspension.start()
        while not all(giving.spares(block) for giving in self._giving):
            self._check()
            if self._groups.superseded:
                self._stop_giving()
            self._groups.rest()
        self._reports.suspension.stop()

    @staticmethod
    def _compare(plan: Plan, version: int, said: NDArray[np.int64]) -> None:
        """Check that all mean the same step."""
        for member, (number, theirs, _) in zip(plan.workers, said.tolist(), strict=True):
            if (number, theirs) != (plan.number, version):
                raise ProtocolError(
                    f"{member.task} is at version {theirs} of plan {number}, but this worker at {version} of plan "
                    f"{plan.number}"
                )

    def _save(self, group: Group) -> None:
        """Keep this worker's part of a checkpoint, if it is time for one."""
        assert self._saver is not None
        for block in self.blocks[group.rank :: group.size]:
            self._saver.take(block.number, self.version, self._replica.states[block.number])

    def _settle(self, group: Group, plan: Plan) -> None:
        """Everybody has the weights now: from here on all compute."""
        if len(self._division.active) < min(group.size, self.spec.shards):
            self._divide(group, range(group.size))
        if self._unreported == plan.number:
            self._unreported = 0
            self._reports.first_push(plan.number)

    def _divide(self, group: Group, ready: Sequence[int]) -> None:
        self._division = Division(self.spec, group.size, ready, self.weights.memory.size)
        place = self._division.place(group.rank)
        self.share = Share(self.spec, len(self._division.active), max(0, place))
        self.share.nodes = self._division.nodes[group.rank]

    # --- from plan to plan ----------------------------------------------------------------------------------------

    def _enter(self, ready: ReadyPlan) -> None:
        """Take a plan into use: all of its workers do so, at the newest version that one of them has."""
        group, plan = ready.group, ready.plan
        assert group is not None
        self._reports.was_member = self._progress.entered
        self._reports.suspension.total_ms = 0.0
        self._reports.suspension.start()
        self._plan, self._group, self._groups.current = plan, group, plan.number
        self._summing.reserve(ready.room)
        versions = self._versions(group)
        self._reports.suspension.stop()
        self._newest = max(versions)
        if self._newest < 0:
            if not ready.fresh:
                self._fail("no worker that is left has the weights")
            if group.rank == 0:
                self._begin()
        self._giver = versions.index(self._newest)
        behind = [rank for rank, version in enumerate(versions) if version < self._newest]
        if self._newest < 0:
            behind = list(range(1, group.size))
        self._behind = group.rank in behind
        if group.rank == self._giver:
            states = self._replica.states
            self._giving = [
                Giving(plan.workers[rank], self._identity, plan.number, self.version, states, self._groups.wake)
                for rank in behind
            ]
        self._unreported = plan.number
        if self._newest in (-1, self.spec.total_versions):
            # Nobody computes meanwhile.
            if self._behind:
                self._take_state(plan)
            behind = []
        if group.rank == self._giver:
            self._send(Announced(plan=plan.number, first=self.version))
        self._divide(group, [rank for rank in range(group.size) if rank not in behind])

    def _versions(self, group: Group) -> list[int]:
        mine = self.version if self._progress.entered else -1
        if group.size == 1:
            return [mine]
        try:
            work, versions = group.gather((mine,))
            self._await([work])
        except PeerLost as error:
            self._broke(str(error))
        return [int(version) for version in versions[:, 0]]

    def _begin(self) -> None:
        """As the chief, begin the job with this worker's weights, or from a checkpoint."""
        found = to_resume(self.spec)
        self._replica.begin(found)
        if found is not None:
            self._say(f"the job goes on from version {found.version}: {found.place}")
            self._send(Restored(version=found.version))
            self._progress.version = found.version
        self._progress.entered = True

    def _take_state(self, plan: Plan) -> None:
        """Get weights and optimizer state; until all of it is here the worker keeps what it has."""
        assert self._taking is not None
        states = self._replica.states
        if self._progress.entered:
            states = [np.empty_like(state) for state in states]
        try:
            version = self._taking.take(plan.workers[self._giver], plan.number, states, self._groups.look)
        except (PeerLost, ProtocolError) as error:
            self._broke(str(error))
        except BaseException:
            self._abandon()
            raise
        self._replica.states = states
        self._replica.show()
        self._progress.version = version
        self._progress.entered = True
        self._behind = False

    def _recover(self) -> None:
        """Take the next plan into use that does not need the present one's group."""
        while True:
            self._abandon()
            ready = self._groups.replacement(any_plan=not self._progress.entered)
            try:
                self._enter(ready)
            except GroupBroken:
                continue
            self._groups.close_before(ready.plan.number)
            return

    def _abandon(self) -> None:
        """Give up what is under way."""
        self._stop_giving()
        self._giving.clear()
        if self._group is not None:
            self._group.close()

    def _stop_giving(self) -> None:
        for giving in self._giving:
            giving.stop()

    def _broke(self, reason: str) -> NoReturn:
        """The exchange failed: the coordinator knows why, or is told now."""
        self._abandon()
        self._check()
        if not self._groups.superseded:
            self._send(Broken(plan=self._groups.current, reason=reason))
        raise GroupBroken

    def _fail(self, reason: str) -> NoReturn:
        self._abandon()
        self._send(Failed(reason=reason))
        self._groups.wait(lambda: False)
        raise JobFailed(reason)

    # --- waiting --------------------------------------------------------------------------------------------------

    def _await(self, works: Sequence[Work]) -> None:
        """Wait for operations of the group; raises ``PeerLost`` if one failed."""
        try:
            self._groups.wait(lambda: all(work.done for work in works))
        except BaseException:
            self._abandon()
            raise
        for work in works:
            work.result()
