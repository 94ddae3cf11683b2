"""The registry of learned policies.

Tables ``policy_versions``, ``policy_changes``, ``policy_trials`` and ``learning_runs``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, ForeignKey, Index, Row, Select, UniqueConstraint, func, insert, select, update
from sqlalchemy.orm import Mapped, aliased

from dl2d.core.errors import LiveVersionChanged, RegistryError
from dl2d.core.policy_registry import (
    LearningRun,
    RunState,
    Trial,
    TrialCase,
    Version,
    VersionChange,
    VersionState,
)
from dl2d.store.connections_and_transactions import StoreTables
from dl2d.store.tables.row_mapping import (
    NUMBER,
    Base,
    Choice,
    Finite,
    Json,
    Mapping,
    Moment,
    UserText,
    VersionNumber,
    column,
    table_of,
)

#: Digits of a digest in messages.
_DIGITS = 12


class PolicyVersionRow(Base):
    """A checkpoint of a learned policy."""

    __tablename__ = "policy_versions"
    __table_args__ = (UniqueConstraint("policy", "digest"), Index(None, "policy", "state"))

    number: Mapped[int] = column("number in the order in which they were registered", NUMBER, primary_key=True)
    policy: Mapped[str] = column("name of the policy")
    digest: Mapped[str] = column("SHA-256 of what decides")
    parent: Mapped[str] = column("digest of the version that training began with")
    parent_number: Mapped[VersionNumber | None] = column("its policy_versions.number; NULL if not registered")
    folder: Mapped[UserText] = column("where the checkpoint is")
    origin: Mapped[UserText] = column("how it came about, in words")
    at: Mapped[float] = column("when it was registered, seconds since 1970")
    data_from: Mapped[float | None] = column("jobs from then on were learned from, seconds since 1970")
    data_to: Mapped[float | None] = column("jobs until then were learned from, seconds since 1970")
    jobs: Mapped[int] = column("number of jobs that were learned from")
    metrics: Mapped[dict[str, Any]] = column("how well it did in training, JSON", Json(dict[str, Any]))
    state: Mapped[VersionState] = column("candidate live retired rejected", Choice(VersionState))


class PolicyChangeRow(Base):
    """A change of a version's state."""

    __tablename__ = "policy_changes"
    __table_args__ = (Index(None, "version"),)

    number: Mapped[int] = column("number in the order in which they were made", NUMBER, primary_key=True)
    version: Mapped[int] = column("number of the version", ForeignKey("policy_versions.number"))
    at: Mapped[Moment]
    before: Mapped[VersionState] = column("state before", Choice(VersionState))
    after: Mapped[VersionState] = column("state after", Choice(VersionState))
    by: Mapped[UserText] = column("a user, gate or daemon")
    reason: Mapped[UserText] = column("why, in words")
    replaced: Mapped[VersionNumber | None] = column("number of the version that was live until then")
    rollback: Mapped[bool] = column("whether the version before went live again")


class PolicyTrialRow(Base):
    """Result of comparing a candidate with the version that was live then."""

    __tablename__ = "policy_trials"

    number: Mapped[int] = column("number in the order in which they were made", NUMBER, primary_key=True)
    policy: Mapped[str] = column("policy of both versions")
    candidate: Mapped[str] = column("digest")
    current: Mapped[str] = column("digest of the version that decided then, a policy's name, or site-scheduler")
    candidate_number: Mapped[VersionNumber | None] = column(
        "policy_versions.number of the candidate; NULL if not a version"
    )
    current_number: Mapped[VersionNumber | None] = column("policy_versions.number of current; NULL if not a version")
    at: Mapped[Moment]
    days: Mapped[tuple[str, ...]] = column("recorded days, JSON", Json(tuple[str, ...]))
    cases: Mapped[tuple[TrialCase, ...]] = column(
        "mean completion times in slots by workload, JSON", Json(tuple[TrialCase, ...])
    )
    change: Mapped[float | None] = column("ratio of the mean completion times, candidate / current, minus 1", Finite())
    low: Mapped[float | None] = column("lower end of the 95 % interval of change, a ratio minus 1", Finite())
    high: Mapped[float | None] = column("upper end of the 95 % interval of change, a ratio minus 1", Finite())
    passed: Mapped[bool] = column("whether the candidate passed the gate")
    reason: Mapped[UserText] = column("result in words")


class LearningRunRow(Base):
    """A run of the learner."""

    __tablename__ = "learning_runs"

    number: Mapped[int] = column("number in the order in which they began", NUMBER, primary_key=True)
    policy: Mapped[str] = column("policy that learns")
    started_at: Mapped[Moment]
    ended_at: Mapped[float | None] = column("seconds since 1970")
    state: Mapped[RunState] = column("running finished failed stopped lost", Choice(RunState))
    note: Mapped[UserText] = column("result, or why it ended")


_VERSION = Mapping(Version, PolicyVersionRow)
_CHANGE = Mapping(VersionChange, PolicyChangeRow)
_TRIAL = Mapping(Trial, PolicyTrialRow)
_RUN = Mapping(LearningRun, LearningRunRow)


