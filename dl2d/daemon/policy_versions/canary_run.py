"""The canary of the policy in charge: begins it, ends it by its rule, and keeps how it came out in force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from dl2d.config.settings import Settings
from dl2d.core.daemon_mode_and_canary import Canary, CanaryState, Mode
from dl2d.core.errors import Dl2dError
from dl2d.core.policy import Policy
from dl2d.daemon.policy_versions.active_version import ActiveVersion
from dl2d.daemon.policy_versions.canary_comparison import CanaryComparison, compare_groups, judge_canary
from dl2d.store.sql_store import SqlStore
from dl2d.tick.policy_check.policy_failures import SetAside
from dl2d.tick.tick_context import Context

log = structlog.get_logger()

#: Earlier canaries among which one of the same version is looked for.
_MAX_EARLIER = 1000
#: Time between two comparisons of the groups of a canary.
JUDGE_SECONDS = 3600.0


@dataclass(eq=False)
class CanaryRun:
    """Does nothing in other modes than canary, except that a canary that runs is stopped.

    Where the live version cannot be read (``ActiveVersion.set_aside``), the fallback decides, and canaries stay as they
    are.

    Raises ``StoreError`` if a canary cannot be recorded.
    """

    settings: Settings
    store: SqlStore
    active: ActiveVersion
    fallback: Policy
    #: Seconds since 1970.
    clock: Callable[[], float]
    #: Of the active version; None in other modes.
    canary: Canary | None = None

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin the canary of the active version, or go on with it; how an earlier one ended stays in force."""
        if self.active.set_aside is not None:
            return
        now, settings = self.clock(), self.settings
        wanted = None
        if settings.mode is Mode.CANARY:
            policy, section = self.active.policy, settings.canary
            wanted = Canary(
                policy=policy.name, version=policy.version, fallback=self.fallback.name, share=section.group_share,
                partition=section.partition, account=section.account, began_at=now,
            )  # fmt: skip
        earlier = self.store.canaries(limit=_MAX_EARLIER)
        same = [each for each in earlier if wanted is not None and wanted.continues(each)]
        known = next((each for each in same if each.state is not CanaryState.STOPPED), None)
        for each in earlier:
            if each.state is CanaryState.RUNNING and each != known:
                reason = f"mode {settings.mode}" if wanted is None else "another version, fallback or group"
                self.store.keep_canary(replace(each, state=CanaryState.STOPPED, reason=reason, ended_at=now))
        self.canary = known
        if wanted is not None and known is None:
            self.canary = self.store.keep_canary(wanted)
            log.info("canary begins", canary=self.canary.number, policy=wanted.policy, version=wanted.version,
                     group=wanted.group, fallback=wanted.fallback)  # fmt: skip

    def applied(self, context: Context) -> Context:
        """The context of ticks: who decides on which jobs."""
        canary = self.canary
        if self.active.set_aside is not None and self.settings.mode is not Mode.OBSERVE:
            return replace(context, canary=None, withdrawn=self.active.set_aside)
        if canary is None or canary.state is CanaryState.PROMOTED:
            return replace(context, canary=None, withdrawn=None)
        if canary.state is CanaryState.RUNNING:
            return replace(context, canary=canary, withdrawn=None)
        reason = f"was withdrawn (canary {canary.number}): {canary.reason}"
        return replace(context, canary=None, withdrawn=SetAside(canary.policy, canary.version, reason))

    def judge(self) -> CanaryComparison | None:
        """Compare the groups, and end the canary if its rule says so; None if there is none to judge. Never raises."""
        if self.canary is None or self.canary.state is not CanaryState.RUNNING:
            return None
        now = self.clock()
        try:
            jobs = self.store.canary_jobs(self.canary)
            found = compare_groups(jobs, now, self.settings.canary.max_days)
            verdict = judge_canary(self.canary, found, self.settings.canary, now)
            if verdict is not None:
                self._end(*verdict)
        except Dl2dError as error:
            log.warning("the canary cannot be judged; it is tried again later", error=str(error))
            return None
        return found

    def withdraw(self, reason: str) -> bool:
        """Withdraw the policy because of how it decides; returns whether a canary ran. Never raises."""
        if self.canary is None or self.canary.state is not CanaryState.RUNNING:
            return False
        try:
            self._end(CanaryState.WITHDRAWN, reason)
        except Dl2dError as error:
            log.warning("the canary cannot be withdrawn; it is tried again later", reason=reason, error=str(error))
            return False
        return True

    def _end(self, state: CanaryState, reason: str) -> None:
        assert self.canary is not None
        canary = replace(self.canary, state=state, reason=reason, ended_at=self.clock())
        why = f"canary {canary.number}: {reason}"
        # The version is changed first: if recording the end fails, the canary goes on, and its end is tried again.
        if state is CanaryState.PROMOTED:
            self.active.promote(why)
        elif state is CanaryState.WITHDRAWN:
            self.active.reject(why)
        self.canary = self.store.keep_canary(canary)
        tell, event = (
            (log.error, "canary withdrawn") if state is CanaryState.WITHDRAWN else (log.info, "canary promoted")
        )
        tell(event, canary=canary.number, policy=canary.policy, version=canary.version, group=canary.group,
             decides=canary.policy if state is CanaryState.PROMOTED else canary.fallback, reason=reason)  # fmt: skip
