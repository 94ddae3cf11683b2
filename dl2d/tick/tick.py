"""The tick: observe, reconcile, decide, guard, place, apply, record. The daemon and the simulator run this function."""

from __future__ import annotations

from dl2d.core.daemon_mode import Mode
from dl2d.core.tick_plan import Outcome, Plan
from dl2d.tick.apply import apply
from dl2d.tick.context import Context
from dl2d.tick.decide import decide, set_aside_if_idle, situation_of
from dl2d.tick.guard import guard
from dl2d.tick.idle_cluster import IdleWaiting, idle_jobs
from dl2d.tick.observe import observe, with_evidence
from dl2d.tick.observed_decision import observed_decision
from dl2d.tick.place.place import place
from dl2d.tick.reconcile import reconcile
from dl2d.tick.record import Report, record
from dl2d.tick.state import Ruling, TickState


def tick(context: Context, state: TickState) -> tuple[TickState, Report]:
    """Run one tick.

    The policy is asked once per slot, and earlier when a job becomes ready or ends, a task fails or the nodes change;
    in between the ruling in force is carried on with, as resources become free. A slot is recorded when it is decided.
    A policy that leaves jobs waiting for ``idle_seconds`` although they fit into free resources is set aside: from the
    next tick on the fallback decides, until another version of the policy is in charge.

    Raises
    ------
    ResourceManagerError, StoreError, PolicyError
        The tick could not be completed. What it had done is persisted; the next tick completes the rest.
    """
    begin = context.timer()
    mode, deciders = context.mode, context.deciders
    set_aside = state.set_aside if state.set_aside and state.set_aside.names(deciders.policy) else None
    plan, outcome, idle = Plan(), Outcome(), IdleWaiting()

    observed = observe(context.store, context.manager)
    reconciled = reconcile(context, state, observed)
    snapshot, silent = reconciled.snapshot, reconciled.silent

    situation = situation_of(mode, reconciled, set_aside)
    ruling = state.ruling_for(situation, snapshot.at, context.slot_seconds)
    decided = ruling is None
    if ruling is None and mode is Mode.OBSERVE:
        given = observed_decision(snapshot, observed.listing, context.scheduler)
        ruling = Ruling(proposed=given, decision=given)
    elif ruling is None:
        snapshot = with_evidence(snapshot, deciders.needs, context.store)
        proposed = decide(snapshot, deciders, context.seed, context.timer, set_aside=set_aside)
        guarded = guard(proposed, snapshot, context.rules, state.resizes, silent=silent)
        if mode is Mode.LIVE:
            ruling = Ruling(proposed, decision=guarded)
        else:
            given = observed_decision(snapshot, observed.listing, context.scheduler)
            ruling = Ruling(proposed, decision=given, shadow=guarded)

    if mode is Mode.LIVE:
        plan = place(snapshot, ruling.decision, deciders.placement, silent=silent)
        outcome = apply(context, plan, reconciled.jobs, snapshot.at)
        waiting = idle_jobs(snapshot, ruling.decision, plan, deciders.placement, silent=silent)
        idle = state.idle.after(waiting, snapshot.at)
        set_aside = set_aside or set_aside_if_idle(deciders, idle, context.idle_seconds)

    report = Report(
        snapshot=snapshot, ruling=ruling, plan=plan, outcome=outcome, idle=idle, set_aside=set_aside,
        decided=decided, seconds=context.timer() - begin, mode=mode,
    )  # fmt: skip
    return record(context, state, reconciled, report, situation), report
