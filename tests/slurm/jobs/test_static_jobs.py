"""Jobs of users who know nothing of dl2d: rules, and what is made of squeue's answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_fakes import FakeSlurm, Managers, job_row, node_row

from dl2d.core.errors import ConfigError
from dl2d.core.jobs import Owner
from dl2d.core.resource_manager import RmJobState, StaticJob
from dl2d.core.resources import Resources
from dl2d.core.training_job_detection_rules import spread
from dl2d_slurm.settings import SlurmSettings

RULES = [{"partition": "gpu", "name": "bert-*", "model": "bert"}, {"partition": "gpu", "model": "other", "size": "gpu"}]


def row(number: int, **more: object) -> dict[str, object]:
    """As Slurm 22.05 shows it, of a job of three tasks on two nodes."""
    seen = {
        "NodeList": "n[1-2]", "NumNodes": 2, "NumTasks": 3, "tres-alloc": "cpu=6,mem=600M,node=2,billing=6",
        "tres-per-node": "gres:gpu:1", "tres-per-task": "N/A", "tres-per-job": "N/A", "StartTime": 1795253990,
        "TimeLimit": "2:00:00", "Partition": "gpu", "UserID": 1001, "GroupID": 1002, "Account": "(null)",
        "QOS": "normal", "Name": "bert-large",
    }  # fmt: skip
    return job_row(number, **{**seen, **more})


def seen(
    slurm: FakeSlurm, manager_on: Managers, *rows: dict[str, object], rules: object = RULES
) -> list[StaticJob | None]:
    slurm.answer("squeue", rows=list(rows))
    return [job.static for job in manager_on(watch=rules).listing().jobs]


def test_what_is_told_of_a_job_that_runs(slurm: FakeSlurm, manager_on: Managers) -> None:
    assert seen(slurm, manager_on, row(7)) == [
        StaticJob(
            name="bert-large",
            model="bert",
            owner=Owner("alice", 1001, 1002, "", "gpu", "normal"),
            workers=3,
            ps=0,
            task=Resources.of({"cpu": 2, "memory": 200, "gpu": 0.666}),
            nodes=("n1", "n1", "n2"),
            limit=7200.0,
            started=1795253990.0,
        )
    ]


def test_a_job_that_ended_says_when_and_where_it_ran(slurm: FakeSlurm, manager_on: Managers) -> None:
    waited = row(8, State="CANCELLED", NodeList="", StartTime=1795254100, EndTime=1795254100)
    slurm.answer("squeue", rows=[row(7, State="COMPLETED", EndTime=1795254000), waited])
    done, cancelled = manager_on(watch=RULES).listing().jobs
    assert (done.ended, cancelled.ended) == (1795254000.0, 1795254100.0)
    assert done.static is not None
    assert cancelled.static is not None
    assert (done.static.started, done.static.nodes) == (1795253990.0, ("n1", "n1", "n2"))
    assert (cancelled.static.started, cancelled.static.nodes) == (0.0, ())


def test_each_task_of_an_array_is_a_job(slurm: FakeSlurm, manager_on: Managers) -> None:
    tag = "dl2:fake.12_3.1795253932:worker-0"
    forged = job_row(20, UserName="eve", Comment=tag)
    slurm.answer("squeue", rows=[row(13, JobArrayID="12_3"), row(12, JobArrayID="12_4"), row(14, JobArrayID="14+1"),
                                 forged, job_row(21, Comment=tag),
                                 row(15, JobArrayID="12_5", Comment=tag),
                                 row(12, JobArrayID="12_[6-7]", Comment=tag)])  # fmt: skip
    jobs = manager_on(watch=RULES).listing().jobs
    assert [job.array_id for job in jobs] == ["12_3", "12_4", "", "", "", "12_5", ""]
    assert [job.tag for job in jobs] == ["", "", "", "", tag, "", ""], "dl2d submits no job arrays"
    assert "--array" in slurm.calls("squeue")[0].argv


def test_a_job_that_waits_has_what_it_asks_for_and_no_nodes(slurm: FakeSlurm, manager_on: Managers) -> None:
    waiting = row(
        8, State="PENDING", NodeList="", StartTime=1826827974, TimeLimit="UNLIMITED", Partition="long,gpu",
        NumTasks=10, **{"tres-alloc": "cpu=40,mem=4000M,node=1,billing=40", "tres-per-node": "N/A"},
    )  # fmt: skip
    (static,) = seen(slurm, manager_on, waiting)
    assert static is not None
    assert (static.workers, static.nodes, static.started, static.limit) == (10, (), 0.0, 24 * 3600.0)
    assert static.task == Resources.of(cpu=4, memory=400)


@pytest.mark.parametrize(
    ("change", "model"),
    [
        ({}, "bert"),
        ({"Name": "gpt", "tres-per-node": "gres:gpu:4"}, "other"),
        ({"Name": "gpt"}, "other"),
        ({"Name": "gpt", "NumNodes": 1}, None),  # one GPU: too small to count
        ({"Name": "gpt", "tres-per-node": "N/A"}, None),
        ({"NumTasks": 1, "NodeList": "n1", "NumNodes": 1}, None),
        ({"Partition": "cpu"}, None),
        ({"Partition": "cpu,gpu2"}, None),
        ({"Name": "Bert-large", "tres-per-node": "N/A"}, None),
    ],
)
def test_the_first_rule_that_takes_a_job_counts(
    slurm: FakeSlurm, manager_on: Managers, change: dict[str, object], model: str | None
) -> None:
    (static,) = seen(slurm, manager_on, row(7, **change))
    assert (static and static.model) == model


def test_gpus_may_be_the_size_and_some_tasks_parameter_servers(slurm: FakeSlurm, manager_on: Managers) -> None:
    by_gpu = [{"partition": "gpu", "model": "bert", "size": "gpu"}]
    (static,) = seen(slurm, manager_on, row(7, **{"tres-per-node": "gres:gpu:a100:4"}), rules=by_gpu)
    assert static is not None
    assert (static.workers, static.nodes) == (8, ("n1",) * 4 + ("n2",) * 4)
    assert static.task.get("gpu") == static.task.get("gpu:a100") == 1
    served = [{"partition": "gpu", "model": "bert", "ps": 1, "comment": "*ps*"}]
    found = seen(slurm, manager_on, row(7, Comment="has a ps"), row(8), rules=served)
    assert [static and (static.workers, static.ps) for static in found] == [(2, 1), None]


@pytest.mark.parametrize(
    ("change", "gpus"),
    [
        ({"tres-per-node": "gres/gpu:2"}, 4),
        ({"tres-per-node": "N/A", "tres-per-task": "gres:gpu:1"}, 3),
        ({"tres-per-node": "N/A", "tres-per-job": "gres:gpu:5"}, 5),
        ({"tres-alloc": "cpu=6,mem=600M,node=2,gres/gpu=7", "tres-per-node": "gres:gpu:1"}, 7),
    ],
)
def test_gpus_however_they_were_asked_for(
    slurm: FakeSlurm, manager_on: Managers, change: dict[str, object], gpus: int
) -> None:
    (static,) = seen(slurm, manager_on, row(7, **change))
    assert static is not None
    assert static.task.get("gpu") * 3 == pytest.approx(gpus, abs=0.01)


def test_names_and_comments_may_hold_anything(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("squeue", rows=[row(7, Name="bert-|x\ny|", Comment="a|b\n|c"), row(8)])
    jobs = manager_on(watch=RULES).listing().jobs
    assert [job.handle for job in jobs] == ["7", "8"]
    assert [job.static and job.static.name for job in jobs] == ["bert-|x?y|", "bert-large"]
    assert [job.reason for job in jobs] == ["", ""]


def test_one_squeue_stays_one(slurm: FakeSlurm, manager_on: Managers) -> None:
    slurm.answer("squeue", rows=[row(7)])
    slurm.answer("sinfo", rows=[node_row("n1"), node_row("n2")])
    manager = manager_on(watch=RULES)
    slurm.forget()
    (job,) = manager.listing().jobs
    assert [call.name for call in slurm.calls()] == ["squeue", "sinfo", *["scontrol"] * 5]
    assert (job.node, job.state) == ("n1", RmJobState.RUNNING)
    slurm.forget()
    assert [job.static for job in manager_on().listing().jobs] == [None]
    assert "UserID" not in " ".join(slurm.calls("squeue")[0].argv)


@given(st.integers(1, 40), st.integers(1, 200))
def test_tasks_are_spread_evenly_and_in_order(nodes: int, count: int) -> None:
    names = [f"n{number:03}" for number in range(nodes)]
    placed = spread(names, count)
    assert len(placed) == count
    assert list(placed) == sorted(placed)
    counts = [placed.count(name) for name in names]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gpu", r"watch\[0\]: expected an object"),
        ({"model": "bert"}, r"watch\[0\].partition: missing"),
        ({"partition": "gpu"}, r"watch\[0\].model: missing"),
        ({"partition": "gpu", "model": "bert", "nane": "x"}, r"watch\[0\].nane: unknown key \(did you mean name\?\)"),
        ({"partition": 3, "model": "bert"}, r"watch\[0\].partition: expected some text"),
        ({"partition": "gpu", "model": "a|b"}, r"watch\[0\].model: expected a type of model"),
        ({"partition": "gpu", "model": "bert", "size": "GPU!"}, r"watch\[0\].size: expected tasks or a resource"),
        ({"partition": "gpu", "model": "bert", "ps": 1.5}, r"watch\[0\].ps: expected a whole number from 0"),
        (
            {"partition": "gpu", "model": "bert", "least": 0},
            r"watch\[0\].least: expected a whole number",
        ),
        ({"partition": "gpu", "model": "bert", "hours": True}, r"watch\[0\].hours: expected a number"),
    ],
)
def test_a_bad_rule_is_refused_by_its_key(rule: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SlurmSettings.parse({"watch": [rule]})


def test_rules_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"resource_manager.slurm.watch: expected a list of 0 to 10000 entries"):
        SlurmSettings.parse({"watch": {"partition": "gpu", "model": "bert"}})
