"""Guard: applies the site's limits to a decision, all of them at once; each change is recorded with its reason.

Every rule is a bound of a job's allocation or a bound of a sum over jobs. Where two cannot both hold, the softer one
gives way, and the reason says so (``Reason.gave_way``). From hard to soft:

1. state: a job whose coordinator is silent keeps its allocation, and one whose starts fail does not grow yet;
2. capacity: all jobs together get no more than the nodes that take new tasks have for them, without what claims have
   got. Tasks on other nodes do not count: when they end, nobody gets their room;
3. floors: a running job keeps its minimum size. Tasks of it that have no room in the capacity are decided and wait; for
   those that would have none even if no job had more than its floor, no other job shrinks;
4. limits: jobs of one user, account or partition hold no more than the site allows, and grow by no more than the
   resource manager's limits leave them; in these they make room for foreign jobs (``make_room_in_limits``);
5. cool-downs: a job that was resized a short while ago does not grow (``cooldown_up``) or shrink (``cooldown_down``);
6. churn: no more than a number of tasks are started in a slot.

No rule adds tasks to what the policy gave, except that a job keeps tasks that it has: also those on nodes that take no
new tasks, where the policy gives it fewer for want of room. Where a sum exceeds its bound, growth is taken away first,
beginning with the job submitted last; then tasks that run; and last tasks of jobs that a cool-down protects. Tasks of a
job that has never had its minimum size count as growth, with one exception: in an exceeded limit (4) the minimum sizes
of such jobs come before what other jobs have above theirs. Policies see the limits (``Snapshot.limits``). A limit can
be exceeded when floors alone exceed it, when the manager has lowered it, when it makes room for foreign jobs, or when
the policy ignores it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.cluster import Claimant, NodeGrant, SharedLimit, Snapshot
from dl2d.core.decision import FOR_WANT_OF_ROOM, Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import counted
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, JobRequest
from dl2d.core.resize_guard_state import GuardState
from dl2d.core.resource_manager import TASKS, GrowthLimit
from dl2d.core.resources import Resources
from dl2d.tick.limits.shared_limits import manager_limits, owners_of, site_limits
from dl2d.tick.observation.open_node_capacity import floor_tasks_without_room, room_on_nodes, tasks_on_closed_nodes
from dl2d.tick.reconciliation.unlisted_tasks_and_silent_coordinators import KeptSize
from dl2d.tick.tick_context import GuardRules

#: Maximum number of claims or jobs named in a reason.
_MAX_SHOWN = 3


def guard(
    decision: Decision,
    snapshot: Snapshot,
    rules: GuardRules,
    guard_state: GuardState,
    *,
    kept_sizes: Mapping[JobKey, KeptSize] | None = None,
    growth_limits: Collection[GrowthLimit] = (),
    last: Decision | None = None,
) -> Decision:
    """The decision within all rules, where jobs with ``kept_sizes`` keep what they have, for these causes.

    ``last`` is what was in force in the last slot, if that is known. While a task is moved, its replacement runs beside
    it, so the job has one task too many. Its cool-downs therefore take it to have no more than ``last`` gave
    it. ``decision`` is one that ``check_decision`` accepts.
    """
    floors, at, kept_sizes = dict(snapshot.floors), snapshot.at, kept_sizes or {}
    jobs = {job.key: job for job in snapshot.jobs}
    decided = {entry.job: entry.allocation for entry in last.jobs} if last is not None else {}
    job_bounds = []
    for entry in _with_closed_nodes(decision, jobs, snapshot):
        job, floor = jobs[entry.job], floors.get(entry.job, NOTHING)
        resized_at = guard_state.resized_at.get(job.key)
        if job.key in kept_sizes:
            found = _limits_of_kept_size(entry, job, kept_sizes[job.key])
        elif (
            (failures := guard_state.start_failures.get(job.key)) is not None
            and at < failures.retry_at(rules.backoff)
            and not entry.previous.covers(entry.allocation)
        ):
            found = _limits_in_backoff(entry, job, floor, failures, rules)
        else:
            # A job that was silent during a move was given what it had, the replacement included. So the bound is also
            # its maximum size.
            most = decided.get(job.key, job.request.max_size).common(job.request.max_size)
            held = entry.previous.common(most.larger(entry.allocation))
            found = _limits_of_job(entry, job, held, floor, resized_at, at, rules)
        if resized_at is not None and entry.previous != NOTHING:
            found.protected = max(at - resized_at, 0.0) < rules.cooldown_down
        job_bounds.append(found)
    sums = _add_capacity(job_bounds, snapshot)
    sums += _add_shared_limits(job_bounds, site_limits(owners_of(snapshot), rules))
    of_manager = manager_limits(snapshot, growth_limits)
    sums += _add_shared_limits(
        job_bounds, [limit for limit in of_manager if not limit.makes_room_for], keep_excess=True
    )
    sums += _add_shared_limits(job_bounds, [limit for limit in of_manager if limit.makes_room_for])
    for each in job_bounds:
        each.give(each.desired)
    exceeded = [total for total in sums if total.exceeded()]
    if rules.churn or exceeded:
        _reserve(job_bounds)
        members = Counter(total for each in job_bounds for total in each.sums)
        limits = [total for total in exceeded if total.is_limit and members[total] > 1]
        _keep_minimum_sizes(job_bounds, limits, rules, len(guard_state.started_at))
        _grow_in_submit_order(job_bounds, rules, len(guard_state.started_at))
        for total in sums:
            _report_excess(total, job_bounds)
    _explain_grants(job_bounds, snapshot)
    entries = (replace(each.entry, allocation=each.given, guarded=(*each.entry.guarded, *each.reasons))
               for each in job_bounds)  # fmt: skip
    return replace(decision, jobs=tuple(entries))


@dataclass(slots=True, eq=False)
class _JobBounds:
    """Allocations that a job may get."""

    entry: JobDecision
    job: Job
    #: The allocation below which it is not reduced.
    lowest: Allocation
    #: What it gets if neither a sum nor churn limits it.
    desired: Allocation
    #: What is kept for it while other jobs grow: what it has, unless a sum is smaller or it cannot train with that.
    reserved: Allocation
    #: Its minimum size, if it has never had that and limits keep it free for the job; besides ``reserved``.
    minimum: Allocation = NOTHING
    #: Jobs to whose minimum sizes it yields, each with the limits in which it does.
    yields_to: list[tuple[Job, list[_Sum]]] = field(default_factory=list)
    #: What it gets, as decided so far.
    given: Allocation = NOTHING
    keeps_size: bool = False
    #: Whether a cool-down keeps it from shrinking.
    protected: bool = False
    reasons: list[Reason] = field(default_factory=list)
    #: Sums that it is part of.
    sums: list[_Sum] = field(default_factory=list)

    def give(self, allocation: Allocation) -> None:
        """Replace ``given``, in the sums as well."""
        for total in self.sums:
            total.add(self.job, self.given, -1)
            total.add(self.job, allocation)
        self.given = allocation


@dataclass(slots=True, eq=False)
class _Sum:
    """Resources of several jobs together, in thousandths, and their bound."""

    constraint: Constraint
    #: The bound in words.
    text: str
    limit: Mapping[str, int]
    #: Waiting jobs that the text names.
    claimants: tuple[Claimant, ...] = ()
    #: Whether a resource that ``limit`` does not name has the bound 0; otherwise it has no bound.
    complete: bool = False
    #: The bound without what jobs have beyond it and keep, as no other job needs it.
    limit_without_excess: Mapping[str, int] = field(default_factory=dict)
    #: Whether it is a limit of the site or of the resource manager.
    is_limit: bool = False
    #: Of each job, how many of its tasks do not count.
    uncounted: Mapping[JobKey, Allocation] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, job: Job, allocation: Allocation, sign: int = 1) -> None:
        request = job.request
        if job.key in self.uncounted:
            allocation = allocation.beyond(self.uncounted[job.key])
        for demand, count in ((request.worker, allocation.workers), (request.ps, allocation.ps)):
            for name, amount in demand.thousandths:
                self.total[name] += sign * count * amount
        if TASKS in self.limit:
            self.total[TASKS] += sign * 1000 * allocation.tasks

    def exceeded(self) -> set[str]:
        """Resources of which the sum is more than its bound."""
        limit = self.limit
        if self.complete:
            return {name for name, amount in self.total.items() if amount > limit.get(name, 0)}
        return {name for name, most in limit.items() if self.total.get(name, 0) > most}


# Bounds of single jobs


def _with_closed_nodes(decision: Decision, jobs: Mapping[JobKey, Job], snapshot: Snapshot) -> Iterable[JobDecision]:
    """What was decided on each job; those that shrink for want of room keep tasks on nodes that take no new ones."""
    shrinking = {
        entry.job
        for entry in decision.jobs
        if entry.reason.constraint in FOR_WANT_OF_ROOM and not entry.allocation.covers(entry.previous)
    }
    kept = tasks_on_closed_nodes(snapshot) if shrinking else {}
    for entry in decision.jobs:
        if entry.job in shrinking and entry.job in kept:
            request = jobs[entry.job].request
            size = request.largest_within(entry.allocation.larger(kept[entry.job]))
            if size != entry.allocation and size.covers(request.min_size):
                text = f"it keeps {size}: other jobs do not get the room on nodes that take no new tasks"
                yield entry.changed_by(size, Reason(Constraint.CAPACITY, text))
                continue
        yield entry


def _limits_of_kept_size(entry: JobDecision, job: Job, kept: KeptSize) -> _JobBounds:
    held = entry.previous
    found = _JobBounds(entry, job, lowest=held, desired=held, reserved=held, keeps_size=True)
    if entry.allocation != held or kept.not_executing:
        found.reasons.append(Reason(Constraint.SILENT, f"{kept.cause}: allocation unchanged meanwhile"))
    return found


def _limits_in_backoff(
    entry: JobDecision, job: Job, floor: Allocation, failures: StartFailures, rules: GuardRules
) -> _JobBounds:
    held = entry.previous
    delay = failures.retry_at(rules.backoff) - failures.at
    times = f"{counted(failures.in_a_row, 'attempt')} in a row"
    text = f"{times} to start its tasks failed, the last: {failures.last}; the next one comes {delay:g} s after it"
    reason = Reason(Constraint.BACKOFF, text, gave_way=None if held.covers(floor) else Constraint.FLOOR)
    return _JobBounds(entry, job, lowest=held.common(floor), desired=held, reserved=held, reasons=[reason])


def _limits_of_job(
    entry: JobDecision,
    job: Job,
    held: Allocation,
    floor: Allocation,
    resized_at: float | None,
    at: float,
    rules: GuardRules,
) -> _JobBounds:
    """Limits of a job that is neither silent nor in back-off: its floor, what was decided, and its cool-downs.

    Cool-downs delay neither its first tasks nor tasks up to its floor. A resize that adds tasks of one role and removes
    tasks of the other has to wait for both of them. Of a job that has no floor, less than the minimum size is not
    reserved: it cannot train with that, and would keep it from jobs that can.
    """
    wanted = entry.allocation
    kept, smallest = held.common(wanted), job.request.min_size
    if floor == NOTHING and not kept.covers(smallest):
        kept = NOTHING
    found = _JobBounds(entry, job, lowest=floor, desired=wanted, reserved=kept.larger(floor))
    if resized_at is None or held == NOTHING:
        return found
    elapsed = max(at - resized_at, 0.0)
    cooling = (
        (not held.covers(wanted), rules.cooldown_up, "grow"),
        (not wanted.covers(held), rules.cooldown_down, "shrink"),
    )
    for applies, seconds, verb in cooling:
        if applies and elapsed < seconds:
            unchanged = held.larger(floor)
            if unchanged != wanted:
                text = f"was resized {elapsed:.0f} s ago and may {verb} again after {seconds:g} s"
                found.reasons.append(Reason(Constraint.COOLDOWN, text))
            if unchanged != held:
                text = f"it still gets its floor {floor}"
                found.reasons.append(Reason(Constraint.FLOOR, text, gave_way=Constraint.COOLDOWN))
            found.desired = found.reserved = unchanged
            break
    return found


# Bounds of sums


def _add_capacity(job_bounds: Sequence[_JobBounds], snapshot: Snapshot) -> list[_Sum]:
    """Add the sum over all jobs that the nodes bound; returns it.

    There is none if no job grows and nothing is claimed, since tasks that run are always within the capacity.
    """
    if not snapshot.grants and all(each.entry.previous.covers(each.desired) for each in job_bounds):
        return []
    room = room_on_nodes(snapshot)
    free: dict[str, int] = defaultdict(int)
    for on_node in room.values():
        for name, amount in on_node.items():
            free[name] += amount
    text = f"the nodes that take new tasks have {Resources(tuple(sorted(free.items())))} for all jobs"
    if snapshot.grants:
        text += f" beside what is claimed: {_grants_text(snapshot.grants)}"
    constraint = Constraint.CLAIM if snapshot.grants else Constraint.CAPACITY
    capacity = _Sum(constraint, text, free, _claimants(snapshot.grants), complete=True)
    waiting = floor_tasks_without_room([(each.job, each.lowest) for each in job_bounds], snapshot, room)
    uncounted = tasks_on_closed_nodes(snapshot)
    capacity.uncounted = uncounted | {key: uncounted.get(key, NOTHING).plus(more) for key, more in waiting.items()}
    for each in job_bounds:
        each.sums.append(capacity)
        if each.job.key in waiting:
            text = (
                f"it has fewer tasks than its floor {each.lowest} for now: even if every other job had only its floor, "
                "the nodes that take new tasks of this job would not have room for all of them"
            )
            each.reasons.append(Reason(Constraint.CAPACITY, text, gave_way=Constraint.FLOOR))
    return [capacity]


def _add_shared_limits(
    job_bounds: Iterable[_JobBounds],
    limits: Iterable[SharedLimit],
    *,
    keep_excess: bool = False,
) -> list[_Sum]:
    """Add a sum for each limit to the jobs that are in it; returns these sums.

    With ``keep_excess``: if jobs already exceed a lowered limit, its bound is what they have and are to keep.
    """
    by_key = {each.job.key: each for each in job_bounds}
    sums = []
    for limit in limits:
        members, most = [by_key[key] for key in limit.jobs], dict(limit.most)
        constraint = Constraint.CLAIM if limit.makes_room_for else Constraint.LIMIT
        found = _Sum(
            constraint, limit.text, most, claimants=limit.makes_room_for, limit_without_excess=most, is_limit=True
        )
        for each in members if keep_excess else ():
            found.add(each.job, each.entry.previous.common(each.desired))
        if keep_excess:
            found.limit = {name: max(amount, found.total.get(name, 0)) for name, amount in most.items()}
            found.total.clear()
        for each in members:
            each.sums.append(found)
        sums.append(found)
    return sums


def _reserve(job_bounds: list[_JobBounds]) -> None:
    """Reduce what is reserved until all sums hold or nothing more can be taken; from protected jobs it is taken last.

    Gives each job what is reserved for it.
    """
    for each in job_bounds:
        each.give(each.reserved)
    for protected in (False, True):
        for each in reversed(job_bounds):
            if each.protected is protected:
                _reduce(each, each.lowest)
                each.reserved = each.given


def _keep_minimum_sizes(
    job_bounds: Sequence[_JobBounds], limits: Sequence[_Sum], rules: GuardRules, started: int
) -> None:
    """Keep room in exceeded limits for the minimum sizes that jobs have never had and are to get, in submit order.

    What other jobs have above their minimum sizes gives way, of the job submitted last first, unless a cool-down
    protects it. Nothing is taken away for a minimum size that does not fit all the same, or for which churn has no
    starts left: ``started`` tasks were started in the last slot.
    """
    starts_left = max(rules.churn - started, 0)
    above_minimum = [each for each in reversed(job_bounds) if not each.protected and each.given != NOTHING]
    failed = set[tuple[object, ...]]()
    for each in job_bounds if limits else ():
        request, held = each.job.request, each.entry.previous
        smallest = request.min_size
        exceeded = [total for total in limits if total in each.sums]
        if (
            not exceeded
            or each.lowest != NOTHING
            or not each.desired.covers(smallest)
            or each.reserved.covers(smallest)
        ):
            continue
        starts = smallest.beyond(held).tasks
        if rules.churn and starts > starts_left and (held != NOTHING or starts_left < rules.churn):
            continue
        alike = request.worker, request.ps, smallest, each.given, *map(id, each.sums)
        if alike in failed:
            continue
        before = [(each, each.given), *((other, other.given) for other in above_minimum)]
        limits_before = [total.limit for total in exceeded]
        for total in exceeded:
            total.limit = total.limit_without_excess
        each.give(each.given.larger(smallest))
        for other in above_minimum:
            _reduce_to_minimum(other, exceeded)
        if any(total.exceeded() for total in each.sums):
            failed.add(alike)
            for other, given in before:
                other.give(given)
            for total, limit in zip(exceeded, limits_before, strict=True):
                total.limit = limit
            continue
        each.minimum = each.given
        starts_left = max(starts_left - starts, 0)
        for other, given in before[1:]:
            if other.given != given:
                other.reserved = other.given
            if other.given != other.desired and any(total in other.sums for total in exceeded):
                other.yields_to.append((each.job, exceeded))


def _reduce_to_minimum(each: _JobBounds, limits: Iterable[_Sum]) -> None:
    """Take away what a job has above its minimum size until these limits hold, as far as it is part of them."""
    request = each.job.request
    mine = [total for total in limits if total in each.sums]
    if not mine or not each.given.covers(request.min_size):
        return
    least = each.lowest.larger(request.min_size)
    while exceeded := set[str]().union(*(total.exceeded() for total in mine)):
        smaller = _smaller(request, each.given, least, exceeded)
        if smaller is None:
            return
        each.give(smaller)


def _reduce(each: _JobBounds, least: Allocation) -> list[_Sum]:
    """Take tasks away, not below ``least``, until the job's sums hold; returns the sums that did not hold.

    Tasks that count in none of the exceeded sums stay.
    """
    binding: list[_Sum] = []
    while True:
        exceeded: set[str] = set()
        uncounted = each.given
        for total in each.sums:
            if more := total.exceeded():
                exceeded |= more
                uncounted = uncounted.common(total.uncounted.get(each.job.key, NOTHING))
                if total not in binding:
                    binding.append(total)
        kept = least if uncounted == NOTHING else _least_with(each.job.request, least, uncounted, each.given)
        smaller = _smaller(each.job.request, each.given, kept, exceeded) if exceeded else None
        if smaller is None:
            return binding
        each.give(smaller)


def _least_with(request: JobRequest, least: Allocation, kept: Allocation, given: Allocation) -> Allocation:
    """The least that the job may have of ``given`` with the tasks ``kept``; ``least`` where it cannot train with it."""
    size = least.larger(kept)
    if not size.covers(request.min_size):
        return least
    workers = next((count for count in range(size.workers, given.workers) if request.allows(count)), given.workers)
    return Allocation(workers, size.ps)


def _smaller(
    request: JobRequest, allocation: Allocation, least: Allocation, exceeded: Collection[str]
) -> Allocation | None:
    """The next smaller allocation within the job's bounds and not below ``least``; None if there is none.

    Tasks of roles that need an exceeded resource are taken away, in this order:

    1. while there are more PSs than workers, a PS;
    2. as many workers as it takes to the next allowed number of workers, and with them the PSs beyond that number;
    3. if there can be no fewer workers, a PS;
    4. if there can be no fewer tasks, all that is above ``least``.
    """
    workers, ps = request.largest_allowed(allocation.workers - 1), max(request.min_ps, least.ps)
    surplus_workers = _needs(request.worker, exceeded) and allocation.workers > least.workers
    surplus_ps = _needs(request.ps, exceeded) and allocation.ps > least.ps
    fewer_workers = surplus_workers and workers >= max(least.workers, 1)
    fewer_ps = surplus_ps and allocation.ps > ps
    if fewer_ps and (allocation.ps > allocation.workers or not fewer_workers):
        return Allocation(allocation.workers, allocation.ps - 1)
    if fewer_workers:
        return Allocation(workers, max(min(allocation.ps, max(workers, ps)), least.ps))
    return least if surplus_workers or surplus_ps else None


def _needs(demand: Resources, resources: Collection[str]) -> bool:
    return TASKS in resources or any(name in resources for name, _ in demand.thousandths)


def _grow_in_submit_order(job_bounds: Sequence[_JobBounds], rules: GuardRules, started: int) -> None:
    """Give each job what it desires as far as sums and churn allow, in submit order; at least what is reserved for it.

    No job takes the starts of a later one's ``minimum``, for which others may have shrunk. ``started``: tasks that were
    started in the last slot.
    """
    starts_left = max(rules.churn - started, 0)
    starts_kept = sum(each.minimum.beyond(each.entry.previous).tasks for each in job_bounds)
    for each in job_bounds:
        held = each.entry.previous
        starts_kept -= each.minimum.beyond(held).tasks
        most = max(starts_left - starts_kept, 0)
        each.give(each.desired)
        binding = _reduce(each, each.reserved.larger(each.minimum))
        if each.given != each.desired:
            _explain_limit(each, binding)
        if not rules.churn:
            continue
        # A job without tasks may exceed the number if the slot has no start yet: it might never start otherwise.
        # Tasks that a job has are not starts.
        least = each.reserved.larger(held.common(each.given))
        if held == NOTHING and most == rules.churn:
            least = least.larger(each.job.request.min_size)
        if each.given.beyond(held).tasks > most and each.given != least:
            each.reasons.append(Reason(Constraint.CHURN, f"this slot's {rules.churn} starts are used up"))
            _reduce_starts(each, least, most)
        starts = each.given.beyond(held).tasks
        if starts > starts_left and each.given == each.reserved:
            text = f"this slot's {rules.churn} starts are used up; it still gets its floor {each.lowest}"
            each.reasons.append(Reason(Constraint.FLOOR, text, gave_way=Constraint.CHURN))
        starts_left = max(starts_left - starts, 0)


def _reduce_starts(each: _JobBounds, least: Allocation, starts: int) -> None:
    """Take new tasks away, not below ``least``, until there are no more than so many."""
    request, held = each.job.request, each.entry.previous
    resources = {name for demand in (request.worker, request.ps) for name, _ in demand.thousandths}
    while each.given.beyond(held).tasks > starts:
        smaller = _smaller(request, each.given, least, resources)
        if smaller is None:
            return
        each.give(smaller)


def _explain_limit(each: _JobBounds, binding: Iterable[_Sum]) -> None:
    """Add the sums that took tasks away to the job's reasons, and that its cool-down gave way to them."""
    broken = each.protected and not each.given.covers(each.entry.previous)
    gave_way = Constraint.COOLDOWN if broken else None
    for total in binding:
        text = f"{total.text}; the job's cool-down gave way" if broken else total.text
        if jobs := [job for job, limits in each.yields_to if total in limits]:
            text += f"; the job yields to {_minimum_sizes_text(jobs)}"
        each.reasons.append(Reason(total.constraint, text, gave_way=gave_way, claimants=total.claimants))


