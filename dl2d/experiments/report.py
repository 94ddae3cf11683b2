"""Report of a run as ``report.md`` and ``report.html``: its warnings and tables; ``templates`` has the layouts."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from dl2d.core.confidence_interval import Estimate
from dl2d.experiments.figures import Picture, draw_plots
from dl2d.experiments.participant_training import Prepared, settings_line
from dl2d.experiments.run_experiment import DEFINITION, ENVIRONMENT, RESULTS, ExperimentError, Run
from dl2d.experiments.simulation_setup import is_ideal
from dl2d.experiments.tables_of_results import (
    CaseSummary,
    Curve,
    Finding,
    PolicySummary,
    choices,
    curves,
    findings,
    summarise,
)

MARKDOWN, HTML, PLOTS = "report.md", "report.html", "plots"
_TEMPLATES = Path(__file__).parent / "templates"
_NONE = "–"
_MAX_ERROR_LENGTH = 300
_MAX_NAMED = 5
_HEADINGS = (
    "policy", "avg JCT", "sd", "95 % CI", "against {baseline}", "change", "above bound", "avg JCT, whole slots",
    "makespan", "{resource} held", "resizes per job", "seeds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text; the first column is a name, the others are numbers."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A workload: what it is, and how the policies did."""

    title: str
    about: str
    table: Table


def write_report(run: Run) -> tuple[Path, Path]:
    """Write report and plots into the run's folder, over those that are there; returns the two reports.

    Raises ``ExperimentError`` where a file cannot be written.
    """
    cases = summarise(run)
    try:
        pictures = draw_plots(run, cases, run.folder / PLOTS)
        environment = Environment(
            loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
            autoescape=select_autoescape(["html"]), keep_trailing_newline=True,
        )  # fmt: skip
        environment.filters |= {"cell": _markdown_cell, "embedded": _embedded, "lines": _fenced}
        values = _values(run, cases, pictures)
        written = []
        for name, layout in ((MARKDOWN, "report_layout.md"), (HTML, "report_layout.html")):
            path = run.folder / name
            path.write_text(environment.get_template(layout).render(values), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise ExperimentError(f"{error.filename or run.folder}: {error.strerror or error}") from None
    return written[0], written[1]


def command_line(run: Run) -> str:
    """Command line that repeats the run."""
    again = run.folder.with_name(f"{run.folder.name or 'run'}-again")
    return shlex.join(["dl2d", "experiment", "run", str(run.folder / DEFINITION), "--out", str(again)])


def _values(run: Run, cases: Sequence[CaseSummary], pictures: Sequence[Picture]) -> Mapping[str, object]:
    experiment = run.experiment
    done = sum(not each.error for each in run.finished.values())
    warnings = []
    if run.missing:
        missing = f"{len(run.missing)} of {len(run.cells)} simulations"
        warnings.append(f"{missing} have no result; means are over those that have.")
    if run.codes > 1:
        warnings.append(
            f"The run was resumed with other code: its cells come from {run.codes} states of dl2d's code, and may "
            "differ for that reason alone."
        )
    if any(participant.training for participant in experiment.participants) and (
        experiment.trainings < len(experiment.seeds)
    ):
        warnings.append(
            f"Policies were trained {experiment.trainings} times, for {len(experiment.seeds)} seeds: intervals "
            "show the effect of workloads more than that of trainings."
        )
    if len(experiment.seeds) == 1:
        warnings.append("With one seed there are no intervals.")
    return {
        "title": f"Experiment {experiment.name}, version {experiment.version}",
        "description": experiment.description,
        "digest": run.digest,
        "counts": f"{len(experiment.cases)} workloads x {len(experiment.policies)} policies x {len(experiment.seeds)} "
        f"seeds = {len(run.cells)} simulations, {done} with a result",
        "warnings": warnings,
        "failures": [
            (each.case, each.policy, str(each.seed), " ".join(each.error.split())[:_MAX_ERROR_LENGTH])
            for each in run.failures
        ],
        "findings": _findings(findings(run, cases)),
        "learned": _learned(curves(run)),
        "tuned": _tuned(choices(run)),
        "sections": [_section(case, experiment.baseline) for case in cases],
        "pictures": [(picture, f"{PLOTS}/{picture.png.name}", f"{PLOTS}/{picture.svg.name}") for picture in pictures],
        "decisions": _decisions(cases),
        "command": command_line(run),
        "results": RESULTS,
        "definition": (run.folder / DEFINITION).read_text(encoding="utf-8"),
        "environment": (run.folder / ENVIRONMENT).read_text(encoding="utf-8"),
    }


def _section(case: CaseSummary, baseline: str) -> Section:
    made = case.case
    rules = f"rules of the preset {made.preset}" if made.preset else "no preset"
    if made.options:
        rules += " with " + ", ".join(f"{key}={value}" for key, value in made.options.items())
    where = ", ".join(made.sources[:_MAX_NAMED]) + (", ..." if len(made.sources) > _MAX_NAMED else "")
    bound = f"{_with_interval(case.bound)} slots on average"
    about = f"{where}; {rules}. {_number(case.jobs.mean)} jobs, slots of {case.slot_seconds:g} s. " + (
        f"Bound that no policy can beat: {bound}."
        if is_ideal(made)
        else f"Bound: {bound}, of the workload without options; random speeds and locality can beat it."
    )
    headings = tuple(each.format(baseline=baseline, resource=case.resource) for each in _HEADINGS)
    return Section(made.name, about, Table(headings, tuple(_row(each) for each in case.policies)))


def _row(each: PolicySummary) -> tuple[str, ...]:
    low_high = each.jct.interval
    return (
        each.policy,
        _number(each.jct.mean),
        _NONE if each.jct.deviation is None else _number(each.jct.deviation),
        _NONE if low_high is None else f"{_number(low_high[0])} to {_number(low_high[1])}",
        _NONE if each.difference is None else _with_interval(each.difference, sign=True),
        _change(each.change),
        _with_interval(each.above_bound, percent=True),
        _with_interval(each.jct_plain),
        _with_interval(each.makespan),
        _with_interval(each.utilisation, percent=True),
        _with_interval(each.resizes),
        str(each.jct.count),
    )


def _findings(found: Sequence[Finding]) -> Table:
    return Table(
        (
            "who, against whom",
            "workload",
            "published",
            "here",
            "here less published, points",
            "bound here",
            "source",
            "why",
        ),
        tuple(
            (
                f"{each.claim.policy} against {each.claim.against}",
                each.workload,
                each.claim.says
                + (f" ({each.claim.change:+g} %)" if each.claim.change is not None else " (no number in the text)"),
                _change(each.measured),
                _NONE if each.distance is None else _number(each.distance, 3, sign=True),
                _change(each.possible),
                each.claim.source + ("; not checked against its text" if each.claim.unchecked else ""),
                each.claim.why,
            )
            for each in found
        ),
    )


def _learned(drawn: Sequence[Curve]) -> Table:
    return Table(
        ("policy", "best in validation, against drf", "no slower than drf from", "steps", "trainings", "s each"),
        tuple(
            (
                each.participant,
                _change(each.best),
                _NONE if each.level is None else f"step {each.level}",
                f"{each.points[-1][0]} {each.unit}",
                str(each.best.count),
                f"{each.seconds:.0f}",
            )
            for each in drawn
        ),
    )


def _tuned(made: Sequence[Prepared]) -> Table:
    rows = []
    for each in made:
        times = sorted(tried.jct for tried in each.tries if tried.jct is not None)
        rows.append(
            (
                each.entrant, each.case, settings_line(each.chosen), _number(times[0]), _number(times[-1]),
                str(len(each.tries)),
            )
        )  # fmt: skip
    return Table(("policy", "workload", "chosen", "avg JCT with it", "with the worst", "tried"), tuple(rows))


def _decisions(cases: Sequence[CaseSummary]) -> Table:
    return Table(
        ("policy", "workload", "p50 ms", "p99 ms"),
        tuple(
            (each.policy, case.case.name, f"{each.p50_ms:.2f}", f"{each.p99_ms:.2f}")
            for case in cases
            for each in case.policies
        ),
    )


def _with_interval(value: Estimate, *, percent: bool = False, sign: bool = False) -> str:
    """``12.3 ± 0.4``: the mean and half of the confidence interval."""
    factor = 100 if percent else 1
    text = _number(value.mean * factor, 3 if percent else 4, sign=sign)
    if value.half_width is not None:
        text += f" ± {_number(value.half_width * factor, 2)}"
    return f"{text} %" if percent else text


def _change(value: Estimate | None) -> str:
    return _NONE if value is None else _with_interval(value, percent=True, sign=True)


def _number(value: float, digits: int = 4, *, sign: bool = False) -> str:
    """To some significant digits, but no more than three behind the point."""
    plus = "+" if sign else ""
    if value == int(value):
        return f"{value:{'+' if sign and value else ''}.0f}"
    before = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:{plus}.{min(3, max(0, digits - before))}f}"


