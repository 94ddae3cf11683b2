"""How the manager uses Slurm's commands, seen by fakes of them on PATH."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from slurm_fakes import JOB, Clock, FakeSlurm, Managers, identity, job_row, live_task, node_row, task
from structlog.testing import capture_logs

from dl2d.core.cluster import NodeState, Task
from dl2d.core.errors import Denied, NeverStarts, NodeRefused, NotFound, Rejected, ResourceManagerError, Unavailable
from dl2d.core.jobs import Launch, Owner
from dl2d.core.resource_manager import RmIdentity, RmJobState
from dl2d.core.resources import Resources
from dl2d_slurm.commands.commands import TokenBucket

TOKEN = "5ec4e7" * 10
#: No user has it.
UNKNOWN_UID = 2_000_000_017
OWNER_ROW: dict[str, object] = {
    "JobID": 12,
    "State": "RUNNING",
    "SubmitTime": 1_795_000_000,
    "UserID": 1001,
    "GroupID": 1002,
    "UserName": "alice",
    "Account": "ml",
    "Partition": "gpu",
    "QOS": "(null)",
    "Container": "(null)",
    "MCSLabel": "N/A",
    "OverSubscribe": "OK",
    "Exclusive": "",
    "admin_comment": "(null)",
    "Name": "train",
}
#: A job with nodes of its own, as squeue shows it before Slurm 26.05, and since.
OLD = {"OverSubscribe": "NO"}
NEW = {"OverSubscribe": "NO", "Exclusive": "NODE"}
SCRIPT = "#!/bin/sh\n#DL2 model=resnet-50\nexec dl2-run python train.py\n"
CREDENTIAL = "MUNGE:AwQDAAB...:"
GOOD = "STATUS:          0\nUID:             1001\nLENGTH:          7\n\ndl2d:12"


# Nodes that jobs may use


def test_a_listing_says_which_nodes_jobs_may_use(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer(
        "sinfo",
        rows=[
            *(node_row(name, PartitionName="all") for name in ("n1", "n2", "n3")),
            *(node_row(name, PartitionName="small") for name in ("n1", "n2")),
            node_row("n4", PartitionName="all", StateLong="reserved"),
            node_row("n4", PartitionName="down", Available="inact", StateLong="reserved"),
        ],
    )
    slurm.answer(
        "squeue",
        rows=[
            job_row(1, Partition="all"),
            job_row(2, Partition="small"),
            job_row(3, Partition="all", excluded="n[1-2]", Comment="(null)"),
            job_row(4, Partition="all", Reservation="ml"),
            job_row(5, Partition="down"),
            job_row(6, Partition="small", State="PENDING"),
            job_row(7, Partition="small", Comment="dl2:fake.3.9:worker-1"),
            job_row(8, Partition="small", State="COMPLETING"),
        ],
    )
    start, end = int(clock.now) - 60, int(clock.now) + 60
    slurm.answer("scontrol", stdout=f"ReservationName=ml StartTime={start} EndTime={end} Nodes=n4 TRES=cpu=8\n")
    listing = manager_on().listing()
    said = {handle: (sorted(found.nodes), found.reason) for handle, found in listing.eligible_nodes.items()}
    assert said == {
        "1": (["n1", "n2", "n3"], "not those of reservation ml"),
        "2": (["n1", "n2"], "partition small"),
        "3": (["n3"], "not n[1-2], which the job excludes; not those of reservation ml"),
        "4": (["n4"], "reservation ml"),
        "5": ([], "partition down (down is inact)"),
        "7": (["n1", "n2"], "partition small"),
        "8": (["n1", "n2"], "partition small"),
    }
    assert [node.state for node in listing.nodes] == [NodeState.UP] * 4


def test_a_waiting_job_of_the_site_may_use_no_node_while_it_waits_for_anything_but_room(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    use = {"n1": "1/7/0/8", "n2": "0/8/0/8", "n3": "0/8/0/8"}
    nodes = [node_row(name, PartitionName="all", CPUsState=cpus, AllocMem=0, GresUsed="") for name, cpus in use.items()]
    slurm.answer("sinfo", rows=[*nodes, *(node_row(name, PartitionName="small") for name in ("n1", "n2"))])
    static = {
        "State": "PENDING",
        "Comment": "(null)",
        "NodeList": "",
        "NumTasks": 2,
        "Name": "bert",
        "UserID": 1001,
        "GroupID": 1002,
    }
    reasons = {20: "Resources", 21: "Priority", 22: "JobHeldUser", 23: "Dependency", 24: "QOSGrpGRES", 25: "None"}
    slurm.answer(
        "squeue",
        rows=[
            *(job_row(number, **static, Partition="small", Reason=reason) for number, reason in reasons.items()),
            job_row(26, **static, Partition="all", Reason="Resources"),
            *(
                job_row(27 + place, **static, Partition="all", Reason="Priority", **own)
                for place, own in enumerate((OLD, NEW))
            ),
        ],
    )
    watch = [{"partition": name, "model": "bert"} for name in ("all", "small")]
    eligible = manager_on(watch=watch).listing().eligible_nodes
    small = (["n1", "n2"], "partition small")
    assert {handle: (sorted(found.nodes), found.reason) for handle, found in eligible.items()} == {
        "20": small,
        "21": small,
        "22": ([], "Slurm does not start it now: JobHeldUser"),
        "23": ([], "Slurm does not start it now: Dependency"),
        "24": ([], "Slurm does not start it now: QOSGrpGRES"),
        "25": ([], "Slurm does not start it now: it was not considered yet"),
        "27": (["n2", "n3"], "only nodes on which nothing runs"),
        "28": (["n2", "n3"], "only nodes on which nothing runs"),
    }


@pytest.mark.parametrize(
    ("setting", "own", "tasks", "nodes"),
    [
        ("", "small", "small", "n2"),
        ("gpu", "small", "gpu", None),
        ("gpu,small", "small", "small", "n2"),
        ("gpu,small", "gpu", "gpu", "n1"),
        ("gpu,small", "cpu", "gpu,small", None),
    ],
)
def test_tasks_run_in_their_anchors_partition_if_the_settings_name_it_else_in_those_that_they_name(
    authentication: FakeSlurm, manager_on: Managers, setting: str, own: str, tasks: str, nodes: str | None
) -> None:
    rows = [node_row("n1"), node_row("n2", PartitionName="small"), node_row("n3", PartitionName="cpu")]
    authentication.answer("sinfo", rows=rows)
    authentication.answer("squeue", rows=[OWNER_ROW | job_row(12, Partition=own)])
    manager = manager_on(cluster="fake", partition=setting)
    eligible = manager.listing().eligible_nodes
    assert {name for found in eligible.values() for name in found.nodes} == ({nodes} if nodes else set())
    owner = manager.authenticate("12", CREDENTIAL).owner
    assert owner.partition == tasks
    for listed in (True, False):
        manager.submit(task(owner=replace(owner, partition=own), node=""))
        assert f"--partition={tasks}" in authentication.calls("sbatch")[-1].argv, listed
        authentication.answer("squeue", rows=[])
        manager.listing()


def test_a_job_is_told_which_of_its_options_do_not_hold_for_its_tasks(
    authentication: FakeSlurm, manager_on: Managers
) -> None:
    text = "#!/bin/sh\n#SBATCH -L matlab --mail-type=END --time=30 -p gpu -s\n#DL2 model=resnet-50\ntrue\n"
    authentication.answer("scontrol", stdout=text)
    alone = "of the options of sbatch, these do not hold for tasks: --licenses, --mail-type, --oversubscribe"
    assert manager_on(cluster="fake").authenticate("12", CREDENTIAL).remarks == (alone,)
    authentication.answer("scontrol", stdout="#!/bin/sh\n#DL2 model=resnet-50\ntrue\n")
    assert manager_on(cluster="fake").authenticate("12", CREDENTIAL).remarks == ()
    authentication.answer("squeue", rows=[OWNER_ROW | {"Licenses": "matlab:1"}])  # by sbatch's command line
    (remark,) = manager_on(cluster="fake").authenticate("12", CREDENTIAL).remarks
    assert remark == "of the options of sbatch, these do not hold for tasks: --licenses"
    authentication.answer("squeue", rows=[OWNER_ROW])
    authentication.answer("scontrol", stdout=text)
    elsewhere = "tasks of this job run in partition small, not in gpu as its batch job does"
    assert manager_on(cluster="fake", partition="small").authenticate("12", CREDENTIAL).remarks == (alone, elsewhere)


def test_an_idle_reserved_node_takes_tasks_only_if_a_job_has_the_reservation(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    slurm.answer("sinfo", rows=[node_row("n1"), node_row("n2", StateLong="reserved")])
    slurm.answer("squeue", rows=[job_row(1)])
    slurm.answer(
        "scontrol", stdout=f"ReservationName=ml StartTime=1 EndTime={clock.now + 60:.0f} Nodes=n2 TRES=cpu=8\n"
    )
    listing = manager_on().listing()
    assert [node.state for node in listing.nodes] == [NodeState.UP, NodeState.DRAINING]


@pytest.mark.parametrize(("flags", "options"), [("", ["--reservation=ml"]), ("MAGNETIC", [])])
def test_tasks_of_an_anchor_that_a_magnetic_reservation_has_attracted_may_run_elsewhere(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, flags: str, options: list[str]
) -> None:
    """squeue shows the reservation although its user did not ask for it."""
    slurm.answer("squeue", rows=[job_row(12, Reservation="ml")])
    end = int(clock.now) + 60
    slurm.answer(
        "scontrol",
        stdout=f"ReservationName=ml StartTime=1 EndTime={end} Nodes=n2 Flags={flags} TRES=cpu=8 Users=alice\n",
    )
    manager = manager_on()
    eligible = manager.listing().eligible_nodes
    assert {handle: found.nodes for handle, found in eligible.items()} == ({} if flags else {"12": {"n2"}})
    manager.submit(task())
    assert [word for word in slurm.calls("sbatch")[0].argv if word.startswith("--reservation")] == options


def test_reservations_are_asked_for_in_each_listing_only_while_there_are_any(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    slurm.answer("squeue", rows=[job_row(1)])
    manager = manager_on()
    asked = []
    for answer in ("No reservations in the system\n", "", "ReservationName=a StartTime=1 EndTime=9 Nodes=n1\n", "", ""):
        slurm.answer("scontrol", stdout=answer)
        slurm.forget()
        manager.listing()
        asked.append(len([call for call in slurm.calls("scontrol") if call.argv[-1] == "reservation"]))
        clock.now += 40
    assert asked == [1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("reason", "handles", "left", "whose"),
    [
        ("QOSGrpGRES", {"1", "2"}, {"gpu": 0.0}, "QOS high in partition gpu (QOSGrpGRES, of the QOS of the job or"),
        ("QOSMaxCpuPerUserLimit", {"1"}, {"cpu": 0.0}, "QOS high, user alice in partition gpu (QOSMaxCpuPerUserLimit,"),
        # It may be that of alice's own association: bob's jobs in the account go on growing.
        ("AssocGrpMemLimit", {"1"}, {"memory": 0.0}, "account ml, user alice (AssocGrpMemLimit)"),
        ("AssocMaxJobsLimit", {"1"}, {"cpu": 0.0, "gpu": 0.0, "memory": 0.0}, "account ml, user alice (A"),
        ("QOSMaxGRESPerJob", {"1"}, {"gpu": 0.0}, "job 1 (QOSMaxGRESPerJob)"),
        ("QOSMinGRES", {"1"}, {"cpu": 0.0, "gpu": 0.0, "memory": 0.0}, "job 1 (QOSMinGRES)"),
        ("AssociationTimeLimit", {"1"}, {"cpu": 0.0, "gpu": 0.0, "memory": 0.0}, "job 1 (AssociationTimeLimit)"),
        (
            "QOSUsageThreshold",
            {"1"},
            {"cpu": 0.0, "gpu": 0.0, "memory": 0.0},
            "QOS high, account ml, user alice in part",
        ),
    ],
)
def test_a_task_that_waits_for_a_limit_says_whose_and_of_what(
    slurm: FakeSlurm, manager_on: Managers, reason: str, handles: set[str], left: dict[str, float], whose: str
) -> None:
    shared = {"QOS": "high", "Account": "ml"}
    waits = {"State": "PENDING", "NodeList": "", **shared}
    slurm.answer(
        "squeue",
        rows=[
            job_row(1, **shared),
            job_row(2, QOS="high", Account="bio", UserName="bob"),
            job_row(3, QOS="low", Account="ml", UserName="bob"),
            job_row(4, **waits, Comment="dl2:fake.1.9:worker-1", Reason=reason),
            job_row(5, **waits, Comment="dl2:fake.1.9:worker-2", Reason="Resources"),
        ],
    )
    jobs = manager_on().listing().jobs
    limit = jobs[3].limit
    assert limit is not None
    # Tasks have the options of their anchors, so they are among the jobs that share a limit; the tick knows anchors.
    assert (limit.anchors - {"4", "5"}, limit.left) == (handles, left)
    assert f"leaves no more to {whose}" in limit.reason
    assert [job.limit for job in jobs if job is not jobs[3]] == [None] * 4


@pytest.mark.parametrize(
    ("own", "handles"),
    [
        ({"Partition": "gpu"}, {"1"}),
        ({"Partition": "gpu,big"}, {"1", "2"}),
        ({"Partition": "gpu", "QOS": "low"}, {"3"}),  # its user has changed it: scontrol update job=4 qos=low
    ],
)
def test_a_limit_of_the_qos_of_a_job_or_its_partition_is_that_of_jobs_with_both(
    slurm: FakeSlurm, manager_on: Managers, own: dict[str, str], handles: set[str]
) -> None:
    task = {"State": "PENDING", "NodeList": "", "QOS": "normal", "Comment": "dl2:fake.1.9:worker-1", **own}
    slurm.answer(
        "squeue",
        rows=[
            job_row(1, QOS="normal", Partition="gpu"),
            job_row(2, QOS="normal", Partition="big"),
            job_row(3, QOS="low", Partition="gpu"),
            job_row(4, **task, Reason="QOSGrpCpuLimit"),
        ],
    )
    limit = manager_on().listing().jobs[3].limit
    assert limit is not None
    assert limit.anchors - {"4"} == handles
    (limit,) = (job.limit for job in manager_on(partition="gpu").listing().jobs if job.limit is not None)
    assert limit.anchors - {"4"} == ({"3"} if "QOS" in own else {"1", "2"})  # tasks of all run there


# Time limits and partitions of tasks


@pytest.mark.parametrize(
    ("left", "settings", "minutes"),
    [
        (1790, {}, [29, 28]),
        (1800, {}, [30, 28]),
        (300, {}, [5, 3]),
        (130, {}, [2, 1]),
        (50, {}, [1]),
        (-5, {}, [1]),
        (1790, {"time_limit": "20"}, [20]),
        (1790, {"time_limit": "0-10:00"}, [29, 28]),
        (1790, {"time_limit": "00020"}, [20]),
        (7190, {}, [100]),
    ],
    ids=[
        *("rounded", "whole", "short", "shorter", "less than a minute", "over", "setting", "longer setting"),
        *("long number", "partition"),
    ],
)
def test_a_task_has_what_is_left_of_its_anchors_time_and_less_if_it_is_backfilled(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, left: int, settings: dict[str, object], minutes: list[int]
) -> None:
    slurm.answer("squeue", rows=[job_row(12, EndTime=int(clock.now) + left)])
    slurm.answer("sinfo", rows=[node_row("n1", Time="1:40:00"), node_row("n1", PartitionName="all")])
    manager = manager_on(**settings)
    manager.listing()
    manager.submit(task(owner=Owner("alice", 1001, 1002, partition="gpu")))
    words = [word for word in slurm.calls("sbatch")[0].argv if word.startswith("--time")]
    assert words == [f"{option}={each}" for option, each in zip(("--time", "--time-min"), minutes, strict=False)]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--time=5", ["--time=29", "--time=5"]),
        ("--time-min=9", ["--time=29", "--time-min=9"]),
        ("--tmp=100", ["--time=29", "--time-min=28"]),
    ],
)
def test_no_time_min_is_set_beside_an_administrators_time(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, option: str, expected: list[str]
) -> None:
    slurm.answer("squeue", rows=[job_row(12, EndTime=int(clock.now) + 1790)])
    manager = manager_on(sbatch_options=[option])
    manager.listing()
    manager.submit(task(owner=Owner("alice", 1001, 1002, partition="gpu")))
    words = [word for word in slurm.calls("sbatch")[0].argv if word.startswith("--time")]
    assert words == expected


@pytest.mark.parametrize(
    ("anchor", "most", "settings", "options"),
    [
        ({}, "infinite", {}, ["--time=UNLIMITED"]),
        ({}, "1:40:00", {}, ["--time=100"]),
        ({}, "infinite", {"time_limit": "20"}, ["--time=20"]),
        ({}, "infinite", {"time_limit": "UNLIMITED"}, ["--time=UNLIMITED"]),
        ({"TimeLimit": "30:00"}, "infinite", {}, []),
        (None, "infinite", {}, []),
    ],
    ids=["none", "partition", "setting", "unlimited setting", "end is not known", "not listed"],
)
def test_tasks_of_an_anchor_without_a_time_limit_have_the_largest_that_they_may(
    slurm: FakeSlurm, manager_on: Managers, anchor: dict[str, str] | None, most: str, settings: dict[str, object],
    options: list[str],
) -> None:  # fmt: skip
    """Without --time they would have the partition's default, and all tasks of the minimum size would end at once."""
    slurm.answer("squeue", rows=[] if anchor is None else [job_row(12, EndTime="NONE", **anchor)])
    slurm.answer("sinfo", rows=[node_row("n1", Time=most)])
    manager = manager_on(**settings)
    manager.listing()
    manager.submit(task(owner=Owner("alice", 1001, 1002, partition="gpu")))
    assert [word for word in slurm.calls("sbatch")[0].argv if word.startswith("--time")] == options


