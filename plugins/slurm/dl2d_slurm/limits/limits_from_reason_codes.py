"""Limits of associations and qualities of service, as far as the reasons for which task jobs wait tell of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from dl2d.core.cluster import parse_tag
from dl2d.core.resource_manager import GrowthLimit, RmJob, RmJobState
from dl2d_slurm.jobs.job_reason_codes import Bound, SiteLimit, bound, site_limit
from dl2d_slurm.submission.sbatch_options import NO_OPTIONS, AnchorOptions


def with_limits(
    jobs: Sequence[RmJob],
    options: Mapping[str, AnchorOptions],
    resources: Collection[str],
    bounds: Mapping[tuple[str, Bound], str],
) -> tuple[RmJob, ...]:
    """The jobs, with the limit of each task that waits for one, and why it never starts, if so.

    ``options`` are those of jobs, by the ids by which users know them; ``resources`` are the names of all there are;
    ``bounds`` as ``AssociationLimits`` has them.

    A task's own options say what it shares the limit with: its user may have changed its QOS. Slurm has the same
    reasons for the QOS of a job and that of its partition, so such a limit is learned for jobs that share both.
    """
    found: dict[tuple[object, ...], GrowthLimit] = {}

    def limit_of(job: RmJob) -> GrowthLimit | None:
        limit, tag = site_limit(job.reason), parse_tag(job.tag)
        if limit is None or tag is None:
            return None
        own = options.get(job.shown_id, NO_OPTIONS)
        scope, of_qos = _scope(limit, own, job.user), "qos" in limit.shared
        key = job.reason, scope or tag[0].id, of_qos and own.partition
        if key not in found:
            partitions = set(own.partition.split(","))
            anchors = frozenset(
                each.handle
                for each in jobs
                if (of := options.get(each.shown_id)) is not None
                and (_scope(limit, of, each.user) == scope if scope else each.shown_id == tag[0].id)
                and (not of_qos or partitions & set(of.partition.split(",")))
            )
            left = {name: 0.0 for name in resources if _is_limited(name, limit)}
            whose = ", ".join(f"{kind} {name}" for kind, name in scope) or f"job {tag[0].id}"
            if of_qos:
                whose += f" in partition {own.partition}"
            why = f"{job.reason}, of the QOS of the job or its partition" if of_qos else job.reason
            found[key] = GrowthLimit(anchors, left, f"a limit of Slurm leaves no more to {whose} ({why})")
        return found[key]

    def why_never(job: RmJob) -> str:
        tag, own = parse_tag(job.tag), options.get(job.shown_id, NO_OPTIONS)
        # Of several partitions another one may start it, with other limits and another QOS.
        return "" if tag is None or "," in own.partition else never_starts(job.reason, tag[1], own.qos, bounds)

    return tuple(
        replace(job, limit=limit, never_starts=why_never(job))
        if job.state is RmJobState.PENDING and job.tag and (limit := limit_of(job)) is not None
        else job
        for job in jobs
    )


def never_starts(reason: str, task: str, qos: str, bounds: Mapping[tuple[str, Bound], str]) -> str:
    """Why a task with this name and QOS that has this reason never starts as it was submitted, and what its user can
    do; empty if it may start.
    """
    kind = bound(reason)
    if kind is None:
        return ""
    demand, role = bounds.get((qos, kind), ""), task.partition("-")[0]
    if kind is Bound.LEAST:
        whose = f"QOS {qos}" if demand else "the QOS of the job or of its partition"
        return (
            f"{whose} starts no job that demands less than {demand or 'its minimum'} ({reason}); demand that with "
            f"{role}=, or submit the job with another QOS"
        )
    most = f" of QOS {qos}: {demand}" if demand and reason.startswith("QOS") else ""
    return (
        f"it demands more than Slurm gives to one job or on one node ({reason}{most}); demand less with {role}=, or "
        "submit the job with another account or QOS"
    )


def _scope(limit: SiteLimit, options: AnchorOptions, user: str) -> tuple[tuple[str, str], ...]:
    names = {"qos": ("QOS", options.qos), "account": ("account", options.account), "user": ("user", user)}
    return tuple(names[kind] for kind in limit.shared)


def _is_limited(name: str, limit: SiteLimit) -> bool:
    if limit.resource == "gres":
        return name not in ("cpu", "memory")
    return not limit.resource or name == limit.resource
