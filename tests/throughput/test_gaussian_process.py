from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.snapshots import a_job, a_snapshot, ask, cluster
from policies.snapshots import given as allocations

from dl2d.core.jobs import Allocation, Architecture, Consistency, JobRequest
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.policies.lookahead import Lookahead
from dl2d.simulation.speeds.speed_models import AllReduce, PsSync, SpeedModel
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.training_data import by_kind

SMOOTH = {
    "a": PsSync((0.02, 0.1, 0.3, 0.005, 0.01), 32),
    "b": PsSync((0.2, 0.2, 0.1, 0.02, 0.005), 64),
    "c": PsSync((0.05, 0.4, 0.8, 0.002, 0.02), 128),
}
SPREAD = [(1, 1), (16, 16), (1, 16), (16, 1), (4, 4), (2, 8), (8, 2), (8, 16)]


def a_request(model: str, **changes: Any) -> JobRequest:
    return a_job(1, model=model, **{"max_workers": 16, "max_ps": 16, **changes}).request


def a_kind(model: str, **changes: Any) -> TrainingKind:
    return TrainingKind(model, Architecture.PS, Consistency.SYNC)._replace(**changes)


def told(model: str, speeds: dict[tuple[int, int], float], times: int = 1, **changes: Any) -> MeasuredSpeeds:
    points = (SpeedPoint(Allocation(*size), speed, times) for size, speed in sorted(speeds.items()))
    return MeasuredSpeeds(a_kind(model, **changes), tuple(points))


def fitted(measured: Iterable[MeasuredSpeeds], previous: GaussianProcess | None = None) -> GaussianProcess:
    return GaussianProcess(by_kind(measured), previous=previous)


def of_model(name: str, model: SpeedModel, sizes: list[tuple[int, int]]) -> MeasuredSpeeds:
    return told(name, {size: model.samples_per_second(*size) for size in sizes}, times=8)


def test_it_recovers_surfaces_from_a_few_sizes_spread_over_the_range() -> None:
    belief = fitted([of_model(name, model, SPREAD) for name, model in SMOOTH.items()])
    for name, model in SMOOTH.items():
        believed, true = belief.predict_speeds(a_request(name))[1:, 1:], model.grid(16, 16)[1:, 1:]
        wrong = np.abs(np.log(believed / true))
        assert wrong.mean() < 0.1
        assert wrong.max() < 0.5
        best = np.unravel_index(believed.argmax(), believed.shape)
        assert true[best] > 0.9 * true.max()
        for workers, ps in SPREAD:
            assert believed[ps - 1, workers - 1] == pytest.approx(true[ps - 1, workers - 1], rel=0.03)


@pytest.mark.parametrize("per_worker", [10.0**1.6, 10.0**-1.6, 0.2])
def test_kinds_with_implausible_speeds_hardly_change_the_predictions_for_others(per_worker: float) -> None:
    """There are two of them, and three others."""
    honest = [of_model(name, model, SPREAD) for name, model in SMOOTH.items()]
    lies = {size: float(np.clip(1.0 * per_worker ** size[0], 1e-9, 1e15)) for size in SPREAD}
    lying = [told(f"lie-{number}", lies, times=16) for number in range(2)]
    for name in ("a", "never measured"):
        without, among = (
            fitted(measured).predict_log_speeds(a_request(name))[0][1:, 1:] for measured in (honest, honest + lying)
        )
        assert np.abs(among - without).max() < 0.1


def test_kinds_with_implausible_speeds_take_no_weight_from_the_others_where_they_are_the_most() -> None:
    honest = [of_model(name, model, SPREAD) for name, model in SMOOTH.items()]
    lies = {size: 1e15 / size[0] ** 2 for size in SPREAD}
    lying = [told(f"lie-{number}", lies, times=16) for number in range(8)]
    without, among = (
        fitted(measured).predict_log_speeds(a_request("a"))[0][1:, 1:] for measured in (honest, honest + lying)
    )
    assert np.abs(among - without).max() < 0.3


