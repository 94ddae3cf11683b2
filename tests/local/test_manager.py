"""What the local manager does beyond the contract that all managers share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from msgspec import structs
from rm_harness import MARK, LocalHarness
from structlog.testing import capture_logs

from dl2d.core.cluster import NodeState
from dl2d.core.errors import AlreadyRunning, ConfigError, Denied, Rejected, Unavailable
from dl2d.core.jobs import JobKey, Launch, Role
from dl2d.core.resource_manager import RmJob, RmJobState, TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.local import task_supervisor
from dl2d.local.manager import create

FOREVER = "echo $$ >started; while :; do sleep 0.1; done"


def record_path(local: LocalHarness, handle: str) -> Path:
    return local.state_dir / "tasks" / f"{handle}.json"


def fake_record(local: LocalHarness, **changed: object) -> str:
    """Write a record of a running task of our own making, and return its handle."""
    handle = os.urandom(16).hex()
    record = {
        "handle": handle, "tag": f"dl2:{local.job.slug}:worker-77", "job": local.job.slug, "role": "worker",
        "name": "worker-77", "node": "node-1", "user": local.owner.user, "demand": {"cpu": 2000},
        "submitted": time.time(), "boot": task_supervisor.boot_id(), "begun": time.monotonic(),
        "keeper": None, "leader": None, "ended": None, **changed,
    }  # fmt: skip
    record_path(local, handle).write_text(json.dumps(record))
    return handle


@pytest.fixture
def bystander() -> subprocess.Popen[bytes]:
    """A process that is none of the manager's business and must live."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    try:
        assert process.poll() is None, "the manager ended a process that it did not start"
    finally:
        process.kill()
        process.wait()


# Who is who


@pytest.mark.parametrize("grace", [0, 0.2])
def test_a_process_that_got_the_number_of_a_supervisor_is_left_alone(
    local: LocalHarness, bystander: subprocess.Popen[bytes], grace: float
) -> None:
    ticks = task_supervisor.start_ticks(bystander.pid)
    assert ticks is not None
    other = {"pid": bystander.pid, "ticks": ticks - 1}
    handle = fake_record(local, keeper=other, leader=other)
    local.stop(handle, grace=grace)
    job = local.job_of(handle)
    assert job.state is RmJobState.LOST
    assert str(bystander.pid) in job.reason
    assert local.node().used == NO_RESOURCES
    local.stop(handle, grace=grace)


def test_records_of_an_earlier_boot_are_lost_and_nobody_is_signalled(
    local: LocalHarness, bystander: subprocess.Popen[bytes]
) -> None:
    same = {"pid": bystander.pid, "ticks": task_supervisor.start_ticks(bystander.pid)}
    handle = fake_record(local, boot="another", keeper=same, leader=same)
    local.stop(handle, grace=0)
    job = local.job_of(handle)
    assert (job.state, job.reason) == (RmJobState.LOST, "the machine was restarted")


def test_a_supervisor_that_was_killed_takes_its_task_along(
    local: LocalHarness, bystander: subprocess.Popen[bytes]
) -> None:
    handle = local.manager.submit(local.spec(f"setsid sh -c 'sleep 600 & wait' & {FOREVER}"))
    local.wait_for_file("started")
    local.wait_until(lambda: len(local.processes()) >= 4, "all processes of the task")
    (keeping,) = local.supervisors()
    keeping.kill()
    job = local.wait_for_end(handle)
    assert job.state is RmJobState.LOST
    assert f"supervisor (process {keeping.pid}) vanished" in job.reason
    assert local.processes() == []


def test_a_supervisor_told_to_end_ends_its_task_in_order(local: LocalHarness) -> None:
    handle = local.manager.submit(local.spec(f"trap 'echo saved >saved; exit 0' TERM; {FOREVER}"))
    local.wait_for_file("started")
    local.supervisors()[0].terminate()
    job = local.wait_for_end(handle)
    assert (job.state, job.reason) == (RmJobState.CANCELLED, "its supervisor was told to end: exit status 0")
    assert local.wait_for_file("saved") == "saved\n"


