"""The registry of learned policies in SQL."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, Select, func, insert, select, update
from sqlalchemy.orm import aliased

from dl2d.core.codec import encode
from dl2d.core.errors import RegistryError
from dl2d.core.registry import (
    LearningRun,
    RunState,
    Trial,
    TrialCase,
    Version,
    VersionChange,
    VersionState,
)
from dl2d.store import rows
from dl2d.store.database import Database
from dl2d.store.mapping import LearningRunRow, PolicyChangeRow, PolicyTrialRow, PolicyVersionRow, table_of

#: Digits of a digest in messages.
_DIGITS = 12


class SqlRegistry:
    """Implements ``dl2d.core.registry.Registry`` on the store's own database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_version(self, version: Version) -> Version:
        """See ``Registry.add_version``."""
        values = {
            "policy": version.policy,
            "digest": version.digest,
            "parent": version.parent,
            "folder": version.folder,
            "origin": version.origin,
            "at": version.at,
            "data_from": version.data_from,
            "data_to": version.data_to,
            "jobs": version.jobs,
            "metrics": encode(dict(version.metrics)).decode(),
            "state": VersionState.CANDIDATE.value,
        }
        with self._database.writing(f"registering a version of {version.policy}") as connection:
            known = _find(connection, version.policy, version.digest)
            if known is None:
                connection.execute(insert(table_of(PolicyVersionRow)), values)
                known = _find(connection, version.policy, version.digest)
            assert known is not None
            return _version(known)

    def versions(self, policy: str | None = None) -> tuple[Version, ...]:
        """See ``Registry.versions``."""
        query = _versions().order_by(PolicyVersionRow.number.desc())
        if policy is not None:
            query = query.where(PolicyVersionRow.policy == policy)
        with self._database.reading("listing versions of policies") as connection:
            return tuple(map(_version, connection.execute(query)))

    def live(self, policy: str) -> Version | None:
        """See ``Registry.live``."""
        with self._database.reading(f"looking up what decides for {policy}") as connection:
            row = connection.execute(_live(policy)).one_or_none()
        return None if row is None else _version(row)

    def change(self, policy: str, digest: str, state: VersionState, *, at: float, by: str, reason: str) -> Version:
        """See ``Registry.change``."""
        with self._database.writing(f"changing a version of {policy}") as connection:
            _lock(connection, policy)
            row = _find(connection, policy, digest)
            if row is None:
                raise RegistryError(f"there is no version {digest[:_DIGITS]} of {policy}; `dl2d policy list` has all")
            if row.state == state:
                return _version(row)
            if row.state == VersionState.LIVE:
                raise RegistryError(f"version {digest[:_DIGITS]} of {policy} decides; promote another one first")
            _turn(connection, row, state, at=at, by=by, reason=reason)
            return _found(connection, row.number)

    def roll_back(self, policy: str, *, at: float, by: str, reason: str) -> Version:
        """See ``Registry.roll_back``."""
        with self._database.writing(f"rolling {policy} back") as connection:
            _lock(connection, policy)
            row = connection.execute(_live(policy)).one_or_none()
            if row is None:
                raise RegistryError(f"no version of {policy} is live: there is nothing to roll back")
            promoted = (
                select(PolicyChangeRow.replaced)
                .where(PolicyChangeRow.version == row.number, PolicyChangeRow.after == VersionState.LIVE.value)
                .where(PolicyChangeRow.before != VersionState.LIVE.value, PolicyChangeRow.rollback.is_(False))
                .order_by(PolicyChangeRow.number.desc())
                .limit(1)
            )
            before = connection.execute(promoted).scalar()
            if before is None:
                raise RegistryError(f"version {row.digest[:_DIGITS]} of {policy} is the first: there is none before it")
            earlier = connection.execute(_versions().where(PolicyVersionRow.number == before)).one()
            _turn(connection, earlier, VersionState.LIVE, at=at, by=by, reason=reason, rollback=True)
            return _found(connection, before)

    def remark(self, policy: str, digest: str, *, at: float, by: str, text: str) -> None:
        """See ``Registry.remark``."""
        with self._database.writing(f"keeping a remark on {policy}") as connection:
            row = _find(connection, policy, digest)
            if row is not None:
                _keep_change(connection, row, row.state, at=at, by=by, reason=text)

    def changes(self, policy: str | None = None, *, limit: int = 100) -> tuple[VersionChange, ...]:
        """See ``Registry.changes``."""
        replaced = aliased(PolicyVersionRow)
        query = (
            select(
                *table_of(PolicyChangeRow).c,
                PolicyVersionRow.policy,
                PolicyVersionRow.digest,
                func.coalesce(replaced.digest, "").label("replaced_digest"),
            )
            .join(PolicyVersionRow, PolicyVersionRow.number == PolicyChangeRow.version)
            .outerjoin(replaced, replaced.number == PolicyChangeRow.replaced)
            .order_by(PolicyChangeRow.number.desc())
            .limit(limit)
        )
        if policy is not None:
            query = query.where(PolicyVersionRow.policy == policy)
        with self._database.reading("listing changes of policies") as connection:
            return tuple(
                VersionChange(
                    at=row.at,
                    policy=row.policy,
                    digest=row.digest,
                    before=VersionState(row.before),
                    after=VersionState(row.after),
                    by=row.by,
                    reason=row.reason,
                    replaced=row.replaced_digest,
                    rollback=row.rollback,
                )
                for row in connection.execute(query)
            )

    def add_trial(self, trial: Trial) -> None:
        """See ``Registry.add_trial``."""
        values = {
            "policy": trial.policy,
            "candidate": trial.candidate,
            "current": trial.current,
            "at": trial.at,
            "days": encode(trial.days).decode(),
            "cases": encode(trial.cases).decode(),
            "change": rows.finite(trial.change),
            "low": rows.finite(trial.low),
            "high": rows.finite(trial.high),
            "passed": trial.passed,
            "reason": trial.reason,
        }
        with self._database.writing(f"keeping a trial of {trial.policy}") as connection:
            connection.execute(insert(table_of(PolicyTrialRow)), values)

    def trials(self, policy: str | None = None, *, limit: int = 100) -> tuple[Trial, ...]:
        """See ``Registry.trials``."""
        query = select(*table_of(PolicyTrialRow).c).order_by(PolicyTrialRow.number.desc()).limit(limit)
        if policy is not None:
            query = query.where(PolicyTrialRow.policy == policy)
        with self._database.reading("listing trials of policies") as connection:
            return tuple(
                Trial(
                    at=row.at,
                    policy=row.policy,
                    candidate=row.candidate,
                    current=row.current,
                    days=rows.unpack(row.days.encode(), tuple[str, ...], f"trial {row.number}"),
                    cases=rows.unpack(row.cases.encode(), tuple[TrialCase, ...], f"trial {row.number}"),
                    change=row.change,
                    low=row.low,
                    high=row.high,
                    passed=row.passed,
                    reason=row.reason,
                )
                for row in connection.execute(query)
            )

    def begin_run(self, policy: str, at: float) -> LearningRun:
        """See ``Registry.begin_run``."""
        with self._database.writing("keeping that a learner was started") as connection:
            lost = {"state": RunState.LOST.value, "ended_at": at, "note": "the daemon ended while it ran"}
            running = LearningRunRow.state == RunState.RUNNING.value
            connection.execute(update(LearningRunRow).where(running).values(**lost))
            values = {"policy": policy, "started_at": at, "state": RunState.RUNNING.value, "note": ""}
            connection.execute(insert(table_of(LearningRunRow)), values)
            # Nobody else starts learners: the newest is the one that was just added.
            number = connection.execute(select(func.max(LearningRunRow.number))).scalar_one()
        return LearningRun(number=number, policy=policy, started_at=at)

    def end_run(self, number: int, state: RunState, note: str, at: float) -> None:
        """See ``Registry.end_run``."""
        running = (LearningRunRow.number == number) & (LearningRunRow.state == RunState.RUNNING.value)
        with self._database.writing("keeping how a learner ended") as connection:
            connection.execute(update(LearningRunRow).where(running).values(state=state.value, note=note, ended_at=at))

    def runs(self, *, limit: int = 100) -> tuple[LearningRun, ...]:
        """See ``Registry.runs``."""
        query = select(*table_of(LearningRunRow).c).order_by(LearningRunRow.number.desc()).limit(limit)
        with self._database.reading("listing learners") as connection:
            return tuple(
                LearningRun(
                    number=row.number,
                    policy=row.policy,
                    started_at=row.started_at,
                    ended_at=row.ended_at,
                    state=RunState(row.state),
                    note=row.note,
                )
                for row in connection.execute(query)
            )


