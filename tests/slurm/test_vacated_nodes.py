"""Whole ticks over a queue of Slurm: what elastic jobs give up to jobs of others that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from slurm_fakes import REQUEST, Clock, FakeSlurm, Managers, context_of, job_row, node_row

from dl2d.core.cluster import TaskState
from dl2d.core.jobs import Allocation, Architecture, Job, JobKey, JobRequest, JobState, Launch, Owner, Role
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.store import JobChange, TaskChange
from dl2d.store.sql_store import SqlStore
from dl2d.tick.record_slot import Report
from dl2d.tick.tick import tick
from dl2d.tick.tick_context import Context
from dl2d.tick.tick_state import TickState

#: Seven workers and a PS on two nodes of eight processors.
PLACES = [(Role.PS, "n1"), *[(Role.WORKER, "n1")] * 3, *[(Role.WORKER, "n2")] * 4]
WORKER = Resources.of(cpu=1, memory=100)
WHOLE = {"OverSubscribe": "NO"}
#: What a task of ``WORKER`` gets where nobody gives it more.
AS_ASKED = "cpu=1,mem=100M,node=1"


def workers_only(most: int, worker: Resources) -> JobRequest:
    """A request for up to so many workers with a demand, and no parameter server."""
    return replace(
        REQUEST, max_workers=most, min_ps=0, max_ps=0, worker=worker, ps=NO_RESOURCES,
        architecture=Architecture.ALLREDUCE,
    )  # fmt: skip


@dataclass
class Site:
    """A store and a Slurm that agree on what runs, and a manager between them."""

    slurm: FakeSlurm
    clock: Clock
    managers: Managers
    store: SqlStore
    rows: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock.now = 1_795_254_000.0
        self._state, self._next = TickState(), 1000
        self._context: Context | None = None

    def elastic(
        self, number: int, request: JobRequest, places: list[tuple[Role, str]], allocated: str = AS_ASKED, **row: object
    ) -> JobKey:
        """An elastic job whose anchor runs on n4, with tasks on these nodes that hold so much each."""
        key = JobKey("fake", str(number), 1_795_253_932)
        owner, launch = Owner("alice", 1001, 1002), Launch(("x",), "/")
        self.store.add_job(Job(key=key, request=request, owner=owner, launch=launch, anchor=str(number)))
        state = JobState.RUNNING if places else JobState.READY
        self.store.change_job(key, JobChange(state=state, address="h:1"), self.clock())
        starts = [Start(key, role, node, request.demand(role)) for role, node in places]
        changes = []
        for task in self.store.ask_tasks(starts, self.clock()) if starts else ():
            self._next += 1
            submitted = key.submitted
            changes.append(
                TaskChange(task.job, task.id, TaskState.CONFIRMED, handle=str(self._next), submitted=submitted)
            )
            self.rows.append(job_row(self._next, Comment=task.tag, NodeList=task.node, **{"tres-alloc": allocated}))
        self.store.change_tasks(changes, self.clock())
        self.rows.append(job_row(number, NodeList="n4", EndTime=int(self.clock()) + 86_400, **row))
        return key

    def wait(self, number: int, **row: object) -> None:
        """A job of bob, of high priority, that waits for a node's worth."""
        given = {"State": "PENDING", "Reason": "Resources", "NodeList": "", "UserName": "bob", "EndTime": "N/A"}
        given |= {"PriorityLong": 900_000, "tres-alloc": "cpu=8,mem=2G,node=1"}
        self.rows.append(job_row(number, **{**given, **row}))

    def nodes(self, *rows: dict[str, object]) -> None:
        self.slurm.answer("sinfo", rows=list(rows))

    def tick(self, ticks: int = 1) -> Report:
        """Ticks every 15 seconds, before each of which every coordinator calls; returns the last report."""
        context = self.context()
        for _ in range(ticks):
            self.slurm.answer("squeue", rows=self.rows)
            self.clock.now += 15
            for job in self.store.jobs(live=True):
                self.store.report_progress(job.key, replace(job.progress, at=self.clock()))
            self._state, report = tick(context, self._state)
        return report

    def context(self) -> Context:
        if self._context is None:
            self._context = context_of(self.managers(), self.store, timer=lambda: self.clock.now)
        return self._context


