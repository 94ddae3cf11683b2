"""Which jobs of the queue wait for room, for how much of it, and which elastic jobs yield to them."""

from __future__ import annotations

import pytest
from slurm_fakes import FakeSlurm, Managers, job_row, live_task, node_row

from dl2d.core.cluster import Task
from dl2d.core.errors import ConfigError
from dl2d.core.resource_manager import Claim, Yields
from dl2d.core.resources import Resources
from dl2d_slurm.jobs.waiting_jobs import SharingRule, standing_claims
from dl2d_slurm.submission.partitions import Partition

TAG = "dl2:fake.7.1795253000:worker-1"


def pending(number: int, **more: object) -> dict[str, object]:
    """A row of squeue: a job that waits for two nodes."""
    row = {"State": "PENDING", "Reason": "Resources", "NodeList": "", "NumNodes": 2, "NumTasks": 4, "UserName": "bob"}
    row |= {"tres-alloc": "cpu=4,mem=2G,node=2,billing=4", "PriorityLong": 9000}
    return job_row(number, **{**row, **more})


@pytest.fixture
def claims_of(slurm: FakeSlurm, manager_on: Managers):
    """The claims of a listing with some rows of squeue; nodes n1 and n2 in ``gpu``, n2 and n3 in ``cpu``."""

    def claims(*rows: dict[str, object], **settings: object) -> tuple[Claim, ...]:
        places = [("n1", "gpu"), ("n2", "gpu"), ("n2", "cpu"), ("n3", "cpu")]
        slurm.answer("sinfo", rows=[node_row(node, PartitionName=partition) for node, partition in places])
        slurm.answer("squeue", rows=list(rows))
        return manager_on(**settings).listing().claims

    return claims


@pytest.mark.parametrize(
    ("exclusive", "whole"), [("", True), ("NO", False), ("NODE", True), ("USER", False), ("TOPO", True), ("MCS", False)]
)
def test_which_jobs_get_whole_nodes_by_squeue_of_slurm_26_05_and_before(claims_of, exclusive: str, whole: bool) -> None:
    """Since 26.05 OverSubscribe is NO for most jobs, and a field of its own says who gets whole nodes."""
    (claim,) = claims_of(pending(812, OverSubscribe="NO", Exclusive=exclusive))
    assert claim.whole == whole


@pytest.mark.parametrize(
    ("handle", "array_id", "shown"),
    [(12, "10_3", "10_3"), (12, "12_9", "12"), (12, "12_[3-4]", "12"), (12, "12", "12")],
)
def test_a_claim_has_an_id_that_its_user_knows(claims_of, handle: int, array_id: str, shown: str) -> None:
    """A task of an array has a JobID of its own once it has started, and keeps it when it is requeued."""
    claims = claims_of(pending(handle, JobArrayID=array_id))
    assert {claim.handle for claim in claims} == {shown}


def test_a_job_that_waits_for_room_is_a_claim_with_all_that_squeue_tells(claims_of) -> None:
    row = pending(
        812,
        **{"tres-per-node": "gres:gpu:2", "OverSubscribe": "NO", "ReqNodes": "n2", "SchedNodes": "n[1-2]"},
        StartTime=1795254000,
    )
    assert claims_of(row) == (
        Claim(
            handle="812",
            user="bob",
            priority=9000,
            nodes=2,
            demand=Resources.of(cpu=4, memory=2048, gpu=4),
            whole=True,
            eligible=frozenset({"n1", "n2"}),
            required=frozenset({"n2"}),
            planned=("n1", "n2"),
            expected_start=1795254000.0,
        ),
    )


@pytest.mark.parametrize(("reason", "behind"), [("Resources", False), ("Priority", True)])
def test_a_claim_says_whether_others_wait_before_it(claims_of, reason: str, behind: bool) -> None:
    (claim,) = claims_of(pending(812, Reason=reason))
    assert claim.behind_others == behind


