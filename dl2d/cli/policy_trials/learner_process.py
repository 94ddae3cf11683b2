"""Process in which the daemon trains, as ``dl2d train --twin --gate`` does.

It has the lowest CPU priority, a memory limit and the highest out-of-memory score, and ends when the daemon ends. It
only reads the store: its last line on standard output is a JSON object with the folder of its ``candidate``, which the
daemon registers (``dl2d.daemon.policy_versions.candidate_files``).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from dl2d.cli.optional_packages import missing_extra
from dl2d.config.settings import Settings, load_settings
from dl2d.core.errors import Dl2dError

#: Lowest CPU priority of the system.
_LOWEST_PRIORITY = 19
_MIB = 2**20
#: Seconds between two progress messages.
_TELL_SECONDS = 60.0


def main(config: Path) -> None:
    """Train once; exit status 1 and one line on standard error on failure."""
    try:
        settings = load_settings(config)
        stand_back(settings.learning.memory_mib)
        threading.Thread(target=_end_with_the_daemon, name="daemon", daemon=True).start()
        print(json.dumps({"candidate": str(_learn(settings))}))  # noqa: T201
        return
    except Dl2dError as error:
        problem = str(error)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, "the learner")) is None:
            raise
        problem = str(missing)
    except MemoryError:
        limit = settings.learning.memory_mib
        problem = f"the learner needs more than {limit} MiB of memory; raise learning.memory_mib"
    print(f"dl2d: {problem}", file=sys.stderr)  # noqa: T201
    sys.exit(1)


def stand_back(memory_mib: int) -> None:
    """Lower priority and limit memory; what the system refuses is left out."""
    with contextlib.suppress(OSError):
        os.nice(_LOWEST_PRIORITY)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib * _MIB, memory_mib * _MIB))


def _learn(settings: Settings) -> Path:
    """Folder of the candidate."""
    # After the limits were set, for what is imported here takes time and memory.
    from dl2d.cli.daemon_access.open_store import open_store  # noqa: PLC0415
    from dl2d.cli.policy_trials.train_on_site_records import TwinSettings, checked, judged, learn  # noqa: PLC0415
    from dl2d.cli.policy_trials.trial_on_recorded_days import live_review  # noqa: PLC0415
    from dl2d.daemon.policy_versions.candidate_files import write_candidate  # noqa: PLC0415
    from dl2d.learning.interrupted_training import DEFAULT_ITERATIONS  # noqa: PLC0415

    told: dict[str, float] = {}

    def tell(what: str, done: int, total: int, note: str = "") -> None:
        if time.monotonic() - told.get(what, float("-inf")) > _TELL_SECONDS or done == total:
            told[what] = time.monotonic()
            print(f"{what}: {done} of {total}{note and f', {note}'}", flush=True)  # noqa: T201

    with open_store(settings) as store:
        seed = settings.learning.seed
        chosen = TwinSettings(iterations=DEFAULT_ITERATIONS, days=None, minutes=None, seed=seed, gate=True)
        learned = learn(settings, store, settings.policy.name, chosen, tell=tell, now=time.time())
        candidate = judged(settings, store, learned, checked(settings, store, learned, tell=tell), tell=tell)
        review = live_review(settings, store.registry, learned.split, tell=tell)
        return write_candidate(replace(candidate, review=review))


def _end_with_the_daemon() -> None:
    """Exit when the daemon does: standard input is a pipe that the daemon holds open."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
