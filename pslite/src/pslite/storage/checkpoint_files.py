"""Checkpoints: weights and optimizer state of one version, written by the servers while the job trains on.

A folder holds one folder for each kept version, named by its ten digits, with files of blocks in the safetensors format
and a record, ``checkpoint.json``, which says what the job is and has the SHA-256 of each file.  It is made under
another name and gets its own when all is there, so a version is there as a whole or not at all.  Nothing depends on how
many workers and servers wrote it: a job may go on from it at any size.
"""

from __future__ import annotations

import hashlib
import math
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pslite.errors import CheckpointError
from pslite.job.job_spec import JobSpec, differences
from pslite.job.message_base_class import WireRecord
from pslite.job.weight_blocks import Block, cut
from pslite.net.messages import NotSaved, Saved
from pslite.numeric.optimizers import slots

Array = NDArray[Any]

FORMAT = 1
#: versions that are kept
KEPT = 2
_RECORD = "checkpoint.json"
_PART = ".part"
_MAX_RECORD_BYTES = 64 << 20
#: what may differ between the job that wrote a checkpoint and the one that goes on from it
_MAY_DIFFER = {
    "epochs", "checkpoint", "checkpoint_every", "resume", "architecture", "durability", "on_loss"
}  # fmt: skip


class SavedFile(WireRecord):
    """A file of blocks: its SHA-256, hexadecimal, and the numbers of the blocks in it."""

    sha256: str
    blocks: tuple[int, ...]


class Record(WireRecord, kw_only=True):
    """What a checkpoint is of."""

    format: int
    version: int
    spec: JobSpec
    files: dict[str, SavedFile]
    #: of a job that an earlier version ran: the version from which on optimizer state was lost
    inexact_from: int | None = None


def write_blocks(folder: Path, version: int, name: str, states: Mapping[int, Array]) -> SavedFile:
    """Write a file of blocks for a version that is not complete yet.

    Raises
    ------
    CheckpointError
        it cannot be written; names the file.

    """
    place = _part(folder, version) / name
    data = save({f"block/{number}": state for number, state in states.items()})
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(place, data)
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be written: {error.strerror}") from error
    return SavedFile(hashlib.sha256(data).hexdigest(), tuple(sorted(states)))


def complete(folder: Path, version: int, spec: JobSpec, files: Mapping[str, SavedFile]) -> Path:
    """Make a version's checkpoint valid, now that all its files are there, and drop all before it but the newest.

    `KEPT` remain, with this one.  Those of higher versions are of an earlier run: they stay, and do not count.

    Raises
    ------
    CheckpointError
        it cannot be written, or one of its files is gone; names the file.

    """
    part, whole = _part(folder, version), place_of(folder, version)
    record = Record(format=FORMAT, version=version, spec=spec, files=dict(files))
    try:
        if gone := [name for name in files if not (part / name).is_file()]:
            raise CheckpointError(
                f"{part / gone[0]}: was removed since it was written: the checkpoint of version {version} is not "
                "completed. Does another job write into this folder?"
            )
        for other in part.iterdir():
            if other.name not in files:
                other.unlink()  # of a run that did not come so far
        _write(part / _RECORD, msgspec.json.encode(record))
        if whole.exists():
            shutil.rmtree(whole)
        part.rename(whole)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{part}: cannot be completed: {error.strerror}") from error
    for old in sorted(place for place in _complete_ones(folder) if place <= whole)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    drop_unfinished(folder, before=version)
    return whole


def drop_unfinished(folder: Path, *, before: float = math.inf) -> None:
    """Remove what was begun of versions before one and never completed; of all when the job is over."""
    for started in folder.glob(f"*{_PART}"):
        version = started.name.removesuffix(_PART)
        if version.isdecimal() and int(version) < before:
            shutil.rmtree(started, ignore_errors=True)


def drop_part(folder: Path, version: int) -> None:
    """Remove what was begun of a version that cannot be completed, which may have filled the disk."""
    shutil.rmtree(_part(folder, version), ignore_errors=True)


