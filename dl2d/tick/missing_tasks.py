"""Tasks and anchors that the resource manager does not list: for how long, and in how many complete listings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dl2d.core.resource_manager import RmListing


class Absence(NamedTuple):
    """Absence of one task or anchor."""

    #: Number of consecutive complete listings that lack it.
    listings: int
    #: When the first of them came, seconds on a monotonic clock.
    since: float


@dataclass(frozen=True, slots=True)
class Missing:
    """Absences by tag. They are in memory only: after a restart of the daemon they are counted from the beginning."""

    absences: Mapping[str, Absence] = field(default_factory=dict)
    #: ``RmListing.at`` of the last listing that was counted.
    listed_at: float | None = None
    #: When that listing came, seconds on the monotonic clock.
    counted_at: float = 0.0

    def after(self, unlisted: Collection[str], listing: RmListing, now: float) -> Missing:
        """The absences after one more listing, which lacks these tags; ``now`` is in seconds on the monotonic clock.

        An incomplete listing, or one that the manager returns a second time, is not counted. But a tag that it contains
        is present, and the tag's count starts again.
        """
        counts = not listing.incomplete and listing.at != self.listed_at
        absences = {}
        for tag in unlisted:
            before = self.absences.get(tag)
            if counts:
                absences[tag] = Absence(1, now) if before is None else Absence(before.listings + 1, before.since)
            elif before is not None:
                absences[tag] = before
        return Missing(absences, listing.at if counts else self.listed_at, now if counts else self.counted_at)

    def seconds(self, tag: str) -> float:
        """How long a tag has been absent."""
        return self.counted_at - self.absences[tag].since

    def gone(self, listings: int, seconds: float) -> frozenset[str]:
        """Tags that at least so many listings in a row lack, over at least so many seconds."""
        return frozenset(
            tag
            for tag, absence in self.absences.items()
            if absence.listings >= listings and self.counted_at - absence.since >= seconds
        )
