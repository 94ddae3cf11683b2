"""submit and cancel, against the real job API; and through a stand-in for sbatch."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from cli.conftest import Dl2d, store_url, write_config
from daemon.api.api_world import ApiWorld
from free_ports import free_port
from self_signed import self_signed
from yarn.fake_yarn import FakeYarn
from yarn.rm_answers import client_of

from dl2d.cli.daemon_access import job_api_client
from dl2d.cli.jobs.submit import job_environment
from dl2d.config.settings import load_settings
from dl2d.core.errors import Waiting
from dl2d.core.job_request_parser import RequestRules
from dl2d.core.jobs import Job, JobState
from dl2d.core.resource_manager import RmListing
from dl2d.core.store import JobChange
from dl2d.daemon.key_and_address_files import write_address
from dl2d.store.sql_store import SqlStore
from dl2d.testing import make_nodes
from dl2d_yarn.rest_client import RestClient
from pslite.launch.daemon_connection.daemon_address_file import DaemonAddress
from pslite.launch.daemon_connection.daemon_http import certificate_text

JOB = {
    "name": "digits",
    "model": "digits-mlp",
    "epochs": 3,
    "samples_per_epoch": 1500,
    "worker": {"cpu": 2, "gpu": 1},
    "command": ["python", "train.py", "--title", "two words"],
}


@dataclass(frozen=True)
class Site:
    """A configuration, and the job API that it leads to."""

    folder: Path
    config: Path
    world: ApiWorld

    @property
    def store(self) -> SqlStore:
        return self.world.store

    def job(self, **changes: object) -> Path:
        file = self.folder / "job.yaml"
        file.write_text(yaml.safe_dump({**JOB, **changes}))
        return file

    def only_job(self) -> Job:
        (job,) = self.store.jobs(live=False)
        return job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def site(folder: Path) -> Iterator[Site]:
    rules = RequestRules(frozenset({"digits-mlp"}), 8, 8)
    with closing(ApiWorld(cluster_nodes=make_nodes(1), url=store_url(folder), request_rules=rules)) as world:
        secret = folder / "state" / "secret"
        secret.write_bytes(world.credentials.key)
        secret.chmod(0o600)
        jobs = {"models": ["digits-mlp"], "max_workers": 8}
        yield Site(folder, write_config(folder, api={"port": world.server.address[1]}, jobs=jobs), world)


def test_a_job_is_submitted_with_command_folder_and_environment(dl2d: Dl2d, site: Site, monkeypatch):
    monkeypatch.setenv("LEARNING_RATE", "0.1")
    monkeypatch.setenv("FORGOTTEN", "0.1")
    monkeypatch.setenv("DL2_ENV", "LEARNING_*")
    monkeypatch.setenv("DL2_ROLE", "worker")
    ran = dl2d("submit", site.job(env={"SEED": 7}), "-c", site.config)
    assert ran.status == 0
    assert "FORGOTTEN" in ran.err
    assert ran.out == "submitted job 1 (digits); `dl2d status 1` shows its progress\n"
    job = site.only_job()
    assert job.launch.argv == ("python", "train.py", "--title", "two words")
    assert job.launch.cwd == str(site.folder)
    environment = dict(job.launch.env)
    assert (environment["LEARNING_RATE"], environment["SEED"]) == ("0.1", "7")
    assert not any(name.startswith("DL2_") for name in environment)
    assert site.world.woken


def test_submission_as_json_with_overrides(dl2d: Dl2d, site: Site):
    (site.folder / "work").mkdir()
    ran = dl2d("submit", site.job(cwd="work"), "--set", "epochs=7", "--set", "name=other", "--json", "-c", site.config)
    job = site.only_job()
    assert ran.json == {"job": job.key.slug, "id": "1", "name": "other"}
    assert job.request.epochs == 7
    assert job.launch.cwd == str(site.folder / "work")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "vgg-16"}, "model: unknown model type 'vgg-16'"),
        ({"epochs": 0}, "epochs: expected a number, more than 0"),
        ({"gpus": 4}, "gpus: unknown key"),
        ({"worker": {"gpu": 3}}, "worker: no node is large enough for one (gpu: wanted 3, had 2 on n1)"),
        ({"min_workers": 9}, "min_workers: 9 is more than the site's limit of 8"),
        ({"architecture": "ring"}, "architecture: expected one of allreduce, ps, got 'ring'"),
        ({"cwd": "/no/such/folder"}, "cwd: /no/such/folder is not a folder"),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_kept(dl2d: Dl2d, site: Site, changes: dict[str, object], says: str):
    ran = dl2d("submit", site.job(**changes), "-c", site.config)
    assert ran.status == 2
    assert says in ran.err
    assert [line for line in ran.err.splitlines() if line.startswith("dl2d: ")] == ran.err.splitlines()[-1:]
    assert site.store.jobs(live=False) == ()


def test_the_same_name_twice(dl2d: Dl2d, site: Site):
    dl2d("submit", site.job(), "-c", site.config)
    ran = dl2d("submit", site.job(), "-c", site.config)
    assert ran.status == 2
    assert "job 1 is called 'digits' already and has not ended" in ran.err
    assert len(site.store.jobs(live=False)) == 1


def test_a_daemon_that_has_just_started_is_asked_again(dl2d: Dl2d, site: Site, monkeypatch: pytest.MonkeyPatch):
    errors = [Waiting("containers have up to 7.2 s")] * 3
    listing = site.world.manager.listing

    def refuse_first(*arguments: float | None) -> RmListing:
        if errors:
            raise errors.pop()
        return listing(*arguments)

    monkeypatch.setattr(site.world.manager, "listing", refuse_first)
    with monkeypatch.context() as patched:
        patched.setattr(job_api_client, "_START_SECONDS", 0.0)
        ran = dl2d("submit", site.job(), "-c", site.config)
    assert (ran.status, len(errors)) == (1, 2)
    assert "the daemon has just started and accepts no requests yet (containers have up to 7.2 s" in ran.err
    assert dl2d("submit", site.job(), "-c", site.config).status == 0
    assert site.only_job().request.name == "digits"


def test_keys_of_servers_that_an_all_reduce_job_has_are_named(dl2d: Dl2d, site: Site):
    ran = dl2d("submit", site.job(architecture="allreduce", max_ps=2, ps="cpu:1"), "-c", site.config)
    assert f"{site.folder / 'job.yaml'}: ps, max_ps: no effect with architecture: allreduce" in ran.err
    assert site.only_job().request.max_ps == 0
    assert "no effect" not in dl2d("submit", site.job(name="other", max_ps=2), "-c", site.config).err


def test_no_daemon(dl2d: Dl2d, site: Site):
    config = write_config(site.folder, api={"port": free_port()})
    ran = dl2d("submit", site.job(), "--set", "model=vgg-16", "-c", config)
    assert ran.status == 1
    assert "the daemon does not answer at http://127.0.0.1:" in ran.err
    assert "systemctl status dl2d" in ran.err


def test_a_daemon_that_does_not_answer_in_time_may_have_taken_the_job(
    dl2d: Dl2d, site: Site, monkeypatch: pytest.MonkeyPatch
):
    over, listing = threading.Event(), site.world.manager.listing

    def wait() -> RmListing:
        over.wait(60)
        return listing()

    monkeypatch.setattr(site.world.manager, "listing", wait)
    monkeypatch.setattr(job_api_client, "_SECONDS", 0.5)
    ran = dl2d("submit", site.job(), "-c", site.config)
    over.set()
    assert ran.status == 1
    assert "may still do what it was asked: look with `dl2d status` before you repeat it" in ran.err


def test_another_daemons_key(dl2d: Dl2d, site: Site):
    (site.folder / "state" / "secret").write_bytes(b"x" * 32)
    ran = dl2d("submit", site.job(), "-c", site.config)
    assert ran.status == 1
    assert "refused the request: this is not the credential" in ran.err
    assert str(site.folder / "state" / "secret") in ran.err


def test_a_key_that_others_may_read(dl2d: Dl2d, site: Site):
    (site.folder / "state" / "secret").chmod(0o644)
    ran = dl2d("submit", site.job(), "-c", site.config)
    assert ran.status == 2
    assert "only its owner may read it" in ran.err


def test_before_the_daemon_ever_ran(dl2d: Dl2d, folder: Path):
    config = write_config(folder, jobs={"models": []})
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    ran = dl2d("submit", "job.yaml", "-c", config)
    assert ran.status == 2
    assert "the daemon makes it when it first runs" in ran.err


def follow_up(store: SqlStore, end: Callable[[Job], None]) -> threading.Thread:
    """Ends the first job that appears, as its coordinator would."""

    def watch() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if jobs := store.jobs(live=True):
                end(jobs[0])
                return
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("state", "reason", "status"),
    [(JobState.FINISHED, "did all epochs", 0), (JobState.FAILED, "worker-0: exit status 1", 1)],
)
def test_waiting_for_the_end(dl2d: Dl2d, site: Site, state: JobState, reason: str, status: int):
    def end(job: Job) -> None:
        site.store.change_job(job.key, JobChange(state=JobState.RUNNING), time.time())
        site.store.change_job(job.key, JobChange(state=state, end_reason=reason), time.time())

    thread = follow_up(site.store, end)
    ran = dl2d("submit", site.job(), "--wait", "-c", site.config)
    thread.join()
    assert ran.status == status
    assert ran.out.splitlines()[-1] == f"job 1 {state}: {reason}"


def test_waiting_as_json_prints_one_value(dl2d: Dl2d, site: Site):
    change = JobChange(state=JobState.FINISHED, end_reason="did all epochs", digest="ab" * 32)
    thread = follow_up(site.store, lambda job: site.store.change_job(job.key, change, time.time()) and None)
    ran = dl2d("submit", site.job(), "--wait", "--json", "-c", site.config)
    thread.join()
    assert ran.json["state"] == "finished"
    assert ran.json["digest"] == "ab" * 32


# cancel


def test_cancel(dl2d: Dl2d, site: Site):
    dl2d("submit", site.job(), "-c", site.config)
    ran = dl2d("cancel", "digits", "-c", site.config)
    assert (ran.status, ran.out) == (0, "job 1 (digits) is cancelled\n")
    assert site.only_job().state is JobState.CANCELLED
    again = dl2d("cancel", "1", "-c", site.config)
    assert again.status == 2
    assert "has ended already (cancelled: cancelled through dl2d)" in again.err


def test_cancel_by_an_account_that_may_not_read_the_store(dl2d: Dl2d, site: Site, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, **_options: bool) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    # Nothing is forbidden to root.
    monkeypatch.setattr(Path, "exists", refuse)
    ran = dl2d("cancel", "1", "-c", site.config)
    assert ran.status == 1
    assert "dl2d.sqlite: Permission denied; " in ran.err
    assert "ask the administrator for read access" in ran.err
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    ran = dl2d("cancel", "1", "-c", site.config)
    assert ran.status == 1
    assert "on Slurm `scancel JOBID` ends your job" in ran.err


def test_cancel_by_an_account_that_may_not_read_the_configuration(
    dl2d: Dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    closed = tmp_path / "closed.yaml"
    closed.mkdir()  # read by nobody
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    ran = dl2d("cancel", "1", "-c", closed)
    assert ran.status == 1
    assert "`dl2d cancel` is for root and the daemon's account" in ran.err
    assert "on Slurm `scancel JOBID` ends your job" in ran.err


def test_cancel_what_is_not_there(dl2d: Dl2d, site: Site):
    ran = dl2d("cancel", "nothing", "-c", site.config)
    assert ran.status == 2
    assert "there is no job 'nothing'" in ran.err


# PATH


def test_the_runner_is_found_in_a_jobs_path(tmp_path: Path):
    caller = {"PATH": "/usr/bin:/bin", "DL2_TOKEN": "x", "CUDA_HOME": "kept", "OTHER": "dropped", "HF_TOKEN": "dropped"}
    environment = job_environment(caller, {"A": "b"})
    assert environment["PATH"].startswith("/usr/bin:/bin:")
    assert str(Path(sys.executable).parent) in environment["PATH"].split(":")
    assert environment | {"PATH": ""} == {"PATH": "", "CUDA_HOME": "kept", "A": "b"}
    runner = tmp_path / "dl2-run"
    runner.touch(mode=0o755)
    assert job_environment({"PATH": str(tmp_path)}, {})["PATH"] == str(tmp_path)


# Slurm


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for sbatch that keeps what it got and answers as told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump({{'argv': sys.argv[1:], 'script': sys.stdin.read(), 'conf': os.environ.get('SLURM_CONF'), "
        f"'dl2': {{key: value for key, value in os.environ.items() if key.startswith('DL2_')}}}}, "
        f"open({str(tmp_path / 'got.json')!r}, 'w'))\n"
        "sys.stderr.write(os.environ.get('SBATCH_SAYS', ''))\n"
        "print(os.environ.get('SBATCH_ANSWERS', '4711;cluster'))\nsys.exit(int(os.environ.get('SBATCH_ENDS', '0')))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "got.json"


@pytest.fixture
def slurm(folder: Path) -> Path:
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    manager = {"name": "slurm", "slurm": {"slurm_conf": "/etc/slurm/other.conf"}}
    return write_config(folder, jobs={"models": ["digits-mlp"]}, resource_manager=manager)


def test_slurm_gets_a_batch_script(dl2d: Dl2d, slurm: Path, sbatch: Path, folder: Path):
    ran = dl2d("submit", "job.yaml", "-c", slurm, "--", "--partition=gpu", "--time", "1:00")
    assert (ran.status, ran.out) == (0, "submitted batch job 4711\n")
    got = json.loads(sbatch.read_text())
    assert got["argv"] == ["--parsable", "--partition=gpu", "--time", "1:00"]
    assert got["conf"] == "/etc/slurm/other.conf"
    assert "#DL2 model=digits-mlp\n" in got["script"]
    assert f"cd -- {folder} || exit\n" in got["script"]
    assert got["script"].endswith("exec dl2-run python train.py --title 'two words'\n")
    assert dl2d("submit", "job.yaml", "--json", "-c", slurm).json == {"id": "4711", "status": None}


def test_a_batch_job_gets_the_daemons_address_and_is_no_part_of_the_job_that_submits_it(
    dl2d: Dl2d, slurm: Path, sbatch: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    given = {"DL2_DAEMON": "https://head:8910", "DL2_DAEMON_CERTIFICATE": "/shared/dl2d.pem", "DL2_ENV": "DATA"}
    for name, value in {**given, "DL2_ROLE": "worker", "DL2_TOKEN": "00", "DL2_JOB": "c.1.2"}.items():
        monkeypatch.setenv(name, value)
    dl2d("submit", "job.yaml", "-c", slurm)
    assert json.loads(sbatch.read_text())["dl2"] == given
    for name in given:
        monkeypatch.delenv(name)
    certificate, key = map(str, self_signed(folder))
    api = {"advertise": "https://other:8910", "certificate": certificate, "certificate_key": key}
    manager = {"name": "slurm", "slurm": {}}
    config = write_config(folder, jobs={"models": ["digits-mlp"]}, resource_manager=manager, api=api)
    dl2d("submit", "job.yaml", "-c", config)
    assert json.loads(sbatch.read_text())["dl2"] == {
        "DL2_DAEMON": "https://other:8910", "DL2_DAEMON_CERTIFICATE": certificate_text(Path(certificate).read_text())
    }  # fmt: skip


def test_jobs_get_the_account_of_a_daemon_that_no_certificate_proves(
    dl2d: Dl2d, sbatch: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """That of the address file of this daemon, otherwise the key file's owner."""
    for name in ("DL2_DAEMON", "DL2_DAEMON_UID"):
        monkeypatch.delenv(name, raising=False)
    url, file, other = "http://127.0.0.1:8910", folder / "job-api.json", "http://127.0.0.1:8911"
    api = {"advertise": url, "address_file": str(file)}
    yarn = {"addresses": ["http://127.0.0.1:9"], "runner": "/opt/dl2d/bin/dl2-run"}
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "model": "digits-mlp", "name": "digits"}))

    def given(manager: str, *options: str) -> str | None:
        managers = {"name": manager, "slurm": {}, "yarn": yarn}
        config = write_config(folder, jobs={"models": ["digits-mlp"]}, resource_manager=managers, api=api)
        ran = dl2d("submit", "job.yaml", *options, "-c", config)
        found = json.loads(sbatch.read_text())["dl2"] if manager == "slurm" else ran.json["configuration"]["env"]
        assert found["DL2_DAEMON"] == url
        return found.get("DL2_DAEMON_UID")

    posted = ("yarn", "--rm", "yarn", "--show")
    assert (given("slurm"), given(*posted)) == (None, None)
    key = load_settings(folder / "dl2d.yaml").secret_path
    key.parent.mkdir(parents=True, exist_ok=True)
    key.touch()
    write_address(file, DaemonAddress(other, host=socket.gethostname(), uid=64))
    assert (given("slurm"), given(*posted)) == (str(os.geteuid()),) * 2
    write_address(file, DaemonAddress(url, host=socket.gethostname(), uid=64))
    assert (given("slurm"), given(*posted)) == ("64", "64")
    monkeypatch.setenv("DL2_DAEMON_UID", "65")
    assert (given("slurm"), given(*posted)) == ("65", "65")