@pytest.fixture
def site(slurm: FakeSlurm, clock: Clock, manager_on: Managers) -> Iterator[Site]:
    store = SqlStore("sqlite://")
    yield Site(slurm, clock, manager_on, store)
    store.close()


@pytest.mark.parametrize(
    ("worker", "cpus", "memory"),
    [
        pytest.param(WORKER, 1, 100, id="as asked for"),
        pytest.param(Resources.of(cpu=1), 1, 900, id="memory by DefMemPerCPU"),
        pytest.param(WORKER, 2, 100, id="a core of two threads"),
        pytest.param(Resources.of(gpu=1), 1, 900, id="a processor and memory for a GPU"),
    ],
)
@pytest.mark.parametrize("shared", [{}, WHOLE], ids=["share", "whole"])
def test_what_a_task_holds_beyond_its_demand_is_given_up_as_well(
    site: Site, worker: Resources, cpus: int, memory: int, shared: dict[str, object]
) -> None:
    gres = ",gres/gpu=1" if worker.get("gpu") else ""
    request = replace(REQUEST, max_workers=7, max_ps=1, worker=worker, ps=worker)
    site.elastic(7, request, PLACES, f"cpu={cpus},mem={memory}M{gres},node=1")
    used = {"CPUsState": f"{4 * cpus}/{8 - 4 * cpus}/0/8", "AllocMem": str(4 * memory), "Gres": "gpu:4"}
    used |= {"GresUsed": "gpu:4" if gres else "gpu:0"}
    full = {"CPUsState": "8/0/0/8"}
    site.nodes(node_row("n1", **used), node_row("n2", **used), node_row("n4", **full))
    site.wait(812, **shared)
    report = site.tick()
    assert [(claim.handle, len(claim.leaving)) for claim in report.snapshot.grants] == [("812", 4)]
    assert len(report.plan.stops) == 4


def test_what_a_job_holds_beyond_its_demand_is_shared_with_other_elastic_jobs(site: Site) -> None:
    """Seven workers of the first job hold all the memory of a node, for which neither of them has asked."""
    first = workers_only(8, Resources.of(cpu=1))
    second = replace(first, worker=Resources.of(cpu=1, memory=500))
    site.elastic(7, first, [(Role.WORKER, "n1")] * 7, "cpu=1,mem=500M,node=1")
    site.elastic(8, second, [])
    site.nodes(node_row("n1", CPUsState="7/1/0/8", AllocMem="3500", Memory="3500"))
    sizes = [entry.allocation for entry in site.tick().decision.jobs]
    assert sizes[1] >= Allocation(1, 0)


@pytest.mark.parametrize(
    ("worker", "cpus", "memory", "elsewhere"),
    [
        pytest.param(Resources.of(gpu=1), 1, 100, {"Gres": "gpu:h100:1"}, id="a type of GPU"),
        pytest.param(WORKER, 8, 4000, {"CPUsState": "2/2/0/4", "Memory": "2000"}, id="the whole node"),
        pytest.param(WORKER, 2, 100, {"CPUsState": "7/1/0/8"}, id="a core of two threads"),
        pytest.param(Resources.of(cpu=1), 1, 900, {"AllocMem": "3500"}, id="memory by DefMemPerCPU"),
    ],
)
@pytest.mark.parametrize("why", ["time limit", "claim"])
def test_a_task_moves_where_its_demand_has_room(
    site: Site, worker: Resources, cpus: int, memory: int, elsewhere: dict[str, object], why: str
) -> None:
    """The only worker of a job, on n1, holds more there than is free on n3; why, Slurm has not said."""
    request = workers_only(1, worker)
    gpu = int(worker.get("gpu"))
    gres = ",gres/gpu=1,gres/gpu:a100=1" if gpu else ""
    site.elastic(7, request, [(Role.WORKER, "n1")], f"cpu={cpus},mem={memory}M{gres},node=1")
    taken = cpus if why == "claim" else 8  # by others as well
    used = {"CPUsState": f"{taken}/{8 - taken}/0/8", "AllocMem": str(memory)}
    used |= {"Gres": "gpu:a100:1", "GresUsed": f"gpu:a100:{gpu}"}
    site.nodes(node_row("n1", **used), node_row("n3", **elsewhere), node_row("n4", CPUsState="8/0/0/8", Gres=""))
    if why == "claim":
        site.wait(812, ReqNodes="n1", **WHOLE)
    else:
        site.clock.now += 3600
        site.rows[0]["EndTime"] = int(site.clock()) + 200
    report = site.tick()
    assert [(move.task, move.node) for move in report.plan.moves] == [("worker-0", "n3")]
    assert [start.demand for start in report.plan.starts] == [worker]


