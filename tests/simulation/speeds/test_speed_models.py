from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2d.core.errors import WorkloadError
from dl2d.core.jobs import Architecture
from dl2d.simulation.speeds.speed_models import (
    MAX_INTERPOLATED,
    AllReduce,
    Physical,
    PsAsync,
    PsSync,
    Table,
    parse_speed,
)

SPEEDS = st.floats(0.01, 1e5, allow_nan=False)
COUNTS = st.integers(1, 24)
POINTS = st.dictionaries(st.tuples(COUNTS, COUNTS), SPEEDS, min_size=1, max_size=40)
THETA = st.floats(0, 10, allow_subnormal=False).map(lambda value: 0.0 if value < 1e-9 else value)
DESCRIPTIONS = st.one_of(
    st.builds(
        lambda theta, batch: {"formula": "ps-sync", "theta": theta, "batch": batch},
        st.lists(THETA, min_size=5, max_size=5).filter(any),
        st.integers(1, 10**6),
    ),
    st.builds(
        lambda theta, batch: {"formula": "ps-async", "theta": theta, "batch": batch},
        st.lists(THETA, min_size=4, max_size=4).filter(any),
        st.integers(1, 10**6),
    ),
    st.builds(
        lambda batch, compute, size, bandwidth, latency: {
            "formula": "allreduce", "batch": batch, "compute_seconds_per_sample": compute, "model_bytes": size,
            "bandwidth_bytes_per_second": bandwidth, "latency_seconds": latency, "overhead_seconds": 0.001,
        },
        st.integers(1, 4096), st.floats(1e-6, 1), st.floats(0, 1e10), st.floats(1e6, 1e12), st.floats(0, 0.1),
    ),
    st.builds(
        lambda batch, compute, size, mine, servers: {
            "formula": "physical", "batch": batch, "compute_seconds_per_sample": compute, "model_bytes": size,
            "worker_bandwidth_bytes_per_second": mine, "ps_bandwidth_bytes_per_second": servers,
        },
        st.integers(1, 4096), st.floats(1e-6, 1), st.floats(0, 1e10), st.floats(1e6, 1e12), st.floats(1e6, 1e12),
    ),
    st.builds(lambda points: {"points": [[*at, speed] for at, speed in points.items()]}, POINTS),
)  # fmt: skip


def points_of(measured):
    return parse_speed({"points": [[ps, workers, speed] for (ps, workers), speed in measured.items()]})


# Formulas, worked by hand.


def test_ps_sync_by_hand() -> None:
    speed = parse_speed({"formula": "ps-sync", "theta": [0.01, 0.02, 0.03, 0.004, 0.005], "batch": 32})
    # 0.01*32/4 + 0.02 + 0.03*4/2 + 0.004*4 + 0.005*2 = 0.08 + 0.02 + 0.06 + 0.016 + 0.01 = 0.186 s a step
    assert speed.samples_per_second(workers=4, ps=2) == pytest.approx(32 / 0.186, rel=1e-12)
    # 0.32 + 0.02 + 0.03 + 0.004 + 0.005 = 0.379
    assert speed.samples_per_second(workers=1, ps=1) == pytest.approx(32 / 0.379, rel=1e-12)
    assert speed.batch == 32
    assert speed.architecture is Architecture.PS


def test_ps_async_by_hand() -> None:
    speed = parse_speed({"formula": "ps-async", "theta": [0.1, 0.02, 0.003, 0.004], "batch": 8})
    # 4 / (0.1 + 0.02*4/2 + 0.003*4 + 0.004*2) = 4 / 0.16 = 25 steps/s of 8 samples
    assert speed.samples_per_second(workers=4, ps=2) == pytest.approx(200.0, rel=1e-12)
    assert speed.batch is None


def test_allreduce_by_hand() -> None:
    speed = AllReduce(batch=64, compute=0.01, model_bytes=100e6, bandwidth=1e9, latency=0.002, overhead=0.005)
    assert speed.samples_per_second(1, 0) == pytest.approx(64 / (0.005 + 0.64), rel=1e-12)
    # 0.005 + 0.16 + 2 * 3/4 * 0.1 + 0.002 * 3 = 0.321
    assert speed.samples_per_second(4, 0) == pytest.approx(64 / 0.321, rel=1e-12)
    assert speed.samples_per_second(4, 7) == speed.samples_per_second(4, 0)
    # 128 workers share 64 samples: half of them compute one each, so computing takes 0.01 s and no less
    assert speed.samples_per_second(128, 0) == pytest.approx(64 / (0.005 + 0.01 + 2 * 127 / 128 * 0.1 + 0.254))


def test_physical_by_hand() -> None:
    speed = Physical(batch=64, compute=0.01, model_bytes=100e6, worker_bandwidth=1e9, ps_bandwidth=2e9, overhead=0.005)
    # 8 workers on 2 servers: a server sends 8/2 * 0.05 = 0.2 s each way, a worker 0.1; the server holds it up
    assert speed.samples_per_second(8, 2) == pytest.approx(64 / (0.005 + 0.08 + 0.4), rel=1e-12)
    # on 8 servers 0.05 s against the worker's 0.1
    assert speed.samples_per_second(8, 8) == pytest.approx(64 / (0.005 + 0.08 + 0.2), rel=1e-12)


