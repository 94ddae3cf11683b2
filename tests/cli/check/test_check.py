"""check says what is wrong and how to mend it, and disturbs nothing."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cli.conftest import Dl2d, new_store, write_config
from daemon.api.api_world import ApiWorld
from free_ports import free_port
from self_signed import self_signed
from slurm_fakes import FakeSlurm, node_row

from dl2d.cli.check import check
from dl2d.daemon.key_and_address_files import write_address
from dl2d.store.sql_store import SqlStore
from pslite.launch.daemon_connection.daemon_address_file import DaemonAddress

NODES = {"name": "local", "local": {"nodes": [{"name": "n", "count": 2, "resources": {"cpu": 4, "gpu": 1}}]}}
JOB = {"model": "vgg-16", "epochs": 3, "samples_per_epoch": 10, "worker": {"cpu": 2}, "command": "python t.py"}


def configured(folder: Path, **sections: object) -> Path:
    return write_config(folder, **{"api": {"port": free_port()}, "resource_manager": NODES, **sections})


def wrong(dl2d: Dl2d, config: Path, *files: Path) -> dict[str, str]:
    """What is wrong, by item; exit status and JSON agree on whether anything is."""
    ran = dl2d("check", "--json", "-c", config, *files)
    found = {each["item"]: each["text"] for each in ran.json["findings"] if not each["good"]}
    assert ran.json["good"] == (not found)
    assert ran.status == (2 if found else 0)
    return found


def test_a_good_configuration(dl2d: Dl2d, tmp_path: Path):
    ran = dl2d("check", "-c", configured(tmp_path))
    assert ran.status == 0
    assert all(line.startswith("ok") for line in ran.out.splitlines())
    assert "2 nodes: n-1 cpu=4 gpu=1; n-2 cpu=4 gpu=1" in ran.out
    assert "the first `dl2d run` creates it" in ran.out
    assert list((tmp_path / "state").iterdir()) == []
    here = {"name": "local", "local": {"nodes": [{"name": "here", "resources": {"cpu": 4}}]}}
    assert "  1 node: here cpu=4" in dl2d("check", "-c", configured(tmp_path, resource_manager=here)).out


@pytest.mark.parametrize(
    ("sections", "item", "says"),
    [
        (
            {"policy": {"name": "drff"}},
            "policy.name",
            "'drff' is not installed; installed are dl2, dl2-original, drf, fifo",
        ),
        ({"policy": {"fallback": "none"}}, "policy.fallback", "'none' is not installed"),
        ({"placement": "random"}, "placement", "'random' is not installed; installed are best_fit, load_balance"),
        (
            {"resource_manager": {"name": "yarrn"}},
            "resource_manager.name",
            "'yarrn' is not installed; installed are local",
        ),
        (
            {"resource_manager": {"name": "local", "local": {"nodes": [{"name": "n"}]}}},
            "resource_manager.local",
            "resource_manager.local.nodes[0].resources: missing",
        ),
        (
            {"resource_manager": {"name": "slurm", "slurm": {"partitions": "gpu"}}},
            "resource_manager.slurm",
            "resource_manager.slurm.partitions: unknown key",
        ),
        ({"store": {"url": "mysql://x/y"}}, "store", "mysql"),
        ({"store": {"url": "sqlite:////no/such/folder/x.sqlite"}}, "store", "run `dl2d db upgrade`"),
        ({"nonsense": 1}, "configuration", "nonsense: unknown key"),
    ],
)
def test_what_is_wrong_is_named(dl2d: Dl2d, tmp_path: Path, sections: dict[str, object], item: str, says: str):
    found = wrong(dl2d, configured(tmp_path, **sections))
    assert item in found
    assert says in found[item]


@pytest.mark.parametrize(
    ("mode", "policy", "warns"), [("observe", "drf", True), ("shadow", "dl2", True), ("live", "drf", False)]
)
def test_rows_that_are_deleted_before_versions_are_compared_on_them(
    dl2d: Dl2d, tmp_path: Path, mode: str, policy: str, warns: bool
):
    config = configured(tmp_path, mode=mode, policy={"name": policy}, store={"keep_decisions_days": 7})
    found = warned(dl2d, config).get("store.keep_decisions_days", "")
    assert found.startswith("less than learning.days=28, and older days are not learned from") is warns


@pytest.mark.parametrize(("policy", "warns"), [("dl2-original", True), ("dl2", False)])
def test_a_learner_without_pytorch(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, warns: bool
):
    monkeypatch.setattr(check, "find_spec", lambda _: None)
    config = configured(tmp_path, policy={"name": policy}, learning={"enabled": True})
    said = warned(dl2d, config).get("learning.enabled", "")
    assert said.startswith("the learner needs torch, not installed here; install with: ") is warns


def test_a_missing_configuration(dl2d: Dl2d, tmp_path: Path):
    assert "`dl2d config`" in wrong(dl2d, tmp_path / "none.yaml")["configuration"]


def test_an_old_schema_and_a_newer_one(dl2d: Dl2d, tmp_path: Path):
    config = configured(tmp_path)
    empty = tmp_path / "state" / "dl2d.sqlite"
    empty.touch()
    assert "store" not in wrong(dl2d, config)
    config = configured(tmp_path, store={"url": f"sqlite:///{empty}"})
    assert "run `dl2d db upgrade`" in wrong(dl2d, config)["store"]
    assert empty.stat().st_size == 0


def test_a_key_that_others_may_read(dl2d: Dl2d, tmp_path: Path):
    config = configured(tmp_path)
    secret = tmp_path / "state" / "secret"
    secret.write_bytes(b"k" * 32)
    secret.chmod(0o640)
    assert "chmod 600" in wrong(dl2d, config)["secret"]
    secret.chmod(0o600)
    assert wrong(dl2d, config) == {}
    secret.write_bytes(b"short")
    assert "5 bytes instead of 32; restore it from a backup, or remove it and restart" in wrong(dl2d, config)["secret"]


def test_a_port_that_another_program_has(dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "_ANSWER_SECONDS", 0.1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        answer = wrong(dl2d, configured(tmp_path, api={"port": port}))
    assert f"http://127.0.0.1:{port}" in answer["daemon"]
    assert "set another api.port" in answer["daemon"]


def test_control_characters_in_the_answer_of_another_program_at_the_port_are_escaped(dl2d: Dl2d, tmp_path: Path):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": "\\u001b]0;title\\u0007"}')

    with HTTPServer(("127.0.0.1", 0), Other) as server, ThreadPoolExecutor(1) as beside:
        beside.submit(server.serve_forever)
        config = configured(tmp_path, api={"port": server.server_address[1]})
        try:
            said = [dl2d("check", "-c", config).out, dl2d("status", "-c", config).err]
        finally:
            server.shutdown()
    for text in said:
        assert "\x1b" not in text
        assert "\\x1b]0;title\\x07" in text


@pytest.fixture
def other() -> Iterator[ApiWorld]:
    world = ApiWorld()
    yield world
    world.close()


@pytest.mark.parametrize("key", [None, b"x" * 32], ids=["no key yet", "another key"])
def test_a_port_that_the_daemon_of_another_store_has(dl2d: Dl2d, tmp_path: Path, other: ApiWorld, key: bytes | None):
    config = configured(tmp_path, api={"port": other.server.address[1]})
    if key is not None:
        secret = tmp_path / "state" / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(key)
    assert "belongs to another state_dir than" in wrong(dl2d, config)["daemon"]


def test_the_last_good_tick_and_the_last_error_of_the_own_daemon(dl2d: Dl2d, tmp_path: Path, other: ApiWorld):
    config = configured(tmp_path, api={"port": other.server.address[1]})
    new_store(tmp_path)
    secret = tmp_path / "state" / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(other.credentials.key)
    assert wrong(dl2d, config) == {}
    assert "no good tick yet" in dl2d("check", "-c", config).out
    other.health.completed(other.tick(), 2.0)
    # Where all is well, too, it is the first line.
    said = dl2d("status", "-c", config).err
    assert (said.startswith("daemon: version "), "; last good tick 0 s ago; listing 2 s old\n" in said) == (True, True)
    other.now += 100
    other.health.failed("sinfo: Unable to contact slurm controller")
    other.now += 5
    found = wrong(dl2d, config)["daemon"]
    assert "last good tick 1 min 45 s ago; listing 1 min 47 s old; the last tick failed" in found
    assert "last error 5 s ago: sinfo: Unable to contact slurm controller" in found
    ran = dl2d("status", "-c", config)
    assert (ran.status, ran.err) == (0, f"daemon: {found}\n")
    shown = dl2d("status", "--json", "-c", config).json["daemon"]
    assert (shown["runs"], shown["last_tick_seconds"], shown["last_error_seconds"]) == (True, 105, 5)
    assert shown["listing_seconds"] == 107
    # Ticks that wait for a known time are no problem.
    other.health.waits("containers have up to 4.0 s")
    assert wrong(dl2d, config) == {}
    assert "; waiting: containers have up to 4.0 s; last error" in dl2d("check", "-c", config).out
    ran = dl2d("status", "-c", config)
    assert (ran.status, "; waiting: containers have" in ran.err) == (0, True)
    assert other.client.get("/v1/health").json()["status"] == "waiting"
    # It goes on: the error stays known.
    other.health.completed(other.tick(1.0))
    assert wrong(dl2d, config) == {}
    assert "last error 6 s ago" in dl2d("check", "-c", config).out


def test_a_certificate_that_jobs_refuse_is_told(dl2d: Dl2d, tmp_path: Path):
    certificate, key = map(str, self_signed(tmp_path, "127.0.0.1"))
    api = {"port": free_port(), "certificate": certificate, "certificate_key": key}
    assert "api.certificate" not in wrong(dl2d, configured(tmp_path, api=api))
    told = wrong(dl2d, configured(tmp_path, api={**api, "advertise": "https://head.cluster:8910"}))["api.certificate"]
    assert "reach the daemon as head.cluster, refuse " in told
    assert "Hostname mismatch" in told


def test_what_run_would_fail_on_is_told(dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = configured(tmp_path, api={"port": free_port(), "host": "192.0.2.1"})
    assert "Cannot assign requested address" in wrong(dl2d, config)["api"]
    (tmp_path / "file").touch()
    config = configured(tmp_path, state_dir=str(tmp_path / "file" / "state"))
    assert f"{tmp_path / 'file'} is not a folder" in wrong(dl2d, config)["state_dir"]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    everybodys = configured(tmp_path, state_dir=str(tmp_path / "open"))
    assert "is writable for all users (mode 0777)" in wrong(dl2d, everybodys)["state_dir"]
    config = configured(tmp_path, state_dir=str(tmp_path / "file" / "state"))
    ran = dl2d("run", "-c", config)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("dl2d: state_dir: ")
    certificate, key = self_signed(tmp_path)
    for bad in ((tmp_path / "none.pem", key), (key, certificate), (certificate, tmp_path / "file")):
        config = configured(
            tmp_path, api={"port": free_port(), "certificate": str(bad[0]), "certificate_key": str(bad[1])}
        )
        assert str(bad[0]) in wrong(dl2d, config)["api.certificate"]
        ran = dl2d("run", "-c", config)
        assert (ran.status, ran.err.count("\n")) == (2, 1)
    config = configured(tmp_path)
    (tmp_path / "state" / "local").mkdir()
    (tmp_path / "state" / "local").chmod(0o777)
    assert "writable by nobody else" in wrong(dl2d, config)["resource_manager.local"]
    ran = dl2d("run", "-c", config)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    (tmp_path / "state" / "local").chmod(0o700)
    config = configured(tmp_path, policy={"fallback": "dl2-original"})
    assert "name a checkpoint" in wrong(dl2d, config)["policy.fallback"]
    ran = dl2d("run", "-c", config)
    assert (ran.status, ran.err.count("\n")) == (1, 1)
    access = os.access
    monkeypatch.setattr(os, "access", lambda place, mode: access(place, mode) and Path(place) != tmp_path / "state")
    config = configured(tmp_path)
    cannot = f"uid {os.getuid()} cannot write to {tmp_path / 'state'}: "
    for_users = "; to check a job, name its file: dl2d check train.sh"
    assert wrong(dl2d, config) == {"state_dir": f"{cannot}run this command as the daemon's account{for_users}"}
    ran = dl2d("run", "-c", config)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert f"state_dir: {cannot}chown it to the daemon's account, or set state_dir to another folder" in ran.err


def test_a_disk_that_is_nearly_full(dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=1 << 20))
    assert "has 10 MiB of free space" in wrong(dl2d, configured(tmp_path))["state_dir"]


def test_slurm_that_does_not_answer(dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("sbatch", "squeue", "sinfo", "scontrol", "scancel", "munge", "unmunge"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    config = configured(tmp_path, resource_manager={"name": "slurm", "slurm": {"backend": "command"}})
    assert "Unable to contact slurm controller" in wrong(dl2d, config)["slurm"]
    assert "command: as configured" in dl2d("check", "-c", config).out


def warned(dl2d: Dl2d, config: Path) -> dict[str, str]:
    """What is warned of, by item."""
    findings = dl2d("check", "--json", "-c", config).json["findings"]
    return {each["item"]: each["text"] for each in findings if each["warning"]}


def test_what_slurm_lacks_for_a_daemon_that_is_not_root(dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.answer("sinfo", rows=[node_row("n1")], **{"--version": {"stdout": "slurm 26.05.5\n"}})
    (tmp_path / "bin" / "munge").symlink_to("unmunge")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    slurmrestd = {"backend": "rest", "slurmrestd": f"unix:{tmp_path / 'rest'}"}
    config = configured(tmp_path, resource_manager={"name": "slurm", "slurm": slurmrestd})
    assert f"there is no socket {tmp_path / 'rest'}: start slurmrestd" in wrong(dl2d, config)["slurm"]
    config = configured(tmp_path, resource_manager={"name": "slurm", "slurm": {"backend": "command"}})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert warned(dl2d, config)["slurm users"].startswith("uid 1000 has no permission to submit jobs of other users")


@pytest.mark.parametrize(
    ("kind", "rules", "warns"),
    [
        ("priority/basic", [{"partition": "gpu", "yield": "higher-priority"}], True),
        ("priority/basic", [], False),
        ("priority/basic", [{"partition": "gpu", "min_free": 1}], False),
        ("priority/multifactor", [{"partition": "gpu", "yield": "higher-priority"}], False),
    ],
)
def test_priorities_that_only_tell_who_came_first(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rules: list[dict[str, object]], warns: bool
):
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.answer("sinfo", rows=[node_row("n1")], **{"--version": {"stdout": "slurm 26.05.5\n"}})
    slurm.answer("scontrol", stdout=f"ClusterName = fake\nMinJobAge = 300 sec\nPriorityType            = {kind}\n")
    (tmp_path / "bin" / "munge").symlink_to("unmunge")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    manager = {"name": "slurm", "slurm": {"backend": "command", "sharing": rules}}
    said = warned(dl2d, configured(tmp_path, resource_manager=manager)).get("slurm priorities", "")
    assert ("use yield: always in resource_manager.slurm.sharing" in said) is warns


@pytest.mark.parametrize(("requeues", "warns"), [("JobRequeue = 0\n", True), ("JobRequeue = 1\n", False), ("", False)])
def test_slurm_that_requeues_no_job_by_itself(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeues: str, warns: bool
):
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.answer("sinfo", rows=[node_row("n1")], **{"--version": {"stdout": "slurm 26.05.5\n"}})
    slurm.answer("scontrol", stdout=f"ClusterName = fake\n{requeues}MinJobAge = 300 sec\n")
    (tmp_path / "bin" / "munge").symlink_to("unmunge")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    config = configured(tmp_path, resource_manager={"name": "slurm", "slurm": {"backend": "command"}})
    assert ("set JobRequeue=1" in warned(dl2d, config).get("slurm requeue", "")) is warns


@pytest.mark.parametrize(("setting", "warns"), [("", True), ("cpu,gpu", True), ("cpu", False)])
def test_partitions_that_give_each_node_to_one_user(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, warns: bool
):
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.answer("sinfo", rows=[node_row("n1")], **{"--version": {"stdout": "slurm 26.05.5\n"}})
    partitions = "PartitionName=cpu ExclusiveUser=NO State=UP\nPartitionName=gpu ExclusiveUser=YES State=UP\n"
    slurm.answer("scontrol", stdout=f"ClusterName = fake\nMinJobAge = 300 sec\n{partitions}")
    (tmp_path / "bin" / "munge").symlink_to("unmunge")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    manager = {"name": "slurm", "slurm": {"backend": "command", "partition": setting}}
    said = warned(dl2d, configured(tmp_path, resource_manager=manager)).get("slurm partitions", "")
    assert said.startswith("ExclusiveUser=YES in gpu: ") is warns


#: As Slurm 22.05 prints partitions, without the fields that do not matter.
PARTITIONS = """\
PartitionName=gpu ExclusiveUser=NO PreemptMode=OFF State=UP TotalCPUs=16 TotalNodes=2
PartitionName=prod-a ExclusiveUser=NO PreemptMode=GANG,SUSPEND State=UP TotalCPUs=32 TotalNodes=4
"""
KEY = "resource_manager.slurm"


@pytest.fixture
def slurm_says(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, object]], list[tuple[str, str, str]]]:
    """What ``check`` finds besides what is good with some settings, where Slurm has two partitions."""
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.answer("sinfo", rows=[node_row("n1")], **{"--version": {"stdout": "slurm 22.05.8\n"}})
    configuration = "ClusterName = fake\nMinJobAge = 300 sec\nSlurmUser = slurm(64030)\n"
    slurm.answer("scontrol", stdout=configuration, **{"--all": {"stdout": PARTITIONS}})
    (tmp_path / "bin" / "munge").symlink_to("unmunge")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def ask(settings: dict[str, object]) -> list[tuple[str, str, str]]:
        manager = {"name": "slurm", "slurm": {"backend": "command", **settings}}
        ran = dl2d("check", "--json", "-c", configured(tmp_path, resource_manager=manager))
        found = [
            (each["item"], "warn" if each["good"] else "WRONG", each["text"])
            for each in ran.json["findings"]
            if (each["warning"] or not each["good"]) and each["item"].startswith(("resource_manager", "slurm"))
        ]
        assert ran.status == (2 if any(word == "WRONG" for _, word, _ in found) else 0)
        return found

    return ask


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"partition": "gpu", "default_memory_mib": 4000, "sharing": [{"min_free": 2}]}, []),
        (
            {"partition": "gpu,gpux"},
            [(f"{KEY}.partition", "WRONG", "Slurm has no partition gpux (did you mean gpu?); name one of gpu, prod-a")],
        ),
        (
            {"partition": "gpu", "sharing": [{"partition": "prod-*"}, {"partition": "pord-*", "min_free": 9}]},
            [
                (
                    f"{KEY}.sharing[1].partition",
                    "warn",
                    "no partition matches 'pord-*', so the rule has no effect; Slurm",
                )
            ],
        ),
        (
            {"partition": "gpu", "munge_socket": "/no/such/socket"},
            [(f"{KEY}.munge_socket", "WRONG", "/no/such/socket: No such file or directory; start munged with this")],
        ),
        (
            {"partition": "gpu", "sharing": [{"partition": "prod-a", "min_free": 9}, {"min_free": 3}]},
            [(f"{KEY}.sharing[1].min_free", "warn", "3 is more than the number of nodes of gpu (2), so elastic jobs")],
        ),
        (
            {"partition": "gpu", "default_memory_mib": 4001},
            [(f"{KEY}.default_memory_mib", "warn", "4001 MiB is more than any node has (4000 MiB at most), so jobs")],
        ),
        (
            {},
            [
                ("slurm partitions", "warn", "PreemptMode has SUSPEND or GANG in prod-a: suspended tasks stand still,"),
            ],
        ),
    ],
)
def test_settings_that_do_not_fit_the_cluster(
    slurm_says: Callable[[dict[str, object]], list[tuple[str, str, str]]],
    settings: dict[str, object],
    found: list[tuple[str, str, str]],
):
    said = slurm_says(settings)
    assert [(item, word) for item, word, _ in said] == [(item, word) for item, word, _ in found]
    for (_, _, text), (_, _, begin) in zip(said, found, strict=True):
        assert text.startswith(begin)


@pytest.mark.parametrize(
    ("tested", "bare", "found"),
    [
        ({}, {}, []),
        (
            {"status": 255, "stderr": "sbatch: unrecognized option '--reservatoin=ml'\n"},
            {},
            [("WRONG", "unrecognized option '--reservatoin=ml'; no task can be submitted: correct --reservatoin=ml")],
        ),
        (
            {"status": 1, "stderr": "allocation failure: Requested reservation is invalid\n"},
            {},
            [
                (
                    "warn",
                    "allocation failure: Requested reservation is invalid; tasks of jobs may be refused in the same",
                )
            ],
        ),
        # Root may submit no jobs.
        ({"status": 1, "stderr": "allocation failure: Invalid account\n"}, {"status": 1}, []),
    ],
)
def test_what_sbatch_says_of_its_options(
    slurm_says: Callable[[dict[str, object]], list[tuple[str, str, str]]],
    tmp_path: Path,
    tested: dict[str, object],
    bare: dict[str, object],
    found: list[tuple[str, str]],
):
    (tmp_path / "bin" / "sbatch.answer").write_text(ascii({"--test-only": tested, "--wrap=true": bare}))
    said = slurm_says({"partition": "gpu", "sbatch_options": ["--reservatoin=ml"]})
    assert [(item, word) for item, word, _ in said] == [(f"{KEY}.sbatch_options", word) for word, _ in found]
    for (_, _, text), (_, says) in zip(said, found, strict=True):
        assert says in text


def test_a_munge_socket_that_is_none_or_is_one(
    slurm_says: Callable[[dict[str, object]], list[tuple[str, str, str]]], tmp_path: Path
):
    place = tmp_path / "munge"
    place.touch()
    ((_, word, text),) = slurm_says({"partition": "gpu", "munge_socket": str(place)})
    assert (word, f"{place}: it is not a socket; " in text) == ("WRONG", True)
    place.unlink()
    with socket.socket(socket.AF_UNIX) as munged:
        munged.bind(str(place))
        assert slurm_says({"partition": "gpu", "munge_socket": str(place)}) == []


RECORDED = Path(__file__).parents[2] / "slurm" / "recorded"
#: As Slurm 22.05 prints records, without the fields that do not matter.
LIMITS = """\
ClusterName=lab Account=lab UserName= Partition= GrpWall=N(0.00) GrpTRES=cpu=2(0),mem=N(0),node=4(1) \
GrpTRESMins=cpu=N(0),gres/gpu=900(3) GrpTRESRunMins=cpu=N(0),mem=N(0),node=N(0) MaxJobs=
ClusterName=lab Account=lab UserName=ann(7) Partition= GrpTRES=cpu=2(0),node=N(4) GrpTRESMins=cpu=N(9) MaxJobs=7(2)
QOS=long(9) GrpWall=600.00(1.00) GrpTRES=cpu=N(1),node=N(1) GrpTRESMins=cpu=N(0) GrpTRESRunMins=cpu=50(10),mem=N(0) \
Account Limits= lab={MaxJobsPA=N(1) MaxTRESPA=cpu=4(1),node=N(1)} User Limits= 7={MaxJobsPU=N(1) MaxTRESPU=node=1(1)}
"""


@pytest.mark.parametrize(
    ("enforced", "records", "warns"),
    [
        ("associations,limits,qos", LIMITS, True),
        ("associations,qos", LIMITS, False),
        ("associations,limits,qos", LIMITS.splitlines()[1].replace("MaxJobs=7", "MaxJobs=17"), False),
        ("none", "", False),
    ],
)
def test_limits_that_dl2d_does_not_ask_for(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enforced: str, records: str, warns: bool
):
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.answer("sinfo", rows=[node_row("n1")], **{"--version": {"stdout": "slurm 26.05.5\n"}})
    values = f"AccountingStorageEnforce = {enforced}\nClusterName = fake\nMinJobAge = 300 sec\n"
    slurm.answer("scontrol", stdout=values, **{"--oneliner": {"stdout": records}})
    (tmp_path / "bin" / "munge").symlink_to("unmunge")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    manager = {"name": "slurm", "slurm": {"backend": "command"}}
    said = warned(dl2d, configured(tmp_path, resource_manager=manager)).get("slurm limits", "")
    whole = "GrpTRES=node of account lab, GrpTRESMins of account lab, GrpWall of QOS long"
    assert said.startswith(f"Slurm limits the number of nodes or the minutes ({whole}") is warns
    assert bool(said) is warns
    few = records.replace("GrpWall=N", "GrpJobs=4(2) GrpWall=N").replace("MaxJobsPU=N(1)", "MaxJobsPU=8(1)")
    many = few.replace("=4(2)", "=17(2)").replace("=8(1)", "=17(1)")
    for text, warns_of_jobs in ((few, warns), (many, False)):
        slurm.answer("scontrol", stdout=values, **{"--oneliner": {"stdout": text}})
        said = warned(dl2d, configured(tmp_path, resource_manager=manager)).get("slurm limits", "")
        of_jobs = "Slurm limits the number of running jobs (GrpJobs=4 of account lab, MaxJobs=7 of user ann in account "
        of_jobs += "lab, MaxJobsPU=8 of QOS long): "
        assert (of_jobs in said) is warns_of_jobs
    for release in ("22.05", "26.05"):
        recorded = RECORDED / f"assoc_mgr-{release}.txt"
        slurm.answer("scontrol", stdout=values, **{"--oneliner": {"stdout": recorded.read_text()}})
        said = warned(dl2d, configured(tmp_path, resource_manager=manager)).get("slurm limits", "")
        of_jobs = "(MaxJobs=7 of user root in account root, MaxJobs=7 of user root in account phys, "
        assert (f"{of_jobs}MaxJobsPU=5 of QOS small): " in said) is ("limits" in enforced)


@pytest.fixture
def address_file() -> Iterator[Path]:
    """In a folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "shared" / "job-api.json"


