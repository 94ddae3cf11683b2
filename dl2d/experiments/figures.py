"""Figures of a run: completion times, their distribution, utilisation and allocations over time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from dl2d.core.array_types import Floats
from dl2d.experiments.participant_training import REFERENCE
from dl2d.experiments.run_experiment import Run
from dl2d.experiments.tables_of_results import (
    CaseSummary,
    Curve,
    PolicySummary,
    Timelines,
    by_unit,
    curves,
    read_timelines,
)

#: Colours that people with any colour vision tell apart: Okabe and Ito, "Color Universal Design" (2008), without its
#: yellow, which is lost on white. A policy has the same in every report.
_COLOURS: Mapping[str, str] = {
    "drf": "#0072b2", "fifo": "#e69f00", "srtf": "#009e73", "tetris": "#cc79a7", "optimus": "#d55e00",
    "lookahead": "#56b4e9", "dl2": "#000000",
}  # fmt: skip
#: For other policies, in the order of the experiment: from Paul Tol's muted scheme.
_OTHERS = ("#882255", "#999933", "#332288", "#44aa99", "#aa4499", "#117733")
#: Told the truth instead of measuring it: the colour is that of the policy, dashes and hatching tell them apart.
_TOLD = "-true"
_INK, _FAINT, _PALE = "#1d2430", "#5d6675", "#e4e8ee"
_WIDTH, _DPI = 8.0, 150
#: Labels of five ticks from none to all.
_PERCENT = ("0", "25 %", "50 %", "75 %", "100 %")


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as PNG and SVG, with its caption."""

    title: str
    caption: str
    png: Path
    svg: Path


@dataclass(frozen=True, slots=True)
class _Look:
    colour: str
    told: bool
    #: How often the colours had been used up before.
    turn: int = 0

    @property
    def dashes(self) -> Any:
        return (0, (3, 1.5)) if self.told else ("-", "--", ":", "-.")[self.turn % 4]


def draw_plots(run: Run, cases: Sequence[CaseSummary], folder: Path) -> tuple[Picture, ...]:
    """Draw all plots of a run into a folder, as PNG and SVG. Raises OSError."""
    looks = _looks(run.experiment.policies)
    seeds = len(run.experiment.seeds)
    over = f"mean over {seeds} seeds" if seeds > 1 else f"seed {run.experiment.seeds[0]}"
    times = [read_timelines(run, case) for case in cases]
    drawn: list[tuple[str, str, str, Figure]] = []
    if cases:
        drawn += [
            (
                "jct", "Average completion time",
                f"Bars: {over}. Whiskers: 95 % confidence interval of the mean. Dashed: bound.",
                _bars(cases, looks),
            ),
            (
                "cdf", "Completion times of jobs",
                "Fraction of jobs that took at most so many slots, jobs of all seeds together.",
                _cdf(cases, looks),
            ),
        ]  # fmt: skip
    groups = by_unit([curve for curve in curves(run) if len(curve.points) > 1])
    if groups:
        caption = (
            "Average completion time of validation workloads against that of DRF on the same: mean over trainings. "
            "Shaded: 95 % confidence interval. Dotted: what was published of the policy of the same colour."
        )
        drawn.append(("learning", "Learning", caption, _learning(groups, looks, run)))
    if any(each.policies for each in times):
        caption = f"Share of the cluster's most used resource, {over}{_grouped(times)}."
        drawn.append(("utilisation", "Utilisation over time", caption, _utilisation(cases, times, looks)))
    for case, timelines in zip(cases, times, strict=True):
        name = case.case.name
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
        slug = f"{run.experiment.cases.index(case.case) + 1}-{slug}"
        if timelines.policies:
            caption = f"Workers and parameter servers of all jobs together, {over}{_grouped([timelines])}."
            figure = _allocation(case, timelines, looks)
            drawn.append((f"allocation-{slug}", f"Allocation over time: {name}", caption, figure))
    folder.mkdir(exist_ok=True)
    return tuple(_save(folder, *each) for each in drawn)


def _looks(policies: Sequence[str]) -> dict[str, _Look]:
    looks: dict[str, _Look] = {}
    families: dict[str, tuple[str, int]] = {}
    for policy in policies:
        family = policy.removesuffix(_TOLD)
        if family not in families:
            turn, place = divmod(sum(each not in _COLOURS for each in families), len(_OTHERS))
            families[family] = (_COLOURS[family], 0) if family in _COLOURS else (_OTHERS[place], turn)
        colour, turn = families[family]
        looks[policy] = _Look(colour, policy.endswith(_TOLD), turn)
    return looks