def test_it_agrees_with_conditioning_a_normal_distribution_by_hand() -> None:
    """Two points of one kind, one of another: covariances written out, solved with all at once."""
    points = [("a", 1.0, 1.0, 10.0), ("a", 4.0, 2.0, 30.0), ("b", 2.0, 8.0, 5.0)]
    belief = fitted([told("a", {(1, 1): 10.0, (4, 2): 30.0}), told("b", {(2, 8): 5.0})])

    def matern(one: Any, other: Any, length: float) -> float:
        gap = np.log2(np.array(one)) - np.log2(np.array(other))
        far = np.sqrt(3 * (gap[0] ** 2 + gap[1] ** 2 + (gap[0] - gap[1]) ** 2)) / length
        return (1 + far) * np.exp(-far)

    def covariance(one: Any, other: Any) -> float:
        own = (
            9 + 0.12 * matern(one[1:3], other[1:3], 1.5) + 0.01 * (one[1:3] == other[1:3])
            if one[0] == other[0]
            else 0.0
        )
        return 0.5 * matern(one[1:3], other[1:3], 2.0) + own

    def trend(point: Any) -> float:
        return 0.25 * np.log(point[1] * point[2])

    logs = np.array([np.log(point[3]) - trend(point) for point in points])
    centre = (logs[:2].mean() + logs[2]) / 2
    known = np.array([[covariance(one, other) for other in points] for one in points]) + 0.0025 * np.eye(3)
    for kind in ("a", "b", "new"):
        mean, deviation = belief.predict_log_speeds(a_request(kind))
        for workers, ps in [(1, 1), (2, 2), (16, 3), (2, 8)]:
            asked = (kind, float(workers), float(ps))
            cross = np.array([covariance(asked, point) for point in points])
            solved = np.linalg.solve(known, cross)
            assert mean[ps, workers] == pytest.approx(centre + trend(asked) + solved @ (logs - centre), abs=1e-6)
            assert deviation[ps, workers] ** 2 == pytest.approx(9.63 - solved @ cross, abs=1e-6)


def test_what_was_never_measured_has_the_shape_that_others_share() -> None:
    belief = fitted([of_model(name, model, SPREAD) for name, model in SMOOTH.items()])
    new = belief.predict_speeds(a_request("new"))
    assert new[1:, 1:].min() > 0
    others = [np.log(belief.predict_speeds(a_request(name))[1:, 1:]) for name in SMOOTH]
    like = np.corrcoef(np.log(new[1:, 1:]).ravel(), np.mean(others, axis=0).ravel())[0, 1]
    assert like > 0.95
    # Nothing is known of its level, and that is no reason to prefer a size.
    _, deviation = belief.predict_log_speeds(a_request("new"))
    assert deviation[1:, 1:].min() > 2.9
    hoped = belief.predict_speeds(a_request("new"), optimism=1.0)[1:, 1:] / new[1:, 1:]
    assert hoped.min() == pytest.approx(1.0)
    assert hoped.max() < 4


def test_with_nothing_measured_at_all_larger_is_a_little_faster() -> None:
    grid = fitted([]).predict_speeds(a_request("m"), optimism=2.0)
    assert grid[1, 1] == pytest.approx(1.0)
    assert grid[16, 16] == pytest.approx(4.0)
    assert not grid[0].any()
    assert not grid[:, 0].any()


def test_more_measurements_leave_less_doubt_and_a_mean_nearer_to_them() -> None:
    doubts, apart = [], []
    for times in (1, 4, 16):
        belief = fitted([told("m", {(2, 2): 20.0, (2, 3): 10.0}, times)])
        mean, deviation = belief.predict_log_speeds(a_request("m"))
        doubts.append(deviation[2, 2])
        apart.append(abs(mean[2, 2] - np.log(20.0)))
    assert doubts == sorted(doubts, reverse=True)
    assert apart == sorted(apart, reverse=True)
    assert doubts[-1] < 0.06


def test_doubt_grows_with_the_distance_from_what_was_measured() -> None:
    _, deviation = fitted([told("m", {(1, 1): 3.0})]).predict_log_speeds(a_request("m"))
    along = [deviation[count, count] for count in (1, 2, 4, 8, 16)]
    assert along == sorted(along)
    hoped = fitted([told("m", {(1, 1): 3.0})]).predict_speeds(a_request("m"), optimism=1.0)
    assert hoped[1, 1] == pytest.approx(3.0)
    assert hoped[16, 16] > hoped[2, 2] > hoped[1, 1]


