"""Answers of squeue and sinfo are read whatever people wrote into them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_fakes import job_row, node_row

from dl2d.core.cluster import NodeState, Task
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import RmJobState
from dl2d.core.resources import Resources
from dl2d_slurm.commands.squeue_and_sinfo_records import format_option, records
from dl2d_slurm.commands.values_in_command_output import count, parse_gres
from dl2d_slurm.jobs.squeue_jobs import (
    IDENTITY_FIELDS,
    JOB_FIELDS,
    OWNER_FIELDS,
    parse_jobs,
    watched_fields,
)
from dl2d_slurm.nodes.excluded_nodes import excluded_option, parse_excluded
from dl2d_slurm.nodes.sinfo_nodes import NODE_FIELDS, parse_nodes, with_ending_jobs
from dl2d_slurm.submission.partitions import Partition
from dl2d_slurm.submission.sbatch_options import AnchorOptions

WORD = "0f" * 16
TAG = "dl2:lab.7.1795253000:worker-1"


def rendered(rows: list[dict[str, object]], fields: tuple[str, ...]) -> str:
    """What Slurm prints for ``format_option(fields, WORD)``."""
    columns = [column.partition(":") for column in format_option(fields, WORD).removeprefix("--Format=").split(",")]
    return "".join("".join(f"{row[field]}{end}" for field, _, end in columns) + "\n" for row in rows)


def jobs_of(*rows: dict[str, object]) -> str:
    return rendered(list(rows), JOB_FIELDS)


def nodes_of(*rows: dict[str, object]) -> str:
    return rendered(list(rows), NODE_FIELDS)


def test_the_format_ends_each_field_and_each_record_with_the_word() -> None:
    assert format_option(("JobID", "Comment"), WORD) == f"--Format=JobID:|{WORD}-,Comment:|{WORD}"


def test_a_job_has_all_that_was_asked_for() -> None:
    job = parse_jobs(jobs_of(job_row(3, Comment=TAG)), WORD).jobs[0]
    assert (job.handle, job.state, job.tag) == ("3", RmJobState.RUNNING, TAG)
    assert (job.user, job.node, job.reason, job.submitted) == ("alice", "n1", "", 1795253932)


def test_a_running_job_says_when_it_reaches_its_time_limit() -> None:
    rows = [job_row(1, EndTime=1795260000), job_row(2), job_row(3, State="PENDING", NodeList="", EndTime=1795260000)]
    assert [job.time_limit_at for job in parse_jobs(jobs_of(*rows), WORD).jobs] == [1795260000.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("row", "state", "reason"),
    [
        ({"State": "PENDING", "Reason": "Resources", "NodeList": ""}, RmJobState.PENDING, "Resources"),
        ({"State": "COMPLETED"}, RmJobState.DONE, ""),
        (
            {"State": "FAILED", "Reason": "NonZeroExitCode", "exit_code": 768},
            RmJobState.FAILED,
            "FAILED (NonZeroExitCode), exit status 3",
        ),
        ({"State": "FAILED", "Reason": "None", "exit_code": 2**31 + 256}, RmJobState.FAILED, "FAILED"),
        (
            {"State": "FAILED", "Reason": "JobLaunchFailure", "exit_code": 9},
            RmJobState.FAILED,
            "FAILED (JobLaunchFailure), signal 9",
        ),
        ({"State": "FAILED", "exit_code": "3:0"}, RmJobState.FAILED, "FAILED, exit status 3"),
        ({"State": "FAILED", "exit_code": "0:11"}, RmJobState.FAILED, "FAILED, signal 11"),
        ({"State": "FAILED", "exit_code": "what"}, RmJobState.FAILED, "FAILED"),
        ({"State": "FAILED", "exit_code": 15}, RmJobState.CANCELLED, "FAILED, signal 15"),
        ({"State": "TIMEOUT", "Reason": "TimeLimit", "exit_code": 0}, RmJobState.TIME_LIMIT, "TIMEOUT (TimeLimit)"),
        ({"State": "NODE_FAIL", "exit_code": 1}, RmJobState.LOST, "NODE_FAIL, signal 1"),
        ({"State": "CANCELLED", "exit_code": 0}, RmJobState.CANCELLED, "CANCELLED"),
    ],
)
def test_how_a_job_ended_or_why_it_waits(row: dict[str, object], state: RmJobState, reason: str) -> None:
    job = parse_jobs(jobs_of(job_row(1, **row)), WORD).jobs[0]
    assert (job.state, job.reason) == (state, reason)


@given(comment=st.text(max_size=200), user=st.text("abcdefgh-_.0123", min_size=1), reason=st.text("ABCdef,: n3"))
def test_no_comment_breaks_the_listing(comment: str, user: str, reason: str) -> None:
    text = jobs_of(
        job_row(1, Comment=comment, UserName=user, Reason=reason), job_row(2, Comment=TAG), job_row(3, Comment=comment)
    )
    parsed = parse_jobs(text, WORD)
    assert [job.handle for job in parsed.jobs] == ["1", "2", "3"]
    assert parsed.jobs[1].tag == TAG
    assert parsed.unreadable == ()


@pytest.mark.parametrize("fields", [JOB_FIELDS, watched_fields()], ids=["own", "watched"])
def test_an_anchors_options_are_read_whatever_separators_they_hold(fields: tuple[str, ...]) -> None:
    free = {"Feature": "[a|b]&c", "WCKey": "x|y\n", "Name": "n|m|", "Comment": f"|{WORD[:-1]}-|"}
    plain = {"Reservation": "ml", "Nice": 7, "EndTime": 1795260000, "Partition": "gpu,small"}
    more = dict.fromkeys(fields, "1") | job_row(3, **free, **plain)
    parsed = parse_jobs(rendered([more, more | {"JobID": 4, "Comment": TAG}], fields), WORD, fields=fields)
    assert parsed.unreadable == ()
    assert parsed.options == dict.fromkeys("34", AnchorOptions(1795260000, "gpu,small", "ml", "[a|b]&c", 7, "x|y"))


@pytest.mark.parametrize("fields", [JOB_FIELDS, watched_fields(), OWNER_FIELDS, NODE_FIELDS, IDENTITY_FIELDS])
@given(text=st.text("ab|-\n,:1", max_size=40))
def test_whatever_a_field_holds_the_others_keep_their_places(fields: tuple[str, ...], text: str) -> None:
    for name in fields:
        row: dict[str, object] = {other: str(place) for place, other in enumerate(fields)} | {name: text}
        assert list(records(rendered([row, row], fields), fields, WORD)) == [row | {name: text.strip()}] * 2


def test_the_type_of_a_generic_resource_cannot_make_a_held_job_one_of_highest_priority() -> None:
    gres = (
        "gres:gpu:x|9|N/A|0|Resources|4611686018427387904|N/A|UNLIMITED||(null)|3|1|N/A|N/A|NO|NODE|gpu|0|(null)|a|q:1"
    )
    held = {"State": "PENDING", "NodeList": "", "Reason": "JobHeldUser", "PriorityLong": 0}
    parsed = parse_jobs(jobs_of(job_row(9, **held, **{"tres-per-node": gres})), WORD)
    assert [(job.reason, job.priority) for job in parsed.jobs] == [("JobHeldUser", 0)]
    assert parsed.waiting == ()


def test_excluded_nodes_are_those_of_each_job() -> None:
    assert excluded_option(WORD) == f"--format=%i|{WORD}-%x|{WORD}"
    text = f"7|{WORD}-n[3-4]|{WORD}\n12_[3-9]|{WORD}-n1\n99|n2|{WORD}\n8|{WORD}-|{WORD}\n"
    assert parse_excluded(text, WORD) == {"7": "n[3-4]", "12": "n1\n99|n2", "8": ""}


def test_a_comment_cannot_pass_for_a_record() -> None:
    forged = "x|\n" + jobs_of(job_row(99, UserName="root", Comment=TAG)).replace(WORD, "0" * 32) + "9|RUNNING"
    parsed = parse_jobs(jobs_of(job_row(1, Comment=forged)), WORD)
    assert [job.handle for job in parsed.jobs] == ["1"]
    assert parsed.jobs[0].tag == ""


def test_a_mark_counts_only_on_jobs_of_the_anchors_owner() -> None:
    rows = [
        job_row(7, UserName="alice"),
        job_row(8, UserName="alice", Comment=TAG),
        job_row(9, UserName="mallory", Comment=TAG),
        job_row(10, UserName="mallory", Comment="dl2:lab.6.1:worker-1"),
    ]
    task = Task(
        job=JobKey("lab", "7", 1795253000), id="worker-1", role=Role.WORKER, node="n1", demand=Resources.of(cpu=1)
    )
    parsed = parse_jobs(jobs_of(*rows), WORD, tasks={task.tag: task})  # it has no handle yet
    tags = {job.handle: job.tag for job in parsed.jobs}
    assert tags == {"7": "", "8": TAG, "9": "", "10": "dl2:lab.6.1:worker-1"}
    assert [(anchor, partition) for anchor, partition, _ in parsed.tasks] == [("7", "gpu")]


@given(st.text(max_size=300))
def test_no_answer_at_all_raises(text: str) -> None:
    assert parse_jobs(text, WORD).jobs == ()
    assert parse_nodes(text, WORD).nodes == ()
    parse_jobs(text + f"|{WORD}\n", WORD)
    parse_nodes(f"{text}|{WORD}\n{text}", WORD)


@given(st.lists(st.text("0123456789/|KMG:,()gpu=\n ", max_size=30), min_size=10, max_size=10))
def test_strange_fields_are_reported_not_fatal(values: list[str]) -> None:
    parse_jobs(rendered([dict(zip(JOB_FIELDS, itertools.cycle(values)))], JOB_FIELDS), WORD)
    parse_nodes(rendered([dict(zip(NODE_FIELDS, itertools.cycle(values)))], NODE_FIELDS), WORD)


def test_an_unknown_job_state_is_reported_and_keeps_its_room() -> None:
    parsed = parse_jobs(jobs_of(job_row(1, State="DANCING")), WORD)
    assert parsed.jobs[0].state is RmJobState.RUNNING
    assert "DANCING" in parsed.unknown[0]


def test_partitions_have_their_nodes_and_longest_time() -> None:
    rows = [
        node_row("n1", PartitionName="small", Time="2:00:00"),
        node_row("n1", PartitionName="all", Time="infinite"),
        node_row("n2", PartitionName="all", Time="infinite"),
    ]
    found = parse_nodes(nodes_of(*rows), WORD)
    assert [node.name for node in found.nodes] == ["n1", "n2"]
    assert found.partitions == {
        "small": Partition("small", frozenset({"n1"}), 7200.0),
        "all": Partition("all", frozenset({"n1", "n2"})),
    }


def test_a_node_has_capacity_use_state_and_remark() -> None:
    row = node_row(
        "n4", StateLong="draining", CPUsState="3/0/5/8", AllocMem="300", GresUsed="gpu:1(IDX:0)", Reason="disk|bad\nx"
    )
    node = parse_nodes(nodes_of(row), WORD).nodes[0]
    assert node.capacity == Resources.of(cpu=8, memory=4000, gpu=2)
    assert node.used == Resources.of(cpu=3, memory=300, gpu=1)
    assert (node.name, node.state, node.remark) == ("n4", NodeState.DRAINING, "draining: disk|bad\nx")


def test_a_node_in_two_partitions_counts_once() -> None:
    parsed = parse_nodes(nodes_of(node_row("n1"), node_row("n2"), node_row("n1")), WORD)
    assert [node.name for node in parsed.nodes] == ["n1", "n2"]


@pytest.mark.parametrize("cut", [1, 40, 90])
def test_a_record_that_cannot_be_read_is_told_apart_from_no_record(cut: int) -> None:
    whole = jobs_of(job_row(1), job_row(2))
    parsed = parse_jobs(whole[: len(whole) // 2 + cut], WORD)
    assert [job.handle for job in parsed.jobs] == ["1"]
    assert len(parsed.unreadable) == 1
    for missing in ({"SubmitTime": "N/A"}, {"State": ""}, {"JobID": "x"}):
        parsed = parse_jobs(jobs_of(job_row(1), job_row(2, **missing)), WORD)
        assert ([job.handle for job in parsed.jobs], len(parsed.unreadable)) == (["1"], 1)
    nodes = parse_nodes(nodes_of(node_row("n1"), node_row("n2", CPUsState="?")), WORD)
    assert ([node.name for node in nodes.nodes], len(nodes.unreadable)) == (["n1"], 1)


@given(st.text(max_size=200))
def test_no_reason_breaks_the_listing(reason: str) -> None:
    parsed = parse_nodes(nodes_of(node_row("n1", Reason=reason), node_row("n2", Reason=reason)), WORD)
    assert [node.name for node in parsed.nodes] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("text", "amounts"),
    [
        ("(null)", {}),
        ("", {}),
        ("gpu:2", {"gpu": 2}),
        ("gpu", {"gpu": 1}),
        ("gpu:(null):0(IDX:N/A)", {"gpu": 0}),
        ("gpu:A100:4(S:0-1)", {"gpu": 4, "gpu:A100": 4}),
        ("gpu:a100:2(IDX:0,2),gpu:t4:1(IDX:1),nvme:3", {"gpu": 3, "gpu:a100": 2, "gpu:t4": 1, "nvme": 3}),
        ("gres:gpu:1", {"gpu": 1}),
        ("gres/gpu:t4:2", {"gpu": 2, "gpu:t4": 2}),
        ("bandwidth:lustre:4K", {"bandwidth": 4096, "bandwidth:lustre": 4096}),
    ],
)
def test_generic_resources(text: str, amounts: dict[str, int]) -> None:
    assert parse_gres(text) == amounts


def test_slurms_spelling_of_types_is_kept_for_submissions() -> None:
    parsed = parse_nodes(nodes_of(node_row("n1", Gres="gpu:A100:4")), WORD)
    assert parsed.nodes[0].capacity.get("gpu:a100") == 4
    assert parsed.spelling["gpu:a100"] == "gpu:A100"


@pytest.mark.parametrize(
    ("row", "room"),
    [
        ({"tres-alloc": "cpu=3,mem=300M,node=1", "tres-per-node": "gres:gpu:1"}, {"cpu": 3, "memory": 300, "gpu": 1}),
        (
            {"tres-alloc": "cpu=3,mem=2.50G,node=1,gres/gpu=2", "tres-per-node": "N/A"},
            {"cpu": 3, "memory": 2560, "gpu": 2},
        ),
        ({"tres-alloc": "cpu=99,mem=1T", "tres-per-node": "gres/gpu:9"}, {"cpu": 8, "memory": 4000, "gpu": 2}),
        ({"tres-alloc": "(null)", "tres-per-node": "(null)"}, {}),
    ],
)
def test_an_ending_job_still_holds_its_room(row: dict[str, object], room: dict[str, float]) -> None:
    parsed = parse_jobs(jobs_of(job_row(1, State="COMPLETING", **row), job_row(2)), WORD)
    nodes = with_ending_jobs(parse_nodes(nodes_of(node_row("n1"), node_row("n2")), WORD).nodes, parsed)
    assert nodes[0].used == Resources.of(room)
    assert nodes[1].used == Resources()


@pytest.mark.parametrize(
    ("listed", "used"),
    [("n[1-2]", [{"cpu": 4, "memory": 1000}] * 2), ("n2", [{}, {"cpu": 4, "memory": 1000}])],  # it has left n1 already
)
def test_a_job_that_is_ending_on_several_nodes_holds_a_share_of_each(listed: str, used: list[dict[str, float]]) -> None:
    row = job_row(1, State="COMPLETING", NodeList=listed, **{"tres-alloc": "cpu=8,mem=2000M,node=2,billing=8"})
    nodes = parse_nodes(nodes_of(node_row("n1"), node_row("n2")), WORD).nodes
    ended = with_ending_jobs(nodes, parse_jobs(jobs_of(row), WORD))
    assert [node.used for node in ended] == [Resources.of(room) for room in used]


@pytest.mark.parametrize(
    ("comment", "state", "used"),
    [
        (TAG, "RUNNING", {"cpu": 3, "memory": 300}),  # it had begun to end when sinfo was asked
        ("", "RUNNING", {}),
        (TAG, "SUSPENDED", {}),  # others may have its CPUs
        (TAG, "PENDING", {}),
    ],
)
def test_what_a_marked_job_held_is_the_least_that_is_used(comment: str, state: str, used: dict[str, float]) -> None:
    row = job_row(1, State=state, Comment=comment, **{"tres-alloc": "cpu=3,mem=300M,node=1"})
    nodes = with_ending_jobs(parse_nodes(nodes_of(node_row("n1")), WORD).nodes, parse_jobs(jobs_of(row), WORD))
    assert nodes[0].used == Resources.of(used)


def test_jobs_that_hold_their_room_and_do_not_run_are_suspended() -> None:
    states = ("SUSPENDED", "STOPPED", "CONFIGURING", "POWER_UP_NODE", "RUNNING", "COMPLETING", "PENDING")
    rows = [job_row(number, State=state) for number, state in enumerate(states, start=1)]
    jobs = parse_jobs(jobs_of(*rows), WORD).jobs
    assert [job.not_executing for job in jobs] == [True] * 4 + [False] * 3
    assert [job.reason for job in jobs[:4]] == ["suspended by Slurm"] * 2 + ["its node is being prepared"] * 2


def test_what_runs_is_not_counted_twice() -> None:
    row = job_row(1, State="RUNNING", Comment=TAG, **{"tres-alloc": "cpu=3,mem=300M,node=1"})
    nodes = parse_nodes(nodes_of(node_row("n1", CPUsState="3/5/0/8", AllocMem="1000")), WORD).nodes
    assert with_ending_jobs(nodes, parse_jobs(jobs_of(row), WORD))[0].used == Resources.of(cpu=3, memory=1000)


def test_the_last_field_may_hold_the_separator() -> None:
    name = "a|b\nUserId=root(0)"
    row = dict.fromkeys(OWNER_FIELDS, "1") | {"Name": name}
    found = list(records(rendered([row], OWNER_FIELDS), OWNER_FIELDS, WORD))
    assert found == [row]


def test_numbers() -> None:
    assert [count(text) for text in ("8", "1.5K", "2T", "", "x", "-1", "٣", "9" * 30)] == [
        *(8, 1536, 2 * 1024**4),
        *[None] * 5,
    ]


@pytest.mark.parametrize(
    ("row", "room"),
    [
        ({}, {"cpu": 1, "memory": 100, "gpu": 1}),
        ({"tres-alloc": "cpu=2,mem=100M"}, {"cpu": 2, "memory": 100, "gpu": 1}),
        ({"tres-per-node": "N/A"}, {"cpu": 1, "memory": 100}),
        ({"NumNodes": 2}, {"cpu": 1, "memory": 100, "gpu": 2}),
        ({"tres-per-task": "gres:gpu:1"}, {"cpu": 1, "memory": 100, "gpu": 3}),
        ({"tres-per-task": "gres:gpu:1", "NumTasks": 2}, {"cpu": 1, "memory": 100, "gpu": 2}),
        ({"tres-per-job": "gres:gpu:4"}, {"cpu": 1, "memory": 100, "gpu": 4}),
    ],
)
def test_rooms_of_jobs_that_differ_in_one_field_are_told_apart(row: dict[str, object], room: dict[str, float]) -> None:
    base = {"State": "COMPLETING", "tres-alloc": "cpu=1,mem=100M", "tres-per-node": "gres:gpu:1", "NumTasks": 3}
    rows = [job_row(1, **base), job_row(2, **{**base, **row, "NodeList": "n2"})]
    for _ in range(2):
        nodes = parse_nodes(nodes_of(node_row("n1"), node_row("n2", Gres="gpu:8")), WORD).nodes
        used = [node.used for node in with_ending_jobs(nodes, parse_jobs(jobs_of(*rows), WORD))]
        assert used == [Resources.of(cpu=1, memory=100, gpu=1), Resources.of(room)]


@pytest.mark.parametrize(
    ("row", "capacity", "used"),
    [
        ({}, {"cpu": 8, "memory": 4000, "gpu": 2}, {}),
        ({"CPUsState": "1/3/0/4"}, {"cpu": 4, "memory": 4000, "gpu": 2}, {"cpu": 1}),
        ({"Memory": "5000"}, {"cpu": 8, "memory": 5000, "gpu": 2}, {}),
        ({"AllocMem": "10"}, {"cpu": 8, "memory": 4000, "gpu": 2}, {"memory": 10}),
        ({"Gres": "gpu:4"}, {"cpu": 8, "memory": 4000, "gpu": 4}, {}),
        ({"GresUsed": "gpu:1(IDX:1)"}, {"cpu": 8, "memory": 4000, "gpu": 2}, {"gpu": 1}),
    ],
)
def test_nodes_that_differ_in_one_field_are_told_apart(
    row: dict[str, object], capacity: dict[str, float], used: dict[str, float]
) -> None:
    for _ in range(2):
        first, other = parse_nodes(nodes_of(node_row("n1"), node_row("n2", **row)), WORD).nodes
        assert (first.capacity, first.used) == (Resources.of(cpu=8, memory=4000, gpu=2), Resources())
        assert (other.capacity, other.used) == (Resources.of(capacity), Resources.of(used))


@pytest.mark.parametrize(
    ("gres", "used", "amounts"),
    [
        ("gpu:2,shard:8", "gpu:1,shard:(null):0(IDX:N/A)", {"gpu": 1, "shard": 4}),
        # Two GPUs in Slurm 22.05, five shares later.
        ("gpu:3,shard:12", "gpu:1,shard:(null):2(IDX:0-1),mps:0", {"gpu": 3, "shard": 6}),
        ("gpu:3,shard:12", "gpu:1,shard:(null):5(1/4,4/4,0/4)", {"gpu": 3, "shard": 9}),
        ("gpu:2,mps:200", "gpu:0,mps:(null):1(IDX:1)", {"gpu": 1, "mps": 1}),
        (
            "gpu:a100:2,gpu:t4:1,shard:a100:8,shard:t4:2",
            "gpu:a100:0(IDX:N/A),gpu:t4:1(IDX:2),shard:a100:1(IDX:1),shard:t4:0(IDX:N/A)",
            {"gpu": 2, "gpu:a100": 1, "gpu:t4": 1, "shard": 4.333, "shard:a100": 1, "shard:t4": 2},
        ),
        ("gpu:a100:1,gpu:t4:1,shard:8", "gpu:a100:0(IDX:N/A),gpu:t4:0(IDX:N/A),shard:(null):1(IDX:1)",
         {"gpu": 1, "gpu:a100": 1, "gpu:t4": 1, "shard": 1}),
    ],
)  # fmt: skip
def test_gpus_of_which_shares_are_in_use_are_not_free_nor_shares_of_gpus_in_use(
    gres: str, used: str, amounts: dict[str, float]
) -> None:
    (node,) = parse_nodes(nodes_of(node_row("n1", Gres=gres, GresUsed=used)), WORD).nodes
    assert node.used.as_dict() == amounts


def test_shares_that_a_job_holds_are_part_of_a_gpu_and_a_gpu_is_all_of_its_shares() -> None:
    capacities = {"n1": Resources.of(cpu=8, gpu=2, shard=6)}
    asked = {8: "gres:gpu:1", 9: "gres/shard:1", 10: "gres/shard:3"}
    rows = [job_row(7), *(job_row(number, Comment=TAG, **{"tres-per-node": gres}) for number, gres in asked.items())]
    jobs = parse_jobs(jobs_of(*rows), WORD, capacities=capacities).jobs
    held = {job.handle: (job.held.get("gpu"), job.held.get("shard")) for job in jobs if job.tag}
    assert held == {"8": (1, 3), "9": (0.333, 1), "10": (1, 3)}