def test_a_record_without_a_supervisor_is_pending_and_then_never_started(local: LocalHarness) -> None:
    young, old = fake_record(local), fake_record(local, begun=time.monotonic() - 31)
    assert local.job_of(young).state is RmJobState.PENDING
    assert local.node().used.get("cpu") == 2
    job = local.job_of(old)
    assert job.state is RmJobState.FAILED
    assert "never started" in job.reason
    record_path(local, young).unlink()


# Records


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"handle": 3}', b" " * 100_000, "other handle", "negative", "unknown field"],
    ids=str,
)
def test_a_damaged_record_is_reported_and_kept_and_spoils_nothing(local: LocalHarness, damage: bytes | str) -> None:
    good = local.manager.submit(local.spec("exit 0"))
    local.wait_for_end(good)
    changed: dict[str, object] = {}
    if damage == "negative":
        changed = {"demand": {"cpu": -2000}}
    elif damage == "unknown field":
        changed = {"more": 1}
    bad = fake_record(local, **changed)
    path = record_path(local, bad)
    if damage == "other handle":
        path.write_bytes(record_path(local, good).read_bytes())
    elif isinstance(damage, bytes):
        path.write_bytes(damage)
    with capture_logs() as logs:
        local.restart()
        for _ in range(3):
            listing = local.manager.listing()
            assert [job.handle for job in listing.jobs] == [good]
            assert [str(path) in reason for reason in listing.incomplete] == [True]
        local.stop(bad, grace=0)
    reports = [entry for entry in logs if entry.get("path") == str(path)]
    assert [entry["log_level"] for entry in reports] == ["warning"]
    assert path.exists()
    assert local.node().used == NO_RESOURCES


def test_a_handle_cannot_name_a_file_elsewhere(local: LocalHarness) -> None:
    outside = local.state_dir / "outside.json"
    outside.write_text("{}")
    local.stop("../outside", "", "/", "x" * 5000, grace=0)
    assert sorted(path.name for path in local.state_dir.iterdir()) == ["lock", "output", "outside.json", "tasks"]
    assert list((local.state_dir / "tasks").iterdir()) == []


def test_ended_tasks_are_listed_for_ten_minutes_and_then_forgotten(local: LocalHarness) -> None:
    handle = local.manager.submit(local.spec("sleep 600"))
    local.stop(handle, grace=0)
    local.wait_for_end(handle)
    local.ahead = 590
    assert local.job_of(handle).state is RmJobState.CANCELLED
    local.ahead = 610
    assert local.manager.listing().jobs == ()
    assert list((local.state_dir / "tasks").iterdir()) == []


def test_how_a_task_ended_is_listed_after_the_daemon_was_away_and_the_clock_was_set(local: LocalHarness) -> None:
    """Else a job that finished meanwhile is not listed any more, and counts as lost."""
    handle = local.manager.submit(local.spec("exit 0"))
    local.wait_until(lambda: not local.supervisors(), "it ends")
    local.ahead = 3600.0
    local.restart()
    assert local.job_of(handle).state is RmJobState.DONE
    local.set_forward = 86_400.0
    assert local.job_of(handle).state is RmJobState.DONE
    local.ahead += 610.0
    assert local.manager.listing().jobs == ()


def test_an_anchor_is_not_started_while_a_record_cannot_be_read_since_it_may_run(local: LocalHarness) -> None:
    anchor = local.spec(FOREVER, role=Role.COORDINATOR, demand=NO_RESOURCES)
    handle = local.manager.submit(anchor)
    record = local.state_dir / "tasks" / f"{handle}.json"
    whole = record.read_bytes()
    record.write_bytes(whole[:40])
    with pytest.raises(Unavailable, match=r"perhaps it runs already.*remove it once its task has ended"):
        local.manager.submit(anchor)
    record.write_bytes(whole)
    assert local.manager.submit(anchor) == handle


def test_a_task_outlives_any_age_while_it_runs(local: LocalHarness) -> None:
    handle = local.manager.submit(local.spec(FOREVER))
    local.ahead = 10_000_000
    assert local.wait_for(handle, RmJobState.RUNNING)


