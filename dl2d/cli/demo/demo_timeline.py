"""The demo's picture: workers and parameter servers of each job over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dl2d.cli.demo.demo_jobs import DemoResult
from dl2d.core.errors import Dl2dError

_COLOURS = ("#3b6fd4", "#e08a1e", "#2f9e63")
_INK, _FAINT, _PALE = "#1d2430", "#6b7484", "#e4e8ee"


def draw_timeline(jobs: Sequence[DemoResult], subtitle: str, path: Path) -> None:
    """Write the picture; its axis begins when the first job arrives.

    Raises
    ------
    Dl2dError
        The file cannot be written.
    """
    began = min(job.arrived for job in jobs)
    figure = Figure(figsize=(11.6, 6.0), layout="constrained", facecolor="white")
    figure.suptitle(
        f"{len(jobs)} training jobs, resized {sum(len(job.plans) - 1 for job in jobs)} times while they train",
        x=0.01, ha="left", fontsize=15, fontweight="bold", color=_INK,
    )  # fmt: skip
    axes = figure.subplots(len(jobs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, job, colour in zip(axes, jobs, _COLOURS, strict=True):
        _draw_job(axis, job, began, colour)
    axes[0].set_title(subtitle, loc="left", fontsize=10, color=_FAINT, pad=10)
    axes[0].legend(loc="upper right", frameon=False, fontsize=8, labelcolor=_FAINT)
    axes[-1].set_xlim(0, max(job.job.ended_at or began for job in jobs) - began + 1)
    axes[-1].set_xlabel("seconds", color=_FAINT, fontsize=9)
    try:
        figure.savefig(path, dpi=110, metadata={"Software": None})
    except OSError as error:
        raise Dl2dError(f"{path}: cannot be written: {error.strerror or error}") from error


def _draw_job(axis: Any, played: DemoResult, began: float, colour: str) -> None:
    arrived = played.arrived - began
    ended = (played.job.ended_at or played.arrived) - began
    trained = [(plan.at - began, plan.workers, plan.servers) for plan in played.plans]
    decided = [(entry.at - began, entry.decided.allocation.workers) for entry in played.decisions]
    decided = [step for step in decided if step[0] < ended]
    axis.axvspan(arrived, ended, color=colour, alpha=0.07, linewidth=0)
    if trained:
        times, workers, servers = zip(*trained, (ended, *trained[-1][1:]), strict=True)
        downwards = [-count for count in servers]
        shape = {"step": "post", "color": colour, "linewidth": 0}
        axis.fill_between(times, workers, **shape, alpha=0.85, label="workers that train (upwards)")
        axis.fill_between(times, downwards, **shape, alpha=0.42, label="parameter servers (downwards)")
    if decided:
        steps = zip(*decided, (ended, decided[-1][1]), strict=True)
        axis.plot(
            *steps, drawstyle="steps-post", color=_INK, linewidth=1.1, linestyle=(0, (4, 2)), label="workers decided"
        )
    resizes = [(at, count + 0.6) for at, count, _ in trained[1:]]
    if resizes:
        axis.plot(*zip(*resizes, strict=True), "v", markersize=5, color=_INK, label="resize while training")
    axis.plot([arrived, ended], [0, 0], linestyle="", marker="o", markersize=6, color="white", markeredgecolor=_INK)
    axis.axhline(0, color=_INK, linewidth=0.8)
    axis.yaxis.set_major_formatter(lambda count, _: f"{abs(count):g}")
    axis.set_ylabel(played.job.request.name, fontsize=11, fontweight="bold", color=colour)
    axis.tick_params(length=0, colors=_FAINT, labelsize=8)
    axis.grid(axis="x", color=_PALE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)
