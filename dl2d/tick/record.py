"""Record: keeps a decided slot in the store, and makes the state of the next tick."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dl2d.core.cluster import Snapshot
from dl2d.core.daemon_mode import Mode
from dl2d.core.decision import Decision
from dl2d.core.json_codec import digest
from dl2d.core.store import Slot
from dl2d.core.tick_plan import Outcome, Plan
from dl2d.tick.context import Context
from dl2d.tick.idle_cluster import IdleWaiting
from dl2d.tick.observed_decision import OBSERVED
from dl2d.tick.reconcile import Reconciled
from dl2d.tick.state import Ruling, SetAside, TickState


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a tick did."""

    snapshot: Snapshot
    ruling: Ruling
    plan: Plan
    outcome: Outcome
    idle: IdleWaiting
    #: The policy that is not asked any more; the next tick has the fallback decide.
    set_aside: SetAside | None
    #: Whether this tick made the ruling, or one before it.
    decided: bool
    seconds: float
    mode: Mode

    @property
    def decision(self) -> Decision:
        """The decision in force."""
        return self.ruling.decision


def record(context: Context, state: TickState, reconciled: Reconciled, report: Report, situation: str) -> TickState:
    """Keep the slot if it was decided, and return what the next tick goes on with.

    Raises
    ------
    StoreError
        The slot could not be kept.
    """
    state = replace(
        state,
        failures=reconciled.failures,
        stopping=reconciled.stopping,
        heard=reconciled.heard,
        idle=report.idle,
        set_aside=report.set_aside,
    )
    if not report.decided:
        return state
    snapshot, ruling, deciders = report.snapshot, report.ruling, context.deciders
    name, version = deciders.policy.name, deciders.policy.version
    if report.mode is Mode.OBSERVE:
        name, version = OBSERVED, context.scheduler
    context.store.record_slot(
        Slot(
            number=snapshot.slot,
            at=snapshot.at,
            snapshot=snapshot,
            proposed=ruling.proposed,
            decision=ruling.decision,
            plan=report.plan,
            outcome=report.outcome,
            inputs_hash=inputs_hash(snapshot, name, version, deciders.placement.name, context.seed),
            seed=context.seed,
            seconds=report.seconds,
            shadow=ruling.shadow,
        )
    )
    return replace(
        state,
        slot=snapshot.slot,
        ruling=ruling,
        decided_at=snapshot.at,
        situation=situation,
        resizes=state.resizes.after(ruling.decision, snapshot.at),
    )


def inputs_hash(snapshot: Snapshot, policy: str, version: str, placement: str, seed: int) -> str:
    """SHA-256 over everything that a decision depends on: snapshot, policy and its version, placement, seed."""
    return digest(snapshot, [policy, version, placement, seed])