# Memory that nobody demands, and whole cores

#: Answers of scontrol for configuration, partitions and nodes, where a task gets both threads of a core and 450 MiB for
#: each of these.
GIVES_MORE = (
    "DefMemPerCPU = 450\nSelectType = select/cons_tres\nSelectTypeParameters = CR_CORE_MEMORY\nMinJobAge = 300 sec\n"
    "PartitionName=gpu OverSubscribe=NO DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED\n"
    + "".join(f"NodeName=n{number} CoresPerSocket=4 CPUTot=8 Sockets=1\n" for number in (1, 2, 3, 4))
)
ONE_CPU = workers_only(8, Resources.of(cpu=1))
GIVEN = "cpu=2,mem=900M,node=1"


def test_the_first_tasks_of_a_job_start_where_what_slurm_gives_them_has_room(site: Site) -> None:
    """n1 and n2 have room for what they demand. Nothing but the demand is told to Slurm and kept."""
    site.slurm.answer("scontrol", stdout=GIVES_MORE)
    key = site.elastic(7, ONE_CPU, [])
    site.nodes(
        node_row("n1", AllocMem="3500", CPUsState="2/6/0/8"), node_row("n2", CPUsState="7/1/0/8"), node_row("n3"),
        node_row("n4", CPUsState="8/0/0/8"),
    )  # fmt: skip
    report = site.tick()
    assert [start.node for start in report.plan.starts] == ["n3"] * 4
    assert report.decision.allocations()[key] == Allocation(4, 0)
    assert {task.demand for task in site.store.tasks(live=True, job=key)} == {Resources.of(cpu=1)}
    for call in site.slurm.calls("sbatch"):
        assert "--cpus-per-task=1" in call.argv
        assert not any(word.startswith("--mem") for word in call.argv)


@pytest.mark.parametrize(
    ("settings", "memory"),
    [({}, 900), ({"default_memory_mib": 640}, 640), ({"sbatch_options": ["--mem-per-cpu=50"]}, 0)],
)
def test_settings_of_the_daemon_count_before_those_of_slurm(
    site: Site, settings: dict[str, object], memory: float
) -> None:
    site.slurm.answer("scontrol", stdout=GIVES_MORE)
    site.slurm.answer("squeue", rows=[job_row(7)])
    given = site.managers(**settings).listing().given
    assert (given["7"](Resources.of(cpu=1)).get("memory") if given else 0) == memory


def test_tasks_that_slurm_has_not_started_count_with_what_it_will_give_them(site: Site) -> None:
    """The first job's tasks wait, as while Slurm is busy; the other one's have the remainder."""
    site.slurm.answer("scontrol", stdout=GIVES_MORE)
    first, second = replace(ONE_CPU, max_workers=3), ONE_CPU
    site.elastic(7, first, [(Role.WORKER, "n3")] * 3, GIVEN)
    for row in site.rows[:3]:
        row |= {"State": "PENDING", "NodeList": "", "ReqNodes": "n3", "Reason": "None", "tres-alloc": "cpu=1,mem=450M"}
    key = site.elastic(8, second, [])
    site.nodes(node_row("n3"), node_row("n4", CPUsState="8/0/0/8"))
    report = site.tick()
    assert [(start.job, start.node) for start in report.plan.starts] == [(key, "n3")]


