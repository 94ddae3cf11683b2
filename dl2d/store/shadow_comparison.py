"""Comparison of the decisions in mode shadow with what the site's scheduler gave."""

from __future__ import annotations

from typing import Any

from dl2d.core.decision import SOON_SECONDS
from dl2d.store.connections_and_transactions import StoreLocation
from dl2d.store.read_only_query import ask

# The index on the slot finds these decisions; days_ago of shadow_decisions would be computed for the whole history.
_RECENT = "slot > (SELECT coalesce(max(slot), 0) FROM slot_times WHERE days_ago >= {:f})"
_COUNTS = """
SELECT policy, policy_version, count(*) AS decisions, count(DISTINCT job) AS jobs,
       sum(CASE compared WHEN 'same' THEN 1 ELSE 0 END) AS same,
       sum(CASE WHEN compared = 'same' AND workers = 0 AND ps = 0 THEN 1 ELSE 0 END) AS waited,
       sum(CASE compared WHEN 'more' THEN 1 ELSE 0 END) AS more,
       sum(CASE compared WHEN 'less' THEN 1 ELSE 0 END) AS less,
       sum(CASE compared WHEN 'other' THEN 1 ELSE 0 END) AS other,
       sum(CASE WHEN given_workers = 0 AND workers > 0 THEN 1 ELSE 0 END) AS started_earlier
FROM shadow_decisions WHERE {recent} GROUP BY policy, policy_version ORDER BY min(slot)
"""
# Decisions counted as started_earlier after which the site's scheduler soon started the job with the same size: a slot
# is recorded as soon as jobs come or end, some seconds before the scheduler has gone through them. Slots are
# hardly less than a second apart, so that the index on their numbers limits the search.
_STARTED_SOON = """
SELECT slots.shadow_policy AS policy, slots.shadow_policy_version AS policy_version, count(*) AS started_soon
FROM shadow_allocations AS decided JOIN slots ON slots.number = decided.slot
WHERE decided.{recent} AND decided.given_workers = 0 AND decided.workers > 0
  AND EXISTS (SELECT 1 FROM shadow_allocations AS later JOIN slots AS later_slots ON later_slots.number = later.slot
              WHERE later.job_number = decided.job_number AND later.slot > decided.slot
                AND later.slot <= decided.slot + {seconds:d}
                AND later_slots.at BETWEEN slots.at AND slots.at + {seconds:d}
                AND later.given_workers = decided.workers AND later.given_ps = decided.ps)
GROUP BY slots.shadow_policy, slots.shadow_policy_version
"""
_JOBS = """
SELECT job_id, name, user_name, count(*) AS decisions, sum(CASE compared WHEN 'same' THEN 0 ELSE 1 END) AS different,
       avg(given_workers) AS given_workers, avg(workers) AS workers, avg(given_ps) AS given_ps, avg(ps) AS ps
FROM shadow_decisions WHERE {recent}
GROUP BY job, job_id, name, user_name HAVING sum(CASE compared WHEN 'same' THEN 0 ELSE 1 END) > 0
ORDER BY different DESC, job LIMIT {limit:d}
"""


def shadow_comparison(
    place: StoreLocation, days: float, limit: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Decisions of the last days in mode shadow, compared with what the site's scheduler gave.

    First by policy and version: how many gave a job the same, more or less; in how many of the same it ``waited``
    either way, maybe since it could not start (it is held, or depends on another job); in how many a job would have
    ``started_earlier``, and of these in how many the scheduler gave it this size within ``SOON_SECONDS``
    (``started_soon``). Then at most ``limit`` jobs for which most of them differ, with mean sizes. Raises
    ``SchemaOutdated`` as ``ask`` does.
    """
    recent = _RECENT.format(days)
    answers = (
        ask(place, query.format(recent=recent, limit=limit, seconds=SOON_SECONDS))
        for query in (_COUNTS, _STARTED_SOON, _JOBS)
    )
    counts, started_soon, jobs = ([dict(zip(headings, row, strict=True)) for row in rows] for headings, rows in answers)
    soon = {(each["policy"], each["policy_version"]): each["started_soon"] for each in started_soon}
    return [{**each, "started_soon": soon.get((each["policy"], each["policy_version"]), 0)} for each in counts], jobs
