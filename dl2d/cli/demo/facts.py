"""What the demo found out: read from the store when all jobs have ended."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dl2d.cli.demo.script import Act
from dl2d.cli.demo.site import NODE, NODES
from dl2d.core.jobs import NOTHING, Allocation, Job, JobState
from dl2d.core.store import DecisionEntry, RuntimePlan, Store
from dl2d.web.timeline import Lane, Mark, Step, Timeline

_MOST = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job of the demo."""

    act: Act
    job: Job
    #: When it was submitted, seconds since 1970; finer than the whole seconds of the job's key.
    arrived: float
    #: Memberships that trained; the first is the start, every other one a resize.
    plans: tuple[RuntimePlan, ...]
    decisions: tuple[DecisionEntry, ...]
    #: Digest of the static run's weights; "" where it failed.
    static_digest: str

    @property
    def equal(self) -> bool:
        """Whether the final weights are those of the static run, bit for bit."""
        return bool(self.job.digest) and self.job.digest == self.static_digest

    @property
    def good(self) -> bool:
        """Whether the job finished with the weights that it should have."""
        return self.job.state is JobState.FINISHED and self.equal

    @property
    def resizes(self) -> tuple[RuntimePlan, ...]:
        """Changes of membership while it trained."""
        return self.plans[1:]

    @property
    def seconds(self) -> float:
        """From its arrival to its end."""
        return (self.job.ended_at or self.arrived) - self.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The whole demo."""

    jobs: tuple[JobFacts, ...]
    #: When it began, seconds since 1970, and how long it took until the last job had ended.
    began: float
    seconds: float
    slots: int
    policy: str
    #: Tasks that still ran at the very end and had to be ended.
    left_over: int | None = None

    @property
    def good(self) -> bool:
        """Whether all is as it should be."""
        return all(job.good for job in self.jobs)

    @property
    def resizes(self) -> int:
        """All resizes."""
        return sum(len(job.resizes) for job in self.jobs)

    @property
    def suspension(self) -> tuple[float, float]:
        """Milliseconds that a resize kept workers waiting: median over the resizes, and the longest of any worker."""
        return suspension([plan for job in self.jobs for plan in job.resizes])

    def as_json(self) -> dict[str, object]:
        """The same for programs. Times are seconds since the beginning unless they are called otherwise."""
        return {
            "good": self.good,
            "began": self.began,
            "seconds": round(self.seconds, 3),
            "policy": self.policy,
            "slots": self.slots,
            "resizes": self.resizes,
            "suspension_ms": _suspension_json(self.suspension),
            "jobs": [self._job_json(job) for job in self.jobs],
        }

    def _job_json(self, facts: JobFacts) -> dict[str, object]:
        job, progress = facts.job, facts.job.progress
        return {
            "name": facts.act.name,
            "model": facts.act.model_type,
            "job": job.key.slug,
            "command": list(facts.act.command()),
            "state": str(job.state),
            "end_reason": job.end_reason,
            "arrived": round(facts.arrived - self.began, 3),
            "started": None if job.started_at is None else round(job.started_at - self.began, 3),
            "ended": None if job.ended_at is None else round(job.ended_at - self.began, 3),
            "completion_seconds": round(facts.seconds, 3),
            "updates": progress.version,
            "loss": progress.loss,
            "weights_equal_static_run": facts.equal,
            "digest": job.digest or None,
            "static_digest": facts.static_digest or None,
            "resizes": len(facts.resizes),
            "suspension_ms": _suspension_json(suspension(facts.resizes)),
            "plans": [
                {
                    "at": round(plan.at - self.began, 3),
                    "number": plan.number,
                    "first_version": plan.first_version,
                    "workers": plan.workers,
                    "ps": plan.servers,
                    "added": list(plan.added),
                    "removed": list(plan.removed),
                    "moved_bytes": plan.moved_bytes,
                    "prepare_ms": plan.prepare_ms,
                    "move_ms": plan.move_ms,
                    "suspension_p50_ms": plan.suspension_p50_ms,
                    "suspension_max_ms": plan.suspension_max_ms,
                }
                for plan in facts.plans
            ],
            "decisions": [
                {
                    "at": round(entry.at - self.began, 3),
                    "slot": entry.slot,
                    "workers": entry.decided.allocation.workers,
                    "ps": entry.decided.allocation.ps,
                    "why": entry.decided.reason.text,
                }
                for entry in _changes(facts.decisions)
            ],
        }

    def timeline(self) -> Timeline:
        """For the picture."""
        middle, longest = self.suspension
        return Timeline(
            title=f"{len(self.jobs)} training jobs, resized {self.resizes} times while they train",
            subtitle=(
                f"policy {self.policy}, {NODES} nodes of {NODE['cpu']} CPUs and {NODE['gpu']} GPUs; workers waited "
                f"{middle:.2f} ms per resize at the median, {longest:.2f} ms at most;\n"
                + ("final weights are bit for bit those of static runs" if self.good else "NOT all as it should be")
            ),
            seconds=self.seconds,
            lanes=tuple(self._lane(job) for job in self.jobs),
        )

    def _lane(self, facts: JobFacts) -> Lane:
        job = facts.job
        ended = (job.ended_at or self.began + self.seconds) - self.began
        return Lane(
            name=facts.act.name,
            about=f"{facts.seconds:.0f} s to completion\n{len(facts.resizes)} resizes\n"
            + ("weights as static" if facts.equal else "weights DIFFER"),
            arrived=facts.arrived - self.began,
            ended=ended,
            end=str(job.state),
            trained=tuple(Step(plan.at - self.began, plan.workers, plan.servers) for plan in facts.plans),
            decided=tuple(
                Step(entry.at - self.began, entry.decided.allocation.workers, entry.decided.allocation.ps)
                for entry in _changes(facts.decisions)
                if entry.at - self.began < ended
            ),
            resizes=tuple(
                Mark(after.at - self.began, sentence(before, after))
                for before, after in zip(facts.plans, facts.resizes, strict=False)
            ),
        )


def collect(store: Store, jobs: Sequence[tuple[Act, Job, float]], digests: Mapping[str, str], began: float) -> Facts:
    """Read everything about the demo's jobs."""
    found = tuple(
        JobFacts(
            act=act,
            job=job,
            arrived=arrived,
            plans=store.runtime_plans(job.key),
            decisions=store.decisions(job.key, limit=_MOST)[::-1],
            static_digest=digests.get(act.name, ""),
        )
        for act, job, arrived in jobs
    )
    ends = [facts.job.ended_at or began for facts in found]
    slots = store.slots(limit=_MOST)
    return Facts(
        jobs=found,
        began=began,
        seconds=max(ends) - began,
        slots=len(slots),
        policy=slots[0].policy if slots else "",
    )


