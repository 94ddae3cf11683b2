"""`python -m pslite.launch.server_process`: the process of one parameter server, as dl2-run starts it."""

from __future__ import annotations

import os
import signal
import sys

from pslite.errors import PsliteError, RolledBack
from pslite.job.printable_text import give_up_unwritten_text, tell
from pslite.launch.environment_parsing import task_environment
from pslite.launch.signal_forwarding import OWN
from pslite.server import Server


def main() -> int:
    """Serve until the job ends; return the exit status."""
    for number in OWN:
        # Slurm sends them to every process of a job, and they mean something to scripts only
        signal.signal(number, signal.SIG_IGN)
    quiet = os.environ.get("DL2_QUIET") == "1"
    try:
        while True:
            place = task_environment(os.environ, "ps")

            def say(text: str, task: str = place.identity.task) -> None:
                if not quiet:
                    tell(task, text)

            try:
                return Server(place.identity, place.coordinator, host=os.environ.get("DL2_HOST", ""), say=say).run()
            except RolledBack as error:
                say(f"{error}; this server starts again")
    except PsliteError as error:
        tell("pslite", str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        give_up_unwritten_text()


if __name__ == "__main__":
    sys.exit(main())
