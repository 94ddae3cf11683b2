"""What a run says of what others published, of what was trained on the way, and of what was tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dl2d.experiments.claims import Claim
from dl2d.experiments.playing import is_ideal
from dl2d.experiments.preparation import Preparation, Prepared
from dl2d.experiments.results import CaseSummary
from dl2d.experiments.run import Run
from dl2d.simulation.statistics import Estimate, estimate, paired_change


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A claim, and what was measured on one workload: a fraction, mean over seeds; None where results are missing."""

    claim: Claim
    workload: str
    measured: Estimate | None
    #: The most that any policy could have: the bound against the same policy; None where it is none.
    possible: Estimate | None

    @property
    def distance(self) -> float | None:
        """Percentage points from what is claimed to what was measured; below 0: faster than claimed."""
        if self.measured is None or self.claim.change is None:
            return None
        return 100 * self.measured.mean - self.claim.change


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How an entrant learned: times on validation workloads against those of DRF, over its trainings."""

    entrant: str
    unit: str
    #: By step, the change as a fraction: -0.4 is 40 % faster than DRF.
    points: tuple[tuple[int, Estimate], ...]
    #: Best of each training.
    best: Estimate
    #: First step at which the mean is no slower than DRF; None: never.
    level: int | None
    #: Mean seconds of one training.
    seconds: float


def findings(run: Run, cases: Sequence[CaseSummary]) -> tuple[Finding, ...]:
    """Every claim, for each workload that it is of."""
    made = []
    for claim in run.experiment.claims:
        for case in cases:
            if claim.workload in ("", case.case.name):
                times = {
                    each.policy: {seed: result.avg_jct for seed, result in each.results.items()}
                    for each in case.policies
                }
                against = times.get(claim.against, {})
                bounds = {seed: result.bound for each in case.policies for seed, result in each.results.items()}
                made.append(
                    Finding(
                        claim=claim,
                        workload=case.case.name,
                        measured=paired_change(times.get(claim.policy, {}), against),
                        possible=paired_change(bounds, against) if is_ideal(case.case) else None,
                    )
                )
    return tuple(made)


def curves(run: Run) -> tuple[Curve, ...]:
    """Of all that was trained, in the definition's order; entrants of which nothing was made are left out."""
    made: dict[str, list[tuple[Preparation, Prepared]]] = {}
    for wanted, prepared in run.preparations:
        if prepared is not None and wanted.entrant.training is not None and prepared.curve:
            made.setdefault(wanted.entrant.name, []).append((wanted, prepared))
    return tuple(_curve(run, name, made[name]) for name in run.experiment.policies if name in made)


def _curve(run: Run, name: str, made: Sequence[tuple[Preparation, Prepared]]) -> Curve:
    by_step: dict[int, list[float]] = {}
    for _, prepared in made:
        for look in prepared.curve:
            by_step.setdefault(look.step, []).append(look.jct / prepared.reference - 1)
    points = tuple((step, estimate(values)) for step, values in sorted(by_step.items()))
    return Curve(
        entrant=name,
        unit=made[0][1].unit,
        points=points,
        best=estimate([min(look.jct for look in prepared.curve) / prepared.reference - 1 for _, prepared in made]),
        level=next((step for step, value in points if value.mean <= 0), None),
        seconds=sum(run.seconds(wanted) for wanted, _ in made) / len(made),
    )


def choices(run: Run) -> tuple[Prepared, ...]:
    """All that was tuned."""
    return tuple(made for wanted, made in run.preparations if made is not None and wanted.entrant.tune)


def by_unit(curves_: Sequence[Curve]) -> Mapping[str, list[Curve]]:
    """Curves that can share an axis: by what their steps are."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves_:
        groups.setdefault(curve.unit, []).append(curve)
    return groups
