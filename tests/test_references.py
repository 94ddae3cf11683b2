"""The generated references under docs/ are current, and say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dl2d.cli.main import COMMANDS

_DOCS = Path(__file__).parents[1] / "docs"
_spec = importlib.util.spec_from_file_location("references", _DOCS / "references.py")
references = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(references)


@pytest.mark.parametrize("name", references.REFERENCES)
def test_a_reference_is_current(name: str) -> None:
    assert (_DOCS / name).read_text(encoding="utf-8") == references.REFERENCES[name](), "run `make references`"


def test_defaults_ranges_and_comments_of_keys() -> None:
    rows = [line for line in references.configuration().splitlines() if line.startswith("| `")]
    keys = [row.split("`")[1] for row in rows]
    assert len(keys) == len(set(keys)) > 50
    (poll,) = (row for row in rows if "`schedule.poll_seconds`" in row)
    assert "| `15.0` | > 0, ≤ 3,600 |" in poll
    (pair,) = (row for row in rows if "`jobs.max_ps`" in row)
    assert pair.endswith("of one job (0 to 10000). |")


def test_every_command_and_its_options() -> None:
    text = references.commands()
    assert [name for name in COMMANDS if f"\n## dl2d {name}\n" not in text] == []
    assert "dl2d submit [OPTIONS] JOB.yaml" in text
    assert "| `--config CONFIG, -c CONFIG` | `/etc/dl2d/dl2d.yaml` |" in text
    assert "(one of `local`, `ray`)" in text


def test_commented_keys_count_and_a_comment_above_two_keys_is_for_both() -> None:
    text = "# One.\na: 1\nb: 2\n# Two,\n# and more.\nc:\n  # Three.\n  # d: [4]\n"
    assert references.comments(text) == {"a": "One.", "b": "One.", "c": "Two, and more.", "c.d": "Three."}
