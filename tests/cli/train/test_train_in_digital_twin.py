"""dl2d train --twin: from a recorded site to a checkpoint, through the gate or not."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cli.conftest import Dl2d, store_url, write_config
from policies.dl2_paper.test_policy import a_checkpoint
from recorded_site import QUIET_DAYS, record

from dl2d.cli.policy_trials import train_on_site_records, trial_on_recorded_days
from dl2d.config.settings import load_settings
from dl2d.core.cluster import Snapshot
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Constraint, Decision, Reason
from dl2d.core.jobs import NOTHING
from dl2d.core.json_codec import as_plain
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE
from dl2d.core.policy_registry import SITE_SCHEDULER, RunState, VersionState
from dl2d.core.progress_callback import silent
from dl2d.daemon.policy_versions.active_version import keep_version
from dl2d.daemon.policy_versions.candidate_files import withdraw_if_worse
from dl2d.daemon.policy_versions.learner_supervisor import Learner
from dl2d.learning import training_report
from dl2d.learning.promotion_gate import GateSettings, Verdict
from dl2d.learning.site_records import split_of_recorded_days
from dl2d.learning.site_records.recorded_days import day_name
from dl2d.policies.common.checkpoint import read_checkpoint, write_checkpoint
from dl2d.policies.common.greedy_allocation import GreedyAllocation
from dl2d.policies.common.training_input_ranges import INPUT_RANGES
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.simulation.workload.workload_source_by_name import load_source
from dl2d.store.sql_store import SqlStore

#: Less than two days of one node.
DAYS = "generator:poisson?nodes=1&jobs=24&rate=0.25&median_seconds=3000&most_gpus=4&slot_seconds=1200"
#: Three busier days of it, of which two are enough for ``GATE``.
THREE_DAYS = DAYS.replace("jobs=24&rate=0.25", "jobs=90&rate=0.5")
GATE = {"gate_min_days": 2, "gate_min_jobs": 10}
DAY = 86_400


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without plots, which take longer than a training of one iteration."""
    monkeypatch.setattr(training_report, "draw_curves", lambda *_: None)


@pytest.fixture
def site(tmp_path: Path) -> tuple[Path, str]:
    """A configuration whose daemon does not learn, and its store's URL."""
    url = store_url(tmp_path)
    begin = time.time() // DAY * DAY - 3 * DAY
    record(url, load_source(DAYS, seed=2).workload, Drf(), begin=begin)
    return write_config(tmp_path, schedule={"slot_seconds": 1200.0}), url


