"""What is older than the site keeps it is deleted, in small steps, after it can be exported."""

from __future__ import annotations

import base64
import csv
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filled_store import fill
from migrated import sqlite_store
from sqlalchemy import text
from store.samples import a_job, a_slot, starts

from dl2d.core.cluster import TaskState
from dl2d.core.errors import RequestError
from dl2d.core.jobs import JobState, Progress
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.core.store import JobChange, RetentionTimes, TaskChange
from dl2d.daemon.retention_thread import prune
from dl2d.store import retention
from dl2d.store.connections_and_transactions import Database, StoreLocation
from dl2d.store.export import export, exportable
from dl2d.store.sql_store import SqlStore
from dl2d.store.tables.row_mapping import Base

DAY = 86_400.0
NOW = 1_700_000_000.0 + 100 * DAY


def rows(store: SqlStore, table: str) -> int:
    with store._database.reading("counting") as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


def pruned(store: SqlStore, **keep: float) -> list[int]:
    """Rows deleted in each step."""
    steps = []
    while step := store.prune(RetentionTimes(**{name: days * DAY for name, days in keep.items()}), NOW):
        steps.append(step)
    return steps


def test_nothing_is_deleted_unless_the_site_says_so(store: SqlStore) -> None:
    store.add_job(job := a_job())
    store.report_progress(job.key, Progress(at=1.0))
    assert pruned(store) == []
    assert len(store.series(job.key)) == 1


