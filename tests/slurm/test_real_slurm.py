"""The manager on a real, private Slurm: what the fakes cannot know."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
from slurm_cluster import PATH, SlurmCluster, User, why_no_pyslurm, why_no_slurmrestd, why_not
from slurm_fakes import REQUEST, Real, context_of, live_task

from dl2d.core.cluster import NodeState, Task, TaskState, task_tag
from dl2d.core.errors import Denied, NodeRefused, NotFound, Rejected, ResourceManagerError, Unavailable
from dl2d.core.job_views import request_payload
from dl2d.core.jobs import Architecture, Job, JobKey, JobState, Launch, Owner, Progress, Role
from dl2d.core.resource_manager import RmJob, RmJobState, TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.store import JobChange
from dl2d.store.sql_store import SqlStore
from dl2d.tick.tick import tick
from dl2d.tick.tick_state import TickState
from dl2d_slurm.cluster_check.configuration_advice import configuration_advice
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.settings import SlurmSettings
from pslite.launch.daemon_connection.munge_credentials import munge_credential

pytestmark = pytest.mark.slurm

JOB = JobKey("lab", "4000000", 1_795_000_000)
#: Later releases tell the starters of several MPIs how to call srun.
SLURMS_OWN = ("SLURM", "HYDRA_", "I_MPI_HYDRA_", "OMPI_MCA_plm_slurm", "PRTE_MCA_plm_slurm")
FOREVER = "while :; do sleep 0.1; done"
DEAF = f"trap '' TERM; touch deaf; {FOREVER}"
MEMORY = Resources.of(memory=1e9)
ONE_CPU = replace(REQUEST, max_workers=16, min_ps=0, max_ps=0, ps=NO_RESOURCES, architecture=Architecture.ALLREDUCE)
FOREVER_SCRIPT = f"#!/bin/sh\n{FOREVER}\n"
ANCHOR = "#!/bin/sh\n#DL2 model=resnet-50 epochs=3\nsleep 600\n"


def manager_of(cluster: SlurmCluster, **settings: object) -> SlurmManager:
    # Tests list without end until something has happened.
    given = {"munge_socket": str(cluster.munge_socket), "rpcs_per_minute": 1_000_000, **cluster.backend, **settings}
    environ = {"PATH": cluster.manager_path, "SLURM_CONF": str(cluster.conf), "LEAK": "of the daemon", "HOME": "/root"}
    return SlurmManager(SlurmSettings.parse(given), clock=time.time, environ=environ, uid=cluster.manager_uid)


@pytest.fixture
def manager(real: Real) -> Iterator[SlurmManager]:
    made = manager_of(real.cluster)
    yield made
    made.close()


def spec(
    owner: Owner,
    cwd: Path,
    script: str,
    *,
    name: str = "worker-1",
    node: str = "n1",
    demand: Resources | None = None,
    env: dict[str, str] | None = None,
) -> TaskSpec:
    environment = {"PATH": "/usr/bin:/bin", **(env or {})}
    return TaskSpec(
        tag=task_tag(JOB, name),
        job=JOB,
        role=Role.WORKER,
        name=name,
        demand=Resources.of(cpu=1) if demand is None else demand,
        node=node,
        owner=owner,
        launch=Launch(("/bin/sh", "-c", script), str(cwd), tuple(environment.items())),
    )


def alices(real: Real, script: str, **more: object) -> TaskSpec:
    return spec(real.owner(real.alice), real.alice.home, script, **more)  # type: ignore[arg-type]


def stop(manager: SlurmManager, handles: list[str], grace: float) -> None:
    manager.stop([listed(manager, handle).identity for handle in handles], grace)


def listed(manager: SlurmManager, handle: str) -> RmJob:
    return next(job for job in manager.listing().jobs if job.handle == handle)


def wait_for(real: Real, manager: SlurmManager, handle: str, *states: RmJobState) -> RmJob:
    real.cluster.wait_until(lambda: listed(manager, handle).state in states, f"job {handle} is {' or '.join(states)}")
    return listed(manager, handle)


def wait_for_end(real: Real, manager: SlurmManager, handle: str) -> RmJob:
    return wait_for(real, manager, handle, *(state for state in RmJobState if state.ended))


def wait_for_file(real: Real, path: Path) -> None:
    real.cluster.wait_until(path.exists, f"{path.name} is there")


def proof(real: Real, user: User, rm_id: str) -> str:
    return real.cluster.run("munge", "-S", str(real.cluster.munge_socket), "-s", f"dl2d:{rm_id}", user=user).stdout


def test_a_task_runs_as_its_owner_with_his_groups_and_his_files(real: Real, manager: SlurmManager) -> None:
    script = "id -u; id -g; id -G; umask; touch mine"
    handle = manager.submit(alices(real, script, name="worker-7"))
    job = wait_for_end(real, manager, handle)
    assert (job.state, job.user, job.tag) == (RmJobState.DONE, real.alice.name, task_tag(JOB, "worker-7"))
    output = real.alice.home / "dl2-4000000" / "worker-7.out"
    groups = os.getgrouplist(real.alice.name, real.alice.gid)
    assert len(groups) == 2
    uid, gid, all_groups, mask = output.read_text().splitlines()
    assert (int(uid), int(gid)) == (real.alice.uid, real.alice.gid)
    assert sorted(map(int, all_groups.split())) == sorted(groups)
    assert mask == "0022"
    for file in (output, real.alice.home / "mine"):
        assert (file.stat().st_uid, file.stat().st_gid) == (real.alice.uid, real.alice.gid)


def test_what_slurm_says_of_a_task_is_in_its_output_too(real: Real, manager: SlurmManager) -> None:
    handle = manager.submit(alices(real, f"touch up; {FOREVER}", name="ps-1"))
    wait_for_file(real, real.alice.home / "up")
    stop(manager, [handle], 0)
    wait_for_end(real, manager, handle)
    assert "CANCELLED" in (real.alice.home / "dl2-4000000" / "ps-1.out").read_text()
    (real.alice.home / "up").unlink()


def test_the_environment_is_the_launchs_and_nothing_of_the_daemons_or_the_login(
    real: Real, manager: SlurmManager
) -> None:
    (real.alice.home / ".profile").write_text("export FROM_LOGIN=1\n")
    tricky = "a 'b' \"c\" $HOME `id` \\ ü\n#SBATCH --nice=7\n#SBATCH --job-name=evil\n\r\n"
    given = {"HOME": str(real.alice.home), "TRICKY": tricky, "EMPTY": "", "DL2_TOKEN": "5ec4e7"}
    handle = manager.submit(alices(real, "env -0 >env; pwd >folder", env=given))
    assert wait_for_end(real, manager, handle).state is RmJobState.DONE
    pairs = (real.alice.home / "env").read_bytes().decode().split("\0")
    found = dict(pair.split("=", 1) for pair in pairs if pair)
    assert {name: found.get(name) for name in given} == given
    assert found["PATH"] == "/usr/bin:/bin"
    extra = {name for name in found.keys() - given.keys() if not name.startswith(SLURMS_OWN)}
    assert extra <= {"PATH", "PWD", "OLDPWD", "HOSTNAME", "ENVIRONMENT", "TMPDIR", "DL2_STOPPED_STATUS"}
    assert (real.alice.home / "folder").read_text().strip() == str(real.alice.home)
    shown = real.cluster.run("scontrol", "show", "job", handle).stdout
    assert "Nice=0 " in shown
    assert "evil" not in shown
    assert "Requeue=0" in shown


def test_a_task_goes_to_its_node_and_its_room_is_counted_there(real: Real, manager: SlurmManager) -> None:
    demand = Resources.of(cpu=3, memory=500, gpu=2)
    script = f"echo $CUDA_VISIBLE_DEVICES $SLURM_JOB_NODELIST >where; touch up; {FOREVER}"
    handle = manager.submit(alices(real, script, node="n3", demand=demand, env={"CUDA_VISIBLE_DEVICES": "7"}))
    wait_for_file(real, real.alice.home / "up")
    assert (real.alice.home / "where").read_text() == "0,1 n3\n"
    listing = manager.listing()
    assert listed(manager, handle).node == "n3"
    used = {node.name: node.used for node in listing.nodes}
    assert used == {"n1": NO_RESOURCES, "n2": NO_RESOURCES, "n3": demand, "n4": NO_RESOURCES}
    assert {node.capacity for node in listing.nodes} == {Resources.of(cpu=8, memory=4000, gpu=2)}
    assert {node.state for node in listing.nodes} == {NodeState.UP}


def test_tasks_have_what_the_user_gave_to_sbatch_for_the_anchor(real: Real, manager: SlurmManager) -> None:
    given = ("--partition=small", "--time=30", "--nice=7", "--wckey=a|b", "--exclude=n2,n4")
    anchor = real.cluster.submit_as(real.alice, ANCHOR, *given)
    wait_for(real, manager, anchor, RmJobState.RUNNING)
    owner = replace(real.owner(real.alice), partition="small")
    task = msgspec.structs.replace(alices(real, FOREVER), job=JobKey("lab", anchor, 1), owner=owner)
    handle = manager.submit(task)
    shown = real.cluster.run("scontrol", "show", "job", handle).stdout
    assert re.search(r" TimeLimit=00:(29|30):00 TimeMin=00:2[78]:00", shown)
    for words in ("Partition=small", "Nice=7", "ExcNodeList=n[2,4]"):
        assert f"{words} " in f"{shown} ".replace("\n", " ")
    with pytest.raises(ResourceManagerError, match="Invalid node name"):
        manager.submit(msgspec.structs.replace(task, node="n2"))


def test_the_nodes_that_jobs_may_use_are_those_on_which_slurm_starts_their_tasks(
    real: Real, manager: SlurmManager
) -> None:
    """A partition of n1 and n2, n3 reserved, features of n2 and n4, and n1 and n4 excluded by one of the jobs."""
    for node, features in (("n2", "a100,ib"), ("n3", "a100,opa"), ("n4", "a100,ib,old")):
        for kind in ("availablefeatures", "activefeatures"):
            real.cluster.run("scontrol", "update", f"nodename={node}", f"{kind}={features}")
    reserved = ("reservationname=ml", "starttime=now", "duration=60", "nodes=n3", f"users={real.alice.name}")
    real.cluster.run("scontrol", "create", "reservation", *reserved)
    try:
        given = {"small": ("--partition=small",), "out": ("--exclude=n[1,4]",), "in": ("--reservation=ml",), "any": ()}
        given |= {"both": ("--constraint=a100&(ib|opa)",), "either": ("--constraint=opa|old",)}
        anchors = {
            name: real.cluster.submit_as(real.alice, ANCHOR, "--time=30", "--gres=gpu:0", *options)
            for name, options in given.items()
        }
        for anchor in anchors.values():
            wait_for(real, manager, anchor, RmJobState.RUNNING)
            manager.authenticate(anchor, proof(real, real.alice, anchor))
        listing = manager.listing()
        found = {name: listing.eligible_nodes[anchor] for name, anchor in anchors.items()}
        assert {name: (sorted(each.nodes), each.reason) for name, each in found.items()} == {
            "small": (["n1", "n2"], "partition small"),
            "out": (["n2"], "not n[1,4], which the job excludes; not those of reservation ml"),
            "in": (["n3"], "reservation ml"),
            "any": (["n1", "n2", "n4"], "not those of reservation ml"),
            "both": (["n2", "n4"], "constraint a100&(ib|opa); not those of reservation ml"),
            "either": (["n4"], "constraint opa|old; not those of reservation ml"),
        }
        assert {node.state for node in listing.nodes} == {NodeState.UP}
        for name, anchor in anchors.items():
            partition = "small" if name == "small" else real.cluster.partition
            owner = replace(real.owner(real.alice), partition=partition)
            for node in real.cluster.nodes:
                task = alices(real, FOREVER, node=node, name=f"worker-{node[1:]}")
                task = msgspec.structs.replace(task, job=JobKey("lab", anchor, 1), owner=owner)
                if node in found[name].nodes:
                    wait_for(real, manager, manager.submit(task), RmJobState.RUNNING)
                    continue
                try:
                    handle = manager.submit(task)
                except (NodeRefused, NotFound):
                    continue
                real.cluster.wait_until(lambda handle=handle: listed(manager, handle).reason, "a reason")  # type: ignore[misc]
                real.cluster.wait_until(lambda handle=handle: listed(manager, handle).node_refused, "refused")  # type: ignore[misc]
    finally:
        real.cluster.run("scancel", "-u", real.alice.name)
        real.cluster.wait_until(lambda: not real.cluster.running(), "all jobs are gone")
        real.cluster.run("scontrol", "delete", "reservationname=ml")
        for kind in ("activefeatures", "availablefeatures"):
            real.cluster.run("scontrol", "update", "nodename=n[2-4]", f"{kind}=")


def test_tasks_of_users_of_a_magnetic_reservation_run_in_it_and_elsewhere(real: Real, manager: SlurmManager) -> None:
    """Slurm puts alice's anchor into it, on n1; bob's jobs may not use that node."""
    reserved = ("reservationname=mag", "starttime=now", "duration=60", "nodes=n1", f"users={real.alice.name}")
    real.cluster.run("scontrol", "create", "reservation", *reserved, "flags=magnetic")
    try:
        anchor, other = (
            real.cluster.submit_as(user, ANCHOR, "--time=30", "--gres=gpu:0") for user in (real.alice, real.bob)
        )
        for each in (anchor, other):
            wait_for(real, manager, each, RmJobState.RUNNING)
        shown = real.cluster.run("squeue", "--noheader", f"--jobs={anchor}", "--Format=Reservation").stdout
        assert shown.strip() == "mag"
        assert {handle: set(found.nodes) for handle, found in manager.listing().eligible_nodes.items()} == {
            other: {"n2", "n3", "n4"}
        }
        for node in ("n1", "n2"):
            task = alices(real, FOREVER, node=node, name=f"worker-{node[1:]}")
            handle = manager.submit(msgspec.structs.replace(task, job=JobKey("lab", anchor, 1)))
            wait_for(real, manager, handle, RmJobState.RUNNING)
    finally:
        real.cluster.run("scancel", *real.cluster.running())
        real.cluster.wait_until(lambda: not real.cluster.running(), "all jobs are gone")
        real.cluster.run("scontrol", "delete", "reservationname=mag")


def test_a_reservation_whose_start_stays_ahead_empties_no_node(real: Real, manager: SlurmManager) -> None:
    reserved = ("starttime=now+5minutes", "duration=60", f"users={real.alice.name}")
    try:
        for name, node, *flags in (("begins", "n1"), ("floats", "n2", "flags=time_float")):
            real.cluster.run("scontrol", "create", "reservation", f"reservationname={name}", f"nodes={node}", *reserved,
                             *flags)  # fmt: skip
        anchor = real.cluster.submit_as(real.alice, FOREVER_SCRIPT, "--nodelist=n3", "--mem=10", "--time=30")
        wait_for(real, manager, anchor, RmJobState.RUNNING)
        listing = manager.listing()
        assert {claim.handle for claim in listing.claims} == {"reservation begins"}
        assert listing.eligible_nodes[anchor].nodes.isdisjoint({"n1", "n2"})
    finally:
        for name in ("begins", "floats"):
            real.cluster.run("scontrol", "delete", f"reservationname={name}", check=False)


def test_tasks_start_before_a_job_that_slurm_plans_for_the_end_of_their_anchor(
    real: Real, manager: SlurmManager
) -> None:
    """It waits for all CPUs of all nodes, so for those of the anchor, too; backfill starts only what ends before."""
    anchor = real.cluster.submit_as(real.alice, ANCHOR, "--time=20", "--gres=gpu:0", "--mem=50")
    ends = wait_for(real, manager, anchor, RmJobState.RUNNING).time_limit_at
    whole = (f"--nodes={len(real.cluster.nodes)}", f"--cpus-per-task={real.cluster.cpus}", "--time=5", "--mem=50")
    rigid = real.cluster.submit_as(real.bob, FOREVER_SCRIPT, *whole)
    planned = ("squeue", "--noheader", f"--jobs={rigid}", "--Format=StartTime")
    real.cluster.wait_until(lambda: real.cluster.run(*planned).stdout.strip() not in ("", "N/A"), "it is planned")
    assert listed(manager, rigid).state is RmJobState.PENDING
    tasks = [
        msgspec.structs.replace(alices(real, FOREVER, node=node, name=name), job=JobKey("lab", anchor, 1))
        for name, node in (("worker-0", "n1"), ("worker-1", "n3"), ("ps-0", ""))
    ]
    for handle in [manager.submit(task) for task in tasks]:
        started = wait_for(real, manager, handle, RmJobState.RUNNING)
        assert ends - 180 <= started.time_limit_at <= ends
    assert listed(manager, rigid).state is RmJobState.PENDING


def test_no_task_outlives_its_anchor_where_nobody_waits_for_its_room(real: Real, manager: SlurmManager) -> None:
    """How long before that it ends depends on which of Slurm's schedulers starts it."""
    anchor = real.cluster.submit_as(real.alice, ANCHOR, "--time=20", "--gres=gpu:0", "--mem=50")
    ends = wait_for(real, manager, anchor, RmJobState.RUNNING).time_limit_at
    handle = manager.submit(msgspec.structs.replace(alices(real, FOREVER), job=JobKey("lab", anchor, 1)))
    started = wait_for(real, manager, handle, RmJobState.RUNNING)
    assert ends - 180 <= started.time_limit_at <= ends + 60
    asked = real.cluster.run("squeue", "--noheader", f"--jobs={handle}", "--Format=MinTime,TimeLimit").stdout.split()
    assert asked[0] in ("18:00", "17:00")
    assert asked[1] in (asked[0], "19:00")


