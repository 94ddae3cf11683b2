"""``dl2d sql`` and ``dl2d shadow`` on a store with recorded days."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from cli.conftest import Dl2d, store_url, write_config
from filled_store import fill
from migrated import sqlite_store
from recorded_site import record

from dl2d.cli.shadow import savings_sentence, sentence
from dl2d.policies.fifo import Fifo
from dl2d.simulation.workload.workload_source_by_name import load_source

DAY = 86_400
#: More than a week of one node.
WEEK = "generator:poisson?nodes=1&jobs=110&rate=0.2&median_seconds=3000&most_gpus=4&slot_seconds=1200"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    url = sqlite_store(tmp_path / "recorded.sqlite")
    fill(url, days=2, jobs_per_day=30, now=time.time())
    return write_config(tmp_path, store={"url": url})


def test_a_query_prints_a_table_or_json(dl2d: Dl2d, config: Path) -> None:
    query = "SELECT resource, capacity, NULL AS missing FROM slot_resources WHERE slot = 1 ORDER BY resource"
    ran = dl2d("sql", "-c", config, query)
    assert ran.out.splitlines() == [
        "resource  capacity  missing", "cpu            512", "gpu            128", "memory     4194304",
    ]  # fmt: skip
    assert dl2d("sql", "-c", config, "--json", query).json[0] == {"resource": "cpu", "capacity": 512.0, "missing": None}


def test_a_newline_in_a_value_begins_no_other_row(dl2d: Dl2d, config: Path) -> None:
    ran = dl2d("sql", "-c", config, "SELECT 'one' || char(10) || 'more' AS name, 1 AS number")
    assert ran.out.splitlines() == ["name        number", "one / more       1"]


def test_json_has_null_for_what_is_not_finite(dl2d: Dl2d, config: Path) -> None:
    query = "SELECT 1e400 AS high, -1e400 AS low, 1.5 AS finite"
    assert dl2d("sql", "-c", config, "--json", query).json == [{"high": None, "low": None, "finite": 1.5}]


def test_a_query_from_standard_input(dl2d: Dl2d, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("SELECT count(*) AS jobs FROM jobs"))
    assert dl2d("sql", "-c", config, "--json").json == [{"jobs": 60}]


def test_a_shell_has_no_json(dl2d: Dl2d, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    ran = dl2d("sql", "-c", config, "--json")
    assert (ran.status, "--json needs a query" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("SELCT 1", 'near "SELCT": syntax error'),
        ("DELETE FROM jobs", "attempt to write a readonly database"),
        ("SELECT 1; DROP TABLE jobs", "You can only execute one statement at a time"),
        ("ATTACH 'attached.sqlite' AS other", "too many attached databases - max 0"),
        ("PRAGMA query_only = OFF", "returns no rows: write a SELECT statement"),
    ],
)
def test_what_is_no_query_is_wrong_usage_and_changes_nothing(
    dl2d: Dl2d, config: Path, query: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = set(tmp_path.iterdir())
    ran = dl2d("sql", "-c", config, query)
    assert set(tmp_path.iterdir()) == files
    assert ran.status == 2
    assert ran.err.startswith(f"dl2d: QUERY: {problem}")
    assert dl2d("sql", "-c", config, "--json", "SELECT count(*) AS jobs FROM jobs").json == [{"jobs": 60}]


def test_a_database_that_is_missing(dl2d: Dl2d, tmp_path: Path) -> None:
    config = write_config(tmp_path, store={"url": f"sqlite:///{tmp_path}/none.sqlite"})
    ran = dl2d("sql", "-c", config, "SELECT 1")
    assert (ran.status, ran.out) == (1, "")
    assert "there is no database at" in ran.err
    assert "the daemon's first start or `dl2d db upgrade` creates it" in ran.err


def test_shadow_counts_agreement_and_lists_the_jobs_that_differ_most(dl2d: Dl2d, config: Path) -> None:
    found = dl2d("shadow", "-c", config, "--json", "-n", "3").json
    (counts,) = found["policies"]
    assert (counts["policy"], counts["policy_version"]) == ("dl2", "a" * 12)
    assert counts["same"] + counts["more"] + counts["less"] + counts["other"] == counts["decisions"]
    assert min(counts["same"], counts["more"], counts["less"]) > 0
    assert 0 < counts["waited"] < counts["same"]
    different = [job["different"] for job in found["jobs"]]
    assert len(different) == 3
    assert different == sorted(different, reverse=True)
    assert found["saved"]["change"] is None
    ran = dl2d("shadow", "-c", config)
    first, second, *_ = ran.out.splitlines()
    assert second.startswith(
        f"saved by {found['saved']['policy']} {found['saved']['policy_version']}, which made none of"
    )
    assert "estimated by replays of recorded days: jobs with measured or assumed speeds" in second
    assert "saved by" not in dl2d("shadow", "-c", config, "--no-saved").out
    assert first.startswith(f"dl2 {'a' * 12}: of {counts['decisions']} decisions on {counts['jobs']} jobs, the same in")
    assert f"more in {counts['more']}, less in {counts['less']}" in first


def test_one_decision_on_one_job_is_told_in_the_singular() -> None:
    counts = {"same": 0, "waited": 0, "more": 1, "less": 0, "other": 0, "started_earlier": 0, "started_soon": 0}
    found = {"policy": "drf", "policy_version": "1", "decisions": 1, "jobs": 1, **counts}
    assert sentence(found) == "drf 1: of 1 decision on 1 job, the same in 0 (0 %), more in 1, less in 0"


@pytest.mark.parametrize(("soon", "told"), [(0, ""), (2, " in 2 of these"), (3, "")])
def test_starts_that_the_scheduler_made_soon_are_told_apart(soon: int, told: str) -> None:
    """Slots are recorded before the scheduler has gone through what came."""
    counts = {"same": 5, "waited": 0, "more": 3, "less": 0, "other": 0, "started_earlier": 3, "started_soon": soon}
    found = sentence({"policy": "drf", "policy_version": "1", "decisions": 8, "jobs": 3, **counts})
    as_scheduler = f", as the site's scheduler did{told} within a minute" if soon else ""
    assert found.endswith(f"; in 3 it would have started a job that waited{as_scheduler}")


@pytest.mark.parametrize(
    ("decisions", "same", "agreed"),
    [
        (100, 90, "90 %; 83 % without the 40 in which the job waits either way"),
        (40, 40, "100 %; the job waits either way in all of them"),
    ],
)
def test_jobs_that_wait_either_way_are_counted_by_themselves(decisions: int, same: int, agreed: str) -> None:
    """Slurm may not start them whatever is free, so that they say nothing of how well the decisions agree."""
    counts = {"same": same, "waited": 40, "more": 0, "less": decisions - same, "other": 0}
    counts |= {"started_earlier": 0, "started_soon": 0}
    told = sentence({"policy": "drf", "policy_version": "1", "decisions": decisions, "jobs": 7, **counts})
    assert f"the same in {same} ({agreed}), more in 0" in told


@pytest.mark.parametrize(
    ("decided", "note"),
    [
        (["a2 slot_seconds=300.0"], ""),
        (["a2", "b1"], ", which made only some of the decisions counted above"),
        (["b1"], ", which made none of the decisions counted above"),
    ],
)
def test_what_was_saved_is_told_of_the_version_that_was_replayed(decided: list[str], note: str) -> None:
    saved = {"policy": "dl2", "policy_version": "a2", "better": False, "reason": "as said", "site_seconds": None,
             "change": None}  # fmt: skip
    told = savings_sentence(saved, [{"policy": "dl2", "policy_version": version} for version in decided])
    assert told == f"saved by dl2 a2{note}, estimated by replays of recorded days: as said"


@pytest.mark.parametrize(
    ("source", "seed", "jobs"),
    [
        (
            "generator:poisson?nodes=1&jobs=24&rate=0.25&median_seconds=3000&most_gpus=4&slot_seconds=1200",
            2,
            "2 days with",
        ),
        pytest.param(WEEK, 4, "8 days with 110 jobs", marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
    ids=["two-days", "a-week"],
)
def test_shadow_says_what_dl2d_would_have_saved(
    dl2d: Dl2d, request: pytest.FixtureRequest, tmp_path: Path, source: str, seed: int, jobs: str
) -> None:
    """Users' jobs run whole, as they came."""
    if jobs.startswith("2 days"):
        request.getfixturevalue("few_draws")
    workload = load_source(source, seed=seed).workload
    days = max(job.submit_slot for job in workload.jobs) * workload.slot_seconds // DAY + 3
    record(store_url(tmp_path), workload, Fifo(), begin=time.time() // DAY * DAY - days * DAY, decided_by="observed")
    config = write_config(tmp_path, mode="shadow", policy={"name": "dl2"}, schedule={"slot_seconds": 1200.0},
                          learning={"gate_min_days": 2, "gate_min_jobs": 10})  # fmt: skip
    saved = dl2d("shadow", "-c", config, "--days", "99", "--json").json["saved"]
    assert jobs in saved["reason"]
    assert "compared with the site's scheduler (its recorded sizes)" in saved["reason"]
    assert saved["dl2d_seconds"] < saved["site_seconds"]
    if jobs.startswith("2 days"):
        since_second_day = days - 1 + time.time() % DAY / DAY - 0.01
        shorter = dl2d("shadow", "-c", config, "--days", f"{since_second_day}", "--json").json["saved"]
        assert shorter["days"] == saved["days"][1:]
        # One day is too little to compare on.
        assert (shorter["better"], shorter["change"], shorter["site_seconds"]) == (False, None, None)
        assert "on average" not in savings_sentence(shorter, [])
        return
    # It gives sizes at which no speed was measured.
    assert saved["low"] < saved["change"] < 0 < saved["high"]
    assert not saved["better"]
    told = savings_sentence(saved, [])
    assert "not surely less than 2 % worse" in told
    assert "over days and speeds) on 8 days with 110 jobs and 16 draws of speeds, compared" in told
    assert told.endswith(" h there on average")


def test_shadow_before_anything_was_recorded(dl2d: Dl2d, tmp_path: Path) -> None:
    config = write_config(tmp_path, store={"url": sqlite_store(tmp_path / "empty.sqlite")})
    assert dl2d("shadow", "-c", config).out == "no decision was recorded in mode shadow in the last 7 days\n"