def place_of(folder: Path, version: int) -> Path:
    """Return where the checkpoint of a version is, once it is whole."""
    return folder / f"{version:010d}"


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder; None if there is none.

    Raises `CheckpointError` if the folder cannot be read.
    """
    try:
        return max(_complete_ones(folder), default=None)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read as a folder of checkpoints: {error.strerror}") from error


class Checkpoint:
    """A complete checkpoint, opened to be read.

    Raises
    ------
    CheckpointError
        it cannot be read, or is damaged; names the file.

    """

    def __init__(self, place: Path) -> None:
        self.place = place
        try:
            with (place / _RECORD).open("rb") as file:
                data = file.read(_MAX_RECORD_BYTES)
            self.record = _decode(data)
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{place / _RECORD}: cannot be read: {error}") from error
        if self.record.format != FORMAT:
            raise CheckpointError(
                f"{place}: has format {self.record.format}, but this version of pslite reads format {FORMAT}"
            )
        self._blocks = cut(self.record.spec)
        missing = set(range(len(self._blocks))) - {n for file in self.record.files.values() for n in file.blocks}
        if missing:
            raise CheckpointError(
                f"{place}: is incomplete: blocks {', '.join(map(str, sorted(missing)[:5]))} are missing"
            )

    @property
    def version(self) -> int:
        """Completed updates."""
        return self.record.version

    def check(self, spec: JobSpec) -> None:
        """Raise ``CheckpointError`` if this is of another job than `spec`; more epochs are the same job."""
        same = {name: getattr(spec, name) for name in _MAY_DIFFER}
        theirs = msgspec.structs.replace(self.record.spec, **same)
        if spec != theirs:
            found = "; ".join(differences(spec, theirs)[:10])
            raise CheckpointError(
                f"{self.place}: belongs to another job: {found}. To start from the beginning, give another folder or "
                "resume=False"
            )

    def states(self) -> Iterator[tuple[Block, Array]]:
        """Yield all blocks with their states: weights, then the optimizer's; (1 + slots, elements)."""
        for name, file in self.record.files.items():
            place = self.place / name
            if Path(name).name != name:
                raise CheckpointError(f"{self.place / _RECORD}: {name!r} is not a file name without a folder")
            try:
                with place.open("rb") as opened:
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
                if digest != file.sha256:
                    raise CheckpointError(f"{place}: is damaged: its SHA-256 is {digest}, not {file.sha256}")
                with safe_open(place, framework="np") as tensors:
                    for number in file.blocks:
                        block = self._blocks[number]
                        state = np.ascontiguousarray(tensors.get_tensor(f"block/{number}"))
                        if state.shape != (1 + slots(block.optimizer), block.size) or state.dtype != block.dtype:
                            raise CheckpointError(
                                f"{place}: block {number} has another shape or type than the job's description gives it"
                            )
                        yield block, state
            except (OSError, SafetensorError, IndexError) as error:
                raise CheckpointError(f"{place}: cannot be read: {error}") from error

    def tensors(self) -> dict[str, Array]:
        """Return the weights by the names that the model's tensors have."""
        flat = [np.empty(segment.size, dtype=segment.dtype) for segment in self.record.spec.segments]
        for block, state in self.states():
            flat[block.segment][block.offset : block.offset + block.size] = state[0]
        found: dict[str, Array] = {}
        for segment, array in zip(self.record.spec.segments, flat, strict=True):
            offset = 0
            for part in segment.parts:
                found[part.name] = array[offset : offset + part.size].reshape(part.shape)
                offset += part.size
        return found


def to_resume(spec: JobSpec, version: int = -1) -> Checkpoint | None:
    """Return what a job should go on from: its checkpoint of a version, or the newest one; None where it begins.

    If the checkpoint of that version was removed since, or the folder replaced by an older copy, it is the newest one
    before that version.

    Raises
    ------
    CheckpointError
        there is a checkpoint, but it is damaged or of another job; or there is none for the version asked for.

    """
    place = None
    if version >= 0:
        place = wanted = place_of(Path(spec.checkpoint), version)
        if not (wanted / _RECORD).is_file():
            place = max((earlier for earlier in _complete_ones(wanted.parent) if earlier < wanted), default=wanted)
    elif spec.checkpoint and spec.resume:
        place = latest(Path(spec.checkpoint))
    if place is None:
        return None
    found = Checkpoint(place)
    found.check(spec)
    return found


