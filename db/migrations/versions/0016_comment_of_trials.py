"""Comment of ``policy_trials.current``: it may also name a policy without versions, or the site's scheduler."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_BEFORE = "digest of the version that decided then"


def upgrade() -> None:
    _comment(f"{_BEFORE}, a policy''s name, or site-scheduler")


def downgrade() -> None:
    _comment(_BEFORE)


def _comment(text: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"COMMENT ON COLUMN policy_trials.current IS '{text}'")
