"""Which elastic jobs may preempt running jobs, by slurm.conf as Slurm 22.05 shows it."""

from __future__ import annotations

import pytest
from slurm_fakes import FakeSlurm, Managers, job_row, node_row

#: n1 is in all of them, n2 in ``other`` alone.
PARTITIONS = """\
PartitionName=low Nodes=n1 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=low2 Nodes=n1 PriorityTier=1 PreemptMode=CANCEL State=UP
PartitionName=kept Nodes=n1 PriorityTier=1 PreemptMode=OFF State=UP
PartitionName=high Nodes=n1 PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=other Nodes=n2 PriorityTier=1 PreemptMode=REQUEUE State=UP
"""
TIERS, QOS = "preempt/partition_prio", "preempt/qos"


@pytest.mark.parametrize(
    ("kind", "own", "running", "may"),
    [
        (TIERS, {"Partition": "high"}, {"Partition": "low"}, True),
        (TIERS, {"Partition": "high"}, {"Partition": "low2", "State": "SUSPENDED"}, True),
        (TIERS, {"Partition": "high"}, {"Partition": "low", "State": "COMPLETED"}, False),
        (TIERS, {"Partition": "high"}, {"Partition": "low", "State": "PENDING", "NodeList": ""}, False),
        (TIERS, {"Partition": "high"}, {"Partition": "kept"}, False),
        (TIERS, {"Partition": "high"}, {"Partition": "high"}, False),
        (TIERS, {"Partition": "high"}, {"Partition": "other", "NodeList": "n2"}, False),
        (TIERS, {"Partition": "high"}, {"Partition": "unknown"}, False),
        (TIERS, {"Partition": "low"}, {"Partition": "low2"}, False),
        (TIERS, {"Partition": "low"}, {"Partition": "high"}, False),
        (TIERS, {"Partition": "low", "QOS": "high"}, {"Partition": "low", "QOS": "low"}, False),
        (QOS, {"Partition": "low", "QOS": "high"}, {"Partition": "low", "QOS": "low"}, True),
        (QOS, {"Partition": "low", "QOS": "high"}, {"Partition": "low", "QOS": "high"}, False),
        (QOS, {"Partition": "low", "QOS": "high"}, {"Partition": "other", "QOS": "low", "NodeList": "n2"}, False),
        ("preempt/none", {"Partition": "high", "QOS": "high"}, {"Partition": "low", "QOS": "low"}, False),
    ],
)
def test_tasks_may_preempt_a_job_on_their_nodes(
    slurm: FakeSlurm, manager_on: Managers, kind: str, own: dict[str, str], running: dict[str, str], may: bool
) -> None:
    places = [("n1", "low"), ("n1", "low2"), ("n1", "kept"), ("n1", "high"), ("n2", "other")]
    slurm.answer("sinfo", rows=[node_row(node, PartitionName=partition) for node, partition in places])
    config = f"PreemptMode             = REQUEUE\nPreemptType             = {kind}\n"
    slurm.answer("scontrol", stdout=config, **{"--all": {"stdout": PARTITIONS}})
    slurm.answer("squeue", rows=[job_row(1, **own), job_row(2, UserName="bob", **running)])
    assert ("1" in manager_on().listing().may_preempt) is may