def test_jobs_that_would_not_find_the_daemon(dl2d: Dl2d, tmp_path: Path, other: ApiWorld, address_file: Path):
    file, port = address_file, other.server.address[1]

    def config(**api: object) -> Path:
        return configured(tmp_path, api={"port": port, "address_file": str(file), **api})

    secret = tmp_path / "state" / "secret"
    new_store(tmp_path)
    secret.touch(mode=0o600)
    secret.write_bytes(other.credentials.key)
    found = warned(dl2d, config())
    assert f"jobs on other machines cannot reach http://127.0.0.1:{port}: set api.host to 0.0.0.0" in found["api.host"]
    assert "does not exist although the daemon runs" in found["api.address_file"]
    assert "set api.certificate" in warned(dl2d, config(advertise="http://head:8910"))["api.certificate"]
    write_address(file, DaemonAddress("https://head:8910"))
    assert list(warned(dl2d, config(advertise="https://head:8910"))) == []
    moved = warned(dl2d, config(advertise="https://new:8910"))["api.address_file"]
    assert moved == f"{file} says https://head:8910, the configuration https://new:8910: restart the daemon"
    assert "cannot reach http://localhost:1" in warned(dl2d, config(advertise="http://localhost:1"))["api.advertise"]
    # Warnings are shown as such, and are no errors.
    ran = dl2d("check", "-c", config(advertise="https://new:8910"))
    assert (ran.status, [line[:6] for line in ran.out.splitlines() if "api.address_file" in line]) == (0, ["warn  "])