class SqlRegistry(StoreTables):
    """The registry of learned policies. Every method may raise ``StoreUnavailable``; then nothing was written."""

    def add_version(self, version: Version) -> Version:
        """Add a candidate, whatever its state says; one whose digest is known is returned as it is."""
        values = _VERSION.values(version, metrics=dict(version.metrics), state=VersionState.CANDIDATE)
        with self._database.writing(f"registering a version of {version.policy}") as connection:
            known = _find(connection, version.policy, version.digest)
            if known is None:
                values["parent_number"] = version_number(connection, version.policy, version.parent)
                connection.execute(insert(table_of(PolicyVersionRow)), values)
                known = _find(connection, version.policy, version.digest)
            assert known is not None
            return _version(known)

    def versions(self, policy: str | None = None) -> tuple[Version, ...]:
        """All versions, of one policy or all, newest first."""
        query = _versions().order_by(PolicyVersionRow.number.desc())
        if policy is not None:
            query = query.where(PolicyVersionRow.policy == policy)
        return tuple(map(_version, self._rows("listing versions of policies", query)))

    def live(self, policy: str) -> Version | None:
        """The version that decides."""
        rows = self._rows(f"looking up what decides for {policy}", _live(policy))
        return _version(rows[0]) if rows else None

    def change(
        self,
        policy: str,
        digest: str,
        state: VersionState,
        *,
        at: float,
        by: str,
        reason: str,
        live: Collection[str] | None = None,
    ) -> Version:
        """Change a version's state. Where it goes live, the one that was is retired in the same transaction.

        Raises ``RegistryError`` if there is no such version, or if it is live and is to be something else: another one
        has to go live in its place. ``live``: digests, of which one must be that of the live version (``""`` if none
        is live); raises ``LiveVersionChanged`` otherwise.
        """
        with self._database.writing(f"changing a version of {policy}") as connection:
            _lock(connection, policy)
            row = _find(connection, policy, digest)
            if row is None:
                raise RegistryError(
                    f"there is no version {digest[:_DIGITS]} of {policy}; `dl2d policy list` shows all versions"
                )
            if live is not None:
                _check_live(connection, policy, live)
            if row.state == state:
                return _version(row)
            if row.state == VersionState.LIVE:
                raise RegistryError(f"version {digest[:_DIGITS]} of {policy} decides; promote another one first")
            _turn(connection, row, state, at=at, by=by, reason=reason)
            return _found(connection, row.number)

    def earlier(self, policy: str) -> tuple[Version, ...]:
        """The versions to which the live one can be rolled back, nearest first.

        They are those that the live version replaced when it was promoted, that this one had replaced, and so on. A
        rollback takes back the promotion of the version that was live, so that rollbacks never go in a circle. Rejected
        versions are left out.
        """
        with self._database.reading(f"looking up earlier versions of {policy}") as connection:
            return tuple(map(_version, _earlier(connection, policy)))

    def roll_back(self, policy: str, *, at: float, by: str, reason: str, to: str = "", live: str = "") -> Version:
        """Make an earlier version live: the nearest of ``earlier``, or the one with digest ``to``.

        Raises ``RegistryError`` where there is none. Raises ``LiveVersionChanged`` if ``live`` is given and is not the
        digest of the live version.
        """
        with self._database.writing(f"rolling {policy} back") as connection:
            _lock(connection, policy)
            row = connection.execute(_live(policy)).one_or_none()
            if row is None:
                raise RegistryError(f"no version of {policy} is live: there is nothing to roll back")
            if live:
                _check_live(connection, policy, (live,))
            found = next((each for each in _earlier(connection, policy) if to in ("", each.digest)), None)
            if found is None:
                raise RegistryError(
                    f"version {row.digest[:_DIGITS]} of {policy} is the first: there is none before it; to end its "
                    "decisions, set another policy.name, or mode: observe, and reload the daemon"
                )
            _turn(connection, found, VersionState.LIVE, at=at, by=by, reason=reason, rollback=True)
            return _found(connection, found.number)

    def remark(self, policy: str, digest: str, *, at: float, by: str, text: str) -> None:
        """Add a remark to a version's changes; its state stays. Does nothing where there is no such version."""
        with self._database.writing(f"keeping a remark on {policy}") as connection:
            row = _find(connection, policy, digest)
            if row is not None:
                _keep_change(connection, row, row.state, at=at, by=by, reason=text)

    def changes(self, policy: str | None = None, *, limit: int = 100) -> tuple[VersionChange, ...]:
        """Changes of state, newest first."""
        replaced = aliased(PolicyVersionRow)
        query = (
            select(
                table_of(PolicyChangeRow),
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
        return tuple(
            _CHANGE.record(
                row, f"change {row.number} of a version", policy=row.policy, digest=row.digest,
                replaced=row.replaced_digest,
            )
            for row in self._rows("listing changes of policies", query)
        )  # fmt: skip

    def add_trial(self, trial: Trial) -> None:
        """Add a trial."""
        with self._database.writing(f"keeping a trial of {trial.policy}") as connection:
            numbers = {
                "candidate_number": version_number(connection, trial.policy, trial.candidate),
                "current_number": version_number(connection, trial.policy, trial.current),
            }
            connection.execute(insert(table_of(PolicyTrialRow)), _TRIAL.values(trial, **numbers))

    def trials(self, policy: str | None = None, *, limit: int = 100) -> tuple[Trial, ...]:
        """Trials, newest first."""
        query = select(table_of(PolicyTrialRow)).order_by(PolicyTrialRow.number.desc()).limit(limit)
        if policy is not None:
            query = query.where(PolicyTrialRow.policy == policy)
        rows = self._rows("listing trials of policies", query)
        return tuple(_TRIAL.record(row, f"trial {row.number}") for row in rows)

    def begin_run(self, policy: str, at: float) -> LearningRun:
        """Add a run of the learner. Earlier ones that have not ended count as lost: only one runs at a time."""
        with self._database.writing("keeping that a learner was started") as connection:
            _lose_runs(connection, at)
            values = {"policy": policy, "started_at": at, "state": RunState.RUNNING, "note": ""}
            connection.execute(insert(table_of(LearningRunRow)), values)
            # Nobody else starts learners: the newest is the one that was just added.
            number = connection.execute(select(func.max(LearningRunRow.number))).scalar_one()
        return LearningRun(number=number, policy=policy, started_at=at)

    def lose_runs(self, at: float) -> None:
        """Record that all runs that have not ended are lost: a learner ends with its daemon, and this one starts."""
        with self._database.writing("keeping which learners were lost") as connection:
            _lose_runs(connection, at)

    def end_run(self, number: int, state: RunState, note: str, at: float) -> None:
        """Record how a run ended; one that has ended is not changed."""
        running = (LearningRunRow.number == number) & (LearningRunRow.state == RunState.RUNNING)
        with self._database.writing("keeping how a learner ended") as connection:
            connection.execute(update(LearningRunRow).where(running).values(state=state, note=note, ended_at=at))

    def runs(self, *, limit: int = 100) -> tuple[LearningRun, ...]:
        """Runs of the learner, newest first."""
        query = select(table_of(LearningRunRow)).order_by(LearningRunRow.number.desc()).limit(limit)
        return tuple(_RUN.record(row, f"learner {row.number}") for row in self._rows("listing learners", query))


def _lose_runs(connection: Connection, at: float) -> None:
    running = LearningRunRow.state == RunState.RUNNING
    lost = {"state": RunState.LOST, "ended_at": at, "note": "the daemon ended while it ran"}
    connection.execute(update(LearningRunRow).where(running).values(**lost))


def version_number(connection: Connection, policy: str, named: str) -> int | None:
    """The number of a version that is named by its digest or, as in decisions, by first digits and settings.

    None where no such version is registered, as of a policy without versions.
    """
    digits = named.partition(" ")[0]
    if len(digits) < _DIGITS:
        return None
    version = table_of(PolicyVersionRow).c
    begins = func.substr(version.digest, 1, len(digits)) == digits
    return connection.execute(select(func.max(version.number)).where(version.policy == policy, begins)).scalar()


def _versions() -> Select[Any]:
    return select(table_of(PolicyVersionRow))


def _live(policy: str) -> Select[Any]:
    return _versions().where(PolicyVersionRow.policy == policy, PolicyVersionRow.state == VersionState.LIVE)


def _check_live(connection: Connection, policy: str, expected: Collection[str]) -> None:
    row = connection.execute(_live(policy)).one_or_none()
    if ("" if row is None else row.digest) not in expected:
        which = "none" if row is None else row.digest[:_DIGITS]
        raise LiveVersionChanged(f"the live version of {policy} is {which} by now; nothing was changed")


def _earlier(connection: Connection, policy: str) -> list[Row[Any]]:
    """The versions of ``SqlRegistry.earlier``: a promotion is put on a stack, and a rollback takes from it."""
    query = (
        select(PolicyChangeRow.version, PolicyChangeRow.rollback)
        .join(PolicyVersionRow, PolicyVersionRow.number == PolicyChangeRow.version)
        .where(PolicyVersionRow.policy == policy, PolicyChangeRow.after == VersionState.LIVE)
        .where(PolicyChangeRow.before != VersionState.LIVE)
        .order_by(PolicyChangeRow.number)
    )
    promoted: list[int] = []
    for change in connection.execute(query):
        if not change.rollback:
            promoted.append(change.version)
            continue
        del promoted[-1:]
        while promoted and promoted[-1] != change.version:
            promoted.pop()
        promoted = promoted or [change.version]  # earlier releases rolled back in circles
    rows = {row.number: row for row in connection.execute(_versions().where(PolicyVersionRow.policy == policy))}
    below = [rows[number] for number in dict.fromkeys(reversed(promoted[:-1]))]
    return [row for row in below if row.state not in (VersionState.LIVE, VersionState.REJECTED)]


def _lock(connection: Connection, policy: str) -> None:
    """Serialize changes of a policy's versions: what is read after this is what an earlier change left."""
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
        connection.execute(update(PolicyVersionRow).where(PolicyVersionRow.number == each.number).values(state=after))
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
    return _VERSION.record(row, f"version {row.number}")
