"""Learning-rate schedules: what the rate is multiplied by at each version. Plain validated data, as optimizers are."""

from __future__ import annotations

import math

from pslite.errors import SpecError
from pslite.job.message_base_class import WireRecord

_MAX_VALUE = 2**40


def _whole(name: str, value: int, least: int) -> None:
    if not least <= value <= _MAX_VALUE:
        raise SpecError(f"{name} is {value!r}: it must be a whole number from {least} to {_MAX_VALUE}")


def _part(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise SpecError(f"{name} is {value!r}: it must be a number from 0 to 1")


class _Warmed(WireRecord, kw_only=True):
    """The rate rises linearly from `warmup_begin` over the first `warmup` versions, or stays there (`warmup_flat`).

    What follows counts from the end of the warm-up, or with `counts_warmup` from version 0.
    """

    warmup: int = 0
    warmup_begin: float = 0.0
    warmup_flat: bool = False
    counts_warmup: bool = False

    def __post_init__(self) -> None:
        _whole(f"{type(self).__name__} warmup", self.warmup, 0)
        _part(f"{type(self).__name__} warmup_begin", self.warmup_begin)

    def factor(self, version: int) -> float:
        """Return what the rate is multiplied by in the step from `version` to the next."""
        if version + 1 < self.warmup:
            rise = 0.0 if self.warmup_flat else (version + 1) / self.warmup
            return self.warmup_begin + (1.0 - self.warmup_begin) * rise
        if self.counts_warmup:
            return self._after(version)
        return self._after(version - self.warmup) if version >= self.warmup else 1.0

    def _after(self, version: int) -> float:  # noqa: ARG002
        return 1.0


class Constant(_Warmed, tag="constant"):
    """Stays as it is."""


class StepDecay(_Warmed, tag="step"):
    """Is multiplied by `by` after every `every` versions (torch's StepLR, stepped once a version), down to `floor`."""

    every: int
    by: float = 0.1
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("StepDecay every", self.every, 1)
        _part("StepDecay by", self.by)
        _part("StepDecay floor", self.floor)

    def _after(self, version: int) -> float:
        return max(self.floor, float(self.by ** (version // self.every)))


class Milestones(_Warmed, tag="milestones"):
    """Is multiplied by `by` at each version in `at` (torch's MultiStepLR)."""

    at: tuple[int, ...]
    by: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for place in self.at:
            _whole("Milestones at", place, 0)
        _part("Milestones by", self.by)

    def _after(self, version: int) -> float:
        return float(self.by ** sum(version >= place for place in self.at))


class _Falling(_Warmed):
    """Falls to `floor` in `over` versions, and stays there.

    `begin` is where on its way it begins: 0, or 1 as MXNet counts updates.
    """

    over: int
    floor: float = 0.0
    begin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        _whole(f"{name} over", self.over, 1)
        _whole(f"{name} begin", self.begin, 0)
        _part(f"{name} floor", self.floor)

    def _after(self, version: int) -> float:
        return self.floor + (1.0 - self.floor) * self._left(min((version + self.begin) / self.over, 1.0))

    def _left(self, gone: float) -> float:
        """Return what is left of the way from 1 to the floor when a share of the versions is gone."""
        raise NotImplementedError


class Cosine(_Falling, tag="cosine"):
    """Falls along half a cosine (Loshchilov and Hutter 2017)."""

    def _left(self, gone: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * gone))


class Polynomial(_Falling, tag="polynomial"):
    """Falls as (1 - t / over) ** power; power 1 is linear."""

    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.power) and self.power > 0):
            raise SpecError(f"Polynomial power is {self.power!r}: it must be a number above 0")

    def _left(self, gone: float) -> float:
        return float((1.0 - gone) ** self.power)


Schedule = Constant | StepDecay | Milestones | Cosine | Polynomial
