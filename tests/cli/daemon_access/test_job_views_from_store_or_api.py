"""Commands of a user who may not read the configuration or the store ask the job API, and show the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cli.conftest import Dl2d, store_url, write_config
from daemon.api.api_world import ApiWorld
from free_ports import free_port
from self_signed import self_signed

from dl2d.cli.daemon_access import job_views_from_store_or_api
from dl2d.core.errors import Denied
from dl2d.core.job_views import MAX_DECISIONS
from dl2d.core.jobs import JobKey
from dl2d.testing import OWNER
from pslite.launch.daemon_connection import daemon_address_file

#: Stands for munge on PATH: the credential says its payload.
MUNGE = '#!/bin/sh\n[ "$1" = -s ] || exit 2\necho "MUNGE:$2"\n'


class VouchedWorld(ApiWorld):
    """A world whose resource manager takes every credential of the ``munge`` above as one of ``uid``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.user_names[OWNER.uid + 1] = "bob"
        self.uid = OWNER.uid
        self.manager.authenticate_user = self._authenticate_user  # type: ignore[method-assign]
        self.first = self.submit(name="first", max_workers=6)
        self.settle()
        self.second = self.submit(name="second", max_workers=4)
        self.settle()

    def _authenticate_user(self, credential: str, payload: str) -> int:
        if credential != f"MUNGE:{payload}":
            raise Denied("the credential was not made for this request to this daemon")
        return self.uid


@pytest.fixture
def world(tmp_path: Path) -> Iterator[VouchedWorld]:
    with closing(VouchedWorld(url=store_url(tmp_path))) as world:
        yield world


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """What an administrator reads; its API is not asked for."""
    return write_config(tmp_path, api={"port": free_port()})


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default path of the configuration, on a machine that has none; munge is there, and no address file."""
    path = tmp_path / "etc" / "dl2d.yaml"
    monkeypatch.setattr(job_views_from_store_or_api, "DEFAULT_PATH", path)
    monkeypatch.setattr(daemon_address_file, "search_files", lambda: (tmp_path / "job-api.json",))
    for name in ("DL2_DAEMON", "DL2_DAEMON_CERTIFICATE", "MUNGE_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "munge").write_text(MUNGE)
    (tmp_path / "bin" / "munge").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return path


def write_address(folder: Path, url: str, certificate: str = "") -> None:
    (folder / "job-api.json").write_text(json.dumps({"url": url, "certificate": certificate}))


COMMANDS: list[Callable[[JobKey], tuple[str, ...]]] = [
    lambda _: ("status",),
    lambda _: ("status", "--all", "--newest", "--limit", "1"),
    lambda job: ("status", job.id),
    lambda job: ("why", job.id),
    lambda job: ("why", "first", "--all"),
    lambda job: ("history", "--job", job.slug),
    lambda job: ("report", job.id),
]


def without_times(text: str) -> str:
    """JSON without when it was made, and without health: the configuration names another daemon."""
    shown = json.loads(text)
    for name in ("at", "daemon", "store_bytes"):
        shown.pop(name, None)
    return json.dumps(shown)


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_the_job_api_shows_what_the_store_shows(
    dl2d: Dl2d, world: VouchedWorld, config: Path, hidden: Path, tmp_path: Path, number: int
):
    write_address(tmp_path, world.api_url)
    world.uid = 0  # other users see the reasons without what may name others
    command = COMMANDS[number](world.first)
    asked, read = dl2d(*command, "-c", hidden, "--json"), dl2d(*command, "-c", config, "--json")
    assert (asked.status, read.status) == (0, 0), asked.err
    if command[0] == "report":  # times until now go on
        assert asked.json.keys() == read.json.keys()
        assert asked.json["all"]["tasks"] == read.json["all"]["tasks"] > 0
    else:
        assert without_times(asked.out) == without_times(read.out)
    assert dl2d(*command, "-c", hidden).status == 0


def test_the_jobs_of_another_user_are_not_shown(dl2d: Dl2d, world: VouchedWorld, hidden: Path, tmp_path: Path):
    write_address(tmp_path, world.api_url)
    world.uid = OWNER.uid + 1
    assert "no job is waiting or running" in dl2d("status", "-c", hidden).out
    for command in (("status", "first"), ("why", "first"), ("history", "-j", "first"), ("report", "first")):
        ran = dl2d(*command, "-c", hidden)
        assert ran.status == 2
        assert "JOB: no such job of yours: 'first'" in ran.err
    ran = dl2d("history", "-c", hidden)
    assert ran.status == 1
    assert "only operators see the history of the cluster" in ran.err


def test_an_operator_sees_the_history_of_the_cluster(
    dl2d: Dl2d, world: VouchedWorld, config: Path, hidden: Path, tmp_path: Path
):
    write_address(tmp_path, world.api_url)
    world.uid = 0
    assert dl2d("history", "-c", hidden, "--json").json == dl2d("history", "-c", config, "--json").json


def test_the_daemon_of_a_variable_is_asked_and_proxies_are_not(
    dl2d: Dl2d, world: VouchedWorld, hidden: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DL2_DAEMON", f"{world.api_url}/")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert "first" in dl2d("status", "-c", hidden).out


def test_a_configuration_that_this_user_may_not_read_is_not_needed(
    dl2d: Dl2d, world: VouchedWorld, hidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Tests may run as root, who reads every file; so what the system says of the file is told."""
    write_address(tmp_path, world.api_url)
    closed = tmp_path / "closed.yaml"
    closed.mkdir()  # read by nobody
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != closed)
    assert "first" in dl2d("status", "-c", closed).out


