"""What users see of jobs, read from the store: an operator all, another user their own jobs without other's names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Constraint, JobDecision, Reason
from dl2d.core.errors import Denied, RequestError
from dl2d.core.job_views import (
    DecisionView,
    HistoryView,
    JobStatus,
    StatusView,
    TaskStatus,
    UsageView,
    WhyView,
)
from dl2d.core.jobs import NOTHING, Job, JobKey, User
from dl2d.core.store import DecisionEntry, JobSlot, RuntimePlan

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore

_MAX_COMPARED = 200
#: Constraints whose reasons are about the job and its owner alone. The texts of the others may name other jobs.
_OWN_TEXTS = frozenset(
    {
        Constraint.SATISFIED, Constraint.LIMIT, Constraint.COOLDOWN, Constraint.CHURN, Constraint.BACKOFF,
        Constraint.OBSERVED, Constraint.SILENT,
    }
)  # fmt: skip
_OTHER_TEXTS = {
    Constraint.CAPACITY: "its next larger size needs more than is free",
    Constraint.FRAGMENTED: "no single node has room for its next task",
    Constraint.INFEASIBLE: "a task asks for more than any node that it may use has",
    Constraint.QUEUE: "other jobs are served first",
    Constraint.HELD_BACK: "a job that was submitted earlier has waited for very long, and starts first",
    Constraint.FLOOR: "keeps its minimum size",
    Constraint.FALLBACK: "the policy failed, and the fallback decided",
    Constraint.OUT_OF_RANGE: "the input is out of the range of the policy's training, and the fallback decided",
}


@dataclass(eq=False)
class StoreViews:
    """Implements ``JobViews`` for one user."""

    store: SqlStore
    #: Who asks; None for an operator, who sees all jobs.
    user: User | None = None
    #: Why a job that is not in the store was refused, by its id or name, who asks, and the time (seconds since 1970)
    #: after which it was submitted; "" if that is not known.
    refused: Callable[[str, User | None, int], str] = lambda job, user, after: ""  # noqa: ARG005

    def status(self, job: str | None, *, ended_since: float | None, limit: int) -> StatusView:
        """See ``JobViews.status``. Few queries, whatever the number of jobs."""
        store = self.store
        if job is None:
            since = math.inf if ended_since is None else ended_since
            jobs, total = store.list_jobs(self.user, ended_since=since, limit=limit)
            last = store.last_decisions([each.key for each in jobs if not each.state.ended])
            decided = {key: self._seen(each) for key, each in last.items()}
            tasks: tuple[TaskStatus, ...] = ()
            listed = {each.key for each in jobs}
            of_suspended = tuple(task for task in store.tasks_of_suspended() if task.job in listed)
        else:
            chosen = self.find(job)
            jobs, total = (chosen,), 1
            newest = () if chosen.state.ended else store.decisions(chosen.key, limit=1)
            decided = {each.decided.job: self._seen(each.decided) for each in newest}
            tasks, of_suspended = self._tasks(chosen.key), ()
        changes = store.mode_changes(limit=1)
        return StatusView(
            slot=store.last_slot_number(),
            mode=changes[0].after if changes else Mode.LIVE,
            store_bytes=store.size(),
            jobs=tuple(JobStatus(each, decided.get(each.key)) for each in jobs),
            left_out=total - len(jobs),
            tasks=tasks,
            tasks_of_suspended=of_suspended,
        )

    def _tasks(self, key: JobKey) -> tuple[TaskStatus, ...]:
        store = self.store
        reports = {report.task: report for report in store.task_reports(key)}
        live = [TaskStatus(task.id, task, reports.pop(task.id, None)) for task in store.tasks(live=True, job=key)]
        lost = {name: report for name, report in reports.items() if report.how}
        ended = {task.id: task for task in store.named_tasks(key, lost)}
        return (*live, *(TaskStatus(name, ended.get(name), report) for name, report in lost.items()))

    def why(self, job: str, *, slot: int | None, limit: int) -> WhyView:
        """See ``JobViews.why``."""
        store = self.store
        chosen = self.find(job)
        return WhyView(
            job=chosen,
            decisions=self._decisions(chosen.key, slot, limit),
            tasks=store.tasks(live=True, job=chosen.key),
            lost=tuple(report for report in store.task_reports(chosen.key) if report.how),
        )

    def _decisions(self, key: JobKey, number: int | None, limit: int) -> tuple[DecisionView, ...]:
        store = self.store
        if number is None:
            entries = store.decisions(key, limit=limit)[::-1]
            return tuple(self._decision(store.job_slot(entry.slot, key), entry) for entry in entries)
        slot = store.job_slot(number, key)
        if slot is None:
            raise RequestError("--slot", f"slot {number} is not recorded; the newest is {store.last_slot_number()}")
        if slot.entry is None:
            raise RequestError(
                "--slot", f"slot {number} has no decision on job {key.id}, which was neither ready nor running then; "
                f"`dl2d history --job {key.id}` shows the slots in which it was resized",
            )  # fmt: skip
        return (self._decision(slot, slot.entry),)

    def _decision(self, slot: JobSlot | None, entry: DecisionEntry) -> DecisionView:
        if slot is None:
            return DecisionView(self._seen_entry(entry))
        return DecisionView(
            self._seen_entry(entry),
            slot.deferred,
            slot.failures,
            None if slot.proposed is None else self._seen(slot.proposed),
            None if slot.shadow is None else self._seen_entry(slot.shadow),
            self._grown(entry),
            self._may_use(slot),
        )

    def _grown(self, entry: DecisionEntry) -> tuple[JobDecision, ...]:
        """Decisions of the slot that gave other jobs more, if this one gave its job less than before, or nothing."""
        before, after = entry.decided.previous, entry.decided.allocation
        if after != NOTHING and sum(after) >= sum(before):
            return ()
        return tuple(map(self._seen, self.store.grown_jobs(entry.slot, self.user)))

    def _may_use(self, slot: JobSlot) -> str:
        if slot.usable is None:
            return ""
        # Why not the others may name reservations.
        return slot.usable.text(slot.nodes) if self.user is None else f"{len(slot.usable.nodes)} of {slot.nodes} nodes"

    def history(self, job: str | None, *, limit: int) -> HistoryView:
        """See ``JobViews.history``."""
        store = self.store
        if job is not None:
            return self._history_of(self.find(job), limit)
        if self.user is not None:
            raise Denied("only operators see the history of the cluster; give --job JOB for that of a job of yours")
        resizes = store.resizes(limit=limit)[::-1]
        plans = [
            (key, plan)
            for key in sorted({resize.job for resize in resizes})
            for plan in store.runtime_plans(key, limit=limit)
        ]
        return HistoryView(
            modes=store.mode_changes(limit=limit)[::-1],
            slots=store.slots(limit=limit)[::-1],
            resizes=resizes,
            plans=tuple(sorted(plans, key=lambda item: (item[1].at, item[0], item[1].number))[-limit:]),
        )

    def _history_of(self, job: Job, limit: int) -> HistoryView:
        store = self.store
        plans: tuple[tuple[JobKey, RuntimePlan], ...] = tuple(
            (job.key, plan) for plan in store.runtime_plans(job.key, limit=limit)
        )
        return HistoryView(
            job=job,
            runs=self._runs(job),
            decisions=tuple(map(self._seen_entry, store.decisions(job.key, limit=limit, changed=True)[::-1])),
            resizes=store.resizes(job.key, limit=limit)[::-1],
            plans=plans,
        )

    def usage(self, job: str) -> UsageView:
        """See ``JobViews.usage``."""
        chosen = self.find(job)
        runs = (chosen,) if job == chosen.key.slug else self._runs(chosen)
        times = tuple(time for run in runs for time in self.store.task_times(run.key))
        return UsageView(job=chosen, times=times, runs=len(runs))

    def _runs(self, job: Job) -> tuple[Job, ...]:
        """The job and its other runs, oldest first: a requeued job is a new one with the same id and owner."""
        found = self.store.find_jobs(job.key.id, User(job.owner.uid, job.owner.user), by=("id",))
        return tuple(run for run in found[::-1] if run.key[:2] == job.key[:2])

    def find(self, text: str) -> Job:
        """The job with a slug, or else with an id, or else with a name.

        Of several it is the only one that has not ended, or the last with that id.

        Raises
        ------
        RequestError
            There is none that the user may see, there are several, or all have ended and one that was submitted later
            was refused; the message names similar ones.
        """
        found = self.store.find_jobs(text, self.user)
        last = max((job.key.submitted for job in found), default=0)
        if all(job.state.ended for job in found) and (reason := self.refused(text, self.user, last)):
            before = f"; the job before it is {found[0].key.slug}" if found else ""
            raise RequestError("JOB", f"job {text} was refused when it registered: {reason}{before}")
        if not found:
            recent = self.store.list_jobs(self.user, ended_since=0.0, limit=_MAX_COMPARED)
            names = {name for job in recent.jobs for name in (job.request.name, job.key.id)}
            near = difflib.get_close_matches(text, sorted(names), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            there_is_none = f"there is no job {text!r}" if self.user is None else f"no such job of yours: {text!r}"
            raise RequestError(
                "JOB",
                f"{there_is_none}{hint} (`dl2d status --all` lists the jobs of the last day; the output of a job that "
                "was refused says why)",
            )
        candidates = [job for job in found if not job.state.ended] or found
        # A requeued job is a new one with the same id; the newest comes first.
        if len(candidates) == 1 or {job.key[:2] for job in candidates} == {(candidates[0].key.cluster, text)}:
            return candidates[0]
        several = ", ".join(f"{job.key.slug} ({job.request.name}, {job.state})" for job in found[:8])
        raise RequestError("JOB", f"{len(found)} jobs are called {text!r}; give one of {several}")

    def _seen_entry(self, entry: DecisionEntry) -> DecisionEntry:
        return replace(entry, decided=self._seen(entry.decided))

    def _seen(self, decided: JobDecision) -> JobDecision:
        """A decision as the user may see it: without texts that may name other users' jobs."""
        if self.user is None:
            return decided
        own = partial(_own_reason, user=self.user.name)
        return replace(decided, reason=own(decided.reason), guarded=tuple(map(own, decided.guarded)))


def _own_reason(reason: Reason, user: str) -> Reason:
    if reason.constraint in _OWN_TEXTS:
        return reason
    text = _OTHER_TEXTS.get(reason.constraint, str(reason.constraint))
    if reason.constraint is Constraint.CLAIM:
        what = "room made" if any(claimant.tasks_leave for claimant in reason.claimants) else "free room is kept"
        jobs = [claimant.handle for claimant in reason.claimants if claimant.user == user]
        others = " and others" if len(jobs) < len(reason.claimants) else ""
        whom = f"your job {', '.join(jobs)}{others}" if jobs else "a job of the resource manager"
        text = f"{what} for {whom}"
    missing = "; ".join(map(str, reason.shortfalls))
    return replace(reason, text=f"{text} ({missing})" if missing else text, claimants=())
