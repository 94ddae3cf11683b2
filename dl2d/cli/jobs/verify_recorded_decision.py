"""Recomputation of a recorded decision and comparison with it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dl2d.config.settings import Settings
from dl2d.core.decision import CANARY, Constraint, Decision
from dl2d.core.errors import CheckpointError, Dl2dError
from dl2d.core.jobs import JobKey
from dl2d.core.json_codec import encode
from dl2d.core.policy import Policy
from dl2d.core.store import Slot
from dl2d.daemon.policy_versions.active_version import factory_arguments
from dl2d.plugins import (
    PLACEMENTS,
    POLICIES,
    FactoryArguments,
    available,
    load_placement,
    load_policy,
    takes_checkpoint,
)
from dl2d.policies.common.checkpoint import DIGITS, Checkpoint, checkpoint_in, read_checkpoint, settings_in
from dl2d.tick.decision.decide import decide
from dl2d.tick.decision.present_sizes_decision import OBSERVED
from dl2d.tick.record_slot import inputs_hash, of_both
from dl2d.tick.tick_context import Deciders

if TYPE_CHECKING:
    from dl2d.store.tables.policy_versions import SqlRegistry


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Whether a decision was reproduced bit for bit; ``text`` says with what, or what differs."""

    same: bool
    text: str


def recompute(slot: Slot, settings: Settings, registry: SqlRegistry) -> Recomputed:
    """Run the policy again on the recorded snapshot and seed of a slot.

    Policy and placement are found by the inputs hash, which covers their names and versions, among the installed ones
    and the registered versions of those that learn: the configuration may have been changed since.
    """
    if slot.proposed.policy == OBSERVED:
        same = slot.proposed.allocations() == slot.snapshot.held()
        said = "agree with" if same else "DIFFER from"
        return Recomputed(same, f"another scheduler decided; the recorded tasks {said} the recorded decision")
    found = _deciders(slot, settings, registry)
    if found is None:
        return Recomputed(
            False,
            "not possible: no installed policy, registered version and placement have the recorded inputs hash; the "
            f"decision was made by {_maker(slot.proposed)}",
        )
    deciders, canary = found
    failed = ""
    if any(reason.constraint is Constraint.FALLBACK for entry in slot.proposed.jobs for reason in entry.guarded):
        failed = f" (the fallback, because {deciders.policy.name} had failed)"
        fallback = _fallback(slot, settings, registry)
        if fallback is None:
            made = _maker(slot.proposed)
            return Recomputed(False, f"not possible: the fallback that decided, {made}, is not installed")
        deciders = replace(deciders, policy=fallback, fallback=fallback)
    again = decide(slot.snapshot, deciders, slot.seed, canary=canary)
    recorded = _without_fallback(slot.proposed)
    by = f"with {_maker(again)}, placement {deciders.placement.name} and seed {slot.seed}{failed}"
    if encode(again) == encode(recorded):
        return Recomputed(True, f"{by}: the same, bit for bit")
    return Recomputed(False, f"{by}: DIFFERENT: {_differences(recorded, again)}")


def _maker(decision: Decision) -> str:
    """Name and version of the policy that made a decision; of both policies in mode canary."""
    version = decision.policy_version
    return version if decision.policy == CANARY else f"{decision.policy} version {version}"


def _deciders(slot: Slot, settings: Settings, registry: SqlRegistry) -> tuple[Deciders, list[JobKey] | None] | None:
    """The policies and the placement that have the recorded inputs hash; in mode canary with the policy's jobs."""
    placements = [load_placement(name) for name in available(PLACEMENTS)]
    canary: list[JobKey] | None = None
    for policy, fallback in _pairs(slot, settings, registry):
        if slot.proposed.policy == CANARY:
            canary = [entry.job for entry in slot.proposed.jobs if entry.by == (policy.name, policy.version)]
        for placement in placements:
            deciders = Deciders(policy, fallback, placement)
            name, version = (policy.name, policy.version) if canary is None else of_both(deciders, canary)
            if inputs_hash(slot.snapshot, name, version, placement.name, slot.seed) == slot.inputs_hash:
                return deciders, canary
    return None


def _pairs(slot: Slot, settings: Settings, registry: SqlRegistry) -> Iterator[tuple[Policy, Policy]]:
    """Policies that may have decided in a slot, each with its fallback: itself, unless both decided (mode canary)."""
    if slot.proposed.policy != CANARY:
        for policy in _policies(slot, settings, registry):
            yield policy, policy
        return
    made = dict(sorted({entry.by for entry in slot.proposed.jobs if entry.by is not None}))
    names = sorted({*made, settings.policy.name, settings.policy.fallback})
    candidates = [each for name in names for each in _versions_of(name, made.get(name, ""), settings, registry)]
    yield from itertools.product(candidates, candidates)


def _fallback(slot: Slot, settings: Settings, registry: SqlRegistry) -> Policy | None:
    made = slot.proposed.policy, slot.proposed.policy_version
    return next((one for one in _policies(slot, settings, registry) if (one.name, one.version) == made), None)


def _policies(slot: Slot, settings: Settings, registry: SqlRegistry) -> Iterator[Policy]:
    """Policies that may have decided in a slot, likely ones first; each as the configuration has it, and plainly."""
    for name in sorted(available(POLICIES), key=lambda name: name != slot.proposed.policy):
        made = slot.proposed.policy_version if name == slot.proposed.policy else ""
        yield from _versions_of(name, made, settings, registry)


def _versions_of(name: str, made: str, settings: Settings, registry: SqlRegistry) -> Iterator[Policy]:
    """A policy in all its versions that can be made, those that the version ``made`` names first."""
    own = factory_arguments(settings, None)
    numbers = [settings_in(made), own.settings if name == settings.policy.name else {}, {}]
    checkpoints = _checkpoints(name, made, settings, registry) if takes_checkpoint(name) else iter((None,))
    for checkpoint in checkpoints:
        known = set()
        for each in numbers:
            for seconds in (own.slot_seconds, None):
                try:
                    what = FactoryArguments(checkpoint=checkpoint, settings=each, slot_seconds=seconds)
                    policy = load_policy(name, given=what)
                except Dl2dError:
                    continue  # it needs a checkpoint, or never had such settings
                if policy.version not in known:
                    known.add(policy.version)
                    yield policy


def _checkpoints(name: str, version: str, settings: Settings, registry: SqlRegistry) -> Iterator[Checkpoint | None]:
    """Checkpoints of a policy: the one that a version names, what comes with it, then all others."""
    digits = version[:DIGITS]
    kept = sorted(registry.versions(name), key=lambda one: not digits or not one.digest.startswith(digits))
    named = settings.policy.checkpoint if name == settings.policy.name else None
    folders = [Path(one.folder) for one in kept] + ([checkpoint_in(named)] if named else [])
    for number, folder in enumerate(folders):
        with contextlib.suppress(CheckpointError):  # what is gone cannot have it said again
            yield read_checkpoint(folder, policy=name)
        if number == 0:
            yield None
    if not folders:
        yield None


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
