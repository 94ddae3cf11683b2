"""The guard's state: table ``guard_memory``, one row that is replaced when something in it changes."""

from __future__ import annotations

import msgspec
import structlog
from sqlalchemy import select
from sqlalchemy.orm import Mapped

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.errors import StoreError
from dl2d.core.jobs import JobKey
from dl2d.core.resize_guard_state import GuardState, LearnedLimit, NodeTrouble, Requeue
from dl2d.store.connections_and_transactions import StoreTables
from dl2d.store.tables.row_mapping import Base, Json, column, decoded_json, table_of, upsert

_log = structlog.get_logger(__name__)
_NAME = "guard"


class _Stored(msgspec.Struct, frozen=True):
    """The guard's state as JSON, in which only texts are keys."""

    resized_at: list[tuple[JobKey, float]]
    started_at: dict[str, float]
    start_failures: list[tuple[JobKey, StartFailures]]
    stops_asked: dict[str, float]
    refused_nodes: list[tuple[JobKey, dict[str, NodeTrouble]]] = []
    learned_limits: dict[str, LearnedLimit] = {}
    postponed: list[tuple[JobKey, Requeue]] = []


class GuardStateRow(Base):
    """Resizes, starts, failed starts and stop requests on which the guard's rules depend."""

    __tablename__ = "guard_memory"

    name: Mapped[str] = column("always guard", primary_key=True)
    memory: Mapped[_Stored] = column("times by job, task and handle, seconds since 1970, JSON", Json(_Stored))


class SqlGuardState(StoreTables):
    """The guard's state."""

    def keep_guard_state(self, guard_state: GuardState) -> None:
        """See ``TickStore.keep_guard_state``."""
        stored = _Stored(
            sorted(guard_state.resized_at.items()),
            dict(guard_state.started_at),
            sorted(guard_state.start_failures.items()),
            dict(guard_state.stops_asked),
            [(key, dict(nodes)) for key, nodes in sorted(guard_state.avoided_nodes.items())],
            dict(guard_state.learned_limits),
            sorted(guard_state.requeued.items()),
        )
        with self._database.writing("keeping the guard's state") as connection:
            connection.execute(upsert(connection, GuardStateRow, replace=True), {"name": _NAME, "memory": stored})

    def guard_state(self) -> GuardState:
        """See ``TickStore.guard_state``. If the row cannot be read, that is logged, and the empty state replaces it."""
        query = select(table_of(GuardStateRow)).where(GuardStateRow.name == _NAME)
        rows = self._rows("reading the guard's state", query)
        if not rows:
            return GuardState()
        try:
            stored: _Stored = decoded_json(rows[0], table_of(GuardStateRow).c.memory, "the guard's state")
        except StoreError as error:
            _log.warning("store.guard_state_lost", error=str(error))
            self.keep_guard_state(GuardState())
            return GuardState()
        return GuardState(
            resized_at=dict(stored.resized_at),
            started_at=stored.started_at,
            start_failures=dict(stored.start_failures),
            stops_asked=stored.stops_asked,
            avoided_nodes=dict(stored.refused_nodes),
            learned_limits=stored.learned_limits,
            requeued=dict(stored.postponed),
        )
