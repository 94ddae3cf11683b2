"""Lock files: each is locked by one process at a time, and contains the name of that process."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

_MAX_HOLDER_BYTES = 1000


def acquire(path: Path, holder: str) -> int:
    """Lock a file, which is created if it does not exist, and write the holder's name into it.

    Returns its descriptor: closing it releases the lock, and so does the end of the process.

    Raises
    ------
    BlockingIOError
        Another process has locked it. The error's text is that process's name, empty if the file has none.
    OSError
        The file cannot be opened or written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(descriptor, _MAX_HOLDER_BYTES, 0)
            raise BlockingIOError(other.decode("utf-8", "replace").strip()) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode("utf-8", "replace")[:_MAX_HOLDER_BYTES], 0)
        stack.pop_all()
    return descriptor
