"""The learner that the daemon starts (``python -m dl2d.cli.learner CONFIG``): as ``dl2d train --twin --gate``, humbly.

It runs when nothing else wants the processor, has a limit on its memory, is the first to go where the machine runs out,
and ends when the daemon does. It only reads the store: its last line on standard output is a JSON object with the
folder of its ``candidate``, which the daemon enters (``dl2d.daemon.models.candidates``).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from dl2d.config.settings import Settings, load_settings
from dl2d.core.errors import Dl2dError

_ITERATIONS: Final = 150
#: The system's least: a process that has it runs when no other wants to.
_NICEST: Final = 19
_MIB: Final = 2**20
#: Seconds between two words on how far it is.
_TELL_SECONDS: Final = 60.0


def main(config: Path) -> None:
    """Learn once; exit status 1 with a line on standard error where that is not possible."""
    try:
        settings = load_settings(config)
        stand_back(settings.learning.memory_mib)
        threading.Thread(target=_end_with_the_daemon, name="daemon", daemon=True).start()
        done = _learn(settings)
    except Dl2dError as error:
        print(f"dl2d: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except MemoryError:
        limit = f"learning.memory_mib={settings.learning.memory_mib}"
        print(f"dl2d: the learner needs more memory than {limit}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    print(json.dumps({"candidate": str(done)}))  # noqa: T201


def stand_back(memory_mib: int) -> None:
    """Take what no one else wants of this machine; where the system refuses a part of it, that part is left out."""
    with contextlib.suppress(OSError):
        os.nice(_NICEST)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib * _MIB, memory_mib * _MIB))


def _learn(settings: Settings) -> Path:
    """Folder of the candidate."""
    # After the limits were set, for what is imported here takes time and memory.
    from dl2d.cli.options import reading  # noqa: PLC0415
    from dl2d.cli.twin import TwinSettings, judged, learn  # noqa: PLC0415
    from dl2d.daemon.models.candidates import write_candidate  # noqa: PLC0415

    told: dict[str, float] = {}

    def tell(what: str, done: int, total: int, note: str = "") -> None:
        if time.monotonic() - told.get(what, float("-inf")) > _TELL_SECONDS or done == total:
            told[what] = time.monotonic()
            print(f"{what}: {done} of {total}{note and f', {note}'}", flush=True)  # noqa: T201

    with tempfile.TemporaryDirectory(prefix="dl2d-learner-") as folder, reading(settings) as store:
        chosen = TwinSettings(iterations=_ITERATIONS, days=None, minutes=None, seed=settings.learning.seed)
        learned = learn(settings, store, chosen, Path(folder), tell=tell, now=time.time())
        return write_candidate(judged(settings, store.registry, learned, tell=tell))


def _end_with_the_daemon() -> None:
    """Standard input is a pipe that the daemon holds: it ends when the daemon does, however that came about."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
