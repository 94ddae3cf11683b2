"""A private Slurm for tests: munged, slurmctld and some slurmd on free loopback ports, in a directory of their own.

All of them, their slurmstepds and the jobs included, are descendants of one *keeper* process (this file, run as a
script). The keeper is a "child subreaper": whatever daemonizes below it stays its descendant. When its standard input
closes, because the test stopped the cluster or because the test itself was killed, the keeper kills every descendant,
removes the accounts that were made and the directory. Nothing is left behind either way.

    with SlurmCluster(nodes=4) as cluster:
        alice = cluster.add_user("alice")
        job = cluster.submit_as(alice, "#!/bin/sh\\nsleep 60\\n", "--gres=gpu:1")
        cluster.wait_until(lambda: cluster.job_state(job) == "RUNNING", "the job runs")
"""

from __future__ import annotations

import contextlib
import ctypes
import grp
import json
import os
import pwd
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from free_ports import free_ports

PROGRAMS = (
    *("munged", "munge", "unmunge", "slurmctld", "slurmd"),
    *("useradd", "userdel", "usermod", "groupadd", "groupdel"),
    *("sbatch", "squeue", "sinfo", "scancel", "scontrol"),
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Folder of a pyslurm that was built for the Slurm that is installed.
PYSLURM = Path("/opt/pyslurm")
_PR_SET_CHILD_SUBREAPER = 36
_FREEZER = Path("/sys/fs/cgroup/freezer")


def why_not() -> str:
    """Reason for which no private Slurm can run here, or "" if one can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "a private Slurm that runs jobs as several users needs root"
    if not Path("/proc/self/stat").exists():
        return "needs Linux"
    return ""


def why_no_slurmrestd() -> str:
    """Reason for which no slurmrestd can be used beside a private Slurm, or "" if one can."""
    if reason := why_not():
        return reason
    if shutil.which("slurmrestd") is None:
        return "not installed: slurmrestd"
    return "" if _slurm_version() >= (24, 11) else "slurmrestd takes a node for a job only since Slurm 24.11"


def why_no_pyslurm() -> str:
    """Reason for which no pyslurm can be used beside a private Slurm, or "" if one can."""
    if reason := why_not():
        return reason
    built = (PYSLURM / "pyslurm").is_dir()
    return (
        "" if built else f"no pyslurm in {PYSLURM}, where tests/slurm/test_newer_release.py builds it for Slurm 26.05"
    )


def why_no_cgroups() -> str:
    """Reason for which Slurm cannot track processes by control groups here, or "" if it can."""
    usable = (_FREEZER / "tasks").exists() and os.access(_FREEZER, os.W_OK)
    return "" if usable else f"Slurm's process tracking needs a writable {_FREEZER} (cgroup v1)"


@dataclass(frozen=True, slots=True)
class User:
    """An ordinary account of the cluster; its home lies in the cluster's directory."""

    name: str
    uid: int
    gid: int
    home: Path


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that ended."""

    status: int
    stdout: str
    stderr: str


class SlurmCluster:
    """A private Slurm with ``nodes`` nodes of equal size, called n1, n2, ...; see the module's text.

    Parameters
    ----------
    nodes, cpus, memory, gpus
        Number of nodes; what each has (memory in MiB; GPUs are device files without hardware).
    threads
        Threads of each core; the CPUs are threads.
    gpu_types
        Types of GPUs, of which the nodes have one each, by turns; none if empty.
    shards
        Number of shares (gres/shard) of the GPUs of each node.
    memories
        Memory of each node, where they differ.
    extra
        Further lines for slurm.conf.
    cgroups
        Let Slurm track processes by control groups, as sites do: whatever a job leaves behind is found and killed.
        Without, a process that loses its parents is lost to Slurm (not to the keeper). The groups carry the names of
        the nodes, which therefore get a random part.
    slurmrestd
        Run slurmrestd too, as an ordinary user, on the socket ``slurmrestd_socket``.
    """

    def __init__(
        self,
        *,
        nodes: int = 4,
        cpus: int = 8,
        memory: int = 4000,
        gpus: int = 2,
        threads: int = 1,
        gpu_types: Sequence[str] = (),
        shards: int = 0,
        memories: Sequence[int] = (),
        extra: str = "",
        cgroups: bool = False,
        slurmrestd: bool = False,
    ) -> None:
        prefix = f"n{secrets.token_hex(3)}x" if cgroups else "n"
        self.nodes = tuple(f"{prefix}{number}" for number in range(1, nodes + 1))
        self.cgroups = cgroups
        self.cpus = cpus
        self.memories = memories or (memory,) * nodes
        self.gpus = gpus
        self.threads = threads
        self.gpu_types = [gpu_types[at % len(gpu_types)] if gpu_types else "" for at in range(nodes)]
        self.shards = shards
        self.extra = extra
        self.slurmrestd = slurmrestd
        self.name = "lab"
        self.partition = "dl2"
        # Not pytest's tmp_path: ordinary users cannot enter that.
        self.directory = Path(tempfile.mkdtemp(prefix="dl2-slurm-"))
        self.directory.chmod(0o755)
        self.munge_socket = self.directory / "munge" / "sock"
        self._keeper: _Keeper | None = None
        #: SlurmUser if that is not root.
        self.slurm_user: User | None = None
        self.use_backend("command")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until all nodes are idle."""
        self._keeper = _Keeper(self.directory)
        try:
            self._write_configuration()
            munge = self.directory / "munge"
            self._keeper.run(
                "munged",
                *("munged", "--foreground", "--force", f"--socket={self.munge_socket}", f"--key-file={munge / 'key'}"),
                *(f"--pid-file={munge / 'pid'}", f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}"),
            )
            self.wait_until(self.munge_socket.exists, "munged listens")
            self.start_controller()
            for node in self.nodes:
                self.start_node(node)
            if self.slurmrestd:
                self.start_slurmrestd()
            self.wait_until(lambda: self.node_states() == ["idle"] * len(self.nodes), "all nodes are idle")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop whatever runs of it, jobs included, and remove the directory and the accounts. May be repeated."""
        if self._keeper is not None:
            self._keeper.finish()
            self._keeper = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def start_controller(self, *, fresh: bool = True) -> None:
        """Start slurmctld; with ``fresh`` False it recovers its jobs."""
        arguments = ("-c",) if fresh else ()
        self._running.run("slurmctld", "slurmctld", "-D", *arguments, "-f", str(self.conf))

    def stop_controller(self) -> None:
        """End slurmctld and wait for its end; jobs go on."""
        self._running.end("slurmctld", signal.SIGTERM)

    def start_node(self, node: str) -> None:
        self._running.run(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    @property
    def slurmrestd_socket(self) -> Path:
        return self.directory / "rest" / "socket"

    def start_slurmrestd(self) -> None:
        """Start slurmrestd, which refuses to run as root and as SlurmUser."""
        user = self.add_user("rest")
        self.slurmrestd_socket.parent.mkdir()
        os.chown(self.slurmrestd_socket.parent, user.uid, user.gid)
        become = ("setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--clear-groups", "env", "SLURM_JWT=daemon")
        # Without accounting, 24.11 ends when it loads its other APIs.
        plugins = ("-a", "rest_auth/jwt", "-s", "slurmctld")
        command = ("slurmrestd", "-f", str(self.conf), *plugins, f"unix:{self.slurmrestd_socket}")
        self._running.run("slurmrestd", *become, *command)
        self.wait_until(self.slurmrestd_socket.exists, "slurmrestd listens")

    def use_backend(self, name: str) -> None:
        """Choose what managers in tests submit and cancel by; as SlurmUser and not as root unless by commands."""
        #: Settings of managers, the PATH of their commands, and the user id that runs these.
        self.backend = {"backend": name, "slurmrestd": f"unix:{self.slurmrestd_socket}"}
        if name == "pyslurm":
            self.backend["pyslurm_python"] = str(self.pyslurm_python)
        as_root = name == "command" or self.slurm_user is None
        self.manager_path = PATH if as_root else f"{self.directory / 'bin'}:{PATH}"
        self.manager_uid = 0 if as_root else self.slurm_user.uid

    def _add_commands(self, user: User) -> None:
        """Wrappers that run root's commands as another user."""
        folder = self.directory / "bin"
        folder.mkdir()
        become = f"setpriv --reuid={user.uid} --regid={user.gid} --clear-groups"
        programs = {
            name: shutil.which(name, path=PATH)
            for name in ("squeue", "sinfo", "scontrol", "sacct", "scancel", "unmunge")
        }
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        programs[self.pyslurm_python.name] = f"env PYTHONPATH={PYSLURM} {shutil.which(version, path=PATH)}"
        for name, program in programs.items():
            script = f'#!/bin/sh\n[ "$(id -u)" != 0 ] || become="{become}"\nexec $become {program} "$@"\n'
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)

    @property
    def pyslurm_python(self) -> Path:
        """A Python with pyslurm, which runs as SlurmUser."""
        return self.directory / "bin" / "python-with-pyslurm"

    def stop_node(self, node: str) -> None:
        """End the slurmd of one node; its jobs go on, as on a real node."""
        self._running.end(node, signal.SIGTERM)

    def kill(self, program: str) -> None:
        """Kill slurmctld or, by the name of its node, a slurmd, as a crash would; jobs go on."""
        self._running.end(program, signal.SIGKILL)

    def crash_node(self, node: str) -> None:
        """Kill the slurmd of a node and all that runs there, as a power failure would; needs ``cgroups``."""
        self.kill(node)
        group = _FREEZER / f"slurm_{node}"
        pids = {int(pid) for file in group.rglob("cgroup.procs") for pid in file.read_text().split()}
        running = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        # First those that would tell slurmctld how the others ended.
        parents = {parent for process in running if (parent := _slurmstepd_of(process)) is not None}
        for process in (*parents, *running):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def add_user(self, name: str) -> User:
        """Make an ordinary account (its real name has a random end, so that test runs don't meet); removed by stop."""
        account = f"dl2{name}{secrets.token_hex(3)}"
        home = self.directory / "home" / account
        home.parent.mkdir(exist_ok=True)
        self._running.note_user(account)
        subprocess.run(
            ["useradd", "--no-log-init", "--home-dir", str(home), "--create-home", "--shell", "/bin/sh", account],
            check=True,
            capture_output=True,
            timeout=60,
        )
        home.chmod(0o755)
        entry = pwd.getpwnam(account)
        return User(account, entry.pw_uid, entry.pw_gid, home)

    def add_group(self, user: User, name: str) -> int:
        """Make a group with the user in it (its real name, too, has a random end); the group's id."""
        group = f"dl2{name}{secrets.token_hex(3)}"
        self._running.note_group(group)
        for command in (["groupadd", group], ["usermod", "--append", "--groups", group, user.name]):
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        return grp.getgrnam(group).gr_gid

    @property
    def conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def prefix(self) -> Path:
        """Folder of the installation that ``add_python`` makes, which all nodes share."""
        return self.directory / "opt"

    def resource_manager(self, **more: object) -> dict[str, object]:
        """What the configuration of a daemon says of this cluster."""
        given = {"slurm_conf": str(self.conf), "munge_socket": str(self.munge_socket), **more}
        return {"name": "slurm", "slurm": given}

    def add_python(self, user: User) -> None:
        """Install dl2d for ordinary users, as a virtual environment with this interpreter's packages on their PATH.

        The interpreter of the tests may lie in a folder that is closed to others (root's home); then one of the same
        version on the system's PATH takes its place, with this one's packages.
        """
        mine = os.path.realpath(sys.executable)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        found = shutil.which(f"python{version}", path=PATH)
        candidates = [sys.executable, *([found] if found else [])]
        for candidate in candidates:
            if self.run("test", "-x", os.path.realpath(candidate), user=user, check=False).status == 0:
                break
        else:
            raise AssertionError(f"no python{version} that {user.name} may run: {mine} is closed to others")
        self.run(candidate, "-m", "venv", "--without-pip", str(self.prefix))
        parts = ("dl2d", "dl2d_slurm", "dl2d_yarn", "pslite")
        packages = [
            path for path in sys.path if "site-packages" in path or any((Path(path) / part).is_dir() for part in parts)
        ]
        (self.prefix / f"lib/python{version}/site-packages/tests.pth").write_text("\n".join(packages) + "\n")
        for name, module in (("dl2-run", "pslite.run"), ("dl2d", "dl2d.cli.main")):
            script = self.prefix / "bin" / name
            function = "main" if name == "dl2-run" else "run"
            script.write_text(
                f"#!{self.prefix}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
            )
            script.chmod(0o755)

    def env(self, user: User | None = None) -> dict[str, str]:
        """A complete environment for commands that talk to this cluster, of root or of a user."""
        name, home = (user.name, str(user.home)) if user else ("root", "/root")
        return {
            "PATH": f"{self.prefix}/bin:{PATH}" if user else PATH,
            "HOME": home,
            "USER": name,
            "LOGNAME": name,
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.conf),
            "MUNGE_SOCKET": str(self.munge_socket),
        }

    def run(
        self,
        *argv: str,
        user: User | None = None,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> Ran:
        """Run a command as root or as a user, with the cluster's environment and ``env`` on top."""
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**self.env(user), **(env or {})},
            cwd=cwd or (user.home if user else self.directory),
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=os.getgrouplist(user.name, user.gid) if user else None,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{argv} ended with {done.returncode}: {done.stderr}{self.logs()}")
        return Ran(done.returncode, done.stdout, done.stderr)

    def submit_as(
        self,
        user: User,
        script: str,
        *options: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> str:
        """Sbatch a script as an ordinary user; the job's id."""
        said = self.run("sbatch", "--parsable", *options, user=user, stdin=script, env=env, cwd=cwd)
        return said.stdout.strip().partition(";")[0]

    def job_state(self, job: str) -> str:
        """State of a job in Slurm's word, "" if it is unknown."""
        said = self.run("squeue", "-h", "-t", "all", "-o", "%i %T", check=False).stdout
        return dict(line.split() for line in said.splitlines()).get(job, "")

    def running(self) -> list[str]:
        """Ids of the jobs that hold or wait for room."""
        return self.run("squeue", "-h", "-o", "%i").stdout.split()

    def node_states(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-p", self.partition, "-o", "%T", check=False).stdout.split()

    def wait_until(self, true: Callable[[], object], what: str, *, timeout: float = 60, every: float = 0.1) -> None:
        """Look again and again until ``true()`` holds; on time-out fail with the ends of the logs."""
        deadline = time.monotonic() + timeout
        while not true():
            if time.monotonic() > deadline:
                jobs = self.run("squeue", "-t", "all", check=False).stdout
                nodes = self.run("sinfo", "-N", "-l", check=False).stdout
                raise AssertionError(f"not within {timeout:g} s: {what}\n{jobs}{nodes}{self.logs()}")
            time.sleep(every)

    def clear(self) -> None:
        """Cancel every job, put every node back into service and wait until all is quiet: one cluster, many tests."""
        self.run("scancel", "--state=PENDING", "-u", "root", check=False)
        if jobs := self.running():
            self.run("scancel", *jobs, check=False)
        self.wait_until(lambda: not self.running(), "all jobs are gone")
        if self.node_states() != ["idle"] * len(self.nodes):
            self.run("scontrol", "update", f"nodename={','.join(self.nodes)}", "state=resume", check=False)
        self.wait_until(lambda: self.node_states() == ["idle"] * len(self.nodes), "all nodes are idle")

    def logs(self, lines: int = 30) -> str:
        """Ends of all the daemons' logs."""
        parts = []
        for log in sorted((self.directory / "log").glob("*")):
            tail = log.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join((f"--- {log.name}", *tail)))
        return "\n" + "\n".join(parts)

    @property
    def _running(self) -> _Keeper:
        assert self._keeper is not None, "the cluster is not started"
        return self._keeper

    def _write_configuration(self) -> None:
        here = self.directory
        for name in ("state", "spool", "run", "log", "dev", "munge"):
            (here / name).mkdir()
        if self.slurmrestd:
            self.slurm_user = self.add_user("slurm")
            self._add_commands(self.slurm_user)
            for name in ("state", "run", "log"):
                os.chown(here / name, self.slurm_user.uid, self.slurm_user.gid)
        key = here / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for number in range(self.gpus):
            os.mknod(here / "dev" / f"gpu{number}", 0o666 | 0o020000, os.makedev(195, 200 + number))
        control, *ports = free_ports(1 + len(self.nodes))
        gres = [
            ":".join(filter(None, ("Gres=gpu", each, str(self.gpus))))
            + (f",shard:{self.shards}" if self.shards else "")
            if self.gpus
            else ""
            for each in self.gpu_types
        ]
        cores = f"Sockets=1 CoresPerSocket={self.cpus // self.threads} ThreadsPerCore={self.threads}"
        cores = cores if self.threads > 1 else ""
        node_lines = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} "
            f"{cores} RealMemory={memory} {own} State=UNKNOWN"
            for node, port, memory, own in zip(self.nodes, ports, self.memories, gres, strict=True)
        ]
        lines = [
            f"ClusterName={self.name}",
            "SlurmctldHost=localhost",
            f"SlurmctldPort={control}",
            f"SlurmUser={self.slurm_user.name if self.slurm_user else 'root'}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.munge_socket}",
            "CredType=cred/munge",
            f"StateSaveLocation={here}/state",
            f"SlurmdSpoolDir={here}/spool/%n",
            f"SlurmctldPidFile={here}/run/slurmctld.pid",
            f"SlurmdPidFile={here}/run/%n.pid",
            f"SlurmctldLogFile={here}/log/slurmctld",
            f"SlurmdLogFile={here}/log/%n",
            f"ProctrackType=proctrack/{'cgroup' if self.cgroups else 'linuxproc'}",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "ReturnToService=2",
            # The scheduler's own floor is a second; with the defaults a start takes three.
            "SchedulerParameters=sched_interval=1,bf_interval=2",
            f"GresTypes=gpu{',shard' if self.shards else ''}",
            "SlurmdParameters=config_overrides",
            "KillWait=1",
            # Else a job that says nothing of memory gets a whole node's.
            "DefMemPerCPU=100",
            "MailProg=/bin/true",
            *self._tokens(),
            self.extra,
            *node_lines,
            f"PartitionName={self.partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]
        self.conf.write_text("\n".join(lines) + "\n")
        if self.gpus:
            devices = f"{here}/dev/gpu[0-{self.gpus - 1}]" if self.gpus > 1 else f"{here}/dev/gpu0"
            of_nodes = (
                f"NodeName={node} Name=gpu {f'Type={each} ' if each else ''}Count={self.gpus} File={devices}\n"
                for node, each in zip(self.nodes, self.gpu_types, strict=True)
            )
            shards = (f"NodeName={node} Name=shard Count={self.shards}\n" for node in self.nodes if self.shards)
            (here / "gres.conf").write_text("".join((*of_nodes, *shards)))
        (here / "cgroup.conf").write_text(cgroup_configuration(used=self.cgroups))

    def _tokens(self) -> Sequence[str]:
        """Lines of slurm.conf for JSON Web Tokens, whose key only SlurmUser can read."""
        if self.slurm_user is None:
            return ()
        key = self.directory / "jwt.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(32))
        os.chown(key, self.slurm_user.uid, self.slurm_user.gid)
        return ("AuthAltTypes=auth/jwt", f"AuthAltParameters=jwt_key={key}")


def cgroup_configuration(*, used: bool) -> str:
    """Content of cgroup.conf for tests: 22.05 has no "disabled", and its v2 plug-in refuses hybrid hierarchies."""
    plugin = "disabled" if _slurm_version() >= (23, 11) and not used else "cgroup/v1"
    return f"CgroupPlugin={plugin}\n"


def _slurmstepd_of(process: psutil.Process) -> psutil.Process | None:
    """The slurmstepd that started a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = process.parent()
        return parent if parent is not None and parent.name() == "slurmstepd" else None
    return None


def _slurm_version() -> tuple[int, int]:
    said = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, timeout=30, check=True).stdout
    match = re.search(r"(\d+)\.(\d+)", said)
    assert match, said
    return int(match[1]), int(match[2])


class _Keeper:
    """The test's end of the keeper: one JSON line asked, one answered."""

    def __init__(self, directory: Path) -> None:
        log = (directory / "keeper.log").open("ab")
        with log:
            # A session of its own: an interrupt at the terminal ends the test, which then stops the keeper in order.
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={"PATH": PATH, "LANG": "C.UTF-8"},
                cwd="/",
            )

    def run(self, name: str, *argv: str) -> None:
        """Start a program under a name."""
        self._ask({"do": "run", "name": name, "argv": argv})

    def end(self, name: str, number: signal.Signals) -> None:
        """Signal a program and wait until it has ended."""
        self._ask({"do": "end", "name": name, "signal": int(number)})

    def note_user(self, account: str) -> None:
        """Let the keeper remove an account at its end."""
        self._ask({"do": "user", "name": account})

    def note_group(self, group: str) -> None:
        """Let the keeper remove a group at its end."""
        self._ask({"do": "group", "name": group})

    def _ask(self, message: Mapping[str, object]) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != "ok":
            raise AssertionError(f"keeper: {answer or 'has ended'}")

    def finish(self) -> None:
        """Close the keeper's input, on which it stops everything, and wait for it."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class _KeeperProcess:
    """The keeper's side: starts programs, reaps whatever dies below it, ends everything when its input closes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pids: dict[str, int] = {}
        self._ended: set[int] = set()
        self._accounts: list[tuple[str, str]] = []
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")

    def serve(self) -> None:
        try:
            for line in self._lines():
                message = json.loads(line)
                try:
                    self._do(message)
                    answer = "ok"
                except OSError as error:
                    answer = f"{message}: {error}"
                sys.stdout.write(answer.replace("\n", " ") + "\n")
                sys.stdout.flush()
        finally:
            self._end_all()

    def _lines(self) -> Iterator[str]:
        held = b""
        while True:
            self._reap()
            ready, _, _ = select.select([0], [], [], 0.5)
            if not ready:
                continue
            chunk = os.read(0, 65536)
            if not chunk:
                return
            held += chunk
            while b"\n" in held:
                line, _, held = held.partition(b"\n")
                yield line.decode()

    def _do(self, message: Mapping[str, str]) -> None:
        if message["do"] == "run":
            argv: Sequence[str] = message["argv"]
            log = os.open(self._directory / "log" / f"{message['name']}.out", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            null = os.open("/dev/null", os.O_RDONLY)
            actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
            self._pids[message["name"]] = os.posix_spawnp(
                argv[0],
                list(argv),
                os.environ,
                file_actions=actions,
                setsid=True,
                # The keeper ignores it; slurmd would hand that on to the jobs.
                setsigdef=[signal.SIGTERM],
            )
            os.close(log)
            os.close(null)
        elif message["do"] in ("user", "group"):
            self._accounts.append((f"{message['do']}del", message["name"]))
        else:
            pid = self._pids[message["name"]]
            self._reap()
            if pid not in self._ended:
                os.kill(pid, int(message["signal"]))
            deadline = time.monotonic() + 20
            while pid not in self._ended:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
                self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._ended.add(pid)

    def _end_all(self) -> None:
        while children := psutil.Process().children(recursive=True):
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self._reap()
            time.sleep(0.02)
        for command, name in self._accounts:
            subprocess.run([command, name], check=False, timeout=60, stdout=subprocess.DEVNULL)
        for group in _FREEZER.glob("slurm_n*"):
            if group.name.removeprefix("slurm_") in self._pids:
                for path in (*sorted(group.rglob("*/"), reverse=True), group):
                    with contextlib.suppress(OSError):
                        path.rmdir()
        shutil.rmtree(self._directory, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when its input closes, and not before it has cleaned up
    _KeeperProcess(Path(sys.argv[1])).serve()
