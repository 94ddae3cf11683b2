"""``dl2d shadow``: what dl2d would have decided in mode shadow, compared with what the site's scheduler gave."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dl2d.cli.options import ConfigOption, JsonOption
from dl2d.cli.output import print_json, print_tables, table
from dl2d.config.settings import DEFAULT_PATH, load_settings
from dl2d.store.database import Place
from dl2d.store.read_only_query import shadow_comparison


def shadow(
    days: Annotated[float, typer.Option("--days", min=0.01, help="How many of the last days to compare.")] = 7.0,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many jobs to list.")] = 20,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Compare what dl2d would have decided in mode shadow with what the site's scheduler gave each job."""
    counts, jobs = shadow_comparison(Place.parse(load_settings(config).store_url), days, limit)
    if as_json:
        print_json({"days": days, "policies": counts, "jobs": jobs})
        return
    if not counts:
        typer.echo(f"no decision was recorded in mode shadow in the last {days:g} days")
        return
    for found in counts:
        typer.echo(sentence(found))
    if jobs:
        headings = (
            "job",
            "name",
            "user",
            ">decisions",
            ">different",
            ">workers given",
            ">by dl2d",
            ">PSs given",
            ">by dl2d",
        )
        print_tables("", table(headings, [[_shown(value) for value in job.values()] for job in jobs]))


def sentence(found: dict[str, Any]) -> str:
    """The comparison with one version in words."""
    total = found["decisions"]
    parts = [
        f"the same in {found['same']} ({100 * found['same'] / total:.0f} %)",
        f"more in {found['more']}",
        f"less in {found['less']}",
    ]
    if found["other"]:
        parts.append(f"other roles in {found['other']}")
    begun = f"; it would have started a waiting job in {found['started_earlier']}" if found["started_earlier"] else ""
    return (
        f"{found['policy']} {found['policy_version']}: of {total} decisions on {found['jobs']} jobs, "
        f"{', '.join(parts)}{begun}"
    )


def _shown(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
