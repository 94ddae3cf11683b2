"""Canonical JSON of records, for the store and for the hash of a decision's inputs."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


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
    return msgspec.json.decode(data, type=kind)


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
