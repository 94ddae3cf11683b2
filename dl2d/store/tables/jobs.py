"""Jobs and their progress: tables ``jobs``, ``progress`` and ``job_ids``."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Index,
    Row,
    Select,
    Update,
    bindparam,
    delete,
    false,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped

from dl2d.core.cluster import in_submit_order
from dl2d.core.errors import DuplicateJob, StoreError
from dl2d.core.jobs import NO_LAUNCH, Allocation, Job, JobKey, JobRequest, JobState, Launch, Owner, Progress, User
from dl2d.core.json_codec import as_plain, decode, encode
from dl2d.core.measured_speeds_and_losses import JobSpeeds, MeasuredLoss, TrainingKind
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange, JobList
from dl2d.store.connections_and_transactions import StoreTables
from dl2d.store.tables import job_speeds_and_losses
from dl2d.store.tables.job_speeds_and_losses import JobLossRow, JobSpeedRow
from dl2d.store.tables.kind_speeds import count_speed
from dl2d.store.tables.row_mapping import (
    EMPTY,
    NUMBER,
    ZERO,
    Base,
    Choice,
    Demand,
    Finite,
    JobNumber,
    Json,
    Mapping,
    UserText,
    Values,
    batches,
    column,
    table_of,
    upsert,
)

#: Jobs of one name or id that have ended and that ``SqlStore.find_jobs`` finds.
MAX_NAMESAKES = 100
_LIVE = [state for state in JobState if not state.ended]


class RequestJson(Json[JobRequest]):
    """A job's request as JSON, in which its demands are amounts by name, as in the columns of type ``Demand``."""

    cache_ok = True

    def __init__(self) -> None:
        super().__init__(JobRequest)

    def process_bind_param(self, value: JobRequest | None, dialect: Dialect) -> str | None:  # noqa: ARG002 (SQLAlchemy's signature)
        """Encode a request."""
        if value is None:
            return None
        return encode(as_plain(value) | {"worker": value.worker.as_dict(), "ps": value.ps.as_dict()}).decode()

    def decode(self, stored: str | bytes) -> JobRequest:
        """Decode a request."""
        plain = decode(stored, dict[str, Any])
        for role in ("worker", "ps"):
            plain[role] = _in_thousandths(tuple(msgspec.convert(plain.get(role), dict[str, float]).items()))
        return msgspec.convert(plain, JobRequest)


# Most jobs ask for the same few.
@functools.lru_cache(maxsize=1024)
def _in_thousandths(demand: tuple[tuple[str, float], ...]) -> Any:
    return as_plain(Resources.of(dict(demand)))


class _Reported:
    """Columns of a progress report, ``epoch`` aside."""

    version: Mapped[int] = column("completed updates")
    total_versions: Mapped[int | None] = column("updates that the whole training has, if it is known")
    loss: Mapped[float | None] = column("training loss, a number without unit", Finite())
    steps_per_second: Mapped[float | None] = column("training speed, updates/s", Finite())
    samples_per_second: Mapped[float | None] = column("training speed, samples/s", Finite())
    workers: Mapped[int] = column("workers that train now")
    ps: Mapped[int] = column("parameter servers that train now")


