"""``dl2d shadow``: comparisons of policies on this site, in the modes shadow and canary."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dl2d.cli.canary_summary import canary_json, canary_sentence, newest_canary
from dl2d.cli.daemon_access.open_store import open_store
from dl2d.cli.output import print_json, print_tables, print_text, table
from dl2d.cli.progress_bars import interruptible, shown_progress
from dl2d.cli.shared_options import ConfigOption, JsonOption, option
from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings
from dl2d.core.errors import Dl2dError, WorkloadError, counted
from dl2d.daemon.policy_versions.active_version import current_checkpoint
from dl2d.plugins import takes_checkpoint
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.store.connections_and_transactions import StoreLocation
from dl2d.store.shadow_comparison import shadow_comparison

if TYPE_CHECKING:
    from dl2d.store.tables.policy_versions import SqlRegistry


def shadow(
    days: Annotated[float, option("How many of the last days to compare, and to replay.", "--days", min=0.01)] = 7.0,
    limit: Annotated[int, option("How many jobs to list.", "--limit", "-n", min=1)] = 20,
    saved: Annotated[
        bool,
        option("Replay recorded days to see how much sooner jobs would have ended.", "--saved/--no-saved"),
    ] = True,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Compare what dl2d would have decided in mode shadow with what the site's scheduler gave each job.

    What dl2d would have saved is estimated by replaying both on recorded days. That may take minutes. For mode canary
    it shows how the jobs of the policy compare with those of the fallback.
    """
    settings = load_settings(config)
    with open_store(settings) as store:
        canary = newest_canary(store, settings)
    counts, jobs = shadow_comparison(StoreLocation.parse(settings.store_url), days, limit)
    savings = _savings(settings, days) if saved and counts else None
    if as_json:
        tried = None if canary is None else canary_json(*canary)
        print_json({"days": days, "policies": counts, "saved": savings, "jobs": jobs, "canary": tried})
        return
    if canary is not None:
        print_text(canary_sentence(*canary))
    if not counts:
        typer.echo(f"no decision was recorded in mode shadow in the last {days:g} days")
        return
    for found in counts:
        typer.echo(sentence(found))
    if savings is not None:
        typer.echo(savings_sentence(savings, counts))
    if jobs:
        headings = (
            "job",
            "name",
            "user",
            ">decisions",
            ">different",
            ">workers given",
            ">by dl2d",
            ">PSs given",
            ">by dl2d",
        )
        print_tables("", table(headings, [[_shown(value) for value in job.values()] for job in jobs]))


def sentence(found: dict[str, Any]) -> str:
    """The comparison with one version in words."""
    total, same, waited = found["decisions"], found["same"], found["waited"]
    agreed = f"{100 * same / total:.0f} %"
    if waited == total:
        agreed += "; the job waits either way in all of them"
    elif waited:
        share = 100 * (same - waited) / (total - waited)
        agreed += f"; {share:.0f} % without the {waited} in which the job waits either way"
    parts = [
        f"the same in {same} ({agreed})",
        f"more in {found['more']}",
        f"less in {found['less']}",
    ]
    if found["other"]:
        parts.append(f"other roles in {found['other']}")
    earlier, soon = found["started_earlier"], found["started_soon"]
    started = f"; in {earlier} it would have started a job that waited" if earlier else ""
    if soon:
        started += f", as the site's scheduler did{'' if soon == earlier else f' in {soon} of these'} within a minute"
    return (
        f"{found['policy']} {found['policy_version']}: of {counted(total, 'decision')} on "
        f"{counted(found['jobs'], 'job')}, {', '.join(parts)}{started}"
    )


def _savings(settings: Settings, days: float) -> dict[str, Any]:
    """How much sooner jobs would have ended with what decides in mode shadow, by replays of both on recorded days.

    These are all whole days among the last ones, without those that it was trained on.

    ``policy`` and ``policy_version`` are what was replayed: that with which dl2d would decide now.
    ``change`` is the mean completion time divided by the site's, minus 1, and ``low`` and ``high`` are the ends of its
    95 % interval; None if unknown. ``better`` is whether jobs surely end sooner. ``reason`` is the gate's, or why
    nothing was replayed.
    """
    # The simulator, which --no-saved does not wait for.
    from dl2d.cli.policy_trials.trial_on_recorded_days import (  # noqa: PLC0415
        deciding,
        on_trial,
        recorded_days,
        site_scheduler,
        slot_seconds,
    )

    with interruptible(lambda: "nothing was compared"), shown_progress() as tell, open_store(settings) as store:
        ours = deciding(settings, store.registry)
        assert ours.policy is not None
        replayed = {"policy": ours.policy.name, "policy_version": _without_settings(ours.policy.version)}
        try:
            split = recorded_days(
                settings, store, now=time.time(), seed=settings.learning.seed, tell=tell, days=days, for_training=False,
                candidate=_deciding_checkpoint(settings, store.registry), assume_speeds=True,
            )  # fmt: skip
        except WorkloadError as error:
            unknown = dict.fromkeys(("change", "low", "high", "site_seconds", "dl2d_seconds"))
            return {**replayed, **unknown, "days": [], "better": False, "reason": error.problem}
        trial = on_trial(settings, settings.policy.name, split, ours, site_scheduler(split), tell=tell)

    def mean(slots: Iterable[float]) -> float | None:
        found = list(slots)
        return slot_seconds(settings) * statistics.fmean(found) if found else None

    site_mean, our_mean = mean(case.current for case in trial.cases), mean(case.candidate for case in trial.cases)
    return {
        **replayed, "change": trial.change, "low": trial.low, "high": trial.high, "site_seconds": site_mean,
        "dl2d_seconds": our_mean, "days": list(trial.days), "better": trial.passed and (trial.high or 0.0) < 0,
        "reason": trial.reason,
    }  # fmt: skip


def _deciding_checkpoint(settings: Settings, registry: SqlRegistry) -> Checkpoint | None:
    if not takes_checkpoint(settings.policy.name):
        return None
    with contextlib.suppress(Dl2dError):  # the fallback decides
        return current_checkpoint(settings, registry, settings.policy.name)
    return None


def _without_settings(version: str) -> str:
    """A policy's version without the settings that replace those of its checkpoint."""
    return version.partition(" ")[0]


def savings_sentence(found: dict[str, Any], counts: list[dict[str, Any]]) -> str:
    """What replays of recorded days say dl2d would have saved, in words; ``counts`` are of the recorded decisions."""
    replayed = (found["policy"], found["policy_version"])
    decided = {(each["policy"], _without_settings(each["policy_version"])) for each in counts}
    other = ""
    if decided != {replayed}:
        other = f", which made {'only some' if replayed in decided else 'none'} of the decisions counted above"
    better = "surely better: " if found["better"] else ""
    seconds, is_compared = found["site_seconds"], found["change"] is not None
    mean = f"; with the site's scheduler a job takes {seconds / 3600:.2f} h there on average" if is_compared else ""
    return (
        f"saved by {' '.join(replayed)}{other}, estimated by replays of recorded days: {better}{found['reason']}{mean}"
    )


def _shown(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
