"""Records of tasks on disk, and for how long those of ended tasks are kept."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from dl2d.core.errors import Unavailable
from dl2d.core.resources import Resources
from dl2d.local.task_supervisor import write_json

log = structlog.get_logger(__name__)
#: Seconds that ended tasks stay listed, from the first listing on that shows their end.
_KEEP_ENDED = 600.0
_HANDLE = re.compile(r"[0-9a-f]{32}")


class ProcessId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of a process within one boot: its number, and when it started in clock ticks since boot."""

    pid: int
    ticks: int | None


class Ending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a task ended."""

    #: Seconds since 1970.
    at: float
    #: As waitpid(2) gives it; None where nobody could wait for it.
    status: int | None
    #: ``itself``; ``stopped`` or ``killed`` after ``stop``; ``outside`` when its supervisor was told to end;
    #: ``never`` when it was not started; ``lost`` when its supervisor vanished.
    cause: str
    #: More about it, for people.
    said: str = ""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A task as its file has it. The manager writes it once, before the start; from then on its supervisor does."""

    handle: str
    tag: str
    job: str
    role: str
    name: str
    node: str
    user: str
    #: Thousandths by name, as ``Resources`` has them.
    demand: dict[str, Annotated[int, msgspec.Meta(ge=0)]]
    #: Seconds since 1970.
    submitted: float
    #: The machine's boot, and its monotonic clock when the task was submitted.
    boot: str
    begun: float
    #: GPUs of the machine that it was given (CUDA_VISIBLE_DEVICES), with the thousandths that it uses of each.
    gpus: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = {}
    #: ``keeper`` in the file, as it was called when the first records were written.
    supervisor: ProcessId | None = msgspec.field(default=None, name="keeper")
    leader: ProcessId | None = None
    ended: Ending | None = None

    @property
    def resources(self) -> Resources:
        """The demand as a vector."""
        return Resources(tuple(sorted((name, amount) for name, amount in self.demand.items() if amount)))


class StopOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manager's order to end a task; its supervisor reads it. ``kill_at`` is on the machine's monotonic clock."""

    kill_at: float


class Records:
    """The folder of the records: ``<handle>.json``, and ``<handle>.stop`` beside those that are to end."""

    def __init__(self, folder: Path, timer: Callable[[], float]) -> None:
        self.folder = folder
        self._timer = timer
        #: When each ended task was first listed as such, on the timer: the daemon may have been away when it ended, and
        #: the clock may be set.
        self._end_listed: dict[str, float] = {}
        #: Ended tasks never change again, so they are read once.
        self._ended: dict[str, Record] = {}
        self._reported: set[str] = set()
        #: Why records of the last ``all`` could not be read.
        self.unreadable: tuple[str, ...] = ()

    def path(self, handle: str) -> Path:
        """File of a task."""
        return self.folder / f"{handle}.json"

    def stop_path(self, handle: str) -> Path:
        """File of the order to end a task."""
        return self.folder / f"{handle}.stop"

    def all(self) -> list[Record]:
        """Every record that can be read, oldest first; one that cannot is left alone, and is in ``unreadable``."""
        try:
            names = [path.stem for path in self.folder.iterdir() if path.suffix == ".json"]
        except OSError as error:
            raise unavailable(self.folder, error) from error
        found: list[Record] = []
        unreadable: list[str] = []
        for name in names:
            if not _HANDLE.fullmatch(name):
                self._report(name, "the file's name is not that of a task record")
                continue
            try:
                record = self._read(name)
            except ValueError as error:
                self._report(name, str(error))
                unreadable.append(f"{self.path(name)} cannot be read ({error}); remove it once its task has ended")
            else:
                found += [record] if record is not None else []
        self.unreadable = tuple(sorted(unreadable))
        return sorted(found, key=lambda record: (record.submitted, record.begun, record.handle))

    def get(self, handle: str) -> Record | None:
        """Record of a task, or None where there is none or it cannot be read."""
        try:
            return self._read(handle)
        except ValueError as error:
            self._report(handle, str(error))
            return None

    def _read(self, handle: str) -> Record | None:
        """Record of a task, or None where there is none. Raises ValueError where it cannot be read."""
        if handle in self._ended:
            return self._ended[handle]
        if not _HANDLE.fullmatch(handle):
            return None
        path = self.path(handle)
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unavailable(path, error) from error
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        if record.handle != handle:
            raise ValueError(f"the file holds the record of {record.handle}")
        if record.ended is not None:
            self._ended[handle] = record
        return record

    def put(self, record: Record) -> None:
        """Write a record. Raises Unavailable."""
        self._write(self.path(record.handle), msgspec.to_builtins(record))

    def order_stop(self, handle: str, kill_at: float) -> None:
        """Write the order to end a task, unless there is an earlier one. Raises Unavailable."""
        path = self.stop_path(handle)
        try:
            present = msgspec.json.decode(path.read_bytes(), type=StopOrder).kill_at
        except FileNotFoundError:
            present = None
        except OSError as error:
            raise unavailable(path, error) from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("a stop order cannot be read and is written again", path=str(path), error=str(error))
            present = None
        if present is None or kill_at < present:
            self._write(path, {"kill_at": kill_at})

    def forget_ended(self, handle: str) -> bool:
        """Forget an ended task if it has been listed as such for long enough; says whether. Raises Unavailable."""
        if self._timer() - self._end_listed.setdefault(handle, self._timer()) < _KEEP_ENDED:
            return False
        self.remove(handle)
        del self._end_listed[handle]
        return True

    def remove(self, handle: str) -> None:
        """Forget a task. Raises Unavailable."""
        for path in (self.stop_path(handle), self.path(handle)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise unavailable(path, error) from error
        self._ended.pop(handle, None)

    def _write(self, path: Path, value: Mapping[str, object]) -> None:
        try:
            write_json(str(path), value)
        except OSError as error:
            raise unavailable(path, error) from error

    def _report(self, handle: str, problem: str) -> None:
        if handle not in self._reported:
            self._reported.add(handle)
            log.warning("a task's record cannot be read", path=str(self.path(handle)), error=problem)


def unavailable(path: Path, error: OSError) -> Unavailable:
    """The error for a state folder that cannot be read or written."""
    hint = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return Unavailable(f"local resource manager: cannot use {path}{hint}", said=error.strerror or str(error))