def test_an_address_file_that_jobs_cannot_read_or_do_not_trust(dl2d: Dl2d, tmp_path: Path, address_file: Path):
    file = address_file
    config = configured(
        tmp_path, api={"address_file": str(file), "advertise": "https://head:8910", "port": free_port()}
    )
    assert warned(dl2d, config) == wrong(dl2d, config) == {}, "the daemon writes it when it starts"
    write_address(file, DaemonAddress("https://head:8910"))
    file.chmod(0o666)
    assert "others than its owner may write it" in wrong(dl2d, config)["api.address_file"]
    file.chmod(0o640)
    assert f"make {file} readable for all users" in wrong(dl2d, config)["api.address_file"]
    file.chmod(0o644)
    file.parent.chmod(0o750)
    assert f"make {file.parent} readable for all users" in wrong(dl2d, config)["api.address_file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_owner_of_an_address_file_is_told_that_jobs_of_others_do_not_use_it(
    dl2d: Dl2d, tmp_path: Path, address_file: Path, monkeypatch: pytest.MonkeyPatch
):
    file, owner = address_file, 65_432
    config = configured(
        tmp_path, api={"address_file": str(file), "advertise": "https://head:8910", "port": free_port()}
    )
    write_address(file, DaemonAddress("https://head:8910", uid=owner))
    os.chown(file, owner, 0)
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert warned(dl2d, config) == {}
    file.parent.chmod(0o1777)
    said = warned(dl2d, config)["api.address_file"]
    assert said.startswith(f"jobs of other users do not use {file}: it belongs to uid {owner}, which is neither root")
    assert f"can change {file.parent}: let root or uid {owner} own this folder" in said


