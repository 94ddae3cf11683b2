"""What an interrupted training goes on from, in one file that is there as a whole or not at all."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from dl2d.atomic_file import write_atomically
from dl2d.core.array_types import Arrays
from dl2d.core.errors import CheckpointError
from dl2d.policies.common.checkpoint import writing

#: Iterations of the search (dl2), or rounds of actor-critic learning (dl2-original), unless another number is given.
DEFAULT_ITERATIONS = 150


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """Plain JSON values, and arrays by name (none is called ``words``)."""

    words: Mapping[str, Any]
    arrays: Arrays


def save_state(state: State, file: Path) -> None:
    """Write a state in the place of an older one.

    Raises
    ------
    CheckpointError
        It cannot be written.
    """
    words = np.frombuffer(json.dumps(dict(state.words)).encode(), dtype=np.uint8)
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, words=words, **state.arrays)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, packed.getvalue())


def load_state(file: Path) -> State:
    """Read what ``save_state`` wrote.

    Raises
    ------
    CheckpointError
        There is none, or it is damaged.
    """
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as opened:
            arrays = dict(opened)
        words = json.loads(arrays.pop("words").tobytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent}: cannot resume: there is no {file.name}") from None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    return State(words=words, arrays=arrays)
