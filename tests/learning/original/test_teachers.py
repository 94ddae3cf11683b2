from __future__ import annotations

import time

import numpy as np
import pytest
from simulation.drawn import drawn

from dl2d.learning.original.settings import Settings
from dl2d.learning.original.teachers import QUICK, Recorded, Teacher
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


def taught(teacher: Teacher, *, first_bundles: bool = False) -> list[float]:
    """Mean completion times where windows do what the teacher says."""
    settings = Settings(window=10, first_bundles=first_bundles)
    times: list[float] = completion(Library.of(WORKLOADS), settings, teacher)[0].tolist()
    return times


@pytest.mark.parametrize("name", sorted(QUICK))
def test_quick_teachers_are_the_policies_of_the_preset(name: str) -> None:
    assert taught(QUICK[name]) == pytest.approx(replayed(name), rel=1e-9)


@pytest.mark.parametrize("name", ["drf", "fifo", "srtf"])
def test_what_was_recorded_is_done_again(name: str) -> None:
    assert taught(Recorded(name, WORKLOADS, first_bundles=False)) == pytest.approx(replayed(name), rel=1e-9)


@pytest.mark.parametrize("name", ["tetris", "optimus"])
def test_policies_with_an_order_of_their_own_are_followed_closely(name: str) -> None:
    """They stop, or go on, where the least used node has no room, which a window does not."""
    close = np.array(taught(Recorded(name, WORKLOADS, first_bundles=False))) / np.array(replayed(name))
    assert close == pytest.approx(1.0, abs=0.1)


def test_first_bundles_are_not_given_twice() -> None:
    """With room for all, a teacher gives every job a bundle anyhow."""
    roomy = [drawn(1, jobs=6, nodes=60, plain=True, most_least=1)]
    settings = Settings(window=6)
    teacher = Recorded("drf", roomy, first_bundles=True)
    with_bundles = completion(Library.of(roomy), settings, teacher)
    want = replay(
        roomy[0], contender("drf", roomy[0], preset(PresetName.DL2_PAPER)), Dl2Paper(),
        rules=Rules(empty_each_slot=True), timer=time.perf_counter,
    ).avg_jct  # fmt: skip
    assert with_bundles[0, 0] == pytest.approx(want, rel=1e-9)