def test_a_resource_manager_without_a_probe(dl2d: Dl2d, tmp_path: Path):
    ran = dl2d("check", "--slurm-probe", "-c", configured(tmp_path))
    assert (ran.status, "the resource manager local has no probe" in ran.out) == (2, True)


def test_a_running_daemon_is_not_disturbed(dl2d: Dl2d, tmp_path: Path):
    config = configured(tmp_path)
    with closing(SqlStore(new_store(tmp_path))) as store:
        store.acquire("a daemon")
        assert wrong(dl2d, config) == {}
        store.next_job_id("x")


def test_a_broken_plugin_is_named(dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = tmp_path / "site" / "bad-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[dl2d.policies]\nbroken = no_such_module:Policy\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = wrong(dl2d, configured(tmp_path))
    assert list(found) == ["dl2d.policies"]
    assert "broken (no_such_module:Policy) cannot be loaded" in found["dl2d.policies"]


# Job files


def job_file(folder: Path, **changes: object) -> Path:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump({**JOB, **changes}))
    return file


def test_job_files(dl2d: Dl2d, tmp_path: Path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#DL2 model=vgg-16 epochs=3\n#DL2 samples_per_epoch=5 worker=cpu:1\npython t.py\n")
    ran = dl2d("check", "-c", configured(tmp_path), job_file(tmp_path), script)
    assert ran.status == 0
    assert ran.out.count("vgg-16: vgg-16, 3 epochs, 1 to 16 workers, 1 to 16 PSs") == 2


def test_options_of_sbatch_in_a_batch_script(dl2d: Dl2d, tmp_path: Path):
    script = tmp_path / "job.sh"
    lines = (
        "#!/bin/sh",
        "#SBATCH --job-name=vgg --dl2-epochs=4 --dl2-sizes 1,2,7  # wins over the line below",
        "#DL2 model=vgg-16 epochs=3",
        "#SBATCH --dl2-samples-per-epoch=5 --dl2-worker='cpu:1' --dl2-arch=ps --dl2-max-ps=2",
        "python t.py",
        "#SBATCH --dl2-epochs=5",
    )
    script.write_text("\n".join(lines))
    ran = dl2d("check", "-c", configured(tmp_path), script)
    assert ran.status == 0
    assert "vgg-16, 4 epochs, 1 to 16 workers, 1 to 2 PSs" in ran.out
    assert "of the options of sbatch, these do not hold for tasks: --job-name\n" in ran.out


@pytest.mark.parametrize(
    ("options", "alone"),
    [
        ("-J x -c 1 --mem=1G --gres gpu:2 -L matlab --mail-type=END -J y",
         "--job-name, --cpus-per-task, --mem, --gres, --licenses, --mail-type"),
        ("-A a -q q -p p -C c -x n1 -t 5 -a 1-3 -D / --nice=5 --wckey=w --reservation r --export=ALL", ""),
        ("--dl2-epochs=3", ""),
    ],
)  # fmt: skip
def test_options_of_sbatch_that_do_not_hold_for_tasks_are_named(
    dl2d: Dl2d, tmp_path: Path, options: str, alone: str
) -> None:
    script = tmp_path / "job.sh"
    needs = "#DL2 model=vgg-16 epochs=3 samples_per_epoch=5 worker=cpu:1"
    script.write_text(f"#!/bin/sh\n#SBATCH {options}\n{needs}\npython t.py\n#SBATCH --mem-per-gpu=1\n")
    ran = dl2d("check", "-c", configured(tmp_path), script)
    assert (ran.status, ran.out.partition("these do not hold for tasks: ")[2].strip()) == (0, alone)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "vgg"}, "model: unknown model type 'vgg' (did you mean vgg-16?)"),
        ({"worker": {"cpu": 5}}, "worker: no node is large enough for one (cpu: wanted 5, had 4 on n-1)"),
        ({"command": ""}, "command: missing"),
        ({"epochs": -1}, "epochs: expected a number, more than 0"),
    ],
)
def test_bad_job_files(dl2d: Dl2d, tmp_path: Path, changes: dict[str, object], says: str):
    file = job_file(tmp_path, **changes)
    assert wrong(dl2d, configured(tmp_path), file)[str(file)].startswith(says)


