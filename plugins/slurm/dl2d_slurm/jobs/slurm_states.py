"""What Slurm's states mean for scaling: total tables over Slurm 22.05 to 26.05."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dl2d.core.cluster import NodeState
from dl2d.core.resource_manager import RmJobState

#: squeue(1), JOB STATE CODES and JOB STATE FLAGS, extended form.
JOB_STATES: Mapping[str, RmJobState] = {
    "BOOT_FAIL": RmJobState.LOST,  # its node could not be started
    "CANCELLED": RmJobState.CANCELLED,
    "COMPLETED": RmJobState.DONE,
    "COMPLETING": RmJobState.ENDING,
    "CONFIGURING": RmJobState.RUNNING,  # holds its room; the node is being readied
    "DEADLINE": RmJobState.TIME_LIMIT,
    "EXPEDITING": RmJobState.PENDING,
    "FAILED": RmJobState.FAILED,
    "LAUNCH_FAILED": RmJobState.LOST,  # the node's fault, not the task's
    "NODE_FAIL": RmJobState.LOST,
    "OUT_OF_MEMORY": RmJobState.OUT_OF_MEMORY,
    "PENDING": RmJobState.PENDING,
    "POWER_UP_NODE": RmJobState.RUNNING,
    "PREEMPTED": RmJobState.PREEMPTED,
    "RECONFIG_FAIL": RmJobState.LOST,
    "REQUEUED": RmJobState.PENDING,
    "REQUEUE_FED": RmJobState.PENDING,
    "REQUEUE_HOLD": RmJobState.PENDING,
    "RESIZING": RmJobState.RUNNING,
    "RESV_DEL_HOLD": RmJobState.PENDING,
    "REVOKED": RmJobState.CANCELLED,
    "RUNNING": RmJobState.RUNNING,
    "SIGNALING": RmJobState.RUNNING,
    "SPECIAL_EXIT": RmJobState.PENDING,  # requeued and held
    "STAGE_OUT": RmJobState.ENDING,
    "STOPPED": RmJobState.RUNNING,  # keeps its CPUs
    "SUSPENDED": RmJobState.RUNNING,  # keeps its memory and goes on later
    "TIMEOUT": RmJobState.TIME_LIMIT,
    "UPDATE_DB": RmJobState.ENDING,
}

#: Those of a job that holds its room while its processes stand still, or have not been started yet.
NOT_EXECUTING_STATES = frozenset({"CONFIGURING", "POWER_UP_NODE", "STOPPED", "SUSPENDED"})

#: sinfo(1), NODE STATE CODES, extended and compact forms. Nothing is put on a node that Slurm's power saving has put
#: to sleep: waking machines is for an admin to decide.
NODE_STATES: Mapping[str, NodeState] = {
    word: state
    for state, words in {
        NodeState.UP: ("allocated", "alloc", "completing", "comp", "idle", "mixed", "mix", "planned", "plnd"),
        NodeState.DRAINING: (
            "blocked",  # a neighbour runs a job that wants the whole switch
            *("drained", "drain", "draining", "drng", "fail", "failing", "failg", "inval", "maint"),
            *("perfctrs", "npc", "power_down", "powr_dn", "powering_up", "powering_down", "pow_up", "pow_dn"),
            *("power_up", "reboot_requested", "reboot_req", "boot", "reserved", "resv"),
            *("unknown", "unk"),  # the controller has just started
        ),
        NodeState.DOWN: ("down", "error", "future", "futr", "powered_down", "pwrd_dn", "reboot", "reboot_issued"),
    }.items()
    for word in words
}

#: sinfo(1): characters that follow a node's state.
NODE_MARKS: Mapping[str, tuple[NodeState, str]] = {
    "*": (NodeState.DRAINING, "does not answer"),
    "~": (NodeState.DOWN, "powered down"),
    "#": (NodeState.DRAINING, "being powered up"),
    "!": (NodeState.DRAINING, "to be powered down"),
    "%": (NodeState.DRAINING, "being powered down"),
    "$": (NodeState.DRAINING, "in a maintenance reservation"),
    "@": (NodeState.DRAINING, "to be rebooted"),
    "^": (NodeState.DOWN, "rebooting"),
    "-": (NodeState.UP, ""),  # planned for a larger job; Slurm itself decides who comes first
    "+": (NodeState.UP, ""),  # some of its jobs are completing
}

#: sinfo's words for an idle node that a reservation keeps for its own jobs.
RESERVED = frozenset({"reserved", "resv"})

#: sinfo's words for an idle node that power saving has put to sleep, is putting to sleep, or wakes.
ASLEEP = frozenset({"idle~", "idle#", "idle!", "idle%"})
#: sinfo's words for a node that an administrator has drained; with jobs that run there, and without.
_DRAINED = re.compile(r"(?:draining|drng|drained|drain)[^*^~]*", re.ASCII)

_WORSE = {NodeState.UP: 0, NodeState.DRAINING: 1, NodeState.DOWN: 2}


@dataclass(frozen=True, slots=True)
class NodeStateMeaning:
    """A node's state in Slurm's word and what it means."""

    state: NodeState
    #: Slurm's word and what its marks mean; "" for a node in good order.
    remark: str
    #: Whether all of it was in the tables.
    known: bool


def job_state(word: str, *, placed: bool) -> tuple[RmJobState, bool]:
    """Meaning of a job's state, and whether it is in the table.

    A job in a state that no table has is taken to hold its room if it has nodes (``placed``) and to wait if it has
    none: so it is neither started twice nor is its room given away.
    """
    bare = word.upper().partition(" ")[0].rstrip("+")
    if bare in JOB_STATES:
        return JOB_STATES[bare], True
    return (RmJobState.RUNNING if placed else RmJobState.PENDING), False


def is_drained(word: str) -> bool:
    """Whether this is the state of a node that an administrator has drained, also for a reboot, and that answers."""
    return _DRAINED.fullmatch(word.strip().lower()) is not None


def node_state(word: str) -> NodeStateMeaning:
    """Meaning of a node's state such as ``mixed``, ``idle~``, ``down*`` or ``idle+drain``.

    The worst of its parts counts. A part that no table has means that nothing new is put there.
    """
    bare = word.strip().lower()
    states = []
    marks = []
    known = True
    while bare and bare[-1] in NODE_MARKS:
        state, meaning = NODE_MARKS[bare[-1]]
        states.append(state)
        if meaning:
            marks.append(meaning)
        bare = bare[:-1]
    for part in bare.split("+"):
        known = known and part in NODE_STATES
        states.append(NODE_STATES.get(part, NodeState.DRAINING))
    state = max(states, key=_WORSE.__getitem__)
    remark = "" if state is NodeState.UP else ", ".join((bare, *marks))
    return NodeStateMeaning(state, remark, known)
