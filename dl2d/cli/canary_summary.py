"""Canaries as the commands show them: who decides on which jobs, and the comparison of the groups."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dl2d.config.settings import Settings
from dl2d.core.daemon_mode_and_canary import Canary, CanaryState
from dl2d.core.json_codec import as_plain
from dl2d.daemon.policy_versions.canary_comparison import CanaryComparison, compare_groups

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore


def newest_canary(store: SqlStore, settings: Settings) -> tuple[Canary, CanaryComparison] | None:
    """The newest canary, and its groups as they are now; None if there never was one."""
    for canary in store.canaries(limit=1):
        return canary, compare_groups(store.canary_jobs(canary), time.time(), settings.canary.max_days)
    return None


def canary_sentence(canary: Canary, found: CanaryComparison) -> str:
    """Who decides on which jobs and why, in one sentence."""
    policy = f"{canary.policy} version {canary.version}"
    match canary.state:
        case CanaryState.RUNNING:
            failed = found.failed + found.failed_others
            lost = (
                f"; not finished (failed, cancelled or lost): {found.failed} of the policy's jobs and "
                f"{found.failed_others} of the others"
                if failed
                else ""
            )
            return (
                f"canary {canary.number}: {policy} decides on {canary.group}, {canary.fallback} on the others; "
                f"{found.text}{lost}"
            )
        case CanaryState.PROMOTED:
            return f"canary {canary.number} promoted: {policy} decides on all jobs; {canary.reason}"
        case CanaryState.WITHDRAWN:
            decides = f"{canary.fallback} decides on all jobs in place of {policy}"
            return f"canary {canary.number} withdrawn: {decides}; {canary.reason}"
        case _:
            return f"canary {canary.number} stopped without a result ({canary.reason}); {found.text}"


def canary_json(canary: Canary, found: CanaryComparison) -> dict[str, Any]:
    """What ``--json`` shows of a canary."""
    return {**as_plain(canary), "comparison": found}
