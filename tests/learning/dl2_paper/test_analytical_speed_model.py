from __future__ import annotations

import pytest
from simulation.drawn import drawn

from dl2d.core.jobs import Architecture
from dl2d.learning.dl2_paper.analytical_speed_model import analytical, formula_of
from dl2d.simulation.speeds.speed_models import AllReduce, Physical, Table

TRIED = (1, 2, 4, 8, 16)


def test_a_formula_is_found_again() -> None:
    """One whose links take as long as each other, and no time beside: then the trial tells all."""
    truth = Physical(batch=256, compute=0.01, model_bytes=1e8, worker_bandwidth=1e9, ps_bandwidth=1e9)
    found = formula_of(truth, TRIED)
    for workers in (1, 3, 16):
        for ps in (1, 2, 9):
            assert found.samples_per_second(workers, ps) == pytest.approx(truth.samples_per_second(workers, ps))
    ring = AllReduce(batch=256, compute=0.01, model_bytes=1e8, bandwidth=1e9)
    found = formula_of(ring, TRIED)
    for workers in (1, 5, 16):
        assert found.samples_per_second(workers, 0) == pytest.approx(ring.samples_per_second(workers, 0))


def test_it_knows_the_trial_and_is_wrong_elsewhere() -> None:
    """What is fastest in truth, many servers for one worker, was not tried; the formula says they bring nothing."""
    speeds = {(p, w): 100.0 * min(w, 4) ** 0.5 * (3.0 if p > w else 1.0) for p in range(1, 9) for w in range(1, 9)}
    truth = Table(tuple((p, w, speed) for (p, w), speed in sorted(speeds.items())))
    found = formula_of(truth, (1, 2, 4, 8))
    for size in (1, 2, 4, 8):
        assert found.samples_per_second(size, size) == pytest.approx(truth.samples_per_second(size, size), rel=0.35)
    assert truth.samples_per_second(1, 8) == pytest.approx(300.0)
    assert found.samples_per_second(1, 8) == pytest.approx(found.samples_per_second(1, 1))


def test_trials_that_failed_are_left_out() -> None:
    truth = Table(((1, 1, 100.0), (2, 2, 0.0), (4, 4, 160.0)))
    assert formula_of(truth, (1, 2, 4)).samples_per_second(2, 2) > 100.0
    nothing = formula_of(Table(((1, 1, 0.0), (2, 2, 1.0))), (1,))
    assert 0.0 < nothing.samples_per_second(1, 1) < 1.0


@pytest.mark.parametrize("seed", range(3))
def test_a_workload_keeps_everything_but_its_speeds(seed: int) -> None:
    workload = drawn(seed, jobs=8)
    made = analytical(workload)
    assert made.jobs == workload.jobs
    assert made.cluster == workload.cluster
    assert set(made.speeds) == set(workload.speeds)
    for model, speed in made.speeds.items():
        assert speed.architecture is workload.speeds[model].architecture
        size = (1, 0) if speed.architecture is Architecture.ALLREDUCE else (1, 1)
        assert speed.samples_per_second(*size) > 0.0