@pytest.mark.parametrize(
    "elsewhere", [{"CPUsState": "7/1/0/8"}, {"AllocMem": "3500"}, {}], ids=["a thread", "too little memory", "enough"]
)
@pytest.mark.parametrize("why", ["time limit", "claim"])
def test_a_task_moves_where_what_slurm_gives_it_has_room(site: Site, elsewhere: dict[str, object], why: str) -> None:
    """As ``test_a_task_moves_where_its_demand_has_room``, where Slurm has said what tasks get."""
    site.slurm.answer("scontrol", stdout=GIVES_MORE)
    site.elastic(7, replace(ONE_CPU, max_workers=1), [(Role.WORKER, "n1")], GIVEN)
    used = {"CPUsState": "2/6/0/8" if why == "claim" else "8/0/0/8", "AllocMem": "900"}
    site.nodes(node_row("n1", **used), node_row("n3", **elsewhere), node_row("n4", CPUsState="8/0/0/8"))
    if why == "claim":
        site.wait(812, ReqNodes="n1", **WHOLE)
    else:
        site.clock.now += 3600
        site.rows[0]["EndTime"] = int(site.clock()) + 200
    report = site.tick()
    assert [(move.task, move.node) for move in report.plan.moves] == ([] if elsewhere else [("worker-0", "n3")])


@pytest.mark.parametrize("accounted", ["", ",gres/gpu={}"], ids=["none", "gres/gpu"])
def test_a_job_that_waits_for_a_type_of_gpu_gets_nodes_with_it(site: Site, accounted: str) -> None:
    """The only free GPUs are of another type; what the elastic job's tasks hold is of that of their node."""
    request = workers_only(4, Resources.of(cpu=1, gpu=1))
    site.elastic(7, request, [(Role.WORKER, "n2")] * 4, f"{AS_ASKED}{accounted.format(1)}")
    for row in site.rows[:4]:
        row["tres-per-node"] = "gres/gpu:1"
    site.nodes(
        node_row("n1", Gres="gpu:a100:4(S:0-1)", GresUsed="gpu:a100:0(IDX:N/A)"),
        node_row("n2", CPUsState="4/4/0/8", AllocMem="400", Gres="gpu:V100:4(S:0-1)", GresUsed="gpu:V100:4(IDX:0-3)"),
        node_row("n4", CPUsState="8/0/0/8", Gres=""),
    )
    site.wait(812, **{"tres-per-node": "gres/gpu:v100:2", "tres-alloc": f"cpu=1,mem=10M,node=1{accounted.format(2)}"})
    (claim,) = site.tick().snapshot.grants
    assert (claim.nodes, len(claim.leaving)) == (("n2",), 2)


HELD = "JobId={} JobName={} TRES=cpu=1 JOB_GRES=gpu:a100:{},gpu:V100:{} Nodes=n2\n"


@pytest.mark.parametrize(
    ("name", "a100", "leaving"),
    [
        ("x", 0, 2),
        ("x", 1, 0),
        ("forged JOB_GRES=gpu:a100:1", 0, 2),
        ("x JOB_GRES=gpu:v100:9999999999999999999,gpu:ä:1", 1, 2),
        ("x\nJobId=1001 JOB_GRES=gpu:a100:1\nJobId=1001 ", 0, 2),
    ],
    ids=["are of the type", "are of another", "not known", "strange", "forged record"],
)
def test_tasks_that_asked_for_no_type_of_gpu_give_up_those_that_they_have(
    site: Site, name: str, a100: int, leaving: int
) -> None:
    """Slurm shows nothing of types in squeue; the others' GPUs are of the other type."""
    request = workers_only(4, Resources.of(cpu=1, gpu=1))
    site.elastic(7, request, [(Role.WORKER, "n2")] * 4)
    for row in site.rows[:4]:
        row["tres-per-node"] = "gres:gpu:1"
    answers = "".join(HELD.format(row["JobID"], name, a100, 1 - a100) for row in site.rows[:4])
    site.slurm.answer("scontrol", **{"-d": {"stdout": answers}})
    gpus = {"Gres": "gpu:a100:4(S:0),gpu:V100:4(S:1)", "GresUsed": "gpu:a100:4(IDX:0-3),gpu:V100:4(IDX:4-7)"}
    site.nodes(node_row("n2", CPUsState="8/0/0/8", **gpus), node_row("n4", CPUsState="8/0/0/8", Gres=""))
    asked = []
    for waits in (False, True, False):
        if waits:
            site.wait(812, **{"tres-per-node": "gres:gpu:V100:2", "tres-alloc": "cpu=1,mem=10M,node=1"})
        stops = site.tick().plan.stops
        assert len(stops) == (leaving if waits else 0)
        asked.append(sum(call.argv[1] == "-d" for call in site.slurm.calls("scontrol")))
    assert asked == [0, 1, 1]