def test_a_job_with_a_list_of_nodes_that_is_too_long_can_start_nowhere(claims_of) -> None:
    (claim,) = claims_of(pending(812, ReqNodes="n1,n2," * 10_000 + "n1"))
    assert not claim.required & {"n1", "n2", "n3"}
    assert claim.required


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"tres-per-job": "gres:gpu:4"}, 4),
        ({"tres-per-task": "gres/gpu:1"}, 4),
        ({"tres-per-node": "gres/gpu:a100:2"}, 4),
        ({"tres-alloc": "cpu=4,mem=2G,node=2,gres/gpu=3"}, 3),
        # In several ways; of types these are different devices.
        ({"tres-per-task": "gres:gpu:1", "tres-per-job": "gres:gpu:4"}, 4),
        ({"tres-per-node": "gres:gpu:2", "tres-per-job": "gres:gpu:4"}, 4),
        ({"tres-per-node": "gres:gpu:2", "tres-per-task": "gres:gpu:1"}, 4),
        ({"tres-per-node": "gres:gpu:v100:2", "tres-per-task": "gres:gpu:a100:1"}, 8),
        ({"tres-per-node": "gres:gpu:v100:2,gres:gpu:a100:1", "tres-per-job": "gres:gpu:v100:4"}, 6),
    ],
)
def test_gpus_are_counted_however_they_are_asked_for(claims_of, changes: dict[str, object], gpus: int) -> None:
    (claim,) = claims_of(pending(1, **changes))
    assert claim.demand.get("gpu") == gpus


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tres-per-node": "gres:gpu:V100:2"}, {"gpu": 4, "gpu:v100": 4}),
        ({"tres-per-job": "gres/gpu:v100:3,gres/gpu:t4:1"}, {"gpu": 4, "gpu:v100": 3, "gpu:t4": 1}),
        ({"tres-per-task": "cpu=2,license/x:1,gres/gpu:v100:1"}, {"gpu": 4, "gpu:v100": 4}),
        ({"tres-per-node": "gres/gpu:v100:2", "tres-per-job": "gres/gpu:v100:4"}, {"gpu": 4, "gpu:v100": 4}),
        ({"tres-per-node": "gres/gpu:2,gres/nvme:1"}, {"gpu": 4, "nvme": 2}),
    ],
)
def test_a_type_of_gpu_is_what_was_asked_for_where_the_site_accounts_for_gpus_of_any_type(
    claims_of, changes: dict[str, object], expected: dict[str, int]
) -> None:
    """AccountingStorageTRES=gres/gpu: tres-alloc has no types."""
    allocated = "cpu=4,mem=2G,node=2,billing=4,gres/gpu=4"
    (claim,) = claims_of(pending(1, **{"tres-alloc": allocated, **changes}))
    assert claim.demand == Resources.of({"cpu": 4, "memory": 2048, **expected})


@pytest.mark.parametrize(
    "changes",
    [
        {"Reason": "JobHeldUser", "PriorityLong": 0},
        {"Reason": "None"},
        {"Reason": "Dependency"},
        {"Reason": "BeginTime"},
        {"Reason": "Licenses"},
        {"Reason": "QOSMaxJobsPerUserLimit"},
        {"Reason": "AssocGrpCpuLimit"},
        {"Reason": "ReqNodeNotAvail, UnavailableNodes:n1"},
        {"Reason": "PartitionDown"},
        {"Reservation": "maintenance"},
        {"PriorityLong": "what"},
        {"State": "RUNNING", "NodeList": "n1"},
        {"State": "COMPLETED", "NodeList": "n1"},
        {"Comment": TAG, "UserName": "alice"},
    ],
    ids=str,
)
def test_jobs_that_wait_for_anything_else_and_dl2ds_own_tasks_are_none(claims_of, changes: dict[str, object]) -> None:
    anchor = job_row(7, Comment="(null)")
    assert claims_of(anchor, pending(8, **changes)) == ()


