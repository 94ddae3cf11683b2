from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dl2d.core.errors import CheckpointError
from dl2d.policies.common.checkpoint import Checkpoint, read_checkpoint, write_checkpoint


def a_checkpoint(**changes: object) -> Checkpoint:
    weights = {"a.b": np.arange(6.0).reshape(2, 3), "bias": np.zeros(2, dtype=np.float32)}
    given = {"policy": "dl2", "weights": weights, "settings": {"width": 3}, "training": {"jct": 3.0}} | changes
    return Checkpoint(**given)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_checkpoint(a_checkpoint(), tmp_path / "c")
    back = read_checkpoint(tmp_path / "c", policy="dl2")
    assert back.digest == a_checkpoint().digest
    assert back.settings == {"width": 3}
    assert back.training == {"jct": 3.0}
    assert back.weights["a.b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_writing_again_replaces_it_and_nothing_else(tmp_path: Path) -> None:
    write_checkpoint(a_checkpoint(), tmp_path / "c")
    write_checkpoint(a_checkpoint(settings={"width": 4}), tmp_path / "c")
    assert read_checkpoint(tmp_path / "c", policy="dl2").settings == {"width": 4}
    (tmp_path / "home").mkdir()
    with pytest.raises(CheckpointError, match="home: exists and is not a checkpoint"):
        write_checkpoint(a_checkpoint(), tmp_path / "home")


def test_the_digest_is_of_what_decides() -> None:
    digest = a_checkpoint().digest
    assert a_checkpoint(training={}).digest == digest
    assert a_checkpoint(settings={"width": 4}).digest != digest
    assert a_checkpoint(weights={"a.b": np.arange(6.0).reshape(3, 2), "bias": np.zeros(2)}).digest != digest


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none: is not a checkpoint: there is no file weights\.safetensors"):
        read_checkpoint(tmp_path / "none", policy="dl2")
    write_checkpoint(a_checkpoint(), tmp_path / "c")
    with pytest.raises(CheckpointError, match="is of policy 'dl2', not of 'dl2-original'"):
        read_checkpoint(tmp_path / "c", policy="dl2-original")
    weights = tmp_path / "c" / "weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="c: is damaged"):
        read_checkpoint(tmp_path / "c", policy="dl2")
    weights.write_bytes(whole[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"its digest differs from the one in checkpoint\.json"):
        read_checkpoint(tmp_path / "c", policy="dl2")
    weights.write_bytes(whole)
    record = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    (tmp_path / "c" / "checkpoint.json").write_text(json.dumps(record | {"format": 9}))
    with pytest.raises(CheckpointError, match="has format 9; this dl2d reads 1"):
        read_checkpoint(tmp_path / "c", policy="dl2")


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    write_checkpoint(a_checkpoint(weights={"a": np.array([1.0, np.nan])}), tmp_path / "c")
    with pytest.raises(CheckpointError, match="weights that are not finite numbers"):
        read_checkpoint(tmp_path / "c", policy="dl2")