def suspension(plans: Sequence[RuntimePlan]) -> tuple[float, float]:
    """Median of the plans' medians, and the largest value of any; milliseconds, zeros where there is no plan."""
    if not plans:
        return 0.0, 0.0
    return statistics.median(plan.suspension_p50_ms for plan in plans), max(plan.suspension_max_ms for plan in plans)


def sentence(before: RuntimePlan, after: RuntimePlan) -> str:
    """What a resize did."""
    moved = [f"+{task}" for task in after.added] + [f"-{task}" for task in after.removed]
    return (
        f"{Allocation(before.workers, before.servers)} became {Allocation(after.workers, after.servers)} "
        f"at update {after.first_version} ({', '.join(moved) or 'no change'}); "
        f"{after.moved_bytes / 1e3:.0f} kB moved, workers waited {after.suspension_p50_ms:.2f} ms at the median, "
        f"{after.suspension_max_ms:.2f} ms at most"
    )


def _changes(entries: Sequence[DecisionEntry]) -> list[DecisionEntry]:
    """Decisions that differ from the one before."""
    changed, last = [], NOTHING
    for entry in entries:
        if entry.decided.allocation != last:
            changed.append(entry)
        last = entry.decided.allocation
    return changed


def _suspension_json(value: tuple[float, float]) -> dict[str, float]:
    return {"p50": value[0], "max": value[1]}
