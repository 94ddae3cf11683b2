"""The plans that a worker knows: the one in force, those that it is ready for, and how deaths change them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from pslite.job.job_spec import JobSpec
from pslite.job.membership_plan import Member, Plan


@dataclass(frozen=True)
class PreparedPlan:
    """A plan for which this worker has opened its connections, and the plan before it."""

    plan: Plan
    previous: Plan | None
    spec: JobSpec

    @property
    def added(self) -> range:
        """Numbers of the blocks that the plan adds to a job that has begun."""
        return range(len(self.previous.owners), len(self.plan.owners)) if self.previous is not None else range(0)

    def first_stayer(self, gone: Collection[str]) -> str:
        """Return the first worker that is alive and was in the plan before; "" if there is none."""
        before = {member.task for member in self.previous.workers} if self.previous is not None else set()
        return next((m.task for m in self.plan.workers if m.task in before and m.task not in gone), "")


class PlanTable:
    """Plans of a job as one of its workers knows them; it touches no connection.

    Parameters
    ----------
    task
        of this worker.

    """

    def __init__(self, task: str) -> None:
        self.task = task
        #: the plan in force, and its first version
        self.current: Plan | None = None
        self.first = 0
        #: number and first version of the plan that takes effect next, as the servers have announced it
        self.next: tuple[int, int] | None = None
        #: members that are known to be dead
        self.gone: frozenset[str] = frozenset()
        self._prepared: dict[int, PreparedPlan] = {}
        #: plans that were given up, perhaps while they were prepared
        self._given_up: set[int] = set()
        #: the last plan that all members have moved to
        self._settled = 0
        #: by plan, tree nodes of dead workers that this one computes beside its own
        self._inherited: dict[int, tuple[int, ...]] = {}

    # --- plans come and go ----------------------------------------------------------------------------------------

    def add(self, prepared: PreparedPlan) -> bool:
        """Take up a plan for which all connections are open; returns False if it was given up meanwhile."""
        if prepared.plan.number in self._given_up:
            return False
        self._prepared[prepared.plan.number] = prepared
        return True

    def give_up(self, number: int) -> None:
        """Forget a plan that does not take effect."""
        self._prepared.pop(number, None)
        self._given_up.add(number)
        if self.next is not None and self.next[0] == number:
            self.next = None  # announced, but the job ends before

    def announced(self, number: int, first: int) -> None:
        """Note when a plan takes effect, unless it is known that it does not: servers may hear of that later."""
        if number not in self._given_up:
            self.next = number, first

    def begin(self, number: int) -> PreparedPlan | None:
        """Have a prepared plan be the current one, with which this worker comes to the job; None if it is unknown."""
        prepared = self._prepared.get(number)
        if prepared is not None:
            self.current = prepared.plan
        return prepared

    def later(self, number: int) -> PreparedPlan | None:
        """Return a prepared plan if it comes after the current one."""
        assert self.current is not None
        return self._prepared[number] if number > self.current.number else None

    def enter(self, prepared: PreparedPlan, version: int) -> bool:
        """Have a plan be in force from a version on; returns whether this worker was a member of the one before."""
        was_member = self.current is not prepared.plan
        self.current, self.first = prepared.plan, version
        return was_member

    def following(self, version: int) -> PreparedPlan | None:
        """Return the plan that is announced to take effect at that version."""
        coming = self.next
        return self._prepared.get(coming[0]) if coming is not None and coming[1] == version else None

    def settle(self, number: int) -> set[str]:
        """Note that all members have moved to the current plan; returns servers that only earlier ones may need."""
        self._settled = number
        before = [prepared.previous for prepared in self._prepared.values()]
        before += [self._prepared.pop(earlier).plan for earlier in [n for n in self._prepared if n < number]]
        unused = {member.task for plan in before if plan is not None for member in plan.servers}
        return unused - {member.task for prepared in self._prepared.values() for member in prepared.plan.servers}

    # --- deaths ---------------------------------------------------------------------------------------------------

    def lose_workers(self, gone: Iterable[str], inherited: Mapping[int, tuple[int, ...]]) -> None:
        """Note dead workers, and by plan which of their tree nodes this worker computes."""
        self.gone |= set(gone)
        self._inherited = dict(inherited)

    def replace_owners(self, gone: Collection[str], owners: Mapping[int, Member]) -> None:
        """Have other servers own the blocks of dead ones, in every plan."""
        self.gone |= set(gone)
        for number, prepared in self._prepared.items():
            self._prepared[number] = replace(
                prepared,
                plan=prepared.plan.without(gone, owners),
                previous=prepared.previous and prepared.previous.without(gone, owners),
            )
        if self.current is not None:
            self.current = self._prepared[self.current.number].plan

    # --- what they say --------------------------------------------------------------------------------------------

    @property
    def prepared(self) -> PreparedPlan | None:
        """The current plan with the one before it."""
        return self._prepared.get(self.current.number) if self.current is not None else None

    @property
    def inherited(self) -> tuple[int, ...]:
        """Tree nodes of dead workers that this one computes under the current plan."""
        return self._inherited.get(self.current.number, ()) if self.current is not None else ()

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of the current plan that is alive."""
        return self.workers()[:1] == [self.task]

    def workers(self) -> list[str]:
        """Return the workers of the current plan that are alive, in its order."""
        members = self.current.workers if self.current is not None else ()
        return [member.task for member in members if member.task not in self.gone]

    def unsettled(self) -> list[Plan]:
        """Return the plans in force, of which there are two until all have moved, and those to come."""
        prepared = self._prepared.values()
        before = [each.previous for each in prepared if each.previous and each.plan.number > self._settled]
        return [*before, *(each.plan for each in prepared)]

    def servers(self) -> dict[str, Member]:
        """Return the servers of these plans that are alive."""
        return {m.task: m for plan in self.unsettled() for m in plan.servers if m.task not in self.gone}

    def may_own(self, block: int) -> set[str]:
        """Return the servers that own a block under one of these plans."""
        return {plan.owner(block).task for plan in self.unsettled() if plan.has(block)}

    def owner_at(self, block: int, version: int) -> str:
        """Return the server that sends a block at a version, which may be one that a plan adds; "" if it is unknown."""
        coming = self.following(version)
        for plan in (self.current, coming.plan if coming is not None else None):
            if plan is not None and plan.has(block):
                return plan.owner(block).task
        return ""
