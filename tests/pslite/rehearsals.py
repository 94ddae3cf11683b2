"""Go through thousands of rehearsals of all kinds, several at a time, and keep what those that fail had to say.

    python tests/pslite/rehearsals.py --count 10000 --out rehearsals.out [--processes 6] [--first 0] [KIND ...]

Each is a random schedule as the tests go through them, of a number that they do not. A failure is a file in `--out`:
the schedule, all that was said, a diary of messages and data connections, and what coordinator and members knew when
time was up. Exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import reprlib
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
import rehearsal
import test_async
import test_digest as tests
from weather import CutData, rough_weather

from pslite.coordinator.state.coordinator_context import Job
from pslite.fault_points import FaultPoint
from pslite.net.messages import Beat, Factors, Norm, Taken
from pslite.server.block_state import BlockState
from pslite.server.block_step import Step
from pslite.worker.ps.worker import Worker

#: seeds start here, far from those of the tests
_FIRST = 1_000_000
#: differences from an undisturbed job that are kept
_MOST_DIFFERENCES = 40
#: rehearsals that one process goes through: threads of those that failed do not slow down all that follow
_FOR_ONE_PROCESS = 100


def broken_async(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data connections of async jobs break beside deaths; where bytes come one by one servers read often."""
    cuts = CutData(seed, often=0.001 if seed % 5 == 4 else 0.01)
    rough = rough_weather(seed) if seed % 5 == 4 else []
    test_async.goes_back_when_a_server_dies(seed, monkeypatch, folder, cuts.faults + rough)


