"""Record: writes a decided slot to the store, and makes the state for the next tick."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dl2d.core.cluster import Snapshot
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import CANARY, Decision
from dl2d.core.jobs import JobKey
from dl2d.core.json_codec import digest
from dl2d.core.plan_of_starts_and_stops import Outcome, Plan
from dl2d.core.store import Slot
from dl2d.tick.decision.present_sizes_decision import OBSERVED
from dl2d.tick.policy_check.policy_failures import PolicyFailures, SetAside
from dl2d.tick.policy_check.waiting_jobs_that_fit import NeedlessWait, jobs_with_room
from dl2d.tick.reconcile import Reconciled
from dl2d.tick.tick_context import Context, Deciders
from dl2d.tick.tick_state import SlotDecision, TickState


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a tick did."""

    snapshot: Snapshot
    slot_decision: SlotDecision
    plan: Plan
    outcome: Outcome
    #: Jobs that wait although they fit into free resources.
    needless_wait: NeedlessWait
    #: The policy that is not asked any more: in the next tick the fallback decides.
    set_aside: SetAside | None
    #: Decisions of the policy that failed, up to this tick: consecutive ones, and how many of the last.
    policy_failures: PolicyFailures
    #: Whether this tick decided, rather than one before it.
    decided: bool
    #: How long the tick took.
    seconds: float
    mode: Mode
    #: Why the resource manager's listing may lack something (``RmListing.incomplete``).
    incomplete: tuple[str, ...] = ()
    #: What an administrator should know of it (``RmListing.remarks``).
    listing_remarks: tuple[str, ...] = ()
    #: Tasks and anchors that have to end and are not stopped, since they may not be dl2d's; one sentence each.
    remarks: tuple[str, ...] = ()
    #: The same of strays, whose tags users may have written: for the log alone.
    stray_remarks: tuple[str, ...] = ()
    #: Running tasks, by user, that the store never asked for (``tasks_of_another_database``).
    unknown_tasks: Mapping[str, int] = field(default_factory=dict)
    #: Handles of claims for which no task leaves a node for a while (``vacate_for_waiting_jobs``).
    losing_claims: tuple[str, ...] = ()
    #: Number of coordinators without tasks that leave for other jobs, or wait since they did (``idle_coordinators``).
    requeued: int = 0

    @property
    def decision(self) -> Decision:
        """The decision in force."""
        return self.slot_decision.in_force


def record(context: Context, state: TickState, reconciled: Reconciled, report: Report, situation: str) -> TickState:
    """Write the slot to the store if this tick decided it; returns the state for the next tick.

    Raises
    ------
    StoreError
        The slot could not be written.
    """
    state = replace(
        state,
        reconcile_history=reconciled.history,
        needless_wait=report.needless_wait,
        # ``Context.withdrawn`` has it in each tick.
        set_aside=None if context.withdrawn is not None else report.set_aside,
        policy_failures=report.policy_failures,
    )
    if not report.decided:
        return state
    snapshot, slot_decision, deciders = report.snapshot, report.slot_decision, context.deciders
    name, version = deciders.policy.name, deciders.policy.version
    if report.mode is Mode.OBSERVE:
        name, version = OBSERVED, context.scheduler
    elif slot_decision.proposed.policy == CANARY:
        name, version = of_both(deciders, slot_decision.canary_jobs or ())
    context.store.record_slot(
        Slot(
            number=snapshot.slot,
            at=snapshot.at,
            snapshot=snapshot,
            proposed=slot_decision.proposed,
            decision=slot_decision.in_force,
            plan=report.plan,
            outcome=report.outcome,
            inputs_hash=inputs_hash(snapshot, name, version, deciders.placement.name, context.seed),
            seed=context.seed,
            seconds=report.seconds,
            shadow=slot_decision.shadow,
        )
    )
    return replace(
        state,
        slot=snapshot.slot,
        claim_history=state.claim_history.after_decision(
            slot_decision.proposed.allocations(), incomplete=bool(report.incomplete)
        ),
        limit_history=state.limit_history.after_decision(incomplete=bool(report.incomplete)),
        slot_decision=slot_decision,
        decided_at=snapshot.at,
        situation=situation,
        with_room=jobs_with_room(snapshot, slot_decision.in_force, deciders.placement),
    )


def of_both(deciders: Deciders, jobs: Collection[JobKey]) -> tuple[str, str]:
    """Name and version for ``inputs_hash`` in mode canary: of both policies, with the jobs of the policy's group."""
    policy, fallback = deciders.policy, deciders.fallback
    group = sorted(key.slug for key in jobs)
    return f"{CANARY} {policy.name} {fallback.name}", " ".join([policy.version, fallback.version, *group])


def inputs_hash(snapshot: Snapshot, policy: str, version: str, placement: str, seed: int) -> str:
    """SHA-256 of everything that a decision depends on: snapshot, policy and its version, placement, seed."""
    return digest(snapshot, [policy, version, placement, seed])