SHARDED = {"Gres": "gpu:2,shard:8", "GresUsed": "gpu:2,shard:(null):0(IDX:N/A)", "CPUsState": "2/6/0/8"}


def on_two_gpus(site: Site) -> None:
    """An elastic job with the two GPUs of n2, of which each has four shares, as has each of n1, which others hold."""
    request = workers_only(4, Resources.of(cpu=1, gpu=1))
    site.elastic(7, request, [(Role.WORKER, "n2")] * 2)
    for row in site.rows[:2]:
        row["tres-per-node"] = "gres:gpu:1"
    site.nodes(node_row("n1", **SHARDED), node_row("n2", **SHARDED), node_row("n4", CPUsState="8/0/0/8", Gres=""))


@pytest.mark.parametrize(
    ("asked", "number", "leave"),
    [("shard:1", 1, 1), ("shard:1", 5, 1), ("shard:3", 2, 1), ("shard:5", 1, 0)],
)
def test_a_job_that_waits_for_a_share_of_a_gpu_gets_one_that_no_task_holds(
    site: Site, asked: str, number: int, leave: int
) -> None:
    """The elastic job's last worker stays, and no waiting job gets shares of more GPUs than the one that is left."""
    on_two_gpus(site)
    for each in range(number):
        site.wait(812 + each, **{"tres-per-node": f"gres:{asked}", "tres-alloc": "cpu=1,mem=10M,node=1"})
    gone = {stop.task for stop in site.tick().plan.stops}
    assert len(gone) == leave
    # Its GPU stays free for the waiting job.
    site.rows = [row for row in site.rows if str(row["Comment"]).rpartition(":")[2] not in gone]
    left = {**SHARDED, "GresUsed": f"gpu:{2 - len(gone)},shard:(null):0(IDX:N/A)"}
    site.nodes(node_row("n1", **SHARDED), node_row("n2", **left), node_row("n4", CPUsState="8/0/0/8", Gres=""))
    assert site.tick(2).plan.starts == ()


def test_a_gpu_of_which_others_hold_a_share_is_not_free(site: Site) -> None:
    on_two_gpus(site)
    shared = {"GresUsed": "gpu:0,shard:(null):1(IDX:1)", "CPUsState": "1/7/0/8", "Gres": "gpu:2,shard:8"}
    site.nodes(node_row("n1", **shared), node_row("n2", **SHARDED), node_row("n4", CPUsState="8/0/0/8", Gres=""))
    assert len(site.tick().plan.starts) == 1


# Partitions that give whole nodes

#: A job of at most three workers and three PSs, and tasks of it that have all of four nodes.
MORE = replace(REQUEST, max_workers=3, max_ps=3)
ALL_NODES = [(Role.WORKER, "n1"), (Role.PS, "n2"), (Role.WORKER, "n3"), (Role.PS, "n5")]
ALL_OF_A_NODE = "cpu=8,mem=100M,node=1"
FULL = {"CPUsState": "8/0/0/8", "AllocMem": "100"}


def exclusive(site: Site) -> None:
    """The answer of scontrol: partition gpu gives its jobs nodes of their own, another one does not."""
    partitions = "PartitionName=gpu OverSubscribe=EXCLUSIVE\nPartitionName=shared OverSubscribe=NO\n"
    site.slurm.answer("scontrol", stdout=f"{partitions}MinJobAge = 300 sec\nSelectType = select/cons_tres\n")


def test_a_partition_that_gives_whole_nodes_has_room_for_one_task_a_node(site: Site) -> None:
    """Its first job has nothing yet. The anchor, on n4, has a node of its own, too."""
    exclusive(site)
    first = site.elastic(7, MORE, [], **WHOLE)
    site.nodes(*(node_row(f"n{number}") for number in (1, 2, 3, 5)), node_row("n4", **FULL))
    report = site.tick()
    assert sorted(start.node for start in report.plan.starts) == ["n1", "n2", "n3", "n5"]
    assert sum(report.decision.allocations()[first]) == 4
    assert not report.needless_wait.jobs
    # The store and Slurm know nothing of the resource by which whole nodes are counted.
    assert {task.demand for task in site.store.tasks(live=True, job=first)} == {REQUEST.worker}
    assert not any("whole" in word for call in site.slurm.calls("sbatch") for word in call.argv)
    site.tick(3)
    assert sum("partition" in call.argv for call in site.slurm.calls("scontrol")) == 1


