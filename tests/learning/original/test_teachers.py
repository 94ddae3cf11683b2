from __future__ import annotations

import time

import pytest
from simulation.drawn import drawn

from dl2d.learning.original.settings import Settings
from dl2d.learning.original.teachers import QUICK, Teacher
from dl2d.learning.original.validation import completion
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.simulation.contenders import contender
from dl2d.simulation.library import Library
from dl2d.simulation.preset import PresetName, preset
from dl2d.simulation.replay import Rules, replay

WORKLOADS = [drawn(seed, jobs=10, plain=True, most_least=1) for seed in range(3)]


def replayed(name: str) -> list[float]:
    rules, chosen = Rules(empty_each_slot=True), preset(PresetName.DL2_PAPER)
    return [
        replay(workload, contender(name, workload, chosen), Dl2Paper(), rules=rules, timer=time.perf_counter).avg_jct
        for workload in WORKLOADS
    ]


def taught(teacher: Teacher) -> list[float]:
    """Mean completion times where windows do what the teacher says."""
    settings = Settings(window=10, first_bundles=False)
    times: list[float] = completion(Library.of(WORKLOADS), settings, teacher)[0].tolist()
    return times


@pytest.mark.parametrize("name", sorted(QUICK))
def test_quick_teachers_are_the_policies_of_the_preset(name: str) -> None:
    assert taught(QUICK[name]) == pytest.approx(replayed(name), rel=1e-9)