class JobRow(_Reported, Base):
    """A job, and the last report of its coordinator."""

    __tablename__ = "jobs"
    __table_args__ = (
        *(Index(None, name) for name in ("state", "submitted", "id", "ended_at")),
        Index(None, "name", "ended_at"),
        # Of one user: what users ask for takes no longer where others have many jobs.
        Index(None, "uid", "ended_at"),
        Index(None, "uid", "name", "ended_at"),
        # Of elastic jobs, which each tick reads: on most sites that are observed, nearly all jobs are static.
        Index(
            "ix_jobs_elastic_ended_at",
            "ended_at",
            "number",
            sqlite_where=text("static IS 0"),
            postgresql_where=text("static IS FALSE"),
        ),
    )

    number: Mapped[int] = column("dl2d's own number of the job", NUMBER, primary_key=True)
    slug: Mapped[str] = column("cluster.id.submitted, unique", unique=True)
    cluster: Mapped[str] = column("name of the cluster")
    id: Mapped[str] = column("the resource manager's id; used again by some managers")
    submitted: Mapped[int] = column("when it was submitted, whole seconds since 1970")
    epoch: Mapped[float | None] = column("completed epochs; NULL of a static job that reports nothing")
    name: Mapped[UserText] = column("as its user named it")
    model: Mapped[UserText] = column("model type")
    user_name: Mapped[str] = column("owner")
    uid: Mapped[int] = column("the owner's user id")
    gid: Mapped[int] = column("the owner's group id")
    account: Mapped[str] = column("account that is charged")
    partition: Mapped[str] = column("partition or queue")
    qos: Mapped[str] = column("quality of service")
    state: Mapped[JobState] = column("submitted ready running finished failed cancelled lost", Choice(JobState))
    anchor: Mapped[str] = column("handle of the anchor in the resource manager")
    address: Mapped[str] = column("host:port of the coordinator")
    started_at: Mapped[float | None] = column("when it trained first, seconds since 1970")
    ended_at: Mapped[float | None] = column("when it ended, seconds since 1970")
    end_reason: Mapped[UserText] = column("how it ended, in words; while submitted: why it waits")
    end_cause: Mapped[str] = column("why it failed or was lost, one word; otherwise empty", server_default=EMPTY)
    digest: Mapped[str] = column("SHA-256 of the final weights")
    progress_at: Mapped[float] = column("when the last report came, seconds since 1970; 0 for none")
    series_at: Mapped[float | None] = column("time of its newest row in progress, seconds since 1970")
    quarantined_workers: Mapped[int | None] = column("workers at which its speed is quarantined; or NULL")
    quarantined_ps: Mapped[int | None] = column("servers at which its speed is quarantined; or NULL")
    static: Mapped[bool] = column(
        "a static job: the site's own scheduler runs it, dl2d only records it", server_default=false()
    )
    epochs: Mapped[float] = column(
        "epochs that its user declared; of a static job that reports nothing, hours that it may run",
        server_default=ZERO,
    )
    max_workers: Mapped[int] = column("most workers that it may have", server_default=ZERO)
    max_ps: Mapped[int] = column("most parameter servers that it may have", server_default=ZERO)
    worker_demand: Mapped[Resources | None] = column("what one worker needs, JSON; memory in MiB", Demand())
    ps_demand: Mapped[Resources | None] = column("what one parameter server needs, JSON; memory in MiB", Demand())
    request: Mapped[JobRequest] = column("all that the user asked for, JSON", RequestJson())
    launch: Mapped[Launch] = column("command, folder and, until the job ends, environment, JSON", Json(Launch))


class ProgressRow(_Reported, Base):
    """A job's progress over time."""

    __tablename__ = "progress"

    job_number: Mapped[JobNumber]
    at: Mapped[float] = column("when the report came, seconds since 1970", primary_key=True)
    epoch: Mapped[float] = column("completed epochs; 0 of a static job that reports nothing")


class JobIdRow(Base):
    """Last job id given on a cluster whose resource manager does not number jobs itself."""

    __tablename__ = "job_ids"

    cluster: Mapped[str] = column("name of the cluster", primary_key=True)
    last: Mapped[int] = column("the number given last")


_JOB = Mapping(Job, JobRow)
_OWNER = Mapping(Owner, JobRow)
_PROGRESS = Mapping(Progress, ProgressRow)


def job_of(row: Row[Any], **more: object) -> Job:
    """A job from a row of ``jobs``; ``more`` are fields that the row lacks."""
    what = f"job {row.slug}"
    return _JOB.record(
        row,
        what,
        key=JobKey(row.cluster, row.id, row.submitted),
        owner=_OWNER.record(row, what, user=row.user_name),
        progress=_PROGRESS.record(row, what, at=row.progress_at, epoch=row.epoch or 0.0),
        **more,
    )