def test_a_job_that_claims_to_be_a_task_of_another_user_is_one(claims_of) -> None:
    assert [claim.handle for claim in claims_of(job_row(7), pending(8, Comment=TAG))] == ["8"]


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [
        ({"Partition": "cpu,gpu"}, None),
        ({"Partition": "cpu"}, {"n2", "n3"}),
        ({"Partition": "cpu", "Feature": "intel|amd"}, {"n3"}),
        ({"Feature": "nosuch"}, set()),
    ],
)
def test_it_may_use_the_nodes_of_its_partitions_with_the_features_that_it_asks_for(
    slurm: FakeSlurm, manager_on: Managers, changes: dict[str, object], nodes: set[str] | None
) -> None:
    places = [("n1", "gpu"), ("n2", "gpu"), ("n2", "cpu"), ("n3", "cpu")]
    rows = [node_row(node, PartitionName=name, features_act="amd" if node == "n3" else "x") for node, name in places]
    slurm.answer("sinfo", rows=rows)
    slurm.answer("squeue", rows=[pending(1, **changes)])
    (claim,) = manager_on().listing().claims
    assert claim.eligible == nodes


def test_jobs_of_other_partitions_wait_for_the_nodes_that_dl2d_sees_too(claims_of) -> None:
    (claim,) = claims_of(pending(1, Partition="cpu"), partition="gpu")
    assert claim.eligible == {"n2"}


def test_a_job_that_is_listed_twice_waits_once_and_tasks_of_an_array_each_for_themselves(claims_of) -> None:
    tasks = [pending(1, JobArrayID=f"1_{number}") for number in (1, 2, 2)]
    assert [claim.handle for claim in claims_of(*tasks, pending(3), pending(3))] == ["1", "1", "3"]


