"""Changes nothing: once a comment of a column, which every upgrade writes anew (``dl2d.store.sql_views.describe``)."""

from __future__ import annotations

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    pass
