"""What others found: figures to be set beside an experiment's own, with where they stand and why ours may differ."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dl2d.simulation.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """How one policy's average completion time compares with another's, as it was published."""

    policy: str
    against: str
    #: Name of the workload; empty for each of the experiment's.
    workload: str = ""
    #: Change of the average completion time in per cent: -44.1 is 44.1 % below. None: a figure without numbers.
    change: float | None = None
    #: In words.
    says: str
    #: Where it stands.
    source: str
    #: Why what is measured here may be another: workload, rules, what others' numbers are of.
    why: str
    #: As it is remembered or quoted: not compared with the publication's text.
    unchecked: bool = False


def parse_claim(
    given: object, index: int, policies: Collection[str], workloads: Collection[str], where: str
) -> Claim:  # fmt: skip
    """An entry of ``claims``. Raises ``WorkloadError``."""
    entry = Fields(given, where=where, prefix=f"claims[{index}].")
    made = Claim(
        policy=entry.choice("policy", policies),
        against=entry.choice("against", policies),
        workload=entry.choice("workload", workloads, "") if entry.has("workload") else "",
        change=entry.number("change", least=-100.0, most=1e6) if entry.has("change") else None,
        says=_line(entry, "says"),
        source=_line(entry, "source"),
        why=_line(entry, "why"),
        unchecked=entry.flag("unchecked"),
    )
    entry.refuse_rest()
    return made


def _line(entry: Fields, key: str) -> str:
    return " ".join(entry.prose(key, most=2000).split())


def describe_claim(claim: Claim) -> dict[str, Any]:
    """What ``parse_claim`` reads."""
    return {
        "policy": claim.policy,
        "against": claim.against,
        **({"workload": claim.workload} if claim.workload else {}),
        **({"change": claim.change} if claim.change is not None else {}),
        "says": claim.says,
        "source": claim.source,
        "why": claim.why,
        **({"unchecked": True} if claim.unchecked else {}),
    }
