"""Helpers of the MXNet tests: the environment that has MXNet, its data, and jobs of MXNet's own servers."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pslite

#: as docs/training-scripts.md says; tests use pslite from the source folder all the same
PACKAGES = [f"{Path(__file__).parents[2] / 'pslite'}[mxnet]"]
SCRIPT = str(Path(__file__).with_name("mxnet_worker.py"))
CHECKS = str(Path(__file__).with_name("mxnet_checks.py"))
KVSTORE_CHECKS = str(Path(__file__).with_name("mxnet_kvstore_checks.py"))
EXAMPLES = str(Path(__file__).with_name("mxnet_examples.py"))


class Unavailable(Exception):
    """There is no such environment to test with; the text says why."""


def make_environment(folder: Path, packages: Sequence[str] = PACKAGES, *, beside: bool = False) -> str:
    """Return the Python of a virtual environment in `folder`, which is made if it is not there.

    With `beside` it has the packages of this test run too.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        # tests in several processes ask for it at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _make(folder, packages, beside=beside)


def _make(folder: Path, packages: Sequence[str], *, beside: bool) -> str:
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if folder.is_symlink() and python.exists():
        return str(python)  # somebody else's, which is not to be cleared
    if complete.exists() and complete.read_text() == "\n".join(packages):
        return str(python)
    if not beside and sys.version_info[:2] != (3, 11):
        raise Unavailable("MXNet 1.9.1 is tested with Python 3.11")
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages],
    ):
        if beside and command[0] == str(python):
            Path(paths["purelib"], "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ, check=False)
        if done.returncode:
            raise Unavailable(f"{packages[0]} cannot be installed: {done.stderr.strip()[-500:]}")
    complete.write_text("\n".join(packages))
    return str(python)


def environ(**more: str) -> dict[str, str]:
    """Return the environment of a process in which pslite is found, and nothing of this test run's own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DL2_", "DMLC_")) and k != "PYTHONPATH"}
    return {**kept, "PYTHONPATH": str(Path(pslite.__file__).parents[1]), "OMP_NUM_THREADS": "1", **more}


def launch(command: list[str], workers: int, servers: int, **more: str) -> list[int]:
    """Start a command as MXNet's launcher does, once for each role; return the exit statuses, the scheduler's first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = environ(
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT=str(port),
        DMLC_NODE_HOST="127.0.0.1",
        DMLC_NUM_WORKER=str(workers),
        DMLC_NUM_SERVER=str(servers),
        **more,
    )
    roles = ["scheduler", *["server"] * servers, *["worker"] * workers]
    processes = [subprocess.Popen(command, env={**common, "DMLC_ROLE": role}) for role in roles]
    try:
        return [process.wait(250) for process in processes]
    finally:
        for process in processes:
            process.kill()