#: Words of ``scontrol show job`` and variables of batch scripts that differ between any two jobs, ...
OF_EACH_JOB = (
    *("JobId", "SLURM_JOBID", "SLURM_JOB_ID", "SLURM_JOB_SLUID", "SLURM_TASK_PID"),
    *("AllocNode", "SLURM_TOPOLOGY"),
)
#: ... and those that only sbatch sets, for its own host, for MPI programs that start others, and for job steps.
OF_SBATCH = (
    *("SLURM_SUBMIT_", "SLURM_PRIO_PROCESS", "SLURM_TRES_PER_TASK", "TresPerTask", "OOMKillStep=0"),
    *("HYDRA_", "I_MPI_", "OMPI_", "PRTE_"),
)


@pytest.mark.parametrize(("other", "reason"), [("rest", why_no_slurmrestd()), ("pyslurm", why_no_pyslurm())])
def test_another_backend_submits_the_same_job_as_sbatch(private_slurm: Real, other: str, reason: str) -> None:
    if reason:
        pytest.skip(reason)
    options = ["--nice=7", "--time=12:30", "--exclude=n3", "--wckey=w"]
    script = "umask >out; ulimit -a >>out; pwd >>out; id >>out; env -0 >env"
    demand, home = Resources.of({"cpu": 2, "memory": 100, "gpu": 1}), private_slurm.alice.home
    found: list[set[str]] = []
    for backend in ("command", other):
        private_slurm.cluster.use_backend(backend)
        manager = manager_of(private_slurm.cluster, sbatch_options=options)
        try:
            job = manager.submit(alices(private_slurm, script, demand=demand))
            assert wait_for_end(private_slurm, manager, job).state is RmJobState.DONE
            shown = private_slurm.cluster.run("scontrol", "show", "job", job).stdout
        finally:
            manager.close()
            private_slurm.cluster.use_backend("command")
        words = (word for line in shown.splitlines() if "SubmitLine" not in line for word in line.split())
        found.append({*words, *(home / "env").read_text().split("\0"), (home / "out").read_text()})
        private_slurm.cluster.clear()
        (home / "env").unlink()
        (home / "out").unlink()
    differing = found[0] ^ found[1]
    at = re.compile(r"\w*(Time|TIME|LastSchedEval|Scheduler)=")
    assert {
        word for word in differing if not word.startswith((*OF_EACH_JOB, *OF_SBATCH)) and not at.match(word)
    } == set()


