"""The order of samples in an epoch: a permutation that depends on (seed, epoch, number of samples) and nothing else.

It is made from integer arithmetic only (splitmix64, Steele, Lea and Flood 2014, and a stable sort), not from a
library's random generator, so that it never changes with a version of numpy or torch, and every worker can compute it
for itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Return the splitmix64 finaliser of a 64-bit integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def stream(*parts: int) -> int:
    """Return a 64-bit seed that depends on every one of the integers, in order."""
    state = 0
    for part in parts:
        state = mix((state + _GAMMA) ^ mix(part + _GAMMA))
    return state


def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Return the indices 0 .. samples-1 in the order in which `epoch` uses them; shape (samples,)."""
    state = np.uint64(stream(seed, epoch))
    hashes = np.arange(1, samples + 1, dtype=np.uint64)
    hashes *= np.uint64(_GAMMA)
    hashes += state
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(27)
    hashes *= np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(31)
    return np.argsort(hashes, kind="stable").astype(np.int64, copy=False)