def test_a_size_at_which_runs_failed_is_a_hole_and_says_nothing_of_others() -> None:
    speeds = {(1, 1): 3.0, (2, 2): 5.0, (4, 4): 7.0}
    with_hole = fitted([told("m", {**speeds, (3, 3): 0.0})]).predict_speeds(a_request("m"), optimism=1.0)
    without = fitted([told("m", speeds)]).predict_speeds(a_request("m"), optimism=1.0)
    assert with_hole[3, 3] == 0.0
    np.testing.assert_allclose(np.delete(with_hole.ravel(), 3 * 17 + 3), np.delete(without.ravel(), 3 * 17 + 3))
    only = fitted([told("m", {(1, 1): 0.0})]).predict_speeds(a_request("m"))
    assert only[1, 1] == 0.0
    assert only[2, 2] > 0


def test_all_reduce_jobs_go_by_workers_and_share_nothing_with_others() -> None:
    ring = AllReduce(batch=64, compute=0.01, model_bytes=1e8, bandwidth=1e9)
    kind = {"architecture": Architecture.ALLREDUCE}
    seen = told("ring", {(count, 0): ring.samples_per_second(count, 0) for count in (1, 2, 4, 8, 16)}, 8, **kind)
    asked = a_request("ring", **kind, max_ps=0, min_ps=0)
    alone = fitted([seen]).predict_speeds(asked)
    assert alone.shape == (1, 17)
    assert alone[0, 0] == 0
    np.testing.assert_allclose(alone[0, 1:], ring.grid(16, 0)[0, 1:], rtol=0.1)
    beside = fitted([seen, of_model("a", SMOOTH["a"], SPREAD)])
    np.testing.assert_allclose(
        beside.predict_log_speeds(asked)[1], fitted([seen]).predict_log_speeds(asked)[1], atol=1e-9
    )
    # The level of the others is where this one starts from; it is forgotten after one measurement.
    np.testing.assert_allclose(beside.predict_speeds(asked), alone, rtol=1e-3)
    # PSs that such a job is said to have make no difference.
    np.testing.assert_array_equal(fitted([seen]).predict_speeds(a_request("ring", **kind))[7], alone[0])


def test_wide_bounds_are_interpolated_and_measured_sizes_kept() -> None:
    belief = fitted([told("m", {(1, 1): 1.0, (77, 131): 50.0, (300, 300): 20.0}, 8)])
    wide = belief.predict_speeds(a_request("m", max_workers=300, max_ps=300))
    assert wide.shape == (301, 301)
    assert wide[131, 77] == pytest.approx(50.0, rel=0.02)
    narrow = belief.predict_speeds(a_request("m"))
    np.testing.assert_allclose(wide[:17, :17], narrow, rtol=1e-9)


def test_very_many_sizes_are_taken_together() -> None:
    model = SMOOTH["a"]
    sizes = [(workers, ps) for workers in range(1, 41) for ps in range(1, 41)]
    belief = fitted([of_model("a", model, sizes), *(of_model(f"m{n}", SMOOTH["b"], sizes[n::7]) for n in range(7))])
    true = model.grid(16, 16)[1:, 1:]
    assert np.abs(np.log(belief.predict_speeds(a_request("a"))[1:, 1:] / true)).mean() < 0.1


def test_of_very_many_sizes_each_still_has_the_speed_that_it_had() -> None:
    """More than count for others: a rough surface, of which neighbours say little."""
    rough = np.random.default_rng(3)
    speeds = {(w, p): float(np.exp(rough.normal(0, 0.1))) for w in range(1, 17) for p in range(1, 9)}
    belief = fitted([told("m", speeds, 8)])
    for bounds in ({}, {"max_workers": 100, "max_ps": 300}):
        grid, (_, deviation) = (
            belief.predict_speeds(a_request("m", **bounds)),
            belief.predict_log_speeds(a_request("m", **bounds)),
        )
        for (workers, ps), speed in speeds.items():
            assert grid[ps, workers] == pytest.approx(speed, rel=0.05)
            assert deviation[ps, workers] < 0.03


