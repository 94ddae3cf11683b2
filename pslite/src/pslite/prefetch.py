"""Brings a task's data near before the task joins its job: files into the page cache, or by a command of the user's.

A worker that joins a running job should be able to compute at once; what it does before it joins delays nobody.
"""

from __future__ import annotations

import glob
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from pslite.errors import UsageError
from pslite.usage import size_in_words

#: read at a time
_CHUNK_BYTES = 8 << 20
_SAY_SECONDS = 5.0
_LOOK_SECONDS = 0.05
#: of the memory that is free, unless the user sets a limit: the task needs some itself
_SHARE_OF_MEMORY = 0.5
DEFAULT_SECONDS = 600.0


class Prefetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to bring near.

    Raises
    ------
    UsageError
        a limit is not positive, or the command is empty.

    """

    #: files, folders and patterns, as a shell would have them; `**` is any folders
    paths: tuple[str, ...] = ()
    #: run before the paths are read; without a shell
    command: tuple[str, ...] = ()
    #: the most that is read, in bytes; 0: half of the memory that is free
    limit: int = 0
    #: the longest that all of it may take
    seconds: float = DEFAULT_SECONDS

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise UsageError(f"--prefetch-limit is {self.limit} bytes: it must be more than 0")
        if not self.seconds > 0:
            raise UsageError(f"--prefetch-seconds is {self.seconds:g}: it must be more than 0")

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.paths or self.command)

    def options(self) -> list[str]:
        """Return the options of dl2-run that say the same."""
        found = [text for path in self.paths for text in ("--prefetch", path)]
        if self.command:
            found += ["--prefetch-command", msgspec.json.encode(self.command).decode()]
        if self and self.limit:
            found += ["--prefetch-limit", str(self.limit)]
        if self and self.seconds != DEFAULT_SECONDS:
            found += ["--prefetch-seconds", repr(self.seconds)]
        return found


@dataclass(frozen=True)
class Prefetched:
    """What came of it."""

    files: int
    nbytes: int
    seconds: float
    #: why it ended before all was read; "" if it did not
    ended: str = ""


class _Enough(Exception):
    """The rest is left out, for this reason."""


def prefetch(
    wanted: Prefetch,
    *,
    say: Callable[[str], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    environ: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Prefetched:
    """Bring data near; nothing of it is an error, since the task itself will say what it misses.

    Parameters
    ----------
    wanted
        what, and how much of it.
    say
        takes lines about how it goes.
    stop
        asked again and again; true ends it.
    environ
        of the command; this process's if None.
    clock
        monotonic seconds.

    """
    began = clock()
    limit = wanted.limit or int(_SHARE_OF_MEMORY * psutil.virtual_memory().available)
    done, count, said, ended = 0, 0, began, ""

    def check() -> None:
        if stop():
            raise _Enough("it is to stop")
        if clock() - began > wanted.seconds:
            raise _Enough(f"{wanted.seconds:g} s are over")

    try:
        if wanted.command:
            _run(wanted.command, environ, check, say)
        for path in files(wanted.paths, say):
            for nbytes in _read(path, limit - done, say):
                done += nbytes
                check()
                if clock() - said >= _SAY_SECONDS:
                    said = clock()
                    say(f"prefetch: {size_in_words(done)} of {count + 1} files so far")
                if done >= limit:
                    raise _Enough(f"the limit of {size_in_words(limit)} is reached")
            count += 1
    except _Enough as enough:
        ended = str(enough)
    result = Prefetched(count, done, clock() - began, ended)
    say(
        f"prefetch: {size_in_words(done)} of {count} files in {result.seconds:.1f} s"
        + (f"; the rest is left out: {ended}" if ended else "")
    )
    return result


def files(paths: Iterable[str], say: Callable[[str], None]) -> Iterator[Path]:
    """Give the files that paths and patterns stand for, in order, each once; folders stand for all that is in them."""
    seen: set[Path] = set()
    for text in paths:
        found = sorted(glob.glob(os.path.expanduser(text), recursive=True))  # noqa: PTH111, PTH207  (with ** and ~ alike)
        if not found:
            say(f"prefetch: nothing is called {text!r}")
        for name in found:
            for path in _below(Path(name)):
                if path not in seen:
                    seen.add(path)
                    yield path


def _below(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            yield Path(folder, name)


def _read(path: Path, most: int, say: Callable[[str], None]) -> Iterator[int]:
    """Read a file, at most so many bytes of it; gives the bytes as they are read."""
    try:
        # a pipe or a device would wait for somebody, or never end
        if not path.is_file():
            return
        with path.open("rb", buffering=0) as file:
            # the kernel reads ahead while we copy what is there, and need not copy to anywhere else
            os.posix_fadvise(file.fileno(), 0, most, os.POSIX_FADV_SEQUENTIAL)
            os.posix_fadvise(file.fileno(), 0, min(most, 4 * _CHUNK_BYTES), os.POSIX_FADV_WILLNEED)
            buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, min(most, path.stat().st_size)))))
            while most > 0:
                count = file.readinto(buffer[: min(most, len(buffer))])
                if not count:
                    return
                most -= count
                yield count
    except OSError as error:
        say(f"prefetch: cannot read {path}: {error.strerror}")


def _run(
    command: Sequence[str],
    environ: Mapping[str, str] | None,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Run the user's command to its end; ended with all its processes if there is no time left."""
    try:
        # a session of its own, so that what it has started can be ended with it
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        say(f"prefetch: cannot start {command[0]!r}: {error.strerror}")
        return
    try:
        while True:
            try:
                code = process.wait(_LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                check()
                continue
            break
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        say(f"prefetch: {command[0]!r} ended with status {code}; the task begins all the same")


def command_of(text: str) -> tuple[str, ...]:
    """Return the words of a command: a JSON list, or words as a shell would split them.

    Raises
    ------
    UsageError
        it is neither, or empty.

    """
    try:
        words = msgspec.json.decode(text, type=tuple[str, ...]) if text.startswith("[") else tuple(shlex.split(text))
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"--prefetch-command {text!r}: {error}") from None
    if not words:
        raise UsageError("--prefetch-command is empty: give a program and its arguments")
    return words
