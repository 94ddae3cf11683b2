"""Limits of associations and qualities of service, and what they leave to elastic jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_fakes import Clock, FakeSlurm, context_of, job_row, live_task, task

from dl2d.core.errors import Unavailable
from dl2d.core.jobs import Owner
from dl2d.core.resource_manager import RmJob, RmJobState
from dl2d.daemon.health_and_metrics import Health
from dl2d.store.sql_store import SqlStore
from dl2d.tick.tick import tick
from dl2d.tick.tick_state import TickState
from dl2d_slurm.commands.commands import Answer, Commands
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.jobs.squeue_jobs import Jobs
from dl2d_slurm.limits.association_limits import AssociationLimits, parse_limits
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.submission.sbatch_options import AnchorOptions

Managers = Callable[..., SlurmManager]
#: Answers of real Slurms with two running jobs of root in QOS small.
RECORDED = Path(__file__).parents[1] / "recorded"
ASSOCIATION = "ClusterName=c Account={} UserName={} Partition={} ParentAccount={} GrpJobs={} GrpTRES={} MaxJobs={}\n"


@pytest.mark.parametrize("release", ["22.05", "26.05"])
def test_limits_of_real_slurms(release: str) -> None:
    limits = parse_limits((RECORDED / f"assoc_mgr-{release}.txt").read_text())
    assert {limit.title: (dict(limit.amounts), dict(limit.used)) for limit in limits} == {
        "MaxJobs of user root in account root": ({"jobs": 7}, {"jobs": 2}),
        "GrpTRES of account phys": ({"cpu": 10}, {"cpu": 0}),
        "MaxJobs of user root in account phys": ({"jobs": 7}, {"jobs": 0}),
        "GrpTRES of QOS small": ({"cpu": 6, "gpu": 3}, {"cpu": 4, "gpu": 0}),
        "MaxTRESPerAccount of QOS small for account root": ({"cpu": 5}, {"cpu": 4}),
        "MaxTRESPerUser of QOS small for user root": ({"cpu": 4}, {"cpu": 4}),
        "MaxJobsPerUser of QOS small for user root": ({"jobs": 5}, {"jobs": 2}),
    }


@pytest.mark.parametrize(
    ("text", "jobs"),
    [
        (ASSOCIATION.format("a", "", "", "root(1)", "N(0)", "cpu=4(0)", "3(0)"), {"alice a p", "bob a p", "bob a q"}),
        (
            ASSOCIATION.format("b", "", "", "a(2)", "N(0)", "cpu=N(0)", "")
            + ASSOCIATION.format("a", "", "", "root(1)", "N(0)", "cpu=4(0)", ""),
            {"alice a p", "bob a p", "bob a q", "alice b p"},
        ),
        (ASSOCIATION.format("a", "bob(7)", "", "", "5(0)", "cpu=N(0)", ""), {"bob a p", "bob a q"}),
        (ASSOCIATION.format("a", "bob(7)", "q", "", "5(0)", "cpu=N(0)", ""), {"bob a q"}),
        (
            ASSOCIATION.format("a", "bob(7)", "", "", "5(0)", "cpu=N(0)", "")
            + ASSOCIATION.format("a", "bob(7)", "q", "", "N(0)", "cpu=N(0)", ""),
            {"bob a p"},  # in the other partition the association for that holds alone
        ),
        ("QOS=high(3) GrpTRES=mem=4(1) Account Limits=No Accounts User Limits=No Users\n", {"eve c p"}),
        ("QOS=high(3) Account Limits= c={MaxTRESPA=cpu=4(1)} User Limits= 8={MaxTRESPU=cpu=N(1)}\n", {"eve c p"}),
        ("QOS=low(3) GrpTRES=mem=4(1) Account Limits=No Accounts User Limits=No Users\n", set()),
        ("cpu=4(1)\nAccount=a GrpTRES=cpu=4(1)\nClusterName=c Account=a UserName= Comment= GrpTRES=cpu=x(1)\n", set()),
    ],
)
def test_for_which_jobs_a_limit_holds(text: str, jobs: set[str]) -> None:
    qos = {"eve": "high"}
    users = ("alice a p", "bob a p", "bob a q", "alice b p", "eve c p")
    found = set()
    for limit in parse_limits(text):
        for each in users:
            user, account, partition = each.split()
            options = AnchorOptions(account=account, partition=partition, qos=qos.get(user, "normal"))
            found |= {each} if limit.holds_for(options, user) else set()
    assert found == jobs


@pytest.mark.parametrize(("setting", "left"), [("", None), ("gpu", 6), ("gpu,small", 6), ("small", None)])
def test_limits_in_a_partition_hold_for_jobs_whose_tasks_run_there(
    slurm: FakeSlurm, manager_on: Managers, setting: str, left: float | None
) -> None:
    """Of 9 CPUs, others use 2 and a task in the partition 1; another task runs elsewhere."""
    tasks = [live_task(str(number), f"dl2:fake.7.9:worker-{number}") for number in (20, 21)]
    rows = [job_row(20, Comment=tasks[0].tag), job_row(21, Comment=tasks[1].tag, Partition="small")]
    slurm.answer("squeue", rows=[job_row(7, Partition="cpu", Account="a"), *rows])
    slurm.answer("scontrol", stdout=ASSOCIATION.format("a", "alice(7)", "gpu", "", "N(0)", "cpu=9(3)", ""))
    limits = manager_on(partition=setting).listing(tasks=tasks).growth_limits
    assert [limit.left["cpu"] for limit in limits] == ([] if left is None else [left])


def test_limits_of_tasks_of_a_job_array_name_their_handles(slurm: FakeSlurm, manager_on: Managers) -> None:
    array = [job_row(8 + task, JobArrayID=f"8_{task}", QOS="high") for task in (0, 1)]
    slurm.answer("squeue", rows=[*array, job_row(20, QOS="high", Comment="dl2:fake.8_1.9:worker-1")])
    slurm.answer("scontrol", stdout="QOS=high(3) GrpTRES=cpu=9(3) Account Limits=No Accounts User Limits=No Users\n")
    shares = [{"partition": "gpu", "max_share": 0.5}]
    task = live_task("20", "dl2:fake.8_1.9:worker-1")
    for limit in manager_on(sharing=shares).listing(tasks=[task]).growth_limits:
        assert limit.anchors == {"8", "9", "20"}, limit


def test_limits_stay_as_they_were_where_slurm_does_not_answer() -> None:
    answers: list[Answer | Exception] = [
        Answer(0, "QOS=high(3) GrpTRES=cpu=9(3) Account Limits=No Accounts User Limits=No Users\n", ""),
        Unavailable("scontrol did not answer within 10 s"),
    ]

    class Silent(Commands):
        def run(self, *argv: str, **options: Any) -> Answer:
            if argv[-1] in ("partition", "config") or argv[0] == "sacctmgr":
                return Answer(0, "", "")
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    limits = AssociationLimits(Silent({}, 10.0, RpcRate(1000, lambda: 0.0)))
    jobs = Jobs((RmJob(handle="1", state=RmJobState.RUNNING, user="alice"),), options={"1": AnchorOptions(qos="high")})
    first, second = (list(limits.growth_limits(jobs, ["cpu"], now)) for now in (0.0, 61.0))
    assert first == second
    assert [limit.left for limit in first] == [{"cpu": 6.0}]
    assert answers == []


@pytest.mark.parametrize(
    ("enforced", "left"),
    [
        ("none", []),
        ("associations,qos", []),
        ("associations,limits,qos", [6.0]),
        ("associations,limits,qos,safe", [6.0]),
    ],
)
def test_limits_count_where_slurm_enforces_limits(enforced: str, left: list[float]) -> None:
    class Answers(Commands):
        def run(self, *argv: str, **options: Any) -> Answer:
            if argv[-1] == "config":
                return Answer(0, f"AccountingStorageHost   = head\nAccountingStorageEnforce = {enforced}\n", "")
            if argv[-1] == "partition":
                return Answer(0, "", "")
            return Answer(0, "QOS=high(3) GrpTRES=cpu=9(3) Account Limits=No Accounts User Limits=No Users\n", "")

    limits = AssociationLimits(Answers({}, 10.0, RpcRate(1000, lambda: 0.0)))
    jobs = Jobs((RmJob(handle="1", state=RmJobState.RUNNING, user="alice"),), options={"1": AnchorOptions(qos="high")})
    assert [limit.left["cpu"] for limit in limits.growth_limits(jobs, ["cpu"], 0.0)] == left


@pytest.mark.parametrize(
    ("qos", "reason", "says"),
    [
        (
            "gpus",
            "QOSMinGRES",
            "QOS gpus starts no job that demands less than cpu:2,gpu:1 (QOSMinGRES); demand that with ps=, or submit",
        ),
        (
            "",
            "QOSMinGRES",
            "the QOS of the job or of its partition starts no job that demands less than its minimum (Q",
        ),
        (
            "gpus",
            "QOSMaxGRESPerJob",
            "it demands more than Slurm gives to one job or on one node (QOSMaxGRESPerJob of QOS gpus: memory:900",
        ),
        (
            "gpus",
            "AssocMaxGRESPerJob",
            "it demands more than Slurm gives to one job or on one node (AssocMaxGRESPerJob); ",
        ),
        # On another node the task may be given fewer CPUs, or more.
        ("gpus", "QOSMaxMemoryPerJob", ""),
        ("gpus", "QOSMinCpuNotSatisfied", ""),
        ("gpus", "QOSGrpGRES", ""),
    ],
)
def test_why_a_task_never_starts_as_it_was_submitted(
    slurm: FakeSlurm, manager_on: Managers, qos: str, reason: str, says: str
) -> None:
    record = "QOS=gpus(2) GrpJobs=N(0) MaxTRESPJ=mem=900,node=1,gres/gpu=4 MinTRESPJ=cpu=2,gres/gpu=1 PreemptMode=OFF\n"
    slurm.answer("scontrol", stdout=record)
    task = job_row(2, State="PENDING", NodeList="", QOS=qos, Reason=reason, Comment="dl2:fake.1.9:ps-0")
    slurm.answer("squeue", rows=[job_row(1, QOS=qos), task])
    found = manager_on().listing().jobs[1].never_starts
    assert found.startswith(says)
    assert bool(found) is bool(says)
    slurm.answer("squeue", rows=[job_row(1, QOS=qos), {**task, "Partition": "gpu,other"}])
    assert not manager_on().listing().jobs[1].never_starts


def test_limits_are_asked_for_more_and_more_rarely_where_slurm_does_not_tell() -> None:
    asked: list[int] = []

    class Slow(Commands):
        def run(self, *argv: str, **options: Any) -> Answer:
            asked.append(minute)
            if 2 <= minute < 400:
                raise Unavailable("scontrol did not answer within 10 s")
            return Answer(0, "", "")

    limits = AssociationLimits(Slow({}, 10.0, RpcRate(1000, lambda: 0.0)))
    for minute in range(430):
        list(limits.growth_limits(Jobs(()), ["cpu"], 60.0 * minute))
    assert asked[:15] == [0, 1, 2, 3, 5, 9, 17, 33, 65, 125, 185, 245, 305, 365, 425]
    assert asked[15:] == [426, 427, 428, 429]


def test_health_says_how_old_the_limits_are(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer("squeue", rows=[job_row(1)])
    context, state, health = context_of(manager_on(), SqlStore("sqlite://")), TickState(), Health(clock.timer)
    said = []
    for _ in range(4):
        clock.now += 90
        state, report = tick(context, state)
        health.completed(report)
        said.append(health.status().problems)
        slurm.answer("scontrol", status=1, stderr="slurm_load_assoc_mgr_info error: Unexpected message received\n")
    text = "Slurm's limits of associations and QOS are 3 minutes old: scontrol show assoc_mgr fails; the log says why"
    assert said[:3] == [(), (), (text,)]
    assert "4 minutes old" in said[3][0]


def test_what_a_limit_leaves_follows_the_tasks_that_run_between_two_answers(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    own = {"QOS": "high", "Account": "ml"}
    task = {**own, "Comment": "dl2:fake.1.9:worker-1", "tres-alloc": "cpu=2,mem=1G"}
    other = {"QOS": "normal", "Account": "ml", "UserName": "bob"}
    line = "QOS=high(3) GrpTRES=cpu={},mem=N(9) Account Limits=No Accounts User Limits= 9={{MaxJobsPU={}}}\n"
    user = ASSOCIATION.format("ml", "alice(9)", "", "", "N(1)", "cpu=N(0)", "")
    manager = manager_on(poll_floor_seconds=0)
    seen = []
    # 10 CPUs, of which 5 are in use: 2 by the task, 3 by others
    slurm.answer("scontrol", stdout=user + line.format("10(5)", "3(2)"))
    for rows in ((2,), (2, 3), (2, 3, 4)):
        slurm.answer("squeue", rows=[job_row(1, **own), job_row(9, **other), *(job_row(each, **task) for each in rows)])
        limits = manager.listing(tasks=[live_task(str(each), "dl2:fake.1.9:worker-1") for each in rows]).growth_limits
        assert all("1" in limit.anchors and "9" not in limit.anchors for limit in limits)
        seen.append({limit.reason: limit.left for limit in limits})
        clock.now += 15
    title = "Slurm's limit GrpTRES of QOS high"
    jobs = "Slurm's limit MaxJobsPerUser of QOS high for user alice"
    none = {"cpu": 0.0, "gpu": 0.0, "memory": 0.0, "tasks": 0.0}
    assert seen == [
        {title: {"cpu": 5.0}, jobs: {"tasks": 1.0}},
        {title: {"cpu": 3.0}, jobs: none},
        {title: {"cpu": 1.0}, jobs: none},
    ]
    clock.now += 60
    slurm.answer("scontrol", status=1, stderr="slurm_load_assoc_mgr_info error: Access denied\n")
    assert {limit.reason: limit.left for limit in manager.listing().growth_limits} == seen[-1]
    clock.now += 60
    slurm.answer("scontrol", stdout=user + line.format("N(5)", "N(2)"))
    assert manager.listing().growth_limits == ()


def pending(number: int, **changes: object) -> dict[str, object]:
    """A row of a job of bob that waits for a limit of the account."""
    row = {"State": "PENDING", "NodeList": "", "Reason": "AssocGrpCpuLimit", "UserName": "bob", "Account": "ml"}
    return job_row(number, **{**row, "tres-alloc": "cpu=3,mem=1G,node=1,gres/gpu=2", **changes})


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, ["GrpTRES of account ml"]),
        ({"Account": "below"}, ["GrpTRES of account ml"]),
        ({"Account": "other"}, []),
        ({"QOS": "high"}, ["GrpTRES of account ml", "GrpJobs of QOS high"]),
        ({"QOS": "high", "Account": "other", "Reason": "QOSGrpJobsLimit"}, ["GrpJobs of QOS high"]),
        ({"UserName": "alice"}, ["GrpTRES of account ml", "MaxJobs of user alice in account ml"]),
        # The limits for which these wait are not those that the elastic job fills.
        ({"QOS": "other", "Reason": "QOSGrpCpuLimit"}, []),
        ({"Reason": "AssocMaxJobsLimit"}, []),
        ({"Reason": "AssocGrpMemLimit"}, []),
        ({"Reservation": "lecture"}, ["GrpTRES of account ml"]),
        ({"Reason": "Resources"}, []),
        ({"Reason": "None"}, []),
        ({"Reason": "Dependency"}, []),
        ({"Reason": "JobHeldUser", "PriorityLong": 0}, []),
        ({"PriorityLong": 0}, []),
        ({"Reason": "AssocGrpCPUMinutesLimit"}, []),
        ({"Reason": "AssocMaxCpuPerJobLimit"}, []),
        ({"Comment": "dl2:fake.1.9:worker-1", "UserName": "alice"}, []),
        ({"State": "RUNNING", "NodeList": "n1"}, []),
    ],
    ids=str,
)
def test_for_which_limits_jobs_of_others_wait(
    slurm: FakeSlurm, manager_on: Managers, changes: dict[str, object], limits: list[str]
) -> None:
    slurm.answer("squeue", rows=[job_row(1, Account="ml", QOS="high"), pending(5, **changes)])
    slurm.answer(
        "scontrol",
        stdout=ASSOCIATION.format("ml", "", "", "root(1)", "N(0)", "cpu=9(9)", "")
        + ASSOCIATION.format("below", "", "", "ml(2)", "N(0)", "cpu=N(0)", "")
        + ASSOCIATION.format("ml", "alice(7)", "", "", "N(0)", "cpu=N(0)", "4(4)")
        + "QOS=high(3) GrpJobs=5(5) Account Limits=No Accounts User Limits=No Users\n",
    )
    task = live_task("5", "dl2:fake.1.9:worker-1")
    listing = manager_on().listing(tasks=[task] if "Comment" in changes else [])
    assert [each.reason.removeprefix("Slurm's limit ") for each in listing.growth_limits if each.waiting] == limits
    assert [(claim.handle, claim.user, claim.priority) for claim in listing.limit_claims] == (
        [("5", changes.get("UserName", "bob"), 4000)] if limits else []
    )
    assert all(claim.demand.as_dict() == {"cpu": 3, "memory": 1024, "gpu": 2} for claim in listing.limit_claims)
    assert {claim.handle for claim in listing.claims} == ({"5"} if changes.get("Reason") == "Resources" else set())


PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO QoS=high DefaultTime=NONE State=UP
PartitionName=small AllowGroups=ALL AllowAccounts=ALL AllowQos=high Default=YES QoS=N/A DefaultTime=NONE State=UP
"""


