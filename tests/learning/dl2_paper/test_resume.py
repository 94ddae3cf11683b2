"""A training that is killed goes on to the weights that it would have reached."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning.dl2_paper.made_workloads import SMALL, TRAINING, VALIDATION

from dl2d.core.errors import CheckpointError
from dl2d.learning.dl2_paper.settings import Settings
from dl2d.learning.dl2_paper.training_loop import train
from dl2d.learning.interrupted_training import State, load_state, save_state
from dl2d.policies.common.checkpoint import Checkpoint, read_checkpoint

#: Trains in a process of its own and says so in a line after each update and each round.
_CHILD = """
import sys
from pathlib import Path
from learning.dl2_paper.made_workloads import SMALL, TRAINING, VALIDATION
from dl2d.learning.dl2_paper.training_loop import train
from dl2d.policies.common.checkpoint import write_checkpoint

folder = Path(sys.argv[1])
checkpoint = train(
    TRAINING, VALIDATION, SMALL, seed=3, state=folder / "state.npz",
    resume=(folder / "state.npz").is_file(), on_step=lambda *said: print(*said, flush=True),
)
write_checkpoint(checkpoint, folder / "checkpoint")
"""


def a_child(folder: Path) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parents[2])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def weights(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in checkpoint.weights.items()}


@pytest.mark.slow
@pytest.mark.nightly
def test_killed_again_and_again_it_reaches_the_same_weights(tmp_path: Path) -> None:
    """In the midst of imitation, of a round, and where a state is just being written."""
    whole = train(TRAINING, VALIDATION, SMALL, seed=3)
    for moment in ("imitation 10", "learning 1", "learning 3"):
        child = a_child(tmp_path)
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(moment):
                break
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
    assert (tmp_path / "state.npz").is_file()
    child = a_child(tmp_path)
    child.communicate()
    assert child.returncode == 0
    reached = read_checkpoint(tmp_path / "checkpoint", policy="dl2-original")
    assert weights(reached) == weights(whole)
    assert reached.training["history"] == whole.training["history"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(replace(SMALL, replay=512), id="replay"),
        pytest.param(replace(SMALL, federation=2, teacher=""), id="federation"),
        pytest.param(replace(SMALL, gamma=0.5), id="discount"),
    ],
)
def test_what_goes_on_is_all_there(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    whole = train(TRAINING, VALIDATION, settings, seed=0)
    rounds: list[int] = []

    def stop() -> bool:
        rounds.append(len(rounds) + 1)
        return len(rounds) == 2

    train(TRAINING, VALIDATION, settings, seed=0, state=file, should_stop=stop)
    assert load_state(file).words["round"] == 2
    resumed = train(TRAINING, VALIDATION, settings, seed=0, state=file, resume=True)
    assert weights(resumed) == weights(whole)


@pytest.mark.parametrize(
    ("changes", "seed", "message"),
    [
        ({"gamma": 0.5}, 0, r"other settings \(gamma\): give the same"),
        ({}, 1, "another seed"),
        ({"workloads": TRAINING[1:]}, 0, "other workloads"),
    ],
)
def test_another_training_is_not_gone_on_with(changes: dict[str, Any], seed: int, message: str, tmp_path: Path) -> None:
    file, quick = tmp_path / "state.npz", replace(SMALL, iterations=2)
    train(TRAINING, VALIDATION, quick, seed=0, state=file)
    given = changes.pop("workloads", TRAINING)
    with pytest.raises(CheckpointError, match=message):
        train(given, VALIDATION, replace(quick, **changes), seed=seed, state=file, resume=True)


def test_a_state_that_is_missing_or_damaged_is_told(tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    with pytest.raises(CheckpointError, match="cannot resume"):
        train(TRAINING, VALIDATION, SMALL, seed=0, state=file, resume=True)
    save_state(State(words={"a": 1}, arrays={"b": np.arange(3)}), file)
    found = load_state(file)
    assert found.words == {"a": 1}
    assert found.arrays["b"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="other settings"):
        train(TRAINING, VALIDATION, SMALL, seed=0, state=file, resume=True)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(file)
