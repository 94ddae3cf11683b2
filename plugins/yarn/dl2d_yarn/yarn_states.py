"""States of YARN's applications, nodes, services and containers (all that Hadoop 3.3 and 3.4 have) in dl2d's terms."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

from dl2d.core.cluster import NodeState
from dl2d.core.resource_manager import RmJobState

#: ``YarnApplicationState``. A finished application is in ``FINAL_STATUSES``, by its final status.
APPLICATION_STATES: Mapping[str, RmJobState] = {
    "NEW": RmJobState.PENDING,
    "NEW_SAVING": RmJobState.PENDING,
    "SUBMITTED": RmJobState.PENDING,
    "ACCEPTED": RmJobState.PENDING,  # also for some time after a fail-over: it is not gone
    "RUNNING": RmJobState.RUNNING,
    "FINISHED": RmJobState.DONE,
    "FAILED": RmJobState.FAILED,
    "KILLED": RmJobState.CANCELLED,
}
#: ``FinalApplicationStatus`` of an application in state FINISHED.
FINAL_STATUSES: Mapping[str, RmJobState] = {
    "SUCCEEDED": RmJobState.DONE,
    "FAILED": RmJobState.FAILED,
    "KILLED": RmJobState.CANCELLED,
    "ENDED": RmJobState.CANCELLED,  # stopped by a user: nothing says that it had done its work
    "UNDEFINED": RmJobState.FAILED,  # its ApplicationMaster ended without a final status
}

#: ``NodeState``, with what the state means in words.
NODE_STATES: Mapping[str, tuple[NodeState, str]] = {
    "NEW": (NodeState.DOWN, "has not registered completely"),
    "RUNNING": (NodeState.UP, ""),
    "UNHEALTHY": (NodeState.DRAINING, "fails its health check"),
    "DECOMMISSIONING": (NodeState.DRAINING, "is being decommissioned"),
    "DECOMMISSIONED": (NodeState.DOWN, "is decommissioned"),
    "LOST": (NodeState.DOWN, "sends no heartbeats"),
    "REBOOTED": (NodeState.DOWN, "has restarted"),
    "SHUTDOWN": (NodeState.DOWN, "was shut down"),
}
#: States of nodes whose containers count as lost in YARN, which starts others instead.
CONTAINERS_LOST = frozenset({"LOST", "DECOMMISSIONED", "SHUTDOWN"})


class ServiceUse(enum.StrEnum):
    """What can be done with a service: wait until it is ready, change its size, or nothing since it has ended."""

    WAIT = "wait"
    RESIZABLE = "resizable"
    ENDED = "ended"


#: ``ServiceState``.
SERVICE_STATES: Mapping[str, ServiceUse] = {
    "ACCEPTED": ServiceUse.WAIT,  # also while its ApplicationMaster is restarted, and after a fail-over
    "STARTED": ServiceUse.RESIZABLE,
    "STABLE": ServiceUse.RESIZABLE,
    "FLEX": ServiceUse.RESIZABLE,
    "UPGRADING": ServiceUse.WAIT,
    "UPGRADING_AUTO_FINALIZE": ServiceUse.WAIT,
    "EXPRESS_UPGRADING": ServiceUse.WAIT,
    "CANCEL_UPGRADING": ServiceUse.WAIT,
    "STOPPED": ServiceUse.ENDED,
    "FAILED": ServiceUse.ENDED,
    "SUCCEEDED": ServiceUse.ENDED,
}

#: ``ComponentState``: whether its containers may run.
COMPONENT_STATES: Mapping[str, bool] = {
    "FLEXING": True,
    "STABLE": True,
    "NEEDS_UPGRADE": True,
    "UPGRADING": True,
    "SUCCEEDED": False,
    "FAILED": False,
}

#: ``ContainerState`` of the Services interface: whether its processes may run.
CONTAINER_STATES: Mapping[str, bool] = {
    "RUNNING_BUT_UNREADY": True,
    "READY": True,
    "NEEDS_UPGRADE": True,
    "UPGRADING": True,
    "STOPPED": False,
    "SUCCEEDED": False,
    "FAILED": False,
    "FAILED_UPGRADE": False,
}


#: ``ContainerExitStatus``: why YARN ended a container. Other statuses are those of the container's process.
EXIT_STATUSES: Mapping[int, str] = {
    -1000: "it has not ended",
    -100: "released by its application, or its node was lost",
    -101: "the disks of its node failed",
    -102: "preempted by the scheduler",
    -103: "used more virtual memory than it had asked for",
    -104: "used more memory than it had asked for",
    -105: "ended by its application",
    -106: "ended by the ResourceManager",
    -107: "ended since its application had ended",
    -108: "ended by its node, to let a guaranteed container run",
    -109: "wrote more logs than allowed",
}


def with_exit_status(diagnostics: str) -> str:
    """Diagnostics, with the meaning of each exit status behind it."""

    def explained(match: re.Match[str]) -> str:
        words = EXIT_STATUSES.get(int(match[1]), "an exit status that dl2d does not know" if match[1][0] == "-" else "")
        return f"{match[0]} ({words})" if words else match[0]

    return re.sub(r"exit ?(?:code|status)[:= ]+(-?[0-9]{1,9})", explained, diagnostics, flags=re.IGNORECASE)


def application_state(state: str, final_status: str) -> RmJobState | None:
    """Meaning of an application's state and final status; None where a table lacks one of them."""
    meaning = APPLICATION_STATES.get(state)
    return FINAL_STATUSES.get(final_status) if meaning is RmJobState.DONE else meaning


def node_state(state: str, health: str) -> tuple[NodeState, str, bool]:
    """Meaning of a node's state, a remark for people, and whether the table has the state.

    A node in a state that the table lacks takes no new tasks; ``health`` is the node's health report.
    """
    meaning, words = NODE_STATES.get(state, (NodeState.DRAINING, "is in a state that dl2d does not know"))
    known = state in NODE_STATES
    remark = "" if meaning is NodeState.UP else f"{state}: {words}"
    return meaning, f"{remark} ({health})" if remark and health else remark, known
