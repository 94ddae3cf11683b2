"""The MXNet adapter: what MXNet 1.9.1's own servers compute, the same script unchanged, at any size."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mxnet_jobs import CHECKS, EXAMPLES, KVSTORE_CHECKS, SCRIPT, Unavailable, environ, launch, make_environment
from pslite_jobs import PATIENT, KillAt, run_job

from pslite.testing import Resize

FOLDER = Path(__file__).parents[2] / "build" / "mxnet"


@pytest.fixture(scope="session")
def python():
    try:
        return make_environment(FOLDER)
    except (Unavailable, subprocess.TimeoutExpired) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    from sklearn.datasets import load_digits  # noqa: PLC0415  (most workers of xdist run none of these tests)

    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    found = load_digits()
    np.savez(path, images=found.images[:1000], labels=found.target[:1000])
    return str(path)


@pytest.fixture
def script(python, digits):
    def command(name, *options, **named):
        pairs = [f"--{key.replace('_', '-')}={value}" for key, value in named.items()]
        return [python, SCRIPT, name, f"--data={digits}", *options, *pairs]

    return command


def run(command, variables=(), **more):
    values = {"workers": 2, "servers": 2, "settings": PATIENT, **more}
    return run_job(command, environ=environ(**dict(variables)), **values)


def close(ours, theirs, tolerance=2e-4):
    """Trained weights, not running statistics: MXNet keeps those of one worker, we their mean over all."""
    with np.load(ours) as mine, np.load(theirs) as others:
        assert mine.files == others.files
        for name in mine.files:
            if "running" not in name:
                np.testing.assert_allclose(mine[name], others[name], rtol=tolerance, atol=tolerance, err_msg=name)


def same(first, second):
    with np.load(first) as mine, np.load(second) as others:
        assert all(np.array_equal(mine[name], others[name]) for name in mine.files)


@pytest.mark.parametrize("checks", [CHECKS, KVSTORE_CHECKS], ids=["adapter", "parts of the KVStore"])
def test_without_a_job(python, checks):
    """All of a file of checks in one process: to import MXNet takes longer than most of them."""
    done = subprocess.run([python, checks], env=environ(), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")


# --- a loop of the script's own ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--schedule",), pytest.param(("--optimizer=adam",), marks=pytest.mark.nightly)], ids=["sgd", "adam"]
)
def test_a_gluon_script_computes_what_it_does_with_mxnets_own_servers(script, tmp_path, options):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    result = run(script("loop", *options, out=ours))
    assert result.versions == 60
    assert set(result.exit_codes.values()) == {0}
    assert launch(script("loop", *options, out=theirs), 2, 2) == [0] * 5
    close(f"{ours}.0.npz", f"{theirs}.0.npz", 2e-3 if "adam" in options[0] else 2e-4)
    same(f"{ours}.0.npz", f"{ours}.1.npz")
    assert float(Path(f"{ours}.1.accuracy").read_text()) > 0.85


@pytest.mark.slow
def test_workers_that_update_their_weights_themselves_compute_what_servers_do(script, tmp_path):
    # not compared with MXNet's own: its workers overwrite gradients now and then in this setting
    here, there = tmp_path / "here", tmp_path / "there"
    for options in (("--local", f"--out={here}"), (f"--out={there}",)):
        run(script("loop", "--epochs=2", *options))
    close(f"{here}.0.npz", f"{there}.0.npz")


def test_a_worker_of_a_job_has_one_kvstore(script, tmp_path):
    """A script that makes one to know its rank and names it again has the same; one in use is refused."""
    out = tmp_path / "out"
    result = run(script("loop", "--by-name", epochs=1, out=out), workers=1, servers=1)
    assert result.versions == 40
    assert "give that object to the Trainer or Module" in Path(f"{out}.refused").read_text()


def test_a_module_script_computes_what_it_does_with_mxnets_own_servers(script, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run(script("module", out=ours))
    assert launch(script("module", out=theirs), 2, 2) == [0] * 5
    close(f"{ours}.0.npz", f"{theirs}.0.npz")
    same(f"{ours}.0.npz", f"{ours}.1.npz")
    assert float(Path(f"{ours}.0.accuracy").read_text()) > 0.85


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    ["tutorial", "growing", "accumulation", "clipping", "language_model", "by_hand", "buckets", "numpy_arrays"],
)
def test_scripts_in_the_style_of_mxnets_examples_compute_what_they_do_with_its_own_servers(python, tmp_path, name):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run([python, EXAMPLES, name, str(ours)])
    assert launch([python, EXAMPLES, name, str(theirs)], 2, 2) == [0] * 5
    for rank in range(2):
        close(f"{ours}.{rank}.npz", f"{theirs}.{rank}.npz")


# dense weights with row_sparse gradients are not compared: MXNet's own servers crash on them
ROWS = [pytest.param(("embedding",), marks=pytest.mark.nightly), ("embedding", "--optimizer=adam"), ("factors",)]


@pytest.mark.slow
@pytest.mark.parametrize("options", ROWS, ids=["gluon", "gluon-adam", "module"])
def test_row_sparse_scripts_compute_what_they_do_with_mxnets_own_servers(script, tmp_path, options):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run(script(*options, out=ours))
    assert launch(script(*options, out=theirs), 2, 2) == [0] * 5
    close(f"{ours}.0.npz", f"{theirs}.0.npz", 2e-3 if "--optimizer=adam" in options else 2e-4)
    same(f"{ours}.0.npz", f"{ours}.1.npz")
    assert float(Path(f"{ours}.0.accuracy").read_text()) > 0.75


@pytest.mark.slow
def test_keys_that_are_initialised_within_the_first_step(script, tmp_path):
    paths = [tmp_path / f"{name}.npz" for name in ("ours", "resized", "theirs")]
    for path, more in zip(paths, ({}, {"schedule": [Resize(8, 3, 3), Resize(16, 1, 1)]}), strict=False):
        command = script("keys", out=path, **({"pace": 30} if more else {}))
        result = run(command, **more)
        assert (result.state, result.versions) == ("finished", 30), result.log
    assert launch(script("keys", out=paths[2]), 2, 2) == [0] * 5
    # all workers push the same, so that their number changes nothing
    close(paths[0], paths[2])
    close(paths[1], paths[2])


@pytest.mark.slow
@pytest.mark.nightly
def test_keys_that_come_late_are_trained_as_mxnets_own_servers_do_it(script, tmp_path):
    ours, resized, theirs = (tmp_path / f"{name}.npz" for name in ("ours", "resized", "theirs"))
    result = run(script("keys", "--late", out=ours))
    assert launch(script("keys", "--late", out=theirs), 2, 2) == [0] * 5
    close(ours, theirs)
    # a worker that comes later begins its script at the beginning: it does not know these keys yet
    result = run(script("keys", "--late", out=resized, pace=30), schedule=[Resize(20, 3, 3), Resize(35, 1, 1)])
    assert [(plan.workers, plan.servers) for plan in result.plans][-2:] == [(3, 3), (1, 1)]
    with np.load(resized) as found, np.load(ours) as usual:
        assert found.files == usual.files
        assert all(np.isfinite(found[name]).all() for name in found.files)


@pytest.mark.slow
def test_a_row_sparse_script_is_resized_in_the_middle(script, tmp_path):
    out = tmp_path / "out"
    schedule = [Resize(8, workers=3, servers=2), Resize(25, workers=2, servers=1, oldest=True)]
    result = run(script("embedding", epochs=6, pace=100, out=out), workers=2, servers=1, schedule=schedule)
    assert [(plan.workers, plan.servers) for plan in result.plans] == [(2, 1), (3, 2), (2, 1)]
    assert set(result.exit_codes.values()) == {0}
    # the job ends when the first worker's script does
    rank = next(place for place in (0, 1, 2) if Path(f"{out}.{place}.accuracy").exists())
    assert float(Path(f"{out}.{rank}.accuracy").read_text()) > 0.8


@pytest.mark.slow
def test_a_script_is_resized_in_the_middle(script, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    schedule = [Resize(8, workers=3, servers=1), Resize(25, workers=1, servers=3)]
    result = run(
        script("loop", epochs=12, pace=230, sleep=0.05, out=out, log=log), workers=2, servers=2, schedule=schedule
    )
    assert [(plan.workers, plan.servers) for plan in result.plans] == [(2, 2), (3, 1), (1, 3)]
    assert set(result.exit_codes.values()) == {0}
    seen = {
        task: [tuple(map(int, line.split()[:2])) for line in Path(f"{log}.{task}").read_text().splitlines()]
        for task in ("worker-0", "worker-1", "worker-2")
    }
    assert list(dict.fromkeys(seen["worker-0"])) == [(0, 2), (0, 3), (0, 1)]
    assert list(dict.fromkeys(seen["worker-1"])) == [(1, 2), (1, 3)]
    assert set(seen["worker-2"]) == {(2, 3)}
    losses = [float(line.split()[2]) for line in Path(f"{log}.worker-2").read_text().splitlines()]
    # it came with the weights of the others, not with its own
    assert losses[1] < 2.0
    assert float(Path(f"{out}.0.accuracy").read_text()) > 0.85


@pytest.mark.slow
def test_a_script_that_ends_with_a_barrier_is_resized_and_all_have_the_same_weights(script, tmp_path):
    """Workers come to it at different steps, as a part of the data is smaller or a worker came later."""
    out = tmp_path / "out"
    result = run(script("loop", epochs=8, pace=30, sleep=0.05, out=out), schedule=[Resize(10, workers=3, servers=1)])
    assert set(result.exit_codes.values()) == {0}
    assert any("at a barrier; the others train on" in line for line in result.log)
    first, *others = sorted(tmp_path.glob("out.*.npz"))
    assert len(others) == 2
    for other in others:
        close(first, other, 0.0)


@pytest.mark.slow
def test_a_line_that_has_read_rank_once_is_named_when_the_worker_of_rank_0_is_gone(script, tmp_path, capfd):
    """What it decides is not decided again, such as who writes checkpoints."""
    run(script("loop", epochs=3, pace=110), on_status=KillAt("worker-0", 20))
    said = capfd.readouterr().err
    assert "this line has read rank once, when it was 1; it is 0 now" in said
    assert "read rank whenever one is written" in said


def used(log):
    """How often each sample was used, by all workers."""
    return Counter(int(word) for path in log.parent.glob(f"{log.name}.*") for word in path.read_text().split())


@pytest.mark.slow
def test_each_sample_is_used_once_in_each_epoch_by_whatever_workers_there_are(script, tmp_path, capfd):
    log = tmp_path / "log"
    schedule = [Resize(5, workers=3, servers=1), Resize(20, workers=1, servers=2), Resize(30, workers=3, servers=1)]
    epochs = []
    command = script("split", epochs=6, pace=110, sleep=0.1, log=log)
    result = run(command, servers=1, schedule=schedule, on_status=lambda status, _: epochs.append(status.epoch))
    assert set(result.exit_codes.values()) == {0}, result.log
    assert [(plan.workers, plan.servers) for plan in result.plans] == [(2, 1), (3, 1), (1, 2), (3, 1)]
    assert used(log) == dict.fromkeys(range(800), 6)
    assert epochs == sorted(epochs)
    assert epochs[-1] == 6.0
    said = capfd.readouterr().err
    assert "this line has read num_workers once, when it was 2; it is 3 now" in said
    assert "mxnet_worker.py" in said


def test_samples_of_a_worker_that_dies_are_assigned_again(script, tmp_path):
    log = tmp_path / "log"
    result = run(script("split", epochs=2, die_at=8, log=log), workers=3, servers=1)
    assert [plan.workers for plan in result.plans] == [3, 2]
    assert used(log) == dict.fromkeys(range(800), 2)


@pytest.mark.slow
def test_asynchronous_training_learns_and_is_resized(script, tmp_path):
    out, states = tmp_path / "out", tmp_path / "states"
    command = script("loop", epochs=6, pace=110, sleep=0.03, kvstore="dist_async", out=out, save=states)
    result = run(command, workers=2, servers=1, schedule=[Resize(10, workers=3, servers=2)])
    assert [(plan.workers, plan.servers) for plan in result.plans] == [(2, 1), (3, 2)]
    assert set(result.exit_codes.values()) == {0}
    rank = next(place for place in (0, 1, 2) if Path(f"{out}.{place}.accuracy").exists())
    assert float(Path(f"{out}.{rank}.accuracy").read_text()) > 0.8
    assert Path(f"{states}.states").exists()


def test_a_worker_dies_and_a_script_goes_on(script, tmp_path):
    out = tmp_path / "out"
    result = run(script("loop", epochs=2, die_at=5, out=out), workers=3)
    assert any("killed by signal 9 (SIGKILL)" in line and "in its place" in line for line in result.log)
    assert float(Path(f"{out}.0.accuracy").read_text()) > 0.7


FORKED = """
import multiprocessing, runpy, sys
child = multiprocessing.get_context("fork").Process(target=runpy.run_path, args=(sys.argv[1], None, "__main__"))
del sys.argv[1]
child.start(); child.join(); sys.exit(child.exitcode)
"""


def test_a_script_that_trains_in_a_forked_process_ends_well(script):
    python, *command = script("loop", epochs=1)
    result = run([python, "-c", FORKED, *command])
    assert result.versions == 20


INHERITED = """
import multiprocessing, sys
import mxnet as mx
kvstore = mx.kv.create("dist_sync")
def train():
    kvstore.init("a", mx.nd.ones(2))
    kvstore.set_optimizer(mx.optimizer.SGD())
    kvstore.pushpull("a", mx.nd.ones(2))
