"""What was measured on this cluster that is news to a checkpoint."""

from __future__ import annotations

from typing import Final

import numpy as np

from dl2d.throughput.observations import JOBS, SPEED, TIMES, Bools, Floats, Table

#: A speed within this part of the one that was expected is no news.
_EXPECTED: Final = 0.05
#: Speeds count as the same within this part.
_ALIKE: Final = 0.02
#: Jobs beyond which it does not matter how many showed a speed.
_MANY: Final = 3.0


def news(measured: Table, expected: Floats) -> Table:
    """Points that are not as expected; samples per second of each, shape (n,), 0 where nothing is expected."""
    return measured.some(~_near(measured.rows[:, SPEED], expected, _EXPECTED))


def merged(known: Table, measured: Table) -> Table:
    """What is known and what was measured, which counts at sizes that both have unless it is much the same.

    So that a belief need not be worked out anew for nothing, means are rounded to 2 % and counts to powers of two.
    """
    kinds = tuple(sorted({*known.kinds, *measured.kinds}))
    known, measured = known.among(kinds), measured.among(kinds)
    places, there = known.find(measured)
    rows, said = known.rows[:, : JOBS + 1].copy(), _rounded(measured.rows)
    other = there.copy()
    before, now = known.rows[places[there], SPEED], measured.rows[there, SPEED]
    other[there] = (before != now) & ~_near(before, now, _ALIKE)
    rows[places[other]] = said[other]
    new = ~there
    ends = known.ends + np.bincount(measured.kind_of[new], minlength=len(kinds)).cumsum()
    return Table(kinds, ends, np.insert(rows, places[new], said[new], axis=0))


def _near(one: Floats, other: Floats, far: float) -> Bools:
    """Whether speeds, none of them 0, are less than that apart, as a logarithm."""
    moves = (one > 0) & (other > 0)
    near: Bools = moves & (np.abs(np.log(np.divide(one, other, where=moves, out=np.ones_like(one)))) < far)
    return near


def _rounded(rows: Floats) -> Floats:
    said = rows[:, : JOBS + 1].copy()
    speeds = said[:, SPEED]
    logs = np.log(speeds, where=speeds > 0, out=np.zeros_like(speeds))
    said[:, SPEED] = np.where(speeds > 0, np.exp(np.round(logs / _ALIKE) * _ALIKE), speeds)
    _, exponents = np.frexp(said[:, TIMES])
    said[:, TIMES] = np.where(said[:, TIMES] > 0, np.ldexp(1.0, exponents - 1), 0.0)
    np.minimum(said[:, JOBS], _MANY, out=said[:, JOBS])
    return said
