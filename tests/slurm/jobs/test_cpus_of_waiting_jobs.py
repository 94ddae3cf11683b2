"""CPUs and memory that Slurm allocates to waiting jobs; the amounts are those that it gave to such jobs."""

from __future__ import annotations

import pytest
from slurm_fakes import FakeSlurm, Managers, job_row, node_row

from dl2d.core.resources import Resources
from dl2d_slurm.jobs.allocation_beyond_demand import AllocationRules, CpuUnit
from dl2d_slurm.jobs.cpus_of_waiting_jobs import RequestedCpus

NO_THREADS, TWO_THREADS, SOCKET = CpuUnit(), CpuUnit(2, 2), CpuUnit(2, 16)
NOMULTITHREAD = {"threads": "1"}
ONE_ON_CORE = {"NTPerCore": "1"}


def record(tasks: int, of_task: int, of_node: int | None = None, **more: str) -> dict[str, str]:
    """What squeue shows of a job whose tasks have so many CPUs."""
    row = {
        "tres-alloc": "cpu=1,node=1",
        "NumTasks": str(tasks),
        "cpus-per-task": str(of_task),
        "mincpus": str(of_node or of_task),
        "threads": "*",
    }
    return {**row, "NTPerCore": "N/A", "cpus-per-tres": "N/A", "MinMemory": "100M", "NumNodes": "1", **more}


@pytest.mark.parametrize(
    ("shown", "asked", "nodes", "unit", "given"),
    [
        (record(3, 1), (3, 300), 1, NO_THREADS, (3, 300)),
        (record(3, 1), (3, 300), 1, TWO_THREADS, (4, 400)),
        (record(3, 1), (3, 300), 1, SOCKET, (16, 1600)),
        (record(2, 3), (6, 600), 1, TWO_THREADS, (6, 600)),
        (record(3, 1), (3, 200), 2, TWO_THREADS, (4, 200)),
        (record(2, 3), (6, 200), 2, TWO_THREADS, (8, 200)),
        # --hint=nomultithread, --threads-per-core: memory for each CPU is for those that it uses.
        (record(3, 1, **NOMULTITHREAD), (3, 300), 1, NO_THREADS, (3, 300)),
        (record(3, 1, **NOMULTITHREAD), (3, 300), 1, TWO_THREADS, (6, 300)),
        (record(2, 3, **NOMULTITHREAD), (6, 600), 1, TWO_THREADS, (12, 600)),
        (record(4, 1, **NOMULTITHREAD), (4, 200), 2, TWO_THREADS, (8, 200)),
        (record(4, 1, threads="2"), (4, 400), 1, TWO_THREADS, (4, 400)),
        # --ntasks-per-core, which CR_ONE_TASK_PER_CORE sets to 1.
        (record(3, 1, **ONE_ON_CORE), (3, 300), 1, NO_THREADS, (3, 300)),
        (record(3, 1, **ONE_ON_CORE), (3, 300), 1, TWO_THREADS, (6, 600)),
        (record(2, 3, **ONE_ON_CORE), (6, 600), 1, TWO_THREADS, (8, 800)),
        (record(4, 1, NTPerCore="2"), (4, 400), 1, TWO_THREADS, (4, 400)),
        (record(3, 3, NTPerCore="2"), (9, 900), 1, TWO_THREADS, (10, 1000)),
        # --mincpus, with a memory that is no multiple of the CPUs.
        (record(1, 1, 5), (1, 250), 1, NO_THREADS, (5, 250)),
        (record(1, 1, 5), (1, 250), 1, TWO_THREADS, (6, 250)),
        (record(1, 1, 5, **NOMULTITHREAD), (1, 250), 1, TWO_THREADS, (10, 250)),
        (record(1, 1, 5, **ONE_ON_CORE), (1, 250), 1, TWO_THREADS, (10, 250)),
        # --cpus-per-gpu, of two GPUs.
        (record(1, 1, **{"cpus-per-tres": "gres:gpu:3"}), (1, 250), 1, NO_THREADS, (6, 250)),
        (record(1, 1, **{"cpus-per-tres": "gres/gpu:3"}, **NOMULTITHREAD), (1, 250), 1, TWO_THREADS, (12, 250)),
        # A job with as many CPUs as nodes has its memory by CPU only if it is the default.
        (record(1, 1), (1, 100), 1, TWO_THREADS, (2, 200)),
        (record(1, 1, MinMemory="250M"), (1, 250), 1, TWO_THREADS, (2, 250)),
        (record(2, 1, MinMemory="250M"), (2, 500), 1, TWO_THREADS, (2, 500)),
        (record(3, 1, MinMemory="1G"), (3, 3072), 1, TWO_THREADS, (4, 4096)),
        # Nothing that can be read.
        (dict.fromkeys(record(1, 1), ""), (3, 300), 1, TWO_THREADS, (4, 300)),
        (record(10**15, 10**15), (3, 250), 1, TWO_THREADS, (1e12, 250)),
    ],
)
def test_what_a_waiting_job_gets(
    shown: dict[str, str], asked: tuple[int, int], nodes: int, unit: CpuUnit, given: tuple[float, float]
) -> None:
    demand = Resources.of(cpu=asked[0], memory=asked[1], gpu=2)
    found = RequestedCpus.of(shown).given(demand, nodes, unit, AllocationRules(), 100)
    assert found == Resources.of(cpu=given[0], memory=given[1], gpu=2)


