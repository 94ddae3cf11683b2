"""Pictures of a run: completion times, their distribution, utilisation and allocations over time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator
from numpy.typing import NDArray

from dl2d.simulation.books import SlotSeries
from dl2d.simulation.experiments.runs import Run
from dl2d.simulation.experiments.summary import CaseSummary, PolicySummary

_Floats = NDArray[np.float64]

#: Colours that people with any colour vision tell apart: Okabe and Ito, "Color Universal Design" (2008), without its
#: yellow, which is lost on white. A policy has the same in every report.
_COLOURS: Final[Mapping[str, str]] = {
    "drf": "#0072b2", "fifo": "#e69f00", "srtf": "#009e73", "tetris": "#cc79a7", "optimus": "#d55e00",
    "lookahead": "#56b4e9", "dl2": "#000000",
}  # fmt: skip
#: For other policies, in the order of the experiment: from Paul Tol's muted scheme.
_OTHERS: Final = ("#882255", "#999933", "#332288", "#44aa99", "#aa4499", "#117733")
_JOBS: Final = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999933", "#332288", "#88ccee", "#882255",
    "#44aa99",
)  # fmt: skip
#: Told the truth instead of measuring it: the colour is that of the policy, dashes and hatching tell them apart.
_TOLD: Final = "-true"
_INK, _FAINT, _PALE = "#1d2430", "#5d6675", "#e4e8ee"
_WIDTH, _DPI = 8.0, 150
#: Most points of a curve over time; more slots are averaged in groups.
_MOST_POINTS = 120


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in two files, and what it shows."""

    title: str
    caption: str
    png: Path
    svg: Path


@dataclass(frozen=True, slots=True)
class _Look:
    colour: str
    told: bool

    @property
    def dashes(self) -> Any:
        return (0, (3, 1.5)) if self.told else "-"


def draw_plots(run: Run, cases: Sequence[CaseSummary], folder: Path) -> tuple[Picture, ...]:
    """Draw all plots of a run into a folder, as PNG and SVG. Raises OSError."""
    looks = _looks(run.experiment.policies)
    seeds = len(run.experiment.seeds)
    over = f"mean over {seeds} seeds" if seeds > 1 else f"seed {run.experiment.seeds[0]}"
    drawn: list[tuple[str, str, str, Figure]] = []
    if cases:
        drawn += [
            (
                "jct", "Average completion time",
                f"Bars: {over}. Whiskers: 95 % confidence interval of the mean. Dashed: bound that no policy can beat.",
                _bars(cases, looks),
            ),
            (
                "cdf", "Completion times of jobs",
                "Fraction of jobs that took at most so many slots, jobs of all seeds together.",
                _cdf(cases, looks),
            ),
        ]  # fmt: skip
        figure, grouped = _utilisation(run, cases, looks)
        drawn.append(
            (
                "utilisation",
                "Utilisation over time",
                f"Share of the cluster's most used resource, {over}{grouped}.",
                figure,
            )
        )
    for case in cases:
        slug = re.sub(r"[^a-z0-9]+", "-", case.case.name.lower()).strip("-")[:40]
        slug = f"{run.experiment.cases.index(case.case) + 1}-{slug}"
        figure, grouped = _allocation(run, case, looks)
        caption = f"Workers and parameter servers of all jobs together, {over}{grouped}."
        drawn.append((f"allocation-{slug}", f"Allocation over time: {case.case.name}", caption, figure))
        by_job = _by_job(run, case)
        if by_job is not None:
            figure, grouped = by_job
            caption = f"Workers and parameter servers, one colour a job, seed {run.experiment.seeds[0]}{grouped}."
            drawn.append((f"jobs-{slug}", f"Allocation by job: {case.case.name}", caption, figure))
    folder.mkdir(exist_ok=True)
    return tuple(_save(folder, *each) for each in drawn)


def _looks(policies: Sequence[str]) -> dict[str, _Look]:
    looks: dict[str, _Look] = {}
    families: dict[str, str] = {}
    for policy in policies:
        family = policy.removesuffix(_TOLD)
        if family not in families:
            unknown = sum(each not in _COLOURS for each in families)
            families[family] = _COLOURS.get(family) or _OTHERS[unknown % len(_OTHERS)]
        looks[policy] = _Look(families[family], policy.endswith(_TOLD))
    return looks