def test_a_task_on_a_node_that_left_the_config_is_still_counted(local: LocalHarness, tmp_path: Path) -> None:
    handle = local.manager.submit(local.spec(FOREVER, node="node-2"))
    local.manager.close()
    fewer = {"state_dir": str(local.state_dir), "nodes": [{"name": "node-1", "resources": {"cpu": 8}}]}
    local.manager = create(fewer, clock=time.time)
    node = local.node("node-2")
    assert node.state is NodeState.DRAINING
    assert node.used == node.capacity == Resources.of(cpu=1)
    with pytest.raises(Rejected, match="node-2 takes no tasks"):
        local.manager.submit(local.spec("exit 0", node="node-2", demand=NO_RESOURCES))
    local.stop(handle, grace=0)
    local.wait_for_end(handle)
    assert [node.name for node in local.manager.listing().nodes] == ["node-1"]


# Starting


def test_a_task_leads_its_own_session_and_has_only_standard_files_open(local: LocalHarness) -> None:
    report = (
        "import os, json; fds = sorted(int(n) for n in os.listdir('/proc/self/fd'))[:4]\n"
        "print(json.dumps([os.getpid() == os.getsid(0) == os.getpgid(0), [n for n in fds if n < 3],\n"
        "  os.readlink('/proc/self/fd/0'), [l for l in open('/proc/self/status') if l[:6] in ('SigBlk', 'SigIgn')],\n"
        "  os.environ['DL2_NODE'], len(fds)]))"
    )
    task = local.spec("")
    task = structs.replace(task, launch=Launch(("/usr/bin/env", sys.executable, "-I", "-S", "-c", report), "/"))
    handle = local.manager.submit(task)
    assert local.wait_for_end(handle).state is RmJobState.DONE
    output = local.state_dir / "output" / local.job.slug / f"{task.name}.log"
    leads, standard, stdin, masks, node, count = json.loads(output.read_text())
    assert leads
    assert standard == [0, 1, 2]
    assert count == 4  # the fourth is the folder being listed
    assert stdin == "/dev/null"
    assert node == "node-1"
    blocked, ignored = (int(line.split()[1], 16) for line in sorted(masks))
    assert blocked == 0
    # Python itself ignores SIGPIPE and SIGXFSZ; the C library keeps signals 32 and 33 for itself.
    assert ignored & ~(1 << 12 | 1 << 24 | 1 << 31 | 1 << 32) == 0


def start_with_gpus(local: LocalHarness, gpu: float, node: str = "node-1") -> tuple[str, str]:
    """Start a task that asks for so many GPUs; its handle, and what it sees."""
    task = local.spec(
        f'echo "$CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES" >gpus; mv gpus seen; {FOREVER}',
        demand=Resources.of(cpu=1, gpu=gpu), node=node, env={"CUDA_VISIBLE_DEVICES": "9"},
    )  # fmt: skip
    handle = local.manager.submit(task)
    seen = local.wait_for_file("seen").strip()
    (local.cwd / "seen").unlink()
    return handle, seen


