"""The PyTorch adapter: equality with torch's optimizers, with itself at any size, and its errors."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from pslite_jobs import PATIENT, KillAt, run_job
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from pslite.errors import SpecError, UsageError
from pslite.job.sample_order import permutation
from pslite.numeric.gradient_sums import GradientSums
from pslite.testing import Resize
from pslite.torch import LAMB, SGD, Adam, Constant, Cosine, ElasticJob, Group, Milestones, Polynomial, StepDecay

SCRIPT = str(Path(__file__).with_name("torch_worker.py"))


def data(samples=50):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 5, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def run(model, rule, mode="exact", epochs=3, **more):
    job = ElasticJob(model, optimizer=rule, dataset=data(), batch_size=16, epochs=epochs, seed=4, mode=mode, **more)
    for inputs, targets in job:
        job.backward(functional.mse_loss(model(inputs), targets))
    return job


def train(model, optimizer, before=lambda version: None):
    """The same in torch alone; `before` is called before each step."""
    inputs, targets = data().tensors
    version = 0
    for epoch in range(3):
        order = permutation(4, epoch, 50)
        for first in range(0, 50, 16):
            picked = torch.from_numpy(order[first : first + 16])
            optimizer.zero_grad()
            functional.mse_loss(model(inputs[picked]), targets[picked]).backward()
            before(version)
            optimizer.step()
            version += 1


def network():
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
        (SGD(lr=0.05, momentum=0.9, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1)),
        (SGD(lr=0.05, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True)),
        (Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
        (Adam(lr=0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
        (
            Adam(lr=0.01, weight_decay=0.1, decoupled=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        ),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_optimizers_compute_what_torch_computes(rule, make, mode):
    mine, theirs = network(), network()
    run(mine, rule, mode)
    train(theirs, make(theirs.parameters()))
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6)


SCHEDULES = [
    (StepDecay(every=4, by=0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5)),
    (Milestones(at=(3, 7), by=0.3), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 7], 0.3)),
    (Cosine(over=9), lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: (1 + math.cos(math.pi * t / 9)) / 2)),
    (Polynomial(over=20, power=2.0), lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 20, 2.0)),
    (Constant(warmup=5), lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.2, 1.0, 4)),
]


@pytest.mark.parametrize(("schedule", "make"), SCHEDULES, ids=lambda value: "" if callable(value) else str(value))
def test_schedules_are_torchs_stepped_once_a_version(schedule, make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = make(optimizer)
    for version in range(10):
        assert schedule.factor(version) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), version
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("clip", [0.01, 0.2, 100.0])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_clipping_and_a_schedule_compute_what_torch_computes(mode, clip):
    mine, theirs = network(), network()
    rule = Adam(lr=0.01, schedule=Cosine(over=7, floor=0.1))
    run(mine, rule, mode, clip_norm=clip)
    optimizer = torch.optim.Adam(theirs.parameters())

    def before(version):
        optimizer.param_groups[0]["lr"] = 0.01 * rule.schedule.factor(version)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)

    train(theirs, optimizer, before)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("clip", [0.001, 0.02, 100.0])
def test_clipping_by_value_computes_what_torch_computes(clip):
    mine, theirs = network(), network()
    run(mine, Adam(lr=0.01, weight_decay=0.1), "exact", clip_value=clip)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01, weight_decay=0.1)
    train(theirs, optimizer, lambda version: torch.nn.utils.clip_grad_value_(theirs.parameters(), clip))
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6)


def test_lamb_scales_each_parameter_by_itself():
    mine = network()
    before = [parameter.detach().clone() for parameter in mine.parameters()]
    job = ElasticJob(mine, optimizer=LAMB(lr=0.1), dataset=data(), batch_size=50, epochs=1, seed=3)
    for inputs, targets in job:
        job.backward(functional.mse_loss(mine(inputs), targets))
    for old, new in zip(before, mine.parameters(), strict=True):
        torch.testing.assert_close((new - old).norm(), 0.1 * old.norm(), rtol=1e-4, atol=1e-6)


def test_batchnorm_counts_versions_and_an_infinite_mask_stays():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("mask", torch.tensor([float("-inf"), 0.1, 3.0]))
    model.register_buffer("flag", torch.tensor([True, False]))
    job = ElasticJob(model, optimizer=SGD(lr=0.01), dataset=data(64), batch_size=16, epochs=2, shards=4)
    for inputs, targets in job:
        job.backward(functional.mse_loss(model(inputs), targets))
    assert job.version == 8
    assert int(model[1].num_batches_tracked) == 8
    assert model.mask.tolist() == [float("-inf"), pytest.approx(0.1), 3.0]
    assert model.flag.tolist() == [True, False]
    assert not torch.equal(model[1].running_mean, torch.zeros(4))


def test_a_loop_that_calls_backward_itself_computes_what_torch_computes():
    mine, theirs = network(), network()
    job = ElasticJob(mine, optimizer=Adam(lr=0.01), dataset=data(), batch_size=16, epochs=3, seed=4)
    for inputs, targets in job:
        loss = functional.mse_loss(mine(inputs), targets)
        loss.backward()
        job.step(loss)
    train(theirs, torch.optim.Adam(theirs.parameters(), lr=0.01))
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6)
    job = ElasticJob(network(), optimizer=Adam(lr=0.01), dataset=data(), batch_size=16, epochs=1)
    next(iter(job))
    with pytest.raises(UsageError, match=r"call loss\.backward"):
        job.step(torch.tensor(1.0))


def test_groups_have_their_own_optimizer():
    model = network()
    before = model[0].bias.detach().clone()
    run(model, SGD(lr=0.05), groups=[Group([model[0].bias], SGD(lr=0.0))])
    assert torch.equal(model[0].bias, before)
    with pytest.raises(SpecError, match="not parameters of the model"):
        run(network(), SGD(lr=0.1), groups=[Group([nn.Parameter(torch.ones(1))], SGD(lr=0.1))])


def test_a_model_on_another_device_goes_through_copies(monkeypatch):
    here = network()
    expected = run(here, Adam(lr=0.01)).digest
    # no other device is at hand: take the way of one with the CPU's own memory
    monkeypatch.setattr("pslite.torch.parameters.ParameterLayout._staged", property(lambda _: True))
    copied = network()
    assert run(copied, Adam(lr=0.01)).digest == expected
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), copied.parameters(), strict=True))


class Moving(nn.Linear):
    """Has its weight in other memory after each forward pass, as an LSTM on a GPU that flattens its parameters."""

    def forward(self, inputs):
        self.weight.data = self.weight.data.clone()
        return super().forward(inputs)


@pytest.mark.parametrize("staged", [False, True], ids=["cpu", "staged"])
def test_a_module_that_moves_its_parameters_is_trained_all_the_same(monkeypatch, staged):
    if staged:
        monkeypatch.setattr("pslite.torch.parameters.ParameterLayout._staged", property(lambda _: True))
    plain, moving = nn.Linear(5, 1), Moving(5, 1)
    moving.load_state_dict(plain.state_dict())
    assert run(moving, Adam(lr=0.01)).digest == run(plain, Adam(lr=0.01)).digest
    assert torch.equal(moving.weight, plain.weight)


def test_a_model_that_is_converted_after_the_job_was_created_is_refused():
    model = network()
    job = ElasticJob(model, optimizer=SGD(lr=0.1), dataset=data(), batch_size=16, epochs=1)
    model.double()
    with pytest.raises(
        UsageError, match=r"as torch\.float32 when ElasticJob was created.*torch\.float64 now: move and"
    ):
        next(iter(job))


def test_a_loop_that_is_under_autocast_as_a_whole_computes_with_the_newest_weights():
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    each, whole = network(), network()
    for model, inside, around in ((each, autocast, nullcontext), (whole, nullcontext, autocast)):
        job = ElasticJob(model, optimizer=SGD(lr=0.05), dataset=data(), batch_size=16, epochs=3, seed=4)
        with around():
            for inputs, targets in job:
                with inside():
                    loss = functional.mse_loss(model(inputs), targets)
                job.backward(loss)
    for a, b in zip(each.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.fixture
def chosen_kernels(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("chosen_kernels")
@pytest.mark.parametrize(("mode", "before", "after"), [("fast", 0, 0), ("exact", 0, 1), ("exact", 2, 2)])
def test_exact_mode_on_a_gpu_asks_for_kernels_that_repeat(monkeypatch, mode, before, after):
    # no GPU is at hand, nor needed to see what is asked for: 1 is a warning where there is no such kernel, 2 an error
    monkeypatch.setattr("pslite.torch.parameters.ParameterLayout.device", property(lambda _: torch.device("cuda")))
    torch.set_deterministic_debug_mode(before)
    ElasticJob(network(), optimizer=SGD(lr=0.1), dataset=data(), batch_size=16, epochs=1, mode=mode)
    assert torch.get_deterministic_debug_mode() == after


def test_zero_grad_in_the_loop_does_no_harm():
    one, two = network(), network()
    job = ElasticJob(one, optimizer=SGD(lr=0.05), dataset=data(), batch_size=16, epochs=3, seed=4, mode="exact")
    for inputs, targets in job:
        one.zero_grad()
        job.backward(functional.mse_loss(one(inputs), targets))
    assert job.digest == run(two, SGD(lr=0.05)).digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": 2_000_000}, "epochs is 2000000"),
        ({"epochs": 1.5}, "epochs is 1.5: it must be a whole number"),
        ({"batch_size": 51}, "batch_size is 51, more than the 50 samples"),
        ({"batch_size": True}, "batch_size is True"),
        ({"mode": "loose"}, "mode is 'loose'"),
        ({"dataset": iter([])}, "must have __len__"),
        ({"shards": 17}, "shards is 17"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm and clip_value are both given"),
        ({"model": nn.Flatten()}, "no trainable parameters"),
        ({"model": nn.Linear(2, 2).half()}, "parameter weight has type torch.float16"),
    ],
)
def test_bad_input_is_refused_by_name(changes, message):
    model = changes.get("model", network())
    rest = {"dataset": data(), "batch_size": 16, "epochs": 1, **changes}
    rest.pop("model", None)
    with pytest.raises(SpecError, match=message):
        ElasticJob(model, optimizer=SGD(lr=0.1), **rest)


def test_loops_that_break_the_rules_are_told_so():
    model = network()
    job = ElasticJob(model, optimizer=SGD(lr=0.1), dataset=data(), batch_size=16, epochs=1)
    with pytest.raises(UsageError, match="inside the loop"):
        job.backward(torch.tensor(1.0))
    with pytest.raises(UsageError, match="did not call job"):
        for _ in job:
            pass
    with pytest.raises(UsageError, match="has been iterated over already"):
        next(iter(job))
    job = ElasticJob(network(), optimizer=SGD(lr=0.1), dataset=data(), batch_size=16, epochs=1)
    inputs, _ = next(iter(job))
    with pytest.raises(UsageError, match="one number"):
        job.backward(inputs)


def environ():
    return {k: v for k, v in os.environ.items() if not k.startswith("DL2_")}


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """File of the weights of a run in one process, and their digest."""
    out = tmp_path_factory.mktemp("static") / "model.pt"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", str(out)],
        env=environ(), capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return out, done.stdout.strip()


@pytest.mark.slow
def test_a_convolutional_network_resized_has_the_bits_of_a_static_run(static, tmp_path):
    out = tmp_path / "model.pt"
    result = run_job(
        [sys.executable, SCRIPT, "--out", str(out)],
        workers=2,
        servers=1,
        schedule=[Resize(4, 3, 3), Resize(10, 1, 2, oldest=True)],
        settings=PATIENT,
    )
    assert [(p.workers, p.servers) for p in result.plans] == [(2, 1), (3, 3), (1, 2)]
    assert result.digest == static[1]
    saved = torch.load(out, weights_only=True)
    assert int(saved["norm.num_batches_tracked"]) == 36
    assert saved["mask"][0] == float("-inf")


@pytest.mark.slow
def test_a_convolutional_network_whose_first_worker_is_killed_has_the_bits_of_a_static_run(static, tmp_path):
    (alone, digest), out = static, tmp_path / "model.pt"
    kill = KillAt("worker-0", 4)
    result = run_job(
        [sys.executable, SCRIPT, "--out", str(out)],
        workers=2, servers=1, schedule=[Resize(10, 2, 2)], on_status=kill, settings=PATIENT
    )  # fmt: skip
    assert any(f"(pid {kill.pid}) died: killed by signal 9 (SIGKILL)" in line for line in result.log)
    assert result.digest == digest
    # what the worker after it has saved is what the digest says
    saved, expected = torch.load(out, weights_only=True), torch.load(alone, weights_only=True)
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_fast_mode_under_resizing_stays_close(tmp_path):
    # without what depends on the worker (dropout's and augmentation's seeds, BatchNorm's statistics) fast mode equals
    # the static run to rounding: test_resize covers that; here the whole path runs and learns
    script = str(Path(__file__).parents[2] / "examples" / "train_digits.py")
    options = [sys.executable, script, "--model", "small", "--mode", "fast", "--epochs", "8", "--step-seconds", "0.005"]
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    subprocess.run([*options, "--out", str(a)], env=environ(), timeout=200, check=True)
    run_job(
        [*options, "--out", str(b)],
        workers=2,
        servers=1,
        schedule=[Resize(3, 3, 2), Resize(20, 2, 1, oldest=True)],
    )
    first, second = torch.load(a, weights_only=True), torch.load(b, weights_only=True)
    flat = [torch.cat([t.reshape(-1) for t in model.values()]) for model in (first, second)]
    assert (flat[0] - flat[1]).norm() <= 1e-5 * flat[0].norm()


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
            r"torch\.optim\.adam\.Adam.*torch\.Adam\(lr=0\.01\)",
        ),
        (lambda model: torch.optim.RMSprop(model.parameters(), lr=0.5), r"RMSprop.*torch\.SGD\(lr=0\.5\)"),
        (lambda model: "sgd", r"builtins\.str.*servers run the optimizer"),
    ],
)
def test_what_is_no_description_of_an_optimizer_is_refused_with_one(optimizer, words):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(SpecError, match=words):
        ElasticJob(model, optimizer=optimizer(model), dataset=[(0, 0)] * 4, batch_size=2, epochs=1)


def test_a_loss_that_is_no_number_ends_the_first_step_and_is_told_once_later():
    def train(bad_step):
        model = torch.nn.Linear(1, 1)
        data = torch.utils.data.TensorDataset(torch.ones(8, 1))
        job = ElasticJob(model, optimizer=SGD(lr=0.1), dataset=data, batch_size=2, epochs=1, shards=1)
        for (batch,) in job:
            job.backward((model(batch) * (math.nan if job.version >= bad_step else 1.0)).mean())
        return job.version

    with pytest.raises(UsageError, match=r"the loss of step 0 is nan.*smaller learning rate"):
        train(0)
    with pytest.warns(RuntimeWarning, match="the loss of step 2 is nan") as told:
        assert train(2) == 4
    assert len(told) == 1


class Shared(nn.Module):
    """A layer that is used three times; the reentrant checkpoints accumulate its gradients one by one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 5, sparse=True)
        self.layer = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 1)

    def forward(self, inputs):
        hidden = self.norm(inputs + self.table((inputs[:, 0].abs() * 9).long()))
        for _ in range(3):
            hidden = checkpoint(lambda value: torch.tanh(self.layer(value)), hidden, use_reentrant=True)
        return self.out(hidden)


