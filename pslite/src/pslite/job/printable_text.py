"""Text for a terminal or a log: characters that a terminal would act on are written as escapes."""

from __future__ import annotations

import contextlib
import os
import sys


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
    """Return the text escaped, with lines after the first indented, so that none of them looks like another message."""
    return "\n    ".join(printable(line, keep="\t") for line in text.split("\n"))


def tell(program: str, text: str) -> None:
    """Write a text for the user to standard error, after the name of the program or task that says it.

    A text that cannot be written, for example because the disk is full, does not end the training: it is written with
    the next one, or lost.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{program}: {indented(text)}\n")
        sys.stderr.flush()


def flush_output() -> None:
    """Flush standard output and standard error, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def give_up_unwritten_text() -> None:
    """Drop text that cannot be written, at the end of a program: otherwise Python would change its exit status."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
