"""A real systemd as process 1 of its own namespaces, on an overlay of this machine's root, for tests of the unit."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_CGROUPS = Path("/sys/fs/cgroup/unified")
_SYSTEMD = Path("/lib/systemd/systemd")
#: Units that want hardware or a network of their own.
_MASKED = (
    *(f"systemd-{name}.service" for name in ("timesyncd", "networkd", "resolved", "udevd", "udev-trigger")),
    *(f"{name}.service" for name in ("slurmctld", "slurmd", "munge", "postgresql")),
    *("getty.target", "apt-daily.timer", "apt-daily-upgrade.timer"),
)

# Inside new namespaces: build what process 1 needs under the overlay and make that the root.
_BOOT = """
set -e
R=$1; shift
mountpoint -q $R || mount --bind $R $R
mount -t proc proc $R/proc
mount -t sysfs -o ro sysfs $R/sys
mount -t cgroup2 cgroup2 $R/sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs $R/run; mkdir -p $R/run/lock
mount -t tmpfs tmpfs $R/tmp
mount -t tmpfs -o mode=755 tmpfs $R/dev
for d in null zero full random urandom tty; do touch $R/dev/$d; mount --bind /dev/$d $R/dev/$d; done
mkdir $R/dev/pts $R/dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts $R/dev/pts
ln -s pts/ptmx $R/dev/ptmx
mount -t tmpfs tmpfs $R/dev/shm
ln -s /proc/self/fd $R/dev/fd
ln -s /proc/self/fd/0 $R/dev/stdin; ln -s /proc/self/fd/1 $R/dev/stdout; ln -s /proc/self/fd/2 $R/dev/stderr
for shown in "$@"; do mkdir -p $R$shown; mount --bind $shown $R$shown; done
hostname dl2test
ip link set lo up; ip address add 192.0.2.1/32 dev lo
cd $R; mkdir -p .old; pivot_root . .old; umount -l /.old
exec env -i container=dl2 PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=multi-user.target
"""


def why_not() -> str:
    """Why it cannot be started here, or ""."""
    if os.geteuid() != 0:
        return "only root can boot a systemd of its own"
    if not _SYSTEMD.exists() or shutil.which("systemctl") is None or shutil.which("ip") is None:
        return "systemd or iproute2 is not installed"
    if not _CGROUPS.is_dir() and not Path("/sys/fs/cgroup/cgroup.procs").exists():
        return "there is no cgroup v2 hierarchy"
    if _SYSTEMD.exists() and Path("/proc/1/comm").read_text().strip() == "systemd":
        return "this machine runs a systemd already; two would share its cgroups"
    return ""


class SystemdMachine:
    """Boots at the start of the context, is killed at its end; nothing is left behind.

    Files that a test writes under ``root`` are there for the machine; the machine sees this one's file system
    otherwise, without being able to change it. Its network is a loopback interface of its own, with the
    address 192.0.2.1, too. ``shown`` are folders under /tmp that it shall see.
    """

    def __init__(self, *shown: Path) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="dl2-systemd-"))
        self.root = self._base / "root"
        self._shown = [str(path) for path in shown]
        self._cgroup = (_CGROUPS if _CGROUPS.is_dir() else Path("/sys/fs/cgroup")) / self._base.name
        self._outer: subprocess.Popen[bytes] | None = None
        self._inner = 0

    def __enter__(self) -> Self:
        for name in ("root", "up", "work"):
            (self._base / name).mkdir()
        options = f"lowerdir=/,upperdir={self._base}/up,workdir={self._base}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(self.root)], check=True, timeout=30)
        units = self.root / "etc/systemd/system"
        units.mkdir(parents=True, exist_ok=True)
        for name in _MASKED:
            (units / name).unlink(missing_ok=True)
            (units / name).symlink_to("/dev/null")
        return self

    def boot(self) -> None:
        """Start process 1 and wait until it says that it is up."""
        self._cgroup.mkdir()

        joins = f"echo $$ > {self._cgroup / 'cgroup.procs'}; exec "
        unshare = "unshare --mount --net --pid --cgroup --uts --ipc --kill-child --propagation private"
        command = ["bash", "-c", f'{joins} {unshare} bash -c "$@"', "join", _BOOT, "boot", str(self.root), *self._shown]
        with (self._base / "boot.log").open("wb") as log:
            self._outer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.wait_until(self._find, "process 1 is there")
        self.wait_until(
            lambda: self.run("systemctl", "is-system-running").strip() in ("running", "degraded"), "it is up"
        )

    def _remove_cgroup(self) -> bool:
        try:
            for folder, _, _ in os.walk(self._cgroup, topdown=False):
                Path(folder).rmdir()
        except OSError:  # of processes that were killed, some still end
            return False
        return True

    def _find(self) -> bool:
        assert self._outer is not None
        assert self._outer.poll() is None, (self._base / "boot.log").read_text(errors="replace")
        children = psutil.Process(self._outer.pid).children()
        self._inner = next((child.pid for child in children if child.name() == "systemd"), 0)
        return bool(self._inner)

    def run(self, *command: str, check: bool = False, timeout: float = 120) -> str:
        """Run a command inside; its output, errors included."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._inner), "-m", "-n", "-p", "-u", "-i", "-C", "-r", "-w", *command],
            capture_output=True, text=True, check=False, timeout=timeout,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def show(self, unit: str, what: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", what, unit).strip()

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process inside, by its number there."""
        self.run("kill", f"-{number}", str(pid), check=True)

    def wait_until(self, true: object, what: str, *, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while not true():  # type: ignore[operator]
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout:g} s: {what}\n{self.journal()}")
            time.sleep(0.1)

    def journal(self) -> str:
        return self.run("journalctl", "-u", "dl2d", "--no-pager", "-n", "60") if self._inner else ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outer is not None:
            # Some units take half a minute to stop. The kernel ends a pid namespace with its first process.
            self._outer.kill()
            self._outer.wait(timeout=30)
            self._inner = 0
            self.wait_until(self._remove_cgroup, "all processes have ended")
        subprocess.run(["umount", "-R", str(self.root)], check=False, timeout=30)
        shutil.rmtree(self._base, ignore_errors=True)
