"""The tick: observe, reconcile, requeue, vacate, decide, guard, place, apply, record.

Daemon and simulator run this function.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from msgspec import structs

from dl2d.core.cluster import Snapshot, TaskGroup, submit_order
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Decision, JobDecision
from dl2d.core.jobs import NOTHING, Allocation, JobKey
from dl2d.core.plan_of_starts_and_stops import Outcome, Plan
from dl2d.tick.apply_plan import apply
from dl2d.tick.avoided_nodes import avoided_of_queued, remember_refused_starts
from dl2d.tick.count_failed_starts import count_refused
from dl2d.tick.decision.canary_decision import canary_jobs
from dl2d.tick.decision.decide import decide, decision_in_force, room_appeared, situation_digest
from dl2d.tick.decision.long_waiting_jobs import held_back, jobs_held_back
from dl2d.tick.decision.present_sizes_decision import present_sizes_decision
from dl2d.tick.limits.defer_starts_beyond_limits import groups_without_replacement, within_allowance, within_limits
from dl2d.tick.limits.resize_guard import guard
from dl2d.tick.limits.shared_limits import left_by_site_limits, limits_for_policies
from dl2d.tick.observation.observe import observe, with_evidence
from dl2d.tick.place.place import place
from dl2d.tick.policy_check.policy_failures import set_aside_after_wait
from dl2d.tick.policy_check.waiting_jobs_that_fit import NeedlessWait, startable_waiting_jobs
from dl2d.tick.reconcile import Reconciled, reconcile
from dl2d.tick.reconciliation.queued_tasks import QueueHistory, queue_tasks
from dl2d.tick.record_slot import Report, record
from dl2d.tick.requeue_coordinators import requeue_coordinators
from dl2d.tick.tick_context import Context
from dl2d.tick.tick_state import SlotDecision, TickState
from dl2d.tick.vacating.make_room_in_limits import make_room_in_limits
from dl2d.tick.vacating.vacate_for_waiting_jobs import vacate_nodes


def tick(context: Context, state: TickState) -> tuple[TickState, Report]:
    """Run one tick; returns the state for the next one, and what this one did.

    The policy is asked once per slot, and earlier when the situation changes (``situation_digest`` lists what counts),
    a task fails, tasks have to leave a node for a new claim, a job of others gets room in a limit, or room appears for
    a job that has nothing while jobs of others wait. The ticks in between carry on with the decision in force, as
    resources become free. A slot is recorded when it is decided. A policy that leaves jobs waiting for
    ``idle_seconds`` although they fit into free resources is set aside: from the next tick on the fallback decides,
    until another version of the policy is configured.

    Raises
    ------
    ResourceManagerError, StoreError, PolicyError
        The tick could not be completed. What it had done is persisted; the next tick completes the remainder.
    """
    begin = context.timer()
    mode, deciders = context.mode, context.deciders
    set_aside_before = state.set_aside if state.set_aside and state.set_aside.is_for(deciders.policy) else None
    set_aside, policy_failures = context.withdrawn or set_aside_before, state.policy_failures
    plan, outcome, needless_wait, queue_history = Plan(), Outcome(), NeedlessWait(), state.queue_history

    # Observe, reconcile, and requeue idle coordinators
    observed = observe(context.store, context.manager, state.reconcile_history.ended_until, acts=mode.acts)
    if mode.acts:
        context.store.check_lease()
        context.allow_changes()
    reconciled = reconcile(context, state, observed, begin)
    idle_history = state.idle_history
    if mode.acts:
        # Jobs that the last decision held back: the next one, further down, needs the snapshot that this step changes.
        held_back_before = frozenset() if state.slot_decision is None else jobs_held_back(state.slot_decision.in_force)
        reconciled, idle_history = requeue_coordinators(context, reconciled, idle_history, held_back_before, begin)
    incomplete, kept_sizes = observed.listing.incomplete, reconciled.kept_sizes
    snapshot = structs.replace(reconciled.snapshot, silent=tuple(sorted(kept_sizes, key=submit_order)))

    # Vacate nodes, and make room in limits, for jobs of others. Limits first: no nodes are vacated for a job whose
    # claim in a limit was given up (``excluded_handles``). Limits are compared with the listing as it came, for
    # reconciling adds to demands what whole nodes take, and jobs that have ended.
    limits_beside_grants, limit_history = make_room_in_limits(
        snapshot, observed.listing, state.limit_history,
        backing_off=reconciled.backing_off, now=begin,
        proposed=state.slot_decision.proposed.allocations(),
    )  # fmt: skip
    limits_beside_grants = (*limits_beside_grants, *reconciled.growth_limits)
    without_replacement = groups_without_replacement(snapshot, reconciled.backing_off, limits_beside_grants)
    snapshot, claim_history = vacate_nodes(
        snapshot, reconciled.listing, state.claim_history,
        now=begin, lead_seconds=context.timeouts.drain_seconds,
        allocations=state.slot_decision.in_force.allocations(),
        backing_off=reconciled.backing_off,
        without_replacement=without_replacement, excluded_handles=limit_history.set_aside_handles,
        growth_limits=(
            *observed.listing.growth_limits, *reconciled.growth_limits,
            *left_by_site_limits(snapshot, context.guard_rules),
        ),
    )  # fmt: skip
    snapshot = structs.replace(
        snapshot, limits=limits_for_policies(
            snapshot, context.guard_rules, limits_beside_grants, silent=reconciled.start_nothing
        ),
    )  # fmt: skip

    # Decide and guard, unless the last decision is still in force
    situation = situation_digest(mode, context.canary, reconciled, set_aside)
    slot_decision = decision_in_force(state, situation, snapshot.at, context.slot_seconds)
    if (
        reconciled.task_failed
        or claim_history.needs_decision(snapshot.grants)
        or (not incomplete and limit_history.needs_decision())
        # Only where a job of others waits: otherwise the room is still there at the next decision.
        or (observed.listing.claims and not incomplete and room_appeared(state, snapshot, deciders.placement))
    ):
        slot_decision = None
    decided = slot_decision is None
    if slot_decision is None and mode is Mode.OBSERVE:
        observation = present_sizes_decision(snapshot, observed.listing, context.scheduler)
        slot_decision = SlotDecision(proposed=observation, in_force=observation)
    elif slot_decision is None:
        snapshot = structs.replace(
            with_evidence(snapshot, deciders.needs, context.store), held_back=held_back(
                snapshot, deciders.placement, after_seconds=context.guard_rules.hold_back_after,
                unable=reconciled.unable,
            ),
        )  # fmt: skip
        canary = canary_jobs(context, snapshot)
        proposed = decide(snapshot, deciders, context.seed, set_aside=set_aside, canary=canary)
        if set_aside is None and (canary is None or canary):  # the policy was asked
            policy_failures = policy_failures.after(deciders.policy, proposed)
        guarded = guard(
            proposed, snapshot, context.guard_rules, reconciled.guard_state,
            kept_sizes=kept_sizes, growth_limits=limits_beside_grants,
            last=state.slot_decision.in_force,
        )  # fmt: skip
        if mode.acts:
            slot_decision = SlotDecision(proposed, in_force=guarded, canary_jobs=canary)
        else:
            observation = present_sizes_decision(snapshot, observed.listing, context.scheduler)
            slot_decision = SlotDecision(proposed, in_force=observation, shadow=guarded)

    # Place and apply
    if mode.acts:
        plan, queue_history = _plan(
            context, state, reconciled, snapshot, slot_decision.in_force, without_replacement,
            idle_history.beneficiary, begin,
        )  # fmt: skip
        waiting = startable_waiting_jobs(snapshot, slot_decision.in_force, plan, deciders.placement)
        if (canary := slot_decision.canary_jobs) is not None:  # the policy has not decided on the others
            waiting = tuple(key for key in waiting if key in canary)
        plan = plan if not incomplete else replace(plan, starts=(), stops=())  # its moves are only shown
        avoided = avoided_of_queued(plan, snapshot, reconciled.listing)
        outcome = apply(context, plan, reconciled.jobs, snapshot.at, avoided)
        if any(failure.refused for failure in outcome.failures):
            refused = count_refused(reconciled.guard_state.start_failures, outcome, snapshot.at)
            guard_state = replace(reconciled.guard_state, start_failures=refused)
            reconciled = replace(reconciled, guard_state=remember_refused_starts(guard_state, outcome, snapshot.at))
            context.store.keep_guard_state(reconciled.guard_state)
        needless_wait = state.needless_wait.after(waiting, begin)
        if set_aside is None and deciders.policy is not deciders.fallback:
            set_aside = set_aside_after_wait(deciders.policy, needless_wait, context.idle_seconds)

    # Record
    report = Report(
        snapshot=snapshot, slot_decision=slot_decision, plan=plan, outcome=outcome, needless_wait=needless_wait,
        set_aside=set_aside, policy_failures=policy_failures, decided=decided, seconds=context.timer() - begin,
        mode=mode, incomplete=incomplete, listing_remarks=observed.listing.remarks, remarks=reconciled.remarks,
        stray_remarks=reconciled.stray_remarks, unknown_tasks=reconciled.unknown_tasks,
        losing_claims=claim_history.losing, requeued=len(reconciled.guard_state.requeued),
    )  # fmt: skip
    state = replace(
        state, claim_history=claim_history, limit_history=limit_history, queue_history=queue_history,
        idle_history=idle_history,
    )  # fmt: skip
    return record(context, state, reconciled, report, situation), report


def _plan(
    context: Context,
    state: TickState,
    reconciled: Reconciled,
    snapshot: Snapshot,
    decision: Decision,
    without_replacement: Collection[TaskGroup],
    beneficiary: JobKey | None,
    now: float,
) -> tuple[Plan, QueueHistory]:
    """The starts and stops that a decision needs, as far as limits allow them, and what is to be queued."""
    listing, kept_sizes, placement = reconciled.listing, reconciled.kept_sizes, context.deciders.placement
    positions = {job.tag: job.position for job in listing.jobs if job.position is not None}
    # With an incomplete listing no job is resized, neither by the decision nor to make room.
    jobs_to_keep = kept_sizes if not listing.incomplete else [job.key for job in snapshot.jobs]
    plan = place(
        snapshot, _with_sizes_fixed(kept_sizes, reconciled.starting_from_queue, decision, snapshot), placement,
        keep=jobs_to_keep, without_replacement=without_replacement, positions=positions,
    )  # fmt: skip
    queue_history = state.queue_history
    if context.queues_tasks:
        plan, queue_history = queue_tasks(
            plan, snapshot, listing, reconciled.queued, queue_history, placement=placement,
            unable=reconciled.unable | jobs_held_back(decision),
            queue_seconds=context.timeouts.queue_seconds, beneficiary=beneficiary, now=now,
        )  # fmt: skip
    plan = within_limits(
        plan, snapshot, reconciled.owners, context.guard_rules, without_replacement, listing.growth_limits
    )
    if context.start_allowance is not None:
        plan = within_allowance(plan, context.start_allowance())
    return plan, queue_history


def _with_sizes_fixed(
    kept_sizes: Collection[JobKey], starting_from_queue: Collection[JobKey], decision: Decision, snapshot: Snapshot
) -> Decision:
    """The decision in which jobs that keep their size get no more than they have; those starting from the queue, that.

    Their coordinators would not admit new tasks. The decision may be older than the cause: without this, tasks that
    end one after the other, with their coordinator, would be replaced. Tasks that start from the queue begin to run
    one after the other.
    """
    if not kept_sizes:
        return decision
    held = snapshot.held()

    def allocation(entry: JobDecision) -> Allocation:
        has = held.get(entry.job, NOTHING)
        return has if entry.job in starting_from_queue else entry.allocation.common(has)

    return replace(
        decision,
        jobs=tuple(
            replace(entry, allocation=allocation(entry)) if entry.job in kept_sizes else entry
            for entry in decision.jobs
        ),
    )
