"""Backend ``pyslurm``: what its processes are asked, and what happens when one of them fails.

A module that stands for pyslurm notes what it is given; ``tests/slurm/test_newer_release.py`` runs the real one.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from slurm_fakes import Clock, FakeSlurm, Managers, identity, job_row, node_row, task

from dl2d.core.errors import ConfigError, Denied, Rejected, ResourceManagerError, Unavailable
from dl2d.core.resources import Resources
from dl2d_slurm.manager import SlurmManager

MODULE = """\
import os, signal, time
folder = os.path.dirname(os.path.abspath(__file__))
class RPCError(Exception):
    pass
def slurm_api_version():
    return 26, 5, 3
class JobSubmitDescription:
    def __init__(self, **given):
        assert list(given.pop("profile_types")) == []
        self.given = given
    def submit(self):
        descriptor = os.open(os.path.join(folder, "submitted"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (ascii({**self.given, "pid": os.getpid()}) + "\\n").encode())
        scope = {"answer": 77}
        with open(os.path.join(folder, "behaviour.py")) as file:
            exec(file.read(), globals(), scope)
        return scope["answer"]
"""


class FakePyslurm:
    """A Python with such a module, in which the code of ``behaves`` runs for each job; ``answer`` is the job's id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "pyslurm.py").write_text(MODULE)
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
        self.python.chmod(0o755)
        self.behaves("")

    def behaves(self, code: str) -> None:
        (self.folder / "behaviour.py").write_text(code)

    def submitted(self) -> list[dict[str, object]]:
        path = self.folder / "submitted"
        return [ast.literal_eval(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def pyslurm(tmp_path: Path, slurm: FakeSlurm) -> FakePyslurm:
    slurm.answer("sinfo", rows=[node_row("n1"), node_row("n2")], **{"--version": {"stdout": "slurm-wlm 26.05.5\n"}})
    return FakePyslurm(tmp_path / "pyslurm")


@pytest.fixture
def manager(manager_on: Managers, pyslurm: FakePyslurm) -> SlurmManager:
    return manager_on(uid=64030, pyslurm_python=str(pyslurm.python))


def test_a_task_is_submitted_as_its_owner(slurm: FakeSlurm, manager_on: Managers, pyslurm: FakePyslurm) -> None:
    options = ["--reservation=ml,other", "--constraint=a&b", "--exclude=n[7-8]", "--time-min=1400"]
    manager = manager_on(
        uid=64030, pyslurm_python=str(pyslurm.python), sbatch_options=options, time_limit="1-00:30:00", partition="a,b"
    )
    assert manager.submit(task(demand=Resources.of({"cpu": 2, "memory": 100, "gpu": 3, "gpu:a100": 2}))) == "77"
    (sent,) = pyslurm.submitted()
    assert str(sent.pop("script")).startswith("#!/bin/sh\n")
    assert sent.pop("pid") != os.getpid()
    assert sent == {
        "user_id": "1001",
        "group_id": "1002",
        "working_directory": "/home/alice",
        "environment": {
            "PATH": str(slurm.folder),
            "SLURM_CONF": "/x/slurm.conf",
            "SLURM_UMASK": "0022",
            "SLURM_CPUS_PER_TASK": "2",
        },
        "name": "dl2-12-worker-1",
        "comment": "dl2:fake.12.1795000000:worker-1",
        "standard_output": "dl2-12-worker-1.out",
        "nodes": "1",
        "ntasks": 1,
        "cpus_per_task": 2,
        "memory_per_node": 100,
        "gres_per_node": "gpu:1,gpu:a100:2",
        "is_requeueable": False,
        "required_nodes": ["n1"],
        "partitions": ["a", "b"],
        "time_limit": 1470,
        "time_limit_min": 1400,
        "reservations": ["ml", "other"],
        "constraints": "a&b",
        "excluded_nodes": ["n7", "n8"],
    }
    assert slurm.calls("sbatch") == []


def test_slurm_user_submits_for_others_and_cancels_by_scancel(slurm: FakeSlurm, manager: SlurmManager) -> None:
    slurm.answer("squeue", rows=[job_row(1)])
    assert manager.capabilities().other_users
    manager.submit(task())
    manager.stop([identity(1)], 0.0)
    assert [call.argv[-1] for call in slurm.calls("scancel")][-1] == "1"
    calls = manager.call_statistics().calls
    assert calls["pyslurm submit"] == 1
    assert "sbatch" not in calls


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("raise RPCError('Requested node configuration is not available')", Rejected, "Requested node"),
        ("raise RPCError('Invalid user id')", Denied, "Invalid user id"),
        ("raise RPCError('Unable to contact slurm controller (connect failure)')", Unavailable, "Unable to contact"),
        ("raise RPCError('MaxJobCount limit reached')", Unavailable, "MaxJobCount limit reached"),
        ("raise ValueError('Invalid specifier')", Rejected, "backend: pyslurm: ValueError: Invalid specifier"),
        (
            "import sys; print('error: site says: ask for less', file=sys.stderr); raise RPCError('Unspecified error')",
            Rejected,
            "error: site says: ask for less; Unspecified error",
        ),
    ],
)
def test_refusals_are_typed_and_in_slurms_words(
    manager: SlurmManager, pyslurm: FakePyslurm, code: str, kind: type[ResourceManagerError], words: str
) -> None:
    pyslurm.behaves(code)
    with pytest.raises(ResourceManagerError) as caught:
        manager.submit(task())
    assert isinstance(caught.value, kind)
    assert words in str(caught.value)
    pyslurm.behaves("")
    assert manager.submit(task()) == "77"
    # One that does not reach slurmctld is not used again: it has read slurm.conf when it began.
    assert len({job["pid"] for job in pyslurm.submitted()}) == (2 if kind is Unavailable else 1)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("os._exit(3)", "status 3"),
        ("time.sleep(60)", "did not answer within 1 s"),
        ("answer = 'x' * 200_000", "answered with something else than a reply"),
        ("answer = '77'", "answered with something else than a reply"),
        ("answer = 0", "does not say whether it has submitted the job"),
        ("import sys; print('fatal: no such plugin', file=sys.stderr, flush=True); os._exit(1)", "no such plugin"),
    ],
)
def test_a_process_that_fails_is_replaced_after_a_pause(
    manager_on: Managers, pyslurm: FakePyslurm, clock: Clock, code: str, words: str
) -> None:
    manager = manager_on(uid=64030, pyslurm_python=str(pyslurm.python), command_timeout_seconds=1)
    pyslurm.behaves(code)
    with pytest.raises(Unavailable, match=words):
        manager.submit(task())
    pyslurm.behaves("")
    assert not psutil.pid_exists(int(str(pyslurm.submitted()[0]["pid"])))
    with pytest.raises(Unavailable, match=rf"{words}.*; tried again in 10 s"):
        manager.submit(task())
    clock.now += 11
    assert manager.submit(task()) == "77"
    assert len(pyslurm.submitted()) == 2


