"""Bad checkpoints of every kind, through check, promote and whole ticks: none ends or starves a job.

Those that promote refuses go live past it, as in ``end_to_end.test_bad_checkpoints`` in a daemon of its own.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.conftest import Dl2d, new_store, store_url, write_config
from policies.dl2_paper.test_policy import a_checkpoint
from tick.world import World

from dl2d.config.settings import load_settings
from dl2d.core.jobs import NOTHING, JobState
from dl2d.core.policy import Policy
from dl2d.core.policy_registry import VersionState
from dl2d.daemon.policy_versions.active_version import ActiveVersion, keep_version
from dl2d.policies.common.checkpoint import Checkpoint, write_checkpoint
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.policies.drf import Drf
from dl2d.store.sql_store import SqlStore

#: The first of some, and how many: of the first ones CI runs fewer.
PARTS = [(0, 10), (10, 10), *((number, 20) for number in range(20, 1000, 20))]
FAST, SLOW = 1, 2
FORCE = ("--force", "--reason", "to try it")


def poisoned(weights: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Weights with one of the ways in which weights go wrong."""
    made = {name: np.array(array) for name, array in weights.items()}
    floats = [name for name, array in made.items() if array.dtype.kind == "f" and array.size]
    way = rng.integers(6)
    if way == 0:  # some that are no numbers
        array = made[str(rng.choice(floats))]
        array.flat[rng.integers(array.size)] = rng.choice([np.nan, np.inf, -np.inf])
    elif way == 1:  # so large that they overflow
        made = {name: array * array.dtype.type(10.0 ** rng.uniform(3, 30)) if name in floats else array
                for name, array in made.items()}  # fmt: skip
    elif way == 2:  # nothing was learned
        made = {name: np.zeros_like(array) if name in floats else array for name, array in made.items()}
    elif way == 3:  # another shape
        name = str(rng.choice(floats))
        made[name] = made[name][..., :-1]
    elif way == 4 and "policy.void.bias" in made:  # gives nothing, or everything to workers
        made["policy.void.bias"][:] = 1e6 * rng.choice([1.0, -1.0])
        made["policy.job.bias"][:] = [1e6, 0.0, 0.0] if rng.random() < 0.5 else 0.0
    else:  # one is missing
        del made[str(rng.choice(floats))]
    return made


def a_bad_checkpoint(seed: int) -> Checkpoint:
    rng = np.random.default_rng(seed)
    if seed % 2:
        base = with_checkpoint().checkpoint
        weights = {name: np.array(array) for name, array in base.weights.items()}
        if rng.random() < 0.5:
            weights["scorer"] = rng.normal(size=np.shape(weights["scorer"])) * 10.0 ** rng.uniform(-3, 6)
        settings = dict(base.settings)
    else:
        models = ["model-a"] if rng.random() < 0.7 else ["another", "cluster's"]
        resources = ["cpu", "gpu", "memory"] if rng.random() < 0.7 else ["fpga"]
        drawn = a_checkpoint(
            seed, network=str(rng.choice(["dense", "shared"])), scale=10.0 ** rng.uniform(-3, 3), models=models,
            resources=resources, sampled=bool(rng.random() < 0.5), first_bundles=bool(rng.random() < 0.7),
        )  # fmt: skip
        weights, settings = dict(drawn.weights), dict(drawn.settings)
    if rng.random() < 0.6:
        weights = poisoned(weights, rng)
    if rng.random() < 0.2:
        del settings[str(rng.choice(sorted(settings)))]
    return Checkpoint(policy="dl2" if seed % 2 else "dl2-original", weights=weights, settings=settings, training={})


