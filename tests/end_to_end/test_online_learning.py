"""A site learns: recorded days, a learner beside the daemon, a candidate that goes live and decides, and back again."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_process import BIN
from local_cluster import LocalCluster
from recorded_site import BUSY_DAYS, record

from dl2d.core.policy_registry import RunState, Trial, VersionState
from dl2d.policies.common.checkpoint import Checkpoint, write_checkpoint
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.policies.drf import Drf
from dl2d.simulation.workload.workload_source_by_name import load_source

DAY = 86_400


def know_nothing(folder: Path) -> str:
    """A checkpoint that serves jobs whole, in submit order: its scores are all the same."""
    base = with_checkpoint().checkpoint
    scorer = np.zeros_like(np.asarray(base.weights["scorer"]))
    nothing = Checkpoint(policy="dl2", weights={**base.weights, "scorer": scorer}, settings=base.settings, training={})
    write_checkpoint(nothing, folder)
    return nothing.digest


def dl2d(*arguments: str | Path) -> str:
    """What a command that must succeed says."""
    done = subprocess.run([BIN / "dl2d", *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_what_was_learned_from_recorded_days_goes_live_and_decides(tmp_path: Path) -> None:
    base = know_nothing(tmp_path / "nothing")
    settings: dict[str, Any] = {
        "policy": {"name": "dl2", "checkpoint": str(tmp_path / "nothing")},
        "learning": {"enabled": True, "every_hours": 1 / 3600, "minutes": 0.3, "limit_minutes": 20, "days": 10},
    }
    cluster = LocalCluster(tmp_path, settings)
    cluster.state_dir.mkdir()
    begin = time.time() // DAY * DAY - 6 * DAY
    record(f"sqlite:///{cluster.state_dir}/dl2d.sqlite", load_source(BUSY_DAYS, seed=1).workload, Drf(), begin=begin)
    recorded = cluster.store.last_slot_number()
    registry = cluster.store.registry

    def decided_by() -> str:
        (slot,) = cluster.store.slots(limit=1)
        return slot.policy_version.split()[0] if slot.number > recorded else ""

    def learned() -> list[Trial]:
        return [trial for trial in registry.trials() if trial.candidate != base]

    reason = "it is what the test begins with"
    dl2d("policy", "promote", tmp_path / "nothing", "--force", "--reason", reason, "-c", cluster.config)
    with cluster:
        cluster.wait_until(lambda: decided_by() == base[:12], "what the configuration names decides")
        cluster.wait_until(learned, "a candidate comes to the gate", timeout=1300, every=1.0)
        trial = learned()[-1]
        assert trial.passed, trial.reason
        assert (trial.current, len(trial.days)) == (base, 3)
        assert trial.high is not None
        assert trial.high < 0
        cluster.wait_until(lambda: decided_by() == trial.candidate[:12], "the candidate decides")
        live = registry.live("dl2")
        assert live is not None
        assert (live.digest, live.parent) == (trial.candidate, base)
        assert live.jobs > 10
        # No more of it, one that runs is ended: the rest of the test is about what there is.
        cluster.settings["learning"] = {}
        cluster.write()
        cluster.hang_up()
        job = cluster.train("mine", "--step-seconds", "0.02", epochs=200, max_workers=2, max_ps=1)
        cluster.wait_until(lambda: cluster.confirmed(job) != (0, 0), "a job trains under it")
        dl2d("policy", "rollback", "--reason", "a test", "-c", cluster.config)
        cluster.wait_until(lambda: decided_by() == base[:12], "the one before decides again")
        told = json.loads(dl2d("why", "mine", "--all", "--recompute", "--json", "-c", cluster.config))
        versions = [entry["policy_version"].split()[0] for entry in told["decisions"]]
        assert set(versions) == {trial.candidate[:12], base[:12]}
        assert all(entry["recomputed"]["same"] for entry in told["decisions"])
        states = {version.digest: version.state for version in registry.versions()}
        assert states[trial.candidate] is VersionState.RETIRED
        promoted = [change.by for change in registry.changes() if change.after is VersionState.LIVE]
        assert promoted[1] == "gate"
        assert any(run.state is RunState.FINISHED for run in registry.runs())
        assert cluster.stop() == 0
