"""The timeline as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dl2d.web.timeline import Lane, Step, Timeline, ticks

#: Fill of each lane in turn; the same as in the page.
COLOURS = ("#3b6fd4", "#e08a1e", "#2f9e63", "#b04bb5", "#c8453b", "#5b6b7a")
_INK, _FAINT, _PALE = "#1d2430", "#6b7484", "#e4e8ee"
_DPI = 110
_KEY = (
    Patch(facecolor=COLOURS[0], alpha=0.85, label="workers that train (upwards)"),
    Patch(facecolor=COLOURS[0], alpha=0.42, label="parameter servers (downwards)"),
    Line2D([], [], color=_INK, linewidth=1.1, linestyle=(0, (4, 2)), label="workers decided"),
    Line2D([], [], color=_INK, marker="v", markersize=5, linestyle="", label="resize while training"),
)


def draw_png(timeline: Timeline, path: Path) -> None:
    """Write the picture; raises OSError."""
    count = len(timeline.lanes)
    figure = Figure(figsize=(11.6, 1.3 + 1.55 * count + 1.25), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        count + 1, 1, sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [1.5] * count + [1.05], "hspace": 0.16},
    )[:, 0]  # fmt: skip
    top = 1 - 0.98 / figure.get_figheight()
    figure.subplots_adjust(left=0.135, right=0.985, top=top, bottom=0.42 / figure.get_figheight())
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.12 / height, timeline.title, fontsize=15, fontweight="bold", color=_INK, va="top")
    figure.text(0.012, 1 - 0.42 / height, timeline.subtitle, fontsize=10, color=_FAINT, va="top")
    for index, lane in enumerate(timeline.lanes):
        _draw_lane(axes[index], timeline, lane, COLOURS[index % len(COLOURS)])
    _draw_total(axes[count], timeline)
    axes[count].set_xticks(ticks(timeline.seconds), [f"{tick} s" for tick in ticks(timeline.seconds)])
    axes[count].set_xlim(0, timeline.seconds)
    figure.legend(
        handles=_KEY, loc="upper right", bbox_to_anchor=(0.99, 1 - 0.04 / height), ncols=1, frameon=False, fontsize=8,
        labelcolor=_FAINT, handlelength=2.2, labelspacing=0.45,
    )  # fmt: skip
    # No date and no program version inside: equal timelines give equal files.
    figure.savefig(path, metadata={"Software": None})


def _draw_lane(axis: Any, timeline: Timeline, lane: Lane, colour: str) -> None:
    _dress(axis)
    up, down = timeline.most_workers, timeline.most_ps
    axis.set_ylim(-down - 0.65, up + 0.85)
    axis.set_yticks(range(-down, up + 1), [str(abs(count)) for count in range(-down, up + 1)], fontsize=7)
    axis.axvspan(lane.arrived, lane.ended, color=colour, alpha=0.07, linewidth=0)
    times, workers, servers = _series(lane.trained, lane.ended)
    axis.fill_between(times, workers, step="post", color=colour, alpha=0.85, linewidth=0)
    axis.fill_between(times, [-each for each in servers], step="post", color=colour, alpha=0.42, linewidth=0)
    times, workers, _ = _series(lane.decided, lane.ended)
    axis.plot(times, workers, drawstyle="steps-post", color=_INK, linewidth=1.1, linestyle=(0, (4, 2)))
    axis.axhline(0, color=_INK, linewidth=0.8)
    for mark in lane.resizes:
        axis.plot([mark.at, mark.at], [-down - 0.35, up + 0.35], color=_INK, linewidth=0.6, alpha=0.35)
        axis.plot(mark.at, up + 0.5, marker="v", markersize=5, color=_INK, clip_on=False)
    axis.plot(lane.arrived, 0, marker="o", markersize=6, color="white", markeredgecolor=_INK, clip_on=False, zorder=5)
    sign = "D" if lane.end == "finished" else "X"
    axis.plot(lane.ended, 0, marker=sign, markersize=6, color=_INK, clip_on=False, zorder=5)
    axis.text(-0.045, 0.99, lane.name, transform=axis.transAxes, ha="right", va="top", fontsize=11, fontweight="bold",
              color=colour)  # fmt: skip
    for line, text in enumerate(lane.about.split("\n")):
        axis.text(-0.045, 0.80 - 0.135 * line, text, transform=axis.transAxes, ha="right", va="top", fontsize=7.5,
                  color=_FAINT)  # fmt: skip


def _draw_total(axis: Any, timeline: Timeline) -> None:
    _dress(axis)
    totals = timeline.totals()
    times = [at for at, _ in totals] + [timeline.seconds]
    below = [0] * len(times)
    for index in range(len(timeline.lanes)):
        counts = [parts[index] for _, parts in totals]
        above = [low + count for low, count in zip(below, [*counts, counts[-1]], strict=True)]
        axis.fill_between(
            times, below, above, step="post", color=COLOURS[index % len(COLOURS)], alpha=0.85, linewidth=0
        )
        below = above
    most = max(1, *(sum(parts) for _, parts in totals))
    axis.set_ylim(0, most + 0.6)
    axis.set_yticks(range(0, most + 1, 1 if most <= 6 else 2))
    axis.tick_params(axis="y", labelsize=7)
    axis.text(-0.045, 0.99, "all jobs", transform=axis.transAxes, ha="right", va="top", fontsize=11,
              fontweight="bold", color=_INK)  # fmt: skip
    axis.text(-0.045, 0.70, "workers that train", transform=axis.transAxes, ha="right", va="top", fontsize=7.5,
              color=_FAINT)  # fmt: skip


def _dress(axis: Any) -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_PALE)
    axis.tick_params(axis="both", length=0, colors=_FAINT, labelsize=8)
    axis.grid(axis="x", color=_PALE, linewidth=0.8)
    axis.set_axisbelow(True)


def _series(steps: tuple[Step, ...], end: float) -> tuple[list[float], list[int], list[int]]:
    """Moments, workers and parameter servers; the last value is repeated at the end."""
    if not steps:
        return [], [], []
    times = [step.at for step in steps] + [end]
    workers = [step.workers for step in steps]
    servers = [step.ps for step in steps]
    return times, [*workers, workers[-1]], [*servers, servers[-1]]
