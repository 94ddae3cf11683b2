"""The coordinator: one per job. Knows who is there, makes plans, sees them through, and notices failures.

It never touches weights or gradients, and the data plane does not wait for it: a plan takes effect when the owner of
block 0 stamps it into its answers to the workers.

`Coordinator` reads messages and looks at what is due; its parts do the rest.  Each has one subject, the job's `Record`,
in which all stands that another coordinator must know to go on, and a `Voice`.  Where a part needs another, it is given
it; where two need each other, the coordinator is where they meet.
"""

from __future__ import annotations

from pslite.coordinator.loop import Coordinator
from pslite.coordinator.settings import Settings

__all__ = ["Coordinator", "Settings"]
