"""Atomic replacement of files."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes | str, mode: int | None = None) -> None:
    """Replace a file's content atomically; text is encoded as UTF-8. Its mode is ``mode``, or that of a new file.

    The data is written to a temporary file beside it, synced and renamed: a reader finds the old content or the new,
    also after a crash.

    Raises
    ------
    OSError
        The file cannot be written; its old content is unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a process that crashed, or a link that another user has put there
    try:
        with partial.open("xb") as opened:
            opened.write(data.encode() if isinstance(data, str) else data)
            if mode is not None:
                os.fchmod(opened.fileno(), mode)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk, so that they are there after a crash of the machine."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