def test_equal_measurements_give_equal_beliefs_in_any_order() -> None:
    seen = [of_model(name, model, SPREAD) for name, model in SMOOTH.items()]
    for name in SMOOTH:
        one, other = (fitted(order).predict_speeds(a_request(name), optimism=0.5) for order in (seen, seen[::-1]))
        np.testing.assert_allclose(one, other, rtol=1e-12)
        assert one.tobytes() == fitted(seen).predict_speeds(a_request(name), optimism=0.5).tobytes()
    belief = fitted(seen)
    assert belief.predict_speeds(a_request("a"), 0.5) is belief.predict_speeds(a_request("a"), 0.5)
    with pytest.raises(ValueError, match="read-only"):
        belief.predict_speeds(a_request("a"))[1, 1] = 0.0


def test_predictions_do_not_depend_on_what_is_taken_over_from_another_model() -> None:
    many = {(workers, ps): workers + 0.1 * ps for workers in range(1, 9) for ps in range(1, 9)}
    same, new = told("a", many), told("b", {(1, 1): 10.0, (4, 2): 30.0})
    before = fitted([same, told("b", {(1, 1): 10.0})])
    after = fitted([same, new], before)
    [a, b] = by_kind([same, new]).items()
    assert after.conditioned_on(*a) is before.conditioned_on(*a) is not None
    assert before.conditioned_on(*b) is None
    for model in ("a", "b", "c"):
        assert np.array_equal(
            after.predict_log_speeds(a_request(model)), fitted([same, new]).predict_log_speeds(a_request(model))
        )


_sizes = st.tuples(st.integers(1, 30), st.integers(1, 30))
_speeds = st.one_of(st.just(0.0), st.floats(1e-6, 1e9))


@settings(max_examples=60)
@given(
    st.lists(st.dictionaries(_sizes, _speeds, max_size=12), max_size=4),
    st.integers(1, 60),
    st.integers(1, 60),
    st.floats(0, 3),
    st.integers(1, 10**9),
)
def test_whatever_was_measured_speeds_are_finite_and_positive(
    surfaces: list[dict[tuple[int, int], float]], workers: int, ps: int, optimism: float, times: int
) -> None:
    belief = fitted([told(f"m{number}", speeds, times) for number, speeds in enumerate(surfaces)])
    for number in range(len(surfaces) + 1):
        request = a_request(f"m{number}", max_workers=workers, max_ps=ps)
        grid = belief.predict_speeds(request, optimism)
        assert grid.shape == (ps + 1, workers + 1)
        assert np.isfinite(grid).all()
        assert not grid[0].any()
        assert not grid[:, 0].any()
        holes = surfaces[number].items() if number < len(surfaces) else ()
        failed = {size for size, speed in holes if speed == 0 and size[0] <= workers and size[1] <= ps}
        assert int((grid[1:, 1:] == 0).sum()) == len(failed)
        deviation = belief.predict_log_speeds(request)[1]
        assert (deviation >= 0).all()
        assert deviation.max() < 3.2


def test_lookahead_goes_to_what_is_known_to_be_fast_and_tries_what_may_be_faster() -> None:
    table = {(w, p): 10.0 for w in range(1, 5) for p in range(1, 5)} | {(2, 4): 30.0}
    job = a_job(1, model="m", samples_per_epoch=1000)
    seen = a_snapshot([job], cluster(4, cpu=8, gpu=8))
    known = {**{field: getattr(seen, field) for field in ("at", "slot", "nodes", "jobs")}}
    told_all = type(seen)(**known, tasks=(), speeds=(told("m", table, 16),))
    decision = ask(Lookahead(), told_all)
    assert [entry.allocation for entry in decision.jobs] == [(2, 4)]
    assert (decision.policy, decision.policy_version) == ("lookahead", "4")
    # Known at equal sizes only, and no faster there: with enough optimism it leaves them.
    diagonal = type(seen)(**known, tasks=(), speeds=(told("m", {(n, n): 10.0 for n in range(1, 5)}, 16),))
    [size] = allocations(Lookahead(optimism=2.0), diagonal)
    assert size.workers != size.ps
    assert ask(Lookahead(optimism=2.0), diagonal).policy_version == "4 optimism=2"


@pytest.mark.parametrize("optimism", [float("-inf"), float("inf"), float("nan")])
def test_an_optimism_that_is_none_is_refused(optimism: float) -> None:
    with pytest.raises(ValueError, match="optimism"):
        Lookahead(optimism=optimism)