def test_without_a_demand_for_gpus_there_are_none(real: Real, manager: SlurmManager) -> None:
    handle = manager.submit(alices(real, 'echo "[$CUDA_VISIBLE_DEVICES]" >gpus', env={"CUDA_VISIBLE_DEVICES": "0"}))
    assert wait_for_end(real, manager, handle).state is RmJobState.DONE
    assert (real.alice.home / "gpus").read_text() in ("[]\n", "[NoDevFiles]\n")


@pytest.mark.parametrize(
    ("script", "state", "word"),
    [
        ("exit 3", RmJobState.FAILED, "exit status 3"),
        ("kill -9 $$", RmJobState.FAILED, "signal 9"),
        ("kill $$", RmJobState.CANCELLED, "signal 15"),
    ],
)
def test_how_a_task_ended_is_told(real: Real, manager: SlurmManager, script: str, state: RmJobState, word: str) -> None:
    job = wait_for_end(real, manager, manager.submit(alices(real, script)))
    assert job.state is state
    assert word in job.reason


def test_the_task_itself_gets_the_signal_and_may_end_in_peace(real: Real, manager: SlurmManager) -> None:
    script = f"trap 'echo saved >saved; exit 0' TERM; touch graceful; {FOREVER}"
    handle = manager.submit(alices(real, script))
    wait_for_file(real, real.alice.home / "graceful")
    stop(manager, [handle], 600)
    assert wait_for_end(real, manager, handle).state is RmJobState.DONE
    assert (real.alice.home / "saved").exists()


def test_what_does_not_end_is_cancelled_at_its_deadline(real: Real, manager: SlurmManager) -> None:
    handle = manager.submit(alices(real, DEAF))
    wait_for_file(real, real.alice.home / "deaf")
    stop(manager, [handle], 1)
    assert listed(manager, handle).state in (RmJobState.RUNNING, RmJobState.ENDING)
    assert wait_for_end(real, manager, handle).state is RmJobState.CANCELLED


def test_a_waiting_task_is_cancelled_at_once(real: Real, manager: SlurmManager) -> None:
    full = manager.submit(alices(real, FOREVER, demand=Resources.of(cpu=8)))
    wait_for(real, manager, full, RmJobState.RUNNING)
    waiting = manager.submit(alices(real, FOREVER, name="worker-2", demand=Resources.of(cpu=1)))
    real.cluster.wait_until(lambda: listed(manager, waiting).reason == "Resources", "it waits for room")
    stop(manager, [waiting], 600)
    assert listed(manager, waiting).state is RmJobState.CANCELLED
    assert listed(manager, full).state is RmJobState.RUNNING


