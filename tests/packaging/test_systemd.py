"""`systemctl start dl2d` on a real systemd."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from systemd_machine import SystemdMachine, why_not

CHECKOUT = Path(__file__).parents[2]
DL2D = Path(sys.executable).parent / "dl2d"
ADDRESS_FILE = "/opt/shared/dl2d/job-api.json"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be booted")]


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdMachine]:
    parts = {CHECKOUT, Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_path("purelib"))}
    with SystemdMachine(*sorted(part for part in parts if part.is_relative_to("/tmp"))) as machine:
        config = machine.root / "etc/dl2d"
        config.mkdir(exist_ok=True)  # the machine that runs the tests may have one, and an old store
        shutil.rmtree(machine.root / "var/lib/dl2d", ignore_errors=True)
        (config / "dl2d.yaml").write_text(
            f"resource_manager: {{name: local}}\napi: {{port: {free_port()}, address_file: {ADDRESS_FILE}}}\n"
            "schedule: {poll_seconds: 1, slot_seconds: 5}\n"
        )
        command = [DL2D, "unit", "--config", config / "dl2d.yaml"]
        unit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        (machine.root / "etc/systemd/system/dl2d.service").write_text(unit.replace(str(machine.root), ""))
        drop_in = machine.root / "etc/systemd/system/dl2d.service.d"
        drop_in.mkdir()
        # The interpreter of the tests may lie in root's home, and a checkout anywhere.
        shown = "\n".join(f"BindReadOnlyPaths={part}" for part in sorted(parts) if part.is_relative_to("/tmp"))
        (drop_in / "tests.conf").write_text(f"[Service]\nProtectHome=read-only\nWatchdogSec=6\nRestartSec=1\n{shown}\n")
        machine.boot()
        yield machine


def main_pid(machine: SystemdMachine) -> int:
    return int(machine.show("dl2d", "MainPID"))


def test_start_blocks_until_the_daemon_is_ready(machine: SystemdMachine) -> None:
    machine.run("systemctl", "start", "dl2d", check=True)
    assert machine.show("dl2d", "ActiveState") == "active"
    assert machine.show("dl2d", "StatusText").startswith("slot")
    state = machine.root / "var/lib/dl2d"
    assert machine.run("stat", "-c", "%a %U", "/var/lib/dl2d").split() == ["750", "root"], state
    assert machine.run("stat", "-c", "%a", "/var/lib/dl2d/secret").strip() == "600"


def test_the_daemon_writes_the_file_by_which_jobs_find_it_and_nothing_beside_its_folder(
    machine: SystemdMachine,
) -> None:
    machine.run("systemctl", "start", "dl2d", check=True)
    assert machine.run("stat", "-c", "%a %U", ADDRESS_FILE).split() == ["644", "root"]
    folders = [str(folder) for folder in Path(ADDRESS_FILE).parents[:2]]
    assert machine.run("stat", "-c", "%a", *folders).split() == ["755", "755"]
    view = f"/proc/{main_pid(machine)}/root"
    assert machine.run("sh", "-c", f"touch {view}/opt/shared/other 2>/dev/null && echo yes || echo no").strip() == "no"


def test_the_daemon_sees_no_more_than_it_needs(machine: SystemdMachine) -> None:
    machine.run("systemctl", "start", "dl2d", check=True)
    status = machine.run("cat", f"/proc/{main_pid(machine)}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


def seen_by_jobs(machine: SystemdMachine) -> dict[str, bool]:
    """Which of these a process of the unit finds, and may write; its view of the file system is that of the daemon."""
    view = f"/proc/{main_pid(machine)}/root"
    tests = {
        "gpu": f"test -e {view}/dev/nvidia0",
        "home": f"touch {view}/home/ann/result",
        "data": f"touch {view}/data/result",
        "tmp": f"test -e {view}/tmp/of-users",
        "programs": f"touch {view}/usr/result",
    }
    return {
        what: machine.run("sh", "-c", f"{test} && echo yes || true").strip() == "yes" for what, test in tests.items()
    }


def test_the_drop_in_for_local_jobs_gives_them_gpus_and_folders(machine: SystemdMachine) -> None:
    machine.run("sh", "-c", "mkdir -p /home/ann /data && touch /dev/nvidia0 /tmp/of-users", check=True)
    machine.run("systemctl", "restart", "dl2d", check=True)
    assert seen_by_jobs(machine) == dict.fromkeys(("gpu", "home", "data", "tmp", "programs"), False)
    text = subprocess.run([DL2D, "unit", "--local-jobs"], capture_output=True, text=True, check=True, timeout=60).stdout
    # After the drop-in of these tests, which shows them the interpreter.
    drop_in = machine.root / "etc/systemd/system/dl2d.service.d/zz-local-jobs.conf"
    drop_in.write_text(text)
    machine.run("systemctl", "daemon-reload", check=True)
    machine.run("systemctl", "restart", "dl2d", check=True)
    try:
        assert seen_by_jobs(machine) == {"gpu": True, "home": True, "data": True, "tmp": True, "programs": False}
    finally:
        drop_in.unlink()
        machine.run("systemctl", "daemon-reload", check=True)


def test_reload_reads_the_configuration_again(machine: SystemdMachine) -> None:
    machine.run("systemctl", "start", "dl2d", check=True)
    before = main_pid(machine)
    config = "/etc/dl2d/dl2d.yaml"
    machine.run("sed", "-i", "$ a policy: {name: fifo}", config, check=True)
    machine.run("systemctl", "reload", "dl2d", check=True)
    machine.wait_until(lambda: '"event": "reloaded"' in machine.journal(), "the reload is logged")
    assert main_pid(machine) == before
    machine.run("sed", "-i", "$ d", config, check=True)


def test_a_daemon_that_dies_or_hangs_is_started_again(machine: SystemdMachine) -> None:
    machine.run("systemctl", "start", "dl2d", check=True)
    for number, what in ((signal.SIGKILL, "dies"), (signal.SIGSTOP, "hangs")):
        before = main_pid(machine)
        machine.signal(before, number)
        machine.wait_until(
            lambda: main_pid(machine) not in (0, before) and machine.show("dl2d", "ActiveState") == "active",  # noqa: B023
            f"a daemon that {what} is started again",
        )


def test_stop_is_clean(machine: SystemdMachine) -> None:
    machine.run("systemctl", "start", "dl2d", check=True)
    machine.run("systemctl", "stop", "dl2d", check=True)
    assert machine.show("dl2d", "Result") == "success"
    assert '"event": "stopped"' in machine.journal()


def test_a_daemon_that_is_not_root_writes_that_file_for_all_in_a_folder_that_root_gives_its_account(
    machine: SystemdMachine,
) -> None:
    """As the guide to Slurm says it for SlurmUser."""
    for path in (CHECKOUT, Path(sys.prefix), Path(sys.executable).resolve()):
        for folder in path.parents[:-1]:  # root's home may be among them
            if not path.is_relative_to("/tmp"):
                (machine.root / folder.relative_to("/")).chmod(0o755)
    folder = str(Path(ADDRESS_FILE).parent)
    machine.run("rm", "-rf", folder, check=True)
    machine.run("install", "-d", "-o", "daemon", folder, check=True)
    (machine.root / "etc/systemd/system/dl2d.service.d/user.conf").write_text("[Service]\nUser=daemon\n")
    machine.run("systemctl", "daemon-reload", check=True)
    machine.run("systemctl", "restart", "dl2d", check=True)
    assert machine.run("stat", "-c", "%a %U", ADDRESS_FILE).split() == ["644", "daemon"]
    code = (
        "import sys; from pslite.launch.daemon_connection import daemon_address_file as file; "
        "file.find_address([file.Path(sys.argv[1])])"
    )
    become = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    machine.run(*become, sys.executable, "-c", code, ADDRESS_FILE, check=True)
