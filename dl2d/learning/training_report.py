"""Report of a training: a page, learning curves, and mean completion times of baseline policies to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dl2d.core.progress_callback import Count, uncounted
from dl2d.learning.dl2.training import State, TrainingSettings
from dl2d.policies.common.checkpoint import writing
from dl2d.simulation.policy_by_name import replay_by_name
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.workload.workload_file import Workload

#: ``-true``: told the true speeds.
BASELINES = ("drf", "optimus-true", "lookahead-true")


def baselines(workloads: Sequence[Sequence[Workload]], progress: Count = uncounted) -> dict[str, tuple[float, ...]]:
    """Mean completion times in slots by policy, for each list of workloads, under preset ``dl2-paper``."""
    chosen = preset(PresetName.DL2_PAPER)
    total, done = len(BASELINES) * sum(map(len, workloads)), 0
    means: dict[str, list[float]] = {name: [] for name in BASELINES}
    for name in BASELINES:
        for list_ in workloads:
            times = []
            for workload in list_:
                times.append(replay_by_name(name, workload, chosen).avg_jct)
                done += 1
                progress(done, total)
            means[name].append(float(np.mean(times)))
    return {name: tuple(values) for name, values in means.items()}


def write_report(
    folder: Path,
    state: State,
    settings: TrainingSettings,
    baselines: Mapping[str, Sequence[float]],
    *,
    inputs: Sequence[str],
    seconds: float,
) -> None:
    """Write ``report.md`` and ``curves.png`` into a folder that is there.

    Raises ``CheckpointError`` if they cannot be written.
    """
    with writing(folder):
        (folder / "report.md").write_text(_page(state, settings, baselines, inputs, seconds), encoding="utf-8")
        draw_curves(folder / "curves.png", state, settings, baselines)


def _page(
    state: State,
    settings: TrainingSettings,
    baselines: Mapping[str, Sequence[float]],
    inputs: Sequence[str],
    seconds: float,
) -> str:
    best = state.best_look
    heads = [_part(part) for part in settings.parts]
    rows = [("dl2, best weights", best.jct), ("dl2, initial weights", state.looks[0].jct), *baselines.items()]
    lines = [
        "# Training of dl2",
        "",
        f"Workloads: {', '.join(inputs)}.",
        f"Seed {settings.seed}, {state.search.iteration} iterations in {seconds:.0f} s, {best.sizes} sizes measured.",
        f"The best weights are those of iteration {best.iteration}.",
        "",
        "Mean completion times on the validation workloads, in slots, by part of their nodes:",
        "",
        "| | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
        *(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |" for name, values in rows),
        "",
    ]
    if baselines:
        lines += ["dl2 against:", "", "| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
        for name, values in baselines.items():
            shares = (f"{own / other - 1:+.1%}" for own, other in zip(best.jct, values, strict=True))
            lines.append(f"| {name} | " + " | ".join(shares) + " |")
        lines.append("")
    return "\n".join([*lines, "![curves](curves.png)", ""])


def draw_curves(file: Path, state: State, settings: TrainingSettings, baselines: Mapping[str, Sequence[float]]) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    figure = Figure(figsize=(3.2 * len(settings.parts), 3.0), layout="constrained")
    iterations = [look.iteration for look in state.looks]
    for number, part in enumerate(settings.parts):
        axes = figure.add_subplot(1, len(settings.parts), number + 1)
        axes.plot(iterations, [look.jct[number] for look in state.looks], label="dl2")
        for style, (name, values) in zip(("--", "-.", ":"), baselines.items(), strict=False):
            axes.axhline(values[number], linestyle=style, color="grey", label=name)
        axes.set_title(f"{_part(part)} of the nodes")
        axes.set_xlabel("iteration")
        if not number:
            axes.set_ylabel("mean completion time, slots")
            axes.legend(fontsize="small")
    figure.savefig(file, metadata={"Software": None})


def _part(part: float) -> str:
    return "all" if part == 1.0 else f"1/{1 / part:.3g}"