def test_all_roles_that_fit_on_no_node_are_told(dl2d: Dl2d, tmp_path: Path):
    file = job_file(tmp_path, worker={"cpu": 5}, ps={"cpu": 6})
    said = wrong(dl2d, configured(tmp_path), file)[str(file)]
    assert said.startswith("worker: no node is large enough for one (cpu: wanted 5, had 4 on n-1); ps: no node is ")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("#DL2 epochs", "'epochs' is not key=value"),
        ("#DL2 epochs=3", "missing"),
        ("echo nothing", "has no #DL2 lines"),
        ("#SBATCH --dl2-epochs", "--dl2-epochs: has no value"),
        ("#SBATCH --dl2-epochs=x", "epochs: expected a number"),
        ("#SBATCH --dl2-epoch=3", "missing (is 'epoch' meant?)"),
        ("#SBATCH --dl2-epochs='3", "No closing quotation"),
        (
            "#SBATCH --exclusive\n#DL2 model=vgg-16 epochs=3 samples_per_epoch=5 worker=cpu:1",
            "--exclusive of sbatch ca",
        ),
    ],
)
def test_bad_scripts(dl2d: Dl2d, tmp_path: Path, line: str, says: str):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{line}\n")
    assert says in wrong(dl2d, configured(tmp_path), script)[str(script)]


