"""Servers are gone: others own their blocks, with the newest state that there is of them.

Members say what they have, owners are chosen, blocks of which only workers have the newest weights are made anew, and
workers are told where everything is.  Where nobody is left to own them, a newcomer does.
"""

from __future__ import annotations

from collections.abc import Mapping

from pslite.coordinator.record import Record, Seated
from pslite.coordinator.restarts import Restarts
from pslite.coordinator.succession import Choice, Loss, Succession, account, choose, inexact
from pslite.coordinator.vacancies import Vacancies
from pslite.coordinator.voice import Voice
from pslite.net.messages import Clocks, Commit, Copies, Promote, Promoted, Provide, Rebuilt


class Heirs:
    """Sees successions through.

    Parameters
    ----------
    record, voice
        the job's.
    vacancies
        where nobody is left.
    restarts
        go on with what servers say of their copies where all workers are gone.

    """

    def __init__(self, record: Record, voice: Voice, vacancies: Vacancies, restarts: Restarts) -> None:
        self._record = record
        self._voice = voice
        self._vacancies = vacancies
        self._restarts = restarts

    def succeed(self, why: str = "") -> None:
        """Ask who is left what it has of the blocks of servers that are gone, and of those that nobody owns yet."""
        record = self._record
        assert record.spec is not None
        plans = record.plans_in_force()
        blocks = {block for plan in plans for task in record.lost_servers for block in plan.blocks_of(task)}
        servers = set(record.servers_there())
        record.successions += 1
        superseded, record.succession = record.succession, None
        self._voice.hurry()
        if not record.able_servers():
            self._vacancies.open("ps", next(reversed(record.lost_servers.values())))
            return
        # Where every block has a replica that workers wait for, nobody else need be asked.
        ask_workers = record.spec.durability != "durable"
        record.succession = Succession(
            record.successions,
            tuple(sorted(blocks | record.orphans)),
            set(),
            workers=ask_workers,
            why="; ".join(filter(None, (why, *record.lost_servers.values()))),
        ).after(superseded)
        self._ask(record.succession, servers | (record.workers_there() if ask_workers else set()))

    def _ask(self, succession: Succession, tasks: set[str]) -> None:
        self._voice.tell(tasks, succession.census(tasks, tuple(self._record.lost_servers)))

    def recount(self) -> None:
        """A worker is gone that others may count on for its weights."""
        record = self._record
        if record.succession is not None and record.succession.workers:
            self.succeed()

    def take_copies(self, member: Seated, message: Copies) -> None:
        """Take what a member has of the blocks; with the last one's their owners can be chosen."""
        record = self._record
        succession = record.succession
        if succession is None or message.number != succession.number:
            return  # another one has died since
        if succession.phase == "restarting":
            self._restarts.promote(succession)
        if succession.phase != "counting":
            return
        succession.waits_for.discard(member.task)
        found = succession.held if member.role == "worker" else succession.copies
        succession.came[member.task] = message.came
        succession.reached = max(succession.reached, message.reached)
        if record.pending is not None and message.stamp[0] == record.pending.plan.number:
            succession.stamp = message.stamp
        for block, version in message.versions.items():
            found.setdefault(block, {})[member.task] = version
        if not succession.waits_for and succession.newcomer:
            self._restarts.resume(succession)
        elif not succession.waits_for:
            self._choose(succession)

    def _choose(self, succession: Succession) -> None:
        record = self._record
        assert record.spec is not None
        choice = choose(
            succession.blocks, record.blocks, succession.copies, succession.held, record.newest_plan,
            record.servers_there(), record.able_servers(), succession.came,
        )  # fmt: skip
        if choice.nowhere and not succession.workers and record.workers_there():
            succession.workers = True
            self._ask(succession, record.workers_there())
            return
        why = succession.why
        if choice.nowhere:
            count = len(choice.nowhere)
            blocks = f"{count} blocks" if count > 1 else f"block {choice.nowhere[0]}"
            self._voice.fail(f"{why}; {blocks} of the model had no copy anywhere else")
            return
        succession.choice = choice
        for block in choice.losses:
            succession.states.pop(block, None)  # made anew once more
        certain = [b for b in self._lossy(choice.losses) if choice.losses[b].version != record.snapshot]
        if certain and record.spec.on_loss == "fail":
            self._voice.fail(f"{why}; optimizer state of {len(certain)} blocks is lost, and on_loss is 'fail'")
            return
        owners = {block: record.members[task].record() for block, task in choice.owners.items()}
        record.heirs.update(owners)
        record.orphans |= choice.losses.keys()
        gone = tuple(record.lost_servers)
        record.go_to(gone, owners)
        for plan in record.plans_in_force():
            for server in plan.servers:
                # one that was to leave may be needed for longer
                record.members[server.task].state = "active"
        succession.phase = "promoting"
        succession.waits_for = {m.task for plan in record.plans_in_force() for m in plan.servers}
        self._voice.tell(
            succession.waits_for.copy(),
            Promote(
                number=succession.number, gone=gone, owners=owners,
                rebuilt={block: loss.version for block, loss in choice.losses.items()}, snapshot=record.snapshot,
                clocks=self._clocks(succession, choice) if record.spec.asynchronous else None,
            ),
        )  # fmt: skip

    def _clocks(self, succession: Succession, choice: Choice) -> Clocks:
        """Return, for async mode, how far the workers of blocks are that are made anew; from there on it is inexact."""
        record = self._record
        workers = {
            # a copy has been given away, if at all, when all had got as far
            block: {task: max(version, loss.kept) for task, version in succession.held[block].items()}
            for block, loss in choice.losses.items()
        }
        found = {version for versions in workers.values() for version in versions.values()}
        if found:
            record.mark_inexact(min(found))
        return Clocks(workers, record.stamp(succession), max({succession.reached, *found}))

    def _lossy(self, losses: Mapping[int, Loss]) -> list[int]:
        """Blocks that lose some of what an optimizer keeps."""
        record = self._record
        assert record.spec is not None
        if record.spec.update == "worker":
            return []
        # before the first step there is nothing to lose, unless the job has begun with an optimizer's state
        lossy = [b for b in inexact(record.blocks, losses) if losses[b].version or record.began_with_state]
        # and after the last one nothing is made of it any more
        last = record.spec.total_versions
        return lossy if record.spec.open else [b for b in lossy if losses[b].version < last]

    def promoted(self, member: Seated, message: Promoted) -> bool:
        """A server owns its new blocks; returns whether workers go on with that."""
        record = self._record
        succession, pending = record.succession, record.pending
        if pending is not None:
            pending.moved.pop(member.task, None)  # said before it had other blocks
        if succession is None or message.number != succession.number or succession.phase != "promoting":
            return False
        succession.waits_for.discard(member.task)
        if succession.waits_for:
            return False
        choice = succession.choice or Choice({}, {}, ())
        losses, owners = choice.losses, choice.owners
        succession.phase = "rebuilding"
        succession.waits_for = {owners[block] for block in losses}
        for worker in {loss.worker for loss in losses.values()}:
            theirs = {b: record.heirs[b] for b, loss in losses.items() if loss.worker == worker}
            self._voice.tell({worker}, Provide(number=succession.number, owners=theirs))
        return self._rebuilt(succession)

    def rebuilt(self, member: Seated, message: Rebuilt) -> bool:
        """A server has made its blocks anew; returns whether workers go on with that."""
        succession = self._record.succession
        if succession is None or message.number != succession.number:
            return False
        succession.waits_for.discard(member.task)
        succession.states |= message.states
        return self._rebuilt(succession)

    def _rebuilt(self, succession: Succession) -> bool:
        """With the last block workers can go on."""
        record = self._record
        pending = record.pending
        if succession.waits_for:
            return False
        record.succession = None
        if record.vacancy is not None and (record.vacancy.role == "ps" or succession.newcomer):
            record.vacancy = None
        record.orphans.clear()
        if not self._may_go_on(succession):
            return False
        workers = record.workers_there()
        self._voice.tell(
            workers, Promote(number=succession.number, gone=tuple(record.lost_servers), owners=record.heirs)
        )
        if 0 in record.heirs and pending is not None and pending.previous is not None:
            self._voice.tell({pending.previous.owner(0).task}, Commit(plan=pending.plan.number))
        record.heirs = {}
        self._vacancies.ask_again()
        self._voice.hurry()
        return True

    def _may_go_on(self, succession: Succession) -> bool:
        """Note what is not exact from here on; returns whether the job goes on so."""
        record = self._record
        assert record.spec is not None
        losses = succession.losses()
        if record.spec.asynchronous:
            if losses:
                versions = {block: loss.version for block, loss in losses.items()}
                self._voice.say(
                    f"INEXACT from version {record.inexact_from} on: "
                    f"{account(dict.fromkeys(versions, -1) | succession.states, versions, self._lossy(losses))}; "
                    "what was pushed to them last may be left out, or count twice"
                )
            return True
        lost = {
            block: succession.states.get(block, -1)
            for block in self._lossy(losses)
            if succession.states.get(block, -1) != losses[block].version
        }
        if not lost:
            if losses:
                self._voice.say(f"{len(losses)} blocks go on from what workers have of them, nothing is lost")
            return True
        versions = {block: losses[block].version for block in lost}
        story = account(lost, versions, lost)
        if record.spec.on_loss == "fail":
            self._voice.fail(f"{succession.why}; {story}, and on_loss is 'fail'")
            return False
        first = min(versions.values())
        record.mark_inexact(first)
        self._voice.say(f"INEXACT from version {first} on: {story}")
        return True
