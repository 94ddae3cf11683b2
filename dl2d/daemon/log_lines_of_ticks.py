"""Lines of the log on what ticks found: written when something begins or ends, not in every tick."""

from __future__ import annotations

import structlog

from dl2d.tick.policy_check.policy_failures import SetAside
from dl2d.tick.record_slot import Report

log = structlog.get_logger()

#: Maximum number of jobs or users, and of reasons, that a line of the log has.
_MAX_JOBS_NAMED, _MAX_REASONS = 10, 5


class TickLog:
    """Logs the reports of consecutive ticks."""

    def __init__(self) -> None:
        self._set_aside: SetAside | None = None
        #: Whether the last listing was incomplete, and the remarks on it.
        self._listing: tuple[bool, tuple[str, ...]] = (False, ())
        self._losing_claims = frozenset[str]()
        self._users_of_unknown = frozenset[str]()

    def write(self, report: Report, idle_seconds: float) -> bool:
        """Log a tick; returns whether the policy was set aside in it. ``idle_seconds``: ``Context.idle_seconds``."""
        self._write_listing(report)
        if report.needless_wait.jobs and not report.needless_wait.seconds:
            log.warning(
                "jobs wait although there is room for every one of them",
                jobs=[key.id for key in report.needless_wait.jobs[:_MAX_JOBS_NAMED]],
                count=len(report.needless_wait.jobs),
                policy=report.decision.policy,
                fallback_after_seconds=idle_seconds,
            )
        before, self._losing_claims = self._losing_claims, frozenset(report.losing_claims)
        if new := sorted(self._losing_claims - before):
            log.warning(
                "several times tasks left nodes for waiting jobs that then did not get them; for an hour no tasks "
                "leave nodes for these jobs",
                claims=new[:_MAX_JOBS_NAMED],
                count=len(new),
            )
        if report.plan.starts or report.plan.stops or report.decided:
            snapshot = report.snapshot
            log.info(
                "tick",
                slot=snapshot.slot,
                decided=report.decided,
                jobs=len(snapshot.jobs),
                starts=len(report.outcome.started),
                stops=len(report.plan.stops),
                deferred=len(report.plan.deferred),
                seconds=round(report.seconds, 3),
            )
        aside_before, self._set_aside = self._set_aside, report.set_aside
        aside = report.set_aside
        if aside is None or aside == aside_before:
            return False
        log.error("policy is set aside; the fallback decides", policy=aside.policy, version=aside.version,
                  reason=aside.reason)  # fmt: skip
        return True

    def _write_listing(self, report: Report) -> None:
        remarks = (*report.remarks, *report.stray_remarks)
        before, self._listing = self._listing, (bool(report.incomplete), remarks)
        if report.incomplete and not before[0]:
            log.error("listing is incomplete; until it is complete, only cancelled jobs are ended or stopped",
                      reasons=report.incomplete[:_MAX_REASONS], count=len(report.incomplete))  # fmt: skip
        elif before[0] and not report.incomplete:
            log.info("listing is complete again")
        users_before, self._users_of_unknown = self._users_of_unknown, frozenset(report.unknown_tasks)
        if self._users_of_unknown - users_before:
            log.warning("running tasks have tags of this cluster and are not in this database",
                        users=sorted(self._users_of_unknown)[:_MAX_JOBS_NAMED],
                        count=sum(report.unknown_tasks.values()))  # fmt: skip
        if remarks and remarks != before[1]:
            log.warning("not stopped", reasons=remarks[:_MAX_REASONS], count=len(remarks))
