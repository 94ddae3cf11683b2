"""Which nodes the tasks of a job may use: by partition, features, excluded nodes and reservations."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from operator import and_
from typing import TypeAlias

from dl2d.core.resource_manager import EligibleNodes
from dl2d_slurm.commands.values_in_command_output import has_unread_list, hosts
from dl2d_slurm.nodes.reservations import Reservation
from dl2d_slurm.submission.partitions import Partition, largest_limit
from dl2d_slurm.submission.sbatch_options import AnchorOptions

_TOKEN = re.compile(r"\s*([&|,()\[\]]|[^&|,()\[\]\s]+)")
_MAX_REASONS = 5
_MAX_SHOWN = 200
#: Maximum length of an expression that is read, and the maximum number of its features, operators and parentheses.
_MAX_LENGTH = 4096
_MAX_TOKENS = 128
#: Alternatives, each of terms that a node has to meet together: features, or alternatives in parentheses.
_Alternatives: TypeAlias = "tuple[tuple[str | _Alternatives, ...], ...]"


@dataclass(eq=False)
class Eligibility:
    """Finds the nodes of one job after the other. Jobs with the same options share one answer."""

    nodes: Collection[str]
    partitions: Mapping[str, Partition]
    features: Mapping[str, frozenset[str]]
    reservations: Collection[Reservation]
    #: Seconds since 1970.
    at: float

    def __post_init__(self) -> None:
        self._all = frozenset(self.nodes)
        self._found: dict[tuple[object, ...], EligibleNodes | None] = {}

    def of(self, job: AnchorOptions, limit: float | None = None, user: str = "") -> EligibleNodes | None:
        """The nodes that a job of a user, or the tasks of one, may use; None for all.

        Assumes that tasks end at the job's own end or after the smaller of ``limit``, in seconds, and the largest
        partition limit, whichever is first.
        """
        most = largest_limit(job.partition.split(","), self.partitions)
        end = min(job.ends or math.inf, self.at + min(most, math.inf if limit is None else limit))
        keeping_out = tuple(
            each
            for each in self.reservations
            if each.name not in job.reservations
            and not (each.active(self.at) and each.attracts(user, job.account))
            and each.keeps_out(self.at, end)
        )
        key = job.partition, job.features, job.exclude, job.reservation, keeping_out
        if key not in self._found:
            self._found[key] = self._find(job, keeping_out)
        return self._found[key]

    @cached_property
    def _by_feature(self) -> Mapping[str, frozenset[str]]:
        """Nodes with each feature."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name in self._all:
            for feature in self.features.get(name, ()):
                found[feature].add(name)
        return {feature: frozenset(names) for feature, names in found.items()}

    def _find(self, job: AnchorOptions, keeping_out: Iterable[Reservation]) -> EligibleNodes | None:
        left, reasons = self._all, list[str]()

        def restrict(nodes: frozenset[str], reason: str) -> None:
            nonlocal left
            if left - nodes:
                left &= nodes
                reasons.append(reason)

        names = [name for name in job.partition.split(",") if name in self.partitions]
        if names:
            up = [self.partitions[name] for name in names if not self.partitions[name].down]
            down = [f" ({name} is {self.partitions[name].down})" for name in names if self.partitions[name].down]
            restrict(frozenset[str]().union(*(each.nodes for each in up)), f"partition {job.partition}{''.join(down)}")
        if has_unread_list(job.exclude):
            restrict(frozenset(), "the list of nodes that the job excludes is too long to be read")
        elif job.exclude:
            restrict(self._all - frozenset(hosts(job.exclude)), f"not {_cut(job.exclude)}, which the job excludes")
        read = _alternatives(job.features) if len(job.features) <= _MAX_LENGTH else None
        if read is not None:  # otherwise Slurm decides
            restrict(_meeting(read, self._by_feature), f"constraint {_cut(job.features)}")
        own = [each for each in self.reservations if each.name in job.reservations]
        if own and not any(each.flexible for each in own):
            active = [each for each in own if each.active(self.at)]
            restrict(frozenset[str]().union(*(each.nodes for each in active)), f"reservation {job.reservation}")
        for each in keeping_out:
            restrict(self._all - each.nodes, f"not those of reservation {each.name}")
        return EligibleNodes(left, _joined(reasons)) if reasons else None


def _cut(text: str) -> str:
    """What of a user's text is shown in a reason."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _joined(reasons: Collection[str]) -> str:
    shown = list(reasons)[:_MAX_REASONS]
    more = f"; and {len(reasons) - _MAX_REASONS} other reasons" if len(reasons) > _MAX_REASONS else ""
    return "; ".join(shown) + more


def _meeting(alternatives: _Alternatives, by_feature: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The nodes that meet an expression; whatever the number of nodes, no more set operations than it has terms."""
    found: frozenset[str] = frozenset()
    for terms in alternatives:
        found |= reduce(
            and_,
            (
                by_feature.get(term, frozenset()) if isinstance(term, str) else _meeting(term, by_feature)
                for term in terms
            ),
        )
    return found


# Every listing asks for the same ones again.
@lru_cache(4096)
def _alternatives(expression: str) -> _Alternatives | None:
    """An expression of ``--constraint``; None where it cannot be read, or has more than some 64 features.

    Counts (``a*2``) and brackets, which are about several nodes, are taken as what each node needs.
    """
    tokens: list[str] = _TOKEN.findall(expression)
    if len(tokens) > _MAX_TOKENS:
        return None
    tokens.reverse()
    try:
        found = _any_of(tokens)
    except IndexError:  # it ends too early
        return None
    return None if tokens or found is None else found


def _any_of(tokens: list[str]) -> _Alternatives | None:
    """Alternatives at the end of tokens in reverse order, which are taken off; None for what is none."""
    found: list[list[str | _Alternatives]] = [[]]
    while True:
        term = _term(tokens)
        if term is None:
            return None
        found[-1].append(term)
        if tokens[-1:] == ["|"]:
            found.append([])
        elif tokens[-1:] not in (["&"], [","]):
            return tuple(map(tuple, found))
        tokens.pop()


def _term(tokens: list[str]) -> str | _Alternatives | None:
    first = tokens.pop()
    if first in ("(", "["):
        inner = _any_of(tokens)
        if inner is None or tokens.pop() not in (")", "]"):
            return None
        if tokens and tokens[-1].startswith("*"):  # ``[a|b]*2``
            tokens.pop()
        return inner
    return None if first in ("&", "|", ",", ")", "]") else first.partition("*")[0]
