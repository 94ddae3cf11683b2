"""Which keys the first worker trains: where a worker that came later is at others, it waits until they are the same."""

from __future__ import annotations

from pslite.mxnet.kvstore.job import KVStoreJob

#: how many steps of no key a worker does until the first one is at the same keys, at most
_TURNS = 64


class FirstWorkerTurns:
    """Keeps steps of a group of keys in step with the first worker's.

    Each worker's script has the same turns of groups, so that they are in step from then on.
    """

    def __init__(self, job: KVStoreJob) -> None:
        self._job = job
        #: whether the first worker was at other keys than this one
        self.astray = False
        #: the group of this worker's last step, those that the first worker was at last, and those where it never was
        self._last_group = 0
        self._led: set[int] = set()
        self._unled: set[int] = set()

    def join(self, group: int) -> bool:
        """Before a step: do steps of no key until the first worker begins with the group; return whether it did.

        Only where it was at other keys.  The gradient that was to be pushed is dropped then: it would come after that
        step.
        """
        last, self._last_group = self._last_group, group
        if not self.astray or group == last or group in self._unled:
            return False
        self.astray = False
        for _ in range(_TURNS):
            if not self._job.session.rank_and_size[0]:
                return False
            self._job.exchange_nothing()
            before = self._led
            if group in self._note_led() - before:
                return True
        self._unled.add(group)  # the first worker's script does not push it, now
        return False

    def note(self, group: int) -> None:
        """After a step: take note of whether the first worker was at the same group of keys."""
        led = self._note_led()
        if len(self._job.keys.groups) > 1 and led and group not in led and group not in self._unled:
            self.astray = True

    def _note_led(self) -> set[int]:
        """Return the groups of which the first worker had gradients in the last step."""
        led = self._job.keys.led(self._job.session.led)
        self._led = led or self._led
        self._unled -= led
        return led