def test_partitions_are_asked_for_every_ten_minutes_and_stay_as_they_were_known(site: Site) -> None:
    site.elastic(7, MORE, [], **WHOLE)
    site.nodes(*(node_row(f"n{number}") for number in (1, 2, 3, 5)), node_row("n4", **FULL))
    manager = site.managers()
    site.slurm.answer("squeue", rows=site.rows)
    for seconds, scontrol, whole in (
        (0, "", False),
        (590, "EXCLUSIVE", False),
        (590, "EXCLUSIVE", True),
        (610, None, True),
    ):
        site.clock.now += seconds
        if scontrol is None:
            site.slurm.answer("scontrol", status=1)
        else:
            partition = f"PartitionName=gpu OverSubscribe={scontrol} State=UP"
            site.slurm.answer("scontrol", stdout=f"{partition}\nSelectType = select/cons_tres\n")
        assert bool(manager.listing().whole_nodes) is whole


@pytest.mark.parametrize("linear", [False, True])
def test_a_job_whose_tasks_have_all_nodes_shares_them_with_another(site: Site, *, linear: bool) -> None:
    """Each task demands a CPU and holds all eight of its node."""
    if linear:
        site.slurm.answer("scontrol", stdout="PartitionName=gpu OverSubscribe=NO\nSelectType = select/linear\n")
    else:
        exclusive(site)
    first = site.elastic(7, MORE, ALL_NODES, ALL_OF_A_NODE, **WHOLE)
    second = site.elastic(8, MORE, [], **WHOLE)
    site.nodes(*(node_row(node, **FULL) for _, node in ALL_NODES))
    report = site.tick()
    sizes = report.decision.allocations()
    assert (sizes[first], sizes[second]) == (Allocation(1, 1), Allocation(1, 1))
    assert len(report.plan.stops) == 2


def test_a_job_that_registers_after_slurm_was_asked_waits_for_the_next_listing(site: Site) -> None:
    """Its anchor is not listed yet, so nothing says that its tasks get whole nodes; another job's do."""
    exclusive(site)
    first = site.elastic(7, MORE, [], **WHOLE)
    second = site.elastic(8, MORE, [], **WHOLE)
    site.rows = [row for row in site.rows if row["JobID"] != 8]
    site.nodes(*(node_row(f"n{number}") for number in (1, 2, 3, 5)), node_row("n4", **FULL))
    report = site.tick()
    on = {key: {start.node for start in report.plan.starts if start.job == key} for key in (first, second)}
    assert on[first]
    assert on[first].isdisjoint(on[second])


def test_tasks_with_whole_nodes_and_others_are_not_put_on_one_node(site: Site) -> None:
    """The tasks of the second job run in a partition that has the same nodes and whose jobs share them."""
    exclusive(site)
    first = site.elastic(7, MORE, ALL_NODES, ALL_OF_A_NODE, **WHOLE)
    second = site.elastic(8, MORE, [], Partition="shared")
    rows = [node_row(node, **FULL) for _, node in ALL_NODES]
    site.nodes(*rows, *(row | {"PartitionName": "shared"} for row in rows))
    report = site.tick()
    sizes = report.decision.allocations()
    assert sizes[first] == Allocation(1, 1)  # on a node each
    assert sizes[second] == Allocation(3, 3)  # on the other two


@pytest.mark.parametrize("partitions", ["gpu", "gpu,shared"])
def test_a_job_of_several_partitions_has_whole_nodes_if_all_of_them_give_these(site: Site, partitions: str) -> None:
    exclusive(site)
    key = site.elastic(7, MORE, [], **WHOLE, Partition=partitions)
    rows = [node_row("n1"), node_row("n2")]
    site.nodes(*rows, *(row | {"PartitionName": "shared"} for row in rows))
    assert sum(site.tick().decision.allocations()[key]) == (2 if partitions == "gpu" else 6)