child = multiprocessing.get_context("fork").Process(target=train)
child.start(); child.join(); sys.exit(child.exitcode)
"""


def test_a_kvstore_that_a_forked_process_inherits_is_refused(python, capfd):
    run([python, "-c", INHERITED], workers=1, servers=1, state="failed")
    assert "make the KVStore in the process that trains" in capfd.readouterr().err


def test_a_job_is_not_done_when_its_first_workers_script_ends_by_sigterm_or_with_an_error(script):
    terminated = run(script("loop", epochs=2, exit_at=5, exit_status=143))
    assert terminated.versions == 40
    assert any("worker-0" in line and "died: its process ended with status 143" in line for line in terminated.log)
    failed = run(script("loop", epochs=2, exit_at=5, exit_status=1), state="failed")
    assert "its script called sys.exit(1)" in failed.reason


def test_a_script_that_ends_before_the_first_workers_leaves_the_job(script, tmp_path):
    out = tmp_path / "out"
    result = run(script("loop", epochs=3, leave_at=15, out=out), workers=2)
    assert result.versions == 60
    assert set(result.exit_codes.values()) == {0}
    assert any("worker-1" in line and "its script has ended" in line for line in result.log)


DURABLE = {"DL2_DURABILITY": "durable"}


@pytest.mark.parametrize(
    ("name", "options", "resizes"),
    [
        pytest.param("loop", ("--schedule", "--epochs=4"), (), marks=pytest.mark.slow),
        pytest.param("loop", ("--epochs=4",), (2, 4), marks=(pytest.mark.slow, pytest.mark.nightly)),
        pytest.param("loop", ("--optimizer=adam", "--epochs=4"), (), marks=(pytest.mark.slow, pytest.mark.nightly)),
        pytest.param("loop", ("--local", "--epochs=4"), (), marks=(pytest.mark.slow, pytest.mark.nightly)),
        pytest.param(
            "embedding", ("--optimizer=adam", "--epochs=4"), (), marks=(pytest.mark.slow, pytest.mark.nightly)
        ),
        pytest.param("module", ("--epochs=4",), (), marks=(pytest.mark.slow, pytest.mark.nightly)),
    ],
    ids=["sgd", "resized", "adam", "local", "rows", "module"],
)
def test_a_server_with_replicas_dies_and_no_bit_differs(script, tmp_path, name, options, resizes):
    """Weights and optimizer states at the end are those of an undisturbed run."""
    names = ("out.0.npz", "out.1.npz", *(["save.states"] if name == "loop" and "--local" not in options else []))
    schedule = [Resize(10 * (at + 1), workers=2, servers=servers) for at, servers in enumerate(resizes)]
    # as the last change of size begins, if there is one
    kill = KillAt("ps-0", 20, planned=True)
    for folder, disturbance in (("usual", {}), ("disturbed", {"on_status": kill, "schedule": schedule})):
        where = tmp_path / folder
        where.mkdir()
        saved = {"save": where / "save"} if "save.states" in names else {}
        result = run(script(name, *options, pace=80, out=where / "out", **saved), DURABLE, servers=3, **disturbance)
        assert not any("goes back" in line for line in result.log)
    assert any("other servers take over its blocks" in line for line in result.log)
    for each in names:
        same(tmp_path / "usual" / each, tmp_path / "disturbed" / each)


LARGE_BYTES = 32_000_000


@pytest.mark.parametrize(
    ("transport", "devices", "copies"),
    [
        # both ways from and to the script's own arrays
        pytest.param("tcp", 1, 0, id="tcp"),
        # gradients in memory that servers read
        pytest.param("", 1, 1, id="shared memory"),
        pytest.param("", 2, 1, id="shared memory, two devices", marks=pytest.mark.slow),
        pytest.param("tcp", 2, 1, id="tcp, two devices", marks=(pytest.mark.slow, pytest.mark.nightly)),
    ],
)
def test_a_worker_has_no_more_copies_of_a_large_key_than_needed(script, tmp_path, transport, devices, copies):
    out = tmp_path / "out"
    command = script("large", devices=devices, out=out)
    run(command, variables={"DL2_TRANSPORT": transport, "DL2_ENCRYPT": "control"})
    # the mean over two workers of the sums of their devices' gradients
    factor = 0.1 * sum((rank + 1) * (device + 1) for rank in range(2) for device in range(devices)) / 2
    for rank in range(2):
        for device in range(devices):
            with np.load(f"{out}.{rank}.{device}.npz") as found:
                for name, size in (("large", LARGE_BYTES // 4), ("small", 100)):
                    weights, velocity = np.linspace(-1, 1, size, dtype=np.float32), np.zeros(size, dtype=np.float32)
                    for _ in range(4):
                        velocity = 0.9 * velocity - 0.1 * factor * weights
                        weights += velocity
                    np.testing.assert_allclose(found[name], weights, rtol=1e-5, atol=1e-6)
                assert found["taken"] < (copies + 0.5) * LARGE_BYTES


@pytest.mark.slow
def test_states_are_saved_and_loaded(script, tmp_path):
    whole, half, rest = tmp_path / "whole", tmp_path / "half", tmp_path / "rest"
    for options in ({"epochs": 4, "out": whole}, {"epochs": 2, "save": half}, {"epochs": 2, "load": half, "out": rest}):
        result = run(script("loop", "--schedule", **options), workers=2, servers=3 if "load" in options else 1)
        versions = result.versions
    assert versions == 80
    close(f"{rest}.0.npz", f"{whole}.0.npz")
    with np.load(f"{half}.states") as states:
        assert {name.partition("/")[2] for name in states.files} == {"weight", "0", ""}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"epochs": 1}, id="unsaid", marks=(pytest.mark.slow, pytest.mark.nightly)),
        pytest.param({"epochs": 2, "begin_epoch": 1}, id="said"),
    ],
)
def test_a_gluon_script_that_goes_on_says_at_which_epoch(script, tmp_path, capfd, options):
    static(script("loop", epochs=1, kvstore="local", save=tmp_path / "saved"))
    command, reported = script("loop", "--weights-only", "--local", load=tmp_path / "saved", **options), []
    result = run(command, servers=1, on_status=lambda status, _: reported.append(status.epochs_before))
    assert (result.state, result.versions) == ("finished", 20), result.log
    assert reported[-1] == options.get("begin_epoch", 0)
    assert ("let it set kvstore.begin_epoch" in capfd.readouterr().err) == ("begin_epoch" not in options)


@pytest.mark.slow
def test_mxnets_launcher_starts_ours(script, tmp_path):
    token = secrets.token_hex(32)
    first, second = tmp_path / "first", tmp_path / "second"
    plain = script("loop", epochs=1, out=first)
    assert launch([sys.executable, "-m", "pslite.run", "--", *plain], 2, 1, DL2_TOKEN=token) == [0] * 4
    # without dl2-run: the script imports ours first
    before = [plain[0], "-c", f"import pslite.mxnet, runpy; runpy.run_path({SCRIPT!r}, run_name='__main__')"]
    assert launch([*before, *script("loop", epochs=1, out=second)[2:]], 2, 1, DL2_TOKEN=token) == [0] * 4
    same(f"{first}.0.npz", f"{second}.0.npz")
    assert launch([sys.executable, "-m", "pslite.run", "--", *plain], 1, 1) == [2] * 3


@pytest.mark.slow
def test_no_worker_can_come_where_the_workers_hold_the_weights(script):
    lines = []

    def go_on_without(status, director):
        refused = any("refused worker-2" in line and "update_on_kvstore=False" in line for line in lines)
        if refused:
            director.resize(Resize(0, workers=2, servers=1))
        return not refused

    command = script("loop", "--local", epochs=3, pace=55, sleep=0.1)
    schedule = [Resize(5, workers=3, servers=1)]
    result = run(command, workers=2, servers=1, schedule=schedule, on_status=go_on_without, say=lines.append)
    assert any("refused worker-2" in line and "update_on_kvstore=False" in line for line in result.log)


# --- a loop over the job ----------------------------------------------------------------------------------------------


def static(command):
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=200, check=True)
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [pytest.param("momentum", marks=pytest.mark.nightly), "adam"])
def test_gluons_job_has_the_same_bits_at_any_size(script, optimizer):
    command = script("job", optimizer=optimizer)
    schedule = [Resize(6, workers=3, servers=2), Resize(20, workers=2, servers=1)]
    result = run(command, workers=1, servers=1, schedule=schedule)
    assert len(result.plans) == 3
    assert result.digest == static(command)


@pytest.mark.slow
def test_gluons_job_survives_a_worker(script):
    command = script("job", "--mean")
    result = run(command, workers=3, servers=1, on_status=KillAt("worker-0", 12))
    assert result.digest == static(command)


def test_gluons_job_in_fast_mode(script, tmp_path):
    run(script("job", mode="fast", out=tmp_path / "weights.npz"), workers=2, servers=1)
    assert np.isfinite(np.load(tmp_path / "weights.npz")["net_dense0_weight"]).all()