def _job_values(job: Job) -> Values:
    """A job's columns.

    Raises
    ------
    StoreError
        The key has characters that would make it ambiguous.
    """
    try:
        plain = JobKey.from_slug(job.key.slug) == job.key
    except ValueError:
        plain = False
    if not plain:
        raise StoreError(f"{tuple(job.key)!r} is no job key: cluster and id may have letters, digits, _ and - only")
    return {
        **_changing_values(job),
        "slug": job.key.slug,
        **job.key._asdict(),
        **_last_report(job.progress, is_reported=not job.unreported),
    }


def _changing_values(job: Job) -> Values:
    """The columns of a job that ``JobChange`` may change."""
    owner = _OWNER.values(job.owner, user_name=job.owner.user)
    return _JOB.values(job, **owner, **_request_values(job.request))


def _request_values(request: JobRequest) -> Values:
    return {
        "name": request.name,
        "model": request.model,
        "epochs": request.epochs,
        "max_workers": request.max_workers,
        "max_ps": request.max_ps,
        "worker_demand": request.worker,
        "ps_demand": request.ps,
        "request": request,
    }


def _last_report(progress: Progress, *, is_reported: bool) -> Values:
    """Columns of ``jobs`` that hold the last report; of a job that reports nothing only its size is known."""
    values = _PROGRESS.values(progress, progress_at=progress.at, epoch=progress.epoch if is_reported else None)
    del values["at"]
    return values