def test_a_process_that_was_killed_between_two_jobs_costs_none(manager: SlurmManager, pyslurm: FakePyslurm) -> None:
    assert manager.submit(task()) == "77"
    killed = psutil.Process(int(str(pyslurm.submitted()[0]["pid"])))
    killed.send_signal(signal.SIGKILL)
    while killed.is_running() and killed.status() != psutil.STATUS_ZOMBIE:
        pass
    assert manager.submit(task()) == "77"


def test_threads_submit_through_several_processes_which_end_with_the_manager(
    manager: SlurmManager, pyslurm: FakePyslurm
) -> None:
    barrier = pyslurm.folder / "four"
    pyslurm.behaves(
        f"while len(set(open(folder + '/submitted').read().split('\\'pid\\': ')[1:])) < 4: time.sleep(0.01)\n"
        f"open({str(barrier)!r}, 'w').close()"
    )
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: manager.submit(task()), range(8))) == ["77"] * 8
    pids = {int(str(job["pid"])) for job in pyslurm.submitted()}
    assert len(pids) == 4
    manager.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_closing_does_not_wait_for_a_job_that_is_submitted(manager: SlurmManager, pyslurm: FakePyslurm) -> None:
    pyslurm.behaves("open(folder + '/begun', 'w').close(); time.sleep(600)")
    failed: list[ResourceManagerError] = []

    def submit() -> None:
        try:
            manager.submit(task())
        except ResourceManagerError as error:
            failed.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    while not (pyslurm.folder / "begun").exists():
        thread.join(0.01)
    manager.close()
    thread.join(30)
    assert [type(error) for error in failed] == [Unavailable]
    with pytest.raises(Unavailable):
        manager.submit(task())
    assert len(pyslurm.submitted()) == 1


def test_a_process_is_ended_with_what_started_it(manager_on: Managers, pyslurm: FakePyslurm) -> None:
    wrapper = pyslurm.folder / "wrapper"
    wrapper.write_text(f'#!/bin/sh\n{pyslurm.python} "$@"\n')
    wrapper.chmod(0o755)
    manager = manager_on(uid=64030, pyslurm_python=str(wrapper))
    manager.submit(task())
    pid = int(str(pyslurm.submitted()[0]["pid"]))
    assert psutil.pid_exists(pid)
    manager.close()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        pass


def test_the_answer_for_another_job_is_not_taken_for_that_of_this_one(
    manager: SlurmManager, pyslurm: FakePyslurm
) -> None:
    assert manager.submit(task()) == "77"
    late = '{"number": 1, "job_id": 77}\\n'
    pyslurm.behaves(f"import sys; os.write(int(sys.argv[1]), b'{late}')")
    with pytest.raises(Unavailable, match=r"does not say whether it has submitted|something else than a reply"):
        manager.submit(task())


def test_what_is_wrong_with_an_installation_is_said(
    manager_on: Managers, slurm: FakeSlurm, pyslurm: FakePyslurm
) -> None:
    def problem(python: str) -> str:
        with pytest.raises(Unavailable) as caught:
            manager_on(backend="pyslurm", pyslurm_python=python).capabilities()
        return str(caught.value)

    assert "/no/such/python cannot be run" in problem("/no/such/python")
    bare = pyslurm.folder / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    assert "cannot be used: ModuleNotFoundError: No module named 'pyslurm'" in problem(str(bare))
    slurm.answer("sinfo", **{"--version": {"stdout": "slurm 25.11.0\n"}})
    assert "was built for Slurm 26.05, but Slurm 25.11.0 is installed" in problem(str(pyslurm.python))
    with pytest.raises(ConfigError, match=r"sbatch_options: --exclusive cannot be used with the backend pyslurm"):
        manager_on(backend="pyslurm", sbatch_options=["--exclusive"])
