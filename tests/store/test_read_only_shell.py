"""The shell that ``dl2d sql`` opens on a terminal: it reads, and cannot write."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from cli.conftest import write_config
from store.samples import a_job

from dl2d.store import schema_version
from dl2d.store.sql_store import SqlStore


def in_shell(config: Path, *lines: str) -> str:
    """What is shown on a terminal on which ``dl2d sql`` is called and these lines are typed."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "dl2d.cli", "sql", "-c", str(config)]
    environment = {**os.environ, "PAGER": "cat", "TERM": "dumb"}
    shown = b""
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment) as shell:
        os.close(its)
        try:
            os.write(ours, "".join(f"{line}\n" for line in lines).encode())
            with contextlib.suppress(OSError):  # the end of a terminal that no process has open any more
                while read := os.read(ours, 4096):
                    shown += read
        finally:
            shell.kill()
            os.close(ours)
    return shown.decode().replace("\r", "")


def test_it_reads_and_cannot_write(empty_url: str, tmp_path: Path) -> None:
    program, end, refused = (
        ("psql", r"\q", "cannot execute DELETE in a read-only transaction")
        if empty_url.startswith("postgresql")
        else ("sqlite3", ".quit", "attempt to write a readonly database")
    )
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    schema_version.upgrade(empty_url)
    with closing(SqlStore(empty_url)) as store:
        store.add_job(job := a_job())
    config = write_config(tmp_path, store={"url": empty_url})
    shown = in_shell(config, "SELECT count(*) AS counted FROM job_completion;", "DELETE FROM jobs;", end)
    assert re.search(r"^ *counted *\n *-+ *\n *1 *$", shown, re.MULTILINE), shown
    assert refused in shown
    with closing(SqlStore(empty_url)) as store:
        assert store.jobs(live=True) == (job,)
