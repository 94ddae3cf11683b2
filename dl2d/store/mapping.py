"""The tables. Times are seconds since 1970 (UTC) as floating-point numbers unless a name says otherwise.

Jobs have a number of ours, which the other tables refer to; below a job, names are as people know them (``worker-3``).
Rows are never deleted. What a person asks for in SQL is a plain column; the rest of a record is JSON.
"""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

# SQLite counts a primary key by itself only where the type is exactly INTEGER (which has 64 bits there).
_NUMBER = BigInteger().with_variant(Integer(), "sqlite")


class Words(TypeDecorator[str]):
    """Free text from outside: what no database can keep (NUL, halves of surrogate pairs) becomes a replacement mark."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 (SQLAlchemy's signature)
        """Make the text storable."""
        return None if value is None else value.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


class Base(DeclarativeBase):
    """All tables of dl2d."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: Any = {int: BigInteger(), float: Double(), str: Text(), bytes: LargeBinary()}  # noqa: RUF012


def table_of(model: type[Base]) -> Table:
    """The table behind a model, for statements on many rows that need no objects."""
    return cast("Table", model.__table__)


class JobRow(Base):
    """A job, and the last that its coordinator said."""

    __tablename__ = "jobs"
    __table_args__ = (Index(None, "state"), Index(None, "submitted"), Index(None, "id"), Index(None, "name"))

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True, comment="dl2d's own number of the job")
    slug: Mapped[str] = mapped_column(unique=True, comment="cluster.id.submitted")
    cluster: Mapped[str]
    id: Mapped[str] = mapped_column(comment="the resource manager's id; used again by some managers")
    submitted: Mapped[int] = mapped_column(comment="whole seconds since 1970")
    name: Mapped[str] = mapped_column(Words())
    model: Mapped[str] = mapped_column(Words())
    user_name: Mapped[str]
    uid: Mapped[int]
    gid: Mapped[int]
    account: Mapped[str]
    partition: Mapped[str]
    qos: Mapped[str]
    state: Mapped[str] = mapped_column(comment="submitted ready running finished failed cancelled lost")
    anchor: Mapped[str] = mapped_column(comment="handle of the anchor in the resource manager")
    address: Mapped[str] = mapped_column(comment="host:port of the coordinator")
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    end_reason: Mapped[str] = mapped_column(Words())
    digest: Mapped[str] = mapped_column(comment="SHA-256 of the final weights")
    progress_at: Mapped[float] = mapped_column(comment="time of the last report, 0 for none")
    version: Mapped[int] = mapped_column(comment="completed updates")
    total_versions: Mapped[int | None]
    epoch: Mapped[float] = mapped_column(comment="completed epochs")
    loss: Mapped[float | None]
    steps_per_second: Mapped[float | None]
    samples_per_second: Mapped[float | None]
    workers: Mapped[int] = mapped_column(comment="workers that train now")
    ps: Mapped[int] = mapped_column(comment="parameter servers that train now")
    series_at: Mapped[float | None] = mapped_column(comment="time of the newest row in progress")
    strayed_workers: Mapped[int | None] = mapped_column(comment="where its speed was set aside last")
    strayed_ps: Mapped[int | None]
    static: Mapped[bool] = mapped_column(
        server_default=false(), comment="the scheduler in charge runs it at a fixed size; dl2d looks on"
    )
    request: Mapped[str] = mapped_column(comment="what the user asked for, JSON")
    launch: Mapped[str] = mapped_column(comment="command, folder and environment, JSON; may hold the user's secrets")


class TaskRow(Base):
    """One worker or parameter server of a job."""

    __tablename__ = "tasks"
    __table_args__ = (Index(None, "state"), Index(None, "job_number", "role", "ordinal", unique=True))

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True, comment="role-ordinal, unique in the job")
    role: Mapped[str] = mapped_column(comment="worker or ps")
    ordinal: Mapped[int]
    node: Mapped[str]
    demand: Mapped[str] = mapped_column(comment="resources, JSON; memory in MiB")
    state: Mapped[str] = mapped_column(comment="asked granted joined confirmed draining drained released failed")
    handle: Mapped[str] = mapped_column(comment="id in the resource manager")
    asked_at: Mapped[float]
    since: Mapped[float] = mapped_column(comment="when the present state began")
    note: Mapped[str] = mapped_column(Words())


class ResizeRow(Base):
    """One task coming or going."""

    __tablename__ = "resizes"
    __table_args__ = (
        ForeignKeyConstraint(["job_number", "task"], ["tasks.job_number", "tasks.id"]),
        Index(None, "began_at"),
        Index(None, "job_number", "began_at"),
    )

    job_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    task: Mapped[str] = mapped_column(primary_key=True)
    direction: Mapped[str] = mapped_column(primary_key=True, comment="grow or shrink")
    role: Mapped[str]
    node: Mapped[str]
    began_at: Mapped[float]