class SqlJobs(StoreTables):
    """Jobs and their progress."""

    def next_job_id(self, cluster: str) -> str:
        """A number never given before on this cluster, for managers that do not number jobs themselves."""
        of_cluster = JobIdRow.cluster == cluster
        with self._database.writing("numbering a job") as connection:
            connection.execute(upsert(connection, JobIdRow, replace=False), {"cluster": cluster, "last": 0})
            connection.execute(update(JobIdRow).where(of_cluster).values(last=JobIdRow.last + 1))
            # The row is locked by the statement before, so nobody else can have counted on.
            return str(connection.execute(select(JobIdRow.last).where(of_cluster)).scalar_one())

    def add_job(self, job: Job) -> None:
        """See ``TickStore.add_job``."""
        values = _job_values(job)
        with self._database.writing(f"keeping job {job.key.slug}") as connection:
            try:
                connection.execute(insert(table_of(JobRow)), values)
            except IntegrityError as error:
                # The slug is the only thing that is unique; a value that is missing says so by itself.
                if "unique" not in str(error.orig).lower():
                    raise
                raise DuplicateJob(f"job {job.key.slug} is known already") from error

    def job(self, key: JobKey) -> Job | None:
        """See ``TickStore.job``."""
        rows = self._rows("looking up a job", _jobs().where(JobRow.slug == key.slug))
        return job_of(rows[0]) if rows else None

    def known_jobs(self, keys: Collection[JobKey]) -> frozenset[JobKey]:
        """See ``TickStore.known_jobs``."""
        with self._database.reading("looking up jobs") as connection:
            return frozenset(_by_number(connection, keys).values())

    def find_jobs(
        self,
        text: str,
        owner: User | None = None,
        *,
        by: Sequence[Literal["slug", "id", "name"]] = ("slug", "id", "name"),
    ) -> tuple[Job, ...]:
        """Jobs whose slug is ``text``, or else whose id it is, or else whose name: users may choose another's id.

        Of one owner or of all, newest first, without their commands: those that have not ended, and the last
        ``MAX_NAMESAKES`` that have.
        """
        if "\0" in text:
            return ()
        found: dict[JobKey, Job] = {}
        with self._database.reading("looking up a job") as connection:
            for column in by:
                query = _without_launch().where(getattr(JobRow, column) == text, *owned_by(owner))
                ended = query.where(JobRow.ended_at.is_not(None)).order_by(JobRow.ended_at.desc()).limit(MAX_NAMESAKES)
                for some in (query.where(JobRow.ended_at.is_(None)), ended):
                    found |= {job.key: job for job in _listed(connection, some)}
                if found:
                    break
        return in_submit_order(list(found.values()))[::-1]

    def list_jobs(self, owner: User | None = None, *, ended_since: float, limit: int) -> JobList:
        """Jobs of one owner or of all: those that have not ended, and those that ended at or after ``ended_since``."""
        live = (*owned_by(owner), JobRow.ended_at.is_(None))
        ended = (*owned_by(owner), JobRow.ended_at >= ended_since)
        counts = (select(func.count()).select_from(JobRow).where(*chosen) for chosen in (live, ended))
        newest = _without_launch().where(*live).order_by(*_newest_first()).limit(limit)
        last = _without_launch().where(*ended).order_by(JobRow.ended_at.desc(), JobRow.number.desc()).limit(limit)
        with self._database.reading("listing jobs") as connection:
            total = sum(connection.execute(count).scalar_one() for count in counts)
            found = [*_listed(connection, newest), *_listed(connection, last)]
        return JobList(in_submit_order(found)[-limit:], max(total, len(found)))

    def jobs(self, *, live: bool, limit: int | None = None) -> tuple[Job, ...]:
        """See ``TickStore.jobs``."""
        query = _jobs()
        if live:
            query = query.where(JobRow.state.in_(_LIVE))
        if limit is not None:
            query = query.order_by(*_newest_first()).limit(limit)
        return in_submit_order(list(map(job_of, self._rows("listing jobs", query))))

    def last_ended(self, limit: int) -> tuple[Job, ...]:
        """See ``TickStore.last_ended``."""
        ended = _without_launch().where(JobRow.ended_at.is_not(None), JobRow.static.is_(False))
        query = ended.order_by(JobRow.ended_at.desc(), JobRow.number.desc()).limit(limit)
        with self._database.reading("listing ended jobs") as connection:
            return tuple(_listed(connection, query))

    def change_job(self, key: JobKey, change: JobChange, at: float) -> Job:
        """See ``TickStore.change_job``."""
        with self._database.writing(f"changing job {key.slug}") as connection:
            row = _locked_job(connection, key)
            job = job_of(row)
            after = change.applied(job, at)
            before, values = _changing_values(job), _changing_values(after)
            if change.cause and after.state.ended and not job.state.ended:
                values["end_cause"], before["end_cause"] = str(change.cause), ""
            if changed := {name: value for name, value in values.items() if value != before[name]}:
                connection.execute(_update_job(), {"which": row.number, **changed})
            if after.state.ended and not job.state.ended and row.progress_at > (row.series_at or 0.0):
                _add_to_series(connection, row, job.progress)
            if after.state.ended:
                for table in map(table_of, (JobSpeedRow, JobLossRow)):
                    connection.execute(delete(table).where(table.c.job_number == row.number))
            return job_of(_locked_job(connection, key))

    def series(self, key: JobKey) -> tuple[Progress, ...]:
        """The job's progress over time, oldest first."""
        query = (
            select(table_of(ProgressRow))
            .join(JobRow, JobRow.number == ProgressRow.job_number)
            .where(JobRow.slug == key.slug)
            .order_by(ProgressRow.at)
        )
        rows = self._rows(f"reading progress of job {key.slug}", query)
        return tuple(_PROGRESS.record(row, f"progress of job {key.slug}") for row in rows)

    def job_speeds(self, jobs: Collection[JobKey]) -> tuple[JobSpeeds, ...]:
        """See ``TickStore.job_speeds``."""
        with self._database.reading("reading speeds of jobs") as connection:
            return job_speeds_and_losses.speeds(connection, _by_number(connection, jobs))

    def losses(self, jobs: Collection[JobKey]) -> tuple[MeasuredLoss, ...]:
        """See ``TickStore.losses``."""
        with self._database.reading("reading losses") as connection:
            return job_speeds_and_losses.losses(connection, _by_number(connection, jobs))


