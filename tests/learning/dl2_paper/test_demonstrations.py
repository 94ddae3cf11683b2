from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster
from simulation.drawn import drawn

from dl2d.core.cluster import NodeSet, SharedLimit, Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import TooFewSamples
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.learning.dl2_paper.demonstrations import demonstrations_in, recordings_of
from dl2d.learning.dl2_paper.settings import Labels
from dl2d.learning.site_records.recorded_decisions import Recording, sizes_of
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.dl2_paper.observation import ObservationEncoding
from dl2d.policies.drf import Drf
from dl2d.simulation.vectorized.clusters import Clusters
from dl2d.simulation.vectorized.dl2_paper_sizing import Windows
from dl2d.simulation.vectorized.workload_arrays import Library

SIGHT = ObservationEncoding(
    window=4, models=("other",), resources=("cpu", "gpu"), first_bundles=False, slot_seconds=60.0, extras=True
)


def decided(snapshot: Snapshot, *sizes: tuple[int, int]) -> Decision:
    """Nothing but sizes, as of a manager whose users choose them."""
    reason = Reason(Constraint.SATISFIED, "as the user asked")
    jobs = tuple(
        JobDecision(job=job.key, allocation=Allocation(*size), reason=reason)
        for job, size in zip(snapshot.jobs, sizes, strict=True)
    )
    return Decision(policy="static", policy_version="1", jobs=jobs)


