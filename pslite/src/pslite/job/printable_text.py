"""Text for a terminal or a log: escapes for what others wrote, and where the threads of a process are."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import traceback


def printable(text: str, *, keep: str = "") -> str:
    """Return the text with every character that a terminal would act on, or not show, as its escape.

    Those are control characters, marks that change the direction of writing, and halves of surrogate pairs. Characters
    of `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )


def indented(text: str) -> str:
    """Return the text escaped, with lines after the first indented, so that none of them looks like a line of ours."""
    return "\n    ".join(printable(line, keep="\t") for line in text.split("\n"))


def tell(program: str, text: str) -> None:
    """Write a text for the user to standard error, after the name of the program or task that says it."""
    sys.stderr.write(f"{program}: {indented(text)}\n")
    sys.stderr.flush()


def dump_stacks() -> None:
    """Write the stacks of all threads of this process to standard error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a notebook's has no descriptor
        faulthandler.dump_traceback(sys.stderr, all_threads=True)


def place_of(thread: int) -> str:
    """Return where a thread is, as "train.py:12 in load"; empty if it has ended."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001  (documented, for debuggers)
    if frame is None:
        return ""
    found = traceback.extract_stack(frame)[-1]
    return f"{found.filename}:{found.lineno} in {found.name}"
