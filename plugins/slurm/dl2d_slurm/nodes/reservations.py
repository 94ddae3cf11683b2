"""Reservations: which nodes they keep for their own jobs, and when.

A ``MAGNETIC`` reservation has, besides jobs that ask for it, all jobs of its users and accounts; these may also run
elsewhere. squeue shows it for each that has started in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog
from msgspec import structs

from dl2d.core.cluster import Node, NodeState
from dl2d.core.errors import ResourceManagerError
from dl2d.core.resource_manager import Claim
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_slurm.commands.commands import Commands
from dl2d_slurm.commands.squeue_and_sinfo_records import TIMES_AS_SECONDS
from dl2d_slurm.commands.values_in_command_output import (
    MAX_ADMIN_LIST,
    count,
    hosts,
    name_or_empty,
    timestamp,
    value_or_empty,
)
from dl2d_slurm.nodes.sinfo_nodes import Nodes
from dl2d_slurm.submission.sbatch_options import AnchorOptions

log = structlog.get_logger(__name__)

#: How long before a reservation begins elastic jobs leave its nodes.
LEAD_SECONDS = 600.0
#: How often reservations are asked for while there are none.
RESERVATIONS_SECONDS = 60.0
_FIELD = re.compile(r"(?:^|\s)(ReservationName|StartTime|EndTime|Nodes|Flags|TRES|Users|Accounts|Groups|QOS)=(\S*)")
_CPUS = re.compile(r"(?:^|,)cpu=([^,]+)")


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation of whole nodes."""

    name: str
    nodes: frozenset[str]
    #: When it begins and ends, seconds since 1970.
    start: int
    end: int
    #: Its jobs may use other nodes as well.
    flexible: bool = False
    magnetic: bool = False
    #: It never begins, as its start is always the same time ahead: its nodes take jobs that end before then.
    floating: bool = False
    #: Names of those who may use it, or, with a minus, may not; all if empty.
    users: frozenset[str] = frozenset()
    accounts: frozenset[str] = frozenset()

    def attracts(self, user: str, account: str) -> bool:
        """Whether it is magnetic, and jobs of a user in an account are among its own."""
        return self.magnetic and _allows(self.users, user) and _allows(self.accounts, account)

    def active(self, at: float) -> bool:
        """Whether its own jobs may start at this time."""
        return self.start <= at < self.end

    def keeps_out(self, start: float, end: float) -> bool:
        """Whether a job of this time that is not in the reservation may not use its nodes."""
        return start < self.end and self.start < end


def _allows(names: Collection[str], name: str) -> bool:
    without = f"-{name}" not in names and all(each.startswith("-") for each in names)
    return name in names or without


class KnownReservations:
    """The reservations: asked for with each listing while there are any, else once a minute."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._known: Sequence[Reservation] = ()
        self._asked = -math.inf

    def at(self, now: float, capacities: Mapping[str, Resources]) -> Sequence[Reservation]:
        """The reservations as they are known at ``now``, seconds since 1970, given each node's capacity."""
        if not self._known and 0 <= now - self._asked < RESERVATIONS_SECONDS:
            return self._known
        try:
            text = self._commands.ask("scontrol", "--oneliner", "show", "reservation", more=TIMES_AS_SECONDS)
        except ResourceManagerError as error:
            log.warning("cannot read reservations; the last ones stay in use", error=str(error))
        else:
            cpus = {name: capacity.get("cpu") for name, capacity in capacities.items()}
            self._known, self._asked = parse_reservations(text, cpus), now
        return self._known


def parse_reservations(text: str, cpus: Mapping[str, float]) -> tuple[Reservation, ...]:
    """Read the answer of ``scontrol --oneliner show reservation``; ``cpus`` are those of each node.

    Left out are those that keep nobody from using a node: of some of the CPUs of their nodes, and of licences alone.
    So are magnetic ones of groups or QOS, since squeue does not say who is in a group.
    """
    return tuple(_parsed(text.splitlines(), cpus))


def _parsed(lines: Iterable[str], cpus: Mapping[str, float]) -> Iterator[Reservation]:
    for line in lines:
        fields = dict(_FIELD.findall(line))
        nodes = frozenset(hosts(value_or_empty(fields.get("Nodes", "")), MAX_ADMIN_LIST))
        flags = fields.get("Flags", "").split(",")
        reserved = _CPUS.search(fields.get("TRES", ""))
        whole = reserved is None or (count(reserved[1]) or 0) >= sum(cpus.get(node, 0) for node in nodes)
        magnetic = "MAGNETIC" in flags
        of_others = any(value_or_empty(fields.get(name, "")) for name in ("Groups", "QOS"))
        if fields.get("ReservationName") and nodes and whole and not (magnetic and of_others):
            users, accounts = (_names(fields.get(name, "")) for name in ("Users", "Accounts"))
            yield Reservation(
                fields["ReservationName"], nodes, timestamp(fields.get("StartTime", "")),
                timestamp(fields.get("EndTime", "")), flexible="FLEX" in flags, magnetic=magnetic,
                floating="TIME_FLOAT" in flags, users=users, accounts=accounts,
            )  # fmt: skip


def _names(text: str) -> frozenset[str]:
    return frozenset(name for name in name_or_empty(text).split(",") if name)


def without_magnetic(options: AnchorOptions, magnetic: Collection[str]) -> AnchorOptions:
    """The options of a job without the reservations that attract its tasks, too: it need not have asked for them."""
    left = ",".join(name for name in options.reservations if name not in magnetic)
    return options if left == options.reservation else structs.replace(options, reservation=left)


def with_reserved(
    nodes: Nodes, reservations: Iterable[Reservation], jobs: Iterable[AnchorOptions], at: float
) -> tuple[Node, ...]:
    """The nodes, of which those that are idle and reserved for one of these jobs, or magnetic, take tasks."""
    names = {name for job in jobs for name in job.reservations}
    own = (each for each in reservations if (each.magnetic or each.name in names) and each.active(at))
    usable = {node for each in own for node in each.nodes}
    return tuple(
        structs.replace(node, state=NodeState.UP, remark="") if node.name in usable & nodes.reserved else node
        for node in nodes.nodes
    )


def reservation_claims(
    reservations: Iterable[Reservation], jobs: Mapping[str, tuple[str, AnchorOptions]], at: float
) -> Iterator[Claim]:
    """A standing claim for the nodes of each reservation that has begun or begins soon, so that they are empty in time.

    A floating one never begins, so there is none for it. ``jobs`` are users and options of anchors by handle: tasks of
    a job in a reservation that has begun stay, and in a flexible one also before.
    """
    for each in reservations:
        if at < each.end and each.start <= at + LEAD_SECONDS and not each.floating:
            members = frozenset(
                handle
                for handle, (user, options) in jobs.items()
                if each.name in options.reservations or each.attracts(user, options.account)
            )
            yield Claim(
                handle=f"reservation {each.name}", user="", priority=-1, nodes=len(each.nodes), demand=NO_RESOURCES,
                whole=True, eligible=each.nodes, required=each.nodes, standing=True,
                members=members if each.flexible or each.active(at) else None,
            )  # fmt: skip
