"""The file by which jobs find the daemon: where it is looked for, and when it is trusted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pslite.errors import UsageError
from pslite.launch.daemon_connection.daemon_address_file import (
    DaemonAddress,
    default_file,
    distrust_of_others,
    find_address,
    read_address,
    search_files,
)

ADDRESS = {"url": "https://head:8910", "certificate": "der:MIIB", "cluster": "lab", "host": "head"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job-api.json"
    path.write_text(json.dumps(ADDRESS))
    return path


def test_a_file_gives_the_variables_of_a_job(file: Path) -> None:
    assert read_address(file) == DaemonAddress(**ADDRESS)
    assert find_address([file.with_name("none"), file]) == (file, DaemonAddress(**ADDRESS))
    assert read_address(file).variables() == {"DL2_DAEMON": "https://head:8910", "DL2_DAEMON_CERTIFICATE": "der:MIIB"}
    assert DaemonAddress("https://head:8910").variables() == {"DL2_DAEMON": "https://head:8910"}
    assert DaemonAddress("http://[::1]", uid=64).variables()["DL2_DAEMON_UID"] == "64"


def test_the_file_is_below_the_installation_and_found_by_installations_of_users(monkeypatch) -> None:
    assert default_file("/shared/dl2d") == Path("/shared/dl2d/etc/dl2d/job-api.json")
    assert default_file("/usr") == default_file("/usr/local") == Path("/etc/dl2d/job-api.json")
    assert search_files()[0] == Path("/etc/dl2d/job-api.json"), "what the administrator of the node says goes first"
    assert set(search_files()[1:]) == {default_file(sys.prefix), default_file("/opt/dl2d")}


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_is_not_used(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(UsageError, match="others than its owner may write it"):
        find_address([file])


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
#: The account of a daemon that is not root.
DAEMON = 65_432


@needs_root
@pytest.mark.parametrize("change", ["chmod g+w", "chmod o+w", "chown 65433"])
def test_a_file_of_another_user_whose_folder_others_can_change_is_not_used(file: Path, change: str) -> None:
    os.chown(file, DAEMON, 0)
    subprocess.run([*change.split(), file.parent], check=True)
    assert f"it belongs to uid {DAEMON}" in distrust_of_others(file)
    with pytest.raises(UsageError, match=f"uid {DAEMON}, .* others than these can change {file.parent}: "):
        find_address([file])


@needs_root
def test_a_file_in_a_folder_that_root_has_given_to_the_account_of_the_daemon_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "etc" / "dl2d"
    subprocess.run(["install", "-d", "-o", str(DAEMON), folder], check=True)
    file = folder / "job-api.json"
    file.write_text(json.dumps(ADDRESS))
    os.chown(file, DAEMON, 0)
    (link := tmp_path / "link").symlink_to(file)
    assert read_address(file) == read_address(link) == DaemonAddress(**ADDRESS)
    assert distrust_of_others(file) == distrust_of_others(link) == ""
    os.chown(folder, 65_433, 0)
    assert f"can change {folder}" in distrust_of_others(link)


@needs_root
def test_a_file_to_which_a_link_of_another_user_leads_is_not_used(file: Path, tmp_path: Path) -> None:
    os.chown(file, DAEMON, 0)
    (theirs := tmp_path / "theirs").mkdir()
    (link := theirs / "link").symlink_to(file)
    assert distrust_of_others(link) == ""
    os.chown(theirs, 65_433, 0)
    assert f"can change {theirs}" in distrust_of_others(link)


@needs_root
def test_a_file_to_which_links_lead_through_a_folder_of_another_user_is_not_used(file: Path, tmp_path: Path) -> None:
    """A user replaced the file in a folder that others may write by a link to a file at home."""
    os.chown(file, DAEMON, 0)
    os.chown(file.parent, DAEMON, 0)
    (shared := tmp_path / "shared").mkdir()
    (shared / "job-api.json").symlink_to(file)
    (link := tmp_path / "link").symlink_to(shared / "job-api.json")
    (below := tmp_path / "below").symlink_to(shared)
    (shared / "sub").mkdir()
    (current := tmp_path / "current").symlink_to(shared / "sub")
    (through := tmp_path / "through").symlink_to(Path(current.name, "..", "job-api.json"))
    for path in (link, below / "job-api.json", through):
        shared.chmod(0o755)
        assert distrust_of_others(path) == ""
        shared.chmod(0o777)
        assert "others than these can change" in distrust_of_others(path)


@needs_root
def test_what_users_put_into_a_folder_for_all_is_not_used(file: Path, tmp_path: Path) -> None:
    """In a sticky folder, like /tmp, users can replace what is theirs, and not what is root's."""
    shared = tmp_path / "shared"
    (own := shared / "own").mkdir(parents=True)
    shared.chmod(0o1777)
    moved = file.rename(own / file.name)
    os.chown(moved, DAEMON, 0)
    assert distrust_of_others(moved) == ""
    os.chown(own, DAEMON, 0)
    assert f"can change {shared}" in distrust_of_others(moved)


