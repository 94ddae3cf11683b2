"""The coordinator, one for each job: makes plans, sees them through, and notices failures.

It never touches weights or gradients, and the data plane does not wait for it: a plan takes effect when the owner of
block 0 announces it in its answers to the workers.

`event_loop` reads messages, gives each to the function that takes its kind (`message_handlers`), and looks at what is
due in each turn.  These functions change the `JobState` and queue messages to members; when the loop has written the
state to the log, it sends them.  `joining_and_start` has processes up to their first plan, `membership_plans` decides
who is a member and moves the job from plan to plan, `failure_detector` says who is gone and `failover` what follows,
`job_completion` ends the job.
"""

from __future__ import annotations

from pslite.coordinator.event_loop import Coordinator
from pslite.coordinator.state.coordinator_settings import Settings

__all__ = ["Coordinator", "Settings"]
