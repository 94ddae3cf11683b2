"""Checkpoints: the one that a job goes on from, and those that it leaves."""

from __future__ import annotations

from pathlib import Path

from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import Record, Seated
from pslite.errors import CheckpointError
from pslite.net.messages import Restored, Saved
from pslite.storage.checkpoints import SavedFile, complete, drop_unfinished


class Snapshots:
    """Knows which checkpoints are whole.

    Parameters
    ----------
    record, voice
        the job's.

    """

    def __init__(self, record: Record, voice: Voice) -> None:
        self._record = record
        self._voice = voice

    def restored(self, member: Seated, message: Restored) -> None:
        """The job goes on from a checkpoint."""
        record = self._record
        pending, version = record.pending, message.version
        if pending is not None and pending.previous is None and pending.plan.workers[0].task == member.task:
            pending.first = record.version = version
            if record.spec is not None and record.spec.checkpoint:
                record.snapshot = version
            self._voice.say(f"the job goes on from its checkpoint of version {version}")

    def saved(self, message: Saved) -> None:
        """Some blocks of a version are on disk; with the last of them its checkpoint is complete."""
        record = self._record
        assert record.spec is not None
        files = record.saves.setdefault(message.version, {})
        files[message.name] = SavedFile(message.sha256, message.blocks)
        if {number for file in files.values() for number in file.blocks} != set(range(len(record.blocks))):
            return
        for version in [version for version in record.saves if version <= message.version]:
            del record.saves[version]
        try:
            place = complete(Path(record.spec.checkpoint), message.version, record.spec, files)
        except CheckpointError as error:
            self._voice.say(str(error))
        else:
            record.snapshot = message.version
            self._voice.say(f"checkpoint of version {message.version}: {place}")

    def tidy(self) -> None:
        """The job has finished: remove what is left of checkpoints that are not whole."""
        record = self._record
        spec = record.spec
        if record.state == "finished" and spec is not None and spec.checkpoint:
            drop_unfinished(Path(spec.checkpoint))
