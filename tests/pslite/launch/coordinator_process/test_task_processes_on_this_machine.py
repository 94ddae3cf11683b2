"""Workers on one machine with several GPUs: each sees one, of those that the fewest others have."""

from __future__ import annotations

import pytest

from pslite.launch.coordinator_process import task_processes_on_this_machine
from pslite.launch.coordinator_process.task_processes_on_this_machine import LocalTasks, Resize
from pslite.launch.gpus import visible_gpus


class Process:
    """A process that ends when it is told to."""

    def __init__(self, command, env, start_new_session):
        self.environ = env
        self.status = None

    def poll(self):
        return self.status


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(task_processes_on_this_machine.subprocess, "Popen", Process)

    def start(workers, **environ):
        tasks = LocalTasks(["train"], workers=workers, servers=1, environ=environ)
        tasks.start("127.0.0.1:1", b"token", lambda: None)
        return tasks

    return start


def given(tasks):
    return {task: process.environ.get("CUDA_VISIBLE_DEVICES") for task, process in tasks.processes.items()}


def test_each_worker_has_a_gpu_of_its_own_as_long_as_there_are_any(start):
    tasks = start(3, CUDA_VISIBLE_DEVICES="2,5,MIG-7")
    assert given(tasks) == {"ps-0": "2,5,MIG-7", "worker-0": "2", "worker-1": "5", "worker-2": "MIG-7"}
    tasks.processes["worker-1"].status = 0
    tasks.resize(Resize(0, 1, 1))
    tasks.resize(Resize(0, 3, 1))
    # worker-2 may need a while to leave
    assert given(tasks) | {"worker-3": "5", "worker-4": "2"} == given(tasks)


@pytest.mark.parametrize("listed", ["", "-1", "3", "GPU-8f1e"])
def test_workers_share_what_there_is_where_there_is_one_gpu_or_none(start, listed):
    assert set(given(start(2, CUDA_VISIBLE_DEVICES=listed)).values()) == {listed}


def test_without_a_list_the_gpus_are_those_of_the_driver(tmp_path):
    assert visible_gpus({}, tmp_path / "none") == []
    for address in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / address).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == ["1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,0,"}, tmp_path) == ["1", "0"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, tmp_path) == ["1"]
