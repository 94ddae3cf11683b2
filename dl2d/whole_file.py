"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file in the place of an older one; text in UTF-8.

    Written beside, synced and renamed: whoever reads it, also after a crash, finds the older one or this one, whole.

    Raises
    ------
    OSError
        It cannot be written; the older one is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as opened:
            opened.write(data.encode() if isinstance(data, str) else data)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
