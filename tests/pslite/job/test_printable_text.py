from __future__ import annotations

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