def _save(folder: Path, name: str, title: str, caption: str, figure: Figure) -> Picture:
    picture = Picture(title, caption, folder / f"{name}.png", folder / f"{name}.svg")
    # No date, no program version, no random ids inside: equal runs give equal files.
    figure.savefig(picture.png, dpi=_DPI, metadata={"Software": None})
    figure.set_layout_engine("none")  # as it was laid out for the first one: that takes a quarter of the time
    with mpl.rc_context({"svg.hashsalt": "dl2d"}):
        figure.savefig(picture.svg, metadata={"Date": None, "Creator": None})
    return picture


def _bars(cases: Sequence[CaseSummary], looks: Mapping[str, _Look]) -> Figure:
    most = max(len(case.policies) for case in cases)
    figure, grid = _figure(len(cases), 0.30 * most + 1.0, columns=2)
    for axis, case in zip(grid, cases, strict=True):
        names = [each.policy for each in case.policies]
        places = np.arange(len(names))[::-1]
        highest = max(case.bound.mean, *(each.jct.mean for each in case.policies))
        ends = [each.jct.interval[1] for each in case.policies if each.jct.interval is not None]
        right = 1.03 * min(1.8 * highest, max([highest, *ends]))
        for place, each in zip(places, case.policies, strict=True):
            look = looks[each.policy]
            axis.barh(place, each.jct.mean, height=0.68, color=look.colour, alpha=0.55 if look.told else 1.0,
                      hatch="///" if look.told else None, edgecolor="white", linewidth=0, xerr=each.jct.half_width,
                      ecolor=_INK, capsize=3.0)  # fmt: skip
            value = _number(each.jct.mean)
            if each.jct.half_width is not None:
                value = f"{value} \N{PLUS-MINUS SIGN} {_number(each.jct.half_width, 2)}"
            # Beside the axes, where no whisker runs through it.
            axis.text(1.015, place, value, transform=axis.get_yaxis_transform(), va="center", fontsize=8.5, color=_INK)
        axis.axvline(case.bound.mean, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0.5)
        axis.text(case.bound.mean, len(names) - 0.42, "bound", fontsize=7.5, color=_FAINT, ha="center", va="bottom")
        axis.set_yticks(places, names)
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.set_xlim(0, right)
        _dress(axis, case.case.name, _in_slots("average completion time", case), grid_of="x", pad=14)
    return figure


def _learning(groups: Mapping[str, Sequence[Curve]], looks: Mapping[str, _Look], run: Run) -> Figure:
    shown = {curve.participant: looks[curve.participant] for group in groups.values() for curve in group}
    figure, grid = _figure(len(groups), 3.2, legend=_curve_legend(shown))
    for axis, (unit, group) in zip(grid, groups.items(), strict=True):
        low, high = 0.0, 0.0
        for curve in group:
            look = looks[curve.participant]
            steps = [step for step, _ in curve.points]
            means = np.array([value.mean for _, value in curve.points]) * 100
            axis.plot(steps, means, color=look.colour, linestyle=look.dashes, linewidth=1.8, marker=".")
            if all(value.half_width is not None for _, value in curve.points):
                halves = np.array([value.half_width or 0.0 for _, value in curve.points]) * 100
                axis.fill_between(steps, means - halves, means + halves, color=look.colour, alpha=0.15, linewidth=0)
            low, high = min(low, float(means.min())), max(high, float(means.max()))
        axis.axhline(0, color=_INK, linewidth=1.0)
        for claim in run.experiment.claims:
            if claim.change is not None and claim.against == REFERENCE and claim.policy in shown:
                axis.axhline(claim.change, color=looks[claim.policy].colour, linewidth=1.0, linestyle=":")
                low = min(low, claim.change)
        # A policy that has learned nothing yet may be some times as slow: what matters lies below.
        axis.set_ylim(low - 5, min(high, 60.0) + 5)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        _dress(axis, "" if len(groups) == 1 else unit, unit, grid_of="y", y="against DRF, %")
    return figure


def _cdf(cases: Sequence[CaseSummary], looks: Mapping[str, _Look]) -> Figure:
    figure, grid = _figure(len(cases), 2.9, columns=2, legend=_curve_legend(looks))
    for axis, case in zip(grid, cases, strict=True):
        times = {each.policy: _all_times(each) for each in case.policies}
        together = np.concatenate(list(times.values()))
        for width, (policy, values) in zip(_widths(times), times.items(), strict=True):
            look = looks[policy]
            axis.ecdf(values, color=look.colour, linestyle=look.dashes, linewidth=width)
        if together.max() > 20 * np.median(together):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_locator(NullLocator())
        else:
            axis.set_xlim(0, None)
        axis.set_ylim(0, 1.02)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1], _PERCENT)
        _dress(axis, case.case.name, _in_slots("completion time", case), grid_of="both", y="jobs")
    return figure


