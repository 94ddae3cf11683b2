from __future__ import annotations

import pytest

from dl2d.cli.progress_bars import shown_progress


def test_without_a_terminal_progress_is_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with shown_progress(lambda: now[0]) as tell:
        for done in range(26):
            now[0] = float(done)
            tell("jobs replayed", done, 40, "of two days" if done == 20 else "")
    assert capsys.readouterr().err.splitlines() == [
        "jobs replayed: 10 of 40 after 10 s",
        "jobs replayed: 20 of 40 after 20 s, of two days",
    ]
