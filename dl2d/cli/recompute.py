"""Decide a recorded slot again, and compare."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from dl2d.core.codec import encode
from dl2d.core.decision import Constraint, Decision
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.store import Slot
from dl2d.daemon.decide import Deciders, decide, inputs_hash
from dl2d.daemon.plugins import PLACEMENTS, POLICIES, available, load_placement, load_policy


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Whether a decision came out the same, bit for bit; ``text`` says from what, or what differs."""

    same: bool
    text: str


def recompute(slot: Slot) -> Recomputed:
    """Ask the policy again what it was asked in a slot, with the recorded snapshot and seed.

    Policy and placement are found among the installed ones by the inputs hash, which covers their names and versions:
    the configuration may have been changed since.
    """
    found = _deciders(slot)
    if found is None:
        made = f"{slot.proposed.policy} version {slot.proposed.policy_version}"
        return Recomputed(
            False,
            f"not possible: no installed policy and placement give the inputs hash (the decision was made by {made})",
        )
    policy, placement = found
    fell_back = any(
        reason.constraint is Constraint.FALLBACK for entry in slot.proposed.jobs for reason in entry.guarded
    )
    asked = load_policy(slot.proposed.policy) if fell_back else policy
    again = decide(slot.snapshot, Deciders(asked, asked, placement, patience=float("inf")), slot.seed, time.monotonic)
    recorded = _without_fallback(slot.proposed) if fell_back else slot.proposed
    by = f"with {again.policy} version {again.policy_version}, placement {placement.name} and seed {slot.seed}"
    if fell_back:
        by += f" (the fallback, for {policy.name} had failed)"
    if encode(again) == encode(recorded):
        return Recomputed(True, f"{by}: the same, bit for bit")
    return Recomputed(False, f"{by}: DIFFERENT: {_differences(recorded, again)}")


def _deciders(slot: Slot) -> tuple[Policy, Placement] | None:
    for policy in map(load_policy, available(POLICIES)):
        for placement in map(load_placement, available(PLACEMENTS)):
            if inputs_hash(slot.snapshot, policy, placement, slot.seed) == slot.inputs_hash:
                return policy, placement
    return None


def _without_fallback(decision: Decision) -> Decision:
    """What the fallback itself said: the reason why it was asked holds times and cannot come out the same."""
    return replace(
        decision,
        jobs=tuple(
            replace(
                entry,
                guarded=tuple(reason for reason in entry.guarded if reason.constraint is not Constraint.FALLBACK),
            )
            for entry in decision.jobs
        ),
    )


def _differences(recorded: Decision, again: Decision) -> str:
    before, after = recorded.allocations(), again.allocations()
    changed = [
        f"job {key.id} had {before.get(key)} and would get {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    return "; ".join(changed) or "the allocations are equal, reasons or scores are not"
