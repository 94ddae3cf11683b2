"""Generators of synthetic workloads: pure functions of a settings record and a seeded ``numpy`` generator.

Two fits to public traces are the defaults; no part of a trace is in here.

- *ITP*: the 69,351 jobs of ten Microsoft ITP clusters, March to May 2021, published with ElasticFlow (Gu et al.,
  ASPLOS 2023; microsoft/elasticflow-traces, MIT License). Maximum-likelihood lognormal of durations: mean of ln
  seconds 9.02 (median 8,267 s), deviation 1.21. Hill estimate of the Pareto exponent of the longest tenth: 1.12. GPUs
  of a job: 1 for 83.2 %, 2 for 2.1 %, 4 for 3.4 %, 8 for 10.1 %, 16 for 0.6 %, more for 0.6 %. Mean length of runs of
  hours with an arrival 3.2 h, without one 4.6 h.
- *Philly*: the 82,247 GPU jobs of Microsoft Philly, September to December 2017 (Jeon et al., ATC 2019;
  msr-fiddle/philly-traces, CC BY 4.0). Lognormal of durations: mean of ln seconds 6.79 (median 889 s), deviation 2.16.
  First harmonic of arrivals by hour of the day: amplitude 0.29, highest at 5:00 of the trace's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from dl2d.core.array_types import Floats
from dl2d.core.errors import WorkloadError, did_you_mean
from dl2d.simulation.parse_key_value_options import one_of, within
from dl2d.simulation.speeds.model_profiles import load_profile, profile_names
from dl2d.simulation.speeds.speed_models import MAX_TASKS
from dl2d.simulation.workload.past_job_conversion import PastJob, Settings, convert
from dl2d.simulation.workload.workload_file import MAX_JOBS, MAX_NODES, MAX_SLOTS, Workload

_DAY_SECONDS = 86_400.0
#: GPUs of a job and their shares, of ITP; the 0.6 % with more than 16 are left out.
GPU_SHARES: Mapping[int, float] = {1: 0.832, 2: 0.021, 4: 0.034, 8: 0.101, 16: 0.006}
#: Largest cap on the arrivals of a slot.
MAX_CAP = 10_000
# Slots in the made-up arrival pattern of ``dl2``, and from how many first slots a trace starts.
_PATTERN_SLOTS = 60
_OFFSETS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Dl2Settings(Settings):
    """Arrivals as in DL2's simulator: a fixed list of arrivals per slot, from a drawn offset on, capped; fixed lengths.

    After the "Google_Trace" and "Normal" modes of the simulator of Peng et al., "DL2" (arXiv:1909.06040); the list and
    the lengths are dl2d's. In slot t come min(cap, round(cap x f(t + offset))) jobs, with offset uniform in 0..4 and f
    a pattern of 60 slots between 0.3 and 1.3 with a burst in slot 1. Types are uniform; type k of K (by name, from 1)
    runs for longest x k / K slots on one worker and one PS.
    """

    jobs: int = within(60, 1, MAX_JOBS)
    nodes: int = within(12, 0, MAX_NODES)
    #: Most arrivals of a slot.
    cap: int = within(3, 1, MAX_CAP)
    #: Slots that the longest type takes on one worker and one PS.
    longest_slots: float = within(60.0, 1e-3, 1e6)
    #: Bound on workers and on PSs of every job.
    stretch: float = within(16.0, 1.0, MAX_TASKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonSettings(Settings):
    """Arrivals at a constant mean rate, lognormal lengths, GPUs from ``GPU_SHARES``. Others add to these."""

    jobs: int = within(60, 1, MAX_JOBS)
    nodes: int = within(12, 0, MAX_NODES)
    stretch: float = within(4.0, 1.0, MAX_TASKS)
    #: Mean number of arrivals per slot.
    rate: float = within(2.0, 1e-5, 1e6)
    #: Most GPUs of a job; larger draws are not made.
    most_gpus: int = within(16, 1, MAX_TASKS)
    #: Lengths at the size drawn: median and deviation of the logarithm; fitted to ITP. Longer ones are cut.
    median_seconds: float = within(8267.0, 1.0, 1e8)
    sigma: float = within(1.21, 0.0, 10.0)
    longest_seconds: float = within(2_592_000.0, 1.0, 1e9)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.jobs / self.rate > MAX_SLOTS / 2:
            raise WorkloadError(
                "rate",
                f"at {self.rate:g} jobs in a slot, {self.jobs} jobs come in more than {MAX_SLOTS // 2} slots: set a "
                "higher rate",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiurnalSettings(PoissonSettings):
    """Arrivals at rate x (1 + amplitude cos(2 pi (hour - peak_hour) / 24)); slot 0 starts at hour 0."""

    #: 0: constant; 1: none at the quietest hour. Fitted to Philly.
    amplitude: float = within(0.29, 0.0, 1.0)
    peak_hour: float = within(5.0, 0.0, 24.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstySettings(PoissonSettings):
    """Arrivals in bursts: periods with and without them take turns, with exponential lengths; ``rate`` is over both."""

    #: Mean length of periods with and without arrivals, in slots; ITP's hours with slots of 20 minutes.
    on_slots: float = within(9.6, 0.1, 1e5)
    off_slots: float = within(13.7, 0.0, 1e5)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyTailedSettings(PoissonSettings):
    """Arrivals as ``poisson``, lengths lognormal as Philly's or Pareto with the exponent of ITP's tail."""

    #: ``lognormal`` (median_seconds, sigma) or ``pareto``: P(longer than x) = (least / x) ** alpha, with that median.
    law: str = one_of("lognormal", ("lognormal", "pareto"))
    median_seconds: float = within(889.0, 1.0, 1e8)
    sigma: float = within(2.16, 0.0, 10.0)
    alpha: float = within(1.12, 0.05, 100.0)


def dl2(settings: Dl2Settings, random: Generator) -> Workload:
    """A workload as ``Dl2Settings`` describes it."""
    names = sorted(settings.model_names or profile_names())
    slots = arrivals(settings.jobs, settings.cap, random)
    kinds = random.integers(len(names), size=settings.jobs)
    jobs = []
    for index, kind in enumerate(kinds.tolist()):
        seconds = settings.longest_slots * settings.slot_seconds * (kind + 1) / len(names)
        jobs.append(_job(index, slots[index] * settings.slot_seconds, seconds, 1, names[kind]))
    return _finish("dl2", jobs, settings)


def poisson(settings: PoissonSettings, random: Generator) -> Workload:
    """A workload as ``PoissonSettings`` describes it."""
    return _drawn("poisson", settings, random, _steady(settings, random) / settings.rate, _lognormal(settings, random))


def diurnal(settings: DiurnalSettings, random: Generator) -> Workload:
    """A workload as ``DiurnalSettings`` describes it: unit-rate arrivals put through the inverse of the summed rate."""
    day = _DAY_SECONDS / settings.slot_seconds
    peak = settings.peak_hour / 24.0 * day
    wave = settings.amplitude * day / (2.0 * math.pi)
    target = _steady(settings, random) / settings.rate
    base = wave * math.sin(2.0 * math.pi * peak / day)
    low, high = np.maximum(target - 2.0 * wave, 0.0), target + 2.0 * wave
    for _ in range(60):  # bisection; the summed rate never falls
        middle = (low + high) / 2.0
        early = middle + wave * np.sin(2.0 * math.pi * (middle - peak) / day) + base < target
        low, high = np.where(early, middle, low), np.where(early, high, middle)
    return _drawn("diurnal", settings, random, np.maximum.accumulate(high), _lognormal(settings, random))


def bursty(settings: BurstySettings, random: Generator) -> Workload:
    """A workload as ``BurstySettings`` describes it; it begins with a period of arrivals."""
    share = settings.on_slots / (settings.on_slots + settings.off_slots)
    busy = _steady(settings, random) * share / settings.rate
    periods = max(16, int(2.0 * busy[-1] / settings.on_slots))
    ends: Floats = np.empty(0)
    while not len(ends) or ends[-1] <= busy[-1]:
        more = np.cumsum(random.exponential(settings.on_slots, periods))
        ends = np.concatenate([ends, more + (ends[-1] if len(ends) else 0.0)])
    pauses = np.concatenate([[0.0], np.cumsum(random.exponential(settings.off_slots, len(ends)))])
    submits = busy + pauses[np.searchsorted(ends, busy, side="right")]
    return _drawn("bursty", settings, random, submits, _lognormal(settings, random))


def heavy_tailed(settings: HeavyTailedSettings, random: Generator) -> Workload:
    """A workload as ``HeavyTailedSettings`` describes it."""
    submits = _steady(settings, random) / settings.rate
    if settings.law == "lognormal":
        seconds = _lognormal(settings, random)
    else:
        least = settings.median_seconds / 2.0 ** (1.0 / settings.alpha)
        draws = 1.0 - random.random(settings.jobs)  # in (0, 1]
        seconds = np.exp(np.minimum(math.log(least) - np.log(draws) / settings.alpha, 50.0))
    return _drawn("heavy-tailed", settings, random, submits, seconds)


#: By name: the settings and the function.
GENERATORS: Mapping[str, tuple[type[Settings], Callable[[Any, Generator], Workload]]] = {
    "dl2": (Dl2Settings, dl2),
    "poisson": (PoissonSettings, poisson),
    "diurnal": (DiurnalSettings, diurnal),
    "bursty": (BurstySettings, bursty),
    "heavy-tailed": (HeavyTailedSettings, heavy_tailed),
}


def generate(name: str, given: Mapping[str, str], random: Generator) -> Workload:
    """A workload of the generator of this name, with settings as users write them.

    Raises ``WorkloadError`` if there is no such generator, or a setting is unknown or bad.
    """
    if name not in GENERATORS:
        raise WorkloadError(
            "generator", f"there is no {name!r}{did_you_mean(name, GENERATORS)}; there are {', '.join(GENERATORS)}"
        )
    kind, function = GENERATORS[name]
    return function(kind.parse(given), random)


def arrivals(jobs: int, cap: int, random: Generator) -> list[int]:
    """The slot that each job comes in, as ``Dl2Settings`` has it; ``jobs`` of them, in order, or some more."""
    offset = int(random.integers(_OFFSETS))
    slots: list[int] = []
    slot = 0
    while len(slots) < jobs:
        slots += [slot] * _pattern((slot + offset) % _PATTERN_SLOTS, cap)
        slot += 1
    return slots


def _pattern(index: int, cap: int) -> int:
    """Arrivals in one slot of the made-up list: two waves of different length, and a burst that the cap cuts."""
    share = 4.0 if index == 1 else 0.8 + 0.3 * math.sin(index * math.pi / 10.0) + 0.2 * math.sin(index * math.pi / 3.0)
    return min(cap, max(0, round(cap * share)))


def _steady(settings: PoissonSettings, random: Generator) -> Floats:
    """Arrival times of a Poisson process of one arrival per unit of time."""
    return np.cumsum(random.exponential(1.0, settings.jobs))


def _lognormal(settings: PoissonSettings, random: Generator) -> Floats:
    exponents = math.log(settings.median_seconds) + settings.sigma * random.standard_normal(settings.jobs)
    return np.exp(np.minimum(exponents, 50.0))


def _drawn(name: str, settings: PoissonSettings, random: Generator, submits: Floats, seconds: Floats) -> Workload:
    """Draw GPUs and models to arrivals in slots and lengths in seconds."""
    sizes = [gpus for gpus in GPU_SHARES if gpus <= settings.most_gpus]
    shares = np.array([GPU_SHARES[gpus] for gpus in sizes])
    gpus = random.choice(sizes, settings.jobs, p=shares / shares.sum())
    on_gpu = [entry for entry in profile_names() if load_profile(entry).worker.get("gpu")]
    names = settings.model_names or tuple(on_gpu)
    kinds = random.integers(len(names), size=settings.jobs)
    # To milliseconds, so that the last bits of a processor's exp and log decide nothing.
    lengths = np.round(np.clip(seconds, 1.0, settings.longest_seconds), 3)
    starts = np.floor(submits) * settings.slot_seconds
    jobs = [
        _job(index, float(starts[index]), float(lengths[index]), int(gpus[index]), names[kind])
        for index, kind in enumerate(kinds.tolist())
    ]
    return _finish(name, jobs, settings)


def _job(index: int, submit: float, seconds: float, gpus: int, model: str) -> PastJob:
    return PastJob(id=str(index + 1), submit=submit, seconds=seconds, gpus=gpus, model=model)


def _finish(name: str, jobs: list[PastJob], settings: Settings) -> Workload:
    return convert(jobs, settings, seed=0, where=f"generator {name}", description=f"made by generator {name}").workload