def test_memory_is_for_the_cpus_that_were_asked_for_where_slurm_counts_these() -> None:
    """As in Slurm with ``CR_CPU_Memory``, which allocates whole cores all the same."""
    rules = AllocationRules(memory_of_asked_cpus=True)
    found = RequestedCpus.of(record(3, 1)).given(Resources.of(cpu=3, memory=300), 1, TWO_THREADS, rules, 100)
    assert found == Resources.of(cpu=4, memory=300)


SHOWN_NODE = "NodeName={} CPUTot={} CoresPerSocket=8 Sockets=1"


@pytest.mark.parametrize(
    ("changes", "cpus"),
    [
        ({}, 12),
        ({"excluded": "n1"}, 6),
        ({"Reason": "QOSGrpCpuLimit"}, 0),
        # More than the nodes with two threads have.
        ({"tres-alloc": "cpu=9,mem=1G,node=1", "NumTasks": 9}, 9),
        # 15 on each of seven nodes.
        ({"tres-alloc": "cpu=99,mem=1G,node=1", "NumTasks": 99}, 105),
    ],
)
def test_the_claim_is_for_the_most_that_one_of_its_nodes_gives(
    slurm: FakeSlurm, manager_on: Managers, changes: dict[str, object], cpus: int
) -> None:
    """n1 has eight cores with two threads each, n2 sixteen of one."""
    slurm.answer("sinfo", rows=[node_row(name, CPUsState="0/16/0/16") for name in ("n1", "n2")])
    nodes = "\n".join((SHOWN_NODE.format("n1", 16), SHOWN_NODE.format("n2", 8)))
    config = "SelectTypeParameters = CR_CORE_MEMORY"
    slurm.answer("scontrol", stdout=config, **{"--all": {"stdout": nodes}})
    row = {"tres-alloc": "cpu=6,mem=1G,node=1", "NumTasks": 6, "State": "PENDING", "Reason": "Resources"}
    waiting = job_row(8, **{**row, "NodeList": "", "threads": 1, "UserName": "bob", **changes})
    slurm.answer("squeue", rows=[job_row(1), waiting])
    assert [claim.demand.get("cpu") for claim in manager_on().listing().claims] == ([cpus] if cpus else [])


