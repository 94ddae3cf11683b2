"""The coordinator log: what was written is read again, by one coordinator at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import pytest

from pslite.errors import Fenced, UsageError
from pslite.storage.coordinator_log import CoordinatorLog, read_state


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


def test_a_log_gives_back_the_last_state_under_the_next_term(folder):
    with closing(CoordinatorLog(folder)) as log:
        assert (log.term, log.state, log.step_record) == (1, None, b"")
        log.write(b'{"n":1}')
        log.write(b'{"n":2}')
        log.write_step_record(b"long record")
        log.write_step_record(b"short")
    assert read_state(folder) == b'{"n":2}'
    with closing(CoordinatorLog(folder)) as log:
        assert (log.term, log.state, log.step_record) == (2, b'{"n":2}', b"short")
    assert folder.stat().st_mode & 0o077 == 0


WRITER = """
import sys
from pathlib import Path
from pslite.storage.coordinator_log import CoordinatorLog
log, n = CoordinatorLog(Path(sys.argv[1])), 0
while True:
    n += 1
    log.write(b"%d:" % n + b"%d" % (n % 10) * 100_000)
    print(n, flush=True)
"""


@pytest.mark.parametrize("writes", [1, 7, 40])
def test_what_was_written_is_there_after_a_kill(folder, writes):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) == writes:
                process.kill()
                break
        last = max([writes, *map(int, process.stdout)])
    with closing(CoordinatorLog(folder)) as log:
        assert log.term == 2
        number, _, text = log.state.partition(b":")
        assert int(number) in (last, last + 1)  # it may have been killed before it could say so
        assert text == b"%d" % (int(number) % 10) * 100_000


def damage(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("spoil", [damage, lambda path: path.write_bytes(b"nonsense" * 1000)])
def test_a_damaged_log_is_refused(folder, spoil):
    with closing(CoordinatorLog(folder)) as log:
        log.write(b'{"x":"%s"}' % (b"x" * 100_000))
    spoil(folder / "log.sqlite")
    for use in (CoordinatorLog, read_state):
        with pytest.raises(UsageError, match=r"cannot be used \(.+\): repair or remove the folder"):
            use(folder)


def test_a_log_of_an_earlier_version_is_refused(folder):
    folder.mkdir()
    (folder / "log").write_text('{"term":1,"state":{}}\n')
    with pytest.raises(UsageError, match=r"of an earlier version.*start the script again, from its checkpoint"):
        read_state(folder)


def test_a_log_does_not_grow(folder):
    with closing(CoordinatorLog(folder)) as log:
        for n in range(100):
            log.write(b'{"n":%d,"x":"%s"}' % (n, b"%d" % (n % 10) * 100_000))
        assert sum(path.stat().st_size for path in folder.iterdir()) < 6 << 20
    assert read_state(folder)[:8] == b'{"n":99,'


def test_a_second_coordinator_on_a_log_is_refused(folder):
    refusal = f"in use by process {os.getpid()}, and a job has one"
    with closing(CoordinatorLog(folder)), pytest.raises(UsageError, match=refusal):
        CoordinatorLog(folder)
    with closing(CoordinatorLog(folder)):
        pass


def test_who_was_followed_without_knowing_it_writes_nothing_more(folder):
    with closing(CoordinatorLog(folder)) as old:
        old.write(b'{"n":1}')
        old.check()
        (folder / "lock").unlink()  # as on a file system without locks
        with closing(CoordinatorLog(folder)) as new:
            assert new.term == 2
            with pytest.raises(Fenced, match="another coordinator has taken over"):
                old.check()
            for write in (old.write, old.write_step_record):
                with pytest.raises(Fenced):
                    write(b'{"n":"old"}')
            new.write(b'{"n":2}')
            with pytest.raises(Fenced):
                old.write(b'{"n":"old"}')
            assert (new.state, new.step_record) == (b'{"n":1}', b"")
    assert read_state(folder) == b'{"n":2}'


def test_a_log_of_a_job_that_is_over_is_gone(folder):
    log = CoordinatorLog(folder)
    log.write(b"{}")
    log.remove()
    assert not folder.exists()
    assert read_state(folder) is None
