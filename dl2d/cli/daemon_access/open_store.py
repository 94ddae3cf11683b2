"""The store of a configuration, as commands open it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dl2d.config.settings import Settings
from dl2d.core.errors import Dl2dError

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore


@contextlib.contextmanager
def open_store(settings: Settings) -> Iterator[SqlStore]:
    """The store, opened without the lease and without a change of its schema, as beside a running daemon."""
    from dl2d.store.sql_store import SqlStore  # noqa: PLC0415 - half a second that commands without a store do not wait for

    with contextlib.closing(SqlStore(settings.store_url)) as store:
        yield store


@contextlib.contextmanager
def store_if_current(settings: Settings) -> Iterator[SqlStore | None]:
    """The same; None where there is no store, or where it cannot be read or has another schema."""
    from dl2d.store import schema_version  # noqa: PLC0415 - as above

    try:
        current = schema_version.current(settings.store_url) == schema_version.head()
    except Dl2dError:
        current = False
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(open_store(settings)) if current else None
