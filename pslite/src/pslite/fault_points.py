"""Fault points: named moments in the runtime at which a test delays, drops or breaks something.

A coordinator, server or worker that is given a hook calls it at each point that it reaches; without one, a point is a
single call that returns.  The hook runs in the thread that reached the point: it may sleep, wait, raise what could be
raised there, or end connections.  Where it returns True, the step that the point stands before is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class FaultPoint(Enum):
    """What is about to happen, or has just happened; in brackets what the hook is given beside the task."""

    # --- coordinator: the task is "coordinator" ---------------------------------------------------------------------
    #: before it looks at what is due
    TICK = "tick"
    #: before it takes a message [the task that sent it, message]
    COORDINATOR_MESSAGE = "coordinator message"
    #: before it considers whether a new plan is needed
    CONSIDER_PLAN = "consider plan"
    #: a coordinator or a server, before it writes to a disk, in a thread of its own ["log" or "checkpoint"]
    DISK = "disk"
    #: a plan that all members are ready for has taken effect [plan]
    PLAN_COMMITTED = "plan committed"

    # --- workers and servers ----------------------------------------------------------------------------------------
    #: before it takes a message of the coordinator [message]
    MESSAGE = "message"
    #: before it makes ready for a plan, in a thread of its own [plan]
    PREPARE = "prepare"
    #: it has memory and connections for a plan, which its loop does not know yet [plan]
    PREPARED = "prepared"
    #: its loop knows a plan that is prepared [plan]
    PLAN_KNOWN = "plan known"
    #: before it connects to a server, in any thread [server]
    CONNECT = "connect"
    #: it has a new connection to a server, which its loop does not know yet [connection]
    CONNECTED = "connected"
    #: before it tries to open a broken connection to a server again [server]
    RECONNECT = "reconnect"
    #: before its loop takes up a data connection, opened by either side [connection]
    CONNECTION_OPENED = "connection opened"
    #: a whole frame has come, before it is taken [connection, header]
    FRAME = "frame"

    # --- workers ----------------------------------------------------------------------------------------------------
    #: before the first worker sends the weights with which the job begins
    FIRST_WEIGHTS = "first weights"
    #: before it enters a plan [plan]
    ENTER_PLAN = "enter plan"
    #: before it waits for frames
    WAIT = "wait"
    #: the payload of a frame is about to come [connection, header]
    PAYLOAD = "payload"
    #: the weights of a block that it waited for are there [block's number, version]
    WEIGHTS_HERE = "weights here"
    #: it has sent again, over a new connection, what may be lost with the one before [server]
    RESUMED = "resumed"
    #: it takes blocks from those who own them since servers have died
    OWNERS_CHANGED = "owners changed"
    #: before it says that it has the last version
    FINISH = "finish"

    # --- servers ----------------------------------------------------------------------------------------------------
    #: before it reads what the coordinator has sent
    READ_CONTROL = "read control"
    #: before it applies a step to a block, or a replica [block's state, step]
    APPLY = "apply"
    #: before it sends weights of a block to a worker [connection, header]
    SEND_WEIGHTS = "send weights"
    #: before it computes the digests of its blocks, in a thread of its own
    DIGEST = "digest"
    #: before it becomes the owner of a block whose owner has died [number of the block]
    TAKE_BLOCK = "take block"
    #: it has announced the first version of a plan [plan]
    PLAN_ANNOUNCED = "plan announced"
    #: before it checks whether a seed can be sent; True holds seeds back [plan]
    REPLICA_DUE = "replica due"
    #: before it sends a seed, the state of a block for a new replica [plan]
    SEND_REPLICA = "send replica"


class FaultHook(Protocol):
    """What a test gives to a coordinator, server or worker."""

    def __call__(self, point: FaultPoint, task: str, *about: Any) -> bool:
        """Act at a point that a task has reached; returns whether to leave out the step that follows."""


@dataclass(eq=False, slots=True)
class FaultPoints:
    """The fault points of one task."""

    #: is called at each; None: nothing happens
    hook: FaultHook | None
    #: whose points they are
    task: str

    def reached(self, point: FaultPoint, *about: Any) -> bool:
        """Call the hook; returns whether the step that follows is to be left out."""
        return self.hook is not None and self.hook(point, self.task, *about)