def _utilisation(cases: Sequence[CaseSummary], times: Sequence[Timelines], looks: Mapping[str, _Look]) -> Figure:
    figure, grid = _figure(len(cases), 2.2, legend=_curve_legend(looks))
    for axis, case, timelines in zip(grid, cases, times, strict=True):
        for line, (policy, timeline) in zip(_widths(timelines.policies), timelines.policies.items(), strict=True):
            values = timeline.utilisation
            held = np.flatnonzero(values)
            some = held[-1] + 1 if held.size else 0  # to the end of its last job
            axis.stairs(
                values[:some] * 100, timelines.edges[: some + 1],
                color=looks[policy].colour, linestyle=looks[policy].dashes, linewidth=line,
            )  # fmt: skip
        axis.set_ylim(0, 104)
        axis.set_xlim(0, timelines.edges[-1])
        axis.set_yticks([0, 25, 50, 75, 100], _PERCENT)
        _dress(axis, case.case.name, _in_slots("time", case), grid_of="y", y=f"{case.resource} held")
    return figure


def _widths(curves: Sized) -> list[float]:
    """Widths of curves in the order in which they are drawn: one that others run over still shows beside them."""
    return [float(width) for width in np.linspace(2.6 if len(curves) > 1 else 1.6, 1.2, len(curves))]


def _allocation(case: CaseSummary, timelines: Timelines, looks: Mapping[str, _Look]) -> Figure:
    legend = [Patch(facecolor=_FAINT, label="workers"), Patch(facecolor=_FAINT, alpha=0.4, label="parameter servers")]
    figure, grid = _figure(len(timelines.policies), 1.15, legend=legend, shared=True)
    for axis, (policy, timeline) in zip(grid, timelines.policies.items(), strict=True):
        edges, workers, both = timelines.edges, timeline.workers, timeline.workers + timeline.ps
        colour = looks[policy].colour
        axis.stairs(workers, edges, fill=True, color=colour, linewidth=0)
        axis.stairs(both, edges, baseline=workers, fill=True, color=colour, alpha=0.4, linewidth=0)
        _dress(axis, policy, _in_slots("time", case) if axis is grid[-1] else "", grid_of="y", y="tasks")
    most = max((float((each.workers + each.ps).max()) for each in timelines.policies.values()), default=1.0)
    for axis in grid:
        axis.set_ylim(0, max(1.0, most) * 1.06)
        axis.set_xlim(0, float(timelines.edges[-1]))
    return figure


def _all_times(each: PolicySummary) -> Floats:
    return np.array([time for result in each.results.values() for time in result.jobs.values()])


def _grouped(times: Sequence[Timelines]) -> str:
    widths = sorted({each.width for each in times})
    if widths[-1] == 1:
        return ""
    return f", each point the mean of {'up to ' if len(widths) > 1 else ''}{widths[-1]} slots"


def _figure(
    panels: int, row_height: float, *, columns: int = 1, legend: Sequence[Any] = (), shared: bool = False
) -> tuple[Figure, list[Any]]:
    """A figure of 8 inches, so that its letters are readable at 800 pixels; the legend lies above all axes.

    Returns it with the axes of its panels, at most ``columns`` side by side.
    """
    columns = min(columns, panels)
    rows = math.ceil(panels / columns)
    lines = math.ceil(len(legend) / 6) if legend else 0
    height = rows * row_height + 0.26 * lines + 0.25
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared)
    if legend:
        figure.legend(
            handles=list(legend),
            loc="outside upper left",
            ncols=math.ceil(len(legend) / lines),
            frameon=False,
            fontsize=9,
            labelcolor=_INK,
        )
    axes = list(grid.flat)
    for unused in axes[panels:]:
        unused.set_visible(False)
    return figure, axes[:panels]


def _curve_legend(looks: Mapping[str, _Look]) -> list[Line2D]:
    return [
        Line2D([], [], color=look.colour, linestyle=look.dashes, linewidth=2.2, label=policy)
        for policy, look in looks.items()
    ]


def _in_slots(what: str, case: CaseSummary) -> str:
    seconds = case.slot_seconds
    length = f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
    return f"{what} (slots of {length})"


def _number(value: float, digits: int = 3) -> str:
    """To some significant digits, zeros at the end included."""
    return f"{value:#.{digits}g}".rstrip(".") if abs(value) < 10**digits else f"{value:.0f}"


def _dress(axis: Any, title: str, x: str, *, grid_of: str, y: str = "", pad: float | None = None) -> None:
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK, pad=pad)
    axis.set_xlabel(x, fontsize=9, color=_FAINT)
    axis.set_ylabel(y, fontsize=9, color=_FAINT)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#b8bfca")
    axis.tick_params(axis="both", length=0, labelsize=9, labelcolor=_INK)
    axis.grid(axis=grid_of, color=_PALE, linewidth=0.8)
    axis.set_axisbelow(True)