def test_ordinary_nodes_hold_as_many_tasks_as_before_beside_a_partition_with_whole_nodes(site: Site) -> None:
    exclusive(site)
    first = site.elastic(7, MORE, [], **WHOLE)
    second = site.elastic(8, MORE, [], Partition="shared")
    site.nodes(
        *(node_row(name) for name in ("n1", "n2")), node_row("n4", **FULL), node_row("n6", PartitionName="shared")
    )
    report = site.tick()
    assert report.decision.allocations() == {first: Allocation(1, 1), second: Allocation(3, 3)}
    assert {(start.job, start.node) for start in report.plan.starts} == {(first, "n1"), (first, "n2"), (second, "n6")}


@pytest.mark.parametrize("shared", [{}, WHOLE], ids=["share", "whole"])
def test_tasks_with_whole_nodes_leave_them_for_a_waiting_job(site: Site, shared: dict[str, object]) -> None:
    exclusive(site)
    places = [(Role.PS, "n2"), *((Role.WORKER, name) for name in ("n1", "n3", "n5"))]
    key = site.elastic(7, replace(MORE, max_ps=1), places, ALL_OF_A_NODE, **WHOLE)
    site.nodes(*(node_row(node, **FULL) for _, node in places))
    site.wait(812, **{"tres-alloc": "cpu=1,mem=100M,node=1"}, **shared)
    report = site.tick()
    ((claim, leaving),) = [(claim, claim.leaving) for claim in report.snapshot.grants]
    assert (claim.handle, len(claim.nodes), len(leaving)) == ("812", 1, 1)
    assert len(report.plan.stops) == 1
    assert report.decision.allocations()[key] == Allocation(2, 1)
    # Nothing is started on the node that it leaves.
    assert not report.plan.starts


DAY = 86_400


def reservation(site: Site, start: int, end: int, nodes: str = "n[1-4]", cpus: int = 32) -> None:
    """A reservation of nodes that begins and ends so many seconds from now."""
    begin, over = int(site.clock()) + start, int(site.clock()) + end
    site.slurm.answer(
        "scontrol", stdout=f"ReservationName=urgent StartTime={begin} EndTime={over} Nodes={nodes} TRES=cpu={cpus}\n"
    )


@pytest.fixture
def half_full(site: Site) -> Site:
    """Seven workers and a PS on half of n1 and n2; n3 is free, n4 has the anchor."""
    site.elastic(7, replace(REQUEST, max_workers=7, max_ps=1, worker=WORKER, ps=WORKER), PLACES)
    half, full = {"CPUsState": "4/4/0/8", "AllocMem": "400"}, {"CPUsState": "8/0/0/8"}
    site.nodes(node_row("n1", **half), node_row("n2", **half), node_row("n3", **full), node_row("n4", **full))
    return site


@pytest.mark.parametrize(
    ("begins", "row", "leave"),
    [
        pytest.param(20 * DAY, {"TimeLimit": "1:00:00"}, 4, id="ends before it"),
        pytest.param(
            3 * DAY, {"TimeLimit": "1:00:00", "StartTime": 4 * DAY, "EndTime": 5 * DAY}, 4, id="planned after"
        ),
        pytest.param(3 * DAY, {"TimeLimit": "5-00:00:00"}, 0, id="would run into it"),
        pytest.param(3 * DAY, {"TimeLimit": "UNLIMITED"}, 0, id="has no limit"),
    ],
)
def test_a_reservation_hides_its_nodes_only_from_jobs_that_would_run_into_it(
    half_full: Site, begins: int, row: dict[str, object], leave: int
) -> None:
    now = int(half_full.clock())
    reservation(half_full, begins, begins + DAY)
    half_full.wait(812, **WHOLE | {name: now + at if isinstance(at, int) else at for name, at in row.items()})
    assert len(half_full.tick().plan.stops) == leave


def test_nodes_that_a_waiting_job_excludes_are_no_room_for_it_and_are_asked_for_once(half_full: Site) -> None:
    idle, half = {"CPUsState": "0/8/0/8"}, {"CPUsState": "4/4/0/8", "AllocMem": "400"}
    half_full.nodes(node_row("n1", **half), node_row("n2", **half), node_row("n3", **idle))
    half_full.wait(812, **WHOLE, excluded="n3")
    (claim,) = half_full.tick().snapshot.grants
    assert set(claim.nodes) < {"n1", "n2"}
    half_full.slurm.forget()
    half_full.tick()
    assert [call.name for call in half_full.slurm.calls()].count("squeue") == 1


