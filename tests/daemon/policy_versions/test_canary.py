"""Mode canary of a daemon: its rule, what becomes of the version, and what survives a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon.policy_versions.test_active_version import another
from structlog.testing import capture_logs

from dl2d.config.settings import CanarySettings, Settings
from dl2d.core.daemon_mode_and_canary import Canary, CanaryJob, CanaryState
from dl2d.core.errors import ConfigError, StoreUnavailable
from dl2d.core.jobs import JobKey, JobState
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.core.policy_registry import VersionState
from dl2d.core.store import JobChange
from dl2d.daemon.policy_versions.active_version import ActiveVersion, keep_version
from dl2d.daemon.policy_versions.canary_comparison import compare_groups, judge_canary
from dl2d.daemon.policy_versions.canary_run import CanaryRun
from dl2d.plugins import load_policy
from dl2d.policies.common.checkpoint import Checkpoint, write_checkpoint
from dl2d.store.sql_store import SqlStore
from dl2d.testing import make_job

DAY = 86_400
BEGIN = 20_000 * DAY
KINDS = [(TrainingKind.of(make_job(model=model).request), "samples") for model in ("bert", "vgg-16")]
CANARY = Canary(policy="dl2", version="1", fallback="drf", share=0.5, began_at=BEGIN)


def ended(day: int, seconds: float, *, in_group: bool, kind: int = 0, **changes: Any) -> CanaryJob:
    """A job that was submitted at noon of a day."""
    submitted = BEGIN + day * DAY + DAY // 2
    job = CanaryJob(
        in_group=in_group, kind=KINDS[kind], work=100.0, submitted=submitted, ended_at=submitted + seconds,
        finished=True,
    )  # fmt: skip
    return replace(job, **changes)


def days(*ratios: float, jobs: int = 10) -> list[CanaryJob]:
    """On each day so many jobs of each group; those of the policy take the given part of the others' time."""
    found = []
    for day, ratio in enumerate(ratios):
        for number in range(jobs):
            load = 1000.0 * (day + 1) * (1 + number)  # days and jobs differ, which must not matter
            found += [ended(day, load, in_group=False), ended(day, load * ratio, in_group=True)]
    return found