@pytest.fixture
def few_days_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained reaches the gate, however few days there are."""
    monkeypatch.setattr(trial_on_recorded_days, "too_little_to_compare", lambda *_: None)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_a_checkpoint_comes_of_it_and_the_gate_is_recorded(dl2d: Dl2d, tmp_path: Path) -> None:
    url, own, out = store_url(tmp_path), with_checkpoint().checkpoint, tmp_path / "out"
    record(url, load_source(THREE_DAYS, seed=2).workload, Drf(), begin=time.time() // DAY * DAY - 4 * DAY)
    # One that gives first what saves least decides so far.
    worst = replace(own, weights={**own.weights, "scorer": -own.weights["scorer"]})
    write_checkpoint(worst, tmp_path / "worst")
    config = write_config(
        tmp_path, schedule={"slot_seconds": 1200.0}, learning=GATE,
        policy={"name": "dl2", "checkpoint": str(tmp_path / "worst")},
    )  # fmt: skip
    ran = dl2d("train", "--twin", "--gate", "--iterations", "4", "-o", out, "--json", "-c", config)
    assert ran.status == 0, ran.err
    done = ran.json
    checkpoint = read_checkpoint(out / "checkpoint", policy="dl2")
    assert checkpoint.digest == done["digest"]
    assert (len(done["days"]), len(done["held_out"])) == (1, 2)
    assert done["parent"] == worst.digest
    assert {"report.md", "curves.png"} <= {path.name for path in out.iterdir()}
    assert "## The gate" in (out / "report.md").read_text()
    trial = done["trial"]
    assert trial["days"] == done["held_out"]
    # Each day is replayed with expected speeds and with drawn ones.
    assert [case["name"] for case in trial["cases"]] == [
        f"{day}{draw}" for draw in ("", ", draw 1") for day in done["held_out"]
    ]
    assert any(case["candidate"] != case["current"] for case in trial["cases"])
    assert trial["low"] <= trial["change"] <= trial["high"]
    assert trial["passed"] == (trial["high"] < 0)
    assert " on 2 days with " in trial["reason"]
    with closing(SqlStore(url)) as store:
        (version,) = store.registry.versions()
        assert version.digest == done["digest"]
        assert version.state is (VersionState.LIVE if trial["passed"] else VersionState.REJECTED)
        assert (version.parent, version.jobs) == (done["parent"], done["jobs"])
        assert version.data_to is not None
        assert version.data_from == version.data_to - DAY
        (kept,) = store.registry.trials()
        assert json.loads(json.dumps(as_plain(kept))) == trial
    shown = dl2d("policy", "list", "-c", config).out
    assert done["digest"][:12] in shown
    assert ("passed" if trial["passed"] else "failed") in shown


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("mode", ["live", "shadow"])
def test_too_few_days_for_the_gate_are_told_before_the_training(
    dl2d: Dl2d, site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    def trained(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(train_on_site_records, "Trainer", trained)
    config = write_config(tmp_path, mode=mode, schedule={"slot_seconds": 1200.0})
    ran = dl2d("train", "--twin", "--gate", "-o", tmp_path / "out", "-c", config)
    assert ran.status == 1
    assert ran.err.startswith("dl2d: there is too little to compare on: 1 day with ")
    assert ran.err.endswith(
        " are needed (1 day that training takes and jobs that did not end do not count); nothing was trained\n"
    )
    assert not (tmp_path / "out").exists()
    with closing(SqlStore(site[1])) as store:
        assert (store.registry.versions(), store.registry.trials()) == ((), ())


@pytest.mark.slow
@pytest.mark.nightly
def test_the_seed_decides(dl2d: Dl2d, site: tuple[Path, str], tmp_path: Path) -> None:
    digests = []
    for seed in ("1", "1", "2"):
        ran = dl2d("train", "--twin", "--store", site[1], "--iterations", "2", "--seed", seed, "-o", tmp_path / "out",
                   "--json")  # fmt: skip
        assert ran.status == 0, ran.err
        digests.append(ran.json["digest"])
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws", "no_pictures")
def test_without_the_gate_nothing_is_registered(dl2d: Dl2d, site: tuple[Path, str], tmp_path: Path) -> None:
    _, url = site
    ran = dl2d("train", "--twin", "--store", url, "--iterations", "1", "-o", tmp_path / "out", "--json")
    assert ran.status == 0, ran.err
    with closing(SqlStore(url)) as store:
        assert store.registry.versions() == ()
    ran = dl2d("train", "--twin", "--store", url, "--iterations", "0", "--days", "2", "-o", tmp_path / "out")
    assert ran.status == 2
    assert "at least 2 are needed" in ran.err


@pytest.mark.usefixtures("few_draws", "few_days_suffice", "no_pictures")
@pytest.mark.parametrize(
    ("passed", "policy", "mode", "words"),
    [
        (False, "drf", "live", "rejected: it is worse"),
        (True, "dl2", "live", "decides from the next interval on: it is better"),
        (
            True, "dl2", "shadow",
            "decides from the next interval on in mode shadow, which changes nothing on the cluster: it is better",
        ),
        (True, "dl2", "observe", "is live, but in mode observe no policy decides: it is better"),
        (
            *(True, "drf", "live"),
            "is the live version of dl2, but drf decides (set policy.name to dl2 to use it): it is better",
        ),
    ],
)  # fmt: skip
def test_what_the_gate_said_is_said_of_the_policy_in_charge(
    dl2d: Dl2d,
    site: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    passed: bool,
    policy: str,
    mode: str,
    words: str,
) -> None:
    verdict = Verdict(passed=passed, reason="it is better" if passed else "it is worse")
    monkeypatch.setattr(
        trial_on_recorded_days,
        "compare",
        lambda *_, **__: SimpleNamespace(cases=(), verdict=verdict, jobs=60, assumed=0),
    )
    config = write_config(tmp_path, mode=mode, schedule={"slot_seconds": 1200.0}, policy={"name": policy})
    ran = dl2d("train", "--twin", "--gate", "--iterations", "1", "-o", tmp_path / "out", "-c", config)
    assert ran.status == 0, ran.err
    assert ran.out.splitlines()[-1].startswith(words)  # in shadow it also says with what it was compared


@pytest.mark.slow
def test_a_live_version_that_did_worse_than_the_fallback_would_have_is_rolled_back(tmp_path: Path) -> None:
    """It is said of dl2 what a policy did that gives each job its minimum size."""
    url = store_url(tmp_path)
    begin = time.time() // DAY * DAY - 6 * DAY
    record(url, load_source(QUIET_DAYS, seed=1).workload, Smallest(), begin=begin, decided_by="dl2")
    config = write_config(
        tmp_path, schedule={"slot_seconds": 1200.0}, learning={"gate_min_days": 3, "gate_min_jobs": 10}
    )
    settings = load_settings(config)
    with closing(SqlStore(url)) as store:
        registry = store.registry
        first, second = (with_checkpoint().checkpoint, with_checkpoint().checkpoint)
        second = replace(second, weights={**second.weights, "scorer": second.weights["scorer"] + 1})
        split = trial_on_recorded_days.recorded_days(settings, store, now=time.time(), seed=0, tell=silent)
        assert trial_on_recorded_days.live_review(settings, registry, split, tell=silent) is None  # none is live
        for number, made in enumerate((first, second)):
            keep_version(made, settings.versions_path, registry, at=begin, origin="a test")
            registry.change("dl2", made.digest, VersionState.LIVE, at=begin + number, by="ann", reason="test")
        review = trial_on_recorded_days.live_review(settings, registry, split, tell=silent)
        assert review is not None
        assert (review.candidate, review.current, review.passed) == ("drf", second.digest, True)
        assert review.high is not None
        assert review.high < 0
        assert "fallback drf in place of version" in review.reason
        done = withdraw_if_worse(review, registry, at=time.time())
        assert done.startswith(
            f"version {second.digest[:12]} withdrawn, {first.digest[:12]} is live again: fallback drf"
        )
        change = registry.changes("dl2")[0]
        assert (change.digest, change.rollback, change.reason) == (first.digest, True, review.reason)
        assert registry.trials("dl2")[0] == review
        # The earlier version was not live on these days: nothing is known of it.
        assert trial_on_recorded_days.live_review(settings, registry, split, tell=silent) is None
        assert withdraw_if_worse(review, registry, at=time.time()) == ""
        # Nor does anything happen where the version is the first.
        first_again = replace(review, current=first.digest)
        assert "stays live, because none can replace it" in withdraw_if_worse(first_again, registry, at=time.time())


class Smallest:
    """A policy that gives each job its minimum size while there is room."""

    name, version, needs = "smallest", "1", NO_EVIDENCE

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        del rng
        allocation = GreedyAllocation(snapshot, packing)
        for job in snapshot.jobs:
            if allocation.allocations[job.key] != NOTHING or allocation.grow(job) is None:
                allocation.refuse(job, Reason(Constraint.SATISFIED, "has its minimum size"))
        return allocation.decision(self)


@pytest.mark.usefixtures("few_draws", "few_days_suffice", "no_pictures")
@pytest.mark.parametrize(("decided_by", "replayed"), [("observed", None), ("drf", "drf")])
def test_where_dl2d_is_not_in_charge_the_gate_compares_with_the_sites_scheduler(
    dl2d: Dl2d, tmp_path: Path, decided_by: str, replayed: str | None
) -> None:
    url = store_url(tmp_path)
    begin = time.time() // DAY * DAY - 3 * DAY
    record(url, load_source(DAYS, seed=2).workload, Drf(), begin=begin, decided_by=decided_by)
    config = write_config(tmp_path, mode="shadow", schedule={"slot_seconds": 1200.0})
    ran = dl2d("train", "--twin", "--gate", "--iterations", "0", "-o", tmp_path / "out", "--json", "-c", config)
    assert ran.status == 0, ran.err
    trial = ran.json["trial"]
    assert trial["current"] == SITE_SCHEDULER
    assert trial["reason"].startswith("there is too little to compare on: 1 day with")
    assert trial["reason"].endswith("do not count)")
    with closing(SqlStore(url)) as store:
        split = trial_on_recorded_days.recorded_days(load_settings(config), store, now=time.time(), seed=0, tell=silent)
        policy = trial_on_recorded_days.site_scheduler(split).policy
        assert (None if policy is None else policy.name) == replayed
        history = store.history(begin, time.time())
        for key, sizes in history.sizes.items():
            given = [entry for entry in store.decisions(key, limit=1000)[::-1] if entry.decided.allocation != NOTHING]
            assert sizes[0] == (given[0].at, given[0].decided.allocation)
            assert sizes[-1][1] == given[-1].decided.allocation
    assert len(history.sizes) >= 20


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws", "no_pictures")
def test_jobs_that_report_no_speeds_do_not_keep_a_version_from_the_gate_in_shadow(
    dl2d: Dl2d, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared: list[GateSettings] = []

    verdicts = [Verdict(passed=False, reason="not surely better whatever the speeds", change=0.0, low=-0.1, high=0.1),
                Verdict(passed=True, reason="it is better", change=-0.1, low=-0.2, high=-0.05)]  # fmt: skip

    def judged(*_: object, settings: GateSettings, **__: object) -> SimpleNamespace:
        compared.append(settings)
        return SimpleNamespace(cases=(), verdict=verdicts[len(compared) - 1], jobs=42, assumed=40)

    monkeypatch.setattr(trial_on_recorded_days, "compare", judged)
    url, begin = store_url(tmp_path), time.time() // DAY * DAY - 6 * DAY
    record(url, load_source(QUIET_DAYS, seed=1).workload, Fifo(), begin=begin, decided_by="observed", reports=False)
    own = with_checkpoint().checkpoint
    write_checkpoint(replace(own, weights={**own.weights, "scorer": own.weights["scorer"] + 1e-3}), tmp_path / "other")
    config = write_config(tmp_path, mode="live", schedule={"slot_seconds": 1200.0}, policy={"name": "dl2"})
    ran = dl2d("policy", "promote", tmp_path / "other", "-c", config)
    assert ran.status == 1
    assert "jobs of fixed size report no speeds and do not count" in ran.err
    config = write_config(tmp_path, mode="shadow", schedule={"slot_seconds": 1200.0}, policy={"name": "dl2"})
    ran = dl2d("policy", "promote", tmp_path / "other", "-c", config)
    assert ran.status == 1
    assert "with assumed speeds of 40 of 42 jobs (no speed reported), which mode canary would measure; " in ran.err
    ran = dl2d("policy", "promote", tmp_path / "other", "-c", config)
    assert ran.status == 0, ran.err
    assert [each.whatever_speeds for each in compared] == [True, True]
    with closing(SqlStore(url)) as store:
        trial, _ = store.registry.trials("dl2")
        (change,) = store.registry.changes("dl2")
    assert trial.reason.endswith("(its recorded sizes), with assumed speeds of 40 of 42 jobs (no speed reported)")
    assert change.reason == f"promoted by hand (passed the gate: {trial.reason})"
    assert ran.out.splitlines()[1] == f"passed the gate: {trial.reason}"


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws", "few_days_suffice", "no_pictures")
def test_a_version_that_is_better_than_the_sites_scheduler_takes_the_place_of_another_in_shadow(
    dl2d: Dl2d, site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdict = Verdict(passed=True, reason="it is better")
    monkeypatch.setattr(
        trial_on_recorded_days,
        "compare",
        lambda *_, **__: SimpleNamespace(cases=(), verdict=verdict, jobs=60, assumed=0),
    )
    config = write_config(tmp_path, mode="shadow", schedule={"slot_seconds": 1200.0})
    digests = []
    for seed in ("1", "2"):
        ran = dl2d("train", "--twin", "--gate", "--iterations", "2", "--seed", seed, "-o", tmp_path / "out", "--json",
                   "-c", config)  # fmt: skip
        assert ran.status == 0, ran.err
        digests.append(ran.json["digest"])
    with closing(SqlStore(site[1])) as store:
        registry = store.registry
        live = registry.live("dl2")
        assert live is not None
        assert live.digest == digests[-1]
        # Compared with the live version it was not.
        for mode, counts in (("shadow", True), ("live", False)):
            settings = load_settings(write_config(tmp_path, mode=mode, schedule={"slot_seconds": 1200.0}))
            present = trial_on_recorded_days.deciding(settings, registry)
            assert (trial_on_recorded_days.passed_trial(settings, registry, live, present) is not None) == counts


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws", "few_days_suffice")
def test_the_papers_policy_learns_from_its_own_slots_and_the_twin(dl2d: Dl2d, tmp_path: Path) -> None:
    """A version that was trained on generated workloads decides for days; then it is trained on what came of that."""
    workload = load_source(DAYS, seed=2).workload
    first = tmp_path / "first"
    ran = dl2d("train", "--design", "dl2-original", "-w", DAYS, "-o", first, "--iterations", "0", "--draws", "2",
               "--no-compare")  # fmt: skip
    assert ran.status == 0, ran.err
    url = store_url(tmp_path)
    begin = time.time() // DAY * DAY - 3 * DAY
    policy = Dl2PaperPolicy(read_checkpoint(first / "checkpoint", policy="dl2-original"), sampled=True)
    # The first two jobs came before the days of the twin.
    record(url, replace(workload, jobs=workload.jobs[:2]), policy, begin=begin - 40 * DAY)
    with closing(SqlStore(url)) as store:
        earlier = store.slots(limit=1000)
    record(url, workload, policy, begin=begin, first_slot=len(earlier) + 1)
    config = write_config(
        tmp_path, schedule={"slot_seconds": 1200.0}, policy={"name": "dl2-original", "checkpoint": str(first)}
    )
    ran = dl2d("policy", "promote", first, "--force", "--reason", "it decided on those days", "-c", config)
    assert ran.status == 0, ran.err
    out = tmp_path / "out"
    ran = dl2d(
        "train", "--twin", "--design", "dl2-original", "--gate", "--iterations", "2", "-o", out, "--json", "-c", config
    )
    assert ran.status == 0, ran.err
    done = ran.json
    assert done["parent"] == policy.checkpoint.digest
    assert (done["days"], done["held_out"]) == (
        [day_name(begin + day * DAY) for day in (-40, 0)], [day_name(begin + DAY)]
    )  # fmt: skip
    # No slot of the day on which versions are compared is learned from.
    with closing(SqlStore(url)) as store:
        learned_from = [each for each in store.slots(limit=1000) if each.at < begin + DAY]
    assert len(learned_from) > len(earlier) > 0
    assert done["live"]["slots"] == len(learned_from)
    assert done["live"]["samples"] > 50
    assert read_checkpoint(out / "checkpoint", policy="dl2-original").digest == done["digest"]
    assert done["trial"]["policy"] == "dl2-original"
    assert "report.md" in {path.name for path in out.iterdir()}
    with closing(SqlStore(url)) as store:
        assert {each.digest for each in store.registry.versions()} == {policy.checkpoint.digest, done["digest"]}


@pytest.mark.slow
def test_the_learner_process_trains_the_papers_policy_on_its_own_slots(tmp_path: Path) -> None:
    """One round, in the learner's process; the gate's result is registered as the daemon does it."""
    url, at = store_url(tmp_path), time.time() // DAY * DAY - 3 * DAY
    start = a_checkpoint(0, network="shared")
    record(url, load_source(DAYS, seed=2).workload, Dl2PaperPolicy(start, sampled=True), begin=at)
    config = write_config(
        tmp_path, schedule={"slot_seconds": 1200.0}, policy={"name": "dl2-original"}, learning={"minutes": 0.001}
    )
    # Its priority is the lowest: what takes half a minute alone takes many beside other tests.
    process = (
        "import functools, pathlib, sys; "
        "from dl2d.cli.policy_trials import learner_process, trial_on_recorded_days as trial; "
        "trial.too_little_to_compare = lambda *_: None; "
        "trial.split_history = functools.partial(trial.split_history, draws=4, tests=4); "
        "learner_process.main(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", process, str(config)]
    with closing(SqlStore(url)) as store:
        registry = store.registry
        decides = keep_version(start, load_settings(config).versions_path, registry, at=at, origin="a test")
        registry.change(decides.policy, decides.digest, VersionState.LIVE, at=at, by="ann", reason="a test")
        learner = Learner(registry, command, clock=time.time, mode=lambda: Mode.LIVE)
        learner.start("dl2-original", 300.0)
        while registry.runs()[0].state is RunState.RUNNING:
            time.sleep(0.1)
        learner.close()
        (run,) = registry.runs()
        assert (run.state, run.policy) == (RunState.FINISHED, "dl2-original"), run.note
        (learned,) = (version for version in registry.versions("dl2-original") if version.parent == start.digest)
        (trial,) = (each for each in registry.trials("dl2-original") if each.candidate == learned.digest)
        assert trial.current == start.digest
        assert run.note.startswith(f"version {learned.digest[:12]} ")
    live = read_checkpoint(Path(learned.folder), policy="dl2-original").training["live"]
    assert live["slots"] > 20
    assert live["samples"] > 50


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("imitates", [True, False])
def test_after_the_imitation_of_a_scheduler_that_lets_jobs_wait_each_job_gets_its_minimum_size(
    dl2d: Dl2d, site: tuple[Path, str], tmp_path: Path, imitates: bool
) -> None:
    start = replace(
        a_checkpoint(0, network="shared", first_bundles=False), training={"supervised": {}} if imitates else {}
    )
    write_checkpoint(start, tmp_path / "start")
    config = write_config(
        tmp_path, store={"url": site[1]}, schedule={"slot_seconds": 1200.0},
        policy={"name": "dl2-original", "checkpoint": str(tmp_path / "start")},
    )  # fmt: skip
    out = tmp_path / "out"
    ran = dl2d("train", "--twin", "--design", "dl2-original", "--iterations", "1", "-o", out, "--json", "-c", config)
    assert ran.status == 0, ran.err
    learned = read_checkpoint(out / "checkpoint", policy="dl2-original")
    assert learned.training["settings"]["first_bundles"] is imitates


@pytest.mark.slow
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.usefixtures("few_draws", "few_days_suffice")
def test_a_candidate_that_leaves_jobs_waiting_on_an_idle_cluster_is_rejected_without_a_comparison(
    dl2d: Dl2d, site: tuple[Path, str], tmp_path: Path, gate: bool
) -> None:
    start = a_checkpoint(0, network="shared", first_bundles=False)
    # It ends its decision before anything else, after a round of learning as before.
    void = {"policy.void.bias": np.full(1, 1000.0, dtype=np.float32)}
    write_checkpoint(replace(start, weights={**start.weights, **void}), tmp_path / "start")
    config = write_config(
        tmp_path, store={"url": site[1]}, schedule={"slot_seconds": 1200.0},
        policy={"name": "dl2-original", "checkpoint": str(tmp_path / "start")},
    )  # fmt: skip
    out = tmp_path / "out"
    options = ("--iterations", "1", "-o", out, "--json", "-c", config, *(["--gate"] if gate else []))
    ran = dl2d("train", "--twin", "--design", "dl2-original", *options)
    assert not out.exists()
    if not gate:
        assert ran.status == 1
        assert "dl2d: the trained policy leaves " in ran.err
        assert "; nothing was written" in ran.err
        return
    assert ran.status == 0, ran.err
    assert ran.json["checkpoint"] is None
    trial = ran.json["trial"]
    assert not trial["passed"]
    assert " jobs waiting on an idle cluster " in trial["reason"]
    assert trial["cases"] == []
    with closing(SqlStore(site[1])) as store:
        assert [each.state for each in store.registry.versions()] == [VersionState.REJECTED]


@pytest.mark.usefixtures("few_draws")
def test_what_is_learned_from_a_part_of_the_jobs_and_nodes_decides_on_the_whole_site(
    dl2d: Dl2d, site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Days of more jobs than are played are trained on with a share of the nodes: of a large site, below a tenth."""
    monkeypatch.setattr(split_of_recorded_days, "_MAX_TRAINED", 4)
    out = tmp_path / "out"
    ran = dl2d("train", "--twin", "--iterations", "1", "-o", out, "--json", "-c", site[0])
    assert ran.status == 0, ran.err
    ranges = read_checkpoint(out / "checkpoint", policy="dl2").training[INPUT_RANGES]
    assert ranges["jobs"][1] >= ran.json["jobs"] > 8


def test_the_papers_policy_needs_a_checkpoint_to_learn_on_from(
    dl2d: Dl2d, site: tuple[Path, str], tmp_path: Path
) -> None:
    ran = dl2d("train", "--twin", "--design", "dl2-original", "-o", tmp_path / "out", "-c", site[0])
    assert ran.status == 1
    assert "dl2-original: name a checkpoint" in ran.err