def test_a_task_goes_to_a_partition_that_has_its_node(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("sinfo", rows=[node_row("n1", PartitionName="a"), node_row("n2", PartitionName="b")])
    manager = manager_on(partition="a,b")
    manager.listing()
    for node in ("n2", "n3"):
        manager.submit(task(node=node))
    said = [word for call in slurm.calls("sbatch") for word in call.argv if word.startswith("--partition")]
    assert said == ["--partition=b", "--partition=a,b"]


@pytest.mark.parametrize(
    ("minutes", "time_limit", "chosen"),
    [
        (90, "", "short,day,long"),
        (120, "", "short,day,long"),
        (123, "", "day,long"),
        (10_080, "", "long"),
        (99_999, "", "long"),
        (99_999, "5:00:00", "day,long"),
        (None, "3:00:00", "day,long"),
        (None, "", "short,day,long"),
    ],
)
def test_a_task_goes_to_no_partition_whose_limit_is_shorter_than_its_time(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, minutes: int | None, time_limit: str, chosen: str
) -> None:
    """With EnforcePartLimits=ALL sbatch refuses it if one of its partitions has a shorter one. None: end not known."""
    limits = {"short": "2:00:00", "day": "1-00:00:00", "long": "7-00:00:00"}
    slurm.answer("sinfo", rows=[node_row("n1", PartitionName=name, Time=limit) for name, limit in limits.items()])
    end = {"TimeLimit": "30:00"} if minutes is None else {"EndTime": int(clock.now) + 60 * minutes}
    slurm.answer("squeue", rows=[job_row(12, Partition="login", **end)])
    manager = manager_on(partition="short,day,long", time_limit=time_limit)
    manager.listing()
    manager.submit(task())
    assert f"--partition={chosen}" in slurm.calls("sbatch")[0].argv


def test_an_account_may_be_called_none(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("squeue", rows=[job_row(12, Account="none", QOS="None")])
    manager = manager_on()
    manager.listing()
    manager.submit(task())
    (call,) = slurm.calls("sbatch")
    assert {"--account=none", "--qos=None"} <= set(call.argv)


def test_a_task_has_partition_account_and_qos_that_its_anchor_has_now(slurm: FakeSlurm, manager_on: Managers) -> None:
    """A user may change them while the job waits after a requeue; of an anchor that is not listed they are as known."""
    slurm.answer("sinfo", rows=[node_row("n1", PartitionName="new"), node_row("n1", PartitionName="old")])
    slurm.answer("squeue", rows=[job_row(12, Partition="new", Account="b", QOS="q2")])
    manager = manager_on()
    for _ in range(2):
        manager.listing()
        manager.submit(task(owner=Owner("alice", 1001, 1002, account="a", partition="old", qos="q1")))
        slurm.answer("squeue", rows=[])
    asked = ("--partition", "--account", "--qos")
    said = [[word for word in call.argv if word.startswith(asked)] for call in slurm.calls("sbatch")]
    assert said == [
        ["--partition=new", "--account=b", "--qos=q2"],
        ["--partition=old", "--account=a", "--qos=q1"],
    ]


def test_a_listing_that_is_unreadable_in_part_takes_no_options_from_tasks(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    """As when a job registers while a tick starts tasks: the tick's own listing could be read."""
    torn = {"rows": [job_row(12, State="")]}
    slurm.answer("squeue", **torn)
    manager = manager_on()
    assert manager.listing().incomplete
    with pytest.raises(Unavailable, match="could not be read, and job 12 is not in the rest"):
        manager.submit(task())
    assert slurm.calls("sbatch") == []
    for answer in ({"rows": [job_row(12, QOS="gold", Nice=50)]}, torn):
        slurm.answer("squeue", **answer)
        manager.listing()
        manager.submit(task())
    said = [{word for word in call.argv if word.startswith(("--qos", "--nice"))} for call in slurm.calls("sbatch")]
    assert said == 2 * [{"--qos=gold", "--nice=50"}]


# The tick


@pytest.mark.parametrize("jobs", [0, 1000])
def test_a_listing_is_one_squeue_and_one_sinfo_however_many_jobs(
    slurm: FakeSlurm, manager_on: Managers, jobs: int
) -> None:
    rows = [job_row(number, Comment=f"dl2:fake.5000.9:worker-{number}", State="PENDING") for number in range(jobs)]
    slurm.answer("squeue", rows=rows)
    manager = manager_on()
    for ticks in (1, 2, 3):
        assert len(manager.listing().jobs) == jobs
        assert [call.name for call in slurm.calls()] == ["squeue", "sinfo"] * ticks


def test_a_listing_needs_no_more_queries_for_what_is_being_stopped(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("squeue", rows=[job_row(number) for number in range(1000)])
    manager = manager_on()
    manager.stop([identity(number) for number in range(1000)], 60)
    assert [call.name for call in slurm.calls()] == ["squeue", "scancel", "scancel"] * 2
    slurm.forget()
    manager.listing()
    assert [call.name for call in slurm.calls()] == ["squeue", "sinfo", *["scontrol"] * 5]


def test_a_listing_has_nodes_and_jobs(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer("squeue", rows=[job_row(5, Comment="dl2:fake.4.9:ps-0"), job_row(6, State="PENDING", NodeList="")])
    slurm.answer("sinfo", rows=[node_row("n1", CPUsState="1/7/0/8"), node_row("n2", StateLong="down*", Reason="dead")])
    listing = manager_on().listing()
    assert listing.at == clock.now
    assert [(job.handle, job.state, job.tag) for job in listing.jobs] == [
        ("5", RmJobState.RUNNING, "dl2:fake.4.9:ps-0"),
        ("6", RmJobState.PENDING, ""),
    ]
    assert [(node.name, node.state) for node in listing.nodes] == [("n1", NodeState.UP), ("n2", NodeState.DOWN)]
    assert listing.nodes[1].remark == "down, does not answer: dead"


def test_the_words_that_end_records_differ_from_query_to_query(slurm: FakeSlurm, manager_on: Managers) -> None:
    manager = manager_on()
    manager.listing()
    manager.listing()
    formats = [call.argv[-1] for call in slurm.calls("squeue")]
    assert formats[0] != formats[1]


def test_only_the_partitions_nodes_are_seen_where_one_is_set(slurm: FakeSlurm, manager_on: Managers) -> None:
    rows = [node_row("n1", PartitionName="cpu"), node_row("n2", PartitionName="cpu"), node_row("n2"), node_row("n3")]
    slurm.answer("sinfo", rows=rows)
    assert [node.name for node in manager_on(partition="gpu").listing().nodes] == ["n2", "n3"]
    assert not [word for word in slurm.calls("squeue")[0].argv if "partition" in word]


def test_a_young_listing_is_given_out_again_until_something_was_started_or_stopped(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    manager = manager_on(poll_floor_seconds=10)
    first = manager.listing()
    clock.now += 9
    assert manager.listing() is first
    manager.submit(task())
    assert manager.listing() is not first
    manager.stop([identity(77)], 0)
    manager.listing()
    clock.now += 11
    manager.listing()
    assert len(slurm.calls("sinfo")) == 4
    clock.now -= 3600
    manager.listing()
    assert len(slurm.calls("sinfo")) == 5


def test_strange_states_are_reported_once(
    slurm: FakeSlurm, manager_on: Managers, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.answer("squeue", rows=[job_row(1, State="DANCING")])
    slurm.answer("sinfo", rows=[node_row("n1", StateLong="floating")])
    manager = manager_on()
    for _ in range(3):
        manager.listing()
    said = capsys.readouterr().out
    assert said.count("DANCING") == 1
    assert said.count("floating") == 1


@pytest.mark.parametrize("command", ["squeue", "sinfo"])
@pytest.mark.parametrize(
    "said", ["slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "?", ""]
)
def test_no_listing_without_an_answer(slurm: FakeSlurm, manager_on: Managers, command: str, said: str) -> None:
    slurm.answer(command, status=1, stderr=said)
    with pytest.raises(Unavailable, match=command) as caught:
        manager_on().listing()
    assert said in str(caught.value)


def test_a_command_that_hangs_is_given_up(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("squeue", delay=60)
    with pytest.raises(Unavailable, match="squeue did not answer within 1 s"):
        manager_on(command_timeout_seconds=1).listing()


def test_a_missing_command_is_named(slurm: FakeSlurm, manager_on: Managers) -> None:
    (slurm.folder / "sbatch").unlink()
    with pytest.raises(Unavailable, match="sbatch is not installed"):
        manager_on().submit(task())


def test_arguments_that_the_system_does_not_take_refuse_the_task(slurm: FakeSlurm, manager_on: Managers) -> None:
    del slurm
    with pytest.raises(Rejected, match="sbatch: its options are too long for the system"):
        manager_on().submit(task(launch=Launch(("dl2-run",), "/" + 140_000 * "x", ())))


# Submitting


def test_a_task_is_one_sbatch_with_its_secrets_in_the_script_only(slurm: FakeSlurm, manager_on: Managers) -> None:
    launch = Launch(("dl2-run", "python", "train.py"), "/home/alice", (("DL2_TOKEN", TOKEN), ("PATH", "/usr/bin")))
    manager = manager_on()
    manager.listing()
    slurm.forget()
    assert manager.submit(task(launch=launch)) == "77"
    (call,) = slurm.calls()
    assert call.name == "sbatch"
    assert not [word for word in call.argv if TOKEN in word]
    assert f"export DL2_TOKEN={TOKEN}\n" in call.stdin
    assert call.stdin.endswith("\nexec dl2-run python train.py\n")
    assert {"--uid=1001", "--gid=1002"} <= set(call.argv)


def test_commands_get_nothing_of_the_daemons_environment_but_path_and_configuration(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    manager = manager_on()
    manager.submit(task())
    manager.stop([identity(1)], 5)
    for call in slurm.calls():
        # LC_CTYPE: set by the interpreter of the fake itself.
        assert call.env.keys() - {"LC_CTYPE"} <= {"PATH", "SLURM_BITSTR_LEN", "SLURM_CONF", "SLURM_TIME_FORMAT", "TZ"}
        assert call.env["SLURM_CONF"] == "/x/slurm.conf"
    assert slurm.calls("sbatch")[0].env.keys() - {"LC_CTYPE"} == {"PATH", "SLURM_CONF"}


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Batch job submission failed: Invalid account or account/partition combination specified", Rejected),
        ("Batch job submission failed: Invalid qos specification", Rejected),
        ("Batch job submission failed: Requested node configuration is not available", NodeRefused),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size)", Rejected),
        ("invalid partition specified: nope", Rejected),
        ("Invalid --uid specification", Rejected),
        ("", Rejected),
        ("Batch job submission failed: Invalid node name specified", NotFound),
        ("--uid only permitted by root user", Denied),
        ("Batch job submission failed: Access/permission denied", Denied),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", Unavailable),
        ("Batch job submission failed: Socket timed out on send/recv operation", Unavailable),
        ("Slurm temporarily unable to accept job, sleeping and retrying", Unavailable),
        ("Batch job submission failed: Zero Bytes were transmitted or received", Unavailable),
        ("fatal: Could not establish a configuration source", Unavailable),
        ("Batch job submission failed: Protocol authentication error", Unavailable),
        ("Munge encode failed: Failed to access socket (Did you start munged?)", Unavailable),
    ],
)
def test_refusals_are_typed_and_in_slurms_words(
    slurm: FakeSlurm, manager_on: Managers, said: str, kind: type[ResourceManagerError]
) -> None:
    slurm.answer("sbatch", status=1, stderr=f"sbatch: error: {said}\n")
    with pytest.raises(ResourceManagerError, match=r"submission of worker-1 of job 12 for alice on n1") as caught:
        manager_on().submit(task())
    assert type(caught.value) is kind
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("QOSMinGRES", NeverStarts, "demands less than its minimum (QOSMinGRES); demand that with worker=, or submit"),
        ("QOSMaxGRESPerJob", NeverStarts, "it demands more than Slurm gives to one job or on one node (QOSMaxGRES"),
        ("QOSMaxSubmitJobPerUserLimit", Rejected, "QOSMaxSubmitJobPerUserLimit; sbatch: error: Batch job submission"),
    ],
)
def test_what_a_qos_with_deny_on_limit_refuses_never_starts(
    slurm: FakeSlurm, manager_on: Managers, name: str, kind: type[ResourceManagerError], says: str
) -> None:
    said = f"sbatch: error: {name}\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (j\n"
    slurm.answer("sbatch", status=1, stderr=said)
    with pytest.raises(ResourceManagerError) as caught:
        manager_on().submit(task())
    assert type(caught.value) is kind
    assert says in str(caught.value)


@pytest.mark.parametrize("said", ["77\n", "77;fake\n", "sbatch: lua: hello\n77\n"])
def test_noise_is_no_failure(slurm: FakeSlurm, manager_on: Managers, said: str) -> None:
    slurm.answer("sbatch", stdout=said, stderr="sbatch: error: dlopen(dl2_spank.so): no such file\n")
    assert manager_on().submit(task()) == "77"


def test_an_answer_without_an_id_is_an_error(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("sbatch", stdout="Submitted\n")
    with pytest.raises(Rejected, match="Submitted"):
        manager_on().submit(task())


def test_a_daemon_that_is_not_root_submits_its_own_tasks_without_becoming_anyone(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    manager = manager_on(uid=1001)
    manager.submit(task())
    manager.submit(task(owner=Owner("bob", 1005, 1005)))
    own, bobs = (set(call.argv) for call in slurm.calls("sbatch"))
    assert not {"--uid=1001", "--gid=1002"} & own
    # Slurm itself says no to this one.
    assert "--uid=1005" in bobs


def test_a_demand_that_no_node_can_meet_is_refused_before_slurm_queues_it_for_ever(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    slurm.answer("sinfo", rows=[node_row("n1"), node_row("n2", CPUsState="0/64/0/64")])
    manager = manager_on()
    big = Resources.of(cpu=9, memory=5000)
    # On another node it may be started.
    said = r"of job 12 does not fit on n1 \(cpu: wanted 9, had 8; memory: wanted 5000, had 4000\)"
    with pytest.raises(NodeRefused, match=said):
        manager.submit(task(demand=big))
    with pytest.raises(Rejected, match="fits on no node that dl2d uses: even n2 has too little memory") as caught:
        manager.submit(task(demand=big, node=""))
    assert type(caught.value) is Rejected
    assert slurm.calls("sbatch") == []
    manager.submit(task(demand=Resources.of(cpu=9), node=""))


def test_submissions_are_paced(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    manager = manager_on(submit_rate_per_second=2)
    for _ in range(5):
        manager.submit(task())
    assert clock.slept == [0.5, 0.5, 0.5]
    clock.now += 100
    manager.submit(task())
    assert len(clock.slept) == 3


def test_a_bucket_fills_up_to_one_second_and_survives_jumps_of_the_clock(clock: Clock) -> None:
    bucket = TokenBucket(0.5, clock=clock, sleep=clock.sleep)
    bucket.take()
    bucket.take()
    assert clock.slept == [2.0]
    clock.now -= 1e6
    bucket.take()
    assert clock.slept == [2.0, 2.0]


# Stopping


def test_stop_asks_first_and_cancels_when_the_grace_is_over(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    slurm.answer("squeue", rows=[job_row(1), job_row(2)])
    manager = manager_on()
    manager.stop([identity(1), identity(2), identity(1)], 30)
    assert slurm.calls()[0].name == "squeue"
    assert [call.argv for call in slurm.calls("scancel")] == [
        ["scancel", "--state=PENDING", "1", "2"],
        ["scancel", "--state=RUNNING", "--signal=TERM", "--batch", "1", "2"],
    ]
    slurm.forget()
    manager.stop([identity(2), identity(1)], 30)
    clock.now += 29
    manager.listing()
    assert slurm.calls("scancel") == []
    clock.now += 2
    # By now job 1 has ended, and its id is another user's.
    slurm.answer("squeue", rows=[job_row(1, UserName="bob"), job_row(2)])
    manager.listing()
    manager.listing()
    assert [call.argv for call in slurm.calls("scancel")] == [["scancel", "2"]]


@pytest.mark.parametrize(
    ("running", "events"),
    [([], [("not", ["1", "2"])]), ([2], [("not", ["1"]), ("cancelled", ["2"])])],
)  # fmt: skip
def test_of_tasks_whose_grace_is_over_the_log_says_which_were_cancelled(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, running: list[int], events: list[tuple[str, list[str]]]
) -> None:
    slurm.answer("squeue", rows=[job_row(1), job_row(2)])
    manager = manager_on()
    manager.stop([identity(1), identity(2)], 30)
    slurm.answer("squeue", rows=[job_row(number) for number in running])
    clock.now += 31
    with capture_logs() as logs:
        manager.listing()
    assert [(each["event"].partition(" ")[0], each["handles"]) for each in logs if "handles" in each] == events


@pytest.mark.parametrize("grace", [0, 30])
@pytest.mark.parametrize(
    "now",
    [
        {"UserName": "bob"},
        {"SubmitTime": 1795253933},
        {"Comment": "dl2:fake.12.9:worker-1", "SubmitTime": "N/A"},
    ],
    ids=["another user", "requeued", "torn"],
)
def test_a_job_that_is_another_one_by_now_is_not_cancelled(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, now: dict[str, object], grace: int
) -> None:
    mark = "dl2:fake.12.9:worker-1"
    slurm.answer("squeue", rows=[job_row(1, **{"Comment": mark, **now}), job_row(2, Comment=mark)])
    manager = manager_on()
    manager.stop([identity(1, Comment=mark)], grace)
    clock.now += 31
    manager.listing()
    assert slurm.calls("scancel") == []
    manager.stop([identity(2, Comment=mark)], 0)
    assert [call.argv for call in slurm.calls("scancel")] == [["scancel", "2"]]


def scontrol_calls(slurm: FakeSlurm) -> list[list[str]]:
    return [call.argv[1:] for call in slurm.calls("scontrol") if call.argv[1] in ("requeue", "update")]


@pytest.mark.parametrize(
    ("state", "seconds", "calls"),
    [
        ("RUNNING", 960.0, [["requeue", "Incomplete", "12"], ["update", "JobId=12", "StartTime=now+960"]]),
        ("PENDING", 960.0, [["update", "JobId=12", "StartTime=now+960"]]),
        ("PENDING", 0.0, [["update", "JobId=12", "StartTime=now"]]),
        ("RUNNING", 0.0, []),
    ],
)
def test_an_anchor_is_requeued(
    slurm: FakeSlurm, manager_on: Managers, state: str, seconds: float, calls: list[list[str]]
) -> None:
    slurm.answer("squeue", rows=[job_row(12, State=state)])
    manager_on().requeue(identity(12), seconds)
    assert scontrol_calls(slurm) == calls


@pytest.mark.parametrize("state", ["COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"])
@pytest.mark.parametrize("seconds", [960.0, 0.0])
def test_an_anchor_that_has_ended_does_not_run_again(
    slurm: FakeSlurm, manager_on: Managers, state: str, seconds: float
) -> None:
    slurm.answer("squeue", rows=[job_row(12, State=state)])
    with pytest.raises(NotFound, match="it has ended"):
        manager_on().requeue(identity(12), seconds)
    assert scontrol_calls(slurm) == []


@pytest.mark.parametrize("comment", ["dl2:fake.12.9:worker-0", "mine"])
def test_a_job_whose_user_changes_its_comment_is_stopped_all_the_same(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, comment: str
) -> None:
    """The first comment is the tag of a task of alice; jobs 1 and 2 are of bob."""
    mark, bobs = "dl2:fake.11.9:worker-1", {"UserName": "bob"}
    rows = [job_row(1, Comment=comment, **bobs), job_row(2, Comment=mark, **bobs), job_row(12)]
    slurm.answer("squeue", rows=rows)
    manager = manager_on()
    manager.stop([job.identity for job in manager.listing().jobs if job.user == "bob"], 30)
    rows[1]["Comment"] = comment
    slurm.answer("squeue", rows=rows)
    clock.now += 31
    manager.listing()
    assert slurm.calls("scancel")[-1].argv == ["scancel", "1", "2"]


def test_a_task_keeps_the_tag_that_its_user_removes(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    mark = "dl2:fake.12.9:worker-1"
    known = live_task("1", mark)
    manager = manager_on()

    def listed(task: Task, **more: object) -> tuple[str, bool]:
        """Tag of job 1, and whether it is known what it holds."""
        slurm.answer("squeue", rows=[job_row(12), job_row(1, **more)])
        clock.now += 31
        jobs = manager.listing(tasks=[task]).jobs
        return next((job.tag, bool(job.held.thousandths)) for job in jobs if job.handle == "1")

    assert listed(known, Comment="mine") == (mark, True)
    assert listed(known) == (mark, True)
    assert listed(known, SubmitTime=1795253933)[0] == ""  # another job
    # It has not been listed yet.
    for asked_at in (1795253932.7, 1795253992.7):  # by the daemon's clock, which may be ahead of slurmctld's
        unlisted = live_task("1", mark, submitted=0, asked_at=asked_at)
        assert listed(unlisted, ReqNodes="n1") == (mark, True)
        assert listed(unlisted, Comment=mark) == (mark, True)
        for other in ("dl2:fake.12.9:worker-2", "dl2:fake.99.9:ps-1"):
            assert listed(unlisted, ReqNodes="n1", Comment=other) == (mark, True)
            assert listed(unlisted, ReqNodes="n2", Comment=other)[0] != mark
    later = live_task("1", mark, submitted=0, asked_at=1795253993.7)
    assert listed(later, ReqNodes="n1")[0] == ""


@pytest.mark.parametrize(
    "again",
    [
        {},
        {"ReqNodes": "n2"},
        {"ReqNodes": "n1", "Comment": "dl2:fake.13.9:worker-1"},
        {"ReqNodes": "n1", "Comment": "dl2:fake.13.9:worker-1", "UserName": "bob"},
    ],
)
def test_a_job_that_got_the_id_of_a_task_again_is_not_the_task(
    slurm: FakeSlurm, manager_on: Managers, again: dict[str, str]
) -> None:
    """As after slurmctld was killed before it had saved that there was such a job."""
    lost = live_task("1", "dl2:fake.12.9:worker-1", submitted=0, asked_at=1795253900.0)
    slurm.answer(
        "squeue", rows=[job_row(12), job_row(13, UserName=again.get("UserName", "alice")), job_row(1, **again)]
    )
    unlisted = {"submitted": 0, "asked_at": 1795253930.0}
    for handle in ("1", ""):
        others = [live_task(handle, again["Comment"], **unlisted)] if "Comment" in again else []
        for tasks in ([*others, lost], [lost, *others]):
            (found,) = (job for job in manager_on().listing(tasks=tasks).jobs if job.handle == "1")
            assert found.tag == again.get("Comment", "")


def test_of_a_job_array_only_the_task_that_was_meant_is_cancelled(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    """Slurm gives the last task of an array the array's own id, with which scancel ends the whole array."""
    slurm.answer("squeue", rows=[job_row(2, JobArrayID="1_0"), job_row(1, JobArrayID="1_1")])
    manager = manager_on()
    manager.stop([identity(1)], 30)
    clock.now += 31
    manager.listing()
    assert [call.argv for call in slurm.calls("scancel")] == [
        ["scancel", "--state=PENDING", "1_1"],
        ["scancel", "--state=RUNNING", "--signal=TERM", "--batch", "1_1"],
        ["scancel", "1_1"],
    ]


def test_deadlines_of_ended_jobs_are_forgotten(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer("squeue", rows=[job_row(1), job_row(2)])
    manager = manager_on()
    manager.stop([identity(1), identity(2)], 30)
    slurm.answer("squeue", rows=[job_row(1), job_row(2, State="COMPLETED")])
    manager.listing()
    slurm.forget()
    clock.now += 31
    manager.listing()
    assert [call.argv for call in slurm.calls("scancel")] == [["scancel", "1"]]


def test_a_repeat_may_bring_the_end_forward_but_not_put_it_off(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    slurm.answer("squeue", rows=[job_row(1), job_row(2)])
    manager = manager_on()
    manager.stop([identity(1), identity(2)], 30)
    manager.stop([identity(1)], 10)
    manager.stop([identity(1), identity(2)], 3600)
    slurm.forget()
    clock.now += 11
    manager.listing()
    assert [call.argv for call in slurm.calls("scancel")] == [["scancel", "1"]]
    clock.now += 20
    manager.stop([], 30)
    assert slurm.calls("scancel")[-1].argv == ["scancel", "2"]


def test_no_grace_is_one_plain_scancel(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer("squeue", rows=[job_row(1), job_row(2)])
    manager = manager_on()
    manager.stop([identity(1)], 0)
    manager.stop([identity(2)], -1)
    clock.now += 100
    manager.listing()
    assert [call.argv for call in slurm.calls("scancel")] == [["scancel", "1"], ["scancel", "2"]]


def test_deadlines_hold_although_nobody_asks(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    """The thread goes by the same clock; here it stands beyond the deadline before the thread looks."""
    slurm.answer("squeue", rows=[job_row(1)])
    manager = manager_on()
    clock.now += 5
    manager.stop([identity(1)], 0.05)
    clock.now += 1
    deadline = time.monotonic() + 30
    while ["scancel", "1"] not in [call.argv for call in slurm.calls("scancel")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "scancel: error: Kill job error on job id 9: Invalid job id specified\n"),
        (1, "scancel: error: Kill job error on job id 9: Job/step already completing or completed\n"),
        (229, ""),  # seen of 22.05
    ],
)
def test_what_has_ended_is_passed_over(slurm: FakeSlurm, manager_on: Managers, status: int, said: str) -> None:
    slurm.answer("squeue", rows=[job_row(9)])
    slurm.answer("scancel", status=status, stderr=said * 2)
    with capture_logs() as logs:
        manager_on().stop([identity(9)], 5)
        manager_on().stop([identity(9)], 0)
    assert [entry for entry in logs if entry["log_level"] == "warning"] == []


@pytest.mark.parametrize("set_by", [-5000.0, 5000.0])
def test_deadlines_hold_although_the_clock_is_set(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, set_by: float
) -> None:
    slurm.answer("squeue", rows=[job_row(1)])
    manager = manager_on()
    manager.stop([identity(1)], 30)
    slurm.forget()
    clock.set_by = set_by
    clock.now += 29
    manager.listing()
    assert slurm.calls("scancel") == []
    clock.now += 2
    manager.listing()
    assert [call.argv for call in slurm.calls("scancel")] == [["scancel", "1"]]


def test_a_job_that_the_daemon_may_not_end_keeps_it_from_ending_no_other(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    """As of a daemon whose account is not root: anchors belong to users."""
    slurm.answer("squeue", rows=[job_row(8), job_row(9)])
    said = "scancel: error: Kill job error on job id 9: Access/permission denied\n"
    slurm.answer("scancel", status=1, stderr=said)
    manager = manager_on()
    with capture_logs() as log:
        manager.stop([identity(8), identity(9)], 30)
    assert [call.argv for call in slurm.calls("scancel")] == [
        ["scancel", "--state=PENDING", "8", "9"],
        ["scancel", "--state=RUNNING", "--signal=TERM", "--batch", "8", "9"],
    ]
    assert "permission denied" in log[0]["error"]
    clock.now += 31
    slurm.forget()
    for _ in range(3):
        manager.listing()
    assert [call.argv for call in slurm.calls("scancel")] == [["scancel", "8", "9"]]


def test_what_is_no_handle_never_reaches_scancel(slurm: FakeSlurm, manager_on: Managers) -> None:
    manager = manager_on()
    for handle in ("--user=root", "", "1 2", "n1", "4;lab", "٣", "-u"):
        manager.stop([RmIdentity(handle, 0, "alice", "")], 0)
    assert slurm.calls("scancel") == []


def test_an_unreachable_controller_is_told_and_the_deadline_kept(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    slurm.answer("scancel", status=1, stderr="scancel: error: Unable to contact slurm controller (connect failure)\n")
    slurm.answer("squeue", rows=[job_row(1)])
    manager = manager_on()
    with pytest.raises(Unavailable, match="connect failure"):
        manager.stop([identity(1)], 30)
    slurm.answer("scancel")
    slurm.forget()
    manager.stop([identity(1)], 30)
    assert len(slurm.calls("scancel")) == 2, "it was not asked to end yet"
    clock.now += 31
    slurm.answer("scancel", status=1, stderr="scancel: error: Unable to contact slurm controller (connect failure)\n")
    manager.listing()
    slurm.answer("scancel")
    manager.listing()
    assert slurm.calls("scancel")[-1].argv == ["scancel", "1"]


# Vouching


@pytest.fixture
def authentication(slurm: FakeSlurm) -> FakeSlurm:
    slurm.answer("unmunge", stdout=GOOD)
    slurm.answer("squeue", rows=[{**OWNER_ROW, "JobID": 11, "Name": "x"}, OWNER_ROW])
    slurm.answer("scontrol", stdout=SCRIPT + "\n")
    return slurm


def test_nothing_is_asked_of_other_clusters_of_a_federation(authentication: FakeSlurm, manager_on: Managers) -> None:
    """With ``FederationParameters=fed_display`` Slurm's commands show all clusters' nodes and jobs by default."""
    manager, own = manager_on(cluster="fake"), (1 << 26) + 12
    authentication.answer("squeue", rows=[{**OWNER_ROW, **OLD}])
    authentication.answer("scontrol", stdout=f"{SCRIPT}\nPartitionName=gpu Nodes=n1 OverSubscribe=EXCLUSIVE\n")
    manager.authenticate("12", CREDENTIAL)
    # One that another cluster of the federation has started.
    elsewhere = job_row(own + 1, State="REVOKED", NodeList="", Reason="None")
    authentication.answer("squeue", rows=[job_row(own), elsewhere])
    runs, started_elsewhere = manager.listing().jobs
    assert (runs.handle, runs.state, runs.node) == (str(own), RmJobState.RUNNING, "n1")
    assert started_elsewhere.state is RmJobState.CANCELLED
    asked = {call.name for call in authentication.calls() if "--local" in call.argv}
    others = [call.argv for call in authentication.calls() if "--local" not in call.argv]
    assert asked == {"squeue", "sinfo", "scontrol"}
    assert not [argv for argv in others if argv[0] in ("squeue", "sinfo") or "partition" in argv]


def test_a_job_is_authenticated_with_four_commands(authentication: FakeSlurm, manager_on: Managers) -> None:
    anchor = manager_on(cluster="fake", munge_socket="/run/m/sock").authenticate("12", CREDENTIAL)
    assert anchor.key == JOB
    assert anchor.owner == Owner("alice", 1001, 1002, account="ml", partition="gpu", qos="")
    assert (anchor.name, anchor.script) == ("train", SCRIPT)
    assert [call.name for call in authentication.calls()] == ["unmunge", "squeue", "scontrol", "squeue"]
    unmunge, squeue, *_ = authentication.calls()
    assert unmunge.stdin == CREDENTIAL
    assert "--socket=/run/m/sock" in unmunge.argv
    assert "--jobs=12" in squeue.argv
    assert not [word for call in authentication.calls() for word in call.argv if CREDENTIAL in word]


def test_a_task_of_an_array_registers_under_the_id_that_users_know(
    authentication: FakeSlurm, manager_on: Managers
) -> None:
    authentication.answer("squeue", rows=[OWNER_ROW | {"JobArrayID": "10_3"}])
    anchor = manager_on(cluster="fake").authenticate("12", CREDENTIAL)
    assert (anchor.key, anchor.handle) == (JOB._replace(id="10_3"), "12")


def test_the_clusters_name_is_asked_for_once(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("sinfo", stdout="slurm-wlm 22.05.8\n")
    manager = manager_on()
    able = manager.capabilities()
    assert (able.name, able.version, able.cluster) == ("slurm", "22.05.8", "fake")
    assert able.other_users
    assert able.parallel_authentication
    assert not able.starts_anchors
    manager.capabilities()
    assert len(slurm.calls("scontrol")) == 1
    assert not manager_on(uid=1001, cluster="mine").capabilities().other_users
    assert len(slurm.calls("scontrol")) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"status": 17, "stdout": GOOD.replace("0\n", "17\n", 1)}, Denied),
        ({"status": 15, "stderr": ""}, Denied),
        ({"status": 8, "stderr": "unmunge: Error: Failed to match armor prefix"}, Denied),
        ({"status": 2, "stderr": "unmunge: Error: No credential specified"}, Denied),
        ({"stdout": GOOD.replace("dl2d:12", "dl2d:13")}, Denied),
        ({"stdout": GOOD + "\n"}, Denied),
        ({"stdout": GOOD.replace("1001", "1005")}, NotFound),
        ({"stdout": GOOD.replace("1001", "0")}, NotFound),
        ({"status": 6, "stderr": "unmunge: Error: Failed to access socket (Did you start munged?)"}, Unavailable),
        ({"status": 7, "stderr": "timed out"}, Unavailable),
        ({"stdout": "?"}, Unavailable),
    ],
)
def test_a_bad_proof_is_denied(
    authentication: FakeSlurm, manager_on: Managers, answer: dict[str, object], kind: type[ResourceManagerError]
) -> None:
    authentication.answer("unmunge", **answer)
    with pytest.raises(kind):
        manager_on(cluster="fake").authenticate("12", CREDENTIAL)
    assert authentication.calls("scontrol") == []


def test_who_sends_a_request_is_said_by_munge_within_a_short_time(
    slurm: FakeSlurm, manager_on: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("unmunge", stdout=GOOD)
    assert manager_on().authenticate_user(CREDENTIAL, "dl2d:12") == 1001
    with pytest.raises(Denied, match="not made for this request to this daemon: DL2_DAEMON, if it is set, must be"):
        manager_on().authenticate_user(CREDENTIAL, "dl2d:13")
    monkeypatch.setattr("dl2d_slurm.manager.USER_SECONDS", 0.5)
    slurm.answer("unmunge", delay=60)
    with pytest.raises(Unavailable, match=r"unmunge did not answer within 0\.5 s"):
        manager_on().authenticate_user(CREDENTIAL, "dl2d:12")


@pytest.mark.parametrize("proof", ["x" * 5000, "ü", "\ud800"])
def test_what_cannot_be_a_credential_is_not_even_tried(
    authentication: FakeSlurm, manager_on: Managers, proof: str
) -> None:
    with pytest.raises(Denied):
        manager_on(cluster="fake").authenticate("12", proof)
    assert authentication.calls() == []


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"JobID": 13}, NotFound),
        ({"State": "COMPLETED"}, NotFound),
        ({"State": "CANCELLED"}, NotFound),
        ({"State": "PENDING"}, Rejected),
        ({"State": "COMPLETING"}, Rejected),
        ({"UserID": 1005}, NotFound),
        ({"UserID": ""}, Unavailable),
        ({"SubmitTime": "N/A"}, Unavailable),
    ],
)
def test_a_job_that_does_not_run_or_is_another_users_is_not_authenticated(
    authentication: FakeSlurm, manager_on: Managers, row: dict[str, object], kind: type[ResourceManagerError]
) -> None:
    authentication.answer("squeue", rows=[{**OWNER_ROW, **row}])
    with pytest.raises(kind):
        manager_on(cluster="fake").authenticate("12", CREDENTIAL)


@pytest.mark.parametrize("name", ["nobody", "1001"])
def test_a_job_whose_user_the_name_service_does_not_know_registers_later(
    authentication: FakeSlurm, manager_on: Managers, name: str
) -> None:
    """For this uid squeue then writes another user's name, or the number."""
    authentication.answer("squeue", rows=[{**OWNER_ROW, "UserName": name, "UserID": UNKNOWN_UID}])
    authentication.answer("unmunge", stdout=GOOD.replace("1001", str(UNKNOWN_UID)))
    manager = manager_on(cluster="fake")
    with pytest.raises(Unavailable, match=f"does not know user {UNKNOWN_UID}"):
        manager.authenticate("12", CREDENTIAL)
    authentication.answer("squeue", rows=[{**OWNER_ROW, "UserID": UNKNOWN_UID}])
    assert manager.authenticate("12", CREDENTIAL).owner.user == "alice"


@pytest.mark.parametrize("name", ["nobody", "1001"])
def test_jobs_and_tasks_keep_their_users_while_the_name_service_does_not_know_them(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, name: str
) -> None:
    tag, new = "dl2:fake.12.1795253932:worker-1", "dl2:fake.12.1795253932:worker-2"
    tasks = [live_task("13", tag), live_task("14", new)]
    rows = [job_row(12), job_row(13, Comment=tag)]
    slurm.answer("squeue", rows=rows)
    manager = manager_on()
    assert manager.listing(tasks=tasks).remarks == ()
    rows = [*rows, job_row(14, Comment=new), job_row(15)]
    slurm.answer("squeue", rows=[{**row, "UserName": name} for row in rows])
    for _ in range(2):
        clock.now += 10
        listing = manager.listing(tasks=tasks)
        assert [(job.handle, job.user, job.tag) for job in listing.jobs] == [
            ("12", "alice", ""), ("13", "alice", tag), ("14", "alice", new), ("15", name, ""),
        ]  # fmt: skip
        assert len(listing.remarks) == 1
        assert listing.incomplete == ()
    manager.stop([job.identity for job in listing.jobs[:3]], 0)
    assert slurm.calls("scancel")[-1].argv[-3:] == ["12", "13", "14"]


def test_whose_a_job_is_does_not_follow_from_the_answer_to_another_user(
    authentication: FakeSlurm, manager_on: Managers
) -> None:
    answers = (
        {"rows": [{**OWNER_ROW, "UserID": 1005}]},
        {"rows": []},
        {"status": 1, "stderr": "slurm_load_jobs error: Invalid job id specified\n"},
    )
    words = set()
    for answer in answers:
        authentication.answer("squeue", **answer)
        with pytest.raises(NotFound) as refused:
            manager_on(cluster="fake").authenticate("12", CREDENTIAL)
        words.add(str(refused.value))
    assert words == {"Slurm lists no job 12 of user 1001: it has ended, or belongs to another user"}


@pytest.mark.parametrize("rm_id", ["--me", "12,13", "", "x", "12_3"])
def test_what_is_no_job_id_never_reaches_squeue(authentication: FakeSlurm, manager_on: Managers, rm_id: str) -> None:
    authentication.answer("unmunge", stdout=GOOD.replace("dl2d:12", f"dl2d:{rm_id}"))
    with pytest.raises(NotFound):
        manager_on(cluster="fake").authenticate(rm_id, CREDENTIAL)
    assert authentication.calls("squeue") == []


@pytest.mark.parametrize(
    ("line", "row", "words"),
    [
        ("#SBATCH --exclusive", {}, "--exclusive of sbatch cannot be used with an elastic job: tasks of elastic jobs"),
        ("#SBATCH -n 1 --exclusive=user # note", {}, "--exclusive"),
        ("#SBATCH --container-image=x.sqsh", {}, "--container-image .* start the container in the command of dl2-run"),
        ("#SBATCH -Mother", {}, "--clusters"),
        ("#SBATCH -sM other", {}, "--clusters"),
        ("#SBATCH --unknown --exclusive", {}, "--exclusive"),
        ("#SBATCH --comment=x --exclusive", {}, "--exclusive"),
        ("#SBATCH hetjob", {}, "hetjob of sbatch"),
        ("  # x\n#SBATCH--exclusive", {}, "--exclusive"),
        pytest.param(f"#SBATCH --comment={'x' * 40_000}", {}, "#SBATCH lines .* longer than 32768", id="long line"),
        pytest.param("#SBATCH -c1\n" * 4_000, {}, "#SBATCH lines .* longer than 32768", id="many lines"),
        pytest.param("\n" * 4_096, {}, "more than 4096 lines before its first command", id="many empty lines"),
        ("", {"Container": "/oci/bundle"}, "--container"),
        ("", {"MCSLabel": "secret"}, "--mcs-label"),
    ],
)
def test_an_option_that_tasks_cannot_have_is_refused_by_name(
    authentication: FakeSlurm, manager_on: Managers, line: str, row: dict[str, object], words: str
) -> None:
    authentication.answer("squeue", rows=[{**OWNER_ROW, **row}])
    authentication.answer("scontrol", stdout=f"#!/bin/sh\n# x\n\n{line}\n{SCRIPT}\n")
    with pytest.raises(Rejected, match=words):
        manager_on(cluster="fake").authenticate("12", CREDENTIAL)


@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH --time=30 -c1 --job-name='x --exclusive'",
        "#SBATCH --job-name hetjob",
        "#SBATCH -sJ hetjob",
        "#SBATCH --comment '--exclusive' -J --exclusive",
        "#SBATCH --unknown hetjob",
        "true\n#SBATCH --exclusive",
        "#\n" * 4_000 + "true\n" + "#\n" * 4_000,
    ],
)
def test_other_options_and_lines_are_not_refused(authentication: FakeSlurm, manager_on: Managers, line: str) -> None:
    authentication.answer("scontrol", stdout=f"#!/bin/sh\n{line}\n{SCRIPT}\n")
    assert manager_on(cluster="fake").authenticate("12", CREDENTIAL).key == JOB


SHARED = "SelectType = select/cons_tres"


@pytest.mark.parametrize(
    ("whole", "partitions", "config", "refused"),
    [
        (OLD, "PartitionName=gpu ExclusiveUser=NO OverSubscribe=NO", SHARED, True),
        (OLD, "PartitionName=gpu ExclusiveUser=NO OverSubscribe=FORCE:4 State=UP", SHARED, True),
        (OLD, "PartitionName=x OverSubscribe=EXCLUSIVE\nPartitionName=gpu OverSubscribe=NO", SHARED, True),
        (OLD, "PartitionName=gpu ExclusiveUser=NO OverSubscribe=EXCLUSIVE", SHARED, False),
        (OLD, "PartitionName=gpu OverSubscribe=NO", "Configuration\nSelectType              = select/linear", False),
        (NEW, "PartitionName=gpu Exclusive=NO OverSubscribe=NO", SHARED, True),
        (NEW, "PartitionName=gpu Exclusive=NODE OverSubscribe=NO State=UP", SHARED, False),
        (OLD | {"Exclusive": "NO"}, "PartitionName=gpu Exclusive=NO OverSubscribe=NO", SHARED, False),
        (OLD | {"Exclusive": "USER"}, "PartitionName=gpu Exclusive=NO OverSubscribe=NO", SHARED, True),
        (OLD | {"Exclusive": "USER"}, "PartitionName=gpu Exclusive=USER OverSubscribe=NO", SHARED, False),
        (NEW, "PartitionName=gpu Exclusive=USER OverSubscribe=NO", SHARED, True),
        ({"OverSubscribe": "USER"}, "PartitionName=gpu ExclusiveUser=NO OverSubscribe=NO", SHARED, True),
        ({"OverSubscribe": "MCS"}, "PartitionName=gpu ExclusiveUser=NO OverSubscribe=NO", SHARED, True),
        ({"OverSubscribe": "USER"}, "PartitionName=gpu ExclusiveUser=YES OverSubscribe=NO", SHARED, False),
        ({"OverSubscribe": "USER"}, "PartitionName=gpu OverSubscribe=EXCLUSIVE", SHARED, False),
    ],
)
def test_nodes_of_its_own_are_refused_unless_all_jobs_have_them(
    authentication: FakeSlurm,
    manager_on: Managers,
    whole: dict[str, str],
    partitions: str,
    config: str,
    refused: bool,
) -> None:
    authentication.answer("squeue", rows=[OWNER_ROW | whole])
    authentication.answer("scontrol", stdout=f"{partitions}\n{config}")
    manager = manager_on(cluster="fake")
    if refused:
        with pytest.raises(Rejected, match="--exclusive"):
            manager.authenticate("12", CREDENTIAL)
    else:
        assert manager.authenticate("12", CREDENTIAL).key == JOB


def test_the_nodes_that_a_job_excludes_are_asked_once_and_hold_for_its_tasks(
    authentication: FakeSlurm, manager_on: Managers
) -> None:
    authentication.answer("squeue", rows=[OWNER_ROW | job_row(12, excluded="n[3-4]")])
    first, restarted = manager_on(cluster="fake"), manager_on(cluster="fake")
    first.authenticate("12", CREDENTIAL)
    for manager in (first, restarted):
        manager.listing()
        authentication.forget()
        for _ in range(2):
            manager.submit(task())
        assert [call.argv.count("--exclude=n[3-4]") for call in authentication.calls("sbatch")] == [1, 1]
        assert len(authentication.calls("squeue")) == (manager is restarted)
        manager.submit(task(node="", avoid=("n7", "n8")))
        assert "--exclude=n[3-4],n7,n8" in authentication.calls("sbatch")[-1].argv


def test_a_job_that_registers_is_listed_at_once(authentication: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    authentication.answer("squeue", rows=[])
    manager = manager_on(cluster="fake", poll_floor_seconds=30)
    before = manager.listing()
    clock.now += 1
    authentication.answer("squeue", rows=[OWNER_ROW | job_row(12, Reservation="ml")])
    assert manager.listing() is before
    manager.authenticate("12", CREDENTIAL)
    assert [job.handle for job in manager.listing().jobs] == ["12"]
    manager.submit(task())
    assert "--reservation=ml" in authentication.calls("sbatch")[0].argv


def test_the_nodes_that_a_job_excludes_are_asked_again_when_it_starts_and_after_a_requeue(
    authentication: FakeSlurm, manager_on: Managers
) -> None:
    """Its user may change them as long as it waits."""
    waits = {"State": "PENDING", "NodeList": "", "Reason": "Priority"}
    manager = manager_on(cluster="fake")

    def shown(**row: object) -> tuple[int, list[str]]:
        """How many squeues a listing takes with this job, and what a task of it is told to avoid."""
        rows = [OWNER_ROW | job_row(12, **{"SubmitTime": OWNER_ROW["SubmitTime"], **row})]
        authentication.answer("squeue", rows=rows)
        authentication.forget()
        manager.listing()
        asked = len(authentication.calls("squeue"))
        manager.submit(task())
        return asked, [word for word in authentication.calls("sbatch")[0].argv if word.startswith("--exclude")]

    assert shown(**waits, excluded="n1") == (2, ["--exclude=n1"])
    assert shown(**waits, excluded="n2") == (1, ["--exclude=n1"])
    assert shown(excluded="n2") == (2, ["--exclude=n2"])
    assert shown(excluded="n2") == (1, ["--exclude=n2"])
    requeued = {"SubmitTime": 1_795_000_777, "RestartCnt": 1}
    assert shown(**requeued, excluded="n3") == (2, ["--exclude=n3"])
    authentication.answer("squeue", rows=[OWNER_ROW | job_row(12, **waits, excluded="n3")])
    manager.listing()
    authentication.answer("squeue", rows=[OWNER_ROW | {"excluded": ""}])
    manager.authenticate("12", CREDENTIAL)
    manager.submit(task())
    assert "--exclude=" not in "".join(authentication.calls("sbatch")[-1].argv)


@pytest.mark.parametrize(
    ("comment", "options"),
    [
        ("(null)", ""),
        ("#DL2 epochs=3 worker=cpu:2", "#DL2 epochs=3 worker=cpu:2"),
        ("billed to 7|8\n#DL2 epochs=3\nsee #DL2 epochs=9", "#DL2 epochs=3"),
    ],
)
def test_options_of_an_anchor_are_the_dl2_lines_of_its_admin_comment(
    authentication: FakeSlurm, manager_on: Managers, comment: str, options: str
) -> None:
    authentication.answer("squeue", rows=[OWNER_ROW | {"admin_comment": comment, "Name": "#DL2 epochs=8"}])
    anchor = manager_on(cluster="fake").authenticate("12", CREDENTIAL)
    assert (anchor.options, anchor.name) == (options, "#DL2 epochs=8")


def test_too_long_options_of_an_anchor_are_refused(authentication: FakeSlurm, manager_on: Managers) -> None:
    authentication.answer("squeue", rows=[OWNER_ROW | {"admin_comment": "#DL2 model=" + "x" * 4096}])
    with pytest.raises(Rejected, match="AdminComment are longer than 4096 characters"):
        manager_on(cluster="fake").authenticate("12", CREDENTIAL)


def test_a_script_that_takes_seconds_to_read_is_refused(authentication: FakeSlurm, manager_on: Managers) -> None:
    authentication.answer("scontrol", stdout="#!/bin/sh\n" + "\n" * (1 << 20) + SCRIPT + "\n")
    with pytest.raises(
        Rejected, match="the batch script of Slurm job 12 is longer than 1 MiB: keep what the job needs"
    ):
        manager_on(cluster="fake").authenticate("12", CREDENTIAL)


def test_a_job_name_cannot_forge_the_owner(authentication: FakeSlurm, manager_on: Managers) -> None:
    name = "x|y\n12|RUNNING|1|1001|0|root|(null)|root|(null)|z|\nGroupId=root(0)"
    authentication.answer("squeue", rows=[{**OWNER_ROW, "Name": name}])
    anchor = manager_on(cluster="fake").authenticate("12", CREDENTIAL)
    assert anchor.owner.gid == 1002
    assert anchor.name == name


def test_a_job_without_a_script_is_told_to_use_sbatch(authentication: FakeSlurm, manager_on: Managers) -> None:
    authentication.answer("scontrol", stderr="job script retrieval failed: Job script not specified\n")
    with pytest.raises(NotFound, match="start it with sbatch"):
        manager_on(cluster="fake").authenticate("12", CREDENTIAL)
