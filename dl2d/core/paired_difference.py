"""What several seeds say together: the difference and the relative change of paired values, with intervals."""

from __future__ import annotations

from collections.abc import Mapping

from dl2d.core.confidence_interval import Estimate, estimate


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """Mean of value - baseline over the seeds that both have; None where they share none.

    Both ran the very same workload for a seed, so what makes one seed's workload harder than another's cancels out:
    the interval is that of one sample of differences, as in Student's paired test.
    """
    shared = sorted(values.keys() & baseline.keys())
    return estimate([values[seed] - baseline[seed] for seed in shared]) if shared else None


def paired_change(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """Mean over shared seeds of (value - baseline) / baseline, a fraction; None where they share none.

    The mean of each seed's ratio, not the ratio of means: a seed with long jobs counts no more than another.
    Seeds whose baseline is not above 0 are left out.
    """
    shared = sorted(seed for seed in values.keys() & baseline.keys() if baseline[seed] > 0)
    return estimate([(values[seed] - baseline[seed]) / baseline[seed] for seed in shared]) if shared else None
