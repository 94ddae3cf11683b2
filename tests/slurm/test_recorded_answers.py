"""What the manager's listing makes of the answers of real releases of Slurm, which ``recorded/record.py`` recorded."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dl2d.core.cluster import Node, NodeState
from dl2d.core.resource_manager import Claim, EligibleNodes, RmJob, RmJobState, RmListing, Yields
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_slurm.commands.commands import Answer, Commands
from dl2d_slurm.commands.squeue_and_sinfo_records import new_terminator
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.settings import SlurmSettings

RECORDED = Path(__file__).parent / "recorded"
TAG = "dl2:lab.1.1795253000:worker-{}"
NAME = "train|\"two\" 'nodes', ü 訓"
#: What the releases say differently: why job 13 waits for a drained node.
WAITS = {"22.05": "ReqNodeNotAvail, UnavailableNodes:n3", "26.05": "ReqNodeNotAvail, May be reserved for other job"}

PENDING, RUNNING, FAILED = RmJobState.PENDING, RmJobState.RUNNING, RmJobState.FAILED
ALICE, BOB = {"user": "alice"}, {"user": "bob"}
HELD = Resources.of(cpu=1, memory=100)


@pytest.fixture(params=["22.05", "26.05"])
def release(request: pytest.FixtureRequest) -> str:
    return request.param


def listing(release: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> RmListing:
    recorded = json.loads((RECORDED / f"commands-{release}.json").read_text())
    answers = {tuple(each["argv"]): Answer(each["status"], "".join(each["stdout"]), "") for each in recorded["answers"]}
    word = new_terminator()

    def answered(_: Commands, *argv: str, **options: object) -> Answer:
        answer = answers.get(tuple(part.replace(word, "WORD") for part in argv))
        assert answer is not None, f"no answer is recorded to {argv}: run recorded/record.py with each release"
        return replace(answer, stdout=answer.stdout.replace("WORD", word))

    monkeypatch.setattr(Commands, "run", answered)
    for module in ("manager", "nodes.excluded_nodes"):
        monkeypatch.setattr(f"dl2d_slurm.{module}.new_terminator", lambda: word)
    given = SlurmSettings.parse({"backend": "command", **settings})
    with closing(SlurmManager(given, clock=lambda: recorded["at"], environ={})) as manager:
        return manager.listing()


def job(handle: int, state: RmJobState, **more: Any) -> RmJob:
    return RmJob(handle=str(handle), state=state, **more)


def without_times(found: RmJob) -> RmJob:
    return structs.replace(found, submitted=0, ended=0.0, time_limit_at=0.0, priority=0, yields=Yields.NEVER)


def test_the_jobs_of_a_real_slurm(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = listing(release, monkeypatch)
    assert sorted(map(without_times, seen.jobs), key=lambda each: int(each.handle)) == [
        job(1, RUNNING, node="n1", held=HELD, **ALICE),
        job(2, RUNNING, node="n1", tag=TAG.format(1), held=gpus(1, cpu=1, memory=500), **ALICE),
        job(3, RUNNING, node="n1", **BOB),
        job(4, RUNNING, node="n2", held=HELD * 2, not_executing=True, reason="suspended by Slurm", **BOB),
        job(5, PENDING, reason="JobArrayTaskLimit", any_node=True, **ALICE),
        job(6, RUNNING, node="n2", array_id="5_1", held=HELD, **ALICE),
        job(7, RUNNING, node="n2", array_id="5_2", held=HELD, **ALICE),
        job(8, RmJobState.DONE, node="n2", **ALICE),
        job(9, FAILED, node="n2", reason="FAILED (NonZeroExitCode), exit status 3", **ALICE),
        job(10, RmJobState.CANCELLED, node="n2", reason="CANCELLED, signal 15", **BOB),
        job(11, PENDING, reason="Dependency", any_node=True, **ALICE),
        job(12, PENDING, reason="JobHeldUser", any_node=True, tag=TAG.format(2), **ALICE),
        job(13, PENDING, reason=WAITS[release], node_refused=True, tag=TAG.format(3), **ALICE),
        job(14, PENDING, reason="Resources", **BOB),
        job(15, PENDING, reason="Priority", tag=TAG.format(4), **ALICE),
        job(16, PENDING, reason="Priority", **BOB),
    ]
    for each in seen.jobs:
        assert seen.at - 300 < each.submitted <= seen.at
        assert bool(each.ended) is each.state.ended
        # All have a time limit of an hour.
        assert (seen.at < each.time_limit_at <= seen.at + 3600) is (each.state is RUNNING)
        assert (each.yields is Yields.ALWAYS) is not each.state.ended
    assert {each.handle for each in seen.jobs if not each.priority} == {"4", "8", "9", "10", "12"}
    assert (seen.incomplete, seen.remarks, seen.growth_limits) == ((), (), ())


def gpus(number: int, **more: float) -> Resources:
    return Resources.of({"gpu": number, "gpu:a100": number, **more})


def test_the_nodes_of_a_real_slurm(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = listing(release, monkeypatch)
    size = {"cpu": 8, "memory": 4000, "gpu": 2}
    assert seen.nodes == (
        Node("n1", Resources.of({**size, "gpu:a100": 2}), gpus(2, cpu=4, memory=800)),
        Node("n2", Resources.of(size), Resources.of({"cpu": 3, "memory": 500, "gpu": 1})),  # less two of job 4
        Node("n3", Resources.of(size), NO_RESOURCES, NodeState.DRAINING, 'drained: disk | "sda" fällt aus'),
        Node("n4", Resources.of(size), NO_RESOURCES, NodeState.DRAINING, "reserved"),
    )
    why = "not n2, which the job excludes; constraint fast; not those of reservation ml"
    assert seen.eligible_nodes["1"] == EligibleNodes(frozenset({"n1"}), why)
    assert seen.eligible_nodes["4"] == EligibleNodes(frozenset({"n1", "n2", "n3"}), "not those of reservation ml")


def test_the_claims_of_a_real_slurm(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = listing(release, monkeypatch)
    exclusive, features, reservation = seen.claims
    assert exclusive.priority > features.priority > reservation.priority
    assert exclusive.planned
    assert exclusive.expected_start > seen.at
    common = {"priority": 0, "expected_start": 0.0, "planned": ()}
    most = frozenset({"n1", "n2", "n3"})
    assert [structs.replace(claim, **common) for claim in seen.claims] == [
        Claim(
            handle="14", nodes=1, demand=Resources.of(cpu=1, memory=100, gpu=2), whole=True, eligible=most,
            priority=0, **BOB,
        ),
        Claim(
            handle="16", nodes=1, demand=Resources.of(cpu=8, memory=800), eligible=frozenset({"n2"}),
            priority=0, behind_others=True, **BOB,
        ),
        Claim(
            handle="reservation ml", user="", nodes=1, demand=NO_RESOURCES, whole=True, eligible=frozenset({"n4"}),
            required=frozenset({"n4"}), standing=True, members=frozenset(), priority=0,
        ),
    ]  # fmt: skip


def test_a_watched_job_of_a_real_slurm(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = listing(release, monkeypatch, watch=[{"partition": "dl2", "name": "train|*", "model": "bert"}])
    (static,) = (each.static for each in seen.jobs if each.static is not None)
    assert (static.name, static.model, static.owner.user, static.limit) == (NAME, "bert", "bob", 3600.0)
    assert (static.workers, static.nodes) == (3, ("n1", "n1", "n2"))
    assert static.task == Resources.of({"cpu": 1, "memory": 100, "gpu": 0.666})  # three of them fit into two GPUs
    waiting = {each.array_id for each in seen.jobs if each.handle == "5" or each.array_id.startswith("5_")}
    assert waiting == {"5_1", "5_2", "5_3", "5_4"}
