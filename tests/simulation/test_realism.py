from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from simulation.test_replay import PAPER, make, run

from dl2d.core.cluster import NodeState
from dl2d.core.decision import Decision
from dl2d.core.errors import WorkloadError
from dl2d.core.json_codec import encode
from dl2d.core.policy import Evidence
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.simulation.realism import REALISTIC, Outages, Realism, communication, loss_curve
from dl2d.simulation.replay import Rules, SlotProgress
from dl2d.simulation.seeded_random import SeededRandom
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.speeds.speed_models import parse_speed
from dl2d.simulation.workload.workload_file import CapacityChange, read_workload, write_workload

TWO = {"max_workers": 2, "max_ps": 2}


def real(given, policy=None, *, seed=0, **options):
    return run(given, policy, rules=Rules(realism=Realism(**options)), seed=seed, keep_series=True)


class Watch(Drf):
    """DRF that writes down what it was shown."""

    needs = frozenset({Evidence.LOSSES})

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def decide(self, snapshot, packing, rng) -> Decision:
        self.seen.append(snapshot)
        return super().decide(snapshot, packing, rng)


# Costs. One node of 8 CPUs and 8 GPUs, slots of 100 s; a job of two bundles does 2 epochs a slot.


def test_a_start_takes_its_time() -> None:
    """25 s of the first slot are lost: 1.5 epochs, then 2 a slot; 5 epochs end at 1 + 1 + 1.5 / 2 slots."""
    assert real(make([{"epochs": 5.0, **TWO}], nodes=1), start_seconds=25.0).avg_jct == 2.75


def test_a_start_may_take_longer_than_a_slot_and_then_the_slot_is_lost() -> None:
    """No task takes longer than the slot it is asked for in: it is there from the next one on."""
    assert real(make([{"epochs": 2.0, **TWO}], nodes=1), start_seconds=250.0).avg_jct == 2.0


SHRINKS = [{"epochs": 8.0, **TWO}, {"epochs": 1.0, "max_workers": 1, "max_ps": 1, "submit_slot": 1}]


def test_a_resize_costs_for_each_task_and_each_megabyte_that_moves() -> None:
    """The first job does 2 epochs, shrinks for a slot (1 epoch), and grows again (2 epochs a slot).

    Shrinking: two tasks leave (2 x 5 s), and one of two servers gives its half of 100 MB away (50 x 0.1 s): 15 s of a
    slot at 1 epoch. Growing: as much, at 2 epochs. Without costs it ends after 4.5 slots; 0.15 and 0.3 epochs are lost.
    """
    plain, cost = real(make(SHRINKS, nodes=1)), real(make(SHRINKS, nodes=1), join_seconds=5.0, move_seconds_per_mb=0.1)
    assert plain.jobs[0].jct == 4.5
    assert cost.jobs[0].jct == pytest.approx(4.5 + 0.45 / 2)
    assert cost.jobs[1].jct == plain.jobs[1].jct


def test_megabytes_are_the_models_own_where_the_workload_tells_them() -> None:
    speeds = {
        "m": {
            "formula": "physical", "batch": 64, "compute_seconds_per_sample": 1.0, "model_bytes": 3e8,
            "worker_bandwidth_bytes_per_second": 1e12, "ps_bandwidth_bytes_per_second": 1e12,
        }
    }  # fmt: skip
    plain = real(make(SHRINKS, nodes=1, speeds=speeds))
    cost = real(make(SHRINKS, nodes=1, speeds=speeds), move_seconds_per_mb=0.1)
    # 150 MB each time: 15 s at one worker's speed and 15 s at two workers'.
    assert cost.jobs[0].jct - plain.jobs[0].jct == pytest.approx(0.15 / 2 + 0.15, rel=1e-2)


