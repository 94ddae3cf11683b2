"""Numbers of policy versions as foreign keys, wherever a digest or its first digits stand.

The columns of ``slots`` and ``decisions`` stay NULL in rows from before, which are many and large.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
#: By table: the new column, and the column with the digest, or its first digits and settings, where it is filled.
_COLUMNS = (
    ("slots", "shadow_version_number", ""),
    ("decisions", "version_number", ""),
    ("canaries", "version_number", "version"),
    ("policy_trials", "candidate_number", "candidate"),
    ("policy_trials", "current_number", "current"),
    ("policy_versions", "parent_number", "parent"),
)


def upgrade() -> None:
    number = _NUMBER.compile(op.get_context().dialect)
    for table, column, named in _COLUMNS:
        op.execute(
            f"ALTER TABLE {table} ADD COLUMN {column} {number} "
            f"CONSTRAINT fk_{table}_{column} REFERENCES policy_versions (number)"
        )
        if named:
            op.execute(
                f"UPDATE {table} SET {column} = (SELECT max(v.number) FROM policy_versions AS v "  # noqa: S608 - ours
                f"WHERE v.policy = {table}.policy AND substr(v.digest, 1, 12) = substr({table}.{named}, 1, 12))"
            )