def test_job_files_are_checked_even_where_the_configuration_is_bad(dl2d: Dl2d, tmp_path: Path):
    file = job_file(tmp_path, epochs=0)
    found = wrong(dl2d, tmp_path / "none.yaml", file)
    assert set(found) == {"configuration", str(file)}


def test_a_user_who_checks_a_job_file_sees_nothing_of_the_daemons_own_checks(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, file = configured(tmp_path, jobs={"models": ["bert"]}), job_file(tmp_path)
    state = tmp_path / "state"
    monkeypatch.setattr("os.access", lambda path, mode, real=os.access: path != state and real(path, mode))
    assert "vgg-16" in wrong(dl2d, config, file)[str(file)], "the site's models hold"
    ran = dl2d("check", "--json", "-c", config, job_file(tmp_path, model="bert"))
    assert ran.status == 0
    assert [each["item"] for each in ran.json["findings"]] == ["configuration", str(file)]
    without_file = dl2d("check", "-c", config)
    assert (without_file.status, len(without_file.out.splitlines())) == (2, 1)
    assert "to check a job, name its file: dl2d check train.sh" in without_file.out


def test_a_user_who_may_not_read_the_configuration_checks_a_job_file(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, file = configured(tmp_path), job_file(tmp_path)
    real = Path.read_text

    def read(path: Path, *given: str | None, **named: str | None) -> str:
        if path == config:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr("os.access", lambda path, mode, real=os.access: path != config and real(path, mode))
    ran = dl2d("check", "-c", config, file)
    assert ran.status == 0
    assert len(ran.out.splitlines()) == 2
    assert "files are checked without the site's models and limits" in ran.out
    assert "cannot be read" in wrong(dl2d, config)["configuration"]
    assert str(file) in wrong(dl2d, config, job_file(tmp_path, epochs=0))


def test_the_mode_and_what_is_looked_on_at(dl2d: Dl2d, tmp_path: Path):
    def said(*rules: dict[str, str]) -> dict[str, tuple[bool, str]]:
        manager = {"name": "slurm", "slurm": {"watch": list(rules)}}
        config = write_config(tmp_path, mode="observe", resource_manager=manager)
        found = dl2d("check", "--json", "-c", config).json["findings"]
        return {each["item"]: (each["good"], each["text"]) for each in found}

    item = "resource_manager.slurm.watch"
    assert said()["mode"][1].startswith("observe: dl2d records what the site's scheduler does")
    assert said()[item] == (True, "no rules: only jobs that register are recorded")
    assert said({"partition": "gpu", "model": "bert"})[item] == (True, "rules: 1")
    assert said({"partition": "gpu", "model": "brt"})[item] == (False, "jobs.models lacks brt; add it there")
    assert said({"partition": "gpu"})["resource_manager.slurm"] == (
        False,
        "resource_manager.slurm.watch[0].model: missing",
    )
