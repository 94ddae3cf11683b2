"""The state tables are total over the enumerations of Hadoop 3.3 and 3.4."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dl2d.core.cluster import NodeState
from dl2d.core.resource_manager import RmJobState
from dl2d_yarn import yarn_states

HADOOP_LIB = Path(os.environ.get("DL2D_HADOOP_LIB", Path(__file__).parents[3] / "shared" / "hadoop" / "lib"))
SERVICE_WORDS = (
    "ACCEPTED STARTED STABLE STOPPED FAILED FLEX UPGRADING UPGRADING_AUTO_FINALIZE EXPRESS_UPGRADING SUCCEEDED "
    "CANCEL_UPGRADING"
)
#: Enumeration, the words that 3.3 and 3.4 have in it, and our table.
ENUMERATIONS = {
    "api.records.YarnApplicationState": (
        "NEW NEW_SAVING SUBMITTED ACCEPTED RUNNING FINISHED FAILED KILLED",
        yarn_states.APPLICATION_STATES,
    ),
    "api.records.FinalApplicationStatus": ("UNDEFINED SUCCEEDED FAILED KILLED ENDED", yarn_states.FINAL_STATUSES),
    "api.records.NodeState": (
        "NEW RUNNING UNHEALTHY DECOMMISSIONED LOST REBOOTED DECOMMISSIONING SHUTDOWN",
        yarn_states.NODE_STATES,
    ),
    "service.api.records.ServiceState": (
        SERVICE_WORDS,
        yarn_states.SERVICE_STATES,
    ),
    "service.api.records.ComponentState": (
        "FLEXING STABLE NEEDS_UPGRADE UPGRADING SUCCEEDED FAILED",
        yarn_states.COMPONENT_STATES,
    ),
    "service.api.records.ContainerState": (
        "RUNNING_BUT_UNREADY READY STOPPED NEEDS_UPGRADE UPGRADING SUCCEEDED FAILED FAILED_UPGRADE",
        yarn_states.CONTAINER_STATES,
    ),
}


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_every_word_of_the_enumerations_has_a_meaning(name: str) -> None:
    words, table = ENUMERATIONS[name]
    assert set(words.split()) == table.keys()


@pytest.mark.skipif(shutil.which("javap") is None, reason="javap is not installed")
@pytest.mark.skipif(not HADOOP_LIB.is_dir(), reason=f"no Hadoop jars in {HADOOP_LIB}: set DL2D_HADOOP_LIB")
def test_the_words_are_those_of_the_jars() -> None:
    classes = [f"org.apache.hadoop.yarn.{name}" for name in ENUMERATIONS]
    text = subprocess.run(["javap", "-cp", f"{HADOOP_LIB}/*", *classes], capture_output=True, text=True, check=True)
    for part in text.stdout.split("Compiled from")[1:]:
        name = next(name for name in ENUMERATIONS if f"org.apache.hadoop.yarn.{name}" in part)
        lines = [line for line in part.splitlines() if f"static final org.apache.hadoop.yarn.{name}" in line]
        assert {line.split()[-1].rstrip(";") for line in lines} == set(ENUMERATIONS[name][0].split())


@pytest.mark.parametrize(
    ("state", "final", "meaning"),
    [
        ("ACCEPTED", "UNDEFINED", RmJobState.PENDING),
        ("RUNNING", "UNDEFINED", RmJobState.RUNNING),
        ("FINISHED", "SUCCEEDED", RmJobState.DONE),
        ("FINISHED", "FAILED", RmJobState.FAILED),
        ("FINISHED", "ENDED", RmJobState.CANCELLED),
        ("FINISHED", "UNDEFINED", RmJobState.FAILED),
        ("KILLED", "KILLED", RmJobState.CANCELLED),
        ("FAILED", "FAILED", RmJobState.FAILED),
        ("FINISHED", "NEW_WORD", None),
        ("HIBERNATING", "UNDEFINED", None),
    ],
)
def test_applications(state: str, final: str, meaning: RmJobState | None) -> None:
    assert yarn_states.application_state(state, final) is meaning


def test_a_node_in_an_unknown_state_takes_nothing_new() -> None:
    state, remark, known = yarn_states.node_state("QUIESCED", "fine")
    assert (state, known) == (NodeState.DRAINING, False)
    assert remark == "QUIESCED: is in a state that dl2d does not know (fine)"
    assert yarn_states.node_state("RUNNING", "warm") == (NodeState.UP, "", True)


EXIT_STATUSES = {
    "INVALID": -1000, "ABORTED": -100, "DISKS_FAILED": -101, "PREEMPTED": -102, "KILLED_EXCEEDED_VMEM": -103,
    "KILLED_EXCEEDED_PMEM": -104, "KILLED_BY_APPMASTER": -105, "KILLED_BY_RESOURCEMANAGER": -106,
    "KILLED_AFTER_APP_COMPLETION": -107, "KILLED_BY_CONTAINER_SCHEDULER": -108, "KILLED_FOR_EXCESS_LOGS": -109,
}  # fmt: skip


def test_every_exit_status_of_a_container_has_words() -> None:
    assert yarn_states.EXIT_STATUSES.keys() == set(EXIT_STATUSES.values())


@pytest.mark.skipif(shutil.which("javap") is None, reason="javap is not installed")
@pytest.mark.skipif(not HADOOP_LIB.is_dir(), reason=f"no Hadoop jars in {HADOOP_LIB}: set DL2D_HADOOP_LIB")
def test_the_exit_statuses_are_those_of_the_jars() -> None:
    name = "org.apache.hadoop.yarn.api.records.ContainerExitStatus"
    command = ["javap", "-constants", "-cp", f"{HADOOP_LIB}/*", name]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    constants = {match[1]: int(match[2]) for match in re.finditer(r"int ([A-Z_]+) = (-?[0-9]+);", text)}
    assert constants == {**EXIT_STATUSES, "SUCCESS": 0}


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("AM Container exited with  exitCode: -104", "exitCode: -104 (used more memory than it had asked for)"),
        ("exit status: -102 and more", "exit status: -102 (preempted by the scheduler) and more"),
        ("exitCode: -777", "exitCode: -777 (an exit status that dl2d does not know)"),
        ("exitCode: 1", "exitCode: 1"),
    ],
)
def test_diagnostics_are_explained(said: str, meaning: str) -> None:
    assert yarn_states.with_exit_status(said).endswith(meaning)
