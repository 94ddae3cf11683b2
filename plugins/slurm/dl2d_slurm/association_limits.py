"""Limits of associations and qualities of service on what their running jobs have together, as slurmctld knows them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from dl2d.core.resource_manager import GrowthLimit
from dl2d.core.resources import Resources
from dl2d_slurm.commands import Commands
from dl2d_slurm.queue_listing import Jobs
from dl2d_slurm.sbatch_options import AnchorOptions

log = structlog.get_logger(__name__)

#: Prints one record on each line, with limits and use: ``GrpTRES=cpu=6(4),mem=N(400)``.
_ASK: Final = ("scontrol", "--oneliner", "show", "assoc_mgr", "flags=assoc,qos")
#: At sites with thousands of users the answer has megabytes.
_ASK_SECONDS: Final = 60.0

_FIELD = re.compile(r"(?:^|\s)(ClusterName|Account|UserName|Partition|ParentAccount|QOS|GrpJobs|GrpTRES|MaxJobs)=(\S*)")
#: Limits of each account or user in a quality of service: ``User Limits= alice(1000)={MaxJobsPU=5(2) ...} ...``.
_EACH = re.compile(r"(\S+)=\{([^}]*)\}")
_OF_EACH = re.compile(r"(?:^|\s)(MaxJobs|MaxTRES)P([AU])=(\S*)")
#: A limit, and how much of it is in use.
_LIMIT = re.compile(r"(\d{1,15})\((\d{1,15})\)")


@dataclass(frozen=True, slots=True)
class AssociationLimit:
    """One limit, and the jobs for which it holds."""

    #: For users: ``MaxTRESPerUser of QOS small for user alice``.
    title: str
    #: Amounts that may be in use, and that are, by resource; ``jobs`` is the number of running jobs.
    amounts: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)
    #: It holds for jobs of all that are given here.
    qos: str = ""
    accounts: frozenset[str] = frozenset()
    user: str = ""
    partition: str = ""

    def holds_for(self, options: AnchorOptions, user: str) -> bool:
        """Whether it limits the tasks of an anchor with these options of this user."""
        return (
            self.qos in ("", options.qos)
            and (not self.accounts or options.account in self.accounts)
            and self.user in ("", user)
            and self.partition in ("", options.partition)
        )


def parse_limits(text: str) -> tuple[AssociationLimit, ...]:
    """Read the answer of ``scontrol show assoc_mgr``; lines that are no record are left out."""
    # Of a field that a line has twice the first counts: what follows may be a comment.
    lines = [(dict(reversed(_FIELD.findall(line))), line) for line in text.splitlines()]
    associations = [fields for fields, _ in lines if fields.keys() >= {"ClusterName", "Account", "UserName"}]
    users = {uid.rstrip(")"): user for user, _, uid in (each["UserName"].partition("(") for each in associations)}
    parents = {
        each["Account"]: each.get("ParentAccount", "").partition("(")[0]
        for each in associations
        if not each["UserName"]
    }
    found = [limit for fields in associations for limit in _of_association(fields)]
    found = [
        replace(limit, accounts=limit.accounts if limit.user else _below(limit.accounts, parents)) for limit in found
    ]
    for fields, line in lines:
        if "QOS" in fields and "ClusterName" not in fields:
            found += _of_qos(fields, line, users)
    return tuple(found)


def _below(accounts: frozenset[str], parents: Mapping[str, str]) -> frozenset[str]:
    """Accounts and all accounts below them."""
    new = {name for name, parent in parents.items() if parent in accounts} - accounts
    return _below(accounts | new, parents) if new else accounts


def _of_association(fields: Mapping[str, str]) -> Iterator[AssociationLimit]:
    user, account = fields["UserName"].partition("(")[0], fields["Account"]
    scope = AssociationLimit(
        f"user {user} in account {account}" if user else f"account {account}",
        accounts=frozenset((account,)), user=user, partition=fields.get("Partition", ""),
    )  # fmt: skip
    # The maximum of jobs of an account is that of each of its users, of which the users' own records tell.
    for name in ("GrpTRES", "GrpJobs", *(("MaxJobs",) if user else ())):
        yield from _limits(name, fields.get(name, ""), scope)


def _of_qos(fields: Mapping[str, str], line: str, users: Mapping[str, str]) -> Iterator[AssociationLimit]:
    qos = fields["QOS"].partition("(")[0]
    scope = AssociationLimit(f"QOS {qos}", qos=qos)
    for name in ("GrpTRES", "GrpJobs"):
        yield from _limits(name, fields.get(name, ""), scope)
    _, _, tail = line.partition(" Account Limits=")
    for whose, limits in _EACH.findall(tail):
        name_or_uid, _, _ = whose.partition("(")
        for kind, each, text in _OF_EACH.findall(limits):
            if each == "A":
                own = replace(scope, title=f"QOS {qos} for account {whose}", accounts=frozenset((whose,)))
                yield from _limits(f"{kind}PerAccount", text, own)
            else:  # releases before 23 have the user's number alone
                user = users.get(name_or_uid, name_or_uid)
                own = replace(scope, title=f"QOS {qos} for user {user}", user=user)
                yield from _limits(f"{kind}PerUser", text, own)


def _limits(name: str, text: str, scope: AssociationLimit) -> Iterator[AssociationLimit]:
    """The limit of a field, if one is set: ``cpu=6(4),mem=N(400)``, or ``5(2)`` for jobs."""
    parts = [part.rpartition("=") for part in text.split(",")]
    found = {
        resource: (float(match[1]), float(match[2]))
        for kind, _, value in parts
        if (match := _LIMIT.fullmatch(value)) and (resource := _resource(kind))
    }
    if found:
        amounts = {resource: most for resource, (most, _) in found.items()}
        used = {resource: in_use for resource, (_, in_use) in found.items()}
        yield replace(scope, title=f"{name} of {scope.title}", amounts=amounts, used=used)


def _resource(kind: str) -> str:
    """dl2d's name of a kind of TRES; "" for kinds that it does not count, ``jobs`` where it is the number of jobs."""
    if kind.startswith("gres/"):
        return kind.removeprefix("gres/").lower()
    return {"": "jobs", "cpu": "cpu", "mem": "memory"}.get(kind, "")