def test_until_newcomers_are_there_a_job_trains_with_what_it_had() -> None:
    """When it grows, the first job goes on at 1 epoch a slot for 40 s; the second has lost 40 s when it started."""
    done = real(make(SHRINKS, nodes=1), start_seconds=40.0)
    assert done.jobs[1].jct == 1.0 + 0.4
    # 1.2, then 1, 1, then 0.4 + 0.6 x 2 = 1.6, 2, and the last 1.2 of 8 in 0.6 slots.
    assert done.jobs[0].jct == pytest.approx(5.6)


def test_a_restart_stops_the_whole_job_at_each_change_of_size() -> None:
    """30 s at 1 epoch a slot when it shrinks, 30 s at 2 when it grows: 0.9 epochs; the first start costs nothing."""
    done = real(make(SHRINKS, nodes=1), restart_seconds=30.0)
    assert done.jobs[0].jct == pytest.approx(4.5 + 0.9 / 2)
    assert done.jobs[1].jct == 1.0


def test_a_job_that_was_paused_is_restarted_from_its_checkpoint() -> None:
    """SRTF's kind: the short one takes the node for a slot, and the long one comes back from nothing."""
    jobs = [{"epochs": 8.0, **TWO}, {"epochs": 2.0, **TWO, "submit_slot": 1}]
    given = make(jobs, nodes=1)

    class Newest(Fifo):
        def decide(self, snapshot, packing, rng) -> Decision:
            turned = type(snapshot)(snapshot.at, snapshot.slot, snapshot.nodes, snapshot.jobs[::-1], snapshot.tasks)
            decision = super().decide(turned, packing, rng)
            return Decision(decision.policy, decision.policy_version, decision.jobs[::-1], actions=decision.actions)

    assert real(given, Newest()).jobs[0].jct == 5.0
    assert real(given, Newest(), restart_seconds=50.0).jobs[0].jct == 5.5


def test_in_an_emptied_cluster_only_changes_of_number_cost() -> None:
    given = make([{"epochs": 8.0, **TWO}], nodes=1)
    rules = Rules(empty_each_slot=True, realism=Realism(join_seconds=10.0, move_seconds_per_mb=1.0))
    assert run(given, PAPER.policies["drf"](None), PAPER.placement, rules=rules).avg_jct == 4.0


# Speeds.


def test_noise_is_the_same_whatever_else_the_policy_does() -> None:
    """Alone or beside another job, with the same size, a job makes the same progress slot by slot."""
    one = {"epochs": 9.0, "max_workers": 1, "max_ps": 1}
    alone = real(make([one], nodes=2), speed_noise=0.3, job_spread=0.2, seed=5)
    beside = real(make([one, one, one], nodes=2), speed_noise=0.3, job_spread=0.2, seed=5)
    assert alone.jobs[0] == beside.jobs[0]
    assert len({job.jct for job in beside.jobs}) == 3
    assert real(make([one], nodes=2), speed_noise=0.3, job_spread=0.2, seed=6).jobs[0] != alone.jobs[0]


def test_noise_is_within_its_bounds_and_has_its_mean() -> None:
    """A thousand jobs of one slot's work and a bit: times of 10 / U(0.8, 1.2) slots."""
    jobs = [{"epochs": 0.5, "max_workers": 1, "max_ps": 1}] * 400
    done = real(make(jobs, nodes=400), speed_noise=0.2)
    speeds = [0.5 / job.jct for job in done.jobs]
    assert 0.8 <= min(speeds) < 0.82
    assert 1.18 < max(speeds) <= 1.2
    assert np.mean(speeds) == pytest.approx(1.0, abs=0.02)


def test_the_spread_of_jobs_is_lognormal_with_mean_one_and_lasts() -> None:
    jobs = [{"epochs": 3.0, "max_workers": 1, "max_ps": 1}] * 400
    done = real(make(jobs, nodes=400), job_spread=0.25)
    speeds = np.array([3.0 / job.jct for job in done.jobs])
    assert np.log(speeds).std() == pytest.approx(0.25, abs=0.03)
    assert speeds.mean() == pytest.approx(1.0, abs=0.04)


