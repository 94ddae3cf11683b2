"""dl2-run around real processes: signals, endings, what it sees of them, and what it does before they begin."""

from __future__ import annotations

import contextlib
import os
import pty
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from pslite_jobs import command, environment, run_job, static_digest

from pslite.coordinator import Coordinator, Settings
from pslite.job.job_status import Cause, Reply
from pslite.job.step_time_and_usage_statistics import Usage
from pslite.launch.task_process import task_agent
from pslite.launch.task_process.exit_status import OomKills, open_tail
from pslite.launch.task_process.task_agent import TaskAgent
from pslite.net.authentication import Identity
from pslite.net.tcp_sockets import listen
from pslite.testing import Resize

TOKEN = secrets.token_hex(32)
DL2_RUN = [sys.executable, "-m", "pslite.run", "--"]
#: of a task whose coordinator nobody is
PLACE = {"DL2_ROLE": "worker", "DL2_TASK": "worker-0", "DL2_COORDINATOR": "127.0.0.1:9", "DL2_TOKEN": TOKEN}
#: says which signals it gets, and ends with status 5 when its input does; one that comes just before it waits is heard
LISTENER = """
import os, select, signal, sys
def heard(number, frame): os.write(1, f"{signal.Signals(number).name}\\n".encode())  # print cannot interrupt a print
there, here = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(here)
for name in sys.argv[1:]: signal.signal(getattr(signal, name), heard)
print("ready", flush=True)
while 0 not in select.select([0, there], [], [])[0]: os.read(there, 100)
sys.exit(5)
"""
ALL = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def start(*arguments):
    """Start dl2-run around a command; nobody listens where its coordinator should be."""
    return subprocess.Popen(
        [*DL2_RUN, *arguments], env=environment(**PLACE), start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def listener():
    with start(sys.executable, "-c", LISTENER, *ALL) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_script_that_ends_at_once_ends_its_job():
    done = subprocess.run(
        [sys.executable, "-m", "pslite.run", "--standalone", "true"], env=environment(), capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "its script ended without joining the job" in done.stderr


def test_a_batch_job_that_a_script_submits_is_a_job_of_its_own():
    """sbatch gives it the environment of the task, with an id of its own."""
    next_job = f"SLURM_JOB_ID=8 exec {' '.join(DL2_RUN[:-1])} --standalone true"
    done = subprocess.run(
        [*DL2_RUN, "sh", "-c", next_job], env=environment(**PLACE, SLURM_JOB_ID="7"), capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "its script ended without joining the job" in done.stderr


def test_signals_are_passed_on(listener):
    for name in ALL:
        listener.send_signal(getattr(signal, name))
        assert listener.stdout.readline() == f"{name}\n"
    listener.stdin.close()
    assert listener.wait(60) == 5


def test_a_second_interrupt_is_the_end(listener):
    listener.send_signal(signal.SIGINT)
    assert listener.stdout.readline() == "SIGINT\n"
    assert listener.poll() is None
    listener.send_signal(signal.SIGINT)
    assert listener.wait(60) == 128 + signal.SIGKILL


def test_a_second_interrupt_ends_children_too():
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGINT, lambda *_: print('heard', flush=True))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {LISTENER!r}, 'SIGINT'], stdin=subprocess.PIPE)\n"
        "child.wait(); child.wait()"
    )
    with start(sys.executable, "-c", script) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "heard\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""  # ends when nobody has it open any more
        assert process.wait(60) == 128 + signal.SIGKILL


def test_an_interrupt_at_a_terminal_comes_once():
    """The terminal gives it to all processes of the foreground, dl2-run and the task."""
    script = LISTENER.replace("[0, there]", "[there]")
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, [*DL2_RUN, sys.executable, "-c", script, "SIGINT"], environment(**PLACE))
    try:
        heard, typed = os.read(terminal, 1000), 0
        while b"ready" not in heard:
            heard += os.read(terminal, 1000)
        with contextlib.suppress(OSError):  # nobody has it open any more
            # the second one is the end, or a later one: what comes before dl2-run had a look at the one before is lost
            while typed < 10_000:
                os.write(terminal, b"\x03")
                typed += 1
                while heard.count(b"SIGINT") < typed:
                    heard += os.read(terminal, 1000)
        assert 2 <= typed < 10_000
        _, status = os.waitpid(pid, 0)
        # once for each that was typed, if the task was quick enough to say so before the last one killed it
        assert 1 <= heard.count(b"SIGINT") <= typed
        assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGKILL
    finally:
        os.close(terminal)


