"""Rules by which a site says which jobs of its own scheduler train, and the static jobs that these are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from dl2d.core.input_validation import NAME, Number, Record, Text, Whole
from dl2d.core.jobs import Owner
from dl2d.core.resource_manager import StaticJob
from dl2d.core.resources import Resources

#: Pattern of what ``size`` names: a resource, or the resource manager's word for a task.
SIZE = r"[a-z][a-z0-9_.:/-]{0,63}"
_MAX_TASKS = 10_000
_MAX_HOURS = 8760.0
_HOUR = 3600.0

Words = Annotated[str, Text(200, expected="some text (quote it in YAML)")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticJobRule(Record):
    """Jobs that count as training one type of model; a resource manager's rules add by what they are chosen."""

    #: Pattern of the name, as in a shell (``bert-*``); ``*`` takes any.
    name: Words = "*"
    #: Type of the model, as in ``jobs.models``.
    model: Annotated[str, Text(128, NAME, "a type of model such as bert")]
    #: So many of the workers are parameter servers; 0: the workers exchange gradients among themselves.
    ps: Annotated[int, Whole(0, _MAX_TASKS)] = 0
    #: Fewest workers and parameter servers together.
    least: Annotated[int, Whole(1, _MAX_TASKS)] = 2
    #: Length of a job of which no time limit is known, in hours.
    hours: Annotated[float, Number(_MAX_HOURS, least=0.01)] = 24.0

    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    def static_job(
        self, name: str, owner: Owner, count: int, held: Resources, nodes: Sequence[str], *, limit: float | None = None,
        started: float, known: bool = False,
    ) -> StaticJob | None:  # fmt: skip
        """What a job is by this rule; None if it has too few or too many tasks.

        Parameters
        ----------
        count
            Number of workers and parameter servers.
        held
            All that the job holds, or asks for while it waits.
        nodes
            Its nodes, over which its tasks are spread; empty if it has not run.
        limit
            Its time limit in seconds; None for none.
        started
            Seconds since 1970; 0 for a job that has not run.
        known
            It had enough tasks before, and may have too few, or none, now.
        """
        if (count < max(self.least, self.ps + 1) and not known) or count > _MAX_TASKS:
            return None
        return StaticJob(
            name="".join(char if char.isprintable() else "?" for char in name)[:128].strip() or self.model,
            model=self.model,
            owner=owner,
            workers=max(count - self.ps, 0),
            ps=min(count, self.ps),
            # Rounded down: all of them together fit where the job does.
            task=Resources(
                tuple((name, part) for name, amount in held.thousandths if (part := amount // max(count, 1)))
            ),
            nodes=spread(nodes, count),
            limit=limit or self.hours * _HOUR,
            started=started,
        )


def spread(nodes: Sequence[str], count: int) -> tuple[str, ...]:
    """Which node each of ``count`` tasks is on, if they are spread evenly and in order; empty without nodes."""
    return tuple(nodes[number * len(nodes) // count] for number in range(count)) if nodes else ()
