"""Mode canary on the local manager: real jobs of both groups at once, then a promotion and a withdrawal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from local_cluster import LocalCluster
from sqlalchemy import text

from dl2d.core.daemon_mode_and_canary import CanaryState
from dl2d.core.jobs import JobKey, JobState
from dl2d.core.store import JobChange
from dl2d.testing import make_job

pytestmark = pytest.mark.slow

DAY = 86_400
SETTINGS = {
    "mode": "canary", "policy": {"name": "drf", "fallback": "fifo"}, "canary": {"share": 0.5, "min_jobs": 20}
}  # fmt: skip


def decided(cluster: LocalCluster, key: JobKey) -> set[tuple[str, str]]:
    """The policies that decided on a job, each with that of the whole slot."""
    policies = {slot.number: slot.policy for slot in cluster.store.slots(limit=1000)}
    return {(entry.policy, policies[entry.slot]) for entry in cluster.store.decisions(key)}


def recorded(cluster: LocalCluster, factor: float) -> None:
    """A canary of six days whose jobs in the group took ``factor`` times as long as the others."""
    (canary,) = cluster.store.canaries()
    began = (time.time() // DAY - 6) * DAY
    with cluster.store._database.writing("a test") as connection:
        connection.execute(text("UPDATE canaries SET began_at = :at"), {"at": began})
    for number in range(80):
        submitted = int(began + number // 16 * DAY + 60 * number)
        job = make_job(f"past-{number}", submitted=submitted)
        cluster.store.add_job(job)
        in_group = bool(number % 2)
        cluster.store.assign_canary(canary.number, {job.key: in_group})
        seconds = (1000 + number // 2 % 8) * (factor if in_group else 1.0)
        cluster.store.change_job(job.key, JobChange(state=JobState.FINISHED), submitted + seconds)


@pytest.mark.parametrize(
    ("factor", "state", "after"),
    [
        (0.7, CanaryState.PROMOTED, {("drf", "drf")}),
        pytest.param(1.4, CanaryState.WITHDRAWN, {("fifo", "fifo")}, marks=pytest.mark.nightly),
    ],
)
def test_both_groups_train_and_the_result_holds_for_all_jobs(
    tmp_path: Path, factor: float, state: CanaryState, after: set[tuple[str, str]]
) -> None:
    with LocalCluster(tmp_path, SETTINGS) as cluster:
        (canary,) = cluster.store.canaries()
        keys = [cluster.train(f"job-{number}", epochs=20, max_workers=2, max_ps=1) for number in range(2)]
        while len({canary.includes(cluster.job(key)) for key in keys}) < 2:
            keys.append(cluster.train(f"job-{len(keys)}", epochs=20, max_workers=2, max_ps=1))
        for key in keys:
            assert cluster.ended(key).state is JobState.FINISHED
            policy = "drf" if canary.includes(cluster.job(key)) else "fifo"
            assert decided(cluster, key) == {(policy, "canary")}

        recorded(cluster, factor)
        cluster.stop()
        cluster.start()
        cluster.wait_until(lambda: cluster.store.canaries()[0].state is state, "the canary ends by its rule")
        assert cluster.logged(f"canary {state}")
        key = cluster.train("later", epochs=20, max_workers=2, max_ps=1)
        assert cluster.ended(key).state is JobState.FINISHED
        assert decided(cluster, key) == after