def test_limits_of_the_qos_of_a_partition_hold_for_all_jobs_there(slurm: FakeSlurm, manager_on: Managers) -> None:
    """Of 9 CPUs, 3 are used by tasks there and one by a task of a job of that QOS elsewhere, and 2 by others."""
    jobs = [job_row(1), job_row(2, QOS="high", Partition="small"), job_row(3, Partition="small")]
    tags = ["dl2:fake.1.9:worker-1", "dl2:fake.2.9:worker-1", "dl2:fake.3.9:worker-1"]
    rows = [
        job_row(11, Comment=tags[0], **{"tres-alloc": "cpu=3,mem=1G"}),
        job_row(12, Comment=tags[1], Partition="small"),
        job_row(13, Comment=tags[2], Partition="small"),
    ]
    waiting = [
        pending(21, Reason="QOSGrpCpuLimit"),
        pending(22, Reason="QOSGrpCpuLimit", Partition="small"),
        pending(23, Reason="QOSGrpCpuLimit", Partition="small", QOS="high"),
    ]
    slurm.answer("squeue", rows=[*jobs, *rows, *waiting])
    slurm.answer(
        "scontrol",
        stdout="QOS=high(3) GrpTRES=cpu=9(6) Account Limits=No Accounts User Limits=No Users\n",
        **{"--all": {"stdout": PARTITIONS}},
    )
    tasks = [live_task(str(11 + number), tag) for number, tag in enumerate(tags)]
    (limit,) = manager_on().listing(tasks=tasks).growth_limits
    assert limit.anchors & {"1", "2", "3"} == {"1", "2"}
    assert limit.left == {"cpu": 3}
    assert limit.waiting == {"21", "23"}


