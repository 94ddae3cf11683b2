"""The registry of learned policies, on each database."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2d.core.errors import LiveVersionChanged, RegistryError
from dl2d.core.policy_registry import RunState, Trial, TrialCase, Version, VersionState
from dl2d.store.sql_store import SqlStore


def a_version(letter: str, policy: str = "dl2", **fields: Any) -> Version:
    given = {"origin": "twin", "at": 5.0, **fields}
    return Version(policy=policy, digest=letter * 64, folder=f"/policies/{letter}", **given)


def promote(store: SqlStore, letter: str, at: float, policy: str = "dl2") -> None:
    store.registry.add_version(a_version(letter, policy))
    store.registry.change(policy, letter * 64, VersionState.LIVE, at=at, by="ann", reason=f"{letter} is better")


def live(store: SqlStore, policy: str = "dl2") -> str | None:
    found = store.registry.live(policy)
    return None if found is None else found.digest[0]


def test_a_version_comes_back_as_it_was_given(store: SqlStore) -> None:
    version = a_version("a", parent="b" * 64, data_from=1.5, data_to=9.25, jobs=7, metrics={"jct": [1.25, None]})
    assert store.registry.add_version(version) == version
    assert store.registry.versions() == store.registry.versions("dl2") == (version,)
    assert store.registry.versions("other") == ()
    assert live(store) is None


def test_the_same_digest_again_is_the_version_that_is_known(store: SqlStore) -> None:
    promote(store, "a", 1.0)
    again = store.registry.add_version(a_version("a", origin="elsewhere"))
    assert (again.origin, again.state) == ("twin", VersionState.LIVE)
    assert len(store.registry.versions()) == 1


def test_one_version_of_a_policy_decides(store: SqlStore) -> None:
    promote(store, "a", 1.0)
    promote(store, "c", 2.0, policy="other")
    promote(store, "b", 3.0)
    assert {version.digest[0]: version.state for version in store.registry.versions()} == {
        "a": VersionState.RETIRED, "b": VersionState.LIVE, "c": VersionState.LIVE
    }  # fmt: skip
    changes = store.registry.changes("dl2")
    assert [(change.digest[0], change.before, change.after, change.replaced[:1]) for change in changes] == [
        ("b", "candidate", "live", "a"),
        ("a", "live", "retired", ""),
        ("a", "candidate", "live", ""),
    ]
    assert [(change.by, change.reason, change.at) for change in changes[::2]] == [
        ("ann", "b is better", 3.0), ("ann", "a is better", 1.0)
    ]  # fmt: skip
    assert "b is better" in changes[1].reason


def test_rolling_back_goes_down_the_promotions_one_by_one(store: SqlStore) -> None:
    for at, letter in enumerate("abc", start=1):
        promote(store, letter, float(at))
    for expected in "ba":
        assert store.registry.roll_back("dl2", at=9.0, by="ann", reason="slower").digest[0] == expected
        assert live(store) == expected
    with pytest.raises(RegistryError, match="is the first"):
        store.registry.roll_back("dl2", at=9.0, by="ann", reason="slower")
    assert live(store) == "a"
    assert [change.rollback for change in store.registry.changes()][:4] == [True, False, True, False]


def test_after_a_rollback_a_promotion_counts_from_there(store: SqlStore) -> None:
    for at, letter in enumerate("abc", start=1):
        promote(store, letter, float(at))
    store.registry.roll_back("dl2", at=5.0, by="ann", reason="slower")
    promote(store, "d", 6.0)
    assert store.registry.roll_back("dl2", at=7.0, by="ann", reason="slower").digest[0] == "b"


def test_rollbacks_of_versions_that_replaced_each_other_come_to_an_end(store: SqlStore) -> None:
    for at, letter in enumerate("abab", start=1):
        promote(store, letter, float(at))
    assert [each.digest[0] for each in store.registry.earlier("dl2")] == ["a"]
    found = [store.registry.roll_back("dl2", at=9.0, by="daemon", reason="fails").digest[0] for _ in range(3)]
    assert found == ["a", "b", "a"]
    with pytest.raises(RegistryError, match="is the first"):
        store.registry.roll_back("dl2", at=9.0, by="daemon", reason="fails")


def test_a_rollback_may_pass_over_versions_and_passes_over_rejected_ones(store: SqlStore) -> None:
    for at, letter in enumerate("abcd", start=1):
        promote(store, letter, float(at))
    store.registry.change("dl2", "c" * 64, VersionState.REJECTED, at=5.0, by="gate", reason="slower")
    assert [each.digest[0] for each in store.registry.earlier("dl2")] == ["b", "a"]
    assert store.registry.roll_back("dl2", at=6.0, by="ann", reason="fails", to="a" * 64).digest[0] == "a"
    assert store.registry.earlier("dl2") == ()


def test_what_is_meant_for_another_live_version_changes_nothing(store: SqlStore) -> None:
    for at, letter in enumerate("abc", start=1):
        promote(store, letter, float(at))
    before = store.registry.changes()
    with pytest.raises(LiveVersionChanged, match="is cccccccccccc by now"):
        store.registry.roll_back("dl2", at=4.0, by="daemon", reason="b fails", live="b" * 64)
    with pytest.raises(LiveVersionChanged):
        store.registry.change("dl2", "a" * 64, VersionState.LIVE, at=4.0, by="gate", reason="", live=("", "b" * 64))
    assert store.registry.changes() == before
    assert store.registry.roll_back("dl2", at=5.0, by="daemon", reason="c fails", live="c" * 64).digest[0] == "b"


def test_a_remark_changes_nothing(store: SqlStore) -> None:
    promote(store, "a", 1.0)
    promote(store, "b", 2.0)
    store.registry.remark("dl2", "b" * 64, at=3.0, by="daemon", text="cannot be read")
    store.registry.remark("dl2", "x" * 64, at=3.0, by="daemon", text="nobody knows it")
    newest = store.registry.changes()[0]
    assert (newest.before, newest.after, newest.reason) == (VersionState.LIVE, VersionState.LIVE, "cannot be read")
    assert store.registry.roll_back("dl2", at=9.0, by="ann", reason="broken").digest[0] == "a"


def test_what_cannot_be(store: SqlStore) -> None:
    with pytest.raises(RegistryError, match="nothing to roll back"):
        store.registry.roll_back("dl2", at=1.0, by="ann", reason="")
    with pytest.raises(RegistryError, match="no version aaaaaaaaaaaa of dl2"):
        store.registry.change("dl2", "a" * 64, VersionState.LIVE, at=1.0, by="ann", reason="")
    promote(store, "a", 1.0)
    with pytest.raises(RegistryError, match="promote another one first"):
        store.registry.change("dl2", "a" * 64, VersionState.REJECTED, at=1.0, by="ann", reason="")
    store.registry.change("dl2", "a" * 64, VersionState.LIVE, at=2.0, by="ann", reason="again")
    assert len(store.registry.changes()) == 1


def test_trials_come_back_newest_first(store: SqlStore) -> None:
    def trial(number: int, **fields: Any) -> Trial:
        return Trial(
            at=float(number), policy="dl2", candidate="a" * 64, current="b" * 64, days=("2026-01-02",),
            cases=(TrialCase("2026-01-02", 1.5, 2.5),), passed=number > 1, reason=f"number {number}",
            **{"change": -0.4, "low": -0.5, "high": -0.25, **fields},
        )  # fmt: skip

    given = [trial(1), trial(2, change=None, low=None, high=None)]
    for each in given:
        store.registry.add_trial(each)
    assert store.registry.trials() == tuple(reversed(given))
    assert store.registry.trials("dl2", limit=1) == (given[1],)
    assert store.registry.trials("other") == ()


def test_runs_of_the_learner(store: SqlStore) -> None:
    first = store.registry.begin_run("dl2", 1.0)
    second = store.registry.begin_run("dl2", 2.0)
    store.registry.end_run(second.number, RunState.FAILED, "ended with 9", 3.0)
    store.registry.end_run(second.number, RunState.FINISHED, "too late", 4.0)
    newest, oldest = store.registry.runs()
    assert (newest.state, newest.note, newest.ended_at) == (RunState.FAILED, "ended with 9", 3.0)
    assert (oldest.number, oldest.state, oldest.ended_at) == (first.number, RunState.LOST, 2.0)
    third = store.registry.begin_run("dl2", 5.0)
    store.registry.lose_runs(6.0)
    lost, *others = store.registry.runs()
    assert (lost.number, lost.state, lost.ended_at) == (third.number, RunState.LOST, 6.0)
    assert others == [newest, oldest]


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[SqlStore, Iterator[int]]]:
    """A store for many examples, each of which takes a policy of its own."""
    with closing(SqlStore("sqlite://")) as store:
        yield store, itertools.count()


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", "reject", "back"]), max_size=15))
def test_whatever_is_done_one_version_is_live_and_every_change_is_kept(
    shared: tuple[SqlStore, Iterator[int]], done: list[str]
) -> None:
    store, numbers = shared
    policy, registry, expected = f"dl2-{next(numbers)}", store.registry, ""
    for at, what in enumerate(done):
        try:
            if what == "back":
                expected = registry.roll_back(policy, at=float(at), by="ann", reason=what).digest
            elif what == "reject":
                registry.change(policy, "a" * 64, VersionState.REJECTED, at=float(at), by="ann", reason=what)
            else:
                promote(store, what, float(at), policy=policy)
                expected = what * 64
        except RegistryError:
            pass  # there is nothing to be done; then nothing was
        found = registry.live(policy)
        assert (found.digest if found else "") == expected
        assert sum(version.state is VersionState.LIVE for version in registry.versions(policy)) == bool(expected)
    states: dict[str, VersionState] = {}
    for change in reversed(registry.changes(policy)):
        assert states.get(change.digest, VersionState.CANDIDATE) is change.before
        states[change.digest] = change.after
        assert change.before is not change.after
    for version in registry.versions(policy):
        assert states.get(version.digest, VersionState.CANDIDATE) is version.state


def test_many_who_promote_at_once_leave_one_that_decides(kept_url: str) -> None:
    letters = "abcdef"
    with closing(SqlStore(kept_url)) as store:
        for letter in letters:
            store.registry.add_version(a_version(letter))
        start = threading.Barrier(len(letters))
        failed: list[Exception] = []

        def work(letter: str) -> None:
            try:
                start.wait(timeout=30)
                for at in range(5):
                    store.registry.change(
                        "dl2", letter * 64, VersionState.LIVE, at=float(at), by=letter, reason=f"{letter} is better"
                    )
            except Exception as error:  # noqa: BLE001 - told in the test's own thread
                failed.append(error)

        threads = [threading.Thread(target=work, args=(letter,)) for letter in letters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert failed == []
        versions = store.registry.versions()
        assert [version.state for version in versions].count(VersionState.LIVE) == 1
        newest = store.registry.changes()[0]
        assert store.registry.live("dl2") == next(each for each in versions if each.digest == newest.digest)
