"""Which recorded slots are learned from, and which a policy is compared on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from msgspec import structs
from policies.snapshots import a_job, a_snapshot, ask, cluster

from dl2d.core.cluster import NodeSet
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.learning.site_records.recorded_decisions import (
    Recording,
    compare_sizes,
    has_choice,
    simple_yardstick,
    split_recordings,
    with_soon_starts,
)
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf

ONE, TWO = Allocation(1, 1), Allocation(2, 2)


def a_slot(number: int, **sizes: tuple[Allocation, Allocation]) -> Recording:
    """Of each job, by the digits of its name, its size before the slot and in it."""
    jobs = {name: a_job(int(name[1:])) for name in sizes}
    decided = tuple(
        JobDecision(jobs[name].key, size, Reason(Constraint.SATISFIED, ""), previous=before)
        for name, (before, size) in sizes.items()
    )
    snapshot = structs.replace(a_snapshot(list(jobs.values()), cluster(2, cpu=64, gpu=8)), slot=number)
    return Recording(snapshot, Decision("some", "1", decided), LoadBalance())


def numbers(recordings: object) -> list[int]:
    return [each.snapshot.slot for each in recordings]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"j1": (ONE, ONE)}, False),
        ({"j1": (ONE, ONE), "j2": (NOTHING, NOTHING)}, True),
        ({"j1": (ONE, ONE), "j2": (NOTHING, ONE)}, True),
        ({"j1": (ONE, TWO)}, True),
        ({"j2": (ONE, ONE)}, True),  # the other one has ended
    ],
)
def test_there_is_a_choice_where_a_job_waits_starts_ends_or_changes(
    sizes: dict[str, tuple[Allocation, Allocation]], expected: bool
) -> None:
    assert has_choice(a_slot(2, **sizes), a_slot(1, j1=(ONE, ONE))) is expected


def test_a_job_that_may_use_no_node_is_no_choice() -> None:
    slot = a_slot(2, j1=(ONE, ONE), j2=(NOTHING, NOTHING))
    held = NodeSet((a_job(2).key,), frozenset(), "Slurm does not start it now: JobHeldUser")
    slot = replace(slot, snapshot=structs.replace(slot.snapshot, node_sets=(held,)))
    assert not has_choice(slot, a_slot(1, j1=(ONE, ONE)))


@pytest.mark.parametrize(
    ("seconds", "policy", "cpu", "given"),
    [
        pytest.param(5.0, "observed", 64, TWO, id="it had room"),
        pytest.param(61.0, "observed", 64, NOTHING, id="too late to be an answer"),
        pytest.param(5.0, "drf", 64, NOTHING, id="dl2d decided"),
        pytest.param(5.0, "observed", 4, NOTHING, id="it had no room"),
    ],
)
def test_starts_soon_after_an_observed_slot_count_in_that_slot(
    seconds: float, policy: str, cpu: int, given: Allocation
) -> None:
    """In the first slot another job has just ended; in the second one j2 has its room."""
    slots = [a_slot(1, j1=(ONE, ONE), j2=(NOTHING, NOTHING)), a_slot(2, j1=(ONE, ONE), j2=(NOTHING, TWO))]
    nodes = [cluster(1, cpu=cpu, gpu=8), cluster(2, cpu=64, gpu=8)]
    recorded = [
        replace(
            each, snapshot=structs.replace(each.snapshot, at=each.snapshot.at + number * seconds, nodes=nodes[number]),
            decision=replace(each.decision, policy=policy),
        )
        for number, each in enumerate(slots)
    ]  # fmt: skip
    first, second = with_soon_starts(recorded)
    j2 = a_job(2).key
    assert first.decision.allocations() == {a_job(1).key: ONE, j2: given}
    (before,) = (entry.previous for entry in second.decision.jobs if entry.job == j2)
    assert before == given
    assert second.decision.allocations()[j2] == TWO
    assert [each.snapshot for each in (first, second)] == [each.snapshot for each in recorded]


@pytest.mark.parametrize(
    ("seconds", "counts_in"),
    [
        pytest.param([0.0, 15.0, 30.0, 45.0], 1, id="all within a minute"),
        pytest.param([0.0, 15.0, 30.0, 61.0], 2, id="the first is too early"),
        pytest.param([0.0, 3600.0, 15.0, 30.0], 3, id="the clock was set back"),
    ],
)
def test_starts_count_in_all_slots_within_a_minute_before(seconds: list[float], counts_in: int) -> None:
    """Jobs come at each poll, as from an array, and each makes a slot, until the scheduler starts j2."""
    waits: dict[str, tuple[Allocation, Allocation]] = {"j1": (ONE, ONE), "j2": (NOTHING, NOTHING)}
    slots = [a_slot(number, **waits) for number in (1, 2, 3)] + [a_slot(4, j1=(ONE, ONE), j2=(NOTHING, TWO))]
    recorded = [
        replace(
            each,
            snapshot=structs.replace(each.snapshot, at=1000.0 + at),
            decision=replace(each.decision, policy="observed"),
        )
        for each, at in zip(slots, seconds, strict=True)
    ]  # fmt: skip
    entries = [
        entry for each in with_soon_starts(recorded) for entry in each.decision.jobs if entry.job == a_job(2).key
    ]
    before, since = [(NOTHING, NOTHING)] * (counts_in - 1), [(TWO, TWO)] * (4 - counts_in)
    assert [(entry.previous, entry.allocation) for entry in entries] == [*before, (NOTHING, TWO), *since]


def test_tasks_of_jobs_that_the_scheduler_left_waiting_are_counted_by_themselves() -> None:
    slots = [a_slot(1, j1=(NOTHING, ONE), j2=(NOTHING, NOTHING)), a_slot(2, j1=(ONE, ONE), j2=(NOTHING, TWO))]
    found = compare_sizes(lambda each: dict.fromkeys(each.decision.allocations(), TWO), slots)
    assert (found.differing, found.given_to_waiting) == (8 / 8, 4 / 8)


def test_held_out_are_blocks_of_slots_with_a_choice_spread_over_the_recorded_time() -> None:
    """Of each five blocks the last, and the middle one to stop by; others slots of these are not learned from."""
    # In the second half nothing is decided in three of four slots.
    given = [a_slot(n, j1=(ONE, TWO if n < 100 or n % 4 == 0 else ONE)) for n in range(400)]
    split = split_recordings(given, min_jobs=1)
    training, stopping, compared = map(numbers, split[:3])
    choice = [n for n in range(400) if n < 100 or n % 4 == 0]
    assert sorted(n for n in (*training, *stopping, *compared) if n in set(choice)) == choice
    assert set(stopping) | set(compared) <= set(choice)
    assert len(compared) == len(stopping) == len(choice) // 5
    assert min(compared) < 100 < max(compared)
    for held_out in (stopping, compared):
        assert not {n for n in training if any(a < n < b for a, b in itertools.pairwise(held_out)
                                               if choice.index(b) == choice.index(a) + 1)}  # fmt: skip
    assert split == split_recordings(given, min_jobs=1)


@pytest.mark.parametrize("count", range(2, 12))
def test_few_slots_are_learned_from_and_compared_on_too(count: int) -> None:
    for changes in ({0}, {count - 1}, {0, count - 1}, set(range(count))):
        given = [a_slot(n, j1=(ONE, TWO if n in changes else ONE)) for n in range(count)]
        split = split_recordings(given, min_jobs=1)
        assert split.training
        assert split.compared


def test_a_yardstick_says_where_drf_gives_the_recorded_sizes_only_in_the_slots_compared_on() -> None:
    """Jobs get what DRF gives them, or nothing in the slots that are learned from."""
    (most,) = ask(Drf(), a_slot(0, j1=(NOTHING, ONE)).snapshot).allocations().values()

    def slots(size: Allocation) -> list[Recording]:
        return [a_slot(n, j1=(NOTHING, most if n >= 16 else size)) for n in range(20)]

    assert simple_yardstick(split_recordings(slots(NOTHING), min_jobs=1), 0).drf_only_here
    assert not simple_yardstick(split_recordings(slots(most), min_jobs=1), 0).drf_only_here
