"""PyTorch jobs whose model is on a GPU: what PyTorch alone computes there, and in exact mode the same bits."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from pslite_jobs import PATIENT, Replace, environment, run_job

from pslite.launch.gpus import open_gpus
from pslite.testing import Resize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

COMMAND = [sys.executable, str(Path(__file__).with_name("cuda_worker.py"))]
RESIZED = (Resize(4, 2, 1), Resize(14, 1, 1))


def alone(*options, **variables):
    done = subprocess.run(
        [*COMMAND, *options], env=environment(**variables), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@cache
def digest_alone(architecture="ps"):
    return alone("--mode", "exact", "--whole", DL2_ARCHITECTURE=architecture)


def weights(path):
    state = torch.load(path, weights_only=True, map_location="cpu")
    return torch.cat([tensor.reshape(-1) for tensor in state.values()])


@pytest.mark.parametrize(
    ("workers", "servers", "schedule", "precision"),
    [
        (1, 1, (), "float32"),
        (2, 1, (), "float32"),
        (1, 1, RESIZED, "float32"),
        (1, 0, [Resize(4, 2, 0), Resize(14, 1, 0)], "float32"),
        (1, 1, (), "bfloat16"),
        (1, 1, RESIZED, "bfloat16"),
    ],
    ids=["one", "two", "resized", "resized allreduce", "one bfloat16", "resized bfloat16"],
)
def test_workers_compute_what_torch_alone_does_on_a_gpu(tmp_path, workers, servers, schedule, precision):
    before, plain, elastic = (tmp_path / name for name in ("before", "plain", "elastic"))
    options = ["--precision", precision]
    alone(*options, "--torch", "--epochs", "0", "--out", str(before))
    alone(*options, "--torch", "--out", str(plain))
    result = run_job(
        [*COMMAND, *options, "--out", str(elastic)],
        workers=workers, servers=servers, schedule=schedule, environ=environment(), settings=PATIENT,
    )  # fmt: skip
    assert len(result.plans) == 1 + len(schedule)
    moved = weights(plain) - weights(before)
    error = (weights(elastic) - weights(plain)).norm() / moved.norm()
    print(f"relative difference: {error:.2g}")
    assert error <= (1e-4 if precision == "float32" else 0.1)


@pytest.mark.parametrize("servers", [1, 0], ids=["ps", "allreduce"])
def test_exact_mode_resized_has_the_bits_of_one_process(servers):
    result = run_job(
        [*COMMAND, "--mode", "exact", "--whole"],
        workers=1, servers=servers, schedule=[Resize(4, 2, servers), Resize(14, 1, servers)],
        environ=environment(), settings=PATIENT,
    )  # fmt: skip
    assert [plan.workers for plan in result.plans] == [1, 2, 1]
    assert result.digest == digest_alone("ps" if servers else "allreduce")


def test_a_checkpoint_is_continued_by_another_number_of_workers(tmp_path):
    command = [*COMMAND, "--mode", "exact", "--whole", "--checkpoint", str(tmp_path / "checkpoint"), "--epochs"]
    run_job([*command, "2"], workers=1, servers=1, environ=environment(), settings=PATIENT)
    second = run_job([*command, "5"], workers=2, servers=2, environ=environment(), settings=PATIENT)
    assert any("version 12" in line for line in second.log), second.log
    assert second.digest == digest_alone()


def test_a_script_that_begins_again_has_its_gpu_memory_once(tmp_path):
    starts = tmp_path / "starts"
    kill = Replace("ps-0", 8, planned=True)
    result = run_job(
        [*COMMAND, "--mode", "exact", "--whole", "--starts", str(starts)],
        workers=1, servers=1, on_status=kill, environ=environment(), settings=PATIENT,
    )  # fmt: skip
    assert result.digest == digest_alone()
    (pid, used), (again, used_again) = (map(int, line.split()) for line in starts.read_text().splitlines())
    assert pid == again
    assert used_again < used + torch.cuda.mem_get_info()[1] // 8


def test_the_load_of_the_gpu_is_measured():
    pytest.importorskip("pynvml")
    gpus = open_gpus({"CUDA_VISIBLE_DEVICES": "0"})
    assert gpus is not None
    (usage,) = gpus.sample()
    gpus.close()
    assert usage.name == torch.cuda.get_device_name(0)
    assert 0 < usage.memory_bytes < usage.memory_total
