"""A task becomes the right options and a script that passes its words on unchanged."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_fakes import FakeSlurm, Managers, task

from dl2d.core.errors import Rejected
from dl2d.core.jobs import Launch, Owner
from dl2d.core.resources import Resources
from dl2d_slurm.commands.commands import Commands
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.settings import SlurmSettings
from dl2d_slurm.submission.batch_job_of_task import NODE_VARIABLES, batch_script, sbatch_arguments
from dl2d_slurm.submission.sbatch_options import AnchorOptions

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60)
NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,10}", fullmatch=True).filter(
    lambda name: name not in NODE_VARIABLES and not name.startswith(("SLURM", "LC_", "LANG", "BASH", "PATH"))
)


def run(text: str) -> bytes:
    done = subprocess.run(["/bin/sh"], input=text.encode(), capture_output=True, timeout=30, check=True, env={})
    return done.stdout


@settings(max_examples=50)
@given(st.lists(TEXT, max_size=5))
def test_words_of_the_command_arrive_unchanged(words: list[str]) -> None:
    launch = Launch(("/usr/bin/printf", "%s\\0", *words, "end"), "/")
    assert run(batch_script(task(launch=launch))).decode().split("\0") == [*words, "end", ""]


@settings(max_examples=50)
@given(st.dictionaries(NAMES, TEXT, max_size=5))
def test_values_of_variables_arrive_unchanged(env: dict[str, str]) -> None:
    launch = Launch(("/usr/bin/env", "-0"), "/", tuple(env.items()))
    found = dict(line.split("=", 1) for line in run(batch_script(task(launch=launch))).decode().split("\0") if line)
    assert {name: found.get(name) for name in env} == env
    assert found.keys() - env.keys() <= NODE_VARIABLES | {"DL2_STOPPED_STATUS"}


@given(st.lists(TEXT, min_size=1, max_size=5), st.dictionaries(NAMES, TEXT, max_size=5))
def test_nothing_of_the_users_comes_before_the_first_command(words: list[str], env: dict[str, str]) -> None:
    text = batch_script(task(launch=Launch(tuple(words), "/", tuple(env.items()))))
    assert text.startswith("#!/bin/sh\n:\n")
    assert "\r" not in text


def test_variables_that_belong_to_the_node_are_left_to_it() -> None:
    env = (
        ("CUDA_VISIBLE_DEVICES", "3"),
        ("SLURM_JOB_ID", "9"),
        ("BASH_FUNC_x%%", "() { :; }"),
        ("UID", "0"),
        ("A", "1"),
    )
    exports = [line for line in batch_script(task(launch=Launch(("true",), "/", env))).splitlines() if "export" in line]
    assert exports == ["export A=1", "export DL2_STOPPED_STATUS=0"]


def test_the_output_of_a_task_is_moved_to_the_folder_of_its_job(tmp_path: Path) -> None:
    text = batch_script(task(launch=Launch(("/bin/echo", "late"), "/")))
    output = tmp_path / "dl2-12-worker-1.out"
    with output.open("w") as file:
        subprocess.run(["/bin/sh"], input=text, stdout=file, cwd=tmp_path, text=True, timeout=30, check=True, env={})
    assert (tmp_path / "dl2-12" / "worker-1.out").read_text() == "late\n"
    assert not output.exists()
    # A folder that cannot be made keeps no task from running.
    (tmp_path / "dl2-12" / "worker-1.out").unlink()
    (tmp_path / "dl2-12").rmdir()
    (tmp_path / "dl2-12").touch()
    with output.open("w") as file:
        subprocess.run(["/bin/sh"], input=text, stdout=file, cwd=tmp_path, text=True, timeout=30, check=True, env={})
    assert "late\n" in output.read_text()


@pytest.mark.parametrize(
    "launch",
    [Launch((), "/"), Launch(("a\0b",), "/"), Launch(("a",), "/", (("A", "\0"),))],
    ids=["none", "argv", "env"],
)
def test_what_no_script_can_hold_is_rejected(launch: Launch) -> None:
    with pytest.raises(Rejected):
        batch_script(task(launch=launch))


def chosen(**more: object) -> list[str]:
    given = {"settings": SlurmSettings(), "spelling": {}, "as_owner": True, "anchor": AnchorOptions()}
    wanted = {key: more.pop(key) for key in list(more) if key in given}
    return sbatch_arguments(task(**more), **{**given, **wanted})  # type: ignore[arg-type]


#: Text of any kind for an option's value, as an anchor's user or Slurm may write it.
VALUES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["--uid=0", "-w n1", "$(id)", "`id`; id", "a b", "a\nb", "a=b", "'", "/etc/shadow", "n[1-2]", "\0"]
    ),
)
KEYS = {
    *("uid", "gid", "chdir", "export", "propagate", "nodes", "ntasks", "cpus-per-task", "mem", "comment", "job-name"),
    *("output", "nodelist", "partition", "account", "qos", "time", "reservation", "constraint", "exclude", "nice"),
    "wckey",
}


@settings(max_examples=200)
@given(
    st.builds(Owner, VALUES, st.just(1001), st.just(1002), account=VALUES, partition=VALUES, qos=VALUES),
    st.builds(
        AnchorOptions, reservation=VALUES, features=VALUES, nice=st.integers(), wckey=VALUES, exclude=VALUES
    ),
    st.fixed_dictionaries({"node": VALUES, "name": VALUES, "tag": VALUES}),
    VALUES,
)  # fmt: skip
def test_whatever_a_value_holds_it_is_one_word_of_a_known_option_or_refused_by_name(
    owner: Owner, anchor: AnchorOptions, texts: dict[str, str], folder: str
) -> None:
    try:
        words = chosen(owner=owner, anchor=anchor, launch=Launch(("true",), folder), **texts)
    except Rejected as error:
        option = re.match("--([a-z]+)", str(error))
        given = {"account": owner.account, "qos": owner.qos, "partition": owner.partition, "chdir": folder}
        given |= {"reservation": anchor.reservation, "constraint": anchor.features, "wckey": anchor.wckey}
        given |= {"exclude": anchor.exclude, "nodelist": texts["node"], "comment": texts["tag"]}
        assert option is not None
        assert "\0" in given[option[1]] or (option[1] in ("exclude", "nodelist") and "/" in given[option[1]])
        return
    said = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    assert {word for word in words if "=" not in word} == {"--parsable", "--no-requeue"}
    assert len(said) == len(words) - 2
    assert said.keys() <= KEYS
    assert all(word.startswith("--") and "\0" not in word for word in words)
    assert (said["uid"], said["gid"], said["chdir"]) == ("1001", "1002", folder)
    assert said.get("account", "") == owner.account
    assert said.get("exclude", "") == anchor.exclude
    assert not {"/", " ", "$"} & {*said["job-name"], *said["output"]}
    commands = Commands({"PATH": "/usr/bin:/bin"}, 30, RpcRate(1000, lambda: 0.0))
    assert commands.run("printf", r"%s\0", *words).stdout.split("\0") == [*words, ""]


def test_only_the_administrator_may_have_sbatch_read_nodes_from_a_file() -> None:
    for asked in ({"node": "/etc/shadow"}, {"anchor": AnchorOptions(exclude="/etc/shadow")}):
        with pytest.raises(Rejected, match=r"--(nodelist|exclude)=/etc/shadow: sbatch would take a list"):
            chosen(**asked)
    site = SlurmSettings(sbatch_options=("--exclude=/etc/dl2d/no-nodes",))
    words = chosen(settings=site, anchor=AnchorOptions(exclude="/etc/dl2d/no-nodes"))
    assert words[-2:] == ["--exclude=/etc/dl2d/no-nodes"] * 2


def test_a_task_runs_as_its_owner_on_its_node_with_the_anchors_account() -> None:
    owner = Owner("alice", 1001, 1002, account="ml", partition="gpu", qos="high")
    words = chosen(owner=owner)
    for word in ("--uid=1001", "--gid=1002", "--account=ml", "--partition=gpu", "--qos=high", "--nodelist=n1"):
        assert word in words
    for word in ("--parsable", "--no-requeue", "--cpus-per-task=2", "--mem=100M", "--chdir=/home/alice"):
        assert word in words
    assert "--output=dl2-12-worker-1.out" in words
    assert "--comment=dl2:fake.12.1795000000:worker-1" in words
    assert all(word.startswith("--") for word in words)


def test_what_is_not_known_is_not_said() -> None:
    words = chosen(node="", as_owner=False)
    said = ("--uid", "--gid", "--nodelist", "--account", "--qos", "--partition", "--time", "--gres")
    assert not [word for word in words if word.partition("=")[0] in said]


def test_the_sites_settings_win() -> None:
    site = SlurmSettings(partition="ml", time_limit="1-00", default_memory_mib=256, sbatch_options=("--exclusive",))
    words = chosen(settings=site, demand=Resources.of(cpu=1), owner=Owner("a", 1, 1, partition="gpu"))
    assert {"--partition=ml", "--time=1-00", "--mem=256M", "--exclusive"} <= set(words)


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        ({"cpu": 0.5}, ["--cpus-per-task=1"]),
        ({}, ["--cpus-per-task=1"]),
        ({"cpu": 2, "memory": 100.5}, ["--cpus-per-task=2", "--mem=101M"]),
        ({"cpu": 1, "gpu": 2}, ["--cpus-per-task=1", "--gres=gpu:2"]),
        ({"cpu": 1, "gpu": 2, "gpu:a100": 2}, ["--cpus-per-task=1", "--gres=gpu:A100:2"]),
        ({"cpu": 1, "gpu": 3, "gpu:a100": 2}, ["--cpus-per-task=1", "--gres=gpu:1,gpu:A100:2"]),
        ({"cpu": 1, "nvme": 1}, ["--cpus-per-task=1", "--gres=nvme:1"]),
    ],
)
def test_demands(demand: dict[str, float], said: list[str]) -> None:
    words = chosen(demand=Resources.of(demand), spelling={"gpu:a100": "gpu:A100"})
    assert [word for word in words if word.partition("=")[0] in ("--cpus-per-task", "--mem", "--gres")] == said


def test_a_fraction_of_a_device_is_rejected() -> None:
    with pytest.raises(Rejected, match=r"gpu=0\.5"):
        chosen(demand=Resources.of(cpu=1, gpu=0.5))


def test_what_the_user_gave_to_sbatch_for_the_anchor_holds_for_its_tasks() -> None:
    anchor = AnchorOptions(reservation="ml", features="a100&ib", nice=5, wckey="a|b")
    words = chosen(anchor=anchor, settings=SlurmSettings(sbatch_options=("--reservation=all",)))
    assert words[-5:] == ["--reservation=ml", "--constraint=a100&ib", "--nice=5", "--wckey=a|b", "--reservation=all"]
    assert not [word for word in chosen(anchor=AnchorOptions(nice=-5)) if word.startswith("--nice")]


def test_a_folders_name_is_no_pattern_for_sbatchs_output(slurm: FakeSlurm, manager_on: Managers) -> None:
    manager = manager_on()
    launch = Launch(argv=("true",), cwd="/home/alice/50%j")
    manager.submit(task(launch=launch))
    argv = slurm.calls("sbatch")[-1].argv
    assert "--chdir=/home/alice/50%j" in argv
    assert "--output=/home/alice/50%%j/dl2-12-worker-1.out" in argv
    with pytest.raises(Rejected, match="backslash"):
        manager.submit(task(launch=Launch(argv=("true",), cwd="/home/alice/a\\b")))