def test_a_store_that_this_user_may_not_read_is_not_needed(
    dl2d: Dl2d, world: VouchedWorld, hidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_address(tmp_path, world.api_url)
    (tmp_path / "site").mkdir()
    config = write_config(tmp_path / "site")  # whose store was not made
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "first" in dl2d("status", "-c", config).out
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    ran = dl2d("status", "-c", config)
    assert ran.status == 1
    assert "there is no store at" in ran.err


def test_a_configuration_that_was_named_has_to_exist(dl2d: Dl2d, hidden: Path, tmp_path: Path):
    ran = dl2d("status", "-c", tmp_path / "mistyped.yaml")
    assert ran.status == 2
    assert ran.err.startswith(f"dl2d: {tmp_path}/mistyped.yaml does not exist; `dl2d config` prints")


def test_without_an_address_it_is_said_what_is_missing(dl2d: Dl2d, hidden: Path, tmp_path: Path):
    ran = dl2d("status", "-c", hidden)
    assert ran.status == 2
    assert f"{hidden} does not exist" in ran.err
    assert "no address of a daemon was found: " in ran.err
    assert f"has none of {tmp_path}/job-api.json" in ran.err


def test_a_daemon_that_does_not_answer(dl2d: Dl2d, hidden: Path, tmp_path: Path):
    write_address(tmp_path, f"http://127.0.0.1:{free_port()}")
    ran = dl2d("status", "-c", hidden)
    assert ran.status == 1
    assert "daemon: no daemon answers at http://127.0.0.1:" in ran.err
    assert "the daemon does not answer at http://127.0.0.1:" in ran.err


def test_an_address_over_which_credentials_would_go_in_clear_text(dl2d: Dl2d, hidden: Path, tmp_path: Path):
    write_address(tmp_path, "http://head.cluster:8910")
    ran = dl2d("status", "-c", hidden)
    assert ran.status == 2
    assert "over https only, but the daemon's address is 'http://head.cluster:8910'" in ran.err


def test_a_certificate_is_verified(dl2d: Dl2d, hidden: Path, tmp_path: Path):
    certificate = self_signed(tmp_path)
    with closing(VouchedWorld(certificate=certificate)) as world:
        write_address(tmp_path, world.api_url, world.server.certificates)
        assert "first" in dl2d("status", "-c", hidden).out
        write_address(tmp_path, world.api_url)
        ran = dl2d("status", "-c", hidden)
        assert ran.status == 1
        assert f"the certificate of the daemon at {world.api_url} is refused" in ran.err


def test_without_munge_it_is_said_what_it_is_for(
    dl2d: Dl2d, world: VouchedWorld, hidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_address(tmp_path, world.api_url)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    ran = dl2d("status", "-c", hidden)
    assert ran.status == 1
    assert "has to know who asks, but munge is not installed on this node" in ran.err


def test_a_user_who_asks_too_often_is_asked_to_wait_and_the_command_does(
    dl2d: Dl2d, hidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with closing(VouchedWorld(url=store_url(tmp_path), view_burst=1.0)) as world:
        write_address(tmp_path, world.api_url)
        assert dl2d("status", "-c", hidden).status == 0
        with monkeypatch.context() as patched:
            patched.setattr(job_views_from_store_or_api, "_BUSY_SECONDS", 0.5)
            ran = dl2d("status", "-c", hidden)
        assert ran.status == 1
        assert "refused this request for 0.5 s: too many requests of this user; try again in a few seconds" in ran.err
        asked = []

        def authenticate(credential: str, payload: str) -> int:
            asked.append(payload)
            world.now += len(asked) - 1
            return world.uid

        world.manager.authenticate_user = authenticate  # type: ignore[method-assign]
        assert dl2d("status", "-c", hidden).status == 0
        assert len(asked) == 2


def test_decisions_are_made_again_from_the_store_only(dl2d: Dl2d, world: VouchedWorld, hidden: Path, tmp_path: Path):
    write_address(tmp_path, world.api_url)
    ran = dl2d("why", "first", "--recompute", "-c", hidden)
    assert ran.status == 2
    assert "--recompute needs the configuration and the store" in ran.err


def test_of_all_decisions_the_newest_are_shown(dl2d: Dl2d, world: VouchedWorld, hidden: Path, tmp_path: Path):
    write_address(tmp_path, world.api_url)
    for _ in range(MAX_DECISIONS):
        world.tick(world.slot_seconds)
        world.beat()
    shown = dl2d("why", "first", "--all", "-c", hidden, "--json").json["decisions"]
    newest = world.store.decisions(world.first, limit=MAX_DECISIONS)
    assert [each["slot"] for each in shown] == [entry.slot for entry in newest[::-1]]
    assert len(world.store.decisions(world.first)) > len(shown) == MAX_DECISIONS