def test_a_task_sees_the_gpus_that_it_is_given_and_no_two_the_same(
    local: LocalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,MIG-7,3")
    local.restart()
    first, seen = start_with_gpus(local, 1)
    assert seen == "PCI_BUS_ID 2"
    assert start_with_gpus(local, 0)[1] == "PCI_BUS_ID"
    assert start_with_gpus(local, 0.5, "node-2")[1] == "PCI_BUS_ID 5"
    local.restart()
    assert start_with_gpus(local, 1)[1] == "PCI_BUS_ID MIG-7"
    assert start_with_gpus(local, 1.5, "node-2")[1] == "PCI_BUS_ID 3,5"
    local.stop(first, grace=0)
    local.wait_for_end(first)
    assert start_with_gpus(local, 1)[1] == "PCI_BUS_ID 2"


@pytest.mark.parametrize(
    ("listed", "seen"),
    [("", ["9", "9"]), ("4", ["PCI_BUS_ID 4", "PCI_BUS_ID 4"])],
    ids=["the machine has none", "more are declared than there are"],
)
def test_tasks_share_what_there_is_where_nodes_are_declared_with_more_gpus(
    local: LocalHarness, monkeypatch: pytest.MonkeyPatch, listed: str, seen: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    local.restart()
    assert [start_with_gpus(local, 1)[1] for _ in seen] == seen


def test_output_goes_to_a_private_file_and_is_added_to(local: LocalHarness) -> None:
    task = local.spec("echo out; echo err >&2")
    for _ in range(2):
        local.wait_for_end(local.manager.submit(task))
    output = local.state_dir / "output" / local.job.slug / f"{task.name}.log"
    assert output.read_text() == "out\nerr\nout\nerr\n"
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    for path in (output.parent, output.parent.parent, local.state_dir):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_secrets_of_the_environment_are_in_no_file_and_no_argument(local: LocalHarness) -> None:
    secret = os.urandom(16).hex()
    local.manager.submit(local.spec(FOREVER, env={"DL2_TOKEN": secret}))
    local.wait_for_file("started")
    for process in (*local.processes(), *local.supervisors()):
        with contextlib.suppress(psutil.NoSuchProcess):  # a command of the task's script that is over
            assert secret not in " ".join(process.cmdline())
    for path in local.state_dir.rglob("*"):
        assert not path.is_file() or secret not in path.read_text()
    assert secret not in str(local.supervisors()[0].environ())


def change(task: TaskSpec, **launch: object) -> TaskSpec:
    return structs.replace(task, launch=structs.replace(task.launch, **launch))


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"argv": ()}, "the command is empty"),
        ({"argv": ("",)}, "the command is empty"),
        ({"argv": ("no-such-program",)}, r"program 'no-such-program' is not in the task's PATH \(/usr/bin:/bin\)"),
        ({"argv": ("./missing",)}, "missing: No such file or directory"),
        ({"argv": ("/",)}, "/: Permission denied"),
        ({"argv": ("/etc/passwd",)}, "/etc/passwd: Permission denied"),
        ({"argv": ("sh", "-c", "a\0b")}, "null byte"),
        ({"cwd": "/no/such/folder"}, "/no/such/folder: No such file or directory"),
        ({"cwd": "relative"}, "'relative' is not an absolute path"),
        ({"env": (("A=B", "c"),)}, "illegal environment variable name"),
        ({"env": (("", "c"),)}, "illegal environment variable name"),
    ],
)
def test_what_cannot_be_started_is_refused(local: LocalHarness, launch: dict[str, object], message: str) -> None:
    with pytest.raises(Rejected, match=message):
        local.manager.submit(change(local.spec("exit 0"), **launch))
    assert local.manager.listing().jobs == ()
    assert list((local.state_dir / "tasks").iterdir()) == []


def test_a_program_that_the_kernel_refuses_is_refused(local: LocalHarness) -> None:
    program = local.cwd / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(Rejected, match="No such file or directory"):
        local.manager.submit(change(local.spec(""), argv=("./broken",)))
    program.write_text("neither script nor program\n")
    with pytest.raises(Rejected, match="Exec format error"):
        local.manager.submit(change(local.spec(""), argv=("./broken",)))
    assert local.manager.listing().jobs == ()


def test_a_program_is_found_beside_its_folder_and_keeps_its_name(local: LocalHarness) -> None:
    program = local.cwd / "mine"
    program.write_text("#!/bin/sh\necho $0 >name\n")
    program.chmod(0o755)
    local.manager.submit(change(local.spec(""), argv=("./mine",)))
    assert local.wait_for_file("name").endswith("mine\n")


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "-x y"])
def test_a_name_that_would_leave_the_output_folder_is_refused(local: LocalHarness, name: str) -> None:
    with pytest.raises(Rejected, match="cannot be a task's name"):
        local.manager.submit(structs.replace(local.spec("exit 0"), name=name))
    with pytest.raises(Rejected, match="bad job key"):
        local.manager.submit(structs.replace(local.spec("exit 0"), job=JobKey("../..", "1", 5)))


def test_tasks_of_another_user_are_denied(local: LocalHarness) -> None:
    other = dataclasses.replace(local.owner, user="other", uid=os.getuid() + 1)
    with pytest.raises(Denied, match="as its own user"):
        local.manager.submit(structs.replace(local.spec("exit 0"), owner=other))


def test_a_full_node_refuses_and_says_what_is_missing(local: LocalHarness) -> None:
    local.manager.submit(local.spec(FOREVER, demand=Resources.of(cpu=6, gpu=2)))
    with pytest.raises(Rejected, match=r"no room now: cpu: wanted 3, had 2; gpu: wanted 0\.5, had 0"):
        local.manager.submit(local.spec("exit 0", demand=Resources.of(cpu=3, gpu=0.5)))
    with pytest.raises(Rejected, match=r"too small: memory: wanted 1, had 0"):
        local.manager.submit(local.spec("exit 0", demand=Resources.of(memory=1)))