class ResizeEventRow(Base):
    """A state that a resize entered. A task enters a state once at most."""

    __tablename__ = "resize_events"
    __table_args__ = (
        ForeignKeyConstraint(
            ["job_number", "task", "direction"], ["resizes.job_number", "resizes.task", "resizes.direction"]
        ),
    )

    job_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    task: Mapped[str] = mapped_column(primary_key=True)
    direction: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(comment="position of the state in its machine, to sort by")
    at: Mapped[float]
    note: Mapped[str] = mapped_column(Words())


class TaskReportRow(Base):
    """What the runtime said last of a task, of static jobs' too."""

    __tablename__ = "task_reports"

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True)
    task: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(comment="when the report came")
    cpu_seconds: Mapped[float | None] = mapped_column(comment="since the task began")
    cpu_percent: Mapped[float | None] = mapped_column(comment="of one core, in the last interval")
    memory: Mapped[float | None] = mapped_column(comment="resident, MiB")
    memory_peak: Mapped[float | None] = mapped_column(comment="MiB")
    gpus: Mapped[int] = mapped_column(comment="how many it has, as far as is known")
    gpu_percent: Mapped[float | None] = mapped_column(comment="mean over its GPUs")
    gpu_memory: Mapped[float | None] = mapped_column(comment="MiB, of all of them")
    step_ms: Mapped[float | None] = mapped_column(comment="mean over its last steps")
    step_p95_ms: Mapped[float | None]
    cause: Mapped[str] = mapped_column(Words(), comment="why its process ended; empty while it runs")
    how: Mapped[str] = mapped_column(Words(), comment="the same in words")
    slow: Mapped[float | None] = mapped_column(comment="times as long as others for the same work")
    slow_reason: Mapped[str] = mapped_column(Words())


class RuntimePlanRow(Base):
    """A membership change as the job's coordinator reported it."""

    __tablename__ = "runtime_plans"

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float] = mapped_column(comment="when the report came")
    first_version: Mapped[int] = mapped_column(comment="first version trained under the plan")
    workers: Mapped[int]
    servers: Mapped[int]
    added: Mapped[str] = mapped_column(comment="task ids, JSON")
    removed: Mapped[str] = mapped_column(comment="task ids, JSON")
    moved_bytes: Mapped[int]
    prepare_ms: Mapped[float]
    move_ms: Mapped[float]
    suspension_p50_ms: Mapped[float] = mapped_column(comment="median over workers")
    suspension_max_ms: Mapped[float]


class SlotRow(Base):
    """One scheduling interval. The large columns are JSON, compressed by zlib where that is shorter."""

    __tablename__ = "slots"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float] = mapped_column(index=True)
    policy: Mapped[str]
    policy_version: Mapped[str]
    measure: Mapped[str] = mapped_column(comment="what the scores of alternatives measure")
    inputs_hash: Mapped[str] = mapped_column(comment="SHA-256 over snapshot, policy, version and seed")
    seed: Mapped[str] = mapped_column(comment="decimal; text because it may have more than 64 bits")
    seconds: Mapped[float] = mapped_column(comment="duration of the whole tick")
    changed: Mapped[int] = mapped_column(comment="jobs whose allocation was changed")
    started: Mapped[int] = mapped_column(comment="tasks")
    draining: Mapped[int] = mapped_column(comment="tasks")
    failures: Mapped[int]
    snapshot: Mapped[bytes]
    decision: Mapped[bytes] = mapped_column(comment="as carried out")
    proposed: Mapped[bytes | None] = mapped_column(
        comment="as the policy gave it; NULL where the guard changed nothing"
    )
    shadow: Mapped[bytes | None] = mapped_column(
        comment="what dl2d would have carried out; NULL where it was in charge or was not asked"
    )
    plan: Mapped[bytes]
    outcome: Mapped[bytes]


class DecisionRow(Base):
    """What was decided for one job in one slot, and why."""

    __tablename__ = "decisions"
    __table_args__ = (Index(None, "job_number", "slot"),)

    slot: Mapped[int] = mapped_column(ForeignKey("slots.number"), primary_key=True, autoincrement=False)
    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True, autoincrement=False)
    workers: Mapped[int]
    ps: Mapped[int]
    previous_workers: Mapped[int]
    previous_ps: Mapped[int]
    bound_by: Mapped[str] = mapped_column(comment="the binding constraint")
    reason: Mapped[str] = mapped_column(Words(), comment="why, in words")
    guard: Mapped[str] = mapped_column(Words(), comment="what the guard changed, in words; empty for nothing")
    detail: Mapped[str | None] = mapped_column(comment="shortfalls, alternatives and the guard's reasons, JSON")


class ProgressRow(Base):
    """A job's progress over time."""

    __tablename__ = "progress"

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True)
    at: Mapped[float] = mapped_column(primary_key=True)
    version: Mapped[int]
    total_versions: Mapped[int | None]
    epoch: Mapped[float]
    loss: Mapped[float | None]
    steps_per_second: Mapped[float | None]
    samples_per_second: Mapped[float | None]
    workers: Mapped[int]
    ps: Mapped[int]


