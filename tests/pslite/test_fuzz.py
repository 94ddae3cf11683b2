"""Frames and messages by somebody who knows the token and means no good: no process ends, and little is allocated."""

from __future__ import annotations

import random
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Self

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from regression import segments
from rehearsal import Event, Rehearsal, job, static_digest

from pslite.auth import Identity, connect
from pslite.errors import PsliteError
from pslite.spec import LAMB
from pslite.wire import KINDS, Header

#: of everything in this process; what is announced has up to 4 GiB
MOST_BYTES = 32 << 20


def frame(rng: random.Random, blocks: int, version: int) -> bytes:
    """A header that is mostly plausible, and some bytes after it."""
    length = rng.choice((0, 24, 48, 64, 72, rng.randrange(2**16), rng.randrange(2**32)))
    header = Header(
        rng.choice(sorted(KINDS)),
        rng.choice((0, 1, 2, rng.randrange(2**32))),
        rng.choice((rng.randrange(blocks), rng.randrange(2**32))),
        rng.choice((rng.randrange(20), rng.randrange(2**32))),
        length,
        rng.choice((version, version + 1, rng.randrange(-(2**63), 2**63))),
        rng.choice((0, version, rng.randrange(-(2**63), 2**63))),
        rng.choice((0, 0, 0, 2, rng.randrange(2**32))),
        rng.choice((0, version + 1, rng.randrange(-(2**63), 2**63))),
        rng.randrange(2**32),
        rng.choice((0, 0, 1, 2, 3, rng.randrange(2**16))),
    )
    return header.pack() + rng.randbytes(min(length, 4096))


class Intruder:
    """Sends frames to every server of a rehearsal, as a worker and as a server that no plan knows."""

    def __init__(self, rehearsal: Rehearsal, seed: int) -> None:
        self._rehearsal = rehearsal
        self._rng = random.Random(seed)
        self.frames = 0
        self.cut_off = 0
        self._thread = threading.Thread(target=self._run, name="intruder")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        rehearsal, rng = self._rehearsal, self._rng
        while not rehearsal.over:
            addresses = rehearsal.server_addresses()
            if not addresses:
                time.sleep(0.001)
                continue
            role = rng.choice(("worker", "ps"))
            identity = Identity(role, f"{role}-99", f"intruder-{self.frames}", rehearsal.token)
            try:
                sock, _ = connect(rng.choice(addresses), identity, "data", timeout=2.0)
            except PsliteError:
                continue  # a server that has just left, or the end
            with sock:
                sock.settimeout(0.01)
                try:
                    for _ in range(rng.randint(1, 4)):
                        sock.sendall(frame(rng, 9, rehearsal.version))
                        self.frames += 1
                    if sock.recv(1) == b"":
                        self.cut_off += 1
                except TimeoutError:
                    pass
                except OSError:
                    self.cut_off += 1


@pytest.mark.parametrize("seed", range(4))
def test_frames_of_somebody_in_no_plan_do_no_harm(seed):
    changes = ({}, {"segments": segments(40, LAMB(lr=0.01))}, {"durability": "durable"}, {"wire": "float16"})[seed % 4]
    spec = job(**changes)
    expected = static_digest(spec)
    events = [Event(10, workers=3, servers=3), Event(25, workers=2, servers=2)]
    rehearsal = Rehearsal(spec, workers=2, servers=2, events=events, step_seconds=0.02)
    tracemalloc.start()
    try:
        with Intruder(rehearsal, seed) as intruder:
            outcome = rehearsal.run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    story = "\n".join([*outcome.log[-40:], *outcome.surprises])
    assert outcome.status.state == "finished", story
    assert outcome.status.result.digest == expected, story
    assert not outcome.surprises, story
    assert intruder.frames > 50
    assert intruder.cut_off > 10
    assert peak < MOST_BYTES