@pytest.mark.parametrize("name", ["drf", "fifo", "srtf"])
@pytest.mark.parametrize("seed", range(3))
def test_a_recorded_policy_is_shown_as_windows_show_it_to_the_last_bit(name: str, seed: int) -> None:
    workload = drawn(seed, jobs=9, plain=True, most_least=1)
    library = Library.of([workload])
    encoding = ObservationEncoding(
        window=12, models=library.models, resources=library.resources, first_bundles=False,
        slot_seconds=workload.slot_seconds, extras=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    found = demonstrations_in(recordings_of(name, workload), encoding, labels=Labels.STEPS, kept=1.0, rng=rng)
    clusters = Clusters(library, 1)
    clusters.reset(np.array([0]), np.array([0]), [rng])
    windows = Windows(clusters, 12, extras=True)
    windows.begin(np.array([0]))
    windows.refresh()

    def pass_states_with_void_alone() -> None:
        while not clusters.over.all() and not windows.mask()[0, :-1].any():
            windows.step(np.array([36]))
            windows.refresh()

    for number, action in enumerate(found.actions):
        pass_states_with_void_alone()
        assert (found.observations[number] == windows.observation()[0]).all()
        assert (found.masks[number] == windows.mask()[0]).all()
        assert found.rights[number].nonzero()[0].tolist() == [action]
        windows.step(np.array([action]))
        windows.refresh()
    pass_states_with_void_alone()
    assert clusters.over.all()


@pytest.mark.parametrize("labels", list(Labels))
def test_sizes_that_users_chose_are_walked_to_and_then_it_is_enough(labels: Labels) -> None:
    jobs = [a_job(0), a_job(1), a_job(2, **NO_PS)]
    snapshot = a_snapshot(jobs, cluster(4, cpu=16, gpu=8), held={1: Allocation(2, 1)})
    recording = Recording(snapshot, decided(snapshot, (3, 2), (2, 1), (4, 0)), LoadBalance())
    found = demonstrations_in([recording], SIGHT, labels=labels, kept=1.0, rng=np.random.default_rng(0))
    assert found.actions[-1] == 12
    assert (found.actions[:-1] < 12).all()
    given = {job: [0, 0] for job in range(3)}
    # The second has its minimum size from the start.
    given[1] = [1, 1]
    for action in found.actions[:-1].tolist():
        job, kind = divmod(action, 3)
        # The first step is the minimum size, whatever it is.
        begins, least = given[job] == [0, 0], jobs[job].request.min_size
        given[job][0] += least.workers if begins else kind != 1
        given[job][1] += least.ps if begins else kind != 0
    assert given == {0: [3, 2], 1: [2, 1], 2: [4, 0]}
    every = np.arange(len(found))
    assert found.masks[every, found.actions].all()
    assert found.rights[every, found.actions].all()
    assert not (found.rights & ~found.masks).any()
    assert found.rights[-1].nonzero()[0].tolist() == [12]
    first = found.rights[0].nonzero()[0].tolist()
    # A bundle for the first job before all; or whatever does not lead past a size.
    assert first == ([2] if labels is Labels.STEPS else [0, 1, 2, 3, 6])


def test_what_has_no_room_is_masked_and_not_asked_for() -> None:
    """Room for one worker and PS only, though two jobs of (2, 2) were decided on."""
    snapshot = a_snapshot([a_job(0), a_job(1)], cluster(1, cpu=4, gpu=1))
    recording = Recording(snapshot, decided(snapshot, (2, 2), (2, 2)), LoadBalance())
    for labels in Labels:
        found = demonstrations_in([recording], SIGHT, labels=labels, kept=1.0, rng=np.random.default_rng(1))
        assert found.masks[np.arange(len(found)), found.actions].all()
        # One CPU is left at most in the end: no action but void, which is no lesson.
        assert sum(found.actions < 12) <= 4


def test_demonstrations_begin_where_first_bundles_end() -> None:
    snapshot = a_snapshot([a_job(0), a_job(1)], cluster(4, cpu=16, gpu=8))
    decision = ask(Drf(), snapshot)
    encoding = ObservationEncoding(
        window=4, models=("other",), resources=("cpu", "gpu"), first_bundles=True, slot_seconds=60.0
    )
    found = demonstrations_in(
        [Recording(snapshot, decision, LoadBalance())], encoding, labels=Labels.STEPS, kept=1.0,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    assert found.actions.tolist() == [2, 5, 2, 5, 2, 5]


def test_demonstrations_keep_to_the_nodes_and_limits_of_the_recorded_jobs() -> None:
    """Otherwise first bundles of one partition went to nodes of another, and steps were shown that a policy lacks."""
    jobs = [a_job(number) for number in range(3)]
    small, large = (tuple(job.key for job in some) for some in (jobs[:2], jobs[2:]))
    snapshot = structs.replace(
        a_snapshot(jobs, cluster(2, cpu=4, gpu=1)),
        node_sets=(NodeSet(small, frozenset({"n0"}), "small"), NodeSet(large, frozenset({"n1"}), "large")),
        limits=(SharedLimit(large, (("gpu", 0),), "no GPU"),),
    )
    recording = Recording(snapshot, decided(snapshot, (1, 2), (1, 2), (1, 2)), LoadBalance())
    for labels in Labels:
        found = demonstrations_in([recording], SIGHT, labels=labels, kept=1.0, rng=np.random.default_rng(0))
        # The first job or the second has room, and one of its servers more; the third has none in its limit.
        assert not found.masks[:, 6:9].any()
        assert sum(found.actions < 12) <= 2
    assert sizes_of(Drf(), 0)(recording)[jobs[2].key] == NOTHING


@pytest.mark.parametrize("jobs", [0, 2])
def test_nothing_to_learn_from_is_told_without_jobs_and_for_jobs_of_one_size(jobs: int) -> None:
    one_size = a_snapshot([a_job(number, max_workers=1, max_ps=1) for number in range(jobs)], cluster(2, cpu=16, gpu=8))
    recording = Recording(one_size, decided(one_size, *[(1, 1)] * jobs), LoadBalance())
    encoding = replace(SIGHT, first_bundles=True)
    with pytest.raises(TooFewSamples, match="there were no jobs, each has one size only, or no room was left"):
        demonstrations_in([recording], encoding, labels=Labels.SIZES, kept=1.0, rng=np.random.default_rng(0))
