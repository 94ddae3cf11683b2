from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli.conftest import Dl2d, Recorded, new_store, store_url, write_config
from cli.train.test_train_dl2_paper import a_workload_file
from cli.train.test_train_in_digital_twin import DAY, DAYS
from msgspec import structs
from observed_site import observe
from recorded_site import BUSY_DAYS, record

from dl2d.cli.policy_trials import decisions_to_learn_from, trial_on_recorded_days
from dl2d.cli.policy_trials.check_trained_policy import replay_line
from dl2d.cli.policy_trials.decisions_to_learn_from import recorded_slots
from dl2d.cli.train import train_dl2_supervised, train_supervised
from dl2d.cli.train.options_of_train_commands import site_settings
from dl2d.cli.train.train_supervised_report import (
    comparison_lines,
    imitation_problem,
    not_better_than,
    refuse_unless_forced,
)
from dl2d.core.cluster import Snapshot
from dl2d.core.confidence_interval import estimate
from dl2d.core.decision import Decision
from dl2d.core.errors import GateRefused
from dl2d.core.jobs import JobState
from dl2d.core.plan_of_starts_and_stops import Outcome, Plan
from dl2d.core.policy import Policy
from dl2d.core.progress_callback import Tell, silent
from dl2d.core.store import Slot
from dl2d.learning.dl2_paper.demonstrations import recordings_of
from dl2d.learning.promotion_gate import Verdict
from dl2d.learning.replay_check import ReplayCheck
from dl2d.learning.site_records.recorded_days import day_name
from dl2d.learning.site_records.recorded_decisions import SizeComparison, Yardstick
from dl2d.learning.site_records.split_of_recorded_days import Case
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.common.checkpoint import read_checkpoint
from dl2d.policies.common.training_input_ranges import INPUT_RANGES, range_in_words
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.srtf import Srtf
from dl2d.simulation.replay import replay
from dl2d.simulation.workload.workload_file import Workload, read_workload
from dl2d.simulation.workload.workload_source_by_name import load_source
from dl2d.store.sql_store import SqlStore

#: A site of two nodes: 110 jobs are about six days.
TWO_NODES = "generator:poisson?nodes=2&jobs={}&rate=0.25&median_seconds=9000&most_gpus=4&slot_seconds=1200"


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return a_workload_file(tmp_path)


@pytest.fixture
def site(tmp_path: Path, workload: Path) -> Path:
    """Configuration of a site whose store has what DRF decided in its slots."""
    config = write_config(tmp_path)
    store = SqlStore(new_store(tmp_path))
    store.acquire("test")
    known = set()
    for number, recording in enumerate(recordings_of("drf", read_workload(workload)), 1):
        for job in recording.snapshot.jobs:
            if job.key not in known:
                known.add(job.key)
                store.add_job(replace(job, state=JobState.READY))
        store.record_slot(a_slot(number, recording.snapshot, recording.decision))
    store.close()
    return config


def a_slot(number: int, snapshot: Snapshot, decision: Decision) -> Slot:
    return Slot(
        number=number, at=1000.0 + 100.0 * number, snapshot=structs.replace(snapshot, slot=number), proposed=decision,
        decision=decision, plan=Plan(), outcome=Outcome(), inputs_hash="ab" * 32, seed=1, seconds=0.1,
    )  # fmt: skip


