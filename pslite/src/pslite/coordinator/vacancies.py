"""Roles that have nobody left in the middle of a job: newcomers take the places of those that are gone."""

from __future__ import annotations

import time
from typing import Literal

from pslite.coordinator.record import ROLES, Record, Vacancy
from pslite.coordinator.settings import Settings
from pslite.coordinator.voice import Voice
from pslite.job.plan import Plan
from pslite.net.messages import Prepare
from pslite.numeric.optimizers import slots


class Vacancies:
    """Waits for newcomers, and has them make ready.

    Parameters
    ----------
    record, voice
        the job's.
    settings
        times.

    """

    def __init__(self, record: Record, voice: Voice, settings: Settings) -> None:
        self._record = record
        self._voice = voice
        self._settings = settings

    def open(self, role: Literal["worker", "ps"], why: str) -> None:
        """Wait for a newcomer, `why` in words; fail where state is lost that must not be."""
        record = self._record
        now = time.monotonic()
        assert record.spec is not None
        lossy = record.spec.update == "server" and any(slots(block.optimizer) for block in record.blocks)
        if role == "ps" and lossy and record.spec.on_loss == "fail" and record.snapshot < 0:
            self._voice.fail(f"{why}; optimizer state is lost with it, and on_loss is 'fail'")
            return
        if record.vacancy is None:
            record.vacancy = Vacancy(role, now, why)
            self._voice.say(f"{why}; the job waits for another {ROLES[role]}")
        record.vacancy.task = ""

    def seat(self, vacancy: Vacancy, now: float) -> None:
        """Bring a newcomer in, or give up."""
        record = self._record
        target = record.target
        # who is leaving does no other step
        coming = record.pending.plan.tasks() & record.workers_there() if record.pending is not None else set()
        old = {m.task for m in record.plan.workers} if record.plan is not None else set()
        present = record.servers_there() if vacancy.role == "ps" else sorted(coming - old)
        joined = present + [task for task in record.joined(vacancy.role) if target is None or task in target]
        if joined:
            (self._seat_server if vacancy.role == "ps" else self._seat_worker)(vacancy, joined[0], now)
            return
        limit = self._settings.start
        # who is lost comes back in a moment, or will be known to have died
        back = [m.task for m in record.waiting(vacancy.role) if m.lost and (target is None or m.task in target)]
        expected = bool(back) or any(task not in record.members for task in target or ())
        if limit is not None and not expected:
            limit = self._settings.settle  # nobody starts another one
        limit = self._settings.vacancy if limit is None else limit
        if now - max(vacancy.since, record.target_changed) > limit:
            self._voice.fail(f"{vacancy.reason}; it was the last {ROLES[vacancy.role]}, and no other came in its place")

    def _seat_server(self, vacancy: Vacancy, task: str, now: float) -> None:
        """Have a newcomer own all blocks: it makes ready, and workers reach it."""
        record = self._record
        assert record.spec is not None
        member = record.members[task]
        known = {plan.number for plan in record.plans_in_force() if task in plan.tasks()}
        member.state = "active"
        record.go_to(tuple(record.lost_servers), {block.number: member.record() for block in record.blocks})
        record.orphans.update(block.number for block in record.blocks)
        vacancy.task, vacancy.began = task, now
        plans = record.plans_in_force()
        newest, previous = plans[-1], plans[-2] if len(plans) > 1 else None
        self._voice.say(f"{member.title} takes the place of servers that are gone")
        vacancy.waits_for = {(task, plan.number) for plan in plans if plan.number not in known}
        for plan, before in zip(plans, [None, *plans], strict=False):
            if plan.number not in known:
                # it has to know which workers a plan to come adds
                self._voice.tell({task}, Prepare(plan=plan, previous=before, spec=record.spec))
        if not known:
            workers = record.workers_there()
            vacancy.waits_for |= {(worker, newest.number) for worker in workers}
            self._voice.tell(workers, Prepare(plan=newest, previous=previous, spec=record.spec))

    def _seat_worker(self, vacancy: Vacancy, task: str, now: float) -> None:
        """Have a newcomer go on in the place of a worker that is gone; it makes ready for the plan in force."""
        record = self._record
        assert record.spec is not None
        assert record.plan is not None
        member, pending = record.members[task], record.pending
        self._voice.say(f"{member.title} takes the place of workers that are gone")
        member.state = "active"
        vacancy.task, vacancy.began, vacancy.waits_for, vacancy.member = task, now, set(), False
        news: list[Prepare] = []
        if task not in record.plan.tasks():
            record.plan = record.plan.instead(self._gone_of(record.plan), member.record())
            news.append(Prepare(plan=record.plan, previous=None, spec=record.spec))
        if pending is not None and pending.previous is None:
            pending.plan = record.plan
        elif pending is not None:
            vacancy.member = task in pending.plan.tasks()
            pending.previous = record.plan
            if not vacancy.member:
                pending.plan = pending.plan.instead(self._gone_of(pending.plan), member.record())
                news.append(Prepare(plan=pending.plan, previous=record.plan, spec=record.spec))
        for message in news:
            vacancy.waits_for.add((task, message.plan.number))
            self._voice.tell({task}, message)

    def ask_again(self) -> None:
        """Others own blocks under the plans that a worker makes ready for in the place of those that are gone."""
        record, vacancy = self._record, self._record.vacancy
        if vacancy is None or vacancy.role != "worker" or record.spec is None:
            return
        plans = record.plans_in_force()
        for plan, before in zip(plans, [None, *plans], strict=False):
            if (vacancy.task, plan.number) in vacancy.waits_for:
                vacancy.began = time.monotonic()
                self._voice.tell({vacancy.task}, Prepare(plan=plan, previous=before, spec=record.spec))

    def _gone_of(self, plan: Plan) -> str:
        """A worker of a plan that is gone."""
        there = self._record.there()
        return next(m.task for m in plan.workers if m.task not in there)