def test_signals_that_are_ignored_stay_so():
    nohup = "trap '' HUP; exec \"$@\""
    ask = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True)"
    done = subprocess.run(
        ["sh", "-c", nohup, "sh", *DL2_RUN, sys.executable, "-c", ask],
        env=environment(**PLACE), capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"


def test_a_signal_before_the_task_begins_is_passed_on_to_it():
    """Here it comes while kills are counted: after the handlers are there, before the process is."""
    sent = []

    def count_kills():
        if not sent:
            sent.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return OomKills(0, 0)

    identity = Identity("worker", "worker-0", "i", b"t" * 32)
    command = ["sleep", "600"]
    for environ, status in ((os.environ, 128 + signal.SIGTERM), ({**os.environ, "DL2_STOPPED_STATUS": "0"}, 0)):
        sent.clear()
        agent = TaskAgent(identity, "127.0.0.1:1", command, environ, say=lambda _: None, count_kills=count_kills)
        assert agent.run() == status


def test_a_task_that_fails_by_itself_has_its_own_status():
    identity, environ = Identity("worker", "worker-0", "i", b"t" * 32), {**os.environ, "DL2_STOPPED_STATUS": "0"}
    agent = TaskAgent(identity, "127.0.0.1:1", ["sh", "-c", "exit 3"], environ, say=lambda _: None)
    assert agent.run() == 3


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- what the coordinator hears ---------------------------------------------------------------------------------------


class Listening:
    """A coordinator's director that wants one worker, and keeps what it is told."""

    def __init__(self):
        self.status = None
        self.stop = False
        self.address = ""
        self.started = threading.Event()

    def start(self, address, token, wake):
        self.address = address
        self.started.set()

    def exchange(self, status, *, urgent):
        self.status = status
        return Reply(stop=self.stop)

    def close(self, status):
        self.status = status


def reason_of(*task, **options):
    """Return why a job failed whose only worker was that command, the exit status of dl2-run, and what it said."""
    token, director, lines, said = bytes.fromhex(TOKEN), Listening(), [], []
    coordinator = Coordinator(
        job="j", token=token, director=director, say=lines.append, settings=Settings(start=60.0), host="127.0.0.1"
    )
    thread = threading.Thread(target=coordinator.run)
    thread.start()
    director.started.wait(60)
    identity = Identity("worker", "worker-0", "i", token)
    options = {"open_log": lambda: None, **options}
    agent = TaskAgent(identity, director.address, task, os.environ, say=said.append, **options)
    status = agent.run()
    thread.join(60)
    return director.status.reason, status, said


@pytest.mark.parametrize(
    ("script", "how", "status"),
    [
        ("import os; os.kill(os.getpid(), 11)", "died: killed by signal 11 (SIGSEGV) before it joined", 139),
        ("import os; os.abort()", "died: killed by signal 6 (SIGABRT) before it joined", 134),
        ("raise SystemExit(3)", "died: its process ended with status 3 before it joined", 3),
        (
            "pass",
            "(does it use ElasticJob, or with MXNet a kvstore of type dist_sync?)",
            0,
        ),
    ],
)
def test_the_coordinator_hears_how_a_process_ended(script, how, status):
    reason, code, said = reason_of(sys.executable, "-c", script)
    assert reason.startswith("worker-0 (pid ")
    assert reason.endswith(how)
    assert code == status
    assert any(line.startswith("worker-0 has used ") for line in said)


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit('lost\x1b[31m words')", "lost\\x1b[31m words"),
        ("import sys; sys.stderr.write('x\\n' * 100_000 + 'y' * 5000 + '\\n'); sys.exit('end')", "end"),
    ],
)
def test_the_coordinator_hears_what_a_process_wrote_last(script, last, tmp_path):
    log = tmp_path / "dl2-7-worker-0.out"
    log.write_text("lines of an earlier task\n")
    before = os.dup(2)
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
        try:
            reason, _, _ = reason_of(sys.executable, "-c", script, open_log=open_tail)
        finally:
            os.dup2(before, 2)
            os.close(before)
    first, *lines = reason.split("\n")
    assert f"before it joined; the end of {log} on {socket.gethostname()}:" in first
    assert lines[-1] == last
    assert len(lines) <= 12
    assert len(reason) < 2500
    assert "earlier" not in reason


def test_the_coordinator_hears_of_a_program_that_cannot_be_started():
    reason, code, _ = reason_of("/no/such/program")
    assert reason == (
        "worker-0 (pid 0) died: cannot start '/no/such/program': No such file or directory, before it joined"
    )
    assert code == 127


