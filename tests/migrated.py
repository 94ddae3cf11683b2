"""Stores as the migrations leave them: each is a copy of one that was migrated, for that takes far longer."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from dl2d.store import schema_version


def sqlite_store(file: Path) -> str:
    """URL of a new store in a file that is not there yet."""
    file.touch(mode=0o600, exist_ok=False)
    file.write_bytes(_migrated())
    return f"sqlite:///{file}"


@functools.cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.sqlite")
        schema_version.upgrade(f"sqlite:///{file}")
        return file.read_bytes()
