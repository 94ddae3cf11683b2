"""Hugging Face's Trainer and Lightning's as elastic jobs: the bits of one process, at any size."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from mxnet_jobs import Unavailable, environ, make_environment
from pslite_jobs import run_job

from pslite.coordinator import Settings
from pslite.errors import SpecError
from pslite.job.job_spec import SGD, Adam
from pslite.job.learning_rates import Constant, Cosine
from pslite.testing import Resize
from pslite.torch.optimizer_translation import PlaceholderOptimizer, groups_of

#: their imports take seconds of CPU time
PATIENT = Settings(grace=120.0, start=120.0, settle=120.0, balance="even")
FOLDER = Path(__file__).parents[2] / "build" / "trainers"
#: what `pslite[huggingface]` and `pslite[lightning]` ask for
PACKAGES = ["transformers>=5.20,<6", "accelerate>=1.1,<2", "lightning>=2.6,<2.7"]
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def python():
    try:
        return make_environment(FOLDER, PACKAGES, beside=True)
    except (Unavailable, subprocess.TimeoutExpired) as error:
        pytest.skip(str(error))


def alone(command):
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "servers"), [("huggingface", 1), ("lightning", 0)])
def test_a_trainer_resized_has_the_bits_of_one_process(python, tmp_path, trainer, servers):
    static, resized = tmp_path / "static", tmp_path / "resized"
    command = [python, str(HERE / f"{trainer}_worker.py"), "--out"]
    # to import a trainer takes long: what it refuses is seen in the same process
    digest = alone([*command, str(static), *(["--refused"] if trainer == "huggingface" else [])])
    schedule = [Resize(4, 3, 2 * servers), Resize(25, 2, servers, oldest=True)]
    result = run_job(
        [*command, str(resized)],
        workers=2, servers=servers, schedule=schedule, environ=environ(), settings=PATIENT,
    )  # fmt: skip
    assert [plan.workers for plan in result.plans] == [2, 3, 2]
    assert set(result.exit_codes.values()) == {0}
    assert result.digest == digest
    # a worker that has come later counts and evaluates as the others do
    whole, late = (json.loads(path.read_text()) for path in (static / "alone.json", resized / "worker-2.json"))
    assert 0 < len(late["steps"]) < len(whole["steps"])
    assert late["steps"] == whole["steps"][-len(late["steps"]) :]
    assert late["evaluated"] == whole["evaluated"][-len(late["evaluated"]) :]
    # one worker at a time has written files, and all of them
    names = [
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".safetensors", ".ckpt")}
        for folder in (static, resized)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".safetensors"):
            assert (static / name).read_bytes() == (resized / name).read_bytes()


def test_torchs_optimizers_are_described():
    model = torch.nn.Linear(2, 2)
    first, second = model.parameters()
    made = torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": [second], "weight_decay": 0.0}], lr=0.1)
    schedule = Cosine(over=9)
    groups = groups_of(model, made, schedule)
    assert [group.optimizer for group in groups] == [
        Adam(lr=0.5, weight_decay=0.01, decoupled=True, schedule=schedule),
        Adam(lr=0.1, decoupled=True, schedule=schedule),
    ]
    assert [group.parameters for group in groups] == [[first], [second]]
    made = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    (group,) = groups_of(model, made, Constant())
    assert group.optimizer == SGD(lr=0.1, momentum=0.9, nesterov=True)
    assert not groups_of(model, torch.optim.Adam(model.parameters()), Constant())[0].optimizer.decoupled
    before = first.detach().clone()
    first.grad = torch.ones_like(first)
    PlaceholderOptimizer(made).step()
    assert torch.equal(first, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.RMSprop, "no torch.optim.rmsprop.RMSprop"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "no Adam with amsgrad"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, dampening=0.1), "no SGD with dampening"),
        (lambda p: torch.optim.SGD(p[:1], 0.1), "parameter bias is in no group"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(make, message):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SpecError, match=message):
        groups_of(model, make(list(model.parameters())), Constant())
