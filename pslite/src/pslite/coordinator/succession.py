"""Servers are gone: who owns their blocks from now on, and from where those blocks have their state.

First everybody that is left says what it has of these blocks: servers whole copies (on their way to another server, or
replicas), workers the weights that they have been sent last.  A copy that is as new as any worker's weights goes on as
if nothing had happened.  Else the weights are a worker's, and the optimizer's state is that of an older copy, or of a
checkpoint, or begins anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pslite.net.messages import Census
from pslite.numeric.optimizers import slots

if TYPE_CHECKING:
    from pslite.job.blocks import Block
    from pslite.job.plan import Plan


@dataclass(frozen=True)
class Loss:
    """A block whose newest weights only workers have."""

    #: their version
    version: int
    #: which of them sends them
    worker: str
    #: the version of the copy that its owner has, -1 if none
    kept: int


@dataclass(frozen=True)
class Choice:
    """Who owns the blocks."""

    #: block -> task of its owner
    owners: Mapping[int, str]
    losses: Mapping[int, Loss]
    #: blocks that nobody has
    nowhere: tuple[int, ...]


@dataclass(eq=False)
class Succession:
    """How far it has come."""

    number: int
    blocks: tuple[int, ...]
    #: who has not answered yet
    waits_for: set[str]
    #: whether workers are asked
    workers: bool
    #: by block, the versions that servers and workers have
    copies: dict[int, dict[str, int]] = field(default_factory=dict)
    held: dict[int, dict[str, int]] = field(default_factory=dict)
    #: worker -> version up to which what it has does not come from servers
    came: dict[str, int] = field(default_factory=dict)
    #: async mode: the plan that members know to come next with its first version, the highest version pushed anywhere
    stamp: tuple[int, int] = (0, 0)
    reached: int = -1
    #: who goes on where all other workers are gone, under which plan, and at which version
    newcomer: str = ""
    plan: int = 0
    at: int = -1
    #: blocks that were further, and the version of the furthest
    ahead: int = 0
    furthest: int = -1
    phase: Literal["counting", "restarting", "promoting", "rebuilding"] = "counting"
    choice: Choice | None = None
    #: why it came to it
    why: str = ""
    #: by block, of which version the optimizer's state is that it goes on with
    states: dict[int, int] = field(default_factory=dict)
    #: those of one before that this one has taken the place of
    before: dict[int, Loss] = field(default_factory=dict)

    def after(self, superseded: Succession | None) -> Succession:
        """Account for what that one, whose place this takes, has not accounted for."""
        if superseded is not None:
            self.states, self.before = dict(superseded.states), superseded.losses()
            self.why = self.why or superseded.why
        return self

    def census(self, tasks: Collection[str], gone: tuple[str, ...]) -> Census:
        """Wait for these tasks to say what they have, now that servers are `gone`; returns what to ask them."""
        self.waits_for = set(tasks)
        return Census(number=self.number, gone=gone, blocks=self.blocks, keep=bool(self.newcomer))

    def losses(self) -> dict[int, Loss]:
        """Return blocks that are made anew from weights, or were by one before: whole by now, and not accounted for."""
        return {**self.before, **(self.choice.losses if self.choice is not None else {})}


def choose(
    wanted: Collection[int],
    blocks: Sequence[Block],
    copies: Mapping[int, Mapping[str, int]],
    held: Mapping[int, Mapping[str, int]],
    plan: Plan,
    servers: Sequence[str],
    able: Collection[str],
    came: Mapping[str, int],
) -> Choice:
    """Choose who owns blocks whose owners are gone.

    Parameters
    ----------
    wanted
        the blocks.
    blocks
        all blocks of the job.
    copies
        block -> server -> version of the copy that it has.
    held
        block -> worker -> version of the weights that it has.
    plan
        the newest one; of equals its owners are chosen, then its members.
    servers
        those that are there, in the order in which they are chosen.
    able
        servers that know the plan in force, so that they can have a block made anew.
    came
        worker -> version up to which it has nothing to give, although it lacks nothing.

    """
    owners: dict[int, str] = {}
    losses: dict[int, Loss] = {}
    nowhere: list[int] = []
    load = Counter(dict.fromkeys(servers, 0))
    for block in blocks:
        load[plan.owner(block.number).task] += block.nbytes
    sends: Counter[str] = Counter()
    members = plan.tasks()
    for number in sorted(wanted):
        found, weights = copies.get(number, {}), held.get(number, {})
        present = plan.owner(number).task
        kept, newest = max(found.values(), default=-1), max(weights.values(), default=-1)
        best = max(
            (task for task in servers if found.get(task, -1) == kept and kept >= 0),
            key=lambda task: (task == present, task in members),
            default="",
        )
        # where workers update, sums of a version are of use only to those that have not got there
        given = [task for task, version in weights.items() if version == newest > came.get(task, -1)]
        lack = newest > kept and not given and any(version < newest for version in weights.values())
        if (kept < 0 and newest < 0) or lack:
            nowhere.append(number)
            continue
        if not best:
            best = present if present in able else min(sorted(able), key=lambda task: load[task])
            load[best] += blocks[number].nbytes * (best != present)
        owners[number] = best
        if newest > kept:
            senders = given or [task for task, version in weights.items() if version == newest]
            worker = min(senders, key=lambda task: (sends[task], task))
            sends[worker] += 1
            losses[number] = Loss(newest, worker, kept)
    return Choice(owners, losses, tuple(nowhere))


def holders(
    blocks: Sequence[Block], copies: Mapping[int, Mapping[str, int]], plan: Plan
) -> dict[int, tuple[int, str]] | None:
    """Return for every block the newest version and the server that has it, its owner-to-be of equals; None if one has
    no copy.
    """
    found = {}
    for block in blocks:
        present = plan.owner(block.number).task
        versions = copies.get(block.number)
        if not versions:
            return None
        task = max(sorted(versions), key=lambda task, v=versions, p=present: (v[task], task == p))  # type: ignore[misc]
        found[block.number] = versions[task], task
    return found


def inexact(blocks: Sequence[Block], losses: Mapping[int, Loss]) -> list[int]:
    """Return the blocks that go on without some of their optimizer's state."""
    return [number for number in losses if slots(blocks[number].optimizer)]


def account(states: Mapping[int, int], versions: Mapping[int, int], keeping: Collection[int]) -> str:
    """Say what became of blocks: `states` has the versions of their optimizers' state, `versions` of their weights;
    the optimizers of those `keeping` have a state.
    """
    groups: dict[tuple[int, bool, int], int] = Counter(
        (versions[block], block in keeping, state) for block, state in states.items()
    )
    return "; ".join(
        f"{count} block{'s' * (count > 1)} go{'es' * (count == 1)} on from a worker's weights of version {version}"
        + (f", with the optimizer's state of version {state}" if keeps and state >= 0 else "")
        + (", with an optimizer that begins anew" if keeps and state < 0 else "")
        for (version, keeps, state), count in sorted(groups.items())
    )
