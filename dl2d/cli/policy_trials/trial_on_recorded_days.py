"""Promotion trials: a version of a learned policy is compared with what decides now, on days that the site recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dl2d.config.settings import Settings
from dl2d.core.errors import Dl2dError, WorkloadError, counted
from dl2d.core.policy import Policy
from dl2d.core.policy_registry import SITE_SCHEDULER, Trial, TrialCase, Version, VersionChange, VersionState
from dl2d.core.progress_callback import Tell
from dl2d.core.store import History
from dl2d.daemon.policy_versions.active_version import current_checkpoint, factory_arguments
from dl2d.daemon.tick_settings_from_configuration import guard_rules
from dl2d.learning.promotion_gate import (
    MIN_SLOT_SECONDS,
    GateSettings,
    Verdict,
    compare,
    too_little_to_compare,
)
from dl2d.learning.site_records.recorded_days import DAY_SECONDS
from dl2d.learning.site_records.speeds_assumed_for_unmeasured_jobs import with_assumed_speeds
from dl2d.learning.site_records.split_of_recorded_days import (
    EXPECTED_SPEEDS,
    Case,
    Split,
    deleted_in_words,
    split_history,
    too_large_in_words,
)
from dl2d.plugins import POLICIES, FactoryArguments, available, load_placement, load_policy, takes_checkpoint
from dl2d.policies.common.checkpoint import DIGITS, Checkpoint, checkpoint_of

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore
    from dl2d.store.tables.policy_versions import SqlRegistry


@dataclass(frozen=True, slots=True)
class TrialPolicy:
    """One of the two policies of a trial."""

    #: Of its checkpoint; its name where it has none, ``SITE_SCHEDULER`` for the site's own scheduler.
    digest: str
    #: None for the site's own scheduler with its recorded sizes.
    policy: Policy | None


def slot_seconds(settings: Settings) -> float:
    """Length of an interval in a replay: the site's own, but not so short that a day takes for ever to play."""
    return max(settings.schedule.slot_seconds, MIN_SLOT_SECONDS)


def policy_of(settings: Settings, checkpoint: Checkpoint) -> Policy:
    """The policy of a checkpoint as the site would have it, with the replay's length of an interval."""
    own = settings.policy.settings if settings.policy.name == checkpoint.policy else {}
    return load_policy(
        checkpoint.policy,
        given=FactoryArguments(checkpoint=checkpoint, settings=own, slot_seconds=slot_seconds(settings)),
    )


def deciding(settings: Settings, registry: SqlRegistry) -> TrialPolicy:
    """What the configured policy decides with now: its live version, its checkpoint, or the fallback in its place."""
    name = settings.policy.name
    try:
        checkpoint = current_checkpoint(settings, registry, name)
        if checkpoint is None:  # a plug-in that does not show what it was made with
            return TrialPolicy(name, load_policy(name, given=factory_arguments(settings, None)))
        return TrialPolicy(checkpoint.digest, policy_of(settings, checkpoint))
    except Dl2dError:  # one that comes with no checkpoint of its own
        return TrialPolicy(settings.policy.fallback, load_policy(settings.policy.fallback, "policy.fallback"))


def site_scheduler(split: Split) -> TrialPolicy:
    """The site's own scheduler: replayed where one of dl2d's policies without weights decided on all days that were
    held out, otherwise the sizes that were recorded on them.
    """
    (name, *others) = sorted({policy for day in split.held_out for policy in day.policies}) or [""]
    is_ours = not others and name in available(POLICIES) and not takes_checkpoint(name)
    return TrialPolicy(SITE_SCHEDULER, load_policy(name) if is_ours else None)


def compared_with(settings: Settings, split: Split, live: TrialPolicy) -> TrialPolicy:
    """What a candidate is compared with: the live version, or the site's own scheduler where dl2d is not in charge."""
    return live if settings.mode.acts else site_scheduler(split)


