"""Alembic's entry: the caller (dl2d.store.schema_version) hands over a connection inside a transaction."""

from __future__ import annotations

from alembic import context

from dl2d.store.schema_version import VERSION_TABLE
from dl2d.store.tables.row_mapping import Base

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    # SQLite changes a column only by copying its table.
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()
