"""Open jobs: workers with loops of their own, whose number of steps nobody knows at the beginning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pslite_jobs import PATIENT, KillAt, Replace, environment, run_job
from rehearsal import job
from variants import first

from pslite.errors import SpecError
from pslite.testing import Resize, run_local

SCRIPT = str(Path(__file__).with_name("open_worker.py"))


def command(out, *options):
    return [sys.executable, SCRIPT, f"--out={out}", *options]


def read(out, task):
    return json.loads(Path(f"{out}.{task}").read_text())


def expected(steps, start=1.0, velocity=0.0):
    """Weight and momentum after so many steps: lr 0.1, momentum 0.5, gradient half the weight, times 2."""
    weight = start
    for _ in range(steps):
        velocity = 0.5 * velocity + weight
        weight -= 0.1 * velocity
    return weight, velocity


def run(out, *options, workers=2, servers=2, **more):
    return run_job(command(out, *options), workers=workers, servers=servers, settings=PATIENT, **more)


def test_workers_know_their_place_first_and_the_first_ones_rule_counts(tmp_path):
    out = tmp_path / "out"
    result = run(out)
    assert result.versions == 20
    assert set(result.exit_codes.values()) == {0}
    found = [read(out, task) for task in ("worker-0", "worker-1")]
    assert [one["places"] for one in found] == [[[0, 2]], [[1, 2]]]
    weight, velocity = expected(20)
    for one in found:
        assert one["alike"]
        assert not one["late"]
        assert one["weight"] == pytest.approx(weight, rel=1e-5)
        assert one["fetched"] == one["weight"]
        assert one["momentum"] == pytest.approx(velocity, rel=1e-5)
        assert one["seen"] == 20.0


def test_the_same_in_one_process(tmp_path):
    out = tmp_path / "out"
    subprocess.run(command(out), check=True, timeout=200)
    found = read(out, "single")
    assert (found["places"], found["version"]) == ([[0, 1]], 20)
    assert found["weight"] == pytest.approx(expected(20)[0], rel=1e-5)
    assert found["momentum"] == pytest.approx(expected(20)[1], rel=1e-5)


def test_a_step_is_as_long_at_any_size(tmp_path):
    out = tmp_path / "out"
    schedule = [Resize(5, workers=3, servers=1), Resize(15, workers=1, servers=3)]
    result = run(out, "--steps=60", "--sleep=0.03", schedule=schedule)
    assert [(plan.workers, plan.servers) for plan in result.plans] == [(2, 2), (3, 1), (1, 3)]
    found = read(out, "worker-0")
    assert found["version"] == 60
    assert found["weight"] == pytest.approx(expected(60)[0], rel=1e-3, abs=1e-6)
    assert found["seen"] == pytest.approx(60.0, rel=1e-5)
    assert [place[1] for place in found["places"]] == [2, 3, 1]
    assert set(result.exit_codes.values()) == {0}


def test_a_worker_dies_and_anothers_gradient_counts_for_its_own(tmp_path):
    out = tmp_path / "out"
    result = run(out, "--steps=40", "--sleep=0.02", workers=3, on_status=KillAt("worker-2", 10))
    assert any("count in its place" in line or "counts in its place" in line for line in result.log)
    found = [read(out, task) for task in ("worker-0", "worker-1")]
    assert all(one["weight"] == pytest.approx(expected(40)[0], rel=1e-3, abs=1e-6) for one in found)


def test_the_first_rank_passes_on_to_the_next_worker_when_its_worker_dies(tmp_path):
    out = tmp_path / "out"
    run(out, "--steps=40", "--sleep=0.02", workers=3, on_status=KillAt("worker-0", 10))
    assert [read(out, f"worker-{number}")["places"] for number in (1, 2)] == [[[1, 3], [0, 2]], [[2, 3], [1, 2]]]


def test_scripts_begin_again_when_a_server_dies(tmp_path):
    out = tmp_path / "out"
    result = run(out, "--steps=40", "--sleep=0.02", servers=1, on_status=Replace("ps-0", 10))
    assert any("the job goes back to its beginning" in line for line in result.log)
    assert result.versions == 40
    assert set(result.exit_codes.values()) == {0, 128 + 9}
    weight, momentum = expected(40)
    for task in ("worker-0", "worker-1"):
        found = read(out, task)
        assert (found["weight"], found["momentum"]) == pytest.approx((weight, momentum), rel=1e-3, abs=1e-6)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """What the first worker of an undisturbed job finds."""
    out = tmp_path_factory.mktemp("usual") / "out"
    assert run(out, "--steps=40", "--sleep=0.02", environ=environment(**DURABLE)).versions == 40
    return read(out, "worker-0")


def with_replicas(out, usual, **more):
    """Run a job whose servers have replicas; it does not go back, and no bit differs from an undisturbed run."""
    result = run(out, "--steps=40", "--sleep=0.02", environ=environment(**DURABLE), **more)
    assert not any("goes back" in line for line in result.log), result.log
    assert result.versions == 40
    found = {path.suffix[1:]: read(out, path.suffix[1:]) for path in out.parent.glob("out.*")}
    for one in found.values():
        assert {**one, "places": []} == {**usual, "places": []}
    return result, {task: one["places"] for task, one in found.items()}


DURABLE = {"DL2_DURABILITY": "durable"}


def test_a_server_with_replicas_dies_and_no_bit_differs(usual, tmp_path):
    result, places = with_replicas(tmp_path / "out", usual, on_status=KillAt("ps-0", 10, planned=True))
    assert any(line.endswith("; other servers take over its blocks") for line in result.log)
    assert places == {"worker-0": [[0, 2]], "worker-1": [[1, 2]]}
    assert result.exit_codes.pop("ps-0") == 128 + 9
    assert set(result.exit_codes.values()) == {0}


def test_a_host_with_a_worker_and_a_server_dies_and_the_first_rank_passes_on(usual, tmp_path):
    worker, server = KillAt("worker-0", 10), KillAt("ps-1", 10, planned=True)
    _, places = with_replicas(tmp_path / "out", usual, on_status=lambda *now: any([worker(*now), server(*now)]))
    assert places == {"worker-1": [[1, 2], [0, 1]]}


def test_a_worker_whose_loop_ends_early_leaves_and_the_first_ones_end_ends_the_job(tmp_path):
    out = tmp_path / "out"
    result = run(out, "--steps=40", "--leave=10")
    assert result.versions == 40
    assert any("its script has ended" in line for line in result.log)
    assert set(result.exit_codes.values()) == {0}


def at_barrier(out, *options, resizes=(), lost=0, **more):
    """Run a job of which two workers wait at a barrier for a third that has come later and trains for 60 steps.

    `lost` steps of the second segment are without any gradient.
    """
    schedule = [Resize(10, workers=3, servers=1), *resizes]
    result = run(out, "--barrier=60", "--steps=90", "--sleep=0.05", *options, schedule=schedule, **more)
    assert any("the others train on without" in line for line in result.log), result.log
    found = {path.suffix[1:]: read(out, path.suffix[1:]) for path in out.parent.glob("out.*")}
    for one in found.values():
        assert one["version"] == result.versions
        assert one["weight"] == pytest.approx(expected(result.versions)[0], rel=1e-3, abs=1e-6)
        assert one["seen"] == pytest.approx(result.versions - lost, rel=1e-5)
    return result, found


@pytest.mark.parametrize(
    ("status", "state", "text"), [(3, "failed", "status 3"), (143, "finished", "its gradient counts")]
)
def test_a_job_is_done_only_when_its_first_workers_process_ends_with_status_0(tmp_path, status, state, text):
    """Whoever ends as by SIGTERM is lost, and others go on."""
    code = (
        "import os, sys, open_worker\nif os.environ['DL2_TASK'] == 'worker-0':\n"
        f"    sys.argv.append('--steps=10'); open_worker.main(); raise SystemExit({status})\nopen_worker.main()"
    )
    result = run_local(
        [sys.executable, "-c", code, f"--out={tmp_path / 'out'}"],
        workers=2,
        servers=1,
        settings=PATIENT,
        environ=environment(PYTHONPATH=str(Path(__file__).parent)),
    )
    assert result.state == state, result.log
    assert any("worker-0" in line and f"status {status}" in line for line in result.log), result.log
    assert result.versions == (10 if status == 3 else 20)


def test_who_waits_at_a_barrier_holds_nobody_up_and_goes_on_from_where_the_others_are(tmp_path):
    result, found = at_barrier(tmp_path / "out")
    assert found.keys() == {"worker-0", "worker-1", "worker-2"}
    assert result.versions > 85
    assert set(result.exit_codes.values()) == {0}
    # no rank changes
    assert all(len({rank for rank, _ in one["places"]}) == 1 for one in found.values())


@pytest.mark.parametrize("victim", first(1, ("worker-2", "worker-1")))
def test_a_worker_dies_while_others_wait_at_a_barrier(tmp_path, victim):
    result, found = at_barrier(tmp_path / "out", on_status=KillAt(victim, 60))
    assert found.keys() == {"worker-0", "worker-1", "worker-2"} - {victim}
    assert result.versions > 85


def test_the_only_worker_that_trains_dies_in_the_middle_of_a_push(tmp_path):
    result, found = at_barrier(tmp_path / "out", "--die-pushing=60", lost=1)
    assert found.keys() == {"worker-0", "worker-1"}
    assert result.versions == 91


@pytest.mark.parametrize("workers", first(1, (4, 2, 1)))
def test_a_job_is_resized_while_workers_wait_at_a_barrier(tmp_path, workers):
    result, found = at_barrier(tmp_path / "out", resizes=[Resize(60, workers=workers, servers=3)])
    assert [(plan.workers, plan.servers) for plan in result.plans] == [(2, 2), (3, 1), (workers, 3)]
    assert len(found) >= min(workers, 3)  # of four the last one may be told to end first
    assert set(result.exit_codes.values()) == {0}


def test_a_job_begins_with_what_it_is_given(tmp_path):
    out = tmp_path / "out"
    result = run(out, "--from-version=7", "--steps=5", servers=3)
    assert result.versions == 12
    found = read(out, "worker-1")
    assert (found["weight"], found["momentum"]) == pytest.approx(expected(5, 4.0, 4.0), rel=1e-5)


def test_an_open_job_may_be_asynchronous(tmp_path):
    out = tmp_path / "out"
    result = run(out, "--steps=30", "--staleness=3")
    assert set(result.exit_codes.values()) == {0}
    # each push of one of two workers goes half as far as a step
    found = [json.loads(path.read_text()) for path in tmp_path.glob("out.*")]
    assert found
    assert all(abs(one["weight"]) < 0.5 for one in found)


def test_adam_counts_each_gradient_of_an_asynchronous_job_also_of_blocks_that_have_moved(tmp_path):
    out = tmp_path / "out"
    run(out, "--steps=60", "--staleness=3", "--adam", "--sleep=0.02", schedule=[Resize(20, workers=2, servers=3)])
    for path in tmp_path.glob("out.*"):
        updates = (1.0 - json.loads(path.read_text())["fetched"]) / 0.01
        assert updates == pytest.approx(round(updates), abs=1e-2)
        assert 117 <= round(updates) <= 120


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 1}, "epochs is 1"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"durability": "durable", "staleness": 1}, "durability is 'durable'"),
    ],
)
def test_an_unusable_open_job_is_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        job(**{"mode": "open", "epochs": 0, **changes})
