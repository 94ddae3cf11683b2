"""Norms over the whole model: what servers say of their blocks, and what they scale a step by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Literal

import msgspec

from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import Record
from pslite.coordinator.log_writer import LogWriter
from pslite.net.messages import Clip, Norm, Trust
from pslite.numeric.norms import Squares, Tensors
from pslite.numeric.optimizers import clip_factor


class Scales:
    """Adds up sums of squares, and tells servers what follows from them.

    Parameters
    ----------
    record, voice
        the job's.
    log
        takes what servers are told, and has what they were told before.

    """

    def __init__(self, record: Record, voice: Voice, log: LogWriter) -> None:
        self._record = record
        self._voice = voice
        self._log = log
        #: by version and of what, the sums of squares of the blocks that have their sums
        self._squares: dict[tuple[int, Literal["gradient", "update"]], dict[int, Squares]] = {}
        #: what servers were told last of that
        self._told: dict[str, Clip | Trust] = {}
        if last := log.last_scales():
            with contextlib.suppress(msgspec.MsgspecError):
                self._told = msgspec.msgpack.decode(last, type=dict[str, Clip | Trust])

    def told(self) -> Iterable[Clip | Trust]:
        """Return what servers were told last, for one that may not have heard it."""
        return self._told.values()

    def forget(self) -> None:
        """The job goes back: versions that servers were told of are done again."""
        self._squares.clear()
        self._told.clear()
        self._log.write_scales(msgspec.msgpack.encode(self._told))

    def add(self, message: Norm) -> None:
        """With the last block's the norm over the whole model is known, and servers may apply the step."""
        assert self._record.spec is not None
        self._squares.setdefault((message.version, message.of), {}).update(message.squares)
        self._scale(message.version, message.of)

    def _scale(self, version: int, of: Literal["gradient", "update"]) -> None:
        """Have servers apply a step, if all is known of it."""
        record = self._record
        assert record.spec is not None
        squares = self._squares[version, of]
        tensors = Tensors(record.spec, record.blocks) if of == "update" else None
        known = self._told.get(of)
        if known is not None and known.version != version:
            known = None
        if known is None and len(squares) < (len(record.blocks) if tensors is None else len(tensors.asking)):
            return
        del self._squares[version, of]
        servers = {m.task for plan in record.plans_in_force() for m in plan.servers}
        if known is not None:
            # who asks has come in the place of a server that died before it heard; other blocks have done the step
            self._voice.tell(servers, known)
            return
        if tensors is not None:
            scale: Clip | Trust = Trust(version=version, factors=tensors.trust(squares))
        else:
            factor = clip_factor(record.spec.clip_norm, [squares[block.number][0] for block in record.blocks])
            scale = Clip(version=version, factor=factor)
        self._told[of] = scale
        self._log.write_scales(msgspec.msgpack.encode(self._told))
        self._voice.tell(servers, scale)