def test_what_slurm_refuses(dl2d: Dl2d, slurm: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SBATCH_ANSWERS", "")
    monkeypatch.setenv("SBATCH_ENDS", "1")
    monkeypatch.setenv("SBATCH_SAYS", "sbatch: error: invalid partition specified: gpu\n")
    ran = dl2d("submit", "job.yaml", "-c", slurm)
    assert ran.status == 1
    assert ran.err == "dl2d: sbatch refused the job: sbatch: error: invalid partition specified: gpu\n"


def test_waiting_for_a_batch_job(dl2d: Dl2d, slurm: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SBATCH_ENDS", "3")
    ran = dl2d("submit", "job.yaml", "--wait", "-c", slurm)
    assert ran.status == 1
    assert "ended with exit status 3" in ran.out
    assert "--wait" in json.loads(sbatch.read_text())["argv"]


def test_bad_requests_never_reach_slurm(dl2d: Dl2d, slurm: Path, sbatch: Path):
    ran = dl2d("submit", "job.yaml", "--set", "model=none", "-c", slurm)
    assert ran.status == 2
    assert "job.yaml: model: unknown model type" in ran.err
    assert not sbatch.exists()


def test_without_slurms_commands(dl2d: Dl2d, slurm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    ran = dl2d("submit", "job.yaml", "-c", slurm)
    assert ran.status == 2
    assert "sbatch is not in PATH" in ran.err


def test_sbatch_options_without_slurm(dl2d: Dl2d, site: Site):
    ran = dl2d("submit", site.job(), "-c", site.config, "--", "--partition=gpu")
    assert ran.status == 2
    assert "are for Slurm, but resource_manager.name is local" in ran.err


def test_a_yarn_service_is_posted_by_its_user(dl2d: Dl2d, folder: Path):
    job = folder / "job.yaml"
    job.write_text(
        "name: digits\nmodel: resnet-50\nepochs: 20\nsteps_per_epoch: 9\nworker: {cpu: 1}\ncommand: python train.py\n"
    )
    yarn = {"addresses": ["http://127.0.0.1:9"], "runner": "/opt/dl2d/bin/dl2-run"}
    config = write_config(
        folder, resource_manager={"name": "yarn", "yarn": yarn}, api={"advertise": "http://head:8910"}
    )
    service = dl2d("submit", "--rm", "yarn", "--show", job, "-c", config).json
    assert service["configuration"]["properties"]["dl2.model"] == "resnet-50"
    assert service["components"][0]["launch_command"] == f"cd {folder} && exec /opt/dl2d/bin/dl2-run python train.py"
    config = write_config(
        folder, resource_manager={"name": "yarn", "yarn": yarn}, api={"advertise": "https://head:8910"}
    )
    refused = dl2d("submit", "--rm", "yarn", job, "-c", config)
    assert (refused.status, "no ResourceManager answers" in refused.err) == (1, True)
    assert "--rm: is slurm" in dl2d("submit", "--rm", "slurm", job, "-c", config).err
    assert "are for --rm yarn" in dl2d("submit", "--show", job, "-c", config).err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--wait",), "--wait: is not for --rm yarn"),
        (("--", "--partition=gpu"), "SBATCH_OPTIONS: are for Slurm, but resource_manager.name is yarn"),
        (("--set", "cwd=/no/such/folder"), "cwd: /no/such/folder is not a folder"),
        (("--set", "cwd=/", "--archive", "hdfs:///env.tar.gz"), "cwd: has no effect with --archive or --file"),
        (("--set", "cwd=/", "--file", "hdfs:///train.py"), "cwd: has no effect with --archive or --file"),
    ],
)
def test_what_a_posted_service_has_no_use_for_is_refused(dl2d: Dl2d, folder: Path, options: tuple[str, ...], said: str):
    yarn = {"addresses": ["http://127.0.0.1:9"], "runner": "/opt/dl2d/bin/dl2-run"}
    config = write_config(
        folder, resource_manager={"name": "yarn", "yarn": yarn}, api={"advertise": "https://head:8910"}
    )
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "model": "resnet-50", "name": "digits"}))
    ran = dl2d("submit", "--rm", "yarn", "--show", "job.yaml", "-c", config, *options)
    assert ran.status == 2
    assert said in ran.err


