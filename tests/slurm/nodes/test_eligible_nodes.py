"""Which nodes a job may use, by its constraint and by reservations."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tick.world import World

from dl2d.core.resource_manager import EligibleNodes
from dl2d.testing import make_nodes
from dl2d_slurm.nodes.eligible_nodes import Eligibility
from dl2d_slurm.nodes.reservations import Reservation, parse_reservations, reservation_claims
from dl2d_slurm.submission.partitions import Partition
from dl2d_slurm.submission.sbatch_options import AnchorOptions


def is_eligible(features: set[str], expression: str) -> bool:
    """Whether a node with these features may be used by a job with this constraint."""
    found = Eligibility(["n1"], {}, {"n1": frozenset(features)}, (), 0.0).of(AnchorOptions(features=expression))
    return found is None or "n1" in found.nodes


@pytest.mark.parametrize(
    ("features", "expression", "met"),
    [
        ({"a100"}, "a100", True),
        ({"a100"}, "v100", False),
        ({"a100", "ib"}, "a100&ib", True),
        ({"a100"}, "a100&ib", False),
        ({"a100"}, "a100,ib", False),
        ({"ib"}, "a100|ib", True),
        ({"x"}, "[rack1|rack2]", False),
        ({"rack2"}, "[rack1|rack2]", True),
        ({"rack2"}, "[rack1*2&rack2*4]", False),
        ({"rack1", "rack2"}, "[rack1*2&rack2*4]", True),
        ({"ib", "b"}, "ib&(a|b)", True),
        ({"ib"}, "ib&(a|b)", False),
        ({"ib"}, "(ib", True),
        ({"ib"}, "x&", True),
        ({"ib"}, "ib)", True),
        ({"ib"}, "(x|ib]*2&ib", True),
        (set(), "", True),
        (set(), f"{'(' * 60}x{')' * 60}", False),
        pytest.param(set(), "&".join(["x"] * 64), False, id="long"),
        pytest.param(set(), "&".join(["x"] * 65), True, id="too long"),
        pytest.param(set(), "x" * 5_000, True, id="long feature"),
        pytest.param(set(), f"{'(' * 5_000}x{')' * 5_000}", True, id="deep"),
    ],
)
def test_constraints(features: set[str], expression: str, met: bool) -> None:
    assert is_eligible(features, expression) is met


@given(st.text("ab&|,()[]* 2", max_size=20))
def test_any_constraint_is_read(expression: str) -> None:
    is_eligible({"a"}, expression)


@pytest.mark.parametrize(
    ("exclude", "nodes", "reason"),
    [
        ("n[2-9]", {"n1"}, "not n[2-9], which the job excludes"),
        ("n2," * 100 + "n2", {"n1"}, f"not {('n2,' * 100)[:200]}..., which the job excludes"),
        ("n2," * 10_000 + "n2", set(), "the list of nodes that the job excludes is too long to be read"),
    ],
    ids=["read", "cut", "too long"],
)
def test_excluded_nodes(exclude: str, nodes: set[str], reason: str) -> None:
    found = Eligibility(["n1", "n2"], {}, {}, (), 0.0).of(AnchorOptions(exclude=exclude))
    assert found is not None
    assert (found.nodes, found.reason) == (nodes, reason)


CPUS = {"n1": 8.0, "n2": 8.0, "n3": 8.0}


@pytest.mark.parametrize(
    ("line", "nodes"),
    [
        (
            "ReservationName=r StartTime=100 EndTime=200 Nodes=n[1-2] CoreCnt=16 Flags=SPEC_NODES TRES=cpu=16",
            {"n1", "n2"},
        ),
        ("ReservationName=r StartTime=100 EndTime=200 Nodes=n[1-2] CoreCnt=2 Flags=SPEC_NODES TRES=cpu=2", None),
        ("ReservationName=r StartTime=100 EndTime=200 Nodes=(null) Licenses=x:1 Flags= TRES=(null)", None),
        ("ReservationName=r StartTime=100 EndTime=200 Nodes=n1 Flags=MAGNETIC TRES=cpu=8 Groups=ml", None),
        ("No reservations in the system", None),
        ("", None),
    ],
)
def test_reservations(line: str, nodes: set[str] | None) -> None:
    expected = () if nodes is None else (Reservation("r", frozenset(nodes), 100, 200),)
    assert parse_reservations(f"{line}\n", CPUS) == expected


@pytest.mark.parametrize(
    ("job", "nodes", "reason"),
    [
        (AnchorOptions(ends=90), None, ""),
        (AnchorOptions(ends=150), {"n2", "n3"}, "not those of reservation later"),
        (AnchorOptions(), {"n2", "n3"}, "not those of reservation later"),
        (AnchorOptions(ends=90, reservation="later"), set(), "reservation later"),
        (AnchorOptions(ends=90, reservation="now,later"), {"n2"}, "reservation now,later"),
        (AnchorOptions(ends=150, reservation="flexible"), {"n2", "n3"}, "not those of reservation later"),
    ],
)
def test_a_job_keeps_out_of_reservations_that_begin_before_its_end(
    job: AnchorOptions, nodes: set[str] | None, reason: str
) -> None:
    later = Reservation("later", frozenset({"n1"}), 100, 200)
    own = (Reservation(name, frozenset({"n2"}), 10, 60, name == "flexible") for name in ("now", "flexible"))
    reservations = (later, *(each for each in own if each.name in job.reservations))
    found = Eligibility(CPUS, {}, {}, reservations, 50.0).of(job)
    assert (None if found is None else (found.nodes, found.reason)) == (None if nodes is None else (nodes, reason))


@pytest.mark.parametrize(
    ("ends", "limit", "partition", "kept_out"),
    [
        (0, None, "any", True),
        (0, 40.0, "any", False),
        (0, 60.0, "any", True),
        (0, None, "short", False),
        (0, 60.0, "short", False),
        (0, None, "short,any", True),
        (1000, 40.0, "any", False),
        (90, None, "any", False),
    ],
)
def test_tasks_end_with_their_job_and_at_their_own_time_limit(
    ends: int, limit: float | None, partition: str, kept_out: bool
) -> None:
    partitions = {"any": Partition("any", frozenset(CPUS)), "short": Partition("short", frozenset(CPUS), 45.0)}
    eligibility = Eligibility(CPUS, partitions, {}, [Reservation("later", frozenset({"n1"}), 100, 200)], 50.0)
    found = eligibility.of(AnchorOptions(ends=ends, partition=partition), limit)
    assert (found is not None) is kept_out


@pytest.mark.parametrize(
    ("who", "own"),
    [
        ("Users=alice Accounts=(null)", True),
        ("Users=bob,alice Groups=(null) Accounts=(null)", True),
        ("Users=bob Accounts=(null)", False),
        ("Users=-alice Accounts=(null)", False),
        ("Users=-bob Accounts=(null)", True),
        ("Users=(null) Accounts=lab", True),
        ("Users=(null) Accounts=-lab", False),
        ("Users=alice Accounts=phys", False),
    ],
)
@pytest.mark.parametrize("at", [50.0, 100.0, 200.0])
def test_a_magnetic_reservation_takes_in_jobs_of_its_users_alone_and_lets_them_run_elsewhere(
    who: str, own: bool, at: float
) -> None:
    """As others before it begins, they keep out."""
    line = f"ReservationName=r StartTime=100 EndTime=200 Nodes=n1 Flags=MAGNETIC,SPEC_NODES TRES=cpu=8 {who}\n"
    reservations = parse_reservations(line, CPUS)
    job = AnchorOptions(account="lab")
    found = Eligibility(CPUS, {}, {}, reservations, at).of(job, user="alice")
    kept_out = at < 200 and not (own and at == 100)
    assert (found is not None and "n1" not in found.nodes) == kept_out
    members = [claim.members for claim in reservation_claims(reservations, {"7": ("alice", job)}, at)]
    assert members == {50.0: [None], 100.0: [{"7"} if own else set()], 200.0: []}[at]


def test_nodes_of_a_reservation_are_claimed_from_ten_minutes_before_it_begins_to_its_end() -> None:
    maintenance = Reservation("maintenance", frozenset({"n1", "n2"}), 1000, 2000)
    jobs = {"7": ("alice", AnchorOptions(reservation="maintenance")), "8": ("alice", AnchorOptions())}
    for at, members in ((399.0, []), (400.0, [None]), (999.0, [None]), (1000.0, [{"7"}]), (2000.0, [])):
        found = list(reservation_claims([maintenance], jobs, at))
        assert [claim.members for claim in found] == members
        assert all(claim.standing and claim.whole and claim.nodes == 2 for claim in found)
        assert all(claim.eligible == maintenance.nodes for claim in found)


def test_the_nodes_of_a_reservation_whose_start_stays_ahead_are_not_emptied() -> None:
    """Slurm starts short jobs there."""
    line = "ReservationName=r StartTime={} EndTime=9000 Nodes=n1 Flags=SPEC_NODES,TIME_FLOAT TRES=cpu=8\n"
    for now in (100, 200):
        reservations = parse_reservations(line.format(now + 60), CPUS)
        assert not list(reservation_claims(reservations, {}, now))
        eligibility = Eligibility(CPUS, {}, {}, reservations, now)
        found = eligibility.of(AnchorOptions(ends=now + 61))
        assert found is not None
        assert "n1" not in found.nodes
        assert eligibility.of(AnchorOptions(ends=now + 59)) is None


@pytest.mark.parametrize(("reservation", "nodes"), [("maintenance", {"n1", "n2", "n3"}), ("", {"n3"})])
def test_only_jobs_of_a_flexible_reservation_keep_their_tasks_on_its_nodes_before_it_begins(
    reservation: str, nodes: set[str]
) -> None:
    flexible = Reservation("maintenance", frozenset({"n1", "n2"}), 1_000_400, 1_004_000, flexible=True)
    with closing(World(url="", cluster_nodes=make_nodes(3))) as world:
        job = world.settled(max_workers=6, max_ps=6)
        assert world.nodes_of(job) == {"n1", "n2", "n3"}
        anchor = world.job(job).anchor
        if not reservation:
            world.manager.eligible = {anchor: EligibleNodes(frozenset({"n3"}), "reservation maintenance")}
        jobs = {anchor: ("alice", AnchorOptions(reservation=reservation))}
        world.manager.claims = list(reservation_claims([flexible], jobs, world.now))
        world.settle(10)
        assert world.nodes_of(job) == nodes