def _markdown_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _fenced(text: str) -> str:
    return text.rstrip("\n").replace("```", "` ` `")


def _embedded(picture: Picture) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.png.read_bytes()).decode("ascii")


def summary_json(run: Run) -> dict[str, object]:
    """The tables as one object, for ``--json``."""
    cases = summarise(run)
    return {
        "experiment": run.experiment.name,
        "version": run.experiment.version,
        "digest": run.digest,
        "folder": str(run.folder),
        "cells": len(run.cells),
        "failed": [
            {"workload": each.case, "policy": each.policy, "seed": each.seed, "error": each.error}
            for each in run.failures
        ],
        "claims": [
            {
                "policy": each.claim.policy,
                "against": each.claim.against,
                "workload": each.workload,
                "published_percent": each.claim.change,
                "measured": _plain(each.measured),
                "distance_points": each.distance,
                "bound": _plain(each.possible),
                "source": each.claim.source,
                "why": each.claim.why,
            }
            for each in findings(run, cases)
        ],
        "tuned": [
            {"policy": each.entrant, "workload": each.case, "chosen": dict(each.chosen)} for each in choices(run)
        ],
        "workloads": {
            case.case.name: {
                "bound_slots": _plain(case.bound),
                "resource": case.resource,
                "policies": {each.policy: _plain_policy(each) for each in case.policies},
            }
            for case in cases
        },
    }


def _plain_policy(each: PolicySummary) -> dict[str, object]:
    estimates = {
        "avg_jct_slots": each.jct,
        "avg_jct_slots_plain": each.jct_plain,
        "makespan_slots": each.makespan,
        "above_bound": each.above_bound,
        "utilisation": each.utilisation,
        "resizes_per_job": each.resizes,
        "difference_slots": each.difference,
        "change": each.change,
    }
    return {name: _plain(estimate) for name, estimate in estimates.items()}


def _plain(value: Estimate | None) -> dict[str, float | None] | None:
    if value is None:
        return None
    low, high = value.interval or (None, None)
    return {"seeds": value.count, "mean": value.mean, "deviation": value.deviation, "low": low, "high": high}
