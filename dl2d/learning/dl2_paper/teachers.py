"""Built-in policies that can be imitated."""

from __future__ import annotations

from typing import Final

#: Policies of preset ``dl2-paper`` that can be imitated; Optimus and lookahead are given the true speeds.
TEACHERS: Final = ("drf", "fifo", "srtf", "tetris", "optimus", "lookahead")
#: Policies that leave some jobs without tasks while others are served whole: a first bundle for every job, which is not
#: theirs, would change them.
SERVE_WHOLE: Final = frozenset({"fifo", "srtf", "tetris"})