def test_a_task_without_a_node_waits_as_a_claim_and_starts_where_room_becomes_free(
    real: Real, manager: SlurmManager
) -> None:
    names = [node.name for node in manager.listing().nodes]
    running = [
        manager.submit(alices(real, FOREVER, name=f"ps-{number}", node=name, demand=Resources.of(cpu=8)))
        for number, name in enumerate(names)
    ]
    for handle in running:
        wait_for(real, manager, handle, RmJobState.RUNNING)
    given = alices(real, FOREVER, node="", demand=Resources.of(cpu=2))
    handle = manager.submit(given)
    live = live_task(handle, given.tag, node="", submitted=0, asked_at=time.time())
    real.cluster.wait_until(lambda: manager.listing(tasks=[live]).claims, "it waits for room")
    (claim,) = manager.listing(tasks=[live]).claims
    assert (claim.handle, claim.nodes, claim.demand.get("cpu")) == (handle, 1, 2)
    assert listed(manager, handle).tag == given.tag
    stop(manager, running[-1:], 0)
    assert wait_for(real, manager, handle, RmJobState.RUNNING).node == names[-1]
    assert not manager.listing(tasks=[live]).claims


@pytest.mark.parametrize("grace", [0.0, 600.0])
def test_the_last_task_of_a_job_array_ends_without_the_others(real: Real, manager: SlurmManager, grace: float) -> None:
    array = real.cluster.submit_as(real.alice, "#!/bin/sh\nexec sleep 600\n", "--array=0-1")
    wait_for(real, manager, array, RmJobState.RUNNING)
    assert listed(manager, array).array_id == f"{array}_1"
    stop(manager, [array], grace)
    assert wait_for_end(real, manager, array).state is RmJobState.CANCELLED
    other = next(job for job in manager.listing().jobs if job.array_id == f"{array}_0")
    assert other.state is RmJobState.RUNNING


def test_many_stops_are_few_commands(real: Real, manager: SlurmManager) -> None:
    handles = [manager.submit(alices(real, "sleep 600", name=f"worker-{number}")) for number in range(12)]
    stop(manager, handles, 600)
    stop(manager, handles, 0)
    for handle in handles:
        assert wait_for_end(real, manager, handle).state is RmJobState.CANCELLED


def test_a_drained_node_takes_nothing_and_says_why(real: Real, manager: SlurmManager) -> None:
    reason = "disk | is\nbad"
    real.cluster.run("scontrol", "update", "nodename=n2", "state=drain", f"reason={reason}")
    nodes = {node.name: node for node in manager.listing().nodes}
    assert nodes["n2"].state is NodeState.DRAINING
    assert nodes["n2"].remark == f"drained: {reason}"
    assert nodes["n1"].state is NodeState.UP
    handle = manager.submit(alices(real, "true", node="n2"))
    real.cluster.wait_until(lambda: "ReqNodeNotAvail" in listed(manager, handle).reason, "the reason")
    assert listed(manager, handle).state is RmJobState.PENDING


def test_a_lost_node_loses_its_tasks_and_they_are_not_started_again(real: Real, manager: SlurmManager) -> None:
    handle = manager.submit(alices(real, FOREVER, node="n4"))
    wait_for(real, manager, handle, RmJobState.RUNNING)
    real.cluster.stop_node("n4")
    try:
        real.cluster.run("scontrol", "update", "nodename=n4", "state=down", "reason=test")
        assert wait_for_end(real, manager, handle).state is RmJobState.LOST

        def is_down() -> bool:
            # A message that slurmd sent before its end may have set the node up again.
            real.cluster.run("scontrol", "update", "nodename=n4", "state=down", "reason=test")
            lost = next(node for node in manager.listing().nodes if node.name == "n4")
            return lost.state is NodeState.DOWN and lost.remark.endswith(": test")

        real.cluster.wait_until(is_down, "n4 is down")
    finally:
        real.cluster.start_node("n4")


def test_what_slurm_refuses_is_refused_in_its_words(real: Real, manager: SlurmManager) -> None:
    with pytest.raises(NotFound, match=r"on n9.*Invalid node name specified"):
        manager.submit(alices(real, "true", node="n9"))
    nowhere = replace(real.owner(real.alice), partition="nowhere")
    with pytest.raises(Rejected, match=r"nowhere|Invalid partition name"):
        manager.submit(spec(nowhere, real.alice.home, "true"))
    if real.cluster.backend["backend"] == "command":  # slurmctld itself takes any user id of root
        nobody = Owner("nobody-at-all", 4_242_424, 4_242_424)
        with pytest.raises(Rejected, match="--uid"):
            manager.submit(spec(nobody, real.alice.home, "true"))
    with pytest.raises(Rejected, match=r"cpu: wanted 9, had 8"):
        manager.submit(alices(real, "true", demand=Resources.of(cpu=9)))
    with pytest.raises((Rejected, NotFound), match=r"gres|Invalid node name"):
        manager.submit(alices(real, "true", node="n9", demand=Resources.of(tpu=1)))
    assert real.cluster.running() == []


def test_gpus_of_types() -> None:
    """Two GPUs of type A100 on n1 and two of type t4 on n2: tasks get those of their demand, and are counted so."""
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster(nodes=2, gpu_types=("A100", "t4")) as cluster, closing(manager_of(cluster)) as manager:
        alice = cluster.add_user("alice")
        owner = Real(cluster, alice, alice).owner(alice)
        capacities = {node.name: node.capacity.as_dict() for node in manager.listing().nodes}
        common = {"cpu": 8, "memory": 4000, "gpu": 2}
        assert capacities == {"n1": {**common, "gpu:a100": 2}, "n2": {**common, "gpu:t4": 2}}

        def submit(node: str, name: str, **gpus: int) -> str:
            demand = Resources.of({"cpu": 1, "memory": 100, **{key.replace("_", ":"): n for key, n in gpus.items()}})
            return manager.submit(
                spec(owner, alice.home, f"env >env-{name}; {FOREVER}", name=name, node=node, demand=demand)
            )

        handles = [submit("n1", "worker-0", gpu=1, gpu_a100=1), submit("n2", "worker-1", gpu=2)]
        for handle in handles:
            cluster.wait_until(lambda handle=handle: listed(manager, handle).state is RmJobState.RUNNING, "it runs")  # type: ignore[misc]
        used = {node.name: node.used.as_dict() for node in manager.listing().nodes}
        common = {"cpu": 1, "memory": 100}
        assert used == {"n1": {**common, "gpu": 1, "gpu:a100": 1}, "n2": {**common, "gpu": 2, "gpu:t4": 2}}
        with pytest.raises((NodeRefused, Rejected), match=r"worker-2 .*n2|gres|configuration is not available"):
            submit("n2", "worker-2", gpu=1, gpu_a100=1)
        for name, devices in (("worker-0", 1), ("worker-1", 2)):
            lines = (alice.home / f"env-{name}").read_text().splitlines()
            (visible,) = (line for line in lines if line.startswith("CUDA_VISIBLE_DEVICES="))
            assert len(visible.partition("=")[2].split(",")) == devices


def test_shares_of_gpus() -> None:
    """Tasks hold both GPUs, of four shares each; a job waits for a share, and then has one of a GPU."""
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster(nodes=1, shards=8) as cluster, closing(manager_of(cluster)) as manager:
        alice, bob = cluster.add_user("alice"), cluster.add_user("bob")
        owner = Real(cluster, alice, bob).owner(alice)

        def gpus() -> dict[str, float]:
            (node,) = manager.listing().nodes
            return {name: node.used.get(name) for name in ("gpu", "shard")}

        demand = Resources.of(cpu=1, memory=100, gpu=1)
        handles = [
            manager.submit(spec(owner, alice.home, FOREVER, name=name, demand=demand))
            for name in ("worker-0", "worker-1")
        ]
        cluster.wait_until(lambda: gpus() == {"gpu": 2, "shard": 8}, "both run")
        assert [listed(manager, handle).held.get("shard") for handle in handles] == [4, 4]
        waiting = cluster.submit_as(bob, f"#!/bin/sh\n{FOREVER}\n", "--gres=shard:1")
        cluster.wait_until(lambda: manager.listing().claims, "it waits for room")
        (claim,) = manager.listing().claims
        assert (claim.handle, claim.demand.get("shard"), claim.demand.get("gpu")) == (waiting, 1, 0.25)
        cluster.run("scancel", handles[0])
        cluster.wait_until(lambda: cluster.job_state(waiting) == "RUNNING", "it has a share")
        assert gpus()["gpu"] == 2