def test_a_synchronous_job_goes_at_its_slowest_workers_pace_and_an_asynchronous_one_at_the_mean() -> None:
    job = {"epochs": 1.0, "max_workers": 1, "max_ps": 1}
    assert real(make([job], nodes=1), straggler_probability=1.0, straggler_speed=0.25).avg_jct == 4.0
    theta = {"formula": "ps-async", "theta": [1.0, 0.0, 0.0, 0.0], "batch": 1}
    pair = make([{"epochs": 20.0, **TWO}], nodes=1, speeds={"m": theta})
    quick, all_slow = real(pair).avg_jct, real(pair, straggler_probability=1.0).avg_jct
    some = [real(pair, straggler_probability=0.5, seed=seed).avg_jct for seed in range(20)]
    assert all_slow == 2 * quick
    assert quick < np.mean(some) < all_slow
    assert np.mean(some) == pytest.approx(quick / 0.75, rel=0.1)


def test_tasks_on_one_node_spare_communication_and_the_formula_tells_how_much_that_is() -> None:
    """theta: 1 s of computing a sample, 1 s fixed; batch 1: half of a step is communication. All of it is spared."""
    speeds = {"m": {"formula": "ps-sync", "theta": [1.0, 1.0, 0.0, 0.0, 0.0], "batch": 1}}
    job = {"epochs": 1.0, "max_workers": 1, "max_ps": 1}
    together = make([job], nodes=1, speeds=speeds)
    assert real(together).avg_jct == pytest.approx(2.0)
    assert real(together, locality=0.5).avg_jct == pytest.approx(1.5)
    # Where the worker fills its node, the server is on another one, and nothing is spared.
    apart = make([{**job, "worker": {"cpu": 8, "gpu": 8}}], nodes=2, speeds=speeds)
    assert real(apart, locality=0.5).avg_jct == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("description", "share"),
    [
        ({"formula": "ps-sync", "theta": [0.5, 1.0, 2.0, 0.0, 0.0], "batch": 4}, 0.75),
        ({"formula": "ps-async", "theta": [3.0, 1.0, 0.0, 0.0], "batch": 4}, 0.25),
        (
            {
                "formula": "physical", "batch": 4, "compute_seconds_per_sample": 1.0, "model_bytes": 1e9,
                "worker_bandwidth_bytes_per_second": 1e9, "ps_bandwidth_bytes_per_second": 1e9,
            },
            0.5,
        ),
        ({"table": [[5.0, 5.0], [5.0, 5.0]]}, 0.3),
    ],
)  # fmt: skip
def test_the_share_of_communication(description, share: float) -> None:
    """With 2 workers and 2 servers: all that is not computing two samples (or, asynchronous, a batch)."""
    assert communication(parse_speed(description), 2, 2, 0.3) == pytest.approx(share)


def test_jobs_on_one_node_are_in_each_others_way() -> None:
    one = {"epochs": 1.0, "max_workers": 1, "max_ps": 1}
    assert [job.jct for job in real(make([one, one], nodes=1), interference=0.2).jobs] == [1.25, 1.25]
    assert real(make([one], nodes=1), interference=0.2).avg_jct == 1.0


# What a scheduler is told.


def test_declared_epochs_are_drawn_around_the_real_ones_and_the_real_ones_count() -> None:
    watch = Watch()
    jobs = [{"epochs": 4.0, "max_workers": 1, "max_ps": 1}] * 50
    done = real(make(jobs, nodes=50), watch, declared_error=0.5)
    assert {job.jct for job in done.jobs} == {4.0}
    declared = [job.request.epochs for job in watch.seen[0].jobs]
    assert 2.0 <= min(declared) < 2.2
    assert 5.8 < max(declared) <= 6.0
    # Past its declared end a job says that it is about to end, and never falls back.
    last = {}
    for snapshot in watch.seen:
        for job in snapshot.jobs:
            assert last.get(job.key, 0.0) <= job.progress.epoch < job.request.epochs
            last[job.key] = job.progress.epoch