def _save(folder: Path, name: str, title: str, caption: str, figure: Figure) -> Picture:
    picture = Picture(title, caption, folder / f"{name}.png", folder / f"{name}.svg")
    # No date, no program version, no random ids inside: equal runs give equal files.
    figure.savefig(picture.png, dpi=_DPI, metadata={"Software": None})
    with mpl.rc_context({"svg.hashsalt": "dl2d"}):
        figure.savefig(picture.svg, metadata={"Date": None, "Creator": None})
    return picture


def _bars(cases: Sequence[CaseSummary], looks: Mapping[str, _Look]) -> Figure:
    columns = min(2, len(cases))
    rows = math.ceil(len(cases) / columns)
    most = max(len(case.policies) for case in cases)
    figure, grid = _figure(rows, columns, 0.30 * most + 1.0)
    for axis, case in zip(grid, cases, strict=False):
        names = [each.policy for each in case.policies]
        places = np.arange(len(names))[::-1]
        highest = max(case.bound.mean, *(each.jct.mean for each in case.policies))
        ends = [each.jct.interval[1] for each in case.policies if each.jct.interval is not None]
        right = 1.03 * min(1.8 * highest, max([highest, *ends]))
        for place, each in zip(places, case.policies, strict=True):
            look = looks[each.policy]
            axis.barh(place, each.jct.mean, height=0.68, color=look.colour, alpha=0.55 if look.told else 1.0,
                      hatch="///" if look.told else None, edgecolor="white", linewidth=0)  # fmt: skip
            value = _number(each.jct.mean)
            if each.jct.interval is not None and each.jct.half_width is not None:
                low, high = each.jct.interval
                axis.plot([max(0.0, low), high], [place, place], color=_INK, linewidth=1.1)
                for at in (low, high):
                    axis.plot([at, at], [place - 0.14, place + 0.14], color=_INK, linewidth=1.1)
                value = f"{value} \N{PLUS-MINUS SIGN} {_number(each.jct.half_width, 2)}"
            # Beside the axes, where no whisker runs through it.
            axis.text(1.015, place, value, transform=axis.get_yaxis_transform(), va="center", fontsize=8.5, color=_INK)
        axis.axvline(case.bound.mean, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0.5)
        axis.text(case.bound.mean, len(names) - 0.42, "bound", fontsize=7.5, color=_FAINT, ha="center", va="bottom")
        axis.set_yticks(places, names)
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.set_xlim(0, right)
        _dress(axis, case.case.name, _in_slots("average completion time", case), grid_of="x")
        axis.set_title(case.case.name, loc="left", fontsize=10.5, fontweight="bold", color=_INK, pad=14)
    _hide_rest(grid, len(cases))
    return figure


def _cdf(cases: Sequence[CaseSummary], looks: Mapping[str, _Look]) -> Figure:
    columns = min(2, len(cases))
    rows = math.ceil(len(cases) / columns)
    figure, grid = _figure(rows, columns, 2.9, legend=_curve_legend(looks))
    for axis, case in zip(grid, cases, strict=False):
        times = {each.policy: _all_times(each) for each in case.policies}
        together = np.concatenate(list(times.values()))
        for width, (policy, values) in zip(_widths(times), times.items(), strict=True):
            look = looks[policy]
            heights = np.arange(1, len(values) + 1) / len(values)
            axis.plot(
                np.concatenate(([values[0]], values)), np.concatenate(([0.0], heights)), drawstyle="steps-post",
                color=look.colour, linestyle=look.dashes, linewidth=width,
            )  # fmt: skip
        if together.max() > 20 * np.median(together):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_locator(NullLocator())
        else:
            axis.set_xlim(0, None)
        axis.set_ylim(0, 1.02)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        _dress(axis, case.case.name, _in_slots("completion time", case), grid_of="both", y="jobs")
    _hide_rest(grid, len(cases))
    return figure


