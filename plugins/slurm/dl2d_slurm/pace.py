"""A cap on how often something is done."""

from __future__ import annotations

from collections.abc import Callable


class TokenBucket:
    """At most ``rate`` times a second on average, with bursts of up to a second's worth.

    Parameters
    ----------
    rate
        Tokens that come in each second.
    clock
        Time in seconds; may jump, which costs at most a burst.
    sleep
        Waits for some seconds.
    """

    def __init__(self, rate: float, *, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._rate = rate
        self._most = max(1.0, rate)
        self._clock = clock
        self._sleep = sleep
        self._tokens = self._most
        self._at = clock()

    def take(self) -> None:
        """Take one token, after waiting for it if there is none."""
        now = self._clock()
        self._tokens = min(self._most, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            wait = (1 - self._tokens) / self._rate
            self._sleep(wait)
            self._tokens += wait * self._rate
            self._at += wait
        self._tokens -= 1
