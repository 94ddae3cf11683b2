"""Random numbers of a simulation: each belongs to a seed and to what it is for, whatever else is drawn."""

from __future__ import annotations

import math
from hashlib import blake2b
from statistics import NormalDist

_UNIT = 2.0**-53
_STANDARD = NormalDist()


class SeededRandom:
    """Random numbers of one seed. ``names`` say what a number is for: ``random.uniform("noise", job.id, slot)``."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def uniform(self, *names: str | int) -> float:
        """Uniform in (0, 1), the middles of 2^53 equal parts."""
        # Ids and node names hold no slash but as part of a name, which stands last but for numbers.
        key = "/".join(map(str, (self._seed, *names))).encode()
        return (int.from_bytes(blake2b(key, digest_size=8).digest()[:7], "big") >> 3) * _UNIT + _UNIT / 2

    def between(self, low: float, high: float, *names: str | int) -> float:
        """Uniform between two bounds."""
        return low + (high - low) * self.uniform(*names)

    def normal(self, *names: str | int) -> float:
        """Standard normal."""
        return _STANDARD.inv_cdf(self.uniform(*names))

    def exponential(self, mean: float, *names: str | int) -> float:
        """Exponential."""
        return -mean * math.log(self.uniform(*names))