def damaged(folder: Path, rng: np.random.Generator) -> None:
    """Cut one of the files, or change a byte of it."""
    file = sorted(folder.iterdir())[int(rng.integers(2))]
    data = bytearray(file.read_bytes())
    place = int(rng.integers(len(data)))
    if rng.random() < 0.5:
        file.write_bytes(data[:place])
    else:
        data[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(*part, marks=[pytest.mark.slow] * (number >= FAST) + [pytest.mark.nightly] * (number >= SLOW))
        for number, part in enumerate(PARTS)
    ],
)
def test_no_checkpoint_harms_a_job(dl2d: Dl2d, tmp_path: Path, first: int, count: int) -> None:
    new_store(tmp_path)
    outcomes = []
    for seed in range(first, first + count):
        rng = np.random.default_rng([seed, 1])
        made = a_bad_checkpoint(seed)
        folder = tmp_path / f"c{seed}"
        write_checkpoint(made, folder)
        is_damaged = rng.random() < 0.1
        if is_damaged:
            damaged(folder, rng)
        named = write_config(tmp_path, policy={"name": made.policy, "checkpoint": str(folder)})
        checked = dl2d("check", "--json", "-c", named)
        (finding,) = [each for each in checked.json["findings"] if each["item"] == "policy.checkpoint"]
        assert (checked.status == 0) <= finding["good"]
        assert len(finding["text"].splitlines()) == 1
        config = write_config(tmp_path, policy={"name": made.policy})
        ran = dl2d("policy", "promote", folder, *FORCE, "-c", config)
        outcomes.append(ran.status)
        if ran.status:
            assert not finding["good"], finding
            (line,) = ran.err.splitlines()
            assert (ran.status, line[:6]) == (1, "dl2d: "), line
            found, told = past_the_gate(tmp_path / f"past{seed}", made, rng if is_damaged else None)
            assert all(sentence and len(sentence.splitlines()) == 1 for sentence in told), told
            if found is None:
                assert told, seed
            else:
                harmless(World(policy=found, idle_seconds=30.0, url=""), seed)
            continue
        with closing(SqlStore(store_url(tmp_path))) as store:
            policy = ActiveVersion(load_settings(config), store, lambda: 1.0).policy
        harmless(World(policy=policy, idle_seconds=30.0, url=""), seed)
    assert len(set(outcomes)) == 2  # some are refused, some are not


def past_the_gate(
    folder: Path, made: Checkpoint, damage: np.random.Generator | None
) -> tuple[Policy | None, list[str]]:
    """Make a version live in a registry beside check and promote, as the daemon runs with a good one.

    Returns the policy with which the daemon decides then, None if it stays with the good one, and what it says.
    """
    folder.mkdir()
    settings = load_settings(write_config(folder, policy={"name": made.policy}))
    with closing(SqlStore(new_store(folder))) as store:
        registry, versions = store.registry, settings.versions_path
        good = with_checkpoint().checkpoint if made.policy == "dl2" else a_checkpoint(0, network="shared")
        began = keep_version(good, versions, registry, at=1.0, origin="a test")
        registry.change(made.policy, began.digest, VersionState.LIVE, at=1.0, by="ann", reason="it is good")
        active = ActiveVersion(settings, store, lambda: 1.0)
        bad = keep_version(made, versions, registry, at=2.0, origin="a test")
        if damage is not None:
            damaged(Path(bad.folder), damage)
        registry.change(made.policy, bad.digest, VersionState.LIVE, at=2.0, by="ann", reason="past the gate")
        found = active.refreshed()
        said = [change.reason for change in registry.changes(made.policy) if change.digest == bad.digest]
        return found, [sentence for sentence in said if sentence != "past the gate"]


def harmless(world: World, seed: int) -> None:
    """A version that an administrator forced into a cluster with a running job and with one that comes."""
    with closing(world):
        forced, world.policy = world.policy, Drf()
        running = world.ready()
        world.settle()
        assert world.has(running) > NOTHING
        world.policy = forced
        coming = world.submit(max_workers=2, max_ps=2)
        for _ in range(10):
            world.tick(20.0)
            world.beat()
            assert world.job(running).state is JobState.RUNNING, seed
            assert world.has(running) >= world.job(running).request.min_size, seed
        assert world.has(coming) > NOTHING, seed
