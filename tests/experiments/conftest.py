from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from dl2d.experiments import figures
from dl2d.experiments.figures import Picture


@pytest.fixture(autouse=True)
def _drawn_where_looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests of ``reported`` look at plots, others get empty files: drawing takes most of the time of a report."""
    if "reported" not in request.fixturenames:
        monkeypatch.setattr(figures, "_save", _save_empty)


def _save_empty(folder: Path, name: str, title: str, caption: str, figure: Figure) -> Picture:
    del figure
    picture = Picture(title, caption, folder / f"{name}.png", folder / f"{name}.svg")
    picture.png.write_bytes(b"")
    picture.svg.write_text("")
    return picture