def test_progress_is_deleted_by_age_in_steps_and_what_was_measured_stays(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_ROWS", 4)
    for number in (1, 2):
        store.add_job(job := a_job(number))
        for day in range(10):
            said = Progress(at=NOW - (10 - day) * DAY, loss=0.5, samples_per_second=9.0, workers=1, ps=1)
            store.report_progress(job.key, said)
    speeds, losses = store.job_speeds([job.key]), store.losses([job.key])
    assert pruned(store, progress=3.5) == [4, 3, 4, 3]
    assert [NOW - point.at for point in store.series(job.key)] == [3 * DAY, 2 * DAY, DAY]
    assert (store.job_speeds([job.key]), store.losses([job.key])) == (speeds, losses)


def test_decisions_and_slots_have_their_own_ages_and_the_newest_slot_stays(store: SqlStore) -> None:
    store.add_job(job := a_job())
    first = int(a_slot(0, ()).at)
    for number in range(1, 13):
        store.record_slot(a_slot(number, (job,)))
    keep = {"decisions": (NOW - first - 4.5) / DAY, "slots": (NOW - first - 2.5) / DAY}
    pruned(store, **keep)
    assert [slot.number for slot in store.slots()] == list(range(12, 2, -1))
    assert [entry.slot for entry in store.decisions(job.key)] == list(range(12, 4, -1))
    pruned(store, slots=1.0)
    assert [slot.number for slot in store.slots()] == [12]
    assert store.last_slot_number() == 12
    store.record_slot(a_slot(13, (job,)))


def test_jobs_that_ended_long_ago_go_with_all_that_is_theirs(store: SqlStore) -> None:
    for number, ended in ((1, 50), (2, 50), (3, 5), (4, None)):
        store.add_job(job := a_job(number))
        store.ask_tasks(starts(job, workers=2), NOW - 60 * DAY)
        store.report_progress(job.key, Progress(at=NOW - 55 * DAY, loss=1.0, workers=1, samples_per_second=1.0))
        if ended is not None:
            store.change_job(job.key, JobChange(state=JobState.FINISHED), NOW - ended * DAY)
        if number != 2:  # a task of the second still runs
            store.change_tasks([TaskChange(job.key, f"worker-{each}", TaskState.RELEASED) for each in (0, 1)], NOW)
    store.record_slot(a_slot(1, store.jobs(live=False)))
    pruned(store, jobs=10.0)
    assert [job.key.id for job in store.jobs(live=False)] == ["2", "3", "4"]
    assert {table: rows(store, table) for table in ("tasks", "progress", "decisions", "resizes")} == {
        "tasks": 6, "progress": 3, "decisions": 3, "resizes": 10,
    }  # fmt: skip
    assert store.slot(1) is not None


def test_speeds_of_kinds_that_were_not_measured_for_long_go(store: SqlStore) -> None:
    """Those of a kind that trains stay at all sizes."""
    request = a_job().request
    rare, frequent = (
        a_job(number, request=replace(request, model=model)) for number, model in enumerate(["rare", "frequent"])
    )
    for job, days in ((rare, [50, 45, 30]), (frequent, [50, 45, 5])):
        store.add_job(job)
        for workers, ago in enumerate(days, start=1):
            store.report_progress(job.key, Progress(at=NOW - ago * DAY, workers=workers, samples_per_second=1.0))
    kinds = [TrainingKind.of(job.request) for job in (rare, frequent)]
    before = {each.kind: each.points for each in store.speeds(kinds)}
    assert pruned(store, jobs=25.0) == [3]
    assert {each.kind: each.points for each in store.speeds(kinds)} == {kinds[1]: before[kinds[1]]}


def test_the_file_becomes_smaller(tmp_path: Path) -> None:
    with closing(SqlStore(sqlite_store(tmp_path / "x.sqlite"), progress_seconds=0)) as store:
        store.add_job(job := a_job())
        for number in range(100):
            store.report_progress(job.key, Progress(at=NOW - 100 * DAY + number, workers=number))
            store.record_slot(a_slot(number + 1, (job,)))
        with store._database.writing("checkpoint") as connection:
            pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        prune(store, RetentionTimes(progress=DAY, slots=DAY, decisions=DAY), lambda: NOW, threading.Event())
        with store._database.reading("looking") as connection:
            assert connection.execute(text("PRAGMA page_count")).scalar_one() < 0.8 * pages
        assert store.size() > 0


def test_it_ends_between_two_steps_when_the_daemon_stops(store: SqlStore) -> None:
    store.add_job(job := a_job())
    store.report_progress(job.key, Progress(at=1.0))
    stopping = threading.Event()
    stopping.set()
    prune(store, RetentionTimes(progress=DAY), lambda: NOW, stopping)
    assert len(store.series(job.key)) == 1


@pytest.fixture
def filled(kept_url: str) -> Iterator[Database]:
    fill(kept_url, days=1, jobs_per_day=12, now=NOW)
    database = Database(StoreLocation.parse(kept_url))
    yield database
    database.close()


def test_all_tables_but_secrets_are_exported_page_by_page(
    filled: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dl2d.store.export._PAGE", 7)
    told: list[tuple[str, int]] = []
    folder = tmp_path / "out"
    counted = export(filled, folder, done=lambda *one: told.append(one))
    assert counted.keys() == set(Base.metadata.tables)
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.csv" for name in counted)
    with filled.reading("counting") as connection:
        for name, count in counted.items():
            assert count == connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one()
    found: dict[str, list[dict[str, Any]]] = {}
    for name in counted:
        with (folder / f"{name}.csv").open(newline="") as stream:
            found[name] = list(csv.DictReader(stream))
        assert len(found[name]) == counted[name]
        assert all(set(row) == {column.name for column in exportable()[name]} for row in found[name])
    assert "launch" not in found["jobs"][0]
    assert json.loads(found["jobs"][0]["request"])["name"] == "train-1"
    snapshot = base64.b64decode(found["slots"][0]["snapshot"])
    assert json.loads(snapshot if snapshot[:1] == b"{" else zlib.decompress(snapshot))["slot"] == 1
    assert ("progress", counted["progress"]) in told


def test_an_export_of_one_table_and_of_one_that_is_not_there(filled: Database, tmp_path: Path) -> None:
    assert list(export(filled, tmp_path / "new", ["jobs"], done=lambda *_: None)) == ["jobs"]
    with pytest.raises(RequestError, match="there is no table job; the tables are canaries, "):
        export(filled, tmp_path, ["job"], done=lambda *_: None)
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"File exists|Not a directory"):
        export(filled, tmp_path / "file", done=lambda *_: None)


def test_an_export_writes_over_nothing(filled: Database, tmp_path: Path) -> None:
    (folder := tmp_path / "out").mkdir()
    (folder / "jobs.csv").write_text("of last month")
    with pytest.raises(RequestError, match=f"folder: {folder} is not empty; name an empty or a new folder"):
        export(filled, folder, done=lambda *_: None)
    assert [(each.name, each.read_text()) for each in folder.iterdir()] == [("jobs.csv", "of last month")]


def test_an_export_follows_no_link_that_appears_in_its_folder(filled: Database, tmp_path: Path) -> None:
    folder, victim = tmp_path / "new", tmp_path / "victim"
    victim.write_text("kept")

    def plant(table: str, _rows: int) -> None:
        if table != "tasks" and not (folder / ".tasks.csv.part").is_symlink():
            (folder / ".tasks.csv.part").symlink_to(victim)

    with pytest.raises(RequestError, match="File exists"):
        export(filled, folder, ["jobs", "tasks"], done=plant)
    assert victim.read_text() == "kept"
