"""Limits of associations and qualities of service on what their jobs have together, as slurmctld knows them.

Where several limits of one kind are on a resource, a job is checked against those of the first that has one: the
QOS of its partition and its own (in the order that ``qos_precedence`` has), its associations. So a QOS may allow more
than the account of its jobs.

Limits on the number of jobs that are submitted count those that wait, too. A part of these is left to jobs that users
submit themselves.

Maximum time limits of jobs (``MaxWall``) leave nothing or all to a job; they are told by themselves.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from dl2d.core.backoff_after_failed_starts import doubled
from dl2d.core.cluster import parse_tag
from dl2d.core.errors import ResourceManagerError
from dl2d.core.resource_manager import TASKS, GrowthLimit, RmJobState
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_slurm.commands.commands import Commands
from dl2d_slurm.commands.squeue_and_sinfo_records import SHOW_CONFIG, shown_fields
from dl2d_slurm.jobs.job_reason_codes import Bound
from dl2d_slurm.jobs.squeue_jobs import Jobs, limit_scope
from dl2d_slurm.jobs.waiting_jobs import handle_for_users
from dl2d_slurm.limits.qos_precedence import KnownQosPrecedence, QosPrecedence
from dl2d_slurm.submission.sbatch_options import NO_OPTIONS, AnchorOptions

log = structlog.get_logger(__name__)

#: Prints one record on each line, with limits and use: ``GrpTRES=cpu=6(4),mem=N(400)``.
ASK_LIMITS = ("scontrol", "--oneliner", "show", "assoc_mgr", "flags=assoc,qos")
#: At sites with thousands of users the answer has megabytes.
_ASK_SECONDS = 60.0
#: After each failure in a row the time to the next question is doubled, up to this.
_MAX_ASK_SECONDS = 3600.0
#: After so many the daemon's health says how old the limits are.
_MIN_FAILURES_REPORTED = 2
#: How long a listing waits for the answer.
_ANSWER_SECONDS = 10.0

#: User and his id in the record of an association, both empty in that of an account.
_USER = re.compile(r"^ClusterName=.*? UserName=([^\s(]*)(?:\((\d+)\))?(?=\s)")
_FIELD = re.compile(
    r"(?:^|\s)(ClusterName|Account|UserName|Partition|ParentAccount|QOS|(?:Grp|Max)(?:Submit)?Jobs|GrpTRES|MaxWallPJ|M(?:in|ax)TRESPJ)"
    r"=(\S*)"
)
#: Limits of each account or user in a quality of service: ``User Limits= alice(1000)={MaxJobsPU=5(2) ...} ...``.
_EACH = re.compile(r"(\S+)=\{([^}]*)\}")
_OF_EACH = re.compile(r"(?:^|\s)(MaxJobs|MaxSubmitJobs|MaxTRES)P([AU])=(\S*)")
#: What of accounts and QOS Slurm enforces, in its configuration.
_ENFORCED = re.compile(r"^AccountingStorageEnforce\s*=\s*(\S+)", re.MULTILINE)
#: What is limited, by part of the reason of jobs that wait; in others it is a generic resource.
_RESOURCES_IN_REASONS = {"Cpu": "cpu", "Mem": "memory", "Jobs": "jobs"}
#: Limits of associations in place of which those of a QOS apply, beside those of the same name.
_REPLACED = {f"{kind}Per{each}": kind for kind in ("MaxJobs", "MaxSubmitJobs") for each in ("User", "Account")}
#: What limits count beside resources: jobs that run, and all that have not ended.
_RUNNING = "jobs"
_SUBMITTED = "submitted"
#: The maximum time limit of each job, in minutes.
_MAX_WALL = "MaxWall"
_MINUTES = "minutes"
#: Part of a limit on submitted jobs that is left to jobs that users submit: a tenth, at most ten jobs.
_KEPT_FREE = 0.1
_MAX_KEPT_FREE = 10
#: The user of jobs, and the options that say with it which limits hold for them.
_Scope = tuple[str, AnchorOptions]
#: The places of limits in Slurm's order.
_OF_FIRST_QOS, _OF_SECOND_QOS, _OF_ASSOCIATION = range(3)
#: A limit, and how much of it is in use.
_LIMIT = re.compile(r"(\d{1,15})\((\d{1,15})\)")


@dataclass(frozen=True, slots=True)
class AssociationLimit:
    """One limit, and the jobs for which it holds."""

    #: For users: ``MaxTRESPerUser of QOS small for user alice``.
    title: str
    #: ``MaxTRESPerUser``.
    kind: str = ""
    #: Amounts that may be in use, and that are, by resource; ``jobs`` is the number of running jobs, and ``submitted``
    #: that of all that have not ended. ``minutes`` is the maximum time limit of each job, of which nothing is in use.
    amounts: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)
    #: It holds for jobs of all that are given here.
    qos: str = ""
    accounts: frozenset[str] = frozenset()
    user: str = ""
    partition: str = ""
    #: Partitions of which ``qos`` is the QOS: there it holds for jobs of any.
    qos_partitions: frozenset[str] = frozenset()
    #: Partitions in which the user has an association of its own in the account.
    other_partitions: frozenset[str] = frozenset()

    def holds_for(self, options: AnchorOptions, user: str) -> bool:
        """Whether it limits the tasks of an anchor with these options of this user."""
        partitions = options.partition.split(",")
        return (
            (self.qos in ("", options.qos) or not self.qos_partitions.isdisjoint(partitions))
            and (not self.accounts or options.account in self.accounts)
            and self.user in ("", user)
            and (not self.partition or self.partition in partitions)
            and not self.other_partitions.issuperset(partitions)
        )

    def place(self, options: AnchorOptions, precedence: QosPrecedence) -> int:
        """Its place in Slurm's order for a job with these options for which it holds; the first place is 0."""
        if not self.qos:
            return _OF_ASSOCIATION
        if precedence.own_is_first(options):
            return _OF_FIRST_QOS if self.qos == options.qos else _OF_SECOND_QOS
        return _OF_SECOND_QOS if self.qos_partitions.isdisjoint(options.partition.split(",")) else _OF_FIRST_QOS

    def is_reason(self, reason: str, resource: str) -> bool:
        """Whether a job to which it applies may wait for the resource in it, by its reason (``QOSGrpCpuLimit``)."""
        if resource == _SUBMITTED:
            return False  # a job that waits has been submitted
        of_each = "user" if self.user else "account" if self.accounts else ""
        if self.qos:
            kind = {"user": "PerUser", "account": "PerAccount"}.get(of_each, "QOSGrp")
        else:
            kind = "AssocMax" if self.kind == "MaxJobs" else "AssocGrp"
        named = next((name for part, name in _RESOURCES_IN_REASONS.items() if part in reason), "gres")
        return kind in reason and named == (resource if resource in _RESOURCES_IN_REASONS.values() else "gres")

    def counts(self, qos: str, partition: str) -> bool:
        """Whether a task job in this partition, of an anchor with this QOS for which it holds, counts."""
        of_qos = self.qos in ("", qos) or partition in self.qos_partitions
        return of_qos and self.partition in ("", partition) and partition not in self.other_partitions