@pytest.mark.slow
def test_a_store_is_learned_from_and_the_result_simulated_and_gone_on_with(
    dl2d: Dl2d, site: Path, workload: Path, tmp_path: Path
) -> None:
    ran = dl2d("train", "supervised", "-c", site, "-o", tmp_path / "out", "--json")
    assert ran.status == 0, ran.err
    said = ran.json
    assert 100 <= len(said["losses"]) <= 400
    assert said["losses"][-1] < 0.5 * said["losses"][0]
    assert said["supervised"]["policies"] == ["drf"]
    assert said["supervised"]["held_out"]["differing"] < 0.3
    assert said["supervised"]["yardstick"]["drf"]["same"] == 1.0  # it is drf that was recorded
    assert {"checkpoint", "report.md", "loss.png"} == {file.name for file in (tmp_path / "out").iterdir()}
    checkpoint = tmp_path / "out" / "checkpoint"
    ran = dl2d(
        "simulate", "-w", workload, "--preset", "dl2-paper", "-p", "drf", "-p", "dl2-original",
        "--checkpoint", checkpoint, "--json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    own, drf = (ran.json["policies"][name]["avg_jct_slots"] for name in ("dl2-original", "drf"))
    assert own < 1.3 * drf
    ran = dl2d(
        "train", "--design", "dl2-original", "-w", workload, "-o", tmp_path / "further", "--start", tmp_path / "out",
        "--iterations", "1", "--no-compare", "--json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert ran.json["history"][0]["phase"] == "start"


def test_ages_are_counted_in_the_sites_intervals_however_soon_slots_were_recorded(site: Path) -> None:
    assert recorded_slots(site_settings(site, None), 10, None, 0, tell=silent).slot_seconds == 300.0


@pytest.mark.slow
@pytest.mark.parametrize("design", ["dl2", "dl2-original"])
def test_the_configuration_is_that_of_the_environment_where_none_is_given(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, design: str
) -> None:
    monkeypatch.setenv("DL2D_CONFIG", str(tmp_path / "none.yaml"))
    ran = dl2d("train", "supervised", "--design", design, "--out", tmp_path / "out")
    assert (ran.status, f"{tmp_path / 'none.yaml'} does not exist" in ran.err) == (2, True)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_a_scheduler_is_learned_from_that_dl2d_only_looked_on_at(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, mode="observe", placement="load_balance")
    with closing(observe(store_url(tmp_path), hours=16)) as world:
        assert world.manager.submitted == world.manager.stopped == []
    ran = dl2d(
        "train",
        "supervised",
        "-c",
        config,
        "-o",
        tmp_path / "out",
        "--updates",
        "200",
        "--json",
    )
    assert ran.status == 0, ran.err
    said = ran.json["supervised"]
    assert said["policies"] == ["observed"]
    # Jobs that run keep what users asked for; most of those that wait are given nothing.
    assert said["held_out"]["same"] > 0.95
    assert said["held_out"]["differing"] < 0.1
    assert said["held_out"]["started"] >= 5
    assert said["held_out"]["started_same"] > 0.5
    assert ran.json["replayed"] == {"jobs": 30, "ended": 30}
    problem = "differs from the recorded scheduler in 20.0% of tasks, more than every job at its size as before (5.0%)"
    monkeypatch.setattr(train_supervised, "imitation_problem", lambda *_: problem)
    hardly = ("train", "supervised", "-c", config, "-o", tmp_path / "hardly", "--updates", "1")
    ran = dl2d(*hardly)
    assert ran.status == 1
    assert f"{problem}; nothing was written" in ran.err
    assert "nothing was written; record longer, or add --force --reason TEXT" in ran.err
    assert not (tmp_path / "hardly").exists()
    ran = dl2d(*hardly, "--force", "--reason", "to see it")
    assert ran.status == 0, ran.err
    assert "it decides with up to " in ran.out
    assert "written by force (to see it) although it differs from the recorded scheduler in " in ran.out
    forced = read_checkpoint(tmp_path / "hardly" / "checkpoint", policy="dl2-original").training["forced"]
    assert forced == {"problem": problem, "reason": "to see it"}
    assert dl2d(*hardly, "--force").status == 2
    ran = dl2d("train", "supervised", "--design", "dl2", "-c", config, "-o", tmp_path / "dl2", "--json")
    assert ran.status == 0, ran.err
    assert (ran.json["weights"], ran.json["supervised"]["policies"]) == ("own", ["observed"])
    assert "jobs with measured or assumed speeds were submitted on 0 of the recorded days" in ran.json["reason"]
    ran = dl2d("train", "--twin", "-c", config, "-o", tmp_path / "twin")
    assert ran.status == 2
    assert "jobs of fixed size report no speeds and do not count" in ran.err


@pytest.mark.usefixtures("few_draws")
def test_dl2_has_its_own_weights_where_completion_times_cannot_be_compared(dl2d: Dl2d, tmp_path: Path) -> None:
    """The store has less than half a day."""
    record(store_url(tmp_path), load_source(DAYS, seed=2).workload, Srtf(), begin=time.time() // DAY * DAY - DAY / 2)
    site, out = write_config(tmp_path, schedule={"slot_seconds": 1200.0}), tmp_path / "out"
    ran = dl2d("train", "supervised", "--design", "dl2", "-c", site, "-o", out, "--json")
    assert ran.status == 0, ran.err
    said = ran.json
    assert said["weights"] == "own"
    assert said["reason"].startswith(
        "completion times cannot be compared: jobs with measured speeds were submitted on 0"
    )
    assert said["supervised"]["agreement"] > 0.6
    assert {said["supervised"][of]["slots"] for of in ("held_out", "held_out_begun_with")} == {7}
    assert {"checkpoint", "report.md", "loss.png"} == {file.name for file in out.iterdir()}
    scorer = read_checkpoint(out / "checkpoint", policy="dl2").weights["scorer"]
    assert (scorer == with_checkpoint().checkpoint.weights["scorer"]).all()
    report = (out / "report.md").read_text()
    assert "dl2d's own weights: completion times cannot be compared" in report
    assert "choices learned from; the fitted weights, which the checkpoint does not have, compare as follows" in report
    assert f"the checkpoint will have dl2d's own weights, whatever is learned: {said['reason']}" in ran.err
    assert "size as before: " in report


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("teacher", [Fifo(), pytest.param(Srtf(), marks=pytest.mark.slow)])
def test_who_serves_jobs_whole_is_imitated_by_a_network_that_leaves_no_job_waiting(
    dl2d: Dl2d, tmp_path: Path, teacher: Policy
) -> None:
    """Also of architectures and models that the site never had, on an idle cluster."""
    begin = time.time() // DAY * DAY - DAY / 2
    record(store_url(tmp_path), load_source(DAYS, seed=2).workload, teacher, begin=begin)
    site = write_config(tmp_path, schedule={"slot_seconds": 1200.0})
    ran = dl2d("train", "supervised", "-c", site, "-o", tmp_path / "out", "--updates", "100", "--json")
    assert ran.status == 0, ran.err
    assert ran.json["replayed"]["ended"] == ran.json["replayed"]["jobs"] > 0
    checkpoint = read_checkpoint(tmp_path / "out" / "checkpoint", policy="dl2-original")
    assert (checkpoint.settings["first_bundles"], checkpoint.settings["last_bundles"]) == (False, True)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    "teacher", [Drf(), *(pytest.param(each, marks=pytest.mark.nightly) for each in (Fifo(), Srtf()))]
)
def test_completion_times_are_within_two_per_cent_of_the_recorded_schedulers(
    dl2d: Dl2d, tmp_path: Path, teacher: Policy
) -> None:
    """On workloads of which nothing was recorded: in the mean, and not worse by more with 95 % confidence."""
    begin = time.time() // DAY * DAY - 10 * DAY
    record(store_url(tmp_path), load_source(TWO_NODES.format(110), seed=0).workload, teacher, begin=begin)
    site, out = write_config(tmp_path, schedule={"slot_seconds": 1200.0}), tmp_path / "out"
    ran = dl2d("train", "supervised", "-c", site, "-o", out)
    assert ran.status == 0, ran.err
    learned = Dl2PaperPolicy(read_checkpoint(out / "checkpoint", policy="dl2-original"))
    tests = [load_source(TWO_NODES.format(40), seed=seed).workload for seed in range(1000, 1008)]
    change = estimate([math.log(completion_time(one, learned) / completion_time(one, teacher)) for one in tests])
    assert change.interval is not None
    assert abs(change.mean) < 0.02, change
    assert change.interval[1] < 0.02, change


def completion_time(workload: Workload, policy: Policy) -> float:
    return replay(workload, policy, LoadBalance(), timer=time.process_time).avg_jct


@pytest.mark.usefixtures("few_draws")
def test_dl2_has_its_own_weights_where_each_job_had_its_only_size(dl2d: Dl2d, tmp_path: Path) -> None:
    workload = load_source(DAYS, seed=2).workload
    sizes = {"min_workers": 1, "max_workers": 1, "min_ps": 1, "max_ps": 1}
    jobs = tuple(replace(job, **sizes) for job in workload.jobs[:6])
    record(store_url(tmp_path), replace(workload, jobs=jobs), Drf(), begin=time.time() // DAY * DAY - DAY / 2)
    site, out = write_config(tmp_path, schedule={"slot_seconds": 1200.0}), tmp_path / "out"
    ran = dl2d("train", "supervised", "--design", "dl2", "-c", site, "-o", out, "--min-jobs", "1")
    assert ran.status == 0, ran.err
    assert ran.out.startswith("0 choices learned from\n")
    assert "dl2d's own weights: each job got all that it may have, or its only size" in ran.out


def test_days_on_which_versions_are_compared_are_not_learned_from(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_on_recorded_days, "too_little_to_compare", lambda *_: None)
    begin = time.time() // DAY * DAY - 3 * DAY
    record(store_url(tmp_path), load_source(DAYS, seed=2).workload, Drf(), begin=begin, decided_by="observed")
    config = write_config(tmp_path, mode="shadow", schedule={"slot_seconds": 1200.0},
                          policy={"name": "dl2-original", "checkpoint": str(tmp_path / "out")})  # fmt: skip
    # The days to compare on have more slots than are to be learned from.
    train = ("train", "supervised", "--min-jobs", "3", "--updates", "3", "--slots", "20", "-c", config, "-o",
             tmp_path / "out")  # fmt: skip
    ran = dl2d(*train, "--json")
    assert ran.status == 0, ran.err
    days = [day_name(begin + number * DAY) for number in range(2)]
    assert ran.json["days"] == days[:1]
    assert "drf" in ran.json["not_better_than"]  # it is drf that was recorded
    ran = dl2d(*train)
    assert f"not learned from: {days[1]}, the days on which versions are compared" in ran.out
    assert (
        "not better than drf, which is as near to the recorded scheduler, or nearer: it has learned little" in ran.out
    )
    # Nor is what was learned from compared on.
    saved = dl2d("shadow", "-c", config, "--json").json["saved"]
    assert saved["days"] == days[1:]
    assert "are needed (1 day that it was trained on and jobs that did not end do not count)" in saved["reason"]
    ran = dl2d(*train[:2], "--min-jobs", "24", *train[4:])
    assert ran.status == 1
    too_few = "at least 24 are needed; record more, or lower --min-jobs; "
    assert (
        f"{too_few}only the newest 20 slots with jobs were read: raise --slots; not learned from: {days[1]}" in ran.err
    )


@pytest.mark.usefixtures("few_draws")
def test_dl2_is_not_written_if_it_is_surely_worse_than_the_recorded_scheduler(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_on_recorded_days, "too_little_to_compare", lambda *_: None)
    verdict = Verdict(passed=False, reason="as the gate says", change=0.1, low=0.05, high=0.15)
    compared = SimpleNamespace(cases=(), verdict=verdict, jobs=60, assumed=0)
    monkeypatch.setattr(trial_on_recorded_days, "compare", lambda *_, **__: compared)
    begin = time.time() // DAY * DAY - 3 * DAY
    record(store_url(tmp_path), load_source(DAYS, seed=2).workload, Fifo(), begin=begin, decided_by="observed")
    config, out = write_config(tmp_path, mode="shadow", schedule={"slot_seconds": 1200.0}), tmp_path / "out"
    train = ("train", "supervised", "--design", "dl2", "--min-jobs", "3", "-c", config, "-o", out)
    ran = dl2d(*train)
    assert ran.status == 1
    worse = "is surely worse than the recorded scheduler: mean completion time +10.00% (95 % interval +5.00% to +15.00%"
    assert f"policy dl2 {worse}" in ran.err
    assert "nothing was written; record longer, or add --force --reason TEXT" in ran.err
    assert not out.exists()
    ran = dl2d(*train, "--force", "--reason", "to see it")
    assert ran.status == 0, ran.err
    assert "beside the recorded scheduler: mean completion time +10.00%" in ran.out
    assert f"written by force (to see it) although it {worse}" in ran.out
    forced = read_checkpoint(out / "checkpoint", policy="dl2").training["forced"]
    assert (forced["reason"], worse in forced["problem"]) == ("to see it", True)


def test_days_that_are_too_few_for_the_gate_are_learned_from(dl2d: Dl2d, tmp_path: Path) -> None:
    """Once a site's first days were left out, and "record more" was said of the few jobs of the others."""
    begin = time.time() // DAY * DAY - 3 * DAY
    record(store_url(tmp_path), load_source(DAYS, seed=2).workload, Drf(), begin=begin, decided_by="observed")
    config = write_config(tmp_path, mode="shadow", schedule={"slot_seconds": 1200.0})
    found = recorded_slots(site_settings(config, None), 2000, None, 0, tell=silent)
    assert {day_name(each.snapshot.at) for each in found.slots} == {day_name(begin + number * DAY) for number in (0, 1)}
    assert (found.left_out, found.days is None) == (False, False)
    too_little = "there is too little to compare on: 1 day with"
    assert found.note.startswith(f"no days are left to compare versions on: {too_little}")
    assert found.problem.startswith(f"completion times cannot be compared: {too_little}")


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("low", [0.01, 0.03])
def test_a_network_with_which_jobs_of_recorded_days_surely_take_longer_is_refused(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: float
) -> None:
    verdict = Verdict(passed=False, reason="a test", change=0.05, low=low, high=0.07)
    compared: list[int] = []

    def judged(cases: Sequence[Case], *_: object, **__: object) -> SimpleNamespace:
        compared.append(len(cases))
        return SimpleNamespace(cases=(), verdict=verdict, jobs=42, assumed=0)

    monkeypatch.setattr(trial_on_recorded_days, "compare", judged)
    monkeypatch.setattr(trial_on_recorded_days, "too_little_to_compare", lambda *_: None)
    monkeypatch.setattr(train_supervised, "imitation_problem", lambda *_: "")
    begin = time.time() // DAY * DAY - 3 * DAY
    record(store_url(tmp_path), load_source(DAYS, seed=2).workload, Drf(), begin=begin, decided_by="observed")
    config = write_config(tmp_path, mode="shadow", schedule={"slot_seconds": 1200.0})
    train = ("train", "supervised", "--min-jobs", "3", "--updates", "3", "-c", config, "-o", tmp_path / "out")
    ran = dl2d(*train)
    assert compared == [1]  # with expected speeds
    change = f"mean completion time +5.00% (95 % interval {low:+.2%} to +7.00% over days) on {day_name(begin + DAY)}"
    words = f"{change} with the expected speeds, where no running job gets less than its minimum size, as in mode live"
    if low < 0.02:
        assert ran.status == 0, ran.err
        assert f"beside the recorded scheduler: {words}; the gate of `dl2d policy promote`, which" in ran.out
        return
    problem = f"is surely worse than the recorded scheduler: {words}"
    assert ran.status == 1
    assert f"the trained policy {problem}; nothing was written; record longer, or add --force" in ran.err
    ran = dl2d(*train, "--force", "--reason", "to see it")
    assert ran.status == 0, ran.err
    forced = read_checkpoint(tmp_path / "out" / "checkpoint", policy="dl2-original").training["forced"]
    assert forced == {"problem": problem, "reason": "to see it"}


def test_no_older_slots_are_read_after_very_many_jobs(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = site_settings(site, None)
    every = recorded_slots(settings, 2000, None, 0, tell=silent)
    monkeypatch.setattr(decisions_to_learn_from, "_MAX_JOBS", 10)
    newest = recorded_slots(settings, 2000, None, 0, tell=silent)
    count = len(newest.slots)
    assert [each.snapshot for each in newest.slots] == [each.snapshot for each in every.slots[-count:]]
    jobs = [len(each.snapshot.jobs) for each in newest.slots]
    assert sum(jobs) >= 10 > sum(jobs[1:])
    no_days = (
        "no days are left to compare versions on: jobs with measured speeds were submitted on 0 of the recorded days; "
    )
    assert every.note.startswith(no_days)
    assert newest.note == f"{every.note}; only the newest {count} slots with jobs were read: they list 10 jobs"


@pytest.mark.parametrize("design", ["dl2", "dl2-original"])
def test_progress_is_told_of_each_step(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, design: str
) -> None:
    begin = time.time() // DAY * DAY - 3 * DAY
    record(store_url(tmp_path), load_source(DAYS, seed=2).workload, Drf(), begin=begin)
    config = write_config(tmp_path, schedule={"slot_seconds": 1200.0}, policy={"name": "dl2-original"})
    steps: dict[str, list[tuple[int, int]]] = defaultdict(list)

    @contextmanager
    def told() -> Iterator[Tell]:
        yield lambda what, done, total, note="": steps[what].append((done, total))

    for each in (train_supervised, train_dl2_supervised):
        monkeypatch.setattr(each, "shown_progress", told)
    limits = ("--updates", "3") if design == "dl2-original" else ()
    ran = dl2d(
        "train", "supervised", "--design", design, "--min-jobs", "3", *limits, "-c", config, "-o", tmp_path / "out"
    )
    assert ran.status == 0, ran.err
    assert [what for what in steps if what != "setting up"] == [
        "recorded hours read", "recorded days looked at", "workloads made of recorded days", "recorded slots read",
        "recorded slots gone through", *(["recorded days replayed"] if design == "dl2-original" else []), "learning",
        "held-out slots compared", "jobs replayed",
    ]  # fmt: skip
    for what in ("recorded hours read", "recorded slots read"):
        assert [done for done, _ in steps[what]] == list(range(steps[what][0][1])), what
    made = steps["workloads made of recorded days"]
    assert made == [(number, len(made)) for number in range(1, len(made) + 1)]


def test_several_schedulers_are_told(site: Path) -> None:
    recorded = recorded_slots(site_settings(site, None), 2000, None, 0, tell=silent)
    assert recorded.deciders == []
    by_site = [
        replace(each, decision=replace(each.decision, policy="observed")) if number < 2 else each
        for number, each in enumerate(recorded.slots)
    ]
    (line,) = replace(recorded, slots=by_site).deciders
    assert line.startswith(
        f"of the slots learned from {len(by_site) - 2} were decided by drf, 2 by the site's scheduler (observed); "
    )


@pytest.mark.parametrize(("differing", "said"), [(0.0, []), (0.2, ["drf"])])
def test_a_network_that_gives_the_recorded_sizes_is_not_said_to_be_no_better_than_who_gave_them(
    differing: float, said: list[str]
) -> None:
    drf = SizeComparison(slots=9, jobs=40, same=1.0, differing=0.0, started=4, started_same=1.0)
    yardstick = Yardstick(as_before=replace(drf, same=0.5, differing=0.3, started_same=0.0), drf=drf)
    trained = replace(drf, differing=differing)
    assert not_better_than(trained, yardstick) == said
    assert any("not better than" in line for line in comparison_lines(trained, yardstick)) == bool(said)


@pytest.mark.parametrize(
    ("differing", "as_before", "drf", "why"),
    [
        (0.688, 0.130, 2.439, "68.8% of tasks, clearly more than every job at its size as before (13.0%)"),
        (0.345, 0.207, 0.707, "34.5% of tasks, clearly more than every job at its size as before (20.7%)"),
        (0.14, 0.07, 0.5, "14.0% of tasks, clearly more than every job at its size as before (7.0%)"),
        (0.5, 0.6, 0.1, "50.0% of tasks, clearly more than drf (10.0%)"),
        (0.4, 0.35, 0.3, "40.0% of tasks, more than every job at its size as before (35.0%) and than drf (30.0%)"),
        (0.39, 0.35, 0.5, ""),
        (0.15, 0.3, 0.0, ""),  # it is drf that was recorded
        (0.09, 0.0, 0.05, ""),
    ],
)
def test_a_network_that_is_clearly_worse_than_a_simple_decider_is_refused(
    differing: float, as_before: float, drf: float, why: str
) -> None:
    """Also where the other one is worse still."""
    trained = SizeComparison(slots=9, jobs=40, same=0.5, differing=differing, started=4, started_same=1.0)
    yardstick = Yardstick(as_before=replace(trained, differing=as_before), drf=replace(trained, differing=drf))
    problem = imitation_problem(trained, yardstick)
    assert problem == (why and f"differs from the recorded scheduler in {why}")
    reserved = imitation_problem(replace(trained, given_to_waiting=0.6 * differing), yardstick)
    waiting = "; most of these tasks are of jobs that the scheduler left waiting although there was room, which dl2d "
    assert reserved == problem + (why and f"{waiting}gives them")
    for refused, advice in ((problem, "record longer, or add"), (reserved, "nothing was written; add")):
        if refused:
            with pytest.raises(GateRefused, match=f"{advice} --force --reason TEXT$"):
                refuse_unless_forced("the policy", refused, "")


@pytest.mark.parametrize(
    ("started", "drf_only_here", "why"),
    [
        (0, False, "no job was started in them"),
        (4, True, "drf, which differs from the recorded scheduler in other slots, gives the recorded sizes, too"),
        (4, False, ""),
    ],
)
def test_slots_that_do_not_tell_how_well_a_network_imitates_are_said_not_to(
    started: int, drf_only_here: bool, why: str
) -> None:
    """It is refused, as one that differs: once 100.0 % was said of slots in which all jobs kept their sizes."""
    trained = SizeComparison(slots=9, jobs=40, same=1.0, differing=0.0, started=started, started_same=1.0)
    as_before = replace(trained, differing=0.5 if started else 0.0)
    yardstick = Yardstick(as_before=as_before, drf=trained, drf_only_here=drf_only_here)
    problem = imitation_problem(trained, yardstick)
    assert problem == (why and f"was compared on 9 slots that cannot tell how well it imitates: {why}")
    said = "these slots cannot tell how well it imitates the recorded scheduler: "
    assert (f"{said}{why}" in comparison_lines(trained, yardstick)) == bool(why)


def test_one_of_a_kind_is_told_in_the_singular_and_nodes_are_whole() -> None:
    one = SizeComparison(slots=1, jobs=1, same=1.0, differing=0.0, started=1, started_same=1.0)
    first, second = comparison_lines(one, Yardstick(as_before=one, drf=one))
    assert first.startswith("1 held-out slot: 100.0% of 1 job get the recorded size")
    assert second.startswith("of 1 job started then, 100.0% get the recorded size")
    assert replay_line(ReplayCheck(problem="", ended=1, jobs=1)) == "1 of 1 job started and ended in replays"
    ranges = {INPUT_RANGES: {"jobs": [1, 31], "nodes": [12, 12]}}
    assert "at once (recorded: 1 to 31) on 2 to 120 nodes, the fallback" in range_in_words(ranges)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("passed", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_fitted_weights_are_taken_if_they_pass_the_gate(
    dl2d: Dl2d, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, passed: bool
) -> None:
    verdict = Verdict(passed=passed, reason="as the gate says")
    monkeypatch.setattr(
        trial_on_recorded_days,
        "compare",
        lambda *_, **__: SimpleNamespace(cases=(), verdict=verdict, jobs=60, assumed=0),
    )
    workload, begin = load_source(BUSY_DAYS, seed=1).workload, time.time() // DAY * DAY - 6 * DAY
    record(store_url(tmp_path), workload, Srtf(), begin=begin)
    config = write_config(tmp_path, schedule={"slot_seconds": 1200.0})
    out = tmp_path / "out"
    ran = dl2d("train", "supervised", "--design", "dl2", "-c", config, "-o", out, "--json")
    assert ran.status == 0, ran.err
    assert (ran.json["weights"], ran.json["reason"]) == ("fitted" if passed else "own", "as the gate says")
    days, recorded = ran.json.get("days"), {day_name(begin + number * DAY) for number in range(6)}
    if passed:  # those that the gate compares on are left out
        assert days == sorted(days)
        assert set(days) < recorded
    else:
        assert days is None
    checkpoint, own = read_checkpoint(out / "checkpoint", policy="dl2"), with_checkpoint().checkpoint
    assert (checkpoint.weights["scorer"] == own.weights["scorer"]).all() == (not passed)
    assert checkpoint.settings["slot_seconds"] == 1200.0


def test_options_of_the_papers_network_are_refused_for_dl2(dl2d: Dl2d) -> None:
    ran = dl2d("train", "supervised", "--design", "dl2", "--network", "dense")
    assert ran.status == 2
    assert "--network cannot be used with --design dl2" in ran.err


def test_a_store_without_such_slots_is_told(dl2d: Dl2d, recorded: Recorded, tmp_path: Path) -> None:
    ran = dl2d("train", "supervised", "-c", recorded.config, "--policy", "nobody", "-o", tmp_path / "o")
    assert ran.status == 2
    assert "the store has no recorded slots with jobs in which nobody decided" in ran.err