# All models alike.


@given(DESCRIPTIONS, st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=80)
def test_the_grid_is_every_single_speed_and_descriptions_round_trip(description, workers: int, ps: int) -> None:
    speed = parse_speed(description)
    grid = speed.grid(workers, ps)
    assert grid.shape == (ps + 1, workers + 1)
    assert grid.dtype == np.float64
    assert np.isfinite(grid).all()
    assert (grid >= 0).all()
    singles = [[speed.samples_per_second(w, p) for w in range(workers + 1)] for p in range(ps + 1)]
    assert grid.tolist() == singles
    assert not grid[:, 0].any()
    if speed.architecture is Architecture.PS:
        assert not grid[0].any()
    assert parse_speed(json.loads(json.dumps(speed.describe()))) == speed


@given(DESCRIPTIONS.filter(lambda description: "formula" in description), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=80)
def test_no_formula_gains_more_than_it_is_given(description, workers: int, ps: int) -> None:
    """A worker more never raises the speed of each; except where servers cost by the piece, they never slow a job."""
    speed = parse_speed(description)
    one, more = speed.samples_per_second(workers, ps), speed.samples_per_second(workers + 1, ps)
    assert more / (workers + 1) <= one / workers * (1 + 1e-9)
    if isinstance(speed, Physical):
        assert speed.samples_per_second(workers, ps + 1) >= one * (1 - 1e-9)


@pytest.mark.parametrize("counts", [(-1, 1), (1, -1), (1001, 1), (1, 1001)])
def test_counts_outside_the_bounds_are_refused(counts) -> None:
    for speed in (PsSync((1.0, 0, 0, 0, 0), 8), PsAsync((1.0, 0, 0, 0), 8), Table(((1, 1, 1.0),))):
        with pytest.raises(ValueError, match="from 0 to 1000"):
            speed.samples_per_second(*counts)
        with pytest.raises(ValueError, match="from 0 to 1000"):
            speed.grid(*counts)


# Tables.


@given(POINTS)
@settings(max_examples=60)
def test_a_table_gives_measurements_back_exactly_and_passes_near_them(measured) -> None:
    table = points_of(measured)
    grid = table.grid(24, 24)
    for (ps, workers), speed in measured.items():
        assert table.samples_per_second(workers, ps) == speed
        assert grid[ps, workers] == speed
    # The interpolation itself, not only the look-up, must go through what was measured.
    for (ps, workers), speed in measured.items():
        through = table._interpolated(ps, np.array([float(workers)]))[0]
        assert through == pytest.approx(speed, rel=1e-6, abs=1e-6 * max(measured.values()))


@given(POINTS.filter(lambda measured: len(measured) > 1), COUNTS, COUNTS)
@settings(max_examples=60)
def test_a_table_agrees_with_another_implementation(measured, ps: int, workers: int) -> None:
    interpolate = pytest.importorskip("scipy.interpolate")
    at = np.array(sorted(measured), dtype=float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = interpolate.Rbf(at[:, 0], at[:, 1], [measured[p, w] for p, w in sorted(measured)], function="linear")
        expected = max(0.0, float(other(float(ps), float(workers))))
    got = points_of(measured).samples_per_second(workers, ps)
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-6 * max(measured.values()))


def test_between_two_points_on_a_line_a_table_is_linear() -> None:
    table = parse_speed({"points": [[1, 1, 10.0], [1, 5, 30.0]]})
    assert table.grid(5, 1)[1].tolist() == pytest.approx([0, 10, 15, 20, 25, 30])


def test_a_table_falls_to_zero_and_not_below() -> None:
    table = parse_speed({"table": [[100, 0, 0], [0, None, 0], [0, 0, 0]], "interpolate": True})
    # Eight distances and weights: the plain interpolation would say -4 in the middle.
    assert float((np.hypot(table._at[:, 0] - 2, table._at[:, 1] - 2) * table._weights).sum()) < -1
    assert table.samples_per_second(2, 2) == 0.0
    assert table.grid(8, 8).min() == 0.0


def test_a_single_point_holds_everywhere() -> None:
    table = parse_speed({"points": [[2, 3, 7.5]]})
    assert table.grid(4, 4)[1:, 1:].tolist() == [[7.5] * 4] * 4
    assert table.samples_per_second(0, 3) == 0.0
    assert table.samples_per_second(3, 0) == 0.0


def test_holes_are_filled_only_where_that_is_asked_for() -> None:
    holed = [[10.0, 20.0, 30.0], [12.0, None, 32.0], [14.0, 24.0]]
    with pytest.raises(WorkloadError) as caught:
        parse_speed({"table": holed}, where="trace.json")
    assert caught.value.key == "table[1][1]"
    assert "2 PS and 2 workers" in str(caught.value)
    with pytest.raises(WorkloadError) as caught:
        parse_speed({"table": [holed[0], holed[2]]})
    assert caught.value.key == "table[1][2]"
    filled = parse_speed({"table": holed, "interpolate": True}).grid(3, 3)
    assert filled[1:, 1].tolist() == [10, 12, 14]
    assert 12 < filled[2, 2] < 32
    assert 14 < filled[3, 3] < 60


