"""Checkpoints of learned policies: folders with the weights and settings of one version of a policy.

A folder has ``weights.safetensors`` (arrays, no code) and ``checkpoint.json`` (everything else). It is written
completely or not at all. The digest of weights and settings identifies the version of the policy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dl2d.atomic_file import sync_folder, write_atomically
from dl2d.core.array_types import Arrays
from dl2d.core.errors import CheckpointError

#: Settings that replace those of a checkpoint, by name; None where the checkpoint's counts.
Settings = Mapping[str, float | bool | None]

#: Number of the format that is written and read.
FORMAT = 1
#: Number of digits of the digest in the name of a version.
DIGITS = 12
#: Names of designs in checkpoints, definitions of experiments and commands of earlier versions, with those of today,
#: which are the names of the policies.
FORMER_DESIGNS = {"jumps": "dl2", "original": "dl2-original"}
_WEIGHTS = "weights.safetensors"
_RECORD = "checkpoint.json"
_MAX_BYTES = 1 << 30


def checkpoint_of(policy: object) -> Checkpoint | None:
    """The checkpoint that a policy was made with; None if it has none, or is a plug-in that does not show it."""
    found = getattr(policy, "checkpoint", None)
    return found if isinstance(found, Checkpoint) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """Weights and settings of a learned policy, and a record of its training."""

    #: Name of the policy that can read it: ``dl2``, ``dl2-original``.
    policy: str
    #: Arrays by name; float32, float64 or int64.
    weights: Arrays = field(repr=False)
    #: JSON values that the policy needs, such as sizes of layers.
    settings: Mapping[str, Any]
    #: JSON values for people and for the gate: where, on which workloads and for how long it was trained; results.
    training: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of policy, weights and settings, hexadecimal: checkpoints with equal digests decide alike."""
        sha = hashlib.sha256(msgspec.json.encode([FORMAT, self.policy, dict(self.settings)], order="deterministic"))
        for name in sorted(self.weights):
            array = np.ascontiguousarray(self.weights[name])
            sha.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            sha.update(array.tobytes())
        return sha.hexdigest()


def version_of(checkpoint: Checkpoint, overrides: Settings, suffix: str = "") -> str:
    """Name of a policy's version: the beginning of the checkpoint's digest, and the settings that replace its own."""
    settings = "".join(f" {name}={value!r}" for name, value in sorted(overrides.items()) if value is not None)
    return checkpoint.digest[:DIGITS] + suffix + settings


def settings_in(version: str) -> dict[str, float | bool]:
    """Settings in a name made by ``version_of``; empty for other names."""
    settings: dict[str, float | bool] = {}
    for word in version.split()[1:]:
        name, _, value = word.partition("=")
        try:
            settings[name] = {"True": True, "False": False}[value] if value in ("True", "False") else float(value)
        except ValueError:
            return {}
    return settings


class _Record(msgspec.Struct):
    """Contents of ``checkpoint.json``."""

    format: int
    policy: str
    settings: dict[str, Any]
    training: dict[str, Any]
    digest: str


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` where a checkpoint, or what is kept beside it, cannot be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be written: {error.strerror or error}") from error


def write_checkpoint(checkpoint: Checkpoint, folder: str | os.PathLike[str], *, damaged: bool = False) -> None:
    """Write a checkpoint; one that exists in the folder is replaced, with ``damaged`` also what is left of one.

    The files are synced before the folder has its name, so that a crash leaves it complete, or as it was.

    Raises
    ------
    CheckpointError
        The folder cannot be written, or exists and is not a checkpoint: then it is left as it is.
    """
    target = Path(folder)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    record = _Record(FORMAT, checkpoint.policy, dict(checkpoint.settings), dict(checkpoint.training), checkpoint.digest)
    try:
        if target.exists() and not (damaged or (target / _RECORD).is_file()):
            raise CheckpointError(f"{target}: exists and is not a checkpoint; choose another folder")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        arrays = {name: np.ascontiguousarray(array) for name, array in checkpoint.weights.items()}
        write_atomically(partial / _WEIGHTS, save(arrays))
        write_atomically(partial / _RECORD, msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1))
        sync_folder(partial)
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        if target.exists():
            target.rename(old)
        partial.rename(target)
        sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from error


def checkpoint_in(folder: str | os.PathLike[str]) -> Path:
    """Folder of the checkpoint, given that folder itself or an output folder of ``dl2d train``, which contains it."""
    inside = Path(folder) / "checkpoint"
    return inside if inside.is_dir() else Path(folder)


def read_checkpoint(folder: str | os.PathLike[str], *, policy: str) -> Checkpoint:
    """Read a checkpoint of a policy from its folder, or from an output folder of ``dl2d train``.

    Raises
    ------
    CheckpointError
        It is missing, damaged, of another policy or of another format.
    """
    path = Path(folder)
    try:
        path = checkpoint_in(path)
        if (path / _WEIGHTS).stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: {_WEIGHTS} has more than {_MAX_BYTES >> 20} MiB")
        record = msgspec.json.decode((path / _RECORD).read_bytes(), type=_Record)
        weights = load((path / _WEIGHTS).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is not a checkpoint: there is no file {Path(error.filename).name}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, SafetensorError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from error
    if record.format != FORMAT:
        raise CheckpointError(f"{path}: has format {record.format}; this dl2d reads {FORMAT}")
    if record.policy != policy:
        raise CheckpointError(f"{path}: is of policy {record.policy!r}, not of {policy!r}")
    checkpoint = Checkpoint(policy=record.policy, weights=weights, settings=record.settings, training=record.training)
    if checkpoint.digest != record.digest:
        raise CheckpointError(f"{path}: is damaged: its digest differs from the one in {_RECORD}")
    if any(not np.isfinite(array).all() for array in weights.values() if array.dtype.kind == "f"):
        raise CheckpointError(f"{path}: has weights that are not finite numbers")
    return checkpoint