class SpeedRow(Base):
    """How fast jobs of a kind were seen to train at one size."""

    __tablename__ = "speeds"

    model: Mapped[str] = mapped_column(Words(), primary_key=True)
    architecture: Mapped[str] = mapped_column(primary_key=True, comment="ps or allreduce")
    consistency: Mapped[str] = mapped_column(primary_key=True, comment="sync or async")
    workers: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    ps: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    samples_per_second: Mapped[float] = mapped_column(comment="mean over the measurements")
    measurements: Mapped[int] = mapped_column(comment="rows of progress that count in the mean")
    jobs: Mapped[int] = mapped_column(comment="jobs that showed it, one after the other")
    at: Mapped[float] = mapped_column(comment="when it was measured last")
    since: Mapped[float] = mapped_column(comment="when this speed was measured first")
    before: Mapped[float] = mapped_column(comment="the speed before it changed, 0 where it has not")
    job: Mapped[str] = mapped_column(comment="slug of the job that showed it last")
    other_samples_per_second: Mapped[float | None] = mapped_column(comment="what the last reports said that is far off")
    other_measurements: Mapped[int] = mapped_column(comment="so many of them")
    other_jobs: Mapped[int] = mapped_column(comment="jobs that said so")
    other_since: Mapped[float]
    other_job: Mapped[str]


class PolicyVersionRow(Base):
    """A checkpoint of a learned policy."""

    __tablename__ = "policy_versions"
    __table_args__ = (UniqueConstraint("policy", "digest"), Index(None, "policy", "state"))

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True, comment="in the order in which they were registered")
    policy: Mapped[str]
    digest: Mapped[str] = mapped_column(comment="SHA-256 of what decides")
    parent: Mapped[str] = mapped_column(comment="digest of the version that training began with")
    folder: Mapped[str] = mapped_column(Words(), comment="where the checkpoint is")
    origin: Mapped[str] = mapped_column(Words())
    at: Mapped[float]
    data_from: Mapped[float | None] = mapped_column(comment="jobs from then on were learned from")
    data_to: Mapped[float | None]
    jobs: Mapped[int] = mapped_column(comment="so many jobs were learned from")
    metrics: Mapped[str] = mapped_column(comment="how well it did in training, JSON")
    state: Mapped[str] = mapped_column(comment="candidate live retired rejected")


class PolicyChangeRow(Base):
    """A version came to another state."""

    __tablename__ = "policy_changes"
    __table_args__ = (Index(None, "version"),)

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    version: Mapped[int] = mapped_column(ForeignKey("policy_versions.number"), comment="number of the version")
    at: Mapped[float]
    before: Mapped[str]
    after: Mapped[str]
    by: Mapped[str] = mapped_column(Words(), comment="a user, gate or daemon")
    reason: Mapped[str] = mapped_column(Words())
    replaced: Mapped[int | None] = mapped_column(
        ForeignKey("policy_versions.number"), comment="version that was live until then"
    )
    rollback: Mapped[bool]


class PolicyTrialRow(Base):
    """A candidate at the gate, beside the version that decided then."""

    __tablename__ = "policy_trials"

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    policy: Mapped[str]
    candidate: Mapped[str] = mapped_column(comment="digest")
    current: Mapped[str] = mapped_column(comment="digest of the version that decided then")
    at: Mapped[float]
    days: Mapped[str] = mapped_column(comment="recorded days, JSON")
    cases: Mapped[str] = mapped_column(Words(), comment="mean completion times in slots by workload, JSON")
    change: Mapped[float | None] = mapped_column(comment="candidate by current, less 1")
    low: Mapped[float | None] = mapped_column(comment="95 % interval of change")
    high: Mapped[float | None]
    passed: Mapped[bool]
    reason: Mapped[str] = mapped_column(Words())


class LearningRunRow(Base):
    """A learner that the daemon started."""

    __tablename__ = "learning_runs"

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    policy: Mapped[str]
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    state: Mapped[str] = mapped_column(comment="running finished failed stopped lost")
    note: Mapped[str] = mapped_column(Words())


class ModeChangeRow(Base):
    """The daemon came into another mode."""

    __tablename__ = "mode_changes"

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    at: Mapped[float]
    before: Mapped[str] = mapped_column(comment="empty for the first")
    after: Mapped[str] = mapped_column(comment="observe shadow live")
    by: Mapped[str] = mapped_column(Words(), comment="the daemon's process and machine")
    reason: Mapped[str] = mapped_column(Words(), comment="start or reload")


class LeaseRow(Base):
    """Who holds the store, or held it last; the lock itself is a file lock or an advisory lock."""

    __tablename__ = "lease"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str] = mapped_column(Words())
    term: Mapped[int] = mapped_column(comment="grows by one with each holder; a holder of an older term may not write")
    since: Mapped[float]


class JobIdRow(Base):
    """Last job id given on a cluster whose resource manager does not number jobs itself."""

    __tablename__ = "job_ids"

    cluster: Mapped[str] = mapped_column(primary_key=True)
    last: Mapped[int]