def parse_limits(text: str, wanted: Collection[str] | None = None) -> tuple[AssociationLimit, ...]:
    """Read the answer of ``scontrol show assoc_mgr``; lines that are no record are left out.

    Of limits of single users, only those of the ``wanted`` ones are read where these are given: a site may have
    records of 100,000 users, of whom some have jobs.
    """
    lines = text.split("\n")
    users: dict[str, str] = {}
    chosen = []
    for line in lines:
        if match := _USER.match(line):
            user, uid = match.groups()
            if uid:
                users[uid] = user
            if not user or wanted is None or user in wanted:
                chosen.append(shown_fields(line, _FIELD))
    associations = [fields for fields in chosen if fields.keys() >= {"Account", "UserName"}]
    children: defaultdict[str, list[str]] = defaultdict(list)
    partitions: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for fields in associations:
        if not fields["UserName"]:
            children[fields.get("ParentAccount", "").partition("(")[0]].append(fields["Account"])
        elif fields.get("Partition"):
            partitions[fields["UserName"], fields["Account"]].add(fields["Partition"])
    found = [
        _with_scope(limit, fields, children, partitions) for fields in associations for limit in _of_association(fields)
    ]
    for line in lines:
        if line.startswith("QOS="):
            found += _of_qos(shown_fields(line, _FIELD), line, users, wanted)
    return tuple(found)


