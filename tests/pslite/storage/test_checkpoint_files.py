"""Checkpoints: written while the job trains and is resized; a job goes on from one at any size with the same bits."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from pslite_jobs import KillAt, command, environment, run_job, static_digest

from pslite.errors import CheckpointError
from pslite.job.job_spec import SGD, Adam, JobSpec, Part, Segment
from pslite.job.weight_blocks import cut
from pslite.net.messages import NotSaved, Saved
from pslite.numeric.optimizers import slots
from pslite.storage.checkpoint_files import (
    KEPT,
    Checkpoint,
    SavedFile,
    Saver,
    complete,
    latest,
    to_resume,
    write_blocks,
)
from pslite.testing import Resize, run_local

TORCH_SCRIPT = str(Path(__file__).parents[1].joinpath("torch_worker.py"))
ADAM = ("--optimizer", "adam", "--epochs", "12")


def spec(folder: Path, **changes) -> JobSpec:
    parts = (Part("a", (3, 2)), Part("b", (200,)))
    given = {
        "segments": (
            Segment(dtype="float32", optimizer=Adam(lr=0.1), parts=parts),
            Segment(dtype="float64", optimizer=SGD(lr=0.1), parts=(Part("c", (5,)),)),
        ),
        "samples": 64, "batch": 32, "epochs": 5, "seed": 0, "mode": "exact", "shards": 4, "block_bytes": 256,
        "checkpoint": str(folder), "checkpoint_every": 2,
    }  # fmt: skip
    return JobSpec(**{**given, **changes})


def states(job: JobSpec, start: float = 0.0) -> dict[int, np.ndarray]:
    return {
        block.number: np.full((1 + slots(block.optimizer), block.size), start + block.number, dtype=block.dtype)
        for block in cut(job)
    }


def a_checkpoint(folder: Path, version: int = 2, **changes) -> Path:
    job = spec(folder, **changes)
    blocks = states(job, version)
    first = {number: blocks[number] for number in list(blocks)[:2]}
    rest = {number: blocks[number] for number in list(blocks)[2:]}
    files = {name: write_blocks(folder, version, name, part) for name, part in (("x", first), ("y", rest))}
    return complete(folder, version, job, files)


def alone(script: list[str]) -> str:
    """What a script says that is run as one process, without servers."""
    done = subprocess.run(script, env=environment(), capture_output=True, text=True, timeout=200, check=True)
    return done.stdout.strip()


# --- whole jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_whose_server_died_goes_on_at_another_size_with_the_same_bits(tmp_path):
    options = (*ADAM, "--checkpoint", str(tmp_path), "--every", "7")
    strict = (*options, "--step-seconds", "0.02", "--on-loss", "fail")
    kill = KillAt("ps-1", 40)

    def when_there_is_one(status, director):
        return latest(tmp_path) is None or kill(status, director)

    first = run_job(command(*strict), workers=3, servers=2, on_status=when_there_is_one, state="failed")
    assert "on_loss is 'fail'" in first.reason
    place = latest(tmp_path)
    assert place is not None
    version = Checkpoint(place).version
    assert version % 7 == 0
    assert version >= 7
    again = run_job(command(*options), workers=2, servers=3, schedule=[Resize(version + 3, 4, 1)])
    assert again.plans[0].first_version == version
    assert any(f"goes on from its checkpoint of version {version}" in line for line in again.log)
    assert again.digest == static_digest(*ADAM)


@pytest.mark.slow
def test_checkpoints_made_in_the_middle_of_resizes_are_whole(tmp_path):
    schedule = [Resize(5, 3, 3), Resize(20, 1, 2, oldest=True), Resize(40, 2, 1), Resize(60, 4, 3, oldest=True)]
    copies = tmp_path / "copies"
    copies.mkdir()

    def copy(status, director):
        place = latest(tmp_path / "kept")
        if place is not None and not (copies / place.name).exists():
            with contextlib.suppress(FileNotFoundError, shutil.Error):  # it may be removed for newer ones meanwhile
                shutil.copytree(place, tmp_path / "copy" / place.name)
                (tmp_path / "copy" / place.name).rename(copies / place.name)
        return len(list(copies.iterdir())) < 6

    options = (*ADAM, "--checkpoint", str(tmp_path / "kept"), "--every", "1")
    run_job(command(*options), workers=2, servers=1, schedule=schedule, on_status=copy)
    found = sorted(copies.iterdir())
    assert len(found) >= 6
    assert 0 < len(list((tmp_path / "kept").iterdir())) <= KEPT
    for place in found[:: max(1, len(found) // 6)]:
        folder = tmp_path / f"from-{place.name}"
        shutil.copytree(place, folder / place.name)
        assert alone(command(*ADAM, "--checkpoint", str(folder))) == static_digest(*ADAM), place.name


def test_a_job_alone_makes_them_too(tmp_path):
    options = (*ADAM, "--checkpoint", str(tmp_path), "--every", "100")
    alone(command(*options))
    assert Checkpoint(latest(tmp_path)).version == 100
    result = run_local(command(*options), workers=2, servers=2)
    assert (result.state, result.digest) == ("finished", static_digest(*ADAM))
    assert result.plans[0].first_version == 100


def test_a_checkpoint_of_the_last_version_leaves_nothing_to_do(tmp_path):
    options = ("--epochs", "2", "--checkpoint", str(tmp_path), "--every", "22")
    first = run_local(command(*options))
    assert Checkpoint(latest(tmp_path)).version == 22
    again = run_local(command(*options))
    assert (again.state, again.digest, again.plans[0].first_version) == ("finished", first.digest, 22)


def test_more_epochs_go_on_and_another_script_is_refused_with_the_difference(tmp_path):
    kept = ("--checkpoint", str(tmp_path), "--every", "22")
    run_local(command("--epochs", "2", *kept))
    longer = run_local(command("--epochs", "4", *kept))
    assert (longer.state, longer.digest) == ("finished", static_digest("--epochs", "4"))
    assert longer.plans[0].first_version == 22
    other = run_job(command("--epochs", "4", "--batch", "16", *kept), state="failed")
    for word in ("belongs to another job", "batch: 16 here, 20 there", "resume=False"):
        assert word in other.reason
    anew = run_local(command("--epochs", "4", "--batch", "16", "--begin-anew", *kept))
    assert (anew.state, anew.digest) == ("finished", static_digest("--epochs", "4", "--batch", "16"))


def test_one_that_cannot_be_written_is_told_and_the_job_goes_on(tmp_path):
    (tmp_path / "0000000050.part").touch()
    result = run_local(command("--checkpoint", str(tmp_path), "--every", "50"))
    assert (result.state, result.digest) == ("finished", static_digest())
    assert any("no checkpoint of version 50: ps-0" in line and "File exists" in line for line in result.log)
    assert Checkpoint(latest(tmp_path)).version == 100


def test_a_folder_that_is_none_is_told_before_anything_is_trained(tmp_path):
    (tmp_path / "file").touch()
    result = run_job(command("--checkpoint", str(tmp_path / "file"), "--every", "30"), state="failed")
    assert "file: cannot be read as a folder of checkpoints: Not a directory" in result.reason


@pytest.mark.slow
def test_a_network_goes_on_with_the_same_bits(tmp_path):
    script = [sys.executable, TORCH_SCRIPT, "--checkpoint", str(tmp_path / "kept")]
    digest = alone(script)
    shutil.rmtree(tmp_path / "kept" / "0000000036")
    out = tmp_path / "model.pt"
    again = run_local([*script, "--out", str(out)], workers=1, servers=1)
    assert (again.state, again.digest, again.plans[0].first_version) == ("finished", digest, 30), again.log
    # what the checkpoint calls its tensors is what the model does
    names = Checkpoint(latest(tmp_path / "kept")).tensors()
    saved = torch.load(out, weights_only=True)
    assert set(names) == set(saved)


# --- the folder ---------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_again(tmp_path):
    place = a_checkpoint(tmp_path)
    assert place.name == "0000000002"
    found = Checkpoint(place)
    found.check(spec(tmp_path, epochs=50, checkpoint="/elsewhere", checkpoint_every=9))
    assert {block.number: state.tolist() for block, state in found.states()} == {
        number: state.tolist() for number, state in states(spec(tmp_path), 2).items()
    }
    tensors = found.tensors()
    assert {name: (array.shape, array.dtype.name) for name, array in tensors.items()} == {
        "a": ((3, 2), "float32"), "b": ((200,), "float32"), "c": ((5,), "float64")
    }  # fmt: skip


def test_the_newest_complete_ones_are_kept(tmp_path):
    for version in (2, 4, 6):
        a_checkpoint(tmp_path, version)
    write_blocks(tmp_path, 8, "begun", {0: states(spec(tmp_path))[0]})
    (tmp_path / "notes.txt").touch()
    assert latest(tmp_path) == tmp_path / "0000000006"
    assert sorted(place.name for place in tmp_path.iterdir()) == [
        "0000000004", "0000000006", "0000000008.part", "notes.txt"
    ]  # fmt: skip
    # what another run left unfinished is not mixed with what this one writes, nor kept for ever
    a_checkpoint(tmp_path, 8)
    assert sorted(place.name for place in latest(tmp_path).iterdir()) == ["checkpoint.json", "x", "y"]
    assert to_resume(spec(tmp_path)).version == 8
    assert to_resume(spec(tmp_path, resume=False)) is None
    assert to_resume(spec(tmp_path / "nowhere")) is None


def test_those_of_an_earlier_run_do_not_take_the_place_of_those_that_are_written(tmp_path):
    """A job begins again with resume=False in a folder that has checkpoints of higher versions."""
    for version in (100, 200, 2, 4, 6):
        place = a_checkpoint(tmp_path, version)
        assert (place / "checkpoint.json").is_file()
    assert [place.name for place in sorted(tmp_path.iterdir())] == [f"{version:010d}" for version in (4, 6, 100, 200)]


def test_one_of_which_a_file_is_gone_is_not_completed(tmp_path):
    """The folder was emptied meanwhile, or another job writes into it and has taken the file for its own rest."""
    kept = a_checkpoint(tmp_path, 2)
    job = spec(tmp_path)
    files = {name: write_blocks(tmp_path, 2, name, states(job)) for name in ("x", "y")}
    (tmp_path / "0000000002.part" / "x").unlink()
    with pytest.raises(CheckpointError, match=r"x: was removed since it was written.*another job"):
        complete(tmp_path, 2, job, files)
    assert list(Checkpoint(kept).states())


def test_a_version_that_was_removed_is_replaced_by_the_one_before_it(tmp_path):
    """The folder was replaced by an older copy of it while the job ran."""
    for version in (2, 4):
        a_checkpoint(tmp_path, version)
    assert to_resume(spec(tmp_path), 8).version == 4
    assert to_resume(spec(tmp_path), 4).version == 4
    assert to_resume(spec(tmp_path), 3).version == 2
    with pytest.raises(CheckpointError, match="0000000001"):
        to_resume(spec(tmp_path), 1)


def damage_bytes(place):
    data = bytearray((place / "x").read_bytes())
    data[-1] ^= 1
    (place / "x").write_bytes(data)


def change(**changes):
    def damage(place):
        record = json.loads((place / "checkpoint.json").read_text())
        (place / "checkpoint.json").write_text(json.dumps({**record, **changes}))

    return damage


def test_one_of_an_earlier_version_with_a_durability_that_is_gone_is_read(tmp_path):
    place = a_checkpoint(tmp_path)
    record = json.loads((place / "checkpoint.json").read_text())
    record["spec"]["durability"], record["spec"]["update"], record["inexact_from"] = "relaxed", "worker", 1
    (place / "checkpoint.json").write_text(json.dumps(record))
    found = to_resume(spec(tmp_path, durability="durable"))
    assert found.version == 2
    assert {block.number: state.tolist() for block, state in found.states()} == {
        number: state.tolist() for number, state in states(spec(tmp_path), 2).items()
    }


def outside(place):
    record = json.loads((place / "checkpoint.json").read_text())
    record["files"]["../x"] = record["files"].pop("x")
    (place / "checkpoint.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_bytes, "x: is damaged: its SHA-256"),
        (lambda place: (place / "y").unlink(), "y: cannot be read"),
        (lambda place: (place / "checkpoint.json").write_text("{"), "checkpoint.json: cannot be read"),
        (change(format=2), "has format 2"),
        (change(files={}), "is incomplete: blocks 0, 1"),
        (outside, "is not a file name without a folder"),
    ],
)
def test_a_damaged_one_is_refused_by_name(tmp_path, damage, words):
    damage(a_checkpoint(tmp_path))
    with pytest.raises(CheckpointError, match=words):
        list(to_resume(spec(tmp_path)).states())


# --- the saver ----------------------------------------------------------------------------------------------------


def test_a_version_that_comes_too_early_is_left_out_whole(tmp_path, monkeypatch):
    job, told, gate = spec(tmp_path), [], threading.Event()
    monkeypatch.setattr("pslite.storage.checkpoint_files.os.fsync", lambda _: gate.wait(100))
    saver = Saver(job, "ps-0", told.append)
    blocks = states(job)
    for version in range(1, 5):
        for number, state in blocks.items():
            np.add(state, 1, out=state)
            saver.take(number, version, state)
    gate.set()
    saver.close()
    assert [message for message in told if isinstance(message, NotSaved)] == [
        NotSaved(version=4, reason="version 2 is still being written")
    ]
    saved = [message for message in told if isinstance(message, Saved)]
    assert {message.version for message in saved} == {2}
    assert sorted(number for message in saved for number in message.blocks) == sorted(blocks)
    files = {message.name: SavedFile(message.sha256, message.blocks) for message in saved}
    found = Checkpoint(complete(tmp_path, 2, job, files))
    # as they were at version 2, not as they became
    assert all((state == block.number + 2).all() for block, state in found.states())
