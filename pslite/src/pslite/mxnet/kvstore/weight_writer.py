"""Writer of the job's weights to the script's arrays: those asked for before the job had their keys, and later ones."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from pslite.mxnet.arrays import memory, put, reading, write
from pslite.mxnet.kvstore.key_table import Array, KeyTable, KeyTensor, Places
from pslite.mxnet.kvstore.optimizer_states import part_of, whole_state
from pslite.worker.elastic_job_base import OpenSession


class WeightWriter:
    """Writes the weights of a job's keys to the script's arrays."""

    def __init__(self, session: OpenSession, keys: KeyTable) -> None:
        self._session = session
        self._keys = keys
        #: what was asked for before the job had the keys
        self.asked_first: Places = []

    def ask_first(self, tensor: KeyTensor, outs: list[Any]) -> None:
        """Write a key's own value, and the first worker's as soon as the job has the key."""
        self.asked_first.append((tensor, outs))
        for array in outs:
            if array is not tensor.value:
                array[:] = tensor.value

    def begin(self, *, just_arrived: bool = False) -> None:
        """Write what was asked for of keys that the job has now, and forget their initial values."""
        self.write(self.asked_first, just_arrived=just_arrived)
        for tensor in self._keys.all():
            tensor.value = None

    def write(self, outs: Places, *, just_arrived: bool = False) -> None:
        """Write the weights where they were asked for; frozen keys stay as they are.

        Those that arrived in the script's own arrays come from the servers, unless they have `just_arrived`: the script
        may have changed them.
        """
        moving = [(tensor, arrays) for tensor, arrays in outs if tensor.segment >= 0]
        values = self._values([tensor for tensor, _ in moving], just_arrived=just_arrived)
        mx.nd.waitall()
        for (tensor, arrays), value in zip(moving, values, strict=True):
            for array in arrays:
                if not (just_arrived and array is tensor.home):
                    write(array, value)
        outs.clear()

    def put_rows(self, tensor: KeyTensor, out: Any, rows: Any) -> None:
        """Write some rows of a key's weights to a row_sparse array."""
        if tensor.value is not None:
            put(out, reading(tensor.value), rows)
        elif tensor.segment >= 0:
            put(out, self._values([tensor])[0], rows)

    def _values(self, tensors: list[KeyTensor], *, just_arrived: bool = False) -> list[Array]:
        """Return the weights of keys as they are now, shape (size,); parameters as for `write`."""
        session = self._session
        fetched = not just_arrived and any(tensor.home is not None for tensor in tensors)
        whole = whole_state(session) if fetched else None
        return [tensor.of(session.weights) if whole is None else part_of(whole, tensor)[0] for tensor in tensors]

    def point_to_homes(self) -> None:
        """Have the session find weights that lie in the script's arrays, which MXNet may have moved."""
        mx.nd.waitall()
        weights = self._session.weights
        for tensor in self._keys.moving():
            if tensor.home is not None:
                weights.point(tensor.segment, memory(tensor.home, tensor.of(weights)))
