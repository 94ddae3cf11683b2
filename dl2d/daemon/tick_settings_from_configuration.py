"""What the site's settings say to a tick and to its resource manager."""

from __future__ import annotations

from dataclasses import fields

from dl2d.config.settings import Settings
from dl2d.tick.tick_context import GuardRules, Timeouts


def guard_rules(settings: Settings) -> GuardRules:
    """The site's limits on what a policy may do."""
    return GuardRules(
        per_user=settings.guard.per_user,
        per_account=settings.guard.per_account,
        per_partition=settings.guard.per_partition,
        cooldown_up=settings.guard.cooldown_up_seconds,
        cooldown_down=settings.guard.cooldown_down_seconds,
        churn=settings.guard.churn,
        hold_back_after=settings.guard.hold_back_after_seconds,
        backoff=settings.jobs.backoff_seconds,
    )


def manager_settings(settings: Settings) -> dict[str, object]:
    """The chosen manager's part of the settings; one that keeps files gets a folder under the state folder."""
    section: dict[str, object] = settings.resource_manager.chosen
    if settings.resource_manager.name == "local":
        section.setdefault("state_dir", str(settings.state_dir / "local"))
    return section


def timeouts(settings: Settings) -> Timeouts:
    """When a tick gives up waiting for a task or a job."""
    return Timeouts(**{each.name: getattr(settings.jobs, each.name) for each in fields(Timeouts)})