def test_some_users_say_that_their_job_is_of_another_type() -> None:
    watch = Watch()
    jobs = [{"epochs": 2.0, "max_workers": 1, "max_ps": 1}] * 200
    speeds = {"m": {"points": [[1, 1, 1.0]]}, "n": {"points": [[1, 1, 9.0]]}, "o": {"points": [[1, 1, 9.0]]}}
    done = real({**make(jobs, nodes=200), "speeds": {**make(jobs)["speeds"], **speeds}}, watch, wrong_labels=0.1)
    # They train as what they are.
    assert len({job.jct for job in done.jobs}) == 1
    said = [job.request.model for job in watch.seen[0].jobs]
    right = max(set(said), key=said.count)
    assert 0.05 < 1 - said.count(right) / 200 < 0.15
    assert {"n", "o"} <= set(said)


@pytest.mark.parametrize("epochs", [0.3, 4.0, 17.5, 240.0, 5000.0])
def test_losses_fall_by_less_than_the_threshold_from_the_real_end_on(epochs: float) -> None:
    job = read_workload(make([{"epochs": epochs}])).jobs[0]
    curve = loss_curve(job, 0.001, SeededRandom(3))
    fall = lambda at: (curve.at(at) - curve.at(at + 1)) / curve.at(0)
    assert curve.scale == pytest.approx(curve.at(0))
    if epochs < 150:
        assert fall(epochs) == pytest.approx(0.001)
    assert fall(epochs * 0.9) > fall(epochs) > fall(epochs * 1.1)
    assert fall(epochs) <= 0.001 * (1 + 1e-9)
    assert curve.at(1e9) > -1e-9


def test_losses_are_reported_with_noise_and_outliers() -> None:
    given = make([{"epochs": 60.0, **TWO}], nodes=1)
    clean, noisy = Watch(), Watch()
    real(given, clean, loss_threshold=0.002)
    real(given, noisy, loss_threshold=0.002, loss_noise=0.05, loss_outliers=0.2)
    curve = [point.loss for point in clean.seen[-1].losses[0].points]
    assert curve == sorted(curve, reverse=True)
    ratios = np.array([point.loss for point in noisy.seen[-1].losses[0].points]) / curve
    assert 1 <= (ratios > 1.3).sum() <= 15
    inside = ratios[ratios < 1.3]
    assert 0.01 < inside.std() < 0.1
    watch = Watch()
    real(given, watch)
    assert watch.seen[-1].losses == ()


# Nodes.


def test_a_job_loses_what_is_left_of_the_slot_and_never_what_it_did() -> None:
    """The only node fails within a slot; the job has what it did before, waits for the repair and goes on."""
    given = make([{"epochs": 20.0, **TWO}], nodes=1)
    options = {"node_mtbf_hours": 300 / 3600, "node_repair_hours": 150 / 3600}
    watch = Watch()
    done = real(given, watch, **options)
    assert done.avg_jct > 11.0
    epochs = [job.progress.epoch for snapshot in watch.seen for job in snapshot.jobs]
    assert epochs == sorted(epochs)
    assert any(after > before and after - before < 2 for before, after in pairwise(epochs))
    down = [snapshot for snapshot in watch.seen if snapshot.nodes[0].state is NodeState.DOWN]
    assert down
    assert all(snapshot.held()[snapshot.jobs[0].key].workers == 0 for snapshot in down)
    assert not any(task.node == "node-1" for snapshot in down for task in snapshot.tasks)


def test_after_a_short_standstill_a_job_goes_on_with_what_is_left() -> None:
    """Two nodes with a bundle each: when one fails, the other still trains in that slot."""
    one_a_node = {"epochs": 60.0, "worker": {"cpu": 4, "gpu": 8}, "ps": {"cpu": 4}, **TWO}
    given = make([one_a_node], nodes=2)
    options = {"node_mtbf_hours": 1000 / 3600, "node_repair_hours": 100 / 3600}
    stays = real(given, **options, failure_seconds=0.0)
    waits = real(given, **options)
    assert stays.avg_jct < waits.avg_jct


