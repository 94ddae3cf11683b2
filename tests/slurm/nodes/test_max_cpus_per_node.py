"""What nodes, jobs and claims have of the CPUs of partitions with ``MaxCPUsPerNode``."""

from __future__ import annotations

import pytest
from slurm_fakes import FakeSlurm, Managers, job_row, live_task, node_row

from dl2d.core.resource_manager import RmListing
from dl2d.core.resources import Resources

#: n1 and n2 are in partition Short, n2 and n3 in ``long``.
PARTITIONS = """\
PartitionName=Short Nodes=n[1-2] MaxCPUsPerNode=4 State=UP
PartitionName=long Nodes=n[2-3] MaxCPUsPerNode=UNLIMITED State=UP
PartitionName=gone Nodes=n9 MaxCPUsPerNode=1 State=UP
"""
TAG = "dl2:fake.1.1795253000:worker-1"
PENDING = {"State": "PENDING", "Reason": "Resources", "NodeList": "", "UserName": "bob"}


@pytest.fixture
def listing(slurm: FakeSlurm, manager_on: Managers):
    """A listing with some rows of squeue beside the anchor 1, which holds a CPU in Short on n1."""

    def made(*rows: dict[str, object], **settings: object) -> RmListing:
        places = [("n1", "Short"), ("n2", "Short"), ("n2", "long"), ("n3", "long")]
        slurm.answer("sinfo", rows=[node_row(node, PartitionName=partition) for node, partition in places])
        slurm.answer("scontrol", stdout="ClusterName = fake\n", **{"--all": {"stdout": PARTITIONS}})
        slurm.answer("squeue", rows=[job_row(1, Partition="Short"), *rows])
        tasks = [live_task("8", TAG)] if any(row.get("Comment") == TAG for row in rows) else []
        return manager_on(**settings).listing(tasks=tasks)

    return made


@pytest.mark.parametrize(
    ("row", "used"),
    [
        ({"Partition": "Short", "NodeList": "n2"}, [1, 3]),
        ({"Partition": "long", "NodeList": "n2"}, [1, 0]),
        ({"Partition": "Short", "NodeList": "n2", "State": "COMPLETING"}, [1, 3]),
        ({"Partition": "Short", "NodeList": "n2", "State": "COMPLETED"}, [1, 0]),
        ({"Partition": "Short", "NodeList": "n2", "State": "SUSPENDED"}, [1, 3]),
        ({"Partition": "Short", "NodeList": "n[1-2]", "tres-alloc": "cpu=4,mem=1G,node=2"}, [3, 2]),
        # The limit was lowered since.
        ({"Partition": "Short", "NodeList": "n2", "tres-alloc": "cpu=7,mem=1G,node=1"}, [1, 4]),
    ],
)
def test_what_jobs_of_the_partition_use_of_each_node(listing, row: dict[str, object], used: list[int]) -> None:
    nodes = listing(job_row(8, **{"tres-alloc": "cpu=3,mem=1G,node=1", **row})).nodes
    assert [node.capacity.get("cpu-in-short") for node in nodes] == [4, 4, 0]
    assert [node.used.get("cpu-in-short") for node in nodes] == [*used, 0]
    assert not any(name.startswith("cpu-in-") for name in nodes[2].capacity.as_dict())


@pytest.mark.parametrize(
    ("partition", "setting", "most"), [("Short", "", 2), ("long", "", 0), ("Short,long", "", 0), ("long", "Short", 2)]
)
def test_tasks_demand_it_that_run_in_no_other_partition(listing, partition: str, setting: str, most: int) -> None:
    found = listing(job_row(7, Partition=partition), partition=setting)
    assert found.given["7"](Resources.of(cpu=2)).get("cpu-in-short") == most


def test_a_task_holds_it_and_a_waiting_job_demands_it(listing) -> None:
    row = {"NodeList": "n1", "Comment": TAG, "tres-alloc": "cpu=2,mem=1G,node=1"}
    waiting = [job_row(number, Partition=name, **PENDING) for number, name in ((9, "Short"), (10, "long"))]
    found = listing(job_row(8, Partition="Short", **row), *waiting)
    (task,) = (job for job in found.jobs if job.handle == "8")
    assert task.held == Resources.of({"cpu": 2, "memory": 1024, "cpu-in-short": 2})
    assert [claim.demand.get("cpu-in-short") for claim in found.claims] == [1, 0]


def test_nothing_is_counted_where_no_partition_has_the_limit(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("squeue", rows=[job_row(1)])
    assert {name for node in manager_on().listing().nodes for name in node.capacity.as_dict()} == {
        "cpu", "gpu", "memory"
    }  # fmt: skip