@pytest.mark.parametrize("staged", [False, True], ids=["cpu", "staged"])
@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("shards", [5, 8])
def test_shards_added_to_their_neighbours_have_the_bits_of_shards_added_up(monkeypatch, shards, own_backward, staged):
    def digest():
        torch.manual_seed(2)
        model = Shared()
        job = ElasticJob(
            model, optimizer=Adam(lr=0.01), dataset=data(48), batch_size=16, epochs=3, mode="exact", shards=shards
        )
        for inputs, targets in job:
            loss = functional.mse_loss(model(inputs), targets)
            if own_backward:
                loss.backward()
                job.step(loss)
            else:
                job.backward(loss)
        return job.digest

    if staged:
        monkeypatch.setattr("pslite.torch.parameters.ParameterLayout._staged", property(lambda _: True))
    added = digest()
    # every shard by itself, as if each were another worker's
    monkeypatch.setattr(GradientSums, "take_for", lambda sums, leaf: (sums.take(), False))
    assert digest() == added


def test_random_numbers_in_the_loop_depend_on_seed_version_and_shard_alone():
    drawn = []
    for _ in range(2):
        model = network()
        job = ElasticJob(model, optimizer=SGD(lr=0.0), dataset=data(), batch_size=16, epochs=1, mode="exact", shards=2)
        drawn.append([])
        for inputs, targets in job:
            drawn[-1].append(torch.rand(1).item())
            job.backward(functional.mse_loss(model(inputs), targets))
        torch.rand(3)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 8
