"""Entry point of dl2-run, as a console script and as `python -m pslite.run`."""

from __future__ import annotations

import sys

from pslite.launch.dl2_run import main

if __name__ == "__main__":
    sys.exit(main())
