"""The coordinator dies, is stopped, or is there twice; with real processes."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from pslite_jobs import command, static_digest
from test_director import Daemon

JOB = ("--epochs", "20")
PACED = (*JOB, "--step-seconds", "0.02")
COORDINATOR = """
import socket, sys
from pathlib import Path
from pslite.coordinator import Coordinator, Settings
from pslite.director import StaticDirector
from pslite.journal import Journal
Coordinator(
    job="j", token=bytes.fromhex(sys.argv[1]), director=StaticDirector(), say=lambda text: print(text, flush=True),
    settings=Settings(heartbeat=0.1, lease=4.0, grace=1.0, verdict=0.5), address_host="127.0.0.1",
    listener=socket.socket(fileno=int(sys.argv[2])), journal=Journal(Path(sys.argv[3])),
).run()
"""


def clean(**changes):
    return {**{k: v for k, v in os.environ.items() if not k.startswith(("DL2_", "SLURM_"))}, **changes}


class Told:
    """A process whose lines are kept as they come."""

    def __init__(self, arguments, **changes):
        self.lines: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            arguments, env=clean(**changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()

    def wait_for(self, text, seconds=60):
        with self._news:
            found = self._news.wait_for(lambda: any(text in line for line in self.lines), seconds)
        assert found, "\n".join(self.lines)

    def end(self, seconds=60):
        """Wait until it and all that write to its output have ended; return the exit status."""
        code = self.process.wait(seconds)
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "\n".join(self.lines)
        return code

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._thread.join(20)
        self.process.stdout.close()

    def finished(self):
        """Return the digest of the job."""
        return next(line.split("digest ")[1].split()[0] for line in self.lines if "finished: " in line)


@contextmanager
def told(arguments, **changes):
    process = Told(arguments, **changes)
    try:
        yield process
    finally:
        process.close()


def dl2_run(*options):
    return [sys.executable, "-m", "pslite.run", "--workers", "2", "--servers", "2", "--", *command(*options)]


def kill_coordinator(state, killed):
    """Kill the process that holds the log, if it is not one of those killed before: then the next one."""
    while True:
        text = (state / "lock").read_text()
        if text.strip() and int(text) not in killed:
            killed.append(int(text))
            os.kill(killed[-1], signal.SIGKILL)
            return
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--clip", "0.5"), ("--durability", "durable")], ids=" ".join)
def test_a_killed_coordinator_is_followed_by_another_one_and_no_bit_differs(tmp_path, options):
    state = tmp_path / "state"
    with told(dl2_run(*PACED, *options), DL2_STATE=str(state)) as job:
        killed = []
        for epoch in (3, 9):
            job.wait_for(f"epoch {epoch} of 20")
            kill_coordinator(state, killed)
            job.wait_for(f"plan 1, 4 members, term {len(killed) + 1}")
        assert job.end() == 0, job.lines
        assert len(set(killed)) == 2
        assert job.process.pid not in killed
        assert sum("was killed by SIGKILL; another one takes its place" in line for line in job.lines) == 2
        assert job.finished() == static_digest(*JOB, *options)
        assert sum("finished: " in line for line in job.lines) == 1
    assert not state.exists()


def test_a_coordinator_killed_in_the_middle_of_a_resize_under_the_daemon(tmp_path, monkeypatch):
    gate = tmp_path / "resizing"
    gate.touch()
    monkeypatch.setenv("PSLITE_PACE_FILE", str(gate))
    daemon = Daemon()
    try:
        state = tmp_path / "state"
        anchor = daemon.launch(
            "anchor", ["--", *command(*PACED)], DL2_ROLE="coordinator", DL2_DAEMON=daemon.url, DL2_JOB="job-7",
            DL2_CREDENTIAL=daemon.credential, DL2_TOKEN=daemon.token, DL2_STATE=str(state), DL2_HOST="127.0.0.1",
        )  # fmt: skip
        daemon.want("worker-0", "ps-0", options=PACED)
        first = daemon.wait(lambda beat: beat["version"] >= 10)
        daemon.want("worker-0", "worker-1", "ps-0", "ps-1", options=PACED)
        # as soon as the newcomers are there a plan is made; the coordinator dies on its way, and again
        daemon.wait(lambda beat: len([m for m in beat["members"] if m["state"] != "left"]) == 4)
        killed = []
        for _ in range(3):
            kill_coordinator(state, killed)
        daemon.wait(lambda beat: sum(m["state"] == "active" for m in beat["members"]) == 4, 60)
        gate.unlink()
        last = daemon.wait(lambda beat: beat["state"] == "finished", 60)
        assert last["result"]["digest"] == static_digest(*JOB)
        assert {beat["incarnation"] for beat in daemon.beats} == {first["incarnation"]}
        assert (2, 2) in {(plan["workers"], plan["servers"]) for beat in daemon.beats for plan in beat["plans"]}
        text = anchor.communicate(timeout=30)[1]
        assert anchor.returncode == 0, text
        assert text.count("another one takes its place") == 3
    finally:
        daemon.close()


@pytest.mark.slow
def test_a_second_dl2_run_on_a_log_is_refused_and_one_after_the_first_goes_on(tmp_path):
    environ = {"DL2_STATE": str(tmp_path / "state"), "DL2_TOKEN": secrets.token_hex(32)}
    with told(dl2_run(*PACED), **environ) as first:
        first.wait_for("epoch 2 of 20")
        with told(dl2_run(*PACED), **environ) as second:
            assert second.end() == 2
            # whichever it comes to first: somebody listens at the port, or holds the log
            assert any("cannot listen on port" in line or "is in use by process" in line for line in second.lines)
        # without a word to members: another dl2-run may come within the lease
        first.process.kill()
        first.process.wait()
        with told(dl2_run(*PACED), **environ) as third:
            third.wait_for("goes on from its log: plan 1, 4 members, term 2")
            assert third.end() == 0, third.lines
            assert third.finished() == static_digest(*JOB)


def test_without_a_log_members_end_with_their_coordinator(tmp_path):
    with told(dl2_run(*PACED), DL2_STATE="none") as job:
        job.wait_for("epoch 1 of 20")
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        own = Path(f"/proc/{job.process.pid}/cmdline").read_bytes()
        (coordinator,) = [pid for pid, name in names.items() if name == own]
        os.kill(coordinator, signal.SIGKILL)
        assert job.end() == 128 + signal.SIGKILL
        assert sum("the coordinator at" in line and "is gone" in line for line in job.lines) >= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_dl2_run_ends_the_job_when_asked(tmp_path, number):
    with told(dl2_run(*PACED), DL2_STATE=str(tmp_path / "state")) as job:
        job.wait_for("epoch 1 of 20")
        job.process.send_signal(number)
        assert job.end() == 128 + number
        assert any(f"job cancelled: its coordinator got {number.name}" in line for line in job.lines)
    assert not (tmp_path / "state").exists()


def test_an_old_coordinator_that_wakes_up_says_nothing_more(tmp_path):
    token, state = secrets.token_hex(32), tmp_path / "state"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def coordinator():
            return subprocess.Popen(
                [sys.executable, "-c", COORDINATOR, token, str(listener.fileno()), str(state)], env=clean(),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, pass_fds=[listener.fileno()],
            )  # fmt: skip

        def task(name, role):
            return subprocess.Popen(
                [sys.executable, "-m", "pslite.run", "--", *command(*PACED)], start_new_session=True,
                env=clean(DL2_ROLE=role, DL2_TASK=name, DL2_COORDINATOR=address, DL2_TOKEN=token, DL2_QUIET="1"),
            )  # fmt: skip

        old = coordinator()
        processes = [old, task("ps-0", "server"), task("worker-0", "worker"), task("worker-1", "worker")]
        try:
            for line in old.stdout:
                if "epoch 2 of" in line:
                    break
            old.send_signal(signal.SIGSTOP)
            (state / "lock").unlink()  # as on a file system without locks
            new = coordinator()
            processes.append(new)
            lines = []
            for line in new.stdout:
                lines.append(line)
                if "epoch" in line:
                    break  # members speak to it
            old.send_signal(signal.SIGCONT)
            out, _ = old.communicate(timeout=30)
            assert old.returncode == 1
            assert "another coordinator has taken over" in out
            assert "died" not in out
            lines += [*new.stdout]
            assert new.wait(60) == 0, lines
            (end,) = [line for line in lines if "finished: " in line]
            assert static_digest(*JOB) in end
            assert [process.wait(30) for process in processes[1:4]] == [0, 0, 0]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()
