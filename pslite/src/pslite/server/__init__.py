"""The parameter server: owns blocks of the model, adds gradients, applies the optimizer, answers with new weights.

Modules, each above those that it uses:

- `loop` dispatches the coordinator's messages, and gives data frames to `frame_handlers`;
- `failover` makes this server the owner of blocks whose servers have died;
- `rounds` (synchronous) and `async_rounds` (asynchronous) do the training;
- `block_handoff` moves blocks to their owners under a new plan, which `plan_preparation` has prepared;
- `replication` keeps copies of blocks on other servers;
- `connections` accepts and opens data connections;
- `block_step` computes one step of a block;
- `server_state` is the state that they share, with `plan_activation` (when plans take effect) and `block_state`.
"""

from __future__ import annotations

from pslite.server.loop import Server

__all__ = ["Server"]
