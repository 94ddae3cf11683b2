"""How commands print: tables and sentences for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dl2d.core.json_codec import as_plain
from pslite.job.printable_text import printable

#: Width that a column which may be cut has at least, if enough other columns can be left out.
_FLEXIBLE_WIDTH = 24
#: Width of tables that do not go to a terminal: wide enough that nothing has to be cut or wrapped.
FILE_WIDTH = 400


def console() -> Console:
    """A console on standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def on_terminal() -> bool:
    """Whether standard output is a terminal: only there are colours, live tables and progress bars used."""
    return sys.stdout.isatty()


def print_json(value: object) -> None:
    """Print a value as JSON, records in it by ``as_plain``. Raises ``ValueError`` for NaN, which JSON does not have."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False, default=as_plain))


def print_text(text: str, *, err: bool = False) -> None:
    """Print text that may come from other programs; control characters except newline and tab are escaped."""
    typer.echo(printable(text, keep="\n\t"), err=err)


def print_tables(*parts: RenderableType) -> None:
    """Print tables or texts; trailing blanks are left out where no terminal is."""
    out = console()
    if out.is_terminal:
        out.print(*parts, sep="\n")
        return
    with out.capture() as captured:
        out.print(*parts, sep="\n")
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    dispensable: Sequence[str] = (),
) -> Table:
    """A plain table.

    Headings that begin with ``>`` stand over columns of numbers. Where some begin with ``~``, each row keeps to one
    line of a terminal, at the cost of these columns alone as long as that is enough; elsewhere long texts are wrapped.
    Where these would become too narrow, ``dispensable`` columns are left out, the first one first.
    """
    rows = list(rows)
    kept = _columns_that_fit(headings, rows, dispensable, console().width)
    headings, rows = [headings[place] for place in kept], [[row[place] for place in kept] for row in rows]
    made = Table(box=None, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    flexible = [heading.startswith("~") for heading in headings]
    for heading, may_be_cut in zip(headings, flexible, strict=True):
        right = heading.startswith(">")
        made.add_column(
            heading.lstrip(">~"),
            justify="right" if right else "left",
            no_wrap=right or (any(flexible) and not may_be_cut),
            overflow="ellipsis" if any(flexible) else "fold",
        )
    for row in rows:
        # Text from users is shown as it is, on one line: what looks like rich's mark-up, or a terminal's, must not be
        # taken for it, and what follows a newline not for another row.
        cells = (
            cell if isinstance(cell, Text) else Text(printable(cell.replace("\n", " / "), keep="\t")) for cell in row
        )
        made.add_row(*(_one_line(cell) if cut else cell for cell, cut in zip(cells, flexible, strict=True)))
    return made


def _columns_that_fit(
    headings: Sequence[str], rows: Sequence[Sequence[str | Text]], dispensable: Sequence[str], width: int
) -> list[int]:
    """The places of the columns for which a terminal of this width has room, as far as others can be left out."""
    names = [heading.lstrip(">~") for heading in headings]
    widths = [max(cell_len(str(row[place])) for row in (names, *rows)) for place in range(len(headings))]
    needed = [
        min(width, _FLEXIBLE_WIDTH) if heading.startswith("~") else width
        for heading, width in zip(headings, widths, strict=True)
    ]
    kept = list(range(len(headings)))
    for name in dispensable:
        if sum(needed[place] + 1 for place in kept) - 1 <= width:
            break
        kept.remove(names.index(name))
    return kept


def _one_line(cell: Text) -> Text:
    cell.no_wrap, cell.overflow = True, "ellipsis"
    return cell


def moment(at: float | None) -> str:
    """A time for people, in the local zone; ``-`` for none."""
    if not at:
        return "-"
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """A length of time for people: ``42 s``, ``7 min 5 s``, ``3 h 20 min``, ``2 d 4 h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    for size, unit, smaller, smaller_unit in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    raise AssertionError


def number(value: float | None) -> str:
    """A measured value to three significant digits; ``-`` for none."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
