"""Groups of keys that are stepped in turns: a worker at another group than the first worker waits for that worker's.

Scripts have several groups where networks train in turns, as in a GAN.  A worker that comes later may begin with
another group than the one that the first worker is at.
"""

from __future__ import annotations

from pslite.mxnet.kvstore.kvstore_job import KVStoreJob

#: how many steps of no key a worker does until the first one is at the same group, at most
_MAX_IDLE_STEPS = 64


class KeyGroupTurns:
    """Keeps a worker's steps of groups of keys in step with the first worker's.

    Each worker's script has the same turns of groups, so that they stay in step once they are.
    """

    def __init__(self, job: KVStoreJob) -> None:
        self._job = job
        #: whether the first worker was at another group of keys than this one
        self.out_of_step = False
        #: the group of this worker's last step
        self._last_group = 0
        #: the groups of which the first worker had gradients last, and those of which it was not seen to have any
        self._first_worker_groups: set[int] = set()
        self._groups_without_first_worker: set[int] = set()

    def join(self, group: int) -> bool:
        """Before a step: do steps of no key until the first worker begins with the group; return whether it did.

        Only where it was at another group.  The gradient that was to be pushed is dropped then: it would come after
        that step.
        """
        last, self._last_group = self._last_group, group
        if not self.out_of_step or group == last or group in self._groups_without_first_worker:
            return False
        self.out_of_step = False
        for _ in range(_MAX_IDLE_STEPS):
            if not self._job.session.rank_and_size[0]:
                return False
            self._job.exchange_nothing()
            before = self._first_worker_groups
            if group in self._note_first_worker_groups() - before:
                return True
        self._groups_without_first_worker.add(group)  # the first worker's script does not push it, now
        return False

    def note(self, group: int) -> None:
        """After a step: take note of whether the first worker was at the same group of keys."""
        groups = self._note_first_worker_groups()
        if len(self._job.keys.groups) > 1 and groups and group not in groups | self._groups_without_first_worker:
            self.out_of_step = True

    def _note_first_worker_groups(self) -> set[int]:
        """Return the groups of which the first worker had gradients in the last step."""
        groups = self._job.keys.groups_in(self._job.session.first_worker_segments)
        self._first_worker_groups = groups or self._first_worker_groups
        self._groups_without_first_worker -= groups
        return groups
