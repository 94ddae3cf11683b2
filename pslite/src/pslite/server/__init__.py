"""The parameter server: owns blocks of the model, sums gradients, applies the optimizer, answers with new weights.

From top to bottom: `loop` hands each message of the coordinator, and each data frame (`frames`), to its handler;
`rounds` and `async_rounds` train; `handoff` moves blocks to the owners of a new plan, at the version that `plan_clock`
announces; `replication` keeps copies of blocks on other servers, and `failover` goes on from them; `preparation` makes
ready for a plan.  All work on `state`, `block_state`, `steps` and `connections`.
"""

from __future__ import annotations

from pslite.server.loop import Server

__all__ = ["Server"]
