"""Sampler that splits a data set over the workers that there are, and the session that it shares with the KVStore."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sized

from mxnet.gluon.data import Sampler

from pslite.errors import UsageError
from pslite.job.sample_assignment import NOT_COUNTED, SampleRange, Seen
from pslite.job.sample_order import permutation
from pslite.worker.elastic_job_base import OpenSession, open_session

#: the session of the process, which is one worker; and whether a KVStore has it
_session: OpenSession | None = None
_taken = False
_splits: dict[tuple[str, int], ElasticSplit] = {}


def session_for_kvstore() -> OpenSession:
    """Return the session of the process; each KVStore after the first opens another one."""
    global _session, _taken  # noqa: PLW0603
    if _taken:
        _session = None
    _taken = True
    return _session_for_split()


def _session_for_split() -> OpenSession:
    """Return the session of the process, which its first KVStore uses, too."""
    global _session  # noqa: PLW0603
    if _session is None:
        session = open_session()
        session.attach()
        _session = session
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
        #: given at the present version
        self._step: list[int] = []
        self._version = 0
        #: samples of a whole batch: those of the last step that did not end an epoch
        self._count = 1
        #: whether the epoch has ended in the present step
        self._ended = False
        #: an epoch, and its order of samples
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
            self._begin_step(session.version)
            if not self._held:
                if self._seen.over + 1 >= self._epochs:
                    return
                count = max(1, self._count - len(self._step))
                answer = session.ask_samples(self._name, self._samples, self._seen, count)
                if answer == NOT_COUNTED:
                    yield 0
                    continue
                if answer.low == answer.high:
                    self._seen = self._seen._replace(over=answer.epoch)
                    self._ended = given
                    if given:
                        return
                    continue
                if answer.epoch >= self._epochs:
                    return
                self._hold(answer)
            given = True
            self._step.append(self._held.popleft())
            yield self._step[-1]

    def _begin_step(self, version: int) -> None:
        """Note a new version: what was given before was a batch."""
        if version == self._version:
            return
        if self._step and not self._ended:
            self._count = len(self._step)
        self._version, self._step, self._ended = version, [], False

    def _hold(self, answer: SampleRange) -> None:
        """Take the indices of samples that were assigned."""
        self._seen = self._seen._replace(epoch=answer.epoch)
        if self._order[0] != answer.order:
            self._order = answer.order, permutation(self._seed, answer.order, self._samples)
        self._held.extend(self._order[1][answer.low : answer.high].tolist())


def give_again() -> None:
    """Have all splits give again what the present step has taken, since its gradient does not count.

    That is so in the first step of a worker that joined late: its gradient is of its own initial weights.
    """
    for split in _splits.values():
        split.give_again()