def test_failures_are_those_of_the_node_and_the_seed() -> None:
    nodes = read_workload(make([{}], nodes=50)).nodes()
    options = Realism(node_mtbf_hours=100.0, node_repair_hours=2.0)
    told = list(Outages(nodes, options, SeededRandom(1)).until(3600.0 * 2000))
    assert told == list(Outages(nodes, options, SeededRandom(1)).until(3600.0 * 2000))
    assert told != list(Outages(nodes, options, SeededRandom(2)).until(3600.0 * 2000))
    assert [event.at for event in told] == sorted(event.at for event in told)
    failures = [event for event in told if not event.up]
    assert len(failures) == pytest.approx(50 * 2000 / 102, rel=0.1)
    first = [event for event in told if event.node == "node-07"]
    assert [event.up for event in first] == [bool(number % 2) for number in range(len(first))]
    assert all(up.at - down.at == pytest.approx(7200) for down, up in zip(first[::2], first[1::2], strict=False))
    alone = [node for node in nodes if node.name == "node-07"]
    assert list(Outages(alone, options, SeededRandom(1)).until(3600.0 * 2000)) == first


def test_a_node_that_failed_and_was_taken_away_is_up_when_neither_holds() -> None:
    nodes = read_workload(make([{}], nodes=1)).nodes()
    changes = [CapacityChange(slot=0, name="node", up=0), CapacityChange(slot=10, name="node", up=1)]
    told = list(Outages(nodes, Realism(), SeededRandom(0), changes, 100.0).until(2000.0))
    assert [(event.at, event.up, event.reason) for event in told] == [(0.0, False, "taken away"), (1000.0, True, "")]


def test_capacity_that_changes_by_the_workload() -> None:
    """Two nodes, one from slot 2 to 4: a job of four bundles does 4, 4, 2, 2, 4 epochs in slots 0 to 4."""
    speeds = {"m": {"formula": "ps-sync", "theta": [100.0, 0.0, 0.0, 0.0, 0.0], "batch": 4}}
    job = {"epochs": 16.0, "samples_per_epoch": 1.0, "max_workers": 4, "max_ps": 4}
    changes = [{"slot": 2, "up": 1}, {"slot": 4, "name": "node", "up": 2}]
    given = make([job], nodes=2, speeds=speeds, capacity_changes=changes)
    done = run(given, keep_series=True)
    assert done.series is not None
    assert done.series.workers == (4, 4, 2, 2, 4)
    assert done.avg_jct == pytest.approx(5.0)
    assert done.series.utilisation["gpu"] == (1.0,) * 5


