"""The state tables are total: every state of the manuals of Slurm 22.05 to 26.05 has a meaning."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from dl2d.core.cluster import NodeState
from dl2d.core.resource_manager import RmJobState
from dl2d_slurm.jobs.slurm_states import JOB_STATES, NODE_MARKS, NODE_STATES, job_state, node_state

MANUALS = Path("/usr/share/man/man1")
#: JOB STATE CODES of squeue(1) in 22.05, and what later releases added (LAUNCH_FAILED ... EXPEDITING).
JOB_WORDS = """
    BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PENDING PREEMPTED
    RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED
    SUSPENDED
    TIMEOUT LAUNCH_FAILED POWER_UP_NODE RECONFIG_FAIL UPDATE_DB EXPEDITING
""".split()  # noqa: SIM905
NODE_WORDS = """
    allocated allocated+ completing down drained draining fail failing future idle inval maint reboot_issued
    reboot_requested mixed perfctrs planned power_down powered_down powering_down powering_up reserved unknown blocked
""".split()  # noqa: SIM905


def section(command: str, heading: str) -> str:
    path = MANUALS / f"{command}.1.gz"
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    text = gzip.decompress(path.read_bytes()).decode()
    return re.split(r"^\.SH ", text.split(f'.SH "{heading}"')[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_job_state_of_this_machines_manual_has_a_meaning() -> None:
    listed = re.findall(r"^\\fB[A-Z]+ +([A-Z_]+)\\fR", section("squeue", "JOB STATE CODES"), re.MULTILINE)
    assert len(listed) >= 24
    assert set(listed) - JOB_STATES.keys() == set()
    assert set(listed) - set(JOB_WORDS) == set()


def test_every_node_state_of_this_machines_manual_has_a_meaning() -> None:
    text = section("sinfo", "NODE STATE CODES").replace("\\", "")
    words = re.findall(r"^fB([A-Z_]+)\+?(?: \([A-Z]+\))?fR$", text, re.MULTILINE)
    marks = re.findall(r"^fB([^A-Za-z])fR$", text, re.MULTILINE)
    assert len(words) >= 20
    assert {word for word in words if not node_state(word.lower()).known} == set()
    assert len(marks) >= 8
    assert set(marks) - NODE_MARKS.keys() == set()


@pytest.mark.parametrize("word", JOB_WORDS)
def test_every_job_state_of_all_releases_is_known(word: str) -> None:
    assert job_state(word, placed=True) == (JOB_STATES[word], True)
    assert job_state(word.lower(), placed=False)[1]


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PREEMPTED", RmJobState.PREEMPTED),
        ("CANCELLED by 1001", RmJobState.CANCELLED),
        ("CANCELLED+", RmJobState.CANCELLED),
        ("TIMEOUT", RmJobState.TIME_LIMIT),
        ("OUT_OF_MEMORY", RmJobState.OUT_OF_MEMORY),
        ("NODE_FAIL", RmJobState.LOST),
        ("COMPLETING", RmJobState.ENDING),
        ("SUSPENDED", RmJobState.RUNNING),
        ("REQUEUE_HOLD", RmJobState.PENDING),
        ("COMPLETED", RmJobState.DONE),
    ],
)
def test_what_job_states_mean_for_scaling(word: str, state: RmJobState) -> None:
    assert job_state(word, placed=True)[0] is state


def test_a_job_in_an_unknown_state_keeps_its_room_or_its_place_in_the_queue() -> None:
    assert job_state("DANCING", placed=True) == (RmJobState.RUNNING, False)
    assert job_state("", placed=False) == (RmJobState.PENDING, False)


@pytest.mark.parametrize("word", NODE_WORDS)
@pytest.mark.parametrize("mark", ["", *NODE_MARKS])
def test_every_node_state_with_every_mark_is_known_and_no_better_for_the_mark(word: str, mark: str) -> None:
    plain, marked = node_state(word), node_state(word + mark)
    assert plain.known
    assert marked.known
    worse = [NodeState.UP, NodeState.DRAINING, NodeState.DOWN]
    assert worse.index(marked.state) >= worse.index(plain.state)
    assert (marked.state is NodeState.UP) == (marked.remark == "")


@pytest.mark.parametrize(
    ("word", "state", "remark"),
    [
        ("idle", NodeState.UP, ""),
        ("mixed-", NodeState.UP, ""),
        ("allocated+", NodeState.UP, ""),
        ("drained", NodeState.DRAINING, "drained"),
        ("drained*", NodeState.DRAINING, "drained, does not answer"),
        ("idle*", NodeState.DRAINING, "idle, does not answer"),
        ("down*", NodeState.DOWN, "down, does not answer"),
        ("idle~", NodeState.DOWN, "idle, powered down"),
        ("mixed#", NodeState.DRAINING, "mixed, being powered up"),
        ("idle+drain", NodeState.DRAINING, "idle+drain"),
        ("IDLE+DRAIN*", NodeState.DRAINING, "idle+drain, does not answer"),
        ("allocated$", NodeState.DRAINING, "allocated, in a maintenance reservation"),
        ("unk*", NodeState.DRAINING, "unk, does not answer"),
    ],
)
def test_what_node_states_mean(word: str, state: NodeState, remark: str) -> None:
    found = node_state(word)
    assert (found.state, found.remark, found.known) == (state, remark, True)


def test_nothing_is_put_on_a_node_in_an_unknown_state() -> None:
    for word in ("floating", "", "idle+floating", "*"):
        found = node_state(word)
        assert found.state is NodeState.DRAINING, word
        assert not found.known


def test_the_tables_name_only_lower_or_only_upper_case() -> None:
    assert all(word == word.lower() for word in NODE_STATES)
    assert all(word == word.upper() for word in JOB_STATES)