@pytest.mark.parametrize(
    ("asked", "nodes", "cpus", "more"),
    [
        # As Slurm 22.05 shows them after it has tried to start them on four nodes of eight CPUs: NumNodes, node=, CPUs,
        # tasks, CPUs of a task, minimum of CPUs on a node.
        pytest.param((4, 1, 8, 1, 8, 8), 1, 8, {}, id="-N1-4 -c8"),
        pytest.param((4, 2, 1, 2, 1, 1), 2, 2, {"MinMemory": "3600M", "mem": 7200}, id="-N2-4 --mem=3600"),
        pytest.param(("4-6", 2, 16, 16, 1, 8), 2, 16, {}, id="-N2-6 --ntasks-per-node=8"),
        pytest.param((3, 1, 15, 5, 3, 3), 3, 18, {}, id="-n5 -c3"),
        pytest.param((1, 1, 15, 5, 3, 3), 3, 18, {}, id="-n5 -c3, before it has tried"),
        pytest.param((3, 3, 15, 5, 3, 3), 3, 18, {}, id="-N3 -n5 -c3"),
        pytest.param((4, 1, 16, 16, 1, 4), 4, 16, {}, id="-n16 --ntasks-per-node=4"),
        pytest.param((3, 1, 15, 3, 5, 5), 3, 15, {}, id="-n3 -c5"),
        pytest.param((2, 2, 9, 9, 1, 1), 2, 10, {}, id="-N2 -n9"),
        pytest.param((2, 1, 16, 16, 1, 1), 2, 16, {}, id="-n16"),
        pytest.param(
            (3, 2, 1, 2, 1, 1), 2, 2, {"tres-per-node": "gres:gpu:2", "gpus": 4}, id="-N2-3 --gpus-per-node=2"
        ),
        pytest.param((2, 1, 1, 1, 1, 1), 2, 2, {"tres-per-job": "gres:gpu:4", "gpus": 4}, id="--gpus=4"),
        pytest.param((2, 1, 16, 4, 4, 4), 2, 16, {"MinMemory": "1500M", "mem": 1500}, id="-n4 --mem=1500 -c4"),
        pytest.param((2, 2, 2, 20, 1, 1), 2, 2, {}, id="-N2 -O -n20"),
        pytest.param((1, 1, 2, 2, 1, 6), 1, 6, {}, id="--mincpus=6 -n2"),
    ],
)
def test_a_claim_is_for_whole_tasks_on_the_minimum_number_of_nodes(
    slurm: FakeSlurm,
    manager_on: Managers,
    asked: tuple[int | str, ...],
    nodes: int,
    cpus: int,
    more: dict[str, object],
) -> None:
    shown, least, requested, tasks, of_task, of_node = asked
    memory, gpus = more.pop("mem", 100), more.pop("gpus", 0)
    slurm.answer("sinfo", rows=[node_row(f"n{number}", Gres="gpu:2", GresUsed="") for number in range(1, 5)])
    row = {"State": "PENDING", "Reason": "Resources", "NodeList": "", "UserName": "bob", "NumNodes": shown}
    row |= {"tres-alloc": f"cpu={requested},mem={memory}M,node={least}", "NumTasks": tasks, "cpus-per-task": of_task}
    slurm.answer("squeue", rows=[job_row(1), job_row(8, **{**row, "mincpus": of_node, **more})])
    (claim,) = manager_on().listing().claims
    assert (claim.nodes, claim.demand.get("cpu"), claim.demand.get("gpu")) == (nodes, cpus, gpus)
    if "MinMemory" in more:
        assert claim.demand.get("memory") == nodes * int(str(more["MinMemory"]).rstrip("M"))


@pytest.mark.parametrize(
    ("asked", "spreads"),
    [
        pytest.param((2, 1, 16, 16, 1, 1), ((3, 18), (4, 16), (8, 16)), id="-n16"),
        pytest.param((1, 1, 3, 3, 1, 1), ((2, 4), (3, 3)), id="-n3"),
        pytest.param((1, 1, 8, 1, 8, 8), (), id="-c8"),
        pytest.param((2, 2, 16, 16, 1, 1), (), id="-N2 -n16"),
        pytest.param((4, 1, 16, 16, 1, 4), (), id="-n16 --ntasks-per-node=4"),
    ],
)
def test_a_job_that_asks_for_tasks_may_be_spread_over_more_nodes(
    slurm: FakeSlurm, manager_on: Managers, asked: tuple[int, ...], spreads: tuple[tuple[int, int], ...]
) -> None:
    shown, least, requested, tasks, of_task, of_node = asked
    slurm.answer("sinfo", rows=[node_row(f"n{number}") for number in range(1, 5)])
    row = {"State": "PENDING", "Reason": "Resources", "NodeList": "", "UserName": "bob", "NumNodes": shown}
    row |= {"tres-alloc": f"cpu={requested},mem=100M,node={least}", "NumTasks": tasks, "cpus-per-task": of_task}
    slurm.answer("squeue", rows=[job_row(1), job_row(8, **{**row, "mincpus": of_node})])
    (claim,) = manager_on().listing().claims
    assert tuple((nodes, demand.get("cpu")) for nodes, demand in claim.spreads) == spreads
