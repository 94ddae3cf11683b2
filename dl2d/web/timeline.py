"""The timeline of a cluster, allocation over time per job: as records, and as a page that needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_TEMPLATES = Path(__file__).parent / "templates"

# The picture's measures, in SVG units.
_WIDTH, _LEFT, _RIGHT = 1120.0, 150.0, 24.0
_LANE, _GAP, _TOTAL = 132.0, 26.0, 96.0
_TOP, _BOTTOM = 14.0, 34.0
_TICKS = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800, 3600)
_MOST_TICKS = 12


@dataclass(frozen=True, slots=True)
class Step:
    """From ``at`` (seconds since the beginning) on there were so many."""

    at: float
    workers: int
    ps: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at one moment, with a sentence about it."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One job."""

    name: str
    #: One line under the name.
    about: str
    #: Seconds since the beginning.
    arrived: float
    ended: float
    #: How it ended: ``finished``, ``failed``, ...
    end: str
    #: Allocation that trained, ascending in time; the last one lasts until the end.
    trained: tuple[Step, ...]
    #: Allocation that was decided.
    decided: tuple[Step, ...]
    resizes: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All lanes, on one axis of time."""

    title: str
    subtitle: str
    seconds: float
    lanes: tuple[Lane, ...]

    @property
    def most_workers(self) -> int:
        """Height of the upper half of every lane."""
        return max([1, *(step.workers for lane in self.lanes for step in lane.trained + lane.decided)])

    @property
    def most_ps(self) -> int:
        """Height of the lower half of every lane."""
        return max([1, *(step.ps for lane in self.lanes for step in lane.trained + lane.decided)])

    def totals(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """Workers of each lane from each moment at which one of them changed."""
        moments = sorted({0.0, *(step.at for lane in self.lanes for step in lane.trained), *_ends(self.lanes)})
        return tuple((at, tuple(_workers(lane, at) for lane in self.lanes)) for at in moments)


def ticks(seconds: float) -> list[int]:
    """Round moments for an axis of so many seconds, at most a dozen."""
    step = next((tick for tick in _TICKS if seconds / tick <= _MOST_TICKS), _TICKS[-1])
    return list(range(0, int(seconds) + 1, step))


def render_html(timeline: Timeline, facts: Sequence[tuple[str, str]], jobs: Sequence[Mapping[str, object]]) -> str:
    """The page.

    Parameters
    ----------
    facts
        Headings and values that stand above the picture.
    jobs
        Rows of the table below it; all have the same keys, which are its headings.
    """
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("timeline.html").render(
        timeline=timeline, facts=facts, jobs=jobs, picture=_Picture(timeline)
    )


@dataclass(frozen=True, slots=True)
class _Bar:
    """A stretch of constant allocation."""

    x: float
    y: float
    width: float
    height: float
    text: str


class _Picture:
    """Where everything stands; the template only writes it down."""

    width = _WIDTH
    left = _LEFT
    right = _WIDTH - _RIGHT

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._unit = _LANE / (timeline.most_workers + timeline.most_ps + 1)
        count = len(timeline.lanes)
        self.total_top = _TOP + count * (_LANE + _GAP)
        self.total_base = self.total_top + _TOTAL
        self.bottom = self.total_base
        self.height = self.bottom + _BOTTOM
        self.most = max([1, *(sum(parts) for _, parts in timeline.totals())])
        self.ticks = [(self.x(tick), f"{tick} s") for tick in ticks(timeline.seconds)]

    def x(self, at: float) -> float:
        """Abscissa of a moment."""
        share = min(max(at / self._timeline.seconds, 0.0), 1.0) if self._timeline.seconds else 0.0
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 2)

    def base(self, index: int) -> float:
        """Ordinate of a lane's zero line: workers stand on it, parameter servers hang from it."""
        return round(_TOP + index * (_LANE + _GAP) + self._unit * (self._timeline.most_workers + 0.5), 2)

    def bars(self, index: int, *, ps: bool) -> list[_Bar]:
        """A lane's stretches of workers, or of parameter servers."""
        lane, base = self._timeline.lanes[index], self.base(index)
        bars = []
        for begin, end, step in _stretches(lane.trained, lane.ended):
            count = step.ps if ps else step.workers
            if count:
                height = round(count * self._unit, 2)
                text = f"{lane.name}: {step.workers} workers, {step.ps} PSs from {begin:.1f} s to {end:.1f} s"
                y = base if ps else round(base - height, 2)
                bars.append(_Bar(self.x(begin), y, round(self.x(end) - self.x(begin), 2), height, text))
        return bars

    def decided(self, index: int) -> str:
        """Path of the decided number of workers."""
        lane, base = self._timeline.lanes[index], self.base(index)
        parts: list[str] = []
        for begin, end, step in _stretches(lane.decided, lane.ended):
            y = round(base - step.workers * self._unit, 2)
            parts.append(f"{'L' if parts else 'M'}{self.x(begin)} {y}H{self.x(end)}")
        return "".join(parts)

    def scale(self, index: int) -> list[tuple[float, str]]:
        """Ordinates of a lane's numbers."""
        base, timeline = self.base(index), self._timeline
        up = [(round(base - count * self._unit, 2), str(count)) for count in range(timeline.most_workers + 1)]
        return up + [(round(base + count * self._unit, 2), str(count)) for count in range(1, timeline.most_ps + 1)]

    def resizes(self) -> list[tuple[str, Mark]]:
        """All resizes in the order in which they happened, with their jobs' names."""
        found = [(lane.name, mark) for lane in self._timeline.lanes for mark in lane.resizes]
        return sorted(found, key=lambda item: item[1].at)

    def stack(self) -> list[tuple[int, _Bar]]:
        """The workers of all lanes on one another: lane number and stretch."""
        totals = self._timeline.totals()
        unit = _TOTAL / self.most
        found = []
        for number, (at, parts) in enumerate(totals):
            end = totals[number + 1][0] if number + 1 < len(totals) else self._timeline.seconds
            below = 0
            for index, count in enumerate(parts):
                if count and end > at:
                    below += count
                    name = self._timeline.lanes[index].name
                    text = f"{name}: {count} of {sum(parts)} workers from {at:.1f} s to {end:.1f} s"
                    y, width = round(self.total_base - below * unit, 2), round(self.x(end) - self.x(at), 2)
                    found.append((index, _Bar(self.x(at), y, width, round(count * unit, 2), text)))
        return found


def _stretches(steps: Sequence[Step], end: float) -> list[tuple[float, float, Step]]:
    ends = [*(step.at for step in steps[1:]), end]
    return [(step.at, until, step) for step, until in zip(steps, ends, strict=False) if until > step.at]


def _ends(lanes: Sequence[Lane]) -> list[float]:
    return [lane.ended for lane in lanes]


def _workers(lane: Lane, at: float) -> int:
    if at >= lane.ended:
        return 0
    return next((step.workers for step in reversed(lane.trained) if step.at <= at), 0)
