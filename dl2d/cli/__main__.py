"""``python -m dl2d.cli``: the same as ``dl2d``, where its script is not at hand."""

from __future__ import annotations

from dl2d.cli.main import run

run()