def test_reservations_stay_those_of_the_last_answer_while_scontrol_cannot_be_asked(half_full: Site) -> None:
    reservation(half_full, DAY, 2 * DAY)
    half_full.wait(812, **WHOLE, TimeLimit="5-00:00:00")
    half_full.tick()
    (half_full.slurm.folder / "scontrol").unlink()
    assert half_full.tick(2).plan.stops == ()


@pytest.mark.parametrize(
    ("state", "least", "free", "left"),
    [
        pytest.param("draining", 1, 4, {"n2": 4}, id="drained"),
        pytest.param("draining@", 1, 4, {"n2": 4}, id="to be rebooted"),
        # The PS moves when a worker has left n1.
        pytest.param("draining", 1, 0, {"n1": 1, "n2": 3}, id="room is made elsewhere"),
        pytest.param("draining", 7, 0, {}, id="no room elsewhere"),
        pytest.param("draining*", 1, 4, {}, id="does not answer"),
        pytest.param("mixed@", 1, 4, {}, id="takes jobs until it is rebooted"),
        pytest.param("failing", 1, 4, {}, id="failing"),
    ],
)
def test_tasks_leave_a_drained_node(site: Site, state: str, least: int, free: int, left: dict[str, int]) -> None:
    request = replace(REQUEST, min_workers=least, max_workers=7, max_ps=1, worker=WORKER, ps=WORKER)
    site.elastic(7, request, [(Role.PS, "n2"), *[(Role.WORKER, "n1")] * 4, *[(Role.WORKER, "n2")] * 3])
    site.nodes(
        node_row("n1", CPUsState=f"{8 - free}/{free}/0/8", AllocMem="400"),
        node_row("n2", CPUsState="4/4/0/8", AllocMem="400", StateLong=state), node_row("n4", CPUsState="8/0/0/8"),
    )  # fmt: skip
    report = site.tick()
    leaving = {stop.task for stop in report.plan.stops} | {move.task for move in report.plan.moves}
    assert Counter(task.node for task in report.snapshot.tasks if task.id in leaving) == left
    assert all(start.node == "n1" for start in report.plan.starts)


def test_a_job_that_stages_out_files_has_left_its_node(site: Site) -> None:
    site.nodes(node_row("n1"), node_row("n2"))
    held = {"UserName": "bob", "tres-alloc": "cpu=8,mem=4000M,node=1"}
    site.rows += [job_row(1, State="STAGE_OUT", **held), job_row(2, State="COMPLETING", NodeList="n2", **held)]
    used = {node.name: node.used.get("cpu") for node in site.tick().snapshot.nodes}
    assert used == {"n1": 0, "n2": 8}


@pytest.mark.parametrize(
    ("begins", "own", "leave"),
    [
        pytest.param(300, False, 4, id="begins soon"),
        pytest.param(-10, False, 4, id="has begun"),
        pytest.param(-10, True, 0, id="is the job's own"),
        pytest.param(-600, False, 0, id="is over"),
    ],
)
def test_tasks_leave_a_reservation_of_others_until_its_end(site: Site, begins: int, own: bool, leave: int) -> None:
    """A reservation of n2 with IGNORE_JOBS may begin at any time."""
    request = replace(REQUEST, max_workers=7, max_ps=1, worker=WORKER, ps=WORKER)
    site.elastic(7, request, PLACES, Reservation="urgent" if own else "(null)")
    half = {"CPUsState": "4/4/0/8", "AllocMem": "400"}
    site.nodes(node_row("n1", **half), node_row("n2", **half), node_row("n4", CPUsState="8/0/0/8"))
    reservation(site, begins, begins + 500, "n2", 8)
    report = site.tick()
    assert sum(len(claim.leaving) for claim in report.snapshot.grants) == leave
    on_n2 = {task.id for task in report.snapshot.tasks if task.node == "n2"} if leave else set()
    assert {stop.task for stop in report.plan.stops} | {move.task for move in report.plan.moves} == on_n2
