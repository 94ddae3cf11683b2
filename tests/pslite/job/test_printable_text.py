from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pslite.job.printable_text import indented, printable


def test_what_a_terminal_would_act_on_is_escaped():
    assert printable("Grüße, 学\n") == "Grüße, 学\\n"
    assert printable("a\x1b[2J\x07\x9b31m\u202e\ud800\tb", keep="\t") == "a\\x1b[2J\\x07\\x9b31m\\u202e\\ud800\tb"
    assert indented("one\ndl2-run: two\r\x1b[A") == "one\n    dl2-run: two\\r\\x1b[A"


@given(st.text())
def test_nothing_else_is_left(text):
    escaped = printable(text)
    assert escaped.isprintable()
    escaped.encode()


def test_training_goes_on_where_its_output_cannot_be_written():
    program = (
        "import sys\n"
        "from pslite.job.printable_text import flush_output, give_up_unwritten_text, tell\n"
        "for number in range(3000):\n"
        "    tell('dl2-run', f'epoch {number} done')\n"
        "flush_output()\n"
        "give_up_unwritten_text()\n"
        "print('at the end')\n"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (0, "at the end\n")