def _minimum_sizes_text(jobs: Sequence[Job]) -> str:
    shown = [f"the minimum size {job.request.min_size} of job {job.key.id}" for job in jobs[:_MAX_SHOWN]]
    more = len(jobs) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")


def _explain_grants(job_bounds: Iterable[_JobBounds], snapshot: Snapshot) -> None:
    """Name grants to jobs whose tasks leave for them, or for which too little is left, where no reason does so yet."""
    if not snapshot.grants:
        return
    tags = {task.tag: task.job for task in snapshot.tasks}
    grants_of: dict[JobKey, list[NodeGrant]] = defaultdict(list)
    for grant in snapshot.grants:
        for key in {tags[tag] for tag in grant.leaving}:
            grants_of[key].append(grant)
    for each in job_bounds:
        if any(reason.constraint is Constraint.CLAIM for reason in each.reasons):
            continue
        grants: Sequence[NodeGrant] = grants_of.get(each.job.key, ())
        if not grants and each.entry.reason.constraint in (Constraint.CAPACITY, Constraint.FRAGMENTED):
            grants = snapshot.grants
        if grants:
            each.reasons.append(Reason(Constraint.CLAIM, _grants_text(grants), claimants=_claimants(grants)))


def _grants_text(grants: Sequence[NodeGrant]) -> str:
    more = len(grants) - _MAX_SHOWN
    return "; ".join(grant.text for grant in grants[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _claimants(grants: Sequence[NodeGrant]) -> tuple[Claimant, ...]:
    """The jobs that ``_grants_text`` names."""
    return tuple(claimant for grant in grants[:_MAX_SHOWN] if (claimant := grant.claimant) is not None)


def _report_excess(total: _Sum, job_bounds: Iterable[_JobBounds]) -> None:
    """Add to the reasons of its jobs that a sum is exceeded by floors and jobs that keep their size alone."""
    exceeded = total.exceeded()
    if not exceeded:
        return
    for each in job_bounds:
        request, given = each.job.request, each.given
        demands = (request.worker, given.workers), (request.ps, given.ps)
        if total not in each.sums or not any(count and _needs(demand, exceeded) for demand, count in demands):
            continue
        if total.constraint in (Constraint.CAPACITY, Constraint.CLAIM):
            if not each.entry.previous.covers(given):
                text = f"{total.text}: it has fewer tasks than its floor {each.lowest} for now"
                gave_way = Constraint.FLOOR
                each.reasons.append(Reason(total.constraint, text, gave_way=gave_way, claimants=total.claimants))
        else:
            rule, kept = (Constraint.SILENT, "allocation") if each.keeps_size else (Constraint.FLOOR, "floor")
            text = f"it keeps its {kept} {each.lowest} although {total.text}"
            each.reasons.append(Reason(rule, text, gave_way=total.constraint))