def parse_bounds(text: str) -> dict[tuple[str, Bound], str]:
    """What each job of a QOS has to demand at least, and at most, as users write it, from ``show assoc_mgr``."""
    found = {}
    for line in text.split("\n"):
        if line.startswith("QOS="):
            fields = shown_fields(line, _FIELD)
            for name, bound in (("MinTRESPJ", Bound.LEAST), ("MaxTRESPJ", Bound.MOST)):
                parts = (part.rpartition("=") for part in fields.get(name, "").split(","))
                amounts = [f"{resource}:{value}" for kind, _, value in parts if kind and (resource := _resource(kind))]
                if amounts:
                    found[fields["QOS"].partition("(")[0], bound] = ",".join(amounts)
    return found


def enforces_limits(configuration: str) -> bool:
    """Whether Slurm enforces limits, by the answer of ``scontrol show config``; True if that does not say."""
    enforced = _ENFORCED.search(configuration)
    return enforced is None or not {"limits", "safe", "all"}.isdisjoint(enforced[1].split(","))


def _with_scope(
    limit: AssociationLimit,
    fields: Mapping[str, str],
    children: Mapping[str, Sequence[str]],
    partitions: Mapping[tuple[str, str], Collection[str]],
) -> AssociationLimit:
    """The limit of an association; that of an account holds in those below it, too.

    That of a user does not hold in partitions in which the user has another association in the account.
    """
    if not limit.user:
        return replace(limit, accounts=_below(fields["Account"], children))
    if limit.partition:
        return limit
    return replace(limit, other_partitions=frozenset(partitions.get((fields["UserName"], fields["Account"]), ())))