def recorded_days(
    settings: Settings, store: SqlStore, *, now: float, seed: int, tell: Tell, days: float | None = None,
    candidate: Checkpoint | None = None, for_training: bool = True, assume_speeds: bool = False,
    expected_speeds: bool = False,
) -> Split:  # fmt: skip
    """What the store has of the last days, as workloads; days that a candidate learned from are not held out.

    What was measured counts from the last ``learning.days``, also where ``days`` is less: the same days have the same
    speeds, whoever compares on them. With ``assume_speeds``, jobs that report no speeds take part with assumed ones
    where the others are too few for the gate; ``expected_speeds``: see ``split_history``. Raises ``WorkloadError``
    where there is too little.
    """
    chosen = settings.learning.days if days is None else days
    since, begin = (
        (now - length * DAY_SECONDS) // DAY_SECONDS * DAY_SECONDS
        for length in (chosen, max(chosen, settings.learning.days))
    )

    def split(history: History) -> Split:
        return split_history(
            history, slot_seconds(settings), seed=seed, min_days=settings.learning.gate_min_days,
            learned=() if candidate is None else learned_days(candidate), for_training=for_training,
            expected_speeds=expected_speeds, since=since, tell=tell,
        )  # fmt: skip

    def read(*, unreported: bool) -> History:
        return store.history(begin, now, unreported=unreported, progress=partial(tell, "recorded hours read"))

    try:
        found = split(read(unreported=False))
    except WorkloadError:
        if not assume_speeds:
            raise
    else:
        enough = (
            len(found.held_out) >= settings.learning.gate_min_days and found.jobs >= settings.learning.gate_min_jobs
        )
        if enough or not assume_speeds:
            return found
    return split(with_assumed_speeds(read(unreported=True)))