def _versions() -> Select[Any]:
    return select(*table_of(PolicyVersionRow).c)


def _live(policy: str) -> Select[Any]:
    return _versions().where(PolicyVersionRow.policy == policy, PolicyVersionRow.state == VersionState.LIVE.value)


def _lock(connection: Connection, policy: str) -> None:
    """Two who promote at once do so one after the other; what is read after this is what the first one left."""
    query = select(PolicyVersionRow.number).where(PolicyVersionRow.policy == policy)
    connection.execute(query.order_by(PolicyVersionRow.number).with_for_update()).all()


def _find(connection: Connection, policy: str, digest: str) -> Row[Any] | None:
    named = (PolicyVersionRow.policy == policy) & (PolicyVersionRow.digest == digest)
    return connection.execute(_versions().where(named)).one_or_none()


def _found(connection: Connection, number: int) -> Version:
    return _version(connection.execute(_versions().where(PolicyVersionRow.number == number)).one())


def _turn(
    connection: Connection,
    row: Row[Any],
    state: VersionState,
    *,
    at: float,
    by: str,
    reason: str,
    rollback: bool = False,
) -> None:
    """Set a version's state, retire the live one where it goes live, and keep both changes."""
    replaced: int | None = None
    changed: list[tuple[Row[Any], VersionState, str]] = [(row, state, reason)]
    if state is VersionState.LIVE:
        before = connection.execute(_live(row.policy)).one_or_none()
        if before is not None:
            replaced = before.number
            word = "was rolled back to" if rollback else "takes its place"
            changed.insert(0, (before, VersionState.RETIRED, f"version {row.digest[:_DIGITS]} {word}: {reason}"))
    for each, after, why in changed:
        connection.execute(
            update(PolicyVersionRow).where(PolicyVersionRow.number == each.number).values(state=after.value)
        )
        own = each is row
        _keep_change(
            connection, each, after, at=at, by=by, reason=why,
            replaced=replaced if own else None, rollback=rollback and own,
        )  # fmt: skip


def _keep_change(
    connection: Connection,
    row: Row[Any],
    after: str,
    *,
    at: float,
    by: str,
    reason: str,
    replaced: int | None = None,
    rollback: bool = False,
) -> None:
    values = {
        "version": row.number,
        "at": at,
        "before": row.state,
        "after": str(after),
        "by": by,
        "reason": reason,
        "replaced": replaced,
        "rollback": rollback,
    }
    connection.execute(insert(table_of(PolicyChangeRow)), values)


def _version(row: Row[Any]) -> Version:
    return Version(
        policy=row.policy,
        digest=row.digest,
        folder=row.folder,
        origin=row.origin,
        at=row.at,
        parent=row.parent,
        data_from=row.data_from,
        data_to=row.data_to,
        jobs=row.jobs,
        metrics=rows.unpack(row.metrics.encode(), dict[str, Any], f"version {row.number}"),
        state=VersionState(row.state),
    )
