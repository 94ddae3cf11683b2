"""The parameter server: owns blocks of the model, sums gradients, applies the optimizer, answers with new weights.

From top to bottom: `loop` hands each message of the coordinator, and each data frame (`frame_handlers`), to its
handler; `rounds` and `async_rounds` train; `block_handoff` moves blocks to the owners of a new plan, at the version
that `plan_activation` announces; `replication` keeps copies of blocks on other servers, and `failover` goes on from
them; `plan_preparation` makes ready for a plan.  All work on `server_state`, `block_state`, `block_step` and
`connections`.
"""

from __future__ import annotations

from pslite.server.loop import Server

__all__ = ["Server"]
