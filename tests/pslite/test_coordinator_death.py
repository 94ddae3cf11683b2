"""The coordinator dies, is stopped, or is there twice; with real processes."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_daemon import Daemon
from pslite_jobs import command, environment, schedules, static_digest

JOB = ("--epochs", "10")
PACED = (*JOB, "--step-seconds", "0.02")
#: of random schedules, which go on up to version 150
LONG = ("--epochs", "20")
COORDINATOR = """
import socket, sys
from pathlib import Path
from pslite.coordinator import Coordinator, Settings
from pslite.launch.coordinator_process.mxnet_launcher import OpenMembership
from pslite.storage.coordinator_log import CoordinatorLog
Coordinator(
    job="j", token=bytes.fromhex(sys.argv[1]), director=OpenMembership(0, 0), say=lambda text: print(text, flush=True),
    settings=Settings(heartbeat=0.5, lease=12.0, grace=3.0, verdict=6.0), host="127.0.0.1",
    listener=socket.socket(fileno=int(sys.argv[2])), log=CoordinatorLog(Path(sys.argv[3])),
).run()
"""


class Told:
    """A process whose lines are kept as they come."""

    def __init__(self, arguments, **changes):
        self.lines: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            arguments, env=environment(**changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()

    def wait_for(self, text, seconds=120, since=0):
        """Wait for a line, of those that come after the first `since`."""
        with self._news:
            found = self._news.wait_for(lambda: any(text in line for line in self.lines[since:]), seconds)
        assert found, "\n".join(self.lines)

    def end(self, seconds=120):
        """Wait until it and all that write to its output have ended; return the exit status."""
        code = self.process.wait(seconds)
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "\n".join(self.lines)
        return code

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._thread.join(60)
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
def test_a_coordinator_that_hangs_is_followed_by_another_one_and_no_bit_differs(tmp_path, gate):
    state = tmp_path / "state"
    with told(dl2_run(*PACED, "--clip", "0.5"), DL2_STATE=str(state)) as job:
        job.wait_for("epoch ")
        hanging = int((state / "lock").read_text())
        os.kill(hanging, signal.SIGSTOP)
        job.wait_for("the coordinator hangs")
        job.wait_for("goes on from its log")
        with pytest.raises(ProcessLookupError):
            os.kill(hanging, 0)
        gate.unlink()
        assert job.end() == 0, "\n".join(job.lines)
    assert job.finished() == static_digest(*JOB, "--clip", "0.5")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--clip", "0.5"), marks=pytest.mark.nightly), ("--durability", "durable")],
    ids=" ".join,
)
def test_a_killed_coordinator_is_followed_by_another_one_and_no_bit_differs(tmp_path, gate, options):
    state = tmp_path / "state"
    with told(dl2_run(*PACED, *options), DL2_STATE=str(state)) as job:
        killed, since = [], 0
        for _ in range(2):
            job.wait_for("epoch ", since=since)
            kill_coordinator(state, killed)
            job.wait_for(f"plan 1, 4 members, term {len(killed) + 1}")
            since = len(job.lines)
        gate.unlink()
        assert job.end() == 0, job.lines
        assert len(set(killed)) == 2
        assert job.process.pid not in killed
        assert sum("was killed by SIGKILL; another one takes its place" in line for line in job.lines) == 2
        assert job.finished() == static_digest(*JOB, *options)
        assert sum("finished: " in line for line in job.lines) == 1
    assert not state.exists()


def test_a_coordinator_killed_in_the_middle_of_a_resize_under_the_daemon(tmp_path, gate):
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
        daemon.wait(lambda beat: sum(m["state"] == "active" for m in beat["members"]) == 4)
        gate.unlink()
        last = daemon.wait(lambda beat: beat["state"] == "finished")
        assert last["result"]["digest"] == static_digest(*JOB)
        assert {beat["incarnation"] for beat in daemon.beats} == {first["incarnation"]}
        assert (2, 2) in {(plan["workers"], plan["servers"]) for beat in daemon.beats for plan in beat["plans"]}
        text = anchor.communicate(timeout=60)[1]
        assert anchor.returncode == 0, text
        assert text.count("another one takes its place") == 3
    finally:
        daemon.close()


class Storm:
    """Resizes a job under the daemon, and kills its members and its coordinator, at given versions."""

    def __init__(self, daemon, state, workers, servers, options, **environ):
        self.daemon, self.state, self.options, self.environ = daemon, state, options, environ
        self.tasks = {"worker": [], "ps": []}
        self.made = Counter()
        self.hit, self.coordinators = set(), []
        self.resize(workers, servers)

    def resize(self, workers, servers, *, oldest=False):
        for role, count in (("ps", servers), ("worker", workers)):
            have = self.tasks[role]
            while len(have) > count:
                have.pop(0 if oldest else -1)
            while len(have) < count:
                have.append(f"{role}-{self.made[role]}")
                self.made[role] += 1
        self.daemon.want(*self.tasks["worker"], *self.tasks["ps"], options=self.options, **self.environ)

    def kill(self, role, rng):
        """Kill a member where another one that stays has what it has; workers have weights that are in a plan."""
        with self.daemon.changed:
            beats = list(self.daemon.beats)
        in_plan = set()
        for plan in (plan for beat in beats for plan in beat["plans"]):
            in_plan = (in_plan | set(plan["added"])) - set(plan["removed"])
        there = [
            m for m in beats[-1]["members"] if m["role"] == role and m["state"] == "active" and m["pid"] not in self.hit
        ]
        victim = rng.choice(there)
        if {m["task"] for m in there} & in_plan & set(self.tasks[role]) - {victim["task"]}:
            self.hit.add(victim["pid"])
            with contextlib.suppress(ProcessLookupError):  # it has just left
                os.kill(victim["pid"], signal.SIGKILL)

    def kill_coordinator(self):
        kill_coordinator(self.state, self.coordinators)


@pytest.mark.parametrize("seed", schedules(9, landing=2))
def test_deaths_of_all_kinds_in_the_middle_of_resizes_under_the_daemon(tmp_path, gate, seed):
    rng = random.Random(seed)
    servers = rng.choice((0, 3, 4))
    options = (*LONG, *(("--durability", "durable") if servers else ()))
    events, version = [], 0
    for _ in range(rng.randint(1, 3)):
        version += rng.randint(5, 50)
        sizes = rng.randint(2, 4), rng.randint(3, 4) if servers else 0
        events.append((version, "resize", (*sizes, rng.random() < 0.3)))
    # one server: until the next plan is done its blocks have one copy
    kills = ["coordinator"] * rng.randint(1, 3) + ["worker"] * rng.randint(0, 2) + ["ps"] * bool(servers)
    events += [(max(1, rng.choice(events)[0] + rng.randint(-1, 5)), kind, ()) for kind in kills]
    daemon, state = Daemon(), tmp_path / "state"
    try:
        anchor = daemon.launch(
            "anchor", ["--", *command(*options)], DL2_ROLE="coordinator", DL2_DAEMON=daemon.url, DL2_JOB="job-7",
            DL2_CREDENTIAL=daemon.credential, DL2_TOKEN=daemon.token, DL2_STATE=str(state), DL2_HOST="127.0.0.1",
        )  # fmt: skip
        said = []
        reader = threading.Thread(target=lambda: said.extend(anchor.stderr))
        reader.start()
        storm = Storm(daemon, state, 3, servers, options, DL2_ARCHITECTURE="ps" if servers else "allreduce")
        for at, kind, how in sorted(events):
            daemon.wait(lambda beat, at=at: beat["version"] >= at or beat["state"] == "failed")
            if kind == "resize":
                storm.resize(how[0], how[1], oldest=how[2])
            elif kind == "coordinator":
                time.sleep(rng.choice((0.0, 0.1, 0.3, 1.0)) * rng.random())  # a newcomer takes so long to come
                storm.kill_coordinator()
            else:
                storm.kill(kind, rng)
        gate.unlink()
        last = daemon.wait(lambda beat: beat["state"] in ("finished", "failed"), 240)
        code = anchor.wait(60)
        reader.join()
        story = "".join([f"{servers} servers, {sorted(events)}\n", *said])
        assert (last["state"], code) == ("finished", 0), story
        assert last["result"] == {"digest": static_digest(*LONG), "versions": 220}, story
        assert len({beat["incarnation"] for beat in daemon.beats}) == 1
        assert sum("another one takes its place" in line for line in said) == len(storm.coordinators)
    finally:
        daemon.close()


@pytest.mark.slow
def test_a_second_dl2_run_on_a_log_is_refused_and_one_after_the_first_goes_on(tmp_path, gate):
    environ = {"DL2_STATE": str(tmp_path / "state"), "DL2_TOKEN": secrets.token_hex(32)}
    with told(dl2_run(*PACED), **environ) as first:
        first.wait_for("epoch 2 of 10")
        with told(dl2_run(*PACED), **environ) as second:
            assert second.end() == 2
            # whichever it comes to first: somebody listens at the port, or holds the log
            assert any("cannot listen on port" in line or "is in use by process" in line for line in second.lines)
        # without a word to members: another dl2-run may come within the lease
        first.process.kill()
        first.process.wait()
        with told(dl2_run(*PACED), **environ) as third:
            third.wait_for("goes on from its log: plan 1, 4 members, term 2")
            gate.unlink()
            assert third.end() == 0, third.lines
            assert third.finished() == static_digest(*JOB)


@pytest.mark.usefixtures("gate")
def test_without_a_log_members_end_with_their_coordinator():
    with told(dl2_run(*PACED), DL2_STATE="none") as job:
        job.wait_for("epoch 1 of 10")
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        own = Path(f"/proc/{job.process.pid}/cmdline").read_bytes()
        (coordinator,) = [pid for pid, name in names.items() if name == own]
        os.kill(coordinator, signal.SIGKILL)
        assert job.end() == 128 + signal.SIGKILL
        assert sum("the coordinator at" in line and "is gone" in line for line in job.lines) >= 3


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_dl2_run_ends_the_job_when_asked(tmp_path, number):
    with told(dl2_run(*PACED), DL2_STATE=str(tmp_path / "state")) as job:
        job.wait_for("epoch 1 of 10")
        job.process.send_signal(number)
        assert job.end() == 128 + number
        assert any(f"job cancelled: its coordinator got {number.name}" in line for line in job.lines)
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_an_old_coordinator_that_wakes_up_says_nothing_more(tmp_path, gate):
    token, state = secrets.token_hex(32), tmp_path / "state"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def coordinator():
            return subprocess.Popen(
                [sys.executable, "-c", COORDINATOR, token, str(listener.fileno()), str(state)], env=environment(),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, pass_fds=[listener.fileno()],
            )  # fmt: skip

        def task(name, role):
            return subprocess.Popen(
                [sys.executable, "-m", "pslite.run", "--", *command(*PACED)], start_new_session=True,
                env=environment(DL2_ROLE=role, DL2_TASK=name, DL2_COORDINATOR=address, DL2_TOKEN=token, DL2_QUIET="1"),
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
            gate.unlink()
            out, _ = old.communicate(timeout=60)
            assert old.returncode == 1
            assert "another coordinator has taken over" in out
            assert "died" not in out
            lines += [*new.stdout]
            assert new.wait(100) == 0, lines
            (end,) = [line for line in lines if "finished: " in line]
            assert static_digest(*JOB) in end
            assert [process.wait(60) for process in processes[1:4]] == [0, 0, 0]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()