class Saver:
    """Copies blocks as they reach a version to be kept, and writes them in a thread of its own.

    One version is written at a time: one that comes before the last is on disk is left out.

    Parameters
    ----------
    spec
        the job.
    name
        begins the names of this process' files.
    report
        called from the thread with each `Saved` and `NotSaved`.
    before
        called from the thread before it writes.

    """

    def __init__(
        self,
        spec: JobSpec,
        name: str,
        report: Callable[[Saved | NotSaved], None],
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._before = before
        self._folder = Path(spec.checkpoint)
        self._every = spec.checkpoint_every
        self._name = name
        self._report = report
        self._lock = threading.Lock()
        #: the version that is being written, and how many of its blocks are not on disk yet
        self._open = -1
        self._unwritten = 0
        #: its blocks that have been taken: one that a server gives away and gets back may come to it twice
        self._taken: set[int] = set()
        self._left_out = -1
        self._files = 0
        self._free: dict[tuple[str, tuple[int, ...]], list[Array]] = {}
        self._queue: queue.SimpleQueue[tuple[int, int, Array] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, number: int, version: int, state: Array) -> None:
        """Look at a block that has just reached a version; copies it if that is one to be kept."""
        if not self._every or version % self._every or version == self._left_out:
            return
        with self._lock:
            if version != self._open and self._unwritten:
                self._left_out = version
                reason = f"version {self._open} is still being written"
            else:
                if version != self._open:
                    self._taken.clear()
                self._open = version
                if number in self._taken:
                    return
                self._taken.add(number)
                self._unwritten += 1
                free = self._free.setdefault((state.dtype.name, state.shape), [])
                copy = free.pop() if free else np.empty_like(state)
                reason = ""
        if reason:
            self._report(NotSaved(version=version, reason=reason))
            return
        np.copyto(copy, state)
        self._queue.put((version, number, copy))
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="pslite-saver", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Write what is queued, then end; `done` once that is so.  Nothing is taken any more."""
        self._every = 0
        if self._thread is not None:
            self._queue.put(None)

    @property
    def done(self) -> bool:
        """Whether all is written, after `finish`."""
        return self._thread is None or not self._thread.is_alive()

    def close(self, seconds: float | None = None) -> None:
        """Write what is queued, and wait for that, at most so long."""
        self.finish()
        if self._thread is not None:
            self._thread.join(seconds)

    def _loop(self) -> None:
        while True:
            # All that is there goes into one file; it is of one version.
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            blocks = [item for item in items if item is not None]
            if blocks:
                self._write(blocks[0][0], {number: state for _, number, state in blocks})
            if len(blocks) < len(items):
                return

    def _write(self, version: int, states: dict[int, Array]) -> None:
        self._files += 1
        name = f"{self._name}-{self._files}.safetensors"
        answer: Saved | NotSaved
        try:
            self._before()
            file = write_blocks(self._folder, version, name, states)
            answer = Saved(version=version, name=name, sha256=file.sha256, blocks=file.blocks)
        except CheckpointError as error:
            answer = NotSaved(version=version, reason=str(error))
        with self._lock:
            self._unwritten -= len(states)
            for state in states.values():
                self._free[state.dtype.name, state.shape].append(state)
        self._report(answer)


def _decode(data: bytes) -> Record:
    """Return a record, also one of an earlier version, which knew a durability that is not there any more."""
    plain = msgspec.json.decode(data)
    spec = plain.get("spec") if isinstance(plain, dict) else None
    if isinstance(spec, dict) and spec.get("durability") == "relaxed":
        spec["durability"] = "none"
    return msgspec.convert(plain, Record)


def _write(place: Path, data: bytes) -> None:
    """Write a file, which is on disk when this returns."""
    with place.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _part(folder: Path, version: int) -> Path:
    return folder / f"{version:010d}{_PART}"


def _complete_ones(folder: Path) -> list[Path]:
    try:
        return [place for place in folder.iterdir() if place.name.isdecimal() and (place / _RECORD).is_file()]
    except FileNotFoundError:
        return []