def test_failed_runs_can_be_left_out() -> None:
    rows = [[10.0, 20.0, 30.0], [12.0, 0.0, 32.0], [14.0, 0.2, 34.0]]
    kept = parse_speed({"table": rows})
    assert kept.samples_per_second(2, 2) == 0.0
    dropped = parse_speed({"table": rows, "drop_failed": True})
    assert len(dropped.points) == 7
    assert dropped.samples_per_second(2, 2) > 15
    assert dropped.samples_per_second(2, 3) > 15
    assert dropped.samples_per_second(3, 3) == 34.0


def test_an_allreduce_table_has_no_servers() -> None:
    table = parse_speed({"table": [[10.0, 18.0, 24.0]], "architecture": "allreduce", "batch": 64})
    assert table.samples_per_second(2, 0) == table.samples_per_second(2, 9) == 18.0
    assert table.grid(3, 1).tolist() == [[0, 10, 18, 24]] * 2
    sparse = parse_speed({"points": [[0, 1, 10], [0, 4, 40]], "architecture": "allreduce"})
    assert sparse.samples_per_second(2, 0) == pytest.approx(20)


def test_large_full_tables_are_looked_up_and_never_solved() -> None:
    side = 70
    assert side * side > MAX_INTERPOLATED
    table = parse_speed({"table": [[float(p * w) for w in range(1, side + 1)] for p in range(1, side + 1)]})
    assert table.fills(side, side)
    assert table.grid(side, side)[side, side] == side * side
    with pytest.raises(ValueError, match="hole"):
        table.samples_per_second(side + 1, 1)


# Bad descriptions.

RING = {
    "formula": "allreduce", "batch": 1, "compute_seconds_per_sample": 1, "model_bytes": 1,
    "bandwidth_bytes_per_second": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("description", "key"),
    [
        ([], ""),
        ({"tabel": [[1]]}, ""),
        ({"table": [[1]], "formula": "ps-sync"}, ""),
        ({"formula": "ps-sink", "theta": [1] * 5, "batch": 1}, "formula"),
        ({"formula": "ps-sync", "theta": [1] * 4, "batch": 1}, "theta"),
        ({"formula": "ps-sync", "theta": [1, 1, -1, 1, 1], "batch": 1}, "theta[2]"),
        ({"formula": "ps-sync", "theta": [0] * 5, "batch": 1}, "theta"),
        ({"formula": "ps-sync", "theta": [1] * 5}, "batch"),
        ({"formula": "ps-sync", "theta": [1] * 5, "batch": 1, "beta": 1}, "beta"),
        (RING | {"compute_seconds_per_sample": 0}, "compute_seconds_per_sample"),
        ({"formula": "physical", "batch": 1, "compute_seconds_per_sample": 1, "model_bytes": 1},
         "worker_bandwidth_bytes_per_second"),
        ({"table": [[]]}, "table[0]"),
        ({"table": [[1, -2]]}, "table[0][1]"),
        ({"table": [[0, 0]]}, "table"),
        ({"table": [[1] * 200] * 200}, "table"),
        ({"table": [[1], [2]], "architecture": "allreduce"}, "table"),
        ({"table": [[1]], "interpolate": "yes"}, "interpolate"),
        ({"points": [[1, 1, 1], [1, 1, 2]]}, "points[1]"),
        ({"points": [[1, 0, 1]]}, "points[0][1]"),
        ({"points": [[0, 1, 1]]}, "points[0][0]"),
        ({"points": [[1, 1, 1]], "architecture": "allreduce"}, "points[0][0]"),
    ],
)  # fmt: skip
def test_bad_descriptions_name_file_and_key(description, key: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_speed(description, where="trace.json, vgg-16")
    assert caught.value.key == key
    assert str(caught.value).startswith("trace.json, vgg-16: ")


def test_slips_of_the_pen_get_a_hint() -> None:
    with pytest.raises(WorkloadError, match=r"did you mean table\?"):
        parse_speed({"tabel": [[1]]})
    with pytest.raises(WorkloadError, match=r"did you mean ps-sync\?"):
        parse_speed({"formula": "ps-sink", "theta": [1] * 5, "batch": 1})
    with pytest.raises(WorkloadError, match=r"did you mean batch\?"):
        parse_speed({"formula": "ps-sync", "theta": [1] * 5, "batch": 1, "batsh": 1})


def test_a_table_may_be_of_asynchronous_training() -> None:
    description = {"points": [[1, 1, 2.0], [1, 2, 3.0]], "consistency": "async"}
    speed = parse_speed(description)
    assert parse_speed(speed.describe()) == speed
    assert speed != parse_speed({"points": [[1, 1, 2.0], [1, 2, 3.0]]})