@pytest.mark.parametrize(
    ("daemon", "said"),
    [
        ("http://head:8910", "registers over https only"),
        ("http://127.evil:8910", "registers over https only"),
        ("http://[::1]:8910", "no ResourceManager answers"),
        ("http://127.0.0.1:8910", "no ResourceManager answers"),
    ],
)
def test_a_service_is_posted_only_if_the_daemon_takes_its_registration(
    dl2d: Dl2d, folder: Path, daemon: str, said: str
):
    yarn = {"addresses": ["http://127.0.0.1:9"], "runner": "/opt/dl2d/bin/dl2-run"}
    config = write_config(folder, resource_manager={"name": "yarn", "yarn": yarn}, api={"advertise": daemon})
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "model": "resnet-50", "name": "digits"}))
    assert said in dl2d("submit", "--rm", "yarn", "job.yaml", "-c", config).err


def test_a_resource_that_no_node_of_yarn_has_is_refused_before_the_service_is_posted(
    dl2d: Dl2d, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    cluster = FakeYarn()
    monkeypatch.setattr(RestClient, "of", lambda *_settings, **_options: client_of(cluster.answer))
    yarn = {"addresses": ["http://rm:8088"], "runner": "/opt/dl2d/bin/dl2-run"}
    config = write_config(
        folder, resource_manager={"name": "yarn", "yarn": yarn}, api={"advertise": "https://head:8910"}
    )
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "model": "resnet-50", "name": "digits"}))
    submit = ("submit", "--rm", "yarn", "job.yaml", "-c", config, "--set")
    refused = dl2d(*submit, "worker={cpu: 1, gpus: 1}")
    assert refused.status == 2
    assert (
        "job.yaml: worker: no node has the resource 'gpus' (did you mean gpu?); they have cpu, gpu, memory"
        in refused.err
    )
    assert not cluster.posted
    taken = dl2d(*submit, "worker={cpu: 1, gpu: 1}")
    assert "`yarn app -status digits` shows it, `yarn app -stop digits` ends it" in taken.out
    assert list(cluster.posted) == ["digits"]
