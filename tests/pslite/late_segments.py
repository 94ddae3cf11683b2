"""An open job to which a script adds segments in the middle, as one of MXNet's KVStore adds keys.

Steps of the added segments and of the first ones take turns from then on.  Whose turn it is, and which gradient,
follows from two segments that count steps: so a worker that comes later knows it too, and weights and optimizer state
after so many steps of both have the same bits whoever computes them, however many steps of no segment there were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import structs
from own_loop import OwnLoop

from pslite.job.job_spec import SGD, Adam, JobSpec, Mean, Part, Segment
from pslite.numeric.gradient_sums import Array, Bundle, Contribution, GradientSums
from pslite.worker.elastic_job_base import OpenSession
from pslite.worker.single_process_session import SingleSession

#: steps of the first segments before others are added, and of all segments
LATE_AT, STEPS = 20, 50


def added(rule: SGD | Adam) -> tuple[Segment, ...]:
    """The segments that are added: weights in several blocks, and a counter."""
    return (
        Segment(dtype="float32", optimizer=rule, parts=(Part("late", (70,)),), late=True),
        Segment(dtype="float64", optimizer=Mean(), parts=(Part("late steps", (1,)),), late=True),
    )


class LateSegments(OwnLoop):
    """The loop, and what each version must be."""

    #: the rule of the added segment; with its count of steps, which is not the job's version
    rule = Adam(lr=0.01, eps_first=True)
    #: whether no member comes or goes
    undisturbed = False

    def extension(self, session: OpenSession) -> tuple[JobSpec, dict[int, Array]]:
        """Return what the script adds."""
        segments = (*session.spec.segments, *added(self.rule))
        return structs.replace(session.spec, segments=segments), {2: np.full(70, 0.5, np.float32), 3: np.zeros(1)}

    def asks(self, session: OpenSession) -> bool:
        """Whether the script gets to where it adds them; asked before each step in which they are due."""
        return True

    def gradient(self, version: int, bundle: Bundle) -> None:
        """Put the gradient of a step of one turn into a bundle: of the others if it is negative."""
        rng = np.random.Generator(np.random.PCG64(abs(version)))
        number = 2 if version < 0 else 0
        bundle.arrays[number][:] = rng.integers(-2, 3, size=bundle.arrays[number].size)
        bundle.arrays[number + 1].fill(1.0)

    def train(
        self,
        session: OpenSession,
        *,
        before_step: Callable[[int], None] = lambda _: None,
        computed: Callable[[int, Sequence[Any]], None] = lambda epoch, samples: None,
    ) -> None:
        """Train to the end of the loop; `before_step` hears the number of steps that had a gradient."""
        known = {} if isinstance(session, SingleSession) else undisturbed_states(self.spec, type(self))
        session.attach()
        session.barrier()
        session.describe(self.spec)
        session.weights.arrays[0][:] = np.linspace(-0.1, 0.1, self.spec.segments[0].size, dtype=np.float32)
        session.start()
        asked, segments, sums = False, 0, GradientSums(session.spec, session.supply)
        while True:
            if segments != len(session.spec.segments):
                segments, sums = len(session.spec.segments), GradientSums(session.spec, session.supply)
            first = int(session.weights.arrays[1][0])
            late = int(session.weights.arrays[3][0]) if segments > 2 else 0
            if known:
                weights = [session.weights.part(block) for block in session.blocks]
                _compare(weights, [state[0] for state in known[first, late]])
            elif isinstance(session, SingleSession):
                self.seen[first, late] = tuple(session.fetch())
            if first + late == STEPS:
                break
            before_step(first + late)
            homeless = first == LATE_AT and segments == 2
            if homeless and not asked and self.asks(session):
                asked = True
                session.extend(*self.extension(session))
                if isinstance(session, SingleSession):
                    continue
            turn = () if homeless else (0, 1) if segments == 2 or first - LATE_AT <= late else (2, 3)
            share = session.share
            sums.begin(share.leaves, share.nodes[:1])
            bundle = sums.take()
            bundle.idle = frozenset(range(segments)) - set(turn)
            if turn:
                self.gradient(-1 - late if turn[0] else first, bundle)
                computed(0, [])
            else:
                time.sleep(0.005)
            sums.add(share.index, bundle)
            left = session.exchange(
                [*sums.contributions, *(Contribution(node, bundle) for node in share.nodes[1:])], 0.0, 0
            )
            while left:
                left = session.exchange([Contribution(node, bundle) for node in left], 0.0, 0)
            # servers that are new may not know it
            assert session.first_worker_segments <= set(turn)
            assert session.first_worker_segments == set(turn) or not known or not self.undisturbed
            if known and session.rank_and_size[0] == 0 and (first + late) % 8 == 3:
                counts = int(session.weights.arrays[1][0]), late + (turn == (2, 3))
                _compare(session.fetch(), known[counts])
                firsts = {block.segment: block.number for block in reversed(session.blocks)}
                assert session.updates(list(firsts.values())) == [counts[segment > 1] for segment in firsts]
        session.barrier()
        session.finish()

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        #: of a run in one process: by the numbers of steps of both, the state of each block
        self.seen: dict[tuple[int, int], tuple[Array, ...]] = {}


class SlowFollowers(LateSegments):
    """The loop of workers that get to the segments long after they have become the first one."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        #: by worker: steps that it is behind the first one
        self._behind: dict[OpenSession, int] = {}

    def asks(self, session: OpenSession) -> bool:
        """Whether this worker was the first one all the time, or has been so for some tenths of a second."""
        first = isinstance(session, SingleSession) or session.rank_and_size[0] == 0
        behind = self._behind[session] = self._behind.get(session, 0) - 1 if first else 100
        return behind < 0


def _compare(found: Sequence[Array], expected: Sequence[Array]) -> None:
    """Compare blocks; those that come late are not there yet, perhaps."""
    assert len(found) <= len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        assert np.array_equal(ours, theirs), f"block {number} is {ours}, not {theirs}"


@cache
def undisturbed_states(spec: JobSpec, model: type[LateSegments]) -> dict[tuple[int, int], tuple[Array, ...]]:
    """By the numbers of steps, the state of each block in a run in one process."""
    loop = model(spec)
    loop.train(SingleSession(None))
    return loop.seen
