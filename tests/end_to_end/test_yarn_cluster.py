"""Elastic jobs on a private YARN: the daemon as a process, services with real training processes, real kills."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import sys
import time
import venv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
import yarn_cluster
from local_cluster import KERNELS, REQUEST, WORKER, _static_digest
from yarn_daemon import DEMAND, FAST, YarnDaemon

from dl2d.core.cluster import task_tag
from dl2d.core.errors import Rejected
from dl2d.core.jobs import JobKey, Launch, Owner, Role
from dl2d.core.resource_manager import RmJobState, TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_yarn.manager import create

pytestmark = [
    pytest.mark.slow,
    pytest.mark.yarn,
    pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there"),
]


@pytest.fixture(scope="module")
def yarn() -> Iterator[yarn_cluster.YarnCluster]:
    with yarn_cluster.YarnCluster(nodes=3, vcores=6) as cluster:
        yield cluster
    assert cluster.container_processes() == []
    assert not cluster.folder.exists()


@pytest.fixture
def daemon(yarn: yarn_cluster.YarnCluster, tmp_path: Path) -> Iterator[YarnDaemon]:
    with YarnDaemon(tmp_path, yarn) as daemon:
        yield daemon
        for job in daemon.store.jobs(live=True):
            daemon.cancel(job.key)
        daemon.wait_until(lambda: not yarn_tasks(daemon), "no container of a job is left", timeout=90)


def yarn_tasks(daemon: YarnDaemon) -> list[psutil.Process]:
    return [process for job in daemon.store.jobs(live=False) for process in daemon.processes_of(job.key)]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "hold-job"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("settings", "memory", "said"),
    [
        ({"queue": "gold"}, 512, "unknown queue: gold"),
        # The cluster's maximum allocation is 64 GiB.
        ({}, 100_000, "larger than configured max container memory size"),
    ],
)
def test_yarn_refuses_an_unknown_queue_and_a_container_above_its_maximum(
    yarn: yarn_cluster.YarnCluster, settings: dict[str, object], memory: int, said: str
) -> None:
    job = JobKey("yarn", "refused", 1_795_581_700)
    environment = {"DL2_DAEMON": "http://head:8290", "DL2_JOB": job.slug, "DL2_CREDENTIAL": "ab" * 32}
    anchor = TaskSpec(
        tag=task_tag(job, "anchor"), job=job, role=Role.COORDINATOR, name="anchor", demand=NO_RESOURCES, node="",
        owner=Owner(yarn.user, 990, 990), launch=Launch(("python", "train.py"), "/", tuple(environment.items())),
        member_demands=((Role.WORKER, Resources.of(cpu=1, memory=memory)),),
    )  # fmt: skip
    given = {"addresses": [yarn.address], "user": yarn.user, "runner": "/opt/dl2/bin/dl2-run", **settings}
    manager = create(given, clock=time.time)
    try:
        with pytest.raises(Rejected, match=said):
            manager.submit(anchor)
        # An application in an unknown queue is one that failed.
        assert {each.state for each in manager.listing().jobs if each.tag == anchor.tag} <= {RmJobState.FAILED}
        # Nothing of it is left that would take its name.
        with pytest.raises(Rejected, match=said):
            manager.submit(anchor)
    finally:
        manager.close()


def test_the_daemon_is_killed_in_mid_resize_then_a_worker_and_the_cancelled_job_leaves_nothing(
    daemon: YarnDaemon, gate: Path
) -> None:
    key = daemon.train("cancelled", *FAST, epochs=12, gate=gate, max_workers=2, max_ps=1)
    daemon.wait_until(lambda: daemon.tasks(key, live=True), "its tasks are asked for")
    daemon.kill()
    assert daemon.confirmed(key) != (2, 1)
    daemon.start()
    daemon.wait_for_size(key, 2, 1)
    # Nothing is doubled: as many containers as were asked for, and each live task runs once.
    assert daemon.containers(key).total() == 4
    live = Counter(task.id for task in daemon.tasks(key, live=True))
    scripts = daemon.processes_of(key, str(WORKER))
    assert {process.environ().get("DL2_TASK") for process in scripts} - {None} == live.keys()
    assert len(live) == 3
    victim = next(name for name in live if name.startswith("worker"))
    # The parent of a process that is killed may end at once.
    for process in [each for each in scripts if each.environ().get("DL2_TASK") == victim]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    daemon.wait_until(lambda: victim not in {task.id for task in daemon.tasks(key, live=True)}, "it has failed")
    daemon.wait_for_size(key, 2, 1)
    daemon.cancel(key)
    daemon.wait_until_empty()
    daemon.wait_until_gone(key)


def test_a_service_that_its_user_posts_with_a_packed_environment(
    daemon: YarnDaemon, gate: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "here.pth").write_text("\n".join(path for path in sys.path if Path(path).is_dir()))
    runner = environment / "bin" / "dl2-run"
    runner.write_text(f"#!{environment}/bin/python\nimport sys\nfrom pslite.run import main\nsys.exit(main())\n")
    runner.chmod(0o755)
    daemon.dl2d("pack", str(environment), "-o", "env.tar.gz", cwd=tmp_path)
    shutil.rmtree(environment)
    command = ["python", "numpy_worker.py", "--epochs", "12", *FAST]
    request = {**REQUEST, **DEMAND, "name": "posted", "epochs": 12, "max_workers": 2, "max_ps": 1, "command": command}
    # Equal bits need equal kernels.
    kernels = KERNELS | {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")}
    request["env"] = {**kernels, "PSLITE_PACE_FILE": str(gate)}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(request))
    daemon.dl2d(
        "submit", "--rm", "yarn", "--archive", f"file://{tmp_path}/env.tar.gz", "--file", f"file://{WORKER}",
        "job.yaml", cwd=tmp_path,
    )  # fmt: skip
    daemon.wait_until(lambda: daemon.store.jobs(live=True), "it has registered", timeout=90)
    (job,) = daemon.store.jobs(live=True)
    assert (job.owner.user, job.request.name) == (getpass.getuser(), "posted")
    daemon.wait_until(lambda: daemon.confirmed(job.key) == (2, 1), "the job trains")
    scripts = [process for process in daemon.processes_of(job.key, "numpy_worker.py") if process.name() == "python"]
    assert scripts
    assert all(process.environ()["PATH"].split(":")[0].endswith("env/bin") for process in scripts)
    gate.unlink()
    daemon.wait_for_end(job.key, timeout=120)
    assert daemon.job(job.key).digest == _static_digest(("--optimizer", "momentum"), 12)
    daemon.wait_until_gone(job.key, "posted")


@pytest.mark.nightly
def test_a_job_trains_while_the_resource_manager_is_killed_and_restarted(daemon: YarnDaemon, gate: Path) -> None:
    key = daemon.train("through", *FAST, epochs=12, gate=gate, max_workers=2, max_ps=1)
    daemon.wait_for_size(key, 2, 1)
    daemon.wait_until(lambda: daemon.containers(key) == {"READY": 4}, "YARN knows all containers' addresses")
    before = {task.id for task in daemon.tasks(key, live=True)}
    daemon.yarn.kill("rm")
    daemon.wait_until(lambda: "no ResourceManager answers" in daemon.said(), "a tick fails")
    assert daemon.confirmed(key) == (2, 1)
    daemon.yarn.start("rm")
    daemon.yarn.wait_for_nodes(3)
    daemon.wait_until(lambda: '"event": "tick failed' not in daemon.said(3), "ticks are complete again")
    daemon.wait_until(lambda: daemon.service(key).json().get("state") == "STABLE", "YARN knows the service", timeout=90)
    assert {task.id for task in daemon.tasks(key, live=True)} == before, str(daemon.tasks(key))
    gate.unlink()
    daemon.wait_for_end(key, timeout=120)
    assert daemon.job(key).digest == _static_digest(("--optimizer", "momentum"), 12)
    daemon.wait_until_gone(key)


def test_a_job_goes_on_after_its_application_master_and_the_resource_manager_were_killed(
    daemon: YarnDaemon, gate: Path, tmp_path: Path
) -> None:
    # A defect of Hadoop 3.4.2: a master that was restarted releases all containers when the ResourceManager is.
    checkpoint = ("--checkpoint", str(tmp_path / "checkpoint"), "--every", "11")
    key = daemon.train("again", *FAST, *checkpoint, epochs=60, gate=gate, max_workers=2, max_ps=1)
    daemon.wait_for_size(key, 2, 1)
    daemon.wait_until(lambda: daemon.containers(key) == {"READY": 4}, "YARN knows all containers' addresses")
    before = {task.id for task in daemon.tasks(key, live=True)}
    (master,) = daemon.masters(key)
    daemon.kill()
    master.kill()
    daemon.start()
    daemon.wait_until(lambda: daemon.masters(key), "YARN has another master")
    daemon.wait_until(lambda: daemon.containers(key) == {"READY": 4}, "the master has all containers")
    assert {task.id for task in daemon.tasks(key, live=True)} == before
    daemon.wait_until(lambda: daemon.job(key).progress.epoch > 4, "checkpoints are there")
    daemon.yarn.kill("rm")
    steps = int(daemon.job(key).progress.epoch * 11)
    daemon.yarn.start("rm")
    daemon.yarn.wait_for_nodes(3)

    def settled() -> bool:
        # The new master's own list may lack a container that runs.
        answers = daemon.service(key).json().get("state") in ("STARTED", "STABLE", "FLEX")
        return answers and daemon.confirmed(key) == (2, 1)

    daemon.wait_until(settled, "the job trains again")
    time.sleep(5)
    daemon.wait_until(settled, "the job trains with the containers that it has now")
    live = {task.id for task in daemon.tasks(key, live=True)}
    # Whether the master releases a node's containers depends on which of the two is in time with the ResourceManager.
    if "ps-0" not in live:
        logs = [file for file in daemon.yarn.folder.glob("nm*/logs/*/*/*") if file.is_file()]
        texts = "".join(file.read_text(errors="replace") for file in logs)
        resumed = [int(version) for version in re.findall(r"from its checkpoint of version (\d+)", texts)]
        assert max(resumed, default=-1) >= steps - 11
    gate.unlink()
    daemon.wait_for_end(key, timeout=120)
    assert daemon.job(key).digest == _static_digest(("--optimizer", "momentum"), 60)
    daemon.wait_until_gone(key)


def test_a_worker_whose_node_manager_died_is_lost_and_its_orphan_ended(daemon: YarnDaemon, gate: Path) -> None:
    # A node has room for one worker and two small containers, so at least one node has a worker only.
    worker = {"cpu": 4, "memory": 256}
    key = daemon.train("orphan", *FAST, epochs=60, gate=gate, max_workers=3, architecture="allreduce", worker=worker)
    daemon.wait_for_size(key, 3, 0)
    agents = [process.environ() for process in daemon.processes_of(key)]
    keeping = {agent["NM_PORT"] for agent in agents if agent.get("DL2_INSTANCE") == "coordinator-0"}
    keeping |= {process.environ().get("NM_PORT") for process in daemon.masters(key)}
    victim = next(task for task in daemon.tasks(key, live=True) if task.node.rpartition(":")[2] not in keeping)
    orphans = [each for each in daemon.processes_of(key) if each.environ().get("DL2_TASK") == victim.id]
    name = next(name for name in daemon.yarn.node_managers if victim.node.endswith(f":{daemon.yarn.port_of(name)}"))
    daemon.yarn.kill(name)
    assert orphans
    assert set(orphans) <= set(daemon.processes_of(key))
    # YARN gives the node up after its expiry interval.
    daemon.wait_until(lambda: victim.id not in {task.id for task in daemon.tasks(key, live=True)}, "the task is lost")
    daemon.wait_until(lambda: not set(orphans) & set(daemon.processes_of(key)), "the orphan is ended")
    assert next(task for task in daemon.tasks(key) if task.id == victim.id).note == f"{victim.node} is down"
    daemon.yarn.start(name)
    daemon.yarn.wait_for_nodes(3)
    daemon.wait_for_size(key, 3, 0)
    gate.unlink()
    daemon.wait_for_end(key, timeout=120)
    assert daemon.job(key).digest == _static_digest(("--optimizer", "momentum"), 60)
    daemon.wait_until_gone(key)
