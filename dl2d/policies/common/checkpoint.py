"""Checkpoints: what a policy has learned, as a folder that can be copied, compared and gone back to.

A folder has ``weights.safetensors`` (arrays, no code) and ``checkpoint.json`` (everything else). It is written as a
whole or not at all. The digest of what decides is the version of the policy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dl2d.core.errors import CheckpointError

#: Settings that stand in place of a checkpoint's own, by name; None for the checkpoint's.
Settings = Mapping[str, float | bool | None]

FORMAT: Final = 1
#: Digits of a digest that name a version.
DIGITS: Final = 12
_WEIGHTS: Final = "weights.safetensors"
_RECORD: Final = "checkpoint.json"
_MOST_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What was learned, and how."""

    #: Which policy can read it: ``dl2``, ``dl2-original``.
    policy: str
    #: Arrays by name; float32, float64 or int64.
    weights: Mapping[str, NDArray[Any]] = field(repr=False)
    #: Plain JSON values that the policy needs: sizes of layers, names of types.
    settings: Mapping[str, Any]
    #: Plain JSON values for people and for the gate: where it was trained, on what, for how long, how well it did.
    training: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 over policy, weights and settings, hexadecimal: equal ones decide alike."""
        sha = hashlib.sha256(msgspec.json.encode([FORMAT, self.policy, dict(self.settings)], order="deterministic"))
        for name in sorted(self.weights):
            array = np.ascontiguousarray(self.weights[name])
            sha.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            sha.update(array.tobytes())
        return sha.hexdigest()


def version_of(checkpoint: Checkpoint, own: Settings, mark: str = "") -> str:
    """Version of the policy that a checkpoint makes: the beginning of its digest, and settings in place of its own."""
    given = "".join(f" {name}={value!r}" for name, value in sorted(own.items()) if value is not None)
    return checkpoint.digest[:DIGITS] + mark + given


def settings_in(version: str) -> dict[str, float | bool]:
    """The settings that a version of ``version_of`` names; nothing for versions of other kinds."""
    found: dict[str, float | bool] = {}
    for word in version.split()[1:]:
        name, _, value = word.partition("=")
        try:
            found[name] = {"True": True, "False": False}[value] if value in ("True", "False") else float(value)
        except ValueError:
            return {}
    return found


class _Record(msgspec.Struct, forbid_unknown_fields=False):
    format: int
    policy: str
    settings: dict[str, Any]
    training: dict[str, Any]
    digest: str


def write_checkpoint(checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> None:
    """Write a checkpoint, in the place of one that is there; anything else there is left alone.

    Raises
    ------
    CheckpointError
        The folder cannot be written, or is something else than a checkpoint.
    """
    target = Path(folder)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    record = _Record(FORMAT, checkpoint.policy, dict(checkpoint.settings), dict(checkpoint.training), checkpoint.digest)
    try:
        if target.exists() and not (target / _RECORD).is_file():
            raise CheckpointError(f"{target}: is there and is no checkpoint; nothing was written")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        arrays = {name: np.ascontiguousarray(array) for name, array in checkpoint.weights.items()}
        (partial / _WEIGHTS).write_bytes(save(arrays))
        (partial / _RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1))
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from error


def checkpoint_in(folder: str | os.PathLike[str]) -> Path:
    """The checkpoint that a folder is, or has: that of ``dl2d train`` has one called ``checkpoint``."""
    inside = Path(folder) / "checkpoint"
    return inside if inside.is_dir() else Path(folder)


def read_checkpoint(folder: str | os.PathLike[str], *, policy: str) -> Checkpoint:
    """Read a checkpoint of a policy.

    Raises
    ------
    CheckpointError
        It is missing, damaged, of another policy or of a newer format; names the folder and what is wrong.
    """
    place = Path(folder)
    try:
        if (place / _WEIGHTS).stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{place}: {_WEIGHTS} has more than {_MOST_BYTES >> 20} MiB")
        record = msgspec.json.decode((place / _RECORD).read_bytes(), type=_Record)
        weights = load((place / _WEIGHTS).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{place}: is no checkpoint; there is no {Path(error.filename).name}") from None
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, SafetensorError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{place}: is damaged: {error}") from error
    if record.format != FORMAT:
        raise CheckpointError(f"{place}: has format {record.format}; this dl2d reads {FORMAT}")
    if record.policy != policy:
        raise CheckpointError(f"{place}: is of policy {record.policy!r}, not of {policy!r}")
    checkpoint = Checkpoint(policy=record.policy, weights=weights, settings=record.settings, training=record.training)
    if checkpoint.digest != record.digest:
        raise CheckpointError(f"{place}: is damaged: its digest is not the one that was written")
    if any(not np.isfinite(array).all() for array in weights.values() if array.dtype.kind == "f"):
        raise CheckpointError(f"{place}: has weights that are not numbers")
    return checkpoint