def test_a_task_that_was_submitted_without_a_node_is_a_claim_until_it_runs(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    """Elastic jobs of others give up tasks to it as to any job that waits."""
    waiting = {"tres-alloc": "cpu=1,mem=100M,node=1", "NumNodes": 1, "NumTasks": 1, "Comment": TAG, "UserName": "alice"}
    anchor = job_row(7, UserName="alice")
    slurm.answer("sinfo", rows=[node_row("n1")])
    slurm.answer("squeue", rows=[anchor, pending(8, **waiting)])
    manager = manager_on(poll_floor_seconds=0)
    (claim,) = manager.listing(tasks=[live_task("8", TAG, node="")]).claims
    assert (claim.handle, claim.user, claim.priority, claim.nodes) == ("8", "alice", 9000, 1)
    assert claim.demand == Resources.of(cpu=1, memory=100)
    assert claim.is_task
    assert not manager.listing(tasks=[live_task("8", TAG, node="n1")]).claims
    slurm.answer("squeue", rows=[anchor, job_row(8, Comment=TAG, UserName="alice")])
    assert not manager.listing(tasks=[live_task("8", TAG, node="")]).claims


@pytest.mark.parametrize(
    ("shown", "waiting", "claims"),
    [
        ("1_[0-99]", 100, 64),
        ("1_[0-5,7,10-20:5]", 10, 10),
        ("1_[3-99%5]", 97, 3),
        ("1_[3-99%2]", 97, 1),
        ("1_[1,3,17...]", 3, 3),
        ("1_[4]", 1, 1),
    ],
)
def test_as_many_claims_as_tasks_of_an_array_may_start(claims_of, shown: str, waiting: int, claims: int) -> None:
    """Two tasks run; without ``--array`` squeue shows those that wait in one record."""
    rows = [job_row(10, JobArrayID="1_1"), job_row(11, JobArrayID="1_2")]
    found = claims_of(*rows, pending(1, JobArrayID=shown, SchedNodes="n1"))
    assert [(claim.handle, claim.waiting) for claim in found] == [("1", waiting)] * claims
    assert [claim.planned for claim in found] == [("n1",), *[()] * (claims - 1)]


def test_of_a_long_queue_the_jobs_of_the_highest_priority_are_told(claims_of) -> None:
    found = claims_of(*(pending(number, PriorityLong=number) for number in range(1, 2001)))
    assert (found[0].priority, found[-1].priority, len(found)) == (2000, 1489, 512)


def test_many_arrays_leave_room_for_the_claims_of_other_jobs(claims_of) -> None:
    arrays = [
        pending(number, JobArrayID=f"{number}_[0-99]", UserName=f"user{number % 4}", PriorityLong=9000)
        for number in range(1, 41)
    ]
    found = claims_of(*arrays, pending(99, UserName="user1", PriorityLong=10))
    assert len(found) == 2048
    assert found[-1].handle == "99"
    assert {claim.handle for claim in found} == {*map(str, range(1, 41)), "99"}


def test_the_first_rule_for_a_partition_says_to_whom_its_jobs_yield(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("squeue", rows=[job_row(1), job_row(2, Partition="debug"), job_row(3, Partition="debug", Comment=TAG)])
    higher = "higher-priority"
    rules = [{"partition": "deb*", "yield": higher}, {"yield": "never"}, {"partition": "gpu", "yield": higher}]
    for sharing, expected in (([], [Yields.ALWAYS] * 2), (rules, [Yields.NEVER, Yields.HIGHER_PRIORITY])):
        jobs = manager_on(sharing=sharing).listing().jobs
        assert [(job.priority, job.yields) for job in jobs[:2]] == [(4000, each) for each in expected]


def test_nodes_are_kept_free_in_small_partitions_first_where_they_count_for_large_ones() -> None:
    nodes = {"all": {"n1", "n2", "n3"}, "small": {"n1"}, "long": {"n1", "n2", "n3"}}
    partitions = {name: Partition(name, frozenset(names)) for name, names in nodes.items()}
    kept = list(standing_claims(partitions, [SharingRule(min_free=2)]))
    assert [(claim.handle, claim.nodes) for claim in kept] == [
        ("partition small", 1), ("partition all", 2), ("partition long", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "kept"),
    [("idle~", 1), ("idle#", 1), ("idle%", 1), ("idle!", 1), ("idle", 2), ("allocated#", 2), ("down~", 2)],
)
def test_idle_nodes_that_power_saving_has_put_to_sleep_count_as_kept_free(
    slurm: FakeSlurm, manager_on: Managers, state: str, kept: int
) -> None:
    """Otherwise elastic jobs would leave one node after the other, and power saving put all of them to sleep."""
    names = ("n1", "n2", "n3", "n4")
    slurm.answer("sinfo", rows=[node_row(name, StateLong=state if name == "n1" else "idle") for name in names])
    (claim,) = manager_on(sharing=[{"min_free": 2}]).listing().claims
    assert claim.nodes == kept
    slurm.answer("sinfo", rows=[node_row(name, StateLong="idle~") for name in names])
    assert not manager_on(sharing=[{"min_free": 2}]).listing().claims


def test_nodes_are_kept_free_and_elastic_jobs_hold_a_share_of_a_partition(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    places = [("n1", "gpu"), ("n2", "gpu"), ("n2", "cpu"), ("n3", "cpu")]
    slurm.answer("sinfo", rows=[node_row(node, PartitionName=partition) for node, partition in places])
    task = {"Comment": TAG, "tres-alloc": "cpu=3,mem=1000M,node=1"}
    slurm.answer("squeue", rows=[job_row(7), job_row(8, **task), job_row(9, Partition="cpu"), pending(10)])
    rules = [{"partition": "gpu", "max_share": 0.5, "min_free": 7}, {"partition": "cpu", "min_free": 1}]
    listing = manager_on(sharing=rules).listing(tasks=[live_task("8", TAG)])
    kept = [claim for claim in listing.claims if claim.standing]
    assert [(claim.handle, claim.nodes, claim.eligible) for claim in kept] == [
        ("partition cpu", 1, {"n2", "n3"}),
        ("partition gpu", 2, {"n1", "n2"}),
    ]
    (limit,) = listing.growth_limits
    assert limit.left == {"cpu": 8 - 3, "memory": 4000 - 1000, "gpu": 2}
    assert limit.reason == "elastic jobs may hold 50 % of partition gpu"
    assert "7" in limit.anchors
    assert "9" not in limit.anchors


def test_rules_of_the_partitions_of_a_jobs_tasks_hold_whatever_that_of_its_anchor(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    places = [("n1", "gpu"), ("n2", "small"), ("n3", "cpu")]
    slurm.answer("sinfo", rows=[node_row(node, PartitionName=partition) for node, partition in places])
    task = {"Comment": TAG, "tres-alloc": "cpu=3,mem=1000M,node=1"}
    slurm.answer("squeue", rows=[job_row(7, Partition="cpu"), job_row(8, **task), job_row(9, Partition="small")])
    rules = [{"partition": "gpu", "yield": "never", "max_share": 0.5}]
    for setting, jobs in (("gpu", {"7", "8", "9"}), ("gpu,small", {"7", "8"})):
        listing = manager_on(sharing=rules, partition=setting).listing(tasks=[live_task("8", TAG)])
        assert {job.handle for job in listing.jobs if job.yields is Yields.NEVER} == jobs
        (limit,) = listing.growth_limits
        assert (limit.anchors, limit.left["cpu"]) == (jobs, 4 - 3)


@pytest.mark.parametrize(
    ("reason", "others", "rule", "waits_for_claim"),
    [
        ("Priority", {}, {}, True),
        ("Priority", {"Partition": "cpu"}, {}, False),  # on n2 and n3
        ("Priority", {"Reason": "JobHeldUser"}, {}, False),
        ("Priority", {}, {"yield": "never"}, False),
        ("Priority", {"PriorityLong": 1}, {"yield": "higher-priority"}, False),
        ("Resources", {}, {}, False),
    ],
)
def test_the_node_is_not_at_fault_where_a_task_waits_behind_a_job_to_which_its_job_yields(
    slurm: FakeSlurm, manager_on: Managers, reason: str, others: dict[str, object], rule: dict[str, object],
    waits_for_claim: bool,
) -> None:  # fmt: skip
    """As behind a heterogeneous job, whose components wait for each other."""
    slurm.answer("sinfo", rows=[node_row("n1"), *(node_row(name, PartitionName="cpu") for name in ("n2", "n3"))])
    task = job_row(8, State="PENDING", Reason=reason, NodeList="", ReqNodes="n1", Comment=TAG, PriorityLong=7)
    slurm.answer("squeue", rows=[job_row(7, PriorityLong=7), task, pending(10, **others)])
    listing = manager_on(sharing=[rule] if rule else []).listing(tasks=[live_task("8", TAG)])
    (waiting,) = (job for job in listing.jobs if job.handle == "8")
    assert waiting.any_node is waits_for_claim


def test_of_jobs_with_a_tag_only_tasks_of_the_store_count_in_a_share(slurm: FakeSlurm, manager_on: Managers) -> None:
    """Alice has removed the comment of one of her tasks, and written that of a task on a job that is none."""
    slurm.answer("sinfo", rows=[node_row("n1")])
    slurm.answer("squeue", rows=[job_row(7), job_row(8), job_row(9, Comment=TAG)])
    manager = manager_on(sharing=[{"max_share": 0.5}], poll_floor_seconds=60)

    def left(*tasks: Task) -> float:
        (limit,) = manager.listing(tasks=tasks).growth_limits
        return limit.left["cpu"]

    assert left() == 4
    assert left(live_task("8", TAG.replace("-1", "-2"))) == 3
    assert [limit.left["cpu"] for limit in manager.listing().growth_limits] == [3]
    assert left(live_task("8", TAG, submitted=5), live_task("9", TAG)) == 3
    # One whose submission was not answered.
    assert left(live_task("", TAG.replace("-1", "-2"), submitted=0)) == 4
    assert left(live_task("", TAG, submitted=0)) == 3


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"yield": "sometimes"}, r"sharing\[0\].yield: expected one of always, higher-priority, never"),
        ({"yields": "always"}, r"sharing\[0\].yields: unknown key"),
        ({"max_share": 0}, r"sharing\[0\].max_share: expected a number, more than 0 and at most 1, got 0"),
        ({"min_free": -1}, r"sharing\[0\].min_free: expected a whole number from 0 to 10000, got -1"),
        ("gpu", r"sharing\[0\]: expected an object"),
    ],
)
def test_a_bad_rule_is_named(manager_on: Managers, rule: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        manager_on(sharing=[rule])


def test_a_job_that_gets_all_memory_of_its_nodes_is_told_from_one_that_asks_for_as_much(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    """As in Slurm 22.05 without DefMemPerCPU: of a job without ``--mem``, squeue shows the memory of one node."""
    slurm.answer("sinfo", rows=[node_row("n1"), node_row("n2", Memory="8000")])
    memory = {"tres-alloc": "cpu=4,mem=8000M,node=2,billing=4"}
    rows = [
        pending(811, MinMemory="0", **memory),
        pending(812, MinMemory="4000M", **memory),
        pending(813, MinMemory="1024M"),
        pending(814, MinMemory="0", NumNodes=1, **memory),
    ]
    slurm.answer("squeue", rows=[job_row(1), *rows])
    manager = manager_on(poll_floor_seconds=0)
    for _ in range(2):
        found = {claim.handle: (claim.all_memory, claim.demand.get("memory")) for claim in manager.listing().claims}
        assert found == {"811": (True, 0), "812": (False, 8000), "813": (False, 2048), "814": (True, 0)}
    assert all(claim.demand.get("cpu") == 4 for claim in manager.listing().claims)


@pytest.mark.parametrize(("running", "memory"), [("cpu=1,node=1", 0), ("cpu=1,mem=1M,node=1", 2048), (None, 2048)])
def test_a_claim_asks_for_memory_where_slurm_counts_it(claims_of, running: str | None, memory: int) -> None:
    """With ``SelectTypeParameters=CR_Core`` of Slurm 22.05, only jobs that wait have memory."""
    rows = [] if running is None else [job_row(1, **{"tres-alloc": running})]
    (claim,) = claims_of(*rows, pending(812))
    assert claim.demand == Resources.of(cpu=4, memory=memory)


@pytest.mark.parametrize(
    ("gres", "asked", "gpus"),
    [
        ("gpu:2,shard:8", "gres:shard:1", 0.25),
        ("gpu:2,mps:200", "gres:mps:150", 1.5),
        ("gpu:2,shard:6", "gres:shard:1", 0.333),
        ("gpu:1,shard:9999", "gres:shard:1", 0.001),
        ("gpu:4,shard:1", "gres:shard:999999999999", 1_000_000),
        ("gpu:2", "gres:shard:1", 0),
        ("", "gres:shard:1", 0),
        ("shard:4", "gres:shard:1", 0),
    ],
)
def test_a_share_of_a_gpu_is_a_part_of_it(
    slurm: FakeSlurm, manager_on: Managers, gres: str, asked: str, gpus: float
) -> None:
    """Nodes may have as many shares as they like, and users ask for as many."""
    slurm.answer("sinfo", rows=[node_row("n1", Gres=gres, GresUsed="")])
    slurm.answer("squeue", rows=[pending(1, **{"tres-alloc": "cpu=1,mem=2G,node=1", "tres-per-node": asked})])
    (claim,) = manager_on().listing().claims
    assert claim.demand.get("gpu") == gpus


@pytest.mark.parametrize("used", ["shard:9999999999999999G(IDX:0)", "shard:1(99999999999/4)", "shard:x(IDX:0)"])
def test_no_number_of_shares_in_use_breaks_the_listing(slurm: FakeSlurm, manager_on: Managers, used: str) -> None:
    slurm.answer("sinfo", rows=[node_row("n1", Gres="gpu:2,shard:8", GresUsed=f"gpu:999999999999,{used}")])
    (node,) = manager_on().listing().nodes
    assert node.used.get("gpu") == 2
