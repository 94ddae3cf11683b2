from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.drawn import drawn
from simulation.two_jobs import two_jobs

from dl2d.simulation.gymnasium_environments import ENVIRONMENT_ID, ClusterEnv, VectorClusterEnv
from dl2d.simulation.vectorized.clusters import Clusters
from dl2d.simulation.vectorized.workload_arrays import Library
from dl2d.simulation.workload.workload_file import Workload


@pytest.mark.parametrize("more", [{}, {"first_bundles": True, "speed_noise": 0.2, "epochs_error": 0.2}])
def test_gymnasium_finds_nothing_to_complain_of(more: dict[str, Any]) -> None:
    """Its checker warns where it doubts, and warnings are errors here."""
    workloads = [drawn(seed) for seed in range(3)]
    check_env(gymnasium.make(ENVIRONMENT_ID, workloads=workloads, window=5, render_mode="ansi", **more).unwrapped)
    check_env(gymnasium.make(ENVIRONMENT_ID).unwrapped)


def test_it_can_be_made_by_its_name() -> None:
    single = gymnasium.make(ENVIRONMENT_ID, workloads=two_jobs(), window=3)
    observation, _ = single.reset(seed=1)
    assert single.action_space.n == 10
    assert single.observation_space.contains(observation)
    many = gymnasium.make_vec(
        ENVIRONMENT_ID, 3, gymnasium.VectorizeMode.VECTOR_ENTRY_POINT, workloads=two_jobs(), window=3
    )
    observations, _ = many.reset(seed=1)
    assert observations.shape == (3, *observation.shape)
    assert many.observation_space.contains(observations)


def test_gymnasium_is_loaded_only_where_it_is_wanted() -> None:
    code = (
        "import sys, dl2d.simulation.vectorized.dl2_paper_sizing, dl2d.cli.main; "
        "assert 'gymnasium' not in sys.modules; "
        "import gymnasium; print(gymnasium.make('dl2d.simulation.gymnasium_environments:dl2d/Cluster-v0').spec.id)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("dl2d/Cluster-v0\n", 0), done.stderr


def test_one_slot_by_hand() -> None:
    """Type b is the second type. Jobs get a bundle each, for a worker alone is no size; void ends batch and slot."""
    env = ClusterEnv(two_jobs(), 3)
    seen, info = env.reset(seed=0)
    columns, free = seen[:-2].reshape(3, 7), seen[-2:]
    remaining = np.float32(np.log1p(4.0) / 8)
    assert columns.tolist() == [[0, 1, 0, remaining, 0, 0, 0], [1, 0, 0, remaining, 0, 0, 0], [0] * 7]
    assert free.tolist() == [1, 1]
    assert info["action_mask"].tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0, 1]
    assert info["window"].tolist() == [0, 1, -1]
    assert not info["slot_ended"]
    assert env.step(2)[1:4] == (0.0, False, False)
    seen, reward, _, _, info = env.step(3)
    columns, free = seen[:-2].reshape(3, 7), seen[-2:]
    assert columns[:, 4:].tolist() == [[0.25, 1 / 16, 1 / 16], [0.25, 1 / 16, 1 / 16], [0, 0, 0]]
    assert free.tolist() == [0.5, 0.5]
    assert reward == 0.0
    seen, reward, terminated, truncated, info = env.step(9)
    columns, free = seen[:-2].reshape(3, 7), seen[-2:]
    assert (reward, terminated, truncated) == (0.5, False, False)
    assert info["slot_ended"] is True
    assert info["slot"] == 1
    assert info["job_reward"].tolist() == info["job_rate"].tolist() == [0.25, 0.25]
    assert info["job_workers"].tolist() == info["job_ps"].tolist() == [1, 1]
    assert info["job_present"].tolist() == [True, True]
    assert not info["job_ended"].any()
    assert columns[0].tolist() == [0, 1, np.float32(np.log1p(1) / 3), np.float32(np.log1p(3.0) / 8), 0, 0, 0]
    assert free.tolist() == [1, 1]


def test_only_declared_epochs_are_seen() -> None:
    """4 epochs that were said to be 8: shares are of 8, and the job ends when half of them are done."""
    env = ClusterEnv(two_jobs(declared_epochs=8.0), 3)
    seen, _ = env.reset(seed=0)
    assert seen[3] == np.float32(np.log1p(8.0) / 8)
    env.step(2)
    seen, *_, info = env.step(9)
    assert seen[3] == np.float32(np.log1p(7.0) / 8)
    assert info["job_reward"].tolist() == [0.125, 0.0]
    assert info["job_rate"].tolist() == [0.125, 0.0]


