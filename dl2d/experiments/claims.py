"""What others found: figures to be set beside an experiment's own, with where they stand and why ours may differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dl2d.core.validation import ONE_LINE, Flag, Number, Record, Text

Sentence = Annotated[str, Text(2000), ONE_LINE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Record):
    """How one policy's average completion time compares with another's, as it was published."""

    policy: str
    against: str
    #: Name of the workload; empty for each of the experiment's.
    workload: str = ""
    #: Change of the average completion time in per cent: -44.1 is 44.1 % below. None: a figure without numbers.
    change: Annotated[float, Number(1e6, least=-100.0)] | None = None
    #: In words.
    says: Sentence
    #: Where it stands.
    source: Sentence
    #: Why what is measured here may be another: workload, rules, what others' numbers are of.
    why: Sentence
    #: As it is remembered or quoted: not compared with the publication's text.
    unchecked: Flag = False
