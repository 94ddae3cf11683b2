"""Demands in ``jobs.request`` are amounts by name, as in ``worker_demand`` and ``ps_demand``."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"

#: Rows that are rewritten at a time.
_ROWS = 1000


def upgrade() -> None:
    connection = op.get_bind()
    jobs = sa.table("jobs", sa.column("number"), sa.column("request"))
    rewrite = sa.update(jobs).where(jobs.c.number == sa.bindparam("job")).values(request=sa.bindparam("rewritten"))
    number = 0
    while True:
        following = sa.select(jobs).where(jobs.c.number > number).order_by(jobs.c.number).limit(_ROWS)
        rows = connection.execute(following).all()
        if not rows:
            return
        rewritten = [{"job": row.number, "rewritten": text} for row in rows if (text := _rewritten(row.request))]
        if rewritten:
            connection.execute(rewrite, rewritten)
        number = rows[-1].number


def _rewritten(stored: str) -> str:
    """The request in the new form; "" for one that is damaged, which stays as it is."""
    try:
        request = json.loads(stored)
        for role in ("worker", "ps"):
            amounts = {name: amount / 1000 for name, amount in request[role]["thousandths"]}
            request[role] = {name: int(amount) if amount.is_integer() else amount for name, amount in amounts.items()}
    except (ValueError, TypeError, KeyError):
        return ""
    return json.dumps(request, ensure_ascii=False, separators=(",", ":"))