def test_a_daemon_that_is_not_root_may_submit_for_itself_only(real: Real, tmp_path: Path) -> None:
    """The real sbatch, run as alice."""
    wrapper = tmp_path / "sbatch"
    become = f"setpriv --reuid={real.alice.uid} --regid={real.alice.gid} --clear-groups"
    wrapper.write_text(f'#!/bin/sh\nexec {become} /usr/bin/sbatch "$@"\n')
    wrapper.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{PATH}", "SLURM_CONF": str(real.cluster.conf)}
    manager = SlurmManager(SlurmSettings(), clock=time.time, environ=environ, uid=real.alice.uid)
    assert not manager.capabilities().other_users
    with pytest.raises(Denied, match="--uid only permitted by root"):
        manager.submit(spec(real.owner(real.bob), real.bob.home, "true"))
    job = wait_for_end(real, manager, manager.submit(alices(real, "true")))
    assert (job.state, job.user) == (RmJobState.DONE, real.alice.name)


def test_everything_is_found_again_after_a_restart(real: Real, manager: SlurmManager) -> None:
    running = manager.submit(alices(real, FOREVER, name="ps-0"))
    ended = manager.submit(alices(real, "exit 4"))
    wait_for(real, manager, running, RmJobState.RUNNING)
    wait_for_end(real, manager, ended)
    again = manager_of(real.cluster)
    found = {job.tag: job for job in again.listing().jobs if job.handle in (running, ended)}
    assert found[task_tag(JOB, "ps-0")].state is RmJobState.RUNNING
    assert found[task_tag(JOB, "worker-1")].state is RmJobState.FAILED
    stop(again, [running], 0)
    assert wait_for_end(real, again, running).state is RmJobState.CANCELLED
    again.close()


def test_tasks_of_an_array_that_wait_for_room_are_counted(real: Real, manager: SlurmManager) -> None:
    handle = manager.submit(alices(real, FOREVER))
    wait_for(real, manager, handle, RmJobState.RUNNING)
    numbers = ",".join(str(number * number) for number in range(1, 31))
    array = real.cluster.submit_as(real.bob, ANCHOR, "--nodelist=n1", "--exclusive", f"--array={numbers}%7")
    real.cluster.wait_until(lambda: [claim.waiting for claim in manager.listing().claims] == [30] * 7, "claims")
    assert {claim.handle for claim in manager.listing().claims} == {array}
    real.cluster.run("scancel", array)


def test_a_job_that_waits_for_all_memory_of_its_node_claims_it(real: Real, manager: SlurmManager) -> None:
    """squeue shows the memory of the first node of the partition for it, from its submission on."""
    handle = manager.submit(alices(real, FOREVER, demand=Resources.of(cpu=1, memory=100)))
    wait_for(real, manager, handle, RmJobState.RUNNING)
    job = real.cluster.submit_as(real.bob, ANCHOR, "--nodelist=n1", "--mem=0", "--cpus-per-task=2")
    real.cluster.wait_until(lambda: manager.listing().claims, "it waits for room")
    (claim,) = manager.listing().claims
    assert (claim.handle, claim.demand, claim.whole) == (job, Resources.of(cpu=2, memory=4000), False)
    stop(manager, [handle], 0)
    real.cluster.wait_until(lambda: real.cluster.job_state(job) == "RUNNING", "it starts")


def test_memory_of_waiting_jobs_where_nodes_differ() -> None:
    """Without a default, a job that asks for no memory gets all of its node, whichever that is."""
    if reason := why_not():
        pytest.skip(reason)
    with (
        SlurmCluster(nodes=2, gpus=0, memories=(4000, 8000), extra="DefMemPerCPU=0") as cluster,
        closing(manager_of(cluster)) as manager,
    ):
        bob = cluster.add_user("bob")
        held = [cluster.submit_as(bob, ANCHOR, f"--nodelist={node}", "--mem=2500") for node in cluster.nodes]
        cluster.wait_until(lambda: {cluster.job_state(job) for job in held} == {"RUNNING"}, "both run")
        waiting = [cluster.submit_as(bob, ANCHOR, *options) for options in ([], ["--mem=4000", "--nodelist=n1"])]
        cluster.wait_until(lambda: len(manager.listing().claims) == 2, "both wait for room")
        assert {claim.handle: (claim.all_memory, claim.demand.as_dict()) for claim in manager.listing().claims} == {
            waiting[0]: (True, {"cpu": 1}),
            waiting[1]: (False, {"cpu": 1, "memory": 4000}),
        }


def test_jobs_wait_for_no_memory_where_slurm_does_not_count_it() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with (
        SlurmCluster(nodes=1, gpus=0, extra="SelectTypeParameters=CR_Core") as cluster,
        closing(manager_of(cluster)) as manager,
    ):
        bob = cluster.add_user("bob")
        running = [cluster.submit_as(bob, ANCHOR, "--mem=3000", "--cpus-per-task=3") for _ in range(2)]
        cluster.wait_until(lambda: {cluster.job_state(job) for job in running} == {"RUNNING"}, "both run")
        cluster.submit_as(bob, ANCHOR, "--mem=3000", "--cpus-per-task=3")
        cluster.wait_until(lambda: manager.listing().claims, "it waits for room")
        (claim,) = manager.listing().claims
        assert claim.demand == Resources.of(cpu=3)


#: On nodes of eight CPUs, two GPUs and 4000 MiB.
DEMANDS = tuple(
    map(
        Resources.of,
        ({"cpu": 1}, {"cpu": 3}, {"cpu": 1, "gpu": 1}, {"cpu": 1, "memory": 700}, {"cpu": 2, "memory": 1300}),
    )
)