def test_without_a_node_the_first_with_room_is_taken(local: LocalHarness) -> None:
    demand = Resources.of(cpu=5)
    handles = [local.manager.submit(local.spec(FOREVER, demand=demand, node="")) for _ in range(2)]
    assert [local.job_of(handle).node for handle in handles] == ["node-1", "node-2"]
    with pytest.raises(Rejected, match="no node has room for cpu=5"):
        local.manager.submit(local.spec(FOREVER, demand=demand, node=""))


def test_a_state_folder_that_cannot_be_written_starts_nothing(local: LocalHarness) -> None:
    tasks = local.state_dir / "tasks"
    tasks.rename(local.state_dir / "away")
    try:
        with pytest.raises(Unavailable, match="tasks"):
            local.manager.submit(local.spec("touch ran"))
        with pytest.raises(Unavailable, match="tasks"):
            local.manager.listing()
    finally:
        (local.state_dir / "away").rename(tasks)
    assert local.manager.listing().jobs == ()
    assert not (local.cwd / "ran").exists()


# The folder


def test_a_second_manager_on_the_folder_is_refused(local: LocalHarness) -> None:
    with pytest.raises(AlreadyRunning, match=rf"process {os.getpid()}.*state_dir"):
        local.open()
    local.manager.close()
    local.manager.close()  # twice is once
    local.manager = local.open()


def test_running_tasks_do_not_hold_the_folder(local: LocalHarness) -> None:
    local.manager.submit(local.spec(FOREVER))
    local.wait_for_file("started")
    local.restart()
    assert len(local.manager.listing().jobs) == 1


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"resource_manager\.local\.state_dir: .*mode 0777"):
        create({"state_dir": str(folder)}, clock=time.time)


# A daemon that dies

DAEMON = """
import json, sys, time
from dl2d.core.jobs import JobKey, Launch, Owner, Role
from dl2d.core.resource_manager import TaskSpec
from dl2d.core.resources import Resources
from dl2d.local.manager import create

given = json.loads(sys.stdin.readline())
manager = create(given["settings"], clock=time.time)
job = JobKey(*given["job"])
for name, script in given["tasks"]:
    manager.submit(TaskSpec(
        tag=f"dl2:{job.slug}:{name}", job=job, role=Role.WORKER, name=name, demand=Resources.of(cpu=2), node="node-1",
        owner=Owner(*given["owner"]), launch=Launch(("sh", "-c", script), given["cwd"], tuple(given["env"].items())),
    ))
stopped = [job.identity for job in manager.listing().jobs if job.tag.endswith("deaf")]
manager.stop(stopped, 1.0)
print("ready", flush=True)
time.sleep(600)
"""