def learned_days(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Days (YYYY-MM-DD, UTC) of this site that a checkpoint was trained on, as far as it says."""
    days = checkpoint.training.get("days")
    return tuple(map(str, days)) if isinstance(days, list | tuple) else ()


def compared_with_recorded(settings: Settings, split: Split, checkpoint: Checkpoint, *, tell: Tell) -> Trial:
    """A short comparison of a trained policy with the recorded scheduler, on the days held out: expected speeds only.

    The trial decides nothing and is not recorded.
    """
    expected = replace(split, period_cases=tuple(case for case in split.period_cases if case.name == EXPECTED_SPEEDS))
    candidate = TrialPolicy(checkpoint.digest, policy_of(settings, checkpoint))
    return on_trial(settings, checkpoint.policy, expected, candidate, site_scheduler(split), tell=tell)


def too_little_to_judge(settings: Settings, split: Split, parent: Checkpoint | None = None) -> str:
    """Why the gate would refuse all that is trained on this split, in its words: too few days or jobs; else empty.

    ``parent`` is what training begins with, if that was trained on the site's days.
    """
    is_site = not settings.mode.acts
    trained_on = {*(() if parent is None else learned_days(parent)), *(day.name for day in split.trained_on)}
    too_little = too_little_to_compare(*_at_the_gate(settings, split, trained_on, "training takes", is_site=is_site))
    return "" if too_little is None else too_little.reason


def on_trial(
    settings: Settings, name: str, split: Split, candidate: TrialPolicy, current: TrialPolicy, *, tell: Tell,
    margin: float | None = None, problem: str = "",
) -> Trial:  # fmt: skip
    """Compare a candidate with what decides now on the days that were held out.

    ``margin`` is how much worse it may surely not be; None for that of the configuration. A candidate with a
    ``problem``, which a replay check found, fails without a comparison.
    """
    assert candidate.policy is not None
    is_site = current.digest == SITE_SCHEDULER
    if margin is None:
        margin = settings.learning.gate_site_margin if is_site else 0.0
    cases: tuple[TrialCase, ...] = ()
    remarks = ""
    if problem:
        verdict = Verdict(passed=False, reason=problem)
    elif candidate.digest == current.digest:
        verdict = Verdict(passed=False, reason="it is the version that decides already")
    else:
        checkpoint = checkpoint_of(candidate.policy)
        days = () if checkpoint is None else learned_days(checkpoint)
        replayed, gate = _at_the_gate(settings, split, days, "it was trained on", is_site=is_site, margin=margin)
        compared = compare(
            replayed,
            candidate.policy,
            current.policy,
            load_placement(settings.placement),
            costs=split.costs,
            rules=guard_rules(settings),
            settings=gate,
            timer=time.process_time,
            progress=lambda done, total: tell("jobs replayed to compare", done, total),
        )
        cases, verdict = compared.cases, compared.verdict
        was_compared = verdict.change is not None
        if was_compared and is_site:
            remarks = f", {_against(current)}"
            remarks += f", without {too_large_in_words(split.too_large)}" if split.too_large else ""
        if was_compared and split.deleted:
            remarks += f", without {deleted_in_words(split.deleted)}"
        if was_compared and compared.assumed:
            remarks += (
                f", with assumed speeds of {compared.assumed} of {counted(compared.jobs, 'job')} (no speed reported)"
                + ("" if verdict.passed else ", which mode canary would measure")
            )
    return Trial(
        at=time.time(),
        policy=name,
        candidate=candidate.digest,
        current=current.digest,
        days=tuple(day.name for day in split.held_out),
        cases=cases,
        change=verdict.change,
        low=verdict.low,
        high=verdict.high,
        passed=verdict.passed,
        reason=verdict.reason + remarks,
    )


def _at_the_gate(
    settings: Settings, split: Split, trained_on: Collection[str], why: str, *, is_site: bool, margin: float = 0.0
) -> tuple[Sequence[Case], GateSettings]:
    """The cases to compare on, and the gate's settings; with the site's scheduler it is other cases than otherwise.

    ``why`` completes "days that ...", of those that are left out.
    """
    found = [
        *([f"{counted(len(trained_on), 'day')} that {why}"] if trained_on else []),
        *([deleted_in_words(split.deleted)] if split.deleted else []),
        *([too_large_in_words(split.too_large)] if is_site and split.too_large else []),
    ]
    not_counted = f"{' and '.join([*(['; '.join(found)] if found else []), 'jobs that did not end'])} do not count"
    gate = GateSettings(
        timeout=settings.policy.timeout_seconds,
        min_days=settings.learning.gate_min_days,
        min_jobs=settings.learning.gate_min_jobs,
        margin=margin,
        shared_draws=is_site,
        whatever_speeds=is_site and not settings.mode.acts,
        not_counted=not_counted,
    )
    return split.period_cases if is_site else split.cases, gate


def live_review(settings: Settings, registry: SqlRegistry, split: Split, *, tell: Tell) -> Trial | None:
    """Compare the fallback with what the live version did on the days held out; passed if it is surely better.

    Both are replayed in the twin: the fallback as it would have decided, the live version as the sizes that jobs really
    had, so that what the twin does not know of the site is missing on both sides. None where dl2d does not act, or
    where the version was not live and asked on all of these days.
    """
    name = settings.policy.name
    live = registry.live(name) if settings.mode.acts and takes_checkpoint(name) else None
    if live is None or not all(name in day.policies for day in split.held_out):
        return None
    changes = registry.changes(name, limit=1000)
    since = next((each.at for each in changes if each.digest == live.digest and each.after is VersionState.LIVE), None)
    if since is None or since > split.held_out[0].begin:
        return None
    fallback = TrialPolicy(settings.policy.fallback, load_policy(settings.policy.fallback, "policy.fallback"))
    trial = on_trial(settings, name, split, fallback, TrialPolicy(SITE_SCHEDULER, None), tell=tell, margin=0.0)
    verdict = trial.reason.replace(f", {_against(TrialPolicy(SITE_SCHEDULER, None))}", "")
    reason = f"fallback {fallback.digest} in place of version {live.digest[:DIGITS]} while that was live: "
    return replace(trial, current=live.digest, reason=reason + verdict)


def _against(current: TrialPolicy) -> str:
    how = "its recorded sizes" if current.policy is None else f"policy {current.policy.name}"
    return f"compared with the site's scheduler ({how})"


def passed_trial(settings: Settings, registry: SqlRegistry, version: Version, present: TrialPolicy) -> Trial | None:
    """The newest trial that a version passed against what it is compared with now; None for none.

    ``present`` decides now. If that is the version itself, as in mode canary, it is the live version that the trial has
    to be against, or the fallback where none is live. A trial from before the version was rolled back or rejected does
    not count.
    """
    against = SITE_SCHEDULER
    if settings.mode.acts:
        live = registry.live(version.policy)
        in_its_place = settings.policy.fallback if live is None else live.digest
        against = in_its_place if present.digest == version.digest else present.digest
    withdrawn = max(
        (each.at for each in registry.changes(version.policy, limit=1000) if _withdraws(each, version)),
        default=-math.inf,
    )
    passed = (
        trial
        for trial in registry.trials(version.policy, limit=1000)
        if trial.passed and (trial.candidate, trial.current) == (version.digest, against) and trial.at > withdrawn
    )
    return next(passed, None)


def _withdraws(change: VersionChange, version: Version) -> bool:
    """Whether a change rolled a version back or rejected it."""
    if change.rollback:
        return change.replaced == version.digest
    return change.digest == version.digest and change.after is VersionState.REJECTED
