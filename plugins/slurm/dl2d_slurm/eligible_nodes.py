"""Which nodes the tasks of a job may use: by partition, features, excluded nodes and reservations."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from dl2d.core.resource_manager import EligibleNodes
from dl2d_slurm.output_fields import hosts
from dl2d_slurm.partitions import Partition
from dl2d_slurm.reservations import Reservation
from dl2d_slurm.sbatch_options import AnchorOptions

_TOKEN: Final = re.compile(r"\s*([&|,()\[\]]|[^&|,()\[\]\s]+)")
_MAX_NAMES = 5


class Eligibility:
    """Finds the nodes of one job after the other. Jobs with the same options share one answer."""

    def __init__(
        self,
        nodes: Collection[str],
        partitions: Mapping[str, Partition],
        features: Mapping[str, frozenset[str]],
        reservations: Collection[Reservation],
        at: float,
    ) -> None:
        self._all = frozenset(nodes)
        self._partitions = partitions
        self._features = features
        self._reservations = reservations
        self._at = at
        self._found: dict[tuple[object, ...], EligibleNodes | None] = {}

    def of(self, job: AnchorOptions, limit: float | None = None) -> EligibleNodes | None:
        """The nodes that a job, or the tasks of one, may use; None for all.

        They end with the job, and at their own time limit: ``limit`` in seconds, or the largest that its partitions
        allow.
        """
        limits = [self._partitions[name].max_seconds for name in job.partition.split(",") if name in self._partitions]
        most = max((math.inf if each is None else each for each in limits), default=math.inf)
        end = min(job.ends or math.inf, self._at + min(most, math.inf if limit is None else limit))
        keeping_out = tuple(
            each for each in self._reservations if each.name not in job.reservations and each.keeps_out(self._at, end)
        )
        like = job.partition, job.features, job.exclude, job.reservation, keeping_out
        if like not in self._found:
            self._found[like] = self._find(job, keeping_out)
        return self._found[like]

    def _find(self, job: AnchorOptions, keeping_out: Iterable[Reservation]) -> EligibleNodes | None:
        left, reasons = self._all, list[str]()

        def restrict(nodes: frozenset[str], reason: str) -> None:
            nonlocal left
            if left - nodes:
                left &= nodes
                reasons.append(reason)

        names = [name for name in job.partition.split(",") if name in self._partitions]
        if names:
            up = [self._partitions[name] for name in names if not self._partitions[name].down]
            down = [f" ({name} is {self._partitions[name].down})" for name in names if self._partitions[name].down]
            restrict(frozenset[str]().union(*(each.nodes for each in up)), f"partition {job.partition}{''.join(down)}")
        if job.exclude:
            restrict(self._all - frozenset(hosts(job.exclude)), f"not {job.exclude}, which the job excludes")
        if job.features:
            meets = {name for name in left if has_features(self._features.get(name, frozenset()), job.features)}
            restrict(frozenset(meets), f"constraint {job.features}")
        own = [each for each in self._reservations if each.name in job.reservations]
        if own and not any(each.flexible for each in own):
            active = [each for each in own if each.active(self._at)]
            restrict(frozenset[str]().union(*(each.nodes for each in active)), f"reservation {job.reservation}")
        for each in keeping_out:
            restrict(self._all - each.nodes, f"not those of reservation {each.name}")
        return EligibleNodes(left, _joined(reasons)) if reasons else None


def _joined(reasons: Collection[str]) -> str:
    shown = list(reasons)[:_MAX_NAMES]
    more = f"; and {len(reasons) - _MAX_NAMES} other reasons" if len(reasons) > _MAX_NAMES else ""
    return "; ".join(shown) + more


def has_features(features: Collection[str], expression: str) -> bool:
    """Whether a node with these features meets an expression of ``--constraint``.

    Counts (``a*2``) and brackets, which are about several nodes, are taken as what each node needs. True where the
    expression cannot be read: Slurm decides.
    """
    tokens: list[str] = _TOKEN.findall(expression)
    met, rest = _any_of(tokens, features)
    return met if not rest else True


def _any_of(tokens: list[str], features: Collection[str]) -> tuple[bool, list[str]]:
    met, rest = _all_of(tokens, features)
    while rest[:1] == ["|"]:
        other, rest = _all_of(rest[1:], features)
        met = met or other
    return met, rest


def _all_of(tokens: list[str], features: Collection[str]) -> tuple[bool, list[str]]:
    met, rest = _term(tokens, features)
    while rest[:1] in (["&"], [","]):
        other, rest = _term(rest[1:], features)
        met = met and other
    return met, rest


def _term(tokens: list[str], features: Collection[str]) -> tuple[bool, list[str]]:
    if not tokens:
        return True, ["?"]
    first, *rest = tokens
    if first in ("(", "["):
        met, rest = _any_of(rest, features)
        closed = rest[:1] in ([")"], ["]"])
        rest = rest[1:] if closed else ["?"]
        # ``[a|b]*2``
        return met, rest[1:] if rest and rest[0].startswith("*") else rest
    if first in ("&", "|", ",", ")", "]"):
        return True, ["?"]
    return first.partition("*")[0] in features, rest
