"""The timeline as a picture and as a page."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dl2d.web.timeline import Lane, Mark, Step, Timeline, render_html, ticks
from dl2d.web.timeline_png import draw_png


def lane(name: str = "job", arrived: float = 0.0, **changes: object) -> Lane:
    fields: dict[str, object] = {
        "about": "one\ntwo",
        "ended": arrived + 20.0,
        "end": "finished",
        "trained": (Step(arrived + 2, 1, 1), Step(arrived + 8, 3, 2)),
        "decided": (Step(arrived + 1, 3, 2),),
        "resizes": (Mark(arrived + 8, "1 worker became 3"),),
    }
    return Lane(name=name, arrived=arrived, **{**fields, **changes})  # type: ignore[arg-type]


def timeline(*lanes: Lane) -> Timeline:
    return Timeline(title="Title", subtitle="Sub", seconds=max([each.ended for each in lanes] or [0.0]), lanes=lanes)


class Page(HTMLParser):
    """Collects the tags and texts of a page; the text of the picture as XML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.picture = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def bars(page: Page, kind: str) -> list[tuple[float, float, float, str]]:
    """x, width, height and hover text of bars."""
    return [
        (float(each.attrib["x"]), float(each.attrib["width"]), float(each.attrib["height"]), each[0].text or "")
        for each in page.picture.iter("rect")
        if each.attrib["class"].startswith(f"bar {kind} lane-0")
    ]


def test_bars_have_the_lengths_and_heights_of_the_allocation():
    page = Page(render_html(timeline(lane()), [], []))
    whole = 1120 - 150 - 24
    first, second, *stacked = bars(page, "workers")
    assert first[0] == pytest.approx(150 + whole * 2 / 20, abs=0.02)
    assert first[1] == pytest.approx(whole * 6 / 20, abs=0.02)
    assert second[1] == pytest.approx(whole * 12 / 20, abs=0.02)
    assert second[2] == pytest.approx(3 * first[2], abs=0.02)
    assert second[3] == "job: 3 workers, 2 PSs from 8.0 s to 20.0 s"
    servers = bars(page, "servers")
    assert [each[2] for each in servers] == pytest.approx([first[2], 2 * first[2]], abs=0.02)
    assert [each[3] for each in stacked] == [
        "job: 1 of 1 workers from 2.0 s to 8.0 s", "job: 3 of 3 workers from 8.0 s to 20.0 s"
    ]  # fmt: skip


def test_totals_add_up_and_end_with_the_jobs():
    shown = timeline(lane("a"), lane("b", arrived=5.0))
    assert shown.totals() == (
        (0.0, (0, 0)), (2.0, (1, 0)), (7.0, (1, 1)), (8.0, (3, 1)), (13.0, (3, 3)), (20.0, (0, 3)), (25.0, (0, 0))
    )  # fmt: skip
    assert (shown.most_workers, shown.most_ps) == (3, 2)


def test_names_cannot_break_out_of_the_page():
    evil = "<script>alert('x')</script>\"'&"
    shown = timeline(lane(evil, about=evil, resizes=(Mark(3.0, evil),)))
    text = render_html(shown, [(evil, evil)], [{evil: evil}])
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert evil in "".join(page.words)


def test_the_page_needs_nothing_else():
    page = Page(render_html(timeline(lane()), [("resizes", "1")], [{"job": "a"}]))
    assert not {tag for tag, _ in page.tags} & {"link", "script", "img", "iframe", "object"}
    assert not any({"src", "href", "onclick", "onload"} & attributes.keys() for _, attributes in page.tags)


@pytest.mark.parametrize(
    "shown",
    [
        timeline(lane("a"), lane("b", arrived=5.0), lane("c", arrived=9.0, end="failed")),
        timeline(lane("never trained", trained=(), decided=(), resizes=())),
        timeline(*(lane(str(number), arrived=number) for number in range(9))),
    ],
    ids=["three", "untrained", "nine"],
)
def test_pictures_are_drawn_and_always_the_same(tmp_path: Path, shown: Timeline):
    draw_png(shown, tmp_path / "a.png")
    draw_png(shown, tmp_path / "b.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data == (tmp_path / "b.png").read_bytes()
    assert render_html(shown, [], []) == render_html(shown, [], [])


@pytest.mark.parametrize(("seconds", "last"), [(0.0, 0), (9.9, 9), (95.0, 90), (3600.0, 3600), (100_000.0, 97_200)])
def test_axes_are_round_and_not_crowded(seconds: float, last: int):
    found = ticks(seconds)
    assert found[0] == 0
    assert found[-1] == last
    assert seconds > 50_000 or len(found) <= 13