@pytest.mark.parametrize(
    ("threads", "configuration"),
    [
        pytest.param(1, "", id="as demanded, and memory by CPU"),
        pytest.param(2, "", id="cores"),
        pytest.param(2, "SelectTypeParameters=CR_CPU_Memory", id="CPUs"),
        pytest.param(2, "SelectTypeParameters=CR_Core\nMaxMemPerCPU=300", id="no memory"),
        pytest.param(1, "MaxMemPerCPU=300", id="CPUs for memory"),
        pytest.param(2, "DefMemPerCPU=0\nDefMemPerNode=900\nMaxMemPerCPU=400", id="memory by node"),
        pytest.param(1, "DefMemPerGPU=1200\nMaxMemPerCPU=50", id="memory by GPU"),
    ],
)
def test_what_tasks_are_given_beyond_their_demands_is_known_before(threads: int, configuration: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    nodes = len(DEMANDS) + 1
    with (
        SlurmCluster(nodes=nodes, threads=threads, extra=configuration) as cluster,
        closing(manager_of(cluster)) as manager,
    ):
        alice = cluster.add_user("alice")
        anchor = cluster.submit_as(alice, ANCHOR, f"--nodelist=n{nodes}")
        cluster.wait_until(lambda: cluster.job_state(anchor) == "RUNNING", "the anchor runs")
        given = manager.listing().given[anchor]
        shares = [demand.maximum(given(demand)) for demand in DEMANDS]
        owner = Owner(alice.name, alice.uid, alice.gid, partition=cluster.partition)
        possible = [number for number, share in enumerate(shares) if share.get("cpu") <= cluster.cpus]
        tasks = [
            manager.submit(
                spec(owner, alice.home, FOREVER, name=f"worker-{number}", node=f"n{number + 1}", demand=DEMANDS[number])
            )
            for number in possible
        ]
        wait_until_running(cluster, tasks)
        expected = [share.minus(MEMORY) if "CR_Core\n" in configuration else share for share in shares]
        *used, _ = (node.used for node in manager.listing().nodes)
        assert [used[number] for number in possible] == [expected[number] for number in possible]


def wait_until_running(cluster: SlurmCluster, jobs: list[str]) -> None:
    cluster.wait_until(lambda: all(cluster.job_state(job) == "RUNNING" for job in jobs), "all run", timeout=30)


#: Of jobs on nodes of eight CPUs.
RIGID = (
    "-n3",
    "-c3",
    "-n3 --hint=nomultithread",
    "-c3 --mem=500 --threads-per-core=1",
    "-n2 -c2 --ntasks-per-core=2",
    "-n3 --mem-per-cpu=150 --ntasks-per-core=1",
    "--gres=gpu:2 --cpus-per-gpu=3 --mem=500",
    "--mincpus=5 --mem=500",
)


@pytest.mark.parametrize(
    ("threads", "configuration"),
    [
        pytest.param(1, "", id="no threads"),
        pytest.param(2, "", id="cores"),
        pytest.param(2, "SelectTypeParameters=CR_Core_Memory,CR_ONE_TASK_PER_CORE", id="one task on each core"),
        pytest.param(2, "SelectTypeParameters=CR_CPU_Memory", id="CPUs"),
    ],
)
def test_a_job_that_waits_claims_what_slurm_will_allocate(threads: int, configuration: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    # With one task on each core, releases differ in what the last two get.
    rigid = RIGID[:-2] if "ONE_TASK" in configuration else RIGID
    nodes = len(rigid) + 1
    with (
        SlurmCluster(nodes=nodes, threads=threads, extra=configuration) as cluster,
        closing(manager_of(cluster)) as manager,
    ):
        bob = cluster.add_user("bob")
        anchor = cluster.submit_as(bob, ANCHOR, f"--nodelist=n{nodes}")
        holding = [cluster.submit_as(bob, ANCHOR, "--exclusive", f"--nodelist={node}") for node in cluster.nodes[:-1]]
        wait_until_running(cluster, [anchor, *holding])
        waiting = [
            cluster.submit_as(bob, ANCHOR, f"--nodelist={node}", *options.split())
            for node, options in zip(cluster.nodes, rigid, strict=False)
        ]
        cluster.wait_until(lambda: len(manager.listing().claims) == len(rigid), "all wait for room")
        claimed = {claim.handle: claim.demand for claim in manager.listing().claims}
        cluster.run("scancel", *holding)
        wait_until_running(cluster, waiting)
        used = [node.used for node in manager.listing().nodes]
        assert [claimed[job] for job in waiting] == used[:-1]


def add_elastic_job(store: SqlStore, manager: SlurmManager, partition: str, user: User, anchor: str) -> JobKey:
    """Make an anchor that runs a job of workers with one CPU, which run for ever."""
    key = JobKey("fake", anchor, listed(manager, anchor).submitted)
    owner = Owner(user.name, user.uid, user.gid, partition=partition)
    runner = user.home / "dl2-run"
    runner.write_text(f"#!/bin/sh\n{FOREVER}\n")
    runner.chmod(0o755)
    launch = Launch((str(runner),), str(user.home), (("PATH", "/usr/bin:/bin"),))
    store.add_job(Job(key=key, request=ONE_CPU, owner=owner, launch=launch, anchor=anchor))
    store.change_job(key, JobChange(state=JobState.READY, address="h:1"), time.time())
    return key


#: What jobs of several nodes or tasks claim on nodes of eight CPUs and two GPUs: nodes, CPUs and GPUs.
SHAPES = {
    "-N1-4 -c8": (1, 8, 0),
    "-N2-4 --mem=3600": (2, 2, 0),
    "-N2-6 --ntasks-per-node=8": (2, 16, 0),
    "-n5 -c3": (3, 18, 0),
    "-N3 -n5 -c3": (3, 18, 0),
    "-n16 --ntasks-per-node=4": (4, 16, 0),
    "-n3 -c5": (3, 15, 0),
    "-N2 -n9": (2, 10, 0),
    "-n16": (2, 16, 0),
    "-N2-3 --gpus-per-node=2": (2, 2, 4),
    "--gpus=4 --cpus-per-gpu=4": (2, 16, 4),
    "-n4 --mem=1500 -c4": (2, 16, 0),
    "-N2 -O -n20": (2, 2, 0),
    "--mincpus=6 -n2": (1, 6, 0),
}


def test_a_job_that_waits_claims_whole_tasks_on_the_minimum_number_of_nodes() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster(nodes=4) as cluster, closing(manager_of(cluster)) as manager:
        bob = cluster.add_user("bob")
        anchor = cluster.submit_as(bob, ANCHOR, "--nodelist=n1")
        cpus = dict(zip(cluster.nodes, (7, 8, 8, 8), strict=True))
        holding = [cluster.submit_as(bob, ANCHOR, f"-c{cpus[node]}", f"--nodelist={node}") for node in cluster.nodes]
        wait_until_running(cluster, [anchor, *holding])

        def reason_of(job: str) -> str:
            return cluster.run("squeue", "-h", "-j", job, "-o", "%r").stdout.strip()

        for options, expected in SHAPES.items():
            job = cluster.submit_as(bob, ANCHOR, *options.split())
            cluster.wait_until(lambda job=job: reason_of(job) == "Resources", f"Slurm has tried {options}")
            (claim,) = manager.listing().claims
            assert (claim.nodes, claim.demand.get("cpu"), claim.demand.get("gpu")) == expected, options
            cluster.run("scancel", job)


def test_a_job_starts_with_as_many_tasks_as_slurm_gives_room_and_none_waits() -> None:
    """Each task demands a CPU, and gets two with 360 MiB: memory for the anchor and one task on its node, two on n2."""
    if reason := why_not():
        pytest.skip(reason)
    with (
        SlurmCluster(nodes=2, memory=1000, gpus=0, threads=2, extra="DefMemPerCPU=180") as cluster,
        closing(manager_of(cluster)) as manager,
        closing(SqlStore("sqlite://")) as store,
    ):
        alice = cluster.add_user("alice")
        anchor = cluster.submit_as(alice, ANCHOR, "--nodelist=n1")
        cluster.wait_until(lambda: cluster.job_state(anchor) == "RUNNING", "the anchor runs")
        key = add_elastic_job(store, manager, cluster.partition, alice, anchor)
        context, state = replace(context_of(manager, store, time.monotonic), slot_seconds=1.0), TickState()
        for _ in range(6):
            store.report_progress(key, Progress(at=time.time()))
            state, _ = tick(context, state)
            tasks = store.tasks(live=False, job=key)
            wait_until_running(cluster, [task.handle for task in tasks])
        assert sorted(task.node for task in tasks) == ["n1", "n2", "n2"]
        assert {(task.state, task.demand) for task in tasks} == {(TaskState.GRANTED, ONE_CPU.worker)}


def test_the_cpus_of_a_partition_on_each_node_are_counted() -> None:
    """A job gets no more than MaxCPUsPerNode, and a rigid job of its partition those that it gives up."""
    if reason := why_not():
        pytest.skip(reason)
    with (
        SlurmCluster(
            nodes=2, gpus=0, extra="PartitionName=capped Nodes=n1,n2 MaxCPUsPerNode=4 MaxTime=INFINITE State=UP"
        ) as cluster,
        closing(manager_of(cluster, poll_floor_seconds=0)) as manager,
        closing(SqlStore("sqlite://")) as store,
    ):
        alice = cluster.add_user("alice")
        anchor = cluster.submit_as(alice, ANCHOR, "--nodelist=n1", "--partition=capped")
        other = cluster.submit_as(alice, ANCHOR, "--nodelist=n1", "-c2")
        wait_until_running(cluster, [anchor, other])
        key = add_elastic_job(store, manager, "capped", alice, anchor)
        context, state = replace(context_of(manager, store, time.monotonic), slot_seconds=1.0), TickState()

        def tasks_of_next_tick() -> list[Task]:
            nonlocal state
            store.report_progress(key, Progress(at=time.time()))
            state, _ = tick(context, state)
            return list(store.tasks(live=True, job=key))

        for _ in range(6):
            tasks = tasks_of_next_tick()
            wait_until_running(cluster, [task.handle for task in tasks])
        assert sorted(task.node for task in tasks) == ["n1"] * 3 + ["n2"] * 4
        rigid = cluster.submit_as(alice, ANCHOR, "-c3", "--partition=capped")
        cluster.wait_until(lambda: manager.listing().claims, "it waits for room")
        leaving: list[Task] = []

        def make_room() -> bool:
            leaving[:] = [task for task in tasks_of_next_tick() if task.state is TaskState.DRAINING]
            return bool(leaving)

        cluster.wait_until(make_room, "tasks leave a node")
        assert [task.node for task in leaving] in (["n1"] * 3, ["n2"] * 3)
        stop(manager, [task.handle for task in leaving], 0)
        wait_until_running(cluster, [rigid])


def test_other_peoples_jobs_with_any_comment_and_name_do_no_harm(real: Real, manager: SlurmManager) -> None:
    tag = task_tag(JOB, "worker-1")
    comment = f"|1|2\n3|RUNNING|\n{tag}|é%A" + "y" * 300
    handle = manager.submit(alices(real, FOREVER))
    odd = real.cluster.submit_as(real.bob, ANCHOR, f"--comment={comment}", "--job-name=a|b c\nUserId=root(0)")
    gres = "--gres=gpu:x|9|N/A|0|Resources|4611686018427387904|N/A|UNLIMITED||(null)|3:1"
    typed = real.cluster.submit_as(real.bob, ANCHOR, "--hold", gres)
    array = real.cluster.submit_as(real.bob, ANCHOR, "--array=1-5", "--hold")
    jobs = {job.handle: job for job in manager.listing().jobs}
    assert jobs[handle].tag == tag
    assert jobs[odd].tag == ""
    assert (jobs[typed].reason, jobs[typed].priority) == ("JobHeldUser", 0)
    assert jobs[array].state is RmJobState.PENDING


def test_another_users_job_cannot_carry_a_mark_of_a_living_anchor(real: Real, manager: SlurmManager) -> None:
    anchor = real.cluster.submit_as(real.alice, ANCHOR)
    mark = task_tag(JobKey("lab", anchor, 1_795_000_000), "worker-1")
    forged = real.cluster.submit_as(real.bob, ANCHOR, f"--comment={mark}")
    own = real.cluster.submit_as(real.alice, ANCHOR, f"--comment={mark}")
    assert listed(manager, forged).tag == ""
    assert listed(manager, own).tag == mark


def test_an_anchor_is_authenticated(real: Real, manager: SlurmManager) -> None:
    name = "x|y\nGroupId=root(0)"
    before = int(time.time())
    anchor_id = real.cluster.submit_as(real.alice, ANCHOR, f"--job-name={name}")
    real.cluster.wait_until(lambda: listed(manager, anchor_id).state is RmJobState.RUNNING, "the anchor runs")
    anchor = manager.authenticate(anchor_id, proof(real, real.alice, anchor_id))
    assert anchor.key.cluster == "lab"
    assert anchor.key.id == anchor_id
    assert before <= anchor.key.submitted <= time.time()
    assert anchor.key.submitted == listed(manager, anchor_id).submitted
    assert anchor.owner == real.owner(real.alice)
    assert anchor.script == ANCHOR
    assert JobKey.from_slug(anchor.key.slug) == anchor.key


def test_an_anchor_that_asked_for_nodes_of_its_own_is_refused(real: Real, manager: SlurmManager) -> None:
    real.cluster.run("scontrol", "create", "partitionname=whole", "nodes=n1", "oversubscribe=exclusive", "state=up")
    try:
        asked = real.cluster.submit_as(real.alice, ANCHOR, "--nodelist=n2", "--exclusive")
        wait_for(real, manager, asked, RmJobState.RUNNING)
        with pytest.raises(Rejected, match="--exclusive of sbatch cannot be used"):
            manager.authenticate(asked, proof(real, real.alice, asked))
        has = real.cluster.submit_as(real.alice, ANCHOR, "--partition=whole")
        wait_for(real, manager, has, RmJobState.RUNNING)
        assert manager.authenticate(has, proof(real, real.alice, has)).key.id == has
        assert manager.listing().whole_nodes == {has}
        waits = real.cluster.submit_as(real.alice, ANCHOR, "--partition=whole")
        real.cluster.wait_until(lambda: manager.listing().claims, "another job waits")
        assert [(claim.handle, claim.whole) for claim in manager.listing().claims] == [(waits, True)]
    finally:
        real.cluster.run("scancel", "-u", real.alice.name)
        real.cluster.wait_until(lambda: not real.cluster.running(), "all jobs are gone")
        real.cluster.run("scontrol", "delete", "partitionname=whole")


def test_a_proof_serves_once_and_only_its_maker_and_its_job(real: Real, manager: SlurmManager) -> None:
    anchor = real.cluster.submit_as(real.alice, ANCHOR, "--hold")
    with pytest.raises(Rejected, match=r"does not run \(PENDING\)"):
        manager.authenticate(anchor, proof(real, real.alice, anchor))
    real.cluster.run("scontrol", "release", anchor)
    wait_for(real, manager, anchor, RmJobState.RUNNING)
    good = proof(real, real.alice, anchor)
    manager.authenticate(anchor, good)
    with pytest.raises(Denied, match="used before"):
        manager.authenticate(anchor, good)
    with pytest.raises(NotFound, match=f"Slurm lists no job {anchor} of user {real.bob.uid}: "):
        manager.authenticate(anchor, proof(real, real.bob, anchor))
    with pytest.raises(Denied, match="not made for job"):
        manager.authenticate(anchor, proof(real, real.alice, "999999"))
    for garbage in ("", "garbage", "MUNGE:AAAA:", good[:-20], good.replace("A", "B")):
        with pytest.raises(Denied):
            manager.authenticate(anchor, garbage)
    with pytest.raises(NotFound):
        manager.authenticate("4000000000", proof(real, real.alice, "4000000000"))
    real.cluster.run("scancel", anchor)
    wait_for_end(real, manager, anchor)
    with pytest.raises(NotFound, match="has ended"):
        manager.authenticate(anchor, proof(real, real.alice, anchor))


def test_an_anchor_without_a_script_is_not_authenticated(real: Real, manager: SlurmManager) -> None:
    said = real.cluster.run("salloc", "--no-shell", user=real.alice).stderr
    anchor = said.split("allocation ")[1].split()[0]
    with pytest.raises(NotFound, match="start it with sbatch"):
        manager.authenticate(anchor, proof(real, real.alice, anchor))


def test_capabilities(real: Real, manager: SlurmManager) -> None:
    able = manager.capabilities()
    assert (able.name, able.cluster, able.other_users, able.starts_anchors) == ("slurm", "lab", True, False)
    assert able.version[0].isdigit()


def test_a_controller_that_is_down_is_unavailable_and_comes_back(real: Real, manager: SlurmManager) -> None:
    impatient = manager_of(real.cluster, command_timeout_seconds=2)
    handle = manager.submit(alices(real, FOREVER))
    wait_for(real, manager, handle, RmJobState.RUNNING)
    identity = listed(manager, handle).identity
    missing = manager_of(real.cluster, munge_socket="/nonexistent/socket")
    with pytest.raises(Unavailable, match="munge"):
        missing.authenticate(handle, proof(real, real.alice, handle))
    real.cluster.stop_controller()
    try:
        for ask in (
            impatient.listing,
            lambda: impatient.submit(alices(real, "true")),
            lambda: impatient.stop([identity], 600),
            lambda: impatient.authenticate(handle, proof(real, real.alice, handle)),
        ):
            with pytest.raises(Unavailable):
                ask()
    finally:
        real.cluster.start_controller(fresh=False)
    real.cluster.wait_until(lambda: real.cluster.job_state(handle) == "RUNNING", "the controller is back")
    assert listed(manager, handle).state is RmJobState.RUNNING
    stop(manager, [handle], 0)
    wait_for_end(real, manager, handle)
    impatient.close()


def test_a_probe_job_without_dl2_run_on_its_node_says_so(real: Real) -> None:
    manager = manager_of(real.cluster, partition=real.cluster.partition)
    submitted, node, step = manager.probe("/no/such/dl2-run", real.alice.name, 60.0)
    manager.close()
    assert (submitted.good, node.good, step.good) == (True, True, False)
    assert step.text == (
        f"{real.alice.name} cannot run /no/such/dl2-run on this node: install dl2d in a folder that all nodes share"
    )
    assert real.cluster.running() == []


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there")
def test_nothing_of_a_cluster_is_left_when_its_test_is_killed(tmp_path: Path) -> None:
    """The keeper outlives the test that made the cluster, and cleans up behind it."""
    program = (
        "import sys, json, os, signal\n"
        f"sys.path[:0] = {[str(Path(__file__).parents[1])]!r}\n"
        "from slurm_cluster import SlurmCluster\n"
        "cluster = SlurmCluster(nodes=1)\n"
        "cluster.start()\n"
        "user = cluster.add_user('carol')\n"
        "job = cluster.submit_as(user, '#!/bin/sh\\nsetsid sleep 600 & touch up; wait\\n')\n"
        "cluster.wait_until((user.home / 'up').exists, 'up')\n"
        "print(json.dumps([str(cluster.directory), user.name]), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    directory, user = json.loads(done.stdout)
    deadline = time.monotonic() + 60

    def left() -> list[str]:
        found = [directory] if Path(directory).exists() else []
        found += [entry.pw_name for entry in pwd.getpwall() if entry.pw_name == user]
        for process in psutil.process_iter():
            try:
                found += [process.name()] if any(directory in word for word in process.cmdline()) else []
                found += [process.name()] if process.username() == user else []
            except psutil.Error:
                continue
        return found

    while left():
        assert time.monotonic() < deadline, left()
        time.sleep(0.1)


def test_munge_says_which_user_asks_once_and_for_one_request(real: Real, manager: SlurmManager) -> None:
    payload, other = (request_payload("GET", "https://head:8910", f"/v1/status?job={job}") for job in (1, 2))

    def made_by(user: User, text: str) -> str:
        return real.cluster.run("munge", "-S", str(real.cluster.munge_socket), "-s", text, user=user).stdout.strip()

    own = munge_credential(payload, {"MUNGE_SOCKET": str(real.cluster.munge_socket)})
    assert manager.authenticate_user(own, payload) == os.geteuid()
    credential = made_by(real.alice, payload)
    assert manager.authenticate_user(credential, payload) == real.alice.uid
    with pytest.raises(Denied, match="used before"):
        manager.authenticate_user(credential, payload)
    assert manager.authenticate_user(made_by(real.bob, payload), payload) == real.bob.uid
    for text in (other, "dl2d:1", payload + " ", ""):
        with pytest.raises(Denied, match="not made for this request to this daemon"):
            manager.authenticate_user(made_by(real.alice, text), payload)
    for made_up in ("", "MUNGE:AwQDAAB:", "x" * 5000):
        with pytest.raises(Denied):
            manager.authenticate_user(made_up, payload)


@pytest.mark.parametrize(
    ("option", "says", "wrong"),
    [
        ("--nice=3", None, False),
        ("--reservatoin=ml", "--reservatoin=ml", True),
        ("--time-min=soon", "--time-min", True),
        ("--reservation=nosuch", "Requested reservation is invalid", False),
        ("--constraint=nosuch", "Invalid feature specification", False),
    ],
)
def test_what_sbatch_finds_wrong_with_options_for_all_tasks(
    private_slurm: Real, option: str, says: str | None, wrong: bool
) -> None:
    environ = {"PATH": PATH, "SLURM_CONF": str(private_slurm.cluster.conf)}
    advice = configuration_advice(SlurmSettings.parse({"sbatch_options": [option]}), environ)
    found = [each for each in advice if each.item.endswith(".sbatch_options")]
    assert len(found) == (says is not None)
    if says is not None:
        assert says in found[0].text
        assert found[0].wrong is wrong
    assert not private_slurm.cluster.running()


def test_a_suspended_task_says_so(real: Real, manager: SlurmManager) -> None:
    job = manager.submit(alices(real, FOREVER))
    wait_for(real, manager, job, RmJobState.RUNNING)
    for command, reason in (("suspend", "suspended by Slurm"), ("resume", "")):
        real.cluster.run("scontrol", command, job)
        found = wait_for(real, manager, job, RmJobState.RUNNING)
        assert (found.not_executing, found.reason) == (command == "suspend", reason)


def test_a_requeued_anchor_waits_for_its_time_and_starts_by_itself(real: Real, manager: SlurmManager) -> None:
    array = real.cluster.submit_as(real.alice, ANCHOR, "--array=1-2", "--cpus-per-task=1", "--mem=100")

    def anchor(number: int) -> RmJob:
        return next(job for job in manager.listing().jobs if job.shown_id == f"{array}_{number}")

    def running(number: int) -> bool:
        found = manager.listing().jobs
        return any(job.shown_id == f"{array}_{number}" and job.state is RmJobState.RUNNING for job in found)

    real.cluster.wait_until(lambda: running(1) and running(2), "both run")
    before = anchor(1)
    assert before.held == Resources.of(cpu=1, memory=100)
    manager.requeue(before.identity, 3600)
    real.cluster.wait_until(lambda: anchor(1).state is RmJobState.PENDING, "it waits")
    waits = anchor(1)
    assert (waits.handle, waits.begins_later, waits.reason, waits.requeues) == (before.handle, True, "BeginTime", 1)
    assert waits.submitted > before.submitted
    assert waits.held == before.held
    assert running(2)
    # By an identity that is none any more nothing happens.
    with pytest.raises(NotFound):
        manager.requeue(before.identity, 7200)
    manager.requeue(waits.identity, 0)
    real.cluster.wait_until(lambda: running(1), "it runs again", timeout=200)
    # One that has started meanwhile goes on.
    manager.requeue(waits.identity, 0)
    assert anchor(1).requeues == 1
    real.cluster.run("scancel", array)


def test_an_anchor_that_has_ended_is_not_requeued(real: Real, manager: SlurmManager) -> None:
    handle = real.cluster.submit_as(real.alice, ANCHOR, "--cpus-per-task=1", "--mem=100")
    job = wait_for(real, manager, handle, RmJobState.RUNNING)
    real.cluster.run("scancel", handle)
    wait_for(real, manager, handle, RmJobState.CANCELLED)
    with pytest.raises(NotFound):
        manager.requeue(job.identity, 600)
    # Also one that ends between the two commands.
    real.cluster.run("scontrol", "requeue", "Incomplete", handle)
    assert listed(manager, handle).state is RmJobState.CANCELLED


def test_an_anchor_that_slurm_does_not_requeue_gets_no_begin_time(real: Real, manager: SlurmManager) -> None:
    handle = real.cluster.submit_as(real.alice, ANCHOR, "--no-requeue", "--cpus-per-task=1", "--mem=100")
    job = wait_for(real, manager, handle, RmJobState.RUNNING)
    with pytest.raises(ResourceManagerError) as raised:
        manager.requeue(job.identity, 600)
    assert not isinstance(raised.value, Unavailable)
    assert listed(manager, handle).state is RmJobState.RUNNING
    real.cluster.run("scancel", handle)