class AssociationLimits:
    """The limits that hold for elastic jobs, asked for once a minute."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._limits: tuple[AssociationLimit, ...] = ()
        self._asked = -math.inf

    def growth_limits(self, jobs: Jobs, resources: Collection[str], now: float) -> Iterator[GrowthLimit]:
        """What the limits leave to elastic jobs besides their tasks that run.

        ``resources`` are the names of all there are: where no more jobs may run, nothing is left of any of them.
        """
        if not 0 <= now - self._asked < _ASK_SECONDS:
            self._asked = now
            answer = self._commands.run(*_ASK)
            if answer.status == 0:
                self._limits = tuple(_used_by_others(limit, jobs) for limit in parse_limits(answer.stdout))
            else:
                log.warning("limits of associations and QOS stay as they were", said=answer.stderr.strip()[:200])
        for limit in self._limits:
            if anchors := _anchors(limit, jobs):
                ours = _held(jobs, anchors)
                left = {name: most - limit.used[name] - ours.get(name, 0.0) for name, most in limit.amounts.items()}
                if left.pop("jobs", 1.0) <= 0:
                    left = dict.fromkeys(resources, 0.0)
                if left:
                    least = {name: max(0.0, amount) for name, amount in left.items()}
                    yield GrowthLimit(frozenset(anchors), least, f"Slurm's limit {limit.title}")


def _used_by_others(limit: AssociationLimit, jobs: Jobs) -> AssociationLimit:
    """The limit with what others than the tasks of elastic jobs use, by a listing of the same time."""
    ours = _held(jobs, _anchors(limit, jobs))
    return replace(limit, used={name: max(0.0, used - ours.get(name, 0.0)) for name, used in limit.used.items()})


def _anchors(limit: AssociationLimit, jobs: Jobs) -> set[str]:
    """Ids of the jobs, no tasks, for which a limit holds."""
    found = ((job.array_id or job.handle, job.user) for job in jobs.jobs if not job.tag)
    return {job for job, user in found if job in jobs.options and limit.holds_for(jobs.options[job], user)}


def _held(jobs: Jobs, anchors: Collection[str]) -> dict[str, float]:
    """What the running tasks of anchors hold together."""
    rooms = [room for anchor, room in jobs.tasks if anchor in anchors]
    return {**Resources.total(rooms).as_dict(), "jobs": float(len(rooms))}