def test_jobs_come_in_batches_and_the_last_void_ends_the_slot() -> None:
    env = ClusterEnv(two_jobs(), 1)
    assert env.reset(seed=0)[1]["window"].tolist() == [0]
    env.step(2)
    _, reward, _, _, info = env.step(3)
    assert (info["window"].tolist(), reward, info["slot_ended"]) == ([1], 0.0, False)
    _, reward, _, _, info = env.step(3)
    assert (info["window"].tolist(), reward, info["slot_ended"]) == ([0], 0.25, True)


def test_a_masked_action_counts_as_void() -> None:
    """Column 2 has no job; and a third worker is more than a job's most."""
    for actions, slots in (([6], 1), ([0, 0, 0], 1), ([0, 0], 0)):
        env = ClusterEnv(two_jobs(), 3)
        env.reset(seed=0)
        told = [env.step(action)[4] for action in actions]
        assert [info["slot_ended"] for info in told].count(True) == slots


def test_the_reward_of_a_last_slot_is_cut_off_and_its_rate_is_not() -> None:
    env = ClusterEnv(two_jobs(epochs=0.5), 2)
    env.reset(seed=0)
    env.step(2)
    env.step(5)
    _, reward, terminated, truncated, info = env.step(6)
    assert (reward, terminated, truncated) == (2.0, True, False)
    assert info["job_reward"].tolist() == [1.0, 1.0]
    assert info["job_rate"].tolist() == [2.0, 2.0]
    assert info["job_ended"].all()