def test_what_is_no_file_or_malformed_is_named(tmp_path: Path, file: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (wrong := tmp_path / "wrong").write_text('{"url": "ftp://head"}')
    (broken := tmp_path / "broken").write_text("{")
    with pytest.raises(UsageError) as caught:
        find_address([fifo, wrong, broken])
    for text in ("fifo is not used: it is not a file", "url is 'ftp://head'", "broken is malformed"):
        assert text in str(caught.value)
    assert find_address([fifo, wrong, broken, file])[0] == file


def test_the_loopback_address_of_another_machine_is_of_no_use(file: Path) -> None:
    file.write_text(json.dumps({"url": "http://127.0.0.1:8910", "host": socket.gethostname()}))
    assert find_address([file])
    file.write_text(json.dumps({"url": "http://127.0.0.1:8910", "host": "head"}))
    with pytest.raises(UsageError, match=r"cannot reach, since the daemon runs on head: .* api\.host"):
        find_address([file])


@pytest.fixture
def batch_job(tmp_path: Path):
    """Run a batch script as slurmd does, with an installation of its own and a scontrol that answers as told."""
    prefix = tmp_path / "prefix"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True, timeout=60)
    packages = os.pathsep.join(path for path in sys.path if path)
    (prefix / "bin" / "dl2-run").write_text(f'#!/bin/sh\nexec {prefix}/bin/python -m pslite.run "$@"\n')
    (prefix / "bin" / "dl2-run").chmod(0o755)
    script = tmp_path / "job00007" / "slurm_script"
    script.parent.mkdir()

    def run(text: str, *, address: str = "", slurm_knows: str = "", **environ: str) -> tuple[int, str]:
        script.write_text(f"#!/bin/sh\n{text}\n")
        (prefix / "etc/dl2d").mkdir(parents=True, exist_ok=True)
        if address:
            (prefix / "etc/dl2d/job-api.json").write_text(json.dumps({"url": address}))
        scontrol = prefix / "bin" / "scontrol"
        scontrol.write_text(f"#!/bin/sh\n{slurm_knows or 'exit 1'}\n")
        scontrol.chmod(0o755)
        environment = {
            "PATH": f"{prefix}/bin:/usr/bin:/bin", "PYTHONPATH": packages, "SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH",
            "DL2_HOST": "127.0.0.1", **environ,
        }  # fmt: skip
        done = subprocess.run(
            ["/bin/sh", str(script)], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        return done.returncode, done.stderr

    return run


#: The first thing that dl2-run says of a job that it runs alone; its command then fails.
ALONE = "coordinator of standalone"
COMMAND = "--servers 0 no-such-command"


def test_a_batch_job_with_dl2_lines_that_finds_no_daemon_fails_and_says_what_to_do(batch_job) -> None:
    status, said = batch_job(f"#DL2 model=other\ndl2-run {COMMAND}")
    assert status == 2
    assert "has #DL2 lines or options of dl2d, but no address of a daemon was found" in said
    for hint in ("/opt/dl2d/etc/dl2d/job-api.json", "dl2d check --slurm-probe", "dl2-run --standalone"):
        assert hint in said
    assert ALONE in batch_job(f"#DL2 model=other\ndl2-run --standalone {COMMAND}")[1]


def test_a_script_without_dl2_lines_trains_alone_as_it_does_outside_of_a_resource_manager(batch_job) -> None:
    assert ALONE in batch_job(f"# DL2 lines: #DL2\ndl2-run {COMMAND}")[1]
    assert ALONE in batch_job(f"#DL2 model=other\nenv -u SLURM_JOB_ID dl2-run {COMMAND}")[1]


def test_a_batch_job_with_options_of_dl2d_needs_no_dl2_lines(batch_job) -> None:
    options = {"SLURM_SPANK_DL2_EPOCHS": "7"}
    status, said = batch_job(f"dl2-run {COMMAND}", **options)
    assert (status, "has #DL2 lines or options of dl2d, but no address" in said) == (2, True), said
    assert ALONE in batch_job(f"env -u SLURM_JOB_ID dl2-run {COMMAND}", **options)[1]


def test_a_batch_job_with_dl2_lines_finds_the_daemon_without_variables(batch_job) -> None:
    refused = "credentials of users, which go over https only, but the daemon's address is"
    status, said = batch_job(f"#DL2 model=other\ndl2-run {COMMAND}", address="http://head:8910")
    assert (status, f"{refused} 'http://head:8910'" in said) == (2, True), said
    said = batch_job(f"#DL2 model=other\ndl2-run {COMMAND}", address="http://head:8910", DL2_DAEMON="http://other:1")[1]
    assert f"{refused} 'http://other:1'" in said


@pytest.mark.parametrize(
    ("slurm_knows", "says"),
    [
        ("echo '#DL2 model=other'", "has #DL2 lines or options of dl2d, but no address"),
        ("echo '#!/bin/sh'", ALONE),
        ("echo 'job script retrieval failed: Job script not specified' >&2", ALONE),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "it is not known whether it has #DL2 lines"),
    ],
)
def test_a_script_that_is_no_parent_any_more_is_asked_of_slurm(batch_job, slurm_knows: str, says: str) -> None:
    assert says in batch_job(f"#DL2 model=other\nexec dl2-run {COMMAND}", slurm_knows=slurm_knows)[1]
