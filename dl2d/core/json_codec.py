"""Canonical JSON of records, for the store and for the hash of a decision's inputs."""

from __future__ import annotations

import functools
import hashlib
import threading
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

#: Held while a decoder is made: msgspec 0.22 crashes the process if two threads make the first decoders of a type.
_making_decoder = threading.Lock()


def encode(record: object) -> bytes:
    """Canonical JSON: equal records give equal bytes, whatever the order in which mappings were filled."""
    return msgspec.json.encode(record, order="deterministic")


def decode(data: bytes | str, kind: type[T]) -> T:
    """Inverse of ``encode``.

    Raises
    ------
    msgspec.ValidationError
        The data is not a record of this kind.
    """
    decoder: msgspec.json.Decoder[T] = _decoder(kind)  # type: ignore[arg-type]
    return decoder.decode(data)


def decode_file(path: Path, kind: type[T]) -> T | None:
    """The record in a file; None where there is none, or it is damaged."""
    try:
        return decode(path.read_bytes(), kind)
    except (OSError, msgspec.DecodeError):
        return None


@functools.lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _making_decoder:
        return msgspec.json.Decoder(kind)


def as_plain(record: object) -> Any:
    """The record as dicts, lists, strings and numbers, for ``--json``."""
    return msgspec.to_builtins(record)


def digest(*records: object) -> str:
    """SHA-256 over canonical JSON of the records, hexadecimal."""
    sha = hashlib.sha256()
    for record in records:
        sha.update(encode(record))
        sha.update(b"\0")
    return sha.hexdigest()