def _async(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, staleness = ("", "tcp")[seed % 2], (0, 1, 5)[seed % 3]
    test_async.test_every_contribution_is_applied_once_whatever_the_resizes(
        seed, staleness, transport, monkeypatch, folder
    )


def _async_deaths(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_async.test_deaths_leave_samples_out_but_nothing_hangs(seed, ("", "tcp")[seed % 2], monkeypatch, folder)


def _async_servers(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_async.test_a_job_goes_back_when_a_server_dies(seed, monkeypatch, folder)


def _async_breaks(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_async.test_every_contribution_is_applied_once_although_connections_break(seed, monkeypatch, folder)


EXACT = {f"{what}, {backend}": (what, backend) for what, backend in tests.PAIRS}
KINDS: dict[str, Callable[[int, Path, pytest.MonkeyPatch], None]] = {
    **{name: partial(tests.go_through, *pair) for name, pair in EXACT.items()},
    "async": _async,
    "async, breaks": _async_breaks,
    "async, deaths": _async_deaths,
    "async, servers": _async_servers,
    "async, broken": broken_async,
}


class _Known(reprlib.Repr):
    """What an object knows, down to some depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 5
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 40
        self.maxstring = self.maxother = 200


def _write_down(whom: rehearsal.Rehearsal, path: Path) -> None:
    """Keep what coordinator and members know."""
    known = _Known()
    with path.open("w", encoding="utf-8") as file:
        for name, one in {"coordinator": whom.coordinator, **whom.members}.items():
            print(f"=== {name}", file=file)
            for key, value in sorted(_state(one).items()):
                print(f"{key}: {known.repr(value)}", file=file)


def _state(one: object) -> dict[str, object]:
    """What stands in its attributes; a coordinator's also in its job and the state of that."""
    found: dict[str, object] = {}
    for name, value in vars(one).items():
        if isinstance(value, Job):
            found |= {**msgspec.structs.asdict(value.state), **_state(value)}
        else:
            found[name] = value
    return found


class _Log(list[str]):
    """Lines for the user that are in a diary, too."""

    def __init__(self, diary: _Diary) -> None:
        super().__init__()
        self._diary = diary

    def append(self, line: str) -> None:
        super().append(line)
        self._diary.note(line)


class _Diary:
    """When what was said, what became of connections, and what differs from an undisturbed job."""

    def __init__(self, usual: _Usual | None) -> None:
        self._began = time.monotonic()
        self._notes = deque[str](maxlen=5000)
        self._usual = usual
        self._differ = 0

    def note(self, text: str) -> None:
        """Keep a line, and when it was."""
        self._notes.append(f"{time.monotonic() - self._began:8.3f} {text}")

    def __call__(self, point: FaultPoint, task: str, *about: Any) -> bool:
        """Keep that a fault point is reached, if it is not reached again and again."""
        if point is FaultPoint.APPLY:
            self._compare(_sum_of(*about), "sums", task)
        elif point in _TOLD and not isinstance(about[-1], Beat | Norm | Taken | Factors):
            self.note(f"{task}: {point.value}: {', '.join(str(each)[:300] for each in about)}")
        return False

    def begins(self, worker: Worker, task: str) -> None:
        """Compare the weights with which a worker computes a version."""
        self._compare(_weights_of(worker), "weights", task)

    def _compare(self, found: Mapping[_At, int], what: Literal["weights", "sums"], task: str) -> None:
        usual = getattr(self._usual, what) if self._usual is not None else {}
        differ = [at for at, crc in found.items() if usual.get(at, crc) != crc]
        self._differ += bool(differ)
        if differ and self._differ <= _MOST_DIFFERENCES:
            self.note(f"{task} has other {what} than usual: (block, version) {differ}")

    def __str__(self) -> str:
        return "\n".join(self._notes)


#: fault points that a diary keeps
_TOLD = {
    FaultPoint.COORDINATOR_MESSAGE, FaultPoint.MESSAGE, FaultPoint.PLAN_KNOWN, FaultPoint.CONNECTED,
    FaultPoint.RECONNECT, FaultPoint.RESUMED, FaultPoint.PLAN_ANNOUNCED, FaultPoint.TAKE_BLOCK, FaultPoint.ENTER_PLAN,
}  # fmt: skip

#: block, version
_At = tuple[int, int]


class _Usual(NamedTuple):
    """Checksums of an undisturbed job: of the weights with which a step begins, and of its gradients' sum."""

    weights: dict[_At, int]
    sums: dict[_At, int]


@cache
def _usual(kind: str, epochs: int) -> _Usual:
    """Of a kind of job, with one worker and one server: in exact mode others have the same bits."""
    usual = _Usual({}, {})

    def begin(moment: rehearsal.Moment) -> None:
        usual.weights.update(_weights_of(moment.rehearsal.members[moment.task]))

    faults = [
        rehearsal.Fault("version", begin, always=True),
        rehearsal.Fault(FaultPoint.APPLY, lambda moment: usual.sums.update(_sum_of(*moment.about)), always=True),
    ]
    spec = rehearsal.job(**rehearsal.KINDS[kind], epochs=epochs)
    rehearsal.Rehearsal(spec, workers=1, servers=1, faults=faults, model=rehearsal.model_of(spec)).run()
    return usual


def _weights_of(worker: Worker) -> dict[_At, int]:
    return {(number, worker.version): zlib.crc32(view) for number, view in enumerate(worker.weights.views)}


def _sum_of(block: BlockState, step: Step) -> dict[_At, int]:
    return {(block.number, block.version): zlib.crc32(step.views()[-1])}


def go_through(kind: str, seed: int, out: Path) -> str:
    """Go through one of a kind; returns what went wrong, or nothing."""
    play = KINDS[kind]
    what, backend = EXACT.get(kind, ("", ""))
    # every run of others has bits of its own, or there are no servers
    followed = what and backend != "allreduce"
    usual = _usual(tests.kind_of(what, backend, seed), tests.DISTURBANCES[what].epochs) if followed else None
    diary = _Diary(usual)
    create, exchange = rehearsal.Rehearsal.__init__, rehearsal.Rehearsal.exchange

    def begin(whom: rehearsal.Rehearsal, *args: object, faults: Sequence[rehearsal.Fault] = (), **how: object) -> None:
        begins = rehearsal.Fault("version", lambda m: diary.begins(m.rehearsal.members[m.task], m.task), always=True)
        create(whom, *args, faults=[*faults, begins], hook=diary, **how)  # type: ignore[arg-type]
        whom.log = _Log(diary)

    def look(whom: rehearsal.Rehearsal, *args: object, **how: object) -> object:
        reply = exchange(whom, *args, **how)  # type: ignore[arg-type]
        if reply.stop:
            _write_down(whom, out / f"state-{kind}-{seed}.txt")
        return reply

    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        monkeypatch.setattr(rehearsal.Rehearsal, "__init__", begin)
        monkeypatch.setattr(rehearsal.Rehearsal, "exchange", look)
        try:
            play(seed, Path(folder), monkeypatch)
        except BaseException as error:  # noqa: BLE001  (each failure is kept)
            path = out / f"fail-{kind}-{seed}.txt"
            path.write_text("".join([*traceback.format_exception(error), "\n", str(diary)]), encoding="utf-8")
            return str(path)
    return ""


def _in_the_background() -> None:
    os.nice(15)


def main() -> int:
    """Go through them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--count", type=int, default=1000, help="how many in all (default %(default)s)")
    parser.add_argument("--first", type=int, default=_FIRST, help="the first seed (default %(default)s)")
    parser.add_argument("--processes", type=int, default=3 * (os.cpu_count() or 1), help="(default %(default)s)")
    parser.add_argument("--minutes", type=float, help="begin no more after that")
    parser.add_argument("--out", type=Path, default=Path("rehearsals.out"), help="(default %(default)s)")
    options = parser.parse_args()
    for kind in set(options.kinds) - set(KINDS):
        parser.error(f"no kind {kind!r}: there are {', '.join(KINDS)}")
    options.out.mkdir(parents=True, exist_ok=True)

    began = time.monotonic()
    until = began + 60 * options.minutes if options.minutes else float("inf")
    kinds = options.kinds or list(KINDS)
    each = ((kind, seed) for seed in count(options.first) for kind in kinds)
    ahead: Iterator[tuple[str, int]] = islice(each, options.count)
    done, failures = Counter[str](), list[str]()
    at_work: dict[Future[str], str] = {}
    # not forked: nothing of this process is theirs
    with ProcessPoolExecutor(
        options.processes,
        multiprocessing.get_context("spawn"),
        _in_the_background,
        max_tasks_per_child=_FOR_ONE_PROCESS,
    ) as pool:
        while True:
            while len(at_work) < options.processes and time.monotonic() < until and (one := next(ahead, None)):
                at_work[pool.submit(go_through, *one, options.out)] = one[0]
            if not at_work:
                break
            ended, _ = wait(at_work, return_when=FIRST_COMPLETED)
            for future in ended:
                done[at_work.pop(future)] += 1
                if path := future.result():
                    failures.append(path)
                    print(f"FAILED {path}", flush=True)
                if done.total() % 100 == 0:
                    minutes = (time.monotonic() - began) / 60
                    print(f"{done.total():6} in {minutes:5.1f} min, {len(failures)} failed", flush=True)
    print(", ".join(f"{kind} {number}" for kind, number in sorted(done.items())))
    print(f"{done.total()} rehearsals, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