def report_progress(connection: Connection, key: JobKey, progress: Progress, interval: float) -> int:
    """Set a job's last report, and add it to its series if ``interval`` seconds have passed; returns its number."""
    row = _locked_job(connection, key)
    report = _last_report(progress, is_reported=not row.static or bool(row.address))
    connection.execute(_update_job(), {"which": row.number, **report})
    last = row.series_at
    if last is None or (progress.at > last and progress.at - last >= interval):
        _add_to_series(connection, row, progress)
    return int(row.number)


def _add_to_series(connection: Connection, row: Row[Any], progress: Progress) -> None:
    connection.execute(insert(table_of(ProgressRow)), _PROGRESS.values(progress, job_number=row.number))
    finite = progress.finite()
    if not row.state.ended:
        job_speeds_and_losses.count_speed(connection, row.number, finite)
        job_speeds_and_losses.count_loss(connection, row.number, finite)
    values: Values = {"series_at": progress.at}
    speed, size = finite.samples_per_second, Allocation(progress.workers, progress.ps)
    if speed and size.workers:
        before = None if row.quarantined_workers is None else Allocation(row.quarantined_workers, row.quarantined_ps)
        kind = TrainingKind.of(job_of(row).request)
        quarantined = count_speed(connection, kind, size, speed, job=row.slug, at=progress.at, quarantined=before)
        if quarantined != before:
            values["quarantined_workers"], values["quarantined_ps"] = quarantined or (None, None)
    connection.execute(_update_job(), {"which": row.number, **values})


def _listed(connection: Connection, query: Select[Any]) -> Iterator[Job]:
    return (job_of(row, launch=NO_LAUNCH) for row in connection.execute(query))


def owned_by(owner: User | None) -> tuple[ColumnElement[bool], ...]:
    """Conditions that choose the jobs of one owner, or all."""
    return () if owner is None else (JobRow.uid == owner.uid, JobRow.user_name == owner.name)


def _newest_first() -> tuple[ColumnElement[Any], ...]:
    # Longer numbers are greater, as in submit order.
    return JobRow.submitted.desc(), func.length(JobRow.id).desc(), JobRow.id.desc()


def job_numbers(connection: Connection, keys: Collection[JobKey], *, lock: bool = False) -> dict[JobKey, int]:
    """The numbers of jobs; raises ``StoreError`` if one is not known. ``lock``: until the transaction ends."""
    numbers = {key: number for number, key in _by_number(connection, keys, lock=lock).items()}
    if missing := sorted(key.slug for key in set(keys) - numbers.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StoreError(f"there is no job {missing[0]}{more}")
    return numbers


def _by_number(connection: Connection, keys: Collection[JobKey], *, lock: bool = False) -> dict[int, JobKey]:
    """Those of the jobs that the store has, by number."""
    slugs = {key.slug: key for key in keys}
    query = select(JobRow.number, JobRow.slug).order_by(JobRow.number)
    query = query.with_for_update() if lock else query
    found = (connection.execute(query.where(JobRow.slug.in_(batch))) for batch in batches(slugs))
    return {row.number: slugs[row.slug] for rows in found for row in rows}


def _locked_job(connection: Connection, key: JobKey) -> Row[Any]:
    row = connection.execute(_lock_job(), {"which": key.slug}).one_or_none()
    if row is None:
        raise StoreError(f"there is no job {key.slug}")
    return row


# Statements are built once: that takes longer than SQLite takes to run them.


@functools.cache
def _jobs() -> Select[Any]:
    return select(table_of(JobRow))


@functools.cache
def _without_launch() -> Select[Any]:
    return select(*(each for each in table_of(JobRow).c if each.name != "launch"))


@functools.cache
def _lock_job() -> Select[Any]:
    return _jobs().where(JobRow.slug == bindparam("which")).with_for_update()


@functools.cache
def _update_job() -> Update:
    table = table_of(JobRow)
    return update(table).where(table.c.number == bindparam("which"))
