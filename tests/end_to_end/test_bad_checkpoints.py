"""Bad checkpoints become live in a running daemon: a job that trains goes on, one that comes trains.

One of each kind, and random ones as of ``cli.test_random_checkpoints``: some here, a thousand in the nightly tests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.test_random_checkpoints import a_bad_checkpoint, damaged
from local_cluster import LocalCluster
from policies.dl2_paper.test_policy import a_checkpoint

from dl2d.core.errors import Dl2dError
from dl2d.core.jobs import NOTHING, JobKey
from dl2d.core.policy_registry import Version, VersionState
from dl2d.daemon.policy_versions.active_version import keep_version
from dl2d.policies.common.checkpoint import Checkpoint, write_checkpoint
from dl2d.policies.dl2.policy import Dl2, with_checkpoint
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy

#: Random checkpoints of each design that CI tries; all of them; those that one nightly test tries; and one of how many
#: has a job come.
RANDOM_IN_CI, RANDOM, IN_ONE_TEST, A_JOB_COMES = 1, 500, 50, 4
#: Epochs of a job that trains while all checkpoints of a nightly test are tried: a quarter of an hour and more.
LONG = 200
SITE = {"models": ["other"], "resources": ["cpu"], "network": "shared", "slot_seconds": 2.0}
GOOD = {"dl2-original": a_checkpoint(0, **SITE), "dl2": with_checkpoint().checkpoint}


def changed(seed: int, change: Callable[[np.ndarray[Any, Any]], object], name: str = "policy.1.weight") -> Checkpoint:
    made = a_checkpoint(seed, **SITE)
    weights = {each: np.array(array) for each, array in made.weights.items()}
    change(weights[name])
    return replace(made, weights=weights)


def not_a_number(array: np.ndarray[Any, Any]) -> None:
    array[:] = np.nan


def too_large(array: np.ndarray[Any, Any]) -> None:
    array[:] = 3e38


def stops_at_once(array: np.ndarray[Any, Any]) -> None:
    array[:] = 1e6


def workers_alone(array: np.ndarray[Any, Any]) -> None:
    array[:] = [1e6, 0.0, 0.0]


KINDS = {
    "NaN": changed(1, not_a_number),
    "overflow": changed(2, too_large),
    "all void": changed(3, stops_at_once, "policy.void.bias"),
    "all workers": changed(4, workers_alone, "policy.job.bias"),
    "cut": a_checkpoint(5, **SITE),
    "of another cluster": a_checkpoint(6, **{**SITE, "models": ["strange"], "resources": ["fpga"]}),
}
#: Kinds with which each job has its minimum size: bad only for how long jobs take, which the gate tells.
UNTOLD = {"all void", "all workers", "of another cluster"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_none_harms_a_job_and_each_is_told_in_one_sentence(tmp_path: Path) -> None:
    with a_site(tmp_path, "dl2-original") as (cluster, running):
        for kind, checkpoint in KINDS.items():
            sentences = harmless(cluster, running, checkpoint, cut if kind == "cut" else untouched)
            assert sentences or kind in UNTOLD, kind
        for seed in range(RANDOM_IN_CI):
            random_one(cluster, running, "dl2-original", seed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_whose_decisions_fail_is_withdrawn_by_rule_and_the_version_before_decides(tmp_path: Path) -> None:
    """Of ``dl2-original``; weights of ``dl2`` with which no decision can be made are refused as they are read."""
    design = "dl2-original"
    with a_site(tmp_path, design, max_failures=3) as (cluster, running):
        registry, good = cluster.store.registry, GOOD[design].digest
        assert cluster.store.slots(limit=1)[0].policy_version.startswith(good[:12])
        bad = gone_live(cluster, KINDS["overflow"], untouched)

        def decides() -> bool:
            keeps_its_least(cluster, running)
            return cluster.store.slots(limit=1)[0].policy_version.startswith(good[:12])

        cluster.wait_until(lambda: registry.live(design).digest == good, "the version is withdrawn")
        cluster.wait_until(decides, "the version before it decides")
        (reason,) = [
            each.reason for each in registry.changes(design) if each.digest == bad.digest and each.by == "daemon"
        ]
        assert "rolled back to: 3 consecutive decisions failed, the last one: " in reason
        slots = [cluster.store.slot(each.number) for each in cluster.store.slots(limit=30) if each.at > bad.at]
        assert [slot.proposed.policy for slot in slots if slot.proposed.fallback_cause] == ["drf"] * 3


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, RANDOM, IN_ONE_TEST))
@pytest.mark.parametrize("design", GOOD)
def test_no_random_one_harms_a_job(tmp_path: Path, design: str, first: int) -> None:
    with a_site(tmp_path, design, epochs=LONG) as (cluster, running):
        for seed in range(first, first + IN_ONE_TEST):
            random_one(cluster, running, design, seed)


@contextmanager
def a_site(directory: Path, design: str, *, epochs: int = 60, **policy: Any) -> Iterator[tuple[LocalCluster, JobKey]]:
    """A daemon that a good version decides for, and a job that trains until the end, at least about 5 s an epoch."""
    write_checkpoint(GOOD[design], directory / "good")
    cluster = LocalCluster(
        directory,
        {
            "policy": {"name": design, "checkpoint": str(directory / "good"), "idle_seconds": 4, **policy},
            "schedule": {"poll_seconds": 0.5, "slot_seconds": 2},
        },
    )
    gate = directory / "gate"
    gate.touch()
    with cluster:
        running = cluster.train("running", gate=gate, epochs=epochs, max_workers=2, max_ps=1)
        cluster.wait_until(lambda: cluster.confirmed(running) != NOTHING, "a job trains")
        yield cluster, running
        gate.unlink()
        assert cluster.ended(running).state == "finished"
        assert cluster.stop() == 0


def random_one(cluster: LocalCluster, running: JobKey, design: str, seed: int) -> None:
    """A random bad checkpoint, of which one file in ten is damaged; one that cannot decide is told."""
    rng = np.random.default_rng([seed, 2])
    is_damaged = rng.random() < 0.1
    checkpoint = a_bad_checkpoint(2 * seed + (design == "dl2"))
    sentences = harmless(
        cluster, running, checkpoint, (lambda folder: damaged(folder, rng)) if is_damaged else untouched,
        comes=seed % A_JOB_COMES == 0,
    )  # fmt: skip
    if not is_damaged:
        try:
            # As the daemon makes it, which does not need the checkpoint's length of an interval.
            (Dl2 if design == "dl2" else Dl2PaperPolicy)(checkpoint, slot_seconds=2.0)
        except Dl2dError:
            assert sentences, seed


def harmless(
    cluster: LocalCluster,
    running: JobKey,
    checkpoint: Checkpoint,
    change: Callable[[Path], None],
    *,
    comes: bool = True,
) -> list[str]:
    """Have a checkpoint go live, whose files may be changed, and a job come; returns what was said of the version."""
    version = gone_live(cluster, checkpoint, change)
    keeps_its_least(cluster, running)
    if comes:
        coming = cluster.train("coming", epochs=2, max_workers=2, max_ps=1)
        cluster.wait_until(lambda: done(cluster, coming, running), f"{version.digest}: a job that comes trains")
        assert cluster.job(coming).state == "finished", version
    sentences = told(cluster, version)
    assert all(sentence and len(sentence.splitlines()) == 1 for sentence in sentences), sentences
    return sentences


def untouched(folder: Path) -> None:
    """Leave the files as they are."""


def cut(folder: Path) -> None:
    """Cut each file."""
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-20])


def gone_live(cluster: LocalCluster, checkpoint: Checkpoint, change: Callable[[Path], None]) -> Version:
    """A version that is made live past check and gate with changed files; the daemon has looked at it then."""
    registry, at = cluster.store.registry, time.time()
    version = keep_version(checkpoint, cluster.state_dir / "policies", registry, at=at, origin="a test")
    change(Path(version.folder))
    registry.change(version.policy, version.digest, VersionState.LIVE, at=at, by="ann", reason="past the gate")
    slot = cluster.store.last_slot_number()
    cluster.wait_until(lambda: cluster.store.last_slot_number() > slot + 1, "it decides")
    return version


def done(cluster: LocalCluster, coming: JobKey, running: JobKey) -> bool:
    """Whether the job has ended; the other one has its minimum size all the time."""
    keeps_its_least(cluster, running)
    return cluster.job(coming).state.ended


def keeps_its_least(cluster: LocalCluster, running: JobKey) -> None:
    """The job trains with its minimum size or more."""
    job = cluster.job(running)
    assert job.state == "running"
    assert cluster.confirmed(running) >= job.request.min_size


def told(cluster: LocalCluster, version: Version) -> list[str]:
    """What was said of a version: remarks of the registry, causes of the fallback's slots, and warnings of the log."""
    registry, digits = cluster.store.registry, version.digest[:12]
    found = [each.reason for each in registry.changes(version.policy) if each.digest == version.digest]
    slots = (cluster.store.slot(each.number) for each in cluster.store.slots(limit=30) if each.at > version.at)
    found += [slot.proposed.fallback_cause for slot in slots if slot is not None and slot.proposed.fallback_cause]
    lines = (json.loads(line) for line in cluster.log.read_text().splitlines() if digits in line)
    found += [line["event"] for line in lines if line["level"] in ("warning", "error")]
    return [each for each in found if each != "past the gate"]