def _utilisation(run: Run, cases: Sequence[CaseSummary], looks: Mapping[str, _Look]) -> tuple[Figure, str]:
    figure, grid = _figure(len(cases), 1, 2.2, legend=_curve_legend(looks))
    widths: set[int] = set()
    for axis, case in zip(grid, cases, strict=True):
        last = _last_slot(run, case)
        width = _group(last)
        widths.add(width)
        for line, each in zip(_widths(case.policies), case.policies, strict=True):
            edges, values = _over_time(run, case, each.policy, last, _share_of(case.resource))
            look = looks[each.policy]
            held = np.flatnonzero(values)
            some = held[-1] + 1 if held.size else 0  # to the end of its last job
            axis.plot(edges[: some + 1], np.append(values[:some], 0) * 100, drawstyle="steps-post", color=look.colour,
                      linestyle=look.dashes, linewidth=line)  # fmt: skip
        axis.set_ylim(0, 104)
        axis.set_xlim(0, last + 1)
        axis.set_yticks([0, 25, 50, 75, 100], ["0", "25 %", "50 %", "75 %", "100 %"])
        _dress(axis, case.case.name, _in_slots("time", case), grid_of="y", y=f"{case.resource} held")
    return figure, _grouped(widths)


def _widths(curves: Sized) -> list[float]:
    """Widths of curves in the order in which they are drawn: one that others run over still shows beside them."""
    return [float(width) for width in np.linspace(2.6 if len(curves) > 1 else 1.6, 1.2, len(curves))]


def _share_of(resource: str) -> Callable[[SlotSeries], Sequence[float]]:
    return lambda series: series.utilisation.get(resource, ())


def _allocation(run: Run, case: CaseSummary, looks: Mapping[str, _Look]) -> tuple[Figure, str]:
    legend = [Patch(facecolor=_FAINT, label="workers"), Patch(facecolor=_FAINT, alpha=0.4, label="parameter servers")]
    figure, grid = _figure(len(case.policies), 1, 1.15, legend=legend, shared=True)
    last = _last_slot(run, case)
    highest = 1.0
    for axis, each in zip(grid, case.policies, strict=True):
        edges, workers = _over_time(run, case, each.policy, last, lambda series: series.workers)
        _, servers = _over_time(run, case, each.policy, last, lambda series: series.ps)
        colour = looks[each.policy].colour
        axis.fill_between(edges, np.append(workers, workers[-1:]), step="post", color=colour, linewidth=0)
        axis.fill_between(edges, np.append(workers, workers[-1:]), np.append(workers + servers, 0), step="post",
                          color=colour, alpha=0.4, linewidth=0)  # fmt: skip
        highest = max(highest, float((workers + servers).max(initial=0)))
        _dress(
            axis,
            each.policy,
            _in_slots("time", case) if axis is grid[len(case.policies) - 1] else "",
            grid_of="y",
            y="tasks",
        )
    for axis in grid[: len(case.policies)]:
        axis.set_ylim(0, highest * 1.06)
        axis.set_xlim(0, last + 1)
    return figure, _grouped({_group(last)})


def _by_job(run: Run, case: CaseSummary) -> tuple[Figure, str] | None:
    """Stacked by job, in order of coming; None where no cell kept what its jobs held."""
    held: dict[str, SlotSeries] = {}
    for done in run.finished.values():
        if done.case == case.case.name and done.series is not None and done.series.allocations:
            held[done.policy] = done.series
    policies = [each.policy for each in case.policies if each.policy in held]
    if not policies:
        return None
    figure, grid = _figure(len(policies), 1, 1.3, shared=True)
    last = max(held[policy].slots[-1] for policy in policies)
    order = {job: place for place, job in enumerate(_jobs_in_order(held.values()))}
    highest = 1.0
    for axis, policy in zip(grid, policies, strict=True):
        series = held[policy]
        layers = np.zeros((len(order), last + 1))
        for slot, jobs in zip(series.slots, series.allocations, strict=True):
            for job, has in jobs.items():
                layers[order[job], slot] = has.workers + has.ps
        edges, values = _grouped_means(layers)
        below = np.zeros(values.shape[1])
        for place, layer in enumerate(values):
            above = below + layer
            held_in = np.flatnonzero(layer)
            if held_in.size:
                part = slice(held_in[0], held_in[-1] + 1)  # the rest would make a large file and show nothing
                axis.fill_between(
                    edges[held_in[0] : held_in[-1] + 2], np.append(below[part], below[part][-1:]),
                    np.append(above[part], above[part][-1:]), step="post", color=_JOBS[place % len(_JOBS)], linewidth=0,
                )  # fmt: skip
            below = above
        highest = max(highest, float(below.max(initial=0)))
        _dress(axis, policy, _in_slots("time", case) if axis is grid[len(policies) - 1] else "", grid_of="y", y="tasks")
    for axis in grid[: len(policies)]:
        axis.set_ylim(0, highest * 1.06)
        axis.set_xlim(0, last + 1)
    return figure, _grouped({_group(last)})


