"""One step of a KVStore: gradients go to the servers, and weights come from there to where they were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import mxnet as mx
import numpy as np

from pslite.job.weight_blocks import Block
from pslite.mxnet.arrays import Array, add_up, gather, memory, near, reading, rows_of, write
from pslite.mxnet.kvstore.key_table import Key, KeyTensor, Places
from pslite.numeric.gradient_sums import Bundle
from pslite.worker.elastic_job_base import OpenSession


class StepExchange:
    """One exchange: gradients on their way to the servers, and weights from there to where they were asked for.

    `tensors` are those that take part; of all others there is no gradient in this step.
    What is copied is so just before it is sent, and as soon as it has come back, so that servers need not wait for all.
    Weights of large keys arrive in the script's arrays.  Their gradients are sent from there, or copied once into
    shared memory if servers look into that.
    """

    def __init__(
        self,
        tensors: Iterable[KeyTensor],
        pushed: dict[Key, list[Any]],
        running: Places,
        outs: Places,
        session: OpenSession,
    ) -> None:
        self._session = session
        self._pushed = pushed
        self._running = {tensor.key: arrays for tensor, arrays in running}
        self._outs: dict[Key, list[Any]] = {}
        for tensor, arrays in [*outs, *running]:
            self._outs.setdefault(tensor.key, []).extend(arrays)
        self._members: list[list[KeyTensor]] = [[] for _ in session.spec.segments]
        for tensor in [*tensors, *(tensor for tensor, _ in running)]:
            self._members[tensor.segment].append(tensor)
        self._missing = Counter(block.segment for block in session.blocks)
        self._coming = session.next_weights
        #: numbers of the blocks that are ready to be sent
        self._filled: set[int] = set()
        #: by segment of which the first block is ready, the arrays whose sum is copied block by block
        self._sources: dict[int, list[Array]] = {}
        self._bundle: Bundle

    def prepare(self, bundle: Bundle) -> None:
        """Have gradients go into a bundle, and weights come out of the session's."""
        # nothing of MXNet's is under way from here on: to ask for each array costs 0.08 ms
        mx.nd.waitall()
        self._bundle = bundle
        bundle.fill = self._fill
        bundle.idle = frozenset(segment for segment, members in enumerate(self._members) if not members)
        if self._coming is None:
            return
        self._coming.take = self._take
        for members in filter(None, self._members):
            tensor = members[0]
            if tensor.alone:
                tensor.home = self._home(tensor)
                place = None if tensor.home is None else memory(tensor.home, tensor.of(self._coming))
                self._coming.point(tensor.segment, place)

    def _home(self, tensor: KeyTensor) -> Any:
        """Return the script's array in which weights can arrive, if there is one; not in a gradient that is sent."""
        pushed = self._pushed[tensor.key]
        asked = self._outs.get(tensor.key, ())
        return next((a for a in asked if near(a) and not any(a is one for one in pushed)), None)

    def finish(self) -> None:
        """Write what was not written as it came."""
        if self._coming is not None:
            self._coming.take = None
        for segment, missing in self._missing.items():
            if missing > 0:
                self._write(segment, self._session.weights)

    def _fill(self, block: Block) -> None:
        if block.number in self._filled:
            return  # it is sent a second time, to a server that has taken the place of another
        self._filled.add(block.number)
        if block.segment not in self._sources:
            self._sources[block.segment] = self._fill_segment(block.segment)
        sources = self._sources[block.segment]
        if sources:
            part = slice(block.offset, block.offset + block.size)
            add_up((source[part] for source in sources), self._bundle.part(block))

    def _fill_segment(self, segment: int) -> list[Array]:
        """Make a segment ready to be sent; return arrays of a large key whose sum is to be copied block by block."""
        for tensor in self._members[segment]:
            pushed = self._pushed.get(tensor.key)
            into = tensor.of(self._bundle)
            if pushed is None:
                arrays = self._running[tensor.key]
                gather(arrays, into)
                np.divide(into, len(arrays), out=into)
                np.subtract(into, tensor.of(self._session.weights), out=into)
            elif tensor.by_rows:
                self._bundle.rows[segment] = rows_of(pushed)
            elif not tensor.alone:
                gather(pushed, into)
            else:
                looked_into = self._session.memory_is_shared and self._bundle.region.fd >= 0
                stays = not looked_into and len(pushed) == 1 and near(pushed[0])
                self._bundle.point(segment, memory(pushed[0], into) if stays else None)
                if not stays and all(near(array) for array in pushed):
                    return [reading(array, into) for array in pushed]
                if not stays:
                    gather(pushed, tensor.of(self._bundle))
        return []

    def _take(self, block: Block) -> None:
        self._missing[block.segment] -= 1
        if not self._missing[block.segment] and self._coming is not None:
            self._write(block.segment, self._coming)

    def _write(self, segment: int, weights: Bundle) -> None:
        for tensor in self._members[segment]:
            values = tensor.of(weights)
            for array in self._outs.get(tensor.key, ()):
                if array is not tensor.home:
                    write(array, values)
