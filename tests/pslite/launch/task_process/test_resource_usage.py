"""What a task uses: arithmetic by hand, and real processes looked at from outside."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.job.step_time_and_usage_statistics import StepTimes, Usage, in_words, size_in_words
from pslite.launch.gpus import open_gpus
from pslite.launch.task_process.resource_usage import MAX_SHARE, ProcessMonitor, family

MIB = 1 << 20

#: begins a child that keeps a processor busy and has 64 MiB; says so when it has, and ends when its input does
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import sys, threading, time
block = bytearray(b"x") * (64 << 20)
until = time.process_time() + 0.3
while time.process_time() < until: pass
print("ready", flush=True)
sys.stdin.read()
'''], stdin=subprocess.PIPE)
sys.stdin.read()
child.stdin.close()
child.wait()
print("childless", flush=True)
sys.stdin.close()
import time
time.sleep(60)
"""


@pytest.fixture
def parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_steps_are_summed_up_by_nearest_rank():
    assert StepTimes.of([]) is None
    assert StepTimes.of([0.002]) == StepTimes(steps=1, mean_ms=2.0, p95_ms=2.0)
    times = StepTimes.of([*[0.001] * 19, 0.021])
    assert times.steps == 20
    assert times.mean_ms == pytest.approx(2.0)
    assert times.p95_ms == 1.0
    assert StepTimes.of([0.001] * 18 + [0.010] * 2).p95_ms == 10.0


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50))
def test_no_more_than_a_twentieth_of_the_steps_takes_longer_than_the_95th_percentile(seconds):
    times = StepTimes.of(seconds)
    assert times.p95_ms in [1e3 * second for second in seconds]
    assert sum(1e3 * second > times.p95_ms for second in seconds) <= len(seconds) / 20


def test_sizes_in_words():
    assert [size_in_words(n) for n in (0, 999, 1000, 1234567, 102.2e6, 999.9e6, 5e12)] == [
        "0 B", "999 B", "1 kB", "1.23 MB", "102 MB", "1 GB", "5 TB",
    ]  # fmt: skip
    usage = Usage(seconds=2, cpu_seconds=3, cpu_percent=150, memory_bytes=0, memory_peak=5 * 10**8, processes=2)
    assert in_words(usage) == "3.0 s of CPU time, at most 500 MB of memory"


def test_a_process_and_its_child_are_one_task(parent):
    watch = ProcessMonitor(parent.pid, interval=0.01)
    assert parent.stdout.readline() == b"ready\n"
    usage = watch.sample()
    assert usage.processes == 2
    assert usage.cpu_seconds >= 0.3
    assert usage.memory_bytes >= 64 * MIB
    assert family(parent.pid)[0].pid == parent.pid
    parent.stdin.close()
    assert parent.stdout.readline() == b"childless\n"
    after = watch.sample()
    assert after.processes == 1
    # the child's time is kept by its parent, its memory is gone but not forgotten
    assert after.cpu_seconds >= usage.cpu_seconds
    assert after.memory_bytes < 64 * MIB
    assert after.memory_peak >= usage.memory_bytes


def test_a_process_that_has_ended_uses_nothing(parent):
    watch = ProcessMonitor(parent.pid, interval=1)
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    assert watch.sample() is None  # dead, not waited for
    parent.wait()
    assert watch.sample() is None
    assert family(parent.pid) == []


def test_percent_is_of_the_time_since_the_look_before():
    now = [100.0]
    watch = ProcessMonitor(os.getpid(), interval=5, clock=lambda: now[0])
    now[0] = 101.0
    first = watch.sample()
    assert first.seconds == 1.0
    assert first.cpu_percent == pytest.approx(100 * first.cpu_seconds)
    began = time.process_time()
    while time.process_time() < began + 0.05:
        pass
    now[0] = 111.0
    second = watch.sample()
    assert second.seconds == 10.0
    assert second.cpu_percent == pytest.approx(10 * (second.cpu_seconds - first.cpu_seconds))
    assert round(second.cpu_seconds - first.cpu_seconds, 2) >= 0.04  # the kernel counts in hundredths


def test_looking_waits_for_as_long_as_its_share_of_a_core_needs():
    busy = iter([0.0, 0.002, 1.0, 1.02])
    watch = ProcessMonitor(os.getpid(), interval=5, busy=lambda: next(busy))
    watch.sample()
    assert watch.pause == 5
    watch.sample()
    assert watch.pause == pytest.approx(0.02 / MAX_SHARE)


class Driver:
    """Plays nvidia-ml-py with two devices; the functions that are there are those that the real one has."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, broken=False, dead=()):
        self.broken, self.dead, self.begun = broken, dead, 0

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.begun += 1

    def nvmlShutdown(self):
        self.begun -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 1:
            raise self.NVMLError("Invalid Argument")
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in ("GPU-0", "GPU-1"):
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=40 if handle == "GPU-0" else 90, memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        if handle in self.dead:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(total=80 << 30, free=60 << 30, used=20 << 30)

    def nvmlDeviceGetName(self, handle):
        return f"NVIDIA {handle}"


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["NVIDIA GPU-0", "NVIDIA GPU-1"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["NVIDIA GPU-1"]),
        ({"CUDA_VISIBLE_DEVICES": "1,0", "NVIDIA_VISIBLE_DEVICES": "all"}, ["NVIDIA GPU-1", "NVIDIA GPU-0"]),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, ["NVIDIA GPU-0"]),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1"}, ["NVIDIA GPU-1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "9"}, None),
    ],
)
def test_the_devices_of_a_task_are_those_that_it_may_see(environ, names):
    driver = Driver()
    gpus = open_gpus(environ, load=lambda name: driver)
    assert (gpus and [gpu.name for gpu in gpus.sample()]) == names
    if gpus is not None:
        gpus.close()
    assert driver.begun == 0


def test_what_a_device_does():
    (first, second) = open_gpus({}, load=lambda name: Driver()).sample()
    assert (first.percent, first.memory_bytes, first.memory_total) == (40.0, 20 << 30, 80 << 30)
    assert second.percent == 90.0
    assert [gpu.name for gpu in open_gpus({}, load=lambda name: Driver(dead={"GPU-0"})).sample()] == ["NVIDIA GPU-1"]


def test_no_driver_or_no_nvidia_ml_py():
    def missing(name):
        raise ImportError(name)

    assert open_gpus({}, load=missing) is None
    assert open_gpus({}, load=lambda name: Driver(broken=True)) is None


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")
def test_the_real_nvidia_ml_py_has_what_is_used():
    pynvml = importlib.import_module("pynvml")
    used = [name for name in dir(Driver) if name.startswith("nvml") or name == "NVMLError"]
    assert all(hasattr(pynvml, name) for name in used)
    gpus = open_gpus({})
    if gpus is not None:  # there is a GPU
        assert all(gpu.memory_total > 0 for gpu in gpus.sample())
