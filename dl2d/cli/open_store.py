"""The store of a configuration, as commands open it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dl2d.config.settings import Settings

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore


@contextlib.contextmanager
def open_store(settings: Settings) -> Iterator[SqlStore]:
    """The store, opened without the lease and without a change of its schema, as beside a running daemon."""
    from dl2d.store.sql_store import SqlStore  # noqa: PLC0415 - half a second that commands without a store do not wait for

    with contextlib.closing(SqlStore(settings.store_url)) as store:
        yield store