FASTER, SLOWER = days(0.70, 0.72, 0.71, 0.69), days(1.40, 1.42, 1.41, 1.39)
#: Jobs, day of the verdict, how the canary ends (``.``: it goes on), and the beginning of the reason.
VERDICTS: dict[str, tuple[list[CanaryJob], float, str, str]] = {
    "no jobs": ([], 2, ".", ""),
    "surely faster": (FASTER, 5, "promoted", "surely faster than drf: completion time -29.5% (-"),
    "surely slower": (SLOWER, 5, "withdrawn", "surely slower than drf: completion time +40.5% (+"),
    "faster on one day": (days(0.5), 5, ".", ""),
    "faster, too few jobs": (days(0.70, 0.72, 0.71, 0.69, jobs=5), 5, ".", ""),
    "slower, too few jobs": (days(1.40, 1.42, 1.41, 1.39, jobs=5), 5, "withdrawn", "surely slower"),
    "sometimes faster": (days(0.5, 1.5, 0.6, 1.4), 5, ".", ""),
    "the same": (days(1.0, 1.0, 1.0, 1.0), 5, ".", ""),
    "the last day is not over": (days(1.40, 1.42), 1.9, ".", ""),
    "a job has not ended": (
        [*days(1.40, 1.42), ended(1, 1.0, in_group=False, ended_at=None, finished=False)], 5, ".", ""
    ),
    "a job failed": ([*FASTER, ended(1, 1e5, in_group=True, finished=False)], 5, "promoted", "surely faster"),
    "another kind in one group": ([*FASTER, ended(1, 1e9, in_group=True, kind=1)], 5, "promoted", "surely faster"),
    "longer jobs of a kind in both": (
        [*FASTER, *(ended(day, 1e7, in_group=side, kind=1) for day in range(4) for side in (True, False))],
        5, "promoted", "surely faster",
    ),
    "no result in 14 days": (
        days(0.5, 1.5, 0.6, 1.4), 14, "withdrawn", "no result after 14 days (canary.max_days): completion time"
    ),
    "nothing in 14 days": ([], 14, "withdrawn", "no result after 14 days (canary.max_days): nothing can be compared"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_rule(name: str) -> None:
    jobs, day, state, reason = VERDICTS[name]
    now = BEGIN + day * DAY
    found = compare_groups(jobs, now, max_days=14)
    verdict = judge_canary(CANARY, found, CanarySettings(min_jobs=30, max_days=14), now)
    assert ("." if verdict is None else verdict[0]) == state
    assert ("" if verdict is None else verdict[1]).startswith(reason)


def test_the_interval_holds_for_all_days_on_which_it_is_looked_at() -> None:
    once, often = (compare_groups(days(0.7, 0.9, 0.8), BEGIN + 5 * DAY, max_days=most) for most in (1, 14))
    assert once.change == often.change
    assert often.low is not None
    assert once.low is not None
    assert often.low < once.low  # t of 2 degrees of freedom at 99.6 % in place of 95 %


def test_jobs_that_run_for_weeks_keep_their_days_from_counting_for_half_of_the_time_only() -> None:
    """From then on they have half of the canary's time, in both groups: those of the others are no shorter for it."""
    endless = [ended(day, 0.0, in_group=day < 2, ended_at=None, finished=False) for day in range(3)]
    lost = ended(0, 8 * DAY, in_group=False, finished=False)  # it was running after half of the time
    jobs = [*FASTER, *endless, lost]
    assert compare_groups(jobs, BEGIN + 7 * DAY, max_days=14).days == 1
    found, later = (compare_groups(jobs, BEGIN + day * DAY, max_days=14) for day in (10, 13))
    assert (found.days, found.jobs, found.others) == (4, 42, 42)
    assert found == later
    known = [replace(job, ended_at=job.submitted + 7 * DAY, finished=True) for job in (*endless, lost)]
    as_if = compare_groups([*FASTER, *known], BEGIN + 10 * DAY, max_days=14)
    assert (as_if.change, as_if.low, as_if.high) == (found.change, found.low, found.high)


class Site:
    """A daemon's canary on a store, with a clock that is set by hand."""

    def __init__(self, folder: Path, store: SqlStore) -> None:
        self.folder, self.store, self.now = folder, store, float(BEGIN)
        self.changes: dict[str, Any] = {}

    def start(self, mode: str = "canary", **policy: Any) -> CanaryRun:
        settings = Settings.model_validate(
            {"state_dir": self.folder / "state", "mode": mode, "policy": {"name": "dl2", **policy}, **self.changes}
        )
        self.active = ActiveVersion(settings, self.store, lambda: self.now)
        return CanaryRun(settings, self.store, self.active, load_policy("drf"), lambda: self.now)

    def candidate(self, number: int) -> tuple[Checkpoint, Path]:
        checkpoint = another(number)
        folder = self.folder / f"candidate-{number}"
        write_checkpoint(checkpoint, folder)
        return checkpoint, folder

    def state(self, checkpoint: Checkpoint) -> VersionState:
        return next(each.state for each in self.store.registry.versions("dl2") if each.digest == checkpoint.digest)

    def happened(self, run: CanaryRun, jobs: list[CanaryJob]) -> None:
        """Jobs came and ended, as their records in the store say."""
        assert run.canary is not None
        for number, each in enumerate(jobs):
            job = make_job(number, submitted=int(each.submitted), epochs=1, samples_per_epoch=100)
            self.store.add_job(job)
            self.store.assign_canary(run.canary.number, {job.key: each.in_group})
            if each.ended_at is not None:
                self.store.change_job(job.key, JobChange(state=JobState.FINISHED), each.ended_at)
        self.now = BEGIN + 5 * DAY


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with closing(SqlStore("sqlite://")) as store:
        yield Site(tmp_path, store)


def test_a_candidate_that_is_surely_faster_is_promoted_and_may_go_live(site: Site) -> None:
    checkpoint, folder = site.candidate(1)
    run = site.start(checkpoint=folder)
    assert site.state(checkpoint) is VersionState.CANDIDATE
    assert run.canary is not None
    assert run.canary.group == "10 % of the jobs"
    site.happened(run, FASTER)
    with capture_logs() as logs:
        found = run.judge()
    assert found is not None
    assert (found.jobs, found.others, found.days) == (40, 40, 4)
    assert run.canary.state is CanaryState.PROMOTED
    assert [(line["event"], line["decides"]) for line in logs] == [("canary promoted", "dl2")]
    assert site.state(checkpoint) is VersionState.LIVE
    change = site.store.registry.changes("dl2")[0]
    assert change.reason.startswith("canary 1: surely faster than drf: completion time -29.5%")
    again = site.start(checkpoint=folder)
    assert again.canary == run.canary  # it stays promoted
    assert site.start("live", checkpoint=folder).canary is None
    assert site.active.policy.version.startswith(checkpoint.digest[:12])


def test_a_candidate_that_is_surely_slower_is_withdrawn_for_good(site: Site) -> None:
    checkpoint, folder = site.candidate(1)
    run = site.start(checkpoint=folder)
    site.happened(run, SLOWER)
    with capture_logs() as logs:
        run.judge()
    assert run.canary is not None
    assert run.canary.state is CanaryState.WITHDRAWN
    assert [(line["event"], line["log_level"], line["decides"]) for line in logs] == [
        ("canary withdrawn", "error", "drf")
    ]
    assert site.state(checkpoint) is VersionState.REJECTED
    assert site.start(checkpoint=folder).canary == run.canary  # after a restart as well
    site.store.last_slot_number = lambda: 1  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="has not passed the gate"):
        site.start("live", checkpoint=folder)


def test_a_live_version_that_is_withdrawn_makes_way_for_the_one_before_which_is_tried_in_turn(site: Site) -> None:
    site.start("live")
    shipped = site.store.registry.live("dl2")
    _, folder = site.candidate(1)
    run = site.start(checkpoint=folder)
    site.active.promote("by hand")
    assert site.store.registry.live("dl2") != shipped
    assert run.withdraw("5 consecutive decisions failed")
    assert site.store.registry.live("dl2") == replace(shipped, state=VersionState.LIVE)  # type: ignore[type-var]
    assert site.active.refreshed() is not None
    run.begin()
    assert run.canary is not None
    assert (run.canary.number, run.canary.state) == (2, CanaryState.RUNNING)
    reasons = [each.reason for each in site.store.canaries()]
    assert reasons == ["", "5 consecutive decisions failed"]


def test_a_candidate_that_is_withdrawn_makes_way_for_the_live_version(site: Site) -> None:
    site.start()
    shipped = site.active.policy.version
    checkpoint, folder = site.candidate(1)
    run = site.start(checkpoint=folder)
    assert run.withdraw("it left 3 jobs waiting")
    assert site.state(checkpoint) is VersionState.REJECTED
    taken = site.active.refreshed()
    assert taken is not None
    assert taken.version == shipped
    run.begin()
    assert run.canary is not None
    assert (run.canary.version, run.canary.state) == (shipped, CanaryState.RUNNING)
    assert site.start(checkpoint=folder).canary == run.canary  # after a restart as well


def test_a_canary_goes_on_when_the_live_version_can_be_read_again(site: Site) -> None:
    checkpoint, folder = site.candidate(1)
    first = site.start(checkpoint=folder)
    site.active.promote("by hand")
    (version,) = (each for each in site.store.registry.versions("dl2") if each.digest == checkpoint.digest)
    Path(version.folder).rename(folder.with_name("away"))
    broken = site.start()
    assert (broken.canary, broken.judge()) == (None, None)
    folder.with_name("away").rename(version.folder)
    assert site.start().canary == first.canary
    assert [each.state for each in site.store.canaries()] == [CanaryState.RUNNING]


def test_a_canary_does_not_replace_a_version_that_was_promoted_meanwhile(site: Site) -> None:
    site.start("live")
    checkpoint, folder = site.candidate(1)
    run = site.start(checkpoint=folder)
    site.happened(run, FASTER)
    other, _ = site.candidate(2)
    registry = site.store.registry
    kept = keep_version(other, folder.parent / "versions", registry, at=site.now, origin="ann's")
    registry.change("dl2", kept.digest, VersionState.LIVE, at=site.now, by="ann", reason="by hand")
    assert run.judge() is None
    live = registry.live("dl2")
    assert live is not None
    assert live.digest == other.digest
    assert site.state(checkpoint) is VersionState.CANDIDATE


def test_a_version_whose_canary_was_withdrawn_does_not_stay_live_for_a_store_that_was_locked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.start("live")
    shipped = site.store.registry.live("dl2")
    checkpoint, folder = site.candidate(1)
    run = site.start(checkpoint=folder)
    site.active.promote("by hand")
    registry = site.store.registry

    def locked(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("another program holds the database's lock")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "roll_back", locked)
        assert not run.withdraw("it failed")
    assert site.state(checkpoint) is VersionState.LIVE
    assert run.withdraw("it failed")
    live = registry.live("dl2")
    assert live is not None
    assert shipped is not None
    assert live.digest == shipped.digest


def test_a_restart_goes_on_and_another_group_or_mode_begins_anew(site: Site) -> None:
    first = site.start().canary
    assert first is not None
    assert site.start().canary == first
    site.changes = {"canary": {"share": 0.2}}
    second = site.start().canary
    assert second is not None
    assert second.number == 2
    site.now += 60
    assert site.start("live").canary is None
    third = site.start().canary
    assert third is not None
    assert third.number == 3
    assert [(each.state, each.reason) for each in site.store.canaries()] == [
        (CanaryState.RUNNING, ""),
        (CanaryState.STOPPED, "mode live"),
        (CanaryState.STOPPED, "another version, fallback or group"),
    ]


def test_jobs_from_before_the_canary_are_not_compared(site: Site) -> None:
    run = site.start()
    assert run.canary is not None
    early = make_job(1, submitted=BEGIN - 1)
    site.store.add_job(early)
    key = JobKey("test", "1", BEGIN - 1)
    assert site.store.assign_canary(1, {key: True}) == {key}
    assert site.store.canary_jobs(run.canary) == ()
