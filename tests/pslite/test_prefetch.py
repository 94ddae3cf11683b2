"""Data that is brought near before a task joins: what is read, and where it stops."""

from __future__ import annotations

import os
import sys

import pytest

from pslite.errors import UsageError
from pslite.prefetch import Prefetch, command_of, files, prefetch
from pslite.run import main


@pytest.fixture
def data(tmp_path):
    (tmp_path / "a" / "deep").mkdir(parents=True)
    for name, size in (("a/1.bin", 1000), ("a/deep/2.bin", 20_000_000), ("a/3.txt", 7)):
        (tmp_path / name).write_bytes(os.urandom(size))
    return tmp_path


def names(root, *patterns):
    return [str(path.relative_to(root)) for path in files([str(root / p) for p in patterns], lambda _: None)]


def test_folders_patterns_and_files_each_once(data):
    assert names(data, "a") == ["a/1.bin", "a/3.txt", "a/deep/2.bin"]
    assert names(data, "a/**/*.bin") == ["a/1.bin", "a/deep/2.bin"]
    assert names(data, "a/3.txt", "a", "a/*.txt") == ["a/3.txt", "a/1.bin", "a/deep/2.bin"]


def test_all_is_read(data):
    lines = []
    result = prefetch(Prefetch(paths=(str(data / "a"),)), say=lines.append)
    assert (result.files, result.nbytes, result.ended) == (3, 20_001_007, "")
    assert lines[-1].startswith("prefetch: 20 MB of 3 files in ")


def test_what_is_not_there_or_cannot_be_read_is_said(data):
    lines = []
    os.mkfifo(data / "a" / "pipe")  # nobody writes into it: opening it would never return
    (data / "a" / "nowhere").symlink_to(data / "nothing")
    result = prefetch(Prefetch(paths=(str(data / "b*"), str(data / "a"))), say=lines.append)
    assert result.nbytes == 20_001_007
    assert f"prefetch: nothing is called {str(data / 'b*')!r}" in lines


@pytest.mark.parametrize("limit", [1, 1000, 1001, 9_000_000])
def test_no_more_than_the_limit(data, limit):
    result = prefetch(Prefetch(paths=(str(data / "a/1.bin"), str(data / "a/deep")), limit=limit))
    assert result.nbytes == limit
    assert "the limit of" in result.ended


def test_it_ends_when_its_time_is_over_or_it_is_told_to(data):
    now = iter(range(100))
    result = prefetch(Prefetch(paths=(str(data / "a"),), seconds=3), clock=lambda: float(next(now)))
    assert result.ended == "3 s are over"
    assert 0 < result.nbytes < 20_001_007
    result = prefetch(Prefetch(paths=(str(data / "a"),)), stop=lambda: True)
    assert result.ended == "it is to stop"
    assert result.files == 0


def test_a_command_is_run_first_and_ended_in_time(data):
    made = data / "made"
    script = f"import os; open({str(made)!r}, 'w').write(os.environ['WHAT'])"
    wanted = Prefetch(command=(sys.executable, "-c", script), paths=(str(data / "ma*"),))
    assert prefetch(wanted, environ={**os.environ, "WHAT": "seven77"}).nbytes == 7
    endless = Prefetch(command=(sys.executable, "-c", "import time; time.sleep(600)"), seconds=0.2)
    assert prefetch(endless).ended == "0.2 s are over"
    lines = []
    prefetch(Prefetch(command=("/no/such/program",)), say=lines.append)
    assert lines[0] == "prefetch: cannot start '/no/such/program': No such file or directory"
    prefetch(Prefetch(command=("false",)), say=lines.append)
    assert "prefetch: 'false' ended with status 1; the task begins all the same" in lines


def test_commands_are_words_not_a_shells():
    assert command_of("python 'my file.py' ; rm") == ("python", "my file.py", ";", "rm")
    assert command_of('["python", "a b", "$HOME"]') == ("python", "a b", "$HOME")
    for text in ("", "'", "[1]", "[]"):
        with pytest.raises(UsageError):
            command_of(text)


def test_options_say_the_same_again():
    wanted = Prefetch(paths=("a b", "c*"), command=("x", "y z"), limit=7, seconds=1.5)
    assert wanted.options() == [
        "--prefetch", "a b", "--prefetch", "c*", "--prefetch-command", '["x","y z"]', "--prefetch-limit", "7",
        "--prefetch-seconds", "1.5",
    ]  # fmt: skip
    assert not Prefetch()
    assert Prefetch().options() == []


@pytest.mark.parametrize(
    "options", [["--prefetch-seconds", "0"], ["--prefetch-limit", "-1"], ["--prefetch-command", "'"]]
)
def test_wrong_options_are_refused(options, capsys):
    assert main([*options, "--", "true"]) == 2
    assert "--prefetch" in capsys.readouterr().err
