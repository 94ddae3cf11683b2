"""The Debian package on a real systemd: installed, upgraded under running jobs, removed and purged."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import debian_package
import pytest
import systemd_machine
from systemd_machine import SystemdMachine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(debian_package.why_not()), reason=debian_package.why_not() or "it can be built"),
]
needs_systemd = pytest.mark.skipif(
    bool(systemd_machine.why_not()), reason=systemd_machine.why_not() or "it can be booted"
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return debian_package.build(tmp_path_factory.mktemp("deb"))


def test_what_is_inside(package: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "--raw-extract", package, tmp_path], check=True, timeout=300)
    assert (tmp_path / "DEBIAN" / "conffiles").read_text() == "/etc/dl2d/dl2d.yaml\n"
    unit = (tmp_path / "lib/systemd/system/dl2d.service").read_text()
    assert "ExecStart=/opt/dl2d/bin/dl2d run --config /etc/dl2d/dl2d.yaml\n" in unit
    assert "ReadWritePaths=-/opt/dl2d/etc/dl2d\n" in unit
    site = next((tmp_path / "opt/dl2d/lib").glob("python3*/site-packages"))
    assert {"dl2d", "dl2d_slurm", "dl2d_yarn", "pslite"} <= {path.name for path in site.iterdir()}
    assert not (site / "torch").exists()
    share = tmp_path / "opt/dl2d/share/dl2d"
    assert next(share.glob("dl2d-*.whl"))
    assert {"train_digits.py", "dl2d.c", "job_submit.lua"} <= {path.name for path in share.iterdir()}
    assert (tmp_path / "usr/share/zsh/vendor-completions/_dl2d").read_text().startswith("#compdef dl2d\n")
    pages = tmp_path / "usr/share/doc/dl2d"
    assert {"README.md", "docs/slurm.md", "docs/research/dl2.md"} <= {
        str(p.relative_to(pages)) for p in pages.rglob("*")
    }
    assert not (tmp_path / "opt/dl2d/etc").exists()


class Machine:
    """A booted machine on which dl2d is not installed yet."""

    def __init__(self, systemd: SystemdMachine) -> None:
        self.systemd = systemd

    def run(self, command: str) -> str:
        """Output of a shell command, which must succeed."""
        return self.systemd.run(
            *("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "sh", "-ec", command), check=True
        )

    def fails(self, command: str) -> str:
        """Output of a shell command, which must fail."""
        return self.run(f"if {command}; then echo UNEXPECTED; fail; fi")

    def active(self) -> bool:
        return self.systemd.show("dl2d", "ActiveState") == "active"

    def jobs(self) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = json.loads(self.run("dl2d status --json"))["jobs"]
        return jobs

    def sleepers(self) -> set[str]:
        """Processes of the job."""
        return set(self.run("pgrep --full '^sleep 9876' || true").split())


@pytest.fixture
def machine(package: Path) -> Iterator[Machine]:
    with SystemdMachine() as systemd:
        for folder in ("etc/dl2d", "var/lib/dl2d", "opt/dl2d"):  # the machine that runs the tests may have them
            shutil.rmtree(systemd.root / folder, ignore_errors=True)
        debs = systemd.root / "srv/debs"
        debs.mkdir(parents=True)
        shutil.copy(package, debs / "old.deb")
        debian_package.with_version(package, "99.0", debs / "new.deb")
        (debs / "dl2d.yaml").write_text(
            "resource_manager: {name: local}\nschedule: {poll_seconds: 0.5, slot_seconds: 2}\n"
        )
        (debs / "job.yaml").write_text(
            "{name: job, model: other, epochs: 9, steps_per_epoch: 9, worker: {cpu: 1}, command: sleep 9876}\n"
        )
        systemd.boot()
        yield Machine(systemd)


@needs_systemd
def test_from_installation_to_purge(machine: Machine) -> None:
    """One machine, in order: each step begins where the one before ended."""
    install_and_start(machine)
    machine.run("dl2d submit /srv/debs/job.yaml")
    machine.systemd.wait_until(machine.sleepers, "the job runs")
    upgrade_that_fails_and_is_repeated(machine)
    machine.run("systemctl stop dl2d; dpkg --install --force-unsafe-io /srv/debs/new.deb")
    assert not machine.active(), "a daemon that was stopped stays so"
    machine.run("systemctl start dl2d")
    remove_and_purge(machine)
    refuse_to_mix(machine)


def install_and_start(machine: Machine) -> None:
    machine.run("dpkg --install --force-unsafe-io /srv/debs/old.deb")
    assert not machine.active()
    assert machine.run("systemctl is-enabled dl2d || true").strip() == "disabled"
    assert re.fullmatch(r"dl2d \d+\.\d+.*\n", machine.run("dl2d --version"))
    assert "standalone" in machine.run("dl2-run --help")
    completion = "/usr/share/bash-completion/completions/dl2d"
    words = 'COMP_WORDS=(dl2d st) COMP_CWORD=1; _dl2d_completion dl2d; echo "${COMPREPLY[@]}"'
    assert machine.run(f"bash -c '. {completion}; {words}'").split() == ["status"]
    machine.run("cp /srv/debs/dl2d.yaml /etc/dl2d/dl2d.yaml; dl2d check; systemctl enable --now dl2d")
    assert machine.active()


def upgrade_that_fails_and_is_repeated(machine: Machine) -> None:
    """The database is first one that the new version does not know."""
    (job,), processes, pid = machine.jobs(), machine.sleepers(), machine.systemd.show("dl2d", "MainPID")

    def revision(change: str) -> None:
        code = (
            "import sqlite3; store = sqlite3.connect('/var/lib/dl2d/dl2d.sqlite', timeout=30); "
            f"store.execute('UPDATE dl2d_schema_version SET version_num = {change}'); store.commit()"
        )
        machine.run(f'python3 -c "{code}"')

    revision("version_num || 9")
    said = machine.fails("dpkg --install --force-unsafe-io /srv/debs/new.deb")
    assert "dpkg --configure dl2d" in said
    assert not machine.active()
    assert machine.sleepers() == processes
    revision("substr(version_num, 1, length(version_num) - 1)")
    machine.run("dpkg --configure dl2d")
    assert machine.active()
    assert machine.systemd.show("dl2d", "MainPID") != pid
    assert machine.run("dpkg-query --show --showformat '${Version} ${Status}' dl2d") == "99.0 install ok installed"
    assert machine.run("cat /etc/dl2d/dl2d.yaml") == machine.run("cat /srv/debs/dl2d.yaml")
    (same,) = machine.jobs()
    assert (same["job"], same["state"]) == (job["job"], job["state"])
    assert machine.sleepers() == processes


def remove_and_purge(machine: Machine) -> None:
    processes = machine.sleepers()
    machine.run("dpkg --remove dl2d")
    assert not machine.active()
    assert machine.run("ls -d /opt/dl2d /usr/bin/dl2d /lib/systemd/system/dl2d.service 2>/dev/null || true") == ""
    assert machine.run("ls /etc/dl2d /var/lib/dl2d/dl2d.sqlite").split() == [
        *("/var/lib/dl2d/dl2d.sqlite", "/etc/dl2d:", "dl2d.yaml")
    ]
    assert machine.sleepers() == processes != set()
    machine.run("dpkg --purge dl2d")
    assert machine.run("ls -d /etc/dl2d /var/lib/dl2d /run/dl2d* 2>/dev/null || true") == ""
    assert machine.sleepers() == processes
    machine.run(f"kill {' '.join(processes)}")


def refuse_to_mix(machine: Machine) -> None:
    machine.run("mkdir /opt/dl2d; touch /opt/dl2d/pyvenv.cfg")
    assert "made by hand" in machine.fails("dpkg --install /srv/debs/old.deb")
    assert machine.run("ls /opt/dl2d; ls -d /usr/bin/dl2d 2>/dev/null || true").split() == ["pyvenv.cfg"]
