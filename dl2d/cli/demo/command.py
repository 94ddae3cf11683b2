"""``dl2d demo``: the command."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from dl2d.cli.demo.facts import Facts, JobFacts, collect, suspension
from dl2d.cli.demo.reference import References
from dl2d.cli.demo.script import FAST, FULL
from dl2d.cli.demo.site import NODES, DemoFailed, Site
from dl2d.cli.demo.stage import Stage
from dl2d.cli.extras import require_extra
from dl2d.cli.options import JsonOption
from dl2d.cli.output import FILE_WIDTH, print_json, table
from dl2d.config.files import shipped
from dl2d.core.errors import Dl2dError
from dl2d.core.jobs import JobState

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the pictures and facts.")] = Path("demo-out"),
    fast: Annotated[bool, typer.Option("--fast", help="Shorter jobs, half a minute in all.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the daemon's folder: database, logs, output.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train three real jobs at once on this machine, resize them meanwhile, and compare with runs that never change."""
    require_extra("demo")
    terminal = (sys.stderr if as_json else sys.stdout).isatty()
    console = Console(stderr=as_json, highlight=False, width=None if terminal else FILE_WIDTH)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    script = FAST if fast else FULL
    shipped("examples/train_digits.py")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Dl2dError(f"--out {out}: {error.strerror}") from error
    site = Site(script, keep=keep)
    try:
        with _signals_as_interrupts(), site, References(site.folder) as references:
            say(f"dl2d on {NODES} nodes played by this machine, at http://127.0.0.1:{site.settings.api.port}")
            stage = Stage(site, references, script, console=console, say=say)
            played = stage.play()
            digests = {act.name: references.digest(act) for act in script.acts}
            facts = collect(site.store, [(each.act, each.job, each.arrived) for each in played], digests, stage.began)
            for job in facts.jobs:
                _explain(job, site, references, say_error=lambda text: typer.echo(text, err=True))
            site.wait_until_empty()
    except KeyboardInterrupt:
        typer.echo("dl2d: interrupted; nothing is left running", err=True)
        raise typer.Exit(1) from None
    if keep:
        say(f"the daemon's folder is {site.folder}")
    files = _write(facts, out)
    if as_json:
        print_json({**facts.as_json(), "left_running": site.left_over, "files": {k: str(v) for k, v in files.items()}})
    else:
        _summarize(facts, console)
        say(f"pictures: {files['png']} and {files['html']}; facts: {files['json']}")
    if site.left_over:
        raise DemoFailed(f"{site.left_over} tasks had outlived their jobs and were ended now")
    if not facts.good:
        raise typer.Exit(1)


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and a closed terminal end the demo as Ctrl-C does; once it ends, no further signal disturbs that."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        for each in (*_ENDING_SIGNALS, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (*_ENDING_SIGNALS, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(facts: JobFacts, site: Site, references: References, say_error: object) -> None:
    assert callable(say_error)
    job = facts.job
    if job.state is not JobState.FINISHED:
        say_error(f"job {job.key.id} ({facts.act.name}) {job.state}: {job.end_reason}\n{site.output_of(job.key)}")
    if not facts.static_digest:
        say_error(f"the static run of {facts.act.name} failed:\n{references.said(facts.act)}")
    elif not facts.equal:
        say_error(f"{facts.act.name}: weights {job.digest or '(none)'} differ from the static {facts.static_digest}")


def _write(facts: Facts, out: Path) -> dict[str, Path]:
    # Here and not above: matplotlib takes a second to load, which no other command should pay for.
    from dl2d.web.timeline import render_html  # noqa: PLC0415
    from dl2d.web.timeline_png import draw_png  # noqa: PLC0415

    files = {kind: out / f"timeline.{kind}" for kind in ("png", "html", "json")}
    timeline = facts.timeline()
    middle, longest = facts.suspension
    headings = [
        ("all jobs done", f"{facts.seconds:.0f} s"),
        ("resizes", str(facts.resizes)),
        ("suspension, median", f"{middle:.2f} ms"),
        ("suspension, longest", f"{longest:.2f} ms"),
        ("weights as static runs", "all equal" if facts.good else "DIFFERENT"),
        ("decisions taken", str(facts.slots)),
    ]
    jobs = [dict(zip(_HEADINGS, _row(job), strict=True)) for job in facts.jobs]
    try:
        draw_png(timeline, files["png"])
        files["html"].write_text(render_html(timeline, headings, jobs), encoding="utf-8")
        files["json"].write_text(json.dumps(facts.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise Dl2dError(f"{out}: {error.strerror}: the pictures cannot be written") from error
    return files


_HEADINGS = (
    "job", "end", "completion", "updates", "loss", "resizes", "suspension p50 / max", "weights equal static run",
)  # fmt: skip


def _row(facts: JobFacts) -> tuple[str, ...]:
    middle, longest = suspension(facts.resizes)
    loss = facts.job.progress.loss
    return (
        facts.act.name,
        str(facts.job.state),
        f"{facts.seconds:.1f} s",
        str(facts.job.progress.version),
        "-" if loss is None else f"{loss:.4f}",
        str(len(facts.resizes)),
        f"{middle:.2f} / {longest:.2f} ms",
        f"yes ({facts.job.digest[:12]})" if facts.equal else "NO",
    )


def _summarize(facts: Facts, console: Console) -> None:
    console.print()
    console.print(table([heading.upper() for heading in _HEADINGS], map(_row, facts.jobs)))
    console.print()
    middle, longest = facts.suspension
    console.print(
        f"{facts.resizes} resizes in {facts.seconds:.0f} s; workers waited {middle:.2f} ms per resize at the median, "
        f"{longest:.2f} ms at most",
        markup=False,
    )
    sys.stdout.flush()
