"""Lock files, each held by one process at a time, with the holder's name in them."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

_MAX_HOLDER_BYTES = 1000


def hold(path: Path, holder: str) -> int:
    """Hold a file, which is made where there is none, and write the holder's name into it.

    Returns its descriptor: whoever closes it lets go of the file, and so does the kernel when the process ends.

    Raises
    ------
    BlockingIOError
        Another process holds it. Its text is the name of that process, empty if it has not given any.
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
