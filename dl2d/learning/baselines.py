"""What others make of the validation workloads, to be seen next to what is learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from dl2d.simulation.policy_lookup import replay_by_name
from dl2d.simulation.rule_presets import PresetName, preset
from dl2d.simulation.workload.format import Workload

#: ``-true``: told the true speeds.
BASELINES: Final = ("drf", "optimus-true", "lookahead-true")


def baselines(
    workloads: Sequence[Sequence[Workload]], progress: Callable[[int, int], None] | None = None
) -> dict[str, tuple[float, ...]]:
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
                if progress is not None:
                    progress(done, total)
            means[name].append(float(np.mean(times)))
    return {name: tuple(values) for name, values in means.items()}
