"""What dies, and what the job then says: quickly, and naming the task and how it died."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pslite_jobs import LEASE, KillAt, command, run_job, static_digest
from variants import first

from pslite.coordinator import Coordinator, Settings
from pslite.job.job_status import Reply
from pslite.launch.coordinator_process.mxnet_launcher import OpenMembership
from pslite.net.authentication import Identity, connect
from pslite.net.tensor_frames import INIT, PUSH, STATE, STATE_ACK, Header, region_header
from pslite.testing import Resize

SLOW = ("--step-seconds", "0.02", "--epochs", "100")
#: of a job that goes on until it is cancelled
ENDLESS = ("--step-seconds", "0.02", "--epochs", "100000")


@pytest.mark.parametrize("task", first(1, ("ps-1", "ps-0")))
def test_a_killed_server_fails_the_job_by_name(task):
    kill = KillAt(task, 5)
    result = run_job(
        command("--optimizer", "momentum", "--on-loss", "fail", *SLOW),
        workers=2,
        servers=2,
        on_status=kill,
        state="failed",
    )
    assert f"{task} on {socket.gethostname()} (pid {kill.pid}) died: killed by signal 9 (SIGKILL)" in result.reason
    assert result.exit_codes.pop(task) == 128 + 9
    assert set(result.exit_codes.values()) == {1}


def test_an_error_in_the_users_script_is_the_reason():
    result = run_job(command("--raise-at", "7", *SLOW), workers=2, servers=1, state="failed")
    assert "worker-" in result.reason
    assert "its script raised ValueError: the user's own mistake" in result.reason
    assert set(result.exit_codes.values()) == {1}


def run_code(code, **more):
    """Run a script that uses `numpy_worker` as `w`."""
    environ = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    code = f"import sys, os; sys.argv = ['x', '--epochs', '50']; import numpy_worker as w\n{code}"
    return run_job([sys.executable, "-c", code], environ=environ, **more)


def test_a_script_that_ends_early_is_told_from_one_that_is_done():
    result = run_code("w.pace = lambda v, t: sys.exit(0) if v == 4 else None; w.main()", state="failed")
    assert "script ended at version 4 of 550" in result.reason


@pytest.mark.parametrize("leave", ["sys.exit", "exit"])
def test_a_script_that_calls_exit_with_a_status_has_failed(leave):
    result = run_code(f"w.pace = lambda v, t: {leave}('no data') if v == 4 else None; w.main()", state="failed")
    assert "its script called sys.exit('no data')" in result.reason


def test_a_script_that_ends_with_an_exit_status_after_its_loop_has_failed():
    result = run_code("w.main(); raise SystemExit(3)", state="failed")
    assert "worker-0" in result.reason
    assert "its process ended with status 3" in result.reason


def test_a_script_that_ends_with_the_status_of_sigterm_is_lost_as_by_that_signal():
    code = "w.pace = lambda v, t: sys.exit(143) if v == 4 and os.environ['DL2_TASK'] == 'worker-0' else None; w.main()"
    result = run_code(code, workers=2, servers=1)
    assert result.versions == 550
    assert any("worker-0" in line and "died: its process ended with status 143" in line for line in result.log)


def test_an_error_in_a_forked_process_is_the_reason():
    result = run_code(
        "def wrong(v, t): raise ValueError('a mistake')\n"
        "w.pace = wrong; import multiprocessing; child = multiprocessing.get_context('fork').Process(target=w.main)\n"
        "child.start(); child.join(); sys.exit(child.exitcode)",
        state="failed",
    )
    assert "its script raised ValueError: a mistake" in result.reason


def test_a_script_that_never_joins():
    result = run_job([sys.executable, "-c", "raise SystemExit(3)"], state="failed")
    assert "worker-0" in result.reason
    assert "status 3" in result.reason


def test_a_command_that_does_not_exist():
    result = run_job(["/no/such/program"], state="failed")
    assert "cannot start '/no/such/program'" in result.reason


def test_the_only_server_killed_before_the_job_begins():
    kill = KillAt("ps-0", 0)
    # a worker that is still loading: nothing has begun
    slow = [sys.executable, "-c", "import time; time.sleep(30)"]
    result = run_job(slow, workers=1, servers=1, on_status=kill, state="failed")
    assert result.reason == f"ps-0 on {socket.gethostname()} (pid {kill.pid}) died: killed by signal 9 (SIGKILL)"


class Frozen:
    """Stops ps-1 as it joins, and kills it later; until then worker-0 stands still, without which no plan is ready."""

    def __init__(self, is_over):
        self._is_over = is_over
        self._worker = self._server = 0

    def __call__(self, status, director):
        pids = {member.task: member.pid for member in status.members}
        if not self._worker and status.version >= 5:
            self._worker = pids["worker-0"]
            os.kill(self._worker, signal.SIGSTOP)
        elif not self._server and "ps-1" in pids:
            self._server = pids["ps-1"]
            os.kill(self._server, signal.SIGSTOP)
            os.kill(self._worker, signal.SIGCONT)
        elif self._server > 0 and self._is_over(status):
            os.kill(self._server, signal.SIGKILL)
            self._server = -1


def test_a_joiner_killed_before_it_is_ready_leaves_the_job_untouched():
    lines: list[str] = []
    result = run_job(
        command("--epochs", "12"),
        workers=2,
        servers=1,
        schedule=[Resize(5, 2, 2)],
        on_status=Frozen(lambda status: any("plan 2" in line for line in lines)),
        say=lines.append,
        settings=Settings(grace=60.0, start=60.0, lease=60.0, balance="even"),
    )
    assert result.digest == static_digest("--epochs", "12")
    assert len(result.plans) == 1
    assert any("plan 2 is given up" in line and "ps-1" in line for line in result.log)
    assert result.exit_codes["ps-1"] == 128 + 9


@pytest.mark.slow
def test_a_joiner_that_never_gets_ready_is_dropped_and_the_others_join():
    result = run_job(
        command("--epochs", "100", "--step-seconds", "0.01"),
        workers=1,
        servers=1,
        schedule=[Resize(5, 2, 2)],
        on_status=Frozen(lambda status: any(plan.number > 2 for plan in status.plans)),
        settings=Settings(grace=60.0, start=60.0, lease=60.0, prepare=8.0, settle=60.0, balance="even"),
    )
    assert result.digest == static_digest("--epochs", "100")
    assert any("ps-1 not ready within 8 s" in line for line in result.log)
    assert [(p.workers, p.servers) for p in result.plans] == [(1, 1), (2, 1)]


@pytest.mark.slow
def test_a_silent_server_is_found_by_its_lease():
    kill = KillAt("ps-1", 5, signal.SIGSTOP)
    options = ("--step-seconds", "0.02", "--epochs", "20")
    result = run_job(
        command(*options),
        workers=2,
        servers=2,
        on_status=kill,
        settings=LEASE,
    )
    assert result.digest == static_digest(*options)
    hangs = f"ps-1 on {socket.gethostname()} (pid {kill.pid}) died or hangs: silent for 8 s"
    # its blocks have no replicas, and there is no checkpoint
    assert f"{hangs}; the job goes back to its beginning" in result.log


def test_a_worker_with_another_script_is_refused_with_the_difference(coordinator_with_a_running_job):
    job = coordinator_with_a_running_job
    done = job.worker("worker-7", *ENDLESS, "--batch", "16", "--features", "50")
    assert done.returncode == 1
    assert "describes another job" in done.stderr
    assert "batch: 16 here, 20 there" in done.stderr
    assert "tensor weight: [50]" in done.stderr
    assert job.still_running()


def test_a_wrong_token_is_refused_on_both_sides(coordinator_with_a_running_job):
    job = coordinator_with_a_running_job
    done = job.worker("worker-8", *ENDLESS, token=secrets.token_hex(32))
    assert done.returncode == 1
    assert "wrong token" in done.stderr
    assert "from 127.0.0.1:" in job.wait_for_line("wrong token")
    assert job.still_running()


def test_a_task_id_is_never_used_twice(coordinator_with_a_running_job):
    job = coordinator_with_a_running_job
    done = job.worker("worker-0", *ENDLESS)
    assert done.returncode == 1
    assert "has joined already" in done.stderr
    assert job.still_running()


def test_random_bytes_to_coordinator_and_server_do_no_harm(coordinator_with_a_running_job):
    job = coordinator_with_a_running_job
    server = next(m for m in job.coordinator.state.members.values() if m.role == "ps")
    for address in (job.address, server.address):
        host, port = address.rsplit(":", 1)
        for data in (b"", b"\0" * 64, b"\xff" * 64, secrets.token_bytes(100_000), b"GET / HTTP/1.0\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=30) as sock:
                try:
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    sock.settimeout(30)
                    while sock.recv(65536):
                        pass
                except OSError:
                    pass
    assert job.still_running()


def test_a_member_that_sends_malformed_frames_is_cut_off(coordinator_with_a_running_job):
    job = coordinator_with_a_running_job
    server = next(m for m in job.coordinator.state.members.values() if m.role == "ps")
    identity = Identity("worker", "worker-9", "x", job.token, encrypt="all")
    frames = [
        secrets.token_bytes(200),
        Header(PUSH, 1, 10**6, 1, 1024, 0, 0).pack(),  # a block that does not exist
        Header(PUSH, 1, 0, 1, 2**31, 0, 0).pack(),  # a length that is not the block's
        Header(STATE, 1, 0, 0, 1024, 0, 0).pack(),  # a state nobody awaits
        Header(INIT, 1, 0, 0, 1024, 0, 0).pack(),  # weights from somebody who is not the chief
        Header(STATE_ACK, 1, 0, 0, 0, 0, 0).pack(),
    ]
    for data in frames:
        sock, _ = connect(server.address, identity, "data", timeout=60)
        with sock:
            sock.sendall(data)
            sock.settimeout(60)
            try:
                assert sock.recv(1) == b""
            except ConnectionResetError:
                pass  # closed with bytes unread
    assert job.still_running()


def test_shared_memory_that_is_not_what_it_should_be_is_refused(coordinator_with_a_running_job, tmp_path):
    job = coordinator_with_a_running_job
    server = next(m for m in job.coordinator.state.members.values() if m.role == "ps")
    identity = Identity("worker", "worker-9", "x", job.token)
    with (tmp_path / "file").open("w+b") as file, open_sealed(4096) as small, open_sealed(4096, 0) as unsealed:
        file.truncate(1 << 20)
        first = region_header(3).pack()
        whole = Header(PUSH, 1, 0, 1, 1024, 0, 0, region=3)
        refused = [
            [(first, None)],  # none comes
            [(first, file.fileno())],  # a file, which can shrink
            [(first, unsealed.fileno())],
            [(replace(whole, region=1).pack(), None)],  # no such region
            [(region_header(1).pack(), small.fileno()), (replace(whole, region=1).pack(), None)],  # it is for weights
            [(first, small.fileno()), (whole.pack(), None)],  # too small for the job
            [(first, small.fileno()), (replace(whole, length=8).pack(), None)],
            [(first, small.fileno()), (replace(whole, block=10**6).pack(), None)],
            [(first, small.fileno()), (replace(whole, kind=STATE).pack(), None)],
        ]
        for frames in refused:
            sock, _ = connect(f"\0{server.local}", identity, "data", timeout=60)
            with sock:
                for data, descriptor in frames:
                    socket.send_fds(sock, [data], [] if descriptor is None else [descriptor])
                sock.settimeout(60)
                try:
                    assert sock.recv(1) == b""
                except ConnectionResetError:
                    pass
    assert job.still_running()
    # nothing stays open of what was handed over
    held = [str(fd.readlink()) for fd in Path(f"/proc/{server.pid}/fd").iterdir() if fd.is_symlink()]
    assert not any(str(tmp_path) in name or "memfd:test" in name for name in held), held


def open_sealed(size, seals=fcntl.F_SEAL_SHRINK):
    file = os.fdopen(os.memfd_create("test", os.MFD_ALLOW_SEALING), "w+b")
    file.truncate(size)
    fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, seals)
    return file


def test_members_end_when_the_coordinator_is_killed():
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DL2_")}
    code = (
        "import sys; from pslite.coordinator import Coordinator\n"
        "from pslite.launch.coordinator_process.task_processes_on_this_machine import LocalTasks\n"
        "d = LocalTasks(sys.argv[1:], workers=2, servers=1)\n"
        "c = Coordinator(job='j', token=b'x' * 32, director=d, say=lambda t: print(t, flush=True), host='127.0.0.1')\n"
        "c.run()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command(*SLOW)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = []
    try:
        for line in process.stdout:
            if "(pid " in line:
                pids.append(int(line.split("(pid ")[1].split(")")[0]))
            if "plan 1 done" in line:
                break
        process.kill()
        # stderr is shared with the tasks: it ends when the last of them has
        _, errors = process.communicate(timeout=120)
        assert errors.count("the coordinator at") >= 3
        assert "is gone" in errors
        assert len(pids) == 3
        assert not any(alive(pid) for pid in pids)
    finally:
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- a job that runs while strangers knock -----------------------------------------------------------------------


class RunningJob:
    def __init__(self):
        self.lines: list[str] = []
        self.token = secrets.token_bytes(32)
        self.stop = False
        job = self

        class Director(OpenMembership):
            def exchange(self, status, *, urgent):
                job.version = status.version
                return Reply(members=frozenset({"worker-0", "ps-0"}), stop=job.stop)

        self.version = 0
        self.coordinator = Coordinator(
            job="test", token=self.token, director=Director(0, 0), say=self.lines.append, host="127.0.0.1"
        )
        self.address = self.coordinator.state.address
        self.thread = threading.Thread(target=self.run)
        self.status = None
        self.processes = [self.start("ps-0", "ps"), self.start("worker-0", "worker", *ENDLESS)]

    def run(self):
        self.status = self.coordinator.run()

    def environ(self, task, role, token):
        return {
            **os.environ,
            "DL2_ROLE": role,
            "DL2_TASK": task,
            "DL2_COORDINATOR": self.address,
            "DL2_TOKEN": token,
            "DL2_QUIET": "1",
        }

    def start(self, task, role, *options):
        return subprocess.Popen(
            [sys.executable, "-m", "pslite.run", "--", *command(*options)],
            env=self.environ(task, role, self.token.hex()),
            start_new_session=True,
        )

    def worker(self, task, *options, token=None):
        return subprocess.run(
            [sys.executable, "-m", "pslite.run", "--", *command(*options)],
            env=self.environ(task, "worker", token or self.token.hex()),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def wait_for_line(self, text):
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            found = [line for line in self.lines if text in line]
            if found:
                return found[-1]
            time.sleep(0.02)
        raise AssertionError(self.lines)

    def still_running(self):
        before = self.version
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and self.version < before + 5:
            time.sleep(0.02)
        return self.version >= before + 5 and not any("failed" in line for line in self.lines)


@pytest.fixture(scope="module")
def coordinator_with_a_running_job():
    job = RunningJob()
    job.thread.start()
    try:
        job.wait_for_line("plan 1 done")
        yield job
    finally:
        job.stop = True
        job.thread.join(100)
        for process in job.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert job.status.state == "cancelled"
    assert job.status.reason == "the daemon cancelled it"
