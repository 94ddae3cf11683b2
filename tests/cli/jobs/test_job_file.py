"""Job files, and the batch scripts made of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dl2d.cli.jobs.job_file import JobFile, is_batch_script, parse_override, read_batch_script
from dl2d.core.errors import RequestError
from dl2d.core.job_request_parser import RequestRules, parse_request, read_directives

RULES = RequestRules()
GOOD: dict[str, Any] = {
    "name": "digits",
    "model": "vgg-16",
    "epochs": 3,
    "samples_per_epoch": 1500,
    "worker": {"cpu": 2, "gpu": 0.5, "memory": "4G"},
    "ps": "cpu:1",
    "allowed_workers": [1, 2, 4],
    "command": "python train.py --lr 0.1 --name 'two words'",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def write(file: Path, **changes: object) -> Path:
    file.write_text(yaml.safe_dump({**GOOD, **changes}))
    return file


def test_request_command_folder_and_environment(file: Path):
    job = JobFile.read(write(file, cwd="work", env={"LR": 0.1, "SEED": 7, "WORD": "a b"}), RULES)
    assert job.argv == ("python", "train.py", "--lr", "0.1", "--name", "two words")
    assert (job.cwd, job.env) == ("work", {"LR": "0.1", "SEED": "7", "WORD": "a b"})
    assert job.checked == parse_request({k: v for k, v in GOOD.items() if k != "command"}, rules=RULES)


def test_a_command_may_be_a_list(file: Path):
    assert JobFile.read(write(file, command=["python", "x y.py", 3]), RULES).argv == ("python", "x y.py", "3")


def test_overrides_go_before_the_file(file: Path):
    overrides = dict(map(parse_override, ["epochs=5", "worker={cpu: 4}", "max-workers=3", "command=python other.py"]))
    job = JobFile.read(write(file), RULES, overrides)
    request = job.checked
    assert (request.epochs, request.worker.as_dict(), request.max_workers) == (5, {"cpu": 4}, 3)
    assert job.argv == ("python", "other.py")


@pytest.mark.parametrize("text", ["epochs", "=5", " =5"])
def test_overrides_that_are_none(text: str):
    with pytest.raises(RequestError, match="is not key=value"):
        parse_override(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"command": None}, "command: missing"),
        ({"command": ""}, "command: missing"),
        ({"command": "python 'train.py"}, "command: No closing quotation"),
        ({"command": {"a": 1}}, "command: expected text or a list of words"),
        ({"command": [["a"]]}, "command: expected text or a list of words"),
        ({"cwd": 7}, "cwd: expected the path of a folder"),
        ({"env": ["A=1"]}, "env: expected names and values"),
        ({"env": {"A-B": "1"}}, "env.A-B: is not a valid name of an environment variable"),
        ({"env": {"DL2_ROLE": "worker"}}, "env.DL2_ROLE: is reserved: variables that begin with DL2_ are set by dl2d"),
        ({"env": {"A": True}}, "env.A: expected text (quote it in YAML), got True"),
        ({"epochs": 0}, "epochs: expected a number, more than 0"),
        ({"epoch": 3}, "epoch: unknown key (did you mean epochs?)"),
        ({"model": "vgg_16"}, "model: unknown model type 'vgg_16' (did you mean vgg-16?)"),
        ({"worker": {"gpu": "many"}}, "worker.gpu: expected a number"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(file: Path, changes: dict[str, object], says: str):
    with pytest.raises(RequestError) as caught:
        JobFile.read(write(file, **changes), RequestRules(models=frozenset({"vgg-16"})))
    assert str(caught.value).startswith(f"{file}: {says}")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"- a\n", "expected keys and values, got a list"),
        (b"a: [", "is not YAML"),
        (b"\xff\xfe", "is not text"),
        (b"a: " + b"x" * 1_100_000, "is larger than 1048576 bytes, so it is not a job file"),
        (b"!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_files_that_are_no_job_files(file: Path, data: bytes, says: str):
    file.write_bytes(data)
    with pytest.raises(RequestError) as caught:
        JobFile.read(file, RULES)
    assert says in str(caught.value)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        JobFile.read(tmp_path / "none.yaml", RULES)


def test_a_batch_script_asks_for_the_same(file: Path, tmp_path: Path):
    job = JobFile.read(write(file, name="my digits"), RULES)
    script = tmp_path / "job.sh"
    script.write_text(job.as_batch_script(tmp_path))
    assert is_batch_script(script)
    assert not is_batch_script(file)
    assert read_batch_script(script, RULES) == job.checked
    assert "#SBATCH --job-name=my_digits\n" in script.read_text()
    assert script.read_text().endswith("\nexec dl2-run python train.py --lr 0.1 --name 'two words'\n")


def test_what_a_directive_cannot_hold_is_refused(file: Path, tmp_path: Path):
    with pytest.raises(RequestError, match=r"epochs: .* not allowed in a #DL2 line"):
        JobFile.read(write(file, epochs="3\n"), RULES).as_batch_script(tmp_path)


def test_all_that_is_wrong_is_told_at_once(file: Path):
    write(file, epochs=0, worker={"gpu": "many"}, modle="bert", samples_per_epoch=None, command=None, cwd=7)
    with pytest.raises(RequestError) as caught:
        JobFile.read(file, RequestRules(models=frozenset({"bert"})))
    told = (
        rf"{file}: samples_per_epoch: missing \(or give steps_per_epoch\); "
        r"modle: unknown key \(did you mean model\?\); known are allowed_workers, .*, worker; "
        r"epochs: expected a number, .*; worker\.gpu: expected a number, .*; "
        r"model: unknown model type 'vgg-16'; this site knows bert \(.*\); "
        r"command: missing; .*; cwd: expected the path of a folder, got 7"
    )
    assert re.fullmatch(told, str(caught.value))


def test_limits_of_workers_and_of_servers_are_told_at_once(file: Path):
    with pytest.raises(RequestError) as caught:
        JobFile.read(write(file, min_workers=9, max_workers=8, min_ps=0), RULES)
    problems = "min_workers: 9 is more than max_workers=8; min_ps: a job with architecture=ps needs at least 1"
    assert str(caught.value) == f"{file}: {problems}"


def test_only_so_many_problems_are_told(file: Path):
    with pytest.raises(RequestError, match=r"; key-19: unknown key; and 14 more$"):
        JobFile.read(write(file, **{f"key-{number:02}": 0 for number in range(34)}), RULES)


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(
    argv=st.lists(words, min_size=1, max_size=4).filter(lambda argv: argv[0].strip() != ""),
    env=st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), words, max_size=3),
)
def test_a_script_runs_exactly_the_words_of_the_command(
    tmp_path_factory: pytest.TempPathFactory, argv: list[str], env: dict[str, str]
):
    """No text of a user is taken for shell. ``dl2-run`` is stood in for by a program that prints what it got."""
    folder = tmp_path_factory.mktemp("script")
    reserved = {"PATH", "_", "IFS", "PS4", "UID", "EUID", "PPID", "HOME", "SHLVL", "PWD", "OLDPWD"}
    kept = {f"X_{name}": value for name, value in env.items() if name not in reserved}
    given = {"model": "vgg-16", "epochs": 1, "samples_per_epoch": 1, "worker": "cpu:1"}
    job = JobFile("test", given, tuple(argv), None, kept, parse_request(given, rules=RULES))
    runner = folder / "dl2-run"
    # NUL ends each word, as none may hold one.
    runner.write_text('#!/bin/sh\nprintf "%s\\0" "$PWD" "$#" "$@"\nexec env -0\n')
    runner.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash"],
        input=job.as_batch_script(folder).encode(),
        env={"PATH": f"{folder}:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"},
        capture_output=True,
        check=True,
    )
    got_folder, count, *rest = done.stdout.decode().split("\0")[:-1]
    variables = dict(variable.split("=", 1) for variable in rest[int(count) :])
    assert got_folder == str(folder)
    assert rest[: int(count)] == (argv[1:] if Path(argv[0]).name == "dl2-run" else argv)
    assert {name: value for name, value in variables.items() if name.startswith("X_")} == kept


def test_directives_of_the_script_are_read_by_the_one_parser(file: Path, tmp_path: Path):
    directives = read_directives(JobFile.read(write(file), RULES).as_batch_script(tmp_path))
    assert directives["worker"] == "cpu:2,gpu:0.5,memory:4G"
    assert directives["allowed_workers"] == "1,2,4"