def test_the_coordinator_hears_of_a_task_that_could_not_reach_it_at_first(monkeypatch, tmp_path):
    monkeypatch.setattr(task_agent, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(task_agent, "_REFUSED_SECONDS", 0.1)
    os.mkfifo(gate := tmp_path / "gate")
    listener, said, director = listen("127.0.0.1"), [], Listening()
    host, port = listener.getsockname()
    listener.close()
    identity = Identity("worker", "worker-0", "i", bytes.fromhex(TOKEN))
    script = f"open({str(gate)!r}).read()"
    agent = TaskAgent(identity, f"{host}:{port}", [sys.executable, "-c", script], os.environ, say=said.append)
    heard = []

    def coordinate():
        wait_for(lambda: any("cannot report to the coordinator" in line for line in said))
        coordinator = Coordinator(
            job="j", token=identity.token, director=director, say=lambda _: None, settings=Settings(start=60.0),
            host=host, listener=socket.create_server((host, port)),
        )  # fmt: skip
        thread = threading.Thread(target=coordinator.run)
        thread.start()
        wait_for(lambda: director.status is not None and director.status.starting == ["worker-0"])
        heard.extend(director.status.starting)
        director.stop = True
        gate.write_text("go")
        thread.join(60)

    other = threading.Thread(target=coordinate)
    other.start()
    agent.run()
    other.join(60)
    assert heard == ["worker-0"]


def test_the_coordinator_hears_of_a_lack_of_memory():
    counts = iter([OomKills(0, 0), OomKills(1, 1)])
    killed = "import os; os.kill(os.getpid(), 9)"
    reason, code, _ = reason_of(sys.executable, "-c", killed, count_kills=lambda: next(counts))
    assert reason.endswith("died: killed by signal 9 (SIGKILL): out of memory in its control group, before it joined")
    assert code == 137


def test_a_coordinator_in_the_place_of_another_hears_it_too(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    listener, token = listen("127.0.0.1"), bytes.fromhex(TOKEN)
    address = "{}:{}".format(*listener.getsockname())
    script = f"open({str(gate)!r}).read(); raise SystemExit(3)"
    identity, said = Identity("worker", "worker-0", "i", token), []
    agent = TaskAgent(
        identity, address, [sys.executable, "-c", script], os.environ, say=said.append, watch_seconds=0.1,
        open_log=lambda: None,
    )  # fmt: skip
    first, second = Listening(), Listening()
    runs = []
    for director in (first, second):
        coordinator = Coordinator(
            job="j", token=token, director=director, say=lambda _: None, settings=Settings(start=60.0),
            host="127.0.0.1", listener=listener.dup(),
        )  # fmt: skip
        runs.append((coordinator, threading.Thread(target=coordinator.run)))

    def change():
        """One coordinator is there until it knows the task's dl2-run; then the other one, until it does."""
        (one, thread), (other, other_thread) = runs
        thread.start()
        wait_for(lambda: "worker-0" in one._agents)
        first.stop = True
        thread.join(60)
        other_thread.start()
        wait_for(lambda: "worker-0" in other._agents)
        gate.write_text("go on")

    changing = threading.Thread(target=change)
    changing.start()
    assert agent.run() == 3
    changing.join(60)
    runs[1][1].join(60)
    listener.close()
    assert second.status.reason.endswith("died: its process ended with status 3 before it joined"), said


def test_what_tasks_use_and_how_they_end_is_in_the_jobs_status():
    """It is resized when all has been seen of the worker that leaves."""
    seen, ends, steps = {}, {}, {}

    def look(status, director):
        for member in status.members:
            if member.usage is not None and member.usage.memory_bytes:
                seen.setdefault(member.task, []).append(member)
            if member.cause is not None:
                ends[member.task] = member
            if member.steps is not None:
                steps[member.task] = member.steps
        if len(seen) == 3 and len(steps) == 2:
            director.resize(Resize(0, 1, 1))
        return "worker-1" not in ends

    options = ("--epochs", "40", "--step-seconds", "0.005")
    environ = {**os.environ, "DL2_WATCH_SECONDS": "0.1"}
    result = run_job(
        command(*options), workers=2, servers=1, environ=environ, on_status=look,
        settings=Settings(grace=60.0, start=60.0, heartbeat=0.2, balance="even"),
    )  # fmt: skip
    assert result.digest == static_digest(*options)
    assert seen.keys() == {"worker-0", "worker-1", "ps-0"}
    usage = seen["worker-0"][-1].usage
    assert isinstance(usage, Usage)
    assert usage.memory_bytes > 10 << 20  # an interpreter with numpy
    assert usage.memory_peak >= usage.memory_bytes
    assert usage.cpu_seconds > 0
    assert steps.keys() == {"worker-0", "worker-1"}
    assert steps["worker-0"].p95_ms >= 5.0  # it sleeps for so long in each step
    assert ends["worker-1"].cause is Cause.DRAINED
    assert ends["worker-1"].how == ""


def test_what_a_command_does_before_the_script_comes_before_the_worker_joins(tmp_path):
    (tmp_path / "data").write_bytes(b"x" * 5000)
    script = f"cat {tmp_path}/data > /dev/null && echo data is read >&2 && exec {shlex.join(command('--epochs', '2'))}"
    done = subprocess.run(
        [*DL2_RUN, "sh", "-c", script], env=environment(), capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    words = done.stderr.splitlines()
    read = next(i for i, line in enumerate(words) if "data is read" in line)
    joined = next(i for i, line in enumerate(words) if "worker-0 on" in line and "has joined" in line)
    assert read < joined
    assert words.count("data is read") == 1  # servers do not run the command


# --- a whole job on this machine --------------------------------------------------------------------------------------


def test_signals_to_a_job_on_this_machine(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(LISTENER.replace("[0, there]", "[there]"))
    with subprocess.Popen(
        [*DL2_RUN, sys.executable, str(script), "SIGUSR1", "SIGINT"],
        env=environment(), start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "SIGUSR1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert process.stdout.read() == ""  # ends when no task is left
        assert "job cancelled: its coordinator got SIGTERM" in process.stderr.read()