def test_tasks_of_an_array_wait_for_a_limit_one_by_one(slurm: FakeSlurm, manager_on: Managers) -> None:
    rows = [job_row(1, Account="ml"), pending(5, JobArrayID="5_[2-4]"), pending(9, JobArrayID="9_[0-999]")]
    slurm.answer("squeue", rows=rows)
    slurm.answer("scontrol", stdout=ASSOCIATION.format("ml", "", "", "root(1)", "N(0)", "cpu=9(9)", ""))
    listing = manager_on().listing()
    assert [limit.waiting for limit in listing.growth_limits] == [{"5", "9"}]
    assert [claim.handle for claim in listing.limit_claims].count("5") == 3
    assert len(listing.limit_claims) == 3 + 64


def test_jobs_of_others_that_start_or_end_count_in_limits_at_once(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    """The sum of what a limit leaves and what runs is the same before a waiting job starts and afterwards."""
    lab = ASSOCIATION.format("ml", "", "", "root(1)", "6(3)", "cpu=9(4)", "")
    slurm.answer("scontrol", stdout=lab)
    own = job_row(1, Account="ml")
    running = {"State": "RUNNING", "NodeList": "n1", "Reason": "None"}
    manager = manager_on(poll_floor_seconds=0)
    left = []
    for rows in (
        [pending(5), pending(6, Account="other", **running)],
        [pending(5, **running), pending(6, Account="other", **running)],
        [pending(5, **running), pending(6, **running)],
        [pending(5, **{**running, "State": "COMPLETING"}), pending(6, **running)],
        [],
        [pending(5, **running), job_row(7, SubmitTime="torn")],  # jobs may be missing
    ):
        slurm.answer("squeue", rows=[own, *rows])
        tres, jobs = sorted(manager.listing().growth_limits, key=lambda limit: "GrpJobs" in limit.reason)
        left.append((tres.left["cpu"], jobs.left["tasks"]))
        clock.now += 10
    assert left == [(5, 3), (2, 2), (0, 1), (2, 2), (5, 3), (5, 3)]
    assert sum("assoc_mgr" in call.argv for call in slurm.calls("scontrol")) == 1


def test_a_limit_of_a_qos_applies_in_place_of_those_of_associations(slurm: FakeSlurm, manager_on: Managers) -> None:
    """Jobs 1 and 4 are of QOS high, which has limits of its own; what they use counts in the account's, too."""
    high = {"Account": "ml", "QOS": "high"}
    slurm.answer(
        "squeue",
        rows=[
            *(job_row(1, **high), job_row(2, Account="ml"), job_row(3, Account="ml", QOS="other")),
            *(job_row(11, **high, Comment="dl2:fake.1.9:worker-1"), job_row(4, **high, Partition="small")),
            *(pending(21, Reason="AssocGrpCpuLimit"), pending(22, Reason="QOSGrpCpuLimit", QOS="high")),
        ],
    )
    users = "9={MaxJobsPU=5(2) MaxTRESPU=mem=4(2)}"
    slurm.answer(
        "scontrol",
        stdout=ASSOCIATION.format("ml", "", "", "root(1)", "N(0)", "cpu=9(8),gres/gpu=7(1)", "")
        + ASSOCIATION.format("ml", "alice(9)", "", "", "20(4)", "cpu=N(0)", "2(2)")
        + f"QOS=high(3) GrpJobs=N(2) GrpTRES=cpu=99(2) Account Limits=No Accounts User Limits= {users}\n"
        + "QOS=other(4) GrpJobs=30(1) GrpTRES=gres/gpu=N(0) Account Limits= ml={MaxJobsPA=6(1)} User Limits=No Users\n",
    )
    listing = manager_on().listing(tasks=[live_task("11", "dl2:fake.1.9:worker-1")])
    found = {limit.reason.removeprefix("Slurm's limit "): limit for limit in listing.growth_limits}
    anchors = {title: set(limit.anchors & {"1", "2", "3", "4"}) for title, limit in found.items()}
    assert anchors == {
        "GrpTRES of account ml (cpu)": {"2", "3"},
        "GrpTRES of account ml (gpu)": {"1", "2", "3", "4"},
        "GrpJobs of user alice in account ml": {"1", "2", "4"},
        "MaxJobs of user alice in account ml": {"2"},
        "GrpTRES of QOS high": {"1", "4"},
        "MaxJobsPerUser of QOS high for user alice": {"1", "4"},
        "MaxTRESPerUser of QOS high for user alice": {"1", "4"},
        "GrpJobs of QOS other": {"3"},
        "MaxJobsPerAccount of QOS other for account ml": {"3"},
    }
    assert found["GrpTRES of account ml (cpu)"].left == {"cpu": 1}
    assert {title: limit.waiting for title, limit in found.items() if limit.waiting} == {
        "GrpTRES of account ml (cpu)": {"21"},
        "GrpTRES of account ml (gpu)": {"21", "22"},
        "GrpTRES of QOS high": {"22"},
    }


def test_a_limit_of_the_qos_of_a_partition_applies_in_place_of_that_of_the_qos_of_a_job(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    jobs = [job_row(1, QOS="own"), job_row(2, QOS="own", Partition="small"), job_row(3)]
    slurm.answer("squeue", rows=[*jobs, pending(21, Reason="QOSGrpCpuLimit", QOS="own")])
    slurm.answer(
        "scontrol",
        stdout="QOS=high(3) GrpTRES=cpu=99(6) Account Limits=No Accounts User Limits=No Users\n"
        "QOS=own(4) GrpTRES=cpu=4(4),mem=9(9) Account Limits=No Accounts User Limits=No Users\n",
        **{"--all": {"stdout": PARTITIONS}},
    )
    limits = manager_on().listing().growth_limits
    assert {limit.reason: (limit.anchors, limit.waiting) for limit in limits} == {
        "Slurm's limit GrpTRES of QOS high": ({"1", "3", "21"}, {"21"}),
        "Slurm's limit GrpTRES of QOS own (cpu)": ({"2"}, set()),
        "Slurm's limit GrpTRES of QOS own (memory)": ({"1", "2", "21"}, {"21"}),
    }


def test_a_qos_with_the_flag_comes_before_that_of_the_partition(slurm: FakeSlurm, manager_on: Managers) -> None:
    """As ``sacctmgr`` of Slurm 22.05 prints it. Job 1 has the QOS of the partition, 2 one with the flag, 3 another."""
    slurm.answer("sacctmgr", stdout="normal||\nhigh||\nown|DenyOnLimit,OverPartQOS|\nother|DenyOnLimit|\n")
    slurm.answer("squeue", rows=[job_row(1, QOS="high"), job_row(2, QOS="own"), job_row(3, QOS="other")])
    slurm.answer(
        "scontrol",
        stdout="QOS=high(3) GrpTRES=cpu=9(3),mem=9(9) Account Limits=No Accounts User Limits=No Users\n"
        "QOS=own(4) GrpTRES=cpu=4(1) Account Limits=No Accounts User Limits=No Users\n"
        "QOS=other(5) GrpTRES=cpu=4(1) Account Limits=No Accounts User Limits=No Users\n",
        **{"--all": {"stdout": PARTITIONS}},
    )
    limits = manager_on().listing().growth_limits
    assert {limit.reason: (limit.anchors, limit.left) for limit in limits} == {
        "Slurm's limit GrpTRES of QOS high (cpu)": ({"1", "3"}, {"cpu": 6}),
        "Slurm's limit GrpTRES of QOS high (memory)": ({"1", "2", "3"}, {"memory": 0}),
        "Slurm's limit GrpTRES of QOS own": ({"2"}, {"cpu": 3}),
    }


def test_a_factor_multiplies_limits_of_associations(slurm: FakeSlurm, manager_on: Managers) -> None:
    """As in Slurm 22.05: that of the first QOS that has one. 6 CPUs are in use, 2 of them by a task of job 2."""
    slurm.answer("sacctmgr", stdout="normal||\nhigh||2.000000\ntriple||3.000000\nown|OverPartQOS|3\nhalf||0.25\n")
    small = {"Account": "ml", "Partition": "small"}
    slurm.answer(
        "squeue",
        rows=[
            *(job_row(1, **small), job_row(2, **small, QOS="triple"), job_row(3, **small, QOS="half")),
            *(job_row(4, Account="ml", QOS="triple"), job_row(5, Account="ml", QOS="own")),
            job_row(11, **small, Comment="dl2:fake.2.9:worker-1", **{"tres-alloc": "cpu=2,mem=1G"}),
            *(pending(21, Partition="small"), pending(22, Partition="small", QOS="triple")),
        ],
    )
    slurm.answer(
        "scontrol",
        stdout=ASSOCIATION.format("ml", "", "", "root(1)", "20(6)", "cpu=9(6)", ""),
        **{"--all": {"stdout": PARTITIONS}},
    )
    limits = manager_on().listing(tasks=[live_task("11", "dl2:fake.2.9:worker-1")]).growth_limits
    title = "Slurm's limit GrpTRES of account ml"
    found = {limit.reason: (limit.anchors & set("12345"), limit.left, limit.waiting) for limit in limits}
    assert found == {
        "Slurm's limit GrpJobs of account ml": ({"1", "2", "3", "4", "5"}, {"tasks": 14}, {"21", "22"}),
        f"{title} times 0.25 (LimitFactor) (cpu)": ({"3"}, {"cpu": 0}, set()),
        f"{title} (cpu)": ({"1", "3"}, {"cpu": 3}, {"21"}),
        f"{title} times 2 (LimitFactor) (cpu)": ({"1", "3", "4"}, {"cpu": 12}, set()),
        f"{title} times 3 (LimitFactor) (cpu)": ({"1", "2", "3", "4", "5"}, {"cpu": 21}, {"22"}),
    }


def test_flags_of_qos_stay_as_they_were_where_slurmdbd_does_not_answer(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    slurm.answer("squeue", rows=[job_row(1, Account="ml", QOS="double")])
    slurm.answer("scontrol", stdout=ASSOCIATION.format("ml", "", "", "root(1)", "N(0)", "cpu=9(6)", ""))
    slurm.answer("sacctmgr", stdout="double||2\n")
    manager, left = manager_on(), []
    for _ in range(100):
        left += [limit.left["cpu"] for limit in manager.listing().growth_limits]
        slurm.answer("sacctmgr", status=1, stderr="sacctmgr: error: slurm_persist_conn_open_without_init: failed\n")
        clock.now += 61
    assert left == [12] * 100
    assert len(slurm.calls("sacctmgr")) == 5  # after 0, 10, 20, 40 and 80 minutes


@pytest.mark.parametrize(
    ("records", "left", "floors"),
    [
        (f"GrpSubmitJobs={most}({used})", left, floors)
        for most, used, left, floors in (
            (5, 3, 2, False), (30, 10, 17, True), (1000, 100, 890, True), (30, 29, 0, True), (30, 30, 0, False),
        )
    ]
    + [
        ("GrpSubmitJobs=N(3) Account Limits= ml={MaxSubmitJobsPA=8(3)} User Limits=No Users", 5, False),
        ("Account Limits=No Accounts User Limits= 9={MaxSubmitJobsPU=8(3)}", 5, False),
    ],
)  # fmt: skip
def test_limits_on_submitted_jobs_leave_a_tenth_to_users_and_to_tasks_of_floors(
    slurm: FakeSlurm, manager_on: Managers, records: str, left: int, floors: bool
) -> None:
    """In use are also a task that runs and one that waits, which are not of the others that use the limit."""
    comment = "dl2:fake.1.9:worker-{}"
    own = {"Account": "ml", "QOS": "high"}
    rows = [job_row(1, **own), *(job_row(10 + each, **own, Comment=comment.format(each)) for each in (1, 2))]
    rows[2] |= {"State": "PENDING", "NodeList": ""}
    slurm.answer("squeue", rows=rows)
    user = ASSOCIATION.format("ml", "alice(9)", "", "", "N(1)", "cpu=N(0)", " MaxSubmitJobs=7(3)")
    slurm.answer("scontrol", stdout=f"{user}QOS=high(3) {records}\n")
    tasks = [live_task(str(10 + each), comment.format(each)) for each in (1, 2)]
    limits = manager_on().listing(tasks=tasks).growth_limits
    # What is left is besides the tasks that run.
    found = {limit.reason.removeprefix("Slurm's limit "): limit for limit in limits}
    # A limit of a QOS on each user or account applies in place of that of the user.
    of_user = found.pop("MaxSubmitJobs of user alice in account ml", None)
    assert (of_user is None) == ("MaxSubmitJobsP" in records)
    assert of_user is None or of_user.left == {"tasks": 5}
    (limit,) = found.values()
    assert limit.anchors >= {"1"}
    assert limit.left["tasks"] == (left + 1 if left else 0)
    assert (limit.waiting, limit.floors_may_exceed) == (frozenset(), floors)
    assert {name: amount for name, amount in limit.left.items() if name != "tasks"} == (
        {} if left else {"cpu": 0, "gpu": 0, "memory": 0}
    )


def test_a_job_that_waits_needs_nothing_more_of_a_limit_on_submitted_jobs(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    records = (
        ASSOCIATION.format("ml", "", "", "root(1)", "N(0)", "cpu=3(3)", "")
        + ASSOCIATION.format("ml", "alice(9)", "", "", "N(0)", "cpu=N(0)", "")
        + ASSOCIATION.format("ml", "bob(10)", "", "", "N(0)", "cpu=N(0)", " MaxSubmitJobs=100(95)")
    )
    slurm.answer("squeue", rows=[job_row(1, Account="ml"), job_row(2, Account="ml", UserName="bob"), pending(20)])
    slurm.answer("scontrol", stdout=records)
    limits = {limit.reason: limit for limit in manager_on().listing(tasks=()).growth_limits}
    submitted = limits.pop("Slurm's limit MaxSubmitJobs of user bob in account ml")
    assert (submitted.left["tasks"], submitted.waiting) == (0, frozenset())
    assert [limit.waiting for limit in limits.values()] == [{"20"}]


WALL = "ClusterName=c Account=a UserName={} Partition={} ParentAccount= GrpTRES=cpu=N(0) MaxWallPJ={}\n"
QOS_WALL = "QOS=high(3) GrpTRES=cpu=N(0) MaxWallPJ={} Account Limits=No Accounts User Limits=No Users\n"


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("", 60),
        (WALL.format("alice(7)", "", "20"), 20),
        (WALL.format("alice(7)", "", ""), 60),
        (WALL.format("alice(7)", "", "90"), 60),
        (WALL.format("", "", "20"), 60),  # users' records repeat it
        (WALL.format("bob(7)", "", "20"), 60),
        (WALL.format("alice(7)", "cpu", "20"), 60),
        (WALL.format("alice(7)", "", "20") + QOS_WALL.format("30"), 30),  # in place of the association's
        (QOS_WALL.format("10"), 10),
        (QOS_WALL.format("10").replace("high", "low"), 60),
    ],
)
def test_tasks_have_no_longer_time_limit_than_association_and_qos_allow(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, text: str, minutes: int
) -> None:
    """An administrator may have made that of the anchor longer."""
    slurm.answer("squeue", rows=[job_row(12, Account="a", QOS="high", EndTime=int(clock.now) + 3600)])
    slurm.answer("scontrol", stdout=text)
    manager = manager_on()
    assert manager.listing().growth_limits == ()
    manager.submit(task(owner=Owner("alice", 1001, 1002, partition="gpu")))
    assert [word for word in slurm.calls("sbatch")[0].argv if word.startswith("--time=")] == [f"--time={minutes}"]