def test_an_episode_that_gets_nowhere_is_cut_off() -> None:
    env = ClusterEnv(two_jobs(), 2, max_slots=3)
    env.reset(seed=0)
    assert [env.step(6)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_first_bundles_are_there_before_the_first_decision() -> None:
    env = ClusterEnv(two_jobs(), 2, first_bundles=True)
    env.reset(seed=0)
    assert env.clusters.sizes.tolist() == [[[1, 1], [1, 1]]]
    assert env.step(6)[1] == 0.5
    assert env.clusters.sizes.tolist() == [[[1, 1], [1, 1]]]


def choose(draw: np.random.Generator, masks: np.ndarray, *, void: float = 0.0) -> np.ndarray:
    """Anything that is allowed, but void with this probability at least."""
    actions = (draw.random(masks.shape) * masks).argmax(axis=-1)
    return np.where(draw.random(actions.shape) < void, masks.shape[-1] - 1, actions)


def lacking(env: ClusterEnv, job: int) -> list[int]:
    """What a job lacks of its minimum size."""
    return np.maximum(env.clusters.least[0, job] - env.clusters.sizes[0, job], 0).tolist()


def allowed(env: ClusterEnv, window: list[int], refused: set[int]) -> list[int]:
    """The mask, by trying: a worker, a PS, and both as one on the least used node.

    Of a job that has less than its minimum size, all that lead there: the first bundle of what it lacks, or task.
    """
    clusters = env.clusters
    nodes = int(clusters.library.nodes[clusters.workload[0]])
    load = clusters.load[0, :nodes]
    head = min(range(nodes), key=lambda node: (load[node], node))
    mask = []
    for job in window:
        for asked in ((1, 0), (0, 1), (1, 1)):
            fits = job >= 0 and all(
                has + more <= most
                for has, more, most in zip(clusters.sizes[0, job], asked, clusters.most[0, job], strict=True)
                if more
            )
            lacks = lacking(env, job)
            first = np.minimum(lacks, 1) if any(lacks) else asked
            demand = (clusters.demand[0, job] * np.array(first)[:, None]).sum(axis=0)
            fits = fits and job not in refused and bool((demand <= clusters.free[:, 0, head]).all())
            mask.append(int(fits))
    return [*mask, 1]


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans())
def test_the_mask_says_exactly_what_fits_and_what_it_allows_is_done(seed: int, window: int, first: bool) -> None:
    """Masks are those found by trying; an allowed action adds its tasks where ``lay`` does; no node is over-used."""
    draw = np.random.default_rng(seed)
    env = ClusterEnv(drawn(seed), window, first_bundles=first)
    _, info = env.reset(seed=seed)
    clusters = env.clusters
    here = np.zeros(1, dtype=np.int64)
    twin = Clusters(clusters.library, 1)
    twin.reset(here, here, [draw])
    if first:
        twin.fill(twin.least, here)
    refused: set[int] = set()
    for _ in range(60):
        mask = info["action_mask"]
        assert mask.tolist() == allowed(env, info["window"].tolist(), refused)
        action = int(choose(draw, mask, void=0.03))
        before, jobs = clusters.sizes[0].copy(), info["window"]
        job = jobs[action // 3] if action < 3 * window else -1
        lacks = lacking(env, job)
        observation, reward, terminated, _, info = env.step(action)
        assert env.observation_space.contains(observation)
        if action < 3 * window:
            workers, ps = lacks if any(lacks) else (action % 3 != 1, action % 3 != 0)
            bundles = min(workers, ps)
            tasks, amounts = np.array([[2, 0, 1]]) + 3 * job, np.array([[bundles, workers - bundles, ps - bundles]])
            if (twin.lay(here, tasks, amounts) >= 0).all():
                before[job] += [workers, ps]
            else:  # of several bundles or tasks that a job starts with, not the first had no room
                assert sum(lacks) > 1
                refused.add(job)
            assert clusters.sizes[0].tolist() == before.tolist()
            assert (reward, terminated, info["slot_ended"]) == (0.0, False, False)
        else:
            refused.clear()
        if info["slot_ended"]:
            twin.end_slot(here)
            if first:
                twin.fill(twin.least, here)
        for name in ("free", "load", "used", "sizes", "done"):
            assert getattr(clusters, name).tolist() == getattr(twin, name).tolist()
        assert (clusters.free[clusters.free > -1] >= 0).all()
        assert (clusters.sizes <= clusters.most).all()
        held = (clusters.sizes[0, :, :, None] * clusters.demand[0]).sum(axis=(0, 1))
        np.testing.assert_allclose(observation[-len(held) :], 1 - held / clusters.capacity[0], atol=1e-6)
        if terminated:
            break


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_rewards_of_an_episode_sum_to_its_jobs(seed: int) -> None:
    """Whatever is done, every job's share of its declared epochs sums to one."""
    draw = np.random.default_rng(seed)
    workload = drawn(seed, jobs=4, plain=True, most_least=1)
    env = ClusterEnv(workload, 4, speed_noise=0.3)
    _, info = env.reset(seed=seed)
    total, jobs = 0.0, np.zeros(4)
    for _ in range(20_000):
        _, reward, terminated, truncated, info = env.step(int(choose(draw, info["action_mask"])))
        total += reward
        jobs += info["job_reward"]
        if terminated or truncated:
            break
    declared = [job.epochs / job.declared_epochs for job in workload.jobs]
    done = np.isfinite(env.clusters.completion()[0])
    assert terminated == done.all()
    np.testing.assert_allclose(jobs[done], np.array(declared)[done], rtol=1e-9)
    assert total == pytest.approx(jobs.sum(), rel=1e-9)


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("more", [{}, {"first_bundles": True, "speed_noise": 0.2, "epochs_error": 0.2}])
def test_many_at_once_are_many_single_ones_bit_for_bit(count: int, more: dict[str, Any]) -> None:
    """Same seeds, same actions: equal observations, rewards and infos, over ends of episodes."""
    library = Library.of([drawn(seed, jobs=2 + seed, plain=True) for seed in range(4)])
    window = 3
    many = VectorClusterEnv(library, count, window, max_slots=12, **more)
    single = [ClusterEnv(library, window, max_slots=12, **more) for _ in range(count)]
    draw = np.random.default_rng(5)
    seen, info = many.reset(seed=11)
    told = [env.reset(seed=11 + number) for number, env in enumerate(single)]
    rest: list[tuple[Any, ...]] = [(0.0, False, False)] * count
    ends = 0
    for _ in range(400):
        for number, (observation, own) in enumerate(told):
            assert observation.tobytes() == seen[number].tobytes()
            assert own.keys() == info.keys()
            for key, value in own.items():
                assert np.array_equal(value, info[key][number]), key
        actions = choose(draw, info["action_mask"], void=0.1)
        seen, rewards, terminated, truncated, info = many.step(actions)
        for number, env in enumerate(single):
            if rest[number][1] or rest[number][2]:
                told[number] = env.reset()
                rest[number] = (0.0, False, False)
                ends += 1
            else:
                observation, *rest_, own = env.step(actions[number])
                told[number], rest[number] = (observation, own), tuple(rest_)
            assert rest[number] == (rewards[number], terminated[number], truncated[number])
    assert ends >= count


def test_how_episodes_begin_anew_is_declared_and_done() -> None:
    """Next-step: the action after an end is not looked at, and gives reward 0 and a fresh episode."""
    assert VectorClusterEnv.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    env = VectorClusterEnv(two_jobs(), 2, 2, max_slots=2)
    first, _ = env.reset(seed=0)
    void, grow = 6, 2
    env.step(np.array([void, grow]))
    _, _, _, truncated, _ = env.step(np.array([void, grow]))
    assert truncated.tolist() == [True, False]
    seen, rewards, _, truncated, info = env.step(np.array([grow, void]))
    assert truncated.tolist() == [False, False]
    assert rewards.tolist() == [0.0, 0.5]
    assert seen[0].tolist() == first[0].tolist()
    assert info["slot"].tolist() == [0, 1]
    assert not env.clusters.sizes[0].any()


def test_arrays_that_were_given_away_stay_as_they_are() -> None:
    env = VectorClusterEnv([drawn(1), drawn(2)], 4, 3)
    seen, info = env.reset(seed=3)
    kept = seen.tobytes(), {key: value.tobytes() for key, value in info.items()}
    draw = np.random.default_rng(0)
    now = info
    for _ in range(50):
        now = env.step(choose(draw, now["action_mask"], void=0.2))[-1]
    assert (seen.tobytes(), {key: value.tobytes() for key, value in info.items()}) == kept


def test_workloads_may_be_chosen() -> None:
    workloads = [drawn(number) for number in range(5)]
    assert ClusterEnv(workloads).reset(seed=0, options={"workload": 3})[1]["workload"] == 3
    many = VectorClusterEnv(workloads, 3)
    assert many.reset(seed=0, options={"workload": 3})[1]["workload"].tolist() == [3, 3, 3]
    assert many.reset(options={"workload": [2, 0, 1]})[1]["workload"].tolist() == [2, 0, 1]


def test_a_picture_shows_jobs_and_nodes() -> None:
    env = ClusterEnv(two_jobs(), 2, render_mode="ansi")
    env.reset(seed=0)
    env.step(2)
    env.step(6)
    env.step(3)
    picture = env.render()
    assert picture is not None
    lines = picture.splitlines()
    assert lines[0] == "slot 1: 0 of 2 jobs have ended"
    assert lines[1].split() == ["1", "b", "0w", "0p", "#####..............."]
    assert lines[2].split() == ["2", "a", "1w", "1p", "...................."]
    assert lines[3].split() == ["cpu", "4", "of", "16", "used;", "nodes", "4."]
    assert ClusterEnv(two_jobs()).render() is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ClusterEnv(two_jobs(), 0), "window"),
        (lambda: ClusterEnv(two_jobs(), max_slots=0), "max_slots"),
        (lambda: ClusterEnv(two_jobs(), render_mode="human"), "render_mode"),
        (lambda: VectorClusterEnv(two_jobs(), 2, render_mode="human"), "render_mode"),
        (lambda: ClusterEnv(two_jobs()).reset(options={"workload": 1}), "workload: there are 1"),
        (lambda: ClusterEnv(two_jobs()).reset(options={"workload": "x"}), "workload: expected a whole number"),
        (lambda: VectorClusterEnv(two_jobs(), 2).reset(seed=[1]), "expected 2 seeds"),
        (lambda: stepped(two_jobs(), np.array([0, 61])), "expected 0 to 60, got 0 to 61"),
        (lambda: stepped(two_jobs(), np.array([0])), "expected 2 whole numbers"),
        (lambda: stepped(two_jobs(), np.array([0.0, 1.0])), "expected 2 whole numbers"),
    ],
)
def test_what_makes_no_sense_is_refused(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_nothing_is_stepped_before_a_reset() -> None:
    for env in (ClusterEnv(two_jobs()), VectorClusterEnv(two_jobs(), 1)):
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step(np.zeros(1, dtype=np.int64) if isinstance(env, VectorClusterEnv) else 0)


def stepped(workload: Workload, actions: np.ndarray) -> None:
    env = VectorClusterEnv(workload, 2)
    env.reset(seed=0)
    env.step(actions)
