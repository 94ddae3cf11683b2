"""Changes of the daemon's mode: table ``mode_changes``."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, insert, select
from sqlalchemy.orm import Mapped

from dl2d.core.daemon_mode_and_canary import Mode, ModeChange
from dl2d.store.connections_and_transactions import StoreTables
from dl2d.store.tables.row_mapping import NUMBER, Base, Choice, Mapping, Moment, UserText, column, table_of


class ModeChangeRow(Base):
    """A change of the daemon's mode."""

    __tablename__ = "mode_changes"

    number: Mapped[int] = column("number in the order in which they were made", NUMBER, primary_key=True)
    at: Mapped[Moment]
    before: Mapped[str] = column("empty for the first")
    after: Mapped[Mode] = column("observe shadow canary live", Choice(Mode))
    by: Mapped[UserText] = column("the daemon's process and machine")
    reason: Mapped[UserText] = column("start or reload")


_MAPPING = Mapping(ModeChange, ModeChangeRow)


class SqlModes(StoreTables):
    """Changes of the daemon's mode."""

    def enter_mode(self, mode: Mode, *, at: float, by: str, reason: str) -> ModeChange | None:
        """Record the daemon's mode; returns the change, None where it was in this mode before."""
        with self._database.writing(f"entering mode {mode}") as connection:
            last = connection.execute(_newest(1)).one_or_none()
            change = ModeChange(at, None if last is None else last.after, mode, by, reason)
            if change.before is mode:
                return None
            connection.execute(insert(table_of(ModeChangeRow)), _MAPPING.values(change, before=change.before or ""))
        return change

    def mode_changes(self, *, limit: int = 100) -> tuple[ModeChange, ...]:
        """Changes of mode, newest first."""
        return tuple(
            _MAPPING.record(row, f"change of mode {row.number}", before=Mode(row.before) if row.before else None)
            for row in self._rows("listing changes of mode", _newest(limit))
        )


def _newest(limit: int) -> Select[Any]:
    return select(table_of(ModeChangeRow)).order_by(ModeChangeRow.number.desc()).limit(limit)
