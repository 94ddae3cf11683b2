"""The parameter server: owns blocks of the model, adds gradients, applies the optimizer, answers with new weights.

A plan goes through these stages on a server; the names are used in all modules:

========= =================================================================================== ===================
stage     meaning                                                                             message
========= =================================================================================== ===================
prepared  its memory is allocated and its connections are open                                `Ready` is sent
committed all members are prepared; the owner of block 0 is to choose the first version       `Commit` arrives
announced its first version is known here                                                     `Announced` is sent
entered   a block has reached the first version and is under the plan from now on             none
moved     all blocks here are under the plan, and its owners and backups have their states    `Moved` is sent
completed all members have moved                                                              `PlanDone` arrives
========= =================================================================================== ===================

Only the owner of block 0 receives `Commit` and sends `Announced`; other servers learn the first version from pushes.

Modules, in an order in which each uses only those below it:

- `event_loop` dispatches the coordinator's messages, and gives data frames to `frame_handlers`;
- `failover` makes this server the owner of blocks whose servers have died;
- `training_rounds` (synchronous) and `async_rounds` (asynchronous) do the training;
- `block_handoff` moves blocks to their owners under a new plan, which `plan_preparation` has prepared;
- `replication` keeps copies of blocks on other servers;
- `data_connections` accepts and opens data connections;
- `block_step` computes one step of a block;
- `server_state` is the state that they share, with `plan_activation` (when plans take effect) and `block_state`.
"""

from __future__ import annotations

from pslite.server.event_loop import Server

__all__ = ["Server"]