def _jobs_in_order(all_series: Any) -> list[str]:
    """Jobs by the slot in which any policy first gave them something."""
    first: dict[str, tuple[int, int, str]] = {}
    for series in all_series:
        for slot, jobs in zip(series.slots, series.allocations, strict=True):
            for job in jobs:
                key = (slot, len(job), job)
                first[job] = min(first.get(job, key), key)
    return sorted(first, key=lambda job: first[job])


def _all_times(each: PolicySummary) -> _Floats:
    return np.sort(np.array([time for result in each.results.values() for time in result.jobs.values()]))


def _last_slot(run: Run, case: CaseSummary) -> int:
    found = (done.series.slots[-1] for done in run.finished.values()
             if done.case == case.case.name and done.series is not None and done.series.slots)  # fmt: skip
    return max(found, default=0)


def _over_time(
    run: Run, case: CaseSummary, policy: str, last: int, values: Callable[[SlotSeries], Sequence[float]]
) -> tuple[_Floats, _Floats]:
    """Edges of groups of slots and the mean in each, over seeds; slots without a job count as 0."""
    every = []
    for done in run.finished.values():
        if (done.case, done.policy) == (case.case.name, policy) and done.series is not None:
            full = np.zeros(last + 1)
            given = values(done.series)
            if len(given):
                full[list(done.series.slots)] = given
            every.append(full)
    mean = np.mean(every, axis=0) if every else np.zeros(last + 1)
    edges, grouped = _grouped_means(mean[np.newaxis])
    return edges, grouped[0]


def _group(last: int) -> int:
    """How many slots are averaged into one point."""
    return math.ceil((last + 1) / _MOST_POINTS)


def _grouped_means(values: _Floats) -> tuple[_Floats, _Floats]:
    """Edges, one more than groups, and means of groups of slots, row by row."""
    slots = values.shape[1]
    width = _group(slots - 1)
    starts = np.arange(0, slots, width)
    sizes = np.diff(np.append(starts, slots))
    means = np.add.reduceat(values, starts, axis=1) / sizes
    return np.append(starts, slots).astype(np.float64), means


def _grouped(widths: set[int]) -> str:
    few = sorted(widths)
    if few == [1]:
        return ""
    return (
        f", each point the mean of {few[0]} slots"
        if len(few) == 1
        else f", each point the mean of up to {few[-1]} slots"
    )


def _figure(
    rows: int, columns: int, row_height: float, *, legend: Sequence[Any] = (), shared: bool = False
) -> tuple[Figure, list[Any]]:
    """A figure of 8 inches, so that its letters are readable at 800 pixels; the legend lies above all axes."""
    lines = math.ceil(len(legend) / 6) if legend else 0
    height = rows * row_height + 0.26 * lines + 0.25
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared)
    if legend:
        figure.legend(
            handles=list(legend), loc="outside upper left", ncols=6, frameon=False, fontsize=9, labelcolor=_INK
        )
    return figure, list(grid.flat)


def _curve_legend(looks: Mapping[str, _Look]) -> list[Line2D]:
    return [
        Line2D([], [], color=look.colour, linestyle=look.dashes, linewidth=2.2, label=policy)
        for policy, look in looks.items()
    ]


def _hide_rest(grid: Sequence[Any], used: int) -> None:
    for axis in grid[used:]:
        axis.set_visible(False)


def _in_slots(what: str, case: CaseSummary) -> str:
    seconds = case.slot_seconds
    length = f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
    return f"{what} (slots of {length})"


def _number(value: float, digits: int = 3) -> str:
    """To some significant digits, zeros at the end included."""
    return f"{value:#.{digits}g}".rstrip(".") if abs(value) < 10**digits else f"{value:.0f}"


def _dress(axis: Any, title: str, x: str, *, grid_of: str, y: str = "") -> None:
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK)
    axis.set_xlabel(x, fontsize=9, color=_FAINT)
    axis.set_ylabel(y, fontsize=9, color=_FAINT)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#b8bfca")
    axis.tick_params(axis="both", length=0, labelsize=9, labelcolor=_INK)
    axis.grid(axis=grid_of, color=_PALE, linewidth=0.8)
    axis.set_axisbelow(True)