def _below(account: str, children: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """An account and all accounts below it."""
    found, new = {account}, [account]
    while new:
        new = [child for parent in new for child in children.get(parent, ()) if child not in found]
        found.update(new)
    return frozenset(found)


def _of_association(fields: Mapping[str, str]) -> Iterator[AssociationLimit]:
    user, account = fields["UserName"].partition("(")[0], fields["Account"]
    partition = fields.get("Partition", "")
    title = f"user {user} in account {account}" if user else f"account {account}"
    title += f" and partition {partition}" if partition else ""
    scope = AssociationLimit(title, accounts=frozenset((account,)), user=user, partition=partition)
    # MaxJobs of an account holds for each user, and users' own records repeat it.
    for name in ("GrpTRES", "GrpJobs", "GrpSubmitJobs", *(("MaxJobs", "MaxSubmitJobs") if user else ())):
        yield from _limits(name, fields.get(name, ""), scope)
    if user:
        yield from _max_wall(fields, scope)


def _of_qos(
    fields: Mapping[str, str], line: str, users: Mapping[str, str], wanted: Collection[str] | None
) -> Iterator[AssociationLimit]:
    qos = fields["QOS"].partition("(")[0]
    scope = AssociationLimit(f"QOS {qos}", qos=qos)
    for name in ("GrpTRES", "GrpJobs", "GrpSubmitJobs"):
        yield from _limits(name, fields.get(name, ""), scope)
    yield from _max_wall(fields, scope)
    _, _, tail = line.partition(" Account Limits=")
    for whose, limits in _EACH.findall(tail):
        name_or_uid, _, _ = whose.partition("(")
        # Releases before 23 have the number of a user alone.
        user = users.get(name_or_uid, name_or_uid)
        if wanted is not None and "PU=" in limits and user not in wanted:
            continue
        for kind, each, text in _OF_EACH.findall(limits):
            if each == "A":
                own = replace(scope, title=f"QOS {qos} for account {whose}", accounts=frozenset((whose,)))
                yield from _limits(f"{kind}PerAccount", text, own)
            else:
                own = replace(scope, title=f"QOS {qos} for user {user}", user=user)
                yield from _limits(f"{kind}PerUser", text, own)


def _max_wall(fields: Mapping[str, str], scope: AssociationLimit) -> Iterator[AssociationLimit]:
    """The maximum time limit of each job, if one is set; users' records repeat that of their account."""
    text = fields.get("MaxWallPJ", "")
    if text.isascii() and text.isdecimal() and len(text) <= 9:
        amounts, used = {_MINUTES: float(text)}, {_MINUTES: 0.0}
        yield replace(scope, title=f"{_MAX_WALL} of {scope.title}", kind=_MAX_WALL, amounts=amounts, used=used)


def _limits(name: str, text: str, scope: AssociationLimit) -> Iterator[AssociationLimit]:
    """The limit of a field, if one is set: ``cpu=6(4),mem=N(400)``, or ``5(2)`` for jobs."""
    parts = [part.rpartition("=") for part in text.split(",")]
    found = {
        resource: (float(match[1]), float(match[2]))
        for kind, _, value in parts
        if (match := _LIMIT.fullmatch(value)) and (resource := _SUBMITTED if "SubmitJobs" in name else _resource(kind))
    }
    if found:
        amounts = {resource: most for resource, (most, _) in found.items()}
        used = {resource: in_use for resource, (_, in_use) in found.items()}
        yield replace(scope, title=f"{name} of {scope.title}", kind=name, amounts=amounts, used=used)


def _resource(kind: str) -> str:
    """dl2d's name of a kind of TRES; "" for kinds that it does not count, ``jobs`` where it is the number of jobs."""
    if kind.startswith("gres/"):
        return kind.removeprefix("gres/").lower()
    return {"": _RUNNING, "cpu": "cpu", "mem": "memory"}.get(kind, "")


class AssociationLimits:
    """The limits that hold for elastic jobs, asked for once a minute; more rarely where Slurm does not tell."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._qos_precedence = KnownQosPrecedence(commands)
        #: By the user for whom they hold; "" for those that hold for several.
        self._limits: Mapping[str, Sequence[AssociationLimit]] = {}
        #: ``max_seconds`` of the jobs for which it was asked since.
        self._max_seconds: dict[_Scope, float] = {}
        self._applicable = _ApplicableLimits((), QosPrecedence())
        self._asked = -math.inf
        #: ``parse_bounds``.
        self.bounds: Mapping[tuple[str, Bound], str] = {}
        #: Failures in a row, and when Slurm answered last.
        self._failures = 0
        self._answered_at: float | None = None
        #: ``Jobs.others`` in the listing of that time.
        self._others: Mapping[tuple[str, AnchorOptions], tuple[Resources, int]] = {}

    def growth_limits(self, jobs: Jobs, resources: Collection[str], now: float) -> list[GrowthLimit]:
        """What the limits leave to elastic jobs besides their tasks that run, and which jobs wait for each.

        ``resources`` are the names of all there are: where no more jobs may run, nothing is left of any of them. Jobs
        of others that have started or ended since Slurm was asked count at once. A job waits in all limits that hold
        for it, if one of them is the reason for which Slurm says that it waits.
        """
        anchors = _Anchors(jobs)
        if not 0 <= now - self._asked < doubled(_ASK_SECONDS, self._failures, _MAX_ASK_SECONDS):
            self._asked = now
            self._ask(anchors, jobs, now)
        changed = self._changed_since(jobs)
        waiting: dict[tuple[str, AnchorOptions, str], list[str]] = defaultdict(list)
        for each in jobs.waiting_for_limits:
            waiting[each.claim.user, limit_scope(each.options), each.limit_reason].append(handle_for_users(each))
        found: list[GrowthLimit] = []
        #: Jobs whose reason is one of these limits: in these alone elastic jobs can make room.
        by_reason: set[str] = set()
        for user in ("", *anchors.users):
            for limit in self._limits.get(user, ()):
                if limit.kind == _MAX_WALL or not (members := anchors.of(limit)):
                    continue
                # Tasks to which another limit applies count in this one, too.
                held = anchors.held(limit)
                changes = [more for (of, scope), more in changed.items() if limit.holds_for(scope, of)]
                waits = [key for key in waiting if limit.holds_for(key[1], key[0])]
                #: What it leaves, by those to whom it applies, those who wait for it, and by what it is multiplied.
                parts: dict[tuple[tuple[_Scope, ...], frozenset[str], float], dict[str, float]] = defaultdict(dict)
                for name, most in limit.amounts.items():
                    factors = {
                        key: own for key in members if (own := self._applicable.factor(limit, name, key)) is not None
                    }
                    used = max(0.0, limit.used[name] + sum(more.get(name, 0.0) for more in changes))
                    for factor in sorted(set(factors.values())):
                        # What those with a smaller factor hold counts in the larger limit, too.
                        limited = tuple(key for key, each in factors.items() if each <= factor)
                        amount = max(0.0, _most(name, most, factor) - used - held.get(name, 0.0))
                        handles: set[str] = set()
                        for of, scope, reason in waits:
                            # Jobs that wait have been submitted.
                            if name != _SUBMITTED and self._applicable.factor(limit, name, (of, scope)) == factor:
                                handles.update(waiting[of, scope, reason])
                                by_reason.update(waiting[of, scope, reason] if limit.is_reason(reason, name) else ())
                        part = limited, frozenset(handles), factor
                        if name in (_RUNNING, _SUBMITTED):
                            parts[part] = dict.fromkeys(() if amount else resources, 0.0)
                        parts[part][TASKS if name in (_RUNNING, _SUBMITTED) else name] = amount
                # Whether Slurm accepts more tasks, of the part of a limit on submitted jobs that is left to users.
                accepts_more = _SUBMITTED in limit.amounts and (
                    limit.used[_SUBMITTED] + held[_SUBMITTED] + anchors.waiting_tasks(limit)
                    < limit.amounts[_SUBMITTED]
                    > _most(_SUBMITTED, limit.amounts[_SUBMITTED], 1.0)
                )
                for (limited, waiting_for_part, factor), left in parts.items():
                    title = f"Slurm's limit {limit.title}"
                    title += f" times {factor:g} (LimitFactor)" if factor != 1 else ""
                    title += f" ({', '.join(left)})" if len(parts) > 1 else ""
                    of_these = anchors.handles(anchor for key in limited for anchor in members[key])
                    found.append(
                        GrowthLimit(of_these, left, title, waiting=waiting_for_part, floors_may_exceed=accepts_more)
                    )
        return [replace(limit, waiting=limit.waiting & by_reason) for limit in found]

    def max_seconds(self, user: str, options: AnchorOptions) -> float:
        """The maximum time limit of a user's jobs with these options; infinite if there is none."""
        key = user, limit_scope(options)
        if key not in self._max_seconds:
            limits = (limit for whose in ("", user) for limit in self._limits.get(whose, ()) if limit.kind == _MAX_WALL)
            applied = (
                limit
                for limit in limits
                if limit.holds_for(key[1], user) and self._applicable.factor(limit, _MINUTES, key) is not None
            )
            self._max_seconds[key] = min((60.0 * limit.amounts[_MINUTES] for limit in applied), default=math.inf)
        return self._max_seconds[key]

    def _changed_since(self, jobs: Jobs) -> dict[tuple[str, AnchorOptions], dict[str, float]]:
        """How much more others hold than when Slurm was asked, by user and scope, and how many more jobs run.

        Nothing is concluded from a listing in which jobs may be missing.
        """
        changed: dict[tuple[str, AnchorOptions], dict[str, float]] = {}
        if jobs.unreadable:
            return changed
        for scope in jobs.others.keys() | self._others.keys():
            (now, jobs_now), (then, jobs_then) = (
                each.get(scope, (NO_RESOURCES, 0)) for each in (jobs.others, self._others)
            )
            if (now, jobs_now) != (then, jobs_then):
                names = now.as_dict().keys() | then.as_dict().keys()
                changed[scope] = {name: now.get(name) - then.get(name) for name in names}
                changed[scope][_RUNNING] = float(jobs_now - jobs_then)
        return changed

    def outdated(self, now: float) -> tuple[str, ...]:
        """That the limits are old, where Slurm has not told them twice in a row."""
        if self._failures < _MIN_FAILURES_REPORTED:
            return ()
        age = "not known" if self._answered_at is None else f"{(now - self._answered_at) / 60:.0f} minutes old"
        return (f"Slurm's limits of associations and QOS are {age}: scontrol show assoc_mgr fails; the log says why",)

    def _ask(self, anchors: _Anchors, jobs: Jobs, now: float) -> None:
        """Ask for the limits, which stay as they were where Slurm does not tell.

        Slurm keeps limits that it does not enforce: without ``limits`` in AccountingStorageEnforce there are none.
        """
        try:
            text = self._commands.ask(*ASK_LIMITS, seconds=_ANSWER_SECONDS)
            self.bounds = parse_bounds(text)
            found, precedence = parse_limits(text, anchors.users), QosPrecedence()
            if found and not enforces_limits(self._commands.ask(*SHOW_CONFIG, seconds=_ANSWER_SECONDS)):
                found = ()
            if found:
                precedence = self._qos_precedence.at(now, for_limits=any(limit.qos for limit in found))
                of_qos: defaultdict[str, set[str]] = defaultdict(set)
                for name, qos in precedence.of_partitions.items():
                    of_qos[qos].add(name)
                found = tuple(replace(limit, qos_partitions=frozenset(of_qos[limit.qos])) for limit in found)
        except ResourceManagerError as error:
            self._failures += 1
            log.warning("cannot read limits of associations and QOS; the last ones stay in use", said=str(error)[:200])
            return
        limits = defaultdict(list)
        for limit in found:
            # With what others than the tasks of elastic jobs use, by a listing of the same time.
            held = anchors.held(limit)
            held[_SUBMITTED] += anchors.waiting_tasks(limit)
            used = {name: max(0.0, used - held.get(name, 0.0)) for name, used in limit.used.items()}
            limits[limit.user].append(replace(limit, used=used))
        self._limits, self._failures = limits, 0
        self._applicable, self._max_seconds = _ApplicableLimits(found, precedence), {}
        self._answered_at, self._others = now, jobs.others


def _most(resource: str, most: float, factor: float) -> float:
    """How much of a resource elastic jobs and others together may have in a limit."""
    if resource == _SUBMITTED:
        return most - min(most * _KEPT_FREE // 1, _MAX_KEPT_FREE)
    return most * factor // 1


class _ApplicableLimits:
    """Which of the limits of a kind Slurm applies to a job: those of the QOS that come first, else of associations.

    What was found for jobs with equal options is kept, until Slurm is asked for the limits again.
    """

    def __init__(self, limits: Iterable[AssociationLimit], precedence: QosPrecedence) -> None:
        self._precedence = precedence
        #: Limits of QOS, by the user for whom they hold; "" for those that hold for several.
        self._of_qos: defaultdict[str, list[AssociationLimit]] = defaultdict(list)
        for limit in limits:
            if limit.qos:
                self._of_qos[limit.user].append(limit)
        #: For jobs, the first place of a limit of QOS by its kind and the resource.
        self._first: dict[_Scope, dict[tuple[str, str], int]] = {}

    def factor(self, limit: AssociationLimit, resource: str, key: _Scope) -> float | None:
        """Factor by which Slurm multiplies a limit for these jobs; None if it does not apply the limit to them."""
        user, options = key
        if key not in self._first:
            first = self._first[key] = {}
            for other in (*self._of_qos.get("", ()), *self._of_qos.get(user, ())):
                if other.holds_for(options, user):
                    for kind in (other.kind, _REPLACED.get(other.kind, "")):
                        for name in other.amounts:
                            place = first.get((kind, name), _OF_ASSOCIATION)
                            first[kind, name] = min(place, other.place(options, self._precedence))
        if limit.place(options, self._precedence) > self._first[key].get((limit.kind, resource), _OF_ASSOCIATION):
            return None
        return self._precedence.factor(options) if limit.kind == "GrpTRES" and not limit.qos else 1.0


class _Anchors:
    """Jobs of a listing that may be anchors, by user and the options that say which limits hold for them."""

    def __init__(self, jobs: Jobs) -> None:
        self._ids: dict[str, dict[AnchorOptions, list[str]]] = {}
        self._handles: dict[str, str] = {}
        for job in jobs.jobs:
            anchor = job.shown_id
            if anchor not in jobs.options:
                continue
            given = jobs.options[anchor]
            self._ids.setdefault(job.user, {}).setdefault(limit_scope(given), []).append(anchor)
            self._handles[anchor] = job.handle
        self._tasks: defaultdict[str, list[tuple[str, str, Resources]]] = defaultdict(list)
        for anchor, partition, room in jobs.tasks:
            self._tasks[anchor].append((jobs.options.get(anchor, NO_OPTIONS).qos, partition, room))
        #: The partitions of the tasks of each anchor that wait.
        self._waiting: defaultdict[str, list[str]] = defaultdict(list)
        for job in jobs.jobs:
            if job.state is RmJobState.PENDING and (tag := parse_tag(job.tag)) is not None:
                self._waiting[tag[0].id].append(jobs.options.get(job.shown_id, NO_OPTIONS).partition)

    @property
    def users(self) -> Collection[str]:
        """Names of their users."""
        return self._ids.keys()

    def of(self, limit: AssociationLimit) -> dict[_Scope, list[str]]:
        """Ids, as users know them, of those for which a limit holds."""
        users = (limit.user,) if limit.user else self._ids
        return {
            (user, scope): ids
            for user in users
            for scope, ids in self._ids.get(user, {}).items()
            if limit.holds_for(scope, user)
        }

    def handles(self, ids: Iterable[str]) -> frozenset[str]:
        """Handles of anchors."""
        return frozenset(self._handles[anchor] for anchor in ids)

    def held(self, limit: AssociationLimit) -> dict[str, float]:
        """What the running tasks of anchors that count for a limit hold together."""
        ids = (anchor for each in self.of(limit).values() for anchor in each)
        tasks = (task for anchor in ids if anchor in self._tasks for task in self._tasks[anchor])
        rooms = [room for qos, partition, room in tasks if limit.counts(qos, partition)]
        number = float(len(rooms))
        return {**Resources.total(rooms).as_dict(), _RUNNING: number, _SUBMITTED: number}

    def waiting_tasks(self, limit: AssociationLimit) -> int:
        """The number of tasks of anchors that wait and count for a limit."""
        return sum(
            any(limit.counts(scope.qos, partition) for partition in names.split(","))
            for (_, scope), ids in self.of(limit).items()
            for anchor in ids
            for names in self._waiting.get(anchor, ())
        )
