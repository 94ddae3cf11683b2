"""Files of optimizer states: numpy's .npz with the arrays `KEY/weight`, `KEY/0`, ... and `about` (JSON)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pslite.errors import CheckpointError
from pslite.mxnet.kvstore.key_table import Array, KeyTensor
from pslite.numeric.optimizers import slots
from pslite.worker.elastic_job_base import OpenSession
from pslite.worker.training_session import StartState

_FORMAT = "pslite optimizer states 1"


def whole_state(session: OpenSession) -> list[Array]:
    """Return what the servers have of each segment, shape (1 + slots, size)."""
    segments = session.spec.segments
    whole = [np.empty((1 + slots(segment.optimizer), segment.size), dtype=segment.dtype) for segment in segments]
    states = session.fetch()
    for block in reversed(session.blocks):
        whole[block.segment][:, block.offset : block.offset + block.size] = states.pop()  # its memory is freed
    return whole


def part_of(whole: Sequence[Array], tensor: KeyTensor) -> Array:
    """Return a key's part of the state of all segments."""
    return whole[tensor.segment][:, tensor.offset : tensor.offset + tensor.size]


def save(path: str, tensors: Iterable[KeyTensor], session: OpenSession) -> None:
    """Write weights and optimizer states, as the servers have them, to a file of any name."""
    whole = whole_state(session)
    arrays: dict[str, Any] = {}
    for tensor in tensors:
        part = part_of(whole, tensor)
        for row, name in enumerate(["weight", *map(str, range(len(part) - 1))]):
            arrays[f"{tensor.key}/{name}"] = part[row].reshape(tensor.shape)
    # what the optimizers of the first keys have counted: there may have been steps of no key, or of late ones
    (updates,) = session.updates([0])
    about = {"format": _FORMAT, "version": updates}
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:  # noqa: PTH123  (a name as MXNet takes it)
        np.savez(file, **arrays)
    os.replace(temporary, path)  # noqa: PTH105


def load(path: str) -> dict[str, Array]:
    """Return the arrays of a file.

    Raises
    ------
    CheckpointError
        it is no such file.

    """
    try:
        with np.load(path, allow_pickle=False) as file:
            given = {name: file[name] for name in file.files}
        about = json.loads(given["about"].tobytes())
        if about["format"] != _FORMAT or not isinstance(about["version"], int):
            raise ValueError
    except OSError as error:
        raise CheckpointError(f"cannot read the optimizer states {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, EOFError, TypeError) as error:
        raise CheckpointError(f"{path} is not a file of optimizer states that pslite.mxnet has saved") from error
    return given


def version_of(given: dict[str, Array]) -> int:
    """Return how many updates the first keys of a job had when arrays of a file were saved."""
    return int(json.loads(given["about"].tobytes())["version"])


def state_of(given: dict[str, Array], tensors: Iterable[KeyTensor], session: OpenSession) -> StartState:
    """Return the state of a job that arrays of a file stand for, with the weights as they are."""
    whole = [np.zeros((1 + slots(s.optimizer), s.size), dtype=s.dtype) for s in session.spec.segments]
    for tensor in tensors:
        part = part_of(whole, tensor)
        part[0] = tensor.of(session.weights)
        for row in range(1, len(part)):
            array = given.get(f"{tensor.key}/{row - 1}")
            if array is None or array.size != tensor.size:
                raise CheckpointError(
                    f"the optimizer states belong to another model: key {tensor.key!r} is missing or has another size"
                )
            part[row] = array.reshape(-1)
    arrays = tuple(whole[b.segment][:, b.offset : b.offset + b.size].copy() for b in session.blocks)
    return StartState("the optimizer states that the script has loaded", version_of(given), arrays, session.blocks)