def test_capacity_changes_and_allowed_workers_are_written_and_read_back(tmp_path) -> None:
    changes = [{"slot": 2, "name": "node", "up": 1}, {"slot": 4, "name": "node", "up": 2}]
    known = read_workload(make([{"allowed_workers": [4, 1, 2]}, {}], nodes=2, capacity_changes=changes))
    assert known.jobs[0].allowed_workers == (1, 2, 4)
    assert known.capacity_changes[0] == CapacityChange(slot=2, name="node", up=1)
    path = tmp_path / "jobs.json"
    write_workload(known, path)
    assert read_workload(path) == known


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        ({"allowed_workers": [1, 1]}, {}, "given twice"),
        ({"allowed_workers": [0]}, {}, r"allowed_workers\[0\]"),
        ({"allowed_workers": []}, {}, "allowed_workers"),
        ({"allowed_workers": [20]}, {}, "20 is not within 0 to 16"),
        ({"allowed_workers": [2], "min_workers": 3}, {}, "2 is not within 3 to 16"),
        ({"allowed_workers": [16]}, {}, "the whole cluster has no room for 16 tasks"),
        ({}, {"capacity_changes": [{"slot": 0, "up": 9}]}, r"capacity_changes\[0\].up"),
        ({}, {"capacity_changes": [{"slot": 0, "name": "nod", "up": 1}]}, "did you mean node"),
        ({}, {"capacity_changes": [{"slot": 0, "up": 1}, {"slot": 0, "up": 2}]}, "two changes of node in slot 0"),
        ({}, {"capacity_changes": [{"slot": 3, "up": 0}]}, "after the last capacity change, no node has room"),
    ],
)
def test_bad_keys_are_told(change, more, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        read_workload(make([change], **more))


def test_a_job_runs_only_with_worker_counts_that_it_allows() -> None:
    done = run(make([{"epochs": 9.0, "allowed_workers": [1, 4]}], nodes=2), keep_series=True)
    assert done.series is not None
    assert {held["1"].workers for held in done.series.allocations} <= {1, 4}
    assert done.series.workers[0] == 4


# Options.


def test_without_options_nothing_changes() -> None:
    given = make(SHRINKS, nodes=1)
    assert encode(real(given)) == encode(run(given, keep_series=True))


def test_options_are_given_by_name_also_on_top_of_others() -> None:
    changed = REALISTIC.with_options({"speed_noise": "0.1", "node_mtbf_hours": "500"})
    assert (changed.speed_noise, changed.node_mtbf_hours) == (0.1, 500.0)
    assert changed.start_seconds == REALISTIC.start_seconds
    assert preset(PresetName.REALISTIC).rules.realism == REALISTIC
    assert preset(PresetName.REALISTIC).policies == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speed_nois": "1"}, "did you mean speed_noise"),
        ({"speed_noise": "much"}, "expected a number"),
        ({"speed_noise": "1.5"}, "from 0 to 0.99"),
        ({"speed_noise": "nan"}, "expected a number"),
        ({"node_mtbf_hours": "inf"}, "expected a number"),
        ({"model_mb": "0"}, "from 1e-06"),
        ({"straggler_speed": "0"}, "from 0.01"),
    ],
)
def test_bad_options_are_told(given, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        Realism().with_options(given)


def test_draws_are_uniform_normal_and_exponential_and_depend_on_every_name() -> None:
    draws = SeededRandom(7)
    uniform = [draws.uniform("a", number) for number in range(4000)]
    assert 0 < min(uniform) < max(uniform) < 1
    assert np.mean(uniform) == pytest.approx(0.5, abs=0.02)
    assert np.std([draws.normal(number) for number in range(4000)]) == pytest.approx(1.0, abs=0.05)
    assert np.mean([draws.exponential(3.0, number) for number in range(4000)]) == pytest.approx(3.0, rel=0.06)
    assert (
        len({draws.uniform("a", 1), draws.uniform("b", 1), draws.uniform("a", 2), SeededRandom(8).uniform("a", 1)}) == 4
    )


def test_progress_within_a_slot_follows_each_change_of_speed() -> None:
    """Half a slot at 2 epochs a slot, a quarter of standstill, a quarter at 4."""
    progress = SlotProgress(2.0)
    progress.change(0.5, 0.25, 4.0)
    assert progress.run(10.0) == (2.0, None)
    assert progress.run(1.0) == (1.0, 0.5)
    assert progress.run(1.5).ended == pytest.approx(0.875)
    progress.change(0.25, math.inf, 4.0)
    assert progress.run(10.0) == (0.5, None)
    assert progress.last_speed == 0.0
    progress.change(1.0, 0.0, 9.0)
    assert progress.last_speed == 0.0


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    for name in (field.name for field in dataclasses.fields(Realism)):
        row = next((line for line in text.splitlines() if line.startswith(f"| `{name}`")), "")
        default, value = (f"{getattr(record, name):g}" for record in (Realism(), REALISTIC))
        assert f"| {default} | {value} |" in row.replace("rest of the slot", f"{Realism().failure_seconds:g}"), name
