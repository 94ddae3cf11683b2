"""Split of a data set for scripts with a loop of their own, dealt anew whenever the number of workers changes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sized

from mxnet.gluon.data import Sampler

from pslite.errors import UsageError
from pslite.job.sample_dealing import NOT_COUNTED, Seen
from pslite.job.sample_order import permutation
from pslite.worker.connect import open_session
from pslite.worker.training_session import OpenSession

#: the session of the process; and whether a KVStore has it
_session: OpenSession | None = None
_taken = False
_splits: dict[tuple[str, int], ElasticSplit] = {}


def session_for_kvstore() -> OpenSession:
    """Return a session, the one that a split has opened if there is one."""
    global _session, _taken  # noqa: PLW0603  (a process is one worker)
    if _session is None or _taken:
        _session = open_session()
        _session.attach()
    _taken = True
    return _session


def _session_for_split() -> OpenSession:
    global _taken  # noqa: PLW0603
    if _session is None:
        session_for_kvstore()
        _taken = False
    assert _session is not None
    return _session


def elastic_split(dataset: Sized, *, epochs: float = math.inf, seed: int = 0, name: str = "") -> ElasticSplit:
    """Return this worker's part of a data set, as the `sampler` of a DataLoader; in each epoch each sample once.

    Parameters
    ----------
    dataset
        of the same length in every worker.
    epochs
        after so many epochs of the job there are no more samples: the loop of a worker that came later ends, too.
    seed
        of the order of samples, which is another one in each epoch.
    name
        where several data sets of the same length are split.

    """
    if len(dataset) < 1:
        raise UsageError("a data set without samples cannot be split")
    return _splits.setdefault((name, len(dataset)), ElasticSplit(len(dataset), epochs, seed, name))


class ElasticSplit(Sampler):  # type: ignore[misc]
    """Gives indices of samples, those of the present epoch, as long as there are any that no worker has had.

    They are asked of the coordinator step by step, as many as the step before has taken.
    """

    def __init__(self, samples: int, epochs: float, seed: int, name: str) -> None:
        self._samples, self._epochs, self._seed, self._name = samples, epochs, seed, name
        self._seen = Seen()
        self._held: deque[int] = deque()
        #: taken at the present version, and how many a whole batch has: at a version before that did not end an epoch
        self._step: list[int] = []
        self._version, self._count, self._ended = 0, 1, False
        self._order = -1, permutation(seed, 0, 0)

    def __len__(self) -> int:
        """About how many samples this worker has in an epoch."""
        return math.ceil(self._samples / _session_for_split().rank_and_size[1])

    def give_again(self) -> None:
        """Give again what was taken at the present version."""
        self._held.extendleft(reversed(self._step))
        self._step.clear()

    def __iter__(self) -> Iterator[int]:
        """Give the indices of an epoch, or of what is left of the present one."""
        session = _session_for_split()
        if session.version == self._version and not self._ended:
            self.give_again()  # an iterator before this one was given up, without a step
        given = False
        while True:
            if session.version != self._version:
                if self._step and not self._ended:
                    self._count = len(self._step)
                self._version, self._step, self._ended = session.version, [], False
            if not self._held:
                if self._seen.over + 1 >= self._epochs:
                    return
                count = max(1, self._count - len(self._step))
                deal = session.ask_samples(self._name, self._samples, self._seen, count)
                if deal == NOT_COUNTED:
                    yield 0
                    continue
                if deal.low == deal.high:
                    self._seen = self._seen._replace(over=deal.epoch)
                    self._ended = given
                    if given:
                        return
                    continue
                if deal.epoch >= self._epochs:
                    return
                self._seen = self._seen._replace(epoch=deal.epoch)
                if self._order[0] != deal.order:
                    self._order = deal.order, permutation(self._seed, deal.order, self._samples)
                self._held.extend(self._order[1][deal.low : deal.high].tolist())
            given = True
            self._step.append(self._held.popleft())
            yield self._step[-1]


def give_again() -> None:
    """Have all splits give again what the present step has taken, since its gradient does not count.

    This worker had expected to be there at the beginning of the job.
    """
    for split in _splits.values():
        split.give_again()
