"""Hadoop's ``yarn`` command: what it says, and that it ends with all that it has started."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from dl2d.core.errors import Rejected, Unavailable
from dl2d_yarn.yarn_command import decommission


def script(folder: Path, *lines: str) -> str:
    file = folder / "yarn"
    file.write_text("\n".join(("#!/bin/bash", *lines, "")))
    file.chmod(0o755)
    return str(file)


def test_it_acts_as_the_given_users_with_the_instance(tmp_path: Path) -> None:
    command = script(tmp_path, f'echo "$HADOOP_USER_NAME $HADOOP_PROXY_USER $*" >{tmp_path}/called', "yes | head -c 1M")
    decommission(command, "digits", "worker-1", user="dl2d", do_as="ml")
    called = (tmp_path / "called").read_text()
    assert called == "dl2d ml app -decommission digits -instances worker-1\n"


def test_the_error_quotes_the_end_of_its_output_whatever_bytes_it_has_and_however_many(tmp_path: Path) -> None:
    command = script(tmp_path, "yes | head -c 3M >&2", r"printf '\xff\xfe\x1b[31m no such\n instance' >&2", "exit 5")
    with pytest.raises(Rejected, match=r"digits: worker-1 is not removed: .*yarn ended with status 5") as caught:
        decommission(command, "digits", "worker-1")
    assert caught.value.said.endswith("\ufffd\ufffd [31m no such instance")
    assert len(caught.value.said) <= 500


def test_a_command_that_cannot_be_run_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"digits: cannot remove worker-1: .*/none could not be run: .*No such file"):
        decommission(str(tmp_path / "none"), "digits", "worker-1")


@pytest.mark.parametrize("last", ["wait", "exit 0"], ids=["waits", "leaves a child"])
def test_at_the_deadline_all_processes_of_its_group_are_killed(tmp_path: Path, last: str) -> None:
    pipe = tmp_path / "held"
    os.mkfifo(pipe)
    # Its children hold the error output and the pipe.
    command = script(tmp_path, "echo begins >&2", f"(trap '' TERM; exec 3<>{pipe}; echo x >&3; sleep 100) &", last)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(Unavailable, match=r"did not end in 0\.5 s: begins"):
            decommission(command, "digits", "worker-1", seconds=0.5)
        read = b"x"
        while read:  # ends when no process has the pipe open for writing
            with suppress(BlockingIOError):
                read = os.read(reader, 100)
    finally:
        os.close(reader)