def test_everything_is_found_again_after_kill_9_of_the_daemon(local: LocalHarness, tmp_path: Path) -> None:
    local.manager.close()
    given = {
        "settings": local.settings(),
        "job": list(local.job),
        "owner": [local.owner.user, local.owner.uid, local.owner.gid],
        "cwd": str(local.cwd),
        "env": {MARK: local.mark, "PATH": "/usr/bin:/bin"},
        "tasks": [
            ("runs", "echo $$ >started; while :; do sleep 0.1; done"),
            ("ends", "while [ ! -e go ]; do sleep 0.05; done; exit 7"),
            ("deaf", "trap '' TERM; while :; do sleep 0.1; done"),
        ],
    }
    with subprocess.Popen([sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        try:
            daemon.stdin.write(json.dumps(given).encode() + b"\n")
            daemon.stdin.flush()
            assert b"ready\n" in iter(daemon.stdout.readline, b"")  # after lines of its log
            with pytest.raises(AlreadyRunning, match=str(daemon.pid)):
                local.open()
        finally:
            daemon.kill()
    local.wait_for_file("started")
    (local.cwd / "go").touch()
    # Nobody is there now; the end of one task and the deadline of another come all the same.
    deadline = time.monotonic() + local.patience
    while len(local.supervisors()) > 1:
        assert time.monotonic() < deadline
    local.manager = local.open()
    jobs = {job.tag.rpartition(":")[2]: job for job in local.manager.listing().jobs}
    assert jobs["runs"].state is RmJobState.RUNNING
    assert (jobs["ends"].state, jobs["ends"].reason) == (RmJobState.FAILED, "exit status 7")
    assert jobs["deaf"].state is RmJobState.CANCELLED
    assert "killed" in jobs["deaf"].reason
    assert local.node().used == Resources.of(cpu=2)


def test_a_daemon_killed_at_any_moment_of_a_start_loses_and_doubles_nothing(local: LocalHarness) -> None:
    """Whatever runs is in a record, and whatever is in a record either runs or comes to an end."""
    local.manager.close()
    given = {
        "settings": local.settings(),
        "job": list(local.job),
        "owner": [local.owner.user, local.owner.uid, local.owner.gid],
        "cwd": str(local.cwd),
        "env": {MARK: local.mark, "PATH": "/usr/bin:/bin"},
        "tasks": [(f"t-{number}", f"echo >>ran-{number}; exec sleep 600") for number in range(4)],
    }
    records = local.state_dir / "tasks"
    for wanted in range(1, 4):  # killed as soon as its first, second, third record shows
        with subprocess.Popen([sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
            assert daemon.stdin is not None
            try:
                before = len(list(records.glob("*.json")))
                daemon.stdin.write(json.dumps(given).encode() + b"\n")
                daemon.stdin.flush()
                deadline = time.monotonic() + local.patience
                while len(list(records.glob("*.json"))) < before + wanted:
                    assert time.monotonic() < deadline
            finally:
                daemon.kill()
        local.manager = local.open()
        # One supervisor and one program each, as soon as the last has run its exec: also of a child of the daemon that
        # had not become a supervisor yet when the daemon was killed.
        local.wait_until(
            lambda: settled(local) and has_programs(local, len(running_jobs(local))), "an answer for each record"
        )
        running = running_jobs(local)
        local.manager.stop([job.identity for job in running], 0)
        for job in running:
            local.wait_for_end(job.handle)
        local.wait_until_quiet()
        for path in records.glob("*.json"):
            # What was never started has no supervisor: past its time it is an end too, without waiting for it here.
            record = json.loads(path.read_text())
            if record["ended"] is None:
                assert record["keeper"] is None
                path.unlink()
        local.manager.close()
    local.manager = local.open()


def settled(local: LocalHarness) -> bool:
    """Whether no supervisor is still on its way to let its task go."""
    pending = {job.tag for job in local.manager.listing().jobs if job.state is RmJobState.PENDING}
    living = set()
    for process in local.supervisors():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
            living.update(process.cmdline()[-1:])  # none of one that has ended and was not waited for
    return not pending & living


def running_jobs(local: LocalHarness) -> list[RmJob]:
    return [job for job in local.manager.listing().jobs if job.state is RmJobState.RUNNING]


def has_programs(local: LocalHarness, count: int) -> bool:
    """Whether there are so many supervisors, each with one program."""
    return len(local.supervisors()) == len(mains(local)) == count


def mains(local: LocalHarness) -> list[int]:
    """Processes of tasks that are children of supervisors."""
    supervisors = {process.pid for process in local.supervisors()}
    return [process.pid for process in local.processes() if process.ppid() in supervisors]


# The supervisor


def test_a_supervisor_is_light() -> None:
    """It stays beside every task: nothing but a handful of the standard library's modules may be loaded."""
    code = (
        "import sys; exec(open(sys.argv[1]).read(), {'__name__': 'supervisor'}); print([m for m in ('dl2d', 'psutil', "
        "'torch', 'numpy', 'msgspec', 'structlog', 'pathlib', 'subprocess', 'typing') if m in sys.modules])"
    )
    command = [sys.executable, "-I", "-S", "-c", code, task_supervisor.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_start_ticks_tell_processes_apart() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            ticks = task_supervisor.start_ticks(child.pid)
            boot = psutil.boot_time()
            assert ticks is not None
            assert abs(boot + ticks / os.sysconf("SC_CLK_TCK") - psutil.Process(child.pid).create_time()) < 1
            assert child.pid in task_supervisor.descendants(os.getpid())
        finally:
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert task_supervisor.start_ticks(child.pid) is None
        assert task_supervisor.start_ticks(child.pid, dead=True) == ticks
    assert task_supervisor.start_ticks(child.pid, dead=True) is None
